"""The cleaning steps: each keeps the meaning, changes what it should, and leaves its argument alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper

from tests.support.quick_target import UNOPTIMISED
from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.clean import (
    as_identifier,
    drop_dead_nodes,
    drop_identities,
    fold_gemm_attributes,
    rename_for_code,
)
from tvm_ext.relay_passes.onnx.decompose import decompose_operators
from tvm_ext.relay_passes.onnx.fold_constants import fold_constants
from tvm_ext.relay_passes.onnx.graph import OnnxGraph
from tvm_ext.relay_passes.onnx.import_model import clean_graph, import_model

Build = Callable[..., onnx.ModelProto]
BuildGraph = Callable[..., OnnxGraph]
SameMeaning = Callable[..., None]


def _operators(graph: OnnxGraph) -> list[str]:
    return [node.op_type for node in graph.nodes]


def test_sum_becomes_adds(build_graph: BuildGraph, same_meaning: SameMeaning) -> None:
    inputs = {name: [2, 3] for name in "abc"}
    graph = build_graph([helper.make_node("Sum", ["a", "b", "c"], ["y"])], inputs=inputs)
    after = decompose_operators(graph)
    assert _operators(after) == ["Add", "Add"]
    assert _operators(graph) == ["Sum"]
    same_meaning(graph, after, inputs)
    single = decompose_operators(build_graph([helper.make_node("Sum", ["a"], ["y"])], inputs={"a": [2]}))
    assert _operators(single) == ["Identity"]


def test_identities_and_dropouts_go(build_graph: BuildGraph, same_meaning: SameMeaning) -> None:
    graph = build_graph(
        [
            helper.make_node("Identity", ["x"], ["a"]),
            helper.make_node("Dropout", ["a"], ["b", "unread_mask"]),
            helper.make_node("Relu", ["b"], ["c"]),
            helper.make_node("Dropout", ["c"], ["y"]),
        ]
    )
    after = drop_identities(graph)
    assert _operators(after) == ["Relu", "Identity"]
    assert after.nodes[0].input[0] == "x"
    same_meaning(graph, after, {"x": (2, 3)})


def test_dropout_with_a_read_mask_or_in_training_stays(build_graph: BuildGraph) -> None:
    graph = build_graph([helper.make_node("Dropout", ["x"], ["a", "y"])], output_type=TensorProto.BOOL)
    assert _operators(drop_identities(graph)) == ["Dropout"]
    constants = {"ratio": np.float32(0.5), "training": np.bool_(True)}
    graph = build_graph(
        [helper.make_node("Dropout", ["x", "ratio", "training"], ["a"]), helper.make_node("Relu", ["a"], ["y"])],
        constants=constants,
    )
    assert _operators(drop_identities(graph)) == ["Dropout", "Relu"]


def test_identity_captured_by_a_branch(build_model: Build) -> None:
    """A branch of If reads the identity's output from the outer graph."""
    branch = [
        helper.make_graph(
            [helper.make_node(op, ["outer"], [f"{op}_out"])],
            op,
            [],
            [helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, [2, 3])],
        )
        for op in ("Relu", "Neg")
    ]
    model = build_model(
        [
            helper.make_node("Identity", ["net/x"], ["outer"]),
            helper.make_node("If", ["flag"], ["y"], then_branch=branch[0], else_branch=branch[1]),
        ],
        inputs={"net/x": [2, 3]},
    )
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    mod, _ = import_model(model)
    assert [parameter.name for parameter in mod["main"].params] == ["net_x", "flag"]


def test_initializers_listed_as_inputs(build_model: Build) -> None:
    model = build_model([helper.make_node("Add", ["x", "w"], ["y"])], constants={"w": np.ones(3, np.float32)})
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [3]))
    mod, params = import_model(model)
    assert [parameter.name for parameter in mod["main"].params] == ["x", "w"]
    assert int(mod["main"].attrs["num_input"]) == 1
    assert list(params) == ["w"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu_0/data_0", "gpu_0_data_0"),
        ("onnx::MatMul_12", "MatMul_12"),
        ("3x3:0", "tensor_3x3_0"),
        ("größe", "gr__e"),
        ("", "tensor_"),
        ("fine_1", "fine_1"),
    ],
)
def test_as_identifier(name: str, expected: str) -> None:
    assert as_identifier(name) == expected


