"""Attentions of a function: every softmax between two products, or why it is none that one kernel can compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tvm_ext._tvm import Call, Expr, Var
from tvm_ext.analysis.relax_values import described, dtype_of, operator_name, static_shape
from tvm_ext.byoc_cutlass.graph_values import RESULT, GraphValues
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.attention import Attention, MatrixOperand, ScoreChange, ScoreTerm

from .strided_views import StridedView, broadcast, scalar_factor, views_of, whole

SOFTMAX, MATMUL, WHERE = "relax.nn.softmax", "relax.matmul", "relax.where"
TYPES = ("float32", "float16")
MOST_ELEMENTS = 2**31 - 1  # what kernels count in: signed integers of 32 bits
MOST_STEPS = 32  # operators between the products


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundAttention:
    """One attention: what it computes, the tensors that it reads in the order of the parameters, where it ends.

    ``result`` is the value of the graph that the kernel makes, of extents ``shape``; ``operators`` are those that it
    replaces, first to last.
    """

    work: Attention
    sources: tuple[Expr, ...]
    result: Var
    operators: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedAttention:
    """A softmax over products that stays as it is."""

    operators: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Term:
    """A `ScoreTerm` whose operand still is a view of the scores' extents."""

    change: ScoreChange
    view: StridedView
    scale: float = 1.0
    yes: float = 0.0
    no: float = 0.0
    replaced: bool = False

    def scaled(self, factor: float) -> _Term:
        """This step, behind which the scores are multiplied by ``factor``, as one on scores that were before.

        What float32 cannot hold is infinite, as the product would be: a mask of -3.4e38 times 2 is -inf.
        """
        yes, no = _rounded(self.yes * factor), _rounded(self.no * factor)
        return replace(self, scale=self.scale * factor, yes=yes, no=no)

    def read(self) -> ScoreTerm:
        return ScoreTerm(
            change=self.change,
            operand=_operand(self.view),
            scale=self.scale,
            yes=self.yes,
            no=self.no,
            replaced=self.replaced,
        )


def _rounded(number: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(number))


@dataclass(slots=True)
class _Scores:
    """The way from the product of queries and keys to the softmax, walked backwards."""

    product: Var | None = None
    scale: float = 1.0
    terms: list[_Term] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)


def attentions_of(values: GraphValues) -> Iterator[FoundAttention | RefusedAttention]:
    """What becomes of each softmax that reads a product and is read by one, in program order; others are not named."""
    for variable, call in values.bindings.items():
        if operator_name(call) != SOFTMAX or not _between_products(variable, values):
            continue
        try:
            yield _attention(variable, call, values)
        except IllegalRewrite as refusal:
            yield RefusedAttention(operators=("softmax", "matmul"), reason=refusal.problem)


def _between_products(softmax: Var, values: GraphValues) -> bool:
    """Whether a product is not far behind it and before it, whatever lies between: what is worth a reason."""
    return _reaches(softmax, values, lambda value: _operands(value, values)) and _reaches(
        softmax, values, lambda value: [user for user in values.users_of(value) if isinstance(user, Var)]
    )


def _operands(value: Var, values: GraphValues) -> list[Var]:
    operator = values.operator_of(values.bindings.get(value))
    return [item for item in operator[1] if isinstance(item, Var)] if operator else []


def _reaches(start: Var, values: GraphValues, neighbours: Callable[[Var], list[Var]]) -> bool:
    """Whether a product is reached from ``start`` through operators that work element by element or move data."""
    front, seen = [start], {start}
    while front and len(seen) <= MOST_STEPS:
        value = front.pop(0)
        name = operator_name(values.bindings.get(value))
        if name == MATMUL:
            return True
        if name == SOFTMAX and value is not start:
            continue
        new = [neighbour for neighbour in neighbours(value) if neighbour not in seen]
        seen.update(new)
        front += new
    return False


