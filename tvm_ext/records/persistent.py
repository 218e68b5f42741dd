"""Which operators became one persistent kernel (Bolt, §3.1), which did not, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PERSISTENT = "tvm_ext.persistent"
"""Module attribute: what was considered, a `PersistentRecord` as JSON."""

CHAIN = "tvm_ext.chain"
"""PrimFunc attribute of a chain: its `ChainVerdict` as JSON."""

RegionKind = Literal["chain", "attention"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelPlan:
    """How the result of a chain is divided into panels: ``sizes`` in elements along ``axes`` of it, outermost first."""

    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.axes and len(self.axes) == len(self.sizes)
        assert min(self.sizes) >= 1

    @property
    def by_axis(self) -> dict[int, int]:
        return dict(zip(self.axes, self.sizes, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainVerdict:
    """What the model says of a chain: its best panels, its time as one kernel and apart, and whether that pays.

    GPUs have no panels: a threadblock's rows are chosen with the kernel's tiles. A CPU's chain without ``plan`` gains
    in none, and ``fused_us`` is the least that it could take.
    """

    plan: PanelPlan | None
    fused_us: float
    separate_us: float
    saved_bytes: float
    pays: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistentRegion:
    """Operators that were considered for one kernel, first to last, by the names that they have without it.

    ``reason`` says why they were fused or were not; ``kernel`` names the function that they became, "" where refused.
    The times are the model's, None where something else decides; ``saved_bytes`` is traffic
    with the memory layers beyond the one in which the intermediate values stay.
    """

    kind: RegionKind
    operators: tuple[str, ...]
    fused: bool
    reason: str
    kernel: str = ""
    saved_bytes: float = 0.0
    fused_us: float | None = None
    separate_us: float | None = None

    def __post_init__(self) -> None:
        assert self.reason and len(self.operators) >= 2
        assert self.fused == bool(self.kernel)

    def __str__(self) -> str:
        apart = "" if self.separate_us is None else f", apart {self.separate_us:.0f} us"
        times = "" if self.fused_us is None else f" ({self.fused_us:.0f} us{apart})"
        names = " + ".join(self.operators)
        return f"{names}: {f'one kernel, {self.kernel}' if self.fused else 'apart'}: {self.reason}{times}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistentRecord:
    """All regions of a module that were considered, in the order of its operators."""

    regions: tuple[PersistentRegion, ...]

    @property
    def fused(self) -> tuple[PersistentRegion, ...]:
        return tuple(region for region in self.regions if region.fused)

    def __str__(self) -> str:
        return "\n".join(map(str, self.regions))
