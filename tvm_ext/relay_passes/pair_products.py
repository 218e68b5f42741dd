"""Products that follow each other, all cut out for CUTLASS, become fewer kernels where the models say that it pays.

A run's links are those of `chain_links`: what lies between two products is read by the second alone. A run is divided
into parts of three kinds, by the least predicted time in all: one template for a product, one for a pair (Bolt §3.1,
`byoc_cutlass/back_to_back.py`), and one kernel of our own for two products or more, whose operators go back into the
graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tvm_ext._tvm import (
    BlockBuilder,
    Call,
    Constant,
    DataflowVar,
    Expr,
    GlobalVar,
    IRModule,
    PassContext,
    RelaxFunction,
    Var,
    VarBinding,
    copy_module,
    module_pass,
)
from tvm_ext.analysis.relax_values import is_graph
from tvm_ext.byoc_cutlass.back_to_back import least_chain_us
from tvm_ext.cost.gpu_chain import MIN_GAIN
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.partition import LINK, PARTITION, CutlassPartition, CutlassRegion, parameter_of
from tvm_ext.records.persistent import PersistentRegion
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.support.limits import limits

from .chain_links import readers_of
from .composites import (
    OwnTime,
    Predictor,
    as_module,
    call_of_composite,
    composite_of,
    inlined,
    is_composite,
    new_composite,
    region_of,
    steps_of,
    with_prepared,
)
from .persistent_record import with_regions
from .rewriting import with_calls

Way = Literal["template", "own", "apart"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JoinedProducts:
    """Bindings whose calls follow each other and their regions, and all as one function of ``operands``."""

    bindings: tuple[VarBinding, ...]
    parts: tuple[CutlassRegion, ...]
    operands: tuple[Expr, ...]
    inner: RelaxFunction
    region: CutlassRegion

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(binding.value.op.name_hint for binding in self.bindings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """How products are computed, and why; times in microseconds, None where there is no such kernel."""

    way: Way
    reason: str
    fused_us: float | None
    separate_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Products in the kernels that they become: (first, behind the last, by a kernel of our own), and what that costs.

    Plans compare by ``cost``: microseconds, before which comes the number of kernels where all are to be joined.
    """

    cost: tuple[float, float] = (0.0, 0.0)
    kernels: tuple[tuple[int, int, bool], ...] = ()

    def then(self, first: int, end: int, time_us: float, *, own: bool, always: bool) -> Plan:
        cost = (self.cost[0] + always, self.cost[1] + time_us)
        return Plan(cost=cost, kernels=(*self.kernels, (first, end, own)))


@module_pass(opt_level=0, name="tvm_ext.PairProducts")
class PairProducts:
    """Join neighbours of the regions that `PartitionCutlass` has cut out, or give them back, as the models say.

    ``mode`` True joins wherever a template has a pair or one kernel of ours has them all, ``"auto"`` where that is
    predicted to take less than `MIN_GAIN` of the products apart. A kernel of our own is preferred where it takes less
    than `MIN_GAIN` of what templates take for its products. What was decided is in the module's record of persistent
    kernels.
    """

    def __init__(
        self, device: DeviceSpec, backend: Predictor, own_time: OwnTime, mode: Literal[True, "auto"] = "auto"
    ) -> None:
        self.device, self.backend, self.own_time, self.always = device, backend, own_time, mode is True
        self.templates: dict[CutlassRegion, float | str] = {}
        self.own: dict[CutlassRegion, float | None] = {}

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        builder = BlockBuilder(copy_module(mod))
        decided: list[tuple[JoinedProducts, Decision, str]] = []
        functions = {gv: inner for gv, inner in mod.functions_items() if is_composite(inner)}
        for gv, func in mod.functions_items():
            if not is_graph(func):
                continue
            calls: dict[Var, Call] = {}
            gone = set()
            for bindings in _runs(func, functions):
                for joined, decision in _ProductRun(self, bindings, functions).decided():
                    name = ""
                    if decision.way == "template":
                        call = call_of_composite(joined.inner, joined.operands, joined.region.pattern, builder)
                        calls[joined.bindings[-1].var], name = call, call.op.name_hint
                        gone.add(joined.bindings[0].var)
                    decided.append((joined, decision, name))
            if calls:
                builder.update_func(gv, builder.normalize(with_calls(func, calls, gone)))
        return _record(builder.get(), decided) if decided else mod

    def template_us(self, region: CutlassRegion) -> float | str:
        """Microseconds of the best template, or why there is none. Layers repeat: each kind is looked at once."""
        if region.kind not in self.templates:
            try:
                self.templates[region.kind] = self.backend.predict(region)
            except IllegalRewrite as refusal:
                self.templates[region.kind] = refusal.problem
        return self.templates[region.kind]

    def own_us(self, joined: JoinedProducts) -> float | None:
        """Microseconds of one kernel of our own; kernels are constructed to be asked, in a second."""
        if joined.region.kind not in self.own:
            known = {position for position, operand in enumerate(joined.operands) if isinstance(operand, Constant)}
            self.own[joined.region.kind] = self.own_time(as_module(with_prepared(joined.inner, known)))
        return self.own[joined.region.kind]


