"""The command ``tvm-ext advise``: what would make a model faster on a GPU if it were changed (Bolt §3.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError
from tvm_ext.records.advice import ActivationAdvice, AlignmentAdvice, CombinedAdvice, DeepeningAdvice, ModelAdvice
from tvm_ext.records.partition import CutlassRefusal

from . import common

if TYPE_CHECKING:
    import onnx

    from tvm_ext._tvm import IRModule


def advise(
    model: common.Model,
    device: common.Gpu = common.DEFAULT_GPU,
    dtype: common.Precision = "float16",
    shape: common.ShapeOption = None,
    batch: common.Batch = 1,
    as_json: common.AsJson = False,
) -> None:
    """Predict what a model would gain on a GPU with other channels, activations and 1x1 convolutions (Bolt §3.3)."""
    from tvm_ext.devices.device_db import lookup
    from tvm_ext.records import serialise

    spec = lookup(device)
    _require_matrix_units(spec)
    half = common.require_precision(dtype)
    with common.progress_bar(2) as steps:
        steps.begin("importing")
        mod = imported(common.load_model(model, batch), common.parse_shapes(shape), half=half)
        steps.begin("predicting")
        found = advice_on(mod, spec)
    if as_json:
        typer.echo(serialise.to_json(found))
        return
    console = common.output_console()
    for part in render(found):
        console.print(part)


def _require_matrix_units(spec: DeviceSpec) -> None:
    from tvm_ext.cost.alignment_model import has_matrix_units

    if spec.kind != "cuda" or not has_matrix_units(spec, "float16"):
        raise InputError(
            f"{spec.name} has none of NVIDIA's matrix units, which all of this advice is about.",
            "name a GPU from the V100 on: `tvm-ext devices` lists them",
        )


def imported(model: str | onnx.ModelProto, shape: dict[str, list[int]], *, half: bool) -> IRModule:
    """The model's graph with its parameters; in half precision where that is asked for."""
    from tvm_ext import relay
    from tvm_ext.relay_passes.onnx.half import to_half
    from tvm_ext.relay_passes.onnx.load import load_onnx

    proto = load_onnx(model)
    mod, params = relay.frontend.from_onnx(to_half(proto) if half else proto, shape=shape or None)
    return relay.prepare(mod, params)


def advice_on(mod: IRModule, device: DeviceSpec) -> ModelAdvice:
    """Advice on a module with bound parameters."""
    from tvm_ext._tvm import RelaxFunction, Sequential, relax
    from tvm_ext.byoc_cutlass.advice import advise as advise_on
    from tvm_ext.byoc_cutlass.graph_values import GraphValues
    from tvm_ext.pass_pipeline import graph_passes
    from tvm_ext.records.padding import PADDING, PaddingRecord
    from tvm_ext.records.serialise import from_json
    from tvm_ext.relay_passes.layout.channels_last import ChannelsLast
    from tvm_ext.relay_passes.padding.pad_alignment import PadAlignment

    passes = [ChannelsLast(device, always=True, grouped=True), relax.transform.DeadCodeElimination()]
    ready = Sequential([*graph_passes(), *passes, PadAlignment(device)])(mod)
    graphs = [func for _, func in ready.functions_items() if isinstance(func, RelaxFunction)]
    values = [GraphValues(ready, func) for func in graphs if isinstance(func.body, relax.SeqExpr)]
    return advise_on(values, from_json(PaddingRecord, str(ready.attrs[PADDING])), device)


# --- A `ModelAdvice` as tables for the terminal -----------------------------------------------------------------------
MOST_ROWS = 20
"""Rows of a table; the others are counted, and all are in the JSON."""


