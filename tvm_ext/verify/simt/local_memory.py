"""Registers: arrays that each lane has for itself, which remember what was never written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_ext.support.arrays import Array, DType

from .machine import Engine, Site
from .values import NEVER_WRITTEN, Tainted, Value, in_lanes, is_uniform, origin_of, strip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class View:
    """How an access sees a memory: ``dtype`` of an element, and whether ``n`` neighbours are one request.

    ``vector`` is false for a vector access that the code generator writes as scalar accesses, for want of a proof of
    alignment.
    """

    site: Site
    dtype: DType
    vector: bool = True


class LocalMemory:
    """An array of registers in each lane: ``data`` is (elements, lanes). Fresh memory holds nothing."""

    def __init__(self, size: int, dtype: DType, lanes: int) -> None:
        self.size = size
        self.data = np.zeros((size, lanes), dtype)
        self.origin = np.full((size, lanes), NEVER_WRITTEN, np.int32)
        self.sound = [False] * size  # element: all lanes have written it

    def read(self, m: Engine, view: View, index: Value) -> Value:
        if type(index) is int and 0 <= index < self.size and self.sound[index]:
            return self.data[index]
        where = m.decided(index, view.site, "an address")
        if is_uniform(where):
            return self._read_uniform(m, view, int(where))
        if where.ndim == 2 and where.shape[0] == 1:
            return self._read_rows(m, view, where[0])
        rows, lanes = self._positions(m, view, where)
        return self._tainted(m, view, self.data[rows, lanes], self.origin[rows, lanes], rows)

    def _read_uniform(self, m: Engine, view: View, index: int) -> Value:
        if not 0 <= index < self.size:
            index = int(self._bounded(m, view, np.array([index]))[0])
        if self.sound[index]:
            return self.data[index]
        return self._tainted(m, view, self.data[index], self.origin[index], index)

    def _read_rows(self, m: Engine, view: View, index: Array) -> Value:
        rows = self._bounded(m, view, index)
        if all(self.sound[i] for i in rows.tolist()):
            return self.data[rows].T
        return self._tainted(m, view, self.data[rows].T, self.origin[rows].T, rows)

    def write(self, m: Engine, view: View, index: Value, value: Value) -> None:
        if type(index) is int and type(value) is not Tainted and m.mask is m.lanes.valid and 0 <= index < self.size:
            self.data[index] = value
            if not self.sound[index]:
                self.origin[index], self.sound[index] = 0, True
            return
        where = m.decided(index, view.site, "an address")
        plain, origin = strip(value), origin_of(value)
        if is_uniform(where):
            where = np.array([[int(where)]])
            plain, origin = np.asarray(plain), np.asarray(origin)
            if plain.ndim == 1:
                plain = plain[:, None]
            if origin.ndim == 1:
                origin = origin[:, None]
        if where.ndim == 2 and where.shape[0] == 1:
            self._write_rows(m, self._bounded(m, view, where[0]), plain, origin)
            return
        rows, lanes = self._positions(m, view, where)
        active = np.broadcast_to(m.mask.flags if rows.ndim == 1 else m.mask.flags[:, None], rows.shape)
        lanes = np.broadcast_to(lanes, rows.shape)
        spread = in_lanes(plain, *self._shape(rows))
        self.data[rows[active], lanes[active]] = spread[active]
        self.origin[rows[active], lanes[active]] = in_lanes(origin, *self._shape(rows))[active]
        self.sound = [False] * self.size

    @staticmethod
    def _shape(rows: Array) -> tuple[int, int]:
        return (rows.shape[0], 1 if rows.ndim == 1 else rows.shape[1])

    def _write_rows(self, m: Engine, rows: Array, value: Value, origin: Any) -> None:
        """``value`` (lanes or 1, n or 1) to the same rows in each active lane."""
        whole = m.mask is m.lanes.valid
        flags = m.mask.flags
        for position, row in enumerate(rows.tolist()):
            one = _column(value, position)
            source = _column(origin, position)
            if whole:
                self.data[row] = one
                self.origin[row] = source
                self.sound[row] = not np.any(source)
            else:
                np.copyto(self.data[row], one, where=flags, casting="unsafe")
                np.copyto(self.origin[row], source, where=flags)
                self.sound[row] = self.sound[row] and not np.any(source)

    def _positions(self, m: Engine, view: View, where: Array) -> tuple[Array, Array]:
        rows = self._bounded(m, view, where)
        return rows, m.lanes.number if rows.ndim == 1 else m.lanes.number[:, None]

    def _bounded(self, m: Engine, view: View, index: Array) -> Array:
        wrong = (index < 0) | (index >= self.size)
        if not wrong.any():
            return index
        if index.shape[0] == m.lanes.count:
            flags = m.mask.flags if index.ndim == 1 else m.mask.flags[:, None]
            wrong = wrong & flags
        if wrong.any():
            lane = int(np.argwhere(wrong)[0][0]) if index.shape[0] == m.lanes.count else int(m.active_lanes()[0])
            tell_bounds(m, view, int(index[wrong][0]), lane, self.size, int(wrong.sum()))
        return np.clip(index, 0, self.size - 1)

    def _tainted(self, m: Engine, view: View, data: Array, origin: Array, element: Value) -> Value:
        """``data``, tainted where active lanes never wrote it."""
        active = origin if m.mask.index is None else origin[m.mask.index]
        if not active.any():
            return data
        fresh = active == NEVER_WRITTEN
        if not fresh.any():
            return Tainted(data, origin)
        lane = int(m.active_lanes()[np.argwhere(fresh)[0][0]])
        number = m.new_origin(view.site, int(np.asarray(element).flat[0]), lane)
        return Tainted(data, np.where(origin == NEVER_WRITTEN, np.int32(number), origin))


def _column(value: Value, position: int) -> Value:
    """Element ``position`` of a (lanes or 1, n or 1) vector, for all lanes; a scalar is the same for all."""
    if getattr(value, "ndim", 0) < 2:
        return value
    return value[:, position if value.shape[1] > 1 else 0]


def tell_bounds(m: Engine, view: View, element: int, lane: int, size: int, count: int) -> None:
    threads = (m.lanes.name(int(m.lanes.identity[lane])),)
    m.tell("out of bounds", view.site, element=element, threads=threads, detail=f"it has {size} elements", count=count)
