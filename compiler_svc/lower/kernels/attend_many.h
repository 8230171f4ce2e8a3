// Attention of many tokens a row, as in prompts and their chunks: bound by arithmetic.
//
// The queries of some tokens, and of all heads of one KV head, are a tile of up to kTileQueries. They pass by the row's
// keys in tiles whose bounds are multiples of kTilePositions, whatever the step: so a token's result depends neither on
// how a prompt is divided into steps nor on the number of threads. The softmax is online: what has been added up is scaled
// whenever a larger score appears. Keys are packed with positions in the lanes, values as floats. Blocks of a tile that no
// query sees are left out.

#pragma once

#include "attend_step.h"

namespace kiln {

constexpr int64_t kTileQueries = 96;
constexpr int kQueryRows = 6;  // queries that meet kColumns vectors at once
constexpr int64_t kTileVectors = kTilePositions / kLanes;

// What one thread needs for one tile of queries.
struct ManyScratch {
  std::vector<float> queries;  // [queries, padded_dim], scaled
  std::vector<float> sums;     // [queries, padded_dim]
  std::vector<float> scores;   // [queries, kTilePositions]; then weights
  std::vector<float> keys;     // [head_dim][kTilePositions]
  std::vector<float> values;   // [kTilePositions][padded_dim]
  std::vector<float> largest, factors;  // [queries]
  std::vector<float> totals;            // [queries][kLanes]
  std::vector<float> joined;            // [padded_dim]

