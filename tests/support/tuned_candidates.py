"""Candidates drawn from the spaces of a module's kernels, built as a tuning run builds them, against the operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from tvm_ext import relay
from tvm_ext._tvm import GlobalVar, IRModule, Target, load_json, tensor
from tvm_ext.autotune.kernel_host import draw_inputs
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import BuildPlan, operator_pipeline, plan_build
from tvm_ext.records.kernel_job import KernelJob
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants
from tvm_ext.support.arrays import Array, pack
from tvm_ext.support.roundoff import allowed_error, relative_error
from tvm_ext.tir_passes.plan.form import unscheduled
from tvm_ext.tuning.kernels import TunableKernel, job_of, tunable_part

from .guarded_memory import call_guarded


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedKernel:
    """A kernel with a choice of tiles: of what kind, of how many, and what was wrong with those that were drawn."""

    name: str
    kind: str
    candidates: int
    checked: int
    problems: tuple[str, ...]


def plan_for(threads: int | None = None, **settings: Any) -> BuildPlan:
    """Of this machine's CPU, without a database."""
    return plan_build("llvm", BuildOptions(database="off", num_threads=threads, **settings))


def check_candidates(
    mod: IRModule, params: Mapping[str, Any], plan: BuildPlan, *, count: int, seed: int = 0
) -> list[CheckedKernel]:
    """``count`` candidates of each kernel of ``mod`` beside the constructed one, run in guarded memory."""
    with plan.target:
        passes = [operator_pipeline(plan.target, plan.device, plan.options), AnnotateConstants()]
        operators = tvm.transform.Sequential(passes)(relay.prepare(mod, params))
        found = [
            check_function(func, gv.name_hint, plan, count=count, seed=seed) for gv, func in unscheduled(operators)
        ]
    return [item for item in found if item is not None]


def check_function(func: Any, name: str, plan: BuildPlan, *, count: int, seed: int = 0) -> CheckedKernel | None:
    """The same for one unscheduled function; None where there is nothing to choose."""
    with plan.target:
        kernel = _tunable(func, name, plan)
        return None if kernel is None else _checked(kernel, plan, count, np.random.default_rng(seed))


def _tunable(func: Any, name: str, plan: BuildPlan) -> TunableKernel | None:
    try:
        return TunableKernel(func=func, name=name, part=tunable_part(func, name, plan.device, plan.options))
    except IllegalRewrite:
        return None


def _checked(kernel: TunableKernel, plan: BuildPlan, count: int, rng: np.random.Generator) -> CheckedKernel:
    space, part = kernel.part.space, kernel.part
    drawn = [space[int(place)].configuration for place in rng.permutation(len(space))[:count]]
    jobs = [job_of(kernel, text, plan.device, plan.target, plan.options) for text in (part.constructed, *drawn)]
    library = _library(jobs, plan.target)
    right = _results(jobs[0], library["reference"], packed=False)
    problems = []
    for number, job in enumerate(jobs):
        for error, allowed in _errors(job, _results(job, library[f"c{number}"]), right):
            if not error <= allowed:
                problems.append(f"{job.configuration} errs by {error:.2g}, allowed are {allowed:.2g}")
    return CheckedKernel(
        name=kernel.name, kind=part.workload.kind, candidates=len(space), checked=len(drawn), problems=tuple(problems)
    )


def _library(jobs: list[KernelJob], target: Target) -> Any:
    """All jobs' kernels as c0, c1, ... and the operator, in one library."""
    functions = {f"c{number}": load_json(job.module)[job.function] for number, job in enumerate(jobs)}
    functions["reference"] = load_json(jobs[0].reference)[jobs[0].function]
    named = {GlobalVar(name): func.with_attr("global_symbol", name) for name, func in functions.items()}
    return tvm.compile(IRModule(named), target=target)


def _results(job: KernelJob, function: Any, *, packed: bool = True) -> list[Array]:
    arrays = draw_inputs(job)
    if packed:
        arrays = [
            pack(array, item.pack) if item.pack is not None else array
            for array, item in zip(arrays, job.inputs, strict=True)
        ]
    outputs = [tvm.runtime.empty(item.shape, item.dtype) for item in job.results]
    places = range(len(arrays), len(arrays) + len(outputs))
    call_guarded(job.configuration, function, [*map(tensor, arrays), *outputs], list(places))
    return [output.numpy() for output in outputs]


def _errors(job: KernelJob, found: list[Array], right: list[Array]) -> list[tuple[float, float]]:
    inputs = [item.dtype for item in job.inputs]
    allowed = [allowed_error(inputs, item.dtype, job.depth) for item in job.results]
    return [(relative_error(a, b), most) for a, b, most in zip(found, right, allowed, strict=True)]
