// Attention of many tokens a row, as in prompts and their chunks: bound by arithmetic.
//
// The queries of some tokens, and of all heads of one KV head, are a tile of up to kTileQueries. They pass by the row's
// keys in tiles whose bounds are multiples of kTilePositions, whatever the step. The softmax is online: what has been added
// up is scaled whenever a larger score appears. It begins anew with each span of kSpanPositions; the results of a row's
// spans are joined in order. So a token's result depends neither on how a prompt is divided into steps nor on the number
// of threads, which may share the spans of a long row. Blocks of a tile that no query sees are left out.

#pragma once

#include <memory>
#include <new>

#include "attend_step.h"
#include "block_weights.h"
#include "packed_row.h"

namespace kiln {

constexpr int64_t kTileQueries = 192;
constexpr int64_t kSpanPositions = 1024;

// What one thread needs for one tile of queries. One block of memory, which the allocator keeps from step to step; several
// would be returned to the system and cleared again. Its parts begin with cache lines: weights are made and values
// multiplied an eighth slower if each vector lies in two.
template <class Number>
struct ManyScratch {
  static constexpr std::align_val_t kLine{64};
  struct Release {
    void operator()(float* at) const { ::operator delete[](at, kLine); }
  };
  std::unique_ptr<float[], Release> memory;
  Number* queries;  // [queries, count_numbers]; floats are scaled
  Number* weights;  // [queries, kTilePositions / elements of a number]
  float* totals;    // [queries, kLanes]
  float* factors;   // [queries]
  float* joined;    // [padded_dim]
  float* sums;      // of all spans that one tile of queries sees: [spans, queries, padded_dim]
  Number* packed;
  std::vector<Partial> partials;  // as `sums`
  std::vector<Softmax> softmax;   // [queries]
  std::vector<Range> ranges;      // [queries]: the positions that they see
  std::vector<Range> seen;        // [queries / kQueryRows]: what so many queries see of a tile, from a whole vector on
  std::vector<char> is_begun;     // as `seen`: whether `sums` have anything of these queries

  ManyScratch(int64_t count, int64_t spans, int64_t packed_tiles, int64_t head_dim)
      : partials(spans * count), softmax(count), ranges(count), seen(count / kQueryRows),
        is_begun(count / kQueryRows) {
    static_assert(sizeof(Number) == sizeof(float));
    const int64_t padded_dim = round_up(head_dim, kLanes);
    const int64_t sizes[] = {
        count * count_numbers<Number>(head_dim), count * kTilePositions / Numbers<Number>::kElements, count * kLanes,
        count, padded_dim, spans * count * padded_dim, PackedRow<Number>::count_memory(packed_tiles, head_dim)};
    constexpr int64_t kLineFloats = static_cast<int64_t>(kLine) / sizeof(float);
    int64_t size = 0;
    for (const int64_t part : sizes) size += round_up(part, kLineFloats);
    memory.reset(new (kLine) float[size]);
    auto take = [at = memory.get(), next = sizes](auto*& part) mutable {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at);
      at += round_up(*next++, kLineFloats);
    };
    take(queries), take(weights), take(totals), take(factors), take(joined), take(sums), take(packed);
  }
};

// Number of tokens whose queries make a tile, and of rows that they are multiplied as.
template <class Query, class Cached>
inline int64_t tile_tokens(const Step<Query, Cached>& step) {
  return std::max<int64_t>(kTileQueries / step.group(), 1);
}
template <class Query, class Cached>
inline int64_t tile_rows(const Step<Query, Cached>& step) {
  return round_up(tile_tokens(step) * step.group(), kQueryRows);
}

// Sets what every query of tokens [first_token, end_token) sees; the last query stands for rows that no query has.
template <class Number>
inline void find_ranges(
    const Row& row, int64_t first_token, int64_t end_token, int64_t group, ManyScratch<Number>& scratch) {
  int64_t query = 0;
  for (int64_t i = first_token; i < end_token; i++)
    for (int64_t head = 0; head < group; head++) scratch.ranges[query++] = {row.tokens[i].begin, row.tokens[i].end};
  while (query % kQueryRows != 0) scratch.ranges[query] = scratch.ranges[query - 1], query++;
}

