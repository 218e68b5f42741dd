"""Scheduled kernels for tensor cores to be pipelined: a user's schedule, a stock rule's, and MetaSchedule's."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from tvm.script import from_source

from tests.support.quick_imports import leave_out_source_lines
from tvm_ext._tvm import IRModule, Schedule, Target, gpu_schedule_rules, s_tir, te

from .kernels import A100, H200, T4, V100, PipeliningKernel, product_reference

TRACES = Path(__file__).with_name("metaschedule")
"""What MetaSchedule's rules for tensor cores made of a product of halves, 128 x 160 by 160 x 128, one module a file.

The sketches of ``sch_rules="cuda-tensorcore"`` for a target of ``sm_80`` with their sampled tiles, behind its
postprocessors, as TVMScript. Making one anew takes 40 s; reading one takes a fraction of a second.
"""


@contextmanager
def stock_intrinsics(kind: str = "cuda") -> Iterator[Any]:
    """Stock TVM's tensor intrinsics for one kind of processor, registered, as its module: without those for all others.

    Importing the whole package takes longer. Afterwards it may be imported as usual.
    """
    name = "tvm.s_tir.tensor_intrin"
    if name in sys.modules:
        yield importlib.import_module(f"{name}.{kind}")
        return
    package = types.ModuleType(name)
    package.__path__ = [str(Path(s_tir.__path__[0]) / "tensor_intrin")]
    sys.modules[name] = package
    try:
        leave_out_source_lines()
        yield importlib.import_module(f"{name}.{kind}")
    finally:
        sys.modules.pop(name, None)


def half_product(m: int, n: int, k: int, *, transposed: bool = False) -> Any:
    """``C = A @ B`` of float16, summed to float32, unscheduled; ``A @ B.T`` where ``transposed``."""
    a, b = te.placeholder((m, k), "float16", "A"), te.placeholder((n, k) if transposed else (k, n), "float16", "B")
    axis = te.reduce_axis((0, k), "k")

    def element(i: Any, j: Any) -> Any:
        right = b[j, axis] if transposed else b[axis, j]
        return te.sum(a[i, axis].astype("float32") * right.astype("float32"), axis=axis)

    return te.create_prim_func([a, b, te.compute((m, n), element, "C")])


def tensor_core_matmul(
    m: int, n: int, k: int, *, tile: tuple[int, int, int] = (128, 128, 32), warps: tuple[int, int] = (2, 2),
    scope: str = "shared.dyn", annotate: Callable[[Any, Any, Any], None] | None = None,
) -> Any:  # fmt: skip
    """A hand-written schedule with mma.m16n8k16 and ldmatrix: shared tiles, fragments of 16 reduction steps.

    ``tile`` is a block's rows, columns and reduction step, ``warps`` how many share its rows and columns. ``annotate``
    gets the schedule and the two reduction loops: the places of stock TVM's own pipelining.
    """
    with stock_intrinsics() as cuda:
        s = Schedule(half_product(m, n, k))
        block = s.get_sblock("C")
        (i, it), (j, jt), (ko, kt) = (s.split(axis, [None, 16]) for axis in s.get_loops(block))
        s.reorder(i, j, ko, it, jt, kt)
        tiles = s.blockize(it)
        by, wy, ii = s.split(i, [None, warps[0], tile[0] // 16 // warps[0]])
        bx, wx, jj = s.split(j, [None, warps[1], tile[1] // 16 // warps[1]])
        outer, inner = s.split(ko, [None, tile[2] // 16])
        s.reorder(by, bx, wy, wx, outer, inner, ii, jj)
        s.bind(by, "blockIdx.y")
        s.bind(bx, "blockIdx.x")
        warp = s.fuse(wy, wx)
        s.bind(warp, "threadIdx.y")
        for operand in (0, 1):
            _load_tile(s, s.cache_read(tiles, operand, scope), outer, warps[0] * warps[1])
        _tensorize(s, cuda, block, tiles, (warp, outer, inner), "_dyn" if scope == "shared.dyn" else "")
        if annotate is not None:
            annotate(s, outer, inner)
        return s.mod["main"]


def _load_tile(s: Any, copy: Any, outer: Any, warps: int) -> None:
    s.compute_at(copy, outer)
    _, warp, lane, vector = s.split(s.fuse(*s.get_loops(copy)[-2:]), [None, warps, 32, 8])
    s.bind(warp, "threadIdx.y")
    s.bind(lane, "threadIdx.x")
    s.vectorize(vector)
    s.storage_align(copy, 0, axis=-2, factor=32, offset=8)


def _tensorize(s: Any, cuda: Any, block: Any, tiles: Any, loops: tuple[Any, Any, Any], suffix: str) -> None:
    """Fragments in "warp" memory, loaded by ldmatrix, and the product by mma."""
    warp, outer, inner = loops
    fragments = [s.cache_read(tiles, operand, "warp") for operand in (0, 1)]
    for fragment in fragments:
        s.compute_at(fragment, inner)
    sums = s.cache_write(tiles, 0, "warp")
    s.reverse_compute_at(sums, warp)
    first = s.decompose_reduction(tiles, outer)

    def to_lanes(i: Any, j: Any) -> tuple[Any, ...]:
        return (i // 16, j // 16, *cuda.shared_16x16_to_ldmatrix_32x8_layout(i % 16, j % 16))

    names = (f"mma_ldmatrix_f16_a{suffix}", f"mma_ldmatrix_f16_b{suffix}", "mma_store_16x16_f32_global_")
    for stage, name, access in zip((*fragments, sums), names, ("write", "write", "read"), strict=True):
        x, y = s.get_loops(stage)[-2:]
        (x0, x1), (y0, y1) = s.split(x, [None, 16]), s.split(y, [None, 16])
        s.reorder(x0, y0, x1, y1)
        s.transform_layout(stage, (access, 0), to_lanes)
        s.tensorize(x1 if stage is not sums else s.get_loops(stage)[-2], name)
    s.tensorize(s.get_loops(block)[-3], "mma_f16f16f32")
    s.tensorize(s.get_loops(s.get_child_blocks(first)[0])[-2], "mma_fill_16x16_f32")


def stock_three_by_two(s: Any, outer: Any, inner: Any) -> None:
    """Stock TVM's annotations for three stages of shared memory and two of registers.

    ``outer``'s children, once the inner pipeline is rewritten, are: A and B to shared memory, the inner prologue, body
    and epilogue.
    """
    s.annotate(outer, "software_pipeline_stage", [0, 0, 1, 2, 2])
    s.annotate(outer, "software_pipeline_order", [0, 1, 3, 2, 4])
    s.annotate(outer, "software_pipeline_async_stages", [0])
    s.annotate(inner, "software_pipeline_stage", [0, 0, 1])
    s.annotate(inner, "software_pipeline_order", [0, 1, 2])


def stock_three_stages(s: Any, outer: Any, _inner: Any) -> None:
    """Stock TVM's annotations for three stages of shared memory."""
    s.annotate(outer, "software_pipeline_stage", [0, 0, 2])
    s.annotate(outer, "software_pipeline_order", [0, 1, 2])
    s.annotate(outer, "software_pipeline_async_stages", [0])


