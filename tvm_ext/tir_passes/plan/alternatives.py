"""Several rKernels for an operator (Rammer, §3.3): beside the fastest the one with the least time x rTasks.

The fastest kernel has a tile for every unit. Where operators run beside each other, units have other work, and fewer
and larger tiles that load less are the better choice: a schedule decides, and has to have both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tvm_ext._tvm import IRModule, PrimFunc, copy_module
from tvm_ext.analysis.waves import waves_of_calls
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.choice import ALTERNATIVES, CHOICE, KernelChoice
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import from_json, record_of

from ..roller.construct import Construction
from .equal_functions import EqualFunctions
from .form import unscheduled

WORTH = 0.9
"""Share of a kernel's work, at most, that another one has which is worth having: models err by some percent."""

Pick = Callable[[Construction], Sequence[RProgram]]
"""Of what was constructed for a computation, the rPrograms to emit, in this order."""

MakeAlternative = Callable[[PrimFunc, str, KernelChoice, int], PrimFunc | None]
"""From an unscheduled function, its name, the kernel that it has, and the tiles to make at least: another, or None."""


def with_alternatives(mod: IRModule, kernels: IRModule, device: DeviceSpec, make: MakeAlternative) -> IRModule:
    """``kernels`` with what ``make`` makes of the functions of ``mod`` in their `ALTERNATIVES`, where units are scarce.

    That is in waves of several operators whose kernels together have a tile for each unit (paper §3.3: else the
    fastest kernels are taken in any case). Each is made for at least half of the operator's share of the units: of 5
    operators on 80 units, for 8 or more.
    """
    result, made, without = copy_module(kernels), EqualFunctions(), EqualFunctions()
    widths = _widths(kernels, device)
    for gv, func in unscheduled(mod):
        kernel = kernels[gv]
        if gv.name_hint not in widths or without.find(func, gv.name_hint) is not None:
            continue
        other = made.find(func, gv.name_hint)
        if other is None:
            choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
            other = make(func, gv.name_hint, choice, device.unit_count // (2 * widths[gv.name_hint]))
            (without if other is None else made).remember(func, kernel if other is None else other)
        if other is not None:
            result[gv] = kernel.with_attr(ALTERNATIVES, [other])
    return result


def _widths(kernels: IRModule, device: DeviceSpec) -> dict[str, int]:
    """Of functions that are called in full waves, how many operators the widest of these has."""
    tiles = {gv.name_hint: _tiles(func, device) for gv, func in kernels.functions_items() if isinstance(func, PrimFunc)}
    waves = [Counter(names) for names in waves_of_calls(kernels)]
    full = [wave for wave in waves if wave.total() > 1 and _total(wave, tiles) >= device.unit_count]
    widths: dict[str, int] = {}
    for wave in full:
        widths |= {name: max(wave.total(), widths.get(name, 0)) for name in wave}
    return widths


def _total(wave: Counter[str], tiles: dict[str, int]) -> int:
    return sum(count * tiles.get(name, 0) for name, count in wave.items())


def _tiles(func: PrimFunc, device: DeviceSpec) -> int:
    """What a kernel has for units to do beside each other; a CPU's may be divided as finely as one likes."""
    choice = record_of(func, CHOICE, KernelChoice)
    if choice is None:
        return 0
    if device.kind == "cpu":
        return device.unit_count
    return max((plan.blocks for plan in choice.gpu), default=0)


def best_programs(construction: Construction) -> Sequence[RProgram]:
    """The `Pick` of who wants the fastest kernel."""
    return construction.programs


def frugal_picker(own: RProgram, least_tiles: int, least_s: float) -> Pick:
    """The `Pick` of `frugal_programs`."""
    return lambda construction: frugal_programs(construction.narrower, own, least_tiles, least_s)


def frugal_programs(
    narrower: Sequence[RProgram], own: RProgram, least_tiles: int = 1, least_s: float = 0.0
) -> list[RProgram]:
    """Of ``narrower`` programs those of less work than ``own``, least first; a tile takes ``least_s`` or longer.

    One with fewer tiles must have less work than those before it by more than the model's error: work that is as much
    is done sooner by more units.
    """
    found: list[RProgram] = []
    most_s = WORTH * own.work_s(least_s)
    for program in (candidate for candidate in narrower if candidate.expr_digest == own.expr_digest):
        fits = least_tiles <= program.partition_count < own.partition_count
        if fits and program.work_s(least_s) <= most_s:
            found.append(program)
            most_s = WORTH * program.work_s(least_s)
    return found[::-1]
