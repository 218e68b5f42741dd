"""For whom kernels are made: an operator and its constants, the device, the options of the build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from tvm_ext._tvm import Buffer, PrimFunc
from tvm_ext.analysis.computations import OperatorBody, read_operator
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CONSTANT_PARAMS
from tvm_ext.records.serialise import record_of

from .plan_gpu_kernels import simplify_for_gpu
from .plan_kernels import simplify

Attribute = TypeVar("Attribute")


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelContext:
    """An operator and what its kernels depend on beside it; ``constants`` are parameters known to the build."""

    operator: OperatorBody
    constants: Sequence[Buffer]
    device: DeviceSpec
    options: BuildOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class UnscheduledOperator:
    """A function that wants kernels for ``device``; it is read when somebody asks what it computes."""

    func: PrimFunc
    name: str
    device: DeviceSpec
    options: BuildOptions

    @cached_property
    def as_read(self) -> KernelContext:
        """Nothing simplified; raises IllegalRewrite for what cannot be read."""
        operator = read_operator(self.func, self.name)
        attrs = self.func.attrs
        marked = attrs[CONSTANT_PARAMS] if attrs and CONSTANT_PARAMS in attrs else []
        constants = [operator.params[int(i)] for i in marked]
        return KernelContext(operator=operator, constants=constants, device=self.device, options=self.options)

    @cached_property
    def simplified(self) -> KernelContext:
        """As kernels over whole tensors compute it on the device; raises IllegalRewrite as `as_read` does."""
        simplified = simplify if self.device.kind == "cpu" else simplify_for_gpu
        return replace(self.as_read, operator=simplified(self.as_read.operator))

    def parameters_only(self, outputs: int = 1) -> KernelContext:
        """Of a function whose attribute says what it computes: its body is not read. ``outputs`` are results."""
        params = tuple(self.func.params)
        body = OperatorBody(name=self.name, params=params, outputs=params[-outputs:], computations=())
        return KernelContext(operator=body, constants=(), device=self.device, options=self.options)

    def has(self, name: str) -> bool:
        """Whether a graph pass marked the function with the attribute ``name``."""
        return bool(self.func.attrs) and name in self.func.attrs

    def attribute(self, name: str, record: type[Attribute]) -> Attribute | None:
        """What a graph pass wrote into the function's attribute ``name``; None where it wrote nothing."""
        return record_of(self.func, name, record)
