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
element at a time for all lanes: nothing of them is packed. Only queries, results and masks that differ by query are
transposed.

A row whose every score is -inf has the sum 0 and becomes NaN, as a softmax of it alone is: its maximum counts as 0, for
-inf - (-inf) would make NaN of a row which other keys may still save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.ir.build_ir import PARALLEL, SERIAL, allocate, in_tiles, index, load, loop, sequence, split_index, store
from tvm_ext.records.attention import Attention, AttentionTiles, ScoreTerm
from tvm_ext.support.arithmetic import ceil_div

from .gather_rows import Gathered, copy_row
from .register_products import QueryLanes, product
from .transpose_blocks import Block, Matrix, MatrixPlace, bound_index, read_transposed, write_transposed
from .workspace import FLOAT, Workspace

LOWEST = float("-inf")


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
    exp: Callable[[Expr], Expr]

    @property
    def term_matrices(self) -> tuple[Matrix, ...]:
        return self.matrices[3 : 3 + len(self.work.terms)]


def emit_attention(
    work: Attention, tiles: AttentionTiles, params: Sequence[Buffer], units: int, exp: Callable[[Expr], Expr]
) -> Stmt:
    """The kernel's statement; ``params`` are flat buffers in the order of `Attention.operands`.

    ``units`` cores divide the tasks among them; ``exp`` writes e^x for x up to 0.
    """
    if tiles.copies != "shared":
        return _tasks(work, tiles, params, units, exp)
    key = Gathered.of(work.key, params[1], work.keys, work.features)
    value = Gathered.of(work.value, params[2], work.keys, work.value_features)
    kind = PARALLEL if units > 1 else SERIAL
    gathered = replace(work, key=key.operand, value=value.operand)
    return sequence(
        *key.copy(kind, tiles.lanes),
        *value.copy(kind, tiles.lanes),
        _tasks(gathered, tiles, [params[0], key.buffer, value.buffer, *params[3:]], units, exp),
    )


def _tasks(
    work: Attention, tiles: AttentionTiles, params: Sequence[Buffer], units: int, exp: Callable[[Expr], Expr]
) -> Stmt:
    """All tasks: each core has as many that follow each other, one more or less, in one workspace."""
    blocks = ceil_div(work.queries, tiles.query_block)
    vectors_of_last = ceil_div(work.queries - (blocks - 1) * tiles.query_block, tiles.lanes)
    exact = work.queries % tiles.query_block == 0

    space = Workspace.of(work, tiles)
    places = [MatrixPlace(operand=item, buffer=param) for item, param in zip(work.operands, params, strict=True)]

    def task(number: Expr) -> Stmt:
        batch, block = split_index(number, (work.batch, blocks))
        # What all addresses begin with gets a name: stock TVM would simplify it again in each of them.
        first, named = bound_index("first_query", block * index(tiles.query_block))
        starts = [bound_index("start", item.start(batch)) for item in places]
        matrices = tuple(item.matrix(start) for item, (start, _) in zip(places, starts, strict=True))

        def of(vectors: int, rows: int | Expr) -> Stmt:
            lanes = QueryLanes(width=tiles.lanes, count=vectors)
            return _task(
                _Task(
                    work=work,
                    tiles=tiles,
                    lanes=lanes,
                    first_query=first,
                    rows=rows,
                    matrices=matrices,
                    space=space,
                    exp=exp,
                )
            )

        whole = of(tiles.query_vectors, tiles.query_block)
        if exact:
            body = whole
        else:
            last = of(vectors_of_last, index(work.queries) - first)
            body = last if blocks == 1 else tirx.IfThenElse(block < index(blocks - 1), whole, last)
        return sequence(named, *(statement for _, statement in starts), body)

    tasks = work.batch * blocks

    def share(unit: Expr) -> Stmt:
        first, last = (tirx.floordiv(index(tasks) * (unit + index(side)), index(units)) for side in (0, 1))
        own = loop(last - first if units > 1 else tasks, SERIAL, "task", lambda number: task(first + number))
        return sequence(*map(allocate, space.buffers), own)

    return loop(units, PARALLEL, "unit", share)


