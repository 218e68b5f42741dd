"""The rows of all families: what the import knows of an operator beyond the stock importer."""

from __future__ import annotations

import importlib

from .context import CONTRIBUTED, CONVERTERS, LEARNED, REPLACED, RULES

__all__ = ["CONTRIBUTED", "CONVERTERS", "LEARNED", "REPLACED", "RULES"]

_FAMILY_NAMES = (
    "arrangement attention contributed convolution deformable elementwise indexing learned "
    "packed_product pools normalization quantized recurrent reduction resize signal"
)
"""The modules beside this one that have rows. Rules of one operator are asked in this order."""

for _name in _FAMILY_NAMES.split():
    importlib.import_module(f".{_name}", __package__)
