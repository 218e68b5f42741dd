"""The pass that gives every TensorIR function its CPU kernel: constructed by Roller, or a fallback, with a reason."""

from __future__ import annotations

from tvm_ext._tvm import (
    ALREADY_SCHEDULED,
    IRModule,
    PassContext,
    PrimFunc,
    Target,
    copy_module,
    module_pass,
)
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
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
from .emit.step_loops import is_step_loop, looped_kernel
from .expressions.cut_expressions import cut_notes
from .expressions.on_cpu import call_notes, on_cpu
from .expressions.turn_divisions import with_turned_divisions
from .kinds.registry import construct, kinds_digest, own_choices, tunable_parts
from .plan.alternatives import with_alternatives
from .plan.chosen_tiles import NO_CHOICES, TileChoices
from .plan.context import UnscheduledOperator
from .plan.equal_functions import EqualFunctions
from .plan.form import (
    any_alignment,
    body_of,
    choice_of,
    function_like,
    notes_of,
    packed_params,
    unscheduled,
    with_choice,
)
from .plan.open_rows import with_open_rows
from .plan.plan_kernels import size_notes


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
        operator = UnscheduledOperator(func=func, name=name, device=self.device, options=self.options)
        parts = tunable_parts(operator)
        for tiles in (item for part in parts for item in part.less_work(own, least_tasks)):
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
    settings = repr((options.candidates, options.epsilon, options.guard_memory, kinds_digest()))
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
            operator = UnscheduledOperator(func=func, name=name, device=device, options=options)
            body, choice = _constructed(operator, tiles)
    except IllegalRewrite as refusal:
        body, choice = fallback_kernel(func, name, device, refusal)
    return with_choice(with_turned_divisions(body), choice)


def _constructed(operator: UnscheduledOperator, tiles: TileChoices) -> tuple[PrimFunc, KernelChoice]:
    division, forms = construct(operator, tiles)
    made, device = division.context.operator, operator.device
    body = on_cpu(body_of(forms, made), device)
    notes = [*division.refusals, *notes_of(forms), *size_notes(made), *cut_notes(body), *call_notes(body)]
    params, body = any_alignment(packed_params(made.params, forms), body)
    choice = choice_of(made, forms, notes, device)
    for part in division.parts:
        choice = part.describe(choice, forms)
    return function_like(operator.func, params, body), choice
