"""Rules and checks of single operators: the rewritten graph against ONNX's reference; what is refused, by name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.support.small_models import onnx_model
from tvm_ext import relay
from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.graph import model_from_graph
from tvm_ext.relay_passes.onnx.import_model import checked_graph, clean_graph
from tvm_ext.relay_passes.onnx.operators import tables


def model_of(
    node: onnx.NodeProto, inputs: Mapping[str, Any], constants: Mapping[str, Any] | None = None, opset: int = 18
) -> onnx.ModelProto:
    """`bare_model_of` with the shapes that ONNX infers."""
    return onnx.shape_inference.infer_shapes(bare_model_of(node, inputs, constants, opset))


def bare_model_of(
    node: onnx.NodeProto, inputs: Mapping[str, Any], constants: Mapping[str, Any] | None = None, opset: int = 18
) -> onnx.ModelProto:
    """A model of one node whose inputs have the types and shapes of the arrays given."""
    graph = helper.make_graph(
        [node],
        "test",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(x).dtype), np.shape(x))
            for name, x in inputs.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in node.output if name],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def cleaned(model: onnx.ModelProto) -> onnx.ModelProto:
    result = model_from_graph(clean_graph(checked_graph(model)), lambda _: True)
    result.ir_version = 10
    return result


def built(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> list[Any]:
    mod, params = relay.frontend.from_onnx(model)
    machine = relay.build(mod, "llvm", params=params).vm(tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(np.asarray(x)) for x in inputs.values()])
    return [item.numpy() for item in ([result] if isinstance(result, tvm.runtime.Tensor) else result)]


def assert_same(got: Sequence[Any], wanted: Sequence[Any], rtol: float = 1e-5) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=1e-6)


def check_rewriting(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> None:
    assert_same(
        ReferenceEvaluator(cleaned(model)).run(None, dict(inputs)), ReferenceEvaluator(model).run(None, dict(inputs))
    )


def floats(*shape: int, seed: int = 3) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


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


# --- refusals -------------------------------------------------------------------------------------------------------
IMAGE = {"x": floats(1, 4, 6, 6)}
CONVOLVED = {**IMAGE, "w": floats(8, 4, 3, 3)}
ROW = {"x": floats(2, 5)}


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "constants", "match"),
    [
        ("Conv", CONVOLVED, {"kernel_shape": [5, 5]}, {}, "kernel_shape"),
        ("Conv", CONVOLVED, {"dilations": [0, 1]}, {}, "dilations"),
        ("Conv", CONVOLVED, {"strides": [1, 0]}, {}, "strides"),
        ("Conv", CONVOLVED, {"pads": [0, -1, 0, 0]}, {}, "pads"),
        ("Conv", CONVOLVED, {"group": 3}, {}, "channels"),
        ("Conv", {**CONVOLVED, "b": floats(7)}, {}, {}, "bias"),
        ("ConvTranspose", {**IMAGE, "w": floats(3, 4, 3, 3)}, {}, {}, "channels"),
        ("MaxPool", IMAGE, {"kernel_shape": [0, 2]}, {}, "kernel"),
        ("MaxPool", IMAGE, {"kernel_shape": [2, 2], "dilations": [0, 1]}, {}, "dilations"),
        ("MaxPool", IMAGE, {"kernel_shape": [2, 2], "pads": [2, 0, 0, 0]}, {}, "pads"),
        ("AveragePool", IMAGE, {"kernel_shape": [9, 1]}, {}, "window"),
        ("TopK", ROW, {}, {"k": np.asarray([9])}, "between 1"),
        ("Split", ROW, {"axis": 1}, {"s": np.asarray([2, 2])}, "add up"),
        ("SpaceToDepth", IMAGE, {"blocksize": 4}, {}, "block"),
        ("DepthToSpace", {"x": floats(1, 6, 4, 4)}, {"blocksize": 2}, {}, "block"),
        ("ReduceSum", ROW, {}, {"axes": np.asarray([0, -2])}, "each once"),
        ("Mod", {"x": np.asarray([3])}, {}, {"z": np.asarray([0])}, "zero"),
    ],
)
def test_refused_by_name(
    operator: str,
    inputs: Mapping[str, Any],
    attributes: Mapping[str, Any],
    constants: Mapping[str, Any],
    match: str,
) -> None:
    outputs = ["y", "z"] if operator in ("Split", "TopK") else ["y"]
    node = helper.make_node(operator, [*inputs, *constants], outputs, "culprit", **attributes)
    model = bare_model_of(node, inputs, constants)
    with pytest.raises(ModelError, match=match) as raised:
        clean_graph(checked_graph(_typed(model)))
    assert "culprit" in str(raised.value) or "shapes contradict" in str(raised.value)


@pytest.mark.parametrize("code", [TensorProto.FLOAT8E5M2, TensorProto.INT4])
def test_narrow_types_are_refused(code: int) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], "culprit", to=code)
    model = model_of(node, ROW, opset=21)
    model.graph.output[0].type.tensor_type.elem_type = code
    with pytest.raises(ModelError, match=r"culprit.*element type"):
        relay.frontend.from_onnx(model)


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Outputs get the element type of the first input, which the checker wants declared."""
    code = model.graph.input[0].type.tensor_type.elem_type
    for index, value in enumerate(model.graph.output):
        value.type.tensor_type.elem_type = (
            TensorProto.INT64 if index and model.graph.node[0].op_type == "TopK" else code
        )
    return model


