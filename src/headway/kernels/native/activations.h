// Quantized copies of activation rows.
#pragma once
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

// Quantizes one row of `k` values, padded with zeros to a multiple of 32.
inline void quantize_row(const float* x, int k, int row, QuantizedActivations& to) {
  const int width = up(k, 32), groups = width / 32;
  for (int g = 0; g < groups; g++) {
    int8_t* quants = to.quants.at + (size_t)row * width + g * 32;
    const float scale = quantize_group(x + g * 32, 32, quants);
    const int32_t first = total(quants, 16), last = total(quants + 16, 16), of[3] = {first + last, first, last};
    to.scales.at[(size_t)row * groups + g] = scale;
    for (int n = 0; n < 3; n++) {
      const size_t at = ((size_t)row * 3 + n) * groups + g;
      to.totals.at[at] = of[n];
      to.sums.at[at] = scale * (float)of[n];
    }
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
