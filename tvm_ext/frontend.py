"""Importing models: `from_onnx`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import tvm

from tvm_ext.relay_passes.onnx.import_limits import ImportLimits
from tvm_ext.relay_passes.onnx.import_model import import_model

IMPORT_SECONDS = "tvm_ext.import_seconds"
"""Attribute of an imported module: how long the import took, for the build report."""
MODEL_NAME = "tvm_ext.model"
"""Attribute of an imported module: what reports call the model, its file's name or its graph's."""


def from_onnx(
    model: Any | str | os.PathLike[str] | bytes,
    shape: Mapping[str, Sequence[int | str | None]] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    limits: ImportLimits | None = None,
) -> tuple[tvm.IRModule, dict[str, tvm.runtime.Tensor]]:
    """Import an ONNX model for inference.

    Parameters
    ----------
    model
        An ``onnx.ModelProto``, the path of a file, or a file's bytes.
    shape
        Shapes by input name; binds the dimensions that the model leaves open, e.g. ``{"input": (1, 3, 224, 224)}``.
    dtype
        What the inputs' dtypes are expected to be: a mismatch with the model is an error here rather than at run time.
    constants
        Values of inputs that must be known at build time (the target of a Reshape, say); they are no inputs any more.
    limits
        How large the model and its tensors may be; None: the defaults, or what ``TVM_EXT_IMPORT_LIMITS`` says.

    Returns
    -------
    The Relax module, whose ``main`` takes the inputs and then the parameters, and the parameters by name.

    Raises
    ------
    ModelError
        for a file that is not a valid model or passes a limit, or operators that cannot be imported.
    InputError
        for a shape or dtype that does not fit the model's inputs.
    """
    start = time.perf_counter()
    mod, params = import_model(model, shape=shape, dtype=dtype, constants=constants, limits=limits)
    mod = mod.with_attr(MODEL_NAME, _title(model))
    return mod.with_attr(IMPORT_SECONDS, time.perf_counter() - start), params


def _title(model: Any) -> str:
    if isinstance(model, str | os.PathLike):
        return os.path.splitext(os.path.basename(model))[0]
    graph = getattr(model, "graph", None)
    return str(getattr(graph, "name", "")) or "main"
