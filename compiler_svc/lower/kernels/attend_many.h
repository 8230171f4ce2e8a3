// Attention of many tokens a row, as in prompts and their chunks: bound by arithmetic.
//
// The queries of some tokens, and of all heads of one KV head, are a tile of up to kTileQueries. They pass by the row's
// keys in tiles whose bounds are multiples of kTilePositions, whatever the step: so a token's result depends neither on
// how a prompt is divided into steps nor on the number of threads. The softmax is online: what has been added up is scaled
// whenever a larger score appears. Keys are packed with positions in the lanes, values as floats. Blocks of a tile that no
// query sees are left out.

#pragma once

#include <iterator>
#include <memory>
#include <numeric>

#include "attend_step.h"

namespace kiln {

constexpr int64_t kTileQueries = 192;
constexpr int kQueryRows = 6;  // queries that meet kColumns vectors at once

// What one thread needs for one tile of queries. One block of memory, which the allocator keeps from step to step; several
// would be returned to the system and cleared again.
struct ManyScratch {
  std::unique_ptr<float[]> memory;
  float *queries, *sums;      // [queries, padded_dim]; queries are scaled
  float *keys, *values;       // [padded_dim][kTilePositions] and [kTilePositions][padded_dim]
  float *scores;              // [queries, kTilePositions]; then weights
  float *totals;              // [queries, kLanes]
  float *origins, *factors;   // [queries]
  float *joined;              // [padded_dim]

