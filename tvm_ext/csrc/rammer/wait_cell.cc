#include "wait_cell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
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

namespace {

// A yield to nobody takes 0.2 to 1 us; whoever gets the core keeps it for 1 to 4 ms. A thread that lost its core offers
// it again after 20 ms, 40, 80 and so on: such offers cost a fifth of the time at first, and soon nothing.
constexpr int64_t kLostCoreNs = 100000;
constexpr int64_t kLeastCautionNs = 20000000;
constexpr int64_t kMostCautionNs = 1280000000;

thread_local int64_t caution_ns = kLeastCautionNs;
thread_local int64_t cautious_until_ns = 0;

}  // namespace

bool Yield() {
  const int64_t start_ns = NowNs();
  if (start_ns < cautious_until_ns) return false;
  sched_yield();
  const int64_t end_ns = NowNs();
  if (end_ns - start_ns < kLostCoreNs) {
    caution_ns = kLeastCautionNs;
    return true;
  }
  cautious_until_ns = end_ns + caution_ns;
  caution_ns = std::min(2 * caution_ns, kMostCautionNs);
  return false;
}

}  // namespace rammer
}  // namespace tvm_ext
