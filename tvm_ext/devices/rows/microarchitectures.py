"""CPU rows by microarchitecture: what a core does per cycle, and a machine whose sizes stand for its kind.

`probe.py` finds the row of the machine at hand by its identification (CPUID's family and model, MIDR's implementer and
part), and takes caches and the number of cores from the operating system. Nothing is measured by a build, so that two
machines of one kind, or one machine on two days, construct the same kernels.

Rates are of sustained loads by one core into the layer above. Those of Cascade Lake, Golden Cove, Zen 3, Zen 4 and
Zen 5 were measured by `tvm-ext devices --measure` on two cores each under KVM; what was not measured carries over from
the measured core that is nearest, and its source says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..hal import DeviceSpec
from .cpus import (
    AVX2,
    AVX512,
    CPU_AVX2,
    CPU_AVX512,
    INTEL_MANUAL,
    NEON,
    ON_ZEN4,
    ZEN4_AVX512,
    CpuShape,
    Isa,
    TargetPairs,
    cpu_spec,
    llvm_target,
)

KIB, MIB = 1024, 1024 * 1024  # bytes, by definition (IEC 80000-13)
MEASURED = "measured under KVM"
AMD_GUIDE = "AMD Software Optimization Guide of the family"
ARM_GUIDE = "Arm Software Optimization Guide of the core"


CODE = {
    AVX512.name: CPU_AVX512.target,
    AVX2.name: CPU_AVX2.target,
    NEON.name: llvm_target({"mtriple": "aarch64-linux-gnu", "mcpu": "generic"}),
}
"""TVM's targets of rows without one of their own: code of the instruction set alone, which runs wherever that is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Microarchitecture:
    """Cores that do the same per cycle. ``core_ids`` are `CpuInfo.core_id`s; ``isas`` what they can run, best first.

    ``shape`` is the named machine. ``dram_gb_per_s_per_core`` is what few cores reach, before `shape` caps it.
    ``l3_bytes_per_core`` is a core's share of the L3 that a virtual machine of a few cores is shown whole; None: all.
    ``target`` is TVM's for the named machine; None: the instruction set's.
    """

    name: str
    description: str
    core_ids: frozenset[tuple[str, int, int]]
    isas: tuple[Isa, ...]
    shape: CpuShape
    dram_gb_per_s_per_core: float
    l3_bytes_per_core: int | None = None
    target: TargetPairs | None = None

    def isa_named(self, name: str) -> Isa | None:
        """Its rates with the instruction set ``name``; None where none of its cores has that."""
        return next((isa for isa in self.isas if isa.name == name), None)

    @property
    def row(self) -> DeviceSpec:
        """The named machine with the best instruction set, as a device."""
        isa = self.isas[0]
        return cpu_spec(self.name, self.description, isa, self.shape, self.target or CODE[isa.name])

    def dram_gb_per_s(self, core_count: float) -> float:
        """GB/s that ``core_count`` cores read from memory: each its own rate, all together the board's at most."""
        return min(self.dram_gb_per_s_per_core * core_count, self.shape.dram_gb_per_s)


def _ids(vendor: str, family: int, models: Iterable[int]) -> frozenset[tuple[str, int, int]]:
    return frozenset((vendor, family, model) for model in models)


def _intel(*models: int) -> frozenset[tuple[str, int, int]]:
    """CPUID models of family 6, as Linux names them in `intel-family.h`."""
    return _ids("GenuineIntel", 6, models)


def _amd(family: int, *ranges: range) -> frozenset[tuple[str, int, int]]:
    """CPUID models of a family, by the ranges of Linux's `amd.c`."""
    return frozenset().union(*(_ids("AuthenticAMD", family, models) for models in ranges))


def _core(
    isa: Isa, pipes: int, loads: int, l1: float, l2: float, l3: float, *, ways: int, pages: int, source: str,
    rows: Mapping[str, float] | None = None,
) -> Isa:  # fmt: skip
    """A core with ``isa``: FMAs and loads of a register per cycle, bytes per cycle by layer, ways of L2, TLB pages.

    Functions take their cycles of as many pipes as there are.
    """
    return replace(
        isa,
        function_cycles={name: cycles * isa.fma_pipes / pipes for name, cycles in isa.function_cycles.items()},
        fma_pipes=pipes,
        loads_per_cycle=loads,
        l1_bytes_per_cycle=l1,
        l2_bytes_per_cycle=l2,
        l3_bytes_per_cycle=l3,
        l2_ways=ways,
        tlb_pages=pages,
        source=source,
        row_shares=rows or {},
    )


