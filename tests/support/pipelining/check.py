"""Pipelines a kernel and proves the result: in the interpreter, its threads as loops on LLVM, as OpenCL on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.opencl_cpu import run_opencl
from tvm_ext._tvm import Call, For, IRModule, PassContext, Sequential, Target, structural_mutate, structural_walk, tvm
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.pipelines import PipelinePlan
from tvm_ext.records.serialise import from_json
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.pipelining.passes import AutoPipeline, InjectPipelines
from tvm_ext.tir_passes.pipelining.route import PIPELINED
from tvm_ext.verify.threads_as_loops import run_threads_as_loops
from tvm_ext.verify.verification import TOLERANCES, Verification, verify

from .kernels import OPENCL, PipeliningKernel

OPENCL_DEVICE = "nvidia-t4"
"""Whose limits an OpenCL kernel is held to in the interpreter: it has no row of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to ask `AutoPipeline` for: its arguments. Stages of None are the model's choice."""

    mode: Any = "full"
    shared_stages: int | None = None
    register_stages: int | None = None
    always: bool = True
    replace_stock: bool = False
    bulk_copies: bool = False

    def __str__(self) -> str:
        chosen = "x".join(
            "?" if stages is None else str(stages) for stages in (self.shared_stages, self.register_stages)
        )
        return f"{self.mode}-{chosen}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipelined:
    """A kernel, the device, and what the passes made of it."""

    kernel: PipeliningKernel
    device: str
    function: Any
    plan: PipelinePlan

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(param.name) for param in self.function.params)


def device_of(name: str) -> DeviceSpec | str:
    """What the passes take for a device of `PipeliningKernel.devices`."""
    spec, target = device_for_target(name)
    return target if spec is None else spec


def pipelined(kernel: PipeliningKernel, device: str, wanted: Wanted | None = None) -> Pipelined:
    """``kernel`` behind both passes for ``device``."""
    wanted = wanted or Wanted()
    where = device_of(device)
    module = IRModule({"main": kernel.make().with_attr("global_symbol", "main")})
    plan = AutoPipeline(
        where, mode=wanted.mode, shared_stages=wanted.shared_stages, register_stages=wanted.register_stages,
        always=wanted.always, replace_stock=wanted.replace_stock, bulk_copies=wanted.bulk_copies,
    )  # fmt: skip
    function = Sequential([plan, InjectPipelines(where)])(module)["main"]
    return Pipelined(
        kernel=kernel, device=device, function=function, plan=from_json(PipelinePlan, str(function.attrs[PIPELINED]))
    )


def check(item: Pipelined, *, seed: int = 0, blocks: Sequence[int] | None = None) -> Verification:
    """The interpreter's verdict: findings, and the values against the kernel's reference."""
    *names, output = item.names
    inputs = dict(zip(names, item.kernel.inputs(item.function, seed), strict=True))

    def reference(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return {output: item.kernel.reference(*(arrays[name] for name in names))}

    is_opencl = item.device == OPENCL
    return verify(
        item.function, OPENCL_DEVICE if is_opencl else item.device, inputs=inputs, reference=reference,
        blocks=item.kernel.blocks if blocks is None else blocks, target=OPENCL if is_opencl else None,
    )  # fmt: skip


def error_on_llvm(item: Pipelined, seed: int = 0) -> float:
    """The error, relative to the largest value, with threads as loops on the CPU and copies when they are issued.

    Raises IllegalRewrite where threads exchange what they computed.
    """
    inputs = item.kernel.inputs(item.function, seed)
    (output,) = run_threads_as_loops(item.function, inputs)
    return largest_error(output, item.kernel.reference(*inputs))


def error_on_opencl(item: Pipelined, seed: int = 0) -> float:
    """The error of the kernel's OpenCL on the CPU; raises UnsupportedEnvironmentError without a driver."""
    inputs = item.kernel.inputs(item.function, seed)
    (output,) = run_opencl(item.function, list(inputs))
    return largest_error(output, item.kernel.reference(*inputs))


def largest_error(output: Array, expected: Array) -> float:
    """The largest difference over the largest expected value; infinite where anything is NaN."""
    difference = np.abs(output.astype(np.float64).reshape(expected.shape) - expected).max()
    scale = float(np.abs(expected).max()) or 1.0
    return float("inf") if np.isnan(difference) else float(difference) / scale


def tolerance(item: Pipelined) -> float:
    """As `verify` has it, by the output's dtype."""
    return TOLERANCES.get(str(item.function.params[-1].ty.dtype), 0.0)


# --- generated code ---------------------------------------------------------------------------------------------------
def cuda_source(function: Any, architecture: str) -> str:
    """The CUDA that stock TVM generates; stock pipelines become cp.async as well."""
    target = Target({"kind": "cuda", "arch": architecture})
    with PassContext(config={"tirx.use_async_copy": True}):
        library = tvm.compile(function.with_attr("global_symbol", "main"), target=target)
    return "\n".join(str(module.inspect_source()) for module in library.mod.imports)


def kernel_text(source: str) -> str:
    """The kernels of generated CUDA, without the functions of the preamble that they call."""
    return source[source.rindex('extern "C" __global__') :]


def line_count(source: str) -> int:
    return len(source.splitlines())


BARRIER = "tirx.tvm_storage_sync"


def barriers_in_loops(function: Any) -> dict[str, int]:
    """By the name of each outermost loop of a lowered device function that has any: barrier statements in it."""
    found: dict[str, int] = {}

    def count(body: Any) -> int:
        calls: list[bool] = []
        structural_walk(body, (Call, lambda call: calls.append(getattr(call.op, "name", "") == BARRIER)), order="pre")
        return sum(calls)

    def visit(loop: Any, mutator: Any) -> Any:
        barriers = count(loop.body)
        if barriers:
            found[str(loop.loop_var.name)] = barriers
        return loop if barriers else mutator.default_mutate(loop)

    structural_mutate(function.body, (For, visit))
    return found
