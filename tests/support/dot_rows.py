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
    BFMMLA,
    DOT_INSTRUCTIONS,
    TILE_INSTRUCTIONS,
    USDOT,
    USMMLA,
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
    "cpu-neoverse-v1": ("neoverse-v1", ()),  # as its row says
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
    in_vectors = [row for row in TILE_INSTRUCTIONS if row.tile is not None and not row.tile.registers]
    for row in (*DOT_INSTRUCTIONS, *in_vectors):
        if not all(target_has_feature(name, target) for name in row.features):
            stand_in(monkeypatch, row)


def stand_in(monkeypatch: pytest.MonkeyPatch, missing: DotInstruction) -> None:
    own = dot_ir.WRITERS[missing.name]

    def write(row: DotInstruction, *operands: Any) -> Any:
        return (model if row == missing else own)(row, *operands)

    monkeypatch.setitem(dot_ir.WRITERS, missing.name, write)


def model(row: DotInstruction, sums: Any, data: Any, weights: Any) -> Any:
    """What ``row`` does, in arithmetic that every CPU has."""
    if row.tile is None:
        return _dot(row, sums, data, weights)
    return _pairs(row, sums, data, weights)


def _pairs(row: DotInstruction, sums: Any, data: Any, weights: Any) -> Any:
    """2 x 2 sums by rows, each with what the row of its data and that of its weights (a lane's) give.

    Arm Architecture Reference Manual, USMMLA and BFMMLA: element 2 i + j gains the products of row i by row j. Two dot
    products of a word each do so, whose words are chosen here.
    """
    words = [tirx.reinterpret("int32x4", operand) for operand in (data, weights)]
    dot = BY_WORDS[row.name]
    for word in range(2):
        own = [_chosen(words[0], [word, word, word + 2, word + 2]), _chosen(words[1], [word, word + 2] * 2)]
        kinds = ["int32x4", "bfloat16x8" if row.data == "bfloat16" else "int8x16"]
        sums = _dot(dot, sums, *(tirx.reinterpret(kind, x) for kind, x in zip(kinds, own, strict=True)))
    return sums


def _chosen(words: Any, lanes: Any) -> Any:
    return tirx.Shuffle([words], [tirx.const(lane, "int32") for lane in lanes])


BY_WORDS = {
    pairs: next(row for row in DOT_INSTRUCTIONS if row.name == name)
    for pairs, name in ((USMMLA, USDOT), (BFMMLA, BFDOT))
}
"""By an instruction of pairs that of single rows."""


def _dot(row: DotInstruction, sums: Any, data: Any, weights: Any) -> Any:
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
