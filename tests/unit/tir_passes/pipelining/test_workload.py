"""What is counted in a kernel's loops, against what the emitter's tiles say and against counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.pipelining.products import matmul
from tests.support.pipelining.schedules import metaschedule_matmul
from tests.support.pipelining.simt import simt_kernels
from tvm_ext._tvm import Var, te, tirx
from tvm_ext.analysis.gemm_form import split_of
from tvm_ext.cost.mma_model import fragment_registers, thread_registers, tile_bytes
from tvm_ext.cost.pipeline_workload import PipelineWorkload
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import index
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.pipelining.choose_stages import choose_stages
from tvm_ext.tir_passes.pipelining.detect import detect
from tvm_ext.tir_passes.pipelining.function import Function
from tvm_ext.tir_passes.pipelining.index_values import index_values
from tvm_ext.tir_passes.pipelining.loops import to_loops
from tvm_ext.tir_passes.pipelining.plan import make_loader, workload_of
from tvm_ext.tir_passes.pipelining.route import registers_by_launch

A100 = lookup("nvidia-a100")


def product(rows: int, columns: int, depth: int, dtype: str) -> Any:
    """An unscheduled product, summed in float32."""
    a, b = te.placeholder((rows, depth), dtype, "A"), te.placeholder((depth, columns), dtype, "B")
    k = te.reduce_axis((0, depth), "k")

    def element(i: Any, j: Any) -> Any:
        return te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), axis=k)

    return te.create_prim_func([a, b, te.compute((rows, columns), element, "C")])


def counted(make: Callable[[], Any], device: DeviceSpec = A100) -> PipelineWorkload:
    function = Function(to_loops(make()))
    (group,) = detect(function, lambda load_use: make_loader(function, load_use, device)).groups
    attributes = function.func.attrs or {}
    plans = from_json(KernelChoice, str(attributes[CHOICE])).gpu if CHOICE in attributes else ()
    return workload_of(function, group, device, registers_by_launch(plans)[0] if plans else None)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "depth"),
    [("nvidia-a100", 512, 768, 3072), ("nvidia-h200", 500, 700, 640), ("nvidia-v100", 512, 512, 512)],
)
def test_tensor_core_kernels_are_what_their_tiles_say(name: str, rows: int, columns: int, depth: int) -> None:
    device = lookup(name)
    options = BuildOptions(enable_pipelining=False)
    kernel = construct_kernel(product(rows, columns, depth, "float16"), "product", device, options)
    program = from_json(KernelChoice, str(kernel.attrs[CHOICE])).program
    assert program is not None
    split, workload = split_of(program), counted(lambda: kernel, device)
    lines = split.rows + split.columns
    fragments = (split.warp_rows + split.warp_columns) * 16 * 2
    splits = program.partition_count // (-(-rows // split.rows) * -(-columns // split.columns))
    assert workload.blocks == program.partition_count
    assert workload.shared_trips == -(-depth // (split.depth * splits))
    assert workload.warps_per_block == split.warps
    assert workload.stage_bytes + workload.other_shared_bytes <= tile_bytes(split, "float16", device)
    assert workload.stage_bytes >= lines * split.depth * 2
    assert workload.register_trips == split.depth // 16
    assert workload.flops_per_register_trip == 2 * split.rows * split.columns * 16
    assert workload.bytes_per_shared_trip == lines * split.depth * 2
    assert workload.shared_bytes_per_register_trip == fragments * split.warps
    assert workload.registers_per_thread == thread_registers(split, "float16", device)
    assert workload.throughput == "float16_tensor"
    if name != "nvidia-v100":  # wmma's fragments have every element twice, its tiles are padded
        assert workload.stage_bytes == tile_bytes(split, "float16", device)
        held = split.warp_rows * split.warp_columns // 32
        assert workload.register_stage_registers == fragment_registers(split, "float16", device) - held


def test_a_kernel_for_vector_units_counted_by_hand() -> None:
    """16 x 16 outputs by 64 threads, 2 x 2 each; two tiles of 16 x 16 floats in each of 5 iterations of 16 steps.

    A warp's 32 threads read 2 of A and 2 of B one by one: each of the four loads takes a turn of the banks, 128 bytes.
    """
    workload = counted(partial(matmul, 16, 32, 80))
    assert (workload.blocks, workload.warps_per_block) == (2, 2)
    assert (workload.shared_trips, workload.register_trips) == (5, 16)
    assert (workload.stage_bytes, workload.other_shared_bytes) == (2 * 16 * 16 * 4, 0)
    assert workload.bytes_per_shared_trip == 2 * 16 * 16 * 4
    assert workload.flops_per_register_trip == 2 * 16 * 16
    assert workload.shared_bytes_per_register_trip == 2 * 4 * 128
    assert workload.output_bytes_per_block == 16 * 16 * 4
    assert workload.register_stage_registers == 4
    assert workload.throughput == "float32"


def test_blocks_of_a_row_load_its_tile_once() -> None:
    """Two blocks side by side share the tile of A and have one of B each: three of 1 KiB."""
    workload = counted(partial(matmul, 16, 32, 80))
    assert workload.workset_blocks == 2
    assert workload.workset_bytes == 3 * 16 * 16 * 4


def test_what_the_cache_holds_is_loaded_once() -> None:
    """512 blocks of 16 x 16 of 256 x 512: the inputs' bytes divided among the iterations bound what memory serves."""
    workload = counted(partial(matmul, 256, 512, 32))
    sources = (256 * 32 + 32 * 512) * 4
    assert workload.workset_bytes <= sources / workload.shared_trips


