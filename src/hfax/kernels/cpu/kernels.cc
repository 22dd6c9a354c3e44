// Products of few rows with a large matrix, and attention of few queries over a long cache, for XLA on CPU.
//
// Decoding moves every weight once a token, so its limit is the memory's bandwidth. XLA's own code for these shapes stays far from
// it for bfloat16 with several rows and for packed integers, and reads the whole capacity of a cache; see docs/performance.md.
// Everything here is written with the compiler's portable vectors, as wide as the processor's; where it multiplies pairs of bfloat16
// itself, that is used. Each function is an XLA FFI handler; calls.py says what its buffers are.

#include "common.h"
#include "matmul.h"
#include "norms.h"
#include "fp8.h"
#include "packed_amx.h"
#include "prompt_attention.h"

namespace {

constexpr int64_t kChunkBytes = 256 << 10;  // of weights that a thread takes at a time
constexpr int64_t kColumnBlock = 4;        // rows of the weight that a piece of work has a multiple of
constexpr int64_t kPrefetch = 4096;        // bytes ahead

// ----------------------------------------------------------------------------------------------------------------- linear

// How stored weights become vectors. A decoder has `Activation`, the type of x in the inner loop; `kWidth`, the columns of a vector; and
// `multiply_add`.

template <typename W>
struct Floating {  // float32 or bfloat16
  using Activation = float;
  using Vector = Floats;
  static constexpr int kWidth = kLanes;
  const W* weight;
  int64_t width;

  static Vector decode(const W* p) { return load(p); }
};

inline void multiply_add(Floats& sum, Floats x, Floats w) { sum += x * w; }
inline void load_activations(const float* p, Floats& out) { out = load(p); }

#if defined(__AVX512BF16__)
// With bfloat16 activations the processor multiplies pairs: 32 columns a vector.
struct Bf16Pairs {
  using Activation = Bf16;
  using Vector = __m512bh;
  static constexpr int kWidth = 32;
  const Bf16* weight;
  int64_t width;

  static Vector decode(const Bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
};

inline void multiply_add(Floats& sum, __m512bh x, __m512bh w) { sum = _mm512_dpbf16_ps(sum, x, w); }
inline void load_activations(const Bf16* p, __m512bh& out) { out = (__m512bh)_mm512_loadu_si512(p); }
#endif

constexpr int kChains = 4;

template <typename Decoder>
struct Weight {
  Decoder decoder;

  int64_t bytes_per_row() const { return decoder.width * sizeof(*decoder.weight); }

  // Sums of M rows of x with R rows of the weight from `row` on. A sum's order does not depend on M and R, so a row of x gives the same
  // numbers whatever rows are beside it: chain c has the vectors c, c + kChains, ..., and the chains are added at the end. Where all
  // chains of a block fit the registers, they go on together, since one addition takes several cycles; else one after the other, with
  // a weight that is in the nearest cache by then.
  template <int M, int R>
  void dots(const typename Decoder::Activation* x, int64_t row, float* out, int64_t stride) const {
    using Vector = typename Decoder::Vector;
    constexpr int kTogether = M * R <= kPanel ? kChains : 1;
    constexpr int64_t kRound = kChains * Decoder::kWidth;
    const int64_t width = decoder.width, whole = width - width % Decoder::kWidth, rounds = whole / kRound * kRound;  // chain 0 has the rest
    const auto* w = decoder.weight + row * width;
    const int64_t ahead = R == 1 ? kPrefetch / sizeof(*w) : R * width;
    const auto step = [&](int64_t k, Floats (&into)[M][R]) __attribute__((always_inline)) {
      Vector ws[R];
      for (int r = 0; r < R; ++r) {
        __builtin_prefetch(w + r * width + k + ahead);
        ws[r] = Decoder::decode(w + r * width + k);
      }
      for (int m = 0; m < M; ++m) {
        Vector xs;
        load_activations(x + m * width + k, xs);
        for (int r = 0; r < R; ++r) multiply_add(into[m][r], xs, ws[r]);
      }
    };
    Floats all[M][R];
    for (int first = 0; first < kChains; first += kTogether) {
      Floats sums[kTogether][M][R] = {};
      for (int64_t k = 0; k < rounds; k += kRound)
        for (int c = 0; c < kTogether; ++c) step(k + (first + c) * Decoder::kWidth, sums[c]);
      if (first == 0)
        for (int64_t k = rounds; k < whole; k += Decoder::kWidth) step(k, sums[0]);
      for (int c = 0; c < kTogether; ++c)
        for (int m = 0; m < M; ++m)
          for (int r = 0; r < R; ++r) all[m][r] = first + c == 0 ? sums[c][m][r] : all[m][r] + sums[c][m][r];
    }
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < R; ++r) out[m * stride + r] = total(all[m][r]);
    for (int64_t k = whole; k < width; ++k)  // the columns that fill no vector
      for (int m = 0; m < M; ++m)
        for (int r = 0; r < R; ++r) out[m * stride + r] += to_float(x[m * width + k]) * to_float(w[r * width + k]);
  }
};

// Rows of float or bfloat16 activations, as `dots` of a `Weight` takes them.
template <typename Decoder>
struct Rows {
  const Weight<Decoder>& weight;
  const typename Decoder::Activation* x;

  int64_t bytes_per_row() const { return weight.bytes_per_row(); }
  template <int M, int R>
  void dots(int64_t first, int64_t row, float* out) const {
    weight.template dots<M, R>(x + first * weight.decoder.width, row, out, R);
  }
};

template <int M, int R, typename Product, typename Out>
void block(const Product& product, int64_t first, int64_t row, Out* out, int64_t num_columns) {
  float sums[M * R];
  product.template dots<M, R>(first, row, sums);
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) store(sums[m * R + r], out + (first + m) * num_columns + row + r);
}

// Rows `first` to `last` of x with R rows of the weight, which stay in the nearest cache meanwhile.
template <int M, int R, typename Product, typename Out>
void blocks(const Product& product, int64_t first, int64_t last, int64_t row, Out* out, int64_t num_columns) {
  int64_t m = first;
  for (; m + M <= last; m += M) block<M, R>(product, m, row, out, num_columns);
  for (; m < last; ++m) block<1, R>(product, m, row, out, num_columns);
}

// Whether memory is fastest in several streams, as on Intel's processors, so that a single row of x is multiplied with several rows of the
// weight at a time. On AMD's one stream is faster.
inline bool reads_in_streams() {
#if defined(__x86_64__)
  static const bool is_intel = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
  return is_intel;
#else
  return false;
#endif
}

// The same with rows `begin` to `end` of the weight.
template <typename Product, typename Out>
void columns(const Product& product, int64_t first, int64_t last, int64_t begin, int64_t end, Out* out, int64_t num_columns) {
  const int64_t num_rows = last - first;
  int64_t row = begin;
  constexpr int kSide = kLanes == 16 ? 4 : 2;  // of a block whose sums fit the registers
  if (num_rows > 1 || reads_in_streams())
    for (; row + kSide <= end; row += kSide) blocks<kSide, kSide>(product, first, last, row, out, num_columns);
  for (; row < end; ++row) blocks<kSide, 1>(product, first, last, row, out, num_columns);
}

inline int64_t columns_per_chunk(int64_t bytes_per_row) {
  const int64_t fitting = kChunkBytes / std::max<int64_t>(bytes_per_row, 1) / kColumnBlock * kColumnBlock;
  return std::max(kColumnBlock, fitting);
}

