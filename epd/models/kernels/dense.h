// Attention where every token of a sequence sees all of it: vision towers.
#pragma once
#include "common.h"

struct Dense {
  const bf16 *q, *k, *v;  // (token, head) strides in elements
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  const int64_t* starts;  // [count + 1] first tokens of the sequences, in order, and the end
  int64_t count, heads, d, e;
  const float *cos, *sin;  // [tokens][d] for q and k; null: they are not rotated
  bf16* out;               // [tokens][heads][e]
  float scale;             // more than 0
};

void dense_attention(const Dense& dense, int threads);
