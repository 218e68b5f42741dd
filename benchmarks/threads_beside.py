"""Parallel kernels while the cores are wanted by others too: own threads, TVM's pool, one thread.

    python benchmarks/threads_beside.py                    # a minute and a half
    python benchmarks/threads_beside.py --only quiet,nice

Three kernels are built once and loaded by three processes, one for each contender, which take turns of a fraction of a
second in every situation. Every call is timed. A quota needs the right to make a control group; without it that
situation is left out, and the script says so. Writes ``benchmarks/results/<date>-threads-beside.json``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.networks.graph import GraphWriter, he_normal
from tvm_ext import relay
from tvm_ext.errors import InputError

CONTENDERS = {
    "own": {"TVM_EXT_THREAD_POOL": "own"},
    "tvm": {"TVM_EXT_THREAD_POOL": "tvm"},
    "one": {"TVM_EXT_THREAD_POOL": "own", "TVM_NUM_THREADS": "1"},
}
SHAPES = {"product": (50, 1500), "convolution": (1, 64, 28, 28), "softmax": (256, 512)}
ROUNDS, PAUSE_S = 4, 0.1  # the pause: until TVM's workers sleep
BUSY = (sys.executable, "-c", "while True: pass")
QUOTA_CORES = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Of single calls, in microseconds; ``callers`` threads call at once."""

    situation: str
    kernel: str
    contender: str
    callers: int
    calls: int
    mean_us: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """``around`` holds while all contenders take turns, ``prefix`` starts their processes."""

    name: str
    callers: int = 1
    spins: bool = False
    around: Callable[[], AbstractContextManager[Sequence[str]]] = lambda: contextlib.nullcontext(())


# --- kernels -------------------------------------------------------------------------------------------------------
def graph(name: str) -> GraphWriter:
    writer = GraphWriter(name)
    x = writer.input("x", SHAPES[name])
    if name == "product":
        writer.op("MatMul", x, writer.constant("w", he_normal(0, "w", (1500, 768), fan_in=1500)), name="y")
        writer.output("y", (50, 768))
    elif name == "convolution":
        weights = writer.constant("w", he_normal(0, "w", (64, 64, 3, 3), fan_in=576))
        writer.op("Conv", x, weights, name="y", pads=[1, 1, 1, 1])
        writer.output("y", SHAPES[name])
    else:
        writer.op("Softmax", x, name="y", axis=-1)
        writer.output("y", SHAPES[name])
    return writer


def build(folder: Path) -> None:
    for name in SHAPES:
        mod, params = relay.frontend.from_onnx(graph(name).model())
        relay.build(mod, params=params, num_threads=os.cpu_count()).export_library(folder / f"{name}.so")


# --- a contender's process -----------------------------------------------------------------------------------------
class Spinner:
    """A thread that is busy, without Python's lock, while the context lasts."""

    def __init__(self) -> None:
        self.stop = False
        self.thread = threading.Thread(target=self._spin)

    def _spin(self) -> None:
        while not self.stop:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)  # about 10 ms

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop = True
        self.thread.join()


def time_calls(main: Callable[[Any], object], x: Any, seconds: float) -> list[float]:
    """Microseconds of each call, for so long."""
    times = []
    for _ in range(10):
        main(x)
    end = time.perf_counter_ns() + int(seconds * 1e9)
    start = time.perf_counter_ns()
    while start < end:
        main(x)
        now = time.perf_counter_ns()
        times.append((now - start) / 1e3)
        start = now
    return times


