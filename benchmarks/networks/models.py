"""All networks by name: those of the package (`tvm_ext.bench.models`), and those of this folder."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

import onnx

from tvm_ext.bench import models
from tvm_ext.bench.models import random_inputs
from tvm_ext.errors import InputError, ModelError

from . import bert, convolutional, nasnet, random_cells, recurrent, repvgg, small, vision

__all__ = ["BOLT", "RAMMER", "RAMMER_IMAGENET", "build_model", "is_name", "names", "random_inputs"]

_OWN: dict[str, Callable[[int, int, int], onnx.ModelProto]] = {
    "minilm": lambda batch, sequence, seed: bert.build_minilm(batch=batch, sequence=sequence),
    "bert_base_layer": lambda batch, sequence, seed: bert.build_bert_base_layer(
        batch=batch, sequence=sequence, seed=seed
    ),
    "mobilenet_block": lambda batch, sequence, seed: small.build_mobilenet_block(batch=batch, seed=seed),
    "mobilenet_v2": lambda batch, sequence, seed: small.build_mobilenet_v2(batch=batch, seed=seed),
    "resnext29": lambda batch, sequence, seed: convolutional.build_resnext29(batch=batch, seed=seed),
    "resnext101": lambda batch, sequence, seed: convolutional.build_resnext101(batch=batch, seed=seed),
    "nasnet": lambda batch, sequence, seed: nasnet.build_nasnet(batch=batch, seed=seed),
    "nasnet_imagenet": lambda batch, sequence, seed: nasnet.build_nasnet_imagenet(batch=batch, seed=seed),
    "alexnet": lambda batch, sequence, seed: convolutional.build_alexnet(batch=batch, seed=seed),
    "deepspeech2": lambda batch, sequence, seed: recurrent.build_deepspeech2(batch=batch, seed=seed),
    "lstm_tc": lambda batch, sequence, seed: recurrent.build_lstm_tc(batch=batch, seed=seed),
    "seq2seq_nmt": lambda batch, sequence, seed: recurrent.build_seq2seq(batch=batch, seed=seed),
    "seq2seq_artifact": lambda batch, sequence, seed: recurrent.build_seq2seq(batch=batch, seed=seed, words=None),
    "vgg16": lambda batch, sequence, seed: vision.build_vgg16(batch=batch, seed=seed),
    "resnet18": lambda batch, sequence, seed: vision.build_resnet18(batch=batch, seed=seed),
    "repvgg_a0": lambda batch, sequence, seed: repvgg.build_repvgg("a0", batch=batch, seed=seed),
    "repvgg_b0": lambda batch, sequence, seed: repvgg.build_repvgg("b0", batch=batch, seed=seed),
}
BOLT = ("vgg16", "vgg19", "resnet18", "resnet50", "repvgg_a0", "repvgg_b0")
"""Two networks of each of the three families in Bolt's Figure 10, whose text does not name them."""
RAMMER = ("resnext29", "nasnet", "alexnet", "deepspeech2", "lstm_tc", "seq2seq_nmt")
"""The networks of Rammer's evaluation, in the order of its Table 1."""
RAMMER_IMAGENET = ("resnext101", "nasnet_imagenet")
"""Those of Rammer's Figure 13."""
_CELL = re.compile(r"nasbench_(0|[1-9][0-9]{0,3})")


def names() -> tuple[str, ...]:
    """The names that `build_model` takes, but for the random cells'; "minilm" needs an optional package."""
    return (*models.NAMES, *_OWN)


def is_name(name: str) -> bool:
    """Whether `build_model` takes ``name``: one of `names`, or ``nasbench_0`` to ``nasbench_4999``."""
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
        raise ModelError(f"no network is called {name!r}", remedy)
    if batch < 1 or sequence < 1:
        raise InputError(f"{name}: batch {batch} and sequence {sequence} must be at least 1", "give positive sizes")
    cell = _cell_index(name)
    if cell is not None:
        return random_cells.build_random_cell(cell, batch=batch, seed=seed)
    if name in _OWN:
        return _OWN[name](batch, sequence, seed)
    return models.build_model(name, batch, seed, logits=logits)
