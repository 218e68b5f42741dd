"""The one way of a GPU kernel to its pipelines, for construction, kernel by kernel, and for the passes of a module.

    plan_pipelines ─► PipelinePlan ─► inject_pipelines ─► recorded

`AutoPipeline` is the first step, `InjectPipelines` the other two; `with_pipelines` is all of them at once, for a kernel
that is under construction. Both hand over what the emitter planned (`GpuPlan`), so that they choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_ext._tvm import AllocBuffer, Node, PrimFunc, SBlock, structural_walk
from tvm_ext.analysis.computation_exprs import count_operations
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import GpuPlan, KernelChoice
from tvm_ext.records.pipelines import PIPELINE_PLAN, PipelinePlan, PipelineRefusal
from tvm_ext.records.serialise import to_json
from tvm_ext.support.limits import check_count

from .detect import read_hints
from .function import Function
from .injection import by_bulk_copies, grouped_loops, lowered, with_primitives
from .loops import is_shared
from .plan import Wishes, decide
from .planned import registers_by_launch, with_fewer_blocks, with_versions
from .stock_pipelines import already_pipelined, without_stock_pipelines

PIPELINED = "tvm_ext.pipelined"
"""PrimFunc attribute of a transformed function: the `PipelinePlan` that was carried out, as JSON."""


def wishes_of(options: BuildOptions) -> Wishes:
    """What a build's ``options`` ask for."""
    return Wishes(
        mode="none" if options.enable_pipelining is False else options.pipelining,
        shared_stages=options.shared_stages,
        register_stages=options.register_stages,
        always=options.enable_pipelining is True,
        bulk_copies=options.bulk_copies,
    )


def with_pipelines(
    func: PrimFunc, choice: KernelChoice, device: DeviceSpec, wishes: Wishes
) -> tuple[PrimFunc, KernelChoice]:
    """``func``, a thread-bound PrimFunc, with pipelines where ``wishes`` ask and the rules allow; and its record.

    What stock TVM cannot lower to loops stays as it is, and what fits in no version; the record says why.
    """
    if wishes.mode == "none" or not _has_shared_memory(func):
        return func, choice
    try:
        check_count("pipelined_operations", count_operations(func.body), "operations")
        made, plan = pipelined(func, device, wishes, choice.gpu)
    except IllegalRewrite as refusal:
        return func, replace(choice, notes=(*choice.notes, f"not pipelined: {refusal.problem}"))
    return made if plan.buffers else func, recorded(choice, made, plan)


def plan_pipelines(
    func: PrimFunc, device: DeviceSpec, wishes: Wishes | None = None, planned: Sequence[GpuPlan] = ()
) -> PipelinePlan:
    """The plan for one thread-bound PrimFunc, scheduled or not; raises InputError as `AutoPipeline` does.

    ``planned`` is what an emitter planned of its launches; without, registers are estimated from the buffers in them.
    """
    return _planned(func, device, wishes or Wishes(), planned)[0]


def inject_pipelines(
    func: PrimFunc, plan: PipelinePlan, device: DeviceSpec, planned: Sequence[GpuPlan] = ()
) -> PrimFunc:
    """``func`` with ``plan`` carried out for ``device``; unchanged but for its attributes where nothing is planned."""
    return _injected(func, plan, device, planned, None)


def pipelined(
    func: PrimFunc, device: DeviceSpec, wishes: Wishes, planned: Sequence[GpuPlan] = ()
) -> tuple[PrimFunc, PipelinePlan]:
    """Both steps at once for one function, which is lowered to loops but once."""
    plan, loops = _planned(func, device, wishes, planned)
    return _injected(func, plan, device, planned, loops), plan


def recorded(choice: KernelChoice, made: PrimFunc, plan: PipelinePlan) -> KernelChoice:
    """``choice`` of a kernel that became ``made`` by ``plan``."""
    if not plan.buffers:
        return replace(choice, pipeline=plan)
    notes = (*choice.notes, f"loaded ahead: {plan}")
    return replace(choice, notes=notes, pipeline=plan, gpu=with_versions(choice.gpu, made, plan))


def _planned(
    func: PrimFunc, device: DeviceSpec, wishes: Wishes, planned: Sequence[GpuPlan]
) -> tuple[PipelinePlan, PrimFunc | None]:
    """The plan, and the function as loops, where it got so far."""
    hints = read_hints(func)
    replaces = False
    done = already_pipelined(func)
    if done is not None and wishes.replace_stock and wishes.mode != "none":
        func, replaces = without_stock_pipelines(func), True
        done = already_pipelined(func)
    if done is not None:
        if hints:
            raise InputError(
                f"{done}, and tvm_ext.pipeline_stages asks for another pipeline of {', '.join(hints)}",
                "remove one of the two, or pass replace_stock=True",
            )
        refusal = PipelineRefusal(buffer="*", scope="", rule="already pipelined", reason=f"{done}: left as it is")
        return PipelinePlan(refusals=(refusal,)), None
    if hints:
        wishes = replace(wishes, by_buffer=hints)
    loops = grouped_loops(func)
    plan = replace(decide(Function(loops), device, wishes, registers_by_launch(planned)), replaces_stock=replaces)
    if wishes.bulk_copies and plan.buffers:
        plan = by_bulk_copies(Function(loops), plan, device)
    return plan, loops


def _injected(
    func: PrimFunc, plan: PipelinePlan, device: DeviceSpec, planned: Sequence[GpuPlan], loops: PrimFunc | None
) -> PrimFunc:
    if not plan.buffers:
        return func.without_attr(PIPELINE_PLAN).with_attr(PIPELINED, to_json(plan))
    staged, lowering = with_primitives(func, plan, device, loops)
    made = lowered(staged, lowering).with_attr(PIPELINED, to_json(plan))
    return with_fewer_blocks(made, with_versions(planned, made, plan), device) if planned else made


def _has_shared_memory(func: PrimFunc) -> bool:
    found: list[bool] = []

    def allocation(node: Node) -> None:
        if is_shared(node.buffer):
            found.append(True)

    def block(node: Node) -> None:
        if any(is_shared(buffer) for buffer in node.alloc_buffers):
            found.append(True)

    structural_walk(func.body, [(AllocBuffer, allocation), (SBlock, block)], order="pre")
    return bool(found)
