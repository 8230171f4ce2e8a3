// Vectors of floats for kernels: 8 lanes with x86-64-v3 (AVX2 and FMA), 16 with x86-64-v4 (AVX-512).
//
// Elements of memory are float, BFloat16 or Float16, items of quantized weights Int8, Float8E4M3, Float8E5M2 or pairs of
// Int4; all arithmetic is in float.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

// Whether to multiply pairs of bfloat16. Processors with tiles (AMX), which are Intel's, multiply floats twice as fast.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define KILN_HAS_PAIRS
#endif

namespace kiln {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Int8 {
  int8_t bits;
};
struct Float8E4M3 {  // without infinities
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};
struct Int4 {  // two items: of 32 neighbours in 16 bytes, the low bits have the first 16
  uint8_t bits;
};

// What is loaded of an item, times this, is its value: a Float8E4M3 has the bits of a Float16 whose exponents are 8 less.
template <class Item>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<Float8E4M3> = 256.0f;

#if defined(__AVX512F__)
using Vector = __m512;
constexpr int kColumns = 4;  // vectors of a tile of 6 rows: 6 × 4 sums, 4 operands and one factor of 32 registers
#else
using Vector = __m256;
constexpr int kColumns = 2;  // 6 × 2 sums, 2 operands and one factor of 16 registers
#endif

constexpr int64_t kLanes = sizeof(Vector) / sizeof(float);

inline Vector add(Vector a, Vector b) { return a + b; }
inline Vector subtract(Vector a, Vector b) { return a - b; }
inline Vector multiply(Vector a, Vector b) { return a * b; }
inline Vector divide(Vector a, Vector b) { return a / b; }

#if defined(__AVX512F__)

inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector broadcast(float value) { return _mm512_set1_ps(value); }
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vector lanes) { _mm512_storeu_ps(to, lanes); }
inline Vector widen(__m256i halves, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Vector widen(__m256i halves, Float16) { return _mm512_cvtph_ps(halves); }
inline Vector widen(__m128i bytes, Int8) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
template <int Shift = 0>  // to the items of the high bits
inline Vector widen(__m128i bytes, Int4) {
  const __m512i pairs = _mm512_cvtepu8_epi32(bytes);
  return _mm512_cvtepi32_ps(Shift > 0 ? _mm512_srli_epi32(pairs, Shift) : _mm512_and_si512(pairs, _mm512_set1_epi32(15)));
}
inline Vector widen(__m128i bytes, Float8E4M3) {
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}
inline Vector widen(__m128i bytes, Float8E5M2) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
}
template <class Element>
inline Vector load(const Element* from) {
  if constexpr (sizeof(Element) == 1)
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), Element{});
  else
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), Element{});
}
inline Vector load_part(const float* from, int64_t count) { return _mm512_maskz_loadu_ps((1u << count) - 1, from); }
template <class Element>
inline Vector load_part(const Element* from, int64_t count) {
  if constexpr (sizeof(Element) == 1)
    return widen(_mm_maskz_loadu_epi8((1u << count) - 1, from), Element{});
  else
    return widen(_mm256_maskz_loadu_epi16((1u << count) - 1, from), Element{});
}
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector subtract_product(Vector c, Vector a, Vector b) { return _mm512_fnmadd_ps(a, b, c); }
inline Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }  // b where one of them is NaN
inline Vector minimum(Vector a, Vector b) { return _mm512_min_ps(a, b); }  // as well
inline bool any_above(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
// What is above the next whole number below: 0 for infinities.
inline Vector find_rest(Vector a) { return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// Times 2 to the power of the next whole number below.
inline Vector times_power_of_two(Vector a, Vector power) { return _mm512_scalef_ps(a, power); }
inline float sum(Vector lanes) { return _mm512_reduce_add_ps(lanes); }
inline float maximum(Vector lanes) { return _mm512_reduce_max_ps(lanes); }
// The lanes first, first + 1, …
inline Vector count_from(float first) {
  return add(broadcast(first), _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
// Lanes [begin, end) of `lanes`, and `other` elsewhere.
inline Vector keep(Vector lanes, int64_t begin, int64_t end, Vector other) {
  begin = std::clamp<int64_t>(begin, 0, kLanes), end = std::clamp<int64_t>(end, 0, kLanes);
  return _mm512_mask_mov_ps(other, ((1u << end) - 1) & ~((1u << begin) - 1), lanes);
}

// Exchanges rows and columns.
inline void transpose(Vector (&rows)[kLanes]) {
  Vector pairs[kLanes], fours[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  const auto unpack_low = [](Vector a, Vector b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto unpack_high = [](Vector a, Vector b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  // fours[4 g + c]: of four rows from 4 g on, the columns c, 4 + c, 8 + c and 12 + c.
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    fours[4 * i] = unpack_low(pairs[4 * i], pairs[4 * i + 2]);
    fours[4 * i + 1] = unpack_high(pairs[4 * i], pairs[4 * i + 2]);
    fours[4 * i + 2] = unpack_low(pairs[4 * i + 1], pairs[4 * i + 3]);
    fours[4 * i + 3] = unpack_high(pairs[4 * i + 1], pairs[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Vector low_even = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0x88);
    const Vector low_odd = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0xdd);
    const Vector high_even = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0x88);
    const Vector high_odd = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0xdd);
    rows[i] = _mm512_shuffle_f32x4(low_even, high_even, 0x88);
    rows[8 + i] = _mm512_shuffle_f32x4(low_even, high_even, 0xdd);
    rows[4 + i] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
    rows[12 + i] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
  }
}

// The sum of each vector's lanes, in one vector. Every sum adds in the same order: lanes 8 apart, then 4, 2 and 1.
inline Vector sum_each(const Vector (&lanes)[kLanes]) {
  Vector quarters[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Vector &a = lanes[i], &b = lanes[4 + i], &c = lanes[8 + i], &d = lanes[12 + i];
    const Vector low = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const Vector high = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    quarters[i] = add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }
  const auto halve = [](Vector a, Vector b) { return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
  const Vector first = halve(quarters[0], quarters[1]), second = halve(quarters[2], quarters[3]);
  return add(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
}

#else

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector broadcast(float value) { return _mm256_set1_ps(value); }
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vector lanes) { _mm256_storeu_ps(to, lanes); }
inline Vector widen(__m128i halves, BFloat16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vector widen(__m128i halves, Float16) { return _mm256_cvtph_ps(halves); }
inline Vector widen(__m128i bytes, Int8) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
template <int Shift = 0>
inline Vector widen(__m128i bytes, Int4) {
  const __m256i pairs = _mm256_cvtepu8_epi32(bytes);
  return _mm256_cvtepi32_ps(Shift > 0 ? _mm256_srli_epi32(pairs, Shift) : _mm256_and_si256(pairs, _mm256_set1_epi32(15)));
}
inline Vector widen(__m128i bytes, Float8E4M3) {
  const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  return _mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
}
inline Vector widen(__m128i bytes, Float8E5M2) { return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8)); }
template <class Element>
inline Vector load(const Element* from) {
  if constexpr (sizeof(Element) == 1)
    return widen(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), Element{});
  else
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), Element{});
}
template <class Element>
inline Vector load_part(const Element* from, int64_t count) {
  Element padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(Element));
  return load(padded);
}
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector subtract_product(Vector c, Vector a, Vector b) { return _mm256_fnmadd_ps(a, b, c); }
inline Vector maximum(Vector a, Vector b) { return _mm256_max_ps(a, b); }  // b where one of them is NaN
inline Vector minimum(Vector a, Vector b) { return _mm256_min_ps(a, b); }
inline bool any_above(Vector a, Vector b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
inline Vector find_rest(Vector a) {
  const Vector is_finite = _mm256_cmp_ps(a, broadcast(-1e30f), _CMP_NLT_UQ);
  return _mm256_and_ps(is_finite, subtract(a, _mm256_floor_ps(a)));
}
// Below 2^-126, which floats hold with fewer digits, 0.
inline Vector times_power_of_two(Vector a, Vector power) {
  const Vector whole = _mm256_floor_ps(power), is_held = _mm256_cmp_ps(whole, broadcast(-126.0f), _CMP_NLT_UQ);
  const __m256i exponents = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_and_ps(is_held, multiply(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23))));
}
inline float sum(Vector lanes) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline float maximum(Vector lanes) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline Vector count_from(float first) {
  return add(broadcast(first), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vector keep(Vector lanes, int64_t begin, int64_t end, Vector other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const auto below = [&](int64_t bound) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(std::clamp<int64_t>(bound, 0, kLanes))), lane);
  };
  return _mm256_blendv_ps(other, lanes, _mm256_castsi256_ps(_mm256_andnot_si256(below(begin), below(end))));
}

