"""Host functions that a model's bytecode calls: tensors of tvm-ffi in, one launch of a template's kernel.

Each region has one, ``__tvm_ffi_NAME``, in tvm-ffi's calling convention; all of a model's are one file of C++, which
any compiler makes an object of in a moment. Tensors are the region's parameters and, last, its result; the stream is
the current one of the tensors' device, the workspace is taken from CUDA's pool in the order of that stream. Nothing
runs when the library is loaded, so that a machine without a GPU can load it; what cannot run is an error that says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_ext.devices.capabilities import architecture_suffix, capability_of


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """The structure that a launch is told: ``name``, its ``declaration`` in C, and its numbers as Python packs them.

    Behind the numbers come the factors' addresses, the operands', with ``has_distances`` those between neighbouring
    products of a batch, and the result's.
    """

    name: str  # "GemmCall"
    declaration: str
    packing: str  # of `struct`: "9q4i"
    has_distances: bool = False

    @property
    def once(self) -> str:
        """The declaration for a text that may be compiled together with others."""
        return once(f"{self.name.removesuffix('Call').upper()}_CALL", self.declaration)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """A launch: the entry points that begin with ``symbol``, and what they are told.

    ``factors`` and ``operands`` are places among the region's tensors; operands are in the epilogue's order.
    """

    symbol: str
    form: CallForm
    numbers: tuple[int, ...]
    factors: tuple[int, ...] = ()
    operands: tuple[int, ...] = ()
    distances: tuple[int, ...] = ()

    @property
    def fields(self) -> str:
        """C text that initialises the structure in a host function."""
        factors = [f"data[{tensor}]" for tensor in self.factors]
        rest = ["operands", *(["distances"] if self.form.has_distances else []), "data[tensors - 1]"]
        return ", ".join([*map(str, self.numbers), *factors, *rest])


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFunction:
    """The host function ``name`` of ``tensor_count`` tensors, whose addresses are multiples of ``alignment_bytes``."""

    name: str
    tensor_count: int
    call: KernelCall
    alignment_bytes: int = 16


def once(name: str, text: str) -> str:
    """C++ that several sources begin with, so that they can be compiled as one."""
    return f"#ifndef TVM_EXT_{name}\n#define TVM_EXT_{name}\n{text}#endif\n"


def own_header(name: str) -> str:
    """`once` of the C++ in ``<name>.cuh`` beside this module, as it is when this package is imported."""
    text = Path(__file__).with_name(f"{name}.cuh").read_text(encoding="utf-8")
    return once(name.upper(), f"\n{text}")


def emit_host(functions: Sequence[HostFunction], architecture: str) -> str:
    """C++ of all ``functions``, whose kernels are machine code for ``architecture``."""
    calls = [function.call for function in functions]
    structures = dict.fromkeys(call.form.declaration for call in calls)
    kernels = dict.fromkeys((call.symbol, call.form.name) for call in calls)
    declared = "\n".join(
        f'extern "C" int64_t {symbol}_workspace_bytes({structure} const*);\n'
        f'extern "C" int32_t {symbol}({structure} const*, void*, int64_t, void*);'
        for symbol, structure in kernels
    )
    major, minor = capability_of(architecture)
    exact = architecture_suffix(architecture).endswith("a")
    return _PRELUDE.format(
        structures="\n".join(structures),
        kernels=declared,
        architecture=architecture,
        major=major,
        minor=minor,
        fits=f"major == {major} && minor {'==' if exact else '>='} {minor}",
    ) + "\n".join(map(_function, functions))


def _function(function: HostFunction) -> str:
    call = function.call
    operands = ", ".join([*(f"data[{tensor}]" for tensor in call.operands), "nullptr"])
    distances = ", ".join([*map(str, call.distances), "0"])
    return f"""
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_{function.name}(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny*) {{
  constexpr int tensors = {function.tensor_count};
  void* data[tensors];
  tvm_ext::Launch launch("{function.name}");
  if (!launch.begin(args, count, tensors, {function.alignment_bytes}, data)) return -1;
  void const* const operands[] = {{{operands}}};
  int64_t const distances[] = {{{distances}}};
  {call.form.name} const call = {{{call.fields}}};
  if (!launch.allocate({call.symbol}_workspace_bytes(&call))) return -1;
  return launch.end({call.symbol}(&call, launch.workspace, launch.workspace_bytes, launch.stream));
}}
"""


_PRELUDE = """// Host functions of CUTLASS kernels for {architecture}.
#include <cstdint>
#include <cstdio>

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

