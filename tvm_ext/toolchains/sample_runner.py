"""Launches of sample programs by a worker process, which is replaced where a kernel crashes it or hangs.

The standard library, `byoc_cutlass.screening` and `sample_worker.py` alone: this file travels with a bundle of programs
to the machine that has the GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_ext.byoc_cutlass.screening import FLUSHED_BYTES, WARM_UP_RUNS, SampleLaunch, TimedLaunch

WORKER = Path(__file__).with_name("sample_worker.py")

LAUNCH_LIMIT_S = 10.0
"""Of a launch with all its runs; what takes longer hangs."""


class SampleRunner:
    """Runs launches in a worker: `screening.LaunchTimer`. A worker that crashes or hangs is replaced."""

    def __init__(self, libraries: Mapping[str, Path], limit_s: float = LAUNCH_LIMIT_S) -> None:
        self.libraries, self.limit_s = libraries, limit_s
        self.started = 0
        self._process: subprocess.Popen[str] | None = None

    def time(self, launches: Sequence[SampleLaunch], runs: int) -> list[TimedLaunch]:
        """What came of ``launches``. Where one takes the others with it, each is tried alone and the rest once more."""
        done: dict[str, TimedLaunch] = {}
        pending = list(launches)
        while pending:
            results, why = self._ask(pending, runs)
            before = len(pending)
            for item, result in zip(tuple(pending), results, strict=True):
                if result is not None:
                    done[item.configuration] = _timed(item, result)
                    pending.remove(item)
            if pending and len(pending) == before:
                found = self._suspects(pending, why)
                done |= {item.launch.configuration: item for item in found}
                pending = [item for item in pending if item.configuration not in done]
        return [done[launch.configuration] for launch in launches]

    def _suspects(self, pending: Sequence[SampleLaunch], why: str) -> list[TimedLaunch]:
        """Those that fail alone; all of them where none does, so that this comes to an end."""
        found = []
        for item in pending:
            (result,), reason = self._ask([item], 1) if len(pending) > 1 else ([None], why)
            if result is None:
                found.append(TimedLaunch(item, "timed_out" if reason == _HANGS else "crashed", reason=reason))
            elif result["outcome"] != "ok":
                found.append(_timed(item, result))
        return found or [TimedLaunch(item, "crashed", reason=f"beside others: {why}") for item in pending]

    def _ask(self, launches: Sequence[SampleLaunch], runs: int) -> tuple[list[dict[str, Any] | None], str]:
        """The worker's results, None for what it did not get to, and what became of the worker."""
        request = {
            "launches": [{**launch.arguments, "library": str(self.libraries[launch.symbol])} for launch in launches],
            "runs": runs,
            "warm_up": WARM_UP_RUNS,
            "flushed_bytes": FLUSHED_BYTES,
        }
        worker = self._worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        hangs = threading.Event()

        def stop() -> None:
            hangs.set()
            worker.kill()

        watch = threading.Timer(self.limit_s * len(launches), stop)
        watch.start()
        try:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except OSError:
            line = ""
        finally:
            watch.cancel()
        if not line.endswith("\n"):
            status = self._end()
            return [None] * len(launches), _HANGS if hangs.is_set() else f"the process ended with status {status}"
        reply = json.loads(line)
        if reply["broken"]:
            self._end()
        return reply["results"], "the device was broken"

    def _worker(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-I", str(WORKER)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
            self.started += 1
        return self._process

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        process.communicate()
        return process.returncode

    def close(self) -> None:
        """End the worker."""
        self._end()


_HANGS = "it did not end in time"


def _timed(launch: SampleLaunch, result: Mapping[str, Any]) -> TimedLaunch:
    times = tuple(map(float, result.get("times_us", ())))
    return TimedLaunch(launch, str(result["outcome"]), times, str(result.get("reason", "")))
