"""Guarded memory sees what a kernel writes outside its tensors, to its inputs, or not at all."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support import guarded_memory, opencl_cpu
from tests.support.guard_workspaces import GuardWorkspaces, guard_workspaces
from tests.support.guarded_memory import (
    GUARD_BYTES,
    GuardedTensor,
    MemoryGuardError,
    build_guarded,
    call_guarded,
    patterns_of,
)
from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext._tvm import BufferStore, PrimFunc, Var, copy_module, module_pass, structural_map, tirx
from tvm_ext.ir.build_ir import PARALLEL, SERIAL, allocate, index, load, loop, sequence, store

SIZE = 5
TYPES = ("float32", "float16", "float64", "bfloat16", "int8", "uint8", "int32", "int64", "bool")


def tensor_of(dtype: str) -> Any:
    """A tensor of `SIZE` elements, also of a type that NumPy has not."""
    return GuardedTensor((SIZE,), dtype).tensor


def stores(places: list[int]) -> Any:
    """A "kernel" that writes a zero byte pattern to elements ``places`` of its last argument, wherever they lie."""

    def kernel(*tensors: Any) -> None:
        address, item = tensors[-1].data_ptr(), tvm.DataType(str(tensors[-1].dtype)).itemsize
        for place in places:
            ctypes.memset(address + place * item, 0, item)

    return kernel


@pytest.mark.parametrize("dtype", TYPES)
def test_a_kernel_that_writes_every_element_and_nothing_else_passes(dtype: str) -> None:
    out = tensor_of(dtype)
    call_guarded("k", stores(list(range(SIZE))), [tensor_of("float32"), out], [1])
    if dtype != "bfloat16":
        np.testing.assert_array_equal(out.numpy(), np.zeros(SIZE, dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("place", "side"), [(-1, "before its first"), (SIZE, "behind its last")])
@pytest.mark.parametrize("output", [True, False])
def test_one_element_outside_is_seen(dtype: str, place: int, side: str, output: bool) -> None:
    with pytest.raises(
        MemoryGuardError, match=rf"kernel k writes outside its argument 0 \({SIZE} {dtype}\): 1 .*{side}"
    ):
        call_guarded("k", stores([*range(SIZE), place]), [tensor_of(dtype)], [0] if output else [])


def test_the_distance_is_said() -> None:
    with pytest.raises(MemoryGuardError, match="behind its last one, the nearest 4 away"):
        call_guarded("k", stores([*range(SIZE), SIZE + 3]), [tensor_of("float32")], [0])


@pytest.mark.parametrize("dtype", TYPES)
def test_one_unwritten_element_is_seen(dtype: str) -> None:
    with pytest.raises(
        MemoryGuardError, match=r"leaves 1 element\(s\) of its argument 0 .* unwritten, the first at \[3\]"
    ):
        call_guarded("k", stores([0, 1, 2, 4]), [tensor_of(dtype)], [0])


def test_an_input_that_is_written_is_seen() -> None:
    ones = tvm.runtime.tensor(np.ones(SIZE, "float32"))
    with pytest.raises(MemoryGuardError, match=r"argument 0 .*which is an input"):
        call_guarded("k", stores([2]), [ones], [])


@pytest.mark.parametrize("dtype", TYPES)
def test_results_that_look_like_the_pattern_are_no_fault(dtype: str) -> None:
    out = GuardedTensor((SIZE,), dtype)

    def kernel(tensor: Any) -> None:
        pattern = np.full(SIZE, patterns_of(dtype).first, out.words.dtype)
        tensor._create_view([SIZE], str(pattern.dtype)).copyfrom(pattern)

    call_guarded("k", kernel, [out.tensor], [0])
    assert (out.words == patterns_of(dtype).first).all()


@pytest.mark.parametrize("offset", [0, 4, 60])
def test_a_copy_is_aligned_as_its_original(offset: int) -> None:
    guarded = GuardedTensor((3,), "float32", like_address=4096 + offset)
    assert guarded.tensor.data_ptr() % 64 == offset
    assert GUARD_BYTES % 64 == 0


def test_empty_tensors_and_scalars_pass() -> None:
    empty, scalar = tvm.runtime.empty((0, 4), "float32"), tvm.runtime.empty((), "int64")
    call_guarded("k", stores([]), [empty], [0])
    call_guarded("k", stores([0]), [empty, scalar], [1])


# --- workspaces ---------------------------------------------------------------------------------------------------
def through_a_workspace(places: list[int], dtype: str = "float32", kind: Any = SERIAL, read: int = 0) -> Any:
    """A kernel: each of two tasks writes elements ``places`` of a workspace of `SIZE` and copies one to the output."""
    source = tirx.decl_buffer([index(2)], dtype, "source")
    out = tirx.decl_buffer([index(2)], dtype, "out")

    def task(t: Any) -> Any:
        # The size stays what it is only while nobody can tell which part is used (CompactBufferAllocation).
        space = tirx.decl_buffer([index(SIZE)], dtype, "space", data_alignment=64)
        zero = tirx.Cast("int64", load(source, [t])) * index(0)
        writes = [store(space, load(source, [t]), [index(place) + zero]) for place in places]
        return sequence(allocate(space), *writes, store(out, load(space, [index(read) + zero]), [t]))

    body = loop(2, kind, "t", task)
    return tirx.PrimFunc([source, out], body).with_attrs({"global_symbol": "main", "s_tir": True})


def run_guarded(kernel: Any, dtype: str = "float32") -> np.ndarray[Any, Any]:
    library = tvm.compile(guard_workspaces(kernel, "k"), target="llvm")
    out = tvm.runtime.empty((2,), dtype)
    call_guarded("k", library["main"], [tvm.runtime.tensor(np.ones(2, dtype)), out], [1])
    result: np.ndarray[Any, Any] = out.numpy()
    return result


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_workspaces_that_are_used_well_pass(dtype: str) -> None:
    np.testing.assert_array_equal(run_guarded(through_a_workspace([*range(SIZE)], dtype), dtype), np.ones(2, dtype))


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", SERIAL), ("float32", PARALLEL), ("float16", SERIAL), ("int8", SERIAL)]
)
@pytest.mark.parametrize(("place", "side"), [(-1, "before"), (SIZE, "behind")])
def test_one_element_outside_a_workspace_is_seen(dtype: str, kind: Any, place: int, side: str) -> None:
    with pytest.raises(MemoryGuardError, match=f"kernel k writes {side} its workspace space"):
        run_guarded(through_a_workspace([*range(SIZE), place], dtype, kind), dtype)


def test_an_unwritten_element_of_a_workspace_is_poison() -> None:
    assert np.isnan(run_guarded(through_a_workspace([0, 1, 2, 4], read=3))).all()
    assert (run_guarded(through_a_workspace([0, 1, 2, 4], "int32", read=3), "int32") == 0x5A5A5A5A).all()


# --- whole models -------------------------------------------------------------------------------------------------
def small_model() -> Any:
    x = relax.Var("x", relax.TensorType((1, 4, 9, 9), "float32"))
    weight = relax.const(np.linspace(-1, 1, 7 * 4 * 9, dtype="float32").reshape(7, 4, 3, 3))
    y = relax.op.nn.relu(relax.op.nn.conv2d(x, weight, padding=1))
    y = relax.op.nn.softmax(relax.op.reshape(y, (7, 81)))
    return module_of([x], relax.op.matmul(y, relax.op.permute_dims(y)))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("roller", [True, False])
def test_a_guarded_build_runs_and_gives_the_same(rng: np.random.Generator, roller: bool) -> None:
    x = rng.standard_normal((1, 4, 9, 9)).astype("float32")
    plain = relay.build(small_model(), enable_roller=roller)
    guarded = build_guarded(small_model(), enable_roller=roller)
    results = [library.vm()["main"](tvm.runtime.tensor(x)).numpy() for library in (plain, guarded)]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)


def planted(where: int) -> Any:
    """A pass: stores to parameters go ``where`` elements further along the last axis than they should."""

    def moved(func: Any) -> Any:
        def shift(statement: Any) -> Any:
            if not any(statement.buffer.same_as(param) for param in func.params):
                return statement
            *outer, last = statement.indices
            return store(statement.buffer, statement.value, [*outer, last + tirx.IntImm(str(last.ty.dtype), where)])

        return func.with_body(structural_map(func.body, (BufferStore, shift)))

    @module_pass(opt_level=0, name="test.Planted")
    def plant(mod: Any, _context: Any) -> Any:
        result = copy_module(mod)
        for gv, func in mod.functions_items():
            if isinstance(func, PrimFunc):
                result[gv] = moved(func)
        return result

    return plant


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("where", "side"), [(-1, "before"), (1, "behind")])
def test_an_error_of_run_names_the_kernel_of_a_model(monkeypatch: pytest.MonkeyPatch, where: int, side: str) -> None:
    monkeypatch.setattr(
        guarded_memory, "GuardWorkspaces", lambda: tvm.transform.Sequential([planted(where), GuardWorkspaces()])
    )
    module = relay.GraphModule(build_guarded(small_model()))
    with pytest.raises(MemoryGuardError, match=f"kernel fused_conv2d_relu.* writes outside .*{side} its"):
        module.run(x=np.zeros((1, 4, 9, 9), "float32"))


# --- OpenCL -------------------------------------------------------------------------------------------------------
def doubled(where: int) -> Any:
    """A GPU kernel that writes element i + ``where`` of its result, through a workspace of global memory."""
    source, out = (tirx.decl_buffer([index(SIZE)], "float32", name) for name in ("source", "out"))
    block = tirx.IterVar(None, Var("bx", "int64"), 1, "blockIdx.x")
    thread = tirx.IterVar(None, Var("tx", "int64"), 1, "threadIdx.x")
    body = store(out, load(source, [thread.var]) * tirx.const(2.0, "float32"), [thread.var + index(where)])
    for axis, extent in ((thread, SIZE), (block, 1)):
        body = tirx.AttrStmt(axis, "thread_extent", index(extent), body)
    return tirx.PrimFunc([source, out], body).with_attrs({"global_symbol": "main", "s_tir": True})


@pytest.mark.parametrize(("where", "side"), [(-1, "before"), (1, "behind"), (0, "")])
def test_one_element_outside_an_opencl_buffer_is_seen(where: int, side: str) -> None:
    if opencl_cpu.why_not():
        pytest.skip(str(opencl_cpu.why_not()))
    ones = np.ones(SIZE, "float32")
    if side:
        with pytest.raises(MemoryGuardError, match=f"writes {side} its buffer 1"):
            opencl_cpu.run_opencl(doubled(where), [ones])
    else:
        np.testing.assert_array_equal(opencl_cpu.run_opencl(doubled(where), [ones])[0], 2 * ones)