  ManyScratch(int64_t count, int64_t padded_dim) {
    float** const parts[] = {&queries, &sums, &keys, &values, &scores, &totals, &origins, &factors, &joined};
    const int64_t dims = count * padded_dim, tile = kTilePositions * padded_dim;
    const int64_t sizes[] = {dims, dims, tile, tile, count * kTilePositions, count * kLanes, count, count, padded_dim};
    memory.reset(new float[std::accumulate(std::begin(sizes), std::end(sizes), int64_t{0})]);
    float* at = memory.get();
    for (size_t i = 0; i < std::size(sizes); at += sizes[i++]) *parts[i] = at;
  }
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

// The values of a tile where they lie, if they need no packing: whole vectors of floats, one position behind the other.
inline const float* find_dense(
    const float* values, const int64_t* places, int64_t before, int64_t count, int64_t head_dim) {
  const bool is_dense = before == 0 && head_dim % kLanes == 0 && places[count - 1] - places[0] == (count - 1) * head_dim;
  return is_dense ? values + places[0] : nullptr;
}
template <class Element>
inline const float* find_dense(const Element*, const int64_t*, int64_t, int64_t, int64_t) {
  return nullptr;
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

// How far scores may lie above the origin of a query's softmax: its sums hold that many powers of two more.
constexpr float kMostAbove = 8;

// Takes a query's scores of some positions into its softmax: makes weights of them, exp2(score - origin). The origin moves
// only when a score lies far above it. Returns by what to scale what was added up before.
inline float weigh_online(float* scores, int64_t count, float& origin, float* total) {
  Vector most = load(scores);
  for (int64_t i = kLanes; i < count; i += kLanes) most = maximum(most, load(scores + i));
  float factor = 1;
  // As long as all positions are hidden, the origin is minus infinity, and nothing is above that.
  if (any_above(most, broadcast(origin + kMostAbove))) {
    const float largest = maximum(most);
    factor = std::exp2(origin - largest);
    origin = largest;
  }
  const Vector from = broadcast(origin == kHidden ? 0 : origin);
  Vector sums = multiply(load(total), broadcast(factor));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector weights = exp2(subtract(load(scores + i), from));
    store(scores + i, weights);
    sums = add(sums, weights);
  }
  store(total, sums);
  return factor;
}

// Positions [begin, end) of a tile, where `begin` is the first of a vector; `vectors` have them all.
struct Seen {
  int64_t begin, end, vectors;
};

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
  for (int64_t i = first_token; i < end_token; i++)
    ask_for<0>(find_query(step, row, row.tokens[i], kv_head * group), group * step.head_dim);
  for (int64_t i = 0; i < queries; i++) {
    begin = std::min(begin, token_of(i).begin), end = std::max(end, token_of(i).end);
    read_query(step, row, token_of(i), kv_head * group + i % group, &scratch.queries[i * padded_dim]);
  }
  // Whole tiles of rows are multiplied: the rows that no query has are zeros.
  const int64_t rows = round_up(queries, kQueryRows);
  std::fill(scratch.queries + queries * padded_dim, scratch.queries + rows * padded_dim, 0.0f);
  std::fill(scratch.sums, scratch.sums + rows * padded_dim, 0.0f);
  std::fill(scratch.scores, scratch.scores + rows * kTilePositions, 0.0f);
  std::fill(scratch.totals, scratch.totals + rows * kLanes, 0.0f);
  std::fill(scratch.origins, scratch.origins + rows, kHidden);
  std::fill(scratch.factors, scratch.factors + rows, 1.0f);
  for (int64_t first = begin / kTilePositions * kTilePositions; first < end; first += kTilePositions) {
    const int64_t before = std::max<int64_t>(begin - first, 0), count = std::min(kTilePositions, end - first);
    // What any of the queries from `query` on sees of the tile; of the rest, their weights would be 0.
    const auto find_seen = [&](int64_t query) {
      int64_t seen_begin = kTilePositions, seen_end = 0;
      for (int64_t i = query; i < std::min(query + kQueryRows, queries); i++) {
        seen_begin = std::min(seen_begin, std::max(token_of(i).begin - first, before));
        seen_end = std::max(seen_end, std::min(token_of(i).end - first, count));
      }
      const int64_t at = seen_begin / kLanes * kLanes;
      return seen_begin < seen_end ? Seen{at, seen_end, (seen_end - at + kLanes - 1) / kLanes} : Seen{0, 0, 0};
    };
    int64_t places[kTilePositions];
    find_places(step, row, kv_head, first, kTilePositions, begin, end, places);
    pack_keys(step.key_cache, places, count, step.head_dim, scratch.keys);
    const float* values = scratch.values;
    if (const float* dense = find_dense(step.value_cache, places, before, count, step.head_dim))
      values = dense;
    else
      pack_values(step.value_cache, places, count, step.head_dim, padded_dim, scratch.values);
    // The keys stay in the first-level cache while all queries pass by, and then the values.
    for (int64_t query = 0; query < queries; query += kQueryRows) {
      const Seen seen = find_seen(query);
      if (seen.end == 0) continue;
      float* scores = &scratch.scores[query * kTilePositions + seen.begin];
      multiply_blocks(
          &scratch.queries[query * padded_dim], padded_dim, &scratch.keys[seen.begin], kTilePositions, step.head_dim,
          nullptr, scores, kTilePositions, seen.vectors);
      for (int64_t i = query; i < std::min(query + kQueryRows, queries); i++, scores += kTilePositions) {
        score(step, row, token_of(i), kv_head * group + i % group, scores, first + seen.begin, seen.vectors * kLanes);
        scratch.factors[i] =
            weigh_online(scores, seen.vectors * kLanes, scratch.origins[i], &scratch.totals[i * kLanes]);
      }
    }
    for (int64_t query = 0; query < queries; query += kQueryRows) {
      const Seen seen = find_seen(query);
      if (seen.end > 0)
        multiply_blocks(
            &scratch.scores[query * kTilePositions + seen.begin], kTilePositions, values + seen.begin * padded_dim,
            padded_dim, seen.end - seen.begin, &scratch.factors[query], &scratch.sums[query * padded_dim], padded_dim,
            padded_dim / kLanes);
    }
  }
  for (int64_t i = first_token; i < end_token; i++)
    ask_for<1>(find_output(step, row, row.tokens[i], kv_head * group), group * step.head_dim);
  for (int64_t i = 0; i < queries; i++) {
    const Partial partial{
        scratch.origins[i], sum(load(&scratch.totals[i * kLanes])), &scratch.sums[i * padded_dim]};
    finish(step, row, token_of(i), kv_head * group + i % group, &partial, 1, scratch.joined);
  }
}

}  // namespace kiln
