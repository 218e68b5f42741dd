"""Operators of ai.onnx.ml: what they are written as, run by ONNX Runtime, beside its own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from tvm_ext import InferenceSession, relay
from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.graph import model_from_graph
from tvm_ext.relay_passes.onnx.import_model import checked_graph, clean_graph, expand_unsupported
from tvm_ext.relay_passes.onnx.operators.tables import LEARNED

DOMAIN = "ai.onnx.ml"


def _node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), outputs.split(), f"make {outputs}", domain=DOMAIN, **attributes)


def _model(nodes: Sequence[onnx.NodeProto], x: Any, constants: dict[str, Any] | None = None) -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        nodes,
        "learned",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_empty_tensor_value_info(name) for name in nodes[-1].output],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 4)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    for declared, value in zip(model.graph.output, _run(model, x), strict=True):
        code = helper.np_dtype_to_tensor_dtype(value.dtype)
        declared.CopyFrom(helper.make_tensor_value_info(declared.name, code, value.shape))
    return model


def _run(model: onnx.ModelProto, x: Any) -> list[Any]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": x}))


def _expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    result = model_from_graph(clean_graph(expand_unsupported(checked_graph(model), model)), lambda _: True)
    result.ir_version = 10
    return result


def _assert_same(nodes: onnx.NodeProto | Sequence[onnx.NodeProto], x: Any, constants: Any = None) -> None:
    model = _model([nodes] if isinstance(nodes, onnx.NodeProto) else nodes, x, constants)
    expanded = _expanded(model)
    assert not {node.op_type for node in expanded.graph.node} & LEARNED.keys()
    for got, wanted in zip(_run(expanded, x), _run(model, x), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def _rows(*shape: int, seed: int = 3) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def test_scaling_and_selecting() -> None:
    x = _rows(5, 4)
    x[1] = 0
    _assert_same(_node("Scaler", "x", "y", offset=[0.1, 0.2, 0.3, 0.4], scale=[2.0, 1.0, 0.5, 3.0]), x)
    _assert_same(_node("Scaler", "x", "y", offset=[0.5], scale=[2.0]), (9 * x).astype("int64"))
    for norm in ("MAX", "L1", "L2"):
        _assert_same(_node("Normalizer", "x", "y", norm=norm), x)
    _assert_same(_node("Binarizer", "x", "y", threshold=0.25), x)
    x[2, 3] = np.nan
    imputed = [1.0, 2.0, 3.0, 4.0]
    _assert_same(_node("Imputer", "x", "y", imputed_value_floats=imputed, replaced_value_float=float("nan")), x)
    _assert_same(
        _node("Imputer", "x", "y", imputed_value_int64s=[7], replaced_value_int64=0), np.arange(6).reshape(2, 3)
    )
    _assert_same(_node("ArrayFeatureExtractor", "x i", "y"), x, {"i": np.array([3, 0])})


def test_numbers_are_encoded() -> None:
    codes = np.array([[3, 5], [7, 4]])
    _assert_same(_node("LabelEncoder", "x", "y", keys_int64s=[5, 3, 7, 3], values_floats=[0.5, 1.5, 2.5, 9.0]), codes)
    _assert_same(_node("LabelEncoder", "x", "y", keys_int64s=[5, 3], values_int64s=[10, 20], default_int64=99), codes)
    _assert_same(
        _node("LabelEncoder", "x", "y", keys_floats=[5.0, 3.5], values_int64s=[10, 20]),
        np.array([3.5, 5, 1], "float32"),
    )
    tensors = {
        name: numpy_helper.from_array(np.array(value, "int64"))
        for name, value in (("keys_tensor", [4, 7]), ("values_tensor", [1, 2]), ("default_tensor", [5]))
    }
    _assert_same(_node("LabelEncoder", "x", "y", **tensors), codes)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_linear_models(transform: str) -> None:
    x, weights = _rows(6, 4), _rows(3, 4, seed=7)
    _assert_same(
        _node(
            "LinearRegressor",
            "x",
            "y",
            coefficients=weights.reshape(-1),
            targets=3,
            intercepts=[0.5, -0.5, 1.0],
            post_transform=transform,
        ),
        x,
    )
    _assert_same(_node("LinearRegressor", "x", "y", coefficients=weights[0]), x)
    _assert_same(
        _node(
            "LinearClassifier",
            "x",
            "label scores",
            coefficients=weights.reshape(-1),
            intercepts=[0.5, -0.5, 1.0],
            classlabels_ints=[4, 2, 9],
            post_transform=transform,
        ),
        x,
    )


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_linear_models_of_two_classes(transform: str) -> None:
    own: dict[str, Any] = {"classlabels_ints": [3, 8], "post_transform": transform}
    _assert_same(
        _node("LinearClassifier", "x", "label scores", coefficients=_rows(4), intercepts=[0.1], **own), _rows(6, 4)
    )
    both = {"coefficients": _rows(8), "intercepts": [0.1, -0.1]}
    _assert_same(_node("LinearClassifier", "x", "label scores", **both, **own), _rows(6, 4))


def _forest(
    kind: str, count: int, *, ids: Sequence[int], seed: int, trees: int = 3, depth: int = 4, positive: bool = False,
    mode: str = "BRANCH_LEQ", missing: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The attributes of trees drawn at random, whose leaves have a weight for each of ``ids``."""
    draw = np.random.default_rng(seed)
    names = "treeids nodeids featureids values modes truenodeids falsenodeids missing_value_tracks_true"
    nodes: dict[str, list[Any]] = {name: [] for name in names.split()}
    weights: dict[str, list[Any]] = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}
    for tree in range(trees):
        rows, waiting, last = [], [(0, 0)], 0
        while waiting:
            own, level = waiting.pop()
            branches = level < depth and (level == 0 or draw.random() < 0.7)
            rows.append((own, last + 1 if branches else 0, last + 2 if branches else 0, branches))
            if branches:
                waiting += [(last + 1, level + 1), (last + 2, level + 1)]
                last += 2
            for target in () if branches else ids:
                weight = draw.random() / trees if positive else draw.standard_normal()
                for name, value in (("treeids", tree), ("nodeids", own), ("ids", target), ("weights", weight)):
                    weights[name].append(value)
        for own, yes, no, branches in sorted(rows):
            values = (
                tree, own, int(draw.integers(4)), float(np.float32(draw.standard_normal())),
                mode if branches else "LEAF", yes, no, int(missing and branches and draw.random() < 0.5),
            )  # fmt: skip
            for name, value in zip(nodes, values, strict=True):
                nodes[name].append(value)
    return {f"nodes_{name}": value for name, value in nodes.items()} | {
        f"{kind}_{name}": value for name, value in weights.items()
    }


