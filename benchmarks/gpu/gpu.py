"""The two ways to use the GPU: PyTorch (memory, references, peers, CUDA events), or TVM's runtime alone.

Nothing here needs TVM's compiler. A library's function is called with the tensors of either.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import graph_references
import numpy as np
import numpy_references
import references
from cases import Case, Tensor
from manifest import Arranged, BundleError

FLUSHED_BYTES = 256 << 20
"""Written before each timed call, so that inputs come from memory: five times the second-level cache of an H200."""
SAMPLES = (5, 30)  # at least, at most
SAMPLE_BUDGET_S = 0.15


def load_runtime(package: Path) -> None:
    """Load TVM's runtime for CUDA from the bundle's folder ``package``; raises BundleError where that fails."""
    import tvm_ffi

    if tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda", allow_missing=True) is not None:
        return
    try:
        ctypes.CDLL(str(package / "lib" / "libtvm_runtime.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(package / "lib" / "libtvm_runtime_cuda.so"))
    except OSError as error:
        raise BundleError(
            f"TVM's runtime cannot be loaded: {error}. It needs libcuda.so.1 and libcudart.so.13"
        ) from error


def driver_version() -> int:
    """13000 for a driver that supports CUDA 13.0; raises BundleError without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BundleError(f"this machine has no NVIDIA driver: {error}") from error
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value


class Gpu(ABC):
    """A device with memory, a reference and a clock."""

    name: str
    capability: tuple[int, int]

    @abstractmethod
    def inputs(self, case: Case) -> list[Any]:
        """Random tensors, the same at every call."""

    @abstractmethod
    def poisoned(self, tensor: Tensor) -> Any:
        """A new tensor full of NaN, or of the largest integer."""

    @abstractmethod
    def poison(self, output: Any) -> None:
        """Fill what a function answered with NaN, or with the largest integer."""

    @abstractmethod
    def arranged(self, tensor: Any, form: Arranged) -> Any:
        """A copy of ``tensor`` in another form."""

    @abstractmethod
    def adopt(self, results: Any) -> tuple[Any, ...]:
        """What a function of the Relax VM answered, as tensors of this class."""

    @abstractmethod
    def expected(self, case: Case, inputs: Sequence[Any]) -> Any:
        """The exact result; raises NotImplementedError where none can be computed."""

    @abstractmethod
    def error(self, actual: Any, expected: Any) -> float:
        """Relative, by norm, of the whole output; infinite where it holds NaN."""

    @abstractmethod
    def check(self) -> None:
        """Raise RuntimeError where an earlier kernel has broken the process' use of the device for good."""

    @abstractmethod
    def time(self, call: Callable[[], object]) -> list[float]:
        """Microseconds of some calls, each with cold caches."""

    def peers(self, case: Case, compiled: bool) -> dict[str, Callable[[Sequence[Any]], Any]]:
        """Other libraries' ways to compute ``case``, each a function of the inputs."""
        return {}


