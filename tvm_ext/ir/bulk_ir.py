"""Small constructors for Hopper's bulk copies and mbarriers, by the calls that stock TVM generates code for.

Source: PTX ISA, "cp.async.bulk", "mbarrier" and "Proxies". A pointer to shared memory is a ``tvm_access_ptr`` with an
access mask of 0: stock ThreadSync then makes no barriers for what these calls synchronise themselves, while
StorageRewrite and MergeSharedMemoryAllocations see the buffer in use (an ``address_of`` they do not see: merging stops
with an internal error).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Buffer, Expr, Stmt, ptx_call, tirx
from tvm_ext.analysis.computations import dtype_of

from .build_ir import cast_to, index

MBARRIER_BYTES = 8  # size and alignment (PTX ISA, "mbarrier object")
BULK_BYTES = 16
"""Size and both addresses of a bulk copy are multiples of this (PTX ISA, "cp.async.bulk")."""

_NO_ACCESS = 0  # tvm_access_ptr's mask: neither read nor written, which other passes would have to follow


def mbarrier_buffer(count: int, name: str, scope: str) -> Buffer:
    """``count`` mbarrier objects, of 8 aligned bytes each, in ``"shared"`` or ``"shared.dyn"`` memory."""
    return tirx.decl_buffer([index(count)], "uint64", name, scope=scope, data_alignment=MBARRIER_BYTES)


def shared_pointer(buffer: Buffer, offset: Expr) -> Expr:
    """The address of element ``offset`` of a flat shared buffer."""
    kind = tirx.type_annotation(dtype_of(buffer))
    return tirx.tvm_access_ptr(kind, buffer.data, cast_to(offset, "int32"), tirx.IntImm("int32", 1), _NO_ACCESS)


def initialise_mbarrier(barriers: Buffer, which: Expr, arrivals: int) -> Stmt:
    """``mbarrier.init``: each phase ends when there were ``arrivals`` arrivals and all announced bytes have come."""
    return _ptx("mbarrier.init.shared::cta.b64", shared_pointer(barriers, which), _uint32(arrivals))


def invalidate_mbarrier(barriers: Buffer, which: Expr) -> Stmt:
    """``mbarrier.inval``: its memory may be used for something else."""
    return _ptx("mbarrier.inval.shared::cta.b64", shared_pointer(barriers, which))


def fence_initialised_mbarriers() -> Stmt:
    """Makes them known to the async proxy; other threads need a barrier besides."""
    return _ptx("fence.mbarrier_init.release.cluster")


def fence_generic_stores() -> Stmt:
    """What the thread stored to shared memory lies before bulk copies to the same place that are issued later."""
    return _ptx("fence.proxy.async.shared::cta")


def announce_bytes(barriers: Buffer, which: Expr, size_bytes: int) -> Stmt:
    """Arrives at the mbarrier, whose phase then also waits for ``size_bytes`` to be copied."""
    name = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64"
    return _ptx(name, shared_pointer(barriers, which), _uint32(size_bytes))


def arrive(barriers: Buffer, which: Expr) -> Stmt:
    """One arrival, which releases what the thread did."""
    return _ptx("mbarrier.arrive.release.cta.shared::cta.b64", shared_pointer(barriers, which))


def wait_for_phase(barriers: Buffer, which: Expr, parity: Expr) -> Stmt:
    """Returns once the phase of that parity (0: the first, 1: the second, 0: the third ...) is over."""
    pointer = shared_pointer(barriers, which)
    return tirx.Evaluate(tirx.call_intrin("", "tirx.cuda.mbarrier_wait", pointer, cast_to(parity, "int32")))


def copy_in_bulk(
    target: Expr, offset: Expr, source: Expr, place: Sequence[Expr], size_bytes: int, mbarrier: Expr
) -> Stmt:
    """One thread starts the copy of ``size_bytes`` from ``source[place]`` on to element ``offset`` of ``target``.

    ``mbarrier`` is a `shared_pointer` to the object that counts the bytes. The destination is
    named ``shared::cluster``, which a block that is no part of a larger cluster is, too: the form that all
    assemblers since CUDA 12.0 know.
    """
    name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    start = tirx.address_of(tirx.BufferLoad(source, list(place)))
    return _ptx(name, shared_pointer(target, offset), start, _uint32(size_bytes), mbarrier)


def _ptx(instruction: str, *operands: Expr) -> Stmt:
    return tirx.Evaluate(ptx_call(instruction, *operands))


def _uint32(value: int) -> Expr:
    return tirx.IntImm("uint32", value)
