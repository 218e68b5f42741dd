"""Tiles that were chosen from outside, by measurements say, in place of construction's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from tvm_ext.errors import IllegalRewrite

TileChoices: TypeAlias = Mapping[str, str]
"""Configurations of `CpuTile`s, `GpuTile`s, `WindowTile`s, `AttentionTiles`, `PanelTiles`, `RowTiles` by their key."""

FailedTiles: TypeAlias = "frozenset[tuple[str, str]]"
"""(key of a workload, configuration) of kernels that were measured not to run, or to be wrong."""

NO_CHOICES: TileChoices = {}

CHOSEN, LEFT_OUT = "tile chosen by measurement: ", "a chosen tile is left out: "
"""How a kernel's notes say it."""


def refuse_left_out(notes: Iterable[str]) -> None:
    """Raise IllegalRewrite where one of ``notes`` says that a chosen tile is left out."""
    refused = next((note for note in notes if note.startswith(LEFT_OUT)), None)
    if refused is not None:
        raise IllegalRewrite(refused)
