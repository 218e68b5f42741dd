"""Masks and biases that differ by query, transposed once in the graph: kernels then add them as registers of queries.

Swin's biases and the masks of its windows are constants, which `FoldCalls` transposes at build. A mask that is known at
run time is transposed once for all heads and layers that share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from tvm_ext._tvm import BlockBuilder, Expr, Var, VarBinding, relax
from tvm_ext.analysis.relax_values import static_shape
from tvm_ext.byoc_cutlass.graph_values import GraphValues
from tvm_ext.cost.attention_time import AttentionClock
from tvm_ext.records.attention import Attention, BatchDigits, MatrixOperand, ScoreTerm
from tvm_ext.support.arithmetic import ceil_div

from .recognise import FoundAttention


def with_turned_terms(item: FoundAttention, values: GraphValues, clock: AttentionClock) -> Attention:
    """What a kernel computes if terms are transposed before it: constants, and those for which ``clock`` is."""

    def turned(term: ScoreTerm, source: Expr) -> ScoreTerm:
        operand = _turned_operand(term.operand, item.work, clock.lanes)
        if operand is None or (values.constant_of(source) is None and not clock.turning_pays(term.operand)):
            return term
        return replace(term, operand=operand)

    return replace(item.work, terms=tuple(map(turned, item.work.terms, item.sources[3:])))


@dataclass(kw_only=True, slots=True)
class TermTurner:
    """Transposes terms of one function's attentions, each tensor once."""

    builder: BlockBuilder
    _turned: dict[tuple[Expr, MatrixOperand, type[Var]], Var] = field(default_factory=dict)

    def turn(
        self, item: FoundAttention, turned: Attention, variable: type[Var]
    ) -> tuple[FoundAttention, list[VarBinding]]:
        """``item`` as ``turned``, which is `with_turned_terms`, reads it, and the bindings before it, if any."""
        bindings: list[VarBinding] = []
        sources = list(item.sources)
        for number, (old, new) in enumerate(zip(item.work.terms, turned.terms, strict=True), 3):
            if new.operand == old.operand:
                continue
            key = (sources[number], new.operand, variable)
            if key not in self._turned:
                made = self._bindings(sources[number], turned, new.operand, variable)
                bindings += made
                self._turned[key] = made[-1].var
            sources[number] = self._turned[key]
        return replace(item, work=turned, sources=tuple(sources)), bindings

    def _bindings(self, source: Expr, work: Attention, operand: MatrixOperand, variable: type[Var]) -> list[VarBinding]:
        """``source`` as (matrices, queries, keys), transposed, with queries behind the last up to whole registers."""
        found: list[VarBinding] = []

        def bind(call: Expr) -> Var:
            made = self.builder.normalize(call)
            found.append(VarBinding(variable("turned", made.ty), made))
            return found[-1].var

        matrices = prod(static_shape(source) or ()) // (work.queries * work.keys)
        split = bind(relax.op.reshape(source, (matrices, work.queries, work.keys)))
        turned = bind(relax.op.permute_dims(split, [0, 2, 1]))
        if operand.column_stride > work.queries:
            bind(relax.op.nn.pad(turned, [0, 0, 0, 0, 0, operand.column_stride - work.queries]))
        return found


def _turned_operand(operand: MatrixOperand, work: Attention, lanes: int) -> MatrixOperand | None:
    """How the transposed tensor is read; None where ``operand`` is no tensor of whole matrices in order."""
    matrix = work.queries * work.keys
    if (operand.offset, operand.row_stride, operand.column_stride) != (0, work.keys, 1) or work.keys == 1:
        return None
    width = ceil_div(work.queries, lanes) * lanes
    batch: list[tuple[int, int]] = []
    matrices = 1
    for extent, stride in reversed(operand.batch):
        if stride not in (0, matrices * matrix):
            return None
        batch.insert(0, (extent, matrices * work.keys * width if stride else 0))
        matrices *= extent if stride else 1
    if matrices * matrix != operand.size:
        return None
    digits: BatchDigits = tuple(batch)
    return replace(operand, size=matrices * work.keys * width, batch=digits, row_stride=1, column_stride=width)
