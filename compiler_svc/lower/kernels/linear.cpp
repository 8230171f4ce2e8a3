// Products of rows of activations with weights [outputs, inputs]. Here: up to 127 rows; of more, see linear_many.h.
// In bfloat16, where the processor has tiles, see linear_tiles.h for any number of rows; of quantized weights, for many.
// Weights of int8 and int4 are multiplied as integers, see linear_integers.h; those of float8 become floats in registers.
//
// With few rows, reading weights takes the time, and every weight is read from memory once, in the order of its addresses,
// by which the processor recognizes a stream. With one row there is one stream, and what lies a page ahead is asked for,
// because the processor's own prefetching ends with a page. With more rows, a tile holds several outputs' weights at once
// and they would be several short streams: so tiles ask for weights ahead, in the order of their addresses.
//
// What is read again comes from the caches. Rows are taken by blocks whose activations fit the second-level cache beside
// two panels of weights. Outputs are taken by panels, and the next panel is asked for meanwhile, a few lines at a step of
// every tile. Within a panel a few rows, of a block of inputs, stay in the first-level cache while all the panel's weights
// pass by them. For that, activations are copied first: where a row is a multiple of 4 KiB, as is usual, a tile's rows
// would lie in the same few sets of the cache.
//
// An output depends on its own row and weights alone: not on other rows, their number or the number of threads. The
// products of each lane are added up in the order of the inputs, then the lanes in one fixed order.
//
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <immintrin.h>
#include <omp.h>

#include "linear_many.h"
#include "linear_tiles.h"

namespace kiln {

// A tile's sums, weights and an activation fill the registers: 6 × 4 + 4 + 1 of 32, or 6 × 2 + 2 + 1 of 16.
constexpr int kTileRows = 6;
constexpr int kManyOutputs = kColumns;
constexpr int kFewRows = 4;
constexpr int kFewOutputs = 2;              // of a tile of up to kFewRows rows, which waits for memory anyway
constexpr int64_t kPanelBytes = 192 << 10;  // of weights, twice in the second-level cache
constexpr int64_t kPanelTiles = 16;         // at most
// Between the weights that one row is multiplied with and those that are asked for meanwhile; 0 asks for none. With one
// stream of weights, AVX2 loses a fourth by it, where pages are large, and AVX-512 gains a fifth, where they are small.
template <int Outputs>
constexpr int64_t kAheadBytes = Outputs > 1 ? 16 << 10 : kLanes == 16 ? 4 << 10 : 0;

// One row, which is copied only if it becomes integers, and some outputs.
template <int Outputs, class P>
inline void multiply_row(
    const typename P::Source* activations, const Weight<P>& weight, int64_t first, int64_t inputs,
    typename P::Element* out, const RowNumbers& about) {
  using Operand = typename P::Operand;
  constexpr int64_t kBytes = count_bytes<P>(kWeightParts<P> * P::kElements);
  const char* next = weight.memory(first) + kAheadBytes<Outputs>;
  WeightRow<P> weights[Outputs];
  for (int output = 0; output < Outputs; output++) weights[output] = weight.row(first + output);
  Vector sums[Outputs];
#pragma GCC unroll 4
  for (int output = 0; output < Outputs; output++) sums[output] = zero();
  constexpr int64_t kStep = kWeightParts<P> * P::kElements;
  for_spans<P>(inputs, weight.span, [&](int64_t begin, int64_t end) {
    typename P::Sum added[Outputs];
#pragma GCC unroll 4
    for (int output = 0; output < Outputs; output++) added[output] = P::begin(sums[output]);
    int64_t at = begin;
#pragma GCC unroll 4
    for (; at + kStep <= end; at += kStep) {
      if constexpr (kAheadBytes<Outputs> > 0) _mm_prefetch(next, _MM_HINT_T1);
      next += Outputs * kBytes;
      for_parts<P>([&]<int Part>() {
        const Operand activation = P::load(activations + at + Part * P::kElements);
#pragma GCC unroll 4
        for (int output = 0; output < Outputs; output++)
          added[output] = P::add_to(added[output], activation, weights[output].template load<Part>(at));
      });
    }
    if (kWeightParts<P> == 1 && at < end) {
      const Operand activation = P::load_part(activations + at, end - at);
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; output++)
        added[output] = P::add_to(added[output], activation, P::load_part(weights[output].items + at, end - at));
    }
    const float* const all_totals = about.find_totals<P>(begin);
    const auto totals = [&] { return broadcast(*all_totals); };
#pragma GCC unroll 4
    for (int output = 0; output < Outputs; output++)
      sums[output] = weights[output].close(sums[output], added[output], begin, totals);
  });
  const auto units = [&] { return broadcast(*about.numbers); };
#pragma GCC unroll 4
  for (int output = 0; output < Outputs; output++) sums[output] = weight.finish(sums[output], first + output, units);
  store_sums(out + first, sums);
}

