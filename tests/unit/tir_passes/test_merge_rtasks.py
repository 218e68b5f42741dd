"""Schedules as single GPU kernels: right in the interpreter at every level and in every order, with reasons."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.merged_runs import FITS, MergedGraph, Runs, fits, merged_graph, nobody
from tests.support.small_modules import inputs_of, module_of
from tests.unit.compilers import needs_nvcc
from tvm_ext import relay
from tvm_ext._tvm import IRModule, PrimFunc
from tvm_ext.analysis.launches import lower
from tvm_ext.records.merged import ENTRY_WORDS, FIRST_WAIT, LAST_WAIT, MERGED, CompiledUse, MergedKernel
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.merge_rtasks import AskCompiler
from tvm_ext.toolchains import cuda_nvrtc, cuda_toolchain
from tvm_ext.toolchains.cuda_check import compiled_use
from tvm_ext.verify.build_check import check_kernel
from tvm_ext.verify.simt import Concurrency

op = relax.op
RANDOM = [Concurrency(order="random", seed=seed) for seed in (1, 2)]
BACKWARD = Concurrency(order="backward")


def branches() -> IRModule:
    """Two products side by side, of different widths; a softmax, and a sum of everything, which needs more threads."""
    x, first, second = inputs_of((8, 16), (16, 24), (16, 8))
    left, right = op.nn.relu(op.matmul(x, first)), op.matmul(x, second)
    joined = op.concat([left, right], axis=1)
    return module_of([x, first, second], op.nn.softmax(left), right, op.sum(joined, axis=[1]))


def branches_in_numpy(x: Array, first: Array, second: Array) -> list[Array]:
    left, right = np.maximum(x @ first, 0), x @ second
    return [softmax(left), right, np.concatenate([left, right], axis=1).sum(axis=1)]


def weights() -> list[Array]:
    generator = np.random.default_rng(2)
    return [generator.standard_normal((24, 24)).astype("float32") for _ in range(4)]


def chain() -> IRModule:
    """Operators that wait for each other, with constants as weights."""
    (x,) = inputs_of((8, 24))
    value = x
    for weight in weights():
        value = op.nn.relu(op.add(op.matmul(value, relax.const(weight)), x))
    return module_of([x], value, op.reshape(op.nn.softmax(value), (192,)))


def chain_in_numpy(x: Array) -> list[Array]:
    value = x
    for weight in weights():
        value = np.maximum(value @ weight.astype("float64") + x, 0)
    return [value, softmax(value).reshape(192)]


def softmax(value: Array) -> Array:
    powers = np.exp(value - value.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


GRAPHS: dict[str, tuple[Callable[[], IRModule], Callable[..., list[Array]]]] = {
    "branches": (branches, branches_in_numpy),
    "chain": (chain, chain_in_numpy),
}


def values_of(mod: IRModule) -> list[Array]:
    generator = np.random.default_rng(5)
    shapes = [[int(size) for size in item.ty.shape.values] for item in mod["main"].params]
    return [generator.standard_normal(shape).astype("float32") for shape in shapes]


@functools.cache
def merged(name: str, measure: AskCompiler = fits) -> MergedGraph:
    return merged_graph(GRAPHS[name][0](), measure=measure)


def assert_right(name: str, graph: MergedGraph, orders: list[Concurrency | None]) -> None:
    """Each run, against double precision; they follow each other on the state that the one before has left."""
    runs, values = Runs(graph), values_of(graph.mod)
    expected = GRAPHS[name][1](*(item.astype("float64") for item in values))
    for how in orders:
        for actual, wanted in zip(runs(values, how), expected, strict=True):
            assert np.linalg.norm(actual - wanted) <= 1e-5 * np.linalg.norm(wanted)
    assert runs.findings == []


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("name", "measure", "level", "orders"),
    [
        ("branches", fits, "static", [None, BACKWARD, RANDOM[0]]),
        ("branches", nobody, "ticket", [Concurrency(order="random", seed=3, resident=2), Concurrency(resident=1)]),
        ("chain", fits, "static", RANDOM),
        # Fewer blocks are on the device than the schedule was made for, then all, then fewer again.
        ("branches", fits, "static", [Concurrency(resident=1), None, Concurrency(order="random", seed=5, resident=2)]),
        ("chain", fits, "static", [Concurrency(order="backward", resident=2), Concurrency(resident=1), None]),
        ("chain", nobody, "ticket", [BACKWARD]),
    ],
)
def test_merged_kernels_are_right_in_every_order(
    name: str, measure: AskCompiler, level: str, orders: list[Concurrency | None]
) -> None:
    graph = merged(name, measure)
    (region,) = graph.record.regions
    assert [launch.level for launch in region.launches] == [level]
    assert graph.record.outside == ()
    assert_right(name, graph, orders)


def test_a_device_without_acquiring_loads_launches_waves() -> None:
    graph = merged_graph(chain(), name="nvidia-k80")
    (region,) = graph.record.regions
    assert {launch.level for launch in region.launches} == {"waves"}
    assert len(region.launches) == 7, "four products, a ReLU, a softmax and a reshape, each behind the one before"
    assert "no acquiring loads" in region.launches[0].reason
    assert_right("chain", graph, [None, None])


def test_what_waits_for_nothing_is_one_plain_launch() -> None:
    inputs = inputs_of((6, 16), (16, 8), (16, 24))
    graph = merged_graph(module_of(inputs, op.matmul(inputs[0], inputs[1]), op.matmul(inputs[0], inputs[2])))
    (region,) = graph.record.regions
    (launch,) = region.launches
    assert (launch.level, launch.reason) == ("waves", "nothing in it waits")
    runs = Runs(graph)
    x, first, second = values_of(graph.mod)
    for actual, wanted in zip(runs([x, first, second]), (x @ first, x @ second), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    assert runs.findings == []


def test_operators_that_differ_in_weights_share_a_body() -> None:
    """Of the four products, the first reads the input instead of the arena; the last has no ReLU."""
    (region,) = merged("chain").record.regions
    names = [operator.name for operator in region.operators]
    assert sum("matmul" in name for name in names) == 4
    (launch,) = region.launches
    assert launch.bodies == len(names) - 1


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (CompiledUse(registers=2000, spill_bytes=0, shared_bytes=0), "2000 registers leave room for 0 of"),
        ("no CUDA compiler (nvcc) was found", "no CUDA compiler (nvcc) was found"),
    ],
)
def test_streams_that_are_not_resident_for_certain_become_tickets(use: CompiledUse | str, reason: str) -> None:
    graph = merged_graph(chain(), measure=lambda _func: use)
    (launch,) = graph.record.regions[0].launches
    assert launch.level == "ticket"
    assert launch.reason.startswith(reason)


def test_a_device_that_the_toolchain_has_dropped_takes_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 13 does not compile for a V100: nobody knows whether all blocks would be resident."""
    known = cuda_toolchain.Nvcc(path=Path("nvcc"), origin="", version="13.0.88", architectures=("sm_75", "sm_80"))
    monkeypatch.setattr(cuda_toolchain, "find_nvcc", lambda: known)
    monkeypatch.setattr(cuda_nvrtc, "find_nvrtc", lambda: None)
    (launch,) = merged_graph(chain(), name="nvidia-v100", measure=compiled_use).record.regions[0].launches
    assert (launch.level, launch.registers) == ("ticket", None)
    assert launch.reason.startswith("unknown registers: nvcc 13.0.88 (nvcc) does not compile for sm_70")


