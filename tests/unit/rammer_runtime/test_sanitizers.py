"""The native runtime's core under sanitizers (``tests/native/stress.cc``), and mutants of it that must not pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import native_stress

pytestmark = pytest.mark.skipif(not native_stress.can_build(), reason="there is no CMake")


@pytest.mark.slow  # builds the program anew; orders of memory: test_wait_protocol.py
def test_threads_do_not_race() -> None:
    result = native_stress.run(native_stress.build("thread"), "thread", 0.2, 0)
    assert result.returncode == 0, result.stderr
    assert "walk:" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize("definitions", [[], ["RAMMER_IMPATIENT"]], ids=["as it is", "every wait sleeps"])
def test_nothing_is_found_in_a_long_run(sanitizer: str, definitions: list[str], tmp_path: Path) -> None:
    program = native_stress.build(sanitizer, definitions, tmp_path)
    for seed in range(3):
        result = native_stress.run(program, sanitizer, 3, seed)
        assert result.returncode == 0, result.stderr


MUTANTS = {
    "RAMMER_PUBLISH=std::memory_order_relaxed": ("thread", "data race"),
    "RAMMER_OBSERVE=std::memory_order_relaxed": ("thread", "data race"),
    "RAMMER_EPOCH_ERROR=1": ("", "a run ended otherwise"),
    "RAMMER_EPOCH_ERROR=-1": ("", "a wrong result"),
    "RAMMER_LOOKS_AGAIN=false": ("", "a run ended otherwise"),
}
"""Definition: the sanitizer, and what the program says."""

HANGS = "RAMMER_STRESS_LIMIT_NS=2000000000"
"""A hang ends in an error after 2 s without progress. Others keep the program's own limit: a busy machine may stop a
thread for as long, which would end the run before what is wrong with it is seen."""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str, tmp_path: Path) -> None:
    sanitizer, problem = MUTANTS[mutant]
    definitions = [mutant, "RAMMER_IMPATIENT", *([HANGS] if problem == "a run ended otherwise" else [])]
    program = native_stress.build(sanitizer, definitions, tmp_path)
    result = native_stress.run(program, sanitizer, 20, 0, "walk")
    assert result.returncode != 0, result.stdout
    assert problem in result.stderr, result.stderr
