"""Which path an operator took, and why: what construction leaves at every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .pipelines import PipelinePlan
from .rprogram import RProgram
from .tuning import GpuTile

CHOICE = "tvm_ext.choice"
"""PrimFunc attribute: the function's `KernelChoice` as JSON."""


ALTERNATIVES = "tvm_ext.alternatives"
"""PrimFunc attribute of a kernel: other kernels of the same operator, for a schedule to choose from (Rammer, §3.3)."""


CONSTANT_PARAMS = "tvm_ext.constant_params"
"""PrimFunc attribute: indices of the parameters that are compile-time constants at every call of the function."""

TRUSTED_ARGUMENTS = "tvm_ext.trusted_arguments"
"""PrimFunc attribute: the function is called with tensors of its graph alone, so that it need not look at them."""

TABLE = "tvm_ext.table"
"""PrimFunc attribute: the function looks up each element in a constant. It is fused as element-wise operators are:
stock TVM sees an index that it cannot follow.
"""

FLUSHES_DENORMALS = "tvm_ext.flushes_denormals"
"""PrimFunc attribute: the function computes in the processor's mode in which subnormal numbers are 0."""


Path = Literal["rtile", "rows", "fallback", "stock", "check", "legacy"]
"""How an operator's kernel was made: in tiles of an rProgram, row by row, by the stated fallback, or by stock TVM.

"rtile" is an operator with at least one computation in tiles; beside it others may run row by row. In "rows"
all do: the loops follow from the tensors' shapes, and an rProgram, where there is one, says no more than what to
expect. "check" only looks at run-time values, before others use them. "legacy" is a kernel that the user gave.
"""


OWN_PATHS: tuple[Path, ...] = ("rtile", "rows", "check")
"""The paths whose kernels this package emits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantPack:
    """How a compile-time constant is laid out for a kernel, so that its data tiles are contiguous in the order of use.

    The packed tensor has the given ``extents``; its element ``[i0, i1, ...]`` is the constant's row-major element
    ``offset + sum(i_d * strides[d])``, and 0 beyond the constant's end.

    Worked example: ``W[j, k]`` of shape (48, 32), used as ``B[k, j]`` with j split into panels of 16, is packed with
    extents (3, 32, 16) and strides (16*32, 1, 32): panel, k, j within the panel.

    With ``winograd``, the outputs m of a tile, axes 1 and 2 are the taps of 3x3 filters, which become G g G^T.
    """

    param_index: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    offset: int = 0
    winograd: int | None = None

    def __post_init__(self) -> None:
        assert len(self.extents) == len(self.strides)
        assert all(extent >= 1 for extent in self.extents)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that the kernel reads."""
        if self.winograd is None:
            return self.extents
        first, rows, columns, *others = self.extents
        return (first, rows + self.winograd - 1, columns + self.winograd - 1, *others)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """What an emitter planned for its largest launch, to be compared with the compiler's report of it.

    ``launches`` counts kernels one after another; ``register_count`` is in 32-bit registers of a thread.
    """

    launches: int
    blocks: int
    threads: int
    shared_bytes: int
    register_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """Which path an operator took and why: ``notes``, never empty, for a silent fallback is none.

    ``gpu`` has one entry for each group of computations that became GPU kernels, in order; a CPU's kernels have none.
    ``expected_s`` is the model's time of a kernel that runs several rPrograms many times, as a chain's panels do.
    ``pipeline`` says which of a GPU kernel's buffers are loaded ahead of their use; None where that was not asked.
    ``tile`` is what of a GPU's kernel a search may choose, and ``workload`` the key under which it is measured.
    """

    operator: str
    path: Path
    notes: tuple[str, ...]
    device: str
    flops: float = 0.0
    bytes: float = 0.0
    program: RProgram | None = None
    packs: tuple[ConstantPack, ...] = ()
    gpu: tuple[GpuPlan, ...] = ()
    pipeline: PipelinePlan | None = None
    expected_s: float | None = None
    tile: GpuTile | None = None
    workload: str = ""

    def __post_init__(self) -> None:
        assert self.notes and all(self.notes), f"{self.operator}: a choice must say why"

    @property
    def predicted_s(self) -> float | None:
        """The model's time of one call; None where there is none."""
        if self.expected_s is not None:
            return self.expected_s
        return self.program.prediction.time_s if self.program else None

    @property
    def reason(self) -> str:
        """The notes as one line, for reports."""
        return "; ".join(self.notes)
