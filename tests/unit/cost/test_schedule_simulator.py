"""Times of schedules that can be added up by hand."""

from __future__ import annotations

import pytest

from benchmarks._schedules import unit_activity
from tvm_ext.cost.schedule_simulator import last_ends, passed_s, simulate
from tvm_ext.records.rtasks import RKernel, ROperator, RTaskGraph, RTaskProgram, RTaskSchedule, ScheduleEntry, VDevice

DEVICE = VDevice(name="two", unit_count=2, task_overhead_s=0.5, barrier_s=2.0, launch_s=10.0)
GRAPH = RTaskGraph(
    operators=(
        ROperator(name="a", kernels=(RKernel(name="a", task_count=2, task_s=3.0),)),
        ROperator(name="b", kernels=(RKernel(name="b", task_count=4, task_s=1.0),)),
        ROperator(name="c", kernels=(RKernel(name="c", task_count=2, task_s=5.0),), predecessors=(0, 1)),
    )
)


def _entry(operator: int, begin: int, end: int, *waits: tuple[int, int]) -> ScheduleEntry:
    return ScheduleEntry(operator=operator, kernel=0, begin=begin, end=end, waits=waits)


PROGRAM = RTaskProgram(
    device=DEVICE, streams=((_entry(0, 0, 2), _entry(2, 0, 1, (1, 1))), (_entry(1, 0, 4), _entry(2, 1, 2, (0, 1))))
)


def test_the_times_of_figure_9() -> None:
    """vEU 0: 10 + 0.5 to 16.5; b ended before, so on to 17 and 22. vEU 1 waits until 16.5 + 2, runs from 19 to 24."""
    times = simulate(RTaskSchedule(policy="", programs=(PROGRAM,)), GRAPH)
    assert [(item.start_s, item.end_s) for item in times.entries] == [
        (10.5, 16.5),
        (17.0, 22.0),
        (10.5, 14.5),
        (19.0, 24.0),
    ]
    assert times.makespan_s == 24.0
    assert times.work_s == 6 + 4 + 10
    assert times.overhead_s == 2.0
    assert times.launch_s == 10.0
    assert times.utilisation == pytest.approx(20 / 48)
    assert times.unit_work_s == (11.0, 9.0)


def test_programs_follow_each_other() -> None:
    one = VDevice(name="one", unit_count=1, launch_s=1.0)
    programs = [
        RTaskProgram(device=device, streams=((_entry(index, 0, count),), *[()] * (device.veu_count - 1)))
        for index, count, device in ((0, 2, one), (1, 4, DEVICE), (2, 2, one))
    ]
    times = simulate(RTaskSchedule(policy="", programs=tuple(programs)), GRAPH)
    assert times.makespan_s == (1 + 6) + (10 + 0.5 + 4) + (1 + 10)
    assert times.veu_seconds == 7 + 2 * 14.5 + 11
    assert times.unit_work_s == (20.0, 0.0)


def test_what_a_cache_holds_is_not_read_again() -> None:
    kernel = RKernel(name="k", task_count=1, task_s=1.0, constant_bytes=10**9)
    operators = tuple(
        ROperator(name=name, kernels=(kernel,), constants=name[0], predecessors=(index - 1,) if index else ())
        for index, name in enumerate(("a0", "a1", "b0", "a2"))
    )
    device = VDevice(name="one", unit_count=1, cache_bytes=10**9, refill_gb_per_s=0.5)
    stream = tuple(_entry(index, 0, 1) for index in range(4))
    schedule = RTaskSchedule(policy="", programs=(RTaskProgram(device=device, streams=(stream,)),))
    assert simulate(schedule, RTaskGraph(operators=operators)).makespan_s == 4 * 1.0 + 3 * 2.0


def test_a_unit_s_veus_share_it() -> None:
    kernel = RKernel(name="k", task_count=1, task_s=4.0, residents=4, alone_s=1.5)
    assert [kernel.task_s_beside(count) for count in (4, 2, 1)] == [4.0, 2.0, 1.5]
    assert RKernel(name="k", task_count=1, task_s=4.0, residents=4).task_s_beside(1) == 4.0


def test_a_unit_is_active_while_one_of_its_veus_is() -> None:
    """Two vEUs of one unit: 6 s and 4 s from the same start are 6 s of activity."""
    device = VDevice(name="gpu", unit_count=1, veus_per_unit=2)
    program = RTaskProgram(device=device, streams=((_entry(0, 0, 2),), (_entry(1, 0, 4),)))
    schedule = RTaskSchedule(policy="", programs=(program,))
    times = simulate(schedule, GRAPH)
    assert unit_activity(schedule, times) == 1.0
    assert times.utilisation == 10 / 12
    apart = RTaskProgram(device=VDevice(name="two", unit_count=2), streams=program.streams)
    schedule = RTaskSchedule(policy="", programs=(apart,))
    assert unit_activity(schedule, simulate(schedule, GRAPH)) == 10 / 12


def test_nobody_waits_for_himself() -> None:
    ends = last_ends([(3.0, 0), (5.0, 1), (4.0, 2)])
    assert [passed_s(ends, unit, 1.0) for unit in (0, 1, 2)] == [6.0, 5.0, 6.0]
    assert passed_s(last_ends([(3.0, 1)]), 1, 1.0) == 0.0