def _machine(
    what: str,
    cores: int,
    clock_ghz: float,
    caches: tuple[int, int, int | None],
    dram_gb_per_s: float,
    memory: str,
    clock: str = "all cores under vector load, assumed between base and highest clock",
    line_bytes: int = 64,
) -> CpuShape:
    """``caches`` are a core's L1 and L2 and one instance of L3 in KiB; ``dram_gb_per_s`` of all channels ``memory``."""
    l1, l2, l3 = caches
    return CpuShape(
        core_count=cores,
        clock_ghz=clock_ghz,
        line_bytes=line_bytes,
        l1_bytes=l1 * KIB,
        l2_bytes=l2 * KIB,
        l3_bytes=None if l3 is None else l3 * KIB,
        dram_gb_per_s=dram_gb_per_s,
        count_source=f"{what}, product table",
        clock_source=f"{what}: {clock}",
        cache_source=f"{what}, product table",
        dram_source=f"{what}: {memory}",
    )


CASCADE_LAKE = f"{MEASURED} on Cascade Lake; ways and TLB: {INTEL_MANUAL}"
GOLDEN_COVE = f"{MEASURED} on a Xeon with AMX; ways and TLB: {INTEL_MANUAL}"
ICE_LAKE = f"{MEASURED} on an Ice Lake-SP; ways and TLB: {INTEL_MANUAL}"
ZEN3 = f"{MEASURED} on an EPYC (Zen 3) with AVX2; ways and TLB: {AMD_GUIDE}"
ZEN4 = f"{MEASURED} on an EPYC (Zen 4) with AVX2; ways and TLB: {AMD_GUIDE}"
ZEN5 = f"{MEASURED} on an EPYC (Zen 5) with AVX-512; ways and TLB: {AMD_GUIDE}"

