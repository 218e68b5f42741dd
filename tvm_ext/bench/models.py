"""The models that tests, benchmarks and `tvm-ext bench` know by name, and seeded inputs for any ONNX model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from tvm_ext.errors import InputError, ModelError
from tvm_ext.support.arrays import Array

from .networks import bert, convolutional, light, nasnet, random_cells, recurrent, repvgg, small, vision
from .networks.graph import generator

_OWN: dict[str, Callable[[int, int, int], onnx.ModelProto]] = {
    "minilm": lambda batch, sequence, seed: bert.build_minilm(batch=batch, sequence=sequence),
    "bert_base_layer": lambda batch, sequence, seed: bert.build_bert_base_layer(
        batch=batch, sequence=sequence, seed=seed
    ),
    "mlp": lambda batch, sequence, seed: small.build_mlp(batch=batch, seed=seed),
    "mobilenet_block": lambda batch, sequence, seed: small.build_mobilenet_block(batch=batch, seed=seed),
    "mobilenet_v2": lambda batch, sequence, seed: small.build_mobilenet_v2(batch=batch, seed=seed),
    "resnext29": lambda batch, sequence, seed: convolutional.build_resnext29(batch=batch, seed=seed),
    "nasnet": lambda batch, sequence, seed: nasnet.build_nasnet(batch=batch, seed=seed),
    "alexnet": lambda batch, sequence, seed: convolutional.build_alexnet(batch=batch, seed=seed),
    "deepspeech2": lambda batch, sequence, seed: recurrent.build_deepspeech2(batch=batch, seed=seed),
    "lstm_tc": lambda batch, sequence, seed: recurrent.build_lstm_tc(batch=batch, seed=seed),
    "seq2seq_nmt": lambda batch, sequence, seed: recurrent.build_seq2seq(batch=batch, seed=seed),
    "vgg16": lambda batch, sequence, seed: vision.build_vgg16(batch=batch, seed=seed),
    "resnet18": lambda batch, sequence, seed: vision.build_resnet18(batch=batch, seed=seed),
    "repvgg_a0": lambda batch, sequence, seed: repvgg.build_repvgg("a0", batch=batch, seed=seed),
    "repvgg_b0": lambda batch, sequence, seed: repvgg.build_repvgg("b0", batch=batch, seed=seed),
}
BOLT = ("vgg16", "vgg19", "resnet18", "resnet50", "repvgg_a0", "repvgg_b0")
"""Two networks of each of the three families in Bolt's Figure 10, whose text does not name them."""
RAMMER = ("resnext29", "nasnet", "alexnet", "deepspeech2", "lstm_tc", "seq2seq_nmt")
"""The networks of Rammer's evaluation, in the order of its Table 1."""
_CELL = re.compile(r"nasbench_(0|[1-9][0-9]{0,2})")


def names() -> tuple[str, ...]:
    """The names that `build_model` takes, but for the random cells'; "minilm" needs an optional package."""
    return (*light.NAMES, *_OWN)


def is_name(name: str) -> bool:
    """Whether `build_model` takes ``name``: one of `names`, or ``nasbench_0`` to ``nasbench_499``."""
    return name in names() or _cell_index(name) is not None


def _cell_index(name: str) -> int | None:
    found = _CELL.fullmatch(name)
    return int(found[1]) if found is not None and int(found[1]) < random_cells.CELLS else None


def build_model(
    name: str, batch: int = 1, sequence: int = 128, seed: int = 0, *, logits: bool = True
) -> onnx.ModelProto:
    """The named model with static shapes, float32 weights and the given batch size.

    ``sequence`` (tokens) matters to the encoders only. ``seed`` draws the weights of all but "minilm", whose weights
    are real. With ``logits`` a classifier's closing Softmax is cut off, so that errors are not hidden by saturation.

    Raises ModelError for an unknown name, InputError for a batch or sequence below 1, and
    UnsupportedEnvironmentError where "minilm" lacks its package.
    """
    if not is_name(name):
        near = difflib.get_close_matches(name, names(), n=3)
        cells = f"nasbench_0 to nasbench_{random_cells.CELLS - 1}"
        remedy = f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(names())}, {cells}"
        raise ModelError(f"no built-in model is called {name!r}", remedy)
    if batch < 1 or sequence < 1:
        raise InputError(f"{name}: batch {batch} and sequence {sequence} must be at least 1", "give positive sizes")
    cell = _cell_index(name)
    if cell is not None:
        return random_cells.build_random_cell(cell, batch=batch, seed=seed)
    if name in _OWN:
        return _OWN[name](batch, sequence, seed)
    return light.build_light(name, batch=batch, seed=seed, logits=logits)


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
