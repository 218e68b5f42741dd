"""CPUs that were measured once and written down: what a build constructed there can be constructed anywhere.

Their code is that of the instruction set alone (x86-64-v4 or v3), so that it runs on every machine which has that;
`CPU_XEON_AMX_TILES` alone is for the machine's own instructions.
``TVM_EXT_CPU`` makes one of them stand for this machine; the tests run under them.
"""

from __future__ import annotations

from dataclasses import replace

from ..cpu_measurement import CpuMeasurement, with_measurement
from ..hal import DeviceSpec
from .cpus import AVX2, AVX512, Code, CpuShape, Isa, cpu_spec, llvm_target

KIB, MIB = 1024, 1024 * 1024  # bytes, by definition (IEC 80000-13)
WIDE: Code = {"mcpu": "x86-64-v4", "mattr": ("-prefer-256-bit",)}
NARROW: Code = {"mcpu": "x86-64-v3"}


def _recorded(name: str, what: str, isa: Isa, code: Code, shape: CpuShape, measurement: CpuMeasurement) -> DeviceSpec:
    spec = cpu_spec(name, f"{what}, as measured once", isa, shape, llvm_target(code))
    return _without_echoes(with_measurement(spec, measurement, f"on {what}"))


def _without_echoes(spec: DeviceSpec) -> DeviceSpec:
    """``spec`` without overruled facts that say the same as what overrules them (2 pipes by table, 2 as measured)."""
    used = {fact.field: fact.value for fact in spec.facts if fact.used}
    return replace(spec, facts=tuple(fact for fact in spec.facts if fact.used or fact.value != used[fact.field]))


def _shape(clock_ghz: float, l1_kib: int, l2_kib: int, l3_bytes: int, l3_source: str = "sysfs") -> CpuShape:
    """Two cores with the caches that the operating system of the measured machine described."""
    return CpuShape(
        core_count=2,
        clock_ghz=clock_ghz,
        line_bytes=64,
        l1_bytes=l1_kib * KIB,
        l2_bytes=l2_kib * KIB,
        l3_bytes=l3_bytes,
        dram_gb_per_s=24.0,
        count_source="the measured machine",
        clock_source="/proc/cpuinfo, which under a hypervisor is only a guess",
        cache_source="sysfs, a core's share" if l3_source == "sysfs" else l3_source,
        dram_source="12 GB/s per core, assumption until measured",
    )


CPU_EPYC_ZEN5 = _recorded(
    "cpu-epyc-zen5",
    "two cores of an AMD EPYC (Zen 5) under KVM",
    AVX512,
    WIDE,
    _shape(2.6, 48, 1024, 32 * MIB),
    CpuMeasurement(
        clock_ghz=3.95,
        float32_gflops_one_core=253.0,
        float32_gflops=507.0,
        float64_gflops=253.5,
        streams_gb_per_s=(("L1", 1020.0), ("L2", 465.0), ("L3", 230.0), ("L4", 45.0)),
        launch_overhead_us=0.7,
        spread=0.06,
    ),
)
CPU_CASCADE_LAKE = _recorded(
    "cpu-cascade-lake",
    "two cores of an Intel Xeon at 2.5 GHz (Cascade Lake) under KVM",
    AVX512,
    WIDE,
    _shape(2.5, 32, 1024, 37486592),
    CpuMeasurement(
        clock_ghz=3.2,
        float32_gflops_one_core=178.9,
        float32_gflops=356.3,
        float64_gflops=178.4,
        streams_gb_per_s=(("L1", 558.3), ("L2", 216.6), ("L3", 48.3), ("L4", 22.6)),
        launch_overhead_us=0.757,
        spread=0.124,
    ),
)
XEON_AMX = CpuMeasurement(
    clock_ghz=4.09,
    float32_gflops_one_core=242.7,
    float32_gflops=484.5,
    float64_gflops=247.4,
    streams_gb_per_s=(("L1", 713.6), ("L2", 369.1), ("L3", 59.4), ("L4", 35.1)),
    launch_overhead_us=0.799,
    spread=0.060,
)
XEON_SHAPE = _shape(2.5, 48, 2048, 64 * MIB, "the buffers of its measurement; the last cache is 64 MiB or more")
CPU_XEON_AMX = _recorded(
    "cpu-xeon-amx", "two cores of an Intel Xeon with AMX under KVM", AVX512, WIDE, XEON_SHAPE, XEON_AMX
)
CPU_XEON_AMX_TILES = _recorded(
    "cpu-xeon-amx-tiles",
    "two cores of an Intel Xeon with AMX under KVM, with code that uses AMX",
    AVX512,
    {"mcpu": "sapphirerapids", "mattr": ("-prefer-256-bit",)},
    XEON_SHAPE,
    XEON_AMX,
)
CPU_CASCADE_LAKE_AVX2 = _recorded(
    "cpu-cascade-lake-avx2",
    "two cores of an Intel Xeon at 2.5 GHz (Cascade Lake) under KVM, with AVX2 alone",
    AVX2,
    NARROW,
    _shape(2.5, 32, 1024, 37486592),
    CpuMeasurement(
        clock_ghz=3.2,
        float32_gflops_one_core=93.2,
        float32_gflops=178.8,
        float64_gflops=89.4,
        streams_gb_per_s=(("L1", 312.1), ("L2", 155.6), ("L3", 49.8), ("L4", 22.7)),
        launch_overhead_us=0.726,
        spread=0.046,
    ),
)
RECORDED_ROWS = (CPU_EPYC_ZEN5, CPU_CASCADE_LAKE, CPU_XEON_AMX, CPU_XEON_AMX_TILES, CPU_CASCADE_LAKE_AVX2)
