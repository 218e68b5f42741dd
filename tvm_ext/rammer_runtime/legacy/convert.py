"""From a plain CUDA kernel to an rKernel (Rammer, paper §4.1.4): text in, text of a device function out.

The function takes the kernel's parameters, the number of an rTask (the kernel's block), the thread's number in its vEU
and a pool of shared memory. ``blockIdx``, ``threadIdx`` and the like become fields of a record that every function of
the source that uses them is handed, shared variables places in the pool, ``__syncthreads`` a barrier of the kernel's
own threads (`task.cuh`). Threads beyond the kernel's leave at once.

Text is moved, not understood: what would mean something else in a persistent kernel is refused, with the reason.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.devices.gpu import WARP
from tvm_ext.errors import InputError
from tvm_ext.ir.build_ir import cast_to
from tvm_ext.ir.device_sync import CALL
from tvm_ext.support.arithmetic import ceil_div

from .refusals import check_launches, check_source, check_threads
from .shared_memory import Pool, constants_of, rewrite_declarations
from .tokens import CudaFunction, Token, functions_of, next_place, previous, split_at, text_of, tokens_of

Extents = tuple[int, int, int]

_BUILTINS = {"threadIdx": "thread", "blockIdx": "block", "blockDim": "block_dim", "gridDim": "grid_dim"}
_TASK = "tvm_ext_this"
_TASK_TEXT = "\n" + Path(__file__).with_name("task.cuh").read_text(encoding="utf-8")
"""What converted kernels know of their rTask, and how its threads meet, in front of them.

A vEU has at least as many threads as the kernel; only these meet, at a barrier of their own. Where threads may leave a
kernel that has barriers (Rammer, §4.1.3), each barrier is a vote on whether all have left: who leaves stays in a loop
of votes, so that every barrier has all threads, and the loop ends with the vote that everybody has left.
`tvm_ext_plain_load` is for ``__ldg``: what another block of the launch has written is no constant of the launch.
"""
_DROPPED = {"__restrict__", "__restrict", "__grid_constant__"}
"""``__restrict__`` would let a compiler take what other blocks write for constants of the launch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedKernel:
    """A converted kernel: ``text`` defines ``symbol(parameters ..., int task, int thread, void* pool)``.

    ``parameters`` are (type, name). ``threads`` run it; the first ``meeting`` of a vEU (whole warps) must call it, all
    or none. It has ``task_count`` rTasks, and needs ``shared_bytes`` of the pool, aligned to 128.
    """

    symbol: str
    text: str
    parameters: tuple[tuple[str, str], ...]
    task_count: int
    threads: int
    meeting: int
    shared_bytes: int


def convert_kernel(
    source: str,
    name: str,
    *,
    grid: Extents,
    block: Extents,
    dynamic_shared_bytes: int = 0,
    shared_bytes: int | None = None,
    whole_warps_return: bool = False,
    reads: Collection[str] = (),
) -> ConvertedKernel:
    """The rKernel of function ``name`` of ``source``, which a launch gives ``grid`` blocks of ``block`` threads.

    * ``dynamic_shared_bytes``: what a launch would ask for ``extern __shared__`` arrays.
    * ``shared_bytes``: all of its shared memory, where the sizes of static variables are nothing that can be read from
      the source; the compiler checks it.
    * ``whole_warps_return``: the caller's word that threads which return early do so by whole warps (asked for where a
      warp's threads exchange values).
    * ``reads``: pointer parameters through which the kernel only reads, whatever their declaration says.

    Raises InputError for what the source lacks, and for what has no meaning inside a persistent kernel.
    """
    threads = prod(block)
    if min(*grid, *block) < 1 or threads > 1024:
        raise InputError(f"kernel {name}: a launch of {grid} blocks of {block} threads", "1 to 1024 threads a block")
    tokens = tokens_of(source)
    check_source(tokens, name)
    functions = list(functions_of(tokens))
    kernel = _kernel(functions, name)
    helpers = [function for function in functions if _is_kept(function)]
    for function in (kernel, *helpers):
        check_launches(tokens[function.body[0] : function.body[1]], name)
    aware = _aware_functions(tokens, helpers, kernel)
    votes = check_threads(tokens, kernel, helpers, threads=threads, whole_warps=whole_warps_return)
    pool = Pool(name, f"{dynamic_shared_bytes}u", dynamic_shared_bytes, constants_of(source))
    said = f"{source}{name}{grid}{block}{dynamic_shared_bytes} {shared_bytes} {sorted(reads)}"
    digest = hashlib.sha256(said.encode()).hexdigest()[:12]
    writer = _LegacyWriter(tokens, functions, kernel, aware, pool, votes)
    body = writer.file()
    size = pool.size_bytes if shared_bytes is None else shared_bytes
    if size is None:
        raise InputError(
            f"kernel {name}: the size of its shared memory cannot be read from the source", "pass shared_bytes="
        )
    space, symbol = f"tvm_ext_legacy_{digest}", f"{name}_rtask_{digest}"
    parameters = writer.parameters()
    meeting = ceil_div(threads, WARP) * WARP
    entry = _entry(kernel.name, symbol, parameters, grid, block, votes, reads)
    text = "\n".join([
        _TASK_TEXT, *writer.includes(), f"namespace {space} {{", f"constexpr unsigned tvm_ext_pool_bytes = {size};",
        body, entry, "}", *(f"#undef {macro}" for macro in writer.macros()), f"using {space}::{symbol};\n",
    ])  # fmt: skip
    return ConvertedKernel(
        symbol=symbol, text=text, parameters=parameters, task_count=prod(grid), threads=threads, meeting=meeting,
        shared_bytes=size,
    )  # fmt: skip


