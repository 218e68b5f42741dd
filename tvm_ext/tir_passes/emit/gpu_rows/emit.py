"""GPU kernels for everything without data reuse: element-wise, transposition, reductions, softmax, normalisation,
pooling.

The computations that share rows become one launch, a row read once where it fits the registers of its threads
(`gpu_rows.kernel`); computations without a reduction become one launch each (`gpu_rows.points`). Rows that are few and
long are divided among blocks and cost a second launch: `gpu_rows.plan.plan_rows` says when that pays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tvm_ext._tvm import Buffer, Expr, Var, tirx
from tvm_ext.analysis.computations import Computation, dtype_of, reads
from tvm_ext.analysis.predicates import is_in
from tvm_ext.analysis.tensor_expr import AxisKind
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import accumulator_dtype, allocate, index, load
from tvm_ext.ir.simt_ir import SimtKernel

from ...expressions.reciprocals import with_reciprocals
from .combine import shared_bytes
from .form import RowForm
from .inline import inlined, may_inline, own_values
from .kernel import emit_row_kernel
from .lanes import widened
from .plan import RowPlan, plan_rows, register_estimate
from .points import emit_points
from .read import plain_computation, read_form


def emit_simt_rows(
    computations: Sequence[Computation], device: DeviceSpec, kept: Sequence[Buffer], params: Sequence[Buffer]
) -> SimtKernel:
    """GPU kernels that run ``computations`` in order, as few launches as their data flow allows.

    Parameters
    ----------
    computations
        What `plan_kernels` puts into one row group: sums over rows, what is computed from them, injective computations.
    device
        A GPU (kind ``"cuda"``, ``"rocm"`` or ``"opencl"``); the same code serves all three.
    kept
        Buffers that others read, outputs among them: written to memory. The others live in registers, unless a
        computation needs them in another order: then they are written as well, and the caller allocates them (scope
        ``"global"``).
    params
        The function's parameters, which are addressed as runs of memory.

    Raises
    ------
    IllegalRewrite
        Where a computation is not a reduction of whole rows or an injective computation over static shapes, with the
        reason.
    """
    launches = _emit_group(
        tuple(plain_computation(computation) for computation in computations), device, tuple(kept), tuple(params)
    )
    largest = max(launches, key=lambda kernel: kernel.blocks * kernel.threads)
    return SimtKernel(
        statements=tuple(statement for kernel in launches for statement in kernel.statements),
        threads=largest.threads,
        blocks=largest.blocks,
        shared_bytes=max(kernel.shared_bytes for kernel in launches),
        register_count=max(kernel.register_count for kernel in launches),
        notes=tuple(note for kernel in launches for note in kernel.notes),
    )


def _emit_group(
    computations: tuple[Computation, ...], device: DeviceSpec, kept: tuple[Buffer, ...], params: tuple[Buffer, ...]
) -> list[SimtKernel]:
    """The launches of ``computations``: of the longest beginning that has a common form, then of the rest."""
    for count in range(len(computations), 0, -1):
        head, tail = computations[:count], computations[count:]
        needed = [s.target for s in head if is_in(s.target, kept) or any(reads(t.value, s.target) for t in tail)]
        try:
            launches = _emit_form(head, device, tuple(needed) or (head[-1].target,), params)
        except IllegalRewrite:
            if count == 1:
                raise
            continue
        return launches + (_emit_group(tail, device, kept, params) if tail else [])
    raise IllegalRewrite("there are no computations to emit")


def _emit_form(
    computations: tuple[Computation, ...], device: DeviceSpec, kept: tuple[Buffer, ...], params: tuple[Buffer, ...]
) -> list[SimtKernel]:
    if not any(computation.is_reduction for computation in computations):
        return [_emit_injective(computation, device, params) for computation in _inlined(computations, kept)]
    form = _prepared(read_form(computations, kept, params))
    plan = plan_rows(form, device, may_split=True)
    if plan.splits == 1:
        return [_emit_rows(form, plan, device)]
    if len(form.computations) > 1:
        return _emit_split(computations, device, kept, params)
    return _emit_in_parts(computations, form, plan, device, kept, params)


def _emit_split(
    computations: tuple[Computation, ...], device: DeviceSpec, kept: tuple[Buffer, ...], params: tuple[Buffer, ...]
) -> list[SimtKernel]:
    """Computations of few, long rows: what is computed for each element is computed where it is read, one reduction at
    a time.

    Worked example, softmax of one row of 4 Mi: the maximum in parts, the sum of exp(x - maximum) in parts, and a
    launch that reads x again for exp(x - maximum) * (1 / sum).
    """
    first, *rest = _computed_where_read(computations, kept)
    needed = (first.target,)
    if first.is_reduction:
        form = _prepared(read_form((first,), needed, params))
        plan = plan_rows(form, device, may_split=True)
        if plan.splits > 1:
            return _emit_in_parts((first, *rest), form, plan, device, kept, params)
    launches = _emit_form((first,), device, needed, params)
    return launches + (_emit_group(tuple(rest), device, kept, params) if rest else [])


def _computed_where_read(computations: Sequence[Computation], kept: Sequence[Buffer]) -> list[Computation]:
    """The computations with those inlined that have a value for each element, and are neither reductions nor kept."""
    length = max(computation.point_count for computation in computations)
    done: list[Computation] = []
    for computation in computations:
        for earlier in done:
            per_element = not earlier.is_reduction and earlier.point_count == length
            if per_element and may_inline(earlier) and reads(computation.value, earlier.target):
                computation = inlined(earlier, computation)
        done.append(computation)
    read_later = [
        any(reads(other.value, computation.target) for other in done[position + 1 :])
        for position, computation in enumerate(done)
    ]
    return [
        computation
        for computation, read in zip(done, read_later, strict=True)
        if read or computation.is_reduction or is_in(computation.target, kept)
    ]


def _inlined(computations: tuple[Computation, ...], kept: tuple[Buffer, ...]) -> list[Computation]:
    """The injective computations that are kept, computing what they read of the others."""
    done: list[Computation] = []
    for computation in computations:
        for earlier in done:
            if reads(computation.value, earlier.target):
                if not may_inline(earlier):
                    raise IllegalRewrite(
                        f"computation {computation.name} reads {earlier.target.name}, which is written in parts"
                    )
                computation = inlined(earlier, computation)
        done.append(computation)
    return [computation for computation in done if is_in(computation.target, kept)]


def _emit_injective(computation: Computation, device: DeviceSpec, params: tuple[Buffer, ...]) -> SimtKernel:
    return emit_points(_prepared(read_form((computation,), (computation.target,), params)), device)


def _prepared(form: RowForm) -> RowForm:
    """``form`` in float32 where it is half precision, divisions by a row's number as products."""
    wide = [dataclasses.replace(computation, value=widened(computation.value)) for computation in form.computations]
    return dataclasses.replace(form, computations=tuple(with_reciprocals(wide) if form.row else wide))


