"""What holds of every schedule of rTasks, whatever the policy: it is whole, ordered and ends, and waits for no more
than it must; its times are those of the simulator.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from benchmarks.baseline_policies import BASELINES
from tests.support.rtask_interleavings import faults, with_entry, without_one_wait
from tvm_ext.cost.schedule_simulator import simulate
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rtask_order import ProgramOrder, walk
from tvm_ext.records.rtasks import Need, RKernel, ROperator, RTaskGraph, RTaskProgram, RTaskSchedule, VDevice, need_of
from tvm_ext.relay_passes.wavefronts.earliest_finish import earliest_counts
from tvm_ext.relay_passes.wavefronts.kernel_choice import KernelChoices, MakeDevice
from tvm_ext.relay_passes.wavefronts.known_entries import KnownEntries, KnownTogether
from tvm_ext.relay_passes.wavefronts.policies import POLICIES, schedule
from tvm_ext.relay_passes.wavefronts.program_plan import MOST_EXACT
from tvm_ext.relay_passes.wavefronts.schedule_check import check_schedule
from tvm_ext.relay_passes.wavefronts.wavefront_policy import plan_waves, waves

US = 1e-6


@st.composite
def graphs(draw: DrawFn, most_operators: int = 8, most_tasks: int = 12, most_kernels: int = 2) -> RTaskGraph:
    """Random graphs whose operators have some kernels each, of whole microseconds."""
    operators = []
    for index in range(draw(st.integers(1, most_operators))):
        kernels = []
        for number in range(draw(st.integers(1, most_kernels))):
            kernel = RKernel(
                name=f"k{draw(st.integers(0, 2))}",
                task_count=draw(st.integers(1, most_tasks)),
                task_s=draw(st.integers(1, 9)) * US,
                constant_bytes=draw(st.sampled_from([0, 1000, 4000])),
                threads=draw(st.sampled_from([1, 64, 256])) if number else 1,
            )
            kernels.append(kernel)
        operator = ROperator(
            name=f"operator{index}",
            kernels=tuple(kernels),
            predecessors=tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=3)))) if index else (),
            constants=draw(st.sampled_from(["", "a", "b"])),
        )
        operators.append(operator)
    return RTaskGraph(operators=tuple(operators))


@st.composite
def devices(draw: DrawFn, counts: SearchStrategy[int]) -> MakeDevice:
    """Devices with fewer vEUs for rTasks of many threads; now and then only global barriers, costs or caches."""
    count, has_cache = draw(counts), draw(st.booleans())
    device = VDevice(
        name="drawn",
        unit_count=count,
        task_overhead_s=draw(st.sampled_from([0.0, 0.25 * US])),
        barrier_s=draw(st.sampled_from([0.0, 0.5 * US])),
        launch_s=draw(st.sampled_from([0.0, 5 * US])),
        cache_bytes=8000 if has_cache else 0,
        refill_gb_per_s=0.5 if has_cache else None,
        fine_barriers=draw(st.integers(0, 3)) > 0,
    )
    shrinks = draw(st.booleans())

    def make(need: Need) -> VDevice:
        return dataclasses.replace(device, unit_count=max(1, count // 2)) if shrinks and need.threads > 64 else device

    return make


FEW, MANY = st.integers(1, 6), st.integers(MOST_EXACT + 1, MOST_EXACT + 8)


@pytest.mark.parametrize("policy", [*POLICIES, *BASELINES])
@settings(max_examples=15, deadline=None)
@given(graph=graphs(), make=devices(FEW | MANY))
def test_schedules_are_whole_and_ordered(policy: str, graph: RTaskGraph, make: MakeDevice) -> None:
    made = schedule(graph, make, policy)
    check_schedule(made, graph)
    assert RTaskSchedule.from_json(made.to_json()) == made
    times = simulate(made, graph)
    assert 0 < times.utilisation <= 1 + 1e-9
    assert sum(times.unit_work_s) == pytest.approx(times.work_s)


@settings(max_examples=25, deadline=None)
@given(graph=graphs(), make=devices(FEW | MANY))
def test_plans_say_what_the_simulator_says(graph: RTaskGraph, make: MakeDevice) -> None:
    plans = plan_waves(graph, KernelChoices(graph, make))
    made = RTaskSchedule(policy="wavefront", programs=tuple(plan.program() for plan in plans))
    assert simulate(made, graph).makespan_s == pytest.approx(sum(plan.time_s for plan in plans))


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), make=devices(FEW | MANY))
def test_our_policies_are_never_worse_than_the_paper_s(graph: RTaskGraph, make: MakeDevice) -> None:
    names = ("wavefront", "list", "segments")
    paper, ours, segments = (simulate(schedule(graph, make, name), graph).makespan_s for name in names)
    assert segments * (1 - 1e-9) <= ours <= paper * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(graph=graphs(most_kernels=3), make=devices(FEW | MANY))
def test_the_list_policy_is_never_worse_by_more_kernels(graph: RTaskGraph, make: MakeDevice) -> None:
    choices = KernelChoices(graph, make)
    operators = (
        dataclasses.replace(operator, kernels=(operator.kernels[choices.fastest(place)],))
        for place, operator in enumerate(graph.operators)
    )
    one = RTaskGraph(operators=tuple(operators))
    fastest, several = (simulate(schedule(item, make), item).makespan_s for item in (one, graph))
    assert several <= fastest * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(graph=graphs(most_operators=6, most_tasks=3), make=devices(st.integers(2, 4)))
def test_no_wait_is_redundant_and_each_that_is_missing_is_found(graph: RTaskGraph, make: MakeDevice) -> None:
    made = schedule(graph, make, "wavefront")
    for number, program in enumerate(made.programs):
        if program.device.fine_barriers:  # where all wait for all, some do so for nothing
            for mutant in without_one_wait(program):
                programs = (*made.programs[:number], mutant, *made.programs[number + 1 :])
                with pytest.raises(ValueError, match="may begin before"):
                    check_schedule(dataclasses.replace(made, programs=programs), graph)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(1, 6))
def test_what_is_known_together_is_what_each_knows(data: st.DataObject, count: int) -> None:
    """Random operators on some vEUs each, behind some of those before: rows that are shared, and a square of counts."""
    each, together = KnownEntries(count), KnownTogether(count)
    copies, lengths = [(each, together)], np.zeros(count, dtype=np.int64)
    known, last = [], []
    for _ in range(data.draw(st.integers(1, 8))):
        units = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
        before = sorted(data.draw(st.sets(st.sampled_from(range(len(last))), max_size=3))) if last else []
        if before:
            needed = np.max([last[item] for item in before], axis=0)
            rows = needed > each.of(units)
            late, waiting = together.missing(units, needed)
            assert together.late(needed).tolist() == (needed > each.of(np.arange(count))).any(axis=1).tolist()
            assert late.tolist() == np.flatnonzero(rows.any(axis=0)).tolist()
            assert waiting.tolist() == rows.any(axis=1).tolist()
            for item in (each, together):
                item.learn(units, np.max([known[place] for place in before], axis=0))
        assert together.least(units).tolist() == each.of(units).min(axis=0).tolist()
        copies.append((each.copy(), together.copy()))
        for item in (each, together):
            item.count_own(units)
        known.append(each.most(units))
        assert together.most(units).tolist() == known[-1].tolist()
        lengths[units] += 1
        last.append(np.where(np.isin(np.arange(count), units), lengths, 0))
    every = np.arange(count)
    for square, rows in copies:  # none of them has changed since
        assert rows.least(every).tolist() == square.of(every).min(axis=0).tolist()
        assert rows.most(every).tolist() == square.most(every).tolist()


@settings(max_examples=25, deadline=None)
@given(graph=graphs(), make=devices(FEW | MANY), data=st.data())
def test_what_is_checked_is_a_clock_for_each_entry(graph: RTaskGraph, make: MakeDevice, data: st.DataObject) -> None:
    """Of schedules, and of such that one entry's waits are taken from: `check_schedule` finds what plain clocks do."""
    made = schedule(graph, make, data.draw(st.sampled_from(["list", "zig-zag"])))
    number = data.draw(st.integers(0, len(made.programs) - 1))
    program = made.programs[number]
    unit, place, entry = data.draw(st.sampled_from(list(program.entries())))
    mutant = with_entry(program, unit, place, dataclasses.replace(entry, waits=()))
    for found in (program, mutant):
        clocks, order = _plain_clocks(found), ProgramOrder(found)
        assert all(order.clock(key).tolist() == clock for key, clock in clocks.items())
        programs = (*made.programs[:number], found, *made.programs[number + 1 :])
        changed = dataclasses.replace(made, programs=programs)
        if _begins_early(found, graph, clocks):
            with pytest.raises(ValueError, match="may begin before"):
                check_schedule(changed, graph)
        else:
            check_schedule(changed, graph)