def _task(task: _Task) -> Stmt:
    work, tiles = task.work, task.tiles
    blocks = in_tiles(work.keys, tiles.key_block, "block", lambda first, count: _key_block(task, first, count))
    return sequence(*_begin(task), blocks, _end(task))


def _begin(task: _Task) -> list[Stmt]:
    """Queries transposed and scaled, nothing summed."""
    zero = tirx.const(0.0, FLOAT)
    scale = tirx.const(task.work.scale, FLOAT)
    read = _read(task, task.matrices[0], 0, task.work.features, task.space.queries, lambda value: value * scale)
    clear = loop(
        task.work.value_features,
        SERIAL,
        "d",
        lambda d: task.lanes.each(lambda lane: store(task.space.results, zero, [d, lane])),
    )
    start = task.lanes.each(
        lambda lane: sequence(
            store(task.space.high, tirx.const(LOWEST, FLOAT), [lane]), store(task.space.total, zero, [lane])
        )
    )
    return [read, clear, start]


def _key_block(task: _Task, first: Expr, count: int) -> Stmt:
    """One block of ``count`` keys from ``first`` on: its scores, the step of the softmax, its share of the results."""
    return sequence(
        *_stage_terms(task, first, count),
        _scores(task, first, count),
        *_softmax(task, count),
        _results(task, first, count),
    )


def _stage_terms(task: _Task, first: Expr, count: int) -> list[Stmt]:
    """The block of each term that differs by query, transposed."""
    found = []
    for term, stage, matrix in zip(task.work.terms, task.space.terms, task.term_matrices, strict=True):
        if stage is not None:
            value = _term_number(term)
            found.append(_read(task, matrix, first, count, stage, value))
    return found


def _read(
    task: _Task, matrix: Matrix, column: int | Expr, columns: int, target: Buffer, change: Callable[[Expr], Expr]
) -> Stmt:
    """``target[c, q] = change(matrix[q, column + c])`` for the task's queries q."""
    block = Block(
        matrix=matrix,
        first_row=task.first_query,
        rows=task.rows,
        first_column=column,
        columns=columns,
        lanes=task.lanes,
    )
    return read_transposed(block, target, task.space, change)


def _term_number(term: ScoreTerm) -> Callable[[Expr], Expr]:
    """An element of a term's operand as the number that is staged: what is added, or 1 where the score is replaced."""
    if term.change == "add":
        return (lambda value: value) if term.scale == 1.0 else (lambda value: value * tirx.const(term.scale, FLOAT))
    yes, no = (term.yes, term.no) if term.change == "choose" else (float(term.replaced), float(not term.replaced))
    return lambda value: tirx.Select(value, tirx.const(yes, FLOAT), tirx.const(no, FLOAT))


def _copied(
    task: _Task, which: int, first: Expr, count: int, columns: int
) -> tuple[list[Stmt], Callable[[Expr, Expr], Expr]]:
    """What makes a copy of the block of keys (1) or values (2), and how an element of the block is read."""
    matrix, copy = task.matrices[which], (task.space.keys, task.space.values)[which - 1]
    if copy is None:
        return [], lambda row, column: matrix.element(first + row, column)

    def line(row: Expr) -> Stmt:
        return copy_row(matrix, first + row, columns, task.lanes.width, lambda column: (copy, [row, column]))

    return [loop(count, SERIAL, "row", line)], lambda row, column: load(copy, [row, column])


def _scores(task: _Task, first: Expr, count: int) -> Stmt:
    """S = terms(K Qt), and the maximum of each query with these keys."""
    copy, element = _copied(task, 1, first, count, task.work.features)

    def finish(key: Expr, lane: Expr, value: Expr) -> Stmt:
        score = _changed(task, value, first, key, lane)
        kept = load(task.space.scores, [key, lane])
        highest = load(task.space.next_high, [lane])
        return sequence(
            store(task.space.scores, score, [key, lane]),
            store(task.space.next_high, tirx.Select(kept > highest, kept, highest), [lane]),
        )

    begin = task.lanes.each(lambda lane: store(task.space.next_high, load(task.space.high, [lane]), [lane]))
    return sequence(
        begin,
        *copy,
        product(
            task.space.sums,
            count,
            task.tiles.key_rows,
            task.lanes,
            task.work.features,
            scalar=element,
            vector=lambda feature, lane: load(task.space.queries, [feature, lane]),
            start=lambda _key, _lane: tirx.const(0.0, FLOAT),
            finish=finish,
        ),
    )


