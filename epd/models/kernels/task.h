// A part of one forward's attention that a thread does alone.
#pragma once
#include "across.h"
#include "attention.h"

constexpr int64_t KEYS = 32;  // a row's first key is looked for in steps of so many

// Query tokens [first, first + tokens) of one sequence.
struct Task {
  int64_t first, tokens, group;
};

// Memory of a thread, kept for the next task.
template <class T, int WHICH>
T* memory_for(int64_t count) {
  return aligned_memory<Task, T, WHICH>(count);
}

// One task's rows, and what of the cache they see.
class Rows {
 public:
  Rows(const Step& s, const Attention& l, const Task& task)
      : s(s), l(l), task(task), share(l.heads / l.groups), rows(task.tokens * share),
        pairs((l.d + 1) / 2), blocks(s.blocks + s.table[task.first]),
        end(s.seen[task.first + task.tokens - 1]), begin(first_key(0) / KEYS * KEYS),
        scale(exponent_scale(l.scale)) {}

 protected:
  const Step& s;
  const Attention& l;
  const Task task;
  const int64_t share, rows, pairs;
  const int32_t* blocks;
  const int64_t end, begin;  // keys of the whole task
  const __m512 scale;

  int64_t token(int64_t row) const { return task.first + row / share; }
  int64_t head(int64_t row) const { return task.group * share + row % share; }
  int64_t seen(int64_t row) const { return s.seen[token(row)]; }
  int64_t first_key(int64_t row) const {
    return l.window ? std::max<int64_t>(0, seen(row) - l.window) : 0;
  }
  const bf16* query(int64_t row) const {
    return l.q + token(row) * l.q_token + head(row) * l.q_head;
  }
  bf16* out(int64_t row) const { return l.out + (token(row) * l.heads + head(row)) * l.e; }

  // Addresses of `count` keys or values from `start` on; null from `end` on.
  void keys(int64_t start, int64_t count, const bf16** out) const {
    places(l.keys + task.group * l.d, l.groups * l.d, start, count, out);
  }
  void values(int64_t start, int64_t count, const bf16** out) const {
    places(l.values + task.group * l.e, l.groups * l.e, start, count, out);
  }

 private:
  void places(const bf16* base, int64_t stride, int64_t start, int64_t count,
              const bf16** out) const {
    int64_t block = start / s.block_tokens, offset = start % s.block_tokens;
    for (int64_t j = 0; j < count; ++j) {
      out[j] = start + j < end ? base + blocks[block] * l.block_stride + offset * stride : nullptr;
      if (++offset == s.block_tokens) offset = 0, ++block;
    }
  }
};
