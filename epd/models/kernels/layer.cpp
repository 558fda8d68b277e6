// One decoder layer of the Llama kind, bfloat16, in one call:
//
//   h = x + o(attention(rotate(q), rotate(k), v)),  q, k, v = projections of norm(x)
//   y = h + down(silu(gate(norm(h))) * up(norm(h)))
//
// Everything is rounded to bfloat16 where transformers' own layers round it, and
// computed row by row: a row's bits depend on that row and its sequence alone.
#include "attention.h"
#include "linear.h"
#include "rows.h"

namespace {

struct Weights {
  Packed q, k, v, o, gate, up, down;
  const bf16 *input_norm, *inner_norm, *q_norm, *k_norm;  // the last two may be null
  int64_t hidden, inner, heads, groups, d, window;
  Format format;
  float epsilon, scale;
};

// Memory of one thread's forward; kept for the next layer.
bf16* memory_for(int64_t count) {
  thread_local std::vector<bf16> memory;
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

void norm_rows(const bf16* x, const bf16* weight, const Weights& w, int64_t rows, bf16* out,
               int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 16)
  for (int64_t t = 0; t < rows; ++t)
    norm(x + t * w.hidden, weight, w.epsilon, w.hidden, out + t * w.hidden);
}

void add_rows(const bf16* x, const bf16* y, const Weights& w, int64_t rows, bf16* out,
              int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 16)
  for (int64_t t = 0; t < rows; ++t)
    add(x + t * w.hidden, y + t * w.hidden, w.hidden, out + t * w.hidden);
}

// The query and key heads of one row.
void prepare_heads(bf16* x, const bf16* weight, int64_t heads, const Weights& w, const bf16* cos,
                   const bf16* sin) {
  for (int64_t h = 0; h < heads; ++h) {
    if (weight) norm(x + h * w.d, weight, w.epsilon, w.d, x + h * w.d);
    rotate(x + h * w.d, cos, sin, w.d);
  }
}

// What follows attention, whose result is mixed [rows][heads * d]; normed and the memory
// behind it may hold it, since it is read before they are written.
void finish(const Weights& w, int64_t rows, const bf16* x, const bf16* mixed, bf16* normed,
            bf16* y, int threads) {
  const int64_t q_size = w.heads * w.d;
  const Linear output{w.o.weight, w.o.bias, normed, w.hidden, w.hidden};
  linear(mixed, q_size, rows, q_size, &output, 1, w.format, threads);
  add_rows(x, normed, w, rows, y, threads);

  norm_rows(y, w.inner_norm, w, rows, normed, threads);
  bf16 *gate = normed + rows * w.hidden, *up = gate + rows * w.inner;
  const Linear both[] = {{w.gate.weight, w.gate.bias, gate, w.inner, w.inner},
                         {w.up.weight, w.up.bias, up, w.inner, w.inner}};
  linear(normed, w.hidden, rows, w.hidden, both, 2, w.format, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t t = 0; t < rows; ++t)
    gated(gate + t * w.inner, up + t * w.inner, w.inner, gate + t * w.inner);
  const Linear down{w.down.weight, w.down.bias, normed, w.hidden, w.hidden};
  linear(gate, w.inner, rows, w.inner, &down, 1, w.format, threads);
  add_rows(y, normed, w, rows, y, threads);
}

// The same for the count rows of kept alone; the other rows of y are zero.
void finish_kept(const Weights& w, int64_t rows, const int64_t* kept, int64_t count,
                 const bf16* x, const bf16* mixed, bf16* normed, bf16* y, int threads) {
  memset(y, 0, rows * w.hidden * sizeof(bf16));
  if (count == 0) return;
  const int64_t q_size = w.heads * w.d;
  std::vector<bf16> memory(count * (q_size + 2 * w.hidden));
  bf16 *own_mixed = memory.data(), *own_x = own_mixed + count * q_size,
       *own_y = own_x + count * w.hidden;
  for (int64_t i = 0; i < count; ++i) {
    memcpy(own_mixed + i * q_size, mixed + kept[i] * q_size, q_size * sizeof(bf16));
    memcpy(own_x + i * w.hidden, x + kept[i] * w.hidden, w.hidden * sizeof(bf16));
  }
  finish(w, count, own_x, own_mixed, normed, own_y, threads);
  for (int64_t i = 0; i < count; ++i)
    memcpy(y + kept[i] * w.hidden, own_y + i * w.hidden, w.hidden * sizeof(bf16));
}

}  // namespace

extern "C" {

// x [rows][hidden] to y, which may not be x. cos, sin: [rows][d]. keys, values: the
// layer's part of the pool. Rows beyond step->rows are padding and attend to nothing.
// kept: the count rows whose y is wanted, the others' keys and values are written all the
// same; a count of -1: all rows.
void epd_layer(const Weights* weights, const Step* step, int64_t rows, const bf16* x,
               const bf16* cos, const bf16* sin, bf16* keys, bf16* values, int64_t block_stride,
               bf16* y, const int64_t* kept, int64_t count, int threads) {
  const Weights& w = *weights;
  const int64_t q_size = w.heads * w.d, k_size = w.groups * w.d, wide = q_size + 2 * k_size;
  bf16* normed = memory_for(rows * (w.hidden + std::max(wide + q_size, 2 * w.inner)));
  bf16* qkv = normed + rows * w.hidden;
  bf16* mixed = qkv + rows * wide;
  norm_rows(x, w.input_norm, w, rows, normed, threads);
  const Linear projections[] = {
      {w.q.weight, w.q.bias, qkv, q_size, wide},
      {w.k.weight, w.k.bias, qkv + q_size, k_size, wide},
      {w.v.weight, w.v.bias, qkv + q_size + k_size, k_size, wide}};
  linear(normed, w.hidden, rows, w.hidden, projections, 3, w.format, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 16)
  for (int64_t t = 0; t < rows; ++t) {
    prepare_heads(qkv + t * wide, w.q_norm, w.heads, w, cos + t * w.d, sin + t * w.d);
    prepare_heads(qkv + t * wide + q_size, w.k_norm, w.groups, w, cos + t * w.d, sin + t * w.d);
  }
  const Attention a{keys, values, block_stride, w.heads, w.groups, w.d, w.d,
                    qkv, qkv + q_size, qkv + q_size + k_size,
                    wide, w.d, wide, w.d, wide, w.d, mixed, w.scale, w.window};
  attention(*step, a, threads);
  memset(mixed + step->rows * q_size, 0, (rows - step->rows) * q_size * sizeof(bf16));
  if (count < 0) finish(w, rows, x, mixed, normed, y, threads);
  else finish_kept(w, rows, kept, count, x, mixed, normed, y, threads);
}

// `layers` of them one after another, x to y. spare: [rows][hidden], for what is between them.
// keys, values: of each layer, with its block_stride. kept: of the last layer.
void epd_layers(const Weights* const* weights, int64_t layers, const Step* step, int64_t rows,
                const bf16* x, const bf16* cos, const bf16* sin, bf16* const* keys,
                bf16* const* values, const int64_t* block_stride, bf16* y, bf16* spare,
                const int64_t* kept, int64_t count, int threads) {
  for (int64_t i = 0; i < layers; ++i) {
    const bool last = i == layers - 1;
    bf16* out = (layers - i) % 2 ? y : spare;
    epd_layer(weights[i], step, rows, x, cos, sin, keys[i], values[i], block_stride[i], out,
              last ? kept : nullptr, last ? count : -1, threads);
    x = out;
  }
}
}
