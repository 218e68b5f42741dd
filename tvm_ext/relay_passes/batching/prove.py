"""Whether a model treats each element of its batch by itself, by induction over its operators.

The model is imported at two sizes of the batch, and both modules are walked together. Everything that is not the extent
of a batch axis must be the same in both: operators, attributes, constants, numbers. So no shape arithmetic can make one
size compute something else than the other. `rules.py` and `functions.py` then say for each operator that elements of
the batch do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from tvm_ext._tvm import CALL_TIR, Call, Constant, IRModule, Tensor, Var, relax, structural_equal, tvm
from tvm_ext.records.batching import BatchAxes, BatchAxis
from tvm_ext.support.arrays import Array
from tvm_ext.support.tensors import array_over

from ..fold_calls import FoldCalls
from ..node_names import imported_nodes, spoken_name
from .functions import mixes
from .places import SameModel, place_of
from .rules import RESHAPES, RULES, SHAPED, UNIFORM, BatchedCall, BatchedOperand, attribute_text, reshaped

_TAKING = ("relax.take", "relax.gather_nd")
_MOST_BYTES_KEPT = 1 << 16  # a choice: of a weight, which may repeat the same values for each element of a batch


class MixedBatch(Exception):  # noqa: N818 - a finding, not a failure
    """An operator mixes elements of the batch, or is not known not to; the text names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAt:
    """A model imported at one size of its batch; weights by name, large ones as digests, the others are its inputs."""

    size: int
    mod: IRModule
    weights: Mapping[str, bytes | Array]

    @classmethod
    def of(cls, size: int, mod: IRModule, params: Mapping[str, Tensor]) -> ModelAt:
        """Of what `from_onnx` gives; what is known of it is computed."""
        mod = tvm.transform.Sequential([FoldCalls(), relax.transform.DeadCodeElimination()])(mod)
        return cls(size=size, mod=mod, weights={name: _kept(array_over(value)) for name, value in params.items()})


def batch_axes(first: ModelAt, second: ModelAt) -> BatchAxes:
    """Where the batch lies in inputs and outputs of a model, given at two sizes.

    Raises MixedBatch where an operator mixes elements of the batch, has no rule, or is not the same at both sizes.
    """
    return _Walk(first, second).axes()


# What is known of a variable: a tensor's batch (None: it has none), of a tuple one for each field, or the values of a
# constant that is not the same for all elements of the batch.
_Known = tuple[Array, Array]
_Value = BatchAxis | None | list[Any] | _Known


