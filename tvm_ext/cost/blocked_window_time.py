"""What a window over blocks of channels takes on a CPU, and the register tile that its kernel has."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from tvm_ext.analysis.computation_exprs import tensor_bytes, tensor_expr_of
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.window import Window
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import WARM, Machine
from tvm_ext.ir.build_ir import lanes_of
from tvm_ext.support.arithmetic import ceil_div

from .perf_model import MEMORY_OVERLAP
from .register_tiles import overlapped
from .window_layouts import planes_of
from .window_time import ACCUMULATOR_SHARE

MOST_COLUMNS = 12
"""Columns of a register tile: beyond, code grows, and the latency of multiply-adds is hidden already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedWindowTile:
    """Rows of a task, and columns of a register tile."""

    band: int
    columns: int


@dataclass(frozen=True, slots=True)
class BlockedWindowClock:
    """What ``window`` with its fused ``epilogue`` takes on ``device``."""

    window: Window
    epilogue: tuple[Computation, ...]
    device: DeviceSpec

    @property
    def registers(self) -> int:
        """Registers of a block of channels."""
        lane = self.window.lane
        assert lane is not None, "a window over blocks has lanes"
        return ceil_div(self.window.anchor.extent(lane), lanes_of(self.window.dtype, self.device.register_bytes))

    def usual_tile(self) -> BlockedWindowTile:
        """As many columns as registers hold, evenly divided. Units divide blocks of channels, or the rows of a result
        that their own caches do not hold.

        1x1 convolutions around divide pixels where there are many: units then read what they wrote. On two cores of a
        Zen 3 what the other one wrote comes at 13 GB/s, what lies in L3 at 50. MobileNetV2's depthwise convolutions at
        56 x 56 with the 1x1 ones behind them took 543 us by channels and 503 us by rows, those at 14 x 14 164 and 183.

        Worked example, 16 registers: 10 hold sums; 28 columns are 3 tiles of 10, 10 and 8, and 14 are 2 of 7.
        """
        x, y, units = self.window.x, self.window.y, self.device.unit_count
        most = min(MOST_COLUMNS, max(1, int(self.device.register_limit * ACCUMULATOR_SHARE) // self.registers))
        columns = ceil_div(x.extent, ceil_div(x.extent, most))
        bands, planes = 1, planes_of(self.window)
        if tensor_bytes(self.window.anchor.target) > units * Machine(self.device).own_bytes or planes < units:
            bands = units // gcd(units, prod(self.window.anchor.extent(v) for v in self.window.outer[:-1]))
        return BlockedWindowTile(band=ceil_div(y.extent, bands), columns=columns)

    def seconds(self, tile: BlockedWindowTile) -> float:
        """Seconds on all units, but for starting them: multiply-adds and loads of the taps that meet an element.

        Each multiply-add loads an element, and each tap's weights serve a tile.
        """
        window, device, machine = self.window, self.device, Machine(self.device)
        x, y = window.x, window.y
        met = sum(len(x.outputs_of(tap)) for tap in range(x.taps)) * sum(len(y.outputs_of(t)) for t in range(y.taps))
        tiles = y.extent * ceil_div(x.extent, tile.columns)
        loads = met + (tiles * y.taps * x.taps if len(window.anchor.loads()) > 1 else 0)
        busy = max(met / device.fma_rate, loads / device.load_rate) + y.extent * x.extent / device.store_rate
        latency = tiles * y.taps * x.taps * (device.fma_latency_cycles or 0) / 2
        tasks = planes_of(window) * ceil_div(y.extent, tile.band)
        waves = ceil_div(tasks, device.unit_count) * device.unit_count / tasks
        cycles = self.registers * planes_of(window) * max(busy, latency) * waves
        compute_s = cycles / machine.hz / device.unit_count
        return overlapped([compute_s, self.moved_bytes() / machine.held_rate(self.moved_bytes(), WARM)], MEMORY_OVERLAP)

    def moved_bytes(self) -> float:
        """Each tensor once."""
        expr = self.expression()
        extra = sum(computation.extra_bytes_per_element for computation in expr.epilogue)
        moved = sum(access.itemsize_bytes * prod(access.shape) for access in expr.accesses)
        return float(moved + extra * prod(expr.output.shape))

    def expression(self) -> TensorExpr:
        return tensor_expr_of(self.window.anchor, name=self.window.anchor.name, epilogue=self.epilogue)
