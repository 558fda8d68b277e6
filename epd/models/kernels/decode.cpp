// A whole decode step in one call: embedding, layers, norm, head and the best of each row of
// logits. A row's bits depend on that row and its sequence alone.
#include "attention.h"
#include "linear.h"
#include "rows.h"

extern "C" {

void epd_layers(const void* const* weights, int64_t layers, const Step* step, int64_t rows,
                const bf16* x, const bf16* cos, const bf16* sin, bf16* const* keys,
                bf16* const* values, const int64_t* block_stride, bf16* y, bf16* spare,
                const int64_t* kept, int64_t count, int threads);
void epd_best(const bf16* x, int64_t rows, int64_t n, int64_t* best);

struct Decoder {
  const void* const* layers;
  const bf16 *embedding, *norm;
  Packed head;
  int64_t count, hidden, vocabulary, d;
  Format format;
  float epsilon;
};

// out [rows][n]: norms of x's rows.
void epd_norm(const bf16* x, const bf16* weight, float epsilon, int64_t rows, int64_t n, bf16* out,
              int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 16)
  for (int64_t t = 0; t < rows; ++t) norm(x + t * n, weight, epsilon, n, out + t * n);
}

// One token each of `rows` sequences. cos, sin: a row of d for each rotary position. keys,
// values, block_stride: of each layer. logits: [rows][vocabulary]; best: as epd_best's.
void epd_decode(const Decoder* decoder, const Step* step, int64_t rows, const int64_t* ids,
                const int64_t* positions, const bf16* cos, const bf16* sin, bf16* const* keys,
                bf16* const* values, const int64_t* block_stride, bf16* logits, int64_t* best,
                int threads) {
  const Decoder& m = *decoder;
  std::vector<bf16> memory(rows * (3 * m.hidden + 2 * m.d));
  bf16 *x = memory.data(), *y = x + rows * m.hidden, *spare = y + rows * m.hidden;
  bf16 *own_cos = spare + rows * m.hidden, *own_sin = own_cos + rows * m.d;
  for (int64_t t = 0; t < rows; ++t) {
    memcpy(x + t * m.hidden, m.embedding + ids[t] * m.hidden, m.hidden * sizeof(bf16));
    memcpy(own_cos + t * m.d, cos + positions[t] * m.d, m.d * sizeof(bf16));
    memcpy(own_sin + t * m.d, sin + positions[t] * m.d, m.d * sizeof(bf16));
  }
  epd_layers(m.layers, m.count, step, rows, x, own_cos, own_sin, keys, values, block_stride, y,
             spare, nullptr, -1, threads);
  epd_norm(y, m.norm, m.epsilon, rows, m.hidden, x, threads);
  const Linear head{m.head.weight, m.head.bias, logits, m.vocabulary, m.vocabulary};
  linear(x, m.hidden, rows, m.hidden, &head, 1, m.format, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t t = 0; t < rows; ++t)
    epd_best(logits + t * m.vocabulary, 1, m.vocabulary, best + t);
}
}
