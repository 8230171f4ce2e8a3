// Attention of few tokens a row, as in decoding: bound by the speed of reading keys and values.
//
// A row's positions are taken in chunks whose bounds are multiples of kChunkPositions, whatever the row and the number of
// threads. Threads share (row, KV head, chunk) by the number of positions; partial results of a row's chunks are joined
// in order. All queries that read a KV head meet each of its keys while it is in a register.

#pragma once

#include "attend_step.h"

namespace kiln {

constexpr int64_t kChunkPositions = 512;
constexpr int kManyQueries = 4;  // that meet a key at once
constexpr int kMostColumns = 8;  // vectors of values that are weighed at once

// Keys that are read at once, each to its end. Of more keys in turns, one thread reads less: 13 GB/s of 16, 18 of two.
constexpr int kMostKeys = 32 / kLanes;

// Products of `Queries` queries with kLanes / Queries keys, side by side: [query][key].
template <int Queries, class Element>
inline Vector multiply_keys(
    const float* queries, int64_t query_stride, const Element* keys, const int64_t* places, int64_t head_dim) {
  constexpr int kKeys = kLanes / Queries;
  Vector sums[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) sums[i] = zero();
  constexpr int kAtOnce = std::min(kKeys, kMostKeys);
#pragma GCC unroll 16
  for (int first = 0; first < kKeys; first += kAtOnce) {
    const auto step = [&](int64_t at, auto load_key) {
      Vector held[Queries];
#pragma GCC unroll 4
      for (int query = 0; query < Queries; query++) held[query] = load(queries + query * query_stride + at);
#pragma GCC unroll 16
      for (int i = first; i < first + kAtOnce; i++) {
        const Vector key = load_key(keys + places[i] + at);
#pragma GCC unroll 4
        for (int query = 0; query < Queries; query++)
          sums[query * kKeys + i] = multiply_add(held[query], key, sums[query * kKeys + i]);
      }
    };
    int64_t at = 0;
    for (; at + kLanes <= head_dim; at += kLanes) step(at, [](const Element* key) { return load(key); });
    if (at < head_dim) step(at, [&](const Element* key) { return load_part(key, head_dim - at); });
  }
  return sum_each(sums);
}

// Products of queries [count, padded_dim] with a tile of positions, into scores [count][kChunkPositions].
template <int Queries, class Element>
[[gnu::noinline]] void multiply_tile(
    int64_t count, const float* queries, int64_t padded_dim, const Element* keys, const int64_t* places,
    int64_t positions, int64_t head_dim, float* scores) {
  constexpr int64_t kKeys = kLanes / Queries;
  int64_t query = 0;
  for (; query + Queries <= count; query += Queries)
    for (int64_t i = 0; i < positions; i += kKeys) {
      float products[kLanes];
      store(products, multiply_keys<Queries>(queries + query * padded_dim, padded_dim, keys, places + i, head_dim));
      for (int j = 0; j < Queries; j++)
        std::memcpy(scores + (query + j) * kChunkPositions + i, products + j * kKeys, kKeys * sizeof(float));
    }
  if constexpr (Queries > 1)
    multiply_tile<Queries / 2>(
        count - query, queries + query * padded_dim, padded_dim, keys, places, positions, head_dim,
        scores + query * kChunkPositions);
}

// Adds `Columns` vectors of values from `at` on, weighed for `Queries` queries, to sums [query, padded_dim]. The last
// vector has `part` elements.
template <int Queries, int Columns, class Element>
inline void weigh_columns(
    const float* weights, const Element* values, const int64_t* places, int64_t positions, int64_t at, int64_t part,
    float* sums, int64_t padded_dim) {
  Vector held[Queries][Columns];
#pragma GCC unroll 4
  for (int query = 0; query < Queries; query++)
#pragma GCC unroll 8
    for (int column = 0; column < Columns; column++)
      held[query][column] = load(sums + query * padded_dim + at + column * kLanes);
  const auto run = [&](auto load_value) {
    for (int64_t i = 0; i < positions; i++) {
      const Element* value = values + places[i] + at;
      Vector factors[Queries];
#pragma GCC unroll 4
      for (int query = 0; query < Queries; query++) factors[query] = broadcast(weights[query * kChunkPositions + i]);
#pragma GCC unroll 8
      for (int column = 0; column < Columns; column++) {
        const Vector lanes = load_value(value + column * kLanes);
#pragma GCC unroll 4
        for (int query = 0; query < Queries; query++)
          held[query][column] = multiply_add(factors[query], lanes, held[query][column]);
      }
    }
  };
  if (part == kLanes)
    run([](const Element* value) { return load(value); });
  else  // with one column
    run([&](const Element* value) { return load_part(value, part); });
#pragma GCC unroll 4
  for (int query = 0; query < Queries; query++)
#pragma GCC unroll 8
    for (int column = 0; column < Columns; column++)
      store(sums + query * padded_dim + at + column * kLanes, held[query][column]);
}

// As many columns at once as registers hold, then half as many, …
template <int Queries, int Columns, class Element>
inline void weigh_queries(
    const float* weights, const Element* values, const int64_t* places, int64_t positions, int64_t at, int64_t head_dim,
    float* sums, int64_t padded_dim) {
  for (; at + Columns * kLanes <= head_dim; at += Columns * kLanes)
    weigh_columns<Queries, Columns>(weights, values, places, positions, at, kLanes, sums, padded_dim);
  if constexpr (Columns > 1)
    weigh_queries<Queries, Columns / 2>(weights, values, places, positions, at, head_dim, sums, padded_dim);
  else if (at < head_dim)
    weigh_columns<Queries, 1>(weights, values, places, positions, at, head_dim - at, sums, padded_dim);
}

// Adds values of a tile, weighed by scores [count][kChunkPositions], to sums [count, padded_dim].
template <int Queries, class Element>
[[gnu::noinline]] void weigh_tile(
    int64_t count, const float* weights, const Element* values, const int64_t* places, int64_t positions,
    int64_t head_dim, float* sums, int64_t padded_dim) {
  constexpr int kMost = std::min<int>(kMostColumns, static_cast<int>(kLanes) / Queries);
  int64_t query = 0;
  for (; query + Queries <= count; query += Queries)
    weigh_queries<Queries, kMost>(
        weights + query * kChunkPositions, values, places, positions, 0, head_dim, sums + query * padded_dim,
        padded_dim);
  if constexpr (Queries > 1)
    weigh_tile<Queries / 2>(
        count - query, weights + query * kChunkPositions, values, places, positions, head_dim,
        sums + query * padded_dim, padded_dim);
}

// Turns scores into weights: exp2(score - largest). Returns the largest and their sum.
inline Partial weigh_scores(float* scores, int64_t count) {
  Vector most = broadcast(kHidden);
  for (int64_t i = 0; i < count; i += kLanes) most = maximum(most, load(scores + i));
  const float largest = maximum(most);
  // If all positions are hidden, all weights become 0.
  const Vector origin = broadcast(largest == kHidden ? 0 : largest);
  Vector total = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector weights = exp2(subtract(load(scores + i), origin));
    store(scores + i, weights);
    total = add(total, weights);
  }
  return {largest, sum(total), nullptr};
}

