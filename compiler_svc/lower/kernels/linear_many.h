// Products of many rows of activations with weights [outputs, inputs]: lanes are rows.
//
// Activations are copied once for each call, with 16 (AVX2: 8) rows beside each other, and weights are read where they
// lie, four bytes at a time for all lanes: the products of a lane are those of one output, so that no lanes are added up.
// What comes out has the rows of an output beside each other, and is turned around on its way to memory.
//
// The sums of a tile take the registers. Of a block of inputs, its weights stay in the first-level cache while the rows of
// a block pass by them from the second level. Weights of the next tile are asked for meanwhile.
//
// An output adds its products one after the other in the order of the inputs, or if they are integers, sums of some. It
// depends on its own row and weights alone: not on other rows, their number beyond what this kernel serves, nor on the
// number of threads.

#pragma once

#include "linear_integers.h"

namespace kiln {

constexpr int64_t kMostRowsOfFew = 127;  // Products of more rows are made here. See decision 99.
constexpr int kTileOutputs = 6;
// Threads take multiples of it: whole tiles, and whole vectors of results.
constexpr int64_t kManyTile = 8 * kTileOutputs;
constexpr int kTileVectors = kColumns;  // of rows
constexpr int64_t kBlockVectors = kBlockRows / kLanes;
constexpr int64_t kPanelOutputs = 384;   // whose sums are kept over the blocks of inputs: up to 192 KiB of a thread
constexpr int64_t kFactorBytes = 4;      // that a lane multiplies at once: a float, or two of bfloat16

// Vectors of a panel's sums: for each output as many as a block has.
constexpr int64_t kHeldVectors = kPanelOutputs * kBlockVectors;

// How many vectors hold so many rows.
inline int64_t count_vectors(int64_t rows) { return (rows + kLanes - 1) / kLanes; }

inline Parts divide_vectors(int64_t vectors) { return {vectors, kTileVectors}; }

// A row's elements that a lane multiplies at once.
template <class P>
constexpr int64_t kFactorElements = P::kElements / kLanes;

// Copies one vector of `rows` rows of a block of `vectors` as [block of inputs][tile][factor][vector of the tile]. Lanes
// without a row are zeros, and so are factors behind the inputs.
template <class P>
inline void pack_vector(
    const typename P::Source* const* sources, int64_t rows, int64_t inputs, int64_t vector, int64_t vectors,
    typename P::Operand* packed) {
  const Parts blocks = divide_inputs<P>(inputs), tiles = divide_vectors(vectors);
  int64_t tile = 0;
  while (tiles.begin(tile + 1) <= vector) tile++;
  const int64_t tile_begin = tiles.begin(tile), width = tiles.size(tile);
  for (int64_t block = 0; block < blocks.count(); block++) {
    const int64_t begin = blocks.begin(block), operands = blocks.size(block);
    typename P::Operand* to = packed + (vectors * begin + tile_begin * operands) * kLanes + vector - tile_begin;
    for (int64_t operand = begin; operand < begin + operands; operand++, to += kLanes * width) {
      const int64_t at = operand * P::kElements;
      Vector square[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++) {
        if (i >= rows) {
          square[i] = zero();
          continue;
        }
        const auto* from = sources[i] + at;
        square[i] = (Vector)(at + P::kElements <= inputs ? P::load(from) : P::load_part(from, inputs - at));
      }
      transpose(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++) to[i * width] = (typename P::Operand)square[i];
    }
  }
}

// The weights of a tile's outputs from input `first` on.
template <class P>
struct TileWeights {
  WeightRow<P> rows[kTileOutputs];
  const char* factors[kTileOutputs];
  int64_t first;
};

// Adds the products of a block of inputs to the sums [kTileOutputs][stride] of one tile, or begins them. `ahead_bytes`
// behind each output's factors lies what is asked for meanwhile, if anything.
template <int Vectors, class P>
inline void add_tile(
    Vector* held, int64_t stride, bool begins, const typename P::Operand* activations, int64_t factors,
    const TileWeights<P>& weights, int64_t ahead_bytes, const RowNumbers& about) {
  using Operand = typename P::Operand;
  typename P::Sum sums[kTileOutputs][Vectors];
  const auto add = [&](int64_t factor) {
    Operand rows[Vectors];
#pragma GCC unroll 4
    for (int i = 0; i < Vectors; i++) rows[i] = activations[factor * Vectors + i];
#pragma GCC unroll 6
    for (int output = 0; output < kTileOutputs; output++) {
      const Operand weight = P::spread(weights.factors[output] + factor * kFactorBytes);
#pragma GCC unroll 4
      for (int i = 0; i < Vectors; i++) sums[output][i] = P::add_to(sums[output][i], rows[i], weight);
    }
  };
  constexpr int64_t kLineFactors = 64 / kFactorBytes;
  const int64_t span = weights.rows[0].count_additions(kFactorElements<P>);
  for (int64_t factor = 0, begin = 0; factor < factors; begin = factor) {
#pragma GCC unroll 6
    for (int output = 0; output < kTileOutputs; output++)
#pragma GCC unroll 4
      for (int i = 0; i < Vectors; i++) sums[output][i] = P::begin(begins ? zero() : held[output * stride + i]);
    const int64_t end = begin + std::min(span, factors - begin);
    for (; factor + kLineFactors <= end; factor += kLineFactors) {
      if (ahead_bytes > 0) {
#pragma GCC unroll 6
        for (int output = 0; output < kTileOutputs; output++)
          _mm_prefetch(weights.factors[output] + ahead_bytes + factor * kFactorBytes, _MM_HINT_T1);
      }
#pragma GCC unroll 4
      for (int64_t i = 0; i < kLineFactors; i++) add(factor + i);
    }
    for (; factor < end; factor++) add(factor);
    const int64_t at = weights.first + begin * kFactorElements<P>;
    const float* const all_totals = about.find_totals<P>(at);
#pragma GCC unroll 6
    for (int output = 0; output < kTileOutputs; output++)
#pragma GCC unroll 4
      for (int i = 0; i < Vectors; i++) {
        Vector& sum = held[output * stride + i];
        const auto totals = [&] { return load(all_totals + i * kLanes); };
        sum = weights.rows[output].close(begins ? zero() : sum, sums[output][i], at, totals);
      }
    begins = false;
  }
}

// Adds the products of a tile of outputs with all tiles of rows of a block.
template <int Vectors, class P>
inline void add_tiles(
    Vector* held, int64_t vectors, bool begins, const typename P::Operand* activations, int64_t padded_factors,
    int64_t factors, const TileWeights<P>& weights, int64_t ahead_bytes, const RowNumbers& about) {
  const Parts tiles = divide_vectors(vectors);
  for (int64_t tile = 0; tile < tiles.count(); tile++) {
    const int64_t vector = tiles.begin(tile);
    const auto* const from = activations + vector * padded_factors;
    const int64_t ahead = tile == 0 ? ahead_bytes : 0;
    const RowNumbers own = about.from(vector * kLanes);
    if (tiles.size(tile) == Vectors)
      add_tile<Vectors, P>(held + vector, vectors, begins, from, factors, weights, ahead, own);
    else if constexpr (Vectors > 1)
      add_tile<Vectors - 1, P>(held + vector, vectors, begins, from, factors, weights, ahead, own);
  }
}

// Writes the sums of a panel of outputs, from `first` on, as rows.
template <class P>
inline void store_panel(
    const Vector* held, int64_t vectors, const int32_t* places, int64_t rows, const Weight<P>& weight, int64_t first,
    int64_t outputs, typename P::Element* out, int64_t out_stride, const RowNumbers& about) {
  for (int64_t row = 0; row < rows; row += kLanes) {
    const int64_t count = std::min(kLanes, rows - row);
    for (int64_t output = 0; output < outputs; output += kLanes) {
      const int64_t part = std::min(kLanes, outputs - output);
      // Every row's next line is fetched now, because each lies in another page.
      for (int64_t i = 0; i < count; i++)
        _mm_prefetch(out + places[row + i] * out_stride + first + output + kLanes, _MM_HINT_T0);
      Vector square[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++) {
        const int64_t place = output + std::min(i, part - 1);
        const auto units = [&] { return load(about.numbers + row); };
        square[i] = weight.finish(held[place * vectors + row / kLanes], first + place, units);
      }
      transpose(square);
      for (int64_t i = 0; i < count; i++) {
        auto* const to = out + places[row + i] * out_stride + first + output;
        if (part == kLanes) {
          store(to, square[i]);
        } else {
          typename P::Element lanes[kLanes];
          store(lanes, square[i]);
          std::copy(lanes, lanes + part, to);
        }
      }
    }
  }
}

// A block of packed rows by outputs [first, end) of one weight. `held` is the thread's own.
template <class P>
inline void multiply_many(
    const int32_t* places, int64_t rows, const typename P::Operand* packed, const Weight<P>& weight, int64_t inputs,
    int64_t first, int64_t end, typename P::Element* out, int64_t out_stride, Vector* held,
    const RowNumbers& about) {
  using Operand = typename P::Operand;
  // Otherwise they are copied as what lanes multiply: made wider, or filled up with zeros.
  const bool are_weights_factors = P::kAreItemsFactors && inputs % kFactorElements<P> == 0;
  const Parts blocks = divide_inputs<P>(inputs);
  const int64_t vectors = count_vectors(rows), row_bytes = count_bytes<P>(inputs);
  const int64_t ahead_bytes = are_weights_factors ? kTileOutputs * row_bytes : 0;
  const Parts widths = divide_vectors(vectors);
  Operand copies[kTileOutputs][kBlockBytes / sizeof(Operand)];
  for (; first < end; first += kPanelOutputs) {
    const int64_t outputs = std::min(kPanelOutputs, end - first);
    for (int64_t block = 0; block < blocks.count(); block++) {
      const int64_t operands = blocks.size(block), at = blocks.begin(block) * P::kElements;
      const int64_t count = std::min(operands * P::kElements, inputs - at);
      const int64_t factors = (count + kFactorElements<P> - 1) / kFactorElements<P>;
      const Operand* const activations = packed + vectors * blocks.begin(block) * kLanes;
      for (int64_t output = 0; output < outputs; output += kTileOutputs) {
        TileWeights<P> tile{.first = at};
        for (int64_t i = 0; i < kTileOutputs; i++) {
          // The last tile computes its last output several times.
          const WeightRow<P> row = tile.rows[i] = weight.row(std::min(first + output + i, end - 1));
          tile.factors[i] = reinterpret_cast<const char*>(row.items + at);
          if (are_weights_factors) continue;
          const int64_t whole = count / P::kElements;
          for (int64_t operand = 0; operand < whole; operand += kWeightParts<P>)
            for_parts<P>([&]<int Part>() {
              copies[i][operand + Part] = row.template load<Part>(at + operand * P::kElements);
            });
          if (whole < operands)
            copies[i][whole] = P::load_part(row.items + at + whole * P::kElements, count - whole * P::kElements);
          tile.factors[i] = reinterpret_cast<const char*>(copies[i]);
        }
        Vector* const to = held + output * vectors;
        const auto add = [&]<int Vectors>() {
          add_tiles<Vectors, P>(
              to, vectors, block == 0, activations, operands * kLanes, factors, tile, ahead_bytes, about);
        };
        if constexpr (kTileVectors > 2) {
          if (widths.largest() == 4) add.template operator()<4>();
          if (widths.largest() == 3) add.template operator()<3>();
        }
        if (widths.largest() == 2) add.template operator()<2>();
        if (widths.largest() == 1) add.template operator()<1>();
      }
    }
    store_panel<P>(held, vectors, places, rows, weight, first, outputs, out, out_stride, about);
  }
}

}  // namespace kiln
