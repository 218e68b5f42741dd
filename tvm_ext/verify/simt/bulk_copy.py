"""Hopper's bulk copies and the calls of mbarriers: what the interpreter knows of ``cp.async.bulk`` without tensor maps.

Source: PTX ISA, "cp.async.bulk": one thread copies a run of bytes (a multiple of 16, both addresses multiples of 16)
from global to shared memory, through the async proxy; as it lands, an mbarrier of the block counts the bytes. Threads
run statement by statement, all together: a producer warp that loops on its own, beside its consumers, is beyond this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_ext.analysis.device_code import constant_int, op_name
from tvm_ext.errors import InputError
from tvm_ext.ir.bulk_ir import BULK_BYTES
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array

from .block_clocks import NOBODY
from .compile_expr import compile_expression
from .counters import AccessCount
from .local_memory import View
from .machine import Closure, Engine, Run, Site
from .mbarrier import BulkCopy, Mbarriers
from .memory import AddressableMemory, Request
from .ordering import ProxyFences, lane_of
from .scope import Scope
from .values import Value, apply, origin_of, strip
from .warp_calls import Pointer, compile_pointer

if TYPE_CHECKING:
    from tvm_ext._tvm import Call, Expr

_TO_SHARED = "tirx.cuda.cvta_generic_to_shared"


def _pointer(scope: Scope, expr: Expr) -> Pointer:
    """A pointer, maybe converted to an address of shared memory."""
    if type(expr).__name__ == "Call" and op_name(expr) == _TO_SHARED:
        expr = expr.args[0]
    return compile_pointer(scope, expr)


def _shared_pointer(scope: Scope, expr: Expr) -> Pointer:
    pointer = _pointer(scope, expr)
    if not pointer.binding.scope.startswith("shared"):
        raise InputError(
            f"{scope.kernel}: {pointer.binding.name} must be in shared memory, not {pointer.binding.scope}"
        )
    return pointer


def _operands(scope: Scope, call: Call, count: int) -> list[Expr]:
    """The first ``count`` arguments; after them come the instruction's modifiers, as text, and flags."""
    words = [argument for argument in call.args if type(argument).__name__ == "StringImm"]
    if len(call.args) - len(words) != count or (words and str(words[-1].value)):
        raise InputError(f"{scope.kernel}: the interpreter knows {op_name(call)} with {count} operands only: {call}")
    return list(call.args[:count])


def _plain(m: Engine, value: Value, site: Site, what: str) -> Array:
    return np.asarray(m.decided(value, site, what)).astype(np.int64)


# --- mbarriers ----------------------------------------------------------------------------------------------------
Operation = Callable[[Engine, int, View, Any, Any], None]


def _mbarrier_call(operation: Operation, what: str, *, operands: int) -> Callable[[Scope, Call], Run]:
    """A call whose first operand is the mbarrier's address, and whose second is a number, 1 where it has none."""

    def make(scope: Scope, call: Call) -> Run:
        address, *rest = _operands(scope, call, operands)
        pointer = _shared_pointer(scope, address)
        number: Closure = compile_expression(scope, rest[0]) if rest else lambda m: 1
        binding = pointer.binding
        view = View(site=scope.site(binding.name), dtype=binding.dtype, vector=False)

        def run(m: Engine) -> None:
            if m.mask.count:
                operation(m, binding.slot, view, pointer.index(m), _plain(m, number(m), view.site, what))

        return run

    return make


def _initialise(m: Engine, slot: int, view: View, index: Value, count: Value) -> None:
    Mbarriers.of(m).initialise(m, slot, view, index, count)


def _invalidate(m: Engine, slot: int, view: View, index: Value, count: Value) -> None:
    Mbarriers.of(m).invalidate(m, slot, view, index, count)


def _arrive(m: Engine, slot: int, view: View, index: Value, count: Value) -> None:
    Mbarriers.of(m).arrive(m, slot, view, index, count)


def _announce(m: Engine, slot: int, view: View, index: Value, size_bytes: Value) -> None:
    Mbarriers.of(m).announce(m, slot, view, index, size_bytes)


def _announce_and_arrive(m: Engine, slot: int, view: View, index: Value, size_bytes: Value) -> None:
    Mbarriers.of(m).announce(m, slot, view, index, size_bytes)
    Mbarriers.of(m).arrive(m, slot, view, index)


def _wait(m: Engine, slot: int, view: View, index: Value, parity: Value) -> None:
    Mbarriers.of(m).wait(m, slot, view, index, parity)


