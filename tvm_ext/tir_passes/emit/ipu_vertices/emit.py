"""An operator for the IPU: C++ vertices and the exchange plan that deals them to tiles (Roller §3.2 scale-out, §4).

Each tensor is kept in blocks, dealt to all tiles in turn ("evenly distributed", §4). A result's blocks are the tiles of
the rProgram that computes it and lie where they are computed. In each superstep a tile receives what its next vertex
reads; what several tiles read is sent once, to all of them. A reduction that goes in steps adds to the block in place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computation_exprs import itemsize_bytes, tensor_bytes
from tvm_ext.analysis.computations import OperatorBody, dtype_of, static_shape
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.exchange_plan import (
    ExchangePlan,
    Superstep,
    SuperstepTimes,
    TensorBox,
    TensorHome,
    Transfer,
    VertexClass,
    VertexRun,
)
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.limits import check_count

from ...plan.context import UnscheduledOperator
from .stages import PointBox, VertexStage, block_of, name_of, stages_of, tensor_names
from .superstep_tiles import TileProgram, TileRates, tile_program
from .vertex import HEADER, field_names, field_values, vertex_text

LEAST_BLOCK_BYTES = 512
"""A block of an input is not divided further: each piece is a message with a start of its own."""

ROOM_SHARES = (0.9, 0.6, 0.3, 0.1)
"""Of what even shares of all tensors leave of a tile, tried in turn: blocks are whole, so that some tiles keep more."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileCode:
    """An operator's text of ``vertices.cpp`` and its plan."""

    vertices: str
    plan: ExchangePlan


def emit_for_ipu(operator: UnscheduledOperator) -> TileCode:
    """Vertices and plan of ``operator``; raises IllegalRewrite, with the reason, where it has none."""
    context, device = operator.simplified, operator.device
    stages = stages_of(context.operator)
    tile_bytes = device.layers[1].capacity_bytes or 0
    inner = [stage.output for stage in stages if not context.operator.is_output(stage.output)]
    kept = sum(map(tensor_bytes, [*context.operator.params, *inner]))
    free = tile_bytes - kept / device.unit_count
    if free <= 0:
        raise IllegalRewrite(
            f"its tensors take {kept / 2**20:.0f} MiB of {device.unit_count * tile_bytes / 2**20:.0f} MiB"
        )
    for share in ROOM_SHARES:
        programs = [tile_program(stage, device, free * share, operator.options.candidates) for stage in stages]
        deal = _TileDeal(context.operator, device, stages, programs)
        plan = deal.plan()
        if plan.peak_bytes <= tile_bytes:
            return TileCode(vertices=deal.texts(), plan=plan)
    raise IllegalRewrite(f"a tile would keep {plan.peak_bytes / 1024:.0f} KiB of {tile_bytes / 1024:.0f} KiB")


