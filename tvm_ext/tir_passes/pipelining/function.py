"""A function in canonical form, and questions about it that several steps ask."""

from __future__ import annotations

from functools import cached_property

from tvm_ext._tvm import Buffer, Expr, For, PrimFunc, Stmt, TensorLoad, Var, nodes_in, tirx

from .loops import (
    BufferAccess,
    accesses_of,
    allocations_of,
    buffer_behind,
    enclosing_loops,
    integer,
    is_shared,
    scope_of,
)

PlacedAccess = tuple[tuple[Stmt, ...], Stmt, BufferAccess]
"""Loops and conditions around, statement, access."""


class Function:
    """A canonical PrimFunc, its statements with what is around them, its buffers by name."""

    def __init__(self, func: PrimFunc) -> None:
        self.func = func
        self.body = func.body

    @cached_property
    def leaves(self) -> list[tuple[tuple[Stmt, ...], Stmt]]:
        return list(enclosing_loops(self.body))

    @cached_property
    def accesses(self) -> list[PlacedAccess]:
        """(loops and conditions around, statement, access), conditions' and extents' own reads left out."""
        return [
            (around, statement, access) for around, statement in self.leaves for access in accesses_of(statement)
            if not isinstance(statement, tirx.DeclBuffer)
        ]  # fmt: skip

    @cached_property
    def buffers(self) -> dict[str, Stmt]:
        """Allocations by name; the second buffer called A is ``A#2``."""
        found: dict[str, Stmt] = {}
        for _, statement in self.leaves:
            if isinstance(statement, tirx.AllocBuffer):
                name, number = str(statement.buffer.name), 1
                while name in found:
                    number += 1
                    name = f"{statement.buffer.name}#{number}"
                found[name] = statement
        return found

    @cached_property
    def thread_extents(self) -> dict[Var, Expr]:
        """Thread and block indices with their extents."""
        found: dict[Var, Expr] = {}
        for node in self._thread_attributes:
            found.setdefault(node.node.var, node.value)
        return found

    @cached_property
    def ranges(self) -> dict[Var, Expr]:
        """Extents of thread indices and of loops that count from 0."""
        loops = [loop for around, _ in self.leaves for loop in around if isinstance(loop, For)]
        return {**self.thread_extents, **{loop.loop_var: loop.extent for loop in loops if integer(loop.min) == 0}}

    @cached_property
    def launches(self) -> list[Stmt]:
        """The kernels of the function, one after another."""
        found: list[Stmt] = []

        def visit(statement: Stmt) -> None:
            if isinstance(statement, tirx.AttrStmt) and statement.attr_key != "thread_extent":
                visit(statement.body)
            elif isinstance(statement, tirx.SeqStmt):
                for part in statement.seq:
                    visit(part)
            elif isinstance(statement, tirx.AttrStmt):
                found.append(statement)

        visit(self.body)
        return found

    def launch_of(self, loop: Stmt) -> Stmt:
        """The kernel that ``loop`` is in."""
        for launch in self.launches:
            if any(outer.same_as(loop) for around, _ in enclosing_loops(launch) for outer in around):
                return launch
        return self.body

    def allocations_beside(self, loop: Stmt) -> list[Stmt]:
        """All allocations of the kernel that ``loop`` is in."""
        return allocations_of(self.launch_of(loop))

    def is_in(self, launch: Stmt, allocation: Stmt) -> bool:
        return any(allocation.same_as(other) for other in allocations_of(launch))

    def may_follow_shared(self, loop: Stmt) -> bool:
        """Whether shared memory may have been used before ``loop`` begins: by what precedes it, or by an outer loop."""
        for around, statement in enclosing_loops(self.launch_of(loop)):
            if any(outer.same_as(loop) for outer in around):
                return any(
                    isinstance(outer, For | tirx.While) and not outer.same_as(loop) for outer in _up_to(around, loop)
                )
            if any(is_shared(access.buffer) for access in accesses_of(statement)):
                return True
        return False

    def shared_of_another_type_before(self, loop: Stmt, buffer: Buffer) -> Buffer | None:
        """A shared buffer of another type than ``buffer`` that is done with before ``loop`` begins, or None."""
        before: list[Buffer] = []
        later: list[Buffer] = []
        found = before
        for around, statement in enclosing_loops(self.launch_of(loop)):
            if any(outer.same_as(loop) for outer in around):
                found = later
            found += [self.memory_of(access.buffer) for access in accesses_of(statement)]
        return next(
            (other for other in before if is_shared(other) and str(other.ty.dtype) != str(buffer.ty.dtype)
             and not any(other.same_as(used) for used in later)),
            None,
        )  # fmt: skip

    def around(self, loop: Stmt) -> list[Stmt]:
        """The loops and conditions around ``loop``, outermost first."""
        for around, _ in self.leaves:
            if any(outer.same_as(loop) for outer in around):
                return _up_to(around, loop)
        return []

    def is_same_for_all_threads(self, expr: Expr) -> bool:
        """Whether all threads of a block compute the same value of ``expr``, as far as can be seen.

        It may use block indices, parameters, loops that themselves are the same for all, and global memory at places
        that are.
        """
        sources = [load.source for load in nodes_in(expr, TensorLoad)]
        known = [*self._uniform_variables, *sources]
        return all(scope_of(source) == "global" for source in sources) and all(
            any(variable.same_as(other) for other in known) for variable in nodes_in(expr, Var)
        )

    @cached_property
    def _uniform_variables(self) -> list[Var]:
        """Block indices, loop variables, parameters, their sizes; a loop that some threads leave is refused."""
        blocks = [node.node.var for node in self._thread_attributes if str(node.node.thread_tag).startswith("blockIdx")]
        loops = [loop.loop_var for around, _ in self.leaves for loop in around if isinstance(loop, For)]
        sizes = [size for param in self.func.params for size in getattr(param.ty, "shape", ())]
        return [*blocks, *loops, *self.func.params, *nodes_in(sizes, Var, "pre")]

    @cached_property
    def _thread_attributes(self) -> list[Stmt]:
        found = nodes_in(self.body, tirx.AttrStmt, "pre")
        return [node for node in found if node.attr_key in ("thread_extent", "virtual_thread")]

    @cached_property
    def _aliases(self) -> dict[Buffer, Buffer]:
        found: dict[Buffer, Buffer] = {}
        for _, statement in self.leaves:
            if isinstance(statement, tirx.DeclBuffer) and statement.data is not None:
                source = buffer_behind(statement.data)
                if source is not None:
                    found[statement.buffer] = found.get(source, source)
        return found

    def memory_of(self, buffer: Buffer) -> Buffer:
        """The parameter or allocation that ``buffer`` is a view of."""
        return self._aliases.get(buffer, buffer)

    @cached_property
    def written(self) -> list[Buffer]:
        """The memory that the function writes."""
        return [self.memory_of(access.buffer) for _, _, access in self.accesses if access.writes]

    def is_written(self, buffer: Buffer) -> bool:
        memory = self.memory_of(buffer)
        return any(memory.same_as(other) for other in self.written)

    def is_viewed(self, buffer: Buffer) -> bool:
        """Whether another buffer is declared over the same allocation."""
        return any(memory.same_as(buffer) for memory in self._aliases.values())


def _up_to(around: tuple[Stmt, ...], loop: Stmt) -> list[Stmt]:
    """The loops around ``loop``."""
    position = next(position for position, outer in enumerate(around) if outer.same_as(loop))
    return list(around[:position])