# --- reductions -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["Sum", "Prod", "Max", "Min", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reductions_over_nothing_have_the_neutral_element(what: str, keepdims: int) -> None:
    """The empty tensor is an intermediate one: a slice from 0 to 0."""
    slice_ = helper.make_node("Slice", ["x", "start", "end", "axis"], ["empty"])
    reduce = helper.make_node(f"Reduce{what}", ["empty", "axis"], ["y"], keepdims=keepdims)
    constants = {name: np.asarray([value]) for name, value in (("start", 0), ("end", 0), ("axis", 1))}
    model = onnx_model([slice_, reduce], {"x": [2, 3]}, constants=constants, opset=20)
    x = floats(2, 3)
    wanted = {"Prod": 1.0, "Max": -np.inf, "Min": np.inf, "LogSum": -np.inf, "LogSumExp": -np.inf}.get(what, 0.0)
    got = ReferenceEvaluator(cleaned(model)).run(None, {"x": x})[0]
    np.testing.assert_array_equal(got, np.full((2, 1) if keepdims else (2,), wanted, np.float32))


@pytest.mark.parametrize("what", ["Sum", "Mean", "Max", "L1", "L2", "LogSum", "LogSumExp", "SumSquare", "Prod"])
def test_reductions_over_no_axes_treat_single_elements(what: str) -> None:
    x = np.abs(floats(2, 3)) + 0.5
    node = helper.make_node(f"Reduce{what}", ["x"], ["y"], noop_with_empty_axes=1)
    wanted = {"LogSum": np.log(x), "SumSquare": x * x}.get(what, x)
    np.testing.assert_allclose(ReferenceEvaluator(cleaned(model_of(node, {"x": x}))).run(None, {"x": x})[0], wanted)


INFINITE_ROWS = np.array(
    [
        [1, 2, 3, -np.inf], [-np.inf] * 4, [np.inf, 1, 2, 3], [np.inf, np.inf, 0, -np.inf], [np.nan, 1, 2, 3],
        [np.inf, np.nan, 0, 0], [-np.inf, -np.inf, -np.inf, 5], [88, 89, 90, 91], [3e38] * 4,
    ],
    np.float32,
)  # fmt: skip


@pytest.mark.parametrize("keepdims", [0, 1])
def test_log_sum_exp_of_infinities_is_what_onnx_runtime_says(keepdims: int) -> None:
    node = helper.make_node("ReduceLogSumExp", ["x", "axes"], ["y"], keepdims=keepdims)
    assert_as_onnx_runtime(model_of(node, {"x": INFINITE_ROWS}, {"axes": np.array([1])}), INFINITE_ROWS)


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_softmax_of_infinities_is_what_onnx_runtime_says(operator: str) -> None:
    """NaN for rows of -inf or with inf; 0 for a -inf among numbers."""
    assert_as_onnx_runtime(model_of(helper.make_node(operator, ["x"], ["y"]), {"x": INFINITE_ROWS}), INFINITE_ROWS)


def assert_as_onnx_runtime(model: onnx.ModelProto, x: Any) -> None:
    runtime = pytest.importorskip("onnxruntime")
    wanted = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    assert_same(built(model, {"x": x}), wanted)


def test_means_of_integers_are_truncated() -> None:
    x = np.asarray([[-3, -4], [7, 8], [2, 2]], np.int32)
    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=[1], keepdims=0)
    np.testing.assert_array_equal(built(model_of(node, {"x": x}, opset=13), {"x": x})[0], [-3, 7, 2])


# --- the others -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [None, "DCR", "CRD"])
def test_space_to_depth(mode: str | None) -> None:
    x = np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)
    attributes = {} if mode is None else {"mode": mode}
    opset = 13 if mode is None else onnx.defs.onnx_opset_version()
    node = helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2, **attributes)
    check_rewriting(model_of(node, {"x": x}, opset=opset), {"x": x})


