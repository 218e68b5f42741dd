#include "team.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "cores.h"

namespace tvm_ext {
namespace rammer {
namespace {

// A caller that sleeps until a worker has ended looks so often whether that one has a core.
constexpr int64_t kLookInNs = 100000;

thread_local bool inside_job = false;

// Sets `inside_job` for a scope, and restores what it was.
class Inside {
 public:
  Inside() : before_(inside_job) { inside_job = true; }
  ~Inside() { inside_job = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  bool before_;
};

// What the thread of a clock has run; -1: it has ended.
int64_t RanNs(clockid_t clock) {
  timespec ran{};
  if (clock_gettime(clock, &ran) != 0) return -1;
  return static_cast<int64_t>(ran.tv_sec) * 1000000000 + ran.tv_nsec;
}

// Tells of a thread that is at work whether it has a core, by its clock: one without stands still.
class Standstill {
 public:
  explicit Standstill(clockid_t clock) : clock_(clock) {}

  // To be asked again and again.
  bool operator()() {
    const int64_t now_ns = NowNs();
    if (now_ns - looked_ns_ < kWindowNs) return false;
    looked_ns_ = now_ns;
    const int64_t before_ns = std::exchange(ran_ns_, RanNs(clock_));
    return before_ns >= 0 && ran_ns_ >= 0 && ran_ns_ - before_ns < kWindowNs / 4;
  }

