"""When the entries of a library's schedules of rTasks ran, as the native runtime noted it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tvm_ext.rammer_runtime import native
from tvm_ext.records.rammer import MeasuredRun

if TYPE_CHECKING:
    from tvm_ext._tvm import Module


def measured_runs(
    modules: Iterable[Module], symbols: Sequence[str], run: Callable[[], object], repeat: int
) -> dict[str, MeasuredRun]:
    """By ``symbols``, the functions that run schedules, a run of middle length of ``repeat``, which ``run`` starts.

    ``modules`` are all of the library's. What ``run`` does not call is left out.
    """
    found = {
        symbol: module
        for module in modules
        if module.kind == native.KIND
        for symbol in symbols
        if module.implements_function(symbol)
    }
    traces: dict[str, list[MeasuredRun]] = {symbol: [] for symbol in found}
    try:
        for module in found.values():
            native.record(module)
        for _ in range(repeat):
            run()
            for symbol, module in found.items():
                rows = ((row.unit, row.entry, row.start_ns, row.end_ns) for row in native.recorded(module))
                traces[symbol].append(tuple(rows))
    finally:
        for module in found.values():
            native.record(module, on=False)
    return {symbol: sorted(runs, key=_length_ns)[len(runs) // 2] for symbol, runs in traces.items() if any(runs)}


def _length_ns(run: MeasuredRun) -> int:
    return max((row[3] for row in run), default=0) - min((row[2] for row in run), default=0)
