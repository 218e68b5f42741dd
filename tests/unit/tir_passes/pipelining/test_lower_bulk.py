"""Pipelines by bulk copies: the interpreter accepts them, catches every harmful change, and CUDA compiles them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.pipelining.constructed import constructed_kernels
from tests.support.pipelining.copies import copy_kernels
from tests.support.pipelining.hard import hard_kernels
from tests.support.pipelining.kernels import A100, H200, T4, PipeliningKernel, serial_loop
from tests.support.pipelining.schedules import schedule_kernels
from tests.support.pipelining.simt import simt_kernels
from tests.support.simt.good_kernels import argument, primitive_function
from tests.support.simt.mutate_pipelines import pipeline_mutants
from tests.unit.compilers import needs_nvcc
from tvm_ext._tvm import (
    Call,
    IRModule,
    PassContext,
    Schedule,
    Sequential,
    Target,
    structural_map,
    structural_walk,
    te,
    tirx,
    tvm,
)
from tvm_ext.ir.build_ir import SERIAL, VECTORIZED, allocate, index, load, loop, sequence, store
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.records.pipelines import PipelinePlan
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.pipelining import lower_bulk
from tvm_ext.tir_passes.pipelining.passes import AutoPipeline, InjectPipelines
from tvm_ext.tir_passes.pipelining.route import PIPELINED
from tvm_ext.toolchains.cuda_toolchain import compile_cuda
from tvm_ext.verify import simt, verify
from tvm_ext.verify.verification import Verification

BULK_COPY, WAIT, ANNOUNCE = "cp_async_bulk_g2s_cluster", "mbarrier_wait", "mbarrier_arrive_expect_tx"
ARCHITECTURE = "sm_90a"


@cache
def kernels() -> dict[str, PipeliningKernel]:
    every = (*simt_kernels(), *copy_kernels(), *hard_kernels(), *schedule_kernels(), *constructed_kernels())
    return {kernel.name: kernel for kernel in every}


def pipelined(name: str, device: str = H200, *, bulk_copies: bool = True, **wishes: Any) -> tuple[Any, PipelinePlan]:
    module = IRModule({"main": kernels()[name].make().with_attr("global_symbol", "main")})
    plan = AutoPipeline(device, always=True, bulk_copies=bulk_copies, **wishes)
    function = Sequential([plan, InjectPipelines(device)])(module)["main"]
    return function, from_json(PipelinePlan, str(function.attrs[PIPELINED]))


def judged(name: str, function: Any) -> Verification:
    kernel = kernels()[name]
    *names, output = (str(param.name) for param in function.params)
    inputs = dict(zip(names, kernel.inputs(function, 0), strict=True))
    return verify(
        function, H200, inputs=inputs, blocks=kernel.blocks,
        reference=lambda arrays: {output: kernel.reference(*(arrays[n] for n in names))},
    )  # fmt: skip


def op_of(statement: Any) -> str:
    """The last part of the name of the operator that a statement evaluates; "" for other statements."""
    return str(getattr(getattr(statement.value, "op", None), "name", "")).rpartition(".")[2]


def count(function: Any, name: str) -> int:
    found: list[Any] = []
    structural_walk(
        function.body, [(tirx.Evaluate, lambda s: found.append(s) if op_of(s) == name else None)], order="pre"
    )
    return len(found)


LEGAL = (
    "matmul_odd_steps", "matmul_two_steps", "matmul_shared_only", "matmul_tiles_outside", "matmul_padded_rows",
    "matmul_by_scalars", "matmul_half_octets", "matmul_bfloat16", "matmul_dynamic_0_steps", "matmul_dynamic_1_steps",
    "matmul_dynamic_7_steps", "matmul_triangular", "matmul_stages_by_hand", "two_products", "sum_of_rows",
    "sums_of_bytes", "running_sums", "loop_from_two", "persistent_tiles", "persistent_short_tiles",
    "tensor_core_matmul", "metaschedule_matmul",
    "roller_single_64x64x72_h200",
)  # fmt: skip

REFUSED = {
    "matmul_zero_filled": "under a predicate",
    "odd_pitch": "324 bytes apart in global memory",
    "transposed_copies": "in runs of 4 bytes",
    "roller_half_64x64x160_h200": "a swizzle, or an edge",
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", LEGAL)
def test_pipelines_by_bulk_copies_are_right(name: str) -> None:
    function, plan = pipelined(name)
    assert plan.bulk_copies and not any("no bulk copies" in note for note in plan.notes)
    assert count(function, BULK_COPY) >= 2, "in the prologue and in the loop"
    assert not count(function, "cp_async_raw") and not count(function, "cp_async_commit_group")
    result = judged(name, function)
    assert result.ok, str(result)


@pytest.mark.parametrize("name", REFUSED)
def test_what_bulk_copies_cannot_load_stays_with_cp_async(name: str) -> None:
    function, plan = pipelined(name)
    assert not plan.bulk_copies
    assert any(REFUSED[name] in note for note in plan.notes), plan.notes
    assert count(function, "cp_async_raw") and not count(function, BULK_COPY)
    assert judged(name, function).ok


@pytest.mark.parametrize("device", [A100, T4])
def test_older_devices_have_none(device: str) -> None:
    function, plan = pipelined("matmul_odd_steps", device)
    assert any(f"{device} has none" in note for note in plan.notes)
    assert plan.buffers and not count(function, BULK_COPY)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("virtual_threads", "bulk"), [(1, True), (2, False)])
def test_virtual_threads_would_announce_a_tile_several_times(virtual_threads: int, bulk: bool) -> None:
    schedule = Schedule(te.create_prim_func(_product(32, 16, 64)))
    block = schedule.get_sblock("C")
    i, j, k = schedule.get_loops(block)
    outer, virtual, thread, rows = schedule.split(i, [None, virtual_threads, 8, 2])
    steps, inner = schedule.split(k, [None, 16])
    schedule.reorder(outer, virtual, thread, j, steps, inner, rows)
    for axis, tag in ((outer, "blockIdx.x"), (virtual, "vthread.x"), (thread, "threadIdx.x")):
        schedule.bind(axis, tag)
    schedule.reorder(steps, j)
    copy = schedule.cache_read(block, 1, "shared")
    schedule.compute_at(copy, steps)
    _, lanes, vector = schedule.split(schedule.fuse(*schedule.get_loops(copy)[-2:]), [None, 8, 4])
    schedule.bind(lanes, "threadIdx.x")
    schedule.vectorize(vector)
    kernel = PipeliningKernel(
        name="virtual",
        make=lambda: schedule.mod["main"],
        reference=lambda a, b: a.astype("float64") @ b.astype("float64"),
    )
    kernels()["virtual"] = kernel
    function, plan = pipelined("virtual")
    assert plan.bulk_copies == bulk
    assert any("virtual threads" in note for note in plan.notes) != bulk
    assert judged("virtual", function).ok


def _product(m: int, n: int, depth: int) -> list[Any]:
    a, b = te.placeholder((m, depth), "float32", "A"), te.placeholder((depth, n), "float32", "B")
    k = te.reduce_axis((0, depth), "k")
    return [a, b, te.compute((m, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "C")]


def test_mbarriers_need_room_beside_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 versions of two tiles of 1 KiB, 5 mbarriers of 8 bytes and a gap of 128 bytes before them: 10408 bytes."""
    for room, fits in ((10408, True), (10407, False)):
        monkeypatch.setattr(lower_bulk, "shared_limit_bytes", lambda device, room=room: room)
        _, plan = pipelined("matmul_odd_steps", shared_stages=5)
        assert plan.bulk_copies == fits
        assert any("5 mbarriers do not fit" in note for note in plan.notes) != fits


