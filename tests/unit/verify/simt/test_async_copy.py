"""The queue of asynchronous copies, and against a plain list of groups for random programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_ext.errors import InputError
from tvm_ext.verify.simt.async_copy import AsyncCopyQueue, check_copy_size

ALL = np.ones(4, bool)


def _names(landed: list[tuple[str, np.ndarray]]) -> list[str]:
    return [name for name, _ in landed]


def test_data_lands_when_a_wait_demands_it_and_not_before() -> None:
    queue: AsyncCopyQueue[str] = AsyncCopyQueue((4,))
    for name in "abc":
        queue.issue(ALL, name)
        queue.commit(ALL)
    assert queue.wait(ALL, 3) == []
    assert _names(queue.wait(ALL, 2)) == ["a"]
    assert _names(queue.wait(ALL, 0)) == ["b", "c"]
    assert queue.pending() == []


def test_what_is_not_committed_never_lands() -> None:
    queue: AsyncCopyQueue[str] = AsyncCopyQueue((4,))
    queue.issue(ALL, "a")
    assert queue.wait(ALL, 0) == []
    assert _names(queue.pending()) == ["a"]
    queue.commit(ALL)
    assert _names(queue.wait(ALL, 0)) == ["a"]


def test_empty_groups_count() -> None:
    queue: AsyncCopyQueue[str] = AsyncCopyQueue((4,))
    queue.issue(ALL, "a")
    queue.commit(ALL)
    queue.commit(ALL)
    assert _names(queue.wait(ALL, 1)) == ["a"]


def test_threads_count_their_own_groups() -> None:
    queue: AsyncCopyQueue[str] = AsyncCopyQueue((4,))
    first = np.array([True, True, False, False])
    queue.issue(ALL, "a")
    queue.commit(first)
    ((name, threads),) = queue.wait(ALL, 0)
    assert (name, threads.tolist()) == ("a", first.tolist())
    ((name, threads),) = queue.pending()
    assert (name, threads.tolist()) == ("a", (~first).tolist())
    queue.commit(~first)
    ((name, threads),) = queue.wait(ALL, 0)
    assert threads.tolist() == (~first).tolist()


def test_a_copy_that_no_thread_makes_is_nothing() -> None:
    queue: AsyncCopyQueue[str] = AsyncCopyQueue((2, 2))
    queue.issue(np.zeros((2, 2), bool), "a")
    assert queue.pending() == []


@pytest.mark.parametrize("size", [1, 2, 12, 32])
def test_sizes_that_do_not_exist_are_refused(size: int) -> None:
    with pytest.raises(InputError, match=f"cannot copy {size} bytes"):
        check_copy_size(size)
    for allowed in (4, 8, 16):
        check_copy_size(allowed)


@given(st.lists(st.sampled_from(["issue", "commit", "wait0", "wait1", "wait2"]), max_size=40))
def test_one_thread_against_a_list_of_groups(program: list[str]) -> None:
    queue: AsyncCopyQueue[int] = AsyncCopyQueue((1,))
    on = np.ones(1, bool)
    groups: list[list[int]] = []
    loose: list[int] = []
    for number, step in enumerate(program):
        if step == "issue":
            queue.issue(on, number)
            loose.append(number)
        elif step == "commit":
            queue.commit(on)
            groups.append(loose)
            loose = []
        else:
            in_flight = int(step[-1])
            done = len(groups) - in_flight
            expected = [copy for group in groups[: max(0, done)] for copy in group]
            groups = [[] if position < done else group for position, group in enumerate(groups)]
            assert [copy for copy, _ in queue.wait(on, in_flight)] == expected
    assert sorted(copy for copy, _ in queue.pending()) == sorted([*loose, *(c for group in groups for c in group)])
