"""The factors of an implicit GEMM: how an element is read, along what it is contiguous, how wide it can be copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd, prod

from tvm_ext._tvm import IF_THEN_ELSE, Buffer, Call, Expr, TensorLoad, Var, nodes_in, tirx
from tvm_ext.analysis.computation_exprs import access_of, analyzer_of, axis_names, itemsize_bytes
from tvm_ext.analysis.computation_rewrites import inline
from tvm_ext.analysis.computations import Computation, dtype_of, static_shape, substitute
from tvm_ext.analysis.gemm_form import GemmForm
from tvm_ext.analysis.predicates import factors_of
from tvm_ext.analysis.tensor_expr import Access
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import INDEX_DTYPE, bind, cast_to, index, split_index


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Digits:
    """A fused axis as the computation's own variables: a flat position is a number whose digits are their values.

    Worked example: (n, h, w) of extents (2, 7, 7): position 60 is n = 1, h = 1, w = 4.
    """

    variables: tuple[Var, ...]
    extents: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.extents)

    def at(self, flat: Expr, lane: Expr | None = None) -> list[tuple[Var, Expr]]:
        """The variables' values at position ``flat``, plus ``lane`` on the last digit, which must not overflow."""
        if not self.variables:
            return []
        values = list(split_index(flat, self.extents))
        if lane is not None:
            values[-1] = values[-1] + lane
        return bind(self.variables, values)


