// A CUDA driver and runtime without a device, for tests on machines that have no GPU: memory is the host's, images are
// checked as a driver would (architecture, kernel names, limits of a launch), launches are written to a log and not run.
//
// TVM_EXT_STUB_LOG       file to which one JSON object per event is appended
// TVM_EXT_STUB_ARCH      the device's architecture, e.g. 90
// TVM_EXT_STUB_DRIVER    what cuDriverGetVersion says, e.g. 13000
// TVM_EXT_STUB_SHARED    bytes of shared memory that a threadblock can be given, e.g. 232448

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, NO_BINARY = 209, NOT_FOUND = 500, TOO_MANY = 701 };
enum { STATIC_SHARED_LIMIT = 49152, MAX_THREADS = 1024 };

static long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}
static long architecture(void) { return setting("TVM_EXT_STUB_ARCH", 90); }

static void note(const char* text) {
  const char* path = getenv("TVM_EXT_STUB_LOG");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s\n", text);
  fclose(file);
}

// --- driver: images --------------------------------------------------------------------------------------------------
typedef struct { const char* start; uint64_t size; } Image;
typedef struct { Image image; char name[512]; long shared_limit; } Kernel;

// The image of a fatbin for this device: the same major architecture, no later minor one, the latest of these.
static int choose(const char* data, Image* image) {
  uint16_t header; uint64_t size, at;
  int best = -1;
  memcpy(&header, data + 6, 2);
  memcpy(&size, data + 8, 8);
  for (at = header; at + 64 <= header + size;) {
    uint16_t kind; uint32_t entry_header, arch; uint64_t entry_size;
    memcpy(&kind, data + at, 2);
    memcpy(&entry_header, data + at + 4, 4);
    memcpy(&entry_size, data + at + 8, 8);
    memcpy(&arch, data + at + 28, 4);
    if (!entry_header) return INVALID_IMAGE;
    if (kind == 2 && arch / 10 == architecture() / 10 && (int)arch <= architecture() && (int)arch > best) {
      best = (int)arch;
      image->start = data + at + entry_header;
      image->size = entry_size;
    }
    at += entry_header + entry_size;
  }
  return best < 0 ? NO_BINARY : OK;
}

EXPORT int cuModuleLoadData(void** module, const void* data) {
  uint32_t magic;
  char line[256];
  Image* image = calloc(1, sizeof *image);
  int status = INVALID_IMAGE;
  memcpy(&magic, data, 4);
  if (magic == 0xBA55ED50u) status = choose(data, image);
  snprintf(line, sizeof line, "{\"event\": \"load\", \"magic\": \"%08x\", \"status\": %d, \"image_bytes\": %llu}", magic, status,
           (unsigned long long)image->size);
  note(line);
  *module = image;
  return status;
}
EXPORT int cuModuleUnload(void* module) { free(module); return OK; }

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  char section[600];
  Image* image = module;
  Kernel* kernel;
  snprintf(section, sizeof section, ".text.%s", name);
  if (!memmem(image->start, image->size, section, strlen(section) + 1)) return NOT_FOUND;
  kernel = calloc(1, sizeof *kernel);
  kernel->image = *image;
  kernel->shared_limit = STATIC_SHARED_LIMIT;
  snprintf(kernel->name, sizeof kernel->name, "%s", name);
  *function = kernel;
  return OK;
}

EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute != 8) return OK;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  if (value > setting("TVM_EXT_STUB_SHARED", 232448)) return INVALID_VALUE;
  ((Kernel*)function)->shared_limit = value;
  return OK;
}

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
} Launch;

EXPORT int cuLaunchKernelEx(const Launch* launch, void* function, void** parameters, void** extra) {
  char line[1024];
  const Kernel* kernel = function;
  int status = OK;
  (void)parameters; (void)extra;
  if ((uint64_t)launch->block[0] * launch->block[1] * launch->block[2] > MAX_THREADS) status = INVALID_VALUE;
  if ((long)launch->shared_bytes > kernel->shared_limit) status = INVALID_VALUE;
  snprintf(line, sizeof line,
           "{\"event\": \"launch\", \"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared_bytes\": %u, "
           "\"status\": %d}",
           kernel->name, launch->grid[0], launch->grid[1], launch->grid[2], launch->block[0], launch->block[1],
           launch->block[2], launch->shared_bytes, status);
  note(line);
  return status;
}

