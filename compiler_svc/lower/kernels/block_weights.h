// Weights of the softmax, for a few queries and a block of positions.
//
// The softmax is online: weights are exp2(score - origin), and what was added up with a smaller origin is scaled. Blocks
// have fixed bounds, so that no query's numbers depend on its neighbours. With AVX-512, weights are made out of the
// registers that hold a block's products; with AVX2, whose registers hold too few, and where options change scores, the
// products are stored first.

#pragma once

#include "attend_step.h"
#include "tile_products.h"

namespace kiln {

constexpr int64_t kBlockPositions = 64;

// How far scores may lie above the origin of a query's softmax: its sums hold that many powers of two more.
constexpr float kMostAbove = 8;

// The positions that a query sees, [begin, end), counted from any origin.
struct Range {
  int64_t begin, end;
};

// A query's softmax, between two blocks.
struct Softmax {
  float origin = kHidden;
  float factor = 1;  // by which to scale what was added up before the tile that the block belongs to
};

// Adds weights to the lanes of `total`, and stores them. Pairs are rounded first, so that the sum is that of what values
// are multiplied with.
template <int Columns>
inline void keep_weights(const Vector (&lanes)[Columns], float* weights, Vector& total) {
#pragma GCC unroll 4
  for (int column = 0; column < Columns; column++) {
    store(weights + column * kLanes, lanes[column]);
    total = add(total, lanes[column]);
  }
}

#if defined(KILN_HAS_PAIRS)

template <int Columns>
inline void keep_weights(const Vector (&lanes)[Columns], Pair* weights, Vector& total) {
  const __m512i ones = _mm512_set1_epi16(0x3f80);
#pragma GCC unroll 2
  for (int column = 0; column + 1 < Columns; column += 2) {
    const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(lanes[column + 1], lanes[column]);
    _mm512_storeu_si512(weights + column * kLanes / 2, pairs);
    total = Numbers<Pair>::add_to(total, pairs, ones);
  }
  if constexpr (Columns % 2 == 1) {
    const __m256i pairs = (__m256i)_mm512_cvtneps_pbh(lanes[Columns - 1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + (Columns - 1) * kLanes / 2), pairs);
    total = Numbers<Pair>::add_to(total, _mm512_zextsi256_si512(pairs), ones);
  }
}

#endif

inline void scale_weights(float* weights, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i++) weights[i] *= factor;
}
inline void scale_weights(Pair* weights, int64_t count, float factor) {
  BFloat16* const elements = &weights->first;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = static_cast<uint32_t>(elements[i].bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    store_one(elements + i, value * factor);
  }
}

// Moves the origin of a softmax to a larger score. `before` positions of the tile have weights, which lie just before
// `weights`. Returns by what their sum is to be scaled.
template <class Number>
inline float move_origin(Softmax& softmax, float largest, Number* weights, int64_t before) {
  // All that was added up so far is zeros: each query's first block is no reason to compute a power.
  if (softmax.origin == kHidden) {
    softmax.origin = largest;
    return 1;
  }
  const float factor = std::exp2(softmax.origin - largest);
  scale_weights(weights - before / Numbers<Number>::kElements, before, factor);
  softmax.origin = largest;
  softmax.factor *= factor;
  return factor;
}

// Makes weights of some vectors of one query's scores.
template <class Number, int Columns>
inline void weigh(
    const Vector (&scores)[Columns], Softmax& softmax, float* total, Number* weights, int64_t before) {
  Vector most = scores[0];
#pragma GCC unroll 4
  for (int column = 1; column < Columns; column++) most = maximum(most, scores[column]);
  Vector sums = load(total);
  // As long as all positions are hidden, the origin is minus infinity, and nothing is above that.
  if (__builtin_expect(any_above(most, broadcast(softmax.origin + kMostAbove)), 0))
    sums = multiply(sums, broadcast(move_origin(softmax, maximum(most), weights, before)));
  const Vector from = broadcast(softmax.origin == kHidden ? 0 : softmax.origin);
  Vector lanes[Columns];
#pragma GCC unroll 4
  for (int column = 0; column < Columns; column++) lanes[column] = exp2(subtract(scores[column], from));
  keep_weights<Columns>(lanes, weights, sums);
  store(total, sums);
}

// As above, of `count` stored scores of a block, which are whole vectors.
template <class Number>
inline void weigh(
    const float* scores, int64_t count, Softmax& softmax, float* total, Number* weights, int64_t before) {
  Vector most = load(scores);
  for (int64_t i = kLanes; i < count; i += kLanes) most = maximum(most, load(scores + i));
  Vector sums = load(total);
  if (any_above(most, broadcast(softmax.origin + kMostAbove)))
    sums = multiply(sums, broadcast(move_origin(softmax, maximum(most), weights, before)));
  const Vector from = broadcast(softmax.origin == kHidden ? 0 : softmax.origin);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector lanes[] = {exp2(subtract(load(scores + i), from))};
    keep_weights<1>(lanes, weights + i / Numbers<Number>::kElements, sums);
  }
  store(total, sums);
}

#if defined(__AVX512F__)

// Bits of a block's positions before one of them.
inline uint64_t bits_below(int64_t end) { return end <= 0 ? 0 : end >= 64 ? ~uint64_t{0} : (uint64_t{1} << end) - 1; }

// Multiplies kQueryRows queries with `vectors` vectors of keys, of which the first is that of position `first`, and makes
// weights of the products, of which `scale` is a factor where queries have not got it. `seen` says which positions each
// query sees; `is_cut`, whether that is not all of them for all queries.
template <class Number, int Columns = kColumns>
[[gnu::noinline]] void weigh_products(
    const Number* queries, int64_t query_stride, const Number* keys, int64_t key_stride, int64_t depth, float scale,
    int64_t vectors, const Range* seen, int64_t first, bool is_cut, Softmax* softmax, float* totals, Number* weights,
    int64_t weight_stride, int64_t before) {
  if constexpr (Columns > 1)
    if (vectors < Columns)
      return weigh_products<Number, Columns - 1>(
          queries, query_stride, keys, key_stride, depth, scale, vectors, seen, first, is_cut, softmax, totals, weights,
          weight_stride, before);
  Vector sums[kQueryRows][Columns];
#pragma GCC unroll 6
  for (int row = 0; row < kQueryRows; row++)
#pragma GCC unroll 4
    for (int column = 0; column < Columns; column++) sums[row][column] = zero();
  add_products<Number, Columns>(sums, queries, query_stride, keys, key_stride, depth);
  if constexpr (Numbers<Number>::kElements > 1)
#pragma GCC unroll 6
    for (int row = 0; row < kQueryRows; row++)
#pragma GCC unroll 4
      for (int column = 0; column < Columns; column++)
        sums[row][column] = multiply(sums[row][column], broadcast(scale));
  if (is_cut)
#pragma GCC unroll 6
    for (int row = 0; row < kQueryRows; row++) {
      const uint64_t bits = bits_below(seen[row].end - first) & ~bits_below(seen[row].begin - first);
#pragma GCC unroll 4
      for (int column = 0; column < Columns; column++)
        sums[row][column] = _mm512_mask_mov_ps(broadcast(kHidden), bits >> (column * kLanes), sums[row][column]);
    }
#pragma GCC unroll 6
  for (int row = 0; row < kQueryRows; row++)
    weigh<Number, Columns>(sums[row], softmax[row], totals + row * kLanes, weights + row * weight_stride, before);
}

#endif

}  // namespace kiln
