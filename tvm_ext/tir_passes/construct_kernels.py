"""The pass that gives every TensorIR function its kernel: constructed by Roller, or a fallback, with a reason.

The way of an operator: it is divided into parts, one kernel each (`kinds/registry.py`); the kind of a part writes its
kernel, from Roller's rPrograms where it has reuse. On GPUs kernels get their pipelines, and the device's compiler may
refuse them: the next one follows. What has no kernel is left to a plain schedule, and the choice says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from tvm_ext._tvm import ALREADY_SCHEDULED, IRModule, PassContext, PrimFunc, Target, copy_module, module_pass
from tvm_ext.cost.gpu_rtasks import shortest_s
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
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
from tvm_ext.support.limits import timed_construction

from .emit.schedule_fallback import fallback_kernel
from .emit.schedule_stock_gpu import schedule_by_stock
from .emit.step_loops import is_step_loop, looped_kernel
from .expressions.cut_expressions import cut_notes
from .expressions.exact_floats import keep_floats, pass_nan_on
from .expressions.on_cpu import call_notes, on_cpu
from .expressions.turn_divisions import with_turned_divisions
from .kinds.registry import ATTEMPTS, Division, constructions, divisions, kinds_digest, own_choices, tunable_parts
from .pipelining.plan import Wishes
from .pipelining.route import refuse_too_much_memory, wishes_of, with_pipelines, without_stages
from .plan.alternatives import Pick, best_programs, frugal_picker, with_alternatives
from .plan.chosen_tiles import NO_CHOICES, FailedTiles, TileChoices
from .plan.context import UnscheduledOperator
from .plan.equal_functions import EqualFunctions
from .plan.form import (
    Form,
    any_alignment,
    body_of,
    choice_of,
    first_and_count,
    function_like,
    notes_of,
    packed_params,
    unscheduled,
    with_choice,
)
from .plan.open_rows import with_open_rows
from .plan.plan_kernels import size_notes

PINNED = "tvm_ext.pinned_stages"
"""PrimFunc attribute, during construction: the kernel's tile was chosen, and its stages with it."""

Accept = Callable[[PrimFunc], None]
Scheduled = tuple[PrimFunc, KernelChoice]


@module_pass(opt_level=0, name="tvm_ext.ConstructKernels")
class ConstructKernels:
    """Replace every unscheduled PrimFunc by a scheduled one, with its `KernelChoice` in attribute ``tvm_ext.choice``.

    A CPU kernel whose choice has ``packs`` wants its constants in another layout: `PackConstants` must follow. GPU
    kernels are thread-bound loops.

    * ``device``: the CPU or the GPU to construct for; no GPU need be present.
    * ``options``: ``candidates`` and ``epsilon`` go to the construction (paper §3.2). On GPUs ``enable_roller="auto"``
      leaves to stock TVM what is too large or too small for the device, and ``False`` leaves it everything.
    * ``cache``: where compiled CPU kernels are looked up. Those found are sealed: they have no body, and
      `code_generation` must follow. Left out: every kernel is constructed.
    * ``tiles``: tiles that replace construction's, by the keys of their workloads.
    * ``failed``: tiles of GPU kernels that were measured to fail: none of them is made.
    * ``alternatives``: whether operators that run beside others get a second kernel, of less work, for schedules to
      choose from.
    * ``outside``: the CPU as loops over what is counted at run time find it, which no schedule takes; None: ``device``.
    * ``accept``: looks at each GPU kernel and refuses it by raising IllegalRewrite: the compiler's word, see
      `cuda_check`.
    * ``wishes``: the pipelines that a GPU kernel gets before it is accepted; None: those that ``options`` ask for.

    Raises TargetError for an operator that a GPU cannot run: beyond 32-bit indices, of a type without arithmetic, or
    too large in its smallest tile.
    """

    def __init__(
        self,
        device: DeviceSpec,
        options: BuildOptions,
        *,
        cache: KernelCache | None = None,
        tiles: TileChoices = NO_CHOICES,
        alternatives: bool = False,
        outside: DeviceSpec | None = None,
        accept: Accept | None = None,
        wishes: Wishes | None = None,
        failed: FailedTiles = frozenset(),
    ) -> None:
        self.device, self.options, self.tiles, self.alternatives = device, options, tiles, alternatives
        self.failed = failed
        self.outside = device if outside is None else outside
        self.cache = cache if cache is not None and device.kind == "cpu" else KernelCache(None)
        self.accept, self.wishes = accept, wishes

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        context = kernel_context(self.device, self.options) if self.cache.is_on else ""
        made = EqualFunctions()
        for gv, func in unscheduled(mod):
            result[gv] = self._kernel(func, gv.name_hint, context, made)
        return with_alternatives(mod, result, self.device, self._alternative) if self.alternatives else result

    def _kernel(self, func: PrimFunc, name: str, context: str, made: EqualFunctions) -> PrimFunc:
        """The kernel of ``func``: from the cache, from an equal function of this module, else constructed."""
        func = with_open_rows(func) if self.device.kind == "cpu" else func
        device = self.outside if is_step_loop(func) else self.device
        is_kept = self.cache.is_on and params_of(func) is not None
        # In the key are the tiles that are chosen for this kernel, and it is made of these: others are nothing to it.
        operator = UnscheduledOperator(func=func, name=name, device=device, options=self.options)
        tiles = own_choices(operator, self.tiles) if params_of(func) is not None else self.tiles
        key = kernel_key(func, name, f"{context} {sorted(tiles.items())}" if tiles else context) if is_kept else None
        entry = self._entry(func, key) if key is not None else None
        if key is not None and entry is not None:
            return seal(func, entry, key, {CHOICE: entry.record.choice, ALREADY_SCHEDULED: True, "s_tir": True})
        kernel = made.find(func, name)
        if kernel is not None:
            self.cache.duplicates += 1
        else:
            kernel = construct_kernel(
                func, name, device, self.options, tiles, accept=self.accept, wishes=self.wishes, failed=self.failed
            )
            made.remember(func, kernel)
        kernel = kernel if key is None else kernel.with_attr(KERNEL_KEY, key)
        if self.cache.on_construction is not None:
            self.cache.on_construction(name, kernel)
        return kernel

    def _entry(self, func: PrimFunc, key: str) -> CachedKernel | None:
        """The cache's entry under ``key``, if it can be the kernel of ``func``."""
        entry = self.cache.get(key)
        if entry is None:
            return None
        try:
            choice = from_json(KernelChoice, entry.record.choice)
            reason = misfit(func, entry, {how.param_index: how.shape for how in choice.packs})
        except ValueError as error:
            reason = str(error)
        if reason:
            self.cache.reject(key, reason)
            return None
        return entry

    def _alternative(self, func: PrimFunc, name: str, own: KernelChoice, least_tasks: int) -> PrimFunc | None:
        """A kernel of less work than its ``own`` one, of ``least_tasks`` at least."""
        if own.path != "rtile" or own.program is None or own.expected_s is not None or params_of(func) is None:
            return None
        operator = UnscheduledOperator(func=func, name=name, device=self.device, options=self.options)
        if self.device.kind != "cpu":
            less_work = frugal_picker(own.program, least_tasks, shortest_s(self.device))
            return _by_pick(operator, less_work, self.accept, self.wishes, self.failed)
        return _by_less_work(operator, own, least_tasks)


