// Tile registers of Intel AMX as the Software Developer's Manual describes them, for machines that have none.
//
// Each thread has its own tiles. What the processor answers by a fault (#UD, #GP) is kept as a text, and the
// instruction does nothing. Loads clear what lies beyond a row and beyond the rows, as the processor does.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tile {
  int rows = 0, row_bytes = 0;
  alignas(64) uint8_t data[kRows][kRowBytes];
};

struct State {
  bool configured = false;
  Tile tiles[kTiles];
};

thread_local State state;
std::atomic<const char*> first_fault{nullptr};
std::atomic<int64_t> counts[8];
enum Name { kConfigure, kRelease, kZero, kLoad, kStore, kBytes, kBfloat };

bool Fault(const char* text) {
  const char* none = nullptr;
  first_fault.compare_exchange_strong(none, text);
  return false;
}

bool Valid(int number) {
  if (!state.configured) return Fault("#UD: tiles are not configured");
  if (number < 0 || number >= kTiles) return Fault("#UD: no such tile");
  if (state.tiles[number].rows == 0) return Fault("#UD: a tile without rows");
  return true;
}

bool Fits(int sums, int data, int weights) {
  if (!Valid(sums) || !Valid(data) || !Valid(weights)) return false;
  if (sums == data || sums == weights || data == weights) return Fault("#UD: one tile is two operands");
  const Tile &c = state.tiles[sums], &a = state.tiles[data], &b = state.tiles[weights];
  if (c.row_bytes % 4 || a.row_bytes % 4 || b.row_bytes % 4) return Fault("#UD: a row is no whole words");
  if (c.rows != a.rows) return Fault("#UD: rows of sums and of data differ");
  if (c.row_bytes != b.row_bytes) return Fault("#UD: rows of sums and of weights are not as long");
  if (a.row_bytes / 4 != b.rows) return Fault("#UD: a row of data does not fit the rows of weights");
  return true;
}

void ClearBeyond(Tile& tile) {
  for (int row = 0; row < kRows; ++row) {
    int used = row < tile.rows ? tile.row_bytes : 0;
    memset(tile.data[row] + used, 0, kRowBytes - used);
  }
}

float Flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float Bfloat(uint16_t bits) {
  uint32_t word = uint32_t(bits) << 16;
  float x;
  memcpy(&x, &word, 4);
  return Flushed(x);
}

}  // namespace

extern "C" {

void amx_ldtilecfg(const uint8_t* memory) {
  ++counts[kConfigure];
  State next;
  for (Tile& tile : next.tiles) memset(tile.data, 0, sizeof(tile.data));
  if (memory[0] == 0) {
    state = next;
    return;
  }
  if (memory[0] != 1) return void(Fault("#GP: no such palette"));
  if (memory[1] != 0) return void(Fault("#GP: a start row"));
  for (int place = 2; place < 16; ++place)
    if (memory[place]) return void(Fault("#GP: a reserved byte"));
  for (int place = 32; place < 48; ++place)
    if (memory[place]) return void(Fault("#GP: bytes of a tile that is none"));
  for (int place = 56; place < 64; ++place)
    if (memory[place]) return void(Fault("#GP: rows of a tile that is none"));
  for (int number = 0; number < kTiles; ++number) {
    Tile& tile = next.tiles[number];
    tile.row_bytes = memory[16 + 2 * number] | memory[17 + 2 * number] << 8;
    tile.rows = memory[48 + number];
    if (tile.row_bytes > kRowBytes || tile.rows > kRows) return void(Fault("#GP: a tile is too large"));
    if ((tile.rows == 0) != (tile.row_bytes == 0)) return void(Fault("#GP: rows without bytes, or bytes without rows"));
  }
  next.configured = true;
  state = next;
}

void amx_tilerelease() {
  ++counts[kRelease];
  state.configured = false;
  for (Tile& tile : state.tiles) tile.rows = tile.row_bytes = 0;
}

void amx_tilezero(int8_t number) {
  ++counts[kZero];
  if (Valid(number)) memset(state.tiles[number].data, 0, sizeof(state.tiles[number].data));
}

void amx_tileloadd64(int8_t number, const uint8_t* memory, int64_t stride) {
  ++counts[kLoad];
  if (!Valid(number)) return;
  Tile& tile = state.tiles[number];
  for (int row = 0; row < tile.rows; ++row) memcpy(tile.data[row], memory + row * stride, tile.row_bytes);
  ClearBeyond(tile);
}

void amx_tilestored64(int8_t number, uint8_t* memory, int64_t stride) {
  ++counts[kStore];
  if (!Valid(number)) return;
  const Tile& tile = state.tiles[number];
  for (int row = 0; row < tile.rows; ++row) memcpy(memory + row * stride, tile.data[row], tile.row_bytes);
}

void amx_tdpbusd(int8_t sums, int8_t data, int8_t weights) {
  ++counts[kBytes];
  if (!Fits(sums, data, weights)) return;
  Tile &c = state.tiles[sums], &a = state.tiles[data], &b = state.tiles[weights];
  for (int m = 0; m < c.rows; ++m)
    for (int k = 0; k < a.row_bytes / 4; ++k)
      for (int n = 0; n < c.row_bytes / 4; ++n) {
        uint32_t sum;
        memcpy(&sum, c.data[m] + 4 * n, 4);
        for (int i = 0; i < 4; ++i)
          sum += uint32_t(int32_t(a.data[m][4 * k + i]) * int32_t(int8_t(b.data[k][4 * n + i])));
        memcpy(c.data[m] + 4 * n, &sum, 4);
      }
  ClearBeyond(c);
}

void amx_tdpbf16ps(int8_t sums, int8_t data, int8_t weights) {
  ++counts[kBfloat];
  if (!Fits(sums, data, weights)) return;
  Tile &c = state.tiles[sums], &a = state.tiles[data], &b = state.tiles[weights];
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      float part[2] = {0, 0};
      for (int k = 0; k < a.row_bytes / 4; ++k)
        for (int i = 0; i < 2; ++i) {
          uint16_t x, w;
          memcpy(&x, a.data[m] + 4 * k + 2 * i, 2);
          memcpy(&w, b.data[k] + 4 * n + 2 * i, 2);
          part[i] = Flushed(std::fma(Bfloat(x), Bfloat(w), part[i]));
        }
      float sum;
      memcpy(&sum, c.data[m] + 4 * n, 4);
      sum = Flushed(Flushed(sum) + Flushed(part[0] + part[1]));
      memcpy(c.data[m] + 4 * n, &sum, 4);
    }
  ClearBeyond(c);
}

// The first fault since the last call; null where there was none.
const char* amx_fault() { return first_fault.exchange(nullptr); }

// How often an instruction has run since the last call.
int64_t amx_count(int name) { return counts[name].exchange(0); }
}
