#include "graph.h"

#include <cstring>
#include <memory>

namespace tvm_ext::ort {
namespace {

namespace ffi = tvm::ffi;
using Values = ffi::Array<ffi::Any>;

struct Lent {
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};

}  // namespace

ffi::Tensor Borrowed(const void* data, ffi::ShapeView shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(Lent{const_cast<void*>(data)}, shape, dtype, DLDevice{kDLCPU, 0});
}

TensorInfo::TensorInfo(const Api& api, const OrtTensorTypeAndShapeInfo* info) {
  size_t rank = 0;
  api.Check(kGetTensorElementType, info, &element);
  api.Check(kGetDimensionsCount, info, &rank);
  sizes.resize(rank);
  if (rank != 0) api.Check(kGetDimensions, info, sizes.data(), rank);
  constexpr int kFirstWithHasShape = 24;
  ranked = rank != 0 || (api.release >= kFirstWithHasShape && api.Call(kHasShape, info));
}

static auto Owned(const Api& api, const OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  api.Check(kGetTensorTypeAndShape, value, &info);
  const auto release = [&api](OrtTensorTypeAndShapeInfo* owned) { api.Call(kReleaseTensorInfo, owned); };
  return std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)>(info, release);
}

TensorInfo::TensorInfo(const Api& api, const OrtValue* value) : TensorInfo(api, Owned(api, value).get()) {}

template <size_t a, size_t b, typename Owner, typename Item>
static std::vector<const Item*> ListOf(const Api& api, Entry<a, OrtStatus*(const Owner*, size_t*)> count,
                                       Entry<b, OrtStatus*(const Owner*, const Item**, size_t)> items,
                                       const Owner* owner) {
  size_t size = 0;
  api.Check(count, owner, &size);
  std::vector<const Item*> list(size);
  if (size != 0) api.Check(items, owner, list.data(), size);
  return list;
}

std::vector<const OrtNode*> Graph::Nodes() const { return ListOf(api_, kGraphNodeCount, kGraphNodes, graph_); }

bool Graph::IsNested() const {
  const OrtNode* parent = nullptr;
  api_.Check(kGraphParentNode, graph_, &parent);
  return parent != nullptr;
}

std::string Graph::ModelPath() const {
  const char* path = nullptr;
  api_.Check(kGraphModelPath, graph_, &path);
  return path == nullptr ? "" : path;
}

std::string Graph::NameOf(const OrtValueInfo* value) const {
  if (value == nullptr) return "";  // an optional input that is left out
  const char* name = nullptr;
  api_.Check(kValueName, value, &name);
  return name;
}

std::string Graph::OperatorOf(const OrtNode* node) const {
  const char *name = nullptr, *domain = nullptr;
  api_.Check(kNodeOperator, node, &name);
  api_.Check(kNodeDomain, node, &domain);
  return (*domain == '\0' ? "" : std::string(domain) + ".") + name;
}

std::vector<const OrtOpAttr*> Graph::AttributesOf(const OrtNode* node) const {
  return ListOf(api_, kNodeAttributeCount, kNodeAttributes, node);
}

Description Graph::Describe(const OrtNode* fused) const {
  Values nodes, inputs, outputs, initializers, opsets;
  for (const OrtNode* node : Nodes()) nodes.push_back(Node(node));
  const auto ins = fused ? ListOf(api_, kNodeInputCount, kNodeInputs, fused)
                         : ListOf(api_, kGraphInputCount, kGraphInputs, graph_);
  const auto outs = fused ? ListOf(api_, kNodeOutputCount, kNodeOutputs, fused)
                          : ListOf(api_, kGraphOutputCount, kGraphOutputs, graph_);
  for (const OrtValueInfo* value : ins) inputs.push_back(Value(value));
  for (const OrtValueInfo* value : outs) outputs.push_back(Value(value));
  for (const OrtValueInfo* value : ListOf(api_, kGraphInitializerCount, kGraphInitializers, graph_)) {
    const OrtValue* constant = nullptr;
    api_.Check(kInitializerValue, value, &constant);
    if (constant != nullptr) initializers.push_back(Tensor(NameOf(value), constant));
  }
  size_t count = 0;
  api_.Check(kGraphOperatorSetCount, graph_, &count);
  std::vector<const char*> domains(count);
  std::vector<int64_t> versions(count);
  if (count != 0) api_.Check(kGraphOperatorSets, graph_, domains.data(), versions.data(), count);
  for (size_t i = 0; i < count; ++i) opsets.push_back(Values{ffi::String(domains[i]), versions[i]});
  return {{"nodes", nodes}, {"inputs", inputs}, {"outputs", outputs}, {"initializers", initializers},
          {"opsets", opsets}};
}

