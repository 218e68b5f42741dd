"""The pass that gives every TensorIR function its kernel: constructed by Roller or a stated fallback, with a reason."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm_ext._tvm import (
    ALREADY_SCHEDULED,
    BufferStore,
    Call,
    PrimFunc,
    Target,
    copy_module,
    module_pass,
    structural_walk,
    tirx,
)
from tvm_ext.analysis.computation_exprs import axis_names, count_flops, count_operations, itemsize_bytes, tensor_expr_of
from tvm_ext.analysis.computation_rewrites import (
    address_runs,
    drop_unit_axes,
    fuse_axes,
    reads_whole_runs,
    split_divided_axes,
)
from tvm_ext.analysis.computations import Computation, OperatorBody, dtype_of, read_operator, static_shape, substitute
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import allocate, outer_kind, sequence
from tvm_ext.ir.float_ir import uses_bfloat16
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, CONSTANT_PARAMS, ConstantPack, KernelChoice, Path
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.support.kernel_cache import (
    KERNEL_KEY,
    CachedKernel,
    KernelCache,
    build_context,
    kernel_key,
    misfit,
    params_of,
    seal,
)
from tvm_ext.support.limits import check_count, check_time, limits, timed_construction

from .emit.cpu_rows.emit import emit_rows
from .emit.cpu_tiles.emit import TileKernel, emit_tile_kernel
from .emit.schedule_fallback import schedule_fallback
from .expressions.cut_expressions import cut_nested, cut_notes, name_of
from .expressions.deep_bindings import store_deep_bindings
from .expressions.exact_floats import keep_floats, keep_floats_outside_reductions, pass_nan_on
from .expressions.turn_divisions import with_turned_divisions
from .expressions.vector_math import FUNCTIONS, expand_math, has_scale
from .plan.equal_functions import EqualFunctions
from .plan.plan_kernels import RowGroup, TileGroup, plan, simplify, size_notes
from .plan.plan_windows import WindowGroup, take_windows, window_kernel
from .plan.row_time import row_time_s
from .roller.align import ALL_RULES
from .roller.canonical import canonicalise
from .roller.construct import Construction
from .roller.construct import construct as construct_anew


@module_pass(opt_level=0, name="tvm_ext.ConstructKernels")
class ConstructKernels:
    """Replace every unscheduled PrimFunc by a scheduled one, with its `KernelChoice` in attribute ``tvm_ext.choice``.

    A kernel whose choice has ``packs`` wants its constants in another layout: `PackConstants` must follow.

    Parameters
    ----------
    device
        The CPU to construct for.
    options
        ``candidates`` and ``epsilon`` go to the construction (paper §3.2).
    cache
        Where compiled kernels are looked up. Those found are sealed: they have no body, and `code_generation` must
        follow. Left out: every kernel is constructed.
    """

    def __init__(self, device: DeviceSpec, options: BuildOptions, cache: KernelCache | None = None) -> None:
        self.device, self.options = device, options
        self.cache = cache if cache is not None else KernelCache(None)

    def transform_module(self, mod: Any, _ctx: Any) -> Any:
        result = copy_module(mod)
        context = kernel_context(self.device, self.options) if self.cache.is_on else ""
        made = EqualFunctions()
        for gv, func in mod.functions_items():
            if isinstance(func, PrimFunc) and not (func.attrs and ALREADY_SCHEDULED in func.attrs):
                result[gv] = self._kernel(func, gv.name_hint, context, made)
        return result

    def _kernel(self, func: Any, name: str, context: str, made: EqualFunctions) -> Any:
        """The kernel of ``func``: from the cache, from an equal function of this module, else constructed."""
        key = kernel_key(func, name, context) if self.cache.is_on and params_of(func) is not None else None
        entry = self._entry(func, key) if key is not None else None
        if key is not None and entry is not None:
            return seal(func, entry, key, {CHOICE: entry.record.choice, ALREADY_SCHEDULED: True, "s_tir": True})
        kernel = made.find(func, name)
        if kernel is not None:
            self.cache.duplicates += 1
        else:
            kernel = construct_kernel(func, name, self.device, self.options)
            made.remember(func, kernel)
        return kernel if key is None else kernel.with_attr(KERNEL_KEY, key)

    def _entry(self, func: Any, key: str) -> CachedKernel | None:
        """The cache's entry under ``key``, if it can be the kernel of ``func``."""
        entry = self.cache.get(key)
        if entry is None:
            return None
        try:
            choice = from_json(KernelChoice, entry.record.choice)
            reason = misfit(func, entry, {how.param_index: how.extents for how in choice.packs})
        except ValueError as error:
            reason = str(error)
        if reason:
            self.cache.reject(key, reason)
            return None
        return entry


