// Attention of a few rows, as in decode: tiles of up to 12 are broadcast and meet panels of 32
// keys, then of values.
#pragma once
#include "task.h"

// 32 values to panels [e/32][16 pairs of keys][32][2].
inline void pack_values(const bf16* const* row, int64_t e, bf16* panels) {
  static const struct Index {
    alignas(64) uint16_t low[32], high[32];
    Index() {
      for (int i = 0; i < 32; ++i) {
        low[i] = uint16_t(i / 2 + (i % 2) * 32);
        high[i] = uint16_t(16 + i / 2 + (i % 2) * 32);
      }
    }
  } index;
  const __m512i low = _mm512_load_si512(index.low), high = _mm512_load_si512(index.high);
  for (int64_t column = 0; column < e; column += 32)
    for (int64_t p = 0; p < KEYS / 2; ++p, panels += 64) {
      const __m512i a = load_row(row[2 * p], column, e), b = load_row(row[2 * p + 1], column, e);
      _mm512_storeu_si512(panels, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(panels + 32, _mm512_permutex2var_epi16(a, high, b));
    }
}

// Scores to weights, in place. n: multiple of 16.
inline void weigh_row(float* score, int64_t n, __m512 scale) {
  __m512 largest = _mm512_set1_ps(LEAST);
  for (int64_t j = 0; j < n; j += 16)
    largest = _mm512_max_ps(_mm512_loadu_ps(score + j), largest);
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  const __m512 offset = _mm512_mul_ps(top, scale);
  for (int64_t j = 0; j < n; j += 16)
    _mm512_storeu_ps(score + j, weight_of(_mm512_loadu_ps(score + j), offset, scale));
}

class FewRows : Rows {
 public:
  FewRows(const Step& s, const Attention& l, const Task& task)
      : Rows(s, l, task), tiles(rows), panels((l.e + 31) / 32),
        width((end - begin + KEYS - 1) / KEYS * KEYS) {}

  void run() {
    int64_t* sees = memory_for<int64_t, 6>(2 * rows);  // [row] {first, past the last}
    for (int64_t r = 0; r < rows; ++r) sees[2 * r] = first_key(r), sees[2 * r + 1] = seen(r);
    int32_t* queries = memory_for<int32_t, 0>(rows * pairs);
    float* score = memory_for<float, 1>(rows * width);
    pack_queries(queries);
    for (int64_t start = begin; start < end; start += KEYS) score_block(queries, sees, start, score);
    for (int64_t r = 0; r < rows; ++r) weigh_row(score + r * width, width, scale);
    mix(score);
  }

 private:
  const Tiles tiles;
  const int64_t panels, width;  // width: keys, padded to blocks

  // Tile by tile [d/2][height], as `multiply` takes them.
  void pack_queries(int32_t* out) const {
    for (int64_t t = 0; t < tiles.count; ++t, out += tiles.height(t - 1) * pairs) {
      const bf16* row[MAX_ROWS];
      for (int j = 0; j < tiles.height(t); ++j) row[j] = query(tiles.start(t) + j);
      pack_tile(row, tiles.height(t), l.d, out);
    }
  }

  void score_block(const int32_t* queries, const int64_t* sees, int64_t start,
                   float* score) const {
    const bf16* row[KEYS];
    keys(start, KEYS, row);
    int32_t* panel = memory_for<int32_t, 3>(pairs * 32);
    pack_panel(row, l.d, panel);
    const __m512 none = _mm512_set1_ps(LEAST);
    __m512 sum[MAX_ROWS][2];
    for (int64_t t = 0; t < tiles.count; ++t) {
      const int m = tiles.height(t);
      for (int j = 0; j < m; ++j) sum[j][0] = sum[j][1] = _mm512_setzero_ps();
      MULTIPLY<Fetch::none>[m](queries + tiles.start(t) * pairs, (const bf16*)panel, pairs,
                               nullptr, sum);
      for (int j = 0; j < m; ++j) {
        const int64_t r = tiles.start(t) + j;
        const __mmask32 there =
            lanes32(sees[2 * r + 1] - start) & ~lanes32(sees[2 * r] - start);
        float* to = score + r * width + start - begin;
        _mm512_storeu_ps(to, _mm512_mask_mov_ps(none, __mmask16(there), sum[j][0]));
        _mm512_storeu_ps(to + 16, _mm512_mask_mov_ps(none, __mmask16(there >> 16), sum[j][1]));
      }
    }
  }

  // The block's weights of one tile as pairs of keys [16][height]; adds them to the sums of
  // even and of odd keys, which have a row in each lane.
  void pack_weights(const float* score, int64_t tile, int64_t offset, int32_t* out,
                    __m512* sums) const {
    const int m = tiles.height(tile);
    const __mmask16 there = __mmask16((1u << m) - 1);
    for (int first = 0; first < KEYS; first += 16, out += 8 * m) {
      __m512i x[16];
      for (int j = 0; j < 16; ++j) {
        const int64_t row = tiles.start(tile) + std::min(j, m - 1);
        x[j] = _mm512_loadu_si512(score + row * width + offset + first);
      }
      transpose(x);
      for (int p = 0; p < 8; ++p) {
        const __m512 a = (__m512)x[2 * p], b = (__m512)x[2 * p + 1];
        sums[0] = _mm512_add_ps(sums[0], a), sums[1] = _mm512_add_ps(sums[1], b);
        _mm512_mask_storeu_epi32(out + p * m, there, pairs_of(a, b));
      }
    }
  }

  void mix(const float* score) const {
    const Lanes mixed = (Lanes)memory_for<float, 4>(rows * panels * 32);  // [panel][row]
    for (int64_t i = 0; i < rows * panels; ++i) mixed[i][0] = mixed[i][1] = _mm512_setzero_ps();
    float* sums = memory_for<float, 2>(tiles.count * 32);  // [tile]{16 of even keys, 16 of odd}
    for (int64_t i = 0; i < tiles.count * 32; ++i) sums[i] = 0;
    bf16* packed = memory_for<bf16, 5>(panels * KEYS * 32);
    for (int64_t start = begin; start < end; start += KEYS) {
      const bf16* row[KEYS];
      values(start, KEYS, row);
      pack_values(row, l.e, packed);
      for (int64_t t = 0; t < tiles.count; ++t) {
        int32_t pair[KEYS / 2 * MAX_ROWS];
        pack_weights(score, t, start - begin, pair, (__m512*)sums + 2 * t);
        for (int64_t p = 0; p < panels; ++p)
          MULTIPLY<Fetch::none>[tiles.height(t)](pair, packed + p * KEYS * 32, KEYS / 2, nullptr,
                                                 mixed + p * rows + tiles.start(t));
      }
    }
    for (int64_t t = 0; t < tiles.count; ++t)
      for (int j = 0; j < tiles.height(t); ++j)
        write_row(tiles.start(t) + j, sums[t * 32 + j] + sums[t * 32 + 16 + j], mixed);
  }

  void write_row(int64_t row, float total, const Lanes mixed) const {
    const __m512 by = _mm512_set1_ps(1.0f / total);
    for (int64_t p = 0; p < panels; ++p) {
      const __m512* x = mixed[p * rows + row];
      const __m512bh y = _mm512_cvtne2ps_pbh(_mm512_mul_ps(x[1], by), _mm512_mul_ps(x[0], by));
      _mm512_mask_storeu_epi16(out(row) + p * 32, lanes32(l.e - p * 32), (__m512i)y);
    }
  }
};
