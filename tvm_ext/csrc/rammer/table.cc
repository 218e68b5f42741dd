#include "table.h"

#include <array>
#include <cstring>
#include <set>
#include <utility>

namespace tvm_ext {
namespace rammer {
namespace {

constexpr char kMagic[8] = {'t', 'v', 'm', 'x', 'R', 'A', 'M', '\n'};
constexpr std::size_t kHeaderBytes = 24;  // magic, version, checksum, payload's size

[[noreturn]] void Refuse(const std::string& reason) { throw TableError(reason); }

void Check(bool holds, const char* reason) {
  if (!holds) Refuse(reason);
}

// Numbers are little-endian, 32 bits unless said otherwise. Nothing is read, and no memory taken, before the bytes that
// it stands for are known to be there: a count of 2^31 rows in 100 bytes is refused, not allocated.
class Reader {
 public:
  Reader(const char* data, std::size_t size) : at_(data), left_(size) {}

  uint64_t Read(std::size_t bytes) {
    Check(bytes <= left_, "it ends too early");
    uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value |= uint64_t{static_cast<unsigned char>(at_[i])} << (8 * i);
    at_ += bytes;
    left_ -= bytes;
    return value;
  }

  uint32_t Read32() { return static_cast<uint32_t>(Read(4)); }
  uint64_t Read64() { return Read(8); }

  // A number of rows, each of which takes at least `row_bytes`.
  uint32_t ReadCount(std::size_t row_bytes) {
    const uint32_t count = Read32();
    Check(count <= left_ / row_bytes, "it counts more rows than it has bytes for");
    return count;
  }

  std::string ReadText() {
    const uint32_t size = ReadCount(1);
    std::string text(at_, size);
    at_ += size;
    left_ -= size;
    return text;
  }

  template <typename Row, typename ReadRow>
  std::vector<Row> ReadRows(std::size_t row_bytes, const ReadRow& read_row) {
    const uint32_t count = ReadCount(row_bytes);
    std::vector<Row> rows;
    rows.reserve(count);
    for (uint32_t i = 0; i < count; ++i) rows.push_back(read_row());
    return rows;
  }

  std::size_t left() const { return left_; }

