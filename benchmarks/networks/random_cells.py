"""Random cells as NAS-Bench-101 (Ying et al. 2019) draws them: the irregular graphs of Rammer's evaluation (§5.4).

A cell is a directed graph of at most seven vertices and nine edges from its input to its output, with a 3x3
convolution, a 1x1 convolution (BatchNormalization and ReLU behind each) or a 3x3 maximum pool at every vertex between.
A vertex reads the sum of what leads to it; the output joins what leads to it, side by side. The paper says "up to 9
operators and 7 edges".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from tvm_ext.errors import InputError

from .convolutional import conv_bn
from .graph import GraphWriter, generator

CELLS = 5000
"""How many of them there are, by index: as many as in the paper."""
MOST_VERTICES, MOST_EDGES = 7, 9
FEWEST_OPERATIONS, FEWEST_EDGES = 3, 7
"""Most of NAS-Bench's cells have five operations and nine edges; of the smallest ones there are few."""
OPERATIONS = ("conv3", "conv1", "pool3")
CHANNELS, EXTENT = 128, 32
"""Of NAS-Bench's first stack, on CIFAR-10."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellGraph:
    """``edges`` (from, to), from < to; vertex 0 is the input, the last one the output, ``operations`` lie between."""

    operations: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def output(self) -> int:
        return len(self.operations) + 1

    def sources(self, vertex: int) -> tuple[int, ...]:
        return tuple(a for a, b in self.edges if b == vertex)

    def readers(self, vertex: int) -> tuple[int, ...]:
        return tuple(b for a, b in self.edges if a == vertex)


def random_cell(index: int) -> CellGraph:
    """Cell number ``index``, the same on every machine. Raises InputError for one outside 0 to 4999."""
    if not 0 <= index < CELLS:
        raise InputError(f"there is no random cell {index}.", f"the cells are 0 to {CELLS - 1}")
    random = generator(index, "cell")
    pairs = [(a, b) for a in range(MOST_VERTICES) for b in range(a + 1, MOST_VERTICES)]
    while True:
        count = int(random.integers(FEWEST_EDGES, MOST_EDGES + 1))
        drawn = sorted(int(item) for item in random.choice(len(pairs), count, replace=False))
        kinds = [OPERATIONS[int(item)] for item in random.integers(0, len(OPERATIONS), MOST_VERTICES - 2)]
        cell = _pruned([pairs[item] for item in drawn], kinds)
        if cell is not None and len(cell.operations) >= FEWEST_OPERATIONS:
            return cell


def _pruned(edges: Sequence[tuple[int, int]], operations: Sequence[str]) -> CellGraph | None:
    """Without the vertices that no way from the input to the output goes through; None where nothing is left."""
    output = len(operations) + 1
    forward, backward = {0}, {output}
    for a, b in sorted(edges):
        forward |= {b} if a in forward else set()
    for a, b in sorted(edges, reverse=True):
        backward |= {a} if b in backward else set()
    kept = sorted(forward & backward)
    if len(kept) < 3 or kept[0] != 0 or kept[-1] != output:
        return None
    number = {vertex: place for place, vertex in enumerate(kept)}
    return CellGraph(
        operations=tuple(operations[vertex - 1] for vertex in kept[1:-1]),
        edges=tuple((number[a], number[b]) for a, b in edges if a in number and b in number),
    )


def build_random_cell(
    index: int, *, batch: int = 1, channels: int = CHANNELS, extent: int = EXTENT, seed: int = 0
) -> onnx.ModelProto:
    """``x`` [batch, channels, extent, extent] to ``y``, as many channels; weights by ``seed``, structure by ``index``.

    Raises InputError for an index outside 0 to 4999.
    """
    cell = random_cell(index)
    graph = GraphWriter(f"nasbench_{index}")
    image = graph.input("x", (batch, channels, extent, extent))
    widths = _widths(cell, channels)
    values: dict[int, str] = {}
    for vertex in range(1, cell.output):
        parts = [
            _projected(graph, seed, f"p{vertex}", image, channels, widths[vertex])
            if source == 0
            else _first_channels(graph, values[source], widths[source], widths[vertex])
            for source in cell.sources(vertex)
        ]
        values[vertex] = _operation(
            graph, seed, f"v{vertex}", cell.operations[vertex - 1], _sum(graph, parts), widths[vertex]
        )
    inner = [values[source] for source in cell.sources(cell.output) if source != 0]
    result = graph.op("Concat", *inner, axis=1) if len(inner) > 1 else inner[0]
    if 0 in cell.sources(cell.output):
        result = graph.op("Add", result, _projected(graph, seed, "p_out", image, channels, channels))
    graph.op("Identity", result, name="y")
    graph.output("y", (batch, channels, extent, extent))
    return graph.model({"weights": f"random, seed {seed}"})


def _widths(cell: CellGraph, channels: int) -> dict[int, int]:
    """Channels of each vertex: those that lead to the output share its channels, others are as wide as their widest
    reader.

    Worked example: 128 channels among three are 43, 43 and 42.
    """
    joined = [vertex for vertex in cell.sources(cell.output) if vertex != 0]
    share, more = divmod(channels, max(1, len(joined)))
    widths = {vertex: share + (place < more) for place, vertex in enumerate(joined)}
    for vertex in range(cell.output - 1, 0, -1):
        readers = [reader for reader in cell.readers(vertex) if reader != cell.output]
        widths[vertex] = widths.get(vertex) or max(widths[reader] for reader in readers)
    return widths


def _first_channels(graph: GraphWriter, value: str, channels: int, wanted: int) -> str:
    """``value`` as wide as its reader, which is never wider."""
    if channels == wanted:
        return value
    begin, end, axis = (graph.constant(f"n{number}", np.array([number])) for number in (0, wanted, 1))
    return graph.op("Slice", value, begin, end, axis)


def _projected(graph: GraphWriter, seed: int, name: str, value: str, inner: int, outer: int) -> str:
    return graph.op("Relu", conv_bn(graph, seed, name, value, inner, outer, 1))


def _operation(graph: GraphWriter, seed: int, name: str, operation: str, value: str, channels: int) -> str:
    if operation == "pool3":
        return graph.op("MaxPool", value, kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
    return graph.op("Relu", conv_bn(graph, seed, name, value, channels, channels, int(operation[-1])))


def _sum(graph: GraphWriter, parts: Sequence[str]) -> str:
    total = parts[0]
    for part in parts[1:]:
        total = graph.op("Add", total, part)
    return total
