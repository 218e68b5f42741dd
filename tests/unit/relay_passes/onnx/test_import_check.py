"""Structure: what is wrong with a graph is named."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.import_model import import_model

Build = Callable[..., onnx.ModelProto]


def test_cycle_is_named(build_model: Build) -> None:
    model = build_model(
        [
            helper.make_node("Add", ["x", "c"], ["a"], "first"),
            helper.make_node("Relu", ["a"], ["b"], "second"),
            helper.make_node("Neg", ["b"], ["c"], "third"),
            helper.make_node("Abs", ["c"], ["y"], "outside"),
        ]
    )
    with pytest.raises(ModelError, match="cycle") as caught:
        import_model(model)
    for name in ("first", "second", "third"):
        assert f"'{name}'" in caught.value.problem
    assert "outside" not in caught.value.problem
    assert "Add node 'first' -> Relu node 'second'" in caught.value.problem


def test_node_that_reads_itself(build_model: Build) -> None:
    with pytest.raises(ModelError, match="cycle"):
        import_model(build_model([helper.make_node("Add", ["x", "y"], ["y"], "loop")]))


def test_unsorted_nodes_are_sorted(build_model: Build) -> None:
    nodes = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Neg", ["x"], ["a"])]
    mod, _ = import_model(build_model(nodes))
    assert len(mod["main"].params) == 1


def test_deep_chain_does_not_overflow_the_stack(build_model: Build) -> None:
    names = ["x", *(f"t{index}" for index in range(3000)), "y"]
    nodes = [helper.make_node("Identity", [given], [made]) for given, made in itertools.pairwise(names)]
    import_model(build_model(list(reversed(nodes))))


def test_unsupported_operators_are_all_listed(build_model: Build) -> None:
    model = build_model(
        [
            helper.make_node("Multinomial", ["x"], ["a"], "dice"),
            helper.make_node("Magic", ["a"], ["b"], "wand", domain="org.example"),
            helper.make_node("Magic", ["b"], ["c"], "hat", domain="org.example"),
            helper.make_node("Relu", ["c"], ["y"], "fine"),
        ],
        inputs={"x": [3, 3]},
    )
    model.opset_import.append(helper.make_opsetid("org.example", 4))
    with pytest.raises(ModelError, match=r"2 operator\(s\)") as caught:
        import_model(model)
    problem = caught.value.problem
    assert "ai.onnx.Multinomial (opset 17): nodes 'dice'" in problem
    assert "org.example.Magic (opset 4): nodes 'wand', 'hat'" in problem
    assert "Relu" not in problem


def test_unsupported_but_dead_is_fine(build_model: Build) -> None:
    nodes = [helper.make_node("Multinomial", ["x"], ["unread"]), helper.make_node("Relu", ["x"], ["y"])]
    import_model(build_model(nodes, inputs={"x": [3, 3]}))


def test_duplicate_definitions(build_model: Build) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"], "one"), helper.make_node("Neg", ["x"], ["y"], "two")]
    with pytest.raises(ModelError, match=r"'y' is defined twice: by Relu node 'one' and by Neg node 'two'"):
        import_model(build_model(nodes))


def test_duplicate_inputs_and_initializers(build_model: Build) -> None:
    model = build_model([helper.make_node("Relu", ["x"], ["y"])])
    model.graph.input.append(model.graph.input[0])
    with pytest.raises(ModelError, match="graph input 'x' is defined twice"):
        import_model(model)
    model = build_model([helper.make_node("Add", ["x", "w"], ["y"])], constants={"w": np.ones(3, np.float32)})
    model.graph.initializer.append(model.graph.initializer[0])
    with pytest.raises(ModelError, match="initializer 'w' is defined twice"):
        import_model(model)


def test_undefined_tensors(build_model: Build) -> None:
    with pytest.raises(ModelError, match=r"Add node 'sum' reads tensor 'ghost'"):
        import_model(build_model([helper.make_node("Add", ["x", "ghost"], ["y"], "sum")]))
    with pytest.raises(ModelError, match="graph output 'other'"):
        import_model(build_model([helper.make_node("Relu", ["x"], ["y"])], outputs=["other"]))


def test_checker_speaks(build_model: Build) -> None:
    with pytest.raises(ModelError, match=r"not a valid ONNX model: .*colour"):
        import_model(build_model([helper.make_node("Relu", ["x"], ["y"], colour=3)]))
    with pytest.raises(ModelError, match="not a valid ONNX model"):
        import_model(build_model([helper.make_node("Add", ["x"], ["y"])]))


def test_initializer_whose_data_do_not_fit(build_model: Build) -> None:
    model = build_model([helper.make_node("Add", ["x", "w"], ["y"])], constants={"w": np.ones(3, np.float32)})
    model.graph.initializer[0].dims[0] = 4
    with pytest.raises(ModelError, match=r"constant 'w' of shape \(4,\)"):
        import_model(model)


def test_shapes_that_contradict_name_the_node(build_model: Build) -> None:
    model = build_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")], constants={"w": np.ones((5, 4), np.float32)}
    )
    with pytest.raises(ModelError, match="MatMul node 'product'"):
        import_model(model)


def test_sparse_initializer(build_model: Build) -> None:
    model = build_model([helper.make_node("Relu", ["x"], ["y"])])
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("indices", TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3]))
    with pytest.raises(ModelError, match="'sparse' is sparse"):
        import_model(model)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_warn(build_model: Build, value: float) -> None:
    weight = np.array([1.0, value, 2.0], np.float32)
    model = build_model([helper.make_node("Add", ["x", "net/w"], ["y"])], constants={"net/w": weight})
    with pytest.warns(UserWarning, match="'net/w'"):
        import_model(model)


def test_mask_of_minus_infinity_is_silent(build_model: Build) -> None:
    mask = np.array([0.0, -np.inf, -np.inf], np.float32)
    model = build_model([helper.make_node("Add", ["x", "mask"], ["y"])], constants={"mask": mask})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_model(model)


def test_training_batch_norm_is_refused(build_model: Build) -> None:
    vector = np.ones(3, np.float32)
    model = build_model(
        [helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y", "m2", "v2"], "bn", training_mode=1)],
        constants=dict.fromkeys("sbmv", vector),
    )
    with pytest.raises(ModelError, match="'bn' is in training mode"):
        import_model(model)
