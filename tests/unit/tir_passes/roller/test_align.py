"""The alignment rules, each alone and behind `Aligner.next_size` (paper §3.1)."""

from __future__ import annotations

import pytest

from tests.support.tensor_exprs import conv2d, elementwise, matmul
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices import device_db
from tvm_ext.records.rprogram import RTile
from tvm_ext.tir_passes.roller.align import (
    ALL_RULES,
    Aligner,
    next_shape_aligned,
    padding_waste,
    tensor_core_steps,
    transaction_step,
)

V100 = device_db.lookup("nvidia-v100")
AVX512 = device_db.lookup("cpu-avx512")


def tile(**sizes: int) -> RTile:
    return RTile(axes=tuple(sizes), shape=tuple(sizes.values()))


def next_sizes(
    model: PerfModel,
    level: int,
    present: RTile,
    rules: frozenset[str] = ALL_RULES,
    epsilon: float = 0.0,
    upper: RTile | None = None,
) -> dict[str, int | None]:
    """The next aligned size of each axis of ``present``, None past its end."""
    aligner = Aligner(model, level, None if upper is None else upper.shape, rules, epsilon)
    return {name: aligner.next_size(present.shape, axis) for axis, name in enumerate(present.axes)}


@pytest.mark.parametrize(
    ("extent", "size", "waste"), [(1000, 64, 0.024), (1000, 8, 0.0), (7, 16, 9 / 7), (49, 14, 7 / 49)]
)
def test_padding_waste(extent: int, size: int, waste: float):
    assert padding_waste(extent, size) == pytest.approx(waste)


def test_shape_rule_without_padding_gives_divisors():
    sizes, size = [], next_shape_aligned(60, 1, 1, 0.0)
    while size is not None and size < 60:
        sizes.append(size)
        size = next_shape_aligned(60, size + 1, 1, 0.0)
    assert sizes == [n for n in range(1, 60) if 60 % n == 0]


def test_shape_rule_skips_what_wastes_too_much():
    assert next_shape_aligned(49, 14, 7, 0.0) == 49
    assert next_shape_aligned(49, 14, 7, 0.15) == 14
    assert next_shape_aligned(83, 2, 1, 0.0) == 83
    assert next_shape_aligned(83, 2, 1, 0.02) == 2


def test_transaction_rule_follows_the_leading_dimension():
    model = PerfModel(matmul(64, 64, 64), V100)
    steps = [transaction_step(model, 1, axis) for axis in range(3)]
    assert steps == [1, 8, 8]  # 32 bytes hold 8 floats: j leads B and C, k leads A
    strided = PerfModel(conv2d(1, 8, 28, 28, 8, (3, 3), stride=2), V100)
    assert transaction_step(strided, 1, 3) == 8  # w leads Y in steps of 8 and X, as 2*w, in steps of 4


def test_registers_take_one_reduction_step_and_whole_vectors():
    sizes = next_sizes(PerfModel(matmul(64, 64, 64), AVX512, "j"), 0, tile(i=4, j=32, k=1))
    assert sizes == {"i": 8, "j": 64, "k": None}


def test_threadblocks_grow_by_whole_warps():
    upper = tile(i=8, j=8, k=1)
    sizes = next_sizes(PerfModel(matmul(1024, 1024, 1024), V100), 1, tile(i=32, j=64, k=8), upper=upper)
    for axis, size in sizes.items():
        grown = {"i": 32, "j": 64, axis: size}
        assert (grown["i"] // 8) * (grown["j"] // 8) % 32 == 0


def test_rules_switch_off_one_by_one():
    model, upper = PerfModel(matmul(1024, 1024, 1024), V100), tile(i=8, j=6, k=1)
    present = tile(i=32, j=48, k=8)
    aligned = next_sizes(model, 1, present, ALL_RULES, 1.0, upper)
    no_memory = next_sizes(model, 1, present, ALL_RULES - {"memory"}, 1.0, upper)
    no_rules = next_sizes(model, 1, present, frozenset(), 0.0, upper)
    assert aligned["k"] == 16
    assert no_memory["k"] == 10  # a quarter more, not a multiple of 8
    assert aligned["j"] is not None
    assert aligned["j"] % 24 == 0
    assert no_rules["j"] == 60
    assert no_rules["i"] == 40  # 5 x 8 threads are no whole warps


def test_a_gpu_tile_stops_at_the_whole_axis():
    sizes = next_sizes(PerfModel(elementwise(64), V100), 1, tile(d0=64), upper=tile(d0=1))
    assert sizes == {"d0": None}


def test_tensor_core_rule():
    assert tensor_core_steps(matmul(64, 64, 64, "float16"), V100) == {"i": 16, "j": 16, "k": 16}
    assert tensor_core_steps(matmul(64, 64, 64), V100) is None
    assert tensor_core_steps(elementwise(64), V100) is None
    model = PerfModel(matmul(96, 96, 96, "float16"), V100)
    model.tensor_core = True
    sizes = next_sizes(model, 0, tile(i=16, j=16, k=16))
    assert sizes == {"i": 32, "j": 32, "k": None}


def test_start_rounds_up_to_the_first_aligned_tile():
    model = PerfModel(matmul(1000, 1000, 1000), AVX512, "j")
    assert Aligner(model, 0, None, ALL_RULES, 0.1).start((1, 1, 1)) == (1, 16, 1)


def test_thread_limits():
    model = PerfModel(matmul(4096, 4096, 64), V100)
    aligner = Aligner(model, 1, (8, 8, 1), ALL_RULES, 0.0)
    assert aligner.threads_fit((128, 128, 8))
    assert not aligner.threads_fit((512, 512, 8))


def test_threads_of_all_registers_can_be_started():
    """Of 96 registers a unit holds 20 warps; 21 would be 64512 registers of 65536, but are counted as 24."""
    aligner = Aligner(PerfModel(matmul(4096, 4096, 64), V100), 1, (8, 8, 1), ALL_RULES, 0.0)
    assert aligner.threads_fit((160, 256, 8))
    assert not aligner.threads_fit((168, 256, 8))
