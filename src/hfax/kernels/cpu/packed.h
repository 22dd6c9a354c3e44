// Products of activations with 8-bit and 4-bit weights, for any number of rows, on every instruction set. Those of float8 are in fp8.h.
//
// Activations are rounded to 16-bit integers with a scale for each group of columns, an error of at most 2^-16 of the group's largest,
// a 200th of the weights' own. A group's products are added as integers, which is exact, and the groups in their order, so a row's
// numbers depend neither on the rows beside it nor on the instruction set. A vector's lanes are rows of the weight: a block of them is
// unpacked into pairs of 16-bit integers, which stay in the nearest cache for all rows of activations.

#pragma once

#include <new>

#include "matmul.h"

namespace {

constexpr int64_t kLeastGroup = 16;       // columns
constexpr int64_t kMaxGroup = 512;        // sums of more could exceed 32 bits
constexpr int64_t kBlockDepth = 512;      // columns that are unpacked at a time
constexpr int64_t kPackedChunk = 256 << 10;  // bytes of weights that a thread takes at a time
constexpr int64_t kRowsTogether = 192;    // rows of activations that pass over a block before the next is unpacked
constexpr int64_t kTiledFrom = 6;        // rows of activations that fill enough of a tile

// What a code means, numbered as in calls.py. Codes of four bits are multiplied as numbers of at least 0: integers plus 8, and twice the
// numbers of float4_e2m1 plus 12.
enum Encoding : int64_t { kInt8, kInt4, kFp8, kFp4 };

constexpr int bits_of(Encoding code) { return code == kInt8 || code == kFp8 ? 8 : 4; }
constexpr int32_t added_to(Encoding code) { return code == kInt4 ? 8 : code == kFp4 ? 12 : 0; }

// Scales or offsets, [rows, groups] of bfloat16, float16 or float32.
struct OfGroups {
  const uint8_t* data;
  ffi::DataType type;

  explicit operator bool() const { return data != nullptr; }
  int64_t bytes() const { return type == ffi::F32 ? 4 : 2; }
  OfGroups from(int64_t number) const { return {data ? data + number * bytes() : nullptr, type}; }
};

// A matrix of packed weights, whose numbers are those of the codes times a scale plus an offset, of each group of columns. 4 bits: of each
// 128 columns, word i of 32 little-endian words of 16 bits holds columns i, 32 + i, 64 + i and 96 + i, from its lowest bits up.
template <Encoding kCode>
struct Packed {
  static constexpr Encoding code = kCode;
  const uint8_t* values;
  OfGroups scale, offset;
  int64_t width, group;

  int64_t bytes_per_row() const { return width * bits_of(kCode) / 8; }
  int64_t groups() const { return width / group; }
};

// Memory that vectors are read from without crossing lines of the cache.
template <typename T>
struct Aligned {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
  friend bool operator==(const Aligned&, const Aligned&) { return true; }
  friend bool operator!=(const Aligned&, const Aligned&) { return false; }
};

// Rows of activations as integers: of each block of up to 6 rows, pairs of columns as words, [width / 2][rows of the block].
struct Rounded {
  std::vector<int32_t, Aligned<int32_t>> pairs;
  std::vector<float> scale;      // [rows, groups]
  std::vector<int32_t> start;    // [rows, groups]: what a group's sum begins with, since codes of 4 bits are numbers of at least 0
  std::vector<float> total;      // [rows, groups]: the sums of the activations, if the weight has offsets
  int64_t rows, width, groups;
  bool is_alone;                 // a row for `multiply_row`
  bool is_tiled;                 // rows for packed_amx.h, which takes `bytes` in place of `pairs`
  std::vector<uint8_t, Aligned<uint8_t>> bytes;

