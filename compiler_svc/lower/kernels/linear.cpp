// Products of rows of activations with weights [outputs, inputs]. Here: up to 127 rows; of more, see linear_many.h.
// In bfloat16, where the processor has tiles, see linear_tiles.h for any number of rows.
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

// One row and some outputs.
template <int Outputs, class Element>
inline void multiply_row(const Element* activations, const Element* weights, int64_t inputs, Element* out) {
  using P = Products<Element>;
  constexpr int64_t kBytes = P::kElements * sizeof(Element);
  const char* next = reinterpret_cast<const char*>(weights) + kAheadBytes<Outputs>;
  Vector sums[Outputs];
#pragma GCC unroll 2
  for (int output = 0; output < Outputs; output++) sums[output] = zero();
  int64_t at = 0;
#pragma GCC unroll 4
  for (; at + P::kElements <= inputs; at += P::kElements) {
    const Operand<Element> activation = P::load(activations + at);
    if constexpr (kAheadBytes<Outputs> > 0) _mm_prefetch(next, _MM_HINT_T1);
    next += Outputs * kBytes;
#pragma GCC unroll 2
    for (int output = 0; output < Outputs; output++)
      sums[output] = P::add_to(sums[output], activation, P::load(weights + output * inputs + at));
  }
  if (at < inputs) {
    const Operand<Element> activation = P::load_part(activations + at, inputs - at);
#pragma GCC unroll 2
    for (int output = 0; output < Outputs; output++)
      sums[output] = P::add_to(sums[output], activation, P::load_part(weights + output * inputs + at, inputs - at));
  }
  store_sums(out, sums);
}

inline Parts divide_rows(int64_t rows) { return {rows, rows <= kFewRows ? kFewRows : kTileRows}; }

// Copies a tile of activations as operands [block][row][operand of the block].
template <class Element>
inline void pack(const Element* activations, const int32_t* places, int64_t rows, int64_t inputs, Operand<Element>* packed) {
  using P = Products<Element>;
  const Parts blocks = divide_inputs<Element>(inputs);
  for (int64_t block = 0; block < blocks.count(); block++)
    for (int64_t row = 0; row < rows; row++)
      for (int64_t operand = blocks.begin(block); operand < blocks.begin(block + 1); operand++) {
        const int64_t at = operand * P::kElements;
        const Element* from = activations + places[row] * inputs + at;
        *packed++ = at + P::kElements <= inputs ? P::load(from) : P::load_part(from, inputs - at);
      }
}

// Adds the products of one block of `Rows` packed rows and of `Outputs` rows of weights to sums. At each of its `operands`
// steps it asks memory for `Asked` operands of weights from `next` on.
template <int Rows, int Outputs, int Asked, class Element>
inline void add_products(
    Vector (&sums)[Rows][Outputs], const Operand<Element>* activations, int64_t operands, const Element* weights,
    int64_t inputs, int64_t count, const char* next) {
  using P = Products<Element>;
  constexpr int64_t kAskedBytes = P::kElements * sizeof(Element);
  const int64_t whole = count / P::kElements;
  for (int64_t step = 0; step < whole; step++) {
#pragma GCC unroll 4
    for (int i = 0; i < Asked; i++) _mm_prefetch(next + (step * Asked + i) * kAskedBytes, _MM_HINT_T1);
    Operand<Element> held[Outputs];
#pragma GCC unroll 4
    for (int output = 0; output < Outputs; output++) held[output] = P::load(weights + output * inputs + step * P::kElements);
#pragma GCC unroll 6
    for (int row = 0; row < Rows; row++) {
      const Operand<Element> activation = activations[row * operands + step];
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; output++)
        sums[row][output] = P::add_to(sums[row][output], activation, held[output]);
    }
  }
  if (whole < operands) {
#pragma GCC unroll 4
    for (int output = 0; output < Outputs; output++) {
      const int64_t at = whole * P::kElements;
      const Operand<Element> held = P::load_part(weights + output * inputs + at, count - at);
#pragma GCC unroll 6
      for (int row = 0; row < Rows; row++)
        sums[row][output] = P::add_to(sums[row][output], activations[row * operands + whole], held);
    }
  }
}