MICROARCHITECTURES = (
    Microarchitecture(
        name="cpu-skylake",
        description="Intel Skylake to Comet Lake (clients)",
        core_ids=_intel(0x4E, 0x5E, 0x8E, 0x9E, 0xA5, 0xA6),
        isas=(_core(AVX2, 2, 2, 49, 25, 12, ways=4, pages=1536, source=f"L1 and L2 as {CASCADE_LAKE}"),),
        shape=_machine("Intel Core i7-8700", 6, 4.0, (32, 256, 12288), 42.7, "2 channels DDR4-2666 x 8 bytes"),
        dram_gb_per_s_per_core=15.0,
    ),
    Microarchitecture(
        name="cpu-skylake-x",
        description="Intel Skylake-X, Cascade Lake, Cooper Lake (Xeon Scalable 1 and 2)",
        core_ids=_intel(0x55),
        isas=(
            _core(AVX512, 2, 2, 87, 34, 7.5, ways=16, pages=1536, source=CASCADE_LAKE),
            _core(AVX2, 2, 2, 49, 24, 7.8, ways=16, pages=1536, source=CASCADE_LAKE),
        ),
        shape=_machine(
            "Intel Xeon Platinum 8259CL", 24, 3.2, (32, 1024, 36608), 140.8, "6 channels DDR4-2933 x 8 bytes", MEASURED
        ),
        dram_gb_per_s_per_core=11.3,
    ),
    Microarchitecture(
        name="cpu-ice-lake-sp",
        description="Intel Ice Lake-SP and -D (Xeon Scalable 3)",
        core_ids=_intel(0x6A, 0x6C),
        isas=(
            _core(
                AVX512,
                2,
                2,
                53,
                34,
                8.6,
                ways=20,
                pages=2048,
                source=f"rates {ICE_LAKE}",
                rows={"L2.64": 0.85, "L2.128": 0.91, "L3.64": 0.38, "L3.128": 0.52, "L3.256": 0.75},
            ),
            _core(AVX2, 2, 2, 49, 30, 7.3, ways=20, pages=2048, source=f"rates between {CASCADE_LAKE} and Golden Cove"),
        ),
        shape=_machine(
            "Intel Xeon Platinum 8375C", 32, 3.1, (48, 1280, 55296), 204.8, "8 channels DDR4-3200 x 8 bytes"
        ),
        dram_gb_per_s_per_core=12.0,
    ),
    Microarchitecture(
        name="cpu-ice-lake",
        description="Intel Ice Lake, Tiger Lake, Rocket Lake (clients): one FMA pipe of 512 bits",
        core_ids=_intel(0x7D, 0x7E, 0x8C, 0x8D, 0xA7),
        isas=(
            _core(AVX512, 1, 2, 87, 45, 12, ways=20, pages=2048, source=f"L1 and L2 as {GOLDEN_COVE}"),
            _core(AVX2, 2, 2, 49, 30, 12, ways=20, pages=2048, source=f"L1 as {CASCADE_LAKE}"),
        ),
        shape=_machine("Intel Core i7-1185G7", 4, 3.5, (48, 1280, 12288), 51.2, "2 channels DDR4-3200 x 8 bytes"),
        dram_gb_per_s_per_core=20.0,
    ),
    Microarchitecture(
        name="cpu-sapphire-rapids",
        description="Intel Sapphire Rapids, Emerald Rapids, Granite Rapids (Xeon Scalable 4 and later)",
        core_ids=_intel(0x8F, 0xCF, 0xAD, 0xAE),
        isas=(
            _core(AVX512, 2, 2, 87, 45, 7.3, ways=16, pages=2048, source=GOLDEN_COVE),
            _core(
                AVX2, 2, 3, 73, 36, 7.3, ways=16, pages=2048, source=f"L2 and L3 as {GOLDEN_COVE}; L1 by three loads"
            ),
        ),
        shape=_machine(
            "Intel Xeon Platinum 8488C", 48, 3.5, (48, 2048, 107520), 307.2, "8 channels DDR5-4800 x 8 bytes"
        ),
        dram_gb_per_s_per_core=17.5,
    ),
    Microarchitecture(
        name="cpu-alder-lake",
        description="Intel Alder Lake and later clients (Raptor, Meteor, Arrow, Lunar Lake)",
        core_ids=_intel(0x97, 0x9A, 0xB7, 0xBA, 0xBF, 0xAA, 0xAC, 0xB5, 0xC5, 0xC6, 0xBD, 0xCC),
        isas=(_core(AVX2, 2, 3, 73, 36, 12, ways=10, pages=2048, source=f"L2 as {GOLDEN_COVE}; L1 by three loads"),),
        shape=_machine("Intel Core i7-12700", 8, 4.5, (48, 1280, 25600), 76.8, "2 channels DDR5-4800 x 8 bytes"),
        dram_gb_per_s_per_core=30.0,
    ),
    Microarchitecture(
        name="cpu-zen2",
        description="AMD Zen 2 (EPYC 7002, Ryzen 3000 and 4000)",
        core_ids=_amd(0x17, range(0x30, 0xB0)),
        isas=(_core(AVX2, 2, 2, 64, 28, 20, ways=8, pages=2048, source=f"{AMD_GUIDE}; L2 nearly as Zen 4's"),),
        shape=_machine("AMD EPYC 7R32", 48, 3.2, (32, 512, 16384), 204.8, "8 channels DDR4-3200 x 8 bytes"),
        dram_gb_per_s_per_core=15.0,
    ),
    Microarchitecture(
        name="cpu-zen3",
        description="AMD Zen 3 (EPYC 7003, Ryzen 5000)",
        core_ids=_amd(0x19, range(0x10), range(0x20, 0x60)),
        isas=(_core(AVX2, 2, 2, 61, 28, 20, ways=8, pages=2048, source=ZEN3),),
        shape=_machine("AMD EPYC 7R13", 48, 3.1, (32, 512, 32768), 204.8, "8 channels DDR4-3200 x 8 bytes", MEASURED),
        dram_gb_per_s_per_core=10.0,
        # Eight cores share 32 MiB. Two of them under KVM load 58 GB/s each from 8 MiB, 12 from 16 MiB, as from memory.
        l3_bytes_per_core=4 * MIB,
    ),
    Microarchitecture(
        name="cpu-zen4",
        description="AMD Zen 4 (EPYC 9004, Ryzen 7000): 512-bit operations in two halves",
        core_ids=_amd(0x19, range(0x10, 0x20), range(0x60, 0xB0)),
        isas=(
            replace(
                _core(AVX512, 1, 1, 64, 29, 27, ways=8, pages=3072, source=f"rates as {ZEN4}"),
                function_cycles=ZEN4_AVX512,
                function_source=f"{ON_ZEN4} with AVX-512",
            ),
            _core(AVX2, 2, 2, 64, 29, 27, ways=8, pages=3072, source=ZEN4),
        ),
        shape=_machine("AMD EPYC 9B14", 96, 2.9, (32, 1024, 32768), 460.8, "12 channels DDR5-4800 x 8 bytes", MEASURED),
        dram_gb_per_s_per_core=35.0,
    ),
    Microarchitecture(
        name="cpu-zen5",
        description="AMD Zen 5 (EPYC 9005, Ryzen 9000)",
        core_ids=_amd(0x1A, range(0x30), range(0x40, 0x50), range(0x60, 0x80)),
        isas=(
            _core(AVX512, 2, 2, 128, 59, 29, ways=16, pages=4096, source=ZEN5),
            _core(AVX2, 2, 2, 64, 59, 29, ways=16, pages=4096, source=f"L2 and L3 as {ZEN5}"),
        ),
        shape=_machine(
            "AMD EPYC 9965", 192, 3.9, (48, 1024, 32768), 614.4, "12 channels DDR5-6400 x 8 bytes", MEASURED
        ),
        dram_gb_per_s_per_core=22.5,
    ),
    Microarchitecture(
        name="cpu-neoverse-n1",
        description="Arm Neoverse N1 and N2 (AWS Graviton2, Ampere Altra, Azure Cobalt)",
        core_ids=_ids("arm", 0x41, (0xD0C, 0xD49)) | _ids("arm", 0x6D, (0xD49,)),
        isas=(_core(NEON, 2, 2, 32, 16, 8, ways=8, pages=1280, source=ARM_GUIDE),),
        shape=_machine(
            "AWS Graviton2", 64, 2.5, (64, 1024, 32768), 204.8, "8 channels DDR4-3200 x 8 bytes", "announced"
        ),
        dram_gb_per_s_per_core=12.0,
    ),
    Microarchitecture(
        name="cpu-neoverse-v1",
        description="Arm Neoverse V1 (AWS Graviton3)",
        core_ids=_ids("arm", 0x41, (0xD40,)),
        isas=(_core(NEON, 4, 3, 48, 24, 8, ways=8, pages=2048, source=f"{ARM_GUIDE}; L2 and L3 assumed"),),
        shape=_machine(
            "AWS Graviton3", 64, 2.6, (64, 1024, 32768), 307.2, "8 channels DDR5-4800 x 8 bytes", "announced"
        ),
        dram_gb_per_s_per_core=15.0,
        target=llvm_target({"mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1"}),
    ),
    Microarchitecture(
        name="cpu-neoverse-v2",
        description="Arm Neoverse V2 (AWS Graviton4, NVIDIA Grace)",
        core_ids=_ids("arm", 0x41, (0xD4F,)),
        isas=(_core(NEON, 4, 3, 48, 24, 8, ways=8, pages=2048, source=f"{ARM_GUIDE}; L2 and L3 assumed"),),
        shape=_machine(
            "AWS Graviton4", 96, 2.8, (64, 2048, 36864), 537.6, "12 channels DDR5-5600 x 8 bytes", "announced"
        ),
        dram_gb_per_s_per_core=20.0,
        target=llvm_target({"mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v2"}),
    ),
    Microarchitecture(
        name="cpu-apple-m",
        description="Apple M1 to M4 (performance cores) under Linux",
        core_ids=_ids("arm", 0x61, range(0x20, 0x60)),
        isas=(
            _core(NEON, 4, 3, 48, 32, 8, ways=12, pages=3072, source="assumed from published measurements of the M1"),
        ),
        shape=_machine(
            "Apple M1", 4, 3.2, (128, 3072, None), 68.2, "128 bits LPDDR4X-4266", "highest clock", line_bytes=128
        ),
        dram_gb_per_s_per_core=50.0,
    ),
)
MICROARCHITECTURE_ROWS = tuple(item.row for item in MICROARCHITECTURES)


def microarchitecture_of(core_id: tuple[str, int, int]) -> Microarchitecture | None:
    """The one whose cores identify themselves as ``core_id``; None for a core that the tables do not have."""
    return next((item for item in MICROARCHITECTURES if core_id in item.core_ids), None)
