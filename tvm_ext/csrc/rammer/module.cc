// The module `tvm_ext.rammer`: a table, and what it imports holds the kernels. It has one function, of the table's
// name, which takes the table's arguments as tensors and runs the schedule.

#include "module.h"

#include <tvm/ffi/cast.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cores.h"
#include "ending.h"
#include "table.h"
#include "team.h"
#include "walker.h"

namespace tvm_ext {
namespace rammer {
namespace {

namespace ffi = tvm::ffi;

constexpr const char* kKind = "tvm_ext.rammer";
constexpr const char* kTraceFunction = "tvm_ext.rammer.trace";
constexpr const char* kRecordFunction = "tvm_ext.rammer.record";

std::atomic<int64_t> wait_limit_ns{-1};
std::atomic<int> thread_limit{0};  // 0: as many as cores

const ErrorHooks kErrorHooks{TakeError, DropError};

std::string TextOf(const DLTensor& tensor) {
  std::string text;
  for (int i = 0; i < tensor.ndim; ++i) text += (i == 0 ? "" : "x") + std::to_string(tensor.shape[i]);
  return text + " of " + std::to_string(int{tensor.dtype.bits} * int{tensor.dtype.lanes}) + " bits each";
}

class RammerModuleObj final : public ffi::ModuleObj {
 public:
  RammerModuleObj(ffi::Bytes bytes, Table table) : bytes_(std::move(bytes)), table_(std::move(table)) {}

  const char* kind() const final { return kKind; }
  int GetPropertyMask() const final { return ffi::Module::kBinarySerializable | ffi::Module::kRunnable; }
  ffi::Bytes SaveToBytes() const final { return bytes_; }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    const ffi::Module self = ffi::GetRef<ffi::Module>(this);  // lives as long as its functions
    if (name == table_.name) {
      return ffi::Function::FromPacked(
          [this, self](ffi::PackedArgs arguments, ffi::Any*) { this->Run(arguments); });
    }
    if (name == kTraceFunction) return ffi::Function::FromTyped([this, self] { return this->Trace(); });
    if (name == kRecordFunction)
      return ffi::Function::FromTyped([this, self](bool on) { this->recording_.store(on); });
    return std::nullopt;
  }

 private:
  struct Slot {  // an instance, and room for a call's arguments
    std::unique_ptr<Instance> instance;
    std::vector<void*> pointers;
  };

  // A slot for the time of one run; also where that throws.
  class Lent {
   public:
    explicit Lent(RammerModuleObj* owner) : owner_(owner), slot_(owner->Take()) {}
    ~Lent() {
      if (slot_ != nullptr) owner_->GiveBack(std::move(slot_));
    }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    Slot* get() const { return slot_.get(); }
    Slot* operator->() const { return slot_.get(); }
    void Lose() { slot_.release(); }  // a thread may be in it for ever

   private:
    RammerModuleObj* owner_;
    std::unique_ptr<Slot> slot_;
  };

  void Run(ffi::PackedArgs arguments) {
    if (static_cast<std::size_t>(arguments.size()) != table_.arguments.size()) RefuseCount(arguments.size());
    const RunScope scope;
    Lent slot(this);
    for (std::size_t i = 0; i < table_.arguments.size(); ++i)
      slot->pointers[i] = PointerOf(i, arguments[static_cast<int>(i)].cast<DLTensor*>());
    const bool recording = recording_.load(std::memory_order_relaxed);
    slot->instance->set_recording(recording);
    Result result = RunOn(slot.get());
    if (result.outcome == Outcome::kLost) {
      KeepForEver(arguments);
      slot.Lose();
    } else if (recording) {
      const std::lock_guard<std::mutex> lock(mutex_);
      trace_ = slot->instance->trace();
    }
    if (result.outcome != Outcome::kDone) Raise(std::move(result));
  }

  Result RunOn(Slot* slot) const {
    const int limit = thread_limit.load(std::memory_order_relaxed);
    const int most = limit == 0 ? UsableCores() : limit;
    TeamLease lease(std::min(static_cast<int>(table_.streams.size()), most));
    return slot->instance->Run(slot->pointers.data(), &lease, wait_limit_ns.load(std::memory_order_relaxed));
  }

  [[noreturn]] void RefuseCount(int count) const {
    TVM_FFI_THROW(TypeError) << table_.name << " takes " << table_.arguments.size() << " tensors, and was given "
                             << count;
    TVM_FFI_UNREACHABLE();
  }

