"""Templates on the CPU: kernels of plain C++ behind the entry points of CUTLASS's, so that all around them runs.

`emit_gemm` and `emit_convolution` here have the arguments and the entry points of `byoc_cutlass`'s; their kernels
multiply as the launch says (extents, distances, orders, windows, roles of operands) and evaluate the same expression.
With them a region's host function is called as a model would call it, on tensors that are said to be a GPU's and lie in
this machine's memory.
The types that the machine's C++ compiler has not (bfloat16, 8-bit floats) are left out.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_ext.byoc_cutlass import depthwise, emit
from tvm_ext.byoc_cutlass import emit_back_to_back as pairs
from tvm_ext.byoc_cutlass import emit_convolution as convolutions
from tvm_ext.byoc_cutlass.back_to_back import PairConfig
from tvm_ext.byoc_cutlass.convolution import ConvolutionConfig, DepthwiseConfig
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.gemm import GemmConfig
from tvm_ext.byoc_cutlass.kernel_text import kernel_symbol
from tvm_ext.records.partition import CutlassProblem, Order
from tvm_ext.support.files import temporary_folder
from tvm_ext.toolchains import cutlass_samples, cutlass_toolchain
from tvm_ext.toolchains.cuda_toolchain import CompiledCuda

TYPES = {"float16": "_Float16", "float32": "float", "int8": "int8_t", "int32": "int32_t"}

_FUNCTIONS = """
#ifndef FUNCTIONS
#define FUNCTIONS
#include <cmath>
#include <cstdint>
static float relu(float x) { return x != x ? x : (x > 0 ? x : 0); }
static float gelu(float x) { return 0.5f * x * (1 + erff(x / sqrtf(2))); }
static float gelu_tanh(float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
static float sigmoid(float x) { return 1 / (1 + expf(-x)); }
static float silu(float x) { return x * sigmoid(x); }
static float hardswish(float x) { return x * fminf(fmaxf(x / 6 + 0.5f, 0), 1); }
static float softplus(float x) { return fmaxf(x, 0) + log1pf(expf(-fabsf(x))); }
static float maximum(float x, float y) { return x > y ? x : y; }
static float minimum(float x, float y) { return x < y ? x : y; }
static float cast(float x, char const*) { return float(_Float16(x)); }
#endif
"""

RUNTIME = """
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <ctime>
// A device of the capability that the test says, if it does; whatever is asked works, unless the test says an error.
extern "C" {
extern int tvm_ext_test_major __attribute__((weak)), tvm_ext_test_minor __attribute__((weak));
extern int tvm_ext_test_error __attribute__((weak));
int cudaGetDevice(int* device) { *device = 0; return &tvm_ext_test_error ? tvm_ext_test_error : 0; }
int cudaSetDevice(int) { return 0; }
int cudaDeviceGetAttribute(int* value, int which, int) {
  if (which == 75) *value = &tvm_ext_test_major ? tvm_ext_test_major : 8;
  if (which == 76) *value = &tvm_ext_test_minor ? tvm_ext_test_minor : 0;
  return 0;
}
int cudaMallocAsync(void** address, size_t bytes, void*) { *address = malloc(bytes); return 0; }
int cudaFreeAsync(void* address, void*) { free(address); return 0; }
int cudaGetLastError() { return 0; }
int cudaMalloc(void** address, size_t bytes) { return (*address = malloc(bytes)) == nullptr ? 2 : 0; }
int cudaFree(void* address) { free(address); return 0; }
int cudaMemcpy(void* to, void const* from, size_t bytes, int) { memcpy(to, from, bytes); return 0; }
int cudaMemsetAsync(void*, int, size_t, void*) { return 0; }
int cudaDeviceSynchronize() { return 0; }
int cudaEventCreate(void** event) { *event = malloc(sizeof(timespec)); return 0; }
int cudaEventRecord(void* event, void*) { return clock_gettime(CLOCK_MONOTONIC, static_cast<timespec*>(event)); }
int cudaEventSynchronize(void*) { return 0; }
int cudaEventElapsedTime(float* milliseconds, void* start, void* end) {
  auto const *a = static_cast<timespec*>(start), *b = static_cast<timespec*>(end);
  *milliseconds = float(b->tv_sec - a->tv_sec) * 1e3f + float(b->tv_nsec - a->tv_nsec) / 1e6f;
  return 0;
}
char const* cudaGetErrorString(int) { return "no CUDA-capable device is detected"; }
}
"""

TEST = """
#include <cstdint>
#include <cstdio>
// What the test sets and reads, and tvm-ffi's part.
extern "C" {
int tvm_ext_test_major = 8, tvm_ext_test_minor = 0, tvm_ext_test_error = 0;
char tvm_ext_test_message[1024];
void TVMFFIErrorSetRaisedFromCStr(char const* kind, char const* text) {
  snprintf(tvm_ext_test_message, sizeof(tvm_ext_test_message), "%s: %s", kind, text);
}
void* TVMFFIEnvGetStream(int32_t, int32_t) { return nullptr; }
}
"""


def emit_gemm(config: GemmConfig, epilogue: Epilogue, problem: CutlassProblem) -> str:
    """`byoc_cutlass.emit.emit_gemm`, for the CPU."""
    symbol, (layout_a, layout_b) = emit.symbol_of(config, epilogue, problem), problem.orders
    operand = TYPES[config.arithmetic if config.arithmetic in TYPES else "float32"]
    total = "int32_t" if operand == "int8_t" else "float"
    a = "i * call->lda + k" if layout_a == "row" else "k * call->lda + i"
    b = "k * call->ldb + j" if layout_b == "row" else "j * call->ldb + k"
    reads, quoted, out = _epilogue(epilogue, "call->n")
    place = "p * call->batch_d + i * call->n + j"
    start, store = _stored(epilogue, quoted, out, place, ("call->m * call->batch", "p * call->m + i"), ("call->n", "j"))
    return f"""{_FUNCTIONS}{emit.GEMM_CALL.once}
extern "C" int64_t {symbol}_workspace_bytes(GemmCall const* call) {{ return call->split_k > 1 ? 64 : 0; }}
extern "C" int32_t {symbol}(GemmCall const* call, void* workspace, int64_t bytes, void*) {{
  if ((workspace != nullptr) != (bytes > 0) || (call->split_k > 1) != (bytes > 0)) return 4;
  {start}
  for (int64_t p = 0; p < call->batch; ++p)
    for (int64_t i = 0; i < call->m; ++i)
      for (int64_t j = 0; j < call->n; ++j) {{
        {total} accum = 0;
        for (int64_t k = 0; k < call->k; ++k)
          accum += {total}(static_cast<{operand} const*>(call->a)[p * call->batch_a + {a}]) *
                   {total}(static_cast<{operand} const*>(call->b)[p * call->batch_b + {b}]);
        {reads}
        {store}
      }}
  return 0;
}}
"""


def _epilogue(epilogue: Epilogue, columns: str, before: int = 0) -> tuple[str, str, str]:
    """Reading its operands for row ``i`` and column ``j``, its expression, the type of what is stored.

    ``before``: operands of the call that are another epilogue's.
    """
    places = {"row": "j", "column": "i", "matrix": f"i * {columns} + j", "scalar": "0"}
    reads = "\n".join(
        f"float {item.name} = static_cast<{TYPES[item.dtype]} const*>(call->operands[{before + index}])"
        f"[{places[item.role]}{f' + p * call->operand_batches[{index}]' if item.batch_stride else ''}];"
        for index, item in enumerate(epilogue.operands)
    )
    return reads, epilogue.expression.replace("'", '"'), TYPES[epilogue.out_dtype]


def _stored(
    epilogue: Epilogue, quoted: str, out: str, place: str, rows: tuple[str, str], columns: tuple[str, str]
) -> tuple[str, str]:
    """Before all and at an element: the value to its ``place``, or to the sum or maximum over rows or columns.

    ``rows`` and ``columns``: how many there are, and which one it is.
    """
    if epilogue.reduction is None:
        return "", f"static_cast<{out}*>(call->d)[{place}] = {out}({quoted});"
    count, element = columns if epilogue.reduction.over == "rows" else rows
    value = quoted[quoted.index("(") :]
    fill, step = "0", f"to += {value};"
    if epilogue.reduction.function == "max":
        fill, step = "-INFINITY", f"float const value = {value}; if (!(to != to) && !(value <= to)) to = value;"
    start = f"for (int64_t x = 0; x < {count}; ++x) static_cast<float*>(call->d)[x] = {fill};"
    return start, f"{{ float& to = static_cast<float*>(call->d)[{element}]; {step} }}"


def emit_convolution(config: ConvolutionConfig | DepthwiseConfig, epilogue: Epilogue) -> str:
    """`byoc_cutlass.emit_convolution.emit_convolution` and `depthwise.emit_depthwise`, for the CPU."""
    symbol, operand = kernel_symbol(config.name, epilogue), TYPES[config.arithmetic]
    total = "int32_t" if operand == "int8_t" else "float"
    reads, quoted, out = _epilogue(epilogue, "call->k")
    planes = config.planes if isinstance(config, ConvolutionConfig) else None
    at_a, at_b, at_d = "((image * call->h + h) * call->w + w) * call->c + c0 + c", "c", "i * call->k + j"
    if planes is not None:
        at_a = "((image * call->c + c) * call->h + h) * call->w + w"
        at_b = "(c * call->r + r) * call->s + s"
    if isinstance(config, ConvolutionConfig) and config.stores_planes:
        at_d = "(image * call->k + j) * call->p * call->q + i % (call->p * call->q)"
    rows = ("int64_t(call->n) * call->p * call->q", "i")
    start, store = _stored(epilogue, quoted, out, at_d, rows, ("call->k", "j"))
    position = "0" if planes is not None else "(r * call->s + s) * channels"
    return f"""{_FUNCTIONS}{convolutions.CONVOLUTION_CALL.once}
extern "C" int64_t {symbol}_workspace_bytes(ConvolutionCall const* call) {{ return call->split_k > 1 ? 64 : 0; }}
extern "C" int32_t {symbol}(ConvolutionCall const* call, void* workspace, int64_t bytes, void*) {{
  if ((workspace != nullptr) != (bytes > 0) || (call->split_k > 1) != (bytes > 0)) return 4;
  int const channels = call->c / call->groups, filters = call->k / call->groups;
  {start}
  for (int i = 0; i < call->n * call->p * call->q; ++i)
    for (int j = 0; j < call->k; ++j) {{
      int const image = i / (call->p * call->q), row = i / call->q % call->p, column = i % call->q;
      {total} accum = 0;
      for (int r = 0; r < call->r; ++r)
        for (int s = 0; s < call->s; ++s) {{
          int const h = row * call->stride_h - call->pad_h + r * call->dilation_h;
          int const w = column * call->stride_w - call->pad_w + s * call->dilation_w;
          if (h < 0 || h >= call->h || w < 0 || w >= call->w) continue;
          int const c0 = j / filters * channels;
          auto* a = static_cast<{TYPES[planes.dtype] if planes else operand} const*>(call->a);
          auto* b = static_cast<{operand} const*>(call->b) + j * call->r * call->s * channels + {position};
          for (int c = 0; c < channels; ++c) accum += {total}({operand}(a[{at_a}])) * {total}(b[{at_b}]);
        }}
      {reads}
      {store}
    }}
  return 0;
}}
"""


def emit_pair(config: PairConfig, first: Epilogue, second: Epilogue, *, layout_b: Order = "row") -> str:
    """`byoc_cutlass.emit_back_to_back.emit_pair`, for the CPU: row by row, what lies between in halves."""
    symbol, operand = pairs.symbol_of(config.name, first, second, layout_b), TYPES[config.first.arithmetic]
    b0 = "k * call->ldb0 + j" if layout_b == "row" else "j * call->ldb0 + k"
    b1 = "k * call->ldb1 + j" if layout_b == "row" else "j * call->ldb1 + k"
    reads0, quoted0, between = _epilogue(first, "call->n0")
    reads1, quoted1, out = _epilogue(second, "call->n1", before=len(first.operands))
    if config.iterator:
        b0, b1 = "j * call->k0 + k", "j * call->n0 + k"
        a = """[&](int64_t i, int64_t k) -> float {
          int64_t const c = k % call->c, s = k / call->c % call->s, r = k / call->c / call->s;
          int64_t const q = i % call->q, p = i / call->q % call->p, n = i / call->q / call->p;
          int64_t const h = p * call->stride_h - call->pad_h + r * call->dilation_h;
          int64_t const w = q * call->stride_w - call->pad_w + s * call->dilation_w;
          bool const outside = h < 0 || h >= call->h || w < 0 || w >= call->w;
          return outside ? 0 : float(A[((n * call->h + h) * call->w + w) * call->c + c]);
        }"""
    else:
        a = "[&](int64_t i, int64_t k) -> float { return float(A[i * call->lda + k]); }"
    return f"""{_FUNCTIONS}{pairs.PAIR_CALL.once}
#include <vector>
extern "C" int64_t {symbol}_workspace_bytes(PairCall const*) {{ return 0; }}
extern "C" int32_t {symbol}(PairCall const* call, void*, int64_t, void*) {{
  auto* A = static_cast<{operand} const*>(call->a);
  auto const a = {a};
  std::vector<{between}> row(call->n0);
  for (int64_t i = 0; i < call->m; ++i) {{
    for (int64_t j = 0; j < call->n0; ++j) {{
      float accum = 0;
      for (int64_t k = 0; k < call->k0; ++k)
        accum += a(i, k) * float(static_cast<{operand} const*>(call->b0)[{b0}]);
      {reads0}
      row[j] = {between}({quoted0});
    }}
    for (int64_t j = 0; j < call->n1; ++j) {{
      float accum = 0;
      for (int64_t k = 0; k < call->n0; ++k)
        accum += float(row[k]) * float(static_cast<{operand} const*>(call->b1)[{b1}]);
      {reads1}
      static_cast<{out}*>(call->d)[i * call->n1 + j] = {out}({quoted1});
    }}
  }}
  return 0;
}}
"""


def compile_here(source: str, _architecture: str, **_settings: Any) -> CompiledCuda:
    """`cutlass_toolchain.compile_gemm`, by the machine's C++ compiler."""
    with temporary_folder("on_cpu") as folder:
        (folder / "kernel.cc").write_text(source)
        command = ["g++", "-c", "-O1", "-fPIC", "-o", "kernel.o", "kernel.cc"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        image = (folder / "kernel.o").read_bytes()
    return CompiledCuda(image=image, architectures=("sm_80",), uses=(), compiler="g++", command="", seconds=0.0)


def put_on_cpu(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """From here on templates are the CPU's, and CUDA's runtime that of `RUNTIME`."""
    archive = folder / "libcudart_static.a"
    (folder / "runtime.cc").write_text(RUNTIME)
    hidden = ["g++", "-c", "-fPIC", "-fvisibility=hidden"]  # as in CUDA's own static library
    subprocess.run([*hidden, "-o", "runtime.o", "runtime.cc"], cwd=folder, check=True)
    subprocess.run(["ar", "rcs", str(archive), "runtime.o"], cwd=folder, check=True)
    patch.setattr(emit, "emit_gemm", emit_gemm)
    patch.setattr(convolutions, "emit_convolution", emit_convolution)
    patch.setattr(depthwise, "emit_depthwise", emit_convolution)
    patch.setattr(pairs, "emit_pair", emit_pair)
    patch.setattr(cutlass_toolchain, "compile_gemm", compile_here)
    patch.setattr(cutlass_toolchain, "cuda_runtime_archive", lambda _nvcc: archive)
    for module in (cutlass_toolchain, cutlass_samples):
        patch.setattr(module, "find_nvcc", lambda: None)


# --- calling ---------------------------------------------------------------------------------------------------------
class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", ctypes.c_uint32),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Any(ctypes.Structure):
    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_void_p))


CUDA, CPU = 2, 1
_TENSOR_POINTER = 7


@dataclass(frozen=True, kw_only=True)
class HostLibrary:
    """An object file of host functions, linked and loaded."""

    library: ctypes.CDLL

    @classmethod
    def load(cls, code: bytes, folder: Path) -> HostLibrary:
        (folder / "cutlass.o").write_bytes(code)
        (folder / "test.cc").write_text(TEST)
        link = ["g++", "-shared", "-fPIC", "-Wl,-Bsymbolic"]  # its own functions, not those that this process has
        subprocess.run([*link, "-o", "cutlass.so", "cutlass.o", "test.cc"], cwd=folder, check=True)
        return cls(library=ctypes.CDLL(str(folder / "cutlass.so")))

    @property
    def message(self) -> str:
        """What the last function that failed said."""
        return ctypes.create_string_buffer(1024).__class__.in_dll(self.library, "tvm_ext_test_message").value.decode()

    def set(self, name: str, value: int) -> None:
        """The device's "major" or "minor" number, or the "error" that CUDA answers."""
        ctypes.c_int.in_dll(self.library, f"tvm_ext_test_{name}").value = value

    def call(
        self, name: str, arrays: Sequence[np.ndarray[Any, Any]], *, device: int = CUDA, number: int = 0, offset: int = 0
    ) -> int:
        """Call the function ``name`` on ``arrays``, the result's last, as if they were a GPU's; its answer."""
        where = [_Device(CUDA if place else device, number) for place in range(len(arrays))]
        tensors = [
            _Tensor(array.ctypes.data + offset, place, array.ndim, 0, None, None, 0)
            for array, place in zip(arrays, where, strict=True)
        ]
        args = (_Any * len(tensors))(*(_Any(_TENSOR_POINTER, 0, ctypes.addressof(tensor)) for tensor in tensors))
        function: Callable[..., int] = getattr(self.library, f"__tvm_ffi_{name}")
        return int(function(None, args, ctypes.c_int32(len(tensors)), ctypes.byref(_Any())))
