"""The device tables' front: rows by name, and the row that belongs to a TVM target."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from tvm_ext import _tvm
from tvm_ext._tvm import Target
from tvm_ext.errors import TargetError
from tvm_ext.options import recorded_cpu, usable_core_count

from .cpu_info import CHECKED_ARM_FEATURES, CHECKED_X86_FEATURES, CpuNeeds, read_cpu_info
from .device_facts import with_unit_count
from .hal import DeviceSpec, Fact
from .probe import isa_of, probe_cpu
from .row_files import is_row_file, read_row
from .rows import cpus
from .rows.accelerators import ACCELERATOR_ROWS
from .rows.amd import AMD_ROWS
from .rows.cpus import CPU_ROWS, Isa
from .rows.microarchitectures import MICROARCHITECTURE_ROWS
from .rows.recorded_cpus import RECORDED_ROWS

ROWS: tuple[DeviceSpec, ...] = (*CPU_ROWS, *MICROARCHITECTURE_ROWS, *RECORDED_ROWS, *ACCELERATOR_ROWS, *AMD_ROWS)
HOST_NAMES = ("cpu", "llvm", "host")
"""Names of this machine's CPU, which has no row but is probed."""

DEFAULT_ROWS: Mapping[str, str] = MappingProxyType({"cuda": "nvidia-a100", "rocm": "amd-mi50", "opencl": "nvidia-v100"})
"""Rows of the GPU targets that say nothing but their kind. OpenCL C is portable: its row gives sizes, not code."""

TargetLike: TypeAlias = "Target | str | dict[str, Any]"


def names() -> tuple[str, ...]:
    """The names of all devices: ``cpu`` (this machine) and the rows of the tables."""
    return ("cpu", *(row.name for row in ROWS))


def lookup(name: str) -> DeviceSpec:
    """The device called ``name`` (any case; aliases such as "v100", "nvidia/nvidia-a100"); "cpu" is this machine.

    "opencl" is a GPU as OpenCL C reaches it; what ends in ".json" is a row file, or a build's report, and its device.
    Raises `TargetError` with the nearest names where there is none.
    """
    found = _find(name)
    if found is not None:
        return found
    if _normalised(name) == "opencl":
        return as_opencl(_default_row("opencl"))
    if _normalised(name) in HOST_NAMES:
        return host_cpu()
    known = [*names(), *(alias for row in ROWS for alias in row.aliases)]
    raise TargetError(f"there is no device called {name!r} in the tables.", _suggestions(name, known, names()))


def chosen_device(name: str, target_device: DeviceSpec) -> DeviceSpec:
    """The row ``name``, to construct for instead of the target's own; raises TargetError for one of another kind."""
    device = lookup(name)
    if target_device.kind == "opencl" and device.kind in ("cuda", "rocm"):
        return as_opencl(device)
    if device.kind != target_device.kind:
        raise TargetError(
            f"option device={name!r} is a {device.kind} device, but the target's is {target_device.name}, "
            f"a {target_device.kind} device.",
            f"choose a {target_device.kind} row (`tvm-ext devices` lists them), or pass {name!r} as the target",
        )
    return device


def device_for_target(target: TargetLike) -> tuple[DeviceSpec, Target]:
    """The device that ``target`` means, and the stock TVM target to build with.

    ``target``: what stock TVM accepts (a kind, a dict, a tag, a Target), the name of a device or a row file. ``"llvm"``
    without a model or features means this machine's CPU with all it has, where stock TVM means SSE2; explicit ``mcpu``
    or ``mattr`` is honoured, and gives the table row of its instruction set unless it is this machine's own.
    ``num-cores`` is honoured; without it a target that can run here gets the cores that this process may use.
    ``"cuda"``, ``"rocm"`` and ``"opencl"`` alone mean a row each, see `DEFAULT_ROWS`. Raises TargetError for a misspelt
    target (with the nearest names), one without a row, or a CPU that is neither x86-64 nor AArch64.
    """
    if isinstance(target, str):
        row = _find(target)
        if row is not None:
            return row, _target_of(row)
        if _normalised(target) in HOST_NAMES:
            target = {"kind": "llvm"}
        elif _normalised(target) in ("cuda", "rocm"):
            return _default_row(_normalised(target)), _target_of(_default_row(_normalised(target)))
    resolved = _resolve(target)
    kind = str(resolved.kind.name)
    if kind == "llvm":
        return _cpu_device(resolved)
    if kind in ("cuda", "rocm"):
        return _gpu_device(resolved, kind), resolved
    if kind == "opencl":
        return as_opencl(_default_row(kind)), resolved
    raise TargetError(
        f"target kind {kind!r} has no device row.",
        f"use llvm, cuda, rocm or opencl, or name a device: {', '.join(names())}",
    )


