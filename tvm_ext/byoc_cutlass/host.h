// Host functions of CUTLASS kernels for @architecture@.
#include <cstdint>
#include <cstdio>

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

@structures@
@kernels@

extern "C" {  // of CUDA's runtime, whose headers a machine that compiles this need not have
int cudaGetDevice(int*);
int cudaSetDevice(int);
int cudaDeviceGetAttribute(int*, int, int);
int cudaMallocAsync(void**, size_t, void*);
int cudaFreeAsync(void*, void*);
int cudaGetLastError();
char const* cudaGetErrorString(int);
}

namespace tvm_ext {
namespace {

constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;  // cudaDeviceAttr

class Launch {
 public:
  explicit Launch(char const* name) : name_(name) {}
  ~Launch() {
    if (workspace != nullptr) cudaFreeAsync(workspace, stream);
    if (0 <= previous_) cudaSetDevice(previous_);
  }

  // Addresses of the tensors, all on one device, which becomes the current one.
  bool begin(TVMFFIAny const* args, int count, int expected, int alignment, void** data) {
    if (count != expected) return fail("TypeError", "it takes %d tensors and was given %d", expected, count);
    DLDevice device = {kDLCUDA, 0};
    for (int i = 0; i < count; ++i) {
      DLTensor const* tensor = nullptr;
      if (args[i].type_index == kTVMFFITensor) tensor = TVMFFITensorGetDLTensorPtr(args[i].v_obj);
      if (args[i].type_index == kTVMFFIDLTensorPtr) tensor = static_cast<DLTensor const*>(args[i].v_ptr);
      if (tensor == nullptr) return fail("TypeError", "argument %d of %d is no tensor", i, count);
      if (i == 0) device = tensor->device;
      if (tensor->device.device_type != kDLCUDA || tensor->device.device_id != device.device_id)
        return fail("ValueError", "argument %d of %d is not on the CUDA device of the others", i, count);
      data[i] = static_cast<char*>(tensor->data) + tensor->byte_offset;
      if (reinterpret_cast<uintptr_t>(data[i]) % alignment != 0)
        return fail("ValueError", "the address of argument %d is no multiple of %d bytes", i, alignment);
    }
    if (!fits(device.device_id)) return false;
    stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
    return true;
  }

  bool allocate(int64_t bytes) {
    if (bytes < 0) return fail("RuntimeError", "its kernel refuses the extents%.0d%.0d", 0, 0);
    workspace_bytes = bytes;
    return bytes == 0 || works(cudaMallocAsync(&workspace, static_cast<size_t>(bytes), stream), "its workspace");
  }

  // The kernel's cutlass::Status, and what CUDA says of the launch.
  int end(int32_t status) {
    int const error = cudaGetLastError();
    if (error != 0) return works(error, "its kernel") ? 0 : -1;
    if (status == 0) return 0;
    fail("RuntimeError", "its kernel was refused with status %d%.0d", status, 0);
    return -1;
  }

  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  void* stream = nullptr;

 private:
  // Whether the kernels' machine code runs on the device: asked once for each.
  bool fits(int id) {
    constexpr int most = 64;
    static int known[most] = {};
    int current = 0;
    if (!works(cudaGetDevice(&current), "CUDA")) return false;
    if (current != id) {
      if (!works(cudaSetDevice(id), "its device")) return false;
      previous_ = current;
    }
    if (id < most && known[id]) return true;
    int major = 0, minor = 0;
    if (!works(cudaDeviceGetAttribute(&major, kCapabilityMajor, id), "its device")) return false;
    if (!works(cudaDeviceGetAttribute(&minor, kCapabilityMinor, id), "its device")) return false;
    if (!(@fits@))
      return fail("RuntimeError",
                  "its machine code is for @architecture@, and this device has compute capability %d.%d. "
                  "Build the model for this device", major, minor);
    if (id < most) known[id] = 1;
    return true;
  }

  bool works(int error, char const* what) {
    if (error == 0) return true;
    char text[512];
    snprintf(text, sizeof(text), "%s (CUTLASS): %s cannot be had: %s", name_, what, cudaGetErrorString(error));
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
    return false;
  }

  bool fail(char const* kind, char const* format, int first, int second) {
    char reason[320], text[512];
    snprintf(reason, sizeof(reason), format, first, second);
    snprintf(text, sizeof(text), "%s (CUTLASS): %s.", name_, reason);
    TVMFFIErrorSetRaisedFromCStr(kind, text);
    return false;
  }

  char const* name_;
  int previous_ = -1;
};

}  // namespace
}  // namespace tvm_ext
