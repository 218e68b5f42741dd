"""What ALCOP's analytical model says pipelining is worth, operator by operator, for GPUs that need not be present.

    python benchmarks/gpu/pipelining_model.py                          # A100 and H200, all 75 operators
    python benchmarks/gpu/pipelining_model.py --device nvidia-a100 A38 A45 A46

For each operator of ALCOP's list Roller's tensor-core tiles are constructed, and their latency is predicted without
pipelining, with two stages (double), with several stages of shared memory (multistage), and of registers too (full).
"same tile" pipelines the tile that is predicted best without stages; "best tile" takes, as the paper's exhaustive
search does, the best of the first 40 tiles for each mode; "split-K" is with the tiles whose reduction several blocks
share, which the paper's schedules do not have. Both forms of the model are told apart: "loop", how our loops run, and
"printed", Table 1 to the letter (`tvm_ext/cost/pipeline_model.py` says where they differ and why). Writes
``benchmarks/results/<date>-pipelining-model-<device>.json``, the operators of the "loop" form alone. Nothing here is
measured.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from _common import current_environment, progress, result_path, show, write_results
from cases import Case
from lists import alcop
from pipelining_tiles import MODES, Tile, tiles_of
from rich.table import Table
from scipy.stats import spearmanr

from benchmarks.alcop.printed import predict_bottleneck, predict_printed
from tvm_ext.cost.pipeline_model import PipelineLatency, predict
from tvm_ext.cost.pipeline_workload import PipelineWorkload
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite

WORKLOAD = Path(__file__).resolve().parent.parent / "workloads" / "alcop_ops.csv"
DEVICES = ("nvidia-a100", "nvidia-h200")
TILES = 40
PAPER = {"double": 1.01, "multistage": 1.13, "full": 1.23}
"""§5.1, measured on an A100: averages over vanilla TVM, each with its own best schedule.

"double" is ALCOP "without multi-level and multi-stage" pipelining, its own two stages of shared memory. Of TVM with
double buffering put in by hand the paper says "no obvious speedup", and gives no figure.
"""
PAPER_RANGE = (0.95, 1.73)

FULLY_CONNECTED = "A38"
"""MM_RN50_FC, 1024 x 64 with a reduction of 2048: the operator that gains most in the paper."""
ATTENTION = (("A45", "A46"), ("A47", "A48"), ("A49", "A50"))
"""(QK, SV) of BERT, GPT-2 and BERT-Large: the paper has the first of each gain much less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The best prediction of one mode."""

    tile: str
    shared_stages: int
    register_stages: int
    time_us: float
    bound: str
    speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One operator on one device under one form of the model and one choice of tiles."""

    id: str
    paper_name: str
    group: str
    shape: str
    reduction: int
    output_elements: int
    form: str
    tiles: str
    split_k: bool
    unpipelined_us: float
    unpipelined_bound: str
    bottleneck_us: float  # §5.4's simpler model, of the unpipelined tile
    modes: dict[str, Prediction]

    @property
    def speedup(self) -> float:
        return self.modes["full"].speedup


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What can be held against the paper: means, extremes and which operators gain most."""

    device: str
    form: str
    tiles: str
    split_k: bool
    operators: int
    geomean: dict[str, float]
    lowest: float
    highest: float
    highest_id: str
    rank_correlation_reduction_per_output: float
    rank_correlation_reduction: float
    rank_correlation_output: float
    fully_connected_rank: int | None
    attention_sv_over_qk: list[float]


# ---- predictions ----------------------------------------------------------------------------------------------------


def fastest(
    tiles: Iterable[Tile], device: DeviceSpec, shared: Sequence[int], register: Sequence[int], *, as_printed: bool
) -> tuple[Tile, PipelineLatency]:
    """The best predicted tile and stages among those that fit."""
    found = [
        (tile, latency)
        for tile in tiles
        for n in shared
        for r in register
        if n <= tile.workload.shared_trips and tile.workload.register_trips % r == 0
        for latency in _predicted(tile.workload, device, n, r, as_printed)
    ]
    return min(found, key=lambda item: item[1].time_s)


def _predicted(
    workload: PipelineWorkload, device: DeviceSpec, shared: int, register: int, as_printed: bool
) -> list[PipelineLatency]:
    try:
        return [(predict_printed if as_printed else predict)(workload, device, shared, register)]
    except IllegalRewrite:
        return []


def outcomes_of(case: Case, name: str, tiles: list[Tile], device: DeviceSpec, count: int) -> list[Outcome]:
    """Both forms of the model, for the same tile and for each mode's best, with and without split-K."""
    unsplit = [tile for tile in tiles if not tile.split_k]
    return [
        _outcome(case, name, chosen[:count], device, as_printed=as_printed, same=same, split_k=chosen is tiles)
        for as_printed in (False, True)
        for same in (True, False)
        for chosen in (tiles, unsplit)
    ]