{structures}
{kernels}

extern "C" {{  // of CUDA's runtime, whose headers a machine that compiles this need not have
int cudaGetDevice(int*);
int cudaSetDevice(int);
int cudaDeviceGetAttribute(int*, int, int);
int cudaMallocAsync(void**, size_t, void*);
int cudaFreeAsync(void*, void*);
int cudaGetLastError();
char const* cudaGetErrorString(int);
}}

namespace tvm_ext {{
namespace {{

constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;  // cudaDeviceAttr

class Launch {{
 public:
  explicit Launch(char const* name) : name_(name) {{}}
  ~Launch() {{
    if (workspace != nullptr) cudaFreeAsync(workspace, stream);
    if (0 <= previous_) cudaSetDevice(previous_);
  }}

  // Addresses of the tensors, all on one device, which becomes the current one.
  bool begin(TVMFFIAny const* args, int count, int expected, int alignment, void** data) {{
    if (count != expected) return fail("TypeError", "it takes %d tensors and was given %d", expected, count);
    DLDevice device = {{kDLCUDA, 0}};
    for (int i = 0; i < count; ++i) {{
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
    }}
    if (!fits(device.device_id)) return false;
    stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
    return true;
  }}

  bool allocate(int64_t bytes) {{
    if (bytes < 0) return fail("RuntimeError", "its kernel refuses the extents%.0d%.0d", 0, 0);
    workspace_bytes = bytes;
    return bytes == 0 || works(cudaMallocAsync(&workspace, static_cast<size_t>(bytes), stream), "its workspace");
  }}

  // The kernel's cutlass::Status, and what CUDA says of the launch.
  int end(int32_t status) {{
    int const error = cudaGetLastError();
    if (error != 0) return works(error, "its kernel") ? 0 : -1;
    if (status == 0) return 0;
    fail("RuntimeError", "its kernel was refused with status %d%.0d", status, 0);
    return -1;
  }}

  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  void* stream = nullptr;

 private:
  // Whether the kernels' machine code runs on the device: asked once for each.
  bool fits(int id) {{
    constexpr int most = 64;
    static int known[most] = {{}};
    int current = 0;
    if (!works(cudaGetDevice(&current), "CUDA")) return false;
    if (current != id) {{
      if (!works(cudaSetDevice(id), "its device")) return false;
      previous_ = current;
    }}
    if (id < most && known[id]) return true;
    int major = 0, minor = 0;
    if (!works(cudaDeviceGetAttribute(&major, kCapabilityMajor, id), "its device")) return false;
    if (!works(cudaDeviceGetAttribute(&minor, kCapabilityMinor, id), "its device")) return false;
    if (!({fits}))
      return fail("RuntimeError",
                  "its machine code is for {architecture}, and this device has compute capability %d.%d. "
                  "Build the model for this device", major, minor);
    if (id < most) known[id] = 1;
    return true;
  }}

  bool works(int error, char const* what) {{
    if (error == 0) return true;
    char text[512];
    snprintf(text, sizeof(text), "%s (CUTLASS): %s cannot be had: %s", name_, what, cudaGetErrorString(error));
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
    return false;
  }}

  bool fail(char const* kind, char const* format, int first, int second) {{
    char reason[320], text[512];
    snprintf(reason, sizeof(reason), format, first, second);
    snprintf(text, sizeof(text), "%s (CUTLASS): %s.", name_, reason);
    TVMFFIErrorSetRaisedFromCStr(kind, text);
    return false;
  }}

  char const* name_;
  int previous_ = -1;
}};

}}  // namespace
}}  // namespace tvm_ext
"""