  void* PointerOf(std::size_t index, const DLTensor* tensor) const {
    const ArgumentRow& row = table_.arguments[index];
    const bool on_host = tensor->device.device_type == kDLCPU;
    const uint64_t bytes = ffi::GetDataSize(*tensor);
    void* const data = static_cast<char*>(tensor->data) + tensor->byte_offset;
    if (!on_host || !ffi::IsContiguous(*tensor) || bytes != row.bytes) {
      TVM_FFI_THROW(ValueError) << "argument " << index << " of " << table_.name << " must be " << row.bytes
                                << " contiguous bytes of the host's memory, and is " << TextOf(*tensor)
                                << (on_host ? "" : " on another device");
    }
    if (reinterpret_cast<uintptr_t>(data) % row.alignment != 0) {
      TVM_FFI_THROW(ValueError) << "argument " << index << " of " << table_.name << " must start at a multiple of "
                                << row.alignment << " bytes";
    }
    return data;
  }

  std::unique_ptr<Slot> Take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<Slot> slot = std::move(idle_.back());
        idle_.pop_back();
        return slot;
      }
      if (kernels_.empty()) FindKernels();
    }
    auto slot = std::make_unique<Slot>();
    slot->instance = std::make_unique<Instance>(table_, kernels_, kErrorHooks);
    slot->pointers.resize(table_.arguments.size());
    return slot;
  }

  void GiveBack(std::unique_ptr<Slot> slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(slot));
  }

  // A thread may go on using the tensors, the kernels and the table.
  void KeepForEver(ffi::PackedArgs arguments) {
    auto* const kept = new std::vector<ffi::Any>();
    for (int i = 0; i < arguments.size(); ++i) kept->push_back(ffi::Any(arguments[i]));
    kept->push_back(ffi::GetRef<ffi::Module>(this));
  }

  // Not when the module is made: a loader adds imports later.
  void FindKernels() {
    std::vector<Kernel> found;
    for (const KernelRow& row : table_.kernels) {
      ffi::Optional<ffi::Function> function = std::nullopt;
      for (const ffi::Any& item : imports()) {
        function = item.cast<ffi::Module>()->GetFunction(row.symbol, true);
        if (function.has_value()) break;
      }
      if (!function.has_value()) {
        TVM_FFI_THROW(RuntimeError) << "kernel " << row.symbol << " of " << table_.name
                                    << " is in none of the libraries that its module imports";
      }
      functions_.push_back(*function);
      auto* const object = const_cast<ffi::FunctionObj*>(static_cast<const ffi::FunctionObj*>((*function).get()));
      found.push_back(Kernel{object->safe_call, object});
    }
    kernels_ = std::move(found);
  }

  [[noreturn]] void Raise(Result result) const {
    if (result.outcome == Outcome::kFailed) RaiseTaken(result.error, result.text);
    TVM_FFI_THROW(RuntimeError) << table_.name << " made no progress in " << wait_limit_ns.load() / 1000000
                                << " ms:" << result.text;
    TVM_FFI_UNREACHABLE();
  }

  // Rows of 32 bytes, see TraceRow, of the last run that was recorded.
  ffi::Bytes Trace() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ffi::Bytes(reinterpret_cast<const char*>(trace_.data()), trace_.size() * sizeof(TraceRow));
  }

  const ffi::Bytes bytes_;
  const Table table_;
  std::mutex mutex_;  // of what follows
  std::vector<ffi::Function> functions_;
  std::vector<Kernel> kernels_;
  std::vector<std::unique_ptr<Slot>> idle_;
  std::vector<TraceRow> trace_;
  std::atomic<bool> recording_{false};
};

ffi::Module MakeModule(const ffi::Bytes& bytes) {
  try {
    return ffi::Module(ffi::make_object<RammerModuleObj>(bytes, ReadTable(bytes.data(), bytes.size())));
  } catch (const TableError& error) {
    TVM_FFI_THROW(ValueError) << "this schedule of rTasks cannot be used: " << error.what();
  }
  TVM_FFI_UNREACHABLE();
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  if (ffi::Function::GetGlobal("tvm_ext.rammer.load").has_value()) return;  // another copy of this library
  refl::GlobalDef()
      .def("tvm_ext.rammer.load", MakeModule)
      .def("ffi.Module.load_from_bytes.tvm_ext.rammer", MakeModule)
      .def("tvm_ext.rammer.hold_other_threads", HoldOtherThreads)
      .def("tvm_ext.rammer.set_wait_limit_ms",
           [](int64_t limit) { wait_limit_ns.store(limit < 0 ? -1 : limit * 1000000); })
      .def("tvm_ext.rammer.set_thread_limit", [](int limit) { thread_limit.store(limit); });
}

}  // namespace
}  // namespace rammer
}  // namespace tvm_ext