def _by_less_work(operator: UnscheduledOperator, own: KernelChoice, least_tasks: int) -> PrimFunc | None:
    """A CPU kernel that reads constants as the ``own`` one does."""
    func, name = operator.func, operator.name
    for tiles in (less for part in tunable_parts(operator) for less in part.less_work(own, least_tasks)):
        kernel = construct_kernel(func, name, operator.device, operator.options, tiles)
        if from_json(KernelChoice, str(kernel.attrs[CHOICE])).packs == own.packs:
            return kernel
    return None


def _by_pick(
    operator: UnscheduledOperator, pick: Pick, accept: Accept | None, wishes: Wishes | None, failed: FailedTiles
) -> PrimFunc | None:
    """A GPU kernel by an rProgram of ``pick``; None where it has none, or that is not all there is to it."""
    try:
        with timed_construction():
            division = next(divisions(operator))
            if division.kind:
                return None  # of a chain the model ranks the tiles as a whole
            ways = islice(division.ways(NO_CHOICES, pick), ATTEMPTS)
            made = (_assembled(operator.func, division, forms) for _, forms in ways)
            return with_choice(*_first_accepted(made, operator, wishes, accept, failed))
    except IllegalRewrite:
        return None


def kernel_context(device: DeviceSpec, options: BuildOptions) -> str:
    """Digest of what decides every kernel of a build beside its PrimFunc, and the tiles that are chosen for it."""
    target = Target.current(allow_none=True)
    settings = repr((options.candidates, options.epsilon, options.winograd, kinds_digest()))
    return build_context(str(target), to_json(device), settings)


def construct_kernel(
    func: PrimFunc,
    name: str,
    device: DeviceSpec,
    options: BuildOptions,
    tiles: TileChoices = NO_CHOICES,
    *,
    accept: Accept | None = None,
    wishes: Wishes | None = None,
    failed: FailedTiles = frozenset(),
) -> PrimFunc:
    """``func`` scheduled for ``device``, its `KernelChoice` attached, which says why where nothing is constructed.

    ``tiles`` replace those that construction chooses. ``accept`` may refuse a GPU kernel, by IllegalRewrite, and those
    of ``failed`` are refused: the next candidate follows, after `ATTEMPTS` stock TVM's. ``wishes``: pipelines other
    than those that ``options`` ask for. Raises TargetError for a GPU, as the pass says.
    """
    if device.kind == "cpu" and is_step_loop(func):
        return looped_kernel(func, lambda step: construct_kernel(step, name, device, options, tiles))
    operator = UnscheduledOperator(func=func, name=name, device=device, options=options)
    if device.kind != "cpu" and options.enable_roller is False:
        return with_choice(*schedule_by_stock(func, name, device, "enable_roller=False"))
    try:
        with timed_construction():
            kernel = _first_accepted(_assemblies(operator, tiles), operator, wishes, accept, failed)
    except IllegalRewrite as refusal:
        kernel = _plainly_scheduled(operator, refusal, wishes)
    return with_choice(*kernel)


