"""Importing models: `from_onnx` and `from_torch`. What a build begins with: `prepare`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax

from tvm_ext._tvm import Expr
from tvm_ext.errors import InputError
from tvm_ext.relay_passes.onnx.import_limits import ImportLimits
from tvm_ext.relay_passes.onnx.import_model import import_model, require_bound_dimensions
from tvm_ext.runtime.graph_module import TensorSpec, find_spec
from tvm_ext.runtime.signature import input_specs, spec_of

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
    title, held = _title(model), [model]
    del model  # a model that the caller does not keep is freed as soon as its weights are read
    mod, params = import_model(held.pop(), shape=shape, dtype=dtype, constants=constants, limits=limits)
    mod = mod.with_attr(MODEL_NAME, title)
    return mod.with_attr(IMPORT_SECONDS, time.perf_counter() - start), params


def from_torch(
    program: Any | str | os.PathLike[str],
    shape: Mapping[str, Sequence[int | None]] | None = None,
    dtype: Mapping[str, str] | None = None,
) -> tuple[tvm.IRModule, dict[str, tvm.runtime.Tensor]]:
    """Import a program of ``torch.export.export``, or of a file, for inference. Needs torch (extra ``models``).

    Parameters
    ----------
    program
        A ``torch.export.ExportedProgram`` of a module in eval mode, or a file: of ``torch.export.save`` or of
        ``torch.jit.save``.
    shape
        Shapes by input name; binds the dimensions that the program leaves open, e.g. ``{"x": (4, 3, 224, 224)}``. Of
        TorchScript all inputs need one.
    dtype
        Of a TorchScript file's inputs, where not float32.

    Returns
    -------
    The Relax module, whose ``main`` takes the inputs and then the parameters, and the parameters by name: the module's
    parameters, buffers and constants, in torch's own memory where they lie in row-major order there.

    Raises
    ------
    UnsupportedEnvironmentError
        where torch is missing.
    InputError
        for what is no such program or file, and for a shape that does not fit it or leaves a dimension open.
    ModelError
        for operators that cannot be imported, each with a node, or whose result would not be torch's.
    """
    from tvm_ext.relay_passes.pytorch.import_program import import_program
    from tvm_ext.relay_passes.pytorch.read_file import read_program

    start, title = time.perf_counter(), _title(program)
    names: dict[str, str] = {}
    if isinstance(program, str | os.PathLike):
        program, shape, names = read_program(program, shape or {}, dtype or {})
    mod, params = import_program(program, shape, names)
    mod = mod.with_attr(MODEL_NAME, title)
    return mod.with_attr(IMPORT_SECONDS, time.perf_counter() - start), params


def _title(model: Any) -> str:
    if isinstance(model, str | os.PathLike):
        return os.path.splitext(os.path.basename(model))[0]
    graph = getattr(model, "graph", None)
    return str(getattr(graph, "name", "")) or "main"


def prepare(mod: tvm.IRModule | relax.Function, params: Mapping[str, Any], *, may_loop: bool = False) -> tvm.IRModule:
    """``mod`` with its parameters bound, checked: what the passes start from. Raises InputError as `build` says.

    What is computed twice, as by branches that each begin with the same ReLU, is computed once: before parameters are
    bound, for constants would be compared element by element.

    ``may_loop``: whether the steps of recurrent layers may be counted at run time.
    """
    mod = bind_params(relax.transform.EliminateCommonSubexpr(call_only=True)(as_module(mod)), params)
    require_bound_dimensions(mod, may_loop=may_loop)
    return mod


def bind_params(mod: tvm.IRModule, params: Mapping[str, Any]) -> tvm.IRModule:
    """A copy of ``mod`` whose parameters ``params`` are constants; raises InputError where one does not fit."""
    specs = input_specs(mod)
    variables = {var.name: var for var in mod["main"].params}
    values = {}
    for name, value in params.items():
        spec = find_spec(specs, name)
        _check_param(spec, value)
        values[variables[spec.name]] = (
            value if isinstance(value, tvm.runtime.Tensor) else tvm.runtime.tensor(np.asarray(value))
        )
    if not values:
        return mod
    return relax.transform.BindParams("main", values)(mod)


def as_module(mod: tvm.IRModule | relax.Function) -> tvm.IRModule:
    if isinstance(mod, relax.Function):
        return tvm.IRModule({"main": mod})
    if "main" not in [variable.name_hint for variable in mod.get_global_vars()]:
        raise InputError("the module has no function 'main'.", "rename the function to build to 'main'")
    return mod


def _check_param(spec: TensorSpec, value: Expr) -> None:
    given = spec_of(spec.name, value)
    assert given.shape is not None
    if not spec.accepts([int(size) for size in given.shape], given.dtype):
        raise InputError(
            f"parameter {spec.name!r} should be {spec}, but is {given}.",
            "pass the parameters that belong to this model",
        )
