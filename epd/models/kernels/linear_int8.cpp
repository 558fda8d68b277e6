// Linear layers on int8 weights, on CPUs with AVX512_VNNI.
//
// A weight is an integer of [-127, 127] times a bfloat16 scale for each output and group
// of 128 inputs. Packed by panels of 32 outputs: [N/32][K/128]{[64][32][2] int8, [32]
// bfloat16 scales}, front to back as a call reads them.
//
// Activations stay what they are: the 128 of a group are written as 16-bit integers times
// a power of two, which is exact for those within 2^-7 of the group's largest, and for
// smaller ones rounds at 2^-15 of it. Products are then exact integer sums over a group;
// groups are added in single precision, in order. So a row's bits depend on that row alone.
#include "panels.h"

namespace {

constexpr int64_t GROUP = 128, PAIRS = GROUP / 2;
constexpr int64_t SCALES = PAIRS * PANEL * 2;           // where a group's scales lie in it
constexpr int64_t GROUP_BYTES = SCALES + PANEL * sizeof(bf16);
constexpr int LEAST_EXPONENT = 30;                      // smaller numbers round to fewer bits
constexpr int NOT_FINITE = 255;

inline int64_t groups_of(int64_t k) { return (k + GROUP - 1) / GROUP; }

// sum += products of pairs. GCC 12 copies the accumulator of _mm512_dpwssd_epi32 around, and
// spills most of a tile's: half of the speed.
inline void add_products(__m512i& sum, __m512i w, __m512i x) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
}

template <int M, Fetch F>
void multiply_int8(const int32_t* x, const float* unit, const char* w, int64_t groups,
                   const char* share, __m512 (*sum)[2]) {
  for (int64_t g = 0; g < groups; ++g, w += GROUP_BYTES, x += PAIRS * M, unit += M) {
    __m512i a[M][2];
    for (int m = 0; m < M; ++m) a[m][0] = a[m][1] = _mm512_setzero_si512();
    for (int64_t p = 0; p < PAIRS; ++p) {
      const char* pair = w + p * 64;
      if (F == Fetch::stream) _mm_prefetch(pair + AHEAD, _MM_HINT_T0);
      if (F == Fetch::share && p % 2) _mm_prefetch(share + (g * PAIRS + p) * 32, _MM_HINT_T1);
      const __m512i w0 = _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i*)pair));
      const __m512i w1 = _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i*)(pair + 32)));
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512i b = _mm512_set1_epi32(x[p * M + m]);
        add_products(a[m][0], w0, b);
        add_products(a[m][1], w1, b);
      }
    }
    const __m256i* scales = (const __m256i*)(w + SCALES);
    const __m512 s0 = widen(_mm256_load_si256(scales)), s1 = widen(_mm256_load_si256(scales + 1));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512 u = _mm512_set1_ps(unit[m]);
      sum[m][0] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(a[m][0]), u), s0, sum[m][0]);
      sum[m][1] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(a[m][1]), u), s1, sum[m][1]);
    }
  }
}

using MultiplyInt8 = void (*)(const int32_t*, const float*, const char*, int64_t, const char*,
                              __m512 (*)[2]);
template <Fetch F>
constexpr MultiplyInt8 MULTIPLY_INT8[MAX_ROWS + 1] = {
    nullptr,
    multiply_int8<1, F>,  multiply_int8<2, F>,  multiply_int8<3, F>,  multiply_int8<4, F>,
    multiply_int8<5, F>,  multiply_int8<6, F>,  multiply_int8<7, F>,  multiply_int8<8, F>,
    multiply_int8<9, F>,  multiply_int8<10, F>, multiply_int8<11, F>, multiply_int8<12, F>};

MultiplyInt8 multiply_of(Fetch how, int height) {
  return how == Fetch::none     ? MULTIPLY_INT8<Fetch::none>[height]
         : how == Fetch::stream ? MULTIPLY_INT8<Fetch::stream>[height]
                                : MULTIPLY_INT8<Fetch::share>[height];
}