def render(advice: ModelAdvice) -> Iterator[RenderableType]:
    """What to print, top to bottom."""
    yield (
        f"[bold]{advice.products} products that templates serve on {advice.device}[/], those on matrix units "
        f"{advice.products_us:.1f} us, their epilogues {advice.epilogues_us:.1f} us. "
        "All times are predicted, none is measured."
    )
    if advice.chains:
        yield f"{advice.chains} of them save {advice.chains_saved_us:.1f} us in one kernel with the 1x1 behind"
    yield from _section(
        "Channels that are not divisible: what changing the model would save",
        ("product", "calls", "channels", "filters", "now us", "aligned us", "gain us", "a build"),
        [_alignment_row(item) for item in advice.alignment],
        "every product is read and written in whole copies of 16 bytes",
    )
    yield from _section(
        "Activations: what another would cost in the epilogue",
        ("function", "calls", "where", "now us", "others, us"),
        [_activation_row(activation) for activation in advice.activations],
        "no activation costs more than a ReLU",
    )
    yield from _section(
        "3x3 convolutions that a 1x1 convolution behind them would deepen almost for free, in one kernel",
        ("convolution", "calls", "alone us", "in one kernel us", "adds", "in two kernels us", "kept in"),
        [_deepening_row(item) for item in advice.deepening],
        "none",
    )
    yield from _section(
        "Changes alone and together: products and activations of the changed model",
        ("changes", "now us", "then us", "speed"),
        [_combined_row(item) for item in advice.combinations],
        "none is left to be made",
    )
    yield from _reasons("3x3 convolutions for which it would not be free", advice.not_deepened)
    yield from _reasons("Products that no template serves", [_refusal(item) for item in advice.refused])


def _section(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], nothing: str
) -> Iterator[RenderableType]:
    yield ""
    if not rows:
        yield f"[bold]{title}[/]: {nothing}"
        return
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for row in rows[:MOST_ROWS]:
        table.add_row(*map(escape, row))
    yield table
    if len(rows) > MOST_ROWS:
        yield f"... and {len(rows) - MOST_ROWS} more (--json has all)"


def _reasons(title: str, reasons: Sequence[str]) -> Iterator[RenderableType]:
    if not reasons:
        return
    yield ""
    yield f"[bold]{title}[/]"
    counted = Counter(reasons)
    for reason, count in counted.most_common(MOST_ROWS):
        yield escape(f"{count} x {reason}" if count > 1 else reason)
    if len(counted) > MOST_ROWS:
        yield f"... and {len(counted) - MOST_ROWS} more (--json has all)"


def _extents(pair: tuple[int, int]) -> str:
    return f"{pair[0]} -> {pair[1]}" if pair[0] != pair[1] else str(pair[0])


def _alignment_row(advice: AlignmentAdvice) -> tuple[str, ...]:
    name = advice.operator.removeprefix("relax.").removeprefix("nn.")
    times = (f"{advice.now_us:.2f}", f"{advice.aligned_us:.2f}", f"{advice.gain_us:.2f}")
    return (
        f"{name} {advice.described}",
        str(advice.calls),
        _extents(advice.depth),
        _extents(advice.columns),
        *times,
        advice.handled,
    )


def _activation_row(advice: ActivationAdvice) -> tuple[str, ...]:
    where = "in the epilogue" if advice.fused else f"its own kernel: {advice.reason}"
    others = ", ".join(f"{name} {time:.2f}" for name, time in advice.alternatives)
    return advice.function, str(advice.calls), where, f"{advice.now_us:.2f}", others


def _deepening_row(advice: DeepeningAdvice) -> tuple[str, ...]:
    times = (f"{advice.alone_us:.2f}", f"{advice.fused_us:.2f}", f"{advice.added_share:.0%}", f"{advice.apart_us:.2f}")
    return advice.described, str(advice.calls), *times, advice.residence


def _combined_row(advice: CombinedAdvice) -> tuple[str, ...]:
    return " + ".join(advice.changes), f"{advice.now_us:.1f}", f"{advice.then_us:.1f}", f"{advice.speed:.2f}"


def _refusal(refusal: CutlassRefusal) -> str:
    return f"{refusal.reason}; {refusal.remedy}" if refusal.remedy else refusal.reason
