#include "kernel.h"

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include "graph.h"

namespace tvm_ext::ort {
namespace {

namespace ffi = tvm::ffi;

constexpr size_t kAlignment = 64;  // kernels want tensors that start at a cache line

struct CacheLines {
  void AllocData(DLTensor* tensor) {
    tensor->data = std::aligned_alloc(kAlignment, (ffi::GetDataSize(*tensor) + kAlignment - 1) / kAlignment * kAlignment);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

// ONNXTensorElementDataType; those that no kernel takes have no name.
DLDataType TypeOf(int element) {
  static const char* const names[] = {"",      "float32", "uint8",   "int8",   "uint16", "int16", "int32", "int64",    "",
                                      "bool",  "float16", "float64", "uint32", "uint64", "",      "",      "bfloat16"};
  constexpr int count = sizeof(names) / sizeof(names[0]);
  if (element < 0 || element >= count || *names[element] == '\0') {
    throw Error("tensors of ONNX Runtime's element type " + std::to_string(element) + " cannot be given to kernels");
  }
  return ffi::StringToDLDataType(names[element]);
}

// LLVM's and Linux's names of a processor's features differ in their separators, and in these.
std::string Plain(std::string name) {
  static const std::map<std::string, std::string> others = {
      {"bmi1", "bmi"}, {"asimd", "neon"}, {"asimddp", "dotprod"}, {"asimdhp", "fullfp16"}};
  const auto other = others.find(name);
  if (other != others.end()) return other->second;
  name.erase(std::remove_if(name.begin(), name.end(), [](char c) { return c == '_' || c == '-' || c == '.'; }), name.end());
  return name;
}

// Throws where this processor lacks what code was compiled for: its instructions would end the process.
void CheckProcessor(const ffi::json::Object& signature, const std::string& path) {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> present;
  for (std::string line; present.empty() && std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) present.insert(Plain(word));
  }
  std::string missing;
  for (const ffi::Any& item : signature["cpu"].cast<ffi::json::Object>()["features"].cast<ffi::json::Array>()) {
    const std::string name = item.cast<ffi::String>();
    if (!present.empty() && present.count(Plain(name)) == 0) missing += (missing.empty() ? "" : ", ") + name;
  }
  if (!missing.empty()) throw Error(path + " cannot run on this processor, which lacks " + missing + ": compile it here");
}

}  // namespace

Kernel::Kernel(const Api& api) : api_(api) {
  CreateState = [](NodeComputeInfo* self, OrtNodeComputeContext*, void** state) -> OrtStatus* {
    *state = self;
    return nullptr;
  };
  Compute = [](NodeComputeInfo* self, void*, OrtKernelContext* context) -> OrtStatus* {
    auto* kernel = static_cast<Kernel*>(self);
    try {
      kernel->Run(context);
      return nullptr;
    } catch (const std::exception& error) {
      return kernel->api_.Status(error.what());
    }
  };
  ReleaseState = [](NodeComputeInfo*, void*) {};
}

Kernel::Kernel(const Api& api, ffi::Function prepare) : Kernel(api) { prepare_ = std::move(prepare); }

Kernel::Kernel(const Api& api, const std::string& path) : Kernel(api) {
  const ffi::Module library = ffi::Module::LoadFromFile(path);
  const auto metadata = library->GetFunction("tvm_ext_metadata", true);
  if (!metadata) throw Error(path + " was not written by tvm-ext compile");
  const auto signature = ffi::json::Parse((*metadata)().cast<ffi::String>()).cast<ffi::json::Object>();
  CheckProcessor(signature, path);
  Shapes key;
  for (const ffi::Any& item : signature["inputs"].cast<ffi::json::Array>()) {
    const auto spec = item.cast<ffi::json::Object>();
    const auto shape = spec["shape"].cast<ffi::json::Array>();
    key.push_back(static_cast<int64_t>(shape.size()));
    built_for_ += built_for_.empty() ? "" : ", ";
    for (size_t i = 0; i < shape.size(); ++i) {
      key.push_back(shape[i].cast<int64_t>());
      built_for_ += (i ? "x" : "") + std::to_string(key.back());
    }
    built_for_ += shape.empty() ? "scalar" : "";
  }
  const auto machine = (*library->GetFunction("vm_load_executable", true))().cast<ffi::Module>();
  constexpr int kPooled = 2;  // memory is kept between runs
  (*machine->GetFunction("vm_initialization"))(static_cast<int>(kDLCPU), 0, kPooled);
  variants_.emplace(std::move(key), *machine->GetFunction("main"));
}

void Kernel::Run(OrtKernelContext* context) {
  size_t count = 0;
  api_.Check(kContextInputCount, static_cast<const OrtKernelContext*>(context), &count);
  std::vector<ffi::Tensor> inputs;
  Shapes key;
  for (size_t i = 0; i < count; ++i) inputs.push_back(Input(context, i, &key));
  const std::vector<ffi::AnyView> arguments(inputs.begin(), inputs.end());

  const std::lock_guard<std::mutex> alone(mutex_);
  ffi::Any result;
  Variant(key, inputs).CallPacked(arguments.data(), static_cast<int>(arguments.size()), &result);
  if (const auto single = result.try_cast<ffi::Tensor>()) {
    Output(context, 0, *single);
    return;
  }
  const auto several = result.cast<ffi::Array<ffi::Tensor>>();
  for (size_t i = 0; i < several.size(); ++i) Output(context, i, several[i]);
}

const ffi::Function& Kernel::Variant(const Shapes& key, const std::vector<ffi::Tensor>& inputs) {
  const auto known = variants_.find(key);
  if (known != variants_.end()) return known->second;
  if (prepare_ == nullptr) throw Error("the model was compiled ahead for inputs of shape " + built_for_ + " alone");
  ffi::Array<ffi::Shape> shapes;
  for (const ffi::Tensor& input : inputs) shapes.push_back(ffi::Shape(input.shape()));
  constexpr size_t kMost = 16;  // as a session keeps; which of them goes does not matter: Python has it, or makes it
  if (variants_.size() >= kMost) variants_.erase(variants_.begin());
  return variants_.emplace(key, prepare_(shapes).cast<ffi::Function>()).first->second;
}

ffi::Tensor Kernel::Input(OrtKernelContext* context, size_t index, Shapes* key) const {
  const OrtValue* value = nullptr;
  api_.Check(kContextInput, static_cast<const OrtKernelContext*>(context), index, &value);
  if (value == nullptr) throw Error("input " + std::to_string(index) + " has no value");
  const TensorInfo info(api_, value);
  const void* data = nullptr;
  api_.Check(kTensorData, value, &data);
  key->push_back(static_cast<int64_t>(info.sizes.size()));
  key->insert(key->end(), info.sizes.begin(), info.sizes.end());
  const ffi::ShapeView shape(info.sizes.data(), info.sizes.size());
  const DLDataType dtype = TypeOf(info.element);
  if (reinterpret_cast<uintptr_t>(data) % kAlignment == 0) return Borrowed(data, shape, dtype);
  ffi::Tensor copy = ffi::Tensor::FromNDAlloc(CacheLines(), shape, dtype, DLDevice{kDLCPU, 0});
  std::memcpy(copy.data_ptr(), data, ffi::GetDataSize(copy));
  return copy;
}

void Kernel::Output(OrtKernelContext* context, size_t index, const ffi::Tensor& tensor) const {
  OrtValue* value = nullptr;
  void* data = nullptr;
  const ffi::ShapeView shape = tensor.shape();
  api_.Check(kContextOutput, context, index, shape.data(), shape.size(), &value);
  if (value == nullptr) return;  // nobody reads it
  api_.Check(kGetTensorMutableData, value, &data);
  std::memcpy(data, tensor.data_ptr(), ffi::GetDataSize(tensor));
}

}  // namespace tvm_ext::ort
