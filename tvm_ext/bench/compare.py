"""The timing behind `tvm-ext bench` and ``benchmarks/``: one model, this plugin beside its peers, in the same run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from rich.table import Table

from tvm_ext.devices.device_db import TargetLike
from tvm_ext.options import BuildOptions
from tvm_ext.records.memory import MemoryUse
from tvm_ext.relay_passes.onnx.load import load_onnx
from tvm_ext.reports.text import format_time
from tvm_ext.support.arrays import Array
from tvm_ext.support.files import temporary_folder

from . import contenders, models, timing
from .contenders import ONNX_RUNTIME, OPENVINO, OURS, PEERS, STOCK_TVM, Contender
from .environment import Environment, Placement, current_environment, on_main_core, place_threads
from .memory import MEASURED, MIB, measured

STOCK_BUDGET_S = 15.0
"""Stock TVM leaves CPU kernels unscheduled and takes seconds per run; a handful of samples says enough."""


OtherPeer = Callable[[Mapping[str, Array], int, Placement | None], Contender]
"""Prepares a contender of a benchmark's own from the inputs, the number of threads and their cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One contender's times. ``relative_error`` is against ONNX Runtime's outputs; None where that is not known.

    ``memory`` is None where it was not measured.
    """

    name: str
    import_s: float
    build_s: float
    samples_s: tuple[float, ...]
    relative_error: float | None
    memory: MemoryUse | None = None

    @property
    def median_s(self) -> float:
        return timing.median(self.samples_s)

    def quantile_s(self, share: float) -> float:
        """The time that ``share`` of the samples keep within: of 24 samples p99 is the slowest."""
        return float(np.quantile(self.samples_s, share, method="inverted_cdf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """What `bench` measured. ``skipped`` pairs each peer that could not take part with the reason and remedy."""

    model: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]  # (name, shape)
    target: str
    environment: Environment
    timings: tuple[Timing, ...]  # ours first
    skipped: tuple[tuple[str, str], ...] = ()
    flops: float = 0.0  # of one run, by our build's report: convolutions count as direct sums

    def timing(self, name: str) -> Timing | None:
        return next((item for item in self.timings if item.name == name), None)

    @property
    def batch(self) -> int:
        """How many items one run works on: the first extent of the first input."""
        return next((shape[0] for _, shape in self.inputs if shape), 1)

    def speedup(self, peer: str) -> float | None:
        """The peer's median time over ours: above 1 where this plugin is faster; None where the peer took no part."""
        ours, other = self.timing(OURS), self.timing(peer)
        return other.median_s / ours.median_s if ours is not None and other is not None else None

    def fastest_speedup(self, peer: str) -> float | None:
        """`speedup` of the fastest samples: what is left of a comparison on a machine that is busy with other work."""
        ours, other = self.timing(OURS), self.timing(peer)
        return min(other.samples_s) / min(ours.samples_s) if ours is not None and other is not None else None

    def table(self) -> Table:
        return result_table([self])