ffi::Any Graph::Node(const OrtNode* node) const {
  const char *op = nullptr, *domain = nullptr, *name = nullptr;
  api_.Check(kNodeOperator, node, &op);
  api_.Check(kNodeDomain, node, &domain);
  api_.Check(kNodeName, node, &name);
  Values inputs, outputs;
  for (const OrtValueInfo* value : ListOf(api_, kNodeInputCount, kNodeInputs, node)) inputs.push_back(ffi::String(NameOf(value)));
  for (const OrtValueInfo* value : ListOf(api_, kNodeOutputCount, kNodeOutputs, node)) outputs.push_back(ffi::String(NameOf(value)));
  ffi::Map<ffi::String, ffi::Any> attributes, graphs;
  for (const OrtOpAttr* attribute : AttributesOf(node)) {
    const char* key = nullptr;
    api_.Check(kAttributeName, attribute, &key);
    attributes.Set(key, Attribute(attribute));
  }
  size_t count = 0;
  api_.Check(kNodeSubgraphCount, node, &count);
  std::vector<const OrtGraph*> subgraphs(count);
  std::vector<const char*> keys(count);
  if (count != 0) api_.Check(kNodeSubgraphs, node, subgraphs.data(), count, keys.data());
  for (size_t i = 0; i < count; ++i) graphs.Set(keys[i], Graph(api_, subgraphs[i]).Describe(nullptr));
  return Values{ffi::String(op), ffi::String(domain), ffi::String(name), inputs, outputs, attributes, graphs};
}

ffi::Any Graph::AttributeOf(const OrtNode* node, const std::string& name) const {
  for (const OrtOpAttr* attribute : AttributesOf(node)) {
    const char* key = nullptr;
    api_.Check(kAttributeName, attribute, &key);
    if (name == key) return Attribute(attribute);
  }
  return nullptr;
}

// Integers, floats and strings, or arrays of them; tensors as initializers are; null for what is none of these.
ffi::Any Graph::Attribute(const OrtOpAttr* attribute) const {
  int number = 0;
  api_.Check(kAttributeType, attribute, &number);
  const auto type = static_cast<ort::Attribute>(number);
  if (type == ort::Attribute::kTensor) {
    OrtValue* value = nullptr;
    api_.Check(kAttributeTensor, attribute, &value);
    const auto release = [this](OrtValue* owned) { api_.Call(kReleaseValue, owned); };
    const std::unique_ptr<OrtValue, decltype(release)> owned(value, release);
    Values tensor = Tensor("", value);
    const auto lent = tensor[3].cast<ffi::Tensor>();  // the memory goes with `owned`
    tensor.Set(3, ffi::Bytes(static_cast<const char*>(lent.data_ptr()), ffi::GetDataSize(lent)));
    return tensor;
  }
  if (type == ort::Attribute::kGraph || type == ort::Attribute::kUndefined) return nullptr;

  size_t size = 0;  // in bytes; asking with no room gives a status beside it
  OrtStatus* status = api_.Call(kReadAttribute, attribute, number, static_cast<void*>(nullptr), size_t{0}, &size);
  if (status != nullptr) api_.Call(kReleaseStatus, status);
  std::vector<char> bytes(size + 1);
  if (size != 0) api_.Check(kReadAttribute, attribute, number, static_cast<void*>(bytes.data()), size, &size);
  const auto* integers = reinterpret_cast<const int64_t*>(bytes.data());
  const auto* floats = reinterpret_cast<const float*>(bytes.data());
  Values list;
  switch (type) {
    case ort::Attribute::kInt:
      return *integers;
    case ort::Attribute::kFloat:
      return static_cast<double>(*floats);
    case ort::Attribute::kString:
      return ffi::Bytes(bytes.data(), size);
    case ort::Attribute::kInts:
      for (size_t i = 0; i < size / sizeof(int64_t); ++i) list.push_back(integers[i]);
      return Values{ffi::String("ints"), list};
    case ort::Attribute::kFloats:
      for (size_t i = 0; i < size / sizeof(float); ++i) list.push_back(static_cast<double>(floats[i]));
      return Values{ffi::String("floats"), list};
    default:  // strings, each with a zero behind it
      for (size_t i = 0; i < size; i += std::strlen(&bytes[i]) + 1) list.push_back(ffi::String(&bytes[i]));
      return Values{ffi::String("strings"), list};
  }
}

ffi::Any Graph::Value(const OrtValueInfo* value) const {
  const OrtTypeInfo* type = nullptr;
  const OrtTensorTypeAndShapeInfo* info = nullptr;
  api_.Check(kValueType, value, &type);
  if (type != nullptr) api_.Check(kCastTypeInfoToTensorInfo, type, &info);
  if (info == nullptr) return Values{ffi::String(NameOf(value)), 0, nullptr};
  const TensorInfo tensor(api_, info);
  if (!tensor.ranked) return Values{ffi::String(NameOf(value)), tensor.element, nullptr};
  return Values{ffi::String(NameOf(value)), tensor.element,
                ffi::Array<int64_t>(tensor.sizes.begin(), tensor.sizes.end())};
}

Values Graph::Tensor(const std::string& name, const OrtValue* value) const {
  const TensorInfo info(api_, value);
  size_t bytes = 0;
  const void* data = nullptr;
  constexpr int kStrings = 8;
  if (info.element != kStrings) {
    api_.Check(kTensorBytes, value, &bytes);
    api_.Check(kTensorData, value, &data);
  }
  const auto count = static_cast<int64_t>(bytes);
  return {ffi::String(name), info.element, ffi::Array<int64_t>(info.sizes.begin(), info.sizes.end()),
          Borrowed(data, ffi::ShapeView(&count, 1), DLDataType{kDLUInt, 8, 1})};
}

}  // namespace tvm_ext::ort
