"""A CPU as the probe might find it, the plan of its micro-benchmarks, and figures that they might give."""

from __future__ import annotations

import dataclasses

from tvm_ext.devices import probe
from tvm_ext.devices.cpu_info import CacheInfo, CpuInfo, read_cpu_info
from tvm_ext.devices.cpu_measurement import CpuMeasurement
from tvm_ext.devices.microbench import BenchPlan

FIGURES = CpuMeasurement(
    clock_ghz=2.0,
    float32_gflops_one_core=128.0,
    float32_gflops=250.0,
    float64_gflops=125.0,
    streams_gb_per_s=(("L1", 500.0), ("L2", 200.0), ("L3", 100.0)),
    launch_overhead_us=2.0,
    spread=0.1,
)


def plan_of(**changes: object) -> BenchPlan:
    spec = probe.probe_cpu()
    return dataclasses.replace(probe.bench_plan(spec, read_cpu_info()), **changes)


def cpu_info_of(**changes: object) -> CpuInfo:
    caches = (
        CacheInfo(level=1, size_bytes=48 * 1024, line_bytes=64, sharer_count=2),
        CacheInfo(level=2, size_bytes=1024 * 1024, line_bytes=64, sharer_count=2),
    )
    info = CpuInfo(
        machine=read_cpu_info().machine, model="a test's CPU", features=read_cpu_info().features, caches=caches
    )
    return dataclasses.replace(info, **changes)
