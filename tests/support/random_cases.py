"""What random operators, chains and quantised operators share: what came of a case, its counts, and their command."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import typer
from rich.table import Table

from tvm_ext.bench.environment import current_environment
from tvm_ext.errors import TvmExtError
from tvm_ext.reports.record import OperatorReport

from .case_workers import Trial, run_trials
from .commands import (
    Count,
    Devices,
    First,
    Jobs,
    Kinds,
    LimitS,
    OneCase,
    Output,
    Precision,
    Results,
    Seed,
    Tensors,
    Way,
    console,
    watched,
    write,
)

EXPECTED_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TvmExtError,
    TypeError,
    ValueError,
)
"""What TVM, NumPy and this package raise."""


class WrongResultError(AssertionError):
    """The outputs are not what the reference says, or not the same twice; or a kernel took another path."""


class Refusal(Exception):  # noqa: N818 - an answer, which is counted
    """The import or the build of a case said no, by an error of ours."""


class Case(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def kind(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a case that is right says of itself. ``share``: its largest error by what is allowed.

    ``off`` of ``values`` bytes are one step away, which is allowed. ``templates``: kernels that are CUTLASS's.
    """

    operators: Sequence[OperatorReport] = ()
    templates: int = 0
    share: float = 0.0
    off: int = 0
    values: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """What came of a case. ``problem`` is empty where everything holds; ``paths`` counts its kernels by path.

    ``share``, ``off`` and ``values`` are as in `Figures`.
    """

    index: int
    kind: str
    outcome: str  # "passed", "refused", "wrong", "raised", "crashed", "timed out"
    problem: str = ""
    seconds: float = 0.0
    paths: tuple[tuple[str, int], ...] = ()
    share: float = 0.0
    off: int = 0
    values: int = 0

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    @property
    def failed(self) -> bool:
        """A refusal by an error of ours, with its reason, is no failure: nobody gets a wrong answer."""
        return self.outcome not in ("passed", "refused")


def attempted(case: AnyCase, run: Callable[[AnyCase], Figures]) -> CaseResult:
    """``run`` of the case, with whatever goes wrong in it turned into a result."""
    start = time.perf_counter()
    try:
        found = run(case)
    except Refusal as refusal:
        outcome, problem = "refused", str(refusal)
    except WrongResultError as error:
        outcome, problem = "wrong", str(error)
    except EXPECTED_ERRORS as error:
        outcome, problem = "raised", f"{type(error).__name__}: {error}"
    else:
        paths: Counter[str] = Counter(item.choice.path for item in found.operators)
        paths += Counter(template=found.templates)
        return CaseResult(
            index=case.index, kind=case.kind, outcome="passed", seconds=time.perf_counter() - start,
            paths=tuple(paths.items()), share=found.share, off=found.off, values=found.values,
        )  # fmt: skip
    return failure(case, outcome, problem, time.perf_counter() - start)


def failure(case: Case, outcome: str, problem: str, seconds: float) -> CaseResult:
    return CaseResult(index=case.index, kind=case.kind, outcome=outcome, problem=problem, seconds=seconds)


def share_of(errors: Iterable[tuple[float, float]]) -> float:
    """The largest of errors by what is allowed: (error, allowed) each; an error of 0 where none is."""
    return max((error / allowed if allowed else math.inf if error else 0.0 for error, allowed in errors), default=0.0)


# --- results, line by line: what a run that was stopped goes on from --------------------------------------------------
def read_results(path: Path) -> dict[int, CaseResult]:
    """The results that an earlier run left in ``path``, by case; a last line that was not finished is left out."""
    results: dict[int, CaseResult] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.endswith("}"):
            record = json.loads(line)
            record["paths"] = tuple((str(name), int(count)) for name, count in record["paths"])
            results[int(record["index"])] = CaseResult(**record)
    return results


def append_result(path: Path, result: CaseResult) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


# --- counts -----------------------------------------------------------------------------------------------------------
def by_kind(results: Iterable[CaseResult]) -> dict[str, list[CaseResult]]:
    groups: dict[str, list[CaseResult]] = {}
    for result in sorted(results, key=lambda item: (item.kind, item.index)):
        groups.setdefault(result.kind, []).append(result)
    return groups


