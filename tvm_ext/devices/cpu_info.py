"""What the operating system says of this machine's CPU: model, features, caches."""

from __future__ import annotations

import functools
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from .tile_permission import tile_refusal

CPUINFO = Path("/proc/cpuinfo")
SYSFS_CPU = Path("/sys/devices/system/cpu")

# Linux's names of x86 vector features that differ from LLVM's; the others are spelt alike.
_LLVM_NAMES = {
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "avx512_vp2intersect": "avx512vp2intersect",
    "avx_vnni": "avxvnni",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "bmi1": "bmi",
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fullfp16",
}
CHECKED_X86_FEATURES = (
    *("sse2", "sse4.1", "sse4.2", "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "gfni", "vaes", "vpclmulqdq", "avxvnni"),
    *("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512ifma", "avx512vbmi", "avx512vbmi2"),
    *("avx512vnni", "avx512bf16", "avx512fp16", "avx512bitalg", "avx512vpopcntdq", "avx512vp2intersect"),
    *("amx-tile", "amx-bf16", "amx-int8"),
)
TILES = frozenset(("amx-tile", "amx-bf16", "amx-int8"))
"""Features that a process asks for: `tile_permission.tile_refusal`."""

CHECKED_ARM_FEATURES = ("neon", "dotprod", "fullfp16", "i8mm", "bf16", "sve", "sve2")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheInfo:
    """One data or unified cache of the first CPU; ``sharer_count`` of the CPUs that this process may use share it."""

    level: int
    size_bytes: int
    line_bytes: int
    sharer_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuInfo:
    """This machine's CPU. ``features`` are in LLVM's spelling and None where the system does not list them.

    ``core_id`` is vendor, family and model as CPUID has them ("AuthenticAMD", 25, 17), or on Arm "arm", implementer and
    part as MIDR has them; its numbers are 0 where the system does not say. ``refused`` says why the system lets this
    process use no tiles of a CPU that has them; ``features`` are without these then.
    """

    machine: str  # "x86_64", "aarch64"
    model: str
    features: frozenset[str] | None
    caches: tuple[CacheInfo, ...]
    core_id: tuple[str, int, int] = ("", 0, 0)
    refused: str = ""

    def bytes_per_core(self, level: int, core_count: int) -> int | None:
        """The part of the cache of ``level`` that one of ``core_count`` busy CPUs has to itself.

        Two hyper-threads on a 48 KiB L1 have 24 KiB each when both are used.
        """
        cache = self.cache(level)
        return None if cache is None else cache.size_bytes // min(cache.sharer_count, core_count)

    def cache(self, level: int) -> CacheInfo | None:
        return next((cache for cache in self.caches if cache.level == level), None)

    def cores_of(self, cpu_count: int) -> float:
        """How many cores ``cpu_count`` busy CPUs are: hyper-threads share one, and with it its first cache."""
        l1 = self.cache(1)
        return cpu_count / min(l1.sharer_count, cpu_count) if l1 else cpu_count

    @property
    def checked_features(self) -> tuple[str, ...]:
        """The vector features that a target is compared by on this architecture."""
        return CHECKED_ARM_FEATURES if self.machine == "aarch64" else CHECKED_X86_FEATURES


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuNeeds:
    """What code asks of a CPU: its architecture ("x86_64", "aarch64"; empty: any) and vector features, LLVM's names."""

    machine: str = ""
    features: tuple[str, ...] = ()

    def unmet_by(self, info: CpuInfo) -> str:
        """What ``info`` lacks, in words, or nothing; a CPU whose system lists no features is believed to have all.

        Code with an instruction that the CPU lacks ends the process (SIGILL).
        """
        if self.machine not in ("", info.machine):
            return f"is an {info.machine} and not an {self.machine}"
        missing = [] if info.features is None else [name for name in self.features if name not in info.features]
        why = f" (Linux refuses tiles: {info.refused})" if info.refused and TILES.intersection(missing) else ""
        return f"lacks {', '.join(missing)}{why}" if missing else ""


def read_cpu_info(cpuinfo: Path = CPUINFO, sysfs: Path = SYSFS_CPU) -> CpuInfo:
    """Read ``cpuinfo`` and ``sysfs``; what is missing there (macOS, a strict container) is None or empty.

    Of a CPU with tiles, this process asks for leave to use them.
    """
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    fields, caches = _read_once(cpuinfo, sysfs, frozenset(affinity))
    flags = fields.get("flags") or fields.get("Features")
    features = frozenset(_LLVM_NAMES.get(name, name) for name in flags.split()) if flags else None
    refused = tile_refusal() if features and features & TILES else ""
    return CpuInfo(
        machine=_machine(platform.machine()),
        model=fields.get("model name") or " ".join(_arm_model(fields)) or platform.processor() or "unknown CPU",
        features=features - TILES if features and refused else features,
        caches=caches,
        core_id=_core_id(fields),
        refused=refused,
    )


@functools.cache
def _read_once(cpuinfo: Path, sysfs: Path, _affinity: frozenset[int]) -> tuple[dict[str, str], tuple[CacheInfo, ...]]:
    """The first processor's lines, and its caches. A build asks five times, and Linux writes the files for each."""
    return _first_processor(_read_text(cpuinfo)), _caches(sysfs)


def _machine(name: str) -> str:
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name.lower(), name.lower())