EXPORT int cuInit(unsigned flags) { (void)flags; return OK; }
EXPORT int cuDriverGetVersion(int* version) { *version = (int)setting("TVM_EXT_STUB_DRIVER", 13000); return OK; }
EXPORT int cuDeviceGetName(char* name, int size, int device) {
  (void)device;
  snprintf(name, (size_t)size, "stub of sm_%ld", architecture());
  return OK;
}
EXPORT int cuDeviceGetCount(int* count) { *count = 1; return OK; }
EXPORT int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return OK; }
EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int device);
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
EXPORT int cuTensorMapEncodeTiled(void* map) { (void)map; return INVALID_VALUE; }
static const char* name_of(int status) {
  switch (status) {
    case OK: return "CUDA_SUCCESS";
    case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
    case NO_BINARY: return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    default: return "CUDA_ERROR_UNKNOWN";
  }
}
EXPORT int cuGetErrorName(int status, const char** name) { *name = name_of(status); return OK; }
EXPORT int cuGetErrorString(int status, const char** text) { *text = name_of(status); return OK; }

// --- runtime: memory, streams, events --------------------------------------------------------------------------------
EXPORT int cudaGetDeviceCount(int* count) { *count = 1; return OK; }
EXPORT int cudaGetDevice(int* device) { *device = 0; return OK; }
EXPORT int cudaSetDevice(int device) { return device ? 101 : OK; }
EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 1: *value = MAX_THREADS; break;                  // threads per block
    case 8: *value = STATIC_SHARED_LIMIT; break;          // shared memory per block
    case 10: *value = 32; break;                          // warp size
    case 16: *value = 132; break;                         // multiprocessors
    case 75: *value = (int)architecture() / 10; break;    // compute capability, major
    case 76: *value = (int)architecture() % 10; break;    // minor
    case 97: *value = (int)setting("TVM_EXT_STUB_SHARED", 232448); break;  // shared memory per block, opt-in
    default: *value = 0;
  }
  return OK;
}
EXPORT int cudaGetDeviceProperties(void* properties, int device) {  // only the name, the first member, is set
  return cuDeviceGetName(properties, 256, device);
}
EXPORT int cudaMalloc(void** memory, size_t size) {
  *memory = aligned_alloc(256, (size + 511) / 256 * 256);
  return *memory ? OK : OUT_OF_MEMORY;
}
EXPORT int cudaMallocHost(void** memory, size_t size) { return cudaMalloc(memory, size); }
EXPORT int cudaFree(void* memory) { free(memory); return OK; }
EXPORT int cudaFreeHost(void* memory) { free(memory); return OK; }
EXPORT int cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = (size_t)1 << 32;
  return OK;
}
EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  (void)kind; (void)stream;
  memmove(to, from, size);
  return OK;
}
EXPORT int cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t size, void* stream) {
  (void)to_device; (void)from_device;
  return cudaMemcpyAsync(to, from, size, 0, stream);
}
EXPORT int cudaStreamCreate(void** stream) { *stream = malloc(1); return OK; }
EXPORT int cudaStreamCreateWithFlags(void** stream, unsigned flags) { (void)flags; return cudaStreamCreate(stream); }
EXPORT int cudaStreamDestroy(void* stream) { free(stream); return OK; }
EXPORT int cudaStreamSynchronize(void* stream) { (void)stream; return OK; }
EXPORT int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) { (void)stream; (void)event; (void)flags; return OK; }
EXPORT int cudaEventCreate(void** event) { *event = calloc(1, sizeof(struct timespec)); return OK; }
EXPORT int cudaEventDestroy(void* event) { free(event); return OK; }
EXPORT int cudaEventRecord(void* event, void* stream) { (void)stream; clock_gettime(CLOCK_MONOTONIC, event); return OK; }
EXPORT int cudaEventSynchronize(void* event) { (void)event; return OK; }
EXPORT int cudaEventElapsedTime(float* milliseconds, void* start, void* end) {
  const struct timespec *a = start, *b = end;
  *milliseconds = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) * 1e-6);
  return OK;
}
EXPORT int cudaGetLastError(void) { return OK; }
EXPORT int cudaPeekAtLastError(void) { return OK; }
EXPORT const char* cudaGetErrorName(int status) { return name_of(status); }
EXPORT const char* cudaGetErrorString(int status) { return name_of(status); }
EXPORT int cudaStreamBeginCapture(void* stream, int mode) { (void)stream; (void)mode; return 801; }
EXPORT int cudaStreamEndCapture(void* stream, void** graph) { (void)stream; (void)graph; return 801; }
EXPORT int cudaGraphInstantiate(void** instance, void* graph, uint64_t flags) { (void)instance; (void)graph; (void)flags; return 801; }
EXPORT int cudaGraphLaunch(void* instance, void* stream) { (void)instance; (void)stream; return 801; }
EXPORT int cudaGraphDestroy(void* graph) { (void)graph; return OK; }
EXPORT int cudaGraphExecDestroy(void* instance) { (void)instance; return OK; }
