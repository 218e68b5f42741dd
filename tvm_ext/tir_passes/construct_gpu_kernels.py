"""The pass that gives every TensorIR function its GPU kernels: constructed by Roller, or stock TVM's, with a reason.

The way of an operator: its computations are divided into groups (`plan_gpu_kernels.py`); Roller constructs rPrograms
for a group's anchor; the first that an emitter accepts becomes the kernel. Matrix units come before vector units where
type and device have them. What no emitter accepts is left to stock TVM's dlight, and the choice says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tvm_ext._tvm import For, IRModule, PassContext, PrimFunc, copy_module, module_pass
from tvm_ext.analysis.computations import Computation, OperatorBody, read_operator
from tvm_ext.analysis.gemm_form import supports_mma
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.gpu_rtasks import shortest_s
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import GpuPlan, KernelChoice, Path
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.limits import check_time, timed_construction

from .emit.gpu_chains.emit import emit_chain
from .emit.gpu_rows.emit import emit_simt_rows
from .emit.mma_tiles.emit import emit_mma_tile
from .emit.schedule_stock_gpu import schedule_by_stock
from .emit.simt_tiles.emit import emit_simt_tile
from .expressions.exact_floats import keep_floats, pass_nan_on
from .expressions.turn_divisions import turn_divisions
from .pipelining.plan import Wishes
from .pipelining.route import wishes_of, with_pipelines
from .plan.alternatives import Pick, best_programs, frugal_picker, with_alternatives
from .plan.anchors import construct_for_vector_units, gpu_anchor, kept_buffers, row_program
from .plan.canonical import canonical_rows
from .plan.equal_functions import EqualFunctions
from .plan.form import (
    Form,
    body_of,
    choice_of,
    flops_of,
    function_like,
    fused_note,
    notes_of,
    unscheduled,
    with_choice,
)
from .plan.gpu_chain import ChainGroup, chain_program, with_chains
from .plan.gpu_limits import check_types, index_limit_passed, nothing_fits
from .plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from .plan.plan_kernels import RowGroup, TileGroup, size_notes
from .roller.construct_mma import construct_mma

ATTEMPTS = 4
"""Candidates of an operator that are shown to ``accept``: each may cost a run of the device's compiler."""

Accept = Callable[[PrimFunc], None]
GpuGroup = TileGroup | RowGroup | ChainGroup


@module_pass(opt_level=0, name="tvm_ext.ConstructGpuKernels")
class ConstructGpuKernels:
    """Make every unscheduled PrimFunc thread-bound loops, with its `KernelChoice` in attribute ``tvm_ext.choice``.

    Parameters
    ----------
    device
        The GPU to construct for; none need be present.
    options
        ``candidates`` and ``epsilon`` go to the construction (paper §3.2). ``enable_roller="auto"`` leaves to stock TVM
        what is too large or too small for the device.
    accept
        Looks at each kernel and refuses it by raising IllegalRewrite: the compiler's word, see `cuda_check`.
    wishes
        The pipelines that a kernel gets before it is accepted; None: those that ``options`` ask for.
    alternatives
        Whether operators that run beside others get a second kernel, of less work, for schedules to choose from.

    Raises
    ------
    TargetError
        for an operator that the device cannot run: beyond 32-bit indices, of a type without arithmetic, or too large
        in its smallest tile.
    """

    def __init__(
        self,
        device: DeviceSpec,
        options: BuildOptions,
        accept: Accept | None = None,
        wishes: Wishes | None = None,
        alternatives: bool = False,
    ) -> None:
        self.device, self.options, self.accept, self.wishes = device, options, accept, wishes
        self.alternatives = alternatives

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        made = EqualFunctions()
        for gv, func in unscheduled(mod):
            kernel = made.find(func, gv.name_hint)
            if kernel is None:
                kernel = construct_gpu_kernel(func, gv.name_hint, self.device, self.options, self.accept, self.wishes)
                made.remember(func, kernel)
            result[gv] = kernel
        return with_alternatives(mod, result, self.device, self._alternative) if self.alternatives else result

    def _alternative(self, func: PrimFunc, name: str, own: KernelChoice, least_blocks: int) -> PrimFunc | None:
        if own.path != "rtile" or own.program is None:
            return None
        less_work = frugal_picker(own.program, least_blocks, shortest_s(self.device))
        return alternative_gpu_kernel(func, name, less_work, self.device, self.options, self.accept, self.wishes)


