// Attention of many bfloat16 queries at once, for prompts and for training, and its gradients.
//
// The limit is the processor's products (matmul.h). Scores of a block of queries are made, used and forgotten by one thread;
// nothing of [queries, keys] goes through memory but the mask. Keys before the first and after the last that a block sees are left
// out, which for a causal mask is half of the work. The gradients make the scores again, as flash attention does.

#pragma once

#include "matmul.h"

namespace {

constexpr int64_t kQueryBlock = 96;

// Queries, keys and values are [batch, heads, tokens, dim] or, `by_token`, [batch, tokens, heads, dim].
struct AttentionShape {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  bool by_token;
  const bool* mask;
  int64_t mask_batch, mask_heads;
  float scale, softcap;

  const bool* mask_of(int64_t b, int64_t head, int64_t query) const {
    return mask + ((mask_batch == 1 ? 0 : b) * mask_heads + (mask_heads == 1 ? 0 : head)) * queries * keys + query * keys;
  }
};

inline AttentionShape attention_shape(const ffi::Buffer<ffi::BF16>& query, const ffi::Buffer<ffi::BF16>& key,
                                      const ffi::Buffer<ffi::BF16>& value, const ffi::Buffer<ffi::PRED>& mask, bool by_token, float scale,
                                      float softcap) {
  const auto q = query.dimensions(), k = key.dimensions(), m = mask.dimensions();
  const int head = by_token ? 2 : 1, token = by_token ? 1 : 2;
  return {q[0], q[head], k[head], q[token], k[token], q[3], value.dimensions()[3], by_token, mask.typed_data(), m[0], m[1], scale, softcap};
}

// Where a head's rows begin in such an array, and how far they are from each other.
struct HeadRows {
  int64_t start, stride;

  HeadRows(const AttentionShape& shape, int64_t b, int64_t head, int64_t heads, int64_t tokens, int64_t width)
      : start((shape.by_token ? b * tokens * heads + head : (b * heads + head) * tokens) * width), stride(shape.by_token ? heads * width : width) {}
};

// Some queries of one head, and the keys from the first to the last that one of them sees.
struct QueryBlock {
  const AttentionShape& shape;
  int64_t b, head, first, count, from, to;

  QueryBlock(const AttentionShape& shape, int64_t b, int64_t head, int64_t first)
      : shape(shape), b(b), head(head), first(first), count(std::min(kQueryBlock, shape.queries - first)), from(shape.keys), to(0) {
    for (int64_t i = 0; i < count; ++i) {
      const bool* seen = shape.mask_of(b, head, first + i);
      int64_t k = 0;
      while (k < from && !seen[k]) ++k;
      from = std::min(from, k);
      k = shape.keys;
      while (k > to && !seen[k - 1]) --k;
      to = std::max(to, k);
    }
    from = from / 64 * 64;
  }