def host_cpu(*, unit_count: int | None = None) -> DeviceSpec:
    """This machine's CPU: probed, or the row of a CPU that the environment names in its place.

    Raises `TargetError` where the environment names none.
    """
    row = _recorded_host()
    if row is None:
        return probe_cpu(unit_count=unit_count, info=read_cpu_info())
    standing_in = replace(row, name="cpu", description=f"in place of this machine: {row.description}", aliases=())
    return with_unit_count(standing_in, unit_count or row.unit_count)


def _recorded_host() -> DeviceSpec | None:
    name = recorded_cpu()
    if name is None:
        return None
    row = _find(name)
    if row is None or row.kind != "cpu":
        known = [item.name for item in ROWS if item.kind == "cpu"]
        raise TargetError(
            f"TVM_EXT_CPU is {name!r}, which is no CPU of the tables.", _suggestions(name, known, (*known,))
        )
    return row


def _host_isa() -> Isa:
    """The instruction set that kernels for this machine are constructed with."""
    row = _recorded_host()
    if row is None:
        return isa_of(read_cpu_info())
    return _isa_of_target(_target_of(row), _as_dict(row), read_cpu_info().machine)


def _default_row(kind: str) -> DeviceSpec:
    row = _find(DEFAULT_ROWS[kind])
    assert row is not None, kind
    return row


def as_opencl(row: DeviceSpec) -> DeviceSpec:
    """The GPU ``row`` as OpenCL C reaches it: without matrix units, and with 48 KB of local memory at most."""
    assert row.kind in ("cuda", "rocm"), row.name
    return replace(
        row,
        kind="opencl",
        description=f"{row.description}, through OpenCL",
        aliases=(),
        target=(("kind", "opencl"),),
        tensor_core_shape=None,
        layers=tuple(replace(layer, opt_in_capacity_bytes=None) for layer in row.layers),
        peak_gflops=tuple((key, rate) for key, rate in row.peak_gflops if not key.endswith("_tensor")),
    )


def is_bare(target: TargetLike) -> bool:
    """Whether ``target`` names a kind of GPU alone ("cuda"), which leaves open what device is meant."""
    return isinstance(target, str) and _normalised(target) in DEFAULT_ROWS


def cpu_needs(target: Target) -> CpuNeeds:
    """What code for the resolved ``target`` asks of the CPU that runs it; nothing for the target of a GPU."""
    if str(target.kind.name) != "llvm":
        return CpuNeeds()
    machine = _architecture(str(target.attrs.get("mtriple", ""))) or read_cpu_info().machine
    return CpuNeeds(machine=machine, features=_checked_features(machine, str(target)))


def as_compiled(device: DeviceSpec, target: Target) -> DeviceSpec:
    """``device`` for code of ``target``, which may lack features of the CPU's: kernels must not ask for those.

    Worked example: a build for ``mcpu=x86-64-v4`` on a CPU that has AVX512_VNNI besides.
    """
    if device.kind != "cpu" or set(cpu_needs(_target_of(device)).features) <= set(cpu_needs(target).features):
        return device
    options = {str(key): value for key, value in target.attrs.items() if str(key) in ("mtriple", "mcpu", "mattr")}
    code = {key: str(value) if isinstance(value, str) else tuple(map(str, value)) for key, value in options.items()}
    return replace(device, target=cpus.llvm_target(code))


@lru_cache(maxsize=64)
def _checked_features(machine: str, target: str) -> tuple[str, ...]:
    """Asking LLVM for one takes half a millisecond, and every build asks for all of them, twice."""
    checked = {"x86_64": CHECKED_X86_FEATURES, "aarch64": CHECKED_ARM_FEATURES}.get(machine, ())
    resolved = Target(json.loads(target))
    return tuple(name for name in checked if _tvm.target_has_feature(name, resolved))


