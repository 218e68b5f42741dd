"""Whole models for GPUs: every operator has a kernel of ours, the code is made, and it computes the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.networks import models
from benchmarks.networks.bert import build_bert_base
from tests.support import opencl_cpu
from tests.support.opencl_graph import run_graph
from tvm_ext import pass_pipeline, recorder, relay
from tvm_ext.bench.compare import relative_error
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, OWN_PATHS, KernelChoice
from tvm_ext.records.padding import LAYOUT, LayoutRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.onnx.half import to_half

needs_opencl = pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=str(opencl_cpu.why_not()))
slow = pytest.mark.slow
DEVICES = ("nvidia-v100", "nvidia-a100", "nvidia-h200")


def kernels_for(target: str, model: Any) -> tuple[Any, Any]:
    """The model as Relax module, and as graph of constructed kernels."""
    mod, params = relay.frontend.from_onnx(model)
    mod = relay.prepare(mod, params)
    plan = pass_pipeline.plan_build(target, BuildOptions())
    with plan.target:
        return mod, plan.construct(mod)


def choices(kernels: Any) -> list[KernelChoice]:
    found = [func.attrs[CHOICE] for _, func in kernels.functions_items() if func.attrs and CHOICE in func.attrs]
    return [from_json(KernelChoice, str(text)) for text in found]


def run_in_opencl(model: Any, inputs: Any) -> list[np.ndarray]:
    mod, kernels = kernels_for("opencl", model)
    assert {choice.path for choice in choices(kernels)} <= set(OWN_PATHS)
    names = [param.name for param in mod["main"].params]
    return run_graph(kernels, dict(zip(names, inputs.values(), strict=True)))


@needs_opencl
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "name",
    ["mlp", "mobilenet_block", *(pytest.param(n, marks=slow) for n in ("bert_base_layer", "squeezenet", "resnet50"))],
)
def test_the_opencl_of_a_model_computes_it(name: str, build_model: Any, reference: Any) -> None:
    """An encoder's layer is everyday in half precision, with what comes before and behind it: BERT below."""
    model = build_model(name, sequence=32)
    inputs = models.random_inputs(model)
    assert relative_error(run_in_opencl(model, inputs), reference(model, inputs)) <= 1e-5


@needs_opencl
@pytest.mark.parametrize("name", ["mobilenet_block", pytest.param("bert_base_layer", marks=slow)])
def test_the_opencl_of_a_model_in_half_precision_computes_it(name: str, build_model: Any, reference: Any) -> None:
    model = build_model(name, sequence=32)
    inputs = models.random_inputs(model)
    halves = {key: x.astype("float16") if x.dtype == np.float32 else x for key, x in inputs.items()}
    assert relative_error(run_in_opencl(to_half(model), halves), reference(model, inputs)) <= 5e-3


@pytest.mark.slow
@needs_opencl
@pytest.mark.parametrize(
    ("dtype", "layers", "sequence"),
    [
        ("float16", 1, 16),
        *(pytest.param(dtype, 12, 128, marks=[slow, pytest.mark.timeout(1800)]) for dtype in ("float32", "float16")),
    ],
)
def test_the_opencl_of_bert_base_computes_it(dtype: str, layers: int, sequence: int, reference: Any) -> None:
    """Embeddings, layers and pooler; both outputs. The whole model's errors are 1.1e-6 and 1.9e-3."""
    model = build_bert_base(batch=1, sequence=sequence, seed=0, layers=layers)
    inputs = models.random_inputs(model)
    expected = reference(model, inputs)
    outputs = run_in_opencl(to_half(model) if dtype == "float16" else model, inputs)
    allowed = 1e-5 if dtype == "float32" else 5e-3
    assert len(outputs) == 2
    assert all(relative_error([a], [b]) <= allowed for a, b in zip(outputs, expected, strict=True))


@pytest.mark.slow  # five layers of BERT
def test_layers_that_are_alike_share_their_kernels() -> None:
    called = {}
    for layers in (2, 3):
        _, kernels = kernels_for("nvidia-a100", to_half(build_bert_base(batch=1, sequence=16, seed=0, layers=layers)))
        called[layers] = recorder.call_counts(kernels)
    assert set(called[2]) == set(called[3])
    assert called[3].total() > called[2].total() + 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "device"), [(1, DEVICES[1]), *(pytest.param(32, device, marks=slow) for device in DEVICES)]
)
def test_every_kernel_of_bert_base_in_half_precision_is_ours(batch: int, device: str) -> None:
    model = to_half(build_bert_base(batch=batch, sequence=128, seed=0, layers=12 if batch > 1 else 1))
    _, kernels = kernels_for(device, model)
    made = choices(kernels)
    assert {choice.path for choice in made} <= set(OWN_PATHS)
    products = [choice for choice in made if "matmul" in choice.operator]
    vectors = [choice for choice in products if "on matrix units" not in choice.reason]
    assert len(products) >= 7
    # the pooler reads one token of each sequence: at batch 1 a matrix-vector product
    assert ["tanh" in choice.operator for choice in vectors] == ([True] if batch == 1 else [])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("device", DEVICES)
def test_every_kernel_of_an_encoder_in_half_precision_is_ours(device: str, build_model: Any) -> None:
    _, kernels = kernels_for(device, to_half(build_model("bert_base_layer", sequence=128)))
    made = choices(kernels)
    assert {choice.path for choice in made} <= set(OWN_PATHS)
    products = [choice for choice in made if "matmul" in choice.operator]
    assert products
    assert all("on matrix units" in choice.reason for choice in products)


@pytest.mark.parametrize("device", [DEVICES[1], *(pytest.param(d, marks=slow) for d in (DEVICES[0], DEVICES[2]))])
def test_every_kernel_of_resnet_50_in_half_precision_is_ours(device: str, build_model: Any) -> None:
    _, kernels = kernels_for(device, to_half(build_model("resnet50")))
    made = choices(kernels)
    assert {choice.path for choice in made} <= set(OWN_PATHS)
    convolutions = [choice for choice in made if "conv2d" in choice.operator]
    assert len(convolutions) > 20
    assert all("on matrix units" in choice.reason for choice in convolutions)
    layout = from_json(LayoutRecord, str(kernels.attrs[LAYOUT]))
    assert (layout.blocked_count, layout.transform_count) == (53, 2)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("target", ["cuda", "opencl"])
def test_a_library_holds_the_source_of_all_kernels(target: str, build_model: Any, tmp_path: Any) -> None:
    mod, params = relay.frontend.from_onnx(build_model("mlp"))
    library = relay.build(mod, target, params=params)
    source = library.source()
    names = {operator.function for operator in library.report.operators}
    assert all(f"{name}_kernel" in source for name in names)
    library.export_library(tmp_path / "model.so", architectures=())
    assert (tmp_path / "model.so").stat().st_size > 1000
