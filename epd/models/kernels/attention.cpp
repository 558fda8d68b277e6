// Attention over the paged cache, bfloat16: no gathered copy of a sequence, no padding.
//
// A task is one key/value head and a few query tokens of one sequence with all their
// query heads: its "rows". A few rows (decode) are broadcast and meet panels of keys and
// values, packed as a linear layer's weights are; many rows (prefill) lie in the lanes
// (across.h), which is twice as fast.
//
// Both do the same operations on a row in the same order, which depend on the number of
// keys that it sees, alone: products are chains over the head size and over pairs of keys
// in order, so is the sum of the weights, and keys that a neighbour sees but this row
// doesn't add exact zeros. So its bits are the same in every batch and chunk.
#include "attention.h"

#include "across.h"

namespace {

constexpr int64_t KEYS = 32;         // keys packed at a time
constexpr int64_t LEAST_ROWS = 64, MOST_ROWS = 128;  // of a task, or one token's
constexpr int64_t SCORES = 256 << 10;  // of a task, if it has more than the least
constexpr int64_t MANY = 24;                        // rows that are worth a panel

void write(bf16* cache, const bf16* x, int64_t token, int64_t head, int64_t dim, const Step& s,
           const Attention& l) {
  for (int64_t t = 0; t < s.writes; ++t)
    for (int64_t g = 0; g < l.groups; ++g)
      memcpy(cache + s.slot_block[t] * l.block_stride + (s.slot_offset[t] * l.groups + g) * dim,
             x + t * token + g * head, dim * sizeof(bf16));
}

// Query tokens [first, first + tokens) of one sequence.
struct Task {
  int64_t first, tokens, group;
};

// 32 values to panels [e/32][16 pairs of keys][32][2].
void pack_values(const bf16* const* row, int64_t e, bf16* panels) {
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
void weigh_row(float* score, int64_t n, __m512 scale) {
  __m512 largest = _mm512_set1_ps(LEAST);
  for (int64_t j = 0; j < n; j += 16)
    largest = _mm512_max_ps(_mm512_loadu_ps(score + j), largest);
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (int64_t j = 0; j < n; j += 16)
    _mm512_storeu_ps(score + j, weight_of(_mm512_loadu_ps(score + j), top, scale));
}

struct Own;  // of this file's memory

template <class T, int WHICH>
T* memory_for(int64_t count) {
  return aligned_memory<Own, T, WHICH>(count);
}

// One task's rows, and what of the cache they see.
class Rows {
 public:
  Rows(const Step& s, const Attention& l, const Task& task)
      : s(s), l(l), task(task), share(l.heads / l.groups), rows(task.tokens * share),
        pairs((l.d + 1) / 2), blocks(s.blocks + s.table[task.first]),
        end(s.seen[task.first + task.tokens - 1]), begin(first_key(0) / KEYS * KEYS),
        scale(exponent_scale(l.scale)) {}

 protected:
  const Step& s;
  const Attention& l;
  const Task task;
  const int64_t share, rows, pairs;
  const int32_t* blocks;
  const int64_t end, begin;  // keys of the whole task
  const __m512 scale;

  int64_t token(int64_t row) const { return task.first + row / share; }
  int64_t head(int64_t row) const { return task.group * share + row % share; }
  int64_t seen(int64_t row) const { return s.seen[token(row)]; }
  int64_t first_key(int64_t row) const {
    return l.window ? std::max<int64_t>(0, seen(row) - l.window) : 0;
  }
  const bf16* query(int64_t row) const {
    return l.q + token(row) * l.q_token + head(row) * l.q_head;
  }
  bf16* out(int64_t row) const { return l.out + (token(row) * l.heads + head(row)) * l.e; }

  // Addresses of `count` keys or values from `start` on; null from `end` on.
  void keys(int64_t start, int64_t count, const bf16** out) const {
    places(l.keys + task.group * l.d, l.groups * l.d, start, count, out);
  }
  void values(int64_t start, int64_t count, const bf16** out) const {
    places(l.values + task.group * l.e, l.groups * l.e, start, count, out);
  }

 private:
  void places(const bf16* base, int64_t stride, int64_t start, int64_t count,
              const bf16** out) const {
    int64_t block = start / s.block_tokens, offset = start % s.block_tokens;
    for (int64_t j = 0; j < count; ++j) {
      out[j] = start + j < end ? base + blocks[block] * l.block_stride + offset * stride : nullptr;
      if (++offset == s.block_tokens) offset = 0, ++block;
    }
  }
};

// A few rows: tiles of up to 12, broadcast.
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

  // The block's weights of one tile as pairs of keys [16][height]; adds them to total, which
  // has a row in each lane.
  void pack_weights(const float* score, int64_t tile, int64_t offset, int32_t* out,
                    __m512* total) const {
    const int m = tiles.height(tile);
    __m512i x[16];
    for (int j = 0; j < 16; ++j) {
      const float* w = score + (tiles.start(tile) + std::min(j, m - 1)) * width + offset;
      x[j] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(w + 16), _mm512_loadu_ps(w));
    }
    transpose(x);
    const __mmask16 there = __mmask16((1u << m) - 1);
    for (int p = 0; p < 16; ++p) {
      _mm512_mask_storeu_epi32(out + p * m, there, x[p]);
      *total = add_pairs(*total, x[p]);
    }
  }