def _plain_clocks(program: RTaskProgram) -> dict[tuple[int, int], list[int]]:
    """By entry, how many entries of each vEU have ended for certain when it begins."""
    clocks: dict[tuple[int, int], list[int]] = {}
    for unit, place, entry in walk(program):
        behind = [*entry.waits, *([(unit, place)] if place else [])]
        known = [clocks[other, order - 1] for other, order in behind]
        clock = [max(item) for item in zip(*known, strict=True)] if known else [0] * len(program.streams)
        for other, order in behind:
            clock[other] = max(clock[other], order)
        clocks[unit, place] = clock
    return clocks


def _begins_early(program: RTaskProgram, graph: RTaskGraph, clocks: dict[tuple[int, int], list[int]]) -> bool:
    return any(
        clocks[unit, place][other] <= order
        for unit, place, entry in program.entries()
        for other, order, earlier in program.entries()
        if earlier.operator in graph.operators[entry.operator].predecessors
    )


@settings(max_examples=12, deadline=None)
@given(graph=graphs(most_operators=5, most_tasks=3, most_kernels=1), make=devices(st.integers(2, 4)), data=st.data())
def test_every_interleaving(graph: RTaskGraph, make: MakeDevice, data: st.DataObject) -> None:
    for program in schedule(graph, make, data.draw(st.sampled_from(["list", "wavefront", "zig-zag"]))).programs:
        assert not faults(program, graph)
        if program.device.fine_barriers:
            assert all(faults(mutant, graph) for mutant in without_one_wait(program))


