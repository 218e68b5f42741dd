"""The waves of a graph of calls (Rammer, §3.3), before it is one of rTasks: what could run at the same time."""

from __future__ import annotations

from collections import defaultdict

from tvm_ext._tvm import CALL_TIR, Call, Expr, GlobalVar, IRModule, RelaxFunction, functions_of, nodes_in, relax


def waves_of_calls(mod: IRModule) -> list[list[str]]:
    """The names of functions that ``call_tir`` calls, by how many calls lie before each at most; once for each call."""
    waves: list[list[str]] = []
    for func in functions_of(mod, RelaxFunction).values():
        if isinstance(func.body, relax.SeqExpr):
            waves += _waves_of(func)
    return waves


def _waves_of(func: RelaxFunction) -> list[list[str]]:
    depths: dict[Expr, int] = {}
    waves: defaultdict[int, list[str]] = defaultdict(list)
    for block in func.body.blocks:
        for binding in block.bindings:
            value = binding.value
            depth = max((depths.get(variable, 0) for variable in nodes_in(value, relax.Var)), default=0)
            if isinstance(value, Call) and value.op == CALL_TIR and isinstance(value.args[0], GlobalVar):
                waves[depth].append(value.args[0].name_hint)
                depth += 1
            depths[binding.var] = depth
    return list(waves.values())
