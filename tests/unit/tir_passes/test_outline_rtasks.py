"""Functions of a merged kernel's bodies: put back into the kernel, they are what it was; alike ones are one."""

from __future__ import annotations

import re

import pytest
from tvm.script import tirx as T  # noqa: N812

from benchmarks.networks import models
from tests.support.merged_runs import MergedGraph, merged_graph
from tests.support.small_modules import inputs_of, module_of
from tests.unit.compilers import needs_nvcc
from tests.unit.tir_passes.test_merge_rtasks import chain
from tvm_ext import relay
from tvm_ext._tvm import (
    Call,
    DeclBuffer,
    Expr,
    IRModule,
    PrimFunc,
    Stmt,
    assert_structural_equal,
    relax,
    structural_map,
    structural_mutate,
    structural_walk,
    tirx,
)
from tvm_ext.analysis.computations import substitute
from tvm_ext.analysis.device_code import called_name, pointer_variable
from tvm_ext.analysis.launches import lower
from tvm_ext.ir.build_ir import rename_apart, sequence
from tvm_ext.records.merged import BODY_SCOPE
from tvm_ext.tir_passes.outline_rtasks import OutlineRTasks, zeroed
from tvm_ext.toolchains.cuda_check import _source

op = relax.op


def kernel_of(graph: MergedGraph) -> PrimFunc:
    (func,) = graph.functions.values()
    (kernel,) = lower(func, graph.target)
    return kernel.function


def outlined(kernel: PrimFunc) -> tuple[PrimFunc, dict[str, PrimFunc]]:
    """The kernel that calls functions, and those by name."""
    mod = OutlineRTasks()(IRModule({"kernel": kernel}))
    functions = {gv.name_hint: func for gv, func in mod.functions_items()}
    return functions.pop("kernel"), functions


def put_back(kernel: PrimFunc, functions: dict[str, PrimFunc]) -> Stmt:
    """The kernel's body with each call replaced by what the function does with the call's arguments."""

    def inlined(node: Stmt) -> Stmt:
        name = called_name(node.value) if isinstance(node.value, Call) else ""
        if name not in functions:
            return node
        func = functions[name]
        given = dict(zip(map(hash, func.params), node.value.args[1:-1], strict=True))
        table: list[tuple[Expr, Expr]] = [(item, given[hash(item)]) for item in func.params]
        rest = []
        for part in func.body.seq:
            if isinstance(part, DeclBuffer) and hash(part.data) in given:
                table.append((part.buffer, pointer_variable(given[hash(part.data)])))
            elif not says_something(part):
                rest.append(part)
        return substitute(sequence(*rest), table)

    return structural_map(kernel.body, (tirx.Evaluate, inlined))


def says_something(part: Stmt) -> bool:
    """Whether a function of `tir_passes.outline_rtasks` speaks of threads and memory."""
    value = getattr(part, "value", None)
    return isinstance(value, Call) and called_name(value).startswith(("tvm_ext_is_", "tvm_ext_thread"))


def with_zeros(body: Stmt) -> Stmt:
    """What is to be found: the kernel's body, in which arrays of single threads begin as zeros."""
    return structural_mutate(
        body,
        (
            tirx.AttrStmt,
            lambda node, mutator: zeroed(node.body) if node.attr_key == BODY_SCOPE else mutator.default_mutate(node),
        ),
    )


def flat(body: Stmt) -> Stmt:
    """``body`` without sequences in sequences."""
    return structural_mutate(
        body, (tirx.SeqStmt, lambda node, mutator: sequence(*(mutator.mutate(part) for part in node.seq)))
    )


def twins() -> IRModule:
    """Two products of one shape, whose weights are different inputs, and a sum of both."""
    x, first, second = inputs_of((8, 16), (16, 16), (16, 16))
    left, right = op.matmul(x, first), op.matmul(x, second)
    return module_of([x, first, second], op.nn.softmax(left), op.nn.softmax(right))


@pytest.mark.parametrize("build", [chain, twins])
def test_functions_put_back_are_the_kernel(build: object) -> None:
    kernel = kernel_of(merged_graph(build()))  # type: ignore[operator]
    caller, functions = outlined(kernel)
    assert len(functions) > 1
    found, wanted = put_back(caller, functions), with_zeros(kernel.body)
    assert_structural_equal(*(rename_apart(kernel.with_body(flat(body))) for body in (found, wanted)))


def test_operators_of_other_tensors_share_a_function() -> None:
    graph = merged_graph(twins())
    (region,) = graph.record.regions
    (launch,) = region.launches
    caller, functions = outlined(kernel_of(graph))
    calls: list[str] = []
    structural_walk(caller.body, (Call, lambda call: calls.append(called_name(call))))
    products = [name for name in calls if name in functions]
    assert len(products) == launch.bodies > len(functions)


def test_a_kernel_without_bodies_stays_as_it_is() -> None:
    @T.prim_func(s_tir=True)
    def plain(a: T.Buffer((4,), "float32")) -> None:
        a[0] = T.float32(1)

    mod = IRModule({"plain": plain})
    assert_structural_equal(OutlineRTasks()(mod), mod)


def test_arrays_outside_of_loops_begin_as_zeros() -> None:
    @T.prim_func(s_tir=True)
    def some_write(a: T.Buffer((4,), "float32"), t: T.int32) -> None:
        own = T.alloc_buffer((4,), "float32", scope="local")
        if t < 2:
            own[0] = T.float32(1)
        for _ in range(3):
            inner = T.alloc_buffer((2,), "float32", scope="local")
            inner[0] = a[0]
            own[0] = own[0] + inner[0]
        a[t] = own[0]

    found: list[Stmt] = []
    structural_walk(zeroed(some_write.body), (tirx.For, found.append))
    zeros = [loop for loop in found if isinstance(loop.body, tirx.BufferStore)]
    assert [(str(loop.body.buffer.name), int(loop.extent)) for loop in zeros] == [("own", 4)]


def test_each_function_is_declared_not_to_be_inlined() -> None:
    graph = merged_graph(chain())
    (func,) = graph.functions.values()
    with graph.target:
        source = _source(func, graph.target)
    defined = set(re.findall(r'extern "C" __device__ void (\w+_body\d+)\(', source))
    declared = set(re.findall(r'extern "C" __device__ __noinline__ void (\w+_body\d+)\(', source))
    assert defined and defined == declared
    assert "__restrict__" not in source


@needs_nvcc
@pytest.mark.slow
def test_a_cell_takes_about_the_registers_of_its_largest_body() -> None:
    """Its five products take 75 to 80 registers alone; in one function they took 254."""
    mod, params = relay.frontend.from_onnx(models.build_model("nasbench_0"))
    library = relay.build(mod, "nvidia-a100", params=params, enable_rammer=True, kernel_cache="off")
    (launch,) = library.report.rammer.regions[0].launches
    assert launch.level == "static"
    assert launch.registers is not None and launch.registers <= 128
