"""The options of ``tvm-ext compile`` that switch a build's features; left out, a build's defaults hold."""

from __future__ import annotations

from typing import Annotated

import typer

Roller = Annotated[bool, typer.Option("--roller/--no-roller", help="Construct kernels, or leave them to stock TVM.")]
Persistent = Annotated[
    bool | None,
    typer.Option("--persistent/--no-persistent", help="Products in a chain as one kernel. Default: where it pays."),
]
Cutlass = Annotated[
    bool | None, typer.Option("--cutlass/--no-cutlass", help="CUTLASS templates for products (CUDA). Default: off.")
]
Rammer = Annotated[
    bool | None, typer.Option("--rammer/--no-rammer", help="One schedule of many operators (CPUs, CUDA). Default: off.")
]
