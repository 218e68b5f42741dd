"""Row kernels of small operators and ways to run them, for the tests of `gpu_rows.emit`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.kernels import relative_error
from tvm_ext._tvm import BufferStore, structural_walk, tirx
from tvm_ext.analysis.computations import OperatorBody, read_operator
from tvm_ext.devices import device_db
from tvm_ext.ir.build_ir import allocate, sequence
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.tir_passes.emit.gpu_rows.emit import emit_simt_rows
from tvm_ext.tir_passes.plan.plan_gpu_kernels import simplify_for_gpu
from tvm_ext.verify import simt

TOLERANCE = {"float32": 1e-5, "float16": 1.5e-3, "bfloat16": 1e-2}


def operator_of(func: Any) -> OperatorBody:
    return simplify_for_gpu(read_operator(func, "operator"))


def row_kernel(func: Any, device: str = "nvidia-a100") -> tuple[Any, SimtKernel]:
    """All computations of ``func`` as one group: the thread-bound function, and what was planned."""
    operator = operator_of(func)
    kernel = emit_simt_rows(operator.computations, device_db.lookup(device), operator.outputs, operator.params)
    used: list[Any] = []
    for statement in kernel.statements:
        structural_walk(statement, (BufferStore, lambda store: used.append(store.buffer)))
    inner = [computation.target for computation in operator.computations if not operator.is_output(computation.target)]
    spaces = [allocate(buffer) for buffer in inner if any(buffer.same_as(other) for other in used)]
    body = sequence(*spaces, *kernel.statements)
    function = tirx.PrimFunc(list(operator.params), body)
    for key, value in (("global_symbol", "main"), ("s_tir", True), ("tirx.noalias", True)):
        function = function.with_attr(key, value)
    return function, kernel


def launch_count(kernel: SimtKernel) -> int:
    return sum(not isinstance(statement, tirx.AllocBuffer) for statement in kernel.statements)


def interpreted(func: Any, inputs: list[Any], device: str = "nvidia-a100") -> tuple[Any, Any, SimtKernel]:
    """The output of ``func``'s row kernels in the SIMT interpreter, which must find nothing wrong, and its counters."""
    function, kernel = row_kernel(func, device)
    named = {param.name: value for param, value in zip(function.params, inputs, strict=False)}
    result = simt.run(simt.lower(function, device), named, device=device)
    output = function.params[-1].name
    assert not result.findings, [str(finding) for finding in result.findings]
    assert result.written[output].all()
    return np.asarray(result.outputs[output]), result.counters, kernel


def check(func: Any, inputs: list[Any], expected: Any, *, device: str = "nvidia-a100") -> tuple[Any, SimtKernel]:
    """Values against float64, no findings, no bank conflicts; returns (counters, what was planned)."""
    actual, counters, kernel = interpreted(func, inputs, device)
    assert actual.shape == np.shape(expected)
    assert relative_error(actual, expected) < TOLERANCE.get(str(actual.dtype), 0.0) + 1e-30
    assert counters.bank_conflicts == 0
    return counters, kernel
