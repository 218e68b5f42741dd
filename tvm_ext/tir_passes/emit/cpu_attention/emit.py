"""Emits an attention as one kernel whose memory does not grow with the product of queries and keys.

The softmax is computed online (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022): a running maximum and a
running sum for each query, and results that are scaled down whenever the maximum grows. ::

    parallel for task in batch x blocks of queries:
      Qt = scale * transposed queries                   # [features, queries]; lanes of registers are queries
      for block of keys:
        S[k, q] = terms(sum over d of K[k, d] * Qt[d, q])
        high' = max(high, max over k of S[k, q]);  factor = exp(high - high')
        S[k, q] = exp(S[k, q] - high');  total = total * factor + sum over k of S[k, q]
        Ot[d, q] = Ot[d, q] * factor + sum over k of V[k, d] * S[k, q]
      out = transposed Ot / total

With queries in the lanes the softmax needs no sums across a register, and keys and values are read as they lie, one
element at a time for all lanes: nothing of them is packed. Only queries and results are transposed, and masks that
differ by query where `Attention.staged` says so.

A row whose every score is -inf has the sum 0 and becomes NaN, as a softmax of it alone is: its maximum counts as 0, for
-inf - (-inf) would make NaN of a row which other keys may still save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import Buffer, Expr, Stmt, Var, tirx
from tvm_ext.devices.dot_instructions import DotInstruction
from tvm_ext.ir.bfloat16 import word
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    PARALLEL,
    SERIAL,
    UNROLLED,
    RegisterArray,
    allocate,
    if_all,
    in_tiles,
    index,
    load,
    loop,
    sequence,
    split_index,
    store,
)
from tvm_ext.ir.dot_ir import dot as dot_of
from tvm_ext.records.attention import Attention, AttentionTiles, ScoreTerm
from tvm_ext.support.arithmetic import ceil_div

from .blocks import (
    FLOAT,
    FORMS,
    AttentionFunctions,
    Block,
    Matrix,
    MatrixPlace,
    QueryLanes,
    Workspace,
    ask_for_rows,
    gather_rows,
    term_number,
)

LOWEST = float("-inf")


def emit_attention(
    work: Attention, tiles: AttentionTiles, params: Sequence[Buffer], units: int, functions: AttentionFunctions
) -> Stmt:
    """The kernel's statement; ``params`` are flat buffers in the order of `Attention.operands`.

    ``units`` cores divide the tasks among them.
    """
    if tiles.copies != "shared":
        return _tasks(work, tiles, params, units, functions)
    kind, (query, key, value, *rest) = PARALLEL if units > 1 else SERIAL, params
    forms = FORMS[work.products]
    keys, key_rows, copy_keys = gather_rows(work.key, key, work.keys, work.features, kind, tiles.lanes, forms[0])
    values, value_rows, copy_values = gather_rows(
        work.value, value, work.keys, work.value_features, kind, tiles.lanes, forms[1]
    )
    tasks = _tasks(replace(work, key=keys, value=values), tiles, [query, key_rows, value_rows, *rest], units, functions)
    return sequence(*copy_keys, *copy_values, tasks)


def _tasks(
    work: Attention, tiles: AttentionTiles, params: Sequence[Buffer], units: int, functions: AttentionFunctions
) -> Stmt:
    """All tasks: each core has as many that follow each other, one more or less, in one workspace."""
    blocks = ceil_div(work.queries, tiles.query_block)
    rest = work.queries % tiles.query_block
    space = Workspace.of(work, tiles)
    places = [MatrixPlace(operand=operand, buffer=param) for operand, param in zip(work.operands, params, strict=True)]

    def ahead(batch: Expr, block: Expr) -> list[Stmt]:
        """With a matrix's first block of queries: asks for the next matrix's first queries, its keys and values."""
        if not tiles.ahead_bytes:
            return []
        following = tirx.min(batch + index(1), index(work.batch - 1))
        extents = (
            (min(tiles.query_block, work.queries), work.features),
            (work.keys, work.features),
            (work.keys, work.value_features),
        )
        asked = [
            ask_for_rows(place.matrix(place.start(following)), rows, columns, tiles.ahead_bytes)
            for place, (rows, columns) in zip(places[:3], extents, strict=True)
        ]
        return [if_all([block < index(1) if blocks > 1 else None], sequence(*asked))]

    def task(number: Expr) -> Stmt:
        batch, block = split_index(number, (work.batch, blocks))
        # What all addresses begin with gets a name: stock TVM would simplify it again in each of them.
        first, *starts = names = [Var(name, INDEX_DTYPE) for name in ("first_query", *["start"] * len(places))]
        values = [block * index(tiles.query_block), *(place.start(batch) for place in places)]
        named: list[Stmt] = [tirx.Bind(name, value) for name, value in zip(names, values, strict=True)]
        named += ahead(batch, block)
        matrices = tuple(place.matrix(start) for place, start in zip(places, starts, strict=True))

        def of(vectors: int, rows: int | Expr) -> Stmt:
            return _Task(
                work=work,
                tiles=tiles,
                lanes=QueryLanes(width=tiles.lanes, count=vectors),
                first_query=first,
                rows=rows,
                matrices=matrices,
                space=space,
                functions=functions,
            ).statement()

        whole = of(tiles.query_vectors, tiles.query_block)
        if not rest:
            return sequence(*named, whole)
        last = of(ceil_div(rest, tiles.lanes), index(work.queries) - first)
        return sequence(*named, if_all([block < index(blocks - 1)], whole, last) if blocks > 1 else last)

    tasks = work.batch * blocks

    def share(unit: Expr) -> Stmt:
        first, last = (tirx.floordiv(index(tasks) * (unit + index(side)), index(units)) for side in (0, 1))
        own = loop(last - first if units > 1 else tasks, SERIAL, "task", lambda number: task(first + number))
        return sequence(*map(allocate, space.buffers), own)

    return loop(units, PARALLEL, "unit", share)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """What one task works on: its queries, where its matrices begin, and its buffers."""

    work: Attention
    tiles: AttentionTiles
    lanes: QueryLanes
    first_query: Expr
    rows: int | Expr  # queries that there are; the others of the last register are computed and not written
    matrices: tuple[Matrix, ...]  # in the order of the function's parameters
    space: Workspace
    functions: AttentionFunctions

    def statement(self) -> Stmt:
        blocks = in_tiles(self.work.keys, self.tiles.key_block, "block", self._key_block)
        return sequence(*self._begin(), blocks, *self._end())

    def _begin(self) -> list[Stmt]:
        """Queries transposed and scaled, nothing summed."""
        space, zero, scale = self.space, tirx.const(0.0, FLOAT), tirx.const(self.work.scale, FLOAT)

        def clear(d: Expr) -> Stmt:
            return self.lanes.each(lambda lane: store(space.results, zero, [d, lane]))

        def start(lane: Expr) -> Stmt:
            return sequence(self._set(space.high, lane, tirx.const(LOWEST, FLOAT)), self._set(space.total, lane, zero))

        queries = self._block(self.matrices[0], 0, self.work.features)
        return [
            queries.read_transposed(space.queries, lambda value: value * scale),
            *([] if space.query_words is None else self._pairs(self.work.features, space.queries, space.query_words)),
            loop(self.work.value_features, SERIAL, "d", clear),
            self.lanes.each(start),
        ]

    def _pairs(
        self, rows: int, source: Buffer, words: Buffer, before: Callable[[Expr], Stmt] | None = None
    ) -> list[Stmt]:
        """``words[k] = (source[2 k], source[2 k + 1])`` in bfloat16, for each lane; a last row alone with zeros.

        ``before(row)`` makes a row of the source.
        """

        def pair(number: Expr, *rows: Expr) -> Stmt:
            def lane_word(lane: Expr) -> Stmt:
                low, high = ([load(source, [row, lane]) for row in rows] + [tirx.const(0.0, FLOAT)])[:2]
                return store(words, word(low, high), [number, lane])

            return sequence(*(map(before, rows) if before else ()), self.lanes.each(lane_word))

        two = index(2)
        whole = [loop(rows // 2, SERIAL, "pair", lambda k: pair(k, k * two, k * two + index(1)))] if rows > 1 else []
        return [*whole, *([pair(index(rows // 2), index(rows - 1))] if rows % 2 else [])]

    def _set(self, buffer: Buffer, lane: Expr, value: Expr) -> Stmt:
        return store(buffer, value, [lane])

    def _block(self, matrix: Matrix, first_column: int | Expr, columns: int) -> Block:
        """The rows of ``matrix`` that are the task's queries."""
        return Block(
            matrix=matrix,
            first_row=self.first_query,
            rows=self.rows,
            first_column=first_column,
            columns=columns,
            lanes=self.lanes,
            space=self.space,
        )

    def _terms(self) -> list[tuple[ScoreTerm, Buffer | None, Matrix]]:
        """The terms with the blocks that are transposed first, if any, and their operands' matrices."""
        terms = self.work.terms
        return list(zip(terms, self.space.terms, self.matrices[3 : 3 + len(terms)], strict=True))

    def _key_block(self, first: Expr, count: int) -> Stmt:
        """``count`` keys from ``first`` on: their scores, the step of the softmax, their share of the results."""
        staged = [
            self._block(matrix, first, count).read_transposed(stage, term_number(term))
            for term, stage, matrix in self._terms()
            if stage is not None
        ]
        return sequence(*staged, *self._scores(first, count), *self._softmax(count), *self._results(first, count))

    def _copied(
        self, which: int, first: Expr, count: int, columns: int
    ) -> tuple[list[Stmt], Callable[[Expr, Expr], Expr]]:
        """What makes a copy of the block of keys (1) or values (2), and how a factor is read of the block's, by the row
        and column of its `FactorForm`.
        """
        matrix, copy = self.matrices[which], (self.space.keys, self.space.values)[which - 1]
        form = FORMS[self.work.products][which - 1]

        def factor(row: Expr, column: Expr) -> Expr:
            column = column * index(form.columns)
            if copy is not None:
                return form.read(copy, [row, column])
            return form.read(matrix.buffer, matrix.place(tirx.floordiv(first, index(form.rows)) + row, column))

        if copy is None:
            return [], factor

        def line(row: Expr) -> Stmt:
            return form.line(matrix, (first, count), row, columns, self.lanes.width, copy, lambda column: [row, column])

        return [loop(form.shape(count, columns)[0], SERIAL, "row", line)], factor

    def _product(
        self,
        rows: int,
        tile: int,
        depth: int,
        *,
        scalar: Callable[[Expr, Expr], Expr],
        vector: Callable[[Expr, Expr], Expr],
        start: Callable[[Expr, Expr], Expr],
        finish: Callable[[Expr, Expr, Expr], Stmt],
    ) -> Stmt:
        """``finish(row, lane, start(row, lane) + sum over k of scalar(row, k) * vector(k, lane))`` for rows and lanes.

        In tiles of ``tile`` rows, whose sums stay in registers; the last tile may be smaller. In bfloat16 both factors
        are of two products, and ``depth`` counts pairs.
        """
        dot = self.functions.dot
        depth = depth if dot is None else ceil_div(depth, dot.group)

        def rows_from(first: Expr, count: int) -> Stmt:
            def walk(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
                return loop(count, UNROLLED, "r", lambda row: self.lanes.each(lambda lane: body(row, lane)))

            sums = RegisterArray(self.space.sums, walk)

            def paired(instruction: DotInstruction, row: Expr, lane: Expr, k: Expr) -> Stmt:
                held = load(self.space.sums, [row, lane])
                value = dot_of(instruction, held, scalar(first + row, k), vector(k, lane))
                return store(self.space.sums, value, [row, lane])

            def step(k: Expr) -> Stmt:
                if dot is None:
                    return sums.accumulate(lambda row, lane: scalar(first + row, k) * vector(k, lane))
                lanes = self.lanes.registers()
                return loop(count, UNROLLED, "r", lambda r: sequence(*(paired(dot, r, lane, k) for lane in lanes)))

            return sequence(
                sums.fill(lambda row, lane: start(first + row, lane)),
                loop(depth, SERIAL, "k", step),
                sums.write(lambda row, lane, value: finish(first + row, lane, value)),
            )

        return in_tiles(rows, tile, "tile", rows_from)

    def _scores(self, first: Expr, count: int) -> list[Stmt]:
        """S = terms(K Qt), and the maximum of each query with these keys."""
        space = self.space
        copy, element = self._copied(1, first, count, self.work.features)
        queries = space.queries if space.query_words is None else space.query_words

        def finish(key: Expr, lane: Expr, value: Expr) -> Stmt:
            kept, highest = load(space.scores, [key, lane]), load(space.next_high, [lane])
            return sequence(
                store(space.scores, self._changed(value, first, key, lane), [key, lane]),
                self._set(space.next_high, lane, tirx.Select(kept > highest, kept, highest)),
            )

        product = self._product(
            count,
            self.tiles.key_rows,
            self.work.features,
            scalar=element,
            vector=lambda feature, lane: load(queries, [feature, lane]),
            start=lambda _key, _lane: tirx.const(0.0, FLOAT),
            finish=finish,
        )
        begin = self.lanes.each(lambda lane: self._set(space.next_high, lane, load(space.high, [lane])))
        return [begin, *copy, product]

    def _changed(self, score: Expr, first: Expr, key: Expr, lane: Expr) -> Expr:
        """The score behind all terms."""
        for term, stage, matrix in self._terms():
            if stage is not None:
                number = load(stage, [key, lane])
            else:
                query = self.first_query + lane if term.operand.row_stride else index(0)
                number = term_number(term)(matrix.element(query, first + key))
            if term.change == "replace":
                score = tirx.Select(number > tirx.const(0.5, FLOAT), tirx.const(term.no, FLOAT), score)
            else:
                score = score + number
        return score

    def _softmax(self, count: int) -> list[Stmt]:
        """S becomes exp(S - high), ``total`` grows by it; ``factor`` is what sums so far are to be multiplied by."""
        space = self.space

        def step(lane: Expr) -> Stmt:
            new, shift = load(space.next_high, [lane]), load(space.shift, [lane])
            return sequence(
                self._set(space.shift, lane, tirx.Select(new > tirx.const(LOWEST, FLOAT), new, tirx.const(0.0, FLOAT))),
                self._set(space.factor, lane, self.functions.exp(load(space.high, [lane]) - shift)),
                self._set(space.high, lane, new),
            )

        def scale(lane: Expr) -> Stmt:
            return self._set(space.total, lane, load(space.total, [lane]) * load(space.factor, [lane]))

        def power(key: Expr, lane: Expr) -> Stmt:
            score = load(space.scores, [key, lane])
            return sequence(
                store(space.scores, self.functions.exp(score - load(space.shift, [lane])), [key, lane]),
                self._set(space.total, lane, load(space.total, [lane]) + score),
            )

        def of_key(key: Expr) -> Stmt:
            return self.lanes.each(lambda lane: power(key, lane))

        powers = [loop(count, SERIAL, "key", of_key)]
        if space.powers is not None:
            powers = self._pairs(count, space.scores, space.powers, of_key)
        return [self.lanes.each(step), self.lanes.each(scale), *powers]

    def _results(self, first: Expr, count: int) -> list[Stmt]:
        """Ot = Ot * factor + V^T S."""
        space = self.space
        copy, element = self._copied(2, first, count, self.work.value_features)
        powers = space.scores if space.powers is None else space.powers
        product = self._product(
            self.work.value_features,
            self.tiles.feature_rows,
            count,
            scalar=lambda feature, key: element(key, feature),
            vector=lambda key, lane: load(powers, [key, lane]),
            start=lambda feature, lane: load(space.results, [feature, lane]) * load(space.factor, [lane]),
            finish=lambda feature, lane, value: store(space.results, value, [feature, lane]),
        )
        return [*copy, product]

    def _end(self) -> list[Stmt]:
        """The results, divided by the sums, written as they shall lie."""
        space, one = self.space, tirx.const(1.0, FLOAT)
        statements = [self.lanes.each(lambda lane: self._set(space.factor, lane, one / load(space.total, [lane])))]
        if self.work.cleared is not None:
            cleared = self._block(self.matrices[-2], 0, 1)

            def clear(lane: Expr) -> Stmt:
                """A factor of 0 where there are no probabilities: 0 times a sum of NaN is NaN, as 0 times values is."""
                factor = load(space.factor, [lane])
                kept = tirx.Select(cleared.element(lane, index(0)), tirx.const(0.0, FLOAT), factor)
                return self._set(space.factor, lane, kept)

            statements.append(loop(self.lanes.total, SERIAL, "lane", clear))
        results = self._block(self.matrices[-1], 0, self.work.value_features)
        factor = space.factor
        return [*statements, results.write_transposed(space.results, lambda value, lane: value * load(factor, [lane]))]
