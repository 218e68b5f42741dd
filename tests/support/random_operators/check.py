"""Builds one case, runs it, and compares it with the reference: the whole test of one random operator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from tvm_ext import relay
from tvm_ext._tvm import PassContext, tensor
from tvm_ext.bench.compare import relative_error
from tvm_ext.devices.cpu_info import read_cpu_info
from tvm_ext.devices.device_db import cpu_needs, device_for_target
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.records.choice import OWN_PATHS
from tvm_ext.reports.record import OperatorReport
from tvm_ext.runtime.graph_module import flatten_outputs
from tvm_ext.support.roundoff import allowed_error

from ..guarded_memory import build_guarded, guard
from ..random_cases import CaseResult, Figures, WrongResultError, attempted, share_of
from . import opencl, reference
from .record import Array, OperatorCase, is_float
from .relax_module import module_of, parameter_names

SMALLEST_MAGNITUDE = 0.1
"""Times the typical magnitude: a result smaller than this has vanished by cancellation, and is compared with this."""

PURITY_EVERY = 7
"""Every seventh case is constructed once more to see that no pass writes to its input. Coprime to the number of slots,
so that all kinds have their turn."""


EMULATED = "bfloat16-emulated"
"""bfloat16 on every CPU, by its instruction where there is one."""

GUARDED_WORKSPACES_EVERY = 3
"""Every third case is built with guarded workspaces, which changes its kernels a little. Coprime to the slots too."""


def tolerance(case: OperatorCase, out_dtype: str) -> float:
    """The allowed relative error of the case's output by norm; option `precision` is about products alone."""
    products = (case.precision,) if case.operator.startswith(("matmul", "nn.conv", "chain.")) else ()
    return allowed_error((*(item.dtype for item in case.inputs), *products), out_dtype, case.reduction_size)


def scaled_error(actual: Array, expected: Array, typical_magnitude: float) -> float:
    """||actual - expected|| / ||expected||, the latter at least that of values of a tenth of the typical magnitude."""
    if actual.shape != expected.shape:
        return math.inf
    difference = np.linalg.norm((actual.astype(np.float64) - expected.astype(np.float64)).ravel())
    if not np.isfinite(difference):
        return math.inf
    least = SMALLEST_MAGNITUDE * typical_magnitude * math.sqrt(expected.size)
    size = max(float(np.linalg.norm(expected.astype(np.float64).ravel())), least)
    return float(difference) / size if size else (0.0 if difference == 0 else math.inf)


def build(case: OperatorCase, *, guarded: bool = False, **settings: Any) -> relay.Library:
    """The case built for this machine's CPU, its constant inputs bound; ``settings`` are fields of `BuildOptions`.

    ``guarded``: workspaces lie between guards.
    """
    how, options = build_guarded if guarded else relay.build, options_of(case).updated(**settings)
    return how(module_of(case), target_of(case), params=constants(case), options=options)


class Built(Protocol):
    """A case as far as `target_of` and `options_of` look at it."""

    @property
    def device(self) -> str: ...
    @property
    def num_threads(self) -> int | None: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def precision(self) -> str: ...


def target_of(case: Built) -> str:
    """The device that the case asks for, if this machine's CPU can run code for it; else this machine's CPU."""
    return case.device if case.device and _runs_here(case.device) else "llvm"


@cache
def _runs_here(device: str) -> bool:
    return not cpu_needs(device_for_target(device)[1]).unmet_by(read_cpu_info())


def options_of(case: Built) -> BuildOptions:
    options = BuildOptions(num_threads=case.num_threads, epsilon=case.epsilon)
    is_narrowed = case.precision == "bfloat16" and not opencl.is_gpu(case.device)
    return options.updated(precision=EMULATED) if is_narrowed else options


def constants(case: OperatorCase) -> dict[str, Array]:
    """The values of the constant inputs by parameter name."""
    values = zip(parameter_names(case), case.data(0), case.inputs, strict=True)
    return {name: value for name, value, item in values if item.constant}


def check_purity(case: OperatorCase) -> None:
    """Run every pass up to scheduled kernels under ``testing.immutable_module``: TVM raises if one writes to its input.

    The passes after that are stock TVM's, and some do.
    """
    mod = relay.prepare(module_of(case), constants(case))
    plan = plan_build(target_of(case), options_of(case))
    with plan.target, PassContext(config={"testing.immutable_module": True}):
        plan.construct(mod)