  // `order[i]` is the row of x that is row i here; null: all, in their order.
  template <Encoding kCode, typename T>
  static Rounded make(ffi::ThreadPool& pool, const T* x, const int64_t* order, int64_t rows, const Packed<kCode>& weight) {
    Rounded out;
    out.rows = rows, out.width = weight.width, out.groups = weight.groups();
    out.is_alone = rows == 1 && (weight.group % 32 == 0 || (kCode == kInt8 && weight.group == 16 && weight.width % 32 == 0));
    out.is_tiled = has_tiles() && rows >= kTiledFrom && weight.group % 32 == 0;
    const int64_t all = out.is_tiled ? (rows + 15) / 16 * 16 : rows;  // tiles have 16 rows
    if (out.is_tiled) {
      out.bytes.resize(2 * all * weight.width);
    } else {
      out.pairs.resize(rows * weight.width / 2);
    }
    out.scale.resize(all * out.groups), out.start.resize(all * out.groups);
    if (weight.offset) out.total.resize(all * out.groups);
    const int64_t together = out.is_tiled ? 16 : kBlockRows, blocks = (rows + together - 1) / together;
    const auto round = [&](int64_t block) {
      for (int64_t row = block * together; row < std::min(rows, (block + 1) * together); ++row)
        out.round_row<kCode>(x + (order ? order[row] : row) * weight.width, row, weight.group);
    };
    if (rows * weight.width < kLittle) {  // less work than waking a thread
      for (int64_t block = 0; block < blocks; ++block) round(block);
    } else {
      parallel(pool, blocks, round);
    }
    return out;
  }

  // Where a row's group is in `scale`, `start` and `total`.
  int64_t at(int64_t row, int64_t g) const { return is_tiled ? (row / 16 * groups + g) * 16 + row % 16 : row * groups + g; }
  int64_t rows_of_block(int64_t row) const { return std::min<int64_t>(kBlockRows, rows - row); }
  const int32_t* block(int64_t row) const { return pairs.data() + row * (width / 2); }

 private:
  static constexpr int64_t kLittle = 1 << 15;
  static constexpr float kLargest = 32639;

  template <Encoding kCode, typename T>
  void round_row(const T* x, int64_t row, int64_t group) {
    const int64_t first = row / kBlockRows * kBlockRows, step = rows_of_block(first);
    int32_t* to = is_tiled ? nullptr : pairs.data() + first * (width / 2) + row % kBlockRows;
    for (int64_t g = 0; g < groups; ++g, x += group) {
      Floats most = {}, sum = {};
      for (int64_t k = 0; k < group; k += kLanes) {
        const Floats each = load(x + k), size = each < 0.0f ? -each : each;
        most = size > most ? size : most;
        sum += each;
      }
      float largest = 0, added = 0;
      for (int64_t i = 0; i < kLanes; ++i) largest = std::max(largest, most[i]), added += sum[i];
      // what is not finite stays so: the scale is not finite then
      const float inverse = largest > 0 ? kLargest / largest : 0.0f;
      const float unit = std::isnan(added) ? std::numeric_limits<float>::quiet_NaN() : largest / kLargest;
      scale[at(row, g)] = kCode == kFp4 ? unit * 0.5f : unit;
      int32_t all = 0;
      const auto whole_of = [&](int64_t k) {
        const Floats shifted = load(x + k) * inverse + kRounder;
        return reinterpret_cast<const Ints&>(shifted) - kRounderBits;
      };
#if defined(HFAX_AMX)
      if (is_tiled) {
        alignas(64) int16_t halves[kMaxGroup];
        Ints sums = {};
        for (int64_t k = 0; k < group; k += kLanes) {
          const Ints whole = whole_of(k);
          sums += whole;
          _mm256_store_si256(reinterpret_cast<__m256i*>(halves + k), _mm512_cvtepi32_epi16((__m512i)whole));
        }
        all = _mm512_reduce_add_epi32((__m512i)sums);
        place_bytes(halves, group, bits_of(kCode) == 4, bytes.data() + (row / 16 * width + g * group) * 32 + row % 16 * 4);
      }
#endif
      for (int64_t k = is_tiled ? group : 0; k < group; k += kLanes) {
        const Ints whole = whole_of(k);
        int32_t numbers[kLanes];
        std::memcpy(numbers, &whole, sizeof(whole));
        for (int64_t i = 0; i < kLanes; i += 4, to += 2 * step) {
          for (int64_t j = 0; j < 4; ++j) all += numbers[i + j];
          // of four weights of 8 bits the first and the third are unpacked together, but by `multiply_row`
          const bool is_crossed = kCode == kInt8 && !is_alone;
          const int32_t second = numbers[i + (is_crossed ? 2 : 1)], third = numbers[i + (is_crossed ? 1 : 2)];
          to[0] = (numbers[i] & 0xffff) | second << 16;
          to[step] = (third & 0xffff) | numbers[i + 3] << 16;
        }
      }
      start[at(row, g)] = -added_to(kCode) * all;
      if (!total.empty()) total[at(row, g)] = static_cast<float>(all) * unit;
    }
  }

