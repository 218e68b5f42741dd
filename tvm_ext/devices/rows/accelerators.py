"""Accelerator rows: NVIDIA V100, K80, T4, A100, H100, H200 and the Graphcore IPU; AMD's are in `amd.py`.

Every row has Roller's three layers (paper §4): L0 registers, L1 scratchpad (shared memory, LDS, an IPU tile's local
memory), L2 global memory with its cache in front (IPU: the memories of the other tiles).
"""

from __future__ import annotations

from ..capabilities import capability_of
from ..device_facts import LayerText, fact, spec_from_facts
from ..gpu import SECTOR_BYTES, WARP
from ..hal import DeviceSpec, Fact
from .cuda_limits import CUDA_GUIDE, limit_facts, rate_facts

PAPER = "Roller (OSDI'22) §4"
ARTIFACT = "Roller artifact, microsoft/nnfusion branch osdi22_artifact, artifacts/roller/arch"
ARTIFACT_A100 = "microsoft/nnfusion branch roller, artifacts/roller/arch/A100"
JIA_VOLTA_ALONE = "Jia et al., arXiv:1804.06826, measured"
JIA_VOLTA = f"agrees with {JIA_VOLTA_ALONE}"
JIA_TURING = "Jia et al., arXiv:1903.07486, measured"
JIA_IPU = "Jia et al., arXiv:1912.03413"
V100_PAPER = "NVIDIA Tesla V100 whitepaper (WP-08608-001)"
T4_PAPER = "NVIDIA Turing whitepaper (WP-09183-001), appendix Tesla T4"
T4_POWER = "NVIDIA developer forum 264462, measured: cuBLAS, halves, 4096^3, 100 times; its clock is capped at 70 W"
A100_PAPER = "NVIDIA A100 whitepaper, tables 1, 3 and 4 (dense rates)"
H100_PAPER = "NVIDIA H100 whitepaper, tables of the SXM5 board (dense rates)"
H200_SHEET = "NVIDIA H200 datasheet, SXM (dense rates: half of the sparse ones printed)"
K80_SHEET = "NVIDIA Tesla K80 board specification (BD-07317-001), one of its two GPUs"
GPU_BENCHES = "RRZE-HPC/gpu-benches 1038c5d, measured"
POINTER_CHASE = f"{GPU_BENCHES}: gpu-latency"
ABDELKHALIK = "Abdelkhalik et al., arXiv:2208.11174, measured"
LUO = "Luo et al., arXiv:2402.13499, measured"
CHIP_BENCHMARKER = "chanzhennan/ChipBenchmarker, measured"
SHARED_ARITHMETIC = "units x 32 banks x 4 bytes x boost clock"
AS_V100 = f"{PAPER} gives 96 for V100 and K80; taken over (the hardware limit is 255)"
MATRIX_BUDGET = f"{ARTIFACT_A100}: accumulators and fragments of a warp's 64 x 64 are 160, addresses some 40 more"
# What no table says.
GPU_FACTS = (
    fact("launch_overhead_us", 2.0, "us", "assumed: from one kernel of a stream to the next that waits for it; of the "
         "order of 1 to 5 us everywhere"),
    fact("dispatch_ns", 200.0, "ns", "assumed: a read of the schedule from the L2 cache, which the rTask before "
         "it hides in part"),
    fact("handoff_ns", 700.0, "ns", "assumed: a release to the L2 cache and polls of it, some three of its latencies, "
         "and a barrier of the block"),
    fact("least_kernel_us", 1.5, "us", "assumed: reads of memory one behind the other, and their use"),
    fact("unplanned_registers", 32, "32-bit registers per thread", "assumed of kernels that stock TVM scheduled: what "
         "leaves a unit of 2048 threads 65536 registers"),
)  # fmt: skip

GPU_LAYERS = (
    LayerText(description="registers of a thread", scope="teu"),
    LayerText(description="shared memory", scope="unit"),
    LayerText(description="global memory and L2 cache", scope="device"),
)


