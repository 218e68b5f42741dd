"""Stock TVM's GPU kernels of ONNX's operator tests, converted to rKernels (Rammer, §4.1.4): do they compute the same?

Each operator gets stock TVM's schedule and is lowered; its CUDA text is converted, launch by launch. Before: the SIMT
interpreter runs what code generation gets. After: the converted text runs on one vEU, by g++, its threads as fibres.
Each test has a process of its own: interpreting leaves hundreds of megabytes behind.

    python -m tests.support.legacy_corpus --most 150      # many minutes
"""

from __future__ import annotations

import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import tvm
import typer

from tests.onnx_backend.cases import load_cases, of_each_operator
from tests.support.case_workers import Trial, run_trials
from tests.support.commands import Jobs, LimitS, console
from tests.support.legacy_cuda import run_on_cpu
from tvm_ext import relay
from tvm_ext._tvm import PrimFunc, structural_hash
from tvm_ext.analysis.launches import DeviceKernel, lower
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import IllegalRewrite, TvmExtError
from tvm_ext.rammer_runtime.legacy.convert import ConvertedKernel, convert_kernel
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.emit.schedule_stock_gpu import schedule_by_stock
from tvm_ext.verify import simt
from tvm_ext.verify.verification import random_inputs_of

app = typer.Typer(add_completion=False)

DEVICE = "nvidia-v100"
KERNELS = 150
"""As many as the paper transformed (§4.1.4)."""
MOST_THREADS = 1 << 17
"""Threads of all blocks up to which a kernel is run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What became of an operator's kernels: ``reason`` is why not, "" where all are converted and equal."""

    operator: str
    launches: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTest:
    """A test of an ONNX operator; operators whose digests are ``seen`` were converted before."""

    name: str
    model: bytes
    seen: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempted:
    """What became of a test's operators that were not seen before, and their digests."""

    operators: tuple[Converted, ...]
    digests: frozenset[str] = frozenset()


def attempt(test: NodeTest) -> Attempted:
    """The operators of ``test``, as a build for `DEVICE` has them before they are scheduled, converted and run."""
    try:
        mod, params = relay.frontend.from_onnx(onnx.load_from_string(test.model))
        found = relay.operators(mod, DEVICE, params, enable_roller=False, kernel_cache="off")
    except (TvmExtError, RuntimeError, ValueError, TypeError, KeyError):
        return Attempted(operators=())  # no model of this package, or shapes that a test knows by its inputs alone
    new: dict[str, tuple[str, PrimFunc]] = {}
    for operator, func in found.items():
        narrow = any("float16" in str(param.ty.dtype) or "float8" in str(param.ty.dtype) for param in func.params)
        if not narrow:  # which g++ has no types for
            digest = f"{structural_hash(func.without_attr('global_symbol')):x}"
            new.setdefault(digest, (f"{test.name}:{operator}", func))
    results = []
    for digest in new.keys() - test.seen:
        with tempfile.TemporaryDirectory() as folder:
            results.append(converted(*new[digest], Path(folder)))
    return Attempted(operators=tuple(results), digests=frozenset(new))


def _failure(test: NodeTest, outcome: str, problem: str, _seconds: float) -> Attempted:
    return Attempted(operators=(Converted(operator=test.name, launches=0, reason=f"{outcome}: {problem}"),))


def node_tests(seen: set[str]) -> Iterator[NodeTest]:
    """ONNX's node tests, first those of an operator that none before has; ``seen`` grows meanwhile."""
    cases = {name: case for name, case in load_cases().items() if name.startswith("node/")}
    for name in dict.fromkeys((*of_each_operator(cases), *cases)):
        model = cases[name].model.SerializeToString()
        yield NodeTest(name=name.removeprefix("node/test_"), model=model, seen=frozenset(seen))


