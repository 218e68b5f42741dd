"""The command ``tvm-ext run``: a library or a model, once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tvm_ext.support.arrays import Array

from . import common


def run(
    model: Annotated[
        str, typer.Argument(metavar="LIBRARY|MODEL", help="A compiled library (.so), or a model to compile first.")
    ],
    input: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE.npy", help="An input. Default: seeded random numbers.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write all outputs to this .npz file.")] = None,
    target: common.Target = "llvm",
    shape: common.ShapeOption = None,
    seed: common.Seed = 0,
    as_json: common.AsJson = False,
) -> None:
    """Run a library or a model once and show its outputs."""
    from tvm_ext import relay
    from tvm_ext.runtime.library import random_inputs

    with common.progress_bar(4) as steps:
        if model.endswith((".so", ".dylib", ".dll")):
            steps.begin(f"loading {model}")
            library = relay.load(model)
        else:
            library = common.build_model(steps, model, shape, target)
        steps.begin("running")
        module: Any = library["default"]()
        module.set_input(**common.read_inputs(input or []))
        unset = [spec for spec in library.inputs if not module.has_input(spec.name)]
        sizes = common.parse_shapes(shape)
        drawn = [replace(spec, shape=tuple(sizes[spec.name])) if spec.name in sizes else spec for spec in unset]
        module.run(**random_inputs(drawn, seed))
    if isinstance(library, relay.OpenLibrary) and not as_json:
        typer.echo(f"ran as {' + '.join(library.name_of(part) for part in module.parts())}", err=True)
    results = [module.get_output(index).numpy() for index in range(module.get_num_outputs())]
    names = [spec.name for spec in library.outputs]
    if output is not None:
        _save_outputs(output, names, results)
    _show_outputs(names, results, [spec.name for spec in unset], as_json)


def _save_outputs(path: Path, names: Sequence[str], results: Sequence[Any]) -> None:
    import io

    import numpy as np

    from tvm_ext.support.files import write_atomically

    buffer = io.BytesIO()
    np.savez(buffer, **dict(zip(names, results, strict=True)))
    write_atomically(path, buffer.getvalue())


def _show_outputs(names: Sequence[str], results: Sequence[Any], random: Sequence[str], as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"name": name, "shape": list(value.shape), "dtype": str(value.dtype), **_statistics(value)}
        for name, value in zip(names, results, strict=True)
    ]
    if as_json:
        typer.echo(json.dumps({"random_inputs": list(random), "outputs": rows}))
        return
    if random:
        typer.echo(f"random input(s): {', '.join(random)}", err=True)
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        typer.echo(f"{row['name']}: {shape} {row['dtype']}, min {row['min']}, mean {row['mean']}, max {row['max']}")


def _statistics(value: Array) -> dict[str, float | None]:
    """Minimum, mean and maximum; None for an empty tensor or one that has no order."""
    if value.size == 0 or value.dtype.kind not in "fiub":
        return {"min": None, "mean": None, "max": None}
    exact = value.astype("float64")
    return {"min": float(exact.min()), "mean": float(exact.mean()), "max": float(exact.max())}
