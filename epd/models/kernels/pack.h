// Rows of bfloat16 as `multiply` takes them: pairs of columns, of a tile or of a panel.
#pragma once
#include "common.h"

inline __mmask32 lanes32(int64_t left) {
  return left >= 32 ? ~__mmask32(0) : left <= 0 ? 0 : (__mmask32(1) << left) - 1;
}

inline __m512i load_row(const bf16* row, int64_t column, int64_t width) {
  if (!row) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16(lanes32(width - column), row + column);
}

// 16 vectors of 16 numbers: rows become columns.
inline void transpose(__m512i* x) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0x88);
      y[i + 4 + j] = _mm512_shuffle_i32x4(x[i + j], x[i + 4 + j], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0x88);
    x[8 + j] = _mm512_shuffle_i32x4(y[j], y[8 + j], 0xdd);
  }
}

// 32 rows of d numbers to a panel [d/2][32][2]; a null row is zeros.
inline void pack_panel(const bf16* const* row, int64_t d, int32_t* panel) {
  const int64_t pairs = (d + 1) / 2;
  for (int64_t column = 0; column < d; column += 32)
    for (int half = 0; half < 2; ++half) {
      __m512i x[16];
      for (int j = 0; j < 16; ++j) x[j] = load_row(row[16 * half + j], column, d);
      transpose(x);
      const int64_t first = column / 2;
      for (int64_t p = 0; p < std::min<int64_t>(16, pairs - first); ++p)
        _mm512_storeu_si512(panel + (first + p) * 32 + 16 * half, x[p]);
    }
}

// `height` rows, at most 16, of d numbers to a tile [d/2][height].
inline void pack_tile(const bf16* const* row, int height, int64_t d, int32_t* tile) {
  const int64_t pairs = (d + 1) / 2;
  const __mmask16 all = __mmask16((1u << height) - 1);
  for (int64_t first = 0; first < pairs; first += 16) {
    __m512i x[16];
    for (int j = 0; j < 16; ++j) x[j] = load_row(j < height ? row[j] : nullptr, 2 * first, d);
    transpose(x);
    const int64_t count = std::min<int64_t>(16, pairs - first);
    for (int64_t p = 0; p < count; ++p)
      _mm512_mask_storeu_epi32(tile + (first + p) * height, all, x[p]);
  }
}