  static constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number, ties to even
  static constexpr int32_t kRounderBits = 0x4b400000;
};

constexpr int64_t kPlane = 16;  // words of pairs of 4-bit weights whose columns follow each other
// By code, twice the number of float4_e2m1 plus 12.
alignas(16) constexpr uint8_t kTwiceFp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int32_t kNone = static_cast<int32_t>(0x80008000);

// Words of packed weights, one of each of kLanes rows, as pairs of 16-bit integers: of 8 bits two words of pairs, the first and the third
// column, then the others; of 4 bits four, a plane apart.
template <Encoding kCode>
inline void unpack_words(Ints words, int32_t* to) {
  if constexpr (kCode == kInt8) {
    const Pairs halves = (Pairs)words;
    store_words((Ints)(halves << 8 >> 8), to);
    store_words((Ints)(halves >> 8), to + kLanes);
  } else {
    const Ints nibbles = Ints{} + 0x000f000f;
    for (int64_t p = 0; p < 4; ++p) {
      const Ints codes = (words >> static_cast<int>(4 * p)) & nibbles;
      store_words(kCode == kFp4 ? look_up(kTwiceFp4, codes | kNone) & (Ints{} + 0x00ff00ff) : codes, to + p * kPlane * kLanes);
    }
  }
}

// Columns `from` to `from + depth` of up to kLanes rows of the weight, as pairs of 16-bit integers, [depth / 2][kLanes] words. Rows that
// are not there are 0. `next`: bytes from a row to one that is read soon after.
template <Encoding kCode>
void unpack(const uint8_t* rows, int64_t row_bytes, int64_t count, int64_t from, int64_t depth, int64_t next, int32_t* to) {
  constexpr int64_t kBits = bits_of(kCode);
  const int64_t words = depth * kBits / 32;  // of a row
  const uint8_t* start = rows + from * kBits / 8;
  const auto place = [&](int64_t word) { return to + (kBits == 8 ? 2 * word : word / kPlane * kPlane * 4 + word % kPlane) * kLanes; };
  constexpr int64_t kStep = kBits == 8 ? 2 * kLanes : kLanes;
  for (int64_t word = 0; word < words; word += kLanes) {
    const int64_t here = std::min(kLanes, words - word);
    Ints lanes[kLanes];
    if (count == kLanes && here == kLanes) {
      const uint8_t* at = start + 4 * word;
      HFAX_UNROLL for (int64_t r = 0; r < kLanes; ++r) lanes[r] = load_words(at + r * row_bytes);
      if (word * 4 % 64 == 0)
        for (int64_t r = 0; r < kLanes; ++r) __builtin_prefetch(at + r * row_bytes + next);
      turn(lanes);
      int32_t* to_words = place(word);
      HFAX_UNROLL for (int64_t i = 0; i < kLanes; ++i) unpack_words<kCode>(lanes[i], to_words + i * kStep);
    } else {
      int32_t some[kLanes * kLanes] = {};
      for (int64_t r = 0; r < count; ++r) std::memcpy(some + r * kLanes, start + r * row_bytes + 4 * word, 4 * here);
      for (int64_t r = 0; r < kLanes; ++r) lanes[r] = load_words(some + r * kLanes);
      turn(lanes);
      for (int64_t i = 0; i < here; ++i) unpack_words<kCode>(lanes[i], place(word + i));
    }
  }
}

// The part of one group in the sums of R rows of activations with V vectors of the weight's rows. `kChains` sums of integers go side by
// side, since one addition takes several cycles.
template <int R, int V>
inline void add_group(const int32_t* x, const float* scale, const int32_t* start, int64_t groups, const int32_t* weight, int64_t panel, const float* weight_scale,
                      int64_t pairs, bool is_first, float* sums) {
  constexpr int kChains = R * V >= 8 ? 1 : R * V >= 4 ? 2 : 4;
  Ints total[kChains][R][V];
  HFAX_UNROLL for (int r = 0; r < R; ++r) {
    HFAX_UNROLL for (int v = 0; v < V; ++v) {
      total[0][r][v] = Ints{} + start[r * groups];
      HFAX_UNROLL for (int c = 1; c < kChains; ++c) total[c][r][v] = Ints{};
    }
  }
  for (int64_t k = 0; k < pairs; k += kChains) {
    HFAX_UNROLL for (int c = 0; c < kChains; ++c) {
      Ints w[V];
      HFAX_UNROLL for (int v = 0; v < V; ++v) w[v] = load_words(weight + v * panel + (k + c) * kLanes);
      HFAX_UNROLL for (int r = 0; r < R; ++r) {
        const Ints both = Ints{} + x[(k + c) * R + r];
        HFAX_UNROLL for (int v = 0; v < V; ++v) total[c][r][v] = add_pairs(total[c][r][v], both, w[v]);
      }
    }
  }
  HFAX_UNROLL for (int r = 0; r < R; ++r) {
    HFAX_UNROLL for (int v = 0; v < V; ++v) {
      Ints all = total[0][r][v];
      HFAX_UNROLL for (int c = 1; c < kChains; ++c) all += total[c][r][v];
      float* sum = sums + (r * V + v) * kLanes;
      const Floats by = load(weight_scale + v * kLanes) * scale[r * groups];
      store_floats(fused(__builtin_convertvector(all, Floats), by, is_first ? Floats{} : load(sum)), sum);
    }
  }
}

template <int V>
void add_rows(int64_t count, const int32_t* x, const float* scale, const int32_t* start, int64_t groups, const int32_t* weight, int64_t panel,
              const float* weight_scale, int64_t pairs, bool is_first, float* sums) {
  switch (count) {
    case 1: return add_group<1, V>(x, scale, start, groups, weight, panel, weight_scale, pairs, is_first, sums);
    case 2: return add_group<2, V>(x, scale, start, groups, weight, panel, weight_scale, pairs, is_first, sums);
    case 3: return add_group<3, V>(x, scale, start, groups, weight, panel, weight_scale, pairs, is_first, sums);
    case 4: return add_group<4, V>(x, scale, start, groups, weight, panel, weight_scale, pairs, is_first, sums);
    case 5: return add_group<5, V>(x, scale, start, groups, weight, panel, weight_scale, pairs, is_first, sums);
    default: return add_group<6, V>(x, scale, start, groups, weight, panel, weight_scale, pairs, is_first, sums);
  }
}

// The first `count` words or 16-bit numbers as a vector, the others 0.
template <typename T>
inline Ints load_few(const uint8_t* p, int64_t count) {
  if (count * static_cast<int64_t>(sizeof(T)) >= 4 * kLanes) return load_words(p);
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Ints)_mm512_maskz_loadu_epi16((1u << (count * sizeof(T) / 2)) - 1, p);
#else
  int32_t some[kLanes] = {};
  std::memcpy(some, p, count * sizeof(T));
  return load_words(some);
#endif
}