// Which of the positions [begin, end) of a tile any of kQueryRows queries sees, counted from the tile's first, and from a
// whole vector on.
inline Range find_seen(const Range* ranges, int64_t first, int64_t begin, int64_t end) {
  Range seen{kTilePositions, 0};
  for (int i = 0; i < kQueryRows; i++) {
    seen.begin = std::min(seen.begin, std::max(ranges[i].begin, begin) - first);
    seen.end = std::max(seen.end, std::min(ranges[i].end, end) - first);
  }
  return seen.begin < seen.end ? Range{seen.begin / kLanes * kLanes, seen.end} : Range{0, 0};
}

// Makes weights of what kQueryRows queries from `query` on see of one tile, which begins with position `first`.
// `first_token` is the token of the first query.
template <class Query, class Cached, class Number>
void weigh_tile(
    const Step<Query, Cached>& step, const Row& row, int64_t kv_head, int64_t first_token, int64_t queries,
    int64_t query, int64_t first, const Number* keys, ManyScratch<Number>& scratch) {
  constexpr int64_t kElements = Numbers<Number>::kElements, kWeightStride = kTilePositions / kElements;
  const int64_t numbers = count_numbers<Number>(step.head_dim), depth = (step.head_dim + kElements - 1) / kElements;
  const int64_t group = step.group();
  const Number* const held = &scratch.queries[query * numbers];
  const Range seen = scratch.seen[query / kQueryRows], *const ranges = &scratch.ranges[query];
  Softmax* const softmax = &scratch.softmax[query];
  float* const totals = &scratch.totals[query * kLanes];
  for (int i = 0; i < kQueryRows; i++) softmax[i].factor = 1;
  for (int64_t begin = seen.begin, end; begin < seen.end; begin = end) {
    end = std::min(begin / kBlockPositions * kBlockPositions + kBlockPositions, round_up(seen.end, kLanes));
    const int64_t vectors = (end - begin) / kLanes, before = begin - seen.begin;
    Number* const weights = &scratch.weights[query * kWeightStride + begin / kElements];
#if defined(__AVX512F__)
    if (!step.changes_scores()) {
      bool is_cut = false;
      for (int i = 0; i < kQueryRows; i++) is_cut |= ranges[i].begin > first + begin || ranges[i].end < first + end;
      weigh_products(
          held, numbers, keys + begin, kTilePositions, depth, step.scale, vectors, ranges, first + begin, is_cut, softmax,
          totals, weights, kWeightStride, before);
      continue;
    }
#endif
    float scores[kQueryRows * kBlockPositions];
    multiply_blocks(
        held, numbers, keys + begin, kTilePositions, depth, nullptr, scores, kBlockPositions, vectors);
    for (int64_t i = 0; i < std::min<int64_t>(kQueryRows, queries - query); i++) {
      float* const own = scores + i * kBlockPositions;
      if constexpr (kElements > 1)
        for (int64_t at = 0; at < end - begin; at += kLanes)
          store(own + at, multiply(load(own + at), broadcast(step.scale)));
      const Token& token = row.tokens[first_token + (query + i) / group];
      score(step, row, token, kv_head * group + (query + i) % group, own, first + begin, end - begin);
      weigh(own, end - begin, softmax[i], totals + i * kLanes, weights + i * kWeightStride, before);
    }
  }
  for (int i = 0; i < kQueryRows; i++) scratch.factors[query + i] = softmax[i].factor;
}