def _attention(softmax: Var, call: Call, values: GraphValues) -> FoundAttention:
    shape = static_shape(softmax)
    if shape is None:
        raise IllegalRewrite(f"an extent of the scores, {described(softmax)}, is known only at run time")
    if len(shape) < 2 or int(call.attrs.axis) % len(shape) != len(shape) - 1:
        raise IllegalRewrite(f"the softmax of {described(softmax)} is not along the last axis")
    scores = _scores(call.args[0], values)
    product = values.bindings[scores.product]
    last, cleared, after = _product_of(softmax, values)
    second = values.bindings[last]
    result, output = _output(last, values)
    query, query_source, query_scale = _matrix(product.args[0], scores.product, values, scaled=True)
    key, key_source, key_scale = _matrix(product.args[1], scores.product, values, scaled=True, turned=True)
    value, value_source, _ = _matrix(second.args[1], last, values, scaled=False)
    terms = scores.terms[::-1]
    work = Attention(
        batch=prod(shape[:-2]),
        queries=shape[-2],
        keys=shape[-1],
        features=(static_shape(product.args[0]) or ())[-1],
        value_features=(static_shape(last) or ())[-1],
        scale=scores.scale * query_scale * key_scale,
        query=query,
        key=key,
        value=value,
        output=output,
        terms=tuple(term.read() for term in terms),
        cleared=None if cleared is None else _operand(cleared),
    )
    views = [*(term.view for term in terms), *([] if cleared is None else [cleared])]
    sources = (query_source, key_source, value_source, *(view.source for view in views))
    _check(work)
    operators = ("matmul", *reversed(scores.operators), "softmax", *after, "matmul")
    return FoundAttention(work=work, sources=sources, result=result, operators=operators)


def _check(work: Attention) -> None:
    for scale in (work.scale, *(term.scale for term in work.terms)):
        if not 1e-30 < abs(scale) < 1e30:
            raise IllegalRewrite(f"scores or a mask are scaled by {scale}")
    for operand in work.operands:
        if operand.size > MOST_ELEMENTS:
            raise IllegalRewrite(f"a tensor has {operand.size} elements, and kernels count to {MOST_ELEMENTS}")


# --- from the softmax backwards to the first product ----------------------------------------------------------------
def _scores(value: Expr, values: GraphValues) -> _Scores:
    """The steps before the softmax that reads ``value``; IllegalRewrite where there is one that no term can be."""
    scores = _Scores()
    for _ in range(MOST_STEPS):
        if not isinstance(value, Var) or value not in values.bindings:
            raise IllegalRewrite("the softmax reads no product")
        users = values.users_of(value)
        if len(users) != 1 or users[0] == RESULT:
            raise IllegalRewrite(f"the scores {value.name} are used elsewhere, too")
        call = values.bindings[value]
        if operator_name(call) == MATMUL:
            scores.product = value
            return scores
        value = _step_back(value, call, scores, values)
    raise IllegalRewrite(f"more than {MOST_STEPS} operators lie between the product and the softmax")


def _step_back(value: Var, call: Expr, scores: _Scores, values: GraphValues) -> Expr:
    """What ``call`` makes its result of; what it does is noted in ``scores``."""
    name = (operator_name(call) or "").removeprefix("relax.")
    if name not in _STEPS:
        raise IllegalRewrite(f"{name or 'a function'} of {described(value)} lies between the product and the softmax")
    before = _STEPS[name](value, call, scores, values)
    scores.operators.append(name)
    return before


def _cast(value: Var, call: Call, _scores: _Scores, _values: GraphValues) -> Expr:
    if dtype_of(value) not in TYPES or dtype_of(call.args[0]) not in TYPES:
        raise IllegalRewrite(f"the scores are cast from {dtype_of(call.args[0])} to {dtype_of(value)}")
    return call.args[0]


def _reshape(value: Var, call: Call, scores: _Scores, _values: GraphValues) -> Expr:
    """Other batch axes: the terms behind it are seen through it."""
    inner, outer = static_shape(call.args[0]), static_shape(value)
    if inner is None or outer is None or inner[-2:] != outer[-2:]:
        raise IllegalRewrite(f"the scores are reshaped from {described(call.args[0])} to {described(value)}")
    return call.args[0]


