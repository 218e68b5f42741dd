"""Chains of products in one GPU kernel (Bolt, §3.1): what such a kernel takes of a device, and when it pays.

A threadblock computes its rows of the first product in all columns, then, of these alone, its rows of the second, and
so on: ThreadBlock_N is N of every product. The values between stay in the registers of the warp that computed them
(*registers*: Warp_N is N too) or in shared memory (*shared*).

Worked example, (16384, 256) x (256, 64) x (64, 16) in halves: apart, the result between is written and read, 4 MB of
13, and a launch follows; in one kernel 9 MB are moved, and the second factor, 2 KB, is read again by every block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Literal

from tvm_ext.devices.gpu import FRAGMENT, REGISTER_BYTES, WARP
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit
from tvm_ext.support.arithmetic import ceil_div

Residence = Literal["registers", "shared memory"]
"""Where the values between two products stay."""

ChainUnits = Literal["matrix units", "vector units"]

MIN_GAIN = 0.95
"""Share of the time apart below which a chain is taken: the model of one kernel has more that may go wrong."""

WARPS_PER_TEU = 2
"""Warps that a scheduler needs to hide one's waiting behind another's work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainProduct:
    """One product of a chain: its columns, its reduction, and bytes that its epilogue reads from memory."""

    columns: int
    depth: int
    weight_bytes: float
    epilogue_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductChain:
    """A chain of products of ``rows`` rows: each one's columns are the reduction of the next.

    ``input_bytes`` is the first factor's tensor (of a convolution the image), ``dtype`` that of all factors,
    ``output_itemsize`` in bytes.
    """

    rows: int
    products: tuple[ChainProduct, ...]
    dtype: str
    itemsize: int
    input_bytes: float
    output_itemsize: float

    def __post_init__(self) -> None:
        assert self.products
        for first, second in pairwise(self.products):
            assert first.columns == second.depth

    @property
    def result_bytes(self) -> float:
        return self.rows * self.products[-1].columns * self.output_itemsize

    @property
    def between_bytes(self) -> float:
        """What one kernel neither writes nor reads again."""
        return 2.0 * sum(self.rows * product.columns * self.itemsize for product in self.products[:-1])

    @property
    def singles(self) -> tuple[ProductChain, ...]:
        """Each product by itself, what lies between in memory."""
        last = len(self.products) - 1
        return tuple(
            replace(
                self,
                products=(product,),
                input_bytes=self.input_bytes if n == 0 else float(self.rows * product.depth * self.itemsize),
                output_itemsize=self.output_itemsize if n == last else float(self.itemsize),
            )
            for n, product in enumerate(self.products)
        )

    @property
    def least_bytes(self) -> float:
        """What one kernel has to move: the input, the factors, what epilogues read, the result."""
        own = sum(product.weight_bytes + product.epilogue_bytes for product in self.products)
        return self.input_bytes + own + self.result_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTile:
    """A threadblock's part in one product: all columns, padded, and the reduction step.

    ``across`` is the number of warps (matrix units) or threads (vector units) that share a row's columns.
    """

    columns: int
    depth: int
    steps: int
    across: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainTile:
    """How a threadblock of ``threads`` computes ``rows`` rows of a chain; ``registers`` are those of a thread."""

    units: ChainUnits
    residence: Residence
    rows: int
    threads: int
    products: tuple[ProductTile, ...]
    registers: int
    shared_bytes: int

    @property
    def use(self) -> BlockUse:
        return BlockUse(threads=self.threads, registers=self.registers, shared_bytes=self.shared_bytes)

    @property
    def warps(self) -> int:
        return self.threads // WARP

    def warp_rows(self, position: int) -> int:
        """Rows of a warp's tile of the product at ``position``, on matrix units."""
        return self.rows * self.products[position].across // self.warps

    def __str__(self) -> str:
        columns = " -> ".join(str(product.columns) for product in self.products)
        return f"{self.rows} rows x {columns} columns, kept in {self.residence}, {self.threads} threads"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainTime:
    """Predicted time of one kernel, and what binds it: "compute", "L1", "L2", "power" or "launch".

    ``busy_s`` is that of the busiest resource at full clock; ``loads_s`` that of all memory layers one after the other,
    global memory's by what is asked of the unit with most blocks: a unit without asks for nothing.
    """

    time_s: float
    busy_s: float
    loads_s: float
    compute_s: float
    bound: str

    @property
    def order(self) -> tuple[float, float, float]:
        """Fastest first; equal ones by what would be faster at full clock, and then by what loads least."""
        return self.time_s, self.busy_s, self.loads_s


