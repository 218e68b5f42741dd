"""Roller's tensor-core tiles of an operator as the kernels that ALCOP's model predicts, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from cases import Case
from programs import program

from benchmarks.alcop.analytical import TileColumns, count_loops, with_workset
from benchmarks.alcop.products import TunedProduct
from tvm_ext.analysis.computations import read_operator
from tvm_ext.analysis.gemm_form import GemmForm, TileSplit, gemm_expr, gemm_form, split_of
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.mma_model import resident_blocks, shape_of
from tvm_ext.cost.pipeline_workload import PipelineWorkload
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.tir_passes.plan.anchors import construct_gpu_anchor
from tvm_ext.tir_passes.plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from tvm_ext.tir_passes.plan.plan_kernels import TileGroup

CONSTRUCTED = 400
"""Tiles constructed for each operator, among which 40 without split-K are found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One constructed tile as the model sees it."""

    label: str
    split_k: bool
    workload: PipelineWorkload


def workload_of_program(program: RProgram, expr: TensorExpr, case: Case, device: DeviceSpec) -> PipelineWorkload:
    """What the kernel of ``program`` (one of `construct_mma`'s) does, as searches count it (`count_loops`).

    Blocks that share a reduction (split-K) have as many tiles more, of a part of its depth; how many blocks a unit
    holds is what the constructor knows of its own kernels.
    """
    form = gemm_form(expr)
    assert isinstance(form, GemmForm), form
    shape, split, dtype = shape_of(gemm_expr(expr, form)), split_of(program), expr.inputs[0].dtype
    shares = _splits(program, expr)
    product = TunedProduct(
        batch=shape.batch,
        rows=shape.rows,
        columns=shape.columns,
        depth=ceil_div(shape.depth, shares),
        dtype=dtype,
        itemsize=shape.itemsize,
        output_itemsize=shape.output_bytes,
        input_bytes=sum(item.size_bytes for item in case.inputs),
    )
    tiles = _one_tile(split)
    loops = count_loops(product, tiles, device)
    resident = np.asarray([resident_blocks(split, dtype, device)])
    loops = replace(loops, blocks=loops.blocks * shares, resident=resident)
    return with_workset(loops, product, tiles, device, shares=shares).workload(0)


def _one_tile(split: TileSplit) -> TileColumns:
    """``split`` as searches have tiles, without pipelines."""
    sizes = split.rows, split.columns, split.depth, split.warp_rows, split.warp_columns, 1, 1
    names = (item.name for item in fields(TileColumns))
    return TileColumns(**{name: np.asarray([size]) for name, size in zip(names, sizes, strict=True)})


def tiles_of(case: Case, device: DeviceSpec) -> list[Tile]:
    """The operator's constructed tiles, best predicted by Roller's model first."""
    operator = simplify_for_gpu(read_operator(program(case), case.id))
    group = plan_for_gpu(operator)[0]
    assert isinstance(group, TileGroup), case.id
    options = BuildOptions(candidates=CONSTRUCTED)
    anchor = construct_gpu_anchor(group, operator, device, options)
    expr = anchor.expr
    return [
        Tile(
            label=_label(item),
            split_k=_splits(item, expr) > 1,
            workload=workload_of_program(item, expr, case, device),
        )
        for item in anchor.construction.programs
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
