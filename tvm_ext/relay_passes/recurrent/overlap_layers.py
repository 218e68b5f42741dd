"""Recurrent layers run beside each other (Rammer, §5.2.1): a layer's input products begin with the first steps below.

The import multiplies all steps of a layer with the input's weights at once (`unroll.input_products`), which waits for
the last step of the layer below. Here such a product becomes several, each of the steps that it needs:

    concat(h0 ... h99) -> matmul -> add -> split    becomes    concat(h0 ... h9) -> matmul -> add -> split, ten times

Layer l + 1 then begins ten steps behind layer l. A product of few steps reads all weights, so that how many pay is for
a schedule's simulated time to say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tvm_ext._tvm import Call, Expr, IRModule, expr_mutator, relax
from tvm_ext.analysis.relax_values import operator_name
from tvm_ext.support.arithmetic import ceil_div

from ..rewriting import CallRewriter

Predict = Callable[[IRModule], float]
"""The simulated time of a build's schedules, in microseconds."""

_VIEWS = ("relax.reshape", "relax.squeeze")


@dataclass(frozen=True, slots=True)
class _InputProduct:
    """``split(add(matmul(concat(hidden), weight), bias))`` by steps; no ``bias``: no addition."""

    hidden: tuple[Expr, ...]
    weight: Expr
    bias: Expr | None


@expr_mutator
class _Overlapper(CallRewriter):
    """Divides the input products into those of ``chunk`` steps; ``steps`` is the most that one had."""

    def prepare(self, chunk: int) -> None:
        self.chunk, self.steps = chunk, 0

    def rewritten(self, call: Call) -> Expr:
        found = self._product(call)
        if found is None:
            return call
        steps = len(found.hidden)
        self.steps = max(self.steps, steps)
        return call if self.chunk >= steps else relax.Tuple(list(self._divided(found)))

    def _divided(self, product: _InputProduct) -> Iterator[Expr]:
        """The product of each step, as the parts of the products of about equally many."""
        emit, steps = self.builder_.emit, len(product.hidden)
        count = ceil_div(steps, self.chunk)
        for first, end in itertools.pairwise(steps * place // count for place in range(count + 1)):
            own = list(product.hidden[first:end])
            rows = emit(relax.op.concat(own, axis=0)) if len(own) > 1 else own[0]
            part = emit(relax.op.matmul(rows, product.weight))
            part = part if product.bias is None else emit(relax.op.add(part, product.bias))
            if len(own) == 1:
                yield part
                continue
            split = emit(relax.op.split(part, len(own), axis=0))
            yield from (emit(relax.TupleGetItem(split, place)) for place in range(len(own)))

    def _product(self, call: Call) -> _InputProduct | None:
        """``call`` as the split of a layer's input products, whose rows are hidden states; None for any other."""
        if operator_name(call) != "relax.split" or int(call.attrs.axis) != 0:
            return None
        value, bias = self.bound(call.args[0]), None
        if operator_name(value) == "relax.add":
            value, bias = self.bound(value.args[0]), value.args[1]
            if _extents(bias)[:1] != [1]:
                return None
        if operator_name(value) != "relax.matmul":
            return None
        rows, weight = value.args
        joined = self.bound(rows)
        while operator_name(joined) in _VIEWS:
            joined = self.bound(joined.args[0])
        sections = getattr(call.attrs.indices_or_sections, "value", None)
        if operator_name(joined) != "relax.concat" or int(joined.attrs.axis) != 0 or sections is None:
            return None
        parts = joined.args[0] if isinstance(joined.args[0], relax.Tuple) else self.bound(joined.args[0])
        hidden = tuple(parts.fields) if isinstance(parts, relax.Tuple) else ()
        alike = bool(_extents(rows)) and _extents(joined) == _extents(rows)
        return _InputProduct(hidden, weight, bias) if alike and len(hidden) == int(sections) else None


def _extents(tensor: Expr) -> list[int]:
    """Of a tensor of two axes; [] for any other, and where one is only known at run time."""
    sizes = list(getattr(getattr(tensor.ty, "shape", None), "values", []))
    known = len(sizes) == 2 and all(hasattr(size, "value") for size in sizes)
    return [int(size) for size in sizes] if known else []


def divided(mod: IRModule, chunk: int) -> tuple[IRModule, int]:
    """``mod`` whose layers multiply ``chunk`` steps at once, and the most steps that a layer above another has."""
    overlapper = _Overlapper(mod, chunk)
    made = relax.transform.CanonicalizeBindings()(overlapper.run())
    return relax.transform.DeadCodeElimination()(made), overlapper.steps


def overlapped(mod: IRModule, predict: Predict) -> tuple[IRModule, int | None]:
    """``mod`` with its layers' products of as many steps as ``predict`` finds quickest, and that number.

    Tried are all steps (None), a quarter, an eighth and so on, until one is no quicker than the one before. A module in
    which no layer reads another's steps is left as it is, unasked.
    """
    _, chunk = divided(mod, 1)
    if chunk < 4:
        return mod, None
    best, best_us, steps = mod, predict(mod), None
    chunk = ceil_div(chunk, 2)
    while chunk > 1:
        chunk = ceil_div(chunk, 2)
        trial, _ = divided(mod, chunk)
        trial_us = predict(trial)
        if trial_us >= best_us:
            break
        best, best_us, steps = trial, trial_us, chunk
    return best, steps
