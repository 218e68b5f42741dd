"""Makes safe what is only known at run time: indices of gathers and scatters, integer divisors, shifts.

ONNX allows indices from -s to s - 1 along an axis of extent s, negative ones counting from the end, and gives integer
division by 0 no meaning. Stock TVM reads and writes wherever an index asks, and lets the processor end the process.

On CPUs a kernel of its own (`runtime_checks`) looks at the values first, and what is not allowed is an error of
``run``. With ``bounds="wrap"``, and on GPUs, whose kernels cannot raise errors, nothing is an error: an index counts
modulo its extent, and what is divided by 0 is 0. Constants are looked at here, at build, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

import numpy as np

from tvm_ext._tvm import Call, Constant, Expr, PrimFunc, TeTensor, ir, relax, te, tirx
from tvm_ext.analysis.relax_values import extent_text, known_extent, operator_name, static_shape
from tvm_ext.errors import DivisionByZeroError, IndexRangeError

from .node_names import imported_nodes, spoken_name
from .rewriting import CallRewriter, call_pass
from .runtime_checks import (
    DIVISIONS,
    SHIFTS,
    Checked,
    check_divisors,
    check_indices,
    copy_dtype,
    safe_division,
    safe_shift,
)

Bounds = Literal["error", "wrap"]

ONNX_NAMES = {
    "relax.take": "Gather",
    "relax.gather_elements": "GatherElements",
    "relax.gather_nd": "GatherND",
    "relax.scatter_elements": "ScatterElements",
    "relax.scatter_nd": "ScatterND",
    "relax.index_tensor": "indexing",
    "relax.index_put": "ScatterND",
}


_KEEPING = frozenset(("relax.reshape", "relax.squeeze", "relax.expand_dims"))
"""Operators that leave an index as it is."""


@call_pass("tvm_ext.CheckValues")
class CheckValues(CallRewriter):
    """Check or bound every index and every integer divisor that is only known at run time.

    ``bounds``: ``"error"``: values that are not allowed end the run; ``"wrap"``: they are replaced. Raises
    IndexRangeError, DivisionByZeroError for constants that are not allowed, whatever ``bounds`` says.
    """

    def prepare(self, bounds: Bounds = "error") -> None:
        self.bounds, self.nodes = bounds, imported_nodes(self.mod)

    def _describe(self, expr: Expr) -> str:
        """A tensor for an error: what it is called, its shape and type."""
        shape = getattr(expr.ty.shape, "values", None)
        size = "of unknown shape" if shape is None else "x".join(map(extent_text, shape)) or "scalar"
        name = spoken_name(self.nodes, str(getattr(expr, "name", "a result")))
        return f"{'a constant' if isinstance(expr, Constant) else name} ({size} {expr.ty.dtype})"

    def rewritten(self, call: Call) -> Expr:
        name = call.op.name if isinstance(call.op, ir.Op) else ""
        if name in ONNX_NAMES:
            return self._indexing(name, call)
        if name in DIVISIONS and _is_integer(call.args[1]):
            return self._division(name, call)
        if name == "relax.dynamic_strided_slice":
            return self._slice(call)
        if name in SHIFTS:
            return self.builder_.call_te(safe_shift(name), *call.args, primfunc_name_hint=name.removeprefix("relax."))
        return call

    # --- indices --------------------------------------------------------------------------------------------------
    def _indexing(self, name: str, call: Call) -> Expr:
        data, indices = call.args[:2]
        rule = _RULES[name](call)
        if rule is None or data.ty.shape is None:
            return call  # says itself what becomes of such an index, or has an extent that nobody knows
        if isinstance(indices, relax.Tuple):
            fields = [self._checked(name, data, field, [e]) for field, e in zip(indices.fields, rule, strict=False)]
            indices = relax.Tuple(fields)
        elif name == "relax.take" and self.bounds == "wrap" and not isinstance(indices, Constant):
            return relax.op.take(data, indices, axis=call.attrs.axis, mode="wrap")  # one kernel, not two
        else:
            indices = self._checked(name, data, indices, rule)
            if name == "relax.take":  # inside already; of TVM's modes "fast" warns of crashes and "clip" is cheap
                return relax.op.take(data, indices, axis=call.attrs.axis, mode="clip")
        arguments = [data, indices, *call.args[2:]]
        return type(call)(call.op, arguments, call.attrs, call.ty_args)

    def _checked(self, name: str, data: Expr, indices: Expr, extents: Sequence[Expr]) -> Expr:
        """``indices`` inside ``extents``; with several extents the last axis of ``indices`` has one index into each."""
        indices = self._as_given(indices)
        if self._is_place(indices, extents):
            return indices
        if not hasattr(indices.ty.shape, "values"):
            return self._wrapped(indices, extents)
        shape, sizes = ([known_extent(extent) for extent in of] for of in (_sizes(indices), extents))
        user = f"{ONNX_NAMES[name]} on {self._describe(data)} by {self._describe(indices)}"
        if 0 in sizes and 0 not in shape and None not in shape:
            raise IndexRangeError(f"{user}: no index is inside an axis of extent 0.", "correct the model")
        if isinstance(indices, Constant) and None not in sizes:
            return _checked_constant(user, indices, [size for size in sizes if size is not None])
        if 0 in shape or not sizes:
            return indices
        if self.bounds == "wrap":
            return self._wrapped(indices, extents)
        dtype = copy_dtype(str(indices.ty.dtype), name, sizes)
        checked = Checked(shape=tuple(shape), dtype=str(indices.ty.dtype), user=user)
        open_extents = [extent for extent, size in zip(extents, sizes, strict=True) if size is None]
        return self._run(check_indices(checked, sizes, dtype), "check_indices", indices, dtype, open_extents)

    def _as_given(self, indices: Expr) -> Expr:
        """``x`` of the importer's ``where(x < 0, x + extent, x)``: -1 - extent would become -1, and count once more."""
        chosen = self.bound(indices)
        if operator_name(chosen) != "relax.where":
            return indices
        is_negative, moved = (self.bound(operand) for operand in chosen.args[:2])
        given = chosen.args[2]
        names = (operator_name(is_negative), operator_name(moved))
        reads_it = names == ("relax.less", "relax.add") and all(
            given.same_as(call.args[0]) for call in (is_negative, moved)
        )
        return given if reads_it and _is_zero(is_negative.args[1]) else indices

    def _is_place(self, indices: Expr, extents: Sequence[Expr]) -> bool:
        """Whether ``indices`` are those of extrema along an axis as long as the one that they count along, or shorter.

        Worked example: greedy decoding looks up, among 128 words, the one of the largest of 128 scores.
        """
        found = self.bound(indices)
        while operator_name(found) in _KEEPING:
            found = self.bound(found.args[0])
        if len(extents) != 1 or operator_name(found) not in ("relax.argmax", "relax.argmin"):
            return False
        axis, shape = found.attrs.axis, static_shape(found.args[0])
        extent = None if shape is None else prod(shape) if axis is None else shape[int(axis)]
        size = known_extent(extents[0])
        return extent is not None and size is not None and 0 < extent <= size

    def _wrapped(self, indices: Expr, extents: Sequence[Expr]) -> Expr:
        """Every index modulo its extent."""
        dtype = copy_dtype(str(indices.ty.dtype))

        def wrap(values: TeTensor, sizes: Sequence[Expr]) -> TeTensor:
            def element(*place: Expr) -> Expr:
                extent = tirx.Cast(dtype, sizes[-1])
                for position, other in enumerate(sizes[:-1]):
                    extent = tirx.Select(
                        tirx.EQ(place[-1], tirx.const(position, place[-1].ty.dtype)), tirx.Cast(dtype, other), extent
                    )
                return tirx.floormod(tirx.Cast(dtype, values(*place)), extent)

            return te.compute(values.shape, element, name="T_wrap")

        # Extents that are known at run time only are the kernel's arguments, which `call_te` has to be told of.
        call = self.builder_.call_te(wrap, indices, list(extents), primfunc_name_hint="wrap_indices")
        return self.builder_.emit(call)

    def _run(self, kernel: PrimFunc, hint: str, values: Expr, dtype: str, extents: Sequence[Expr] = ()) -> Expr:
        """A check of `values`; `extents` are those of run time, which it takes as further arguments."""
        variable = self.builder_.add_func(kernel, hint)
        result = relax.TensorType(values.ty.shape, dtype)
        return self.builder_.emit(relax.call_tir(variable, [values, *extents], result))

    # --- divisors -------------------------------------------------------------------------------------------------
    def _division(self, name: str, call: Call) -> Expr:
        dividend, divisor = call.args
        dtype, shape = str(divisor.ty.dtype), static_shape(divisor)
        user = f"{DIVISIONS[name]} of {self._describe(dividend)} by {self._describe(divisor)}"
        if isinstance(divisor, Constant):
            values = divisor.value.numpy()
            if (values == 0).any():
                raise DivisionByZeroError(f"{user}: a divisor is 0.", "correct the model")
            if not np.issubdtype(values.dtype, np.signedinteger) or not (values == -1).any():
                return call
        elif self.bounds == "error" and shape is not None and prod(shape) > 0:
            divisor = self._run(
                check_divisors(Checked(shape=shape, dtype=dtype, user=user)), "check_divisors", divisor, dtype
            )
        hint = name.removeprefix("relax.")
        return self.builder_.call_te(safe_division(name), dividend, divisor, primfunc_name_hint=hint)

    def _slice(self, call: Call) -> Expr:
        """The number of elements is divided by the step, by a function of the VM that has no checks."""
        data, begins, ends, steps = call.args
        shape, dtype = static_shape(steps), str(steps.ty.dtype)
        user = f"Slice of {self._describe(data)} in steps of {self._describe(steps)}"
        if isinstance(steps, Constant):
            if (steps.value.numpy() == 0).any():
                raise DivisionByZeroError(f"{user}: a step is 0.", "correct the model")
            return call
        if shape is None or prod(shape) == 0:
            return call
        if self.bounds == "error":
            kernel = check_divisors(Checked(shape=shape, dtype=dtype, user=user))
            steps = self._run(kernel, "check_steps", steps, dtype)
        else:
            steps = self.builder_.emit(self.builder_.call_te(_at_least_a_step, steps, primfunc_name_hint="steps"))
        return type(call)(call.op, [data, begins, ends, steps], call.attrs, call.ty_args)


