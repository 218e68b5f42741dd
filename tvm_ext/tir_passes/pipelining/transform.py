"""The five rewriting steps of ALCOP §3.2: a load-and-use loop becomes a pipelined one.

With n shared versions and v register versions, s = v - 1 of these loaded ahead::

    for p in 0 .. n-2: [if p < extent] load tile p into version p; commit          prologue, a rolled loop
    wait; for q in 0 .. s-1: load fragment q of tile 0                             the inner prologue, hoisted (Fig. 3d)
    for ko:
        [if ko + n-1 < extent] load tile ko + n-1 into version (ko + n-1) % n; commit
        for ki:
            if (ki + s) % ext == 0: wait
            load fragment version (ki + s) % v from tile ko + (ki + s) // ext, step (ki + s) % ext
            compute with fragment version ki % v

Differences from Figure 7: a condition takes the place of the wrap ``(ko + n-1) % extent``, so that no tile is loaded
twice at the end, while commits stay unconditional and the wait count constant. And where the inner loop is not part of
the pipeline the wait comes before the loads of the iteration, not behind them: the barrier of the wait then also says
that all threads have done with the version which is loaded next, and one barrier serves an iteration (as in CUTLASS).

Without asynchronous copies the loads of an iteration go to registers, and from there to shared memory just before the
next wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import AllocBuffer, Expr, For, ForKind, Stmt, Var, tirx
from tvm_ext.analysis.computations import substitute
from tvm_ext.ir.build_ir import as_index

from .analyse import LoadUse
from .loops import allocations_of, children_of, constant, integer, is_shared, open_wrappers, unrolled_loop, zero
from .part_copies import Loader
from .primitives import primitive
from .versions import Versioned, use_versions, with_versions

LONGEST_UNROLLED = 8
"""Inner iterations that are unrolled whole; longer loops are unrolled by the number of versions."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedBuffer:
    """A buffer of a pipeline: what loads it, its versions, and how its loads are written."""

    load_use: LoadUse
    versions: Versioned
    loader: Loader | None = None  # None for registers, whose instructions stay as they are

    @property
    def lookahead(self) -> int:
        return self.versions.count - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """The buffers that are loaded ahead in one loop; ``inner`` is the register pipeline that runs on across iterations.

    ``entry_barrier``: what runs before may still use the memory.
    """

    number: int
    loop: Stmt
    buffers: tuple[LoadedBuffer, ...]
    inner: Pipeline | None = None
    entry_barrier: bool = False

    @property
    def longest(self) -> int:
        return max(loaded.lookahead for loaded in self.buffers)

    @property
    def in_flight(self) -> int:
        """Commits that may be on their way while the next tile must have landed: one fewer than are loaded ahead.

        Worked example: 3 versions; tiles 0 and 1 are committed by the prologue; tile 0 has landed once one is left.
        """
        return min(loaded.lookahead for loaded in self.buffers) - 1

    def owner_of(self, statement: Stmt) -> LoadedBuffer | None:
        return next((s for s in self.buffers if any(statement.same_as(p) for p in s.load_use.parts)), None)


def loaded_buffer(
    load_use: LoadUse, count: int, loader: Loader | None = None, scope: str | None = None
) -> LoadedBuffer:
    return LoadedBuffer(load_use=load_use, versions=with_versions(load_use.buffer, count, scope), loader=loader)


