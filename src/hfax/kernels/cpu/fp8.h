// Products of activations with float8_e4m3fn weights, for any number of rows, on every instruction set.
//
// Weights become float32, which is exact. A group's products are added in 16 sums, column k in sum k % 16, whatever the width of a vector.
// Times the group's scale they are added to those of the groups before, and at last to each other in one order, so a row's numbers depend
// neither on the rows beside it nor on the instruction set.
//
// Many rows are multiplied faster with numbers in the activations' type, which some rows of the weight become at a time: those products, and
// the order of their sums, are matmul.h's.

#pragma once

#include "packed.h"

namespace {

constexpr int64_t kSums = 16;               // of a group
constexpr int64_t kParts = kSums / kLanes;  // vectors that hold them
constexpr int64_t kWeightRows = 4;          // that are multiplied together: memory is fastest in few streams

// Rows of activations as float32, [rows, width], and the sums of each group, [rows, groups], if the weight has offsets.
struct Widened {
  std::vector<float, Aligned<float>> numbers;
  std::vector<float> total;
  int64_t rows, width, groups;

  // `order`: as in `Rounded::make`.
  template <typename T>
  static Widened make(ffi::ThreadPool& pool, const T* x, const int64_t* order, int64_t rows, const Packed<kFp8>& weight) {
    Widened out;
    out.rows = rows, out.width = weight.width, out.groups = weight.groups();
    out.numbers.resize(rows * out.width);
    if (weight.offset) out.total.resize(rows * out.groups);
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = x + (order ? order[row] : row) * out.width;
      float* to = out.numbers.data() + row * out.width;
      for (int64_t k = 0; k < out.width; k += kLanes) store_floats(load(from + k), to + k);
      for (size_t g = 0; weight.offset && g < static_cast<size_t>(out.groups); ++g)
        for (int64_t k = 0; k < weight.group; ++k) out.total[row * out.groups + g] += to[g * weight.group + k];
    }
    return out;
  }
};

