"""The policies by name, and a schedule made by one of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tvm_ext.cost.schedule_simulator import simulate
from tvm_ext.errors import OptionError
from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram, RTaskSchedule

from .kernel_choice import MakeDevice
from .list_policy import schedule_list
from .schedule_check import check_schedule
from .segment_policy import schedule_segments, schedule_several
from .simple_policies import schedule_launches
from .wavefront_policy import schedule_waves

Policy = Callable[[RTaskGraph, MakeDevice], list[RTaskProgram]]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"list": schedule_list, "segments": schedule_segments, "wavefront": schedule_waves, "launches": schedule_launches}
)
"""Those of this package."""

STANDARD_POLICY = "segments"

_REGISTERED: dict[str, Policy] = {}


def register_policy(name: str, policy: Policy) -> None:
    """Make ``policy`` known as ``name`` in this process, or replace what was registered so (paper §3.3, Figure 9).

    It is given a graph of operators, each with its kernels' times and needs, and what makes the vEUs for a program of
    some kernels; it returns programs that run one after another (`program_plan.ProgramPlan` makes one by appending
    shares). What it returns is checked: every rTask once, none before the operators that it needs.
    Raises OptionError for the name of a policy of this package.
    """
    if name in POLICIES:
        raise OptionError(f"{name!r} is a scheduling policy of tvm_ext.", "give yours another name")
    _REGISTERED[name] = policy


def require_policy(name: str) -> None:
    """Raises OptionError, with the nearest names, unless ``name`` is a policy of ours or was registered."""
    known = (*POLICIES, *_REGISTERED)
    if name not in known:
        nearest = difflib.get_close_matches(str(name), known, n=2)
        hint = f"did you mean {' or '.join(map(repr, nearest))}? " if nearest else ""
        raise OptionError(f"there is no scheduling policy {name!r}.", f"{hint}There are {', '.join(known)}")


LEAST_SAVING = 0.02
"""Share of a schedule's time that kernels of less work must save, if all units had it to do, to schedule by them."""


def schedule_by_choice(graph: RTaskGraph, one: RTaskGraph, make: MakeDevice) -> tuple[RTaskSchedule, float]:
    """``graph`` by several kernels for an operator, never slower than ``one``, the same by some of them; its time too.

    Both by the standard policy, as `schedule` raises. Kernels of ``one`` have the same numbers in ``graph``.
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


def schedule(graph: RTaskGraph, make: MakeDevice, policy: str = STANDARD_POLICY) -> RTaskSchedule:
    """Who runs which rTask of ``graph`` when, as ``policy`` decides.

    * ``graph``: operators with their kernels' times and needs.
    * ``make``: the vEUs for a program of some kernels: ``functools.partial(virtual_device, spec)``.
    * ``policy``: one of `POLICIES`, or of those that were registered.

    Raises IllegalRewrite where an operator has no kernel that fits a unit of the device; OptionError for an unknown
    policy, and where a registered one makes a schedule that ``graph`` does not allow.
    """
    require_policy(policy)
    if policy in POLICIES:
        return RTaskSchedule(policy=policy, programs=tuple(POLICIES[policy](graph, make)))
    try:
        made = RTaskSchedule(policy=policy, programs=tuple(_REGISTERED[policy](graph, make)))
        check_schedule(made, graph)
    except ValueError as error:
        raise OptionError(
            f"scheduling policy {policy!r} made a schedule that cannot be run: {error}.", "correct the policy"
        ) from error
    return made