def _cuda(
    name: str,
    description: str,
    aliases: tuple[str, ...],
    architecture: str,
    facts: tuple[Fact, ...],
    *,
    bank_bytes: int = 4,
    in_paper: bool = False,
) -> DeviceSpec:
    """A row for ``architecture`` ("sm_80"): what its compute capability says, what all CUDA rows share, ``facts``.

    Of Roller's own devices (``in_paper``) schedulers, banks and register budget are the paper's too.
    """
    version = capability_of(architecture)
    limits = limit_facts(
        version,
        schedulers=PAPER if in_paper else CUDA_GUIDE,
        static=f"{PAPER} (deviceQuery); {CUDA_GUIDE}: static limit",
    )
    peak = next(float(item.value) for item in facts if item.used and item.field == "peak_gflops.float32")
    shared = (
        fact("compute_capability", f"{version[0]}.{version[1]}", "major.minor", CUDA_GUIDE),
        fact("teu_lanes", WARP, "threads", f"{PAPER}: the TEU is a warp"),
        fact("register_limit", 96, "32-bit registers per thread", PAPER if in_paper else AS_V100),
        fact("register_limit", 255, "32-bit registers per thread", CUDA_GUIDE, used=False),
        fact("register_bytes", 4, "bytes", CUDA_GUIDE),
        *GPU_FACTS,
        fact("layers.L0.transaction_bytes", 4, "bytes", "one register"),
        fact("layers.L1.transaction_bytes", 32 * bank_bytes, "bytes", f"32 banks x {bank_bytes} bytes; {ARTIFACT}"),
        fact("layers.L1.bank_count", 32, "banks", f"{PAPER}; {CUDA_GUIDE}"),
        fact("layers.L1.bank_bytes", bank_bytes, "bytes", PAPER if in_paper else CUDA_GUIDE),
        fact("layers.L2.transaction_bytes", SECTOR_BYTES, "bytes", f"{PAPER}: 8 float elements"),
    )
    return spec_from_facts(
        name=name,
        kind="cuda",
        description=description,
        aliases=aliases,
        target=(("arch", architecture), ("kind", "cuda")),
        layers=GPU_LAYERS,
        facts=(*limits, *shared, *facts, *rate_facts(version, peak)),
    )


def peaks(source: str, **gflops: float) -> tuple[Fact, ...]:
    """Peak rates by type of one ``source``: ``float32=19500.0, float16_tensor=312000.0``."""
    return tuple(fact(f"peak_gflops.{key}", rate, "GFLOP/s", source) for key, rate in gflops.items())


V100 = _cuda(
    "nvidia-v100",
    "NVIDIA Tesla V100 (Volta, 80 SMs, 16 GB HBM2)",
    ("v100", "tesla-v100", "nvidia/nvidia-v100", "sm_70"),
    "sm_70",
    (
        fact("unit_count", 80, "SMs", PAPER),
        fact("clock_ghz", 1.38, "GHz", "boost clock of the PCIe board (the paper's Azure NC24s v3), V100 datasheet"),
        fact("clock_ghz", 1.53, "GHz", f"{V100_PAPER}, SXM2 boost", used=False),
        fact("layers.L1.latency_ns", 13.8, "ns", f"19 cycles of 1.38 GHz; {JIA_VOLTA_ALONE}"),
        fact("layers.L1.bandwidth_gb_per_s", 12080.0, "GB/s", f"{ARTIFACT}/V100.py; {JIA_VOLTA}"),
        fact("layers.L1.bandwidth_gb_per_s", 14131.2, "GB/s", f"arithmetic: {SHARED_ARITHMETIC}", used=False),
        fact("layers.L2.bandwidth_gb_per_s", 750.0, "GB/s", f"{ARTIFACT}/V100.py; {JIA_VOLTA}"),
        fact("layers.L2.bandwidth_gb_per_s", 900.0, "GB/s", f"{V100_PAPER}, theoretical", used=False),
        fact("layers.L2.cache_bytes", 6 * 1024 * 1024, "bytes", V100_PAPER),
        fact("layers.L2.latency_ns", 308.0, "ns", f"{POINTER_CHASE}, 425 cycles of 1.38 GHz"),
        fact("layers.L2.cache_latency_ns", 153.7, "ns", f"{POINTER_CHASE}, 212 cycles of 1.38 GHz"),
        fact("layers.L2.cache_latency_ns", 139.9, "ns", f"193 cycles of 1.38 GHz; {JIA_VOLTA_ALONE}", used=False),
        fact("layers.L2.cache_bandwidth_gb_per_s", 2155.0, "GB/s", JIA_VOLTA_ALONE),
        fact("peak_gflops.float32", 12480.0, "GFLOP/s", f"{ARTIFACT}/V100.py"),
        fact("peak_gflops.float32", 14131.2, "GFLOP/s", "arithmetic: 80 x 64 x 2 x 1.38 GHz", used=False),
        fact("peak_gflops.float32", 15700.0, "GFLOP/s", f"{V100_PAPER}, SXM2", used=False),
        fact("peak_gflops.float16", 24960.0, "GFLOP/s", f"twice float32 (half2); {V100_PAPER}"),
        fact("peak_gflops.float64", 6240.0, "GFLOP/s", f"half of float32; {V100_PAPER}"),
        fact("peak_gflops.float16_tensor", 112000.0, "GFLOP/s", "V100 datasheet, PCIe board"),
        fact("peak_gflops.float16_tensor", 125000.0, "GFLOP/s", f"{V100_PAPER}, SXM2; {ARTIFACT}/V100.py", used=False),
        fact("tensor_core_shape", "16x16x16", "m x n x k", "Roller (OSDI'22) §3.1; wmma"),
    ),
    in_paper=True,
)

