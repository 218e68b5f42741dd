"""Networks that others wrote, exported from torch: this plugin beside ONNX Runtime and OpenVINO.

    pip install '.[models,bench]'
    python benchmarks/exported.py                     # all of `tests/support/exported_models/timed.py`, batch 1 and 8
    python benchmarks/exported.py unet dla34 --batch 1 --rounds 20
    python benchmarks/exported.py --only-export       # write the ONNX files, about 12 GB of them, and end

A network below 0.95 of a peer is timed operator by operator as well. Each network is exported by a process of its own,
since torch and TVM do not meet. Writes ``benchmarks/results/<date>-exported-batch<N>.json`` after each network.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from _common import current_environment, result_path, show, write_results
from _models import ModelResult, measure, summary

from tests.support.exported_models import runs
from tests.support.exported_models.networks import network, require_packages
from tests.support.exported_models.timed import PREFIX, TIMED
from tvm_ext import options
from tvm_ext.bench.compare import result_table
from tvm_ext.bench.contenders import ONNX_RUNTIME, OPENVINO
from tvm_ext.relay_passes.onnx.load import load_onnx

PEERS = (ONNX_RUNTIME, OPENVINO)

BEHIND = 0.95
"""A network whose ratio to a peer is below this is explained."""

EXPORT_LIMIT_S = 600.0


def exported(name: str, batch: int, exporter: str, folder: Path) -> Path | None:
    """The network's ONNX file, written unless it is there; None, with a line of reason, where it cannot be."""
    path = folder / f"{name}-{exporter}-{batch}.onnx"
    if path.is_file():
        return path
    require_packages()
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [f"{runs.PACKAGE}.export", PREFIX + name, exporter, str(path), "0", str(batch)]
    outcome, problem = runs.attempt(arguments, EXPORT_LIMIT_S)
    if outcome != "passed":
        print(f"skipped {name}: {outcome}: {problem}")
        return None
    return path


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="NETWORK...", help="All of them if left out.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes; 1 and 8.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 10,
    exporter: Annotated[str, typer.Option(help="dynamo or torchscript, of torch.onnx.export.")] = "torchscript",
    keep: Annotated[Path | None, typer.Option(help="Folder of the ONNX files, instead of the cache's.")] = None,
    only_export: Annotated[bool, typer.Option(help="Write the ONNX files, and time nothing.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON; one batch size only.")] = None,
) -> None:
    """Export networks, time them and write the results."""
    folder = keep or options.cache_directory() / "exported"
    chosen = {name: network(PREFIX + name) for name in names or TIMED}  # raises for a name that is not there
    for size in batch or [1, 8]:
        environment = current_environment()
        what = f"exported-batch{size}"
        path = None if only_export else result_path(what, environment, output)
        files = {name: exported(name, size, exporter, folder) for name in chosen}
        if path is None:
            continue
        results: list[ModelResult] = []
        for name, file in files.items():
            result = measure(name, partial(load_onnx, file), PEERS, BEHIND, rounds=rounds) if file is not None else None
            if result is not None:
                results.append(result)
                write_results(path, what, environment, [item.record() for item in results])
        show(result_table([item.result for item in results]))
        show(summary(results))
        print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