 private:
  static constexpr int64_t kWindowNs = 20000;
  clockid_t clock_;
  int64_t looked_ns_ = 0, ran_ns_ = -1;
};

// All leases, and the teams that nobody leases. Never destroyed: threads may be at work while the process ends.
struct Registry {
  std::mutex mutex;
  std::vector<Team*> idle;
  std::vector<const TeamLease*> leases;
  std::atomic<uint32_t> generation{0};
};

Registry& TheRegistry();

void BeforeFork() { TheRegistry().mutex.lock(); }
void AfterForkInParent() { TheRegistry().mutex.unlock(); }

// Workers stay behind in the parent: the child forgets its teams, leased ones included, and never frees them, since
// what a worker was doing to one is unknown.
void AfterForkInChild() {
  Registry& registry = TheRegistry();
  ForgetWitness();
  registry.idle.clear();
  registry.leases.clear();
  registry.generation.fetch_add(1, std::memory_order_relaxed);
  registry.mutex.unlock();
}

Registry& TheRegistry() {
  static Registry* const registry = [] {
    pthread_atfork(BeforeFork, AfterForkInParent, AfterForkInChild);
    return new Registry();
  }();
  return *registry;
}

}  // namespace

bool InsideJob() { return inside_job; }

uint32_t ForkGeneration() { return TheRegistry().generation.load(std::memory_order_relaxed); }

int Team::Grow(int threads) {
  threads = std::min(threads, kMostThreads);
  if (static_cast<int>(workers_.size()) >= threads) return threads;
  const cpu_set_t allowed = AllowedCores();
  const int caller_cpu = sched_getcpu();
  while (static_cast<int>(workers_.size()) < threads) {
    auto worker = std::make_unique<Worker>();
    worker->team = this;
    worker->index = static_cast<int>(workers_.size());
    worker->cpu = -1;
    worker->roams = false;
    if (pthread_create(&worker->thread, nullptr, Work, worker.get()) != 0) break;
    if (pthread_getcpuclockid(worker->thread, &worker->clock) != 0) worker->clock = CLOCK_MONOTONIC;  // goes on
    pthread_detach(worker->thread);
    workers_.push_back(std::move(worker));
  }
  caller_cpu_ = caller_cpu;
  for (std::size_t i = 1; i < workers_.size(); ++i) Bind(workers_[i].get(), allowed, caller_cpu);
  return static_cast<int>(workers_.size());
}

void* Team::Work(void* argument) {
  Worker* const self = static_cast<Worker*>(argument);
  const auto posted = [self](std::memory_order order) { return self->gate.value.load(order) == kPosted; };
  inside_job = true;
  for (;;) {
    self->gate.Wait(posted, kIdlePatience);
    uint32_t expected = kPosted;
    if (!self->gate.value.compare_exchange_strong(expected, kRunning, std::memory_order_acq_rel)) continue;
    self->team->job_(self->team->context_, self->index);
    self->gate.Publish(kIdle);
  }
  return nullptr;
}

// Keep the worker off the caller's core. A team of as many threads as there are cores has each worker bound to one of
// its own. Of a smaller one the system chooses among the others: other processes have teams too, and all would be bound
// to the same few.
void Team::Bind(Worker* worker, const cpu_set_t& allowed, int caller_cpu) {
  cpu_set_t spare = allowed;
  if (caller_cpu >= 0) CPU_CLR(caller_cpu, &spare);
  worker->cpu = -1;
  worker->roams = CPU_COUNT(&spare) >= static_cast<int>(workers_.size());
  cpu_set_t chosen = worker->roams ? spare : allowed;
  if (!worker->roams) {
    for (const auto& other : workers_)
      if (other != nullptr && other->cpu >= 0) CPU_CLR(other->cpu, &spare);
    for (int cpu = 0; cpu < CPU_SETSIZE && worker->cpu < 0; ++cpu)
      if (CPU_ISSET(cpu, &spare)) worker->cpu = cpu;
  }
  if (worker->cpu >= 0) {
    CPU_ZERO(&chosen);
    CPU_SET(worker->cpu, &chosen);
  }
  if (pthread_setaffinity_np(worker->thread, sizeof(chosen), &chosen) != 0) worker->cpu = -1;
}

// The system may have moved the caller to a worker's core, where the two would take turns of milliseconds.
void Team::KeepOffCaller() {
  const int cpu = sched_getcpu();
  if (cpu == caller_cpu_) return;
  const bool has_lent = caller_cpu_ < 0;
  caller_cpu_ = cpu;
  for (const auto& worker : workers_)
    if (worker != nullptr && (worker->cpu == cpu || worker->roams || has_lent)) Bind(worker.get(), AllowedCores(), cpu);
}

// Bind the worker to the core of this thread, which sleeps meanwhile. The next run binds all workers anew.
void Team::Lend(Worker* worker) {
  const int cpu = sched_getcpu();
  if (cpu < 0 || worker->cpu == cpu) return;
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(cpu, &here);
  if (pthread_setaffinity_np(worker->thread, sizeof(here), &here) != 0) return;
  worker->cpu = cpu;
  caller_cpu_ = -1;
  ++times_lent_;
}

// False: the worker has not come back by the deadline (NowNs; negative: none).
bool Team::Join(Worker* worker, int64_t deadline_ns) {
  WaitCell& gate = worker->gate;
  const auto idle = [&gate](std::memory_order order) { return gate.value.load(order) == kIdle; };
  Standstill standstill(worker->clock);
  bool has_no_core = false;
  const auto look = [&standstill, &has_no_core] { return has_no_core = standstill(); };
  while (!WaitCell::Look(idle, kJoinPatience, look)) {
    if (std::exchange(has_no_core, false)) Lend(worker);
    const int64_t left_ns = deadline_ns < 0 ? kLookInNs : std::min(kLookInNs, deadline_ns - NowNs());
    if (left_ns <= 0) return false;
    gate.Park(idle, left_ns);
  }
  return true;
}

bool Team::Run(Job job, void* context, int threads, bool must_run, int64_t limit_ns) {
  KeepOffCaller();
  job_ = job;
  context_ = context;
  for (int i = 1; i < threads; ++i) workers_[i]->gate.Publish(kPosted);
  {
    const Inside inside;
    job(context, 0);
    for (int i = 1; i < threads; ++i) {
      uint32_t expected = kPosted;
      if (workers_[i]->gate.value.compare_exchange_strong(expected, kIdle, std::memory_order_acq_rel) && must_run)
        job(context, i);
    }
  }
  const int64_t deadline_ns = limit_ns < 0 ? -1 : NowNs() + limit_ns;
  for (int i = 1; i < threads; ++i)
    if (!Join(workers_[i].get(), deadline_ns)) return false;
  return true;
}

// Threads of all leases whose callers are on other cores than this one's. A caller that was on this core does not run
// now, and its workers end soon: a system that packs threads on few cores keeps all callers there, and leaves the
// other cores to bound workers.
int TeamLease::BusyElsewhere(const std::vector<const TeamLease*>& leases) const {
  int threads = 0;
  for (const TeamLease* lease : leases)
    if (lease->cpu_ != cpu_) threads += lease->counted_;
  return threads;
}

TeamLease::TeamLease(int wanted, bool exactly) : generation_(ForkGeneration()) {
  if (wanted <= 1 || inside_job) return;
  const int cores = UsableCores();
  Registry& registry = TheRegistry();
  {
    const std::lock_guard<std::mutex> lock(registry.mutex);
    cpu_ = sched_getcpu();
    const int free_cores = std::max(1, cores - BusyElsewhere(registry.leases));
    counted_ = exactly ? wanted : std::min(wanted, free_cores);
    registry.leases.push_back(this);
    if (counted_ > 1 && !registry.idle.empty()) {
      team_ = registry.idle.back();
      registry.idle.pop_back();
    }
  }
  if (counted_ == 1) return;
  if (team_ == nullptr) team_ = new Team();
  threads_ = std::min(team_->Grow(counted_), counted_);
}

TeamLease::~TeamLease() {
  if (counted_ == 0) return;
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  if (generation_ != registry.generation.load(std::memory_order_relaxed)) return;  // forked meanwhile
  registry.leases.erase(std::find(registry.leases.begin(), registry.leases.end(), this));
  if (team_ != nullptr) registry.idle.push_back(team_);
}

bool TeamLease::Run(Job job, void* context, bool must_run, int64_t limit_ns) {
  if (team_ == nullptr) {
    const Inside inside;
    job(context, 0);
    return true;
  }
  if (team_->Run(job, context, threads_, must_run, limit_ns)) return true;
  team_ = nullptr;  // lost with the worker that still uses it
  return false;
}

}  // namespace rammer
}  // namespace tvm_ext