def kernel_context(device: DeviceSpec, options: BuildOptions) -> str:
    """Digest of what decides every kernel of a build beside its PrimFunc."""
    target = Target.current(allow_none=True)
    return build_context(
        str(target), to_json(device), repr((options.candidates, options.epsilon, options.guard_memory))
    )


def construct(
    expr: TensorExpr, device: DeviceSpec, *, k: int, first_epsilon: float = 0.0, rules: frozenset[str] = ALL_RULES
) -> Construction:
    """Roller's `construct`, once per process for each expression (whatever it is called), device and options."""
    return _construct_nameless(replace(expr, name=""), device, k, first_epsilon, rules, limits().search_steps)


@functools.lru_cache(maxsize=512)
def _construct_nameless(
    expr: TensorExpr, device: DeviceSpec, k: int, first_epsilon: float, rules: frozenset[str], _steps: int
) -> Construction:
    return construct_anew(expr, device, k=k, first_epsilon=first_epsilon, rules=rules)


def construct_kernel(func: Any, name: str, device: DeviceSpec, options: BuildOptions) -> Any:
    """``func`` scheduled for ``device``; never raises for what cannot be constructed, but says why in its choice."""
    try:
        with timed_construction():
            body, choice = _constructed(func, name, device, options)
    except IllegalRewrite as refusal:
        body, choice = _fallback(func, name, device, refusal)
    return with_turned_divisions(body).with_attr(CHOICE, to_json(choice)).with_attr(ALREADY_SCHEDULED, True)


def _fallback(func: Any, name: str, device: DeviceSpec, refusal: IllegalRewrite) -> tuple[Any, KernelChoice]:
    func = func.with_body(keep_floats_outside_reductions(func.body))
    try:
        scheduled, what = schedule_fallback(func)
    except IllegalRewrite as second:
        reason = f"no kernel constructed: {refusal}; not scheduled either: {second}"
        return func, KernelChoice(operator=name, path="stock", reason=reason, device=device.name)
    reason = f"no kernel constructed: {refusal}; {what}"
    scheduled = scheduled.with_body(pass_nan_on(scheduled.body))
    return scheduled, KernelChoice(operator=name, path="fallback", reason=reason, device=device.name)


def _constructed(func: Any, name: str, device: DeviceSpec, options: BuildOptions) -> tuple[Any, KernelChoice]:
    operator = simplify(read_operator(func, name))
    constant = [int(i) for i in func.attrs[CONSTANT_PARAMS]] if func.attrs and CONSTANT_PARAMS in func.attrs else []
    constants = [operator.params[i] for i in constant]
    groups, notes = take_windows(plan(operator), operator)
    statements: list[Any] = []
    packs: list[tuple[Any, ConstantPack]] = []
    programs: list[RProgram] = []
    path: Path = "rows"
    for group in groups:
        check_time()
        if isinstance(group, WindowGroup):
            path = "rtile"
            windowed = window_kernel(group, device)
            statements += windowed[0]
            programs.append(windowed[1])
            notes.append(windowed[2] + fused_note(group.epilogue))
            continue
        if isinstance(group, TileGroup):
            tiled = _tile_kernel(group, operator, constants, device, options, notes)
            if tiled is not None:
                path = "rtile"
                statements += tiled[0].statements
                packs += tiled[0].packs
                programs.append(tiled[1])
                notes.append(
                    f"{group.anchor.name} in register tiles {tiled[1].tile('L0')}" + fused_note(group.epilogue)
                )
                continue
        for rows in _as_rows(group):
            program = row_program(rows, operator, device)
            programs += [program] if program else []
            kind = outer_kind(row_time_s(rows.computations, device), device)
            statements += emit_rows(rows.computations, device, kept_buffers(rows, operator), kind)
            notes.append(f"{' + '.join(s.name for s in rows.computations)} row by row")
    params = list(operator.params)
    for packed, how in packs:
        params[how.param_index] = packed
    attrs = {key: func.attrs[key] for key in func.attrs.keys()} if func.attrs else {}  # noqa: SIM118 - DictAttrs iterates over keys() only
    attrs["s_tir"] = True
    emitted = sequence(*allocations(statements, operator), *statements)
    check_count("kernel_operations", count_operations(emitted), "operations in its kernel")
    body = on_cpu(emitted, device)
    params, body = _any_alignment(params, body)
    new = tirx.PrimFunc(params, body, func.ret_type).with_attrs(attrs)
    slowest = max(programs, key=lambda p: p.prediction.time_s, default=None)
    choice = KernelChoice(
        operator=name,
        path=path,
        reason="; ".join([*notes, *size_notes(operator), *cut_notes(body), *call_notes(body)]),
        device=device.name,
        flops=sum(flops_of(computation) for computation in operator.computations),
        bytes=sum(bytes_of(param) for param in operator.params),
        program=slowest,
        packs=tuple(how for _, how in packs),
    )
    return new, choice


