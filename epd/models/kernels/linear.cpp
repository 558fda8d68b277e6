// Linear layers for few and for many rows, bfloat16, on CPUs with AVX512_BF16.
//
// Weights are packed once into panels of 32 outputs: [N/32][K/2][32][2], so that a
// call reads them front to back, and so that one 32-bit broadcast of two activations
// meets 16 outputs in one vdpbf16ps. Sizes that don't fit are padded with zeros.
//
// Every output is one chain of vdpbf16ps over k in order, however many rows there are
// and wherever its row stands: the result is the same bits in every batch.
#include "pack.h"
#include "panels.h"

namespace {

// [K/2][height] pairs of one tile; an odd last column gets a zero beside it.
void pack_rows(const bf16* x, int64_t stride, int height, int64_t k, int32_t* out) {
  constexpr int MANY = 6;  // from here on transposing is faster than copying pair by pair
  if (height >= MANY) {
    const bf16* row[MAX_ROWS];
    for (int m = 0; m < height; ++m) row[m] = x + m * stride;
    pack_tile(row, height, k, out);
    return;
  }
  const int64_t pairs = k / 2;
  for (int64_t p = 0; p < pairs; ++p)
    for (int m = 0; m < height; ++m) memcpy(out++, x + m * stride + 2 * p, 4);
  if (k % 2)
    for (int m = 0; m < height; ++m) *out++ = x[m * stride + k - 1];
}

Multiply multiply_of(Fetch how, int height) {
  return how == Fetch::none     ? MULTIPLY<Fetch::none>[height]
         : how == Fetch::stream ? MULTIPLY<Fetch::stream>[height]
                                : MULTIPLY<Fetch::share>[height];
}

void linear_bf16(const bf16* x, int64_t ldx, int64_t m, int64_t k, const Linear* layers, int count,
                 int threads) {
  const int64_t pairs = (k + 1) / 2;
  const Tiles tiles(m);
  int32_t* rows = scratch<int32_t>(m * pairs);
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > MAX_ROWS)
  for (int64_t t = 0; t < tiles.count; ++t)
    pack_rows(x + tiles.start(t) * ldx, ldx, tiles.height(t), k, rows + tiles.start(t) * pairs);
  run_panels(layers, count, tiles, pairs * 128, threads,
             [&](int64_t t, Fetch how, const char* w, const char* next, __m512(*sum)[2]) {
               multiply_of(how, tiles.height(t))(rows + tiles.start(t) * pairs, (const bf16*)w,
                                                 pairs, next, sum);
             });
}

}  // namespace

void linear(const bf16* x, int64_t ldx, int64_t m, int64_t k, const Linear* layers, int count,
            Format format, int threads) {
  (format == Format::int8 ? linear_int8 : linear_bf16)(x, ldx, m, k, layers, count, threads);
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
void epd_linear(const bf16* x, int64_t ldx, int64_t m, const void* weight, const bf16* bias,
                int64_t n, int64_t k, bf16* y, int64_t ldy, int64_t format, int threads) {
  const Linear layer{weight, bias, y, n, ldy};
  linear(x, ldx, m, k, &layer, 1, Format(format), threads);
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
