"""Builds one case, runs it, and compares it with the reference: the whole test of one random operator."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from tvm_ext import relay
from tvm_ext._tvm import PassContext, tensor
from tvm_ext.devices.cpu_info import read_cpu_info
from tvm_ext.devices.device_db import cpu_needs, device_for_target
from tvm_ext.errors import TvmExtError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.records.choice import OWN_PATHS
from tvm_ext.reports.record import OperatorReport
from tvm_ext.runtime.graph_module import flatten_outputs
from tvm_ext.runtime.guarded_memory import guard
from tvm_ext.support.roundoff import allowed_error

from . import opencl, reference
from .record import Array, OperatorCase
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorPath:
    """How one kernel of the case was made, and why."""

    name: str
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """What came of a case. ``problem`` is empty where everything holds; ``error`` is relative, by norm."""

    index: int
    kind: str
    outcome: str  # "passed", "wrong", "path", "raised", "crashed" or "timed out"
    problem: str
    error: float
    tolerance: float
    paths: tuple[OperatorPath, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


class WrongResultError(AssertionError):
    """The outputs are not what the reference says, or not the same twice."""


def tolerance(case: OperatorCase, out_dtype: str) -> float:
    """The allowed relative error of the case's output by norm."""
    return allowed_error((*(item.dtype for item in case.inputs), case.precision), out_dtype, case.reduction_size)


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


def build(case: OperatorCase, **settings: Any) -> relay.Library:
    """The case built for this machine's CPU, its constant inputs bound; ``settings`` are fields of `BuildOptions`."""
    options = options_of(case).updated(**settings)
    return relay.build(module_of(case), target_of(case), params=constants(case), options=options)


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


def check(case: OperatorCase) -> CaseResult:
    """Build, run, compare. Raises WrongResultError, and whatever building and running raise; see `attempt`.

    Three runs with inputs A, B, A. The first is in guarded memory (`guarded_memory`), workspaces included every third
    time. The outputs of the first two are overwritten with NaN and freed, so that the VM's
    memory pool hands the same memory out again, and the third must equal the first bit by bit. An element that is
    never written, or one read before it is written, then shows as NaN or as a value of B's.

    A case whose device is a GPU is one run through OpenCL on this machine's CPU.
    """
    if opencl.is_gpu(case.device):
        return check_in_opencl(case)
    start = time.perf_counter()
    if case.index % PURITY_EVERY == 0:
        check_purity(case)
    library = build(case, guard_memory=case.index % GUARDED_WORKSPACES_EVERY == 0)
    first = _run_and_poison(guard(library.vm()), case, 0)
    machine = library.vm()
    machine.set_instrument(lambda *_: 0)
    errors = compare(case, first)
    _run_and_poison(machine, case, 1)
    again = _run_and_poison(machine, case, 0)
    if not all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)):
        raise WrongResultError("the same inputs gave other results the second time")
    return _result(case, library.report.operators, errors, start)


def check_in_opencl(case: OperatorCase) -> CaseResult:
    """Build the case for its GPU, run its kernels through OpenCL, compare. Raises as `check` does."""
    start = time.perf_counter()
    options = BuildOptions(epsilon=case.epsilon)
    machine = opencl.OpenClMachine(relay.prepare(module_of(case), constants(case)), case.device, options)
    inputs = [value for value, item in zip(case.data(0), case.inputs, strict=True) if not item.constant]
    return _result(case, machine.operators, compare(case, machine.run(inputs)), start)


def _result(
    case: OperatorCase, operators: Sequence[OperatorReport], errors: Sequence[tuple[float, float]], start: float
) -> CaseResult:
    """What passed the comparison, unless one of its operators took a path that was not expected."""
    paths = tuple(OperatorPath(name=item.name, path=item.choice.path, reason=item.choice.reason) for item in operators)
    problem = path_problem(case, paths)
    error, allowed = max(errors, key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0])
    return CaseResult(
        index=case.index,
        kind=case.kind,
        outcome="path" if problem else "passed",
        problem=problem,
        error=error,
        tolerance=allowed,
        paths=paths,
        seconds=time.perf_counter() - start,
    )


def path_problem(case: OperatorCase, paths: Sequence[OperatorPath]) -> str:
    """Why the paths taken are not those expected: every operator says why, and what can be constructed is."""
    silent = [item.name for item in paths if not item.reason]
    if silent:
        return f"no reason is given for {', '.join(silent)}"
    others = [item for item in paths if item.path not in OWN_PATHS]
    if case.must_be_constructed and others:
        return "; ".join(f"{item.name} took the path {item.path}: {item.reason}" for item in others)
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
    if np.issubdtype(value.dtype, np.floating):
        return np.full_like(value, np.nan)
    return ~value if value.dtype == np.bool_ else np.full_like(value, np.iinfo(value.dtype).max)


# What TVM, NumPy and this package raise.
EXPECTED_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TvmExtError,
    TypeError,
    ValueError,
)


def attempt(case: OperatorCase) -> CaseResult:
    """`check`, with whatever goes wrong in it turned into a result."""
    start = time.perf_counter()
    try:
        return check(case)
    except WrongResultError as error:
        outcome, problem = "wrong", str(error)
    except EXPECTED_ERRORS as error:
        outcome, problem = "raised", f"{type(error).__name__}: {error}"
    return failure(case, outcome, problem, time.perf_counter() - start)


def failure(case: OperatorCase, outcome: str, problem: str, seconds: float) -> CaseResult:
    return CaseResult(
        index=case.index,
        kind=case.kind,
        outcome=outcome,
        problem=problem,
        error=math.inf,
        tolerance=0.0,
        seconds=seconds,
    )