def test_renaming_is_safe_from_collisions(build_graph: BuildGraph) -> None:
    nodes = [helper.make_node("Add", ["a/b", "a.b"], ["t"]), helper.make_node("Add", ["t", "a_b"], ["y"])]
    graph = build_graph(nodes, inputs={"a/b": [2], "a.b": [2], "a_b": [2]})
    renamed, original = rename_for_code(graph)
    assert renamed.input_names == ("a_b_1", "a_b_2", "a_b")
    assert original == {"a_b_1": "a/b", "a_b_2": "a.b"}
    assert list(renamed.nodes[0].input) == ["a_b_1", "a_b_2"]
    assert list(graph.nodes[0].input) == ["a/b", "a.b"]


def test_original_names_travel_with_the_module(build_model: Build) -> None:
    nodes = [helper.make_node("Add", ["net/x", "net/w"], ["net/y"])]
    model = build_model(nodes, inputs={"net/x": [3]}, outputs=["net/y"], constants={"net/w": np.ones(3, np.float32)})
    mod, params = import_model(model)
    attributes = mod["main"].attrs
    assert dict(attributes["tvm_ext.original_names"]) == {"net_x": "net/x", "net_w": "net/w"}
    assert list(attributes["tvm_ext.output_names"]) == ["net/y"]
    assert list(params) == ["net_w"]


def test_shape_chain_is_folded(build_graph: BuildGraph, same_meaning: SameMeaning) -> None:
    """What PyTorch writes for x.view(x.size(0), -1) after a reshape of known shape."""
    constants = {"zero": np.array(0), "axes": np.array([0]), "minus": np.array([-1]), "first": np.array([2, 4, 3])}
    graph = build_graph(
        [
            helper.make_node("Reshape", ["x", "first"], ["a"]),
            helper.make_node("Shape", ["a"], ["shape"]),
            helper.make_node("Gather", ["shape", "zero"], ["size"], axis=0),
            helper.make_node("Unsqueeze", ["size", "axes"], ["sizes"]),
            helper.make_node("Concat", ["sizes", "minus"], ["target"], axis=0),
            helper.make_node("Reshape", ["a", "target"], ["b"]),
            helper.make_node("Shape", ["b"], ["again"]),
            helper.make_node("Reshape", ["b", "again"], ["y"]),
        ],
        inputs={"x": [2, 12]},
        constants=constants,
    )
    after = fold_constants(graph)
    assert _operators(after) == ["Reshape", "Reshape", "Reshape"]
    same_meaning(graph, after, {"x": (2, 12)})


def test_batch_norm_of_a_weight_in_training_mode_is_folded(build_graph: BuildGraph, rng: np.random.Generator) -> None:
    """Standardised weights as torch exports them: the weight's own mean and variance, not the running ones."""
    weight = rng.normal(3, 2, (1, 4, 6)).astype(np.float32)
    constants = {"w": weight, "s": np.full(4, 2, np.float32), "b": np.zeros(4, np.float32)}
    normalize = helper.make_node("BatchNormalization", [*"wsbbs"], [*"nmv"], training_mode=1, epsilon=1e-6)
    graph = build_graph(
        [normalize, helper.make_node("Mul", ["x", "n"], ["y"])], constants=constants, inputs={"x": [1, 4, 6]}
    )
    after = fold_constants(graph)
    wide = weight.astype("f8") - weight.mean((0, 2), dtype="f8", keepdims=True)
    expected = 2 * wide / np.sqrt(wide.var((0, 2), keepdims=True) + 1e-6)
    assert _operators(after) == ["Mul"]
    np.testing.assert_allclose(after.constants["n"], expected, rtol=1e-5, atol=1e-6)


