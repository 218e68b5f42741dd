"""Attention on a CPU: the tiles of its one kernel, from the device's registers and caches, and what it takes.

Floors first, per query and key: ``features + value_features`` multiply-adds, and the softmax.
Worked example, BERT (64 + 64 features) on two pipes of 16 lanes: a register of scores takes 64 cycles of multiply-adds
and 10 of the softmax, so that 86 % of the arithmetic's peak is the most that there is to reach; keys and values come
from L2 once per block of queries, 512 bytes a key: 2 bytes a cycle with 64 queries, where L2 delivers 30 and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import gcd, inf, prod

from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.devices.dot_instructions import dot_instruction
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.attention import Attention, AttentionTiles, Copies, MatrixOperand
from tvm_ext.support.arithmetic import ceil_div

from .register_tiles import PORT_OVERLAP, overlapped

FLOAT_BYTES = 4  # of float32, what attention's kernels compute in
SOFTMAX_OPERATIONS = 4
"""Vector instructions of the softmax per register of scores beside its exp: maximum, difference, sum, mask."""

TURN_OPERATIONS = 16
"""Vector instructions per register that is transposed: loads, stores, four rounds of shuffles at half the rate."""

NARROW_COPY_OPERATIONS = 4
"""Vector instructions per register of keys or values that is rounded into a copy: a load, a conversion, and of values a
shift and a half of a store."""

TASK_CYCLES = 400
"""Cycles between two tasks: workspaces, addresses, loops of few steps."""

BLOCKS_THAT_SHARE = 4
"""Blocks of queries from which on one copy of keys and values for all of them costs less than one for each."""

TURNED_COPY_CYCLES = 3
"""Cycles of a core per element that a kernel of its own transposes, one element at a time."""

KERNEL_SHARE = 0.7
"""Share of the pipes' time that the kernel's cycles come to: 91 of 158 GFLOP/s where 86 % are the most
(one core of a Cascade Lake)."""

MOST_QUERY_VECTORS = 4
"""More registers of queries than this leave fewer than six rows for the accumulators of 32."""

SCATTERED = 1.1
"""How much longer it takes to read keys and values where they lie, if the model would rather have them copied."""


class AttentionClock:
    """What ``work`` takes on ``device`` in one kernel, by its tiles; ``dot`` is the instruction of narrow products."""

    def __init__(self, work: Attention, device: DeviceSpec) -> None:
        self.work, self.device, self.machine = work, device, Machine(device)
        self.lanes = device.register_bytes // FLOAT_BYTES
        narrow = work.products != "float32"
        self.dot = dot_instruction(device, work.products, work.products, "float32") if narrow else None
        self.without = narrow and self.dot is None

    def usual_tiles(self) -> AttentionTiles | None:
        """The tiles that the model expects to be fastest; None where the device has no SIMD registers for queries."""
        return min(self._bases(), key=self.kernel_seconds, default=None)

    def candidates(self) -> list[tuple[AttentionTiles, float]]:
        """All tiles with the seconds that the model expects of each, `usual_tiles` first; none without SIMD."""
        usual = self.usual_tiles()
        if usual is None:
            return []
        found = {usual: self._candidate_seconds(usual, usual)}
        for base in self._bases():
            for tiles in self._like(base):
                found.setdefault(tiles, self._candidate_seconds(tiles, base))
        return list(found.items())

    def check(self, tiles: AttentionTiles) -> None:
        """Raise IllegalRewrite where ``tiles`` are none of `candidates`."""
        if not any(tiles == item for item, _ in self.candidates()):
            raise IllegalRewrite(f"attention of {self.work} on {self.device.name} cannot have {tiles}")

    def _bases(self) -> list[AttentionTiles]:
        """For each number of registers of queries the tiles that registers and caches ask for."""
        if self.device.kind != "cpu" or self.lanes < 2 or self.without:
            return []
        most = min(MOST_QUERY_VECTORS, ceil_div(self.work.queries, self.lanes))
        return [tiles for count in range(1, most + 1) if (tiles := self._tiles_of_vectors(count))]

    def _most_rows(self, vectors: int) -> int:
        """Rows of a register tile by so many registers of queries: beside the accumulators are a step's operands."""
        return (self.device.register_limit - vectors - 1) // vectors

    def _tiles_of_vectors(self, vectors: int) -> AttentionTiles | None:
        """The tiles with ``vectors`` registers of queries; None where no row of accumulators has room beside them.

        Registers hold the accumulators, one step's queries, and one scalar for all lanes. The block of scores shares L1
        with what it is multiplied with: queries first, then values.
        """
        work, lanes, rows = self.work, self.lanes, self._most_rows(vectors)
        if rows < 1:
            return None
        width = vectors * lanes * FLOAT_BYTES
        room = self.device.layers[1].capacity_bytes or 0
        beside_queries = (room - work.features * width) // width
        beside_values = room // (width + work.value_features * FLOAT_BYTES)
        step = lanes if any(work.staged(lanes)) else self.group
        block = _block(work.keys, max(lanes, min(beside_queries, beside_values)), step, lanes)
        copies = self._copies(ceil_div(work.queries, vectors * lanes), rows, block)
        enough = ceil_div((self.device.fma_latency_cycles or 1) * self.device.fma_rate, vectors)
        return AttentionTiles(
            lanes=lanes,
            query_vectors=vectors,
            key_rows=_rows(block, rows, enough),
            feature_rows=_rows(work.value_features, rows, enough),
            key_block=block,
            copies=copies,
            ahead_bytes=self._ahead_bytes(vectors * lanes, copies),
        )

    def _ahead_bytes(self, queries: int, copies: Copies) -> int:
        """A cache line where one matrix's rows lie apart, so that no prefetcher follows them, and two fit L2."""
        work, l2 = self.work, self.device.layers[2]
        apart = any(abs(item.row_stride) > work.features for item in (work.query, work.key, work.value))
        contiguous = all(item.column_stride == 1 for item in (work.query, work.key, work.value))
        read = work.keys * (work.features + work.value_features) + min(queries, work.queries) * work.features
        if copies == "shared" or work.batch == 1 or not (apart and contiguous):
            return 0
        return l2.transaction_bytes if 2 * read * FLOAT_BYTES <= (l2.capacity_bytes or 0) else 0

    @property
    def group(self) -> int:
        """Products that a step of a sum adds up; blocks of keys are whole groups."""
        return 1 if self.dot is None else self.dot.group

    def _is_half(self) -> bool:
        """Half precision is read as float32, and so copied; what products in bfloat16 read is rounded into a copy."""
        half = any(itemsize_bytes(item.dtype) != FLOAT_BYTES for item in (self.work.key, self.work.value))
        return half or self.dot is not None

    def _copies(self, blocks: int, rows: int, key_block: int) -> Copies:
        """Where keys and values are read: of few blocks of queries each copies its own, many share one copy of all."""
        work = self.work
        keys = self._is_scattered(work.key, rows, 1)
        lines = ceil_div(work.value_features * FLOAT_BYTES, self.device.layers[1].transaction_bytes)
        values = self._is_scattered(work.value, min(key_block, work.keys), lines)
        if not self._is_half() and ((not keys and not values) or work.queries <= self.lanes):
            return "none"  # what one register of queries reads is read once
        if blocks >= BLOCKS_THAT_SHARE:
            return "shared"
        return "block" if self._is_half() or keys else "values"

    def _is_scattered(self, operand: MatrixOperand, rows: int, lines: int) -> bool:
        """Whether ``rows`` of ``lines`` cache lines each, read again and again, would fill more than half of L1's ways.

        Addresses a page apart share a place in L1, which has as many ways as pages. Worked example, 64 rows of 4 lines
        3072 bytes apart: 4 places of 4 lines in a page of 64, so 16 lines for each of 8 ways. One core, 12 heads,
        512 x 512: 84 GFLOP/s, copied 91. Keys are read row by row, one line of each at a time.
        """
        apart, l1 = abs(operand.row_stride) * FLOAT_BYTES, self.device.layers[1]
        page, line = self.device.page_bytes or 4096, l1.transaction_bytes
        if operand.column_stride != 1 or not apart:
            return False
        ways = max(1, (l1.capacity_bytes or page) // page)
        places = min(page // line, page // gcd(apart, page) * lines)
        return 2 * rows * lines > places * ways

    def turning_pays(self, operand: MatrixOperand) -> bool:
        """Whether a term takes less time if a kernel before transposes it, once for all that share its matrices."""
        shared = prod(extent for extent, stride in operand.batch if not stride)
        return shared * TURN_OPERATIONS / self.lanes / self.device.fma_rate > TURNED_COPY_CYCLES

    def expected_seconds(self) -> float:
        """Of `usual_tiles`, copies included; infinite where there are none."""
        return self.candidates()[0][1] if self.usual_tiles() is not None else inf

    # --- other tiles ------------------------------------------------------------------------------------------------
    def _like(self, base: AttentionTiles) -> Iterator[AttentionTiles]:
        """Tiles with as many registers of queries: other blocks of keys, rows of register tiles, copies."""
        rows = self._most_rows(base.query_vectors)
        legal: tuple[Copies, ...] = ("block", "shared") if self._is_half() else ("none", "values", "block", "shared")
        for block, copies in product(self._blocks(base), legal):
            for keys, features in product(
                _other_rows(base.key_rows, rows, block), _other_rows(base.feature_rows, rows, self.work.value_features)
            ):
                yield replace(base, key_block=block, copies=copies, key_rows=keys, feature_rows=features)

    def _blocks(self, base: AttentionTiles) -> list[int]:
        """Quarters to twice the block that L1 holds, whole registers of keys; never more than there are."""
        sizes = [base.key_block * factor // 4 // base.lanes * base.lanes for factor in (1, 2, 8)]
        return sorted({base.key_block, *(min(size, self.work.keys) for size in sizes if size)})

    def _candidate_seconds(self, tiles: AttentionTiles, usual: AttentionTiles) -> float:
        """`kernel_seconds`, with the copies: a load and a store of each register, by each task or once."""
        work, blocks = self.work, ceil_div(self.work.queries, tiles.query_block)
        times = {"none": 0, "values": blocks, "block": blocks, "shared": 1}[tiles.copies]
        features = work.value_features + (work.features if tiles.copies != "values" else 0)
        each = 2 if self.dot is None else NARROW_COPY_OPERATIONS
        cycles = each * work.batch * times * work.keys * features / tiles.lanes / self.device.unit_count
        slower = SCATTERED if tiles.copies == "none" and usual.copies != "none" else 1.0
        return slower * self.kernel_seconds(tiles) + cycles / self.machine.hz

    # --- the one kernel ---------------------------------------------------------------------------------------------
    def kernel_seconds(self, tiles: AttentionTiles) -> float:
        """Of all units, the longest of them; without starting the kernel."""
        work, blocks = self.work, ceil_div(self.work.queries, tiles.query_block)
        last = ceil_div(work.queries - (blocks - 1) * tiles.query_block, tiles.lanes)
        per_batch = (blocks - 1) * self._task_cycles(tiles, tiles.query_vectors) + self._task_cycles(tiles, last)
        tasks = work.batch * blocks
        units = min(self.device.unit_count, tasks)
        imbalance = ceil_div(tasks, units) * units / tasks
        return work.batch * per_batch * imbalance / units / KERNEL_SHARE / self.machine.hz

    def _task_cycles(self, tiles: AttentionTiles, vectors: int) -> float:
        work, pipes, machine = self.work, self.device.fma_rate, self.machine
        scores = self._product_cycles(work.keys, tiles.key_rows, vectors, work.features, tiles)
        steps = ceil_div(work.keys, tiles.key_block)
        results = self._product_cycles(work.value_features, tiles.feature_rows, vectors, work.keys, tiles)
        softmax = work.keys * vectors * (SOFTMAX_OPERATIONS + machine.instructions("exp") + self.group - 1) / pipes
        rescaled = 3 * steps * work.value_features * vectors / pipes
        turned = work.features + work.value_features + work.keys * sum(work.staged(tiles.lanes))
        turning = turned * vectors * TURN_OPERATIONS / pipes
        # Keys and values wait for L2: each row is read once, by one row of a register tile at a time.
        read = work.keys * (work.features + work.value_features) * FLOAT_BYTES / self.group
        waiting = read / machine.bytes_per_cycle(machine.l2_rate)
        return scores + results + softmax + rescaled + turning + waiting + TASK_CYCLES

    def _product_cycles(self, rows: int, tile: int, vectors: int, depth: int, tiles: AttentionTiles) -> float:
        """A product in register tiles, the last of them smaller."""
        full, rest = divmod(rows, tile)
        depth = ceil_div(depth, self.group)
        cycles = full * self._step_cycles(tile, vectors, depth, tiles)
        return depth * (cycles + (self._step_cycles(rest, vectors, depth, tiles) if rest else 0.0))

    def _step_cycles(self, rows: int, vectors: int, depth: int, tiles: AttentionTiles) -> float:
        """Of one step of the sum: arithmetic, loads, latency, and L2 where L1 is too small for the vectors."""
        device, machine = self.device, self.machine
        held = min(depth, tiles.key_block) * vectors * tiles.lanes * FLOAT_BYTES
        room = device.layers[1].capacity_bytes or inf
        near = machine.bytes_per_cycle(machine.l2_rate) if 2 * held > room else inf
        streamed = vectors * tiles.lanes * FLOAT_BYTES / near
        latency = float(device.fma_latency_cycles or 0)
        operations = 1.0 if self.dot is None else self.dot.operations
        times = (rows * vectors * operations / device.fma_rate, (rows + vectors) / device.load_rate, latency, streamed)
        return overlapped(times, PORT_OVERLAP)


def _block(keys: int, most: int, step: int, lanes: int) -> int:
    """Keys of a block, ``most`` or up to half of it fewer where equal blocks come of it, in multiples of ``step``.

    Equal blocks are one piece of code: 100 keys of at most 64 are twice 50.
    """
    if keys <= most:
        return keys
    equal = (size for size in range(most, most // 2 - 1, -1) if keys % size == 0 and size % step == 0)
    return next(equal, max(lanes, most // lanes * lanes))


def _rows(extent: int, most: int, enough: int) -> int:
    """Rows of a register tile: all tiles of one size if these are ``enough`` to hide a multiply-add's latency.

    64 rows of at most 6 are 16 times 4: as fast, measured, as 10 times 6 and one of 4, and half the code. Otherwise of
    nearly one size: 17 rows of at most 14 are 9 and 8.
    """
    if extent <= most:
        return extent
    equal = (size for size in range(most, enough - 1, -1) if extent % size == 0)
    return next(equal, ceil_div(extent, ceil_div(extent, most)))


def _other_rows(usual: int, most: int, extent: int) -> list[int]:
    """Rows of a register tile out of ``extent``, from half of what the registers hold on."""
    sizes = (usual, *(most * share // 4 for share in (2, 3, 4)))
    return sorted({min(extent, max(1, size)) for size in sizes})
