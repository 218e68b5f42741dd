"""The statements of one kernel, counted: how often they run, what they load, store and compute.

Statements are counted by the loops around them; guards count as taken. Instructions of a warp (ldmatrix, mma, wmma)
count once for each warp, all others once for each thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from tvm_ext._tvm import (
    Buffer,
    BufferStore,
    Call,
    Expr,
    For,
    ForKind,
    Stmt,
    TensorLoad,
    Var,
    nodes_in,
    tirx,
)  # fmt: skip
from tvm_ext.analysis.computations import mentions
from tvm_ext.cost.product_counts import ADDRESS_REGISTERS
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.support.arithmetic import ceil_div

from .analyse import LoadUse
from .arithmetic import mfma_factors, operations_of
from .detect import LoadGroup
from .function import Function
from .index_values import Values, index_values
from .loops import (
    ACCESS_PTR,
    buffer_bytes,
    bytes_per_element,
    enclosing_loops,
    integer,
    is_shared,
    op_name,
    scope_of,
    size_of,
)

MMA, WMMA = "tirx.ptx_legacy.mma", "tirx.tvm_mma_sync"
LDMATRIX, WMMA_LOAD = "tirx.ptx_legacy.ldmatrix", "tirx.tvm_load_matrix_sync"
_FRAGMENT_STORES = {
    "tirx.tvm_store_matrix_sync": ((1, 2), 5),
    "tirx.mma_store": ((0, 1), 2),
    "tirx.mma_store_legacy": ((0, 1), 2),
}
"""Calls that store a fragment: which arguments are its sides, which is the pointer to where it goes."""
WARP_CALLS = (MMA, WMMA, LDMATRIX, WMMA_LOAD, *_FRAGMENT_STORES)

MATRIX_BYTES = 128
"""One 8 x 8 matrix of ldmatrix, 16 bits an element (PTX ISA, ldmatrix)."""
FRAGMENT_SIDE = 16
"""Rows, columns and depth of wmma's fragments, where no load of one says otherwise."""
PTX_TYPES = {"fp16": "float16", "bf16": "bfloat16", "int8": "int8", "uint8": "int8", "tf32": "tfloat32"}
WARP_SCOPES = ("warp", "wmma.matrix_a", "wmma.matrix_b", "wmma.accumulator")
"""Scopes of registers where a buffer's size is that of a whole warp."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Index:
    """The index of a thread, a block or a virtual thread: its tag (``blockIdx.x``, ``vthread``) and extent."""

    variable: Var
    tag: str
    extent: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Leaf:
    """A statement of the kernel, what is around it, and its calls."""

    around: tuple[Stmt, ...]
    statement: Stmt
    calls: tuple[Call, ...]

    @property
    def of_warp(self) -> bool:
        return any(op_name(call) in WARP_CALLS for call in self.calls)


class Counts:
    """The kernel that ``group``'s loop is in. Raises IllegalRewrite where an extent is not known beforehand."""

    def __init__(
        self, function: Function, group: LoadGroup, device: DeviceSpec, planned_registers: int | None = None
    ) -> None:
        self.function, self.group, self.device = function, group, device
        self.planned_registers = planned_registers
        self.launch = function.launch_of(group.loop)
        self.tiles: list[LoadUse] = [load_use for load_use, _ in group.shared]
        self.indices = list(_indices_of(self.launch))
        self.blocks = prod(index.extent for index in self.indices if index.tag.startswith("blockIdx"))
        self.threads = prod(index.extent for index in self.indices if index.tag.startswith("threadIdx"))
        self.warps = ceil_div(self.threads, device.teu_lanes)

    @cached_property
    def leaves(self) -> list[_Leaf]:
        return [
            _Leaf(around=around, statement=statement, calls=tuple(_calls_of(statement)))
            for around, statement in enclosing_loops(self.launch)
        ]

    @cached_property
    def in_loop(self) -> list[_Leaf]:
        """What the pipelined loop repeats."""
        return [leaf for leaf in self.leaves if any(loop.same_as(self.group.loop) for loop in leaf.around)]

    @cached_property
    def loop_repeats(self) -> int:
        """How often a block runs the whole pipelined loop."""
        leaf = self.in_loop[0]
        outer = leaf.around[: len(leaf.around) - len(self._inside(leaf)) - 1]
        return prod(extent_of(loop) for loop in outer if isinstance(loop, For))

    def _repeats(self, leaf: _Leaf, *, in_loop: bool = True, vectors: bool = True) -> int:
        """How often a block runs the statement: in one iteration of the pipelined loop, or in the whole kernel.

        Without ``vectors`` a vectorised loop counts as one instruction.
        """
        around = self._inside(leaf) if in_loop else leaf.around
        loops = [loop for loop in around if isinstance(loop, For) and (vectors or loop.kind != ForKind.VECTORIZED)]
        virtual = [
            index.extent
            for index in self.indices
            if index.tag == "vthread" and mentions(leaf.statement, index.variable)
        ]
        return prod(map(extent_of, loops)) * prod(virtual) * (self.warps if leaf.of_warp else self.threads)

    # ---- trips and registers ---------------------------------------------------------------------------------------

    @cached_property
    def register_trips(self) -> int:
        """Iterations of the inner loop: of the register buffers, else of the outermost loop around the arithmetic."""
        if self.group.registers:
            return extent_of(self.group.registers[0].loop)
        busiest = max(self.in_loop, key=self._operations, default=None)
        if busiest is None or not self._operations(busiest):
            return 1
        inner = [loop for loop in self._inside(busiest) if isinstance(loop, For)]
        return extent_of(inner[0]) if inner else 1

    def registers_of(self, buffer: Buffer) -> int:
        """32-bit registers of a thread that hold a register buffer."""
        lanes = self.device.teu_lanes if scope_of(buffer) in WARP_SCOPES else 1
        return ceil_div(buffer_bytes(buffer), lanes * self.device.register_bytes)

    @cached_property
    def registers(self) -> int:
        """Of a thread: as the emitter planned, else all buffers in registers and those of addresses."""
        if self.planned_registers is not None:
            return self.planned_registers
        held = [leaf.statement.buffer for leaf in self.leaves if isinstance(leaf.statement, tirx.AllocBuffer)]
        return ADDRESS_REGISTERS + sum(self.registers_of(buffer) for buffer in held if _is_of_thread(buffer))

    # ---- arithmetic ------------------------------------------------------------------------------------------------

    @cached_property
    def operations(self) -> float:
        """Of a block in one iteration of the pipelined loop, a multiply-add counting as two."""
        return float(sum(map(self._operations, self.in_loop)))

    def _operations(self, leaf: _Leaf) -> int:
        if isinstance(leaf.statement, BufferStore):
            each = operations_of(leaf.statement.value)
        else:
            each = sum(self._matrix_operations(call) for call in leaf.calls)
        return each * self._repeats(leaf) if each else 0

    def _matrix_operations(self, call: Call) -> int:
        if op_name(call) == MMA:
            return 2 * prod(int(size) for size in re.findall(r"\d+", str(call.args[0].value)))
        return 2 * self._fragment_shape if op_name(call) == WMMA else 0

    @cached_property
    def _fragment_shape(self) -> int:
        """Rows x columns x depth of a wmma instruction."""
        for leaf in self.leaves:
            for call in leaf.calls:
                if op_name(call) == WMMA_LOAD:
                    return prod(integer(size) or FRAGMENT_SIDE for size in call.args[1:4])
        return FRAGMENT_SIDE**3

    @cached_property
    def throughput(self) -> str:
        """The key of the peak that the arithmetic is held against: matrix units' or the type of what is computed."""
        for leaf in self.in_loop:
            for call in leaf.calls:
                if (factors := mfma_factors(call)) is not None:
                    return f"{factors}_tensor"
                if op_name(call) == MMA:
                    name = str(call.args[3].value)
                    return f"{PTX_TYPES.get(name, name)}_tensor"
                if op_name(call) == WMMA:
                    return f"{call.args[2].args[0].ty.dtype}_tensor"
        busiest = max(self.in_loop, key=self._operations, default=None)
        return "float32" if busiest is None or not self._operations(busiest) else str(busiest.statement.buffer.ty.dtype)

    # ---- bytes -----------------------------------------------------------------------------------------------------

    @cached_property
    def shared_read_bytes(self) -> float:
        """Of a block in one iteration: what its reads of shared memory occupy, broadcast or not."""
        return float(sum(map(self._shared_read_bytes, self.in_loop)))

    def _shared_read_bytes(self, leaf: _Leaf) -> float:
        total = 0.0
        for call in leaf.calls:
            if op_name(call) == LDMATRIX:
                total += MATRIX_BYTES * (integer(call.args[1]) or 1) * self._repeats(leaf)
            elif op_name(call) == WMMA_LOAD and is_shared(call.args[5].args[1].args[0]):
                rows, columns, depth = (integer(size) or FRAGMENT_SIDE for size in call.args[1:4])
                sides = depth * (rows if scope_of(call.args[0].args[0]) == "wmma.matrix_a" else columns)
                total += sides * bytes_per_element(str(call.args[0].args[0].ty.dtype)) * self._repeats(leaf)
        for load in _shared_loads(leaf.statement):
            warps = self._repeats(leaf, vectors=False) / self.device.teu_lanes
            total += self._wavefront_bytes(load, leaf.around) * warps
        return total

    def _wavefront_bytes(self, load: TensorLoad, around: tuple[Stmt, ...]) -> float:
        """What one load of a warp occupies: the distinct bytes, at least one turn of all banks.

        Worked example: float4 of eight different places among 32 lanes are 128 bytes, one turn; one place for all,
        16 bytes, is a turn as well.
        """
        lanes, width = self.device.teu_lanes, 1
        vector = (
            around[-1] if around and isinstance(around[-1], For) and around[-1].kind == ForKind.VECTORIZED else None
        )
        if vector is not None:
            width = extent_of(vector)
        known = [*self._lanes(np.repeat(np.arange(lanes), width))]
        if vector is not None:
            known.append((vector.loop_var, np.tile(np.arange(width), lanes)))
        places = np.unique(index_values(load.indices[0], known, self._bound)).size
        turn = self.device.layer("L1").transaction_bytes
        return max(turn, places * bytes_per_element(str(load.source.ty.dtype)))

    def _lanes(self, threads: Values) -> Iterator[tuple[Var, Values]]:
        """Thread indices of linear thread numbers, x fastest."""
        for index in sorted((i for i in self.indices if i.tag.startswith("threadIdx")), key=lambda i: i.tag):
            yield index.variable, threads % index.extent
            threads = threads // index.extent

    def _blocks(self, blocks: Values) -> Iterator[tuple[Var, Values]]:
        for index in sorted((i for i in self.indices if i.tag.startswith("blockIdx")), key=lambda i: i.tag):
            yield index.variable, blocks % index.extent
            blocks = blocks // index.extent

    @cached_property
    def _bound(self) -> list[tuple[Var, Expr]]:
        return [(s.var, s.value) for s in (leaf.statement for leaf in self.leaves) if isinstance(s, tirx.Bind)]

    def loaded_bytes(self, tile: LoadUse) -> float:
        """Global bytes that a block copies into ``tile`` in one iteration; its storage may be padded."""
        elements = sum(
            self._stored_elements(leaf)
            for leaf in self.in_loop
            if any(leaf.statement.same_as(copy.store) for copy in tile.copies)
        )
        return float(min(elements * bytes_per_element(str(tile.buffer.ty.dtype)), buffer_bytes(tile.buffer)))

    def _stored_elements(self, leaf: _Leaf) -> int:
        """Different elements that all threads of a block store, guards obeyed: 5 rounds of 128 threads may copy 512."""
        inside = self._inside(leaf)
        loops = [loop for loop in inside if isinstance(loop, For)]
        rounds = [loop for loop in loops if loop.kind != ForKind.VECTORIZED]
        places = np.indices((self.threads, *map(extent_of, rounds))).reshape(1 + len(rounds), -1)
        known = [*self._lanes(places[0]), *((loop.loop_var, at) for loop, at in zip(rounds, places[1:], strict=True))]
        lanes = prod(extent_of(loop) for loop in loops if loop.kind == ForKind.VECTORIZED)
        try:
            stored = index_values(leaf.statement.indices[0], known, self._bound)
            for guard in inside:
                if isinstance(guard, tirx.IfThenElse) and guard.else_case is None:
                    stored = np.where(index_values(guard.condition, known, self._bound), stored, -1)
        except IllegalRewrite:
            return self._repeats(leaf)
        return int(np.unique(stored[stored >= 0]).size) * lanes

    def _inside(self, leaf: _Leaf) -> tuple[Stmt, ...]:
        """What is around the statement inside of the pipelined loop."""
        return leaf.around[next(i for i, loop in enumerate(leaf.around) if loop.same_as(self.group.loop)) + 1 :]

    def distinct_tiles(self, tile: LoadUse, blocks: int) -> int:
        """Different tiles that the first ``blocks`` blocks load at a time: those of a row or column load the same."""
        known = [*self._blocks(np.arange(blocks))]
        if not known or not tile.copies:
            return blocks
        try:
            return int(np.unique(index_values(tile.copies[0].from_index, known, self._bound)).size)
        except IllegalRewrite:
            return blocks

    @cached_property
    def source_bytes(self) -> int | None:
        """Of all tensors that the tiles come from; None where a size is not known."""
        sources: list[Buffer] = []
        for tile in self.tiles:
            for copy in tile.copies:
                if not any(copy.source.same_as(other) for other in sources):
                    sources.append(copy.source)
        if any(size_of(source) is None for source in sources):
            return None
        return sum(map(buffer_bytes, sources))

    @cached_property
    def output_bytes(self) -> float:
        """Global bytes that a block writes; where guards let few threads write, its share of the tensors written."""
        counted, buffers = 0.0, list[Buffer]()
        for leaf in self.leaves:
            for buffer, elements in _global_stores(leaf):
                counted += self._repeats(leaf, in_loop=False) * elements * bytes_per_element(str(buffer.ty.dtype))
                if not any(buffer.same_as(other) for other in buffers):
                    buffers.append(buffer)
        if any(size_of(buffer) is None for buffer in buffers):
            return counted
        return min(counted, sum(map(buffer_bytes, buffers)) / self.blocks)


