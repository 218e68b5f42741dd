"""Every built-in model and the operators of Roller's, ALCOP's and Bolt's lists, as a default build makes them, in the
SIMT interpreter: races, bounds, uninitialised reads, barriers, asynchronous copies that land too late, values.

    nice python benchmarks/gpu/interpret.py                          # V100, A100, H200: some hours of one core
    nice python benchmarks/gpu/interpret.py --device nvidia-a100     # a second process for another device
    python benchmarks/gpu/interpret.py --device nvidia-a100 bert_base_layer A17 C0

Of a model the module is interpreted that `relay.build` gives to code generation, each distinct kernel of it. Of what is
large only some threadblocks are run, at full shape (`testing.build_check`; of operators beyond `LARGEST_ELEMENTS` or
`LARGEST_FLOPS` the first two blocks of the first launch, compared with the operator on the first images or rows alone).
Each record says how many, and whether values were compared. Results are written after each model or operator to
``benchmarks/results/gpu-interpreted-<device>.json``; those of the same commit are not made again, so a run that was cut
off goes on. A tree with uncommitted changes is refused.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import typer
from _common import RESULTS, current_environment, progress, require_clean_commit, write_results
from cases import Case, Tensor
from programs import program
from sweep import operators
from sweep_count import COUNTED_BLOCKS, run_blocks

from benchmarks.networks.models import build_model, names
from tvm_ext import relay
from tvm_ext.errors import TvmExtError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import BuildPlan, operator_pipeline, plan_build
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.verify.build_check import KernelCheck, check_kernel, check_module
from tvm_ext.verify.cpu_reference import cpu_reference
from tvm_ext.verify.verification import OutputError, errors_of

DEVICES = ("nvidia-v100", "nvidia-a100", "nvidia-h200")

LARGEST_ELEMENTS = 8_000_000
LARGEST_FLOPS = 2e9
"""Operators beyond either are interpreted in part: the reference would take minutes."""

Record = dict[str, Any]


def check_model(name: str, plan: BuildPlan) -> tuple[KernelCheck, ...]:
    """All distinct kernels of a built-in model."""
    mod, params = relay.frontend.from_onnx(build_model(name))
    bound = relay.prepare(mod, params)
    with plan.target:
        lowered = plan.lower(plan.construct(bound))
        made = operator_pipeline(plan.target, plan.device, plan.options)(bound)
        return check_module(lowered, made, plan.device, plan.target)


def check_case(case: Case, plan: BuildPlan) -> tuple[KernelCheck, ...]:
    """The kernels of one operator of the lists."""
    operator = program(case)
    kernel = construct_kernel(operator, case.id, plan.device, plan.options)
    sizes = [prod(tensor.shape) for tensor in (*case.inputs, case.output)]
    if max(sizes) <= LARGEST_ELEMENTS and case.flops <= LARGEST_FLOPS:
        with plan.target:
            return (check_kernel(case.id, kernel, operator, plan.device, plan.target),)
    result, arrays, launches = run_blocks(case, kernel, plan.device)
    blocks = sum(item.blocks * item.launches for item in from_json(KernelChoice, str(kernel.attrs[CHOICE])).gpu)
    error, why = (None, "only the first of its launches was run") if launches > 1 else first_rows(case, result, arrays)
    return (
        KernelCheck(
            name=case.id, device=plan.device.name, launches=launches, block_count=blocks,
            blocks_run=min(blocks, len(COUNTED_BLOCKS)), findings=tuple(map(str, result.findings)),
            parameters=tuple(f"{item.name}: {item.dtype}{list(item.shape)}" for item in (*case.inputs, case.output)),
            error=None if error is None else error.error, tolerance=None if error is None else error.tolerance,
            not_compared=why,
        ),
    )  # fmt: skip


def first_rows(case: Case, result: Any, arrays: Mapping[str, Any]) -> tuple[OutputError | None, str]:
    """How far what was written is from the same operator on the first images or rows alone, or why that is not said."""
    (name,) = result.outputs
    written = result.written[name]
    rows = 1 + int(np.flatnonzero(written.reshape(len(written), -1).any(axis=1)).max())
    part = replace(case, inputs=tuple(_cut(case, item, rows) for item in case.inputs), output=_first(case.output, rows))
    if case.flops * rows / case.output.shape[0] > LARGEST_FLOPS:
        return None, f"the first {rows} rows of the output are too many for the reference"
    given = {item.name: arrays[item.name][: item.shape[0]] for item in part.inputs}
    expected = np.zeros(written.shape, np.float64)
    (expected[:rows],) = cpu_reference(program(part))(given).values()
    return errors_of({name: expected}, result)[0], ""


def _cut(case: Case, item: Tensor, rows: int) -> Tensor:
    """``item`` for the first rows of the output; weights and biases stay whole, square ones as well."""
    batched = case.operator.startswith("batch_matmul")
    return _first(item, rows) if batched or item.name not in ("w", "b") else item


def _first(item: Tensor, rows: int) -> Tensor:
    return replace(item, shape=(rows, *item.shape[1:]))


def checked(subject: str, case: Case | None, plan: BuildPlan) -> Record:
    """The record of a model or an operator: its kernels, or why there are none."""
    start = time.process_time()
    try:
        checks = check_model(subject, plan) if case is None else check_case(case, plan)
        error = ""
    except TvmExtError as problem:
        checks, error = (), str(problem)
    wrong = [f"{check.name}: {check.problem}" for check in checks if check.problem]
    kernels = [{name: value for name, value in asdict(check).items() if name != "device"} for check in checks]
    return {"subject": subject, "cpu_s": round(time.process_time() - start, 1), "ok": not wrong and not error,
            "error": error, "wrong": wrong, "kernels": kernels}  # fmt: skip


def subjects(chosen: list[str]) -> Iterator[tuple[str, Case | None]]:
    """Models first, then the lists, which take longest. Raises BadParameter for a name that is none."""
    cases = {case.id: case for case in operators()}
    unknown = [name for name in chosen if name not in cases and name not in names()]
    if unknown:
        raise typer.BadParameter(f"there is no model or operator {', '.join(unknown)}")
    yield from ((name, None) for name in names() if not chosen or name in chosen)
    yield from ((name, case) for name, case in cases.items() if not chosen or name in chosen)


def main(
    chosen: Annotated[list[str] | None, typer.Argument(help="Models and operators; all of them.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Devices of the tables.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Print only: for a tree with changes.")] = False,
) -> None:
    """Interpret, write, summarise; exit code 1 where something is wrong."""
    environment = current_environment()
    failed = 0
    for name in device or DEVICES:
        plan, path = plan_build(name, BuildOptions()), RESULTS / f"gpu-interpreted-{name}.json"
        if not dry:
            require_clean_commit(path, environment.commit)
        done = {} if dry else _done(path, environment.commit)
        with progress() as say:
            for subject, case in subjects(chosen or []):
                if subject in done:
                    continue
                say(f"{name}: {subject}")
                done[subject] = record = checked(subject, case, plan)
                print(
                    f"{name} {subject}: {'ok' if record['ok'] else record['error'] or record['wrong'][0]}", flush=True
                )
                if not dry:
                    write_results(path, "gpu-interpreted", environment, list(done.values()))
        failed += sum(not record["ok"] for record in done.values())
        print(summary(name, list(done.values())))
    raise typer.Exit(code=1 if failed else 0)


def summary(device: str, records: list[Record]) -> str:
    """One line of figures."""
    kernels = [kernel for record in records for kernel in record["kernels"]]
    compared = sum(kernel["error"] is not None for kernel in kernels)
    whole = sum(kernel["blocks_run"] == kernel["block_count"] for kernel in kernels)
    good = sum(record["ok"] for record in records)
    return (
        f"{device}: {good} of {len(records)} models and operators are right; {len(kernels)} kernels, {whole} of them "
        f"with all blocks, {compared} with values"
    )


def _done(path: Path, commit: str | None) -> dict[str, Record]:
    """The records of ``path`` by subject, if they are of ``commit``."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["environment"]["commit"] != commit:
        return {}
    return {record["subject"]: record for record in document["results"]}


if __name__ == "__main__":
    typer.run(main)
