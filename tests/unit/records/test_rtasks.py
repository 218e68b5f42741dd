"""Graphs and schedules of rTasks as data: JSON both ways, and what hostile values meet."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from tvm_ext.records.rtask_order import ProgramOrder, walk
from tvm_ext.records.rtasks import (
    MOST_COUNT,
    RKernel,
    ROperator,
    RTaskGraph,
    RTaskProgram,
    RTaskSchedule,
    ScheduleEntry,
    VDevice,
    Waits,
)
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.relay_passes.wavefronts.schedule_check import check_schedule


def _kernel(count: int, **fields: object) -> RKernel:
    return dataclasses.replace(RKernel(name=f"k{count}", task_count=count, task_s=1e-6), **fields)


def _entry(operator: int, begin: int, end: int, *waits: tuple[int, int]) -> ScheduleEntry:
    return ScheduleEntry(operator=operator, kernel=0, begin=begin, end=end, waits=waits)


TWO = VDevice(name="two", unit_count=2)
FIGURE_9 = RTaskGraph(
    operators=(
        ROperator(name="matmul", kernels=(_kernel(2),)),
        ROperator(name="relu", kernels=(_kernel(4),)),
        ROperator(name="conv", kernels=(_kernel(2),), predecessors=(0, 1)),
    )
)
STREAMS = ((_entry(0, 0, 2), _entry(2, 0, 1, (1, 1))), (_entry(1, 0, 4), _entry(2, 1, 2, (0, 1))))


def _schedule(*streams: tuple[ScheduleEntry, ...], device: VDevice = TWO) -> RTaskSchedule:
    return RTaskSchedule(policy="by hand", programs=(RTaskProgram(device=device, streams=streams),))


def test_records_go_through_json() -> None:
    assert from_json(RTaskGraph, to_json(FIGURE_9)) == FIGURE_9
    schedule = _schedule(*STREAMS)
    again = RTaskSchedule.from_json(schedule.to_json())
    assert again == schedule
    assert again.digest == schedule.digest
    assert schedule.digest != _schedule(STREAMS[0], STREAMS[1][:1]).digest


def test_shared_waits_are_written_once() -> None:
    shared: Waits = tuple((unit, 1) for unit in range(50))
    first = [(_entry(0, unit, unit + 1),) for unit in range(50)]
    streams = [(*stream, _entry(1, unit, unit + 1, *shared)) for unit, stream in enumerate(first)]
    schedule = _schedule(*streams, device=VDevice(name="wide", unit_count=50))
    assert len(json.loads(schedule.to_json())["programs"][0]["barriers"]) == 1
    assert RTaskSchedule.from_json(schedule.to_json()) == schedule


def test_clocks_of_figure_9() -> None:
    (program,) = _schedule(*STREAMS).programs
    order = ProgramOrder(program)
    assert order.clock((0, 1)).tolist() == [1, 1]
    assert order.before((1, 0), (0, 1))
    assert not order.before((1, 0), (0, 0))
    assert not order.before((0, 1), (0, 1))
    check_schedule(_schedule(*STREAMS), FIGURE_9)


def test_what_is_known_of_others_is_passed_on() -> None:
    streams = ((_entry(0, 0, 1),), (_entry(1, 0, 1, (0, 1)),), (_entry(2, 0, 1, (1, 1)),))
    order = ProgramOrder(_schedule(*streams, device=VDevice(name="three", unit_count=3)).programs[0])
    assert order.clock((2, 0)).tolist() == [1, 1, 0]


def test_entries_are_walked_in_an_order_that_waits_allow() -> None:
    streams = ((_entry(0, 0, 1, (1, 2)),), (_entry(1, 0, 1), _entry(2, 0, 1)))
    assert [(unit, place) for unit, place, _ in walk(_schedule(*streams).programs[0])] == [(1, 0), (1, 1), (0, 0)]


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ((STREAMS[0], STREAMS[1][:1]), "the 2 rTasks of operator 2 do not run once"),
        ((STREAMS[0], (*STREAMS[1], _entry(1, 3, 4))), "the 4 rTasks of operator 1 do not run once"),
        (((_entry(0, 0, 3),), ()), "the 2 rTasks of operator 0 do not run once"),
        (((_entry(3, 0, 1),), ()), "runs operator 3 of 3"),
        (((_entry(0, 0, 2), _entry(2, 0, 1)), STREAMS[1]), "operator 2 on vEU 0 may begin before operator 1"),
        (((STREAMS[0][1], STREAMS[0][0]), STREAMS[1]), "operator 2 on vEU 0 may begin before operator 0"),
        (((_entry(0, 0, 2, (1, 1)),), (_entry(1, 0, 4, (0, 1)),)), "the 2 rTasks of operator 2 do not run once"),
        (((ScheduleEntry(operator=0, kernel=1, begin=0, end=2),), ()), "has no kernel 1"),
    ],
)
def test_wrong_schedules_are_found(streams: tuple[tuple[ScheduleEntry, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_schedule(_schedule(*streams), FIGURE_9)


def test_a_circle_of_waits_is_named() -> None:
    program = _schedule((_entry(0, 0, 1, (1, 1)),), (_entry(1, 0, 1, (0, 1)),)).programs[0]
    with pytest.raises(ValueError, match=r"vEU 0, entry 1 \(operator 0\) waits for entry 1 of vEU 1"):
        list(walk(program))
    with pytest.raises(ValueError, match="never ends"):
        list(walk(_schedule((_entry(0, 0, 1, (0, 1)),), ()).programs[0]))  # for itself


def test_an_operator_needs_what_a_later_program_runs() -> None:
    device = VDevice(name="one", unit_count=1)
    programs = [
        RTaskProgram(device=device, streams=((_entry(index, 0, count),),)) for index, count in ((0, 2), (1, 4), (2, 2))
    ]
    check_schedule(RTaskSchedule(policy="", programs=tuple(programs)), FIGURE_9)
    with pytest.raises(ValueError, match="program 1: operator 2 on vEU 0 may begin before operator 1"):
        check_schedule(RTaskSchedule(policy="", programs=(programs[0], programs[2], programs[1])), FIGURE_9)


def test_kernels_and_widths_agree() -> None:
    wide = RTaskGraph(operators=(ROperator(name="a", kernels=(_kernel(2, threads=64), _kernel(2))),))
    with pytest.raises(ValueError, match="needs 64 threads of 1"):
        check_schedule(_schedule((_entry(0, 0, 2),), ()), wide)
    mixed = (ScheduleEntry(operator=0, kernel=1, begin=0, end=1),), (_entry(0, 1, 2),)
    with pytest.raises(ValueError, match="two kernels"):
        check_schedule(_schedule(*mixed), wide)


@pytest.mark.parametrize(
    "fields",
    [
        {"task_count": 0},
        {"task_count": MOST_COUNT + 1},
        {"task_s": math.nan},
        {"task_s": math.inf},
        {"task_s": -1.0},
        {"task_s": 0.0},
        {"constant_bytes": -1},
        {"threads": 0},
        {"registers": -1},
        {"shared_bytes": 2**40},
    ],
)
def test_hostile_kernels(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        _kernel(2, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"unit_count": 0},
        {"unit_count": 2**20, "veus_per_unit": 2**20},
        {"launch_s": math.nan},
        {"cache_bytes": 1},
        {"refill_gb_per_s": 0.0},
        {"refill_gb_per_s": math.nan},
    ],
)
def test_hostile_devices(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="device 'two'"):
        dataclasses.replace(TWO, **fields)


def test_hostile_graphs() -> None:
    operator = FIGURE_9.operators[2]
    with pytest.raises(ValueError, match="without operators"):
        RTaskGraph(operators=())
    with pytest.raises(ValueError, match="comes before its predecessors"):
        RTaskGraph(operators=(operator,))
    for predecessors in ((-1,), (5,)):
        with pytest.raises(ValueError, match="comes before its predecessors"):
            RTaskGraph(operators=(dataclasses.replace(operator, predecessors=predecessors),))
    with pytest.raises(ValueError, match="twice"):
        dataclasses.replace(operator, predecessors=(0, 0))
    with pytest.raises(ValueError, match="no kernel"):
        dataclasses.replace(operator, kernels=())


@pytest.mark.parametrize("waits", [((2, 1),), ((-1, 1),), ((1, 0),), ((1, 3),), ((1, 1), (1, 2))])
def test_hostile_waits(waits: Waits) -> None:
    with pytest.raises(ValueError, match="vEU 0 waits"):
        _schedule((_entry(0, 0, 2, *waits),), STREAMS[1])


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (2, 1), (-1, 1), (0, MOST_COUNT + 1)])
def test_hostile_ranges(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="an entry of no rTasks"):
        _entry(0, begin, end)


def _damage(change: str) -> str:
    value = json.loads(_schedule(*STREAMS).to_json())
    program = value["programs"][0]
    changes = {
        "place": lambda: program["streams"][0][1].__setitem__(4, 7),
        "negative": lambda: program["streams"][0][1].__setitem__(4, -2),
        "float": lambda: program["streams"][0][0].__setitem__(0, 0.5),
        "true": lambda: program["streams"][0][0].__setitem__(0, True),
        "text": lambda: program["streams"].__setitem__(0, ""),
        "object": lambda: program["streams"].__setitem__(0, {}),
        "short": lambda: program["streams"][0][0].pop(),
        "fewer": lambda: program["streams"].pop(),
        "none": lambda: value["programs"].clear(),
        "missing": lambda: value.pop("policy"),
        "unknown": lambda: value.__setitem__("more", 1),
        "huge": lambda: program["streams"][0][0].__setitem__(3, 10**400),
    }
    changes[change]()
    return json.dumps(value)


@pytest.mark.parametrize(
    "change",
    ["place", "negative", "float", "true", "text", "object", "short", "fewer", "none", "missing", "unknown", "huge"],
)
def test_damaged_schedules(change: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        RTaskSchedule.from_json(_damage(change))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"policy":"","programs":' + "[" * 100_000])
def test_what_is_no_schedule(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        RTaskSchedule.from_json(text)


def test_times_of_a_kernel() -> None:
    assert _kernel(4).work_s == pytest.approx(4e-6)
    assert dataclasses.replace(TWO, cache_bytes=1, refill_gb_per_s=10.0).refill_s(10**6) == pytest.approx(1e-4)
    assert np.isclose(TWO.refill_s(10**6), 0.0)