inline float total_of_sums(const Floats (&sums)[kParts]) {
  float each[kSums];
  std::memcpy(each, sums, sizeof(each));
  float four[4];
  for (int64_t i = 0; i < 4; ++i) four[i] = (each[i] + each[i + 8]) + (each[i + 4] + each[i + 12]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

using Sums = Floats[kWeightRows][kParts];

// Adds the part of a group to the sums of R rows of activations, `x_stride` numbers apart, with four rows of the weight, which
// begin kMaxGroup numbers after each other.
template <int R>
inline void add_fp8_group(const float* x, int64_t x_stride, int64_t group, const float* weight, const float* scale, int64_t groups, Sums* sums) {
  for (int64_t p = 0; p < kParts; ++p) {
    Floats here[R][kWeightRows] = {};
    for (int64_t k = p * kLanes; k < group; k += kSums) {
      Floats w[kWeightRows];
      HFAX_UNROLL for (int64_t i = 0; i < kWeightRows; ++i) w[i] = load(weight + i * kMaxGroup + k);
      HFAX_UNROLL for (int r = 0; r < R; ++r) {
        const Floats each = load(x + r * x_stride + k);
        HFAX_UNROLL for (int64_t i = 0; i < kWeightRows; ++i) here[r][i] = fused(each, w[i], here[r][i]);
      }
    }
    HFAX_UNROLL for (int r = 0; r < R; ++r)
      HFAX_UNROLL for (int64_t i = 0; i < kWeightRows; ++i) sums[r][i][p] = fused(here[r][i], Floats{} + scale[i * groups], sums[r][i][p]);
  }
}

struct Fp8Scratch {
  alignas(64) float weight[kWeightRows * kMaxGroup];
  alignas(64) Sums sums[kRowsTogether];
};

inline Fp8Scratch& fp8_scratch() {
  static thread_local std::unique_ptr<Fp8Scratch> scratch;
  if (!scratch) scratch.reset(new Fp8Scratch);
  return *scratch;
}

// The sums of rows `begin` to `end` of the activations with four rows of the weight. `scales`: [kWeightRows][groups].
inline void add_fp8_rows(const Widened& x, int64_t begin, int64_t end, const uint8_t* const (&rows)[kWeightRows], int64_t group, const float* scales,
                         Fp8Scratch& scratch) {
  constexpr int kTogether = kLanes == 8 ? 2 : 4;  // rows of activations whose sums fit the registers
  std::memset(scratch.sums, 0, (end - begin) * sizeof(Sums));
  for (int64_t g = 0; g < x.groups; ++g) {
    const int64_t from = g * group;
    const float* at = x.numbers.data() + begin * x.width + from;
    for (int64_t i = 0; i < kWeightRows; ++i)  // of the rows to come
      for (int64_t line = 0; line < group; line += 64) __builtin_prefetch(rows[i] + kWeightRows * x.width + from + line, 0, 2);
    for (int64_t i = 0; i < kWeightRows; ++i)
      for (int64_t k = 0; k < group; k += kLanes) store_floats(load_fp8(rows[i] + from + k), scratch.weight + i * kMaxGroup + k);
    int64_t row = 0;
    for (; row + kTogether <= end - begin; row += kTogether) add_fp8_group<kTogether>(at + row * x.width, x.width, group, scratch.weight, scales + g, x.groups, scratch.sums + row);
    for (; row < end - begin; ++row) add_fp8_group<1>(at + row * x.width, x.width, group, scratch.weight, scales + g, x.groups, scratch.sums + row);
  }
}

// `count` scales or offsets times `unit`.
inline void widen(const OfGroups& numbers, int64_t count, float unit, float* to) {
  for (int64_t g = 0; g < count; g += kLanes) {
    const int64_t here = std::min(kLanes, count - g);
    int32_t some[kLanes] = {};
    std::memcpy(some, numbers.from(g).data, here * numbers.bytes());
    Ints bits = load_words(some);
    if (numbers.type != ffi::F32) {
      const Ints halves = __builtin_convertvector(*reinterpret_cast<const Halves*>(some), Ints);
      bits = numbers.type == ffi::BF16 ? halves << 16 : widen_float16(halves);
    }
    store_some(reinterpret_cast<const Floats&>(bits) * unit, here, to + g);
  }
}

// The sums of one row of activations with one row of the weight: memory is fastest in one stream, and a group's sums do not wait for others.
inline void add_fp8_row(const Widened& x, const uint8_t* row, int64_t group, const float* scales, Floats (&sums)[kParts]) {
  for (int64_t p = 0; p < kParts; ++p) sums[p] = Floats{};
  const float* at = x.numbers.data();
  for (int64_t g = 0; g < x.groups; ++g, row += group, at += group) {
    Floats here[kParts] = {};
    for (int64_t line = 0; line < group; line += 64) __builtin_prefetch(row + kAhead<kFp8> + line);
    for (int64_t k = 0; k < group; k += kSums)
      HFAX_UNROLL for (int64_t p = 0; p < kParts; ++p) here[p] = fused(load(at + k + p * kLanes), load_fp8(row + k + p * kLanes), here[p]);
    HFAX_UNROLL for (int64_t p = 0; p < kParts; ++p) sums[p] = fused(here[p], Floats{} + scales[g], sums[p]);
  }
}

// The results of all rows for rows `begin` to `end` of the weight.
template <typename Out>
void multiply_packed(const Widened& x, const Packed<kFp8>& weight, int64_t begin, int64_t end, Out* out, int64_t num_columns) {
  thread_local std::vector<float> scales, offsets;
  Fp8Scratch& scratch = fp8_scratch();
  scales.resize(kWeightRows * x.groups), offsets.resize(kWeightRows * x.groups);
  for (int64_t first = begin; first < end; first += kWeightRows) {
    const int64_t count = std::min(kWeightRows, end - first);
    const uint8_t* rows[kWeightRows];
    for (int64_t i = 0; i < kWeightRows; ++i) rows[i] = weight.values + (first + std::min(i, count - 1)) * weight.bytes_per_row();
    for (int64_t i = 0; i < kWeightRows; ++i) {
      const int64_t at = (first + std::min(i, count - 1)) * x.groups;
      widen(weight.scale.from(at), x.groups, kUnit<Fp8>, scales.data() + i * x.groups);
      if (weight.offset) widen(weight.offset.from(at), x.groups, 1, offsets.data() + i * x.groups);
    }
    for (int64_t row = 0; row < x.rows; row += kRowsTogether) {
      const int64_t last = std::min(x.rows, row + kRowsTogether);
      if (x.rows == 1) {
        for (int64_t i = 0; i < count; ++i) add_fp8_row(x, rows[i], weight.group, scales.data() + i * x.groups, scratch.sums[0][i]);
      } else {
        add_fp8_rows(x, row, last, rows, weight.group, scales.data(), scratch);
      }
      for (int64_t r = row; r < last; ++r) {
        for (int64_t i = 0; i < count; ++i) {
          float result = total_of_sums(scratch.sums[r - row][i]);
          for (int64_t g = 0; weight.offset && g < x.groups; ++g) result = std::fma(offsets[i * x.groups + g], x.total[r * x.groups + g], result);
          store(result, out + r * num_columns + first + i);
        }
      }
    }
  }
}

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
// A row of bfloat16 activations with numbers that become bfloat16, whose products the processor sums by pairs: a float takes twice the
// instructions. The bytes of 64 numbers are looked up by their codes, and come out 8 of each 16 columns first, then the others.
class PairedRow {
 public:
  static constexpr int64_t kStep = 64;

  static bool fits(const Packed<kFp8>& weight, int64_t rows) { return rows == 1 && weight.group % kStep == 0 && !weight.offset; }

  PairedRow(const Bf16* x, int64_t width) : x_(width) {
    for (int64_t k = 0; k < width; ++k) x_[k / kStep * kStep + k / 8 % 2 * 32 + k % kStep / 16 * 8 + k % 8] = x[k];
    static const Tables tables;
    for (int half = 0; half < 2; ++half) {
      upper_[half] = _mm512_load_si512(tables.upper + 64 * half);
      lower_[half] = _mm512_load_si512(tables.lower + 64 * half);
    }
  }

  // Its product with a row of the weight.
  float times(const uint8_t* row, int64_t group, const float* scales) const {
    const __m512i signs = _mm512_set1_epi8(static_cast<char>(0x80));
    const Bf16 *x = x_.data(), *end = x + x_.size();
    Floats sum = {};
    for (; x < end; ++scales) {
      __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
      for (int64_t k = 0; k < group; k += kStep, row += kStep, x += kStep) {
        __builtin_prefetch(row + kAhead<kFp8>);
        const __m512i codes = _mm512_loadu_si512(row);  // a look-up does not see their signs
        const __m512i high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(upper_[0], codes, upper_[1]), codes, signs, 0xf8);
        const __m512i low = _mm512_permutex2var_epi8(lower_[0], codes, lower_[1]);
        first = _mm512_dpbf16_ps(first, (__m512bh)_mm512_unpacklo_epi8(low, high), (__m512bh)_mm512_load_si512(x));
        second = _mm512_dpbf16_ps(second, (__m512bh)_mm512_unpackhi_epi8(low, high), (__m512bh)_mm512_load_si512(x + 32));
      }
      sum = fused((Floats)first + (Floats)second, Floats{} + *scales, sum);
    }
    return total(sum);
  }

 private:
  // The bytes of each number of no sign as bfloat16.
  struct Tables {
    alignas(64) uint8_t upper[128], lower[128];

    Tables() {
      for (int code = 0; code < 128; ++code) {
        const float number = to_float(Fp8{static_cast<uint8_t>(code)}) * kUnit<Fp8>;
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof(bits));
        upper[code] = bits >> 24, lower[code] = bits >> 16 & 0xff;
      }
    }
  };

  std::vector<Bf16, Aligned<Bf16>> x_;
  __m512i upper_[2], lower_[2];
};