def candidates(
    func: PrimFunc, device: DeviceSpec, k: int, *, name: str = "operator", options: BuildOptions | None = None
) -> tuple[tuple[RProgram, PrimFunc], ...]:
    """Up to ``k`` GPU kernels of ``func``, best predicted first, each with the rProgram of its most laborious group.

    The other groups of the operator are in their best form in all of them. Empty where no emitter accepts ``func``.
    """
    chosen = (options or BuildOptions()).updated(candidates=k)
    operator = UnscheduledOperator(func=func, name=name, device=device, options=chosen)
    try:
        division = next(divisions(operator))
        made = [
            (program, _pipelined(_assembled(func, division, forms), operator, None))
            for program, forms in islice(division.ways(NO_CHOICES, best_programs), k)
        ]
    except IllegalRewrite:
        return ()
    return tuple((program, with_choice(*kernel)) for program, kernel in made if program is not None)


def _assemblies(operator: UnscheduledOperator, tiles: TileChoices) -> Iterator[Scheduled]:
    """Kernels in the order to try them."""
    for division, _, forms in constructions(operator, tiles):
        yield _assembled(operator.func, division, forms)


def _assembled(func: PrimFunc, division: Division, forms: Sequence[Form]) -> Scheduled:
    """One function that runs the forms of all parts in order, with the buffers that pass between them."""
    made, device = division.context.operator, division.context.device
    params, body = list(made.params), body_of(forms, made)
    notes = [*division.refusals, *notes_of(forms), *size_notes(made)]
    if device.kind == "cpu":
        body = on_cpu(body, device)
        notes += [*cut_notes(body), *call_notes(body)]
        params, body = any_alignment(packed_params(params, forms), body)
    else:
        body = pass_nan_on(keep_floats(body))
    choice = choice_of(made, forms, notes, device)
    for part in division.parts:
        choice = part.describe(choice, forms)
    made = with_turned_divisions(function_like(func, params, body))
    return (made.with_attr(PINNED, True) if any(form.pinned for form in forms) else made), choice


def _plainly_scheduled(operator: UnscheduledOperator, refusal: IllegalRewrite, wishes: Wishes | None) -> Scheduled:
    """What has no constructed kernel: on a CPU by the fallback, on a GPU by stock TVM."""
    func, name, device = operator.func, operator.name, operator.device
    if device.kind == "cpu":
        body, choice = fallback_kernel(func, name, device, refusal)
        return with_turned_divisions(body), choice
    return _pipelined(
        schedule_by_stock(func, name, device, f"no kernel constructed: {refusal.problem}"), operator, wishes
    )


def _first_accepted(
    kernels: Iterable[Scheduled],
    operator: UnscheduledOperator,
    wishes: Wishes | None,
    accept: Accept | None,
    failed: FailedTiles,
) -> Scheduled:
    """The first of ``kernels`` with its pipelines, or without where that is refused; IllegalRewrite where all are."""
    refusals: list[str] = []
    for made in kernels:
        pipelined = _pipelined(made, operator, wishes)
        plain = made[0].without_attr(PINNED), without_stages(made[1])
        is_plain = pipelined[1].pipeline is None or not pipelined[1].pipeline.buffers
        for func, choice in [pipelined] if is_plain else [pipelined, plain]:
            problem = _measured_to_fail(choice, failed) or _refusal(func, operator.device, accept)
            if problem is None:
                return func, replace(choice, notes=(*choice.notes, *first_and_count(refusals)))
            refusals.append(problem)
    raise IllegalRewrite(f"none of {len(refusals)} candidates is accepted: {', '.join(refusals[:1])}")


def _pipelined(kernel: Scheduled, operator: UnscheduledOperator, wishes: Wishes | None) -> Scheduled:
    """``kernel`` with the pipelines that were asked for, or that its tile was chosen with; CPUs have none."""
    if operator.device.kind == "cpu":
        return kernel
    (func, choice), asked = kernel, wishes or wishes_of(operator.options)
    if choice.tile is not None and PINNED in func.attrs:
        shared, register = choice.tile.shared_stages, choice.tile.register_stages
        asked = replace(
            asked, shared_stages=asked.shared_stages or shared, register_stages=asked.register_stages or register
        )
    return with_pipelines(func.without_attr(PINNED), choice, operator.device, asked)


def _measured_to_fail(choice: KernelChoice, failed: FailedTiles) -> str | None:
    """Why the kernel is not taken; None where nothing of the kind is known."""
    if choice.tile is None or (choice.workload, choice.tile.configuration) not in failed:
        return None
    return f"{choice.tile} was measured to fail"


def _refusal(func: PrimFunc, device: DeviceSpec, accept: Accept | None) -> str | None:
    """Why the kernel is not taken: by its shared memory, or by ``accept``; None where nothing speaks against it."""
    try:
        if device.kind != "cpu":
            refuse_too_much_memory(func, device)
        if accept is not None:
            accept(func)
    except IllegalRewrite as refusal:
        return refusal.problem
    return None