def _is_kept(function: CudaFunction) -> bool:
    """Whether a function may be called by a kernel: those of the host are left out."""
    return "__global__" not in function.words and bool(function.words & {"__device__", "constexpr", "template"})


def _kernel(functions: Sequence[CudaFunction], name: str) -> CudaFunction:
    kernels = {function.name: function for function in functions if "__global__" in function.words}
    if name not in kernels:
        raise InputError(
            f"the CUDA source has no __global__ function {name!r}", f"it has {', '.join(kernels) or 'none'}"
        )
    if "template" in kernels[name].words:
        raise InputError(f"kernel {name} is a template", "write the function for the types that are wanted")
    return kernels[name]


# --- which functions need to know of the rTask ------------------------------------------------------------------------
def _aware_functions(tokens: Sequence[Token], functions: Sequence[CudaFunction], kernel: CudaFunction) -> set[str]:
    """Functions besides kernels that use a thread's or block's number, a barrier, or a function that does."""
    macros = dict(_macros(tokens))
    marked = set(_BUILTINS) | {"__syncthreads"}
    changed = True
    while changed:
        fresh = {name for name, words in macros.items() if words & marked} - marked
        fresh |= {f.name for f in functions if _words(tokens[f.body[0] : f.body[1]]) & marked} - marked
        marked |= fresh
        changed = bool(fresh)
    aware = {function.name for function in functions} & marked
    for function in functions:
        if function.name in aware and "template" in function.words:
            what = f"kernel {kernel.name} uses {function.name}, a template that asks for the thread or meets others"
            raise InputError(what, "write the function for the types that are wanted")
    return aware


def _words(tokens: Iterable[Token]) -> set[str]:
    return {token.text for token in tokens if token.kind == "word"}


def _macros(tokens: Sequence[Token]) -> list[tuple[str, set[str]]]:
    """(name, words of the text) of each ``#define``."""
    found = []
    for token in tokens:
        match = re.match(r"\s*#\s*define\s+(\w+)", token.text) if token.kind == "directive" else None
        if match:
            found.append((match[1], set(re.findall(r"[A-Za-z_]\w*", token.text[match.end() :]))))
    return found


