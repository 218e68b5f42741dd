"""An operator as a matrix product: which axes are rows, columns, reduction and batch of an implicit GEMM.

A tensor core multiplies matrices. A convolution is one over fused axes that are adjacent in no tensor: its rows are
(n, h, w), its columns the filters, its reduction (r, s, c). Nothing is copied to make that matrix; a threadblock finds
the elements of its tiles by the digits of the row and of the reduction step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext.devices.capabilities import LDMATRIX_SINCE, MATRIX_UNITS_SINCE, MMA_SYNC_SINCE, has
from tvm_ext.devices.gpu import CHUNKS_OF_ALL_BANKS as CHUNKS_OF_ALL_BANKS
from tvm_ext.devices.gpu import EVEN_PITCHES as EVEN_PITCHES
from tvm_ext.devices.gpu import FRAGMENT as FRAGMENT
from tvm_ext.devices.gpu import ODD_PITCHES as ODD_PITCHES
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.gpu import padded_chunks as padded_chunks
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from .computation_exprs import itemsize_bytes
from .tensor_expr import FUSED, Access, Axis, AxisKind, LinearIndex, TensorExpr

ACCUMULATORS = {"float16": ("float16", "float32"), "bfloat16": ("bfloat16", "float32"), "int8": ("int32",)}
"""Types of a result by the type of the factors; half precision is accumulated in float32, int8 in int32."""

MAX_WASTE = 16
"""An operator is left to the ordinary cores where its padding to fragments multiplies its work by more than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmForm:
    """The axes of an expression by their part in the product, outermost first, as positions in ``expr.axes``.

    ``row_input`` is the input that varies along the rows, ``column_input`` the one that varies along the columns.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    reduction: tuple[int, ...]
    row_input: int
    column_input: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TileSplit:
    """A threadblock's tile of rows x columns, its reduction step, and the part of each warp, in elements.

    Warps multiply ``step`` of the reduction at a time (`reduction_step`); of mfma that says which instruction.
    """

    rows: int
    columns: int
    depth: int
    warp_rows: int
    warp_columns: int
    step: int = FRAGMENT

    @property
    def warps_along_columns(self) -> int:
        return self.columns // self.warp_columns

    @property
    def warps(self) -> int:
        return self.rows // self.warp_rows * self.warps_along_columns


def split_of(program: RProgram) -> TileSplit:
    """The tiles of a program over (batch,) rows, columns, reduction: L1 is the threadblock's, L0 the warp's."""
    warp, block = program.tile("L0").shape, program.tile("L1").shape
    (rows, columns, depth), (warp_rows, warp_columns, step) = block[-3:], warp[-3:]
    return TileSplit(rows=rows, columns=columns, depth=depth, warp_rows=warp_rows, warp_columns=warp_columns, step=step)


def wmma_pitches(device: DeviceSpec, *, along_depth: bool) -> tuple[int, int]:
    """The distances between rows with which wmma's loads of a tile meet all banks, modulo all banks.

    As compiled (nvdisasm): on sm_75 they are ldmatrix, one chunk of each of eight rows: an odd distance. On sm_70 a
    factor that is contiguous along its lines is read by 8 bytes of a lane, 16 lanes at a time, at two chunks of each of
    four rows: an even distance. Worked example, 10 apart: chunks 0 and 1 of rows 0-3 start at 0, 10, 20, 30, which are
    0, 2, 4, 6 modulo 8. Contiguous along the reduction it is read by 16 bytes, 8 lanes at a time, at four rows, or at
    rows r and r + 8 of A, which share their banks whatever the distance.
    """
    return ODD_PITCHES if along_depth or has(device, LDMATRIX_SINCE) else EVEN_PITCHES


def gemm_form(expr: TensorExpr) -> GemmForm | str:
    """The product that ``expr`` is, or the reason why it is none.

    Columns are the axes among which the output is contiguous, so that neighbouring lanes store neighbouring elements:
    the filters of an NHWC convolution, (n, h, w) of an NCHW one.
    """
    if expr.combiner != "sum" or len(expr.inputs) != 2 or expr.flops_per_point != 2:
        return "it is no sum of products of two tensors"
    first, second = expr.inputs
    uses = [(first.uses(axis.name), second.uses(axis.name)) for axis in expr.axes]
    spatial = [i for i, axis in enumerate(expr.axes) if axis.kind == "spatial"]
    reduction = [i for i, axis in enumerate(expr.axes) if axis.kind == "reduce"]
    if any(access.indices[d] is None for access in expr.accesses for d in range(len(access.indices))):
        return "a tensor is not read at an affine index"
    lone = [expr.axes[i].name for i in reduction if not all(uses[i])]
    lone += [expr.axes[i].name for i in spatial if not any(uses[i])]
    if lone:
        return f"axis {lone[0]} does not belong to a product of two matrices"
    groups = ([i for i in spatial if uses[i] == (True, False)], [i for i in spatial if uses[i] == (False, True)])
    if not all(groups) or not reduction:
        return "one of its factors is used for a single row, column or product only (a vector, or a depthwise window)"
    contiguous = [i for i in spatial if expr.output.stride(expr.axes[i].name) == 1 and expr.axes[i].extent > 1]
    column_input = 0 if contiguous and contiguous[-1] in groups[0] else 1
    return GemmForm(
        batch=tuple(i for i in spatial if all(uses[i])),
        rows=tuple(groups[1 - column_input]),
        columns=tuple(groups[column_input]),
        reduction=tuple(reduction),
        row_input=1 - column_input,
        column_input=column_input,
    )


def supports_mma(expr: TensorExpr, device: DeviceSpec) -> str | None:
    """None where tensor cores of ``device`` can compute ``expr``, else the reason why not."""
    if device.tensor_core_shape is None or not (uses_mfma(device) or has(device, MATRIX_UNITS_SINCE)):
        return f"{device.name} has no tensor cores"
    if len(expr.inputs) != 2:
        return "it is no sum of products of two tensors"
    first, second = expr.inputs
    if first.dtype != second.dtype or first.dtype not in ACCUMULATORS:
        return f"tensor cores do not multiply {first.dtype} by {second.dtype}"
    if device.peak_gflops_of(f"{first.dtype}_tensor") is None:
        return f"{device.name} has no tensor cores for {first.dtype}"
    if expr.output.dtype not in ACCUMULATORS[first.dtype]:
        return f"products of {first.dtype} are accumulated in {ACCUMULATORS[first.dtype][-1]}, not {expr.output.dtype}"
    form = gemm_form(expr)
    if isinstance(form, str):
        return form
    waste = _waste(gemm_expr(expr, form), reduction_step(first.dtype, device))
    return None if waste <= MAX_WASTE else f"padding to fragments would multiply its work by {waste:.0f}"


def uses_mma_sync(device: DeviceSpec) -> bool:
    """Whether fragments are loaded by ldmatrix and multiplied by mma.m16n8k16 (sm_80 and later), else by wmma."""
    return has(device, MMA_SYNC_SINCE)


def uses_mfma(device: DeviceSpec) -> bool:
    """Whether waves of 64 lanes multiply by v_mfma: AMD's CDNA."""
    return device.kind == "rocm" and device.tensor_core_shape is not None


