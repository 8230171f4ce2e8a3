// Keys and values of one KV head of a row, copied for products with many queries.
//
// Tiles of positions are copied when the first queries need them, and serve the row's further queries on the same thread.
// Where a step's tokens follow each other, and the cache has the dtype of what the step computed, their keys and values are
// copied from there: so threads need not wait for each other's writes to the cache, and writes can pass by the processor's
// caches.

#pragma once

#include <type_traits>
#include <vector>

#include "attend_step.h"
#include "tile_products.h"

namespace kiln {

// How many bytes of copies a thread keeps. Further tiles are copied for each tile of queries.
constexpr int64_t kPackedBytes = int64_t{1} << 20;

// Whether a step's own keys and values need not be read from the cache.
template <class Query, class Cached>
inline bool reads_own_tokens(const Row& row) {
  if (!std::is_same_v<Query, Cached>) return false;
  for (size_t i = 1; i < row.tokens.size(); i++)
    if (row.tokens[i].position != row.tokens[0].position + static_cast<int64_t>(i)) return false;
  return true;
}

// As many numbers as a vector has, of up to so many elements.
template <class Number, class Element>
inline Vector load_numbers(const Element* from, int64_t count) {
  if constexpr (Numbers<Number>::kElements == 1) return count >= kLanes ? load(from) : load_part(from, count);
#if defined(KILN_HAS_PAIRS)
  else
    return _mm512_castsi512_ps(count >= 2 * kLanes ? _mm512_loadu_si512(from)
                                                   : _mm512_maskz_loadu_epi16((1u << count) - 1, from));
#endif
}

// Numbers of one head of a query or key, in whole vectors.
template <class Number>
inline int64_t count_numbers(int64_t head_dim) {
  return round_up(head_dim, kLanes * Numbers<Number>::kElements) / Numbers<Number>::kElements;
}

// Copies `count` keys as [count_numbers][kTilePositions], and zeros for further positions.
template <class Number, class Element>
[[gnu::noinline]] void pack_keys(const Element* const* keys, int64_t count, int64_t head_dim, Number* packed) {
  constexpr int64_t kElements = Numbers<Number>::kElements;
  for (int64_t first = 0; first < kTilePositions; first += kLanes)
    for (int64_t at = 0; at < head_dim; at += kLanes * kElements) {
      Vector square[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++) {
        const Element* key = keys[std::min(first + i, count - 1)] + at;
        square[i] = first + i >= count ? zero() : load_numbers<Number>(key, head_dim - at);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++)
        store(reinterpret_cast<float*>(packed + (at / kElements + i) * kTilePositions + first), square[i]);
    }
}

// Copies `count` values as [kTilePositions][padded_dim], and zeros for further positions.
template <class Element>
[[gnu::noinline]] void pack_values(
    const Element* const* values, int64_t count, int64_t head_dim, int64_t padded_dim, float* packed) {
  for (int64_t i = 0; i < kTilePositions; i++)
    for (int64_t at = 0; at < head_dim; at += kLanes) {
      const int64_t part = std::min(kLanes, head_dim - at);
      Vector lanes = zero();
      if (i < count) lanes = part == kLanes ? load(values[i] + at) : load_part(values[i] + at, part);
      store(packed + i * padded_dim + at, lanes);
    }
}

#if defined(KILN_HAS_PAIRS)

// Copies `count` values as [kTilePositions / 2][padded_dim], each beside that of the next position.
[[gnu::noinline]] inline void pack_values(
    const BFloat16* const* values, int64_t count, int64_t head_dim, int64_t padded_dim, Pair* packed) {
  for (int64_t i = 0; i < kTilePositions; i += 2)
    for (int64_t at = 0; at < head_dim; at += kLanes) {
      const __mmask16 part = (1u << std::min(kLanes, head_dim - at)) - 1;
      const auto read = [&](int64_t position) {
        return position < count ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(part, values[position] + at))
                                : _mm512_setzero_si512();
      };
      const __m512i pairs = _mm512_or_si512(read(i), _mm512_slli_epi32(read(i + 1), 16));
      _mm512_storeu_si512(packed + i / 2 * padded_dim + at, pairs);
    }
}

#endif

// The values of a tile where they lie, if they need no packing: whole vectors of floats, one position behind the other.
inline const float* find_dense(const float* const* values, int64_t before, int64_t count, int64_t head_dim) {
  if (before > 0 || head_dim % kLanes != 0) return nullptr;
  for (int64_t i = 1; i < count; i++)
    if (values[i] != values[0] + i * head_dim) return nullptr;
  return values[0];
}

