"""Translates a lowered device function to the Python generator that `scalar_threads` runs, one thread at a time."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from tests.unit.verify.simt import scalar_threads
from tests.unit.verify.simt.scalar_threads import Kernel

BINARY = {
    "Add": "+", "Sub": "-", "Mul": "*", "LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!=",
    "RShift": ">>", "LShift": "<<", "BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^", "And": "and", "Or": "or",
}  # fmt: skip


def lanes_of(buffer: Any) -> int:
    """2 for elements of float32x2."""
    return int(str(buffer.ty.dtype).partition("x")[2] or 1)


class Translator:
    """Writes Python statements for one function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.names: list[tuple[Any, str]] = []
        self.buffers: list[tuple[Any, str, str]] = []  # (buffer, name, scope)
        self.blocks: dict[str, int] = {}
        self.threads: dict[str, int] = {}
        self.shared: dict[str, int] = {}
        self.written: set[str] = set()
        self.fresh = itertools.count()

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    # --- names ------------------------------------------------------------------------------------------------------
    def variable(self, var: Any) -> str:
        for known, name in self.names:
            if known.same_as(var):
                return name
        name = f"v{next(self.fresh)}"
        self.names.append((var, name))
        return name

    def buffer(self, buffer: Any) -> tuple[str, str]:
        """(name, scope) of a buffer or of the pointer ``buffer.data``."""
        if type(buffer).__name__ == "Call":  # tirx.buffer_data(buffer)
            buffer = buffer.args[0]
        for known, name, scope in self.buffers:
            if known.same_as(buffer):
                return name, scope
        raise NotImplementedError(f"buffer {buffer} is not declared")

    # --- expressions ------------------------------------------------------------------------------------------------
    def expr(self, e: Any, lane: str = "") -> str:
        kind = type(e).__name__
        if kind in BINARY:
            return f"({self.expr(e.a, lane)} {BINARY[kind]} {self.expr(e.b, lane)})"
        handler = getattr(self, f"_expr_{kind}", None)
        if handler is None:
            raise NotImplementedError(f"expression {kind}: {e}")
        return str(handler(e, lane))

    def _expr_IntImm(self, e: Any, _lane: str) -> str:
        return str(int(e.value))

    def _expr_FloatImm(self, e: Any, _lane: str) -> str:
        value = float(e.value)
        return repr(value) if math.isfinite(value) else f"float('{value}')"

    def _expr_Var(self, e: Any, _lane: str) -> str:
        return self.variable(e)

    def _expr_Max(self, e: Any, lane: str) -> str:
        return f"maximum({self.expr(e.a, lane)}, {self.expr(e.b, lane)})"

    def _expr_Min(self, e: Any, lane: str) -> str:
        return f"minimum({self.expr(e.a, lane)}, {self.expr(e.b, lane)})"

    def _expr_Not(self, e: Any, lane: str) -> str:
        return f"(not {self.expr(e.a, lane)})"

    def _expr_Select(self, e: Any, lane: str) -> str:
        yes, no = self.expr(e.true_value, lane), self.expr(e.false_value, lane)
        return f"({yes} if {self.expr(e.condition, lane)} else {no})"

    def _expr_Div(self, e: Any, lane: str) -> str:
        name = "divide" if "float" in str(e.ty.dtype) else "truncated_quotient"
        return f"{name}({self.expr(e.a, lane)}, {self.expr(e.b, lane)})"

    def _expr_Mod(self, e: Any, lane: str) -> str:
        return f"truncated_remainder({self.expr(e.a, lane)}, {self.expr(e.b, lane)})"

    def _expr_Cast(self, e: Any, lane: str) -> str:
        return f"{'float' if 'float' in str(e.ty.dtype) else 'int'}({self.expr(e.value, lane)})"

    def _expr_Ramp(self, e: Any, lane: str) -> str:
        return f"({self.expr(e.base)} + {lane} * {self.expr(e.stride)})"

    def _expr_Broadcast(self, e: Any, _lane: str) -> str:
        return self.expr(e.value)

    def _expr_TensorLoad(self, e: Any, lane: str) -> str:
        name, scope = self.buffer(e.source)
        index = self._place(e.source, e.indices[0], lane)
        return f"local_read(memory, {name}, {index})" if scope == "local" else f"memory.read(thread, {name!r}, {index})"

    def _place(self, buffer: Any, index: Any, lane: str) -> str:
        """Element of ``lane``; a buffer of vectors, float32x2, is one of twice as many numbers."""
        lanes = lanes_of(buffer)
        return f"({self.expr(index)} * {lanes} + {lane or 0})" if lanes > 1 else self.expr(index, lane)

    def _expr_Call(self, e: Any, lane: str) -> str:
        name = e.op.name
        args = list(e.args)
        if name == "prim.if_then_else":
            yes, no = self.expr(args[1], lane), self.expr(args[2], lane)
            return f"({yes} if {self.expr(args[0], lane)} else {no})"
        if name == "tirx.call_pure_extern" and args[0].value == "expf":
            return f"exponential({self.expr(args[1])})"
        if name == "tirx.cuda.__activemask":
            return f"(yield ('active', {next(self.fresh)}))"
        if name.startswith("tirx.cuda.__shfl"):
            values = ", ".join(self.expr(arg) for arg in args)
            return f"(yield ('shuffle', {next(self.fresh)}, {name.rpartition('.')[2]!r}, {values}))"
        raise NotImplementedError(f"call of {name}")

    # --- statements -------------------------------------------------------------------------------------------------
    def stmt(self, s: Any) -> None:
        handler = getattr(self, f"_stmt_{type(s).__name__}", None)
        if handler is None:
            raise NotImplementedError(f"statement {type(s).__name__}: {s}")
        handler(s)

    def nested(self, s: Any) -> None:
        self.depth += 1
        before = len(self.lines)
        self.stmt(s)
        if len(self.lines) == before:
            self.emit("pass")
        self.depth -= 1

    def _stmt_SeqStmt(self, s: Any) -> None:
        for part in s.seq:
            self.stmt(part)

    def _stmt_AttrStmt(self, s: Any) -> None:
        if s.attr_key == "thread_extent":
            tag = str(s.node.thread_tag)
            (self.blocks if tag.startswith("block") else self.threads)[tag] = int(s.value)
            self.emit(f"{self.variable(s.node.var)} = place[{tag!r}]")
        if s.attr_key == "async_wait_inflight_count":
            self.emit(f"memory.land(thread, groups - {int(s.value)})")
        self.stmt(s.body)
        if s.attr_key == "async_commit_queue_scope":
            self.emit("groups += 1")

    def _stmt_DeclBuffer(self, s: Any) -> None:
        pointer = s.data if type(s.data).__name__ == "Var" else s.data.args[0]
        self.buffers.append((s.buffer, str(pointer.name), "global"))

    def _stmt_AllocBuffer(self, s: Any) -> None:
        scope, name = str(s.buffer.ty.storage_scope), f"b{next(self.fresh)}"
        size = int(s.buffer.ty.shape[0]) * lanes_of(s.buffer)
        if scope == "shared":
            self.shared[name] = size
            self.buffers.append((s.buffer, name, "shared"))
            return
        self.buffers.append((s.buffer, name, "local"))
        never = "NAN" if "float" in str(s.buffer.ty.dtype) else "NEVER"
        self.emit(f"{name} = [{never}] * {1 if scope.startswith('wmma') else size}")

    def _stmt_Bind(self, s: Any) -> None:
        self.emit(f"{self.variable(s.var)} = {self.expr(s.value)}")

    def _stmt_For(self, s: Any) -> None:
        low = self.expr(s.min)
        self.emit(f"for {self.variable(s.loop_var)} in range({low}, {low} + {self.expr(s.extent)}):")
        self.nested(s.body)

    def _stmt_IfThenElse(self, s: Any) -> None:
        self.emit(f"if {self.expr(s.condition)}:")
        self.nested(s.then_case)
        if s.else_case is not None:
            self.emit("else:")
            self.nested(s.else_case)

    def _stmt_BufferStore(self, s: Any) -> None:
        (index,) = s.indices
        lanes = int(index.lanes) if type(index).__name__ == "Ramp" else lanes_of(s.buffer)
        if lanes > 1:
            self.emit(f"for lane in range({lanes}):")
            self.depth += 1
            self._store(s, index, "lane")
            self.depth -= 1
        else:
            self._store(s, index, "")

    def _store(self, s: Any, index: Any, lane: str) -> None:
        name, scope = self.buffer(s.buffer)
        place, value = self._place(s.buffer, index, lane), self.expr(s.value, lane)
        if scope == "local":
            self.emit(f"local_write(memory, {name}, {place}, {value})")
            return
        self.written.add(name)
        self.emit(f"memory.write(thread, {name!r}, {place}, {value})")

    def _stmt_Evaluate(self, s: Any) -> None:
        if type(s.value).__name__ == "IntImm":
            return
        name = s.value.op.name.removeprefix("tirx.").replace(".", "_")
        getattr(self, f"_do_{name}")(*s.value.args)

    def _do_tvm_storage_sync(self, *_args: Any) -> None:
        self.emit(f"yield ('barrier', {next(self.fresh)})")

    def _do_s_tir_cp_async_raw(self, target: Any, at: Any, source: Any, origin: Any, size_bytes: Any) -> None:
        name, first, itemsize = self.place(target)
        count = int(size_bytes) // itemsize
        to, read = f"({name!r}, {first} + {self.expr(at)})", f"({self.buffer(source)[0]!r}, {self.expr(origin)})"
        self.emit(f"memory.issue(thread, groups, {to}, {read}, {count})")

    def place(self, pointer: Any) -> tuple[str, str, int]:
        """The memory, the index and the bytes of an element of ``buffer.data`` or ``address_of(buffer[index])``."""
        inner = pointer.args[0]
        is_element = hasattr(inner, "indices")
        buffer = inner.source if is_element else inner
        first = self.expr(inner.indices[0]) if is_element else "0"
        return self.buffer(buffer)[0], first, np.dtype(str(buffer.ty.dtype)).itemsize

    def _pointer(self, call: Any) -> str:
        """``'name', index`` of ``address_of(buffer[index])``."""
        load = call.args[0]
        name, _ = self.buffer(load.source)
        return f"{name!r}, {self.expr(load.indices[0])}"

    def _collective(self, kind: str, *parts: str) -> None:
        self.emit(f"yield ({', '.join((repr(kind), str(next(self.fresh)), *parts))})")

    def _do_ptx_legacy_ldmatrix(self, *args: Any) -> None:
        transposed, count, _type, to, at, row, by = args
        registers, _ = self.buffer(to)
        name, index = self._pointer(row).split(", ", 1)
        where = (registers, self.expr(at), name, f"{index} + {self.expr(by)}")
        self._collective("ldmatrix", str(bool(transposed)), str(int(count)), *where)

    def _do_ptx_legacy_mma(self, *args: Any) -> None:
        shape, *_ = args
        assert shape.value == "m16n8k16"
        pairs = [(self.buffer(args[i])[0], self.expr(args[i + 1])) for i in (6, 8, 10)]
        self._collective("mma", *itertools.chain.from_iterable(pairs))

    def _do_mma_fill_legacy(self, size: Any, registers: Any, offset: Any) -> None:
        array, first = self.buffer(registers)[0], self.expr(offset)
        self.emit(f"for fill in range({int(size)}): local_write(memory, {array}, {first} + fill, 0.0)")

    def _do_mma_store_legacy(self, _m: Any, _n: Any, target: Any, source: Any, offset: Any, stride: Any) -> None:
        self.written.add(self.buffer(target.args[0].source)[0])
        registers = (self.buffer(source)[0], self.expr(offset))
        self._collective("mma_store", self._pointer(target), *registers, self.expr(stride))

    def _do_tvm_fill_fragment(self, fragment: Any, *rest: Any) -> None:
        self.emit(f"{self.buffer(fragment)[0]}[{self.expr(rest[3])}] = np.full((16, 16), {self.expr(rest[4])})")

    def _do_tvm_load_matrix_sync(self, *args: Any) -> None:
        fragment, _m, _n, _k, number, pointer, stride, _layout = args
        parts = (self.buffer(fragment)[0], self.expr(number), self._pointer(pointer), self.expr(stride))
        self._collective("wmma_load", *parts)

    def _do_tvm_store_matrix_sync(self, *args: Any) -> None:
        fragment, _m, _n, _k, number, pointer, stride, _layout = args
        self.written.add(self.buffer(pointer.args[0].source)[0])
        parts = (self.buffer(fragment)[0], self.expr(number), self._pointer(pointer), self.expr(stride))
        self._collective("wmma_store", *parts)

    def _do_tvm_mma_sync(self, *args: Any) -> None:
        assert all(int(args[i]) == 0 for i in (1, 3, 5, 7)), "one fragment of each kind"
        self._collective("wmma_multiply", *(self.buffer(args[i])[0] for i in (0, 2, 4, 6)))


def translate(function: Any) -> Kernel:
    """The kernel of a device PrimFunc as `tvm_ext.verify.simt.lower` gives it."""
    translator = Translator()
    translator.stmt(function.body)
    header = ["def run(memory, thread, place):", "    groups = 0", "    if False: yield"]
    namespace: dict[str, Any] = dict(vars(scalar_threads))
    exec(compile("\n".join([*header, *translator.lines]), "<kernel>", "exec"), namespace)  # noqa: S102
    return Kernel(
        run=namespace["run"], blocks=translator.blocks, threads=translator.threads, shared=translator.shared,
        parameters=[str(param.name) for param in function.params], written=translator.written,
    )  # fmt: skip
