// A graph of ONNX Runtime's as values of tvm-ffi, from which Python makes an ONNX model.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>

#include <string>
#include <vector>

#include "api.h"

namespace tvm_ext::ort {

using Description = tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Any>;

// A tensor over memory of somebody else, who keeps it for as long as the tensor is used.
tvm::ffi::Tensor Borrowed(const void* data, tvm::ffi::ShapeView shape, DLDataType dtype);

// What ONNX Runtime says of a tensor: its ONNXTensorElementDataType, and its sizes (-1 or 0 for an open one), where it
// has a rank. ONNX Runtime 1.23 does not tell a scalar from a tensor of any rank: it is the latter.
struct TensorInfo {
  TensorInfo(const Api& api, const OrtTensorTypeAndShapeInfo* info);
  TensorInfo(const Api& api, const OrtValue* value);

  int element = 0;
  bool ranked = true;
  std::vector<int64_t> sizes;
};

class Graph {
 public:
  Graph(const Api& api, const OrtGraph* graph) : api_(api), graph_(graph) {}

  std::vector<const OrtNode*> Nodes() const;
  bool IsNested() const;
  std::string ModelPath() const;  // empty where the model was no file

  // "nodes": each [operator, domain, name, inputs, outputs, attributes, subgraphs], the last described like this graph,
  // by the name of their attribute;
  // "inputs", "outputs": each [name, element type, dimensions (0 for an open one; null without a rank)], or the name
  // and zero for what is no tensor;
  // "initializers": each [name, element type, dimensions, bytes]; "opsets": each [domain, version].
  // Inputs and outputs are those of `fused`, or the graph's own. Bytes are ONNX Runtime's own, valid during the call.
  Description Describe(const OrtNode* fused) const;

  // Attribute `name` of `node` by value, an integer or a string; null where it has none.
  tvm::ffi::Any AttributeOf(const OrtNode* node, const std::string& name) const;
  std::string OperatorOf(const OrtNode* node) const;

 private:
  tvm::ffi::Any Node(const OrtNode* node) const;
  tvm::ffi::Any Attribute(const OrtOpAttr* attribute) const;
  tvm::ffi::Any Value(const OrtValueInfo* value) const;
  tvm::ffi::Array<tvm::ffi::Any> Tensor(const std::string& name, const OrtValue* value) const;
  std::string NameOf(const OrtValueInfo* value) const;
  std::vector<const OrtOpAttr*> AttributesOf(const OrtNode* node) const;

  const Api& api_;
  const OrtGraph* graph_;
};

}  // namespace tvm_ext::ort
