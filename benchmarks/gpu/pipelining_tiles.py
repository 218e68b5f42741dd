"""Roller's tensor-core tiles of an operator as the kernels that ALCOP's model predicts, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from cases import Case
from programs import program

from tvm_ext.analysis.computations import read_operator
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.pipeline_workload import PipelineWorkload
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.tir_passes.plan.anchors import construct_gpu_anchor
from tvm_ext.tir_passes.plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from tvm_ext.tir_passes.plan.plan_kernels import TileGroup
from tvm_ext.tir_passes.roller.gemm_form import GemmForm, gemm_expr, gemm_form, reduction_step, split_of
from tvm_ext.tir_passes.roller.mma_grid import grid_group
from tvm_ext.tir_passes.roller.mma_model import resident_blocks, shape_of, thread_registers, tile_bytes

CONSTRUCTED = 400
"""Tiles constructed for each operator, among which 40 without split-K are found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One constructed tile as the model sees it."""

    label: str
    split_k: bool
    workload: PipelineWorkload


def workload_of_program(program: RProgram, expr: TensorExpr, case: Case, device: DeviceSpec) -> PipelineWorkload:
    """What the kernel of ``program`` (one of `construct_mma`'s) does, by arithmetic.

    Worked example, 128 x 128 x 64 in halves by eight warps of 64 x 32: a stage is 256 rows of 128 bytes, 32 KiB; one of
    its four inner steps reads 8 * (64 + 32) * 16 * 2 bytes = 24 KiB of fragments for 2 * 128 * 128 * 16 operations.
    """
    form = gemm_form(expr)
    assert isinstance(form, GemmForm), form
    shape, split, dtype = shape_of(gemm_expr(expr, form)), split_of(program), expr.inputs[0].dtype
    tiles = ceil_div(shape.rows, split.rows), ceil_div(shape.columns, split.columns)
    per_batch, splits = tiles[0] * tiles[1], _splits(program, expr)
    blocks = shape.batch * per_batch * splits
    steps = ceil_div(shape.depth, split.depth * splits)
    concurrent = min(resident_blocks(split, dtype, device) * device.unit_count, blocks)
    at_once = max(1, min(concurrent // splits, per_batch))
    group = grid_group(tiles[0], tiles[1], at_once, (split.rows, split.columns))
    lines = min(group, tiles[0]) * split.rows + min(tiles[1], ceil_div(at_once, group)) * split.columns
    workset = lines * split.depth * shape.itemsize * max(1.0, concurrent / per_batch)
    step = reduction_step(dtype, device)
    fragments = (split.warp_rows + split.warp_columns) * step * shape.itemsize
    return PipelineWorkload(
        blocks=blocks,
        warps_per_block=split.warps,
        other_shared_bytes=0,
        stage_bytes=tile_bytes(split, dtype, device),
        registers_per_thread=thread_registers(split, dtype, device),
        register_stage_registers=fragments // (device.teu_lanes * device.register_bytes),
        shared_trips=steps,
        register_trips=split.depth // step,
        flops_per_register_trip=2.0 * split.rows * split.columns * step,
        bytes_per_shared_trip=float((split.rows + split.columns) * split.depth * shape.itemsize),
        shared_bytes_per_register_trip=float(fragments * split.warps),
        output_bytes_per_block=split.rows * split.columns * shape.output_bytes,
        workset_bytes=_reaching_memory(workset, case, steps * ceil_div(blocks, concurrent), device),
        workset_blocks=concurrent,
        throughput=f"{dtype}_tensor",
    )


def _reaching_memory(workset: float, case: Case, iterations: int, device: DeviceSpec) -> float:
    """Bytes of one iteration that memory serves: where the cache holds all inputs, each byte is read from it once.

    That is so of a convolution's windows too, which read a pixel for each of their taps.
    """
    inputs = sum(item.size_bytes for item in case.inputs)
    fits = inputs <= (device.layer("L2").cache_bytes or 0)
    return min(workset, inputs / iterations) if fits else workset


def tiles_of(case: Case, device: DeviceSpec) -> list[Tile]:
    """The operator's constructed tiles, best predicted by Roller's model first."""
    operator = simplify_for_gpu(read_operator(program(case), case.id))
    group = plan_for_gpu(operator)[0]
    assert isinstance(group, TileGroup), case.id
    options = BuildOptions(candidates=CONSTRUCTED)
    _, expr, construction = construct_gpu_anchor(group, operator, device, options)
    return [
        Tile(
            label=_label(item), split_k=_splits(item, expr) > 1, workload=workload_of_program(item, expr, case, device)
        )
        for item in construction.programs
    ]


def _splits(program: RProgram, expr: TensorExpr) -> int:
    """Blocks that share the reduction of one tile."""
    form = gemm_form(expr)
    assert isinstance(form, GemmForm), form
    shape, split = shape_of(gemm_expr(expr, form)), split_of(program)
    tiles = shape.batch * ceil_div(shape.rows, split.rows) * ceil_div(shape.columns, split.columns)
    return max(1, program.partition_count // tiles)


def _label(program: RProgram) -> str:
    split = split_of(program)
    return f"{split.rows}x{split.columns}x{split.depth} in {split.warps} warps"
