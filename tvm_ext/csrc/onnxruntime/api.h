// The part of ONNX Runtime's C interface that an execution provider of its own needs, from version 1.23 on.
//
// ONNX Runtime hands out tables of functions. "Additions must be at the end, and no functions can be removed": a
// function is known by its place and its signature. No header of ONNX Runtime is needed to compile this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

struct OrtStatus;
struct OrtLogger;
struct OrtValue;
struct OrtGraph;
struct OrtNode;
struct OrtOpAttr;
struct OrtValueInfo;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtKernelContext;
struct OrtKeyValuePairs;
struct OrtSessionOptions;
struct OrtHardwareDevice;
struct OrtEpDevice;
struct OrtEpGraphSupportInfo;
struct OrtNodeComputeContext;

struct OrtApiBase {
  const void* const* (*GetApi)(uint32_t version) noexcept;  // null where the version is not known
  const char* (*GetVersionString)() noexcept;
};

namespace tvm_ext::ort {

constexpr uint32_t kVersion = 23;  // of the interface: ONNX Runtime 1.23
enum ErrorCode { kInvalidArgument = 2, kEpFail = 11 };
enum class Attribute { kUndefined, kInt, kInts, kFloat, kFloats, kString, kStrings, kGraph, kTensor };
constexpr int kCpu = 0;  // OrtHardwareDeviceType

// Place `place` in a table, and the function's signature.
template <size_t place, typename Signature>
struct Entry {};

constexpr Entry<0, OrtStatus*(int, const char*)> kCreateStatus{};
constexpr Entry<2, const char*(const OrtStatus*)> kGetErrorMessage{};
constexpr Entry<51, OrtStatus*(OrtValue*, void**)> kGetTensorMutableData{};
constexpr Entry<55, OrtStatus*(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**)> kCastTypeInfoToTensorInfo{};
constexpr Entry<60, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)> kGetTensorElementType{};
constexpr Entry<61, OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)> kGetDimensionsCount{};
constexpr Entry<62, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)> kGetDimensions{};
constexpr Entry<65, OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)> kGetTensorTypeAndShape{};
constexpr Entry<88, OrtStatus*(const OrtKernelContext*, size_t*)> kContextInputCount{};
constexpr Entry<90, OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)> kContextInput{};
constexpr Entry<91, OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)> kContextOutput{};
constexpr Entry<93, void(OrtStatus*)> kReleaseStatus{};
constexpr Entry<96, void(OrtValue*)> kReleaseValue{};
constexpr Entry<99, void(OrtTensorTypeAndShapeInfo*)> kReleaseTensorInfo{};
constexpr Entry<272, OrtStatus*(const OrtOpAttr*, int, void*, size_t, size_t*)> kReadAttribute{};
constexpr Entry<289, OrtStatus*(const OrtValueInfo*, const char**)> kValueName{};
constexpr Entry<290, OrtStatus*(const OrtValueInfo*, const OrtTypeInfo**)> kValueType{};
constexpr Entry<298, void(const OrtKeyValuePairs*, const char* const**, const char* const**, size_t*)> kPairs{};
constexpr Entry<300, void(OrtKeyValuePairs*)> kReleasePairs{};
constexpr Entry<307, int(const OrtHardwareDevice*)> kDeviceType{};
constexpr Entry<317, const void* const*()> kGetEpApi{};
constexpr Entry<318, OrtStatus*(const OrtValue*, size_t*)> kTensorBytes{};
constexpr Entry<326, OrtStatus*(const OrtValueInfo*, const OrtValue**)> kInitializerValue{};
constexpr Entry<334, OrtStatus*(const OrtGraph*, const char**)> kGraphModelPath{};
constexpr Entry<336, OrtStatus*(const OrtGraph*, size_t*)> kGraphOperatorSetCount{};
constexpr Entry<337, OrtStatus*(const OrtGraph*, const char**, int64_t*, size_t)> kGraphOperatorSets{};
constexpr Entry<338, OrtStatus*(const OrtGraph*, size_t*)> kGraphInputCount{};
constexpr Entry<339, OrtStatus*(const OrtGraph*, const OrtValueInfo**, size_t)> kGraphInputs{};
constexpr Entry<340, OrtStatus*(const OrtGraph*, size_t*)> kGraphOutputCount{};
constexpr Entry<341, OrtStatus*(const OrtGraph*, const OrtValueInfo**, size_t)> kGraphOutputs{};
constexpr Entry<342, OrtStatus*(const OrtGraph*, size_t*)> kGraphInitializerCount{};
constexpr Entry<343, OrtStatus*(const OrtGraph*, const OrtValueInfo**, size_t)> kGraphInitializers{};
constexpr Entry<344, OrtStatus*(const OrtGraph*, size_t*)> kGraphNodeCount{};
constexpr Entry<345, OrtStatus*(const OrtGraph*, const OrtNode**, size_t)> kGraphNodes{};
constexpr Entry<346, OrtStatus*(const OrtGraph*, const OrtNode**)> kGraphParentNode{};
constexpr Entry<349, OrtStatus*(const OrtNode*, const char**)> kNodeName{};
constexpr Entry<350, OrtStatus*(const OrtNode*, const char**)> kNodeOperator{};
constexpr Entry<351, OrtStatus*(const OrtNode*, const char**)> kNodeDomain{};
constexpr Entry<353, OrtStatus*(const OrtNode*, size_t*)> kNodeInputCount{};
constexpr Entry<354, OrtStatus*(const OrtNode*, const OrtValueInfo**, size_t)> kNodeInputs{};
constexpr Entry<355, OrtStatus*(const OrtNode*, size_t*)> kNodeOutputCount{};
constexpr Entry<356, OrtStatus*(const OrtNode*, const OrtValueInfo**, size_t)> kNodeOutputs{};
constexpr Entry<359, OrtStatus*(const OrtNode*, size_t*)> kNodeAttributeCount{};
constexpr Entry<360, OrtStatus*(const OrtNode*, const OrtOpAttr**, size_t)> kNodeAttributes{};
constexpr Entry<362, OrtStatus*(const OrtOpAttr*, OrtValue**)> kAttributeTensor{};
constexpr Entry<363, OrtStatus*(const OrtOpAttr*, int*)> kAttributeType{};
constexpr Entry<364, OrtStatus*(const OrtOpAttr*, const char**)> kAttributeName{};
constexpr Entry<365, OrtStatus*(const OrtNode*, size_t*)> kNodeSubgraphCount{};
constexpr Entry<366, OrtStatus*(const OrtNode*, const OrtGraph**, size_t, const char**)> kNodeSubgraphs{};
constexpr Entry<378, OrtStatus*(const OrtValue*, const void**)> kTensorData{};
constexpr Entry<379, OrtStatus*(const OrtSessionOptions*, OrtKeyValuePairs**)> kConfigEntries{};
constexpr Entry<390, bool(const OrtTensorTypeAndShapeInfo*)> kHasShape{};  // from ONNX Runtime 1.24 on

