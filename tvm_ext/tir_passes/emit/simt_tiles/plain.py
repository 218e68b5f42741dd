"""Data tiles in shared memory exactly as the paper stores them (§3.1): rows of memory, padded as the rProgram says.

For the ablations alone. `simt_tiles.banks.choose_storage`, which every build uses, transposes, sorts by phase and
searches padding: it repairs what the bank rule would have, so that the rule's effect would not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .banks import StoredBox, stores_vectors
from .box import Box
from .copy_shape import CopyShape
from .tiling import SimtTiling


def plain_storage(
    box: Box, tiling: SimtTiling, vector: tuple[int | None, int], copies: Sequence[CopyShape], padding: int
) -> tuple[StoredBox, CopyShape]:
    """``box`` in the order of its tensor, rows ``padding`` elements longer, copied line by line.

    Copies are vectors where padded rows stay aligned to them, else element by element, neighbouring lanes side by side.
    ``vector`` is (axis, elements) that are read at once, where rows stay aligned to so many. Worked example, Figure
    5(b): a tile [3, 4] with padding 1 has rows 5 elements apart.
    """
    shape = box.shape(tiling.tile)
    strides, pitch = [1] * len(shape), 1
    for position, d in enumerate(reversed(range(len(shape)))):
        strides[d] = pitch
        pitch *= shape[d]
        if position == 0 and len(shape) > 1:
            pitch += padding
    aligned = all(stride % vector[1] == 0 for stride in strides[:-1])
    stored = StoredBox(
        box=box,
        order=tuple(range(len(shape))),
        strides=tuple(strides),
        phases=(1,) * len(shape),
        phase_strides=(0,) * len(shape),
        elements=pitch,
        vector_axis=vector[0] if aligned else None,
        width=vector[1] if aligned else 1,
    )
    line = _in_order(copies[0])
    return stored, line if stores_vectors(stored, line) else _by_elements(line)


def row_axis(box: Box, axis: int | None) -> int | None:
    """``axis`` if rows of the tensor run along it, so that vectors along it need no transposition; else None."""
    along = {p for p, _ in box.dims[-1].terms} if box.dims else set()
    return axis if axis in along else None


def _in_order(shape: CopyShape) -> CopyShape:
    """``shape`` with columns copied in their order, not sorted by the phase of a strided window."""
    if shape.phase == 1:
        return shape
    return replace(shape, phase=1, patch=shape.run_units, row_units=shape.run_units)


def _by_elements(shape: CopyShape) -> CopyShape:
    elements = shape.run_units * shape.width
    return replace(shape, width=1, patch=elements, row_units=elements)
