"""Resize: the rewritten graph against ONNX's reference, over every mode, and the forms that stock's kernel keeps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tvm_ext import relay
from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.graph import model_from_graph
from tvm_ext.relay_passes.onnx.import_model import checked_graph, clean_graph

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)
NEAREST_MODES = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
SCALES = (0.5, 0.6, 0.75, 0.8, 1.0, 1.4, 1.5, 2.0, 2.3, 3.0)
DTYPES = (np.float32, np.float64, np.float16, np.uint8, np.int32)
CASES = 8


@dataclass(kw_only=True)
class Drawn:
    """One Resize with its operands."""

    shape: list[int]
    dtype: Any
    attributes: dict[str, Any] = field(default_factory=dict)
    operands: dict[int, Any] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        names = ["x", *(f"operand{i}" if i in self.operands else "" for i in (1, 2, 3))]
        code = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            [helper.make_node("Resize", names, ["y"], "resize", **self.attributes)],
            "test",
            [helper.make_tensor_value_info("x", code, self.shape)],
            [helper.make_tensor_value_info("y", code, None)],
            [numpy_helper.from_array(value, f"operand{index}") for index, value in self.operands.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def data(self) -> Any:
        return (np.random.default_rng(7).random(self.shape) * 200).astype(self.dtype)


def draw(rng: random.Random, mode: str, coordinates: str) -> Drawn:
    """A tensor of rank 1 to 5, its last one to three axes resized by scales or to sizes."""
    rank = rng.randint(1, 5)
    resized = list(range(max(0, rank - rng.randint(1, 3)), rank))
    drawn = Drawn(shape=[rng.choice((1, 2, 3, 4, 5, 7, 8)) for _ in range(rank)], dtype=rng.choice(DTYPES))
    drawn.attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        drawn.attributes["nearest_mode"] = rng.choice(NEAREST_MODES)
    else:
        drawn.attributes["antialias"] = rng.choice((0, 0, 1))
        drawn.attributes["exclude_outside"] = rng.choice((0, 1)) if mode == "cubic" else 0
        drawn.attributes["cubic_coeff_a"] = rng.choice((-0.75, -0.5))
    named = resized if rng.random() < 0.4 else list(range(rank))
    if named == resized:
        drawn.attributes["axes"] = named
    if coordinates == "tf_crop_and_resize":
        drawn.attributes["extrapolation_value"] = rng.choice((0.0, 7.0))
        starts = [rng.choice((0.0, 0.2, 0.4)) if axis in resized else 0.0 for axis in named]
        ends = [rng.choice((0.7, 1.0, 1.3)) if axis in resized else 1.0 for axis in named]
        drawn.operands[1] = np.asarray(starts + ends, np.float32)
    if rng.random() < 0.5:
        scales = [rng.choice(SCALES) if axis in resized else 1.0 for axis in named]
        drawn.operands[2] = np.asarray(scales, np.float32)
    else:
        sizes = [rng.randint(1, 12) if axis in resized else drawn.shape[axis] for axis in named]
        drawn.operands[3] = np.asarray(sizes, np.int64)
        if named == resized:
            drawn.attributes["keep_aspect_ratio_policy"] = rng.choice(("stretch", "not_larger", "not_smaller"))
    return drawn


def is_sized_alike(drawn: Drawn) -> bool:
    """Whether float32 (ONNX's shape inference) and float64 (its reference) find the same sizes, none of them 0."""
    if 2 not in drawn.operands:
        return True
    axes = drawn.attributes.get("axes", range(len(drawn.shape)))
    pairs = [(np.float32(drawn.shape[axis]), scale) for axis, scale in zip(axes, drawn.operands[2], strict=True)]
    return all(int(extent * scale) == int(float(extent) * float(scale)) > 0 for extent, scale in pairs)


def assert_close(got: Any, wanted: Any) -> None:
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    # An integer may round to the other side of a half.
    rtol, atol = (2e-3, 1e-2) if got.dtype == np.float16 else (1e-5, 1.0 if got.dtype.kind in "iu" else 2e-3)
    np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=atol)


