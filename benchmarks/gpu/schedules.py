"""Schedules of whole networks in single kernels: what nvcc makes of them, for GPUs that need not be present.

    python benchmarks/gpu/schedules.py                          # LSTM-TC, Seq2Seq, a cell of NASNet, a layer of BERT
    python benchmarks/gpu/schedules.py --only nasnet_cell --device nvidia-a100

Of each network on each device: every launch with its level and the reason for it, blocks, threads and bodies, and of
every kernel that runs a schedule ptxas' registers, spills and shared memory. Nothing runs. Writes
``benchmarks/results/<date>-gpu-schedules.json``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import typer
from _common import current_environment, progress, result_path, show, write_results
from models import BERT_BOUNDS, Model
from rich.table import Table

from benchmarks.networks.bert import build_bert_base
from benchmarks.networks.models import build_model
from benchmarks.networks.nasnet import build_nasnet_cell
from benchmarks.networks.recurrent import LSTM_TC, build_lstm_tc
from tvm_ext import relay
from tvm_ext.errors import OptionError, TvmExtError
from tvm_ext.options import BuildOptions
from tvm_ext.records.merged import MergedLaunch
from tvm_ext.relay_passes.onnx.half import to_half
from tvm_ext.runtime.library import Library
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.toolchains.cuda_export import architecture_of
from tvm_ext.toolchains.cuda_toolchain import compile_cuda
from tvm_ext.toolchains.ptxas_report import KernelUse

DEVICES = ("nvidia-t4", "nvidia-a100", "nvidia-h200", "nvidia-v100")
NETWORKS: Mapping[str, Callable[[], Any]] = {
    "lstm_tc": lambda: build_model("lstm_tc"),
    "seq2seq_nmt": lambda: build_model("seq2seq_nmt"),
    "nasnet_cell": lambda: build_nasnet_cell(batch=1, seed=0),
    "bert_layer": lambda: to_half(build_bert_base(batch=1, sequence=128, seed=0, layers=1)),
}
GROUP = "schedules"
_FLOAT32: Mapping[str, Any] = {"group": GROUP, "tolerance": 1e-4, "scheduled": True}
BUNDLED: Mapping[str, Model] = {
    "lstm_10x10": Model(build=lambda: build_lstm_tc(batch=1, seed=0, stack=replace(LSTM_TC, steps=10)), **_FLOAT32),
    "random_cell_0": Model(build=lambda: build_model("nasbench_0"), **_FLOAT32),
    "bert_layer": Model(build=NETWORKS["bert_layer"], below=BERT_BOUNDS, group=GROUP, scheduled=True),
}
"""What a bundle has of them, to be measured (`bundle.py --only schedules`): LSTM-TC's layers, of which PyTorch compiles
ten steps in reasonable time, a cell of NAS-Bench's kind, and the layer of BERT."""
COMPILER_TIME_LIMIT_S = 900.0


@dataclass(kw_only=True)
class Outcome:
    """One network on one device. ``uses`` are ptxas' words on the kernels of its ``launches``, by number."""

    network: str
    device: str
    build_s: float
    operators: int
    outside: dict[str, str]
    launches: list[dict[str, Any]]
    architecture: str = ""
    compiler: str = ""
    uses: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def outcome_of(name: str, device: str, module: Any, params: Any) -> Outcome:
    """``name`` built for ``device`` with schedules, and compiled where a compiler is for its architecture."""
    start = time.perf_counter()
    library = relay.build(module, device, params=params, enable_rammer=True)
    build_s = time.perf_counter() - start
    record = library.report.rammer
    found = Outcome(
        network=name, device=device, build_s=build_s,
        operators=sum(len(region.operators) for region in record.regions),
        outside={item.name: item.reason for item in record.outside},
        launches=[asdict(launch) for region in record.regions for launch in region.launches],
    )  # fmt: skip
    _compile(found, library)
    return found


def _compile(found: Outcome, library: Library) -> None:
    found.architecture = architecture_of(library.report.target) or ""
    try:
        cache = KernelCache.for_build(BuildOptions())  # the build has had most of it compiled
        done = compile_cuda(library.source(), [found.architecture], cache=cache, time_limit_s=COMPILER_TIME_LIMIT_S)
    except TvmExtError as error:
        found.error = str(error).splitlines()[0]
        return
    found.compiler = done.compiler
    symbols = tuple(region.symbol for region in library.report.rammer.scheduled)
    found.uses = [asdict(use) for use in done.uses if use.name.startswith(symbols)]


def table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each network and device; of several launches the levels, and the largest numbers."""
    shown = Table("network", "device", "operators", "levels", "bodies", "registers", "spilled B", "shared B", "build s")
    for item in outcomes:
        launches = [MergedLaunch(**launch) for launch in item.launches]
        uses = [KernelUse(**use) for use in item.uses]
        levels = [launch.level for launch in launches]
        shown.add_row(
            item.network,
            item.device,
            str(item.operators),
            ", ".join(f"{levels.count(level)} {level}" for level in dict.fromkeys(levels)),
            str(max((launch.bodies for launch in launches), default=0)),
            str(max(use.register_count for use in uses)) if uses else "-",
            str(sum(use.spill_store_bytes + use.spill_load_bytes for use in uses)) if uses else "-",
            str(max((launch.shared_bytes for launch in launches), default=0)),
            f"{item.build_s:.0f}",
        )
    return shown


def main(
    only: Annotated[list[str] | None, typer.Option(help="Networks by name; all of them.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Devices of the tables.")] = None,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Build networks with schedules for GPUs, and say what ptxas says of their kernels."""
    unknown = [name for name in only or [] if name not in NETWORKS]
    if unknown:
        raise OptionError(f"there is no network {unknown[0]!r}.", f"the networks are {', '.join(NETWORKS)}")
    environment = current_environment()
    path = result_path("gpu-schedules", environment, output)
    outcomes: list[Outcome] = []
    with progress() as say:
        for name in only or NETWORKS:
            module, params = relay.frontend.from_onnx(NETWORKS[name]())
            for row in device or DEVICES:
                say(f"{name}: {row}")
                outcomes.append(outcome_of(name, row, module, params))
                write_results(path, "gpu-schedules", environment, outcomes)
    show(table(outcomes))
    for item in outcomes:
        for reason in dict.fromkeys(launch["reason"] for launch in item.launches):
            print(f"{item.network} on {item.device}: {reason}")
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