def _at_least_a_step(steps: Expr) -> Expr:
    """1 in place of 0."""
    one, zero = (tirx.const(number, str(steps.dtype)) for number in (1, 0))
    return te.compute(
        steps.shape, lambda *place: tirx.Select(tirx.EQ(steps(*place), zero), one, steps(*place)), name="T_steps"
    )


def _is_zero(expr: Expr) -> bool:
    return isinstance(expr, Constant) and not expr.value.numpy().any()


def _is_integer(expr: Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and "int" in str(expr.ty.dtype)


def _checked_constant(user: str, indices: Expr, extents: Sequence[int]) -> Expr:
    """The constant with its indices from 0; raises IndexRangeError for one outside."""
    values = indices.value.numpy()
    limits = np.asarray(extents, "int64") if len(extents) > 1 else np.int64(extents[0])
    wrong = (values < -limits) | (values >= limits)
    if wrong.any():
        worst = values[wrong].ravel()[0]
        raise IndexRangeError(
            f"{user}: index {worst} is outside its axis, of extent {'x'.join(map(str, extents))}.", "correct the model"
        )
    inside = np.where(values < 0, values.astype("int64") + limits, values)
    return relax.const(inside, copy_dtype(str(values.dtype)))


# --- the extents that indices count through -----------------------------------------------------------------------
def _take(call: Call) -> Sequence[Expr] | None:
    if call.attrs.mode != "fast":
        return None
    sizes = _sizes(call.args[0])
    return [prod(sizes)] if call.attrs.axis is None else [sizes[int(call.attrs.axis)]]


def _along_axis(call: Call) -> Sequence[Expr]:
    return [_sizes(call.args[0])[int(call.attrs.axis)]]


def _gather_nd(call: Call) -> Sequence[Expr]:
    first = int(call.attrs.batch_dims)
    return _sizes(call.args[0])[first : first + _tuple_length(call.args[1])]


def _scatter_nd(call: Call) -> Sequence[Expr]:
    return _sizes(call.args[0])[: _tuple_length(call.args[1])]


def _index_tensors(call: Call) -> Sequence[Expr]:
    return _sizes(call.args[0])


def _sizes(expr: Expr) -> list[Expr]:
    return list(expr.ty.shape.values)


def _tuple_length(indices: Expr) -> int:
    return int(indices.ty.shape.values[-1])


_RULES: dict[str, Callable[[Call], Sequence[Expr] | None]] = {
    "relax.take": _take,
    "relax.gather_elements": _along_axis,
    "relax.gather_nd": _gather_nd,
    "relax.scatter_elements": _along_axis,
    "relax.scatter_nd": _scatter_nd,
    "relax.index_tensor": _index_tensors,
    "relax.index_put": _index_tensors,
}
