"""The models that `tvm-ext` knows by name, and seeded inputs for any ONNX model.

Not here: the networks of the papers (`benchmarks/networks/` of the repository).
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvm_ext.errors import InputError, ModelError
from tvm_ext.support.arrays import Array

from . import light
from .light import IR_VERSION, generator, he_normal, small_normal

NAMES = (*light.NAMES, "mlp")
_MLP_WIDTHS = (784, 1024, 1024, 10)  # a choice: MNIST's 28 x 28 pixels and ten digits, two hidden layers


def build_model(name: str, batch: int = 1, seed: int = 0, *, logits: bool = True) -> onnx.ModelProto:
    """The named model with static shapes, float32 weights drawn by ``seed``, and the given batch size.

    With ``logits`` a classifier's closing Softmax is cut off, so that errors are not hidden by saturation.
    Raises ModelError for an unknown name, InputError for a batch below 1.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(NAMES)}"
        raise ModelError(f"no built-in model is called {name!r}", remedy)
    if batch < 1:
        raise InputError(f"{name}: batch {batch} must be at least 1", "give a positive size")
    if name == "mlp":
        return _build_mlp(batch, seed)
    return light.build_light(name, batch=batch, seed=seed, logits=logits)


def _build_mlp(batch: int, seed: int) -> onnx.ModelProto:
    """Input ``x`` float32 [batch, 784]; Gemm + ReLU twice at width 1024, then Gemm; output ``logits`` [batch, 10]."""
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    value = "x"
    for index, (inner, outer) in enumerate(itertools.pairwise(_MLP_WIDTHS)):
        weight, bias = f"w{index}", f"b{index}"
        constants.append(numpy_helper.from_array(he_normal(seed, weight, (outer, inner), fan_in=inner), weight))
        constants.append(numpy_helper.from_array(small_normal(seed, bias, (outer,)), bias))
        nodes.append(helper.make_node("Gemm", [value, weight, bias], [f"gemm_{index}"], transB=1))
        nodes.append(helper.make_node("Relu", [f"gemm_{index}"], [f"relu_{index}"]))
        value = f"relu_{index}"
    nodes.pop()
    nodes[-1].output[0] = "logits"
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, (batch, width))
        for name, width in (("x", _MLP_WIDTHS[0]), ("logits", _MLP_WIDTHS[-1]))
    ]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=IR_VERSION)
    helper.set_model_props(model, {"weights": f"random, seed {seed}"})
    return model


def random_inputs(
    model: onnx.ModelProto, seed: int = 0, *, shape: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Array]:
    """Seeded values for each input that is not an initializer, by name.

    Floats are standard normal. Integers which index a constant table (Gather) lie within it; an input named like a
    mask is ones, then zeros, with at least one 1 per row; other integers are 0 or 1, booleans random. ``shape``
    gives sizes for inputs with dynamic dimensions.

    Raises InputError for a dynamic dimension without a size, and for a dtype that NumPy cannot draw.
    """
    constants = {t.name: t for t in model.graph.initializer}
    return {
        value.name: _draw(model.graph, value, _shape(value, shape or {}), seed)
        for value in model.graph.input
        if value.name not in constants
    }


def _shape(value: onnx.ValueInfoProto, given: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    if value.name in given:
        return tuple(given[value.name])
    for position, dim in enumerate(value.type.tensor_type.shape.dim):
        if not dim.HasField("dim_value"):
            label = dim.dim_param or "?"
            raise InputError(
                f"input {value.name}: dimension {position} ({label}) is dynamic",
                f"give its shape, such as shape={{{value.name!r}: [1, ...]}}",
            )
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _draw(graph: onnx.GraphProto, value: onnx.ValueInfoProto, shape: tuple[int, ...], seed: int) -> Array:
    element = value.type.tensor_type.elem_type
    if element == TensorProto.STRING or element not in helper.get_all_tensor_dtypes():
        raise InputError(f"input {value.name}: cannot draw random values of ONNX type {element}", "pass it yourself")
    dtype = helper.tensor_dtype_to_np_dtype(element)
    random = generator(seed, value.name)
    if dtype.kind not in "iub":
        return random.standard_normal(shape, dtype=np.float32).astype(dtype)
    if "mask" in value.name.lower() and shape:
        return _mask(random, shape).astype(dtype)
    return random.integers(0, _bound(graph, value.name), size=shape).astype(dtype)


def _mask(random: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Rows of ones, then zeros: what a tokenizer's padding leaves; each row attends to at least one position."""
    lengths = random.integers(1, shape[-1] + 1, size=(*shape[:-1], 1))
    return np.arange(shape[-1]) < lengths


def _bound(graph: onnx.GraphProto, name: str) -> int:
    """Exclusive upper bound of an integer input: the smallest constant table that it indexes, else 2."""
    rows = {t.name: t.dims for t in graph.initializer}
    sizes = [
        rows[node.input[0]][next((a.i for a in node.attribute if a.name == "axis"), 0)]
        for node in graph.node
        if node.op_type == "Gather" and node.input[1] == name and node.input[0] in rows
    ]
    return min(sizes, default=2)