// A tile of rows by a panel of `tiles` times `Outputs` outputs, asking for weights from `next` on, but not beyond `end`.
template <int Rows, int Outputs, int Asked, class Element>
inline void multiply_panel(
    const int32_t* places, int64_t rows, const Operand<Element>* packed, const Element* weights, int64_t tiles,
    int64_t inputs, Element* out, int64_t out_stride, const char* next, const char* end) {
  if constexpr (Rows > 2) {  // the number of rows is known only now
    if (rows < Rows)
      return multiply_panel<Rows - 1, Outputs, Asked>(
          places, rows, packed, weights, tiles, inputs, out, out_stride, next, end);
  }
  const Parts blocks = divide_inputs<Element>(inputs);
  const int64_t last = blocks.count() - 1;
  Vector held[kPanelTiles][Rows][Outputs];  // sums over the blocks before
  for (int64_t block = 0; block <= last; block++) {
    const int64_t begin = blocks.begin(block), operands = blocks.size(block);
    const int64_t first = begin * Products<Element>::kElements;
    const int64_t count = std::min(operands * Products<Element>::kElements, inputs - first);
    for (int64_t tile = 0; tile < tiles; tile++) {
      Vector sums[Rows][Outputs];
#pragma GCC unroll 6
      for (int row = 0; row < Rows; row++)
#pragma GCC unroll 4
        for (int output = 0; output < Outputs; output++) sums[row][output] = block == 0 ? zero() : held[tile][row][output];
      const Element* at = weights + tile * Outputs * inputs + first;
      if (Asked > 0 && next < end)
        add_products<Rows, Outputs, Asked>(sums, packed + Rows * begin, operands, at, inputs, count, next);
      else
        add_products<Rows, Outputs, 0>(sums, packed + Rows * begin, operands, at, inputs, count, next);
      next += count * Asked * sizeof(Element);
      if (block == last) {
#pragma GCC unroll 6
        for (int row = 0; row < Rows; row++) store_sums(out + places[row] * out_stride + tile * Outputs, sums[row]);
      } else {
#pragma GCC unroll 6
        for (int row = 0; row < Rows; row++)
#pragma GCC unroll 4
          for (int output = 0; output < Outputs; output++) held[tile][row][output] = sums[row][output];
      }
    }
  }
}