def stages_by_hand(shared: int, registers: int) -> Callable[[Any, Any, Any], None]:
    """A user's hints on the blocks that read into shared memory and into fragments."""

    def annotate(s: Any, _outer: Any, _inner: Any) -> None:
        for operand in "AB":
            for block, stages in ((f"{operand}_shared.dyn", shared), (f"{operand}_shared.dyn_warp_o", registers)):
                s.annotate(s.get_sblock(block), "tvm_ext.pipeline_stages", stages)

    return annotate


def dlight_matmul(m: int, n: int, k: int, *, transposed: bool = False) -> Any:
    """Stock TVM's default schedule of a product of halves on an A100: wmma, A and B.T staged in shared memory."""
    with stock_intrinsics(), Target({"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024}) as target:
        for rule in gpu_schedule_rules():
            found = rule.apply(half_product(m, n, k, transposed=transposed), target, False)
            if found is not None:
                return (found[0] if isinstance(found, list) else found).mod["main"]
    raise AssertionError("stock TVM has a rule for every product")


@cache
def metaschedule_matmul(name: str) -> Any:
    """A schedule of `TRACES`: 128 x 160 by 160 x 128, float16."""
    module: IRModule = from_source((TRACES / f"{name}.txt").read_text(encoding="utf-8"))
    return module["main"].with_attr("global_symbol", "main")


SHARED = ("A_shared.dyn", "B_shared.dyn")
WARP = ("A_shared.dyn_warp", "B_shared.dyn_warp")


def schedule_kernels() -> tuple[PipeliningKernel, ...]:
    """All kernels of this file, in sizes that the interpreter runs in a second or two."""
    small = partial(tensor_core_matmul, 64, 64, 160, tile=(64, 64, 32))
    one_warp = partial(tensor_core_matmul, 32, 32, 160, tile=(32, 32, 32), warps=(1, 1))
    return (
        PipeliningKernel(
            name="tensor_core_matmul", make=small, reference=product_reference, devices=(A100, H200), shared=SHARED,
            registers=WARP,
        ),
        PipeliningKernel(
            name="tensor_core_matmul_two_steps", reference=product_reference, devices=(A100,), shared=SHARED,
            registers=WARP, make=partial(tensor_core_matmul, 32, 32, 64, tile=(32, 32, 32), warps=(1, 2)),
        ),
        PipeliningKernel(
            name="tensor_core_matmul_long_steps", reference=product_reference, devices=(A100,), shared=SHARED,
            registers=WARP, make=partial(tensor_core_matmul, 32, 32, 192, tile=(32, 32, 64), warps=(2, 1)),
        ),
        PipeliningKernel(
            name="tensor_core_matmul_by_hand", reference=product_reference, devices=(A100,), shared=SHARED,
            registers=WARP,
            make=partial(one_warp, annotate=stages_by_hand(4, 2)),
        ),
        PipeliningKernel(
            name="tensor_core_matmul_of_stock", reference=product_reference, devices=(A100,),
            make=partial(one_warp, annotate=stock_three_by_two),
            refused=dict.fromkeys(SHARED),
        ),
        PipeliningKernel(
            name="dlight_matmul", make=partial(dlight_matmul, 128, 128, 160), reference=product_reference,
            devices=(A100, V100),
        ),
        PipeliningKernel(
            name="dlight_matmul_transposed", make=partial(dlight_matmul, 128, 128, 160, transposed=True),
            reference=lambda a, b: product_reference(a, b.T), devices=(A100, V100),
        ),
        PipeliningKernel(
            name="metaschedule_matmul", make=partial(metaschedule_matmul, "plain"), reference=product_reference,
            devices=(A100, V100, T4), blocks=(0, 3),
            shared=("A_reindex_shared_dyn", "B_reindex_shared_dyn"),
            registers=("A_reindex_shared_dyn_wmma_matrix_a", "B_reindex_shared_dyn_wmma_matrix_b"),
        ),
        PipeliningKernel(
            name="metaschedule_transposed", make=partial(metaschedule_matmul, "transposed"),
            reference=product_reference, devices=(A100,), blocks=(1,),
            refused={"B_reindex_shared_dyn": "asynchronous copy"},
        ),
    )  # fmt: skip
