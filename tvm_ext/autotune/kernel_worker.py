"""A process that builds, or loads and times, what it is told line by line: JSON in, JSON out.

Started by `worker_process.py`, which replaces it where a kernel crashes it, hangs, or eats its memory. It ends by
itself as soon as nobody holds the other end of its input: no kill of the parent leaves it behind, whatever it is at.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import queue
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from tvm_ext.devices.cpu_info import read_cpu_info
from tvm_ext.options import configure_threads
from tvm_ext.records.kernel_job import KernelJob
from tvm_ext.records.serialise import from_json

from .kernel_host import KernelDevice, KernelError, KernelHost, LocalDevice

READY = "ready"
NICENESS = 10
"""Of builders: what is timed on the same machine comes first."""


def main(role: str, memory_bytes: int) -> None:
    """Serve requests until the input ends; ``role`` is "build" or "run". ``memory_bytes`` of 0 are unlimited."""
    replies = _own_output()
    configure_threads()
    if role == "build":
        os.nice(NICENESS)
    _limit_memory(memory_bytes)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    worker = KernelWorker()
    _answer(replies, {"ok": READY})
    while True:
        request = requests.get()
        try:
            _answer(replies, {"ok": worker.ask(request)})
        except KernelError as error:
            _answer(replies, {"outcome": error.outcome, "reason": str(error)})


class KernelWorker:
    """What answers requests, one after another: `WorkerProcess` is the same in a process of its own."""

    is_alive = True

    def __init__(self) -> None:
        self._host: KernelHost | None = None
        self._do: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
            "device": self._device,
            "build": self._build,
            "load": self._load,
            "time": self._time,
            "unload": self._unload,
            "release": self._release,
        }

    def ask(self, request: Mapping[str, Any], _limit_s: float = 0.0) -> Any:
        """The answer, however long it takes; raises KernelError."""
        return self._do[request["do"]](request)

    def end(self) -> None:
        """Forget all kernels."""
        self._host = None

    def _device(self, request: Mapping[str, Any]) -> str:
        """Kernels are to run on a device of this machine, or on one that a tracker gives us."""
        device = self._connected(request) if request.get("tracker") else _local(request)
        self._host = KernelHost(device)
        return device.name

    def _connected(self, request: Mapping[str, Any]) -> KernelDevice:
        from .tracker import connect  # by TVM's compiler, which is not there where only kernels run

        return connect(request["tracker"], request["key"], request["kind"], request["wait_s"], request["session_s"])

    def _build(self, request: Mapping[str, Any]) -> None:
        module, _, name = request["make"].rpartition(":")
        make: Callable[[KernelJob], bytes] = getattr(importlib.import_module(module), name)
        Path(request["output"]).write_bytes(make(from_json(KernelJob, request["job"])))

    def _load(self, request: Mapping[str, Any]) -> None:
        assert self._host is not None
        expected = Path(request["expected"]) if request["expected"] else None
        job = from_json(KernelJob, request["job"])
        self._host.load(request["number"], Path(request["library"]), job, expected)

    def _time(self, request: Mapping[str, Any]) -> list[float]:
        assert self._host is not None
        return self._host.time(request["number"], request["samples"], request["sample_s"])

    def _release(self, _request: Mapping[str, Any]) -> None:
        """Let go of the device: a session ends with the last that refers to it."""
        self._host = None
        gc.collect()

    def _unload(self, request: Mapping[str, Any]) -> None:
        assert self._host is not None
        self._host.unload(request["number"])


def _local(request: Mapping[str, Any]) -> KernelDevice:
    """This machine's device; raises KernelError where there is none, which is no kernel's fault."""
    read_cpu_info()  # which asks for leave to use the CPU's tiles
    try:
        for library in request["libraries"]:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        return LocalDevice(request["kind"])
    except (OSError, LookupError) as error:
        raise KernelError("lost", f"there is no {request['kind']} here: {error}") from error


def _own_output() -> TextIO:
    """The pipe to the parent, under a number that no kernel writes to: what kernels print goes to the error output."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


def _answer(replies: TextIO, reply: Mapping[str, object]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _read(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)  # the parent has gone or wants us to


def _limit_memory(memory_bytes: int) -> None:
    """So much address space beyond what the process has now, TVM loaded."""
    if memory_bytes:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
