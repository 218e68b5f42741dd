"""Whether a 3x3 convolution on a CPU goes in Winograd's form, and in which tiles.

Its kernel asks, and so does a chain, which is compared with kernels apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext.analysis.predicates import is_in
from tvm_ext.analysis.winograd import Convolution, find_convolution
from tvm_ext.cost.winograd_time import WinogradClock
from tvm_ext.ir.build_ir import lanes_of
from tvm_ext.records.tuning import WinogradTile

from .anchors import canonical_anchor, packable_constants
from .context import KernelContext
from .plan_kernels import TileGroup

OUTPUTS = {"auto": (2,), "fast": (2, 4)}
"""Outputs of a tile along an axis, by the option ``winograd``: F(4x4) errs more (docs/numerics.md)."""

GAIN = 1.15
"""How many times faster than direct sums by the model. A choice: on a Zen 4 the model is 1.1 to 1.25 times too slow
for direct sums, and within 1.1 for this form."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WinogradForm:
    """``conv`` in the tiles of ``ranked``, each with the model's seconds on all cores, the fastest first."""

    conv: Convolution
    clock: WinogradClock
    ranked: tuple[tuple[WinogradTile, float], ...]

    @property
    def time_s(self) -> float:
        return self.ranked[0][1]

    def pays(self, direct_s: float) -> bool:
        """Whether the model expects `GAIN` over direct sums of ``direct_s`` seconds."""
        return self.time_s * GAIN < direct_s


def winograd_form(group: TileGroup, context: KernelContext) -> WinogradForm | None:
    """None where the option ``winograd`` forbids it, and for all but a blocked 3x3 of step 1 with constant weights."""
    if context.options.winograd == "off":
        return None
    conv = find_convolution(group.anchor)
    if conv is None and group.anchor.combiner == "sum":  # groups are an axis of the canonical form alone
        conv = find_convolution(canonical_anchor(group, context.operator, context.constants, context.device)[0])
    lanes = lanes_of("float32", context.device.register_bytes)
    if conv is None or conv.extents(conv.filters[1], conv.channels[1]) != [lanes, lanes]:
        return None
    if not is_in(conv.weights.source, packable_constants(context.operator, context.constants)):
        return None
    clock = WinogradClock(conv, context.device)
    timed = [(tile, clock.seconds(tile)) for count in OUTPUTS[context.options.winograd] for tile in clock.tiles(count)]
    return WinogradForm(conv=conv, clock=clock, ranked=tuple(sorted(timed, key=lambda item: item[1])))