template <typename Product, typename Out>
void multiply(ffi::ThreadPool& pool, const Product& product, Out* out, int64_t num_rows, int64_t num_columns) {
  const int64_t per_chunk = columns_per_chunk(product.bytes_per_row()), chunks = (num_columns + per_chunk - 1) / per_chunk;
  parallel(pool, chunks, [&](int64_t chunk) {
    const int64_t begin = chunk * per_chunk;
    columns(product, 0, num_rows, begin, std::min(num_columns, begin + per_chunk), out, num_columns);
  });
}

// The activations of a buffer as float32, converted if they are bfloat16.
class Activations {
 public:
  explicit Activations(const ffi::AnyBuffer& x) {
    if (x.element_type() == ffi::F32) {
      data_ = reinterpret_cast<const float*>(x.untyped_data());
      return;
    }
    const Bf16* from = reinterpret_cast<const Bf16*>(x.untyped_data());
    converted_.resize(x.element_count());
    for (size_t i = 0; i < converted_.size(); ++i) converted_[i] = to_float(from[i]);
    data_ = converted_.data();
  }
  const float* data() const { return data_; }

 private:
  std::vector<float> converted_;
  const float* data_;
};

// Calls `write` with the result's numbers, as what they are.
template <typename Write>
ffi::Error as_numbers(ffi::Result<ffi::AnyBuffer>& out, const Write& write) {
  if (out->element_type() == ffi::BF16) {
    write(reinterpret_cast<Bf16*>(out->untyped_data()));
  } else if (out->element_type() == ffi::F32) {
    write(reinterpret_cast<float*>(out->untyped_data()));
  } else {
    return ffi::Error::InvalidArgument("hfax: the result must be float32 or bfloat16");
  }
  return ffi::Error::Success();
}

template <typename Product>
ffi::Error multiply_into(ffi::ThreadPool& pool, const Product& product, ffi::Result<ffi::AnyBuffer>& out) {
  return as_numbers(out, [&](auto* to) { multiply(pool, product, to, out->dimensions()[0], out->dimensions()[1]); });
}

template <typename Decoder>
ffi::Error multiply_by(ffi::ThreadPool& pool, const Weight<Decoder>& weight, const typename Decoder::Activation* x, ffi::Result<ffi::AnyBuffer>& out) {
  return multiply_into(pool, Rows<Decoder>{weight, x}, out);
}

ffi::Error check_activations(const ffi::AnyBuffer& x) {
  if (is_float_or_bf16(x)) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("hfax: activations must be float32 or bfloat16");
}

#if defined(__AVX512BF16__)
// Several rows of bfloat16: the lanes of a vector are 16 rows of x, so that nothing is added across lanes, and a row's sums are added
// in the same order however many rows there are.
constexpr int64_t kLaneRows = 16, kLanesFrom = 2;
constexpr int64_t kPairsTogether = 1 << 15;

// Pairs of columns of x, 16 rows beside each other, into `packed` [vectors][K / 2][16] words; rows that are not there are 0.
inline void pack_pairs(ffi::ThreadPool& pool, const Bf16* x, int64_t num_rows, int64_t width, uint32_t* packed) {
  const int64_t vectors = (num_rows + kLaneRows - 1) / kLaneRows, pairs = width / 2;
  const auto pack = [&](int64_t v) {
    const char* from = reinterpret_cast<const char*>(x + v * kLaneRows * width);
    const int64_t rows = std::min(num_rows - v * kLaneRows, kLaneRows);
    uint32_t* to = packed + v * pairs * kLaneRows;
    for (int64_t k = 0; k < pairs; k += 16, to += 16 * kLaneRows) {
      const int64_t count = std::min<int64_t>(pairs - k, 16);
      __m512i words[16];
      for (int64_t r = 0; r < 16; ++r)
        words[r] = r < rows ? _mm512_maskz_loadu_epi32(0xffff >> (16 - count), from + 4 * (r * pairs + k)) : _mm512_setzero_si512();
      turn(words);
      for (int64_t i = 0; i < count; ++i) _mm512_storeu_si512(to + i * kLaneRows, words[i]);
    }
  };
  if (vectors * width < kPairsTogether) {  // less work than waking a thread
    for (int64_t v = 0; v < vectors; ++v) pack(v);
  } else {
    parallel(pool, vectors, pack);
  }
}

constexpr int64_t kTile = 48;  // rows of the weight whose results are put together before they are written

// V vectors of rows with R rows of the weight, into a tile of results by rows of x.
template <int V, int R>
void lanes(const uint32_t* x, const Bf16* weight, int64_t width, float* tile) {
  const int64_t pairs = width / 2;
  Floats sums[V][R] = {};
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    __m512bh xs[V];
    for (int v = 0; v < V; ++v) xs[v] = (__m512bh)_mm512_loadu_si512(x + (v * pairs + k) * kLaneRows);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, weight + r * width + 2 * k, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < V; ++v) sums[v][r] = _mm512_dpbf16_ps(sums[v][r], xs[v], both);
    }
  };
  int64_t k = 0;
  for (; k + 16 <= pairs; k += 16) {
    for (int r = 0; r < R; ++r) __builtin_prefetch(weight + (R + r) * width + 2 * k, 0, 2);  // the same columns of the rows to come
    for (int i = 0; i < 16; ++i) step(k + i);
  }
  for (; k < pairs; ++k) step(k);
  for (int v = 0; v < V; ++v)
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < kLaneRows; ++i) tile[(v * kLaneRows + i) * kTile + r] = sums[v][r][i];
}

template <int V, typename Out>
void lanes_of(const uint32_t* x, int64_t num_rows, const Bf16* weight, int64_t width, int64_t weight_rows, Out* out, int64_t num_columns) {
  constexpr int R = V <= 2 ? 12 : V == 3 ? 8 : 6;
  float tile[V * kLaneRows * kTile];
  for (int64_t first = 0; first < weight_rows; first += kTile) {
    const int64_t count = std::min(weight_rows - first, kTile);
    int64_t n = 0;
    for (; n + R <= count; n += R) lanes<V, R>(x, weight + (first + n) * width, width, tile + n);
    for (; n + 4 <= count; n += 4) lanes<V, 4>(x, weight + (first + n) * width, width, tile + n);
    for (; n < count; ++n) lanes<V, 1>(x, weight + (first + n) * width, width, tile + n);
    for (int64_t row = 0; row < std::min(num_rows, V * kLaneRows); ++row)
      for (int64_t i = 0; i < count; ++i) store(tile[row * kTile + i], out + row * num_columns + first + i);
  }
}

template <typename Out>
void multiply_lanes(ffi::ThreadPool& pool, const Bf16* x, const Bf16* weight, int64_t width, int64_t num_rows, Out* out, int64_t num_columns) {
  const int64_t vectors = (num_rows + kLaneRows - 1) / kLaneRows;
  const Memory<uint32_t, 0> packed(vectors * (width / 2) * kLaneRows);
  pack_pairs(pool, x, num_rows, width, packed.data());
  const int64_t per_chunk = std::max<int64_t>(kTile, kChunkBytes / std::max<int64_t>(2 * width, 1) / kTile * kTile), chunks = (num_columns + per_chunk - 1) / per_chunk;
  parallel(pool, chunks, [&](int64_t chunk) {
    const int64_t begin = chunk * per_chunk, count = std::min(num_columns - begin, per_chunk);
    for (int64_t v = 0; v < vectors; v += 4) {
      const uint32_t* rows = packed.data() + v * (width / 2) * kLaneRows;
      const int64_t left = num_rows - v * kLaneRows;
      Out* to = out + v * kLaneRows * num_columns + begin;
      switch (std::min<int64_t>(vectors - v, 4)) {
        case 1: lanes_of<1>(rows, left, weight + begin * width, width, count, to, num_columns); break;
        case 2: lanes_of<2>(rows, left, weight + begin * width, width, count, to, num_columns); break;
        case 3: lanes_of<3>(rows, left, weight + begin * width, width, count, to, num_columns); break;
        default: lanes_of<4>(rows, left, weight + begin * width, width, count, to, num_columns);
      }
    }
  });
}
#endif

