"""The cases of stock TVM's tests for its software pipelining, as load-and-use loops without positional annotations.

Stock TVM is told which statement belongs to which stage; here nothing is told. Where its case computes on the way into
shared memory (``B = A * 2``), which no asynchronous copy does, there is a second one with a pure copy.
Cases after apache/tvm, tests/python/s_tir/transform/test_s_tir_transform_inject_software_pipeline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tvm_ext._tvm import Expr, For, PrimFunc, Stmt, Var, mma_schedule, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import allocate, index, load, sequence, store
from tvm_ext.ir.simt_ir import bind, gpu_buffer
from tvm_ext.support.arrays import Array

from ..simt.good_kernels import argument, primitive_function
from .kernels import A100, PipeliningKernel, product_reference, serial_loop
from .schedules import half_product, stock_intrinsics

LANES = 16
"""Threads, the rows of all tensors."""
FIRST = [index(0)]


def _number(value: float) -> Expr:
    return tirx.const(value, "float32")


def _shared(name: str, *shape: int) -> Any:
    return gpu_buffer((LANES, *shape), "float32", name, "shared")


def _threads(params: Sequence[Any], body: Callable[[Expr], Stmt]) -> Any:
    return primitive_function(list(params), bind("threadIdx.x", LANES, body))


def _simple(columns: int | Expr = LANES, *, arithmetic: bool, annotated: bool = False) -> Any:
    """``C = A * 2 + 1`` by way of a shared element of each thread."""
    shape = [index(LANES), columns if isinstance(columns, Var) else index(columns)]
    a, c = (tirx.decl_buffer(shape, "float32", name) for name in "AC")
    b = _shared("B", 1)
    two = _number(2)

    def kernel(tx: Expr) -> Stmt:
        def step(i: Expr) -> Stmt:
            at = [tx, index(0)]
            value = load(a, [tx, i])
            loaded = store(b, value * two if arithmetic else value, at)
            used = load(b, at) if arithmetic else load(b, at) * two
            return sequence(allocate(b), loaded, store(c, used + _number(1), [tx, i]))

        made = serial_loop(columns, "i", step)
        if not annotated:
            return made
        hint = {"pragma_loop_partition_hint": tirx.IntImm("int32", 1)}
        return For(made.loop_var, made.min, made.extent, made.kind, made.body, None, hint)

    return _threads([a, c], kernel)


def _simple_reference(a: Array) -> Array:
    return 2 * a.astype(np.float64) + 1


def symbolic_compute() -> tuple[Any, Any]:
    """(``C = A * 2 + 1`` for tensors of 16 x k, the variable k): the trip count is known at launch."""
    k = Var("k", "int64")
    return _simple(k, arithmetic=False), k


def specialised(function: Any, variable: Any, value: int) -> Any:
    """``function`` for one value of the variable in its shapes."""

    def fixed(param: Any) -> Any:
        shape = [index(value) if size.same_as(variable) else size for size in param.ty.shape]
        return tirx.decl_buffer(shape, dtype_of(param), str(param.name))

    return PrimFunc.specialize(function, {param: fixed(param) for param in function.params})


def _three_stages(*, arithmetic: bool) -> Any:
    """Two buffers of shared memory, the second made of the first."""
    a, d = argument("A", LANES, LANES), argument("D", LANES, LANES)
    b, c = _shared("B", 1), _shared("C", 1)

    def kernel(tx: Expr) -> Stmt:
        at = [tx, index(0)]

        def step(i: Expr) -> Stmt:
            first, second = load(a, [tx, i]), load(b, at)
            if arithmetic:
                first, second = first * _number(2), second + _number(2)
            return sequence(
                allocate(b), allocate(c), store(b, first, at), store(c, second, at),
                store(d, load(c, at) + _number(1), [tx, i]),
            )  # fmt: skip

        return serial_loop(LANES, "i", step)

    return _threads([a, d], kernel)


def _dag(*, arithmetic: bool) -> Any:
    """Two chains from global to shared memory to registers, and their product."""
    a, b, c = (argument(name, LANES, LANES) for name in "ABC")
    shared = [_shared(f"{name}S", 1) for name in "AB"]
    local = [gpu_buffer((1,), "float32", f"{name}L", "local") for name in "AB"]

    def kernel(tx: Expr) -> Stmt:
        at = [tx, index(0)]

        def step(i: Expr) -> Stmt:
            values = [load(tensor, [tx, i]) for tensor in (a, b)]
            if arithmetic:
                values = [values[0] * _number(2), values[1] + _number(2)]
            chains = [
                [store(tile, value, at), store(registers, load(tile, at), FIRST)]
                for tile, registers, value in zip(shared, local, values, strict=True)
            ]
            product = load(local[0], FIRST) * load(local[1], FIRST)
            return sequence(*map(allocate, (*shared, *local)), *chains[0], *chains[1], store(c, product, [tx, i]))

        return serial_loop(LANES, "i", step)

    return _threads([a, b, c], kernel)


def _two_producers() -> Any:
    """``C = A + B`` by way of two shared buffers."""
    a, b, c = (argument(name, LANES, LANES) for name in "ABC")
    tiles = [_shared(f"{name}_shared", 1) for name in "AB"]

    def kernel(tx: Expr) -> Stmt:
        at = [tx, index(0)]

        def step(i: Expr) -> Stmt:
            copies = [store(tile, load(tensor, [tx, i]), at) for tile, tensor in zip(tiles, (a, b), strict=True)]
            return sequence(*map(allocate, tiles), *copies, store(c, load(tiles[0], at) + load(tiles[1], at), [tx, i]))

        return serial_loop(LANES, "i", step)

    return _threads([a, b, c], kernel)


def _nested(*, inner_scope: str, arithmetic: bool, through_registers: bool = False) -> Any:
    """``C = A * 2 + 1`` of 16 x 16 x 16: rows to shared memory, then element after element through another buffer.

    ``inner_scope`` is that buffer's; ``through_registers`` puts the whole row into registers in between.
    """
    a, c = argument("A", LANES, LANES, LANES), argument("C", LANES, LANES, LANES)
    row = _shared("A_shared", LANES)
    own = gpu_buffer((LANES,), "float32", "A_local", "local")
    b = _shared("B", 1) if inner_scope == "shared" else gpu_buffer((1, 1), "float32", "B", "local")

    def kernel(tx: Expr) -> Stmt:
        at = [tx if inner_scope == "shared" else index(0), index(0)]

        def element(i: Expr, j: Expr) -> Stmt:
            value = load(own, [j]) if through_registers else load(row, [tx, j])
            made = store(b, value * _number(2) if arithmetic else value, at)
            used = load(b, at) if arithmetic else load(b, at) * _number(2)
            return sequence(allocate(b), made, store(c, used + _number(1), [tx, i, j]))

        def step(i: Expr) -> Stmt:
            parts = [allocate(row), serial_loop(LANES, "j", lambda j: store(row, load(a, [tx, i, j]), [tx, j]))]
            if through_registers:
                parts += [allocate(own), serial_loop(LANES, "j", lambda j: store(own, load(row, [tx, j]), [j]))]
            return sequence(*parts, serial_loop(LANES, "j", lambda j: element(i, j)))

        return serial_loop(LANES, "i", step)

    return _threads([a, c], kernel)


def _less_loop_than_stages(*, arithmetic: bool) -> Any:
    """Two iterations of a chain of three shared buffers."""
    a, e = argument("A", LANES, 2), argument("E", LANES, 2)
    tiles = [_shared(name, 1) for name in "BCD"]

    def kernel(tx: Expr) -> Stmt:
        at = [tx, index(0)]

        def step(i: Expr) -> Stmt:
            values = [load(a, [tx, i]), load(tiles[0], at), load(tiles[1], at)]
            if arithmetic:
                values = [values[0] * _number(2), values[1] + _number(3), values[2] + _number(4)]
            chain = [store(tile, value, at) for tile, value in zip(tiles, values, strict=True)]
            return sequence(*map(allocate, tiles), *chain, store(e, load(tiles[2], at) + _number(5), [tx, i]))

        return serial_loop(2, "i", step)

    return _threads([a, e], kernel)


def _mma_schedule() -> Any:
    """The tensor-core schedule of stock TVM's tests for 64 x 64 x 160, without its pipeline."""
    with stock_intrinsics() as cuda:

        def layout(i: Any, j: Any) -> tuple[Any, ...]:
            return (i // 16, j // 16, *cuda.shared_16x16_to_ldmatrix_32x8_layout(i % 16, j % 16))

        names = (
            cuda.LDMATRIX_f16_A_DYN_INTRIN, cuda.LDMATRIX_f16_B_DYN_INTRIN, cuda.MMA_f16f16f32_INTRIN,
            cuda.MMA_fill_16x16_f32_INTRIN, cuda.MMA_store_16x16_f32_global_INTRIN,
        )  # fmt: skip
        factors = ([1, 2, 1, 1, 2], [1, 1, 2, 1, 2], [5, 2, 1])
        schedule = mma_schedule(
            half_product(64, 64, 160), 16, "float16", False, *factors, layout, layout, layout, *names, "shared.dyn"
        )
        return schedule.mod["main"]


def stock_cases() -> tuple[PipeliningKernel, ...]:
    """All of them. Which buffers are pipelined is stated where ALCOP's rules leave no choice."""
    simple = _simple_reference

    def wide(a: Array) -> Array:
        return a.astype(np.float64)

    def case(name: str, make: Callable[[], Any], reference: Callable[..., Array], **rest: Any) -> PipeliningKernel:
        return PipeliningKernel(name=f"stock_{name}", make=make, reference=reference, **rest)

    return (
        case("trivial", partial(_simple, 1, arithmetic=True), simple),
        case("trivial_copy", partial(_simple, 1, arithmetic=False), simple),
        case("simple_compute", partial(_simple, arithmetic=True), simple, shared=("B",)),
        case("simple_copy", partial(_simple, arithmetic=False), simple, shared=("B",)),
        case(
            "simple_copy_with_other_annotation", partial(_simple, arithmetic=False, annotated=True), simple,
            shared=("B",),
        ),
        case("three_stages", partial(_three_stages, arithmetic=True), lambda a: 2 * wide(a) + 3),
        case(
            "three_stages_of_copies", partial(_three_stages, arithmetic=False), lambda a: wide(a) + 1, shared=("B",),
            refused={"C": None},
        ),
        case(
            "dag", partial(_dag, arithmetic=True), lambda a, b: 2 * wide(a) * (wide(b) + 2)
        ),
        case(
            "dag_of_copies", partial(_dag, arithmetic=False), lambda a, b: wide(a) * wide(b), shared=("AS", "BS")
        ),
        case("two_producers", _two_producers, lambda a, b: wide(a) + wide(b), shared=("A_shared", "B_shared")),
        case(
            "nested", partial(_nested, inner_scope="shared", arithmetic=True), simple, shared=("A_shared",),
            refused={"B": None},
        ),
        case(
            "nested_copies_to_registers", partial(_nested, inner_scope="local", arithmetic=False), simple,
            shared=("A_shared",), registers=("B",),
        ),
        case(
            "nested_through_registers",
            partial(_nested, inner_scope="shared", arithmetic=True, through_registers=True), simple,
            shared=("A_shared",), refused={"B": None},
        ),
        case(
            "nested_registers_twice",
            partial(_nested, inner_scope="local", arithmetic=False, through_registers=True), simple,
            shared=("A_shared",),
        ),
        case(
            "less_loop_than_stages", partial(_less_loop_than_stages, arithmetic=True), lambda a: 2 * wide(a) + 12,
        ),
        case(
            "less_loop_than_stages_of_copies", partial(_less_loop_than_stages, arithmetic=False),
            lambda a: wide(a) + 5,
        ),
        case(
            "mma_gemm", _mma_schedule, product_reference, devices=(A100,),
            shared=("A_shared.dyn", "B_shared.dyn"), registers=("A_shared.dyn_warp", "B_shared.dyn_warp"),
        ),
    )  # fmt: skip
