"""Small TensorIR functions and a way to run them, for the tests of kernel construction."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tvm
from tvm import relax, te

from tests.support import quick_code
from tests.support.guard_workspaces import guard_workspaces
from tests.support.guarded_memory import call_guarded
from tests.support.small_modules import inputs_of, module_of
from tvm_ext._tvm import CPU_PIPELINE
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, CONSTANT_PARAMS, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.support.arrays import pack
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.plan.context import UnscheduledOperator

TARGET = "llvm"


def cpu() -> DeviceSpec:
    return device_db.device_for_target(TARGET)[0]


def unscheduled_operator(
    func: Any, name: str = "operator", device: DeviceSpec | None = None, options: BuildOptions | None = None
) -> UnscheduledOperator:
    """``func`` as construction is given it, for the tests' CPU where ``device`` is left out."""
    return UnscheduledOperator(
        func=func, name=name, device=device or cpu(), options=options or BuildOptions(database="off")
    )


def legalised(build: Any, *shapes: tuple[int, ...], dtype: str = "float32", fuse: bool = True) -> Any:
    """The single PrimFunc that stock TVM makes of ``build(*inputs)``."""
    inputs = inputs_of(*shapes, dtype=dtype)
    passes = [relax.transform.LegalizeOps()]
    if fuse:
        passes += [relax.transform.AnnotateTIROpPattern(), relax.transform.FuseOps(), relax.transform.FuseTIR()]
    module = tvm.transform.Sequential(passes)(module_of(inputs, build(*inputs)))
    functions = [f for _, f in module.functions_items() if not isinstance(f, relax.Function)]
    assert len(functions) == 1
    return functions[0]


def from_te(*tensors: Any) -> Any:
    return te.create_prim_func(list(tensors))


def constructed(
    func: Any, *, constants: tuple[int, ...] = (), device: DeviceSpec | None = None
) -> tuple[Any, KernelChoice]:
    if constants:
        func = func.with_attr(CONSTANT_PARAMS, list(constants))
    kernel = construct_kernel(func, "operator", device or cpu(), BuildOptions())
    return kernel, from_json(KernelChoice, str(kernel.attrs[CHOICE]))


def run(
    kernel: Any, choice: KernelChoice, arrays: list[np.ndarray[Any, Any]], output_shape: tuple[int, ...], dtype: str
) -> Any:
    """The kernel's output for inputs that are packed as its choice asks, computed in guarded memory.

    A kernel with workspaces runs once more, with those between guards too; every other one, where code is made quickly.
    """
    packed = list(arrays)
    for how in choice.packs:
        packed[how.param_index] = pack(arrays[how.param_index], how)
    target = device_db.device_for_target(TARGET)[1]
    inputs = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in packed]
    chosen = zlib.crc32(repr(choice).encode()) % 2 == 0 or not quick_code.is_active()
    guarded = guard_workspaces(kernel) if chosen else kernel
    results = []
    for variant in [kernel] if guarded.body.same_as(kernel.body) else [kernel, guarded]:
        module = tvm.IRModule({"main": variant.with_attr("global_symbol", "main")})
        library = tvm.tirx.build(module, target=target, pipeline=CPU_PIPELINE)
        output = tvm.runtime.empty(output_shape, dtype)
        call_guarded("main", library["main"], [*inputs, output], [len(inputs)])
        results.append(output.numpy())
    assert all(np.allclose(result, results[0], equal_nan=True, rtol=1e-2, atol=1e-3) for result in results)
    return results[0]


def relative_error(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, "float64"), np.asarray(expected, "float64")
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))
