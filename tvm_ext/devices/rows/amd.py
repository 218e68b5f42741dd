"""Rows of AMD's accelerators: MI50 (Roller's), and MI210 and MI300X, which have matrix cores."""

from __future__ import annotations

from ..device_facts import LayerText, fact, spec_from_facts
from ..hal import DeviceSpec, Fact
from .accelerators import ARTIFACT, GPU_FACTS, GPU_LAYERS, MATRIX_BUDGET, PAPER, SHARED_ARITHMETIC, peaks

MI50_SHEET = "AMD Radeon Instinct MI50 product page"
MI210_SHEET = "AMD Instinct MI210 product page"
MI300_SHEET = "AMD Instinct MI300X data sheet (dense rates)"
CDNA_ISA = "AMD Instinct MI200 and MI300 instruction set architecture guides"
CDNA2_PAPER = "AMD CDNA 2 white paper"
CDNA3_PAPER = "AMD CDNA 3 white paper"
LLVM_RATES = "LLVM, SISchedule.td"
LLVM_AMD = "LLVM, User Guide for AMDGPU Backend, compute_pgm_rsrc registers of GFX9"


def _amd(
    name: str, description: str, aliases: tuple[str, ...], architecture: str, facts: tuple[Fact, ...]
) -> DeviceSpec:
    """A row for ``architecture`` ("gfx90a"): what all compute units with waves of 64 lanes share, and ``facts``."""
    peak = next(float(item.value) for item in facts if item.used and item.field == "peak_gflops.float32")
    shared = (
        fact("teus_per_unit", 4, "SIMD units", f"{ARTIFACT}/MI50.py; AMD Vega and CDNA ISA"),
        fact("teu_lanes", 64, "threads", f"{PAPER}: the TEU is a warp of 64 threads"),
        fact("register_limit", 70, "32-bit registers per thread", PAPER),
        fact("register_bytes", 4, "bytes", "AMD Vega ISA"),
        fact("max_threads_per_block", 256, "threads", "limit of stock TVM's rocm target"),
        fact("max_threads_per_block", 1024, "threads", "ROCm hardware limit", used=False),
        *GPU_FACTS,
        fact(
            "instruction_gops.float32.exp", peak / 8, "Gop/s", f"a quarter of the multiply-adds; {LLVM_RATES}: Trans32"
        ),
        fact("instruction_gops.float32.convert", peak / 8, "Gop/s", f"a quarter; {LLVM_RATES}: FloatCvt"),
        fact("layers.L0.transaction_bytes", 4, "bytes", "one register"),
        fact("layers.L1.capacity_bytes", 64 * 1024, "bytes", "AMD Vega and CDNA ISA; limit of stock TVM's rocm target"),
        fact("layers.L1.granule_bytes", 512, "bytes", f"{LLVM_AMD}: granulated_lds_size, by 128 words"),
        fact("layers.L1.transaction_bytes", 128, "bytes", f"{ARTIFACT}/MI50.py"),
        fact("layers.L1.bank_count", 32, "banks", PAPER),
        fact("layers.L1.bank_bytes", 4, "bytes", PAPER),
    )
    return spec_from_facts(
        name=name,
        kind="rocm",
        description=description,
        aliases=aliases,
        target=(("kind", "rocm"), ("mcpu", architecture)),
        layers=(GPU_LAYERS[0], LayerText(description="local data share", scope="unit"), GPU_LAYERS[2]),
        facts=(*shared, *facts),
    )


MI50 = _amd(
    "amd-mi50",
    "AMD Radeon Instinct MI50 (Vega 20, 60 compute units, 16 GB HBM2)",
    ("mi50", "radeon-instinct-mi50", "amd/mi50", "gfx906"),
    "gfx906",
    (
        fact("unit_count", 60, "compute units", f"{MI50_SHEET}; {ARTIFACT}/MI50.py"),
        fact("clock_ghz", 1.725, "GHz", f"{MI50_SHEET}, peak engine clock"),
        fact("register_limit", 256, "32-bit registers per thread", "AMD Vega ISA: VGPRs", used=False),
        fact("max_threads_per_unit", 2560, "threads", "AMD GCN: 4 SIMDs x 10 wavefronts x 64"),
        fact("registers_per_unit", 65536, "32-bit registers", "AMD Vega ISA: 4 SIMDs x 256 VGPRs x 64 lanes"),
        fact("max_registers_per_thread", 256, "32-bit registers", "AMD Vega ISA: VGPRs"),
        fact("register_granule", 256, "32-bit registers of a wavefront", f"{LLVM_AMD}: VGPRs by 4, x 64 lanes"),
        fact("layers.L1.capacity_bytes", 34000, "bytes", f"{ARTIFACT}/MI50.py, empirical", used=False),
        fact("layers.L1.bandwidth_gb_per_s", 8000.0, "GB/s", f"{ARTIFACT}/MI50.py; {PAPER}: measured"),
        fact("layers.L1.bandwidth_gb_per_s", 13248.0, "GB/s", f"arithmetic: {SHARED_ARITHMETIC}", used=False),
        fact("layers.L2.transaction_bytes", 64, "bytes", PAPER),
        fact("layers.L2.bandwidth_gb_per_s", 900.0, "GB/s", f"{ARTIFACT}/MI50.py; {PAPER}: measured"),
        fact("layers.L2.bandwidth_gb_per_s", 1024.0, "GB/s", f"{MI50_SHEET}, theoretical", used=False),
        fact("layers.L2.cache_bytes", 4 * 1024 * 1024, "bytes", "AMD Vega 20: 16 channels x 256 KiB"),
        fact("peak_gflops.float32", 12000.0, "GFLOP/s", f"{ARTIFACT}/MI50.py; {PAPER}: measured"),
        fact("peak_gflops.float32", 13300.0, "GFLOP/s", f"{MI50_SHEET}, theoretical", used=False),
        *peaks(f"{MI50_SHEET}, theoretical", float16=26500.0, float64=6600.0, int8=53000.0),
    ),
)


