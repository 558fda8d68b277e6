// The best of a row of logits, by their bits: what a greedy token is.
#include "common.h"

namespace {

constexpr int64_t LANES = 32;

// Numbers of the same order as the bfloat16 values: those below zero count downwards, and the
// two zeros are one.
inline __m512i order_of(__m512i bits) {
  const __m512i down = _mm512_and_si512(_mm512_srai_epi16(bits, 15), _mm512_set1_epi16(0x7fff));
  const __m512i order = _mm512_xor_si512(bits, down);
  const __mmask32 zero = _mm512_cmpeq_epi16_mask(order, _mm512_set1_epi16(-1));
  return _mm512_mask_mov_epi16(order, zero, _mm512_setzero_si512());
}

inline __m512i orders(const bf16* x, int64_t left, __mmask32* there) {
  *there = left >= LANES ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
  return order_of(_mm512_maskz_loadu_epi16(*there, x));
}

int16_t extreme(__m512i found, bool largest) {
  alignas(64) int16_t lanes[LANES];
  _mm512_store_si512(lanes, found);
  return largest ? *std::max_element(lanes, lanes + LANES) : *std::min_element(lanes, lanes + LANES);
}

int64_t best_of(const bf16* x, int64_t n) {
  constexpr int16_t INFINITE = 0x7f80;  // of positive numbers; NaNs lie beyond, on both sides
  __m512i most = _mm512_set1_epi16(INT16_MIN), least = _mm512_set1_epi16(INT16_MAX);
  __mmask32 there;
  for (int64_t i = 0; i < n; i += LANES) {
    const __m512i order = orders(x + i, n - i, &there);
    most = _mm512_mask_max_epi16(most, there, most, order);
    least = _mm512_mask_min_epi16(least, there, least, order);
  }
  const int16_t best = extreme(most, true), worst = extreme(least, false);
  if (best >= INFINITE || best <= ~INFINITE || worst < ~INFINITE) return -1;
  for (int64_t i = 0; i < n; i += LANES) {
    const __m512i order = orders(x + i, n - i, &there);
    const __mmask32 found = _mm512_mask_cmpeq_epi16_mask(there, order, _mm512_set1_epi16(best));
    if (found) return i + __builtin_ctz(found);
  }
  return -1;
}

}  // namespace

extern "C" {

// best[i]: the first of the largest numbers of row i of x [rows][n]; -1 where the largest is not
// finite, or one of them is no number.
void epd_best(const bf16* x, int64_t rows, int64_t n, int64_t* best) {
  for (int64_t i = 0; i < rows; ++i) best[i] = best_of(x + i * n, n);
}
}