def digits_of(computation: Computation, positions: Sequence[int]) -> Digits:
    return Digits(
        variables=tuple(computation.variables[i] for i in positions),
        extents=tuple(computation.extents[i] for i in positions),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Factor:
    """One factor: ``value`` over the digits of batch, lines (rows of A, columns of B) and depth (the reduction).

    ``along_depth`` says along which of the two it is contiguous in shared memory, ``lanes_along_depth`` along which
    neighbouring threads copy it, ``vector`` how many elements one thread copies at a time. A ``plain`` factor is a load
    and nothing else: no padding, no arithmetic.
    """

    name: str
    dtype: str
    value: Expr
    batch: Digits
    lines: Digits
    depth: Digits
    along_depth: bool
    lanes_along_depth: bool
    vector: int
    plain: bool

    def element(self, batch: Expr, line: Expr, depth: Expr, lane: Expr | None) -> Expr:
        """The factor's element; ``lane`` moves along the lines or the depth, whichever the vectors are along."""
        along_depth = self.lanes_along_depth
        table = [
            *self.batch.at(batch),
            *self.lines.at(line, None if along_depth else lane),
            *self.depth.at(depth, lane if along_depth else None),
        ]
        return substitute(self.value, table)


def read_operands(
    computation: Computation, form: GemmForm, prologue: Sequence[Computation], params: Sequence[Buffer]
) -> tuple[Factor, Factor]:
    """The factors along rows and along columns; raises IllegalRewrite where the value is not their product.

    ``prologue`` computations are computed while their consumer's tile is copied; ``params`` are laid out row-major, so
    that a run of their memory may be addressed as one.
    """
    factors = factors_of(computation)
    if factors is None:
        raise IllegalRewrite(f"{computation.name} multiplies something else than two tensors")
    parts = ((form.row_input, form.rows), (form.column_input, form.columns))
    return tuple(  # type: ignore[return-value]
        _operand(name, factors[position], computation, form, lines, prologue, params)
        for name, (position, lines) in zip("AB", parts, strict=True)
    )


def _operand(
    name: str,
    value: Expr,
    computation: Computation,
    form: GemmForm,
    line_positions: Sequence[int],
    prologue: Sequence[Computation],
    params: Sequence[Buffer],
) -> Factor:
    dtype = dtype_of(value)
    whole = dataclasses.replace(computation, value=value, combiner=None, init=None)
    for producer in reversed(prologue):
        whole = inline(producer, whole)
    batch = digits_of(computation, form.batch)
    lines, depth = digits_of(computation, line_positions), digits_of(computation, form.reduction)
    flat = _flat(whole, params)
    if flat is not None:
        # worked example: W[f, c, r, s] along (c, r, s) is W[f, 0, 0, k], the same row-major address
        (lines, gone), (depth, also_gone) = _merged(lines, *flat), _merged(depth, *flat)
        zeros = [(v, tirx.IntImm(dtype_of(v), 0)) for v in (*gone, *also_gone)]
        whole = dataclasses.replace(flat[0], value=substitute(flat[0].value, zeros))
    loads = whole.loads()
    access = access_of(loads[0].source, loads[0].indices, whole) if len(loads) == 1 else None
    by_depth, by_line = (_vector(whole, access, group, dtype) for group in (depth, lines))
    # along both where a window's taps are: the longer digit is the longer run of memory
    along_depth = (by_depth or 0, depth.extents[-1]) >= (by_line or 0, lines.extents[-1]) or by_line is None
    must_be_deep = dtype == "int8"  # ldmatrix transposes pairs of bytes only
    vector = (by_depth if along_depth else by_line) or 1
    return Factor(
        name=name,
        dtype=dtype,
        value=whole.value,
        batch=batch,
        lines=lines,
        depth=depth,
        along_depth=along_depth or must_be_deep,
        lanes_along_depth=along_depth,
        vector=vector if along_depth or not must_be_deep else 1,
        plain=isinstance(whole.value, TensorLoad),
    )


def _flat(whole: Computation, params: Sequence[Buffer]) -> tuple[Computation, Access] | None:
    """A factor that is one load from a parameter, addressed along the last dimension alone; None for any other.

    The row-major address is the same, and may be affine where the indices are not: ``X[f // 28, f % 28, c]`` of a fused
    height and width becomes ``X[0, 0, 64 * f + c]``.
    """
    value = whole.value
    if not isinstance(value, TensorLoad) or not any(value.source.same_as(param) for param in params):
        return None
    address: Expr = index(0)
    step = 1
    for size, item in zip(reversed(static_shape(value.source)), reversed(list(value.indices)), strict=True):
        address = address + cast_to(item, INDEX_DTYPE) * index(step)
        step *= size
    indices = [index(0)] * (len(value.indices) - 1) + [analyzer_of(whole.variables, whole.extents).simplify(address)]
    flat = dataclasses.replace(whole, value=tirx.BufferLoad(value.source, indices))
    access = access_of(value.source, indices, whole)
    return None if any(item is None for item in access.indices) else (flat, access)


def _merged(group: Digits, whole: Computation, run: Access) -> tuple[Digits, list[Var]]:
    """``group`` with its last digits, which memory runs through as one, as one: the last variable stands for it, and
    those gone are 0. Each is as far from the next as that one is long.
    """
    named = list(zip(whole.variables, axis_names(whole), strict=True))
    names = [next(name for v, name in named if v.same_as(own)) for own in group.variables]
    variables, extents, gone = list(group.variables), list(group.extents), []
    last = run.indices[-1]
    moves_along_rows = last is not None and last.coefficient(names[-1]) == 1  # along which a run may go on
    while len(variables) > 1 and moves_along_rows:
        if run.stride(names[len(variables) - 2]) != (run.stride(names[-1]) or 0) * extents[-1]:
            break
        extents[-1] *= extents.pop(-2)
        gone.append(variables.pop(-2))
    return Digits(variables=tuple(variables), extents=tuple(extents)), gone


def _vector(whole: Computation, access: Access | None, group: Digits, dtype: str) -> int | None:
    """Elements that one thread copies at a time along the group's last digit; None where it is not contiguous.

    Worked example: X[n, h, w, c] of 64 channels in halves, along c: every other stride is a multiple of 64 and so of 8,
    which fill 16 bytes. With 3 channels rows start at any half: 1. The digit must be nowhere but in that index, for a
    condition on it would differ among the lanes of a vector.
    """
    variable = group.variables[-1]
    names = axis_names(whole)
    name = next(n for n, v in zip(names, whole.variables, strict=True) if v.same_as(variable))
    if access is None or access.stride(name) != 1:
        return None
    if sum(v.same_as(variable) for v in nodes_in(whole.value, Var)) != 1:
        return 1
    shared = vector_of(access, name, group.extents[-1])
    widest = max(access.itemsize_bytes, itemsize_bytes(dtype))  # of a float32 that is cast to a half while it is copied
    return gcd(shared, VECTOR_BYTES // int(widest))


def vector_of(access: Access, axis: str, extent: int) -> int:
    """The widest vector, in elements, that is aligned wherever it starts along ``axis``, which is ``extent`` long."""
    width, step = extent, 1
    for size, item in zip(reversed(access.shape), reversed(access.indices), strict=True):
        assert item is not None
        for name, coefficient in item.terms:
            if name != axis:
                width = gcd(width, coefficient * step)
        width = gcd(width, item.constant * step)
        step *= size
    return width


def is_zero(value: Expr) -> bool:
    return type(value).__name__ in ("IntImm", "FloatImm") and float(value.value) == 0.0


def guarded(conditions: Iterable[Expr | None], value: Expr, dtype: str) -> Expr:
    """``value`` where all ``conditions`` hold, else 0; padding that is there already joins its condition to these."""
    asked = [condition for condition in conditions if condition is not None]
    if not asked:
        return value
    if isinstance(value, Call) and value.op.same_as(IF_THEN_ELSE) and is_zero(value.args[2]):
        return guarded([reduce(tirx.And, asked), value.args[0]], value.args[1], dtype)
    return tirx.if_then_else(reduce(tirx.And, asked), value, tirx.const(0, dtype))


def within(position: Expr, extent: int | None) -> Expr | None:
    """Whether ``position`` is below ``extent``; None, which holds always, where no tile crosses it."""
    return None if extent is None else position < index(extent)
