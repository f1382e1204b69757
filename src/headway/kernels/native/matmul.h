// Matmul with quantized or float weights, for one row or hundreds. A row's bits do not depend on its neighbors: every
// output takes the same sums in the same order, whatever the tile.
#pragma once
#include <algorithm>
#include <cstddef>

#include "api.h"
#include "simd.h"

// Loops over a tile are unrolled where its sums fit into registers.
#if HW_ISA >= 2
#define HW_UNROLL _Pragma("GCC unroll 16")
#else
#define HW_UNROLL
#endif

namespace HW_NS {

// Whether the matrix takes quantized activations.
inline bool is_quantized(const hw_matrix& w) { return w.kind >= HW_INT8; }

inline int up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Rows of activations in the form that a weight format needs.
//   floats:     values as they are
//   quantized:  int8 quants, and for each 32 inputs a float scale and the sum of the quants
struct Activations {
  const float* values = nullptr;   // [rows, stride]
  size_t stride = 0;
  const int8_t* quants = nullptr;   // [rows, width], width a multiple of 32
  const float* scales = nullptr;   // [rows, groups]
  const int32_t* totals = nullptr; // [rows, 3, groups] sums of the quants: of 32, of the first 16, of the last 16
  const float* sums = nullptr;     // [rows, 3, groups] scale times totals
  int width = 0, groups = 0;

  // The same from a row on.
  Activations from(size_t row) const {
    Activations x = *this;
    if (values) x.values += row * stride;
    if (quants) x.quants += row * width, x.scales += row * groups, x.totals += row * 3 * groups, x.sums += row * 3 * groups;
    return x;
  }
};

// ---- one block of 16 outputs for M rows --------------------------------------------------------------------------

// What the next blocks of a matrix need, fetched into cache while tiles of these blocks compute: the tiles of several rows
// read a block more than once, which no hardware prefetcher sees through.
struct Prefetch {
  const char *quants = nullptr, *quants_end = nullptr, *scales = nullptr, *scales_end = nullptr;
  int lines = 0;  // cache lines for each group of inputs of a tile

