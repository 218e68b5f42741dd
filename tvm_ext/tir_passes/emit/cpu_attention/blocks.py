"""What a task of an attention keeps beside registers, and its matrices in memory: where elements are, blocks of them
transposed, copies of their rows.

The workspace is linear in the block of keys and in the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.devices.dot_instructions import DotInstruction
from tvm_ext.ir.bfloat16 import BFLOAT16, word
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    allocate,
    cast_to,
    if_all,
    index,
    load,
    loop,
    nest,
    new_buffer,
    prefetch,
    sequence,
    split_index,
    store,
    vector_loops,
)
from tvm_ext.ir.transpose_registers import transpose_registers
from tvm_ext.records.attention import Attention, AttentionTiles, MatrixOperand, ScoreTerm
from tvm_ext.support.arithmetic import ceil_div

FLOAT = "float32"
"""What everything is computed in, half precision too, but products of `Attention.products`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFunctions:
    """What a device's kernels compute by: ``exp`` writes e^x for x up to 0, ``dot`` is the instruction of products in
    bfloat16, None of others.
    """

    exp: Callable[[Expr], Expr]
    dot: DotInstruction | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorForm:
    """How a product reads keys or values: elements of ``dtype`` that hold ``rows`` x ``columns`` of a matrix.

    An instruction takes two neighbours of a key's features at once, and two keys' values of a feature; what is no
    whole pair has a zero beside it.
    """

    dtype: str = FLOAT
    rows: int = 1
    columns: int = 1

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of a copy of so many rows and columns, its columns whole pairs of elements."""
        return ceil_div(rows, self.rows), ceil_div(columns, self.columns) * self.columns

    def read(self, buffer: Buffer, place: Sequence[Expr]) -> Expr:
        """A factor of one step: an element, or neighbours as a vector."""
        *outer, last = place
        return load(buffer, place if self.columns == 1 else [*outer, tirx.Ramp(last, index(1), self.columns)])

    def line(
        self,
        matrix: Matrix,
        rows: tuple[Expr, int],
        number: Expr,
        columns: int,
        lanes: int,
        target: Buffer,
        place: Callable[[Expr], Sequence[Expr]],
    ) -> Stmt:
        """Line ``number`` of the copy of ``rows``, the first and how many, to ``place`` of ``target``."""
        first, count = rows

        def element(column: Expr) -> Expr:
            if self.rows == 1:
                return cast_to(matrix.element(first + number, column), self.dtype)
            low, high = number * index(2), number * index(2) + index(1)
            if count % 2 == 0:
                return word(matrix.element(first + low, column), matrix.element(first + high, column))
            last = matrix.element(first + tirx.min(high, index(count - 1)), column)
            upper = tirx.Select(high < index(count), last, tirx.const(0.0, FLOAT))
            return word(matrix.element(first + low, column), upper)

        whole = vector_loops(columns, lanes, VECTORIZED, lambda column: store(target, element(column), place(column)))
        padding = range(columns, self.shape(count, columns)[1])
        zeros = [store(target, tirx.const(0.0, self.dtype), place(index(column))) for column in padding]
        return sequence(whole, *zeros)


FLOATS = FactorForm()
FORMS = {FLOAT: (FLOATS, FLOATS), BFLOAT16: (FactorForm(dtype=BFLOAT16, columns=2), FactorForm(dtype="int32", rows=2))}
"""Of keys and of values, by `Attention.products`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workspace:
    """Buffers of one task, in float32; ``width`` lanes hold its queries."""

    queries: Buffer  # [features, width]
    scores: Buffer  # [key block, width]
    query_words: Buffer | None  # [pairs of features, width], of products in bfloat16
    powers: Buffer | None  # [pairs of keys, width], of these: exponentials of the scores
    results: Buffer  # [value features, width]
    high: Buffer  # [width], as the next four: the largest score so far
    next_high: Buffer  # with the block of keys at hand
    shift: Buffer  # what is taken off scores: that, or 0 where it is -inf
    total: Buffer
    factor: Buffer  # what sums so far are multiplied by
    sums: Buffer  # accumulators of a register tile
    square: Buffer  # [lanes, lanes], one square of registers before it is transposed
    turned: Buffer  # [lanes * lanes], and after
    terms: tuple[Buffer | None, ...]  # [key block, width] for each term that is transposed first
    keys: Buffer | None  # [key block, features], where blocks of keys are copied
    values: Buffer | None  # [key block, value features], where blocks of values are

    @classmethod
    def of(cls, work: Attention, tiles: AttentionTiles) -> Workspace:
        width, block = tiles.query_block, min(tiles.key_block, work.keys)

        def space(name: str, *extents: int, dtype: str = FLOAT) -> Buffer:
            return new_buffer(extents, dtype, name, "local")

        copies_values = tiles.copies in ("block", "values")
        narrow = work.products != FLOAT
        forms = FORMS[work.products]

        def copy(name: str, which: int, columns: int) -> Buffer:
            return space(name, *forms[which].shape(block, columns), dtype=forms[which].dtype)

        return cls(
            queries=space("queries", work.features, width),
            scores=space("scores", block, width),
            query_words=space("query_words", ceil_div(work.features, 2), width, dtype="int32") if narrow else None,
            powers=space("powers", ceil_div(block, 2), width, dtype="int32") if narrow else None,
            results=space("results", work.value_features, width),
            high=space("high", width),
            next_high=space("next_high", width),
            shift=space("shift", width),
            total=space("total", width),
            factor=space("factor", width),
            sums=space("sums", max(tiles.key_rows, tiles.feature_rows), width),
            square=space("square", tiles.lanes, tiles.lanes),
            turned=space("turned", tiles.lanes * tiles.lanes),
            terms=tuple(
                space(f"term{number}", block, width) if staged else None
                for number, staged in enumerate(work.staged(tiles.lanes))
            ),
            keys=copy("keys", 0, work.features) if tiles.copies == "block" else None,
            values=copy("values", 1, work.value_features) if copies_values else None,
        )

    @property
    def buffers(self) -> list[Buffer]:
        own = [self.queries, self.scores, self.results, self.high, self.next_high, self.shift, self.total]
        own += [self.factor, self.sums, self.square, self.turned]
        some = (*self.terms, self.keys, self.values, self.query_words, self.powers)
        return [*own, *(item for item in some if item is not None)]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryLanes:
    """``count`` SIMD registers of ``width`` lanes."""

    width: int
    count: int

    @property
    def total(self) -> int:
        return self.width * self.count

    def registers(self) -> list[Expr]:
        """The lanes of each register, as the last index of a buffer."""
        return [tirx.Ramp(index(first), index(1), self.width) for first in range(0, self.total, self.width)]

    def each(self, body: Callable[[Expr], Stmt]) -> Stmt:
        """``body`` for every lane, register by register."""

        def register(first: int) -> Stmt:
            return loop(self.width, VECTORIZED, "v", lambda v: body(index(first) + v))

        return sequence(*map(register, range(0, self.total, self.width)))


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """``columns`` columns of a matrix, and as many rows as there are lanes; of the last ones there are ``rows``."""

    matrix: Matrix
    first_row: Expr
    rows: int | Expr
    first_column: int | Expr
    columns: int
    lanes: QueryLanes
    space: Workspace

    def element(self, row: Expr, column: Expr) -> Expr:
        """Behind the last row, the last row again."""
        inside = row if isinstance(self.rows, int) else tirx.min(row, self.rows - index(1))
        return self.matrix.element(self.first_row + inside, self.first_column + column)

    def read_transposed(self, target: Buffer, change: Callable[[Expr], Expr]) -> Stmt:
        """``target[column, row] = change(element of row and column)`` for the rows and columns of the block."""

        def put(row: Expr, column: Expr, value: Expr) -> Stmt:
            return store(target, value, [column, row])

        def square(row: Expr, column: Expr) -> Stmt:
            return self._turn(
                lambda i, j: change(self.element(row + i, column + j)),
                lambda j, line: line(lambda i, value: put(row + i, column + j, value)),
            )

        return self._squares(square, lambda row, column: put(row, column, change(self.element(row, column))))

    def write_transposed(self, source: Buffer, change: Callable[[Expr, Expr], Expr]) -> Stmt:
        """``element of row and column = change(source[column, row], row)`` for those rows that there are."""
        target = self.matrix.buffer

        def put(row: Expr, column: Expr, value: Expr) -> Stmt:
            place = self.matrix.place(self.first_row + row, self.first_column + column)
            return store(target, cast_to(value, dtype_of(target)), place)

        def existing(row: Expr, statement: Stmt) -> Stmt:
            return if_all([None if isinstance(self.rows, int) else row < self.rows], statement)

        def square(row: Expr, column: Expr) -> Stmt:
            return self._turn(
                lambda j, i: change(load(source, [column + j, row + i]), row + i),
                lambda i, line: existing(row + i, line(lambda j, value: put(row + i, column + j, value))),
            )

        def single(row: Expr, column: Expr) -> Stmt:
            return existing(row, put(row, column, change(load(source, [column, row]), row)))

        return self._squares(square, single)

    def _squares(self, body: Callable[[Expr, Expr], Stmt], rest: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body`` for the first row and column of each square of registers, ``rest`` for each row and column left."""
        size = self.lanes.width
        whole, left = divmod(self.columns, size)

        def grid(rows: int, columns: int, step: int, first: int, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
            def one(at: tuple[Expr, ...]) -> Stmt:
                return body(at[0] * index(step), index(first) + at[1] * index(step))

            return nest((rows, columns), SERIAL, ("i", "j"), one)

        parts = [grid(self.lanes.count, whole, size, 0, body)] if whole else []
        return sequence(*parts, *([grid(self.lanes.total, left, 1, whole * size, rest)] if left else []))

    def _turn(self, element: Callable[[Expr, Expr], Expr], line: Callable[[Expr, Line], Stmt]) -> Stmt:
        """Transposes the square of ``element(row, column)``; ``line(column, each)`` says what becomes of a column."""
        size, space = self.lanes.width, self.space

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


Line = Callable[[Callable[[Expr, Expr], Stmt]], Stmt]


# --- copies -----------------------------------------------------------------------------------------------------------
def ask_for_rows(matrix: Matrix, rows: int, columns: int, line_bytes: int) -> Stmt:
    """Prefetches ``rows`` rows of ``columns`` elements that lie together, a line at a time."""
    elements = int(line_bytes / itemsize_bytes(dtype_of(matrix.buffer)))

    def line(row: Expr, number: Expr) -> Stmt:
        return prefetch(load(matrix.buffer, matrix.place(row, number * index(elements))))

    lines = ceil_div(columns, elements)
    return loop(rows, SERIAL, "row", lambda row: loop(lines, UNROLLED, "line", lambda number: line(row, number)))


def gather_rows(
    source: MatrixOperand, param: Buffer, rows: int, columns: int, kind: ForKind, lanes: int, form: FactorForm
) -> tuple[MatrixOperand, Buffer, list[Stmt]]:
    """All matrices of an operand whose rows lie apart, or in half precision, as rows of ``form`` one behind the other:
    how the copy is read, its buffer, and what fills it, a row at a time.

    Each matrix is copied once: heads that several heads of queries share are not repeated.
    """
    batch: list[tuple[int, int]] = []
    matrices, (lines, width) = 1, form.shape(rows, columns)
    for extent, stride in reversed(source.batch):
        batch.insert(0, (extent, matrices * lines * width if stride else 0))
        matrices *= extent if stride else 1
    size = matrices * lines * width
    buffer = new_buffer((size,), form.dtype, f"{param.name}_rows")
    operand = MatrixOperand(
        dtype=form.dtype, size=size, offset=0, batch=tuple(batch), row_stride=width, column_stride=1
    )
    distinct = replace(source, batch=tuple((extent, stride) for extent, stride in source.batch if stride))
    place = MatrixPlace(operand=distinct, buffer=param)

    def row(number: Expr) -> Stmt:
        which, line = split_index(number, (matrices, lines))
        matrix, start = place.matrix(place.start(which)), number * index(width)
        return form.line(matrix, (index(0), rows), line, columns, lanes, buffer, lambda column: [start + column])

    return operand, buffer, [allocate(buffer), loop(matrices * lines, kind, "row", row)]


def term_number(term: ScoreTerm) -> Callable[[Expr], Expr]:
    """An element of a term's operand as the number that is staged: what is added, or 1 where the score is replaced."""
    if term.change == "add":
        return (lambda value: value) if term.scale == 1.0 else (lambda value: value * tirx.const(term.scale, FLOAT))
    yes, no = (term.yes, term.no) if term.change == "choose" else (float(term.replaced), float(not term.replaced))
    return lambda value: tirx.Select(value, tirx.const(yes, FLOAT), tirx.const(no, FLOAT))