def test_dynamic_shapes_are_not_folded(build_graph: BuildGraph) -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Reshape", ["x", "s"], ["y"])]
    assert _operators(fold_constants(build_graph(nodes, inputs={"x": ["n", 3]}))) == ["Shape", "Reshape"]
    start = [helper.make_node("Shape", ["x"], ["y"], start=1, end=-1)]
    graph = fold_constants(build_graph(start, inputs={"x": [2, 3, 4]}, output_type=TensorProto.INT64))
    np.testing.assert_array_equal(graph.constants["y"], [3])


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ({"value_int": 3}, np.int64(3)),
        ({"value_ints": [1, 2]}, np.array([1, 2])),
        ({"value_float": 0.5}, np.float32(0.5)),
        ({"value_floats": [0.5]}, np.array([0.5], np.float32)),
    ],
)
def test_constant_nodes(build_graph: BuildGraph, attribute: dict[str, Any], expected: Any) -> None:
    graph = fold_constants(
        build_graph([helper.make_node("Constant", [], ["y"], **attribute)], output_type=TensorProto.UNDEFINED)
    )
    assert graph.constants["y"].dtype == expected.dtype
    np.testing.assert_array_equal(graph.constants["y"], expected)


def _filled(build_graph: BuildGraph, shape: list[int]) -> OnnxGraph:
    return build_graph(
        [helper.make_node("ConstantOfShape", ["s"], ["w"], "fill"), helper.make_node("Add", ["x", "w"], ["y"])],
        constants={"s": np.array(shape)},
    )


def test_constant_of_shape_is_bounded(build_graph: BuildGraph) -> None:
    assert fold_constants(_filled(build_graph, [2, 3])).constants["w"].shape == (2, 3)
    for shape in ([10**6, 10**6], [10**6] * 4, [-3]):
        with pytest.raises(ModelError, match="ConstantOfShape node 'fill'"):
            fold_constants(_filled(build_graph, shape))


def test_expansions_of_constants_are_bounded(build_graph: BuildGraph) -> None:
    constants = {"s": np.array([40_000, 40_000]), "v": np.ones((1, 1), np.float32)}
    nodes = [helper.make_node("Expand", ["v", "s"], ["w"]), helper.make_node("ReduceSum", ["w"], ["y"])]
    assert "Expand" in _operators(fold_constants(build_graph(nodes, constants=constants)))


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bias", ["none", "vector", "scalar"])
def test_gemm_attributes_go_into_constants(
    build_graph: BuildGraph, same_meaning: SameMeaning, transposed: int, bias: str
) -> None:
    generator = np.random.default_rng(0)
    constants = {"w": generator.standard_normal((4, 3) if transposed else (3, 4)).astype(np.float32)}
    if bias != "none":
        constants["c"] = generator.standard_normal(4 if bias == "vector" else ()).astype(np.float32)
    operands = ["x", "w", *(["c"] if bias != "none" else [])]
    graph = build_graph(
        [helper.make_node("Gemm", operands, ["y"], alpha=0.5, beta=2.0, transB=transposed)], constants=constants
    )
    after = fold_gemm_attributes(graph)
    assert {item.name for item in after.nodes[0].attribute} == {"transA"}
    same_meaning(graph, after, {"x": (2, 3)})


@pytest.mark.parametrize(
    "nodes", [[helper.make_node("LpNormalization", ["x"], ["y"], p=p, axis=axis)] for p in (1, 2) for axis in (-1, 0)]
)
def test_lp_normalization(build_graph: BuildGraph, same_meaning: SameMeaning, nodes: list[onnx.NodeProto]) -> None:
    graph = build_graph(nodes, opset=22)
    after = decompose_operators(graph)
    assert "LpNormalization" not in _operators(after)
    same_meaning(graph, after, {"x": (2, 3)})


@pytest.mark.parametrize(("positive", "negative"), [(1, 0), (0, 1), (0, 0), (1, 1)])
def test_one_sided_is_inf(build_model: Build, positive: int, negative: int) -> None:
    model = build_model(
        [helper.make_node("IsInf", ["x"], ["y"], detect_positive=positive, detect_negative=negative)],
        inputs={"x": [5]},
        opset=20,
        output_type=TensorProto.BOOL,
    )
    mod, _ = import_model(model)
    machine = tvm.relax.VirtualMachine(tvm.compile(mod, UNOPTIMISED), tvm.cpu())
    x = np.array([np.inf, -np.inf, np.nan, 1.0, -1.0], np.float32)
    expected = (np.isposinf(x) & bool(positive)) | (np.isneginf(x) & bool(negative))
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), expected)


