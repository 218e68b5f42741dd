"""Suppression of boxes: against ONNX's definition, over images and classes, with ties, flipped and flat boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx.helper import make_node

from tests.support.small_models import onnx_model
from tvm_ext import relay

Rows = list[list[int]]


def suppressed(boxes: Any, scores: Any, limit: int, overlap: float, score: float) -> tuple[Rows, str]:
    """The rows that the build selects, and how its kernel is described."""
    constants = {"limit": np.int64([limit]), "overlap": np.float32([overlap]), "score": np.float32([score])}
    node = make_node("NonMaxSuppression", ["boxes", "scores", *constants], ["y"])
    proto = onnx_model([node], {"boxes": boxes.shape, "scores": scores.shape}, ("y",), constants, output_type=7)
    mod, params = relay.frontend.from_onnx(proto)
    library = relay.build(mod, "llvm", params=params)
    module = relay.GraphModule(library)
    module.run(boxes=boxes, scores=scores)
    (kernel,) = [item for item in library.report.operators if "suppression" in item.name]
    return module.get_output(0).numpy().tolist(), kernel.choice.reason


def expected(boxes: Any, scores: Any, limit: int, overlap: float, score: float) -> Rows:
    rows = []
    for image, of_image in enumerate(scores):
        for number, of_class in enumerate(of_image):
            kept: list[int] = []
            for place in np.argsort(-of_class, kind="stable"):
                near = (shares(boxes[image, place], boxes[image, kept]) > np.float32(overlap)).any()
                if of_class[place] > np.float32(score) and len(kept) < limit and not near:
                    kept.append(int(place))
            rows += [[image, number, place] for place in kept]
    return rows


def shares(a: Any, others: Any) -> Any:
    """Intersection over union of a box with each of others, in float32; 0 of boxes without an area."""
    corners = ((np.minimum(c[..., :2], c[..., 2:]), np.maximum(c[..., :2], c[..., 2:])) for c in (a, others))
    (low_a, high_a), (low_b, high_b) = corners
    common = np.prod(np.maximum(np.minimum(high_a, high_b) - np.maximum(low_a, low_b), np.float32(0)), axis=-1)
    union = np.prod(high_a - low_a) + np.prod(high_b - low_b, axis=-1) - common
    return np.divide(common, union, out=np.zeros_like(common), where=union > 0)


def draw(seed: int, images: int, classes: int, count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 40, (images, count, 4)).astype("float32")  # in any order; some have no area
    return corners, (rng.integers(0, 50, (images, classes, count)) / 50).astype("float32")


@pytest.mark.parametrize(
    ("images", "classes", "count", "limit"),
    [(1, 1, 100, 100), (1, 1, 37, 5), (2, 3, 60, 20), (1, 1, 1, 1), (1, 20, 200, 100), (3, 1, 20, 9_000_000_000)],
)
def test_selects_what_onnx_defines(images: int, classes: int, count: int, limit: int) -> None:
    boxes, scores = draw(count, images, classes, count)
    rows, how = suppressed(boxes, scores, limit, 0.4, 0.2)
    assert rows == expected(boxes, scores, limit, 0.4, 0.2)
    assert how.startswith(f"boxes in the order of a heap: {count} for {images} images of {classes} classes")


def test_thresholds() -> None:
    boxes, scores = draw(3, 1, 2, 50)
    assert suppressed(boxes, scores, 50, 0.0, 0.0)[0] == expected(boxes, scores, 50, 0.0, 0.0)
    assert suppressed(boxes, scores, 50, 1.0, 0.5)[0] == expected(boxes, scores, 50, 1.0, 0.5)
    assert suppressed(boxes, scores, 50, 0.5, 2.0)[0] == []


def test_boxes_that_are_equal() -> None:
    boxes = np.tile(np.array([2, 3, 8, 9], "float32"), (1, 40, 1))
    scores = np.full((1, 1, 40), 0.5, "float32")
    assert suppressed(boxes, scores, 40, 0.5, 0.0)[0] == [[0, 0, 0]]
