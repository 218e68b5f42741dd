"""The text of emitted kernels is what it was: a change to an emitter shows as a difference, in review and here.

``python3 dev.py test tests/golden --update-golden`` writes the files anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.kernels import GoldenKernel, golden_kernels

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("kernel", golden_kernels(), ids=str)
def test_the_emitted_text_is_the_kept_one(kernel: GoldenKernel, golden: Callable[[str, str], None]) -> None:
    golden(kernel.name, kernel.emit())


def test_every_kept_file_is_the_text_of_a_kernel() -> None:
    kept = {path.name for path in FOLDER.iterdir() if path.suffix in (".tir", ".cu", ".cl")}
    assert kept == {kernel.name for kernel in golden_kernels()}
