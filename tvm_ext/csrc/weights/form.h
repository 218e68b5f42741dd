// The form of weights behind a library's code, which tvm_ext/support/weights.py describes and writes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tvm_ext::weights {

constexpr char kMark[] = "\ntvm_ext weights ";
constexpr char kHere[] = "here";

// In place of a tensor an executable has a shape: this number, offset in bytes, three of the data type, the extents.
constexpr int64_t kPlace = 0x77656967687473;
constexpr size_t kPlaceSize = 5;

}  // namespace tvm_ext::weights
