"""How the model tests build, run and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import pytest
import tvm

from benchmarks.networks import models
from tests.support.guarded_memory import guard
from tvm_ext import relay
from tvm_ext.bench import contenders
from tvm_ext.errors import UnsupportedEnvironmentError

Arrays = Mapping[str, np.ndarray]


@pytest.fixture
def build_model() -> Callable[..., onnx.ModelProto]:
    """`models.build_model`, skipping the test where the model's optional package is absent."""

    def build(name: str, batch: int = 1, sequence: int = 128, **options: object) -> onnx.ModelProto:
        try:
            return models.build_model(name, batch, sequence, **options)  # type: ignore[arg-type]
        except UnsupportedEnvironmentError as error:
            pytest.skip(str(error))

    return build


@pytest.fixture
def compiled() -> Callable[[onnx.ModelProto], Callable[[Arrays], list[np.ndarray]]]:
    """The model built with constructed kernels, as a function from inputs to outputs; it runs in guarded memory."""

    def compile_model(model: onnx.ModelProto) -> Callable[[Arrays], list[np.ndarray]]:
        mod, params = relay.frontend.from_onnx(model)
        lib = relay.build(mod, "llvm", params=params, enable_roller=True)
        module = relay.GraphModule(lib["default"](tvm.cpu()))
        guard(module.vm)

        def run(inputs: Arrays) -> list[np.ndarray]:
            for name, value in inputs.items():
                module.set_input(name, value)
            module.run()
            return [module.get_output(index).numpy() for index in range(module.get_num_outputs())]

        return run

    return compile_model


@pytest.fixture
def reference() -> Callable[[onnx.ModelProto, Arrays], list[np.ndarray]]:
    """ONNX Runtime's outputs; skips the test where it is not installed."""
    pytest.importorskip("onnxruntime", reason="the reference is ONNX Runtime")

    def run(model: onnx.ModelProto, inputs: Arrays) -> list[np.ndarray]:
        peer = contenders.prepare_onnx_runtime(model, inputs, threads=2)
        peer.run()
        return peer.outputs()

    return run
