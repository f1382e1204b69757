// Quantized copies of activation rows.
#pragma once
#include <cmath>
#include <vector>

#include "attention.h"

namespace HW_NS {

struct QuantizedActivations {
  Buffer<int8_t> quants;
  Buffer<float> scales, sums;
  Buffer<int32_t> totals;
  int width = 0, groups = 0;
  void fit(int rows, int k) {
    width = up(k, 32);
    groups = width / 32;
    quants.fit((size_t)rows * width);
    scales.fit((size_t)rows * groups);
    totals.fit((size_t)rows * 3 * groups);
    sums.fit((size_t)rows * 3 * groups);
  }
  Activations rows() const {
    Activations r;
    r.quants = quants.at;
    r.scales = scales.at;
    r.sums = sums.at;
    r.totals = totals.at;
    r.width = width;
    r.groups = groups;
    return r;
  }
};

constexpr float SMALLEST = 1e-36f;  // a group whose largest value is smaller counts as zero: 127 / it would overflow

// The largest magnitude of each group of 32 values. False if a value is not finite.
inline bool find_largest(const float* x, int groups, float* largest) {
  vf nonfinite = vf_zero();
  for (int g = 0; g < groups; g++) {
    const vf a = vf_load(x + g * 32), b = vf_load(x + g * 32 + 16);
    largest[g] = vf_most(vf_max(vf_abs(a), vf_abs(b)));
    nonfinite = vf_fma(b, vf_zero(), vf_fma(a, vf_zero(), nonfinite));  // NaN if a value is not finite
  }
  const float sum = vf_sum(nonfinite);
  return sum == sum;
}

// Groups with a value that is not finite become zeros, and their largest value NaN. Such a row is copied to `out`.
inline void clear_nonfinite(const float* x, int groups, float* largest, float* out) {
  for (int g = 0; g < groups; g++) {
    const bool finite = find_largest(x + g * 32, 1, largest + g);
    if (!finite) largest[g] = NAN;
    for (int i = g * 32; i < (g + 1) * 32; i++) out[i] = finite ? x[i] : 0.0f;
  }
}

// Quantizes one row of `k` values, padded with zeros to a multiple of 32.
inline void quantize_row(const float* x, int k, int row, QuantizedActivations& to) {
  const int width = up(k, 32), groups = width / 32;
  int8_t* quants = to.quants.at + (size_t)row * width;
  float* __restrict scales = to.scales.at + (size_t)row * groups;
  float* __restrict sums = to.sums.at + (size_t)row * 3 * groups;
  int32_t* __restrict totals = to.totals.at + (size_t)row * 3 * groups;
  std::vector<float> finite;
  if (!find_largest(x, groups, scales)) {
    finite.resize(width);
    clear_nonfinite(x, groups, scales, finite.data());
    x = finite.data();
  }
  float* __restrict factors = sums;  // until the sums are known
  for (int g = 0; g < groups; g++) {
    const float most = scales[g], divisor = most < SMALLEST ? 1.0f : most, factor = 127.0f / divisor, scale = divisor / 127.0f;
    factors[g] = most >= SMALLEST ? factor : 0.0f;  // 0 for NaN too
    scales[g] = most < SMALLEST ? 0.0f : scale;
  }
  for (int g = 0; g < groups; g++) {
    const vf factor = vf_set1(factors[g]);
    for (int half = 0; half < 2; half++) {
      int8_t* part = quants + g * 32 + half * 16;
      vi_store_i8(part, vi_round(vf_mul(vf_load(x + g * 32 + half * 16), factor)));
      totals[(1 + half) * groups + g] = sum_i8(part);
    }
  }
  for (int g = 0; g < groups; g++) {
    const float scale = scales[g];
    totals[g] = totals[groups + g] + totals[2 * groups + g];
    sums[g] = scale * (float)totals[g];
    sums[groups + g] = scale * (float)totals[groups + g];
    sums[2 * groups + g] = scale * (float)totals[2 * groups + g];
  }
}

// A matmul of rows that all threads share: floats, and quantized copies of them if the matrix takes those.
inline Matmul shared_matmul(const hw_matrix& w, const QuantizedActivations& quantized, const float* values, size_t stride, const MatmulOutput& to) {
  Activations x;
  if (is_quantized(w)) x = quantized.rows(), x.width = up(w.k, 32), x.groups = x.width / 32;
  x.values = values;
  x.stride = stride;
  return {&w, x, to};
}

}  // namespace HW_NS