K80 = _cuda(
    "nvidia-k80",
    "NVIDIA Tesla K80 (Kepler, one of its two GPUs: 13 SMs, 12 GB GDDR5)",
    ("k80", "tesla-k80", "nvidia/tesla-k80", "nvidia/nvidia-k80", "sm_37"),
    "sm_37",
    (
        fact("unit_count", 13, "SMs", PAPER),
        fact("unit_count", 26, "SMs", f"{ARTIFACT}/K80.py: both GPUs of the board", used=False),
        fact("clock_ghz", 0.875, "GHz", f"{K80_SHEET}, highest boost"),
        fact("clock_ghz", 0.562, "GHz", f"{K80_SHEET}, base", used=False),
        fact("layers.L1.latency_ns", 29.7, "ns", f"26 cycles of 0.875 GHz; {JIA_VOLTA_ALONE}"),
        fact("layers.L1.bandwidth_gb_per_s", 2540.0, "GB/s", f"{ARTIFACT}/K80.py, measured"),
        fact("layers.L1.bandwidth_gb_per_s", 2912.0, "GB/s", "arithmetic: 13 x 32 x 8 x 0.875 GHz", used=False),
        fact("layers.L2.bandwidth_gb_per_s", 191.0, "GB/s", f"{ARTIFACT}/K80.py, measured"),
        fact("layers.L2.bandwidth_gb_per_s", 240.0, "GB/s", f"{K80_SHEET}, theoretical", used=False),
        fact("layers.L2.cache_bytes", 1536 * 1024, "bytes", "NVIDIA GK110/GK210 whitepaper"),
        fact("peak_gflops.float32", 4113.0, "GFLOP/s", f"{ARTIFACT}/K80.py; agrees with 13 x 192 x 2 x 0.8235 GHz"),
        fact("peak_gflops.float32", 4368.0, "GFLOP/s", "arithmetic: 13 x 192 x 2 x 0.875 GHz", used=False),
        fact("peak_gflops.float64", 1371.0, "GFLOP/s", "a third of float32; NVIDIA GK110/GK210 whitepaper"),
    ),
    bank_bytes=8,
    in_paper=True,
)