def uses_wmma(device: DeviceSpec) -> bool:
    """Whether fragments are opaque: wmma's, before sm_80."""
    return not uses_mma_sync(device) and not uses_mfma(device)


def fragment_sides(device: DeviceSpec) -> tuple[int, ...]:
    """Rows, and as many columns, of the tiles that matrix instructions multiply: of mfma 32 or 16."""
    return (2 * FRAGMENT, FRAGMENT) if uses_mfma(device) else (FRAGMENT,)


def reduction_step(dtype: str, device: DeviceSpec, side: int = FRAGMENT) -> int:
    """Products that are added up at a time: 16, but of mma.sync what 32 bytes hold, 16 halves or 32 bytes.

    Of mfma: 16 bytes of each lane, one of ``64 / side`` in a line of a fragment.
    """
    if uses_mfma(device):
        return device.teu_lanes // side * VECTOR_BYTES // int(itemsize_bytes(dtype))
    return 32 if uses_mma_sync(device) and dtype == "int8" else 16


def gemm_expr(expr: TensorExpr, form: GemmForm) -> TensorExpr:
    """``expr`` as a (batched) matrix product over fused axes: ``n*h*w``, ``f``, ``r*s*c``.

    The rows' input is the matrix that a convolution's windows stand for (im2col), which is what threadblocks load.
    """
    axes: list[Axis] = []

    def fused(positions: Sequence[int], kind: AxisKind) -> str:
        name = FUSED.join(expr.axes[i].name for i in positions)
        axes.append(Axis(name=name, extent=prod(expr.axes[i].extent for i in positions), kind=kind))
        return name

    batch = [fused(form.batch, "spatial")] if form.batch else []
    row, column = fused(form.rows, "spatial"), fused(form.columns, "spatial")
    depth = fused(form.reduction, "reduce")
    extents = {axis.name: axis.extent for axis in axes}

    def matrix(access: Access, names: Sequence[str]) -> Access:
        shape = tuple(extents[name] for name in names)
        indices = tuple(LinearIndex(terms=((name, 1),)) for name in names)
        return replace(access, shape=shape, indices=indices)

    return replace(
        expr,
        axes=tuple(axes),
        inputs=(
            matrix(expr.inputs[form.row_input], (*batch, row, depth)),
            matrix(expr.inputs[form.column_input], (*batch, column, depth)),
        ),
        output=matrix(expr.output, (*batch, row, column)),
    )


def _waste(product: TensorExpr, step: int) -> float:
    """Multiply-adds of the padded product over those that are asked for: 4 rows of 16 are a factor of 4."""
    waste = 1.0
    for axis, fragment in zip(product.axes[-3:], (FRAGMENT, FRAGMENT, step), strict=True):
        waste *= ceil_div(axis.extent, fragment) * fragment / axis.extent
    return waste
