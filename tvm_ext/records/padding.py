"""Which products of a graph have padded operands, what that is predicted to gain, and why the others have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PADDING = "tvm_ext.padding"
"""Module attribute: a `PaddingRecord` as JSON."""

PaddingSource = Literal["none", "producer", "folded", "kernel"]
"""Who writes the padding of a product's input: nobody, the product before it (and what is between, element by
element), the kernel before it, which writes more, or a kernel of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductPadding:
    """One product with an extent that copies of 16 bytes do not divide. Extents are (in the graph, in the kernel).

    Times are predicted, in microseconds: the product as it was, the product in aligned copies, and what makes the
    padding (0 where the producer writes it).
    """

    value: str  # the graph's name of the result
    operator: str
    described: str  # shapes and types of its operands
    depth: tuple[int, int]  # channels, or K
    columns: tuple[int, int]  # filters, or N
    source: PaddingSource
    plain_us: float
    padded_us: float
    padding_us: float
    padded: bool
    reason: str

    @property
    def speed_up(self) -> float:
        """Predicted: as it was, over padded with what makes the padding."""
        return self.plain_us / (self.padded_us + self.padding_us)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingRecord:
    """All such products of a module, in the order of its functions and bindings."""

    device: str
    alignment_bytes: int
    products: tuple[ProductPadding, ...]


# --- What was decided about the layouts of a module's operators -------------------------------------------------------
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
