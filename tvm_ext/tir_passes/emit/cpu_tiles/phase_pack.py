"""De-interleaving: a strided window's input split by phase, so that its vectors are contiguous (paper §3.1, storage).

A convolution of stride s along its vector axis x reads ``in[..., s*x + r]`` lane by lane. Its copy
``phases[..., r % s, x + r // s]`` holds each row's columns sorted by their remainder: for s = 2 the even columns, then
the odd ones. Every tap r then reads consecutive elements, and each element is copied once however many taps read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad, Var, tirx
from tvm_ext.analysis.computations import Computation, dtype_of, static_shape, substitute
from tvm_ext.analysis.tensor_expr import Access, LinearIndex
from tvm_ext.cost.access_table import phase_split
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    SERIAL,
    allocate,
    as_index,
    cast_to,
    index,
    loop,
    new_buffer,
    sequence,
    split_index,
    store,
)
from tvm_ext.support.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PhasePack:
    """One load of the anchor, read from a copy with dims (those of the input that are indexed ..., phase, column).

    ``dims`` holds the affine index of each, over axis names; the last one's axes besides the vector axis are the taps.
    """

    original: Buffer
    buffer: Buffer
    names: tuple[str, ...]  # of the anchor's axes
    vector_axis: str
    dims: tuple[LinearIndex, ...]
    columns: int  # of the input's last dimension
    is_constant: bool = False

    @property
    def stride(self) -> int:
        return self.dims[-1].coefficient(self.vector_axis)

    def indices(self, variables: Sequence[Var], _panel: Expr, _lane: Expr) -> list[Expr]:
        """Where in the copy the element of the given axis values is."""
        named = dict(zip(self.names, variables, strict=True))
        at = [_value(_copied_as(dim), named) for dim in self.dims[:-1]]
        taps = LinearIndex(
            terms=tuple(t for t in self.dims[-1].terms if t[0] != self.vector_axis), constant=self.dims[-1].constant
        )
        tap = _value(taps, named)
        phase, shift = tirx.floormod(tap, index(self.stride)), tirx.floordiv(tap, index(self.stride))
        return [*at, phase, cast_to(named[self.vector_axis], INDEX_DTYPE) + shift]

    def copy(self, computation: Computation, kind: ForKind) -> Stmt:
        """Statements that allocate and fill the copy, its rows in an outer loop of ``kind``."""
        *outer, phases, width = static_shape(self.buffer)
        named = dict(zip(self.names, computation.variables, strict=True))
        last = self.dims[-1]
        tap = next((name for name, _ in last.terms if name != self.vector_axis), None)

        def row(task: Expr) -> Stmt:
            at = split_index(task, outer)
            table = {name: index(0) for dim in self.dims for name, _ in dim.terms}
            for dim, coordinate in zip(self.dims[:-1], at, strict=True):
                name = _stepping_axis(dim)
                table[name] = coordinate if len(dim.terms) == 1 else coordinate - index(dim.constant)

            def phase(number: int) -> Stmt:
                held = min(width, ceil_div(self.columns - number, self.stride))

                def column(x: Expr) -> Stmt:
                    here = dict(table)
                    if tap is None:
                        here[self.vector_axis] = x
                    else:
                        here[tap] = x * index(self.stride) + index(number - last.constant)
                    values = [(named[name], as_index(value, named[name])) for name, value in here.items()]
                    return store(self.buffer, substitute(self.original, values), [*at, index(number), x])

                return loop(held, SERIAL, "column", column)

            return sequence(*(phase(number) for number in range(phases)))

        total = prod(outer)
        return sequence(allocate(self.buffer), loop(total, kind, "row", row))


def phase_pack(
    load: TensorLoad, access: Access, computation: Computation, names: Sequence[str], vector: int
) -> PhasePack | None:
    """How ``load`` is de-interleaved along axis ``vector``; None where it is not a strided window over its last dim."""
    extents = phase_split(access, names[vector], {name: computation.extents[p] for p, name in enumerate(names)})
    if extents is None:
        return None
    return PhasePack(
        original=load,
        buffer=new_buffer(extents, dtype_of(load.source), f"{load.source.name}_phases"),
        names=tuple(names),
        vector_axis=names[vector],
        dims=tuple(item for item in access.indices if item is not None and item.terms),
        columns=access.shape[-1],
    )


def _stepping_axis(dim: LinearIndex) -> str:
    """The axis whose steps of 1 walk through a dimension (or the only axis)."""
    return next((name for name, coefficient in dim.terms if coefficient == 1), dim.terms[0][0])


def _copied_as(dim: LinearIndex) -> LinearIndex:
    """The index in the copy: a dimension with one axis holds only the elements that the axis visits."""
    return LinearIndex(terms=((dim.terms[0][0], 1),)) if len(dim.terms) == 1 else dim


def _value(dim: LinearIndex, named: dict[str, Expr]) -> Expr:
    value: Expr = index(dim.constant)
    for name, coefficient in dim.terms:
        value = value + cast_to(named[name], INDEX_DTYPE) * index(coefficient)
    return value