SPILLS = CompiledUse(registers=255, spill_bytes=8, shared_bytes=0)


@pytest.mark.parametrize(
    ("uses", "level", "reason"),
    [
        ([SPILLS, FITS], "ticket", "its streams would spill 8 bytes a thread"),
        (
            [SPILLS, SPILLS],
            "waves",
            "its streams would spill 8 bytes a thread; with tickets it would spill 8 bytes a thread",
        ),
    ],
)
def test_what_spills_takes_the_next_level(uses: list[CompiledUse], level: str, reason: str) -> None:
    answers = iter(uses)
    graph = merged_graph(chain(), measure=lambda _func: next(answers))
    launches = graph.record.regions[0].launches
    assert {(launch.level, launch.reason) for launch in launches} == {(level, reason)}


def test_resident_streams_say_what_the_compiler_said() -> None:
    (region,) = merged("chain").record.regions
    (launch,) = region.launches
    assert launch.registers == FITS.registers
    assert "blocks are resident" in launch.reason
    assert launch.reason in str(region)


def test_what_no_schedule_runs_is_named() -> None:
    (x,) = inputs_of((4, 16))
    y = relax.Var("y", relax.TensorType((tvm.tirx.Var("n", "int64"), 16), "float32"))
    graph = merged_graph(module_of([x, y], op.nn.softmax(x), op.sum(op.exp(x), axis=[1]), op.exp(y)))
    assert [len(region.operators) for region in graph.record.regions] == [2]
    (left,) = graph.record.outside
    assert "known at run time" in left.reason