def construct_gpu_kernel(
    func: PrimFunc,
    name: str,
    device: DeviceSpec,
    options: BuildOptions,
    accept: Accept | None = None,
    wishes: Wishes | None = None,
) -> PrimFunc:
    """``func`` as GPU kernels for ``device``, its `KernelChoice` attached; raises TargetError as the pass says.

    ``accept`` may refuse a kernel, by IllegalRewrite: the next candidate follows, after `ATTEMPTS` stock TVM's.
    ``wishes``: pipelines other than those that ``options`` ask for.
    """
    wishes = wishes or wishes_of(options)
    try:
        with timed_construction():
            body, choice = _accepted(func, name, device, options, wishes, accept)
    except IllegalRewrite as refusal:
        body, choice = schedule_by_stock(func, name, device, f"no kernel constructed: {refusal.problem}")
        body, choice = with_pipelines(body, choice, device, wishes)
    return with_choice(body, choice)


def alternative_gpu_kernel(
    func: PrimFunc,
    name: str,
    pick: Pick,
    device: DeviceSpec,
    options: BuildOptions,
    accept: Accept | None = None,
    wishes: Wishes | None = None,
) -> PrimFunc | None:
    """A kernel of ``func`` by an rProgram of ``pick``; None where it has none, or that is not all there is to it."""
    try:
        with timed_construction():
            operator = _read(func, name, device)
            if any(isinstance(group, ChainGroup) for group in _plan(operator, device, options)[0]):
                return None  # of a chain the model ranks the tiles as a whole
            attempts = itertools.islice(_assemblies(func, operator, device, options, pick), ATTEMPTS)
            body, choice = _first_accepted(attempts, device, wishes or wishes_of(options), accept)
    except IllegalRewrite:
        return None
    return with_choice(body, choice)


def _accepted(
    func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions, wishes: Wishes, accept: Accept | None
) -> tuple[PrimFunc, KernelChoice]:
    operator = _read(func, name, device)
    _check_size(operator, options)
    return _first_accepted(_attempts(func, operator, device, options), device, wishes, accept)


def _first_accepted(
    attempts: Iterable[tuple[RProgram | None, PrimFunc, KernelChoice]],
    device: DeviceSpec,
    wishes: Wishes,
    accept: Accept | None,
) -> tuple[PrimFunc, KernelChoice]:
    refusals: list[str] = []
    for _, plain, choice_of_plain in attempts:
        for body, choice in _with_and_without_pipelines(plain, choice_of_plain, device, wishes):
            problem = _refusal(body, accept)
            if problem is None:
                return body, replace(choice, notes=(*choice.notes, *_first_and_count(refusals)))
            refusals.append(problem)
    raise IllegalRewrite(f"none of {len(refusals)} candidates is accepted: {', '.join(refusals[:1])}")


def _attempts(
    func: PrimFunc, operator: OperatorBody, device: DeviceSpec, options: BuildOptions
) -> Iterator[tuple[RProgram | None, PrimFunc, KernelChoice]]:
    """The assemblies to show to ``accept``, best first: after those of a chain, those of its products apart."""
    yield from itertools.islice(_assemblies(func, operator, device, options), ATTEMPTS)
    if any(isinstance(group, ChainGroup) for group in _plan(operator, device, options)[0]):
        apart = options.updated(enable_persistent_fusion=False)
        yield from itertools.islice(_assemblies(func, operator, device, apart), ATTEMPTS)


def _with_and_without_pipelines(
    body: PrimFunc, choice: KernelChoice, device: DeviceSpec, wishes: Wishes
) -> Iterator[tuple[PrimFunc, KernelChoice]]:
    """The kernel with the pipelines that were asked for; then, in case that is refused, without."""
    pipelined, described = with_pipelines(body, choice, device, wishes)
    yield pipelined, described
    if pipelined is not body:
        yield body, choice


