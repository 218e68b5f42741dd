"""Rules of single operators: the rewritten graph against ONNX's reference."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.support.operator_types.definitions import transposed_convolution, wrapped
from tests.support.small_models import onnx_model
from tests.unit.relay_passes.onnx.single_nodes import assert_same, built, check_rewriting, cleaned, floats, model_of
from tvm_ext import relay
from tvm_ext.errors import IndexRangeError, ModelError
from tvm_ext.relay_passes.onnx.operators import tables
from tvm_ext.relay_passes.onnx.operators.packed_product import PACKED_PRODUCT


# --- transposed convolutions ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
def test_transposed_convolutions_become_padded_ones(seed: int) -> None:
    """Random strides, dilations and sizes; the cleaned graph has neither output_shape nor auto_pad."""
    rng = random.Random(seed)
    spatial = rng.choice((1, 2))
    kernel = [rng.randint(1, 4) for _ in range(spatial)]
    strides = [rng.randint(1, 3) for _ in range(spatial)]
    extents = [rng.randint(2, 4) for _ in range(spatial)]
    reach = [stride * (extent - 1) + k for stride, extent, k in zip(strides, extents, kernel, strict=True)]
    attributes: dict[str, Any] = {"strides": strides}
    if seed % 2:
        attributes["output_shape"] = [max(1, full + rng.randint(-2, 1)) for full in reach]
        attributes["auto_pad"] = rng.choice(("NOTSET", "SAME_UPPER"))
    else:
        attributes["auto_pad"] = rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    inputs = {"x": floats(1, 2, *extents), "w": floats(2, 3, *kernel), "b": floats(3)}
    model = model_of(helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **attributes), inputs, opset=11)
    rewritten = cleaned(model)
    names = {item.name for node in rewritten.graph.node for item in node.attribute}
    assert not names & {"output_shape", "auto_pad"}
    produced = ReferenceEvaluator(rewritten).run(None, inputs)[0]
    if "output_shape" in attributes:
        assert list(produced.shape[2:]) == attributes["output_shape"]
    elif attributes["auto_pad"] != "VALID" and all(k >= s for k, s in zip(kernel, strides, strict=True)):
        assert list(produced.shape[2:]) == [extent * s for extent, s in zip(extents, strides, strict=True)]


def test_an_output_shape_beyond_the_last_element_is_padded_with_the_bias() -> None:
    inputs = {"x": floats(1, 1, 3, 3), "w": floats(1, 2, 3, 3), "b": floats(2)}
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], strides=[3, 2], output_shape=[10, 8])
    y = built(model_of(node, inputs, opset=11), inputs)[0]
    assert y.shape == (1, 2, 10, 8)
    np.testing.assert_allclose(y[0, :, 9, :], np.broadcast_to(inputs["b"][:, None], (2, 8)), rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [0, 1, 1, 3]])
@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_LOWER"])
def test_output_padding_of_a_stride_or_more_adds_elements_and_zeros(pads: list[int], auto_pad: str) -> None:
    """Neither ONNX Runtime nor ONNX's reference takes it."""
    inputs = {"x": floats(1, 2, 3, 4), "w": floats(2, 3, 2, 3), "b": floats(3)}
    attributes: dict[str, Any] = {"strides": [2, 1], "dilations": [1, 3], "output_padding": [1, 2]}
    attributes |= {"pads": pads} if auto_pad == "NOTSET" else {"auto_pad": auto_pad}
    model = model_of(helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **attributes), inputs, opset=11)
    (wanted,) = transposed_convolution(attributes, list(inputs.values()))
    np.testing.assert_allclose(built(model, inputs)[0], wanted, rtol=1e-4, atol=1e-5)