def _outcome(
    case: Case, name: str, tiles: list[Tile], device: DeviceSpec, *, as_printed: bool, same: bool, split_k: bool
) -> Outcome:
    tile, plain = fastest(tiles, device, (1,), (1,), as_printed=as_printed)
    allowed = [tile] if same else tiles
    modes = {
        mode: _prediction(*fastest(allowed, device, *stages, as_printed=as_printed), plain)
        for mode, stages in MODES.items()
    }
    elements = 1
    for extent in case.output.shape:
        elements *= extent
    return Outcome(
        id=case.id,
        paper_name=name,
        group=case.group,
        shape=" ".join("x".join(map(str, item.shape)) for item in case.inputs),
        reduction=case.terms,
        output_elements=elements,
        form="printed" if as_printed else "loop",
        tiles="same tile" if same else "best tile",
        split_k=split_k,
        unpipelined_us=plain.time_s * 1e6,
        unpipelined_bound=plain.bound,
        bottleneck_us=predict_bottleneck(tile.workload, device).time_s * 1e6,
        modes=modes,
    )


def _prediction(tile: Tile, latency: PipelineLatency, plain: PipelineLatency) -> Prediction:
    return Prediction(
        tile=tile.label,
        shared_stages=latency.shared_stages,
        register_stages=latency.register_stages,
        time_us=latency.time_s * 1e6,
        bound=latency.bound,
        speedup=plain.time_s / latency.time_s,
    )


def summarise(device: DeviceSpec, outcomes: Sequence[Outcome]) -> Summary:
    """What ``outcomes``, all of one form and choice of tiles, come to."""
    best = max(outcomes, key=lambda item: item.speedup)
    products = sorted((item for item in outcomes if item.group == "alcop_MatMul"), key=lambda item: -item.speedup)
    by_id = {item.id: item for item in outcomes}
    return Summary(
        device=device.name,
        form=outcomes[0].form,
        tiles=outcomes[0].tiles,
        split_k=outcomes[0].split_k,
        operators=len(outcomes),
        geomean={mode: statistics.geometric_mean(item.modes[mode].speedup for item in outcomes) for mode in MODES},
        lowest=min(item.speedup for item in outcomes),
        highest=best.speedup,
        highest_id=best.id,
        rank_correlation_reduction_per_output=_correlation(outcomes, lambda x: x.reduction / x.output_elements),
        rank_correlation_reduction=_correlation(outcomes, lambda x: x.reduction),
        rank_correlation_output=_correlation(outcomes, lambda x: x.output_elements),
        fully_connected_rank=next((i for i, x in enumerate(products, 1) if x.id == FULLY_CONNECTED), None),
        attention_sv_over_qk=[
            by_id[sv].speedup / by_id[qk].speedup for qk, sv in ATTENTION if qk in by_id and sv in by_id
        ],
    )


def _correlation(outcomes: Sequence[Outcome], key: Callable[[Outcome], float]) -> float:
    """Spearman's between the full mode's speedup and ``key``; 0 where there are too few operators."""
    if len(outcomes) < 3:
        return 0.0
    return float(spearmanr([item.speedup for item in outcomes], [key(item) for item in outcomes]).statistic)


# ---- output ---------------------------------------------------------------------------------------------------------


def operator_table(device: DeviceSpec, outcomes: Sequence[Outcome]) -> Table:
    table = Table(title=f"{device.name}: predicted speedup over no pipelining, {outcomes[0].tiles}, split-K")
    for column in ("operator", "shape", "no stages us", *MODES, "stages", "tile", "bound before", "bound after"):
        table.add_column(column)
    for item in outcomes:
        full = item.modes["full"]
        table.add_row(
            item.paper_name or item.id,
            item.shape,
            f"{item.unpipelined_us:.1f}",
            *(f"{item.modes[mode].speedup:.2f}" for mode in MODES),
            f"{full.shared_stages} x {full.register_stages}",
            full.tile,
            item.unpipelined_bound,
            full.bound,
        )
    return table