inline Parts divide_rows(int64_t rows) { return {rows, rows <= kFewRows ? kFewRows : kTileRows}; }

// Copies a tile of activations as operands [block][row][operand of the block].
template <class P>
inline void pack(
    const typename P::Source* const* sources, int64_t rows, int64_t inputs, typename P::Operand* packed) {
  const Parts blocks = divide_inputs<P>(inputs);
  for (int64_t block = 0; block < blocks.count(); block++)
    for (int64_t row = 0; row < rows; row++)
      for (int64_t operand = blocks.begin(block); operand < blocks.begin(block + 1); operand++) {
        const int64_t at = operand * P::kElements;
        const auto* from = sources[row] + at;
        *packed++ = at + P::kElements <= inputs ? P::load(from) : P::load_part(from, inputs - at);
      }
}

// Adds the products of one block of `Rows` packed rows and of `Outputs` rows of weights, from input `first` on, to sums. At
// each of its `operands` steps it asks memory for `Asked` operands of weights from `next` on. `about` begins with the first
// of these rows.
template <int Rows, int Outputs, int Asked, class P>
inline void add_products(
    Vector (&sums)[Rows][Outputs], const typename P::Operand* activations, int64_t operands,
    const WeightRow<P> (&weights)[Outputs], int64_t first, int64_t count, const char* next, const RowNumbers& about) {
  using Operand = typename P::Operand;
  constexpr int kParts = kWeightParts<P>;
  constexpr int64_t kAskedBytes = count_bytes<P>(kParts * P::kElements);
  const int64_t whole = count / P::kElements, span = weights[0].count_additions(P::kElements);
  int64_t step = 0;
  do {
    const int64_t begin = step, end = begin + std::min(span, whole - begin);
    typename P::Sum added[Rows][Outputs];
#pragma GCC unroll 6
    for (int row = 0; row < Rows; row++)
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; output++) added[row][output] = P::begin(sums[row][output]);
    for (; step < end; step += kParts) {
#pragma GCC unroll 4
      for (int i = 0; i < Asked; i++) _mm_prefetch(next + (step / kParts * Asked + i) * kAskedBytes, _MM_HINT_T1);
      for_parts<P>([&]<int Part>() {
        Operand held[Outputs];
#pragma GCC unroll 4
        for (int output = 0; output < Outputs; output++)
          held[output] = weights[output].template load<Part>(first + step * P::kElements);
#pragma GCC unroll 6
        for (int row = 0; row < Rows; row++) {
          const Operand activation = activations[row * operands + step + Part];
#pragma GCC unroll 4
          for (int output = 0; output < Outputs; output++)
            added[row][output] = P::add_to(added[row][output], activation, held[output]);
        }
      });
    }
    if (kParts == 1 && step == whole && whole < operands) {
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; output++) {
        const int64_t at = whole * P::kElements;
        const Operand held = P::load_part(weights[output].items + first + at, count - at);
#pragma GCC unroll 6
        for (int row = 0; row < Rows; row++)
          added[row][output] = P::add_to(added[row][output], activations[row * operands + whole], held);
      }
    }
    const int64_t at = first + begin * P::kElements;
    const float* const all_totals = about.find_totals<P>(at);
#pragma GCC unroll 6
    for (int row = 0; row < Rows; row++) {
      const auto totals = [&] { return broadcast(all_totals[row]); };
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; output++)
        sums[row][output] = weights[output].close(sums[row][output], added[row][output], at, totals);
    }
  } while (step < whole);
}

