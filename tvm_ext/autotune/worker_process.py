"""The other end of a `kernel_worker`: requests with a time limit, to a process that may crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from tvm_ext.errors import MeasurementError
from tvm_ext.records.measurement import TrialOutcome

from .kernel_host import KernelError

START_LIMIT_S = 120.0
"""Importing TVM takes a second; on a machine that swaps, far longer."""

_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); sys.modules['torch'] = None; "
    "from tvm_ext.autotune.kernel_worker import main; del sys.modules['torch']; "
)
"""TVM imports PyTorch where it is installed, for two seconds; a worker needs none of it."""
_SHOWN_CHARACTERS = 300  # a choice: of a worker's last words, what an error message shows


class WorkerDied(Exception):  # noqa: N818 - what happened, not an error of ours
    """The process has ended, of its own or because it took too long; ``outcome`` says which."""

    def __init__(self, outcome: TrialOutcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome: TrialOutcome = outcome


class WorkerProcess:
    """One process, in a session of its own, so that Ctrl-C reaches us alone. `end` may be called by any thread."""

    def __init__(self, role: str, *, memory_bytes: int = 0) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._lines = b""
        self._ended = threading.Lock()
        code = f"{_CODE}main({role!r}, {memory_bytes})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise MeasurementError(f"a worker process cannot be started: {error}.", "free some memory") from error
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, object], limit_s: float) -> Any:
        """The worker's answer. Raises KernelError with its refusal, WorkerDied where there is none in time."""
        if not self._ready:
            self._receive(START_LIMIT_S)
            self._ready = True
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # closed pipes
            raise self._death() from None
        reply = self._receive(limit_s)
        if "outcome" in reply:
            raise KernelError(reply["outcome"], reply["reason"])
        return reply["ok"]

    def _receive(self, limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        pipe = self._process.stdout
        assert pipe is not None
        while b"\n" not in self._lines:
            try:
                ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
                if not ready:
                    self.end()
                    raise WorkerDied("timed_out", f"it did not end within {limit_s:g} s")
                read = os.read(pipe.fileno(), 1 << 16)
            except (OSError, ValueError):  # ended by another thread
                read = b""
            if not read:
                raise self._death()
            self._lines += read
        line, _, self._lines = self._lines.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _death(self) -> WorkerDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        said = self._said()
        self.end()
        status = self._process.returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return WorkerDied("crashed", f"its process ended with {how}{f': {said}' if said else ''}")

    def _said(self) -> str:
        """The last line of its error output."""
        try:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
        except (OSError, ValueError):
            return ""
        return lines[-1][-_SHOWN_CHARACTERS:] if lines else ""

    def end(self) -> None:
        """Kill the process and what it has started, and wait until it is gone. A second call does nothing."""
        with self._ended:
            if self._errors.closed:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            self._errors.close()
