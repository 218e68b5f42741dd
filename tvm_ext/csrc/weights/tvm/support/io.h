// Stands in for TVM's header of this name, which its wheel lacks and `tvm/runtime/vm/executable.h` includes: names alone.
#pragma once
namespace tvm::support {
class Stream;
template <typename T>
struct Serializer;
}  // namespace tvm::support
