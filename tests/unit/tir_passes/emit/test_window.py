"""Window kernels (depthwise convolution, pooling) against float64 NumPy, and what is and is not one."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import tvm
from numpy.lib.stride_tricks import sliding_window_view
from tvm import relax

from tests.unit.kernels import constructed, cpu, legalised, relative_error, run
from tvm_ext._tvm import ForKind, structural_walk, tirx
from tvm_ext.analysis.computations import read_operator
from tvm_ext.cost.window_time import WindowClock
from tvm_ext.devices import device_db
from tvm_ext.records.choice import CHOICE
from tvm_ext.tir_passes.emit.cpu_windows import division
from tvm_ext.tir_passes.emit.cpu_windows.emit import may_overrun
from tvm_ext.tir_passes.plan.plan_kernels import plan, simplify
from tvm_ext.tir_passes.plan.plan_windows import WindowGroup, take_windows

op = relax.op

AVX2 = {"register_bytes": 32, "teu_lanes": 8, "register_limit": 16}
SSE = {"register_bytes": 16, "teu_lanes": 4, "register_limit": 16}


def windows(x, kernel, strides, dilation, padding, fill):
    """(N, C, OH, OW, KH, KW) windows of ``x`` in float64; ``padding`` is top, left, bottom, right."""
    top, left, bottom, right = padding
    x = np.pad(x.astype("f8"), [(0, 0), (0, 0), (top, bottom), (left, right)], constant_values=fill)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    every = sliding_window_view(x, spans, axis=(2, 3))
    return every[:, :, :: strides[0], :: strides[1], :: dilation[0], :: dilation[1]]


def depthwise(x, w, strides=(1, 1), dilation=(1, 1), padding=(0, 0, 0, 0)):
    multiplier = w.shape[0] // x.shape[1]
    parts = windows(np.repeat(x, multiplier, axis=1), w.shape[2:], strides, dilation, padding, 0.0)
    return np.einsum("nchwrs,crs->nchw", parts, w[:, 0].astype("f8"))


def is_window(choice):
    return (
        choice.path == "rtile" and re.search(r"in register tiles of .*, bands of \d+ rows", choice.reason) is not None
    )


def check_depthwise(rng, size, kernel, *, channels=3, batch=1, multiplier=1, device=None, **how):
    x = rng.standard_normal((batch, channels, *size)).astype("f4")
    w = rng.standard_normal((channels * multiplier, 1, *kernel)).astype("f4")
    expected = depthwise(x, w, **how)
    func = legalised(lambda a, b: op.nn.conv2d(a, b, groups=channels, **how), x.shape, w.shape)
    kernel_, choice = constructed(func, constants=(1,), device=device)
    assert is_window(choice), choice.reason
    assert relative_error(run(kernel_, choice, [x, w], expected.shape, "float32"), expected) < 1e-6
    return choice


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 23, 29, 31, 32, 33])
def test_depthwise_of_any_width(width, rng):
    check_depthwise(rng, (5, width), (3, 3), padding=(1, 1, 1, 1))


@pytest.mark.sampled
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 4)])
def test_depthwise_with_strides_and_dilation(stride, dilation, kernel, rng):
    how = {"strides": (stride, stride), "dilation": (dilation, dilation), "padding": (2, 1, 3, 4)}
    check_depthwise(rng, (19, 41), kernel, batch=2, **how)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize(
    "padding", [(0, 0, 0, 0), (3, 0, 0, 0), (0, 3, 0, 0), (0, 0, 3, 0), (0, 0, 0, 3), (9, 20, 1, 18)]
)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_asymmetric_padding(padding, strides, rng):
    check_depthwise(rng, (13, 21), (3, 5), padding=padding, strides=strides)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize(
    ("size", "kernel", "how"),
    [
        ((83, 83), (7, 7), {"padding": (3, 3, 3, 3)}),
        ((165, 165), (7, 7), {"padding": (3, 3, 3, 3), "strides": (2, 2)}),
        ((21, 21), (5, 5), {"padding": (2, 2, 2, 2), "strides": (2, 2)}),
        ((7, 7), (3, 3), {"padding": (1, 1, 1, 1)}),
        ((1, 50), (1, 3), {}),
        ((50, 2), (3, 1), {"padding": (1, 0, 1, 0)}),
        ((3, 400), (3, 3), {"padding": (1, 1, 1, 1)}),
        ((400, 3), (3, 3), {"padding": (1, 1, 1, 1)}),
        ((2, 2), (5, 5), {"padding": (4, 4, 4, 4)}),
    ],
)
@pytest.mark.parametrize("device", [{}, AVX2, SSE], ids=["native", "avx2", "sse"])
def test_depthwise_shapes_on_devices(size, kernel, how, device, rng):
    check_depthwise(rng, size, kernel, device=dataclasses.replace(cpu(), **device), **how)


def test_large_planes_are_divided_into_bands_that_fit_l1(rng):
    choice = check_depthwise(rng, (211, 173), (5, 5), channels=2, padding=(2, 2, 2, 2))
    band = choice.program.tile("L1").sizes
    assert 1 < band["i2" if "i2" in band else "yy"] < 211
    assert choice.program.partition_count > 2


@pytest.mark.parametrize("multiplier", [2, 3])
def test_channel_multiplier_in_a_batch(multiplier, rng):
    check_depthwise(rng, (9, 20), (3, 3), batch=3, multiplier=multiplier, padding=(1, 1, 1, 1), strides=(2, 2))


def test_epilogue_of_bias_residual_and_clip(rng):
    def build(x, w, b, r):
        return op.clip(op.add(op.add(op.nn.conv2d(x, w, groups=4, padding=1), b), r), -1.0, 1.5)

    shapes = (2, 4, 13, 27), (4, 1, 3, 3), (1, 4, 1, 1), (2, 4, 13, 27)
    arrays = [rng.standard_normal(shape).astype("f4") for shape in shapes]
    kernel, choice = constructed(legalised(build, *shapes), constants=(1, 2))
    x, w, b, r = arrays
    expected = np.clip(depthwise(x, w, padding=(1, 1, 1, 1)) + b + r, -1.0, 1.5)
    assert is_window(choice)
    assert "fused" in choice.reason
    assert relative_error(run(kernel, choice, arrays, expected.shape, "float32"), expected) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize("width", [5, 7, 11, 14, 30])
@pytest.mark.parametrize("shape", ["(1, 4, 6, width)", "(1, 1, 1, width)", "(1, 1, 6, 1)"])
def test_narrow_rows_with_an_epilogue_along_each_axis(width, shape, rng):
    """What belongs to one column must not be read behind the row's end; what belongs to every element may."""
    other = {"(1, 4, 6, width)": (1, 4, 6, width), "(1, 1, 1, width)": (1, 1, 1, width)}.get(shape, (1, 1, 6, 1))
    arrays = [rng.standard_normal(s).astype("f4") for s in ((1, 4, 6, width), (4, 1, 3, 3), other)]
    func = legalised(
        lambda x, w, b: op.multiply(op.nn.conv2d(x, w, groups=4, padding=1), b), *(a.shape for a in arrays)
    )
    kernel, choice = constructed(func)
    expected = depthwise(arrays[0], arrays[1], padding=(1, 1, 1, 1)) * arrays[2]
    assert is_window(choice)
    assert relative_error(run(kernel, choice, arrays, expected.shape, "float32"), expected) < 1e-6