  void mix(const float* score) const {
    const Lanes sum = (Lanes)memory_for<float, 4>(rows * panels * 32);  // [panel][row]
    for (int64_t i = 0; i < rows * panels; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    float* total = memory_for<float, 2>(tiles.count * 16);
    for (int64_t i = 0; i < tiles.count * 16; ++i) total[i] = 0;
    bf16* packed = memory_for<bf16, 5>(panels * KEYS * 32);
    for (int64_t start = begin; start < end; start += KEYS) {
      const bf16* row[KEYS];
      values(start, KEYS, row);
      pack_values(row, l.e, packed);
      for (int64_t t = 0; t < tiles.count; ++t) {
        int32_t pair[KEYS / 2 * MAX_ROWS];
        pack_weights(score, t, start - begin, pair, (__m512*)total + t);
        for (int64_t p = 0; p < panels; ++p)
          MULTIPLY<Fetch::none>[tiles.height(t)](pair, packed + p * KEYS * 32, KEYS / 2, nullptr,
                                                 sum + p * rows + tiles.start(t));
      }
    }
    for (int64_t t = 0; t < tiles.count; ++t)
      for (int j = 0; j < tiles.height(t); ++j) write_row(tiles.start(t) + j, total[t * 16 + j], sum);
  }

  void write_row(int64_t row, float total, const Lanes sum) const {
    const __m512 by = _mm512_set1_ps(1.0f / total);
    for (int64_t p = 0; p < panels; ++p) {
      const __m512* x = sum[p * rows + row];
      const __m512bh y = _mm512_cvtne2ps_pbh(_mm512_mul_ps(x[1], by), _mm512_mul_ps(x[0], by));
      _mm512_mask_storeu_epi16(out(row) + p * 32, lanes32(l.e - p * 32), (__m512i)y);
    }
  }
};

// Many rows, in the lanes of panels of 32.
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
      total[i][0] = total[i][1] = _mm512_setzero_ps();
      weigh(scores + i * width, 2 * key_pairs(i), top[i], scale, weights(i), total[i]);
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

// Neighbouring tokens of a sequence, a few at a time, for each key/value head: as many as
// have scores that stay in a core's cache.
std::vector<Task> tasks_of(const Step& s, const Attention& l) {
  const int64_t share = l.heads / l.groups;
  std::vector<Task> tasks;
  for (int64_t first = 0, next; first < s.rows; first = next) {
    const int64_t width = l.window ? std::min<int64_t>(s.seen[first], l.window) : s.seen[first];
    const int64_t rows = std::max(LEAST_ROWS, std::min(MOST_ROWS, SCORES / (width + KEYS)));
    next = first + 1;
    while (next < s.rows && (next + 1 - first) * share <= rows && s.table[next] == s.table[first])
      ++next;
    for (int64_t g = 0; g < l.groups; ++g) tasks.push_back({first, next - first, g});
  }
  return tasks;
}

}  // namespace

void attention(const Step& s, const Attention& l, int threads) {
  write(l.keys, l.k, l.k_token, l.k_head, l.d, s, l);
  write(l.values, l.v, l.v_token, l.v_head, l.e, s, l);
  const std::vector<Task> tasks = tasks_of(s, l);
  const int64_t count = tasks.size();
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i)
    if (tasks[i].tokens * (l.heads / l.groups) < MANY) FewRows(s, l, tasks[i]).run();
    else ManyRows(s, l, tasks[i]).run();
}

extern "C" void epd_attention(const Step* step, const Attention* layer, int threads) {
  attention(*step, *layer, threads);
}
