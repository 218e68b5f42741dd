"""A template's configuration for a matrix product as data, with JSON both ways."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypedDict

from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.errors import InputError
from tvm_ext.records.partition import CutlassProblem, MatrixLayout, Order
from tvm_ext.support.arithmetic import ceil_div

from .elements import Multiplier, Shape3, multiplier
from .evt import Generation

Schedule = Literal["cooperative", "pingpong", "single"]
"""Of a collective: two warp groups share a tile, or each has one and they take turns at the matrix units; convolutions
have a single group, and a threadblock for each tile."""
Raster = Literal["along_m", "along_n"]

ACCESS_BITS = 8 * VECTOR_BYTES
"""The widest load and store of a thread, and what bulk copies align with (PTX ISA; Bolt §3.2.3)."""

_MOST_EXTENT = 2**31 - 1  # the templates count in 32 bits


class Alignments(TypedDict):
    """Elements of one access to each matrix."""

    alignment_a: int
    alignment_b: int
    alignment_d: int


def packed_problem(
    *,
    m: int,
    n: int,
    k: int,
    arithmetic: str,
    out_dtype: str,
    layout_a: Order = "row",
    layout_b: Order = "row",
    batch: int = 1,
) -> CutlassProblem:
    """A product of matrices without gaps; one of layout "column" is stored transposed.

    Raises InputError where an extent is not positive or beyond 32 bits, or ``arithmetic`` is no key of `MULTIPLIERS`.
    """
    size = f"a matrix product of M, N, K = {m}, {n}, {k}"
    if min(m, n, k, batch) < 1:
        raise InputError(f"{size} has nothing to multiply.", "every extent must be at least 1")
    if max(m, n, k, batch) > _MOST_EXTENT:
        raise InputError(f"{size} is too large for CUTLASS, which counts in 32 bits.", "divide the product")
    kind = multiplier(arithmetic)
    return CutlassProblem(
        anchor="matmul" if batch == 1 else "batched_matmul", batch=batch, rows=m, columns=n, depth=k,
        dtypes=(kind.operand, kind.operand, out_dtype), simt=arithmetic == "float32",
        operands=(_packed(m, k, layout_a, kind.bits, batch), _packed(k, n, layout_b, kind.bits, batch)),
    )  # fmt: skip


def _packed(rows: int, columns: int, order: Order, bits: int, batch: int) -> MatrixLayout:
    contiguous = columns if order == "row" else rows
    return MatrixLayout(
        order=order,
        leading_dimension=contiguous,
        batch_stride=rows * columns if batch > 1 else 0,
        alignment=widest_access(contiguous, bits),
    )


def widest_access(extent: int, bits: int) -> int:
    """Elements of one access to rows of ``extent``: 8 of 16 bits for 24, 4 for 20, 1 for 7."""
    most = ACCESS_BITS // bits
    return min(most, extent & -extent)


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """A template's parameters. Shapes are M, N, K in elements.

    ``architecture`` is the tag that the template is compiled with. 2.x templates have ``warp`` and ``instruction``, 3.x
    ones (sm_90) ``schedule``, ``cluster`` and ``raster``, where the library chooses the instruction. ``split_k`` > 1
    takes the stream-K form, whose number of splits, as 3.x's swizzle and raster, is an argument at run time.
    """

    arithmetic: str
    architecture: int
    threadblock: Shape3
    warp: Shape3 | None = None
    instruction: Shape3 | None = None
    stages: int
    swizzle: int = 1
    split_k: int = 1
    alignment_a: int
    alignment_b: int
    alignment_d: int
    schedule: Schedule | None = None
    cluster: tuple[int, int] = (1, 1)
    raster: Raster = "along_m"

    def __post_init__(self) -> None:
        assert (self.schedule is None) == (self.warp is not None) == (self.instruction is not None)

    @property
    def generation(self) -> Generation:
        return "2.x" if self.schedule is None else "3.x"

    @property
    def multiplier(self) -> Multiplier:
        return multiplier(self.arithmetic)

    @property
    def is_simt(self) -> bool:
        """Whether the vector units multiply."""
        return self.instruction == (1, 1, 1)

    @property
    def warps(self) -> int:
        """Warps that multiply, of a threadblock of a 2.x template."""
        assert self.warp is not None
        return (self.threadblock[0] // self.warp[0]) * (self.threadblock[1] // self.warp[1])

    @property
    def groups(self) -> int:
        """Warp groups that multiply, of a collective."""
        assert self.schedule is not None
        return 1 if self.schedule == "single" else 2

    @property
    def name(self) -> str:
        """A name of the template in C: whatever is compiled in, and nothing else."""
        alignments = f"{self.alignment_a}_{self.alignment_b}_{self.alignment_d}"
        parts = ["gemm", self.arithmetic, f"sm{self.architecture}", _times(self.threadblock)]
        if self.warp is not None and self.instruction is not None:
            parts += [f"w{_times(self.warp)}", f"i{_times(self.instruction)}", f"s{self.stages}", f"a{alignments}"]
            parts.append("streamk" if self.split_k > 1 else f"z{self.swizzle}")
        else:
            parts += [str(self.schedule), f"c{_times(self.cluster)}", f"s{self.stages}", f"a{alignments}"]
            parts += ["streamk"] if self.split_k > 1 else []
        return "_".join(parts)

    def with_split(self, split_k: int) -> GemmConfig:
        return dataclasses.replace(self, split_k=split_k)

    def tiles(self, problem: CutlassProblem) -> int:
        """Threadblocks that cover all results once, in whole clusters."""
        across, down = self.threadblock[0] * self.cluster[0], self.threadblock[1] * self.cluster[1]
        clusters = ceil_div(problem.rows, across) * ceil_div(problem.columns, down) * problem.batch
        return clusters * self.cluster[0] * self.cluster[1]


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
