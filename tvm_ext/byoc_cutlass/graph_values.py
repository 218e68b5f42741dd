"""A Relax function as values and their users: what partitioning asks of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    Constant,
    Expr,
    GlobalVar,
    IRModule,
    Node,
    PrimFunc,
    RelaxFunction,
    TeTensor,
    Var,
    VarBinding,
    relax,
    structural_equal,
    topi,
)
from tvm_ext.analysis.relax_values import dtype_of, operator_name, static_shape

RESULT = "the function's result"

_TIR_OPERATORS = {"maximum": topi.maximum, "minimum": topi.minimum}
"""What importers emit as `call_tir` of these functions, bypassing Relax's operators (ONNX's Clip)."""


class GraphValues:
    """The values of one function: what binds them, and who uses them.

    A value's users are the variables that its users bind; `RESULT` stands for the function's own result. A use inside a
    nested function or branch counts as one by the binding that holds it.
    """

    def __init__(self, mod: IRModule, func: RelaxFunction) -> None:
        self.mod, self.func = mod, func
        self.bindings: dict[Var, Expr] = {}  # in program order
        self._places: dict[Var, tuple[int, int]] = {}
        self._users: dict[Var, dict[Var | str, None]] = {}
        for number, block in enumerate(func.body.blocks):
            for position, binding in enumerate(block.bindings):
                self._places[binding.var] = (number, position)
                self._use(binding.value, binding.var)
                if isinstance(binding, VarBinding):
                    self.bindings[binding.var] = binding.value
        self._use(func.body.body, RESULT)

    def _use(self, value: Expr, user: Var | str) -> None:
        def visit(node: Node) -> None:
            if isinstance(node, Var) and not isinstance(node, GlobalVar):
                self._users.setdefault(node, {})[user] = None

        relax.analysis.post_order_visit(value, visit)

    def users_of(self, value: Var) -> list[Var | str]:
        """Each user once, in program order."""
        return list(self._users.get(value, ()))

    def followers_of(self, value: Var) -> list[tuple[int, Var]]:
        """Its users in the same block, with their place in it."""
        block, _ = self._places[value]
        users = [user for user in self.users_of(value) if isinstance(user, Var) and self._places[user][0] == block]
        return [(self._places[user][1], user) for user in users]

    def call_of(self, value: Expr | str, name: str) -> Call | None:
        """The call of the operator ``name`` that ``value`` is bound to; None for anything else."""
        bound = self.bindings.get(value) if isinstance(value, Var) else None
        return bound if operator_name(bound) == name else None

    def constant_of(self, value: Expr) -> Constant | None:
        """The constant that ``value`` is, or is bound to."""
        value = self.bindings.get(value, value) if isinstance(value, Var) else value
        return value if isinstance(value, Constant) else None

    def scalar_of(self, value: Expr) -> float | None:
        """The number that a constant of one element holds, whatever its rank; None for anything else."""
        constant = self.constant_of(value)
        if constant is None or any(extent != 1 for extent in constant.value.shape):
            return None
        return float(np.asarray(constant.value.numpy(), "f8").reshape(()))

    def operator_of(self, value: Expr) -> tuple[str, list[Expr]] | None:
        """Name without "relax." and operands of a call, those of a `call_tir` known as an operator among them."""
        if not isinstance(value, Call):
            return None
        if value.op == CALL_TIR:
            return self._tir_operator(value)
        name = operator_name(value)
        return None if name is None else (name.removeprefix("relax."), list(value.args))

    def _tir_operator(self, call: Call) -> tuple[str, list[Expr]] | None:
        """Known by what the function computes: names of functions say nothing ("maximum3")."""
        func, operands = self.mod[call.args[0]], list(call.args[1])
        if not isinstance(func, PrimFunc):
            return None
        if len(operands) != 2 or not _can_meet(*operands):
            return None
        return next(
            ((name, operands) for name, made in _TIR_OPERATORS.items() if _computes(func, made, operands)), None
        )


def _can_meet(a: Expr, b: Expr) -> bool:
    """Whether two tensors of known extents and one type can be operands of an element-wise operator."""
    shapes = [static_shape(tensor) for tensor in (a, b)]
    if None in shapes or dtype_of(a) != dtype_of(b):
        return False
    left, right = shapes
    pairs = zip(reversed(left or ()), reversed(right or ()), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)


def _computes(func: PrimFunc, compute: Callable[..., TeTensor], operands: Sequence[Expr]) -> bool:
    """Whether ``func`` is what importers make of ``compute`` on such operands; attributes do not count."""
    builder = relax.BlockBuilder()
    call = builder.call_te(compute, *(relax.Var("x", operand.ty) for operand in operands))
    made = builder.get()[call.args[0]]
    return bool(structural_equal(_without_attributes(made), _without_attributes(func)))


def _without_attributes(func: PrimFunc) -> PrimFunc:
    for name in list(func.attrs.keys()) if func.attrs else ():
        func = func.without_attr(name)
    return func
