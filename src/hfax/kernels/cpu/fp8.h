// Products of activations with float8_e4m3fn weights, for any number of rows, on every instruction set.
//
// Weights become float32, which is exact. A group's products are added in 16 sums, column k in sum k % 16, whatever the width of a vector,
// and these in one order, so a row's numbers depend neither on the rows beside it nor on the instruction set.

#pragma once

#include "packed.h"

namespace {

constexpr int64_t kSums = 16;              // of a group
constexpr int64_t kParts = kSums / kLanes;  // vectors of them
constexpr int64_t kWeightRows = 4;         // that are multiplied together: memory is fastest in few streams
constexpr float kFp8Unit = 256;            // see load_fp8

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

// Adds the part of a group to the results of R rows of activations, `x_stride` numbers apart, with four rows of the weight; `numbers` gives
// kLanes of a row's weights.
template <int R, typename Numbers>
inline void add_fp8_group(const float* x, int64_t x_stride, int64_t group, const Numbers& numbers, const float* scale, float (*results)[kWeightRows]) {
  Floats sums[R][kWeightRows][kParts] = {};
  for (int64_t k = 0; k < group; k += kSums) {
    HFAX_UNROLL for (int64_t p = 0; p < kParts; ++p) {
      Floats w[kWeightRows];
      HFAX_UNROLL for (int64_t i = 0; i < kWeightRows; ++i) w[i] = numbers(i, k + p * kLanes);
      HFAX_UNROLL for (int r = 0; r < R; ++r) {
        const Floats each = load(x + r * x_stride + k + p * kLanes);
        HFAX_UNROLL for (int64_t i = 0; i < kWeightRows; ++i) sums[r][i][p] = fused(each, w[i], sums[r][i][p]);
      }
    }
  }
  HFAX_UNROLL for (int r = 0; r < R; ++r)
    HFAX_UNROLL for (int64_t i = 0; i < kWeightRows; ++i) results[r][i] = std::fma(total_of_sums(sums[r][i]), scale[i], results[r][i]);
}

struct Fp8Scratch {
  alignas(64) float weight[kWeightRows * kMaxGroup];
  float results[kRowsTogether][kWeightRows];
};

inline Fp8Scratch& fp8_scratch() {
  static thread_local std::unique_ptr<Fp8Scratch> scratch;
  if (!scratch) scratch.reset(new Fp8Scratch);
  return *scratch;
}

// The results of rows `begin` to `end` of the activations for four rows of the weight; rows that are not there repeat the last one.
// `scales` and `offsets`: [groups][kWeightRows].
inline void multiply_fp8_rows(const Widened& x, int64_t begin, int64_t end, const uint8_t* const (&rows)[kWeightRows], int64_t group, const float* scales,
                              const float* offsets, Fp8Scratch& scratch) {
  constexpr int kTogether = kLanes == 16 ? 4 : 1;  // rows of activations whose sums fit the registers
  for (int64_t row = begin; row < end; ++row) std::fill_n(scratch.results[row - begin], kWeightRows, 0.0f);
  const auto stored = [&](int64_t from) { return [&rows, from](int64_t i, int64_t k) { return load_fp8(rows[i] + from + k); }; };
  const auto widened = [&](int64_t i, int64_t k) { return load(scratch.weight + i * kMaxGroup + k); };
  for (int64_t g = 0; g < x.groups; ++g) {
    const int64_t from = g * group;
    const float* at = x.numbers.data() + begin * x.width + from;
    if (end - begin == 1) {
      for (int64_t i = 0; i < kWeightRows; ++i)
        for (int64_t line = 0; line < group; line += 64) __builtin_prefetch(rows[i] + from + kAhead / 2 + line);
      add_fp8_group<1>(at, x.width, group, stored(from), scales + g * kWeightRows, scratch.results);
    } else {
      for (int64_t i = 0; i < kWeightRows; ++i)
        for (int64_t k = 0; k < group; k += kLanes) store_floats(load_fp8(rows[i] + from + k), scratch.weight + i * kMaxGroup + k);
      int64_t row = 0;
      for (; row + kTogether <= end - begin; row += kTogether)
        add_fp8_group<kTogether>(at + row * x.width, x.width, group, widened, scales + g * kWeightRows, scratch.results + row);
      for (; row < end - begin; ++row) add_fp8_group<1>(at + row * x.width, x.width, group, widened, scales + g * kWeightRows, scratch.results + row);
    }
    for (int64_t row = begin; offsets && row < end; ++row)
      for (int64_t i = 0; i < kWeightRows; ++i)
        scratch.results[row - begin][i] = std::fma(offsets[g * kWeightRows + i], x.total[row * x.groups + g], scratch.results[row - begin][i]);
  }
}

// The numbers of four rows of a weight's groups, of which `count` are there, as [groups][kWeightRows] times `unit`.
inline void gather_four(const OfGroups& numbers, int64_t groups, int64_t first, int64_t count, float unit, std::vector<float>& to) {
  constexpr int64_t kEach = std::max(kLanes, kWeightRows);
  thread_local std::vector<float> lanes;
  lanes.resize(groups * kEach), to.resize(groups * kWeightRows);
  gather(numbers, groups, first, count, 0, groups, lanes.data(), kEach);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t i = 0; i < kWeightRows; ++i) to[g * kWeightRows + i] = lanes[g * kEach + i] * unit;
}

// The results of all rows for rows `begin` to `end` of the weight.
template <typename Out>
void multiply_packed(const Widened& x, const Packed<kFp8>& weight, int64_t begin, int64_t end, Out* out, int64_t num_columns) {
  thread_local std::vector<float> scales, offsets;
  Fp8Scratch& scratch = fp8_scratch();
  for (int64_t first = begin; first < end; first += kWeightRows) {
    const int64_t count = std::min(kWeightRows, end - first);
    const uint8_t* rows[kWeightRows];
    for (int64_t i = 0; i < kWeightRows; ++i) rows[i] = weight.values + (first + std::min(i, count - 1)) * weight.bytes_per_row();
    gather_four(weight.scale, x.groups, first, count, kFp8Unit, scales);
    if (weight.offset) gather_four(weight.offset, x.groups, first, count, 1, offsets);
    for (int64_t row = 0; row < x.rows; row += kRowsTogether) {
      const int64_t last = std::min(x.rows, row + kRowsTogether);
      multiply_fp8_rows(x, row, last, rows, weight.group, scales.data(), weight.offset ? offsets.data() : nullptr, scratch);
      for (int64_t r = row; r < last; ++r)
        for (int64_t i = 0; i < count; ++i) store(scratch.results[r - row][i], out + r * num_columns + first + i);
    }
  }
}

}  // namespace