# --- the others -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "pads", [[0, 0, 0, 0, -2, 0], [0, 0, 0, 1, -6, 0], [0, -3, -2, 0, -5, -1], [0, -3, 2, 0, 0, -1]]
)
def test_negative_pads_cut_what_a_convolution_made(pads: list[int]) -> None:
    """The convolution must not store into the smaller tensor; where nothing is added, there is no border to write."""
    constants = {"w": floats(12, 6, 1), "pads": np.asarray(pads)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Pad", ["c", "pads"], ["y"])]
    x, model = floats(1, 6, 33), onnx_model(nodes, {"x": (1, 6, 33)}, constants=constants, opset=18)
    whole = np.einsum("fci,ncx->nfx", constants["w"], x)
    sides = [(pads[axis], pads[axis + 3]) for axis in range(3)]
    cuts = [slice(max(0, -low), size - max(0, -high)) for (low, high), size in zip(sides, whole.shape, strict=True)]
    added = [(max(0, low), max(0, high)) for low, high in sides]
    assert_same(built(model, {"x": x}), [np.pad(whole[tuple(cuts)], added)], rtol=1e-4)


def test_bfloat16_becomes_integers() -> None:
    nodes = [helper.make_node("Cast", ["x"], ["half"], to=TensorProto.BFLOAT16)]
    nodes += [
        helper.make_node("Add", ["half", "half"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=TensorProto.INT32),
    ]
    model = onnx_model(nodes, {"x": (5,)}, output_type=TensorProto.INT32)
    x = np.array([0.3, -1.75, 2.5, 100.0, -0.5], np.float32)
    assert built(model, {"x": x})[0].tolist() == [0, -3, 5, 200, -1]


@pytest.mark.parametrize("mode", [None, "DCR", "CRD"])
def test_space_to_depth(mode: str | None) -> None:
    x = np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)
    attributes = {} if mode is None else {"mode": mode}
    opset = 13 if mode is None else onnx.defs.onnx_opset_version()
    node = helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2, **attributes)
    check_rewriting(model_of(node, {"x": x}, opset=opset), {"x": x})


@pytest.mark.parametrize("pads", [[-1, 2], [2, -1], [-2, 5], [6, 0]])
def test_wrapped_pads_lie_on_the_torus_of_the_whole_tensor(pads: list[int]) -> None:
    """ONNX Runtime cuts by negative pads first, and makes a torus of what is left."""
    x, constants = np.arange(4, dtype=np.float32), {"pads": np.asarray(pads)}
    node = helper.make_node("Pad", ["x", "pads"], ["y"], mode="wrap")
    y = built(model_of(node, {"x": x}, constants, opset=19), {"x": x})[0]
    assert y.tolist() == wrapped([x, constants["pads"]])[0].tolist()


@pytest.mark.sampled
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("pads", [[3, 2], [1, 9], [6, 0]])
def test_reflections_go_back_and_forth(pads: list[int], axis: int) -> None:
    """Stock TVM reads beyond the tensor where more is reflected than there is."""
    x, constants = np.arange(6, dtype=np.int8).reshape(2, 3), {"pads": np.asarray(pads), "axes": np.asarray([axis])}
    node = helper.make_node("Pad", ["x", "pads", "", "axes"], ["y"], mode="reflect")
    model = model_of(node, {"x": x}, constants)
    assert_same(built(model, {"x": x}), ReferenceEvaluator(model).run(None, {"x": x}))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mode", ["reflect", "wrap", "edge"])
