"""A `ModelAdvice` as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from tvm_ext.records.advice import ActivationAdvice, AlignmentAdvice, DeepeningAdvice, ModelAdvice
from tvm_ext.records.partition import CutlassRefusal

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


def _refusal(refusal: CutlassRefusal) -> str:
    return f"{refusal.reason}; {refusal.remedy}" if refusal.remedy else refusal.reason