  int64_t keys() const { return std::max<int64_t>(to - from, 0); }
  int64_t row() const { return (b * shape.heads + head) * shape.queries + first; }             // in [batch, heads, queries]
  int64_t turned_row() const { return (b * shape.queries + first) * shape.heads + head; }      // in [batch, queries, heads]
  HeadRows query_rows() const { return {shape, b, head, shape.heads, shape.queries, shape.dim}; }
  Side queries(const Bf16* query) const {
    const HeadRows rows = query_rows();
    return {query + rows.start + first * rows.stride, count, shape.dim, rows.stride, false};
  }
  Side some(const Bf16* data, int64_t width) const {  // of the keys or values
    const HeadRows rows(shape, b, head / (shape.heads / shape.kv_heads), shape.kv_heads, shape.keys, width);
    return {data + rows.start + from * rows.stride, keys(), width, rows.stride, false};
  }
};

inline Side turned(const Side& side) { return {side.data, side.depth, side.count, side.stride, true}; }

// Scores as they enter the softmax, from products of queries with keys; what is not seen is far below all others.
inline Floats scores_of(const float* products, const bool* seen, int64_t left, const AttentionShape& shape) {
  Floats scores = load(products) * shape.scale;
  if (shape.softcap > 0)
    for (int64_t i = 0; i < kLanes; ++i) scores[i] = shape.softcap * std::tanh(scores[i] / shape.softcap);
  Bytes bytes = {};
  if (left >= kLanes) {
    bytes = *reinterpret_cast<const Bytes*>(seen);
  } else {
    std::memcpy(&bytes, seen, std::max<int64_t>(left, 0));
  }
  return __builtin_convertvector(bytes, Ints) != 0 ? scores : Floats{} - 1e30f;
}

inline int64_t padded(int64_t count) { return (count + 63) / 64 * 64; }

struct AttentionScratch {
  std::vector<float> scores, more, sums;
  std::vector<Bf16> weights, changes;
};

inline AttentionScratch& attention_scratch() {
  static thread_local AttentionScratch scratch;
  return scratch;
}

// query [B, H, Q, D], key [B, KV, S, D], value [B, KV, S, E], mask [B | 1, H | 1, Q, S] -> [B, Q, H, E], and the logarithm of each query's
// sum of exponentials, [B, H, Q]; infinity and an output of 0 where nothing is seen. With `by_token` the second and third axes of the
// first three change places, and those of their gradients.
ffi::Error prompt_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> query, ffi::Buffer<ffi::BF16> key, ffi::Buffer<ffi::BF16> value,
                            ffi::Buffer<ffi::PRED> mask, ffi::Result<ffi::Buffer<ffi::BF16>> out, ffi::Result<ffi::Buffer<ffi::F32>> sums,
                            bool by_token, float scale, float softcap) {
  const AttentionShape shape = attention_shape(query, key, value, mask, by_token, scale, softcap);
  const Bf16 *q = numbers_of(query), *k = numbers_of(key), *v = numbers_of(value);
  Bf16* to = reinterpret_cast<Bf16*>(out->untyped_data());
  float* logarithms = sums->typed_data();
  const int64_t blocks = (shape.queries + kQueryBlock - 1) / kQueryBlock;
  parallel(pool, shape.batch * shape.heads * blocks, [&](int64_t piece) {
    const int64_t head = piece / blocks % shape.heads, b = piece / blocks / shape.heads;
    const QueryBlock block(shape, b, head, (blocks - 1 - piece % blocks) * kQueryBlock);  // the longest first
    AttentionScratch& scratch = attention_scratch();
    const int64_t keys = block.keys(), stride = padded(keys), width = shape.value_dim;
    scratch.scores.resize(block.count * stride + kLanes);
    scratch.weights.resize(block.count * stride + 32);
    scratch.sums.resize(block.count * width);
    float totals[kQueryBlock];
    if (keys > 0) multiply_here<false>(block.queries(q), block.some(k, shape.dim), scratch.scores.data(), stride);
    for (int64_t i = 0; i < block.count; ++i) {
      const bool* seen = shape.mask_of(b, head, block.first + i) + block.from;
      float* row = scratch.scores.data() + i * stride;
      Floats highest = Floats{} - 1e30f;
      for (int64_t c = 0; c < keys; c += kLanes) {
        const Floats scores = scores_of(row + c, seen + c, keys - c, shape);
        store_some(scores, kLanes, row + c);
        highest = highest > scores ? highest : scores;
      }
      const float top = highest_of(highest);
      Floats sum{};
      for (int64_t c = 0; c < keys; c += kLanes) {
        const Floats share = top > -1e29f ? exponential(load(row + c) - top) : Floats{};
        sum += share;
        store_some(share, keys - c, scratch.weights.data() + i * stride + c);
      }
      totals[i] = total(sum);
      logarithms[block.row() + i] = totals[i] > 0 ? top + std::log(totals[i]) : std::numeric_limits<float>::infinity();
    }
    if (keys > 0)
      multiply_here<false>({scratch.weights.data(), block.count, keys, stride, false}, turned(block.some(v, width)), scratch.sums.data(), width);
    for (int64_t i = 0; i < block.count; ++i) {
      const float share = totals[i] > 0 ? 1 / totals[i] : 0;
      Bf16* row = to + (block.turned_row() + i * shape.heads) * width;
      for (int64_t c = 0; c < width; c += kLanes) {
        const Floats values = totals[i] > 0 ? load_some(scratch.sums.data() + i * width + c, width - c) : Floats{};
        store_some(values * share, width - c, row + c);
      }
    }
  });
  return ffi::Error::Success();
}

