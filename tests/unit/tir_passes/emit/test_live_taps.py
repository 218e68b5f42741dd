"""Tile kernels of widely dilated convolutions leave out the taps that meet padding alone."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.analysis.live_taps import LiveTaps
from tvm_ext.analysis.window import WindowAxis

CASES = [
    # size, kernel, stride, dilation, padding
    ((16, 16), 3, 1, 12, 12),
    ((13, 17), 3, 1, 9, 9),
    ((12, 12), 5, 1, 5, 10),
    ((15, 16), 3, 2, 11, 11),
    ((7, 30), 3, 1, 6, 6),
]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("layout", ["NCHW", "auto"])
@pytest.mark.parametrize(("size", "kernel", "stride", "dilation", "padding"), CASES)
def test_leaves_out_zeros_alone(
    size: tuple[int, int], kernel: int, stride: int, dilation: int, padding: int, layout: str
) -> None:
    rng = np.random.default_rng(0)
    weight = rng.integers(-3, 4, (16, 32, kernel, kernel)).astype("float32")
    data = rng.integers(-3, 4, (1, 32, *size)).astype("float32")
    x = relax.Var("x", relax.TensorType(data.shape, "float32"))
    call = relax.op.nn.conv2d(x, relax.const(weight), strides=stride, dilation=dilation, padding=padding)
    library = relay.build(module_of([x], call), "llvm", layout=layout)
    assert any(
        "by the taps that meet an element" in note for op in library.report.operators for note in op.choice.notes
    )
    result = library.vm()["main"](tvm.runtime.tensor(data)).numpy()
    assert np.array_equal(result, _expected(data, weight, stride, dilation, padding))


def _expected(data: np.ndarray, weight: np.ndarray, stride: int, dilation: int, padding: int) -> np.ndarray:  # type: ignore[type-arg]
    padded = np.pad(data, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    taps = weight.shape[-1]
    height, width = (((size - dilation * (taps - 1) - 1) // stride) + 1 for size in padded.shape[2:])
    out = np.zeros((1, weight.shape[0], height, width), "float32")
    for y in range(taps):
        for x in range(taps):
            rows = slice(y * dilation, y * dilation + stride * (height - 1) + 1, stride)
            columns = slice(x * dilation, x * dilation + stride * (width - 1) + 1, stride)
            out += np.einsum("nchw,fc->nfhw", padded[:, :, rows, columns], weight[:, :, y, x])
    return out


def test_a_tile_takes_each_tap_that_meets_an_element() -> None:
    """`LiveTaps.span` against all places of a tile."""
    for stride, dilation, low, size in [(1, 12, 12, 16), (2, 5, 7, 9), (3, 4, 0, 5), (1, 1, 1, 4), (2, 3, 20, 3)]:
        axis = WindowAxis(
            variable=None, tap=None, extent=20, taps=5, stride=stride, dilation=dilation, before=low, first=0, size=size
        )
        taps = LiveTaps(outputs=0, taps=1, axis=axis)
        for start in range(20):
            for count in (1, 3, 8):
                begin, number = (int(value) for value in taps.span(tvm.tirx.IntImm("int64", start), count))
                met = [
                    tap
                    for tap in range(5)
                    if any(low <= stride * (start + o) + dilation * tap < low + size for o in range(count))
                ]
                assert set(met) <= set(range(begin, begin + number))
                assert not met or len(met) == number or stride > 1 or size < dilation
                assert begin + number <= 5 or number == 0