def on_cpu(body: Any, device: DeviceSpec) -> Any:
    """A kernel's statements in a form that stock TVM lowers to the values that they mean, functions as arithmetic."""
    exact = pass_nan_on(keep_floats(cut_nested(body, FUNCTIONS), by_product=True))
    if uses_bfloat16(exact):
        return exact  # with the C library's functions: those written as arithmetic bind what they are applied to
    if call_notes(exact):
        return exact
    return store_deep_bindings(expand_math(exact, scales_by_instruction=has_scale(device)))


def call_notes(body: Any) -> list[str]:
    """For the report: that there are too many functions in ``body`` to write all of them as arithmetic."""
    calls: list[bool] = []
    structural_walk(body, (Call, lambda call: calls.append(name_of(call) in FUNCTIONS)))
    most = limits().expanded_functions
    return [f"functions by the C library: {sum(calls)} of them (limit {most})"] if sum(calls) > most else []


def allocations(statements: Sequence[Any], operator: OperatorBody) -> list[Any]:
    """Allocations of the buffers that the statements still write: neither parameters nor kept in rows or tiles."""
    used: list[Any] = []

    def visit(store: Any) -> None:
        used.append(store.buffer)

    for statement in statements:
        structural_walk(statement, (BufferStore, visit))
    inner = [computation.target for computation in operator.computations if not operator.is_output(computation.target)]
    return [allocate(buffer) for buffer in inner if any(buffer.same_as(other) for other in used)]


def _as_rows(group: TileGroup | RowGroup) -> list[RowGroup]:
    """The group as row kernels; an anchor that no rTile suits (of a single point, say) comes before its epilogue."""
    if isinstance(group, RowGroup):
        return [canonical_rows(group)]
    return [canonical_rows(RowGroup(computations=(computation,))) for computation in (group.anchor, *group.epilogue)]


def _any_alignment(params: Sequence[Any], body: Any) -> tuple[list[Any], Any]:
    """The parameters without TVM's promise of 64-byte alignment, which a NumPy array handed to the VM does not keep.

    Vector instructions for unaligned addresses cost nothing where the address happens to be aligned.
    """
    relaxed = [
        tirx.decl_buffer(
            param.ty.shape, dtype_of(param), param.name, data_alignment=max(1, int(itemsize_bytes(dtype_of(param))))
        )
        for param in params
    ]
    return relaxed, substitute(body, list(zip(params, relaxed, strict=True)))


def fused_note(epilogue: Sequence[Computation]) -> str:
    return f" with {', '.join(computation.name for computation in epilogue)} fused" if epilogue else ""


def flops_of(computation: Computation) -> float:
    return (count_flops(computation.value) + (1.0 if computation.is_reduction else 0.0)) * computation.point_count


def bytes_of(param: Any) -> float:
    size = itemsize_bytes(dtype_of(param))
    for extent in static_shape(param):
        size *= extent
    return size


def kept_buffers(group: RowGroup, operator: OperatorBody) -> list[Any]:
    """Buffers of the group that others read later, and outputs."""
    outside = [s for s in operator.computations if not any(s.target.same_as(own.target) for own in group.computations)]
    return [
        computation.target
        for computation in group.computations
        if operator.is_output(computation.target)
        or any(load.source.same_as(computation.target) for s in outside for load in s.loads())
    ]


def canonical_computation(
    computation: Computation, expr_name: str = "", *, params: Sequence[Any] = (), **about: Any
) -> tuple[Computation, TensorExpr]:
    """``computation`` and its expression in canonical form: unit axes dropped, divided axes split, axes fused (paper
    §3.2).

    The i-th axis of the expression is the i-th variable of the computation, its i-th input the computation's i-th load.
    ``params``, the function's parameters, are addressed as runs of memory. ``about`` goes to `tensor_expr_of`.
    """
    computation = split_divided_axes(drop_unit_axes(computation))
    form = canonicalise(tensor_expr_of(computation, name=expr_name or computation.name, **about))
    names = list(axis_names(computation))
    groups = [[names.index(original) for original in originals] for _, originals in form.groups]
    return _with_runs(computation, fuse_axes(computation, groups), groups, about.get("epilogue", ()), params), form.expr