// Calls `use` with the activations as what they are.
template <typename Use>
ffi::Error with_activations(const ffi::AnyBuffer& x, const Use& use) {
  if (x.element_type() == ffi::BF16) return use(reinterpret_cast<const Bf16*>(x.untyped_data()));
  if (x.element_type() == ffi::F32) return use(reinterpret_cast<const float*>(x.untyped_data()));
  return ffi::Error::InvalidArgument("hfax: activations must be float32 or bfloat16");
}

// x [M, K], weight [N, K] of float32 or bfloat16 -> [M, N].
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t width = x.dimensions()[1], rows = out->dimensions()[0], num_columns = out->dimensions()[1];
  const auto by = [&](const auto* w) {
    using W = std::decay_t<decltype(*w)>;
    return with_activations(x, [&](const auto* from) {
      using X = std::decay_t<decltype(*from)>;
#if defined(__AVX512BF16__)
      if constexpr (std::is_same_v<X, Bf16> && std::is_same_v<W, Bf16>) {
        if (rows < kLanesFrom || (width % 2 && !has_tiles())) return multiply_by(pool, Weight<Bf16Pairs>{{w, width}}, from, out);
        if (!has_tiles())
          return as_numbers(out, [&](auto* to) { multiply_lanes(pool, from, w, width, rows, to, num_columns); });
      }
#endif
      // with 32 registers blocks of sums across lanes need no packing, which costs more than few rows of float32 bring
      constexpr bool kAcross = std::is_same_v<W, float> && kLanes == 16;
      if (rows == 1 || kAcross) return multiply_by(pool, Weight<Floating<W>>{{w, width}}, Activations(x).data(), out);
      const SideOf<X> side{from, rows, width, width, false};
      return as_numbers(out, [&](auto* to) { multiply_matrices(pool, side, SideOf<W>{w, num_columns, width, width, false}, to); });
    });
  };
  if (weight.element_type() == ffi::F32) return by(reinterpret_cast<const float*>(weight.untyped_data()));
  if (weight.element_type() == ffi::BF16) return by(reinterpret_cast<const Bf16*>(weight.untyped_data()));
  return ffi::Error::InvalidArgument("hfax: the weight must be float32 or bfloat16");
}

// Codes of any type, scales, and offsets, which are empty if there are none; the last axis of each is of columns or groups.
struct PackedBuffers {
  ffi::AnyBuffer values, scale, offset;
  int64_t encoding;

  static OfGroups numbers(const ffi::AnyBuffer& x) {
    return {x.element_count() ? static_cast<const uint8_t*>(x.untyped_data()) : nullptr, x.element_type()};
  }

  // Matrix `number` of `num_columns` rows.
  template <Encoding kCode>
  Packed<kCode> matrix(int64_t number, int64_t num_columns, int64_t width) const {
    const int64_t groups = scale.dimensions().back(), rows = number * num_columns;
    return {static_cast<const uint8_t*>(values.untyped_data()) + rows * width * bits_of(kCode) / 8, numbers(scale).from(rows * groups),
            numbers(offset).from(rows * groups), width, width / groups};
  }

  ffi::Error check(int64_t width) const {
    const int64_t groups = scale.dimensions().back(), group = groups ? width / groups : 0;
    const bool is_small = encoding == kInt4 || encoding == kFp4;
    const bool fits = group && width % groups == 0 && group % kLeastGroup == 0 && group <= kMaxGroup;
    if (!fits || (is_small && (width % 128 || (group % 128 && 128 % group))))
      return ffi::Error::InvalidArgument("hfax: packed weights have groups of another width");
    for (const ffi::DataType type : {scale.element_type(), offset.element_type()})
      if (type != ffi::BF16 && type != ffi::F16 && type != ffi::F32)
        return ffi::Error::InvalidArgument("hfax: scales and offsets must be bfloat16, float16 or float32");
    if (offset.element_count() && offset.element_count() != scale.element_count())
      return ffi::Error::InvalidArgument("hfax: scales and offsets must have one shape");
    return ffi::Error::Success();
  }
};

// Calls `use` with what the codes are, as a constant.
template <typename Use>
ffi::Error with_encoding(int64_t encoding, const Use& use) {
  switch (encoding) {
    case kInt8: return use(std::integral_constant<Encoding, kInt8>{});
    case kInt4: return use(std::integral_constant<Encoding, kInt4>{});
    case kFp8: return use(std::integral_constant<Encoding, kFp8>{});
    case kFp4: return use(std::integral_constant<Encoding, kFp4>{});
    default: return ffi::Error::InvalidArgument("hfax: there is no such encoding");
  }
}

// What weights of an encoding are multiplied with.
template <Encoding kCode>
using RowsFor = std::conditional_t<kCode == kFp8, Widened, Rounded>;

// x [M, K], values [N, K] or, of 4 bits, [N, K / 2], scale and offset [N, K / group] -> [M, N]. `any_order`: sums may have another order
// for many rows than for few.
ffi::Error linear_packed(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scale, ffi::AnyBuffer offset,
                         ffi::Result<ffi::AnyBuffer> out, int64_t encoding, bool any_order) {
  const int64_t width = x.dimensions()[1], num_columns = out->dimensions()[1];
  const PackedBuffers buffers{values, scale, offset, encoding};
  if (auto error = buffers.check(width); error.failure()) return error;
  return with_encoding(encoding, [&](auto code) {
    const auto weight = buffers.matrix<decltype(code)::value>(0, num_columns, width);
    const int64_t per_chunk = packed_chunk(weight), chunks = (num_columns + per_chunk - 1) / per_chunk;
    return with_activations(x, [&](const auto* from) {
      if constexpr (decltype(code)::value == kFp8) {
        if (any_order && x.dimensions()[0] >= kDecodedFrom) {
          return as_numbers(out, [&](auto* to) {
            parallel(pool, chunks, [&](int64_t chunk) {
              multiply_decoded(from, x.dimensions()[0], weight, chunk * per_chunk, std::min(num_columns, (chunk + 1) * per_chunk), to, num_columns);
            });
          });
        }
#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
        if constexpr (std::is_same_v<std::decay_t<decltype(*from)>, Bf16>) {
          if (any_order && PairedRow::fits(weight, x.dimensions()[0])) {
            const PairedRow row(from, width);
            return as_numbers(out, [&](auto* to) {
              parallel(pool, chunks, [&](int64_t chunk) {
                multiply_pairs(row, weight, chunk * per_chunk, std::min(num_columns, (chunk + 1) * per_chunk), to);
              });
            });
          }
        }
#endif
      }
      const auto rows = RowsFor<decltype(code)::value>::make(pool, from, nullptr, x.dimensions()[0], weight);
      return as_numbers(out, [&](auto* to) {
        parallel(pool, chunks, [&](int64_t chunk) {
          multiply_packed(rows, weight, chunk * per_chunk, std::min(num_columns, (chunk + 1) * per_chunk), to, num_columns);
        });
      });
    });
  });
}

