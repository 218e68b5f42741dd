"""Scheduled functions as loops and what they touch, and the time that the model gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tvm import te

from benchmarks.trace_model.loop_nest_time import footprint_bytes, loop_nests_s, written_out
from benchmarks.trace_model.loop_nests import LoopNest, NestLoop, read_nests
from tvm_ext._tvm import PrimFunc, Schedule
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import IllegalRewrite

DEVICE = lookup("cpu-cascade-lake")
SIZE = 256


def product() -> PrimFunc:
    a, b = te.placeholder((SIZE, SIZE), name="a"), te.placeholder((SIZE, SIZE), name="b")
    k = te.reduce_axis((0, SIZE), name="k")
    return te.create_prim_func(
        [a, b, te.compute((SIZE, SIZE), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")]
    )


def scheduled(
    rows: int = 4, columns: int = 32, block: int = 4, *, parallel: bool = True, unroll: int = 64, cached: bool = False
) -> PrimFunc:
    """Register tiles of ``rows`` x ``columns``, as MetaSchedule makes them."""
    schedule = Schedule(product())
    update = schedule.get_sblock("c")
    if cached:
        copy = schedule.cache_write(update, 0, "global")
    i, j, k = schedule.get_loops(update)
    i0, i1 = schedule.split(i, [None, rows * block])
    j0, j1 = schedule.split(j, [None, columns])
    i1, i2 = schedule.split(i1, [None, rows])
    schedule.reorder(i0, j0, i1, k, i2, j1)
    if cached:
        schedule.reverse_compute_at(copy, j0)
    outer = schedule.fuse(i0, j0)
    schedule.vectorize(j1)
    if parallel:
        schedule.parallel(outer)
    schedule.annotate(outer, "pragma_auto_unroll_max_step", unroll)
    schedule.decompose_reduction(update, k)
    function: PrimFunc = schedule.mod["main"]
    return function


def update_of(func: PrimFunc) -> LoopNest:
    return next(nest for nest in read_nests(func) if nest.accumulates)


def seconds(**form: Any) -> float:
    return loop_nests_s(read_nests(scheduled(**form)), DEVICE)


def test_loops_and_moves_of_a_tiled_product() -> None:
    nest = update_of(scheduled())
    assert [(loop.extent, loop.kind) for loop in nest.loops] == [
        (128, "parallel"), (4, "serial"), (256, "serial"), (4, "serial"), (32, "vectorized"),
    ]  # fmt: skip
    assert {loop.unroll_limit for loop in nest.loops} == {64}
    assert nest.flops_per_point == 2.0
    a, b = (access for access in nest.loads if access != nest.store)
    # The outermost loop is i0 * 8 + j0 in one: in its last iteration i0 is 15 and j0 7.
    assert nest.store.moves == ((240, 12, 0, 3, 0), (224, 0, 0, 0, 31))
    assert a.moves == ((240, 12, 0, 3, 0), (0, 0, 255, 0, 0))
    assert b.moves == ((0, 0, 255, 0, 0), (224, 0, 0, 0, 31))
    assert (b.stride(4, 32), b.stride(2, 256), b.moves_in(3)) == (1.0, 256.0, False)
    assert written_out(nest.loops) == 3


def test_footprints_count_lines_and_whole_rows() -> None:
    a, b = (item for item in update_of(scheduled()).loads if item.moves_in(2))
    assert footprint_bytes(a, 2, 64) == 4 * SIZE * 4  # four whole rows in one piece
    assert footprint_bytes(b, 2, 64) == SIZE * 32 * 4
    assert footprint_bytes(a, 3, 64) == 4 * 64  # a line each


def test_a_buffer_of_the_function_is_one_for_all_iterations_of_the_loops_that_share_it() -> None:
    nests = read_nests(scheduled(cached=True))
    assert len(nests) == 3
    store = next(nest.store for nest in nests if nest.accumulates)
    assert not store.is_param and store.private_depth == 1
    assert footprint_bytes(store, 0, 64) == 16 * 32 * 4


def test_users_of_a_buffer_may_lie_at_different_depths() -> None:
    """A row's sums are taken in two loops and used in two; what comes between them has one."""
    x = te.placeholder((24, 40), name="x")
    k = te.reduce_axis((0, 40), name="k")
    sums = te.compute((24,), lambda i: te.sum(x[i, k], axis=k), name="sums")
    halves = te.compute((24,), lambda i: sums[i] * 0.5, name="halves")
    result = te.compute((24, 40), lambda i, j: x[i, j] - halves[i], name="result")
    schedule = Schedule(te.create_prim_func([x, result]))
    outer = schedule.get_loops("result")[0]
    schedule.compute_at("halves", outer)
    schedule.compute_at("sums", outer)
    found = {nest.name: nest for nest in read_nests(schedule.mod["main"])}
    assert {name: len(nest.loops) for name, nest in found.items()} == {"sums": 2, "halves": 1, "result": 2}
    assert found["halves"].store.private_depth == found["sums"].store.private_depth == 1
    apart = read_nests(te.create_prim_func([x, result]))
    assert {item.private_depth for nest in apart for item in nest.accesses} == {0}


def test_what_no_cpu_runs_is_refused() -> None:
    schedule = Schedule(product())
    schedule.bind(schedule.get_loops("c")[0], "threadIdx.x")
    with pytest.raises(IllegalRewrite, match="threads"):
        read_nests(schedule.mod["main"])
    rows = te.var("n", "int64")
    source = te.placeholder((rows, 4), name="a")
    copy = te.create_prim_func([source, te.compute((rows, 4), lambda i, j: source[i, j] * 2.0, name="b")])
    with pytest.raises(IllegalRewrite, match="dynamic"):
        read_nests(copy)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({}, {"parallel": False}),  # one core
        ({}, {"unroll": 0, "rows": 32, "block": 1}),  # accumulators go to memory and back
        ({"columns": 32}, {"columns": 8}),  # half a register
        ({"rows": 4}, {"rows": 1}),  # no independent sums
    ],
)
def test_the_model_ranks_schedules(better: dict[str, Any], worse: dict[str, Any]) -> None:
    assert seconds(**better) < seconds(**worse)


def test_accumulators_without_a_register_cost_loads_and_stores() -> None:
    """32 rows of two registers are more than 32."""
    nests = read_nests(scheduled(rows=32, block=1, unroll=512))
    assert loop_nests_s(nests, replace(DEVICE, register_limit=128)) < 0.9 * loop_nests_s(nests, DEVICE)


def test_nothing_is_faster_than_the_peak() -> None:
    peak = DEVICE.peak_gflops_of("float32")
    assert peak is not None
    least_s = 2 * SIZE**3 / (peak * 1e9)
    for rows in (1, 2, 4, 8):
        for columns in (16, 32, 64):
            assert seconds(rows=rows, columns=columns, block=1) > least_s


def test_loops_are_written_out_from_the_inside() -> None:
    loop = NestLoop(number=1, extent=4, kind="serial", unroll_limit=16)
    vector = replace(loop, kind="vectorized", extent=64)
    assert written_out((loop, loop, loop, vector)) == 1
    assert written_out((loop, replace(loop, kind="unrolled"), loop, vector)) == 1
    assert written_out((replace(loop, kind="parallel"), loop)) == 1
    assert written_out((loop, replace(loop, extent=100), loop)) == 2
