"""One answer to which layer holds so many bytes, and to what starting a kernel takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tvm_ext
from tests.unit.kernels import cpu
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import BETWEEN_CORES, FUNCTIONS, OF_ONE_UNIT, WARM, Holding, Machine

KIB = 1024
CAPACITIES = (2, 32, 1024, 8192, None)  # KiB of registers, L1, L2, L3 and memory


def machine(**fields: object) -> Machine:
    """Two cores with caches of round sizes; L3 is theirs together."""
    spec: DeviceSpec = cpu()
    assert len(spec.layers) == len(CAPACITIES)
    layers = tuple(
        replace(layer, capacity_bytes=None if size is None else size * KIB, scope="unit" if level < 3 else "device")
        for level, (layer, size) in enumerate(zip(spec.layers, CAPACITIES, strict=True))
    )
    return Machine(replace(spec, layers=layers, unit_count=2, **fields))


@pytest.mark.parametrize(
    ("rule", "kib", "held"),
    [
        (WARM, 1, "L2"),
        (WARM, 1024, "L2"),
        (WARM, 8192, "L3"),
        (WARM, 8193, "L4"),
        (OF_ONE_UNIT, 32, "L1"),
        (OF_ONE_UNIT, 768, "L2"),
        (OF_ONE_UNIT, 3072, "L3"),
        (OF_ONE_UNIT, 3073, "L4"),
        (BETWEEN_CORES, 1, "L3"),
        (BETWEEN_CORES, 6144, "L3"),
        (BETWEEN_CORES, 6145, "L4"),
    ],
)
def test_each_rule_has_its_holder(rule: Holding, kib: int, held: str) -> None:
    assert machine().holder(kib * KIB, rule).name == held


@pytest.mark.parametrize("rule", [WARM, OF_ONE_UNIT, BETWEEN_CORES])
def test_no_rule_has_a_layer_hold_whose_rate_nobody_knows(rule: Holding) -> None:
    spec = machine().spec
    silent = replace(spec.layers[3], bandwidth_gb_per_s=None)
    layers = (*spec.layers[:3], silent, spec.layers[4])
    assert Machine(replace(spec, layers=layers)).holder(2048 * KIB, rule).name == "L4"


def test_one_core_starts_no_parallel_region() -> None:
    several, alone = machine(launch_overhead_us=2.0), Machine(replace(cpu(), unit_count=1, launch_overhead_us=2.0))
    assert (several.fork_s, alone.fork_s, alone.launch_s) == (pytest.approx(2e-6), 0.0, pytest.approx(2e-6))
    assert machine(launch_overhead_us=None).launch_us == 0.0


def test_measured_rates_of_instructions_overrule_the_peak() -> None:
    spec = replace(cpu(), peak_gflops=(("float32", 100.0),), instruction_gops=(("float32.max", 20.0),))
    rates = [Machine(spec).results_per_s("float32", kind) for kind in ("fma", "add", "max")]
    assert rates == [50e9, 50e9, 20e9]  # a peak counts a multiply-add as two
    assert Machine(spec).results_per_s("float64") == 0.0


def test_functions_take_what_the_row_says_of_them_else_what_was_counted() -> None:
    spec = replace(cpu(), fma_pipes=2, function_cycles=(("tanh", 14.5),))
    assert [Machine(spec).instructions(kind) for kind in ("add", "tanh", "exp")] == [1, 29.0, FUNCTIONS["exp"][0]]
    assert Machine(lookup("nvidia-a100")).instructions("exp") == 64 / 16
    assert Machine(lookup("nvidia-h100")).instructions("sigmoid") == FUNCTIONS["sigmoid"][0] + 2 * 128 / 16


def test_nobody_else_asks_the_table_for_a_launch() -> None:
    package = Path(tvm_ext.__file__).parent
    asking = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.parts[len(package.parts)] != "devices" and "launch_overhead_us" in path.read_text(encoding="utf-8")
    }
    assert asking == {"pass_pipeline.py"}  # which sets it, for bodies that are dispatched and not launched
