"""3x3 convolutions in Winograd's form against float64 NumPy: shapes, epilogues, errors, and when the kind is taken."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from tvm import te

from tests.unit.kernels import constructed, from_te, run, unscheduled_operator
from tvm_ext._tvm import IRModule
from tvm_ext.analysis.computations import read_operator
from tvm_ext.analysis.tile_workload import KERNELS
from tvm_ext.analysis.winograd import find_convolution
from tvm_ext.cost.winograd_time import WinogradClock
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import IllegalRewrite, OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, CONSTANT_PARAMS, KernelChoice
from tvm_ext.records.rtask_split import RTASKS, RTaskSplit
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import WinogradTile
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.kinds import cpu_winograd
from tvm_ext.tir_passes.kinds.kernel_kind import chosen_forms
from tvm_ext.tir_passes.kinds.registry import divisions
from tvm_ext.tir_passes.plan import winograd_form
from tvm_ext.tir_passes.split_rtasks import SplitRTasks

WIDE, NARROW = lookup("cpu-epyc-zen5"), lookup("cpu-cascade-lake-avx2")


def convolution(
    batch, channels, filters, height, width, *, lanes=16, taps=3, stride=1, dilation=1, groups=1, epilogue=True
):
    """A convolution over a padded tensor in blocks of ``lanes`` channels; its epilogue adds and takes the maximum."""
    reach = dilation * (taps - 1)
    data = te.placeholder((batch, channels // lanes, stride * height + reach, stride * width + reach, lanes), "float32")
    weights = te.placeholder((filters, channels // groups, taps, taps), "float32")
    bias = te.placeholder((filters // lanes, lanes), "float32")
    blocks, each = channels // groups // lanes, filters // groups // lanes  # of a group's channels and filters
    co, ci = te.reduce_axis((0, blocks)), te.reduce_axis((0, lanes))
    ky, kx = te.reduce_axis((0, taps)), te.reduce_axis((0, taps))

    def element(n, fo, y, x, fi):
        block = co if groups == 1 else fo // each * blocks + co
        at = (n, block, stride * y + dilation * ky, stride * x + dilation * kx, ci)
        return te.sum(data[at] * weights[fo * lanes + fi, co * lanes + ci, ky, kx], axis=[co, ky, kx, ci])

    result = te.compute((batch, filters // lanes, height, width, lanes), element, "conv")
    if not epilogue:
        return from_te(data, weights, result)
    behind = te.compute(result.shape, lambda n, f, y, x, v: te.max(result[n, f, y, x, v] + bias[f, v], 0.0), "relu")
    return from_te(data, weights, bias, behind)


def expected(data, weights, bias=None):
    """The convolution in float64, in blocks as its input."""
    n, _, height, width, lanes = data.shape
    plain = data.astype("f8").transpose(0, 1, 4, 2, 3).reshape(n, -1, height, width)
    windows = sliding_window_view(plain, (3, 3), axis=(2, 3))
    groups = plain.shape[1] // weights.shape[1]
    own = zip(np.split(windows, groups, axis=1), np.split(weights.astype("f8"), groups), strict=True)
    sums = np.concatenate([np.einsum("nchwyx,fcyx->nfhw", *both) for both in own], axis=1)
    blocked = sums.reshape(n, -1, lanes, height - 2, width - 2).transpose(0, 1, 3, 4, 2)
    return blocked if bias is None else np.maximum(blocked + bias[:, None, None, :], 0)


def arrays_of(rng, batch, channels, filters, height, width, *, lanes=16, groups=1):
    data = rng.standard_normal((batch, channels // lanes, height + 2, width + 2, lanes)).astype("f4")
    weights = rng.standard_normal((filters, channels // groups, 3, 3)).astype("f4")
    return data, weights, rng.standard_normal((filters // lanes, lanes)).astype("f4")


def constructed_with(func, option, device=WIDE):
    """The kernel of ``func`` with constant weights under the option ``winograd``, and its choice."""
    kernel = construct_kernel(func.with_attr(CONSTANT_PARAMS, [1]), "operator", device, BuildOptions(winograd=option))
    return kernel, from_json(KernelChoice, str(kernel.attrs[CHOICE]))


def part_of(func, device=WIDE, **options):
    """The part that the kind makes of ``func``, all of whose weights are constants."""
    options = BuildOptions(database="off", **options)
    operator = unscheduled_operator(func.with_attr(CONSTANT_PARAMS, [1]), device=device, options=options)
    (part,) = next(divisions(operator)).parts
    return part


def error(actual, wanted):
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))


@pytest.fixture
def always(monkeypatch):
    """Small convolutions do not pay, and F(4x4, 3x3) mostly not beside F(2x2, 3x3)."""
    monkeypatch.setattr(winograd_form, "GAIN", 0.0)
    monkeypatch.setitem(winograd_form.OUTPUTS, "fast", (4,))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("option", ["auto", "fast"])
@pytest.mark.parametrize(
    "shape", [(1, 16, 16, 1, 1), (2, 32, 48, 5, 7), (3, 16, 80, 4, 9), (1, 48, 32, 13, 2)], ids=str
)
def test_values_of_odd_and_even_images(shape, option, always, rng):
    """Images that end within a tile, tasks that go over several images, panels of one to five vectors."""
    data, weights, bias = arrays_of(rng, *shape)
    kernel, choice = constructed_with(convolution(*shape), option)
    assert "in Winograd's form" in choice.reason
    wanted = expected(data, weights, bias)
    assert error(run(kernel, choice, [data, weights, bias], wanted.shape, "float32"), wanted) < 5e-6


def test_values_in_registers_of_eight_lanes(always, rng):
    data, weights, bias = arrays_of(rng, 1, 24, 40, 6, 6, lanes=8)
    kernel, choice = constructed_with(convolution(1, 24, 40, 6, 6, lanes=8), "auto", NARROW)
    assert "in Winograd's form" in choice.reason
    wanted = expected(data, weights, bias)
    assert error(run(kernel, choice, [data, weights, bias], wanted.shape, "float32"), wanted) < 5e-6


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("shape", [(2, 64, 96, 5, 7), (1, 128, 64, 6, 6)], ids=str)
def test_values_of_groups(shape, always, rng):
    """Each group reads its own channels; 48 filters of a group are three panels."""
    data, weights, bias = arrays_of(rng, *shape, groups=2)
    kernel, choice = constructed_with(convolution(*shape, groups=2), "auto")
    assert "in Winograd's form" in choice.reason
    wanted = expected(data, weights, bias)
    assert error(run(kernel, choice, [data, weights, bias], wanted.shape, "float32"), wanted) < 5e-6


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("channels", [16, 64, 256])
def test_error_is_at_most_twice_that_of_direct_sums(channels, always, rng):
    """What the option's default promises; F(4x4, 3x3) errs more."""
    shape = (1, channels, 16, 8, 8)
    data, weights, bias = arrays_of(rng, *shape)
    wanted = expected(data, weights, bias)
    errors = {}
    for option in ("off", "auto", "fast"):
        kernel, choice = constructed_with(convolution(*shape), option)
        errors[option] = error(run(kernel, choice, [data, weights, bias], wanted.shape, "float32"), wanted)
    assert errors["auto"] <= 2 * errors["off"]
    assert errors["auto"] < errors["fast"] <= 5 * errors["off"]


