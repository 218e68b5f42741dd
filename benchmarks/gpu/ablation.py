"""The paper's ablations for GPUs that need not be present: Table 3 (alignment rules), Figure 16 (shrinking), 17 (ε).

    python benchmarks/gpu/ablation.py                                     # V100 and A100
    python benchmarks/gpu/ablation.py C0 M1 --device nvidia-v100 --figure "Table 3"
    python benchmarks/gpu/ablation.py --plot docs/gpu-ablation.png        # also draw the first device's results

Every variant is constructed, emitted for float32 vector units and interpreted in a few threadblocks, which counts the
sectors of global memory and the wavefronts of shared memory. A variant's time is modelled twice: as the construction
predicts it, and by the same formula (the slowest of arithmetic, sectors and wavefronts) from what was counted. What
has no tile, or none that the emitter takes, is a record with the reason. Writes
``benchmarks/results/<date>-gpu-ablation-<device>.json`` after each operator; ``--resume`` goes on where a file ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import lcm, prod
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import typer
from _common import Environment, current_environment, earlier_results, progress, result_path, show, write_results
from ablation_summary import TABLES, plot
from ablation_variants import (
    FIGURES,
    Anchor,
    Emitted,
    Variant,
    anchor_of,
    cases,
    emit,
    emit_program,
    function,
    variants,
)
from cases import Case

from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.tir_passes.emit.simt_tiles.tiling import SimtTiling, tile_threads
from tvm_ext.verify import simt
from tvm_ext.verify.simt.counters import Counters
from tvm_ext.verify.verification import random_array

DEVICES = ("nvidia-v100", "nvidia-a100")

COUNTED_ELEMENTS = 4_000_000
"""Operators with larger tensors are counted at a smaller batch: the interpreter keeps the state of every element."""

COUNTED_REDUCTIONS = (128, 256, 1024)
"""Longer reductions are counted over so many points or a few more, and what they load is scaled up."""

ROWS_OF_THREADS = "made row by row: its emitter takes no tile, so that no alignment rule changes the kernel"
_G = 1e9


@dataclass(kw_only=True)
class Outcome:
    """One variant of one operator. ``predicted_s`` is the construction's word, ``counted_*`` the interpreter's.

    ``sector_overhead`` is bytes loaded in whole sectors over the distinct bytes that warps asked for,
    ``bank_overhead`` wavefronts of shared memory over the fewest that would do (``bank_read_overhead``: of reads alone,
    which are what the paper's padding is for), ``lane_share`` threads over the lanes
    of their warps, ``padded_points`` computed points over those of the operator.
    """

    figure: str
    operator: str
    group: str
    variant: str = ""
    literal: bool
    programs: int
    error: str = ""
    refused: list[str] = field(default_factory=list)
    register_tile: str = ""
    block_tile: str = ""
    storage_padding: dict[str, int] = field(default_factory=dict)
    epsilon: float | None = None
    shrunk: bool | None = None
    predicted_s: float | None = None
    predicted_bound: str = ""
    blocks: int | None = None
    threads: int | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    lane_share: float | None = None
    padded_points: float | None = None
    counted_shape: str = ""
    counted_blocks: list[int] = field(default_factory=list)
    sector_overhead: float | None = None
    bank_overhead: float | None = None
    bank_read_overhead: float | None = None
    sectors: float | None = None
    wavefronts: float | None = None
    counted_s: float | None = None
    counted_bound: str = ""
    findings: list[str] = field(default_factory=list)


# --- one variant --------------------------------------------------------------------------------------------------
def evaluate(variant: Variant, device: DeviceSpec) -> Outcome:
    """Emit ``variant`` and count; the outcome says why where that cannot be."""
    case = variant.case
    outcome = Outcome(
        figure=variant.figure, operator=case.id, group=case.group, variant=variant.label, literal=variant.literal,
        programs=len(variant.programs),
    )  # fmt: skip
    try:
        emitted = emit(variant, device)
    except IllegalRewrite as refusal:
        outcome.error = str(refusal)
        return outcome
    outcome.refused = list(emitted.refused)
    tiling = tile_threads(emitted.anchor.computation, emitted.anchor.expr, emitted.rprogram, device)
    _note_plan(outcome, emitted, tiling, device)
    count(outcome, variant, emitted, tiling, device)
    model_time(outcome, emitted.anchor, device)
    return outcome


def _note_plan(outcome: Outcome, emitted: Emitted, tiling: SimtTiling, device: DeviceSpec) -> None:
    extents, lanes = tiling.computation.extents, device.teu_lanes
    rprogram, kernel = emitted.rprogram, emitted.kernel
    outcome.register_tile, outcome.block_tile = str(rprogram.tile("L0")), str(rprogram.tile("L1"))
    outcome.storage_padding = dict(rprogram.tile("L1").storage_padding)
    outcome.epsilon, outcome.shrunk = rprogram.epsilon, rprogram.shrunk
    outcome.predicted_s, outcome.predicted_bound = rprogram.prediction.time_s, rprogram.prediction.bound
    outcome.blocks, outcome.threads = kernel.blocks, kernel.threads
    outcome.registers, outcome.shared_bytes = kernel.register_count, kernel.shared_bytes
    outcome.lane_share = kernel.threads / (ceil_div(kernel.threads, lanes) * lanes)
    computed = prod(tiling.tile[p] for p in tiling.spatial) * prod(tiling.grid)
    outcome.padded_points = computed / prod(extents[p] for p in tiling.spatial)


def model_time(outcome: Outcome, anchor: Anchor, device: DeviceSpec) -> None:
    """Time by the formula of `PerfModel.predict`, from counted sectors and wavefronts instead of data tiles."""
    assert outcome.sectors is not None and outcome.wavefronts is not None and outcome.blocks is not None
    assert outcome.padded_points is not None and outcome.lane_share is not None
    model, shared, memory = PerfModel(anchor.expr, device), device.layer("L1"), device.lowest_layer
    wavefront_bytes = (shared.bank_count or 0) * (shared.bank_bytes or 0)
    flops = anchor.expr.flops * outcome.padded_points / outcome.lane_share
    times = {
        "compute": flops / (model.max_compute_gflops() * _G),
        memory.name: outcome.sectors * memory.transaction_bytes / ((memory.bandwidth_gb_per_s or 0.0) * _G),
        shared.name: outcome.wavefronts * wavefront_bytes / ((shared.bandwidth_gb_per_s or 0.0) * _G),
    }
    outcome.counted_bound = max(times, key=lambda name: times[name])
    launch_s = (device.launch_overhead_us or 0.0) * 1e-6
    outcome.counted_s = times[outcome.counted_bound] / model.balance(outcome.blocks) + launch_s


# --- counting -----------------------------------------------------------------------------------------------------
def count(outcome: Outcome, variant: Variant, emitted: Emitted, tiling: SimtTiling, device: DeviceSpec) -> None:
    """Interpret four threadblocks of the kernel, and scale what they moved up to the whole grid and reduction."""
    case, small = _countable(variant, emitted, tiling, device)
    func = function(small, device, "ablation").with_attr("global_symbol", "main")
    generator = np.random.default_rng(case.seed)
    arrays = {item.name: random_array(item.shape, item.dtype, generator) for item in case.inputs}
    last, middle = small.kernel.blocks - 1, small.kernel.blocks // 2
    blocks = sorted({0, min(1, last), middle, min(middle + 1, last)})
    counters, findings = _interpreted(func, arrays, blocks, device)
    grid = emitted.kernel.blocks / len(blocks)
    longer = prod(tiling.computation.extents[p] / small.anchor.computation.extents[p] for p in tiling.reduction)
    outcome.counted_shape = " ".join("x".join(map(str, item.shape)) for item in case.inputs)
    outcome.counted_blocks = blocks
    outcome.sector_overhead = 1 / (counters.sector_efficiency(store=False) or 1.0)
    loaded = counters.total("sectors", scope="global", store=False)
    stored = counters.total("sectors", scope="global", store=True)
    outcome.sectors = (loaded * longer + stored) * grid
    wavefronts = counters.total("wavefronts", scope="shared")
    outcome.wavefronts = wavefronts * longer * grid
    outcome.bank_overhead = _bank_overhead(counters, None)
    outcome.bank_read_overhead = _bank_overhead(counters, False)
    outcome.findings = findings


def _interpreted(
    func: Any, arrays: Mapping[str, Any], blocks: Sequence[int], device: DeviceSpec
) -> tuple[Counters, list[str]]:
    result = simt.run(simt.lower(func, device.name), arrays, device=device.name, blocks=blocks)
    return result.counters, [str(item) for item in result.findings]


def _bank_overhead(counters: Counters, store: bool | None) -> float:
    taken, least = (counters.total(name, scope="shared", store=store) for name in ("wavefronts", "least_wavefronts"))
    return taken / least if least else 1.0


def _countable(
    variant: Variant, emitted: Emitted, tiling: SimtTiling, device: DeviceSpec
) -> tuple[Case, Emitted]:  # fmt: skip
    """A smaller case for which the rProgram gives the same block: same threads, memory, registers and notes.

    Where fewer blocks or steps would make the emitter divide a tile's reduction otherwise, the case stays larger.
    """
    limits = [*((points, COUNTED_ELEMENTS) for points in COUNTED_REDUCTIONS), (None, COUNTED_ELEMENTS), (None, None)]
    for points, elements in limits:
        case = smaller(variant.case, *_sizes(tiling), points=points, elements=elements)
        anchor = anchor_of(case, fused=variant.fused)
        assert anchor is not None
        kernel = emit_program(anchor, emitted.rprogram, device, literal=variant.literal)
        if _plan(kernel) == _plan(emitted.kernel):
            break
    return case, Emitted(anchor=anchor, rprogram=emitted.rprogram, kernel=kernel)


def _plan(kernel: SimtKernel) -> tuple[Any, ...]:
    return kernel.threads, kernel.shared_bytes, kernel.register_count, kernel.notes


def _sizes(tiling: SimtTiling) -> tuple[int, int]:
    """(tile of the first spatial axis, the batch or the rows; step of the first reduction axis, the channels)."""
    return tiling.tile[tiling.spatial[0]], tiling.step[tiling.reduction[0]]


def smaller(case: Case, batch_tile: int, step: int, *, points: int | None, elements: int | None) -> Case:
    """``case`` with ``points`` of its reduction or a few more, and at a batch for which no tensor exceeds ``elements``.

    Both are cut by whole tiles, and channels by whole runs of 32, so that rows keep their alignment and the last step
    its size: 4032 channels in steps of 9 go to 4032 - 13 * 288 = 288 for 128 points.
    """
    if points is not None and case.operator in ("matmul", "conv2d"):
        window = prod(case.inputs[1].shape[2:]) if case.operator == "conv2d" else 1
        case = _with_channels(case, max(32, points // window), lcm(32, step))
    x, *others = case.inputs
    largest = max(prod(x.shape), prod(case.output.shape))
    if elements is None or largest <= elements:
        return case
    batch = max(1, x.shape[0] * elements // largest)
    batch = min(x.shape[0], max(2, batch // batch_tile) * batch_tile)
    first, output = (replace(t, shape=(batch, *t.shape[1:])) for t in (x, case.output))
    return replace(case, inputs=(first, *others), output=output)


def _with_channels(case: Case, channels: int, run: int) -> Case:
    x, w = case.inputs[:2]
    present = x.shape[1]
    kept = present - max(0, present - channels) // run * run
    if case.operator == "matmul":
        shapes = (x.shape[0], kept), (kept, w.shape[1])
    else:
        shapes = (x.shape[0], kept, *x.shape[2:]), (w.shape[0], kept, *w.shape[2:])
    return replace(case, inputs=(replace(x, shape=shapes[0]), replace(w, shape=shapes[1]), *case.inputs[2:]))


# --- all of them --------------------------------------------------------------------------------------------------
def outcomes(figure: str, case: Case, device: DeviceSpec) -> Iterator[Outcome]:
    """The outcome of each variant of one operator, or one that says why there are none."""
    counted: dict[Any, Outcome] = {}
    for variant in variants(figure, case, device):
        key = tuple(program.tiles for program in variant.programs), variant.fused, variant.literal
        if key not in counted:
            counted[key] = evaluate(variant, device)
        yield _again(counted[key], variant)
    if not counted:
        yield Outcome(
            figure=figure, operator=case.id, group=case.group, variant="", literal=False, programs=0,
            error=ROWS_OF_THREADS,
        )  # fmt: skip


def _again(outcome: Outcome, variant: Variant) -> Outcome:
    """``outcome`` of another variant with the same tiles as ``variant``'s: what was predicted may differ."""
    if outcome.error:
        return replace(outcome, variant=variant.label)
    used = variant.programs[len(outcome.refused)]
    return replace(
        outcome, variant=variant.label, epsilon=used.epsilon, predicted_s=used.prediction.time_s,
        predicted_bound=used.prediction.bound,
    )  # fmt: skip


def _record(outcome: Outcome) -> dict[str, Any]:
    """Its fields that say something: empty ones are what `Outcome` starts with."""
    return {name: value for name, value in asdict(outcome).items() if value not in ("", None, [], {})}


def _present(path: Path, environment: Environment) -> list[Outcome]:
    """What an earlier run wrote to ``path``, see `earlier_results`; raises TypeError for a file of other fields."""
    return [Outcome(**item) for item in earlier_results(path, environment)]


def main(
    ids: Annotated[list[str] | None, typer.Argument(help="Operators by id; all of them.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Devices of the tables.")] = None,
    figure: Annotated[list[str] | None, typer.Option(help="'Table 3', 'Figure 16' or 'Figure 17'")] = None,
    resume: Annotated[bool, typer.Option(help="Keep what today's file has, and go on with the rest.")] = False,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Also draw the first device's results.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file, for one device.")] = None,
) -> None:
    """Construct, emit, count, model; print the tables."""
    environment = current_environment()
    for name in device or DEVICES:
        spec = lookup(name)
        path = result_path(f"gpu-ablation-{spec.name}", environment, out)
        results = _present(path, environment) if resume else []
        done = {(item.figure, item.operator) for item in results}
        with progress() as say:
            for wanted in figure or FIGURES:
                for case in cases(wanted):
                    if (ids and case.id not in ids) or (wanted, case.id) in done:
                        continue
                    say(f"{spec.name}, {wanted}: {case.id}")
                    results += outcomes(wanted, case, spec)
                    write_results(path, "gpu-ablation", environment, [_record(item) for item in results])
        _report(spec, results)
        if plot_file is not None and name == (device or DEVICES)[0]:
            plot(plot_file, spec.name, results)
        print(f"written: {path}")


def _report(device: DeviceSpec, results: Sequence[Outcome]) -> None:
    for table in TABLES:
        show(table(device.name, results))
    for item in results:
        if item.error and item.error != ROWS_OF_THREADS:
            print(f"{item.figure} {item.operator}, {item.variant!r}: {item.error.splitlines()[0][:300]}")
        for finding in item.findings[:1]:
            print(f"{item.figure} {item.operator}, {item.variant!r}: {finding}")


if __name__ == "__main__":
    typer.run(main)
