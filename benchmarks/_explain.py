"""Where a model's time goes beside ONNX Runtime, operator by operator.

Our kernels are timed one by one in the VM, ONNX Runtime's nodes by its own profiler. Both name operators in their own
way, so that they meet by what they compute: a convolution by the sizes of its input, output and window, a matrix
product by those of its output and left operand, the rest by the size of its output. What only one side runs (a layout
change here, a ReLU that the other fused) stays on a row of its own. What a run takes beyond its operators (the VM, the
executor, outputs made) is the row "between operators".
"""

from __future__ import annotations

import collections
import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import tvm
from rich.table import Table

from tvm_ext import relay
from tvm_ext.bench import contenders, models
from tvm_ext.bench.environment import on_main_core, place_threads, thread_count
from tvm_ext.bench.timing import settle
from tvm_ext.cli.explain import operators_of
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.relay_passes.move_padding import whole_operator
from tvm_ext.reports.text import format_time
from tvm_ext.support.arithmetic import ceil_div

REPEATS = 15
CHANNEL_BLOCK = 16
"""Blocked layouts fill the channels up to whole blocks; sizes are compared as if all did."""

Shape = tuple[int, ...]

OUR_KINDS = (
    *(("conv", "convolution"), ("matmul", "matmul"), ("dense", "matmul"), ("pool", "pool"), ("softmax", "softmax")),
    *(("layer_norm", "layer norm"), ("rms_norm", "layer norm"), ("mean", "reduction"), ("sum", "reduction")),
    *(("concat", "concatenation"), ("layout", "layout"), ("transpose", "transpose")),
)
"""The first of these words that a kernel's name holds says what it is; other kernels are element-wise."""

