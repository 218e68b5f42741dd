"""Bodies of a merged kernel become device functions of their own, right before code generation (Rammer, §4.1).

In one function, compilers compute ahead for all bodies: what follows from a thread's number is the same in every turn
of the kernel's loop, so that it moves out of it and occupies registers while other bodies run. A function that is not
inlined starts anew. The kernel then needs about the registers of the body with the most, and compiling takes as long as
compiling the bodies one by one.

    if (body == 0) { int place = table[operands]; ... }     ->     if (body == 0) kernel_body0(arena, table, operands);

What a body reads of the kernel becomes parameters: numbers, and addresses as ``void*``, of which the function says at
its beginning in which memory they are, since loads of "some memory" are slower. Operators whose tensors are different
parameters of the kernel share a function.

A thread's own arrays begin as zeros. ptxas inlines functions after all, and a value that only some threads write
(``if (thread < 32) sum = 0;``) comes from the turn before for the others, as far as it knows: every body's sums would
be alive throughout the loop. Worked example: the five products of a random cell take 75 to 80 registers alone, in one
kernel 254, with zeros 125, and with zeros in functions 96.

The interpreter (`verify.simt`) runs kernels as they are before this pass: reading what nobody wrote is an error there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tvm_ext._tvm import (
    AllocBuffer,
    Buffer,
    DeclBuffer,
    Expr,
    For,
    ForKind,
    GlobalVar,
    IRModule,
    PassContext,
    PrimFunc,
    Stmt,
    Var,
    copy_module,
    ir,
    module_pass,
    structural_equal,
    structural_hash,
    structural_mutate,
    structural_walk,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.analysis.device_code import split_dtype
from tvm_ext.ir.build_ir import sequence
from tvm_ext.ir.device_sync import CALL
from tvm_ext.records.merged import BODY_SCOPE

_KEPT = ("target", "s_tir")
"""Attributes of a kernel that its functions have, too."""


@module_pass(opt_level=0, name="tvm_ext.OutlineRTasks")
class OutlineRTasks:
    """Make functions of all statements under `BODY_SCOPE` of a module of device functions; equal ones are one."""

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        for gv, func in mod.functions_items():
            outliner = _Outliner(func, str(gv.name_hint))
            kernel = outliner.kernel()
            if outliner.functions:
                result[gv] = kernel
            for name, made in outliner.functions.items():
                result[GlobalVar(name)] = made
        return result


@dataclass(slots=True)
class _Outliner:
    """One kernel; ``functions`` are what was made of its bodies, by name."""

    func: PrimFunc
    name: str
    functions: dict[str, PrimFunc] = field(default_factory=dict)
    _alike: dict[int, list[tuple[str, PrimFunc]]] = field(default_factory=dict)  # by structure
    _threads: list[Var] = field(default_factory=list)

    def kernel(self) -> PrimFunc:
        """The kernel, which calls functions; what it was where it has no bodies."""
        structural_walk(self.func.body, [(tirx.AttrStmt, self._note_thread)], order="pre")
        return self.func.with_body(structural_mutate(self.func.body, (tirx.AttrStmt, self._called)))

    def _note_thread(self, node: Stmt) -> None:
        if node.attr_key == "thread_extent" and str(node.node.thread_tag) == "threadIdx.x":
            self._threads.append(node.node.var)

    def _called(self, node: Stmt, mutator: object) -> Stmt:
        if node.attr_key != BODY_SCOPE:
            return mutator.default_mutate(node)  # type: ignore[attr-defined]
        function, arguments = self._outlined(node.body)
        return _call_outlined(self._kept(function), function.params, arguments)

    def _outlined(self, body: Stmt) -> tuple[PrimFunc, list[Expr]]:
        """``body`` as a function, and what to call it with here."""
        parameters: list[Var] = []
        arguments: list[Expr] = []
        head: list[Stmt] = []
        for used in tirx.analysis.undefined_vars(body, []):
            if any(used.same_as(thread) for thread in self._threads):
                head.append(tirx.Bind(used, tirx.call_intrin("int32", CALL, "tvm_ext_thread", _THREAD)))
            elif isinstance(used.ty, tirx.BufferType):
                parameters.append(_pointer(f"{used.name}_data", str(used.ty.storage_scope)))
                arguments.append(used.data)
                head += [_say_memory(parameters[-1]), DeclBuffer(used, data=parameters[-1])]
            else:
                parameters.append(used)
                arguments.append(used)
        kept = {key: self.func.attrs[key] for key in _KEPT if key in self.func.attrs}
        function = PrimFunc(parameters, sequence(*head, zeroed(body))).with_attrs({**kept, "calling_conv": 0})
        return function, arguments

    def _kept(self, function: PrimFunc) -> str:
        """The name of ``function``: an earlier one's, if that does the same."""
        alike = self._alike.setdefault(structural_hash(function, map_free_vars=True), [])
        for name, other in alike:
            if structural_equal(function, other, map_free_vars=True):
                return name
        name = f"{self.name}_body{len(self.functions)}"
        alike.append((name, function))
        self.functions[name] = function.with_attr("global_symbol", name)
        return name


