"""GPU kernels for everything without data reuse: element-wise, transposition, reductions, softmax, normalisation,
pooling.

The stages that share rows become one launch, a row read once where it fits the registers of its threads
(`gpu_rows.kernel`); stages without a reduction become one launch each (`gpu_rows.points`). Rows that are few and
long are divided among blocks and cost a second launch: `gpu_rows.plan.plan_rows` says when that pays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tvm_ext._tvm import Var, tirx
from tvm_ext.analysis.stages import Stage, dtype_of, reads
from tvm_ext.analysis.tensor_expr import AxisKind
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import accumulator_dtype, allocate, index, load
from tvm_ext.ir.simt_ir import SimtKernel

from ..cpu_rows.emit import is_in
from ..cpu_rows.rewrite_rows import with_reciprocals
from .combine import shared_bytes
from .form import RowForm
from .inline import inlined, may_inline, own_values
from .kernel import emit_row_kernel
from .lanes import widened
from .plan import RowPlan, plan_rows, register_estimate
from .points import emit_points
from .read import plain_stage, read_form


def emit_simt_rows(
    stages: Sequence[Stage], device: DeviceSpec, kept: Sequence[Any], params: Sequence[Any]
) -> SimtKernel:
    """GPU kernels that run ``stages`` in order, as few launches as their data flow allows.

    Parameters
    ----------
    stages
        What `plan_kernels` puts into one row group: sums over rows, what is computed from them, injective stages.
    device
        A GPU (kind ``"cuda"``, ``"rocm"`` or ``"opencl"``); the same code serves all three.
    kept
        Buffers that others read, outputs among them: written to memory. The others live in registers, unless a stage
        needs them in another order: then they are written as well, and the caller allocates them (scope
        ``"global"``).
    params
        The function's parameters, which are addressed as runs of memory.

    Raises
    ------
    IllegalRewrite
        Where a stage is not a reduction of whole rows or an injective stage over static shapes, with the reason.
    """
    launches = _emit_group(tuple(plain_stage(stage) for stage in stages), device, tuple(kept), tuple(params))
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
    stages: tuple[Stage, ...], device: DeviceSpec, kept: tuple[Any, ...], params: tuple[Any, ...]
) -> list[SimtKernel]:
    """The launches of ``stages``: those of the longest beginning that has a common form, then those of the rest."""
    for count in range(len(stages), 0, -1):
        head, tail = stages[:count], stages[count:]
        needed = [s.target for s in head if is_in(s.target, kept) or any(reads(t.value, s.target) for t in tail)]
        try:
            launches = _emit_form(head, device, tuple(needed) or (head[-1].target,), params)
        except IllegalRewrite:
            if count == 1:
                raise
            continue
        return launches + (_emit_group(tail, device, kept, params) if tail else [])
    raise IllegalRewrite("there are no stages to emit")


def _emit_form(
    stages: tuple[Stage, ...], device: DeviceSpec, kept: tuple[Any, ...], params: tuple[Any, ...]
) -> list[SimtKernel]:
    if not any(stage.is_reduction for stage in stages):
        return [_emit_injective(stage, device, params) for stage in _inlined(stages, kept)]
    form = _prepared(read_form(stages, kept, params))
    plan = plan_rows(form, device, may_split=True)
    if plan.splits == 1:
        return [_emit_rows(form, plan, device)]
    if len(form.stages) > 1:
        return _emit_split(stages, device, kept, params)
    return _emit_in_parts(stages, form, plan, device, kept, params)


def _emit_split(
    stages: tuple[Stage, ...], device: DeviceSpec, kept: tuple[Any, ...], params: tuple[Any, ...]
) -> list[SimtKernel]:
    """Stages of few, long rows: what is computed for each element is computed where it is read, one reduction at a
    time.

    Worked example, softmax of one row of 4 Mi: the maximum in parts, the sum of exp(x - maximum) in parts, and a
    launch that reads x again for exp(x - maximum) * (1 / sum).
    """
    first, *rest = _computed_where_read(stages, kept)
    needed = (first.target,)
    if first.is_reduction:
        form = _prepared(read_form((first,), needed, params))
        plan = plan_rows(form, device, may_split=True)
        if plan.splits > 1:
            return _emit_in_parts((first, *rest), form, plan, device, kept, params)
    launches = _emit_form((first,), device, needed, params)
    return launches + (_emit_group(tuple(rest), device, kept, params) if rest else [])


def _computed_where_read(stages: Sequence[Stage], kept: Sequence[Any]) -> list[Stage]:
    """The stages with those inlined that have a value for each element, and are neither reductions nor kept."""
    length = max(stage.point_count for stage in stages)
    done: list[Stage] = []
    for stage in stages:
        for earlier in done:
            per_element = not earlier.is_reduction and earlier.point_count == length
            if per_element and may_inline(earlier) and reads(stage.value, earlier.target):
                stage = inlined(earlier, stage)
        done.append(stage)
    read_later = [
        any(reads(other.value, stage.target) for other in done[position + 1 :]) for position, stage in enumerate(done)
    ]
    return [
        stage
        for stage, read in zip(done, read_later, strict=True)
        if read or stage.is_reduction or is_in(stage.target, kept)
    ]


def _inlined(stages: tuple[Stage, ...], kept: tuple[Any, ...]) -> list[Stage]:
    """The injective stages that are kept, computing what they read of the others."""
    done: list[Stage] = []
    for stage in stages:
        for earlier in done:
            if reads(stage.value, earlier.target):
                if not may_inline(earlier):
                    raise IllegalRewrite(f"stage {stage.name} reads {earlier.target.name}, which is written in parts")
                stage = inlined(earlier, stage)
        done.append(stage)
    return [stage for stage in done if is_in(stage.target, kept)]


def _emit_injective(stage: Stage, device: DeviceSpec, params: tuple[Any, ...]) -> SimtKernel:
    return emit_points(_prepared(read_form((stage,), (stage.target,), params)), device)


def _prepared(form: RowForm) -> RowForm:
    """``form`` in float32 where it is half precision, divisions by a row's number as products."""
    wide = [dataclasses.replace(stage, value=widened(stage.value)) for stage in form.stages]
    return dataclasses.replace(form, stages=tuple(with_reciprocals(wide) if form.row else wide))


