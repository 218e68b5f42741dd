#include "wait_cell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace tvm_ext {
namespace rammer {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads the word itself");

void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, int64_t limit_ns) {
  constexpr int64_t kSecondNs = 1000000000;
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(limit_ns / kSecondNs);
  limit.tv_nsec = static_cast<long>(limit_ns % kSecondNs);  // NOLINT: timespec's type
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, limit_ns < 0 ? nullptr : &limit, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Yield() { sched_yield(); }

}  // namespace rammer
}  // namespace tvm_ext