@pytest.mark.parametrize(
    ("epilogue", "allowed"), [((1, 4, 6, 7), True), ((1, 4, 1, 1), True), ((1, 1, 1, 7), False), ((1, 1, 6, 7), False)]
)
def test_vectors_overrun_rows_only_where_the_epilogue_has_elements_there(epilogue, allowed):
    func = legalised(
        lambda x, w, b: op.add(op.nn.conv2d(x, w, groups=4, padding=1), b), (1, 4, 6, 7), (4, 1, 3, 3), epilogue
    )
    (group,) = window_group(func)
    assert may_overrun(group.window, group.epilogue) == allowed


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("width", [5, 7, 11, 14, 16, 21, 33, 42])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_nothing_outside_the_output_is_written(width, strides, rng):
    x, w = rng.standard_normal((1, 2, 9, width)).astype("f4"), rng.standard_normal((2, 1, 3, 3)).astype("f4")
    expected = depthwise(x, w, strides=strides, padding=(1, 1, 1, 1))
    func = legalised(lambda a, b: op.nn.conv2d(a, b, groups=2, padding=1, strides=strides), x.shape, w.shape)
    kernel, _ = constructed(func)
    around = np.full(expected.size + 96, np.nan, "f4")
    first = 32 + -(around.ctypes.data // 4) % 16  # on 64 bytes, which from_dlpack insists on
    inner = around[first : first + expected.size].reshape(expected.shape)
    library = tvm.compile(kernel.with_attr("global_symbol", "main"), target=device_db.device_for_target("llvm")[1])
    library(tvm.runtime.tensor(x), tvm.runtime.tensor(w), tvm.runtime.from_dlpack(inner))
    assert relative_error(inner, expected) < 1e-6
    assert np.isnan(around[:first]).all()
    assert np.isnan(around[first + expected.size :]).all()


def test_one_dimension(rng):
    x, w = rng.standard_normal((2, 5, 61)).astype("f4"), rng.standard_normal((5, 1, 4)).astype("f4")
    func = legalised(lambda a, b: op.nn.conv1d(a, b, groups=5, strides=2, padding=(1, 2)), x.shape, w.shape)
    kernel, choice = constructed(func)
    expected = depthwise(x[:, :, None], w[:, :, None], strides=(1, 2), padding=(0, 1, 0, 2))[:, :, 0]
    assert is_window(choice)
    assert relative_error(run(kernel, choice, [x, w], expected.shape, "float32"), expected) < 1e-6


# --- pools ---------------------------------------------------------------------------------------------------------
def pooled(x, kernel, strides, padding, *, ceil_mode, include_pad=None):
    """Average pooling (maximum for ``include_pad`` None).

    Windows that ceil_mode adds reach beyond the padding, but each begins inside it or the tensor.
    """
    extra = []
    for size, k, s, before, after in zip(x.shape[2:], kernel, strides, padding[:2], padding[2:], strict=True):
        p = before + after
        steps = (size + p - k) / s
        count = (int(np.ceil(steps)) if ceil_mode else int(steps)) + 1
        count -= (count - 1) * s >= size + before
        extra.append(max(0, (count - 1) * s + k - size - p))
    over = (padding[0], padding[1], padding[2] + extra[0], padding[3] + extra[1])
    if include_pad is None:
        return windows(x, kernel, strides, (1, 1), over, -np.inf).max(axis=(4, 5))
    ones = np.pad(
        np.ones_like(x),
        [(0, 0), (0, 0), (padding[0], padding[2]), (padding[1], padding[3])],
        constant_values=float(include_pad),
    )
    counts = windows(ones, kernel, strides, (1, 1), (0, 0, *extra), 0.0).sum(axis=(4, 5))
    return windows(x, kernel, strides, (1, 1), over, 0.0).sum(axis=(4, 5)) / counts


POOLS = [
    ((17, 17), (3, 3), (2, 2), (1, 1, 1, 1)),
    ((11, 11), (3, 3), (1, 1), (1, 1, 1, 1)),
    ((20, 31), (2, 2), (2, 2), (0, 0, 0, 0)),
    ((56, 57), (3, 3), (2, 2), (0, 0, 0, 0)),
    ((14, 15), (5, 4), (3, 2), (2, 1, 0, 3)),
    ((9, 40), (1, 1), (2, 2), (0, 0, 0, 0)),
]


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize(("size", "kernel", "strides", "padding"), POOLS)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("include_pad", [None, False, True], ids=["max", "average", "average-with-padding"])
def test_pools(size, kernel, strides, padding, ceil_mode, include_pad, rng):
    x = (rng.standard_normal((2, 3, *size)) - 3.0).astype("f4")  # mostly negative: a maximum with 0 would show
    how = {"strides": strides, "padding": padding, "ceil_mode": ceil_mode}
    if include_pad is None:
        func = legalised(lambda a: op.nn.max_pool2d(a, kernel, **how), x.shape)
    else:
        func = legalised(lambda a: op.nn.avg_pool2d(a, kernel, count_include_pad=include_pad, **how), x.shape)
    expected = pooled(x, kernel, strides, padding, ceil_mode=ceil_mode, include_pad=include_pad)
    kernel_, choice = constructed(func)
    assert is_window(choice), choice.reason
    assert relative_error(run(kernel_, choice, [x], expected.shape, "float32"), expected) < 1e-6


def test_average_pooling_divides_by_no_count_at_run_time():
    func = legalised(lambda a: op.nn.avg_pool2d(a, (3, 3), (1, 1), (1, 1)), (1, 4, 12, 12))
    kernel, _ = constructed(func)
    divisions = []
    structural_walk(kernel.body, (tirx.Div, divisions.append))
    assert not divisions
    assert "reciprocals" in kernel.script()


@pytest.mark.parametrize("as_tables", [True, False])
@pytest.mark.parametrize("strides", [(2, 3), (1, 1)])
def test_a_dilated_average_whose_count_is_0_behind_the_row(strides, as_tables, rng, monkeypatch):
    """Stock TVM's count of elements is (min(1, 5 - x) * 3 + 3) / 2 + 1: 0 for x = 7, in the last vector."""
    if not as_tables:
        monkeypatch.setattr(division, "OPERATIONS", {})
    x, padding, dilation = rng.standard_normal((1, 3, 8, 13)).astype("f4"), (1, 3, 0, 3), (2, 2)
    func = legalised(lambda a: op.nn.avg_pool2d(a, (2, 4), strides, padding, dilation, count_include_pad=True), x.shape)
    expected = windows(x, (2, 4), strides, dilation, padding, 0.0).mean(axis=(4, 5))
    kernel, choice = constructed(func)
    assert is_window(choice), choice.reason
    assert relative_error(run(kernel, choice, [x], expected.shape, "float32"), expected) < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "int32", "int8"])
