"""What pipelining makes of ALCOP's operators, for GPUs that need not be present: plans, machine code, pass time.

    python benchmarks/gpu/pipelining.py                                  # all operators, A100
    python benchmarks/gpu/pipelining.py A0 A44 --device nvidia-h200
    python benchmarks/gpu/pipelining.py --resume                         # go on where today's file ends

Each operator is constructed by Roller once and pipelined in the four modes of the paper's ablation (§5.1): not at all,
two versions, several versions, several with registers. A record says what was planned and refused, how many barriers an
iteration has, what the CUDA assembler took (registers, spills, stack), and how long the passes took. Last come the
figures of one schedule, pipelined by stock TVM and by us. Writes
``benchmarks/results/<date>-pipelining-<device>.json`` after each operator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for _common

import typer
from _common import Environment, current_environment, earlier_results, progress, result_path, show, write_results
from cases import Case
from lists import alcop
from programs import function_name, program
from rich.table import Table

from tests.support.pipelining.check import barriers_in_loops, cuda_source, line_count
from tests.support.pipelining.schedules import stock_three_by_two, stock_three_stages, tensor_core_matmul
from tvm_ext._tvm import AllocBuffer, structural_walk
from tvm_ext.analysis.device_code import split_dtype
from tvm_ext.devices.device_db import device_for_target, lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.pipelines import PipelinePlan
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.pipelining.plan import Wishes
from tvm_ext.tir_passes.pipelining.route import pipelined, wishes_of, with_pipelines
from tvm_ext.toolchains.cuda_toolchain import compile_cuda
from tvm_ext.verify import simt
from tvm_ext.verify.simt.number_types import storage_dtype

WORKLOAD = Path(__file__).resolve().parent.parent / "workloads" / "alcop_ops.csv"
CODE_FIELDS = ("barriers", "source_lines", "registers", "spill_bytes", "stack_bytes", "shared_bytes")
MODES = ("none", "double", "multistage", "full")
REPEATS = 3
"""The passes are timed so often; the fastest counts, for other programs on the machine only slow them down."""


@dataclass(kw_only=True)
class Outcome:
    """One operator in one mode. ``barriers`` are those of one iteration of the loop over tiles, by the loop's name."""

    operator: str
    group: str
    shape: str
    mode: str
    plan: str = ""
    shared_stages: int = 1
    register_stages: int = 1
    copy_bytes: list[int] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    barriers: dict[str, int] = field(default_factory=dict)
    source_lines: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    pass_ms: float | None = None  # of processor time: detecting, planning, rewriting


def measure(case: Case, device: DeviceSpec, architecture: str) -> list[Outcome]:
    """The operator in all modes; modes that come to one plan are compiled once."""
    kernel = construct_kernel(program(case), function_name(case), device, BuildOptions(enable_pipelining=False))
    shape = " x ".join(",".join(map(str, item.shape)) for item in case.inputs)
    outcomes: list[Outcome] = []
    for mode in MODES:
        outcome = Outcome(operator=case.id, group=case.group, shape=shape, mode=mode)
        function, plan, outcome.pass_ms = _timed(kernel, device, mode)
        _note_plan(outcome, plan)
        twin = next((item for item in outcomes if item.plan == outcome.plan), None)
        if twin is None:
            _note_code(outcome, function, device, architecture)
        else:
            for name in CODE_FIELDS:
                setattr(outcome, name, getattr(twin, name))
        outcomes.append(outcome)
    return outcomes


def _timed(kernel: Any, device: DeviceSpec, mode: Any) -> tuple[Any, PipelinePlan, float]:
    """(function, plan, milliseconds of processor time), as in a build that pipelines wherever that is legal."""
    off = mode == "none"
    options = BuildOptions(enable_pipelining=not off, **({} if off else {"pipelining": mode}))
    choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        function, made = with_pipelines(kernel, choice, device, wishes_of(options))
        seconds.append(time.process_time() - start)
    return function, made.pipeline or PipelinePlan(), min(seconds) * 1e3


def _note_plan(outcome: Outcome, plan: PipelinePlan) -> None:
    outcome.plan = str(plan)
    for buffer in plan.buffers:
        if buffer.level == 0:
            outcome.shared_stages = max(outcome.shared_stages, buffer.stages)
            outcome.copy_bytes.append(buffer.copy_bytes or 0)
        else:
            outcome.register_stages = max(outcome.register_stages, buffer.stages)
    outcome.refusals = [f"{item.buffer}: {item.rule}: {item.reason}" for item in plan.refusals]
    outcome.notes = list(plan.notes)


def _note_code(outcome: Outcome, function: Any, device: DeviceSpec, architecture: str) -> None:
    lowered = simt.lower(function, device)
    main = lowered[0].function
    outcome.barriers = barriers_in_loops(main)
    outcome.shared_bytes = _shared_bytes(main)
    source = cuda_source(function, architecture)
    outcome.source_lines = line_count(source)
    use = max(compile_cuda(source, [architecture]).uses, key=lambda item: item.register_count)
    outcome.registers, outcome.stack_bytes = use.register_count, use.stack_bytes
    outcome.spill_bytes = use.spill_store_bytes + use.spill_load_bytes