def test_they_are_off_unless_asked_for() -> None:
    function, plan = pipelined("matmul_odd_steps", bulk_copies=False)
    assert not plan.bulk_copies and not count(function, BULK_COPY)


def test_one_barrier_an_iteration_and_one_copy_a_row() -> None:
    """5 tiles of 16 rows of A and of B for each of 2 blocks; a barrier behind the initialisation, and one a tile."""
    function, _ = pipelined("matmul_odd_steps", mode="multistage", shared_stages=3)
    run = judged("matmul_odd_steps", function).counters
    assert run.barriers == 2 * (1 + 5)
    copies = [access for access in run.select(scope="global", store=False) if access.buffer in ("A", "B")]
    assert {access.width_bytes for access in copies} == {64}
    assert sum(access.requests for access in copies) == 2 * 5 * (16 + 16)
    assert run.sector_efficiency() == 1.0


# --- mistakes -----------------------------------------------------------------------------------------------------
SYNCHRONISATION = (
    "mbarrier_init", ANNOUNCE, WAIT, BULK_COPY, "fence_mbarrier_init", "fence_proxy", "mbarrier_inval",
)  # fmt: skip


def broken(function: Any) -> Iterator[tuple[str, Any]]:
    """One instruction dropped, one parity turned, half of the bytes announced; and what `pipeline_mutants` makes."""
    for number in range(sum(count(function, name) for name in SYNCHRONISATION)):
        for change in (_without, _turned, _halved):
            yield from _changed(function, number, change)
    for mutant in pipeline_mutants(function):
        yield f"{mutant.kind}: {mutant.change}", mutant.function