@dataclass(slots=True, eq=False)
class _TileDeal:
    """Deals all stages to the tiles, one after the other."""

    operator: OperatorBody
    device: DeviceSpec
    stages: Sequence[VertexStage]
    programs: Sequence[TileProgram]
    homes: dict[str, TensorHome] = field(default_factory=dict)
    fields: dict[str, dict[str, int | None]] = field(default_factory=dict)  # of each class; None: vertices differ
    next_tile: int = 0

    def plan(self) -> ExchangePlan:
        names = tensor_names(self.operator)
        steps = [
            (stage, superstep)
            for stage, program in zip(self.stages, self.programs, strict=True)
            for superstep in self._supersteps(stage, program)
        ]
        for stage in self.stages:
            columns = zip(
                *(run.fields for _, step in steps for run in step.runs if run.vertex == stage.name), strict=True
            )
            values = [column[0] if len(set(column)) == 1 else None for column in columns]
            self.fields[stage.name] = dict(zip(field_names(stage), values, strict=True))
        supersteps, moved = [self._settled(step) for _, step in steps], [self._moved(step) for _, step in steps]
        for param in self.operator.params:  # what no stage reads or writes
            self._keep(name_of(param, names), param, static_shape(param))
        params = [(name_of(param, names), self.operator.is_output(param)) for param in self.operator.params]
        return ExchangePlan(
            operator=self.operator.name,
            device=self.device.name,
            tiles=self.device.unit_count,
            tile_bytes=self.device.layers[1].capacity_bytes or 0,
            inputs=tuple(name for name, is_output in params if not is_output),
            outputs=tuple(name for name, is_output in params if is_output),
            homes=tuple(self.homes.values()),
            vertices=tuple(map(self._vertex_class, self.stages)),
            supersteps=tuple(supersteps),
            peak_bytes=self._peak_bytes(supersteps),
            exchanged_bytes=sum(received.total() for _, received in moved),
            times=self._times(
                steps, [max([*sent.values(), *received.values()], default=0) for sent, received in moved]
            ),
        )

    def _keep(self, name: str, buffer: Buffer, block: Sequence[int], *, first: int | None = None) -> None:
        """Give the tensor a home, if it has none: behind the blocks of the one before, for tiles to keep as much."""
        if name in self.homes:
            return
        self.homes[name] = TensorHome(
            tensor=name,
            shape=static_shape(buffer),
            dtype=dtype_of(buffer),
            itemsize_bytes=int(itemsize_bytes(dtype_of(buffer))),
            block=tuple(block),
            first_tile=self.next_tile if first is None else first,
        )
        if first is None:
            self.next_tile = (self.next_tile + prod(self.homes[name].grid)) % self.device.unit_count

    def _supersteps(self, stage: VertexStage, program: TileProgram) -> Iterator[Superstep]:
        """Rounds of partitions, as many as there are tiles, and in each the steps of the reduction."""
        spatial, sizes, units = stage.expr.spatial, program.sizes, self.device.unit_count
        for name, buffer, accesses in stage.reads:
            self._keep(name, buffer, self._divided(block_of(accesses, sizes), buffer))
        self._keep(stage.target, stage.output, [sizes[axis.name] for axis in spatial], first=0)
        partitions = list(product(*(range(0, axis.extent, sizes[axis.name]) for axis in spatial)))
        steps = list(product(*(range(0, axis.extent, sizes[axis.name]) for axis in stage.expr.reduction)))
        check_count("kernel_operations", len(partitions) * len(steps), "vertices of a stage")
        for first in range(0, len(partitions), units):
            for step in steps:
                boxes = [_box(stage, sizes, (*begin, *step)) for begin in partitions[first : first + units]]
                runs = [_run(stage, tile, box) for tile, box in enumerate(boxes)]
                yield Superstep(transfers=tuple(self._transfers(runs)), runs=tuple(runs))

    def _divided(self, block: list[int], buffer: Buffer) -> list[int]:
        """``block`` halved along its longest dimension until all tiles keep some, or it is small."""
        least = LEAST_BLOCK_BYTES / itemsize_bytes(dtype_of(buffer))
        while prod(block) > least and prod(map(ceil_div, static_shape(buffer), block)) < self.device.unit_count:
            longest = block.index(max(block))
            block[longest] = ceil_div(block[longest], 2)
        return block

    def _transfers(self, runs: Sequence[VertexRun]) -> Iterator[Transfer]:
        wanted: dict[TensorBox, list[int]] = defaultdict(list)
        for run in runs:
            for region in run.inputs:
                wanted[region].append(run.tile)
        pieces: dict[tuple[int, TensorBox], list[int]] = defaultdict(list)
        for region, targets in wanted.items():
            for part in self.homes[region.tensor].parts(region, self.device.unit_count):
                pieces[part] += targets
        for (source, box), targets in pieces.items():
            yield Transfer(box=box, source=source, targets=tuple(targets))

    def _settled(self, superstep: Superstep) -> Superstep:
        """``superstep`` whose runs have the fields that differ; the text has the others."""
        runs = []
        for run in superstep.runs:
            pairs = zip(self.fields[run.vertex].values(), run.fields, strict=True)
            runs.append(replace(run, fields=tuple(own for shared, own in pairs if shared is None)))
        return replace(superstep, runs=tuple(runs))

    def _vertex_class(self, stage: VertexStage) -> VertexClass:
        inputs = tuple(name for name, _, _ in stage.reads)
        fields = tuple(name for name, shared in self.fields[stage.name].items() if shared is None)
        return VertexClass(name=stage.name, inputs=inputs, output=stage.target, fields=fields)

    def texts(self) -> str:
        """All classes, in the order of the stages; `plan` has said what their fields are."""
        parts = [HEADER]
        for stage, program in zip(self.stages, self.programs, strict=True):
            tiles = " ".join(f"{layer} {tile}" for layer, tile in program.program.tiles) if program.program else "none"
            comment = f"{stage.computation.name}: rProgram {tiles}, in vertices of {dict(program.sizes)}"
            parts.append(vertex_text(stage, program.registers, self.fields[stage.name], comment))
        return "".join(parts)

    # ---- what it takes -----------------------------------------------------------------------------------------
    def _bytes(self, box: TensorBox) -> int:
        return box.elements * self.homes[box.tensor].itemsize_bytes

    def _moved(self, superstep: Superstep) -> tuple[Counter[int], Counter[int]]:
        """Bytes that each tile sends to others, what goes to many once, and that it receives."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for transfer in superstep.transfers:
            others = [target for target in transfer.targets if target != transfer.source]
            sent[transfer.source] += self._bytes(transfer.box) * bool(others)
            for target in others:
                received[target] += self._bytes(transfer.box)
        return sent, received

    def _peak_bytes(self, supersteps: Sequence[Superstep]) -> int:
        """Of the fullest tile: blocks that it keeps, and what the vertex of a superstep reads beside them."""
        kept: Counter[int] = Counter()
        for home in self.homes.values():
            for place in product(*map(range, home.grid)):
                kept[home.tile_of(place, self.device.unit_count)] += self._bytes(home.box(place))
        runs = [run for superstep in supersteps for run in superstep.runs]
        return max(max(kept.values()), *(kept[run.tile] + sum(map(self._bytes, run.inputs)) for run in runs))

    def _times(self, steps: Sequence[tuple[VertexStage, Superstep]], busiest: Sequence[int]) -> SuperstepTimes:
        rates = TileRates(self.device)
        point_s = {s.name: rates.point_s(s, p.registers) for s, p in zip(self.stages, self.programs, strict=True)}
        points = [max(_points(stage, run) for run in step.runs) * point_s[stage.name] for stage, step in steps]
        return SuperstepTimes(
            compute_s=sum(points) + rates.vertex_s * len(steps),
            exchange_s=sum(busiest) / rates.exchange_bytes_per_s,
            synchronise_s=rates.superstep_s * len(steps),
            sources=rates.sources(),
        )


def _box(stage: VertexStage, sizes: Mapping[str, int], begins: Sequence[int]) -> PointBox:
    axes = [*stage.expr.spatial, *stage.expr.reduction]
    return {
        axis.name: (begin, min(sizes[axis.name], axis.extent - begin)) for axis, begin in zip(axes, begins, strict=True)
    }


def _run(stage: VertexStage, tile: int, box: PointBox) -> VertexRun:
    begin, size = zip(*(box[axis.name] for axis in stage.expr.spatial), strict=True) if stage.expr.spatial else ((), ())
    output = TensorBox(tensor=stage.target, begin=begin, size=size)
    fields = field_values(stage, box)
    return VertexRun(vertex=stage.name, tile=tile, inputs=tuple(stage.regions(box)), output=output, fields=fields)


def _points(stage: VertexStage, run: VertexRun) -> int:
    return prod(run.fields[1 : 2 * len(stage.expr.axes) : 2])  # begin and size of each axis come first
