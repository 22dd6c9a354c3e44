// Products of two large matrices, for prompts and for training.
//
// The limit is the processor's products: of bfloat16 pairs where it has them, else of floats. XLA's own are near it where both matrices
// are read along the axis that is summed, or the second across it; it converts others to float32 first, and the results of all of them go
// through memory as float32. Here the order of the axes only decides how tiles are packed.
//
// A tile of kTileRows x kTileColumns is a piece of work: for kDepth of the summed axis at a time, both sides are packed into words, and
// blocks of 6 rows with kBlockColumns are summed in registers. A word holds two bfloat16 numbers that follow each other on the summed
// axis where the processor multiplies such pairs, else one float. Each result is one chain of fused additions along that axis, so it does
// not depend on how many rows there are.

#pragma once

#include "matmul_amx.h"
#include "sides.h"

namespace {

constexpr int64_t kTileRows = 192, kTileColumns = 192;
constexpr int64_t kBlockRows = 6, kRowGroup = 48;

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// How a side of numbers of type T is packed and multiplied: as pairs of bfloat16 here, as floats below.
template <typename T>
constexpr bool kInPairs = kHasPairs && std::is_same_v<T, Bf16>;

template <bool kPairs>
struct Tiles {
  static constexpr int64_t kDepth = kLanes == 16 ? 96 : 192;  // a packed block of columns fits the nearest cache
  static constexpr int64_t kVectors = kPanel, kBlockColumns = kPanel * kLanes;

  // The numbers of a word of bfloat16 pairs, or of a float, of each lane.
  static void store_numbers(Ints words, const float*, int64_t, int64_t, int64_t, float* to) { store_words(words, to); }
  static void store_numbers(Ints words, const Bf16*, int64_t group, int64_t k, int64_t depth, float* to) {
    store_words(words << 16, to);
    if (k + 1 < depth) store_words(words & (Ints{} - 0x10000), to + group);
  }

  // `count` of a side's rows from `begin`, and `depth` of the summed axis from `from`, in groups of kGroup rows: [groups][depth][kGroup].
  // What is not there is 0.
  template <int64_t kGroup, typename T>
  static void pack(const SideOf<T>& side, int64_t begin, int64_t count, int64_t from, int64_t depth, float* to) {
    // the same rows' next numbers, or the first of the rows to come, are read next
    const int64_t next = from + depth < side.depth ? depth : kGroup * side.stride - from;
    constexpr int64_t kNumbers = 4 / sizeof(T);  // in a word
    for (int64_t first = 0; first < count; first += kGroup, to += depth * kGroup) {
      const int64_t here = std::min(count - first, kGroup);
      if (side.turned) {
        const T* data = side.data + from * side.stride + begin + first;
        for (int64_t k = 0; k < depth; ++k, data += side.stride)
          for (int64_t i = 0; i < kGroup; i += kLanes) store_some(load_some(data + i, here - i), kLanes, to + k * kGroup + i);
        continue;
      }
      for (int64_t i = 0; i < kGroup; i += kLanes) {
        const T* data = side.data + (begin + first + i) * side.stride + from;
        for (int64_t k = 0; k < depth; k += kNumbers * kLanes) {
          const int64_t columns = std::min(depth - k, kNumbers * kLanes), rows = std::clamp<int64_t>(here - i, 0, kLanes);
          Ints words[kLanes];
          if (rows == kLanes && columns == kNumbers * kLanes) {
            HFAX_UNROLL for (int64_t r = 0; r < kLanes; ++r) words[r] = load_words(data + r * side.stride + k);
            if (k * sizeof(T) % 64 == 0)
              for (int64_t r = 0; r < kLanes; ++r) __builtin_prefetch(data + r * side.stride + k + next);
            turn(words);
            HFAX_UNROLL for (int64_t w = 0; w < kLanes; ++w)
              store_numbers(words[w], data, kGroup, k + w * kNumbers, depth, to + (k + w * kNumbers) * kGroup + i);
            continue;
          }
          int32_t some[kLanes * kLanes] = {};
          for (int64_t r = 0; r < rows; ++r) std::memcpy(some + r * kLanes, data + r * side.stride + k, columns * sizeof(T));
          for (int64_t r = 0; r < kLanes; ++r) words[r] = load_words(some + r * kLanes);
          turn(words);
          for (int64_t w = 0; w * kNumbers < columns; ++w)
            store_numbers(words[w], data, kGroup, k + w * kNumbers, depth, to + (k + w * kNumbers) * kGroup + i);
        }
      }
    }
  }

