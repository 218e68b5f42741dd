"""Keeps what passes decide about persistent kernels at the module, one pass after the other."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import IRModule
from tvm_ext.records.persistent import PERSISTENT, PersistentRecord, PersistentRegion
from tvm_ext.records.serialise import from_json, to_json


def with_regions(mod: IRModule, regions: Sequence[PersistentRegion]) -> IRModule:
    """``mod`` whose record of persistent kernels has ``regions`` behind those that it has already."""
    return mod.with_attr(PERSISTENT, to_json(PersistentRecord(regions=(*_known(mod), *regions))))


def _known(mod: IRModule) -> tuple[PersistentRegion, ...]:
    text = mod.attrs.get(PERSISTENT) if mod.attrs else None
    return from_json(PersistentRecord, str(text)).regions if text is not None else ()
