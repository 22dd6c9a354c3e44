// What the kernels share: vectors as wide as the processor's own, bfloat16, and work on XLA's threads.

#pragma once

#include <atomic>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// What differs between instruction sets: the numbers of a vector, and the vectors of one side of a product that are summed at once, so
// that with 6 numbers of the other side they fill the registers. Wider vectors than the processor's are split by GCC through memory.
#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int64_t kLanes = 16;
constexpr int kPanel = 4;  // of 32 registers
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
constexpr int kPanel = 2;  // of 16
#else
constexpr int64_t kLanes = 4;
constexpr int kPanel = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));
typedef float UnalignedFloats __attribute__((vector_size(kLanes * 4), aligned(4)));

struct Bf16 {
  uint16_t bits;
};

inline Floats load(const float* p) { return *reinterpret_cast<const UnalignedFloats*>(p); }

inline Floats load(const Bf16* p) {
  Halves half = *reinterpret_cast<const Halves*>(p);
  Words wide = __builtin_convertvector(half, Words) << 16;
  return reinterpret_cast<Floats&>(wide);
}

inline bool is_float_or_bf16(const ffi::AnyBuffer& x) { return x.element_type() == ffi::F32 || x.element_type() == ffi::BF16; }

inline float to_float(float value) { return value; }

inline float to_float(Bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void store(float value, float* out) { *out = value; }

// Rounds to the nearest, ties to even; what is not a number stays so.
inline void store(float value, Bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) {
    out->bits = static_cast<uint16_t>((bits >> 16) | 0x40);
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

inline float total(Floats v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  std::memcpy(parts, &v, sizeof(v));
  const Four four = kLanes == 8 ? parts[0] + parts[kLanes / 4 - 1] : parts[0];
  return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

inline float highest_of(Floats v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (int64_t i = 1; i < kLanes; ++i) most = std::max(most, static_cast<float>(v[i]));
  return most;
#endif
}

// e to the power of what is left of each number beside `whole` times the logarithm of 2, at most half of it.
inline Floats exponential_of_rest(Floats x, Ints whole) {
  const Floats count = __builtin_convertvector(whole, Floats);
  const Floats rest = (x - count * 0.693359375f) + count * 2.12194440e-4f;
  Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  return sum * rest * rest + rest + 1.0f;
}

// e to the power of each, for numbers of at most 0; below -87 it is 0. The error is that of float32's last bit.
inline Floats exponential(Floats x) {
  const Floats clamped = x < -87.0f ? Floats{} - 87.0f : x;
  const Floats scaled = clamped * 1.44269504f;
  const Ints whole = __builtin_convertvector(scaled - 0.5f, Ints);  // towards zero: the nearest of numbers below 0
  const Ints bits = (whole + 127) << 23;
  const Floats power = reinterpret_cast<const Floats&>(bits);
  return x < -87.0f ? Floats{} : exponential_of_rest(clamped, whole) * power;
}

constexpr int64_t kMostKept = 16 << 20;  // bytes

// Memory of the calling thread from the beginning of a line of the cache, not initialised. What is not large stays with the thread for the
// next of the same type and use: fresh pages cost more than what is written to them.
template <typename T, int kUse>
class Memory {
 public:
  explicit Memory(int64_t count) {
    thread_local std::unique_ptr<T[]> kept;
    thread_local int64_t size = 0;
    if (count * static_cast<int64_t>(sizeof(T)) > kMostKept) {
      own_.reset(new T[count + kLine]);
      data_ = aligned(own_.get());
      return;
    }
    if (count > size) {
      kept.reset(new T[count + kLine]);
      size = count;
    }
    data_ = aligned(kept.get());
  }
  T* data() const { return data_; }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);
  static T* aligned(T* p) { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

  std::unique_ptr<T[]> own_;
  T* data_;
};

// ---------------------------------------------------------------------------------------------------------------- threads

// The most threads that a kernel works on, see threads.py; 0: all of XLA's pool.
std::atomic<int64_t> most_threads{0};

inline int64_t num_threads(ffi::ThreadPool& pool) {
  const int64_t most = most_threads.load(std::memory_order_relaxed), all = pool.num_threads();
  return most > 0 ? std::min(most, all) : all;
}

struct Shared {
  std::atomic<int64_t> next{0}, done{0};
};

// Does `work(piece)` for every piece, piece by piece on the calling thread and on whichever threads of XLA's pool come to help. A
// helper that comes when all is taken finds nothing to do, so nobody waits for a thread that has not started.
template <typename Work>
void parallel(ffi::ThreadPool& pool, int64_t pieces, const Work& work) {
  const int64_t helpers = std::min(num_threads(pool), pieces) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < pieces; ++i) work(i);
    return;
  }
  auto shared = std::make_shared<Shared>();
  const Work* body = &work;  // alive until every piece is done
  auto run = [shared, body, pieces]() {
    for (;;) {
      const int64_t piece = shared->next.fetch_add(1, std::memory_order_relaxed);
      if (piece >= pieces) return;
      (*body)(piece);
      shared->done.fetch_add(1, std::memory_order_acq_rel);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(run)(run));
  run();
  while (shared->done.load(std::memory_order_acquire) < pieces) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace
