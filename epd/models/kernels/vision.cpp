// One layer of a vision tower, bfloat16, in one call:
//
//   h = x + o(attention(rotate(q), rotate(k), v)),  q, k, v = projections of norm(x)
//   y = h + down(act(up(norm(h))))  or  h + down(act(gate(norm(h))) * up(norm(h)))
//
// Everything is rounded to bfloat16 where transformers' own layers round it, and computed
// row by row: a row's bits depend on that row and its picture alone.
#include "dense.h"
#include "linear.h"
#include "rows.h"

namespace {

enum class Activation : int64_t { silu = 0, quick_gelu = 1, gelu_tanh = 2 };

struct Norm {
  const bf16 *weight, *bias;  // without bias: RMSNorm
  float epsilon;
};

struct Weights {
  Packed q, k, v, o, gate, up, down;  // q may be all three, gate may be none: weight is null
  Norm outer, inner;
  int64_t hidden, wide, heads, d;  // wide: of the inner layer
  Activation activation;
  float scale;
};

// Memory of one thread's forward; kept for the next layer.
bf16* memory_for(int64_t count) {
  thread_local std::vector<bf16> memory;
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// Ba et al. 2016, "Layer Normalization".
void layer_norm(const bf16* x, const Norm& norm, int64_t n, bf16* out) {
  __m512 sum = _mm512_setzero_ps(), squares = sum;
  for (int64_t i = 0; i < n; i += 16) sum = _mm512_add_ps(sum, load(x + i, lanes(n - i)));
  const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / float(n));
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 a = _mm512_maskz_sub_ps(lanes(n - i), load(x + i, lanes(n - i)), mean);
    squares = _mm512_fmadd_ps(a, a, squares);
  }
  const float variance = _mm512_reduce_add_ps(squares) / float(n);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(variance + norm.epsilon));
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = lanes(n - i);
    const __m512 a = _mm512_mul_ps(_mm512_sub_ps(load(x + i, mask), mean), scale);
    save(out + i, mask, _mm512_fmadd_ps(a, load(norm.weight + i, mask), load(norm.bias + i, mask)));
  }
}

// Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", its two approximations, in place.
void activate(bf16* x, Activation how, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = lanes(n - i);
    const __m512 a = load(x + i, mask);
    if (how == Activation::quick_gelu) {
      const __m512 b = rounded(_mm512_mul_ps(a, _mm512_set1_ps(1.702f)));
      save(x + i, mask, _mm512_mul_ps(a, rounded(sigmoid(b))));
    } else if (how == Activation::gelu_tanh) {  // (1 + tanh(b)) / 2 = sigmoid(2 b)
      const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(a, a), a);
      const __m512 b = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), a);
      save(x + i, mask, _mm512_mul_ps(a, sigmoid(_mm512_mul_ps(b, _mm512_set1_ps(1.59576912f)))));
    } else {
      save(x + i, mask, _mm512_mul_ps(a, sigmoid(a)));
    }
  }
}

void normalize(const bf16* x, const Norm& by, int64_t n, bf16* out) {
  if (by.bias) layer_norm(x, by, n, out);
  else norm(x, by.weight, by.epsilon, n, out);
}

void norm_rows(const bf16* x, const Norm& by, int64_t n, int64_t rows, bf16* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 16)
  for (int64_t t = 0; t < rows; ++t) normalize(x + t * n, by, n, out + t * n);
}

// sum = x + y, y = norm(sum).
void add_and_norm_rows(const bf16* x, bf16* y, const Norm& by, int64_t n, int64_t rows, bf16* sum,
                       int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 16)
  for (int64_t t = 0; t < rows; ++t) {
    add(x + t * n, y + t * n, n, sum + t * n);
    normalize(sum + t * n, by, n, y + t * n);
  }
}

void add_rows(const bf16* x, const bf16* y, int64_t n, int64_t rows, bf16* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 16)
  for (int64_t t = 0; t < rows; ++t) add(x + t * n, y + t * n, n, out + t * n);
}

// The inner layer of normed [rows][hidden] to out, which may be normed; up, and gate behind
// it, is memory.
void feed_forward(const Weights& w, int64_t rows, const bf16* normed, bf16* up, bf16* out,
                  int threads) {
  bf16* gate = up + rows * w.wide;
  const Linear both[] = {{w.up.weight, w.up.bias, up, w.wide, w.wide},
                         {w.gate.weight, w.gate.bias, gate, w.wide, w.wide}};
  linear(normed, w.hidden, rows, w.hidden, both, w.gate.weight ? 2 : 1, Format::bf16, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t t = 0; t < rows; ++t)
    if (w.gate.weight) gated(gate + t * w.wide, up + t * w.wide, w.wide, up + t * w.wide);
    else activate(up + t * w.wide, w.activation, w.wide);
  const Linear down{w.down.weight, w.down.bias, out, w.hidden, w.hidden};
  linear(up, w.wide, rows, w.wide, &down, 1, Format::bf16, threads);
}

}  // namespace

extern "C" {

// x [rows][hidden] to y, which may not be x. starts: [count + 1], see dense.h. cos, sin:
// [rows][d], or null.
void epd_vision_layer(const Weights* weights, const int64_t* starts, int64_t count, const bf16* x,
                      const float* cos, const float* sin, bf16* y, int threads) {
  const Weights& w = *weights;
  const int64_t rows = starts[count], size = w.heads * w.d, all = 3 * size;
  const int64_t inner = w.wide * (w.gate.weight ? 2 : 1);
  bf16* normed = memory_for(rows * (w.hidden + std::max(all + size, inner)));
  bf16 *qkv = normed + rows * w.hidden, *mixed = qkv + rows * all;
  norm_rows(x, w.outer, w.hidden, rows, normed, threads);
  const bool one = !w.k.weight;
  const Linear projections[] = {{w.q.weight, w.q.bias, qkv, one ? all : size, all},
                                {w.k.weight, w.k.bias, qkv + size, size, all},
                                {w.v.weight, w.v.bias, qkv + 2 * size, size, all}};
  linear(normed, w.hidden, rows, w.hidden, projections, one ? 1 : 3, Format::bf16, threads);
  const Dense dense{qkv, qkv + size, qkv + 2 * size, all, w.d, all, w.d, all, w.d, starts, count,
                    w.heads, w.d, w.d, cos, sin, mixed, w.scale};
  dense_attention(dense, threads);
  const Linear output{w.o.weight, w.o.bias, normed, w.hidden, w.hidden};
  linear(mixed, size, rows, size, &output, 1, Format::bf16, threads);
  add_and_norm_rows(x, normed, w.inner, w.hidden, rows, y, threads);
  feed_forward(w, rows, normed, qkv, normed, threads);
  add_rows(y, normed, w.hidden, rows, y, threads);
}
}