# --- fences -------------------------------------------------------------------------------------------------------
def _fence(chosen: Callable[[Mbarriers], list[ProxyFences]]) -> Callable[[Scope, Call], Run]:
    def make(scope: Scope, call: Call) -> Run:
        site = scope.site()

        def run(m: Engine) -> None:
            event = m.event(site)
            for fences in chosen(Mbarriers.of(m)):
                fences.fence(m.active_lanes(), event)

        return run

    return make


def _proxy_fence(scope: Scope, call: Call) -> Run:
    """``fence.proxy.async``, of all memory or of one space."""
    modifiers = {str(argument.value) for argument in call.args if type(argument).__name__ == "StringImm"}
    if "async" not in modifiers:
        raise InputError(f"{scope.kernel}: the interpreter does not know the fence {call}")
    shared = bool(modifiers & {"shared::cta", "shared::cluster"}) or "global" not in modifiers
    world = "global" in modifiers or not modifiers & {"shared::cta", "shared::cluster"}

    def chosen(table: Mbarriers) -> list[ProxyFences]:
        return [table.shared_fences, table.init_fences] * shared + [table.global_fences] * world

    return _fence(chosen)(scope, call)


# --- copies -------------------------------------------------------------------------------------------------------
def _bulk_copy(scope: Scope, call: Call) -> Run:
    """``cp.async.bulk [target], [source], size, [mbarrier]``, by every active lane."""
    to, frm, size, address = _operands(scope, call, 4)
    target, source, barrier = _shared_pointer(scope, to), _pointer(scope, frm), _shared_pointer(scope, address)
    if source.binding.scope not in ("global", ""):
        raise InputError(
            f"{scope.kernel}: the interpreter copies in bulk from global memory, not {source.binding.scope}"
        )
    size_bytes = constant_int(size, "the size of a bulk copy")
    views = [
        View(site=scope.site(p.binding.name), dtype=p.binding.dtype, vector=False) for p in (target, source, barrier)
    ]

    def run(m: Engine) -> None:
        if not m.mask.count:
            return
        if size_bytes % BULK_BYTES or not size_bytes:
            detail = f"a bulk copy of {size_bytes} bytes, which is no multiple of {BULK_BYTES}"
            m.tell("misaligned access", views[0].site, detail=detail)
            return
        written, read = (_run_of(m, p, v, size_bytes) for p, v in zip((target, source), views, strict=False))
        _issue(m, (target, source), views, (written, read), size_bytes)
        values, origin = _data(m, source, views, read)
        memory: AddressableMemory = m.memory[target.binding.slot]
        _attach(
            m, barrier, views[2], BulkCopy(memory=memory, view=views[0], request=written, values=values, origin=origin)
        )

    return run


def _run_of(m: Engine, pointer: Pointer, view: View, size_bytes: int) -> Request:
    """The elements from the pointer on, by lanes."""
    memory: AddressableMemory = m.memory[pointer.binding.slot]
    count = size_bytes // view.dtype.itemsize
    first = pointer.index(m)
    request = memory.request(m, view, apply(lambda start: np.reshape(start, (-1, 1)) + np.arange(count), first))
    start = request.element[:, 0] * view.dtype.itemsize
    wrong = start % BULK_BYTES != 0
    if wrong.any():
        detail = f"a bulk copy at byte {int(start[wrong][0])}, which is no multiple of {BULK_BYTES}"
        element = int(request.element[wrong][0, 0])
        m.tell("misaligned access", view.site, element=element, detail=detail, count=int(wrong.sum()))
    return request


def _issue(
    m: Engine, pointers: tuple[Pointer, Pointer], views: list[View], requests: tuple[Request, Request], size_bytes: int
) -> None:
    """Mark the destination; check that what was stored there, and to the source, is fenced from the async proxy."""
    table = Mbarriers.of(m)
    for pointer, view, request, fences in zip(
        pointers, views, requests, (table.shared_fences, table.global_fences), strict=False
    ):
        memory: AddressableMemory = m.memory[pointer.binding.slot]
        _check_fenced(m, view, request, memory.last_writes(m, view, request), fences)
        _count(m, view, request, size_bytes, memory.scope)
    m.memory[pointers[0].binding.slot].begin_bulk(m, views[0], requests[0])