def _scale(value: Var, call: Call, scores: _Scores, values: GraphValues) -> Expr:
    factor = scalar_factor(value, values)
    if factor is None:
        raise IllegalRewrite(f"the scores {described(value)} are multiplied by no constant number")
    # Terms that were met already come behind this step, and are not scaled by it; those to come are.
    scores.scale *= factor[1]
    return factor[0]


def _add(value: Var, call: Call, scores: _Scores, values: GraphValues) -> Expr:
    """The operand that is the scores, by the product behind it; the other one is a term."""
    for side, other in ((call.args[0], call.args[1]), (call.args[1], call.args[0])):
        if static_shape(side) == static_shape(value) and _is_scores(side, values):
            scores.terms.append(_added(other, value, values).scaled(scores.scale))
            return side
    raise IllegalRewrite(f"no operand of the sum {described(value)} is a product's")


def _added(other: Expr, value: Var, values: GraphValues) -> _Term:
    """A choice between two numbers is read as the truth values that it follows."""
    chosen = values.call_of(other, WHERE)
    if chosen is not None:
        yes, no = (values.scalar_of(argument) for argument in chosen.args[1:])
        if yes is not None and no is not None:
            return _Term(change="choose", view=_term_view(chosen.args[0], value, values), yes=yes, no=no)
    return _Term(change="add", view=_term_view(other, value, values))


def _where(value: Var, call: Call, scores: _Scores, values: GraphValues) -> Expr:
    """A number in the place of masked scores."""
    condition, yes, no = call.args
    for replaced, number, side in ((True, values.scalar_of(yes), no), (False, values.scalar_of(no), yes)):
        if number is not None and static_shape(side) == static_shape(value):
            view = _term_view(condition, value, values)
            term = _Term(change="replace", view=view, no=number, replaced=replaced)
            scores.terms.append(term.scaled(scores.scale))
            return side
    raise IllegalRewrite(f"a choice between two tensors makes the scores {described(value)}")


def _is_scores(value: Expr, values: GraphValues) -> bool:
    """Whether steps that are known, each used by the next alone, lead from ``value`` back to a product."""

    def steps(step: Var) -> list[Var]:
        name = (operator_name(values.bindings.get(step)) or "").removeprefix("relax.")
        return _operands(step, values) if name in _STEPS and len(values.users_of(step)) == 1 else []

    return isinstance(value, Var) and _reaches(value, values, steps)


_STEPS: dict[str, Callable[[Var, Call, _Scores, GraphValues], Expr]] = {
    "astype": _cast,
    "reshape": _reshape,
    "multiply": _scale,
    "divide": _scale,
    "add": _add,
    "where": _where,
}


# --- operands -------------------------------------------------------------------------------------------------------
def _term_view(source: Expr, value: Var, values: GraphValues) -> StridedView:
    """``source`` repeated to the scores' extents."""
    if dtype_of(source) not in (*TYPES, "bool"):
        raise IllegalRewrite(f"the mask {described(source)} is of no type that is added to scores")
    shape = static_shape(value)
    assert shape is not None
    for view in views_of(source, values, scaled=False):
        repeated = broadcast(view, shape)
        if repeated is not None and _is_matrix(repeated):
            return repeated
    raise IllegalRewrite(f"the mask {described(source)} is no strided view of a tensor of known extents")


def _is_matrix(view: StridedView) -> bool:
    return len(view.axes) >= 2 and all(len(digits) <= 1 for digits in view.axes[-2:])


def _operand(view: StridedView) -> MatrixOperand:
    """The view's last two axes as rows and columns, all others as one batch."""
    row, column = (digits[0][1] if digits else 0 for digits in view.axes[-2:])
    return MatrixOperand(
        dtype=dtype_of(view.source),
        size=prod(static_shape(view.source) or ()),
        offset=view.offset,
        batch=tuple(digit for digits in view.axes[:-2] for digit in digits),
        row_stride=row,
        column_stride=column,
    )


