"""What is known while a kernel is compiled to closures: slots of variables, buffers, the statement at hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_ext.errors import InputError
from tvm_ext.support.arrays import DType

from .machine import Closure, Engine, Run, Site

if TYPE_CHECKING:
    from tvm_ext._tvm import Call, Expr, Node, Stmt, Var


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BufferBinding:
    """A buffer: ``slot`` of the memory behind it, scalar ``dtype``, ``lanes`` of that in an element (float16x4: 4).

    ``scope`` is TVM's storage scope.
    """

    slot: int
    name: str
    dtype: DType
    lanes: int
    scope: str


class Scope:
    """Grows while `compile_statement` walks the kernel."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.statement: Stmt | None = None
        self.flops = 0  # of the statement at hand
        self.shared_bytes = 0
        self.special_calls: dict[str, Callable[[Scope, Call], Closure]] = {}  # calls with a value
        # By the name of the function called.
        self.special_externs: dict[str, Callable[[Scope, list[Expr]], Closure]] = {}
        self.effects: dict[str, Callable[[Scope, Call], Run]] = {}  # calls as statements
        self.wait: Callable[[Engine, int], None] = lambda m, in_flight: None
        self._granules: dict[int, list[int]] = {}
        self._variables: dict[int, int] = {}
        self._buffers: dict[int, BufferBinding] = {}
        self._sites = 0
        self.memories = 0
        self._kept: list[Node] = []  # so that no handle is used twice

    @property
    def variables(self) -> int:
        return len(self._kept)

    def define(self, variable: Var) -> int:
        """The slot of a variable; one that is bound again (loops unrolled by copying) keeps its slot."""
        key = hash(variable)
        if key not in self._variables:
            self._variables[key] = len(self._kept)
            self._kept.append(variable)
        return self._variables[key]

    def variable(self, variable: Var) -> int:
        key = hash(variable)
        if key not in self._variables:
            raise InputError(f"{self.kernel}: {variable} is used before it is bound")
        return self._variables[key]

    def new_memory(self) -> int:
        self.memories += 1
        return self.memories - 1

    def bind_buffer(self, variable: Var, binding: BufferBinding) -> None:
        self._buffers[hash(variable)] = binding
        self.define(variable)

    def buffer(self, variable: Var) -> BufferBinding:
        """The binding of a buffer or pointer variable."""
        found = self._buffers.get(hash(variable))
        if found is None:
            raise InputError(f"{self.kernel}: no memory is allocated for {variable}")
        return found

    def note_granule(self, slot: int, size_bytes: int, *, is_allocation: bool) -> None:
        """An element of ``size_bytes`` is seen in that memory, by its allocation or by a view of it."""
        kept = self._granules.setdefault(slot, [])
        kept.append(-size_bytes if is_allocation else size_bytes)

    def granule(self, slot: int) -> int:
        """Bytes of a cell of that memory: the smallest element of its views, or of the allocation without any.

        Worked example: merged shared memory, allocated as bytes and seen as halves and floats, has cells of 2 bytes.
        """
        views = [size for size in self._granules[slot] if size > 0]
        return min(views) if views else -min(self._granules[slot])

    def site(self, buffer: str = "") -> Site:
        """A new access of ``buffer`` in the statement at hand, or an expression there that decides something."""
        self._sites += 1
        statement = self.statement
        return Site(number=self._sites, buffer=buffer, text=lambda: statement_text(statement))


_TEXT_OF_FUNCTION = re.compile(r', source_code="(?:[^"\\]|\\.)*"')


def statement_text(statement: Stmt) -> str:
    """The statement as TVMScript prints it; of one with a body, its first line."""
    lines = [
        line for line in str(statement).splitlines() if line.strip() and not line.startswith(("#", "from ", "import "))
    ]
    head = [line for line in lines if not line.lstrip().startswith(("with T.", "T.func_attr"))]
    compound = type(statement).__name__ in ("IfThenElse", "For", "While")
    chosen = next((x for x in head if x.lstrip().startswith(("if ", "for ", "while "))), "") if compound else ""
    return _TEXT_OF_FUNCTION.sub("", (chosen or (lines[-1] if lines else "")).strip())