def _check_fenced(m: Engine, view: View, request: Request, last: tuple[Array, Array], fences: ProxyFences) -> None:
    who, when = last
    issuer = np.broadcast_to(request.lane[:, None], who.shape)
    size = m.lanes.padded_threads
    own_block = (who != NOBODY) & (who // size == m.lanes.identity[issuer] // size)
    if not own_block.any():
        return
    author = lane_of(m.lanes, who[own_block])
    bare = ~fences.covers(issuer[own_block], author, when[own_block])
    if bare.any():
        thread = m.lanes.name(int(who[own_block][bare][0]))
        detail = f"{thread} stored here, and no fence.proxy.async lies between"
        m.tell("missing proxy fence", view.site, detail=detail, count=int(bare.sum()))


def _data(m: Engine, source: Pointer, views: list[View], read: Request) -> tuple[Array, Array]:
    """(values, origins) of the source as elements of the target, by active lanes: ``(k, n)``."""
    target_view, source_view = views[:2]
    memory: AddressableMemory = m.memory[source.binding.slot]
    data = memory.fetch(m, source_view, read)
    lanes = read.lane
    plain = np.asarray(strip(data))
    values = np.ascontiguousarray(plain[lanes]).view(target_view.dtype)
    origin = np.broadcast_to(np.asarray(origin_of(data)), plain.shape)[lanes].max(axis=1, keepdims=True)
    return values, np.broadcast_to(origin, values.shape).astype(np.int32)


def _attach(m: Engine, barrier: Pointer, view: View, copy: BulkCopy) -> None:
    """The copy's bytes will be counted by the mbarriers that its lanes name; those must be fenced from the proxy."""
    table = Mbarriers.of(m)
    for found, lanes in table.used(m, barrier.binding.slot, view, barrier.index(m)):
        chosen = np.isin(copy.request.lane, lanes)
        if not table.init_fences.covers(
            lanes, np.full_like(lanes, found.author), np.full_like(lanes, found.event)
        ).all():
            detail = f"{m.lanes.name(int(m.lanes.identity[found.author]))} initialised it without a fence behind that"
            m.tell("missing proxy fence", view.site, detail=detail)
        request = Request(lane=copy.request.lane[chosen], element=copy.request.element[chosen], vector=True)
        found.in_flight.append(BulkCopy(
            memory=copy.memory, view=copy.view, request=request, values=copy.values[chosen], origin=copy.origin[chosen],
        ))  # fmt: skip


def _count(m: Engine, view: View, request: Request, size_bytes: int, scope: str) -> None:
    """A bulk copy is a request of its own: all sectors that it touches, and shared memory a line at a time."""
    record, hardware = m.record, m.record.hardware
    store = scope == "shared"
    total = record.counts.get((view.site.number, store))
    if total is None:
        record.sites[view.site.number] = view.site
        total = record.counts[view.site.number, store] = AccessCount(
            statement="", buffer=view.site.buffer, scope=scope, store=store, width_bytes=size_bytes
        )
    copies, first = len(request.lane), request.element[:, 0] * view.dtype.itemsize
    total.lanes += copies
    total.requests += copies
    if store:
        lines = copies * ceil_div(size_bytes, hardware.banks * hardware.bank_bytes)
        total.wavefronts += lines
        total.least_wavefronts += lines
        return
    last = first + size_bytes - 1
    total.sectors += int((last // hardware.sector_bytes - first // hardware.sector_bytes + 1).sum())
    total.useful_bytes += copies * size_bytes


def install(scope: Scope) -> None:
    """Make these calls known to ``scope``."""
    arrival = _mbarrier_call(_arrive, "a number of arrivals", operands=1)
    scope.effects.update({
        "tirx.ptx.mbarrier_init": _mbarrier_call(_initialise, "a number of arrivals", operands=2),
        "tirx.ptx.mbarrier_inval": _mbarrier_call(_invalidate, "", operands=1),
        "tirx.ptx.mbarrier_arrive_nocount": arrival,
        "tirx.ptx.mbarrier_arrive": _mbarrier_call(_arrive, "a number of arrivals", operands=2),
        "tirx.ptx.mbarrier_arrive_expect_tx": _mbarrier_call(_announce_and_arrive, "a number of bytes", operands=2),
        "tirx.ptx.mbarrier_expect_tx": _mbarrier_call(_announce, "a number of bytes", operands=2),
        "tirx.cuda.mbarrier_wait": _mbarrier_call(_wait, "a parity", operands=2),
        "tirx.ptx.fence_mbarrier_init": _fence(lambda table: [table.init_fences]),
        "tirx.ptx.fence_proxy": _proxy_fence,
        "tirx.ptx.cp_async_bulk_g2s_cluster": _bulk_copy, "tirx.ptx.cp_async_bulk_g2s_cta": _bulk_copy,
    })  # fmt: skip
