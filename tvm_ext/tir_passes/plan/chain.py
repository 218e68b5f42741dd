"""Decides about a chain of operators that could be one CPU kernel: whether it is legal, in which panels, what it gains.

The chain comes as one PrimFunc, its computations in order. Legal is what `panel.py` can divide and `cpu_tiles` can
compute; of a few sizes of panels the model of `cost/persistent.py` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from tvm_ext._tvm import Buffer, PrimFunc
from tvm_ext.analysis.computation_exprs import tensor_bytes
from tvm_ext.analysis.computations import OperatorBody, read_operator, static_shape
from tvm_ext.analysis.predicates import is_in
from tvm_ext.analysis.tensor_expr import Access, TensorExpr
from tvm_ext.cost.cpu_tiles import tile_of
from tvm_ext.cost.followed_rows import is_followed
from tvm_ext.cost.persistent import LEAST_GAIN, ChainClock, Moved, Panels, Stage
from tvm_ext.cost.row_time import RowClock
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.persistent import ChainVerdict, PanelPlan
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.limits import timed_construction

from .anchors import construct_anchor
from .context import KernelContext
from .gpu_chain import judge_gpu_chain
from .panel import Panel, PanelView, check_runs
from .panel_sizes import between, check_smallest, judged_panel, panel_bytes, panel_plans, stored
from .plan_kernels import RowGroup, TileGroup, plan, simplify
from .plan_windows import WindowGroup, take_windows
from .winograd_form import winograd_form


def judge_for(device: DeviceSpec, options: BuildOptions) -> Callable[[PrimFunc, Sequence[int]], ChainVerdict]:
    """`judge_chain`, or `judge_gpu_chain`, for a build: of a chain and the positions of its constant parameters."""
    if device.kind != "cpu":
        return lambda func, _constants: judge_gpu_chain(func, device)
    return lambda func, constants: judge_chain(func, constants, device, options)


def judge_chain(func: PrimFunc, constants: Sequence[int], device: DeviceSpec, options: BuildOptions) -> ChainVerdict:
    """The best panels of a chain on a CPU and what they gain; raises IllegalRewrite where it has none, saying why.

    Where no panels could gain they are left out, and the time of one kernel is the least that it could be.
    """
    with timed_construction():
        operator = simplify(read_operator(func, "chain"))
        groups = _with_tiles(operator)
        check_smallest(operator, device)
        known = [operator.params[i] for i in constants]
        whole = ChainTiming(operator=operator, constants=known, device=device, options=options)
        inner = between(operator)
        weights_bytes = sum(tensor_bytes(buffer) for buffer in known)
        stages = [whole.stage(group) for group in groups]
        apart = whole.clock.separate_s([whole.apart(*both) for both in zip(groups, stages, strict=True)])
        bound = whole.clock.separate_s([_without(inner, *both) for both in zip(stages, groups, strict=True)])
        bound += whole.clock.reload_s(Panels(weights_bytes=weights_bytes, panel_bytes=0.0, count=device.unit_count))
        fused, best = bound, None
        forced = options.enable_persistent_fusion is True
        if apart >= LEAST_GAIN * bound or forced:
            rates = [_PointTimes.of(*both, device) for both in zip(groups, stages, strict=True)]
            fused, best = _fastest(panel_plans(operator, device), whole, rates, inf if forced else apart / LEAST_GAIN)
    return ChainVerdict(
        plan=best,
        fused_us=fused * 1e6,
        separate_us=apart * 1e6,
        saved_bytes=2 * sum(tensor_bytes(buffer) for buffer in inner),
        pays=apart >= LEAST_GAIN * fused,
    )


def _fastest(
    candidates: Sequence[PanelPlan], whole: ChainTiming, rates: Sequence[_PointTimes], most_s: float
) -> tuple[float, PanelPlan | None]:
    """The least time of any panels, and which; raises IllegalRewrite, as the last did, where none has tiles.

    Kernels are constructed for panels that could take at most ``most_s`` seconds and less than the best. Where there
    are none, the time is the least that the panels could take.
    """
    found: tuple[float, PanelPlan] | None = None
    refused: IllegalRewrite | None = None
    least = sorted(((_least_s(c, whole, rates), c) for c in candidates), key=_seconds)
    for least_s, candidate in least:
        if least_s > most_s or (found is not None and least_s >= found[0]):
            break
        try:
            own = _fused_s(candidate, whole), candidate
        except IllegalRewrite as refusal:
            refused = refusal
        else:
            found = min(found or own, own, key=_seconds)
    if found is not None:
        return found
    if refused is not None:
        raise refused
    return least[0][0], None


def _seconds(timed: tuple[float, PanelPlan]) -> float:
    return timed[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _PointTimes:
    """Seconds that one core takes for each point of a group over whole tensors."""

    compute_s: float
    near_s: float

    @classmethod
    def of(cls, group: TileGroup | RowGroup, stage: Stage, device: DeviceSpec) -> _PointTimes:
        share = device.unit_count / _points(group)
        return cls(compute_s=stage.compute_s * share, near_s=stage.near_s * share)


def _points(group: TileGroup | RowGroup) -> int:
    return sum(c.point_count for c in group.computations) if isinstance(group, RowGroup) else group.anchor.point_count


def _least_s(made: PanelPlan, whole: ChainTiming, rates: Sequence[_PointTimes]) -> float:
    """Seconds of the panels ``made``, their tiles as fast as those of whole tensors; 0 where groups differ."""
    panel, groups = judged_panel(whole.operator, made)
    if len(groups) != len(rates):
        return 0.0
    times = [
        (rate.compute_s * _points(group), rate.near_s * _points(group))
        for group, rate in zip(groups, rates, strict=True)
    ]
    stages = [_panel_stage(group, panel, own) for group, own in zip(groups, times, strict=True)]
    return whole.clock.fused_s(stages, panels_of(panel, groups, panel_bytes(whole.operator, made)))


def _with_tiles(operator: OperatorBody) -> list[TileGroup | RowGroup]:
    """The groups of a chain, each reduction in tiles; raises IllegalRewrite where one has another kernel."""
    groups = plan(operator)
    for group in take_windows(groups, operator)[0]:
        if isinstance(group, WindowGroup):
            raise IllegalRewrite(f"{group.window.anchor.name} slides over planes, which has kernels of its own")
        if isinstance(group, RowGroup):
            for computation in group.computations:
                if computation.is_reduction:
                    raise IllegalRewrite(f"{computation.name} has no register tiles")
    return groups


# --- time -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, eq=False)
class ChainTiming(KernelContext):
    """What the time of a group depends on beside itself."""

    views: tuple[PanelView, ...] = ()

    @property
    def clock(self) -> ChainClock:
        return ChainClock(self.device)

    def of_panel(self, panel: Panel) -> ChainTiming:
        """For the groups of a panel, which one core computes."""
        core = with_unit_count(self.device, 1)
        return replace(self, operator=panel.operator, device=core, views=panel.views)

    def stage(self, group: TileGroup | RowGroup) -> Stage:
        """The group over whole tensors, which are those of `_touched`."""
        if isinstance(group, RowGroup):
            compute, near, unfollowed = self.row_s(group), 0.0, frozenset[str]()
        else:
            expr, programs = self.programs(group)
            compute, near = program_times(programs[0])
            unfollowed = unfollowed_tensors(group, expr, programs[0], self.device, ())
        written = stored([group])
        moved = [
            Moved(
                part_bytes=tensor_bytes(b),
                whole_bytes=tensor_bytes(b),
                written=is_in(b, written),
                followed=b.name not in unfollowed,
            )
            for b in _touched(group)
        ]
        return Stage(compute_s=compute, near_s=near, moved=tuple(moved))

    def apart(self, group: TileGroup | RowGroup, stage: Stage) -> Stage:
        """``stage`` of ``group`` as a kernel of its own computes it: in Winograd's form where that pays.

        Worked example, 64 channels at 56 x 56 and 64 to 256 behind them on two cores of an Ice Lake: direct sums in one
        kernel with the 1x1 take 1.7 ms, Winograd's form and the 1x1 apart 1.1.
        """
        form = winograd_form(group, self) if isinstance(group, TileGroup) else None
        if form is None or not isinstance(group, TileGroup):
            return stage
        if not form.pays(self.programs(group)[1][0].prediction.time_s):
            return stage
        weights = form.conv.weights.source
        moved = [own for buffer, own in zip(_touched(group), stage.moved, strict=True) if not buffer.same_as(weights)]
        return replace(stage, compute_s=form.time_s - self.clock.machine.fork_s, near_s=0.0, moved=tuple(moved))

    def row_s(self, group: RowGroup) -> float:
        """Seconds of the arithmetic of rows."""
        return RowClock(group.computations, self.device).arithmetic_s() / self.device.unit_count

    def programs(self, group: TileGroup) -> tuple[TensorExpr, list[RProgram]]:
        """The group's expression and what is constructed for it, best first; raises IllegalRewrite for nothing."""
        anchor = construct_anchor(group, self)
        check_runs(anchor.computation, self.views)
        programs = anchor.programs
        if not programs:
            raise IllegalRewrite(f"{group.anchor.name} has no register tile with an axis to vectorise")
        return anchor.expr, programs