def test_every_tile_that_is_listed_computes_the_same(always, rng):
    """A sample of the search space, its extremes among them."""
    shape = (2, 32, 64, 6, 5)
    data, weights, bias = arrays_of(rng, *shape)
    wanted = expected(data, weights, bias)
    part = part_of(convolution(*shape))
    tiles = sorted(dict(part.form.ranked), key=lambda tile: (tile.vectors, tile.rows, tile.tiles, tile.parts))
    for tile in (tiles[0], tiles[len(tiles) // 2], tiles[-1]):
        (form,) = chosen_forms(part, {part.key().key: tile.configuration})
        assert f"{tile.rows} tiles x {tile.vectors} vectors" in " ".join(form.notes)
    assert len({tile.tiles for tile in tiles}) > 4
    kernel, choice = constructed_with(convolution(*shape), "auto")
    assert error(run(kernel, choice, [data, weights, bias], wanted.shape, "float32"), wanted) < 5e-6


@pytest.mark.parametrize("changed", [{"taps": 5}, {"stride": 2}, {"dilation": 2}, {"lanes": 8}], ids=str)
def test_other_convolutions_keep_direct_sums(changed, always):
    func = convolution(1, 32, 32, 8, 8, **changed)
    assert not isinstance(part_of(func), cpu_winograd.WinogradPart)


def test_weights_that_a_run_brings_keep_direct_sums(always):
    _, choice = constructed(convolution(1, 32, 32, 8, 8), device=WIDE)
    assert "Winograd" not in choice.reason


def test_taken_where_the_model_expects_a_gain():
    large, small = convolution(1, 128, 128, 28, 28), convolution(1, 16, 16, 3, 3)
    assert isinstance(part_of(large), cpu_winograd.WinogradPart)
    assert not isinstance(part_of(small), cpu_winograd.WinogradPart)
    assert not isinstance(part_of(large, winograd="off"), cpu_winograd.WinogradPart)


def test_images_of_few_pixels_read_the_smaller_weights():
    """9.4 MB instead of 16.8, which take longer than the sums of 2 x 2 pixels; not than those of 14 x 14."""
    few, many = (convolution(1, 512, 512, size, size) for size in (2, 14))
    assert not isinstance(part_of(few), cpu_winograd.WinogradPart)
    assert isinstance(part_of(many), cpu_winograd.WinogradPart)


def test_weights_of_memory_are_read_once_and_asked_for():
    """16.8 MB: a core for each half of the filters, and no two that read all of them."""
    part = part_of(convolution(1, 512, 512, 7, 7))
    tile = part.form.ranked[0][0]
    assert tile.parts == WIDE.unit_count
    assert tile.tiles >= 16, "all of the image's tiles in one task"
    assert part.form.clock.asks_ahead(tile)
    inside = part_of(convolution(1, 64, 64, 56, 56))
    assert not inside.form.clock.asks_ahead(inside.form.ranked[0][0])


def test_values_where_weights_are_asked_for(always, rng, monkeypatch):
    monkeypatch.setattr(WinogradClock, "asks_ahead", lambda *_: True)
    shape = (1, 32, 64, 5, 7)
    data, weights, bias = arrays_of(rng, *shape)
    kernel, choice = constructed_with(convolution(*shape), "auto")
    assert "llvm.prefetch" in kernel.script()
    wanted = expected(data, weights, bias)
    assert error(run(kernel, choice, [data, weights, bias], wanted.shape, "float32"), wanted) < 5e-6


def test_the_report_says_what_direct_sums_would_take():
    _, choice = constructed_with(convolution(1, 128, 128, 28, 28), "auto")
    assert "direct sums would take" in choice.reason
    assert choice.expected_s is not None


def test_fast_takes_the_faster_of_both_forms():
    """More outputs of a tile are less work, and more weights to load."""
    wide, deep = convolution(1, 64, 64, 56, 56), convolution(8, 512, 512, 4, 2)
    assert [part_of(func, winograd="fast").form.ranked[0][0].outputs for func in (wide, deep)] == [4, 2]


def test_a_tile_that_does_not_fit_is_refused():
    part = part_of(convolution(1, 128, 128, 28, 28))
    assert {tile.outputs for tile in dict(part.form.ranked)} == {2}
    with pytest.raises(IllegalRewrite, match="has no WinogradTile"):
        part.forms(WinogradTile(outputs=2, tiles=7, parts=5, rows=7, vectors=3))


def test_a_cut_tile_is_no_tile():
    with pytest.raises(ValueError, match="is cut"):
        WinogradTile(outputs=2, tiles=10, parts=1, rows=4, vectors=1)


def test_key_tells_the_forms_apart():
    func = convolution(1, 128, 128, 28, 28)
    keys = [part_of(func, winograd=option).key() for option in ("auto", "fast", "off")]
    assert len({key.key for key in keys}) == 3
    assert all(key.kind in KERNELS for key in keys), "others are measured, and no later build reads them"


def test_unknown_option():
    with pytest.raises(OptionError, match="winograd"):
        BuildOptions(winograd="F(4x4)")


def test_find_convolution_reads_the_axes():
    (anchor, *_) = read_operator(convolution(2, 32, 48, 5, 7), "operator").computations
    found = find_convolution(anchor)
    assert found is not None
    assert found.extents(*found.images, *found.filters, *found.channels, found.y, found.x) == [2, 3, 16, 2, 16, 5, 7]
    assert found.strides(*found.filters, *found.channels, *found.taps) == [16 * 288, 288, 144, 9, 3, 1]
    assert find_convolution(dataclasses.replace(anchor, combiner="max")) is None


def test_schedules_of_rtasks_go_by_its_time() -> None:
    """It has no rProgram; by its instructions it was taken for 20 times as long."""
    kernel, choice = constructed_with(convolution(1, 64, 64, 28, 28), "auto")
    assert choice.program is None
    assert choice.expected_s is not None
    made = SplitRTasks(WIDE)(IRModule({"k": kernel}))
    split = from_json(RTaskSplit, str(made["k"].attrs[RTASKS]))
    assert split.time_s == pytest.approx(choice.expected_s * WIDE.unit_count)