THEIR_KINDS = {
    **dict.fromkeys(("Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose"), "convolution"),
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm", "FusedGemm"), "matmul"),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), "pool"),
    **dict.fromkeys(("LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization"), "layer norm"),
    **dict.fromkeys(("GlobalAveragePool", "ReduceMean", "ReduceSum"), "reduction"),
    **dict.fromkeys(("ReorderInput", "ReorderOutput"), "layout"),
    **dict.fromkeys(("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"), "view"),
    "Softmax": "softmax",
    "Concat": "concatenation",
    "Transpose": "transpose",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A kernel or node with all its calls of one run; ``key`` says what it computes, ``text`` says so to people."""

    key: tuple[Any, ...]
    text: str
    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The operators of one ``kind`` that compute the same, on both sides; seconds are of one run of the model."""

    kind: str
    what: str
    calls: int  # ours, or theirs where we have none
    ours: tuple[str, ...]  # kernels
    ours_s: float
    onnx_runtime_s: float

    @property
    def lost_s(self) -> float:
        return self.ours_s - self.onnx_runtime_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A model's operators, those with most time lost first. ``kinds`` sums them up as (kind, ours, ONNX Runtime's).

    ``ours_s`` and ``onnx_runtime_s`` are of a whole run, hence their sums.
    """

    model: str
    ours_s: float
    onnx_runtime_s: float
    kinds: tuple[tuple[str, float, float], ...]
    rows: tuple[Row, ...]

    def table(self, count: int = 12) -> Table:
        """Sums per kind, then the ``count`` rows with most time lost."""
        title = f"{self.model}: time lost against ONNX Runtime, by operator"
        result = Table("operator", "calls", "ours", "ONNX Runtime", "lost", "kernels", title=title)
        for column in result.columns[1:5]:
            column.justify = "right"
        for kind, ours_s, theirs_s in (("a whole run", self.ours_s, self.onnx_runtime_s), *self.kinds):
            result.add_row(
                kind if kind == "a whole run" else f"all: {kind}",
                "",
                _signed(ours_s),
                _signed(theirs_s),
                _signed(ours_s - theirs_s, "+"),
            )
        result.add_section()
        for row in self.rows[:count]:
            times = (_signed(row.ours_s), _signed(row.onnx_runtime_s), _signed(row.lost_s, "+"))
            result.add_row(f"{row.kind} {row.what}", str(row.calls), *times, ", ".join(row.ours))
        return result


def _signed(seconds: float, plus: str = "") -> str:
    return ("-" if seconds < 0 else plus) + format_time(abs(seconds))


def explain(name: str, model: onnx.ModelProto) -> Explanation:
    """Time both sides operator by operator, in turns, each thread on a core of its own."""
    inputs = models.random_inputs(model)
    placement = place_threads(thread_count())
    ours = contenders.prepare_ours(model, inputs, None, "llvm", None)
    sizes = _operator_shapes(model)
    library = ours.library
    assert library is not None
    with tempfile.TemporaryDirectory() as folder:
        theirs = contenders.prepare_onnx_runtime(model, inputs, thread_count(), placement, str(Path(folder) / "ort"))
        with on_main_core(placement):
            settle()
            report = library.profile(inputs, repeat=REPEATS)
            settle()
            for _ in range(REPEATS):
                theirs.run()
        events = json.loads(Path(theirs.close()).read_text(encoding="utf-8"))
    kernels = [
        _timed(op.name, our_kind(op.name), sizes[known], op.calls, (op.measured_s or 0.0) * op.calls)
        for op in report.operators
        if (known := op.name if op.name in sizes else whole_operator(op.name)) in sizes
    ]
    return match(name, kernels, list(their_nodes(events)), report.run_s or 0.0, _their_run_s(events))


def _their_run_s(events: Iterable[dict[str, Any]]) -> float:
    """Median of a whole run, from a profile."""
    return statistics.median(float(event["dur"]) for event in events if event["name"] == "model_run") * 1e-6


def our_kind(kernel: str) -> str:
    return next((kind for word, kind in OUR_KINDS if word in kernel), "element-wise")


def _operator_shapes(model: onnx.ModelProto) -> dict[str, list[Shape]]:
    """The shapes of each operator's parameters, the output last, by name."""
    mod, params = relay.frontend.from_onnx(model)
    operators = operators_of(relay.prepare(mod, params), device_for_target("llvm")[0])
    functions = [(v.name_hint, f) for v, f in operators.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    return {name: [tuple(int(size) for size in item.shape) for item in func.params] for name, func in functions}


def their_nodes(events: Iterable[dict[str, Any]]) -> Iterator[Timed]:
    """Nodes of an ONNX Runtime profile, each with the median of its runs."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs[event["args"]["node_index"], event["name"]].append(event)
    for (_, name), items in runs.items():
        arguments = items[0]["args"]
        shapes = [*_shapes(arguments["input_type_shape"]), *_shapes(arguments["output_type_shape"])[:1]]
        kind = THEIR_KINDS.get(arguments["op_name"], "element-wise")
        seconds = statistics.median(item["dur"] for item in items) * 1e-6
        yield _timed(name.removesuffix("_kernel_time"), kind, shapes, 1, seconds)


def _shapes(items: Sequence[dict[str, Sequence[int]]]) -> list[Shape]:
    return [tuple(shape) for item in items for shape in item.values()]


def _timed(name: str, kind: str, shapes: Sequence[Shape], calls: int, seconds: float) -> Timed:
    """Worked example: a first layer's text is "1x64x111x111 <- 1x3x224x224, 3x3" (output, input, window)."""
    source, output = (shapes[0] if shapes else ()), (shapes[-1] if shapes else ())
    key: tuple[Any, ...] = (kind, _elements(output))
    text = _text(output)
    if kind in ("convolution", "pool", "matmul", "reduction"):
        key, text = (*key, _elements(source)), f"{text} <- {_text(source)}"
    if kind == "convolution":
        weights = shapes[1] if len(shapes[1]) > 2 else (0, 0)  # ONNX Runtime forgets the shape of some that it packs
        depthwise = weights[1] == 1 and weights[0] > 1
        key, text = (*key, weights[2:4], depthwise), f"{text}, {_text(weights[2:4])}" + " depthwise" * depthwise
    return Timed(key=key, text=text, name=name, calls=calls, seconds=seconds)


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _elements(shape: Shape) -> int:
    """Elements, channels filled up to whole blocks: (1, 1000, 13, 13) counts as 1008 x 13 x 13."""
    if len(shape) == 4:
        shape = (shape[0], ceil_div(shape[1], CHANNEL_BLOCK) * CHANNEL_BLOCK, *shape[2:])
    return math.prod(shape)


def match(
    name: str, ours: Sequence[Timed], theirs: Sequence[Timed], ours_s: float, onnx_runtime_s: float
) -> Explanation:
    """Bring both sides together by what they compute; ``ours_s`` and ``onnx_runtime_s`` are of whole runs."""
    keys = dict.fromkeys(item.key for item in (*ours, *theirs))
    rows = [
        _row([item for item in ours if item.key == key], [item for item in theirs if item.key == key]) for key in keys
    ]
    between = (ours_s - math.fsum(r.ours_s for r in rows), onnx_runtime_s - math.fsum(r.onnx_runtime_s for r in rows))
    rows.append(Row(kind="between operators", what="", calls=1, ours=(), ours_s=between[0], onnx_runtime_s=between[1]))
    kinds = []
    for kind in dict.fromkeys(row.kind for row in rows):
        same = [row for row in rows if row.kind == kind]
        kinds.append((kind, math.fsum(row.ours_s for row in same), math.fsum(row.onnx_runtime_s for row in same)))
    return Explanation(
        model=name,
        ours_s=ours_s,
        onnx_runtime_s=onnx_runtime_s,
        kinds=tuple(sorted(kinds, key=lambda item: item[2] - item[1])),
        rows=tuple(sorted(rows, key=lambda row: -row.lost_s)),
    )


def _row(ours: Sequence[Timed], theirs: Sequence[Timed]) -> Row:
    first = (*ours, *theirs)[0]
    return Row(
        kind=first.key[0],
        what=first.text,
        calls=sum(item.calls for item in ours or theirs),
        ours=tuple(item.name for item in ours),
        ours_s=math.fsum(item.seconds for item in ours),
        onnx_runtime_s=math.fsum(item.seconds for item in theirs),
    )
