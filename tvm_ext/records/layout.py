"""What was decided about the layouts of a module's operators."""

from __future__ import annotations

from dataclasses import dataclass

LAYOUT = "tvm_ext.layout"
"""Module attribute: what was decided about layouts, a `LayoutRecord` as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChain:
    """Connected operators for which channel-blocked layouts were considered together, and what was decided.

    ``saved_elements`` is the estimated gain, in the time of moving so many elements once.
    """

    operators: tuple[str, ...]
    blocked_count: int
    transform_count: int
    saved_elements: float
    reason: str


CHANNELS_LAST = 0
"""`LayoutRecord.block` of the layout NHWC, whose channels are last and in no blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRecord:
    """All chains of a module, in blocks of ``block`` channels."""

    block: int
    chains: tuple[LayoutChain, ...]

    @property
    def blocked_count(self) -> int:
        return sum(chain.blocked_count for chain in self.chains)

    @property
    def transform_count(self) -> int:
        return sum(chain.transform_count for chain in self.chains)