// Attends with the queries of tokens [first_token, end_token) of a row, which read one KV head, to positions [begin, end)
// of one span. Gives one result for each query, in the order of tokens and then heads; `sums` gets their values.
template <class Query, class Cached, class Number>
void attend_span(
    const Step<Query, Cached>& step, const Row& row, int64_t kv_head, int64_t first_token, int64_t end_token,
    int64_t begin, int64_t end, ManyScratch<Number>& scratch, PackedRow<Number>& packed, Partial* partials, float* sums) {
  constexpr int64_t kElements = Numbers<Number>::kElements, kWeightStride = kTilePositions / kElements;
  const int64_t group = step.group(), padded_dim = step.padded_dim();
  const int64_t queries = (end_token - first_token) * group, rows = round_up(queries, kQueryRows);
  const bool is_met_again = static_cast<int64_t>(row.tokens.size()) > tile_tokens(step);
  std::fill(scratch.is_begun.begin(), scratch.is_begun.begin() + rows / kQueryRows, false);
  std::fill(scratch.totals, scratch.totals + rows * kLanes, 0.0f);
  std::fill(scratch.softmax.begin(), scratch.softmax.begin() + rows, Softmax{});
  for (int64_t first = begin / kTilePositions * kTilePositions; first < end; first += kTilePositions) {
    const PackedTile<Number> tile = packed.find(step, row, kv_head, first, is_met_again);
    // The keys stay in the first-level cache while all queries pass by, and then the values.
    for (int64_t query = 0; query < queries; query += kQueryRows) {
      scratch.seen[query / kQueryRows] =
          find_seen(&scratch.ranges[query], first, std::max(begin, first), std::min(end, first + kTilePositions));
      weigh_tile(step, row, kv_head, first_token, queries, query, first, tile.keys, scratch);
    }
    for (int64_t query = 0; query < queries; query += kQueryRows) {
      const Range seen = scratch.seen[query / kQueryRows];
      if (seen.end == 0) continue;
      const float* const factors = scratch.is_begun[query / kQueryRows] ? &scratch.factors[query] : nullptr;
      scratch.is_begun[query / kQueryRows] = true;
      multiply_blocks(
          &scratch.weights[query * kWeightStride + seen.begin / kElements], kWeightStride,
          tile.values + seen.begin / kElements * padded_dim, padded_dim,
          (seen.end - seen.begin + kElements - 1) / kElements, factors, sums + query * padded_dim, padded_dim,
          padded_dim / kLanes);
    }
  }
  for (int64_t query = 0; query < queries; query += kQueryRows)
    if (!scratch.is_begun[query / kQueryRows])
      std::fill_n(sums + query * padded_dim, kQueryRows * padded_dim, 0.0f);
  for (int64_t i = 0; i < queries; i++)
    partials[i] = {scratch.softmax[i].origin, sum(load(&scratch.totals[i * kLanes])), sums + i * padded_dim};
}

// Joins the results of spans, `tile_rows` apart, to the outputs of tokens [first_token, end_token) for one KV head.
template <class Query, class Cached>
void join_spans(
    const Step<Query, Cached>& step, const Row& row, int64_t kv_head, int64_t first_token, int64_t end_token,
    const Partial* partials, int64_t spans, float* joined) {
  const int64_t group = step.group(), queries = (end_token - first_token) * group;
  for (int64_t i = first_token; i < end_token; i++)
    ask_for<1>(find_output(step, row, row.tokens[i], kv_head * group), group * step.head_dim);
  std::vector<Partial> ordered(spans);
  for (int64_t i = 0; i < queries; i++) {
    for (int64_t span = 0; span < spans; span++) ordered[span] = partials[span * tile_rows(step) + i];
    finish(step, row, row.tokens[first_token + i / group], kv_head * group + i % group, ordered.data(), spans, joined);
  }
}

// Reads the queries of tokens [first_token, end_token) for one KV head into the scratch, and what they see.
template <class Query, class Cached, class Number>
void read_queries(
    const Step<Query, Cached>& step, const Row& row, int64_t kv_head, int64_t first_token, int64_t end_token,
    ManyScratch<Number>& scratch) {
  const int64_t group = step.group(), numbers = count_numbers<Number>(step.head_dim);
  Number* to = scratch.queries;
  for (int64_t i = first_token; i < end_token; i++)
    ask_for<0>(find_query(step, row, row.tokens[i], kv_head * group), group * step.head_dim);
  for (int64_t i = first_token; i < end_token; i++)
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++, to += numbers)
      if constexpr (std::is_same_v<Number, float>)
        read_query(step, row, row.tokens[i], head, to);
      else
        for (int64_t at = 0; at < step.head_dim; at += kLanes * Numbers<Number>::kElements)
          store(
              reinterpret_cast<float*>(to + at / Numbers<Number>::kElements),
              load_numbers<Number>(find_query(step, row, row.tokens[i], head) + at, step.head_dim - at));
  // Whole tiles of rows are multiplied: the rows that no query has are zeros.
  const int64_t queries = (end_token - first_token) * group;
  std::fill(to, to + (round_up(queries, kQueryRows) - queries) * numbers, Number{});
  find_ranges(row, first_token, end_token, group, scratch);
}

}  // namespace kiln
