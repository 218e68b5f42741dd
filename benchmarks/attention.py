"""Attention in one kernel: BERT's at several lengths, and whole encoders, beside kernels apart and beside peers.

    TVM_NUM_THREADS=1 python benchmarks/attention.py                    # about two minutes
    TVM_NUM_THREADS=1 python benchmarks/attention.py --length 128 --no-networks

Contenders take turns in one process, medians count: one kernel, this plugin with ``enable_persistent_fusion=False``,
ONNX Runtime, and OpenVINO told to compute in float32. The memory of a run, of either build in a process of its own, is
what its first run adds to the resident set at its highest; inputs and output are no part of that. Writes
``benchmarks/results/<date>-attention.json`` after each.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
import onnx
import typer
from _common import current_environment, progress, result_path, show, write_results
from rich.table import Table

from benchmarks.networks.bert import build_bert_base
from benchmarks.networks.graph import GraphWriter
from benchmarks.networks.models import build_model, random_inputs
from tvm_ext.bench.contenders import (
    ONNX_RUNTIME,
    OPENVINO,
    Contender,
    prepare_onnx_runtime,
    prepare_openvino,
    prepare_ours,
)
from tvm_ext.bench.timing import Runner, interleave, median
from tvm_ext.options import BuildOptions
from tvm_ext.support.arrays import Array

HEADS, FEATURES = 12, 64
LENGTHS = (128, 512, 2048)
ONE, APART = "one kernel", "apart"
BUILDS: dict[str, bool | Literal["auto"]] = {ONE: "auto", APART: False}
AGAIN = ", built again"
"""Networks are built twice each way: where weights lie in memory makes equal code differ by a few hundredths, which is
as much as attention is of a network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionResult:
    """Median seconds of a run by contender; ``fused`` of ``considered`` attentions are one kernel.

    ``memory_bytes`` is of one run beside inputs and output, None where it was not measured. ``relative_error`` is of
    the one kernel against ONNX Runtime, by norm.
    """

    name: str
    fused: int
    considered: int
    seconds: dict[str, float]
    samples: dict[str, tuple[float, ...]]
    relative_error: float
    memory_bytes: dict[str, int] | None = None

    def speedup(self, other: str) -> float:
        return self._seconds(other) / self._seconds(ONE)

    def _seconds(self, name: str) -> float:
        """The mean of what is the same code built once and again."""
        return fmean(self.seconds[item] for item in (name, name + AGAIN) if item in self.seconds)

    @property
    def same_code(self) -> dict[str, float]:
        """How many times as long the second build of each takes: how far from 1 nothing is said by a ratio."""
        return {
            name: self.seconds[name + AGAIN] / self.seconds[name] for name in BUILDS if name + AGAIN in self.seconds
        }

    def record(self) -> dict[str, Any]:
        others = [name for name in self.seconds if name != ONE and not name.endswith(AGAIN)]
        return {**asdict(self), "speedup": {name: self.speedup(name) for name in others}, "same_code": self.same_code}


def attention_model(length: int) -> onnx.ModelProto:
    """BERT base's attention of one sentence: 12 heads of 64, side by side in (1, length, 768), a mask of the keys."""
    graph = GraphWriter("attention")
    shape = (1, length, HEADS * FEATURES)
    split = graph.constant("split", np.array([1, length, HEADS, FEATURES], np.int64))

    def heads(name: str, order: list[int]) -> str:
        return graph.op("Transpose", graph.op("Reshape", graph.input(name, shape), split), perm=order)

    scores = graph.op("MatMul", heads("query", [0, 2, 1, 3]), heads("key", [0, 2, 3, 1]))
    scores = graph.op("Div", scores, graph.constant("root", np.float32(FEATURES**0.5)))
    scores = graph.op("Add", scores, graph.input("mask", (1, 1, 1, length)))
    result = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), heads("value", [0, 2, 1, 3]))
    merged = graph.op("Transpose", result, perm=[0, 2, 1, 3])
    graph.op("Reshape", merged, graph.constant("merged", np.array(shape, np.int64)), name="y")
    graph.output("y", shape)
    return graph.model()