def check(case: OperatorCase) -> Figures:
    """Build, run, compare. Raises WrongResultError, and whatever building and running raise; see `attempt`.

    Three runs with inputs A, B, A. The first is in guarded memory (`guarded_memory`), workspaces included every third
    time. The outputs of the first two are overwritten with NaN and freed, so that the VM's
    memory pool hands the same memory out again, and the third must equal the first bit by bit. An element that is
    never written, or one read before it is written, then shows as NaN or as a value of B's.

    A case whose device is a GPU is one run through OpenCL on this machine's CPU.
    """
    if opencl.is_gpu(case.device):
        return check_in_opencl(case)
    if case.index % PURITY_EVERY == 0:
        check_purity(case)
    library = build(case, guarded=case.index % GUARDED_WORKSPACES_EVERY == 0)
    first = _run_and_poison(guard(library.vm()), case, 0)
    machine = library.vm()
    machine.set_instrument(lambda *_: 0)
    errors = compare(case, first)
    _run_and_poison(machine, case, 1)
    again = _run_and_poison(machine, case, 0)
    if not all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)):
        raise WrongResultError("the same inputs gave other results the second time")
    return _figures(case, library.report.operators, errors)


def check_in_opencl(case: OperatorCase) -> Figures:
    """Build the case for its GPU, run its kernels through OpenCL, compare. Raises as `check` does."""
    options = BuildOptions(epsilon=case.epsilon)
    machine = opencl.OpenClMachine(relay.prepare(module_of(case), constants(case)), case.device, options)
    inputs = [value for value, item in zip(case.data(0), case.inputs, strict=True) if not item.constant]
    return _figures(case, machine.operators, compare(case, machine.run(inputs)))


def _figures(case: OperatorCase, operators: Sequence[OperatorReport], errors: Iterable[tuple[float, float]]) -> Figures:
    """Of what passed the comparison; raises WrongResultError where an operator took a path that was not expected."""
    problem = path_problem(case, [(item.name, item.choice.path, item.choice.reason) for item in operators])
    if problem:
        raise WrongResultError(problem)
    return Figures(operators=operators, share=share_of(errors))


def path_problem(case: OperatorCase, paths: Sequence[tuple[str, str, str]]) -> str:
    """Why the ``paths``, of each operator name, path and reason, are not those expected: what can be constructed is."""
    silent = [name for name, _, reason in paths if not reason]
    if silent:
        return f"no reason is given for {', '.join(silent)}"
    others = [item for item in paths if item[1] not in OWN_PATHS]
    if case.must_be_constructed and others:
        return "; ".join(f"{name} took the path {path}: {reason}" for name, path, reason in others)
    return ""


def compare(case: OperatorCase, outputs: Sequence[Array]) -> list[tuple[float, float]]:
    """(relative error, tolerance) of each output; raises WrongResultError where one is too far off."""
    expected = reference.evaluate(case, case.data(0))
    if len(outputs) != len(expected):
        raise WrongResultError(f"{len(outputs)} outputs instead of {len(expected)}")
    errors = []
    for position, (actual, wanted) in enumerate(zip(outputs, expected, strict=True)):
        allowed = tolerance(case, str(actual.dtype))
        error = scaled_error(actual, wanted, case.typical_magnitude)
        if not error <= allowed:
            raise WrongResultError(_difference(position, actual, wanted, error, allowed))
        errors.append((error, allowed))
    return errors


def _difference(position: int, actual: Array, wanted: Array, error: float, allowed: float) -> str:
    if actual.shape != wanted.shape:
        return f"output {position} has shape {actual.shape} instead of {wanted.shape}"
    unlike = ~np.isclose(actual.astype(np.float64), wanted.astype(np.float64), rtol=1e-2, atol=1e-3)
    where = tuple(int(i) for i in np.argwhere(unlike)[0]) if unlike.any() else ()
    sample = f"; first at {list(where)}: {actual[where]} instead of {wanted[where]}" if unlike.any() else ""
    return (
        f"output {position} {list(actual.shape)} errs by {error:.2e}, more than {allowed:.2e}; "
        f"{int(unlike.sum())} of {actual.size} elements are off by more than 1 %{sample}"
    )


def run_once(library: relay.Library, case: OperatorCase) -> list[Array]:
    """The outputs for the first draw of inputs."""
    return _run_and_poison(library.vm(), case, 0)


def _run_and_poison(machine: Any, case: OperatorCase, draw: int) -> list[Array]:
    inputs = [value for value, item in zip(case.data(draw), case.inputs, strict=True) if not item.constant]
    outputs = list(flatten_outputs(machine["main"](*[tensor(value) for value in inputs])))
    values = [item.numpy().copy() for item in outputs]
    for item, value in zip(outputs, values, strict=True):
        item.copyfrom(poisoned(value))
    return values


def poisoned(value: Array) -> Array:
    """What an output is overwritten with: NaN, the largest integer, or the other truth value."""
    if is_float(value):
        return np.full_like(value, np.nan)
    return ~value if value.dtype == np.bool_ else np.full_like(value, np.iinfo(value.dtype).max)


def attempt(case: OperatorCase) -> CaseResult:
    """`check`, with whatever goes wrong in it turned into a result."""
    return attempted(case, check)


def stock_error(case: OperatorCase) -> str:
    """For a wrong case: whether stock TVM agrees with NumPy."""
    if opencl.is_gpu(case.device):
        return ""
    stock = run_once(build(case, enable_roller=False), case)
    return f"stock TVM's relative error: {relative_error(stock, reference.evaluate(case, case.data(0))):.2e}"