def test_interleavings_find_what_is_wrong() -> None:
    graph = _chain(2, tasks=2)
    (program,) = schedule(graph, lambda need: VDevice(name="two", unit_count=2), "wavefront").programs
    late = program.streams[0][1]
    assert late.waits == ((1, 1),)
    assert not faults(program, graph)
    assert faults(with_entry(program, 0, 1, dataclasses.replace(late, waits=())), graph) == [
        "operator 1 begins too early"
    ]
    for_itself = dataclasses.replace(late, waits=((1, 2),))
    circle = with_entry(program, 0, 1, for_itself)
    circle = with_entry(circle, 1, 1, dataclasses.replace(circle.streams[1][1], waits=((0, 2),)))
    assert "nothing goes on" in faults(circle, graph)[0]


def _chain(length: int, tasks: int) -> RTaskGraph:
    kernel = RKernel(name="k", task_count=tasks, task_s=US)
    operators = [
        ROperator(name=str(index), kernels=(kernel,), predecessors=(index - 1,) if index else ())
        for index in range(length)
    ]
    return RTaskGraph(operators=tuple(operators))


@settings(max_examples=150, deadline=None)
@given(starts=st.lists(st.integers(0, 40), min_size=1, max_size=12), task=st.integers(1, 9), count=st.integers(1, 200))
def test_counts_are_those_of_one_task_after_another(starts: list[int], task: int, count: int) -> None:
    free = [float(start) for start in starts]
    for _ in range(count):
        unit = min(range(len(free)), key=lambda index: free[index])
        free[unit] += task
    counts = earliest_counts(np.array(starts, dtype=float), float(task), count)
    assert counts.sum() == count
    assert counts.min() >= 0
    ends = [start + number * task for start, number in zip(starts, counts.tolist(), strict=True)]
    assert sorted(ends) == pytest.approx(sorted(free))


