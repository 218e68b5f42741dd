// Parallel loops of compiled kernels on teams: what a kernel's library calls instead of TVM's TVMBackendParallelLaunch
// and TVMBackendParallelBarrier, with their ABI.
#ifndef TVM_EXT_RAMMER_FORK_JOIN_H_
#define TVM_EXT_RAMMER_FORK_JOIN_H_

#include <cstdint>
#include <utility>
#include <vector>

namespace tvm_ext {
namespace rammer {

// TVMParallelGroupEnv of tvm/runtime/c_backend_api.h.
struct ParallelEnv {
  void* sync_handle;
  int32_t num_task;
};

using ParallelFunction = int (*)(int task, ParallelEnv* env, void* closure);

struct LaunchHooks {
  int (*thread_count)();  // how many threads the user wants this thread's kernels to use
  void* (*take)();        // the error that a task put aside in this thread
  void (*raise)(std::vector<std::pair<int, void*>> errors);  // put them aside, by task, as one
  void (*refuse)(const char* reason);                        // put aside a new error
};

void SetLaunchHooks(const LaunchHooks& hooks);

// Runs function(task, env, closure) for each task of env->num_task: as many as there are threads where `tasks` is 0.
// Returns 0, or -1 with an error put aside. A task that starts another loop runs all of that one itself.
int ParallelLaunch(ParallelFunction function, void* closure, int tasks);

// Whether this thread is in a task of a loop that ParallelLaunch started with `env`.
bool IsOwnLoop(const ParallelEnv* env);

// Waits until every task of the loop has come here as often as this one. Returns -1 where that cannot happen.
int ParallelBarrier(int task, ParallelEnv* env);

}  // namespace rammer
}  // namespace tvm_ext

#endif  // TVM_EXT_RAMMER_FORK_JOIN_H_
