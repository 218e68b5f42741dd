"""Row kernels on one core: softmax, normalisation, activations, reductions, GEMV, attention; beside ONNX Runtime.

    TVM_NUM_THREADS=1 python benchmarks/rows.py                        # all, about two minutes
    TVM_NUM_THREADS=1 python benchmarks/rows.py softmax layer_norm     # by the beginning of their names

Times are processor time of the calling thread, which does all the work: what other processes do to the machine shows
in caches and clock alone. Both contenders take turns in one process; of each the lower quintile counts. NumPy's copy of
as many bytes as the operator must move is the floor. Writes ``benchmarks/results/<date>-rows.json`` after each one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import typer
from _common import current_environment, progress, result_path, show, write_results
from onnx import TensorProto
from rich.table import Table

from benchmarks.networks.graph import GraphWriter, he_normal, near_one, small_normal
from tvm_ext.bench.contenders import prepare_onnx_runtime, prepare_ours
from tvm_ext.bench.models import random_inputs
from tvm_ext.bench.timing import MINIMUM_SAMPLE_S
from tvm_ext.errors import InputError

QUINTILE = 0.2
Shape = tuple[int, ...]
SOFTMAX: list[Shape] = [(192, 16), (1536, 128), (4608, 384), (1, 1000), (128, 1000), (16, 30522), (100, 7), (64, 1)]
NORMALISED: list[Shape] = [(16, 384), (128, 768), (512, 1024), (100, 7), (8, 1000), (16, 4096)]
ACTIVATED: list[Shape] = [(16, 1536), (128, 3072), (1000, 1000)]
REDUCED: list[tuple[str, Shape, list[int]]] = [
    ("ReduceMean", (2048, 49), [1]),
    ("ReduceMean", (1, 768, 1024), [2]),
    ("ReduceMax", (4096, 16), [1]),
    ("ReduceMin", (1000, 100), [1]),
    ("ReduceProd", (64, 32, 33), [2]),
    ("ReduceMean", (1024, 512), [0]),
    ("ReduceMean", (8, 128, 512), [1]),
    ("ReduceMax", (64, 56, 56), [1, 2]),
    ("ReduceMean", (32, 128, 128), [0, 2]),
    ("ReduceMean", (1000000,), [0]),
]
GEMV: list[tuple[int, int, int]] = [
    *((1, k, n) for k, n in [(1024, 1024), (4096, 4096), (768, 3072), (2048, 1000)]),
    *((m, 768, 3072) for m in (2, 4, 8)),
]
SEQUENCES, HEADS, HEAD_SIZE = (16, 128, 384), 12, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model of one operator; ``bytes`` is what it must move at least."""

    name: str
    model: onnx.ModelProto
    bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RowResult:
    """Seconds of processor time per run; ``relative_error`` is ours against ONNX Runtime, by norm."""

    name: str
    bytes: float
    ours_s: float
    onnxruntime_s: float
    copy_s: float
    relative_error: float

    @property
    def speedup(self) -> float:
        return self.onnxruntime_s / self.ours_s

    @property
    def of_floor(self) -> float:
        return self.copy_s / self.ours_s


# --- models --------------------------------------------------------------------------------------------------------
def _case(name: str, graph: GraphWriter, output: Shape, *sizes: int, dtype: int = TensorProto.FLOAT) -> Case:
    graph.output("y", output, dtype)
    return Case(name=name, model=graph.model(), bytes=4.0 * (math.prod(output) + sum(sizes)))


def _named(kind: str, shape: Shape) -> str:
    return f"{kind} {'x'.join(map(str, shape))}"


def _unary(kind: str, operator: str, shape: Shape, **attributes: Any) -> Case:
    graph = GraphWriter(kind)
    graph.op(operator, graph.input("x", shape), name="y", **attributes)
    return _case(_named(kind, shape), graph, shape, math.prod(shape))


