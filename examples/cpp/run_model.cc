// Runs a library that `tvm-ext compile` wrote, without Python: raw row-major files in, raw files out, and the time.
//
//   run_model model.so x.bin y.bin      first the inputs, then the outputs, each in the model's order
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;

struct CacheLines {  // kernels want tensors that start at one
  void AllocData(DLTensor* tensor) {
    tensor->data = std::aligned_alloc(64, (ffi::GetDataSize(*tensor) + 63) / 64 * 64);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor ReadTensor(const ffi::json::Object& spec, const char* path) {
  std::vector<int64_t> shape;
  for (const ffi::Any& size : spec["shape"].cast<ffi::json::Array>()) shape.push_back(size.cast<int64_t>());
  const DLDataType dtype = ffi::StringToDLDataType(spec["dtype"].cast<ffi::String>());
  ffi::Tensor tensor = ffi::Tensor::FromNDAlloc(CacheLines(), ffi::ShapeView(shape.data(), shape.size()), dtype,
                                                DLDevice{kDLCPU, 0});
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto expected = static_cast<std::streamsize>(ffi::GetDataSize(tensor));
  if (!file || file.tellg() != expected) {
    throw std::runtime_error(std::string(path) + " should hold " + std::to_string(expected) + " bytes");
  }
  file.seekg(0).read(static_cast<char*>(tensor.data_ptr()), expected);
  return tensor;
}

void WriteTensor(const ffi::Tensor& tensor, const char* path) {
  const auto bytes = static_cast<std::streamsize>(ffi::GetDataSize(tensor));
  if (!std::ofstream(path, std::ios::binary).write(static_cast<const char*>(tensor.data_ptr()), bytes)) {
    throw std::runtime_error(std::string("cannot write ") + path);
  }
}

int Run(const std::vector<const char*>& paths) {
  const ffi::Module library = ffi::Module::LoadFromFile(std::filesystem::absolute(paths[0]).string());
  const auto text = (*library->GetFunction("tvm_ext_metadata", true))().cast<ffi::String>();
  const auto signature = ffi::json::Parse(text).cast<ffi::json::Object>();
  const auto inputs = signature["inputs"].cast<ffi::json::Array>();
  const auto outputs = signature["outputs"].cast<ffi::json::Array>();
  if (paths.size() != 1 + inputs.size() + outputs.size()) {
    std::cerr << paths[0] << " has " << inputs.size() << " inputs and " << outputs.size() << " outputs\n";
    return 2;
  }

  const auto machine = (*library->GetFunction("vm_load_executable", true))().cast<ffi::Module>();
  constexpr int kPooled = 2;  // memory is kept between runs
  (*machine->GetFunction("vm_initialization"))(static_cast<int>(kDLCPU), 0, kPooled);
  const ffi::Function main = *machine->GetFunction("main");

  std::vector<ffi::Any> values;
  for (size_t i = 0; i < inputs.size(); ++i) {
    values.emplace_back(ReadTensor(inputs[i].cast<ffi::json::Object>(), paths[1 + i]));
  }
  const std::vector<ffi::AnyView> arguments(values.begin(), values.end());
  ffi::Any result;
  std::vector<double> milliseconds;
  for (int run = 0; run < 11; ++run) {
    const auto start = std::chrono::steady_clock::now();
    main.CallPacked(arguments.data(), static_cast<int>(arguments.size()), &result);
    milliseconds.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(milliseconds.begin(), milliseconds.begin() + 5, milliseconds.end());
  std::cout << "median of 11 runs: " << milliseconds[5] << " ms\n";

  const auto several = result.try_cast<ffi::Array<ffi::Tensor>>();
  for (size_t i = 0; i < outputs.size(); ++i) {
    WriteTensor(several ? (*several)[i] : result.cast<ffi::Tensor>(), paths[1 + inputs.size() + i]);
  }
  return 0;
}

int main(int count, char** arguments) {
  try {
    if (count > 1) return Run(std::vector<const char*>(arguments + 1, arguments + count));
    std::cerr << "usage: run_model LIBRARY INPUT... OUTPUT...\n";
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
  }
  return 2;
}
