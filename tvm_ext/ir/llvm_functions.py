"""Small functions in LLVM IR that kernels for CPUs call by name: what stock TVM's code generation cannot say itself.

`with_texts` puts the text of those that a kernel calls into it, when it is constructed, so that any pipeline may lower
it; LLVM inlines them. What is rounded is vectors only behind stock TVM's pipeline (`bfloat16.link_functions`).
"""

from __future__ import annotations

import re

from tvm_ext._tvm import Expr, Stmt, StringImm, Var, call_pure_extern, ir, nodes_in, tirx
from tvm_ext.devices.dot_instructions import BFDOT, BFMMLA, VDPBF16PS

PREFIX = "tvm_ext_llvm_"


def llvm_call(result: str | ir.Type, kind: str, lanes: int, *arguments: Expr) -> Expr:
    """A call of the function ``kind`` of `_TEXTS` on vectors of ``lanes``, which returns ``result``."""
    return call_pure_extern(result, f"{PREFIX}{kind}_{lanes}", *arguments)


def keep_rolled() -> Stmt:
    """A statement that does nothing, but that LLVM leaves the loop around it as it is.

    Where a loop reads a long row of vectors from L2, unrolling moves each load by more than a processor's prefetcher
    follows. Measured on Zen 5, 512 bytes an iteration: 210 GB/s, twice unrolled 190, four times 135.
    """
    return tirx.Evaluate(tirx.call_extern("int32", f"{PREFIX}rolled_1"))


def failed(arguments: Var) -> Expr:
    """A call that returns from a lowered function with the error that was raised; ``arguments`` are the function's own.

    Stock TVM has no statement for it, but returns so from a call that fails.
    """
    name, none = StringImm(f"{PREFIX}failed_1"), tirx.const(0, "int32")
    return tirx.call_intrin("int32", "tirx.tvm_call_cpacked_lowered", name, arguments, none, none)


def with_texts(body: Stmt) -> Stmt:
    """``body`` with the text of the functions that it calls; itself where it calls none, or has it."""
    strings = {str(text.value) for text in nodes_in(body, StringImm)}
    names = [name for name in sorted(strings) if name.startswith(PREFIX)]
    texts = [text for text in map(_text, names) if not any(text in held for held in strings)]
    if not texts:
        return body
    return tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", StringImm("\n".join(texts)), body)


def _text(name: str) -> str:
    """The function called ``name``, of as many lanes as its end says."""
    kind, lanes = re.fullmatch(rf"{PREFIX}(\w+)_(\d+)", name).groups()  # type: ignore[union-attr]
    vectors = {f"<{element}>": f"<{lanes} x {element}>" if lanes != "1" else element for element in _ELEMENTS}
    text = _TEXTS[kind].replace("@NAME", f"@{name}").replace("PAIRS", f"<{2 * int(lanes)} x bfloat>")
    text = text.replace("BITS", str(32 * int(lanes)))
    splat = (lambda number: f"splat (i32 {number})") if lanes != "1" else str
    text = re.sub(r"#(\d+)", lambda found: splat(found.group(1)), text)
    for short, whole in vectors.items():
        text = text.replace(short, whole)
    return text


_ELEMENTS = ("float", "bfloat", "i1", "i16", "i32")
_DOT = """
declare <float> @INTRINSIC(<float>, PAIRS, PAIRS)
define <float> @NAME(<float> %sums, <i32> %data, <i32> %weights) alwaysinline {
  %a = bitcast <i32> %data to PAIRS
  %b = bitcast <i32> %weights to PAIRS
  %result = call <float> @INTRINSIC(<float> %sums, PAIRS %a, PAIRS %b)
  ret <float> %result
}"""
_TEXTS = {
    # What LLVM does not know to be free keeps it from unrolling the loop around it.
    "rolled": """
define i32 @NAME() alwaysinline {
  call void asm sideeffect "", ""()
  ret i32 0
}""",
    "failed": """
define i32 @NAME(ptr %self, ptr %arguments, i32 %count, ptr %result) alwaysinline {
  ret i32 -1
}""",
    # The register that says how floats are computed becomes (itself & kept) | set; the value is what it was before.
    "float_mode_x86": """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define i32 @NAME(i32 %kept, i32 %set) alwaysinline {
  %place = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %place)
  %before = load i32, ptr %place
  %part = and i32 %before, %kept
  %after = or i32 %part, %set
  store i32 %after, ptr %place
  call void asm sideeffect "", "~{memory}"()
  call void @llvm.x86.sse.ldmxcsr(ptr %place)
  call void asm sideeffect "", "~{memory}"()
  ret i32 %before
}""",
    "float_mode_arm": """
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)
define i32 @NAME(i32 %kept, i32 %set) alwaysinline {
  %whole = call i64 @llvm.aarch64.get.fpcr()
  %before = trunc i64 %whole to i32
  %part = and i32 %before, %kept
  %after = or i32 %part, %set
  %wide = zext i32 %after to i64
  call void asm sideeffect "", "~{memory}"()
  call void @llvm.aarch64.set.fpcr(i64 %wide)
  call void asm sideeffect "", "~{memory}"()
  ret i32 %before
}""",
    VDPBF16PS: _DOT.replace("INTRINSIC", "llvm.x86.avx512bf16.dpbf16ps.BITS"),
    BFDOT: _DOT.replace("INTRINSIC", "llvm.aarch64.neon.bfdot.v4f32.v8bf16"),
    BFMMLA: _DOT.replace("INTRINSIC", "llvm.aarch64.neon.bfmmla"),
    "round": """
define <i16> @NAME(<float> %x) alwaysinline {
  %rounded = fptrunc <float> %x to <bfloat>
  %result = bitcast <bfloat> %rounded to <i16>
  ret <i16> %result
}""",
    # Halfway is 0x8000 of the lower half: adding 0x7fff and the upper half's last bit carries beyond it, or to even.
    "add_and_shift": """
define <i16> @NAME(<float> %x) alwaysinline {
  %bits = bitcast <float> %x to <i32>
  %upper = lshr <i32> %bits, #16
  %last = and <i32> %upper, #1
  %half = add <i32> %last, #32767
  %carried = add <i32> %bits, %half
  %rounded = lshr <i32> %carried, #16
  %quiet = or <i32> %upper, #64
  %is_nan = fcmp uno <float> %x, %x
  %kept = select <i1> %is_nan, <i32> %quiet, <i32> %rounded
  %result = trunc <i32> %kept to <i16>
  ret <i16> %result
}""",
}
"""By the first part of a name: ``<float>`` is a vector of its lanes, PAIRS one of two bfloat16 each, #1 all ones."""
