"""Kernels with Intel AMX on machines without it: their tile instructions become calls of a model in C++.

The model (`amx_machine.cc`) has tile registers, their configuration and the processor's faults. What is compiled is the
kernel that construction made, with these instructions alone replaced.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tvm_ext._tvm import Call, PrimFunc, Stmt, structural_map, structural_walk, tirx
from tvm_ext.devices import dot_instructions
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir import tile_ir
from tvm_ext.support.limited_process import run_limited
from tvm_ext.toolchains import host_compiler
from tvm_ext.toolchains.remedies import HOST

COMPILE_LIMIT_S = 60
NAMES = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd64", "tilestored64", "tdpbusd", "tdpbf16ps")


def amx_row() -> DeviceSpec:
    """Two cores of a Xeon with AMX, as recorded: the tests' CPU runs its kernels, tiles by the model."""
    return lookup("cpu-xeon-amx-tiles")


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="amx-machine-") as folder:
        path, source = Path(folder) / "amx_machine.so", Path(__file__).with_suffix(".cc")
        command = [host_compiler.compiler(), "-O2", "-std=c++17", "-shared", "-fPIC", "-o", str(path), str(source)]
        run_limited(command, COMPILE_LIMIT_S, Path(folder), remedies=HOST)
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.amx_fault.restype = ctypes.c_char_p
    library.amx_count.restype = ctypes.c_int64
    return library


@functools.cache
def _intrinsics() -> dict[int, str]:
    calls = {name: tirx.call_llvm_intrin("void", f"llvm.x86.{name}") for name in NAMES}
    return {int(call.args[0].value): name for name, call in calls.items()}


Change = Callable[[list[Any]], list[Any] | None]


def _name(call: Call) -> str | None:
    """Of a tile instruction; None of other calls."""
    is_intrinsic = getattr(call.op, "name", "") == "tirx.call_llvm_intrin"
    return _intrinsics().get(int(call.args[0].value)) if is_intrinsic else None


def emulated(kernel: PrimFunc, changes: Mapping[str, Change] | None = None) -> PrimFunc:
    """``kernel`` with its tile instructions as calls of the model, which the process has from then on.

    ``changes`` make mutants: of an instruction's arguments others, or None to leave it out.
    """
    _library()

    def replaced(statement: Stmt) -> Stmt:
        name = _name(statement.value) if isinstance(statement.value, Call) else None
        if name is None:
            return statement
        arguments = (changes or {}).get(name, list)(list(statement.value.args[1:]))
        if arguments is None:
            return tirx.Evaluate(tirx.const(0, "int32"))
        return tirx.Evaluate(tirx.call_extern("void", f"amx_{name}", *arguments))

    return kernel.with_body(structural_map(kernel.body, (tirx.Evaluate, replaced)))


def tile_calls(kernel: PrimFunc) -> list[str]:
    """The tile instructions of ``kernel``, in order."""
    found: list[str] = []

    def note(call: Call) -> None:
        name = _name(call)
        if name is not None:
            found.append(name)

    structural_walk(kernel.body, (Call, note), order="pre")
    return found


def emulate_in_builds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of builds whose kernels are constructed for tiles and have the model's calls in their machine code."""
    _library()
    has = dot_instructions.has_features

    def tile_call(name: str, *arguments: Any) -> Stmt:
        return tirx.Evaluate(tirx.call_extern("void", f"amx_{name}", *arguments))

    monkeypatch.setattr(
        dot_instructions, "has_features", lambda target, features: "amx-tile" in features or has(target, features)
    )
    monkeypatch.setattr(tile_ir, "tile_call", tile_call)
    return {"device": amx_row().name}


def fault() -> str | None:
    """The first fault since the last call."""
    text = _library().amx_fault()
    return None if text is None else text.decode()


def counts() -> dict[str, int]:
    """How often each instruction ran since the last call."""
    return {name: _library().amx_count(number) for number, name in enumerate(NAMES)}