# --- writing ----------------------------------------------------------------------------------------------------------
class _LegacyWriter:
    """Writes the file anew: the kernel as a device function, other kernels left out."""

    def __init__(
        self,
        tokens: Sequence[Token],
        functions: Sequence[CudaFunction],
        kernel: CudaFunction,
        aware: set[str],
        pool: Pool,
        votes: bool,
    ) -> None:
        self._tokens, self._functions, self._kernel = tokens, functions, kernel
        self._aware, self._pool, self._votes = aware, pool, votes

    def includes(self) -> list[str]:
        """The source's ``#include`` lines, under the conditions that they have there."""
        directives = (token.text for token in self._tokens if token.kind == "directive")
        return [text for text in directives if re.match(r"\s*#\s*(?:include|if|ifdef|ifndef|elif|else|endif)\b", text)]

    def macros(self) -> list[str]:
        return sorted({name for name, _ in _macros(self._tokens)})

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """(type, name) of each parameter of the kernel."""
        first, last = self._kernel.parameters
        inside = [token for token in self._tokens[first + 1 : last] if token.text not in _DROPPED]
        found = []
        for part in split_at(inside, ","):
            words = [position for position, token in enumerate(part) if token.kind == "word"]
            if not text_of(part).strip():
                continue
            if len(words) < 2 or any(token.text in ("[", "=", "(") for token in part):
                what = (
                    f"kernel {self._kernel.name} has a parameter of a form that is not known: {text_of(part).strip()}"
                )
                raise InputError(what, "a type and a name, as in const float* a")
            found.append((text_of(part[: words[-1]]).strip(), part[words[-1]].text))
        return tuple(found)

    def file(self) -> str:
        pieces, place = [], 0
        for function in sorted(self._functions, key=lambda function: function.begin):
            pieces.append(self._outside(self._tokens[place : function.begin]))
            if function is self._kernel:
                pieces.append(self._kernel_text())
            elif _is_kept(function):
                pieces.append(self._helper(function))
            place = function.body[1] + 1
        return "".join([*pieces, self._outside(self._tokens[place:])])

    def _outside(self, tokens: Sequence[Token]) -> str:
        """What lies between functions: macros, types, declarations; of functions that are handed the rTask, none."""
        kept = [token for token in tokens if token.kind != "directive" or "include" not in token.text.split('"')[0]]
        for word in _words(kept) & (set(_BUILTINS) | {"__shared__"}):
            raise InputError(f"{word} is used outside of functions", "use it inside the kernel")
        return text_of(self._rewritten(_without_declarations(kept, self._aware | self._left_out())))

    def _left_out(self) -> set[str]:
        return {function.name for function in self._functions if not _is_kept(function)}

    def _helper(self, function: CudaFunction) -> str:
        if "__shared__" in _words(self._tokens[function.body[0] : function.body[1]]):
            what = f"shared memory of function {function.name}, which kernel {self._kernel.name}'s pool does not know"
            raise InputError(what, "declare it in the kernel, and pass a pointer")
        tokens = self._tokens[function.begin : function.body[1] + 1]
        if function.name not in self._aware:
            return text_of(self._rewritten(tokens))
        head = self._tokens[function.begin : function.parameters[0] + 1]
        rest = self._tokens[function.parameters[0] + 1 : function.body[1] + 1]
        comma = "" if rest[next_place(rest, 0)].text == ")" else ", "
        return f"{text_of(head)}const tvm_ext_task& {_TASK}{comma}{text_of(self._rewritten(rest))}"

    def _kernel_text(self) -> str:
        declared = "".join(f"{kind} {name}, " for kind, name in self.parameters())
        first, last = self._kernel.body
        body = rewrite_declarations(self._tokens[first + 1 : last], self._pool)
        rewritten = self._rewritten(body)
        text = text_of(self._leaving(rewritten) if self._votes else rewritten)
        return (
            f"static __device__ __forceinline__ void {self._kernel.name}({declared}const tvm_ext_task& {_TASK}, "
            f"void* tvm_ext_pool) {{{text}}}\n"
        )

    def _rewritten(self, tokens: Sequence[Token]) -> list[Token]:
        """Built-in variables, barriers, loads of constants, and calls of functions that are handed the rTask."""
        result: list[Token] = []
        place = 0
        while place < len(tokens):
            token = tokens[place]
            if token.kind == "directive":
                result.append(Token("directive", self._directive(token.text)))
            elif token.kind == "word" and token.text in _DROPPED:
                pass
            elif token.kind == "word" and not _is_member(tokens, place):
                result.append(Token(token.kind, self._word(tokens, place)))
                if token.text in self._aware or token.text == "__syncthreads":
                    place = self._call(tokens, place, result)
            else:
                result.append(token)
            place += 1
        return result

    def _word(self, tokens: Sequence[Token], place: int) -> str:
        text = tokens[place].text
        if text in _BUILTINS:
            return f"{_TASK}.{_BUILTINS[text]}"
        return {"__ldg": "tvm_ext_plain_load", "__syncthreads": "tvm_ext_sync"}.get(text, text)

    @staticmethod
    def _call(tokens: Sequence[Token], place: int, result: list[Token]) -> int:
        """The rTask as the first argument of a call; the place of its bracket."""
        opening = next_place(tokens, place + 1)
        if opening == len(tokens) or tokens[opening].text != "(":
            return place
        following = next_place(tokens, opening + 1)
        comma = "" if following < len(tokens) and tokens[following].text == ")" else ", "
        result.append(Token("text", f"({_TASK}{comma}"))
        return opening

    def _directive(self, text: str) -> str:
        match = re.match(r"(\s*#\s*define\s+\w+(?:\([^)]*\))?)(.*)", text, re.DOTALL)
        if match is None:
            return text
        return match[1] + text_of(self._rewritten(tokens_of(match[2])[:-1]))

    @staticmethod
    def _leaving(tokens: list[Token]) -> list[Token]:
        """Each ``return;`` of the kernel goes by way of the votes."""
        return [
            Token("text", f"return tvm_ext_leave({_TASK})")
            if token.kind == "word" and token.text == "return"
            else token
            for token in tokens
        ] + [Token("text", f" tvm_ext_leave({_TASK});")]