class Transformer:
    """Rewrites a function's body for its pipelines."""

    def __init__(self, pipelines: Sequence[Pipeline], *, unroll_hint: bool = True) -> None:
        self._pipelines = pipelines
        self._unroll_hint = unroll_hint
        every = [p for pipeline in pipelines for p in (pipeline, pipeline.inner) if p is not None]
        self._versions = [loaded.versions for pipeline in every for loaded in pipeline.buffers]

    def rewrite(self, statement: Stmt) -> Stmt:
        """``statement`` with all pipelined loops in it transformed, buffers outside of them allocated anew."""
        if isinstance(statement, tirx.SeqStmt):
            return _sequence([self.rewrite(part) for part in statement.seq])
        if isinstance(statement, tirx.AttrStmt):
            return tirx.AttrStmt(statement.node, statement.attr_key, statement.value, self.rewrite(statement.body))
        if isinstance(statement, tirx.IfThenElse):
            otherwise = None if statement.else_case is None else self.rewrite(statement.else_case)
            return tirx.IfThenElse(statement.condition, self.rewrite(statement.then_case), otherwise)
        if isinstance(statement, tirx.While):
            return tirx.While(statement.condition, self.rewrite(statement.body))
        if isinstance(statement, AllocBuffer):
            return self._allocation(statement)
        if isinstance(statement, For):
            pipeline = next((p for p in self._pipelines if p.loop.same_as(statement)), None)
            return self._plain_loop(statement) if pipeline is None else self._pipelined(pipeline)
        return statement

    def _plain_loop(self, loop: Stmt) -> Stmt:
        return _loop_like(loop, self.rewrite(loop.body))

    def _allocation(self, statement: Stmt) -> Stmt:
        found = next((v for v in self._versions if v.old.same_as(statement.buffer)), None)
        return statement if found is None else AllocBuffer(found.new, dict(statement.annotations))

    # --- one loop -------------------------------------------------------------------------------------------------
    def _pipelined(self, pipeline: Pipeline) -> Stmt:
        is_shared_level = is_shared(pipeline.buffers[0].load_use.buffer)
        build = _SharedLoop(self, pipeline) if is_shared_level else _RegisterLoop(self, pipeline)
        return _sequence([*self._hoisted(pipeline), *build.statements()])

    def _hoisted(self, pipeline: Pipeline) -> list[Stmt]:
        """Allocations inside the loop, made before it: versions outlive an iteration."""
        every = [*pipeline.buffers, *(pipeline.inner.buffers if pipeline.inner else ())]
        inside = [
            statement
            for statement in allocations_of(pipeline.loop.body)
            if any(statement.buffer.same_as(loaded.versions.old) for loaded in every)
        ]
        registers = [AllocBuffer(r, {}) for loaded in every if loaded.loader for r in loaded.loader.registers]
        return [*(self._allocation(statement) for statement in inside), *registers]

    def loop_over(self, variable: Var, extent: int, turns: int, body: Callable[[Expr], Stmt]) -> Stmt:
        """A loop in which ``variable % turns`` is constant once it is unrolled: a register's number must be."""
        whole = extent <= LONGEST_UNROLLED or extent % turns != 0
        if whole:
            return self._unrolled(variable, extent, body(variable))
        outer = Var(f"{variable.name}_o", str(variable.ty.dtype))
        step = constant(turns, variable)
        inner = self._unrolled(variable, turns, body(outer * step + variable))
        return For(outer, zero(outer), constant(extent // turns, outer), ForKind.SERIAL, inner)

    def _unrolled(self, variable: Var, extent: int, body: Stmt) -> Stmt:
        return unrolled_loop(variable, extent, body, by_compiler=self._unroll_hint)


def _loop_like(loop: Stmt, body: Stmt) -> Stmt:
    return For(
        loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, dict(loop.annotations), loop.step
    )


def _sequence(statements: Sequence[Stmt]) -> Stmt:
    kept = [s for s in statements if not (isinstance(s, tirx.Evaluate) and integer(s.value) is not None)]
    if not kept:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    return kept[0] if len(kept) == 1 else tirx.stmt_seq(*kept)


def _when(condition: Expr | None, statement: Stmt) -> Stmt:
    return statement if condition is None else tirx.IfThenElse(condition, statement, None)


class _Loop:
    """What both levels share: the loop's children, and which of them load."""

    def __init__(self, transformer: Transformer, pipeline: Pipeline) -> None:
        self.transformer, self.pipeline = transformer, pipeline
        self.loop, self.variable, self.extent = pipeline.loop, pipeline.loop.loop_var, pipeline.loop.extent
        self.wrap, body = open_wrappers(self.loop.body)
        self.children = children_of(body)

    def loads(self) -> list[tuple[LoadedBuffer, Stmt]]:
        owners = [(self.pipeline.owner_of(child), child) for child in self.children]
        return [(loaded, child) for loaded, child in owners if loaded is not None]

    def uses(self) -> list[Stmt]:
        """The other children, nested pipelines in them transformed, without the allocations that were hoisted."""
        versions = self.transformer._versions
        return [
            child for child in self.children
            if self.pipeline.owner_of(child) is None
            and not (isinstance(child, AllocBuffer) and any(child.buffer.same_as(v.old) for v in versions))
        ]  # fmt: skip

    def within(self, index: Expr, *, known: int = 0) -> Expr | None:
        """The condition that ``index`` is an iteration; None where the extent is known to exceed it by ``known``."""
        extent = integer(self.extent)
        if extent is not None and known and extent >= known:
            return None
        return index < self.extent


class _SharedLoop(_Loop):
    """A loop that loads shared memory, with the register pipeline inside it where that runs on (`Pipeline.inner`)."""

    def statements(self) -> list[Stmt]:
        number, ahead = self.pipeline.number, self.pipeline.in_flight
        entry = primitive("producer_acquire", number, int(self.pipeline.entry_barrier))
        prologue = [entry, *self._prologue()]
        if self.pipeline.inner is None:
            body = self._body()
        else:
            inner = _FusedLoop(self.transformer, self.pipeline.inner, self)
            prologue += [primitive("consumer_wait", number, ahead), *inner.prologue()]
            body = self._body_around(inner)
        main = For(
            self.variable, self.loop.min, self.extent, ForKind.SERIAL, self.wrap(_sequence(body)), None,
            dict(self.loop.annotations),
        )  # fmt: skip
        return [*prologue, main]

    def slot(self, loaded: LoadedBuffer, tile: Expr) -> tuple[Versioned, Expr]:
        return loaded.versions, tirx.floormod(tile, constant(loaded.versions.count, self.variable))

    def slots(self, tile: Expr) -> list[tuple[Versioned, Expr]]:
        return [self.slot(loaded, tile) for loaded in self.pipeline.buffers]

    def _place(
        self, form: str, tile_of: Callable[[LoadedBuffer], Expr], condition_of: Callable[[LoadedBuffer], Expr | None]
    ) -> list[Stmt]:
        """All load parts in one of their loader's forms, those that look equally far ahead under one condition."""
        placed: list[tuple[LoadedBuffer, list[Stmt]]] = []
        for loaded, part in self.loads():
            assert loaded.loader is not None
            tile = tile_of(loaded)
            moved = use_versions(
                substitute(getattr(loaded.loader, form)(part), [(self.variable, tile)]), [self.slot(loaded, tile)]
            )
            if placed and placed[-1][0].lookahead == loaded.lookahead:
                placed[-1][1].append(moved)
            else:
                placed.append((loaded, [moved]))
        return [_when(condition_of(loaded), _sequence(statements)) for loaded, statements in placed]

    def _prologue(self) -> list[Stmt]:
        """The first tiles: as many commits as the deepest buffer has versions to fill; a shallower one begins later."""
        deepest = self.pipeline.longest
        dtype = str(self.variable.ty.dtype)
        variable = Var(f"{self.variable.name}_prologue", dtype) if deepest > 1 else tirx.IntImm(dtype, 0)

        def tile_of(loaded: LoadedBuffer) -> Expr:
            late = deepest - loaded.lookahead
            return variable - constant(late, variable) if late else variable

        def condition_of(loaded: LoadedBuffer) -> Expr | None:
            exists = self.within(tile_of(loaded), known=loaded.lookahead)
            if loaded.lookahead == deepest:
                return exists
            begun = tile_of(loaded) >= zero(variable)
            return begun if exists is None else tirx.all(begun, exists)

        loads = self._place("whole", tile_of, condition_of)
        body = _sequence([*loads, primitive("producer_commit", self.pipeline.number)])
        if deepest == 1:
            return [body]
        return [For(variable, zero(variable), constant(deepest, variable), ForKind.SERIAL, body)]

    def issue(self) -> list[Stmt]:
        """The loads of one iteration, for a tile that many ahead."""
        number = self.pipeline.number
        loads = self._ahead("issue")
        if self._is_late():
            return loads
        return [primitive("producer_acquire", number), *loads, primitive("producer_commit", number)]

    def deposit(self) -> list[Stmt]:
        """From registers to shared memory, where loads are not asynchronous."""
        if not self._is_late():
            return []
        number = self.pipeline.number
        stores = self._ahead("deposit")
        return [primitive("producer_acquire", number), *stores, primitive("producer_commit", number)]

    def _is_late(self) -> bool:
        return any(loaded.loader is not None and loaded.loader.is_late for loaded in self.pipeline.buffers)

    def _ahead(self, form: str) -> list[Stmt]:
        def tile_of(loaded: LoadedBuffer) -> Expr:
            # Where one iteration loads, stock CompactBufferAllocation would let its variable out, as an extent.
            ahead = constant(loaded.lookahead, self.variable)
            return ahead if integer(self.extent) == loaded.lookahead + 1 else self.variable + ahead

        return self._place(form, tile_of, lambda loaded: self.within(self.variable + loaded.lookahead))

    def wait(self) -> Stmt:
        return primitive("consumer_wait", self.pipeline.number, self.pipeline.in_flight)

    def _body(self) -> list[Stmt]:
        used = [use_versions(self.transformer.rewrite(child), self.slots(self.variable)) for child in self.uses()]
        release = primitive("consumer_release", self.pipeline.number)
        return [self.wait(), *self.issue(), *used, *self.deposit(), release]

    def _body_around(self, inner: _FusedLoop) -> list[Stmt]:
        used = [inner.main(child) if inner.is_in(child) else self.transformer.rewrite(child) for child in self.uses()]
        return [*self.issue(), *used, primitive("consumer_release", self.pipeline.number)]


class _FusedLoop(_Loop):
    """The register pipeline inside a shared one, as one holistic pipeline (Figure 3d)."""

    def __init__(self, transformer: Transformer, pipeline: Pipeline, outer: _SharedLoop) -> None:
        super().__init__(transformer, pipeline)
        self.outer = outer
        extent = integer(self.extent)
        assert extent is not None
        self.count = min(loaded.versions.count for loaded in pipeline.buffers)
        self.trips, self.ahead = extent, self.count - 1

    def is_in(self, child: Stmt) -> bool:
        return bool(open_wrappers(child)[1].same_as(self.loop))

    def _load(self, loaded: LoadedBuffer, part: Stmt, step: Expr, tile: Expr, turn: Expr) -> Stmt:
        """One fragment: ``step`` of ``tile``, into the version of ``turn``. Beyond the last tile any data will do."""
        beyond = tirx.floormod(tile, self.outer.extent) if integer(tile) is None else tile
        moved = substitute(part, [(self.variable, step), (self.outer.variable, beyond)])
        return use_versions(moved, [*self.outer.slots(tile), (loaded.versions, self._version(turn))])

    def _version(self, turn: Expr) -> Expr:
        return tirx.floormod(turn, constant(self.count, turn))

    def prologue(self) -> list[Stmt]:
        first = zero(self.outer.variable)
        if self.ahead == 1:
            step = zero(self.variable)
            return [self._load(loaded, part, step, first, step) for loaded, part in self.loads()]
        variable = Var(f"{self.variable.name}_prologue", str(self.variable.ty.dtype))
        loads = [self._load(loaded, part, variable, first, variable) for loaded, part in self.loads()]
        return [self.transformer._unrolled(variable, self.ahead, _sequence(loads))]

    def main(self, child: Stmt) -> Stmt:
        wrap, _ = open_wrappers(child)
        return wrap(self.transformer.loop_over(self.variable, self.trips, self.count, self._iteration))

    def _iteration(self, step: Expr) -> Stmt:
        trips = constant(self.trips, self.variable)
        later = step + constant(self.ahead, self.variable)
        wrapped = tirx.floormod(later, trips)
        next_tile = self.outer.variable + as_index(tirx.floordiv(later, trips), self.outer.variable)
        whole_turns = self.trips % self.count == 0
        begin = zero(step) if whole_turns else as_index(self.outer.variable, step) * trips
        loads = [
            self._load(loaded, part, wrapped, next_tile, begin + later if not whole_turns else later)
            for loaded, part in self.loads()
        ]
        turn = step if whole_turns else begin + step
        versions = [(loaded.versions, self._version(turn)) for loaded in self.pipeline.buffers]
        renamed = [] if step.same_as(self.variable) else [(self.variable, step)]
        used = [use_versions(substitute(self.transformer.rewrite(u), renamed), versions) for u in self.uses()]
        next_is_new = tirx.EQ(wrapped, zero(wrapped))
        arrive = _when(next_is_new, _sequence([*self.outer.deposit(), self.outer.wait()]))
        return self.wrap(_sequence([arrive, *loads, *used]))


class _RegisterLoop(_Loop):
    """A register pipeline of its own, begun anew whenever its loop is (Figure 3c)."""

    def statements(self) -> list[Stmt]:
        count = min(loaded.versions.count for loaded in self.pipeline.buffers)
        self.count, self.ahead = count, count - 1
        return [*self._prologue(), self._main()]

    def _load(self, loaded: LoadedBuffer, part: Stmt, step: Expr, condition: Expr | None) -> Stmt:
        slot = tirx.floormod(step, constant(self.count, step))
        return _when(condition, use_versions(substitute(part, [(self.variable, step)]), [(loaded.versions, slot)]))

    def _prologue(self) -> list[Stmt]:
        dtype = str(self.variable.ty.dtype)
        steps = [tirx.IntImm(dtype, place) for place in range(self.ahead)]
        return [
            self._load(loaded, part, step, self.within(step, known=self.ahead))
            for step in steps
            for loaded, part in self.loads()
        ]

    def _main(self) -> Stmt:
        extent = integer(self.extent)
        if extent is None:
            body = self._iteration(self.variable)
            return For(self.variable, zero(self.variable), self.extent, ForKind.SERIAL, body)
        return self.transformer.loop_over(self.variable, extent, self.count, self._iteration)

    def _iteration(self, step: Expr) -> Stmt:
        later = step + constant(self.ahead, self.variable)
        loads = [self._load(loaded, part, later, self.within(later)) for loaded, part in self.loads()]
        slot = tirx.floormod(step, constant(self.count, step))
        versions = [(loaded.versions, slot) for loaded in self.pipeline.buffers]
        renamed = [] if step.same_as(self.variable) else [(self.variable, step)]
        used = [use_versions(substitute(self.transformer.rewrite(u), renamed), versions) for u in self.uses()]
        return self.wrap(_sequence([*loads, *used]))