float power_of_two(int exponent) {
  const int32_t bits = (exponent + 127) << 23;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// `count` activations of one group to 16-bit integers, zeros behind them; returns what one
// unit is worth. NaN, so that the row's outputs are NaN, if any of them is not finite.
float to_integers(const bf16* x, int64_t count, int16_t* out) {
  __m512i raw[4], most = _mm512_setzero_si512();
  for (int i = 0; i < 4; ++i) {
    const int64_t left = count - 32 * i;
    const __mmask32 there = left >= 32 ? ~__mmask32(0) : left <= 0 ? 0 : (1u << left) - 1;
    raw[i] = _mm512_maskz_loadu_epi16(there, x + 32 * i);
    most = _mm512_max_epu16(most, _mm512_and_si512(raw[i], _mm512_set1_epi16(0x7fff)));
  }
  alignas(64) uint16_t lane[32];
  _mm512_store_si512(lane, most);
  int exponent = LEAST_EXPONENT;
  for (int j = 0; j < 32; ++j) exponent = std::max(exponent, lane[j] >> 7);
  if (exponent == NOT_FINITE) {
    memset(out, 0, GROUP * sizeof(int16_t));
    return NAN;
  }
  const __m512 scale = _mm512_set1_ps(power_of_two(14 + 127 - exponent));
  for (int i = 0; i < 8; ++i) {
    const __m256i half = i % 2 ? _mm512_extracti64x4_epi64(raw[i / 2], 1)
                               : _mm512_castsi512_si256(raw[i / 2]);
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(widen(half), scale));
    _mm256_storeu_si256((__m256i*)(out + 16 * i), _mm512_cvtepi32_epi16(whole));
  }
  return power_of_two(exponent - 127 - 14);
}

// [groups * 64][height] pairs of one tile, and [groups][height] units.
void pack_rows(const bf16* x, int64_t stride, int height, int64_t k, int32_t* out, float* unit) {
  for (int64_t g = 0; g < groups_of(k); ++g, out += PAIRS * height, unit += height)
    for (int m = 0; m < height; ++m) {
      int16_t whole[GROUP];
      unit[m] = to_integers(x + m * stride + g * GROUP, std::min(GROUP, k - g * GROUP), whole);
      for (int64_t p = 0; p < PAIRS; ++p) memcpy(out + p * height + m, whole + 2 * p, 4);
    }
}

}  // namespace

void linear_int8(const bf16* x, int64_t ldx, int64_t m, int64_t k, const Linear* layers, int count,
                 int threads) {
  const int64_t groups = groups_of(k), pairs = groups * PAIRS;
  const Tiles tiles(m);
  int32_t* rows = scratch<int32_t>(m * pairs);
  float* units = scratch<float>(m * groups);
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > MAX_ROWS)
  for (int64_t t = 0; t < tiles.count; ++t) {
    const int64_t first = tiles.start(t);
    pack_rows(x + first * ldx, ldx, tiles.height(t), k, rows + first * pairs,
              units + first * groups);
  }
  run_panels(layers, count, tiles, groups * GROUP_BYTES, threads,
             [&](int64_t t, Fetch how, const char* w, const char* next, __m512(*sum)[2]) {
               const int64_t first = tiles.start(t);
               multiply_of(how, tiles.height(t))(rows + first * pairs, units + first * groups, w,
                                                 groups, next, sum);
             });
}

extern "C" {

// Bytes of the packed form of a weight [n, k].
int64_t epd_int8_packed_bytes(int64_t n, int64_t k) {
  return panels_of(n) * groups_of(k) * GROUP_BYTES;
}

// values: [n, k] int8, dense; scales: [n, groups]. out: epd_int8_packed_bytes, aligned to 64.
void epd_int8_pack(const int8_t* values, const bf16* scales, int64_t n, int64_t k, char* out,
                   int threads) {
  const int64_t groups = groups_of(k), panels = panels_of(n);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < panels; ++panel) {
    char* to = out + panel * groups * GROUP_BYTES;
    memset(to, 0, groups * GROUP_BYTES);
    for (int64_t j = 0; j < std::min(PANEL, n - panel * PANEL); ++j) {
      const int64_t row = panel * PANEL + j;
      for (int64_t i = 0; i < k; ++i)
        to[i / GROUP * GROUP_BYTES + i % GROUP / 2 * 64 + j * 2 + i % 2] = values[row * k + i];
      for (int64_t g = 0; g < groups; ++g)
        memcpy(to + g * GROUP_BYTES + SCALES + j * 2, scales + row * groups + g, sizeof(bf16));
    }
  }
}
}
