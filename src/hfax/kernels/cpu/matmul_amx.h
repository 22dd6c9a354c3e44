// Products of two bfloat16 matrices by tiles of 16 x 16 sums: see amx.h.
//
// One side is packed once for all threads, 16 of its rows beside each other. Of the other a thread packs some rows at a time, and multiplies
// them with up to 512 rows of the first. Each result is one chain of sums along the summed axis, 32 numbers at a time, so it depends neither
// on how many rows there are nor on which side is which.

#pragma once

#include "amx.h"
#include "sides.h"

#if defined(HFAX_AMX)

namespace {

constexpr int64_t kStepDepth = 32;          // numbers of the summed axis in a tile
constexpr int64_t kStepsTogether = 16;      // whose tiles of two rows' stay in the nearest cache
constexpr int64_t kTilePairs = 4;           // pairs of tiles of rows that a thread packs at a time
constexpr int64_t kVectorsTogether = 32;    // vectors of 16 packed rows that they are multiplied with

// The pairs of 16 rows from `row`, up to `last`, and of 32 numbers of the summed axis from `from`; what is not there is 0.
// [rows][pairs], or [pairs][rows] if `kAcross`.
template <bool kAcross>
inline void pack_tile(const Side& side, int64_t row, int64_t last, int64_t from, uint32_t* to) {
  __m512i words[16];
  const int64_t rows = last - row, depth = side.depth - from;
  if (side.turned) {
    const Bf16* data = side.data + from * side.stride + row;
    const __mmask16 lanes = first_lanes(rows);
    for (int64_t p = 0; p < 16; ++p, data += 2 * side.stride) {
      const __m256i low = _mm256_maskz_loadu_epi16(2 * p < depth ? lanes : 0, data);
      const __m256i high = _mm256_maskz_loadu_epi16(2 * p + 1 < depth ? lanes : 0, data + side.stride);
      words[p] = _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
    }
  } else {
    const Bf16* data = side.data + row * side.stride + from;
    const __mmask32 halves = first_halves(depth);
    for (int64_t r = 0; r < 16; ++r, data += side.stride) {
      words[r] = _mm512_maskz_loadu_epi16(r < rows ? halves : 0, data);
      __builtin_prefetch(data + 16 * side.stride, 0, 2);  // of the rows to come
    }
  }
  if (kAcross != side.turned) turn(words);
  for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + 16 * i, words[i]);
}

// A side whose rows stand beside each other: [vectors of 16 rows][steps][pairs][16].
struct Across {
  const uint32_t* words;

  static int64_t steps(int64_t depth) { return (depth + kStepDepth - 1) / kStepDepth; }
  static int64_t vectors(int64_t count) { return (count + 15) / 16; }
  static int64_t size(const Side& side) { return vectors(side.count) * steps(side.depth) * kTileWords; }

  static void pack_vector(const Side& side, int64_t vector, uint32_t* words) {
    const int64_t all = steps(side.depth);
    for (int64_t s = 0; s < all; ++s)
      pack_tile<true>(side, 16 * vector, side.count, s * kStepDepth, words + (vector * all + s) * kTileWords);
  }
};

struct TileScratch {
  alignas(64) uint32_t rows[kTilePairs * kStepsTogether * 2 * kTileWords];
  alignas(64) float sums[kTilePairs * kVectorsTogether * 2 * kTileWords];
};

inline TileScratch& tile_scratch() {
  static thread_local std::unique_ptr<TileScratch> scratch;
  if (!scratch) scratch.reset(new TileScratch);
  return *scratch;
}

