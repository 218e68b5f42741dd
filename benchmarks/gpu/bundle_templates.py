"""CUTLASS's templates for a bundle's cases: partitioned as a build would, compiled, one library of all host functions.

Contenders are "cutlass", one template for the case, and of channels that no copy divides "cutlass_padded", which reads
them with zeros behind; of two products, "cutlass_apart" has a template for each. With several templates a product,
"cutlass_1" and so on are the model's next ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cases import Case, Tensor
from manifest import STEPS, Arranged, Entry, Program, Step
from programs import function_name
from relax_graphs import CHAIN, PRODUCTS, arranged, graph, padded

from tvm_ext._tvm import IRModule, tvm
from tvm_ext.byoc_cutlass.host import HostFunction
from tvm_ext.byoc_cutlass.selection import MOST_CANDIDATES, Candidate, architecture_of, candidates_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, UnsupportedEnvironmentError
from tvm_ext.records.partition import PARTITION, CutlassPartition
from tvm_ext.records.persistent import PERSISTENT, PersistentRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.composites import is_composite, region_of
from tvm_ext.relay_passes.pair_products import PairProducts
from tvm_ext.relay_passes.partition_cutlass import PartitionCutlass
from tvm_ext.support.files import temporary_folder
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.support.limited_process import run_limited
from tvm_ext.toolchains import host_compiler
from tvm_ext.toolchains.cutlass_codegen import CutlassBackend
from tvm_ext.toolchains.cutlass_toolchain import CompiledRegion, TemplateCompiler, link_objects
from tvm_ext.toolchains.remedies import HOST

CUTLASS, PADDED, APART = "cutlass", "cutlass_padded", "cutlass_apart"
LIBRARY = "templates.so"
LINK_LIMIT_S = 60.0
Candidates = tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One contender before it is compiled: its steps, and the templates of each, to be tried in this order."""

    contender: str
    arranged: Mapping[str, Arranged]
    between: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    templates: Mapping[str, Candidates]  # by function


def with_templates(
    entries: Sequence[Entry], device: DeviceSpec, count: int, folder: Path, cache: KernelCache | None
) -> list[Entry]:
    """``entries`` with ``count`` templates each beside what they have; those without say why."""
    found = [_planned(entry.case, device, count) for entry in entries]
    try:
        regions = {name: item for plans, _ in found for plan in plans for name, item in plan.templates.items()}
        compiled, failed = TemplateCompiler(cache=cache).compile_regions(regions) if regions else ({}, {})
        if compiled:
            _link(compiled, found, architecture_of(device), folder / LIBRARY)
    except UnsupportedEnvironmentError as error:
        compiled, failed = {}, dict.fromkeys(regions, error)
    return [
        _extended(entry, plans, refusals, compiled, {name: error.problem for name, error in failed.items()})
        for entry, (plans, refusals) in zip(entries, found, strict=True)
    ]


def _extended(
    entry: Entry,
    plans: Sequence[Plan],
    refusals: Mapping[str, str],
    compiled: Mapping[str, CompiledRegion],
    failed: Mapping[str, str],
) -> Entry:
    programs, refused = list(entry.programs), {**entry.refusals, **refusals}
    for plan in plans:
        missing = [failed[name] for name in plan.templates if name in failed]
        if missing:
            refused[plan.contender] = missing[0]
        else:
            programs.append(_program(plan, compiled))
    return replace(entry, programs=tuple(programs), refusals=refused)


def _program(plan: Plan, compiled: Mapping[str, CompiledRegion]) -> Program:
    done = [compiled[step.function] for step in plan.steps]
    uses = [asdict(use) for item in done for use in item.kernel.uses]
    templates = [{"template": item.candidate.name, "predicted_us": item.candidate.time_us} for item in done]
    return Program(
        contender=plan.contender, file=LIBRARY, function=plan.steps[-1].function, kind=STEPS,
        plan={"templates": templates, "uses": uses}, arranged=plan.arranged, between=plan.between, steps=plan.steps,
    )  # fmt: skip