def _with_runs(
    before: Computation,
    fused: Computation,
    groups: Sequence[Sequence[int]],
    epilogue: Sequence[Computation],
    params: Sequence[Any],
) -> Computation:
    """``fused`` addressing parameters along its fused axes; its result too, where its consumers do not mind."""
    joined = [(i, group) for i, group in enumerate(groups) if len(group) > 1]
    extents = [[before.extents[p] for p in group] for _, group in joined]
    touched = [
        load.source
        for computation in epilogue
        for load in computation.loads()
        if not load.source.same_as(before.target)
    ]
    touched += [computation.target for computation in epilogue] if epilogue else [before.target]
    whole = all(any(buffer.same_as(param) for param in params) for buffer in touched)
    for (_, group), sizes in zip(joined, extents, strict=True):
        own = [before.variables[p] for p in group]
        dims = [d for d, item in enumerate(before.indices) if any(item.same_as(v) for v in own)]
        whole = whole and (not dims or all(reads_whole_runs(consumer, dims, sizes) for consumer in epilogue))
    return address_runs(fused, [fused.variables[i] for i, _ in joined], extents, buffers=params, stores=whole)


def canonical_rows(group: RowGroup) -> RowGroup:
    """Fuse what a lone injective computation or the reduction axes of a row allow."""
    if len(group.computations) == 1 and not group.computations[0].is_reduction:
        return RowGroup(computations=(canonical_computation(group.computations[0])[0],))
    return RowGroup(computations=tuple(_fuse_reduction(computation) for computation in group.computations))


def _fuse_reduction(computation: Computation) -> Computation:
    if not computation.is_reduction:
        return computation
    names = axis_names(computation)
    groups: list[list[int]] = []
    for _, originals in canonicalise(tensor_expr_of(computation, name=computation.name)).groups:
        run = [names.index(original) for original in originals]
        groups += [run] if computation.kinds[run[0]] == "reduce" else [[p] for p in run]
    present = {p for run in groups for p in run}
    groups += [[p] for p in range(len(names)) if p not in present]  # unit axes, which canonical form leaves out
    return fuse_axes(computation, sorted(groups))


def row_program(group: RowGroup, operator: OperatorBody, device: DeviceSpec) -> RProgram | None:
    """The rProgram of the group's largest computation: what the model expects of it (the rows decide the loops)."""
    largest = max(group.computations, key=lambda computation: computation.point_count)
    _, expr = canonical_computation(largest, operator.name)
    return next(iter(construct(expr, device, k=1).programs), None)


def _tile_kernel(
    group: TileGroup,
    operator: OperatorBody,
    constants: Sequence[Any],
    device: DeviceSpec,
    options: BuildOptions,
    notes: list[str],
) -> tuple[TileKernel, RProgram] | None:
    """The best rProgram and its kernel; None where no rTile has a spatial axis to vectorise. Adds to ``notes``."""
    anchor, expr, construction = construct_anchor(group, operator, constants, device, options)
    notes += construction.notes
    spatial = [axis.name for axis in expr.spatial]
    program = next((program for program in construction.programs if program.vector_axis in spatial), None)
    if program is None:
        return None
    return emit_tile_kernel(anchor, expr, group.epilogue, program, device, operator.params), program


def construct_anchor(
    group: TileGroup, operator: OperatorBody, constants: Sequence[Any], device: DeviceSpec, options: BuildOptions
) -> tuple[Computation, TensorExpr, Construction]:
    """The group's anchor in canonical form, as computation and as expression, and what Roller constructs for it.

    Of ``constants``, those that one load alone reads count as repackable.
    """
    readers: dict[Any, int] = {}
    for computation in operator.computations:
        for load in computation.loads():
            readers[load.source] = readers.get(load.source, 0) + 1
    packable = [c for c in constants if readers.get(c, 0) == 1]
    anchor, expr = canonical_computation(
        group.anchor, operator.name, constants=packable, epilogue=group.epilogue, params=operator.params
    )
    return anchor, expr, construct(expr, device, k=options.candidates, first_epsilon=options.epsilon)
