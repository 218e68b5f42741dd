"""The pass that gives every TensorIR function its CPU kernel: constructed by Roller, or a fallback, with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tvm_ext._tvm import (
    ALREADY_SCHEDULED,
    Buffer,
    IRModule,
    PassContext,
    PrimFunc,
    Stmt,
    Target,
    copy_module,
    module_pass,
)
from tvm_ext.analysis.computation_exprs import tensor_bytes
from tvm_ext.analysis.computations import OperatorBody, read_operator
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import outer_kind, sequence
from tvm_ext.options import BuildOptions
from tvm_ext.records.attention import ATTENTION, Attention, AttentionTiles
from tvm_ext.records.choice import CHOICE, CONSTANT_PARAMS, KernelChoice
from tvm_ext.records.persistent import CHAIN, ChainVerdict, PanelPlan
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.records.tuning import PanelTiles
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
from tvm_ext.support.limits import check_time, timed_construction

from .emit.cpu_attention.kernel import attention_kernel
from .emit.cpu_cells.kernel import CellKernel, cell_kernel
from .emit.cpu_chains.emit import emit_panels
from .emit.cpu_chains.padding import emit_padding
from .emit.cpu_choices import AttentionPart, own_choices
from .emit.cpu_forms import row_form, window_form
from .emit.cpu_tiles.border import fill_border
from .emit.cpu_tiles.emit import emit_tile_kernel
from .emit.schedule_fallback import fallback_kernel
from .emit.step_loops import is_step_loop, looped_kernel
from .expressions.cut_expressions import cut_notes
from .expressions.on_cpu import call_notes, on_cpu
from .expressions.turn_divisions import with_turned_divisions
from .plan.alternatives import with_alternatives
from .plan.anchors import construct_anchor
from .plan.canonical import canonical_rows
from .plan.chain import ChainTiming, panel_ways
from .plan.chain_choices import chain_workload, chosen_panel
from .plan.chosen_tiles import NO_CHOICES, TileChoices, chosen_for, frugal_choices, program_for, refuse_left_out
from .plan.equal_functions import EqualFunctions
from .plan.form import (
    Form,
    any_alignment,
    body_of,
    choice_of,
    function_like,
    fused_note,
    notes_of,
    packed_params,
    unscheduled,
    with_choice,
)
from .plan.open_rows import with_open_rows
from .plan.padded_stores import cpu_groups
from .plan.panel import Panel, PanelView, check_runs, divide
from .plan.plan_kernels import RowGroup, TileGroup, plan, simplify, size_notes
from .plan.plan_windows import CpuGroup, WindowGroup


@module_pass(opt_level=0, name="tvm_ext.ConstructCpuKernels")
class ConstructCpuKernels:
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
    tiles
        Tiles that replace construction's, by the keys of their workloads.
    alternatives
        Whether operators that run beside others get a second kernel, of less work, for schedules to choose from.
    outside
        The CPU as loops over what is counted at run time find it, which no schedule takes; None: ``device``.
    """

    def __init__(
        self,
        device: DeviceSpec,
        options: BuildOptions,
        cache: KernelCache | None = None,
        tiles: TileChoices = NO_CHOICES,
        alternatives: bool = False,
        outside: DeviceSpec | None = None,
    ) -> None:
        self.device, self.options, self.tiles, self.alternatives = device, options, tiles, alternatives
        self.outside = device if outside is None else outside
        self.cache = cache if cache is not None else KernelCache(None)

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        context = kernel_context(self.device, self.options) if self.cache.is_on else ""
        made = EqualFunctions()
        for gv, func in unscheduled(mod):
            result[gv] = self._kernel(func, gv.name_hint, context, made)
        return with_alternatives(mod, result, self.device, self._alternative) if self.alternatives else result

    def _alternative(self, func: PrimFunc, name: str, own: KernelChoice, least_tasks: int) -> PrimFunc | None:
        """A kernel of less work that reads constants as the ``own`` one does."""
        if own.path != "rtile" or own.program is None or own.expected_s is not None or params_of(func) is None:
            return None
        for tiles in frugal_choices(func, name, own, least_tasks, self.device, self.options):
            kernel = construct_cpu_kernel(func, name, self.device, self.options, tiles)
            if from_json(KernelChoice, str(kernel.attrs[CHOICE])).packs == own.packs:
                return kernel
        return None

    def _kernel(self, func: PrimFunc, name: str, context: str, made: EqualFunctions) -> PrimFunc:
        """The kernel of ``func``: from the cache, from an equal function of this module, else constructed."""
        func = with_open_rows(func)
        device = self.outside if is_step_loop(func) else self.device
        is_kept = self.cache.is_on and params_of(func) is not None
        # In the key are the tiles that are chosen for this kernel, and it is made of these: others are nothing to it.
        tiles = own_choices(func, name, device, self.tiles) if params_of(func) is not None else self.tiles
        key = kernel_key(func, name, f"{context} {sorted(tiles.items())}" if tiles else context) if is_kept else None
        entry = self._entry(func, key) if key is not None else None
        if key is not None and entry is not None:
            return seal(func, entry, key, {CHOICE: entry.record.choice, ALREADY_SCHEDULED: True, "s_tir": True})
        kernel = made.find(func, name)
        if kernel is not None:
            self.cache.duplicates += 1
        else:
            kernel = construct_cpu_kernel(func, name, device, self.options, tiles)
            made.remember(func, kernel)
        return kernel if key is None else kernel.with_attr(KERNEL_KEY, key)

    def _entry(self, func: PrimFunc, key: str) -> CachedKernel | None:
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
    """Digest of what decides every kernel of a build beside its PrimFunc, and the tiles that are chosen for it."""
    target = Target.current(allow_none=True)
    settings = repr((options.candidates, options.epsilon, options.guard_memory))
    return build_context(str(target), to_json(device), settings)