// The float16 numbers in the lower halves of words, without arithmetic on numbers that a processor may be set to take for 0.
inline Ints widen_float16(Ints halves) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
#else
  const Ints size = halves & (Ints{} + 0x7fff), sign = (halves & (Ints{} + 0x8000)) << 16;
  const Floats small = __builtin_convertvector(size, Floats) * 0x1p-24f;
  const Ints large = (size << 13) + (size < 0x7c00 ? Ints{} + (112 << 23) : Ints{} + (224 << 23));
  return (size < 0x0400 ? reinterpret_cast<const Ints&>(small) : large) | sign;
#endif
}

// The numbers of kLanes rows of the weight, or of `count` of them, for `groups` groups of `all`: [groups][kLanes]. `at`: the first row's.
template <typename T, bool kIsFloat16>
void gather_as(const uint8_t* at, int64_t all, int64_t count, int64_t groups, float* to, int64_t stride) {
  constexpr int64_t kSize = sizeof(T), kHere = 4 / kSize * kLanes;
  for (int64_t g = 0; g < groups; g += kHere, at += kHere * kSize) {
    const int64_t here = std::min(kHere, groups - g);
    Ints words[kLanes];
    if (count == kLanes) {
      HFAX_UNROLL for (int64_t r = 0; r < kLanes; ++r) words[r] = load_few<T>(at + r * all * kSize, here);
    } else {
      for (int64_t r = 0; r < kLanes; ++r) words[r] = r < count ? load_few<T>(at + r * all * kSize, here) : Ints{};
    }
    turn(words);
    for (int64_t i = 0; i < here; ++i) {
      if constexpr (kSize == 4) {
        store_words(words[i], to + (g + i) * stride);
      } else if constexpr (kIsFloat16) {
        store_words(widen_float16(i % 2 ? (words[i / 2] >> 16) & (Ints{} + 0xffff) : words[i / 2] & (Ints{} + 0xffff)), to + (g + i) * stride);
      } else {
        store_words(i % 2 ? words[i / 2] & (Ints{} - 0x10000) : words[i / 2] << 16, to + (g + i) * stride);
      }
    }
  }
}