def _without(kept: Sequence[Buffer], stage: Stage, group: TileGroup | RowGroup) -> Stage:
    """The ``stage`` of ``group``, the tensors of ``kept`` taken to cost nothing."""
    moved = zip(_touched(group), stage.moved, strict=True)
    return replace(stage, moved=tuple(own for buffer, own in moved if not is_in(buffer, kept)))


def program_times(program: RProgram) -> tuple[float, float]:
    """Seconds of its arithmetic, and of its loads from L2."""
    near = program.prediction.layers[1].time_s if len(program.prediction.layers) > 1 else 0.0
    return program.prediction.compute_s, near


def unfollowed_tensors(
    group: TileGroup, expr: TensorExpr, program: RProgram, device: DeviceSpec, views: Sequence[PanelView]
) -> frozenset[str]:
    """Names of the tensors whose rows the prefetcher does not follow under the loops of ``program``."""
    tile = tile_of(program, expr)
    seen = {view.buffer.name: view for view in views}
    found = {
        access.tensor
        for access in expr.inputs
        if not is_followed(_in_whole(access, seen.get(access.tensor)), tile, expr, device)
    }
    names = [buffer.name for buffer in stored([group])]
    output = _in_whole(expr.output, next((seen[name] for name in names if name in seen), None))
    if not is_followed(output, tile, replace(expr, output=output), device):
        found |= set(names)
    return frozenset(found)