def construct_cpu_kernel(
    func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions, tiles: TileChoices = NO_CHOICES
) -> PrimFunc:
    """``func`` scheduled for ``device``; never raises for what cannot be constructed, but says why in its choice.

    ``tiles`` replace those that construction chooses (`plan/chosen_tiles.py`).
    """
    if is_step_loop(func):
        return looped_kernel(func, lambda step: construct_cpu_kernel(step, name, device, options, tiles))
    try:
        with timed_construction():
            body, choice = _constructed(func, name, device, options, tiles)
    except IllegalRewrite as refusal:
        body, choice = fallback_kernel(func, name, device, refusal)
    return with_choice(with_turned_divisions(body), choice)


def chain_of(func: PrimFunc) -> ChainVerdict | None:
    """How a chain that became ``func`` is divided into panels, and its time; None where it is no chain."""
    text = func.attrs.get(CHAIN) if func.attrs else None
    return None if text is None else from_json(ChainVerdict, str(text))


def _constructed(
    func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions, tiles: TileChoices
) -> tuple[PrimFunc, KernelChoice]:
    if func.attrs and ATTENTION in func.attrs:
        return _attention(func, name, device, tiles)
    read = read_operator(func, name)
    constant = [int(i) for i in func.attrs[CONSTANT_PARAMS]] if func.attrs and CONSTANT_PARAMS in func.attrs else []
    constants = [read.params[i] for i in constant]
    chain = chain_of(func)
    cell, refusals = _cell(read, constants, device) if chain is None else (None, [])
    operator = simplify(read) if cell is None else cell.operator
    if cell is not None:
        body, forms, notes = body_of(cell.forms, operator), cell.forms, notes_of(cell.forms)
    elif chain is None or chain.plan is None:
        body, forms, notes = _groups(operator, constants, device, options, tiles)
    else:
        body, forms, notes = _chain(operator, chain.plan, constants, device, options, tiles)
    body = on_cpu(body, device)
    notes = [*refusals, *notes, *size_notes(operator), *cut_notes(body), *call_notes(body)]
    params, body = any_alignment(packed_params(operator.params, forms), body)
    choice = choice_of(operator, forms, notes, device)
    if cell is not None:
        choice = replace(choice, expected_s=cell.expected_s)
    if chain is not None:
        choice = replace(choice, expected_s=chain.fused_us * 1e-6)
    return function_like(func, params, body), choice


