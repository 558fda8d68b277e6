// Linear layers, for the other kernels.
#pragma once
#include "common.h"

// How weights are packed.
enum class Format : int64_t { bf16 = 0, int8 = 1 };

// One packed weight [n, k], and where its product goes: y [m, n], rows `ldy` apart.
struct Linear {
  const void* weight;
  const bf16* bias;
  bf16* y;
  int64_t n, ldy;
};

// x [m, k], rows `ldx` apart, times each of `count` layers of one format: their panels are
// shared out between the threads together.
void linear(const bf16* x, int64_t ldx, int64_t m, int64_t k, const Linear* layers, int count,
            Format format, int threads);
void linear_int8(const bf16* x, int64_t ldx, int64_t m, int64_t k, const Linear* layers, int count,
                 int threads);

// A packed weight and its bias (or none).
struct Packed {
  const void* weight;
  const bf16* bias;
};