def _emit_rows(form: RowForm, plan: RowPlan, device: DeviceSpec) -> SimtKernel:
    if not plan.held:  # what is computed for each element is computed again in the next pass
        computed = own_values(form.stages, form.along_row)
        left = tuple(s for s in computed if not form.along_row(s) or is_in(s.target, form.kept))
        form = dataclasses.replace(form, stages=left)
    names = " + ".join(stage.name for stage in form.stages)
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
    stages: tuple[Stage, ...],
    form: RowForm,
    plan: RowPlan,
    device: DeviceSpec,
    kept: tuple[Any, ...],
    params: tuple[Any, ...],
) -> list[SimtKernel]:
    """The reduction ``stages[0]``, of ``form``, in two launches, always alike: parts of the rows, then their
    combination.

    The other stages follow the combination, in its launch where they can.
    """
    dtype = accumulator_dtype(dtype_of(stages[0].target))
    partial = tirx.decl_buffer([index(plan.splits), index(form.row_count)], dtype, f"{stages[0].target.name}_parts")
    first = SimtKernel(
        statements=(allocate(partial), emit_row_kernel(form, plan, partial=partial)),
        threads=plan.threads,
        blocks=plan.blocks,
        shared_bytes=shared_bytes(form, plan, device),
        register_count=register_estimate(form, plan),
        notes=(f"{stages[0].name}: {plan.describe()}",),
    )
    combined = _combined(stages[0], partial, plan.splits)
    return [first, *_emit_group((combined, *stages[1:]), device, kept, params)]


def _combined(stage: Stage, partial: Any, splits: int) -> Stage:
    """``stage`` as the combination of ``partial`` over its first axis."""
    axes = [(v, stage.extent(v)) for v in stage.spatial]
    dtype = dtype_of(stage.variables[0])
    spatial: AxisKind = "spatial"
    part = Var("part", stage.variables[0].ty)
    row: Any = tirx.IntImm(dtype, 0)
    for variable, extent in axes:
        row = row * tirx.IntImm(dtype, extent) + variable
    return dataclasses.replace(
        stage,
        name=f"{stage.name}_parts",
        variables=(*(v for v, _ in axes), part),
        extents=(*(e for _, e in axes), splits),
        kinds=(*(spatial for _ in axes), "reduce"),
        value=load(partial, [part, row]),
    )
