// Products of activations with 8-bit and 4-bit weights by tiles of 16 x 16 sums: see amx.h and packed.h.
//
// The tiles multiply bytes. An activation of 16 bits is 256 times a byte with a sign plus a byte without, so a group's sum is that of two
// products, and the results are those of `multiply_panel` bit for bit.

#pragma once

#include "packed.h"

#if defined(HFAX_AMX)

namespace {

constexpr int64_t kPackedVectors = 32;  // of 16 rows of activations that pass over some columns of the weight before the next are unpacked
constexpr int64_t kPackedPairs = 4;     // pairs of tiles of the weight's rows that are unpacked at a time

struct PackedTileScratch {
  static constexpr int64_t kNumbers = kBlockDepth / kLeastGroup * 2 * kTileSide;  // scales of a pair's groups
  alignas(64) uint8_t weight[kPackedPairs][2 * kTileSide * kBlockDepth];
  alignas(64) float scale[kPackedPairs][kNumbers];
  alignas(64) float offset[kPackedPairs][kNumbers];
  alignas(64) int32_t totals[2][4 * kTileWords];
  alignas(64) float sums[kPackedPairs][kPackedVectors][2 * kTileWords];
};

inline PackedTileScratch& packed_tile_scratch() {
  static thread_local std::unique_ptr<PackedTileScratch> scratch;
  if (!scratch) scratch.reset(new PackedTileScratch);
  return *scratch;
}

// Columns `from` to `from + depth` of up to 16 rows of the weight as bytes, [steps][2 tiles][16 rows][step], of which this is the first tile
// or the second. Rows that are not there are 0.
template <Encoding kCode>
void unpack_bytes(const uint8_t* rows, int64_t row_bytes, int64_t count, int64_t from, int64_t depth, int64_t step, int64_t next, uint8_t* to) {
  const int64_t tile = kTileSide * step;
  for (int64_t r = 0; r < kTileSide; ++r) {
    uint8_t* into = to + r * step;
    if (r >= count) {
      for (int64_t k = 0; k < depth; k += step, into += 2 * tile) std::memset(into, 0, step);
      continue;
    }
    const uint8_t* at = rows + r * row_bytes + from * bits_of(kCode) / 8;
    if constexpr (kCode == kInt8) {
      for (int64_t k = 0; k < depth; k += step, into += 2 * tile) {
        if (k % 64 == 0) __builtin_prefetch(at + k + next, 0, 2);
        std::memcpy(into, at + k, step);
      }
    } else {
      const __m512i nibbles = _mm512_set1_epi8(0x0f);
      const auto numbers = [](__m512i codes) { return kCode == kFp4 ? (__m512i)look_up(kTwiceFp4, (Ints)codes) : codes; };
      for (int64_t k = 0; k < depth; k += 128, at += 64) {
        __builtin_prefetch(at + next, 0, 2);
        const __m512i words = _mm512_loadu_si512(at);
        if (step == 64) {  // of each word the first two codes, then the others
          const __m512i low = _mm512_set1_epi16(0x00ff), apart = _mm512_set1_epi16(0x0f00);
          const __m512i first = _mm512_and_si512(words, low), second = _mm512_srli_epi16(words, 8);
          const auto spread = [&](__m512i pair) { return _mm512_or_si512(_mm512_and_si512(pair, nibbles), _mm512_and_si512(_mm512_slli_epi16(pair, 4), apart)); };
          _mm512_store_si512(into, numbers(spread(first)));
          _mm512_store_si512(into + 2 * tile, numbers(spread(second)));
          into += 4 * tile;
        } else {
          for (int p = 0; p < 4; ++p, into += 2 * tile) {
            const __m256i codes = _mm512_cvtepi16_epi8(_mm512_and_si512(_mm512_srli_epi16(words, 4 * p), _mm512_set1_epi16(0x0f)));
            _mm256_store_si256(reinterpret_cast<__m256i*>(into), _mm512_castsi512_si256(numbers(_mm512_castsi256_si512(codes))));
          }
        }
      }
    }
  }
}

// The totals of one group of a pair of tiles of codes with both bytes of 16 rows: [2 tiles][2: high, low][codes' rows][16].
inline void multiply_group(const uint8_t* codes, const uint8_t* bytes, int64_t group, int64_t step, int32_t* totals) {
  const int64_t tile = kTileSide * step;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < group; k += step, bytes += 2 * tile, codes += 2 * tile) {
    _tile_loadd(4, codes, step);
    _tile_loadd(6, bytes, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, bytes + tile, 64);
    _tile_dpbsud(1, 4, 7);
    _tile_loadd(5, codes + tile, step);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  _tile_stored(0, totals, 64);
  _tile_stored(1, totals + kTileWords, 64);
  _tile_stored(2, totals + 2 * kTileWords, 64);
  _tile_stored(3, totals + 3 * kTileWords, 64);
}

// A group's totals on their way to the sums.
struct GroupTotals {
  const int32_t* totals;
  int64_t at;  // of the group's 16 rows in the activations' scales
  const float *scale, *offset;
  bool is_first;
  float* sums;