def _refusal(body: PrimFunc, accept: Accept | None) -> str | None:
    """Why ``accept`` refuses the kernel; None where it does not."""
    if accept is None:
        return None
    try:
        accept(body)
    except IllegalRewrite as refusal:
        return refusal.problem
    return None


def candidates(
    func: PrimFunc, device: DeviceSpec, k: int, *, name: str = "operator", options: BuildOptions | None = None
) -> tuple[tuple[RProgram, PrimFunc], ...]:
    """Up to ``k`` kernels of ``func``, best predicted first, each with the rProgram of its most laborious group.

    The other groups of the operator are in their best form in all of them. Empty where no emitter accepts ``func``.
    """
    chosen = (options or BuildOptions()).updated(candidates=k)
    try:
        made = list(itertools.islice(_assemblies(func, _read(func, name, device), device, chosen), k))
    except IllegalRewrite:
        return ()
    return tuple(
        (program, with_choice(*with_pipelines(body, choice, device, wishes_of(chosen))))
        for program, body, choice in made
        if program is not None
    )


def _assemblies(
    func: PrimFunc, operator: OperatorBody, device: DeviceSpec, options: BuildOptions, pick: Pick = best_programs
) -> Iterator[tuple[RProgram | None, PrimFunc, KernelChoice]]:
    """(rProgram of the most laborious group, function, choice) for each form of that group, as ``pick`` has them."""
    groups, apart = _plan(operator, device, options)
    main = max(range(len(groups)), key=lambda position: sum(map(flops_of, _computations(groups[position]))))
    best: list[Form | None] = []
    for form in _forms(groups[main], operator, device, options, pick):
        best = best or [None if p == main else next(_forms(g, operator, device, options)) for p, g in enumerate(groups)]
        body, choice = _assemble(func, operator, device, [form if item is None else item for item in best], apart)
        yield form.program, body, choice


def _plan(
    operator: OperatorBody, device: DeviceSpec, options: BuildOptions
) -> tuple[Sequence[GpuGroup], Sequence[str]]:
    """The operator's kernels in order, and why products that follow each other are none."""
    groups = plan_for_gpu(operator)
    if options.enable_persistent_fusion is False:
        return groups, ()
    return with_chains(groups, operator, device, always=options.enable_persistent_fusion is True)


def _read(func: PrimFunc, name: str, device: DeviceSpec) -> OperatorBody:
    operator = simplify_for_gpu(read_operator(func, name))
    check_types(operator, device)
    return operator


def _check_size(operator: OperatorBody, options: BuildOptions) -> None:
    problem = index_limit_passed(operator)
    if problem is None:
        return
    if options.enable_roller == "auto":
        raise IllegalRewrite(problem)
    raise TargetError(problem, "use a smaller batch, or pass enable_roller='auto' to leave the operator to stock TVM")


def _computations(group: GpuGroup) -> tuple[Computation, ...]:
    return (group.anchor, *group.prologue, *group.epilogue) if isinstance(group, TileGroup) else group.computations


def _forms(
    group: GpuGroup, operator: OperatorBody, device: DeviceSpec, options: BuildOptions, pick: Pick = best_programs
) -> Iterator[Form]:
    """The group's kernels, best first. Raises IllegalRewrite, with every emitter's reason, where there are none."""
    if isinstance(group, RowGroup):
        yield _row_form(group, operator, device)
        return
    if isinstance(group, ChainGroup):
        yield from _chain_forms(group, operator, device)
        return
    refusals: list[str] = []
    accepted = 0
    for emit, program, label in _tile_attempts(group, operator, device, options, refusals, pick):
        check_time()
        try:
            kernel = emit(program)
        except IllegalRewrite as refusal:
            refusals.append(f"{label}, tile {program.tile('L1')}: {refusal}")
            continue
        accepted += 1
        yield _form("rtile", kernel, program, _tile_notes(group, program, kernel, label, refusals))
    if not accepted:
        raise IllegalRewrite(f"no kernel for {group.anchor.name}: " + "; ".join(_first_and_count(refusals)))