def serve(folder: Path) -> None:
    """Answer each line of the standard input, a request, with a line of times."""
    rng = np.random.default_rng(0)
    libraries = {name: relay.load(folder / f"{name}.so") for name in SHAPES}
    inputs = {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        name, found = request["kernel"], []
        mains = [libraries[name].vm()["main"] for _ in range(request["callers"])]

        def work(main: Any, name: str = name, seconds: float = request["seconds"], found: list[Any] = found) -> None:
            found += time_calls(main, inputs[name], seconds)

        with Spinner() if request["spins"] else contextlib.nullcontext():
            others = [threading.Thread(target=work, args=(main,)) for main in mains[1:]]
            for thread in others:
                thread.start()
            work(mains[0])
            for thread in others:
                thread.join()
        print(json.dumps(found), flush=True)


class Contender:
    """A process that answers requests."""

    def __init__(self, name: str, folder: Path, prefix: Sequence[str]) -> None:
        command = [*prefix, sys.executable, __file__, "--child", str(folder)]
        environment = {**os.environ, **CONTENDERS[name]}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def times(self, **request: Any) -> list[float]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        times: list[float] = json.loads(stdout.readline())
        return times

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


# --- situations ----------------------------------------------------------------------------------------------------
@contextmanager
def busy_processes(count: int, *prefix: str) -> Iterator[Sequence[str]]:
    processes = [subprocess.Popen([*prefix, *BUSY]) for _ in range(count)]
    try:
        yield ()
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def quota() -> Iterator[Sequence[str]]:
    """A control group of `QUOTA_CORES`, by version 2 or 1. Raises OSError where none may be made."""
    second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup", "" if second else "cpu", f"threads-beside-{os.getpid()}")
    group.mkdir()
    try:
        period = 100_000
        limit = int(QUOTA_CORES * period)
        if second:
            (group / "cpu.max").write_text(f"{limit} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(limit))
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    finally:
        group.rmdir()


@contextmanager
def one_core() -> Iterator[Sequence[str]]:
    yield ("taskset", "-c", str(min(os.sched_getaffinity(0))))


SITUATIONS = [
    Situation(name="quiet"),
    Situation(name="spinner in this process", spins=True),
    Situation(name="spinner in another process", around=lambda: busy_processes(1)),
    Situation(
        name="nice 19 on every core", around=lambda: busy_processes(len(os.sched_getaffinity(0)), "nice", "-n", "19")
    ),
    Situation(name="4 threads, a module each", callers=4),
    Situation(name="quota of 1.5 cores", around=quota),
    Situation(name="taskset to one core", around=one_core),
]


def start(folder: Path, prefix: Sequence[str], stack: ExitStack) -> dict[str, Contender]:
    return {name: stack.enter_context(Contender(name, folder, prefix)) for name in CONTENDERS}


def measure(situation: Situation, folder: Path, seconds: float, usual: dict[str, Contender]) -> Iterator[Times]:
    """``usual``: contenders that nothing was put before, which serve several situations."""
    found: dict[tuple[str, str], list[float]] = {pair: [] for pair in itertools.product(SHAPES, CONTENDERS)}
    with situation.around() as prefix, ExitStack() as stack:
        contenders = start(folder, prefix, stack) if prefix else usual
        for _, (kernel, name) in itertools.product(range(ROUNDS), found):
            request = {"kernel": kernel, "callers": situation.callers, "spins": situation.spins}
            found[kernel, name] += contenders[name].times(**request, seconds=seconds / ROUNDS)
            time.sleep(PAUSE_S)
    for (kernel, name), times in found.items():
        p50, p99 = np.percentile(times, [50, 99])
        yield Times(
            situation=situation.name,
            kernel=kernel,
            contender=name,
            callers=situation.callers,
            calls=len(times),
            mean_us=statistics.fmean(times),
            p50_us=float(p50),
            p99_us=float(p99),
        )


def rows(results: Sequence[Times]) -> Table:
    shown = Table("situation", "kernel", *(f"{name} {what}" for what in ("p50", "mean", "p99") for name in CONTENDERS))
    by_row = itertools.groupby(results, lambda item: (item.situation, item.kernel))
    for (situation, kernel), group in by_row:
        items = list(group)
        numbers = [getattr(item, f"{what}_us") for what in ("p50", "mean", "p99") for item in items]
        shown.add_row(situation, kernel, *(f"{number:.0f}" for number in numbers))
    return shown


def main(
    seconds: Annotated[float, typer.Option(min=0.01, help="Of each kernel, contender and situation.")] = 0.6,
    only: Annotated[str, typer.Option(help="Beginnings of situations' names, by commas.")] = "",
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    child: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time kernels in every situation, and write the results."""
    if child is not None:
        serve(child)
        return
    wanted = [item for item in SITUATIONS if item.name.startswith(tuple(only.split(",")))]
    if not wanted:
        raise InputError(f"--only {only!r} begins no situation.", ", ".join(item.name for item in SITUATIONS))
    environment = current_environment()
    path = result_path("threads-beside", environment, output)
    results: list[Times] = []
    with tempfile.TemporaryDirectory() as folder, progress() as tell, ExitStack() as stack:
        build(Path(folder))
        usual = start(Path(folder), (), stack)
        for situation in wanted:
            tell(situation.name)
            try:
                results += measure(situation, Path(folder), seconds, usual)
            except PermissionError as error:
                print(f"{situation.name} is left out: {error}", file=sys.stderr)
    write_results(path, "threads-beside", environment, results)
    show(rows(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
