"""Runs sample programs of CUTLASS's templates on the machine's first CUDA device, in a process of its own.

A kernel that hangs, or breaks the process' use of the device, costs this process, and whoever asked starts another.
One line of JSON asks, one answers: ``{"launches": [...], "runs": 5, ...}``, ``{"results": [...], "broken": false}``,
with null for a launch that did not get its turn. CUDA's runtime is the one inside the programs' libraries. The launches
of a request take turns, each behind a write over the device's cache; times are between two events around it.

The standard library alone: this file travels with a bundle of programs to the machine that has the GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
import sys
from collections.abc import Sequence
from typing import Any, TextIO

_HOST_TO_DEVICE = 1  # cudaMemcpyHostToDevice
_BLOCK_BYTES = 1 << 20  # a choice: drawn once and copied over and over
_DRAWN = 4096  # a choice: numbers that differ; drawing them in Python takes milliseconds


class LaunchError(Exception):
    """A launch failed; ``broken`` says that nothing works in this process any more."""

    def __init__(self, reason: str, broken: bool = False) -> None:
        super().__init__(reason)
        self.broken = broken


class Cuda:
    """CUDA's runtime as one of the libraries has it (``tvm_ext_cudaMalloc``); all share the device's memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._text = library.tvm_ext_cudaGetErrorString
        self._text.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object, broken: bool = False) -> None:
        """Raise LaunchError, with what CUDA says, unless ``name`` works."""
        error = getattr(self._library, f"tvm_ext_{name}")(*arguments)
        if error:
            text = self._text(error)
            self._library.tvm_ext_cudaGetLastError()
            raise LaunchError(f"{name}: {text.decode(errors='replace')} ({error})", broken)

    def allocate(self, size: int) -> int:
        address = ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        return int(address.value or 0)

    def free(self, address: int) -> None:
        self._library.tvm_ext_cudaFree(ctypes.c_void_p(address))

    def fill(self, address: int, size: int, dtype: str) -> None:
        """Small random numbers, the same at every call: zeros would draw less power, and run faster."""
        block = random_block(dtype, min(size, _BLOCK_BYTES))
        for start in range(0, size, len(block)):
            length = ctypes.c_size_t(min(len(block), size - start))
            self.call("cudaMemcpy", ctypes.c_void_p(address + start), block, length, _HOST_TO_DEVICE)

    def event(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.call("cudaEventCreate", ctypes.byref(made))
        return made


def random_block(dtype: str, size: int) -> bytes:
    """At least ``size`` bytes of finite numbers of ``dtype``."""
    draw = random.Random(dtype)
    if dtype in ("float16", "float32"):
        drawn = struct.pack(f"{_DRAWN}{'e' if dtype == 'float16' else 'f'}", *(draw.gauss(0, 1) for _ in range(_DRAWN)))
    elif dtype == "bfloat16":
        wide = struct.pack(f"<{_DRAWN}f", *(draw.gauss(0, 1) for _ in range(_DRAWN)))
        drawn = b"".join(wide[place + 2 : place + 4] for place in range(0, len(wide), 4))
    elif dtype.startswith("float8"):
        drawn = bytes(draw.getrandbits(8) & 0xBF for _ in range(_DRAWN))  # the largest exponents may be no numbers
    else:
        drawn = draw.randbytes(_DRAWN)
    return drawn * -(-size // len(drawn))


class Program:
    """A launch that is ready to run: its function, its arguments, its workspace."""

    def __init__(self, cuda: Cuda, library: ctypes.CDLL, launch: dict[str, Any], buffers: Sequence[int]) -> None:
        self._cuda = cuda
        self._run = getattr(library, launch["symbol"])
        self._keep, self._call = packed_call(launch, buffers)
        asked = getattr(library, f"{launch['symbol']}_workspace_bytes")
        asked.restype = ctypes.c_int64
        self._bytes = int(asked(self._call))
        if self._bytes < 0:
            raise LaunchError("the program refuses the extents")
        self.workspace = cuda.allocate(self._bytes) if self._bytes else 0

    def run(self, start: ctypes.c_void_p, end: ctypes.c_void_p, flushed: int, size: int) -> float:
        """Microseconds of one launch; raises LaunchError."""
        call = self._cuda.call
        call("cudaMemsetAsync", ctypes.c_void_p(flushed), 0, ctypes.c_size_t(size), None, broken=True)
        call("cudaEventRecord", start, None, broken=True)
        arguments = (ctypes.c_void_p(self.workspace or None), ctypes.c_int64(self._bytes), None)
        status = self._run(self._call, *arguments)
        call("cudaEventRecord", end, None, broken=True)
        call("cudaEventSynchronize", end, broken=True)
        call("cudaGetLastError")
        if status:
            raise LaunchError(f"the program answers status {status}")
        elapsed = ctypes.c_float()
        call("cudaEventElapsedTime", ctypes.byref(elapsed), start, end)
        return float(elapsed.value) * 1e3


def packed_call(launch: dict[str, Any], buffers: Sequence[int]) -> tuple[list[object], ctypes.Array[ctypes.c_char]]:
    """The structure that the program takes (`host.CallForm`), and what it points to."""
    operands = (ctypes.c_void_p * (len(launch["operands"]) + 1))(*(buffers[place] for place in launch["operands"]))
    apart = (ctypes.c_int64 * (len(launch["distances"] or ()) + 1))(*(launch["distances"] or ()))
    addresses = [*(buffers[place] for place in launch["factors"]), ctypes.addressof(operands)]
    addresses += [*([] if launch["distances"] is None else [ctypes.addressof(apart)]), buffers[-1]]
    packed = struct.pack(f"{launch['packing']}{len(addresses)}P", *launch["numbers"], *addresses)
    return [operands, apart], ctypes.create_string_buffer(packed, len(packed))


class Worker:
    """Libraries that are loaded, and the device's memory that is kept between requests."""

    def __init__(self) -> None:
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._cuda: Cuda | None = None
        self._flushed: tuple[int, int] = (0, 0)
        self._events: list[ctypes.c_void_p] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request; ``broken`` in it says that this process has to end."""
        results: list[dict[str, Any] | None] = [None] * len(request["launches"])
        addresses: list[int] = []
        try:
            programs = self._prepared(request, results, addresses)
            times = self._times(request, programs, results)
            for place, measured in times.items():
                results[place] = {"outcome": "ok", "times_us": measured}
        except LaunchError as error:
            if not error.broken:  # the device's memory, say: no launch of this request can run
                failed = {"outcome": "launch_failed", "reason": str(error)}
                return {"results": [result or failed for result in results], "broken": False}
            return {"results": results, "broken": True}
        finally:
            for address in addresses:
                if self._cuda is not None:
                    self._cuda.free(address)
        return {"results": results, "broken": False}

    def _prepared(
        self, request: dict[str, Any], results: list[dict[str, Any] | None], addresses: list[int]
    ) -> dict[int, Program]:
        """The launches that can run, by place; all of a request have buffers of the same sizes."""
        programs: dict[int, Program] = {}
        buffers: dict[str, list[int]] = {}
        for place, launch in enumerate(request["launches"]):
            made = self._program(launch, buffers, addresses)
            if isinstance(made, Program):
                programs[place] = made
            else:
                results[place] = {"outcome": "launch_failed", "reason": made}
        return programs

    def _program(self, launch: dict[str, Any], buffers: dict[str, list[int]], addresses: list[int]) -> Program | str:
        """The launch, ready to run, or why it is not."""
        try:
            library = self._load(launch["library"])
            cuda = self._cuda = self._cuda or Cuda(library)
            sizes = json.dumps(launch["buffers"])
            if sizes not in buffers:
                buffers[sizes] = self._allocated(cuda, launch["buffers"], addresses)
            made = Program(cuda, library, launch, buffers[sizes])
        except (LaunchError, OSError, AttributeError, KeyError, struct.error) as error:
            return f"{type(error).__name__}: {error}"
        addresses += [made.workspace] if made.workspace else []
        return made

    def _allocated(self, cuda: Cuda, sizes: Sequence[dict[str, Any]], addresses: list[int]) -> list[int]:
        found = []
        for size in sizes:
            found.append(cuda.allocate(size["bytes"]))
            addresses.append(found[-1])
            cuda.fill(found[-1], size["bytes"], size["dtype"])
        return found

    def _times(
        self, request: dict[str, Any], programs: dict[int, Program], results: list[dict[str, Any] | None]
    ) -> dict[int, list[float]]:
        """Microseconds by place, of launches that take turns; those that fail leave."""
        times: dict[int, list[float]] = {number: [] for number in programs}
        if not programs or self._cuda is None:
            return times
        flushed = self._flushed_bytes(self._cuda, int(request["flushed_bytes"]))
        self._events = self._events or [self._cuda.event(), self._cuda.event()]
        for turn in range(request["warm_up"] + request["runs"]):
            for number in tuple(times):
                time_us = self._turn(programs[number], results, number, flushed)
                if time_us is None:
                    del times[number]
                elif turn >= request["warm_up"]:
                    times[number].append(max(time_us, 1e-3))
        return times

    def _turn(
        self, program: Program, results: list[dict[str, Any] | None], place: int, flushed: tuple[int, int]
    ) -> float | None:
        """Microseconds of a launch; None, and the reason in ``results``, where it fails. Raises where all is broken."""
        try:
            return program.run(self._events[0], self._events[1], *flushed)
        except LaunchError as error:
            results[place] = {"outcome": "launch_failed", "reason": str(error)}
            if error.broken:
                raise
            return None

    def _flushed_bytes(self, cuda: Cuda, size: int) -> tuple[int, int]:
        if not self._flushed[1]:
            self._flushed = (cuda.allocate(size), size)
        return self._flushed

    def _load(self, path: str) -> ctypes.CDLL:
        if path not in self._libraries:
            self._libraries[path] = ctypes.CDLL(path)
        return self._libraries[path]


def describe_device() -> dict[str, Any]:
    """Name and capability of the first CUDA device; or why there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"why": f"there is no NVIDIA driver ({error})"}
    count, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return {"why": "the NVIDIA driver has no device"}
    driver.cuDeviceGet(ctypes.byref(device), 0)
    name, numbers = ctypes.create_string_buffer(256), []
    driver.cuDeviceGetName(name, len(name), device)
    for attribute in (75, 76):  # compute capability, major and minor
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(int(value.value))
    return {"name": name.value.decode(errors="replace"), "capability": numbers}


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer until there is nothing left to read, or the device is broken."""
    worker = Worker()
    for line in requests:
        reply = worker.answer(json.loads(line))
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply["broken"]:
            return


if __name__ == "__main__":
    if sys.argv[1:] == ["--device"]:
        sys.stdout.write(json.dumps(describe_device()) + "\n")
    else:
        answers = os.dup(1)
        os.dup2(2, 1)  # what a program prints is no answer
        with os.fdopen(answers, "w", encoding="utf-8") as pipe:
            serve(sys.stdin, pipe)
