"""A `BuildRecord` as a table for the terminal."""

from __future__ import annotations

from collections import Counter
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .record import BuildRecord, OperatorReport


def render(report: BuildRecord, width: int = 160) -> str:
    """The report as plain text of at most ``width`` columns."""
    buffer = StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_jupyter=False)
    show(report, console)
    return buffer.getvalue().rstrip("\n")


def show(report: BuildRecord, console: Console, most: int | None = None) -> None:
    """Print the summary and one line per operator, the slowest first; of more than ``most`` only so many."""
    console.print(Text(summary(report)))
    console.print(operator_table(report, most))
    hidden = by_time(report)[most:] if most is not None else []
    if hidden:
        share = sum(operator.total_s or 0.0 for operator in hidden)
        console.print(Text(f"{len(hidden)} more kernels take {format_time(share)}; --report FILE.html shows all"))
    for line in profile(report):
        console.print(Text(line))


def profile(report: BuildRecord) -> list[str]:
    """Where the time of the build went: lines of phases, code generation and the cache, then decisions and limits."""
    templates = [f"CUTLASS: {line}" for line in cutlass_lines(report)]
    tuned = tuning_lines(report)
    limits = [f"limit: {note}" for note in report.notes]
    precision = [] if report.precision is None else report.precision.lines()
    notes = [*precision, *tuned, *persistent_lines(report), *templates, *rammer_lines(report), *limits]
    if not report.phases:
        return notes
    parts = ", ".join(f"{phase.name} {format_time(phase.seconds)}" for phase in report.phases)
    return [f"build profile: {parts}", code_summary(report), report.cache_summary(), *report.kernel_cache.notes, *notes]


def tuning_lines(report: BuildRecord) -> list[str]:
    """What tuning came to, and which tiles are by measurement, with the reason that was given for each."""
    tuned = [] if report.tuning is None else [f"tuning: {report.tuning}", *report.tuning.notes]
    reasons = Counter(report.tiles.reasons)
    lines = [f"{reason}{f' ({count} kernels)' if count > 1 else ''}" for reason, count in reasons.items()]
    return [*tuned, *lines, *report.tiles.notes]


def rammer_lines(report: BuildRecord) -> list[str]:
    """A line for each schedule, and for each reason why something runs outside of them."""
    if report.rammer is None:
        return []
    outside = Counter(f"outside the schedules: {item.name}: {item.reason}" for item in report.rammer.outside)
    known, kernels = report.rammer.known, len(report.rammer.workloads)
    return [
        *(line for region in report.rammer.regions for line in (str(region), *region.selection_lines())),
        *([f"schedules by measured times of {known} of {kernels} rKernels"] if known else []),
        *(f"{text} ({count} times)" if count > 1 else text for text, count in outside.items()),
    ]


def persistent_lines(report: BuildRecord) -> list[str]:
    """One line for each chain of operators that became one kernel, and for each reason why others did not."""
    regions = report.persistent.regions if report.persistent else ()
    refused = Counter(region.reason for region in regions if not region.fused)
    lines = Counter(f"persistent kernel: {region}" for region in regions if region.fused)
    return [
        *(line if count == 1 else f"{line}; {count} times" for line, count in lines.items()),
        *(f"no persistent kernel of {count} chain{'s' * (count > 1)}: {reason}" for reason, count in refused.items()),
    ]


def cutlass_lines(report: BuildRecord) -> list[str]:
    """What was measured, then one line for each product that was considered for a template."""
    if report.cutlass is None:
        return []
    left = (*report.cutlass.declined, *report.cutlass.others)
    declined = [f"not {item.value or item.operator}: {item.reason}" for item in left]
    measured = [f"profile: {report.cutlass.profile}"] if report.cutlass.profile is not None else []
    return [*measured, *map(str, report.cutlass.kernels), *declined]


def code_summary(report: BuildRecord) -> str:
    """How many kernels were compiled and the processor time of it."""
    code = report.code
    if not (code.compiled or code.link_s):
        return "code generation of all kernels as one module"
    return (
        f"code generation of {code.compiled} kernels on {code.threads} thread(s): "
        f"processor time {format_time(code.lowering_s)} to lower and optimise, "
        f"{format_time(code.objects_s)} for machine code; linking {format_time(code.link_s)}"
    )


def summary(report: BuildRecord) -> str:
    """Model, device, path counts and times in three lines; of a GPU's library a fourth on what it holds."""
    counts = ", ".join(f"{count} {path}" for path, count in sorted(report.path_counts().items())) or "none"
    calls = sum(operator.calls for operator in report.operators)
    size = f"{report.constant_bytes / 1e6:.3g} MB of parameters"
    said = (
        report.layout_summary(), report.persistent_summary(), report.cutlass_summary(), report.rammer_summary()
    )  # fmt: skip
    graph = "".join(f"; {words}" for words in said if words)
    imported = "" if report.import_s is None else f"import {report.import_s:.2f} s, "
    built = f"build {report.build_s:.2f} s (of it code generation {report.code_generation_s:.2f} s)"
    run = "" if report.run_s is None else f"; one run {format_time(report.run_s)}"
    row = f"; row {report.row.row}" if report.row is not None and report.row.row else ""
    lines = (
        f"{report.model} for {report.device} ({report.device_description}{row})",
        f"{len(report.operators)} kernels: {counts}; {calls} calls; {size}{graph}",
        f"{imported}{built}{run}",
        report.device_code_summary(),
    )
    return "\n".join(filter(None, lines))


def operator_table(report: BuildRecord, most: int | None = None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operator", overflow="fold", max_width=44)
    for header in ("calls", "predicted", "measured", "all calls"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in ("path", "bound"):
        table.add_column(header, no_wrap=True)
    table.add_column("how and why", overflow="fold")
    for operator in by_time(report)[:most]:
        table.add_row(*_cells(report, operator))
    return table


def by_time(report: BuildRecord) -> list[OperatorReport]:
    """The operators, the one with most time over all calls first; those without a time last."""
    return sorted(report.operators, key=lambda operator: -(operator.total_s or 0.0))


def _cells(report: BuildRecord, operator: OperatorReport) -> tuple[Text, ...]:
    title = report.title_of(operator)
    times = (operator.predicted_s, operator.measured_s, operator.total_s)
    cells = (
        operator.name if title == operator.name else f"{title}\n{operator.name}",
        str(operator.calls),
        *map(format_time, times),
        operator.choice.path,
        report.bound_of(operator),
        operator.choice.reason,
    )
    return tuple(map(Text, cells))


def format_time(seconds: float | None) -> str:
    """Three significant digits in the unit that suits: ``1.23 ms``; a dash for None."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError("unreachable")
