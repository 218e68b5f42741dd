"""What a chain's outputs should be: by ONNX Runtime, or where it lacks a type by the ONNX package's own evaluator."""

from __future__ import annotations

import numpy as np

from ..onnx_evaluator import by_evaluator, by_onnx_runtime
from ..onnx_runtime import states
from ..random_operators.record import Array
from .onnx_model import HALVES, onnx_model
from .record import ChainCase

LACKING = (states.NotImplemented, states.InvalidGraph, states.Fail, states.RuntimeException)
"""What ONNX Runtime raises for an operator that it has not for a type, the last one when it runs."""

TOLERANCE = {"bfloat16": 6e-2, "float16": 3e-2, "float32": 1e-4, "float64": 1e-9}
"""Of what is not exact, times the largest magnitude of the output: an element read from elsewhere errs by about 1.

Half precision is compared with float32, which does not round between the nodes of a chain.
"""


def expected_outputs(case: ChainCase) -> list[Array]:
    """The outputs for the first draw of inputs, 16-bit floats computed in float32."""
    model = onnx_model(case, widen_half=True).SerializeToString()
    given = {name: _wide(value) for name, value in case.data(0).items()}
    inputs = {item.name: given[item.name] for item in case.variables}
    try:
        return by_onnx_runtime(model, inputs)
    except LACKING:
        return by_evaluator(model, inputs)


def _wide(value: Array) -> Array:
    return value.astype(np.float32) if str(value.dtype) in HALVES else value


def difference(actual: Array, wanted: Array, *, dtype: str, exact: bool, coarsest: str, finite: bool = True) -> str:
    """What is wrong with ``actual``, the other arguments as in `ChainOutput`; empty where nothing is."""
    if (actual.shape, str(actual.dtype)) != (wanted.shape, dtype):
        return f"is {actual.dtype}{list(actual.shape)} instead of {dtype}{list(wanted.shape)}"
    wide, reference = actual.astype(np.float64), wanted.astype(np.float64)
    numbers = np.isfinite(reference)
    assert numbers.all() or not finite, "the reference is not finite"
    largest = float(np.abs(reference).max(where=numbers, initial=1.0))
    allowed = 0.0 if exact or coarsest not in TOLERANCE else TOLERANCE[coarsest] * largest
    with np.errstate(invalid="ignore"):
        alike = np.where(numbers, np.abs(wide - reference) <= allowed, wide == reference)
    unlike = ~(alike | (np.isnan(wide) & np.isnan(reference)))
    if not unlike.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(unlike)[0])
    return (
        f"{dtype}{list(wanted.shape)}: {int(unlike.sum())} of {wanted.size} elements are off by more than "
        f"{allowed:.1e}; first at {list(first)}: {wide[first]:g} instead of {reference[first]:g}"
    )
