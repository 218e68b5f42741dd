"""Stock TVM's GPU schedules of ONNX's operator tests, interpreted: is any kernel that a build would launch wrong?

By default the kernels of a default build that Roller does not construct; with ``--all`` those of every operator, as
of builds with ``enable_roller=False`` and kernels that users hand over. Values are compared with the operator's on the
CPU.

    python -m tests.support.stock_kernels --all --device nvidia-v100      # most of an hour
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated

import onnx
import typer

from tests.support.case_workers import Trial, run_trials
from tests.support.commands import Jobs, LimitS, console
from tests.support.legacy_corpus import NodeTest, node_tests
from tvm_ext import relay
from tvm_ext._tvm import PrimFunc, structural_hash
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import InputError, TvmExtError
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, OWN_PATHS, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.verify.build_check import check_kernel
from tvm_ext.verify.threads_as_loops import is_thread_bound

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StockKernel:
    """What the interpreter says of an operator's kernels: ``problem`` is "" where nothing is wrong.

    ``rule`` is what scheduled them, ``unknown`` why they were not run.
    """

    operator: str
    rule: str = ""
    problem: str = ""
    unknown: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """What became of a test's operators that were not seen before, and their digests."""

    kernels: tuple[StockKernel, ...]
    digests: frozenset[str] = frozenset()


def attempt(test: NodeTest, *, device: str, everything: bool) -> Looked:
    """The operators of ``test`` that a build for ``device`` leaves to stock TVM, interpreted."""
    options = BuildOptions(kernel_cache="off", enable_roller=False if everything else "auto")
    try:
        mod, params = relay.frontend.from_onnx(onnx.load_from_string(test.model))
        found = relay.operators(mod, device, params, options=options)
    except (TvmExtError, RuntimeError, ValueError, TypeError, KeyError):
        return Looked(kernels=())  # no model of this package, or shapes that a test knows by its inputs alone
    digests = {f"{structural_hash(func.without_attr('global_symbol')):x}": name for name, func in found.items()}
    new = [name for digest, name in digests.items() if digest not in test.seen]
    kernels = [looked_at(f"{test.name}:{name}", found[name], device, options) for name in new]
    return Looked(kernels=tuple(item for item in kernels if item is not None), digests=frozenset(digests))


def looked_at(name: str, operator: PrimFunc, device: str, options: BuildOptions) -> StockKernel | None:
    """The kernels that a build gives ``operator``, interpreted with all it writes guarded; None where they are ours."""
    spec, target = device_for_target(device)
    with target:
        try:
            made = construct_kernel(operator, "main", spec, options)
        except TvmExtError as refusal:
            return StockKernel(operator=name, unknown=f"no kernel: {refusal.problem.split(':')[-1].strip()}")
        choice = from_json(KernelChoice, str(made.attrs[CHOICE]))
        if choice.path in OWN_PATHS:
            return None
        rule, scheduled = choice.notes[-1], "tirx.is_scheduled" in (operator.attrs or {})
        reference = None if scheduled or is_thread_bound(operator) else operator
        try:
            problem = check_kernel("main", made, reference, spec, target).problem
        except InputError as error:
            return StockKernel(operator=name, rule=rule, unknown=error.problem)
    return StockKernel(operator=name, rule=rule, problem=problem)


def _failure(test: NodeTest, outcome: str, problem: str, _seconds: float) -> Looked:
    return Looked(kernels=(StockKernel(operator=test.name, problem=f"{outcome}: {problem}"),))


def stock_kernels(
    device: str, *, everything: bool, every: int = 1, jobs: int = 1, limit_s: float = 300.0
) -> Iterator[StockKernel]:
    """What the interpreter says of the kernels of each ``every``-th test, as they come; equal operators once."""
    seen: set[str] = set()
    trial = Trial(attempt=partial(attempt, device=device, everything=everything), failure=_failure)
    for found in run_trials(islice(node_tests(seen), 0, None, every), trial, jobs=jobs, limit_s=limit_s):
        seen |= found.digests
        yield from found.kernels


@app.command()
def main(
    device: Annotated[str, typer.Option(help="A GPU of the device tables.")] = "nvidia-v100",
    everything: Annotated[
        bool, typer.Option("--all", help="Every operator by stock TVM, not only what is left to it.")
    ] = False,
    every: Annotated[int, typer.Option(min=1, help="Look at each so many-th test.")] = 1,
    jobs: Jobs = 1,
    limit_s: LimitS = 300.0,
) -> None:
    """Interpret them; exits with 1 where one is wrong."""
    counts: Counter[str] = Counter()
    for item in stock_kernels(device, everything=everything, every=every, jobs=jobs, limit_s=limit_s):
        what = "wrong" if item.problem else "not run" if item.unknown else "right"
        counts[f"{item.rule} {what}"] += 1
        if what != "right":
            console.print(f"{item.operator}: {item.rule}: {item.problem or item.unknown}", markup=False)
    console.print(f"{counts.total()} operators on {device}: {dict(counts)}", markup=False)
    raise typer.Exit(int(any(name.endswith("wrong") for name in counts)))


if __name__ == "__main__":
    app()
