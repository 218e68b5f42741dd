"""What a CUDA device computes: random operators and whole models, exported, loaded and run on the machine's first GPU.

Marked ``gpu``. Everything else that the tests say of GPU kernels is said without one (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from benchmarks.networks import models
from tests.support.random_operators import check
from tests.support.random_operators.draw import SLOTS, draw_case
from tests.support.random_operators.relax_module import module_of
from tvm_ext import relay
from tvm_ext.bench.compare import relative_error
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import OptionError, UnsupportedEnvironmentError
from tvm_ext.relay_passes.onnx.half import to_half
from tvm_ext.runtime.cuda_runtime import load_cuda_runtime
from tvm_ext.toolchains.cuda_export import architecture_of
from tvm_ext.toolchains.cuda_toolchain import compile_cuda

pytestmark = pytest.mark.gpu

ROWS = {"7.0": "nvidia-v100", "7.5": "nvidia-t4", "8.0": "nvidia-a100", "9.0": "nvidia-h200"}
"""By compute capability; of several devices of one, the kernels of each run on all."""

HALF_TOLERANCE = 2e-2
DRAWN = [index for index in range(40) if SLOTS[index % len(SLOTS)][0] != "cumsum"]  # stock TVM's scan

NO_DEVICE = "no CUDA device: "


@pytest.fixture
def row() -> str:
    """The row of the tables for the machine's first GPU; skips, with the reason, where it cannot be used."""
    try:
        load_cuda_runtime()
    except UnsupportedEnvironmentError as error:
        pytest.skip(NO_DEVICE + error.problem)
    device = tvm.cuda(0)
    if not device.exist:
        pytest.skip(NO_DEVICE + "the driver finds none")
    if device.compute_version not in ROWS:
        pytest.skip(f"no row of the tables is for compute capability {device.compute_version}")
    name = ROWS[device.compute_version]
    try:
        compile_cuda("", [str(architecture_of(str(device_for_target(name)[1])))])
    except (UnsupportedEnvironmentError, OptionError) as error:
        pytest.skip(f"no compiler for it: {error.problem}")
    return name


def outputs_of(library: relay.Library, inputs: Mapping[int, Any], folder: Path) -> list[np.ndarray]:
    """The results of ``library``, exported, loaded and run on the GPU."""
    path = folder / "model.so"
    library.export_library(path)
    module = relay.GraphModule(relay.load(path), tvm.cuda(0))
    for index, value in inputs.items():
        module.set_input(index, value)
    module.run()
    return [module.get_output(index).numpy() for index in range(module.get_num_outputs())]


@pytest.mark.parametrize("index", DRAWN, ids=lambda index: f"{index}-{SLOTS[index % len(SLOTS)][0]}")
def test_a_random_operator_agrees_with_numpy(index: int, row: str, tmp_path: Path) -> None:
    case = draw_case(0, index)
    library = relay.build(module_of(case), row, params=check.constants(case))
    values = [value for value, item in zip(case.data(0), case.inputs, strict=True) if not item.constant]
    check.compare(case, outputs_of(library, dict(enumerate(values)), tmp_path))


@pytest.mark.parametrize("name", ["mlp", "mobilenet_block", "bert_base_layer", "squeezenet"])
@pytest.mark.parametrize("half", [False, True])
def test_a_model_agrees_with_the_cpu(name: str, half: bool, row: str, tmp_path: Path) -> None:
    model = models.build_model(name, sequence=32)
    inputs = models.random_inputs(model)
    there = to_half(model) if half else model
    given = [inputs[key].astype(value.dtype) for key, value in models.random_inputs(there).items()]
    module, params = relay.frontend.from_onnx(there)
    got = outputs_of(relay.build(module, row, params=params), dict(enumerate(given)), tmp_path)
    assert relative_error(got, run_here(model, inputs)) <= (HALF_TOLERANCE if half else 1e-4)


def run_here(model: Any, inputs: Mapping[str, Any]) -> list[np.ndarray]:
    module, params = relay.frontend.from_onnx(model)
    here = relay.GraphModule(relay.build(module, "llvm", params=params))
    for index, value in enumerate(inputs.values()):
        here.set_input(index, value)
    here.run()
    return [here.get_output(index).numpy() for index in range(here.get_num_outputs())]
