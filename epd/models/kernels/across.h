// Attention with a query in each lane: a tile of keys, broadcast, meets a panel of 32
// queries, so that scores come out transposed. The largest score, the exponentials and
// their sum are then operations on whole vectors, weights are a panel as they come, and
// nothing is summed across lanes.
#pragma once
#include "pack.h"
#include "rows.h"
#include "tile.h"

constexpr float LEAST = -1e30f;  // less than any score; finite, for differences

typedef __m512 (*Lanes)[2];  // [row][half]: 32 queries

// The weight of a score, the largest of which is `top`: exp((score - top) * l.scale), where
// scale = exponent_scale(l.scale) and offset = top * scale.
inline __m512 exponent_scale(float scale) { return _mm512_set1_ps(scale * 1.44269504f); }
inline __m512 weight_of(__m512 score, __m512 offset, __m512 scale) {
  return exp2_of(_mm512_fmsub_ps(score, scale, offset));
}

// Two vectors of float to pairs of bfloat16: {a[0], b[0], a[1], b[1], ...}.
inline __m512i pairs_of(__m512 a, __m512 b) {
  const __m512i index = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(index, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

// Scores [count] of 32 queries to weights, pairs of keys [count/2][32][2], which may begin
// where the scores do. sums: of the weights of even and of odd keys, in order. count is even.
inline void weigh(const Lanes scores, int64_t count, const __m512* top, __m512 scale,
                  bf16* weights, __m512 (*sums)[2]) {
  __m512 even[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, odd[2] = {even[0], even[1]};
  const __m512 offset[2] = {_mm512_mul_ps(top[0], scale), _mm512_mul_ps(top[1], scale)};
  for (int64_t key = 0; key < count; key += 2) {
    __m512i both[2];
    for (int half = 0; half < 2; ++half) {
      const __m512 a = weight_of(scores[key][half], offset[half], scale);
      const __m512 b = weight_of(scores[key + 1][half], offset[half], scale);
      even[half] = _mm512_add_ps(even[half], a), odd[half] = _mm512_add_ps(odd[half], b);
      both[half] = pairs_of(a, b);
    }
    _mm512_store_si512(weights + key * PANEL, both[0]);
    _mm512_store_si512(weights + key * PANEL + 32, both[1]);
  }
  for (int half = 0; half < 2; ++half) sums[half][0] = even[half], sums[half][1] = odd[half];
}

// Values a and b (or zeros) of two neighbouring keys, [e] each, to pairs: one to each tile,
// at values + start(tile) * stride. memory: [e + 32].
inline void pack_value_pair(const bf16* a, const bf16* b, const Tiles& tiles, int64_t stride,
                            int64_t pair, int32_t* memory, int32_t* values) {
  const auto half_row = [&](const bf16* row, int64_t column) {
    const __mmask16 there = lanes(tiles.rows - column);
    return _mm512_cvtepu16_epi32(row ? _mm256_maskz_loadu_epi16(there, row + column)
                                     : _mm256_setzero_si256());
  };
  for (int64_t column = 0; column < tiles.rows; column += 16) {
    const __m512i low = half_row(a, column), high = half_row(b, column);
    _mm512_storeu_si512(memory + column, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  for (int64_t t = 0; t < tiles.count; ++t)
    _mm512_mask_storeu_epi32(values + tiles.start(t) * stride + pair * tiles.height(t),
                             lanes(tiles.height(t)), _mm512_loadu_si512(memory + tiles.start(t)));
}

// sums [e] over total, to the rows of 32 queries, [e] each; null rows are left out.
inline void write_rows(const Lanes sums, const __m512* total, int64_t e, bf16* const* row) {
  for (int half = 0; half < 2; ++half) {
    const __m512 by = _mm512_div_ps(_mm512_set1_ps(1.0f), total[half]);
    for (int64_t column = 0; column < e; column += 16) {
      __m512i x[16];
      for (int64_t j = 0; j < 16; ++j)
        x[j] = column + j < e ? (__m512i)_mm512_mul_ps(sums[column + j][half], by)
                              : _mm512_setzero_si512();
      transpose(x);
      for (int64_t j = 0; j < 16; ++j)
        if (row[half * 16 + j]) save(row[half * 16 + j] + column, lanes(e - column), (__m512)x[j]);
    }
  }
}

// Memory of a thread, aligned to 64 bytes, kept for the next call; Tag tells uses apart.
template <class Tag, class T, int WHICH>
T* aligned_memory(int64_t count) {
  thread_local std::vector<T> memory;
  constexpr int64_t SPARE = 64 / sizeof(T);
  if (int64_t(memory.size()) < count + SPARE) memory.resize(count + SPARE);
  return (T*)((uintptr_t(memory.data()) + 63) / 64 * 64);
}
