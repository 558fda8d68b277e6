// Elementwise operations on one row of bfloat16, in float, rounded where transformers' own
// layers round: norms, rotary embedding, activations, sums.
#pragma once
#include "common.h"

inline __m512 load(const bf16* p, __mmask16 mask) {
  return widen(_mm256_maskz_loadu_epi16(mask, p));
}
inline void save(bf16* p, __mmask16 mask, __m512 x) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
}
inline __m512 rounded(__m512 x) { return widen((__m256i)_mm512_cvtneps_pbh(x)); }
inline __mmask16 lanes(int64_t left) {
  return left >= 16 ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
}

// Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
inline void norm(const bf16* x, const bf16* weight, float epsilon, int64_t n, bf16* out) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 a = load(x + i, lanes(n - i));
    sum = _mm512_fmadd_ps(a, a, sum);
  }
  const float mean = _mm512_reduce_add_ps(sum) / float(n);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + epsilon));
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = lanes(n - i);
    const __m512 a = rounded(_mm512_mul_ps(load(x + i, mask), scale));
    save(out + i, mask, _mm512_mul_ps(a, load(weight + i, mask)));
  }
}

// Su et al. 2021, "RoFormer", halves as in GPT-NeoX: x * cos + (-second, first) * sin.
inline void rotate(bf16* x, const bf16* cos, const bf16* sin, int64_t d) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __mmask16 mask = lanes(half - i);
    const __m512 a = load(x + i, mask), b = load(x + half + i, mask);
    const __m512 a_cos = rounded(_mm512_mul_ps(a, load(cos + i, mask)));
    const __m512 b_sin = rounded(_mm512_mul_ps(b, load(sin + i, mask)));
    const __m512 b_cos = rounded(_mm512_mul_ps(b, load(cos + half + i, mask)));
    const __m512 a_sin = rounded(_mm512_mul_ps(a, load(sin + half + i, mask)));
    save(x + i, mask, _mm512_sub_ps(a_cos, b_sin));
    save(x + half + i, mask, _mm512_add_ps(b_cos, a_sin));
  }
}

// 1 / (1 + exp(-x)), to 3e-6; the division is an estimate and a step of Newton's.
inline __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 z = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
  const __m512 y = _mm512_add_ps(one, exp2_of(_mm512_min_ps(_mm512_set1_ps(120.0f), z)));
  const __m512 inverse = _mm512_rcp14_ps(y);
  return _mm512_fmadd_ps(inverse, _mm512_fnmadd_ps(y, inverse, one), inverse);
}

// out = silu(gate) * up; Elfwing et al. 2017. out may be either.
inline void gated(const bf16* gate, const bf16* up, int64_t n, bf16* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = lanes(n - i);
    const __m512 x = load(gate + i, mask), silu = _mm512_mul_ps(x, sigmoid(x));
    save(out + i, mask, _mm512_mul_ps(rounded(silu), load(up + i, mask)));
  }
}

inline void add(const bf16* x, const bf16* y, int64_t n, bf16* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = lanes(n - i);
    save(out + i, mask, _mm512_add_ps(load(x + i, mask), load(y + i, mask)));
  }
}