// ---------------------------------------------------------------------------------------------------------------- experts

// Rows in the order of their experts: row `order[i]` is the i-th, and those of expert e are from `starts[e]` to `starts[e + 1]`.
struct ByExpert {
  std::vector<int64_t> order, starts, chosen;

  ByExpert(const int32_t* experts, int64_t rows, int64_t num_experts) : order(rows), starts(num_experts + 1) {
    for (int64_t i = 0; i < rows; ++i) ++starts[experts[i] + 1];
    for (int64_t e = 0; e < num_experts; ++e) {
      if (starts[e + 1]) chosen.push_back(e);
      starts[e + 1] += starts[e];
    }
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t i = 0; i < rows; ++i) order[next[experts[i]]++] = i;
  }
};

// `make(e)` gives the product of the sorted rows with the matrix of expert e; a matrix is read once however many rows chose it.
template <typename Out, typename Make>
void multiply_chosen(ffi::ThreadPool& pool, const ByExpert& sorted, const Make& make, Out* out, int64_t num_columns) {
  const int64_t rows = sorted.order.size();
  const int64_t per_chunk = columns_per_chunk(make(0).bytes_per_row()), chunks = (num_columns + per_chunk - 1) / per_chunk;
  std::vector<Out> results(rows * num_columns);
  parallel(pool, sorted.chosen.size() * chunks, [&](int64_t piece) {
    const int64_t expert = sorted.chosen[piece / chunks], begin = piece % chunks * per_chunk;
    columns(make(expert), sorted.starts[expert], sorted.starts[expert + 1], begin, std::min(num_columns, begin + per_chunk), results.data(), num_columns);
  });
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(out + sorted.order[i] * num_columns, results.data() + i * num_columns, num_columns * sizeof(Out));
}

template <typename Make>
ffi::Error multiply_chosen_into(ffi::ThreadPool& pool, const ByExpert& sorted, const Make& make, ffi::Result<ffi::AnyBuffer>& out) {
  return as_numbers(out, [&](auto* to) { multiply_chosen(pool, sorted, make, to, out->dimensions()[1]); });
}

template <typename T>
std::vector<T> sorted_rows(const T* x, const ByExpert& sorted, int64_t width) {
  std::vector<T> out(sorted.order.size() * width);
  for (size_t i = 0; i < sorted.order.size(); ++i) std::memcpy(out.data() + i * width, x + sorted.order[i] * width, width * sizeof(T));
  return out;
}

ffi::Error check_experts(const ffi::AnyBuffer& x, const ffi::Buffer<ffi::S32>& experts, int64_t num_experts) {
  if (auto error = check_activations(x); error.failure()) return error;
  for (size_t i = 0; i < experts.element_count(); ++i)
    if (experts.typed_data()[i] < 0 || experts.typed_data()[i] >= num_experts) return ffi::Error::InvalidArgument("hfax: there is no such expert");
  return ffi::Error::Success();
}

// x [S, K], weight [E, N, K] of float32 or bfloat16, experts [S] -> [S, N]: each row with the matrix of its expert.
ffi::Error linear_experts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Buffer<ffi::S32> experts, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1], num_experts = weight.dimensions()[0];
  if (auto error = check_experts(x, experts, num_experts); error.failure()) return error;
  const int64_t size = weight.dimensions()[1] * width;
  const ByExpert sorted(experts.typed_data(), rows, num_experts);
  const auto run = [&](auto decoder, const auto* w, const auto* from) {
    using Decoder = decltype(decoder);
    const auto of_rows = sorted_rows(from, sorted, width);
    std::vector<Weight<Decoder>> weights;
    for (int64_t e = 0; e < num_experts; ++e) weights.push_back({{w + e * size, width}});
    return multiply_chosen_into(pool, sorted, [&](int64_t e) { return Rows<Decoder>{weights[e], of_rows.data()}; }, out);
  };
  if (weight.element_type() == ffi::F32)
    return run(Floating<float>{}, reinterpret_cast<const float*>(weight.untyped_data()), Activations(x).data());
  if (weight.element_type() != ffi::BF16) return ffi::Error::InvalidArgument("hfax: the weight must be float32 or bfloat16");
  const Bf16* w = reinterpret_cast<const Bf16*>(weight.untyped_data());
#if defined(__AVX512BF16__)
  if (x.element_type() == ffi::BF16) return run(Bf16Pairs{}, w, reinterpret_cast<const Bf16*>(x.untyped_data()));
#endif
  return run(Floating<Bf16>{}, w, Activations(x).data());
}

// x [S, K], values [E, N, K] or, of 4 bits, [E, N, K / 2], scale and offset [E, N, K / group], experts [S] -> [S, N].
ffi::Error linear_experts_packed(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer values, ffi::AnyBuffer scale, ffi::AnyBuffer offset,
                                 ffi::Buffer<ffi::S32> experts, ffi::Result<ffi::AnyBuffer> out, int64_t encoding, bool any_order) {
  const int64_t num_experts = values.dimensions()[0], num_columns = values.dimensions()[1];
  if (auto error = check_experts(x, experts, num_experts); error.failure()) return error;
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const PackedBuffers buffers{values, scale, offset, encoding};
  if (auto error = buffers.check(width); error.failure()) return error;
  const ByExpert sorted(experts.typed_data(), rows, num_experts);
  return with_encoding(encoding, [&](auto code) {
    const auto matrix = [&](int64_t e) { return buffers.matrix<decltype(code)::value>(e, num_columns, width); };
    return with_activations(x, [&](const auto* from) {
      using Rows = RowsFor<decltype(code)::value>;
      const auto is_decoded = [&](int64_t e) {
        return decltype(code)::value == kFp8 && any_order && sorted.starts[e + 1] - sorted.starts[e] >= kDecodedFrom;
      };
      std::vector<Rows> of_chosen;
      bool has_decoded = false;
      for (const int64_t e : sorted.chosen) {
        const int64_t first = sorted.starts[e];
        has_decoded |= is_decoded(e);
        of_chosen.push_back(is_decoded(e) ? Rows{} : Rows::make(pool, from, sorted.order.data() + first, sorted.starts[e + 1] - first, matrix(e)));
      }
      const auto in_order = has_decoded ? sorted_rows(from, sorted, width) : std::vector<std::decay_t<decltype(*from)>>{};
      return as_numbers(out, [&](auto* to) {
        std::vector<std::decay_t<decltype(*to)>> results(rows * num_columns);
        const int64_t per_chunk = packed_chunk(matrix(0)), chunks = (num_columns + per_chunk - 1) / per_chunk;
        parallel(pool, sorted.chosen.size() * chunks, [&](int64_t piece) {
          const int64_t chosen = piece / chunks, e = sorted.chosen[chosen], first = sorted.starts[e];
          const int64_t begin = piece % chunks * per_chunk, end = std::min(num_columns, begin + per_chunk);
          auto* of_expert = results.data() + first * num_columns;
          if constexpr (decltype(code)::value == kFp8) {
            if (is_decoded(e)) {
              multiply_decoded(in_order.data() + first * width, sorted.starts[e + 1] - first, matrix(e), begin, end, of_expert, num_columns);
              return;
            }
          }
          multiply_packed(of_chosen[chosen], matrix(e), begin, end, of_expert, num_columns);
        });
        for (int64_t i = 0; i < rows; ++i)
          std::memcpy(to + sorted.order[i] * num_columns, results.data() + i * num_columns, num_columns * sizeof(*to));
      });
    });
  });
}

