"""Finds the values by which products hang together: written by one, read by another as a factor, by nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    DataflowBlock,
    Expr,
    GlobalVar,
    IRModule,
    PrimFunc,
    RelaxFunction,
    Var,
    VarBinding,
    nodes_in,
)
from tvm_ext.analysis.products import factors_of
from tvm_ext.analysis.relax_values import static_shape


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Link:
    """Two products of which the second reads the first's result as a factor; ``obstacle`` says why they stay apart."""

    first: VarBinding
    second: VarBinding
    obstacle: str


def chains_of(links: Sequence[Link]) -> list[list[VarBinding]]:
    """The products that links without an obstacle join, in order, two or more each."""
    free = [link for link in links if not link.obstacle]
    following = {link.first.var: link.second for link in free}
    reached = {link.second.var for link in free}
    chains = []
    for link in free:
        if link.first.var not in reached:
            chain = [link.first]
            while chain[-1].var in following:
                chain.append(following[chain[-1].var])
            chains.append(chain)
    return chains


def links_of(mod: IRModule, func: RelaxFunction) -> list[Link]:
    """Every link of a graph, in the order of the second product."""
    products: dict[Var, tuple[VarBinding, DataflowBlock]] = {}
    factors: dict[GlobalVar, tuple[int, ...]] = {}
    read = readers_of(func)
    links: list[Link] = []
    taken: set[Var] = set()
    for block in func.body.blocks:
        for binding in block.bindings:
            callee = _callee(binding.value, mod)
            if callee is None or static_shape(binding.value) is None:
                continue
            if callee not in factors:
                factors[callee] = factors_of(mod[callee])
            for position in factors[callee]:
                arguments = binding.value.args[1].fields
                first, where = (
                    products.get(arguments[position], (None, None)) if position < len(arguments) else (None, None)
                )
                if first is not None:
                    obstacle = _obstacle(first, read, same_block=where is block, second_taken=binding.var in taken)
                    taken |= set() if obstacle else {binding.var}
                    links.append(Link(first=first, second=binding, obstacle=obstacle))
            if factors[callee]:
                products[binding.var] = (binding, block)
    return links


def _obstacle(first: VarBinding, read: Counter[Var], *, same_block: bool, second_taken: bool) -> str:
    if read[first.var] != 1:
        return "the value between them is read elsewhere as well"
    if not same_block:
        return "what may not be moved lies between them"
    return "its other factor is the end of a chain already" if second_taken else ""


def _callee(value: Expr, mod: IRModule) -> GlobalVar | None:
    """The TensorIR function that ``value`` calls; None where it is anything else."""
    if not isinstance(value, Call) or value.op != CALL_TIR or len(value.args) != 2:
        return None
    return value.args[0] if isinstance(mod[value.args[0]], PrimFunc) else None


def readers_of(func: RelaxFunction) -> Counter[Var]:
    """How often each variable is read, by results too."""
    values = [binding.value for block in func.body.blocks for binding in block.bindings]
    return Counter(nodes_in([*values, func.body.body], Var))
