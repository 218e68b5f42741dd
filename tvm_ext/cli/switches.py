"""The options of ``tvm-ext compile`` that switch a build's features; left out, a build's defaults hold."""

from __future__ import annotations

from typing import Annotated

import typer

Roller = Annotated[bool, typer.Option("--roller/--no-roller", help="Construct kernels, or leave them to stock TVM.")]
Persistent = Annotated[
    bool | None,
    typer.Option(
        "--persistent/--no-persistent", help="Chains of products as one kernel each; left out: where it pays."
    ),
]
Cutlass = Annotated[
    bool | None, typer.Option("--cutlass/--no-cutlass", help="Products by CUTLASS's templates, on CUDA devices.")
]
Rammer = Annotated[
    bool | None, typer.Option("--rammer/--no-rammer", help="Many operators' rTasks in one schedule, on CPUs.")
]
