// Products of rows of activations in bfloat16 with weights [outputs, inputs], by the processor's tiles (AMX).
//
// A tile holds 16 lines of 64 bytes. One instruction multiplies 16 outputs' weights of 32 inputs with 16 rows' activations,
// and adds to 16 x 16 sums of float32. Two tiles of weights meet two of activations, so that each is loaded for two
// products. With few rows most of a tile is zeros, which costs nothing: reading weights from memory takes longer.
//
// Activations are copied once for each call, as tiles want them: pairs of inputs in lines, with 16 rows beside each other.
// Weights are loaded from where they lie, and copied only where tiles would reach over the end of a row or of the outputs.
// Quantized ones are copied always: items of a byte are whole in bfloat16, and scales multiply the sums.
// Those of the next outputs are asked for meanwhile, in the order of their addresses, by which the processor recognizes a
// stream. A block's activations stay in the second-level cache.
//
// An output adds its products in one order. It depends on its own row and weights alone: not on other rows, their number
// or the number of threads.

#pragma once

#include "linear_rows.h"

#if defined(__AMX_BF16__)

#include <sys/syscall.h>
#include <unistd.h>

namespace kiln {

// 32 elements: a line of a tile.
struct alignas(64) Line {
  uint16_t elements[32];
};

constexpr int64_t kLineElements = 32, kTileLines = 16;
constexpr int64_t kStepOutputs = 2 * kTileLines, kStepRows = 2 * kTileLines;
constexpr int64_t kStepLines = 2 * kTileLines;  // of weights, and as many of activations, for 32 inputs
constexpr int64_t kBlockLines = 12288;          // of activations in the second-level cache: 768 KiB
constexpr int64_t kLeastBlockRows = 128, kMostBlockRows = 512;
constexpr int64_t kGroupOutputs = 384;  // whose sums are kept, if there are several blocks of inputs

// Asks the kernel, once, to let this process use tiles. It may refuse: an old one does, or one whose signal stacks are too
// small for a tile's contents. Threads that run already may use them, too.
inline bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
}

// The compiler does not know what memory instructions of tiles read: what is written there has to be written before.
inline void finish_writes(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// Makes all eight tiles 16 lines of 64 bytes, for this thread, as long as it lives.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    finish_writes(&configuration);
    _tile_loadconfig(&configuration);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

inline __m512i load_line(const BFloat16* from, int64_t count) {
  return count >= kLineElements ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}
// Of a row's weights from `at` on; quantized ones without `kUnit` and the scales of outputs.
template <class P>
inline __m512i load_line(const WeightRow<P>& row, int64_t at, int64_t count) {
  if constexpr (std::is_same_v<typename P::Item, BFloat16>) {
    return load_line(row.items + at, count);
  } else {
    Vector halves[2] = {zero(), zero()};
    if constexpr (kWeightParts<P> > 1)
      for_parts<P>([&]<int Part>() { halves[Part] = row.template load<Part>(at); });
    else
      for (int half = 0; half < 2; half++, at += kLanes, count -= kLanes)
        if (count > 0) halves[half] = count >= kLanes ? row.load(at) : P::load_part(row.items + at, count);
    return (__m512i)_mm512_cvtne2ps_pbh(halves[1], halves[0]);
  }
}

// Copies up to 16 rows as [step][2 tiles of rows][16 pairs of inputs][16 rows], of which it writes one tile of rows. What has
// no row or input is zeros.
inline void pack_tiles(const BFloat16* activations, const int32_t* places, int64_t rows, int64_t inputs, Line* packed) {
  for (int64_t at = 0; at < inputs; at += kLineElements, packed += kStepLines) {
    Vector square[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; i++)
      square[i] = i < rows ? (Vector)load_line(activations + places[i] * inputs + at, inputs - at) : zero();
    transpose(square);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; i++) store(reinterpret_cast<float*>(packed + i), square[i]);
  }
}

// Copies weights of up to 32 outputs from `first` on, of `steps` times 32 inputs from `at` on, as [step][32 outputs].
template <class P>
inline void copy_weights(
    const Weight<P>& weight, int64_t first, int64_t outputs, int64_t at, int64_t steps, Line* copy) {
  for (int64_t output = 0; output < kStepOutputs; output++) {
    const WeightRow<P> row = weight.row(first + std::min(output, outputs - 1));
    for (int64_t step = 0; step < steps; step++) {
      const int64_t from = at + step * kLineElements;
      _mm512_store_si512(copy + step * kStepLines + output, load_line(row, from, weight.inputs - from));
    }
  }
}

