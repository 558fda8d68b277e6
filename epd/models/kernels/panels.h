// How a product of many outputs and rows is cut up: panels of outputs go to threads and
// stay in a core's cache, tiles of rows go to registers.
#pragma once
#include "linear.h"
#include "tile.h"

inline int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

// Memory of this thread for `count` values; kept for the next call.
template <class T>
T* scratch(int64_t count) {
  thread_local std::vector<T> memory;
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// Sums of one tile and panel, plus the bias, to y.
inline void store(const Linear& c, int64_t panel, int64_t row, int height,
                  const __m512 (*sum)[2]) {
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

// One tile of rows times one panel of `panel_bytes`. `multiply(tile, how, weight, next, sum)`
// adds the product to `sum`, and fetches ahead as `how` says; `next` is where it begins to.
// The first two tiles fetch the panel that lies `ahead` panels further on, a half each.
template <class Multiply>
void run_panel(const Linear& c, const Tiles& tiles, int64_t panel, int64_t panel_bytes, int64_t t,
               int64_t ahead, Multiply multiply) {
  const Fetch how = tiles.count == 1 ? Fetch::stream : t < 2 && ahead ? Fetch::share : Fetch::none;
  const char* weight = (const char*)c.weight + panel * panel_bytes;
  __m512 sum[MAX_ROWS][2];
  for (int m = 0; m < tiles.height(t); ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
  multiply(t, how, weight, weight + ahead * panel_bytes + t * panel_bytes / 2, sum);
  store(c, panel, tiles.start(t), tiles.height(t), sum);
}

// Panels [from, end) of one layer times every tile of rows. With many rows they stay in L2 over
// all tiles, beside those that this thread will probably get next, which are fetched meanwhile.
template <class Multiply>
void run_share(const Linear& c, const Tiles& tiles, int64_t from, int64_t end,
               int64_t panel_bytes, int threads, Multiply multiply) {
  const int64_t last = panels_of(c.n) - 1;
  if (tiles.count <= 2) {
    for (int64_t panel = from; panel < end; ++panel)
      for (int64_t t = 0; t < tiles.count; ++t)
        run_panel(c, tiles, panel, panel_bytes, t, panel < last, multiply);
    return;
  }
  const int64_t ahead = (end - from) * threads;
  for (int64_t t = 0; t < tiles.count; ++t)
    for (int64_t panel = from; panel < end; ++panel)
      run_panel(c, tiles, panel, panel_bytes, t, panel + ahead <= last ? ahead : 0, multiply);
}

// Every tile of rows times every panel of all layers. Shares of neighbouring panels go to
// whichever thread is free: one that something else on the machine holds up holds the others
// up for a share at most. Their number is a multiple of the threads'.
template <class Multiply>
void run_panels(const Linear* layers, int count, const Tiles& tiles, int64_t panel_bytes,
                int threads, Multiply multiply) {
  constexpr int64_t SHARE_BYTES = 384 << 10, FEW_ROWS = 8;
  int64_t panels = 0;
  for (int i = 0; i < count; ++i) panels += panels_of(layers[i].n);
  const int64_t rounds = tiles.count <= 2 ? FEW_ROWS : panels * panel_bytes / SHARE_BYTES / threads;
  const int64_t shares = std::min(panels, threads * std::max<int64_t>(1, rounds));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t i = 0; i < shares; ++i) {
    // A share may span two layers.
    int64_t from = panels * i / shares, to = panels * (i + 1) / shares, first = 0;
    for (const Linear* layer = layers; from < to; first += panels_of(layer->n), ++layer) {
      const int64_t end = std::min(to, first + panels_of(layer->n));
      if (from >= end) continue;
      run_share(*layer, tiles, from - first, end - first, panel_bytes, threads, multiply);
      from = end;
    }
  }
}
