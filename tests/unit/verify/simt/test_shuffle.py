"""Shuffles against a lane-by-lane transcription of the pseudo-code in the PTX ISA, "shfl.sync"."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_ext.errors import InputError
from tvm_ext.verify.simt.warp_calls import ShuffleKind, absent, active_mask, shuffle, source_lanes

FULL = 0xFFFFFFFF
KINDS: tuple[ShuffleKind, ...] = ("idx", "up", "down", "xor")


def _isa_source(kind: str, lane: int, b: int, width: int) -> int:
    """The ISA's pseudo-code, for the ``c`` that CUDA's intrinsics pass: ((32 - width) << 8) | (0 for up, else 31)."""
    c = ((32 - width) << 8) | (0 if kind == "up" else 31)
    bval, cval, segmask = b & 31, c & 31, (c >> 8) & 31
    max_lane = (lane & segmask) | (cval & ~segmask & 31)
    min_lane = lane & segmask
    if kind == "up":
        j = lane - bval
        inside = j >= max_lane
    elif kind == "down":
        j = lane + bval
        inside = j <= max_lane
    elif kind == "xor":
        j = lane ^ bval
        inside = j <= max_lane
    else:
        j = min_lane | (bval & ~segmask & 31)
        inside = j <= max_lane
    return j if inside else lane


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_sources_are_those_of_the_isa(kind: ShuffleKind, width: int) -> None:
    for operand in range(40):
        expected = [_isa_source(kind, lane, operand, width) for lane in range(32)]
        assert source_lanes(kind, operand, width).tolist() == expected, operand


@given(st.lists(st.integers(0, 31), min_size=32, max_size=32), st.sampled_from([4, 8, 32]))
def test_each_lane_may_name_its_own_source(operands: list[int], width: int) -> None:
    for kind in KINDS:
        expected = [_isa_source(kind, lane, operands[lane], width) for lane in range(32)]
        assert source_lanes(kind, operands, width).tolist() == expected


def test_a_width_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(InputError, match="over 12 lanes"):
        source_lanes("up", 1, 12)


def test_shuffle_down_adds_up_a_warp() -> None:
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    active = np.ones((2, 32), bool)
    for offset in (16, 8, 4, 2, 1):
        received, valid = shuffle("down", values, offset, 32, active=active, mask=FULL)
        assert valid.all()
        values = values + received
    assert values[:, 0].tolist() == [sum(range(32)), sum(range(32, 64))]


def test_values_of_inactive_lanes_are_undefined() -> None:
    active = np.ones(32, bool)
    active[5] = False
    received, valid = shuffle("xor", np.arange(32), 1, 32, active=active, mask=FULL)
    assert (~valid).nonzero()[0].tolist() == [4, 5]
    assert received[valid].tolist() == [lane ^ 1 for lane in range(32) if lane not in (4, 5)]


def test_lanes_that_the_mask_leaves_out_are_undefined() -> None:
    active = np.ones(32, bool)
    _, valid = shuffle("down", np.arange(32), 1, 32, active=active, mask=0x0000FFFF)
    assert valid.nonzero()[0].tolist() == list(range(15))


def test_mask_and_activity() -> None:
    active = np.zeros((2, 32), bool)
    active[0, :8] = active[1, 31] = True
    assert active_mask(active)[:, 0].tolist() == [0xFF, 0x80000000]
    assert active_mask(active).dtype == np.uint32
    assert absent(active, 0x1FF)[0].nonzero()[0].tolist() == [8]
    assert absent(active, active_mask(active)).sum() == 0