// A tile of rows by a panel of `tiles` times `Outputs` outputs from `output` on, asking for weights from `next` on, but not
// beyond `end`.
template <int Rows, int Outputs, int Asked, class P>
inline void multiply_panel(
    const int32_t* places, int64_t rows, const typename P::Operand* packed, const Weight<P>& weight, int64_t output,
    int64_t tiles, int64_t inputs, typename P::Element* out, int64_t out_stride, const char* next, const char* end,
    const RowNumbers& about) {
  if constexpr (Rows > 2) {  // the number of rows is known only now
    if (rows < Rows)
      return multiply_panel<Rows - 1, Outputs, Asked, P>(
          places, rows, packed, weight, output, tiles, inputs, out, out_stride, next, end, about);
  }
  const Parts blocks = divide_inputs<P>(inputs);
  const int64_t last = blocks.count() - 1;
  Vector held[kPanelTiles][Rows][Outputs];  // sums over the blocks before
  for (int64_t block = 0; block <= last; block++) {
    const int64_t begin = blocks.begin(block), operands = blocks.size(block);
    const int64_t first = begin * P::kElements;
    const int64_t count = std::min(operands * P::kElements, inputs - first);
    for (int64_t tile = 0; tile < tiles; tile++) {
      Vector sums[Rows][Outputs];
#pragma GCC unroll 6
      for (int row = 0; row < Rows; row++)
#pragma GCC unroll 4
        for (int i = 0; i < Outputs; i++) sums[row][i] = block == 0 ? zero() : held[tile][row][i];
      const int64_t tile_output = output + tile * Outputs;
      WeightRow<P> weights[Outputs];
      for (int i = 0; i < Outputs; i++) weights[i] = weight.row(tile_output + i);
      if (Asked > 0 && next < end)
        add_products<Rows, Outputs, Asked, P>(sums, packed + Rows * begin, operands, weights, first, count, next, about);
      else
        add_products<Rows, Outputs, 0, P>(sums, packed + Rows * begin, operands, weights, first, count, next, about);
      next += Asked * count_bytes<P>(count);
#pragma GCC unroll 6
      for (int row = 0; row < Rows; row++) {
        const auto units = [&] { return broadcast(about.numbers[row]); };
#pragma GCC unroll 4
        for (int i = 0; i < Outputs; i++)
          if (block < last)
            held[tile][row][i] = sums[row][i];
          else
            sums[row][i] = weight.finish(sums[row][i], tile_output + i, units);
        if (block == last) store_sums(out + places[row] * out_stride + tile_output, sums[row]);
      }
    }
  }
}

// All rows by outputs [first, end) of one weight, `Outputs` at a time. Returns the first output that is left over.
template <int MaxRows, int Outputs, class P>
inline int64_t multiply_outputs(
    const int32_t* places, int64_t rows, const typename P::Operand* packed, const Weight<P>& weight, int64_t inputs,
    int64_t first, int64_t end, typename P::Element* out, int64_t out_stride, const RowNumbers& about) {
  const Parts row_tiles = divide_rows(rows);
  const int64_t tile_bytes = Outputs * count_bytes<P>(inputs);
  const int64_t most = std::clamp<int64_t>(kPanelBytes / tile_bytes, 1, kPanelTiles);
  while (first + Outputs <= end) {
    const int64_t tiles = std::min(most, (end - first) / Outputs);
    const char* next = weight.memory(first) + tiles * tile_bytes;
    for (int64_t row_tile = 0; row_tile < row_tiles.count(); row_tile++) {
      const int64_t row = row_tiles.begin(row_tile);
      // The next panel is asked for by as many row tiles as it takes with so many lines at a step.
      const auto multiply = [&]<int Asked>() {
        multiply_panel<MaxRows, Outputs, Asked, P>(
            places + row, row_tiles.size(row_tile), packed + row * count_operands<P>(inputs), weight, first, tiles, inputs,
            out, out_stride, next + row_tile * tiles * tile_bytes * Asked / Outputs, next + tiles * tile_bytes,
            about.from(row));
      };
      if constexpr (Outputs == 1) {
        multiply.template operator()<0>();
      } else if (MaxRows == kFewRows || row_tiles.count() == 1) {
        multiply.template operator()<Outputs>();
      } else if constexpr (MaxRows > kFewRows) {
        if (row_tiles.count() < Outputs)
          multiply.template operator()<Outputs / 2>();
        else
          multiply.template operator()<1>();
      }
    }
    first += tiles * Outputs;
  }
  return first;
}