def _changed(function: Any, number: int, change: Any) -> Iterator[tuple[str, Any]]:
    seen, words = -1, ""

    def visit(statement: Any) -> Any:
        nonlocal seen, words
        if op_of(statement) not in SYNCHRONISATION:
            return statement
        seen += 1
        new = change(statement) if seen == number else statement
        words = words if new is statement else f"{change.__name__[1:]}: {op_of(statement)} number {number}"
        return new

    body = structural_map(function.body, (tirx.Evaluate, visit))
    if words:
        yield words, function.with_body(body)


def _without(statement: Any) -> Any:
    return tirx.Evaluate(tirx.IntImm("int32", 0))


def _turned(statement: Any) -> Any:
    if op_of(statement) != WAIT:
        return statement
    address, parity = statement.value.args
    return tirx.Evaluate(Call(statement.value.op, [address, 1 - parity], ret_ty=statement.value.ty))


def _halved(statement: Any) -> Any:
    if op_of(statement) != ANNOUNCE:
        return statement
    address, size, *rest = statement.value.args
    half = tirx.IntImm("uint32", int(size.value) // 2)
    return tirx.Evaluate(Call(statement.value.op, [address, half, *rest], ret_ty=statement.value.ty))


HARMLESS = {
    "matmul_shared_only": {
        # the barrier before the wait, or behind the products: all have done with the tile before, and each waits itself
        "move: tvm_storage_sync from place 1 of 4 to 0",
        "move: tvm_storage_sync from place 1 of 4 to 3",
    },
    "matmul_odd_steps": {"move: tvm_storage_sync from place 1 of 2 to 0"},
    "tensor_core_matmul": {
        "move: tvm_storage_sync from place 1 of 4 to 0",
        "move: tvm_storage_sync from place 1 of 4 to 3",
    },
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", HARMLESS)
def test_every_harmful_mistake_is_caught(name: str) -> None:
    function, _ = pipelined(name, shared_stages=3)
    missed, tried = set(), 0
    for change, mutant in broken(function):
        tried += 1
        if judged(name, mutant).ok:
            missed.add(change)
    assert missed == HARMLESS[name]
    assert tried >= 40


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ("without: mbarrier_arrive_expect_tx", {"mbarrier deadlock"}),
        ("halved: mbarrier_arrive_expect_tx", {"wrong byte count"}),
        ("turned: mbarrier_wait", {"unlanded copy"}),
        ("without: mbarrier_wait", {"unlanded copy"}),
        ("without: fence_mbarrier_init", {"missing proxy fence"}),
        ("without: mbarrier_init", {"mbarrier misuse"}),
        ("drop: no tvm_storage_sync", {"read-write race", "loop-carried hazard"}),
    ],
)
def test_findings_name_the_mistake(change: str, kinds: set[str]) -> None:
    function, _ = pipelined("matmul_shared_only", shared_stages=3)
    mutants = [mutant for words, mutant in broken(function) if words.startswith(change)]
    assert mutants
    for mutant in mutants:
        found = {finding.kind for finding in judged("matmul_shared_only", mutant).findings}
        assert found & kinds, (change, found)


