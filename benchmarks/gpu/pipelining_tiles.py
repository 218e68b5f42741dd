"""Roller's tensor-core tiles of an operator as the kernels that ALCOP's model predicts, by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from cases import Case
from programs import program

from tvm_ext.analysis.computations import read_operator
from tvm_ext.analysis.gemm_form import TileSplit, split_of
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.autotune.gpu_space import product_of
from tvm_ext.cost.gpu_columns import TileColumns, count_loops, with_workset
from tvm_ext.cost.mma_model import resident_blocks
from tvm_ext.cost.pipeline_workload import PipelineWorkload
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.rprogram import RProgram
from tvm_ext.tir_passes.plan.anchors import construct_gpu_anchor
from tvm_ext.tir_passes.plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from tvm_ext.tir_passes.plan.plan_kernels import TileGroup
from tvm_ext.tir_passes.roller.construct_mma import tile_of_matrix

SHARED_STAGES = tuple(range(1, 9))
REGISTER_STAGES = (1, 2, 3, 4)

MODES: Mapping[str, tuple[Sequence[int], Sequence[int]]] = {
    "double": ((1, 2), (1,)),
    "multistage": (SHARED_STAGES, (1,)),
    "full": (SHARED_STAGES, REGISTER_STAGES),
}
"""Stages of shared memory and of registers that a mode may take: the ablation of the paper's §5.1."""

CONSTRUCTED = 400
"""Tiles constructed for each operator, among which 40 without split-K are found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One constructed tile as the model sees it."""

    label: str
    split_k: bool
    workload: PipelineWorkload


def workload_of_program(program: RProgram, expr: TensorExpr, device: DeviceSpec) -> PipelineWorkload:
    """What the kernel of ``program`` (one of `construct_mma`'s) does, as searches count it (`count_loops`).

    Blocks that share a reduction (split-K) have as many tiles more, of a part of its depth; how many blocks a unit
    holds is what the constructor knows of its own kernels.
    """
    split, dtype = split_of(program), expr.inputs[0].dtype
    product, tiles = product_of(expr), _one_tile(split, _splits(program, expr))
    loops = count_loops(product, tiles, device)
    loops = replace(loops, resident=np.asarray([resident_blocks(split, dtype, device)]))
    return with_workset(loops, product, tiles, device).workload(0)


def _one_tile(split: TileSplit, shares: int) -> TileColumns:
    """``split`` as searches have tiles, without pipelines."""
    sizes = split.rows, split.columns, split.depth, split.warp_rows, split.warp_columns, shares, 1, 1
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
        Tile(label=_label(item), split_k=_splits(item, expr) > 1, workload=workload_of_program(item, expr, device))
        for item in anchor.construction.programs
    ]


def _splits(program: RProgram, expr: TensorExpr) -> int:
    """Blocks that share the reduction of one tile."""
    return tile_of_matrix(program, expr).splits


def _label(program: RProgram) -> str:
    split = split_of(program)
    return f"{split.rows}x{split.columns}x{split.depth} in {split.warps} warps"