// -------------------------------------------------------------------------------------------------------------- attention

constexpr int64_t kKeyBlock = 64;
constexpr int64_t kKeysAhead = 8;

// The totals of N vectors, 1 or 4, one after the other.
template <int N>
inline void totals(const Floats* v, float* out) {
#if defined(__AVX512F__)
  if constexpr (N == 4) {  // together they take half the instructions that one after the other does
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    return;
  }
#endif
  for (int i = 0; i < N; ++i) out[i] = total(v[i]);
}

// Scores of C queries with N keys, `dim` a multiple of the lanes. A key becomes floats once for all of them.
template <int C, int N, typename T>
inline void scores_with(const float* query, int64_t dim, const T* keys, float* scores, int64_t stride) {
  Floats parts[C][N] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    Floats ks[N];
    for (int n = 0; n < N; ++n) ks[n] = load(keys + n * dim + d);
    for (int c = 0; c < C; ++c)
      for (int n = 0; n < N; ++n) parts[c][n] += load(query + c * dim + d) * ks[n];
  }
  for (int c = 0; c < C; ++c) totals<N>(parts[c], scores + c * stride);
}

#if defined(__AVX512BF16__)
// The same with queries in bfloat16, whose products with keys the processor sums by pairs; `dim` a multiple of 32.
template <int C, int N>
inline void scores_with(const Bf16* query, int64_t dim, const Bf16* keys, float* scores, int64_t stride) {
  Floats parts[C][N] = {};
  for (int64_t d = 0; d < dim; d += 32) {
    __m512bh ks[N];
    for (int n = 0; n < N; ++n) ks[n] = (__m512bh)_mm512_loadu_si512(keys + n * dim + d);
    for (int c = 0; c < C; ++c) {
      const __m512bh q = (__m512bh)_mm512_loadu_si512(query + c * dim + d);
      for (int n = 0; n < N; ++n) parts[c][n] = _mm512_dpbf16_ps(parts[c][n], q, ks[n]);
    }
  }
  for (int c = 0; c < C; ++c) totals<N>(parts[c], scores + c * stride);
}
#endif

// Scores of `count` queries with N keys.
template <int N, typename Q, typename T>
inline void scores_of(const Q* query, int64_t count, int64_t dim, const T* keys, float* scores) {
  int64_t c = 0;
  if (kLanes != 8)  // 16 registers hold the sums of two queries
    for (; c + 4 <= count; c += 4) scores_with<4, N>(query + c * dim, dim, keys, scores + c * kKeyBlock, kKeyBlock);
  for (; c + 2 <= count; c += 2) scores_with<2, N>(query + c * dim, dim, keys, scores + c * kKeyBlock, kKeyBlock);
  for (; c < count; ++c) scores_with<1, N>(query + c * dim, dim, keys, scores + c * kKeyBlock, kKeyBlock);
}

// Memory that is needed soon: `bytes` for each key that is worked on meanwhile, so that reading never pauses.
struct Ahead {
  const char* from = nullptr;
  int64_t bytes = 0;

  void fetch(int64_t key) const {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + key * bytes + line);
  }
};

// Sums of C queries over `keys` values, V vectors wide, added to what is in `out`. A value becomes floats once for all of them.
template <int C, int V, typename T>
inline void weighted_values(const float* weights, int64_t stride, const T* values, int64_t value_dim, int64_t keys, float* out, Ahead ahead) {
  Floats sums[C][V];
  for (int c = 0; c < C; ++c)
    for (int v = 0; v < V; ++v) sums[c][v] = load(out + c * value_dim + v * kLanes);
  for (int64_t k = 0; k < keys; ++k) {
    const T* value = values + k * value_dim;
    ahead.fetch(k);
    Floats vs[V];
    for (int v = 0; v < V; ++v) vs[v] = load(value + v * kLanes);
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v) sums[c][v] += weights[c * stride + k] * vs[v];
  }
  for (int c = 0; c < C; ++c)
    for (int v = 0; v < V; ++v) std::memcpy(out + c * value_dim + v * kLanes, &sums[c][v], sizeof(Floats));
}

#if defined(__AVX512BF16__)
// The same for V times 32 columns of bfloat16 values and weights rounded to bfloat16, which the processor sums by pairs of keys.
template <int C, int V>
inline void weighted_values(const Bf16* weights, int64_t stride, const Bf16* values, int64_t value_dim, int64_t keys, float* out, Ahead ahead) {
  // two keys' columns lie beside each other by fours: columns 0 to 3, 8 to 11, 16 to 19 and 24 to 27 in the first of two sums
  Floats sums[C][V][2];
  for (int c = 0; c < C; ++c) {
    for (int v = 0; v < V; ++v) {
      const Floats low = load(out + c * value_dim + 32 * v), high = load(out + c * value_dim + 32 * v + kLanes);
      sums[c][v][0] = _mm512_shuffle_f32x4(low, high, 0x88);
      sums[c][v][1] = _mm512_shuffle_f32x4(low, high, 0xdd);
    }
  }
  for (int64_t k = 0; k < keys; k += 2) {
    const Bf16* value = values + k * value_dim;
    ahead.fetch(k);
    ahead.fetch(k + 1);
    for (int v = 0; v < V; ++v) {
      const __m512i first = _mm512_loadu_si512(value + 32 * v);
      const __m512i second = k + 1 < keys ? _mm512_loadu_si512(value + value_dim + 32 * v) : _mm512_setzero_si512();
      const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(first, second), high = (__m512bh)_mm512_unpackhi_epi16(first, second);
      for (int c = 0; c < C; ++c) {
        int32_t pair;
        std::memcpy(&pair, weights + c * stride + k, sizeof(pair));
        const __m512bh share = (__m512bh)_mm512_set1_epi32(pair);
        sums[c][v][0] = _mm512_dpbf16_ps(sums[c][v][0], share, low);
        sums[c][v][1] = _mm512_dpbf16_ps(sums[c][v][1], share, high);
      }
    }
  }
  for (int c = 0; c < C; ++c) {
    for (int v = 0; v < V; ++v) {
      const __m512 low = _mm512_shuffle_f32x4(sums[c][v][0], sums[c][v][1], 0x44), high = _mm512_shuffle_f32x4(sums[c][v][0], sums[c][v][1], 0xee);
      _mm512_storeu_ps(out + c * value_dim + 32 * v, _mm512_shuffle_f32x4(low, low, 0xd8));
      _mm512_storeu_ps(out + c * value_dim + 32 * v + kLanes, _mm512_shuffle_f32x4(high, high, 0xd8));
    }
  }
}

template <int C>
void add_values(const Bf16* weights, const Bf16* values, int64_t value_dim, int64_t keys, float* out, Ahead ahead) {
  constexpr int kWide = C == 4 ? 2 : 4;
  int64_t d = 0;
  for (; d + kWide * 32 <= value_dim; d += kWide * 32, ahead = {})
    weighted_values<C, kWide>(weights, kKeyBlock, values + d, value_dim, keys, out + d, ahead);
  for (; d < value_dim; d += 32, ahead = {}) weighted_values<C, 1>(weights, kKeyBlock, values + d, value_dim, keys, out + d, ahead);
}
#endif

