"""Floats are no reals on GPUs either: expressions and special values by OpenCL and in the SIMT interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tvm import te, topi

from tests.support import opencl_cpu
from tests.support.opencl_graph import run_graph
from tests.unit.float_expressions import EXPRESSIONS, assert_same, function_of, operands
from tvm_ext import pass_pipeline, relay
from tvm_ext._tvm import tvm
from tvm_ext.devices import device_db
from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.emit.schedule_stock_gpu import schedule_by_stock
from tvm_ext.toolchains.cuda_toolchain import compile_cuda, find_nvcc
from tvm_ext.verify import simt
from tvm_ext.verify.threads_as_loops import poison

A100 = "nvidia-a100"
needs_opencl = pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=str(opencl_cpu.why_not()))


def kernels(dtype: str) -> dict[str, Any]:
    """The kernel of each expression, by its name."""
    device, count = device_db.lookup(A100), len(operands(dtype)[0])
    functions = {name: function_of(expression, dtype, count) for name, (expression, _) in EXPRESSIONS.items()}
    return {
        name: construct_kernel(func, "operator", device, BuildOptions()).with_attr("global_symbol", f"k{number}")
        for number, (name, func) in enumerate(functions.items())
    }


def module_of(found: dict[str, Any]) -> Any:
    return tvm.IRModule({str(kernel.attrs["global_symbol"]): kernel for kernel in found.values()})


def expected(name: str, dtype: str) -> Any:
    with np.errstate(all="ignore"):
        return np.asarray(EXPRESSIONS[name][1](*operands(dtype))).astype(dtype)


@needs_opencl
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_opencl_computes_what_the_expressions_say(dtype: str) -> None:
    found, values = kernels(dtype), operands(dtype)
    device = opencl_cpu.OpenClDevice(opencl_cpu.compile_opencl(module_of(found)))
    for name, kernel in found.items():
        buffers = [device.buffer(value) for value in (*values, poison(values[0].shape, dtype))]
        device.call(str(kernel.attrs["global_symbol"]), buffers)
        assert_same(name, device.read(buffers[2], values[0].shape, dtype), expected(name, dtype))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cuda_kernels_as_lowered_compute_what_the_expressions_say(dtype: str) -> None:
    x, y = operands(dtype)
    for name, kernel in kernels(dtype).items():
        result = simt.run(simt.lower(kernel, A100), {"x": x, "y": y}, device=A100)
        assert not result.findings, (name, list(map(str, result.findings)))
        assert_same(name, np.asarray(result.outputs["z"]), expected(name, dtype))


def reduction_of(extreme: Callable[..., Any], shape: tuple[int, ...], axis: int) -> Any:
    x = te.placeholder(shape, "float32", "x")
    return te.create_prim_func([x, extreme(x, axis=axis)])


def check_reduction(kernel: Any, x: Any, wanted: Any) -> None:
    result = simt.run(simt.lower(kernel.with_attr("global_symbol", "main"), A100), {"x": x}, device=A100)
    assert not result.findings, list(map(str, result.findings))
    np.testing.assert_array_equal(result.outputs[str(list(kernel.params)[-1].name)], wanted)


@pytest.mark.parametrize(
    ("shape", "axis", "stock_tvm"),
    [((4, 64), 1, False), ((2, 1000), 1, False), ((64, 4), 0, False), ((2, 2000, 3), 1, False), ((3, 70), 1, True)],
    ids=["shuffles", "warps", "columns", "parts", "stock"],
)
def test_reductions_pass_nan_on_as_cuda(shape: tuple[int, ...], axis: int, stock_tvm: bool) -> None:
    """By shuffles, between warps, across rows and in parts; and of what stock TVM schedules."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[..., 1] = np.where(np.arange(shape[0]).reshape(-1, *[1] * (x.ndim - 2)) % 2, x[..., 1], NAN)
    for extreme, reference in ((topi.max, np.max), (topi.min, np.min)):
        func, device = reduction_of(extreme, shape, axis), device_db.lookup(A100)
        if stock_tvm:
            kernel, _ = schedule_by_stock(func, "operator", device, "for a test")
        else:
            kernel = construct_kernel(func, "operator", device, BuildOptions())
        check_reduction(kernel, x, reference(x, axis=axis))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nvcc_takes_the_text_of_every_expression(dtype: str) -> None:
    try:
        find_nvcc()
    except UnsupportedEnvironmentError as error:
        pytest.skip(str(error))
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    with target:
        library = tvm.compile(module_of(kernels(dtype)), target=target)
    (source,) = (str(imported.inspect_source("cuda")) for imported in library.mod.imports)
    assert compile_cuda(source, ("sm_80",)).image