// The arguments of kAddNodesToFuse say that the constants of the nodes are not wanted at run time.
struct NodeFusionOptions {
  uint32_t version = kVersion;
  bool drop_constant_initializers = true;
};

// Those below are in the table of kGetEpApi.
struct EpFactory;
constexpr Entry<0, OrtStatus*(EpFactory*, const OrtHardwareDevice*, const OrtKeyValuePairs*, const OrtKeyValuePairs*,
                              OrtEpDevice**)>
    kCreateEpDevice{};
constexpr Entry<2, OrtStatus*(OrtEpGraphSupportInfo*, const OrtNode* const*, size_t, const NodeFusionOptions*)>
    kAddNodesToFuse{};

// What the provider implements: tables of functions with the version that they were written for at their head.
struct NodeComputeInfo {
  uint32_t version = kVersion;
  OrtStatus* (*CreateState)(NodeComputeInfo*, OrtNodeComputeContext*, void** state) = nullptr;
  OrtStatus* (*Compute)(NodeComputeInfo*, void* state, OrtKernelContext*) = nullptr;
  void (*ReleaseState)(NodeComputeInfo*, void* state) = nullptr;
};

using Unused = void (*)();  // an entry that may be null

struct Ep {
  uint32_t version = kVersion;
  const char* (*GetName)(const Ep*) noexcept = nullptr;
  OrtStatus* (*GetCapability)(Ep*, const OrtGraph*, OrtEpGraphSupportInfo*) noexcept = nullptr;
  OrtStatus* (*Compile)(Ep*, const OrtGraph**, const OrtNode** fused, size_t count, NodeComputeInfo**,
                        OrtNode** contexts) noexcept = nullptr;
  void (*ReleaseNodeComputeInfos)(Ep*, NodeComputeInfo**, size_t) noexcept = nullptr;
  Unused layout[2] = {}, dynamic_options = nullptr, run_start_and_end[2] = {}, allocator = nullptr, stream = nullptr,
         compatibility = nullptr;
};

