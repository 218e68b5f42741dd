"""The values of an index for many threads or blocks at once, by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tvm_ext._tvm import IF_THEN_ELSE, Call, Expr, Var, tirx
from tvm_ext.analysis.value_functions import BINARY
from tvm_ext.errors import IllegalRewrite

from .loops import op_name

Values = npt.NDArray[np.int64]
Known = Sequence[tuple[Var, Values]]
"""Variables with their values, all of one shape; variables that are not among them are 0."""

_CALLS: dict[str, Callable[[Values, Values], Values]] = {
    "tirx.bitwise_xor": np.bitwise_xor,
    "tirx.bitwise_and": np.bitwise_and,
    "tirx.bitwise_or": np.bitwise_or,
    "tirx.shift_left": np.left_shift,
    "tirx.shift_right": np.right_shift,
}


def index_values(index: Expr, known: Known, bound: Sequence[tuple[Var, Expr]] = ()) -> Values:
    """``index`` for each of the values of ``known``; ``bound`` are variables that stand for expressions.

    Worked example: ``t // 8 * 64 + t % 8`` with t = 0 .. 31 gives 32 values, 0 to 7 and 64 to 71 among them. Raises
    IllegalRewrite for what is no arithmetic of integers, such as an index that is loaded.
    """
    return _Evaluation(known, bound).value(index)


class _Evaluation:
    def __init__(self, known: Known, bound: Sequence[tuple[Var, Expr]]) -> None:
        self.known, self.bound, self.shape = known, bound, known[0][1].shape

    def value(self, node: Expr) -> Values:
        if isinstance(node, int | tirx.IntImm):
            return np.full(self.shape, int(node if isinstance(node, int) else node.value))
        if isinstance(node, Var):
            return self._variable(node)
        if isinstance(node, tirx.Cast):
            return self.value(node.value)
        if isinstance(node, tirx.Select):
            return self._select(node.condition, node.true_value, node.false_value)
        if isinstance(node, Call):
            return self._call(node)
        if type(node).__name__ not in BINARY:
            raise _not_arithmetic(node)
        return np.asarray(BINARY[type(node).__name__](self.value(node.a), self.value(node.b)), dtype=np.int64)

    def _call(self, node: Call) -> Values:
        if node.op.same_as(IF_THEN_ELSE):
            return self._select(*node.args)
        if op_name(node) not in _CALLS:
            raise _not_arithmetic(node)
        return np.asarray(_CALLS[op_name(node)](*map(self.value, node.args)), dtype=np.int64)

    def _select(self, condition: Expr, then: Expr, otherwise: Expr) -> Values:
        return np.where(self.value(condition), self.value(then), self.value(otherwise))

    def _variable(self, variable: Var) -> Values:
        for name, values in self.known:
            if name.same_as(variable):
                return values
        for name, meaning in self.bound:
            if name.same_as(variable):
                return self.value(meaning)
        return np.zeros(self.shape, dtype=np.int64)


def _not_arithmetic(node: Expr) -> IllegalRewrite:
    return IllegalRewrite(f"the index {node} is not arithmetic of thread and loop indices")
