"""One hostile model, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HostileCase:
    """The bytes of a file; ``kind`` is the family that it belongs to, ``name`` says what is wrong with it."""

    kind: str
    name: str
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HostileResult:
    """What came of a case.

    ``outcome``: "ran", "built" (its tensors are too large to run here), "refused" (by an error of ours), or one of the
    failures "raised" (somebody else's exception), "crashed" and "timed out". ``problem`` is the error in words.
    """

    kind: str
    name: str
    outcome: str
    problem: str
    seconds: float
    peak_mib: int = 0

    @property
    def failed(self) -> bool:
        return self.outcome not in ("ran", "built", "refused")


def counts(results: Iterable[HostileResult]) -> dict[str, dict[str, int]]:
    """Kind to outcome to how many."""
    found: dict[str, Counter[str]] = {}
    for result in results:
        found.setdefault(result.kind, Counter())[result.outcome] += 1
    return {kind: dict(sorted(outcomes.items())) for kind, outcomes in sorted(found.items())}
