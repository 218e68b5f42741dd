"""Which kernels operators are computed by, and how many vEUs there are for a program of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rtasks import Need, RKernel, RTaskGraph, VDevice

MakeDevice = Callable[[Need], VDevice]
"""The vEUs for rTasks of such a need, `cost.virtual_device.virtual_device` of some device.

Raises `IllegalRewrite` where a unit has no room for one."""

Chosen = tuple[tuple[int, int], ...]
"""Pairs of an operator and of one of its kernels, in the order of a program."""


def _useful_per_unit(graph: RTaskGraph) -> int | None:
    """How many vEUs a unit has a use for: more than the residents of any kernel only slow each other; None: unknown."""
    kernels = [kernel for operator in graph.operators for kernel in operator.kernels]
    return None if any(kernel.alone_s is None for kernel in kernels) else max(kernel.residents for kernel in kernels)


class KernelChoices:
    """The kernels of ``graph``'s operators, and the devices of ``make`` that hold some of them.

    ``fastest_alone``: as if each operator had its fastest kernel alone. ``most_per_unit``: of a unit's vEUs.
    """

    def __init__(
        self, graph: RTaskGraph, make: MakeDevice, *, fastest_alone: bool = False, most_per_unit: int | None = None
    ) -> None:
        self._most_per_unit = most_per_unit or _useful_per_unit(graph)
        self._graph, self._make, self._fastest_alone = graph, make, fastest_alone
        self._devices: dict[Need, VDevice | IllegalRewrite] = {}
        self._fastest: dict[int, int] = {}
        self._efficient: dict[int, int] = {}

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
            device = self._make(need)
            most = self._most_per_unit or device.veus_per_unit
            return replace(device, veus_per_unit=min(device.veus_per_unit, most))
        except IllegalRewrite as refusal:
            return refusal

    def fastest(self, operator: int) -> int:
        """The kernel of the smallest run time (paper §3.3), alone on the device."""
        if operator not in self._fastest:
            self._fastest[operator] = self._least(operator, self.alone_s)
        return self._fastest[operator]

    def most_efficient(self, operator: int) -> int:
        """The kernel with the smallest product of time and rTasks: least work."""
        if self._fastest_alone:
            return self.fastest(operator)
        if operator not in self._efficient:
            self._efficient[operator] = self._least(operator, lambda item, index: self.kernel(item, index).work_s)
        return self._efficient[operator]

    def by_room(self) -> list[KernelChoices]:
        """These choices, and where a unit has room for more than one vEU, the same with one.

        An rTask is taken to have no more of its unit than its share; where there are few, it should have all.
        """
        operators = range(len(self._graph.operators))
        if all(
            self.device(self.kernel(operator, self.fastest(operator)).need).veus_per_unit == 1 for operator in operators
        ):
            return [self]
        return [self, KernelChoices(self._graph, self._make, fastest_alone=self._fastest_alone, most_per_unit=1)]

    @property
    def has_several(self) -> bool:
        """Whether for any operator the fastest kernel is not the most efficient."""
        return any(self.fastest(item) != self.most_efficient(item) for item in range(len(self._graph.operators)))

    def alone_s(self, operator: int, index: int) -> float:
        """The time of an operator that has the device for itself: rounds of rTasks, on as many units as there are."""
        kernel = self.kernel(operator, index)
        device = self.device(kernel.need)
        beside = min(device.veus_per_unit, -(-kernel.task_count // device.unit_count))
        return -(-kernel.task_count // (beside * device.unit_count)) * kernel.task_s_beside(beside)

    def _least(self, operator: int, cost: Callable[[int, int], float]) -> int:
        kernels = self._graph.operators[operator].kernels
        fitting = [index for index, kernel in enumerate(kernels) if self.fits(kernel.need)]
        if not fitting:
            self.device(kernels[0].need)  # raises, with the reason
        return min(fitting, key=lambda index: cost(operator, index))
