"""Tiles of any type and vector width in one shared memory: copies write where loads read, in TensorIR and in text.

Stock TVM retypes buffers that only vectors touch, lays dead ones under others, and merges dynamic ones into one
allocation of bytes. Each time offsets are counted in another unit.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.ir import IRModule
from tvm.script import tirx as T  # noqa: N812

from tvm_ext.devices.device_db import lookup
from tvm_ext.tir_passes.pipelining.plan import Wishes
from tvm_ext.tir_passes.pipelining.route import inject_pipelines, plan_pipelines
from tvm_ext.verify.verification import verify

A100 = "nvidia-a100"
STEPS, THREADS, STAGES, COPY_BYTES = 4, 32, 3, 16
TEXT_TYPES = {"float": 4, "half": 2, "signed char": 1}


def two_tiles(first: tuple[str, int], second: tuple[str, int], scope: str) -> Any:  # noqa: C901
    """Sums of tiles of two matrices, copied by 16 bytes; of each its type and how many elements one load reads."""
    (a_type, a_read), (b_type, b_read) = first, second
    a_lanes, b_lanes = (COPY_BYTES // np.dtype(name).itemsize for name in (a_type, b_type))
    a_size, b_size = THREADS * a_lanes, THREADS * b_lanes

    @T.prim_func(s_tir=True)
    def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle) -> None:
        A = T.match_buffer(a, (STEPS * a_size,), a_type)
        B = T.match_buffer(b, (STEPS * b_size,), b_type)
        C = T.match_buffer(c, (a_size,), a_type)
        D = T.match_buffer(d, (b_size,), b_type)
        T.launch_thread("blockIdx.x", 1)
        tx = T.launch_thread("threadIdx.x", THREADS)
        A_shared = T.alloc_buffer((a_size,), a_type, scope=scope)
        B_shared = T.alloc_buffer((b_size,), b_type, scope=scope)
        A_sum = T.alloc_buffer((a_lanes,), a_type, scope="local")
        B_sum = T.alloc_buffer((b_lanes,), b_type, scope="local")
        for v in T.serial(a_lanes):
            A_sum[v] = T.Cast(a_type, 0)
        for v in T.serial(b_lanes):
            B_sum[v] = T.Cast(b_type, 0)
        for k in T.serial(STEPS):
            for v in T.vectorized(a_lanes):
                A_shared[tx * a_lanes + v] = A[k * a_size + tx * a_lanes + v]
            for v in T.vectorized(b_lanes):
                B_shared[tx * b_lanes + v] = B[k * b_size + tx * b_lanes + v]
            for p in T.serial(a_lanes // a_read):
                for v in T.vectorized(a_read):
                    A_sum[p * a_read + v] += A_shared[(THREADS - 1 - tx) * a_lanes + p * a_read + v]
            for p in T.serial(b_lanes // b_read):
                for v in T.vectorized(b_read):
                    B_sum[p * b_read + v] += B_shared[(THREADS - 1 - tx) * b_lanes + p * b_read + v]
        for v in T.vectorized(a_lanes):
            C[tx * a_lanes + v] = A_sum[v]
        for v in T.vectorized(b_lanes):
            D[tx * b_lanes + v] = B_sum[v]

    return main


def pipelined(kernel: Any) -> tuple[Any, Any]:
    device = lookup(A100)
    plan = plan_pipelines(kernel, device, Wishes(shared_stages=STAGES))
    return inject_pipelines(kernel, plan, device), plan


TYPES = [("float32", 1), ("float32", 4), ("float16", 2), ("float16", 8), ("int8", 4), ("int8", 16)]
PAIRS = list(product(TYPES[1::2], TYPES))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_copies_land_where_loads_read(first: tuple[str, int], second: tuple[str, int]) -> None:
    function, plan = pipelined(two_tiles(first, second, "shared.dyn"))
    assert len(plan.buffers) == 2, plan.refusals
    result = verify(function, A100)
    assert result.ok, result


@pytest.mark.sampled
@pytest.mark.parametrize(("first", "second"), PAIRS[::2], ids=str)
def test_the_text_names_tiles_by_their_own_type(first: tuple[str, int], second: tuple[str, int]) -> None:
    """The pointer's type, by which the text scales a copy's offset, is the tile's, and so is the place it names."""
    function, _ = pipelined(two_tiles(first, second, "shared.dyn"))
    module = IRModule({"main": function.with_attr("global_symbol", "main")})
    text = tvm.compile(module, target=tvm.target.Target(dict(lookup(A100).target))).mod.imports[0].inspect_source()
    pointer = r"\(&\(\(\(([\w ]+)\*\)\w+\)\[(.*?)\]\)\), "
    calls = re.findall(r"^\s+ptx_cp_async_legacy_\w+?_16_(\d+)_\d+\(" + pointer, text, re.MULTILINE)
    assert len(calls) == len(re.findall(r"^\s+ptx_cp_async_legacy_\w+\(", text, re.MULTILINE)) == 4, text
    assert all(TEXT_TYPES[name] == int(size) for size, name, _ in calls)
    begins = {TEXT_TYPES[name] * int(n) for _, name, index in calls for n in re.findall(r"\+ (\d+)\)?$", index)}
    assert begins == {THREADS * COPY_BYTES * STAGES}  # one tile lies behind all versions of the other


