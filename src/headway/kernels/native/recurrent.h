// Recurrent layers: short convolutions, gated delta nets and Mamba-2. Rows of a sequence are taken in order, each from a
// state to the next, so that a row's bits do not depend on where a sequence is cut nor on its neighbors: channels and heads,
// of every sequence for itself, are what threads share. F is the forward pass.
#pragma once
#include "activations.h"
#include "experts.h"
#include "lora.h"
#include "rows.h"

namespace HW_NS {

struct RecurrentBuffers {
  Buffer<float> in, beta, steps, gate, mixed, out;  // projections; what was convolved; outputs
  QuantizedActivations rows;
  struct Scratch {
    std::vector<float> state, key, query, window, weights;
  };
  std::vector<Scratch> scratches;  // one per thread
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Part of a row, in a vector; zeros after its end.
inline vf load_part(const float* x, int count) {
  if (count >= LANES) return vf_load(x);
  float part[LANES] = {0};
  std::memcpy(part, x, count * sizeof(float));
  return vf_load(part);
}

inline void store_part(float* to, vf x, int count) {
  if (count >= LANES) return vf_store(to, x);
  float part[LANES];
  vf_store(part, x);
  std::memcpy(to, part, count * sizeof(float));
}

template <class F>
struct Recurrence {
  F& f;
  const hw_model& m = f.m;
  const hw_step& step = f.step;
  const int T = f.T, H = m.mix_heads, DK = m.mix_key_dim, DV = m.mix_value_dim;
  const bool simple = m.recurrence == HW_SHORT_CONV, mamba = m.recurrence == HW_MAMBA2;
  const int keys = m.mix_groups * DK, inner = simple ? m.hidden : H * DV;  // of outputs
  const int channels = simple ? m.hidden : 2 * keys + inner;
  const int projected = simple ? 3 * m.hidden : mamba ? inner + channels + H : channels;
  const size_t IN = up(projected, 16), MIXED = up(channels, 16), HEADS = up(std::max(H, 1), 16), OUT = up(inner, 32);
  const size_t past = (size_t)channels * (m.taps - 1);  // numbers of the convolution's state
  const size_t wide = up(mamba ? DK : DV, LANES);       // of a row of a head's state, padded

  RecurrentBuffers& s() { return f.workspace.recurrent; }
  float* state(int place, int l) { return m.states + ((size_t)place * m.state_layers + m.layer[l].state_layer) * m.state_numbers; }

  void fit() {
    s().in.fit(T * IN), s().out.fit(T * OUT), s().rows.fit(T, inner);
    if (!simple) s().mixed.fit(T * MIXED), s().beta.fit(T * HEADS), s().steps.fit(T * HEADS), s().gate.fit(T * OUT);
    s().scratches.resize(f.threads);
    for (RecurrentBuffers::Scratch& own : s().scratches) {
      own.window.resize((size_t)std::max(m.taps, 1) * LANES), own.weights.resize((size_t)(m.taps + 1) * LANES);
      if (!simple) own.state.resize((mamba ? DV : DK) * wide), own.key.resize(up(DK, LANES)), own.query.resize(up(DK, LANES));
    }
    for (int r = 0; r < T; r++) pad(s().out.at + r * OUT, inner, OUT);
  }

  // What the layer adds to the residual, of normed rows: added, or kept where more is to be done with it.
  void mix(int i, int l) {
    const hw_layer& w = m.layer[l];
    project(i, l);
    f.sync();
    f.phase(i, HW_QKV);
    for (int n = f.from(i, step.sequences * blocks()); n < f.from(i + 1, step.sequences * blocks()); n++) convolve(i, l, n / blocks(), n % blocks() * LANES);
    f.sync();
    for (int n = f.from(i, step.sequences * H); n < f.from(i + 1, step.sequences * H); n++) mamba ? scan(i, l, n / H, n % H) : delta(i, l, n / H, n % H);
    if (!simple) f.sync();
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) finish(w, r);
    f.sync();
    f.phase(i, HW_ATTENTION);
    const bool plainly = !m.parallel && f.adds_plainly(w.post_attention);
    const Matmul out = shared_matmul(w.mix_out, s().rows, s().out.at, OUT, {plainly ? f.workspace.x.at : f.workspace.added.at, f.E, plainly});
    const std::initializer_list<Piece> pieces = {&Roles::mix_out};
    f.matmuls_with_adapters(i, l, pieces, &out, f.shrink_(i, l, pieces, inner, s().out.at, OUT));
    f.sync();
  }

 private:
  int blocks() const { return (channels + LANES - 1) / LANES; }

