"""What lanes of a warp and asynchronous copies do together: stock reductions on each kind of GPU, and defects."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.support.simt import good_kernels
from tests.support.simt.good_kernels_tensor import tensor_core_kernels
from tests.unit.verify.simt.small_kernels import DEVICE, kinds, lowered, run
from tvm_ext._tvm import Call, Schedule, structural_map, te, tirx
from tvm_ext.verify import simt, verify
from tvm_ext.verify.cpu_reference import cpu_reference

TARGETS: dict[str, tuple[str, Any]] = {
    "cuda": ("nvidia-a100", None),  # shuffles
    "opencl": ("nvidia-v100", {"kind": "opencl"}),  # barriers and volatile shared memory
    "rocm": ("amd-mi50", None),  # wavefronts of 64 lanes, ds_bpermute
}


def row_sums(threads_y: int, threads_x: int) -> tuple[Any, Any]:
    """(the operator, its schedule with rows along threadIdx.y that are summed across threadIdx.x)."""
    x = te.placeholder((threads_y * 3, threads_x * 5), "float32", "X")
    k = te.reduce_axis((0, threads_x * 5), "k")
    operator = te.create_prim_func([x, te.compute((threads_y * 3,), lambda i: te.sum(x[i, k], axis=k), "S")])
    schedule = Schedule(operator)
    i, k = schedule.get_loops("S")
    outer, row = schedule.split(i, [None, threads_y])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(row, "threadIdx.y")
    schedule.bind(schedule.split(k, [None, threads_x])[1], "threadIdx.x")
    return operator, schedule.mod


@pytest.mark.sampled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("threads_y", "threads_x"), [(16, 16), (4, 64), (3, 24), (1, 96)])
def test_stock_reductions_across_threads(target: str, threads_y: int, threads_x: int) -> None:
    device, kind = TARGETS[target]
    operator, scheduled = row_sums(threads_y, threads_x)
    result = verify(scheduled, device, target=kind, reference=cpu_reference(operator))
    assert result.ok and result.errors, result


def changed(kernels: tuple[simt.DeviceKernel, ...], *change: Any) -> tuple[simt.DeviceKernel, ...]:
    body = structural_map(kernels[0].function.body, change)
    return (dataclasses.replace(kernels[0], function=kernels[0].function.with_body(body)), *kernels[1:])


def replaced_calls(kernels: tuple[simt.DeviceKernel, ...], name: str, position: int, value: Any) -> Any:
    """The kernel with argument ``position`` of every call ``name`` replaced by ``value(old)``."""

    def change(call: Any) -> Any:
        if str(getattr(call.op, "name", "")) != name:
            return call
        arguments = list(call.args)
        arguments[position] = value(arguments[position])
        return Call(call.op, arguments, ret_ty=call.ty)

    return changed(kernels, Call, change)


def random_inputs(kernels: tuple[simt.DeviceKernel, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {t.name: rng.standard_normal(t.shape).astype(t.dtype) for t in kernels[0].tensors[:-1]}


@pytest.fixture(scope="module")
def copies() -> tuple[simt.DeviceKernel, ...]:
    good = next(k for k in good_kernels.simt_kernels() if k.name == "matmul_three_stages")
    return simt.lower(good.function, DEVICE)


def test_copies_that_are_never_waited_for_meet_the_next_ones(copies: tuple[simt.DeviceKernel, ...]) -> None:
    broken = changed(copies, tirx.AttrStmt, _without_wait)
    assert {"unlanded copy", "copy overlap"} <= kinds(run(broken, **random_inputs(copies)))


def _without_wait(node: Any) -> Any:
    return node.body if str(node.attr_key) in ("async_wait_queue_scope", "async_wait_inflight_count") else node


def test_copies_of_many_threads_to_one_place(copies: tuple[simt.DeviceKernel, ...]) -> None:
    zero = tirx.IntImm("int32", 0)
    broken = replaced_calls(copies, "tirx.s_tir.cp_async_raw", 1, lambda offset: zero)
    assert "write-write race" in kinds(run(broken, **random_inputs(copies)))


def test_copies_from_beyond_a_tensor(copies: tuple[simt.DeviceKernel, ...]) -> None:
    far = tirx.IntImm("int32", 1 << 20)
    broken = replaced_calls(copies, "tirx.s_tir.cp_async_raw", 3, lambda offset: offset + far)
    assert "out of bounds" in kinds(run(broken, **random_inputs(copies)))


@pytest.mark.parametrize("name", [kernel.name for kernel in tensor_core_kernels()])
def test_matrix_instructions_need_the_whole_warp(name: str) -> None:
    kernel = next(k for k in tensor_core_kernels() if k.name == name)
    kernels = simt.lower(kernel.function, DEVICE)
    inputs = dict(zip((t.name for t in kernels[0].tensors), kernel.inputs(0), strict=False))
    assert run(kernels, **inputs).ok
    assert run(kernels, **inputs).counters.mma_count > 0
    lane = next(
        node.node.var
        for node in _attributes(kernels[0].function)
        if str(node.attr_key) == "thread_extent" and str(node.node.thread_tag) == "threadIdx.x"
    )

    def half_of_it(node: Any) -> Any:
        is_mma = "mma" in str(getattr(getattr(node.value, "op", None), "name", ""))
        return tirx.IfThenElse(lane % 32 < 16, node, None) if is_mma else node

    assert "warp divergence" in kinds(run(changed(kernels, tirx.Evaluate, half_of_it), **inputs))


def _attributes(function: Any) -> list[Any]:
    found: list[Any] = []
    structural_map(function.body, (tirx.AttrStmt, lambda node: (found.append(node), node)[1]))
    return found


def test_a_shuffle_that_some_lanes_miss() -> None:
    good = next(k for k in good_kernels.simt_kernels() if k.name == "sum_of_a_warp")
    kernels = lowered(good.function)
    inputs = dict(zip((t.name for t in kernels[0].tensors), good.inputs(0), strict=False))
    assert run(kernels, **inputs).ok
    everyone = tirx.const(0xFFFFFFFF, "uint32")
    function = str(kernels[0].function)
    name = next(n for n in ("__shfl_down_sync", "__shfl_sync", "__shfl_xor_sync") if n in function)
    full = replaced_calls(kernels, f"tirx.cuda.{name}", 0, lambda mask: everyone)
    assert run(full, **inputs).ok
    lane = next(
        n.node.var for n in _attributes(full[0].function) if "threadIdx.x" in str(getattr(n.node, "thread_tag", ""))
    )

    def half_of_it(node: Any) -> Any:
        return tirx.IfThenElse(lane < 16, node, None) if name in str(node.value) else node

    assert "warp divergence" in kinds(run(changed(full, tirx.BufferStore, half_of_it), **inputs))