// The scales or offsets of `count` rows of the weight from `row`, for `groups` groups of `all` from `from` on.
inline void gather(const OfGroups& numbers, int64_t all, int64_t row, int64_t count, int64_t from, int64_t groups, float* to, int64_t stride) {
  const uint8_t* at = numbers.from(row * all + from).data;
  if (numbers.type == ffi::BF16) return gather_as<uint16_t, false>(at, all, count, groups, to, stride);
  if (numbers.type == ffi::F16) return gather_as<uint16_t, true>(at, all, count, groups, to, stride);
  gather_as<uint32_t, false>(at, all, count, groups, to, stride);
}

// What the offsets of a group add to the sums of `rows` rows, `stride` numbers apart, with V vectors of the weight's rows.
template <int V>
void add_offsets(const float* total, int64_t groups, int64_t rows, const float* offset, float* sums) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t v = 0; v < V; ++v) {
      float* sum = sums + (r * V + v) * kLanes;
      store_floats(fused(load(offset + v * kLanes), Floats{} + total[r * groups], load(sum)), sum);
    }
}

struct PackedScratch {
  alignas(64) int32_t weight[kPanel * kBlockDepth / 2 * kLanes];
  alignas(64) float scale[kBlockDepth / kLeastGroup * kPanel * kLanes];
  alignas(64) float offset[kBlockDepth / kLeastGroup * kPanel * kLanes];
  alignas(64) float sums[kRowsTogether * kPanel * kLanes];
};

inline PackedScratch& packed_scratch() {
  static thread_local std::unique_ptr<PackedScratch> scratch;
  if (!scratch) scratch.reset(new PackedScratch);
  return *scratch;
}