// Asks memory for lines that are needed soon: `rows` parts of rows, `row_bytes` each, one every `stride` bytes.
class Ahead {
 public:
  Ahead(const void* from, int64_t rows, int64_t row_bytes, int64_t stride)
      : at_(static_cast<const char*>(from)), row_end_(at_ + row_bytes), rows_(rows), row_bytes_(row_bytes), stride_(stride) {
    if (row_bytes == stride) row_end_ = at_ + rows * row_bytes, rows_ = std::min<int64_t>(rows, 1);
  }
  void ask(int64_t lines) {
    for (; lines > 0 && rows_ > 0; lines--, at_ += sizeof(Line)) {
      _mm_prefetch(at_, _MM_HINT_T1);
      if (at_ + sizeof(Line) < row_end_) continue;
      at_ = row_end_ - row_bytes_ + stride_ - sizeof(Line), row_end_ += stride_, rows_--;
    }
  }

 private:
  const char *at_, *row_end_;
  int64_t rows_, row_bytes_, stride_;
};

// Where tiles of weights lie: one behind the other if they were copied, else in their rows.
struct WeightTiles {
  const char* first;
  int64_t line_stride, tile_stride, step_stride;  // in bytes
};

// Adds products of 32 outputs and one or two tiles of rows to the sums [tile of rows][32 outputs][16 rows], or begins them.
// At each of its steps it asks memory for some lines of what is needed next.
template <int RowTiles>
inline void add_tiles(
    float* sums, bool begins, const WeightTiles& weights, const Line* activations, int64_t steps, Ahead& ahead,
    int64_t lines) {
  constexpr int64_t kTile = kTileLines * kLanes;
  if (begins) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, sizeof(Line));
    _tile_loadd(1, sums + kTile, sizeof(Line));
    if constexpr (RowTiles > 1) {
      _tile_loadd(2, sums + 2 * kTile, sizeof(Line));
      _tile_loadd(3, sums + 3 * kTile, sizeof(Line));
    }
  }
  const char* weight = weights.first;
  for (int64_t step = 0; step < steps; step++, weight += weights.step_stride, activations += kStepLines) {
    ahead.ask(lines);
    _tile_loadd(4, weight, weights.line_stride);
    _tile_loadd(6, activations, sizeof(Line));
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, weight + weights.tile_stride, weights.line_stride);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (RowTiles > 1) {
      _tile_loadd(7, activations + kTileLines, sizeof(Line));
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, sizeof(Line));
  _tile_stored(1, sums + kTile, sizeof(Line));
  if constexpr (RowTiles > 1) {
    _tile_stored(2, sums + 2 * kTile, sizeof(Line));
    _tile_stored(3, sums + 3 * kTile, sizeof(Line));
  }
}

// Writes the sums [32 outputs][16 rows], of which the first is a weight's output `first`, as rows.
template <class P>
inline void store_tiles(
    const float* sums, const int32_t* places, int64_t rows, const Weight<P>& weight, int64_t first, int64_t outputs,
    BFloat16* out, int64_t out_stride) {
  // Of the elements of one output, then of the next one, one each in turn.
  const __m512i in_turn = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t i = 0; i < rows; i++) _mm_prefetch(out + places[i] * out_stride + kStepOutputs, _MM_HINT_T0);
  const auto load_output = [&](int64_t output) {
    return weight.finish(load(sums + output * kLanes), first + std::min(output, outputs - 1));
  };
  Vector square[kLanes];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; i++) {
    const __m512bh pair = _mm512_cvtne2ps_pbh(load_output(2 * i + 1), load_output(2 * i));
    square[i] = (Vector)_mm512_permutexvar_epi16(in_turn, (__m512i)pair);
  }
  transpose(square);
  const __mmask32 part = outputs >= kStepOutputs ? ~0u : (1u << outputs) - 1;
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; i++)
    if (i < rows) _mm512_mask_storeu_epi16(out + places[i] * out_stride, part, (__m512i)square[i]);
}

// How a call is divided.
struct TileParts {
  int64_t steps;  // of all inputs
  Parts rows;     // in pairs of tiles
  Parts inputs;   // in steps
  int64_t group;  // outputs whose sums are kept while blocks of inputs take turns

  static TileParts of(int64_t rows, int64_t inputs) {
    const int64_t steps = (inputs + kLineElements - 1) / kLineElements;
    const int64_t most_rows = std::clamp(kBlockLines / steps, kLeastBlockRows, kMostBlockRows);
    const Parts pairs{(rows + kStepRows - 1) / kStepRows, most_rows / kStepRows};
    const Parts blocks{steps, kBlockLines / (pairs.largest() * kStepLines)};
    return {steps, pairs, blocks, blocks.count() > 1 ? kGroupOutputs : kStepOutputs};
  }
  int64_t activation_lines() const { return rows.largest() * steps * kStepLines; }
  int64_t weight_lines() const { return inputs.largest() * kStepLines; }
  int64_t sum_lines() const { return rows.largest() * kStepRows * group / kLanes; }
};

