"""Two products that follow each other, both cut out for CUTLASS, become one kernel where a template has both and pays.

A pair's links are those of `chain_links`: what lies between is read by the second product alone. Three ways to compute
it compete by their models: one template for both (Bolt §3.1, `byoc_cutlass/back_to_back.py`), one for each, and one
kernel of our own, for which the operators of both go back into the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from tvm_ext.records.partition import (
    LINK,
    PARTITION,
    CutlassPartition,
    CutlassRegion,
    parameter_of,
)
from tvm_ext.records.persistent import PersistentRegion
from tvm_ext.records.serialise import from_json, to_json

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

PairWay = Literal["template", "own", "apart"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProductPair:
    """Two bindings whose calls follow each other and their regions, and both as one function of ``operands``."""

    first: VarBinding
    second: VarBinding
    parts: tuple[CutlassRegion, CutlassRegion]
    operands: tuple[Expr, ...]
    inner: RelaxFunction
    region: CutlassRegion

    @property
    def functions(self) -> tuple[str, str]:
        return self.first.value.op.name_hint, self.second.value.op.name_hint


@dataclass(frozen=True, kw_only=True, slots=True)
class PairDecision:
    """How a pair is computed, and why; times in microseconds, None where there is no such kernel."""

    way: PairWay
    reason: str
    fused_us: float | None
    separate_us: float


@module_pass(opt_level=0, name="tvm_ext.PairProducts")
class PairProducts:
    """Join pairs of the regions that `PartitionCutlass` has cut out, or give them back, as the models say.

    ``mode`` True joins wherever a template has both products, ``"auto"`` where that is predicted to take less than
    `MIN_GAIN` of both apart. A kernel of our own is preferred where it takes less than `MIN_GAIN` of the template. What
    was decided is in the module's record of persistent kernels.
    """

    def __init__(
        self,
        device: DeviceSpec,
        backend: Predictor,
        own_time: OwnTime,
        mode: Literal[True, "auto"] = "auto",
    ) -> None:
        self.device, self.backend, self.own_time, self.always = device, backend, own_time, mode is True
        self.known: dict[CutlassRegion, PairDecision] = {}

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        builder = BlockBuilder(copy_module(mod))
        decided: list[tuple[ProductPair, PairDecision, str]] = []
        for gv, func in mod.functions_items():
            if not is_graph(func):
                continue
            calls: dict[Var, Call] = {}
            taken: set[Var] = set()
            gone = set()
            for pair in _pairs(mod, func):
                if {pair.first.var, pair.second.var} & taken:
                    continue
                decision = self._decide(pair)
                taken |= {pair.first.var, pair.second.var} if decision.way != "apart" else set()
                if decision.way == "template":
                    call = call_of_composite(pair.inner, pair.operands, pair.region.pattern, builder)
                    calls[pair.second.var] = call
                    gone.add(pair.first.var)
                joined = calls.get(pair.second.var)
                decided.append((pair, decision, "" if joined is None else joined.op.name_hint))
            if calls:
                builder.update_func(gv, builder.normalize(with_calls(func, calls, gone)))
        return _record(builder.get(), decided) if decided else mod

    def _decide(self, pair: ProductPair) -> PairDecision:
        """Layers repeat, so that each kind of pair is looked at once."""
        if pair.region.kind not in self.known:
            self.known[pair.region.kind] = self._judge(pair)
        return self.known[pair.region.kind]

    def _judge(self, pair: ProductPair) -> PairDecision:
        try:
            apart_us = sum(map(self.backend.predict, pair.parts))
        except IllegalRewrite as refusal:
            return PairDecision(way="apart", reason=refusal.problem, fused_us=None, separate_us=math.inf)
        template_us, why_not = self._template(pair)
        worth = math.inf if self.always else MIN_GAIN * apart_us
        own_us = self._own(pair, worth if template_us is None else min(worth, MIN_GAIN * template_us))
        times = f"the model: templates apart take {apart_us:.1f} us"
        times += "" if template_us is None else f", one template {template_us:.1f} us"
        times += "" if own_us is None else f", one kernel of our own {own_us:.1f} us"
        if own_us is not None:
            return PairDecision(way="own", reason=times, fused_us=own_us, separate_us=apart_us)
        if template_us is not None and template_us < worth:
            return PairDecision(way="template", reason=times, fused_us=template_us, separate_us=apart_us)
        reason = f"no template has both: {why_not}; {times}" if why_not else f"no gain is predicted; {times}"
        return PairDecision(way="apart", reason=reason, fused_us=template_us, separate_us=apart_us)

    def _own(self, pair: ProductPair, worth_us: float) -> float | None:
        """Microseconds of one kernel of our own, where that is less than ``worth_us``.

        Kernels are constructed to be asked, in a second, where the model of all chains' tiles says that it may be.
        """
        least_us = least_chain_us(pair.region, self.device)
        if least_us is None or least_us >= worth_us:
            return None
        known = {position for position, operand in enumerate(pair.operands) if isinstance(operand, Constant)}
        own_us = self.own_time(as_module(with_prepared(pair.inner, known)))
        return own_us if own_us is not None and own_us < worth_us else None

    def _template(self, pair: ProductPair) -> tuple[float | None, str]:
        """Microseconds of the best template for both, or why there is none."""
        try:
            return self.backend.predict(pair.region), ""
        except IllegalRewrite as refusal:
            return None, refusal.problem


# --- the records -----------------------------------------------------------------------------------------------------
def _record(mod: IRModule, decided: Sequence[tuple[ProductPair, PairDecision, str]]) -> IRModule:
    """``mod`` with what was decided in its records, and those products as operators again that we compute ourselves."""
    ours = [(pair, decision) for pair, decision, _ in decided if decision.way == "own"]
    mod = inlined(mod, frozenset(name for pair, _ in ours for name in pair.functions))
    mod = _without(mod, {name for pair, _, kernel in decided if kernel for name in pair.functions})
    partition = from_json(CutlassPartition, str(mod.attrs[PARTITION]))
    joined = {pair.parts[1].value: pair.region for pair, _, name in decided if name}
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


def _region(pair: ProductPair, decision: PairDecision, kernel: str) -> PersistentRegion:
    return PersistentRegion(
        kind="chain",
        operators=pair.functions,
        fused=bool(kernel),
        reason=decision.reason,
        kernel=kernel,
        fused_us=decision.fused_us,
        separate_us=None if decision.fused_us is None else decision.separate_us,
    )


# --- pairs -----------------------------------------------------------------------------------------------------------
def _pairs(mod: IRModule, func: RelaxFunction) -> list[ProductPair]:
    """Every product with the one that alone reads it, in program order: a product may be in two of them."""
    functions = {gv: inner for gv, inner in mod.functions_items() if is_composite(inner)}
    read, pairs = readers_of(func), []
    for block in func.body.blocks:
        products: dict[Var, VarBinding] = {}
        for binding in block.bindings:
            if not isinstance(binding.value, Call) or binding.value.op not in functions:
                continue
            first = _before(binding, products, functions)
            if first is not None and read[first.var] == 1:
                pairs.append(_pair(first, binding, functions))
            products[binding.var] = binding
    return pairs


def _before(
    second: VarBinding, products: dict[Var, VarBinding], functions: dict[GlobalVar, RelaxFunction]
) -> VarBinding | None:
    """The product whose result ``second`` reads as its first factor, and as nothing else."""
    region = region_of(functions[second.value.op])
    position = region.factors[0]
    others = {region.factors[1], *(parameter_of(operand.name) for operand in region.operands)}
    return None if position in others else products.get(second.value.args[position])


def _pair(first: VarBinding, second: VarBinding, functions: dict[GlobalVar, RelaxFunction]) -> ProductPair:
    """Both as one function of what either reads, but for what lies between."""
    parts = (region_of(functions[first.value.op]), region_of(functions[second.value.op]))
    operands = tuple(
        dict.fromkeys(operand for operand in (*first.value.args, *second.value.args) if operand != first.var)
    )
    positions = [[operands.index(operand) for operand in first.value.args], []]
    positions[1] = [LINK if operand == first.var else operands.index(operand) for operand in second.value.args]
    head, tail = (part.renumbered(own) for part, own in zip(parts, positions, strict=True))
    region = replace(head, value=tail.value, pattern=f"{head.pattern}_then_{tail.pattern}", ended=tail.ended, then=tail)

    def steps(new: dict[Expr, Expr]) -> list[VarBinding]:
        bindings: list[VarBinding] = []
        between, result = DataflowVar(first.var.name, first.var.ty), Var("pair", second.var.ty)
        for product, variable in ((first, between), (second, result)):
            arguments = [new[argument] for argument in product.value.args]
            bindings += steps_of(composite_of(functions[product.value.op]), arguments, variable)
            new[product.var] = variable
        return bindings

    return ProductPair(
        first=first, second=second, parts=parts, operands=operands, region=region,
        inner=new_composite(region, operands, steps),
    )  # fmt: skip
