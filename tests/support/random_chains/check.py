"""Builds one chain, runs it, and compares it with the reference: the whole test of a chain."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_ext import recorder, relay
from tvm_ext._tvm import tensor
from tvm_ext.errors import TvmExtError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.rammer_runtime import native
from tvm_ext.records.partition import CUTLASS, CutlassBuild
from tvm_ext.records.serialise import from_json
from tvm_ext.runtime.graph_module import flatten_outputs

from ..guarded_memory import build_guarded
from ..opencl_graph import run_graph
from ..random_cases import CaseResult, Figures, Refusal, WrongResultError, attempted
from ..random_operators.check import options_of, poisoned, target_of
from ..random_operators.opencl import OpenClMachine, is_gpu
from ..random_operators.record import Array
from ..simt_graph import SimtDevice, templates_on_cpu
from .onnx_model import onnx_model
from .record import ChainCase
from .reference import difference, expected_outputs


def run_chain(case: ChainCase) -> Figures:
    """Import, build, run, compare.

    Raises Refusal, WrongResultError, and whatever else importing, building and running raise. Three runs with inputs A,
    B, A in poisoned memory, as `random_operators.check.check` describes; a GPU's kernels run once, through OpenCL.
    """
    expected = expected_outputs(case)
    outputs, figures = _on_gpu(case) if is_gpu(case.device) else _on_cpu(case)
    problems = [
        f"output {wanted.name} {problem}"
        for wanted, actual, value in zip(case.outputs, outputs, expected, strict=True)
        if (
            problem := difference(
                actual, value, dtype=wanted.dtype, exact=wanted.exact, coarsest=wanted.coarsest, finite=wanted.finite
            )
        )
    ]
    if problems:
        raise WrongResultError("; ".join(problems))
    return figures


GUARDED_EVERY = 2
"""The share of a CPU's chains whose kernels run in guarded memory; the others run as users run them."""

SCHEDULED_EVERY = 4
"""The share of a CPU's chains that run as a schedule of rTasks."""

VEU_COUNTS = (2, 1, 4)
"""The vEUs of schedules, in turn: as many cores, or more than there are."""


def _is_guarded(case: ChainCase) -> bool:
    return not is_gpu(case.device) and case.index % GUARDED_EVERY == 0


def _options(case: ChainCase) -> BuildOptions:
    """Without the kernel cache: no two chains have kernels in common, and thousands would be looked through."""
    options = options_of(case).updated(kernel_cache="off")
    round_, turn = divmod(case.index, SCHEDULED_EVERY)
    if is_gpu(case.device) or _is_guarded(case) or turn != 1 or not native.is_available():
        return options
    return options.updated(enable_rammer=True, num_threads=VEU_COUNTS[round_ % len(VEU_COUNTS)])


def _on_cpu(case: ChainCase) -> tuple[list[Array], Figures]:
    try:
        mod, params = relay.frontend.from_onnx(onnx_model(case))
        build = build_guarded if _is_guarded(case) else relay.build
        library = build(mod, target_of(case), params=params, options=_options(case))
    except TvmExtError as refusal:
        raise Refusal(f"{type(refusal).__name__}: {refusal}") from refusal
    machine = library.vm()
    first = _run_and_poison(machine, case, 0)
    _run_and_poison(machine, case, 1)
    again = _run_and_poison(machine, case, 0)
    if not all(np.array_equal(a, b, equal_nan="float" in str(a.dtype)) for a, b in zip(first, again, strict=True)):
        raise WrongResultError("the same inputs gave other results the second time")
    return first, Figures(operators=library.report.operators)


def _run_and_poison(machine: Any, case: ChainCase, draw: int) -> list[Array]:
    data = case.data(draw)
    outputs = list(flatten_outputs(machine["main"](*[tensor(data[item.name]) for item in case.variables])))
    values = [item.numpy().copy() for item in outputs]
    for item, value in zip(outputs, values, strict=True):
        item.copyfrom(poisoned(value))
    return values


def _on_gpu(case: ChainCase) -> tuple[list[Array], Figures]:
    data = case.data(0)
    inputs = [data[item.name] for item in case.variables]
    try:
        mod, params = relay.frontend.from_onnx(onnx_model(case))
        if case.way != "opencl":
            return _interpreted(case, relay.prepare(mod, params), inputs)
        machine = OpenClMachine(relay.prepare(mod, params), case.device, _options(case))
        outputs = machine.run(inputs)
    except TvmExtError as refusal:
        raise Refusal(f"{type(refusal).__name__}: {refusal}") from refusal
    return outputs, Figures(operators=machine.operators)


def _interpreted(case: ChainCase, mod: Any, inputs: list[Array]) -> tuple[list[Array], Figures]:
    """As a default build for the device makes them, or with CUTLASS's templates, every other time in pairs, too."""
    by_templates = case.way == "templates"
    in_turn = {"enable_cutlass": True, "enable_persistent_fusion": bool(case.index % 2)} if by_templates else {}
    plan = plan_build(case.device, _options(case).updated(**in_turn))
    with templates_on_cpu() as templates, plan.target:
        kernels = plan.construct(mod)
        host = templates[-1] if templates else None
        names = [param.name for param in kernels["main"].params]
        given = dict(zip(names, inputs, strict=True))
        outputs = run_graph(kernels, given, lambda functions: SimtDevice(functions, plan.device, plan.target, host))
        taken = kernels.attrs.get(CUTLASS) if by_templates else None
        count = len(from_json(CutlassBuild, str(taken)).kernels) if taken is not None else 0
        return outputs, Figures(operators=recorder.operators(kernels, plan, plan.options), templates=count)


def attempt(case: ChainCase) -> CaseResult:
    """`run_chain`, with whatever goes wrong in it turned into a result."""
    return attempted(case, run_chain)