def _emit_rows(form: RowForm, plan: RowPlan, device: DeviceSpec) -> SimtKernel:
    if not plan.held:  # what is computed for each element is computed again in the next pass
        computed = own_values(form.computations, form.along_row)
        left = tuple(s for s in computed if not form.along_row(s) or is_in(s.target, form.kept))
        form = dataclasses.replace(form, computations=left)
    names = " + ".join(computation.name for computation in form.computations)
    return SimtKernel(
        statements=(emit_row_kernel(form, plan),),
        threads=plan.threads,
        blocks=plan.blocks,
        shared_bytes=shared_bytes(form, plan, device),
        register_count=register_estimate(form, plan),
        notes=(f"{names}: {plan.describe()}",),
    )


# --- rows divided among blocks ---------------------------------------------------------------------------------------
def _emit_in_parts(
    computations: tuple[Computation, ...],
    form: RowForm,
    plan: RowPlan,
    device: DeviceSpec,
    kept: tuple[Buffer, ...],
    params: tuple[Buffer, ...],
) -> list[SimtKernel]:
    """The reduction ``computations[0]``, of ``form``, in two launches, always alike: parts of the rows, then their
    combination.

    The other computations follow the combination, in its launch where they can.
    """
    dtype = accumulator_dtype(dtype_of(computations[0].target))
    partial = tirx.decl_buffer(
        [index(plan.splits), index(form.row_count)], dtype, f"{computations[0].target.name}_parts"
    )
    first = SimtKernel(
        statements=(allocate(partial), emit_row_kernel(form, plan, partial=partial)),
        threads=plan.threads,
        blocks=plan.blocks,
        shared_bytes=shared_bytes(form, plan, device),
        register_count=register_estimate(form, plan),
        notes=(f"{computations[0].name}: {plan.describe()}",),
    )
    combined = _combined(computations[0], partial, plan.splits)
    return [first, *_emit_group((combined, *computations[1:]), device, kept, params)]


def _combined(computation: Computation, partial: Buffer, splits: int) -> Computation:
    """``computation`` as the combination of ``partial`` over its first axis."""
    axes = [(v, computation.extent(v)) for v in computation.spatial]
    dtype = dtype_of(computation.variables[0])
    spatial: AxisKind = "spatial"
    part = Var("part", computation.variables[0].ty)
    row: Expr = tirx.IntImm(dtype, 0)
    for variable, extent in axes:
        row = row * tirx.IntImm(dtype, extent) + variable
    return dataclasses.replace(
        computation,
        name=f"{computation.name}_parts",
        variables=(*(v for v, _ in axes), part),
        extents=(*(e for _, e in axes), splits),
        kinds=(*(spatial for _ in axes), "reduce"),
        value=load(partial, [part, row]),
    )