def _shared_bytes(function: Any) -> int:
    """Shared memory that a lowered device function allocates."""
    total = 0

    def visit(node: Any) -> None:
        nonlocal total
        if str(node.buffer.ty.storage_scope).startswith("shared"):
            base, lanes = split_dtype(str(node.buffer.ty.dtype))
            total += prod(int(size) for size in node.buffer.ty.shape) * storage_dtype(base).itemsize * lanes

    structural_walk(function.body, (AllocBuffer, visit))
    return total


# --- one schedule, pipelined by stock TVM and by us -------------------------------------------------------------------
SIZE = 1024


def schedules(device: DeviceSpec, architecture: str) -> Iterator[Outcome]:
    """A hand-written schedule of 1024 x 1024 x 1024 halves in tiles of 128 x 128 x 32, four warps, ldmatrix and mma."""
    sizes = (SIZE, SIZE, SIZE)
    stock = (("plain", None), ("stock, 3 stages", stock_three_stages), ("stock, 3 x 2 stages", stock_three_by_two))
    for name, annotate in stock:
        outcome = _schedule_outcome(name)
        _note_code(outcome, tensor_core_matmul(*sizes, annotate=annotate), device, architecture)
        yield outcome
    for shared, registers in ((3, 1), (3, 2), (4, 2)):
        outcome = _schedule_outcome(f"ours, {shared} x {registers} stages")
        kernel = tensor_core_matmul(*sizes)
        start = time.process_time()
        function, plan = pipelined(kernel, device, Wishes(shared_stages=shared, register_stages=registers))
        outcome.pass_ms = (time.process_time() - start) * 1e3
        _note_plan(outcome, plan)
        _note_code(outcome, function, device, architecture)
        yield outcome


def _schedule_outcome(mode: str) -> Outcome:
    return Outcome(operator="schedule", group="schedule", shape=f"{SIZE},{SIZE} x {SIZE},{SIZE}", mode=mode)


# --- all of them ------------------------------------------------------------------------------------------------------
def table(outcomes: Sequence[Outcome]) -> Table:
    result = Table(box=None, header_style="bold")
    for header in ("operator", "shape", "mode"):
        result.add_column(header, no_wrap=True)
    for header in ("stages", "registers", "spills", "shared KiB", "barriers", "lines", "passes ms"):
        result.add_column(header, justify="right")
    for item in outcomes:
        result.add_row(
            item.operator, item.shape, item.mode, f"{item.shared_stages}x{item.register_stages}", _text(item.registers),
            _text(item.spill_bytes), f"{(item.shared_bytes or 0) / 1024:.0f}",
            "+".join(map(str, item.barriers.values())), _text(item.source_lines),
            "" if item.pass_ms is None else f"{item.pass_ms:.0f}",
        )  # fmt: skip
    return result


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many operators are pipelined, and the extremes."""
    full = [item for item in outcomes if item.mode == "full"]
    pipelined = [item for item in full if item.shared_stages > 1]
    deep = [item for item in full if item.register_stages > 1]
    times = [item.pass_ms for item in outcomes if item.pass_ms is not None and item.mode in MODES]
    spilled = sorted({item.operator for item in outcomes if item.spill_bytes})
    return (
        f"{len(pipelined)} of {len(full)} operators pipelined, {len(deep)} of them at both levels; spills: "
        f"{', '.join(spilled) or 'none'}; passes {max(times, default=0):.0f} ms at most"
    )


def _earlier(path: Path, environment: Environment) -> list[Outcome]:
    names = {item.name for item in fields(Outcome)}
    records = earlier_results(path, environment)
    return [Outcome(**{key: value for key, value in record.items() if key in names}) for record in records]


def main(
    operators: Annotated[list[str] | None, typer.Argument(help="Names as A0; all operators.")] = None,
    device: Annotated[str, typer.Option(help="A device of the tables with a CUDA target.")] = "nvidia-a100",
    resume: Annotated[bool, typer.Option(help="Keep what today's file has, and go on.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Pipeline the operators and write what comes of it."""
    spec = lookup(device)
    architecture = str(device_for_target(device)[1].attrs["arch"])
    environment = current_environment()
    path = result_path(f"pipelining-{spec.name}", environment, output)
    outcomes = _earlier(path, environment) if resume else []
    done = {item.operator for item in outcomes}
    chosen = [case for case in alcop(WORKLOAD) if not operators or case.id in operators]
    if not chosen:
        raise InputError(f"no operator is called {' or '.join(operators or [])}", "A0 ... A74")
    with progress() as tell:
        for case in chosen:
            if case.id not in done:
                tell(case.id)
                outcomes += measure(case, spec, architecture)
                write_results(path, "pipelining", environment, outcomes)
        if "schedule" not in done and not operators:
            outcomes += schedules(spec, architecture)
            write_results(path, "pipelining", environment, outcomes)
    show(table(outcomes))
    print(f"{summary(outcomes)}; written: {path}")


if __name__ == "__main__":
    typer.run(main)
