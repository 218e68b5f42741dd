"""Whole models for GPUs: every operator has a kernel of ours, the code is made, and it computes the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tvm_ext import pipeline, relay
from tvm_ext.options import BuildOptions
from tvm_ext.plan import CHOICE, LAYOUT, KernelChoice, LayoutRecord, from_json
from tvm_ext.testing import models, opencl_cpu
from tvm_ext.testing.bench import relative_error
from tvm_ext.testing.models_half import to_half
from tvm_ext.testing.opencl_graph import run_graph

needs_opencl = pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=str(opencl_cpu.why_not()))
slow = pytest.mark.slow
DEVICES = ("nvidia-v100", "nvidia-a100", "nvidia-h200")


def kernels_for(target: str, model: Any) -> tuple[Any, Any]:
    """The model as Relax module, and as graph of constructed kernels."""
    mod, params = relay.frontend.from_onnx(model)
    mod = relay.prepare(mod, params)
    plan = pipeline.plan_build(target, BuildOptions())
    with plan.target:
        return mod, plan.construct(mod)


def choices(kernels: Any) -> list[KernelChoice]:
    found = [func.attrs[CHOICE] for _, func in kernels.functions_items() if func.attrs and CHOICE in func.attrs]
    return [from_json(KernelChoice, str(text)) for text in found]


def run_in_opencl(model: Any, inputs: Any) -> list[np.ndarray]:
    mod, kernels = kernels_for("opencl", model)
    assert {choice.path for choice in choices(kernels)} == {"rtile"}
    names = [param.name for param in mod["main"].params]
    return run_graph(kernels, dict(zip(names, inputs.values(), strict=True)))


@needs_opencl
@pytest.mark.parametrize(
    "name",
    ["mlp", "mobilenet_block", "bert_base_layer", *(pytest.param(n, marks=slow) for n in ("squeezenet", "resnet50"))],
)
def test_the_opencl_of_a_model_computes_it(name: str, build_model: Any, reference: Any) -> None:
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


@pytest.mark.parametrize("device", DEVICES)
def test_every_kernel_of_an_encoder_in_half_precision_is_ours(device: str, build_model: Any) -> None:
    _, kernels = kernels_for(device, to_half(build_model("bert_base_layer", sequence=128)))
    made = choices(kernels)
    assert {choice.path for choice in made} == {"rtile"}
    products = [choice for choice in made if "matmul" in choice.operator]
    assert products
    assert all("on matrix units" in choice.reason for choice in products)


@pytest.mark.parametrize("device", [DEVICES[1], *(pytest.param(d, marks=slow) for d in (DEVICES[0], DEVICES[2]))])
def test_every_kernel_of_resnet_50_in_half_precision_is_ours(device: str, build_model: Any) -> None:
    _, kernels = kernels_for(device, to_half(build_model("resnet50")))
    made = choices(kernels)
    assert {choice.path for choice in made} == {"rtile"}
    convolutions = [choice for choice in made if "conv2d" in choice.operator]
    assert len(convolutions) > 20
    assert all("on matrix units" in choice.reason for choice in convolutions)
    layout = from_json(LayoutRecord, str(kernels.attrs[LAYOUT]))
    assert (layout.blocked_count, layout.transform_count) == (53, 2)


@pytest.mark.parametrize("target", ["cuda", "opencl"])
def test_a_library_holds_the_source_of_all_kernels(target: str, build_model: Any, tmp_path: Any) -> None:
    mod, params = relay.frontend.from_onnx(build_model("mlp"))
    library = relay.build(mod, target, params=params)
    source = library.source()
    names = {operator.function for operator in library.report.operators}
    assert all(f"{name}_kernel" in source for name in names)
    library.export_library(tmp_path / "model.so", architectures=())
    assert (tmp_path / "model.so").stat().st_size > 1000