def test_pools_of_other_types_say_why_they_have_no_window_kernel(dtype, rng):
    x = rng.integers(-100, 100, (1, 3, 12, 13)).astype(dtype)
    func = legalised(lambda a: op.nn.max_pool2d(a, (3, 3), (2, 2), (1, 1)), x.shape, dtype=dtype)
    kernel, choice = constructed(func)
    assert f"window kernels are made for float32, not {dtype}" in choice.reason
    expected = windows(x, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), -np.inf).max(axis=(4, 5))
    assert np.array_equal(run(kernel, choice, [x], expected.shape, dtype).astype("f8"), expected)


def test_half_precision_accumulated_in_float32_has_no_window_kernel(rng):
    x, w = rng.standard_normal((1, 3, 12, 13)).astype("f2"), rng.standard_normal((3, 1, 3, 3)).astype("f2")
    func = legalised(
        lambda a, b: op.nn.conv2d(a, b, groups=3, padding=1, out_dtype="float32"), x.shape, w.shape, dtype="float16"
    )
    kernel, choice = constructed(func)
    assert "window kernels are made for float32, not float16" in choice.reason
    expected = depthwise(x, w, padding=(1, 1, 1, 1))
    assert relative_error(run(kernel, choice, [x, w], expected.shape, "float32"), expected) < 1e-3


