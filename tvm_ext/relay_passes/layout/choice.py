"""Decides which operators of a dataflow block work in the channel-blocked layout: where what they gain pays transforms.

Everything is counted in elements moved by a transform, the one cost of being blocked. On one core of an AMD EPYC
(Zen 5, AVX-512, 250 GFLOP/s) a transform takes 0.31 ns an element (123 us for (512, 28, 28)), so that 1 element is
78 FLOP of a good convolution.

The choice is a labelling of a graph: an operator is blocked or not; each value between operators that disagree costs
one transform. Each section between convolutions starts blocked; operators are turned back, one at a time, as long as
that costs nothing, and all of them where the rest does not gain. Worked example: input (64, 56, 56), ReLU, 3x3 pooling
of stride 1, ReLU, output. All blocked: 2 transforms of 200704 elements. Either ReLU turned back costs nothing, for its
transform moves to the pooling; the pooling turned back then saves both, which is more than it gained by its blocks.
The gains were measured against the NCHW kernels, the fastest of many alternating runs each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from tvm_ext.records.padding import LayoutChain

from .blocked import ConvWindow, shape_of
from .graph import Operator, elements

if TYPE_CHECKING:
    from tvm_ext._tvm import Var

FLOPS_PER_ELEMENT = 78
"""FLOP of a convolution at full speed in the time of one element's transform (see the module)."""

WINDOW_GAIN, PRODUCT_GAIN = 0.05, 0.01
"""Share of its time that a dense convolution gains: with a window or stride; as a plain product (1x1)."""

DEPTHWISE_GAIN, NARROW_DEPTHWISE_GAIN, STRIDED_DEPTHWISE_GAIN = 0.1, 1.0, 1.4
"""Elements gained per output element by a depthwise convolution of step 1, in rows of less than `NARROW_BLOCKS`
registers, and of another step. Measured on a Zen 3 (AVX2): 0 for 56 x 56, where the convolutions around it gain, 0.3
for 28 x 28, 1.0 to 2.1 for 14 x 14 and 7 x 7, 1.4 to 1.6 for step 2.
"""

NARROW_PRODUCTS_GAIN = {"uint8": 1.0, "bfloat16": 0.5}
"""Share of its float32 time that a convolution of such data gains, whose instructions need channels beside each other.
"""

NARROW_BLOCKS = 2
"""Of the same measurement."""

POOL_GAIN = 0.5
"""The same for a pooling: 0.5 to 1.6 on that Zen 3."""

DEPTH_GAIN = 0.4
"""The same for slices joined for a convolution: one of (8, 96, 56, 56) to 64 channels took 24 ms from NCHW on a Zen 3,
where blocks let Winograd's form take it; the transform before that is of a third of the elements. A choice below that.
"""

WEAVE_GAIN = 1.0
"""The same for phases of a transposed convolution: (16, 224, 224) of 2 x 2 phases, from NCHW to blocks, took 1360 us on
a Zen 4, from blocks 330.
"""