  ManyScratch(int64_t queries_count, int64_t padded_dim)
      : queries(queries_count * padded_dim), sums(queries_count * padded_dim), scores(queries_count * kTilePositions),
        keys(padded_dim * kTilePositions), values(padded_dim * kTilePositions), largest(queries_count),
        factors(queries_count), totals(queries_count * kLanes), joined(padded_dim) {}
};

// Number of tokens whose queries make a tile.
template <class Query, class Cached>
inline int64_t tile_tokens(const Step<Query, Cached>& step) {
  return std::max<int64_t>(kTileQueries / step.group(), 1);
}

// Copies `count` keys as [padded_dim][kTilePositions], and zeros for further positions.
template <class Element>
[[gnu::noinline]] void pack_keys(const Element* keys, const int64_t* places, int64_t count, int64_t head_dim, float* packed) {
  for (int64_t first = 0; first < kTilePositions; first += kLanes)
    for (int64_t at = 0; at < head_dim; at += kLanes) {
      const int64_t part = std::min(kLanes, head_dim - at);
      Vector square[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++) {
        const Element* key = keys + places[std::min(first + i, count - 1)] + at;
        square[i] = first + i >= count ? zero() : part == kLanes ? load(key) : load_part(key, part);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++) store(packed + (at + i) * kTilePositions + first, square[i]);
    }
}

// Copies `count` values as [kTilePositions][padded_dim], and zeros for further positions.
template <class Element>
[[gnu::noinline]] void pack_values(
    const Element* values, const int64_t* places, int64_t count, int64_t head_dim, int64_t padded_dim, float* packed) {
  for (int64_t i = 0; i < kTilePositions; i++)
    for (int64_t at = 0; at < head_dim; at += kLanes) {
      const int64_t part = std::min(kLanes, head_dim - at);
      Vector lanes = zero();
      if (i < count) lanes = part == kLanes ? load(values + places[i] + at) : load_part(values + places[i] + at, part);
      store(packed + i * padded_dim + at, lanes);
    }
}

// out[row][column] = (factors ? factors[row] * out[row][column] : 0) + sum over i of left[row][i] * right[i][column], for
// kQueryRows rows and `Columns` vectors.
template <int Columns>
inline void multiply_block(
    const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t depth, const float* factors,
    float* out, int64_t out_stride) {
  Vector sums[kQueryRows][Columns];
#pragma GCC unroll 6
  for (int row = 0; row < kQueryRows; row++)
#pragma GCC unroll 4
    for (int column = 0; column < Columns; column++)
      sums[row][column] = factors == nullptr
                              ? zero()
                              : multiply(broadcast(factors[row]), load(out + row * out_stride + column * kLanes));
  for (int64_t i = 0; i < depth; i++) {
    Vector held[Columns];
#pragma GCC unroll 4
    for (int column = 0; column < Columns; column++) held[column] = load(right + i * right_stride + column * kLanes);
#pragma GCC unroll 6
    for (int row = 0; row < kQueryRows; row++) {
      const Vector factor = broadcast(left[row * left_stride + i]);
#pragma GCC unroll 4
      for (int column = 0; column < Columns; column++)
        sums[row][column] = multiply_add(factor, held[column], sums[row][column]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kQueryRows; row++)
#pragma GCC unroll 4
    for (int column = 0; column < Columns; column++)
      store(out + row * out_stride + column * kLanes, sums[row][column]);
}

// `multiply_block` for `vectors` vectors of columns.
template <int Columns = kColumns>
[[gnu::noinline]] void multiply_blocks(
    const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t depth, const float* factors,
    float* out, int64_t out_stride, int64_t vectors) {
  for (; vectors >= Columns; vectors -= Columns, right += Columns * kLanes, out += Columns * kLanes)
    multiply_block<Columns>(left, left_stride, right, right_stride, depth, factors, out, out_stride);
  if constexpr (Columns > 1)
    multiply_blocks<Columns - 1>(left, left_stride, right, right_stride, depth, factors, out, out_stride, vectors);
}

// Takes a query's scores of some positions into its softmax: makes weights of them. Returns by what to scale what was
// added up before.
inline float weigh_online(float* scores, int64_t count, float& largest, float* total) {
  Vector most = broadcast(largest);
  for (int64_t i = 0; i < count; i += kLanes) most = maximum(most, load(scores + i));
  const float now = maximum(most);
  // As long as all positions are hidden, all weights become 0.
  const Vector origin = broadcast(now == kHidden ? 0 : now);
  const Vector factor = exp(subtract(broadcast(largest), origin));
  Vector sums = multiply(load(total), factor);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector weights = exp(subtract(load(scores + i), origin));
    store(scores + i, weights);
    sums = add(sums, weights);
  }
  store(total, sums);
  largest = now;
  float lanes[kLanes];
  store(lanes, factor);
  return lanes[0];
}

// Attends with the queries of tokens [first_token, end_token) of a row that read one KV head. The caches hold the step's
// keys and values already.
template <class Query, class Cached>
void attend_tile(
    const Step<Query, Cached>& step, const Row& row, int64_t kv_head, int64_t first_token, int64_t end_token,
    ManyScratch& scratch) {
  const int64_t group = step.group(), padded_dim = step.padded_dim();
  const int64_t queries = (end_token - first_token) * group;
  const auto token_of = [&](int64_t query) -> const Token& { return row.tokens[first_token + query / group]; };
  int64_t begin = row.end, end = 0;
  for (int64_t i = 0; i < queries; i++) {
    begin = std::min(begin, token_of(i).begin), end = std::max(end, token_of(i).end);
    read_query(step, row, token_of(i), kv_head * group + i % group, &scratch.queries[i * padded_dim]);
  }
  std::fill(scratch.sums.begin(), scratch.sums.end(), 0.0f);
  std::fill(scratch.totals.begin(), scratch.totals.end(), 0.0f);
  std::fill(scratch.largest.begin(), scratch.largest.end(), kHidden);
  for (int64_t first = begin / kTilePositions * kTilePositions; first < end; first += kTilePositions) {
    const int64_t before = std::max<int64_t>(begin - first, 0), count = std::min(kTilePositions, end - first);
    int64_t places[kTilePositions];
    find_places(step, row, kv_head, first, kTilePositions, begin, end, places);
    pack_keys(step.key_cache, places, count, step.head_dim, scratch.keys.data());
    pack_values(step.value_cache, places, count, step.head_dim, padded_dim, scratch.values.data());
    for (int64_t query = 0; query < queries; query += kQueryRows) {
      // The vectors that any of these queries sees; in the rest of the tile their weights would be 0.
      const int64_t stop = std::min(query + kQueryRows, queries);
      int64_t seen_begin = kTilePositions, seen_end = 0;
      for (int64_t i = query; i < stop; i++) {
        seen_begin = std::min(seen_begin, std::max(token_of(i).begin - first, before));
        seen_end = std::max(seen_end, std::min(token_of(i).end - first, count));
      }
      if (seen_begin >= seen_end) continue;
      const int64_t at = seen_begin / kLanes * kLanes, vectors = (seen_end - at + kLanes - 1) / kLanes;
      float* scores = &scratch.scores[query * kTilePositions + at];
      multiply_blocks(
          &scratch.queries[query * padded_dim], padded_dim, &scratch.keys[at], kTilePositions, step.head_dim, nullptr,
          scores, kTilePositions, vectors);
      for (int64_t i = query; i < stop; i++, scores += kTilePositions) {
        score(step, row, token_of(i), kv_head * group + i % group, scores, first + at, vectors * kLanes);
        scratch.factors[i] =
            weigh_online(scores, vectors * kLanes, scratch.largest[i], &scratch.totals[i * kLanes]);
      }
      multiply_blocks(
          &scratch.scores[query * kTilePositions + at], kTilePositions, &scratch.values[at * padded_dim], padded_dim,
          seen_end - at, &scratch.factors[query], &scratch.sums[query * padded_dim], padded_dim, padded_dim / kLanes);
    }
  }
  for (int64_t i = 0; i < queries; i++) {
    const Partial partial{
        scratch.largest[i], sum(load(&scratch.totals[i * kLanes])), &scratch.sums[i * padded_dim]};
    finish(step, row, token_of(i), kv_head * group + i % group, &partial, 1, &scratch.joined[0]);
  }
}

}  // namespace kiln