def one_after_another(first: str, second: str, scope: str) -> Any:
    """Two loops, each with a tile of its own: the second tile may lie where the first one was."""
    size, lanes = 256, 4
    threads = size // lanes

    @T.prim_func(s_tir=True)
    def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle) -> None:
        A = T.match_buffer(a, (STEPS * size,), first)
        B = T.match_buffer(b, (STEPS * size,), second)
        C = T.match_buffer(c, (size,), first)
        D = T.match_buffer(d, (size,), second)
        T.launch_thread("blockIdx.x", 1)
        tx = T.launch_thread("threadIdx.x", threads)
        A_shared = T.alloc_buffer((size,), first, scope=scope)
        B_shared = T.alloc_buffer((size,), second, scope=scope)
        A_sum = T.alloc_buffer((lanes,), first, scope="local")
        B_sum = T.alloc_buffer((lanes,), second, scope="local")
        for v in T.serial(lanes):
            A_sum[v] = T.Cast(first, 0)
        for k in T.serial(STEPS):
            for v in T.vectorized(lanes):
                A_shared[tx * lanes + v] = A[k * size + tx * lanes + v]
            for v in T.vectorized(lanes):
                A_sum[v] += A_shared[(threads - 1 - tx) * lanes + v]
        for v in T.vectorized(lanes):
            C[tx * lanes + v] = A_sum[v]
        for v in T.serial(lanes):
            B_sum[v] = T.Cast(second, 0)
        for k in T.serial(STEPS):
            for v in T.vectorized(lanes):
                B_shared[tx * lanes + v] = B[k * size + tx * lanes + v]
            for v in T.vectorized(lanes):
                B_sum[v] += B_shared[(threads - 1 - tx) * lanes + v]
        for v in T.vectorized(lanes):
            D[tx * lanes + v] = B_sum[v]

    return main


@pytest.mark.sampled
@pytest.mark.parametrize("scope", ["shared", "shared.dyn"])
@pytest.mark.parametrize(("first", "second"), list(product(("float32", "float16", "int8"), repeat=2)))
def test_tiles_that_follow_each_other(first: str, second: str, scope: str) -> None:
    function, plan = pipelined(one_after_another(first, second, scope))
    assert [item.name for item in plan.buffers] == ["A_shared", "B_shared"][: 2 if first == second else 1]
    if first != second:
        assert "done with before" in plan.refusals[0].reason
    result = verify(function, A100)
    assert result.ok, result