def _layer_norm(shape: Shape) -> Case:
    graph = GraphWriter("layer_norm")
    x, size = graph.input("x", shape), shape[-1:]
    scale = graph.constant("scale", near_one(0, "scale", size, 0.5))
    graph.op("LayerNormalization", x, scale, graph.constant("bias", small_normal(0, "bias", size)), name="y", axis=-1)
    return _case(_named("layer_norm", shape), graph, shape, math.prod(shape))


def _rms_norm(shape: Shape) -> Case:
    graph = GraphWriter("rms_norm")
    x = graph.input("x", shape)
    mean = graph.op("ReduceMean", graph.op("Mul", x, x), axes=[-1])
    root = graph.op("Sqrt", graph.op("Add", mean, graph.constant("epsilon", np.float32(1e-5))))
    scale = graph.constant("scale", near_one(0, "scale", shape[-1:], 0.5))
    graph.op("Mul", graph.op("Div", x, root), scale, name="y")
    return _case(_named("rms_norm", shape), graph, shape, math.prod(shape))


def _gelu_erf(shape: Shape) -> Case:
    graph = GraphWriter("gelu_erf")
    x = graph.input("x", shape)
    error = graph.op("Erf", graph.op("Mul", x, graph.constant("root", np.float32(math.sqrt(0.5)))))
    half = graph.op("Mul", x, graph.constant("half", np.float32(0.5)))
    graph.op("Mul", half, graph.op("Add", error, graph.constant("one", np.float32(1))), name="y")
    return _case(_named("gelu_erf", shape), graph, shape, math.prod(shape))


def _gelu_tanh(shape: Shape) -> Case:
    graph = GraphWriter("gelu_tanh")
    x, constant = graph.input("x", shape), graph.constant
    cube = graph.op("Mul", graph.op("Mul", graph.op("Mul", x, x), x), constant("cubic", np.float32(0.044715)))
    inner = graph.op("Mul", graph.op("Add", x, cube), constant("scale", np.float32(math.sqrt(2 / math.pi))))
    outer = graph.op("Add", graph.op("Tanh", inner), constant("one", np.float32(1)))
    graph.op("Mul", graph.op("Mul", x, constant("half", np.float32(0.5))), outer, name="y")
    return _case(_named("gelu_tanh", shape), graph, shape, math.prod(shape))


def _silu(shape: Shape) -> Case:
    graph = GraphWriter("silu")
    x = graph.input("x", shape)
    graph.op("Mul", x, graph.op("Sigmoid", x), name="y")
    return _case(_named("silu", shape), graph, shape, math.prod(shape))


def _reduction(operator: str, shape: Shape, axes: list[int]) -> Case:
    graph = GraphWriter(operator, opset=13)
    graph.op(operator, graph.input("x", shape), name="y", axes=axes, keepdims=0)
    output = tuple(size for axis, size in enumerate(shape) if axis not in axes)
    return _case(f"{_named(operator, shape)} over {axes}", graph, output, math.prod(shape))


def _gemv(m: int, k: int, n: int) -> Case:
    graph = GraphWriter("gemv")
    weights = graph.constant("w", he_normal(0, "w", (k, n), fan_in=k))
    graph.op("MatMul", graph.input("x", (m, k)), weights, name="y")
    return _case(_named("gemv", (m, k, n)), graph, (m, n), m * k, k * n)


def _attention(name: str, left: Shape, right: Shape, output: Shape) -> Case:
    graph = GraphWriter(name)
    graph.op("MatMul", graph.input("a", left), graph.input("b", right), name="y")
    return _case(_named(name, output), graph, output, math.prod(left), math.prod(right))


