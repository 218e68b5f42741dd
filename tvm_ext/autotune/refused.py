"""What of a file was not taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedRecord:
    """A record that is no measurement: where it stands, and why it was left out."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"
