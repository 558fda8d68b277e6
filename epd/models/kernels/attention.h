// Attention over the paged cache, for the other kernels.
#pragma once
#include "common.h"

// What all layers of one forward share.
struct Step {
  // One entry for each query token:
  const int32_t* seen;   // keys that it sees: those at places [0, seen)
  const int32_t* table;  // where its sequence's blocks start in `blocks`
  const int32_t* blocks;
  // One entry for each new token whose keys and values are written:
  const int32_t* slot_block;
  const int32_t* slot_offset;
  int64_t rows, writes, block_tokens;
};

// One layer of one forward.
struct Attention {
  bf16 *keys, *values;  // [blocks][block_tokens][G][D or E]; blocks lie `block_stride` apart
  int64_t block_stride, heads, groups, d, e;
  const bf16 *q, *k, *v;  // new tokens; (token, head) strides in elements
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  bf16* out;  // [rows][heads][e]
  float scale;
  int64_t window;  // keys that a token sees at most; 0: all
};

// Writes the new keys and values, then attends.
void attention(const Step& step, const Attention& layer, int threads);