def _cell(
    operator: OperatorBody, constants: Sequence[Buffer], device: DeviceSpec
) -> tuple[CellKernel | None, list[str]]:
    """The kernel of a recurrent cell, and for one that has none why it goes the way of any operator."""
    try:
        return cell_kernel(operator, constants, device), []
    except IllegalRewrite as refusal:
        return None, [f"no kernel of a cell: {refusal}"]


def _groups(
    operator: OperatorBody,
    constants: Sequence[Buffer],
    device: DeviceSpec,
    options: BuildOptions,
    tiles: TileChoices,
) -> tuple[Stmt, list[Form], list[str]]:
    """The operator's groups one after the other, each over whole tensors; their forms, and what to say of them."""
    groups, refusals = cpu_groups(operator)
    forms = [form for group in groups for form in _forms(group, operator, constants, device, options, tiles)]
    return body_of(forms, operator), forms, [*refusals, *notes_of(forms)]


def _chain(
    operator: OperatorBody,
    panels: PanelPlan,
    constants: Sequence[Buffer],
    device: DeviceSpec,
    options: BuildOptions,
    tiles: TileChoices,
) -> tuple[Stmt, list[Form], list[str]]:
    """The loop over a chain's panels, the forms of each panel's groups, and what to say of them.

    One core computes a panel, so that its tiles are constructed for one.
    """
    whole = ChainTiming(operator=operator, constants=constants, device=device, options=options)
    made, said = chosen_for(
        PanelTiles,
        tiles,
        lambda: chain_workload(operator, constants, device),
        lambda chosen: _panels(*chosen_panel(operator, constants, chosen, device), whole),
    )
    try:
        body, forms, notes = made or _panels(divide(operator, panels.by_axis), NO_CHOICES, whole)
        return body, forms, [*notes, *said]
    except IllegalRewrite as refusal:
        body, forms, notes = _groups(operator, constants, device, options, NO_CHOICES)
        return body, forms, [f"no chain panel by panel: {refusal}", *notes]


def _panels(panel: Panel, tiles: TileChoices, whole: ChainTiming) -> tuple[Stmt, list[Form], list[str]]:
    """`_chain`, of one panel that can be divided; raises IllegalRewrite where ``tiles`` are not those of its groups."""
    device, constants, options = whole.device, whole.constants, whole.options
    before = [form for group in plan(panel.before) for form in _forms(group, panel.before, constants, device, options)]
    groups = plan(panel.operator)
    inside = [form for group in groups for form in _panel_forms(group, panel, whole, tiles)]
    refuse_left_out(notes_of(inside))
    kind = outer_kind(
        sum(form.program.prediction.busy_s for form in inside if form.program) * prod(panel.counts) / device.unit_count,
        device,
    )
    loop = emit_panels(panel, body_of(inside, panel.operator), kind)
    body = sequence(*([body_of(before, panel.before)] if before else []), loop)
    note = f"a chain in {prod(panel.counts)} panels of {' x '.join(map(str, panel.sizes))}"
    return body, [*before, *inside], [note, *notes_of([*before, *inside])]


