"""Tables of merged kernels, and conditions around bodies that need fewer threads than their block has."""

from __future__ import annotations

import pytest
from tvm.script import tirx as T  # noqa: N812

from tvm_ext._tvm import PrimFunc, Stmt, StringImm, Var, structural_walk, tirx
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.merged import BEGIN, BODY, COUNTER, END, ENTRY_WORDS, FIRST_WAIT, LAST_WAIT, OPERANDS
from tvm_ext.records.rtasks import RTaskProgram, ScheduleEntry, VDevice
from tvm_ext.tir_passes.emit.gpu_merged.guard import guarded, holds_barrier
from tvm_ext.tir_passes.emit.gpu_merged.tables import EntryCode, in_one_order, launch_table, needed_waits, waves_of


def entry(operator: int, begin: int, end: int) -> ScheduleEntry:
    return ScheduleEntry(operator=operator, kernel=0, begin=begin, end=end)


# Operator 2 needs 0 and 1, and 1 needs 0; 3 needs nothing. Stream 0 would wait for its own second entry's operator.
PREDECESSORS = [(), (0,), (0, 1), ()]
STREAMS = [[entry(0, 0, 2), entry(2, 0, 1)], [entry(1, 0, 3), entry(3, 0, 1)]]
PROGRAM = RTaskProgram(device=VDevice(name="two", unit_count=2), streams=tuple(map(tuple, STREAMS)))


def test_what_another_wait_implies_is_left_out() -> None:
    assert needed_waits(range(4), PREDECESSORS) == {0: (), 1: (0,), 2: (1,), 3: ()}
    assert needed_waits([1, 2], PREDECESSORS) == {1: (), 2: (1,)}, "operator 0 ran in an earlier program"


def test_waves_are_what_waits_for_earlier_ones() -> None:
    assert waves_of(range(4), needed_waits(range(4), PREDECESSORS)) == [[0, 3], [1], [2]]


def test_in_one_order_nothing_waits_for_what_comes_later() -> None:
    order = in_one_order(PROGRAM, needed_waits(range(4), PREDECESSORS))
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [STREAMS[stream][place].operator for stream, place in order] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="in a circle"):
        in_one_order(PROGRAM, {0: (2,), 1: (0,), 2: (1,), 3: ()})


def test_the_table_has_streams_entries_waits_and_operands() -> None:
    codes = {number: EntryCode(body=number % 2, operands=(16 * number, 7)) for number in range(4)}
    table = launch_table(STREAMS, codes, needed_waits(range(4), PREDECESSORS), at=100, order=(0, 2, 1, 3))
    words = {100 + place: word for place, word in enumerate(table.words)}
    assert [words[table.streams_at + stream] for stream in range(3)] == [0, 2, 4]
    assert (table.entry_count, table.counters) == (4, 4)
    assert table.words[table.order_at - 100 :] == (0, 2, 1, 3)
    last = table.entries_at + ENTRY_WORDS  # of stream 0: operator 2
    assert [words[last + field] for field in (BODY, BEGIN, END, COUNTER)] == [0, 0, 1, 2]
    assert [words[place] for place in range(words[last + FIRST_WAIT], words[last + LAST_WAIT])] == [1, 1]
    operands = words[last + OPERANDS]
    assert [words[operands], words[operands + 1]] == [32, 7]
    first = table.entries_at
    assert words[first + FIRST_WAIT] == words[first + LAST_WAIT]


@T.prim_func(s_tir=True)
def shares(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32"), n: T.int32) -> None:
    shared = T.alloc_buffer((64,), "float32", scope="shared")
    for k in range(8):
        shared[k] = a[k]
        T.evaluate(T.tvm_storage_sync("shared"))
        b[k] = shared[k]
        b[k + 8] = shared[k]


def body_of(func: PrimFunc) -> Stmt:
    found: list[Stmt] = []
    structural_walk(func.body, (tirx.For, found.append))
    return found[0]


def test_barriers_stay_outside_of_conditions() -> None:
    active = Var("thread", "int32") < 32
    conditions: list[Stmt] = []
    loop = guarded(body_of(shares), active)
    structural_walk(loop, (tirx.IfThenElse, conditions.append))
    assert isinstance(loop, tirx.For)
    assert len(conditions) == 2, "one before the barrier, one for both statements behind it"
    assert not any(map(holds_barrier, conditions))
    assert holds_barrier(loop)


def test_names_are_declared_outside_of_conditions() -> None:
    """In C++ a name ends with the block that declares it; fragments are declared under attributes of theirs."""
    fragment = tirx.decl_buffer([256], "float16", "fragment", scope="wmma.matrix_a")
    declared: Stmt = tirx.AllocBuffer(fragment, {})
    for key in ("fragment_shape", "fragment_layout"):
        declared = tirx.AttrStmt(fragment, key, StringImm("16, 16, 16"), declared)
    barrier = tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
    use = tirx.Evaluate(tirx.IntImm("int32", 1))
    conditions: list[Stmt] = []
    result = guarded(tirx.stmt_seq(declared, use, barrier, use), Var("thread", "int32") < 32)
    structural_walk(result, (tirx.IfThenElse, conditions.append))
    allocated: list[Stmt] = []
    for condition in conditions:
        structural_walk(condition, (tirx.AllocBuffer, allocated.append))
    assert len(conditions) == 2 and allocated == []


def test_a_body_without_barriers_has_one_condition() -> None:
    statement = tirx.Evaluate(tirx.IntImm("int32", 1))
    result = guarded(statement, Var("thread", "int32") < 32)
    assert isinstance(result, tirx.IfThenElse)


def test_what_memory_says_decides_about_no_barrier() -> None:
    flag = tirx.decl_buffer([1], "int32", "flag", scope="local")
    barrier = tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
    decided = tirx.IfThenElse(tirx.BufferLoad(flag, [0]) > 0, barrier, None)
    with pytest.raises(IllegalRewrite, match="a condition around a barrier is read from memory"):
        guarded(decided, Var("thread", "int32") < 32)
