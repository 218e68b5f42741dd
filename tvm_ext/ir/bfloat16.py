"""bfloat16 in kernels for CPUs: how tensors, values and instructions of it exist. The one place that decides it.

* *Tensors* are ``bfloat16`` in Relax, in computations and in the signatures of kernels, so that callers are checked
  by type. Before stock TVM's pipeline all buffers become ``uint16`` (`in_bits`), parameters by views: its
  BF16ComputeLegalize would make float32 of what a kernel allocates, BF16StorageLegalize fails on a vector of copies.
* *Values* are never computed in bfloat16. What is read becomes float32 by a shift (`widened`), what is stored is
  rounded by the intrinsic `ROUND`, to ``uint16``. Both are behind ``reinterpret``, which BF16ComputeLegalize leaves
  alone. That pass would do the same, but turns NaN into infinity or 0, and does not see what a Let binds.
* *Instructions* read words of two elements, ``int32``: see `dot_ir`. LLVM's intrinsics have operands of bfloat16, which
  BF16ComputeLegalize would turn into float32. So a kernel calls small functions in LLVM IR, on words, by name.
  Their text is in the kernel from its construction on (`llvm_functions.py`); `link_functions`, behind stock TVM's
  pipeline, adds that of `ROUND`. LLVM inlines them: vdpbf16ps with an operand from memory is left of a call.

A further instruction needs a row in `devices/dot_instructions.py`, and where LLVM has operands of bfloat16,
a text in `llvm_functions.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from tvm_ext._tvm import (
    IF_THEN_ELSE,
    AllocBuffer,
    Buffer,
    BufferStore,
    Call,
    Expr,
    Node,
    PrimFunc,
    SBlock,
    Stmt,
    Target,
    TensorLoad,
    ir,
    new_vector_op,
    nodes_in,
    structural_map,
    target_has_feature,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of

from .llvm_functions import llvm_call, with_texts

BFLOAT16 = "bfloat16"
ROUND = new_vector_op("tirx.tvm_ext_round_to_bfloat16")
"""float32 to the bits of the nearest bfloat16, halves to even; NaN stays NaN. With the processor's instruction numbers
below 2**-126 are 0."""

HIGH_HALF = -(1 << 16)
"""As int32: the bits of a word's upper element."""

_ADDRESS_OF, _REINTERPRET = ir.Op.get("tirx.address_of"), ir.Op.get("tirx.reinterpret")
_BUFFER_DATA = ir.Op.get("tirx.buffer_data")
_CONVERSION = ("avx512bf16", "avx512vl")


# --- values ---------------------------------------------------------------------------------------------------------
def explicit(node: Node) -> Node:
    """``node``, a statement or an expression, with its conversions from and to bfloat16 written out."""
    return structural_map(node, (tirx.Cast, _converted))


def in_bits(func: PrimFunc) -> PrimFunc:
    """``func`` with its conversions written out, and all of its buffers of bfloat16 read and written as ``uint16``.

    What stock TVM has scheduled names its buffers in blocks, too, and only gets the conversions.
    """
    body = explicit(func.body)
    if nodes_in(body, SBlock):
        return func.with_body(body)
    # By address, which is not followed.
    named = [buffer for call in nodes_in(body, Call) if call.op == _BUFFER_DATA for buffer in call.args[:1]]
    allocated = [statement.buffer for statement in nodes_in(body, AllocBuffer)]
    params = [param for param in func.params if _is_halves(param)]
    own = {buffer: _words_of(buffer) for buffer in (*params, *allocated) if _is_halves(buffer) and buffer not in named}
    body = structural_map(body, _rules_for_bits(own))
    views = [tirx.DeclBuffer(own[param], data=param.data) for param in params if param in own]
    return func.with_body(tirx.stmt_seq(*views, body))


def _is_halves(buffer: Buffer) -> bool:
    return hasattr(buffer.ty, "shape") and dtype_of(buffer) == BFLOAT16


def _words_of(buffer: Buffer) -> Buffer:
    kind = buffer.ty
    return tirx.decl_buffer(
        kind.shape,
        "uint16",
        buffer.name,
        scope=buffer.scope(),
        data_alignment=kind.data_alignment,
        strides=kind.strides,
    )