class _Walk:
    def __init__(self, first: ModelAt, second: ModelAt) -> None:
        self._models, self._sizes = (first, second), (first.size, second.size)
        self._nodes = imported_nodes(first.mod)
        self._values: dict[Var, _Value] = {}
        self._twins: dict[Var, Var] = {}

    def axes(self) -> BatchAxes:
        functions = [model.mod["main"] for model in self._models]
        inputs = self._inputs(functions)
        bindings = [[b for block in func.body.blocks for b in block.bindings] for func in functions]
        if len(bindings[0]) != len(bindings[1]):
            raise MixedBatch("the number of operators depends on the batch size")
        for one, other in zip(*bindings, strict=True):
            self._bind(one, other)
        results = [func.body.body for func in functions]
        found = self._argument(results[0], results[1], "the result")
        outputs: list[BatchAxis | None] = []
        for item in found if isinstance(found, list) else [found]:
            if isinstance(item, tuple | list):
                raise MixedBatch("a result depends on the batch size, or is a nested tuple")
            if item is not None and item.outer != 1:
                raise MixedBatch("elements of the batch lie scattered in a result")
            outputs.append(item)
        return BatchAxes(inputs=tuple(inputs), outputs=tuple(outputs))

    def _inputs(self, functions: Sequence[Any]) -> list[BatchAxis | None]:
        if len(functions[0].params) != len(functions[1].params):
            raise MixedBatch("the weights depend on the batch size")
        inputs: list[BatchAxis | None] = []
        for one, other in zip(functions[0].params, functions[1].params, strict=True):
            weights = [model.weights.get(str(v.name)) for model, v in zip(self._models, (one, other), strict=True)]
            batch = self._declare(one, other, f"input {one.name!r}")
            if weights[0] is None and weights[1] is None:
                assert not isinstance(batch, list | tuple)
                inputs.append(batch)
            elif isinstance(weights[0], np.ndarray) and isinstance(weights[1], np.ndarray):
                self._values[one] = self._same(weights[0], weights[1], batch, f"weight {one.name!r}")
            elif batch is not None or weights[0] is None or weights[0] != weights[1]:
                raise MixedBatch(f"weight {one.name!r} depends on the batch size")
        return inputs

    def _declare(self, one: Var, other: Var, who: str) -> _Value:
        self._twins[one] = other
        self._values[one] = value = self._seen(one.ty, other.ty, who)
        return value

    def _seen(self, one: Any, other: Any, who: str) -> _Value:
        """The batch of a tensor, or of each field of a tuple, as types say."""
        if isinstance(one, relax.TupleType):
            if not isinstance(other, relax.TupleType) or len(one.fields) != len(other.fields):
                raise MixedBatch(f"{who} depends on the batch size")
            return [self._seen(a, b, who) for a, b in zip(one.fields, other.fields, strict=True)]
        shapes = [_shape(kind) for kind in (one, other)]
        if shapes[0] is None or shapes[1] is None or str(one.dtype) != str(other.dtype):
            raise MixedBatch(f"{who} has no known shape")
        try:
            return place_of(shapes[0], shapes[1], self._sizes)
        except SameModel as reason:
            raise MixedBatch(f"{who}: {reason}") from reason

    def _bind(self, one: Any, other: Any) -> None:
        variable, value, twin = one.var, one.value, other.value
        who = f"operator {_name_of(value)} (value {spoken_name(self._nodes, variable.name)})"
        if type(value) is not type(twin):
            raise MixedBatch(f"{who} is another one at another batch size")
        self._twins[variable] = other.var
        if not isinstance(value, Call):
            self._values[variable] = self._plain(value, twin, who)
            return
        if _name_of(value) != _name_of(twin):
            raise MixedBatch(f"{who} is another one at another batch size")
        self._values[variable] = self._call(value, twin, self._seen(variable.ty, other.var.ty, who), who)

    def _plain(self, value: Any, twin: Any, who: str) -> _Value:
        """The value of what is no call: a field, a tuple, another name of a variable, a constant."""
        if isinstance(value, relax.TupleGetItem):
            fields = self._argument(value.tuple_value, twin.tuple_value, who)
            if not isinstance(fields, list) or value.index != twin.index:
                raise MixedBatch(f"{who} is a field of no known tuple")
            field: _Value = fields[value.index]
            return field
        return self._argument(value, twin, who)

    def _call(self, call: Call, twin: Call, seen: _Value, who: str) -> _Value:
        name = _name_of(call)
        attributes = [attribute_text(item.attrs) for item in (call, twin)]
        if attributes[0] != attributes[1] or len(call.args) != len(twin.args):
            raise MixedBatch(f"{who} has attributes that depend on the batch size")
        if name in _TAKING and isinstance(places := self._argument(call.args[1], twin.args[1], who), tuple):
            return self._taken(call, twin, places, who)
        operands = [
            operand for pair in zip(call.args, twin.args, strict=True) for operand in self._operands(*pair, who)
        ]
        if call.op == CALL_TIR:
            if any(operand.batch is not None and operand.batch.outer != 1 for operand in operands):
                raise MixedBatch(f"{who} reads elements that lie scattered")
            self._function(call, twin, who)
            return seen
        if not name.startswith("relax.") or name.startswith("relax.call"):
            raise MixedBatch(f"{who} has no rule")
        leaves = seen if isinstance(seen, list) else [seen]
        if all(operand.batch is None for operand in operands):
            if any(leaf is not None for leaf in leaves) and name not in UNIFORM:
                raise MixedBatch(f"{who} makes values that depend on the batch size")
            return seen
        if name not in RULES:
            raise MixedBatch(f"{who} has no rule")
        if not isinstance(leaves[0], BatchAxis) or any(leaf != leaves[0] for leaf in leaves):
            raise MixedBatch(f"{who} loses the batch axis")
        kind = call.ty.fields[0] if isinstance(call.ty, relax.TupleType) else call.ty
        out = _resulting(name, operands, _shape(kind) or (), leaves[0])
        if out is None:
            raise MixedBatch(f"{who} tears elements of the batch apart")
        step = BatchedCall(call=call, operands=tuple(operands), shape=_shape(kind) or (), out=out)
        if problem := RULES[name](step):
            raise MixedBatch(f"{who}: {problem}")
        return [out] * len(leaves) if isinstance(seen, list) else out

    def _taken(self, call: Call, twin: Call, places: _Known, who: str) -> BatchAxis:
        """The batch of what is taken at constant places, which name each element's own alone.

        Of data (n * 24, 1) the places (n, 24) may be 24 i + c, the c being the same for all elements ``i``. Those of a
        GatherND are rows of an index for each leading axis: of data (n, 24) they may be (i, c).
        """
        data = self._argument(call.args[0], twin.args[0], who)
        many = _name_of(call) == "relax.gather_nd"
        depth = places[0].shape[-1] if many and not int(call.attrs.batch_dims) else 0
        axes = range(depth) if many else [] if call.attrs.axis is None else [int(call.attrs.axis)]
        try:
            batch = place_of(places[0].shape, places[1].shape, self._sizes)
        except SameModel as reason:
            raise MixedBatch(f"{who}: {reason}") from reason
        if (
            not isinstance(data, BatchAxis)
            or data.outer != 1
            or data.axis not in axes
            or batch is None
            or (many and batch.axis == places[0].ndim - 1)
        ):
            raise MixedBatch(f"{who} takes elements at places that depend on the batch size")
        within = []
        for own, size in zip(places, self._sizes, strict=True):
            parts = own.reshape(*own.shape[: batch.axis], size, batch.inner, *own.shape[batch.axis + 1 :])
            parts = np.moveaxis(parts, batch.axis, 0).copy()
            batched = parts[..., data.axis] if many else parts
            batched -= (np.arange(size) * data.inner).reshape(-1, *[1] * (batched.ndim - 1))
            first = parts[:1]
            if (parts != first).any() or (batched < 0).any() or (batched >= data.inner).any():
                raise MixedBatch(f"{who} takes elements of another place in the batch")
            within.append(first)
        if not np.array_equal(within[0], within[1]):
            raise MixedBatch(f"{who} takes elements at places that depend on the batch size")
        return batch if many else replace(batch, axis=data.axis + batch.axis)

    def _function(self, call: Call, twin: Call, who: str) -> None:
        functions = [model.mod[item.args[0]] for model, item in zip(self._models, (call, twin), strict=True)]
        if problem := mixes((functions[0], functions[1]), self._sizes):
            raise MixedBatch(f"{who}: {problem}")

    def _operands(self, one: Any, other: Any, who: str) -> Iterator[BatchedOperand]:
        """The tensors of a pair of arguments; raises MixedBatch where what is none differs."""
        if isinstance(one, relax.Tuple) and isinstance(other, relax.Tuple) and len(one.fields) == len(other.fields):
            for pair in zip(one.fields, other.fields, strict=True):
                yield from self._operands(*pair, who)
        elif isinstance(one, Var | Constant):
            value = self._argument(one, other, who)
            kinds = one.ty.fields if isinstance(one.ty, relax.TupleType) else [one.ty]
            for kind, batch in zip(kinds, value if isinstance(value, list) else [value], strict=True):
                shape = _shape(kind)
                if shape is None or isinstance(batch, tuple | list):
                    raise MixedBatch(f"{who} computes with the batch size")
                yield BatchedOperand(shape=shape, batch=batch)
        elif type(one) is not type(other):
            raise MixedBatch(f"{who} has arguments that depend on the batch size")
        elif isinstance(one, relax.ShapeExpr):
            if who.split()[1] not in SHAPED and not structural_equal(one, other):
                raise MixedBatch(f"{who} has arguments that depend on the batch size")
        elif not str(one).startswith(("I.GlobalVar", "@")) and not structural_equal(one, other):
            raise MixedBatch(f"{who} has arguments that depend on the batch size")

    def _argument(self, one: Any, other: Any, who: str) -> _Value:
        """What is known of an expression, which must be the same in both models."""
        if isinstance(one, Var) and isinstance(other, Var):
            if one not in self._values or not self._twins[one].same_as(other):
                raise MixedBatch(f"{who} reads another value at another batch size")
            return self._values[one]
        if isinstance(one, Constant) and isinstance(other, Constant):
            return self._constant(one, other, who)
        if isinstance(one, relax.Tuple) and isinstance(other, relax.Tuple) and len(one.fields) == len(other.fields):
            return [self._argument(a, b, who) for a, b in zip(one.fields, other.fields, strict=True)]
        raise MixedBatch(f"{who} is not known to treat elements of the batch alike")

    def _constant(self, one: Constant, other: Constant, who: str) -> _Value:
        """A constant is the same in both models, or the same for each element of the batch."""
        batch = self._seen(one.ty, other.ty, f"a constant of {who}")
        return self._same(array_over(one.value), array_over(other.value), batch, f"a constant of {who}")

    def _same(self, one: Array, other: Array, batch: _Value, who: str) -> _Value:
        """What is known of constant values: their ``batch`` where its elements are alike, or the values themselves."""
        if isinstance(batch, BatchAxis):
            alike = [_one_element(item, batch, size) for item, size in zip((one, other), self._sizes, strict=True)]
            if alike[0] is None or alike[1] is None or alike[0].tobytes() != alike[1].tobytes():
                return one, other
        elif one.tobytes() != other.tobytes():
            raise MixedBatch(f"{who} depends on the batch size")
        return batch


