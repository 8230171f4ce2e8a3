// Products of a few rows with tiles of columns, whose sums stay in registers.
//
// A Number is what one lane multiplies at once: a float, or, where the processor has products of bfloat16, a pair of them,
// whose two products are added to one sum of float32.

#pragma once

#include "vectors.h"

namespace kiln {

constexpr int kQueryRows = 6;  // rows that meet kColumns vectors at once

// Two neighbours.
struct Pair {
  BFloat16 first, second;
};

template <class Number>
struct Numbers {
  using Lanes = Vector;
  static constexpr int64_t kElements = 1;  // of a number
  static Lanes load_lanes(const float* from) { return load(from); }
  static Lanes fill(const float* from) { return broadcast(*from); }
  static Vector add_to(Vector sums, Lanes a, Lanes b) { return multiply_add(a, b, sums); }
};

#if defined(KILN_HAS_PAIRS)

constexpr bool kHasPairs = true;

template <>
struct Numbers<Pair> {
  using Lanes = __m512i;
  static constexpr int64_t kElements = 2;
  static Lanes load_lanes(const Pair* from) { return _mm512_loadu_si512(from); }
  static Lanes fill(const Pair* from) {
    int32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm512_set1_epi32(bits);
  }
  static Vector add_to(Vector sums, Lanes a, Lanes b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }
};

#else

constexpr bool kHasPairs = false;

#endif

// sums[row][column] += sum over i of left[row][i] * right[i][column], for kQueryRows rows and `Columns` vectors.
template <class Number, int Columns>
inline void add_products(
    Vector (&sums)[kQueryRows][Columns], const Number* left, int64_t left_stride, const Number* right,
    int64_t right_stride, int64_t depth) {
  using N = Numbers<Number>;
  for (int64_t i = 0; i < depth; i++) {
    typename N::Lanes held[Columns];
#pragma GCC unroll 4
    for (int column = 0; column < Columns; column++)
      held[column] = N::load_lanes(right + i * right_stride + column * kLanes);
#pragma GCC unroll 6
    for (int row = 0; row < kQueryRows; row++) {
      const typename N::Lanes factor = N::fill(left + row * left_stride + i);
#pragma GCC unroll 4
      for (int column = 0; column < Columns; column++)
        sums[row][column] = N::add_to(sums[row][column], factor, held[column]);
    }
  }
}

// out[row][column] = (factors ? factors[row] * out[row][column] : 0) + those products.
template <class Number, int Columns>
inline void multiply_block(
    const Number* left, int64_t left_stride, const Number* right, int64_t right_stride, int64_t depth,
    const float* factors, float* out, int64_t out_stride) {
  Vector sums[kQueryRows][Columns];
#pragma GCC unroll 6
  for (int row = 0; row < kQueryRows; row++)
#pragma GCC unroll 4
    for (int column = 0; column < Columns; column++)
      sums[row][column] = factors == nullptr
                              ? zero()
                              : multiply(broadcast(factors[row]), load(out + row * out_stride + column * kLanes));
  add_products<Number, Columns>(sums, left, left_stride, right, right_stride, depth);
#pragma GCC unroll 6
  for (int row = 0; row < kQueryRows; row++)
#pragma GCC unroll 4
    for (int column = 0; column < Columns; column++)
      store(out + row * out_stride + column * kLanes, sums[row][column]);
}

// `multiply_block` for `vectors` vectors of columns.
template <class Number, int Columns = kColumns>
[[gnu::noinline]] void multiply_blocks(
    const Number* left, int64_t left_stride, const Number* right, int64_t right_stride, int64_t depth,
    const float* factors, float* out, int64_t out_stride, int64_t vectors) {
  for (; vectors >= Columns; vectors -= Columns, right += Columns * kLanes, out += Columns * kLanes)
    multiply_block<Number, Columns>(left, left_stride, right, right_stride, depth, factors, out, out_stride);
  if constexpr (Columns > 1)
    multiply_blocks<Number, Columns - 1>(
        left, left_stride, right, right_stride, depth, factors, out, out_stride, vectors);
}

}  // namespace kiln
