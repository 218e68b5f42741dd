"""Writes one network as ONNX with an open batch and open lengths, and inputs of several sizes beside it."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np

from . import networks
from .open_axes import SIZES, TOKENS


def export(name: str, path: Path, exporter: str) -> None:
    """``path``, and ``inputs0.npz``, ... beside it, by `SIZES`."""
    import torch

    module, own = networks.make(name, 0), networks.draw_inputs(name, 0)
    axes = {key: {0: "batch", 1: "length"} if key in TOKENS else {0: "batch"} for key in own}
    for index, (batch, length) in enumerate(SIZES):
        drawn = networks.draw_inputs(name, index, batch)
        for key in TOKENS:
            if key in drawn:
                drawn[key] = drawn[key].repeat(1, 2)[:, :length]
        np.savez(path.with_name(f"inputs{index}.npz"), **{key: value.numpy() for key, value in drawn.items()})
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for all of attention, which ONNX has not
    how: dict[str, Any] = {"dynamic_axes": axes, "dynamo": False}
    if exporter == "dynamo":  # which takes an extent of 1 for one that stays 1
        own = networks.draw_inputs(name, 0, batch=2)
        sizes = tuple({axis: torch.export.Dim(dim) for axis, dim in axes[key].items()} for key in own)
        how = {"dynamic_shapes": _arguments(module, sizes), "dynamo": True, "external_data": False}
    with torch.no_grad():
        torch.onnx.export(module, tuple(own.values()), str(path), input_names=list(own), **how)


def _arguments(module: Any, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """``sizes`` as `forward` takes them: several values under one star are one argument."""
    kinds = [item.kind for item in inspect.signature(module.forward).parameters.values()]
    return (sizes,) if inspect.Parameter.VAR_POSITIONAL in kinds else sizes


if __name__ == "__main__":
    export(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
