"""Names of bindings that say which node of the model a value belongs to, from import to the report.

The import calls the result of node 12 ``n12_``. Passes keep the names of variables that they do not replace. FuseOps
names all variables anew, so that `named_like` looks up what the fused functions compute.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    Constant,
    DataflowVar,
    Expr,
    GlobalVar,
    IRModule,
    PyExprMutator,
    RelaxFunction,
    Type,
    Var,
    VarBinding,
    expr_mutator,
    relax,
)
from tvm_ext.analysis.relax_values import extent_text
from tvm_ext.records.nodes import NODES, CallSite, ImportedGraph, ImportedNode
from tvm_ext.records.serialise import record_of

_LABEL = re.compile(r"n(\d+)_\d*")


def label(index: int) -> str:
    """The name of the result of node ``index``. TVM numbers equal names behind the underscore."""
    return f"n{index}_"


def node_of(name: str) -> int | None:
    """The index of the node that a variable called ``name`` belongs to; None for any other name."""
    found = _LABEL.fullmatch(name)
    return int(found.group(1)) if found else None


def kept_label(variable: Var, otherwise: str) -> str:
    """The label of ``variable``, for what takes its place; ``otherwise`` where it has none."""
    return str(variable.name) if node_of(str(variable.name)) is not None else otherwise


def imported_nodes(mod: IRModule) -> tuple[ImportedNode, ...]:
    """The nodes of the model that the import noted; none of a module from elsewhere."""
    graph = record_of(mod, NODES, ImportedGraph)
    return () if graph is None else graph.nodes


def spoken_name(nodes: Sequence[ImportedNode], name: str) -> str:
    """What a message calls the value ``name``: its node, ``Softmax scores``; ``name`` where it belongs to none."""
    index = node_of(name)
    return str(nodes[index].node) if index is not None and index < len(nodes) else name


Key = object


def _key(value: Expr, known: Mapping[Var, Key]) -> Key:
    """What ``value`` is, in terms of the variables of the module before fusion."""
    if isinstance(value, Var):
        return known.get(value, value)
    if isinstance(value, Constant):
        return value
    if isinstance(value, relax.Tuple):
        return tuple(_key(field, known) for field in value.fields)
    if isinstance(value, relax.TupleGetItem):
        return ("item", _key(value.tuple_value, known), value.index)
    if isinstance(value, Call):
        return ("call", value.op, tuple(_key(argument, known) for argument in value.args))
    return str(value)


def _bindings(func: RelaxFunction) -> Iterable[VarBinding]:
    return (binding for block in func.body.blocks for binding in block.bindings if isinstance(binding, VarBinding))


def named_like(before: IRModule, fused: IRModule) -> IRModule:
    """``fused``, what FuseOps made of ``before``, with the labels of the values that its functions return."""
    old, main = before["main"], fused["main"]
    values: dict[Key, Key] = {}
    same: dict[Var, Key] = {}  # what is computed twice has the name of the first
    for binding in _bindings(old):
        same[binding.var] = values.setdefault(_key(binding.value, same), binding.var)
    known: dict[Var, Key] = dict(zip(main.params, old.params, strict=True))
    labels: dict[Var, str] = {}
    for binding in _bindings(main):
        found = _computed(binding.value, fused, known, values)
        known[binding.var] = found
        if isinstance(found, Var) and node_of(found.name) is not None:
            labels[binding.var] = found.name
    return _Renamer(fused, labels).run() if labels else fused


def _computed(value: Expr, mod: IRModule, known: Mapping[Var, Key], values: Mapping[Key, Key]) -> Key:
    """The variable of the old module that ``value`` is; a key of its own where there is none."""
    if not (isinstance(value, Call) and isinstance(value.op, GlobalVar)):
        key = _key(value, known)
        return values.get(key, key)
    inner = mod[value.op]
    arguments = (_key(argument, known) for argument in value.args)
    inside: dict[Var, Key] = dict(zip(inner.params, arguments, strict=True))
    for binding in _bindings(inner):
        key = _key(binding.value, inside)
        inside[binding.var] = values.get(key, key)
    return _key(inner.body.body, inside)


@expr_mutator
class _Renamer(PyExprMutator):  # type: ignore[misc]
    """Gives the variables of ``main`` other names."""

    def __init__(self, mod: IRModule, labels: Mapping[Var, str]) -> None:
        super().__init__(mod)
        self.mod, self.labels = mod, labels

    def run(self) -> IRModule:
        self.builder_.update_func(self.mod.get_global_var("main"), self.visit_expr(self.mod["main"]))
        return self.builder_.get()

    def visit_var_def_(self, var: Var) -> Var:
        return self._renamed(var, Var)

    def visit_dataflow_var_def_(self, var: Var) -> Var:
        return self._renamed(var, DataflowVar)

    def _renamed(self, var: Var, kind: type) -> Var:
        if var not in self.labels:
            return var
        new = kind(self.labels[var], var.ty)
        self.set_var_remap(var, new)
        return new


def call_sites(mod: IRModule, nodes: tuple[ImportedNode, ...]) -> tuple[CallSite, ...]:
    """Every call of a kernel in ``main``, in program order, with the nodes that it computes.

    A call has the node of its name, and all before it that no other call is named after. Worked example: ``Conv`` (0),
    ``Relu`` (1), ``MaxPool`` (2) with calls named after 1 and 2: the first has nodes 0 and 1, the second node 2. A call
    without such a name belongs to the first call behind it that has one.
    """
    calls = _calls(mod)
    labels = _settled([node_of(name) for name, _, _ in calls], [reads for _, _, reads in calls])
    boundaries, found = set(labels) - {None}, []
    for index, (_, call, reads) in zip(labels, calls, strict=True):
        indices = _closure(index, boundaries, nodes)
        operands = [argument.ty for argument in call.args[1].fields]
        found.append(
            CallSite(
                function=str(call.args[0].name_hint),
                nodes=tuple(nodes[place].node for place in sorted(indices)),
                reads=reads,
                operands=tuple(map(shape_text, operands)),
                result=shape_text(call.ty),
                dtype=str(getattr(operands[0], "dtype", "")) if operands else "",
                shared=labels.count(index) if index is not None else 1,
            )
        )
    return tuple(found)


def shape_text(type_: Type) -> str:
    """``"1x64x56x56"``; of a tuple all, with commas; empty where the shape is not known."""
    if isinstance(type_, relax.TupleType):
        return ", ".join(map(shape_text, type_.fields))
    shape = getattr(type_, "shape", None)
    return "" if shape is None else "x".join(map(extent_text, shape)) or "scalar"


def _calls(mod: IRModule) -> list[tuple[str, Call, tuple[int, ...]]]:
    """(name of the result, call, places of the calls that it reads), looking through views and tuples."""
    sources: defaultdict[Var, frozenset[int]] = defaultdict(frozenset)
    found: list[tuple[str, Call, tuple[int, ...]]] = []
    for binding in _bindings(mod["main"]):
        value = binding.value
        reads = frozenset[int]().union(*(sources[var] for var in relax.analysis.free_vars(value)))
        sources[binding.var] = reads
        if isinstance(value, Call) and value.op == CALL_TIR:
            sources[binding.var] = frozenset({len(found)})
            found.append((str(binding.var.name), value, tuple(sorted(reads))))
    return found


def _settled(labels: list[int | None], reads: list[tuple[int, ...]]) -> list[int | None]:
    """Labels in which a call without one has that of the first call that reads it."""
    settled = list(labels)
    for place in range(len(labels) - 1, -1, -1):
        for source in reads[place]:
            if labels[source] is None:
                settled[source] = settled[place]
    return settled


def _closure(index: int | None, boundaries: set[int | None], nodes: tuple[ImportedNode, ...]) -> set[int]:
    if index is None or index >= len(nodes):
        return set()
    found, waiting = {index}, [index]
    while waiting:
        for source in nodes[waiting.pop()].reads:
            if source not in boundaries and source not in found:
                found.add(source)
                waiting.append(source)
    return found