def _rules_for_bits(own: Mapping[Buffer, Buffer]) -> list[tuple[type[Node], Callable[[Any], Node]]]:
    """Rewrites of all that names a buffer among ``own`` to the one of uint16 in its place."""

    def read(load: TensorLoad) -> Expr:
        if load.source not in own:
            return load
        return tirx.reinterpret(dtype_of(load), tirx.BufferLoad(own[load.source], list(load.indices)))

    def written(store: BufferStore) -> Stmt:
        if not dtype_of(store.value).startswith(BFLOAT16):
            return store
        buffer, bits = own.get(store.buffer), _bits(store.value)
        if buffer is None:
            return store
        if bits is None:  # arithmetic of stock TVM's, in float32
            bits = Call(ROUND, [tirx.Cast("float32", store.value)], ret_ty=ir.PrimType("uint16"))
        return BufferStore(buffer, bits, list(store.indices))

    def addressed(call: Call) -> Expr:
        """An address is that of the load itself."""
        inner = call.args[0] if call.op == _ADDRESS_OF else None
        return tirx.address_of(inner.args[0]) if isinstance(inner, Call) else call

    def allocated(statement: AllocBuffer) -> Stmt:
        buffer = own.get(statement.buffer)
        return statement if buffer is None else AllocBuffer(buffer, statement.annotations)

    return [(TensorLoad, read), (BufferStore, written), (Call, addressed), (AllocBuffer, allocated)]


def _bits(value: Expr) -> Expr | None:
    """The bits of a scalar that is loaded, rounded, constant, or chosen among such; None of what is computed."""
    if isinstance(value, tirx.FloatImm) and math.isfinite(value.value):
        (bits,) = struct.unpack("<I", struct.pack("<f", value.value))
        return tirx.const(bits >> 16, "uint16") if bits % (1 << 16) == 0 else None
    if isinstance(value, TensorLoad):
        return tirx.reinterpret("uint16", value)
    if isinstance(value, Call) and value.op == _REINTERPRET and dtype_of(value.args[0]) == "uint16":
        return value.args[0]
    if isinstance(value, tirx.Select):
        own, other = _bits(value.true_value), _bits(value.false_value)
        return None if own is None or other is None else tirx.Select(value.condition, own, other)
    if isinstance(value, Call) and value.op == IF_THEN_ELSE:
        own, other = _bits(value.args[1]), _bits(value.args[2])
        return None if own is None or other is None else tirx.if_then_else(value.args[0], own, other)
    return None


def _converted(cast: Expr) -> Expr:
    own, value = dtype_of(cast), cast.value
    if own == BFLOAT16 and dtype_of(value) != BFLOAT16:
        wide = value if dtype_of(value) == "float32" else tirx.Cast("float32", value)
        return tirx.reinterpret(BFLOAT16, Call(ROUND, [wide], ret_ty=ir.PrimType("uint16")))
    if dtype_of(value) != BFLOAT16:
        return cast
    # A rounded value, too: stock TVM would convert the bits behind ``reinterpret`` as an integer.
    bits = _bits(value)
    wide = None if bits is None else _widened(bits)
    return cast if wide is None else wide if own == "float32" else tirx.Cast(own, wide)


def widened(load: TensorLoad) -> Expr:
    """A loaded element as float32."""
    return _widened(tirx.reinterpret("uint16", load))


def _widened(bits: Expr) -> Expr:
    return tirx.reinterpret("float32", tirx.shift_left(tirx.Cast("uint32", bits), tirx.const(16, "uint32")))


def word(low: Expr, high: Expr) -> Expr:
    """Two numbers of float32, rounded, as an ``int32`` of two bfloat16: what instructions read."""
    lower, upper = (tirx.Cast("uint32", Call(ROUND, [value], ret_ty=ir.PrimType("uint16"))) for value in (low, high))
    return tirx.reinterpret("int32", tirx.bitwise_or(lower, tirx.shift_left(upper, tirx.const(16, "uint32"))))


# --- functions in LLVM IR -------------------------------------------------------------------------------------------
def link_functions(func: PrimFunc, target: Target) -> PrimFunc:
    """``func``, lowered for ``target``, with `ROUND` as a function and the text of the functions that it calls."""
    name = "round" if all(bool(target_has_feature(feature, target)) for feature in _CONVERSION) else "add_and_shift"

    def called(call: Call) -> Expr:
        if call.op != ROUND:
            return call
        lanes = int(call.ty.dtype.lanes) if hasattr(call.ty.dtype, "lanes") else 1
        return llvm_call(call.ty, name, lanes, *call.args)

    return func.with_body(with_texts(structural_map(func.body, (Call, called))))