// The results of all rows for rows `first` to `first + count` of the weight, at most V vectors of them.
template <int V, Encoding kCode, typename Out>
void multiply_panel(const Rounded& x, const Packed<kCode>& weight, int64_t first, int64_t count, Out* out, int64_t num_columns) {
  PackedScratch& scratch = packed_scratch();
  const int64_t group = weight.group, groups = weight.groups(), row_bytes = weight.bytes_per_row();
  const int64_t depth = std::max(group, kBlockDepth / group * group), panel = depth / 2 * kLanes;
  for (int64_t begin = 0; begin < x.rows; begin += kRowsTogether) {
    const int64_t end = std::min(x.rows, begin + kRowsTogether);
    for (int64_t from = 0; from < weight.width; from += depth) {
      const int64_t here = std::min(depth, weight.width - from), groups_here = here / group;
      // the same rows' next columns, or the first of the rows to come
      const int64_t next = (from + depth < weight.width ? depth : V * kLanes * weight.width - from) * bits_of(kCode) / 8;
      for (int64_t v = 0; v < V; ++v) {
        const int64_t row = first + v * kLanes, lanes = std::clamp<int64_t>(first + count - row, 0, kLanes);
        unpack<kCode>(weight.values + row * row_bytes, row_bytes, lanes, from, here, next, scratch.weight + v * panel);
        gather(weight.scale, groups, row, lanes, from / group, groups_here, scratch.scale + v * kLanes, V * kLanes);
        if (weight.offset) gather(weight.offset, groups, row, lanes, from / group, groups_here, scratch.offset + v * kLanes, V * kLanes);
      }
      for (int64_t g = 0; g < groups_here; ++g) {
        for (int64_t row = begin; row < end; row += kBlockRows) {
          const int64_t block = x.rows_of_block(row), at = row * groups + from / group + g;
          float* sums = scratch.sums + (row - begin) * V * kLanes;
          add_rows<V>(block, x.block(row) + (from + g * group) / 2 * block, x.scale.data() + at, x.start.data() + at, groups,
                      scratch.weight + g * group / 2 * kLanes, panel, scratch.scale + g * V * kLanes, group / 2, from + g == 0, sums);
          if (weight.offset) add_offsets<V>(x.total.data() + at, groups, block, scratch.offset + g * V * kLanes, sums);
        }
      }
    }
    for (int64_t row = begin; row < end; ++row)
      for (int64_t i = 0; i < count; ++i) store(scratch.sums[(row - begin) * V * kLanes + i], out + row * num_columns + first + i);
  }
}

// The parts of the four planes of 128 columns in a product, by lanes. A value, so that rows share what they load of the activations.
struct Planes {
  Ints first, second, third, fourth;
};

// Of the 128 columns of a row of 4-bit weights from `weight` on, the product with one row of activations.
template <Encoding kCode>
inline Planes add_planes(const uint8_t* weight, const int32_t* x) {
  typedef uint16_t UnsignedPairs __attribute__((vector_size(kLanes * 4)));
  Ints sums[4] = {};  // of four bits each, where they stand in their words: the second's are 16 times as large, the third's 256
  HFAX_UNROLL for (int64_t i = 0; i < kPlane; i += kLanes) {
    const Ints words = load_words(weight + 4 * i);
    if constexpr (kCode == kInt4) {
      sums[0] = add_pairs(sums[0], words & (Ints{} + 0x000f000f), load_words(x + i));
      sums[1] = add_pairs(sums[1], words & (Ints{} + 0x00f000f0), load_words(x + 16 + i));
      sums[2] = add_pairs(sums[2], words & (Ints{} + 0x0f000f00), load_words(x + 32 + i));
      sums[3] = add_pairs(sums[3], (Ints)((UnsignedPairs)words >> 12), load_words(x + 48 + i));
    } else {
      const Ints nibbles = Ints{} + 0x0f0f0f0f, lower = Ints{} + 0x00ff00ff;
      const Ints even = look_up(kTwiceFp4, words & nibbles), odd = look_up(kTwiceFp4, (words >> 4) & nibbles);
      sums[0] = add_pairs(sums[0], even & lower, load_words(x + i));
      sums[1] = add_pairs(sums[1], odd & lower, load_words(x + 16 + i));
      sums[2] = add_pairs(sums[2], even & ~lower, load_words(x + 32 + i));
      sums[3] = add_pairs(sums[3], (Ints)((UnsignedPairs)odd >> 8), load_words(x + 48 + i));
    }
  }
  return {sums[0], kCode == kInt4 ? sums[1] >> 4 : sums[1], sums[2] >> 8, sums[3]};
}

// The lanes whose words are of the first of two groups of 16 columns.
inline Ints first_half() {
  Ints out = {};
  for (int64_t i = 0; i < kLanes / 2; ++i) out[i] = -1;
  return out;
}

