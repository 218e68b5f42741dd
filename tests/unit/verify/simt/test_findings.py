"""Each kind of defect is found, with its place; the sound kernel beside it is not accused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.support.simt import good_kernels
from tests.unit.verify.simt.small_kernels import (
    DEVICE,
    barriers,
    function,
    kinds,
    lowered,
    numbers,
    run,
    shifted_stores,
    tensors,
    without_barrier,
)
from tvm_ext._tvm import structural_map, tirx
from tvm_ext.ir.build_ir import SERIAL, VECTORIZED, allocate, index, load, loop, sequence, store
from tvm_ext.ir.simt_ir import allocate_shared, gpu_buffer, launch
from tvm_ext.verify import simt


def reversal(threads: int = 64) -> Any:
    """B[t] = A[63 - t] through shared memory."""
    a, b = tensors("A", "B", size=threads)
    tile = gpu_buffer((threads,), "float32", "tile", "shared")

    def body(block: Any, t: Any) -> Any:
        swap = store(b, load(tile, [index(threads - 1) - t]), [t])
        return sequence(allocate_shared(tile), store(tile, load(a, [t]), [t]), swap)

    return function([a, b], launch(1, threads, body))


def rotation_in_loop() -> Any:
    """Four times, what the neighbour had is taken: two barriers an iteration."""
    a, b = tensors("A", "B")
    tile = gpu_buffer((64,), "float32", "tile", "shared")
    mine = gpu_buffer((1,), "float32", "mine", "local")

    def body(block: Any, t: Any) -> Any:
        def step(k: Any) -> Any:
            neighbour = tirx.floormod(t + index(1), index(64))
            return sequence(store(tile, load(mine, [index(0)]), [t]), store(mine, load(tile, [neighbour]), [index(0)]))

        return sequence(
            allocate_shared(tile), allocate(mine), store(mine, load(a, [t]), [index(0)]),
            loop(4, SERIAL, "k", step), store(b, load(mine, [index(0)]), [t]),
        )  # fmt: skip

    return function([a, b], launch(1, 64, body))


def elementwise(size: int = 64, *, threads: int = 64, blocks: int = 1, shift: int = 0, guard: bool = False) -> Any:
    a, b = tensors("A", "B", size=size)

    def body(block: Any, t: Any) -> Any:
        i = block * index(threads) + t
        copy = store(b, load(a, [i + index(shift)]), [i])
        return tirx.IfThenElse(i < index(size), copy, None) if guard else copy

    return function([a, b], launch(blocks, threads, body))


def test_sound_kernels_are_not_accused() -> None:
    assert np.array_equal(run(lowered(reversal()), A=numbers()).outputs["B"], numbers()[::-1])
    result = run(lowered(rotation_in_loop()), A=numbers())
    assert result.ok, result.findings
    assert np.array_equal(result.outputs["B"], np.roll(numbers(), -4))


def test_a_missing_barrier_is_a_race() -> None:
    kernels = lowered(reversal())
    assert barriers(kernels[0].function) == 1
    result = run(without_barrier(kernels, 0), A=numbers())
    (finding,) = result.findings
    assert finding.kind == "read-write race"
    assert (finding.buffer, finding.kernel) == ("tile", kernels[0].name)
    assert len(finding.threads) == 2 and finding.element is not None
    assert "tile[63" in finding.statement and "tile[threadIdx_x] = A" in finding.other


def test_a_missing_barrier_at_the_end_of_a_loop_is_loop_carried() -> None:
    kernels = lowered(rotation_in_loop())
    count = barriers(kernels[0].function)
    assert count == 2
    found = [run(without_barrier(kernels, i), A=numbers()) for i in range(count)]
    assert {"loop-carried hazard"} in [kinds(result) for result in found]
    assert all("race" in str(kinds(r)) or "hazard" in str(kinds(r)) for r in found)
    carried = next(f for r in found for f in r.findings if f.kind == "loop-carried hazard")
    assert dict(carried.loops) != dict(carried.other_loops) and "iteration of k" in carried.detail


def test_a_barrier_that_some_threads_miss() -> None:
    kernels = lowered(reversal())

    def guarded(node: Any) -> Any:
        if str(getattr(getattr(node.value, "op", None), "name", "")) != "tirx.tvm_storage_sync":
            return node
        return tirx.IfThenElse(extent.node.var < tirx.IntImm("int32", 32), node, None)

    found: list[Any] = []
    structural_map(kernels[0].function.body, (tirx.AttrStmt, lambda n: (found.append(n), n)[1]))
    extent = next(n for n in found if str(n.attr_key) == "thread_extent" and str(n.node.thread_tag) == "threadIdx.x")
    body = structural_map(kernels[0].function.body, (tirx.Evaluate, guarded))
    broken = dataclasses.replace(kernels[0], function=kernels[0].function.with_body(body))
    finding = next(f for f in run([broken], A=numbers()).findings if f.kind == "barrier divergence")
    assert finding.threads == ("thread 32 of block 0",) and "32 of 64" in finding.detail


@pytest.mark.parametrize(("shift", "element"), [(1, 64), (-1, -1)])
def test_out_of_bounds_of_global_memory(shift: int, element: int) -> None:
    result = run(lowered(elementwise(shift=shift)), A=numbers())
    (finding,) = result.findings
    assert (finding.kind, finding.buffer, finding.element) == ("out of bounds", "A", element)


def test_out_of_bounds_of_shared_memory() -> None:
    result = run(shifted_stores(lowered(reversal()), "tile", 1), A=numbers())
    finding = next(f for f in result.findings if f.kind == "out of bounds")
    assert (finding.buffer, finding.element, finding.threads) == ("tile", 64, ("thread 63 of block 0",))


def test_out_of_bounds_of_registers() -> None:
    a, b = tensors("A", "B")
    mine = gpu_buffer((2,), "float32", "mine", "local")

    def body(block: Any, t: Any) -> Any:
        fill = loop(2, SERIAL, "i", lambda i: store(mine, load(a, [t]), [i]))
        pick = tirx.floormod(t, index(3))
        return sequence(allocate(mine), fill, store(b, load(mine, [pick]), [t]))

    (kernel,) = lowered(function([a, b], launch(1, 64, body)))
    finding = next(f for f in run([kernel], A=numbers()).findings if f.kind == "out of bounds")
    assert (finding.buffer, finding.element) == ("mine", 2)


def test_predicates_keep_lanes_inside() -> None:
    result = run(lowered(elementwise(70, threads=64, blocks=2, guard=True)), A=numbers(70))
    assert result.ok and np.array_equal(result.outputs["B"], numbers(70))


def test_what_nobody_wrote_is_an_error_only_where_it_matters() -> None:
    """Half of the tile is filled. Reading all of it is no error; storing what was read is."""
    a, b = tensors("A", "B")
    tile = gpu_buffer((64,), "float32", "tile", "shared")

    def make(limit: int) -> Any:
        def body(block: Any, t: Any) -> Any:
            fill = tirx.IfThenElse(t < index(32), store(tile, load(a, [t]), [t]), None)
            value = load(tile, [tirx.floormod(t + index(1), index(64))])
            kept = tirx.if_then_else(t < index(limit), value, tirx.const(0.0, "float32"))
            return sequence(allocate_shared(tile), fill, store(b, kept, [t]))

        return function([a, b], launch(1, 64, body))

    assert run(lowered(make(31)), A=numbers()).ok
    (finding,) = run(lowered(make(32)), A=numbers()).findings
    assert (finding.kind, finding.buffer, finding.element) == ("uninitialised read", "tile", 32)
    assert finding.threads == ("thread 31 of block 0",)


def test_an_output_that_is_not_all_written() -> None:
    (finding,) = run(lowered(elementwise(65)), A=numbers(65)).findings
    assert (finding.kind, finding.buffer, finding.element) == ("unwritten output", "B", 64)
    some = simt.run(lowered(elementwise(128, blocks=2)), {"A": numbers(128)}, device=DEVICE, blocks=[1])
    assert some.ok and some.written["B"].sum() == 64


def test_blocks_that_write_one_element() -> None:
    a, b = tensors("A", "B", size=64)
    func = function([a, b], launch(2, 64, lambda block, t: store(b, load(a, [t]), [t])))
    assert kinds(run(lowered(func), A=numbers())) == {"cross-block race"}


def test_threads_that_write_one_element() -> None:
    a, b = tensors("A", "B", size=64)

    def make(value: Any) -> Any:
        store_one = lambda block, t: sequence(store(b, load(a, [t]), [t]), store(b, value(t), [index(5)]))  # noqa: E731
        return function([a, b], launch(1, 64, store_one))

    different = run(lowered(make(lambda t: load(a, [t]))), A=numbers())
    assert "write-write race" in kinds(different)
    equal = numbers() * 0
    assert run(lowered(make(lambda t: load(a, [t]))), A=equal).ok  # all write the same value


def test_misaligned_vector_stores() -> None:
    a, b = tensors("A", "B", size=80)

    def make(shift: int) -> Any:
        def body(block: Any, t: Any) -> Any:
            i = t * index(4)
            return loop(4, VECTORIZED, "v", lambda v: store(b, load(a, [i + v]), [i + v + index(shift)]))

        return function([a, b], launch(1, 16, body))

    assert "misaligned access" not in kinds(run(lowered(make(0)), A=numbers(80)))
    assert "misaligned access" in kinds(run(lowered(make(1)), A=numbers(80)))
    opencl = simt.run(lowered(make(1), {"kind": "opencl"}), {"A": numbers(80)}, device=DEVICE)
    assert "misaligned access" not in kinds(opencl)  # vstore4 may be unaligned


def test_device_limits() -> None:
    a, b = tensors("A", "B", size=64)
    tile = gpu_buffer((60000,), "float32", "tile", "shared.dyn")

    def body(block: Any, t: Any) -> Any:
        fill = loop(
            60000 // 60, SERIAL, "i", lambda i: store(tile, load(a, [t]), [i * index(60) + tirx.floormod(t, index(60))])
        )
        return sequence(allocate_shared(tile), fill, store(b, load(tile, [t * index(2)]), [t]))

    result = run(lowered(function([a, b], launch(1, 64, body))), A=numbers())
    assert any(f.kind == "device limit" and "240000 bytes" in f.detail for f in result.findings)


@pytest.fixture(scope="module")
def three_stages() -> tuple[simt.DeviceKernel, ...]:
    good = next(k for k in good_kernels.simt_kernels() if k.name == "matmul_three_stages")
    return simt.lower(good.function, DEVICE)


def _named(kernels: tuple[simt.DeviceKernel, ...], seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal(t.shape).astype(t.dtype) for t in kernels[0].tensors[:-1]}


def test_copies_land_as_late_as_their_waits_allow(three_stages: tuple[simt.DeviceKernel, ...]) -> None:
    assert run(three_stages, **_named(three_stages)).ok

    def later(node: Any) -> Any:
        if str(node.attr_key) != "async_wait_inflight_count":
            return node
        return tirx.AttrStmt(node.node, node.attr_key, node.value + tirx.IntImm("int32", 1), node.body)

    body = structural_map(three_stages[0].function.body, (tirx.AttrStmt, later))
    broken = dataclasses.replace(three_stages[0], function=three_stages[0].function.with_body(body))
    result = run([broken], **_named(three_stages))
    finding = next(f for f in result.findings if f.kind == "unlanded copy")
    assert "cp_async" in finding.other and finding.element is not None


def test_a_copy_without_commit_never_lands(three_stages: tuple[simt.DeviceKernel, ...]) -> None:
    def uncommitted(node: Any) -> Any:
        return node.body if str(node.attr_key) == "async_commit_queue_scope" else node

    body = structural_map(three_stages[0].function.body, (tirx.AttrStmt, uncommitted))
    broken = dataclasses.replace(three_stages[0], function=three_stages[0].function.with_body(body))
    assert "unlanded copy" in kinds(run([broken], **_named(three_stages)))
