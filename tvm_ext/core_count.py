"""How many CPU cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_core_count() -> int:
    """CPU cores this process may use: its affinity mask, further limited by its control group's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _control_group_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    # A quota of 1.5 cores keeps two threads busy three quarters of the time; rounding down would waste half a core.
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _control_group_cores(membership: Path, root: Path) -> float | None:
    """The tightest CPU quota on the way from this process' control group to the root, in cores; None: no limit.

    Version 2 states ``cpu.max`` as "quota period" in microseconds, e.g. "150000 100000" for 1.5 cores, "max" for
    none; version 1 has the two numbers in ``cpu.cfs_quota_us`` (-1: none) and ``cpu.cfs_period_us``.
    """
    quotas = [_read_quota(folder) for folder in _control_group_folders(membership, root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _control_group_folders(membership: Path, root: Path) -> list[Path]:
    """Every folder whose quota applies. A container often sees its own group as the root, hence the root itself."""
    folders = [root, root / "cpu"]
    for line in (_read_text(membership) or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" or "cpu" in controllers.split(","):
            base = root if hierarchy == "0" else root / "cpu"
            parts = [part for part in path.split("/") if part and part != ".."]
            folders += [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _read_quota(folder: Path) -> float | None:
    text = _read_text(folder / "cpu.max")
    if text is None:
        quota, period = _read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")
        text = f"{quota} {period}"
    numbers = text.split()
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers) or int(numbers[1]) == 0:
        return None
    return int(numbers[0]) / int(numbers[1])


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
