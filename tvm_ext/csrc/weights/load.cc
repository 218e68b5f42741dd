// Linked into every exported library whose weights lie behind its code, in the same file (tvm_ext/support/weights.py has
// the form). It is how TVM's loader makes the executable: weights are read once, into memory of their own.
//
// TVM's own loader copies an executable's bytes twice before it makes tensors of them, and asks for no huge pages.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/runtime/base.h>  // before what follows, which needs it
#include <tvm/runtime/vm/executable.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "form.h"

namespace ffi = tvm::ffi;
using tvm::runtime::vm::VMExecutable;

// "ffi.Module.load_from_bytes.tvm_ext.ID": in the source that every library brings along. ID is 32 digits.
extern "C" __attribute__((visibility("hidden"))) const char tvm_ext_loader_name[];

namespace tvm_ext::weights {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLargestRead = size_t{1} << 30;  // read(2) takes up to 2 GiB
constexpr int kTail = 4096;                       // bytes: the mark lies in the last ones

class File {
 public:
  explicit File(std::string path) : path_(std::move(path)), descriptor_(open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) throw std::runtime_error(path_ + " cannot be opened: " + std::strerror(errno));
  }
  ~File() { close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }

  int64_t size() const {
    struct stat status {};
    return fstat(descriptor_, &status) == 0 ? static_cast<int64_t>(status.st_size) : 0;
  }

  void Read(char* to, int64_t size, int64_t offset) const {
    while (size > 0) {
      const ssize_t got = pread(descriptor_, to, std::min<size_t>(size, kLargestRead), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) throw std::runtime_error(path_ + " was cut off: copy or export it again");
      to += got, offset += got, size -= got;
    }
  }

 private:
  std::string path_;
  int descriptor_;
};

struct Part {
  long long offset = 0, size = 0, constants = 0;
  std::string file;  // where it is, unless in the file that says so
};

// What `file` says of the weights of library `id`.
Part Find(const File& file, const std::string& id) {
  const int64_t size = std::min<int64_t>(file.size(), kTail);
  std::string tail(size, '\0');
  file.Read(tail.data(), size, file.size() - size);
  const size_t start = tail.rfind(kMark);
  Part part;
  char own_id[33] = "";
  int length = 0;
  if (start == std::string::npos ||
      std::sscanf(tail.c_str() + start + std::strlen(kMark), "%32s %lld %lld %lld %n", own_id, &part.offset, &part.size,
                  &part.constants, &length) != 4) {
    throw std::runtime_error(file.path() + " was cut off or stripped, and has lost its weights: copy or export it again");
  }
  if (id != own_id) throw std::runtime_error(file.path() + " was replaced while it was loaded: load it again");
  const size_t name = start + std::strlen(kMark) + length;
  part.file = tail.substr(name, tail.find('\n', name) - name);
  return part;
}

// All weights as one tensor of bytes, which TVM's runtime frees, and where in it they begin: at a huge page.
std::pair<ffi::Tensor, int64_t> Read(const std::string& path, const std::string& id, Part* part) {
  const File own(path);
  *part = Find(own, id);
  const File file(part->file == kHere ? path : part->file);
  if (part->file != kHere) *part = Find(file, id);
  const auto allocate = ffi::Function::GetGlobalRequired("runtime.TVMTensorAllocWithScope");
  const auto all = allocate(ffi::Shape({part->size + static_cast<int64_t>(kHugePage)}), DLDataType{kDLUInt, 8, 1},
                            DLDevice{kDLCPU, 0}, nullptr)
                       .cast<ffi::Tensor>();
  char* const begin = static_cast<char*>(all.data_ptr());
  char* const first = begin + (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  madvise(first, part->size / kHugePage * kHugePage, MADV_HUGEPAGE);  // where the system gives none, that is no error
  file.Read(first, part->size, part->offset);
  return {all, first - begin};
}

// The tensor that belongs in `place`. It is tvm-ffi's own view, since a deleter of this library's could outlive it.
ffi::Tensor View(const ffi::Tensor& all, int64_t start, const ffi::Shape& place) {
  DLTensor view{};
  view.data = static_cast<char*>(all.data_ptr()) + start + place[1];
  view.device = all.device();
  view.dtype = {static_cast<uint8_t>(place[2]), static_cast<uint8_t>(place[3]), static_cast<uint16_t>(place[4])};
  const std::vector<int64_t> shape(place.begin() + kPlaceSize, place.end());
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  view.ndim = static_cast<int32_t>(shape.size());
  view.shape = const_cast<int64_t*>(shape.data());
  view.strides = strides.data();
  TVMFFIObjectHandle made = nullptr;
  TVM_FFI_CHECK_SAFE_CALL(
      TVMFFITensorCreateUnsafeView(ffi::details::ObjectUnsafe::TVMFFIObjectPtrFromObjectRef(all), &view, &made));
  return ffi::Tensor(ffi::details::ObjectUnsafe::ObjectPtrFromOwned<ffi::TensorObj>(static_cast<TVMFFIObject*>(made)));
}

ffi::Module Load(const ffi::Bytes& bytes) {
  Dl_info here;
  if (dladdr(tvm_ext_loader_name, &here) == 0) throw std::runtime_error("a library does not know its file");
  const std::string id = std::strrchr(tvm_ext_loader_name, '.') + 1;
  auto module = ffi::Function::GetGlobalRequired("ffi.Module.load_from_bytes.relax.VMExecutable")(bytes).cast<ffi::Module>();
  Part part;
  const auto [all, start] = Read(here.dli_fname, id, &part);
  auto& constants = static_cast<VMExecutable*>(module.operator->())->constants;
  if (static_cast<long long>(constants.size()) != part.constants) {  // the class has another layout
    throw std::runtime_error(std::string(here.dli_fname) + " was exported for another TVM: export it with this one");
  }
  for (ffi::Any& constant : constants) {
    const auto place = constant.try_cast<ffi::Shape>();
    if (!place || place->size() < kPlaceSize || (*place)[0] != kPlace) continue;
    constant = View(all, start, *place);
  }
  return module;
}

// What is raised is an object of tvm-ffi's own: by the time that somebody reads it, this library is gone.
int LoadSafely(void*, const TVMFFIAny* arguments, int32_t, TVMFFIAny* result) {
  try {
    ffi::Any module = Load(ffi::AnyView::CopyFromTVMFFIAny(arguments[0]).cast<ffi::Bytes>());
    *result = ffi::details::AnyUnsafe::MoveAnyToTVMFFIAny(std::move(module));
    return 0;
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what());
    return -1;
  }
}

// Without a deleter, which would be code of this library: the registry may outlive it.
__attribute__((constructor)) void Register() {
  TVMFFIObjectHandle function = nullptr;
  const TVMFFIByteArray name{tvm_ext_loader_name, std::strlen(tvm_ext_loader_name)};
  if (TVMFFIFunctionCreate(nullptr, LoadSafely, nullptr, &function) == 0) {
    TVMFFIFunctionSetGlobal(&name, function, 1);
    TVMFFIObjectDecRef(function);
  }
}

// Only what this copy of the library has registered: another one may have come later.
__attribute__((destructor)) void Unregister() {
  const auto function = ffi::Function::GetGlobal(tvm_ext_loader_name);
  if (!function) return;
  const auto* cell = TVMFFIFunctionGetCellPtr(const_cast<ffi::Object*>(static_cast<const ffi::Object*>(function->get())));
  if (cell->safe_call == LoadSafely) ffi::Function::RemoveGlobal(tvm_ext_loader_name);
}

}  // namespace
}  // namespace tvm_ext::weights