// A block of packed rows by outputs [first, end) of one weight. `copy` and `sums` are the thread's own.
template <class P>
inline void multiply_tiles(
    const TileParts& parts, const int32_t* places, int64_t rows, const Line* packed, const Weight<P>& weight,
    int64_t inputs, int64_t first, int64_t end, BFloat16* out, int64_t out_stride, Line* copy, float* sums) {
  const int64_t pairs = (rows + kStepRows - 1) / kStepRows, last = parts.inputs.count() - 1;
  const int64_t row_bytes = count_bytes<P>(inputs);
  const int64_t asked = (kStepOutputs + pairs - 1) / pairs;
  for (; first < end; first += parts.group) {
    const int64_t outputs = std::min(parts.group, end - first);
    for (int64_t block = 0; block <= last; block++) {
      const int64_t begin = parts.inputs.begin(block), steps = parts.inputs.size(block), at = begin * kLineElements;
      for (int64_t output = 0; output < outputs; output += kStepOutputs) {
        const int64_t part = std::min(kStepOutputs, outputs - output);
        const char* const from = weight.memory(first + output) + count_bytes<P>(at);
        WeightTiles tiles{from, row_bytes, kTileLines * row_bytes, sizeof(Line)};
        if (Weight<P>::kIsScaled || part < kStepOutputs || inputs % kLineElements != 0) {
          copy_weights(weight, first + output, part, at, steps, copy);
          finish_writes(copy);
          tiles = {reinterpret_cast<const char*>(copy), sizeof(Line), kTileLines * sizeof(Line), kStepLines * sizeof(Line)};
        }
        const int64_t left = std::clamp<int64_t>(end - first - output - kStepOutputs, 0, kStepOutputs);
        Ahead ahead(from + kStepOutputs * row_bytes, left, count_bytes<P>(steps * kLineElements), row_bytes);
        float* held = sums + output * pairs * kStepRows;
        for (int64_t row = 0; row < rows; row += kStepRows, held += kStepRows * kStepOutputs) {
          const Line* const activations = packed + (row / kStepRows * parts.steps + begin) * kStepLines;
          if (rows - row > kTileLines)
            add_tiles<2>(held, block == 0, tiles, activations, steps, ahead, asked);
          else
            add_tiles<1>(held, block == 0, tiles, activations, steps, ahead, asked);
          if (block < last) continue;
          for (int64_t tile = row; tile < std::min(row + kStepRows, rows); tile += kTileLines)
            store_tiles(
                held + (tile - row) * kStepOutputs, places + tile, std::min(kTileLines, rows - tile), weight,
                first + output, part, out + first + output, out_stride);
        }
      }
    }
  }
}

// As `multiply` in linear.cpp, of the rows at `places`.
template <class P>
inline void multiply_by_tiles(
    BFloat16* out, const BFloat16* activations, const std::vector<Weight<P>>& weights, const int64_t* outputs,
    const std::vector<int32_t>& places, int64_t inputs) {
  const int64_t num_live = static_cast<int64_t>(places.size()), threads = omp_get_max_threads();
  const TileParts parts = TileParts::of(num_live, inputs);
  // One tile of rows is copied by each thread, which is faster than to wait for another. Of more rows, while some threads
  // still multiply a block, others copy the next one.
  const bool is_one_tile = num_live <= kTileLines;
  const int64_t num_buffers = is_one_tile ? threads : std::min<int64_t>(parts.rows.count(), 2);
  const int64_t own_lines = parts.weight_lines() + parts.sum_lines();
  Line* const buffers = new Line[num_buffers * parts.activation_lines()];
  Line* const memory = new Line[threads * own_lines];
  int64_t out_stride = 0;
  for (size_t i = 0; i < weights.size(); i++) out_stride += outputs[i];
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num();
    const auto [first, end] = Share::of(out_stride, kStepOutputs, thread, omp_get_num_threads());
    const Tiles tiles;
    Line* const copy = memory + thread * own_lines;
    float* const sums = reinterpret_cast<float*>(copy + parts.weight_lines());
    for (int64_t block = 0; block < parts.rows.count(); block++) {
      const int64_t block_begin = parts.rows.begin(block) * kStepRows;
      const int32_t* const block_places = places.data() + block_begin;
      const int64_t block_rows = std::min(parts.rows.size(block) * kStepRows, num_live - block_begin);
      Line* const packed = buffers + (is_one_tile ? thread : block % num_buffers) * parts.activation_lines();
      const auto pack = [&](int64_t row) {
        pack_tiles(
            activations, block_places + row, std::min(kTileLines, block_rows - row), inputs,
            packed + row / kStepRows * parts.steps * kStepLines + row % kStepRows);
      };
      if (is_one_tile) {
        pack(0);
        finish_writes(packed);
      } else {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < block_rows; row += kTileLines) pack(row);
      }
      int64_t column = 0;
      for (size_t i = 0; i < weights.size(); column += outputs[i++]) {
        const int64_t begin = std::max<int64_t>(first - column, 0), stop = std::min(end - column, outputs[i]);
        if (begin >= stop) continue;
        multiply_tiles(
            parts, block_places, block_rows, packed, weights[i], inputs, begin, stop, out + column, out_stride, copy,
            sums);
      }
    }
  }
  delete[] buffers;
  delete[] memory;
}

}  // namespace kiln

#endif
