"""Instructions that add several products of narrow numbers to each wide sum of a register: a table with a row for each.

Worked example, vpdpbusd on zmm registers: each of 16 sums of 32 bits gains four products of unsigned by signed bytes,
so that one instruction does what four multiply-adds of float32 do. Of bfloat16, vdpbf16ps adds two to each of 16 sums
of float32; a Zen 5 starts two of either in a cycle, as of multiply-adds (measured). Which rows a CPU has, the features
of its target say, which for the machine at hand are those that the operating system lists.

A tile instruction does so for several rows of data and several groups at once. Intel's AMX has registers of 1 KiB for
it: 16 x 64 bytes by 64 x 16 to 16 x 16 sums. Arm's has vector registers: 2 x 8 bytes by 8 x 2 to 2 x 2 sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tvm_ext._tvm import Target, target_has_feature
from tvm_ext.support.arithmetic import ceil_div

from .hal import DeviceSpec
from .rows.cpus import TargetPairs


@dataclass(frozen=True, kw_only=True, slots=True)
class DotInstruction:
    """``group`` products of ``data`` by ``weights`` are added to each of a register's ``sums``.

    ``operations`` are those that the pipes of multiply-adds start for a register of sums; ``operand_registers`` hold
    one register of an operand as the instruction takes it. A target has it with all of ``features``.
    """

    name: str
    data: str
    weights: str
    sums: str
    group: int
    register_bytes: int
    features: tuple[str, ...]
    operations: float = 1.0
    operand_registers: int = 1
    tile: TileUnit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TileUnit:
    """The matrix unit of a tile instruction: it takes up to ``rows`` rows of up to ``groups`` groups of data.

    A row of a tile is a vector register's bytes. ``registers`` of tiles hold sums and operands; ``cycles`` pass until
    the next instruction may start, ``latency_cycles`` until one on the same sums may. Without registers of its own, a
    tile is ``rows`` vector registers, each with sums of all rows; the pipes of multiply-adds start its instructions.
    """

    rows: int
    groups: int
    registers: int = 0
    cycles: float = 0.0
    latency_cycles: float = 0.0


AMX_UNIT = TileUnit(rows=16, groups=16, registers=8, cycles=16, latency_cycles=52)
"""Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on Intel AMX: throughput and latency of TDP*.

Smaller tiles are taken to last as long. Never measured here.
"""
MMLA_UNIT = TileUnit(rows=2, groups=2)
"""Arm Neoverse V1 and N2 Software Optimization Guides: as many matrix multiply-accumulates start in a cycle as
multiply-adds, 4 and 2. Both groups are always taken.
"""


def _row(
    name: str,
    register_bytes: int,
    *features: str,
    types: tuple[str, str, str],
    group: int,
    operations: float,
    operand_registers: int,
) -> DotInstruction:
    data, weights, sums = types
    return DotInstruction(
        name=name,
        data=data,
        weights=weights,
        sums=sums,
        group=group,
        register_bytes=register_bytes,
        features=features,
        operations=operations,
        operand_registers=operand_registers,
    )


_bytes = partial(_row, types=("uint8", "int8", "int32"), group=4)
_halves = partial(_row, types=("bfloat16", "bfloat16", "float32"), group=2)

VPDPBUSD, VPMADDWD, VDPBF16PS, WIDENED = "vpdpbusd", "vpmaddwd", "vdpbf16ps", "widened"
USDOT, BFDOT, USMMLA, BFMMLA = "usdot", "bfdot", "usmmla", "bfmmla"
TDPBUSD, TDPBF16PS = "tdpbusd", "tdpbf16ps"

DOT_INSTRUCTIONS = (
    _bytes(VPDPBUSD, 64, "avx512vnni", operations=1, operand_registers=1),
    _bytes(VPDPBUSD, 32, "avxvnni", operations=1, operand_registers=1),
    _bytes(VPDPBUSD, 32, "avx512vnni", "avx512vl", operations=1, operand_registers=1),
    # Bytes at even and at odd places, widened to 16 bits: two multiplications and two additions, which have other
    # pipes, too. (vpmaddubsw saturates: 255 * 127 * 2 passes 16 bits.)
    _bytes(VPMADDWD, 64, "avx512bw", operations=3, operand_registers=2),
    _bytes(VPMADDWD, 32, "avx2", operations=3, operand_registers=2),
    _halves(VDPBF16PS, 64, "avx512bf16", operations=1, operand_registers=1),
    _halves(VDPBF16PS, 32, "avx512bf16", "avx512vl", operations=1, operand_registers=1),
    # Either half of a word is the upper half of a float32: two multiply-adds, and what widens the weights.
    _halves(WIDENED, 64, "avx512f", operations=3, operand_registers=2),
    _halves(WIDENED, 32, "avx2", "fma", operations=3, operand_registers=2),
    # Armv8.6; a Neoverse V1 starts four of either in a cycle, as of multiply-adds (Arm's guide).
    _bytes(USDOT, 16, "i8mm", operations=1, operand_registers=1),
    _halves(BFDOT, 16, "neon", "bf16", operations=1, operand_registers=1),
)
"""The better ones of a type first."""

TILE_INSTRUCTIONS = (
    replace(_bytes(TDPBUSD, 64, "amx-tile", "amx-int8", operations=1, operand_registers=1), tile=AMX_UNIT),
    replace(_halves(TDPBF16PS, 64, "amx-tile", "amx-bf16", operations=1, operand_registers=1), tile=AMX_UNIT),
    replace(_bytes(USMMLA, 16, "i8mm", operations=1, operand_registers=2), tile=MMLA_UNIT),
    replace(_halves(BFMMLA, 16, "neon", "bf16", operations=1, operand_registers=2), tile=MMLA_UNIT),
)
"""Beside them a CPU has one of `DOT_INSTRUCTIONS` for the same types, which serves what has too few rows."""


def dot_instruction(
    device: DeviceSpec, data: str, weights: str, sums: str, rows: Sequence[DotInstruction] = DOT_INSTRUCTIONS
) -> DotInstruction | None:
    """The best instruction of ``device`` for these types among ``rows``; None where it has none."""
    types = (data, weights, sums)
    fitting = (row for row in rows if (row.data, row.weights, row.sums) == types)
    return next((row for row in fitting if has_row(device, row)), None)


def has_row(device: DeviceSpec, row: DotInstruction) -> bool:
    """Whether kernels for ``device`` may use ``row``."""
    fits = device.kind == "cpu" and row.register_bytes == device.register_bytes
    return fits and has_features(device.target, row.features)


def whole_depth(depth: int, row: DotInstruction, tiles: DotInstruction | None) -> int:
    """``depth`` products of a sum rounded up to whole groups of ``row``, and to even rows of ``tiles``.

    Worked example, 100 bytes: 25 groups of 4, of which a row of a tile takes 16. Two rows of 13 are 104.
    """
    groups = ceil_div(depth, row.group)
    if tiles is not None and tiles.tile is not None:
        steps = ceil_div(groups, tiles.tile.groups)
        groups = steps * ceil_div(groups, steps)
    return groups * row.group


@functools.lru_cache(maxsize=256)
def has_features(pairs: TargetPairs, features: tuple[str, ...]) -> bool:
    """Whether a target of ``pairs`` has all of ``features``, as LLVM names them."""
    target = Target({key: list(value) if isinstance(value, tuple) else value for key, value in pairs})
    return all(bool(target_has_feature(name, target)) for name in features)
