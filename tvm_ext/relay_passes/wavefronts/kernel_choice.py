"""Which kernels operators are computed by, and how many vEUs there are for a program of them."""

from __future__ import annotations

from collections.abc import Callable

from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rtasks import Need, RKernel, RTaskGraph, VDevice

MakeDevice = Callable[[Need], VDevice]
"""The vEUs for rTasks of such a need, `cost.virtual_device.virtual_device` of some device.

Raises `IllegalRewrite` where a unit has no room for one."""

Chosen = tuple[tuple[int, int], ...]
"""Pairs of an operator and of one of its kernels, in the order of a program."""


class KernelChoices:
    """The kernels of ``graph``'s operators, and the devices of ``make`` that hold some of them."""

    def __init__(self, graph: RTaskGraph, make: MakeDevice) -> None:
        self._graph, self._make = graph, make
        self._devices: dict[Need, VDevice | IllegalRewrite] = {}

    def kernel(self, operator: int, index: int) -> RKernel:
        return self._graph.operators[operator].kernels[index]

    def device(self, need: Need) -> VDevice:
        """The vEUs for rTasks of ``need``; raises IllegalRewrite where a unit has no room for one."""
        if need not in self._devices:
            self._devices[need] = self._made(need)
        device = self._devices[need]
        if isinstance(device, IllegalRewrite):
            raise device
        return device

    def fits(self, need: Need) -> bool:
        """Whether there is a `device` for ``need``."""
        try:
            self.device(need)
        except IllegalRewrite:
            return False
        return True

    def _made(self, need: Need) -> VDevice | IllegalRewrite:
        try:
            return self._make(need)
        except IllegalRewrite as refusal:
            return refusal

    def fastest(self, operator: int) -> int:
        """The kernel of the smallest run time (paper §3.3), alone on the device."""
        return self._least(operator, self.alone_s)

    def most_efficient(self, operator: int) -> int:
        """The kernel with the smallest product of time and rTasks: least work."""
        return self._least(operator, lambda item, index: self.kernel(item, index).work_s)

    def alone_s(self, operator: int, index: int) -> float:
        """The time of an operator that has the device for itself: rounds of rTasks."""
        kernel = self.kernel(operator, index)
        device = self.device(kernel.need)
        return -(-kernel.task_count // device.veu_count) * kernel.task_s_beside(device.veus_per_unit)

    def _least(self, operator: int, cost: Callable[[int, int], float]) -> int:
        kernels = self._graph.operators[operator].kernels
        fitting = [index for index, kernel in enumerate(kernels) if self.fits(kernel.need)]
        if not fitting:
            self.device(kernels[0].need)  # raises, with the reason
        return min(fitting, key=lambda index: cost(operator, index))
