// The register tile that all products are made of: up to 12 rows times 32 outputs.
#pragma once
#include "common.h"

constexpr int64_t PANEL = 32;    // outputs: two vectors of float
constexpr int MAX_ROWS = 12;     // 24 accumulators
constexpr int64_t AHEAD = 2048;  // bytes that a stream is prefetched ahead

// Rows are cut into tiles of nearly equal height.
struct Tiles {
  int64_t rows, count;
  explicit Tiles(int64_t m) : rows(m), count((m + MAX_ROWS - 1) / MAX_ROWS) {}
  int64_t start(int64_t tile) const { return rows * tile / count; }
  int height(int64_t tile) const { return int(start(tile + 1) - start(tile)); }
};

inline __m512bh load_bf16(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }

// How a tile prefetches while it computes: the stream ahead of itself, a share of the
// next panel, or not at all.
enum class Fetch { stream, share, none };

// Adds one panel times M rows to `sum`, for each output one chain over the pairs in order.
// x: [pairs][M]; w: [pairs][32][2]; share: where this tile's prefetches start.
template <int M, Fetch F>
void multiply(const int32_t* x, const bf16* w, int64_t pairs, const char* share, __m512 (*sum)[2]) {
  __m512 a[M][2];
  for (int m = 0; m < M; ++m) a[m][0] = sum[m][0], a[m][1] = sum[m][1];
  for (int64_t k = 0; k < pairs; ++k) {
    if (F == Fetch::stream) {
      _mm_prefetch((const char*)(w + k * 64) + AHEAD, _MM_HINT_T0);
      _mm_prefetch((const char*)(w + k * 64) + AHEAD + 64, _MM_HINT_T0);
    }
    if (F == Fetch::share) _mm_prefetch(share + k * 64, _MM_HINT_T1);
    const __m512bh w0 = load_bf16(w + k * 64), w1 = load_bf16(w + k * 64 + 32);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512bh b = (__m512bh)_mm512_set1_epi32(x[k * M + m]);
      a[m][0] = _mm512_dpbf16_ps(a[m][0], w0, b);
      a[m][1] = _mm512_dpbf16_ps(a[m][1], w1, b);
    }
  }
  for (int m = 0; m < M; ++m) sum[m][0] = a[m][0], sum[m][1] = a[m][1];
}

using Multiply = void (*)(const int32_t*, const bf16*, int64_t, const char*, __m512 (*)[2]);
template <Fetch F>
constexpr Multiply MULTIPLY[MAX_ROWS + 1] = {
    nullptr,         multiply<1, F>, multiply<2, F>, multiply<3, F>,  multiply<4, F>,
    multiply<5, F>,  multiply<6, F>, multiply<7, F>, multiply<8, F>,  multiply<9, F>,
    multiply<10, F>, multiply<11, F>, multiply<12, F>};
