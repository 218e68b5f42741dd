"""Stores of results: through a fused epilogue, and as vectors of what is computed lane by lane.

Stock TVM makes a loop over a vector's lanes scalar, loads and stores too, where it finds a call that has no vector
form (erf) or an integer division. `store_lanes` leaves only the arithmetic scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm_ext._tvm import Buffer, BufferStore, Call, Expr, Stmt, TensorLoad, Var, nodes_in, structural_equal
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, replace_loads, replace_reads, substitute

from .build_ir import (
    INDEX_DTYPE,
    UNROLLED,
    VECTORIZED,
    allocate,
    bind,
    cast_to,
    index,
    load,
    loop,
    sequence,
    store,
    vector_kind,
)
from .simt_ir import gpu_buffer


def store_element(
    computation: Computation, epilogue: Sequence[Computation], element: Expr, table: Sequence[tuple[Var, Expr]]
) -> Stmt:
    """Store one accumulated element, or what each epilogue computation makes of it; ``table`` has the axes."""
    result = cast_to(element, dtype_of(computation.target))
    position = [substitute(i, table) for i in computation.indices]
    if not epilogue:
        return store(computation.target, result, position)
    writes = []
    for consumer in epilogue:
        value, moved = consumed(consumer, computation, result, position)
        writes.append(store(consumer.target, value, [substitute(i, moved) for i in consumer.indices]))
    return sequence(*writes)


def consumed(
    consumer: Computation, anchor: Computation, result: Expr, position: Sequence[Expr]
) -> tuple[Expr, list[tuple[Var, Expr]]]:
    """The consumer's value at ``position`` of the anchor, and its variables there."""
    value = replace_reads(consumer.value, anchor.target, lambda _: result)
    moved = bind(consumer.spatial, position)
    return substitute(value, moved), moved


# --- vectors ----------------------------------------------------------------------------------------------------------
def is_lane_by_lane(*values: Expr) -> bool:
    """Whether a loop over lanes that computes ``values`` would not stay one of vectors: calls, integer divisions.

    Calls of functions that TVM would vectorise are scalar in CUDA and OpenCL C after all.
    """
    return bool(nodes_in(list(values), Call)) or vector_kind(*values) != VECTORIZED


def store_lanes(width: int, write: Callable[[Expr], Stmt]) -> Stmt:
    """``write(lane)`` for ``width`` lanes: loads by vectors, arithmetic lane by lane, stores by vectors.

    ``write`` gives stores whose addresses, and those of the loads that move with the lane, are aligned vectors. Worked
    example, 4 lanes of ``y[4*t + v] = gelu(x[4*t + v])``: 4 floats from x at once into registers, 4 times gelu, one
    store of 4.
    """
    count = len(nodes_in(write(index(0)), BufferStore))
    return sequence(*(_store_one(width, lambda v, n=n: nodes_in(write(v), BufferStore)[n]) for n in range(count)))  # type: ignore[misc]


def _store_one(width: int, write: Callable[[Expr], Stmt]) -> Stmt:
    probe = Var("v", INDEX_DTYPE)
    example = write(probe)
    loads = _loads(example.value)
    first = {n: next(i for i in range(n + 1) if structural_equal(loads[i], item)) for n, item in enumerate(loads)}
    # loads that move along the lanes, and are none of registers
    in_memory = [n for n, item in enumerate(loads) if item.source.ty.storage_scope != "local"]
    moving = [n for n in in_memory if any(mentions(position, probe) for position in loads[n].indices)]
    inputs = {n: gpu_buffer([width], dtype_of(loads[n]), "input", "local") for n in moving if first[n] == n}
    result = gpu_buffer([width], dtype_of(example.value), "result", "local")

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


def _loads(value: Expr) -> list[TensorLoad]:
    """The loads of ``value``, in the order of `replace_loads`."""
    found: list[TensorLoad] = []

    def note(item: TensorLoad) -> TensorLoad:
        found.append(item)
        return item

    replace_loads(value, note)
    return found


def _with_inputs(value: Expr, inputs: dict[int, Buffer], lane: Expr) -> Expr:
    """``value`` with its loads number ``inputs`` read from registers instead."""
    places = iter(range(len(_loads(value))))

    def swap(item: TensorLoad) -> Expr:
        place = next(places)
        return load(inputs[place], [lane]) if place in inputs else item

    return replace_loads(value, swap)
