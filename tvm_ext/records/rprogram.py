"""rTiles and rPrograms: what Roller constructs, and what its model predicts of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RTile:
    """A tile over the loop axes of a tensor expression (paper §3.1, Figure 3).

    ``shape[i]`` is the tile's size along ``axes[i]`` in elements, which may exceed the axis' extent by padding
    bounded by ε. ``storage_padding`` gives per tensor the elements added to the leading (innermost) dimension of its
    stored data tile so that reads do not conflict on memory banks.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    storage_padding: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.shape), self
        assert all(size >= 1 for size in self.shape), self

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.shape, strict=True))

    def replace(self, axis: str, size: int) -> RTile:
        shape = tuple(size if name == axis else old for name, old in zip(self.axes, self.shape, strict=True))
        return RTile(axes=self.axes, shape=shape, storage_padding=self.storage_padding)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}={s}" for a, s in zip(self.axes, self.shape, strict=True)) + "]"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """One memory layer's share of a predicted time (paper §3.3)."""

    layer: str  # the layer that is loaded from
    footprint_bytes: float  # of the tile held in the layer above
    traffic_bytes: float  # moved over the whole operator
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the micro-performance model says of an rProgram; ``bound`` names the resource that binds."""

    time_s: float
    compute_s: float
    layers: tuple[LayerCost, ...]
    bound: str  # "compute", or the name of a memory layer, or "launch"

    @property
    def busy_s(self) -> float:
        """Time of the busiest resource, without the launch: what there is to divide among units."""
        return max(self.compute_s, *(cost.time_s for cost in self.layers), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RProgram:
    """A hierarchical rTile configuration for one operator on one device (paper §3.2, Figures 6 and 7).

    ``tiles`` lists (layer name, rTile held in that layer) from the highest layer down, without the lowest layer,
    which holds the whole tensors. ``vector_axis`` is the axis whose neighbours sit in one SIMD register (CPU) or in
    neighbouring lanes of a warp (GPU). ``unit_count`` is the number of execution units the program is scaled out to,
    ``epsilon`` the padding bound under which it was found. ``order`` has the spatial axes of a CPU's loops over tiles,
    outermost first; empty: last the one along which most loaded bytes stay put.
    """

    device: str
    expr_digest: str
    tiles: tuple[tuple[str, RTile], ...]
    vector_axis: str | None
    unit_count: int
    partition_count: int
    epsilon: float
    shrunk: bool
    prediction: Prediction
    order: tuple[str, ...] = ()

    def tile(self, layer: str) -> RTile:
        return dict(self.tiles)[layer]

    def work_s(self, least_s: float = 0.0) -> float:
        """The time of all partitions one after another on one unit, a round of them taking ``least_s`` or longer.

        Worked example: 80 partitions on 80 units take 2 us, 160 us of work; 20 larger ones take 4 us, half of that.
        """
        rounds = -(-self.partition_count // self.unit_count)
        return max(self.prediction.busy_s / rounds, least_s) * self.partition_count
