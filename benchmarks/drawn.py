"""Float32 operators of all kinds, of sizes as networks have them: this plugin beside ONNX Runtime, in one process.

    python benchmarks/drawn.py --seed 1                                # 300 operators, the types in turn
    python benchmarks/drawn.py --only Conv --only Softmax --count 40
    python benchmarks/drawn.py --irregular --count 60                  # reads or order that depend on values

A part of them at a time is built, then timed in turns: in each round ours one after another, then ONNX Runtime's, with
pauses while threads of the other spin. Lists those below ONNX Runtime's speed. Writes
``benchmarks/results/<date>-drawn.json``.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from _common import current_environment, result_path, show, write_results
from _drawn_irregular import IRREGULAR, DrawnOperator
from _drawn_layers import ALL, TYPES, draw_operators
from rich.table import Table

from tvm_ext.bench import timing
from tvm_ext.bench.compare import relative_error
from tvm_ext.bench.contenders import ONNX_RUNTIME, OURS, Contender, prepare_onnx_runtime, prepare_ours
from tvm_ext.bench.environment import Placement, on_main_core, place_threads
from tvm_ext.errors import TvmExtError

AT_A_TIME = 50
"""Operators whose weights and sessions are in memory together."""

LARGEST_ERROR = 1e-4
"""By norm, against ONNX Runtime."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTimes:
    """What one operator took; ``refused``: why it did not run here or there."""

    operator: str
    text: str
    samples_s: dict[str, tuple[float, ...]]
    error: float = 0.0
    refused: str = ""

    @property
    def ratio(self) -> float:
        """ONNX Runtime's median over ours."""
        return statistics.median(self.samples_s[ONNX_RUNTIME]) / statistics.median(self.samples_s[OURS])

    def record(self) -> dict[str, Any]:
        ours, peer = (statistics.median(self.samples_s.get(name, (0.0,))) for name in (OURS, ONNX_RUNTIME))
        fields = {"operator": self.operator, "text": self.text, "ours_s": ours, "onnxruntime_s": peer}
        return {**fields, "error": self.error, **({"refused": self.refused} if self.refused else {})}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An operator built by both sides, ours first, and how often each runs for a sample."""

    drawn: DrawnOperator
    sides: tuple[Contender, Contender]
    repeats: tuple[int, int]
    error: float


def prepare(drawn: DrawnOperator, threads: int, placement: Placement | None) -> Pair | DrawnTimes:
    """Built and run by both sides, or why not."""
    model, values = drawn.model()
    try:
        ours = prepare_ours(model, values, None, "llvm", None)
        peer = prepare_onnx_runtime(model, values, threads, placement)
        repeats = (_repeats(ours.run), _repeats(peer.run))
    except (TvmExtError, RuntimeError) as refusal:  # ONNX Runtime's errors are RuntimeErrors
        first = str(refusal).splitlines()[0]
        return DrawnTimes(operator=drawn.operator, text=drawn.text, samples_s={}, refused=first)
    error = relative_error(ours.outputs(), peer.outputs())
    return Pair(drawn=drawn, sides=(ours, peer), repeats=repeats, error=error)


def _repeats(run: Callable[[], None]) -> int:
    fastest = min(timing.time_once(run) for _ in range(8))
    return max(1, math.ceil(timing.MINIMUM_SAMPLE_S / fastest))


def measure(pairs: Sequence[Pair], rounds: int) -> list[DrawnTimes]:
    """Each round: all of ours, then all of ONNX Runtime's, each behind a run that warms it up."""
    samples: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for side, name in enumerate((OURS, ONNX_RUNTIME)):
            timing.settle()
            for number, pair in enumerate(pairs):
                if name == ONNX_RUNTIME:
                    timing.settle()  # each session has a worker of its own, which spins
                run, repeats = pair.sides[side].run, pair.repeats[side]
                taken = [_sample(run, repeats) for _ in range(3)][1:]
                samples.setdefault((number, name), []).extend(taken)
    return [
        DrawnTimes(
            operator=pair.drawn.operator,
            text=pair.drawn.text,
            samples_s={name: tuple(samples[number, name]) for name in (OURS, ONNX_RUNTIME)},
            error=pair.error,
        )
        for number, pair in enumerate(pairs)
    ]


def _sample(run: Callable[[], None], repeats: int) -> float:
    return timing.time_once(lambda: [run() for _ in range(repeats)]) / repeats


def table_of(results: Sequence[DrawnTimes]) -> Table:
    """A row for each type: how many, the mean, the lowest."""
    table = Table("operator", "timed", "mean", "lowest", "below 1")
    for name in dict.fromkeys(item.operator for item in results):
        ratios = [item.ratio for item in results if item.operator == name and not item.refused]
        if ratios:
            below = sum(ratio < 1 for ratio in ratios)
            mean = statistics.geometric_mean(ratios)
            table.add_row(name, str(len(ratios)), f"{mean:.2f}", f"{min(ratios):.2f}", str(below or ""))
    return table


def behind(results: Sequence[DrawnTimes]) -> Table:
    """Those below ONNX Runtime's speed, slowest first; wrong and refused ones too."""
    table = Table("operator", "operands", "us", "ratio")
    for item in results:
        if item.refused or item.error > LARGEST_ERROR:
            table.add_row(item.operator, item.text, "", item.refused[:60] or f"error {item.error:.1e}")
    timed = sorted((item for item in results if not item.refused), key=lambda item: item.ratio)
    for item in timed:
        if item.ratio < 1:
            own = f"{1e6 * statistics.median(item.samples_s[OURS]):.4g}"
            table.add_row(item.operator, item.text, own, f"{item.ratio:.2f}{' !' * (item.ratio < 0.7)}")
    return table


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"A type of {', '.join(TYPES)}; repeat it for more.")] = None,
    irregular: Annotated[bool, typer.Option(help="Only those whose reads or order depend on values.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Operators.")] = 300,
    seed: Annotated[int, typer.Option(help="Of sizes and values.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time operators and write the results."""
    environment = current_environment()
    placement = place_threads(environment.threads)
    path = result_path("drawn", environment, output)
    results: list[DrawnTimes] = []
    operators = draw_operators(only or (list(IRREGULAR) if irregular else ALL), count, seed)
    while part := list(islice(operators, AT_A_TIME)):
        prepared = [prepare(drawn, environment.threads, placement) for drawn in part]
        results += [item for item in prepared if isinstance(item, DrawnTimes)]
        with on_main_core(placement):
            results += measure([item for item in prepared if isinstance(item, Pair)], rounds)
        write_results(path, "drawn", environment, [item.record() for item in results])
        del prepared
        gc.collect()
    show(table_of(results))
    show(behind(results))
    ratios = [item.ratio for item in results if not item.refused]
    if ratios:
        low, lower = (sum(ratio < limit for ratio in ratios) for limit in (1.0, 0.7))
        mean = statistics.geometric_mean(ratios)
        print(f"{len(ratios)} timed: geometric mean {mean:.2f}, {low} below 1.0, {lower} below 0.7")
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
