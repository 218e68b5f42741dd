"""Keeps what passes decide about persistent kernels at the module, one pass after the other."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import IRModule
from tvm_ext.records.persistent import PERSISTENT, PersistentRecord, PersistentRegion
from tvm_ext.records.serialise import record_of, to_json


def with_regions(mod: IRModule, regions: Sequence[PersistentRegion]) -> IRModule:
    """``mod`` whose record of persistent kernels has ``regions`` behind those that it has already."""
    record = record_of(mod, PERSISTENT, PersistentRecord)
    known = () if record is None else record.regions
    return mod.with_attr(PERSISTENT, to_json(PersistentRecord(regions=(*known, *regions))))
