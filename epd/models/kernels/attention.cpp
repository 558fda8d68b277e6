// Attention over the paged cache, bfloat16: no gathered copy of a sequence, no padding.
//
// A task is one key/value head and a few query tokens of one sequence with all their
// query heads: its "rows". A few rows (decode) are broadcast and meet panels of keys and
// values, packed as a linear layer's weights are; many rows (prefill) lie in the lanes
// (across.h), which takes 0.6 to 0.7 of the time.
//
// Both do the same operations on a row in the same order, which depend on the number of
// keys that it sees, alone: products are chains over the head size and over pairs of keys
// in order, so are the sums of weights, of even and odd keys apart, and keys that a neighbour sees but this row
// doesn't add exact zeros. So its bits are the same in every batch and chunk.
#include "attention.h"

#include "few_rows.h"
#include "many_rows.h"

namespace {

constexpr int64_t LEAST_ROWS = 64, MOST_ROWS = 128;  // of a task, or one token's
constexpr int64_t SCORES = 256 << 10;                // of a task, if it has more than the least
constexpr int64_t MANY = 24;                         // rows that are worth a panel

void write(bf16* cache, const bf16* x, int64_t token, int64_t head, int64_t dim, const Step& s,
           const Attention& l) {
  for (int64_t t = 0; t < s.writes; ++t)
    for (int64_t g = 0; g < l.groups; ++g)
      memcpy(cache + s.slot_block[t] * l.block_stride + (s.slot_offset[t] * l.groups + g) * dim,
             x + t * token + g * head, dim * sizeof(bf16));
}

// Neighbouring tokens of a sequence, a few at a time, for each key/value head: as many as
// have scores that stay in a core's cache.
std::vector<Task> tasks_of(const Step& s, const Attention& l) {
  const int64_t share = l.heads / l.groups;
  std::vector<Task> tasks;
  for (int64_t first = 0, next; first < s.rows; first = next) {
    const int64_t width = l.window ? std::min<int64_t>(s.seen[first], l.window) : s.seen[first];
    const int64_t rows = std::max(LEAST_ROWS, std::min(MOST_ROWS, SCORES / (width + KEYS)));
    next = first + 1;
    while (next < s.rows && (next + 1 - first) * share <= rows && s.table[next] == s.table[first])
      ++next;
    for (int64_t g = 0; g < l.groups; ++g) tasks.push_back({first, next - first, g});
  }
  return tasks;
}

}  // namespace

void attention(const Step& s, const Attention& l, int threads) {
  write(l.keys, l.k, l.k_token, l.k_head, l.d, s, l);
  write(l.values, l.v, l.v_token, l.v_head, l.e, s, l);
  const std::vector<Task> tasks = tasks_of(s, l);
  const int64_t count = tasks.size();
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i)
    if (tasks[i].tokens * (l.heads / l.groups) < MANY) FewRows(s, l, tasks[i]).run();
    else ManyRows(s, l, tasks[i]).run();
}

extern "C" void epd_attention(const Step* step, const Attention* layer, int threads) {
  attention(*step, *layer, threads);
}