  // The sums of R rows with a block of columns, added to those in `sums` unless they are fresh.
  template <int R>
  static void add_block(const float* rows, const float* columns, int64_t depth, bool is_fresh, float* sums) {
    Floats total[R][kVectors];
    HFAX_UNROLL for (int r = 0; r < R; ++r)
      HFAX_UNROLL for (int v = 0; v < kVectors; ++v) total[r][v] = is_fresh ? Floats{} : load(sums + r * kTileColumns + v * kLanes);
    for (int64_t k = 0; k < depth; ++k) {
      Floats c[kVectors];
      HFAX_UNROLL for (int v = 0; v < kVectors; ++v) c[v] = load(columns + k * kBlockColumns + v * kLanes);
      HFAX_UNROLL for (int r = 0; r < R; ++r) {
        const Floats both = Floats{} + rows[k * kRowGroup + r];
        HFAX_UNROLL for (int v = 0; v < kVectors; ++v) total[r][v] = fused(both, c[v], total[r][v]);
      }
    }
    HFAX_UNROLL for (int r = 0; r < R; ++r)
      HFAX_UNROLL for (int v = 0; v < kVectors; ++v) store_floats(total[r][v], sums + r * kTileColumns + v * kLanes);
  }

  static void add_rows(int64_t count, const float* rows, const float* columns, int64_t depth, bool is_fresh, float* sums) {
    if (count > 4) return add_block<kBlockRows>(rows, columns, depth, is_fresh, sums);
    if (count > 2) return add_block<4>(rows, columns, depth, is_fresh, sums);
    return add_block<2>(rows, columns, depth, is_fresh, sums);
  }
};

template <bool kPairs>
struct Scratch {
  using T = Tiles<kPairs>;
  alignas(64) float sums[kTileRows * kTileColumns];
  alignas(64) float rows[kTileRows * T::kDepth];
  alignas(64) float columns[T::kBlockColumns * T::kDepth];
};

#if defined(__AVX512BF16__)
template <>
struct Tiles<true> {
  static constexpr int64_t kDepth = 320, kPairs = kDepth / 2;
  static constexpr int64_t kBlockColumns = 64;

