"""Blocks of a matrix read or written the other way round, in squares of SIMD registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt, Var, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    SERIAL,
    VECTORIZED,
    cast_to,
    index,
    load,
    loop,
    sequence,
    split_index,
    store,
)
from tvm_ext.ir.transpose_registers import transpose_registers
from tvm_ext.records.attention import MatrixOperand

from .register_products import QueryLanes
from .workspace import FLOAT, Workspace


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matrix:
    """One matrix of an operand: its buffer, the place of its first element, and its strides, in elements."""

    buffer: Buffer
    start: Expr
    row_stride: int
    column_stride: int

    def place(self, row: Expr, column: Expr) -> list[Expr]:
        return [self.start + row * index(self.row_stride) + column * index(self.column_stride)]

    def element(self, row: Expr, column: Expr) -> Expr:
        """As float32; a truth value stays one."""
        value = load(self.buffer, self.place(row, column))
        return value if dtype_of(value) == "bool" else cast_to(value, FLOAT)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatrixPlace:
    """An operand and its buffer: where each of its matrices begins."""

    operand: MatrixOperand
    buffer: Buffer

    def start(self, number: Expr) -> Expr:
        """The place of the first element of matrix ``number``."""
        digits = self.operand.batch
        total: Expr = index(self.operand.offset)
        for part, (_, stride) in zip(split_index(number, [extent for extent, _ in digits]), digits, strict=True):
            total = total + part * index(stride)
        return total

    def matrix(self, start: Expr) -> Matrix:
        row, column = self.operand.row_stride, self.operand.column_stride
        return Matrix(buffer=self.buffer, start=start, row_stride=row, column_stride=column)


def bound_index(name: str, value: Expr) -> tuple[Expr, Stmt]:
    """A variable, and the statement that gives it its value."""
    variable = Var(name, INDEX_DTYPE)
    return variable, tirx.Bind(variable, value)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """``columns`` columns of a matrix, and as many rows as there are lanes; of the last ones there are ``rows``."""

    matrix: Matrix
    first_row: Expr
    rows: int | Expr
    first_column: int | Expr
    columns: int
    lanes: QueryLanes

    def place(self, row: Expr, column: Expr) -> tuple[Expr, Expr]:
        offset = index(self.first_column) if isinstance(self.first_column, int) else self.first_column
        return self.first_row + row, offset + column

    def element(self, row: Expr, column: Expr) -> Expr:
        """Behind the last row, the last row again."""
        inside = row if isinstance(self.rows, int) else tirx.min(row, self.rows - index(1))
        return self.matrix.element(*self.place(inside, column))

    def if_exists(self, row: Expr, statement: Stmt) -> Stmt:
        return statement if isinstance(self.rows, int) else tirx.IfThenElse(row < self.rows, statement, None)

    def squares(self, body: Callable[[Expr, Expr], Stmt], rest: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body`` for the first row and column of each square of registers, ``rest`` for each row and column left."""
        size = self.lanes.width
        whole, left = divmod(self.columns, size)
        parts = []
        if whole:
            parts.append(_grid(self.lanes.count, whole, lambda i, j: body(i * index(size), j * index(size))))
        if left:
            parts.append(_grid(self.lanes.total, left, lambda row, column: rest(row, index(whole * size) + column)))
        return sequence(*parts)


def _grid(rows: int, columns: int, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
    return loop(rows, SERIAL, "i", lambda i: loop(columns, SERIAL, "j", lambda j: body(i, j)))


def read_transposed(block: Block, target: Buffer, space: Workspace, change: Callable[[Expr], Expr]) -> Stmt:
    """``target[column, row] = change(element of row and column)`` for the rows and columns of ``block``."""

    def square(row: Expr, column: Expr) -> Stmt:
        return _turn(
            space,
            block.lanes.width,
            lambda i, j: change(block.element(row + i, column + j)),
            lambda j, line: line(lambda i, value: store(target, value, [column + j, row + i])),
        )

    def single(row: Expr, column: Expr) -> Stmt:
        return store(target, change(block.element(row, column)), [column, row])

    return block.squares(square, single)


def write_transposed(block: Block, source: Buffer, space: Workspace, change: Callable[[Expr, Expr], Expr]) -> Stmt:
    """``element of row and column = change(source[column, row], row)`` for those rows of ``block`` that there are."""

    def put(row: Expr, column: Expr, value: Expr) -> Stmt:
        buffer = block.matrix.buffer
        return store(buffer, cast_to(value, dtype_of(buffer)), block.matrix.place(*block.place(row, column)))

    def square(row: Expr, column: Expr) -> Stmt:
        return _turn(
            space,
            block.lanes.width,
            lambda j, i: change(load(source, [column + j, row + i]), row + i),
            lambda i, line: block.if_exists(row + i, line(lambda j, value: put(row + i, column + j, value))),
        )

    def single(row: Expr, column: Expr) -> Stmt:
        return block.if_exists(row, put(row, column, change(load(source, [column, row]), row)))

    return block.squares(square, single)


Line = Callable[[Callable[[Expr, Expr], Stmt]], Stmt]


def _turn(
    space: Workspace, size: int, element: Callable[[Expr, Expr], Expr], line: Callable[[Expr, Line], Stmt]
) -> Stmt:
    """Transposes the square of ``element(row, column)``; ``line(column, each)`` says what becomes of each column."""

    def filled(row: Expr) -> Stmt:
        return loop(size, VECTORIZED, "v", lambda v: store(space.square, element(row, v), [row, v]))

    def read(column: Expr) -> Line:
        def each(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
            return loop(size, VECTORIZED, "v", lambda v: body(v, load(space.turned, [column * index(size) + v])))

        return each

    return sequence(
        loop(size, SERIAL, "r", filled),
        *transpose_registers(space.square, range(size), 0, size, space.turned, 0),
        loop(size, SERIAL, "c", lambda column: line(column, read(column))),
    )
