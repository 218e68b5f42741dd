// Registers the typed PassContext options "tvm_ext.*", so that a misspelt key or a value of the wrong type is an
// error where it is written. tvm_ext/options.py holds the ranges and the meaning; tests keep the two lists the same.

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
#include <tvm/ffi/tvm_ffi.h>

#include <functional>
#include <string>

namespace tvm {
namespace transform {

// The one member of TVM's class that is used, as libtvm_compiler.so exports it (tvm/ir/transform.h, 0.27.0). Including
// that header would bring the compiler's IR headers and a C++ ABI much wider than this one symbol.
class PassContext {
 public:
  static void RegisterConfigOption(const char* key, ffi::String value_type_str,
                                   std::function<ffi::Any(ffi::Any)> legalization);
};

}  // namespace transform
}  // namespace tvm

namespace {

using tvm::ffi::Any;
using tvm::ffi::String;
using tvm::transform::PassContext;

[[noreturn]] void Refuse(const char* key, const char* allowed, const Any& value) {
  std::string given = value.GetTypeKey();
  if (auto text = value.try_cast<String>()) given = "\"" + std::string(*text) + "\"";
  TVM_FFI_THROW(TypeError) << "PassContext option " << key << " takes " << allowed << ", but got " << given;
  TVM_FFI_UNREACHABLE();
}

template <typename T>
void Register(const char* key, const char* type_name) {
  PassContext::RegisterConfigOption(key, type_name, [key, type_name](Any value) -> Any {
    if (auto converted = value.try_cast<T>()) return Any(*converted);
    Refuse(key, type_name, value);
  });
}

void RegisterBoolOrAuto(const char* key) {
  PassContext::RegisterConfigOption(key, "bool", [key](Any value) -> Any {
    if (auto flag = value.try_cast<bool>()) return Any(*flag);
    if (auto text = value.try_cast<String>(); text.has_value() && *text == "auto") return value;
    Refuse(key, "True, False or \"auto\"", value);
  });
}

// TVM keeps the keys' pointers forever (these are literals of a library that is never unloaded) and refuses a key
// that it already has, so a second load, from another path, must register nothing.
bool IsRegistered(const char* key) {
  const auto list = tvm::ffi::Function::GetGlobal("transform.ListConfigs");
  if (!list.has_value()) return false;
  return (*list)().cast<tvm::ffi::Map<String, Any>>().count(key) > 0;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  if (IsRegistered("tvm_ext.enable_roller")) return;
  RegisterBoolOrAuto("tvm_ext.enable_roller");
  Register<int64_t>("tvm_ext.candidates", "int");
  Register<double>("tvm_ext.epsilon", "float");
  Register<String>("tvm_ext.device", "str");
  Register<int64_t>("tvm_ext.num_threads", "int");
  Register<String>("tvm_ext.kernel_cache", "str");
  Register<String>("tvm_ext.database", "str");
  Register<String>("tvm_ext.layout", "str");
  Register<String>("tvm_ext.winograd", "str");
  Register<String>("tvm_ext.precision", "str");
  Register<double>("tvm_ext.precision_bound", "float");
  Register<bool>("tvm_ext.check_machine_code", "bool");
  RegisterBoolOrAuto("tvm_ext.enable_pipelining");
  Register<String>("tvm_ext.pipelining", "str");
  Register<int64_t>("tvm_ext.shared_stages", "int");
  Register<int64_t>("tvm_ext.register_stages", "int");
  Register<bool>("tvm_ext.bulk_copies", "bool");
  RegisterBoolOrAuto("tvm_ext.enable_persistent_fusion");
  RegisterBoolOrAuto("tvm_ext.enable_cutlass");
  RegisterBoolOrAuto("tvm_ext.profile_cutlass");
  RegisterBoolOrAuto("tvm_ext.enable_rammer");
  Register<String>("tvm_ext.bounds", "str");
  Register<String>("tvm_ext.rammer_policy", "str");
  Register<bool>("tvm_ext.flush_denormals", "bool");
}

}  // namespace
