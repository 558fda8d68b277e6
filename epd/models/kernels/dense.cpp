// Attention of whole sequences, no mask and no cache, bfloat16.
//
// Queries lie in lanes (across.h). Keys and values are packed once for all of them; blocks of
// keys stay in a core's cache (Dao et al. 2022, "FlashAttention"; Milakov and Gimelshein 2018
// for the running sum).
//
// A query's bits depend on its sequence alone: its lane sees nothing of the others.
#include "dense.h"

#include "across.h"

namespace {

constexpr int64_t KEYS = 22 * MAX_ROWS;  // of a block: even, whole tiles
constexpr int64_t PANELS = 4;            // of queries in a task

struct Own;  // of this file's memory

// Su et al. 2021, "RoFormer", in float as transformers' vision towers do it.
void rotate_in_float(const bf16* x, const float* cos, const float* sin, int64_t d, bf16* out) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __mmask16 mask = lanes(half - i);
    const auto there = [&](const float* p) { return _mm512_maskz_loadu_ps(mask, p + i); };
    const __m512 a = load(x + i, mask), b = load(x + half + i, mask);
    const __m512 a_cos = _mm512_mul_ps(a, there(cos)), b_sin = _mm512_mul_ps(b, there(sin));
    const __m512 b_cos = _mm512_mul_ps(b, there(cos + half));
    const __m512 a_sin = _mm512_mul_ps(a, there(sin + half));
    save(out + i, mask, _mm512_sub_ps(a_cos, b_sin));
    save(out + half + i, mask, _mm512_add_ps(b_cos, a_sin));
  }
}

template <class T, int WHICH>
T* memory_for(int64_t count) {
  return aligned_memory<Own, T, WHICH>(count);
}

// One head of one sequence: tokens [first, first + n). Its keys are tiles of 12, each
// [d/2][12], its values tiles of outputs, each [n/2][height].
struct Head {
  const Dense& l;
  const int64_t first, n, head, d_pairs, n_pairs;
  int32_t *keys, *values;

  Head(const Dense& l, int64_t sequence, int64_t head, int32_t* packed)
      : l(l), first(l.starts[sequence]), n(l.starts[sequence + 1] - first), head(head),
        d_pairs((l.d + 1) / 2), n_pairs((n + 1) / 2), keys(packed), values(keys + n * d_pairs) {}

  static int64_t size(const Dense& l, int64_t n) { return n * ((l.d + 1) / 2) + (n + 1) / 2 * l.e; }

  // Addresses of up to `count` rows from `start` on; null beyond the end. Rotated ones lie
  // in `memory` [count][d].
  void rows(const bf16* x, int64_t token, int64_t head_stride, int64_t start, int64_t count,
            bf16* memory, const bf16** row) const {
    for (int64_t j = 0; j < count; ++j) {
      row[j] = start + j < n ? x + (first + start + j) * token + head * head_stride : nullptr;
      if (!row[j] || !l.cos) continue;
      const int64_t at = (first + start + j) * l.d;
      rotate_in_float(row[j], l.cos + at, l.sin + at, l.d, memory + j * l.d);
      row[j] = memory + j * l.d;
    }
  }

  void pack_keys() const {
    bf16* memory = memory_for<bf16, 0>(MAX_ROWS * l.d);
    for (int64_t start = 0; start < n; start += MAX_ROWS) {
      const bf16* row[MAX_ROWS];
      const int height = int(std::min<int64_t>(MAX_ROWS, n - start));
      rows(l.k, l.k_token, l.k_head, start, height, memory, row);
      pack_tile(row, height, l.d, keys + start * d_pairs);
    }
  }

  void pack_values() const {
    const Tiles tiles(l.e);
    int32_t* memory = memory_for<int32_t, 1>(l.e + 32);
    for (int64_t p = 0; p < n_pairs; ++p) {
      const bf16* a = l.v + (first + 2 * p) * l.v_token + head * l.v_head;
      pack_value_pair(a, 2 * p + 1 < n ? a + l.v_token : nullptr, tiles, n_pairs, p, memory,
                      values);
    }
  }
};

// The queries of one panel, and what was added up for them so far.
struct Panel {
  bf16* queries;            // [d/2][32][2]
  Lanes mixed;              // [e] sums over keys
  __m512 top[2], total[2];  // largest score, sum of weights
};

class Task {
 public:
  Task(const Head& h, int64_t from, int64_t end)
      : h(h), l(h.l), tiles(l.e), from(from), end(end), scale(exponent_scale(l.scale)) {}