def _changed(task: _Task, score: Expr, first: Expr, key: Expr, lane: Expr) -> Expr:
    """The score behind all terms."""
    for term, stage, matrix in zip(task.work.terms, task.space.terms, task.term_matrices, strict=True):
        if stage is not None:
            number = load(stage, [key, lane])
        else:
            number = _term_number(term)(matrix.element(index(0), first + key))
        if term.change == "replace":
            score = tirx.Select(number > tirx.const(0.5, FLOAT), tirx.const(term.no, FLOAT), score)
        else:
            score = score + number
    return score


def _softmax(task: _Task, count: int) -> list[Stmt]:
    """S becomes exp(S - high), ``total`` grows by it; ``factor`` is what sums so far are to be multiplied by."""

    def step(lane: Expr) -> Stmt:
        new = load(task.space.next_high, [lane])
        shift = tirx.Select(new > tirx.const(LOWEST, FLOAT), new, tirx.const(0.0, FLOAT))
        return sequence(
            store(task.space.shift, shift, [lane]),
            store(task.space.factor, task.exp(load(task.space.high, [lane]) - load(task.space.shift, [lane])), [lane]),
            store(task.space.high, load(task.space.next_high, [lane]), [lane]),
        )

    def power(key: Expr, lane: Expr) -> Stmt:
        value = load(task.space.scores, [key, lane])
        return sequence(
            store(task.space.scores, task.exp(value - load(task.space.shift, [lane])), [key, lane]),
            store(task.space.total, load(task.space.total, [lane]) + load(task.space.scores, [key, lane]), [lane]),
        )

    scaled = task.lanes.each(
        lambda lane: store(task.space.total, load(task.space.total, [lane]) * load(task.space.factor, [lane]), [lane])
    )
    powers = loop(count, SERIAL, "key", lambda key: task.lanes.each(lambda lane: power(key, lane)))
    return [task.lanes.each(step), scaled, powers]


def _results(task: _Task, first: Expr, count: int) -> Stmt:
    """Ot = Ot * factor + V^T S."""
    copy, element = _copied(task, 2, first, count, task.work.value_features)
    return sequence(
        *copy,
        product(
            task.space.sums,
            task.work.value_features,
            task.tiles.feature_rows,
            task.lanes,
            count,
            scalar=lambda feature, key: element(key, feature),
            vector=lambda key, lane: load(task.space.scores, [key, lane]),
            start=lambda feature, lane: load(task.space.results, [feature, lane]) * load(task.space.factor, [lane]),
            finish=lambda feature, lane, value: store(task.space.results, value, [feature, lane]),
        ),
    )


def _end(task: _Task) -> Stmt:
    """The results, divided by the sums, written as they shall lie."""
    divided = task.lanes.each(
        lambda lane: store(task.space.factor, tirx.const(1.0, FLOAT) / load(task.space.total, [lane]), [lane])
    )
    if task.work.cleared is not None:
        divided = sequence(divided, _clear(task))
    block = Block(
        matrix=task.matrices[-1],
        first_row=task.first_query,
        rows=task.rows,
        first_column=0,
        columns=task.work.value_features,
        lanes=task.lanes,
    )
    written = write_transposed(
        block, task.space.results, task.space, lambda value, lane: value * load(task.space.factor, [lane])
    )
    return sequence(divided, written)


def _clear(task: _Task) -> Stmt:
    """Factors of 0 for the queries without probabilities: 0 times a sum of NaN is NaN, as 0 times the values is."""
    rows = Block(
        matrix=task.matrices[-2],
        first_row=task.first_query,
        rows=task.rows,
        first_column=0,
        columns=1,
        lanes=task.lanes,
    )

    def clear(lane: Expr) -> Stmt:
        factor = load(task.space.factor, [lane])
        return store(
            task.space.factor, tirx.Select(rows.element(lane, index(0)), tirx.const(0.0, FLOAT), factor), [lane]
        )

    return loop(task.lanes.total, SERIAL, "lane", clear)