// All rows by outputs [first, end) of one weight, `Outputs` at a time. Returns the first output that is left over.
template <int MaxRows, int Outputs, class Element>
inline int64_t multiply_outputs(
    const int32_t* places, int64_t rows, const Operand<Element>* packed, const Element* weights, int64_t inputs,
    int64_t first, int64_t end, Element* out, int64_t out_stride) {
  const Parts row_tiles = divide_rows(rows);
  const int64_t tile_bytes = Outputs * inputs * sizeof(Element);
  const int64_t most = std::clamp<int64_t>(kPanelBytes / tile_bytes, 1, kPanelTiles);
  while (first + Outputs <= end) {
    const int64_t tiles = std::min(most, (end - first) / Outputs);
    const Element* panel = weights + first * inputs;
    const char* next = reinterpret_cast<const char*>(panel) + tiles * tile_bytes;
    for (int64_t row_tile = 0; row_tile < row_tiles.count(); row_tile++) {
      const int64_t row = row_tiles.begin(row_tile);
      // The next panel is asked for by as many row tiles as it takes with so many lines at a step.
      const auto multiply = [&]<int Asked>() {
        multiply_panel<MaxRows, Outputs, Asked>(
            places + row, row_tiles.size(row_tile), packed + row * count_operands<Element>(inputs), panel, tiles, inputs,
            out + first, out_stride, next + row_tile * tiles * tile_bytes * Asked / Outputs, next + tiles * tile_bytes);
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

template <class Element>
inline void multiply_share(
    const int32_t* places, int64_t rows, const Element* activations, const Operand<Element>* packed, const Element* weights,
    int64_t inputs, int64_t first, int64_t end, Element* out, int64_t out_stride) {
  if (rows == 1) {
    const Element* row = activations + places[0] * inputs;
    Element* to = out + places[0] * out_stride;
    constexpr int kOutputs = Products<Element>::kRowOutputs;
    for (; first + kOutputs <= end; first += kOutputs)
      multiply_row<kOutputs>(row, weights + first * inputs, inputs, to + first);
    for (; first < end; first++) multiply_row<1>(row, weights + first * inputs, inputs, to + first);
  } else if (rows <= kFewRows) {
    first = multiply_outputs<kFewRows, kFewOutputs>(places, rows, packed, weights, inputs, first, end, out, out_stride);
    multiply_outputs<kFewRows, 1>(places, rows, packed, weights, inputs, first, end, out, out_stride);
  } else {
    first = multiply_outputs<kTileRows, kManyOutputs>(places, rows, packed, weights, inputs, first, end, out, out_stride);
    multiply_outputs<kTileRows, 1>(places, rows, packed, weights, inputs, first, end, out, out_stride);
  }
}

// The live rows of activations [rows, inputs] by weights [outputs[i], inputs] into the columns of out [rows, sum of
// outputs], side by side. Each thread takes one range of outputs, which may reach over several weights.
template <class Element>
void multiply(
    void* out, const void* activations, const void* const* weights, const int64_t* outputs, int64_t count, int64_t rows,
    int64_t inputs, const int32_t* live = nullptr, int64_t groups = 1) {
  const std::vector<int32_t> places = list_live(rows, live, groups);
  if (places.empty()) return;
  const Element* from = static_cast<const Element*>(activations);
  const int64_t num_live = static_cast<int64_t>(places.size()), operands = count_operands<Element>(inputs);
  const bool are_many = num_live > kMostRowsOfFew;
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Element, BFloat16>)
    if (may_use_tiles())
      return multiply_by_tiles(static_cast<BFloat16*>(out), from, weights, outputs, count, places, inputs);
#endif
  // Blocks of many rows consist of whole vectors.
  const int64_t unit = are_many ? kLanes : 1;
  const Parts row_blocks{(num_live + unit - 1) / unit, kBlockRows / unit};
  // While some threads still multiply a block, others copy the next one.
  const int64_t buffer_size = row_blocks.largest() * unit * operands, num_buffers = row_blocks.count() > 1 ? 2 : 1;
  Operand<Element>* const buffers = num_live == 1 ? nullptr : new Operand<Element>[num_buffers * buffer_size];
  Vector* const held = are_many ? new Vector[kHeldVectors * omp_get_max_threads()] : nullptr;
  int64_t out_stride = 0;
  for (int64_t i = 0; i < count; i++) out_stride += outputs[i];
#pragma omp parallel num_threads(omp_get_max_threads())
  {
    const int64_t thread = omp_get_thread_num();
    const auto [first, end] = Share::of(out_stride, are_many ? kManyTile : kManyOutputs, thread, omp_get_num_threads());
    for (int64_t block = 0; block < row_blocks.count(); block++) {
      const int64_t block_begin = row_blocks.begin(block) * unit;
      const int32_t* block_places = places.data() + block_begin;
      const int64_t block_rows = std::min(row_blocks.size(block) * unit, num_live - block_begin);
      Operand<Element>* packed = buffers + block % num_buffers * buffer_size;
      if (are_many) {
        const int64_t vectors = count_vectors(block_rows);
#pragma omp for schedule(static)
        for (int64_t vector = 0; vector < vectors; vector++) {
          const int64_t row = vector * kLanes;
          pack_vector(
              from, block_places + row, std::min(kLanes, block_rows - row), inputs, vector, vectors, packed);
        }
      } else if (buffers != nullptr) {
        const Parts row_tiles = divide_rows(block_rows);
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < row_tiles.count(); tile++) {
          const int64_t row = row_tiles.begin(tile);
          pack(from, block_places + row, row_tiles.size(tile), inputs, packed + row * operands);
        }
      }
      for (int64_t i = 0, column = 0; i < count; column += outputs[i++]) {
        const int64_t begin = std::max<int64_t>(first - column, 0), stop = std::min(end - column, outputs[i]);
        if (begin >= stop) continue;
        const Element* const weight = static_cast<const Element*>(weights[i]);
        Element* const to = static_cast<Element*>(out) + column;
        if (are_many)
          multiply_many(
              block_places, block_rows, packed, weight, inputs, begin, stop, to, out_stride, held + kHeldVectors * thread);
        else
          multiply_share(block_places, block_rows, from, packed, weight, inputs, begin, stop, to, out_stride);
      }
    }
  }
  delete[] buffers;
  delete[] held;
}

}  // namespace kiln
