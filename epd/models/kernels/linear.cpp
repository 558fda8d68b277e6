// Linear layers for few and for many rows, bfloat16, on CPUs with AVX512_BF16.
//
// Weights are packed once into panels of 32 outputs: [N/32][K/2][32][2], so that a
// call reads them front to back, and so that one 32-bit broadcast of two activations
// meets 16 outputs in one vdpbf16ps. Sizes that don't fit are padded with zeros.
//
// Every output is one chain of vdpbf16ps over k in order, however many rows there are
// and wherever its row stands: the result is the same bits in every batch.
#include "linear.h"
#include "tile.h"

namespace {

inline int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

constexpr int64_t BLOCK_BYTES = 512 << 10;  // weights that stay in L2 over all row tiles

// Rows are cut into tiles of nearly equal height.
struct Tiles {
  int64_t rows, count;
  explicit Tiles(int64_t m) : rows(m), count((m + MAX_ROWS - 1) / MAX_ROWS) {}
  int64_t start(int64_t tile) const { return rows * tile / count; }
  int height(int64_t tile) const { return int(start(tile + 1) - start(tile)); }
};

// [K/2][height] pairs of one tile; an odd last column gets a zero beside it.
void pack_rows(const bf16* x, int64_t stride, int height, int64_t k, int32_t* out) {
  const int64_t pairs = k / 2;
  for (int64_t p = 0; p < pairs; ++p)
    for (int m = 0; m < height; ++m) memcpy(out++, x + m * stride + 2 * p, 4);
  if (k % 2)
    for (int m = 0; m < height; ++m) *out++ = x[m * stride + k - 1];
}

// Memory of this thread for `count` pairs; kept for the next call.
int32_t* scratch(int64_t count) {
  thread_local std::vector<int32_t> memory;
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

void store(const Linear& c, int64_t panel, int64_t row, int height, const __m512 (*sum)[2]) {
  const int64_t first = panel * PANEL, left = c.n - first;
  const __mmask32 mask = left >= PANEL ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
  __m512 b0 = _mm512_setzero_ps(), b1 = b0;
  if (c.bias) {
    const __m512i b = _mm512_maskz_loadu_epi16(mask, c.bias + first);
    b0 = widen(_mm512_castsi512_si256(b));
    b1 = widen(_mm512_extracti64x4_epi64(b, 1));
  }
  for (int m = 0; m < height; ++m) {
    const __m512bh out = _mm512_cvtne2ps_pbh(sum[m][1] + b1, sum[m][0] + b0);
    _mm512_mask_storeu_epi16(c.y + (row + m) * c.ldy + first, mask, (__m512i)out);
  }
}

// All rows of panels [from, to).
void run_block(const Linear& c, int64_t pairs, const Tiles& tiles, const int32_t* x, int64_t from,
               int64_t to) {
  const bool stream = tiles.count <= 2;  // memory is the limit: fetch ahead
  __m512 sum[MAX_ROWS][2];
  for (int64_t t = 0; t < tiles.count; ++t) {
    const int height = tiles.height(t);
    const int32_t* rows = x + tiles.start(t) * pairs;
    for (int64_t panel = from; panel < to; ++panel) {
      const bf16* w = c.weight + panel * pairs * 64;
      const char* next = (const char*)(w + pairs * 64) + t * pairs * 64;
      const auto& table = !stream            ? MULTIPLY<Fetch::none>
                          : tiles.count == 1 ? MULTIPLY<Fetch::stream>
                                             : MULTIPLY<Fetch::share>;
      for (int m = 0; m < height; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
      table[height](rows, w, pairs, next, sum);
      store(c, panel, tiles.start(t), height, sum);
    }
  }
}

}  // namespace

void linear(const bf16* x, int64_t ldx, int64_t m, int64_t k, const Linear* layers, int count,
            int threads) {
  const int64_t pairs = (k + 1) / 2;
  const Tiles tiles(m);
  int32_t* rows = scratch(m * pairs);
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > MAX_ROWS)
  for (int64_t t = 0; t < tiles.count; ++t)
    pack_rows(x + tiles.start(t) * ldx, ldx, tiles.height(t), k, rows + tiles.start(t) * pairs);
  int64_t panels = 0;
  for (int i = 0; i < count; ++i) panels += panels_of(layers[i].n);
  int64_t block = tiles.count <= 2 ? 1 : BLOCK_BYTES / (pairs * 64 * 2);
  block = std::max<int64_t>(1, std::min(block, panels / threads));
  const int64_t blocks = (panels + block - 1) / block;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t i = 0; i < blocks; ++i) {
    // A block of the panels of all layers in a row; it may span two layers.
    int64_t from = i * block, to = std::min(panels, from + block), first = 0;
    for (const Linear* layer = layers; from < to; first += panels_of(layer->n), ++layer) {
      const int64_t end = std::min(to, first + panels_of(layer->n));
      if (from >= end) continue;
      run_block(*layer, pairs, tiles, rows, from - first, end - first);
      from = end;
    }
  }
}

extern "C" {

// Bytes of the packed form of a weight [n, k].
int64_t epd_linear_packed_bytes(int64_t n, int64_t k) {
  return panels_of(n) * ((k + 1) / 2) * 64 * int64_t(sizeof(bf16));
}

// w: [n, k], rows `ldw` apart. out: epd_linear_packed_bytes, aligned to 64.
void epd_linear_pack(const bf16* w, int64_t ldw, int64_t n, int64_t k, bf16* out, int threads) {
  const int64_t pairs = (k + 1) / 2, panels = panels_of(n);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t first = panel * PANEL, rows = std::min(PANEL, n - first);
    const bf16* from = w + first * ldw;
    bf16* to = out + panel * pairs * 64;
    if (rows < PANEL || k % 2) memset(to, 0, pairs * 64 * sizeof(bf16));
    for (int64_t p = 0; p < k / 2; ++p)
      for (int64_t j = 0; j < rows; ++j) memcpy(to + p * 64 + j * 2, from + j * ldw + 2 * p, 4);
    if (k % 2)
      for (int64_t j = 0; j < rows; ++j) to[(pairs - 1) * 64 + j * 2] = from[j * ldw + k - 1];
  }
}

// y [m, n] = x [m, k] times weight, plus bias where there is one; rows ldx and ldy apart.
void epd_linear(const bf16* x, int64_t ldx, int64_t m, const bf16* weight, const bf16* bias,
                int64_t n, int64_t k, bf16* y, int64_t ldy, int threads) {
  const Linear layer{weight, bias, y, n, ldy};
  linear(x, ldx, m, k, &layer, 1, threads);
}

// Reads `bytes` with the same threads, and does nothing else: the floor of a decode step.
float epd_read(const char* data, int64_t bytes, int threads) {
  float total = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : total)
  {
    int count = 1, me = 0;
#ifdef _OPENMP
    count = omp_get_num_threads(), me = omp_get_thread_num();
#endif
    const int64_t lines = bytes / 64, from = lines * me / count, to = lines * (me + 1) / count;
    __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
    int64_t i = from;
    for (; i + 4 <= to; i += 4) {
      const char* p = data + i * 64;
      for (int j = 0; j < 4; ++j) _mm_prefetch(p + AHEAD + 64 * j, _MM_HINT_T0);
      a += _mm512_loadu_ps(p);
      b += _mm512_loadu_ps(p + 64);
      c += _mm512_loadu_ps(p + 128);
      d += _mm512_loadu_ps(p + 192);
    }
    for (; i < to; ++i) a += _mm512_loadu_ps(data + i * 64);
    total += _mm512_reduce_add_ps(a + b + c + d);
  }
  return total;
}
}
