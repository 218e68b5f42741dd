// Errors as tvm-ffi carries them, and the way of parallel loops in kernels' libraries to fork_join.h.

#include <dlfcn.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "cores.h"
#include "ending.h"
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

// TVM's own functions, and what a thread said by runtime.config_threadpool.
using CountFunction = int (*)();
using LaunchFunction = int (*)(ParallelFunction, void*, int);
using BarrierFunction = int (*)(int, ParallelEnv*);
CountFunction tvm_max_concurrency = nullptr;
std::atomic<LaunchFunction> tvm_launch{nullptr};
std::atomic<BarrierFunction> tvm_barrier{nullptr};
thread_local int configured_threads = 0;  // 0: nothing
thread_local bool configured_cores = false;

int ThreadCount() {
  const int most = tvm_max_concurrency == nullptr ? UsableCores() : std::max(1, tvm_max_concurrency());
  return configured_threads > 0 ? std::min(configured_threads, most) : most;
}

// A thread that chose the cores of its workers keeps TVM's.
int Launch(ParallelFunction function, void* closure, int tasks) {
  const LaunchFunction tvm = tvm_launch.load(std::memory_order_relaxed);
  if (configured_cores && tvm != nullptr && !InsideJob()) return tvm(function, closure, tasks);
  if (InsideJob()) return ParallelLaunch(function, closure, tasks);
  const RunScope scope;
  return ParallelLaunch(function, closure, tasks);
}

int Barrier(int task, ParallelEnv* env) {
  const BarrierFunction tvm = tvm_barrier.load(std::memory_order_relaxed);
  return IsOwnLoop(env) || tvm == nullptr ? ParallelBarrier(task, env) : tvm(task, env);
}

// From now on runtime.config_threadpool(mode, threads[, cores]) also counts for loops that come here. As before it is
// about the thread that calls it.
void FollowConfiguration() {
  constexpr const char* kName = "runtime.config_threadpool";
  const ffi::Optional<ffi::Function> original = ffi::Function::GetGlobal(kName);
  if (!original.has_value()) return;
  ffi::Function::SetGlobal(kName, ffi::Function::FromPacked([original](ffi::PackedArgs arguments, ffi::Any* result) {
                             (*original).CallPacked(arguments, result);
                             configured_threads = arguments[1].cast<int>();
                             configured_cores = arguments.size() > 2;
                           }),
                           true);
}

// As TVM words it.
void RaiseLaunchErrors(std::vector<std::pair<int, void*>> errors) {
  std::sort(errors.begin(), errors.end());
  std::string text;
  for (const auto& [task, error] : errors) text += "Task " + std::to_string(task) + " error: " + Unpack(error).second;
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text.c_str());
}

void RefuseLaunch(const char* reason) { TVMFFIErrorSetRaisedFromCStr("RuntimeError", reason); }

// Point the data symbol `name` of a library at `ours`, and remember where it pointed. False: it has none.
template <typename Function>
bool Redirect(void* library, const char* name, Function ours, std::atomic<Function>* before) {
  void** const place = static_cast<void**>(dlsym(library, name));
  if (place == nullptr) return false;
  const Function theirs = reinterpret_cast<Function>(*place);
  if (theirs != nullptr && theirs != ours) before->store(theirs, std::memory_order_relaxed);
  *place = reinterpret_cast<void*>(ours);
  return true;
}

// Compiled kernels reach what is outside their library through data symbols, which the loader has set to TVM's
// functions. Set those of the library at `path`, which must be loaded, to ours. False: it has no parallel loop.
bool Adopt(const ffi::String& path) {
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) TVM_FFI_THROW(ValueError) << "the library " << path << " is not loaded";
  const bool has_loops = Redirect(library, "__TVMBackendParallelLaunch", Launch, &tvm_launch);
  Redirect(library, "__TVMBackendParallelBarrier", Barrier, &tvm_barrier);
  dlclose(library);
  return has_loops;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  SetLaunchHooks({ThreadCount, TakeError, RaiseLaunchErrors, RefuseLaunch});
  if (ffi::Function::GetGlobal("tvm_ext.rammer.adopt_library").has_value()) return;
  refl::GlobalDef()
      .def("tvm_ext.rammer.adopt_library", Adopt)
      .def("tvm_ext.rammer.parallel_launch", [] { return reinterpret_cast<void*>(Launch); })
      .def("tvm_ext.rammer.parallel_barrier", [] { return reinterpret_cast<void*>(Barrier); })
      .def("tvm_ext.rammer.follow_tvm", [](void* max_concurrency) {
        tvm_max_concurrency = reinterpret_cast<CountFunction>(max_concurrency);
        FollowConfiguration();
      });
}

}  // namespace

void RaiseTaken(void* error, const std::string& where) {
  const auto [kind, message] = Unpack(error);
  throw ffi::Error(kind, message + "\n  in " + where, TVMFFIBacktrace(__FILE__, __LINE__, __func__, 0));
}

}  // namespace rammer
}  // namespace tvm_ext
