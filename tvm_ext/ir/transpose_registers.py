"""Transposes SIMD registers by interleaving them pairwise, so that a lane's elements become contiguous in memory."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Buffer, Expr, Stmt, Var, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import index, load, store


def transpose_registers(
    source: Buffer, rows: Sequence[int], first: int, width: int, target: Buffer, offset: int
) -> list[Stmt]:
    """Statements that put ``source[rows[r], first + lane]`` into ``target[offset + lane * len(rows) + r]``.

    ``len(rows)`` is a power of two; ``width`` is the lanes of one register. Each of the log2(rows) rounds interleaves
    register i with register i + half: 16 registers of 16 lanes take 64 shuffles for 256 elements.

    Worked example, 4 rows a, b, c, d: round 1 interleaves a with c and b with d (a0 c0 a1 c1 ..., b0 d0 b1 d1 ...),
    round 2 interleaves these: a0 b0 c0 d0 a1 b1 ...
    """
    if width == 1:
        return [
            store(target, load(source, [index(row), index(first)]), [index(offset + r)]) for r, row in enumerate(rows)
        ]
    statements: list[Stmt] = []

    def bound(value: Expr) -> Expr:
        variable = Var("lanes", f"{dtype_of(source)}x{width}")
        statements.append(tirx.Bind(variable, value))
        return variable

    taken = {row: bound(load(source, [index(row), tirx.Ramp(index(first), index(1), width)])) for row in rows}
    registers = [taken[row] for row in rows]
    half = len(rows) // 2
    for _ in range(len(rows).bit_length() - 1):
        pairs = list(zip(registers[:half], registers[half:], strict=True))
        registers = [bound(_interleave(a, b, width, part)) for a, b in pairs for part in (0, 1)]
    for i, register in enumerate(registers):
        statements.append(store(target, register, [tirx.Ramp(index(offset + i * width), index(1), width)]))
    return statements


def _interleave(a: Expr, b: Expr, width: int, part: int) -> Expr:
    """The lower (``part`` 0) or upper (1) half of a0 b0 a1 b1 ..."""
    half = width // 2
    lanes = [side * width + part * half + lane for lane in range(half) for side in (0, 1)]
    return tirx.Shuffle([a, b], [index(lane) for lane in lanes])
