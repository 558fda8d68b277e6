// Attention over the paged cache, bfloat16: no gathered copy of a sequence, no padding.
//
// A task is one key/value head and a few query tokens of one sequence with all their
// query heads: its "rows". Keys and values are packed block by block as a linear
// layer's weights are, and met by the same register tile.
//
// The operations on a row and their order depend on the number of keys that it sees,
// alone: products are chains over the head size and over the keys in order, sums of
// weights go by the key's place modulo 16, and keys that a neighbour sees but this row
// doesn't add exact zeros. So its bits are the same in every batch and chunk.
#include "attention.h"
#include "tile.h"

namespace {

constexpr int64_t KEYS = 32;         // keys packed at a time
constexpr int64_t LEAST_ROWS = 24, MOST_ROWS = 96;  // of a task, or one token's
constexpr int64_t SCORES = 96 << 10;                // of a task, if it has more than the least
constexpr float NONE = -INFINITY;

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

inline __mmask32 lanes32(int64_t left) {
  return left >= 32 ? ~__mmask32(0) : left <= 0 ? 0 : (__mmask32(1) << left) - 1;
}

// Addresses of the keys (or values) [start, start + KEYS) of one head; null from `end` on.
void places(const bf16* base, const int32_t* blocks, int64_t block_tokens, int64_t block_stride,
            int64_t token_stride, int64_t start, int64_t end, const bf16** out) {
  int64_t block = start / block_tokens, offset = start % block_tokens;
  for (int64_t j = 0; j < KEYS; ++j) {
    out[j] = start + j < end ? base + blocks[block] * block_stride + offset * token_stride
                             : nullptr;
    if (++offset == block_tokens) offset = 0, ++block;
  }
}

inline __m512i load_row(const bf16* row, int64_t column, int64_t width) {
  if (!row) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16(lanes32(width - column), row + column);
}

void transpose(__m512i* x) {
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

// 32 keys to a panel [d/2][32][2].
void pack_keys(const bf16* const* row, int64_t d, int32_t* panel) {
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

// Scores to weights exp(score - largest), in place; returns their sum. n: multiple of 16.
float weights(float* score, int64_t n) {
  __m512 largest = _mm512_set1_ps(NONE), total = _mm512_setzero_ps();
  for (int64_t j = 0; j < n; j += 16)
    largest = _mm512_max_ps(_mm512_loadu_ps(score + j), largest);
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (int64_t j = 0; j < n; j += 16) {
    const __m512 w = exp_of(_mm512_sub_ps(_mm512_loadu_ps(score + j), top));
    _mm512_storeu_ps(score + j, w);
    total = _mm512_add_ps(total, w);
  }
  return _mm512_reduce_add_ps(total);
}

// Memory of a thread, kept for the next task.
template <class T, int WHICH>
T* memory_for(int64_t count) {
  thread_local std::vector<T> memory;
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

class Attend {
 public:
  Attend(const Step& s, const Attention& l, const Task& task)
      : s(s), l(l), task(task), share(l.heads / l.groups), rows(task.tokens * share),
        tiles((rows + MAX_ROWS - 1) / MAX_ROWS), pairs((l.d + 1) / 2), panels((l.e + 31) / 32),
        blocks(s.blocks + s.table[task.first]), end(s.seen[task.first + task.tokens - 1]),
        begin(first_key(0) / KEYS * KEYS), width((end - begin + KEYS - 1) / KEYS * KEYS) {}

  void run() {
    int64_t* sees = memory_for<int64_t, 6>(2 * rows);  // [row] {first, past the last}
    for (int64_t r = 0; r < rows; ++r) sees[2 * r] = first_key(r), sees[2 * r + 1] = seen(r);
    int32_t* queries = memory_for<int32_t, 0>(rows * pairs);
    float* score = memory_for<float, 1>(rows * width);
    pack_queries(queries);
    for (int64_t start = begin; start < end; start += KEYS) score_block(queries, sees, start, score);
    float* inverse = memory_for<float, 2>(rows);
    for (int64_t r = 0; r < rows; ++r) inverse[r] = 1.0f / weights(score + r * width, width);
    mix(score, inverse);
  }

 private:
  const Step& s;
  const Attention& l;
  const Task task;
  const int64_t share, rows, tiles, pairs, panels;
  const int32_t* blocks;
  const int64_t end, begin, width;  // keys of the whole task; width: padded to blocks

  int64_t token(int64_t row) const { return task.first + row / share; }
  int64_t head(int64_t row) const { return task.group * share + row % share; }
  int64_t seen(int64_t row) const { return s.seen[token(row)]; }
  int64_t first_key(int64_t row) const {
    return l.window ? std::max<int64_t>(0, seen(row) - l.window) : 0;
  }
  int64_t tile_start(int64_t tile) const { return rows * tile / tiles; }
  int height(int64_t tile) const { return int(tile_start(tile + 1) - tile_start(tile)); }

  // Tile by tile [d/2][height], as `multiply` takes them.
  void pack_queries(int32_t* out) const {
    for (int64_t t = 0; t < tiles; ++t) {
      const int m = height(t);
      for (int j = 0; j < m; ++j) {
        const int64_t r = tile_start(t) + j;
        const bf16* q = l.q + token(r) * l.q_token + head(r) * l.q_head;
        for (int64_t p = 0; p < l.d / 2; ++p) memcpy(out + p * m + j, q + 2 * p, 4);
        if (l.d % 2) out[(pairs - 1) * m + j] = q[l.d - 1];
      }
      out += m * pairs;
    }
  }

  void score_block(const int32_t* queries, const int64_t* sees, int64_t start,
                   float* score) const {
    const bf16* row[KEYS];
    places(l.keys + task.group * l.d, blocks, s.block_tokens, l.block_stride, l.groups * l.d,
           start, end, row);
    int32_t* panel = memory_for<int32_t, 3>(pairs * 32);
    pack_keys(row, l.d, panel);
    const __m512 scale = _mm512_set1_ps(l.scale), none = _mm512_set1_ps(NONE);
    __m512 sum[MAX_ROWS][2];
    for (int64_t t = 0; t < tiles; ++t) {
      const int m = height(t);
      for (int j = 0; j < m; ++j) sum[j][0] = sum[j][1] = _mm512_setzero_ps();
      MULTIPLY<Fetch::none>[m](queries + tile_start(t) * pairs, (const bf16*)panel, pairs,
                               nullptr, sum);
      for (int j = 0; j < m; ++j) {
        const int64_t r = tile_start(t) + j;
        const __mmask32 there =
            lanes32(sees[2 * r + 1] - start) & ~lanes32(sees[2 * r] - start);
        float* to = score + r * width + start - begin;
        _mm512_storeu_ps(to, _mm512_mask_mul_ps(none, __mmask16(there), sum[j][0], scale));
        _mm512_storeu_ps(to + 16,
                         _mm512_mask_mul_ps(none, __mmask16(there >> 16), sum[j][1], scale));
      }
    }
  }

  // The block's weights of one tile as pairs of keys [16][height].
  void pack_weights(const float* score, int64_t tile, int64_t offset, int32_t* out) const {
    const int m = height(tile);
    __m512i x[16];
    for (int j = 0; j < 16; ++j) {
      const float* w = score + (tile_start(tile) + std::min(j, m - 1)) * width + offset;
      x[j] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(w + 16), _mm512_loadu_ps(w));
    }
    transpose(x);
    const __mmask16 there = __mmask16((1u << m) - 1);
    for (int p = 0; p < 16; ++p) _mm512_mask_storeu_epi32(out + p * m, there, x[p]);
  }

  void mix(const float* score, const float* inverse) const {
    const int64_t count = rows * panels * 2;
    float* sums = memory_for<float, 4>(count * 16 + 16);
    __m512(*sum)[2] = (__m512(*)[2])((uintptr_t(sums) + 63) / 64 * 64);  // [panel][row][2]
    for (int64_t i = 0; i < count / 2; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    bf16* packed = memory_for<bf16, 5>(panels * KEYS * 32);
    for (int64_t start = begin; start < end; start += KEYS) {
      const bf16* row[KEYS];
      places(l.values + task.group * l.e, blocks, s.block_tokens, l.block_stride,
             l.groups * l.e, start, end, row);
      pack_values(row, l.e, packed);
      for (int64_t t = 0; t < tiles; ++t) {
        int32_t pair[KEYS / 2 * MAX_ROWS];
        pack_weights(score, t, start - begin, pair);
        for (int64_t p = 0; p < panels; ++p)
          MULTIPLY<Fetch::none>[height(t)](pair, packed + p * KEYS * 32, KEYS / 2, nullptr,
                                           sum + p * rows + tile_start(t));
      }
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t p = 0; p < panels; ++p) {
        const __m512 by = _mm512_set1_ps(inverse[r]), *x = sum[p * rows + r];
        const __m512bh y = _mm512_cvtne2ps_pbh(_mm512_mul_ps(x[1], by), _mm512_mul_ps(x[0], by));
        bf16* to = l.out + (token(r) * l.heads + head(r)) * l.e + p * 32;
        _mm512_mask_storeu_epi16(to, lanes32(l.e - p * 32), (__m512i)y);
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
  for (int64_t i = 0; i < count; ++i) Attend(s, l, tasks[i]).run();
}

extern "C" void epd_attention(const Step* step, const Attention* layer, int threads) {
  attention(*step, *layer, threads);
}