  void project(int i, int l) {
    const hw_layer& w = m.layer[l];
    const float* h = f.workspace.h.at;
    if (m.recurrence != HW_GATED_DELTA) {
      const Matmul in = f.make_matmul(i, w.mix_in, h, f.E, s().in.at, IN, false);
      const std::initializer_list<Piece> pieces = {&Roles::mix_in};
      f.matmuls_with_adapters(i, l, pieces, &in, f.shrink_(i, l, pieces, m.hidden, in.x.values, f.E));
      return;
    }
    const Matmul list[4] = {f.make_matmul(i, w.mix_qkv, h, f.E, s().in.at, IN, false), f.make_matmul(i, w.mix_beta, h, f.E, s().beta.at, HEADS, false),
                            f.make_matmul(i, w.mix_step, h, f.E, s().steps.at, HEADS, false), f.make_matmul(i, w.mix_gate, h, f.E, s().gate.at, OUT, false)};
    const std::initializer_list<Piece> pieces = {&Roles::mix_qkv, &Roles::mix_beta, &Roles::mix_step, &Roles::mix_gate};
    f.matmuls_with_adapters(i, l, pieces, list, f.shrink_(i, l, pieces, m.hidden, list[0].x.values, f.E));
  }

  // Calls f(first row, rows, source, target) for each run of a sequence, in order.
  template <class G>
  void runs(int sequence, G&& g) {
    for (int n = step.sequence_runs[sequence]; n < step.sequence_runs[sequence + 1]; n++) {
      const int32_t* run = step.state_runs + 4 * (size_t)n;
      g(run[0], run[1], run[2], run[3]);
    }
  }

  // 16 channels of a sequence's rows, from `first` on: each is convolved with the rows before it.
  void convolve(int i, int l, int sequence, int first) {
    const hw_layer& w = m.layer[l];
    const int count = std::min(LANES, channels - first), before = m.taps - 1;
    float *window = s().scratches[i].window.data(), *weights = s().scratches[i].weights.data();
    std::fill(weights, weights + (m.taps + 1) * LANES, 0.0f);
    std::fill(window, window + m.taps * LANES, 0.0f);
    for (int c = 0; c < count; c++)
      for (int t = 0; t < m.taps; t++) weights[t * LANES + c] = w.conv[(size_t)(first + c) * m.taps + t];
    for (int c = 0; w.conv_bias && c < count; c++) weights[m.taps * LANES + c] = w.conv_bias[first + c];
    runs(sequence, [&](int row, int rows, int source, int target) {
      const float* old = state(source, l) + (size_t)first * before;
      for (int c = 0; c < count; c++)
        for (int t = 0; t < before; t++) window[t * LANES + c] = old[c * before + t];
      for (int r = row; r < row + rows; r++) {
        const float* in = s().in.at + r * IN;
        vf x = load_part(in + (mamba ? inner : 0) + first, count);
        if (simple) x = vf_mul(x, load_part(in + 2 * m.hidden + first, count));
        vf_store(window + before * LANES, x);
        vf total = vf_mul(vf_load(window), vf_load(weights));
        for (int t = 1; t < m.taps; t++) total = vf_add(total, vf_mul(vf_load(window + t * LANES), vf_load(weights + t * LANES)));
        if (w.conv_bias) total = vf_add(total, vf_load(weights + m.taps * LANES));
        if (before) std::memmove(window, window + LANES, before * LANES * sizeof(float));
        if (simple) {
          store_part(s().out.at + r * OUT + first, vf_mul(load_part(in + m.hidden + first, count), total), count);
          continue;
        }
        float mixed[LANES];
        vf_store(mixed, total);
        activate(mamba ? m.activation : HW_SILU, nullptr, mixed, LANES, mixed);
        std::memcpy(s().mixed.at + r * MIXED + first, mixed, count * sizeof(float));
      }
      float* fresh = state(target, l) + (size_t)first * before;
      for (int c = 0; c < count; c++)
        for (int t = 0; t < before; t++) fresh[c * before + t] = window[t * LANES + c];
    });
  }

  // A head's state [rows, wide] from and to a place [rows, numbers].
  void load_state(const float* from, int rows, int numbers, float* to) {
    for (int n = 0; n < rows; n++) std::memcpy(to + n * wide, from + (size_t)n * numbers, numbers * sizeof(float)), pad(to + n * wide, numbers, wide);
  }
  void keep_state(const float* from, int rows, int numbers, float* to) {
    for (int n = 0; n < rows; n++) std::memcpy(to + (size_t)n * numbers, from + n * wide, numbers * sizeof(float));
  }

  // A key or query of length 1, times a factor.
  void unit(const float* x, float factor, float* out) {
    float squares = 0;
    for (int d = 0; d < DK; d++) squares += x[d] * x[d];
    const float scale = factor / std::sqrt(squares + 1e-6f);
    for (int d = 0; d < DK; d++) out[d] = x[d] * scale;
  }

