"""Our ranking of CUTLASS's templates beside the vendor's heuristics, product by product; nothing here is measured.

    pip install 'tvm-ext[heuristics]'
    python benchmarks/gpu/heuristics.py                    # A100 and H200

The list: every matrix product of Roller's, ALCOP's and Bolt's evaluations, in half precision. "place" is where the
threadblock tile that the vendor's heuristics name first stands among the proposals of `byoc_cutlass/products.py`, from
1. Writes ``benchmarks/results/<date>-heuristics-<device>.json``.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from _common import current_environment, result_path, show, write_results
from rich.table import Table
from vendor_heuristics import vendor_choices

from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.gemm import packed_problem
from tvm_ext.byoc_cutlass.products import ProductFamily
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec

WORKLOADS = Path(__file__).resolve().parent.parent / "workloads"
DEVICES = ("nvidia-a100", "nvidia-h200")
FIRST = 8
"""A profiler that measures so many proposals finds the vendor's choice among them, or does not."""

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    batch: int
    m: int
    n: int
    k: int
    vendor_tile: tuple[int, int]
    vendor_us: float
    our_tile: tuple[int, int]
    our_us: float
    place: int | None


def products() -> list[Shape]:
    """Batch, M, N, K of every product of the three lists, each once."""
    return sorted({*_alcop(), *_roller(), *_bolt()})


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (WORKLOADS / name).open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _alcop() -> Iterator[Shape]:
    for row in _rows("alcop_ops.csv"):
        if row["op"].endswith("MatMul"):
            yield int(row["B_or_N"] or 1), int(row["M"]), int(row["N"]), int(row["K"])


def _roller() -> Iterator[Shape]:
    for row in _rows("roller_ops.csv"):
        if row["op"] == "MatMul":
            yield 1, int(row["M"]), int(row["N_mm"]), int(row["K"])


def _bolt() -> Iterator[Shape]:
    for row in _rows("bolt_ops.csv"):
        if row["op"].startswith("gemm"):
            m = int(re.findall(r"M=(\d+)", row["shape"])[0])
            columns = re.findall(r"N\d?=(\d+)", row["shape"])
            depths = re.findall(r"K\d?=(\d+)", row["shape"])
            yield from ((1, m, int(n), int(k)) for n, k in zip(columns, depths, strict=True))


def compare(shape: Shape, device: DeviceSpec) -> Row | None:
    """None where either side has no configuration."""
    batch, m, n, k = shape
    problem = packed_problem(m=m, n=n, k=k, batch=batch, arithmetic="float16", out_dtype="float16")
    ours = ProductFamily(problem, device, Epilogue(out_dtype="float16")).propose()
    theirs = vendor_choices(problem, device)
    if not ours or not theirs:
        return None
    tiles = [item.config.threadblock[:2] for item in ours]
    best = theirs[0]
    return Row(
        batch=batch, m=m, n=n, k=k, vendor_tile=best.tile, vendor_us=best.time_us, our_tile=tiles[0],
        our_us=ours[0].time_us, place=tiles.index(best.tile) + 1 if best.tile in tiles else None,
    )  # fmt: skip


def main(
    device: Annotated[list[str] | None, typer.Option(help="Devices of the tables.")] = None,
    output: Annotated[Path | None, typer.Option(help="A folder to write to instead.")] = None,
) -> None:
    """Compare the two rankings and write what came of it."""
    environment, names = current_environment(), device or DEVICES
    own = [output / f"heuristics-{name}.json" if output else None for name in names]
    # refuses before anything is ranked
    paths = [result_path(f"heuristics-{name}", environment, path) for name, path in zip(names, own, strict=True)]
    for name, path in zip(names, paths, strict=True):
        rows = [row for shape in products() if (row := compare(shape, lookup(name)))]
        show(table_of(name, rows))
        write_results(path, "gpu-heuristics", environment, rows)


def table_of(name: str, rows: Sequence[Row]) -> Table:
    among = sum(row.place is not None and row.place <= FIRST for row in rows)
    title = f"{name}: the vendor's tile is among our first {FIRST} for {among} of {len(rows)}"
    table = Table("product", "vendor's tile", "our tile", "place of the vendor's", title=title)
    for row in rows:
        product = f"{row.batch} x {row.m} x {row.n} x {row.k}"
        tiles = (f"{m} x {n}" for m, n in (row.vendor_tile, row.our_tile))
        table.add_row(product, *tiles, "-" if row.place is None else str(row.place))
    return table


if __name__ == "__main__":
    typer.run(main)