@settings(max_examples=25, deadline=None)
@given(graph=graphs(most_kernels=1), make=devices(FEW))
def test_algorithm_1_as_the_paper_writes_it(graph: RTaskGraph, make: MakeDevice) -> None:
    """Task by task on a device of one size, without caches: the makespan of the policy's single program."""
    device = dataclasses.replace(make(Need()), cache_bytes=0, refill_gb_per_s=None, fine_barriers=True, barrier_s=0.0)
    device = dataclasses.replace(device, task_overhead_s=0.0)
    free, ends = [0.0] * device.veu_count, [0.0] * len(graph.operators)
    for operator in (item for wave in waves(graph) for item in wave):
        kernel = graph.operators[operator].kernels[0]
        ready = max((ends[item] for item in graph.operators[operator].predecessors), default=0.0)
        for _ in range(kernel.task_count):
            unit = min(range(len(free)), key=lambda index: max(free[index], ready))
            free[unit] = max(free[unit], ready) + kernel.task_s
            ends[operator] = max(ends[operator], free[unit])
    made = schedule(graph, lambda need: device, "wavefront")
    assert simulate(made, graph).makespan_s <= device.launch_s + max(free) + 1e-12


def test_a_program_of_its_own_where_merging_does_not_pay() -> None:
    """An rTask that leaves a single vEU: the wide operator before it keeps all of them."""
    wide = ROperator(name="wide", kernels=(RKernel(name="w", task_count=64, task_s=10 * US),))
    heavy = RKernel(name="h", task_count=1, task_s=US, threads=1024)
    graph = RTaskGraph(operators=(wide, ROperator(name="heavy", kernels=(heavy,), predecessors=(0,))))

    def make(need: Need) -> VDevice:
        return VDevice(name="gpu", unit_count=2, veus_per_unit=1 if need.threads > 256 else 4, launch_s=2 * US)

    assert [program.device.veu_count for program in schedule(graph, make, "wavefront").programs] == [8, 2]
    assert len(schedule(_chain(3, tasks=4), make, "wavefront").programs) == 1


def test_kernels_are_selected_for_the_wave() -> None:
    """Alone, an operator gets its fastest kernel; beside others that fill the device, its most efficient one."""
    kernels = (
        RKernel(name="fastest", task_count=4, task_s=2 * US),
        RKernel(name="efficient", task_count=1, task_s=4 * US),
    )
    device = VDevice(name="four", unit_count=4)
    for count, name in ((1, "fastest"), (4, "efficient")):
        operators = tuple(ROperator(name=str(index), kernels=kernels) for index in range(count))
        made = schedule(RTaskGraph(operators=operators), lambda need: device, "wavefront")
        used = {kernels[entry.kernel].name for _, _, entry in made.programs[0].entries()}
        assert used == {name}


def test_few_rtasks_have_a_unit_each() -> None:
    """Alone on a GPU they do not share units: the kernel of less time is the fastest, however many vEUs there are."""
    busy = RKernel(name="busy", task_count=4, task_s=2 * US, residents=1, alone_s=2 * US)
    slow = RKernel(name="slow", task_count=1, task_s=3 * US, residents=8, alone_s=3 * US)
    graph = RTaskGraph(operators=(ROperator(name="o", kernels=(slow, busy)),))

    def make(need: Need) -> VDevice:
        return VDevice(name="gpu", unit_count=4, veus_per_unit=8)

    choices = KernelChoices(graph, make)
    assert choices.alone_s(0, 1) == pytest.approx(2 * US)
    assert choices.fastest(0) == 1
    for policy in ("wavefront", "list", "segments"):
        assert simulate(schedule(graph, make, policy), graph).makespan_s == pytest.approx(2 * US)


