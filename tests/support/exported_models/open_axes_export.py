"""Writes one network as ONNX with an open batch and open lengths, and inputs of several sizes beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from . import networks
from .open_axes import SIZES, TOKENS


def export(name: str, path: Path) -> None:
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
    with torch.no_grad():
        torch.onnx.export(
            module, tuple(own.values()), str(path), input_names=list(own), dynamic_axes=axes, dynamo=False
        )


if __name__ == "__main__":
    export(sys.argv[1], Path(sys.argv[2]))
