"""The depth of pipelines: predicted, within what fits, reduced with a reason where it was asked for and does not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tvm_ext.cost.pipeline_model import predict
from tvm_ext.cost.pipeline_workload import PipelineWorkload
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.tir_passes.pipelining.choose_stages import TIE, choose_stages

A100 = device_db.lookup("nvidia-a100")


def matmul(rows: int, columns: int, depth: int, tile: int = 64, warp: int = 32, step: int = 64) -> PipelineWorkload:
    """A half-precision product in square tiles, of two warps' sides each, in steps of ``step``."""
    blocks = -(-rows // tile) * -(-columns // tile)
    warps = (tile // warp) ** 2
    fragments = 2 * warp * 16 * 2
    return PipelineWorkload(
        blocks=blocks, warps_per_block=warps, other_shared_bytes=0, stage_bytes=2 * tile * step * 2,
        registers_per_thread=warp * warp // 32 + fragments // 128 + 40, register_stage_registers=fragments // 128,
        shared_trips=-(-depth // step), register_trips=step // 16, flops_per_register_trip=2.0 * tile * tile * 16,
        bytes_per_shared_trip=2.0 * tile * step * 2, shared_bytes_per_register_trip=float(fragments * warps),
        output_bytes_per_block=tile * tile * 4.0, workset_bytes=2.0 * tile * step * 2 * max(1.0, blocks**0.5),
        workset_blocks=blocks, throughput="float16_tensor",
    )  # fmt: skip


LONG = matmul(512, 768, 3072)  # ALCOP's MM_BERT_FC2: 96 tiles for 108 units
SHORT = matmul(1024, 1024, 64)


def test_long_reductions_of_few_tiles_gain_by_depth_at_both_levels() -> None:
    choice = choose_stages(LONG, A100)
    assert choice.shared_stages >= 3
    assert choice.register_stages >= 2
    assert choice.speedup > 1.5
    assert choice.notes == ()


def test_one_iteration_is_not_pipelined() -> None:
    choice = choose_stages(SHORT, A100)
    assert choice.shared_stages == 1
    assert choice.speedup == pytest.approx(1.0, abs=0.1)


def test_the_choice_is_the_best_of_all_within_a_percent() -> None:
    choice = choose_stages(LONG, A100)
    legal = [predict(LONG, A100, n, r).time_s for n in range(1, 9) for r in (1, 2, 4)]
    assert min(legal) <= choice.latency.time_s <= min(legal) * (1 + TIE)
    assert choice.latency == predict(LONG, A100, choice.shared_stages, choice.register_stages)
    assert choice.unpipelined == predict(LONG, A100, 1, 1)


def test_among_equals_the_smallest() -> None:
    """Arithmetic binds from three stages on: the fourth would cost 16 KiB for nothing."""
    heavy = replace(LONG, flops_per_register_trip=LONG.flops_per_register_trip * 10)
    choice = choose_stages(heavy, A100)
    deeper = predict(heavy, A100, choice.shared_stages + 1, choice.register_stages)
    assert deeper.time_s == pytest.approx(choice.latency.time_s, rel=TIE)
    assert choice.latency.shared_bytes < deeper.shared_bytes


def test_a_depth_that_does_not_fit_is_reduced_and_said() -> None:
    choice = choose_stages(replace(LONG, stage_bytes=24 * 1024), A100, fixed_shared=8)
    assert choice.shared_stages == 6
    assert choice.notes == ("8 stages of 24 KiB do not fit: 163 KiB of nvidia-a100 hold 6",)


def test_a_depth_that_fits_is_taken_as_it_is() -> None:
    choice = choose_stages(LONG, A100, fixed_shared=5, fixed_register=4)
    assert (choice.shared_stages, choice.register_stages, choice.notes) == (5, 4, ())


@pytest.mark.parametrize(("trips", "stages"), [(2, 2), (3, 3)])
def test_trips_limit_the_stages(trips: int, stages: int) -> None:
    choice = choose_stages(replace(LONG, shared_trips=trips), A100, fixed_shared=4)
    assert choice.shared_stages == stages
    assert choice.notes == (f"4 stages of 16 KiB are reduced to {trips}: so many iterations has the loop",)
    assert choose_stages(replace(LONG, shared_trips=trips), A100).shared_stages <= trips


def test_synchronous_copies_have_two_stages_and_hold_a_tile_in_registers() -> None:
    small = matmul(512, 768, 3072)
    choice = choose_stages(small, A100, asynchronous=False)
    assert choice.shared_stages == 2
    assert choice.latency.registers > predict(small, A100, 2, choice.register_stages).registers
    reduced = choose_stages(small, A100, fixed_shared=4, asynchronous=False)
    assert reduced.shared_stages == 2
    assert "without asynchronous copies" in reduced.notes[0]


@pytest.mark.parametrize(("trips", "asked", "given"), [(4, 3, 2), (6, 4, 3), (5, 4, 1), (2, 4, 2)])
def test_register_stages_divide_the_inner_loop(trips: int, asked: int, given: int) -> None:
    workload = replace(LONG, register_trips=trips)
    choice = choose_stages(workload, A100, fixed_register=asked)
    assert choice.register_stages == given
    assert f"{asked} stages of registers are reduced to {given}" in choice.notes[0]
    assert trips % choose_stages(workload, A100).register_stages == 0


def test_registers_limit_fixed_stages() -> None:
    choice = choose_stages(replace(LONG, registers_per_thread=245), A100, fixed_shared=3, fixed_register=4)
    assert (choice.shared_stages, choice.register_stages) == (3, 1)
    assert "exceed the registers of nvidia-a100; reduced to 3 with 1" in choice.notes[0]


def test_no_fragments_no_register_stages() -> None:
    assert choose_stages(replace(LONG, register_stage_registers=0), A100).register_stages == 1


def test_nothing_fits() -> None:
    with pytest.raises(IllegalRewrite, match="shared memory exceed"):
        choose_stages(replace(LONG, other_shared_bytes=200 * 1024), A100)


@pytest.mark.parametrize("name", ["nvidia-k80", "amd-mi50", "nvidia-t4", "opencl"])
def test_every_gpu_has_an_answer(name: str) -> None:
    device: DeviceSpec = device_db.lookup(name)
    small = replace(matmul(512, 768, 3072), throughput="float32")
    choice = choose_stages(small, device, asynchronous=False)
    assert choice.shared_stages in (1, 2)
    assert any("not known" in note for note in choice.notes) == (name != "opencl")


def test_it_takes_milliseconds() -> None:
    start = time.thread_time()
    for _ in range(10):
        choose_stages(LONG, A100)
    assert (time.thread_time() - start) / 10 < 0.005