def _panel_forms(group: TileGroup | RowGroup, panel: Panel, whole: ChainTiming, tiles: TileChoices) -> list[Form]:
    """How a group of a panel is run: products in the tiles that make the chain fastest, paddings by themselves."""
    core = whole.of_panel(panel)
    if isinstance(group, TileGroup):
        usual = panel_ways(group, panel, whole)[0].program
        constants, views = whole.constants, panel.views
        return _tile_forms(group, panel.operator, constants, core.device, whole.options, views, tiles, usual)
    forms = []
    for computation in group.computations:
        padding = next((item for item in panel.paddings if item.computation is computation), None)
        if padding is None:
            rows = canonical_rows(RowGroup(computations=(computation,)))
            forms.append(row_form(rows, panel.operator, core.device))
        else:
            note = f"{computation.name} panel by panel"
            forms.append(Form(path="rows", statements=(emit_padding(padding, panel),), program=None, notes=(note,)))
    return forms


def _attention(func: PrimFunc, name: str, device: DeviceSpec, tiles: TileChoices) -> tuple[PrimFunc, KernelChoice]:
    """What a function of `FuseAttention` computes, as its attribute says it."""
    part = AttentionPart(work=from_json(Attention, str(func.attrs[ATTENTION])))
    work = part.work
    made, said = chosen_for(
        AttentionTiles,
        tiles,
        lambda: part.workload(device),
        lambda chosen: attention_kernel(work, func.params, device, chosen),
    )
    statement, program, note = made or attention_kernel(work, func.params, device)
    params, body = any_alignment(func.params, on_cpu(statement, device))
    choice = KernelChoice(
        operator=name,
        path="rtile",
        notes=(note, *said),
        device=device.name,
        flops=work.flops,
        bytes=sum(tensor_bytes(param) for param in func.params),
        program=program,
    )
    return function_like(func, params, body), choice


def _forms(
    group: CpuGroup,
    operator: OperatorBody,
    constants: Sequence[Buffer],
    device: DeviceSpec,
    options: BuildOptions,
    tiles: TileChoices = NO_CHOICES,
) -> list[Form]:
    """How the group is run: by one kernel, or row by row where no rTile has a spatial axis to vectorise."""
    check_time()
    if isinstance(group, WindowGroup):
        return [window_form(group, device, tiles)]
    if isinstance(group, RowGroup):
        return [row_form(canonical_rows(group), operator, device, tiles)]
    return _tile_forms(group, operator, constants, device, options, tiles=tiles)


def _tile_forms(
    group: TileGroup,
    operator: OperatorBody,
    constants: Sequence[Buffer],
    device: DeviceSpec,
    options: BuildOptions,
    views: Sequence[PanelView] = (),
    tiles: TileChoices = NO_CHOICES,
    usual: RProgram | None = None,
) -> list[Form]:
    """The best rProgram's kernel; an anchor that no rTile suits (of a single point, say) comes before its epilogue.

    ``views`` are those of a panel, where it is one, and ``usual`` goes before what is best for the product alone.
    """
    anchor, expr, construction = construct_anchor(group, operator, constants, device, options)
    check_runs(anchor, views)
    if usual is not None:
        construction = replace(construction, programs=(usual, *construction.programs))
    program, chosen = program_for(expr, construction, device, tiles)
    if program is None:
        behind = group.epilogue if group.border is None else (group.border,)
        single = [canonical_rows(RowGroup(computations=(computation,))) for computation in (group.anchor, *behind)]
        first, *rest = [row_form(rows, operator, device) for rows in single]
        return [replace(first, notes=(*construction.notes, *first.notes)), *rest]
    kernel = emit_tile_kernel(anchor, expr, group.epilogue, program, device, operator.params)
    border = () if group.border is None else (fill_border(group.border, device),)
    note = f"{group.anchor.name} in register tiles {program.tile('L0')}" + fused_note(group.epilogue)
    note += ", between the borders of a padded tensor" if border else ""
    return [
        Form(
            path="rtile",
            statements=(*border, *kernel.statements),
            program=program,
            notes=(*construction.notes, note, *chosen),
            packs=kernel.packs,
        )
    ]