 private:
  const char* at_;
  std::size_t left_;
};

KernelRow ReadKernel(Reader* in) {
  KernelRow row;
  row.symbol = in->ReadText();
  row.tasks = in->Read32();
  row.parameters = in->ReadRows<Parameter>(12, [in] {
    const uint64_t bytes = in->Read64();
    return Parameter{bytes, in->Read32()};
  });
  return row;
}

CallRow ReadCall(Reader* in) {
  CallRow row;
  row.name = in->ReadText();
  row.kernel = in->Read32();
  row.buffers = in->ReadRows<uint32_t>(4, [in] { return in->Read32(); });
  return row;
}

EntryRow ReadEntry(Reader* in) {
  EntryRow row;
  row.call = in->Read32();
  row.begin = in->Read32();
  row.end = in->Read32();
  row.waits = in->ReadRows<WaitRow>(8, [in] {
    const uint32_t unit = in->Read32();
    return WaitRow{unit, in->Read32()};
  });
  return row;
}

bool IsPowerOfTwo(uint64_t number) { return number != 0 && (number & (number - 1)) == 0; }

// The largest power of two, up to the base's alignment, that every address of the buffer's start is a multiple of.
uint64_t AlignmentOf(const Table& table, const BufferRow& buffer) {
  const uint64_t base = buffer.argument == kArena ? kArenaAlignment : table.arguments[buffer.argument].alignment;
  const uint64_t of_offset = buffer.offset & (~buffer.offset + 1);
  return of_offset != 0 && of_offset < base ? of_offset : base;
}

void CheckSizes(const Table& table) {
  Check(table.arena_bytes <= kMostBytes, "its arena is too large");
  for (const ArgumentRow& row : table.arguments) {
    Check(row.bytes <= kMostBytes, "an argument is too large");
    Check(IsPowerOfTwo(row.alignment), "the alignment of an argument is no power of two");
  }
  std::set<std::string> symbols;
  for (const KernelRow& row : table.kernels) {
    Check(!row.symbol.empty() && row.symbol.find('\0') == std::string::npos, "a kernel has no proper name");
    Check(symbols.insert(row.symbol).second, "two kernels have one name");
    Check(row.tasks >= 1 && row.tasks <= kMostTasks, "a kernel has no rTasks, or too many");
    for (const Parameter& item : row.parameters)
      Check(IsPowerOfTwo(item.alignment), "the alignment of a parameter is no power of two");
  }
  for (const BufferRow& row : table.buffers) {
    Check(row.argument == kArena || row.argument < table.arguments.size(), "a buffer lies in no argument");
    const uint64_t room = row.argument == kArena ? table.arena_bytes : table.arguments[row.argument].bytes;
    Check(row.bytes <= room && row.offset <= room - row.bytes, "a buffer reaches beyond what it lies in");
  }
}

void CheckCalls(const Table& table) {
  for (const CallRow& row : table.calls) {
    Check(row.kernel < table.kernels.size(), "a call is of no kernel");
    const std::vector<Parameter>& parameters = table.kernels[row.kernel].parameters;
    Check(row.buffers.size() == parameters.size(), "a call has too few or too many buffers");
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      Check(row.buffers[i] < table.buffers.size(), "a call is given no buffer");
      const BufferRow& buffer = table.buffers[row.buffers[i]];
      Check(buffer.bytes >= parameters[i].bytes, "a buffer is smaller than what the kernel touches");
      Check(AlignmentOf(table, buffer) >= parameters[i].alignment, "a buffer is not aligned as the kernel expects");
    }
  }
  for (const auto& stream : table.streams) {
    for (const EntryRow& row : stream) {
      Check(row.call < table.calls.size(), "an entry calls nothing");
      const uint32_t tasks = table.kernels[table.calls[row.call].kernel].tasks;
      Check(row.begin < row.end && row.end <= tasks, "an entry runs rTasks that the kernel has not");
      for (const WaitRow& wait : row.waits) {
        Check(wait.unit < table.streams.size(), "an entry waits for no unit");
        Check(wait.count <= table.streams[wait.unit].size(), "an entry waits for more than a stream has");
      }
    }
  }
}

// Walk the streams without calling anything: where no unit can go on before all have finished, waits form a circle.
void CheckWaits(const Table& table) {
  const std::size_t units = table.streams.size();
  std::vector<uint32_t> finished(units, 0);
  std::vector<std::vector<uint32_t>> waiting(units);  // for each unit, who looks again when it has moved
  std::vector<uint32_t> ready;
  for (uint32_t unit = 0; unit < units; ++unit) ready.push_back(unit);
  while (!ready.empty()) {
    const uint32_t unit = ready.back();
    ready.pop_back();
    const uint32_t before = finished[unit];
    const auto& stream = table.streams[unit];
    const WaitRow* blocked_by = nullptr;
    while (finished[unit] < stream.size() && blocked_by == nullptr) {
      for (const WaitRow& wait : stream[finished[unit]].waits)
        if (finished[wait.unit] < wait.count) blocked_by = &wait;
      if (blocked_by == nullptr) ++finished[unit];
    }
    if (blocked_by != nullptr) waiting[blocked_by->unit].push_back(unit);
    if (finished[unit] != before) {
      ready.insert(ready.end(), waiting[unit].begin(), waiting[unit].end());
      waiting[unit].clear();
    }
  }
  for (std::size_t unit = 0; unit < units; ++unit)
    Check(finished[unit] == table.streams[unit].size(), "its waits form a circle");
}

}  // namespace

uint32_t Crc32(const char* data, std::size_t size) {
  static const std::array<uint32_t, 256> kOfByte = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) value = (value & 1) != 0 ? (value >> 1) ^ 0xedb88320u : value >> 1;
      table[byte] = value;
    }
    return table;
  }();
  uint32_t crc = ~uint32_t{0};
  for (std::size_t i = 0; i < size; ++i) crc = kOfByte[(crc ^ static_cast<unsigned char>(data[i])) & 0xff] ^ (crc >> 8);
  return ~crc;
}

void CheckTable(const Table& table) {
  Check(!table.name.empty(), "its function has no name");
  Check(!table.streams.empty() && table.streams.size() <= kMostUnits, "it has no units, or too many");
  CheckSizes(table);
  CheckCalls(table);
  CheckWaits(table);
}

Table ReadTable(const char* data, std::size_t size) {
  Check(size >= kHeaderBytes && std::memcmp(data, kMagic, sizeof(kMagic)) == 0, "it is none");
  Reader header(data + sizeof(kMagic), kHeaderBytes - sizeof(kMagic));
  const uint32_t version = header.Read32();
  const uint32_t checksum = header.Read32();
  const uint64_t payload = header.Read64();
  if (version != kTableVersion) {
    Refuse("it is of version " + std::to_string(version) + ", and this runtime reads version " +
           std::to_string(kTableVersion));
  }
  Check(payload == size - kHeaderBytes, "it is not as long as it says");
  Check(checksum == Crc32(data + kHeaderBytes, size - kHeaderBytes), "its checksum does not fit");

  Reader in(data + kHeaderBytes, size - kHeaderBytes);
  Table table;
  table.name = in.ReadText();
  table.arena_bytes = in.Read64();
  table.arguments = in.ReadRows<ArgumentRow>(12, [&in] {
    const uint64_t bytes = in.Read64();
    return ArgumentRow{bytes, in.Read32()};
  });
  table.kernels = in.ReadRows<KernelRow>(12, [&in] { return ReadKernel(&in); });
  table.buffers = in.ReadRows<BufferRow>(20, [&in] {
    const uint32_t argument = in.Read32();
    const uint64_t offset = in.Read64();
    return BufferRow{argument, offset, in.Read64()};
  });
  table.calls = in.ReadRows<CallRow>(12, [&in] { return ReadCall(&in); });
  table.streams = in.ReadRows<std::vector<EntryRow>>(
      4, [&in] { return in.ReadRows<EntryRow>(16, [&in] { return ReadEntry(&in); }); });
  Check(in.left() == 0, "something follows its end");
  CheckTable(table);
  return table;
}

}  // namespace rammer
}  // namespace tvm_ext