@dataclass(frozen=True, kw_only=True, slots=True)
class FactRow:
    """One line of a device's table, ready to print."""

    quantity: str
    value: str
    source: str
    used: bool


def describe(spec: DeviceSpec, *, every_source: bool = False) -> tuple[FactRow, ...]:
    """The device's numbers with unit and source; with ``every_source`` those too that another source overrules."""
    return tuple(
        FactRow(quantity=_quantity(fact.field, spec), value=_value(fact), source=fact.source, used=fact.used)
        for fact in spec.facts
        if fact.used or every_source
    )


def _quantity(path: str, spec: DeviceSpec) -> str:
    """The path in words, ``layers.L1.capacity_bytes`` as "L1 (shared memory) capacity"; the value carries the unit."""
    name = path.removeprefix("layers.")
    for layer in spec.layers:
        name = name.replace(f"{layer.name}.", f"{layer.name} ({layer.description}) ")
    for suffix in ("_bytes", "_gb_per_s", "_ghz", "_us", "_ns"):
        name = name.removesuffix(suffix)
    return name.replace("peak_gflops.", "peak ").replace("_", " ")


def _value(fact: Fact) -> str:
    """1536 bytes as "1.5 KiB", 12480.0 GFLOP/s as "12480 GFLOP/s"; a shape or version is printed as it is written."""
    if isinstance(fact.value, str):
        return fact.value
    if fact.unit != "bytes" or fact.value < 1024:
        return f"{fact.value:.5g} {fact.unit}" if fact.value < 1e5 else f"{fact.value:.0f} {fact.unit}"
    scale, unit = (1024 * 1024, "MiB") if fact.value >= 1024 * 1024 else (1024, "KiB")
    return f"{fact.value / scale:g} {unit}"


def _normalised(name: str) -> str:
    return name.strip().lower()


def _find(name: str) -> DeviceSpec | None:
    if is_row_file(name):
        return read_row(Path(name.strip()))
    wanted = _normalised(name)
    return next((row for row in ROWS if wanted == row.name or wanted in row.aliases), None)


def _target_of(row: DeviceSpec) -> Target:
    if not row.target:
        raise TargetError(
            f"device {row.name!r} can be constructed for, but stock TVM has no code generator for it.",
            f"build for another device: {', '.join(item.name for item in ROWS if item.target)}; or let tvm-ext compile "
            f"--target {row.name} write vertices and exchange plans, which only IPUs have",
        )
    return _tvm.Target(_as_dict(row))


def _as_dict(row: DeviceSpec) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in row.target}


def _resolve(target: TargetLike) -> Target:
    if isinstance(target, _tvm.Target):
        return target
    try:
        return _tvm.Target(target)
    except (ValueError, TypeError) as error:
        raise _bad_target(target, error) from error


def _bad_target(target: TargetLike, error: Exception) -> TargetError:
    word = target if isinstance(target, str) else str(target.get("kind", "")) if isinstance(target, dict) else ""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    kinds = [str(kind) for kind in _tvm.Target.list_kinds()]
    if isinstance(target, dict) and word in kinds:
        return TargetError(f"target {target!r} is not accepted by TVM: {reason}", "correct the named option")
    known = [*kinds, *map(str, _tvm.tvm.target.list_tags()), *names(), *(a for row in ROWS for a in row.aliases)]
    return TargetError(f"target {target!r} is unknown: {reason}", _suggestions(word, known, (*names(), "llvm", "cuda")))


def _suggestions(word: str, known: list[str], fallback: tuple[str, ...]) -> str:
    nearest = difflib.get_close_matches(_normalised(word), dict.fromkeys(known), n=4, cutoff=0.6)
    if nearest:
        return "did you mean " + " or ".join(repr(item) for item in nearest) + "?"
    return "known names are " + ", ".join(fallback)


