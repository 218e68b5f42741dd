"""Hashes of emitted kernels are what they were. `tests.golden.hashed` writes the texts behind them, for a diff.

``python3 dev.py test tests/golden --update-golden`` writes ``hashes.json`` anew.
"""

from __future__ import annotations

import json

import pytest

from tests.golden.graphs import HashedKernels, renumbered
from tests.golden.hashed import HASHES, all_hashed, digest

ALL = all_hashed()


@pytest.fixture(scope="module")
def kept(request: pytest.FixtureRequest) -> dict[str, str]:
    """The hashes by name; with ``--update-golden``, the ones of now."""
    if request.config.getoption("--update-golden"):
        now = {str(kernels): digest(kernels.emit()) for kernels in ALL}
        HASHES.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    found: dict[str, str] = json.loads(HASHES.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("kernels", ALL, ids=str)
def test_the_emitted_text_has_the_kept_hash(kernels: HashedKernels, kept: dict[str, str]) -> None:
    same = digest(kernels.emit()) == kept.get(str(kernels))
    assert same, "emitted otherwise: see tests/golden/hashed.py for a diff; if it is meant, --update-golden"


def test_each_kept_hash_is_that_of_one_case(kept: dict[str, str]) -> None:
    assert list(kept) == [str(kernels) for kernels in ALL]
    assert len(set(kept.values())) == len(kept), "two cases emit the same kernels: one would do"


def test_offsets_are_numbered_by_their_places() -> None:
    text = "n = TypeVar()\ndef main(a: (4, elem_offset={}), b: (4, elem_offset={})):\n  c = a[{} + i]"
    first, second = "elem_offset", "elem_offset_1"
    assert renumbered(text.format(first, second, first)) == renumbered(text.format(second, first, second))
