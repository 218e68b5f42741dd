"""What fusing an epilogue into a product saves: bytes that need not move, kernels that need not start.

A product followed by steps 1 .. n may take the first c of them; the others are one element-wise kernel, or part of
the kernel that reads the result. Fused steps save the write and the read of the value between and a launch; in
exchange their arithmetic is no longer hidden behind that traffic. Worked example on an A100: a bias and ReLU over
3136 x 64 halves (0.4 MB, which stays in the L2 cache) save a launch of 2 us and 0.15 us of traffic, and cost 0.04 us.

It is a bound for ranking, without the product itself, which is the same in every form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine

US_PER_S = 1e6  # units, by definition
BYTES_PER_GB = 1e9  # likewise
CACHED_SHARE = 0.5
"""Share of a GPU's L2 cache up to which a tensor is taken to stay there until it is read."""

ACTIVATIONS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "hardswish": (5, ()),
    "silu": (1, ("sigmoid",)),
    "gelu_tanh": (6, ("tanh",)),
    "gelu": (5, ("erf",)),
    "softplus": (2, ("exp", "log")),
    "mish": (3, ("exp", "log", "tanh")),
    "cast": (0, ("convert",)),
}
"""Steps of an epilogue: plain instructions of one element, and functions. What is not here is itself one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpilogueStage:
    """Steps that are fused together or not at all; stage 0 is the product itself, which has no operands.

    ``read_bytes`` are those of the operands that the steps read beside the value; ``instructions`` those of all
    elements; ``launches`` what else must run first where they are fused (what fills a sum that is added to).
    """

    value_bytes: float
    read_bytes: float = 0.0
    instructions: float = 0.0
    launches: int = 0


def best_prefix(stages: Sequence[EpilogueStage], device: DeviceSpec, *, absorbed: bool) -> tuple[int, float]:
    """How many stages to fuse, and microseconds saved against fusing none.

    ``absorbed``: what reads the result is a kernel that computes the steps left to it as it reads (a sum, say).
    Of equal forms the longer: a kernel less to keep.
    """
    times = [_time_us(stages, count, device, absorbed) for count in range(1, len(stages) + 1)]
    best = min(range(len(times)), key=lambda index: (times[index], -index))
    return best, times[0] - times[best]


def _time_us(stages: Sequence[EpilogueStage], count: int, device: DeviceSpec, absorbed: bool) -> float:
    fused, rest = stages[:count], stages[count:]
    value, result = fused[-1].value_bytes, stages[-1].value_bytes
    time = sum(moved_us(stage.read_bytes, device) + instructions_us(stage.instructions, device) for stage in fused)
    time += 2 * moved_us(value, device) + sum(stage.launches for stage in fused) * Machine(device).launch_us
    if not rest:
        return time
    operands = sum(moved_us(stage.read_bytes, device) for stage in rest)
    arithmetic = sum(instructions_us(stage.instructions, device) for stage in rest)
    if absorbed:
        return time + operands
    beyond = max(0.0, arithmetic - operands - 2 * moved_us(value, device))
    return time + operands + beyond + 2 * moved_us(result, device) + Machine(device).launch_us


def moved_us(count: float, device: DeviceSpec) -> float:
    """Time to read or write so many bytes once."""
    memory = device.lowest_layer
    cached = memory.cache_bandwidth_gb_per_s is not None and count <= CACHED_SHARE * (memory.cache_bytes or 0)
    rate = memory.cache_bandwidth_gb_per_s if cached else memory.bandwidth_gb_per_s
    return 0.0 if rate is None else count / (rate * BYTES_PER_GB) * US_PER_S


def instructions_of(step: str, device: DeviceSpec) -> float:
    """Instructions, by the rate of multiply-adds, of one element of an epilogue's ``step``."""
    plain, functions = ACTIVATIONS.get(step, (0, (step,)))
    return plain + sum(map(Machine(device).instructions, functions))


def beside(multiply: float, change: float, workers: int) -> float:
    """Time of matrix units and of vector units, which take turns in each of a unit's ``workers``, blocks say.

    One worker does both in turn: 3 and 1 are 4. Of four, three multiply while one changes what it has made: 3.25.
    """
    return max(multiply + change / workers, change + multiply / workers)


def instructions_us(count: float, device: DeviceSpec) -> float:
    """Time of so many instructions of single lanes on the vector units."""
    rate = Machine(device).results_per_s("float32")
    return count / rate * US_PER_S if rate else 0.0
