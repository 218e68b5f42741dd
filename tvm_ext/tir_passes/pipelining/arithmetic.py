"""The arithmetic in a value: what a thread computes, and what a matrix instruction of its wave does for it."""

from __future__ import annotations

from tvm_ext._tvm import Call, Expr, tirx
from tvm_ext.analysis.device_code import called_name
from tvm_ext.ir.matrix_units.mfma import INSTRUCTIONS, WORDS

ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max)
_MFMA = {instruction.name: instruction for instruction in INSTRUCTIONS}


def mfma_factors(call: Call) -> str | None:
    """The type that an instruction of AMD's matrix cores multiplies; None for any other call."""
    found = _MFMA.get(called_name(call))
    return None if found is None else "bfloat16" if found.dtype == WORDS else found.dtype


def operations_of(value: Expr) -> int:
    """Arithmetic in a value, without that of indices: ``c[i] + a[i] * b[i]`` is two operations."""
    if isinstance(value, ARITHMETIC):
        return 1 + operations_of(value.a) + operations_of(value.b)
    if isinstance(value, tirx.Cast):
        return operations_of(value.value)
    if isinstance(value, tirx.Select):
        return operations_of(value.true_value) + operations_of(value.false_value)
    if isinstance(value, Call):
        if (found := _MFMA.get(called_name(value))) is not None:
            return 2 * found.lane_products
        return sum(operations_of(arg) for arg in value.args)
    return 0
