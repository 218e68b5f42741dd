"""Co-schedules the rTasks of many operators (Rammer, §3.3): a graph's calls of kernels become one call of a schedule.

Behind `SplitRTasks`, which has said of every kernel how it falls into rTasks. What a schedule cannot run (libraries,
kernels that check values, shapes known only at run time) stays a call of its own, between schedules.

Worked example: four branches of two convolutions each, joined by one kernel, are one region of 9 operators; the call
``R.call_dps_packed("rammer_main_0", (x, w0, ..., w7), out_ty=...)`` replaces their 9 calls of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    Constant,
    DataflowBlock,
    Expr,
    GlobalVar,
    IRModule,
    PassContext,
    RelaxFunction,
    Type,
    Var,
    VarBinding,
    copy_module,
    functions_of,
    ir,
    module_pass,
    nodes_in,
    relax,
    tirx,
)
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.rtask_workload import rtask_workload
from tvm_ext.cost.schedule_simulator import simulate
from tvm_ext.cost.virtual_device import virtual_device
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records import serialise
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.rammer import (
    RAMMER,
    RTASK_PLANS,
    OutsideOperator,
    RammerRecord,
    RegionArgument,
    RegionRecord,
    SchedulePlan,
)
from tvm_ext.records.rtask_split import RKERNEL, RTASKS, RTaskSplit
from tvm_ext.records.rtask_times import RTaskTimes
from tvm_ext.records.rtasks import RTaskGraph, RTaskSchedule

from .region_records import chosen_kernels, region_record
from .rtask_graphs import RTaskRegion, bytes_of, is_static, sequential_seconds
from .rtask_regions import Layer, is_output, layers_of, users_of
from .wavefronts.policies import STANDARD_POLICY, require_policy, schedule_by_choice
from .wavefronts.policies import schedule as schedule_by_policy

Mode = bool | Literal["auto"]
KnownTimes = Callable[[Mapping[str, MeasuredWorkload]], RTaskTimes]

GAIN = 1.02
"""How many times as long a region must take in sequence for ``"auto"`` to schedule it: models err by more than 2 %."""


@module_pass(opt_level=0, name="tvm_ext.ScheduleWavefronts")
class ScheduleWavefronts:
    """Replace the calls of split kernels by calls of schedules; drop the kernels and rKernels that nobody calls.

    * ``device``: whose units are the vEUs.
    * ``mode``: True: every call that a schedule can run; ``"auto"``: where the simulator predicts a gain over running
      one operator after the other.
    * ``known``: gives measured times of rTasks, by which the policy goes where there are some; None: by the model's
      alone.
    * ``policy``: its name, see `wavefronts.policies`. Raises OptionError for an unknown one, and where one that was
      registered makes a schedule that its graph does not allow.
    """

    def __init__(
        self, device: DeviceSpec, mode: Mode, known: KnownTimes | None = None, policy: str = STANDARD_POLICY
    ) -> None:
        require_policy(policy)
        self.device, self.mode, self.known, self.policy = device, mode, known, policy

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        workloads = _workloads_of(mod, self.device) if self.known is not None else {}
        times = self.known(workloads) if self.known is not None else None
        build = _Build(self.device, self.mode, self.policy, splits_of(mod), times)
        result = copy_module(mod)
        for gv, func in functions_of(mod, RelaxFunction).items():
            if isinstance(func.body, relax.SeqExpr):
                result[gv] = _ScheduledFunction(build, func, gv.name_hint).rewritten()
        codes = [function for plan in build.plans for function in _functions_of(plan)]
        used = {name: workloads[name] for name in codes if name in workloads}
        record = RammerRecord(
            regions=tuple(build.regions),
            outside=tuple(build.outside),
            workloads=tuple(used.items()),
            known=sum(bool(times is not None and times.seconds.get(name)) for name in used),
        )
        result = result.with_attrs(
            {RAMMER: serialise.to_json(record), RTASK_PLANS: [serialise.to_json(plan) for plan in build.plans]}
        )
        return _without_unused(result, set(codes))


def splits_of(mod: IRModule) -> dict[str, RTaskSplit]:
    """What `SplitRTasks` said of each kernel, by name."""
    return {
        gv.name_hint: serialise.from_json(RTaskSplit, str(func.attrs[RTASKS]))
        for gv, func in functions_of(mod).items()
        if func.attrs and RTASKS in func.attrs
    }


def _functions_of(plan: SchedulePlan) -> list[str]:
    """The rKernels that ``plan`` runs, operator after operator; what it might have run instead is not linked."""
    chosen = chosen_kernels(RTaskSchedule.from_json(plan.schedule))
    return [plan.operators[place].codes[kernel].function for place, kernel in sorted(chosen.items())]


def _workloads_of(mod: IRModule, device: DeviceSpec) -> dict[str, MeasuredWorkload]:
    """The key of each rKernel, by name."""
    kernels = ((gv.name_hint, func) for gv, func in functions_of(mod).items())
    return {name: rtask_workload(func, device) for name, func in kernels if func.attrs and RKERNEL in func.attrs}


def _without_unused(mod: IRModule, wanted: set[str]) -> IRModule:
    """``mod`` without kernels that nobody calls, and rKernels that no schedule names."""
    items = [item for call in nodes_in(mod, Call) for item in (call.op, *call.args)]
    called = {item.name_hint for item in items if isinstance(item, GlobalVar)}
    for gv, func in functions_of(mod).items():
        attributes = func.attrs or {}
        unused = RTASKS in attributes and gv.name_hint not in called
        if unused or (RKERNEL in attributes and gv.name_hint not in wanted):
            del mod[gv]
    return mod


@dataclass(slots=True)
class _Build:
    """What holds for all functions of a module, and what was found and made so far."""

    device: DeviceSpec
    mode: Mode
    policy: str
    splits: Mapping[str, RTaskSplit]
    times: RTaskTimes | None
    regions: list[RegionRecord] = field(default_factory=list)
    outside: list[OutsideOperator] = field(default_factory=list)
    plans: list[SchedulePlan] = field(default_factory=list)


class _ScheduledFunction:
    """One Relax function, whose dataflow blocks are rewritten."""

    def __init__(self, build: _Build, func: RelaxFunction, name: str) -> None:
        self.build, self.func, self.name = build, func, name
        self.builder = relax.BlockBuilder()
        self.count = 0

    def rewritten(self) -> RelaxFunction:
        func, seq = self.func, self.func.body
        blocks = [self._block(block) if isinstance(block, DataflowBlock) else block for block in seq.blocks]
        body = relax.SeqExpr(blocks, seq.body)
        return relax.Function(func.params, body, func.ret_ty, is_pure=func.is_pure, attrs=func.attrs)

    def _block(self, block: DataflowBlock) -> DataflowBlock:
        rules = _Rules(self.build, list(block.bindings))
        layers = layers_of(list(block.bindings), rules.may_schedule)
        bindings: list[VarBinding] = []
        for layer in layers:
            bindings += layer.outside
            bindings += self._scheduled(layer, rules)
        return relax.DataflowBlock(bindings)

    def _scheduled(self, layer: Layer, rules: _Rules) -> list[VarBinding]:
        """The bindings of a layer's region as one call; as they are where there is none, or no gain."""
        if not any(item.value.op == CALL_TIR for item in layer.inside if isinstance(item.value, Call)):
            return layer.inside
        own = {binding.var for binding in layer.inside}
        results = [
            item.var
            for item in layer.inside
            if is_output(item.var) or any(user.var not in own for user in rules.users.get(item.var, []))
        ]
        region = RTaskRegion(layer.inside, results, self.build.splits, self.build.device, self.build.times)
        if not region.operators:
            return layer.inside
        if self.build.device.kind != "cpu" and len(region.operators) == 1:
            self.build.outside.append(
                OutsideOperator(name=region.operators[0].name, reason="a launch by itself already")
            )
            return layer.inside
        made = self._made(region, results)
        return layer.inside if made is None else made

    def _made(self, region: RTaskRegion, results: Sequence[Var]) -> list[VarBinding] | None:
        """The call of a schedule that runs ``region``, and what gives ``results`` their values; None: no gain."""
        written: dict[int, Var] = {}
        copies: list[tuple[Var, Var]] = []
        inputs = len(region.arguments)
        for variable in results:
            tensor = region.tensor_of(variable)
            if tensor in written:
                copies.append((variable, written[tensor]))
            else:
                region.tensors[tensor].argument = inputs + len(written)
                written[tensor] = variable
        plan, record = self._plan(region, [*region.arguments, *written.values()])
        self.build.regions.append(record)
        if plan is None:
            return None
        self.build.plans.append(plan)
        return [*self._call(plan.symbol, region.arguments, list(written.values())), *map(self._view, copies)]

    def _plan(self, region: RTaskRegion, arguments: Sequence[Expr]) -> tuple[SchedulePlan | None, RegionRecord]:
        graph, schedule, constructed_s = self._scheduled_by_choice(region)
        times = simulate(schedule, graph)
        sequential_s = self._sequential_s(graph, schedule)
        operators, arena_bytes = region.data(schedule)
        pays = self.build.mode is True or sequential_s > GAIN * times.makespan_s
        symbol = f"rammer_{self.name}_{self.count}" if pays else ""
        self.count += pays
        record = region_record(symbol, region, graph, schedule, times, sequential_s, arena_bytes, constructed_s)
        if not pays:
            return None, record
        plan = SchedulePlan(
            symbol=symbol,
            schedule=schedule.to_json(),
            names=tuple(operator.name for operator in graph.operators),
            operators=operators,
            predecessors=tuple(operator.predecessors for operator in graph.operators),
            arguments=tuple(
                _argument(argument, is_output=position >= len(region.arguments))
                for position, argument in enumerate(arguments)
            ),
            arena_bytes=arena_bytes,
        )
        return plan, record

    def _scheduled_by_choice(self, region: RTaskRegion) -> tuple[RTaskGraph, RTaskSchedule, float | None]:
        """The graph with all kernels, its schedule, and the time by the constructed kernels alone, where others are."""
        graph, make = region.graph(), partial(virtual_device, self.build.device)
        if self.build.policy != STANDARD_POLICY or not region.has_variants:
            return graph, schedule_by_policy(graph, make, self.build.policy), None
        return graph, *schedule_by_choice(graph, region.graph(with_variants=False), make)

    def _sequential_s(self, graph: RTaskGraph, schedule: RTaskSchedule) -> float:
        """Of the operators one after another: on a GPU, each a launch."""
        if self.build.device.kind == "cpu":
            return sequential_seconds(graph, schedule.programs[0].device)
        launches = schedule_by_policy(graph, partial(virtual_device, self.build.device), "launches")
        return simulate(launches, graph).makespan_s

    def _call(self, symbol: str, arguments: Sequence[Expr], results: Sequence[Var]) -> list[VarBinding]:
        call = relax.call_dps_packed(symbol, relax.Tuple(arguments), [variable.ty for variable in results])
        call = self.builder.normalize(call)
        if len(results) == 1:
            return [relax.VarBinding(results[0], call)]
        every = relax.DataflowVar(f"{symbol}_results", call.ty)
        fields = [self.builder.normalize(relax.TupleGetItem(every, place)) for place in range(len(results))]
        return [relax.VarBinding(every, call), *map(relax.VarBinding, results, fields)]

    def _view(self, pair: tuple[Var, Var]) -> VarBinding:
        """A result that is another one in a different shape."""
        variable, source = pair
        return relax.VarBinding(variable, self.builder.normalize(relax.op.reshape(source, variable.ty.shape)))


