// One number that threads publish and wait for: step counters, and the posts of a team's workers.
//
// A waiter spins, then yields while nobody else wants its core, then sleeps in the kernel. Worked example of why
// sleeping needs the strongest orders:
//
//     waiter                                 publisher
//     parked += 1          (kAnnounce)       value = 7            (kPublish)
//     value still 6? sleep (kLookAgain)      parked > 0? wake     (kLookForParked)
//
// With weaker orders a processor may do each side's second line before its first: the waiter sees 6, the publisher sees
// nobody, and the waiter sleeps for ever. tests/unit/rammer_runtime/test_wait_protocol.py reads the orders below and
// tries every execution that C++'s memory model allows.
#ifndef TVM_EXT_RAMMER_WAIT_CELL_H_
#define TVM_EXT_RAMMER_WAIT_CELL_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tvm_ext {
namespace rammer {

// Mutants are built by defining one of these otherwise.
#ifndef RAMMER_PUBLISH
#define RAMMER_PUBLISH std::memory_order_seq_cst
#endif
#ifndef RAMMER_LOOK_FOR_PARKED
#define RAMMER_LOOK_FOR_PARKED std::memory_order_seq_cst
#endif
#ifndef RAMMER_ANNOUNCE
#define RAMMER_ANNOUNCE std::memory_order_seq_cst
#endif
#ifndef RAMMER_LOOK_AGAIN
#define RAMMER_LOOK_AGAIN std::memory_order_seq_cst
#endif
#ifndef RAMMER_OBSERVE
#define RAMMER_OBSERVE std::memory_order_acquire
#endif
#ifndef RAMMER_LOOKS_AGAIN
#define RAMMER_LOOKS_AGAIN true
#endif

constexpr std::memory_order kPublish = RAMMER_PUBLISH;
constexpr std::memory_order kLookForParked = RAMMER_LOOK_FOR_PARKED;
constexpr std::memory_order kAnnounce = RAMMER_ANNOUNCE;
constexpr std::memory_order kLookAgain = RAMMER_LOOK_AGAIN;
constexpr std::memory_order kObserve = RAMMER_OBSERVE;

// Two lines: processors fetch lines in pairs.
constexpr std::size_t kLineBytes = 128;

// Linux's futex(2): sleep while *word == expected, for at most limit_ns (negative: for ever); wake all who sleep on it.
void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, int64_t limit_ns);
void FutexWakeAll(std::atomic<uint32_t>* word);

inline int64_t NowNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

inline void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Offers the core to whoever wants it. False: somebody took it, and kept it for a scheduler's slice. For a while it is
// then not offered again, and this returns false at once: the thread had better sleep. One that is woken goes before
// who has used its slice up; one that yields goes behind.
bool Yield();

// How long a waiter looks before it sleeps. A pause takes 10 to 60 ns; during yields other threads get the core.
struct Patience {
  int pauses;
  int64_t yield_ns;
};

// A test program sleeps at every wait.
#ifdef RAMMER_IMPATIENT
constexpr Patience Patiently(Patience) { return {0, 0}; }
#else
constexpr Patience Patiently(Patience patience) { return patience; }
#endif

struct alignas(kLineBytes) WaitCell {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> parked{0};
  std::atomic<uint32_t> event{0};

  void Publish(uint32_t next) {
    value.store(next, kPublish);
    WakeParked();
  }

  // To be called after a change that waiters look for, stored with kPublish.
  void WakeParked() {
    if (parked.load(kLookForParked) == 0) return;
    event.fetch_add(1, std::memory_order_seq_cst);
    FutexWakeAll(&event);
  }

  // Sleep until somebody publishes, or limit_ns have passed (negative: no limit); not at all where `ready` holds.
  // The event is read first: who publishes after our look raises it, so that the kernel does not let us sleep.
  template <typename Ready>
  void Park(const Ready& ready, int64_t limit_ns) {
    const uint32_t seen = event.load(std::memory_order_acquire);
    parked.fetch_add(1, kAnnounce);
    if (!(RAMMER_LOOKS_AGAIN && ready(kLookAgain))) FutexWait(&event, seen, limit_ns);
    parked.fetch_sub(1, std::memory_order_relaxed);
  }

  // Whether `ready(order)`, which loads with the order that it is given, before patience ends. It ends at once where
  // somebody else wants the core, or `in_vain()` holds.
  template <typename Ready, typename InVain>
  static bool Look(const Ready& ready, Patience patience, InVain in_vain) {
    for (int i = 0; i < patience.pauses; ++i) {
      if (ready(kObserve)) return true;
      Pause();
    }
    const int64_t start_ns = NowNs();
    do {
      if (ready(kObserve)) return true;
    } while (!in_vain() && Yield() && NowNs() - start_ns < patience.yield_ns);
    return ready(kObserve);
  }

  // Wait until `ready`. False: the deadline (NowNs; negative: none) has passed.
  template <typename Ready>
  bool Wait(const Ready& ready, Patience patience, int64_t deadline_ns = -1) {
    if (Look(ready, patience, [] { return false; })) return true;
    while (!ready(kObserve)) {
      const int64_t left_ns = deadline_ns < 0 ? -1 : deadline_ns - NowNs();
      if (deadline_ns >= 0 && left_ns <= 0) return false;
      Park(ready, left_ns);
    }
    return true;
  }
};

}  // namespace rammer
}  // namespace tvm_ext

#endif  // TVM_EXT_RAMMER_WAIT_CELL_H_
