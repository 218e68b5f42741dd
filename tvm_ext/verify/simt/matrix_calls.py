"""Tensor-core calls of a warp: ldmatrix, mma.sync and its fill and store, and wmma."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_ext.analysis.device_code import constant_int
from tvm_ext.devices.gpu import WARP
from tvm_ext.ir.matrix_units.mfma import INSTRUCTIONS, QUAD, WAVE, WORDS, MatrixInstruction
from tvm_ext.support.arrays import Array

from .compile_expr import compile_expression
from .fragments import (
    FragmentRole,
    LdmatrixSources,
    fragment_shape,
    ldmatrix_sources,
    mma,
    mma_poison,
    mma_shape,
    store_offsets,
    transposed_byte_offsets,
    wmma,
    wmma_offsets,
    wmma_poison,
)
from .lanes import Mask
from .local_memory import View
from .machine import Closure, Engine, Run, Site
from .number_types import PTX_DTYPES, storage_dtype, to_dtype
from .scope import Scope
from .values import NEVER_WRITTEN, Tainted, Value, aligned, apply, in_lanes, origin_of, strip
from .warp_calls import Pointer, compile_pointer

if TYPE_CHECKING:
    from tvm_ext._tvm import Call, Expr

ROW_BYTES = 16  # of an 8x8 matrix of 16-bit elements


def _ldmatrix(scope: Scope, call: Call) -> Run:
    """``ldmatrix(trans, num, type, local, local_offset, smem, smem_offset)``."""
    transposed, count = bool(call.args[0].value), constant_int(call.args[1], "ldmatrix's count")
    target = compile_pointer(scope, call.args[3], call.args[4])
    source = compile_pointer(scope, call.args[5], call.args[6])
    to = View(site=scope.site(target.binding.name), dtype=target.binding.dtype)
    frm = View(site=scope.site(source.binding.name), dtype=source.binding.dtype)
    if transposed and frm.dtype.itemsize == 1:
        return _byte_loop(call, target, to, frm, compile_pointer(scope, call.args[5]), scope)
    tables = ldmatrix_sources(count, transposed=transposed)
    per_row, per_half = ROW_BYTES // frm.dtype.itemsize, 2 // frm.dtype.itemsize

    def run(m: Engine) -> None:
        m.whole_warps(to.site, "ldmatrix")
        addressing = Mask(m.mask.flags & (m.lanes.number % m.lanes.warp_lanes < 8 * count))
        index = apply(lambda first: np.reshape(first, (-1, 1)) + np.arange(per_row), source.index(m))
        with m.masked(addressing):
            memory = m.memory[source.binding.slot]
            memory.check_aligned(m, frm, memory.request(m, frm, index))
            rows = memory.read(m, frm, index)
        registers = apply(lambda x: _gathered(x, tables, per_half), _spread(m, rows))
        _store_registers(m, target, to, registers)

    return run


def _spread(m: Engine, rows: Value) -> Value:
    """Rows of all lanes, origins too."""
    if type(rows) is not Tainted:
        return rows
    return Tainted(rows.value, np.broadcast_to(rows.origin, rows.value.shape))


def _gathered(rows: Array, tables: LdmatrixSources, per_half: int) -> Array:
    """(lanes, elements of a row) to (lanes, elements of the registers): ``per_half`` elements to 16 bits."""
    warps = rows.reshape(-1, WARP, 8, per_half)
    return warps[:, tables.lane, tables.element].reshape(rows.shape[0], -1)


def _byte_loop(call: Call, target: Pointer, to: View, frm: View, source: Pointer, scope: Scope) -> Run:
    """ldmatrix cannot transpose bytes: stock code reads 16 single bytes, rows ``smem_offset`` apart."""
    stride = compile_expression(scope, call.args[6])
    single = View(site=frm.site, dtype=frm.dtype, vector=False)

    def run(m: Engine) -> None:
        offsets = np.tile(
            transposed_byte_offsets(int(m.decided(stride(m), frm.site, "a stride"))), (m.lanes.count // WARP, 1)
        )
        index = apply(lambda first: np.reshape(first, (-1, 1)) + offsets, source.index(m))
        _store_registers(m, target, to, m.memory[source.binding.slot].read(m, single, index))

    return run


def _store_registers(m: Engine, target: Pointer, view: View, registers: Value) -> None:
    count = strip(registers).shape[1]
    index = apply(lambda first: np.reshape(first, (-1, 1)) + np.arange(count), target.index(m))
    m.memory[target.binding.slot].write(m, view, index, registers)


def _load_registers(m: Engine, pointer: Pointer, view: View, count: int) -> tuple[Array, Array]:
    """(warps, WARP, count) values, and their origins."""
    index = apply(lambda first: np.reshape(first, (-1, 1)) + np.arange(count), pointer.index(m))
    value = m.memory[pointer.binding.slot].read(m, view, index)
    plain = in_lanes(strip(value), m.lanes.count, count)
    origin = in_lanes(origin_of(value), m.lanes.count, count)
    return plain.reshape(-1, WARP, count), origin.reshape(-1, WARP, count)


def _mma(scope: Scope, call: Call) -> Run:
    """``mma(shape, "row", "col", A type, B type, C type, A, offset, B, offset, C, offset, saturate)``."""
    kinds = [str(call.args[i].value) for i in (3, 4, 5)]
    shape = mma_shape(str(call.args[0].value), storage_dtype(PTX_DTYPES[kinds[0]]).itemsize * 8)
    pointers = [compile_pointer(scope, call.args[i], call.args[i + 1]) for i in (6, 8, 10)]
    views = [View(site=scope.site(p.binding.name), dtype=p.binding.dtype) for p in pointers]
    counts = [shape.a.elements, shape.b.elements, shape.c.elements]
    saturate = bool(getattr(call.args[12], "value", False)) if len(call.args) > 12 else False

    def run(m: Engine) -> None:
        m.whole_warps(views[2].site, "mma")
        parts = [_load_registers(m, p, v, n) for p, v, n in zip(pointers, views, counts, strict=True)]
        (a, a_from), (b, b_from), (c, c_from) = parts
        result = mma(shape, a, b, c, accumulator=kinds[2], saturate=saturate).reshape(m.lanes.count, -1)
        warps = int(m.mask.flags.reshape(-1, WARP).any(axis=1).sum())
        m.record.mma_count += warps
        m.record.flops += 2 * shape.m * shape.n * shape.k * warps
        value: Value = result
        if a_from.any() or b_from.any() or c_from.any():
            poison = mma_poison(shape, a_from != 0, b_from != 0, c_from != 0).reshape(m.lanes.count, -1)
            worst = max(int(x.max()) for x in (a_from, b_from, c_from))
            value = Tainted(result, np.where(poison, np.int32(worst), np.int32(0)))
        _store_registers(m, pointers[2], views[2], value)

    return run


def _mma_fill(scope: Scope, call: Call) -> Run:
    """``mma_fill(count, local, offset)``: zeros."""
    count = constant_int(call.args[0], "the size of mma_fill")
    target = compile_pointer(scope, call.args[1], call.args[2])
    view = View(site=scope.site(target.binding.name), dtype=target.binding.dtype)
    return lambda m: _store_registers(m, target, view, np.zeros((1, count), view.dtype))


def _mma_store(scope: Scope, call: Call) -> Run:
    """``mma_store(m, n, dst, src, src_offset, dst_stride)``: 8 accumulators a lane, stored one by one."""
    target = compile_pointer(scope, call.args[2])
    source = compile_pointer(scope, call.args[3], call.args[4])
    stride = compile_expression(scope, call.args[5])
    to = View(site=scope.site(target.binding.name), dtype=target.binding.dtype)
    frm = View(site=scope.site(source.binding.name), dtype=source.binding.dtype)

    def run(m: Engine) -> None:
        values, origins = _load_registers(m, source, frm, 8)
        values, origins = values.reshape(-1, 8), origins.reshape(-1, 8)
        offsets = np.tile(store_offsets(int(m.decided(stride(m), to.site, "a stride"))), (m.lanes.count // WARP, 1))
        start = target.index(m)
        for i in range(8):
            index = apply(lambda first, i=i: first + offsets[:, i], start)
            value = Tainted(values[:, i], origins[:, i]) if origins[:, i].any() else values[:, i]
            m.memory[target.binding.slot].write(m, to, index, value)

    return run


# --- wmma: a fragment is a matrix of a warp -----------------------------------------------------------------------
ROLES: dict[str, FragmentRole] = {"wmma.matrix_a": "a", "wmma.matrix_b": "b", "wmma.accumulator": "accumulator"}


class _Fragment:
    """The matrices of all warps, (warps, rows, columns), and their origins."""

    def __init__(self, values: Array, origin: Array) -> None:
        self.values, self.origin = values, origin


def _fragment_arguments(scope: Scope, call: Call) -> tuple[Pointer, FragmentRole, tuple[int, int, int], Closure]:
    """(fragment, role, (m, n, k), index) of ``(fragment, m, n, k, index, ...)``."""
    fragment = compile_pointer(scope, call.args[0])
    shape = tuple(constant_int(call.args[i], "the shape of a fragment") for i in (1, 2, 3))
    return (
        fragment,
        ROLES[fragment.binding.scope],
        (shape[0], shape[1], shape[2]),
        compile_expression(scope, call.args[4]),
    )


def _merge(m: Engine, held: dict[int, _Fragment], index: int, values: Array, origin: Array) -> None:
    """Write the fragments of the active warps."""
    active = np.asarray(m.mask.flags.reshape(-1, WARP).any(axis=1))[:, None, None]
    old = held.get(index)
    if not active.all():
        before = old or _Fragment(np.zeros_like(values), np.full(origin.shape, NEVER_WRITTEN, np.int32))
        values, origin = np.where(active, values, before.values), np.where(active, origin, before.origin)
    held[index] = _Fragment(values, origin)


def _held(m: Engine, pointer: Pointer, index: Value, site: Site, like: tuple[int, int]) -> _Fragment:
    held: dict[int, _Fragment] = m.memory[pointer.binding.slot]
    number = int(m.decided(index(m), site, "the index of a fragment"))
    if number in held:
        return held[number]
    warps = m.lanes.count // WARP
    origin = m.new_origin(site, number, int(m.active_lanes()[0]))
    return _Fragment(np.zeros((warps, *like), pointer.binding.dtype), np.full((warps, *like), origin, np.int32))


def _wmma_fill(scope: Scope, call: Call) -> Run:
    pointer, role, shape, index = _fragment_arguments(scope, call)
    value, site = compile_expression(scope, call.args[5]), scope.site(pointer.binding.name)

    def run(m: Engine) -> None:
        m.whole_warps(site, "fill_fragment")
        full = np.full((m.lanes.count // WARP, *fragment_shape(role, *shape)), strip(value(m))).astype(
            pointer.binding.dtype
        )
        _merge(m, m.memory[pointer.binding.slot], int(strip(index(m))), full, np.zeros(full.shape, np.int32))

    return run


def _matrix_index(m: Engine, pointer: Pointer, offsets: Array) -> Value:
    """Index of the elements that each lane moves: element e of a matrix is lane ``e % WARP``'s, as good as any."""
    columns = offsets.reshape(-1, WARP).T  # (WARP, elements of a lane)
    every = np.tile(columns, (m.lanes.count // WARP, 1))
    return apply(lambda first: np.reshape(first, (-1, 1)) + every, pointer.index(m))


def _wmma_move(*, load: bool) -> Any:
    """``load_matrix_sync`` and ``store_matrix_sync``: (fragment, m, n, k, index, pointer, stride, layout)."""

    def make(scope: Scope, call: Call) -> Run:
        fragment, role, shape, index = _fragment_arguments(scope, call)
        memory = compile_pointer(scope, call.args[5])
        stride, layout = compile_expression(scope, call.args[6]), str(call.args[7].value)
        site = scope.site(memory.binding.name)
        view = View(site=site, dtype=memory.binding.dtype, vector=False)
        size = fragment_shape(role, *shape)

        def run(m: Engine) -> None:
            m.whole_warps(site, "load_matrix_sync" if load else "store_matrix_sync")
            offsets = wmma_offsets(role, *shape, layout=layout, stride=int(m.decided(stride(m), site, "a stride")))
            along = layout == "col_major"  # walked as it lies in memory: neighbouring lanes take neighbouring elements
            where = _matrix_index(m, memory, offsets.T if along else offsets)
            walked = size[::-1] if along else size
            if load:
                value = m.memory[memory.binding.slot].read(m, view, where)
                values = _as_matrix(strip(value), walked).astype(fragment.binding.dtype)
                origin = _as_matrix(np.broadcast_to(origin_of(value), strip(value).shape), walked)
                if along:
                    values, origin = values.transpose(0, 2, 1), origin.transpose(0, 2, 1)
                _merge(m, m.memory[fragment.binding.slot], int(strip(index(m))), values, origin)
                return
            held = _held(m, fragment, index, site, size)
            values, origin = held.values, held.origin
            if along:
                values, origin = values.transpose(0, 2, 1), origin.transpose(0, 2, 1)
            plain, source = _as_lanes(values), _as_lanes(origin)
            m.memory[memory.binding.slot].write(m, view, where, Tainted(plain, source) if source.any() else plain)

        return run

    return make


def _as_matrix(lanes: Array, size: tuple[int, int]) -> Array:
    """(warps * WARP, elements of a lane) to (warps, rows, columns)."""
    return np.asarray(lanes.reshape(-1, WARP, lanes.shape[1]).transpose(0, 2, 1).reshape(-1, *size))


def _as_lanes(matrices: Array) -> Array:
    flat = matrices.reshape(len(matrices), -1, WARP).transpose(0, 2, 1)
    return np.asarray(flat.reshape(len(matrices) * WARP, -1))


def _wmma_mma(scope: Scope, call: Call) -> Run:
    """``mma_sync(D, i, A, i, B, i, C, i)``."""
    pointers = [compile_pointer(scope, call.args[i]) for i in (0, 2, 4, 6)]
    indices = [compile_expression(scope, call.args[i]) for i in (1, 3, 5, 7)]
    sites = [scope.site(pointer.binding.name) for pointer in pointers]
    accumulator = str(pointers[0].binding.dtype)

    def run(m: Engine) -> None:
        m.whole_warps(sites[0], "mma_sync")
        parts = [_held(m, p, i, s, (16, 16)) for p, i, s in zip(pointers[1:], indices[1:], sites[1:], strict=True)]
        a, b, c = parts
        result = wmma(a.values, b.values, c.values, accumulator=accumulator)
        poison = wmma_poison(a.origin != 0, b.origin != 0, c.origin != 0)
        worst = max(int(part.origin.max()) for part in parts)
        warps = int(m.mask.flags.reshape(-1, WARP).any(axis=1).sum())
        m.record.mma_count += warps
        m.record.flops += 2 * result.shape[1] * result.shape[2] * a.values.shape[2] * warps
        origin = np.where(poison, np.int32(worst), np.int32(0))
        _merge(m, m.memory[pointers[0].binding.slot], int(strip(indices[0](m))), result, origin)

    return run


# --- mfma: some elements of each fragment in each of 64 lanes -----------------------------------------------------
def _mfma(instruction: MatrixInstruction) -> Callable[[Scope, list[Expr]], Closure]:
    """``v_mfma`` of A, B and C, then three fields that are zero; sums as `fragments.mma` rounds them."""
    side, groups = instruction.side, WAVE // instruction.side
    count = side * side // WAVE
    factors = storage_dtype("bfloat16" if instruction.dtype == WORDS else instruction.dtype)
    words = 1 if instruction.dtype == "int8" else instruction.elements  # of a lane's factor, as LLVM has it
    result_dtype, wide = ("int32", np.int64) if instruction.dtype == "int8" else ("float32", np.float64)

    def lanes_of(matrix: Array) -> Array:
        """(wave, row, column) as a lane has it: (lanes, quads of rows)."""
        quads = matrix.reshape(-1, count // QUAD, groups, QUAD, side).transpose(0, 2, 4, 1, 3)
        return np.asarray(quads.reshape(-1, count))

    def make(scope: Scope, arguments: list[Expr]) -> Closure:
        parts = [compile_expression(scope, argument) for argument in arguments[:3]]
        site = scope.site("mfma")

        def factor(m: Engine, value: Value) -> tuple[Array, Array]:
            """(wave, line, group and element of it), and by (wave, line) the worst origin."""
            own = np.ascontiguousarray(in_lanes(strip(value), m.lanes.count, words)).view(factors).astype(np.float64)
            lines = own.reshape(-1, groups, side, instruction.elements).swapaxes(1, 2)
            origin = np.broadcast_to(aligned(origin_of(value), 2), (m.lanes.count, words))
            return lines.reshape(-1, side, instruction.depth), origin.reshape(-1, groups, side, words).max(axis=(1, 3))

        def run(m: Engine) -> Value:
            m.whole_warps(site, "mfma")
            (a, a_from), (b, b_from) = (factor(m, part(m)) for part in parts[:2])
            sums = parts[2](m)
            added = lanes_of(a @ b.swapaxes(1, 2)).astype(wide) + in_lanes(strip(sums), m.lanes.count, count)
            waves = int(m.mask.flags.reshape(-1, WAVE).any(axis=1).sum())
            m.record.mma_count += waves
            m.record.flops += 2 * WAVE * instruction.lane_products * waves
            lanes, poison = to_dtype(added, result_dtype), np.maximum(a_from[:, :, None], b_from[:, None, :])
            origin = np.maximum(lanes_of(poison), aligned(origin_of(sums), 2)).astype(np.int32)
            return Tainted(lanes, origin) if origin.any() else lanes

        return run

    return make


def install(scope: Scope) -> None:
    """Make these calls known to ``scope``."""
    for instruction in INSTRUCTIONS:
        scope.special_externs[instruction.name] = _mfma(instruction)
    scope.effects.update({
        "tirx.ptx_legacy.ldmatrix": _ldmatrix, "tirx.ptx_legacy.mma": _mma,
        "tirx.mma_fill_legacy": _mma_fill, "tirx.mma_fill": _mma_fill,
        "tirx.mma_store_legacy": _mma_store, "tirx.mma_store": _mma_store,
        "tirx.tvm_fill_fragment": _wmma_fill, "tirx.tvm_mma_sync": _wmma_mma,
        "tirx.tvm_load_matrix_sync": _wmma_move(load=True), "tirx.tvm_store_matrix_sync": _wmma_move(load=False),
    })  # fmt: skip