// What `prompt_attention` took and gave, and the gradient of its output -> those of query, key and value.
ffi::Error prompt_attention_gradients(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> query, ffi::Buffer<ffi::BF16> key,
                                      ffi::Buffer<ffi::BF16> value, ffi::Buffer<ffi::PRED> mask, ffi::Buffer<ffi::BF16> out,
                                      ffi::Buffer<ffi::F32> sums, ffi::Buffer<ffi::BF16> gradient, ffi::Result<ffi::Buffer<ffi::BF16>> for_query,
                                      ffi::Result<ffi::Buffer<ffi::BF16>> for_key, ffi::Result<ffi::Buffer<ffi::BF16>> for_value,
                                      bool by_token, float scale, float softcap) {
  const AttentionShape shape = attention_shape(query, key, value, mask, by_token, scale, softcap);
  const Bf16 *q = numbers_of(query), *k = numbers_of(key), *v = numbers_of(value), *o = numbers_of(out), *g = numbers_of(gradient);
  const float* logarithms = sums.typed_data();
  const auto round = [](const float* from, int64_t count, int64_t width, Bf16* to, int64_t stride) {
    for (int64_t row = 0; row < count; ++row, from += width, to += stride)
      for (int64_t i = 0; i < width; i += kLanes) store_some(load_some(from + i, width - i), width - i, to + i);
  };
  Bf16* dq = reinterpret_cast<Bf16*>(for_query->untyped_data());
  Bf16* dk = reinterpret_cast<Bf16*>(for_key->untyped_data());
  Bf16* dv = reinterpret_cast<Bf16*>(for_value->untyped_data());
  const int64_t groups = shape.heads / shape.kv_heads, width = shape.value_dim;
  parallel(pool, shape.batch * shape.kv_heads, [&](int64_t piece) {  // heads that share keys add to the same gradients
    AttentionScratch& scratch = attention_scratch();
    std::vector<float> key_sums(shape.keys * shape.dim), value_sums(shape.keys * width);
    const int64_t b = piece / shape.kv_heads;
    for (int64_t head = piece % shape.kv_heads * groups, last = head + groups; head < last; ++head) {
      for (int64_t first = 0; first < shape.queries; first += kQueryBlock) {
        const QueryBlock block(shape, b, head, first);
        const int64_t keys = block.keys(), stride = padded(keys);
        scratch.sums.assign(block.count * shape.dim, 0.0f);
        if (keys > 0) {
          scratch.scores.resize(block.count * stride + kLanes);
          scratch.more.resize(block.count * stride + kLanes);
          scratch.weights.resize(block.count * stride + 32);
          scratch.changes.resize(block.count * stride + 32);
          const Side values = block.some(v, width), gradients{g + block.turned_row() * width, block.count, width, shape.heads * width, false};
          multiply_here<false>(block.queries(q), block.some(k, shape.dim), scratch.scores.data(), stride);
          multiply_here<false>(gradients, values, scratch.more.data(), stride);
          for (int64_t i = 0; i < block.count; ++i) {
            const bool* seen = shape.mask_of(b, head, block.first + i) + block.from;
            const int64_t at = (block.turned_row() + i * shape.heads) * width;
            Floats both{};
            for (int64_t c = 0; c < width; c += kLanes) {
              both += load_some(o + at + c, width - c) * load_some(g + at + c, width - c);
            }
            const float mean = total(both), logarithm = logarithms[block.row() + i];
            for (int64_t c = 0; c < keys; c += kLanes) {
              const Floats scores = scores_of(scratch.scores.data() + i * stride + c, seen + c, keys - c, shape);
              const Floats share = exponential(scores - logarithm);
              Floats change = share * (load(scratch.more.data() + i * stride + c) - mean) * shape.scale;
              if (shape.softcap > 0) change = scores > -1e29f ? change * (1.0f - (scores / shape.softcap) * (scores / shape.softcap)) : Floats{};
              store_some(share, keys - c, scratch.weights.data() + i * stride + c);
              store_some(change, keys - c, scratch.changes.data() + i * stride + c);
            }
          }
          const Side weights{scratch.weights.data(), block.count, keys, stride, false}, changes{scratch.changes.data(), block.count, keys, stride, false};
          multiply_here<true>(turned(weights), turned(gradients), value_sums.data() + block.from * width, width);
          multiply_here<true>(turned(changes), turned(block.queries(q)), key_sums.data() + block.from * shape.dim, shape.dim);
          multiply_here<false>(changes, turned(block.some(k, shape.dim)), scratch.sums.data(), shape.dim);
        }
        const HeadRows rows = block.query_rows();
        round(scratch.sums.data(), block.count, shape.dim, dq + rows.start + first * rows.stride, rows.stride);
      }
    }
    const int64_t kv_head = piece % shape.kv_heads;
    const HeadRows key_rows(shape, b, kv_head, shape.kv_heads, shape.keys, shape.dim), value_rows(shape, b, kv_head, shape.kv_heads, shape.keys, width);
    round(key_sums.data(), shape.keys, shape.dim, dk + key_rows.start, key_rows.stride);
    round(value_sums.data(), shape.keys, width, dv + value_rows.start, value_rows.stride);
  });
  return ffi::Error::Success();
}

}  // namespace
