"""Dot-product instructions in TensorIR: vectors of sums, each of which gains a group of products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm_ext._tvm import Expr, tirx
from tvm_ext.devices.dot_instructions import (
    BFDOT,
    BFMMLA,
    USDOT,
    USMMLA,
    VDPBF16PS,
    VPDPBUSD,
    VPMADDWD,
    WIDENED,
    DotInstruction,
)

from .bfloat16 import HIGH_HALF
from .llvm_functions import llvm_call

DotWriter = Callable[[DotInstruction, Expr, Expr, Expr], Expr]
"""(row, sums, data, weights) -> the new sums: vectors of a register, the data's group as a word in every lane."""


def dot(row: DotInstruction, sums: Expr, data: Expr, weights: Expr) -> Expr:
    """``sums`` with the products of one group of ``data`` by those of ``weights`` added.

    ``data`` are ``row.group`` elements, ``weights`` as many for each of the sums' lanes, lane by lane.
    """
    lanes = row.register_bytes * 8 // 32
    word = tirx.Broadcast(tirx.reinterpret("int32", data), lanes)
    return WRITERS[row.name](row, sums, word, weights)


def dot_of_pairs(row: DotInstruction, sums: Expr, data: Sequence[Expr], weights: Expr) -> Expr:
    """``sums`` of two rows by two lanes with the products of two groups of each row of ``data`` added.

    ``weights`` are two groups of the one lane, then of the other.
    """
    words = tirx.Shuffle([tirx.reinterpret("int32x2", own) for own in data], [tirx.const(i, "int32") for i in range(4)])
    return WRITERS[row.name](row, sums, words, weights)


def dot_of_codes(row: DotInstruction, sums: Expr, codes: Expr, data: Expr) -> Expr:
    """`dot` of bytes where the operand of every lane is the unsigned one: ``data`` are a group of signed bytes."""
    word = tirx.Broadcast(tirx.reinterpret("int32", data), row.register_bytes * 8 // 32)
    return WRITERS[row.name](row, sums, codes, tirx.reinterpret(_vector("int8", row), word))


def _vpdpbusd(row: DotInstruction, sums: Expr, data: Expr, weights: Expr) -> Expr:
    name = f"llvm.x86.avx512.vpdpbusd.{row.register_bytes * 8}"
    unsigned = tirx.reinterpret(_vector("uint8", row), data)
    return tirx.call_llvm_pure_intrin(_vector("int32", row), name, sums, unsigned, weights)


def _vpmaddwd(row: DotInstruction, sums: Expr, data: Expr, weights: Expr) -> Expr:
    """Bytes of 16-bit words: the lower by shifting out the upper, then the upper; pairs of either are added up.

    Every product fits 16 bits by 9, every pair 32 bits: nothing saturates.
    """
    name = "llvm.x86.avx512.pmaddw.d.512" if row.register_bytes == 64 else "llvm.x86.avx2.pmadd.wd"
    unsigned, signed = (tirx.reinterpret(_vector(kind, row), x) for kind, x in (("uint16", data), ("int16", weights)))
    low = [tirx.bitwise_and(unsigned, _all("uint16", 255, row)), _shifted(_shifted(signed, row, up=True), row)]
    high = [_shifted(unsigned, row), _shifted(signed, row)]
    for words, factors in (low, high):
        words = tirx.reinterpret(_vector("int16", row), words)
        sums = sums + tirx.call_llvm_pure_intrin(_vector("int32", row), name, words, factors)
    return sums


def _usdot(row: DotInstruction, sums: Expr, data: Expr, weights: Expr) -> Expr:
    unsigned = tirx.reinterpret(_vector("uint8", row), data)
    name = f"llvm.aarch64.neon.{row.name}.v4i32.v16i8"
    return tirx.call_llvm_pure_intrin(_vector("int32", row), name, sums, unsigned, weights)


def _halves_dot(row: DotInstruction, sums: Expr, data: Expr, weights: Expr) -> Expr:
    lanes = row.register_bytes // 4
    words = tirx.reinterpret(_vector("int32", row), weights)
    return llvm_call(f"float32x{lanes}", row.name, lanes, sums, data, words)


def _widened(row: DotInstruction, sums: Expr, data: Expr, weights: Expr) -> Expr:
    """The lower halves of words by each other as float32, then the upper ones."""
    lanes = row.register_bytes // 4
    words = [data, tirx.reinterpret(_vector("int32", row), weights)]
    low = [tirx.shift_left(word, tirx.Broadcast(tirx.const(16, "int32"), lanes)) for word in words]
    high = [tirx.bitwise_and(word, tirx.Broadcast(tirx.const(HIGH_HALF, "int32"), lanes)) for word in words]
    for one, other in (low, high):
        sums = sums + tirx.reinterpret(f"float32x{lanes}", one) * tirx.reinterpret(f"float32x{lanes}", other)
    return sums


def _shifted(words: Expr, row: DotInstruction, *, up: bool = False) -> Expr:
    """Vectors of 16-bit ``words`` moved by a byte, with their sign where they have one."""
    kind = "uint16" if "uint16" in str(words.ty.dtype) else "int16"
    return (tirx.shift_left if up else tirx.shift_right)(words, _all(kind, 8, row))


def _all(kind: str, value: int, row: DotInstruction) -> Expr:
    return tirx.Broadcast(tirx.const(value, kind), row.register_bytes // 2)


def _vector(kind: str, row: DotInstruction) -> str:
    """The type of a register of elements of ``kind``."""
    return f"{kind}x{row.register_bytes * 8 // int(kind.lstrip('uint'))}"


WRITERS: Mapping[str, DotWriter] = {
    VPDPBUSD: _vpdpbusd,
    VPMADDWD: _vpmaddwd,
    USDOT: _usdot,
    USMMLA: _usdot,
    VDPBF16PS: _halves_dot,
    BFDOT: _halves_dot,
    BFMMLA: _halves_dot,
    WIDENED: _widened,
}
