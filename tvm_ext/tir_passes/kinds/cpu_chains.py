"""Chains of products, panel by panel (Bolt, §3.1): functions whose attribute `FusePersistent` has set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from tvm_ext.analysis.computation_exprs import tensor_expr_of, tensor_numbers
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import CHAINS, tile_machine, tile_workload, without_names
from tvm_ext.cost.persistent import PANEL_SHARE
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import outer_kind
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.persistent import CHAIN, ChainVerdict, PanelPlan
from tvm_ext.records.serialise import to_json
from tvm_ext.records.tuning import PanelTiles

from ..emit.cpu_chains.emit import emit_panels
from ..emit.padding import emit_panel_padding
from ..plan.anchors import canonical_anchor
from ..plan.canonical import canonical_rows
from ..plan.chain import ChainTiming, panel_ways, panels_of
from ..plan.chosen_tiles import NO_CHOICES, TileChoices, refuse_left_out
from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form, body_of, notes_of
from ..plan.panel import Panel, divide, panel_axes
from ..plan.panel_sizes import panel_bytes, panel_plans
from ..plan.plan_kernels import RowGroup, TileGroup, plan
from .cpu_rows import RowPart
from .cpu_tiles import TilePart
from .kernel_kind import Candidates, KernelKind, KernelPart, chosen_forms

MORE_FILLS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Of what a panel may have: more sizes of panels than construction looks at."""

MOST_TILES = 256
"""Combinations of tiles in panels of one size; each product has as many as leave that."""


class CpuChains(KernelKind):
    name = "a chain panel by panel"

    def of_function(self, operator: UnscheduledOperator) -> ChainPart | None:
        verdict = operator.attribute(CHAIN, ChainVerdict)
        if verdict is None or verdict.plan is None:
            return None
        made = operator.simplified
        whole = ChainTiming(operator=made.operator, constants=made.constants, device=made.device, options=made.options)
        return ChainPart(verdict=verdict, usual=verdict.plan, context=whole)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainPart(KernelPart[PanelTiles]):
    """A chain that one kernel computes, in construction's case in the panels of ``usual``."""

    tiles = PanelTiles
    verdict: ChainVerdict
    usual: PanelPlan
    context: ChainTiming

    def forms(self, chosen: PanelTiles | None = None) -> list[Form]:
        """The loop over panels is the last group's statement; one core computes a panel, so tiles are those for one."""
        if chosen is not None:
            return _panels(*chosen_panel(self.context, chosen), self.context)
        return _panels(divide(self.context.operator, self.usual.by_axis), NO_CHOICES, self.context)

    def key(self) -> MeasuredWorkload:
        return chain_workload(self.context)

    def candidates(self) -> Candidates[PanelTiles]:
        found = chain_candidates(self.context, self.usual)
        sums = [computation for computation in self.context.operator.computations if computation.is_reduction]
        depth = sum(prod(reduction.extent(variable) for variable in reduction.reduction) for reduction in sums)
        return Candidates(found=found, depth=max(1, depth), levels=[tiles.levels for tiles, _ in found])

    def describe(self, choice: KernelChoice, forms: Sequence[Form]) -> KernelChoice:
        return replace(choice, expected_s=self.verdict.fused_us * 1e-6)


def _panels(panel: Panel, tiles: TileChoices, whole: ChainTiming) -> list[Form]:
    """Raises IllegalRewrite where ``tiles`` are not those of the panel's groups."""
    apart = replace(whole, operator=panel.before)
    before = [form for group in plan(panel.before) for form in _group_part(group, apart).forms()]
    inside = [form for group in plan(panel.operator) for form in _panel_forms(group, panel, whole, tiles)]
    refuse_left_out(notes_of(inside))
    count = prod(panel.counts)
    busy_s = sum(form.program.prediction.busy_s for form in inside if form.program)
    kind = outer_kind(busy_s * count / whole.device.unit_count, whole.device)
    loop = emit_panels(panel, body_of(inside, panel.operator), kind)
    note = f"a chain in {count} panels of {' x '.join(map(str, panel.sizes))}"
    first, *rest = [*before, *(replace(form, statements=()) for form in inside)]
    forms = [replace(first, notes=(note, *first.notes)), *rest]
    return [*forms[:-1], replace(forms[-1], statements=(loop,))]