def sum_between_reversals(steps: int = 5) -> Any:
    """Sums over the rows of A, with ordinary stores to shared memory before the loop and behind it.

    All three buffers are 256 floats of dynamic shared memory: stock TVM puts the others where the tiles are.
    """
    a, b = argument("A", steps, 256), argument("B", 256)
    before, behind, tile = (
        gpu_buffer((256,), "float32", name, "shared.dyn") for name in ("before", "behind", "A_shared")
    )
    mine = gpu_buffer((1,), "float32", "mine", "local")

    def body(block: Any, t: Any) -> Any:
        lane = lambda v: t * index(4) + v  # noqa: E731

        def step(k: Any) -> Any:
            load_tile = loop(4, VECTORIZED, "v", lambda v: store(tile, load(a, [k, lane(v)]), [lane(v)]))
            add = loop(4, SERIAL, "w", lambda w: add_one(load(tile, [index(255) - lane(w)])))
            return sequence(load_tile, add)

        def add_one(value: Any) -> Any:
            return store(mine, load(mine, [index(0)]) + value, [index(0)])

        first = loop(4, VECTORIZED, "v", lambda v: store(before, load(a, [index(0), lane(v)]), [lane(v)]))
        last = loop(4, SERIAL, "v", lambda v: store(behind, load(mine, [index(0)]), [lane(v)]))
        out = loop(4, SERIAL, "v", lambda v: store(b, load(behind, [index(255) - lane(v)]), [lane(v)]))
        return sequence(
            allocate(mine), allocate(before), first, store(mine, load(before, [index(255) - t]), [index(0)]),
            allocate(tile), serial_loop(steps, "k", step), allocate(behind), last, out,
        )  # fmt: skip

    return primitive_function([a, b], launch(1, 64, body))


def reversed_sums(a: Any) -> Any:
    wide = a.astype("float64")
    own = wide[0, ::-1][:64] + wide.sum(0)[::-1].reshape(64, 4).sum(1)
    return np.repeat(own, 4)[::-1]


def kinds_without(name: str, function: Any, instruction: str) -> set[str]:
    """What is found where one ``instruction`` is missing, any of them."""
    mutants = [mutant for change, mutant in broken(function) if change.startswith(f"without: {instruction}")]
    assert mutants
    return {finding.kind for mutant in mutants for finding in judged(name, mutant).findings}


def test_memory_that_other_code_stores_to_is_fenced() -> None:
    kernels()["sum_between_reversals"] = PipeliningKernel(
        name="sum_between_reversals", make=sum_between_reversals, reference=reversed_sums
    )
    function, plan = pipelined("sum_between_reversals", shared_stages=2)
    assert plan.bulk_copies
    (kernel,) = simt.lower(function, H200)
    assert kernel.function.script().count("decl_buffer") > 2, "they are merged"
    result = judged("sum_between_reversals", function)
    assert result.ok, str(result)
    assert kinds_without("sum_between_reversals", function, "fence_proxy") == {"missing proxy fence"}


def test_mbarriers_are_given_back() -> None:
    """Stock TVM's StorageRewrite puts those of the second loop where those of the first one were."""
    function, _ = pipelined("two_short_products", mode="double")
    assert kinds_without("two_short_products", function, "mbarrier_inval") == {"mbarrier misuse"}


# --- CUDA ---------------------------------------------------------------------------------------------------------
def source_of(function: Any) -> str:
    target = Target({"kind": "cuda", "arch": ARCHITECTURE})
    with PassContext(config={"tirx.use_async_copy": True}):
        (module,) = tvm.compile(
            IRModule({"main": function.with_attr("global_symbol", "main")}), target=target
        ).mod.imports
    return str(module.inspect_source())


@pytest.mark.sampled(every=2)
@needs_nvcc
@pytest.mark.parametrize("name", ["matmul_odd_steps", "matmul_stages_by_hand", "tensor_core_matmul", "two_products"])
def test_cuda_compiles_without_spills(name: str) -> None:
    function, _ = pipelined(name)
    source = source_of(function)
    body = source[source.rindex('extern "C"') :]
    assert len(re.findall(r"for \(int (?:ko|k_0_0)\w* ", body)) <= 2 * (1 + (name == "two_products")), (
        "loops stay rolled"
    )
    (use,) = compile_cuda(source, [ARCHITECTURE]).uses
    assert not use.spills and use.stack_bytes == 0
    assert use.register_count <= 128