  // `count` of a side's rows from `begin`, and `depth` of the summed axis from `from`, in groups of kGroup rows: [groups][pairs][kGroup]
  // words. What is not there is 0.
  template <int64_t kGroup>
  static void pack(const Side& side, int64_t begin, int64_t count, int64_t from, int64_t depth, uint32_t* to) {
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
  static void add_block(const Bf16* rows, int64_t row_step, int64_t pair_step, const uint32_t* columns, int64_t pairs, float* sums) {
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
};

template <>
struct Scratch<true> {
  alignas(64) float sums[kTileRows * kTileColumns];
  alignas(64) uint32_t rows[kTileRows * Tiles<true>::kPairs];
  alignas(64) uint32_t columns[kTileColumns * Tiles<true>::kPairs];
};

// A tile of sums over the whole depth, into `scratch.sums` with rows of kTileColumns.
inline void sum_tile(const Side& a, int64_t row, int64_t num_rows, const Side& b, int64_t column, int64_t num_columns, Scratch<true>& scratch) {
  using T = Tiles<true>;
  // rows that are 4 KB apart push each other out of the caches
  const bool packs_rows = a.turned || a.depth % 2 || a.stride % 2048 == 0;
  const int64_t packed_from = packs_rows ? 0 : num_rows / kBlockRows * kBlockRows;  // those before are read where they are
  for (int64_t from = 0; from < a.depth; from += T::kDepth) {
    const int64_t depth = std::min(T::kDepth, a.depth - from), pairs = (depth + 1) / 2;
    T::pack<T::kBlockColumns>(b, column, num_columns, from, depth, scratch.columns);
    T::pack<kRowGroup>(a, row + packed_from, num_rows - packed_from, from, depth, scratch.rows);
    for (int64_t c = 0; c < num_columns; c += T::kBlockColumns) {
      const uint32_t* columns = scratch.columns + c * pairs;
      for (int64_t r = 0; r < num_rows; r += kBlockRows) {
        const bool packed = r >= packed_from;
        const int64_t at = r - packed_from, row_step = packed ? 2 : a.stride, pair_step = packed ? 2 * kRowGroup : 2;
        const Bf16* rows = packed ? reinterpret_cast<const Bf16*>(scratch.rows + at / kRowGroup * kRowGroup * pairs + at % kRowGroup)
                                  : a.data + (row + r) * a.stride + from;
        float* sums = scratch.sums + r * kTileColumns + c;
        if (from == 0) {
          T::add_block<true>(rows, row_step, pair_step, columns, pairs, sums);
        } else {
          T::add_block<false>(rows, row_step, pair_step, columns, pairs, sums);
        }
      }
    }
  }
}
#endif

template <typename A, typename B>
void sum_tile(const SideOf<A>& a, int64_t row, int64_t num_rows, const SideOf<B>& b, int64_t column, int64_t num_columns, Scratch<false>& scratch) {
  using T = Tiles<false>;
  for (int64_t from = 0; from < a.depth; from += T::kDepth) {
    const int64_t depth = std::min(T::kDepth, a.depth - from);
    T::template pack<kRowGroup>(a, row, num_rows, from, depth, scratch.rows);
    for (int64_t c = 0; c < num_columns; c += T::kBlockColumns) {
      T::template pack<T::kBlockColumns>(b, column + c, std::min(num_columns - c, T::kBlockColumns), from, depth, scratch.columns);
      for (int64_t r = 0; r < num_rows; r += kBlockRows) {
        const float* rows = scratch.rows + r / kRowGroup * kRowGroup * depth + r % kRowGroup;
        T::add_rows(num_rows - r, rows, scratch.columns, depth, from == 0, scratch.sums + r * kTileColumns + c);
      }
    }
  }
}

template <bool kPairs>
Scratch<kPairs>& scratch_of_thread() {
  static thread_local std::unique_ptr<Scratch<kPairs>> scratch;
  if (!scratch) scratch.reset(new Scratch<kPairs>);
  return *scratch;
}

// out [rows, columns] = each row of `a` with each of `b`, in float32.
template <typename A, typename B, typename Out>
void multiply_matrices(ffi::ThreadPool& pool, const SideOf<A>& a, const SideOf<B>& b, Out* out) {
#if defined(HFAX_AMX)
  if constexpr (kInPairs<A> && kInPairs<B>)
    if (has_tiles()) return multiply_by_tiles(pool, a, b, out);
#endif
  // a few large pieces would keep some threads waiting
  const int64_t tile_columns = b.count < 8 * kTileColumns * num_threads(pool) ? kTileColumns / 3 : kTileColumns;
  const int64_t bands = (a.count + kTileRows - 1) / kTileRows, strips = (b.count + tile_columns - 1) / tile_columns;
  parallel(pool, bands * strips, [&](int64_t piece) {
    auto& scratch = scratch_of_thread<kInPairs<A> && kInPairs<B>>();
    // pieces that follow each other share the rows or columns of the longer side, which are then near
    const int64_t row = (bands < strips ? piece % bands : piece / strips) * kTileRows;
    const int64_t column = (bands < strips ? piece / bands : piece % strips) * tile_columns;
    const int64_t num_rows = std::min(kTileRows, a.count - row), num_columns = std::min(tile_columns, b.count - column);
    sum_tile(a, row, num_rows, b, column, num_columns, scratch);
    for (int64_t r = 0; r < num_rows; ++r) {
      Out* to = out + (row + r) * b.count + column;
      for (int64_t c = 0; c < num_columns; c += kLanes) store_some(load(scratch.sums + r * kTileColumns + c), num_columns - c, to + c);
    }
  });
}

// The same on one thread, with rows of `out` that begin `stride` numbers after each other.
template <bool kAdds, typename T>
void multiply_here(const SideOf<T>& a, const SideOf<T>& b, float* out, int64_t stride) {
#if defined(HFAX_AMX)
  if constexpr (kInPairs<T>)
    if (has_tiles()) return multiply_here_by_tiles<kAdds>(a, b, out, stride);
#endif
  auto& scratch = scratch_of_thread<kInPairs<T>>();
  for (int64_t row = 0; row < a.count; row += kTileRows) {
    const int64_t num_rows = std::min(kTileRows, a.count - row);
    for (int64_t column = 0; column < b.count; column += kTileColumns) {
      const int64_t num_columns = std::min(kTileColumns, b.count - column);
      sum_tile(a, row, num_rows, b, column, num_columns, scratch);
      for (int64_t r = 0; r < num_rows; ++r) {
        float* to = out + (row + r) * stride + column;
        for (int64_t c = 0; c < num_columns; c += kLanes) {
          Floats sums = load(scratch.sums + r * kTileColumns + c);
          if (kAdds) sums += load_some(to + c, num_columns - c);
          store_some(sums, num_columns - c, to + c);
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

