"""CPU rows: what an instruction set offers, and a machine that stands for each.

The figures of an instruction set (`Isa`) are those of one core and hold wherever it is implemented; sizes, clocks and
counts belong to the named machine of each row, and `probe.py` replaces them by those of the machine at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..device_facts import LayerText, fact, spec_from_facts
from ..hal import DeviceSpec, Fact

NEHALEM = "Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on Nehalem"
INTEL_MANUAL = "Intel 64 and IA-32 Architectures Optimization Reference Manual, cache tables of the microarchitecture"
ARM_N1 = "Arm Neoverse N1 Software Optimization Guide"
ON_ZEN4 = "measured under KVM on an EPYC (Zen 4)"
# Cycles of a core for a register of float32 results, as this package writes the functions.
ZEN4_AVX2: Mapping[str, float] = {
    "exp": 15.7, "log": 21.8, "tanh": 14.5, "erf": 14.9, "sigmoid": 19.5, "divide": 3.5, "sqrt": 4.9
}  # fmt: skip
ZEN4_AVX512: Mapping[str, float] = {
    "exp": 13.5, "log": 28.8, "tanh": 16.6, "erf": 16.7, "sigmoid": 19.1, "divide": 5.5, "sqrt": 9.7
}  # fmt: skip
TWO_PIPES: Mapping[str, float] = {
    "exp": 8, "log": 15, "tanh": 25, "erf": 25, "sigmoid": 25, "divide": 10, "sqrt": 12
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Isa:
    """A SIMD instruction set as one core offers it; bytes per cycle are sustained loads into the layer above."""

    name: str
    row: str
    features: tuple[str, ...]  # LLVM's names of the features that a target must have
    register_count: int
    register_bytes: int
    register_name: str
    fma_pipes: int
    fma_latency_cycles: int
    loads_per_cycle: int
    l2_ways: int
    tlb_pages: int
    l1_bytes_per_cycle: float
    l2_bytes_per_cycle: float
    l3_bytes_per_cycle: float
    source: str
    latency_source: str
    register_note: str = "registers of the architecture"
    row_shares: Mapping[str, float] = field(default_factory=dict)
    function_cycles: Mapping[str, float] = field(default_factory=lambda: ZEN4_AVX2)
    function_source: str = f"{ON_ZEN4} with AVX2; taken over where no other was measured"


MODERN_LATENCY = "Skylake to Golden Cove, Zen 3 to Zen 5, Neoverse N1"

AVX512 = Isa(
    name="AVX-512",
    row="cpu-avx512",
    features=("avx512f", "avx512vl", "avx512bw", "avx512dq", "fma"),
    register_count=32,
    register_bytes=64,
    register_name="zmm",
    fma_pipes=2,
    fma_latency_cycles=4,
    loads_per_cycle=2,
    l2_ways=16,
    tlb_pages=3072,
    l1_bytes_per_cycle=128,
    l2_bytes_per_cycle=48,
    l3_bytes_per_cycle=10,
    source=INTEL_MANUAL,
    latency_source=MODERN_LATENCY,
    function_cycles=TWO_PIPES,
    function_source="instructions over two pipes; those that divide as measured on Cascade Lake",
)
AVX2 = Isa(
    name="AVX2",
    row="cpu-avx2",
    features=("avx2", "fma"),
    register_count=16,
    register_bytes=32,
    register_name="ymm",
    fma_pipes=2,
    fma_latency_cycles=4,
    loads_per_cycle=2,
    l2_ways=8,
    tlb_pages=1536,
    l1_bytes_per_cycle=64,
    l2_bytes_per_cycle=25,
    l3_bytes_per_cycle=10,
    source=INTEL_MANUAL,
    latency_source=MODERN_LATENCY,
)
NEON = Isa(
    name="NEON",
    row="cpu-neon",
    features=("neon",),
    register_count=32,
    register_bytes=16,
    register_name="v",
    fma_pipes=2,
    fma_latency_cycles=4,
    loads_per_cycle=2,
    l2_ways=8,
    tlb_pages=1024,
    l1_bytes_per_cycle=32,
    l2_bytes_per_cycle=16,
    l3_bytes_per_cycle=8,
    source=ARM_N1,
    latency_source=MODERN_LATENCY,
)
SSE2 = Isa(
    name="SSE2",
    row="cpu-sse2",
    features=("sse2",),
    register_count=14,
    register_bytes=16,
    register_name="xmm",
    fma_pipes=1,  # one multiplication and one addition start per cycle
    fma_latency_cycles=4,
    loads_per_cycle=1,
    l2_ways=8,
    tlb_pages=512,
    l1_bytes_per_cycle=16,
    l2_bytes_per_cycle=8,
    l3_bytes_per_cycle=5,
    source=NEHALEM,
    register_note="registers, 16 less 2 for products: an instruction overwrites one of its two operands",
    latency_source="Nehalem: the addition that a chain of accumulations waits for takes 3, Skylake's takes 4",
)
X86_ISAS = (AVX512, AVX2, SSE2)  # best first; every x86-64 has the last
LAUNCH_OVERHEAD_US = 0.7  # as `LAUNCH_SOURCE` says
LAUNCH_SOURCE = (
    "an empty region on this package's threads, measured on two cores of an EPYC (Zen 4); of more cores assumed"
)
# Assumed of all CPUs; the facts of `cpu_spec` say what of.
DISPATCH_NS = 100.0
HANDOFF_NS = 300.0
DRAM_GB_PER_S_PER_CORE = 12.0  # until a machine is known or measured: a channel or less of DDR4
DEFAULT_LINE_BYTES = 64  # of x86-64 and of most AArch64 cores, where the system does not say
PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuShape:
    """What differs between two CPUs of one instruction set, and where each comes from."""

    core_count: int
    clock_ghz: float
    line_bytes: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int | None
    dram_gb_per_s: float
    count_source: str
    clock_source: str
    cache_source: str
    dram_source: str
    whole_cores: float | None = None  # where ``core_count`` counts hyper-threads, which share a core's pipes and caches


def cpu_facts(isa: Isa, shape: CpuShape) -> tuple[Fact, ...]:
    """The facts of a CPU by arithmetic alone, device-wide (all cores).

    Example, AVX2 at 2.6 GHz on 14 cores: 2.6 x 8 lanes x 2 x 2 pipes x 14 = 1164.8 GFLOP/s in float32, and L1 serves
    2.6 x 64 bytes x 14 = 2329.6 GB/s.
    """
    cycles = shape.clock_ghz * (shape.whole_cores or shape.core_count)
    facts = [
        fact("unit_count", shape.core_count, "cores", shape.count_source),
        fact("teus_per_unit", 1, "count", "a core's FMA pipes act as one TEU"),
        fact("teu_lanes", isa.register_bytes // 4, "float32 lanes", f"{isa.name} register width / 4 bytes"),
        fact("clock_ghz", shape.clock_ghz, "GHz", shape.clock_source),
        fact("register_limit", isa.register_count, "count", f"{isa.name}: {isa.register_name} {isa.register_note}"),
        fact("register_bytes", isa.register_bytes, "bytes", f"{isa.name} architecture"),
        fact("fma_pipes", isa.fma_pipes, "per cycle", isa.source),
        fact("fma_latency_cycles", isa.fma_latency_cycles, "cycles", f"{isa.latency_source}; {isa.source}"),
        fact("loads_per_cycle", isa.loads_per_cycle, "per cycle", f"load ports of the register's width; {isa.source}"),
        fact("stores_per_cycle", 1, "per cycle", f"one store of the register's width; {isa.source}"),
        fact("l2_ways", isa.l2_ways, "lines", isa.source),
        fact("tlb_pages", isa.tlb_pages, "pages", f"second-level TLB; {isa.source}"),
        fact("page_bytes", PAGE_BYTES, "bytes", "small pages, the operating system's default"),
        fact("launch_overhead_us", LAUNCH_OVERHEAD_US, "us", LAUNCH_SOURCE),
        fact("dispatch_ns", DISPATCH_NS, "ns", "assumed: a call through a pointer with a handful of arguments"),
        fact("handoff_ns", HANDOFF_NS, "ns", "assumed: a cache line on its way between two cores, twice, and a poll"),
        fact("layers.L0.transaction_bytes", isa.register_bytes, "bytes", "one register"),
    ]
    facts += [
        fact(f"function_cycles.{name}", cycles, "cycles of a register", isa.function_source)
        for name, cycles in isa.function_cycles.items()
    ]
    facts += [
        fact(f"row_shares.{name}", share, "of the bandwidth", isa.source) for name, share in isa.row_shares.items()
    ]
    facts += _cache_facts(isa, shape, cycles)
    return tuple(facts + _peak_facts(isa, cycles))


def _cache_facts(isa: Isa, shape: CpuShape, cycles: float) -> list[Fact]:
    caches = [(shape.l1_bytes, isa.l1_bytes_per_cycle), (shape.l2_bytes, isa.l2_bytes_per_cycle)]
    if shape.l3_bytes is not None:
        caches.append((shape.l3_bytes, isa.l3_bytes_per_cycle))
    facts = []
    for index, (size, per_cycle) in enumerate(caches, start=1):
        arithmetic = f"clock x {per_cycle:g} bytes per cycle x cores; {isa.source}"
        facts.append(fact(f"layers.L{index}.capacity_bytes", size, "bytes", shape.cache_source))
        facts.append(fact(f"layers.L{index}.bandwidth_gb_per_s", cycles * per_cycle, "GB/s", arithmetic))
        facts.append(fact(f"layers.L{index}.transaction_bytes", shape.line_bytes, "bytes", shape.cache_source))
    lowest = len(caches) + 1
    facts.append(fact(f"layers.L{lowest}.bandwidth_gb_per_s", shape.dram_gb_per_s, "GB/s", shape.dram_source))
    facts.append(fact(f"layers.L{lowest}.transaction_bytes", shape.line_bytes, "bytes", shape.cache_source))
    return facts


def _peak_facts(isa: Isa, cycles: float) -> list[Fact]:
    lanes = isa.register_bytes // 4
    multiply_add = cycles * lanes * 2 * isa.fma_pipes
    rates: Mapping[str, tuple[float, str]] = {
        "float32": (multiply_add, "clock x lanes x 2 x fma_pipes x cores"),
        "float64": (multiply_add / 2, "half of float32: half the lanes"),
        "float16": (multiply_add, "as float32: LLVM computes in float32 where there is no float16 arithmetic"),
        "bfloat16": (multiply_add, "as float32: LLVM computes in float32"),
        "int32": (multiply_add / 2, "half of float32: multiply and add are two instructions"),
        "int8": (multiply_add / 2, "as int32: accumulated in int32 lanes without dot-product instructions"),
    }
    return [fact(f"peak_gflops.{key}", value, "GFLOP/s", source) for key, (value, source) in rates.items()]


def cpu_layers(isa: Isa, has_l3: bool) -> tuple[LayerText, ...]:
    """The memory layers of a CPU: registers, L1, L2, L3 if any, DRAM."""
    caches = [("L1 data cache", "unit"), ("L2 cache", "unit")] + ([("L3 cache", "device")] if has_l3 else [])
    texts = [LayerText(description=f"{isa.register_name} registers", scope="teu")]
    texts += [LayerText(description=text, scope="unit" if scope == "unit" else "device") for text, scope in caches]
    return (*texts, LayerText(description="DRAM", scope="device"))


TargetPairs = tuple[tuple[str, str | int | tuple[str, ...]], ...]
Code = Mapping[str, str | tuple[str, ...]]
"""The options of TVM's ``llvm`` target that code for a CPU is made with."""