def _resulting(
    name: str, operands: Sequence[BatchedOperand], shape: tuple[int, ...], seen: BatchAxis
) -> BatchAxis | None:
    """The batch of a result, of which its extent shows ``inner * outer`` alone; None where operands differ in it."""
    if name in RESHAPES:
        return reshaped(operands[0], shape, seen) if operands[0].batch is not None else None
    outers = {operand.batch.outer for operand in operands if operand.batch is not None}
    outer = outers.pop()
    inner, rest = divmod(seen.inner, outer)
    return None if outers or rest else replace(seen, inner=inner, outer=outer)


def _one_element(values: Array, batch: BatchAxis, size: int) -> Array | None:
    """The values that each element of the batch has in common; None where it has others."""
    shape = values.shape
    parts = values.reshape(*shape[: batch.axis], size, batch.inner, *shape[batch.axis + 1 :])
    first = np.take(parts, 0, batch.axis)
    alike = np.broadcast_to(np.expand_dims(first, batch.axis), parts.shape)
    return np.ascontiguousarray(first) if parts.tobytes() == alike.tobytes() else None


def _shape(kind: Any) -> tuple[int, ...] | None:
    shape = kind.shape if isinstance(kind, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        return None
    try:
        return tuple(int(extent) for extent in shape.values)
    except TypeError:
        return None


def _name_of(value: Any) -> str:
    return str(getattr(value.op, "name", value.op)) if isinstance(value, Call) else type(value).__name__


def _kept(values: Array) -> bytes | Array:
    """A copy of a small array; of a large one what tells it from others: a digest of its type, shape and bytes."""
    if values.nbytes <= _MOST_BYTES_KEPT:
        return np.array(values)
    digest = blake2b(f"{values.dtype} {values.shape}".encode(), digest_size=20)
    digest.update(np.ascontiguousarray(values).reshape(-1).view("uint8").data)
    return digest.digest()
