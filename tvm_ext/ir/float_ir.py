"""Floating-point expressions that mean the same to every compiler and that stock TVM's simplifier leaves alone.

What the simplifier would do to them, and where they are needed, is in `tir_passes/expressions/exact_floats.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm_ext._tvm import Buffer, Call, Expr, Node, PrimFunc, TensorLoad, Var, ir, nodes_in, structural_map, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.analysis.predicates import is_in

from .build_ir import rename_apart

_BITS = (ir.Op.get("tirx.reinterpret"), ir.Op.get("tirx.address_of"))


def nan_passing(a: Expr, b: Expr, better: Callable[[Expr, Expr], Expr], accumulators: Sequence[Buffer] = ()) -> Expr:
    """The one of ``a`` and ``b`` that is ``better`` than the other; NaN where either is NaN.

    Onto one of ``accumulators`` the form with fewest instructions, a masked maximum. It loads the other operand only
    where the first is a number. Outside of vectors stock TVM branches around such a load, of which LLVM makes a gather.
    Two other tensors are compared first, which loads both: ``max(x[i, j], y[i])`` takes a third of the time.
    """
    if _is_number(b):
        a, b = b, a
    if _is_number(a):
        return bound(b, lambda y: tirx.Select(better(a, y), a, y))

    def chosen(x: Expr, y: Expr) -> Expr:
        if all(isinstance(item, TensorLoad) and not is_in(item.source, accumulators) for item in (x, y)):
            return tirx.Select(better(x, y), x, tirx.Select(is_number(x), y, x))
        return tirx.Select(is_number(x), tirx.Select(better(x, y), x, y), x)

    return bound(a, lambda x: bound(b, lambda y: chosen(x, y)))


def bound(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """``body`` of a value that is computed once, and that the simplifier does not look into.

    Loads stay where they are, however often: a compiler sees that they are one. So does what is bfloat16 or computed
    of it: stock TVM widens a binding's value, but not its variable, and see `uses_bfloat16`.
    """
    is_left = isinstance(value, Var | tirx.FloatImm | TensorLoad) or dtype_of(value) == "bfloat16"
    if is_left or uses_bfloat16(value):
        return body(value)
    variable = Var("t", value.ty)
    return tirx.Let(variable, _without_numbers_of_truth(value), body(variable))


def with_own_bindings(func: PrimFunc) -> PrimFunc:
    """``func`` with a variable for each binding, of which there are two where an emitter wrote an expression twice.

    Stock TVM's simplifier keeps what a variable was bound to first, and puts a number wherever the variable is read.
    """
    bound_ones = [binding.var for binding in nodes_in(func.body, tirx.Let)]
    return func if len(set(bound_ones)) == len(bound_ones) else rename_apart(func)


def uses_bfloat16(node: Node) -> bool:
    """Whether bfloat16 is loaded anywhere in ``node``, but as bits (`bfloat16.explicit`) or for its address.

    Stock TVM computes it in float32 (BF16ComputeLegalize), but does not look inside of bindings: what is loaded there
    becomes the number that its bits are as an integer. So nothing that loads it may be bound to a variable.
    """
    bits = [call.args[0] for call in nodes_in(node, Call) if any(call.op == op for op in _BITS)]
    loads = (load for load in nodes_in(node, TensorLoad) if dtype_of(load) == "bfloat16")
    return any(not any(load.same_as(own) for own in bits) for load in loads)


def _without_numbers_of_truth(value: Expr) -> Expr:
    """``value`` with each conversion of a truth value to a number as a choice between 1 and 0.

    Of a bound variable stock TVM asks for the bounds, and of a vector of truth values it cannot make the constants.
    """

    def choice(cast: Expr) -> Expr:
        if dtype_of(cast.value) != "bool":
            return cast
        return tirx.Select(cast.value, tirx.const(1, dtype_of(cast)), tirx.const(0, dtype_of(cast)))

    return structural_map(value, (tirx.Cast, choice))


def is_number(x: Expr) -> Expr:
    """Whether ``x`` is not NaN, as an expression: LLVM makes the one comparison of it that says so."""
    return tirx.LE(x, tirx.FloatImm(dtype_of(x), float("inf")))


def is_float(value: Expr) -> bool:
    return "float" in dtype_of(value)


def hidden(value: float, dtype: str) -> Expr:
    """A constant, NaN aside, that stock TVM does not compute with. The compilers behind it do, as IEEE says.

    It is the absolute value of a constant: unlike a reinterpreted integer, C has a form of that for every type.
    """
    if dtype == "bfloat16":
        return tirx.Cast(dtype, hidden(value, "float32"))
    size = tirx.call_intrin(dtype, "tirx.fabs", tirx.FloatImm(dtype, abs(value)))
    return size if math.copysign(1.0, value) > 0 else tirx.Mul(tirx.FloatImm(dtype, -1.0), size)


def f32(value: float) -> Expr:
    return tirx.const(value, "float32")


def polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's scheme in float32; ``coefficients[i]`` belongs to ``x**i``."""
    total: Expr = f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + f32(coefficient)
    return total


def copy_of(value: Expr) -> Expr:
    """``value`` again, which nothing in TVM takes for the same: multiplied by a hidden 1, which compilers drop."""
    return tirx.Mul(value, hidden(1.0, dtype_of(value)))


def _is_number(value: Expr) -> bool:
    return isinstance(value, tirx.FloatImm) and value.value == value.value
