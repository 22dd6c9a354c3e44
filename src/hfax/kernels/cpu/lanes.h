// Vectors as wide as the processor's own, and the operations on them that the compiler's portable vectors lack: products of pairs of
// 16-bit integers, and turning a square of words. One definition for each instruction set; everything built on them is written once.

#pragma once

#include "common.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

// Before a loop over an array of vectors, which else lies in memory.
#if defined(__clang__)
#define HFAX_UNROLL _Pragma("clang loop unroll(full)")
#else
#define HFAX_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int64_t kWords = 16;  // 32-bit words of a vector
#elif defined(__AVX2__)
constexpr int64_t kWords = 8;
#else
constexpr int64_t kWords = 4;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kPanel = 2;  // vectors of one side that are summed at once; with 6 numbers of the other they fill 16 registers
#else
constexpr int kPanel = 4;  // the same for 32 registers
#endif

typedef int32_t WordLanes __attribute__((vector_size(kWords * 4)));
typedef int16_t HalfLanes __attribute__((vector_size(kWords * 4)));
typedef float FloatLanes __attribute__((vector_size(kWords * 4)));
typedef int32_t UnalignedWords __attribute__((vector_size(kWords * 4), aligned(4)));
typedef float UnalignedFloatLanes __attribute__((vector_size(kWords * 4), aligned(4)));

inline WordLanes load_words(const void* p) { return *reinterpret_cast<const UnalignedWords*>(p); }
inline void store_words(WordLanes v, void* p) { *reinterpret_cast<UnalignedWords*>(p) = v; }
inline FloatLanes load_lanes(const float* p) { return *reinterpret_cast<const UnalignedFloatLanes*>(p); }
inline void store_all(FloatLanes v, float* p) { *reinterpret_cast<UnalignedFloatLanes*>(p) = v; }

// sum + a[even] * b[even] + a[odd] * b[odd] of the two 16-bit integers in each word.
inline WordLanes add_pairs(WordLanes sum, WordLanes a, WordLanes b) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return (WordLanes)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__) && defined(__AVX512BW__)
  return sum + (WordLanes)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (WordLanes)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  return sum + (WordLanes)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__ARM_NEON)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return sum + (WordLanes)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// sum + a * b, rounded once.
inline FloatLanes fused(FloatLanes a, FloatLanes b, FloatLanes sum) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (FloatLanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__)
  return (FloatLanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON)
  return (FloatLanes)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  for (int64_t i = 0; i < kWords; ++i) sum[i] = std::fma(a[i], b[i], sum[i]);
  return sum;
#endif
}

// kWords rows of kWords words become kWords rows of the other axis.
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline void turn(__m512i (&rows)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

inline void turn(WordLanes (&rows)[kWords]) { turn(reinterpret_cast<__m512i(&)[16]>(rows)); }
#elif defined(__AVX2__)
inline void turn(WordLanes (&rows)[kWords]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = (WordLanes)_mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    rows[i + 4] = (WordLanes)_mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}
#elif defined(__ARM_NEON)
inline void turn(WordLanes (&rows)[kWords]) {
  const int32x4_t a = (int32x4_t)rows[0], b = (int32x4_t)rows[1], c = (int32x4_t)rows[2], d = (int32x4_t)rows[3];
  const int64x2_t ab = vreinterpretq_s64_s32(vtrn1q_s32(a, b)), ab_odd = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
  const int64x2_t cd = vreinterpretq_s64_s32(vtrn1q_s32(c, d)), cd_odd = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
  rows[0] = (WordLanes)vtrn1q_s64(ab, cd);
  rows[1] = (WordLanes)vtrn1q_s64(ab_odd, cd_odd);
  rows[2] = (WordLanes)vtrn2q_s64(ab, cd);
  rows[3] = (WordLanes)vtrn2q_s64(ab_odd, cd_odd);
}
#else
inline void turn(WordLanes (&rows)[kWords]) {
  for (int64_t i = 0; i < kWords; ++i) {
    for (int64_t j = i + 1; j < kWords; ++j) {
      const int32_t kept = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = kept;
    }
  }
}
#endif

}  // namespace