# ---- single statements ----------------------------------------------------------------------------------------------


def extent_of(loop: Stmt) -> int:
    extent = integer(loop.extent)
    if extent is None:
        raise IllegalRewrite(f"the extent of loop {loop.loop_var.name} is not known before the kernel runs")
    return extent


def _is_of_thread(buffer: Buffer) -> bool:
    return scope_of(buffer) == "local" or scope_of(buffer) in WARP_SCOPES


def _indices_of(launch: Stmt) -> Iterator[Index]:
    """The thread, block and virtual thread indices of a kernel, each once."""
    found: list[Index] = []

    for node in nodes_in(launch, tirx.AttrStmt, "pre"):
        is_index = node.attr_key in ("thread_extent", "virtual_thread")
        if not is_index or any(index.variable.same_as(node.node.var) for index in found):
            continue
        extent = integer(node.value)
        if extent is None:
            raise IllegalRewrite(f"the extent of {node.node.thread_tag} is not known before the kernel runs")
        tag = "vthread" if node.attr_key == "virtual_thread" else str(node.node.thread_tag)
        found.append(Index(variable=node.node.var, tag=tag, extent=extent))
    return iter(found)


def _calls_of(statement: Stmt) -> list[Call]:
    """The call that ``statement`` evaluates, if it is one."""
    if isinstance(statement, tirx.Evaluate) and isinstance(statement.value, Call):
        return [statement.value]
    return []


def _global_stores(leaf: _Leaf) -> Iterator[tuple[Buffer, int]]:
    """(buffer, elements) that one run of the statement writes to global memory."""
    statement = leaf.statement
    if isinstance(statement, BufferStore) and scope_of(statement.buffer) == "global":
        yield statement.buffer, 1
    for call in leaf.calls:
        sides, target = _FRAGMENT_STORES.get(op_name(call), ((), 0))
        if sides and op_name(call.args[target]) == ACCESS_PTR:
            buffer = call.args[target].args[1].args[0]
            if scope_of(buffer) == "global":
                yield buffer, prod(integer(call.args[side]) or FRAGMENT_SIDE for side in sides)


def _shared_loads(statement: Stmt) -> list[TensorLoad]:
    return [load for load in nodes_in(statement, TensorLoad, "pre") if is_shared(load.source)]
