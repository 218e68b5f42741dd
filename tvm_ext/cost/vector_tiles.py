"""What tiles of a reduction on a GPU's vector units load and compute: ALCOP's model of `emit/simt_tiles`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import GLOBAL, max_block_threads, shared_limit_bytes
from tvm_ext.support.arithmetic import ceil_div

from .access_table import Shape
from .mma_model import WARPS_PER_TEU
from .pipeline_workload import PipelineWorkload, blocks_per_unit, shared_bytes
from .thread_losses import OTHER_REGISTERS


class VectorTiles:
    """The tiles of ``expr``, an anchor in canonical form: a thread's ``inner`` in a threadblock's ``block``.

    Both have a size for each axis, ``block`` along reduction axes that of a step.
    """

    def __init__(self, expr: TensorExpr, device: DeviceSpec) -> None:
        self.expr, self.device = expr, device
        self.extents = tuple(axis.extent for axis in expr.axes)
        self.names = tuple(axis.name for axis in expr.axes)
        self.spatial = [place for place, axis in enumerate(expr.axes) if axis.kind == "spatial"]
        self.reduction = [place for place, axis in enumerate(expr.axes) if axis.kind == "reduce"]

    def threads(self, inner: Shape, block: Shape) -> int:
        return prod(ceil_div(block[place], inner[place]) for place in self.spatial)

    def around(self, inner: Shape, block: Shape) -> Iterator[tuple[Shape, Shape]]:
        """Legal tiles with half or twice the size of one axis, in registers, in the threadblock or in both."""
        for place, extent in enumerate(self.extents):
            for of_thread, of_block in ((1, 2), (2, 1), (2, 2)) if place in self.spatial else ((1, 2),):
                for scaled in (_doubled, _halved):
                    thread = scaled(inner[place]) if of_thread > 1 else inner[place]
                    tile = scaled(block[place]) if of_block > 1 else block[place]
                    made = _put(inner, place, thread), _put(block, place, max(tile, thread))
                    if tile < 2 * extent and made != (inner, block) and self.fits(*made):
                        yield made

    def fits(self, inner: Shape, block: Shape) -> bool:
        """Whole warps of whole register tiles, within the device's threads, registers and shared memory."""
        threads, device = self.threads(inner, block), self.device
        whole = all(block[place] % inner[place] == 0 for place in self.spatial)
        most = max_block_threads(device) or threads
        sums = prod(inner[place] for place in self.spatial)
        is_warps = threads % device.teu_lanes == 0 and threads <= most
        return whole and is_warps and sums <= device.register_limit and self._bytes(block) <= shared_limit_bytes(device)

    def most_stages(self, inner: Shape, block: Shape) -> tuple[int, int]:
        """Of shared memory: the trips of the innermost loop over steps; of registers: the points of a step, or 1.

        Fragments are loaded ahead across steps where one loop runs over a step's points, and no groups of threads
        share them (`emit/simt_tiles/tiling.py: reduction_split`).
        """
        trips = [self.extents[place] // block[place] for place in self.reduction]
        steps = next((count for count in reversed(trips) if count > 1), 1)
        points = [block[place] for place in self.reduction if block[place] > 1]
        device, blocks = self.device, prod(ceil_div(self.extents[place], block[place]) for place in self.spatial)
        wanted = device.unit_count * device.teus_per_unit * WARPS_PER_TEU * device.teu_lanes
        is_shared = blocks * self.threads(inner, block) < wanted
        return steps, points[0] if len(points) == 1 and len(trips) == 1 and not is_shared else 1

    def workload(self, inner: Shape, block: Shape) -> PipelineWorkload:
        """What the tile's kernel does; raises IllegalRewrite where it does not fit the device.

        Worked example, 128 x 128 x 8 floats by threads of 8 x 8: 256 threads copy 8 KiB a step; at each of its 8 points
        each reads 16 floats for 128 operations.
        """
        expr, device = self.expr, self.device
        threads = self.threads(inner, block)
        point = tuple(1 if place in self.reduction else size for place, size in enumerate(inner))
        operands = [prod(access.tile_shape(self._named(point))) * access.itemsize_bytes for access in expr.inputs]
        sums = prod(inner[place] for place in self.spatial)
        fragments = sum(ceil_div(int(size), device.register_bytes) for size in operands)
        fused = sum(item.extra_bytes_per_element for item in (*expr.prologue, *expr.epilogue))
        computed = prod(block[place] for place in self.spatial)
        workload = PipelineWorkload(
            blocks=prod(ceil_div(self.extents[place], block[place]) for place in self.spatial),
            warps_per_block=ceil_div(threads, device.teu_lanes),
            other_shared_bytes=0,
            stage_bytes=int(self._bytes(block)),
            registers_per_thread=sums + fragments + OTHER_REGISTERS,
            register_stage_registers=fragments,
            shared_trips=prod(ceil_div(self.extents[place], block[place]) for place in self.reduction),
            register_trips=prod(min(block[place], self.extents[place]) for place in self.reduction),
            flops_per_register_trip=expr.flops_per_point * computed,
            bytes_per_shared_trip=self._bytes(block),
            shared_bytes_per_register_trip=threads * sum(operands),
            output_bytes_per_block=computed * (expr.output.itemsize_bytes + fused),
            workset_bytes=0.0,
            workset_blocks=1,
            throughput="float32" if expr.output.dtype in ("float16", "bfloat16") else expr.output.dtype,
        )
        return self._with_workset(workload, block)

    def _with_workset(self, workload: PipelineWorkload, block: Shape) -> PipelineWorkload:
        """Blocks that differ along axes which an input does not use read the same of it."""
        device = self.device
        resident = blocks_per_unit(workload, device, shared_bytes(workload, 1), workload.registers_per_thread)
        concurrent = min(workload.blocks, resident * device.unit_count)
        sizes, distinct = self._named(block), 0.0
        for access in self.expr.inputs:
            used = [place for place in self.spatial if access.uses(self.names[place])]
            tiles = prod(ceil_div(self.extents[place], block[place]) for place in used)
            distinct += min(concurrent, tiles) * prod(access.tile_shape(sizes)) * access.itemsize_bytes
        inputs = sum(prod(access.shape) * access.itemsize_bytes for access in self.expr.inputs)
        if inputs <= (device.layer(GLOBAL).cache_bytes or 0):
            distinct = min(distinct, inputs / (workload.shared_trips * ceil_div(workload.blocks, concurrent)))
        return replace(workload, workset_bytes=distinct, workset_blocks=concurrent)

    def _bytes(self, block: Shape) -> float:
        sizes = self._named(block)
        return sum(prod(access.tile_shape(sizes)) * access.itemsize_bytes for access in self.expr.inputs)

    def _named(self, shape: Shape) -> dict[str, int]:
        return dict(zip(self.names, shape, strict=True))


def _doubled(size: int) -> int:
    return 2 * size


def _halved(size: int) -> int:
    return max(1, size // 2)


def _put(shape: Shape, place: int, size: int) -> Shape:
    return (*shape[:place], size, *shape[place + 1 :])
