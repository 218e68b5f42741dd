"""Where the time of an import and a build goes, per model: import, each pass, code generation; stock TVM beside.

    python benchmarks/compile_time.py resnet50 minilm

Writes ``benchmarks/results/<date>-compile-time.json`` after each model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import onnx
import tvm
import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from tvm_ext import relay
from tvm_ext._tvm import import_onnx
from tvm_ext.device_db import device_for_target
from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.testing import models

PASSES_SHOWN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileTime:
    """Seconds that one model took; ``passes_s`` slowest first."""

    model: str
    batch: int
    kernels: int
    import_s: float
    build_s: float
    code_generation_s: float
    passes_s: tuple[tuple[str, float], ...]
    stock_import_s: float | None
    stock_build_s: float | None


def measure(name: str, batch: int, with_stock: bool) -> CompileTime:
    """Import and build once in this process; stock TVM afterwards, so that ours pays for first-time imports."""
    model = models.build_model(name, batch)
    start = time.perf_counter()
    mod, params = relay.frontend.from_onnx(model)
    import_s = time.perf_counter() - start
    report = relay.build(mod, "llvm", params=params).report
    stock = _stock(model) if with_stock else (None, None)
    return CompileTime(
        model=name,
        batch=batch,
        kernels=len(report.operators),
        import_s=import_s,
        build_s=report.build_s,
        code_generation_s=report.code_generation_s,
        passes_s=tuple(sorted(((p.name, p.seconds) for p in report.passes), key=lambda item: -item[1])),
        stock_import_s=stock[0],
        stock_build_s=stock[1],
    )


def _stock(model: onnx.ModelProto) -> tuple[float, float]:
    start = time.perf_counter()
    mod = import_onnx(model)
    imported = time.perf_counter()
    tvm.compile(mod, device_for_target("llvm")[1])
    return imported - start, time.perf_counter() - imported


def table(results: list[CompileTime]) -> Table:
    result = Table("model", "kernels", "import s", "build s", "code generation s", "slowest passes", "stock s")
    for item in results:
        slowest = ", ".join(f"{name} {seconds:.2f}" for name, seconds in item.passes_s[:PASSES_SHOWN])
        stock = "-" if item.stock_build_s is None else f"{(item.stock_import_s or 0) + item.stock_build_s:.1f}"
        times = (item.import_s, item.build_s, item.code_generation_s)
        result.add_row(item.model, str(item.kernels), *(f"{t:.1f}" for t in times), slowest, stock)
    return result


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Built-in models; all of them.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    stock: Annotated[bool, typer.Option(help="Also build with stock TVM.")] = True,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time imports and builds and write the results."""
    environment = current_environment()
    path = output or result_path("compile-time", environment)
    results: list[CompileTime] = []
    for name in names or models.names():
        try:
            with progress() as tell:
                tell(f"building {name}")
                results.append(measure(name, batch, stock))
        except UnsupportedEnvironmentError as error:
            print(f"skipped {name}: {error}")
            continue
        write_results(path, "compile-time", environment, results)
    show(table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
