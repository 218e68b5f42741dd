"""What can be chosen of a CPU's chain: its panels and the tiles in them, how fast each should be, and its key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computation_exprs import tensor_expr_of, tensor_numbers
from tvm_ext.analysis.computations import OperatorBody
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import CHAINS, tile_machine, tile_workload, without_names
from tvm_ext.cost.persistent import PANEL_SHARE
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.persistent import PanelPlan
from tvm_ext.records.serialise import to_json
from tvm_ext.records.tuning import PanelTiles

from .anchors import canonical_anchor
from .chain import ChainTiming, panel_ways, panels_of
from .chosen_tiles import TileChoices
from .panel import Panel, divide, panel_axes
from .panel_sizes import panel_bytes, panel_plans
from .plan_kernels import TileGroup, plan

MORE_FILLS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Of what a panel may have: more sizes of panels than construction looks at."""

MOST_TILES = 256
"""Combinations of tiles in panels of one size; each product has as many as leave that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChainStructure:
    """A chain's computations, and the numbers of the tensors that each reads, then writes."""

    computations: tuple[TensorExpr, ...]
    tensors: tuple[tuple[int, ...], ...]


def chain_workload(operator: OperatorBody, constants: Sequence[Buffer], device: DeviceSpec) -> MeasuredWorkload:
    """The key of a chain; names do not count."""
    exprs = tuple(
        without_names(tensor_expr_of(computation, name="", constants=constants))
        for computation in operator.computations
    )
    structure = _ChainStructure(computations=exprs, tensors=tensor_numbers(operator.computations))
    dtype = ",".join(sorted({expr.output.dtype for expr in exprs}))
    return replace(tile_machine(device, CHAINS), structure=to_json(structure), dtype=dtype)


def chain_candidates(
    operator: OperatorBody, constants: Sequence[Buffer], usual: PanelPlan, device: DeviceSpec, options: BuildOptions
) -> list[tuple[PanelTiles, float]]:
    """Choices with the seconds that the model expects of each, construction's own, in panels of ``usual``, first.

    Raises IllegalRewrite where not even those have tiles.
    """
    whole = ChainTiming(operator=operator, constants=constants, device=device, options=options)
    found = dict(_in_panels(usual, whole))
    for panels in panel_plans(operator, device, MORE_FILLS):
        try:
            more = list(_in_panels(panels, whole))
        except IllegalRewrite:
            continue
        for tiles, seconds in more:
            found.setdefault(tiles, seconds)
    return list(found.items())


def _in_panels(sizes: PanelPlan, whole: ChainTiming) -> Iterator[tuple[PanelTiles, float]]:
    """Combinations of what is constructed for each product of a panel, the fastest of each first."""
    panel = divide(whole.operator, sizes.by_axis)
    groups = plan(panel.operator)
    panels = panels_of(panel, groups)
    ways = [panel_ways(group, panel, whole) for group in groups]
    most = max(1, int(MOST_TILES ** (1 / max(1, sum(isinstance(group, TileGroup) for group in groups)))))
    for combination in product(*(own[:most] for own in ways)):
        tiles = tuple(way.tile for way in combination if way.tile is not None)
        yield PanelTiles(panels=sizes, tiles=tiles), panels.seconds([way.stage for way in combination], whole.device)


def chosen_panel(
    operator: OperatorBody, constants: Sequence[Buffer], chosen: PanelTiles, device: DeviceSpec
) -> tuple[Panel, TileChoices]:
    """The panel of a chosen chain and the tiles of its products by their keys; IllegalRewrite where it does not fit."""
    result = operator.computations[-1]
    legal = panel_axes(operator)
    for axis, size in zip(chosen.panels.axes, chosen.panels.sizes, strict=True):
        if axis not in legal or size > result.extent(result.spatial[axis]):
            raise IllegalRewrite(f"{operator.name}: its result cannot be divided in {chosen.panels}")
    panel = divide(operator, chosen.panels.by_axis)
    needed, capacity = panel_bytes(panel), Machine(device).own_bytes * PANEL_SHARE
    if needed > capacity:
        raise IllegalRewrite(
            f"{operator.name}: a panel of {chosen.panels} takes {needed:.0f} bytes, {capacity:.0f} may"
        )
    groups = [group for group in plan(panel.operator) if isinstance(group, TileGroup)]
    if len(groups) != len(chosen.tiles):
        raise IllegalRewrite(f"{operator.name}: {len(chosen.tiles)} tiles for {len(groups)} products")
    core = with_unit_count(device, 1)
    exprs = [canonical_anchor(group, panel.operator, constants)[1] for group in groups]
    return panel, {
        tile_workload(expr, core).key: tile.configuration for expr, tile in zip(exprs, chosen.tiles, strict=True)
    }
