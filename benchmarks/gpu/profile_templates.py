"""Profile a bundle's templates on the machine with the GPU: Bolt's profiler (§3.2.2), with programs made elsewhere.

    python3 gpu-bundle/profile_templates.py --output measurements.jsonl --minutes 8

Needs Python and a driver. Every round of a product is written as soon as it is over; a run that is started again goes
on where the last one ended. Here: ``tvm-ext database import measurements.jsonl``, and builds choose templates by it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER, PLAN = "profile", "profile.json"
_FAILED = float("inf")
_KEPT = ("ok", "wrong", "launch_failed", "crashed", "timed_out")


def known_times(output: Path) -> dict[str, dict[str, float]]:
    """What ``output`` has already: times by workload and configuration, infinite for failures that are final."""
    found: dict[str, dict[str, float]] = {}
    for line in output.read_text(encoding="utf-8").splitlines() if output.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # a last line that a kill cut off
            continue
        trial = record["trial"]
        if trial["outcome"] != "timed_out":
            times = sorted(trial["times_us"])
            time_us = times[len(times) // 2] if times else _FAILED
            found.setdefault(_key(record["workload"]), {})[trial["configuration"]] = time_us
    return found


def why_not_here(folder: Path) -> str:
    """Why this machine cannot measure the bundle's programs; empty where it can.

    Asked before anything runs: what fails for want of a device would be kept as a failure of the templates.
    """
    plan = json.loads((folder / FOLDER / PLAN).read_text(encoding="utf-8"))
    worker = folder / FOLDER / "tvm_ext" / "toolchains" / "sample_worker.py"
    done = subprocess.run([sys.executable, "-I", str(worker), "--device"], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{worker.name} cannot be run ({(done.stderr.strip() or 'no word').splitlines()[-1]})"
    device = json.loads(done.stdout)
    if "why" in device:
        return f"there is no CUDA device to measure on: {device['why']}"
    if device["capability"] != plan["capability"]:
        have, made = (".".join(map(str, item)) for item in (device["capability"], plan["capability"]))
        return f"{device['name']} is of compute capability {have}, the programs are for {made}: make the bundle for it"
    return ""


def _key(workload: Any) -> str:
    return json.dumps(workload, sort_keys=True)


def profile(folder: Path, output: Path, minutes: float) -> int:
    """Measure what ``output`` has not; how many launches ran."""
    sys.path.insert(0, str(folder / FOLDER))
    from tvm_ext.byoc_cutlass.screening import SampleLaunch, ScreeningLimits, screen
    from tvm_ext.toolchains.sample_runner import SampleRunner

    plan = json.loads((folder / FOLDER / PLAN).read_text(encoding="utf-8"))
    libraries = {symbol: folder / FOLDER / name for symbol, name in plan["libraries"].items()}
    known, end, launches = known_times(output), time.monotonic() + 60 * minutes, 0
    with contextlib.closing(SampleRunner(libraries)) as runner, output.open("a", encoding="utf-8") as file:
        for region in plan["regions"]:
            if time.monotonic() > end:
                print(f"{minutes:g} minutes are over; start again to go on", flush=True)
                break
            workload = region["workload"]
            variants = {name: [SampleLaunch(**item) for item in items] for name, items in region["variants"].items()}

            def record(done: Sequence[Any], workload: Any = workload) -> None:
                file.writelines(_line(plan["lines_schema"], workload, item) for item in done if item.outcome in _KEPT)
                file.flush()

            first = [SampleLaunch(**item) for item in region["launches"]]
            limits = ScreeningLimits(**plan["limits"])
            times = known.get(_key(workload), {})
            count = screen(first, lambda item, found=variants: found[item.configuration], runner, record, times, limits)
            launches += count
            print(f"{region['pattern']}: {count} launches of {len(first)} templates", flush=True)
    return launches


def _line(schema: int, workload: Any, done: Any) -> str:
    """One measurement, as `tvm-ext database import` reads it."""
    trial = {
        "configuration": done.launch.configuration,
        "outcome": done.outcome,
        "times_us": list(done.times_us),
        "reason": done.reason[:1000].replace("\0", "?"),
        "origin": secrets.token_hex(12),
        "taken_at_s": time.time(),
    }
    return json.dumps({"schema": schema, "workload": workload, "trial": trial}) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the exit status."""
    parser = argparse.ArgumentParser(description="Profile CUTLASS's templates.")
    parser.add_argument("--bundle", type=Path, default=HERE, help="the bundle's folder (default: where this script is)")
    parser.add_argument("--output", type=Path, default=Path("measurements.jsonl"))
    parser.add_argument("--minutes", type=float, default=7.5)
    settings = parser.parse_args(arguments)
    if not (settings.bundle / FOLDER / PLAN).is_file():
        print(f"error: {settings.bundle} has no programs to profile: make it with --profile", file=sys.stderr)
        return 2
    why_not = why_not_here(settings.bundle)
    if why_not:
        print(f"error: {why_not}", file=sys.stderr)
        return 2
    print(f"{profile(settings.bundle, settings.output, settings.minutes)} launches, in {settings.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
