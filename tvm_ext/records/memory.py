"""What a contender was measured to take in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Resident bytes over those before the file was loaded: at most while loading, at most while running, and after."""

    load_peak_bytes: int
    run_peak_bytes: int
    resident_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.load_peak_bytes, self.run_peak_bytes)
