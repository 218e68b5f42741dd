"""Fills a `DeviceSpec` for the CPU at hand: its row of the tables, with what the operating system says of it."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from dataclasses import replace

from tvm_ext import _tvm, forks, options
from tvm_ext._tvm import PrimFunc
from tvm_ext.errors import UnsupportedEnvironmentError

from . import microbench, row_files
from .cpu_info import CpuInfo, read_cpu_info
from .cpu_measurement import measured_row
from .device_facts import fact, with_facts, with_unit_count
from .hal import DeviceSpec
from .machine import ROW_BYTES
from .microbench import BenchPlan, StreamSize
from .rows import cpus
from .rows.cpus import Isa
from .rows.microarchitectures import microarchitecture_of

_SMALLEST_DRAM_BUFFER = 64 * 1024 * 1024  # a choice: where a row's last cache is small or unknown, far beyond it
_LARGEST_DRAM_BUFFER = 256 * 1024 * 1024  # of memory taken for the measurement, over all cores


def probe_cpu(*, unit_count: int | None = None, info: CpuInfo | None = None) -> DeviceSpec:
    """This machine's CPU, in milliseconds: nothing is measured.

    Rates are those of its microarchitecture's row, or of its instruction set's where the tables do not know it; caches
    and cores are the operating system's. A row that was measured here (`measure_cpu`) takes the place of all that.

    ``unit_count``: cores to use; None: as many as this process may use and TVM's thread pool has. ``info``: what the
    operating system says; None: read it. Raises UnsupportedEnvironmentError on a CPU that is neither an x86-64 nor an
    AArch64.
    """
    spec = _from_tables(info or read_cpu_info())
    return with_unit_count(row_files.kept_row(spec) or spec, unit_count or spec.unit_count)


def measure_cpu(
    watch: Callable[[str], None] = lambda _: None, lower: Callable[[PrimFunc, DeviceSpec], PrimFunc] | None = None
) -> DeviceSpec:
    """This machine's row as its micro-benchmarks have it, kept for later builds; ``lower`` as in `microbench.measure`.

    Takes `microbench.LIMIT_SECONDS` at most. Raises MeasurementError on a machine that is too busy, ExportError where
    the cache folder cannot be written.
    """
    info = read_cpu_info()
    spec = _from_tables(info)
    written = None if lower is None else lambda kernel: lower(kernel, spec)
    found = microbench.measure(bench_plan(spec, info), watch=watch, lower=written)
    row = measured_row(spec, found, datetime.date.today().isoformat(), row_files.kept_row(spec))
    row_files.keep_row(spec, row)
    return row


def _from_tables(info: CpuInfo) -> DeviceSpec:
    cores = min(options.usable_core_count(), forks.max_concurrency())
    best = isa_of(info)
    known = microarchitecture_of(info.core_id)
    isa = known and known.isa_named(best.name)
    table = known.row if known and isa else next(row for row in cpus.CPU_ROWS if row.name == best.row)
    busy = info.cores_of(cores)
    dram = known.dram_gb_per_s(busy) if known and isa else cpus.DRAM_GB_PER_S_PER_CORE * busy
    shape = _shape(info, table, cores, busy, dram)
    if known and known.l3_bytes_per_core and shape.l3_bytes:
        shape = replace(shape, l3_bytes=min(shape.l3_bytes, int(known.l3_bytes_per_core * busy)))
    tiles = f" without AMX, which Linux refuses: {info.refused}" if info.refused else ""
    description = f"this machine: {info.model}, {best.name}{tiles}"
    spec = cpus.cpu_spec("cpu", description, isa or best, shape, host_target(info, cores), ("llvm", "host"))
    return with_facts(spec, [fact("row", table.name, "name", _identified(info))])


def _identified(info: CpuInfo) -> str:
    vendor, family, model = info.core_id
    numbers = f"{family:#x}, {model:#x}" if vendor == "arm" else f"family {family}, model {model}"
    return f"{vendor or info.machine} {numbers}, and the instruction set"


def bench_plan(spec: DeviceSpec, info: CpuInfo) -> BenchPlan:
    """What to measure on ``spec``: per layer a buffer that fits it and not the layer above.

    Example, 48 KiB L1, 1 MiB L2, 32 MiB L3 on 2 cores: 24 KiB and 512 KiB for the core's own caches; for L3 4 MiB a
    core (four times L2, at most L2 plus half a core's share of L3); for DRAM 64 MiB a core (four times L3 in all).
    """
    l1, l2 = spec.layer("L1").capacity_bytes, spec.layer("L2").capacity_bytes
    assert l1 is not None
    assert l2 is not None
    streams = [StreamSize(layer="L1", bytes_per_core=l1 // 2), StreamSize(layer="L2", bytes_per_core=l2 // 2)]
    largest = l2 * spec.unit_count
    l3 = info.cache(3)
    if l3 is not None:
        share = l3.size_bytes // (2 * spec.unit_count)
        streams.append(StreamSize(layer="L3", bytes_per_core=l2 + min(share, 3 * l2)))
        largest = max(largest, l3.size_bytes)
    for layer, above in (("L2", l1), ("L3", l2)):
        if layer != "L3" or l3 is not None:
            streams += [StreamSize(layer=layer, bytes_per_core=4 * above, row_bytes=row) for row in ROW_BYTES]
    dram_bytes = min(max(4 * largest, _SMALLEST_DRAM_BUFFER), _LARGEST_DRAM_BUFFER)
    streams.append(StreamSize(layer=spec.lowest_layer.name, bytes_per_core=dram_bytes // spec.unit_count))
    assert spec.clock_ghz is not None
    return BenchPlan(
        target=spec.target,
        register_count=spec.register_limit,
        register_bytes=spec.register_bytes,
        core_count=spec.unit_count,
        clock_ghz=spec.clock_ghz,
        streams=tuple(streams),
    )


def isa_of(info: CpuInfo) -> Isa:
    """The best instruction set of the tables that this machine's CPU has."""
    if info.machine == "aarch64":
        return cpus.NEON
    features = _features(info)
    for isa in cpus.X86_ISAS:
        if features.issuperset(isa.features):
            return isa
    raise UnsupportedEnvironmentError(
        f"the CPU {info.model!r} ({info.machine}) has neither SSE2, AVX2 with FMA, AVX-512 nor NEON.",
        "run on an x86-64 or AArch64 CPU, or build for one by naming a device such as 'cpu-avx2'",
    )


def host_target(info: CpuInfo, cores: int) -> cpus.TargetPairs:
    """The stock TVM target that uses all that this CPU has, as sorted pairs.

    LLVM's guess of the model (``mcpu``) decides the tuning; where the guess has more or fewer vector features than the
    operating system lists, ``mattr`` corrects it. Example: a hypervisor hides the model of an AVX-512 CPU, LLVM guesses
    ``rocketlake``, Linux lists avx512_bf16: ``+avx512bf16``. Intel models carry the tuning ``prefer-256-bit``, under
    which LLVM vectorises with half of a register: ``-prefer-256-bit``.
    """
    mcpu = str(_tvm.llvm_get_system_cpu())
    attributes = _corrections(info, mcpu)
    pairs: dict[str, str | int | tuple[str, ...]] = {"kind": "llvm", "mcpu": mcpu, "num-cores": cores}
    if attributes:
        pairs["mattr"] = attributes
    return tuple(sorted(pairs.items()))


@functools.lru_cache(maxsize=4)  # a choice: a process runs on one CPU; 31 questions to LLVM take 7 ms
def _corrections(info: CpuInfo, mcpu: str) -> tuple[str, ...]:
    guess = _tvm.Target({"kind": "llvm", "mcpu": mcpu})
    attributes = []
    if info.features is not None:
        for name in info.checked_features:
            has, guessed = name in info.features, bool(_tvm.target_has_feature(name, guess))
            if has != guessed:
                attributes.append(f"{'+' if has else '-'}{name}")
    if isa_of(info) is cpus.AVX512 and _tvm.target_has_feature("prefer-256-bit", guess):
        attributes.append("-prefer-256-bit")
    return tuple(attributes)


def _features(info: CpuInfo) -> frozenset[str]:
    """The CPU's vector features: the operating system's list, else those of LLVM's guess."""
    if info.features is not None:
        return info.features
    guess = _tvm.Target({"kind": "llvm", "mcpu": str(_tvm.llvm_get_system_cpu())})
    return frozenset(name for name in info.checked_features if _tvm.target_has_feature(name, guess))


def _shape(info: CpuInfo, row: DeviceSpec, cores: int, busy: float, dram_gb_per_s: float) -> cpus.CpuShape:
    """``cores`` CPUs of ``row``'s kind, ``busy`` whole cores of them; sizes from the operating system, else the row."""
    l1, l2 = (info.bytes_per_core(level, cores) for level in (1, 2))
    line, l3 = info.cache(1), info.cache(3)
    assert row.clock_ghz is not None
    return cpus.CpuShape(
        core_count=cores,
        whole_cores=busy,
        clock_ghz=row.clock_ghz,
        line_bytes=line.line_bytes if line else cpus.DEFAULT_LINE_BYTES,
        l1_bytes=l1 or int(row.layer("L1").capacity_bytes or 0),
        l2_bytes=l2 or int(row.layer("L2").capacity_bytes or 0),
        l3_bytes=l3.size_bytes if l3 else None,
        dram_gb_per_s=dram_gb_per_s,
        count_source="affinity mask and control group quota of this process",
        clock_source=f"row {row.name}",
        cache_source="sysfs, a core's share" if l1 and l2 else f"row {row.name}: the system describes no caches",
        dram_source=f"row {row.name}: so much a core, all channels at most",
    )
