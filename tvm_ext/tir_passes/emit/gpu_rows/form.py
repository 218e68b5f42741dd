"""The common form of computations that share a GPU kernel: grid axes that all have, row axes that are reduced or swept.

Each point of the grid axes is a *row* that no other row touches. Unlike on the CPU (`cpu_rows.emit.shared_axes`) the
grid axes need not lead: softmax over the channels of (n, c, h, w) has the grid (n, h, w) and the row (c). All
computations of a form use the same variables, so that two of them read the same element exactly where their loads are
structurally equal.

Worked example, layer normalisation of (4, 7, 64): ``sum[a, b] += x[a, b, k]`` and ``y[a, b, c] = f(x[a, b, c], sum[a,
b])`` share the axes a and b, fused to a grid of 28; k and c become the one row axis, of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Analyzer, Buffer, Expr, Node, Var, ir, structural_walk, tirx
from tvm_ext.analysis.computation_exprs import linear_form
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, static_shape
from tvm_ext.analysis.predicates import is_in


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
        return _product(self.grid)

    @property
    def row_length(self) -> int:
        return _product(self.row)

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
    buffer: Buffer, indices: Sequence[Expr], axes: Sequence[tuple[Var, int]], *, uniform_in: Var | None = None
) -> Address | None:
    """The address of ``buffer[indices]`` over ``axes`` (variable, extent); None where it is not affine.

    Dimensions whose index does not mention ``uniform_in`` may be opaque.
    """
    variables = [variable for variable, _ in axes]
    analyzer = Analyzer()
    for variable, extent in axes:
        analyzer.bind(variable, ir.Range(0, extent))
    shape = static_shape(buffer)
    flat: Expr = tirx.IntImm(dtype_of(variables[0]) if variables else "int64", 0)
    step = 1
    for size, item in zip(reversed(shape), reversed(list(indices)), strict=True):
        flat = flat + item * step
        step *= size
    form = linear_form(analyzer.simplify(flat), variables)
    if form is not None:
        return Address(coefficients=tuple(form[0]), constant=form[1], opaque=())
    return None if uniform_in is None else _with_opaque(shape, indices, variables, uniform_in)


def _with_opaque(
    shape: Sequence[int], indices: Sequence[Expr], variables: Sequence[Var], uniform_in: Var | None
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


def divides(node: Node) -> bool:
    found: list[Expr] = []
    structural_walk(node, [(tirx.FloorDiv, found.append), (tirx.FloorMod, found.append)])
    return bool(found)


def position_of(computation: Computation, item: Expr) -> int | None:
    return next((p for p, variable in enumerate(computation.variables) if variable.same_as(item)), None)


def accesses(form: RowForm) -> list[tuple[Computation, Buffer, tuple[Expr, ...]]]:
    """(computation, buffer, indices) of every access to memory: loads from outside and stores of kept buffers."""
    found = [
        (computation, item.source, tuple(item.indices))
        for computation in form.computations
        for item in computation.loads()
        if not form.is_internal(item.source)
    ]
    found += [
        (computation, computation.target, computation.indices)
        for computation in form.computations
        if is_in(computation.target, form.kept)
    ]
    return found


def _product(axes: Sequence[LoopAxis]) -> int:
    return prod(axis.extent for axis in axes)
