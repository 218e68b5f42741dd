"""Every candidate of six operators, measured on one core: what ALCOP's Figures 12 and 13 are drawn from.

    python benchmarks/tuning_measured.py --compile-only       # minutes of a core; goes on after a kill
    python benchmarks/tuning_measured.py --seconds 300        # adds to the result file, as often as you like
    python benchmarks/tuning_curves.py --measured /tmp/tvm_ext-tuning-measured/tuning-measured.json

A candidate is timed by the thread's processor time, candidates in turns and in a new order each round; what is slow
after a few rounds drops out. Its time is the median of its six fastest samples: the clock rises by an eighth at times,
and the second fastest says who met that twice. "own loops" compares candidates as they
are measured here (`_tile_families.py`) with kernels as a build emits them.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tvm
import typer
from _common import current_environment, progress, result_path, write_results
from _tile_families import OPERATORS, case_of, compiled, family_of, key_of, portable, space_of, visits_of
from _tiles import Bench, Case

from tvm_ext.analysis.computations import dtype_of, static_shape
from tvm_ext.autotune.cpu_space import CpuTileSpace
from tvm_ext.cost.cpu_tiles import program_of
from tvm_ext.records.choice import ConstantPack
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.relay_passes.pack_constants import pack
from tvm_ext.support.files import write_atomically

LIBRARIES = Path(tempfile.gettempdir()) / "tvm_ext-tuning-measured"
CHUNK = 12
"""Kernels of one library: what a kill may cost."""
SAMPLE_S = 0.0004
KEPT = 6
"""Samples that are kept of a candidate, the fastest ones."""
CLOSE = ((2, 4.0), (4, 2.0), (8, 1.3), (16, 1.12))
"""After so many rounds a candidate goes on if it is within this factor of the fastest."""
COMPARED = 10


def compile_all(names: Sequence[str], libraries: Path, say: Callable[[str], None]) -> None:
    """Compile the kernels that are not there yet."""
    for name in names:
        case = case_of(name)
        space = space_of(case)
        keys = sorted({key_of(space[place]) for place in range(len(space))})
        for first in range(0, len(keys), CHUNK):
            say(f"{name}: {first} of {len(keys)}")
            _compile_chunk(case, libraries / name, keys[first : first + CHUNK], first)


def _compile_chunk(case: Case, folder: Path, keys: Sequence[Any], first: int) -> None:
    library, listing = folder / f"{first}.so", folder / f"{first}.json"
    text = json.dumps(keys)
    if listing.is_file() and json.loads(listing.read_text())["keys"] == json.loads(text):
        return
    families = {f"k{first + i}": family_of(case, key) for i, key in enumerate(keys)}
    folder.mkdir(parents=True, exist_ok=True)
    compiled(case, families).export_library(str(library))
    packs = [{str(at): to_json(how) for at, how in item.packs.items()} for item in families.values()]
    write_atomically(listing, json.dumps({"keys": keys, "packs": packs}).encode())


class Candidates:
    """The candidates of one operator, ready to run."""

    def __init__(self, case: Case, space: CpuTileSpace, folder: Path, seed: int = 0) -> None:
        self.case, self.space = case, space
        rng = np.random.default_rng(seed)
        loads = case.computation.loads()
        self._arrays = [rng.standard_normal(static_shape(item.source)).astype(dtype_of(item.source)) for item in loads]
        target = case.computation.target
        self.output = tvm.runtime.tensor(np.zeros(static_shape(target), dtype_of(target)))
        self._plain = [tvm.runtime.tensor(array) for array in self._arrays]
        self._packed: dict[tuple[int, ConstantPack], Any] = {}
        self._functions: dict[Any, tuple[Any, list[Any]]] = {}
        for listing in sorted(folder.glob("*.json"), key=lambda path: int(path.stem)):
            self._load(listing)
        extents = [axis.extent for axis in case.expr.spatial]
        self.runs = [self._run(space[place], extents) for place in range(len(space))]

    def _load(self, listing: Path) -> None:
        library = tvm.runtime.load_module(str(listing.with_suffix(".so")))
        record = json.loads(listing.read_text())
        for i, ((vector, register), packs) in enumerate(zip(record["keys"], record["packs"], strict=True)):
            arguments = list(self._plain)
            for position, text in packs.items():
                how, at = from_json(ConstantPack, text), int(position)
                if (at, how) not in self._packed:
                    self._packed[at, how] = tvm.runtime.tensor(pack(self._arrays[at], how))
                arguments[at] = self._packed[at, how]
            self._functions[vector, tuple(register)] = library[f"k{int(listing.stem) + i}"], arguments

    def _run(self, tile: Any, extents: Sequence[int]) -> Callable[[], object]:
        function, arguments = self._functions[key_of(tile)]
        everything = (*arguments, self.output, tvm.runtime.tensor(visits_of(tile, extents)))
        return lambda: function(*everything)

    def check(self, count: int = 24) -> None:
        """Some results against each other: different tiles of one operator, poisoned output."""
        expected = None
        for place in np.linspace(0, len(self.runs) - 1, count).astype(int):
            self.output.copyfrom(np.full(self.output.shape, np.nan, str(self.output.dtype)))
            self.runs[place]()
            found = self.output.numpy()
            expected = found if expected is None else expected
            if not np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected):
                raise ValueError(f"{self.case.name}: {self.space[int(place)]} computes something else")


def sample(run: Callable[[], object], repeats: int) -> float:
    """Microseconds of one run, by the thread's processor time."""
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - start) / repeats * 1e6


