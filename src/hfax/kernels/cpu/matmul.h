// Products of two large bfloat16 matrices, for prompts and for training.
//
// The limit is the processor's products of bfloat16 pairs. XLA's own are near it where both matrices are read along the axis that is
// summed, or the second across it; it converts the others to float32, which is half as fast, and the results of all of them go through
// memory as float32. Here the order of the axes only decides how tiles are packed.
//
// A tile of kTileRows x kTileColumns is a piece of work: for kDepth of the summed axis at a time, both sides are packed so that a word
// holds two numbers that follow each other on that axis, and blocks of 6 rows with 64 columns are summed in registers.

#pragma once

#include "lanes.h"

#if defined(__AVX512BF16__)

namespace {

constexpr int64_t kTileRows = 192, kTileColumns = 192;
constexpr int64_t kDepth = 320, kPairs = kDepth / 2;
constexpr int64_t kBlockRows = 6, kRowGroup = 48, kBlockColumns = 64;

// One side of a product: `count` rows of `depth` numbers that are summed over, or, turned, `depth` rows of `count`. Rows begin `stride`
// numbers after each other.
struct Side {
  const Bf16* data;
  int64_t count, depth, stride;
  bool turned;
};

struct Scratch {
  alignas(64) float sums[kTileRows * kTileColumns];
  alignas(64) uint32_t rows[kTileRows * kPairs];
  alignas(64) uint32_t columns[kTileColumns * kPairs];
};

inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << std::clamp<int64_t>(count, 0, 16)) - 1); }
inline __mmask32 first_halves(int64_t count) {
  return static_cast<__mmask32>((uint64_t{1} << std::clamp<int64_t>(count, 0, 32)) - 1);
}

// `count` of a side's rows from `begin`, and `depth` of the summed axis from `from`, in groups of kGroup rows: [groups][pairs][kGroup]
// words. What is not there is 0.
template <int64_t kGroup>
void pack(const Side& side, int64_t begin, int64_t count, int64_t from, int64_t depth, uint32_t* to) {
  const int64_t pairs = (depth + 1) / 2;
  for (int64_t group = 0; group < count; group += kGroup, to += pairs * kGroup) {
    const int64_t here = std::min(count - group, kGroup);
    if (side.turned) {
      const Bf16* data = side.data + from * side.stride + begin + group;
      for (int64_t k = 0; k < depth; k += 2, data += 2 * side.stride) {
        for (int64_t i = 0; i < kGroup; i += 16) {
          const __mmask16 lanes = first_lanes(here - i);
          const __m256i low = _mm256_maskz_loadu_epi16(lanes, data + i);
          const __m256i high = _mm256_maskz_loadu_epi16(k + 1 < depth ? lanes : 0, data + side.stride + i);
          const __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
          _mm512_store_si512(to + k / 2 * kGroup + i, both);
        }
      }
      continue;
    }
    for (int64_t i = 0; i < kGroup; i += 16) {
      const Bf16* data = side.data + (begin + group + i) * side.stride + from;
      for (int64_t k = 0; k < depth; k += 32) {
        __m512i words[16];
        const __mmask32 halves = first_halves(depth - k);
        for (int r = 0; r < 16; ++r) words[r] = _mm512_maskz_loadu_epi16(i + r < here ? halves : 0, data + r * side.stride + k);
        turn(words);
        const int64_t last = std::min<int64_t>(16, pairs - k / 2);
        for (int64_t p = 0; p < last; ++p) _mm512_store_si512(to + (k / 2 + p) * kGroup + i, words[p]);
      }
    }
  }
}

// A block's sums over some pairs, added to those in `sums` unless they are `kFresh`. Steps are in numbers.
template <bool kFresh>
void add_block(const Bf16* rows, int64_t row_step, int64_t pair_step, const uint32_t* columns, int64_t pairs, float* sums) {
  __m512 total[kBlockRows][4];
  for (int r = 0; r < kBlockRows; ++r)
    for (int v = 0; v < 4; ++v) total[r][v] = kFresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * kTileColumns + 16 * v);
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh c[4];
    for (int v = 0; v < 4; ++v) c[v] = (__m512bh)_mm512_load_si512(columns + k * kBlockColumns + 16 * v);
    for (int r = 0; r < kBlockRows; ++r) {
      int32_t word;
      std::memcpy(&word, rows + r * row_step + k * pair_step, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(word);
      for (int v = 0; v < 4; ++v) total[r][v] = _mm512_dpbf16_ps(total[r][v], both, c[v]);
    }
  }
  for (int r = 0; r < kBlockRows; ++r)
    for (int v = 0; v < 4; ++v) _mm512_store_ps(sums + r * kTileColumns + 16 * v, total[r][v]);
}

inline void store_lanes(__m512 v, int64_t count, float* out) { _mm512_mask_storeu_ps(out, first_lanes(count), v); }
inline void store_lanes(__m512 v, int64_t count, Bf16* out) {
  _mm256_mask_storeu_epi16(out, first_lanes(count), (__m256i)_mm512_cvtneps_pbh(v));
}