def attention_inputs(length: int) -> dict[str, Array]:
    """Normal numbers; the last tenth of the keys is masked as padding is."""
    drawn = random_inputs(attention_model(length), 0)
    drawn["mask"] = np.zeros_like(drawn["mask"])
    drawn["mask"][..., length - length // 10 :] = np.finfo(np.float32).min
    return drawn


def ours(model: onnx.ModelProto, inputs: Mapping[str, Array], build: str) -> Contender:
    options = BuildOptions.create(enable_persistent_fusion=BUILDS[build])
    return prepare_ours(model, inputs, None, "llvm", options)


# --- times ----------------------------------------------------------------------------------------------------------
def measure(
    name: str, model: onnx.ModelProto, inputs: Mapping[str, Array], threads: int, rounds: int, *, again: bool = False
) -> AttentionResult:
    """Build the model with all contenders, our own ``again`` at the end, and time them in turns."""
    contenders = {build: ours(model, inputs, build) for build in BUILDS}
    contenders |= {build + AGAIN: ours(model, inputs, build) for build in BUILDS} if again else {}
    contenders[ONNX_RUNTIME] = prepare_onnx_runtime(model, inputs, threads)
    contenders[OPENVINO] = prepare_openvino(model, inputs, threads)
    for contender in contenders.values():
        contender.run()
    actual, expected = (np.asarray(contenders[item].outputs()[0], "f8") for item in (ONE, ONNX_RUNTIME))
    runners = [Runner(name=item, run=contender.run) for item, contender in contenders.items()]
    samples = interleave(runners, rounds=rounds)
    library = contenders[ONE].library
    record = None if library is None else library.report.persistent
    regions = [region for region in (record.regions if record else ()) if region.kind == "attention"]
    return AttentionResult(
        name=name,
        fused=sum(region.fused for region in regions),
        considered=len(regions),
        seconds={item: median(values) for item, values in samples.items()},
        samples=samples,
        relative_error=float(np.linalg.norm(actual - expected) / np.linalg.norm(expected)),
    )


# --- memory ---------------------------------------------------------------------------------------------------------
def run_memory(length: int, build: str) -> int:
    """Bytes that the first run adds to this process' resident set at its highest, of which the output is no part."""
    inputs = attention_inputs(length)
    contender = ours(attention_model(length), inputs, build)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark begins anew
    before = _status_bytes("VmRSS")
    contender.run()
    return max(0, _status_bytes("VmHWM") - before - inputs["query"].nbytes)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def memory(length: int) -> dict[str, int]:
    """`run_memory` of either build, each in a process of its own."""
    found = {}
    for build in BUILDS:
        command = [sys.executable, __file__, "--memory-of", build, "--length", str(length)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[build] = int(json.loads(done.stdout.strip().splitlines()[-1]))
    return found


# --- tables ---------------------------------------------------------------------------------------------------------
def table(results: Sequence[AttentionResult]) -> Table:
    rows = Table("attention", "one kernel", "apart", ONNX_RUNTIME, OPENVINO, "memory", "apart", "error")
    for column in rows.columns[1:]:
        column.justify = "right"
    for item in results:
        peers = [f"{item.speedup(other):.2f}x" for other in (APART, ONNX_RUNTIME, OPENVINO)]
        sizes = item.memory_bytes
        used = ["", ""] if sizes is None else [f"{sizes[build] / 2**20:.1f} MiB" for build in BUILDS]
        rows.add_row(item.name, f"{item.seconds[ONE] * 1e3:.3f} ms", *peers, *used, f"{item.relative_error:.0e}")
    return rows


def networks() -> list[tuple[str, onnx.ModelProto]]:
    found = [("bert_base 128", build_bert_base(batch=1, sequence=128, seed=0))]
    return [*found, ("minilm 128", build_model("minilm", sequence=128))]


def main(
    length: Annotated[list[int] | None, typer.Option(min=1, help="Queries and keys; 128, 512 and 2048.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender gets.")] = 10,
    with_networks: Annotated[bool, typer.Option("--networks/--no-networks", help="Whole BERT base, MiniLM.")] = True,
    memory_of: Annotated[str, typer.Option(hidden=True)] = "",
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time attention as one kernel, and write the results."""
    if memory_of:
        print(run_memory((length or LENGTHS)[0], memory_of))
        return
    environment = current_environment()
    path = result_path("attention", environment, output)
    results: list[AttentionResult] = []

    def keep(result: AttentionResult) -> None:
        results.append(result)
        write_results(path, "attention", environment, [item.record() for item in results])

    with progress() as tell:
        for count in length or LENGTHS:
            tell(f"attention of {count}")
            used = memory(count)
            timed = measure(
                f"attention {count}", attention_model(count), attention_inputs(count), environment.threads, rounds
            )
            keep(replace(timed, memory_bytes=used))
        for name, model in networks() if with_networks else []:
            tell(name)
            keep(measure(name, model, random_inputs(model, 0), environment.threads, rounds, again=True))
    show(table(results))
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
