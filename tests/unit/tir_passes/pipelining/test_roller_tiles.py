"""Every tile that Roller constructs is loaded ahead, or refused for want of resources: never for the form it has."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.pipelining.constructed import constructed, single_product
from tvm_ext._tvm import AllocBuffer, BufferStore, TensorLoad, structural_equal, structural_walk, te, tirx, topi
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.pipelines import PipelineRefusal
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import candidates
from tvm_ext.tir_passes.pipelining.detect import detect
from tvm_ext.tir_passes.pipelining.function import Function
from tvm_ext.tir_passes.pipelining.injection import TOGETHER, group_loads, ungroup_loads
from tvm_ext.tir_passes.pipelining.loops import accesses_of, enclosing_loops, to_loops
from tvm_ext.tir_passes.pipelining.plan import make_loader

WORKLOAD = Path(__file__).resolve().parents[4] / "benchmarks" / "workloads" / "roller_ops.csv"
DEVICES = ("nvidia-v100", "nvidia-a100", "nvidia-h200")
EVERYDAY, MORE = 12, 400
TILES, ALL_TILES = 3, 10
REST = "_rest"
"""Ends the names of tiles of a last, smaller step."""
NARROW = "cp.async copies 4, 8 or 16 bytes"


# --- what may be refused ----------------------------------------------------------------------------------------------
def is_of_resources(refusal: PipelineRefusal) -> bool:
    """No room, no gain, one tile of the reduction; a last step inside a loop whose other steps have one; 2 bytes."""
    one_tile = "one iteration" in refusal.reason or "is loaded once" in refusal.reason
    last_step = REST in refusal.buffer and refusal.rule == "synchronisation"
    return refusal.rule == "resources" or one_tile or last_step or refusal.reason.startswith(NARROW)


def refused_for_their_form(function: Any, device: str, count: int) -> Iterator[str]:
    """What is wrong with the pipelines of ``count`` tiles of an operator."""
    options = BuildOptions(enable_pipelining=True)
    for program, kernel in candidates(function, lookup(device), count, options=options):
        choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
        if choice.pipeline is None:  # a matrix by a vector: nothing in shared memory
            if "not pipelined" in choice.reason:
                yield f"{program}: {choice.reason}"
            continue
        for refusal in choice.pipeline.refusals:
            if refusal.scope.startswith("shared") and not is_of_resources(refusal):
                yield f"{device}, {program.tile('L1')}: {refusal.buffer}: {refusal.rule}: {refusal.reason}"


# --- operators --------------------------------------------------------------------------------------------------------
def product(m: int, n: int, k: int, dtype: str, turned: tuple[bool, bool] = (False, False)) -> Any:
    sums = {"float16": "float32", "int8": "int32"}.get(dtype, dtype)
    a = te.placeholder((k, m) if turned[0] else (m, k), dtype, "A")
    b = te.placeholder((n, k) if turned[1] else (k, n), dtype, "B")
    r = te.reduce_axis((0, k), "k")

    def element(i: Any, j: Any) -> Any:
        left, right = a[r, i] if turned[0] else a[i, r], b[j, r] if turned[1] else b[r, j]
        return te.sum(left.astype(sums) * right.astype(sums), axis=r)

    return te.create_prim_func([a, b, te.compute((m, n), element, "C")])


def random_product(rng: np.random.Generator) -> Any:
    m, n = (int(side) for side in rng.choice([1, 7, 13, 31, 48, 64, 100, 128, 200, 256, 500, 512, 1000, 1024], 2))
    k = int(rng.choice([2, 8, 17, 24, 50, 64, 100, 128, 333, 512, 1000, 2048]))
    turned = (bool(rng.integers(2)), bool(rng.integers(2)))
    return product(m, n, k, str(rng.choice(["float32", "float32", "float16", "int8"])), turned)


def random_convolution(rng: np.random.Generator) -> Any:
    channels, filters = int(rng.choice([3, 16, 42, 64, 84, 168, 256])), int(rng.choice([16, 42, 64, 84, 128, 256]))
    batch, size = int(rng.choice([1, 8, 128])), int(rng.choice([7, 14, 21, 28, 42, 56]))
    window, stride = int(rng.choice([1, 1, 3, 3, 5, 7])), int(rng.choice([1, 1, 2]))
    dtype = str(rng.choice(["float32", "float32", "float16"]))
    last = bool(rng.integers(3) == 0)
    x = (batch, size, size, channels) if last else (batch, channels, size, size)
    w = (window, window, channels, filters) if last else (filters, channels, window, window)
    a, b = te.placeholder(x, dtype, "X"), te.placeholder(w, dtype, "W")
    make = topi.nn.conv2d_nhwc if last else topi.nn.conv2d_nchw
    return te.create_prim_func([a, b, make(a, b, stride, window // 2, 1, out_dtype="float32")])


def random_operator(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return (random_convolution if seed % 2 else random_product)(rng)


@cache
def products_of_roller() -> dict[str, tuple[int, int, int]]:
    with WORKLOAD.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["op"] == "MatMul"]
    return {row["id"]: (int(row["M"]), int(row["N_mm"]), int(row["K"])) for row in rows}


# --- tests ------------------------------------------------------------------------------------------------------------
def check_products(dtype: str, device: str, count: int) -> None:
    shapes = products_of_roller()
    assert set(shapes) == {f"M{number}" for number in range(7)}
    for name, shape in shapes.items():
        problems = list(refused_for_their_form(product(*shape, dtype), device, count))
        assert not problems, f"{name}: {problems}"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("device", DEVICES)
def test_tiles_of_rollers_products(device: str) -> None:
    check_products("float32", device, TILES)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_tile_of_rollers_products(device: str, dtype: str) -> None:
    check_products(dtype, device, ALL_TILES)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("device", DEVICES)
def test_random_products_and_convolutions(device: str) -> None:
    for seed in range(EVERYDAY):
        assert not list(refused_for_their_form(random_operator(seed), device, 1)), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_many_random_products_and_convolutions(device: str) -> None:
    for seed in range(EVERYDAY, MORE):
        assert not list(refused_for_their_form(random_operator(seed), device, 3)), f"seed {seed}"


def _loops_that_load_and_use(function: Any, name: str) -> int:
    """Serial loops that both load and use a buffer: told without the passes' own analysis."""
    found: dict[str, set[str]] = {"load": set(), "use": set()}
    for around, statement in enclosing_loops(to_loops(function).body):
        loops = {str(loop.loop_var.name) for loop in around if isinstance(loop, tirx.For) and int(loop.kind) == 0}
        for access in accesses_of(statement):
            if str(access.buffer.name) == name:
                found["load" if access.writes else "use"] |= loops
    return len(found["load"] & found["use"])


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_loaded_once_is_in_no_loop(device: str) -> None:
    """The reason that is let pass above is true."""
    function = product(*products_of_roller()["M0"], "float32")
    for _, kernel in candidates(function, lookup(device), 3, options=BuildOptions(enable_pipelining=True)):
        refusals = from_json(KernelChoice, str(kernel.attrs[CHOICE])).pipeline.refusals
        once = [item.buffer for item in refusals if "is loaded once" in item.reason]
        assert once
        assert all(_loops_that_load_and_use(kernel, name) == 0 for name in once)


