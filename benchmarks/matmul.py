"""Matrix products in float32: this plugin beside NumPy and ONNX Runtime; a vector times a matrix beside memory speed.

    python benchmarks/matmul.py                     # two squares, the seven MatMul rows of Roller's table, two GEMVs
    python benchmarks/matmul.py 1024 M3 --rounds 20
    python benchmarks/matmul.py M3 --scale 16       # to try the script: M and K are a sixteenth of what they are

The rows of the table keep K and N; M is halved until a run is short. Each product is measured with B as an input of the
run (``variable``) and as weights known at compile time (``constant``); NumPy takes part in both. For a GEMV, whose
matrix is larger than every cache, a kernel that only sums the same number of bytes takes its turns among the others.
Writes ``benchmarks/results/<date>-matmul.json`` after each product.
"""

from __future__ import annotations

import csv
import gc
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tvm
import typer
from _common import current_environment, progress, result_path, show, write_results
from _peers import NUMPY, prepare_numpy_matmul
from rich.table import Table

from benchmarks.networks.graph import GraphWriter, he_normal
from tvm_ext.bench.compare import BenchResult, OtherPeer, bench
from tvm_ext.bench.contenders import ONNX_RUNTIME, OURS, Contender
from tvm_ext.bench.environment import Placement
from tvm_ext.devices import microbench_kernels
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import InputError
from tvm_ext.support.arrays import Array

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "roller_ops.csv"
FORMS = ("variable", "constant")
MAXIMUM_FLOPS = 6e9
"""Of one run: about 20 ms on two cores, so that all products take about a minute."""

FORCED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that choose OpenBLAS' kernels. Kernels for another core halve its speed on AVX-512 machines."""