@pytest.mark.parametrize(("extent", "parts"), [(6, 3), (7, 3), (5, 1)])
def test_even_splits(extent: int, parts: int) -> None:
    x = floats(2, extent)
    node = helper.make_node("Split", ["x"], [f"y{i}" for i in range(parts)], axis=1, num_outputs=parts)
    check_rewriting(model_of(node, {"x": x}), {"x": x})


@pytest.mark.parametrize("shape", [[3, 3, 1, 3], [1], [2, 1, 1], [5, 2, 3, 4], [1, 1, 1, 1]])
def test_expand_broadcasts_both_ways_at_run_time(shape: list[int]) -> None:
    x, wanted = floats(1, 3, 1) if shape[-1] == 3 else floats(2, 1, 4), np.asarray(shape, "int64")
    inputs = {"x": x, "shape": wanted}
    model = model_of(helper.make_node("Expand", ["x", "shape"], ["y"]), inputs)
    assert_same(built(model, inputs), [x * np.ones(shape, x.dtype)])


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


def test_operators_of_foreign_domains_are_not_taken_for_onnxs() -> None:
    node = helper.make_node("Add", ["x", "x"], ["y"], "culprit", domain="my.domain")
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.domain", 1)]
    with pytest.raises(ModelError, match=r"my\.domain\.Add"):
        relay.frontend.from_onnx(helper.make_model(graph, opset_imports=opsets, ir_version=10))


# --- attention ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(10))
def test_random_attention(seed: int) -> None:
    rng = random.Random(seed)
    groups, key_heads, features, queries, keys = rng.choice((1, 3)), 2, 4, rng.choice((1, 3)), rng.choice((3, 5))
    inputs = {
        "q": floats(2, groups * key_heads, queries, features, seed=seed),
        "k": floats(2, key_heads, keys, features, seed=seed + 50),
        "v": floats(2, key_heads, keys, features + 1, seed=seed + 90),
    }
    names = ["q", "k", "v", ""]
    past = rng.choice((0, 2))
    if rng.random() < 0.6:
        mask = np.random.default_rng(seed).random((queries, keys + past)) < 0.5
        mask[0] = False
        inputs["mask"] = mask if rng.random() < 0.5 else np.where(mask, floats(*mask.shape), -np.inf)
        inputs["mask"] = inputs["mask"].astype(np.bool_ if inputs["mask"].dtype == np.bool_ else np.float32)
        names[3] = "mask"
    if past:
        inputs["pk"], inputs["pv"] = floats(2, key_heads, past, features), floats(2, key_heads, past, features + 1)
        names += ["pk", "pv"]
    attributes: dict[str, Any] = {"is_causal": rng.choice((0, 1)), "qk_matmul_output_mode": rng.choice((2, 3))}
    if rng.random() < 0.3:
        attributes["softcap"] = 2.0
    if rng.random() < 0.3:
        attributes["scale"] = 0.3
    outputs = ["y", "present_key", "present_value", "scores"] if past else ["y", "", "", "scores"]
    node = helper.make_node("Attention", names, outputs, **attributes)
    model = model_of(node, inputs, opset=24)
    wanted = [value for value, name in zip(_reference(model, inputs), outputs, strict=True) if name]
    with np.errstate(all="ignore"):
        got = ReferenceEvaluator(cleaned(model)).run(None, inputs)
    assert_same(got, wanted)
    if seed < 2:
        assert_same(built(model, inputs), wanted, rtol=1e-4)


def _reference(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> list[Any]:
    """All four outputs, for the evaluator cannot leave one out."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    names = ["y", "present_key", "present_value", "scores"]
    whole.graph.node[0].output[:] = names
    del whole.graph.output[:]
    whole.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    return list(ReferenceEvaluator(whole).run(None, dict(inputs)))


def test_tables_name_operators_of_onnx() -> None:
    """A misspelt name would never be looked up."""
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    for table in (tables.CHECKS, tables.RULES, tables.CONVERTERS, tables.REPLACED):
        assert set(table) <= known
    assert tables.RULES.keys() >= tables.REPLACED


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


def test_more_indices_than_elements_are_refused() -> None:
    inputs = {"x": floats(2, 3), "indices": np.zeros((2, 4), np.int64), "updates": floats(2, 4)}
    model = model_of(helper.make_node("ScatterElements", list(inputs), ["y"], axis=0), inputs)
    with pytest.raises(ModelError, match=r"ScatterElements node .* has indices of shape \[2, 4\] for data of \[2, 3\]"):
        built(model, inputs)
