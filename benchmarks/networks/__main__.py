"""Writes a network to a file, for `tvm-ext`: ``python -m benchmarks.networks lstm_tc -o lstm_tc.onnx``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import onnx
import typer

from .models import build_model, names


def main(
    name: Annotated[str | None, typer.Argument(help="All names are listed if left out.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="NAME.onnx if left out.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of an encoder.")] = 128,
) -> None:
    if name is None:
        print("\n".join([*names(), "nasbench_0 to nasbench_4999"]))
        return
    path = output or Path(f"{name}.onnx")
    onnx.save(build_model(name, batch, sequence), path)
    print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
