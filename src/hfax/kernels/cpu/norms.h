// Norms and rotary embeddings: one call each, where XLA makes three to eight of 2 us, for few rows most of it not arithmetic. The
// numbers of a row do not depend on how many rows there are.

#pragma once

#include "common.h"

namespace {

// As float32 that `T` can hold: the nearest, ties to even; what is not a number stays so.
template <typename T>
inline Floats rounded(Floats v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
    const Words bits = reinterpret_cast<const Words&>(v);
    const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    const Words kept = (bits & 0x7fffffff) > 0x7f800000 ? (bits | 0x400000) & 0xffff0000 : nearest;
    return reinterpret_cast<const Floats&>(kept);
  }
}

template <typename T>
inline float rounded(float v) {
  T out;
  store(v, &out);
  return to_float(out);
}

inline void store(Floats v, float* out) { std::memcpy(out, &v, sizeof(v)); }

inline void store(Floats v, Bf16* out) {
  const Floats exact = rounded<Bf16>(v);
  const Halves bits = __builtin_convertvector(reinterpret_cast<const Words&>(exact) >> 16, Halves);
  std::memcpy(static_cast<void*>(out), &bits, sizeof(bits));
}

constexpr int64_t kNumbersOfPiece = 1 << 15;  // a thread does as many before another could start

// Does `work(first, last)` for all rows, in pieces of about as many numbers.
template <typename Work>
void by_rows(ffi::ThreadPool& pool, int64_t rows, int64_t width, const Work& work) {
  const int64_t of_piece = std::max<int64_t>(1, kNumbersOfPiece / std::max<int64_t>(width, 1));
  parallel(pool, (rows + of_piece - 1) / of_piece, [&](int64_t piece) { work(piece * of_piece, std::min(rows, (piece + 1) * of_piece)); });
}

// Each row divided by the root of its mean square, times `weight`. `width` is a multiple of the lanes.
template <typename T, typename W>
void normalize(const T* x, const W* weight, int64_t rows, int64_t width, float eps, T* out) {
  for (int64_t row = 0; row < rows; ++row, x += width, out += width) {
    Floats sums[2] = {};
    int64_t k = 0;
    for (; k + 2 * kLanes <= width; k += 2 * kLanes) {
      const Floats a = load(x + k), b = load(x + k + kLanes);
      sums[0] += a * a;
      sums[1] += b * b;
    }
    if (k < width) sums[0] += load(x + k) * load(x + k);
    const float scale = 1.0f / std::sqrt(total(sums[0] + sums[1]) / width + eps);
    for (k = 0; k < width; k += kLanes) store(load(x + k) * scale * load(weight + k), out + k);
  }
}

// The sum of each row. The columns that fill no vector come last.
inline void sum_rows(const float* x, int64_t rows, int64_t width, float* out) {
  for (int64_t row = 0; row < rows; ++row, x += width) {
    Floats sums[2] = {};
    int64_t k = 0;
    for (; k + 2 * kLanes <= width; k += 2 * kLanes) {
      sums[0] += load(x + k);
      sums[1] += load(x + k + kLanes);
    }
    float rest = 0;
    for (; k < width; ++k) rest += x[k];
    out[row] = total(sums[0] + sums[1]) + rest;
  }
}

// x [R, K] -> [R], float32.
ffi::Error row_sums(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  by_rows(pool, rows, width, [&](int64_t first, int64_t last) {
    sum_rows(x.typed_data() + first * width, last - first, width, out->typed_data() + first);
  });
  return ffi::Error::Success();
}

// e to the power of each; unlike `exponential`, of any number.
inline Floats exponential_of_any(Floats x) {
  constexpr float kMost = 88.7228394f, kLeast = -103.97208f;  // beyond them it is infinite, or 0
  const Floats clamped = x > kMost ? Floats{} + kMost : x < kLeast ? Floats{} + kLeast : x == x ? x : Floats{};
  const Floats scaled = clamped * 1.44269504f;
  const Ints whole = __builtin_convertvector(scaled + (scaled < 0 ? Floats{} - 0.5f : Floats{} + 0.5f), Ints);
  const Ints half = whole / 2;  // 2 to the power of `whole` may be too large for a float, or too small
  const Ints first = (half + 127) << 23, second = (whole - half + 127) << 23;
  const Floats power = exponential_of_rest(clamped, whole) * reinterpret_cast<const Floats&>(first) * reinterpret_cast<const Floats&>(second);
  return x > kMost ? Floats{} + std::numeric_limits<float>::infinity() : x < kLeast ? Floats{} : x == x ? power : x;
}

