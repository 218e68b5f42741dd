"""Whole models in half precision for GPUs that need not be present: their kernels, and what nvcc makes of them.

    python benchmarks/gpu/models.py                        # ResNet-50 and BERT base, batch 1 and 32; V100, A100, H200
    python benchmarks/gpu/models.py --device nvidia-a100 --only bert_base_1x128 --no-compile

Per model and device: kernels, calls and launches by path (tensor cores, vector units, rows, stock TVM), the share of
the operations that each path has, why a product or convolution is not on tensor cores, the times to import, to build,
and to make machine code of all kernels, registers and spills. Writes ``benchmarks/results/<date>-gpu-models.json``.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import typer
from _common import current_environment, progress, result_path, show, write_results
from model_graphs import GROUP, TOLERANCE
from rich.table import Table

from benchmarks.networks.bert import BERT_BASE_TABLES, build_bert_base
from benchmarks.networks.models import build_model
from tvm_ext import relay
from tvm_ext.errors import OptionError, TvmExtError
from tvm_ext.records.choice import OWN_PATHS
from tvm_ext.relay_passes.onnx.half import to_half
from tvm_ext.reports.record import OperatorReport
from tvm_ext.runtime.library import Library
from tvm_ext.toolchains.cuda_export import architecture_of
from tvm_ext.toolchains.cuda_toolchain import compile_cuda

DEVICES = ("nvidia-v100", "nvidia-a100", "nvidia-h200")
SEQUENCE = 128
TENSOR_CORES, VECTOR = "tensor cores", "vector units"  # of kernels in tiles
COMPILER_TIME_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Model:
    """``build`` makes the ONNX model; ``below`` bounds its integer inputs by name, exclusively.

    ``tolerance`` is of its outputs, relative by norm; with ``scheduled`` schedules of rTasks are a contender, too.
    """

    build: Callable[[], Any]
    below: Mapping[str, int] = field(default_factory=dict)
    group: str = GROUP
    tolerance: float = TOLERANCE
    scheduled: bool = False


BERT_BOUNDS = {
    "input_ids": BERT_BASE_TABLES["word"], "token_type_ids": BERT_BASE_TABLES["token_type"], "attention_mask": 2,
}  # fmt: skip


def _bert(batch: int) -> Model:
    return Model(build=lambda: to_half(build_bert_base(batch=batch, sequence=SEQUENCE, seed=0)), below=BERT_BOUNDS)


def _resnet(batch: int) -> Model:
    return Model(build=lambda: to_half(build_model("resnet50", batch)))


MODELS: Mapping[str, Model] = {
    "resnet50_1": _resnet(1),
    "resnet50_32": _resnet(32),
    f"bert_base_1x{SEQUENCE}": _bert(1),
    f"bert_base_32x{SEQUENCE}": _bert(32),
}


@dataclass(frozen=True, kw_only=True)
class Count:
    """Of one path: distinct kernels, their call sites, launches and operations of one run of the model."""

    kernels: int
    calls: int
    launches: int
    flops: float


@dataclass(kw_only=True)
class Outcome:
    """One model on one device. ``off_tensor_cores``: operators with products that do not use them, and why."""

    model: str
    device: str
    import_s: float
    build_s: float
    paths: dict[str, Count]
    off_tensor_cores: dict[str, str]
    layout: str
    compiler: str = ""
    architecture: str = ""
    compile_s: float | None = None
    from_cache: bool = False
    image_bytes: int | None = None
    registers: int | None = None
    spills: dict[str, int] = field(default_factory=dict)
    error: str = ""


def path_of(operator: OperatorReport) -> str:
    """`TENSOR_CORES` or `VECTOR` for kernels in tiles, else the choice's path."""
    if operator.choice.path != "rtile":
        return operator.choice.path
    return TENSOR_CORES if " on matrix units " in operator.choice.reason else VECTOR


def count(operators: Sequence[OperatorReport]) -> dict[str, Count]:
    """By path, those that were taken alone. Of stock TVM's kernels it is not known how many launches they are."""
    groups: dict[str, list[OperatorReport]] = {}
    for item in operators:
        groups.setdefault(path_of(item), []).append(item)
    return {
        path: Count(
            kernels=len(group),
            calls=sum(item.calls for item in group),
            launches=sum(item.calls * sum(plan.launches for plan in item.choice.gpu) for item in group),
            flops=sum(item.calls * item.choice.flops for item in group),
        )
        for path, group in sorted(groups.items())
    }


def off_tensor_cores(operators: Sequence[OperatorReport]) -> dict[str, str]:
    """Products and convolutions elsewhere, and every operator that is not ours, with the reason."""
    products = ("matmul", "conv2d", "dense")
    return {
        item.name: item.choice.reason
        for item in operators
        if item.choice.path not in OWN_PATHS
        or (path_of(item) != TENSOR_CORES and any(word in item.name for word in products))
    }


def build(name: str, device: str, module: Any, params: Any, import_s: float) -> tuple[Outcome, Library]:
    start = time.perf_counter()
    library = relay.build(module, device, params=params)
    build_s = time.perf_counter() - start
    report = library.report
    outcome = Outcome(
        model=name, device=device, import_s=import_s, build_s=build_s, paths=count(report.operators),
        off_tensor_cores=off_tensor_cores(report.operators), layout=report.layout_summary(),
    )  # fmt: skip
    return outcome, library


def compile_kernels(outcome: Outcome, library: Library) -> None:
    """Machine code of the library's source, as `export_library` has it made; what came of it goes into ``outcome``."""
    outcome.architecture = architecture_of(library.report.target) or ""
    try:
        done = compile_cuda(library.source(), [outcome.architecture], time_limit_s=COMPILER_TIME_LIMIT_S)
    except TvmExtError as error:
        outcome.error = str(error)
        return
    outcome.compiler, outcome.compile_s, outcome.from_cache = done.compiler, done.seconds, done.cached
    outcome.image_bytes = len(done.image)
    outcome.registers = max(use.register_count for use in done.uses)
    spilled = {use.name: use.spill_store_bytes + use.spill_load_bytes for use in done.uses}
    outcome.spills = {kernel: size for kernel, size in spilled.items() if size}


def measure(
    names: Sequence[str], devices: Sequence[str], compile: bool, say: Callable[[str], None]
) -> Iterator[Outcome]:
    """Every model on every device; a model is imported once."""
    for name in names:
        say(f"{name}: import")
        model = MODELS[name].build()
        start = time.perf_counter()
        module, params = relay.frontend.from_onnx(model)
        import_s = time.perf_counter() - start
        del model
        for device in devices:
            say(f"{name}: {device}")
            outcome, library = build(name, device, module, params, import_s)
            if compile:
                say(f"{name}: {device}: machine code")
                compile_kernels(outcome, library)
            yield outcome


def table(outcomes: Sequence[Outcome]) -> Table:
    """A row per model and device; kernels / calls / launches by path."""
    paths = sorted({path for item in outcomes for path in item.paths}, reverse=True)
    shown = Table("model", "device", *paths, "FLOPs on tensor cores", "build", "machine code", "size", "spilled")
    for item in outcomes:
        total = sum(part.flops for part in item.paths.values()) or 1.0
        share = item.paths[TENSOR_CORES].flops / total if TENSOR_CORES in item.paths else 0.0
        code = "-" if item.compile_s is None else f"{item.compile_s:.1f} s{' (cached)' if item.from_cache else ''}"
        size = "-" if item.image_bytes is None else f"{item.image_bytes / 1e6:.2f} MB"
        shown.add_row(
            item.model, item.device, *(_cell(item.paths.get(path)) for path in paths), f"{share:.2%}",
            f"{item.build_s:.1f} s", code, size, str(len(item.spills)),
        )  # fmt: skip
    return shown


def _cell(part: Count | None) -> str:
    return "-" if part is None else f"{part.kernels} / {part.calls} / {part.launches}"


def exceptions(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line for each operator off the tensor cores (with the devices), each spill and each error."""
    reasons = Counter((item.model, name, why) for item in outcomes for name, why in item.off_tensor_cores.items())
    for (model, name, why), devices in reasons.items():
        yield f"{model}: {name} (on {devices} devices): {why}"
    for item in outcomes:
        for kernel, size in item.spills.items():
            yield f"{item.model} on {item.device}: {kernel} spills {size} bytes"
        if item.error:
            yield f"{item.model} on {item.device}: {item.error.splitlines()[0]}"


def main(
    only: Annotated[list[str] | None, typer.Option(help="Models by name; all of them.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Devices of the tables.")] = None,
    compile: Annotated[bool, typer.Option(help="Make machine code.")] = True,
) -> None:
    """Build whole models for GPUs and count."""
    unknown = [name for name in only or [] if name not in MODELS]
    if unknown:
        raise OptionError(f"there is no model {unknown[0]!r}.", f"the models are {', '.join(MODELS)}")
    environment = current_environment()
    path = result_path("gpu-models", environment)
    outcomes: list[Outcome] = []
    with progress() as say:
        for outcome in measure(only or list(MODELS), device or DEVICES, compile, say):
            outcomes.append(outcome)
            write_results(path, "gpu-models", environment, outcomes)
    show(table(outcomes))
    for line in exceptions(outcomes):
        print(line)
    print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
