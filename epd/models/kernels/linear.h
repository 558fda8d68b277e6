// Linear layers, for the other kernels.
#pragma once
#include "common.h"

// One packed weight [n, k], and where its product goes: y [m, n], rows `ldy` apart.
struct Linear {
  const bf16 *weight, *bias;
  bf16* y;
  int64_t n, ldy;
};

// x [m, k], rows `ldx` apart, times each of `count` layers: their panels are shared out
// between the threads together.
void linear(const bf16* x, int64_t ldx, int64_t m, int64_t k, const Linear* layers, int count,
            int threads);