class _Rules:
    """What of a dataflow block a schedule can run; what it cannot is told to ``build``."""

    def __init__(self, build: _Build, bindings: Sequence[VarBinding]) -> None:
        self.build = build
        self.users = users_of(bindings)

    def may_schedule(self, binding: VarBinding, with_operands: bool) -> bool:
        value = binding.value
        if not isinstance(binding, VarBinding):
            return False  # it checks a shape at run time
        if isinstance(value, relax.TupleGetItem) or _is_view(value):
            return with_operands
        if not isinstance(value, Call):
            return False
        reason = self._refusal(binding.var, value)
        if reason:
            self.build.outside.append(OutsideOperator(name=_name_of(value), reason=reason))
        return not reason

    def _refusal(self, variable: Var, call: Call) -> str:
        if call.op != CALL_TIR:
            return "no kernel of this build"
        split = self.build.splits.get(call.args[0].name_hint)
        if split is None:
            return "a kernel that was not split"
        if split.refusal:
            return split.refusal
        if len(call.args) > 2:
            return "it takes numbers that are only known at run time"
        results = _fields(call.ty_args[0])
        if not all(map(is_static, (*results, *(item.ty for item in call.args[1].fields)))):
            return "shapes that are only known at run time"
        if isinstance(variable.ty, relax.TupleType) and not self._only_fields_are_read(variable):
            return "its results are passed on together"
        return ""

    def _only_fields_are_read(self, variable: Var) -> bool:
        users = self.users.get(variable, [])
        return not is_output(variable) and all(isinstance(user.value, relax.TupleGetItem) for user in users)


