"""Look-ups in tables of 256 bytes by permutations of registers, where a CPU permutes 32 numbers of two registers.

The table is 64 words in four registers. A code's upper six bits say which word, vpermi2d takes it, and the lower two
say which byte of it: eight operations for 16 look-ups (AVX-512F), where loads one by one are three for each.
"""

from __future__ import annotations

from tvm_ext._tvm import (
    Expr,
    IRModule,
    PassContext,
    PrimFunc,
    TensorLoad,
    Var,
    prim_func_pass,
    structural_map,
    target_has_feature,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import load

LANES = 16
"""Words of a register of AVX-512, as vpermi2d takes them."""

PERMUTES = "avx512f"
_WORDS = f"int32x{LANES}"
_NAME = "llvm.x86.avx512.vpermi2var.d.512"


@prim_func_pass(opt_level=0, name="tvm_ext.PermuteTables")
class PermuteTables:
    """Behind stock TVM's pipeline: rewrite loads of 16 elements of 256 bytes by as many codes, where a CPU permutes."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        target = func.attrs.get("target") if func.attrs else None
        if target is None or str(target.kind.name) != "llvm" or not target_has_feature(PERMUTES, target):
            return func
        return func.with_body(structural_map(func.body, (TensorLoad, _permuted)))


def _permuted(item: TensorLoad) -> Expr:
    """``item``, or its value by permutations: an element of a table of bytes for each lane."""
    place, *others = item.indices
    if others or not isinstance(place, tirx.Cast) or dtype_of(place.value) not in (f"uint8x{LANES}", _WORDS):
        return item
    shape, kind = [getattr(size, "value", None) for size in item.source.ty.shape], str(item.source.ty.dtype)
    if kind not in ("uint8", "int8") or shape != [256]:
        return item
    one = tirx.const(1, "int32")
    lines = [tirx.Ramp(tirx.const(first, "int32"), one, 64) for first in range(0, 256, 64)]
    words = [tirx.reinterpret(_WORDS, load(item.source, [line])) for line in lines]
    code, word = Var("code", words[0].ty), Var("word", words[0].ty)
    halves = [tirx.call_llvm_pure_intrin(_WORDS, _NAME, words[i], word, words[i + 1]) for i in (0, 2)]
    found = tirx.Select(code < _all(128), *halves)
    byte = tirx.Cast(f"{kind}x{LANES}", tirx.shift_right(found, tirx.bitwise_and(code, _all(3)) * _all(8)))
    return tirx.Let(code, tirx.Cast(_WORDS, place.value), tirx.Let(word, tirx.shift_right(code, _all(2)), byte))


def _all(value: int) -> Expr:
    return tirx.Broadcast(tirx.const(value, "int32"), LANES)
