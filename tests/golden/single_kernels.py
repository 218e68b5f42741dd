"""Kernels kept as hashes whose inputs are drawn or written by hand: attentions, GPU chains, schedules, fallbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from tests.golden.graphs import A100, H200, MI50, NARROW, T4, V100, WIDE, HashedKernels, kernels_of, text_of
from tests.support.attentions import drawn
from tests.support.attentions import function_of as attention_function
from tests.support.merged_runs import merged_graph
from tests.support.product_chains import Products, chain, convolution_chain
from tests.support.product_chains import function_of as chain_function
from tests.support.recurrent_nodes import RecurrentNode, model_of, operands
from tests.support.small_modules import inputs_of, module_of
from tests.unit.kernels import constructed
from tvm_ext import relay
from tvm_ext._tvm import IRModule, PrimFunc
from tvm_ext.devices.device_db import as_opencl, lookup
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes.construct_kernels import construct_kernel

op, nn = relax.op, relax.op.nn


def hashed_kernels() -> Iterator[HashedKernels]:
    yield from (*_attentions(), *_gpu_chains(), *_schedules(), *_steps(), *_fallbacks())


def _text(func: PrimFunc) -> str:
    return text_of(IRModule({"main": func}))


def _attentions() -> Iterator[HashedKernels]:
    def emit(seed: int, device: str) -> str:
        work = drawn(np.random.default_rng(seed))
        return _text(constructed(attention_function(work), device=lookup(device))[0])

    for seed in range(10):
        device = (WIDE, NARROW)[seed % 2]
        yield HashedKernels(name=f"drawn attention {seed}", device=device, emit=partial(emit, seed, device))


def _gpu_chains() -> Iterator[HashedKernels]:
    def emit(make: Callable[[], PrimFunc], device: str) -> str:
        row = lookup(device)
        row = as_opencl(row) if row.kind == "rocm" else row
        options = BuildOptions(enable_persistent_fusion=True, enable_pipelining=False)
        return _text(construct_kernel(make(), "main", row, options))

    products: dict[str, tuple[Products, tuple[str, ...]]] = {
        "half chain": (chain(64, 64, 32, 16), (V100, T4, H200)),
        "half chain of odd sizes": (chain(60, 44, 24, 40, epilogue="bias_gelu"), (A100,)),
        "narrow half chain": (chain(64, 32, 32, wide=False, epilogue="residual"), (A100,)),
        "chain of a transposed input": (chain(64, 32, 32, 16, transposed_input=True), (A100,)),
        "bfloat16 chain": (chain(32, 48, 32, 16, dtype="bfloat16", epilogue="tanh"), (A100,)),
        "float chain": (chain(60, 12, 8, 4, dtype="float32"), (V100, MI50)),
    }
    for name, (case, devices) in products.items():
        for device in devices:
            make = partial(chain_function, case)
            yield HashedKernels(name=name, device=device, emit=partial(emit, make, device))
    images = {"3x3 and 1x1": ("float16", A100), "single 3x3 and 1x1": ("float32", V100)}
    for name, (dtype, device) in images.items():
        make = partial(convolution_chain, 1, 16, (16, 32, 16), dtype=dtype)
        yield HashedKernels(name=name, device=device, emit=partial(emit, make, device))


def _schedules() -> Iterator[HashedKernels]:
    """Operators of a graph in one launch."""

    def branches() -> IRModule:
        x, first, second = inputs_of((8, 16), (16, 24), (16, 8))
        left, right = nn.relu(op.matmul(x, first)), op.matmul(x, second)
        return module_of(
            [x, first, second], nn.softmax(left), right, op.sum(op.concat([left, right], axis=1), axis=[1])
        )

    def in_sequence() -> IRModule:
        (x,) = inputs_of((8, 24))
        value, generator = x, np.random.default_rng(2)
        for _ in range(3):
            weight = relax.const(generator.standard_normal((24, 24)).astype("float32"))
            value = nn.relu(op.add(op.matmul(value, weight), x))
        return module_of([x], value, op.reshape(nn.softmax(value), (192,)))

    def emit(graph: Callable[[], IRModule], device: str, units: int) -> str:
        return text_of(merged_graph(graph(), name=device, units=units).mod)

    for device in (V100, A100):
        yield HashedKernels(name="schedule of branches", device=device, emit=partial(emit, branches, device, 3))
        yield HashedKernels(name="schedule in sequence", device=device, emit=partial(emit, in_sequence, device, 4))


def _steps() -> Iterator[HashedKernels]:
    """Recurrent layers whose steps are a loop."""
    lstm = RecurrentNode(kind="LSTM", steps=5, batch=2, features=3, hidden=8, direction="bidirectional", lengths=(5, 2))
    gru = RecurrentNode(kind="GRU", steps=4, batch=1, features=3, hidden=20)

    def graph(node: RecurrentNode) -> IRModule:
        mod, params = relay.frontend.from_onnx(model_of(node, operands(node)))
        return relay.bind_params(mod, params)

    for node in (lstm, gru):
        emit = partial(kernels_of, partial(graph, node), WIDE, enable_rammer=False)
        yield HashedKernels(name=f"steps of {node.kind}", device=WIDE, emit=emit)


def _fallbacks() -> Iterator[HashedKernels]:
    """What no kernel of ours computes."""

    def of(build: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], IRModule]:
        inputs = inputs_of(*shapes)
        return lambda: module_of(inputs, build(*inputs))

    graphs = {
        "adaptive pool": of(lambda x: nn.adaptive_avg_pool1d(x, [13]), (2, 7, 64)),
        "sorted": of(lambda x: op.sort(x, axis=-1), (4, 30)),
        "scattered": of(
            lambda x, y: op.scatter_elements(x, relax.const(np.array([[1, 0, 2]])), y, axis=0), (4, 3), (1, 3)
        ),
    }
    for name, graph in graphs.items():
        yield HashedKernels(name=name, device=A100, emit=partial(kernels_of, graph, A100))
    for name in ("adaptive pool", "scattered"):
        yield HashedKernels(name=name, device=WIDE, emit=partial(kernels_of, graphs[name], WIDE))
    stock = of(lambda x, y: nn.relu(op.matmul(x, y)), (40, 30), (30, 20))
    yield HashedKernels(name="stock product", device=A100, emit=partial(kernels_of, stock, A100, enable_roller=False))
