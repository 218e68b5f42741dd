"""Under which key a store keeps what was measured of a kernel's configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm_ext._environment import SUPPORTED_VERSIONS, installed_version
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.serialise import to_json

from .tensor_expr import Access, LinearIndex, TensorExpr

TILES, WINDOWS, ATTENTION, CHAINS = "cpu_tile", "cpu_window", "cpu_attention", "cpu_chain"
"""`MeasuredWorkload.kind` of what has `CpuTile`s, `WindowTile`s, `AttentionTiles`, `PanelTiles` for configurations."""

ROWS, WINOGRAD, JOINT = "cpu_rows", "cpu_winograd", "cpu_joint"
"""Of what has `RowTiles`, `WinogradTile`s; of kernels of several parts with a choice each, which have `JointTiles`."""

GPU_TILES = "gpu_tile"
"""Of what has `GpuTile`s."""

KERNELS: Mapping[str, str] = dict.fromkeys((TILES, WINDOWS, ATTENTION, CHAINS, ROWS, WINOGRAD, JOINT, GPU_TILES), "1")
"""Versions of our kernels by kind: a new one where the emitter makes other code of the same configuration."""


def tile_workload(expr: TensorExpr, device: DeviceSpec, kind: str = TILES) -> MeasuredWorkload:
    """The key of ``expr``, an anchor in canonical form with what is fused to it, on ``device``.

    Names do not count: a convolution is the same workload in every model.
    """
    dtype = ",".join((*(access.dtype for access in expr.inputs), expr.output.dtype))
    return replace(tile_machine(device, kind), structure=to_json(without_names(expr)), dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _JointStructure:
    """The parts of a kernel, each by its kind and its own structure."""

    parts: tuple[tuple[str, str], ...]


def joint_workload(parts: Sequence[MeasuredWorkload], device: DeviceSpec) -> MeasuredWorkload:
    """The key of a kernel of several ``parts``."""
    structure = _JointStructure(parts=tuple((part.kind, part.structure) for part in parts))
    dtype = ";".join(part.dtype for part in parts)
    return replace(tile_machine(device, JOINT), structure=to_json(structure), dtype=dtype)


def tile_machine(device: DeviceSpec, kind: str = TILES) -> MeasuredWorkload:
    """What all workloads of a kind have in common on ``device``: a record that differs in it says nothing of that."""
    return MeasuredWorkload(
        kind=kind,
        structure="",
        layout="",
        dtype="",
        device=device.description,
        instructions=instructions_of(device),
        threads=device.unit_count if device.kind == "cpu" else 0,
        versions=(
            ("apache-tvm", installed_version("apache-tvm") or SUPPORTED_VERSIONS["apache-tvm"]),
            (kind, KERNELS[kind]),
        ),
    )


def instructions_of(device: DeviceSpec) -> str:
    """What of a device's instruction set its code may use, as `MeasuredWorkload` names it."""
    target: dict[str, Any] = dict(device.target)
    own = str(target.get("mcpu", target.get("arch", "")))
    return " ".join((own, *target.get("mattr", ()))) or device.name


def without_names(expr: TensorExpr) -> TensorExpr:
    """``expr`` with its axes, tensors and fused computations called by their numbers."""
    axes = {axis.name: f"a{number}" for number, axis in enumerate(expr.axes)}
    tensors = {name: f"t{number}" for number, name in enumerate(dict.fromkeys(a.tensor for a in expr.accesses))}

    def access(own: Access) -> Access:
        indices = tuple(
            None
            if index is None
            else LinearIndex(
                terms=tuple((axes[name], coefficient) for name, coefficient in index.terms), constant=index.constant
            )
            for index in own.indices
        )
        gathers = tuple(tuple(axes.get(name, "") for name in names) for names in own.gathers)
        return replace(own, tensor=tensors[own.tensor], indices=indices, gathers=gathers)

    return replace(
        expr,
        name="",
        axes=tuple(replace(axis, name=axes[axis.name]) for axis in expr.axes),
        inputs=tuple(access(own) for own in expr.inputs),
        output=access(expr.output),
        prologue=tuple(replace(fused, name="", extra_inputs=()) for fused in expr.prologue),
        epilogue=tuple(replace(fused, name="", extra_inputs=()) for fused in expr.epilogue),
    )
