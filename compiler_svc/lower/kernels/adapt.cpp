// What LoRA adapters add to a linear layer: B(A x) in rows of several adapters at once.
//
// Rows are taken by their adapters, so that a step reads the two matrices of each adapter once. A row's result depends on
// the row and its adapter alone: products of each lane are added up in the order of the inputs, then the lanes in one fixed
// order.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "linear_rows.h"
#include "vectors.h"

namespace kiln {

constexpr int kAdaptedRows = 2;   // of a tile: 2 × 4 sums, 4 operands of A and one of the row
constexpr int kAdaptedRanks = 4;

// Rows of one adapter, among all that have one.
struct AdaptedRows {
  int32_t slot;
  int64_t begin, end;
};

// Products of some rows with some ranks of A, side by side: sums[row * stride + rank].
template <int Rows, int Ranks, class Element>
inline void multiply_ranks(
    const Element* const* rows, const Element* matrix, int64_t inputs, float* sums, int64_t stride) {
  Vector added[Rows][Ranks];
  for (int row = 0; row < Rows; row++)
    for (int rank = 0; rank < Ranks; rank++) added[row][rank] = zero();
  int64_t at = 0;
  const auto step = [&](const auto& take) {
    Vector operands[Ranks];
#pragma GCC unroll 4
    for (int rank = 0; rank < Ranks; rank++) operands[rank] = take(matrix + rank * inputs + at);
#pragma GCC unroll 2
    for (int row = 0; row < Rows; row++) {
      const Vector own = take(rows[row] + at);
#pragma GCC unroll 4
      for (int rank = 0; rank < Ranks; rank++) added[row][rank] = multiply_add(own, operands[rank], added[row][rank]);
    }
  };
  for (; at + kLanes <= inputs; at += kLanes) step([](const Element* from) { return load(from); });
  if (at < inputs) step([&](const Element* from) { return load_part(from, inputs - at); });
  for (int row = 0; row < Rows; row++)
    for (int rank = 0; rank < Ranks; rank++) sums[row * stride + rank] = sum(added[row][rank]);
}

// Products of a row's A x, which is filled up with zeros to whole vectors, with up to kLanes outputs of B.
template <class Element>
inline void multiply_outputs(
    const float* middle, const Element* matrix, int64_t rank, Element* out, int64_t count) {
  Vector added[kLanes];
  for (int64_t output = 0; output < kLanes; output++) added[output] = zero();
  for (int64_t output = 0; output < count; output++) {
    const Element* const own = matrix + output * rank;
    for (int64_t at = 0; at < rank; at += kLanes) {
      const int64_t part = std::min(kLanes, rank - at);
      const Vector operand = part == kLanes ? load(own + at) : load_part(own + at, part);
      added[output] = multiply_add(load(middle + at), operand, added[output]);
    }
  }
  float lanes[kLanes];
  store(lanes, sum_each(added));
  convert(out, lanes, count);
}

// To [sequences * tokens, outputs], from [sequences * tokens, inputs], of A [slots, rank, inputs], B [slots, outputs, rank]
// and the slot of each sequence, -1 for none. `live` is as `kiln::linear` takes it; other rows stay unwritten.
template <class Element>
inline void adapt(
    void* to, const void* from, const void* all_a, const void* all_b, const int32_t* slots, int64_t sequences,
    int64_t tokens, int64_t inputs, int64_t outputs, int64_t rank, const int32_t* live, int64_t groups) {
  Element* const out = static_cast<Element*>(to);
  const Element* const input = static_cast<const Element*>(from);
  const Element *const a = static_cast<const Element*>(all_a), *const b = static_cast<const Element*>(all_b);
  std::vector<int32_t> rows = list_live(sequences * tokens, live, groups);
  const auto slot_of = [&](int32_t row) { return slots[row / tokens]; };
  std::stable_sort(rows.begin(), rows.end(), [&](int32_t one, int32_t other) { return slot_of(one) < slot_of(other); });
  const int64_t count = rows.size();
  int64_t first = 0;
  while (first < count && slot_of(rows[first]) < 0) first++;
  std::vector<AdaptedRows> adapters;
  for (int64_t at = first; at < count; at++)
    if (adapters.empty() || adapters.back().slot != slot_of(rows[at]))
      adapters.push_back({slot_of(rows[at]), at, at + 1});
    else
      adapters.back().end = at + 1;
  const int64_t stride = (rank + kLanes - 1) / kLanes * kLanes;
  std::vector<float> middle(adapters.empty() ? 0 : (count - first) * stride);
  const int64_t rank_tiles = (rank + kAdaptedRanks - 1) / kAdaptedRanks, tiles = (outputs + kLanes - 1) / kLanes;
  const auto clear = [&](int64_t at) { std::memset(out + rows[at] * outputs, 0, outputs * sizeof(Element)); };
  if (adapters.empty()) {
    for (int64_t at = 0; at < first; at++) clear(at);
    return;
  }
#pragma omp parallel
  {
    for (const AdaptedRows& own : adapters) {
      const int64_t row_tiles = (own.end - own.begin + kAdaptedRows - 1) / kAdaptedRows;
#pragma omp for collapse(2) schedule(static) nowait
      for (int64_t tile = 0; tile < row_tiles; tile++)
        for (int64_t rank_tile = 0; rank_tile < rank_tiles; rank_tile++) {
          const int64_t row = own.begin + tile * kAdaptedRows, first_rank = rank_tile * kAdaptedRanks;
          const int64_t num_rows = std::min<int64_t>(kAdaptedRows, own.end - row);
          const int64_t num_ranks = std::min<int64_t>(kAdaptedRanks, rank - first_rank);
          const Element* taken[kAdaptedRows];
          for (int64_t i = 0; i < num_rows; i++) taken[i] = input + rows[row + i] * inputs;
          const Element* const matrix = a + (own.slot * rank + first_rank) * inputs;
          float* const sums = middle.data() + (row - first) * stride + first_rank;
          if (num_ranks == kAdaptedRanks && num_rows == kAdaptedRows) {
            multiply_ranks<kAdaptedRows, kAdaptedRanks>(taken, matrix, inputs, sums, stride);
          } else {
            for (int64_t i = 0; i < num_rows; i++)
              if (num_ranks == kAdaptedRanks)
                multiply_ranks<1, kAdaptedRanks>(taken + i, matrix, inputs, sums + i * stride, stride);
              else
                for (int64_t j = 0; j < num_ranks; j++)
                  multiply_ranks<1, 1>(taken + i, matrix + j * inputs, inputs, sums + i * stride + j, stride);
          }
        }
    }
#pragma omp for schedule(static)
    for (int64_t at = 0; at < first; at++) clear(at);
    // All threads have passed its barrier.
    for (const AdaptedRows& own : adapters) {
#pragma omp for schedule(static) nowait
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t output = tile * kLanes, part = std::min(kLanes, outputs - output);
        const Element* const matrix = b + (own.slot * outputs + output) * rank;
        for (int64_t row = own.begin; row < own.end; row++)
          multiply_outputs(
              middle.data() + (row - first) * stride, matrix, rank, out + rows[row] * outputs + output, part);
      }
    }
  }
}

}  // namespace kiln