def cpu_spec(
    name: str, description: str, isa: Isa, shape: CpuShape, target: TargetPairs, aliases: tuple[str, ...] = ()
) -> DeviceSpec:
    """A CPU with the figures of `cpu_facts`."""
    return spec_from_facts(
        name=name,
        kind="cpu",
        description=description,
        aliases=aliases,
        target=target,
        layers=cpu_layers(isa, shape.l3_bytes is not None),
        facts=cpu_facts(isa, shape),
    )


def llvm_target(code: Code) -> TargetPairs:
    return tuple(sorted({"kind": "llvm", **code}.items()))


def _row(isa: Isa, description: str, aliases: tuple[str, ...], code: Code, shape: CpuShape) -> DeviceSpec:
    return cpu_spec(isa.row, description, isa, shape, llvm_target(code), aliases)


CPU_AVX512 = _row(
    AVX512,
    "any AVX-512 CPU, sized as an Intel Xeon Platinum 8168 (24 cores)",
    ("avx512", "avx-512", "x86-64-v4"),
    {"mcpu": "x86-64-v4", "mattr": ("-prefer-256-bit",)},
    CpuShape(
        core_count=24,
        clock_ghz=2.5,
        line_bytes=64,
        l1_bytes=32 * 1024,
        l2_bytes=1024 * 1024,
        l3_bytes=33 * 1024 * 1024,
        dram_gb_per_s=128.0,
        count_source="Intel Xeon Platinum 8168 (the IPU host of Roller §5), product table",
        clock_source="Intel Xeon Scalable specification update: all-core turbo under AVX-512",
        cache_source="Intel Xeon Platinum 8168, product table; Intel optimization manual (Skylake Server)",
        dram_source="6 channels DDR4-2666 x 8 bytes",
    ),
)
CPU_AVX2 = _row(
    AVX2,
    "any AVX2 CPU, sized as an Intel Xeon E5-2690 v4 (14 cores)",
    ("avx2", "x86-64-v3"),
    {"mcpu": "x86-64-v3"},
    CpuShape(
        core_count=14,
        clock_ghz=2.6,
        line_bytes=64,
        l1_bytes=32 * 1024,
        l2_bytes=256 * 1024,
        l3_bytes=35 * 1024 * 1024,
        dram_gb_per_s=76.8,
        count_source="Intel Xeon E5-2690 v4 (the V100 host of Roller §5), product table",
        clock_source="Intel Xeon E5-2690 v4, product table: base clock",
        cache_source="Intel Xeon E5-2690 v4, product table; Intel optimization manual (Broadwell)",
        dram_source="4 channels DDR4-2400 x 8 bytes",
    ),
)
CPU_SSE2 = _row(
    SSE2,
    "any other x86-64 CPU, sized as an Intel Xeon X5570 (4 cores)",
    ("sse2", "sse", "x86-64", "x86-64-v2"),
    {"mcpu": "x86-64"},
    CpuShape(
        core_count=4,
        clock_ghz=2.93,
        line_bytes=64,
        l1_bytes=32 * 1024,
        l2_bytes=256 * 1024,
        l3_bytes=8 * 1024 * 1024,
        dram_gb_per_s=32.0,
        count_source="Intel Xeon X5570, product table",
        clock_source="Intel Xeon X5570, product table: base clock",
        cache_source="Intel Xeon X5570, product table; Intel optimization manual (Nehalem)",
        dram_source="3 channels DDR3-1333 x 8 bytes",
    ),
)
CPU_NEON = _row(
    NEON,
    "any AArch64 CPU with NEON, sized as an AWS Graviton2 (64 Neoverse N1 cores)",
    ("neon", "aarch64"),
    {"mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"},
    CpuShape(
        core_count=64,
        clock_ghz=2.5,
        line_bytes=64,
        l1_bytes=64 * 1024,
        l2_bytes=1024 * 1024,
        l3_bytes=32 * 1024 * 1024,
        dram_gb_per_s=204.8,
        count_source="AWS Graviton2 as announced: 64 Neoverse N1 cores",
        clock_source="AWS Graviton2 as announced",
        cache_source="AWS Graviton2 as announced; Arm Neoverse N1 Technical Reference Manual",
        dram_source="8 channels DDR4-3200 x 8 bytes",
    ),
)
CPU_ROWS = (CPU_AVX512, CPU_AVX2, CPU_SSE2, CPU_NEON)
