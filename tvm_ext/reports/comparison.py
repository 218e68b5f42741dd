"""Two builds of one model side by side: which of its nodes became faster or slower, and by which kernels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from .record import BuildRecord, OperatorReport
from .text import format_time


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPart:
    """Nodes that both builds compute by kernels of their own: seconds and kernels of each.

    Seconds are None where a kernel has no time. ``changed``: paths, tiles or reasons differ.
    """

    title: str
    first_s: float | None
    second_s: float | None
    first_kernels: tuple[str, ...]
    second_kernels: tuple[str, ...]
    changed: bool

    @property
    def gain_s(self) -> float:
        """Seconds that the second build is faster by; 0 where that is not known."""
        return 0.0 if self.first_s is None or self.second_s is None else self.first_s - self.second_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `compare` found, the largest difference first. Times are measured where both reports have such."""

    first: str
    second: str
    measured: bool
    parts: tuple[ComparedPart, ...]
    first_s: float
    second_s: float
    first_run_s: float | None
    second_run_s: float | None
    settings: tuple[tuple[str, str, str], ...]  # options, versions and devices that differ: name, first, second


def compare(first: BuildRecord, second: BuildRecord, names: tuple[str, str] = ("first", "second")) -> Comparison:
    """Match the kernels of two builds by the model's nodes, for kernels' names tell nothing; without nodes by name.

    Worked example: the first build has ``Conv`` and ``Relu`` in one kernel, the second in two: one part of three
    kernels. Raises ValueError where the builds share no node and no kernel.
    """
    measured = all(any(item.measured_s is not None for item in report.operators) for report in (first, second))
    groups = _Groups()
    for side, report in enumerate((first, second)):
        for operator in report.operators:
            for keys, title in _keys(report, operator):
                groups.add(side, operator, keys, title)
    parts = [_part(members, measured) for members in groups.members()]
    if not any(part.first_kernels and part.second_kernels for part in parts):
        raise ValueError("the two reports have no node and no kernel in common")
    parts.sort(key=lambda part: (-abs(part.gain_s), part.title))
    return Comparison(
        first=names[0],
        second=names[1],
        measured=measured,
        parts=tuple(parts),
        first_s=sum(part.first_s or 0.0 for part in parts),
        second_s=sum(part.second_s or 0.0 for part in parts),
        first_run_s=first.run_s,
        second_run_s=second.run_s,
        settings=_settings(first, second),
    )


_Key = tuple[str, str]


def _keys(report: BuildRecord, operator: OperatorReport) -> list[tuple[tuple[_Key, ...], str]]:
    """What each call of the operator computes, and the call's title."""
    sites = report.sites_of(operator)
    if not sites:
        return [((("kernel", operator.name),), operator.name)] * operator.calls
    return [
        (tuple((node.kind, node.name) for node in site.nodes) or (("kernel", operator.name),), site.title)
        for site in sites
    ]


class _Groups:
    """Calls of both builds that share nodes, directly or by others, as a union-find over nodes."""

    def __init__(self) -> None:
        self._parents: dict[_Key, _Key] = {}
        self._calls: list[tuple[int, OperatorReport, _Key, str]] = []

    def add(self, side: int, operator: OperatorReport, keys: tuple[_Key, ...], title: str) -> None:
        root = self._root(keys[0])
        for key in keys[1:]:
            self._parents[self._root(key)] = root
        self._calls.append((side, operator, keys[0], title))

    def _root(self, key: _Key) -> _Key:
        while (parent := self._parents.setdefault(key, key)) != key:
            key = parent
        return key

    def members(self) -> list[list[tuple[int, OperatorReport, str]]]:
        found = defaultdict(list)
        for side, operator, key, title in self._calls:
            found[self._root(key)].append((side, operator, title))
        return list(found.values())


def _part(members: list[tuple[int, OperatorReport, str]], measured: bool) -> ComparedPart:
    sides = [[operator for side, operator, _ in members if side == which] for which in (0, 1)]
    seconds = [_total(operators, measured) for operators in sides]
    titles = dict.fromkeys(title for _, _, title in members)
    return ComparedPart(
        title=max(titles, key=len),
        first_s=seconds[0],
        second_s=seconds[1],
        first_kernels=tuple(operator.name for operator in sides[0]),
        second_kernels=tuple(operator.name for operator in sides[1]),
        changed=_decisions(sides[0]) != _decisions(sides[1]),
    )


def _total(operators: list[OperatorReport], measured: bool) -> float | None:
    times = [operator.measured_s if measured else operator.predicted_s for operator in operators]
    return None if None in times or not times else sum(time_s for time_s in times if time_s is not None)


def _decisions(operators: list[OperatorReport]) -> list[tuple[str, str, tuple[str, ...]]]:
    """What was decided of kernels, without their names, which count the kernels of a build."""
    choices = (operator.choice for operator in operators)
    return sorted((c.path, "" if c.program is None else str(c.program.tiles), c.notes) for c in choices)


def _settings(first: BuildRecord, second: BuildRecord) -> tuple[tuple[str, str, str], ...]:
    def facts(report: BuildRecord) -> dict[str, str]:
        return {"device": report.device, "target": report.target, **dict(report.options), **dict(report.versions)}

    one, other = facts(first), facts(second)
    names = dict.fromkeys([*one, *other])
    return tuple((n, one.get(n, "-"), other.get(n, "-")) for n in names if one.get(n) != other.get(n))


def comparison_table(found: Comparison, most: int) -> Table:
    """The ``most`` largest differences, then the totals."""
    kind = "measured" if found.measured else "predicted"
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"{found.first} → {found.second}, {kind}")
    table.add_column("nodes", overflow="fold", max_width=52)
    for header in (found.first, found.second, "change"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("kernels", overflow="fold")
    for part in found.parts[:most]:
        table.add_row(Text(part.title), *_times(part.first_s, part.second_s), Text(_kernels(part)))
    table.add_section()
    table.add_row("all kernels", *_times(found.first_s, found.second_s), "")
    if found.first_run_s is not None and found.second_run_s is not None:
        table.add_row("one run", *_times(found.first_run_s, found.second_run_s), "")
    return table


def _times(first_s: float | None, second_s: float | None) -> tuple[str, str, Text]:
    change = Text("-")
    if first_s and second_s:
        percent = 100 * (second_s / first_s - 1)
        change = Text(f"{percent:+.1f} %", style="green" if percent < -2 else "red" if percent > 2 else "")
    return format_time(first_s), format_time(second_s), change


def _kernels(part: ComparedPart) -> str:
    if not part.changed:
        return "same"
    return f"{', '.join(part.first_kernels) or '-'} → {', '.join(part.second_kernels) or '-'}"
