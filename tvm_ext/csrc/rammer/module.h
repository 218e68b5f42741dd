// What the parts of the native library that know tvm-ffi share.
#ifndef TVM_EXT_RAMMER_MODULE_H_
#define TVM_EXT_RAMMER_MODULE_H_

#include <string>

namespace tvm_ext {
namespace rammer {

// `ErrorHooks`: the error that a safe call put aside in this thread, owned by the caller from now on.
void* TakeError();
void DropError(void* error);

// Throws the error that TakeError gave, with a line on where it came from.
[[noreturn]] void RaiseTaken(void* error, const std::string& where);

}  // namespace rammer
}  // namespace tvm_ext

#endif  // TVM_EXT_RAMMER_MODULE_H_