  inline void step() {
    for (int i = 0; i < lines && quants < quants_end; i++, quants += 64) __builtin_prefetch(quants);
    if (quants >= quants_end && scales < scales_end) __builtin_prefetch(scales), scales += 64;
  }
};

template <int KIND>
inline vf load_float(const void* p, size_t at) {
  if (KIND == HW_F32) return vf_load((const float*)p + at);
  if (KIND == HW_F16) return vf_load_f16((const uint16_t*)p + at);
  return vf_load_bf16((const uint16_t*)p + at);
}

template <int KIND, int M, int B>
inline void float_tile(const hw_matrix& w, int block, const Activations& x, int row, vf (&acc)[B][M]) {
  const float* in = x.values + (size_t)row * x.stride;
  HW_UNROLL
  for (int b = 0; b < B; b++)
    HW_UNROLL
    for (int m = 0; m < M; m++) acc[b][m] = vf_zero();
  size_t at = (size_t)block * w.k * LANES, next = (size_t)w.k * LANES;
  for (int k = 0; k < w.k; k++, at += LANES) {
    vf v[B];
    HW_UNROLL
    for (int b = 0; b < B; b++) v[b] = load_float<KIND>(w.quants, at + b * next);
    HW_UNROLL
    for (int m = 0; m < M; m++) {
      vf s = vf_set1(in[m * x.stride + k]);
      HW_UNROLL
      for (int b = 0; b < B; b++) acc[b][m] = vf_fma(v[b], s, acc[b][m]);
    }
  }
}

constexpr int SCALE_ROW = -1;  // of HW_INT8: one scale for all inputs, multiplied at the end

// The scales (and minimums) of one block, group by group.
template <int SCALE, bool HAS_MIN>
struct Scales {
  const hw_matrix& w;
  size_t block, groups;  // scale groups per row
  vf scale, min;
  inline void at(size_t g) {
    if (SCALE == HW_SCALE_K) {
      const uint8_t* f = (const uint8_t*)w.scales + (block * groups + g) * 32;
      const uint16_t* d = (const uint16_t*)w.super + (block * (groups / 8) + g / 8) * 32;
      scale = vf_mul(vf_load_f16(d), vf_load_u8(f));
      if (HAS_MIN) min = vf_mul(vf_mul(vf_load_f16(d + 16), vf_load_u8(f + 16)), vf_set1(-1.0f));
      return;
    }
    if (SCALE == HW_SCALE_E8) {
      scale = vf_pow2(vf_set1(1.0f), vf_sub(vf_load_u8((const uint8_t*)w.scales + (block * groups + g) * 16), vf_set1(128.0f)));
      return;
    }
    size_t where = (block * groups + g) * (HAS_MIN ? 32 : 16);
    scale = load_float<SCALE == HW_SCALE_F16 ? HW_F16 : HW_F32>(w.scales, where);
    if (HAS_MIN) min = load_float<SCALE == HW_SCALE_F16 ? HW_F16 : HW_F32>(w.scales, where + 16);
  }
};

// PARTS is 2 when a scale covers 16 inputs, else 1. Without a min the integer sum starts at -zero times the sum of the
// quants, which is exact. Several blocks share the activations they load: loads, not products, limit a tile of one block.
template <int BITS, int SCALE, bool HAS_MIN, int PARTS, int M, int B>
inline void group_tile(const hw_matrix& w, int block, const Activations& x, int row, Prefetch& prefetch, vf (&out)[B][M]) {
  constexpr int HELD = 8 / PARTS;  // vectors of quants for the inputs of one scale
  const int groups = x.groups, per = PARTS == 2 || SCALE == SCALE_ROW ? 1 : w.group / 32;  // activation groups per scale
  const size_t scale_groups = PARTS == 2 ? 2 * groups : (groups + per - 1) / per, next = (size_t)groups * BITS * 64;
  const uint8_t* quants = (const uint8_t*)w.quants + block * next;
  const int8_t* in = x.quants + (size_t)row * x.width;
  const float *scales = x.scales + (size_t)row * groups, *sums = x.sums + (size_t)row * 3 * groups;
  const int32_t* totals = x.totals + (size_t)row * 3 * groups;
  Prefetch ahead = prefetch;
  vf acc[B][M], scale[B], min[B];  // sums of its own stay in registers; those of the caller would not
  int left = 1;         // activation groups until the next scale is loaded
  size_t scale_at = 0;  // its index
  HW_UNROLL
  for (int b = 0; b < B; b++)
    HW_UNROLL
    for (int m = 0; m < M; m++) acc[b][m] = vf_zero();
  for (int g = 0; g < groups; g++) {
    ahead.step();
    for (int part = 0; part < PARTS; part++) {
      const size_t sum = (size_t)(PARTS == 2 ? 1 + part : 0) * groups + g;
      vi dot[B][M];
      HW_UNROLL
      for (int b = 0; b < B; b++)
        HW_UNROLL
        for (int m = 0; m < M; m++) dot[b][m] = HAS_MIN ? vi_zero() : vi_set1(-w.zero * totals[(size_t)m * 3 * groups + sum]);
      const int8_t* p = in + g * 32 + part * 16;
      HW_UNROLL
      for (int j = 0; j < HELD; j += BITS == 4 ? 2 : 1, quants += 64) {
        vb v[B][2];
        HW_UNROLL
        for (int b = 0; b < B; b++) {
          const vb both = vb_load(quants + b * next);
          v[b][0] = BITS == 4 ? vb_low(both) : both;
          v[b][1] = BITS == 4 ? vb_high(both) : both;
          if (SCALE == HW_SCALE_E8) v[b][0] = vb_fp4(v[b][0]), v[b][1] = vb_fp4(v[b][1]);
        }
        HW_UNROLL
        for (int half = 0; half < (BITS == 4 ? 2 : 1); half++)
          HW_UNROLL
          for (int m = 0; m < M; m++) {
            const int32_t a = load_i32(p + (size_t)m * x.width + 4 * (j + half));
            HW_UNROLL
            for (int b = 0; b < B; b++) dot[b][m] = BITS == 4 ? vi_dot4(dot[b][m], v[b][half], a) : vi_dot8(dot[b][m], v[b][half], a);
          }
      }
      if (SCALE != SCALE_ROW && (PARTS == 2 || --left == 0)) {
        HW_UNROLL
        for (int b = 0; b < B; b++) {
          Scales<SCALE, HAS_MIN> s{w, (size_t)block + b, scale_groups, vf_zero(), vf_zero()};
          s.at(scale_at);
          scale[b] = s.scale;
          min[b] = s.min;
        }
        scale_at++;
        left = per;
      }
      HW_UNROLL
      for (int m = 0; m < M; m++) {
        const vf factor = vf_set1(scales[(size_t)m * groups + g]);
        HW_UNROLL
        for (int b = 0; b < B; b++) {
          acc[b][m] = vf_fma(vf_from(dot[b][m]), SCALE == SCALE_ROW ? factor : vf_mul(scale[b], factor), acc[b][m]);
          if (HAS_MIN) acc[b][m] = vf_fma(min[b], vf_set1(sums[(size_t)m * 3 * groups + sum]), acc[b][m]);
        }
      }
    }
  }
  HW_UNROLL
  for (int b = 0; b < B && SCALE == SCALE_ROW; b++) {
    scale[b] = vf_load((const float*)w.scales + (size_t)(block + b) * LANES);
    HW_UNROLL
    for (int m = 0; m < M; m++) acc[b][m] = vf_mul(acc[b][m], scale[b]);
  }
  prefetch = ahead;
  HW_UNROLL
  for (int b = 0; b < B; b++)
    HW_UNROLL
    for (int m = 0; m < M; m++) out[b][m] = acc[b][m];
}

// Bytes of the scales of one block of grouped weights.
inline size_t scale_bytes(const hw_matrix& w) {
  const size_t held = w.group == 16 ? 2 * (size_t)(up(w.k, 32) / 32) : (size_t)(w.k + w.group - 1) / w.group;
  const size_t width = w.scale_kind == HW_SCALE_K || w.scale_kind == HW_SCALE_E8 ? 1 : w.scale_kind == HW_SCALE_F16 ? 2 : 4;
  return held * (w.has_min ? 32 : 16) * width;
}

// ---- all rows of a matrix ----------------------------------------------------------------------------------------

// Where the result goes: y = x w + bias, or y += x w + bias.
struct MatmulOutput {
  float* y;
  size_t stride;  // at least n rounded up to 16
  bool add;
};

// Not inline: every format of a tile would have it.
template <int M, int B>
__attribute__((noinline)) void store_tile(const hw_matrix& w, int block, int row, const MatmulOutput& to, vf (&acc)[B][M]) {
  HW_UNROLL
  for (int b = 0; b < B; b++) {
    int at = (block + b) * LANES, wide = std::min(LANES, w.n - at);
    float bias[LANES] = {0};
    if (w.bias) std::memcpy(bias, w.bias + at, wide * sizeof(float));
    HW_UNROLL
    for (int m = 0; m < M; m++) {
      float* y = to.y + (size_t)(row + m) * to.stride + at;
      vf v = w.bias ? vf_add(acc[b][m], vf_load(bias)) : acc[b][m];
      if (wide == LANES) {
        vf_store(y, to.add ? vf_add(vf_load(y), v) : v);
        continue;
      }
      float part[LANES];
      vf_store(part, v);
      for (int i = 0; i < wide; i++) y[i] = to.add ? y[i] + part[i] : part[i];
    }
  }
}

template <int M, int B>
inline void matmul_float_tile(const hw_matrix& w, int block, const Activations& x, int row, const MatmulOutput& to) {
  vf acc[B][M];
  if (w.kind == HW_F32) float_tile<HW_F32, M, B>(w, block, x, row, acc);
  else if (w.kind == HW_F16) float_tile<HW_F16, M, B>(w, block, x, row, acc);
  else float_tile<HW_BF16, M, B>(w, block, x, row, acc);
  store_tile<M, B>(w, block, row, to, acc);
}

template <int M, int B>
void matmul_quantized_tile(const hw_matrix& w, int block, const Activations& x, int row, Prefetch& ahead, const MatmulOutput& to) {
  vf acc[B][M];
  const int scale = w.kind == HW_INT8 ? SCALE_ROW : w.scale_kind, bits = w.kind == HW_INT8 ? 8 : w.bits;
  const bool halves = w.kind == HW_GROUPS && w.group == 16, has_min = w.kind == HW_GROUPS && w.has_min;
#define HW_TRY(BITS, SCALE, HAS_MIN, PARTS)                                                    \
  if (bits == BITS && scale == SCALE && has_min == HAS_MIN && halves == (PARTS == 2)) {        \
    group_tile<BITS, SCALE, HAS_MIN, PARTS, M, B>(w, block, x, row, ahead, acc);               \
    store_tile<M, B>(w, block, row, to, acc);                                                  \
    return;                                                                                    \
  }
  HW_TRY(8, SCALE_ROW, false, 1)
  HW_TRY(4, HW_SCALE_F16, false, 1)  // Q4_0
  HW_TRY(4, HW_SCALE_F16, true, 1)   // Q4_1
  HW_TRY(4, HW_SCALE_K, true, 1)     // Q4_K
  HW_TRY(8, HW_SCALE_F16, false, 1)  // Q8_0, Q5_0
  HW_TRY(8, HW_SCALE_F16, true, 1)   // Q5_1
  HW_TRY(8, HW_SCALE_F32, true, 1)   // Q5_K
  HW_TRY(4, HW_SCALE_F32, true, 1)
  HW_TRY(4, HW_SCALE_F32, false, 2)  // Q3_K
  HW_TRY(4, HW_SCALE_F32, true, 2)   // Q2_K
  HW_TRY(8, HW_SCALE_F32, false, 2)  // Q6_K
  HW_TRY(4, HW_SCALE_E8, false, 1)   // MXFP4
#undef HW_TRY
}

// The tiles there are; matmul.cpp has them, which compiles beside step.cpp and takes as long.
#define HW_QUANTIZED_TILE(M, B) \
  template void matmul_quantized_tile<M, B>(const hw_matrix&, int, const Activations&, int, Prefetch&, const MatmulOutput&);
#if HW_ISA >= 3
#define HW_QUANTIZED_TILES(DO) DO(1, 1) DO(2, 1) DO(4, 1) DO(8, 1) DO(1, 2) DO(2, 2) DO(4, 2) DO(6, 2)
#elif HW_ISA >= 2
#define HW_QUANTIZED_TILES(DO) DO(1, 1) DO(2, 1) DO(4, 1) DO(8, 1) DO(1, 2) DO(2, 2) DO(4, 2)
#else
#define HW_QUANTIZED_TILES(DO) DO(1, 1) DO(2, 1) DO(4, 1) DO(8, 1)
#endif
#ifndef HW_TILES_HERE
#define HW_EXTERN(M, B) extern HW_QUANTIZED_TILE(M, B)
HW_QUANTIZED_TILES(HW_EXTERN)
#undef HW_EXTERN
#endif

// Rows of a tile of quantized weights, of `count` that are left.
template <int B>
inline int tile_rows(int count) {
  if (B == 1 && count >= 8) return 8;
  if (B > 1 && HW_ISA >= 3 && count >= 6 && count != 8 && count != 9) return 6;  // 24 sums fit into registers; eight and nine rows are faster as two tiles of four
  return count >= 4 ? 4 : count >= 2 ? 2 : 1;
}

// The blocks [from, to) of a quantized matrix, to be fetched while B blocks compute `count` rows.
template <int B>
inline Prefetch prefetch(const hw_matrix& w, int from, int to, int count) {
  Prefetch ahead;
  if (from >= to) return ahead;
  const size_t groups = up(w.k, 32) / 32, size = groups * (w.kind == HW_INT8 ? 8 : w.bits) * 64;
  ahead.quants = (const char*)w.quants + from * size, ahead.quants_end = ahead.quants + (to - from) * size;
  if (w.kind == HW_GROUPS) {
    const size_t scales = scale_bytes(w);
    ahead.scales = (const char*)w.scales + from * scales, ahead.scales_end = ahead.scales + (to - from) * scales;
  }
  int tiles = 0;
  for (; count > 0; count -= tile_rows<B>(count)) tiles++;
  const size_t steps = groups * tiles;
  ahead.lines = (int)((size / 64 * (to - from) + steps - 1) / steps);
  return ahead;
}

constexpr bool QUANTIZED_PAIRS = HW_ISA >= 2;  // whether tiles of quantized weights have two blocks

// `count` rows starting at `row`, B blocks of the matrix from `block`; `end` is where this thread's blocks end.
template <int B>
inline void matmul_blocks(const hw_matrix& w, int block, int end, const Activations& x, int row, int count, const MatmulOutput& target) {
  if constexpr (B == 1 || QUANTIZED_PAIRS) if (is_quantized(w)) {
    Prefetch ahead = prefetch<B>(w, block + B, std::min(block + 2 * B, end), count);
    for (int rows = 0; count > 0; row += rows, count -= rows) {
      rows = tile_rows<B>(count);
      if constexpr (B == 1)
        if (rows == 8) { matmul_quantized_tile<8, B>(w, block, x, row, ahead, target); continue; }
      if constexpr (B > 1 && HW_ISA >= 3)
        if (rows == 6) { matmul_quantized_tile<6, B>(w, block, x, row, ahead, target); continue; }
      if (rows == 4) matmul_quantized_tile<4, B>(w, block, x, row, ahead, target);
      else if (rows == 2) matmul_quantized_tile<2, B>(w, block, x, row, ahead, target);
      else matmul_quantized_tile<1, B>(w, block, x, row, ahead, target);
    }
    return;
  }
#define HW_TILES(TILE, M) for (; count >= M; row += M, count -= M) TILE<M, B>(w, block, x, row, target);
  HW_TILES(matmul_float_tile, 8)
  HW_TILES(matmul_float_tile, 4)
  HW_TILES(matmul_float_tile, 2)
  HW_TILES(matmul_float_tile, 1)
#undef HW_TILES
}

// Blocks [from, to) of the matrix. Two blocks share the activations they load; a single row reads its quants in one stream.
inline void matmul_rows(const hw_matrix& w, int from, int to, const Activations& x, int row, int count, const MatmulOutput& target) {
  const bool pairs = !is_quantized(w) || (QUANTIZED_PAIRS && count > 1);
  for (; pairs && from + 1 < to; from += 2) matmul_blocks<2>(w, from, to, x, row, count, target);
  for (; from < to; from++) matmul_blocks<1>(w, from, to, x, row, count, target);
}

// One matmul of a group that shares its rows; each thread computes a share of the group's blocks.
struct Matmul {
  const hw_matrix* w;
  Activations x;
  MatmulOutput to;
};

inline void matmuls(const Matmul* list, int n, int rows, int thread, int threads) {
  constexpr int SLAB = 128;  // rows whose activations stay in cache while the weights stream through
  int64_t all = 0;
  for (int i = 0; i < n; i++) all += up(list[i].w->n, LANES) / LANES;
  int64_t first = all * thread / threads, last = all * (thread + 1) / threads;
  for (int row = 0; row < rows; row += SLAB) {
    int64_t before = 0;
    for (int i = 0; i < n; i++) {
      int64_t blocks = up(list[i].w->n, LANES) / LANES;
      int64_t from = std::max(first - before, (int64_t)0), to = std::min(last - before, blocks);
      before += blocks;
      if (from < to)
        matmul_rows(*list[i].w, (int)from, (int)to, list[i].x, row, std::min(SLAB, rows - row), list[i].to);
    }
  }
}

template <int SCALE, bool HAS_MIN>
inline void scale_of(const hw_matrix& w, size_t block, size_t held, size_t g, size_t lane, float& scale, float& min) {
  Scales<SCALE, HAS_MIN> s{w, block, held, vf_zero(), vf_zero()};
  s.at(g);
  float t[LANES];
  vf_store(t, s.scale);
  scale = t[lane];
  vf_store(t, s.min);
  min = t[lane];
}

inline void read_scale(const hw_matrix& w, size_t block, size_t held, size_t g, size_t lane, float& scale, float& min) {
  if (w.scale_kind == HW_SCALE_K) scale_of<HW_SCALE_K, true>(w, block, held, g, lane, scale, min);
  else if (w.scale_kind == HW_SCALE_E8) scale_of<HW_SCALE_E8, false>(w, block, held, g, lane, scale, min);
  else if (w.scale_kind == HW_SCALE_F16 && w.has_min) scale_of<HW_SCALE_F16, true>(w, block, held, g, lane, scale, min);
  else if (w.scale_kind == HW_SCALE_F16) scale_of<HW_SCALE_F16, false>(w, block, held, g, lane, scale, min);
  else if (w.has_min) scale_of<HW_SCALE_F32, true>(w, block, held, g, lane, scale, min);
  else scale_of<HW_SCALE_F32, false>(w, block, held, g, lane, scale, min);
}

// Row r of the matrix as floats.
inline void dequantize_row(const hw_matrix& w, int r, float* out) {
  const size_t block = r / LANES, lane = r % LANES;
  if (w.kind <= HW_BF16) {
    float t[LANES];
    for (int k = 0; k < w.k; k++) {
      size_t at = (block * w.k + k) * LANES;
      vf v = w.kind == HW_F32 ? load_float<HW_F32>(w.quants, at)
           : w.kind == HW_F16 ? load_float<HW_F16>(w.quants, at) : load_float<HW_BF16>(w.quants, at);
      vf_store(t, v);
      out[k] = t[lane];
    }
    return;
  }
  const int groups = up(w.k, 32) / 32;
  const uint8_t* quants = (const uint8_t*)w.quants;
  const size_t held = w.kind == HW_INT8 ? 0 : w.group == 16 ? 2 * (size_t)groups : (groups + w.group / 32 - 1) / (w.group / 32);
  float scale = w.kind == HW_INT8 ? ((const float*)w.scales)[block * LANES + lane] : 0, min = 0;
  for (int k = 0; k < w.k; k++) {
    size_t g = k / 32, i = k % 32, quant;
    if (w.bits == 4 && w.kind == HW_GROUPS) {
      uint8_t both = quants[(block * groups + g) * 256 + i / 8 * 64 + lane * 4 + i % 4];
      quant = i % 8 < 4 ? both & 15 : both >> 4;
      if (w.scale_kind == HW_SCALE_E8) quant = FP4[quant];
    } else {
      quant = quants[(block * groups + g) * 512 + i / 4 * 64 + lane * 4 + i % 4];
    }
    if (w.kind == HW_GROUPS && k % w.group == 0) read_scale(w, block, held, k / w.group, lane, scale, min);
    out[k] = w.has_min && w.kind == HW_GROUPS ? scale * (float)quant + min : scale * ((float)quant - (float)w.zero);
  }
}

}  // namespace HW_NS