def _link(
    compiled: Mapping[str, CompiledRegion], found: Sequence[tuple[list[Plan], Any]], architecture: str, path: Path
) -> None:
    """One library of all host functions whose kernels compiled, for whoever has tvm-ffi and a GPU."""
    counts = {step.function: len(step.arguments) for plans, _ in found for plan in plans for step in plan.steps}
    functions = [
        HostFunction(name=name, tensor_count=counts[name], call=item.candidate.call) for name, item in compiled.items()
    ]
    joined = link_objects(functions, [item.kernel.image for item in compiled.values()], architecture)
    with temporary_folder("cutlass") as folder:
        (folder / "cutlass.o").write_bytes(joined)
        command = [host_compiler.compiler(), "-shared", "-s", "-o", str(path), "cutlass.o"]
        run_limited(command, LINK_LIMIT_S, folder, remedies=HOST)


# --- plans -----------------------------------------------------------------------------------------------------------
def _planned(case: Case, device: DeviceSpec, count: int) -> tuple[list[Plan], dict[str, str]]:
    """The contenders of a case, and why there is none; nothing of cases that are no products."""
    if case.operator not in PRODUCTS:
        return [], {}
    plans: list[Plan] = []
    refusals = {}
    wider = padded(case)
    forms = [
        (CUTLASS, case),
        *([(PADDED, wider)] if wider else []),
        *([(APART, case)] if case.operator == CHAIN else []),
    ]
    for name, form in forms:
        found = _attempt(name, form, case, device, count)
        if isinstance(found, str):
            refusals[name] = found
        else:
            plans += found
    return plans, refusals


def _attempt(name: str, form: Case, case: Case, device: DeviceSpec, count: int) -> list[Plan] | str:
    """The plans of one form of the case, or why there is none."""
    try:
        return _plans(name, form, case, device, count)
    except IllegalRewrite as refusal:
        return refusal.problem


def _plans(name: str, form: Case, case: Case, device: DeviceSpec, count: int) -> list[Plan]:
    with tvm.transform.PassContext():
        mod = PartitionCutlass(device)(graph(form))
    partition = from_json(CutlassPartition, str(mod.attrs[PARTITION]))
    if partition.refused:
        raise IllegalRewrite("; ".join(item.reason for item in partition.refused))
    if case.operator == CHAIN and name != APART:
        mod = _joined(mod, device)
    prefix = f"{function_name(case)}_{name}"
    steps, between, regions = steps_of(mod, case)
    found = {function: candidates_of(region, device) for function, region in regions.items()}
    most = min(count, *(len(item) for item in found.values())) if len(found) == 1 else 1
    return [
        Plan(
            contender=f"{name}_{place}" if place else name,
            arranged=arranged(form, case),
            between=between,
            steps=tuple(replace(step, function=f"{prefix}_{place}_{step.function}") for step in steps),
            templates={
                f"{prefix}_{place}_{name}": item[place : place + MOST_CANDIDATES] for name, item in found.items()
            },
        )
        for place in range(most)
    ]


def _joined(mod: IRModule, device: DeviceSpec) -> IRModule:
    """Both products in one region; raises IllegalRewrite, with the reason, where no template has both."""
    with tvm.transform.PassContext():
        mod = PairProducts(device, CutlassBackend(device), lambda _mod: None, True)(mod)
    (region,) = from_json(PersistentRecord, str(mod.attrs[PERSISTENT])).regions
    if not region.fused:
        raise IllegalRewrite(region.reason)
    return mod


def steps_of(mod: IRModule, case: Case) -> tuple[list[Step], tuple[Tensor, ...], dict[str, Any]]:
    """The calls of ``main``, the tensors between them, and the regions by function.

    Raises IllegalRewrite where something is left that is no region.
    """
    functions = {gv: func for gv, func in mod.functions_items() if is_composite(func)}
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    steps, between = [], []
    for place, binding in enumerate(bindings):
        callee = getattr(binding.value, "op", None)
        if callee not in functions:
            raise IllegalRewrite(f"{binding.var.name} of {case.id} is in no region: templates compute it in part alone")
        name = case.output.name if place + 1 == len(bindings) else binding.var.name
        if place + 1 < len(bindings):
            shape = tuple(map(int, binding.var.ty.shape))
            between.append(Tensor(name=name, shape=shape, dtype=str(binding.var.ty.dtype), scale=0.0))
        arguments = tuple(argument.name for argument in binding.value.args)
        steps.append(Step(function=callee.name_hint, arguments=(*arguments, name)))
    return steps, tuple(between), {gv.name_hint: region_of(func) for gv, func in functions.items()}