T4 = _cuda(
    "nvidia-t4",
    "NVIDIA T4 (Turing, 40 SMs, 16 GB GDDR6)",
    ("t4", "tesla-t4", "nvidia/nvidia-t4", "sm_75"),
    "sm_75",
    (
        fact("unit_count", 40, "SMs", T4_PAPER),
        fact("clock_ghz", 1.59, "GHz", f"{T4_PAPER}, boost"),
        fact("layers.L1.latency_ns", 11.9, "ns", f"19 cycles of 1.59 GHz; {JIA_TURING}"),
        fact("layers.L1.bandwidth_gb_per_s", 3662.0, "GB/s", f"{JIA_TURING}"),
        fact("layers.L1.bandwidth_gb_per_s", 4070.4, "GB/s", "arithmetic: 40 x 64 bytes x 1.59 GHz", used=False),
        fact("layers.L2.bandwidth_gb_per_s", 220.0, "GB/s", f"{JIA_TURING}"),
        fact("layers.L2.bandwidth_gb_per_s", 320.0, "GB/s", f"{T4_PAPER}, theoretical", used=False),
        fact("layers.L2.cache_bytes", 4 * 1024 * 1024, "bytes", T4_PAPER),
        fact("layers.L2.cache_latency_ns", 118.2, "ns", f"188 cycles of 1.59 GHz; {JIA_TURING}"),
        fact("layers.L2.cache_bandwidth_gb_per_s", 1270.0, "GB/s", JIA_TURING),
        fact("peak_gflops.float32", 8141.0, "GFLOP/s", f"arithmetic: 40 x 64 x 2 x 1.59 GHz; {T4_PAPER}: 8.1"),
        fact("peak_gflops.float16", 16282.0, "GFLOP/s", f"twice float32 (half2); {T4_PAPER}: 16.2"),
        *peaks(T4_PAPER, float16_tensor=65000.0, int8_tensor=130000.0),
        fact("power_share", 0.369, "of the peak", f"24 of 65 TFLOP/s; {T4_POWER}"),
        fact("tensor_core_shape", "16x16x16", "m x n x k", "Roller (OSDI'22) §3.1; wmma"),
    ),
)

A100 = _cuda(
    "nvidia-a100",
    "NVIDIA A100 (Ampere, 108 SMs, 40 GB HBM2)",
    ("a100", "tesla-a100", "nvidia/nvidia-a100", "sm_80"),
    "sm_80",
    (
        fact("register_limit", 164, "32-bit registers per thread", f"{ARTIFACT_A100}", used=False),
        fact("matrix_register_limit", 164, "32-bit registers per thread", MATRIX_BUDGET),
        fact("unit_count", 108, "SMs", f"{A100_PAPER}; {ARTIFACT_A100}"),
        fact("clock_ghz", 1.41, "GHz", f"{A100_PAPER}, boost"),
        fact("layers.L1.latency_ns", 16.3, "ns", f"23 cycles of 1.41 GHz; {ABDELKHALIK}; {CHIP_BENCHMARKER}"),
        fact("layers.L1.latency_ns", 20.6, "ns", f"29.0 cycles of 1.41 GHz; {LUO}", used=False),
        fact("layers.L1.bandwidth_gb_per_s", 19491.8, "GB/s", f"arithmetic: {SHARED_ARITHMETIC}"),
        fact("layers.L1.bandwidth_gb_per_s", 12080.0, "GB/s", f"{ARTIFACT_A100}: V100's figure", used=False),
        fact("layers.L2.bandwidth_gb_per_s", 1555.0, "GB/s", f"{A100_PAPER}, theoretical; {ARTIFACT_A100}"),
        fact("layers.L2.cache_bytes", 40 * 1024 * 1024, "bytes", A100_PAPER),
        fact("layers.L2.latency_ns", 365.0, "ns", f"{POINTER_CHASE}, 515 cycles of 1.41 GHz (80 GB board)"),
        fact("layers.L2.latency_ns", 330.7, "ns", f"466.3 cycles of 1.41 GHz; {LUO}", used=False),
        fact("layers.L2.latency_ns", 353.9, "ns", f"499 cycles of 1.41 GHz; {CHIP_BENCHMARKER}", used=False),
        fact("layers.L2.cache_latency_ns", 145.8, "ns", f"{POINTER_CHASE}, 206 cycles, the near half of the cache"),
        fact("layers.L2.cache_latency_ns", 288.0, "ns", f"{POINTER_CHASE}, 406 cycles, its far half", used=False),
        fact("layers.L2.cache_latency_ns", 185.5, "ns", f"261.5 cycles of 1.41 GHz; {LUO}", used=False),
        fact("layers.L2.cache_bandwidth_gb_per_s", 5375.0, "GB/s", f"{GPU_BENCHES}: gpu-l2-cache, 15 to 26 MB"),
        fact("layers.L2.cache_bandwidth_gb_per_s", 7219.2, "GB/s", f"{A100_PAPER}: 5120 bytes a clock", used=False),
        fact("layers.L2.cache_bandwidth_gb_per_s", 3094.0, "GB/s", CHIP_BENCHMARKER, used=False),
        fact("peak_gflops.float32", 19500.0, "GFLOP/s", A100_PAPER),
        fact("peak_gflops.float32", 78000.0, "GFLOP/s", f"{ARTIFACT_A100}: the float16 rate", used=False),
        *peaks(A100_PAPER, float16=78000.0, bfloat16=39000.0, float64=9700.0),
        fact("peak_gflops.float16_tensor", 312000.0, "GFLOP/s", f"{A100_PAPER}; {ARTIFACT_A100}"),
        *peaks(A100_PAPER, bfloat16_tensor=312000.0, tfloat32_tensor=156000.0, int8_tensor=624000.0),
        fact("tensor_core_shape", "16x8x16", "m x n x k", "PTX ISA, mma.sync.m16n8k16 for float16 and bfloat16"),
        fact("tensor_core_shape", "16x16x16", "m x n x k", "Roller (OSDI'22) §3.1; wmma", used=False),
    ),
)