def test_constants_keep_an_operator_where_it_ran() -> None:
    """Layers whose weights fill the cache, two halves each: layer after layer, not step after step."""
    kernel = RKernel(name="cell", task_count=2, task_s=5 * US, constant_bytes=500_000)
    layers, steps = 4, 12
    operators = [
        ROperator(
            name=f"layer {layer} step {step}",
            kernels=(kernel,),
            predecessors=tuple(
                sorted(([step * layers + layer - 1] if layer else []) + ([(step - 1) * layers + layer] if step else []))
            ),
            constants=f"layer {layer}",
        )
        for step in range(steps)
        for layer in range(layers)
    ]
    graph = RTaskGraph(operators=tuple(operators))
    device = VDevice(name="two", unit_count=2, cache_bytes=10**6, refill_gb_per_s=15.0, barrier_s=0.3 * US)
    paper, ours = (simulate(schedule(graph, lambda need: device, name), graph) for name in ("wavefront", "list"))
    warm = layers * steps * 5 * US + layers * 500_000 / 15e9
    assert ours.makespan_s < 1.1 * warm
    assert paper.makespan_s > 2 * ours.makespan_s


@pytest.mark.parametrize("policy", [*POLICIES, *BASELINES])
def test_graphs_of_extreme_shapes(policy: str) -> None:
    kernel = RKernel(name="k", task_count=2, task_s=US)
    alone = ROperator(name="alone", kernels=(kernel,))
    fan_in = ROperator(name="all", kernels=(kernel,), predecessors=tuple(range(200)))
    for operators in ((alone,), (alone,) * 200, (*(alone,) * 200, fan_in)):
        graph = RTaskGraph(operators=operators)
        check_schedule(schedule(graph, lambda need: VDevice(name="three", unit_count=3), policy), graph)


def test_an_operator_that_fits_nothing_is_refused() -> None:
    def make(need: Need) -> VDevice:
        if need.threads > 1024:
            raise IllegalRewrite("no unit has so many threads")
        return VDevice(name="gpu", unit_count=2)

    small, large = (RKernel(name="k", task_count=1, task_s=US, threads=count) for count in (32, 2048))
    graph = RTaskGraph(operators=(ROperator(name="o", kernels=(large,)),))
    with pytest.raises(IllegalRewrite, match="so many threads"):
        schedule(graph, make)
    either = RTaskGraph(operators=(ROperator(name="o", kernels=(large, small)),))
    assert [entry.kernel for _, _, entry in schedule(either, make).programs[0].entries()] == [1]


def test_wide_devices_share_their_waits() -> None:
    """160 vEUs, each with rTasks of each of two operators: one list of 160 pairs, not one for each vEU."""
    made = schedule(_chain(2, tasks=320), lambda need: VDevice(name="wide", unit_count=160), "wavefront")
    program: RTaskProgram = made.programs[0]
    assert len({id(entry.waits) for _, _, entry in program.entries() if entry.waits}) == 1
    assert len(list(program.entries())) == 320


@pytest.mark.parametrize("policy", [*POLICIES, *BASELINES])
def test_kernels_that_fit_no_unit_together_are_kept_apart(policy: str) -> None:
    def make(need: Need) -> VDevice:
        if need.threads * need.registers > 65536:
            raise IllegalRewrite("too many registers")
        return VDevice(name="gpu", unit_count=2)

    wide, deep = (
        RKernel(name="k", task_count=3, task_s=US, threads=threads, registers=registers)
        for threads, registers in ((1024, 32), (128, 255))
    )
    operators = tuple(ROperator(name="o", kernels=(kernel,)) for kernel in (wide, wide, deep, wide))
    made = schedule(RTaskGraph(operators=operators), make, policy)
    check_schedule(made, RTaskGraph(operators=operators))
    for program in made.programs:
        make(need_of(operators[entry.operator].kernels[0] for _, _, entry in program.entries()))
