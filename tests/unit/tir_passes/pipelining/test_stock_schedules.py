"""Schedules that nobody made for pipelining gain it: a user's for tensor cores, dlight's, MetaSchedule's."""

from __future__ import annotations

import pytest

from tests.support.pipelining.check import Pipelined, Wanted, check, pipelined
from tests.support.pipelining.kernels import A100, V100
from tests.support.pipelining.schedules import schedule_kernels

KERNELS = {kernel.name: kernel for kernel in schedule_kernels()}
PAIRS = [(name, device) for name, kernel in KERNELS.items() for device in kernel.devices]
DEPTHS = ((2, 1), (3, 1), (4, 2))


def _proved(name: str, device: str, wanted: Wanted) -> Pipelined:
    item = pipelined(KERNELS[name], device, wanted)
    result = check(item)
    assert result.ok, f"{wanted}: {item.plan}\n{result}"
    return item


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("name", "device"), PAIRS)
def test_schedules_are_right_once_they_are_pipelined(name: str, device: str) -> None:
    _proved(name, device, Wanted(shared_stages=3, register_stages=2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), PAIRS)
def test_schedules_are_right_with_all_numbers_of_stages(name: str, device: str) -> None:
    for shared, registers in DEPTHS:
        _proved(name, device, Wanted(shared_stages=shared, register_stages=registers))


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.shared])
def test_both_levels_of_a_schedule_are_found(name: str) -> None:
    kernel = KERNELS[name]
    plan = pipelined(kernel, A100, Wanted(shared_stages=3, register_stages=2)).plan
    levels = [{buffer.name for buffer in plan.buffers if buffer.level == level} for level in (0, 1)]
    assert levels == [set(kernel.shared), set(kernel.registers)], plan.refusals
    assert all(buffer.copy_bytes in (4, 8, 16) for buffer in plan.buffers if buffer.level == 0)


def test_a_users_hints_are_followed() -> None:
    plan = pipelined(KERNELS["tensor_core_matmul_by_hand"], A100).plan
    assert {(buffer.level, buffer.stages) for buffer in plan.buffers} == {(0, 4), (1, 2)}


def test_dlights_own_annotations_are_kept_or_replaced() -> None:
    """Stock TVM's schedule of a product of halves has annotations of its own; they give way where that is asked for."""
    kernel = "dlight_matmul_transposed"
    kept = _proved(kernel, A100, Wanted(shared_stages=3))
    assert [refusal.rule for refusal in kept.plan.refusals] == ["already pipelined"]
    item = _proved(kernel, A100, Wanted(shared_stages=2, register_stages=2, replace_stock=True))
    shared = [buffer for buffer in item.plan.buffers if buffer.level == 0]
    assert [buffer.stages for buffer in shared] == [2, 2], item.plan.refusals
    assert "cp_async_raw" in item.function.script()
    assert check(item).counters.barriers < check(kept).counters.barriers


def test_dlight_transposes_b_on_its_way() -> None:
    """As 2 bytes each, which no cp.async copies; the loads of A in the same loop are pipelined nevertheless."""
    item = _proved("dlight_matmul", A100, Wanted(shared_stages=3, replace_stock=True))
    assert [buffer.name for buffer in item.plan.buffers if buffer.level == 0] == ["A_reindex_pad_shared.dyn"]
    assert {r.buffer: r.rule for r in item.plan.refusals}["B_reindex_pad_shared.dyn"] == "asynchronous copy"


def test_metaschedules_copies_of_2_bytes_stay_synchronous() -> None:
    """B is transposed on its way, 2 bytes at a time: refused by rule 1, while A of the same loop is pipelined."""
    item = _proved("metaschedule_transposed", A100, Wanted(shared_stages=3))
    assert [buffer.name for buffer in item.plan.buffers if buffer.level == 0] == ["A_reindex_shared_dyn"]
    (reason,) = [r.reason for r in item.plan.refusals if r.buffer == "B_reindex_shared_dyn"]
    assert "4, 8 or 16 bytes" in reason


def test_older_devices_load_ahead_through_registers() -> None:
    item = _proved("metaschedule_matmul", V100, Wanted(shared_stages=2))
    assert {buffer.copy_bytes for buffer in item.plan.buffers} == {None}
    assert "cp_async" not in item.function.script()
    assert "A_reindex_shared_dyn_ahead" in item.function.script()