def cases() -> Iterator[Case]:
    """All of them, one after another: weights of 64 MB are not kept."""
    for shape in SOFTMAX:
        yield _unary("softmax", "Softmax", shape, axis=-1)
        yield _unary("log_softmax", "LogSoftmax", shape, axis=-1)
    for shape in NORMALISED:
        yield _layer_norm(shape)
        yield _rms_norm(shape)
    for shape in ACTIVATED:
        yield from (make(shape) for make in (_gelu_erf, _gelu_tanh, _silu))
        yield from (_unary(kind, kind.capitalize(), shape) for kind in ("relu", "exp", "tanh", "sigmoid", "erf"))
    for operator, shape, axes in REDUCED:
        yield _reduction(operator, shape, axes)
    for m, k, n in GEMV:
        yield _gemv(m, k, n)
    for length in SEQUENCES:
        split, square = (1, HEADS, length, HEAD_SIZE), (1, HEADS, length, length)
        yield _attention("query_key", split, (1, HEADS, HEAD_SIZE, length), square)
        yield _attention("probability_value", square, split, split)


# --- timing --------------------------------------------------------------------------------------------------------
def _processor_s(run: Callable[[], object], repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - start) / repeats


def quintiles(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The lower quintile of each function's processor time in seconds, over ``rounds`` rounds of one turn each."""
    repeats = [max(1, math.ceil(MINIMUM_SAMPLE_S / 4 / max(_processor_s(run, 2), 1e-7))) for run in runs]
    samples = [[_processor_s(run, count) for run, count in zip(runs, repeats, strict=True)] for _ in range(rounds)]
    return [sorted(column)[int(QUINTILE * rounds)] for column in zip(*samples, strict=True)]


def measure(case: Case, rounds: int) -> RowResult:
    """Build the model with both contenders and time them in turns."""
    inputs = random_inputs(case.model, 0)
    ours = prepare_ours(case.model, inputs, None, "llvm", None)
    peer = prepare_onnx_runtime(case.model, inputs, 1)
    ours.run()
    peer.run()
    actual, expected = (np.asarray(item.outputs()[0], "float64") for item in (ours, peer))
    source = np.zeros(max(1, int(case.bytes / 8)), "float32")  # read and written: half of the bytes each
    target = np.empty_like(source)
    seconds = quintiles([ours.run, peer.run, lambda: np.copyto(target, source)], rounds)
    return RowResult(
        name=case.name,
        bytes=case.bytes,
        ours_s=seconds[0],
        onnxruntime_s=seconds[1],
        copy_s=seconds[2],
        relative_error=float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)),
    )


def table(results: Sequence[RowResult]) -> Table:
    rows = Table("operator", "us", "GB/s", "vs onnxruntime", "of a copy's speed", "error")
    for column in rows.columns[1:]:
        column.justify = "right"
    for item in results:
        rows.add_row(
            item.name,
            f"{item.ours_s * 1e6:.2f}",
            f"{item.bytes / item.ours_s / 1e9:.1f}",
            f"{item.speedup:.2f}x",
            f"{item.of_floor:.2f}",
            f"{item.relative_error:.0e}",
        )
    return rows


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Beginnings of names; all operators.")] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Turns that each contender gets.")] = 30,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Time row kernels on one core and write the results."""
    environment = current_environment()
    if environment.threads != 1:
        raise InputError(
            f"this measures one core, but TVM's pool has {environment.threads} threads.", "set TVM_NUM_THREADS=1"
        )
    path = result_path("rows", environment, output)
    results: list[RowResult] = []
    with progress() as tell:
        for case in cases():
            if names and not any(case.name.startswith(name) for name in names):
                continue
            tell(case.name)
            results.append(measure(case, rounds))
            records = [{**asdict(item), "speedup": item.speedup, "of_floor": item.of_floor} for item in results]
            write_results(path, "rows", environment, records)
    if not results:
        raise InputError(f"no operator begins with {names}.", "run without names to see them all")
    show(table(results))
    ratios = [item.speedup for item in results]
    print(f"geometric mean {statistics.geometric_mean(ratios):.2f}x, slowest {min(ratios):.2f}x; written: {path}")


if __name__ == "__main__":
    typer.run(main)
