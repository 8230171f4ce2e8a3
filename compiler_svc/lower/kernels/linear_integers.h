// Products of integers: weights of int8 and int4 by activations of 16 bits.
//
// A row of activations becomes integers times a power of two, the largest of which has 15 bits beside its sign. So items of
// quantized activations stay what they are, and so do numbers of bfloat16 down to 1/128 of the largest; others are off by
// half a unit at most, which is 1/32768 of the largest or less. One instruction multiplies two inputs in each lane and adds
// them exactly: twice as many as are floats. Before sums leave 32 bits, and where factors change, they are added to sums of
// floats; where that is depends on the inputs and groups of a weight alone.

#pragma once

#include "linear_rows.h"

namespace kiln {

#if defined(__AVX512F__)

using Integers = __m512i;  // pairs of 16 bits, or sums of 32

inline Integers load(const int16_t* from) { return _mm512_loadu_si512(from); }
inline Integers load_part(const int16_t* from, int64_t count) { return _mm512_maskz_loadu_epi16((1u << count) - 1, from); }
inline Integers load_words(const Int8* from) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Integers load_words(const Int8* from, int64_t count) {
  return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((1u << count) - 1, from));
}
template <int Part>  // of 32 items
inline Integers load_words(const Int4* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(bytes));
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  return _mm512_and_si512(_mm512_srlv_epi16(twice, shifts), _mm512_set1_epi16(15));
}
inline Integers add_pairs(Integers sums, Integers a, Integers b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, a, b);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
}
inline Vector to_floats(Integers sums) { return _mm512_cvtepi32_ps(sums); }
inline Integers spread_words(int32_t pair) { return _mm512_set1_epi32(pair); }
inline Integers find_magnitudes(Vector a) { return _mm512_and_si512(_mm512_castps_si512(a), spread_words(0x7fffffff)); }
inline Integers larger(Integers a, Integers b) { return _mm512_max_epi32(a, b); }
// Both vectors' lanes as 16 bits, those beyond the bounds as the bounds.
inline Integers narrow(Vector low, Vector high) {
  const __m256i first = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(low));
  const __m256i second = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(high));
  return _mm512_max_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1), _mm512_set1_epi16(-32767));
}

#else

using Integers = __m256i;

