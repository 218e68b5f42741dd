"""The nine real topologies that the `onnx` package ships, with weights that make wrong answers visible.

``onnx/backend/test/data/light`` holds published networks whose weights were replaced by constants, so that their
output is 0.001 in every class whatever a compiler does. Here each weight is seeded noise scaled by its role (He for
convolutions and matrices, BatchNormalization statistics near 1), the batch size is set, and the closing Softmax can be
cut off, because a saturated Softmax hides errors.

Weights of the other built-in networks are seeded, too (`small_normal`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvm_ext.errors import ModelError

FloatArray = npt.NDArray[np.float32]

IR_VERSION = 8
"""Late enough that initializers need not be listed as graph inputs, so that every importer sees them as constants."""


def generator(seed: int, name: str) -> np.random.Generator:
    """A generator that depends on the seed and the tensor's name alone, not on the order of creation."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def he_normal(seed: int, name: str, shape: Sequence[int], fan_in: int) -> FloatArray:
    """Float32 weights of variance 2 / fan_in, which keeps the scale of activations through ReLU layers (He et al.)."""
    values = generator(seed, name).standard_normal(tuple(shape), dtype=np.float32)
    values *= np.float32(np.sqrt(2.0 / fan_in))
    return values


def small_normal(seed: int, name: str, shape: Sequence[int], deviation: float = 0.1) -> FloatArray:
    """Float32 values around 0: biases and BatchNormalization means."""
    values = generator(seed, name).standard_normal(tuple(shape), dtype=np.float32)
    values *= np.float32(deviation)
    return values


def near_one(seed: int, name: str, shape: Sequence[int], spread: float) -> FloatArray:
    """Float32 values in [1 - spread, 1 + spread]: scales and variances."""
    low, high = 1.0 - spread, 1.0 + spread
    return generator(seed, name).uniform(low, high, tuple(shape)).astype(np.float32)


NAMES = (
    "resnet50",
    "vgg19",
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "squeezenet",
    "shufflenet",
    "zfnet512",
)

_RESHAPING = frozenset({"Reshape", "Unsqueeze"})
_BATCH_NORM_ROLES = {1: "gamma", 2: "beta", 3: "mean", 4: "variance"}


def build_light(name: str, *, batch: int, seed: int, logits: bool) -> onnx.ModelProto:
    """One of `NAMES` as a float32 NCHW model of input [batch, 3, 224, 224] and 1000 classes.

    Raises ModelError where the installed `onnx` package does not ship the file.
    """
    model = onnx.load(_path(name))
    graph = model.graph
    weights = _weight_shapes(graph)
    roles = _roles(graph, weights)
    kept = _kept_initializers(graph, weights)
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for tensor, shape in weights.items():
        if tensor in roles:
            value = _random_weight(roles[tensor], seed, tensor, shape)
            graph.initializer.append(numpy_helper.from_array(value, tensor))
    _replace_nodes(graph, [node for node in graph.node if node.op_type != "ConstantOfShape"])
    _keep_true_inputs(graph)
    if logits:
        _cut_softmax(graph)
    _set_batch(graph, batch)
    model.ir_version = IR_VERSION
    helper.set_model_props(
        model, {"source": f"onnx {onnx.__version__} light_{name}", "weights": f"random, seed {seed}"}
    )
    return model


def _path(name: str) -> Path:
    path = Path(onnx.__file__).parent / "backend/test/data/light" / f"light_{name}.onnx"
    if not path.is_file():
        raise ModelError(
            f"the installed onnx package ({onnx.__version__}) ships no {path.name}",
            "install onnx >= 1.15 from its wheel, or pick another model",
        )
    return path


