"""The arithmetic in a value: what a thread computes, and what a matrix instruction of its wave does for it."""

from __future__ import annotations

from tvm_ext._tvm import Call, Expr, tirx
from tvm_ext.analysis.device_code import called_name
from tvm_ext.ir.matrix_units.mfma import LANE_PRODUCTS, MFMA, WORDS

ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max)
_MFMA_FACTORS = {name: "bfloat16" if held == WORDS else held for held, name in MFMA.items()}


def mfma_factors(call: Call) -> str | None:
    """The type that an instruction of AMD's matrix cores multiplies; None for any other call."""
    return _MFMA_FACTORS.get(called_name(call))


def operations_of(value: Expr) -> int:
    """Arithmetic in a value, without that of indices: ``c[i] + a[i] * b[i]`` is two operations."""
    if isinstance(value, ARITHMETIC):
        return 1 + operations_of(value.a) + operations_of(value.b)
    if isinstance(value, tirx.Cast):
        return operations_of(value.value)
    if isinstance(value, tirx.Select):
        return operations_of(value.true_value) + operations_of(value.false_value)
    if isinstance(value, Call):
        if mfma_factors(value) is not None:
            return 2 * LANE_PRODUCTS
        return sum(operations_of(arg) for arg in value.args)
    return 0
