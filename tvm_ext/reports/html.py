"""A `BuildRecord` as one self-contained HTML page: no other file, no network, readable in light and dark."""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template

from .doubts import FAR_APART, doubt
from .gantt import section
from .graph import graph_section
from .record import BuildRecord, OperatorReport
from .svg import points, roofline
from .text import by_time, code_summary, cutlass_lines, format_time
from .tuning import tuning_section

_SHOWN_OPERATORS = 25  # a choice: a screen of rows; the others appear when they are searched for
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
        script=_resource("sort.js") + "\n" + _resource("find.js"),
        tiles=_tiles(report),
        roofline=roofline(report),
        roofline_note=_roofline_note(report),
        bars=_operator_bars(report),
        graph=graph_section(report),
        paths="".join(f"<option>{path}</option>" for path in _PATHS if path in report.path_counts()),
        bars_note=_bars_note(report),
        tuning=tuning_section(report.tuning),
        memory=_memory_section(report),
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
    if report.memory:
        tiles.append(_tile(_mib(report.memory[0][1].peak_bytes), "memory, at most"))
    code = report.device_code
    if code is not None:
        form = f"machine code for {', '.join(code.architectures)}" if code.architectures else f"{code.language} source"
        tiles.append(_tile("GPU", escape(form)))
    return "".join(tiles)


def _tile(value: str, caption: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{caption}</span></div>'


def _memory_section(report: BuildRecord) -> str:
    """Peaks of each contender as bars on one scale; empty where memory was not measured."""
    if not report.memory:
        return ""
    longest = float(max(use.peak_bytes for _, use in report.memory))
    rows = [
        f'<div class="entry">{_bar(escape(f"{name}, {when}"), float(peak), None, longest, _mib(peak), style)}</div>'
        for style, (name, use) in zip(("rtile", *("stock",) * len(report.memory)), report.memory, strict=False)
        for when, peak in (
            ("while loading", use.load_peak_bytes),
            ("while running", use.run_peak_bytes),
            ("afterwards", use.resident_bytes),
        )
    ]
    note = "Resident bytes over those before the file was loaded, each contender in a process of its own."
    bars = f'<div class="bars">{"".join(rows)}</div>'
    return f'<section id="memory"><h2>Memory</h2><p class="muted">{note}</p>{bars}</section>'


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.1f} MiB"


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
    note += "Bar: measured; red mark: predicted." if measured else "Bar: predicted (measure with --profile)."
    doubtful = sum(bool(doubt(report, operator)) for operator in report.operators)
    if doubtful:
        note += f" ⚠ {doubtful} differ from the prediction by more than {FAR_APART:g} times; the table says why."
    hidden = len(report.operators) - _SHOWN_OPERATORS
    shown = f" The {_SHOWN_OPERATORS} slowest of {len(report.operators)}; the filter finds the others."
    return note + (shown if hidden > 0 else "")


def _operator_bars(report: BuildRecord) -> str:
    shown = by_time(report)
    total = sum(operator.total_s or 0.0 for operator in report.operators)
    predicted = [(operator.predicted_s or 0.0) * operator.calls for operator in shown]
    longest = max([*predicted, *(operator.total_s or 0.0 for operator in shown)], default=0.0)
    rows = []
    for place, (operator, guess) in enumerate(zip(shown, predicted, strict=True)):
        time_s = operator.total_s
        share = f" ({100 * time_s / total:.0f} %)" if time_s and total else ""
        mark = guess if operator.measured_s is not None and guess else None
        text = ("⚠ " if doubt(report, operator) else "") + format_time(time_s) + share
        bar = _bar(_label(report, operator), time_s, mark, longest, text, operator.choice.path)
        rest = " rest" if place >= _SHOWN_OPERATORS else ""
        rows.append(f'<div class="entry{rest}" {_found_by(report, operator)}>{bar}</div>')
    return f'<div class="bars" id="operator-bars">{"".join(rows)}</div>'


def _label(report: BuildRecord, operator: OperatorReport) -> str:
    """The model's nodes above the kernel's name and shapes; the kernel's name alone where no nodes are known."""
    calls = f"{operator.calls} x " if operator.calls > 1 else ""
    title, kernel = report.title_of(operator), operator.name
    if title == kernel:
        return f'<span class="node">{escape(calls + kernel)}</span>'
    return f'<span class="node">{escape(title)}</span><span class="kernel">{escape(calls + kernel)}</span>'


