"""Where the time of an import and a build goes, per model: cold, known and warm.

    python benchmarks/compile_time.py resnet50 densenet121
    python benchmarks/compile_time.py --beside 4 --no-stock

A cold build is a user's first one, with an empty cache folder. A known one has no kernels but the row that
``tvm-ext devices cpu --measure`` keeps; a warm one has what the cold one left. Each runs in a process of its own;
stock TVM takes its turn in another. ``--beside`` keeps processes busy meanwhile. Time is given twice: elapsed, and of
the processor, which other work on the machine disturbs less. Writes
``benchmarks/results/<date>-compile-time.json`` (``-beside-4``) after each model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.networks import models

DEFAULT = ("resnet50", "densenet121", "vgg19", "minilm")
TARGETS_S = {("resnet50", "cold"): 25.0, ("resnet50", "warm"): 5.0, ("densenet121", "cold"): 60.0}
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """One import and build in a fresh process; ``phases_s`` are elapsed seconds in their order.

    ``first_run_s`` is the first inference: of stock TVM, whose machine code is made there, a large part of the whole.
    """

    start_s: float  # from starting Python to having imported TVM and this package
    import_s: float
    build_s: float
    first_run_s: float
    processor_s: float  # of all threads: import, build and first run
    kernels: int = 0
    found: int = 0
    phases_s: tuple[tuple[str, float], ...] = ()

    @property
    def total_s(self) -> float:
        return self.import_s + self.build_s


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileTime:
    """The builds of one model; ``missed`` names the targets of `TARGETS_S` that were not met."""

    model: str
    batch: int
    load_average: float  # of the machine's other work when the measurement began
    beside: int  # processes that this benchmark kept busy meanwhile
    cold: Build
    known: Build
    warm: Build
    stock: Build | None
    cache_bytes: int
    missed: tuple[str, ...]


def measure(name: str, batch: int, with_stock: bool, measured: Path, beside: int) -> CompileTime:
    """Build ``name`` cold, known, warm, then with stock TVM; ``measured``: a cache folder with this machine's row."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="compile-time-") as folder:
        empty, full = Path(folder, "empty"), Path(folder, "measured")
        empty.mkdir()
        shutil.copytree(measured, full)
        cold, known, warm = (_in_process(name, batch, "ours", cache) for cache in (empty, full, empty))
        size = sum(path.stat().st_size for path in empty.rglob("*") if path.is_file())
        stock = _in_process(name, batch, "stock", empty) if with_stock else None
    taken = {"cold": cold.total_s, "warm": warm.total_s}
    missed = [
        f"{kind}: {taken[kind]:.1f} s instead of {limit:.0f} s"
        for (model, kind), limit in TARGETS_S.items()
        if model == name and taken[kind] > limit
    ]
    return CompileTime(
        model=name,
        batch=batch,
        load_average=load,
        beside=beside,
        cold=cold,
        known=known,
        warm=warm,
        stock=stock,
        cache_bytes=size,
        missed=tuple(missed),
    )


def _in_process(name: str, batch: int, who: str, cache: Path) -> Build:
    command = [sys.executable, __file__, "--inside", who, "--batch", str(batch), "--started", str(time.time()), name]
    done = subprocess.run(
        command, env=_environment(cache), stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return Build(**{**found, "phases_s": tuple(map(tuple, found["phases_s"]))})


def _environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "TVM_EXT_CACHE_DIR": str(cache), "TVM_EXT_KERNEL_CACHE": "auto"}


