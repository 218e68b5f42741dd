"""Mathematical functions that stock TVM spells as C does when it writes OpenCL C: ``tanf`` where that is ``tan``."""

from __future__ import annotations

from functools import cache

from tvm_ext._tvm import Call, Expr, call_pure_extern, register_intrin_lowering

FUNCTIONS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "hypot", "ldexp", "log1p", "nextafter",
    "tan",
)  # fmt: skip
"""Those for which TVM 0.27 has no rule of OpenCL's own, so that its rule for C applies. All take half, float and
double there, and vectors of them (OpenCL 1.2, section 6.12.2)."""

_LEVEL = 99  # wins over the default rules of C++, which have level 10


@cache
def enable_opencl_math() -> None:
    """Make TVM write `FUNCTIONS` in OpenCL's spelling, from now on; once per process."""
    for name in FUNCTIONS:
        register_intrin_lowering(f"tirx.{name}", "opencl", _as_opencl, _LEVEL)


def _as_opencl(call: Call) -> Expr:
    return call_pure_extern(call.ty, str(call.op.name).removeprefix("tirx."), *call.args)
