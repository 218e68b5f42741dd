"""The batch axis in functions of TensorIR, which importers write for what Relax has no operator for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_ext._tvm import Analyzer, Buffer, Expr, PrimFunc, TensorLoad, Var, ir, tirx
from tvm_ext.analysis.computations import (
    Computation,
    OperatorBody,
    dtype_of,
    mentions,
    read_operator,
    replace_loads,
    static_shape,
)
from tvm_ext.errors import IllegalRewrite

from .places import SameModel, place_of


def mixes(functions: tuple[PrimFunc, PrimFunc], sizes: tuple[int, int]) -> str:
    """Why one of two ``functions``, for batches of ``sizes``, mixes elements of the batch; empty where neither does.

    Each point of a computation has a place on the batch axis of what it writes. It may read other tensors with a batch
    at that very place alone, and may use the place for nothing else: both functions then do the same for each place.
    """
    try:
        bodies = [read_operator(func, "function") for func in functions]
        first, second = (body.computations for body in bodies)
        names = [_names(body) for body in bodies]
        if names[0] != names[1] or len(names[0]) > len({name for name, _ in names[0]}):
            return "its tensors depend on the batch size"
        for pair in zip(first, second, strict=True):
            if problem := _pair(pair, sizes):
                return problem
    except IllegalRewrite as reason:
        return str(reason)
    except SameModel as reason:
        return str(reason)
    return ""


def _names(body: OperatorBody) -> list[tuple[str, str]]:
    """Names and types of parameters, then of what computations write besides."""
    own = [item.target for item in body.computations if not body.is_output(item.target)]
    outputs = [(f"{item.target.name} ", dtype_of(item.target)) for item in body.computations]
    return [(str(buffer.name), dtype_of(buffer)) for buffer in (*body.params, *own)] + outputs


def _pair(pair: tuple[Computation, Computation], sizes: tuple[int, int]) -> str:
    texts = []
    for own, size in zip(pair, sizes, strict=True):
        text, problem = _described(own, pair, size, sizes)
        if problem:
            return problem
        texts.append(text)
    return "" if texts[0] == texts[1] else "what it computes depends on the batch size"


def _described(
    own: Computation, pair: tuple[Computation, Computation], size: int, sizes: tuple[int, int]
) -> tuple[str, str]:
    """``own`` as text without the extent of its batch, and why it mixes elements."""
    shapes = [static_shape(other.target) for other in pair]
    out = place_of(shapes[0], shapes[1], sizes)
    analyzer = Analyzer()
    for variable, extent in zip(own.variables, own.extents, strict=True):
        analyzer.bind(variable, ir.Range.from_min_extent(0, extent))
    value = [analyzer.simplify(item) for item in (own.value, *([own.init] if own.init is not None else []))]
    place = None
    if out is not None:
        place = own.indices[out.axis]
        others = [index for axis, index in enumerate(own.indices) if axis != out.axis]
        if not isinstance(place, Var) or place not in list(own.spatial) or mentions_any(others, place):
            return "", "its place in the batch is no axis of its own"
        if own.extent(place) != size * out.inner:
            return "", "it writes a part of the batch"
    whole = 0 if out is None else size * out.inner
    here = Var("batch", "int64")
    problems: list[str] = []

    def at_its_place(load: TensorLoad) -> Expr:
        batch = _batch_of(load.source, own, pair, sizes)
        if batch is None:
            return load
        axis, extent = batch
        indices = list(load.indices)
        if extent != whole or not (indices[axis].same_as(place) or whole == 1):  # an extent of 1 has made it 0
            problems.append(f"it reads {load.source.name} across its batch")
        indices[axis] = here
        return tirx.BufferLoad(load.source, indices)

    value = [replace_loads(item, at_its_place) for item in value]
    if place is not None and mentions_any(value, place):
        problems.append("it computes with the place in the batch")
    extents = [
        "batch" if place is not None and variable.same_as(place) else f"{variable.name} {extent}"
        for variable, extent in zip(own.variables, own.extents, strict=True)
    ]
    text = f"{own.combiner} {own.target.name}{list(own.indices)} {extents} {list(map(str, value))}"
    return text, problems[0] if problems else ""


def _batch_of(
    buffer: Buffer, own: Computation, pair: tuple[Computation, Computation], sizes: tuple[int, int]
) -> tuple[int, int] | None:
    """Axis and extent of the batch of ``buffer``, as its shapes in both functions say; None where it has none."""
    named = [[other for other in item.sources() if other.name == buffer.name] for item in pair]
    if any(len(found) != 1 for found in named):
        raise SameModel("its tensors depend on the batch size")
    batch = place_of(static_shape(named[0][0]), static_shape(named[1][0]), sizes)
    return None if batch is None else (batch.axis, int(static_shape(buffer)[batch.axis]))


def mentions_any(nodes: Sequence[Any], variable: Var) -> bool:
    """Whether one of ``nodes`` has ``variable`` in it."""
    return any(mentions(node, variable) for node in nodes)