  void run() {
    Panel panels[PANELS];
    bf16* queries = memory_for<bf16, 2>(PANELS * h.d_pairs * 64);
    float* mixed = memory_for<float, 3>(PANELS * l.e * PANEL);
    scores = (Lanes)memory_for<float, 4>(KEYS * PANEL);
    weights = memory_for<bf16, 5>(KEYS * PANEL);
    for (int64_t i = 0; i < end - from; ++i) {
      panels[i].queries = queries + i * h.d_pairs * 64;
      panels[i].mixed = (Lanes)(mixed + i * l.e * PANEL);
      begin(panels[i], (from + i) * PANEL);
    }
    for (int64_t start = 0; start < h.n; start += KEYS)
      for (int64_t i = 0; i < end - from; ++i)
        add_block(panels[i], start, std::min(KEYS, h.n - start));
    for (int64_t i = 0; i < end - from; ++i) finish(panels[i], (from + i) * PANEL);
  }

 private:
  const Head& h;
  const Dense& l;
  const Tiles tiles;  // of outputs
  const int64_t from, end;
  const __m512 scale;
  Lanes scores;   // [key] of one block
  bf16* weights;  // the same as pairs

  void begin(Panel& p, int64_t start) const {
    const bf16* row[PANEL];
    h.rows(l.q, l.q_token, l.q_head, start, PANEL, memory_for<bf16, 6>(PANEL * l.d), row);
    pack_panel(row, l.d, (int32_t*)p.queries);
    for (int half = 0; half < 2; ++half) {
      p.top[half] = _mm512_set1_ps(LEAST), p.total[half] = _mm512_setzero_ps();
      for (int64_t e = 0; e < l.e; ++e) p.mixed[e][half] = _mm512_setzero_ps();
    }
  }

  void add_block(Panel& p, int64_t start, int64_t count) const {
    __m512 top[2] = {p.top[0], p.top[1]}, shrink[2];
    for (int64_t key = 0; key < count; key += MAX_ROWS) {
      const int height = int(std::min<int64_t>(MAX_ROWS, count - key));
      for (int j = 0; j < height; ++j) scores[key + j][0] = scores[key + j][1] = _mm512_setzero_ps();
      MULTIPLY<Fetch::none>[height](h.keys + (start + key) * h.d_pairs, p.queries, h.d_pairs,
                                    nullptr, scores + key);
      for (int j = 0; j < height; ++j)
        for (int half = 0; half < 2; ++half)
          top[half] = _mm512_max_ps(scores[key + j][half], top[half]);
    }
    if (count % 2) scores[count][0] = scores[count][1] = _mm512_set1_ps(LEAST);
    __m512 sums[2][2];
    weigh(scores, (count + 1) / 2 * 2, top, scale, weights, sums);
    for (int half = 0; half < 2; ++half) {
      shrink[half] = weight_of(p.top[half], _mm512_mul_ps(top[half], scale), scale);
      p.top[half] = top[half];
      const __m512 sum = _mm512_add_ps(sums[half][0], sums[half][1]);
      p.total[half] = _mm512_fmadd_ps(p.total[half], shrink[half], sum);
    }
    for (int64_t t = 0; t < tiles.count; ++t) {
      const Lanes mixed = p.mixed + tiles.start(t);
      for (int j = 0; j < tiles.height(t); ++j)
        for (int half = 0; half < 2; ++half)
          mixed[j][half] = _mm512_mul_ps(mixed[j][half], shrink[half]);
      const int32_t* values = h.values + tiles.start(t) * h.n_pairs + start / 2 * tiles.height(t);
      MULTIPLY<Fetch::none>[tiles.height(t)](values, weights, (count + 1) / 2, nullptr, mixed);
    }
  }

  void finish(const Panel& p, int64_t start) const {
    bf16* row[PANEL];
    for (int64_t j = 0; j < PANEL; ++j)
      row[j] = start + j < h.n ? l.out + ((h.first + start + j) * l.heads + h.head) * l.e : nullptr;
    write_rows(p.mixed, p.total, l.e, row);
  }
};

}  // namespace

void dense_attention(const Dense& l, int threads) {
  struct Part {
    int64_t head, from, end;
  };
  std::vector<Head> heads;
  std::vector<Part> parts;
  const int64_t tokens = l.starts[l.count] - l.starts[0];
  int32_t* packed = memory_for<int32_t, 7>(
      l.heads * (tokens * ((l.d + 1) / 2) + (tokens + l.count) / 2 * l.e));
  for (int64_t s = 0; s < l.count; ++s) {
    const int64_t n = l.starts[s + 1] - l.starts[s], panels = (n + PANEL - 1) / PANEL;
    for (int64_t h = 0; h < l.heads; ++h, packed += Head::size(l, n)) {
      for (int64_t from = 0; from < panels; from += PANELS)
        parts.push_back({int64_t(heads.size()), from, std::min(panels, from + PANELS)});
      heads.emplace_back(l, s, h, packed);
    }
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < int64_t(heads.size()); ++i) heads[i].pack_keys(), heads[i].pack_values();
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < int64_t(parts.size()); ++i)
      Task(heads[parts[i].head], parts[i].from, parts[i].end).run();
  }
}

extern "C" void epd_dense_attention(const Dense* dense, int threads) {
  dense_attention(*dense, threads);
}
