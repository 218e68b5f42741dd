"""Calls that a block's or a warp's lanes make together: barriers, shuffles, asynchronous copies.

Shuffles are over lane arrays (..., 32), as ``__shfl_sync`` and its kin exchange registers. Source: PTX ISA "shfl.sync"
(the pseudo-code there) and the CUDA guide's "Warp Shuffle Functions".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tvm_ext.analysis.computations import dtype_of
from tvm_ext.analysis.device_code import constant_int, op_name, pointer_variable, split_dtype
from tvm_ext.devices.gpu import WARP
from tvm_ext.errors import InputError
from tvm_ext.support.arrays import Array

from .async_copy import check_copy_size
from .compile_expr import compile_expression
from .fragments import LANES
from .local_memory import View
from .machine import Closure, Engine, Run
from .memory import AddressableMemory, Request
from .number_types import storage_dtype
from .scope import BufferBinding, Scope
from .values import Tainted, Value, apply, in_lanes, origin_of, strip

if TYPE_CHECKING:
    from tvm_ext._tvm import Buffer, Call, Expr


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


BLOCK_SCOPES = ("shared", "shared.dyn")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pointer:
    """An address: a buffer, and a flat index in its elements."""

    binding: BufferBinding
    index: Closure


def compile_pointer(scope: Scope, expr: Expr, offset: Expr | None = None) -> Pointer:
    """``buffer.data``, ``address_of(buffer[i])`` or ``tvm_access_ptr(...)``, plus ``offset`` elements of the buffer."""
    start, source = _start(scope, expr)
    if offset is None:
        return Pointer(binding=scope.buffer(source), index=start)
    more = compile_expression(scope, offset)
    return Pointer(binding=scope.buffer(source), index=lambda m: apply(lambda a, b: a + b, start(m), more(m)))


def _start(scope: Scope, expr: Expr) -> tuple[Closure, Buffer]:
    if type(expr).__name__ == "Call":
        name = op_name(expr)
        if name == "tirx.address_of":
            load = expr.args[0]
            return compile_expression(scope, load.indices[0]), load.source
        if name == "tirx.tvm_access_ptr":
            return compile_expression(scope, expr.args[2]), pointer_variable(expr.args[1])
    return (lambda m: 0), pointer_variable(expr)


# --- barriers -----------------------------------------------------------------------------------------------------
def _storage_sync(scope: Scope, call: Call) -> Run:
    kind = str(call.args[0].value)
    site = scope.site()
    if kind in BLOCK_SCOPES:
        return lambda m: m.barrier(site)
    if kind == "warp":
        return lambda m: m.warp_barrier()
    raise InputError(f"{scope.kernel}: a barrier of scope {kind!r} is not modelled")


def _block_sync(scope: Scope, call: Call) -> Run:
    site = scope.site()
    return lambda m: m.barrier(site)


def _warp_sync(scope: Scope, call: Call) -> Run:
    return lambda m: m.warp_barrier()


# --- shuffles -----------------------------------------------------------------------------------------------------
def _shuffle(kind: ShuffleKind) -> Callable[[Scope, Call], Closure]:
    """``shfl(mask, value, operand, width, ...)``."""

    def make(scope: Scope, call: Call) -> Closure:
        mask, value, operand = (compile_expression(scope, argument) for argument in call.args[:3])
        width = constant_int(call.args[3], "the width of a shuffle")
        site, dtype = scope.site(), storage_dtype(split_dtype(dtype_of(call))[0])

        def run(m: Engine) -> Value:
            warps = (-1, m.lanes.warp_lanes)
            members = in_lanes(m.decided(mask(m), site, "a shuffle's mask"), m.lanes.count, 1).reshape(warps)
            lane = in_lanes(m.decided(operand(m), site, "a shuffle's lane"), m.lanes.count, 1).reshape(warps)
            active = m.mask.flags.reshape(warps)
            missing = absent(active, members) & m.lanes.valid.flags.reshape(warps) & active.any(axis=1, keepdims=True)
            if missing.any():
                m.tell("warp divergence", site, detail="the mask of a shuffle names lanes that do not execute it")
            given = value(m)
            plain = in_lanes(np.asarray(strip(given), dtype), m.lanes.count, 1).reshape(warps)
            result, valid = shuffle(kind, plain, lane, width, active=active, mask=members)
            source = in_lanes(np.asarray(origin_of(given), np.int32), m.lanes.count, 1).reshape(warps)
            origin, _ = shuffle(kind, source, lane, width, active=active, mask=members)
            return _marked(m, site, result.reshape(-1), origin.reshape(-1), valid.reshape(-1))

        return run

    return make


def _marked(m: Engine, site: Any, result: Array, origin: Array, valid: Array) -> Value:
    lost = ~valid & m.mask.flags
    if lost.any():
        number = m.new_origin(site, 0, int(np.flatnonzero(lost)[0]))
        origin = np.where(lost, np.int32(number), origin)
    return Tainted(result, origin) if origin[m.active_lanes()].any() else result


def _bpermute(scope: Scope, arguments: list[Expr]) -> Closure:
    """``ds_bpermute(4 * lane, value)``: the value of another lane of an AMD wavefront, a lane's register being 32 bits.

    Source: AMD GCN3 ISA, "DS_BPERMUTE_B32": the address wraps at the wavefront; an inactive source is poison.
    """
    address, value = (compile_expression(scope, argument) for argument in arguments)
    site = scope.site()

    def run(m: Engine) -> Value:
        size = m.lanes.warp_lanes
        where = (
            in_lanes(m.decided(address(m), site, "a shuffle's lane"), m.lanes.count, 1).reshape(-1, size) // 4 % size
        )
        given = value(m)
        plain = in_lanes(strip(given), m.lanes.count, 1).reshape(-1, size)
        source = in_lanes(np.asarray(origin_of(given), np.int32), m.lanes.count, 1).reshape(-1, size)
        valid = np.take_along_axis(m.mask.flags.reshape(-1, size), where, axis=1)
        result, origin = (np.take_along_axis(x, where, axis=1).reshape(-1) for x in (plain, source))
        return _marked(m, site, result, origin, valid.reshape(-1))

    return run


def _lane_below(scope: Scope, arguments: list[Expr]) -> Closure:
    """``mbcnt.lo(-1, 0)`` and ``mbcnt.hi(-1, mbcnt.lo(-1, 0))``: the number of the lane in its wavefront."""
    high = len(arguments) == 2 and type(arguments[1]).__name__ == "Call"

    def run(m: Engine) -> Array:
        lane = (m.lanes.number % m.lanes.warp_lanes).astype(np.int32)
        return lane if high else np.minimum(lane, 32).astype(np.int32)

    return run


def _active_mask(scope: Scope, call: Call) -> Closure:
    def run(m: Engine) -> Array:
        active = m.mask.flags.reshape(-1, m.lanes.warp_lanes)
        return active_mask(active).reshape(-1)

    return run


# --- asynchronous copies ------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Copy:
    """One executed cp.async, on its way."""

    memory: AddressableMemory
    view: View
    request: Request
    values: Array
    origin: Array


def _start_copy(scope: Scope, call: Call) -> Run:
    """``cp_async_raw(dst, dst_offset, src, src_offset, bytes[, predicate])``; offsets in elements of each buffer."""
    target = compile_pointer(scope, call.args[0], call.args[1])
    source = compile_pointer(scope, call.args[2], call.args[3])
    size = constant_int(call.args[4], "the size of a cp.async")
    check_copy_size(size)
    predicate = compile_expression(scope, call.args[5]) if len(call.args) > 5 else None
    to = View(site=scope.site(target.binding.name), dtype=target.binding.dtype)
    frm = View(site=scope.site(source.binding.name), dtype=source.binding.dtype)

    def run(m: Engine) -> None:
        if predicate is None:
            _issue(m, target, source, to, frm, size)
            return
        which = m.decided(predicate(m), to.site, "a predicate")
        for wanted, action in ((True, _issue), (False, _fill)):
            mask = m.restrict(np.broadcast_to(np.asarray(which, bool) == wanted, m.mask.flags.shape))
            if mask.count:
                with m.masked(mask):
                    action(m, target, source, to, frm, size)

    return run


def _steps(index: Value, count: int) -> Value:
    return apply(lambda first: np.reshape(first, (-1, 1)) + np.arange(count), index)


def _issue(m: Engine, target: Pointer, source: Pointer, to: View, frm: View, size: int) -> None:
    """Read the source now (nobody may change it until then), and mark the destination."""
    origin_memory: AddressableMemory = m.memory[source.binding.slot]
    index = source.index(m)
    request = origin_memory.request(m, frm, _steps(index, size // frm.dtype.itemsize))
    origin_memory.check_aligned(m, frm, request)
    data = origin_memory.read(m, frm, _steps(index, size // frm.dtype.itemsize))
    memory: AddressableMemory = m.memory[target.binding.slot]
    request = memory.request(m, to, _steps(target.index(m), size // to.dtype.itemsize))
    memory.begin_copy(m, to, request)
    memory.count(m, to, request, store=True)
    values = np.ascontiguousarray(strip(data)[m.active_lanes()]).view(to.dtype)
    origin = np.asarray(origin_of(data))
    worst = origin[m.active_lanes()].max(axis=1) if origin.ndim == 2 and len(origin) == m.lanes.count else origin.max()
    marks = np.broadcast_to(np.reshape(worst, (-1, 1)).astype(np.int32), values.shape)
    copy = _Copy(memory=memory, view=to, request=request, values=values, origin=marks)
    m.queue.issue(m.mask.flags, copy)


def _fill(m: Engine, target: Pointer, source: Pointer, to: View, frm: View, size: int) -> None:
    """A false predicate stores zeros at once, by an ordinary ``st.shared``."""
    zeros = np.zeros((1, size // to.dtype.itemsize), to.dtype)
    m.memory[target.binding.slot].write(m, to, _steps(target.index(m), zeros.shape[1]), zeros)


def wait(m: Engine, in_flight: int) -> None:
    """``cp.async.wait_group in_flight``: what must have landed by now lands now."""
    for copy, lanes in m.queue.wait(m.mask.flags, in_flight):
        _land(m, copy, lanes)


def _land(m: Engine, copy: _Copy, lanes: Array) -> None:
    chosen = lanes[copy.request.lane]
    request = Request(lane=copy.request.lane[chosen], element=copy.request.element[chosen], vector=True)
    copy.memory.land_copy(m, copy.view, request, copy.values[chosen], copy.origin[chosen])


def _commit(scope: Scope, call: Call) -> Run:
    return lambda m: m.queue.commit(m.mask.flags)


def _wait_group(scope: Scope, call: Call) -> Run:
    left = constant_int(call.args[0], "a wait count") if len(call.args) else 0
    return lambda m: wait(m, left)


def install(scope: Scope) -> None:
    """Make these calls known to ``scope``."""
    scope.wait = wait
    scope.effects.update({
        "tirx.tvm_storage_sync": _storage_sync, "tirx.cuda.cta_sync": _block_sync, "tirx.cuda.warp_sync": _warp_sync,
        "tirx.s_tir.cp_async_raw": _start_copy, "tirx.ptx.cp_async_commit_group": _commit,
        "tirx.ptx.cp_async_wait_group": _wait_group,
    })  # fmt: skip
    scope.special_externs["llvm.amdgcn.ds.bpermute"] = _bpermute
    scope.special_externs["llvm.amdgcn.mbcnt.lo"] = scope.special_externs["llvm.amdgcn.mbcnt.hi"] = _lane_below
    kinds: dict[str, ShuffleKind] = {"": "idx", "_up": "up", "_down": "down", "_xor": "xor"}
    for suffix, kind in kinds.items():
        scope.special_calls[f"tirx.tvm_warp_shuffle{suffix}"] = _shuffle(kind)
        scope.special_calls[f"tirx.cuda.__shfl{suffix}_sync"] = _shuffle(kind)
    scope.special_calls["tirx.tvm_warp_activemask"] = _active_mask
    scope.special_calls["tirx.cuda.__activemask"] = _active_mask
