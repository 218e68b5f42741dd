"""Stores what is bound many levels deep, so that machine code is made in time.

A function written as arithmetic binds its steps to variables. Stock TVM's code generator for CPUs simplifies what it
binds, with the variables inside replaced by what they are bound to, and so looks at every copy: erf's last step holds
erf's argument 680 times, which took 0.1 s for each place where erf stands. Here a step that would hold many copies
becomes a store of its own, ::

    y[i] = let t = f(x[i]) in g(t)      ->      b[i] = f(x[i]);  y[i] = g(b[i])

A load is looked at once; LLVM keeps what is stored in registers.
"""

from __future__ import annotations

from typing import Any

from tvm_ext._tvm import IF_THEN_ELSE, BufferStore, Call, Expr, Stmt, TensorLoad, Var, nodes_in, structural_mutate, tirx
from tvm_ext.analysis.computations import substitute
from tvm_ext.ir.build_ir import sequence

from .lane_stores import Temporaries, may_be_parted, rewrite_stores

MOST_COPIES = 64
"""Of loaded elements in what a variable is bound to. exp, sigmoid and log of a sum have fewer."""

MOST_GUARDED_COPIES = 4096
"""The same below an ``if_then_else``, whose branches become statements: in a loop over lanes, one lane at a time."""

_PREFIX = "bound_"  # of the names of buffers


def store_deep_bindings(node: Stmt) -> Stmt:
    """``node``, a statement, in which no variable is bound to more than `MOST_COPIES` copies of what is loaded.

    Below an ``if_then_else``, which may be what keeps its loads inside their tensors, it is `MOST_GUARDED_COPIES`.
    """
    return rewrite_stores(node, _parted)


def _parted(store: BufferStore, temporaries: Temporaries) -> Stmt:
    """All steps become stores where one is too deep, for each may use variables of those around it."""
    most = MOST_COPIES if may_be_parted(store) else MOST_GUARDED_COPIES
    return store if _most_copies(store.value) <= most else _steps(store, temporaries)


def _steps(store: BufferStore, temporaries: Temporaries) -> Stmt:
    """The steps, each a store, and then ``store``; those of a branch stay behind its condition."""
    before: list[Stmt] = []

    def let(node: Expr, mutator: Any) -> Expr:
        load = temporaries.stored(mutator.mutate(node.value), before, _PREFIX)
        return mutator.mutate(substitute(node.body, [(node.var, load)]))

    def call(node: Call, mutator: Any) -> Expr:
        if not node.op.same_as(IF_THEN_ELSE):
            return mutator.default_mutate(node)
        condition, first = mutator.mutate(node.args[0]), list[BufferStore]()
        load = temporaries.stored(node.args[1], first, _PREFIX)
        other = type(first[0])(first[0].buffer, node.args[2], list(first[0].indices))
        before.append(tirx.IfThenElse(condition, *(_steps(own, temporaries) for own in (first[0], other))))
        return load

    value = structural_mutate(store.value, [(tirx.Let, let), (Call, call)])
    return sequence(*before, type(store)(store.buffer, value, list(store.indices)))


def _most_copies(value: Expr) -> int:
    """How many loaded elements a variable inside of ``value`` is bound to, with every variable there replaced."""
    copies: dict[Var, int] = {}

    def let(node: Expr, mutator: Any) -> Expr:
        mutator.mutate(node.value)
        copies[node.var] = _loads(node.value, copies)
        mutator.mutate(node.body)
        return node

    structural_mutate(value, (tirx.Let, let))
    return max(copies.values(), default=0)


def _loads(value: Expr, copies: dict[Var, int]) -> int:
    """Loads in ``value``; a bound variable counts ``copies[variable]`` of them, also where it is bound in ``value``."""
    return len(nodes_in(value, TensorLoad)) + sum(copies.get(variable, 0) for variable in nodes_in(value, Var))
