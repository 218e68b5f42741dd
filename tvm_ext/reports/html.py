"""A `BuildRecord` as one self-contained HTML page: no other file, no network, readable in light and dark."""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template

from .gantt import section
from .record import BuildRecord, OperatorReport
from .svg import points, roofline
from .text import by_time, code_summary, cutlass_lines, format_time
from .tuning import tuning_section

_SHOWN_OPERATORS = 25  # a choice: a screen of rows; JSON has all
_SHOWN_PASSES = 15  # a choice, likewise
_PATHS = {
    "rtile": "in tiles, after Roller",
    "rows": "row by row",
    "fallback": "fallback schedule",
    "stock": "left to stock TVM",
    "check": "checks of run-time values",
    "legacy": "given by the user",
}


def render(report: BuildRecord) -> str:
    """The page's text."""
    page = Template(_resource("page.html"))
    return page.substitute(
        title=escape(f"{report.model} on {report.device} - build report"),
        model=escape(report.model),
        subtitle=escape(
            f"{report.device}: {report.device_description}. Built {report.created}. Target {report.target}"
        ),
        style=_resource("style.css"),
        script=_resource("sort.js"),
        tiles=_tiles(report),
        roofline=roofline(report),
        roofline_note=_roofline_note(report),
        bars=_operator_bars(report),
        bars_note=_bars_note(report),
        tuning=tuning_section(report.tuning),
        table=_table(report),
        schedules=section(report),
        passes=_pass_bars(report),
        passes_note=escape(_passes_note(report)),
        facts=_facts(report),
    )


def _resource(name: str) -> str:
    return (resources.files("tvm_ext") / "reports" / "page" / name).read_text(encoding="utf-8").strip()


def _tiles(report: BuildRecord) -> str:
    calls = sum(operator.calls for operator in report.operators)
    tiles = [_tile(str(len(report.operators)), f"kernels, called {calls} times")]
    tiles += [
        _tile(str(count), f'<span class="swatch {path}"></span>{escape(_PATHS[path])}')
        for path, count in sorted(report.path_counts().items(), key=lambda item: list(_PATHS).index(item[0]))
    ]
    tiles.append(_tile(f"{report.constant_bytes / 1e6:.3g} MB", "parameters"))
    tiles.append(_tile(format_time(report.build_s), "build"))
    if report.import_s is not None:
        tiles.append(_tile(format_time(report.import_s), "import"))
    predicted = sum((operator.predicted_s or 0.0) * operator.calls for operator in report.operators)
    if predicted:
        tiles.append(_tile(format_time(predicted), "one run, predicted"))
    if report.run_s is not None:
        tiles.append(_tile(format_time(report.run_s), "one run, measured"))
    code = report.device_code
    if code is not None:
        form = f"machine code for {', '.join(code.architectures)}" if code.architectures else f"{code.language} source"
        tiles.append(_tile("GPU", escape(form)))
    return "".join(tiles)


