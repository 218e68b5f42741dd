"""The command ``tvm-ext verify``: a GPU kernel, or an operator of a model, in the SIMT interpreter."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError, ModelError
from tvm_ext.options import BuildOptions

from . import common

if TYPE_CHECKING:
    from tvm_ext._tvm import IRModule, PrimFunc


def verify(
    kernel: Annotated[
        str,
        typer.Argument(metavar="MODULE.py:FUNC|MODEL", help="A PrimFunc in a Python file, or a model with --operator."),
    ],
    device: common.Gpu = common.DEFAULT_GPU,
    operator: Annotated[str | None, typer.Option(help="The operator of the model. Default: list all names.")] = None,
    block: Annotated[list[int] | None, typer.Option(help="Run this block only; may be repeated.")] = None,
    shape: common.ShapeOption = None,
    batch: common.Batch = 1,
    seed: common.Seed = 0,
    pipelining: common.Pipelining = None,
    candidates: common.CandidateCount = None,
    as_json: common.AsJson = False,
) -> None:
    """Check a GPU kernel without a GPU: races, bounds, barriers, values, bank conflicts. Exit code 1: it is wrong."""
    from tvm_ext.devices.device_db import lookup
    from tvm_ext.verify.verification import to_json
    from tvm_ext.verify.verification import verify as check

    spec = lookup(device)
    _require_gpu(spec)
    if ":" in kernel and kernel.rpartition(":")[0].endswith(".py"):
        function, reference = load_function(kernel), None
    else:
        options = BuildOptions.current(**common.build_settings(pipelining=pipelining, candidates=candidates))
        found = _of_model(kernel, operator, spec, shape, batch, options, as_json)
        if found is None:
            return
        function, reference = found
    result = check(function, spec, seed=seed, blocks=block, reference=reference)
    if as_json:
        typer.echo(to_json(result))
    else:
        common.output_console().print(result)
    raise typer.Exit(code=0 if result.ok else 1)


def _require_gpu(spec: DeviceSpec) -> None:
    if spec.kind not in ("cuda", "rocm", "opencl"):
        raise InputError(f"{spec.name} is no GPU.", "name a GPU: `tvm-ext devices` lists them")


def load_function(text: str) -> PrimFunc | IRModule:
    """What ``MODULE.py:FUNC`` names: a PrimFunc, a module, a schedule (its module), or a function that makes one.

    Raises InputError for a file or name that is not there.
    """
    path, _, name = text.rpartition(":")
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}", "write MODULE.py:FUNC")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # TVMScript looks its sources up there
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise InputError(f"{path} has no {name!r}", common.nearest(name, known))
    found = getattr(module, name)
    if callable(found) and not _is_function(found):
        found = found()
    found = getattr(found, "mod", found)
    if not _is_function(found):
        raise InputError(
            f"{text} is of type {type(found).__name__}, no PrimFunc", "name a PrimFunc, a module or a maker"
        )
    return found


def _is_function(value: object) -> bool:
    from tvm_ext._tvm import IRModule, PrimFunc

    return isinstance(value, PrimFunc | IRModule)


def _of_model(
    model: str,
    operator: str | None,
    device: DeviceSpec,
    shape: list[str] | None,
    batch: int,
    options: BuildOptions,
    as_json: bool,
) -> tuple[PrimFunc, PrimFunc] | None:
    """(the operator's kernels for ``device``, its reference on the CPU); None where the operators were listed."""
    from tvm_ext import relay
    from tvm_ext.tir_passes.construct_kernels import construct_kernel
    from tvm_ext.verify.cpu_reference import cpu_reference

    from .explain import operator_names, operators_of

    if model.endswith(".py"):
        raise ModelError(f"{model} does not say which function.", f"write {model}:FUNC")
    mod, params = common.import_model(model, shape, batch)
    operators = operators_of(relay.prepare(mod, params))
    names = operator_names(operators)
    if operator is None:
        common.list_operators(names, as_json)
        return None
    if operator not in dict(names):
        raise InputError(f"the model has no operator {operator!r}.", common.nearest(operator, dict(names)))
    function = operators[operator]
    return construct_kernel(function, operator, device, options), cpu_reference(function)
