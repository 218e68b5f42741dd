#include "cores.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace tvm_ext {
namespace rammer {
namespace {

constexpr pid_t kNobody = 0;
constexpr pid_t kStarting = -1;

// False: there is no such thread, or the system does not say.
bool ReadMask(pid_t thread, cpu_set_t* mask) {
  CPU_ZERO(mask);
  return sched_getaffinity(thread, sizeof(*mask), mask) == 0 && CPU_COUNT(mask) > 0;
}

struct Mask {
  cpu_set_t cores;
  bool known;
};

Mask MaskOfFirstThread() {
  Mask mask;
  mask.known = ReadMask(getpid(), &mask.cores);
  return mask;
}

Mask at_start = MaskOfFirstThread();
std::atomic<pid_t> witness{kNobody};

void* Witness(void*) {
  if (at_start.known) sched_setaffinity(0, sizeof(at_start.cores), &at_start.cores);
  witness.store(static_cast<pid_t>(syscall(SYS_gettid)), std::memory_order_release);
  for (;;) pause();
}

// It takes no signals, and hardly any memory.
void StartWitness() {
  pid_t nobody = kNobody;
  if (!witness.compare_exchange_strong(nobody, kStarting)) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 64 * 1024);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  pthread_t thread;
  if (pthread_create(&thread, &attributes, Witness, nullptr) != 0) witness.store(kNobody);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
}

}  // namespace

cpu_set_t AllowedCores() {
  const pid_t thread = witness.load(std::memory_order_acquire);
  cpu_set_t allowed;
  if (thread > 0 && ReadMask(thread, &allowed)) return allowed;
  if (thread == kNobody) StartWitness();
  if (at_start.known) return at_start.cores;
  CPU_ZERO(&allowed);
  return allowed;
}

int UsableCores() {
  const cpu_set_t allowed = AllowedCores();
  return std::max(1, CPU_COUNT(&allowed));
}

// `pthread_atfork` calls it with the one thread that the child has.
void ForgetWitness() {
  at_start = MaskOfFirstThread();
  witness.store(kNobody, std::memory_order_relaxed);
}

}  // namespace rammer
}  // namespace tvm_ext
