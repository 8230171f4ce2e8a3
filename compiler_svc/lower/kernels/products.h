// Vectors of the instruction sets in targets/cpu.py, by -march: how kernels load, multiply and add up rows, and store results.

#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace kiln {

#if defined(__AVX512F__)

using Vector = __m512;
constexpr int64_t kLanes = 16;

inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline Vector widen(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline float sum(Vector lanes) { return _mm512_reduce_add_ps(lanes); }

// Four sums with fewer instructions, each in the order in which `sum` adds: lanes 8 apart, then 4, 2 and 1.
inline __m128 sum(const Vector (&lanes)[4]) {
  const Vector low = add(_mm512_shuffle_f32x4(lanes[0], lanes[1], 0x44), _mm512_shuffle_f32x4(lanes[0], lanes[1], 0xee));
  const Vector high = add(_mm512_shuffle_f32x4(lanes[2], lanes[3], 0x44), _mm512_shuffle_f32x4(lanes[2], lanes[3], 0xee));
  Vector all = add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  all = add(all, _mm512_permute_ps(all, 0x4e));
  all = add(all, _mm512_permute_ps(all, 0xb1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all));
}

#else

using Vector = __m256;
constexpr int64_t kLanes = 8;

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline Vector widen(const uint16_t* from) {
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

// What one instruction multiplies: some elements of a row, each with the same one of another row.
template <class Element>
struct Products;

template <>
struct Products<float> {
  using Operand = Vector;
  static constexpr int64_t kElements = kLanes;
  static Operand load(const float* from) { return kiln::load(from); }
  static Vector add_to(Vector sums, Operand a, Operand b) { return multiply_add(a, b, sums); }
};

template <>
struct Products<uint16_t> {  // bfloat16
#if defined(__AVX512BF16__)
  using Operand = __m512i;
  static constexpr int64_t kElements = 2 * kLanes;
  static Operand load(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static Vector add_to(Vector sums, Operand a, Operand b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }
#else
  using Operand = Vector;
  static constexpr int64_t kElements = kLanes;
  static Operand load(const uint16_t* from) { return widen(from); }
  static Vector add_to(Vector sums, Operand a, Operand b) { return multiply_add(a, b, sums); }
#endif
};

template <class Element>
using Operand = typename Products<Element>::Operand;

// The first `count` elements, and zeros.
template <class Element>
inline Operand<Element> load_part(const Element* from, int64_t count) {
  Element padded[Products<Element>::kElements] = {};
  std::memcpy(padded, from, count * sizeof(Element));
  return Products<Element>::load(padded);
}

// bfloat16 of four numbers, rounded to nearest, ties to even.
inline __m128i narrow(__m128 values) {
  const __m128i bits = _mm_castps_si128(values);
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i rounded = _mm_srli_epi32(_mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff))), 16);
  const __m128i is_nan = _mm_castps_si128(_mm_cmpunord_ps(values, values));
  const __m128i narrowed = _mm_blendv_epi8(rounded, _mm_set1_epi32(0x7fc0), is_nan);
  return _mm_packus_epi32(narrowed, narrowed);
}

inline void store(float* to, float value) { *to = value; }
inline void store(uint16_t* to, float value) { *to = _mm_cvtsi128_si32(narrow(_mm_set_ss(value))); }
#if defined(__AVX512F__)
inline void store(float* to, __m128 values) { _mm_storeu_ps(to, values); }
inline void store(uint16_t* to, __m128 values) { _mm_storel_epi64(reinterpret_cast<__m128i*>(to), narrow(values)); }
#endif

}  // namespace kiln