// What one thread needs for one chunk of one KV head.
struct FewScratch {
  std::vector<float> queries, scores, sums, joined;

  FewScratch(int64_t queries_count, int64_t padded_dim)
      : queries(queries_count * padded_dim), scores(queries_count * kChunkPositions), sums(queries_count * padded_dim),
        joined(padded_dim) {}
};

// Writes the step's keys and values that lie in one chunk, and attends to the chunk. `partials` gets one result for each
// query, in the order of tokens and then heads; `sums` gets their values.
template <class Query, class Cached>
void attend_chunk(
    const Step<Query, Cached>& step, const Row& row, int64_t kv_head, int64_t chunk, FewScratch& scratch,
    Partial* partials, float* sums) {
  const int64_t group = step.group(), padded_dim = step.padded_dim(), queries = row.tokens.size() * group;
  const int64_t begin = std::max(row.begin, chunk * kChunkPositions);
  const int64_t end = std::min(row.end, (chunk + 1) * kChunkPositions);
  for (const Token& token : row.tokens)
    if (token.position >= begin && token.position < end) write_token(step, row, token, kv_head);
  for (int64_t i = 0; i < queries; i++)
    read_query(step, row, row.tokens[i / group], kv_head * group + i % group, &scratch.queries[i * padded_dim]);
  // Whole vectors; what lies outside of [begin, end) is hidden below.
  const int64_t first = begin / kLanes * kLanes, count = round_up(end - first, kLanes);
  int64_t places[kTilePositions];
  for (int64_t at = 0; at < count; at += kTilePositions) {
    const int64_t positions = std::min(kTilePositions, count - at);
    find_places(step, row, kv_head, first + at, positions, begin, end, places);
    // The beginning of a stream is what the processor does not foresee.
    for (int64_t i = 0; at == 0 && i < positions; i++) ask_for<0>(step.value_cache + places[i], step.head_dim);
    multiply_tile<kManyQueries>(
        queries, scratch.queries.data(), padded_dim, step.key_cache, places, positions, step.head_dim,
        &scratch.scores[at]);
  }
  for (int64_t i = 0; i < queries; i++) {
    float* scores = &scratch.scores[i * kChunkPositions];
    score(step, row, row.tokens[i / group], kv_head * group + i % group, scores, first, count);
    partials[i] = weigh_scores(scores, count);
    partials[i].values = sums + i * padded_dim;
  }
  std::fill(sums, sums + queries * padded_dim, 0.0f);
  for (int64_t at = 0; at < end - first; at += kTilePositions) {
    const int64_t skipped = std::max<int64_t>(begin - first - at, 0);
    const int64_t positions = std::min(kTilePositions, end - first - at);
    find_places(step, row, kv_head, first + at, positions, begin, end, places);
    if (at == 0 && kv_head + 1 < step.kv_heads)  // the next head's keys, which are likely this thread's, too
      for (int64_t i = 0; i < positions; i++)
        ask_for<0>(step.key_cache + places[i] + step.block_tokens * step.head_dim, step.head_dim);
    weigh_tile<kManyQueries>(
        queries, &scratch.scores[at + skipped], step.value_cache, places + skipped, positions - skipped, step.head_dim,
        sums, padded_dim);
  }
}

}  // namespace kiln
