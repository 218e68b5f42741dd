"""What the row kernels see in a group of computations, and how they divide it among threads."""

from __future__ import annotations

import dataclasses

import pytest
from tvm import relax, te

from tests.unit.kernels import from_te, legalised
from tests.unit.row_kernels import launch_count, operator_of, row_kernel
from tvm_ext._tvm import For, ForKind, structural_walk, tirx
from tvm_ext.devices import device_db
from tvm_ext.errors import IllegalRewrite
from tvm_ext.tir_passes.emit.gpu_rows.lanes import find_lanes, widened
from tvm_ext.tir_passes.emit.gpu_rows.plan import plan_rows, power_of_two
from tvm_ext.tir_passes.emit.gpu_rows.read import read_form

op = relax.op
A100 = device_db.lookup("nvidia-a100")


def form_of(build, *shapes, dtype="float32"):
    operator = operator_of(legalised(build, *shapes, dtype=dtype))
    return read_form(operator.computations, operator.outputs, operator.params)


def extents(axes):
    return [axis.extent for axis in axes]


def softmax_of(shape, axis, dtype="float32"):
    return form_of(lambda v: op.nn.softmax(v, axis=axis), shape, dtype=dtype)


# --- axes -----------------------------------------------------------------------------------------------------------
def test_grid_axes_need_not_lead():
    form = softmax_of((2, 16, 8, 9), 1)
    assert extents(form.grid) == [2, 72]
    assert extents(form.row) == [16]


def test_rows_and_grid_are_each_one_axis_where_memory_is_one_run():
    form = softmax_of((4, 6, 5, 32), -1)
    assert (extents(form.grid), extents(form.row)) == ([120], [32])
    form = form_of(lambda v: op.mean(v, axis=[2, 3]), (4, 6, 5, 8))
    assert (extents(form.grid), extents(form.row)) == ([24], [40])


def test_a_broadcast_input_keeps_its_axis_apart():
    form = form_of(lambda a, b: op.add(a, b), (4, 6, 5, 8), (6, 1, 1))
    assert extents(form.grid) == [4, 6, 40]


def test_reshaped_indices_are_seen_through():
    """Group normalisation reads its reshaped input by quotients and remainders of all its axes."""
    func = legalised(
        lambda *v: op.nn.group_norm(*v, num_groups=4, channel_axis=1, axes=[2, 3]), (2, 16, 8, 8), (16,), (16,)
    )
    assert launch_count(row_kernel(func)[1]) <= 3


def test_a_computation_that_reads_other_elements_has_no_common_form():
    x = te.placeholder((8, 16), "float32", "x")
    y = te.compute((8, 16), lambda i, j: te.exp(x[i, j]), "y")
    k = te.reduce_axis((0, 16), "k")
    total = te.compute((8,), lambda i: te.sum(y[i, k], axis=k), "total")
    z = te.compute((8, 16), lambda i, j: y[i, 15 - j] / total[i], "z")
    operator = operator_of(from_te(x, z))
    with pytest.raises(IllegalRewrite, match="other elements of y"):
        read_form(operator.computations, operator.outputs, operator.params)


# --- vectors --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "dtype", "width"),
    [
        ((4, 64), "float32", 4),
        ((4, 64), "float16", 8),
        ((4, 12), "float16", 4),
        ((4, 6), "float32", 2),
        ((4, 7), "float32", 1),
    ],
)
def test_vectors_are_16_bytes_where_rows_are_aligned(shape, dtype, width):
    form = softmax_of(shape, -1, dtype)
    assert find_lanes(form, form.row[-1].variable, form.row[-1].extent).width == width


def test_the_widest_type_decides_the_vectors():
    """8 halves are 16 bytes, but 8 floats are two accesses, each using half of every sector."""
    form = form_of(lambda v: op.astype(v, "float32"), (4, 64), dtype="float16")
    assert find_lanes(form, form.grid[-1].variable, form.grid[-1].extent).width == 4


def test_a_window_of_odd_offsets_is_read_element_by_element():
    x = te.placeholder((8, 65), "float32", "x")
    operator = operator_of(from_te(x, te.compute((8, 64), lambda i, j: x[i, j + 1] * 2.0, "y")))
    form = read_form(operator.computations, operator.outputs, operator.params)
    assert find_lanes(form, form.grid[-1].variable, form.grid[-1].extent).width == 1