def summary_table(summaries: Sequence[Summary]) -> Table:
    table = Table(title="beside the paper (measured on an A100)")
    columns = (
        "device",
        "model",
        *MODES,
        "range",
        "most",
        "rho K / output",
        "rho K",
        "rho output",
        "FC rank",
        "SV / QK",
    )
    for column in columns:
        table.add_column(column)
    most = "MM_RN50_FC"
    means = [f"{PAPER[mode]:.2f}" for mode in MODES]
    table.add_row(
        "nvidia-a100", "paper", *means, "{:.2f} - {:.2f}".format(*PAPER_RANGE), most, "> 0", "> 0", "< 0", "1", "> 1"
    )
    for item in summaries:
        table.add_row(
            item.device,
            f"{item.form}, {item.tiles}{', split-K' if item.split_k else ''}",
            *(f"{item.geomean[mode]:.2f}" for mode in MODES),
            f"{item.lowest:.2f} - {item.highest:.2f}",
            item.highest_id,
            f"{item.rank_correlation_reduction_per_output:.2f}",
            f"{item.rank_correlation_reduction:.2f}",
            f"{item.rank_correlation_output:.2f}",
            "-" if item.fully_connected_rank is None else str(item.fully_connected_rank),
            " ".join(f"{ratio:.2f}" for ratio in item.attention_sv_over_qk) or "-",
        )
    return table


def run_device(device: DeviceSpec, cases: Sequence[tuple[Case, str]], count: int) -> list[list[Outcome]]:
    """The outcomes of all operators, one list for each form and choice of tiles."""
    columns: list[list[Outcome]] = []
    with progress() as say:
        for case, name in cases:
            say(f"{device.name}: {case.id}")
            found = outcomes_of(case, name, tiles_of(case, device), device, count)
            columns = [[*column, item] for column, item in zip(columns or [[]] * len(found), found, strict=True)]
    return columns


def _rounded(value: Any) -> Any:
    """Numbers of a record to four decimals, which is more than the model knows."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def paper_names() -> dict[str, str]:
    """Ids of `lists.alcop` to the paper's names as the workload file gives them; a guessed one ends in "?".

    "MM_RN50_FC (confirmed by ...)" is MM_RN50_FC, "MM_BERT_FC2 (inferred)" is MM_BERT_FC2?: the published scripts have
    shapes without names, and the paper's figure names without shapes.
    """
    with WORKLOAD.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {f"A{number}": _named(row["paper_name_guess"]) for number, row in enumerate(rows)}


def _named(guess: str) -> str:
    name, _, remark = guess.partition(" (")
    return name if not name or remark.startswith("confirmed") else f"{name}?"


def main(
    ids: Annotated[list[str] | None, typer.Argument(help="Operators by id; all of them.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Devices of the tables.")] = None,
    tiles: Annotated[int, typer.Option(help="Tiles that a mode chooses from.")] = TILES,
) -> None:
    """Predict, compare with the paper, write JSON."""
    environment, names = current_environment(), paper_names()
    for name in device or DEVICES if not ids else ():
        result_path(f"pipelining-model-{name}", environment)  # refuses before anything is predicted
    cases = [(case, names[case.id]) for case in alcop(WORKLOAD) if not ids or case.id in ids]
    summaries: list[Summary] = []
    for spec in map(lookup, device or DEVICES):
        columns = run_device(spec, cases, tiles)
        of_device = [summarise(spec, column) for column in columns]
        summaries += of_device
        for column in columns:
            if column[0].form == "loop" and column[0].split_k:
                show(operator_table(spec, column))
        operators = [item for column in columns for item in column if item.form == "loop"]
        records = [_rounded(asdict(item)) for item in of_device] + [_rounded(asdict(item)) for item in operators]
        if not ids:
            what = f"pipelining-model-{spec.name}"
            write_results(result_path(what, environment), "gpu-pipelining-model", environment, records)
    show(summary_table(summaries))


if __name__ == "__main__":
    typer.run(main)
