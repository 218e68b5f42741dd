"""How the planes of a window operator lie in a task's scratch memory, and the register tile (paper §3.1).

What a layout takes, and which there are, `window_time.py` says.

The source is copied once per band of output rows into scratch memory that L1 holds, padding included. With a stride s,
position ``s * q + p`` of a row goes to place q of *phase* p, and likewise for rows, so that neighbouring outputs read
neighbouring elements whatever the stride. Rows lie ``pitch`` apart and share their padding: the right padding of a row
is the left padding of the next one.

Worked example, 3x3 with stride 1 over rows of 11 padded by 1: pitch 12, row 0 at places 1 ... 11, zeros at 0, 12, ...
As the window of output place q = 12 * y + x reads places q + 12 * ry + rx, a vector may run over the end of a row: its
lanes for x = 11 are thrown away, and 11 of 12 lanes are used, where vectors that stop at the row's end use 11 of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm_ext.analysis.window import Window, WindowAxis
from tvm_ext.support.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowLayout:
    """Scratch geometry in elements, and the register tile ``rows`` x ``vectors`` of ``width`` lanes.

    Rows are stored in vectors of ``stored`` lanes that end with the row. A tile covers ``rows`` neighbouring output
    rows by vectors as wide, or where the rows are narrow by one wider vector each; if it ``overruns``, each of its rows
    but the last is stored as that one vector, whose end the next row overwrites. ``is_flat``: vectors run along all
    places of the band (``rows`` is 1) into a second scratch memory, from which the rows are copied.
    """

    window: Window
    band: int  # output rows per task; the last band of a plane may have fewer
    pitch: int
    phase_rows: int  # rows of one phase for a whole band
    phase_size: int  # elements of one phase, with what vectors may run over
    result_size: int  # elements of the second scratch memory; 0 without one
    width: int
    stored: int
    rows: int
    vectors: int
    is_flat: bool
    overruns: bool
    lanes: int
    cycles: float  # expected for all planes on one core

    @property
    def bands(self) -> int:
        return ceil_div(self.window.y.extent, self.band)

    @property
    def task_count(self) -> int:
        return self.bands * planes_of(self.window)

    def describe(self) -> str:
        """Worked example: "conv over pad in register tiles of 4 rows x 2 vectors of 16, bands of 42 rows"."""
        name = self.window.anchor.name + (f" over {self.window.pad.name}" if self.window.pad is not None else "")
        tile = f"{self.vectors} vectors of {self.width}"
        tile = f"{tile} along rows without gaps" if self.is_flat else f"{self.rows} rows x {tile}"
        return f"{name} in register tiles of {tile}, bands of {self.band} rows"

    def used_columns(self) -> int:
        """Source elements of a row that any window reads."""
        return min(self.window.x.size, self.window.x.span - self.window.x.before)

    def column(self, phase: int, first: int) -> tuple[int, int]:
        """(offset k, place): element ``first + k`` of a source row is the first of ``phase`` from ``first`` on.

        Worked example: stride 2, one column of padding: element 0 is position 1, so phase 0 starts at element 1, which
        is position 2, place 1.
        """
        x = self.window.x
        k = (phase - x.before - first) % x.stride
        return k, (x.before + first + k) // x.stride

    def tap(self, axis: WindowAxis, number: int) -> tuple[int, int]:
        """(slot of the phase, place) of a tap relative to the first place of the window."""
        position = axis.dilation * number
        return axis.phases.index(position % axis.stride), position // axis.stride


def planes_of(window: Window) -> int:
    return prod(window.anchor.extent(variable) for variable in window.outer)


def pitch_of(x: WindowAxis) -> int:
    """Places per row and phase: each row's own elements, and padding on one side only (see the module's example)."""
    used = min(x.size, x.span - x.before)
    return ceil_div(max(x.before + used, x.span - x.before), x.stride)


def last_place(axis: WindowAxis) -> int:
    return max(axis.dilation * tap // axis.stride for tap in range(axis.taps))