def _is_member(tokens: Sequence[Token], place: int) -> bool:
    before = previous(tokens, place)
    return before is not None and before.text in (".", "->", "::")


def _without_declarations(tokens: Sequence[Token], names: set[str]) -> list[Token]:
    """Without ``__device__ void f(int);`` of functions that get another parameter: their definitions come first."""
    result: list[Token] = []
    statement: list[Token] = []
    for token in tokens:
        statement.append(token)
        if token.text in (";", "}") or token.kind == "directive":
            if not (token.text == ";" and names & _words(statement)):
                result += statement
            statement = []
    return result + statement


def _entry(
    kernel: str,
    symbol: str,
    parameters: Sequence[tuple[str, str]],
    grid: Extents,
    block: Extents,
    votes: bool,
    reads: Collection[str],
) -> str:
    """The function that is called: it finds out the thread's and the block's place, and who takes part.

    It takes ``const void*`` for what is only read, and ``void*`` for what may be written: `ir.launch_writes` looks.
    """
    declared = "".join(f"{_bare(kind, name in reads)} {name}, " for kind, name in parameters)
    given = "".join(f"({kind}){name}, " for kind, name in parameters)
    threads = prod(block)
    meeting = ceil_div(threads, WARP) * WARP
    places = (_place("tvm_ext_thread", block), _place("tvm_ext_number", grid))
    sizes = (f"dim3({', '.join(map(str, extents))})" for extents in (block, grid))
    here = ", ".join([*places, *sizes, f"{meeting}u", str(votes).lower()])
    idle = f"  if (tvm_ext_thread >= {threads}) return tvm_ext_leave(tvm_ext_here);\n" if meeting > threads else ""
    return (
        f"static __device__ __forceinline__ void {symbol}(\n"
        f"    {declared}int tvm_ext_number, int tvm_ext_thread, void* tvm_ext_pool) {{\n"
        f"  if (tvm_ext_thread >= {meeting}) return;\n"
        f"  const tvm_ext_task tvm_ext_here = {{{here}}};\n"
        f"{idle}"
        f"  {kernel}({given}tvm_ext_here, tvm_ext_pool);\n"
        f"}}\n"
    )


def _bare(kind: str, is_read: bool) -> str:
    """A parameter's type as its caller has it: any pointer will do."""
    if "*" not in kind:
        return kind
    return "const void*" if is_read or "const" in kind.rsplit("*", 1)[0].split() else "void*"


def _place(number: str, extents: Extents) -> str:
    """A linear number, x fastest, as a uint3."""
    x, y, _ = extents
    return f"{{(unsigned)({number} % {x}), (unsigned)({number} / {x} % {y}), (unsigned)({number} / {x * y})}}"


# --- A converted kernel's call in TensorIR, by which it takes part in a persistent kernel -----------------------------
def call_task(kernel: ConvertedKernel, arguments: Sequence[Expr], task: Expr, thread: Expr, pool: Expr) -> Stmt:
    """rTask ``task`` of ``kernel``: all threads of a block call it, whose numbers are ``thread``.

    ``arguments`` are the kernel's parameters in their order (addresses and numbers), ``pool`` an address of shared
    memory. The call brings the kernel's text.
    """
    if len(arguments) != len(kernel.parameters):
        raise InputError(
            f"{kernel.symbol} has {len(arguments)} arguments",
            f"its parameters are {', '.join(f'{kind} {name}' for kind, name in kernel.parameters)}",
        )
    numbers = (cast_to(task, "int32"), cast_to(thread, "int32"))
    return tirx.Evaluate(tirx.call_intrin("void", CALL, kernel.symbol, *arguments, *numbers, pool, kernel.text))
