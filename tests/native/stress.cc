// Runs the core of the rTask runtime without Python, for sanitizers and mutants: random tables, many runs, several
// threads, tasks that fail, forks, parallel loops with barriers, cores that others want, damaged bytes. Ends with
// 0, or 1 and what went wrong.
//
//   stress [seconds=2] [seed=0] [parts=walk,fail,epoch,threads,loops,beside,bytes,fork,hang]

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cores.h"
#include "fork_join.h"
#include "table.h"
#include "team.h"
#include "walker.h"

using namespace tvm_ext::rammer;

namespace {

using Random = std::mt19937_64;

#ifndef RAMMER_STRESS_LIMIT_NS
#define RAMMER_STRESS_LIMIT_NS 30000000000
#endif
constexpr int64_t kLimitNs = RAMMER_STRESS_LIMIT_NS;  // without progress: much, for a busy machine

void Require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::_Exit(1);
}

uint32_t Below(Random* random, uint32_t bound) { return static_cast<uint32_t>((*random)() % bound); }

// --- Kernels: rTask t of a call adds 1 to what the calls that it needs have written, and writes the sum -----
constexpr uint32_t kTasks = 4;
thread_local int raised = 0;

// Parameters: one result, then what it is computed from; each holds kTasks numbers. Not atomic: ThreadSanitizer sees
// every hand-off that the steps do not order.
int Sum(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny*) {
  auto* const result = static_cast<uint64_t*>(arguments[0].v_ptr);
  for (int64_t task = arguments[count - 2].v_int64; task < arguments[count - 1].v_int64; ++task) {
    uint64_t sum = 1;
    for (int32_t i = 1; i < count - 2; ++i)
      for (uint32_t t = 0; t < kTasks; ++t) sum += static_cast<const uint64_t*>(arguments[i].v_ptr)[t];
    result[task] = sum;
  }
  const auto* const fails = static_cast<const std::atomic<int>*>(self);
  if (fails != nullptr && fails->load(std::memory_order_relaxed) == static_cast<int>(arguments[0].v_int64 >> 8 & 7)) {
    raised = 1;
    return -1;
  }
  return 0;
}

std::atomic<int> live_errors{0};
void* Take() {
  Require(raised == 1, "an error was taken in a thread that raised none");
  raised = 0;
  ++live_errors;
  return new int(7);
}
void Drop(void* error) {
  delete static_cast<int*>(error);
  --live_errors;
}
const ErrorHooks kHooks{Take, Drop};

// --- Random tables ------------------------------------------------------------------------------------------
// Call n needs up to three earlier ones; the first is handed the argument, which is no call's result.
struct Case {
  Table table;
  std::vector<std::vector<uint32_t>> needs;  // of each call: buffers
};

Case Draw(Random* random, uint32_t calls, uint32_t units) {
  Case drawn;
  Table& table = drawn.table;
  constexpr uint64_t kBytes = kTasks * sizeof(uint64_t);
  table.name = "random";
  table.arguments = {{kBytes, 8}};
  table.buffers = {{0, 0, kBytes}};
  table.streams.resize(units);
  std::vector<std::vector<uint32_t>> counts;  // of each call, how long each stream was when all its rTasks were in
  for (uint32_t inputs = 0; inputs <= 3; ++inputs)
    table.kernels.push_back({"sum" + std::to_string(inputs), kTasks, std::vector<Parameter>(inputs + 1, {kBytes, 8})});
  for (uint32_t call = 0; call < calls; ++call) {
    std::vector<uint32_t> needs;
    for (uint32_t i = 0, n = Below(random, 3) + 1; i < n; ++i) needs.push_back(Below(random, call + 1));
    table.buffers.push_back({kArena, table.arena_bytes, kBytes});
    table.arena_bytes += 256;  // no false sharing is wanted here either
    CallRow row{"call " + std::to_string(call), static_cast<uint32_t>(needs.size()), {call + 1}};
    row.buffers.insert(row.buffers.end(), needs.begin(), needs.end());
    table.calls.push_back(row);
    std::map<uint32_t, uint32_t> waits;
    for (const uint32_t buffer : needs)
      if (buffer > 0)
        for (uint32_t unit = 0; unit < units; ++unit)
          waits[unit] = std::max(waits[unit], counts[buffer - 1][unit]);
    for (uint32_t task = 0; task < kTasks;) {
      const uint32_t end = task + 1 + Below(random, kTasks - task);
      const uint32_t unit = Below(random, units);
      EntryRow entry{call, task, end, {}};
      for (const auto& [other, count] : waits)
        if (other != unit && count > 0) entry.waits.push_back({other, count});
      table.streams[unit].push_back(entry);
      task = end;
    }
    counts.emplace_back();
    for (const auto& stream : table.streams) {
      uint32_t last = 0;  // the last entry of this call there
      for (uint32_t place = 0; place < stream.size(); ++place)
        if (stream[place].call == call) last = place + 1;
      counts.back().push_back(last);
    }
    drawn.needs.push_back(needs);
  }
  CheckTable(table);
  return drawn;
}

