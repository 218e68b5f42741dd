"""Random legal configurations over all templates go through nvcc: what is proposed compiles."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support.random_templates.draw import DRAWS, TemplateCase, draw_case
from tests.support.random_templates.products import CAPABILITIES, architecture_of
from tests.support.random_templates.units import TemplateResult, compile_unit, unit_cases
from tests.unit.compilers import needs_nvcc
from tvm_ext.errors import CompileError
from tvm_ext.toolchains.cuda_toolchain import CompiledCuda
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm
from tvm_ext.toolchains.ptxas_report import KernelUse

pytest.importorskip("cutlass_library", reason="the extra `cutlass` is not installed")

COUNT, TOGETHER = 200, 10


@functools.cache
def drawn(count: int) -> tuple[TemplateCase, ...]:
    return tuple(draw_case(0, index) for index in range(count))


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", [architecture_of(capability) for capability in CAPABILITIES])
def test_what_is_proposed_compiles(architecture: str) -> None:
    cases = [case for case in drawn(COUNT) if case.architecture == architecture]
    results = [item for unit in unit_cases(cases, TOGETHER) for item in compile_unit(unit, _compile)]
    assert [item for item in results if not item.compiled] == []
    assert len(results) == len(cases)


def _compile(text: str, architecture: str, count: int) -> CompiledCuda:
    return compile_gemm(text, architecture, time_limit_s=200.0 * (count + 1), output="fatbin")


def test_draws_take_turns_and_stay_the_same() -> None:
    cases = drawn(15)
    assert {case.architecture for case in cases} == {architecture_of(capability) for capability in CAPABILITIES}
    assert {case.kind for case in cases} == {"product", "windows", "collective windows", "pair of products"}
    assert draw_case(0, 3).key == cases[3].key != draw_case(1, 3).key
    assert {case.kind for case in cases} <= DRAWS.keys()


def test_units_are_of_one_architecture_and_hold_every_case() -> None:
    units = unit_cases(drawn(15), 2)
    assert {case.index for unit in units for case in unit} == set(range(15))
    assert all(len({case.architecture for case in unit}) == 1 for unit in units)
    assert max(map(len, units)) == 2


def case_of(index: int) -> TemplateCase:
    source = f"namespace kernel{index}_template {{\n}}\n"
    return TemplateCase(index=index, kind="", architecture="sm_80", template="", epilogue="", source=source)


UNIT = [case_of(index) for index in range(6)]


class FakeCompiler:
    """Refuses texts with ``refused``; its kernels are those of ``uses``, by the text that has them."""

    def __init__(self, refused: tuple[str, ...] = (), uses: dict[str, KernelUse] | None = None) -> None:
        self.refused, self.uses, self.asked = refused, uses or {}, 0

    def __call__(self, text: str, architecture: str, count: int) -> CompiledCuda:
        self.asked += 1
        assert text.count("namespace") == count
        if any(name in text for name in self.refused):
            raise CompileError("refused.", "")
        uses = tuple(use for name, use in self.uses.items() if name in text)
        return CompiledCuda(
            image=b"", architectures=(architecture,), uses=uses, compiler="", command="", seconds=float(count)
        )


def use_of(name: str, spilled: int = 0) -> KernelUse:
    return KernelUse(
        name=name, architecture="sm_80", register_count=64, shared_bytes=0, stack_bytes=0, spill_store_bytes=spilled,
        spill_load_bytes=0, barrier_count=0, constant_bytes=0,
    )  # fmt: skip


def test_a_unit_that_is_refused_is_halved_until_one_is_found() -> None:
    compiler = FakeCompiler(refused=("kernel4_",))
    results = {item.key: item for item in compile_unit(UNIT, compiler)}
    assert len(results) == len(UNIT)
    assert [case.index for case in UNIT if not results[case.key].compiled] == [4]
    assert "refused" in results[UNIT[4].key].problem
    assert compiler.asked == 7  # six; three, three; one, two; one, one


def test_registers_are_those_of_the_kernel_with_the_name() -> None:
    uses = {f"kernel{i}_": use_of(f"void Kernel<kernel{i}_template::Tile>", spilled=8 * i) for i in range(6)}
    compiler = FakeCompiler(uses=uses)
    results = list(compile_unit(UNIT, compiler))
    assert compiler.asked == 1
    assert [item.spill_bytes for item in results] == [0, 8, 16, 24, 32, 40]
    assert {item.registers for item in results} == {64}


def test_a_spill_without_a_name_is_looked_for() -> None:
    uses = {f"kernel{i}_": use_of(f"void Kernel<Tile<{i}>>", spilled=16 if i == 2 else 0) for i in range(6)}
    results = {item.key: item for item in compile_unit(UNIT, FakeCompiler(uses=uses))}
    assert [results[case.key].spill_bytes for case in UNIT] == [0, 0, 16, 0, 0, 0]
    assert results[UNIT[5].key].registers is None  # its unit of three spills nothing, and names nothing


def test_what_is_refused_is_tried_again_and_what_compiled_is_not(tmp_path: Path) -> None:
    from tests.support.random_templates.__main__ import _keep, _logged

    log = tmp_path / "log" / "results.jsonl"
    _keep(log, TemplateResult(key="a", compiled=True, registers=7))
    _keep(log, TemplateResult(key="b", compiled=False, problem="static assertion"))
    assert _logged(log) == {"a": TemplateResult(key="a", compiled=True, registers=7)}
    assert _logged(log, again=False).keys() == {"a", "b"}
    assert _logged(None) == {}