def zeroed(body: Stmt) -> Stmt:
    """``body`` whose arrays of single threads begin as zeros; those inside of loops stay as they are."""

    def sequenced(node: Stmt, mutator: object) -> Stmt:
        parts: list[Stmt] = []
        for part in node.seq:
            parts.append(mutator.mutate(part))  # type: ignore[attr-defined]
            if isinstance(part, AllocBuffer) and str(part.buffer.ty.storage_scope) == "local":
                parts.append(_zeros(part.buffer))
        return sequence(*parts)

    return structural_mutate(body, [(tirx.SeqStmt, sequenced), (For, lambda node, _mutator: node)])


def _zeros(buffer: Buffer) -> Stmt:
    base, lanes = split_dtype(dtype_of(buffer))
    zero = tirx.const(0, base)
    value = zero if lanes == 1 else tirx.Broadcast(zero, lanes)
    (size,) = buffer.ty.shape
    place = Var("place", "int32")
    return For(place, tirx.IntImm("int32", 0), size, ForKind.UNROLLED, tirx.BufferStore(buffer, value, [place]))


# --- calls and their text ---------------------------------------------------------------------------------------------
_TYPES = {"int32": "int", "int64": "int64_t", "bool": "bool"}
"""In CUDA C++ what a function of `_call_outlined` takes by value, as stock TVM prints it."""

_HEAD = "static __device__ __forceinline__ int"

_THREAD = f"""
{_HEAD} tvm_ext_thread() {{ return (int)threadIdx.x; }}
"""

_IN_MEMORY = f"""
{_HEAD} tvm_ext_is_{{0}}(const void* data) {{{{ __builtin_assume(__is{{1}}(data)); return 0; }}}}
"""
_MEMORIES = {"global": "Global", "shared": "Shared", "shared.dyn": "Shared"}


def _pointer(name: str, scope: str) -> Var:
    """A ``void*`` parameter to memory of ``scope``."""
    return Var(name, ir.PointerType(ir.PrimType("void"), scope))


def _call_outlined(name: str, parameters: Sequence[Var], arguments: Sequence[Expr]) -> Stmt:
    """Call the module's function ``name``, which is not inlined: the text that comes with the call declares it so.

    A definition, which stock TVM prints without an attribute, has those of the declaration before it.
    """
    types = ", ".join("void*" if isinstance(p.ty, ir.PointerType) else _TYPES[str(p.ty.dtype)] for p in parameters)
    declared = f'\nextern "C" __device__ __noinline__ void {name}({types});\n'
    return tirx.Evaluate(tirx.call_intrin("void", CALL, name, *arguments, declared))


def _say_memory(data: Var) -> Stmt:
    """Tell the compiler in which memory ``data`` is: a load of it is one of that memory then."""
    scope = str(data.ty.storage_scope)
    name = _MEMORIES[scope]
    return tirx.Evaluate(
        tirx.call_intrin("int32", CALL, f"tvm_ext_is_{name.lower()}", data, _IN_MEMORY.format(name.lower(), name))
    )