uint64_t Expected(const Case& drawn, uint64_t input) {
  std::vector<uint64_t> totals{input * kTasks};  // of each buffer
  for (const auto& needs : drawn.needs) {
    uint64_t sum = 1;
    for (const uint32_t buffer : needs) sum += totals[buffer];
    totals.push_back(sum * kTasks);
  }
  return totals.back();
}

// The last call's result goes to the argument's place in a second argument, so that runs can be compared.
void ExportLast(Case* drawn) {
  Table& table = drawn->table;
  table.arguments.push_back({kTasks * sizeof(uint64_t), 8});
  table.buffers.back() = {1, 0, kTasks * sizeof(uint64_t)};
  CheckTable(table);
}

std::vector<Kernel> Kernels(const Table& table, std::atomic<int>* fails = nullptr) {
  return std::vector<Kernel>(table.kernels.size(), Kernel{Sum, fails});
}

uint64_t RunOnce(Instance* instance, uint64_t input, int threads) {
  uint64_t in[kTasks], out[kTasks] = {};
  std::fill_n(in, kTasks, input);
  void* const pointers[] = {in, out};
  TeamLease lease(threads, true);
  const Result result = instance->Run(pointers, &lease, kLimitNs);
  Require(result.outcome == Outcome::kDone, "a run ended otherwise:" + result.text);
  uint64_t total = 0;
  for (const uint64_t value : out) total += value;
  return total;
}

// --- Parts: each is called again until its time is over -----------------------------------------------------
void Walk(Random* random) {
  const uint32_t units = 1 + Below(random, 5);
  Case drawn = Draw(random, 1 + Below(random, 30), units);
  ExportLast(&drawn);
  Instance instance(drawn.table, Kernels(drawn.table), kHooks);
  const int threads = 1 + static_cast<int>(Below(random, units));
  for (uint64_t input = 0; input < 100; ++input)
    Require(RunOnce(&instance, input, threads) == Expected(drawn, input), "a wrong result");
}

// Steps pass 2^32, in runs that must neither wait for ever nor start too early.
void Epoch(Random* random) {
  Case drawn = Draw(random, 12, 3);
  ExportLast(&drawn);
  Instance instance(drawn.table, Kernels(drawn.table), kHooks);
  uint32_t longest = 1;
  for (const auto& stream : drawn.table.streams) longest = std::max(longest, static_cast<uint32_t>(stream.size()));
  instance.set_epoch(0xffffffffu / longest - 20);
  for (uint64_t input = 0; input < 100; ++input)
    Require(RunOnce(&instance, input, 3) == Expected(drawn, input), "a wrong result near the end of numbers");
}

