// Products of a few rows of activations with weights [outputs, inputs], for decoding: bound by how fast weights are read.
//
// Every weight is read from memory once, in the order of its addresses, by which the processor recognizes a stream. With
// one row of activations it fetches ahead by itself. With more, a tile holds several outputs' weights at once and they
// would be several short streams: so a tile asks for the next tile's weights, in the order of their addresses.
//
// An output depends on its own row and weights alone: neither on other rows nor on the number of threads.
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

#endif

constexpr int kTileRows = 6;
constexpr int kFewOutputs = 2;         // of a tile of up to kFewRows rows, which waits for memory anyway
constexpr int64_t kFewRows = 4;
constexpr int64_t kAheadBytes = 16 << 10;  // how far ahead of their use weights are asked for, at least

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

// `Rows` rows of activations by `Outputs` rows of weights; `next` is what to ask memory for meanwhile, or null.
template <int Rows, int Outputs, class Element>
inline void multiply_tile(
    const Element* activations, const Element* weights, int64_t inputs, Element* out, int64_t out_stride, const char* next) {
  Vector sums[Rows][Outputs];
#pragma GCC unroll 6
  for (int row = 0; row < Rows; row++)
#pragma GCC unroll 4
    for (int output = 0; output < Outputs; output++) sums[row][output] = zero();
  const int64_t whole = inputs / kLanes * kLanes;
  for (int64_t at = 0; at < whole; at += kLanes) {
    Vector held[Outputs];
    if (next != nullptr) {
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; output++)
        _mm_prefetch(next + (at * Outputs + output * kLanes) * static_cast<int64_t>(sizeof(Element)), _MM_HINT_T1);
    }
#pragma GCC unroll 4
    for (int output = 0; output < Outputs; output++) held[output] = load(weights + output * inputs + at);
#pragma GCC unroll 6
    for (int row = 0; row < Rows; row++) {
      const Vector activation = load(activations + row * inputs + at);
#pragma GCC unroll 4
      for (int output = 0; output < Outputs; output++)
        sums[row][output] = multiply_add(activation, held[output], sums[row][output]);
    }
  }
  for (int row = 0; row < Rows; row++)
    for (int output = 0; output < Outputs; output++) {
      Vector total = sums[row][output];
      if (whole < inputs)
        total = multiply_add(
            load_part(activations + row * inputs + whole, inputs - whole),
            load_part(weights + output * inputs + whole, inputs - whole), total);
      store(out + row * out_stride + output, sum(total));
    }
}

// The tile for a number of rows known only now.
template <int Rows, int Outputs, class Element>
inline void multiply_rows(
    int64_t rows, const Element* activations, const Element* weights, int64_t inputs, Element* out, int64_t out_stride,
    const char* next) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return multiply_rows<Rows - 1, Outputs>(rows, activations, weights, inputs, out, out_stride, next);
  }
  multiply_tile<Rows, Outputs>(activations, weights, inputs, out, out_stride, next);
}

// All rows by outputs [first, end) of one weight, `Outputs` at a time.
template <int MaxRows, int Outputs, class Element>
inline int64_t multiply_outputs(
    int64_t rows, const Element* activations, const Element* weights, int64_t inputs, int64_t first, int64_t end, Element* out,
    int64_t out_stride) {
  const int64_t tiles = (rows + MaxRows - 1) / MaxRows;
  const int64_t ahead = std::max<int64_t>(kAheadBytes, Outputs * inputs * sizeof(Element));
  for (; first + Outputs <= end; first += Outputs) {
    const Element* block = weights + first * inputs;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = rows * tile / tiles;
      const char* next = tile == 0 ? reinterpret_cast<const char*>(block) + ahead : nullptr;
      multiply_rows<MaxRows, Outputs>(
          rows * (tile + 1) / tiles - row, activations + row * inputs, block, inputs, out + row * out_stride + first,
          out_stride, next);
    }
  }
  return first;
}

template <class Element>
inline void multiply_share(
    int64_t rows, const Element* activations, const Element* weights, int64_t inputs, int64_t first, int64_t end, Element* out,
    int64_t out_stride) {
  if (rows == 1) {
    for (; first < end; first++) store(out + first, dot(activations, weights + first * inputs, inputs));
    return;
  }
  if (rows <= kFewRows)
    first = multiply_outputs<kFewRows, kFewOutputs>(rows, activations, weights, inputs, first, end, out, out_stride);
  else
    first = multiply_outputs<kTileRows, kManyOutputs>(rows, activations, weights, inputs, first, end, out, out_stride);
  multiply_outputs<kTileRows, 1>(rows, activations, weights, inputs, first, end, out, out_stride);
}

// activations [rows, inputs] by weights [outputs[i], inputs] into the columns of out [rows, sum of outputs], side by side.
// Each thread takes one range of outputs, which may reach over several weights.
template <class Element>
void multiply(
    void* out, const void* activations, const void* const* weights, const int64_t* outputs, int64_t count, int64_t rows,
    int64_t inputs) {
  int64_t out_stride = 0;
  for (int64_t i = 0; i < count; i++) out_stride += outputs[i];
#pragma omp parallel num_threads(omp_get_max_threads())
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    // In whole tiles, unless a weight ends within one.
    const int64_t tiles = (out_stride + kManyOutputs - 1) / kManyOutputs;
    const int64_t first = tiles * thread / threads * kManyOutputs;
    const int64_t end = std::min(tiles * (thread + 1) / threads * kManyOutputs, out_stride);
    for (int64_t i = 0, column = 0; i < count; column += outputs[i++]) {
      const int64_t from = std::max<int64_t>(first - column, 0), to = std::min(end - column, outputs[i]);
      if (from < to)
        multiply_share(
            rows, static_cast<const Element*>(activations), static_cast<const Element*>(weights[i]), inputs, from, to,
            static_cast<Element*>(out) + column, out_stride);
    }
  }
}

}  // namespace kiln
