"""A small library for tests of threads and processes, what it computes, and the same library loaded from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.support.small_models import onnx_model
from tvm_ext import relay

SIZE = 96
"""Large enough for its kernels to be divided among threads."""


def model(size: int = SIZE, seed: int = 0) -> onnx.ModelProto:
    """relu(x @ w)."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    return onnx_model(nodes, {"x": (size, size)}, constants={"w": _weight(size, seed)})


def _weight(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((size, size)).astype("float32")


def build(size: int = SIZE, seed: int = 0) -> relay.Library:
    mod, params = relay.frontend.from_onnx(model(size, seed))
    return relay.build(mod, params=params, kernel_cache="off")


def loaded(library: relay.Library, folder: Path) -> relay.Library:
    path = folder / "model.so"
    library.export_library(path)
    return relay.load(path)


def value(number: int, size: int = SIZE) -> np.ndarray:
    """An input that no other number gives."""
    return np.random.default_rng(1000 + number).standard_normal((size, size)).astype("float32")


def is_right(result: Any, number: int, size: int = SIZE, seed: int = 0) -> bool:
    """Whether ``result`` is what the library computes of `value` (``number``)."""
    wanted = np.maximum(value(number, size).astype("float64") @ _weight(size, seed), 0)
    return bool(np.linalg.norm(np.asarray(result.numpy()) - wanted) <= 1e-4 * np.linalg.norm(wanted))