class TorchGpu(Gpu):
    """PyTorch's tensors and streams; TVM's functions take them as they are."""

    def __init__(self, torch: Any, place: str = "cuda") -> None:
        self._torch, self._place = torch, place
        self.name = torch.cuda.get_device_name(0)
        self.capability = torch.cuda.get_device_capability(0)
        self._flushed = torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device=place)

    def inputs(self, case: Case) -> list[Any]:
        generator = self._torch.Generator(device=self._place).manual_seed(case.seed)
        return [self._random(item, generator) for item in case.inputs]

    def _random(self, item: Tensor, generator: Any) -> Any:
        torch, dtype = self._torch, getattr(self._torch, item.dtype)
        if not dtype.is_floating_point:
            return torch.randint(*item.bounds, item.shape, dtype=dtype, device=self._place, generator=generator)
        values = torch.randn(item.shape, dtype=torch.float32, device=self._place, generator=generator)
        return (values * item.scale + item.mean).to(dtype)

    def poisoned(self, tensor: Tensor) -> Any:
        dtype = getattr(self._torch, tensor.dtype)
        made = self._torch.empty(tensor.shape, dtype=dtype, device=self._place)
        self.poison(made)
        return made

    def poison(self, output: Any) -> None:
        output.fill_(math.nan if output.dtype.is_floating_point else self._torch.iinfo(output.dtype).max)

    def arranged(self, tensor: Any, form: Arranged) -> Any:
        made = self._torch.zeros(form.shape, dtype=tensor.dtype, device=self._place)
        moved = tensor.permute(form.axes)
        made[tuple(slice(extent) for extent in moved.shape)] = moved
        return made

    def adopt(self, results: Any) -> tuple[Any, ...]:
        return tuple(self._torch.from_dlpack(item) for item in _flat(results))

    def expected(self, case: Case, inputs: Sequence[Any]) -> Any:
        return references.reference(self._torch, case, inputs)

    def error(self, actual: Any, expected: Any) -> float:
        wide = self._torch.float64
        difference = self._torch.linalg.vector_norm(actual.to(wide) - expected.to(wide))
        value = float(difference / self._torch.linalg.vector_norm(expected.to(wide)).clamp_min(1e-300))
        return value if math.isfinite(value) else math.inf

    def check(self) -> None:
        self._torch.cuda.synchronize()

    def time(self, call: Callable[[], object]) -> list[float]:
        for _ in range(2):
            call()
        self._torch.cuda.synchronize()
        started, samples = time.perf_counter(), []
        while len(samples) < SAMPLES[0] or (
            len(samples) < SAMPLES[1] and time.perf_counter() - started < SAMPLE_BUDGET_S
        ):
            samples.append(self._sample(call))
        return samples

    def _sample(self, call: Callable[[], object]) -> float:
        """While the cache is overwritten the processor prepares the call, whose own time is not seen then."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def peers(self, case: Case, compiled: bool) -> dict[str, Callable[[Sequence[Any]], Any]]:
        eager = references.peer(self._torch, case)
        found = {"torch": eager}
        if compiled:
            # mode "default": autotuning, "max-autotune", takes longer than the whole benchmark may
            found["torch_compile"] = self._torch.compile(eager, dynamic=False)
            if case.operator == graph_references.OPERATOR:  # most of a model's time may be its launches
                found["torch_graph"] = graphed(self._torch, found["torch_compile"])
        return found


def graphed(torch: Any, call: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """``call`` as a CUDA graph, recorded at the first call: that one's inputs are read again at every other.

    Not by torch.compile's mode "reduce-overhead", which copies all inputs, weights among them, before each replay.
    """
    recorded: list[Any] = []

    def replay(inputs: Sequence[Any]) -> Any:
        if not recorded:
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # compiles, and takes its memory outside of the recording
                call(inputs)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = call(inputs)
            recorded.extend((graph, result))
        recorded[0].replay()
        return recorded[1]

    return replay


class RuntimeGpu(Gpu):
    """TVM's runtime and NumPy alone."""

    def __init__(self, tvm: Any) -> None:
        self._tvm, self._device = tvm, tvm.cuda(0)
        major, minor = str(self._device.compute_version).split(".")
        self.name, self.capability = str(self._device.device_name), (int(major), int(minor))

    def inputs(self, case: Case) -> list[Any]:
        generator = np.random.default_rng(case.seed)
        return [self._upload(_random(item, generator)) for item in case.inputs]

    def _upload(self, array: Any) -> Any:
        return self._tvm.runtime.tensor(array, self._device)

    def poisoned(self, tensor: Tensor) -> Any:
        return self._upload(_poison(tensor.shape, tensor.dtype))

    def poison(self, output: Any) -> None:
        output.copyfrom(_poison(tuple(map(int, output.shape)), str(output.dtype)))

    def arranged(self, tensor: Any, form: Arranged) -> Any:
        return self._upload(arranged(tensor.numpy(), form))

    def adopt(self, results: Any) -> tuple[Any, ...]:
        return _flat(results)

    def expected(self, case: Case, inputs: Sequence[Any]) -> Any:
        return numpy_references.reference(case, [item.numpy() for item in inputs])

    def error(self, actual: Any, expected: Any) -> float:
        difference = np.linalg.norm(actual.numpy().astype("float64").ravel() - expected.ravel())
        value = float(difference / max(float(np.linalg.norm(expected)), 1e-300))
        return value if math.isfinite(value) else math.inf

    def check(self) -> None:
        self._device.sync()

    def time(self, call: Callable[[], object]) -> list[float]:
        """By the processor's clock: launches are included."""
        samples = []
        for _ in range(SAMPLES[0]):
            self._device.sync()
            start = time.perf_counter()
            call()
            self._device.sync()
            samples.append((time.perf_counter() - start) * 1e6)
        return samples


def arranged(array: Any, form: Arranged) -> Any:
    """``array`` in another form, in NumPy."""
    made = np.zeros(form.shape, array.dtype)
    moved = array.transpose(form.axes)
    made[tuple(slice(extent) for extent in moved.shape)] = moved
    return made


def _random(item: Tensor, generator: np.random.Generator) -> Any:
    if np.dtype(item.dtype).kind != "f":
        return generator.integers(*item.bounds, item.shape).astype(item.dtype)
    return (generator.standard_normal(item.shape) * item.scale + item.mean).astype(item.dtype)


def _poison(shape: Sequence[int], dtype: str) -> Any:
    kind = np.dtype(dtype).kind
    return np.full(shape, np.nan if kind == "f" else np.iinfo(dtype).max, dtype)


def _flat(results: Any) -> tuple[Any, ...]:
    """The VM answers a tensor, or an array of them."""
    return (results,) if hasattr(results, "dtype") else tuple(results)


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """What is kept of times in microseconds."""
    return {"median_us": statistics.median(samples), "fastest_us": min(samples), "samples": len(samples)}
