"""Compiles configurations, several in one translation unit; a unit that fails is halved until one is found that does.

Headers take most of a compiler's time, so a unit of ten costs little more than two alone. What ptxas says of registers
and spills names kernels by their types, in which not every template has a name of its own: where nothing of a unit
spills there is nothing to tell apart, and where a kernel without a name does, the unit is halved as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tvm_ext.errors import CompileError
from tvm_ext.toolchains.cuda_toolchain import CompiledCuda
from tvm_ext.toolchains.cutlass_toolchain import units_of
from tvm_ext.toolchains.ptxas_report import KernelUse

from .draw import TemplateCase

Compile = Callable[[str, str, int], CompiledCuda]
"""Of a text, an architecture and the number of configurations in it; raises CompileError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateResult:
    """What a compiler made of a case: ``seconds`` are its share of the unit's, ``registers`` None where its unit tells
    its kernel from no other and nothing spills."""

    key: str
    compiled: bool
    problem: str = ""
    registers: int | None = None
    spill_bytes: int = 0
    together: int = 1
    seconds: float = 0.0


def unit_cases(cases: Sequence[TemplateCase], most: int) -> list[tuple[TemplateCase, ...]]:
    """``cases`` in units of one architecture, at most ``most`` in each, those with the same headers together."""
    by_source = {(case.source, case.architecture): case for case in cases}
    return [tuple(by_source[item] for item in unit) for unit in units_of(list(by_source), 1, most)]


def compile_unit(unit: Sequence[TemplateCase], compiler: Compile) -> Iterator[TemplateResult]:
    """What comes of each case of ``unit``."""
    try:
        done = compiler("".join(case.source for case in unit), unit[0].architecture, len(unit))
    except CompileError as error:
        if len(unit) == 1:
            yield TemplateResult(key=unit[0].key, compiled=False, problem=str(error))
            return
        yield from _halves(unit, compiler)
        return
    if len(unit) > 1 and any(use.spills for use in _without_name(done.uses, unit)):
        yield from _halves(unit, compiler)
        return
    for case in unit:
        yield _result(case, done, len(unit))


def _halves(unit: Sequence[TemplateCase], compiler: Compile) -> Iterator[TemplateResult]:
    middle = len(unit) // 2
    yield from compile_unit(unit[:middle], compiler)
    yield from compile_unit(unit[middle:], compiler)


def _result(case: TemplateCase, done: CompiledCuda, together: int) -> TemplateResult:
    own = [use for use in done.uses if any(symbol in use.name for symbol in case.symbols)]
    own = own or (list(done.uses) if together == 1 else [])
    return TemplateResult(
        key=case.key,
        compiled=True,
        registers=max((use.register_count for use in own), default=None),
        spill_bytes=sum(use.spill_store_bytes + use.spill_load_bytes for use in own),
        together=together,
        seconds=done.seconds / together,
    )


def _without_name(uses: Sequence[KernelUse], unit: Sequence[TemplateCase]) -> list[KernelUse]:
    """Kernels of which no case's name is a part."""
    return [use for use in uses if not any(symbol in use.name for case in unit for symbol in case.symbols)]
