"""A small model, and builds of it that share a folder of kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.runtime.library import Library
from tvm_ext.support import kernel_cache

X = np.random.default_rng(0).standard_normal((17, 33)).astype("float32")


def model(width: int = 29) -> tvm.IRModule:
    """relu(x @ w) for a constant w of ``width`` columns, and a softmax: two kernels."""
    x = relax.Var("x", relax.TensorType((17, 33), "float32"))
    weight = relax.const(np.random.default_rng(1).standard_normal((33, width)).astype("float32"))
    hidden = relax.op.nn.relu(relax.op.matmul(x, weight))
    return module_of([x], relax.op.nn.softmax(hidden))


def build(folder: Path | str, mod: tvm.IRModule | None = None, **settings: object) -> Library:
    return relay.build(mod if mod is not None else model(), kernel_cache=str(folder), **settings)


def run(library: Library) -> np.ndarray:
    module = relay.GraphModule(library)
    module.run(x=X)
    return np.asarray(module.get_output(0).numpy())


def counts(library: Library) -> tuple[int, int]:
    return library.report.kernel_cache.hits, library.report.kernel_cache.misses


def files(folder: Path) -> list[Path]:
    return [path for path, _, _ in kernel_cache.entries(folder)]