template <int C, typename T>
void add_values(const float* weights, const T* values, int64_t value_dim, int64_t keys, float* out, Ahead ahead) {
  constexpr int kWide = kLanes == 8 ? 8 / C : C == 1 ? 8 : 16 / C;  // vectors whose sums fit the registers
  int64_t d = 0;
  for (; d + kWide * kLanes <= value_dim; d += kWide * kLanes, ahead = {})
    weighted_values<C, kWide>(weights, kKeyBlock, values + d, value_dim, keys, out + d, ahead);
  for (; d + kLanes <= value_dim; d += kLanes, ahead = {}) weighted_values<C, 1>(weights, kKeyBlock, values + d, value_dim, keys, out + d, ahead);
  for (; d < value_dim; ++d) {
    for (int c = 0; c < C; ++c) {
      float sum = out[c * value_dim + d];
      for (int64_t k = 0; k < keys; ++k) sum += weights[c * kKeyBlock + k] * to_float(values[k * value_dim + d]);
      out[c * value_dim + d] = sum;
    }
  }
}

// Adds the values of one block of keys, each times its weight for a query, to what `count` queries have.
template <typename W, typename T>
void add_all_values(const W* weights, const T* values, int64_t count, int64_t value_dim, int64_t keys, float* out, Ahead ahead) {
  int64_t c = 0;
  const auto add = [&](auto add_some, int64_t some) {
    for (; c + some <= count; c += some, ahead = {}) add_some(weights + c * kKeyBlock, values, value_dim, keys, out + c * value_dim, ahead);
  };
  add([](auto... all) { add_values<4>(all...); }, 4);
  add([](auto... all) { add_values<2>(all...); }, 2);
  add([](auto... all) { add_values<1>(all...); }, 1);
}

// Keys and values that stand one after the other, with a mask: `seen` [count] points at each query's row of it.
template <typename T>
struct Masked {
  const T *all_keys, *all_values;
  int64_t dim, value_dim, capacity;
  const std::vector<const bool*>& seen;

  int64_t first() const { return 0; }
  int64_t last() const { return (capacity + kKeyBlock - 1) / kKeyBlock; }
  // Up to the last key that a query sees; 0: none of them does.
  int64_t size(int64_t block) const {
    const int64_t here = std::min(capacity - block * kKeyBlock, kKeyBlock), count = seen.size();
    int64_t used = 0;
    for (int64_t c = 0; c < count; ++c)
      if (c == 0 || seen[c] != seen[c - 1])
        for (int64_t k = here; k > used; --k)
          if (seen[c][block * kKeyBlock + k - 1]) used = k;
    return used;
  }
  const T* keys(int64_t block) const { return all_keys + block * kKeyBlock * dim; }
  const T* values(int64_t block) const { return all_values + block * kKeyBlock * value_dim; }
  bool is_seen(int64_t query, int64_t block, int64_t key) const { return seen[query][block * kKeyBlock + key]; }
};

// Keys and values of one sequence in pages, of which `table` names the places. Query c sees the keys from `from[c]` to `to[c]`.
template <typename T>
struct InPages {
  const T *all_keys, *all_values;
  int64_t key_stride, value_stride, page_size;  // numbers from one page to the next
  const int32_t* table;
  const std::vector<int64_t>&from, &to;
  int64_t lowest, highest;

  int64_t first() const { return lowest / page_size; }
  int64_t last() const { return highest / page_size + 1; }
  int64_t size(int64_t block) const { return std::min(highest + 1 - block * page_size, page_size); }
  const T* keys(int64_t block) const { return all_keys + table[block] * key_stride; }
  const T* values(int64_t block) const { return all_values + table[block] * value_stride; }
  bool is_seen(int64_t query, int64_t block, int64_t key) const {
    const int64_t position = block * page_size + key;
    return from[query] <= position && position <= to[query];
  }
};

// One head of keys and values, for `count` queries of `dim` numbers each that share it. Blocks of keys that no query sees are not read.
// `query` has the type of the keys if the processor multiplies that, else float.
template <typename Q, typename T, typename Blocks>
void attend(const Q* query, float scale, int64_t count, int64_t dim, const Blocks& blocks, int64_t value_dim, const float* sinks, float softcap, float* out) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  std::vector<float> top(count), weight(count), scores(count * kKeyBlock);
  std::vector<Bf16> shares(count * kKeyBlock);  // the scores' exponentials, rounded
  std::fill(out, out + count * value_dim, 0.0f);
  for (int64_t c = 0; c < count; ++c) {
    top[c] = sinks ? sinks[c] : kNothing;
    weight[c] = sinks ? 1.0f : 0.0f;
  }
  const bool is_even = dim % (sizeof(Q) == 2 ? 32 : kLanes) == 0;
  const int64_t last = blocks.last();
  bool is_first = true;
  for (int64_t block = blocks.first(); block < last; ++block) {
    const int64_t keys_here = blocks.size(block);
    if (!keys_here) continue;
    const int64_t padded = (keys_here + kLanes - 1) / kLanes * kLanes;
    const T *keys = blocks.keys(block), *from = blocks.values(block);
    const Ahead of_values{reinterpret_cast<const char*>(from), static_cast<int64_t>(value_dim * sizeof(T))};
    // the first keys were not fetched with values before them
    const Ahead own_keys{reinterpret_cast<const char*>(keys), is_first ? static_cast<int64_t>(dim * sizeof(T)) : 0};
    is_first = false;
    for (int64_t k = 0; k < std::min(kKeysAhead, keys_here); ++k) own_keys.fetch(k);
    Ahead next_keys;
    if (block + 1 < last) next_keys = {reinterpret_cast<const char*>(blocks.keys(block + 1)), static_cast<int64_t>(dim * sizeof(T))};
    for (int64_t k = 0; k < keys_here;) {
      const int64_t together = is_even && k + 4 <= keys_here ? 4 : 1;
      const T* key = keys + k * dim;
      for (int64_t i = k; i < k + together; ++i) {
        of_values.fetch(i);
        if (i + kKeysAhead < keys_here) own_keys.fetch(i + kKeysAhead);
      }
      if (together == 4) {
        scores_of<4>(query, count, dim, key, scores.data() + k);
      } else if (is_even) {
        scores_of<1>(query, count, dim, key, scores.data() + k);
      } else {
        for (int64_t c = 0; c < count; ++c) {
          float score = 0;
          for (int64_t d = 0; d < dim; ++d) score += to_float(query[c * dim + d]) * to_float(key[d]);
          scores[c * kKeyBlock + k] = score;
        }
      }
      k += together;
    }
    for (int64_t c = 0; c < count; ++c) {
      float* of_query = scores.data() + c * kKeyBlock;
      float highest = top[c];
      for (int64_t k = 0; k < keys_here; ++k) {
        of_query[k] *= scale * kUnit<T>;
        if (softcap > 0) of_query[k] = softcap * std::tanh(of_query[k] / softcap);
        of_query[k] = blocks.is_seen(c, block, k) ? of_query[k] : kNothing;
        highest = std::max(highest, of_query[k]);
      }
      if (highest == kNothing) {
        std::fill(of_query, of_query + padded, 0.0f);
        continue;
      }
      std::fill(of_query + keys_here, of_query + padded, kNothing);
      const float shrink = top[c] == kNothing ? 0.0f : std::exp(top[c] - highest);
      Floats sums = {};
      for (int64_t k = 0; k < padded; k += kLanes) {
        const Floats share = exponential(load(of_query + k) - highest);
        std::memcpy(of_query + k, &share, sizeof(share));
        sums += share;
      }
      weight[c] = weight[c] * shrink + total(sums);
      top[c] = highest;
      if (shrink != 1.0f)
        for (int64_t d = 0; d < value_dim; ++d) out[c * value_dim + d] *= shrink;
    }
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, Bf16>) {
      if (value_dim % 32 == 0) {
        for (int64_t i = 0; i < count * kKeyBlock; i += kLanes) {
          const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(scores.data() + i));
          std::memcpy(static_cast<void*>(shares.data() + i), &rounded, sizeof(rounded));
        }
        add_all_values(shares.data(), from, count, value_dim, keys_here, out, next_keys);
        continue;
      }
    }