// A tile of positions, ready for products.
template <class Number>
struct PackedTile {
  const Number* keys = nullptr;    // [count_numbers][kTilePositions]
  const Number* values = nullptr;  // [kTilePositions / elements of a number][padded_dim]
};

// What one thread has copied of the row and KV head that it attends to.
template <class Number>
class PackedRow {
 public:
  // `memory` has `count_memory(most_tiles, head_dim)`.
  PackedRow(Number* memory, int64_t most_tiles, int64_t head_dim)
      : memory_(memory), head_dim_(head_dim), tiles_(most_tiles) {}

  // How many tiles are kept of rows that have up to so many positions.
  static int64_t count_tiles(int64_t most_positions, int64_t head_dim) {
    const int64_t tile_bytes = count_tile(head_dim) * static_cast<int64_t>(sizeof(Number));
    return std::min(most_positions / kTilePositions + 2, std::max<int64_t>(kPackedBytes / tile_bytes, 1));
  }
  // Numbers of the tiles, and of one more for those that are not kept.
  static int64_t count_memory(int64_t most_tiles, int64_t head_dim) { return count_tile(head_dim) * (most_tiles + 1); }

  // Returns the tile that begins with position `first` of the row. `is_met_again` says whether further queries need it.
  template <class Query, class Cached>
  PackedTile<Number> find(
      const Step<Query, Cached>& step, const Row& row, int64_t kv_head, int64_t first, bool is_met_again) {
    if (row.index != row_ || kv_head != kv_head_) {
      row_ = row.index, kv_head_ = kv_head;
      std::fill(tiles_.begin(), tiles_.end(), PackedTile<Number>{});
    }
    const int64_t index = first / kTilePositions - row.begin / kTilePositions;
    const int64_t kept = is_met_again ? static_cast<int64_t>(tiles_.size()) : 0;
    Number* const to = memory_ + count_tile(head_dim_) * std::min(index, kept);
    if (index >= kept) return pack(step, row, first, to);
    if (tiles_[index].keys == nullptr) tiles_[index] = pack(step, row, first, to);
    return tiles_[index];
  }

 private:
  // Numbers of a tile's keys, and of both.
  static int64_t count_keys(int64_t head_dim) { return kTilePositions * count_numbers<Number>(head_dim); }
  static int64_t count_tile(int64_t head_dim) {
    return count_keys(head_dim) + kTilePositions / Numbers<Number>::kElements * round_up(head_dim, kLanes);
  }

  template <class Query, class Cached>
  PackedTile<Number> pack(const Step<Query, Cached>& step, const Row& row, int64_t first, Number* to) const {
    const int64_t before = std::max<int64_t>(row.begin - first, 0), count = std::min(kTilePositions, row.end - first);
    int64_t places[kTilePositions];
    const Cached *keys[kTilePositions], *values[kTilePositions];
    find_places(step, row, kv_head_, first, count, row.begin, row.end, places);
    for (int64_t i = 0; i < count; i++) keys[i] = step.key_cache + places[i], values[i] = step.value_cache + places[i];
    if constexpr (std::is_same_v<Query, Cached>)
      if (reads_own_tokens<Query, Cached>(row)) {
        const int64_t own = row.tokens[0].position, token = row.index * step.tokens, at = kv_head_ * step.head_dim;
        for (int64_t i = std::max(own - first, before); i < count; i++) {
          const int64_t from = token + row.tokens[first + i - own].index;
          keys[i] = step.keys + from * step.key_stride + at, values[i] = step.values + from * step.value_stride + at;
        }
        std::fill(keys, keys + before, keys[before]);
        std::fill(values, values + before, values[before]);
      }
    pack_keys<Number>(keys, count, step.head_dim, to);
    if constexpr (std::is_same_v<Number, Cached>)
      if (const Number* dense = find_dense(values, before, count, step.head_dim)) return {to, dense};
    Number* const packed = to + count_keys(head_dim_);
    pack_values(values, count, step.head_dim, step.padded_dim(), packed);
    return {to, packed};
  }

  Number* memory_;
  int64_t head_dim_, row_ = -1, kv_head_ = -1;
  std::vector<PackedTile<Number>> tiles_;
};

}  // namespace kiln
