"""`relax.matmul` as a product of templates: batches, transpositions, strides.

A template reads a matrix by a leading dimension and a batch by one distance. A transposed operand costs nothing then:
a `permute_dims` before the product, used by nothing else, is read in place. Worked example: keys (1, 128, 12, 64),
permuted by (0, 2, 3, 1) to 12 matrices of (64, 128): their columns are contiguous, 768 elements apart, and a matrix
begins 64 elements behind the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod
from typing import Literal

from tvm_ext._tvm import Call, DataflowVar, Expr
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.relax_values import described, dtype_of, operator_name, static_shape
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.partition import CutlassProblem, MatrixLayout

from .graph_values import GraphValues

Strides = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Operand:
    """A matrix, or a batch of them: extents and the distances of neighbours, in elements."""

    shape: tuple[int, ...]
    strides: Strides
    dtype: str

    @property
    def batch(self) -> tuple[int, ...]:
        """Extents of the batch, without leading ones."""
        extents = self.shape[:-2]
        first = next((axis for axis, extent in enumerate(extents) if extent != 1), len(extents))
        return extents[first:]


def matmul_problem(call: Call, values: GraphValues) -> CutlassProblem:
    """The product; raises IllegalRewrite for operands that one leading dimension and one distance do not describe."""
    first, second = (_operand(operand, call, values) for operand in call.args)
    (rows, depth), columns = first.shape[-2:], second.shape[-1]
    batches = [prod(operand.batch) for operand in (first, second)]
    folded = batches[1] == 1 and batches[0] > 1 and first.strides == _contiguous(first.shape)
    if folded:  # one matrix of weights for all: the batch is more rows
        rows, batches[0] = rows * batches[0], 1
        first = _Operand(shape=(rows, depth), strides=(depth, 1), dtype=first.dtype)
    elif min(batches) > 1 and first.batch != second.batch:
        raise IllegalRewrite(
            f"relax.matmul of {' and '.join(map(described, call.args))}: a batch is repeated along some of its axes, "
            "and templates have one distance between matrices",
            "expand the smaller operand",
        )
    batch = max(batches)
    return CutlassProblem(
        anchor="matmul" if batch == 1 else "batched_matmul",
        batch=batch,
        rows=rows,
        columns=columns,
        depth=depth,
        dtypes=(first.dtype, second.dtype, dtype_of(call)),
        operands=(_layout(first, call), _layout(second, call)),
        simt=first.dtype == "float32",
    )


def transposed_source(operand: Expr, values: GraphValues) -> Call | None:
    """The `permute_dims` that ``operand`` is the only use of, where a template can read its source in place.

    Of a value that only its block knows, so that it is in the block of the product.
    """
    if not isinstance(operand, DataflowVar) or len(values.users_of(operand)) != 1:
        return None
    value = values.bindings.get(operand)
    if operator_name(value) != "relax.permute_dims" or static_shape(value) is None:
        return None
    assert isinstance(value, Call)
    return value if _matrix_strides(_permutation(value)) is not None else None


def _operand(value: Expr, call: Call, values: GraphValues) -> _Operand:
    shape = static_shape(value) or ()
    if len(shape) < 2:
        raise IllegalRewrite(
            f"relax.matmul of {' and '.join(map(described, call.args))}: templates want two matrices, and "
            f"{described(value)} is a vector",
            "reshape it to a matrix of one row or column",
        )
    source = transposed_source(value, values)
    return _contiguous_operand(value) if source is None else _permutation(source)


def _contiguous_operand(value: Expr) -> _Operand:
    shape = static_shape(value) or ()
    return _Operand(shape=shape, strides=_contiguous(shape), dtype=dtype_of(value))


def _contiguous(shape: tuple[int, ...]) -> Strides:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _permutation(call: Call) -> _Operand:
    source = static_shape(call.args[0]) or ()
    given = call.attrs.axes
    axes = tuple(range(len(source)))[::-1] if given is None else tuple(int(axis) % len(source) for axis in given)
    strides = _contiguous(source)
    return _Operand(
        shape=tuple(source[axis] for axis in axes), strides=tuple(strides[axis] for axis in axes), dtype=dtype_of(call)
    )


def _matrix_strides(operand: _Operand) -> tuple[int, int, int] | None:
    """Distances of matrices, rows and columns; None where no template has such a form.

    Extents of 1 have no distance. Several batch axes are one where each step of the outer is all of the inner.
    """
    extents, strides = operand.shape, operand.strides
    batch = [(extent, stride) for extent, stride in zip(extents[:-2], strides[:-2], strict=True) if extent > 1]
    for (_, outer), (extent, inner) in pairwise(batch):
        if outer != extent * inner:
            return None
    row, column = strides[-2:]
    rows, columns = extents[-2:]
    if column != 1 and columns > 1 and row != 1 and rows > 1:
        return None
    return (batch[-1][1] if batch else 0), row, column


def _layout(operand: _Operand, call: Call) -> MatrixLayout:
    strides = _matrix_strides(operand)
    assert strides is not None, f"{operator_name(call)}: `transposed_source` lets no other operand through"
    batch, row, column = strides
    rows, columns = operand.shape[-2:]
    forms = []
    if column == 1 or columns == 1:
        forms.append(_form("row", columns, rows, row, batch, operand.dtype))
    if row == 1 or rows == 1:
        forms.append(_form("column", rows, columns, column, batch, operand.dtype))
    return max(forms, key=lambda form: form.alignment)  # a vector is a row or a column, as can be read faster


def _form(
    order: Literal["row", "column"], contiguous: int, others: int, leading: int, batch: int, dtype: str
) -> MatrixLayout:
    leading = max(leading, contiguous) if others > 1 else contiguous
    widest = int(VECTOR_BYTES // itemsize_bytes(dtype))
    return MatrixLayout(
        order=order, leading_dimension=leading, batch_stride=batch, alignment=gcd(widest, contiguous, leading, batch)
    )
