"""The last rewrite of a CPU kernel's expressions, all of this folder's in their order."""

from __future__ import annotations

from tvm_ext._tvm import Call, Stmt, nodes_in
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.bfloat16 import explicit
from tvm_ext.ir.float_ir import uses_bfloat16
from tvm_ext.support.limits import limits

from .cut_expressions import cut_nested, name_of
from .deep_bindings import store_deep_bindings
from .exact_floats import keep_floats, pass_nan_on
from .vector_math import FUNCTIONS, by_c_library, expand_math, has_scale, is_called


def on_cpu(body: Stmt, device: DeviceSpec) -> Stmt:
    """A kernel's statements in a form that stock TVM lowers to the values that they mean, functions as arithmetic."""
    exact = pass_nan_on(keep_floats(cut_nested(explicit(body), FUNCTIONS), by_product=True))
    # Functions written as arithmetic bind what they are applied to, which bfloat16 must not be.
    if uses_bfloat16(exact) or call_notes(exact):
        return by_c_library(exact)
    return store_deep_bindings(by_c_library(expand_math(exact, scales_by_instruction=has_scale(device))))


def call_notes(body: Stmt) -> list[str]:
    """For the report: that there are too many functions in ``body`` to write all of them as arithmetic."""
    count = sum(name_of(call) in FUNCTIONS or is_called(call, FUNCTIONS) for call in nodes_in(body, Call))
    most = limits().expanded_functions
    return [f"functions by the C library: {count} of them (limit {most})"] if count > most else []
