"""The tables of all families, joined: what the import knows of an operator beyond the stock importer."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .context import Check, Converter, Rule

_FAMILIES: tuple[ModuleType, ...] = tuple(
    importlib.import_module(f".{name}", __package__)
    for name in [
        "arrangement",
        "attention",
        "convolution",
        "deformable",
        "detection",
        "elementwise",
        "indexing",
        "integers",
        "linear_algebra",
        "logarithms",
        "pools",
        "normalization",
        "number_types",
        "quantized",
        "recurrent",
        "reduction",
        "resize",
        "scans",
        "sequences",
        "signal",
    ]
)
"""The modules beside this one that have tables."""


def _joined(table: str) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for family in _FAMILIES:
        entries = getattr(family, table, {})
        assert not joined.keys() & entries.keys(), f"two families have {table} of {joined.keys() & entries.keys()}"
        joined.update(entries)
    return joined


CHECKS: Mapping[str, Check] = _joined("CHECKS")
RULES: Mapping[str, Rule] = _joined("RULES")
CONVERTERS: Mapping[str, Converter] = _joined("CONVERTERS")
REPLACED: frozenset[str] = frozenset().union(*(getattr(family, "REPLACED", ()) for family in _FAMILIES))
