#include "ending.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <exception>

#include "wait_cell.h"

namespace tvm_ext {
namespace rammer {
namespace {

constexpr int64_t kSettledNs = 100000000;  // so long nobody runs a table: others do other things
constexpr int64_t kSettleLimitNs = 1000000000;
constexpr int64_t kHoldNs = 2000000000;
constexpr useconds_t kLookUs = 1000;

std::atomic<int> running{0};
std::atomic<int> held{0};
std::atomic<int> threads_seen{0};  // that have run tables and still exist
std::atomic<int64_t> hold_until_ns{0};  // 0: not ending
std::atomic<pthread_t> ending_thread{};

struct Seen {
  bool yes = false;
  ~Seen() {
    if (yes) threads_seen.fetch_sub(1, std::memory_order_relaxed);
  }
};
thread_local Seen seen;

// The child of a fork has one thread: its end must not wait for those that its parent had.
void ForgetOtherThreads() {
  running.store(0);
  held.store(0);
  threads_seen.store(seen.yes ? 1 : 0);
}

const int forget_after_forks = pthread_atfork(nullptr, nullptr, ForgetOtherThreads);

bool PythonHasEnded() {
  using Function = int (*)();
  static const Function function = [] {
    void* found = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    if (found == nullptr) found = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");  // before Python 3.13
    return reinterpret_cast<Function>(found);
  }();
  return function != nullptr && function() != 0;
}

std::terminate_handler before_end = nullptr;

// Where Python unwinds another thread through frames that cannot be unwound: that thread stays here. Whatever else ends
// the process ends it.
[[noreturn]] void TerminateUnlessUnwound() {
  if (PythonHasEnded() && !pthread_equal(ending_thread.load(), pthread_self()) && !std::current_exception())
    for (;;) pause();
  before_end();
  std::abort();
}

// Returns at once, unless another thread ends the interpreter: then when that turns out not to be so, or never.
void HoldWhereEnding() {
  if (hold_until_ns.load(std::memory_order_acquire) == 0) return;
  if (pthread_equal(ending_thread.load(), pthread_self())) return;
  held.fetch_add(1);
  while (PythonHasEnded() || NowNs() < hold_until_ns.load()) usleep(kLookUs);
  held.fetch_sub(1);
}

}  // namespace

RunScope::RunScope() {
  if (!seen.yes) {
    seen.yes = true;
    threads_seen.fetch_add(1, std::memory_order_relaxed);
  }
  HoldWhereEnding();
  running.fetch_add(1, std::memory_order_relaxed);
}

RunScope::~RunScope() {
  running.fetch_sub(1, std::memory_order_relaxed);
  HoldWhereEnding();
}

void HoldOtherThreads() {
  const int own = seen.yes ? 1 : 0;
  const int64_t start_ns = NowNs();
  ending_thread.store(pthread_self());
  if (before_end == nullptr) before_end = std::set_terminate(TerminateUnlessUnwound);
  hold_until_ns.store(start_ns + kHoldNs, std::memory_order_release);
  int64_t idle_since_ns = start_ns;
  while (threads_seen.load() - own > held.load()) {
    usleep(kLookUs);
    const int64_t now_ns = NowNs();
    if (running.load() != 0) idle_since_ns = now_ns;
    if (now_ns - idle_since_ns > kSettledNs || now_ns - start_ns > kSettleLimitNs) return;
  }
}

}  // namespace rammer
}  // namespace tvm_ext
