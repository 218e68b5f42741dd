"""Files of PyTorch: programs of torch.export, and TorchScript, of which torch's own converter makes such programs."""

from __future__ import annotations

import logging
import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_ext import _tvm
from tvm_ext.errors import InputError, ModelError, TvmExtError

from .nodes import require_torch

_SAVE = "torch.export.save(torch.export.export(module.eval(), inputs), 'model.pt2')"


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is an archive, as torch writes them; ONNX files are none."""
    return zipfile.is_zipfile(path)


def read_program(
    path: str | os.PathLike[str], shape: Mapping[str, Sequence[int | None]], dtype: Mapping[str, str]
) -> tuple[Any, Mapping[str, Sequence[int | None]], dict[str, str]]:
    """The program in ``path``, the shapes of its inputs, and what the file calls those that have other names in it.

    TorchScript says neither shapes nor dtypes: ``shape`` has one for each input, ``dtype`` those that are not float32.

    Raises
    ------
    UnsupportedEnvironmentError
        torch is not installed.
    InputError
        ``shape`` or ``dtype`` does not fit the inputs of a TorchScript file.
    ModelError
        The file has no program, or torch cannot make one of its TorchScript.
    """
    torch = require_torch("files of PyTorch")
    with zipfile.ZipFile(path) as archive:
        parts = {name.split("/")[1] for name in archive.namelist() if "/" in name}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of its own types
            if "models" in parts:
                return torch.export.load(path), shape, {}
            if "code" in parts:
                return _of_script(torch.jit.load(path, map_location="cpu").eval(), shape, dtype)
    except TvmExtError:
        raise
    except (ImportError, *_tvm.IMPORT_ERRORS) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"torch makes no program of {os.fspath(path)!r}: {reason}",
            f"give dtypes that are not float32, or write it anew: {_SAVE}",
        ) from error
    raise ModelError(f"{os.fspath(path)!r} has weights or pickled objects, no program", f"write one: {_SAVE}")


def _of_script(
    module: Any, shape: Mapping[str, Sequence[int | None]], dtype: Mapping[str, str]
) -> tuple[Any, Mapping[str, Sequence[int | None]], dict[str, str]]:
    import torch
    from torch._export.converter import TS2EPConverter  # what torch.export.export says to use of a ScriptModule

    arguments = module.forward.schema.arguments[1:]
    names = [str(argument.name) for argument in arguments]
    if others := [f"{item.name}: {item.type}" for item in arguments if str(item.type) != "Tensor"]:
        raise ModelError(f"its forward takes {', '.join(others)}, which is no tensor", f"wrap the module: {_SAVE}")
    if unknown := [name for name in (*shape, *dtype) if name not in names]:
        raise InputError(f"the program has no input '{unknown[0]}'.", f"its inputs are {', '.join(names)}")
    if bare := [name for name in names if name not in shape or None in shape[name]]:
        raise InputError(
            f"TorchScript does not say the shape of input '{bare[0]}'.",
            f"give all of {', '.join(names)}: --shape {bare[0]}=1,3,224,224 (ids=1,128:int64), or shape= and dtype=",
        )
    values = tuple(torch.ones(tuple(shape[name]), dtype=_torch_dtype(dtype.get(name, "float32"))) for name in names)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # that sizes of 1 stay as they are
    try:
        program = TS2EPConverter(module, values).convert()
    finally:
        logging.disable(before)
    renamed = dict(zip(program.graph_signature.user_inputs, names, strict=True))
    return program, {own: shape[name] for own, name in renamed.items()}, renamed


def _torch_dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"torch has no dtype '{name}'.", "write float32, float16, int64, ...")
    return found
