"""Chains of products become one operator each, where a judge says that one kernel of them is legal and pays.

A link of a chain is a value that one product (a GEMM or convolution with its epilogue) writes, and that another one,
and nothing else, reads as a factor (Bolt, §3.1: D0 of the first is A1 of the second). A chain is cut into segments by
which most time is saved; a segment of two products or more becomes one PrimFunc, their computations in order, with the
panels that were chosen for it in attribute ``tvm_ext.chain``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tvm_ext._tvm import (
    BlockBuilder,
    Constant,
    Expr,
    GlobalVar,
    IRModule,
    PassContext,
    PrimFunc,
    RelaxFunction,
    Var,
    VarBinding,
    copy_module,
    module_pass,
    relax,
)
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.persistent import CHAIN, ChainVerdict, PersistentRegion
from tvm_ext.records.serialise import to_json
from tvm_ext.support.limits import limits

from .chain_links import Link, chains_of, links_of
from .merge_operators import merge_calls
from .persistent_record import with_regions
from .rewriting import with_calls

Judge = Callable[[PrimFunc, Sequence[int]], ChainVerdict]
"""Decides about a chain as one PrimFunc whose parameters at the given positions are constants; it raises
IllegalRewrite, with the reason, where that cannot be one kernel.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """Neighbouring products of a chain as one function, what it is called with, and what the judge says of it."""

    members: tuple[VarBinding, ...]
    func: PrimFunc
    arguments: tuple[Expr, ...]
    verdict: ChainVerdict

    @property
    def gain_us(self) -> float:
        return self.verdict.separate_us - self.verdict.fused_us


@module_pass(opt_level=0, name="tvm_ext.FusePersistent")
class FusePersistent:
    """Put chains of products into one PrimFunc each, and what was decided about every link into the module's record.

    ``judge``: says of a chain whether it can be one kernel, in which panels, and what that gains. ``mode``: True:
    wherever it is legal; ``"auto"``: where the judge says that it pays.
    """

    def __init__(self, judge: Judge, mode: Literal[True, "auto"] = "auto") -> None:
        self.judge, self.always = judge, mode is True

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        builder = BlockBuilder(copy_module(mod))
        considered = _Considered(mod, self.judge)
        regions: list[PersistentRegion] = []
        fused = False
        for gv, func in mod.functions_items():
            if not isinstance(func, RelaxFunction) or not isinstance(func.body, relax.SeqExpr):
                continue
            links = links_of(mod, func)
            chosen = [item for chain in chains_of(links) for item in _cut(chain, considered, always=self.always)]
            calls = {item.members[-1].var: _call(item, builder) for item in chosen}
            if chosen:
                fused = True
                builder.update_func(gv, builder.normalize(_rewritten(func, chosen, calls)))
            regions += _regions(links, chosen, calls, considered)
        result = relax.transform.DeadCodeElimination()(builder.get()) if fused else builder.get()
        return with_regions(result, regions) if regions else result


class _Considered:
    """Segments that were looked at, by the functions that their members call: layers repeat."""

    def __init__(self, mod: IRModule, judge: Judge) -> None:
        self.mod, self.judge = mod, judge
        self._known: dict[tuple[object, ...], tuple[PrimFunc, tuple[int, ...], ChainVerdict | str]] = {}

    def look(self, members: Sequence[VarBinding]) -> Segment | str:
        """``members`` as one operator, or why that cannot be one kernel."""
        fields = [field for member in members for field in member.value.args[1].fields]
        places = {value: place for place, value in enumerate(dict.fromkeys([*_vars(members), *fields]))}
        values = tuple(places)
        constants = tuple(place for value, place in places.items() if isinstance(value, Constant))
        key = (*_callees(members), constants, *(places[field] for field in fields))
        if key not in self._known:
            func, arguments = merge_calls(self.mod, members)
            verdict = self._judged(func, [i for i, value in enumerate(arguments) if isinstance(value, Constant)])
            self._known[key] = func, tuple(places[argument] for argument in arguments), verdict
        func, order, verdict = self._known[key]
        if isinstance(verdict, str):
            return verdict
        return Segment(members=tuple(members), func=func, arguments=tuple(values[i] for i in order), verdict=verdict)

    def _judged(self, func: PrimFunc, constants: Sequence[int]) -> ChainVerdict | str:
        try:
            return self.judge(func, constants)
        except IllegalRewrite as refusal:
            return refusal.problem


