// What LoRA adapters add to linear layers: B(A x), to the layers' outputs in place, in rows of several adapters at once.
//
// Layers with the same input are parts of one call. Rows are taken by their adapters, so that a step reads the matrices of
// each adapter once, and rows without an adapter cost nothing. First come all A x: lanes are inputs, and the sums of a tile
// of rows and ranks are added up lane by lane. Then threads add B (A x) to their outputs: lanes are outputs, for which a
// square of B is turned around once for all rows of its adapter.
//
// A row's result depends on the row and its adapter alone: products of each lane are added up in the order of the inputs,
// then the lanes in one fixed order, and B's products in the order of the ranks.

#include <algorithm>
#include <cstdint>
#include <vector>

#include <omp.h>

#include "linear_rows.h"
#include "vectors.h"

namespace kiln {

constexpr int kRankTile = kLanes / 2;     // with two rows, as many sums as `sum_each` takes
constexpr int kAddedRows = kLanes / 2;    // of a tile of B, beside a square of as many vectors as lanes
constexpr int64_t kHeldRows = 32;         // whose outputs are added up over the ranks at once
constexpr int64_t kRowsOfA = 32;          // for which a thread reads some ranks of A
// Between what is multiplied and what is asked for meanwhile: the matrices are too short for the processor's own prefetching.
constexpr int64_t kAheadOfA = 256;        // bytes of each rank
constexpr int64_t kAheadOfB = 8192;

// A layer of a call: all its adapters, A [slots, rank, inputs] and B [slots, outputs, rank], and its first output.
template <class Element>
struct AdaptedLayer {
  const Element *a, *b;
  int64_t outputs, first;
};

// Rows of one adapter, among all that have one.
struct AdaptedRows {
  int32_t slot;
  int64_t begin, end;
};

// Products of one or two rows with a tile of up to kRankTile ranks of A: sums[row * kLanes + rank].
template <int Rows, class Element>
inline void multiply_ranks(
    const Element* const* rows, const Element* matrix, int64_t ranks, int64_t inputs, float* sums) {
  const Element* own[kRankTile];
  for (int rank = 0; rank < kRankTile; rank++) own[rank] = matrix + std::min<int64_t>(rank, ranks - 1) * inputs;
  Vector added[kLanes];  // [row][rank]
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) added[i] = zero();
  const auto add_products = [&](const auto& take, int64_t at) {
    Vector taken[Rows];
#pragma GCC unroll 2
    for (int row = 0; row < Rows; row++) taken[row] = take(rows[row] + at);
#pragma GCC unroll 8
    for (int rank = 0; rank < kRankTile; rank++) {
      _mm_prefetch(reinterpret_cast<const char*>(own[rank] + at) + kAheadOfA, _MM_HINT_T0);
      const Vector operand = take(own[rank] + at);
#pragma GCC unroll 2
      for (int row = 0; row < Rows; row++) {
        Vector& sum = added[row * kRankTile + rank];
        sum = multiply_add(taken[row], operand, sum);
      }
    }
  };
  int64_t at = 0;
  for (; at + kLanes <= inputs; at += kLanes) add_products([](const Element* from) { return load(from); }, at);
  if (at < inputs) add_products([&](const Element* from) { return load_part(from, inputs - at); }, at);
  float lanes[kLanes];
  store(lanes, sum_each(added));
  for (int row = 0; row < Rows; row++) std::copy_n(lanes + row * kRankTile, ranks, sums + row * kLanes);
}

// Up to kLanes ranks of up to kLanes outputs, [rank][output], of B's rows of `rank` elements; zeros beyond.
template <class Element>
inline void load_square(const Element* matrix, int64_t rank, int64_t ranks, int64_t outputs, Vector (&square)[kLanes]) {
  if (ranks >= kLanes && outputs >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) square[i] = load(matrix + i * rank);
  } else {
    for (int i = 0; i < kLanes; i++)
      square[i] = i < outputs ? load_part(matrix + i * rank, std::min(ranks, kLanes)) : zero();
  }
  transpose(square);
}

// Adds the products of up to kAddedRows rows of A x with a square of B to sums.
template <int Rows>
inline void add_square(Vector* sums, int64_t rows, const float* middle, const Vector (&square)[kLanes]) {
  if constexpr (Rows > 1)
    if (rows < Rows) return add_square<Rows - 1>(sums, rows, middle, square);
  Vector added[Rows];
#pragma GCC unroll 8
  for (int row = 0; row < Rows; row++) added[row] = sums[row];
#pragma GCC unroll 16
  for (int rank = 0; rank < kLanes; rank++)
#pragma GCC unroll 8
    for (int row = 0; row < Rows; row++)
      added[row] = multiply_add(broadcast(middle[row * kLanes + rank]), square[rank], added[row]);
#pragma GCC unroll 8
  for (int row = 0; row < Rows; row++) sums[row] = added[row];
}

