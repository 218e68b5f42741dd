"""Rows of GPUs from what the micro-benchmark's program printed; the program compiled."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.compilers import needs_nvcc
from tvm_ext.cli.app import main
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.gpu_measurement import INSTRUCTIONS, LIMITS, measured_gpu, read_measurement
from tvm_ext.devices.row_files import read_row
from tvm_ext.errors import InputError
from tvm_ext.toolchains.cuda_toolchain import find_nvcc

SOURCE = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu" / "microbench.cu"
A100 = lookup("nvidia-a100")
FIGURES = {
    "launch_overhead_us": 2.4, "barrier_ns": 18.0, "handoff_ns": 640.0, "layers.L1.bandwidth_gb_per_s": 18800.0,
    "layers.L1.latency_ns": 17.1, "layers.L2.cache_bandwidth_gb_per_s": 5200.0, "layers.L2.cache_latency_ns": 190.0,
    "layers.L2.bandwidth_gb_per_s": 1390.0, "layers.L2.latency_ns": 380.0,
    **{f"instruction_gops.{name}": 9600.0 for name in INSTRUCTIONS},
    "instruction_gops.float16.fma": 38000.0, "instruction_gops.float64.fma": 4800.0,
}  # fmt: skip


def printed(**changes: Any) -> dict[str, Any]:
    """What the program prints on an A100, with other ``figures`` or fields."""
    figures = {**FIGURES, **changes.pop("figures", {})}
    about = {"schema": 1, "device": "NVIDIA A100-SXM4-40GB", "major": 8, "minor": 0, "units": 108, "clock_ghz": 1.41}
    return {**about, "figures": {name: value for name, value in figures.items() if value is not None}, **changes}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "measured.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_measured_figures_become_the_row(tmp_path: Path) -> None:
    row = tmp_path / "row.json"
    path = written(tmp_path, printed())
    with pytest.raises(SystemExit, match="0"):
        main(["devices", "--import", str(path), "--output", str(row), "--json"])
    made = read_row(row)
    assert made.name == "nvidia-a100" and "measured on a NVIDIA A100-SXM4-40GB" in str(made.row)
    assert (made.launch_overhead_us, made.barrier_ns, made.handoff_ns) == (2.4, 18.0, 640.0)
    assert made.layer("L2").cache_bandwidth_gb_per_s == 5200.0 and made.layer("L1").latency_ns == 17.1
    assert made.peak_gflops_of("float32") == 19200.0 and made.peak_gflops_of("float16") == 76000.0
    assert made.peak_gflops_of("float16_tensor") == A100.peak_gflops_of("float16_tensor")
    assert dict(made.instruction_gops)["float32.exp"] == 9600.0
    former = [item for item in made.facts if item.field == "layers.L2.bandwidth_gb_per_s" and not item.used]
    assert 1555.0 in [item.value for item in former]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "no measurement of a GPU"),
        ("[]", "no measurement of a GPU"),
        ("{}", "it has no 'schema'"),
        (printed(schema=2), "its schema is 2"),
        (printed(units=0), "0 units at 1.41 GHz"),
        (printed(clock_ghz="fast"), "clock_ghz is 'fast'"),
        *((printed(figures={name: None}), f"the figure {re.escape(name)} is missing") for name in list(FIGURES)[:3]),
        *((printed(figures={name: 0.0}), f"{re.escape(name)} is 0 ") for name in FIGURES),
        *((printed(figures={name: -limits[1]}), "is not between") for name, limits in LIMITS.items()),
        *((printed(figures={name: 2 * limits[2]}), "is not between") for name, limits in LIMITS.items()),
        (printed(figures={"layers.L2.latency_ns": float("nan")}), "latency_ns is nan"),
        (printed(figures={"instruction_gops.float32.fma": 1e7}), "is not between 0 and 155935"),
        (printed(figures={"layers.L2.cache_bandwidth_gb_per_s": 900.0}), "less than memory's"),
        (printed(figures={"unit_count": 4.0}), "no row has the figure unit_count"),
        (printed(figures={"launch_overhead_us": True}), "launch_overhead_us is True"),
    ],
)
def test_nonsense_is_refused_by_name(content: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        read_measurement(written(tmp_path, content))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"major": 9}, "has compute capability 9.0"),
        ({"units": 98}, "98 units; nvidia-a100 has"),
        ({"figures": {"layers.L2.bandwidth_gb_per_s": 100.0}}, "nvidia-a100 has 1555"),
        ({"figures": {"instruction_gops.float32.fma": 1000.0}}, "peak_gflops.float32 was measured as 2000 GFLOP/s"),
    ],
)
def test_another_device_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        measured_gpu(A100, read_measurement(written(tmp_path, printed(**changes))))


def test_what_the_program_prints_is_what_a_row_takes() -> None:
    names = re.findall(r'figure\("([^"]+)"', SOURCE.read_text())
    assert names == [*LIMITS, *(f"instruction_gops.{name}" for name in INSTRUCTIONS)] or set(names) == set(FIGURES)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a"])
def test_the_program_compiles_and_no_chain_is_simplified(architecture: str, tmp_path: Path) -> None:
    """Each chain has its 128 instructions in PTX: none was folded into another."""
    path = tmp_path / "microbench.ptx"
    command = [
        str(find_nvcc().path),
        "-O3",
        "-std=c++17",
        f"-arch={architecture}",
        "-ptx",
        str(SOURCE),
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True, timeout=300)
    kernels = re.split(r"\.entry ", path.read_text())[1:]
    chains = {
        operation: max(kernel.count(operation) for kernel in kernels)
        for operation in (
            "fma.rn.f32", "add.f32", "max.f32", "ex2.approx.ftz.f32", "cvt.rn.f16.f32", "fma.rn.f16x2", "fma.rn.f64",
            "mad.lo.s32", "add.s32", "dp4a.s32.s32",
        )
    }  # fmt: skip
    assert {operation: count for operation, count in chains.items() if count < 128} == {}
