"""The common form of computations that share a GPU kernel: grid axes that all have, row axes that are reduced or swept.

Each point of the grid axes is a *row* that no other row touches. Unlike on the CPU (`cpu_rows.emit.shared_axes`) the
grid axes need not lead: softmax over the channels of (n, c, h, w) has the grid (n, h, w) and the row (c). All
computations of a form use the same variables, so that two of them read the same element exactly where their loads are
structurally equal.

Worked example, layer normalisation of (4, 7, 64): ``sum[a, b] += x[a, b, k]`` and ``y[a, b, c] = f(x[a, b, c], sum[a,
b])`` share the axes a and b, fused to a grid of 28; k and c become the one row axis, of 64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, Var
from tvm_ext.analysis.computation_exprs import flat_form, linear_form
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, static_shape, substitute
from tvm_ext.analysis.predicates import is_in
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import bind, index


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoopAxis:
    """A variable that all computations of a form share, and its extent."""

    variable: Var
    extent: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowForm:
    """Computations over shared variables. Buffers in ``kept`` are stored to memory; the others live in one thread or
    block.

    A computation's spatial axes are the grid, or the grid and then the row; a reduction's are the grid and it reduces
    the row.
    """

    grid: tuple[LoopAxis, ...]
    row: tuple[LoopAxis, ...]
    computations: tuple[Computation, ...]
    kept: tuple[Buffer, ...]

    @property
    def row_count(self) -> int:
        return prod(axis.extent for axis in self.grid)

    @property
    def row_length(self) -> int:
        return prod(axis.extent for axis in self.row)

    def is_internal(self, buffer: Buffer) -> bool:
        return any(buffer.same_as(computation.target) for computation in self.computations)

    def along_row(self, computation: Computation) -> bool:
        """Whether the computation has a value for each element of the row, not one for the row."""
        return not computation.is_reduction and len(computation.spatial) > len(self.grid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A row-major address: ``constant`` + coefficients times the variables + ``opaque`` strides times unknown numbers.

    Worked example, ``w[ids[i], j]`` of shape (100, 8) over (i, j): coefficients (0, 1), opaque (8,).
    """

    coefficients: tuple[int, ...]
    constant: int
    opaque: tuple[int, ...]


def address_of(
    buffer: Buffer, indices: Sequence[Expr], computation: Computation, *, uniform_in: Var | None = None
) -> Address | None:
    """The address of ``buffer[indices]`` over the axes of ``computation``; None where it is not affine.

    Dimensions whose index does not mention ``uniform_in`` may be opaque.
    """
    form = flat_form(buffer, indices, computation.variables, computation.extents)
    if form is not None:
        return Address(coefficients=tuple(form[0]), constant=form[1], opaque=())
    if uniform_in is None:
        return None
    return _with_opaque(static_shape(buffer), indices, computation.variables, uniform_in)


def _with_opaque(
    shape: Sequence[int], indices: Sequence[Expr], variables: Sequence[Var], uniform_in: Var
) -> Address | None:
    coefficients, constant, opaque, step = [0] * len(variables), 0, [], 1
    for size, item in zip(reversed(shape), reversed(list(indices)), strict=True):
        form = linear_form(item, variables)
        if form is not None:
            coefficients = [old + step * new for old, new in zip(coefficients, form[0], strict=True)]
            constant += step * form[1]
        elif mentions(item, uniform_in):
            return None
        else:
            opaque.append(step)
        step *= size
    return Address(coefficients=tuple(coefficients), constant=constant, opaque=tuple(opaque))


def position_of(computation: Computation, expr: Expr) -> int | None:
    return next((p for p, variable in enumerate(computation.variables) if variable.same_as(expr)), None)


def accesses(form: RowForm) -> list[tuple[Computation, Buffer, tuple[Expr, ...]]]:
    """(computation, buffer, indices) of every access to memory: loads from outside and stores of kept buffers."""
    found = [
        (computation, load.source, tuple(load.indices))
        for computation in form.computations
        for load in computation.loads()
        if not form.is_internal(load.source)
    ]
    found += [
        (computation, computation.target, computation.indices)
        for computation in form.computations
        if is_in(computation.target, form.kept)
    ]
    return found


def table_of(axes: Sequence[LoopAxis], at: Sequence[Expr], width: int, lane: Expr) -> list[tuple[Var, Expr]]:
    """What the variables of ``axes`` are at ``at``, the last one counting vectors of ``width`` with a ``lane`` each."""
    *outer, last = at
    if width > 1:
        last = last * index(width) + lane
    return bind([axis.variable for axis in axes], [*outer, last])


def rename_axes(computation: Computation, positions: Sequence[int], axes: Sequence[LoopAxis]) -> Computation:
    """``computation`` with the axes at ``positions`` in this order and as the variables of ``axes``."""
    if any(dtype_of(computation.variables[p]) != dtype_of(a.variable) for p, a in zip(positions, axes, strict=True)):
        raise IllegalRewrite(
            f"computation {computation.name} counts in another integer type than the computations before it"
        )
    table = [(computation.variables[p], axis.variable) for p, axis in zip(positions, axes, strict=True)]
    return dataclasses.replace(
        computation,
        variables=tuple(axis.variable for axis in axes),
        extents=tuple(axis.extent for axis in axes),
        kinds=tuple(computation.kinds[p] for p in positions),
        value=substitute(computation.value, table),
        indices=tuple(substitute(item, table) for item in computation.indices),
    )