def test_pads_of_an_extent_of_run_time(mode: str) -> None:
    """However few columns there are; of none nothing can be copied, and the run says so."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["found"]),
        helper.make_node("Cast", ["found"], ["columns"], to=TensorProto.FLOAT),
        helper.make_node("Pad", ["columns", "pads"], ["y"], mode=mode),
    ]
    model = onnx_model(nodes, {"x": [8]}, constants={"pads": np.asarray([3, 7, 0, 9])}, opset=19)
    mod, params = relay.frontend.from_onnx(model)
    machine = relay.build(mod, "llvm", params=params).vm(tvm.cpu())
    for count in (8, 2, 1):
        x = (np.arange(8) < count).astype(np.float32)
        np.testing.assert_array_equal(machine["main"](x).numpy(), ReferenceEvaluator(model).run(None, {"x": x})[0])
    with pytest.raises(IndexRangeError, match=f"by pad_{mode}"):
        machine["main"](np.zeros(8, np.float32))


@pytest.mark.parametrize("mode", ["reflect", "wrap", "edge"])
def test_nothing_is_copied_from_an_axis_without_elements(mode: str) -> None:
    inputs, constants = {"x": np.ones((2, 0), np.float32)}, {"pads": np.asarray([0, 1, 0, 2])}
    model = model_of(helper.make_node("Pad", ["x", "pads"], ["y"], mode=mode), inputs, constants, opset=19)
    with pytest.raises(ModelError, match=r"Pad node .* pads axis 1, which has no elements"):
        cleaned(model)


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_the_value_of_a_pad_may_be_known_at_run_time(dtype: Any) -> None:
    inputs, constants = {"x": np.ones((2, 3), dtype), "value": np.asarray(7, dtype)}, {"pads": np.asarray([1, 0, 0, 2])}
    model = model_of(helper.make_node("Pad", ["x", "pads", "value"], ["y"]), inputs, constants)
    assert_same(built(model, inputs), ReferenceEvaluator(model).run(None, inputs))


def test_pads_of_run_time_are_refused_by_name() -> None:
    inputs = {"x": floats(2, 3), "pads": np.asarray([1, 0, 0, 2])}
    with pytest.raises(ModelError, match=r"Pad node .* needs the value of 'pads'"):
        cleaned(model_of(helper.make_node("Pad", ["x", "pads"], ["y"]), inputs))


@pytest.mark.parametrize("alpha", [1.0, 1.702])
def test_swish_of_halves_is_rounded_once(alpha: float) -> None:
    x = (4 * floats(64)).astype(np.float16)
    wide = x.astype(np.float64)
    wanted = wide / (1 + np.exp(-alpha * wide))
    got = built(model_of(helper.make_node("Swish", ["x"], ["y"], alpha=alpha), {"x": x}, opset=24), {"x": x})[0]
    assert (np.abs(got - wanted) <= 0.51 * np.spacing(np.abs(wanted).astype(np.float16))).all()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_local_response_normalization_of_doubles(size: int) -> None:
    """An even window has one channel more behind than before."""
    x = floats(2, 5, 3, 2).astype(np.float64)
    before, behind = (size - 1) // 2, size // 2
    squares = np.stack([(x[:, max(0, c - before) : c + behind + 1] ** 2).sum(1) for c in range(5)], axis=1)
    scale = np.float64(np.float32(0.7)) + np.float64(np.float32(0.2)) / size * squares
    node = helper.make_node("LRN", ["x"], ["y"], size=size, alpha=0.2, beta=0.5, bias=0.7)
    assert_same(built(model_of(node, {"x": x}), {"x": x}), [x / np.sqrt(scale)], rtol=1e-13)


@pytest.mark.parametrize(("extent", "parts"), [(6, 3), (7, 3), (5, 1)])
def test_even_splits(extent: int, parts: int) -> None:
    x = floats(2, extent)
    node = helper.make_node("Split", ["x"], [f"y{i}" for i in range(parts)], axis=1, num_outputs=parts)
    check_rewriting(model_of(node, {"x": x}), {"x": x})


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("shape", [[3, 3, 1, 3], [1], [2, 1, 1], [5, 2, 3, 4], [1, 1, 1, 1]])
def test_expand_broadcasts_both_ways_at_run_time(shape: list[int]) -> None:
    x, wanted = floats(1, 3, 1) if shape[-1] == 3 else floats(2, 1, 4), np.asarray(shape, "int64")
    inputs = {"x": x, "shape": wanted}
    model = model_of(helper.make_node("Expand", ["x", "shape"], ["y"]), inputs)
    assert_same(built(model, inputs), [x * np.ones(shape, x.dtype)])


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [[4, 3, 2], [5], [0], [2, 0]])
@pytest.mark.parametrize("value", [None, np.float64([2.5]), np.int32([-7])])
def test_a_constant_of_a_shape_of_run_time(shape: list[int], value: Any) -> None:
    inputs = {"shape": np.asarray(shape, "int64")}
    attributes = {} if value is None else {"value": numpy_helper.from_array(value)}
    model = model_of(helper.make_node("ConstantOfShape", ["shape"], ["y"], **attributes), inputs)
    wanted = np.zeros(shape, np.float32) if value is None else np.full(shape, value[0])
    assert_same(built(model, inputs), [wanted])


def test_the_mask_of_dropout_is_boolean() -> None:
    x = floats(2, 3)
    got = built(model_of(helper.make_node("Dropout", ["x"], ["y", "mask"]), {"x": x}), {"x": x})
    assert got[1].dtype == np.bool_
    assert got[1].all()
    np.testing.assert_array_equal(got[0], x)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int32, np.int64])
@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_shifts_by_the_width_and_more(dtype: Any, direction: str) -> None:
    width = np.dtype(dtype).itemsize * 8
    x = np.asarray([1, 5, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype).repeat(5)
    count = np.tile(np.asarray([0, 1, width - 1, width, width + 1], dtype), 4)
    if np.issubdtype(dtype, np.signedinteger):
        count[::7] = -1
    node = helper.make_node("BitShift", ["x", "count"], ["y"], direction=direction)
    signed = np.issubdtype(dtype, np.signedinteger)
    model = model_of(node, {"x": x, "count": count}, opset=onnx.defs.onnx_opset_version() if signed else 11)
    wanted = ReferenceEvaluator(model).run(None, {"x": x, "count": count})
    assert_same(built(model, {"x": x, "count": count}), wanted)


def test_boxes_that_overlap_by_the_threshold_stay() -> None:
    """Two boxes with an overlap of exactly 1/2: kept at 0.5, suppressed below."""
    boxes = np.asarray([[[0, 0, 1, 2], [0, 0, 1, 1], [5, 5, 6, 6]]], np.float32)
    scores = np.asarray([[[0.9, 0.8, 0.7]]], np.float32)
    inputs = {"boxes": boxes, "scores": scores}
    for threshold, kept in ((0.5, [0, 1, 2]), (0.49, [0, 2]), (0.0, [0, 2])):
        constants = {"limit": np.asarray([3]), "overlap": np.asarray([threshold], np.float32)}
        node = helper.make_node("NonMaxSuppression", [*inputs, *constants], ["y"])
        rows = built(model_of(node, inputs, constants), inputs)[0]
        assert rows[:, 2].tolist() == kept


@pytest.mark.parametrize("axis", [0, 1, None])
def test_conditions_beyond_the_last_slice_select_nothing(axis: int | None) -> None:
    inputs = {"x": floats(2, 3), "keep": np.tile([True, False, True, True], 2)}
    node = helper.make_node("Compress", ["x", "keep"], ["y"], **({} if axis is None else {"axis": axis}))
    extent = 6 if axis is None else (2, 3)[axis]
    wanted = np.compress(inputs["keep"][:extent], inputs["x"], axis)
    np.testing.assert_array_equal(built(model_of(node, inputs), inputs)[0], wanted)


@pytest.mark.parametrize(("position", "order"), [(None, "xyz"), (-1, "xzy"), (0, "zxy"), (2, "xyz")])
def test_positions_in_sequences(position: int | None, order: str) -> None:
    inputs = {name: floats(2, seed=index) for index, name in enumerate("xyz")}
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "y"], ["pair"]),
        helper.make_node("SequenceInsert", ["pair", "z", *(["at"] if position is not None else [])], ["all"]),
        helper.make_node("ConcatFromSequence", ["all"], ["out"], axis=0),
    ]
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in inputs],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [6])],
        [] if position is None else [numpy_helper.from_array(np.asarray(position), "at")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    np.testing.assert_array_equal(built(model, inputs)[0], np.concatenate([inputs[name] for name in order]))


def test_tables_name_operators_of_onnx() -> None:
    """A misspelt name would never be looked up."""
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()} | {PACKED_PRODUCT}
    for table in (tables.RULES, tables.CONVERTERS, tables.REPLACED):
        assert set(table) <= known
    assert tables.RULES.keys() >= tables.REPLACED


@pytest.mark.sampled
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("shape", [(3, 2, 4), (4, 5, 6), (4, 5, 1), (1, 1, 1)])
@pytest.mark.parametrize("operator", ["ScatterElements", "GatherElements"])
def test_fewer_indices_than_elements_along_other_axes(
    operator: str, shape: tuple[int, ...], axis: int, rng: np.random.Generator
) -> None:
    """Each update goes to its own place along the other axes; stock TVM counts the places as if there were as many."""
    data = floats(4, 5, 6)
    indices = np.zeros(shape, np.int64)
    lines = np.moveaxis(indices, axis, -1)
    for line in np.ndindex(lines.shape[:-1]):
        lines[line] = rng.permutation(data.shape[axis])[: shape[axis]] - data.shape[axis] * rng.integers(2)
    inputs, places = {"x": data, "indices": indices}, list(np.indices(shape))
    places[axis] = indices
    if operator == "ScatterElements":
        inputs["updates"] = floats(*shape)
        wanted = data.copy()
        wanted[tuple(places)] = inputs["updates"]
    else:
        wanted = data[tuple(places)]
    model = model_of(helper.make_node(operator, list(inputs), ["y"], axis=axis), inputs)
    assert_same(built(model, inputs), [wanted])