def _paths(group: Iterable[CaseResult]) -> Counter[str]:
    return sum((Counter(dict(result.paths)) for result in group), Counter())


def _counts(group: Sequence[CaseResult]) -> dict[str, Any]:
    outcomes = Counter(result.outcome for result in group)
    return {"cases": len(group), "outcomes": dict(sorted(outcomes.items())), "kernels": dict(_paths(group))}


def table(results: Sequence[CaseResult]) -> Table:
    """A row per kind: cases, outcomes, kernels by path, the largest share of its tolerance that an error took."""
    rows = Table("kind", "cases", "passed", "refused", "failed", "kernels", "largest error / tolerance", "seconds")
    for column in rows.columns[1:]:
        column.justify = "right"
    for kind, group in by_kind(results).items():
        rows.add_row(kind, *_cells(group))
    rows.add_section()
    rows.add_row("all", *_cells(results))
    return rows


def _cells(group: Sequence[CaseResult]) -> tuple[str, ...]:
    outcomes, share = Counter(result.outcome for result in group), max((item.share for item in group), default=0.0)
    return (
        str(len(group)),
        str(outcomes["passed"]),
        str(outcomes["refused"] or "-"),
        str(sum(result.failed for result in group) or "-"),
        ", ".join(f"{count} {path}" for path, count in sorted(_paths(group).items())),
        f"{share:.2f}" if share else "-",
        f"{sum(result.seconds for result in group):.0f}",
    )


def reason(problem: str) -> str:
    """A refusal without its names and numbers, so that refusals for one reason count as one."""
    line = problem.splitlines()[0]
    return re.sub(r"\d+", "#", re.sub(r"\[[^\]]*\]|'[^']*'|\"[^\"]*\"", "…", line))[:160]


def refusals(results: Iterable[CaseResult]) -> dict[str, list[int]]:
    """The cases refused, by reason, the most frequent one first."""
    found: dict[str, list[int]] = {}
    for result in results:
        if result.outcome == "refused":
            found.setdefault(reason(result.problem), []).append(result.index)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def document(results: Sequence[CaseResult], drawn: Callable[[int], object], **about: object) -> str:
    """JSON: what it is ``about``, the environment, counts, refusals by reason, and failures with their case."""
    ordered = sorted(results, key=lambda item: item.index)
    record = {
        **about,
        "environment": asdict(current_environment()),
        **_counts(ordered),
        "largest error / tolerance": max((item.share for item in ordered), default=0.0),
        "one step off": sum(item.off for item in ordered),
        "values": sum(item.values for item in ordered),
        "kinds": {kind: _counts(group) for kind, group in by_kind(ordered).items()},
        "refusals": refusals(ordered),
        "failures": [
            {
                "index": item.index,
                "outcome": item.outcome,
                "problem": item.problem,
                "case": str(drawn(item.index)).splitlines(),
            }
            for item in ordered
            if item.failed
        ],
    }
    return json.dumps(record, indent=1) + "\n"


WAYS = ("opencl", "interpreter", "templates")
"""What runs the kernels of GPUs: OpenCL; the SIMT interpreter; this, and CUTLASS's templates as plain C++."""