struct EpFactory {
  uint32_t version = kVersion;
  const char* (*GetName)(const EpFactory*) noexcept = nullptr;
  const char* (*GetVendor)(const EpFactory*) noexcept = nullptr;
  OrtStatus* (*GetSupportedDevices)(EpFactory*, const OrtHardwareDevice* const*, size_t, OrtEpDevice**, size_t most,
                                    size_t* count) noexcept = nullptr;
  OrtStatus* (*CreateEp)(EpFactory*, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*, size_t,
                         const OrtSessionOptions*, const OrtLogger*, Ep**) noexcept = nullptr;
  void (*ReleaseEp)(EpFactory*, Ep*) noexcept = nullptr;
  uint32_t (*GetVendorId)(const EpFactory*) noexcept = nullptr;
  const char* (*GetVersion)(const EpFactory*) noexcept = nullptr;
  Unused compatibility = nullptr, allocator[2] = {};
  OrtStatus* (*CreateDataTransfer)(EpFactory*, void** transfer) noexcept = nullptr;
  bool (*IsStreamAware)(const EpFactory*) noexcept = nullptr;
  Unused stream = nullptr;
};

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The two tables. Functions that give a status throw `Error` with its message where it is one.
class Api {
 public:
  Api(const void* const* table, int release) : release(release), table_(table), ep_table_(Call(kGetEpApi)) {}

  const int release;  // 24 of ONNX Runtime 1.24

  template <size_t place, typename R, typename... Parameters, typename... Arguments>
  R Call(Entry<place, R(Parameters...)>, Arguments... arguments) const {
    return reinterpret_cast<R (*)(Parameters...)>(const_cast<void*>(table_[place]))(arguments...);
  }

  template <size_t place, typename... Parameters, typename... Arguments>
  void Check(Entry<place, OrtStatus*(Parameters...)> entry, Arguments... arguments) const {
    Raise(Call(entry, arguments...));
  }

  template <size_t place, typename... Parameters, typename... Arguments>
  void CheckEp(Entry<place, OrtStatus*(Parameters...)>, Arguments... arguments) const {
    Raise(reinterpret_cast<OrtStatus* (*)(Parameters...)>(const_cast<void*>(ep_table_[place]))(arguments...));
  }

  OrtStatus* Status(const std::string& message, ErrorCode code = kEpFail) const {
    return Call(kCreateStatus, static_cast<int>(code), message.c_str());
  }

 private:
  void Raise(OrtStatus* status) const {
    if (status == nullptr) return;
    const std::string message = Call(kGetErrorMessage, static_cast<const OrtStatus*>(status));
    Call(kReleaseStatus, status);
    throw Error(message);
  }

  const void* const* table_;
  const void* const* ep_table_;
};

}  // namespace tvm_ext::ort
