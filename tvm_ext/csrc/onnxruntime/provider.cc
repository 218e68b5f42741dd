// An execution provider for ONNX Runtime 1.23 and later: runs what `tvm-ext compile --onnxruntime` compiled, and in a
// Python process that has imported tvm_ext, compiles what it can when a session is made.
#include <tvm/ffi/error.h>

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "graph.h"
#include "kernel.h"

#define TVM_EXT_EXPORT __attribute__((visibility("default")))

namespace tvm_ext::ort {
namespace {

namespace ffi = tvm::ffi;

constexpr char kName[] = "TvmExtExecutionProvider";
constexpr char kDenormalAsZero[] = "session.set_denormal_as_zero";  // ONNX Runtime's name of our flush_denormals
constexpr char kOptionPrefix[] = "ep.tvmextexecutionprovider.";  // as ONNX Runtime writes it before our options
constexpr char kContext[] = "com.microsoft.EPContext";

// Runs `body`, and gives what it throws as a status.
template <typename Body>
OrtStatus* Guarded(const Api& api, Body body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return api.Status(error.what());
  }
}

std::string TextOf(const ffi::Any& value) {
  const auto bytes = value.try_cast<ffi::Bytes>();
  return bytes ? std::string(bytes->data(), bytes->size()) : std::string();
}

// The library inside a node EPContext: beside the model, or in the node.
std::unique_ptr<Kernel> FromContext(const Api& api, const Graph& graph, const OrtNode* node) {
  const std::string content = TextOf(graph.AttributeOf(node, "ep_cache_context"));
  const auto embedded = graph.AttributeOf(node, "embed_mode").try_cast<int64_t>();
  if (embedded && *embedded == 0) {
    const std::filesystem::path file(content);
    const auto folder = std::filesystem::absolute(std::filesystem::path(graph.ModelPath())).parent_path();
    if (file.is_absolute() || content.find("..") != std::string::npos) {
      throw Error("ep_cache_context is '" + content + "', which is not beside the model");
    }
    if (!std::filesystem::exists(folder / file)) throw Error((folder / file).string() + " is missing");
    return std::make_unique<Kernel>(api, (folder / file).string());
  }
  std::string path = (std::filesystem::temp_directory_path() / "tvm_ext_XXXXXX.so").string();
  const int descriptor = mkstemps(path.data(), 3);
  if (descriptor < 0) throw Error("cannot write " + path);
  close(descriptor);
  std::ofstream(path, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
  try {
    auto kernel = std::make_unique<Kernel>(api, path);
    std::filesystem::remove(path);  // it stays mapped
    return kernel;
  } catch (...) {
    std::filesystem::remove(path);
    throw;
  }
}

class Provider : public Ep {
 public:
  Provider(const Api& api, ffi::Map<ffi::String, ffi::String> options) : api_(api), options_(std::move(options)) {
    GetName = [](const Ep*) noexcept { return kName; };
    GetCapability = [](Ep* self, const OrtGraph* graph, OrtEpGraphSupportInfo* info) noexcept {
      auto* provider = static_cast<Provider*>(self);
      return Guarded(provider->api_, [&] { provider->Claim(Graph(provider->api_, graph), info); });
    };
    Compile = [](Ep* self, const OrtGraph** graphs, const OrtNode** fused, size_t count, NodeComputeInfo** infos,
                 OrtNode**) noexcept {
      auto* provider = static_cast<Provider*>(self);
      return Guarded(provider->api_, [&] {
        std::vector<std::unique_ptr<Kernel>> kernels;
        for (size_t i = 0; i < count; ++i) kernels.push_back(provider->Compiled(graphs[i], fused[i]));
        for (size_t i = 0; i < count; ++i) infos[i] = kernels[i].release();
      });
    };
    ReleaseNodeComputeInfos = [](Ep*, NodeComputeInfo** infos, size_t count) noexcept {
      for (size_t i = 0; i < count; ++i) delete static_cast<Kernel*>(infos[i]);
    };
  }

 private:
  // Takes the nodes that were compiled ahead; where there are none, those that Python says it can compile.
  void Claim(const Graph& graph, OrtEpGraphSupportInfo* info) const {
    const std::vector<const OrtNode*> nodes = graph.Nodes();
    if (graph.IsNested() || nodes.empty()) return;
    bool compiled = false;
    for (const OrtNode* node : nodes) {
      if (graph.OperatorOf(node) != kContext || TextOf(graph.AttributeOf(node, "source")) != kName) continue;
      Fuse({node}, info);
      compiled = true;
    }
    const auto claim = ffi::Function::GetGlobal("tvm_ext.onnxruntime.claim");
    if (compiled || !claim) return;
    const auto groups = (*claim)(graph.Describe(nullptr), options_).cast<ffi::Array<ffi::Array<int64_t>>>();
    for (const auto& group : groups) {
      std::vector<const OrtNode*> chosen;
      for (const int64_t index : group) chosen.push_back(nodes.at(static_cast<size_t>(index)));
      Fuse(chosen, info);
    }
  }

  void Fuse(const std::vector<const OrtNode*>& nodes, OrtEpGraphSupportInfo* info) const {
    const NodeFusionOptions options;
    api_.CheckEp(kAddNodesToFuse, info, nodes.data(), nodes.size(), &options);
  }

  std::unique_ptr<Kernel> Compiled(const OrtGraph* ort_graph, const OrtNode* fused) const {
    const Graph graph(api_, ort_graph);
    const std::vector<const OrtNode*> nodes = graph.Nodes();
    if (nodes.size() == 1 && graph.OperatorOf(nodes[0]) == kContext) return FromContext(api_, graph, nodes[0]);
    const auto compile = ffi::Function::GetGlobalRequired("tvm_ext.onnxruntime.compile");
    return std::make_unique<Kernel>(api_, compile(graph.Describe(fused), options_).cast<ffi::Function>());
  }

  const Api& api_;
  const ffi::Map<ffi::String, ffi::String> options_;
};

class Factory : public EpFactory {
 public:
  Factory(const void* const* table, int release) : api_(table, release) {
    GetName = [](const EpFactory*) noexcept { return kName; };
    GetVendor = [](const EpFactory*) noexcept { return "tvm_ext"; };
    GetVendorId = [](const EpFactory*) noexcept { return uint32_t{0}; };
    GetVersion = [](const EpFactory*) noexcept { return "0.1.0"; };
    GetSupportedDevices = [](EpFactory* self, const OrtHardwareDevice* const* devices, size_t count,
                             OrtEpDevice** chosen, size_t most, size_t* chosen_count) noexcept {
      const Api& api = static_cast<Factory*>(self)->api_;
      return Guarded(api, [&] {
        *chosen_count = 0;
        for (size_t i = 0; i < count && *chosen_count < most; ++i) {
          if (api.Call(kDeviceType, devices[i]) != kCpu) continue;
          api.CheckEp(kCreateEpDevice, self, devices[i], static_cast<const OrtKeyValuePairs*>(nullptr),
                      static_cast<const OrtKeyValuePairs*>(nullptr), &chosen[*chosen_count]);
          ++*chosen_count;
        }
      });
    };
    CreateEp = [](EpFactory* self, const OrtHardwareDevice* const*, const OrtKeyValuePairs* const*, size_t,
                  const OrtSessionOptions* options, const OrtLogger*, Ep** ep) noexcept {
      const Api& api = static_cast<Factory*>(self)->api_;
      return Guarded(api, [&] { *ep = new Provider(api, OptionsOf(api, options)); });
    };
    ReleaseEp = [](EpFactory*, Ep* ep) noexcept { delete static_cast<Provider*>(ep); };
    CreateDataTransfer = [](EpFactory*, void** transfer) noexcept -> OrtStatus* {
      *transfer = nullptr;
      return nullptr;
    };
    IsStreamAware = [](const EpFactory*) noexcept { return false; };
  }

 private:
  static ffi::Map<ffi::String, ffi::String> OptionsOf(const Api& api, const OrtSessionOptions* session) {
    OrtKeyValuePairs* pairs = nullptr;
    api.Check(kConfigEntries, session, &pairs);
    const char *const *keys = nullptr, *const *values = nullptr;
    size_t count = 0;
    api.Call(kPairs, static_cast<const OrtKeyValuePairs*>(pairs), &keys, &values, &count);
    ffi::Map<ffi::String, ffi::String> options;
    bool writes_context = false;
    for (size_t i = 0; i < count; ++i) {
      const std::string key = keys[i];
      if (key.rfind(kOptionPrefix, 0) == 0) options.Set(key.substr(sizeof(kOptionPrefix) - 1), values[i]);
      if (key == kDenormalAsZero) options.Set("flush_denormals", std::string(values[i]) == "1" ? "True" : "False");
      writes_context = writes_context || (key == "ep.context_enable" && std::string(values[i]) == "1");
    }
    api.Call(kReleasePairs, pairs);
    if (writes_context) {
      throw Error("TvmExtExecutionProvider writes no EPContext model from a session: use `tvm-ext compile model.onnx "
                  "--onnxruntime context.onnx`, or leave ep.context_enable out");
    }
    const auto check = ffi::Function::GetGlobal("tvm_ext.onnxruntime.check");
    if (check) (*check)(options);
    return options;
  }

  const Api api_;
};

}  // namespace
}  // namespace tvm_ext::ort

