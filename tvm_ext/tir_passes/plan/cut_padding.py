"""Divides an operator whose kernel would copy one of its inputs into a padded tensor: the padding, and the rest.

The rest takes the padded tensor for an input, which another operator may then write in that form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext._tvm import (
    Buffer,
    BufferStore,
    Expr,
    PrimFunc,
    SBlock,
    SBlockRealize,
    TensorLoad,
    TeTensor,
    nodes_in,
    te,
    tirx,
)
from tvm_ext.analysis.computations import Computation, dtype_of, read_operator, static_shape
from tvm_ext.analysis.live_taps import live_taps
from tvm_ext.analysis.window import Interval, is_padding
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import index, sequence
from tvm_ext.support.limits import timed_construction

from .padded_stores import border_of, cpu_groups, lies_inside
from .plan_kernels import RowGroup, simplify


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutPadding:
    """An operator in two: ``pad`` makes a tensor of ``shape`` of one input, ``rest`` reads it in that one's place."""

    pad: PrimFunc
    rest: PrimFunc
    shape: tuple[int, ...]
    dtype: str


def cut_padding(func: PrimFunc, position: int) -> CutPadding | None:
    """``func`` without the padding of its parameter ``position``; None where its kernel makes no copy for one.

    What pads the innermost dimension stays (`border_of`), and the padding of a window kernel, which is made band by
    band.
    """
    try:
        with timed_construction():
            pad = _copied(func, position)
    except IllegalRewrite:
        return None
    found = None if pad is None else border_of(pad)
    if pad is None or found is None:
        return None
    inside, outside, bounds = found
    if not isinstance(inside, TensorLoad) or not lies_inside(inside, pad, bounds):
        return None
    shape, dtype = static_shape(pad.target), dtype_of(pad.target)
    return CutPadding(
        pad=_padding(static_shape(inside.source), shape, dtype, bounds, outside),
        rest=_without(func, position, pad.target),
        shape=shape,
        dtype=dtype,
    )


def _copied(func: PrimFunc, position: int) -> Computation | None:
    """The computation that pads the parameter into a tensor of its own, and is all that reads it."""
    operator = read_operator(func, "operator")
    param = operator.params[position]
    readers = operator.consumers(param)
    if len(readers) != 1 or not is_padding(readers[0]) or operator.is_output(readers[0].target):
        return None
    if any(live_taps(reader, readers) for reader in operator.consumers(readers[0].target)):
        return None  # who leaves out what meets padding has to know where it is
    groups, _ = cpu_groups(simplify(operator))
    rows = [computation for group in groups if isinstance(group, RowGroup) for computation in group.computations]
    return readers[0] if any(computation.target.same_as(readers[0].target) for computation in rows) else None


def _padding(
    inner: Sequence[int], shape: Sequence[int], dtype: str, bounds: Sequence[Interval | None], outside: Expr
) -> PrimFunc:
    """A function that puts a tensor of extents ``inner`` between ``bounds`` of one of ``shape``."""
    source = te.placeholder([index(size) for size in inner], dtype, "inner")

    def element(*at: Expr) -> Expr:
        held, moved = [], []
        for place, size, bound in zip(at, shape, bounds, strict=True):
            low, high = bound or (0, size)
            held += [place >= index(low)] if low else []
            held += [place < index(high)] if high < size else []
            moved.append(place - index(low) if low else place)
        return tirx.if_then_else(tirx.all(*held), source(*moved), outside)

    padded: TeTensor = te.compute([index(size) for size in shape], element, name="padded")
    return te.create_prim_func([source, padded]).without_attr("global_symbol")


def _without(func: PrimFunc, position: int, padded: Buffer) -> PrimFunc:
    """``func`` with ``padded``, which it fills itself, for its parameter ``position``."""
    root = func.body.block
    statements = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    kept = [
        statement
        for statement in statements
        if not any(store.buffer.same_as(padded) for store in nodes_in(statement, BufferStore))
    ]
    block = SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        sequence(*kept),
        root.init,
        [buffer for buffer in root.alloc_buffers if not buffer.same_as(padded)],
        root.match_buffers,
        root.annotations,
    )
    params = [padded if place == position else param for place, param in enumerate(func.params)]
    body = SBlockRealize(func.body.iter_values, func.body.predicate, block)
    return PrimFunc(params, body, func.ret_type).with_attrs(dict(func.attrs or {}))
