"""Takes nested functions apart, so that code and build time grow with their number and not exponentially.

A function of `vector_math` has its argument many times over, bound by a Let. That costs nothing at run time, but stock
TVM's code generator replaces bound variables by their values when it reasons about what it binds, and so looks at every
path: of tanh(tanh(tanh(x))), where each has its argument about a hundred times, at a million. Here what a function is
applied to becomes a store of its own, ::

    y[i] = tanh(tanh(x[i]))      ->      t[i] = tanh(x[i]);  y[i] = tanh(t[i])

with one t of as many elements as the loop has SIMD lanes. LLVM keeps it in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext._tvm import AllocBuffer, BufferStore, Call, Expr, Node, Stmt, nodes_in, structural_map, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import sequence
from tvm_ext.ir.float_ir import is_float
from tvm_ext.support.limits import limits

from .lane_stores import Temporaries, may_be_parted, rewrite_stores

_PREFIX = "nested_"  # of the names of buffers for arguments


def cut_nested(node: Node, functions: frozenset[str]) -> Node:
    """``node``, a statement, with no call of ``functions`` and no maximum inside the argument of another one.

    Nor in what is rounded to bfloat16: stock TVM writes that out as arithmetic on copies of the argument.

    What is nested below an ``if_then_else`` stays: the condition may be what keeps its loads inside their tensors.
    """
    return rewrite_stores(node, lambda node, temporaries: _Cut(functions, temporaries).stores(node))


def cut_notes(body: Stmt) -> list[str]:
    """For the report: how many arguments `cut_nested` made stores of in ``body``."""
    count = sum(node.buffer.name.startswith(_PREFIX) for node in nodes_in(body, AllocBuffer))
    return [f"{count} arguments of nested functions stored first"] if count else []


def contains(value: Expr, functions: frozenset[str]) -> bool:
    """Whether a call of ``functions``, or a maximum or minimum of floats, is anywhere in ``value``."""
    called = any(name_of(call) in functions for call in nodes_in(value, Call))
    return called or any(map(_has_copies, nodes_in(value, (tirx.Max, tirx.Min))))


def name_of(call: Call) -> str:
    return str(getattr(call.op, "name", ""))


def _has_copies(extreme: Expr) -> bool:
    """Whether a maximum computes or looks at an operand more than once, see `float_ir.nan_passing`."""
    constant = isinstance(extreme.a, tirx.FloatImm) or isinstance(extreme.b, tirx.FloatImm)
    return is_float(extreme) and (not constant or dtype_of(extreme) == "bfloat16")


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cuts what is stored by the statements of one loop over lanes."""

    functions: frozenset[str]
    temporaries: Temporaries

    def stores(self, store: BufferStore) -> Stmt:
        if not may_be_parted(store) or binds(store.value):
            return store
        before: list[Stmt] = []

        def call(node: Call) -> Expr:
            if name_of(node) not in self.functions:
                return node
            arguments = self._arguments(node.args, before)
            kept = all(new.same_as(old) for new, old in zip(arguments, node.args, strict=True))
            return node if kept else Call(node.op, arguments, ret_ty=node.ty)

        def extreme(node: Expr) -> Expr:
            if _has_copies(node):
                return type(node)(*self._arguments([node.a, node.b], before))
            if is_float(node) and _extremes_in(node) > limits().nested_extremes:
                return type(node)(
                    *(self._stored(side, before) if _extremes_in(side) else side for side in (node.a, node.b))
                )
            return node

        def narrowing(node: Expr) -> Expr:
            if dtype_of(node) != "bfloat16":
                return node
            return tirx.Cast("bfloat16", self._argument(node.value, before))

        rules = [(Call, call), (tirx.Max, extreme), (tirx.Min, extreme), (tirx.Cast, narrowing)]
        value = structural_map(store.value, rules)
        return sequence(*before, BufferStore(store.buffer, value, list(store.indices))) if before else store

    def _arguments(self, arguments: Sequence[Expr], before: list[Stmt]) -> list[Expr]:
        return [self._argument(argument, before) for argument in arguments]

    def _argument(self, argument: Expr, before: list[Stmt]) -> Expr:
        return self._stored(argument, before) if contains(argument, self.functions) else argument

    def _stored(self, argument: Expr, before: list[Stmt]) -> Expr:
        return self.temporaries.stored(argument, before, _PREFIX)


def _extremes_in(value: Expr) -> int:
    """How many maxima and minima of floats are in ``value``, itself included."""
    return sum(map(is_float, nodes_in(value, (tirx.Max, tirx.Min))))


def binds(value: Expr) -> bool:
    """Whether variables are bound inside of ``value``, which exist nowhere else."""
    return bool(nodes_in(value, tirx.Let))