extern "C" {

TVM_EXT_EXPORT OrtStatus* CreateEpFactories(const char*, const OrtApiBase* base, const OrtLogger*,
                                            tvm_ext::ort::EpFactory** factories, size_t most, size_t* count) {
  using namespace tvm_ext::ort;
  const void* const* table = base->GetApi(kVersion);
  if (table == nullptr || most == 0) {
    const auto create = reinterpret_cast<OrtStatus* (*)(int, const char*)>(const_cast<void*>(base->GetApi(1)[0]));
    const std::string message = std::string("TvmExtExecutionProvider needs ONNX Runtime 1.23 or later; this is ") +
                                base->GetVersionString() + ": pip install --upgrade onnxruntime";
    return create(kInvalidArgument, message.c_str());
  }
  // Compiled libraries name functions of these two, and expect them among the process's own.
  for (const char* library : {"libtvm_ffi.so", "libtvm_runtime.so"}) dlopen(library, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
  int release = 0;
  std::sscanf(base->GetVersionString(), "1.%d", &release);
  factories[0] = new Factory(table, release);
  *count = 1;
  return nullptr;
}

TVM_EXT_EXPORT OrtStatus* ReleaseEpFactory(tvm_ext::ort::EpFactory* factory) {
  delete static_cast<tvm_ext::ort::Factory*>(factory);
  return nullptr;
}
}