def test_long_steps_and_long_windows_say_why_they_have_no_window_kernel(rng):
    x = rng.standard_normal((1, 2, 40, 60)).astype("f4")
    for kernel_size, stride, reason in [((3, 3), 6, "moves by 6 along x"), ((3, 18), 1, "more than 16 taps")]:
        func = legalised(lambda a, k=kernel_size, s=stride: op.nn.max_pool2d(a, k, s), x.shape)
        kernel, choice = constructed(func)
        assert reason in choice.reason
        expected = windows(x, kernel_size, (stride, stride), (1, 1), (0, 0, 0, 0), -np.inf).max(axis=(4, 5))
        assert relative_error(run(kernel, choice, [x], expected.shape, "float32"), expected) < 1e-6


# --- structure -----------------------------------------------------------------------------------------------------
def window_group(func):
    operator = simplify(read_operator(func, "operator"))
    groups, _ = take_windows(plan(operator), operator)
    return groups


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda x, w: op.nn.conv2d(x, w, padding=1), [(1, 8, 12, 12), (8, 8, 3, 3)]),
        (lambda x, w: op.nn.conv2d(x, w, padding=1, groups=2), [(1, 8, 12, 12), (8, 4, 3, 3)]),
        (lambda x, w: op.matmul(x, w), [(12, 12), (12, 12)]),
        (lambda x: op.nn.avg_pool2d(x, (12, 12)), [(1, 8, 12, 12)]),
        (lambda x: op.nn.max_pool2d(x, (3, 3), layout="NHWC"), [(1, 12, 12, 24)]),
        (lambda x: op.sum(x, axis=1), [(4, 8, 12)]),
    ],
    ids=["convolution", "grouped", "matmul", "global pool", "channels last", "sum"],
)
def test_other_operators_are_no_windows(build, shapes):
    assert not any(isinstance(group, WindowGroup) for group in window_group(legalised(build, *shapes)))