def bench(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    batch: int = 1,
    shape: Mapping[str, Sequence[int]] | None = None,
    inputs: Mapping[str, Array] | None = None,
    target: TargetLike = "llvm",
    options: BuildOptions | None = None,
    peers: Sequence[str] | None = None,
    others: Sequence[OtherPeer] = (),
    rounds: int = 8,
    stock_budget_s: float = STOCK_BUDGET_S,
    seed: int = 0,
    memory: bool = False,
    report: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchResult:
    """Time one model built by this plugin beside its peers, interleaved in this process.

    ``model`` is a built-in name (`models.NAMES`, for which ``batch`` counts), a path or a ModelProto.
    ``inputs`` default to `models.random_inputs`. ``peers`` are "onnxruntime", "openvino_f32" and "stock_tvm"; None
    takes every one that is installed and lists the others as skipped. ``progress`` is told each step: one to build or
    load each contender, one to time them all. ``clock`` is as in `timing.interleave`. Each thread of a contender has a
    core to itself meanwhile (`placement`). ``memory`` also measures what those of `memory.MEASURED` take, in
    new processes. ``report`` is a file for the report of our build, with the time of a run and the memory of all.

    Raises InputError for an unknown peer, UnsupportedEnvironmentError for a named peer that is not installed, and what
    importing and building the model raise.
    """
    environment = current_environment()  # first, so that its load average states what others do, not this
    tell = progress or (lambda _step: None)
    placement = place_threads(environment.threads)
    chosen, skipped = _choose_peers(peers)
    name, proto = _load(model, batch, seed)
    values = dict(inputs) if inputs is not None else dict(models.random_inputs(proto, seed, shape=shape))
    tell(f"building {name}")
    ours = contenders.prepare_ours(proto, values, shape, target, options)
    entrants = [ours]
    if ONNX_RUNTIME in chosen:
        tell("loading it into ONNX Runtime")
        entrants.append(contenders.prepare_onnx_runtime(proto, values, environment.threads, placement))
    if OPENVINO in chosen:
        tell("loading it into OpenVINO")
        entrants.append(contenders.prepare_openvino(proto, values, environment.threads, placement))
    if STOCK_TVM in chosen:
        tell("building it with stock TVM")
        entrants.append(contenders.prepare_stock_tvm(proto, values, shape, target))
    entrants += [prepare(values, environment.threads, placement) for prepare in others]
    tell(f"timing {len(entrants)} contenders in turns")
    with on_main_core(placement):
        timings = _measure(entrants, rounds, stock_budget_s, clock)
    if memory:
        tell("measuring memory")
        timings = _with_memory(timings, ours, proto, values, environment.threads)
    if report is not None and ours.library is not None:
        peaks = tuple((item.name, item.memory) for item in timings if item.memory is not None)
        replace(ours.library.report, run_s=timings[0].median_s, memory=peaks).save(report)
    return BenchResult(
        model=name,
        inputs=tuple((key, tuple(value.shape)) for key, value in values.items()),
        target=str(target),
        environment=environment,
        timings=timings,
        skipped=skipped,
        flops=sum(item.choice.flops * item.calls for item in ours.library.report.operators) if ours.library else 0.0,
    )


def relative_error(actual: Sequence[Array], expected: Sequence[Array]) -> float:
    """Over the outputs, the largest ||actual - expected|| / ||expected|| in float64; NaN and Inf count as infinite."""
    assert len(actual) == len(expected), (len(actual), len(expected))
    return max(_tensor_error(a, e) for a, e in zip(actual, expected, strict=True))


def _tensor_error(actual: Array, expected: Array) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    wanted = expected.astype(np.float64)
    difference = float(np.linalg.norm((actual.astype(np.float64) - wanted).ravel()))
    if not np.isfinite(difference):
        return float("inf")
    return difference / max(float(np.linalg.norm(wanted.ravel())), 1e-30) if difference else 0.0


def _choose_peers(peers: Sequence[str] | None) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    asked = PEERS if peers is None else tuple(peers)
    reasons = {name: contenders.missing_peer(name) for name in asked}
    for reason in reasons.values():
        if reason is not None and peers is not None:
            raise reason
    skipped = tuple((name, str(reason)) for name, reason in reasons.items() if reason is not None)
    return [name for name, reason in reasons.items() if reason is None], skipped


def _load(model: str | os.PathLike[str] | onnx.ModelProto, batch: int, seed: int) -> tuple[str, onnx.ModelProto]:
    if isinstance(model, onnx.ModelProto):
        return model.graph.name or "model", model
    if model in models.NAMES:
        return str(model), models.build_model(str(model), batch, seed)
    return os.path.basename(model), load_onnx(model)


def _measure(
    entrants: Sequence[Contender], rounds: int, stock_budget_s: float, clock: Callable[[], float]
) -> tuple[Timing, ...]:
    runners = []
    for entrant in entrants:
        budget = stock_budget_s if entrant.name == STOCK_TVM else math.inf
        first_s = timing.time_once(entrant.run)
        runners.append(timing.Runner(name=entrant.name, run=entrant.run, budget_s=budget, estimate_s=first_s))
    errors = _errors(entrants)
    samples = timing.interleave(runners, rounds=rounds, clock=clock)
    return tuple(
        Timing(
            name=entrant.name,
            import_s=entrant.import_s,
            build_s=entrant.build_s,
            samples_s=samples[entrant.name],
            relative_error=errors.get(entrant.name),
        )
        for entrant in entrants
    )


def _with_memory(
    timings: Sequence[Timing], ours: Contender, model: onnx.ModelProto, inputs: Mapping[str, Array], threads: int
) -> tuple[Timing, ...]:
    with temporary_folder("memory") as folder:
        library, file, values = folder / "model.so", folder / "model.onnx", folder / "inputs.npz"
        assert ours.library is not None
        ours.library.export_library(library)
        onnx.save(model, file)
        np.savez(values, **inputs)  # type: ignore[arg-type] # the stub knows of its second argument alone
        return tuple(
            replace(item, memory=measured(item.name, library if item.name == OURS else file, values, threads))
            if item.name in MEASURED
            else item
            for item in timings
        )


def _errors(entrants: Sequence[Contender]) -> dict[str, float]:
    """Each contender's error against ONNX Runtime, from the outputs of the run before; empty without ONNX Runtime.

    A contender without outputs marks a limit of the machine, and has no error.
    """
    reference = next((entrant.outputs() for entrant in entrants if entrant.name == ONNX_RUNTIME), None)
    if reference is None:
        return {}
    others = [entrant for entrant in entrants if entrant.name != ONNX_RUNTIME]
    results = {entrant.name: entrant.outputs() for entrant in others}
    return {name: relative_error(values, reference) for name, values in results.items() if values}


def result_table(results: Sequence[BenchResult]) -> Table:
    """One row per result and contender. "vs": the peer's median over this row's, above 1 where this row is faster.

    The peaks of memory are those while a file is loaded and while it runs, over what the process had before.
    """
    versus = ("vs ONNX Runtime", "vs OpenVINO", "vs stock")  # in the order of `PEERS`
    table = Table("model", "input", "contender", "build s", "p50", "p90", "p99", "items/s", *versus, "error")
    with_memory = any(item.memory for result in results for item in result.timings)
    for title in ("load MiB", "run MiB") if with_memory else ():
        table.add_column(title)
    for column in table.columns[3:]:
        column.justify = "right"
    for result in results:
        for item in result.timings:
            peaks = _peaks(item.memory) if with_memory else ()
            table.add_row(*_cells(result, item), *peaks, end_section=item is result.timings[-1])
    return table


def _cells(result: BenchResult, item: Timing) -> tuple[str, ...]:
    _, shape = result.inputs[0]
    error = "-" if item.relative_error is None else f"{item.relative_error:.1e}"
    ratios = [_ratio(result.timing(peer), item) for peer in PEERS]
    return (
        result.model,
        "x".join(map(str, shape)),
        item.name,
        f"{item.import_s + item.build_s:.1f}",
        *(format_time(item.quantile_s(share)) for share in (0.5, 0.9, 0.99)),
        f"{result.batch / item.median_s:.4g}",
        *ratios,
        error,
    )


def _peaks(memory: MemoryUse | None) -> tuple[str, str]:
    if memory is None:
        return "-", "-"
    return f"{memory.load_peak_bytes / MIB:.1f}", f"{memory.run_peak_bytes / MIB:.1f}"


def _ratio(peer: Timing | None, item: Timing) -> str:
    return "-" if peer is None or peer is item else f"{peer.median_s / item.median_s:.3g}x"
