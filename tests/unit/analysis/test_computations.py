"""Reading TensorIR into computations, their rewrites, and the tensor expressions made from them."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, te, topi

from tests.unit.kernels import from_te, legalised
from tvm_ext._tvm import structural_equal, tirx
from tvm_ext.analysis.computation_exprs import axis_names, count_flops, itemsize_bytes, linear_index, tensor_expr_of
from tvm_ext.analysis.computation_rewrites import (
    address_runs,
    drop_unit_axes,
    fuse_axes,
    inline,
    reads_whole_runs,
    split_divided_axes,
)
from tvm_ext.analysis.computations import read_operator
from tvm_ext.analysis.tensor_expr import LinearIndex
from tvm_ext.errors import IllegalRewrite

op = relax.op


def conv_function():
    return legalised(lambda x, w: op.nn.relu(op.nn.conv2d(x, w, strides=2, padding=1)), (1, 4, 9, 9), (6, 4, 3, 3))


def test_a_convolution_is_padding_then_reduction_then_epilogue():
    operator = read_operator(conv_function(), "conv")
    assert [computation.name for computation in operator.computations] == ["pad_temp", "conv2d_nchw", "compute"]
    assert [computation.is_reduction for computation in operator.computations] == [False, True, False]
    assert len(operator.params) == 3
    assert len(operator.outputs) == 1


def test_the_expression_has_strided_window_accesses():
    computation = read_operator(conv_function(), "conv").computations[1]
    expr = tensor_expr_of(computation, name="conv")
    assert [axis.extent for axis in expr.spatial] == [1, 6, 5, 5]
    assert [axis.extent for axis in expr.reduction] == [4, 3, 3]
    assert expr.combiner == "sum"
    assert expr.flops == 2 * 6 * 5 * 5 * 4 * 3 * 3
    data, weight = expr.inputs
    row = data.indices[2]
    assert row is not None
    assert sorted(coefficient for _, coefficient in row.terms) == [1, 2]
    # A tile of 4 output rows with all 3 filter rows touches 2*(4-1) + (3-1) + 1 = 9 input rows.
    tile = {axis.name: 1 for axis in expr.axes} | {expr.spatial[2].name: 4, expr.reduction[1].name: 3}
    assert data.tile_shape(tile)[2] == 9
    assert weight.stride(expr.spatial[3].name) == 0


def test_a_reduction_of_pairs_is_refused():
    with pytest.raises(IllegalRewrite, match="several tensors at once"):
        read_operator(legalised(lambda x: op.argmax(x, axis=1), (3, 5)), "argmax")


def test_independent_reductions_of_one_block_become_two_computations():
    def build(x, g, b):
        return op.nn.group_norm(x, g, b, num_groups=2, channel_axis=1, axes=[2])

    operator = read_operator(legalised(build, (2, 4, 5), (4,), (4,)), "group_norm")
    reductions = [computation for computation in operator.computations if computation.is_reduction]
    assert [computation.combiner for computation in reductions] == ["sum", "sum"]
    assert not reductions[0].target.same_as(reductions[1].target)


def test_an_external_call_is_refused():
    x = te.placeholder((4,), "float32", "x")
    called = te.extern((4,), [x], lambda ins, outs: tirx.call_packed("f", ins[0], outs[0]), dtype="float32")
    with pytest.raises(IllegalRewrite, match="extern"):
        read_operator(from_te(x, called), "external")


def test_a_scheduled_function_is_refused():
    from tvm_ext._tvm import Schedule

    x = te.placeholder((64,), "float32", "x")
    schedule = Schedule(from_te(x, topi.nn.relu(x)))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("compute"))[0])
    with pytest.raises(IllegalRewrite, match="already scheduled"):
        read_operator(schedule.mod["main"], "scheduled")


def test_a_dynamic_shape_is_refused():
    n = tirx.Var("n", "int64")
    x = te.placeholder((n, 4), "float32", "x")
    with pytest.raises(IllegalRewrite, match="dynamic"):
        read_operator(from_te(x, topi.nn.relu(x)), "dynamic")


def test_inlining_substitutes_the_producer():
    x = te.placeholder((8, 4), "float32", "x")
    doubled = te.compute((8, 4), lambda i, j: x[i, j] * 2.0, "doubled")
    flipped = te.compute((4, 8), lambda i, j: doubled[7 - j, i] + 1.0, "flipped")
    operator = read_operator(from_te(x, flipped), "f")
    result = inline(operator.computations[0], operator.computations[1])
    (only,) = result.loads()
    assert only.source.same_as(operator.params[0])
    assert count_flops(result.value) == 2


def test_unit_axes_become_zero():
    computation = read_operator(conv_function(), "conv").computations[1]
    dropped = drop_unit_axes(computation)
    assert dropped.extents == (6, 5, 5, 4, 3, 3)
    assert structural_equal(dropped.indices[0], tirx.IntImm("int64", 0))


def test_group_convolution_becomes_affine():
    func = legalised(lambda x, w: op.nn.conv2d(x, w, groups=2), (1, 4, 5, 5), (6, 2, 3, 3))
    computation = read_operator(func, "g").computations[-1]
    assert any(index is None for access in tensor_expr_of(computation, name="g").inputs for index in access.indices)
    split = split_divided_axes(computation)
    expr = tensor_expr_of(split, name="g")
    assert all(index is not None for access in expr.inputs for index in access.indices)
    assert expr.point_count == computation.point_count


def _point_wise(x_shape: tuple[int, ...]):
    """A 1x1 convolution of an input of ``x_shape``: out[f, y, x] = sum over c of in[c, y, x] * w[f, c]."""
    x, w = te.placeholder(x_shape, name="x"), te.placeholder((4, 3), name="w")
    c = te.reduce_axis((0, 3), "c")
    out = te.compute((4, 5, 7), lambda f, i, j: te.sum(x[c, i, j] * w[f, c], axis=c), name="out")
    (computation,) = read_operator(from_te(x, w, out), "point_wise").computations
    return computation, fuse_axes(computation, [[0], [1, 2], [3]])


@pytest.mark.parametrize("stores", [True, False])
def test_a_fused_axis_runs_along_memory(stores: bool):
    computation, fused = _point_wise((3, 5, 7))
    joined = address_runs(
        fused, [fused.variables[1]], [[5, 7]], buffers=[load.source for load in computation.loads()], stores=stores
    )
    f, yx, c = fused.variables
    (read,) = [load for load in joined.loads() if load.source.same_as(computation.loads()[0].source)]
    assert structural_equal(list(read.indices), [c, tirx.IntImm("int32", 0), yx])
    assert structural_equal(list(joined.indices), [f, tirx.IntImm("int32", 0), yx]) == stores


def test_a_fused_axis_divides_where_rows_have_gaps():
    """Of an input one column wider than the result a run of the result's columns is no run."""
    computation, fused = _point_wise((3, 5, 8))
    buffers = [load.source for load in computation.loads()]
    joined = address_runs(fused, [fused.variables[1]], [[5, 7]], buffers=buffers, stores=False)
    assert structural_equal(joined.value, fused.value)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (lambda a, b, f, y, x: a[f, y, x] + b[0, y, x], True),
        (lambda a, b, f, y, x: a[f, y, x] * 2.0, True),
        (lambda a, b, f, y, x: a[f, y, x] + b[0, 0, x], False),
        (lambda a, b, f, y, x: a[f, x, y], False),
        (lambda a, b, f, y, x: te.if_then_else(y > 1, a[f, y, x], 0.0), False),
    ],
)
def test_an_epilogue_that_tells_rows_apart_is_seen(expression, expected: bool):
    a, b = te.placeholder((4, 6, 6), name="a"), te.placeholder((1, 6, 6), name="b")
    out = te.compute((4, 6, 6), lambda f, y, x: expression(a, b, f, y, x), name="out")
    (computation,) = read_operator(from_te(a, b, out), "epilogue").computations
    assert reads_whole_runs(computation, [1, 2], [6, 6]) == expected


def test_fused_axes_address_the_same_elements():
    func = legalised(lambda x: op.nn.relu(x), (3, 5, 7))
    computation = read_operator(func, "relu").computations[0]
    fused = fuse_axes(computation, [[0, 1, 2]])
    assert fused.extents == (105,)
    seen = set()
    for flat in range(105):
        point = [(flat // 35), (flat // 7) % 5, flat % 7]
        seen.add(tuple(point))
    assert len(seen) == 105
    names = axis_names(fused)
    assert len(names) == 1


@pytest.mark.parametrize(("text", "expected"), [("float32", 4), ("float16", 2), ("int8", 1), ("bool", 1), ("int64", 8)])
def test_item_sizes(text, expected):
    assert itemsize_bytes(text) == expected


def test_linear_index_reads_sums_products_and_constants(rng: np.random.Generator):
    i, j = tirx.Var("i", "int64"), tirx.Var("j", "int64")
    assert linear_index(i * 3 + (j - 2), [i, j], ["i", "j"]) == LinearIndex(terms=(("i", 3), ("j", 1)), constant=-2)
    assert linear_index(i * j, [i, j], ["i", "j"]) is None
    assert linear_index(tirx.floordiv(i, 2), [i, j], ["i", "j"]) is None
