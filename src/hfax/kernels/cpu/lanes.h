// Operations on vectors that the compiler's portable vectors lack: products of pairs of
// 16-bit integers, and turning a square of words. One definition for each instruction set; everything built on them is written once.

#pragma once

#include "common.h"

// Before a loop over an array of vectors, which else lies in memory.
#if defined(__clang__)
#define HFAX_UNROLL _Pragma("clang loop unroll(full)")
#else
#define HFAX_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

typedef int16_t Pairs __attribute__((vector_size(kLanes * 4)));
typedef int32_t UnalignedInts __attribute__((vector_size(kLanes * 4), aligned(4)));

inline Ints load_words(const void* p) { return *reinterpret_cast<const UnalignedInts*>(p); }
inline void store_words(Ints v, void* p) { *reinterpret_cast<UnalignedInts*>(p) = v; }
inline void store_floats(Floats v, float* p) { *reinterpret_cast<UnalignedFloats*>(p) = v; }

// 2 * kLanes bytes as 16-bit integers.
inline Ints load_bytes(const void* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  typedef int8_t HalfBytes __attribute__((vector_size(kLanes * 2), aligned(1)));
  return (Ints)__builtin_convertvector(*static_cast<const HalfBytes*>(p), Pairs);
#endif
}

// sum + a[even] * b[even] + a[odd] * b[odd] of the two 16-bit integers in each word.
inline Ints add_pairs(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__) && defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__ARM_NEON)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return sum + (Ints)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// sum + a * b, rounded once.
inline Floats fused(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  for (int64_t i = 0; i < kLanes; ++i) sum[i] = std::fma(a[i], b[i], sum[i]);
  return sum;
#endif
}

// kLanes rows of kLanes words become kLanes rows of the other axis.
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

inline void turn(Ints (&rows)[kLanes]) { turn(reinterpret_cast<__m512i(&)[16]>(rows)); }
#elif defined(__AVX2__)
inline void turn(Ints (&rows)[kLanes]) {
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
    rows[i] = (Ints)_mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    rows[i + 4] = (Ints)_mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}
#elif defined(__ARM_NEON)
inline void turn(Ints (&rows)[kLanes]) {
  const int32x4_t a = (int32x4_t)rows[0], b = (int32x4_t)rows[1], c = (int32x4_t)rows[2], d = (int32x4_t)rows[3];
  const int64x2_t ab = vreinterpretq_s64_s32(vtrn1q_s32(a, b)), ab_odd = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
  const int64x2_t cd = vreinterpretq_s64_s32(vtrn1q_s32(c, d)), cd_odd = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
  rows[0] = (Ints)vtrn1q_s64(ab, cd);
  rows[1] = (Ints)vtrn1q_s64(ab_odd, cd_odd);
  rows[2] = (Ints)vtrn2q_s64(ab, cd);
  rows[3] = (Ints)vtrn2q_s64(ab_odd, cd_odd);
}
#else
inline void turn(Ints (&rows)[kLanes]) {
  for (int64_t i = 0; i < kLanes; ++i) {
    for (int64_t j = i + 1; j < kLanes; ++j) {
      const int32_t kept = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = kept;
    }
  }
}
#endif

// Of each byte the entry of its lowest four bits in a table of 16, or 0 if its highest is set; other bits are 0.
inline Ints look_up(const uint8_t (&table)[16], Ints indices) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), (__m512i)indices);
#elif defined(__AVX2__)
  return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), (__m256i)indices);
#elif defined(__ARM_NEON)
  return (Ints)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)indices);
#else
  uint8_t bytes[kLanes * 4];
  std::memcpy(bytes, &indices, sizeof(bytes));
  for (uint8_t& byte : bytes) byte = byte & 0x80 ? 0 : table[byte];
  return load_words(bytes);
#endif
}

// kLanes numbers of float8_e4m3fn, each divided by 256. None may be the one that stands for no number.
inline Floats load_fp8(const uint8_t* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
  return (Floats)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbf80))));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 7);
  return (Floats)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(static_cast<short>(0xbf80))));
#else
  const Ints wide = __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), Ints);
  const Ints size = wide & (Ints{} + 0x7f), sign = wide & (Ints{} + std::numeric_limits<int32_t>::min());
  const Floats small = __builtin_convertvector(size, Floats) * 0x1p-17f;
  const Ints large = (size << 20) + (112 << 23);
  const Ints bits = (size < 8 ? reinterpret_cast<const Ints&>(small) : large) | sign;
  return reinterpret_cast<const Floats&>(bits);
#endif
}

// A number of float8_e4m3fn. As a float it is a 256th of what it stands for: see load_fp8.
struct Fp8 {
  uint8_t bits;
};

inline Floats load(const Fp8* p) { return load_fp8(&p->bits); }

inline float to_float(Fp8 value) {
  const int size = value.bits & 0x7f, exponent = size >> 3, fraction = size & 7;
  const float number = exponent ? std::ldexp(8.0f + fraction, exponent - 18) : std::ldexp(static_cast<float>(fraction), -17);
  return value.bits & 0x80 ? -number : number;
}

// What a number of a type stands for, divided by what it becomes as a float.
template <typename T>
constexpr float kUnit = std::is_same_v<T, Fp8> ? 256.0f : 1.0f;

// Four vectors added up in part: each quarter of the result, of four lanes, has a part of each one's total.
inline Ints quarters_of(Ints a, Ints b, Ints c, Ints d) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32((__m512i)a, (__m512i)b), _mm512_unpackhi_epi32((__m512i)a, (__m512i)b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32((__m512i)c, (__m512i)d), _mm512_unpackhi_epi32((__m512i)c, (__m512i)d));
  return (Ints)_mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
#elif defined(__AVX2__)
  const __m256i ab = _mm256_hadd_epi32((__m256i)a, (__m256i)b), cd = _mm256_hadd_epi32((__m256i)c, (__m256i)d);
  return (Ints)_mm256_hadd_epi32(ab, cd);
#elif defined(__ARM_NEON)
  return (Ints)vpaddq_s32(vpaddq_s32((int32x4_t)a, (int32x4_t)b), vpaddq_s32((int32x4_t)c, (int32x4_t)d));
#else
  return Ints{a[0] + a[1] + a[2] + a[3], b[0] + b[1] + b[2] + b[3], c[0] + c[1] + c[2] + c[3], d[0] + d[1] + d[2] + d[3]};
#endif
}

// The totals of kLanes vectors, from the quarters of each four.
inline Ints totals_of(const Ints (&quarters)[kLanes / 4]) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const auto both = [](__m512i a, __m512i b) { return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd)); };
  return (Ints)both(both((__m512i)quarters[0], (__m512i)quarters[1]), both((__m512i)quarters[2], (__m512i)quarters[3]));
#elif defined(__AVX2__)
  const __m256i a = (__m256i)quarters[0], b = (__m256i)quarters[1];
  return (Ints)_mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
#else
  return quarters[0];
#endif
}

}  // namespace