def converted(name: str, func: PrimFunc, folder: Path) -> Converted:
    """``func`` scheduled by stock TVM, its CUDA text converted, and both run on random inputs."""
    device, target = device_for_target(DEVICE)
    with target:
        try:
            scheduled, _ = schedule_by_stock(func, name, device, "a corpus")
            launches = lower(scheduled.with_attr("global_symbol", "main"), target)
            source = cuda_text(scheduled, target)
            kernels = [_converted(source, launch) for launch in launches]
        except (TvmExtError, IllegalRewrite) as refusal:
            return Converted(operator=name, launches=0, reason=refusal.problem.split(",")[0][:90])
    if sum(kernel.task_count * kernel.threads for kernel in kernels) > MOST_THREADS:
        return Converted(operator=name, launches=len(kernels), reason="too large to be run here")
    arrays = random_inputs_of(launches)
    before = simt.run(launches, arrays, device=device)
    wild = next((item for item in before.findings if item.kind == "out of bounds"), None)
    if wild is not None:  # which would overwrite memory of this process
        return Converted(operator=name, launches=len(kernels), reason=f"stock TVM's own: {wild.kind} of {wild.buffer}")
    try:
        after = run_converted(launches, kernels, arrays, folder)
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), "")
        return Converted(operator=name, launches=len(kernels), reason=f"g++ does not know it: {said[-60:]}")
    reason = "its threads got stuck" if after is None else "" if _agree(before, after) else "other values"
    return Converted(operator=name, launches=len(kernels), reason=reason)


def cuda_text(func: PrimFunc, target: Any) -> str:
    """Stock TVM's CUDA text of a scheduled function, uncompiled."""
    from tvm_ext.runtime.cuda_source import own_cuda_compiler

    with own_cuda_compiler():
        built = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target=target)
    return "\n".join(str(module.inspect_source()) for module in built.mod.imports if module.kind == "cuda")


def _converted(source: str, launch: DeviceKernel) -> ConvertedKernel:
    grid, block = ([launch.extents.get(f"{kind}.{axis}", 1) for axis in "xyz"] for kind in ("blockIdx", "threadIdx"))
    return convert_kernel(source, launch.name, grid=(grid[0], grid[1], grid[2]), block=(block[0], block[1], block[2]))


def run_converted(
    launches: tuple[DeviceKernel, ...], kernels: list[ConvertedKernel], given: dict[str, Array], folder: Path
) -> dict[str, Array] | None:
    """All tensors behind the converted kernels, on vEUs of a warp more than they need; None where threads get stuck."""
    tensors = {
        tensor.name: given[tensor.name].copy() if tensor.name in given else np.zeros(tensor.shape, tensor.dtype)
        for tensor in launches[0].tensors
    }
    for launch, kernel in zip(launches, kernels, strict=True):
        arguments = [tensors[name] for name in launch.arguments]
        if not run_on_cpu(kernel, arguments, kernel.meeting + 32, folder):
            return None
    return tensors


def _agree(before: simt.SimtRun, after: dict[str, Array]) -> bool:
    """Whether what kernels wrote is the same: exactly, or to the rounding of mathematical functions."""
    return all(_same(np.ma.getdata(values), after[name]) for name, values in before.outputs.items())


def _same(before: Array, after: Array) -> bool:
    if before.dtype.kind != "f":
        return np.array_equal(before.reshape(-1), after.reshape(-1))
    return np.allclose(before.reshape(-1), after.reshape(-1), rtol=2e-5, atol=2e-6, equal_nan=True)


WRONG = ("other values", "its threads got stuck", "crashed")
"""How reasons begin that are no refusal."""


def corpus(most: int, *, jobs: int = 1, limit_s: float = 900.0) -> Iterator[Converted]:
    """Operators of ONNX's node tests, each with what became of it, until ``most`` kernels are converted and equal."""
    seen: set[str] = set()
    kernels = 0
    trial = Trial(attempt=attempt, failure=_failure, alone=True)
    for found in run_trials(node_tests(seen), trial, jobs=jobs, limit_s=limit_s):
        seen |= found.digests
        yield from found.operators
        kernels += sum(item.launches for item in found.operators if not item.reason)
        if kernels >= most:
            return


@app.command()
def main(
    most: Annotated[int, typer.Option(min=1, help="Kernels to convert, then stop.")] = KERNELS,
    jobs: Jobs = 1,
    limit_s: LimitS = 900.0,
) -> None:
    """Convert until so many kernels are right; exits with 1 where one computes something else."""
    reasons: Counter[str] = Counter()
    kernels = operators = 0
    for item in corpus(most, jobs=jobs, limit_s=limit_s):
        if item.reason:
            reasons[item.reason] += 1
        else:
            operators, kernels = operators + 1, kernels + item.launches
        console.print(f"{item.operator}: {item.reason or 'equal'}; {kernels} kernels so far", markup=False)
    console.print(f"{kernels} kernels of {operators} operators converted, equal before and after; not: {dict(reasons)}")
    raise typer.Exit(int(any(reason.startswith(WRONG) for reason in reasons)))


if __name__ == "__main__":
    app()