def _in_whole(access: Access, view: PanelView | None) -> Access:
    """``access`` of a panel's tensor in the shape of the whole tensor, in which its rows are further apart.

    Worked example: 4 of 56 rows of 56 in each of 64 channels, [64, 224] as one run of each, lie in [64, 3136].
    """
    if view is None:
        return access
    shape = list(access.shape)
    extents = [part.extent for part in view.parts]
    for d, (own, whole) in enumerate(zip(extents, static_shape(view.original), strict=True)):
        inside = prod(extents[d:])
        holds = (i for i, size in enumerate(access.shape) if prod(access.shape[i:]) == inside and size % own == 0)
        place = next(holds, None) if own != whole else None
        if place is not None:
            shape[place] = shape[place] // own * whole
    return replace(access, shape=tuple(shape))


def _read(group: TileGroup | RowGroup) -> list[Buffer]:
    """The tensors that a group reads, each once, but for those that it makes itself."""
    own = group.computations if isinstance(group, RowGroup) else (group.anchor, *group.epilogue)
    made = [computation.target for computation in own]
    found: list[Buffer] = []
    for computation in own:
        found += [b for b in computation.sources() if not is_in(b, made) and not is_in(b, found)]
    return found


def _touched(group: TileGroup | RowGroup) -> list[Buffer]:
    """The tensors that a group reads, then those that it writes."""
    return [*_read(group), *stored([group])]


def _fused_s(made: PanelPlan, whole: ChainTiming) -> float:
    """Seconds of the panels ``made``, in the tiles that are constructed for them."""
    panel, groups = judged_panel(whole.operator, made)
    stages = [panel_ways(group, panel, whole)[0].stage for group in groups]
    return whole.clock.fused_s(stages, panels_of(panel, groups, panel_bytes(whole.operator, made)))


def panels_of(panel: Panel, groups: Sequence[TileGroup | RowGroup], needed_bytes: float) -> Panels:
    """The panels like ``panel``, which is computed in ``groups`` and keeps ``needed_bytes``."""
    own = [*(view.buffer for view in panel.views), *(c.target for c in panel.operator.computations)]
    weights = {buffer for group in groups for buffer in _read(group) if not is_in(buffer, own)}
    return Panels(
        weights_bytes=sum(tensor_bytes(buffer) for buffer in weights),
        panel_bytes=needed_bytes,
        count=prod(panel.counts),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelWay:
    """One way to compute a group of a panel; rows have one, without a program."""

    program: RProgram | None
    tile: CpuTile | None
    stage: Stage


def panel_ways(group: TileGroup | RowGroup, panel: Panel, whole: ChainTiming) -> list[PanelWay]:
    """The group over one panel on one core, in each tile that is constructed for it, the fastest first."""
    core = whole.of_panel(panel)
    if isinstance(group, RowGroup):
        return [PanelWay(program=None, tile=None, stage=_panel_stage(group, panel, (core.row_s(group), 0.0)))]
    expr, programs = core.programs(group)
    found = {}
    for program in reversed(programs):  # of equal tiles the best program
        unfollowed = unfollowed_tensors(group, expr, program, core.device, panel.views)
        stage = _panel_stage(group, panel, program_times(program), unfollowed)
        found[tile_of(program, expr)] = (program, stage)
    ways = [PanelWay(program=program, tile=tile, stage=stage) for tile, (program, stage) in reversed(found.items())]
    return sorted(ways, key=lambda way: whole.clock.stage_s(way.stage, whole.device.unit_count))


def _panel_stage(
    group: TileGroup | RowGroup, panel: Panel, times: tuple[float, float], unfollowed: Collection[str] = ()
) -> Stage:
    """The group over one panel on one core: only what views stand for passes the layers beyond L2."""
    compute, near = times
    written = stored([group])
    touched = _touched(group)
    moved = [
        Moved(
            part_bytes=tensor_bytes(view.buffer),
            whole_bytes=tensor_bytes(view.original),
            written=is_in(view.buffer, written),
            followed=view.buffer.name not in unfollowed,
        )
        for view in panel.views
        if is_in(view.buffer, touched)
    ]
    inner = [c.target for c in panel.operator.computations if is_in(c.target, touched)]
    kept = sum(tensor_bytes(buffer) for buffer in inner) if isinstance(group, RowGroup) else 0.0
    return Stage(compute_s=compute, near_s=near, moved=tuple(moved), kept_bytes=kept)
