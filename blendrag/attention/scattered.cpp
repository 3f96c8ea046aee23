// Exact attention of scattered rows over a paged cache, on CPUs with products of bfloat16 (AVX512_BF16):
// flash attention (Dao et al. 2022, Algorithm 1) over tiles of rows, each of which has its own last key.
// Built and called by scattered.py.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = std::uint16_t;

namespace {

constexpr int LANES = 16;           // of a vector of float32
constexpr int PACKED = 4 * LANES;   // keys of a packed block
constexpr int KEYS = 8 * PACKED;    // keys that a tile of rows reads at once
constexpr int ROWS = 8;             // rows of a tile, each with all heads that share a head of K
constexpr int LINES = 6;            // lines of a product that stay in registers

// C[R, 16 * COLS] (+)= A[R, depth] B. Two numbers that are next to each other in A's line meet two that are
// next to each other in B, [depth / 2, ldb, 2].
template <int R, int COLS, bool ADD>
void product(const bf16* a, long lda, const bf16* b, long ldb, float* c, long ldc, int depth) {
  __m512 sum[R][COLS];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < COLS; j++)
      sum[r][j] = ADD ? _mm512_loadu_ps(c + r * ldc + LANES * j) : _mm512_setzero_ps();
  for (int k = 0; k < depth; k += 2, b += 2 * ldb) {
    __m512bh column[COLS];
#pragma GCC unroll 8
    for (int j = 0; j < COLS; j++) column[j] = (__m512bh)_mm512_loadu_si512(b + 2 * LANES * j);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      std::int32_t two;
      std::memcpy(&two, a + r * lda + k, sizeof two);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 8
      for (int j = 0; j < COLS; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], both, column[j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < COLS; j++) _mm512_storeu_ps(c + r * ldc + LANES * j, sum[r][j]);
}

// The same of any number of lines. A line's sums do not depend on the others, so that a row's result does not
// depend on which rows it is computed with.
template <int COLS, bool ADD, int R = LINES>
void products(const bf16* a, long lda, const bf16* b, long ldb, float* c, long ldc, int lines, int depth) {
  int at = 0;
  for (; at + R <= lines; at += R) product<R, COLS, ADD>(a + at * lda, lda, b, ldb, c + at * ldc, ldc, depth);
  if constexpr (R > 1) {
    if (at < lines)
      products<COLS, ADD, R - 1>(a + at * lda, lda, b, ldb, c + at * ldc, ldc, lines - at, depth);
  }
}

// e^x for x <= 0, within 3 units in the last place of float32.
__m512 exponential(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(sum, whole);
}

__m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

__m512 times(const float* numbers, float factor) {
  return _mm512_mul_ps(_mm512_loadu_ps(numbers), _mm512_set1_ps(factor));
}

// What scattered.py has as _Call.
struct Call {
  const bf16 *query, *cache;            // [rows, heads, size]; [blocks, kv_heads, 2 * block * size]
  const std::int64_t* positions;        // [rows]: the last key that each sees
  const std::int32_t *table, *order;    // blocks of the sequence; [2, block, size], places in a page
  bf16 *key, *value, *out;              // room for [kv_heads, packed keys, size] twice; like query
  // stride: from one block of the cache to the next. window: keys that a row sees, at most.
  std::int64_t rows, heads, kv_heads, size, block, stride, window;
  float scale;
};

// Packs PACKED keys of a head from here on: K as [size / 2, PACKED, 2], V as [PACKED / 2, size, 2]. Zeros
// stand behind the last one.
void pack(const Call& c, long head, long from, long keys, bf16* key, bf16* value) {
  const bf16* pages[PACKED];
  const std::int32_t* places[PACKED];
  for (long i = 0; i < PACKED; i++) {
    const long position = std::min(from + i, keys - 1);
    pages[i] = c.cache + c.table[position / c.block] * c.stride + head * 2 * c.block * c.size;
    places[i] = c.order + position % c.block * c.size;
  }
  const long there = keys - from, of_values = c.block * c.size;
  auto number = [&](long i, long place) { return i < there ? pages[i][places[i][place]] : bf16(0); };
  for (long j = 0; j < c.size; j += 2)
    for (long i = 0; i < PACKED; i++, key += 2) {
      key[0] = number(i, j);
      key[1] = number(i, j + 1);
    }
  for (long i = 0; i < PACKED; i += 2)
    for (long j = 0; j < c.size; j++, value += 2) {
      value[0] = number(i, of_values + j);
      value[1] = number(i + 1, of_values + j);
    }
}

// The softmax of one row and head, as far as it has read.
struct Softmax {
  float highest = -INFINITY, total = 0;

