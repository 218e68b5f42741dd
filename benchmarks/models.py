"""Whole models: this plugin beside ONNX Runtime and stock TVM, interleaved, medians, in one process.

    python benchmarks/models.py                       # every built-in model, batch 1
    python benchmarks/models.py resnet50 --batch 8 --rounds 20

Writes ``benchmarks/results/<date>-models-batch<N>.json`` after each model.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer
from _common import current_environment, progress, result_path, show, write_results

from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.testing import models
from tvm_ext.testing.bench import STOCK_BUDGET_S, BenchResult, bench, result_table


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Built-in names or ONNX files; all built-in ones.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens, for the encoders.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 10,
    peer: Annotated[list[str] | None, typer.Option(help="Whom to compare with; all that are installed.")] = None,
    stock_budget_s: Annotated[float, typer.Option(help="Seconds of runs that stock TVM is given.")] = STOCK_BUDGET_S,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time models and write the results."""
    environment = current_environment()
    what = f"models-batch{batch}"
    path = output or result_path(what, environment)
    results: list[BenchResult] = []
    for name in names or models.names():
        gc.collect()  # the last model's weights, up to half a gigabyte
        try:
            with progress() as tell:
                result = bench(
                    name,
                    batch=batch,
                    sequence=sequence,
                    rounds=rounds,
                    peers=peer or None,
                    stock_budget_s=stock_budget_s,
                    progress=tell,
                )
        except UnsupportedEnvironmentError as error:
            print(f"skipped {name}: {error}")
            continue
        results.append(result)
        show(result.table())
        write_results(path, what, environment, results)
    show(result_table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