def _group_part(group: TileGroup | RowGroup, context: KernelContext) -> TilePart | RowPart:
    if isinstance(group, TileGroup):
        return TilePart(group=group, context=context)
    return RowPart(rows=canonical_rows(group), context=context)


def _panel_forms(group: TileGroup | RowGroup, panel: Panel, whole: ChainTiming, tiles: TileChoices) -> list[Form]:
    """How a group of a panel is run: products in the tiles that make the chain fastest, paddings by themselves."""
    core = whole.of_panel(panel)
    if isinstance(group, TileGroup):
        usual = panel_ways(group, panel, whole)[0].program
        return chosen_forms(TilePart(group=group, context=core, views=panel.views, usual=usual), tiles)
    forms: list[Form] = []
    for computation in group.computations:
        padding = next((padding for padding in panel.paddings if padding.computation is computation), None)
        if padding is None:
            forms += _group_part(RowGroup(computations=(computation,)), core).forms()
        else:
            note = f"{computation.name} panel by panel"
            forms.append(
                Form(path="rows", statements=(emit_panel_padding(padding, panel),), program=None, notes=(note,))
            )
    return forms


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChainStructure:
    """A chain's computations, and the numbers of the tensors that each reads, then writes."""

    computations: tuple[TensorExpr, ...]
    tensors: tuple[tuple[int, ...], ...]


def chain_workload(whole: ChainTiming) -> MeasuredWorkload:
    """The key of a chain; names do not count."""
    computations = whole.operator.computations
    exprs = tuple(
        without_names(tensor_expr_of(computation, name="", constants=whole.constants)) for computation in computations
    )
    structure = _ChainStructure(computations=exprs, tensors=tensor_numbers(computations))
    dtype = ",".join(sorted({expr.output.dtype for expr in exprs}))
    return replace(tile_machine(whole.device, CHAINS), structure=to_json(structure), dtype=dtype)


def chain_candidates(whole: ChainTiming, usual: PanelPlan) -> list[tuple[PanelTiles, float]]:
    """Choices with the seconds that the model expects of each, construction's own, in panels of ``usual``, first.

    Raises IllegalRewrite where not even those have tiles.
    """
    found = dict(_in_panels(usual, whole))
    for panels in panel_plans(whole.operator, whole.device, MORE_FILLS):
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
    panels = panels_of(panel, groups, panel_bytes(whole.operator, sizes))
    ways = [panel_ways(group, panel, whole) for group in groups]
    most = max(1, int(MOST_TILES ** (1 / max(1, sum(isinstance(group, TileGroup) for group in groups)))))
    for combination in product(*(own[:most] for own in ways)):
        tiles = tuple(way.tile for way in combination if way.tile is not None)
        yield PanelTiles(panels=sizes, tiles=tiles), whole.clock.fused_s([way.stage for way in combination], panels)


def chosen_panel(whole: ChainTiming, chosen: PanelTiles) -> tuple[Panel, TileChoices]:
    """The panel of a chosen chain and the tiles of its products by their keys; IllegalRewrite where it does not fit."""
    operator, device = whole.operator, whole.device
    result = operator.computations[-1]
    legal = panel_axes(operator)
    for axis, size in zip(chosen.panels.axes, chosen.panels.sizes, strict=True):
        if axis not in legal or size > result.extent(result.spatial[axis]):
            raise IllegalRewrite(f"{operator.name}: its result cannot be divided in {chosen.panels}")
    panel = divide(operator, chosen.panels.by_axis)
    needed, capacity = panel_bytes(operator, chosen.panels), Machine(device).own_bytes * PANEL_SHARE
    if needed > capacity:
        raise IllegalRewrite(
            f"{operator.name}: a panel of {chosen.panels} takes {needed:.0f} bytes, {capacity:.0f} may"
        )
    groups = [group for group in plan(panel.operator) if isinstance(group, TileGroup)]
    if len(groups) != len(chosen.tiles):
        raise IllegalRewrite(f"{operator.name}: {len(chosen.tiles)} tiles for {len(groups)} products")
    core = with_unit_count(device, 1)
    exprs = [canonical_anchor(group, panel.operator, whole.constants, core)[1] for group in groups]
    return panel, {
        tile_workload(expr, core).key: tile.configuration for expr, tile in zip(exprs, chosen.tiles, strict=True)
    }