// The part of one group of a row of the weight in its product with one row of activations, by lanes. kGroup: its columns, 0 for `group`.
template <Encoding kCode, int64_t kGroup>
inline Ints add_row(const uint8_t* weight, const int32_t* x, int64_t group) {
  const int64_t columns = kGroup ? kGroup : group;
  if constexpr (kCode == kInt8) {
    Ints sums[4] = {};
    HFAX_UNROLL for (int64_t k = 0; k < columns / 2; k += kLanes) {
      Ints& sum = sums[k / kLanes % 4];
      sum = add_pairs(sum, load_bytes(weight + 2 * k), load_words(x + k));
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  } else {
    Ints all = {};
    for (int64_t k = 0; k < columns; k += 128, weight += 64, x += 64) {
      const Planes planes = add_planes<kCode>(weight, x);
      all += (planes.first + planes.second) + (planes.third + planes.fourth);
    }
    return all;
  }
}

constexpr int64_t kGroupsTogether = 32;

// How one row of activations is multiplied: rows of the weight that are read at a time, and how many bytes before they are needed memory
// is asked for them. Memory is fastest in one stream, as far as the processor keeps up: on AVX2, 4 bits are unpacked faster for four rows.
template <Encoding kCode>
constexpr int64_t kStreams = kCode == kInt8 && kLanes == 8 ? 1 : 4;
template <Encoding kCode>
constexpr int64_t kAhead = kStreams<kCode> == 1 ? 1024 : 8192;

// The results of one row of activations for `count` rows of the weight, at most kLanes. The same numbers as `multiply_panel` gives.
template <Encoding kCode, int64_t kGroup, typename Out>
void multiply_row(const Rounded& x, const Packed<kCode>& weight, int64_t first, int64_t count, Out* out) {
  constexpr int64_t kBits = bits_of(kCode);
  constexpr bool kHalves = kBits == 8 && kGroup == 16 && kLanes == 16;  // two groups share a vector
  constexpr int64_t kShared = kHalves ? 2 : kBits == 4 && kGroup && kGroup < 128 ? 128 / kGroup : 1;  // groups whose codes share their words
  const int64_t group = kGroup ? kGroup : weight.group, groups = weight.groups(), row_bytes = weight.bytes_per_row();
  const int64_t bytes = kShared * group * kBits / 8;
  Ints quarters[kGroupsTogether][kLanes / 4];
  float scales[kGroupsTogether * kLanes], offsets[kGroupsTogether * kLanes];
  Floats results = {};
  for (int64_t from = 0; from < groups; from += kGroupsTogether) {
    const int64_t here = std::min(kGroupsTogether, groups - from);
    // and a share of those of the rows to come: nothing else would ask for them before they are needed
    const auto fetch = [&](const OfGroups& numbers, float* to) {
      gather(numbers, groups, first, count, from, here, to, kLanes);
      const uint8_t* next = numbers.from((first + kLanes) * groups + from * kLanes).data;
      for (int64_t line = 0; line < kLanes * here * numbers.bytes(); line += 64) __builtin_prefetch(next + line);
    };
    fetch(weight.scale, scales);
    if (weight.offset) fetch(weight.offset, offsets);
    for (int64_t r = 0; r < kLanes; r += 4) {
      const uint8_t* rows[4];
      // rows that are not there are read as the last one, and not stored
      HFAX_UNROLL for (int64_t i = 0; i < 4; ++i) rows[i] = weight.values + (first + std::min(r + i, count - 1)) * row_bytes + from / kShared * bytes;
      const int32_t* pairs = x.pairs.data() + from * (group / 2);
      if constexpr (kStreams<kCode> == 1) {
        Ints parts[kGroupsTogether][4];
        for (int64_t i = 0; i < 4; ++i) {
          for (int64_t g = 0; g < here; ++g) {
            const uint8_t* at = rows[i] + g * bytes;
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + kAhead<kCode> + line);
            parts[g][i] = add_row<kCode, kGroup>(at, pairs + g * (group / 2), group);
          }
        }
        for (int64_t g = 0; g < here; ++g) quarters[g][r / 4] = quarters_of(parts[g][0], parts[g][1], parts[g][2], parts[g][3]);
        continue;
      }
      for (int64_t g = 0; g < here; g += kShared, pairs += kShared * group / 2) {
        Ints sums[4];
        Planes planes[4];
        HFAX_UNROLL for (int64_t i = 0; i < 4; ++i) {
          const uint8_t* at = rows[i] + g / kShared * bytes;
          __builtin_prefetch(at + kAhead<kCode>);
          if (bytes > 64) __builtin_prefetch(at + kAhead<kCode> + 64);
          if constexpr (kShared == 1) {
            sums[i] = add_row<kCode, kGroup>(at, pairs, group);
          } else if constexpr (kHalves) {
            sums[i] = add_pairs(Ints{}, load_bytes(at), load_words(pairs));
          } else {
            planes[i] = add_planes<kCode>(at, pairs);
          }
        }
        const auto keep = [&](int64_t shared, const auto& part) { quarters[g + shared][r / 4] = quarters_of(part(0), part(1), part(2), part(3)); };
        if constexpr (kShared == 1) {
          keep(0, [&](int i) { return sums[i]; });
        } else if constexpr (kHalves) {
          keep(1, [&](int i) { return sums[i]; });
          quarters[g][r / 4] = quarters[g + 1][r / 4] & first_half();
          quarters[g + 1][r / 4] &= ~first_half();
        } else if constexpr (kShared == 2) {
          keep(0, [&](int i) { return planes[i].first + planes[i].second; });
          keep(1, [&](int i) { return planes[i].third + planes[i].fourth; });
        } else {
          keep(0, [&](int i) { return planes[i].first; });
          keep(1, [&](int i) { return planes[i].second; });
          keep(2, [&](int i) { return planes[i].third; });
          keep(3, [&](int i) { return planes[i].fourth; });
        }
      }
    }
    for (int64_t g = 0; g < here; ++g) {
      const Ints all = totals_of(quarters[g]) + x.start[from + g];
      results = fused(__builtin_convertvector(all, Floats), load(scales + g * kLanes) * x.scale[from + g], results);
      if (weight.offset) results = fused(load(offsets + g * kLanes), Floats{} + x.total[from + g], results);
    }
  }
  for (int64_t i = 0; i < count; ++i) store(results[i], out + first + i);
}