# --- the command ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Which machine and numbers cases are drawn for: ``devices`` in turn; ``precision`` and ``tensors`` as options.

    ``way``: what runs the kernels of GPUs, one of `WAYS`.
    """

    devices: tuple[str, ...] = ()
    way: str = "opencl"
    precision: str = "float32"
    tensors: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family(Generic[AnyCase]):
    """One sort of random cases: ``what`` against which reference; ``draw`` takes the seed, a number and settings.

    ``hint`` says more about a case that is wrong. ``has_settings``: cases may be drawn for other `Settings`, of the
    ``ways`` alone.
    """

    name: str
    what: str
    kinds: tuple[str, ...]
    draw: Callable[[int, int, Settings], AnyCase]
    run: Callable[[AnyCase], Figures]
    attempt: Callable[[AnyCase], CaseResult]
    hint: Callable[[AnyCase], str] | None = None
    has_settings: bool = True
    ways: tuple[str, ...] = ("opencl",)

    @property
    def trial(self) -> Trial[AnyCase, CaseResult]:
        return Trial(attempt=self.attempt, failure=failure)

    def results(self, cases: Iterable[AnyCase], *, jobs: int = 1, limit_s: float = 300.0) -> Iterable[CaseResult]:
        """In worker processes, as they come; a case that runs for longer than ``limit_s`` seconds is ended."""
        return run_trials(cases, self.trial, jobs=jobs, limit_s=limit_s)


def command(family: Family[AnyCase]) -> typer.Typer:
    """The command line of ``family``; exits with 1 where a case failed."""
    app = typer.Typer(add_completion=False)

    @app.command(help=f"Draw {family.what}: build and run each, and compare.")
    def main(
        count: Count = 1000,
        seed: Seed = 0,
        first: First = 0,
        jobs: Jobs = 1,
        limit_s: LimitS = 120.0,
        kind: Kinds = None,
        case: OneCase = None,
        device: Devices = None,
        precision: Precision = "float32",
        tensors: Tensors = "",
        way: Way = "opencl",
        output: Output = None,
        results: Results = None,
    ) -> None:
        settings = Settings(devices=tuple(device or ()), precision=precision, tensors=tensors, way=way)
        if not family.has_settings and settings != Settings():
            raise typer.BadParameter(f"{family.name} are drawn with what they are built for")
        if way not in family.ways:
            raise typer.BadParameter(f"{family.name} have no way {way!r}; the ways are {', '.join(family.ways)}")
        unknown = [name for name in kind or [] if name not in family.kinds]
        if unknown:
            raise typer.BadParameter(f"there is no kind {unknown[0]!r}; the kinds are {', '.join(family.kinds)}")

        def drawn(index: int) -> AnyCase:
            return family.draw(seed, index, settings)

        if case is not None:
            raise typer.Exit(_run_one(family, drawn(case)))
        done = {} if results is None else _among(read_results(results), range(first, first + count))
        left = [drawn(index) for index in range(first, first + count) if index not in done]
        left = [item for item in left if not kind or item.kind in kind]
        found = [*done.values(), *_run_all(family, left, jobs, limit_s, results)]
        console.print(table(found))
        for why, indices in refusals(found).items():
            console.print(f"refused {len(indices)} times, first by case {indices[0]}: {why}", markup=False)
        write(output, lambda: document(found, drawn, what=family.what, seed=seed, **asdict(settings)))
        raise typer.Exit(1 if any(result.failed for result in found) else 0)

    return app


def _among(results: Mapping[int, CaseResult], wanted: range) -> dict[int, CaseResult]:
    return {index: result for index, result in results.items() if index in wanted}


def _run_all(
    family: Family[AnyCase], cases: Sequence[AnyCase], jobs: int, limit_s: float, kept: Path | None
) -> Iterable[CaseResult]:
    by_index = {item.index: item for item in cases}
    found = family.results(cases, jobs=jobs, limit_s=limit_s) if cases else ()
    for result in watched(found, len(cases), family.name):
        if kept is not None:
            append_result(kept, result)
        if result.failed:
            console.print(f"{result.outcome}: {by_index[result.index]}\n  {result.problem[:3000]}", markup=False)
        yield result


def _run_one(family: Family[AnyCase], case: AnyCase) -> int:
    """Print the case, what came of it, and its kernels with reasons."""
    console.print(str(case), markup=False)
    result = family.attempt(case)
    figures = f"largest error / tolerance {result.share:.3g}, {result.off} of {result.values} bytes one step off"
    console.print(f"{result.outcome} {result.problem}\n  {figures}, {result.seconds:.2f} s", markup=False)
    for item in family.run(case).operators if result.passed else ():
        console.print(f"  {item.name}: {item.choice.path}: {item.choice.reason}", markup=False)
    if result.outcome == "wrong" and family.hint is not None:
        console.print(family.hint(case), markup=False)
    return 1 if result.failed else 0