#endif
    add_all_values(scores.data(), from, count, value_dim, keys_here, out, next_keys);
  }
  for (int64_t c = 0; c < count; ++c)
    for (int64_t d = 0; d < value_dim; ++d) out[c * value_dim + d] = weight[c] > 0 ? out[c * value_dim + d] * kUnit<T> / weight[c] : 0.0f;
}

// Whether queries of a type are multiplied with keys of another as they are, without becoming floats.
template <typename Q, typename T>
constexpr bool kMultipliesPairs =
#if defined(__AVX512BF16__)
    std::is_same_v<Q, Bf16> && std::is_same_v<T, Bf16>;
#else
    false;
#endif

// Calls `attend` with queries as it takes them.
template <typename Q, typename T, typename Blocks>
void attend_with(const Q* query, float scale, int64_t count, int64_t dim, const Blocks& blocks, int64_t value_dim, const float* sinks, float softcap, float* out) {
  if constexpr (kMultipliesPairs<Q, T>) {
    attend<Q, T>(query, scale, count, dim, blocks, value_dim, sinks, softcap, out);
  } else {
    std::vector<float> floats(count * dim);
    for (int64_t i = 0; i < count * dim; ++i) floats[i] = to_float(query[i]);
    attend<float, T>(floats.data(), scale, count, dim, blocks, value_dim, sinks, softcap, out);
  }
}

// Calls `use` with a null pointer of the type of the queries and the result, and one of the type of keys and values.
template <typename Use>
ffi::Error with_types(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key, const ffi::AnyBuffer& value, const ffi::AnyBuffer& out, const Use& use) {
  const auto type = query.element_type(), held = key.element_type();
  if (value.element_type() != held || out.element_type() != type || (held != type && held != ffi::F8E4M3FN))
    return ffi::Error::InvalidArgument("hfax: keys and values have the dtype of the queries and the result, or float8_e4m3fn");
  const auto with = [&](auto* q) {
    if (held == type) {
      use(q, q);
    } else {
      use(q, static_cast<Fp8*>(nullptr));
    }
    return ffi::Error::Success();
  };
  if (type == ffi::BF16) return with(static_cast<Bf16*>(nullptr));
  if (type == ffi::F32) return with(static_cast<float*>(nullptr));
  return ffi::Error::InvalidArgument("hfax: attention takes float32 or bfloat16");
}

template <typename Q, typename T>
void attend_all(ffi::ThreadPool& pool, const ffi::AnyBuffer& query, const ffi::AnyBuffer& key, const ffi::AnyBuffer& value,
                const ffi::Buffer<ffi::PRED>& mask, const ffi::Buffer<ffi::F32>& sinks, float scale, float softcap, Q* out) {
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions(), m = mask.dimensions();
  const int64_t batch = q[0], heads = q[1], queries = q[2], dim = q[3], kv_heads = k[1], capacity = k[2], value_dim = v[3];
  const int64_t group = heads / kv_heads, count = group * queries;
  const Q* all_queries = reinterpret_cast<const Q*>(query.untyped_data());
  const T* all_keys = reinterpret_cast<const T*>(key.untyped_data());
  const T* all_values = reinterpret_cast<const T*>(value.untyped_data());
  parallel(pool, batch * kv_heads, [&](int64_t index) {
    const int64_t row = index / kv_heads, kv_head = index % kv_heads;
    std::vector<float> result(count * value_dim), extra(count);
    std::vector<const bool*> seen(count);
    const Q* from = all_queries + (row * heads + kv_head * group) * queries * dim;
    for (int64_t c = 0; c < count; ++c) {
      const int64_t head = kv_head * group + c / queries;
      const int64_t at = ((m[0] == 1 ? 0 : row) * m[1] + (m[1] == 1 ? 0 : head)) * queries + c % queries;
      seen[c] = mask.typed_data() + at * capacity;
      if (sinks.element_count()) extra[c] = sinks.typed_data()[head];
    }
    const Masked<T> blocks{all_keys + index * capacity * dim, all_values + index * capacity * value_dim, dim, value_dim, capacity, seen};
    attend_with<Q, T>(from, scale, count, dim, blocks, value_dim, sinks.element_count() ? extra.data() : nullptr, softcap, result.data());
    for (int64_t c = 0; c < count; ++c) {  // the result is [batch, queries, heads, value_dim]
      const int64_t head = kv_head * group + c / queries;
      Q* to = out + ((row * queries + c % queries) * heads + head) * value_dim;
      for (int64_t d = 0; d < value_dim; ++d) store(result[c * value_dim + d], to + d);
    }
  });
}

// query [B, H, Q, D], key [B, KV, C, D], value [B, KV, C, E], mask [B | 1, H | 1, Q, C], sinks [H] or [0] -> [B, Q, H, E].
ffi::Error decode_attention(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::Buffer<ffi::PRED> mask,
                            ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out, float scale, float softcap) {
  return with_types(query, key, value, *out, [&](auto* q, auto* held) {
    using Q = std::decay_t<decltype(*q)>;
    attend_all<Q, std::decay_t<decltype(*held)>>(pool, query, key, value, mask, sinks, scale, softcap, reinterpret_cast<Q*>(out->untyped_data()));
  });
}

// ------------------------------------------------------------------------------------------------------------------ pages

// The tokens of a step, sequence after sequence: those of sequence s are rows `starts[s]` to `starts[s + 1]`, the last of its
// `lengths[s]` tokens so far, and its pages are named by row s of `tables`. Rows after the last sequence are padding.
struct Ragged {
  const int32_t *starts, *lengths, *tables;
  int64_t sequences, width;

  int64_t position(int64_t sequence, int64_t row) const { return lengths[sequence] - starts[sequence + 1] + row; }
};

constexpr int64_t kRowBlock = 16;