@pytest.mark.sampled
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("mode", ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GT", "BRANCH_GTE"])
def test_trees_of_numbers(aggregate: str, mode: str) -> None:
    for count in (1, 3):
        trees = _forest("target", count, ids=range(count), seed=count, mode=mode)
        _assert_same(
            _node(
                "TreeEnsembleRegressor",
                "x",
                "y",
                n_targets=count,
                aggregate_function=aggregate,
                base_values=_rows(count),
                **trees,
            ),
            _rows(9, 4),
        )


def test_trees_follow_missing_values() -> None:
    x = _rows(20, 4)
    x[::2, 1] = np.nan
    x[::3, 2] = np.nan
    trees = _forest("target", 1, ids=[0], seed=5, missing=True)
    _assert_same(_node("TreeEnsembleRegressor", "x", "y", n_targets=1, **trees), x)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("positive", [True, False])
def test_trees_of_classes(transform: str, positive: bool) -> None:
    for labels, ids in (([5, 3, 8], range(3)), ([7, 2], [0]), ([7, 2], [1]), ([7, 2], [0, 1])):
        for seed in range(4):
            trees = _forest("class", len(labels), ids=ids, seed=seed, positive=positive)
            own = {"classlabels_int64s": labels, "post_transform": transform}
            _assert_same(_node("TreeEnsembleClassifier", "x", "label scores", **own, **trees), _rows(30, 4))


def test_a_pipeline_is_compiled() -> None:
    """A scaler before trees: one reads what the other makes. The batch stays open."""
    x = _rows(7, 4)
    trees = _forest("class", 3, ids=range(3), seed=1, depth=6)
    scaler = _node("Scaler", "x", "scaled", offset=[0.1] * 4, scale=[2.0] * 4)
    model = _model(
        [scaler, _node("TreeEnsembleClassifier", "scaled", "label scores", classlabels_int64s=[4, 5, 6], **trees)], x
    )
    mod, params = relay.frontend.from_onnx(model)
    module = relay.GraphModule(relay.build(mod, "llvm", params=params)["default"](tvm.cpu()))
    module.run(x=x)
    wanted = _run(model, x)
    np.testing.assert_array_equal(module.get_output(0).numpy(), wanted[0])
    np.testing.assert_allclose(module.get_output(1).numpy(), wanted[1], rtol=1e-5)


def test_what_is_refused_says_so() -> None:
    x = _rows(3, 4)
    texts = _node("LinearClassifier", "x", "label scores", coefficients=_rows(12), classlabels_strings=["a", "b", "c"])
    graph = helper.make_graph(
        [texts], "texts", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [3, 3])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    with pytest.raises(ModelError, match="labels that are texts"):
        relay.frontend.from_onnx(model)
    probit = _node("LinearRegressor", "x", "y", coefficients=_rows(4), post_transform="PROBIT")
    with pytest.raises(ModelError, match="the post_transform PROBIT"):
        relay.frontend.from_onnx(_model([probit], x))
    labelled = _node("LinearClassifier", "x", "label scores", coefficients=_rows(12), classlabels_ints=[1, 2, 3])
    maps = _node("ZipMap", "scores", "maps", classlabels_int64s=[1, 2, 3])
    model.graph.ClearField("node")
    model.graph.node.extend([labelled, maps])
    model.graph.ClearField("output")
    map_type = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model.graph.output.append(helper.make_value_info("maps", helper.make_sequence_type_proto(map_type)))
    with pytest.raises(ModelError, match=r"ai\.onnx\.ml\.ZipMap"):
        relay.frontend.from_onnx(model)
    (found,) = InferenceSession(model).run(None, {"x": x})
    assert len(found) == 3
