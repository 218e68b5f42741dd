"""Networks exported with open axes, run by `tvm_ext.InferenceSession` at several sizes beside ONNX Runtime.

    python -m tests.support.exported_models.open_axes
    python -m tests.support.exported_models.open_axes --library --exporter torchscript --exporter dynamo
    python -m tests.support.exported_models.open_axes bert resnet18 --output open.json

The batch is open, and of token sequences the length. With ``--library`` one library of `relay.build_open` runs all
sizes: any batch up to the largest, and the lengths as a list. Each network is drawn, exported and run in a process of
its own.
Exits with 1 where one failed.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tvm_ext.support.files import write_atomically

from ..commands import Output, console
from . import networks
from .check import compare
from .open_networks import MORE
from .runs import attempt

SIZES = ((1, 24), (2, 24), (3, 17), (1, 40), (4, 9))
"""(Batch, length of token sequences) of the runs, in turn."""

TOKENS = ("input_ids", "attention_mask")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="NETWORK...", help="All of them if left out.")] = None,
    library: Annotated[bool, typer.Option("--library", help="One library in place of a session.")] = False,
    exporters: Annotated[
        list[str] | None, typer.Option("--exporter", help="torchscript (the default) or dynamo; may be given twice.")
    ] = None,
    limit_s: Annotated[float, typer.Option(min=1.0, help="Seconds for one network.")] = 600.0,
    output: Output = None,
) -> None:
    """Export networks with open axes and compare sessions of ours with ONNX Runtime's at several sizes."""
    networks.require_packages()
    results = []
    chosen = names or [*networks.NETWORKS, *MORE]
    for name, exporter in itertools.product(chosen, exporters or ["torchscript"]):
        if exporter not in networks.network(name).exporters:
            continue
        with tempfile.TemporaryDirectory() as folder:
            module, answer, model = f"{__package__}.open_axes", Path(folder) / "answer.json", f"{folder}/model.onnx"
            outcome, problem = attempt([f"{__package__}.open_axes_export", name, model, exporter], limit_s)
            if outcome == "passed":
                outcome, problem = attempt(
                    [module, "--library" if library else "--answer", str(answer), model], limit_s
                )
            result = json.loads(answer.read_text()) if answer.exists() else {}
        results.append({"network": name, "exporter": exporter, "outcome": outcome, "problem": problem, **result})
        console.print(results[-1], markup=False, highlight=False)
        if output is not None:
            write_atomically(output, (json.dumps(results, indent=1) + "\n").encode())
    raise typer.Exit(0 if all(result["outcome"] == "passed" for result in results) else 1)


def check(path: Path, *, library: bool = False) -> dict[str, Any]:
    """What became of the model in ``path``: "passed" or "wrong", at which sizes, what ran it, and how long all took."""
    import onnxruntime

    from tvm_ext import InferenceSession

    start = time.perf_counter()
    peer = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    made = one_library(path) if library else ""
    session = InferenceSession(path.with_suffix(".so") if library else path)
    problems = []
    for index, _ in enumerate(SIZES):
        with np.load(path.with_name(f"inputs{index}.npz")) as stored:
            values: Mapping[str, Any] = {item.name: stored[item.name] for item in session.get_inputs()}
        problem = compare(session.run(None, values), peer.run(None, dict(values)))
        problems += [f"{SIZES[index]}: {problem}"] if problem else []
    return {
        "outcome": "wrong" if problems else "passed",
        "problem": "; ".join(problems),
        "session": made if library else str(session.report),
        "seconds": round(time.perf_counter() - start, 1),
    }


def one_library(path: Path) -> str:
    """Writes the library for all `SIZES` beside the model; what it says of its dimensions."""
    import onnx

    from tvm_ext import relay

    model = onnx.load(str(path))
    names = {dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim}
    sizes: dict[str, Any] = {"batch": (1, max(batch for batch, _ in SIZES))}
    if "length" in names:
        sizes["length"] = sorted({length for _, length in SIZES})
    library = relay.build_open(model, sizes)
    library.export_library(path.with_suffix(".so"))
    dimension = library.dimensions[0]
    return "divided" if dimension.axes is not None else dimension.reason


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ("--answer", "--library"):
        found = check(Path(sys.argv[3]), library=sys.argv[1] == "--library")
        write_atomically(sys.argv[2], json.dumps(found).encode())
    else:
        app()