  // Turns the scores of further keys into weights; those before `hidden` and from `sees` on are not seen.
  // Returns what the sums over earlier weights are to be multiplied by.
  float weigh(const float* score, bf16* weight, long keys, long hidden, long sees, float scale) {
    if (std::min(sees, keys) <= hidden) {
      std::memset(weight, 0, keys * sizeof(bf16));
      return 1;
    }
    auto below = [](long end, long at) { return (1u << std::clamp(end - at, 0l, long(LANES))) - 1; };
    auto seen = [&](long at) { return __mmask16(below(sees, at) & ~below(hidden, at)); };
    __m512 high = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (long at = 0; at < keys; at += LANES)
      high = _mm512_mask_max_ps(high, seen(at), high, _mm512_loadu_ps(score + at));
    const float now = std::max(highest, _mm512_reduce_max_ps(high) * scale);
    for (long at = 0; at < keys; at += LANES) {
      const __m512 less = _mm512_sub_ps(times(score + at, scale), _mm512_set1_ps(now));
      const __m512 part = _mm512_maskz_mov_ps(seen(at), exponential(less));
      sum = _mm512_add_ps(sum, part);
      _mm256_storeu_si256((__m256i*)(weight + at), rounded(part));
    }
    const float fade = std::exp(highest - now);
    highest = now;
    total = total * fade + _mm512_reduce_add_ps(sum);
    return fade;
  }
};

// Adds weights[lines, keys] value to sums[lines, size].
void add(const bf16* weights, const bf16* value, float* sums, int lines, int keys, long size) {
  for (long j = 0; j < size; j += 4 * LANES, value += 8 * LANES, sums += 4 * LANES)
    switch (std::min(4l, (size - j) / LANES)) {
      case 4: products<4, true>(weights, KEYS, value, size, sums, size, lines, keys); break;
      case 3: products<3, true>(weights, KEYS, value, size, sums, size, lines, keys); break;
      case 2: products<2, true>(weights, KEYS, value, size, sums, size, lines, keys); break;
      default: products<1, true>(weights, KEYS, value, size, sums, size, lines, keys);
    }
}

}  // namespace

extern "C" void scattered_attention(const Call* call) {
  const Call c = *call;
  const auto ends = std::minmax_element(c.positions, c.positions + c.rows);
  const long size = c.size, keys = *ends.second + 1, blocks = (keys + PACKED - 1) / PACKED;
  const long in_sight = std::max(0l, long(*ends.first + 1 - c.window)) / PACKED;  // the first such block
  const long group = c.heads / c.kv_heads, tiles = (c.rows + ROWS - 1) / ROWS, most = ROWS * group;

#pragma omp parallel for collapse(2)
  for (long head = 0; head < c.kv_heads; head++)
    for (long block = in_sight; block < blocks; block++) {
      const long to = (head * blocks + block) * PACKED * size;
      pack(c, head, block * PACKED, keys, c.key + to, c.value + to);
    }

#pragma omp parallel
  {
    std::vector<bf16> query(most * size), weights(most * KEYS);
    std::vector<float> scores(most * KEYS), sums(most * size);
    std::vector<Softmax> softmax(most);
#pragma omp for schedule(dynamic) collapse(2)
    for (long tile = tiles - 1; tile >= 0; tile--)  // the longest first
      for (long head = 0; head < c.kv_heads; head++) {
        const long first = tile * ROWS, last = std::min(long(c.rows), first + ROWS);
        const int lines = (last - first) * group;
        auto place = [&](long line) {
          return ((first + line / group) * c.heads + head * group + line % group) * size;
        };
        for (long line = 0; line < lines; line++)
          std::memcpy(&query[line * size], c.query + place(line), size * sizeof(bf16));
        std::fill(sums.begin(), sums.end(), 0.0f);
        std::fill(softmax.begin(), softmax.end(), Softmax());
        const auto range = std::minmax_element(c.positions + first, c.positions + last);
        const long end = (*range.second / PACKED + 1) * PACKED;
        // Steps begin at the same keys for all rows, or sums would depend on the rows beside.
        const long begin = std::max(0l, long(*range.first + 1 - c.window)) / KEYS * KEYS;
        for (long step = begin; step < end; step += KEYS) {
          const long from = std::max(step, in_sight * PACKED), width = std::min(step + KEYS, end) - from;
          const long packed = (head * blocks * PACKED + from) * size;
          for (long at = 0; at < width; at += PACKED)
            products<PACKED / LANES, false>(
                query.data(), size, c.key + packed + at * size, PACKED, &scores[at], KEYS, lines, size);
          for (long line = 0; line < lines; line++) {
            const long sees = c.positions[first + line / group] + 1 - from, hidden = sees - c.window;
            const float fade = softmax[line].weigh(
                &scores[line * KEYS], &weights[line * KEYS], width, std::max(0l, hidden), sees, c.scale);
            float* sum = &sums[line * size];
            if (fade != 1)
              for (long j = 0; j < size; j += LANES) _mm512_storeu_ps(sum + j, times(sum + j, fade));
          }
          add(weights.data(), c.value + packed, sums.data(), lines, width, size);
        }
        for (long line = 0; line < lines; line++)
          for (long j = 0; j < size; j += LANES)
            _mm256_storeu_si256((__m256i*)(c.out + place(line) + j),
                                rounded(times(&sums[line * size + j], 1 / softmax[line].total)));
      }
  }
}
