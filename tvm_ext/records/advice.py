"""What would make a model faster on a GPU if it were changed: channels, activations, depth (Bolt §3.3).

Every time is predicted, in microseconds of one run, all ``calls`` together.
"""

from __future__ import annotations

from dataclasses import dataclass

from .partition import CutlassRefusal


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentAdvice:
    """A product whose channels (K) or filters (N) copies of 16 bytes do not divide.

    Extents are (as they are, divisible). ``now_us`` is as a build would have it, with padding where that pays;
    ``aligned_us`` with the divisible extents in the model itself.
    """

    operator: str
    described: str  # shapes and types of the operands
    calls: int
    depth: tuple[int, int]
    columns: tuple[int, int]
    now_us: float
    aligned_us: float
    handled: str  # what a build does about it

    @property
    def gain_us(self) -> float:
        """What changing the model would save; never negative: more channels can cost more than they save."""
        return max(0.0, self.now_us - self.aligned_us)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationAdvice:
    """A function behind products, and what others would cost in its place.

    ``fused``: it is in the products' epilogue; otherwise it is a kernel of its own, because of ``reason``.
    """

    function: str
    calls: int
    fused: bool
    now_us: float
    alternatives: tuple[tuple[str, float], ...]  # names and predicted times in the epilogue, cheapest last
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepeningAdvice:
    """A 3x3 convolution, and a 1x1 convolution of as many filters behind it: in its kernel, or in one of its own."""

    described: str
    calls: int
    alone_us: float
    fused_us: float
    apart_us: float
    residence: str  # where the values between stay: registers, or shared memory

    @property
    def added_share(self) -> float:
        """What the 1x1 convolution adds in one kernel, as a share of the 3x3 convolution's time."""
        return (self.fused_us - self.alone_us) / self.alone_us


@dataclass(frozen=True, kw_only=True, slots=True)
class CombinedAdvice:
    """Changes made together, and the predicted time of the model's products and activations before and after.

    Deeper models and smoother activations take time, and may be more accurate for it (Bolt's Table 6).
    """

    changes: tuple[str, ...]
    now_us: float
    then_us: float

    @property
    def speed(self) -> float:
        """Of the changed model, as a share of the speed that it has."""
        return self.now_us / self.then_us


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAdvice:
    """All advice about one model on one device, the largest gains first.

    ``products_us`` is the predicted time of all products on matrix units, each a kernel of its own, ``epilogues_us`` of
    the arithmetic in their epilogues. ``chains`` are convolutions that take less time in one persistent kernel with the
    1x1 convolution behind them, by ``chains_saved_us`` together. ``not_deepened`` says why of the others.
    ``combinations`` are all changes that the model leaves to be made, alone and together, the fastest result first.
    """

    device: str
    products: int
    products_us: float
    epilogues_us: float
    chains: int
    chains_saved_us: float
    alignment: tuple[AlignmentAdvice, ...]
    activations: tuple[ActivationAdvice, ...]
    deepening: tuple[DeepeningAdvice, ...]
    not_deepened: tuple[str, ...]
    combinations: tuple[CombinedAdvice, ...]
    refused: tuple[CutlassRefusal, ...]