# --- operators of models ----------------------------------------------------------------------------------------------
NAN, INF = np.nan, np.inf
ROWS = np.array([[1, NAN, 2, -1], [NAN, -INF, -INF, 0], [-INF, -INF, -INF, -INF], [INF, -2, 5, NAN]], np.float32)
OTHER = np.array([[0, 1, NAN, -INF], [NAN, -INF, -INF, INF], [-INF, 3, -3, NAN], [1, 2, 3, 4]], np.float32)


def constant(name: str, value: float) -> Any:
    return helper.make_tensor(name, onnx.TensorProto.FLOAT, [], [value])


def chain(*steps: tuple[str, list[str]]) -> list[Any]:
    names = [*(f"t{number}" for number in range(len(steps) - 1)), "y"]
    return [helper.make_node(kind, inputs, [name]) for (kind, inputs), name in zip(steps, names, strict=True)]


CONSTANTS = {"zero": 0.0, "three": 3.0, "rounder": 12582912.0, "big": 1e8, "one": 1.0}
GRAPHS: dict[str, tuple[list[Any], Callable[[Any, Any], Any]]] = {
    "fake quantisation": (
        chain(("Add", ["x", "rounder"]), ("Sub", ["t0", "rounder"])), lambda x, o: np.where(x == 2.5, 2, np.rint(x)),
    ),
    "(1e8 + 1) - 1e8": (
        chain(("Mul", ["x", "zero"]), ("Add", ["t0", "big"]), ("Add", ["t1", "one"]), ("Sub", ["t2", "big"])),
        lambda x, o: np.where(np.isfinite(x), 0, NAN),
    ),
    "Not(x < o)": (
        chain(("Less", ["x", "o"]), ("Not", ["t0"]), ("Where", ["t1", "one", "zero"])), lambda x, o: ~(x < o),
    ),
    "Where(x == x, x, 0)": (
        chain(("Equal", ["x", "x"]), ("Where", ["t0", "x", "zero"])), lambda x, o: np.where(np.isnan(x), 0, x),
    ),
    "Relu": (chain(("Relu", ["x"])), lambda x, o: np.maximum(x, 0)),
    "Max": (chain(("Max", ["x", "o"])), np.maximum),
    "Min": (chain(("Min", ["x", "o"])), np.minimum),
    "Clip": (chain(("Clip", ["x", "zero", "three"])), lambda x, o: np.clip(x, 0, 3)),
    "ReduceMax": (
        [helper.make_node("ReduceMax", ["x", "axes"], ["y"])], lambda x, o: np.max(x, -1, keepdims=True),
    ),
    "ReduceMin": (
        [helper.make_node("ReduceMin", ["x", "axes"], ["y"])], lambda x, o: np.min(x, -1, keepdims=True),
    ),
    "MaxPool": (
        [
            helper.make_node("Unsqueeze", ["x", "axes0"], ["t0"]),
            helper.make_node("MaxPool", ["t0"], ["t1"], kernel_shape=[3], pads=[1, 1]),
            helper.make_node("Squeeze", ["t1", "axes0"], ["y"]),
        ],
        lambda x, o: np.max([np.pad(x, ((0, 0), (1, 1)), constant_values=-INF)[:, i : i + 4] for i in range(3)], 0),
    ),
}  # fmt: skip


def model_of(nodes: list[Any], shape: tuple[int, ...]) -> Any:
    ends = {n: helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ROWS.shape) for n in "xo"}
    used = {name for node in nodes for name in node.input}
    constants = [constant(name, value) for name, value in CONSTANTS.items() if name in used]
    axes = {"axes": -1, "axes0": 0}
    constants += [helper.make_tensor(n, onnx.TensorProto.INT64, [1], [axis]) for n, axis in axes.items() if n in used]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "g", [info for name, info in ends.items() if name in used], [output], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@needs_opencl
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", GRAPHS)
def test_operators_of_special_values(name: str) -> None:
    nodes, reference = GRAPHS[name]
    x = np.where(np.isnan(ROWS) | (ROWS != 1), ROWS, np.float32(2.5))
    with np.errstate(all="ignore"):
        wanted = np.asarray(reference(x, OTHER)).astype(np.float32)
    mod, params = relay.frontend.from_onnx(model_of(nodes, wanted.shape))
    mod = relay.prepare(mod, params)
    plan = pass_pipeline.plan_build("opencl", BuildOptions(device=A100))
    with plan.target:
        graph = plan.construct(mod)
    named = {"x": x, "o": OTHER}
    (actual,) = run_graph(graph, {param.name: named[param.name] for param in mod["main"].params})
    np.testing.assert_array_equal(actual, wanted)
