// Functions of one row: norms, activations, the rotary embedding, the first largest.
#pragma once
#include <algorithm>

#include "attention.h"

namespace HW_NS {

inline void pad(float* x, int from, size_t to) {
  for (size_t i = from; i < to; i++) x[i] = 0;
}

inline float mean_square(const float* x, int n) {
  vf square = vf_zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf v = vf_load(x + i);
    square = vf_fma(v, v, square);
  }
  float sum = vf_sum(square);
  for (; i < n; i++) sum += x[i] * x[i];
  return sum / n;
}

// What a row is multiplied by to have a mean square of 1.
inline float rms_factor(const float* x, int n, float eps) { return 1.0f / std::sqrt(mean_square(x, n) + eps); }

inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  const float factor = rms_factor(x, n, eps);
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    vf_store(out + i, vf_mul(vf_load(weight + i), vf_mul(vf_load(x + i), vf_set1(factor))));
  for (; i < n; i++) out[i] = weight[i] * (x[i] * factor);
}

struct Moments {
  float mean, variance;
};

inline Moments moments(const float* x, int n) {
  vf total = vf_zero(), square = vf_zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) total = vf_add(total, vf_load(x + i));
  float sum = vf_sum(total);
  for (; i < n; i++) sum += x[i];
  const float mean = sum / n;
  for (i = 0; i + LANES <= n; i += LANES) {
    const vf v = vf_sub(vf_load(x + i), vf_set1(mean));
    square = vf_fma(v, v, square);
  }
  float squares = vf_sum(square);
  for (; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
  return {mean, squares / n};
}

// What is above the mean by `cut` standard deviations, and 0 for the rest.
inline void cut_off(float* x, int n, float cut) {
  const Moments m = moments(x, n);
  const float least = m.mean + std::sqrt(m.variance) * cut;
  for (int i = 0; i < n; i++) {
    const float above = x[i] - least;
    x[i] = above < 0.0f ? 0.0f : above;
  }
}

// x minus its mean, scaled to unit variance, times weight, plus bias if there is one.
inline void layer_norm(const float* x, const hw_norm& w, int n, float eps, float* out) {
  const Moments m = moments(x, n);
  const float mean = m.mean, factor = 1.0f / std::sqrt(m.variance + eps);
  int i = 0;
  for (; i < n; i++) out[i] = w.weight[i] * ((x[i] - mean) * factor);
  for (i = 0; w.bias && i < n; i++) out[i] += w.bias[i];
}

inline void norm_row(int kind, const float* x, const hw_norm& w, int n, float eps, float* out) {
  if (kind == HW_NORM_RMS) rms_norm(x, w.weight, n, eps, out);
  else layer_norm(x, w, n, eps, out);
}

// x * sigmoid(a * x)
inline vf silu(vf x, float a) { return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_mul(x, vf_set1(-a))))); }

inline vf gelu_tanh(vf x) {  // 0.5 * (1 + tanh y) is the sigmoid of 2y
  const vf cube = vf_mul(vf_mul(vf_mul(vf_set1(0.044715f), x), x), x);
  const vf y = vf_mul(vf_set1(0.7978845608f), vf_add(x, cube));
  return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_mul(y, vf_set1(-2.0f)))));
}

inline vf gelu(vf x) {
  float t[LANES];
  vf_store(t, x);
  for (int i = 0; i < LANES; i++) t[i] = t[i] * 0.5f * (1.0f + (float)std::erf((double)(t[i] * 0.7071067811865476f)));
  return vf_load(t);
}

// out = f(gate, up), lane by lane; without a gate, of up alone.
template <class F>
inline void each_lane(const float* gate, const float* up_, int n, float* out, F&& f) {
  for (int i = 0; i < n; i += LANES) {
    const int wide = std::min(LANES, n - i);
    if (wide == LANES) {
      vf_store(out + i, f(vf_load(gate + i), vf_load(up_ + i)));
      continue;
    }
    float a[LANES] = {0}, b[LANES] = {0};
    std::memcpy(a, gate + i, wide * sizeof(float)), std::memcpy(b, up_ + i, wide * sizeof(float));
    vf_store(a, f(vf_load(a), vf_load(b)));
    std::memcpy(out + i, a, wide * sizeof(float));
  }
}

