// What the kernels share. Plain C ABI, no torch headers: compiles in seconds.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef uint16_t bf16;

// 16 bfloat16 to float.
inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// 2^x to 3e-6, a thousandth of what rounding to bfloat16 takes; exactly 0 far below. The
// polynomial is 2^r for the fraction r, of least relative error.
inline __m512 exp2_of(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.013534168062386604f);
  for (const float c : {0.05201146029931644f, 0.2414427570980054f, 0.6930038344324978f,
                        1.0000025933692647f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}
