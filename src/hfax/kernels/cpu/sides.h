// Matrices whose products are made, and some numbers of one of their rows.

#pragma once

#include "lanes.h"

namespace {

// One side of a product: `count` rows of `depth` numbers that are summed over, or, turned, `depth` rows of `count`. Rows begin `stride`
// numbers after each other.
template <typename T>
struct SideOf {
  const T* data;
  int64_t count, depth, stride;
  bool turned;
};
using Side = SideOf<Bf16>;

inline Floats load_some(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  Floats out = {};
  std::memcpy(&out, p, std::max<int64_t>(count, 0) * sizeof(float));
  return out;
}

inline Floats load_some(const Bf16* p, int64_t count) {
  if (count >= kLanes) return load(p);
  Bf16 some[kLanes] = {};
  std::memcpy(static_cast<void*>(some), p, std::max<int64_t>(count, 0) * sizeof(Bf16));
  return load(some);
}

inline void store_some(Floats v, int64_t count, float* out) {
  std::memcpy(out, &v, std::min(count, kLanes) * sizeof(float));
}

inline void store_some(Floats v, int64_t count, Bf16* out) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(static_cast<void*>(out), &rounded, std::min(count, kLanes) * sizeof(Bf16));
#else
  const Words bits = reinterpret_cast<const Words&>(v);
  const Words rounded = v != v ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Halves halves = __builtin_convertvector(rounded, Halves);
  std::memcpy(static_cast<void*>(out), &halves, std::min(count, kLanes) * sizeof(Bf16));
#endif
}

#if defined(__AVX512BF16__)
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << std::clamp<int64_t>(count, 0, 16)) - 1); }
inline __mmask32 first_halves(int64_t count) {
  return static_cast<__mmask32>((uint64_t{1} << std::clamp<int64_t>(count, 0, 32)) - 1);
}
#endif

}  // namespace