@contextmanager
def measured_cache() -> Iterator[Path]:
    """A cache folder whose only content is the row that the documented command measures."""
    with tempfile.TemporaryDirectory(prefix="compile-time-measured-") as folder:
        command = [sys.executable, "-m", "tvm_ext.cli", "devices", "cpu", "--measure"]
        subprocess.run(command, env=_environment(Path(folder)), stdout=subprocess.DEVNULL, check=True)
        yield Path(folder)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """As many processes as ``count`` that never give up a core."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def build_here(name: str, batch: int, who: str, started: float) -> Build:
    """One build in this process, which the parent began at time ``started``."""
    from tvm_ext import relay  # not at the top: importing is part of what is measured

    start_s = time.time() - started
    model = models.build_model(name, batch)
    processor = time.process_time()
    if who == "stock":
        return _stock(model, start_s, processor)
    start = time.perf_counter()
    mod, params = relay.frontend.from_onnx(model)
    import_s = time.perf_counter() - start
    start = time.perf_counter()
    library = relay.build(mod, "llvm", params=params)
    build_s = time.perf_counter() - start
    first_run_s = _first_run(library)
    report = library.report
    return Build(
        start_s=start_s,
        import_s=import_s,
        build_s=build_s,
        first_run_s=first_run_s,
        processor_s=time.process_time() - processor,
        kernels=len(report.operators),
        found=report.kernel_cache.hits,
        phases_s=tuple((phase.name, phase.seconds) for phase in report.phases),
    )


def _first_run(library: object) -> float:
    from tvm_ext import relay
    from tvm_ext.runtime.library import random_inputs

    start = time.perf_counter()
    module = relay.GraphModule(library)
    module.run(**random_inputs(library.inputs))  # type: ignore[attr-defined]
    return time.perf_counter() - start


def _stock(model: object, start_s: float, processor: float) -> Build:
    """Stock TVM's default build, of the module with its constants bound; its kernels are too slow to be run here."""
    import tvm

    from tvm_ext._tvm import import_onnx
    from tvm_ext.devices.device_db import device_for_target

    target = device_for_target("llvm")[1]
    start = time.perf_counter()
    mod = import_onnx(model)
    imported = time.perf_counter()
    executable = tvm.compile(mod, target)
    built = time.perf_counter()
    tvm.relax.VirtualMachine(executable, tvm.cpu())  # makes the machine code
    return Build(
        start_s=start_s,
        import_s=imported - start,
        build_s=built - imported,
        first_run_s=time.perf_counter() - built,
        processor_s=time.process_time() - processor,
    )


def table(results: list[CompileTime]) -> Table:
    result = Table(
        "model", "build", "kernels", "start s", "import s", "build s", "first run s", "processor s", "phases", "missed"
    )
    for item in results:
        for kind, build in (("cold", item.cold), ("known", item.known), ("warm", item.warm), ("stock", item.stock)):
            if build is not None:
                times = (build.start_s, build.import_s, build.build_s, build.first_run_s, build.processor_s)
                phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in build.phases_s if seconds >= 0.05)
                missed = "; ".join(text for text in item.missed if text.startswith(kind))
                result.add_row(item.model, kind, str(build.kernels), *(f"{t:.2f}" for t in times), phases, missed)
    return result


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Built-in models; {', '.join(DEFAULT)}.")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    stock: Annotated[bool, typer.Option(help="Also build with stock TVM.")] = True,
    beside: Annotated[int, typer.Option(min=0, help="Processes to keep busy meanwhile.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    inside: Annotated[str | None, typer.Option(hidden=True)] = None,
    started: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Time imports and builds and write the results."""
    if inside is not None:
        print(json.dumps(asdict(build_here((names or DEFAULT)[0], batch, inside, started))))
        return
    environment = current_environment()
    what = f"compile-time-beside-{beside}" if beside else "compile-time"
    path = result_path(what, environment, output)
    results: list[CompileTime] = []
    with measured_cache() as measured, busy_processes(beside):
        for name in names or DEFAULT:
            try:
                with progress() as tell:
                    tell(f"building {name}")
                    results.append(measure(name, batch, stock, measured, beside))
            except subprocess.CalledProcessError as error:
                print(f"skipped {name}: its build failed with exit code {error.returncode}")
                continue
            write_results(path, what, environment, results)
    show(table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