void Fail(Random* random) {
  Case drawn = Draw(random, 20, 3);
  ExportLast(&drawn);
  std::atomic<int> fails{-1};
  Instance instance(drawn.table, Kernels(drawn.table, &fails), kHooks);
  for (uint64_t input = 0; input < 100; ++input) {
    fails.store(static_cast<int>(Below(random, 8)));
    uint64_t in[kTasks] = {}, out[kTasks] = {};
    void* const pointers[] = {in, out};
    {
      TeamLease lease(3, true);
      const Result result = instance.Run(pointers, &lease, kLimitNs);
      Require(result.outcome == Outcome::kDone || result.outcome == Outcome::kFailed, "a failure that hangs");
      if (result.error != nullptr) Drop(result.error);
    }
    Require(live_errors.load() == 0, "an error was lost");
    fails.store(-1);
    Require(RunOnce(&instance, input, 3) == Expected(drawn, input), "a wrong result after a failure");
  }
}

void Threads(Random* random) {
  Case drawn = Draw(random, 12, 2);
  ExportLast(&drawn);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&drawn, caller] {
      Instance instance(drawn.table, Kernels(drawn.table), kHooks);
      for (uint64_t input = 0; input < 50; ++input)
        Require(RunOnce(&instance, input + caller, 2) == Expected(drawn, input + caller), "a wrong result of a thread");
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// --- Parallel loops -----------------------------------------------------------------------------------------
constexpr int kLoopTasks = 3;

struct Loop {
  uint64_t parts[kLoopTasks];
  uint64_t sums[kLoopTasks];
  int fails;
  bool barrier;
  bool nested;  // each task runs a loop of its own, which has the task's thread alone
};

int LoopTask(int task, ParallelEnv* env, void* closure) {
  Loop* const loop = static_cast<Loop*>(closure);
  if (loop->nested) {
    Loop inner{};
    inner.fails = -1;
    inner.barrier = true;
    if (ParallelLaunch(LoopTask, &inner, 0) != 0) return -1;
    for (const uint64_t sum : inner.sums) Require(sum == 18, "a loop in a task left something out");
  }
  for (int i = task; i < kLoopTasks; i += env->num_task) loop->parts[i] = static_cast<uint64_t>(i) + 5;
  if (task == loop->fails) {
    raised = 1;
    return -1;
  }
  if (!loop->barrier) return 0;
  if (ParallelBarrier(task, env) != 0) return -1;
  for (int i = task; i < kLoopTasks; i += env->num_task) {
    loop->sums[i] = 0;
    for (const uint64_t part : loop->parts) loop->sums[i] += part;
  }
  return ParallelBarrier(task, env);
}

int ThreadCount() { return kLoopTasks; }
void RaiseLoop(std::vector<std::pair<int, void*>> errors) {
  for (const auto& [task, error] : errors) Drop(error);
}
void Refuse(const char*) { raised = 1; }

void RunLoops(uint64_t seed, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    Loop loop{};
    loop.nested = i % 7 == 3;
    loop.fails = (seed + i) % 5 == 0 ? static_cast<int>(i % kLoopTasks) : -1;
    loop.barrier = i % 2 == 0;
    const int tasks = i % 3 == 0 ? kLoopTasks : 0;
    const bool failed = ParallelLaunch(LoopTask, &loop, tasks) != 0;
    if (tasks != 0) Require(failed == (loop.fails >= 0), "a loop's failure is lost, or made up");
    raised = 0;
    if (failed) continue;
    for (int task = 0; task < kLoopTasks; ++task) {
      Require(loop.parts[task] == static_cast<uint64_t>(task) + 5, "a loop left a task out");
      Require(!loop.barrier || loop.sums[task] == 18, "a barrier let a task through");
    }
  }
}

void Loops(Random* random) {
  SetLaunchHooks({ThreadCount, Take, RaiseLoop, Refuse});
  std::thread other(RunLoops, (*random)(), 200);
  RunLoops((*random)(), 200);
  other.join();
}

// --- Cores that somebody else wants too ---------------------------------------------------------------------
void BindHere(int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  sched_setaffinity(0, sizeof(one), &one);
}

