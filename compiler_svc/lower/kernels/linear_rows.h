// Rows and inputs of a product, and the parts in which kernels take them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "products.h"

namespace kiln {

constexpr int64_t kBlockRows = 128;    // at most: with 768 inputs 384 KiB of the second-level cache
constexpr int64_t kBlockBytes = 3072;  // of a row, at most: with six rows 18 KiB of the first-level cache
constexpr int64_t kMostGroup = 128;    // inputs that share factors

// Something taken in as few parts as can be, as even as can be.
struct Parts {
  int64_t all;
  int64_t most;      // of a part
  int64_t unit = 1;  // which divides all and most, and every part

  int64_t count() const { return (all + most - 1) / most; }
  // The first of a part.
  int64_t begin(int64_t part) const { return all / unit * part / count() * unit; }
  int64_t size(int64_t part) const { return begin(part + 1) - begin(part); }
  int64_t largest() const { return (all / unit + count() - 1) / count() * unit; }
};

// A row's operands, the last of which is filled up with zeros.
template <class P>
inline int64_t count_operands(int64_t inputs) {
  return (inputs + P::kElements - 1) / P::kElements;
}

// A row's operands in blocks, as they are added up. Blocks of grouped weights are whole groups.
template <class P>
inline Parts divide_inputs(int64_t inputs) {
  const int64_t unit = P::kItemsPerByte > 1 ? std::min(inputs & -inputs, kMostGroup) / P::kElements : 1;
  return {count_operands<P>(inputs), kBlockBytes / static_cast<int64_t>(sizeof(typename P::Operand)), unit};
}

// Calls `run(first, end)` for inputs that are added up in one sum.
template <class P, class Run>
inline void for_spans(int64_t inputs, int64_t span, const Run& run) {
  if constexpr (!P::kIsInteger) return run(0, inputs);
  const Parts blocks = divide_inputs<P>(inputs);
  for (int64_t block = 0; block < blocks.count(); block++) {
    const int64_t end = std::min(blocks.begin(block + 1) * P::kElements, inputs);
    for (int64_t at = blocks.begin(block) * P::kElements, next; at < end; at = next) {
      next = P::kItemsPerByte > 1 ? at + span : end;
      run(at, next);
    }
  }
}

// Lists the rows that are live: of each of `groups` equal groups of rows the first `live[group]`, or all without `live`.
inline std::vector<int32_t> list_live(int64_t rows, const int32_t* live, int64_t groups) {
  std::vector<int32_t> places;
  places.reserve(rows);
  if (live == nullptr) groups = 1;
  for (int64_t group = 0; group < groups; group++) {
    const int64_t first = rows / groups * group;
    const int64_t end = first + std::min<int64_t>(live == nullptr ? rows : live[group], rows / groups);
    for (int64_t row = first; row < end; row++) places.push_back(row);
  }
  return places;
}

// A thread's share of a product: outputs [first, end) of all weights side by side.
struct Share {
  int64_t first, end;

  // In whole tiles, unless a weight ends within one.
  static Share of(int64_t outputs, int64_t tile, int64_t thread, int64_t threads) {
    const int64_t tiles = (outputs + tile - 1) / tile;
    return {tiles * thread / threads * tile, std::min(tiles * (thread + 1) / threads * tile, outputs)};
  }
};

}  // namespace kiln