def _cdna_facts() -> tuple[Fact, ...]:
    """What CDNA 2 and 3 share."""
    return (
        fact("matrix_register_limit", 164, "32-bit registers per thread", f"as the A100's: {MATRIX_BUDGET}"),
        fact("max_threads_per_unit", 2048, "threads", f"{LLVM_AMD}: gfx90a, 4 SIMDs x 8 waves x 64"),
        fact("registers_per_unit", 131072, "32-bit registers", f"{CDNA_ISA}: 4 SIMDs x 512 VGPRs x 64 lanes"),
        fact("max_registers_per_thread", 512, "32-bit registers", f"{CDNA_ISA}: 256 VGPRs and as many AccVGPRs"),
        fact("register_granule", 512, "32-bit registers of a wavefront", f"{LLVM_AMD}: gfx90a, by 8, x 64 lanes"),
        fact("layers.L2.transaction_bytes", 64, "bytes", "as the MI50's; a line of L2 has 128 bytes, two sectors"),
        fact("tensor_core_shape", "16x16x16", "m x n x k", f"{CDNA_ISA}: v_mfma_f32_16x16x16_f16, _bf16"),
        fact(
            "tensor_core_shape", "32x32x8", "m x n x k", f"{CDNA_ISA}: v_mfma_f32_32x32x8, at the same rate", used=False
        ),
    )


MI210 = _amd(
    "amd-mi210",
    "AMD Instinct MI210 (CDNA 2, 104 compute units, 64 GB HBM2e)",
    ("mi210", "amd/mi210", "gfx90a"),
    "gfx90a",
    (
        *_cdna_facts(),
        fact("unit_count", 104, "compute units", MI210_SHEET),
        fact("clock_ghz", 1.7, "GHz", f"{MI210_SHEET}, peak engine clock"),
        fact("layers.L1.bandwidth_gb_per_s", 22630.4, "GB/s", f"arithmetic: {SHARED_ARITHMETIC}"),
        fact("layers.L2.bandwidth_gb_per_s", 1638.4, "GB/s", f"{MI210_SHEET}, theoretical"),
        fact("layers.L2.cache_bytes", 8 * 1024 * 1024, "bytes", CDNA2_PAPER),
        fact("layers.L2.cache_bandwidth_gb_per_s", 6963.2, "GB/s", f"32 channels x 128 bytes x 1.7 GHz; {CDNA2_PAPER}"),
        *peaks(MI210_SHEET, float32=22600.0, float64=22600.0),
        *peaks(MI210_SHEET, float16_tensor=181000.0, bfloat16_tensor=181000.0, int8_tensor=181000.0),
        fact("peak_gflops.float16", 45200.0, "GFLOP/s", f"twice float32 (packed halves); {CDNA_ISA}"),
    ),
)

MI300X = _amd(
    "amd-mi300x",
    "AMD Instinct MI300X (CDNA 3, 304 compute units, 192 GB HBM3)",
    ("mi300x", "mi300", "amd/mi300x", "gfx942"),
    "gfx942",
    (
        *_cdna_facts(),
        fact("unit_count", 304, "compute units", MI300_SHEET),
        fact("clock_ghz", 2.1, "GHz", f"{MI300_SHEET}, peak engine clock"),
        fact("layers.L1.bandwidth_gb_per_s", 81715.2, "GB/s", f"arithmetic: {SHARED_ARITHMETIC}"),
        fact("layers.L2.bandwidth_gb_per_s", 5300.0, "GB/s", f"{MI300_SHEET}, theoretical"),
        fact(
            "layers.L2.cache_bytes", 256 * 1024 * 1024, "bytes", f"{CDNA3_PAPER}: Infinity Cache; 4 MiB an XCD above it"
        ),
        fact("layers.L2.cache_bandwidth_gb_per_s", 17200.0, "GB/s", f"{CDNA3_PAPER}: Infinity Cache, peak"),
        fact("peak_gflops.float32", 81700.0, "GFLOP/s", "arithmetic: 304 x 64 x 2 x 2.1 GHz"),
        fact("peak_gflops.float32", 163400.0, "GFLOP/s", f"{MI300_SHEET}: packed pairs", used=False),
        fact("peak_gflops.float16", 163400.0, "GFLOP/s", f"twice float32 (packed halves); {CDNA_ISA}"),
        *peaks(MI300_SHEET, float64=81700.0),
        *peaks(MI300_SHEET, float16_tensor=1307400.0, bfloat16_tensor=1307400.0, int8_tensor=2614900.0),
    ),
)

AMD_ROWS = (MI50, MI210, MI300X)
