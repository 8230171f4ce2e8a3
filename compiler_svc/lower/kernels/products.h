// Sums of products of rows: what one instruction multiplies, how lanes are added up, and how results are stored.

#pragma once

#include "vectors.h"

namespace kiln {

// What one instruction multiplies: some elements of a row, each with the same one of another row.
template <class Element>
struct Products {
  using Operand = Vector;
  static constexpr int64_t kElements = kLanes;
  // Of one row at once. An output's additions wait for each other: with 16 bytes of weights each, longer than for memory.
  static constexpr int kRowOutputs = kLanes * sizeof(Element) < 32 ? 2 : 1;
  static Operand load(const Element* from) { return kiln::load(from); }
  static Operand load_part(const Element* from, int64_t count) { return kiln::load_part(from, count); }
  static Vector add_to(Vector sums, Operand a, Operand b) { return multiply_add(a, b, sums); }
  // The same four bytes for each lane: what one lane multiplies.
  static Operand spread(const char* factor) {
    float value;
    std::memcpy(&value, factor, sizeof value);
    return broadcast(value);
  }
};

#if defined(KILN_HAS_PAIRS)

template <>
struct Products<BFloat16> {
  using Operand = __m512i;
  static constexpr int64_t kElements = 2 * kLanes;
  static constexpr int kRowOutputs = 1;
  static Operand load(const BFloat16* from) { return _mm512_loadu_si512(from); }
  static Operand load_part(const BFloat16* from, int64_t count) {
    return _mm512_maskz_loadu_epi16((1u << count) - 1, from);
  }
  static Vector add_to(Vector sums, Operand a, Operand b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }
  static Operand spread(const char* factor) {
    int32_t pair;
    std::memcpy(&pair, factor, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
};

#endif

template <class Element>
using Operand = typename Products<Element>::Operand;

template <int Count, class Element>
inline void store_sums(Element* to, const Vector (&lanes)[Count]) {
  for (int i = 0; i < Count; i++) store_one(to + i, sum(lanes[i]));
}

#if defined(__AVX512F__)

inline void store(float* to, __m128 values) { _mm_storeu_ps(to, values); }
inline void store(BFloat16* to, __m128 values) {  // as `store_one`
  const __m128i bits = _mm_castps_si128(values);
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i rounded = _mm_srli_epi32(_mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff))), 16);
  const __m128i is_nan = _mm_castps_si128(_mm_cmpunord_ps(values, values));
  const __m128i narrowed = _mm_blendv_epi8(rounded, _mm_set1_epi32(0x7fc0), is_nan);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(narrowed, narrowed));
}
inline void store(BFloat16* to, Vector values) {  // as `store_one`
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i narrowed = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(narrowed));
}

// Four sums with fewer instructions, each in the order in which `sum` adds: lanes 8 apart, then 4, 2 and 1.
template <class Element>
inline void store_sums(Element* to, const Vector (&lanes)[4]) {
  const Vector low = add(_mm512_shuffle_f32x4(lanes[0], lanes[1], 0x44), _mm512_shuffle_f32x4(lanes[0], lanes[1], 0xee));
  const Vector high = add(_mm512_shuffle_f32x4(lanes[2], lanes[3], 0x44), _mm512_shuffle_f32x4(lanes[2], lanes[3], 0xee));
  Vector all = add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  all = add(all, _mm512_permute_ps(all, 0x4e));
  all = add(all, _mm512_permute_ps(all, 0xb1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  store(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all)));
}

#else

inline void store(BFloat16* to, Vector values) {  // as `store_one`
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i narrowed = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  const __m128i low = _mm256_castsi256_si128(narrowed), high = _mm256_extracti128_si256(narrowed, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
}

#endif

}  // namespace kiln