// A thread that never gives up a core, for as long as it lives.
class Spinner {
 public:
  explicit Spinner(int cpu) : thread_([this, cpu] {
    BindHere(cpu);
    while (!stop_.load(std::memory_order_relaxed)) Pause();
  }) {}
  ~Spinner() {
    stop_.store(true);
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Repeats `step` until it returns true.
void Until(const std::string& what, const std::function<bool()>& step) {
  const int64_t start_ns = NowNs();
  while (!step()) Require(NowNs() - start_ns < kLimitNs, what + " never happened");
}

void YieldBeside() {
  constexpr int64_t kCautionNs = 20000000, kLostCoreNs = 100000;
  const int cpu = sched_getcpu();
  BindHere(cpu);
  int64_t before_ns = 0;
  const auto yields = [&before_ns] {
    before_ns = NowNs();
    return Yield();
  };
  {
    const Spinner spinner(cpu);
    Until("a yield that noticed who took the core", [&] { return !yields(); });
    const bool offers = Yield();
    Require(!offers || NowNs() - before_ns >= kCautionNs, "a thread that lost its core offers it again at once");
  }
  // Where others want the core still, an offer is one that took long.
  Until("a core that is offered again", [&] { return yields() || NowNs() - before_ns >= kLostCoreNs; });
}

struct LongJob {
  int threads;
  std::atomic<int> begun{0}, done{0};
};

// A worker's part outlasts slices of the scheduler. The caller's is to wait until workers have begun, so that it does
// not take their parts back. It gives up where one does not get to run.
void LongPart(void* context, int thread) {
  LongJob* const job = static_cast<LongJob*>(context);
  const int64_t start_ns = NowNs();
  job->begun.fetch_add(1);
  const auto goes_on = [job, thread] { return thread != 0 || job->begun.load() < job->threads; };
  while (goes_on() && NowNs() - start_ns < (thread == 0 ? 50000000 : 10000000)) Pause();
  job->done.fetch_add(1);
}

void RunBeside() {
  const int caller_cpu = sched_getcpu();
  BindHere(caller_cpu);
  TeamLease lease(UsableCores(), true);  // as many as cores: each worker is bound to its own
  const auto run = [&lease] {
    LongJob job{lease.threads()};
    Require(lease.Run(LongPart, &job, true) && job.done.load() == job.threads, "a part was left out");
  };
  run();
  const Spinner spinner(lease.team()->cpu_of(1));
  const int before = lease.team()->times_lent();
  Until("a caller that lends its core", [&] { return run(), lease.team()->times_lent() > before; });
  const int lent = lease.team()->times_lent();
  run();
  const bool is_here = lease.team()->cpu_of(1) == caller_cpu;
  Require(!is_here || lease.team()->times_lent() > lent, "a worker stays on the core that it was lent");
}

// A caller's team takes cores from callers on other cores, and none from those that share its own.
void ShareCores() {
  const cpu_set_t allowed = AllowedCores();
  const int cores = CPU_COUNT(&allowed), here = sched_getcpu();
  BindHere(here);
  int elsewhere = 0;
  while (elsewhere == here || !CPU_ISSET(elsewhere, &allowed)) ++elsewhere;
  const TeamLease first(cores);
  Require(first.threads() == cores, "a caller on its own does not have all cores");
  Require(TeamLease(cores).threads() == cores, "a caller is alone because of one that cannot run now");
  std::thread([cores, elsewhere] {
    BindHere(elsewhere);
    Require(TeamLease(cores).threads() == 1, "cores were given to two callers at once");
  }).join();
}

void Beside(Random*) {
  std::thread(YieldBeside).join();
  if (UsableCores() == 1) return;
  std::thread(RunBeside).join();
  std::thread(ShareCores).join();
}

// --- Bytes --------------------------------------------------------------------------------------------------
void Put(std::string* out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}

void PutText(std::string* out, const std::string& text) {
  Put(out, text.size(), 4);
  *out += text;
}

std::string Payload(const Table& table) {
  std::string out;
  PutText(&out, table.name);
  Put(&out, table.arena_bytes, 8);
  Put(&out, table.arguments.size(), 4);
  for (const auto& row : table.arguments) Put(&out, row.bytes, 8), Put(&out, row.alignment, 4);
  Put(&out, table.kernels.size(), 4);
  for (const auto& row : table.kernels) {
    PutText(&out, row.symbol);
    Put(&out, row.tasks, 4);
    Put(&out, row.parameters.size(), 4);
    for (const auto& item : row.parameters) Put(&out, item.bytes, 8), Put(&out, item.alignment, 4);
  }
  Put(&out, table.buffers.size(), 4);
  for (const auto& row : table.buffers) Put(&out, row.argument, 4), Put(&out, row.offset, 8), Put(&out, row.bytes, 8);
  Put(&out, table.calls.size(), 4);
  for (const auto& row : table.calls) {
    PutText(&out, row.name);
    Put(&out, row.kernel, 4);
    Put(&out, row.buffers.size(), 4);
    for (const uint32_t buffer : row.buffers) Put(&out, buffer, 4);
  }
  Put(&out, table.streams.size(), 4);
  for (const auto& stream : table.streams) {
    Put(&out, stream.size(), 4);
    for (const auto& row : stream) {
      Put(&out, row.call, 4), Put(&out, row.begin, 4), Put(&out, row.end, 4), Put(&out, row.waits.size(), 4);
      for (const auto& wait : row.waits) Put(&out, wait.unit, 4), Put(&out, wait.count, 4);
    }
  }
  return out;
}

std::string WithHeader(const std::string& payload) {
  std::string out("tvmxRAM\n", 8);
  Put(&out, kTableVersion, 4);
  Put(&out, Crc32(payload.data(), payload.size()), 4);
  Put(&out, payload.size(), 8);
  return out + payload;
}

// What writes every byte that the table says its kernels touch.
struct Touched {
  std::vector<uint64_t> bytes;
};

int Touch(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny*) {
  const auto* const touched = static_cast<const Touched*>(self);
  Require(static_cast<std::size_t>(count) == touched->bytes.size() + 2, "a call with too few arguments");
  for (std::size_t i = 0; i < touched->bytes.size(); ++i) std::memset(arguments[i].v_ptr, 1, touched->bytes[i]);
  return 0;
}

// A damaged table, checksum made to fit, is refused or harmless: run on one thread, it stays within its buffers.
void RunDamaged(const Table& table) {
  uint64_t total = table.arena_bytes;
  for (const auto& row : table.arguments) total += row.bytes + row.alignment;
  if (total > (1 << 22)) return;
  std::vector<Touched> touched(table.kernels.size());
  std::vector<Kernel> kernels;
  for (std::size_t i = 0; i < table.kernels.size(); ++i) {
    for (const auto& item : table.kernels[i].parameters) touched[i].bytes.push_back(item.bytes);
    kernels.push_back({Touch, &touched[i]});
  }
  std::vector<std::vector<char>> memory;
  std::vector<void*> pointers;
  for (const auto& row : table.arguments) {
    memory.emplace_back(row.bytes);
    pointers.push_back(memory.back().data());
  }
  Instance instance(table, kernels, kHooks);
  TeamLease lease(1);
  Require(instance.Run(pointers.data(), &lease, kLimitNs).outcome == Outcome::kDone, "a damaged table hangs");
}

void Bytes(Random* random) {
  Case drawn = Draw(random, 1 + Below(random, 6), 1 + Below(random, 3));
  const std::string sound = Payload(drawn.table);
  const std::string whole = WithHeader(sound);
  Require(Payload(ReadTable(whole.data(), whole.size())) == sound, "a table changed on its way through bytes");
  for (int i = 0; i < 2000; ++i) {
    std::string payload = sound;
    for (uint32_t n = 1 + Below(random, 3); n > 0; --n) {
      char& byte = payload[Below(random, static_cast<uint32_t>(payload.size()))];
      byte = Below(random, 2) == 0 ? static_cast<char>(byte ^ (1 << Below(random, 8))) : static_cast<char>((*random)());
    }
    if (Below(random, 8) == 0) payload.resize(Below(random, static_cast<uint32_t>(payload.size())));
    const std::string damaged = WithHeader(payload);
    const std::vector<char> exact(damaged.begin(), damaged.end());  // reading beyond it is seen
    Table table;
    try {
      table = ReadTable(exact.data(), exact.size());
    } catch (const TableError&) {
      continue;
    }
    RunDamaged(table);
  }
}

// --- Processes ----------------------------------------------------------------------------------------------
int InChild(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    std::_Exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

// Have two teams whose workers have all come to work: no loop passes its barrier without them.
void StartTwoTeams() {
  {
    const TeamLease other(kLoopTasks, true);
    RunLoops(1, 1);
  }
  RunLoops(1, 1);
}

// AddressSanitizer's allocator stays locked in a child for ever where another thread was in it at the fork. Threads
// allocate when they start: all of them are at work before the first fork, and then allocate nothing.
void Fork(Random* random) {
  Case drawn = Draw(random, 12, 3);
  ExportLast(&drawn);
  Instance instance(drawn.table, Kernels(drawn.table), kHooks);
  std::atomic<bool> started{false}, stop{false};
  SetLaunchHooks({ThreadCount, Take, RaiseLoop, Refuse});
  StartTwoTeams();
  std::thread busy([&] {  // somebody else is at work while we fork
    Instance own(drawn.table, Kernels(drawn.table), kHooks);
    while (!stop.load()) {
      RunOnce(&own, 1, 3);
      RunLoops(1, 1);
      started.store(true);
    }
  });
  Until("a thread at work", [&started] { return sched_yield() == 0 && started.load(); });
  for (uint64_t input = 0; input < 5; ++input) {
    Require(RunOnce(&instance, input, 3) == Expected(drawn, input), "a wrong result before a fork");
    const int status = InChild([&] {
      for (uint64_t i = 0; i < 5; ++i)
        Require(RunOnce(&instance, i, 3) == Expected(drawn, i), "a wrong result in a child");
      RunLoops(2, 5);
    });
    Require(status == 0, "a child did not end well");
  }
  stop.store(true);
  busy.join();
}

std::atomic<bool> let_go{false};
int Hang(void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny*) {
  while (arguments[count - 2].v_int64 == 1 && !let_go.load()) usleep(1000);
  return 0;
}

// A kernel that hangs, on whichever thread: the run ends with a list of who waits for what.
void HangPart(Random*) {
  Table table;
  table.name = "hang";
  table.kernels = {{"hang", 2, {}}};
  table.calls = {{"hung", 0, {}}};
  table.streams = {{{0, 0, 1, {}}, {0, 0, 1, {{1, 1}}}}, {{0, 1, 2, {}}}};
  CheckTable(table);
  auto* const instance = new Instance(table, {{Hang, nullptr}}, kHooks);
  let_go.store(false);
  Result result;
  // Where thread 0 comes to the second stream first, it is the one that hangs, until it is let go.
  std::thread rescuer([] {
    usleep(400000);
    let_go.store(true);
  });
  {
    TeamLease lease(2, true);
    result = instance->Run(nullptr, &lease, 50000000);
  }
  rescuer.join();
  if (result.outcome == Outcome::kDone) return;
  Require(result.outcome == Outcome::kLost || result.outcome == Outcome::kTimedOut, "a hang ended in a failure");
  Require(result.text.find("waits for entry 0 of vEU 1") != std::string::npos, "no word of who waits:" + result.text);
  usleep(50000);  // the hung thread leaves the table
}

const std::map<std::string, void (*)(Random*)> kParts = {
    {"walk", Walk},   {"fail", Fail},     {"epoch", Epoch}, {"threads", Threads}, {"loops", Loops},
    {"bytes", Bytes}, {"beside", Beside}, {"fork", Fork},   {"hang", HangPart}};

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 2;
  const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
  const std::string wanted = count > 3 ? "," + std::string(arguments[3]) + "," : "";
  for (const auto& [name, part] : kParts) {
    if (!wanted.empty() && wanted.find("," + name + ",") == std::string::npos) continue;
    Random random(seed);
    const int64_t end_ns = NowNs() + static_cast<int64_t>(seconds * 1e9);
    int rounds = 0;
    do {
      part(&random);
      ++rounds;
    } while (NowNs() < end_ns);
    std::printf("%s: %d rounds\n", name.c_str(), rounds);
  }
  std::fflush(stdout);
  std::_Exit(0);  // as a process that ends while workers sleep
}
