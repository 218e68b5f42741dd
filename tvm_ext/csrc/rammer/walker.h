// Walks a table: every thread of a team takes entries from its unit's stream, waits for what they wait for, and calls
// their kernels.
//
// A stream is walked by the thread that leases it. Usually that is its own unit's, for the whole run; where a waiter
// finds that nobody leases the stream it waits for (its thread sleeps, runs elsewhere, does not exist), it walks that
// stream itself until its own wait is over. So any number of threads, one included, walks any number of streams, and a
// run does not wait for a thread to be woken. Since waits form no circle (ReadTable), some leased stream can always go
// on, or some unleased one that somebody waits for.
//
// Steps count entries over all runs of an instance: in run r (from 0) of a stream of n entries, k of them have finished
// when step - r * n >= k, modulo 2^32. Nothing is reset between runs.
#ifndef TVM_EXT_RAMMER_WALKER_H_
#define TVM_EXT_RAMMER_WALKER_H_

#include <tvm/ffi/c_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "table.h"
#include "team.h"
#include "wait_cell.h"

namespace tvm_ext {
namespace rammer {

// What tvm-ffi calls a safe call: returns 0, or puts an error aside in its thread.
struct Kernel {
  TVMFFISafeCallType call;
  void* self;
};

// Takes the error that a kernel put aside in this thread, and gives one up that nobody wants.
struct ErrorHooks {
  void* (*take)();
  void (*drop)(void* error);
};

struct TraceRow {
  uint32_t unit;
  uint32_t entry;  // its place in the unit's stream
  uint32_t thread;
  uint32_t reserved;
  int64_t start_ns;  // of a steady clock
  int64_t end_ns;
};

enum class Outcome { kDone, kFailed, kTimedOut, kLost };

struct Result {
  Outcome outcome = Outcome::kDone;
  void* error = nullptr;  // kFailed: what the first kernel that failed put aside
  std::string text;       // kFailed: which entry; kTimedOut, kLost: what each unit waits for
};

class Instance {
 public:
  // `table` must outlive the instance. Takes all memory that runs need; throws std::bad_alloc.
  Instance(const Table& table, const std::vector<Kernel>& kernels, const ErrorHooks& hooks);
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  // One run on `pointers`, one for each of the table's arguments, of the sizes and alignments that it states. No
  // progress for `limit_ns` (negative: no limit) ends it. After kLost the instance must be kept, and never be used.
  Result Run(void* const* pointers, TeamLease* lease, int64_t limit_ns);

  void set_recording(bool recording);
  const std::vector<TraceRow>& trace() const { return trace_; }

  // For tests: as if so many runs had been.
  void set_epoch(uint32_t epoch);

 private:
  struct Entry {
    const Kernel* kernel;
    const TVMFFIAny* arguments;
    int32_t argument_count;
    uint32_t first_wait;
    uint32_t wait_count;
  };

  // What every thread reads and nobody writes during a run, and the lease's two words, which only its holder writes.
  struct alignas(kLineBytes) Stream {
    const Entry* entries;
    uint32_t length;
    uint32_t base;                  // steps before this run
    std::atomic<uint32_t> owner{0};  // 1 + the thread that leases it; 0: nobody
    uint32_t finished;              // entries, in this run
  };

  struct Patch {
    TVMFFIAny* argument;
    uint64_t offset;
  };

  void BuildArguments(const Table& table, const std::vector<uint64_t>& first_argument);
  void BuildStreams(const Table& table, const std::vector<uint64_t>& first_argument);
  void SetPointers(void* const* pointers);
  static void Walk(void* self, int thread);
  bool Finish(uint32_t unit, int thread);
  bool Advance(uint32_t unit, uint32_t count, int thread);
  bool Await(uint32_t unit, uint32_t count, int thread);
  bool AwaitLong(uint32_t unit, uint32_t count, int thread);
  bool Call(uint32_t unit, const Entry& entry, int thread);
  bool Lease(Stream* stream, int thread);
  void GiveBack(uint32_t unit);
  bool Reached(uint32_t unit, uint32_t count, std::memory_order order) const;
  void Stop(Outcome outcome, void* error, std::string text);
  void StartRun();
  void Settle();
  std::string Describe() const;
  std::string DescribeEntry(uint32_t unit, uint32_t place) const;

  const Table& table_;
  std::vector<Kernel> kernels_;
  ErrorHooks hooks_;
  std::unique_ptr<char, void (*)(void*)> arena_;
  std::vector<TVMFFIAny> arguments_;  // of all entries, one after another
  std::vector<std::vector<Patch>> patches_;  // by argument of the run
  std::vector<void*> pointers_;              // that the last run was given
  std::vector<Entry> entries_;
  std::vector<WaitRow> waits_;
  std::vector<Stream> streams_;
  std::vector<WaitCell> steps_;
  std::vector<TraceRow> trace_;
  std::vector<uint32_t> first_entry_;  // of each unit, in trace_ and entries_
  bool recording_ = false;
  int threads_ = 1;
  int64_t limit_ns_ = -1;

  alignas(kLineBytes) std::atomic<bool> stopped_{false};
  std::atomic<bool> has_result_{false};
  Result result_;  // written by whoever sets has_result_
};

}  // namespace rammer
}  // namespace tvm_ext

#endif  // TVM_EXT_RAMMER_WALKER_H_