def test_schedules_of_metaschedule() -> None:
    """128 x 32 of 128 x 128 by four warps, in steps of 32; rows of 32 are stored 40 elements apart."""
    workload = counted(partial(metaschedule_matmul, "plain"))
    assert (workload.blocks, workload.warps_per_block, workload.shared_trips) == (4, 4, 5)
    assert workload.flops_per_register_trip * workload.register_trips == 2 * 128 * 32 * 32
    assert workload.bytes_per_shared_trip == (128 + 32) * 32 * 2
    assert workload.stage_bytes == (128 + 32) * 40 * 2
    assert workload.output_bytes_per_block == 128 * 32 * 2
    assert workload.throughput == "float16_tensor"


def test_an_extent_that_is_not_known_is_said() -> None:
    kernel = next(item for item in simt_kernels() if item.name == "matmul_dynamic_7_steps")
    with pytest.raises(IllegalRewrite, match="extent of loop ko is not known"):
        counted(kernel.make)


@pytest.mark.parametrize("kernel", [k for k in simt_kernels() if "dynamic" not in k.name], ids=str)
def test_every_kernel_has_a_depth(kernel: Any) -> None:
    device = lookup(kernel.devices[0])
    function = Function(to_loops(kernel.make()))
    for group in detect(function, lambda load_use: make_loader(function, load_use, device)).groups:
        if kernel.name == "matmul_triangular":
            continue
        choice = choose_stages(workload_of(function, group, device), device)
        assert choice.latency.time_s <= choice.unpipelined.time_s * 1.01


def test_index_values() -> None:
    thread, other = Var("t", "int64"), Var("o", "int64")
    values = np.arange(32)
    place = tirx.floordiv(thread, index(8)) * index(64) + tirx.floormod(thread, index(8)) + other
    assert (index_values(place, [(thread, values)]) == values // 8 * 64 + values % 8).all()
    bound = [(other, thread * index(2))]
    assert (index_values(place, [(thread, values)], bound) == values // 8 * 64 + values % 8 + values * 2).all()
    chosen = tirx.if_then_else(thread < index(16), thread, tirx.Select(thread > index(20), index(7), index(9)))
    expected = np.where(values < 16, values, np.where(values > 20, 7, 9))
    assert (index_values(chosen, [(thread, values)]) == expected).all()


def test_an_index_that_is_loaded_has_no_values() -> None:
    with pytest.raises(IllegalRewrite, match="not arithmetic"):
        index_values(tirx.exp(tirx.FloatImm("float32", 1.0)), [(Var("t", "int64"), np.arange(4))])
