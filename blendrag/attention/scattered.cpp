// Exact attention of scattered rows over a paged cache, on CPUs with bfloat16 products (AVX512_BF16): flash
// attention (Dao et al. 2022, Algorithm 1) over tiles of rows, each of which has its own last key. It is built
// and called by scattered.py.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
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

// e^x for x <= 0, within 2 units in the last place of float32.
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

}  // namespace

extern "C" {

// What scattered.py has as _Call.
struct Call {
  const bf16 *query, *cache;            // [rows, heads, size]; [blocks, kv_heads, pages of 2 * block * size]
  const std::int64_t* positions;        // [rows]: the last key that each sees
  const std::int32_t *table, *order;    // blocks of the sequence; [2, block, size], places in a page
  bf16 *key, *value, *out;              // room for [kv_heads, packed keys, size] twice; like query
  std::int64_t rows, heads, kv_heads, size, block, window;  // window: keys that a row sees, at most
  float scale;
};

void scattered_attention(const Call* call) {
  const Call c = *call;
  auto ends = [&](long first, long last) {
    const auto found = std::minmax_element(c.positions + first, c.positions + last);
    return std::pair<long, long>(*found.first + 1, *found.second + 1);
  };
  const auto [lowest, keys] = ends(0, c.rows);
  const long size = c.size, first_seen = std::max(0l, lowest - long(c.window)) / PACKED * PACKED;
  const long blocks = (keys + PACKED - 1) / PACKED, padded = blocks * PACKED, page = 2 * c.block * size;
  const bf16 none = 0;

  // K as [kv_heads, blocks, size / 2, PACKED, 2], V as [kv_heads, keys / 2, size, 2].
#pragma omp parallel for collapse(2)
  for (long head = 0; head < c.kv_heads; head++)
    for (long at = first_seen / PACKED; at < blocks; at++) {
      bf16* key = c.key + (head * padded + at * PACKED) * size;
      bf16* value = c.value + (head * padded + at * PACKED) * size;
      const bf16* pages[PACKED];
      const std::int32_t* places[PACKED];
      for (long i = 0; i < PACKED; i++) {
        const long position = std::min(at * PACKED + i, keys - 1);
        pages[i] = c.cache + (c.table[position / c.block] * c.kv_heads + head) * page;
        places[i] = c.order + position % c.block * size;
      }
      const long there = std::min(long(PACKED), keys - at * PACKED), of_values = c.block * size;
      for (long j = 0; j < size; j += 2)
        for (long i = 0; i < PACKED; i++, key += 2) {
          key[0] = i < there ? pages[i][places[i][j]] : none;
          key[1] = i < there ? pages[i][places[i][j + 1]] : none;
        }
      for (long i = 0; i < PACKED; i += 2)
        for (long j = 0; j < size; j++, value += 2) {
          value[0] = i < there ? pages[i][places[i][of_values + j]] : none;
          value[1] = i + 1 < there ? pages[i + 1][places[i + 1][of_values + j]] : none;
        }
    }

  const long group = c.heads / c.kv_heads, tiles = (c.rows + ROWS - 1) / ROWS, most = ROWS * group;
#pragma omp parallel
  {
    std::vector<bf16> query(most * size), weights(most * KEYS);
    std::vector<float> scores(most * KEYS), sums(most * size), highest(most), total(most);
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
        std::fill(total.begin(), total.end(), 0.0f);
        std::fill(highest.begin(), highest.end(), -INFINITY);
        const auto [least, end] = ends(first, last);
        // Steps begin at the same keys for all rows, or sums would depend on the rows beside.
        const long begin = std::max(0l, least - long(c.window)) / KEYS * KEYS;
        for (long from = begin; from < end; from += KEYS) {
          const long low = std::max(from, first_seen);  // what is before it is not packed
          const long width = std::min(from + KEYS, (end + PACKED - 1) / PACKED * PACKED) - low;
          const long packed = (head * padded + low) * size;
          for (long at = 0; at < width; at += PACKED)
            products<PACKED / LANES, false>(
                query.data(), size, c.key + packed + at * size, PACKED, &scores[at], KEYS, lines, size);
          for (long line = 0; line < lines; line++) {
            const long position = c.positions[first + line / group];
            const long sees = std::min(width, position + 1 - low);
            const long hidden = std::max(0l, position + 1 - long(c.window) - low);
            float* score = &scores[line * KEYS];
            bf16* weight = &weights[line * KEYS];
            if (sees <= hidden) {
              std::memset(weight, 0, width * sizeof(bf16));
              continue;
            }
            auto seen = [&](long at) {
              const long below = std::clamp(sees - at, 0l, long(LANES)), above = std::clamp(hidden - at, 0l, long(LANES));
              return __mmask16(((1u << below) - 1) & ~((1u << above) - 1));
            };
            __m512 high = _mm512_set1_ps(-INFINITY);
            for (long at = 0; at < width; at += LANES)
              high = _mm512_mask_max_ps(high, seen(at), high, _mm512_loadu_ps(score + at));
            const float now = std::max(highest[line], _mm512_reduce_max_ps(high) * c.scale);
            const float fade = std::exp(highest[line] - now);
            if (fade != 1.0f) {
              total[line] *= fade;
              for (long j = 0; j < size; j += LANES) {
                float* sum = &sums[line * size + j];
                _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(fade)));
              }
            }
            highest[line] = now;
            __m512 sum = _mm512_setzero_ps();
            for (long at = 0; at < width; at += LANES) {
              const __m512 score_now = _mm512_loadu_ps(score + at);
              const __m512 less = _mm512_fmsub_ps(score_now, _mm512_set1_ps(c.scale), _mm512_set1_ps(now));
              const __m512 part = _mm512_maskz_mov_ps(seen(at), exponential(less));
              sum = _mm512_add_ps(sum, part);
              _mm256_storeu_si256((__m256i*)(weight + at), rounded(part));
            }
            total[line] += _mm512_reduce_add_ps(sum);
          }
          for (long j = 0; j < size; j += 4 * LANES) {
            auto add = [&](auto cols) {
              products<cols(), true>(
                  weights.data(), KEYS, c.value + packed + 2 * j, size, &sums[j], size, lines, width);
            };
            switch (std::min(4l, (size - j) / LANES)) {
              case 4: add(std::integral_constant<int, 4>()); break;
              case 3: add(std::integral_constant<int, 3>()); break;
              case 2: add(std::integral_constant<int, 2>()); break;
              default: add(std::integral_constant<int, 1>());
            }
          }
        }
        for (long line = 0; line < lines; line++)
          for (long j = 0; j < size; j += LANES) {
            const __m512 mean = _mm512_div_ps(_mm512_loadu_ps(&sums[line * size + j]), _mm512_set1_ps(total[line]));
            _mm256_storeu_si256((__m256i*)(c.out + place(line) + j), rounded(mean));
          }
      }
  }
}
}
