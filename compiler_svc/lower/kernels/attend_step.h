// What a step attends to: its tensors, its rows, and what each token sees. The meaning is that of
// execution/attention/operators.py.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace kiln {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int64_t kTilePositions = 128;
constexpr float kLog2E = 1.44269504088896341f;

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

template <class Query, class Cached>
struct Step {
  Query* attended;        // [rows, tokens, heads, head_dim]
  const Query* queries;   // each token's are `query_stride` elements from those of the token before; heads are dense
  const Query* keys;      // as well
  const Query* values;    // as well
  Cached* key_cache;      // [blocks, kv_heads, block_tokens, head_dim]
  Cached* value_cache;    // as well
  const int32_t* positions;    // [rows, tokens]
  const int32_t* block_table;  // [rows, row_blocks]
  const float* sinks;          // [heads], or none
  const float* slopes;         // [heads], or none
  const bool* tree_mask;       // [tokens, tokens] of each row, `tree_stride` apart, or none
  int64_t rows, tokens, heads, kv_heads, head_dim, block_tokens, row_blocks;
  int64_t query_stride, key_stride, value_stride, tree_stride;
  float scale;     // scores are logarithms to the base 2: this has the factors kLog2E and kUnit of cached elements
  int64_t window;  // 0: none
  float soft_cap;  // 0: none; with the same factor

  // Whether scores are more than products, or hidden otherwise than by the bounds of what a token sees.
  bool changes_scores() const { return soft_cap > 0 || slopes != nullptr || tree_mask != nullptr; }
  int64_t group() const { return heads / kv_heads; }
  // Of one row of a buffer of floats, so that its vectors are whole.
  int64_t padded_dim() const { return round_up(head_dim, kLanes); }
  // Where one position of a row begins in the caches, in elements.
  int64_t place(int64_t row, int64_t kv_head, int64_t position) const {
    const int64_t block = block_table[row * row_blocks + position / block_tokens % row_blocks];
    return ((block * kv_heads + kv_head) * block_tokens + position % block_tokens) * head_dim;
  }
};

// A live token, and the positions that it sees: [begin, end), of which a tree's mask may hide some from `tree_begin` on.
struct Token {
  int64_t index, position, begin, end, tree_begin;
};

// A row of the step: its live tokens, and the positions that any of them sees.
struct Row {
  int64_t index;
  std::vector<Token> tokens;
  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;

  template <class Query, class Cached>
  Row(const Step<Query, Cached>& step, int64_t row) : index(row) {
    const int32_t* positions = step.positions + row * step.tokens;
    int64_t last = -1;
    for (int64_t token = 0; token < step.tokens; token++) last = std::max<int64_t>(last, positions[token]);
    if (last < 0) return;
    tokens.reserve(step.tokens);
    for (int64_t token = 0; token < step.tokens; token++) {
      const int64_t position = positions[token];
      if (position < 0) continue;
      const int64_t first = step.window > 0 ? std::max<int64_t>(position - step.window + 1, 0) : 0;
      const int64_t stop = step.tree_mask != nullptr ? last + 1 : position + 1;
      tokens.push_back({token, position, first, stop, step.tree_mask != nullptr ? positions[0] : stop});
      begin = std::min(begin, first), end = std::max(end, stop);
    }
  }
};

// Where each of the `count` positions of a tile begins in the caches, in elements. Positions outside of [begin, end) may
// belong to nobody: their place is that of the nearest position within.
template <class Query, class Cached>
inline void find_places(
    const Step<Query, Cached>& step, const Row& row, int64_t kv_head, int64_t first, int64_t count, int64_t begin,
    int64_t end, int64_t* places) {
  const int64_t stop = std::min(first + count, end);
  int64_t position = std::max(first, begin);
  for (int64_t i = first; i < position; i++) places[i - first] = step.place(row.index, kv_head, position);
  while (position < stop) {
    int64_t place = step.place(row.index, kv_head, position);
    const int64_t block_end = std::min(stop, position / step.block_tokens * step.block_tokens + step.block_tokens);
    for (; position < block_end; position++, place += step.head_dim) places[position - first] = place;
  }
  for (; position < first + count; position++) places[position - first] = places[stop - 1 - first];
}

// Hides positions [begin, end) of scores, which begin at position `first`, if the tree's mask does not name them.
template <class Query, class Cached>
inline void hide_branches(
    const Step<Query, Cached>& step, const Row& row, const Token& token, float* scores, int64_t first, int64_t begin,
    int64_t end) {
  const bool* mask = step.tree_mask + row.index * step.tree_stride + token.index * step.tokens;
  for (int64_t position = begin; position < end; position++) {
    bool named = false;
    for (const Token& other : row.tokens) named |= other.position == position && mask[other.index];
    if (!named) scores[position - first] = kHidden;
  }
}

