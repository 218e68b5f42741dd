"""The four primitives of ALCOP §3.2, fifth step, as calls in TensorIR, until they are lowered for a target.

``producer_acquire`` stands before a tile is loaded into a version that was in use, ``producer_commit`` behind the loads
of one iteration, ``consumer_wait`` before a tile is used, ``consumer_release`` where a version is no longer used. They
are external calls, which no pass of TVM moves or removes, so that tests can drop or weaken one.
"""

from __future__ import annotations

from typing import Literal

from tvm_ext._tvm import ForKind, Stmt, ir, tirx

PREFIX = "tvm_ext."
Primitive = Literal["producer_acquire", "producer_commit", "consumer_wait", "consumer_release"]


def primitive(kind: Primitive, pipeline: int, argument: int = 0) -> Stmt:
    """A statement: ``kind`` of pipeline number ``pipeline``.

    ``argument`` of ``consumer_wait`` is the number of commits that may still be on their way; of ``producer_acquire`` 1
    where the memory may be in use by what runs before the pipeline.
    """
    return tirx.Evaluate(tirx.call_extern("int32", PREFIX + kind, pipeline, argument))


def read_primitive(statement: Stmt) -> tuple[Primitive, int, int] | None:
    """(kind, pipeline, argument) of a primitive; None for any other statement."""
    call = getattr(statement, "value", None) if isinstance(statement, tirx.Evaluate) else None
    if call is None or type(call).__name__ != "Call" or not call.args or not isinstance(call.args[0], ir.StringImm):
        return None
    name = str(call.args[0].value)
    if not name.startswith(PREFIX):
        return None
    kind: ForKind = name.removeprefix(PREFIX)
    return kind, int(call.args[1].value), int(call.args[2].value)
