"""Blocks that take tickets and wait for each other on this machine's cores: OpenCL 2.0 has the same orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import opencl_cpu
from tests.support.opencl_sync import opencl_text
from tests.support.simt.persistent_kernels import expected
from tests.unit.verify.simt.test_persistent import FIGURE_9, TICKETS
from tvm_ext._tvm import Call, Expr, PrimFunc, structural_map, tirx
from tvm_ext.ir.device_sync import ALL, CALL
from tvm_ext.records.merged import NOT_CHOSEN

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


WALK = """
__kernel void walk(__global int* state, __global int* found, __global int* order, int blocks) {
  // state: tickets, entries that have ended, blocks that have begun, what was found, and for each block its runs.
  const int block = (int)get_group_id(0), epoch = tvm_ext_read_epoch(state + 4 + block);
  found[block] = tvm_ext_settle(state + 2, epoch, blocks);
  for (int turn = 0;; ++turn) {
    if (found[block] && turn == 1) break;
    const int entry = found[block] ? block : tvm_ext_take(state, epoch, 2 * blocks);
    if (entry >= blocks) break;
    tvm_ext_wait_until(state + 1, epoch, blocks, entry);  // each entry waits for all before it
    order[entry] = block;
    tvm_ext_arrive(state + 1, 1);
  }
  if (found[block] && block == 0) tvm_ext_arrive(state, 2 * blocks);
  tvm_ext_end_run(state + 4 + block);
}
"""


@needs_opencl
@pytest.mark.filterwarnings("ignore")  # a driver's "build done"
@pytest.mark.parametrize("blocks", [1, 2, 64])
def test_blocks_that_have_no_room_take_tickets(blocks: int) -> None:
    """A driver for CPUs runs as many blocks at once as there are cores: streams of 64 would wait for ever."""
    import pyopencl as cl

    context = cl.Context([opencl_cpu.find_device()])
    if "CL 1." in context.devices[0].version:
        pytest.skip("the driver knows OpenCL 1 only, which has no memory orders")
    queue = cl.CommandQueue(context)
    built = cl.Program(context, opencl_text() + WALK).build(options=["-cl-std=CL2.0"], cache_dir=False)
    kernel = cl.Kernel(built, "walk")
    state = np.zeros(4 + blocks, np.int32)
    state[3] = NOT_CHOSEN
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=state)
    results = [np.empty(blocks, np.int32) for _ in range(2)]
    outputs = [cl.Buffer(context, cl.mem_flags.READ_WRITE, item.nbytes) for item in results]
    for run in range(RUNS):
        kernel(queue, (blocks,), (1,), buffer, *outputs, np.int32(blocks))
        for array, output in zip([*results, state], [*outputs, buffer], strict=True):
            cl.enqueue_copy(queue, array, output)
        found, order = results
        assert len(set(found.tolist())) == 1, "blocks walk in two ways"
        if found[0]:
            np.testing.assert_array_equal(order, np.arange(blocks))
        assert state[:3].tolist() == [2 * blocks * (run + 1), blocks * (run + 1), blocks * (run + 1)]
        assert state[3] == 2 * run + (1 if found[0] else 2)
    assert (state[4:] == RUNS).all()
    assert found[0] == 1 or blocks > 1
