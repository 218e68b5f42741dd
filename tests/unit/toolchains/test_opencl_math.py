"""Mathematical functions in OpenCL C's own spelling: the driver compiles them, and they compute what NumPy says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import opencl_cpu
from tvm_ext._tvm import Schedule, te, tirx
from tvm_ext.toolchains.tir_pipelines import FUNCTIONS, enable_opencl_math

OF_TWO = {"atan2": np.arctan2, "copysign": np.copysign, "hypot": np.hypot, "nextafter": np.nextafter}
OF_ONE = {
    "acos": np.arccos, "acosh": lambda x: np.arccosh(x + 1), "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atanh": np.arctanh, "log1p": np.log1p, "tan": np.tan,
}  # fmt: skip

pytestmark = pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=str(opencl_cpu.why_not()))


def element(name: str, x: Any) -> Any:
    function = getattr(tirx, name)
    if name == "ldexp":
        return function(x, tirx.IntImm("int32", 3))
    if name in OF_TWO:
        return function(x, te.const(0.25, "float32") - x)
    return function(x + te.const(1.0, "float32") if name == "acosh" else x)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_computes_what_numpy_says(name: str) -> None:
    values = np.linspace(0.01, 0.95, 16, dtype="float32")
    x = te.placeholder(values.shape, "float32", "x")
    schedule = Schedule(te.create_prim_func([x, te.compute(values.shape, lambda i: element(name, x[i]), "y")]))
    schedule.bind(schedule.get_loops(schedule.get_sblock("y"))[0], "threadIdx.x")
    (actual,) = opencl_cpu.run_opencl(schedule.mod["main"], [values])
    if name == "ldexp":
        expected = np.ldexp(values, 3)
    elif name in OF_TWO:
        expected = OF_TWO[name](values, np.float32(0.25) - values)
    else:
        expected = OF_ONE[name](values)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_enabling_twice_is_enabling_once() -> None:
    enable_opencl_math()
    enable_opencl_math()
