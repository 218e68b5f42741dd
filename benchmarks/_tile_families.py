"""All tiles of an operator with few compilations: one kernel for each register tile, its loops handed over as data.

What a tile's blocks and the order of its loops decide is in which order a core goes through the register tiles. A
*family* is the kernel of one register tile, as the emitter writes it, under one loop over a list of tiles. So 1,800
candidates take 70 compilations; `tuning_measured.py` compares some with kernels that have loops of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from _tiles import Case, matmul_model, prepare, single_core

from benchmarks.networks.graph import GraphWriter, he_normal
from tvm_ext._tvm import Expr, tirx
from tvm_ext.autotune.cpu_space import CpuTileSpace
from tvm_ext.cost.cpu_tiles import program_of, tile_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import SERIAL, cast_to, index, load, loop, new_buffer, sequence
from tvm_ext.records.choice import ConstantPack
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.tir_passes.emit.cpu_tiles.emit import choose_tile
from tvm_ext.tir_passes.emit.cpu_tiles.layout import lay_out
from tvm_ext.tir_passes.emit.cpu_tiles.packing import PackedInput
from tvm_ext.tir_passes.emit.cpu_tiles.register_tile import RegisterTile

Numbers = npt.NDArray[np.int32]
FamilyKey = tuple[int, tuple[int, ...]]
"""Vector axis and register tile."""


def batched_model(name: str, batch: int, m: int, k: int, n: int) -> Any:
    """An ONNX model of one batched MatMul of two variables."""
    graph = GraphWriter(name)
    graph.op("MatMul", graph.input("x", (batch, m, k)), graph.input("y", (batch, k, n)), name="z")
    graph.output("z", (batch, m, n))
    return graph.model()


def convolution_model(name: str, channels: int, size: int, filters: int, taps: int, stride: int = 1) -> Any:
    """An ONNX model of one square convolution at batch 1, padded so that it keeps its image's size."""
    graph = GraphWriter(name)
    weights = he_normal(0, "w", (filters, channels, taps, taps), fan_in=channels * taps * taps)
    image = graph.input("x", (1, channels, size, size))
    pads = [taps // 2] * 4
    graph.op("Conv", image, graph.constant("w", weights), name="y", pads=pads, strides=[stride] * 2)
    graph.output("y", (1, filters, ceil_div(size, stride), ceil_div(size, stride)))
    return graph.model()


OPERATORS: dict[str, Any] = {
    "MM_BERT_FC": lambda: matmul_model("MM_BERT_FC", 128, 768, 768),
    "MM_RN50_FC": lambda: matmul_model("MM_RN50_FC", 64, 1024, 512),
    "BMM_BERT_QK": lambda: batched_model("BMM_BERT_QK", 12, 128, 64, 128),
    "BMM_BERT_SV": lambda: batched_model("BMM_BERT_SV", 12, 128, 128, 64),
    "Conv3x3_28": lambda: convolution_model("Conv3x3_28", 64, 28, 64, 3),
    "Conv1x1_14": lambda: convolution_model("Conv1x1_14", 256, 14, 512, 1),
    "MM_held_out": lambda: matmul_model("MM_held_out", 100, 64, 672),
    "Conv3x3_held_out": lambda: convolution_model("Conv3x3_held_out", 160, 10, 64, 3),
    "Conv1x1_held_out": lambda: convolution_model("Conv1x1_held_out", 960, 28, 192, 1),
}
"""Operators of ALCOP's kinds, in sizes that take 0.1 to 3 ms on one core; those held out were drawn by lot after
construction was finished."""


def case_of(name: str) -> Case:
    """The operator's anchor for one core of this machine."""
    device, target = single_core()
    return prepare(name, OPERATORS[name](), device, target, 10)


def space_of(case: Case, device: DeviceSpec | None = None) -> CpuTileSpace:
    """Its candidates, those that construction finds among them."""
    spatial = [axis.name for axis in case.expr.spatial]
    programs = [program for program in case.construction.programs if program.vector_axis in spatial]
    return CpuTileSpace(case.expr, device or case.device, [tile_of(program, case.expr) for program in programs])


def key_of(tile: CpuTile) -> FamilyKey:
    return tile.vector, tile.register


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """The function of one register tile, and which of its parameters are repacked how."""

    function: Any
    packs: dict[int, ConstantPack]


def family_of(case: Case, key: FamilyKey) -> Family:
    """The kernel of a register tile that goes through its tiles as a list says: parameters are the anchor's inputs,
    its output, and the list, a row of tile numbers along each spatial axis.
    """
    single = (1,) * len(key[1])
    tile = CpuTile(vector=key[0], register=key[1], inner=single, outer=single, order=tuple(range(len(single))))
    layout = lay_out(case.computation, case.expr, (), program_of(tile, case.expr, case.device), case.device)
    visits = new_buffer((prod(layout.counts.values()), len(single)), "int32", "visits")

    def visit(number: Expr) -> Any:
        places = {p: cast_to(load(visits, [number, index(i)]), "int64") for i, p in enumerate(layout.spatial)}
        tiles = tuple(places[p] for p in layout.order)
        return choose_tile(layout, tiles, RegisterTile.whole)

    entry = [item.copy(case.computation, SERIAL) for item in layout.packed if not item.is_constant]
    body = sequence(*entry, loop(prod(layout.counts.values()), SERIAL, "visit", visit))
    buffers, packs = _parameters(case, layout.packed)
    function = tirx.PrimFunc([*buffers, visits], body).with_attrs({"s_tir": True, "tirx.noalias": True})
    return Family(function=function, packs=packs)


def _parameters(case: Case, packed: Sequence[Any]) -> tuple[list[Any], dict[int, ConstantPack]]:
    buffers = [item.source for item in case.computation.loads()] + [case.computation.target]
    packs = {}
    for item in packed:
        if isinstance(item, PackedInput) and item.is_constant:
            position = next(i for i, buffer in enumerate(buffers) if buffer.same_as(item.original.source))
            how = item.constant_pack(case.operator.params)
            buffers[position] = item.buffer
            packs[position] = how
    return buffers, packs


def visits_of(tile: CpuTile, extents: Sequence[int]) -> Numbers:
    """The tile numbers along each axis, in the order in which the loops of ``tile`` reach them.

    Worked example, 2 x 2 tiles with the first axis innermost: (0, 0), (1, 0), (0, 1), (1, 1).
    """
    counts = [ceil_div(extent, size) for extent, size in zip(extents, tile.register, strict=True)]
    places = np.stack([grid.ravel() for grid in np.meshgrid(*map(np.arange, counts), indexing="ij")], axis=1)
    outer, inner = np.array(tile.outer), np.array(tile.inner)
    within = places % outer
    levels = [places // outer, within // inner, within % inner]
    keys = [level[:, axis] for level in levels for axis in tile.order]
    return np.ascontiguousarray(places[np.lexsort(keys[::-1])], dtype=np.int32)


def compiled(case: Case, families: dict[str, Family]) -> Any:
    """The functions as one library."""
    functions = {name: item.function.with_attr("global_symbol", name) for name, item in families.items()}
    return tvm.compile(tvm.IRModule(functions), target=case.target)


def portable(device: DeviceSpec) -> DeviceSpec:
    """The row without what JSON does not give back: where its numbers come from, and its target."""
    return replace(device, facts=(), target=(), aliases=())