def _hopper_facts() -> tuple[Fact, ...]:
    """What H100 SXM5 and H200 SXM share: the same GPU with other memory."""
    return (
        fact("matrix_register_limit", 164, "32-bit registers per thread", f"as the A100's: {MATRIX_BUDGET}"),
        fact("mma_sync_share", 0.629, "of the peak", f"{LUO}: mma on average; only wgmma comes near the peak"),
        fact("unit_count", 132, "SMs", H100_PAPER),
        fact("clock_ghz", 1.98, "GHz", f"{H100_PAPER}: 66.9 TFLOP/s = 132 x 128 x 2 x 1.98 GHz"),
        fact("layers.L1.latency_ns", 11.6, "ns", f"23 cycles (H800) of 1.98 GHz; {CHIP_BENCHMARKER}"),
        fact("layers.L1.latency_ns", 14.6, "ns", f"29.0 cycles (H100 PCIe) of 1.98 GHz; {LUO}", used=False),
        fact("layers.L1.bandwidth_gb_per_s", 33454.1, "GB/s", f"arithmetic: {SHARED_ARITHMETIC}"),
        fact("layers.L2.cache_bytes", 50 * 1024 * 1024, "bytes", H100_PAPER),
        fact("layers.L2.latency_ns", 324.0, "ns", f"{POINTER_CHASE}, GH200 (96 GB HBM3), 642 cycles of 1.98 GHz"),
        fact("layers.L2.latency_ns", 272.8, "ns", f"478.8 cycles of 1.755 GHz (H100 PCIe); {LUO}", used=False),
        fact("layers.L2.cache_latency_ns", 141.6, "ns", f"{POINTER_CHASE}, GH200, 280 cycles, the near half"),
        fact(
            "layers.L2.cache_latency_ns", 258.5, "ns", f"{POINTER_CHASE}, GH200, 512 cycles, the far half", used=False
        ),
        fact("layers.L2.cache_latency_ns", 149.9, "ns", f"263.0 cycles of 1.755 GHz (H100 PCIe); {LUO}", used=False),
        fact("layers.L2.cache_bandwidth_gb_per_s", 9770.0, "GB/s", f"{GPU_BENCHES}: gpu-l2-cache, H200, 15 to 28 MB"),
        fact(
            "layers.L2.cache_bandwidth_gb_per_s", 6920.0, "GB/s", f"{GPU_BENCHES}: gpu-l2-cache, H100 PCIe", used=False
        ),
        *peaks(H100_PAPER, float32=66900.0, float16=133800.0, bfloat16=133800.0, float64=33500.0),
        *peaks(H100_PAPER, float16_tensor=989400.0, bfloat16_tensor=989400.0),
        *peaks(H100_PAPER, tfloat32_tensor=494700.0, int8_tensor=1978900.0),
        fact("tensor_core_shape", "16x8x16", "m x n x k", "PTX ISA, mma.sync.m16n8k16 for float16 and bfloat16"),
        fact("tensor_core_shape", "64x8x16", "m x n x k", "PTX ISA, smallest wgmma.mma_async (sm_90a)", used=False),
    )