class _ProductRun:
    """Products that follow each other, and the kernels that they may have, by (first, behind the last)."""

    def __init__(
        self, maker: PairProducts, bindings: Sequence[VarBinding], functions: dict[GlobalVar, RelaxFunction]
    ) -> None:
        self.maker, self.bindings, self.functions = maker, bindings, functions
        self.parts = [region_of(functions[binding.value.op]) for binding in bindings]
        self.single = [maker.template_us(part) for part in self.parts]
        places = range(len(bindings))
        self.joined = {(i, i + 2): _join(bindings[i : i + 2], functions) for i in places[:-1]}
        self.pair = {
            place: maker.template_us(joined.region)
            for place, joined in self.joined.items()
            if all(isinstance(time, float) for time in self.single[slice(*place)])
        }
        self.own: dict[tuple[int, int], float] = {}  # at least, until it is asked
        self.asked: set[tuple[int, int]] = set()

    def decided(self) -> Iterator[tuple[JoinedProducts, Decision]]:
        """Of every kernel of several products how it is made, and of every product alone why the next is not in it."""
        for first, end, own in self._best():
            place = first, max(end, first + 2)
            if place[1] > len(self.bindings):
                continue
            joined = self._joined(place)
            apart_us, times = self._times(place)
            template = self.pair.get(place)
            fused_us = template if isinstance(template, float) else None
            if own:
                decision = Decision(way="own", reason=times, fused_us=self.own[place], separate_us=apart_us)
            elif end - first == 2:
                decision = Decision(way="template", reason=times, fused_us=fused_us, separate_us=apart_us)
            else:
                reason = self._why_apart(place, times)
                decision = Decision(way="apart", reason=reason, fused_us=fused_us, separate_us=apart_us)
            yield joined, decision

    def _best(self) -> tuple[tuple[int, int, bool], ...]:
        """The kernels of the best plan, of which none of ours is left that was not constructed."""
        for first in range(len(self.bindings)):
            for end in range(first + 2, min(first + limits().chained_products, len(self.bindings)) + 1):
                least_us = least_chain_us(self.parts[first:end], self.maker.device)
                if least_us is None or any(isinstance(time, str) for time in self.single[first:end]):
                    break
                if least_us < self._worth(first, end):
                    self.own[first, end] = least_us
        while True:
            kernels = self._plan(0, len(self.bindings), own=True).kernels
            open_places = [(first, end) for first, end, own in kernels if own and (first, end) not in self.asked]
            if not open_places:
                return kernels
            for place in open_places:
                self.asked.add(place)
                own_us = self.maker.own_us(self._joined(place))
                if own_us is not None and own_us < self._worth(*place):
                    self.own[place] = own_us
                else:
                    del self.own[place]

    def _plan(self, first: int, end: int, *, own: bool) -> Plan:
        """The fewest kernels where all are to be joined, else the least time, of the products from ``first`` on.

        Worked example, templates of 10 us, of 19 for the first pair, 12 for the second: 10 + 12, not 19 + 10.
        """
        always, plans = self.maker.always, [Plan()]
        for stop in range(first + 1, end + 1):
            alone = self.single[stop - 1]
            alone_us = alone if isinstance(alone, float) else 0.0  # of no template, which every plan leaves apart
            found = [plans[-1].then(stop - 1, stop, alone_us, own=False, always=always)]
            if stop - 2 >= first and self._pays(stop - 2):
                pair_us = self.pair[stop - 2, stop]
                assert isinstance(pair_us, float)
                found.append(plans[-2].then(stop - 2, stop, pair_us, own=False, always=always))
            for start in range(first, stop - 1) if own else ():
                if (start, stop) in self.own:
                    time_us = self.own[start, stop]
                    found.append(plans[start - first].then(start, stop, time_us, own=True, always=always))
            plans.append(min(found, key=lambda plan: plan.cost))
        return plans[-1]

    def _pays(self, first: int) -> bool:
        """Whether one template for the product and the next is worth it."""
        pair_us, apart = self.pair.get((first, first + 2)), self.single[first : first + 2]
        if not isinstance(pair_us, float):
            return False
        return self.maker.always or pair_us < MIN_GAIN * sum(time for time in apart if isinstance(time, float))

    def _worth(self, first: int, end: int) -> float:
        """What one kernel of ours must stay below, against the best that templates make of the same products."""
        plan = self._plan(first, end, own=False)
        return math.inf if self.maker.always and len(plan.kernels) > 1 else MIN_GAIN * plan.cost[1]

    def _joined(self, place: tuple[int, int]) -> JoinedProducts:
        if place not in self.joined:
            self.joined[place] = _join(self.bindings[slice(*place)], self.functions)
        return self.joined[place]

    def _times(self, place: tuple[int, int]) -> tuple[float, str]:
        """Microseconds of templates apart, and all times that are known, in words."""
        apart = [time if isinstance(time, float) else math.inf for time in self.single[slice(*place)]]
        times = [f"templates apart take {sum(apart):.1f} us"]
        pair_us = self.pair.get(place)
        if isinstance(pair_us, float):
            times.append(f"one template {pair_us:.1f} us")
        elif len(apart) > 2 and (pairs := self._plan(*place, own=False)).cost[1] < sum(apart):
            times.append(f"{len(pairs.kernels)} templates, pairs among them, {pairs.cost[1]:.1f} us")
        if place in self.own and place in self.asked:
            times.append(f"one kernel of our own {self.own[place]:.1f} us")
        return sum(apart), f"the model: {', '.join(times)}"

    def _why_apart(self, place: tuple[int, int], times: str) -> str:
        lacking = next((time for time in self.single[slice(*place)] if isinstance(time, str)), None)
        if lacking is not None:
            return lacking
        pair_us = self.pair[place]
        if isinstance(pair_us, str):
            return f"no template has both: {pair_us}; {times}"
        return f"{'its neighbours save more' if self._pays(place[0]) else 'no gain is predicted'}; {times}"


