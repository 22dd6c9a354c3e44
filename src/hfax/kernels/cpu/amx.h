// The tile registers of processors with AMX: whether they may be used, and their configuration.
//
// A tile has 16 rows of up to 64 bytes. One instruction multiplies two of them: the first has a row of the product in each of its rows, the
// second the words of four bytes that are summed with them, [words][16 columns of the product].

#pragma once

#include "lanes.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define HFAX_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t kTileSide = 16;
constexpr int64_t kTileWords = 256;  // of a whole tile

// Whether this process may use the tiles: Linux gives them to processes that ask for them, and a sandbox may refuse.
inline bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
}

// The calling thread's tiles 0 to 3 for sums, 4 and 5 for rows of `row_bytes`, 6 and 7 for words beside each other. Released at the end:
// a thread that holds tiles is slower to switch.
class TileRegisters {
 public:
  explicit TileRegisters(int64_t row_bytes) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = kTileSide;
    config.bytes[4] = config.bytes[5] = static_cast<uint16_t>(row_bytes);
    config.rows[6] = config.rows[7] = static_cast<uint8_t>(row_bytes / 4);
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// What was stored before is in memory: the compiler does not know that tiles are loaded from there.
inline void before_tile_loads() { asm volatile("" ::: "memory"); }

// The columns of a group that one instruction multiplies, if they are bytes.
inline int64_t step_of(int64_t group) { return group % 64 == 0 ? 64 : 32; }

// Both bytes of one row's numbers of a group, into the tiles of a vector of rows: [steps][2: high, low][words][16 rows]. If they are
// interleaved, the second half of each 64 columns stands between the first, as codes of 4 bits come out of their words.
inline void place_bytes(const int16_t* numbers, int64_t group, bool is_interleaved, uint8_t* to) {
  const int64_t step = step_of(group), tile = step * kTileSide;
  const __m512i rows = _mm512_mullo_epi32(_mm512_set1_epi32(64), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  for (int64_t k = 0; k < group; k += step, to += 2 * tile) {
    const __m512i first = _mm512_loadu_si512(numbers + k);
    if (step == 32) {
      const __m512i high = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_srai_epi16(first, 8))), low = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(first));
      _mm512_mask_i32scatter_epi32(to, 0xff, rows, high, 1);
      _mm512_mask_i32scatter_epi32(to + tile, 0xff, rows, low, 1);
      continue;
    }
    const __m512i second = _mm512_loadu_si512(numbers + k + 32), bytes = _mm512_set1_epi16(0xff);
    __m512i high, low;
    if (is_interleaved) {
      high = _mm512_or_si512(_mm512_srli_epi16(first, 8), _mm512_andnot_si512(bytes, second));
      low = _mm512_or_si512(_mm512_and_si512(first, bytes), _mm512_slli_epi16(second, 8));
    } else {
      const auto both = [](__m512i a, __m512i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1); };
      high = both(_mm512_srai_epi16(first, 8), _mm512_srai_epi16(second, 8));
      low = both(first, second);
    }
    _mm512_i32scatter_epi32(to, rows, high, 1);
    _mm512_i32scatter_epi32(to + tile, rows, low, 1);
  }
}

}  // namespace

#else

namespace {

constexpr bool has_tiles() { return false; }

}  // namespace

#endif
