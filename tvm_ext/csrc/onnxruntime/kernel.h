// A compiled part of a model, run on ONNX Runtime's tensors.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "api.h"

namespace tvm_ext::ort {

class Kernel : public NodeComputeInfo {
 public:
  // `prepare` gives the function of tensors for the shapes of all inputs, each an array of sizes.
  Kernel(const Api& api, tvm::ffi::Function prepare);
  // The library at `path`, which Library.export_library wrote, for the shapes that it was built for.
  Kernel(const Api& api, const std::string& path);

 private:
  using Shapes = std::vector<int64_t>;  // of all inputs, the rank before each

  explicit Kernel(const Api& api);
  void Run(OrtKernelContext* context);
  const tvm::ffi::Function& Variant(const Shapes& key, const std::vector<tvm::ffi::Tensor>& inputs);
  tvm::ffi::Tensor Input(OrtKernelContext* context, size_t index, Shapes* key) const;
  void Output(OrtKernelContext* context, size_t index, const tvm::ffi::Tensor& tensor) const;

  const Api& api_;
  std::mutex mutex_;  // a VirtualMachine runs one call at a time
  tvm::ffi::Function prepare_;
  std::map<Shapes, tvm::ffi::Function> variants_;
  std::string built_for_;
};

}  // namespace tvm_ext::ort