def _fields(kind: Type) -> list[Type]:
    return list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]


def _is_view(value: Expr) -> bool:
    return (
        isinstance(value, Call)
        and isinstance(value.op, ir.Op)
        and value.op.name == "relax.reshape"
        and is_static(value.args[0].ty)
        and isinstance(value.args[1], relax.ShapeExpr)
        and all(isinstance(extent, tirx.IntImm) for extent in value.args[1].values)
    )


def _name_of(call: Call) -> str:
    """What is called."""
    callee = call.args[0] if call.args and call.op in _CALLS else call.op
    names = (getattr(callee, kind, None) for kind in ("name_hint", "global_symbol", "name"))
    return next((str(name) for name in names if name), str(callee))


_CALLS = (CALL_TIR, ir.Op.get("relax.call_dps_packed"), ir.Op.get("relax.call_pure_packed"))


def _argument(expr: Expr, *, is_output: bool) -> RegionArgument:
    dtype = str(expr.ty.dtype)
    return RegionArgument(
        size_bytes=bytes_of(expr.ty),
        alignment=max(1, int(itemsize_bytes(dtype))),
        shape=tuple(int(extent) for extent in expr.ty.shape.values),
        dtype=dtype,
        role="output" if is_output else "constant" if isinstance(expr, Constant) else "input",
    )