def test_padding_runs_inside_the_kernel():
    func = legalised(lambda x, w: op.nn.conv2d(x, w, padding=1, groups=8), (1, 8, 56, 56), (8, 1, 3, 3))
    groups = window_group(func)
    assert len(groups) == 1
    assert isinstance(groups[0], WindowGroup)
    assert groups[0].window.pad is not None
    kernel, _ = constructed(func)
    loops = []
    structural_walk(kernel.body, (tirx.For, lambda node: loops.append(node.kind)))
    assert loops.count(ForKind.PARALLEL) <= 1
    assert "pad_temp" not in kernel.without_attr(CHOICE).script()


@pytest.mark.parametrize("width", [7, 11, 21, 42, 83])
def test_scratch_fits_l1_and_tiles_fit_the_registers(width):
    shapes = (1, 8, width, width), (8, 1, 5, 5)
    (group,) = window_group(legalised(lambda x, w: op.nn.conv2d(x, w, padding=2, groups=8), *shapes))
    for features in ({}, AVX2, SSE):
        device = dataclasses.replace(cpu(), **features)
        layout = WindowClock(group.window, group.epilogue, device).usual_layout()
        data = layout.phase_size * len(group.window.x.phases) * len(group.window.y.phases)
        assert 4 * (data + layout.result_size) <= device.layer("L1").capacity_bytes
        assert layout.rows * layout.vectors < device.register_limit
        assert layout.band <= width


def test_rows_share_their_padding():
    shapes = (1, 8, 11, 11), (8, 1, 3, 3)
    (group,) = window_group(legalised(lambda x, w: op.nn.conv2d(x, w, padding=1, groups=8), *shapes))
    assert WindowClock(group.window, group.epilogue, cpu()).usual_layout().pitch == 12


@pytest.mark.sampled
@pytest.mark.parametrize("change", [{"before": 0}, {"before": 2}, {"size": 10}, {"first": 2}])
@pytest.mark.parametrize("axis", ["x", "y"])
def test_the_numbers_notice_a_wrong_padding(axis, change, rng, monkeypatch):
    """The reference would fail a kernel whose padding is off by one in any of the geometry's fields."""
    from tvm_ext.tir_passes.plan import plan_windows

    find = plan_windows.find_window

    def wrong(anchor, pad):
        window = find(anchor, pad)
        return dataclasses.replace(window, **{axis: dataclasses.replace(getattr(window, axis), **change)})

    monkeypatch.setattr(plan_windows, "find_window", wrong)
    with pytest.raises(AssertionError):
        check_depthwise(rng, (11, 11), (3, 3), padding=(1, 1, 1, 1))