def _tile_attempts(
    group: TileGroup, operator: OperatorBody, device: DeviceSpec, options: BuildOptions, refusals: list[str], pick: Pick
) -> Iterator[tuple[Callable[[RProgram], SimtKernel], RProgram, str]]:
    """(emitter of an rProgram, rProgram, the units that it uses), in the order to try them.

    What keeps the matrix units out is added to ``refusals``, but only where the device has them for the type.
    """
    computation, expr = gpu_anchor(group, operator)

    def emitter(emit: Callable[..., SimtKernel]) -> Callable[[RProgram], SimtKernel]:
        return lambda program: emit(computation, expr, group.prologue, group.epilogue, program, device, operator.params)

    why_not = supports_mma(expr, device)
    if why_not is None:
        for program in pick(construct_mma(expr, device, k=options.candidates)):
            yield emitter(emit_mma_tile), program, "matrix units"
    elif device.peak_gflops_of(f"{expr.inputs[0].dtype}_tensor") is not None:
        refusals.append(f"matrix units: {why_not}")
    construction = construct_for_vector_units(expr, device, options)
    if not construction.programs:
        raise _nothing_fits(expr, device, options)
    label = "vector units" + "".join(f" ({note})" for note in construction.notes)
    for program in pick(construction):
        yield emitter(emit_simt_tile), program, label


def _nothing_fits(expr: TensorExpr, device: DeviceSpec, options: BuildOptions) -> Exception:
    error = nothing_fits(expr.name, tuple(axis.extent for axis in expr.axes), device)
    return IllegalRewrite(error.problem) if options.enable_roller == "auto" else error


def _tile_notes(
    group: TileGroup, program: RProgram, kernel: SimtKernel, label: str, refusals: Sequence[str]
) -> list[str]:
    how = f"{group.anchor.name} on {label} in tiles {program.tile('L1')}"
    computed = f", {', '.join(computation.name for computation in group.prologue)} computed on the way to shared memory"
    first = how + (computed if group.prologue else "") + fused_note(group.epilogue)
    return [first, *kernel.notes, *_first_and_count(refusals)]


def _first_and_count(refusals: Sequence[str]) -> list[str]:
    """The first refusal in words and the number of the others: they mostly repeat it."""
    if not refusals:
        return []
    others = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return [f"not taken: {refusals[0]}{others}"]


def _chain_forms(group: ChainGroup, operator: OperatorBody, device: DeviceSpec) -> Iterator[Form]:
    """The chain as one kernel, in each of its tiles; `_plan` has made sure that it can be emitted."""
    names = " + ".join(link.computation.name for link in group.links)
    for tile, time in group.ranked:
        kernel = emit_chain(group, tile, device, operator.params)
        program = chain_program(group, tile, time, device)
        yield _form("rtile", kernel, program, [f"{names} in one kernel on {group.units}: {tile}", *kernel.notes])


def _row_form(group: RowGroup, operator: OperatorBody, device: DeviceSpec) -> Form:
    rows = canonical_rows(group)
    kernel = emit_simt_rows(rows.computations, device, kept_buffers(rows, operator), operator.params)
    name = " + ".join(computation.name for computation in group.computations)
    return _form("rows", kernel, row_program(group, operator, device), [f"{name} row by row", *kernel.notes])


def _assemble(
    func: PrimFunc, operator: OperatorBody, device: DeviceSpec, forms: Sequence[Form], remarks: Sequence[str] = ()
) -> tuple[PrimFunc, KernelChoice]:
    """One function that runs the forms of all groups in order, with the buffers that pass between them."""
    body = pass_nan_on(keep_floats(turn_divisions(body_of(forms, operator))))
    choice = choice_of(operator, forms, [*notes_of(forms), *remarks, *size_notes(operator)], device)
    return function_like(func, operator.params, body), choice


def _form(path: Path, kernel: SimtKernel, program: RProgram | None, notes: Sequence[str]) -> Form:
    """The emitter's kernel as a `Form`."""
    assert not kernel.packs, "constants are not announced to GPU emitters"
    planned = GpuPlan(
        launches=sum(isinstance(statement, For) for statement in kernel.statements),
        blocks=kernel.blocks,
        threads=kernel.threads,
        shared_bytes=kernel.shared_bytes,
        register_count=kernel.register_count,
    )
    return Form(path=path, statements=kernel.statements, program=program, notes=tuple(notes), gpu=planned)
