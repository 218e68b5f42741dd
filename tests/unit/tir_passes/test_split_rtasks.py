"""Kernels fall into steps of rTasks that compute the same, in any order of a step's iterations, or say why not."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T  # noqa: N812 - the name that TVMScript is written with

from tests.support.rtask_runs import RKernel, aligned, compile_rkernels, rkernels_of
from tests.unit.kernels import cpu, from_te, legalised
from tvm_ext._tvm import IRModule, PrimFunc
from tvm_ext.options import BuildOptions
from tvm_ext.records.rtask_split import RKERNEL, RTASKS, RTaskSplit
from tvm_ext.records.serialise import from_json
from tvm_ext.support.arrays import Array
from tvm_ext.support.kernel_cache import SEALED
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.emit.schedule_fallback import schedule_fallback
from tvm_ext.tir_passes.split_rtasks import SplitRTasks


def split(*functions: PrimFunc) -> tuple[list[RTaskSplit], IRModule]:
    """The splits of ``functions``, and the module that the pass gives."""
    before = IRModule({f"k{number}": func.without_attr("global_symbol") for number, func in enumerate(functions)})
    after = SplitRTasks(cpu())(before)
    texts = [after[f"k{number}"].attrs[RTASKS] for number in range(len(functions))]
    return [from_json(RTaskSplit, str(text)) for text in texts], after


def compiled(mod: IRModule) -> dict[str, RKernel]:
    return compile_rkernels(rkernels_of(mod), tvm.target.Target("llvm"))


def run_steps(plan: RTaskSplit, kernels: dict[str, RKernel], tensors: list[Array], seed: int) -> None:
    """Run the steps in order, the iterations of each in chunks whose order and sizes are drawn."""
    drawn = random.Random(seed)
    buffers = [*tensors, *(aligned(size) for size in plan.workspaces)]
    for step in plan.steps:
        cuts = sorted({0, step.iterations, *(drawn.randrange(step.iterations) for _ in range(3))})
        chunks = list(pairwise(cuts))
        drawn.shuffle(chunks)
        for begin, end in chunks:
            kernels[step.kernel](*(int(buffers[place].ctypes.data) for place in step.buffers), begin, end)


@T.prim_func(s_tir=True)
def three_steps(a: T.Buffer((24,), "float32", align=4), b: T.Buffer((24,), "float32", align=4)):
    T.func_attr({"tirx.noalias": True})
    space = T.alloc_buffer((24,))
    total = T.alloc_buffer((1,))
    for i in T.parallel(24):
        space[i] = a[i] * T.float32(2)
    total[0] = T.float32(0)
    for i in T.serial(24):
        total[0] = total[0] + space[i]
    for i in T.parallel(8):
        for j in T.parallel(3):
            b[i * 3 + j] = space[i * 3 + j] + total[0]


def test_steps_of_a_kernel_and_what_passes_between_them() -> None:
    (plan,), mod = split(three_steps)
    assert [(step.iterations, step.reads, step.writes) for step in plan.steps] == [
        (24, (0,), (2,)),
        (1, (2, 3), (3,)),
        (8, (2, 3), (1,)),
    ]
    assert plan.workspaces == (96, 4)
    a, b = aligned(96).view("float32"), aligned(96).view("float32")
    a[:] = np.arange(24)
    kernels = compiled(mod)
    for seed in range(3):
        b[:] = np.nan
        run_steps(plan, kernels, [a, b], seed)
        np.testing.assert_array_equal(b, 2 * a + 2 * a.sum())


@T.prim_func(s_tir=True)
def one_task(a: T.Buffer((8,), "float32", align=4), b: T.Buffer((8,), "float32", align=4)):
    T.func_attr({"tirx.noalias": True})
    total = T.alloc_buffer((1,))
    total[0] = T.float32(0)
    for i in T.serial(8):
        total[0] = total[0] + a[i]
    for i in T.serial(8):
        b[i] = total[0]


def test_what_follows_each_other_on_one_core_is_one_task_with_its_stack() -> None:
    (plan,), mod = split(one_task)
    assert [(step.iterations, step.buffers) for step in plan.steps] == [(1, (0, 1))]
    assert plan.workspaces == ()
    a, b = aligned(32).view("float32"), aligned(32).view("float32")
    a[:] = 1
    run_steps(plan, compiled(mod), [a, b], 0)
    np.testing.assert_array_equal(b, 8)


def test_equal_steps_share_their_code() -> None:
    plans, mod = split(three_steps, three_steps, one_task)
    assert [step.kernel for step in plans[0].steps] == [step.kernel for step in plans[1].steps]
    assert len(rkernels_of(mod)) == 4


@pytest.mark.usefixtures("immutable_modules")
def test_functions_stay_callable_and_their_module_as_it_was() -> None:
    before = IRModule({"k": three_steps})
    after = SplitRTasks(cpu())(before)
    assert list(before.functions) != list(after.functions)
    assert after["k"].body.same_as(three_steps.body)


@T.prim_func(s_tir=True)
def asserts(a: T.Buffer((8,), "int32", align=4), b: T.Buffer((8,), "int32", align=4)):
    for i in T.serial(8):
        assert a[i] < 5, ("ValueError", ["out of range"])
        b[i] = a[i]


@T.prim_func(s_tir=True)
def extern(a: T.Buffer((8,), "float32", align=4), b: T.Buffer((8,), "float32", align=4)):
    T.evaluate(T.call_extern("int32", "sort", a.data, b.data))


@T.prim_func(s_tir=True)
def packed(a: T.Buffer((8,), "float32", align=4), b: T.Buffer((8,), "float32", align=4)):
    T.evaluate(T.call_packed("library", a.data, b.data))


@T.prim_func(s_tir=True)
def repeats(a: T.Buffer((8,), "int32", align=4), b: T.Buffer((8,), "int32", align=4)):
    b[0] = 0
    while b[0] < a[0]:
        b[0] = b[0] + 1


@T.prim_func(s_tir=True)
def dynamic(a: T.handle, b: T.handle):
    n = T.int64()
    first = T.match_buffer(a, (n,))
    second = T.match_buffer(b, (n,))
    for i in T.serial(n):
        second[i] = first[i]


@T.prim_func(s_tir=True)
def empty(a: T.Buffer((0,), "float32", align=4), b: T.Buffer((8,), "float32", align=4)):
    for i in T.serial(8):
        b[i] = T.float32(0)


@pytest.mark.parametrize(
    ("func", "reason"),
    [
        (asserts, "checks values at run time"),
        (extern, "call_extern"),
        (packed, "call_packed"),
        (repeats, "until a condition"),
        (dynamic, "only known at run time"),
        (empty, "no elements"),
        (three_steps.with_attr(SEALED, True), "kernel cache"),
    ],
    ids=["asserts", "extern", "packed", "repeats", "dynamic", "empty", "sealed"],
)
def test_what_may_not_run_in_pieces_says_why(func: PrimFunc, reason: str) -> None:
    (plan,), _ = split(func)
    assert not plan.steps
    assert reason in plan.refusal


def relu_of_product(x: Any, y: Any, z: Any) -> Any:
    return relax.op.nn.relu(relax.op.add(relax.op.matmul(x, y), z))


def scan(shape: tuple[int, ...]) -> PrimFunc:
    x = tvm.te.placeholder(shape, name="x")
    return from_te(x, tvm.topi.cumsum(x, axis=1))


KERNELS: dict[str, tuple[Any, ...]] = {
    "scan": (None, (40, 33)),  # stock TVM's: its tensors begin at a variable's element
    "product": (relu_of_product, (33, 70), (70, 51), (51,)),
    "softmax": (relax.op.nn.softmax, (17, 40)),
    "convolution": (lambda x, y: relax.op.nn.conv2d(x, y, padding=1), (1, 5, 13, 13), (12, 5, 3, 3)),
    "pooling": (lambda x: relax.op.nn.max_pool2d(x, (3, 3), (2, 2), 1), (1, 20, 15, 15)),
    "mean": (lambda x: relax.op.mean(x, axis=[1]), (40, 33)),
    "fallback": (relax.op.nn.softmax, (9, 20)),
}


def at_odd_element(array: Array) -> Array:
    """As an argument of a graph may lie."""
    room = aligned(array.nbytes + array.itemsize)[array.itemsize :].view(array.dtype).reshape(array.shape)
    room[...] = array
    return room


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", KERNELS)
def test_constructed_kernels_compute_the_same_in_pieces(name: str) -> None:
    """Bit by bit: an rTask does what the kernel does, whoever runs it, when, and wherever its inputs begin."""
    build, *shapes = KERNELS[name]
    device = replace(cpu(), launch_overhead_us=0.001)  # divided even where it is small
    func = scan(*shapes) if build is None else legalised(build, *shapes)
    kernel = construct_kernel(func, name, device, BuildOptions())
    if name == "fallback":
        kernel, _ = schedule_fallback(func)  # it has blocks
    (plan,), mod = split(kernel)
    assert plan.steps, plan.refusal
    generator = np.random.default_rng(3)
    inputs = [at_odd_element(generator.standard_normal(shape).astype("float32")) for shape in shapes]
    result = [int(size) for size in kernel.params[-1].ty.shape]
    whole = np.full(result, np.nan, "float32")
    pieces = aligned(whole.nbytes).view("float32").reshape(result)
    tensors = [tvm.runtime.tensor(item) for item in (*inputs, whole)]
    tvm.tirx.build(kernel.with_attr("global_symbol", "main"), target="llvm")["main"](*tensors)
    run_steps(plan, compiled(mod), [*inputs, pieces], seed=1)
    np.testing.assert_array_equal(pieces, tensors[-1].numpy())
    assert any(step.iterations > 1 for step in plan.steps)
    assert all(func.attrs[RKERNEL] for func in rkernels_of(mod).values())
