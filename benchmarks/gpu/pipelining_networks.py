"""What pipelining is worth to ALCOP's six networks (§5.2, Table 3), predicted for GPUs that need not be present.

    python benchmarks/gpu/pipelining_networks.py                           # A100, all six
    python benchmarks/gpu/pipelining_networks.py bert resnet50 --device nvidia-h200

Each network in half precision is cut into the operators of a build, products apart as ALCOP has them. The analytical
model (`tvm_ext/cost/pipeline_model.py`) predicts every tile and all stages that a search may take (`tvm_ext/autotune/
gpu_space.py`), and each mode of the paper's ablation takes its own best, as the paper's exhaustive search does:
"none" without stages, "double", "multistage", "full". Operators without such a tile, softmax and pooling say, count as
a build predicts them, in all modes alike, and each kernel's launch is counted. "split-K" is with tiles whose reduction
several blocks share, which the paper's schedules do not have. Encoders are built with one layer and with two; each
layer more costs the difference. Writes ``benchmarks/results/<date>-pipelining-networks-<device>.json``. Nothing here is
measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
import typer
from _common import current_environment, progress, result_path, show, write_results
from models import BERT_BOUNDS, Model
from pipelining_tiles import MODES
from rich.table import Table

from benchmarks.networks import bert, gpt2, vision
from benchmarks.networks.models import build_model
from tvm_ext import recorder, relay
from tvm_ext._tvm import IRModule, PrimFunc, tvm
from tvm_ext.autotune.gpu_space import MatrixTileSpace
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import GLOBAL
from tvm_ext.errors import IllegalRewrite
from tvm_ext.exclusive import EXCLUSIVE
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import operator_pipeline, plan_build
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.onnx.half import to_half
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.plan.form import unscheduled
from tvm_ext.tuning.kernels import TunablePart, tunable_part

DEVICE = "nvidia-a100"
IMAGES, TOKENS = 64, 512
"""Batch of the convolutional networks and tokens of BERT as in ALCOP's published operators; GPT-2 has 1024 tokens."""
NONE = "none"
BY_MODE = {NONE: ((1,), (1,)), **MODES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """``build`` makes the network with so many layers, ``layers`` is how many it has; 0: all that there are, at once.

    ``paper``: Table 3's speedup over TVM without pipelining, measured on an A100. ``below`` bounds integer inputs.
    """

    build: Callable[[int], Any]
    paper: float
    layers: int = 0
    below: Mapping[str, int] = field(default_factory=dict)


def _encoder(shape: bert.EncoderShape, paper: float) -> Network:
    def build(layers: int) -> Any:
        return bert.build_bert(replace(shape, layers=layers), batch=1, sequence=TOKENS, seed=0)

    return Network(build=build, paper=paper, layers=shape.layers, below=BERT_BOUNDS)


NETWORKS: Mapping[str, Network] = {
    "bert": _encoder(bert.BERT_BASE, 1.15),
    "bert_large": _encoder(bert.BERT_LARGE, 1.18),
    "gpt2": Network(
        build=lambda layers: gpt2.build_gpt2(batch=1, sequence=gpt2.GPT2_POSITIONS, seed=0, layers=layers),
        paper=1.15,
        layers=gpt2.GPT2.layers,
        below={"input_ids": gpt2.GPT2_WORDS, "attention_mask": 2},
    ),
    "resnet18": Network(build=lambda _: vision.build_resnet18(batch=IMAGES, seed=0), paper=1.02),
    "resnet50": Network(build=lambda _: build_model("resnet50", batch=IMAGES), paper=1.06),
    "vgg16": Network(build=lambda _: vision.build_vgg16(batch=IMAGES, seed=0), paper=1.10),
}


def alcop_models() -> dict[str, Model]:
    """The six as a bundle has them (`bundle.py --pipelining --only alcop_models`), with a contender for each mode."""

    def whole(network: Network) -> Model:
        return Model(build=lambda: to_half(network.build(network.layers)), below=network.below, group="alcop_models")

    return {f"alcop_{name}": whole(network) for name, network in NETWORKS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One network on one device. Times are of one run, by mode; ``others_us`` is the part that has no stages.

    ``pipelined``: calls whose "full" kernel has stages, of ``calls`` with a choice of tiles.
    """

    network: str
    device: str
    split_k: bool
    times_us: dict[str, float]
    others_us: float
    calls: int
    pipelined: int
    speedup: dict[str, float]
    paper: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """Of a graph: microseconds by mode and of what has no stages, calls with tiles, those of them with stages."""

    times_us: Mapping[str, float]
    others_us: float = 0.0
    calls: int = 0
    pipelined: int = 0

    def plus(self, other: Total, times: int) -> Total:
        return Total(
            times_us={mode: self.times_us[mode] + times * other.times_us[mode] for mode in BY_MODE},
            others_us=self.others_us + times * other.others_us,
            calls=self.calls + times * other.calls,
            pipelined=self.pipelined + times * other.pipelined,
        )


NOTHING = Total(times_us=dict.fromkeys(BY_MODE, 0.0))


def by_mode(part: TunablePart, split_k: bool) -> dict[str, tuple[float, int]]:
    """Seconds and stages of shared memory of the best candidate that each mode may take."""
    seconds, stages = part.space.predictions.time_s, _stages(part.space)
    found = {}
    for mode, (shared, register) in BY_MODE.items():
        legal = np.isin(stages[:, 0], shared) & np.isin(stages[:, 1], register)
        legal &= (stages[:, 2] == 1) | split_k
        place = int(np.argmin(np.where(legal, seconds, np.inf)))
        found[mode] = float(seconds[place]), int(stages[place, 0])
    return found


def _stages(space: Any) -> np.ndarray[Any, Any]:
    """Of each candidate of a GPU's space the stages of shared memory, those of registers, and blocks of a reduction."""
    if isinstance(space, MatrixTileSpace):
        return np.stack([space.tiles.shared_stages, space.tiles.register_stages, space.tiles.splits], axis=1)
    tiles = (space[place] for place in range(len(space)))
    return np.asarray([(tile.shared_stages, tile.register_stages, tile.splits) for tile in tiles])


def predicted_s(func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions) -> float:
    """Of a call of a build's kernel; where there is no prediction, that of moving its tensors once."""
    choice = from_json(KernelChoice, str(construct_kernel(func, name, device, options).attrs[CHOICE]))
    machine = Machine(device)
    return choice.predicted_s or machine.launch_s + choice.bytes / machine.rate(GLOBAL)


def totals(operators: IRModule, device: DeviceSpec, options: BuildOptions) -> dict[bool, Total]:
    """Of all calls of ``operators``, unscheduled functions, without split-K and with it."""
    calls, found = recorder.call_counts(operators), {False: NOTHING, True: NOTHING}
    for variable, func in unscheduled(operators):
        name = str(variable.name_hint)
        try:
            part = tunable_part(func, name, device, options)
        except IllegalRewrite:
            other_us = predicted_s(func, name, device, options) * 1e6
            own = Total(times_us=dict.fromkeys(BY_MODE, other_us), others_us=other_us)
            found = {split_k: total.plus(own, calls.get(name, 0)) for split_k, total in found.items()}
            continue
        for split_k, total in found.items():
            best = by_mode(part, split_k)
            times_us = {mode: (seconds + Machine(device).launch_s) * 1e6 for mode, (seconds, _) in best.items()}
            own = Total(times_us=times_us, calls=1, pipelined=int(best["full"][1] > 1))
            found[split_k] = total.plus(own, calls.get(name, 0))
    return found


def operators_of(model: Any, device: DeviceSpec, options: BuildOptions) -> IRModule:
    """The operators of ONNX ``model`` in half precision, as a build cuts them."""
    mod = relay.prepare(*relay.frontend.from_onnx(to_half(model)))
    plan = plan_build(device.name, options)
    with EXCLUSIVE, plan.target:
        return tvm.transform.Sequential([operator_pipeline(plan.target, plan.device, plan.options)])(mod)


def outcomes(name: str, network: Network, device: DeviceSpec) -> Iterator[Outcome]:
    """Without split-K, and with it."""
    options = BuildOptions.create(device=device.name, enable_persistent_fusion=False)
    with EXCLUSIVE:
        built = [
            totals(operators_of(network.build(layers), device, options), device, options)
            for layers in ((1, 2) if network.layers else (0,))
        ]
    for split_k in (False, True):
        first, *more = (item[split_k] for item in built)
        layer = more[0].plus(first, -1) if more else NOTHING
        total = first.plus(layer, network.layers - 1)
        times = dict(total.times_us)
        yield Outcome(
            network=name, device=device.name, split_k=split_k, times_us=times, others_us=total.others_us,
            calls=total.calls, pipelined=total.pipelined, paper=network.paper,
            speedup={mode: times[NONE] / times[mode] for mode in MODES},
        )  # fmt: skip


def table(found: list[Outcome]) -> Table:
    shown = Table(title="predicted speedup of whole networks by pipelining, beside Table 3 (measured on an A100)")
    for column in ("network", "device", "tiles", "none us", "without stages", *MODES, "pipelined", "paper"):
        shown.add_column(column)
    for item in found:
        shown.add_row(
            item.network, item.device, "split-K" if item.split_k else "no split-K", f"{item.times_us[NONE]:.0f}",
            f"{100 * item.others_us / item.times_us[NONE]:.0f} %", *(f"{item.speedup[mode]:.2f}" for mode in MODES),
            f"{item.pipelined} of {item.calls}", f"{item.paper:.2f}",
        )  # fmt: skip
    return shown


def main(
    networks: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(NETWORKS)}; all of them.")] = None,
    device: Annotated[str, typer.Option(help="A row of the device tables.")] = DEVICE,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Predict, print beside the paper, write JSON."""
    unknown = [name for name in networks or [] if name not in NETWORKS]
    if unknown:
        raise typer.BadParameter(f"there is no network {unknown[0]!r}; the networks are {', '.join(NETWORKS)}")
    environment, row = current_environment(), lookup(device)
    path = result_path(f"pipelining-networks-{row.name}", environment, output)
    found: list[Outcome] = []
    with progress() as say:
        for name in networks or NETWORKS:
            say(name)
            found += outcomes(name, NETWORKS[name], row)
            write_results(path, "pipelining-networks", environment, found)
    show(table(found))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
