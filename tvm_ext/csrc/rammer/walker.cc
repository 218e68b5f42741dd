#include "walker.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace tvm_ext {
namespace rammer {
namespace {

// A hand-off between running threads takes 0.1 to 0.3 us; a waiter that has paused so often looks for streams to walk.
constexpr int kPausesBeforeHelp = 64;
constexpr Patience kStepPatience = Patiently({200, 300000});

// Mutants are built by defining it otherwise.
#ifndef RAMMER_EPOCH_ERROR
#define RAMMER_EPOCH_ERROR 0
#endif

char* Allocate(uint64_t bytes) {
  const uint64_t rounded = (bytes + kArenaAlignment) / kArenaAlignment * kArenaAlignment;  // never 0
  void* memory = std::aligned_alloc(kArenaAlignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<char*>(memory);
}

TVMFFIAny PointerArgument(void* pointer) {
  TVMFFIAny value{};
  value.type_index = kTVMFFIOpaquePtr;
  value.v_ptr = pointer;
  return value;
}

TVMFFIAny IntegerArgument(int64_t number) {
  TVMFFIAny value{};
  value.type_index = kTVMFFIInt;
  value.v_int64 = number;
  return value;
}

}  // namespace

Instance::Instance(const Table& table, const std::vector<Kernel>& kernels, const ErrorHooks& hooks)
    : table_(table),
      kernels_(kernels),
      hooks_(hooks),
      arena_(Allocate(table.arena_bytes), std::free),
      patches_(table.arguments.size()),
      pointers_(table.arguments.size(), nullptr),
      streams_(table.streams.size()),
      steps_(table.streams.size()) {
  std::vector<uint64_t> first_argument;  // of each entry, in stream order
  uint64_t count = 0;
  for (const auto& stream : table.streams) {
    first_entry_.push_back(static_cast<uint32_t>(first_argument.size()));
    for (const EntryRow& row : stream) {
      first_argument.push_back(count);
      count += table.calls[row.call].buffers.size() + 2;
    }
  }
  arguments_.resize(count);
  BuildArguments(table, first_argument);
  BuildStreams(table, first_argument);
}

void Instance::BuildArguments(const Table& table, const std::vector<uint64_t>& first_argument) {
  std::size_t place = 0;
  for (const auto& stream : table.streams) {
    for (const EntryRow& row : stream) {
      TVMFFIAny* out = &arguments_[first_argument[place++]];
      for (const uint32_t index : table.calls[row.call].buffers) {
        const BufferRow& buffer = table.buffers[index];
        *out = PointerArgument(buffer.argument == kArena ? arena_.get() + buffer.offset : nullptr);
        if (buffer.argument != kArena) patches_[buffer.argument].push_back({out, buffer.offset});
        ++out;
      }
      *out++ = IntegerArgument(row.begin);
      *out = IntegerArgument(row.end);
    }
  }
}

void Instance::BuildStreams(const Table& table, const std::vector<uint64_t>& first_argument) {
  entries_.resize(first_argument.size());
  std::size_t place = 0;
  for (std::size_t unit = 0; unit < streams_.size(); ++unit) {
    Stream& stream = streams_[unit];
    stream.entries = entries_.data() + place;
    stream.length = static_cast<uint32_t>(table.streams[unit].size());
    stream.base = stream.finished = 0;
    for (const EntryRow& row : table.streams[unit]) {
      const CallRow& call = table.calls[row.call];
      Entry& entry = entries_[place];
      entry.kernel = &kernels_[call.kernel];
      entry.arguments = &arguments_[first_argument[place]];
      entry.argument_count = static_cast<int32_t>(call.buffers.size()) + 2;
      entry.first_wait = static_cast<uint32_t>(waits_.size());
      entry.wait_count = static_cast<uint32_t>(row.waits.size());
      waits_.insert(waits_.end(), row.waits.begin(), row.waits.end());
      ++place;
    }
  }
}

void Instance::set_recording(bool recording) {
  recording_ = recording;
  if (recording) trace_.assign(entries_.size(), TraceRow{});
}

void Instance::set_epoch(uint32_t epoch) {
  for (std::size_t unit = 0; unit < streams_.size(); ++unit) {
    streams_[unit].base = epoch * streams_[unit].length;
    steps_[unit].value.store(streams_[unit].base, std::memory_order_relaxed);
  }
}

void Instance::SetPointers(void* const* pointers) {
  for (std::size_t i = 0; i < pointers_.size(); ++i) {
    if (pointers[i] == pointers_[i]) continue;
    pointers_[i] = pointers[i];
    for (const Patch& patch : patches_[i]) patch.argument->v_ptr = static_cast<char*>(pointers[i]) + patch.offset;
  }
}

void Instance::StartRun() {
  for (std::size_t unit = 0; unit < streams_.size(); ++unit) {
    streams_[unit].base = steps_[unit].value.load(std::memory_order_relaxed);
    streams_[unit].finished = 0;
  }
}

Result Instance::Run(void* const* pointers, TeamLease* lease, int64_t limit_ns) {
  SetPointers(pointers);
  StartRun();
  threads_ = lease->threads();
  limit_ns_ = limit_ns;
  if (!lease->Run(Walk, this, false, limit_ns)) {
    Result lost;
    lost.outcome = Outcome::kLost;
    lost.text = Describe();
    return lost;
  }
  if (!stopped_.load(std::memory_order_relaxed)) return Result();
  Settle();
  return std::exchange(result_, Result());
}

// After a run that was stopped, when no other thread is in it: as if it had been whole.
void Instance::Settle() {
  for (std::size_t unit = 0; unit < streams_.size(); ++unit) {
    const Stream& stream = streams_[unit];
    steps_[unit].value.store(stream.base + stream.length, std::memory_order_relaxed);
  }
  stopped_.store(false, std::memory_order_relaxed);
  has_result_.store(false, std::memory_order_relaxed);
}

void Instance::Walk(void* argument, int thread) {
  Instance* const self = static_cast<Instance*>(argument);
  const uint32_t units = static_cast<uint32_t>(self->streams_.size());
  for (uint32_t unit = static_cast<uint32_t>(thread); unit < units; unit += static_cast<uint32_t>(self->threads_))
    if (!self->Finish(unit, thread)) return;
  if (thread != 0) return;
  for (uint32_t unit = 0; unit < units; ++unit)
    if (!self->Finish(unit, thread)) return;
}

bool Instance::Finish(uint32_t unit, int thread) {
  const uint32_t length = streams_[unit].length;
  if (Lease(&streams_[unit], thread)) {
    const bool went_on = Advance(unit, length, thread);
    GiveBack(unit);
    return went_on;
  }
  return Await(unit, length, thread);
}

// Walk the leased stream until `count` of its entries have finished. False where the run was stopped.
bool Instance::Advance(uint32_t unit, uint32_t count, int thread) {
  Stream& stream = streams_[unit];
  while (stream.finished < count) {
    const Entry& entry = stream.entries[stream.finished];
    const WaitRow* wait = waits_.data() + entry.first_wait;
    for (const WaitRow* end = wait + entry.wait_count; wait != end; ++wait)
      if (!Await(wait->unit, wait->count, thread)) return false;
    if (stopped_.load(std::memory_order_relaxed)) return false;
    if (!Call(unit, entry, thread)) return false;
    ++stream.finished;
    steps_[unit].Publish(stream.base + stream.finished);
  }
  return true;
}

bool Instance::Call(uint32_t unit, const Entry& entry, int thread) {
  TraceRow* row = nullptr;
  if (recording_) {
    const uint32_t place = streams_[unit].finished;
    row = &trace_[first_entry_[unit] + place];
    *row = {unit, place, static_cast<uint32_t>(thread), 0, NowNs(), 0};
  }
  TVMFFIAny result{};
  result.type_index = kTVMFFINone;
  const int code = entry.kernel->call(entry.kernel->self, entry.arguments, entry.argument_count, &result);
  if (row != nullptr) row->end_ns = NowNs();
  if (code == 0) return true;
  Stop(Outcome::kFailed, hooks_.take(), DescribeEntry(unit, streams_[unit].finished));
  return false;
}

bool Instance::Reached(uint32_t unit, uint32_t count, std::memory_order order) const {
  const uint32_t step = steps_[unit].value.load(order);
  return static_cast<int32_t>(step - (streams_[unit].base + count + RAMMER_EPOCH_ERROR)) >= 0;
}

bool Instance::Await(uint32_t unit, uint32_t count, int thread) {
  return Reached(unit, count, kObserve) || AwaitLong(unit, count, thread);
}

bool Instance::AwaitLong(uint32_t unit, uint32_t count, int thread) {
  Stream& stream = streams_[unit];
  for (int i = 0; i < kPausesBeforeHelp; ++i) {
    if (Reached(unit, count, kObserve)) return true;
    Pause();
  }
  const auto may_go_on = [this, unit, count, &stream](std::memory_order order) {
    return Reached(unit, count, order) || stream.owner.load(order) == 0 || stopped_.load(order);
  };
  while (!Reached(unit, count, kObserve)) {
    if (stopped_.load(std::memory_order_acquire)) return false;
    if (Lease(&stream, thread)) {
      const bool went_on = Advance(unit, count, thread);
      GiveBack(unit);
      if (!went_on) return false;
      continue;
    }
    if (steps_[unit].Wait(may_go_on, kStepPatience, limit_ns_ < 0 ? -1 : NowNs() + limit_ns_)) continue;
    Stop(Outcome::kTimedOut, nullptr, Describe());
    return false;
  }
  return true;
}

bool Instance::Lease(Stream* stream, int thread) {
  uint32_t nobody = 0;
  return stream->owner.load(std::memory_order_relaxed) == 0 &&
         stream->owner.compare_exchange_strong(nobody, static_cast<uint32_t>(thread) + 1, std::memory_order_acquire,
                                               std::memory_order_relaxed);
}

// Whoever waits for more of the stream than has been walked is woken: it may have to go on with it.
void Instance::GiveBack(uint32_t unit) {
  streams_[unit].owner.store(0, kPublish);
  steps_[unit].WakeParked();
}

void Instance::Stop(Outcome outcome, void* error, std::string text) {
  if (has_result_.exchange(true, std::memory_order_acq_rel)) {
    if (error != nullptr) hooks_.drop(error);
  } else {
    result_.outcome = outcome;
    result_.error = error;
    result_.text = std::move(text);
  }
  stopped_.store(true, kPublish);
  for (WaitCell& step : steps_) step.WakeParked();
}

std::string Instance::DescribeEntry(uint32_t unit, uint32_t place) const {
  const EntryRow& row = table_.streams[unit][place];
  const CallRow& call = table_.calls[row.call];
  return "entry " + std::to_string(place) + " of vEU " + std::to_string(unit) + " (" + call.name + ", kernel " +
         table_.kernels[call.kernel].symbol + ", rTasks " + std::to_string(row.begin) + ".." +
         std::to_string(row.end - 1) + ")";
}

// Each unit that has not finished, with what it waits for. Other threads may be moving: a snapshot.
std::string Instance::Describe() const {
  std::string text;
  for (uint32_t unit = 0; unit < streams_.size(); ++unit) {
    const uint32_t place = steps_[unit].value.load(std::memory_order_acquire) - streams_[unit].base;
    if (place >= streams_[unit].length) continue;
    const uint32_t owner = streams_[unit].owner.load(std::memory_order_relaxed);
    text += "\n  vEU " + std::to_string(unit) + ", " + std::to_string(place) + " of " +
            std::to_string(streams_[unit].length) + " entries finished, " +
            (owner == 0 ? std::string("walked by no thread") : "walked by thread " + std::to_string(owner - 1)) +
            ": " + DescribeEntry(unit, place);
    bool waits = false;
    for (const WaitRow& wait : table_.streams[unit][place].waits) {
      if (Reached(wait.unit, wait.count, std::memory_order_acquire)) continue;
      waits = true;
      text += ", waits for entry " + std::to_string(wait.count - 1) + " of vEU " + std::to_string(wait.unit);
    }
    if (!waits) text += ", is running or about to";
  }
  return text;
}

}  // namespace rammer
}  // namespace tvm_ext