def _weight_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Shape of every float weight: float initializers, and ConstantOfShape nodes whose shape is an initializer."""
    shapes = {t.name: tuple(t.dims) for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    constants = {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            dims = numpy_helper.to_array(constants[node.input[0]])
            shapes[node.output[0]] = tuple(int(d) for d in dims)
    return shapes


def _roles(graph: onnx.GraphProto, weights: Iterable[str]) -> dict[str, str]:
    """What each used weight is to the node that consumes it, looking through Reshape and Unsqueeze."""
    origin = {name: name for name in weights}
    roles: dict[str, str] = {}
    for node in graph.node:  # ONNX lists nodes in topological order
        if node.op_type in _RESHAPING and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
            continue
        for position, tensor in enumerate(node.input):
            if tensor in origin:
                roles[origin[tensor]] = _role(node, position)
    return roles


def _role(node: onnx.NodeProto, position: int) -> str:
    match node.op_type:
        case "Conv":
            return "conv" if position == 1 else "bias"
        case "Gemm":
            transposed = any(a.name == "transB" and a.i for a in node.attribute)
            return "bias" if position == 2 else "matrix_oi" if transposed else "matrix_io"
        case "BatchNormalization":
            return _BATCH_NORM_ROLES[position]
        case "Mul":
            return "gamma"
        case "Add":
            return "beta"
    raise ModelError(f"no rule for weights of operator {node.op_type} ({node.name or node.output[0]})")


def _random_weight(role: str, seed: int, name: str, shape: tuple[int, ...]) -> FloatArray:
    """Seeded values by role. A 3x3 convolution over 64 channels has fan-in 576, hence deviation sqrt(2/576) = 0.059."""
    match role:
        case "conv":
            return he_normal(seed, name, shape, fan_in=int(np.prod(shape[1:])))
        case "matrix_oi":  # [out, in], or [out, in, 1, 1] before a Reshape
            return he_normal(seed, name, shape, fan_in=int(np.prod(shape)) // _rows(shape))
        case "matrix_io":
            return he_normal(seed, name, shape, fan_in=shape[0])
        case "gamma":
            return near_one(seed, name, shape, spread=0.2)
        case "variance":
            return near_one(seed, name, shape, spread=0.5)
    return small_normal(seed, name, shape)


def _rows(shape: tuple[int, ...]) -> int:
    """Output rows of a classifier matrix that may be stored with leading ones, such as [1, 1, 1000, 1024]."""
    return next((d for d in shape if d != 1), 1)


def _kept_initializers(graph: onnx.GraphProto, weights: Iterable[str]) -> list[onnx.TensorProto]:
    """Integer initializers that some operator other than ConstantOfShape still reads (Reshape targets)."""
    read = {tensor for node in graph.node if node.op_type != "ConstantOfShape" for tensor in node.input}
    dropped = set(weights)
    return [t for t in graph.initializer if t.name in read and t.name not in dropped]


def _replace_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    del graph.node[:]
    graph.node.extend(nodes)


def _keep_true_inputs(graph: onnx.GraphProto) -> None:
    """IR version 3 lists initializers as inputs, which keeps every runtime from treating them as constants."""
    read = {tensor for node in graph.node for tensor in node.input}
    constants = {t.name for t in graph.initializer}
    inputs = [i for i in graph.input if i.name in read and i.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)


def _cut_softmax(graph: onnx.GraphProto) -> None:
    """Make the closing Softmax's input the output; a network that ends otherwise is left alone."""
    last = graph.node[-1]
    if last.op_type != "Softmax" or last.output[0] != graph.output[0].name:
        return
    graph.output[0].name = last.input[0]
    _replace_nodes(graph, list(graph.node)[:-1])


def _set_batch(graph: onnx.GraphProto, batch: int) -> None:
    """Set dimension 0 of inputs, outputs and of the targets of Reshapes of activations (weights are reshaped too)."""
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    constants = {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Reshape" and node.input[0] not in constants:
            target = constants[node.input[1]]
            dims: npt.NDArray[np.int64] = numpy_helper.to_array(target).copy()
            dims[0] = batch
            target.CopyFrom(numpy_helper.from_array(dims, target.name))
