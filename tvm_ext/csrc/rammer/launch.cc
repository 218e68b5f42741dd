// Errors as tvm-ffi carries them, and the way of parallel loops in kernels' libraries to fork_join.h.

#include <dlfcn.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fork_join.h"
#include "module.h"
#include "team.h"

namespace tvm_ext {
namespace rammer {

namespace ffi = tvm::ffi;

void* TakeError() {
  TVMFFIObjectHandle handle = nullptr;
  TVMFFIErrorMoveFromRaised(&handle);
  return handle;
}

void DropError(void* error) {
  if (error != nullptr) TVMFFIObjectDecRef(error);
}

namespace {

std::string TextOf(const TVMFFIByteArray& bytes) { return std::string(bytes.data, bytes.size); }

// Its kind and message, after which it is given up. A kernel that fails without putting an error aside is at fault.
std::pair<std::string, std::string> Unpack(void* error) {
  if (error == nullptr) return {"RuntimeError", "the kernel failed and said nothing"};
  const TVMFFIErrorCell* const cell = TVMFFIErrorGetCellPtr(error);
  std::pair<std::string, std::string> text{TextOf(cell->kind), TextOf(cell->message)};
  DropError(error);
  return text;
}

using CountFunction = int (*)();
CountFunction tvm_thread_count = nullptr;

int ThreadCount() { return tvm_thread_count == nullptr ? UsableCores() : std::max(1, tvm_thread_count()); }

// As TVM words it.
void RaiseLaunchErrors(std::vector<std::pair<int, void*>> errors) {
  std::sort(errors.begin(), errors.end());
  std::string text;
  for (const auto& [task, error] : errors) text += "Task " + std::to_string(task) + " error: " + Unpack(error).second;
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text.c_str());
}

void RefuseLaunch(const char* reason) { TVMFFIErrorSetRaisedFromCStr("RuntimeError", reason); }

// Compiled kernels reach what is outside their library through data symbols, which the loader has set to TVM's
// functions. Set those of the library at `path`, which must be loaded, to ours. False: it has no parallel loop.
bool Adopt(const ffi::String& path) {
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) TVM_FFI_THROW(ValueError) << "the library " << path << " is not loaded";
  void** const launch = static_cast<void**>(dlsym(library, "__TVMBackendParallelLaunch"));
  void** const barrier = static_cast<void**>(dlsym(library, "__TVMBackendParallelBarrier"));
  if (launch != nullptr) *launch = reinterpret_cast<void*>(ParallelLaunch);
  if (barrier != nullptr) *barrier = reinterpret_cast<void*>(ParallelBarrier);
  dlclose(library);
  return launch != nullptr;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  SetLaunchHooks({ThreadCount, TakeError, RaiseLaunchErrors, RefuseLaunch});
  if (ffi::Function::GetGlobal("tvm_ext.rammer.adopt_library").has_value()) return;
  refl::GlobalDef()
      .def("tvm_ext.rammer.adopt_library", Adopt)
      .def("tvm_ext.rammer.parallel_launch", [] { return reinterpret_cast<void*>(ParallelLaunch); })
      .def("tvm_ext.rammer.parallel_barrier", [] { return reinterpret_cast<void*>(ParallelBarrier); })
      .def("tvm_ext.rammer.set_thread_count_function",
           [](void* function) { tvm_thread_count = reinterpret_cast<CountFunction>(function); });
}

}  // namespace

void RaiseTaken(void* error, const std::string& where) {
  const auto [kind, message] = Unpack(error);
  throw ffi::Error(kind, message + "\n  in " + where, TVMFFIBacktrace(__FILE__, __LINE__, __func__, 0));
}

}  // namespace rammer
}  // namespace tvm_ext