#if defined(HFAX_AMX)
template <Encoding kCode, typename Out>
void multiply_by_tiles(const Rounded& x, const Packed<kCode>& weight, int64_t begin, int64_t end, Out* out, int64_t num_columns);  // packed_amx.h
#endif

// The results of all rows for rows `begin` to `end` of the weight.
template <Encoding kCode, typename Out>
void multiply_packed(const Rounded& x, const Packed<kCode>& weight, int64_t begin, int64_t end, Out* out, int64_t num_columns) {
  const auto by_row = [&](auto group) {
    for (int64_t first = begin; first < end; first += kLanes)
      multiply_row<kCode, decltype(group)::value>(x, weight, first, std::min(kLanes, end - first), out);
  };
#if defined(HFAX_AMX)
  if (x.is_tiled) return multiply_by_tiles(x, weight, begin, end, out, num_columns);
#endif
  if (x.is_alone) {
    if (weight.group == 128) return by_row(std::integral_constant<int64_t, 128>{});
    if (weight.group == 64) return by_row(std::integral_constant<int64_t, 64>{});
    if (weight.group == 32) return by_row(std::integral_constant<int64_t, 32>{});
    if constexpr (kCode == kInt8)
      if (weight.group == 16) return by_row(std::integral_constant<int64_t, 16>{});
    return by_row(std::integral_constant<int64_t, 0>{});
  }
  constexpr int64_t kStep = kPanel * kLanes;
  for (int64_t first = begin; first < end; first += kStep) {
    const int64_t count = std::min(kStep, end - first);
    if (count <= kLanes) {
      multiply_panel<1>(x, weight, first, count, out, num_columns);
    } else {
      multiply_panel<kPanel>(x, weight, first, count, out, num_columns);
    }
  }
}

// Rows of the weight that a thread takes at a time.
template <Encoding kCode>
int64_t packed_chunk(const Packed<kCode>& weight) {
  constexpr int64_t kStep = kPanel * kLanes;
  return std::max(kStep, kPackedChunk / std::max<int64_t>(weight.bytes_per_row(), 1) / kStep * kStep);
}

}  // namespace
