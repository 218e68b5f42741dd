"""From a computation of TensorIR to a `TensorExpr`, plain data: axes, affine access maps, arithmetic (paper §3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from tvm_ext._tvm import (
    Analyzer,
    Buffer,
    Call,
    Expr,
    Node,
    TensorLoad,
    Var,
    WalkResult,
    ir,
    nodes_in,
    structural_walk,
    tirx,
)

from .computations import Computation, dtype_of, static_shape
from .tensor_expr import Access, Axis, FusedComputation, LinearIndex, TensorExpr

SUB_BYTE_BITS = {"int4": 4, "uint4": 4, "bool": 8}
"""As LLVM stores them: two of four bits in a byte, a truth value in one."""


def linear_index(index: Expr, variables: Sequence[Var], names: Sequence[str]) -> LinearIndex | None:
    """``index`` as an affine form of ``variables``, or None."""
    form = linear_form(index, variables)
    if form is None:
        return None
    coefficients, constant = form
    terms = tuple((name, c) for name, c in zip(names, coefficients, strict=True) if c)
    return LinearIndex(terms=terms, constant=constant)


def linear_form(node: Expr, variables: Sequence[Var]) -> tuple[list[int], int] | None:
    """The coefficients of ``variables`` in ``node`` and its constant, or None where it is not affine in them."""
    for position, variable in enumerate(variables):
        if variable.same_as(node):
            return [int(p == position) for p in range(len(variables))], 0
    kind = type(node).__name__
    if kind == "IntImm":
        return [0] * len(variables), int(node.value)
    if kind == "Cast":
        return linear_form(node.value, variables)
    if kind not in ("Add", "Sub", "Mul"):
        return None
    left, right = linear_form(node.a, variables), linear_form(node.b, variables)
    if left is None or right is None:
        return None
    if kind == "Mul":
        if any(left[0]) and any(right[0]):
            return None
        form, factor = (left, right[1]) if any(left[0]) else (right, left[1])
        return [c * factor for c in form[0]], form[1] * factor
    sign = 1 if kind == "Add" else -1
    return [a + sign * b for a, b in zip(left[0], right[0], strict=True)], left[1] + sign * right[1]


def analyzer_of(variables: Sequence[Var], extents: Sequence[int]) -> Analyzer:
    """An analyzer that knows what ``variables`` run over."""
    analyzer = Analyzer()
    for variable, extent in zip(variables, extents, strict=True):
        analyzer.bind(variable, ir.Range(0, extent))
    return analyzer


def flat_form(
    buffer: Buffer, indices: Sequence[Expr], variables: Sequence[Var], extents: Sequence[int]
) -> tuple[list[int], int] | None:
    """The row-major address of ``buffer[indices]`` as coefficients of ``variables`` and a constant; None where it is
    not affine.

    Unlike `Access` it sees through fused axes: ``x[k // 32, k % 32]`` of shape (n, 32) has the coefficient 1.
    """
    flat: Expr = tirx.IntImm(dtype_of(variables[0]) if variables else "int64", 0)
    step = 1
    for size, index in zip(reversed(static_shape(buffer)), reversed(list(indices)), strict=True):
        flat = flat + index * step
        step *= size
    return linear_form(analyzer_of(variables, extents).simplify(flat), variables)


def flat_stride(load: TensorLoad, variable: Var, computation: Computation) -> int | None:
    """Elements between neighbours along ``variable`` in row-major memory; None where that is not one number."""
    form = flat_form(load.source, load.indices, computation.variables, computation.extents)
    if form is None:
        return None
    return form[0][next(p for p, own in enumerate(computation.variables) if own.same_as(variable))]


def axis_names(computation: Computation) -> tuple[str, ...]:
    """One unique name for each axis, after its variable: ``v_i0`` is called ``i0``."""
    names: list[str] = []
    for variable in computation.variables:
        name = variable.name.removeprefix("v_")
        names.append(name if name not in names else f"{name}_{len(names)}")
    return tuple(names)


def access_of(
    buffer: Buffer, indices: Sequence[Expr], computation: Computation, *, is_constant: bool = False
) -> Access:
    names = axis_names(computation)
    dtype = dtype_of(buffer)
    return Access(
        tensor=buffer.name,
        shape=static_shape(buffer),
        dtype=dtype,
        itemsize_bytes=itemsize_bytes(dtype),
        indices=tuple(linear_index(index, computation.variables, names) for index in indices),
        is_constant=is_constant,
        gathers=_gathers(indices, computation, names),
    )


def _gathers(indices: Sequence[Expr], computation: Computation, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each index that loads where to read: the axes which it depends on; empty where none does."""
    found = tuple(_axes_in(index, computation, names) if is_gather([index]) else () for index in indices)
    return found if any(found) else ()


def is_gather(indices: Sequence[Expr]) -> bool:
    """Whether an index is itself loaded from a tensor."""
    return bool(nodes_in(list(indices), TensorLoad))


def _axes_in(node: Expr, computation: Computation, names: Sequence[str]) -> tuple[str, ...]:
    used = nodes_in(node, Var)
    return tuple(
        name
        for name, own in zip(names, computation.variables, strict=True)
        if any(own.same_as(variable) for variable in used)
    )


def itemsize_bytes(dtype: str) -> float:
    digits = "".join(ch if ch.isdigit() else " " for ch in dtype).split()
    return (SUB_BYTE_BITS.get(dtype) or (int(digits[0]) if digits else 8)) / 8


def tensor_bytes(buffer: Buffer) -> float:
    """Bytes of all elements; raises IllegalRewrite where the shape is dynamic."""
    return itemsize_bytes(dtype_of(buffer)) * prod(static_shape(buffer))


def tensor_expr_of(
    computation: Computation,
    *,
    name: str,
    constants: Sequence[Buffer] = (),
    prologue: Sequence[Computation] = (),
    epilogue: Sequence[Computation] = (),
) -> TensorExpr:
    """The computation as Roller reads it (paper §3.1); ``constants`` are the buffers known at compile time."""
    inputs = tuple(
        access_of(load.source, load.indices, computation, is_constant=any(load.source.same_as(c) for c in constants))
        for load in computation.loads()
    )
    return TensorExpr(
        name=name,
        axes=tuple(
            Axis(name=n, extent=e, kind=k)
            for n, e, k in zip(axis_names(computation), computation.extents, computation.kinds, strict=True)
        ),
        inputs=inputs,
        output=access_of(computation.target, computation.indices, computation),
        combiner=computation.combiner,
        flops_per_point=count_flops(computation.value) + (1.0 if computation.is_reduction else 0.0),
        prologue=tuple(_fused_computation(s) for s in prologue),
        epilogue=tuple(_fused_computation(s) for s in epilogue),
    )


def tensor_numbers(computations: Sequence[Computation]) -> tuple[tuple[int, ...], ...]:
    """For each computation the tensors that it reads, then writes, numbered in the order in which they first occur."""
    numbers: dict[Buffer, int] = {}
    return tuple(
        tuple(
            numbers.setdefault(buffer, len(numbers))
            for buffer in (*(load.source for load in computation.loads()), computation.target)
        )
        for computation in computations
    )


def _fused_computation(computation: Computation) -> FusedComputation:
    loads = computation.loads()
    return FusedComputation(
        name=computation.name,
        flops_per_element=count_flops(computation.value),
        extra_inputs=tuple(load.source.name for load in loads),
        extra_bytes_per_element=float(sum(itemsize_bytes(dtype_of(load.source)) for load in loads)),
    )


@lru_cache(maxsize=1024)
def count_flops(value: Expr) -> float:
    """Arithmetic operations in a value, outside of indices, which are no work on data."""
    found: list[Node] = []
    arithmetic = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
    structural_walk(value, [(TensorLoad, lambda _: WalkResult.SKIP), (arithmetic, found.append)], order="pre")
    return float(len(found))


@lru_cache(maxsize=1024)
def count_operations(value: Node) -> int:
    """The size of a value as code: its loads, arithmetic, comparisons, choices, casts and calls, indices included."""
    return len(nodes_in(value, _OPERATIONS))


_OPERATIONS = (
    TensorLoad, Call, tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.FloorDiv, tirx.FloorMod, tirx.Max, tirx.Min,
    tirx.Select, tirx.Cast, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE, tirx.And, tirx.Or, tirx.Not,
)  # fmt: skip
