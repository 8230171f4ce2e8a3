// Products of some rows of activations with weights [outputs, inputs], for decoding and short prompts.
//
// Every weight is read from memory once, in the order of its addresses, by which the processor recognizes a stream. With
// one row of activations it fetches ahead by itself. With more, a tile holds several outputs' weights at once and they
// would be several short streams: so tiles ask for weights ahead, in the order of their addresses.
//
// What is read again comes from the caches. Outputs are taken by panels whose weights fit the second-level cache, and
// the next panel's are asked for meanwhile, a few lines at a step of every tile. Within a panel a few rows, of a block of
// inputs, stay in the first-level cache while all the panel's weights pass by them. For that, activations are copied
// first: where a row is a multiple of 4 KiB, as is usual, a tile's rows would lie in the same few sets of the cache.
//
// An output depends on its own row and weights alone: neither on other rows nor on the number of threads. With two rows or
// more it does not depend on their number either: lanes are always added up in the order of the inputs.
//
// Compiled for x86-64-v3 (AVX2 and FMA) or x86-64-v4 (AVX-512), by -march.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <immintrin.h>
#include <omp.h>

namespace kiln {

#if defined(__AVX512F__)

using Vector = __m512;
constexpr int64_t kLanes = 16;
constexpr int kManyOutputs = 4;  // of a tile, when arithmetic counts: 4 × 6 sums, 4 weights and an activation of 32 registers

inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline Vector load(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline float sum(Vector lanes) { return _mm512_reduce_add_ps(lanes); }

// Four sums with fewer instructions, each in the order in which `sum` adds: lanes 8 apart, then 4, 2 and 1.
inline void sum(const Vector (&lanes)[4], float (&sums)[4]) {
  const Vector low = add(_mm512_shuffle_f32x4(lanes[0], lanes[1], 0x44), _mm512_shuffle_f32x4(lanes[0], lanes[1], 0xee));
  const Vector high = add(_mm512_shuffle_f32x4(lanes[2], lanes[3], 0x44), _mm512_shuffle_f32x4(lanes[2], lanes[3], 0xee));
  Vector all = add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  all = add(all, _mm512_permute_ps(all, 0x4e));
  all = add(all, _mm512_permute_ps(all, 0xb1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all)));
}

#else

using Vector = __m256;
constexpr int64_t kLanes = 8;
constexpr int kManyOutputs = 2;  // 2 × 6 sums, 2 weights and an activation of 16 registers

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline Vector load(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline float sum(Vector lanes) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline void sum(const Vector (&lanes)[2], float (&sums)[2]) {
  for (int i = 0; i < 2; i++) sums[i] = sum(lanes[i]);
}

#endif

constexpr int kTileRows = 6;
constexpr int kFewRows = 4;
constexpr int kFewOutputs = 2;              // of a tile of up to kFewRows rows, which waits for memory anyway
constexpr int64_t kBlockInputs = 768;       // at most: with six rows of activations 18 KiB of the first-level cache
constexpr int64_t kPanelBytes = 192 << 10;  // of weights, twice in the second-level cache
constexpr int64_t kPanelTiles = 16;         // at most

// The first `count` elements, and zeros.
template <class Element>
inline Vector load_part(const Element* from, int64_t count) {
  Element padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(Element));
  return load(padded);
}

inline void store(float* to, float value) { *to = value; }
inline void store(uint16_t* to, float value) {  // bfloat16, rounded to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  *to = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// One row and one output. Four sums, so that additions do not wait for each other.
template <class Element>
inline float dot(const Element* activations, const Element* weights, int64_t inputs) {
  constexpr int kSums = 4;
  Vector sums[kSums] = {zero(), zero(), zero(), zero()};
  int64_t at = 0;
  for (; at + kSums * kLanes <= inputs; at += kSums * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums; i++)
      sums[i] = multiply_add(load(activations + at + i * kLanes), load(weights + at + i * kLanes), sums[i]);
  }
  for (; at < inputs; at += kLanes) {
    const int64_t count = std::min(kLanes, inputs - at);
    sums[0] = multiply_add(load_part(activations + at, count), load_part(weights + at, count), sums[0]);
  }
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// A row's inputs as they are added up: in blocks of whole vectors, the last one of which is filled up with zeros.
struct Blocks {
  int64_t inputs;

  int64_t vectors() const { return (inputs + kLanes - 1) / kLanes; }
  int64_t count() const { return (inputs + kBlockInputs - 1) / kBlockInputs; }
  // The first vector of a block.
  int64_t begin(int64_t block) const { return vectors() * block / count(); }
};

// Rows as they are taken together: in as few tiles as can be, as even as can be.
struct RowTiles {
  int64_t rows;

  int64_t count() const { return rows <= kFewRows ? 1 : (rows + kTileRows - 1) / kTileRows; }
  // The first row of a tile.
  int64_t begin(int64_t tile) const { return rows * tile / count(); }
};

// Copies a tile of activations [rows, inputs] as vectors [block][row][vector of the block].
template <class Element>
inline void pack(const Element* activations, int64_t rows, int64_t inputs, Vector* packed) {
  const Blocks blocks{inputs};
  for (int64_t block = 0; block < blocks.count(); block++)
    for (int64_t row = 0; row < rows; row++)
      for (int64_t vector = blocks.begin(block); vector < blocks.begin(block + 1); vector++) {
        const int64_t at = vector * kLanes;
        const Element* from = activations + row * inputs + at;
        *packed++ = at + kLanes <= inputs ? load(from) : load_part(from, inputs - at);
      }
}

// Adds the products of one block of `Rows` packed rows and of `Outputs` rows of weights to sums. At each of its `vectors`
// steps it asks memory for `Asked` vectors of weights from `next` on.
template <int Rows, int Outputs, int Asked, class Element>
inline void add_products(
    Vector (&sums)[Rows][Outputs], const Vector* activations, int64_t vectors, const Element* weights, int64_t inputs,
    int64_t count, const char* next) {
  const int64_t whole = count / kLanes;
  for (int64_t vector = 0; vector < whole; vector++) {
#pragma GCC unroll 4
    for (int i = 0; i < Asked; i++)
      _mm_prefetch(next + (vector * Asked + i) * kLanes * static_cast<int64_t>(sizeof(Element)), _MM_HINT_T1);
    Vector held[Outputs];
#pragma GCC unroll 4
    for (int output = 0; output < Outputs; output++) held[output] = load(weights + output * inputs + vector * kLanes);
#pragma GCC unroll 6
    for (int row = 0; row < Rows; row++) {
      const Vector activation = activations[row * vectors + vector];
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; output++)
        sums[row][output] = multiply_add(activation, held[output], sums[row][output]);
    }
  }
  if (whole < vectors) {
#pragma GCC unroll 4
    for (int output = 0; output < Outputs; output++) {
      const Vector held = load_part(weights + output * inputs + whole * kLanes, count - whole * kLanes);
#pragma GCC unroll 6
      for (int row = 0; row < Rows; row++)
        sums[row][output] = multiply_add(activations[row * vectors + whole], held, sums[row][output]);
    }
  }
}

template <class Element>
inline void store_sums(Element* to, const Vector (&lanes)[1]) {
  store(to, sum(lanes[0]));
}
template <int Outputs, class Element>
inline void store_sums(Element* to, const Vector (&lanes)[Outputs]) {
  if constexpr (Outputs == kManyOutputs) {
    float sums[Outputs];
    sum(lanes, sums);
    for (int output = 0; output < Outputs; output++) store(to + output, sums[output]);
  } else {
    for (int output = 0; output < Outputs; output++) store(to + output, sum(lanes[output]));
  }
}

// A tile of rows by a panel of `tiles` times `Outputs` outputs, asking for weights from `next` on, but not beyond `end`.
template <int Rows, int Outputs, int Asked, class Element>
inline void multiply_panel(
    int64_t rows, const Vector* packed, const Element* weights, int64_t tiles, int64_t inputs, Element* out,
    int64_t out_stride, const char* next, const char* end) {
  if constexpr (Rows > 2) {  // the number of rows is known only now
    if (rows < Rows)
      return multiply_panel<Rows - 1, Outputs, Asked>(rows, packed, weights, tiles, inputs, out, out_stride, next, end);
  }
  const Blocks blocks{inputs};
  const int64_t last = blocks.count() - 1;
  Vector held[kPanelTiles][Rows][Outputs];  // sums over the blocks before
  for (int64_t block = 0; block <= last; block++) {
    const int64_t begin = blocks.begin(block), vectors = blocks.begin(block + 1) - begin;
    const int64_t count = std::min(vectors * kLanes, inputs - begin * kLanes);
    for (int64_t tile = 0; tile < tiles; tile++) {
      Vector sums[Rows][Outputs];
#pragma GCC unroll 6
      for (int row = 0; row < Rows; row++)
#pragma GCC unroll 4
        for (int output = 0; output < Outputs; output++) sums[row][output] = block == 0 ? zero() : held[tile][row][output];
      const Element* at = weights + tile * Outputs * inputs + begin * kLanes;
      if (Asked > 0 && next < end)
        add_products<Rows, Outputs, Asked>(sums, packed + Rows * begin, vectors, at, inputs, count, next);
      else
        add_products<Rows, Outputs, 0>(sums, packed + Rows * begin, vectors, at, inputs, count, next);
      next += count * Asked * sizeof(Element);
      if (block == last) {
#pragma GCC unroll 6
        for (int row = 0; row < Rows; row++) store_sums(out + row * out_stride + tile * Outputs, sums[row]);
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
    int64_t rows, const Vector* packed, const Element* weights, int64_t inputs, int64_t first, int64_t end, Element* out,
    int64_t out_stride) {
  const RowTiles row_tiles{rows};
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
            row_tiles.begin(row_tile + 1) - row, packed + row * Blocks{inputs}.vectors(), panel, tiles, inputs,
            out + row * out_stride + first, out_stride, next + row_tile * tiles * tile_bytes * Asked / Outputs,
            next + tiles * tile_bytes);
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
    int64_t rows, const Element* activations, const Vector* packed, const Element* weights, int64_t inputs, int64_t first,
    int64_t end, Element* out, int64_t out_stride) {
  if (rows == 1) {
    for (; first < end; first++) store(out + first, dot(activations, weights + first * inputs, inputs));
  } else if (rows <= kFewRows) {
    first = multiply_outputs<kFewRows, kFewOutputs>(rows, packed, weights, inputs, first, end, out, out_stride);
    multiply_outputs<kFewRows, 1>(rows, packed, weights, inputs, first, end, out, out_stride);
  } else {
    first = multiply_outputs<kTileRows, kManyOutputs>(rows, packed, weights, inputs, first, end, out, out_stride);
    multiply_outputs<kTileRows, 1>(rows, packed, weights, inputs, first, end, out, out_stride);
  }
}

// activations [rows, inputs] by weights [outputs[i], inputs] into the columns of out [rows, sum of outputs], side by side.
// Each thread takes one range of outputs, which may reach over several weights.
template <class Element>
void multiply(
    void* out, const void* activations, const void* const* weights, const int64_t* outputs, int64_t count, int64_t rows,
    int64_t inputs) {
  const Element* from = static_cast<const Element*>(activations);
  const int64_t vectors = Blocks{inputs}.vectors();
  const RowTiles row_tiles{rows};
  Vector* const packed = rows == 1 ? nullptr : new Vector[rows * vectors];
  int64_t out_stride = 0;
  for (int64_t i = 0; i < count; i++) out_stride += outputs[i];
#pragma omp parallel num_threads(omp_get_max_threads())
  {
    if (packed != nullptr) {
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < row_tiles.count(); tile++) {
        const int64_t row = row_tiles.begin(tile);
        pack(from + row * inputs, row_tiles.begin(tile + 1) - row, inputs, packed + row * vectors);
      }
    }
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    // In whole tiles, unless a weight ends within one.
    const int64_t tiles = (out_stride + kManyOutputs - 1) / kManyOutputs;
    const int64_t first = tiles * thread / threads * kManyOutputs;
    const int64_t end = std::min(tiles * (thread + 1) / threads * kManyOutputs, out_stride);
    for (int64_t i = 0, column = 0; i < count; column += outputs[i++]) {
      const int64_t begin = std::max<int64_t>(first - column, 0), stop = std::min(end - column, outputs[i]);
      if (begin < stop)
        multiply_share(
            rows, from, packed, static_cast<const Element*>(weights[i]), inputs, begin, stop,
            static_cast<Element*>(out) + column, out_stride);
    }
  }
  delete[] packed;
}

}  // namespace kiln
