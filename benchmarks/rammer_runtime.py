"""The native CPU runtime: parallel loops on its threads and on TVM's pool, and what an rTask and a barrier cost.

    python benchmarks/rammer_runtime.py               # about a minute and a half
    python benchmarks/rammer_runtime.py --calls 1000  # a quick look

A kernel of about 100 us, divided into as many parts as there are threads, is called again and again: alone, in turns
with a matrix product on NumPy's threads, and in turns with one on ONNX Runtime's. Both pools get the same machine code,
in a process of their own each, by turns; every call is timed. The cost of an rTask is that of an entry of a table whose
kernel does nothing, the call included; a barrier crossing is the time from the end of an entry to the start of one on
the other vEU that waits for it. Writes ``benchmarks/results/<date>-rammer-runtime.json``.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import tvm
import typer
from _common import current_environment, progress, result_path, show, write_results
from onnx import TensorProto, helper
from rich.table import Table
from tvm.script import tirx as T  # noqa: N812 - TVMScript's own name

from tvm_ext.rammer_runtime import native, table
from tvm_ext.support.shared_library import load_library

POOLS = ("own", "tvm")
NEIGHBOURS = ("alone", "numpy", "onnxruntime")
ROUNDS = 4
SIDE = 192  # of the neighbours' matrix products, of about 0.2 ms
ELEMENTS, REPEATS = 1 << 14, 150


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopTimes:
    """Of single calls, in microseconds."""

    pool: str
    neighbour: str
    calls: int
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TableTimes:
    """``per_entry_ns``: the lower quartile of runs, divided by entries. ``what``: ``rtask`` or ``barrier``.

    ``own_share``: of a recorded run, the share of entries that their own vEU's thread ran. Where it is low, threads did
    not get to run, and what crossed vEUs did not cross cores.
    """

    what: str
    entries: int
    per_entry_ns: float
    median_ns: float
    own_share: float


def kernels(folder: Path) -> Path:
    """A library of ``loop``, ``nothing``."""

    @T.prim_func(private=True)
    def loop(x: T.Buffer((ELEMENTS,), "float32"), y: T.Buffer((ELEMENTS,), "float32")):
        for part in T.parallel(64):
            for _repeat in range(REPEATS):
                for i in T.vectorized(ELEMENTS // 64):
                    at = part * (ELEMENTS // 64) + i
                    y[at] = y[at] * T.float32(0.5) + T.sqrt(x[at] + y[at])

    @T.prim_func(private=True)
    def nothing(x: T.handle, begin: T.int32, end: T.int32):
        cell = T.decl_buffer((1,), "int32", data=x)
        if begin > end:
            cell[0] = begin

    functions = {"loop": loop, "nothing": nothing}
    named = {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"} if os.uname().machine == "x86_64" else "llvm")
    path = folder / "kernels.so"
    tvm.tirx.build(tvm.IRModule(named), target=target).export_library(str(path))
    return path


def neighbour(name: str) -> Callable[[], object]:
    """Something else that this process does between two loops."""
    if name == "alone":
        return lambda: None
    left = np.random.default_rng(0).standard_normal((SIDE, SIDE)).astype("float32")
    if name == "numpy":
        return lambda: left @ left
    import onnxruntime

    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (SIDE, SIDE))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, (SIDE, SIDE))]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "product", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": left})


def time_calls(path: Path, calls: int) -> dict[str, list[float]]:
    """Microseconds of each of ``calls`` calls, by neighbour, on the pool that the environment names."""
    function = load_library(path)["loop"]
    rng = np.random.default_rng(0)
    x, y = (tvm.runtime.tensor(rng.random(ELEMENTS, dtype="float32")) for _ in range(2))
    found = {}
    gc.disable()
    for name in NEIGHBOURS:
        other = neighbour(name)
        time.sleep(0.3)  # until the threads of the one before sleep
        times = []
        for _ in range(calls + 50):
            other()
            start = time.perf_counter_ns()
            function(x, y)
            times.append((time.perf_counter_ns() - start) / 1e3)
        found[name] = times[50:]
    return found


def in_process(path: Path, pool: str, calls: int) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--child", str(path), "--calls", str(calls)]
    environment = {**os.environ, "TVM_EXT_THREAD_POOL": pool}
    result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    times: dict[str, list[float]] = json.loads(result.stdout.splitlines()[-1])
    return times


def loops(path: Path, calls: int, tell: Callable[[str], None]) -> list[LoopTimes]:
    times: dict[tuple[str, str], list[float]] = {(pool, name): [] for pool in POOLS for name in NEIGHBOURS}
    for turn in range(ROUNDS):
        for pool in POOLS:
            tell(f"loops on the {pool} pool, round {turn + 1} of {ROUNDS}")
            for name, some in in_process(path, pool, calls // ROUNDS).items():
                times[pool, name] += some
    return [_summary(pool, name, some) for (pool, name), some in times.items()]


def _summary(pool: str, name: str, times: Sequence[float]) -> LoopTimes:
    p50, p99, p999 = np.percentile(times, [50, 99, 99.9])
    return LoopTimes(
        pool=pool,
        neighbour=name,
        calls=len(times),
        p50_us=float(p50),
        p99_us=float(p99),
        p999_us=float(p999),
        max_us=max(times),
    )


def streams(what: str, entries: int) -> tuple[tuple[table.Entry, ...], ...]:
    """One stream of entries, or two whose entries each wait for the one before it on the other vEU."""
    if what == "rtask":
        return (tuple(table.Entry(call=0, begin=0, end=1) for _ in range(entries)),)
    first = tuple(table.Entry(call=0, begin=0, end=1, waits=((1, n),) if n else ()) for n in range(entries // 2))
    second = tuple(table.Entry(call=0, begin=0, end=1, waits=((0, n + 1),)) for n in range(entries // 2))
    return first, second


def tables(path: Path, runs: int = 200, entries: int = 4000) -> list[TableTimes]:
    library = load_library(path)
    argument = tvm.runtime.tensor(np.zeros(1, "int32"))
    found = []
    for what in ("rtask", "barrier"):
        module = native.make_module(
            table.ExecutionTable(
                name=what,
                arena_bytes=0,
                arguments=(table.Argument(bytes=4),),
                kernels=(table.Kernel(symbol="nothing", tasks=1, parameters=(table.Parameter(bytes=4, alignment=4),)),),
                buffers=(table.Buffer(argument=0, bytes=4),),
                calls=(table.Call(name="nothing", kernel=0, buffers=(0,)),),
                streams=streams(what, entries),
            ),
            [library],
        )
        run = module[what]
        times = []
        for _ in range(runs):
            start = time.perf_counter_ns()
            run(argument)
            times.append((time.perf_counter_ns() - start) / entries)
        low, middle = np.percentile(times[10:], [25, 50])
        shares = []
        native.record(module)
        for _ in range(20):
            run(argument)
            shares.append(statistics.mean(row.thread == row.unit for row in native.recorded(module)))
        found.append(
            TableTimes(
                what=what,
                entries=entries,
                per_entry_ns=float(low),
                median_ns=float(middle),
                own_share=statistics.median(shares),
            )
        )
    return found


def rows(results: Sequence[LoopTimes]) -> Table:
    shown = Table("pool", "in turns with", "calls", "p50 us", "p99 us", "p99.9 us", "max us", "p99 / p50")
    for item in results:
        numbers = (item.p50_us, item.p99_us, item.p999_us, item.max_us, item.p99_us / item.p50_us)
        shown.add_row(item.pool, item.neighbour, str(item.calls), *(f"{number:.1f}" for number in numbers))
    return shown


def main(
    calls: Annotated[int, typer.Option(min=100, help="Of each loop.")] = 10_000,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    child: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time parallel loops, rTasks and barriers, and write the results."""
    if child is not None:
        print(json.dumps(time_calls(child, calls)))
        return
    environment = current_environment()
    path = result_path("rammer-runtime", environment, output)
    with tempfile.TemporaryDirectory() as folder, progress() as tell:
        library = kernels(Path(folder))
        measured = loops(library, calls, tell)
        tell("tables")
        costs = tables(library)
    results: list[Any] = [*measured, *costs]
    write_results(path, "rammer-runtime", environment, results)
    show(rows(measured))
    for item in costs:
        shares = f"{item.own_share:.0%} by their own vEU's thread"
        print(f"{item.what}: {item.per_entry_ns:.0f} ns (median {item.median_ns:.0f}), {shares}")
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