# --- the records -----------------------------------------------------------------------------------------------------
def _record(mod: IRModule, decided: Sequence[tuple[JoinedProducts, Decision, str]]) -> IRModule:
    """``mod`` with what was decided in its records, and those products as operators again that we compute ourselves."""
    ours = [(pair, decision) for pair, decision, _ in decided if decision.way == "own"]
    mod = inlined(mod, frozenset(name for pair, _ in ours for name in pair.functions))
    mod = _without(mod, {name for pair, _, kernel in decided if kernel for name in pair.functions})
    partition = from_json(CutlassPartition, str(mod.attrs[PARTITION]))
    joined = {pair.parts[-1].value: pair.region for pair, _, name in decided if name}
    gone = {pair.parts[0].value for pair, _, name in decided if name}
    gone |= {part.value for pair, _ in ours for part in pair.parts}
    taken = [joined.get(entry.value, entry) for entry in partition.taken if entry.value not in gone]
    refused = [part.left(decision.reason) for pair, decision in ours for part in pair.parts]
    partition = replace(partition, taken=tuple(taken), refused=(*partition.refused, *refused))
    done = mod.with_attr(PARTITION, to_json(partition))
    # What is ours now is decided about once more, by the pass that makes its kernel.
    return with_regions(done, [_region(*entry) for entry in decided if entry[1].way != "own"])