def _first_processor(text: str | None) -> dict[str, str]:
    """The "key : value" lines up to the first empty one, which ends the first processor."""
    lines = (text or "").split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _arm_model(fields: dict[str, str]) -> list[str]:
    return [f"{key} {fields[key]}" for key in ("CPU implementer", "CPU part") if key in fields]


def _core_id(fields: dict[str, str]) -> tuple[str, int, int]:
    """Who made the core, and which it is; Linux writes x86's numbers in decimal and Arm's as 0x41."""
    if "CPU part" in fields:
        return "arm", _number(fields.get("CPU implementer", "")), _number(fields["CPU part"])
    return fields.get("vendor_id", ""), _number(fields.get("cpu family", "")), _number(fields.get("model", ""))


def _number(text: str) -> int:
    return int(text, 0) if re.fullmatch(r"0x[0-9a-fA-F]+|[1-9]\d*", text) else 0


def _caches(sysfs: Path) -> tuple[CacheInfo, ...]:
    found = [_cache(folder) for folder in sorted((sysfs / "cpu0" / "cache").glob("index*"))]
    known = tuple(item for item in found if item is not None)
    return known or _sysconf_caches()


def _cache(folder: Path) -> CacheInfo | None:
    texts = {name: _read_text(folder / name) for name in ("level", "type", "size", "coherency_line_size")}
    if None in texts.values() or str(texts["type"]).strip() not in ("Data", "Unified"):
        return None
    size = re.fullmatch(r"(\d+)([KM]?)", str(texts["size"]).strip())
    level, line = str(texts["level"]).strip(), str(texts["coherency_line_size"]).strip()
    if size is None or not level.isdigit() or not line.isdigit() or int(line) == 0 or int(size[1]) == 0:
        return None
    scale = {"": 1, "K": 1024, "M": 1024 * 1024}[size[2]]
    sharers = _usable(_cpu_list(_read_text(folder / "shared_cpu_list") or ""))
    return CacheInfo(
        level=int(level), size_bytes=int(size[1]) * scale, line_bytes=int(line), sharer_count=max(1, len(sharers))
    )


def _cpu_list(text: str) -> frozenset[int]:
    """The CPUs of Linux's list notation: "0-2,64" is {0, 1, 2, 64}."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1))


def _usable(cpus: frozenset[int]) -> frozenset[int]:
    return cpus & os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else cpus


def _sysconf_caches() -> tuple[CacheInfo, ...]:
    """The caches by `os.sysconf`, where sysfs has none; glibc answers 0 for what it does not know."""
    caches = []
    for level, name in ((1, "LEVEL1_DCACHE"), (2, "LEVEL2_CACHE"), (3, "LEVEL3_CACHE")):
        keys = (f"SC_{name}_SIZE", f"SC_{name}_LINESIZE")
        if all(key in os.sysconf_names for key in keys):
            size, line = (os.sysconf(key) for key in keys)
            if size > 0 and line > 0:
                caches.append(CacheInfo(level=level, size_bytes=size, line_bytes=line, sharer_count=1))
    return tuple(caches)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
