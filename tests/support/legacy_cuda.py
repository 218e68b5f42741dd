"""Plain CUDA kernels as people write them, and their converted forms run on the CPU: a vEU's threads are fibres.

The very text that nvcc gets is compiled by g++; only what CUDA brings along (types, the two barriers) is defined anew.
A barrier that not all threads reach is told, not waited for.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tvm_ext.rammer_runtime.legacy.convert import ConvertedKernel

SAXPY = """
// y = a x + y
extern "C" __global__ void __launch_bounds__(48)
saxpy(const float* __restrict__ x, float* __restrict__ y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = a * __ldg(&x[i]) + y[i];
}
"""

MATMUL = """
#include <stdint.h>
#define TILE 8
__global__ void matmul(const float* a, const float* b, float* c, int n) {
  __shared__ float left[TILE][TILE], right[TILE][TILE + 1];
  const int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
  float sum = 0.f;
  for (int k = 0; k < n; k += TILE) {
    left[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
    right[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
    __syncthreads();
    for (int i = 0; i < TILE; ++i) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}
"""

ROW_SUMS = """
__global__ void row_sums(const float* x, float* y, int rows, int columns) {
  extern __shared__ float parts[];
  __shared__ __align__(16) float total;
  if (blockIdx.x >= rows) return;  // the whole block
  const int t = threadIdx.x;
  if (t >= columns) return;        // some threads only, before barriers
  parts[t] = x[blockIdx.x * columns + t];
  __syncthreads();
  if (t == 0) {
    total = 0.f;
    for (int i = 0; i < columns; ++i) total += parts[i];
  }
  __syncthreads();
  y[blockIdx.x * columns + t] = total;
}
"""

TRANSPOSE = """
constexpr int SIDE = 8;
template <typename T> __device__ T twice(T value) { return value + value; }
__global__ void transpose(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[SIDE][SIDE + 1];
  x += blockIdx.z * rows * columns;
  y += blockIdx.z * rows * columns;
  for (int i = threadIdx.y; i < SIDE; i += blockDim.y)
    tile[i][threadIdx.x] = twice(x[(blockIdx.y * SIDE + i) * columns + blockIdx.x * SIDE + threadIdx.x]);
  __syncthreads();
  for (int i = threadIdx.y; i < SIDE; i += blockDim.y)
    y[(blockIdx.x * SIDE + i) * rows + blockIdx.y * SIDE + threadIdx.x] = tile[threadIdx.x][i];
}
"""

REVERSED = """
#define HERE (blockIdx.x * blockDim.x + threadIdx.x)
struct Range { int begin; int size; };
__device__ void turn(float* values, Range range);
static __device__ int last() { return blockDim.x - 1; }
__device__ void turn(float* values, Range range) {
  float mine = values[range.begin + last() - threadIdx.x];
  __syncthreads();
  values[range.begin + threadIdx.x] = mine;
  __syncthreads();
}
__global__ void unrelated(float* x) { x[HERE] = 0; }
__global__ void reversed(const float* x, float* y) {
  __shared__ float row[32];
  Range range = {0, 32};
  row[threadIdx.x] = x[HERE];
  __syncthreads();
  turn(row, range);
  y[HERE] = row[threadIdx.x];
}
void start(const float* x, float* y) { reversed<<<3, 32>>>(x, y); }
"""

_HOST = """
#include <ucontext.h>
#include <cstdint>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
#include <cmath>
#include <type_traits>
static inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
template <typename T> static inline T max(T a, T b) { return a > b ? a : b; }
template <typename T> static inline T min(T a, T b) { return a < b ? a : b; }
#define VECTORS(name, type) \
  struct name##2 { type x, y; }; struct name##3 { type x, y, z; }; struct name##4 { type x, y, z, w; }; \
  static inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  static inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTORS(float, float) VECTORS(int, int) VECTORS(double, double) VECTORS(longlong, long long) VECTORS(char, signed char)
VECTORS(uchar, unsigned char) VECTORS(short, short) VECTORS(ushort, unsigned short) VECTORS(uint, unsigned)
typedef unsigned char uchar;
struct dim3 { unsigned x, y, z; dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };
struct Fibre { ucontext_t context; std::vector<char> stack; bool ended = false; };
static std::vector<Fibre> fibres;
static ucontext_t scheduler;
static size_t current, happened;
struct Meeting {
  unsigned arrived = 0; size_t round = 0; bool all = true, result = false;
  bool meet(bool leaves, unsigned count) {
    size_t mine = round;
    all = all && leaves;
    ++happened;
    if (++arrived == count) { result = all; all = true; arrived = 0; ++round; return result; }
    while (round == mine) swapcontext(&fibres[current].context, &scheduler);
    return result;
  }
};
static Meeting of_task, of_block, of_warp[32];
static long long handed[1024];
static inline unsigned __activemask() { return ~0u; }
template <typename T> static T tvm_ext_from(T value, size_t lane) {  // of another thread of the warp
  size_t warp = current / 32;
  memcpy(&handed[current], &value, sizeof(T));
  of_warp[warp].meet(false, 32);
  memcpy(&value, &handed[warp * 32 + lane], sizeof(T));
  of_warp[warp].meet(false, 32);
  return value;
}
template <typename T> static T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return tvm_ext_from(value, current % 32 / width * width + lane % width);
}
template <typename T> static T __shfl_down_sync(unsigned, T value, int by, int width = 32) {
  size_t lane = current % 32, to = lane + by;
  return tvm_ext_from(value, to / width == lane / width ? to : lane);
}
template <typename T> static T __shfl_up_sync(unsigned, T value, int by, int width = 32) {
  int lane = current % 32, to = lane - by;
  return tvm_ext_from(value, to >= lane / width * width ? to : lane);
}
static inline void tvm_ext_meet(unsigned count) { of_task.meet(false, count); }
static inline bool tvm_ext_vote(bool leaves, unsigned count) { return of_task.meet(leaves, count); }
"""

_RUN = """
static void** arguments; static unsigned char pool[65536] __attribute__((aligned(128)));
static void body() {
  const int thread = (int)current;
  for (int task = 0; task < %(tasks)d; ++task) {
    %(symbol)s(%(given)s, task, thread, pool);
    of_block.meet(false, %(threads)d);
  }
  fibres[thread].ended = true;
  ++happened;
  swapcontext(&fibres[thread].context, &scheduler);
}
extern "C" int run(void** given) {
  arguments = given;
  memset(pool, 0xFF, sizeof(pool));
  fibres = std::vector<Fibre>(%(threads)d);
  of_task = of_block = Meeting();
  for (auto& fibre : fibres) {
    fibre.stack.resize(65536);
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data();
    fibre.context.uc_stack.ss_size = fibre.stack.size();
    fibre.context.uc_link = &scheduler;
    makecontext(&fibre.context, body, 0);
  }
  for (size_t left = fibres.size(); left;) {
    size_t before = happened;
    left = 0;
    for (current = 0; current < fibres.size(); ++current)
      if (!fibres[current].ended) { swapcontext(&scheduler, &fibres[current].context); left += !fibres[current].ended; }
    if (left && happened == before) return 1;  // all wait, and nobody can go on
  }
  return 0;
}
"""


def run_on_cpu(
    kernel: ConvertedKernel, arguments: Sequence[np.ndarray | int | float], threads: int, folder: Path
) -> bool:
    """All rTasks of ``kernel``, in turn on one vEU of ``threads`` threads; False where its threads get stuck."""
    given = ", ".join(
        f"({kind})arguments[{place}]" if "*" in kind else f"*({kind}*)arguments[{place}]"
        for place, (kind, _) in enumerate(kernel.parameters)
    )
    words = {"tasks": kernel.task_count, "symbol": kernel.symbol, "given": given, "threads": threads}
    (folder / "cuda.h").touch()
    (folder / "math_constants.h").write_text(_CONSTANTS)
    (folder / "kernel.cc").write_text(_HOST + kernel.text + _RUN % words)
    library = folder / f"{kernel.symbol}.so"  # a name that is loaded already would be that library
    command = [
        "g++",
        "-O0",
        "-std=c++17",
        "-w",
        f"-I{folder}",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(folder / "kernel.cc"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    kept = [
        value if isinstance(value, np.ndarray) else np.array([value], _SCALARS[kind])
        for value, (kind, _) in zip(arguments, kernel.parameters, strict=True)
    ]
    pointers = (ctypes.c_void_p * len(kept))(*(value.ctypes.data for value in kept))
    return int(ctypes.CDLL(str(library)).run(pointers)) == 0


_CONSTANTS = """
#define CUDART_INF_F __builtin_inff()
#define CUDART_INF __builtin_inf()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_NAN __builtin_nan("")
"""

_SCALARS = {"int": np.int32, "float": np.float32}