// Sums of two tiles of rows, [steps][2], with one vector or two, [steps] each, added to those in memory unless they are fresh.
template <bool kIsPair>
inline void add_tiles(const uint32_t* rows, const uint32_t* first, const uint32_t* second, int64_t steps, bool is_fresh, float* sums, float* second_sums) {
  if (is_fresh) {
    _tile_zero(0);
    _tile_zero(1);
    if (kIsPair) _tile_zero(2);
    if (kIsPair) _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kTileWords, 64);
    if (kIsPair) _tile_loadd(2, second_sums, 64);
    if (kIsPair) _tile_loadd(3, second_sums + kTileWords, 64);
  }
  for (int64_t s = 0; s < steps; ++s, rows += 2 * kTileWords, first += kTileWords, second += kTileWords) {
    _tile_loadd(4, rows, 64);
    _tile_loadd(6, first, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, rows + kTileWords, 64);
    _tile_dpbf16ps(1, 5, 6);
    if (kIsPair) {
      _tile_loadd(7, second, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileWords, 64);
  if (kIsPair) _tile_stored(2, second_sums, 64);
  if (kIsPair) _tile_stored(3, second_sums + kTileWords, 64);
}

// Rows `begin` to `end` of a side with vectors `from` to `to` of a packed one, at most kVectorsTogether. `use(row, vector, sums)` takes the
// sums of 16 rows with a vector, [rows][16].
template <typename Use>
void multiply_tiles(const Side& side, int64_t begin, int64_t end, const Across& packed, int64_t from, int64_t to, const Use& use) {
  TileScratch& scratch = tile_scratch();
  const int64_t all = Across::steps(side.depth);
  const auto sums = [&](int64_t pair, int64_t vector) { return scratch.sums + (pair * kVectorsTogether + vector - from) * 2 * kTileWords; };
  const auto words = [&](int64_t vector, int64_t step) { return packed.words + (vector * all + step) * kTileWords; };
  for (int64_t first = begin; first < end; first += kTilePairs * 2 * kTileSide) {
    const int64_t pairs = std::min(kTilePairs, (end - first + 2 * kTileSide - 1) / (2 * kTileSide));
    for (int64_t step = 0; step < all; step += kStepsTogether) {
      const int64_t steps = std::min(kStepsTogether, all - step);
      for (int64_t tile = 0; tile < 2 * pairs; ++tile)
        for (int64_t s = 0; s < steps; ++s)
          pack_tile<false>(side, first + tile * kTileSide, end, (step + s) * kStepDepth,
                           scratch.rows + ((tile / 2 * kStepsTogether + s) * 2 + tile % 2) * kTileWords);
      before_tile_loads();
      for (int64_t v = from; v < to; v += 2) {
        for (int64_t pair = 0; pair < pairs; ++pair) {
          const uint32_t* rows = scratch.rows + pair * kStepsTogether * 2 * kTileWords;
          if (v + 1 < to) {
            add_tiles<true>(rows, words(v, step), words(v + 1, step), steps, step == 0, sums(pair, v), sums(pair, v + 1));
          } else {
            add_tiles<false>(rows, words(v, step), words(v, step), steps, step == 0, sums(pair, v), nullptr);
          }
        }
      }
    }
    for (int64_t v = from; v < to; ++v)
      for (int64_t row = first; row < std::min(end, first + pairs * 2 * kTileSide); row += kTileSide) {
        const int64_t tile = (row - first) / kTileSide;
        use(row, v, sums(tile / 2, v) + tile % 2 * kTileWords);
      }
  }
}

// Sums of 16 rows with 16 of the other side, those of each of the other's rows beside each other.
inline void turn_sums(const float* sums, Floats (&out)[16]) {
  __m512i words[16];
  for (int64_t i = 0; i < 16; ++i) words[i] = _mm512_load_si512(sums + 16 * i);
  turn(words);
  for (int64_t i = 0; i < 16; ++i) out[i] = (Floats)words[i];
}

// Whether the rows of `a` are packed beside each other, and not those of `b`: a turned side is packed so without turning it again.
inline bool packs_first(const Side& a, const Side& b) { return a.turned != b.turned ? a.turned : a.count <= b.count; }

// `store(row, column, sums)` takes the sums of a row of `a` with 16 of `b` from `column` on.
template <typename Store>
void store_tile(bool is_first_packed, int64_t row, int64_t vector, const float* sums, int64_t count, const Store& store) {
  if (!is_first_packed) {
    for (int64_t r = 0; r < std::min(kTileSide, count - row); ++r) store(row + r, 16 * vector, load(sums + 16 * r));
    return;
  }
  Floats turned[16];
  turn_sums(sums, turned);
  for (int64_t r = 0; r < std::min<int64_t>(16, count - 16 * vector); ++r) store(16 * vector + r, row, turned[r]);
}

// out [rows of a, rows of b], in float32 sums.
template <typename Out>
void multiply_by_tiles(ffi::ThreadPool& pool, const Side& a, const Side& b, Out* out) {
  const bool is_first = packs_first(a, b);
  const Side &beside = is_first ? a : b, &rows = is_first ? b : a;
  const int64_t vectors = Across::vectors(beside.count);
  const Memory<uint32_t, 2> memory(Across::size(beside));
  const auto pack = [&](int64_t vector) { Across::pack_vector(beside, vector, memory.data()); };
  if (vectors < 4) {  // less work than waking a thread
    for (int64_t v = 0; v < vectors; ++v) pack(v);
  } else {
    parallel(pool, vectors, pack);
  }
  const Across packed{memory.data()};
  constexpr int64_t kMost = kTilePairs * 2 * kTileSide;
  const int64_t chunk = rows.count < 8 * kMost * num_threads(pool) ? kMost / 2 : kMost;
  const int64_t chunks = (rows.count + chunk - 1) / chunk, blocks = (vectors + kVectorsTogether - 1) / kVectorsTogether;
  parallel(pool, chunks * blocks, [&](int64_t piece) {  // pieces that follow each other share packed rows
    const TileRegisters registers(64);
    const int64_t begin = piece % chunks * chunk, from = piece / chunks * kVectorsTogether;
    multiply_tiles(rows, begin, std::min(rows.count, begin + chunk), packed, from, std::min(vectors, from + kVectorsTogether),
                   [&](int64_t row, int64_t vector, const float* sums) {
                     store_tile(is_first, row, vector, sums, a.count, [&](int64_t r, int64_t c, Floats each) {
                       store_some(each, b.count - c, out + r * b.count + c);
                     });
                   });
  });
}

// The same on one thread, with rows of `out` that begin `stride` numbers after each other.
template <bool kAdds>
void multiply_here_by_tiles(const Side& a, const Side& b, float* out, int64_t stride) {
  const bool is_first = packs_first(a, b);
  const Side &beside = is_first ? a : b, &rows = is_first ? b : a;
  const int64_t vectors = Across::vectors(beside.count);
  const Memory<uint32_t, 3> memory(Across::size(beside));
  for (int64_t v = 0; v < vectors; ++v) Across::pack_vector(beside, v, memory.data());
  const Across packed{memory.data()};
  const TileRegisters registers(64);
  for (int64_t from = 0; from < vectors; from += kVectorsTogether)
    multiply_tiles(rows, 0, rows.count, packed, from, std::min(vectors, from + kVectorsTogether), [&](int64_t row, int64_t vector, const float* sums) {
      store_tile(is_first, row, vector, sums, a.count, [&](int64_t r, int64_t c, Floats each) {
        float* to = out + r * stride + c;
        store_some(kAdds ? each + load_some(to, b.count - c) : each, b.count - c, to);
      });
    });
}

}  // namespace

#endif