# --- statements made one ----------------------------------------------------------------------------------------------
def _marks(body: Any) -> list[Any]:
    found: list[Any] = []
    structural_walk(body, (tirx.AttrStmt, lambda node: found.append(node) if node.attr_key == TOGETHER else None))
    return found


def _stores(statement: Any) -> list[str]:
    found: list[str] = []
    structural_walk(statement, (BufferStore, lambda node: found.append(str(node.buffer.name))))
    return found


def test_a_turned_copy_of_one_round_is_one_statement() -> None:
    """Eight columns of 96 rows by 96 threads, in vectors of 8 elements that lie apart in shared memory."""
    loops = to_loops(constructed(partial(single_product, 96, 65, 72), "turned", "nvidia-v100"))
    grouped = group_loads(loops.body)
    marks = _marks(grouped)
    assert [set(_stores(mark)) for mark in marks] == [{"A_0_shared", "A_0_shared_vector"}]
    structural_walk(marks[0], (TensorLoad, lambda node: _check(str(node.source.name) in ("A", "A_0_shared_vector"))))
    allocated: list[str] = []
    structural_walk(grouped, (AllocBuffer, lambda node: allocated.append(str(node.buffer.name))))
    assert allocated.count("A_0_shared_vector") == 1
    assert structural_equal(group_loads(grouped), grouped), "a second time changes nothing"
    names = [load_use.name for group in _detected(grouped, loops).groups for load_use, _ in group.shared]
    assert names == ["A_0_shared", "B_1_shared"]
    assert not _marks(ungroup_loads(grouped))


def _check(condition: bool) -> None:
    assert condition


def _detected(body: Any, loops: Any) -> Any:
    function = Function(loops.with_body(body))
    device = lookup("nvidia-v100")
    return detect(function, lambda load_use: make_loader(function, load_use, device))


def test_registers_that_hold_results_are_left_alone() -> None:
    """A fragment is filled from shared memory and used by arithmetic: no load of shared memory."""

    def make(fill: Callable[[Any], Any]) -> Any:
        shared, register = (
            tirx.decl_buffer([8], "float32", name, scope=scope) for name, scope in (("S", "shared"), ("r", "local"))
        )
        zero = tirx.IntImm("int32", 0)
        stored = BufferStore(register, fill(tirx.BufferLoad(shared, [zero])), [zero])
        used = BufferStore(shared, tirx.BufferLoad(register, [zero]), [zero])
        return tirx.stmt_seq(AllocBuffer(register, {}), stored, used, tirx.Evaluate(tirx.const(1, "int32")))

    assert not _marks(group_loads(make(lambda load: load)))
    assert len(_marks(group_loads(make(lambda load: tirx.const(1.0, "float32"))))) == 1
