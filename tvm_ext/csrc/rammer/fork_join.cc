#include "fork_join.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "team.h"
#include "wait_cell.h"

namespace tvm_ext {
namespace rammer {
namespace {

LaunchHooks hooks{};

// A loop that is being run. Tasks beyond the threads are taken one by one.
struct Loop {
  ParallelEnv env;  // first: what a kernel hands to the barrier points to it
  ParallelFunction function;
  void* closure;
  int threads;
  std::atomic<int> next;
  WaitCell arrived;  // at barriers, over all of them
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::vector<std::pair<int, void*>> errors;
};

thread_local Loop* current_loop = nullptr;

void RunTask(Loop* loop, int task) {
  Loop* const before = current_loop;
  current_loop = loop;
  const int code = loop->function(task, &loop->env, loop->closure);
  current_loop = before;
  if (code == 0) return;
  void* const error = hooks.take();
  const std::lock_guard<std::mutex> lock(loop->mutex);
  loop->errors.emplace_back(task, error);
  loop->failed.store(true, kPublish);
  loop->arrived.WakeParked();
}

void RunTasks(void* context, int thread) {
  Loop* const loop = static_cast<Loop*>(context);
  RunTask(loop, thread);
  for (;;) {
    const int task = loop->next.fetch_add(1, std::memory_order_relaxed);
    if (task >= loop->env.num_task) return;
    RunTask(loop, task);
  }
}

}  // namespace

void SetLaunchHooks(const LaunchHooks& new_hooks) { hooks = new_hooks; }

int ParallelLaunch(ParallelFunction function, void* closure, int tasks) {
  const int wanted = InsideJob() ? 1 : hooks.thread_count();
  if (tasks > wanted && !InsideJob()) {
    hooks.refuse("a parallel loop asks for more tasks than there are threads");
    return -1;
  }
  TeamLease lease(tasks == 0 ? wanted : tasks, tasks != 0);
  Loop loop;
  loop.function = function;
  loop.closure = closure;
  loop.threads = lease.threads();
  loop.env.num_task = tasks == 0 ? loop.threads : tasks;
  loop.env.sync_handle = &loop;
  loop.next.store(loop.threads, std::memory_order_relaxed);
  lease.Run(RunTasks, &loop, true);
  if (loop.errors.empty()) return 0;
  hooks.raise(std::move(loop.errors));
  return -1;
}

bool IsOwnLoop(const ParallelEnv* env) { return current_loop != nullptr && env == &current_loop->env; }

int ParallelBarrier(int, ParallelEnv* env) {
  Loop* const loop = static_cast<Loop*>(env->sync_handle);
  const uint32_t tasks = static_cast<uint32_t>(env->num_task);
  if (loop->threads < env->num_task) {
    hooks.refuse("tasks that wait for each other need a thread each, and the system has given fewer");
    return -1;
  }
  // Arrivals are numbered through all barriers: whoever is number n belongs to barrier n / tasks.
  const uint32_t number = loop->arrived.value.fetch_add(1, kPublish);
  loop->arrived.WakeParked();
  const uint32_t whole = (number / tasks + 1) * tasks;
  const auto all_here = [loop, whole](std::memory_order order) {
    return static_cast<int32_t>(loop->arrived.value.load(order) - whole) >= 0;
  };
  const auto may_go_on = [loop, &all_here](std::memory_order order) {
    return all_here(order) || loop->failed.load(order);
  };
  loop->arrived.Wait(may_go_on, kJoinPatience);
  if (all_here(kObserve)) return 0;
  hooks.refuse("another task of the loop has failed");
  return -1;
}

}  // namespace rammer
}  // namespace tvm_ext
