"""Roller's `construct`, remembered: networks repeat their operators, and builds repeat their networks."""

from __future__ import annotations

import functools
from dataclasses import replace

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.support.limits import limits

from .construct import Construction, construct


def construct_once(
    expr: TensorExpr, device: DeviceSpec, *, k: int, first_epsilon: float = 0.0, tensor_core: bool = True
) -> Construction:
    """Roller's `construct`, once per process for each expression (whatever it is called), device and options."""
    return _construct_nameless(replace(expr, name=""), device, k, first_epsilon, tensor_core, limits().search_steps)


@functools.lru_cache(maxsize=512)
def _construct_nameless(
    expr: TensorExpr, device: DeviceSpec, k: int, first_epsilon: float, tensor_core: bool, _steps: int
) -> Construction:
    return construct(expr, device, k=k, first_epsilon=first_epsilon, tensor_core=tensor_core)
