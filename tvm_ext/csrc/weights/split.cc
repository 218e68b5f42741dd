// Takes the large tensors out of an executable that is to be exported.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/runtime/base.h>  // before what follows, which needs it
#include <tvm/runtime/vm/executable.h>

#include "form.h"

namespace ffi = tvm::ffi;
using tvm::runtime::vm::VMExecutable;

namespace tvm_ext::weights {
namespace {

// The executable with places instead of tensors of `smallest` bytes or more, at multiples of `alignment`; the number of
// its constants; and the tensors in their order. The argument stays as it is.
ffi::Array<ffi::Any> Split(const ffi::Module& module, int64_t smallest, int64_t alignment) {
  const auto* executable = static_cast<const VMExecutable*>(module.get());
  auto left = ffi::make_object<VMExecutable>();
  left->func_table = executable->func_table;
  left->func_map = executable->func_map;
  left->memory_scopes = executable->memory_scopes;
  left->instr_offset = executable->instr_offset;
  left->instr_data = executable->instr_data;
  ffi::Array<ffi::Tensor> tensors;
  int64_t offset = 0;
  for (const ffi::Any& constant : executable->constants) {
    const auto tensor = constant.try_cast<ffi::Tensor>();
    const int64_t size = tensor ? static_cast<int64_t>(ffi::GetDataSize(*tensor)) : 0;
    if (!tensor || size < smallest || tensor->device().device_type != kDLCPU || !tensor->IsContiguous()) {
      left->constants.push_back(constant);
      continue;
    }
    const DLDataType dtype = tensor->dtype();
    std::vector<int64_t> place{kPlace, offset, dtype.code, dtype.bits, dtype.lanes};
    place.insert(place.end(), tensor->shape().begin(), tensor->shape().end());
    left->constants.push_back(ffi::Shape(place));
    tensors.push_back(*tensor);
    offset = (offset + size + alignment - 1) / alignment * alignment;
  }
  const auto count = static_cast<int64_t>(left->constants.size());
  ffi::Module rest(left);
  for (const ffi::Any& imported : executable->imports()) rest->ImportModule(imported.cast<ffi::Module>());
  return {rest, count, tensors};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() { ffi::reflection::GlobalDef().def("tvm_ext.weights.split", Split); }

}  // namespace tvm_ext::weights
