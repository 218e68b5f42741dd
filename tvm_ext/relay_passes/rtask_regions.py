"""Which bindings of a dataflow block one schedule of rTasks can run together, and in which order what it cannot.

Whatever must run by itself (a call of a library, a kernel that checks values) cuts the block in layers: what needs it
comes behind, everything else does not wait. A layer's calls of kernels are one region.

Worked example: in ``a = k(x); s = sort(a); b = k(x); c = k(s, b)`` the sort stays outside; ``a`` and ``b`` are
region 0, the sort follows, ``c`` is region 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tvm_ext._tvm import Expr, Var, VarBinding, nodes_in, relax


@dataclass(slots=True)
class Layer:
    """Bindings ``outside`` of the schedule, and then those ``inside``, which may run in any order that data allows."""

    outside: list[VarBinding] = field(default_factory=list)
    inside: list[VarBinding] = field(default_factory=list)


def layers_of(bindings: Sequence[VarBinding], may_schedule: Callable[[VarBinding, bool], bool]) -> list[Layer]:
    """The bindings of a dataflow block in layers, each layer's to be run before the next one's.

    ``may_schedule(binding, with_operands)`` says whether a schedule can run it; ``with_operands``: whether what it
    reads that is no constant or parameter is run by the same layer's.
    """
    layers: list[Layer] = []
    depth: dict[Var, int] = {}
    inside: dict[Var, bool] = {}
    for binding in bindings:
        used = [variable for variable in variables_of(binding.value) if variable in depth]
        level = max((depth[variable] for variable in used), default=0)
        same = bool(used) and all(inside[variable] and depth[variable] == level for variable in used)
        scheduled = may_schedule(binding, same)
        if not scheduled:
            level = max((depth[variable] + inside[variable] for variable in used), default=0)
        depth[binding.var], inside[binding.var] = level, scheduled
        while len(layers) <= level:
            layers.append(Layer())
        (layers[level].inside if scheduled else layers[level].outside).append(binding)
    return layers


def variables_of(value: Expr) -> list[Var]:
    """The variables that ``value`` reads, each once; of a function's parameters and loop variables nothing is known."""
    return list(dict.fromkeys(nodes_in(value, Var)))


def users_of(bindings: Iterable[VarBinding]) -> dict[Var, list[VarBinding]]:
    """By variable, the bindings that read it."""
    users: dict[Var, list[VarBinding]] = {}
    for binding in bindings:
        for variable in variables_of(binding.value):
            users.setdefault(variable, []).append(binding)
    return users


def is_output(variable: Var) -> bool:
    """Whether ``variable``, bound in a dataflow block, may be read behind it."""
    return not isinstance(variable, relax.DataflowVar)