@pytest.mark.parametrize(("boundary", "width"), [(32, 4), (30, 2), (31, 1)])
def test_a_condition_that_changes_between_vectors_leaves_them_whole(boundary, width):
    a, b = te.placeholder((8, boundary), "float32", "a"), te.placeholder((8, 64 - boundary), "float32", "b")
    y = te.compute((8, 64), lambda i, j: tirx.if_then_else(j < boundary, a[i, j], b[i, j - boundary]), "y")
    operator = operator_of(from_te(a, b, y))
    form = read_form(operator.computations, operator.outputs, operator.params)
    assert find_lanes(form, form.grid[-1].variable, form.grid[-1].extent).width == width


def test_half_precision_is_widened_once_per_input():
    form = form_of(op.nn.gelu, (4, 64), dtype="float16")
    value = widened(form.computations[0].value)
    assert str(value.ty.dtype) == "float32"
    found = []
    structural_walk(value, (tirx.Cast, lambda cast: found.append(str(cast.ty.dtype))))
    assert set(found) == {"float32"}


# --- plans ----------------------------------------------------------------------------------------------------------
def test_lanes_run_along_what_is_contiguous():
    assert plan_rows(softmax_of((64, 1000), -1), A100, may_split=False).along_row
    assert not plan_rows(softmax_of((4, 30, 64), 1), A100, may_split=False).along_row


@pytest.mark.parametrize(
    ("rows", "length"), [(10000, 3), (10000, 49), (5000, 1024), (10, 1024), (300, 100000), (1, 77)]
)
@pytest.mark.parametrize("device", ["nvidia-v100", "nvidia-a100", "nvidia-h200", "amd-mi50"])
def test_threads_fit_the_device_and_cover_the_rows(rows, length, device):
    spec = device_db.lookup(device)
    form = softmax_of((rows, length), -1)
    plan = plan_rows(form, spec, may_split=False)
    assert plan.threads <= min(spec.max_threads_per_block, spec.max_threads_per_unit // 2)
    assert plan.row_threads == power_of_two(plan.row_threads)
    assert plan.items * plan.row_threads * plan.lanes.width >= length
    assert plan.grid_blocks * plan.grid_threads >= rows


def test_few_rows_get_more_threads():
    few, many = (plan_rows(softmax_of((rows, 1024), -1), A100, may_split=False) for rows in (100, 100000))
    assert few.row_threads > many.row_threads
    assert many.grid_threads > 1


def test_the_grid_fills_the_units_where_there_is_enough_work():
    for shape, axis in (((4096, 512), -1), ((64, 128, 512), 1)):
        assert plan_rows(softmax_of(shape, axis), A100, may_split=False).blocks >= 2 * A100.unit_count


def test_rows_are_divided_only_where_a_launch_is_worth_it():
    def splits(shape):
        return plan_rows(form_of(lambda v: op.sum(v, axis=[1]), shape), A100, may_split=True).splits

    assert splits((1, 64 * 2**20)) >= 100
    assert splits((1, 4096)) == 1
    assert splits((2000, 65536)) == 1
    slow = dataclasses.replace(A100, launch_overhead_us=1e6)
    assert plan_rows(form_of(op.sum, (64, 2**16)), slow, may_split=True).splits == 1


@pytest.mark.parametrize(("length", "held"), [(64, True), (8192, True), (100000, False)])
def test_rows_are_held_in_registers_while_they_fit(length, held):
    assert plan_rows(softmax_of((512, length), -1), A100, may_split=False).held == held


def test_one_pass_holds_nothing():
    assert not plan_rows(form_of(lambda v: op.sum(v, axis=[1]), (512, 64)), A100, may_split=False).held


def test_divisible_shapes_have_no_predicates():
    function, _ = row_kernel(legalised(op.nn.softmax, (4096, 1024)))
    conditions = []
    structural_walk(function.body, (tirx.IfThenElse, conditions.append))
    assert not conditions


def test_copies_of_aligned_rows_are_vector_loops():
    function, _ = row_kernel(legalised(op.nn.softmax, (4096, 1024)))
    extents_of_vectors = []
    structural_walk(
        function.body,
        (For, lambda loop: extents_of_vectors.append(int(loop.extent)) if loop.kind == ForKind.VECTORIZED else None),
    )
    assert extents_of_vectors == [4, 4]  # a load and a store
