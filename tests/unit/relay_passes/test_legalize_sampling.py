"""Samples between pixels, by tables of places: against float64 sums of ONNX's definitions."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay

FloatArray = np.ndarray[Any, Any]


def built(call: Any, x: FloatArray, places: FloatArray) -> tuple[FloatArray, list[str]]:
    """What ``call`` of two parameters computes, and the names of its kernels."""
    params = [relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype))) for i, a in enumerate((x, places))]
    library = relay.build(module_of(params, call(*params)), "llvm", enable_rammer=False)
    module = relay.GraphModule(library)
    module.run(x0=x, x1=places)
    return module.get_output(0).numpy(), [item.name for item in library.report.operators]


def pixel_sum(plane: FloatArray, y: float, x: float) -> float:
    """Bilinear, in float64; pixels outside are 0."""
    total = 0.0
    for row, column in product((np.floor(y), np.floor(y) + 1), (np.floor(x), np.floor(x) + 1)):
        if 0 <= row < plane.shape[0] and 0 <= column < plane.shape[1]:
            total += (1 - abs(y - row)) * (1 - abs(x - column)) * float(plane[int(row), int(column)])
    return total


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_grids(padding: str, align_corners: bool) -> None:
    rng = np.random.default_rng(align_corners)
    x = rng.standard_normal((2, 3, 5, 9)).astype("float32")
    grid = rng.uniform(-1.3, 1.3, (2, 2, 4, 19)).astype("float32")
    grid[0, 0, 0, :3], grid[1, 1, 0, :3] = (-1, 1, 1e30), (1, -1, -np.inf)
    found, names = built(
        lambda x, g: relax.op.image.grid_sample(x, g, "bilinear", "NCHW", padding, align_corners), x, grid
    )
    assert names[:2] == ["grid_places", "grid_sample"]
    assert len(names) == 3  # its shape: between two layers a view, at the end of a graph a copy
    for n, c, h, w in np.ndindex(found.shape):
        places = []
        for field, extent in ((1, 5), (0, 9)):
            at = float(grid[n, field, h, w]) + 1
            place = at * (extent - 1) / 2 if align_corners else (at * extent - 1) / 2
            places.append(min(max(place, 0), extent - 1) if padding == "border" else min(max(place, -9), 99))
        assert found[n, c, h, w] == pytest.approx(pixel_sum(x[n, c], *places), abs=2e-5)


def test_a_place_that_is_nan_gives_nan_and_reads_within_the_image() -> None:
    x, grid = np.ones((1, 1, 3, 3), "float32"), np.zeros((1, 2, 1, 2), "float32")
    grid[0, 0, 0, 1] = np.nan
    found, _ = built(lambda x, g: relax.op.image.grid_sample(x, g, "bilinear", "NCHW", "zeros", True), x, grid)
    assert found[0, 0, 0, 0] == 1 and np.isnan(found[0, 0, 0, 1])


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("count", "aligned"), [(1, False), (2, True), (3, False), (2, False)])
def test_boxes(count: int, aligned: bool) -> None:
    rng = np.random.default_rng(count)
    x = rng.standard_normal((2, 3, 8, 11)).astype("float32")
    corners = rng.uniform(-3, 20, (6, 2))
    rois = np.concatenate([rng.integers(0, 2, (6, 1)), corners, corners + rng.uniform(0, 14, (6, 2))], 1).astype(
        "float32"
    )
    size = (2, 5)

    def call(x: Any, r: Any) -> Any:
        return relax.op.vision.roi_align(x, r, size, 0.5, sample_ratio=count, aligned=aligned)

    found, names = built(call, x, rois)
    assert names == ["roi_places", "roi_align"]
    for r, c, ph, pw in np.ndindex(found.shape):
        samples = [
            box_sample(x, rois[r].astype("float64"), c, ph, pw, s, size, count, aligned)
            for s in np.ndindex(count, count)
        ]
        assert found[r, c, ph, pw] == pytest.approx(np.mean(samples), abs=2e-5)


def box_sample(
    x: FloatArray,
    roi: FloatArray,
    c: int,
    ph: int,
    pw: int,
    sample: tuple[int, int],
    size: tuple[int, int],
    count: int,
    aligned: bool,
) -> float:
    places = []
    for start, end, place, number, extent, bins in zip(
        (2, 1), (4, 3), (ph, pw), sample, x.shape[2:], size, strict=True
    ):
        length = (roi[end] - roi[start]) / 2
        length = length if aligned else max(length, 1.0)
        at = roi[start] / 2 + (place + (number + 0.5) / count) * length / bins
        if at < -1 or at > extent:
            return 0.0
        places.append(min(max(at, 0.0), extent - 1.0))
    return pixel_sum(x[int(roi[0]), c], *places)


def test_other_ways_are_stock_tvms() -> None:
    x, grid = np.ones((1, 1, 3, 3), "float32"), np.zeros((1, 2, 1, 2), "float32")
    _, names = built(lambda x, g: relax.op.image.grid_sample(x, g, "bilinear", "NCHW", "reflection", True), x, grid)
    assert names == ["grid_sample"]


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize("size", [(10, 27), (3, 5), (5, 40), (2, 2)])
def test_resized_images(mode: str, size: tuple[int, int]) -> None:
    x = np.random.default_rng(size[0]).standard_normal((2, 3, 5, 9)).astype("float32")
    param = relax.Var("x", relax.TensorType(x.shape, "float32"))
    call = relax.op.image.resize2d(
        param, relax.ShapeExpr(size), method="linear", coordinate_transformation_mode=mode, layout="NCHW"
    )
    library = relay.build(module_of([param], call), "llvm", enable_rammer=False)
    module = relay.GraphModule(library)
    module.run(x=x)
    assert [item.name for item in library.report.operators] == ["resize"]
    found = module.get_output(0).numpy()
    for n, c, h, w in np.ndindex(found.shape):
        places = []
        for number, wanted, extent in zip((h, w), size, x.shape[2:], strict=True):
            place = {
                "half_pixel": (number + 0.5) * extent / wanted - 0.5,
                "align_corners": number * (extent - 1) / (wanted - 1),
                "asymmetric": number * extent / wanted,
            }[mode]
            places.append(min(max(place, 0.0), extent - 1.0))
        assert found[n, c, h, w] == pytest.approx(pixel_sum(x[n, c], *places), abs=2e-5)
