// Sums of products of rows: what one instruction multiplies, how lanes are added up, and how results are stored.

#pragma once

#include <type_traits>
#include <utility>

#include "vectors.h"

namespace kiln {

// Sums of floats go on from one span of inputs to the next.
struct FloatSums {
  using Sum = Vector;
  static constexpr bool kIsInteger = false;
  static Sum begin(Vector sums) { return sums; }
};

// What one instruction multiplies: some elements of a row, each with the same one of another row.
//
// Rows of weights consist of items of another type if they are quantized: their sums are multiplied by scales in the end,
// or each of them by its group's.
template <class ElementType, class ItemType = ElementType>
struct Products : FloatSums {
  using Element = ElementType;  // of activations and results
  using Item = ItemType;        // of weights
  using Source = Element;       // of rows as they are multiplied
  using Operand = Vector;
  static constexpr int64_t kElements = kLanes;
  // Of one row at once. An output's additions wait for each other: with 16 bytes of weights each, or 8, longer than for
  // memory.
  static constexpr int kRowOutputs = std::max<int>(32 / (kLanes * sizeof(Item)), 1);
  // Whether weights are operands as they lie in memory.
  static constexpr bool kAreItemsFactors = sizeof(Item) == sizeof(float);
  static constexpr int64_t kItemsPerByte = std::is_same_v<Item, Int4> ? 2 : 1;
  template <class Type>
  static Operand load(const Type* from) {
    return kiln::load(from);
  }
  template <class Type>
  static Operand load_part(const Type* from, int64_t count) {
    return kiln::load_part(from, count);
  }
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
struct Products<BFloat16, BFloat16> : FloatSums {
  using Element = BFloat16;
  using Item = BFloat16;
  using Source = BFloat16;
  using Operand = __m512i;
  static constexpr int64_t kElements = 2 * kLanes;
  static constexpr int kRowOutputs = 1;
  static constexpr bool kAreItemsFactors = true;
  static constexpr int64_t kItemsPerByte = 1;
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

// Bytes of so many weights.
template <class P>
constexpr int64_t count_bytes(int64_t items) {
  return items * static_cast<int64_t>(sizeof(typename P::Item)) / P::kItemsPerByte;
}

// Operands that are loaded together: as many as 32 grouped weights are. Groups are whole, so that no part is left over.
template <class P>
constexpr int kWeightParts = P::kItemsPerByte > 1 ? 32 / static_cast<int>(P::kElements) : 1;

// Calls `run.operator()<Part>()` for each part.
template <class P, class Run>
inline void for_parts(const Run& run) {
  [&]<int... Parts>(std::integer_sequence<int, Parts...>) {
    (run.template operator()<Parts>(), ...);
  }(std::make_integer_sequence<int, kWeightParts<P>>());
}

// One output's weights.
template <class P>
struct WeightRow {
  const typename P::Item* items;
  const float* scales;  // of grouped ones: of each group a factor, and what to add
  int64_t group_shift;  // a group has 2 to the power of it inputs
  int64_t span;         // inputs whose products of integers are added up before factors multiply them

  // Operand `Part` of kWeightParts from input `at` on.
  template <int Part = 0>
  typename P::Operand load(int64_t at) const {
    if constexpr (P::kItemsPerByte == 1) {
      return P::load(items + at);
    } else if constexpr (P::kIsInteger) {
      return load_words<Part>(items + at / 2);
    } else {
      constexpr int kFirst = Part * kLanes % 16, kShift = Part * kLanes / 16 * 4;
      const auto* const from = reinterpret_cast<const __m128i*>(items + at / 2 + kFirst);
      // Two parts are of the same bytes, which the compiler widens once.
      const __m128i bytes = kLanes == 16 ? _mm_loadu_si128(from) : _mm_loadl_epi64(from);
      const Vector values = widen<kShift>(bytes, typename P::Item{});
      const float* const pair = scales + (at >> group_shift) * 2;
      return multiply_add(values, broadcast(pair[0]), broadcast(pair[1]));
    }
  }

  // How many operands of so many elements each are added up in one sum.
  int64_t count_additions(int64_t elements) const {
    if constexpr (!P::kIsInteger) return INT64_MAX;
    else if constexpr (P::kItemsPerByte == 1) return P::kMostAdditions;
    else return span / elements;
  }

  // Adds the sum of a span that begins with input `at` to the sums before. `totals` are those of the row's integers.
  Vector close(Vector sums, typename P::Sum added, int64_t at, const auto& totals) const {
    if constexpr (!P::kIsInteger) {
      return added;
    } else if constexpr (P::kItemsPerByte == 1) {
      return add(sums, P::to_floats(added));
    } else {
      const float* const pair = scales + (at >> group_shift) * 2;
      return multiply_add(P::to_floats(added), broadcast(pair[0]), multiply_add(totals(), broadcast(pair[1]), sums));
    }
  }
};

// One weight [outputs, inputs].
template <class P>
struct Weight {
  const typename P::Item* items;
  int64_t inputs;
  const float* scales;   // of a quantized one: of each output, or a single one, or of each output's groups
  int64_t scale_stride;  // from one output to the next
  int64_t span = 0;      // as its rows'

  static constexpr bool kIsScaled = !std::is_same_v<typename P::Element, typename P::Item>;
  static constexpr bool kIsGrouped = P::kItemsPerByte > 1;

  WeightRow<P> row(int64_t output) const {
    const typename P::Item* const from = items + output * inputs / P::kItemsPerByte;
    if constexpr (!kIsGrouped) return {from, nullptr, 0, 0};
    return {from, scales + output * scale_stride, __builtin_ctzll(group()), span};
  }
  int64_t group() const { return 2 * inputs / scale_stride; }
  const char* memory(int64_t output) const { return reinterpret_cast<const char*>(row(output).items); }
  // `units` are those of integers.
  Vector finish(Vector sums, int64_t output, const auto& units) const {
    if constexpr (P::kIsInteger) sums = multiply(sums, units());
    if constexpr (kIsScaled && !kIsGrouped)
      sums = multiply(sums, broadcast(kUnit<typename P::Item> * scales[output * scale_stride]));
    return sums;
  }
  Vector finish(Vector sums, int64_t output) const { return finish(sums, output, zero); }
};

template <int Count, class Element>
inline void store_sums(Element* to, const Vector (&lanes)[Count]) {
  for (int i = 0; i < Count; i++) store_one(to + i, sum(lanes[i]));
}

#if defined(__AVX512F__)

inline void store(Float16* to, __m128 values) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(Float16* to, Vector values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
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

inline void store(Float16* to, Vector values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
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
