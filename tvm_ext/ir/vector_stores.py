"""Vector stores of what is computed lane by lane.

Stock TVM makes a loop over a vector's lanes scalar, loads and stores too, where it finds a call that has no vector
form (erf) or an integer division. Here only the arithmetic is scalar.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm_ext._tvm import Buffer, BufferStore, Call, Expr, Stmt, TensorLoad, Var, structural_equal, structural_walk
from tvm_ext.analysis.computations import dtype_of, mentions, replace_loads
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    UNROLLED,
    VECTORIZED,
    allocate,
    index,
    load,
    loop,
    sequence,
    store,
    vector_kind,
)
from tvm_ext.ir.simt_ir import gpu_buffer


def is_lane_by_lane(*values: Expr) -> bool:
    """Whether a loop over lanes that computes ``values`` would not stay one of vectors: calls, integer divisions.

    Calls of functions that TVM would vectorise are scalar in CUDA and OpenCL C after all.
    """
    found: list[bool] = []
    for value in values:
        structural_walk(value, (Call, lambda _: found.append(True)), order="pre")
    return bool(found) or vector_kind(*values) != VECTORIZED


def store_lanes(width: int, write: Callable[[Expr], Stmt]) -> Stmt:
    """``write(lane)`` for ``width`` lanes: loads by vectors, arithmetic lane by lane, stores by vectors.

    ``write`` gives stores whose addresses, and those of the loads that move with the lane, are aligned vectors. Worked
    example, 4 lanes of ``y[4*t + v] = gelu(x[4*t + v])``: 4 floats from x at once into registers, 4 times gelu, one
    store of 4.
    """
    count = len(_stores(write(index(0))))
    return sequence(*(_store_one(width, lambda v, n=n: _stores(write(v))[n]) for n in range(count)))  # type: ignore[misc]


def _stores(statement: Stmt) -> list[BufferStore]:
    found: list[BufferStore] = []
    structural_walk(statement, (BufferStore, found.append), order="pre")
    return found


def _store_one(width: int, write: Callable[[Expr], Stmt]) -> Stmt:
    probe = Var("v", INDEX_DTYPE)
    example = write(probe)
    loads = _loads(example.value)
    first = {n: next(i for i in range(n + 1) if structural_equal(loads[i], item)) for n, item in enumerate(loads)}
    moving = [n for n, item in enumerate(loads) if _is_vector(item, probe)]
    inputs = {n: _registers(width, loads[n], "input") for n in moving if first[n] == n}
    result = _registers(width, example.value, "result")

    def read(n: int) -> Stmt:
        return loop(width, VECTORIZED, "v", lambda v: store(inputs[n], _loads(write(v).value)[n], [v]))

    def compute(v: Expr) -> Stmt:
        return store(result, _with_inputs(write(v).value, {n: inputs[first[n]] for n in moving}, v), [v])

    return sequence(
        *(allocate(buffer) for buffer in (*inputs.values(), result)),
        *(read(n) for n in inputs),
        loop(width, UNROLLED, "v", compute),
        loop(width, VECTORIZED, "v", lambda v: store(example.buffer, load(result, [v]), write(v).indices)),
    )


def _registers(width: int, like: Expr, name: str) -> Buffer:
    return gpu_buffer([width], dtype_of(like), name, "local")


def _loads(value: Expr) -> list[TensorLoad]:
    """The loads of ``value``, in the order of `replace_loads`."""
    found: list[TensorLoad] = []

    def note(item: TensorLoad) -> TensorLoad:
        found.append(item)
        return item

    replace_loads(value, note)
    return found


def _is_vector(item: TensorLoad, lane: Expr) -> bool:
    """Whether the load moves along the lanes, and is not one of a register."""
    moves = any(mentions(position, lane) for position in item.indices)
    return moves and item.source.ty.storage_scope != "local"


def _with_inputs(value: Expr, inputs: dict[int, Buffer], lane: Expr) -> Expr:
    """``value`` with its loads number ``inputs`` read from registers instead."""
    places = iter(range(len(_loads(value))))

    def swap(item: TensorLoad) -> Expr:
        place = next(places)
        return load(inputs[place], [lane]) if place in inputs else item

    return replace_loads(value, swap)
