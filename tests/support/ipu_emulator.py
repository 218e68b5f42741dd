"""An emulator of an IPU: runs an exchange plan and compiled vertices on tiles with memories of their own.

Nothing of it shares code with the emitter beyond the plan's record. g++ compiles the vertices against a header that has
of Poplar's what they use. A tile's memory is a dictionary of arrays; what crosses from tile to tile does so by
transfers alone. Everything that a plan may get wrong without a wrong value is a `PlanError`: a transfer of what its
source does not keep, an input with holes, a result that is not its tile's own block, a tile over its memory.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np

from tvm_ext.records.exchange_plan import ExchangePlan, Superstep, TensorBox, TensorHome, VertexRun
from tvm_ext.toolchains import host_compiler

SHIM = """#pragma once
namespace poplar {
class Vertex {};
template <typename T> struct Vector {
  T *data = nullptr;
  T &operator[](unsigned i) const { return data[i]; }
};
template <typename V> struct Input;
template <typename T> struct Input<Vector<T>> {
  T *data = nullptr;
  const T &operator[](unsigned i) const { return data[i]; }
};
template <typename V> struct InOut;
template <typename T> struct InOut<Vector<T>> : Vector<T> {};
}
"""


GUARD = 64
"""Elements before and behind each vector that a vertex sees."""


class PlanError(Exception):
    """The plan asks for what the machine does not do."""


def compiled(vertices: str, plan: ExchangePlan, folder: Path) -> ctypes.CDLL:
    """The vertices as a library with a function for each class: (vectors, fields) -> None."""
    (folder / "poplar").mkdir(exist_ok=True)
    (folder / "poplar" / "Vertex.hpp").write_text(SHIM)
    glue = []
    for vertex in plan.vertices:
        tensors = [*vertex.inputs, vertex.output]
        vectors = [f"v.{name}.data = (decltype(v.{name}.data))vectors[{i}];" for i, name in enumerate(tensors)]
        fields = [f"v.{name} = fields[{i}];" for i, name in enumerate(vertex.fields)]
        lines = "\n  ".join([f"{vertex.name} v;", *vectors, *fields, "v.compute();"])
        glue.append(f'extern "C" void run_{vertex.name}(void **vectors, const int *fields) {{\n  {lines}\n}}')
    (folder / "all.cpp").write_text(vertices + "\n" + "\n".join(glue))
    command = [host_compiler.compiler(), "-O1", "-shared", "-fPIC", f"-I{folder}", "-Wall", "-Werror=unused-variable"]
    subprocess.run([*command, str(folder / "all.cpp"), "-o", str(folder / "all.so")], check=True, capture_output=True)
    return ctypes.CDLL(str(folder / "all.so"))


class Emulator:
    """One run of ``plan``; ``values`` are the inputs by name."""

    def __init__(self, plan: ExchangePlan, library: ctypes.CDLL, values: Mapping[str, np.ndarray]) -> None:
        self.plan, self.library = plan, library
        self.homes = {home.tensor: home for home in plan.homes}
        self.memory: list[dict[TensorBox, np.ndarray]] = [{} for _ in range(plan.tiles)]
        for home in plan.homes:
            for place in product(*map(range, home.grid)):
                box = home.box(place)
                block = np.full(box.size, _poison(np.dtype(home.dtype)), home.dtype)
                if home.tensor in values:
                    block = np.ascontiguousarray(values[home.tensor][_slices(box)], home.dtype)
                self.memory[home.tile_of(place, plan.tiles)][box] = block

    def run(self) -> dict[str, np.ndarray]:
        """The outputs by name."""
        self._check_memory({})
        for superstep in self.plan.supersteps:
            arrived = self._exchange(superstep)
            inputs = [[self._input(run, box, arrived[run.tile]) for box in run.inputs] for run in superstep.runs]
            held: dict[int, int] = defaultdict(int)
            for run, buffers in zip(superstep.runs, inputs, strict=True):
                held[run.tile] += sum(buffer.nbytes for buffer in buffers)
            self._check_memory(held)
            self._check_all_read(superstep, arrived)
            for run, buffers in zip(superstep.runs, inputs, strict=True):
                self._compute(run, buffers)
        return {name: self._whole(self.homes[name]) for name in self.plan.outputs}

    def _exchange(self, superstep: Superstep) -> dict[int, list[tuple[TensorBox, np.ndarray]]]:
        arrived: dict[int, list[tuple[TensorBox, np.ndarray]]] = defaultdict(list)
        for transfer in superstep.transfers:
            kept = [(own, block) for own, block in self.memory[transfer.source].items() if _covers(own, transfer.box)]
            if len(kept) != 1:
                raise PlanError(f"tile {transfer.source} does not keep {transfer.box}")
            (own, block), box = kept[0], transfer.box
            shifted = TensorBox(
                tensor=box.tensor, begin=tuple(a - b for a, b in zip(box.begin, own.begin, strict=True)), size=box.size
            )
            for target in transfer.targets:
                arrived[target].append((box, block[_slices(shifted)].copy()))
        return arrived

    def _input(self, run: VertexRun, region: TensorBox, arrived: list[tuple[TensorBox, np.ndarray]]) -> np.ndarray:
        """The vertex' vector, from what came to its tile."""
        filled = np.zeros(region.size, bool)
        values = np.zeros(region.size, self.homes[region.tensor].dtype)
        for box, block in arrived:
            if _covers(region, box):
                begin = tuple(a - b for a, b in zip(box.begin, region.begin, strict=True))
                place = _slices(TensorBox(tensor=box.tensor, begin=begin, size=box.size))
                filled[place], values[place] = True, block
        if not filled.all():
            raise PlanError(f"{run.vertex} on tile {run.tile} reads {region}, of which not all has come")
        return values

    def _check_all_read(self, superstep: Superstep, arrived: Mapping[int, list[tuple[TensorBox, np.ndarray]]]) -> None:
        regions: dict[int, list[TensorBox]] = defaultdict(list)
        for run in superstep.runs:
            regions[run.tile] += run.inputs
        for tile, boxes in arrived.items():
            for box, _ in boxes:
                if not any(_covers(region, box) for region in regions[tile]):
                    raise PlanError(f"{box} comes to tile {tile}, where nothing reads it")

    def _check_memory(self, held: Mapping[int, int]) -> None:
        for tile, blocks in enumerate(self.memory):
            taken = sum(block.nbytes for block in blocks.values()) + held.get(tile, 0)
            if taken > self.plan.tile_bytes:
                raise PlanError(f"tile {tile} holds {taken} bytes of {self.plan.tile_bytes}")

    def _compute(self, run: VertexRun, inputs: list[np.ndarray]) -> None:
        if run.output not in self.memory[run.tile]:
            raise PlanError(f"{run.output} is no block of tile {run.tile}")
        output = self.memory[run.tile][run.output]
        between = [_guarded(array) for array in (*inputs, output)]
        starts = [array.ctypes.data + GUARD * array.itemsize for array in between]
        vectors = (ctypes.c_void_p * len(starts))(*starts)
        getattr(self.library, f"run_{run.vertex}")(vectors, (ctypes.c_int * len(run.fields))(*run.fields))
        written = between[-1][GUARD:-GUARD].copy()
        between[-1][GUARD:-GUARD] = output.ravel()
        if between[-1].tobytes() != _guarded(output).tobytes():
            raise PlanError(f"{run.vertex} on tile {run.tile} writes beside {run.output}")
        output[...] = written.reshape(output.shape)

    def _whole(self, home: TensorHome) -> np.ndarray:
        result = np.empty(home.shape, home.dtype)
        for blocks in self.memory:
            for box, block in blocks.items():
                if box.tensor == home.tensor:
                    result[_slices(box)] = block
        return result


def _guarded(array: np.ndarray) -> np.ndarray:
    """The elements in a row, between others that no right result depends on."""
    guard = np.full(GUARD, _poison(array.dtype), array.dtype)
    return np.concatenate([guard, array.ravel(), guard])


def _poison(dtype: np.dtype) -> float:
    return np.nan if dtype.kind == "f" else 0x55


def _slices(box: TensorBox) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(box.begin, box.size, strict=True))


def _covers(outer: TensorBox, inner: TensorBox) -> bool:
    return outer.tensor == inner.tensor and all(
        a <= b and b + t <= a + s for a, s, b, t in zip(outer.begin, outer.size, inner.begin, inner.size, strict=True)
    )
