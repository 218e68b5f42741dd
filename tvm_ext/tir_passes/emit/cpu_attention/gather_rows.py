"""Copies of keys and values whose rows lie apart, or in half precision: float32 rows, one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt
from tvm_ext.ir.build_ir import (
    VECTORIZED,
    allocate,
    index,
    loop,
    new_buffer,
    split_index,
    store,
    vector_loops,
)
from tvm_ext.records.attention import MatrixOperand

from .transpose_blocks import Matrix, MatrixPlace
from .workspace import FLOAT


def copy_row(
    matrix: Matrix, row: Expr, columns: int, lanes: int, target: Callable[[Expr], tuple[Buffer, Sequence[Expr]]]
) -> Stmt:
    """``columns`` elements of a row in whole registers, then smaller ones, to where ``target`` says."""

    def element(column: Expr) -> Stmt:
        buffer, place = target(column)
        return store(buffer, matrix.element(row, column), place)

    return vector_loops(columns, lanes, VECTORIZED, element)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gathered:
    """All matrices of an operand, each of them once: heads that several heads of queries share are not repeated."""

    source: MatrixOperand
    param: Buffer
    operand: MatrixOperand  # how the copy is read
    buffer: Buffer
    matrices: int
    rows: int
    columns: int

    @classmethod
    def of(cls, source: MatrixOperand, param: Buffer, rows: int, columns: int) -> Gathered:
        batch: list[tuple[int, int]] = []
        matrices = 1
        for extent, stride in reversed(source.batch):
            batch.insert(0, (extent, matrices * rows * columns if stride else 0))
            matrices *= extent if stride else 1
        size = matrices * rows * columns
        operand = MatrixOperand(
            dtype=FLOAT, size=size, offset=0, batch=tuple(batch), row_stride=columns, column_stride=1
        )
        buffer = new_buffer((size,), FLOAT, f"{param.name}_rows")
        return cls(
            source=source, param=param, operand=operand, buffer=buffer, matrices=matrices, rows=rows, columns=columns
        )

    def copy(self, kind: ForKind, lanes: int) -> list[Stmt]:
        """Allocates and fills the copy, a row at a time."""
        distinct = MatrixOperand(
            dtype=self.source.dtype,
            size=self.source.size,
            offset=self.source.offset,
            batch=tuple((extent, stride) for extent, stride in self.source.batch if stride),
            row_stride=self.source.row_stride,
            column_stride=self.source.column_stride,
        )

        source = MatrixPlace(operand=distinct, buffer=self.param)

        def row(number: Expr) -> Stmt:
            place, line = split_index(number, (self.matrices, self.rows))
            matrix = source.matrix(source.start(place))
            start = number * index(self.columns)
            return copy_row(matrix, line, self.columns, lanes, lambda column: (self.buffer, [start + column]))

        return [allocate(self.buffer), loop(self.matrices * self.rows, kind, "row", row)]
