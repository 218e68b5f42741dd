"""What can be chosen of rows, and of kernels of several parts: construction's own first, what does not fit refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tvm import te, topi

from tests.unit.kernels import cpu, unscheduled_operator
from tvm_ext.analysis.tile_workload import JOINT, joint_workload
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import JointTiles, RowTiles
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.kinds.cpu_rows import RowPart
from tvm_ext.tir_passes.kinds.registry import own_choices, tunable_parts, workloads_of
from tvm_ext.tir_passes.plan.chosen_tiles import CHOSEN, LEFT_OUT
from tvm_ext.tir_passes.plan.context import UnscheduledOperator
from tvm_ext.tuning.kernels import tunable_part

OPTIONS = BuildOptions(database="off")
DEVICE = with_unit_count(cpu(), 2)


def softmax(rows: int = 64, columns: int = 200) -> Any:
    x = te.placeholder((rows, columns), "float32", "x")
    return te.create_prim_func([x, topi.nn.softmax(x, axis=-1)])


def two_sums() -> Any:
    """Rows by two reductions that share no loop: two groups of rows in one kernel."""
    x = te.placeholder((40, 96), "float32", "x")
    y = te.placeholder((48, 128), "float32", "y")
    return te.create_prim_func([x, y, topi.sum(x, axis=1), topi.max(y, axis=1)])


def operator_of(func: Any, device: DeviceSpec = DEVICE) -> UnscheduledOperator:
    return unscheduled_operator(func, "rows", device, OPTIONS)


def made(func: Any, tiles: dict[str, str], device: DeviceSpec = DEVICE) -> tuple[str, str]:
    kernel = construct_kernel(func, "rows", device, OPTIONS, own_choices(operator_of(func, device), tiles))
    return kernel.without_attr(CHOICE).script(), from_json(KernelChoice, str(kernel.attrs[CHOICE])).reason


def part_of(func: Any, device: DeviceSpec = DEVICE) -> RowPart:
    (part,) = tunable_parts(operator_of(func, device))
    assert isinstance(part, RowPart)
    return part


def test_every_choice_of_rows_is_another_kernel_and_the_first_is_constructions() -> None:
    func = softmax()
    part = part_of(func)
    candidates = [item for item, _ in part.candidates().found]
    assert {item.forks for item in candidates} == {True, False}
    assert {item.registers for item in candidates} == {1, 2, 4, 8}
    key = part.key().key
    found = [made(func, {key: item.configuration}) for item in candidates]
    assert found[0][0] == made(func, {})[0]
    assert len({text for text, _ in found}) == len(candidates)
    assert all(CHOSEN in reason for _, reason in found)


def test_points_of_a_row_are_one_run() -> None:
    """12 x 12 points behind a mean over both axes: vectors of 144 neighbours, and not of 12."""
    x = te.placeholder((3, 8, 12, 12), "float32", "x")
    mean = topi.divide(topi.sum(x, axis=(2, 3), keepdims=True), 144.0)
    part = part_of(te.create_prim_func([x, topi.subtract(x, mean)]))
    reduced, points = part.rows.computations[0], part.rows.computations[-1]
    assert reduced.is_reduction and not points.is_reduction
    assert [points.extent(variable) for variable in points.spatial] == [3, 8, 144]


def test_one_core_has_no_forks_and_scalars_no_registers() -> None:
    one = with_unit_count(DEVICE, 1)
    assert {item.forks for item, _ in part_of(softmax(), one).candidates().found} == {False}
    narrow = part_of(softmax(columns=3)).candidates().found
    assert {item.registers for item, _ in narrow} == {narrow[0][0].registers}


@pytest.mark.parametrize("text", ["no JSON", '{"forks":1,"registers":4}', '{"forks":true,"registers":0}', "{}"])
def test_what_rows_cannot_have_is_left_out_with_a_reason(text: str) -> None:
    func = softmax()
    plain = made(func, {})
    text_of, reason = made(func, {part_of(func).key().key: text})
    assert text_of == plain[0]
    assert LEFT_OUT in reason
    huge = RowTiles(forks=True, registers=64).configuration
    assert LEFT_OUT in made(func, {part_of(func).key().key: huge})[1]


def test_rows_are_one_workload_by_what_they_compute() -> None:
    keys = [part_of(func).key().key for func in (softmax(), softmax(), softmax(63))]
    assert keys[0] == keys[1] != keys[2]
    x = te.placeholder((64, 200), "float32", "x")
    other = te.create_prim_func([x, topi.nn.log_softmax(x)])
    assert part_of(other).key().key != keys[0]


def test_several_parts_are_chosen_together() -> None:
    func = two_sums()
    found = tunable_part(func, "rows", DEVICE, OPTIONS)
    assert found.workload.kind == JOINT
    workloads = workloads_of(tunable_parts(operator_of(func)))
    assert found.workload == joint_workload(list(workloads.values()), DEVICE)
    assert len(workloads) == 2
    assert made(func, {found.workload.key: found.constructed})[0] == made(func, {})[0]
    last = found.space[len(found.space) - 1]
    assert isinstance(last, JointTiles)
    together = {found.workload.key: last.configuration}
    assert own_choices(operator_of(func), together) == dict(zip(workloads, last.parts, strict=True))
    assert made(func, together)[0] != made(func, {})[0]


@pytest.mark.parametrize("text", ["no JSON", '{"parts":["a"]}', '{"parts":[1,2]}', '{"parts":["{}","{}"]}'])
def test_a_damaged_choice_of_several_parts_is_left_out(text: str) -> None:
    func = two_sums()
    found = tunable_part(func, "rows", DEVICE, OPTIONS)
    kernel, reason = made(func, {found.workload.key: text})
    assert kernel == made(func, {})[0]
    assert reason.count(LEFT_OUT) == 2


def test_what_a_part_has_in_other_kernels_gives_way_to_what_was_chosen_for_all() -> None:
    func = two_sums()
    found = tunable_part(func, "rows", DEVICE, OPTIONS)
    first, *others = workloads_of(tunable_parts(operator_of(func)))
    apart = {first: "of other kernels"}
    assert own_choices(operator_of(func), apart) == apart
    text = replace(JointTiles(parts=("together", ""))).configuration
    assert own_choices(operator_of(func), {**apart, found.workload.key: text}) == {first: "together"}
    assert len(others) == 1