inline void transpose(Vector (&rows)[kLanes]) {
  Vector pairs[kLanes], fours[kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    fours[4 * i] = _mm256_shuffle_ps(pairs[4 * i], pairs[4 * i + 2], 0x44);
    fours[4 * i + 1] = _mm256_shuffle_ps(pairs[4 * i], pairs[4 * i + 2], 0xee);
    fours[4 * i + 2] = _mm256_shuffle_ps(pairs[4 * i + 1], pairs[4 * i + 3], 0x44);
    fours[4 * i + 3] = _mm256_shuffle_ps(pairs[4 * i + 1], pairs[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
  }
}

inline Vector sum_each(const Vector (&lanes)[kLanes]) {
  const auto four = [&](int first) {
    return _mm256_hadd_ps(
        _mm256_hadd_ps(lanes[first], lanes[first + 1]), _mm256_hadd_ps(lanes[first + 2], lanes[first + 3]));
  };
  const Vector low = four(0), high = four(4);
  return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

#endif

// 2 to the power of numbers up to 127, with a relative error of 1.7e-7; 0 for minus infinity; NaN stays NaN. Between 0 and
// 1 the polynomial is off by at most 8.3e-8 of the result, the least that is possible with six terms and 1 at 0.
inline Vector exp2(Vector x) {
  const Vector rest = find_rest(x);
  Vector power = broadcast(1.86713e-3f);
  for (const float coefficient : {9.01703e-3f, 5.579991e-2f, 2.4016445e-1f, 6.9315131e-1f, 1.0f})
    power = multiply_add(power, rest, broadcast(coefficient));
  return times_power_of_two(power, x);
}

inline void store_one(float* to, float value) { *to = value; }
inline void store_one(BFloat16* to, float value) {  // rounded to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void store_one(Float16* to, float value) { to->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline void store_one(Int8* to, float value) {  // as well
  to->bits = static_cast<int8_t>(_mm_cvtss_si32(_mm_set_ss(std::clamp(value, -128.0f, 127.0f))));
}
// As well; magnitudes above 240, the largest of Neuron's, become 240. All on bits: compilers may assume that floats are
// no NaN.
inline void store_one(Float8E4M3* to, float value) {
  constexpr uint32_t kInfinity = 0x7f800000, kMost = 0x43700000, kLeastNormal = 0x3c800000;  // the last 2^-6
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 24 & 0x80;
  uint32_t magnitude = std::min(bits & 0x7fffffff, kInfinity + 1);
  if (magnitude > kInfinity) {
    magnitude = 0x7f;
  } else if (magnitude >= kLeastNormal) {
    magnitude = std::min(magnitude, kMost);
    magnitude = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  } else {  // multiples of 2^-9, which are the last digits of numbers from 2^14 on
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += 16384.0f;
    std::memcpy(&magnitude, &shifted, sizeof magnitude);
    magnitude &= 0xf;
  }
  to->bits = static_cast<uint8_t>(sign | magnitude);
}

// Copies elements, of another type if need be.
template <class To, class From>
inline void convert(To* to, const From* from, int64_t count) {
  float lanes[kLanes];
  for (int64_t at = 0; at < count; at += kLanes) {
    const int64_t part = std::min(kLanes, count - at);
    store(lanes, part == kLanes ? load(from + at) : load_part(from + at, part));
    for (int64_t i = 0; i < part; i++) store_one(to + at + i, lanes[i]);
  }
}
template <class Element>
inline void convert(Element* to, const Element* from, int64_t count) {
  std::memcpy(to, from, count * sizeof(Element));
}

// Copies elements past the caches if they are whole lines: nobody waits until memory has read what they overwrite. Other
// threads see them after `_mm_sfence` and a barrier.
template <class Element>
inline void stream(Element* to, const Element* from, int64_t count) {
  constexpr int64_t kLine = 64;
  const int64_t bytes = count * static_cast<int64_t>(sizeof(Element));
  if (bytes % kLine != 0 || reinterpret_cast<uintptr_t>(to) % kLine != 0) return convert(to, from, count);
  char* const out = reinterpret_cast<char*>(to);
  const char* const in = reinterpret_cast<const char*>(from);
  for (int64_t at = 0; at < bytes; at += 32)
    _mm256_stream_si256(
        reinterpret_cast<__m256i*>(out + at), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at)));
}

}  // namespace kiln
