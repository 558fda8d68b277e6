// Attention over the paged cache, bfloat16, row by row: no gathered copy, no padding.
//
// One task is one query token and one key/value head with all its query heads. Its
// operations and their order depend on that token alone: on how many keys it sees, not
// on the batch, the chunk or the blocks. So its bits are the same in every batch.
#include "attention.h"

namespace {

constexpr int MAX_HEADS = 8;  // query heads of one pass; more are done in several
constexpr int TILE = 16;      // keys whose scores fill one vector

void write(bf16* cache, const bf16* x, int64_t token, int64_t head, int64_t dim, const Step& s,
           const Attention& l) {
  for (int64_t t = 0; t < s.writes; ++t)
    for (int64_t g = 0; g < l.groups; ++g)
      memcpy(cache + s.slot_block[t] * l.block_stride + (s.slot_offset[t] * l.groups + g) * dim,
             x + t * token + g * head, dim * sizeof(bf16));
}

// Addresses of a sequence's rows of one head, key by key.
struct Rows {
  const bf16* base;
  const int32_t* blocks;
  int64_t block_tokens, block_stride, token_stride;
  const bf16* at(int64_t place) const {
    const uint32_t size = uint32_t(block_tokens), block = uint32_t(place) / size;
    return base + blocks[block] * block_stride + (uint32_t(place) - block * size) * token_stride;
  }
  // Keys from `place` to the end of its block, at most up to `to`: they lie evenly.
  int64_t run(int64_t place, int64_t to) const {
    return std::min(to - place, block_tokens - place % block_tokens);
  }
};

inline __m512 pair_sum(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
inline __m512 quad_sum(__m512 a, __m512 b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
template <int A, int B>
inline __m512 lane_sum(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, A), _mm512_shuffle_f32x4(a, b, B));
}

// The sums of 16 vectors, in order, by a fixed tree.
inline __m512 sums(const __m512* x) {
  __m512 four[4];
  for (int i = 0; i < 4; ++i) {
    const __m512* y = x + 4 * i;
    four[i] = quad_sum(pair_sum(y[0], y[1]), pair_sum(y[2], y[3]));
  }
  const __m512 low = lane_sum<0x88, 0xdd>(four[0], four[1]);
  const __m512 high = lane_sum<0x88, 0xdd>(four[2], four[3]);
  return lane_sum<0x88, 0xdd>(low, high);
}

// Scores of `heads` query heads for the keys [from, to): score[head * stride + key - from].
// q: [heads][chunks of 32], zero beyond d. Places up to the next multiple of TILE get -inf.
void scores(const bf16* q, int heads, int64_t d, const Rows& keys, int64_t from, int64_t to,
            float scale, float* score, int64_t stride) {
  const int64_t chunks = (d + 31) / 32;
  const __mmask32 last = d % 32 ? (__mmask32(1) << d % 32) - 1 : ~__mmask32(0);
  for (int64_t start = from; start < to; start += TILE) {
    const int count = int(std::min<int64_t>(TILE, to - start));
    const bf16* row[TILE];
    for (int j = 0; j < TILE; ++j) row[j] = keys.at(start + std::min(j, count - 1));
    for (int h = 0; h < heads; ++h) {
      __m512 a[TILE];
      for (int j = 0; j < TILE; ++j) a[j] = _mm512_setzero_ps();
      for (int64_t c = 0; c < chunks; ++c) {
        const __m512bh query = (__m512bh)_mm512_loadu_si512(q + (h * chunks + c) * 32);
        const __mmask32 mask = c + 1 < chunks ? ~__mmask32(0) : last;
#pragma GCC unroll 16
        for (int j = 0; j < TILE; ++j)
          a[j] = _mm512_dpbf16_ps(
              a[j], query, (__m512bh)_mm512_maskz_loadu_epi16(mask, row[j] + 32 * c));
      }
      const __mmask16 there = __mmask16((1u << count) - 1);
      const __m512 scaled = _mm512_mul_ps(sums(a), _mm512_set1_ps(scale));
      const __m512 none = _mm512_set1_ps(-INFINITY);
      _mm512_storeu_ps(score + h * stride + start - from,
                       _mm512_mask_mov_ps(none, there, scaled));
    }
  }
}

// Scores to weights exp(score - largest), in place; returns their sum. n: multiple of TILE.
float weights(float* score, int64_t n) {
  __m512 largest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
  for (int64_t j = 0; j < n; j += TILE)
    largest = _mm512_max_ps(largest, _mm512_loadu_ps(score + j));
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (int64_t j = 0; j < n; j += TILE) {
    const __m512 w = exp_of(_mm512_sub_ps(_mm512_loadu_ps(score + j), top));
    _mm512_storeu_ps(score + j, w);
    total = _mm512_add_ps(total, w);
  }
  return _mm512_reduce_add_ps(total);
}

// out[h][32 columns] = sum over the keys of weight * value, times inverse[h].
template <int H>
void mix(const float* weight, int64_t stride, const Rows& values, int64_t from, int64_t to,
         int64_t column, __mmask32 mask, const float* inverse, bf16* out, int64_t out_stride) {
  __m512 a[H][2];
  for (int h = 0; h < H; ++h) a[h][0] = a[h][1] = _mm512_setzero_ps();
  for (int64_t start = from; start < to;) {
    const bf16* value = values.at(start) + column;
    for (int64_t left = values.run(start, to); left > 0; --left, ++start) {
      const __m512i x = _mm512_maskz_loadu_epi16(mask, value);
      const __m512 v0 = widen(_mm512_castsi512_si256(x));
      const __m512 v1 = widen(_mm512_extracti64x4_epi64(x, 1));
#pragma GCC unroll 8
      for (int h = 0; h < H; ++h) {
        const __m512 w = _mm512_set1_ps(weight[h * stride + start - from]);
        a[h][0] = _mm512_fmadd_ps(w, v0, a[h][0]);
        a[h][1] = _mm512_fmadd_ps(w, v1, a[h][1]);
      }
      value += values.token_stride;
    }
  }
  for (int h = 0; h < H; ++h) {
    const __m512 scale = _mm512_set1_ps(inverse[h]);
    const __m512bh y =
        _mm512_cvtne2ps_pbh(_mm512_mul_ps(a[h][1], scale), _mm512_mul_ps(a[h][0], scale));
    _mm512_mask_storeu_epi16(out + h * out_stride + column, mask, (__m512i)y);
  }
}

using Mix = void (*)(const float*, int64_t, const Rows&, int64_t, int64_t, int64_t, __mmask32,
                     const float*, bf16*, int64_t);
constexpr Mix MIX[MAX_HEADS + 1] = {nullptr, mix<1>, mix<2>, mix<3>, mix<4>,
                                    mix<5>,  mix<6>, mix<7>, mix<8>};

// Query heads [first, first + heads) of one token, which share a key/value head.
void attend(const Step& s, const Attention& l, int64_t row, int64_t group, int64_t first, int heads) {
  const int64_t to = s.seen[row], from = l.window ? std::max<int64_t>(0, to - l.window) : 0;
  const int64_t chunks = (l.d + 31) / 32, stride = (to - from + TILE - 1) / TILE * TILE;
  thread_local std::vector<float> memory;
  thread_local std::vector<bf16> queries;
  if (int64_t(memory.size()) < heads * stride) memory.resize(heads * stride);
  queries.assign(heads * chunks * 32, 0);
  for (int h = 0; h < heads; ++h)
    memcpy(&queries[h * chunks * 32], l.q + row * l.q_token + (first + h) * l.q_head,
           l.d * sizeof(bf16));
  const int32_t* blocks = s.blocks + s.table[row];
  const int64_t k_token = l.groups * l.d, v_token = l.groups * l.e;
  const Rows keys{l.keys + group * l.d, blocks, s.block_tokens, l.block_stride, k_token};
  const Rows values{l.values + group * l.e, blocks, s.block_tokens, l.block_stride, v_token};
  scores(queries.data(), heads, l.d, keys, from, to, l.scale, memory.data(), stride);
  float inverse[MAX_HEADS];
  for (int h = 0; h < heads; ++h) inverse[h] = 1.0f / weights(&memory[h * stride], stride);
  bf16* out = l.out + (row * l.heads + first) * l.e;
  for (int64_t column = 0; column < l.e; column += 32) {
    const int64_t left = l.e - column;
    const __mmask32 mask = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
    MIX[heads](memory.data(), stride, values, from, to, column, mask, inverse, out, l.e);
  }
}

}  // namespace

void attention(const Step& s, const Attention& l, int threads) {
  write(l.keys, l.k, l.k_token, l.k_head, l.d, s, l);
  write(l.values, l.v, l.v_token, l.v_head, l.e, s, l);
  const int64_t tasks = s.rows * l.groups, share = l.heads / l.groups;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t row = task / l.groups, group = task % l.groups;
    if (s.seen[row] == 0) {
      memset(l.out + (row * l.heads + group * share) * l.e, 0, share * l.e * sizeof(bf16));
      continue;
    }
    for (int64_t h = 0; h < share; h += MAX_HEADS)
      attend(s, l, row, group, group * share + h, int(std::min<int64_t>(MAX_HEADS, share - h)));
  }
}
extern "C" void epd_attention(const Step* step, const Attention* layer, int threads) {
  attention(*step, *layer, threads);
}
