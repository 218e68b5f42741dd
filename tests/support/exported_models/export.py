"""Writes one network as ONNX, with two sets of inputs beside it. A process of its own: torch and TVM do not meet."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tvm_ext.support.files import produce_atomically

from . import networks
from .record import EXPORTERS

INPUT_SETS = 2


def inputs_file(model: Path, index: int) -> Path:
    """Where the inputs number ``index`` of an exported model are: an npz by input name."""
    return model.with_name(f"{model.stem}.inputs{index}.npz")


def export(name: str, exporter: str, model: Path, seed: int = 0, batch: int | None = None) -> None:
    """Write ``model`` and the inputs beside it; the ONNX file is last, so that it stands for all of them.

    ``batch`` takes the place of the network's own batch size.
    """
    assert exporter in EXPORTERS, exporter
    module = networks.make(name, seed)
    sets = [networks.draw_inputs(name, seed + index, batch) for index in range(INPUT_SETS)]
    for index, values in enumerate(sets):
        arrays = {key: value.numpy() for key, value in values.items()}
        produce_atomically(inputs_file(model, index), functools.partial(_write_inputs, arrays))
    produce_atomically(model, lambda path: _write(module, sets[0], exporter, path))


def _write_inputs(arrays: dict[str, Any], path: Path) -> None:
    np.savez(path, **arrays)


def _write(module: Any, inputs: dict[str, Any], exporter: str, path: Path) -> None:
    import torch

    torch.backends.mha.set_fastpath_enabled(False)  # one operator for all of attention, which ONNX has not
    how = {"dynamo": True, "external_data": False} if exporter == "dynamo" else {"dynamo": False}
    with torch.no_grad():
        torch.onnx.export(module, tuple(inputs.values()), str(path), input_names=list(inputs), **how)


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]) if sys.argv[5:] else None)
