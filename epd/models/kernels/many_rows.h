// Attention of many rows, as in prefill: 32 rows are a panel, one in each lane, and meet tiles
// of 12 keys (across.h).
#pragma once
#include "task.h"

class ManyRows : Rows {
 public:
  ManyRows(const Step& s, const Attention& l, const Task& task)
      : Rows(s, l, task), panels((rows + PANEL - 1) / PANEL), outputs(l.e),
        width((end - begin + BLOCK - 1) / BLOCK * BLOCK) {}

  void run() {
    bf16* queries = memory_for<bf16, 10>(panels * pairs * 64);
    scores = (Lanes)memory_for<float, 11>(panels * width * PANEL);
    sees = memory_for<int32_t, 12>(panels * PANEL * 2);
    top = (Lanes)memory_for<float, 13>(panels * PANEL);
    for (int64_t i = 0; i < panels; ++i) begin_panel(i, queries + i * pairs * 64);
    for (int64_t start = begin; start < end; start += BLOCK) score_block(queries, start);
    Lanes total = (Lanes)memory_for<float, 14>(panels * PANEL);
    for (int64_t i = 0; i < panels; ++i) {
      __m512 sums[2][2];
      weigh(scores + i * width, 2 * key_pairs(i), top[i], scale, weights(i), sums);
      for (int half = 0; half < 2; ++half)
        total[i][half] = _mm512_add_ps(sums[half][0], sums[half][1]);
    }
    mix(total);
  }

 private:
  static constexpr int64_t BLOCK = 8 * MAX_ROWS;  // of keys

  const int64_t panels;
  const Tiles outputs;
  const int64_t width;  // keys, padded to blocks
  Lanes scores, top;    // [panel][width], [panel]
  int32_t* sees;        // [panel] {32 first keys, 32 past the last}

  int64_t last(int64_t panel) const { return std::min(rows, (panel + 1) * PANEL) - 1; }
  int64_t key_pairs(int64_t panel) const { return (seen(last(panel)) - begin + 1) / 2; }
  bf16* weights(int64_t panel) const { return (bf16*)(scores + panel * width); }

  void begin_panel(int64_t panel, bf16* queries) const {
    const bf16* row[PANEL];
    int32_t* first = sees + panel * PANEL * 2;
    for (int64_t j = 0, r = panel * PANEL; j < PANEL; ++j, ++r) {
      row[j] = r < rows ? query(r) : nullptr;
      first[j] = r < rows ? int32_t(first_key(r)) : 0;
      first[PANEL + j] = r < rows ? int32_t(seen(r)) : 0;
    }
    pack_panel(row, l.d, (int32_t*)queries);
    top[panel][0] = top[panel][1] = _mm512_set1_ps(LEAST);
  }

  void score_block(const bf16* queries, int64_t start) const {
    const bf16* row[BLOCK];
    keys(start, BLOCK, row);
    int32_t* tiles = memory_for<int32_t, 15>(BLOCK * pairs);
    for (int64_t j = 0; j < BLOCK; j += MAX_ROWS) pack_tile(row + j, MAX_ROWS, l.d, tiles + j * pairs);
    for (int64_t i = 0; i < panels; ++i)
      for (int64_t j = 0; j < BLOCK && start + j < seen(last(i)); j += MAX_ROWS) {
        const Lanes sum = scores + i * width + start - begin + j;
        for (int m = 0; m < MAX_ROWS; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
        MULTIPLY<Fetch::none>[MAX_ROWS](tiles + j * pairs, queries + i * pairs * 64, pairs,
                                        nullptr, sum);
        hide(i, start + j, sum);
        for (int m = 0; m < MAX_ROWS; ++m)
          for (int half = 0; half < 2; ++half)
            top[i][half] = _mm512_max_ps(sum[m][half], top[i][half]);
      }
  }

  // Scores of a tile of keys that a row doesn't see.
  void hide(int64_t panel, int64_t start, Lanes score) const {
    const int64_t r = panel * PANEL;
    if (start + MAX_ROWS <= seen(r) && start >= first_key(last(panel))) return;
    const __m512 none = _mm512_set1_ps(LEAST);
    for (int half = 0; half < 2; ++half) {
      const int32_t* first = sees + panel * PANEL * 2 + half * 16;
      const __m512i from = _mm512_loadu_si512(first), past = _mm512_loadu_si512(first + PANEL);
      for (int m = 0; m < MAX_ROWS; ++m) {
        const __m512i key = _mm512_set1_epi32(int(start + m));
        const __mmask16 there = _mm512_cmpgt_epi32_mask(past, key) & _mm512_cmple_epi32_mask(from, key);
        score[m][half] = _mm512_mask_mov_ps(none, there, score[m][half]);
      }
    }
  }

  void mix(const Lanes total) const {
    const Lanes sum = (Lanes)memory_for<float, 16>(panels * l.e * PANEL);  // [panel][e]
    for (int64_t i = 0; i < panels * l.e; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    int32_t* packed = memory_for<int32_t, 17>(BLOCK / 2 * l.e);
    int32_t* memory = memory_for<int32_t, 18>(l.e + 32);
    for (int64_t start = begin; start < end; start += BLOCK) {
      const bf16* row[BLOCK];
      values(start, BLOCK, row);
      for (int64_t p = 0; p < BLOCK / 2; ++p)
        pack_value_pair(row[2 * p], row[2 * p + 1], outputs, BLOCK / 2, p, memory, packed);
      const int64_t done = (start - begin) / 2;
      for (int64_t i = 0; i < panels; ++i) {
        const int64_t count = std::min(BLOCK / 2, key_pairs(i) - done);
        for (int64_t t = 0; t < outputs.count && count > 0; ++t)
          MULTIPLY<Fetch::none>[outputs.height(t)](packed + outputs.start(t) * (BLOCK / 2),
                                                   weights(i) + done * 64, count, nullptr,
                                                   sum + i * l.e + outputs.start(t));
      }
    }
    for (int64_t i = 0; i < panels; ++i) {
      bf16* row[PANEL];
      for (int64_t j = 0; j < PANEL; ++j)
        row[j] = i * PANEL + j < rows ? out(i * PANEL + j) : nullptr;
      write_rows(sum + i * l.e, total[i], l.e, row);
    }
  }
};
