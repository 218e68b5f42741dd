"""Number types as GPU code stores and converts them, over NumPy arrays.

``float16``, ``bfloat16`` and the 8-bit floats are stored in their own NumPy types (ml_dtypes), so that a store rounds.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tvm_ext.errors import InputError
from tvm_ext.support.arrays import Array, DType

_EXTENDED: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
_PLAIN = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
)  # fmt: skip

PTX_DTYPES = {
    "fp16": "float16", "bf16": "bfloat16", "tf32": "float32", "fp32": "float32", "fp64": "float64",
    "int8": "int8", "uint8": "uint8", "int32": "int32", "s8": "int8", "u8": "uint8", "s32": "int32",
    "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
    "float16": "float16", "bfloat16": "bfloat16", "float32": "float32",
    "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
}  # fmt: skip
"""The types of a ``ptx_legacy.mma`` call, by the names that it may use, as TVM dtypes."""


def storage_dtype(name: str) -> DType:
    """The NumPy dtype of TVM's scalar dtype ``name``.

    Raises InputError for a type that no kernel here can hold, such as ``"int4"`` or ``"handle"``.
    """
    if name in _EXTENDED or name in _PLAIN:
        dtype: DType = np.dtype(_EXTENDED.get(name, name))
        return dtype
    raise InputError(
        f"the SIMT interpreter cannot hold elements of type {name}", f"use one of {', '.join((*_PLAIN, *_EXTENDED))}"
    )


def is_float(dtype: DType) -> bool:
    """Whether ``dtype`` is a floating-point type, those of ml_dtypes among them."""
    return dtype.kind == "f" or dtype in map(np.dtype, _EXTENDED.values())


def to_dtype(values: npt.ArrayLike, name: str) -> Array:
    """``values`` converted as a CUDA cast does, to dtype ``name``; same shape.

    To floats: one rounding to nearest, ties to even. Float to int: towards zero, saturating at 32 bits (PTX ISA "cvt",
    ``.rzi``), NaN to 0; narrower integers take the low bits of that. Int to int: the low bits. To bool: not zero.
    Worked example: 3e9 to int32 is 2147483647, 300.7 to int8 is 44, 2049 to float16 is 2048.
    """
    source, target = np.asarray(values), storage_dtype(name)
    if source.dtype == target:
        return source
    if target.kind == "b":
        return np.asarray((source.astype(np.float64) if is_float(source.dtype) else source) != 0)
    if is_float(target):
        return _to_float(source, target)
    return _float_to_int(source.astype(np.float64), target) if is_float(source.dtype) else source.astype(target)


def _float_to_int(values: Array, target: DType) -> Array:
    wide = target if target.itemsize >= 4 else np.dtype(np.int32)
    limits = np.iinfo(wide)
    whole = np.trunc(np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf))
    # float64 has no 2**63 - 1: what reaches 2**63 is set by hand
    inside = np.where((whole >= float(limits.min)) & (whole < float(limits.max) + 1.0), whole, 0.0).astype(wide)
    return np.where(
        whole >= float(limits.max) + 1.0, limits.max, np.where(whole < float(limits.min), limits.min, inside)
    ).astype(target)


def _to_float(values: Array, target: DType) -> Array:
    """One rounding: NumPy's own int -> half and ml_dtypes' double -> bfloat16 round twice, through float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        if target.itemsize >= 4:
            return values.astype(target)
        wide = values.astype(np.float64)
        if target == np.float16:
            return wide.astype(target)
        return _odd_float32(wide).astype(target)


def _odd_float32(values: Array) -> Array:
    """float64 to float32 rounded to odd, so that rounding once more to a much shorter type is as good as rounding once.

    Round to odd: an inexact value becomes whichever neighbour has a last bit of 1, so it can never look like a tie.
    Worked example: 1 + 2**-8 + 2**-40 is above the bfloat16 tie 1 + 2**-8 and must become 1 + 2**-7. The nearest
    float32 is the tie itself, which goes to 1; the odd one is 1 + 2**-8 + 2**-23, which goes to 1 + 2**-7.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        near = values.astype(np.float32)
        back = near.astype(np.float64)
        towards = np.where(back < values, np.inf, -np.inf).astype(np.float32)
        inexact = np.isfinite(values) & np.isfinite(back) & (back != values)
        even = (near.view(np.uint32) & 1) == 0
    return np.where(inexact & even, np.nextafter(near, towards), near)
