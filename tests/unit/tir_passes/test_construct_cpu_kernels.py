"""Kernels constructed for single operators: their numbers against float64, the path taken, the loops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tvm
from tvm import relax, te, topi

from tests.unit.kernels import constructed, cpu, from_te, legalised, relative_error, run
from tvm_ext._tvm import ALREADY_SCHEDULED, structural_equal
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE
from tvm_ext.tir_passes.construct_kernels import ConstructKernels

op = relax.op


def check(func, arrays, expected, *, constants=(), dtype="float32", tolerance=2e-6, device=None):
    kernel, choice = constructed(func, constants=constants, device=device)
    actual = run(kernel, choice, arrays, expected.shape, dtype)
    assert relative_error(actual, expected) < tolerance
    return kernel, choice


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(64, 96, 128), (1, 17, 5), (31, 1, 37), (7, 13, 1), (129, 33, 66)])
@pytest.mark.parametrize("constant", [False, True])
def test_matmul(shape, constant, rng):
    m, n, k = shape
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    func = legalised(lambda x, y: op.matmul(x, y), (m, k), (k, n))
    arrays = [a.astype("float32"), b.astype("float32")]
    _, choice = check(func, arrays, a.astype("f4").astype("f8") @ b.astype("f4"), constants=(1,) if constant else ())
    assert choice.path == "rtile"


@pytest.mark.parametrize("constant", [False, True])
def test_a_transposed_weight_is_packed_not_transposed(constant, rng):
    x, w = te.placeholder((24, 40), "float32", "x"), te.placeholder((70, 40), "float32", "w")
    func = from_te(x, w, topi.nn.matmul(x, w, transpose_b=True))
    a, b = rng.standard_normal((24, 40)).astype("f4"), rng.standard_normal((70, 40)).astype("f4")
    kernel, choice = check(func, [a, b], a.astype("f8") @ b.T, constants=(1,) if constant else ())
    assert bool(choice.packs) == constant
    assert ("pack" in kernel.script()) != constant or constant


@pytest.mark.sampled
@pytest.mark.parametrize(("stride", "padding", "size"), [(1, 1, 14), (2, 1, 15), (1, 0, 7), (2, 3, 23)])
@pytest.mark.parametrize("constant", [False, True])
def test_convolution_with_bias_residual_and_relu(stride, padding, size, constant, rng):
    out = (size + 2 * padding - 3) // stride + 1

    def build(x, w, b, r):
        return op.nn.relu(op.add(op.add(op.nn.conv2d(x, w, strides=stride, padding=padding), b), r))

    shapes = (2, 5, size, size), (20, 5, 3, 3), (1, 20, 1, 1), (2, 20, out, out)
    arrays = [rng.standard_normal(shape).astype("f4") for shape in shapes]
    x, w, b, r = (a.astype("f8") for a in arrays)
    padded = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::stride, ::stride]
    expected = np.maximum(np.einsum("nchwrs,fcrs->nfhw", windows, w) + b + r, 0)
    _, choice = check(legalised(build, *shapes), arrays, expected, constants=(1, 2) if constant else ())
    assert choice.path == "rtile"
    assert "fused" in choice.reason


def test_softmax_is_one_loop_over_rows(rng):
    x = rng.standard_normal((12, 197)).astype("f4")
    e = np.exp(x.astype("f8") - x.max(1, keepdims=True))
    kernel, choice = check(legalised(lambda x: op.nn.softmax(x), (12, 197)), [x], e / e.sum(1, keepdims=True))
    assert choice.reason.count("row by row") == 1
    assert kernel.script().count("for row in") == 1


@pytest.mark.parametrize("axis", [0, 1, (0, 1), 2])
def test_sums_over_any_axis(axis, rng):
    x = rng.standard_normal((6, 50, 33)).astype("f4")
    func = legalised(lambda v: op.sum(v, axis=list(np.atleast_1d(axis))), x.shape)
    check(func, [x], x.astype("f8").sum(axis))


def test_half_precision_accumulates_in_float32(rng):
    a, b = rng.standard_normal((20, 300)).astype("f2"), rng.standard_normal((300, 24)).astype("f2")
    func = legalised(lambda x, y: op.matmul(x, y), a.shape, b.shape, dtype="float16")
    # Only the final rounding is left: 2**-11 of each element.
    check(func, [a, b], a.astype("f8") @ b.astype("f8"), dtype="float16", tolerance=2**-11)


def test_int8_is_exact(rng):
    a, b = rng.integers(-128, 127, (20, 300), "int8"), rng.integers(-128, 127, (300, 24), "int8")
    func = legalised(lambda x, y: op.matmul(x, y, out_dtype="int32"), a.shape, b.shape, dtype="int8")
    check(func, [a, b], a.astype("i8") @ b.astype("i8"), dtype="int32", tolerance=0.5 / 1e9, constants=(1,))


def test_what_cannot_be_constructed_falls_back_with_the_reason(rng):
    x = rng.standard_normal((5, 9)).astype("f4")
    kernel, choice = constructed(legalised(lambda v: op.argmax(v, axis=1), x.shape))
    assert choice.path == "fallback"
    assert "several tensors at once" in choice.reason
    assert np.array_equal(run(kernel, choice, [x], (5,), "int64"), x.argmax(1))


def test_an_unaligned_numpy_array_may_be_passed(rng):
    func = legalised(lambda x, y: op.matmul(x, y), (33, 48), (48, 70))
    kernel, choice = constructed(func)
    from tvm_ext.devices import device_db

    library = tvm.compile(kernel.with_attr("global_symbol", "main"), target=device_db.device_for_target("llvm")[1])
    store = np.zeros(33 * 48 + 48 * 70 + 33 * 70 + 3, "f4")
    a, b = store[1:1585].reshape(33, 48), store[1586 : 1586 + 3360].reshape(48, 70)
    c = store[-2310:].reshape(33, 70)
    a[:], b[:] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
    library(a, b, c)
    assert relative_error(c, a.astype("f8") @ b) < 2e-6
    for parameter in kernel.params:
        assert int(parameter.ty.data_alignment) == 4
    assert choice.path == "rtile"


def test_no_kernel_is_guarded_inside_the_register_tile():
    """Tails are emitted at their own size: the innermost loops hold no condition."""
    kernel, _ = constructed(legalised(lambda x, y: op.matmul(x, y), (83, 64), (64, 53)))
    lines = kernel.script().splitlines()
    stores = [line for line in lines if "acc[" in line]
    assert stores
    assert not any("if_then_else" in line or "T.where" in line for line in stores)


def test_one_unit_means_no_parallel_loop():
    device = dataclasses.replace(cpu(), unit_count=1)
    kernel, _ = constructed(legalised(lambda x, y: op.matmul(x, y), (256, 64), (64, 256)), device=device)
    assert "T.parallel" not in kernel.script()


def test_the_pass_leaves_its_input_alone_and_marks_its_output(immutable_modules):
    func = legalised(lambda x: op.nn.relu(x), (3, 5)).with_attr("global_symbol", "f")
    module = tvm.IRModule({"f": func})
    result = ConstructKernels(cpu(), BuildOptions())(module)
    assert structural_equal(module["f"], func)
    assert ALREADY_SCHEDULED in result["f"].attrs
    assert CHOICE in result["f"].attrs


def test_the_pass_skips_what_is_scheduled_already():
    func = legalised(lambda x: op.nn.relu(x), (3, 5)).with_attr("global_symbol", "f").with_attr(ALREADY_SCHEDULED, True)
    module = tvm.IRModule({"f": func})
    assert structural_equal(ConstructKernels(cpu(), BuildOptions())(module)["f"], func)


def test_truncated_division_in_an_epilogue_is_exact():
    """The window count of a dilated average pool divides a negative position, which vectors of stock TVM get wrong."""
    x = np.arange(1, 22, dtype="f4").reshape(1, 1, 3, 7)

    def build(v):
        return op.nn.avg_pool2d(v, pool_size=[2, 3], strides=[2, 2], dilation=[2, 2])

    windows = [[x[0, 0, [0, 2]][:, [2 * o, 2 * o + 2, 2 * o + 4]].mean() for o in range(2)]]
    check(legalised(build, x.shape), [x], np.array(windows, "f8")[None, None])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_every_convolution_runs_in_register_tiles(groups, rng):
    x, w = rng.standard_normal((1, 8, 9, 9)).astype("f4"), rng.standard_normal((16, 8 // groups, 3, 3)).astype("f4")
    windows = np.lib.stride_tricks.sliding_window_view(x.astype("f8"), (3, 3), axis=(2, 3))
    grouped = windows.reshape(1, groups, 8 // groups, 7, 7, 3, 3)
    weights = w.reshape(groups, 16 // groups, 8 // groups, 3, 3)
    expected = np.einsum("ngchwrs,gfcrs->ngfhw", grouped, weights).reshape(1, 16, 7, 7)
    func = legalised(lambda a, b: op.nn.conv2d(a, b, groups=groups), x.shape, w.shape)
    _, choice = check(func, [x, w], expected, constants=(1,))
    assert "in register tiles" in choice.reason


def test_a_product_whose_rows_thrash_copies_them_into_panels(rng: np.random.Generator):
    a = rng.standard_normal((256, 1024)).astype("float32")
    b = rng.standard_normal((1024, 2048)).astype("float32")
    wide = rng.standard_normal((1024, 1024)).astype("float32")
    for right, packs in ((wide, True), (b, True), (b[:64], False)):
        left = a[:, : right.shape[0]]
        func = legalised(op.matmul, left.shape, right.shape)
        kernel, choice = constructed(func)
        assert ("_packed" in kernel.script()) == packs
        out = run(kernel, choice, [left, right], (256, right.shape[1]), "float32")
        assert relative_error(out, left.astype(float) @ right) < 1e-5


def test_a_padded_buffer_keeps_its_shape_under_fused_axes(rng: np.random.Generator):
    """The padding's axes fuse, but its buffer is the kernel's own: stock TVM sizes it by the indices it sees."""
    x = rng.standard_normal((1, 3, 24, 11, 33)).astype("float16")
    func = legalised(
        lambda v: op.nn.max_pool3d(v, (3, 4, 2), strides=2, padding=(1, 0, 0, 0, 1, 0), layout="NDHWC"),
        x.shape,
        dtype="float16",
    )
    kernel, choice = constructed(func)
    out = run(kernel, choice, [x], (1, 1, 11, 5, 33), "float16")
    padded = np.pad(x[0], ((1, 0), (0, 1), (0, 0), (0, 0)), constant_values=-65504.0)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 4, 2), axis=(0, 1, 2))[::2, ::2, ::2]
    np.testing.assert_array_equal(out[0], windows.max(axis=(-3, -2, -1)))


PATHS = {
    "product": (lambda x, w: op.nn.relu(op.matmul(x, w)), ((16, 32), (32, 24)), "rtile"),
    "window": (lambda x: op.nn.max_pool2d(x, (3, 3)), ((1, 4, 12, 12),), "rtile"),
    "softmax": (lambda x: op.nn.softmax(x), ((8, 33),), "rows"),
    "mean": (lambda x: op.mean(x, axis=1), ((8, 33),), "rows"),
    "relu": (op.nn.relu, ((8, 33),), "rows"),
    "transposition": (op.permute_dims, ((8, 33),), "rows"),
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_tell_tiles_from_rows(name):
    build, shapes, path = PATHS[name]
    _, choice = constructed(legalised(build, *shapes))
    assert choice.path == path
    assert ("row by row" in choice.reason) == (path == "rows")