def _found_by(report: BuildRecord, operator: OperatorReport) -> str:
    """Attributes that the page's filter reads: words, path, and whether the time is in doubt."""
    nodes = (str(node) for site in report.sites_of(operator) for node in site.nodes)
    words = " ".join(dict.fromkeys((operator.name, operator.choice.path, report.bound_of(operator), *nodes))).lower()
    doubtful = " data-doubt" if doubt(report, operator) else ""
    return f'data-words="{escape(words)}" data-path="{operator.choice.path}"{doubtful}'


def _bar(label: str, value: float | None, mark: float | None, longest: float, text: str, style: str) -> str:
    width = 100 * value / longest if value and longest else 0.0
    tick = "" if mark is None or not longest else f'<u style="left:{100 * mark / longest:.2f}%"></u>'
    fill = f'<i style="width:{width:.2f}%"></i>' if width else ""
    return (
        f'<div class="name">{label}</div>'
        f'<div class="bar {style}">{fill}{tick}</div><div class="value">{escape(text)}</div>'
    )


def _entry(label: str, value: float, longest: float, style: str) -> str:
    return f'<div class="entry">{_bar(escape(label), value, None, longest, format_time(value), style)}</div>'


_COLUMNS = (
    "Operator",
    "Calls",
    "Path",
    "Measured",
    "Predicted",
    "All calls",
    "Share",
    "GFLOP",
    "Of peak",
    "MB",
    "Of DRAM",
    "Bound",
    "rProgram and reason",
)


def _table(report: BuildRecord) -> str:
    head = "".join(f'<th scope="col"><button type="button">{name}</button></th>' for name in _COLUMNS)
    total = sum(operator.total_s or 0.0 for operator in report.operators)
    body = "".join(_row(report, operator, total) for operator in by_time(report))
    return f'<table class="sortable" id="operators"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _row(report: BuildRecord, operator: OperatorReport, total_s: float) -> str:
    choice, time_s = operator.choice, operator.total_s
    spread = f", runs from {format_time(operator.fastest_s)} to {format_time(operator.slowest_s)}"
    why = f'<b class="doubt">⚠ {escape(doubt(report, operator))}</b>' if doubt(report, operator) else ""
    why += f"<i>{escape(spread[2:])}</i>" if operator.fastest_s is not None else ""
    named = _label(report, operator) + _shapes(report, operator)
    cells = [
        f'<td class="name" data-name="{escape(operator.name)}">{named}</td>',
        _number(operator.calls, str(operator.calls)),
        f'<td class="path"><span class="swatch {choice.path}"></span>{choice.path}</td>',
        *(
            _number(time_s, format_time(time_s))
            for time_s in (operator.measured_s, operator.predicted_s, operator.total_s)
        ),
        _share(time_s / total_s if time_s and total_s else None),
        _number(choice.flops, f"{choice.flops / 1e9:.3g}"),
        _share(report.peak_share(operator)),
        _number(choice.bytes, f"{choice.bytes / 1e6:.3g}"),
        _share(report.bandwidth_share(operator)),
        f"<td>{escape(report.bound_of(operator))}</td>",
        f'<td class="reason">{why}{_tiles_of(operator)}{escape(choice.reason)}</td>',
    ]
    row = (cell.replace("<td", f'<td data-column="{name}"', 1) for name, cell in zip(_COLUMNS, cells, strict=True))
    return f"<tr {_found_by(report, operator)}>{''.join(row)}</tr>"


def _shapes(report: BuildRecord, operator: OperatorReport) -> str:
    """Operands and result of the kernel, and under a fold every node that it computes, with the node's shape."""
    sites = report.sites_of(operator)
    if not sites:
        return ""
    shapes = f'<span class="shapes">{escape(", ".join(sites[0].operands))} → {escape(sites[0].result)}</span>'
    lines = ("; ".join(f"{node} {node.shape}" for node in site.nodes) for site in sites if site.nodes)
    nodes = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return shapes + (f"<details><summary>nodes of each call</summary><ol>{nodes}</ol></details>" if nodes else "")


def _share(value: float | None) -> str:
    return _number(value, "-" if value is None else f"{100 * value:.3g} %")


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
    rows = [_entry(name, seconds, longest, "fallback") for name, seconds in phases]
    rows += [_entry(name, seconds, longest, "rtile") for name, seconds in shown]
    return f'<div class="bars" id="pass-bars">{"".join(rows)}</div>'


def _facts(report: BuildRecord) -> str:
    code = [("code", report.device_code_summary())] if report.device_code else []
    templates = [("CUTLASS", line) for line in cutlass_lines(report)]
    facts = [*code, *templates, *report.options, *report.versions]
    rows = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<table><tbody>{rows}</tbody></table>"