  void add(const Rounded& x) const {
    if (offset) {
      is_first ? add_as<true, true>(x) : add_as<false, true>(x);
    } else {
      is_first ? add_as<true, false>(x) : add_as<false, false>(x);
    }
  }

 private:
  template <bool kIsFirst, bool kHasOffset>
  void add_as(const Rounded& x) const {
    const Ints start = load_words(x.start.data() + at);
    const Floats by = load(x.scale.data() + at), total = kHasOffset ? load(x.total.data() + at) : Floats{};
    for (int64_t first = 0; first < 2 * kTileSide; first += 8) {
      const int32_t* high = totals + first / kTileSide * 2 * kTileWords + first % kTileSide * kTileSide;
      float* sum = sums + first * kTileSide;
      Floats results[8];
      HFAX_UNROLL for (int64_t r = 0; r < 8; ++r) {
        const Ints all = (load_words(high + r * kTileSide) << 8) + load_words(high + kTileWords + r * kTileSide) + start;
        results[r] = fused(__builtin_convertvector(all, Floats), by * scale[first + r], kIsFirst ? Floats{} : load(sum + r * kTileSide));
        if (kHasOffset) results[r] = fused(Floats{} + offset[first + r], total, results[r]);
      }
      HFAX_UNROLL for (int64_t r = 0; r < 8; ++r) store_floats(results[r], sum + r * kTileSide);
    }
  }
};

// The results of all rows for rows `begin` to `end` of the weight.
template <Encoding kCode, typename Out>
void multiply_by_tiles(const Rounded& x, const Packed<kCode>& weight, int64_t begin, int64_t end, Out* out, int64_t num_columns) {
  constexpr int64_t kPair = 2 * kTileSide;
  PackedTileScratch& scratch = packed_tile_scratch();
  const int64_t group = weight.group, groups = weight.groups(), row_bytes = weight.bytes_per_row();
  const int64_t depth = std::max(group, kBlockDepth / group * group), step = step_of(group);
  const int64_t vectors = (x.rows + kTileSide - 1) / kTileSide;
  const TileRegisters registers(step);
  for (int64_t v0 = 0; v0 < vectors; v0 += kPackedVectors) {
    const int64_t v1 = std::min(vectors, v0 + kPackedVectors);
    for (int64_t first = begin; first < end; first += kPackedPairs * kPair) {
      const int64_t pairs = std::min(kPackedPairs, (end - first + kPair - 1) / kPair);
      for (int64_t from = 0; from < weight.width; from += depth) {
        const int64_t here = std::min(depth, weight.width - from), groups_here = here / group;
        for (int64_t t = 0; t < 2 * pairs; ++t) {
          const int64_t row = first + t * kTileSide, count = std::clamp<int64_t>(end - row, 0, kTileSide), pair = t / 2, half = t % 2;
          unpack_bytes<kCode>(weight.values + row * row_bytes, row_bytes, count, from, here, step, kTileSide * row_bytes,
                              scratch.weight[pair] + half * kTileSide * step);
          gather(weight.scale, groups, row, count, from / group, groups_here, scratch.scale[pair] + half * kTileSide, kPair);
          if (weight.offset) gather(weight.offset, groups, row, count, from / group, groups_here, scratch.offset[pair] + half * kTileSide, kPair);
        }
        before_tile_loads();
        // a group's totals are added when those of the next are on their way to memory
        GroupTotals last{};
        int64_t number = 0;
        for (int64_t v = v0; v < v1; ++v) {
          for (int64_t pair = 0; pair < pairs; ++pair) {
            for (int64_t g = 0; g < groups_here; ++g, ++number) {
              int32_t* totals = scratch.totals[number % 2];
              const uint8_t* bytes = x.bytes.data() + (v * x.width + from + g * group) * 2 * kTileSide;
              multiply_group(scratch.weight[pair] + g * group * kPair, bytes, group, step, totals);
              if (number) last.add(x);
              last = {totals, (v * groups + from / group + g) * kTileSide, scratch.scale[pair] + g * kPair,
                      weight.offset ? scratch.offset[pair] + g * kPair : nullptr, from + g == 0, scratch.sums[pair][v - v0]};
            }
          }
        }
        last.add(x);
      }
      for (int64_t v = v0; v < v1; ++v) {
        for (int64_t row = first; row < std::min(end, first + pairs * kPair); row += kTileSide) {
          const int64_t tile = (row - first) / kTileSide;
          Floats turned[16];
          turn_sums(scratch.sums[tile / 2][v - v0] + tile % 2 * kTileWords, turned);
          for (int64_t r = 0; r < std::min(kTileSide, x.rows - v * kTileSide); ++r)
            store_some(turned[r], end - row, out + (v * kTileSide + r) * num_columns + row);
        }
      }
    }
  }
}

}  // namespace

#endif
