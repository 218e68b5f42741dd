"""Imports, builds and runs one hostile model in a process of its own, whose memory is limited."""

from __future__ import annotations

import faulthandler
import os
import resource
import time
import warnings
from collections.abc import Sequence

import numpy as np

from tvm_ext import relay
from tvm_ext.errors import TvmExtError
from tvm_ext.runtime.graph_module import TensorSpec

from ..case_workers import Trial
from ..random_cases import EXPECTED_ERRORS
from .record import HostileCase, HostileResult

LIMIT_S = 60.0
"""Seconds that a model may take."""
MEMORY_BYTES = 4 << 30
"""Address space that its process may have."""
_RUN_BYTES = 64 << 20
_FOREIGN_ERRORS: tuple[type[BaseException], ...] = (*EXPECTED_ERRORS, MemoryError)


def attempt(case: HostileCase) -> HostileResult:
    """Whatever is not caught here ends the process, which is a failure as well."""
    _limit_this_process()
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome, problem = build_and_run(case.data), ""
    except TvmExtError as error:
        outcome, problem = "refused", f"{type(error).__name__}: {error}"
    except _FOREIGN_ERRORS as error:
        outcome, problem = "raised", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return HostileResult(
        kind=case.kind, name=case.name, outcome=outcome, problem=problem[:2000], seconds=seconds, peak_mib=peak_mib
    )


def _limit_this_process() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.dump_traceback_later(LIMIT_S - 5, file=os.dup(2))  # where a model hangs, before it is ended
    nowhere = os.open(os.devnull, os.O_WRONLY)  # what compilers print about broken models
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def build_and_run(data: bytes) -> str:
    mod, params = relay.frontend.from_onnx(data)
    library = relay.build(mod, params=params, kernel_cache="off")
    module = relay.GraphModule(library)
    if _bytes(module.inputs) + _bytes(library.outputs) > _RUN_BYTES:
        return "built"
    generator = np.random.default_rng(0)
    for spec in module.inputs:
        module.set_input(spec.name, _value(spec, generator))
    module.run()
    return "ran"


def _bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(int(np.prod([float(extent) for extent in _extents(spec)])) * 8 for spec in specs)


def _extents(spec: TensorSpec) -> list[int]:
    return [extent if isinstance(extent, int) else 1 for extent in spec.shape or ()]


def _value(spec: TensorSpec, generator: np.random.Generator) -> np.ndarray:
    """Small numbers: what is an index is often one that exists."""
    return generator.integers(-1, 3, _extents(spec)).astype(spec.dtype)


def failure(case: HostileCase, outcome: str, problem: str, seconds: float) -> HostileResult:
    return HostileResult(kind=case.kind, name=case.name, outcome=outcome, problem=problem, seconds=seconds)


TRIAL: Trial[HostileCase, HostileResult] = Trial(attempt=attempt, failure=failure, alone=True)
