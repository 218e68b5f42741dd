"""What a 3x3 convolution in Winograd's form takes on a CPU, and the tiles that are worth trying (docs/roller.md)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod

from tvm_ext.analysis.winograd import Convolution
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import OF_ONE_UNIT, WARM, Machine
from tvm_ext.records.tuning import WinogradTile
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.toom_cook import TAPS, Rationals, transforms

from .attention_time import FLOAT_BYTES
from .perf_model import MEMORY_OVERLAP
from .register_tiles import PORT_OVERLAP, overlapped

MOST_TILES = 64
"""Tiles of a task: by then each weight that is loaded serves as many products as arithmetic takes (a choice)."""

MOST_VECTORS = 4
"""Vectors of filters in a register tile: more leave too few registers for rows (a choice)."""


class WinogradClock:
    """What ``conv`` takes on ``device``, all cores together; `tiles` lists what it can be computed in."""

    def __init__(self, conv: Convolution, device: DeviceSpec) -> None:
        self.conv, self.device, self.machine = conv, device, Machine(device)
        self.lanes = conv.anchor.extent(conv.filters[1])
        self.blocks = conv.anchor.extent(conv.filters[0])
        self.channels = conv.count(conv.channels)

    def tiles(self, outputs: int) -> Iterator[WinogradTile]:
        """Tiles of ``outputs`` x ``outputs`` for register tiles that fit and could have at most twice as many rows."""
        count, limit = self.count(outputs), self.device.register_limit
        for vectors in (v for v in range(1, MOST_VECTORS + 1) if self.blocks % v == 0):
            fitting = [r for r in range(1, min(count, MOST_TILES) + 1) if r * vectors + min(r, vectors) < limit]
            for rows in (r for r in fitting if 2 * r >= fitting[-1]):
                for tiles in range(rows, min(MOST_TILES, count + rows - 1) + 1, rows):
                    for parts in self._parts(vectors):
                        yield WinogradTile(outputs=outputs, tiles=tiles, parts=parts, rows=rows, vectors=vectors)

    def _parts(self, vectors: int) -> list[int]:
        """Divisions of the filters: none, or one that gives each core some."""
        panels = self.blocks // vectors
        return sorted({1, *(part for part in (self.device.unit_count,) if panels % part == 0)})

    def count(self, outputs: int) -> int:
        """Tiles of all images."""
        conv = self.conv
        return conv.count(conv.images) * prod(ceil_div(extent, outputs) for extent in conv.extents(conv.y, conv.x))

    def seconds(self, tile: WinogradTile) -> float:
        """Tasks of the core that has most, the first of which reads its weights from memory, and starting them.

        Worked example, 512 channels and filters, one image of 7 x 7 on a Zen 5: 16.8 MB of weights take 0.37 ms, twice
        that where two cores read all of them for 8 of the 16 tiles each. Measured: 0.41 and 0.69. Direct sums read 9.4.
        """
        blocks = ceil_div(self.count(tile.outputs), tile.tiles)
        groups = self.conv.count(self.conv.groups)
        waves = ceil_div(groups * blocks * tile.parts, self.device.unit_count)
        task_s = self._task_cycles(tile) / self.machine.vector_hz
        readers = 1 if tile.parts * groups > 1 else min(blocks, self.device.unit_count)
        once_s = groups * readers * tile.parts * self._weight_bytes(tile) / self.machine.rate(self.device.lowest_layer)
        return overlapped((task_s, once_s), MEMORY_OVERLAP) + (waves - 1) * task_s + self.machine.fork_s

    def asks_ahead(self, tile: WinogradTile) -> bool:
        """Whether the weights of a task leave the core's own cache before its next task reads them."""
        own = self.machine.own_cache
        return own is None or self._weight_bytes(tile) > (own.capacity_bytes or 0)

    def _weight_bytes(self, tile: WinogradTile) -> int:
        """Of one task's weights."""
        return (tile.outputs + TAPS - 1) ** 2 * self.channels * self.blocks * self.lanes * FLOAT_BYTES // tile.parts

    def _task_cycles(self, tile: WinogradTile) -> float:
        """Cycles of a task: its transforms, and its products beside what they load.

        Worked example, 28 tiles of 2 x 2, 128 channels and filters, 14 x 2 registers of 16 lanes: 16 elements of
        4 panels, 2 x 128 steps of 28 multiply-adds each, are 458,752 cycles where one starts in a cycle.
        """
        device, size = self.device, (tile.outputs + TAPS - 1) ** 2
        panels = self.blocks // tile.vectors // tile.parts
        vectors = self.channels // self.lanes
        matrices = transforms(tile.outputs)
        moved_in = self._transform_cycles(matrices.inputs, size, size) * tile.tiles * vectors
        moved_out = self._transform_cycles(matrices.outputs, size, tile.outputs**2) * tile.tiles * panels * tile.vectors
        work = tile.rows * tile.vectors
        latency = float(device.fma_latency_cycles or 0)
        step = overlapped(
            (work / device.fma_rate, (tile.rows + tile.vectors) / device.load_rate, latency), PORT_OVERLAP
        )
        products = panels * size * tile.tiles / tile.rows * (self.channels * step + work / device.store_rate)
        return moved_in + moved_out + overlapped((products, *self._loading_cycles(tile, panels, size)), MEMORY_OVERLAP)

    def _loading_cycles(self, tile: WinogradTile, panels: int, size: int) -> Iterator[float]:
        """Cycles of what products load: the weights of a task once from where all weights lie, those of a panel's
        element again for each register tile, and the transformed inputs once for each panel.

        Worked example, 512 channels: 4 vectors of 16 lanes are 128 KiB of weights, which come from L2 each time.
        """
        width = tile.vectors * self.lanes
        own = FLOAT_BYTES * self.channels * width
        weights = panels * size * own
        inputs = size * tile.tiles * (self.channels + width) * FLOAT_BYTES
        element = own + inputs // size
        reads = (
            (weights * tile.parts, weights, WARM),
            (element, weights * tile.tiles // tile.rows, OF_ONE_UNIT),
            (inputs, inputs * panels, OF_ONE_UNIT),
        )
        for held, moved, rule in reads:
            yield moved / self.machine.bytes_per_cycle(self.machine.held_rate(held, rule))

    def _transform_cycles(self, matrix: Rationals, loaded: int, stored: int) -> float:
        """Cycles of M d M^T for one tile in one vector."""
        additions, device = _operations(matrix) * (len(matrix) + len(matrix[0])), self.device
        return max(additions / device.fma_rate, loaded / device.load_rate) + stored / device.store_rate


@cache
def _operations(matrix: Rationals) -> int:
    """Additions of a product with a vector; a factor is multiplied in the same instruction."""
    return sum(max(1, sum(1 for item in row if item) - 1) for row in matrix)
