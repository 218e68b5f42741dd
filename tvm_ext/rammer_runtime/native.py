"""The native part of this room, ``libtvm_ext_rammer``: modules of tables, their options, what they recorded."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tvm_ffi

from tvm_ext import _native
from tvm_ext.errors import UnsupportedEnvironmentError

from .table import ExecutionTable

if TYPE_CHECKING:
    from tvm_ext._tvm import Module

LIBRARY = "tvm_ext_rammer"
KIND = "tvm_ext.rammer"
"""Of its modules."""
_TRACE_ROW = struct.Struct("<IIIIqq")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """One entry of a run: entry number ``entry`` of ``unit``'s stream, and the thread (0: the caller) that ran it.

    Times are of one steady clock, in nanoseconds.
    """

    unit: int
    entry: int
    thread: int
    start_ns: int
    end_ns: int


def is_available() -> bool:
    """Whether this installation has the runtime: Linux, and built with its native part."""
    return _native.can_load(LIBRARY)


def make_module(table: ExecutionTable, kernels: Sequence[Module]) -> Module:
    """A module with one function, ``table.name``, that runs the table with the kernels of the libraries ``kernels``.

    It can be a module's import, be exported with it and be loaded again where this package is installed.
    Raises ValueError with the reason where the native runtime refuses the table.
    """
    return module_of_bytes(table.to_bytes(), kernels)


def module_of_bytes(data: bytes, kernels: Sequence[Module]) -> Module:
    """`make_module` for what ``ExecutionTable.to_bytes`` returned."""
    module = _function("load")(data)
    for kernel in kernels:
        module.import_module(kernel)
    return module


def set_wait_limit(milliseconds: int | None) -> None:
    """Let a run that makes no progress for so long end in a RuntimeError that says what each vEU waits for.

    None, the default: wait for ever. For all tables of the process; a thread that hangs inside a kernel is given up,
    with the run's memory.
    """
    _function("set_wait_limit_ms")(-1 if milliseconds is None else milliseconds)


def set_thread_limit(threads: int | None) -> None:
    """Walk every table with at most so many threads, the caller counted; None: with as many as there are cores.

    A table may have more vEUs than that: threads then walk several streams.
    """
    _function("set_thread_limit")(threads or 0)


def record(module: Module, on: bool = True) -> None:
    """Have each run of ``module`` note when its entries started and ended, at about 50 ns each."""
    module.get_function("tvm_ext.rammer.record")(on)


def recorded(module: Module) -> list[TraceRow]:
    """What the last run of ``module`` that was recorded noted, in the order of the streams."""
    data = bytes(module.get_function("tvm_ext.rammer.trace")())
    return [
        TraceRow(unit=unit, entry=entry, thread=thread, start_ns=start, end_ns=end)
        for unit, entry, thread, _, start, end in _TRACE_ROW.iter_unpack(data)
    ]


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    if not is_available():
        raise UnsupportedEnvironmentError(
            "this installation lacks the native runtime of rTasks.",
            "install tvm-ext on Linux, from a wheel or with pip, which compiles it",
        )
    function: Callable[..., Any] = tvm_ffi.get_global_func(f"tvm_ext.rammer.{name}")
    return function