def _without(mod: IRModule, names: set[str]) -> IRModule:
    """``mod`` less functions that nothing calls; dead code is not removed where it is for external compilers."""
    kept = {gv: func for gv, func in mod.functions_items() if gv.name_hint not in names}
    return IRModule(kept, attrs=mod.attrs)


def _region(pair: JoinedProducts, decision: Decision, kernel: str) -> PersistentRegion:
    return PersistentRegion(
        kind="chain",
        operators=pair.functions,
        fused=bool(kernel),
        reason=decision.reason,
        kernel=kernel,
        fused_us=decision.fused_us,
        separate_us=None if decision.fused_us is None else decision.separate_us,
    )


# --- runs ------------------------------------------------------------------------------------------------------------
def _runs(func: RelaxFunction, functions: dict[GlobalVar, RelaxFunction]) -> list[list[VarBinding]]:
    """Products each of which alone reads what the one before it makes, two or more, as long as they go on."""
    read, runs = readers_of(func), []
    for block in func.body.blocks:
        last: dict[Var, list[VarBinding]] = {}  # the run that ends with a product
        for binding in block.bindings:
            if not isinstance(binding.value, Call) or binding.value.op not in functions:
                continue
            if region_of(functions[binding.value.op]).attention is not None:
                continue
            before = _before(binding, functions)
            run = last.pop(before) if before in last and read[before] == 1 else []
            last[binding.var] = [*run, binding]
        runs += [run for run in last.values() if len(run) > 1]
    return runs


def _before(second: VarBinding, functions: dict[GlobalVar, RelaxFunction]) -> Expr | None:
    """What ``second`` reads as its first factor, and as nothing else."""
    region = region_of(functions[second.value.op])
    position = region.factors[0]
    others = {region.factors[1], *(parameter_of(operand.name) for operand in region.operands)}
    return None if position in others else second.value.args[position]


def _join(bindings: Sequence[VarBinding], functions: dict[GlobalVar, RelaxFunction]) -> JoinedProducts:
    """All as one function of what any reads, but for what lies between."""
    parts = tuple(region_of(functions[binding.value.op]) for binding in bindings)
    between = {binding.var for binding in bindings[:-1]}
    operands = tuple(
        dict.fromkeys(operand for binding in bindings for operand in binding.value.args if operand not in between)
    )
    places = {operand: place for place, operand in enumerate(operands)}
    own = [
        part.renumbered([places.get(operand, LINK) for operand in binding.value.args])
        for part, binding in zip(parts, bindings, strict=True)
    ]
    region = own[-1]
    for part in reversed(own[:-1]):
        pattern = f"{part.pattern}_then_{region.pattern}"
        region = replace(part, value=region.value, pattern=pattern, ended=region.ended, then=region)

    def steps(new: dict[Expr, Expr]) -> list[VarBinding]:
        made: list[VarBinding] = []
        for binding in bindings:
            last = binding is bindings[-1]
            variable = Var("joined", binding.var.ty) if last else DataflowVar(binding.var.name, binding.var.ty)
            arguments = [new[argument] for argument in binding.value.args]
            made += steps_of(composite_of(functions[binding.value.op]), arguments, variable)
            new[binding.var] = variable
        return made

    return JoinedProducts(
        bindings=tuple(bindings), parts=parts, operands=operands, region=region,
        inner=new_composite(region, operands, steps),
    )  # fmt: skip
