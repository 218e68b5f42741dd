"""A GPU that does not exist: "times" for tests and curves of searches, where no GPU is at hand. Never a measurement.

A simulated time is counted in cycles, not derived from the analytical model or from the features that learners see:

* **issue**: instructions of a warp's step against one issue a cycle and scheduler, mma's pipe, and its latency;
* **banks**: the wavefronts of ldmatrix, by the addresses of its eight rows in a tile without a swizzle;
* **memory**: bytes of half-used bursts of DRAM, the cache by panels, a latency that lines queue behind;
* **tails**: threadblocks go to units whose speeds differ (by draws of the seed) as slots fall free;
* **clocks**: the energy of what runs lowers the clock until the board keeps its power;
* **spills** of what ptxas would need beyond 255 registers; and noise for each trial. Some kernels do not compile.

What each costs is an assumption about an A100, written once below and fitted to nothing: neither to ALCOP's figures nor
to a search.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence

import numpy as np

from tvm_ext.autotune.gpu_space import MatrixTileSpace
from tvm_ext.records.measurement import Trial
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.quantities import Floats, Integers

NOISE = 0.02
FAILING = 0.03
MMA_LATENCY, LOAD_LATENCY = 33, 29  # cycles, of an mma.sync and of an ldmatrix on an A100
BARRIER, LOOP_INSTRUCTIONS, COPY_INSTRUCTIONS = 28, 14, 4  # cycles; of an iteration, and of a 16-byte copy
BURST_BYTES = 64  # of DRAM: a line of 32 bytes moves as many
UNIT_SPREAD = 0.03  # standard deviation of the units' speeds: how far each lies from the cache
IDLE_W, BOARD_W, JOULES_PER_FLOP, JOULES_PER_BYTE = 90.0, 400.0, 0.9e-12, 28e-12
SPILL_CYCLES = 6  # of an iteration, for each register that is spilled


class SimulatedGpu:
    """Simulated times of the candidates of ``space``; the same for the same product and ``seed``."""

    def __init__(self, space: MatrixTileSpace, *, seed: int = 0, noise: float = NOISE) -> None:
        self.space, self.noise, self.seed = space, noise, seed
        digest = hashlib.sha256(f"{space.product} {space.device.name} {seed}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        speeds = np.maximum(0.8, rng.normal(1.0, UNIT_SPREAD, size=space.device.unit_count))
        self.time_s = _seconds(space, speeds)
        self.fails = rng.random(len(space)) < FAILING
        self.best_s = float(self.time_s[~self.fails].min())

    def measure(self, candidates: Sequence[GpuTile]) -> list[Trial]:
        """Simulated trials, noise included; a candidate has the same noise each time."""
        return [self._trial(candidate) for candidate in candidates]

    def share_of_best(self, candidate: GpuTile) -> float:
        """The best time of the space over the candidate's, without noise; 0 for one that fails."""
        place = self.space.index(candidate.configuration)
        assert place is not None, candidate
        return 0.0 if self.fails[place] else self.best_s / float(self.time_s[place])

    def _trial(self, candidate: GpuTile) -> Trial:
        place = self.space.index(candidate.configuration)
        assert place is not None, candidate
        configuration = candidate.configuration
        if self.fails[place]:
            return Trial(configuration=configuration, outcome="compile_failed", reason="simulated")
        noise = np.random.default_rng([self.seed, place]).normal(0.0, self.noise, size=3)
        times = tuple(float(1e6 * self.time_s[place] * np.exp(item)) for item in noise)
        return Trial(configuration=configuration, outcome="ok", times_us=times)