def gain(operator: Operator) -> float:
    """What the operator itself gains by working blocked, in elements of a transform."""
    points = float(prod(operator.shape))
    narrow = NARROW_PRODUCTS_GAIN.get(str(operator.data[0].ty.dtype), 0.0) if operator.data else 0.0
    if operator.role == "convolution":
        _, depth, *taps = shape_of(operator.call.args[1])
        flops = 2.0 * points * depth * prod(taps)
        if narrow:
            return narrow * flops / FLOPS_PER_ELEMENT
        plain = tuple(taps) == (1, 1) and ConvWindow.of(operator.call.attrs).moves_by_one
        return (PRODUCT_GAIN if plain else WINDOW_GAIN) * flops / FLOPS_PER_ELEMENT
    if operator.role == "depthwise":
        if narrow or not ConvWindow.of(operator.call.attrs).moves_by_one:
            return points * STRIDED_DEPTHWISE_GAIN
        is_narrow = operator.shape[3] < NARROW_BLOCKS * operator.block
        return points * (NARROW_DEPTHWISE_GAIN if is_narrow else DEPTHWISE_GAIN)
    return points * {"pool": POOL_GAIN, "depth": DEPTH_GAIN, "weave": WEAVE_GAIN}.get(operator.role, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayoutChoice:
    """``blocked`` are the operators to write in the blocked layout, ``chains`` what is said about all of them."""

    blocked: frozenset[Var]  # their variables
    chains: tuple[LayoutChain, ...]


def choose_layouts(operators: Sequence[Operator], plain_uses: set[Var], *, always: bool = False) -> LayoutChoice:
    """Which ``operators`` to block; ``plain_uses`` are the variables that something else reads as NCHW.

    With ``always``, all of each operator that has a blocked form; otherwise where it pays.
    """
    graph = _Graph(operators, plain_uses)
    blocked: set[Var] = set()
    for section in graph.sections():
        wanted = {o.variable for o in section if o.may_be_blocked}
        kept = wanted if always else graph.improved(section, wanted)
        if always or graph.benefit(section, kept) > 0:
            blocked |= kept
    chains = tuple(_record(graph, chain, blocked) for chain in graph.chains())
    return LayoutChoice(blocked=frozenset(blocked), chains=chains)


def _record(graph: _Graph, chain: Sequence[Operator], blocked: set[Var]) -> LayoutChain:
    count = sum(o.variable in blocked for o in chain)
    saved = graph.benefit(chain, blocked) if count else 0.0
    if count:
        reason = f"saves the time of moving {saved:.0f} elements"
    elif any(o.may_be_blocked for o in chain):
        reason = "the transforms would cost more than the operators gain"
    else:
        reason = "no result has whole blocks of channels"
    return LayoutChain(
        operators=tuple(o.name for o in chain),
        blocked_count=count,
        transform_count=len(graph.transforms(chain, blocked)),
        saved_elements=saved,
        reason=reason,
    )


class _Graph:
    """The operators of a block with who reads what."""

    def __init__(self, operators: Sequence[Operator], plain_uses: set[Var]) -> None:
        self.operators = operators
        self.plain_uses = plain_uses
        self.producer = {o.variable: o for o in operators}
        self.readers: dict[Var, list[Operator]] = {}
        for o in operators:
            for value in dict.fromkeys(o.data):
                self.readers.setdefault(value, []).append(o)

    def chains(self) -> list[list[Operator]]:
        """Operators connected by values, in program order; reading a value in common connects as well."""
        return self._connected(lambda o: (*o.data, o.variable))

    def sections(self) -> list[list[Operator]]:
        """The parts of chains that can be decided on their own: a convolution takes its data in either layout."""
        return self._connected(lambda o: (o.variable,) if o.is_free else (*o.data, o.variable))

    def _connected(self, values: Callable[[Operator], Iterable[Var]]) -> list[list[Operator]]:
        group_of: dict[Var, int] = {}
        members: dict[int, list[Operator]] = {}
        for number, o in enumerate(self.operators):
            merged = [o]
            for other in {group_of[v] for v in values(o) if v in group_of}:
                merged += members.pop(other)
            members[number] = merged
            group_of.update((v, number) for member in merged for v in values(member))
        order = {o.variable: i for i, o in enumerate(self.operators)}
        return [sorted(group, key=lambda o: order[o.variable]) for group in members.values()]

    def values(self, chain: Iterable[Operator]) -> list[Var]:
        return list(dict.fromkeys(value for o in chain for value in (*o.data, o.variable)))

    def transforms(self, chain: Iterable[Operator], blocked: set[Var]) -> list[Var]:
        """The values that are needed in both layouts and have more than one element per channel."""
        return [value for value in self.values(chain) if elements(value) and self._differs(value, blocked)]

    def _differs(self, value: Var, blocked: set[Var]) -> bool:
        tied = [o.variable in blocked for o in self.readers.get(value, ()) if not o.is_free]
        if value in blocked:
            return value in self.plain_uses or not all(tied)
        return any(tied)

    def benefit(self, chain: Sequence[Operator], blocked: set[Var]) -> float:
        """Elements saved against NCHW throughout."""
        gained = sum(gain(o) for o in chain if o.variable in blocked)
        return gained - sum(elements(value) for value in self.transforms(chain, blocked))

    def improved(self, section: Sequence[Operator], blocked: set[Var]) -> set[Var]:
        """``blocked`` without the operators that are as well off, or better, in NCHW."""
        kept = set(blocked)
        queue = [o for o in section if o.variable in kept]
        while queue:
            o = queue.pop(0)
            if o.variable in kept and self._without(o, kept) >= 0:
                kept.discard(o.variable)
                neighbours = [self.producer[v] for v in o.data if v in self.producer]
                neighbours += [r for v in (*o.data, o.variable) for r in self.readers.get(v, ())]
                queue += [n for n in neighbours if n.variable in kept and n not in queue]
        return kept

    def _without(self, operator: Operator, blocked: set[Var]) -> float:
        """Elements saved by turning one operator back to NCHW; only the values that it touches change."""
        touched = [value for value in (*dict.fromkeys(operator.data), operator.variable) if elements(value)]
        rest = blocked - {operator.variable}
        before = sum(elements(value) for value in touched if self._differs(value, blocked))
        after = sum(elements(value) for value in touched if self._differs(value, rest))
        return before - after - gain(operator)