// Makes scores of a query's products with `count` positions from `first` on, which are whole vectors.
template <class Query, class Cached>
inline void score(
    const Step<Query, Cached>& step, const Row& row, const Token& token, int64_t head, float* scores, int64_t first,
    int64_t count) {
  if (step.soft_cap > 0) {  // cap * tanh(score / cap), where tanh(x) is 1 - 2 / (exp(2 x) + 1)
    const Vector cap = broadcast(step.soft_cap), twice = broadcast(2 * kLog2E / step.soft_cap), most = broadcast(100.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vector power = exp2(minimum(most, multiply(load(scores + i), twice)));
      const Vector part = divide(broadcast(2.0f), add(power, broadcast(1.0f)));
      store(scores + i, subtract_product(cap, cap, part));
    }
  }
  if (step.slopes != nullptr) {
    const Vector slope = broadcast(step.slopes[head] * kLog2E);
    for (int64_t i = 0; i < count; i += kLanes)
      store(scores + i, multiply_add(slope, count_from(first + i - token.position), load(scores + i)));
  }
  if (token.begin > first || token.end < first + count)
    for (int64_t i = 0; i < count; i += kLanes)
      store(scores + i, keep(load(scores + i), token.begin - first - i, token.end - first - i, broadcast(kHidden)));
  if (token.tree_begin < std::min(token.end, first + count))
    hide_branches(
        step, row, token, scores, first, std::max({first, token.begin, token.tree_begin}),
        std::min(token.end, first + count));
}

template <class Query, class Cached>
inline const Query* find_query(const Step<Query, Cached>& step, const Row& row, const Token& token, int64_t head) {
  return step.queries + (row.index * step.tokens + token.index) * step.query_stride + head * step.head_dim;
}
template <class Query, class Cached>
inline Query* find_output(const Step<Query, Cached>& step, const Row& row, const Token& token, int64_t head) {
  return step.attended + ((row.index * step.tokens + token.index) * step.heads + head) * step.head_dim;
}

// Asks memory for elements. The tokens of a tile are pages apart, so that the processor does not foresee them.
template <int ToWrite, class Element>
inline void ask_for(const Element* from, int64_t count) {
  for (int64_t at = 0; at < count; at += 64 / sizeof(Element)) __builtin_prefetch(from + at, ToWrite);
}

// One query against some of its positions: an origin of its scores, the sum of exp2(score - origin), and the values weighed
// so.
struct Partial {
  float origin, sum;
  const float* values;  // of the padded dimension
};

// Writes whole vectors of floats, multiplied by a factor; what lies behind `count` is left out.
template <class Element>
inline void write_scaled(Element* to, const float* values, float factor, int64_t count) {
  float lanes[kLanes];
  for (int64_t at = 0; at < count; at += kLanes) {
    const Vector scaled = multiply(load(values + at), broadcast(factor));
    if constexpr (std::is_same_v<Element, float>)
      if (at + kLanes <= count) {
        store(to + at, scaled);
        continue;
      }
    store(lanes, scaled);
    convert(to + at, lanes, std::min(kLanes, count - at));
  }
}

// Joins partial results, in their order, to the output of one query. `joined` has the padded dimension.
template <class Query, class Cached>
inline void finish(
    const Step<Query, Cached>& step, const Row& row, const Token& token, int64_t head, const Partial* partials,
    int64_t count, float* joined) {
  Query* const to = find_output(step, row, token, head);
  if (count == 1 && step.sinks == nullptr) {
    write_scaled(to, partials[0].values, kUnit<Cached> / partials[0].sum, step.head_dim);
    return;
  }
  const float sink = step.sinks != nullptr ? step.sinks[head] * kLog2E : kHidden;
  float origin = sink;
  for (int64_t i = 0; i < count; i++) origin = std::max(origin, partials[i].origin);
  float total = sink == kHidden ? 0 : std::exp2(sink - origin);
  for (int64_t i = 0; i < count; i++) {
    const float factor = partials[i].origin == kHidden ? 0 : std::exp2(partials[i].origin - origin);
    total += partials[i].sum * factor;
    for (int64_t at = 0; at < step.head_dim; at += kLanes) {
      const Vector before = i == 0 ? zero() : load(joined + at);
      store(joined + at, multiply_add(load(partials[i].values + at), broadcast(factor), before));
    }
  }
  write_scaled(to, joined, kUnit<Cached> / total, step.head_dim);
}

// Writes one head's key and value of a token into the caches. `Write` copies elements, of another type if need be.
template <class Query, class Cached, class Write>
inline void write_token(
    const Step<Query, Cached>& step, const Row& row, const Token& token, int64_t kv_head, const Write& write) {
  const int64_t from = row.index * step.tokens + token.index, at = kv_head * step.head_dim;
  const int64_t place = step.place(row.index, kv_head, token.position);
  write(step.key_cache + place, step.keys + from * step.key_stride + at, step.head_dim);
  write(step.value_cache + place, step.values + from * step.value_stride + at, step.head_dim);
}
template <class Query, class Cached>
inline void write_token(const Step<Query, Cached>& step, const Row& row, const Token& token, int64_t kv_head) {
  write_token(step, row, token, kv_head, [](Cached* to, const Query* from, int64_t count) { convert(to, from, count); });
}

// Copies one query as floats, scaled, and zeros behind it.
template <class Query, class Cached>
inline void read_query(const Step<Query, Cached>& step, const Row& row, const Token& token, int64_t head, float* to) {
  const Query* from = find_query(step, row, token, head);
  for (int64_t at = 0; at < step.head_dim; at += kLanes) {
    const int64_t part = std::min(kLanes, step.head_dim - at);
    const Vector lanes = part == kLanes ? load(from + at) : load_part(from + at, part);
    store(to + at, multiply(lanes, broadcast(step.scale)));
  }
}

}  // namespace kiln
