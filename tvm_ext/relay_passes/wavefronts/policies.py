"""The policies by name, and a schedule made by one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram, RTaskSchedule

from .kernel_choice import MakeDevice
from .list_policy import schedule_list, schedule_several
from .simple_policies import schedule_launches, schedule_round_robin, schedule_shared_queue, schedule_zigzag
from .wavefront_policy import schedule_waves

Policy = Callable[[RTaskGraph, MakeDevice], list[RTaskProgram]]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "list": schedule_list,
        "wavefront": schedule_waves,
        "round-robin": schedule_round_robin,
        "zig-zag": schedule_zigzag,
        "shared-queue": schedule_shared_queue,
        "launches": schedule_launches,
    }
)


def schedule_by_choice(graph: RTaskGraph, one: RTaskGraph, make: MakeDevice) -> tuple[RTaskSchedule, RTaskSchedule]:
    """``graph`` by several kernels for an operator, and ``one``, the same graph by the first of them alone.

    Both by the policy "list", as `schedule` raises. Kernels of ``one`` have the same numbers in ``graph``.
    """
    constructed = schedule(one, make)
    return RTaskSchedule(policy=constructed.policy, programs=tuple(schedule_several(graph, make))), constructed


def schedule(graph: RTaskGraph, make: MakeDevice, policy: str = "list") -> RTaskSchedule:
    """Who runs which rTask of ``graph`` when, as ``policy`` decides.

    Parameters
    ----------
    graph
        Operators with their kernels' times and needs.
    make
        The vEUs for a program of some kernels: ``functools.partial(virtual_device, spec)``.
    policy
        One of `POLICIES`.

    Raises
    ------
    IllegalRewrite
        where an operator has no kernel that fits a unit of the device.
    """
    return RTaskSchedule(policy=policy, programs=tuple(POLICIES[policy](graph, make)))