def _seconds(space: MatrixTileSpace, speeds: Floats) -> Floats:
    device, product, tiles, loops = space.device, space.product, space.tiles, space.predictions.loops
    hz = (device.clock_ghz or 1.0) * 1e9
    blocks, resident = loops.blocks, np.minimum(loops.resident, -(-loops.blocks // device.unit_count))
    cycles = _iteration_cycles(space, resident)
    # Bytes of an iteration of all units, of the cache and, where panels are shared, of memory.
    memory = device.layer("L2")
    line = tiles.depth * product.itemsize
    wasted = np.ceil(line / BURST_BYTES) * BURST_BYTES / line
    cache_rate, memory_rate = (
        (rate or 1.0) * 1e9 / hz for rate in (memory.cache_bandwidth_gb_per_s, memory.bandwidth_gb_per_s)
    )
    at_once = np.minimum(blocks, resident * device.unit_count)
    moved = np.maximum(
        loops.bytes_per_shared_trip * at_once / cache_rate,
        np.minimum(loops.workset_bytes, loops.bytes_per_shared_trip * at_once) * wasted / memory_rate,
    )
    # A load waits for its round trip, and behind the lines that its block has asked for before.
    round_trip = (memory.latency_ns or 0.0) * 1e-9 * hz + loops.stage_bytes / 128 * 2
    ahead = np.maximum(tiles.shared_stages - 1, 0)
    waiting = np.where(ahead > 0, round_trip / np.maximum(ahead, 1), round_trip + cycles)
    each = np.maximum(np.maximum(cycles, moved), waiting)
    written = loops.output_bytes_per_block * at_once / memory_rate
    block_cycles = round_trip + loops.shared_trips * each + written + 600
    makespan = block_cycles * _makespans(blocks, resident, speeds)
    time_s = makespan / hz + np.where(
        tiles.splits > 1, 4e-6 + 8.0 * tiles.splits * product.rows * product.columns / 1e12, 0
    )
    return np.asarray(time_s * _slowed_clock(space, time_s), dtype=np.float64)


def _iteration_cycles(space: MatrixTileSpace, resident: Integers) -> Floats:
    """Cycles of an iteration of the outer loop in all blocks of a unit, whose loads have arrived."""
    device, product, tiles, loops = space.device, space.product, space.tiles, space.predictions.loops
    per_clock = (device.emitted_gflops_of(f"{product.dtype}_tensor") or 1.0) / (device.clock_ghz or 1.0)
    step = tiles.depth // loops.register_trips
    mmas = (tiles.warp_rows // 16) * (tiles.warp_columns // 8)
    mma = 2.0 * 16 * 8 * step / (per_clock / device.unit_count / device.teus_per_unit)
    loads = (tiles.warp_rows + tiles.warp_columns) / 16
    warps = resident * loops.warps_per_block
    sharing = -(-warps // device.teus_per_unit)  # of the fullest scheduler: warps are whole
    fetched = loads * 4 * _wavefronts(tiles.depth * product.itemsize)
    pipe = np.maximum(mmas * mma, MMA_LATENCY / np.minimum(sharing, 4))
    alone = np.where(tiles.register_stages > 1, np.maximum(pipe, LOAD_LATENCY), pipe + LOAD_LATENCY + fetched)
    issued = mmas + loads + 2
    a_step = np.maximum.reduce([alone, sharing * pipe, sharing * issued, warps * fetched])
    copies = loops.stage_bytes / (loops.warps_per_block * 32 * 16)
    around = BARRIER * np.minimum(resident, 2) + sharing * (LOOP_INSTRUCTIONS + copies * COPY_INSTRUCTIONS)
    registers = loops.registers_per_thread + (tiles.register_stages - 1) * loops.register_stage_registers
    spilled = np.maximum(0, 1.12 * registers - 255)
    return np.asarray(loops.register_trips * a_step + around + SPILL_CYCLES * spilled * sharing, dtype=np.float64)


def _wavefronts(line_bytes: Integers) -> Floats:
    """Times as long as without conflicts that the eight 16-byte rows of a matrix take, padded by 16 bytes every 256.

    Worked example: rows of 64 bytes start in chunks 0, 4, 0, 4, ... of eight: four rows meet.
    """
    found = {}
    for line in np.unique(line_bytes).tolist():
        starts = [(row * line + row * line // 256 * 16) // 16 % 8 for row in range(8)]
        found[line] = float(max(starts.count(chunk) for chunk in set(starts)))
    # ptxas and cp.async hide half of it behind other matrices
    return np.asarray([0.5 + 0.5 * found[line] for line in line_bytes.tolist()], dtype=np.float64)


def _makespans(blocks: Integers, resident: Integers, speeds: Floats) -> Floats:
    """When the last block ends, in times of one on a unit of speed 1: slots are given as they fall free."""
    pairs = np.stack([blocks, resident], axis=1)
    distinct, place = np.unique(pairs, axis=0, return_inverse=True)
    return np.asarray([_makespan(int(count), int(slots), speeds) for count, slots in distinct])[place.reshape(-1)]


MOST_SIMULATED = 4096
"""Blocks that are dispatched one by one; of more, all units are taken to end together."""


def _makespan(blocks: int, resident: int, speeds: Floats) -> float:
    if blocks > MOST_SIMULATED:
        return blocks / (resident * float(speeds.sum())) + 0.5
    slots = [(0.0, unit) for _ in range(resident) for unit in range(len(speeds))]
    heapq.heapify(slots)
    end = 0.0
    for _ in range(blocks):
        start, unit = heapq.heappop(slots)
        done = start + 1.0 / float(speeds[unit])
        end = max(end, done)
        heapq.heappush(slots, (done, unit))
    return end


def _slowed_clock(space: MatrixTileSpace, time_s: Floats) -> Floats:
    """Times as long by the board's power: voltage falls with the clock, so that power is its cube."""
    loops, product = space.predictions.loops, space.product
    computed = loops.blocks * loops.shared_trips * loops.register_trips * loops.flops_per_register_trip
    moved = loops.blocks * loops.shared_trips * loops.bytes_per_shared_trip + product.input_bytes
    watts = IDLE_W + (computed * JOULES_PER_FLOP + moved * JOULES_PER_BYTE) / time_s
    return np.asarray(np.maximum(1.0, watts / BOARD_W) ** (1 / 3), dtype=np.float64)
