"""ConstructProg: programs obey capacity and alignment, partitions fill the units, and every step is explained."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest

from benchmarks._ablated import construct_ablated
from tests.support.alignment_facts import alignment_facts
from tests.support.tensor_exprs import (
    access,
    conv2d,
    depthwise_conv2d,
    elementwise,
    matmul,
    pool2d,
    reduce_sum,
    roller_operators,
)
from tvm_ext.analysis.tensor_expr import Access, LinearIndex, TensorExpr
from tvm_ext.cost.cpu_tiles import legal_vector_axes
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices import device_db
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.tir_passes.roller import cpu_loops
from tvm_ext.tir_passes.roller.align import ALL_RULES
from tvm_ext.tir_passes.roller.canonical import canonicalise
from tvm_ext.tir_passes.roller.construct import construct

V100 = device_db.lookup("nvidia-v100")
AVX512 = device_db.lookup("cpu-avx512")
NEARLY = 1.1  # programs of register tiles are ranked with the terms of load_ports.py beside
WORKLOAD = Path(__file__).resolve().parents[4] / "benchmarks" / "workloads" / "roller_ops.csv"

OPERATORS = [
    matmul(1024, 1024, 1024),
    matmul(1, 1000, 2048),
    matmul(7, 13, 11),
    matmul(128, 64, 32, transpose_b=True),
    conv2d(1, 64, 56, 56, 64, (3, 3), constant=True),
    conv2d(8, 512, 7, 7, 512, (1, 1), constant=True),
    conv2d(1, 3, 112, 112, 64, (7, 7), stride=2, constant=True),
    depthwise_conv2d(1, 32, 28, 28, (3, 3)),
    pool2d(1, 64, 28, 28, (3, 3), stride=2),
    elementwise(17, 11, 3),
    reduce_sum(1000, 1000),
    elementwise(1),
]
DEVICES = [
    "cpu-avx512",
    "cpu-avx2",
    "cpu-neon",
    "nvidia-v100",
    "nvidia-k80",
    "nvidia-h200",
    "amd-mi50",
    "graphcore-ipu",
]


def names(expressions: list[TensorExpr]) -> list[str]:
    return [expr.name for expr in expressions]


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("expr", OPERATORS, ids=names(OPERATORS))
def test_every_program_fits_its_layers_and_nests(expr: TensorExpr, device: str):
    spec = device_db.lookup(device)
    programs = construct(expr, spec, k=4).programs
    assert programs
    for program in programs:
        tiles = [tile for _, tile in program.tiles]
        assert [name for name, _ in program.tiles] == [layer.name for layer in spec.layers[:-1]]
        for upper, lower in pairwise(tiles):
            assert all(
                u <= max(below, expr.axis(axis).extent)
                for axis, u, below in zip(upper.axes, upper.shape, lower.shape, strict=True)
            )
        assert set(tiles[0].axes) == {axis.name for axis in expr.axes}
        assert program.unit_count == min(spec.unit_count, program.partition_count)
        assert program.prediction.time_s > 0
        canonical = canonicalise(expr, fuse=False).expr
        assert alignment_facts(canonical, program, spec)["capacity"]


@pytest.mark.parametrize("expr", OPERATORS, ids=names(OPERATORS))
def test_programs_are_ranked_distinct_and_round_trip(expr: TensorExpr):
    programs = construct(expr, AVX512, k=10).programs
    times = [program.prediction.time_s for program in programs]
    assert times[0] <= NEARLY * min(times)
    assert len({(p.vector_axis, p.tiles) for p in programs}) == len(programs)
    assert all(from_json(RProgram, to_json(program)) == program for program in programs)


def test_construction_is_deterministic():
    expr = conv2d(1, 64, 28, 28, 128, (3, 3), constant=True)
    assert construct(expr, AVX512).programs == construct(expr, AVX512).programs


def test_v100_matmul_is_roller_like():
    program = construct(matmul(65536, 1024, 1024), V100, k=1).programs[0]
    thread, block = program.tile("L0").sizes, program.tile("L1").sizes
    threads = prod(block[axis] // thread[axis] for axis in "ij")
    assert threads % 32 == 0
    assert threads <= 1024
    assert block["k"] % 8 == 0
    assert block["j"] % 8 == 0
    assert program.prediction.bound == "compute"
    assert program.prediction.time_s < 2 * program.prediction.compute_s


def test_all_operators_of_the_paper_are_aligned_on_a_v100():
    for name, expr in roller_operators(WORKLOAD):
        construction = construct(canonicalise(expr).expr, V100, k=1)
        facts = alignment_facts(construction.canonical.expr, construction.programs[0], V100)
        assert all(holds is not False for holds in facts.values()), (name, facts)


def test_the_workload_has_the_papers_119_operators():
    assert len(roller_operators(WORKLOAD)) == 119


def test_cpu_register_tile_uses_most_registers_and_hides_latency():
    program = construct(matmul(1024, 1024, 1024), AVX512, k=1).programs[0]
    tile = program.tile("L0").sizes
    assert program.vector_axis == "j"
    assert tile["j"] % 16 == 0
    assert tile["k"] == 1
    assert 8 <= tile["i"] * tile["j"] // 16 <= 30
    assert program.tile("L1").sizes["k"] == 1024  # the reduction stays on one unit


def test_cpu_reduction_that_exceeds_a_cache_is_streamed_not_split():
    construction = construct(matmul(512, 512, 65536), AVX512, k=1)
    assert construction.programs[0].tile("L1").sizes["k"] == 65536
    assert {step.outcome for step in construction.steps} == {"ranked"}


def test_vector_axis_is_chosen_by_the_model_among_legal_ones():
    expr = conv2d(1, 256, 7, 7, 512, (1, 1), constant=True)
    best = construct(expr, AVX512, k=1).programs[0]
    assert best.vector_axis == "f"  # rows of 7 would leave 9 of 16 lanes empty
    assert {item.vector_axis for item in construct(expr, AVX512, k=1000).programs} == {"f"}


def test_weights_that_are_not_constant_cannot_be_repacked():
    expr = conv2d(1, 8, 32, 32, 3, (3, 3), constant=False)
    assert construct(expr, AVX512, k=1).programs[0].vector_axis == "w"


def test_scale_out_shrinks_small_operators_until_the_units_have_work():
    expr = matmul(128, 1000, 2048)
    program = construct(expr, V100, k=1).programs[0]
    assert program.shrunk
    assert program.partition_count >= 0.9 * V100.unit_count
    original = construct_ablated(expr, V100, k=1, shrink_small=False).programs[0]
    assert not original.shrunk
    assert original.prediction.time_s > program.prediction.time_s


def test_a_window_that_llvm_would_spill_is_not_chosen():
    """64 filters by 6 columns carry 5 columns from tap to tap: 34 registers. By 6 rows they carry none: 29."""
    for program in construct(conv2d(1, 128, 28, 28, 128, (3, 3), constant=True), AVX512, k=20).programs:
        model = PerfModel(conv2d(1, 128, 28, 28, 128, (3, 3), constant=True), AVX512, program.vector_axis)
        tile = program.tile("L0").sizes
        assert model.core.registers(tuple(tile.get(name, 1) for name in model.names)) <= AVX512.register_limit


def test_elementwise_is_streamed_over_whole_warps():
    construction = construct(canonicalise(elementwise(128, 64, 56, 56)).expr, V100, k=1)
    assert {step.outcome for step in construction.steps} == {"streamed"}
    assert construction.programs[0].tile("L1").shape == (128,)  # a warp for each of the 4 TEUs


def test_epsilon_grows_until_irregular_shapes_have_programs():
    """Nothing but 97 divides 97: without padding a threadblock cannot be whole warps."""
    expr = matmul(97 * 4, 89 * 4, 83)
    assert not construct_ablated(matmul(97, 89, 83), V100, epsilon=0.0).programs
    best = construct(matmul(97, 89, 83), V100, k=10).programs[0]
    assert best.epsilon > 0
    assert construct(expr, V100, k=10).programs


def test_more_rules_never_leave_fewer_checks_satisfied():
    """The ablation of Table 3: without a rule, its fact may fail; with all rules none does."""
    expr = matmul(1000, 1000, 1000)
    without_memory = construct_ablated(expr, V100, k=10, rules=frozenset({"unit", "shape", "bank"})).programs
    facts = [alignment_facts(expr, program, V100) for program in without_memory]
    assert any(fact["memory"] is False for fact in facts)
    assert all(alignment_facts(expr, p, V100)["memory"] for p in construct(expr, V100, k=10).programs)


def test_without_bank_rule_conflicts_are_charged():
    expr = matmul(4096, 4096, 4096)
    padded = construct(expr, V100, k=1).programs[0]
    plain = construct_ablated(expr, V100, k=1, rules=ALL_RULES - {"bank"}).programs[0]
    assert not plain.tile("L1").storage_padding
    assert padded.prediction.time_s < plain.prediction.time_s


def test_tensor_core_programs_are_made_of_fragments():
    for program in construct(matmul(1024, 1024, 1024, "float16"), V100, k=10).programs:
        assert all(size % 16 == 0 for size in program.tile("L0").shape)


def test_steps_explain_the_best_program():
    construction = construct(matmul(1024, 1024, 1024), V100, k=3)
    steps, best = construction.steps, construction.programs[0]
    assert {step.layer for step in steps} == {"L0", "L1"}
    for step in steps:
        if step.outcome == "enlarged":
            assert step.footprint_bytes <= step.capacity_bytes
        if step.outcome == "over capacity":
            assert step.footprint_bytes > step.capacity_bytes
        if step.outcome == "memory keeps up":
            assert step.mem_perf_gflops > step.max_compute_gflops
    assert all(alternative.reason for alternative in construction.rejected)
    assert all(a.program.prediction.time_s >= best.prediction.time_s for a in construction.rejected)


def test_axis_fusion_of_the_papers_example():
    form = canonicalise(elementwise(17, 11, 3))
    assert [axis.extent for axis in form.expr.axes] == [561]
    assert dict(form.groups)["d0*d1*d2"] == ("d0", "d1", "d2")
    assert form.expr.output.shape == (561,)


def test_axis_fusion_of_a_pointwise_convolution():
    form = canonicalise(conv2d(8, 64, 14, 14, 32, (1, 1)))
    assert [(axis.name, axis.extent) for axis in form.expr.axes] == [("n", 8), ("f", 32), ("h*w", 196), ("c", 64)]
    assert form.dropped == ("r", "s")
    assert form.expr.flops == conv2d(8, 64, 14, 14, 32, (1, 1)).flops


def test_axes_that_another_tensor_separates_stay_apart():
    assert len(canonicalise(conv2d(8, 64, 14, 14, 32, (3, 3))).expr.axes) == 7
    assert len(canonicalise(matmul(4, 5, 6)).expr.axes) == 3
    gap = replace(elementwise(4, 8), inputs=(access("X", (4, 10), ("d0", "d1")),))
    assert len(canonicalise(gap).expr.axes) == 2


def test_axes_of_a_gather_stay_as_they_are() -> None:
    """table[rows[i], 0, j] + x[i, j]: i chooses the row, so (i, j) is no run, though x and the output allow it."""
    plain = elementwise(6, 8)
    outer, inner = (axis.name for axis in plain.axes)
    table = Access(
        tensor="table",
        shape=(100, 1, 8),
        dtype="float32",
        itemsize_bytes=4,
        indices=(None, LinearIndex(terms=()), LinearIndex(terms=((inner, 1),))),
        gathers=((outer,), (), ()),
    )
    form = canonicalise(replace(plain, inputs=(*plain.inputs, table))).expr
    assert [axis.extent for axis in form.axes] == [6, 8]
    assert form.inputs[-1] == table


def test_axes_beside_a_gather_are_fused() -> None:
    """table[rows[i], j, k]: (j, k) is one run of memory in the table too; i keeps its place in ``gathers``."""
    plain = elementwise(6, 2, 4)
    first, second, third = (axis.name for axis in plain.axes)
    table = Access(
        tensor="table",
        shape=(100, 1, 2, 4),
        dtype="float32",
        itemsize_bytes=4,
        indices=(None, LinearIndex(terms=()), LinearIndex(terms=((second, 1),)), LinearIndex(terms=((third, 1),))),
        gathers=((first,), (), (), ()),
    )
    form = canonicalise(replace(plain, inputs=(*plain.inputs, table))).expr
    assert [axis.extent for axis in form.axes] == [6, 8]
    assert form.inputs[-1].shape == (100, 8)
    assert form.inputs[-1].gathers == ((first,), ())


def test_a_dropped_axis_chooses_one_position() -> None:
    """One row of a table: the axis of extent 1 is gone, and a tile still touches one row of 100."""
    plain = elementwise(1, 8)
    outer, inner = (axis.name for axis in plain.axes)
    table = Access(
        tensor="table",
        shape=(100, 8),
        dtype="float32",
        itemsize_bytes=4,
        indices=(None, LinearIndex(terms=((inner, 1),))),
        gathers=((outer,), ()),
    )
    form = canonicalise(replace(plain, inputs=(*plain.inputs, table))).expr
    assert form.inputs[-1].tile_shape({form.axes[0].name: 8}) == (1, 8)


@pytest.mark.parametrize("units", [1, 2, 12])
def test_compared_register_tiles_are_the_first_of_all(units: int) -> None:
    device, seen = replace(AVX512, unit_count=units), 0
    for expr in OPERATORS:
        expr = canonicalise(expr, fuse=False).expr
        models = [PerfModel(expr, device, axis) for axis in legal_vector_axes(expr, device)]
        models = [model for model in models if cpu_loops.has_register_tiles(model)]
        every = sorted(
            (cpu_loops._even_compute_s(model, tile), tile, place)
            for place, model in enumerate(models)
            for tile in cpu_loops._whole_vectors(model)
        )
        first = [(tile, place) for _, tile, place in every[: cpu_loops.COMPARED_TILES]]
        assert cpu_loops._compared_tiles(models) == first
        seen += len(every) > len(first) > 0
    assert seen >= 5
