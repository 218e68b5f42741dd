// A schedule of rTasks as data: what each virtual execution unit (vEU) calls, in which order, and what it waits for.
//
// tvm_ext/rammer_runtime/table.py writes it and describes its bytes. ReadTable accepts none whose walk could call what
// does not exist, address memory outside a buffer, or wait for ever.
#ifndef TVM_EXT_RAMMER_TABLE_H_
#define TVM_EXT_RAMMER_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace tvm_ext {
namespace rammer {

constexpr uint32_t kTableVersion = 1;
constexpr uint32_t kArena = 0xffffffff;  // the `argument` of a buffer that lies in the arena
constexpr uint64_t kArenaAlignment = 64;
constexpr uint32_t kMostUnits = 1024;
constexpr uint64_t kMostBytes = uint64_t{1} << 40;  // of an arena or a tensor
constexpr uint32_t kMostTasks = 0x7fffffff;

struct Parameter {
  uint64_t bytes;      // what the kernel touches, from its first byte on
  uint32_t alignment;  // that its code relies on, a power of two
};

struct KernelRow {
  std::string symbol;
  uint32_t tasks;
  std::vector<Parameter> parameters;
};

struct ArgumentRow {
  uint64_t bytes;
  uint32_t alignment;
};

struct BufferRow {
  uint32_t argument;  // or kArena
  uint64_t offset;
  uint64_t bytes;
};

struct CallRow {
  std::string name;
  uint32_t kernel;
  std::vector<uint32_t> buffers;  // one for each of the kernel's parameters
};

struct WaitRow {
  uint32_t unit;
  uint32_t count;  // so many entries of that unit's stream must have finished
};

struct EntryRow {
  uint32_t call;
  uint32_t begin;  // rTasks begin .. end - 1
  uint32_t end;
  std::vector<WaitRow> waits;
};

struct Table {
  std::string name;
  uint64_t arena_bytes = 0;
  std::vector<ArgumentRow> arguments;
  std::vector<KernelRow> kernels;
  std::vector<BufferRow> buffers;
  std::vector<CallRow> calls;
  std::vector<std::vector<EntryRow>> streams;  // one for each unit
};

class TableError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws TableError with the reason.
Table ReadTable(const char* data, std::size_t size);

// What ReadTable checks of the content; throws TableError.
void CheckTable(const Table& table);

// CRC-32 as zlib computes it.
uint32_t Crc32(const char* data, std::size_t size);

}  // namespace rammer
}  // namespace tvm_ext

#endif  // TVM_EXT_RAMMER_TABLE_H_
