"""Warp shuffles over lane arrays (..., 32), as ``__shfl_sync`` and its kin exchange registers.

Source: PTX ISA "shfl.sync" (the pseudo-code there) and the CUDA guide's "Warp Shuffle Functions".
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from tvm_ext.devices.gpu import WARP
from tvm_ext.errors import InputError
from tvm_ext.support.arrays import Array

from .fragments import LANES

ShuffleKind = Literal["idx", "up", "down", "xor"]


def source_lanes(kind: ShuffleKind, operand: npt.ArrayLike, width: int) -> Array:
    """The lane that each lane reads, (..., 32); its own where the source would be outside of its segment.

    Segments are ``width`` lanes. "idx" wraps the operand into the segment; "up" and "down" count from the own lane;
    "xor" may reach an earlier segment, but not a later one. Worked example, "down" by 4 in segments of 8: lane 2 reads
    lane 6, which reads itself.
    """
    if width not in (1, 2, 4, 8, 16, 32):
        raise InputError(f"a warp shuffle over {width} lanes does not exist", "use a power of two up to 32")
    value = np.asarray(operand).astype(np.int64) & (WARP - 1)
    value = np.broadcast_to(value, np.broadcast_shapes(value.shape, (WARP,)))
    first = LANES & ~(width - 1)
    last = first + width - 1
    if kind == "idx":
        return first + value % width
    source = LANES - value if kind == "up" else LANES + value if kind == "down" else LANES ^ value
    inside = source >= first if kind == "up" else source <= last
    return np.where(inside, source, LANES)


def shuffle(
    kind: ShuffleKind, values: Array, operand: npt.ArrayLike, width: int, *, active: Array, mask: npt.ArrayLike
) -> tuple[Array, Array]:
    """The values that the lanes receive, and where they are defined: both (..., 32).

    ``active`` says which lanes execute the instruction, ``mask`` (one uint32 for each lane) which are told to. A value
    is undefined, and to be treated as poison, where the source lane does not take part, or the lane itself is not in
    its mask.
    """
    source = np.broadcast_to(source_lanes(kind, operand, width), values.shape)
    members = np.broadcast_to(np.asarray(mask).astype(np.int64), values.shape)
    named = (members >> source) & (members >> LANES) & 1
    valid = active & (named == 1) & np.take_along_axis(active, source, axis=-1)
    return np.take_along_axis(values, source, axis=-1), valid


def absent(active: Array, mask: npt.ArrayLike) -> Array:
    """(..., 32): lanes that an active lane's mask names but that do not execute the instruction: undefined."""
    members = np.broadcast_to(np.asarray(mask).astype(np.int64), active.shape)
    union = np.bitwise_or.reduce(np.where(active, members, 0), axis=-1)[..., None]
    return np.asarray((union >> LANES) & 1 == 1) & ~active


def active_mask(active: Array) -> Array:
    """``__activemask()``: uint32 with the bit of each active lane, the same for all lanes; (..., 32)."""
    bits = (active.astype(np.int64) << LANES).sum(axis=-1, keepdims=True)
    return np.broadcast_to(bits, active.shape).astype(np.uint32)