H100 = _cuda(
    "nvidia-h100",
    "NVIDIA H100 SXM5 (Hopper, 132 SMs, 80 GB HBM3)",
    ("h100", "nvidia/nvidia-h100", "sm_90", "sm_90a"),
    "sm_90a",
    (*_hopper_facts(), fact("layers.L2.bandwidth_gb_per_s", 3352.0, "GB/s", f"{H100_PAPER}, theoretical")),
)

H200 = _cuda(
    "nvidia-h200",
    "NVIDIA H200 SXM (Hopper, 132 SMs, 141 GB HBM3e)",
    ("h200", "nvidia/nvidia-h200"),
    "sm_90a",
    (*_hopper_facts(), fact("layers.L2.bandwidth_gb_per_s", 4800.0, "GB/s", f"{H200_SHEET}, theoretical")),
)

IPU = spec_from_facts(
    name="graphcore-ipu",
    kind="ipu",
    description="Graphcore IPU (GC2, 1216 tiles of 256 KiB)",
    aliases=("ipu", "gc2"),
    layers=(
        LayerText(description="registers of a worker thread", scope="teu"),
        LayerText(description="local memory of a tile", scope="unit"),
        LayerText(description="memories of all other tiles over the exchange", scope="device"),
    ),
    facts=(
        fact("unit_count", 1216, "tiles", f"{PAPER}; {JIA_IPU}"),
        fact("teus_per_unit", 1, "count", f"{PAPER}: one processing core a tile"),
        fact("teu_lanes", 2, "float32 lanes", f"{JIA_IPU}: 64-bit vector operations"),
        fact("clock_ghz", 1.6, "GHz", JIA_IPU),
        fact("register_limit", 10, "registers", PAPER),
        fact("register_limit", 96, "registers", f"{ARTIFACT}/IPU.py, marked unknown there", used=False),
        fact("register_bytes", 4, "bytes", f"{JIA_IPU}: 32-bit registers"),
        fact("max_threads_per_unit", 6, "worker threads", f"{JIA_IPU}; {ARTIFACT}/IPU.py"),
        fact("dispatch_ns", 10.0, "ns", "assumed: a call of the next vertex, some 16 cycles"),
        fact("handoff_ns", 500.0, "ns", "assumed: the synchronisation of all tiles and a short exchange"),
        fact("layers.L0.transaction_bytes", 4, "bytes", "one register"),
        fact("layers.L1.capacity_bytes", 256 * 1024, "bytes", PAPER),
        fact("layers.L1.transaction_bytes", 4, "bytes", f"{ARTIFACT}/IPU.py"),
        fact("layers.L1.bandwidth_gb_per_s", 7590.0, "GB/s", f"{ARTIFACT}/IPU.py, after {JIA_IPU}"),
        fact("layers.L1.bandwidth_gb_per_s", 45000.0, "GB/s", f"{JIA_IPU}, aggregate as designed", used=False),
        fact("layers.L2.capacity_bytes", 1216 * 256 * 1024, "bytes", f"{PAPER}: 1216 x 256 KiB in all", used=False),
        fact("layers.L2.transaction_bytes", 4, "bytes", f"{ARTIFACT}/IPU.py"),
        fact("layers.L2.bandwidth_gb_per_s", 7680.0, "GB/s", f"{ARTIFACT}/IPU.py, after {JIA_IPU}"),
        fact("peak_gflops.float32", 18900.0, "GFLOP/s", f"{ARTIFACT}/IPU.py, after {JIA_IPU}, measured"),
        fact("peak_gflops.float32", 31100.0, "GFLOP/s", f"{JIA_IPU}, theoretical", used=False),
    ),
)

ACCELERATOR_ROWS = (V100, K80, T4, A100, H100, H200, IPU)