def predict_chain(chain: ProductChain, tile: ChainTile, device: DeviceSpec) -> ChainTime:
    """Time of the chain's kernel; compute, shared memory and global memory overlap, so that the slowest binds."""
    machine, blocks = Machine(device), ceil_div(chain.rows, tile.rows)
    rounds = ceil_div(blocks, device.unit_count)  # blocks that the busiest unit runs
    resident = max(1, min(blocks_per_unit(tile.use, device), rounds))
    filled = min(1.0, resident * tile.threads / (WARPS_PER_TEU * device.teus_per_unit * device.teu_lanes))
    steps = [product.depth * product.steps for product in tile.products]
    work = sum(2.0 * tile.rows * p.columns * depth for p, depth in zip(tile.products, steps, strict=True))
    rate = _rate(chain.dtype, tile.units, device)
    compute = rounds * work * device.unit_count / (rate * filled)
    shared = rounds * _shared_traffic(chain, tile) * device.unit_count / (machine.rate("L1") * filled)
    weights = sum(p.columns * depth for p, depth in zip(tile.products, steps, strict=True))
    loaded = (tile.rows * steps[0] + weights) * chain.itemsize
    cache = rounds * loaded * device.unit_count / machine.cache_rate
    memory = max(cache, chain.least_bytes / machine.rate("L2"))
    times = {"compute": compute, "L1": shared, "L2": memory}
    busy = max(times.values())
    times["power"] = device.least_multiplying_s(blocks * work, _peak(chain.dtype, tile.units))
    bound = max(times, key=lambda name: times[name])
    launch = machine.launch_s
    return ChainTime(
        time_s=times[bound] + launch,
        busy_s=busy,
        loads_s=shared + cache + memory * rounds * device.unit_count / blocks,
        compute_s=compute,
        bound="launch" if launch > times[bound] else bound,
    )


def separate_s(chain: ProductChain, device: DeviceSpec, units: ChainUnits) -> float:
    """The least that the chain takes as a kernel for each product: each one's roof, and a launch."""
    powers = [device.least_multiplying_s(_flops(one), _peak(one.dtype, units)) for one in chain.singles]
    roofs = zip(_roofs(chain, device, units), powers, strict=True)
    return sum(Machine(device).launch_s + max(*roof, power) for roof, power in roofs)


def _roofs(chain: ProductChain, device: DeviceSpec, units: ChainUnits) -> list[tuple[float, float]]:
    """Of each product apart the least time of its arithmetic, and of its traffic with memory."""
    return [
        (_flops(one) / _rate(one.dtype, units, device), one.least_bytes / Machine(device).rate("L2"))
        for one in chain.singles
    ]


def _flops(single: ProductChain) -> float:
    """Of a chain of one product."""
    return 2.0 * single.rows * single.products[0].columns * single.products[0].depth


def why_apart(chain: ProductChain, fused: ChainTime, device: DeviceSpec, units: ChainUnits) -> str | None:
    """None where one kernel pays, else why not; ``units`` are those that compute the products apart.

    It saves traffic and launches, no arithmetic: products that are bound by that are better off with tiles of their
    own (Bolt fuses memory-bound ones alone). Worked example, A100, 16384 x 256 x 64 x 16 in float32: 29 us of
    arithmetic, 17 us of traffic and two launches of 2 us.
    """
    arithmetic, traffic = (sum(part) for part in zip(*_roofs(chain, device, units), strict=True))
    if arithmetic > traffic + len(chain.products) * Machine(device).launch_s:
        return f"bound by arithmetic: {arithmetic * 1e6:.1f} us of it, {traffic * 1e6:.1f} us of traffic"
    apart = separate_s(chain, device, units)
    if fused.time_s < MIN_GAIN * apart:
        return None
    times = f"predicted {fused.time_s * 1e6:.1f} us in one kernel, {apart * 1e6:.1f} us apart"
    return f"{times}, bound by {fused.bound}"


def _shared_traffic(chain: ProductChain, tile: ChainTile) -> float:
    """Bytes that a block reads from and writes to shared memory."""
    kept = tile.residence == "registers"
    total = 0.0
    for position, product in enumerate(tile.products):
        depth = product.depth * product.steps
        staged = product.columns + (tile.rows if position == 0 or not kept else 0)
        if tile.units == "matrix units":
            left = 0 if kept and position else tile.warp_rows(position)
            fragments = tile.warps * (left + product.columns // product.across)
            total += (fragments + staged) * depth * chain.itemsize
            continue
        # a warp reads each of its rows and columns once: lanes that share one are served together
        down = tile.threads // product.across
        lanes_across = min(product.across, WARP)
        lanes_down = min(WARP // lanes_across, down)
        rows, columns = tile.rows // down * lanes_down, product.columns // product.across * lanes_across
        total += (ceil_div(tile.threads, WARP) * (rows + columns) + staged) * depth * REGISTER_BYTES
    return total


def _rate(dtype: str, units: ChainUnits, device: DeviceSpec) -> float:
    """Operations per second of all units; unbounded where the table does not say."""
    rate = device.emitted_gflops_of(_peak(dtype, units))
    return inf if rate is None else rate * 1e9


def _peak(dtype: str, units: ChainUnits) -> str:
    """The key of the rate in the device tables."""
    return f"{dtype}_tensor" if units == "matrix units" else "float32"


def padded(extent: int) -> int:
    """``extent`` in whole fragments."""
    return ceil_div(extent, FRAGMENT) * FRAGMENT