def _cpu_device(target: Target) -> tuple[DeviceSpec, Target]:
    attributes = {str(key): value for key, value in target.attrs.items()}
    cores = _core_count(attributes)
    host = read_cpu_info()
    explicit = [key for key in ("mcpu", "mattr") if key in attributes]
    foreign = _architecture(str(attributes.get("mtriple", ""))) not in ("", host.machine)
    if not explicit and not foreign:
        spec = host_cpu(unit_count=cores)
        return spec, _merge_host(target, attributes, spec)
    isa = _isa_of_target(target, attributes, host.machine)
    if not foreign and isa is _host_isa():
        return host_cpu(unit_count=cores), target
    row = next(row for row in CPU_ROWS if row.name == isa.row)
    cores = cores or (None if foreign else usable_core_count())
    return (with_unit_count(row, cores) if cores else row), target


def _core_count(attributes: dict[str, Any]) -> int | None:
    cores = attributes.get("num-cores")
    if cores is not None and int(cores) < 1:
        raise TargetError(f"target option num-cores is {int(cores)}.", "give a number from 1 up, or leave it out")
    return None if cores is None else int(cores)


def _architecture(triple: str) -> str:
    """The first part of an LLVM triple, spelt as Linux does; empty for the triple of this machine."""
    architecture = triple.partition("-")[0]
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(architecture, architecture)


def _merge_host(target: Target, attributes: dict[str, Any], spec: DeviceSpec) -> Target:
    """The user's target with this CPU's model and features put in; whatever else it says is kept.

    The ``feature.*`` attributes of an Arm target are left out: TVM derives them anew from the model.
    """
    said = {key: value for key, value in attributes.items() if not key.startswith("feature.")}
    config = {"kind": "llvm", **said, **_as_dict(spec), "num-cores": spec.unit_count}
    return _tvm.Target(config, target.host) if target.host is not None else _tvm.Target(config)


ISAS_OF_MACHINE: Mapping[str, tuple[Isa, ...]] = MappingProxyType({"x86_64": cpus.X86_ISAS, "aarch64": (cpus.NEON,)})
"""Instruction sets best first. A 32-bit x86 has SSE2 and AVX too, but half of the registers, and no row."""


def _isa_of_target(target: Target, attributes: dict[str, Any], machine: str) -> Isa:
    _check_model(target, attributes)
    for isa in ISAS_OF_MACHINE.get(_architecture(str(attributes.get("mtriple", ""))) or machine, ()):
        if all(_tvm.target_has_feature(name, target) for name in isa.features):
            return isa
    raise TargetError(
        f"target {target} is neither a 64-bit x86 with SSE2, AVX2 or AVX-512 nor an AArch64 with NEON.",
        "name an mcpu that is one of them (x86-64, haswell, x86-64-v4, neoverse-n1), or leave mtriple, mcpu and mattr "
        "out, which means this machine",
    )


def _check_model(target: Target, attributes: dict[str, Any]) -> None:
    """LLVM only logs an unknown model or feature and goes on without; here both are errors."""
    triple = {"mtriple": str(attributes["mtriple"])} if "mtriple" in attributes else {}
    plain = _tvm.Target({"kind": "llvm", **triple})
    known = [str(item) for item in _tvm.tvm.target.codegen.llvm_get_cpu_archlist(plain)]
    model = str(attributes.get("mcpu", ""))
    if model and model not in known:
        raise TargetError(f"LLVM knows no mcpu {model!r} for this target.", _suggestions(model, known, ("x86-64-v3",)))
    for item in map(str, attributes.get("mattr", ())):
        if item.startswith("+") and not _tvm.target_has_feature(item[1:], target):
            raise TargetError(f"LLVM knows no CPU feature {item!r} for this target.", "correct mattr or leave it out")


def _gpu_device(target: Target, kind: str) -> DeviceSpec:
    key = "arch" if kind == "cuda" else "mcpu"
    value = str(target.attrs.get(key, ""))
    row = _find(value)
    if row is not None and row.kind == kind:
        return row
    rows = [item for item in ROWS if item.kind == kind]
    listing = ", ".join(f"{dict(row.target)[key]} ({row.name})" for row in rows)
    near = difflib.get_close_matches(value, [str(dict(row.target)[key]) for row in rows], n=1, cutoff=0.75)
    guess = f"did you mean {near[0]!r}? Otherwise " if near else ""
    raise TargetError(f"{kind} target with {key}={value!r} has no device row.", f"{guess}name one that has: {listing}")