template <typename Q, typename T>
void attend_pages(ffi::ThreadPool& pool, const ffi::AnyBuffer& query, const ffi::AnyBuffer& key, const ffi::AnyBuffer& value, const Ragged& rows,
                  const ffi::Buffer<ffi::F32>& sinks, float scale, float softcap, int64_t window, Q* out) {
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions();
  const int64_t heads = q[0], all_rows = q[1], dim = q[2], kv_heads = k[1], page_size = k[2], value_dim = v[3], group = heads / kv_heads;
  struct Piece {
    int64_t sequence, begin, end;
  };
  std::vector<Piece> pieces;
  for (int64_t s = 0; s < rows.sequences; ++s)
    for (int64_t begin = rows.starts[s]; begin < rows.starts[s + 1]; begin += kRowBlock)
      pieces.push_back({s, begin, std::min<int64_t>(begin + kRowBlock, rows.starts[s + 1])});
  const int64_t used = pieces.empty() ? 0 : pieces.back().end;
  std::memset(static_cast<void*>(out + used * heads * value_dim), 0, (all_rows - used) * heads * value_dim * sizeof(Q));
  const Q* all_queries = reinterpret_cast<const Q*>(query.untyped_data());
  parallel(pool, pieces.size() * kv_heads, [&](int64_t index) {
    const Piece piece = pieces[index / kv_heads];
    const int64_t kv_head = index % kv_heads, rows_here = piece.end - piece.begin, count = group * rows_here;
    std::vector<float> result(count * value_dim), extra(count);
    std::vector<int64_t> from(count), to(count);
    std::vector<Q> queries(count * dim);
    for (int64_t c = 0; c < count; ++c) {
      const int64_t head = kv_head * group + c / rows_here, row = piece.begin + c % rows_here;
      to[c] = rows.position(piece.sequence, row);
      from[c] = window > 0 ? std::max<int64_t>(0, to[c] - window + 1) : 0;
      if (sinks.element_count()) extra[c] = sinks.typed_data()[head];
      std::memcpy(static_cast<void*>(queries.data() + c * dim), all_queries + (head * all_rows + row) * dim, dim * sizeof(Q));
    }
    const InPages<T> blocks{reinterpret_cast<const T*>(key.untyped_data()) + kv_head * page_size * dim,
                            reinterpret_cast<const T*>(value.untyped_data()) + kv_head * page_size * value_dim,
                            kv_heads * page_size * dim,
                            kv_heads * page_size * value_dim,
                            page_size,
                            rows.tables + piece.sequence * rows.width,
                            from,
                            to,
                            from[0],
                            to[rows_here - 1]};
    const float* of_sinks = sinks.element_count() ? extra.data() : nullptr;
    attend_with<Q, T>(queries.data(), scale, count, dim, blocks, value_dim, of_sinks, softcap, result.data());
    for (int64_t c = 0; c < count; ++c) {  // the result is [rows, heads, value_dim]
      const int64_t head = kv_head * group + c / rows_here, row = piece.begin + c % rows_here;
      Q* at = out + (row * heads + head) * value_dim;
      for (int64_t d = 0; d < value_dim; ++d) store(result[c * value_dim + d], at + d);
    }
  });
}

Ragged ragged(const ffi::Buffer<ffi::S32>& starts, const ffi::Buffer<ffi::S32>& lengths, const ffi::Buffer<ffi::S32>& tables) {
  const auto shape = tables.dimensions();
  return {starts.typed_data(), lengths.typed_data(), tables.typed_data(), shape[0], shape[1]};
}

// query [H, T, D], key [P, KV, S, D], value [P, KV, S, E], starts [N + 1], lengths [N], tables [N, pages], sinks [H] or [0] -> [T, H, E].
ffi::Error pages_attention(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::Buffer<ffi::S32> starts,
                           ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out,
                           float scale, float softcap, int64_t window) {
  if (key.dimensions()[2] > kKeyBlock) return ffi::Error::InvalidArgument("hfax: pages have no more than 64 tokens");
  const Ragged rows = ragged(starts, lengths, tables);
  return with_types(query, key, value, *out, [&](auto* q, auto* held) {
    using Q = std::decay_t<decltype(*q)>;
    attend_pages<Q, std::decay_t<decltype(*held)>>(pool, query, key, value, rows, sinks, scale, softcap, window, reinterpret_cast<Q*>(out->untyped_data()));
  });
}

// pages [P, KV, S, D] with fresh [KV, T, D] written where the rows' tokens stand; in place, where XLA gives the pages' own memory for
// the result.
ffi::Error pages_write(ffi::AnyBuffer pages, ffi::AnyBuffer fresh, ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> tables,
                       ffi::Result<ffi::AnyBuffer> out) {
  const auto shape = pages.dimensions();
  const int64_t heads = shape[1], page_size = shape[2], all_rows = fresh.dimensions()[1];
  if (pages.element_count() == 0 || fresh.element_count() == 0) return ffi::Error::Success();
  const int64_t width = pages.size_bytes() / pages.element_count() * shape[3];
  const Ragged rows = ragged(starts, lengths, tables);
  char* to = static_cast<char*>(out->untyped_data());
  const char* from = static_cast<const char*>(fresh.untyped_data());
  if (to != pages.untyped_data()) std::memcpy(to, pages.untyped_data(), pages.size_bytes());
  for (int64_t s = 0; s < rows.sequences; ++s) {
    for (int64_t row = rows.starts[s]; row < rows.starts[s + 1]; ++row) {
      const int64_t position = rows.position(s, row), page = rows.tables[s * rows.width + position / page_size];
      for (int64_t h = 0; h < heads; ++h)
        std::memcpy(to + ((page * heads + h) * page_size + position % page_size) * width, from + (h * all_rows + row) * width, width);
    }
  }
  return ffi::Error::Success();
}

// ------------------------------------------------------------------------------------------------------------------ cache

// buffer [..., C, D] with new [..., n, D] written at `start` on the axis before the last; in place, where XLA gives the buffer's own
// memory for the result. XLA's own update converts a whole bfloat16 buffer to float32 and back.
ffi::Error cache_write(ffi::AnyBuffer buffer, ffi::AnyBuffer fresh, ffi::Buffer<ffi::S32> start, ffi::Result<ffi::AnyBuffer> out) {
  const auto shape = buffer.dimensions(), added = fresh.dimensions();
  const int64_t rank = shape.size(), capacity = shape[rank - 2], count = added[rank - 2];
  if (buffer.element_count() == 0 || fresh.element_count() == 0) return ffi::Error::Success();
  const int64_t width = buffer.size_bytes() / buffer.element_count() * shape[rank - 1];
  const int64_t blocks = buffer.size_bytes() / (capacity * width);
  const int64_t at = std::clamp<int64_t>(start.typed_data()[0], 0, capacity - count);
  char* to = static_cast<char*>(out->untyped_data());
  const char* from = static_cast<const char*>(fresh.untyped_data());
  if (to != buffer.untyped_data()) std::memcpy(to, buffer.untyped_data(), buffer.size_bytes());
  for (int64_t i = 0; i < blocks; ++i) std::memcpy(to + (i * capacity + at) * width, from + i * count * width, count * width);
  return ffi::Error::Success();
}

}  // namespace

extern "C" void hfax_set_most_threads(int64_t count) { most_threads.store(count, std::memory_order_relaxed); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(hfax_matmul, matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("turn_a")
                                  .Attr<bool>("turn_b"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(hfax_prompt_attention, prompt_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("by_token")
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(hfax_prompt_attention_gradients, prompt_attention_gradients,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Attr<bool>("by_token")
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hfax_rms_norm, rms_norm,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hfax_exp, exponentials, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hfax_row_sums, row_sums, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hfax_rotate, rotate,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hfax_cache_write, cache_write,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hfax_pages_write, pages_write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hfax_pages_attention, pages_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hfax_linear, linear,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hfax_linear_packed, linear_packed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("encoding")
                                  .Attr<bool>("any_order"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(hfax_decode_attention, decode_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(hfax_linear_experts, linear_experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(hfax_linear_experts_packed, linear_experts_packed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("encoding")
                                  .Attr<bool>("any_order"));