// x [N] -> [N], float32.
ffi::Error exponentials(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  by_rows(pool, x.element_count(), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += kLanes) {
      Floats numbers{};
      const int64_t bytes = std::min(kLanes, last - i) * sizeof(float);
      std::memcpy(&numbers, x.typed_data() + i, bytes);
      numbers = exponential_of_any(numbers);
      std::memcpy(out->typed_data() + i, &numbers, bytes);
    }
  });
  return ffi::Error::Success();
}

// Rows first to last of x [batch, heads, length, dim] with each pair of numbers, half of `dim` apart, turned by its angle; cos and sin
// [1 | batch, length, dim]. Rounds after each step, as torch does.
template <typename T>
void rotate_rows(const T* x, const T* cos, const T* sin, int64_t first, int64_t last, int64_t heads, int64_t length, int64_t dim, bool is_shared,
                 T* out) {
  const int64_t half = dim / 2;
  x += first * dim;
  out += first * dim;
  for (int64_t row = first; row < last; ++row, x += dim, out += dim) {
    const int64_t place = ((is_shared ? 0 : row / (heads * length) * length) + row % length) * dim;
    const T *c = cos + place, *s = sin + place;
    int64_t k = 0;
    for (; k + kLanes <= half; k += kLanes) {
      const Floats low = load(x + k), high = load(x + half + k);
      const Floats low_turned = rounded<T>(high * load(s + k)), high_turned = rounded<T>(low * load(s + half + k));
      store(rounded<T>(low * load(c + k)) - low_turned, out + k);
      store(rounded<T>(high * load(c + half + k)) + high_turned, out + half + k);
    }
    for (; k < half; ++k) {
      const float low = to_float(x[k]), high = to_float(x[half + k]);
      const float low_turned = rounded<T>(high * to_float(s[k])), high_turned = rounded<T>(low * to_float(s[half + k]));
      store(rounded<T>(low * to_float(c[k])) - low_turned, out + k);
      store(rounded<T>(high * to_float(c[half + k])) + high_turned, out + half + k);
    }
  }
}

template <typename T>
ffi::Error normalize_by(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight, float eps, ffi::Result<ffi::AnyBuffer>& out) {
  const T* from = reinterpret_cast<const T*>(x.untyped_data());
  T* to = reinterpret_cast<T*>(out->untyped_data());
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const auto by = [&](const auto* scales) {
    by_rows(pool, rows, width, [&](int64_t first, int64_t last) {
      normalize(from + first * width, scales, last - first, width, eps, to + first * width);
    });
  };
  if (weight.element_type() == ffi::F32) {
    by(reinterpret_cast<const float*>(weight.untyped_data()));
  } else {
    by(reinterpret_cast<const Bf16*>(weight.untyped_data()));
  }
  return ffi::Error::Success();
}

// x [R, K], weight [K] -> [R, K]; float32 or bfloat16, the result as x.
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> out, float eps) {
  if (!is_float_or_bf16(x) || !is_float_or_bf16(weight) || out->element_type() != x.element_type() || x.dimensions()[1] % kLanes)
    return ffi::Error::InvalidArgument("hfax: a norm takes float32 or bfloat16, and rows of a multiple of 16");
  return x.element_type() == ffi::F32 ? normalize_by<float>(pool, x, weight, eps, out) : normalize_by<Bf16>(pool, x, weight, eps, out);
}

template <typename T>
ffi::Error rotate_by(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& cos, const ffi::AnyBuffer& sin,
                     ffi::Result<ffi::AnyBuffer>& out) {
  const auto shape = x.dimensions();
  by_rows(pool, shape[0] * shape[1] * shape[2], shape[3], [&](int64_t first, int64_t last) {
    rotate_rows(reinterpret_cast<const T*>(x.untyped_data()), reinterpret_cast<const T*>(cos.untyped_data()),
                reinterpret_cast<const T*>(sin.untyped_data()), first, last, shape[1], shape[2], shape[3], cos.dimensions()[0] == 1,
                reinterpret_cast<T*>(out->untyped_data()));
  });
  return ffi::Error::Success();
}

// x [B, H, L, D], cos and sin [1 | B, L, D] -> [B, H, L, D]; all float32 or all bfloat16.
ffi::Error rotate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cos, ffi::AnyBuffer sin, ffi::Result<ffi::AnyBuffer> out) {
  const auto type = x.element_type();
  if (!is_float_or_bf16(x) || cos.element_type() != type || sin.element_type() != type || out->element_type() != type || x.dimensions()[3] % 2)
    return ffi::Error::InvalidArgument("hfax: rotation takes float32 or bfloat16, and heads of an even width");
  return type == ffi::F32 ? rotate_by<float>(pool, x, cos, sin, out) : rotate_by<Bf16>(pool, x, cos, sin, out);
}

}  // namespace