def _matrix(
    source: Expr, product: Var, values: GraphValues, *, scaled: bool, turned: bool = False
) -> tuple[MatrixOperand, Expr, float]:
    """An operand of ``product``, the tensor that it is read from, and the number that it is multiplied by.

    ``turned``: a product's second operand, whose rows are its columns here.
    """
    if dtype_of(source) not in TYPES:
        raise IllegalRewrite(f"{described(source)} is of no type that attention is computed in: {', '.join(TYPES)}")
    batch = (static_shape(product) or ())[:-2]
    for view in views_of(source, values, scaled=scaled):
        shape = view.shape
        repeated = broadcast(view, (*batch, *shape[-2:])) if len(shape) >= 2 else None
        if repeated is None or not _is_matrix(repeated) or dtype_of(view.source) != dtype_of(source):
            continue
        if turned:
            repeated = replace(repeated, axes=(*repeated.axes[:-2], repeated.axes[-1], repeated.axes[-2]))
        return _operand(repeated), repeated.source, repeated.scale
    raise IllegalRewrite(f"{described(source)} is no batch of matrices of known extents")


# --- from the softmax to the second product, and beyond -------------------------------------------------------------
def _product_of(softmax: Var, values: GraphValues) -> tuple[Var, StridedView | None, list[str]]:
    """The product whose first operand the probabilities are, the queries without any, and the operators between."""
    value, cleared = softmax, None
    between: list[str] = []
    shape = static_shape(softmax)
    for _ in range(MOST_STEPS):
        users = values.users_of(value)
        if len(users) != 1 or not isinstance(users[0], Var):
            raise IllegalRewrite(f"the probabilities {softmax.name} are used elsewhere, too")
        user, call = users[0], values.bindings[users[0]]
        name = operator_name(call) or "a function"
        if name == MATMUL and call.args[0] == value and call.args[1] != value:
            return user, cleared, between
        moves = name == "relax.reshape" and (static_shape(user) or ())[-2:] == (shape or ())[-2:]
        casts = name == "relax.astype" and dtype_of(user) in TYPES
        if name == WHERE and cleared is None:
            cleared = _cleared(value, user, values)
        elif not moves and not casts:
            raise IllegalRewrite(f"the probabilities {described(softmax)} are read by {name}")
        value = user
        between.append(name.removeprefix("relax."))
    raise IllegalRewrite(f"more than {MOST_STEPS} operators lie between the softmax and the second product")


def _cleared(probabilities: Var, chosen: Var, values: GraphValues) -> StridedView:
    """The queries whose probabilities ``chosen`` makes 0, as a column of truth values."""
    condition, yes, no = values.bindings[chosen].args
    if values.scalar_of(yes) != 0.0 or no != probabilities or static_shape(chosen) != static_shape(probabilities):
        raise IllegalRewrite(f"the probabilities {described(probabilities)} are read by {WHERE}")
    view = _term_view(condition, chosen, values)
    if _operand(view).column_stride:
        raise IllegalRewrite(f"single probabilities of {described(probabilities)} are replaced by 0")
    return view


def _output(product: Var, values: GraphValues) -> tuple[Var, MatrixOperand]:
    """What the kernel writes: the second product, permuted where that is all it is used for."""
    users = values.users_of(product)
    result, order = product, tuple(range(len(static_shape(product) or ())))
    permuted = values.call_of(users[0], "relax.permute_dims") if len(users) == 1 else None
    if permuted is not None and permuted.attrs.axes is not None:
        result, order = users[0], tuple(int(axis) for axis in permuted.attrs.axes)
    view = whole(result)
    if view is None:
        raise IllegalRewrite(f"an extent of the result {described(result)} is known only at run time")
    # Axis `order[i]` of the product is axis i of what is written.
    places = sorted(range(len(order)), key=lambda axis: order[axis])
    written = replace(view, axes=tuple(view.axes[axis] for axis in places))
    if not _is_matrix(written):
        raise IllegalRewrite(f"the result {described(result)} is no batch of matrices")
    return result, _operand(written)
