"""The policies by name, and a schedule made by one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tvm_ext.cost.schedule_simulator import simulate
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


LEAST_SAVING = 0.02
"""Share of a schedule's time that kernels of less work must save, if all units had it to do, to schedule by them."""


def schedule_by_choice(graph: RTaskGraph, one: RTaskGraph, make: MakeDevice) -> tuple[RTaskSchedule, float]:
    """``graph`` by several kernels for an operator, never slower than ``one``, the same by some of them; its time too.

    Both by the policy "list", as `schedule` raises. Kernels of ``one`` have the same numbers in ``graph``.
    """
    constructed = schedule(one, make)
    constructed_s = simulate(constructed, one).makespan_s
    least_s = [
        sum(min(kernel.work_s for kernel in operator.kernels) for operator in some.operators) for some in (one, graph)
    ]
    saved_s = (least_s[0] - least_s[1]) / constructed.programs[0].device.unit_count
    if saved_s < LEAST_SAVING * constructed_s:
        return constructed, constructed_s
    several = RTaskSchedule(policy=constructed.policy, programs=tuple(schedule_several(graph, make)))
    return several if simulate(several, graph).makespan_s < constructed_s else constructed, constructed_s


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