template <class P>
inline void multiply_share(
    const int32_t* places, int64_t rows, const typename P::Source* row, const typename P::Operand* packed,
    const Weight<P>& weight, int64_t inputs, int64_t first, int64_t end, typename P::Element* out, int64_t out_stride,
    const RowNumbers& about) {
  if (rows == 1) {
    auto* to = out + places[0] * out_stride;
    constexpr int kOutputs = P::kRowOutputs;
    for (; first + kOutputs <= end; first += kOutputs) multiply_row<kOutputs, P>(row, weight, first, inputs, to, about);
    for (; first < end; first++) multiply_row<1, P>(row, weight, first, inputs, to, about);
  } else if (rows <= kFewRows) {
    first = multiply_outputs<kFewRows, kFewOutputs>(
        places, rows, packed, weight, inputs, first, end, out, out_stride, about);
    multiply_outputs<kFewRows, 1>(places, rows, packed, weight, inputs, first, end, out, out_stride, about);
  } else {
    first = multiply_outputs<kTileRows, kManyOutputs>(
        places, rows, packed, weight, inputs, first, end, out, out_stride, about);
    multiply_outputs<kTileRows, 1>(places, rows, packed, weight, inputs, first, end, out, out_stride, about);
  }
}

// Lists rows as they are multiplied: where they lie, or as integers, which are made here.
template <class P>
inline void list_sources(
    const typename P::Element* activations, const int32_t* places, int64_t rows, int64_t inputs, int16_t* integers,
    const RowNumbers& about, int64_t first, const typename P::Source** sources) {
  const int64_t stride = count_operands<P>(inputs) * P::kElements;
  for (int64_t row = 0; row < rows; row++) {
    const auto* const from = activations + places[row] * inputs;
    if constexpr (P::kIsInteger) {
      quantize_row<P>(from, inputs, integers + row * stride, about, first + row);
      sources[row] = integers + row * stride;
    } else {
      sources[row] = from;
    }
  }
}

// All weights of a call. They share the smallest span, because totals of rows are made for one.
template <class P>
inline std::vector<Weight<P>> list_weights(
    const void* const* weights, const float* const* scales, const int64_t* num_scales, int64_t count, int64_t inputs) {
  std::vector<Weight<P>> all;
  int64_t span = inputs;
  for (int64_t i = 0; i < count; i++) {
    const auto* const items = static_cast<const typename P::Item*>(weights[i]);
    constexpr bool is_scaled = Weight<P>::kIsScaled;
    all.push_back({items, inputs, is_scaled ? scales[i] : nullptr, is_scaled ? num_scales[i] : 0});
    if constexpr (Weight<P>::kIsGrouped) span = std::min(span, all[i].group());
  }
  for (Weight<P>& weight : all) weight.span = span;
  return all;
}