def _callees(members: Sequence[VarBinding]) -> tuple[GlobalVar, ...]:
    return tuple(member.value.args[0] for member in members)


def _cut(chain: Sequence[VarBinding], considered: _Considered, *, always: bool) -> list[Segment]:
    """The segments of ``chain`` that become one kernel each: those that save most, or ``always`` join most products.

    Worked example, a, b, c, d with ab, bc, cd and abc legal, which save 5, 9, 5 and 8: ab and cd, 10 together.
    """
    best: list[tuple[float, list[Segment]]] = [(0.0, [])] * (len(chain) + 1)
    legal: set[tuple[int, int]] = set()
    for end in range(1, len(chain) + 1):
        best[end] = best[end - 1]
        for start in range(end - 2, max(-1, end - 1 - limits().chained_products), -1):
            if end - start > 2 and not {(start, end - 1), (start + 1, end)} <= legal:
                continue
            segment = considered.look(chain[start:end])
            if isinstance(segment, str):
                continue
            legal.add((start, end))
            if not always and not segment.verdict.pays:
                continue
            joined = (end - start - 1) * _ONE_KERNEL_LESS if always else 0.0
            saved = best[start][0] + segment.gain_us + joined
            if saved > best[end][0]:
                best[end] = (saved, [*best[start][1], segment])
    return best[-1][1]


_ONE_KERNEL_LESS = 1e15
"""Microseconds that joining two products is worth where all are to be joined: more than any kernel takes."""


def _call(segment: Segment, builder: BlockBuilder) -> Expr:
    """The call of the segment's function, which is added to the module."""
    names = [callee.name_hint.removeprefix("fused_") for callee in _callees(segment.members)]
    func = segment.func.with_attr(CHAIN, to_json(segment.verdict))
    gv = builder.add_func(func, "persistent_" + "_".join(names))
    return relax.call_tir(gv, list(segment.arguments), segment.members[-1].value.ty_args[0])


def _rewritten(func: RelaxFunction, chosen: Sequence[Segment], calls: Mapping[Var, Expr]) -> RelaxFunction:
    """``func`` with each segment's call in the place of its last product."""
    return with_calls(func, calls, {member.var for segment in chosen for member in segment.members[:-1]})


# --- the record -----------------------------------------------------------------------------------------------------
def _regions(
    links: Sequence[Link], chosen: Sequence[Segment], calls: Mapping[Var, Expr], considered: _Considered
) -> list[PersistentRegion]:
    """One entry for each segment that became a kernel, and one for each link that did not."""
    joined = {
        pair for segment in chosen for pair in zip(_vars(segment.members), _vars(segment.members[1:]), strict=False)
    }
    entries = [_fused_region(segment, calls[segment.members[-1].var]) for segment in chosen]
    apart = [link for link in links if (link.first.var, link.second.var) not in joined]
    return [*entries, *(_refused_region(link, considered) for link in apart)]


def _vars(members: Sequence[VarBinding]) -> list[Var]:
    return [member.var for member in members]


def _fused_region(segment: Segment, call: Expr) -> PersistentRegion:
    verdict = segment.verdict
    panels = f", in panels of {' x '.join(map(str, verdict.plan.sizes))}" if verdict.plan else ""
    pays = "it pays by the model" if verdict.pays else "as asked for, although no gain is predicted"
    return PersistentRegion(
        kind="chain",
        operators=tuple(callee.name_hint for callee in _callees(segment.members)),
        fused=True,
        reason=f"{pays}{panels}",
        kernel=call.args[0].name_hint,
        saved_bytes=verdict.saved_bytes,
        fused_us=verdict.fused_us,
        separate_us=verdict.separate_us,
    )


def _refused_region(link: Link, considered: _Considered) -> PersistentRegion:
    operators = tuple(callee.name_hint for callee in _callees((link.first, link.second)))
    if link.obstacle:
        return PersistentRegion(kind="chain", operators=operators, fused=False, reason=link.obstacle)
    found = considered.look((link.first, link.second))
    if isinstance(found, str):
        return PersistentRegion(kind="chain", operators=operators, fused=False, reason=found)
    pays = found.verdict.pays
    return PersistentRegion(
        kind="chain",
        operators=operators,
        fused=False,
        reason="the chain is cut here: its other segments save more" if pays else "no gain is predicted",
        saved_bytes=found.verdict.saved_bytes,
        fused_us=found.verdict.fused_us,
        separate_us=found.verdict.separate_us,
    )