def measure_rounds(runs: Sequence[Callable[[], object]], samples: list[list[float]], until: float, seed: int) -> int:
    """Rounds until the clock says ``until``; ``samples`` of each candidate grow. The number of rounds begun."""
    rng = np.random.default_rng(seed)
    rounds = min(map(len, samples))
    while time.monotonic() < until:
        best = [min(own, default=math.inf) for own in samples]
        limit = next((factor for least, factor in reversed(CLOSE) if rounds >= least), math.inf)
        going = [place for place, own in enumerate(best) if own <= limit * min(best) or not samples[place]]
        for place in rng.permutation(going):
            if time.monotonic() >= until and samples[place]:
                break
            if not samples[place]:
                runs[place]()
                best[place] = sample(runs[place], 1)
            samples[place].append(sample(runs[place], max(1, math.ceil(SAMPLE_S * 1e6 / best[place]))))
        rounds += 1
    return rounds


def time_of(samples: Sequence[float]) -> float:
    """A candidate's microseconds: the median of its fastest samples."""
    return float(np.median(sorted(samples)[:KEPT]))


def own_loops(candidates: Candidates, samples: Sequence[Sequence[float]], seconds: float) -> list[float]:
    """Time of a kernel with loops of its own over that of the family's, for some of the fastest and some others."""
    order = np.argsort([time_of(own) for own in samples])
    places = [*order[: COMPARED // 2], *order[len(order) // 20 :: len(order) // (COMPARED // 2)][: COMPARED // 2]]
    case, space = candidates.case, candidates.space
    bench = Bench(case, [program_of(space[int(place)], case.expr, case.device) for place in places])
    pairs = [run for i, place in enumerate(places) for run in (bench.runs[i], candidates.runs[place])]
    found: list[list[float]] = [[] for _ in pairs]
    until = time.monotonic() + seconds
    while time.monotonic() < until or not found[0]:
        for own, run in zip(found, pairs, strict=True):
            own.append(sample(run, 3))
    times = [time_of(own) for own in found]
    return [round(own / family, 4) for own, family in zip(times[::2], times[1::2], strict=True)]


def main(
    seconds: Annotated[float, typer.Option(help="of measuring, all operators together")] = 300,
    operator: Annotated[list[str] | None, typer.Option(help="only these")] = None,
    libraries: Annotated[Path, typer.Option(help="where compiled kernels are kept")] = LIBRARIES,
    compare: Annotated[bool, typer.Option(help="also kernels with loops of their own (compiles some)")] = True,
    compile_only: Annotated[bool, typer.Option(help="and measure nothing")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file of all samples; default: beside the kernels.")] = None,
) -> None:
    """Compile what is not compiled yet, and measure; what the result file knows already counts."""
    environment = current_environment()
    path = result_path("tuning-measured", environment, output or libraries / "tuning-measured.json")
    known = {item["operator"]: item for item in json.loads(path.read_text())["results"]} if path.is_file() else {}
    names = [*(operator or OPERATORS)]
    with progress() as say:
        compile_all(names, libraries, say)
        for number, name in enumerate([] if compile_only else names):
            say(name)
            case = case_of(name)
            space = space_of(case)
            candidates = Candidates(case, space, libraries / name)
            candidates.check()
            samples = _samples(space, known.get(name))
            rounds = measure_rounds(candidates.runs, samples, time.monotonic() + seconds / len(names), number)
            record = _record(name, case, space, samples)
            if compare:
                record["own_loops"] = own_loops(candidates, samples, seconds / len(names) / 20)
            known[name] = record
            write_results(path, "every candidate of some operators on one core", environment, list(known.values()))
            best = min(time_of(own) for own in samples)
            print(f"{name}: {len(space)} candidates, {rounds} rounds, fastest {best:.1f} us", flush=True)
    print("compiled" if compile_only else f"written to {path}")


def _samples(space: CpuTileSpace, known: dict[str, Any] | None) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in range(len(space))]
    for configuration, own in (known or {"samples_us": {}})["samples_us"].items():
        place = space.index(configuration)
        if place is not None:
            samples[place] = list(own)
    return samples


def _record(name: str, case: Case, space: CpuTileSpace, samples: Sequence[Sequence[float]]) -> dict[str, Any]:
    """``samples_us``: by configuration, the fastest ones."""
    fastest = {
        space[place].configuration: [round(item, 2) for item in sorted(own)[:KEPT]]
        for place, own in enumerate(samples)
        if own
    }
    constructed = space[0].configuration
    return {
        "operator": name,
        "gflop": case.expr.flops / 1e9,
        "candidates": len(space),
        "constructed": constructed,
        "expr": to_json(case.expr),
        "device": to_json(portable(case.device)),
        "samples_us": fastest,
    }


if __name__ == "__main__":
    typer.run(main)
