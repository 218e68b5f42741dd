// What a GPU's row of the device tables says, measured once (Roller, section 4): rates of the layers of memory, latencies,
// launch, barrier, hand-off between threadblocks, and the rate of each kind of instruction that inner loops have.
//
//     nvcc -O3 -std=c++17 -arch=sm_80 --cudart static benchmarks/gpu/microbench.cu -o microbench     (a bundle has it)
//     ./microbench > measured.json        and, on any machine:  tvm-ext devices --import measured.json -o row.json
//
// Each figure is the best of several runs. Chains of eight independent values a thread hide an instruction's latency.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define CHECK(call)                                                                                                    \
  do {                                                                                                                 \
    cudaError_t status = (call);                                                                                       \
    if (status != cudaSuccess) {                                                                                       \
      std::fprintf(stderr, "error: %s: %s\n", #call, cudaGetErrorString(status));                                      \
      std::exit(2);                                                                                                    \
    }                                                                                                                  \
  } while (0)

namespace {

constexpr int RUNS = 7, CHAINS = 8, STEPS = 4096, THREADS = 256;

// Seconds of the fastest of RUNS runs, by the device's events.
double best_seconds(const std::function<void()>& run) {
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  run();
  CHECK(cudaDeviceSynchronize());
  float best = 1e30f;
  for (int i = 0; i < RUNS; ++i) {
    CHECK(cudaEventRecord(start));
    run();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float taken;
    CHECK(cudaEventElapsedTime(&taken, start, end));
    best = std::min(best, taken);
  }
  CHECK(cudaGetLastError());
  return best * 1e-3;
}

__global__ void empty() {}

// --- instructions: one step of a chain each ---------------------------------------------------------------------------
struct Fma { template <class T> __device__ static T step(T x, T y) { return x * y + y; } };
struct Add { template <class T> __device__ static T step(T x, T y) { return x + y; } };
struct Exp {
  __device__ static float step(float x, float) {
    float result;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
};
struct Convert {  // to half and back: two conversions
  __device__ static float step(float x, float) {
    unsigned short half;
    asm volatile("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    asm volatile("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
  }
};
struct MaxFloat {
  __device__ static float step(float x, float y) {
    asm volatile("max.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
  }
};
struct IntFma {  // in assembly: the compiler would make one addition of sixteen
  __device__ static int step(int x, int y) {
    asm volatile("mad.lo.s32 %0, %0, %1, %1;" : "+r"(x) : "r"(y));
    return x;
  }
};
struct IntAdd {
  __device__ static int step(int x, int y) {
    asm volatile("add.s32 %0, %0, %1;" : "+r"(x) : "r"(y));
    return x;
  }
};
struct HalfFma { __device__ static __half2 step(__half2 x, __half2 y) { return __hfma2(x, y, y); } };
struct Dot { __device__ static int step(int x, int y) { return __dp4a(y, y, x); } };

template <class Operation, class T> __global__ void chains(T* out, T seed) {
  T values[CHAINS];
  for (int i = 0; i < CHAINS; ++i) values[i] = seed;
#pragma unroll 1
  for (int step = 0; step < STEPS / 16; ++step) {
#pragma unroll
    for (int inner = 0; inner < 16; ++inner)
#pragma unroll
      for (int i = 0; i < CHAINS; ++i) values[i] = Operation::step(values[i], seed);
  }
  T total = values[0];
  for (int i = 1; i < CHAINS; ++i) total = total + values[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

// --- memory -----------------------------------------------------------------------------------------------------------
__global__ void read_shared(float4* out, int steps) {
  __shared__ float4 tile[2 * THREADS];
  tile[threadIdx.x] = tile[threadIdx.x + THREADS] = make_float4(threadIdx.x, 1, 2, 3);
  __syncthreads();
  float4 sum = make_float4(0, 0, 0, 0);
  unsigned base = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
#pragma unroll 8
  for (int i = 0; i < steps; ++i) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w) : "r"(base + 16 * (i % THREADS)));
    sum.x += value.x; sum.y += value.y; sum.z += value.z; sum.w += value.w;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

__global__ void read_global(const float4* in, float4* out, size_t count, int repeats) {
  float4 sum = make_float4(0, 0, 0, 0);
  for (int again = 0; again < repeats; ++again)
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (size_t)blockDim.x) {
      float4 value;
      asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w) : "l"(in + i));
      sum.x += value.x; sum.y += value.y; sum.z += value.z; sum.w += value.w;
    }
  if (sum.x == 12345.678f) out[0] = sum;
}

__global__ void chase(const uint32_t* next, uint32_t* out, int steps) {
  uint32_t at = 0;
  for (int i = 0; i < steps; ++i) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(next + at));
  *out = at;
}

__global__ void chase_shared(uint32_t* out, int steps) {
  __shared__ uint32_t next[1024];
  for (int i = 0; i < 1024; ++i) next[i] = (i + 33) % 1024;
  uint32_t at = 0;
  for (int i = 0; i < steps; ++i) at = ((volatile uint32_t*)next)[at];
  *out = at;
}

// --- synchronisation --------------------------------------------------------------------------------------------------
__global__ void barriers(int steps) {
  for (int i = 0; i < steps; ++i) __syncthreads();
}

// Two blocks release a counter in turn, and wait for each other, as schedules of rTasks do.
__global__ void handoffs(unsigned* counter, int steps) {
  for (int i = 0; i < steps; ++i) {
    unsigned seen, wanted = 2 * i + blockIdx.x;
    do asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory"); while (seen < wanted);
    __threadfence();
    atomicAdd(counter, 1u);
  }
}

void figure(const char* name, double value, bool last = false) {
  std::printf("    \"%s\": %.6g%s\n", name, value, last ? "" : ",");
}

template <class Operation, class T> double rate(int units, T seed, double per_step) {
  int blocks = units * 8;
  T* out;
  CHECK(cudaMalloc(&out, sizeof(T) * blocks * THREADS));
  double seconds = best_seconds([&] { chains<Operation><<<blocks, THREADS>>>(out, seed); });
  CHECK(cudaFree(out));
  return per_step * blocks * THREADS * (double)CHAINS * STEPS / seconds / 1e9;
}

double read_rate(size_t bytes, int repeats, int units) {
  float4 *in, *out;
  CHECK(cudaMalloc(&in, bytes));
  CHECK(cudaMalloc(&out, sizeof(float4)));
  CHECK(cudaMemset(in, 0, bytes));
  double seconds = best_seconds([&] { read_global<<<units * 8, THREADS>>>(in, out, bytes / sizeof(float4), repeats); });
  CHECK(cudaFree(in));
  CHECK(cudaFree(out));
  return (double)bytes * repeats / seconds / 1e9;
}

// Nanoseconds of one dependent read in a ring of lines over so many bytes.
double read_latency(size_t bytes) {
  size_t lines = bytes / 128, stride = 32;
  std::vector<uint32_t> ring(bytes / 4), order(lines);
  for (size_t i = 0; i < lines; ++i) order[i] = i;
  uint64_t state = 88172645463325252ull;
  for (size_t i = lines - 1; i > 0; --i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    std::swap(order[i], order[state % (i + 1)]);
  }
  for (size_t i = 0; i < lines; ++i) ring[order[i] * stride] = order[(i + 1) % lines] * stride;
  uint32_t *next, *out;
  CHECK(cudaMalloc(&next, bytes));
  CHECK(cudaMalloc(&out, 4));
  CHECK(cudaMemcpy(next, ring.data(), bytes, cudaMemcpyHostToDevice));
  int steps = 1 << 15;
  double seconds = best_seconds([&] { chase<<<1, 1>>>(next, out, steps); });
  CHECK(cudaFree(next));
  CHECK(cudaFree(out));
  return seconds / steps * 1e9;
}

}  // namespace

int main() {
  cudaDeviceProp about;
  CHECK(cudaGetDeviceProperties(&about, 0));
  int units = about.multiProcessorCount, clock_khz = 0;
  CHECK(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0));
  size_t cache = about.l2CacheSize ? about.l2CacheSize : size_t(4) << 20, free_bytes, total_bytes;
  CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  size_t large = std::min(free_bytes / 4, size_t(2) << 30) / 4096 * 4096;

  std::printf("{\n  \"schema\": 1,\n  \"device\": \"%s\",\n  \"major\": %d,\n  \"minor\": %d,\n  \"units\": %d,\n", about.name,
              about.major, about.minor, units);
  std::printf("  \"clock_ghz\": %.6g,\n  \"figures\": {\n", clock_khz * 1e-6);
  const int launches = 2000;
  double each = best_seconds([&] { for (int i = 0; i < launches; ++i) empty<<<1, 32>>>(); }) / launches;
  figure("launch_overhead_us", each * 1e6);
  const int waits = 1 << 16;
  figure("barrier_ns", best_seconds([&] { barriers<<<units, THREADS>>>(waits); }) / waits * 1e9);
  unsigned* counter;
  CHECK(cudaMalloc(&counter, 4));
  const int turns = 1 << 13;
  double passed = best_seconds([&] { CHECK(cudaMemsetAsync(counter, 0, 4)); handoffs<<<2, 1>>>(counter, turns); });
  figure("handoff_ns", passed / (2.0 * turns) * 1e9);

  float4* sums;
  uint32_t* end;
  CHECK(cudaMalloc(&sums, sizeof(float4) * units * 8 * THREADS));
  CHECK(cudaMalloc(&end, 4));
  const int reads = 1 << 13;
  double shared = best_seconds([&] { read_shared<<<units * 8, THREADS>>>(sums, reads); });
  figure("layers.L1.bandwidth_gb_per_s", 16.0 * units * 8 * THREADS * reads / shared / 1e9);
  figure("layers.L1.latency_ns", best_seconds([&] { chase_shared<<<1, 1>>>(end, 1 << 15); }) / (1 << 15) * 1e9);
  figure("layers.L2.cache_bandwidth_gb_per_s", read_rate(cache / 2, 50, units));
  figure("layers.L2.cache_latency_ns", read_latency(cache / 8));
  figure("layers.L2.bandwidth_gb_per_s", read_rate(large, 1, units));
  figure("layers.L2.latency_ns", read_latency(std::min(large, size_t(256) << 20)));

  figure("instruction_gops.float32.fma", rate<Fma, float>(units, 0.999f, 1));
  figure("instruction_gops.float32.add", rate<Add, float>(units, 0.999f, 1));
  figure("instruction_gops.float32.max", rate<MaxFloat, float>(units, 0.999f, 1));
  figure("instruction_gops.float32.exp", rate<Exp, float>(units, 0.999f, 1));
  figure("instruction_gops.float32.convert", rate<Convert, float>(units, 0.999f, 2));
  figure("instruction_gops.float16.fma", rate<HalfFma, __half2>(units, __float2half2_rn(0.999f), 2));
  figure("instruction_gops.float64.fma", rate<Fma, double>(units, 0.999, 1));
  figure("instruction_gops.int32.fma", rate<IntFma, int>(units, 3, 1));
  figure("instruction_gops.int32.add", rate<IntAdd, int>(units, 3, 1));
  figure("instruction_gops.int8.dot", rate<Dot, int>(units, 3, 4), true);
  std::printf("  }\n}\n");
  return 0;
}
