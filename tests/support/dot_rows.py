"""CPUs with and without dot-product instructions, and a model of these in plain arithmetic for machines without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tvm import tirx

from tvm_ext._tvm import target_has_feature
from tvm_ext.devices.device_db import device_for_target, lookup
from tvm_ext.devices.dot_instructions import (
    BFDOT,
    DOT_INSTRUCTIONS,
    USDOT,
    VDPBF16PS,
    VPDPBUSD,
    VPMADDWD,
    WIDENED,
    DotInstruction,
)
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir import dot_ir

FEATURES = {
    "cpu-epyc-zen5": ("x86-64-v4", ("+avx512vnni", "+avx512bf16", "-prefer-256-bit")),
    "cpu-cascade-lake": ("x86-64-v4", ("-prefer-256-bit",)),
    "cpu-cascade-lake-avx2": ("x86-64-v3", ()),
    "cpu-zen3": ("x86-64-v3", ("+avxvnni",)),
    "cpu-neoverse-v1": ("neoverse-v1", ()),
}
"""Recorded rows, and the instruction set that kernels are constructed for there."""

INSTRUCTIONS = {
    "cpu-epyc-zen5": (VPDPBUSD, 64),
    "cpu-cascade-lake": (VPMADDWD, 64),
    "cpu-cascade-lake-avx2": (VPMADDWD, 32),
    "cpu-zen3": (VPDPBUSD, 32),
    "cpu-neoverse-v1": (USDOT, 16),
}

HALVES = {
    "cpu-epyc-zen5": (VDPBF16PS, 64),
    "cpu-cascade-lake": (WIDENED, 64),
    "cpu-cascade-lake-avx2": (WIDENED, 32),
    "cpu-zen3": (WIDENED, 32),
    "cpu-neoverse-v1": (BFDOT, 16),
}
"""Of bytes and of bfloat16."""


def row_of(name: str) -> DeviceSpec:
    mcpu, attributes = FEATURES[name]
    pairs: dict[str, Any] = {"kind": "llvm", "mcpu": mcpu}
    if attributes:
        pairs["mattr"] = attributes
    if mcpu.startswith("neoverse"):
        pairs["mtriple"] = "aarch64-linux-gnu"
    return replace(lookup(name), target=tuple(sorted(pairs.items())))


def use_models_of_missing_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests' target lacks is computed by `model`."""
    target = device_for_target("llvm")[1]
    for row in DOT_INSTRUCTIONS:
        if not all(target_has_feature(name, target) for name in row.features):
            stand_in(monkeypatch, row)


def stand_in(monkeypatch: pytest.MonkeyPatch, missing: DotInstruction) -> None:
    own = dot_ir.WRITERS[missing.name]

    def write(row: DotInstruction, *operands: Any) -> Any:
        return (model if row == missing else own)(row, *operands)

    monkeypatch.setitem(dot_ir.WRITERS, missing.name, write)


def model(row: DotInstruction, sums: Any, data: Any, weights: Any) -> Any:
    """The sum of products byte by byte: a word moved up until the byte is its uppermost, then down with its sign.

    Of bfloat16: two products of float32.
    """
    if row.data == "bfloat16":
        return dot_ir.WRITERS[WIDENED](row, sums, data, weights)
    lanes = row.register_bytes // 4

    def all_lanes(value: int, kind: str) -> Any:
        return tirx.Broadcast(tirx.const(value, kind), lanes)

    words = {kind: tirx.reinterpret(f"{kind}x{lanes}", x) for kind, x in (("uint32", data), ("int32", weights))}
    for place in range(row.group):
        up = 8 * (row.group - 1 - place)
        bytes_ = [tirx.shift_right(tirx.shift_left(x, all_lanes(up, k)), all_lanes(24, k)) for k, x in words.items()]
        sums = sums + tirx.Cast(f"int32x{lanes}", bytes_[0]) * bytes_[1]
    return sums
