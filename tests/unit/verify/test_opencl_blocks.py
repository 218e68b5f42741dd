"""Blocks that take tickets and wait for each other on this machine's cores: OpenCL 2.0 has the same orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.simt.persistent_kernels import expected
from tests.unit.verify.simt.test_persistent import FIGURE_9, TICKETS
from tvm_ext._tvm import Call, Expr, PrimFunc, structural_map, tirx
from tvm_ext.ir.device_sync import ALL, CALL, opencl_text
from tvm_ext.verify import opencl_cpu

needs_opencl = pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=str(opencl_cpu.why_not()))
RUNS = 20


def without_texts(function: PrimFunc) -> PrimFunc:
    """``function`` with calls that do not bring CUDA's text: for OpenCL, with `opencl_text` before the source."""

    def plain(call: Call) -> Expr:
        if str(getattr(call.op, "name", "")) != CALL or str(call.args[0].value) not in ALL:
            return call
        return tirx.call_extern("int32", *call.args[:-1])

    return function.with_body(structural_map(function.body, (Call, plain)))


@needs_opencl
@pytest.mark.filterwarnings("ignore")  # a driver's "build done"
def test_runs_follow_each_other_on_one_state() -> None:
    import pyopencl as cl

    program = opencl_cpu.compile_opencl(without_texts(TICKETS.function()))
    context = cl.Context([opencl_cpu.find_device()])
    if "CL 1." in context.devices[0].version:
        pytest.skip("the driver knows OpenCL 1 only, which has no memory orders")
    queue, source = cl.CommandQueue(context), opencl_text() + program.source
    built = cl.Program(context, source).build(options=["-cl-std=CL2.0"], cache_dir=False)
    (launch,) = program.functions["main"].launches
    kernel = cl.Kernel(built, launch.kernel)
    right = expected(FIGURE_9)
    arrays = {**TICKETS.inputs(), "arena": np.full_like(right, np.nan)}
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffers: dict[str, Any] = {name: cl.Buffer(context, flags, hostbuf=array) for name, array in arrays.items()}
    for number, place in enumerate(launch.buffers):
        kernel.set_arg(number, list(buffers.values())[place])
    threads = tuple(a * b for a, b in zip(launch.blocks, launch.threads, strict=True))
    for _ in range(RUNS):
        cl.enqueue_copy(queue, buffers["arena"], np.full_like(right, np.nan))
        cl.enqueue_nd_range_kernel(queue, kernel, threads, launch.threads)
        result = np.empty_like(right)
        cl.enqueue_copy(queue, result, buffers["arena"])
        np.testing.assert_array_equal(result, right)
    cl.enqueue_copy(queue, arrays["state"], buffers["state"])
    assert (arrays["state"][-TICKETS.blocks :] == RUNS).all()
    assert arrays["state"][-TICKETS.blocks - 1] == RUNS * (TICKETS.entry_count + TICKETS.blocks)