@pytest.mark.sampled
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_random_forms_agree_with_the_reference(mode: str, coordinates: str) -> None:
    rng = random.Random(f"{mode} {coordinates}")
    tried = 0
    while tried < CASES:
        drawn = draw(rng, mode, coordinates)
        if not is_sized_alike(drawn):
            continue
        tried += 1
        wanted = ReferenceEvaluator(drawn.model()).run(None, {"x": drawn.data()})[0]
        cleaned = model_from_graph(clean_graph(checked_graph(drawn.model())), lambda _: True)
        cleaned.ir_version = 9
        assert_close(ReferenceEvaluator(cleaned).run(None, {"x": drawn.data()})[0], wanted)


@pytest.mark.parametrize(
    ("mode", "coordinates", "shape", "sizes"),
    [
        ("linear", "half_pixel", (1, 3, 7, 5), (1, 3, 14, 10)),
        ("linear", "align_corners", (1, 2, 5, 4), (1, 2, 9, 11)),
        ("linear", "half_pixel", (2, 1, 9, 8), (2, 1, 4, 5)),
        ("nearest", "asymmetric", (1, 3, 7, 5), (1, 3, 14, 15)),
    ],
)
def test_the_forms_of_most_networks_are_right(
    mode: str, coordinates: str, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        attributes["nearest_mode"] = "floor"
    operands = {3: np.asarray(sizes, np.int64)}
    drawn = Drawn(shape=list(shape), dtype=np.float32, attributes=attributes, operands=operands)
    assert [node.op_type for node in clean_graph(checked_graph(drawn.model())).nodes] == ["Resize"]
    wanted = ReferenceEvaluator(drawn.model()).run(None, {"x": drawn.data()})[0]
    mod, params = relay.frontend.from_onnx(drawn.model())
    machine = relay.build(mod, "llvm", params=params).vm(tvm.cpu())
    assert_close(machine["main"](tvm.runtime.tensor(drawn.data())).numpy(), wanted)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_kernels_of_non_integral_sizes(mode: str) -> None:
    """Scaled by 1.4 and 2.3: through kernels of ours, in one dimension and in two."""
    for shape, scales in (([2, 3, 9], [1, 1, 1.4]), ([1, 2, 5, 7], [1, 1, 2.3, 0.6])):
        operands = {2: np.asarray(scales, np.float32)}
        drawn = Drawn(shape=shape, dtype=np.float32, attributes={"mode": mode}, operands=operands)
        mod, params = relay.frontend.from_onnx(drawn.model())
        machine = relay.build(mod, "llvm", params=params).vm(tvm.cpu())
        wanted = ReferenceEvaluator(drawn.model()).run(None, {"x": drawn.data()})[0]
        assert_close(machine["main"](tvm.runtime.tensor(drawn.data())).numpy(), wanted)


@pytest.mark.parametrize(
    ("attributes", "operands", "match"),
    [
        ({"mode": "nearest", "antialias": 1}, {2: np.asarray([1, 2], np.float32)}, "antialias"),
        ({"mode": "linear"}, {2: np.asarray([1, -2], np.float32)}, "scale"),
        ({"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}, {3: np.asarray([2, 2])}, "roi"),
    ],
)
def test_meaningless_forms_are_refused(attributes: dict[str, Any], operands: dict[int, Any], match: str) -> None:
    drawn = Drawn(shape=[3, 4], dtype=np.float32, attributes=attributes, operands=operands)
    with pytest.raises(ModelError, match=match):
        relay.frontend.from_onnx(drawn.model())


def test_upsample_of_old_operator_sets() -> None:
    node = helper.make_node("Upsample", ["x", "scales"], ["y"], mode="nearest")
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray([1, 1, 2, 1.5], np.float32), "scales")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)
    x = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)
    mod, params = relay.frontend.from_onnx(model)
    machine = relay.build(mod, "llvm", params=params).vm(tvm.cpu())
    wanted = x[:, :, [0, 0, 1, 1]][:, :, :, [0, 0, 1, 2]]
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), wanted)