READ = "read_bandwidth"
SQUARES, GEMVS = (1024, 512), {"gemv": (1, 4096, 8192), "gemv_long": (1, 16384, 2048)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """``M x K`` times ``K x N``; ``group`` is what it is averaged with."""

    id: str
    group: str
    M: int
    K: int
    N: int

    @property
    def flops(self) -> float:
        return 2.0 * self.M * self.K * self.N

    @property
    def matrix_bytes(self) -> int:
        """Of the right operand, nearly all that a GEMV reads."""
        return 4 * self.K * self.N


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductResult:
    """One product in one form, and what each contender took."""

    product: Product
    form: str
    result: BenchResult

    def gflops(self, contender: str) -> float | None:
        timing = self.result.timing(contender)
        return None if timing is None else self.product.flops / timing.median_s / 1e9

    @property
    def of_read_bandwidth(self) -> float | None:
        """For a GEMV, the time that reading its matrix takes over ours: 1 is as fast as memory is."""
        return self.result.speedup(READ)

    def record(self) -> dict[str, Any]:
        fields, peers = asdict(self.result), self.result.timings[1:]
        del fields["environment"], fields["inputs"]
        ours = self.result.timing(OURS)
        assert ours is not None
        return {
            **asdict(self.product),
            "form": self.form,
            "numpy_blas": numpy_blas(),
            "gflops": {item.name: self.gflops(item.name) for item in self.result.timings if item.name != READ},
            "matrix_gb_per_s": self.product.matrix_bytes / ours.median_s / 1e9,
            "speedup": {item.name: self.result.speedup(item.name) for item in peers},
            "fastest_speedup": {item.name: self.result.fastest_speedup(item.name) for item in peers},
            **fields,
        }


def products() -> Iterator[Product]:
    """Squares, the table's rows with M halved until `MAXIMUM_FLOPS` is kept to, and the GEMVs."""
    for size in SQUARES:
        yield Product(id=str(size), group="square", M=size, K=size, N=size)
    with WORKLOAD.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["op"] == "MatMul":
                yield _scaled(row)
    for name, (M, K, N) in GEMVS.items():
        yield Product(id=name, group="gemv", M=M, K=K, N=N)


def _scaled(row: Mapping[str, str]) -> Product:
    """M6 is 65536 x 30522 x 1024: 62.5 MFLOP for each row of the left operand, so 64 rows."""
    M, K, N = (int(row[key]) for key in ("M", "K", "N_mm"))
    while 2.0 * M * K * N > MAXIMUM_FLOPS:
        M //= 2
    return Product(id=row["id"], group="table", M=M, K=K, N=N)


def measure(product: Product, form: str, rounds: int, tell: Any) -> ProductResult:
    """Build the product with every contender and time them."""
    graph = GraphWriter(product.id)
    left = graph.input("a", (product.M, product.K))
    weights = he_normal(0, "b", (product.K, product.N), fan_in=product.K)
    right = graph.constant("b", weights) if form == "constant" else graph.input("b", (product.K, product.N))
    graph.op("MatMul", left, right, name="c")
    graph.output("c", (product.M, product.N))

    def numpy_peer(inputs: Mapping[str, Array], threads: int, placement: Placement | None) -> Contender:
        return prepare_numpy_matmul(inputs["a"], inputs.get("b", weights), threads, placement)

    others: list[OtherPeer] = [numpy_peer]
    if product.group == "gemv":
        others.append(lambda _inputs, threads, _placement: prepare_read(product.matrix_bytes, threads))
    result = bench(
        graph.model(),
        peers=[ONNX_RUNTIME],
        others=others,
        rounds=rounds,
        progress=lambda step: tell(f"{product.id}, {form} B: {step}"),
    )
    return ProductResult(product=product, form=form, result=result)


def prepare_read(size_bytes: int, threads: int) -> Contender:
    """A contender that only reads ``size_bytes``. It has no outputs, being a limit and no way to multiply."""
    run, _ = reader(size_bytes, threads)
    return Contender(name=READ, import_s=0.0, build_s=0.0, run=run, outputs=list)


def reader(size_bytes: int, threads: int) -> tuple[Callable[[], None], tvm.runtime.Tensor]:
    """A kernel of TVM's that adds up ``size_bytes`` of float32 ones, an equal part in each thread, and its sums."""
    device, target = device_for_target("llvm")
    width = device.teu_lanes * microbench_kernels.LOAD_CHAINS
    blocks = size_bytes // (4 * threads * width)
    kernel = microbench_kernels.load_kernel(device.teu_lanes, threads, blocks, passes=1)
    built = tvm.compile(tvm.IRModule({"main": kernel}), target=target)["main"]
    data = tvm.runtime.tensor(np.ones((threads, blocks * width), "float32"))
    sums = tvm.runtime.tensor(np.zeros((threads, width), "float32"))
    return lambda: built(data, sums), sums


def numpy_blas() -> str:
    """The BLAS that NumPy multiplies with, and the core that its kernels are for: "openblas 0.3.31 SkylakeX"."""
    import threadpoolctl

    libraries = [item for item in threadpoolctl.threadpool_info() if item["user_api"] == "blas"]
    facts = ("internal_api", "version", "architecture")
    return "; ".join(" ".join(str(item[fact]) for fact in facts if fact in item) for item in libraries)


def let_openblas_choose() -> None:
    """Start this program anew without the variables of `FORCED`, which OpenBLAS reads when it is loaded."""
    if any(name in os.environ for name in FORCED):
        kept = {name: value for name, value in os.environ.items() if name not in FORCED}
        os.execve(sys.executable, [sys.executable, *sys.argv], kept)


def table(results: list[ProductResult]) -> Table:
    """A row per product and form: GFLOP/s of each contender, and their times over ours."""
    names = (OURS, NUMPY, ONNX_RUNTIME)
    rows = Table("id", "M x K x N", "B", "ms", *(f"{name} GFLOP/s" for name in names), "vs numpy", "vs ort", "of read")
    for column in rows.columns[3:]:
        column.justify = "right"
    for item in results:
        ours = item.result.timing(OURS)
        assert ours is not None
        rates = [item.gflops(name) for name in names]
        ratios = [item.result.speedup(NUMPY), item.result.speedup(ONNX_RUNTIME), item.of_read_bandwidth]
        rows.add_row(
            item.product.id,
            f"{item.product.M} x {item.product.K} x {item.product.N}",
            item.form,
            f"{ours.median_s * 1e3:.3g}",
            *("-" if rate is None else f"{rate:.0f}" for rate in rates),
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    return rows


def summary(results: list[ProductResult]) -> Table:
    """Geometric means of the speed-ups per group, form and peer."""
    rows = Table("group", "B", "against", "measured", "geometric mean", "lowest")
    for group in dict.fromkeys(item.product.group for item in results):
        for form in FORMS:
            chosen = [item.result for item in results if (item.product.group, item.form) == (group, form)]
            for peer in (NUMPY, ONNX_RUNTIME, READ):
                ratios = [ratio for result in chosen if (ratio := result.speedup(peer)) is not None]
                if ratios:
                    mean = statistics.geometric_mean(ratios)
                    rows.add_row(group, form, peer, str(len(ratios)), f"{mean:.2f}", f"{min(ratios):.2f}")
    return rows


def chosen_products(ids: list[str] | None, scale: int = 1) -> list[Product]:
    """Those called ``ids``, or all, of 1 / ``scale`` of their rows and sums; raises InputError for an unknown one."""
    known = {product.id: product for product in products()}
    for name in ids or []:
        if name not in known:
            raise InputError(f"there is no product {name!r}.", f"the products are {', '.join(known)}")
    chosen = [known[name] for name in ids or known]
    return [replace(item, M=max(1, item.M // scale), K=max(1, item.K // scale)) for item in chosen]


def main(
    ids: Annotated[list[str] | None, typer.Argument(help="Products by name; all of them.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 8,
    scale: Annotated[int, typer.Option(min=1, help="What M and K are divided by, to try the script.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time matrix products and write the results."""
    environment = current_environment()
    path = result_path("matmul", environment, output)
    results: list[ProductResult] = []
    with progress() as tell:
        for product in chosen_products(ids, scale):
            for form in FORMS:
                results.append(measure(product, form, rounds, tell))
                write_results(path, "matmul", environment, [result.record() for result in results])
                gc.collect()  # operands of up to 128 MB
    show(table(results))
    print(f"NumPy's BLAS: {numpy_blas()}")
    show(summary(results))
    print(f"written: {path}")


if __name__ == "__main__":
    let_openblas_choose()
    typer.run(main)