def test_operators_defined_by_others_are_expanded(build_model: Build) -> None:
    """Celu has no converter; ONNX defines it by simpler operators."""
    mod, _ = import_model(build_model([helper.make_node("Celu", ["x"], ["y"], alpha=2.0)]))
    assert [int(dim) for dim in mod["main"].ret_ty.shape] == [2, 3]


def test_local_functions_are_expanded(build_model: Build) -> None:
    body = [helper.make_node("Relu", ["a"], ["t"]), helper.make_node("Neg", ["t"], ["b"])]
    model = build_model([helper.make_node("Flip", ["x"], ["y"], domain="local")])
    opset = helper.make_opsetid("", 17)
    model.functions.append(helper.make_function("local", "Flip", ["a"], ["b"], body, [opset]))
    model.opset_import.append(helper.make_opsetid("local", 1))
    mod, _ = import_model(model)
    assert len(mod["main"].params) == 1


def test_dead_nodes_and_constants_go(build_graph: BuildGraph) -> None:
    nodes = [helper.make_node("Add", ["x", "w"], ["unread"]), helper.make_node("Relu", ["x"], ["y"])]
    after = drop_dead_nodes(build_graph(nodes, constants={"w": np.ones(3, np.float32)}))
    assert _operators(after) == ["Relu"]
    assert not after.constants


def test_reduction_over_nothing(build_graph: BuildGraph) -> None:
    graph = build_graph([helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], inputs={"x": [0, 3]})
    assert fold_constants(graph).constants["y"] == 0.0


def test_cleaning_does_not_change_its_argument(build_model: Build) -> None:
    constants = {"w": np.ones((4, 3, 1, 1), np.float32), **{name: np.ones(4, np.float32) for name in "sbmv"}}
    model = build_model(
        [
            helper.make_node("Identity", ["net/x"], ["a"]),
            helper.make_node("Conv", ["a", "w"], ["c"]),
            helper.make_node("BatchNormalization", ["c", *"sbmv"], ["y"]),
        ],
        inputs={"net/x": [1, 3, 2, 2]},
        constants=constants,
    )
    before = model.SerializeToString()
    import_model(model, {"net/x": [2, 3, 2, 2]})
    assert model.SerializeToString() == before


def test_cleaning_is_idempotent(build_graph: BuildGraph) -> None:
    constants = {"w": np.ones((4, 3, 1, 1), np.float32), "b": np.ones(4, np.float32)}
    graph = clean_graph(
        build_graph([helper.make_node("Conv", ["x", "w", "b"], ["y"])], inputs={"x": [1, 3, 2, 2]}, constants=constants)
    )
    again = clean_graph(graph)
    assert _operators(again) == _operators(graph) == ["Conv", "Add"]


@pytest.mark.parametrize("shape", [[3, 0, 5], [0]])
def test_empty_outputs_are_views_of_an_empty_input(build_model: Build, shape: list[int]) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Cast", ["r"], ["y"], to=TensorProto.INT32)]
    mod, params = import_model(build_model(nodes, inputs={"x": shape}, output_type=TensorProto.INT32))
    assert not params
    machine = tvm.relax.VirtualMachine(tvm.compile(mod, UNOPTIMISED), tvm.cpu())
    result = machine["main"](tvm.runtime.tensor(np.zeros(shape, np.float32))).numpy()
    assert result.shape == tuple(shape)
    assert result.dtype == np.int32


def test_empty_operands_leave_concat(build_graph: BuildGraph) -> None:
    constants = {"nothing": np.zeros((2, 0), np.float32)}
    graph = clean_graph(
        build_graph([helper.make_node("Concat", ["nothing", "x", "x"], ["y"], axis=1)], constants=constants)
    )
    assert list(graph.nodes[0].input) == ["x", "x"]
    assert not graph.constants