// Adds to outputs [begin, end) of some rows, at `places`, the products of their A x, [part of ranks][middle_rows][kLanes],
// with the outputs' rows of B.
template <class Element>
inline void add_outputs(
    const float* middle, int64_t middle_rows, const Element* matrix, int64_t rank, const int32_t* places, int64_t rows,
    Element* out, int64_t out_stride, int64_t begin, int64_t end) {
  Vector sums[kHeldRows];
  for (int64_t output = begin; output < end; output += kLanes) {
    const int64_t count = std::min(kLanes, end - output);
    const char* const next = reinterpret_cast<const char*>(matrix + output * rank) + kAheadOfB;
    for (int64_t at = 0; at < count * rank * static_cast<int64_t>(sizeof(Element)); at += 64)
      _mm_prefetch(next + at, _MM_HINT_T0);
    for (int64_t first = 0; first < rows; first += kHeldRows) {
      const int64_t some = std::min(kHeldRows, rows - first);
      for (int64_t row = 0; row < some; row++) sums[row] = zero();
      for (int64_t at = 0; at < rank; at += kLanes) {
        Vector square[kLanes];
        load_square(matrix + output * rank + at, rank, rank - at, count, square);
        const float* const own = middle + (at * middle_rows / kLanes + first) * kLanes;
        for (int64_t row = 0; row < some; row += kAddedRows)
          add_square<kAddedRows>(sums + row, some - row, own + row * kLanes, square);
      }
      for (int64_t row = 0; row < some; row++) {
        Element* const to = out + places[first + row] * out_stride + output;
        if (count == kLanes) {
          store(to, add(load(to), sums[row]));
        } else {
          float lanes[kLanes];
          store(lanes, add(load_part(to, count), sums[row]));
          convert(to, lanes, count);
        }
      }
    }
  }
}

// Adds to out [sequences * tokens, out_stride] what the adapters of `count` layers make of rows [sequences * tokens, inputs].
// Each sequence has the adapter of a slot, or none, -1. `live` is as `kiln::linear` takes it; other rows stay as they are.
template <class Element>
inline void adapt(
    void* to, int64_t out_stride, const void* from, const void* const* a, const void* const* b, const int64_t* outputs,
    const int64_t* firsts, int64_t count, const int32_t* slots, int64_t sequences, int64_t tokens, int64_t inputs,
    int64_t rank, const int32_t* live, int64_t groups) {
  if (std::all_of(slots, slots + sequences, [](int32_t slot) { return slot < 0; })) return;
  const auto slot_of = [&](int32_t row) { return slots[row / tokens]; };
  std::vector<int32_t> rows = list_live(sequences * tokens, live, groups);
  std::erase_if(rows, [&](int32_t row) { return slot_of(row) < 0; });
  std::stable_sort(rows.begin(), rows.end(), [&](int32_t one, int32_t other) { return slot_of(one) < slot_of(other); });
  const int64_t num_rows = static_cast<int64_t>(rows.size());
  std::vector<AdaptedRows> adapters;
  for (int64_t at = 0; at < num_rows; at++)
    if (adapters.empty() || adapters.back().slot != slot_of(rows[at]))
      adapters.push_back({slot_of(rows[at]), at, at + 1});
    else
      adapters.back().end = at + 1;
  std::vector<AdaptedLayer<Element>> layers;
  for (int64_t i = 0; i < count; i++)
    layers.push_back({static_cast<const Element*>(a[i]), static_cast<const Element*>(b[i]), outputs[i], firsts[i]});
  Element* const out = static_cast<Element*>(to);
  const Element* const input = static_cast<const Element*>(from);
  // A x of the rows of one layer, then of the next: [part of ranks][row][kLanes]. Behind the ranks are zeros.
  const int64_t layer_size = (rank + kLanes - 1) / kLanes * kLanes * num_rows;
  std::vector<float> middle(count * layer_size);
  const int64_t rank_tiles = (rank + kRankTile - 1) / kRankTile;
#pragma omp parallel num_threads(omp_get_max_threads())
  {
    for (int64_t layer = 0; layer < count; layer++)
      for (const AdaptedRows& own : adapters) {
        const int64_t row_parts = (own.end - own.begin + kRowsOfA - 1) / kRowsOfA;
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t part = 0; part < row_parts; part++)
          for (int64_t tile = 0; tile < rank_tiles; tile++) {
            const int64_t first = tile * kRankTile, ranks = std::min<int64_t>(kRankTile, rank - first);
            const Element* const matrix = layers[layer].a + (own.slot * rank + first) * inputs;
            float* const sums = middle.data() + layer * layer_size + first / kLanes * num_rows * kLanes + first % kLanes;
            const int64_t begin = own.begin + part * kRowsOfA, end = std::min(begin + kRowsOfA, own.end);
            for (int64_t row = begin; row < end; row += 2) {
              const Element* const two[] = {input + rows[row] * inputs, input + rows[std::min(row + 1, end - 1)] * inputs};
              if (row + 1 < end)
                multiply_ranks<2>(two, matrix, ranks, inputs, sums + row * kLanes);
              else
                multiply_ranks<1>(two, matrix, ranks, inputs, sums + row * kLanes);
            }
          }
      }
#pragma omp barrier
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t layer = 0; layer < count; layer++) {
      const AdaptedLayer<Element>& own = layers[layer];
      const auto [begin, end] = Share::of(own.outputs, kLanes, thread, threads);
      for (const AdaptedRows& some : adapters)
        add_outputs(
            middle.data() + layer * layer_size + some.begin * kLanes, num_rows, own.b + some.slot * own.outputs * rank,
            rank, rows.data() + some.begin, some.end - some.begin, out + own.first, out_stride, begin, end);
    }
  }
}

}  // namespace kiln