inline Integers load(const int16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Integers load_words(const Int8* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Integers load_words(const Int8* from, int64_t count) {
  Int8 padded[2 * kLanes] = {};
  std::memcpy(padded, from, count);
  return load_words(padded);
}
template <int Part>
inline Integers load_words(const Int4* from) {
  const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return Part > 0 ? _mm256_srli_epi16(pairs, 4) : _mm256_and_si256(pairs, _mm256_set1_epi16(15));
}
inline Integers add_pairs(Integers sums, Integers a, Integers b) {
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
  // The compiler would gather products before it adds them, for which there are too few registers.
  asm volatile("" : "+x"(sums));
  return sums;
}
inline Vector to_floats(Integers sums) { return _mm256_cvtepi32_ps(sums); }
inline Integers spread_words(int32_t pair) { return _mm256_set1_epi32(pair); }
inline Integers find_magnitudes(Vector a) { return _mm256_and_si256(_mm256_castps_si256(a), spread_words(0x7fffffff)); }
inline Integers larger(Integers a, Integers b) { return _mm256_max_epi32(a, b); }
inline Integers narrow(Vector low, Vector high) {
  const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
  return _mm256_max_epi16(_mm256_permute4x64_epi64(mixed, 0xd8), _mm256_set1_epi16(-32767));
}

#endif

// As `Products`, with activations of `Source`, which `quantize_row` makes.
template <class ElementType, class ItemType>
struct IntegerProducts {
  using Element = ElementType;
  using Item = ItemType;
  using Source = int16_t;
  using Operand = Integers;
  using Sum = Integers;
  static constexpr bool kIsInteger = true;
  static constexpr int64_t kElements = 2 * kLanes;
  static constexpr int kRowOutputs = 2;
  static constexpr bool kAreItemsFactors = false;
  static constexpr int64_t kItemsPerByte = std::is_same_v<Item, Int4> ? 2 : 1;
  // Products of two that 32 bits hold: 256 · 2 · 32767 · 128 < 2^31.
  static constexpr int64_t kMostAdditions = 256;
  static Operand load(const int16_t* from) { return kiln::load(from); }
  // Behind a row's integers are zeros.
  static Operand load_part(const int16_t* from, int64_t) { return kiln::load(from); }
  static Operand load(const Int8* from) { return load_words(from); }
  static Operand load_part(const Int8* from, int64_t count) { return load_words(from, count); }
  static Operand load_part(const Int4* from, int64_t) { return load_words<0>(from); }
  static Sum begin(Vector) { return Integers{}; }
  static Sum add_to(Sum sums, Operand a, Operand b) { return add_pairs(sums, a, b); }
  static Vector to_floats(Sum sums) { return kiln::to_floats(sums); }
  static Operand spread(const char* factor) {
    int32_t pair;
    std::memcpy(&pair, factor, sizeof pair);
    return spread_words(pair);
  }
};

// Those by which weights are multiplied.
template <class Element, class Item>
using Served = std::conditional_t<
    std::is_same_v<Item, Int8> || std::is_same_v<Item, Int4>, IntegerProducts<Element, Item>, Products<Element, Item>>;

// What integers of a block's rows are worth: [1 + groups][stride] numbers. The first of a row is the unit of its integers,
// NaN if one of its elements is NaN or infinite. The others are sums of its integers, of each `span` inputs, times `share`.
struct RowNumbers {
  float* numbers;
  int64_t stride, span;
  float share;

  RowNumbers from(int64_t row) const { return {numbers + row, stride, span, share}; }
  template <class P>
  const float* find_totals(int64_t at) const {
    return P::kItemsPerByte > 1 ? numbers + (1 + at / span) * stride : nullptr;
  }
};

// Makes integers of a row, with zeros behind them up to a whole operand, and its column of numbers.
template <class P>
inline void quantize_row(
    const typename P::Element* row, int64_t inputs, int16_t* to, const RowNumbers& about, int64_t column) {
  const auto load_lanes = [&](int64_t at) {
    return at + kLanes <= inputs ? load(row + at) : at < inputs ? load_part(row + at, inputs - at) : zero();
  };
  Integers most{};
  for (int64_t at = 0; at < inputs; at += kLanes) most = larger(most, find_magnitudes(load_lanes(at)));
  int32_t magnitudes[kLanes];
  std::memcpy(magnitudes, &most, sizeof most);
  // As bits: compilers may assume that floats are no NaN. Those are larger than infinity's.
  const int32_t largest = *std::max_element(magnitudes, magnitudes + kLanes);
  constexpr int32_t kInfinity = 0x7f800000, kNaN = 0x7fc00000;
  // Of numbers below 2^-111, units would be denormal: they keep fewer digits.
  const int32_t exponent = std::max(largest >> 23, 15);
  const int32_t unit = largest < kInfinity ? (exponent - 14) << 23 : kNaN, inverse = (268 - exponent) << 23;
  std::memcpy(about.numbers + column, &unit, sizeof unit);
  float factor;
  std::memcpy(&factor, &inverse, sizeof factor);
  const Vector factors = broadcast(factor);
  const Integers ones = spread_words(0x10001);
  float* total = about.numbers + column;
  Integers totals{};
  for (int64_t at = 0; at < inputs; at += P::kElements, to += P::kElements) {
    const Integers words = narrow(multiply(load_lanes(at), factors), multiply(load_lanes(at + kLanes), factors));
    std::memcpy(to, &words, sizeof words);
    if constexpr (P::kItemsPerByte > 1) {
      totals = add_pairs(totals, words, ones);
      if ((at + P::kElements) % about.span == 0) {
        *(total += about.stride) = sum(to_floats(totals)) * about.share;
        totals = Integers{};
      }
    }
  }
}

}  // namespace kiln
