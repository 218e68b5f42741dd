"""The pass that gives every TensorIR function its GPU kernels: constructed by Roller, or stock TVM's, with a reason.

The way of an operator: its computations are divided into groups (`plan_gpu_kernels.py`); Roller constructs rPrograms
for a group's anchor; the first that an emitter accepts becomes the kernel. Matrix units come before vector units where
type and device have them. What no emitter accepts is left to stock TVM's dlight, and the choice says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tvm_ext._tvm import IRModule, PassContext, PrimFunc, copy_module, module_pass
from tvm_ext.cost.gpu_rtasks import shortest_s
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.limits import timed_construction

from .emit.schedule_stock_gpu import schedule_by_stock
from .expressions.exact_floats import keep_floats, pass_nan_on
from .expressions.turn_divisions import turn_divisions
from .kinds.registry import part_of
from .pipelining.plan import Wishes
from .pipelining.route import wishes_of, with_pipelines
from .plan.alternatives import Pick, best_programs, frugal_picker, with_alternatives
from .plan.context import KernelContext, UnscheduledOperator
from .plan.equal_functions import EqualFunctions
from .plan.form import (
    Form,
    body_of,
    choice_of,
    first_and_count,
    flops_of,
    function_like,
    notes_of,
    unscheduled,
    with_choice,
)
from .plan.gpu_chain import ChainGroup, with_chains
from .plan.gpu_limits import check_types, index_limit_passed
from .plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from .plan.plan_kernels import RowGroup, TileGroup, size_notes

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
            context = _context(func, name, device, options)
            if any(isinstance(group, ChainGroup) for group in _plan(context)[0]):
                return None  # of a chain the model ranks the tiles as a whole
            attempts = itertools.islice(_assemblies(func, context, pick), ATTEMPTS)
            body, choice = _first_accepted(attempts, device, wishes or wishes_of(options), accept)
    except IllegalRewrite:
        return None
    return with_choice(body, choice)


def _accepted(
    func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions, wishes: Wishes, accept: Accept | None
) -> tuple[PrimFunc, KernelChoice]:
    context = _context(func, name, device, options)
    _check_size(context)
    return _first_accepted(_attempts(func, context), device, wishes, accept)


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
                return body, replace(choice, notes=(*choice.notes, *first_and_count(refusals)))
            refusals.append(problem)
    raise IllegalRewrite(f"none of {len(refusals)} candidates is accepted: {', '.join(refusals[:1])}")


def _attempts(func: PrimFunc, context: KernelContext) -> Iterator[tuple[RProgram | None, PrimFunc, KernelChoice]]:
    """The assemblies to show to ``accept``, best first: after those of a chain, those of its products apart."""
    yield from itertools.islice(_assemblies(func, context), ATTEMPTS)
    if any(isinstance(group, ChainGroup) for group in _plan(context)[0]):
        apart = replace(context, options=context.options.updated(enable_persistent_fusion=False))
        yield from itertools.islice(_assemblies(func, apart), ATTEMPTS)


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
        made = list(itertools.islice(_assemblies(func, _context(func, name, device, chosen)), k))
    except IllegalRewrite:
        return ()
    return tuple(
        (program, with_choice(*with_pipelines(body, choice, device, wishes_of(chosen))))
        for program, body, choice in made
        if program is not None
    )


def _assemblies(
    func: PrimFunc, context: KernelContext, pick: Pick = best_programs
) -> Iterator[tuple[RProgram | None, PrimFunc, KernelChoice]]:
    """(rProgram of the most laborious part, function, choice) for each form of that part, as ``pick`` has them."""
    groups, apart = _plan(context)
    parts = [part_of(group, context) for group in groups]
    flops = [sum(map(flops_of, group.computations)) for group in groups]
    main = parts[flops.index(max(flops))]
    best: list[list[Form]] = []
    for forms in main.ways(pick):
        best = best or [[] if part is main else part.forms() for part in parts]
        chosen = [form for part, own in zip(parts, best, strict=True) for form in (forms if part is main else own)]
        body, choice = _assemble(func, context, chosen, apart)
        yield forms[0].program, body, choice


def _plan(context: KernelContext) -> tuple[Sequence[GpuGroup], Sequence[str]]:
    """The operator's kernels in order, and why products that follow each other are none."""
    groups, options = plan_for_gpu(context.operator), context.options
    if options.enable_persistent_fusion is False:
        return groups, ()
    always = options.enable_persistent_fusion is True
    return with_chains(groups, context.operator, context.device, always=always)


def _context(func: PrimFunc, name: str, device: DeviceSpec, options: BuildOptions) -> KernelContext:
    read = UnscheduledOperator(func=func, name=name, device=device, options=options).as_read
    operator = simplify_for_gpu(read.operator)
    check_types(operator, device)
    return replace(read, operator=operator)


def _check_size(context: KernelContext) -> None:
    problem = index_limit_passed(context.operator)
    if problem is None:
        return
    if context.options.enable_roller == "auto":
        raise IllegalRewrite(problem)
    raise TargetError(problem, "use a smaller batch, or pass enable_roller='auto' to leave the operator to stock TVM")


def _assemble(
    func: PrimFunc, context: KernelContext, forms: Sequence[Form], remarks: Sequence[str]
) -> tuple[PrimFunc, KernelChoice]:
    """One function that runs the forms of all parts in order, with the buffers that pass between them."""
    operator = context.operator
    body = pass_nan_on(keep_floats(turn_divisions(body_of(forms, operator))))
    choice = choice_of(operator, forms, [*notes_of(forms), *remarks, *size_notes(operator)], context.device)
    return function_like(func, operator.params, body), choice
