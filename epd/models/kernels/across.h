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

// Weights of scores, the largest of which is top: exp((score - top) * l.scale) is this with
// scale * log2(e).
inline __m512 weight_of(__m512 score, __m512 top, __m512 scale) {
  return exp2_of(_mm512_fmsub_ps(score, scale, _mm512_mul_ps(top, scale)));
}
inline __m512 exponent_scale(float scale) { return _mm512_set1_ps(scale * 1.44269504f); }

// Adds pairs of bfloat16 to float.
inline __m512 add_pairs(__m512 sum, __m512i pairs) {
  return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi16(0x3f80));
}

// Scores [count] of 32 queries to weights, rounded, pairs of keys [count/2][32][2], which may
// begin where the scores do. Adds them to total. count is even.
inline void weigh(const Lanes scores, int64_t count, const __m512* top, __m512 scale,
                  bf16* weights, __m512* total) {
  static const struct Index {
    alignas(64) uint16_t pairs[32];
    Index() {
      for (int i = 0; i < 32; ++i) pairs[i] = uint16_t(i / 2 + i % 2 * 16);
    }
  } index;
  const __m512i pairs = _mm512_load_si512(index.pairs);
  __m512 sum[2] = {total[0], total[1]};
  for (int64_t key = 0; key < count; key += 2) {
    __m512i both[2];
    for (int half = 0; half < 2; ++half) {
      const __m512 a = weight_of(scores[key][half], top[half], scale);
      const __m512 b = weight_of(scores[key + 1][half], top[half], scale);
      both[half] = _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(b, a));
      sum[half] = add_pairs(sum[half], both[half]);
    }
    _mm512_store_si512(weights + key * PANEL, both[0]);
    _mm512_store_si512(weights + key * PANEL + 32, both[1]);
  }
  total[0] = sum[0], total[1] = sum[1];
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