// The results of a row of activations for rows `begin` to `end` of the weight.
template <typename Out>
void multiply_pairs(const PairedRow& x, const Packed<kFp8>& weight, int64_t begin, int64_t end, Out* out) {
  thread_local std::vector<float> scales;
  scales.resize(weight.groups());
  for (int64_t row = begin; row < end; ++row) {
    widen(weight.scale.from(row * weight.groups()), weight.groups(), 1, scales.data());
    store(x.times(weight.values + row * weight.bytes_per_row(), weight.group, scales.data()), out + row);
  }
}
#endif

// Rows of activations from which a weight's numbers in their type pay.
constexpr int64_t kDecodedFrom = 16;

// The numbers of a row of the weight, rounded once to the type of `to`.
template <typename T>
void decode_row(const Packed<kFp8>& weight, int64_t row, std::vector<float>& scales, std::vector<float>& offsets, T* to) {
  const int64_t groups = weight.groups();
  scales.resize(groups), offsets.resize(groups);
  widen(weight.scale.from(row * groups), groups, kUnit<Fp8>, scales.data());
  if (weight.offset) widen(weight.offset.from(row * groups), groups, 1, offsets.data());
  const uint8_t* at = weight.values + row * weight.bytes_per_row();
  for (int64_t g = 0; g < groups; ++g) {
    const Floats offset = Floats{} + (weight.offset ? offsets[g] : 0.0f);
    for (int64_t k = 0; k < weight.group; k += kLanes, at += kLanes, to += kLanes) store_some(load_fp8(at) * scales[g] + offset, kLanes, to);
  }
}

// The results of rows of activations, [rows, width], for rows `begin` to `end` of the weight, by its numbers in their type.
template <typename T, typename Out>
void multiply_decoded(const T* x, int64_t rows, const Packed<kFp8>& weight, int64_t begin, int64_t end, Out* out, int64_t num_columns) {
  constexpr int64_t kTogether = 512;
  thread_local std::vector<float> scales, offsets;
  const int64_t width = weight.width, count = end - begin;
  const Memory<T, 4> numbers(count * width);
  const Memory<float, 5> sums(std::min(rows, kTogether) * count);
  for (int64_t i = 0; i < count; ++i) decode_row(weight, begin + i, scales, offsets, numbers.data() + i * width);
  const SideOf<T> columns{numbers.data(), count, width, width, false};
  for (int64_t first = 0; first < rows; first += kTogether) {
    const int64_t here = std::min(kTogether, rows - first);
    multiply_here<false>(SideOf<T>{x + first * width, here, width, width, false}, columns, sums.data(), count);
    for (int64_t r = 0; r < here; ++r) {
      Out* to = out + (first + r) * num_columns + begin;
      for (int64_t c = 0; c < count; c += kLanes) store_some(load_some(sums.data() + r * count + c, count - c), count - c, to + c);
    }
  }
}

}  // namespace