def _tile(value: str, caption: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{caption}</span></div>'


def _roofline_note(report: BuildRecord) -> str:
    missing = len(report.operators) - len(points(report))
    note = (
        "Each circle is an operator; its area is its share of the time. Filled: measured; dashed outline: predicted. "
        "Lines are the device's limits."
    )
    return note + (f" Not shown: {missing} operator(s) without arithmetic or without a time." if missing else "")


def _bars_note(report: BuildRecord) -> str:
    measured = any(operator.measured_s is not None for operator in report.operators)
    note = "All calls of an operator together. "
    note += "Bar: measured; red mark: predicted." if measured else "Bar: predicted (not measured yet: Library.profile)."
    hidden = len(report.operators) - _SHOWN_OPERATORS
    return note + (f" The {_SHOWN_OPERATORS} slowest of {len(report.operators)}." if hidden > 0 else "")


def _operator_bars(report: BuildRecord) -> str:
    shown = by_time(report)[:_SHOWN_OPERATORS]
    total = sum(operator.total_s or 0.0 for operator in report.operators)
    predicted = [(operator.predicted_s or 0.0) * operator.calls for operator in shown]
    longest = max([*predicted, *(operator.total_s or 0.0 for operator in shown)], default=0.0)
    rows = []
    for operator, guess in zip(shown, predicted, strict=True):
        time_s = operator.total_s
        share = f" ({100 * time_s / total:.0f} %)" if time_s and total else ""
        mark = guess if operator.measured_s is not None and guess else None
        label = operator.name if operator.calls == 1 else f"{operator.calls} x {operator.name}"
        rows.append(_bar(label, time_s, mark, longest, format_time(time_s) + share, operator.choice.path))
    return f'<div class="bars" id="operator-bars">{"".join(rows)}</div>'


def _bar(label: str, value: float | None, mark: float | None, longest: float, text: str, style: str) -> str:
    width = 100 * value / longest if value and longest else 0.0
    tick = "" if mark is None or not longest else f'<u style="left:{100 * mark / longest:.2f}%"></u>'
    fill = f'<i style="width:{width:.2f}%"></i>' if width else ""
    return (
        f'<div class="name" title="{escape(label)}">{escape(label)}</div>'
        f'<div class="bar {style}">{fill}{tick}</div><div class="value">{escape(text)}</div>'
    )


_COLUMNS = (
    "Operator",
    "Calls",
    "Path",
    "Measured",
    "Predicted",
    "All calls",
    "GFLOP",
    "MB",
    "Bound",
    "rProgram and reason",
)


def _table(report: BuildRecord) -> str:
    head = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in _COLUMNS)
    body = "".join(_row(operator, report.bound_of(operator)) for operator in by_time(report))
    return f'<table class="sortable" id="operators"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _row(operator: OperatorReport, bound: str) -> str:
    choice = operator.choice
    cells = [
        f'<td class="name">{escape(operator.name)}</td>',
        _number(operator.calls, str(operator.calls)),
        f'<td class="path"><span class="swatch {choice.path}"></span>{choice.path}</td>',
        *(
            _number(time_s, format_time(time_s))
            for time_s in (operator.measured_s, operator.predicted_s, operator.total_s)
        ),
        _number(choice.flops, f"{choice.flops / 1e9:.3g}"),
        _number(choice.bytes, f"{choice.bytes / 1e6:.3g}"),
        f"<td>{escape(bound)}</td>",
        f'<td class="reason">{_tiles_of(operator)}{escape(choice.reason)}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _tiles_of(operator: OperatorReport) -> str:
    program = operator.choice.program
    if program is None:
        return ""
    return "".join(f"<code>{escape(f'{layer} {tile}')}</code>" for layer, tile in program.tiles)


def _number(value: float | None, text: str) -> str:
    return f'<td class="number" data-value="{"" if value is None else repr(float(value))}">{escape(text)}</td>'


def _passes_note(report: BuildRecord) -> str:
    if not report.passes:
        return "Passes were not timed: the build ran inside a PassContext with instruments of its own."
    total = format_time(report.build_s)
    return (
        f"First the phases of the build, then the self time of each graph pass, of {total} altogether. "
        f"{code_summary(report)}. {report.cache_summary()}. " + " ".join(f"{n}." for n in report.kernel_cache.notes)
    )


def _pass_bars(report: BuildRecord) -> str:
    phases = [(phase.name, phase.seconds) for phase in report.phases]
    phases = phases or [("code generation (LLVM) and linking", report.code_generation_s)]
    entries = sorted(((pass_.name, pass_.seconds) for pass_ in report.passes), key=lambda entry: -entry[1])
    shown, rest = entries[:_SHOWN_PASSES], entries[_SHOWN_PASSES:]
    if rest:
        shown.append((f"{len(rest)} more passes", sum(seconds for _, seconds in rest)))
    longest = max(seconds for _, seconds in [*phases, *shown])
    rows = [_bar(name, seconds, None, longest, format_time(seconds), "fallback") for name, seconds in phases]
    rows += [_bar(name, seconds, None, longest, format_time(seconds), "rtile") for name, seconds in shown]
    return f'<div class="bars" id="pass-bars">{"".join(rows)}</div>'


def _facts(report: BuildRecord) -> str:
    code = [("code", report.device_code_summary())] if report.device_code else []
    templates = [("CUTLASS", line) for line in cutlass_lines(report)]
    facts = [*code, *templates, *report.options, *report.versions]
    rows = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<table><tbody>{rows}</tbody></table>"