def test_a_single_operator_stays_a_launch() -> None:
    (x,) = inputs_of((7, 9))
    graph = merged_graph(module_of([x], op.nn.relu(x)))
    assert graph.kernels == {}
    assert [item.reason for item in graph.record.outside] == ["a launch by itself already"]


def test_pointers_may_meet() -> None:
    """Of memory that other blocks write, no load may be moved across a wait: nothing is ``__restrict__``."""
    graph = merged("chain")
    (func,) = graph.functions.values()
    (kernel,) = lower(func, graph.target)
    assert "tirx.noalias" not in kernel.function.attrs


def without_waits(func: PrimFunc) -> PrimFunc:
    """``func`` with a table in which no entry of its only launch waits."""
    kernel = from_json(MergedKernel, str(func.attrs[MERGED]))
    table, (launch,) = list(kernel.table), kernel.launches
    for entry in range(launch.entries):
        place = launch.blocks + 1 + ENTRY_WORDS * entry
        table[place + LAST_WAIT] = table[place + FIRST_WAIT]
    return func.with_attr(MERGED, to_json(replace(kernel, table=tuple(table))))


def test_verifying_runs_a_schedule_on_its_own_table() -> None:
    graph = merged("chain")
    (func,) = graph.functions.values()
    check = check_kernel("chain", func, None, graph.device, graph.target)
    assert check.problem == ""
    assert check.blocks_run == check.block_count > 1
    assert check_kernel("chain", without_waits(func), None, graph.device, graph.target).problem


@needs_nvcc
def test_a_build_compiles_without_spills() -> None:
    library = relay.build(chain(), "nvidia-a100", enable_rammer=True, kernel_cache="off")
    (launch,) = library.report.rammer.regions[0].launches
    assert launch.level == "static"
    assert launch.registers is not None
    assert "__noinline__ void rammer_main_0_kernel_body" in library.source()
    assert "__restrict__" not in library.source().partition("rammer_main_0_kernel(")[2].partition(")")[0]
    assert "rammer_main_0: 3 operators" in " ".join(str(library.report).split())


def test_merging_leaves_its_module_alone() -> None:
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        graph = merged_graph(chain())
    assert all(isinstance(func, PrimFunc) for func in graph.functions.values())


@pytest.mark.parametrize(
    "name", ["nvidia-a100", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nvidia-v100", "nvidia-t4"))]
)
def test_bodies_on_tensor_cores_are_right(name: str) -> None:
    x, first, second = inputs_of((64, 64), (64, 64), (64, 32), dtype="float16")
    hidden = op.nn.relu(op.matmul(x, first))
    graph = merged_graph(module_of([x, first, second], op.matmul(hidden, second), op.nn.softmax(hidden)), name=name)
    assert graph.record.outside == ()
    values = [value.astype("float16") for value in values_of(graph.mod)]
    wide = [value.astype("float64") for value in values]
    inner = np.maximum(wide[0] @ wide[1], 0)
    runs = Runs(graph)
    for actual, wanted in zip(runs(values, RANDOM[0]), (inner @ wide[2], softmax(inner)), strict=True):
        assert np.linalg.norm(actual - wanted) <= 2e-3 * np.linalg.norm(wanted)
    assert runs.findings == []