// activation(gate) * up, or activation(up) if there is no gate (null).
inline void activate(int kind, const float* gate, const float* up_, int n, float* out) {
  if (!gate) {
    if (kind == HW_SILU) each_lane(up_, up_, n, out, [](vf x, vf) { return silu(x, 1.0f); });
    else if (kind == HW_GELU) each_lane(up_, up_, n, out, [](vf x, vf) { return gelu(x); });
    else each_lane(up_, up_, n, out, [](vf x, vf) { return gelu_tanh(x); });
    return;
  }
  if (kind == HW_SILU) each_lane(gate, up_, n, out, [](vf g, vf u) { return vf_mul(silu(g, 1.0f), u); });
  else if (kind == HW_GELU) each_lane(gate, up_, n, out, [](vf g, vf u) { return vf_mul(gelu(g), u); });
  else each_lane(gate, up_, n, out, [](vf g, vf u) { return vf_mul(gelu_tanh(g), u); });
}

// gate and up clamped; gate * sigmoid(alpha * gate) * (up + 1)
inline void activate_clamped(const float* gate, const float* up_, int n, float limit, float alpha, float* out) {
  const vf most = vf_set1(limit), least = vf_set1(-limit);
  each_lane(gate, up_, n, out, [&](vf g, vf u) {
    const vf clamped = vf_max(vf_min(u, most), least);
    return vf_mul(vf_add(clamped, vf_set1(1.0f)), silu(vf_min(g, most), alpha));
  });
}

// Rotary embedding: rotates dimension i with i + half; `angles` has `half` cosines, then `half` sines.
inline void rotate(float* x, const float* angles, int half, float factor, int dim) {
  const float *c = angles, *s = angles + half;
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    vf a = vf_load(x + i), b = vf_load(x + half + i), cos = vf_load(c + i), sin = vf_load(s + i);
    vf_store(x + i, vf_sub(vf_mul(a, cos), vf_mul(b, sin)));
    vf_store(x + half + i, vf_add(vf_mul(b, cos), vf_mul(a, sin)));
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    x[i] = a * c[i] - b * s[i];
    x[half + i] = b * c[i] + a * s[i];
  }
  if (factor != 1.0f)
    for (int d = 0; d < dim; d++) x[d] *= factor;
}

// Rotates `2 * half` numbers of x into `out`, times a factor. With `paired` the rotation takes neighbors, and leaves the
// first of each pair and then the second of each.
inline void rotate_into(const float* x, const float* angles, int half, bool paired, float factor, float* out) {
  for (int i = 0; i < half; i++) out[i] = x[paired ? 2 * i : i], out[half + i] = x[paired ? 2 * i + 1 : half + i];
  rotate(out, angles, half, factor, 2 * half);
}

// x times the sigmoid of its gate.
inline void gate_heads(const float* gate, float* x, int n) {
  each_lane(gate, x, n, x, [](vf g, vf u) { return vf_div(u, vf_add(vf_set1(1.0f), vf_exp(vf_mul(g, vf_set1(-1.0f))))); });
}

// Logits as the model has them: scaled, then capped.
inline void finish_logits(const hw_model& m, float* x, int64_t n) {
  if (m.logit_scale != 1.0f)
    for (int64_t i = 0; i < n; i++) x[i] *= m.logit_scale;
  if (m.logit_cap == 0) return;
  for (int64_t i = 0; i < n; i += LANES) {
    const int64_t wide = std::min((int64_t)LANES, n - i);
    float t[LANES] = {0};
    std::memcpy(t, x + i, wide * sizeof(float));
    vf_store(t, soft_cap(vf_load(t), m.logit_cap));
    std::memcpy(x + i, t, wide * sizeof(float));
  }
}

// The first largest logit of a row, and whether the row has a NaN.
inline void argmax(const float* x, int64_t vocab, int64_t& best, uint8_t& bad) {
  vf most = vf_set1(-INFINITY), nonfinite = vf_zero();
  int64_t i = 0;
  for (; i + LANES <= vocab; i += LANES) {
    vf v = vf_load(x + i);
    most = vf_max(v, most);
    nonfinite = vf_add(nonfinite, vf_sub(v, v));  // NaN if a value is NaN or infinite
  }
  float top = vf_most(most), nonfinite_sum = vf_sum(nonfinite);
  for (; i < vocab; i++) {
    if (x[i] > top) top = x[i];
    nonfinite_sum += x[i] - x[i];
  }
  bad = 0;
  for (i = 0; nonfinite_sum != nonfinite_sum && i < vocab; i++) bad |= x[i] != x[i];
  best = 0;
  for (i = 0; i + LANES <= vocab; i += LANES) {  // find the 16 that hold it, then the first of them
    bool here = false;
    for (int j = 0; j < LANES; j++) here |= x[i + j] == top;
    if (here) break;
  }
  for (; i < vocab; i++)
    if (x[i] == top) {
      best = i;
      return;
    }
}

}  // namespace HW_NS