// A tile of sums over the whole depth, into `scratch.sums` with rows of kTileColumns.
inline void sum_tile(const Side& a, int64_t row, int64_t num_rows, const Side& b, int64_t column, int64_t num_columns, Scratch& scratch) {
  // rows that are 4 KB apart push each other out of the caches
  const bool packs_rows = a.turned || a.depth % 2 || a.stride % 2048 == 0;
  const int64_t packed_from = packs_rows ? 0 : num_rows / kBlockRows * kBlockRows;  // those before are read where they are
  for (int64_t from = 0; from < a.depth; from += kDepth) {
    const int64_t depth = std::min(kDepth, a.depth - from), pairs = (depth + 1) / 2;
    pack<kBlockColumns>(b, column, num_columns, from, depth, scratch.columns);
    pack<kRowGroup>(a, row + packed_from, num_rows - packed_from, from, depth, scratch.rows);
    for (int64_t c = 0; c < num_columns; c += kBlockColumns) {
      const uint32_t* columns = scratch.columns + c * pairs;
      for (int64_t r = 0; r < num_rows; r += kBlockRows) {
        const bool packed = r >= packed_from;
        const int64_t at = r - packed_from, row_step = packed ? 2 : a.stride, pair_step = packed ? 2 * kRowGroup : 2;
        const Bf16* rows = packed ? reinterpret_cast<const Bf16*>(scratch.rows + at / kRowGroup * kRowGroup * pairs + at % kRowGroup)
                                  : a.data + (row + r) * a.stride + from;
        float* sums = scratch.sums + r * kTileColumns + c;
        if (from == 0) {
          add_block<true>(rows, row_step, pair_step, columns, pairs, sums);
        } else {
          add_block<false>(rows, row_step, pair_step, columns, pairs, sums);
        }
      }
    }
  }
}

inline Scratch& scratch_of_thread() {
  static thread_local std::unique_ptr<Scratch> scratch;
  if (!scratch) scratch.reset(new Scratch);
  return *scratch;
}

// out [rows, columns] = each row of `a` with each of `b`, in float32.
template <typename Out>
void multiply_matrices(ffi::ThreadPool& pool, const Side& a, const Side& b, Out* out) {
  const int64_t bands = (a.count + kTileRows - 1) / kTileRows, strips = (b.count + kTileColumns - 1) / kTileColumns;
  parallel(pool, bands * strips, [&](int64_t piece) {
    Scratch& scratch = scratch_of_thread();
    // pieces that follow each other share the rows or columns of the longer side, which are then near
    const int64_t row = (bands < strips ? piece % bands : piece / strips) * kTileRows;
    const int64_t column = (bands < strips ? piece / bands : piece % strips) * kTileColumns;
    const int64_t num_rows = std::min(kTileRows, a.count - row), num_columns = std::min(kTileColumns, b.count - column);
    sum_tile(a, row, num_rows, b, column, num_columns, scratch);
    for (int64_t r = 0; r < num_rows; ++r) {
      Out* to = out + (row + r) * b.count + column;
      for (int64_t c = 0; c < num_columns; c += 16)
        store_lanes(_mm512_load_ps(scratch.sums + r * kTileColumns + c), num_columns - c, to + c);
    }
  });
}

// The same on one thread, with rows of `out` that begin `stride` numbers after each other.
template <bool kAdds>
void multiply_here(const Side& a, const Side& b, float* out, int64_t stride) {
  Scratch& scratch = scratch_of_thread();
  for (int64_t row = 0; row < a.count; row += kTileRows) {
    const int64_t num_rows = std::min(kTileRows, a.count - row);
    for (int64_t column = 0; column < b.count; column += kTileColumns) {
      const int64_t num_columns = std::min(kTileColumns, b.count - column);
      sum_tile(a, row, num_rows, b, column, num_columns, scratch);
      for (int64_t r = 0; r < num_rows; ++r) {
        float* to = out + (row + r) * stride + column;
        for (int64_t c = 0; c < num_columns; c += 16) {
          __m512 sums = _mm512_load_ps(scratch.sums + r * kTileColumns + c);
          if (kAdds) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(first_lanes(num_columns - c), to + c));
          store_lanes(sums, num_columns - c, to + c);
        }
      }
    }
  }
}

inline const Bf16* numbers_of(const ffi::Buffer<ffi::BF16>& x) { return reinterpret_cast<const Bf16*>(x.untyped_data()); }

// a [M, K] and b [N, K], or turned [K, M] and [K, N], bfloat16 -> [M, N] of float32 or bfloat16.
ffi::Error matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> a, ffi::Buffer<ffi::BF16> b, ffi::Result<ffi::AnyBuffer> out, bool turn_a,
                  bool turn_b) {
  const auto side = [](ffi::Buffer<ffi::BF16>& x, bool turned) {
    const auto shape = x.dimensions();
    return Side{numbers_of(x), shape[turned ? 1 : 0], shape[turned ? 0 : 1], shape[1], turned};
  };
  const Side rows = side(a, turn_a), columns = side(b, turn_b);
  if (rows.depth != columns.depth || rows.depth == 0) return ffi::Error::InvalidArgument("hfax: the summed axes do not fit");
  if (out->element_type() == ffi::BF16) {
    multiply_matrices(pool, rows, columns, reinterpret_cast<Bf16*>(out->untyped_data()));
  } else {
    multiply_matrices(pool, rows, columns, reinterpret_cast<float*>(out->untyped_data()));
  }
  return ffi::Error::Success();
}

}  // namespace

#endif