  // The gated delta rule for one head: its state [DK, DV] decays, what it holds for the key is moved towards the value, and
  // the query reads it.
  void delta(int i, int l, int sequence, int head) {
    const hw_layer& w = m.layer[l];
    RecurrentBuffers::Scratch& own = s().scratches[i];
    const int group = m.cycled ? head % m.mix_groups : head / (H / m.mix_groups);
    const size_t at = past + (size_t)head * DK * DV;
    float *held = own.state.data(), *k = own.key.data(), *q = own.query.data();
    runs(sequence, [&](int row, int rows, int source, int target) {
      load_state(state(source, l) + at, DK, DV, held);
      for (int r = row; r < row + rows; r++) {
        const float* mixed = s().mixed.at + r * MIXED;
        unit(mixed + (size_t)group * DK, 1.0f / std::sqrt((float)DK), q);
        unit(mixed + keys + (size_t)group * DK, 1.0f, k);
        const vf decay = vf_set1(std::exp(w.rate[head] * softplus(s().steps.at[r * HEADS + head] + w.step_bias[head])));
        const vf beta = vf_set1(sigmoid_one(s().beta.at[r * HEADS + head]));
        for (int v = 0; v < DV; v += LANES) {
          const int count = std::min(LANES, DV - v);
          vf sum = vf_zero(), out = vf_zero();
          for (int d = 0; d < DK; d++) {
            const vf kept = vf_mul(vf_load(held + d * wide + v), decay);
            vf_store(held + d * wide + v, kept);
            sum = vf_fma(kept, vf_set1(k[d]), sum);
          }
          const vf moved = vf_mul(vf_sub(load_part(mixed + 2 * keys + (size_t)head * DV + v, count), sum), beta);
          for (int d = 0; d < DK; d++) {
            const vf now = vf_fma(vf_set1(k[d]), moved, vf_load(held + d * wide + v));
            vf_store(held + d * wide + v, now);
            out = vf_fma(now, vf_set1(q[d]), out);
          }
          store_part(s().out.at + r * OUT + (size_t)head * DV + v, out, count);
        }
      }
      keep_state(held, DK, DV, state(target, l) + at);
    });
  }

  // A selective state space for one head: its state [DV, DK] decays, takes in step * x * b, and is read by c.
  void scan(int i, int l, int sequence, int head) {
    const hw_layer& w = m.layer[l];
    RecurrentBuffers::Scratch& own = s().scratches[i];
    const int group = head / (H / m.mix_groups);
    const size_t at = past + (size_t)head * DK * DV;
    float *held = own.state.data(), *b = own.key.data(), *c = own.query.data();
    pad(b, DK, wide), pad(c, DK, wide);
    runs(sequence, [&](int row, int rows, int source, int target) {
      load_state(state(source, l) + at, DV, DK, held);
      for (int r = row; r < row + rows; r++) {
        const float *mixed = s().mixed.at + r * MIXED, *x = mixed + (size_t)head * DV;
        std::memcpy(b, mixed + inner + (size_t)group * DK, DK * sizeof(float));
        std::memcpy(c, mixed + inner + keys + (size_t)group * DK, DK * sizeof(float));
        const float wanted = softplus(s().in.at[r * IN + inner + channels + head] + w.step_bias[head]);
        const float size = std::min(std::max(wanted, m.step_least), m.step_most);
        const vf kept = vf_set1(std::exp(size * w.rate[head]));
        for (int p = 0; p < DV; p++) {
          const vf more = vf_set1(size * x[p]);
          vf sum = vf_zero();
          for (size_t n = 0; n < wide; n += LANES) {
            const vf now = vf_fma(more, vf_load(b + n), vf_mul(vf_load(held + p * wide + n), kept));
            vf_store(held + p * wide + n, now);
            sum = vf_fma(now, vf_load(c + n), sum);
          }
          s().out.at[r * OUT + (size_t)head * DV + p] = vf_sum(sum) + x[p] * w.skip[head];
        }
      }
      keep_state(held, DV, DK, state(target, l) + at);
    });
  }

  // Norms and gates a row's outputs, and quantizes them if the matrix that follows takes that.
  void finish(const hw_layer& w, int r) {
    float* out = s().out.at + r * OUT;
    if (m.recurrence == HW_GATED_DELTA) {
      for (int h = 0; h < H; h++) rms_norm(out + (size_t)h * DV, w.mix_norm, DV, m.eps, out + (size_t)h * DV);
      activate(HW_SILU, s().gate.at + r * OUT, out, inner, out);
    } else if (mamba) {
      const float* gate = s().in.at + r * IN;
      if (m.gate_first || !w.mix_norm) activate(m.activation, gate, out, inner, out);
      const int size = inner / m.mix_groups;
      for (int g = 0; w.mix_norm && g < m.mix_groups; g++) rms_norm(out + (size_t)g * size, w.mix_norm + (size_t)g * size, size, m.eps, out + (size_t)g * size);
      if (w.mix_norm && !m.gate_first) activate(m.activation, gate, out, inner, out);
    }
    if (is_quantized(w.mix_out)) quantize_row(out, inner, r, s().rows);
  }
};

}  // namespace HW_NS
