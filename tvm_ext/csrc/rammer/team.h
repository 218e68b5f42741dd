// Worker threads that help a caller for the time of one job.
//
// A team is leased by the thread that calls (its thread 0) and given back at the end; each job posts one piece of work
// to every other thread. A worker that has not begun by the time the caller has nothing else to do is passed over, so
// that a job never waits for a thread which the system does not let run. Teams are made on demand and never end: their
// threads sleep. A forked child starts without any and makes its own.
//
// Others want the cores too. A worker that has begun and then lost its core to somebody else is not waited for through
// that one's slice: the caller, who has nothing else to do, lends it its own.
#ifndef TVM_EXT_RAMMER_TEAM_H_
#define TVM_EXT_RAMMER_TEAM_H_

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "wait_cell.h"

namespace tvm_ext {
namespace rammer {

constexpr int kMostThreads = 256;

// A worker looks for new work for 2 ms, most of it yielding its core to whoever wants it, before it sleeps. Waking one
// takes the caller 5 us and the worker up to 50 us on a virtual machine.
constexpr Patience kIdlePatience = Patiently({400, 2000000});
constexpr Patience kJoinPatience = Patiently({400, 200000});

using Job = void (*)(void* context, int thread);

class Team {
 public:
  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Start workers until there are `threads` with the caller, as far as the system allows; how many there are.
  int Grow(int threads);

  // Call job(context, t) for t = 0 (in this thread) to threads - 1 (in a worker each). What has not begun when thread
  // 0 returns is run in this thread, or dropped where not `must_run`. False: a worker did not come back within
  // limit_ns of that (negative: no limit), and neither team nor context may ever be used again.
  bool Run(Job job, void* context, int threads, bool must_run, int64_t limit_ns = -1);

  // For tests: the core that worker `thread` is bound to (-1: to none), and how often the caller has lent its own.
  int cpu_of(int thread) const { return workers_[thread]->cpu; }
  int times_lent() const { return times_lent_; }

 private:
  enum State : uint32_t { kIdle = 0, kPosted = 1, kRunning = 2 };

  struct alignas(kLineBytes) Worker {
    WaitCell gate;  // a State
    Team* team;
    int index;
    int cpu;     // that it is bound to; -1: to none
    bool roams;  // over all cores but the caller's
    pthread_t thread;
    clockid_t clock;  // what it has run
  };

  static void* Work(void* worker);
  void KeepOffCaller();
  bool Join(Worker* worker, int64_t deadline_ns);
  void Lend(Worker* worker);
  void Bind(Worker* worker, const cpu_set_t& allowed, int caller_cpu);

  std::vector<std::unique_ptr<Worker>> workers_ = std::vector<std::unique_ptr<Worker>>(1);  // [0] stands for the caller
  Job job_ = nullptr;
  void* context_ = nullptr;
  int caller_cpu_ = -1;  // -1: workers are to be bound anew
  int times_lent_ = 0;
};

// Leases a team for as long as it lives.
class TeamLease {
 public:
  // A team of `wanted` threads, the caller counted. Not `exactly`: fewer where teams of callers on other cores occupy
  // those that this process may use; 1, the caller alone, needs no team.
  explicit TeamLease(int wanted, bool exactly = false);
  ~TeamLease();
  TeamLease(const TeamLease&) = delete;
  TeamLease& operator=(const TeamLease&) = delete;

  int threads() const { return threads_; }
  Team* team() const { return team_; }

  // `Team::Run` with all threads of the lease.
  bool Run(Job job, void* context, bool must_run, int64_t limit_ns = -1);

 private:
  int BusyElsewhere(const std::vector<const TeamLease*>& leases) const;

  Team* team_ = nullptr;
  int threads_ = 1;
  int counted_ = 0;
  int cpu_ = -1;  // that the caller was on when it began
  uint32_t generation_;
};

// True in a thread that is running a piece of a job, the caller's own included: such a thread starts no other job.
bool InsideJob();

// Forks between the process that was started and this one.
uint32_t ForkGeneration();

}  // namespace rammer
}  // namespace tvm_ext

#endif  // TVM_EXT_RAMMER_TEAM_H_