// The live rows of activations [rows, inputs] by weights [outputs[i], inputs] into the columns of out [rows, sum of
// outputs], side by side. Each thread takes one range of outputs, which may reach over several weights.
//
// Of quantized weights `scales` has those of each: `num_scales` for each output, or a single one if it says 0.
template <class Element, class Item = Element>
void multiply(
    void* out, const void* activations, const void* const* weights, const float* const* scales, const int64_t* num_scales,
    const int64_t* outputs, int64_t count, int64_t rows, int64_t inputs, const int32_t* live, int64_t groups) {
  using P = Served<Element, Item>;
  using Operand = typename P::Operand;
  const std::vector<int32_t> places = list_live(rows, live, groups);
  if (places.empty()) return;
  const Element* from = static_cast<const Element*>(activations);
  const int64_t num_live = static_cast<int64_t>(places.size()), operands = count_operands<P>(inputs);
  const bool are_many = num_live > kMostRowsOfFew;
#if defined(__AMX_BF16__)
  // Few rows of quantized weights would wait for the copies that tiles need.
  if constexpr (std::is_same_v<Element, BFloat16>)
    if ((are_many || !Weight<P>::kIsScaled) && may_use_tiles())
      return multiply_by_tiles(
          static_cast<BFloat16*>(out), from,
          list_weights<Products<Element, Item>>(weights, scales, num_scales, count, inputs), outputs, places, inputs);
#endif
  const std::vector<Weight<P>> all = list_weights<P>(weights, scales, num_scales, count, inputs);
  // Blocks of many rows consist of whole vectors.
  const int64_t unit = are_many ? kLanes : 1;
  const Parts row_blocks{(num_live + unit - 1) / unit, kBlockRows / unit};
  // While some threads still multiply a block, others copy the next one.
  const int64_t buffer_size = row_blocks.largest() * unit * operands, num_buffers = row_blocks.count() > 1 ? 2 : 1;
  Operand* const buffers = num_live == 1 ? nullptr : new Operand[num_buffers * buffer_size];
  Vector* const held = are_many ? new Vector[kHeldVectors * omp_get_max_threads()] : nullptr;
  int64_t out_stride = 0;
  for (int64_t i = 0; i < count; i++) out_stride += outputs[i];
  // For each thread the integers of as many rows as it copies at once, and for each block the numbers of its rows.
  const int64_t stride = (row_blocks.largest() * unit + kLanes) / kLanes * kLanes, span = all[0].span;
  const int64_t own_integers = std::max<int64_t>(kLanes, kTileRows) * operands * P::kElements;
  const int64_t num_numbers = P::kIsInteger ? stride * (1 + (Weight<P>::kIsGrouped ? inputs / span : 0)) : 0;
  std::vector<int16_t> integers(P::kIsInteger ? own_integers * (num_live == 1 ? 1 : omp_get_max_threads()) : 0);
  std::vector<float> numbers(num_buffers * num_numbers);
  const typename P::Source* one_row[1] = {};
  if (num_live == 1)
    list_sources<P>(
        from, places.data(), 1, inputs, integers.data(), {numbers.data(), stride, span, 1.0f / kLanes}, 0, one_row);
#pragma omp parallel num_threads(omp_get_max_threads())
  {
    const int64_t thread = omp_get_thread_num();
    const typename P::Source* sources[std::max<int64_t>(kLanes, kTileRows)];
    const auto [first, end] = Share::of(out_stride, are_many ? kManyTile : kManyOutputs, thread, omp_get_num_threads());
    for (int64_t block = 0; block < row_blocks.count(); block++) {
      const int64_t block_begin = row_blocks.begin(block) * unit;
      const int32_t* block_places = places.data() + block_begin;
      const int64_t block_rows = std::min(row_blocks.size(block) * unit, num_live - block_begin);
      Operand* packed = buffers + block % num_buffers * buffer_size;
      // A few rows' lanes are added up: each gets a share of what the whole row adds.
      const RowNumbers about{
          numbers.data() + block % num_buffers * num_numbers, stride, span, are_many ? 1.0f : 1.0f / kLanes};
      int16_t* const own = integers.data() + own_integers * thread;
      if (are_many) {
        const int64_t vectors = count_vectors(block_rows);
#pragma omp for schedule(static)
        for (int64_t vector = 0; vector < vectors; vector++) {
          const int64_t row = vector * kLanes, some = std::min(kLanes, block_rows - row);
          list_sources<P>(from, block_places + row, some, inputs, own, about, row, sources);
          pack_vector<P>(sources, some, inputs, vector, vectors, packed);
        }
      } else if (buffers != nullptr) {
        const Parts row_tiles = divide_rows(block_rows);
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < row_tiles.count(); tile++) {
          const int64_t row = row_tiles.begin(tile);
          list_sources<P>(from, block_places + row, row_tiles.size(tile), inputs, own, about, row, sources);
          pack<P>(sources, row_tiles.size(tile), inputs, packed + row * operands);
        }
      }
      for (int64_t i = 0, column = 0; i < count; column += outputs[i++]) {
        const int64_t begin = std::max<int64_t>(first - column, 0), stop = std::min(end - column, outputs[i]);
        if (begin >= stop) continue;
        const Weight<P>& weight = all[i];
        Element* const to = static_cast<Element*>(out) + column;
        if (are_many)
          multiply_many(
              block_places, block_rows, packed, weight, inputs, begin, stop, to, out_stride,
              held + kHeldVectors * thread, about);
        else
          multiply_share(
              block_places, block_rows, one_row[0], packed, weight, inputs, begin, stop, to, out_stride, about);
      }
    }
  }
  delete[] buffers;
  delete[] held;
}

}  // namespace kiln
