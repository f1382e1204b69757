// Layers that differ from each other (Gemma 3n, Gemma 4): what they take of the token itself, experts beside the
// feed-forward, and residuals side by side. F is the forward pass.
#pragma once
#include "activations.h"
#include "experts.h"
#include "lora.h"
#include "rows.h"

namespace HW_NS {

struct PerLayerBuffers {
  Buffer<float> inputs, table;                          // of the token, of all layers, by row; one row of the table, by thread
  Buffer<float> experts;                                // outputs of experts beside the feed-forward, by row
  Buffer<float> streams, predicted;                     // [rows, streams, hidden] the residuals, and what a layer predicts of them
  Buffer<float> kinds, shares;                          // what decides how much streams have of each other, by row
  Buffer<float> low, raised;                            // the product of low rank beside attention, by row
  QuantizedActivations rows, kind_rows, low_rows;
};

// What a layer takes of the token: act(gate x) * input, projected and normed. An input is a part of the token's row in a
// table, and a part of a product with its embedding.
template <class F>
struct TokenInputs {
  F& f;
  const hw_model& m = f.m;
  const int T = f.T, P = m.token_size, all = m.input_projection.n;
  const size_t stride = up(all, LANES), wide = up(m.token_inputs.k, 32);

  PerLayerBuffers& s() { return f.workspace.per_layer; }

  void fit() { s().inputs.fit(T * stride), s().table.fit(f.threads * wide); }

  // The inputs of all layers, for rows that are embedded.
  void make(int i) {
    f.norm_and_quantize(i, hw_norm{}, is_quantized(m.input_projection));
    const Matmul made = f.make_matmul(i, m.input_projection, f.workspace.h.at, f.E, s().inputs.at, stride, false);
    const std::initializer_list<Piece> pieces = {&Roles::input_projection};
    f.matmuls_with_adapters(i, m.layers, pieces, &made, f.shrink_(i, m.layers, pieces, m.hidden, made.x.values, f.E));
    f.sync();
    float* table = s().table.at + i * wide;
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) {
      const int token = f.step.tokens[r];
      dequantize_row(m.token_inputs, token < m.token_inputs.n ? token : 0, table);
      for (int at = 0; at < all; at += P) {
        float* x = s().inputs.at + r * stride + at;
        for (int d = 0; d < P; d++) x[d] *= m.hidden_root;
        rms_norm(x, m.input_projection_norm, P, m.eps, x);
        for (int d = 0; d < P; d++) x[d] = (x[d] + table[at + d] * m.token_root) * 0.70710678118654752f;
      }
    }
    f.sync();
  }

  // What layer l takes, in `added`, for this thread's rows of the residual.
  void part(int i, int l) {
    const hw_layer& w = m.layer[l];
    auto& ws = f.workspace;
    f.take_rows(i, is_quantized(w.input_gate), [&](int r, float* h) {
      const float* x = ws.x.at + r * f.E;
      for (int d = 0; d < m.hidden; d++) h[d] = w.altup_scale ? x[d] * w.altup_scale[d] : x[d];
    });
    const Matmul gate = f.make_matmul(i, w.input_gate, ws.h.at, f.E, ws.gate.at, f.F, false);
    const std::initializer_list<Piece> gates = {&Roles::input_gate}, outs = {&Roles::input_out};
    f.matmuls_with_adapters(i, l, gates, &gate, f.shrink_(i, l, gates, m.hidden, gate.x.values, f.E));
    f.sync();
    float* act = ws.act.at + (f.replicated ? (size_t)i * T * f.F : 0);
    for (int r = f.first(i); r < f.last_(i); r++) {
      activate(m.activation, ws.gate.at + r * f.F, s().inputs.at + r * stride + (size_t)l * P, P, act + r * f.F);
      pad(act + r * f.F, P, up(P, 32));
      if (is_quantized(w.input_out)) f.quantize(i, act + r * f.F, P, r);
    }
    if (!f.replicated) f.sync();
    const Matmul out = f.make_matmul(i, w.input_out, ws.act.at, f.F, ws.added.at, f.E, false);
    f.matmuls_with_adapters(i, l, outs, &out, f.shrink_(i, l, outs, P, out.x.values, f.F));
    f.sync();
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) rms_norm(ws.added.at + r * f.E, w.post_input_norm, m.hidden, m.eps, ws.added.at + r * f.E);
  }
};

// Experts beside an ordinary feed-forward, which both take the residual after attention, each with norms of its own.
template <class F>
struct ExpertsBeside {
  F& f;
  const hw_model& m = f.m;
  const int T = f.T;

  float* row(int r) { return f.workspace.per_layer.experts.at + r * f.E; }

  // What the experts make of the residual.
  void run(int i, int l) {
    const hw_layer& w = m.layer[l];
    auto& ws = f.workspace;
    f.take_rows(i, is_quantized(w.router), [&](int r, float* h) {
      rms_norm(ws.x.at + r * f.E, w.router_scale, m.hidden, m.eps, h);
      for (int d = 0; d < m.hidden; d++) h[d] *= m.hidden_root;
    });
    const Matmul router = f.make_matmul(i, w.router, ws.h.at, f.E, ws.routes.at, f.X, false);
    const std::initializer_list<Piece> pieces = {&Roles::router};
    f.matmuls_with_adapters(i, l, pieces, &router, f.shrink_(i, l, pieces, m.hidden, router.x.values, f.E));
    f.sync();
    f.norm_and_quantize(i, hw_norm{w.expert_in_norm, nullptr}, false);
    f.mix_experts(i, l);
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) {
      f.combine(w, ws.routings[i], r);
      rms_norm(ws.added.at + r * f.E, w.expert_out_norm, m.hidden, m.eps, row(r));
    }
    f.sync();
  }

  // Adds that to what the feed-forward gave.
  void join(int i, const hw_layer& w) {
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) {
      float* y = f.workspace.added.at + r * f.E;
      rms_norm(y, w.dense_norm, m.hidden, m.eps, y);
      for (int d = 0; d < m.hidden; d++) y[d] += row(r)[d];
    }
  }
};

// Residuals side by side (AltUp), of which `x` has the active one: a layer predicts all of them, computes that one, and
// corrects the others by what it got wrong. Beside attention there is a product of low rank.
template <class F>
struct Streams {
  F& f;
  const hw_model& m = f.m;
  const int T = f.T, n = m.streams, rank = m.streams ? m.layer[0].laurel_down.n : 0;
  const size_t E = f.E, N = up(n, 32), S = up(n * n, LANES), LOW = up(rank, 32);

  PerLayerBuffers& s() { return f.workspace.per_layer; }
  float* stream(int r, int k) { return s().streams.at + ((size_t)r * n + k) * E; }
  float* prediction(int r, int k) { return s().predicted.at + ((size_t)r * n + k) * E; }

  void fit() {
    s().streams.fit(T * n * E), s().predicted.fit(T * n * E), s().kinds.fit(T * N), s().shares.fit(T * S);
    s().low.fit(T * LOW), s().raised.fit(T * E);
    s().rows.fit(T, m.hidden), s().kind_rows.fit(T, n), s().low_rows.fit(T, rank);
  }

  // The streams of embedded rows: others are as large as the first.
  void spread(int i) {
    f.norm_and_quantize(i, hw_norm{}, is_quantized(m.altup_spread));
    for (int k = 1; k < n; k++) {
      const hw_matrix w = one_expert(m.altup_spread, k - 1, m.hidden);
      numbered(i, &Roles::altup_spread, k, f.make_matmul(i, w, f.workspace.h.at, E, stream(0, k), n * E, false));
    }
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) {
      float* x = f.workspace.x.at + r * E;
      std::memcpy(stream(r, 0), x, m.hidden * sizeof(float));
      for (int k = 1; k < n; k++) as_large_as(stream(r, 0), stream(r, k));
      take_active(r);
    }
    f.sync();
  }

  // The residual of all streams: their mean, where they are as large as the first.
  void gather(int i) {
    for (int k = 1; k < n; k++) {
      const hw_matrix w = one_expert(m.altup_gather, k - 1, m.hidden);
      f.take_rows(i, is_quantized(w), [&](int r, float* h) { std::memcpy(h, stream(r, k), m.hidden * sizeof(float)); });
      numbered(i, &Roles::altup_gather, k, f.make_matmul(i, w, f.workspace.h.at, E, prediction(0, k), n * E, false));
    }
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) {
      float* x = f.workspace.x.at + r * E;
      std::memcpy(x, stream(r, 0), m.hidden * sizeof(float));
      for (int k = 1; k < n; k++) {
        as_large_as(stream(r, 0), prediction(r, k));
        for (int d = 0; d < m.hidden; d++) x[d] += prediction(r, k)[d];
      }
      for (int d = 0; d < m.hidden; d++) x[d] /= (float)n;
    }
    f.sync();
  }

  // All streams as layer l expects them to be.
  void predict(int i, int l) {
    const hw_layer& w = m.layer[l];
    const int first = f.from(i, T), count = f.from(i + 1, T) - first;
    find_kinds(l, first, count);
    own_rows(l, w.altup_predict, &Roles::altup_predict, s().kinds.at, N, s().kind_rows, first, count, s().shares.at, S);
    for (int r = first; r < first + count; r++) {
      const float* shares = s().shares.at + r * S;
      for (int k = 0; k < n; k++) {
        float* to = prediction(r, k);
        for (int d = 0; d < m.hidden; d++) to[d] = shares[k * n] * stream(r, 0)[d];
        for (int j = 1; j < n; j++) {
          const float share = shares[k * n + j], *from = stream(r, j);
          for (int d = 0; d < m.hidden; d++) to[d] += share * from[d];
        }
        for (int d = 0; d < m.hidden; d++) to[d] += stream(r, k)[d];
      }
      std::memcpy(f.workspace.x.at + r * E, prediction(r, m.active), m.hidden * sizeof(float));
    }
    f.sync();
  }

  // All streams after the active one is computed.
  void correct(int i, int l) {
    const hw_layer& w = m.layer[l];
    const int first = f.from(i, T), count = f.from(i + 1, T) - first;
    find_kinds(l, first, count);
    own_rows(l, w.altup_correct, &Roles::altup_correct, s().kinds.at, N, s().kind_rows, first, count, s().shares.at, S);
    for (int r = first; r < first + count; r++) {
      const float *x = f.workspace.x.at + r * E, *expected = prediction(r, m.active);
      for (int k = 0; k < n; k++) {
        const float share = s().shares.at[r * S + k] + 1.0f, *from = prediction(r, k);
        float* to = stream(r, k);
        for (int d = 0; d < m.hidden; d++) to[d] = from[d] + share * (x[d] - expected[d]);
      }
      take_active(r);
    }
    f.sync();
  }

  // Adds y to all streams but the first.
  void add_to_others(int r, const float* y) {
    for (int k = 1; k < n; k++)
      for (int d = 0; d < m.hidden; d++) stream(r, k)[d] += y[d];
    take_active(r);
  }

  // The product of low rank of normed rows: its first matrix, the rows between, its second, and the sum with attention.
  Matmul low_rank(int i, int l) const { return f.make_matmul(i, m.layer[l].laurel_down, f.workspace.h.at, E, f.workspace.per_layer.low.at, LOW, false); }

  // Whether adapters add to the second; the barrier after it is the caller's.
  bool quantize_low_rank(int i, int l) {
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) {
      pad(s().low.at + r * LOW, rank, LOW);
      if (is_quantized(m.layer[l].laurel_up)) quantize_row(s().low.at + r * LOW, rank, r, s().low_rows);
    }
    return f.shrink_(i, l, {&Roles::laurel_up}, rank, s().low.at, LOW);
  }

  void raise_low_rank(int i, int l, bool adapted) {
    const Matmul raised = shared_matmul(m.layer[l].laurel_up, s().low_rows, s().low.at, LOW, {s().raised.at, E, false});
    matmuls(&raised, 1, T, i, f.threads);
    if (adapted) expand(LayerUses{f.adapters, l, {&Roles::laurel_up}}, &raised, i, f.threads);
  }

  void add_low_rank(int i, int l) {
    const hw_layer& w = m.layer[l];
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) {
      float *x = f.workspace.x.at + r * E, *y = s().raised.at + r * E;
      const float* h = f.own_h(i) + r * E;
      rms_norm(y, w.laurel_norm, m.hidden, m.eps, y);
      for (int d = 0; d < m.hidden; d++) x[d] = (x[d] + h[d] + y[d]) / 1.41421356237309505f;
    }
  }

 private:
  void take_active(int r) { std::memcpy(f.workspace.x.at + r * E, stream(r, m.active), m.hidden * sizeof(float)); }

  // y with the mean square of x.
  void as_large_as(const float* x, float* y) {
    constexpr float LEAST = 1e-5f;  // of a mean square that is divided by
    const float own = mean_square(y, m.hidden), size = std::sqrt(mean_square(x, m.hidden)), by = std::sqrt(own < LEAST ? LEAST : own);
    for (int d = 0; d < m.hidden; d++) y[d] = y[d] * size / by;
  }

  // The matmul of stream k's own matrix, of several, with what adapters add; all rows are there after it.
  void numbered(int i, ExpertPiece piece, int k, const Matmul& made) {
    const NumberedUses uses(f.adapters, m.layers, piece, k - 1);
    shrink(uses, m.hidden, made.x.values, E, i, f.threads);
    if (f.step.adapter_count) f.sync();
    matmuls(&made, 1, T, i, f.threads);
    expand(uses, &made, i, f.threads);
    f.sync();
  }

  // tanh of the router's numbers, of rows of the residual.
  void find_kinds(int l, int first, int count) {
    const hw_layer& w = m.layer[l];
    float* normed = f.workspace.added.at;
    for (int r = first; r < first + count; r++) {
      rms_norm(f.workspace.x.at + r * E, w.altup_norm, m.hidden, m.eps, normed + r * E);
      for (int d = 0; d < m.hidden; d++) normed[r * E + d] *= m.hidden_inverse;
      pad(normed + r * E, m.hidden, E);
    }
    own_rows(l, w.altup_router, &Roles::altup_router, normed, E, s().rows, first, count, s().kinds.at, N);
    for (int r = first; r < first + count; r++) {
      float* kinds = s().kinds.at + r * N;
      pad(kinds, n, N);
      for (size_t k = 0; k < N; k += LANES) vf_store(kinds + k, soft_cap(vf_load(kinds + k), 1.0f));
    }
  }

  // Rows [first, first + count) times a small matrix, with what adapters add, by this thread alone.
  void own_rows(int l, const hw_matrix& w, Piece piece, const float* in, size_t stride, QuantizedActivations& quantized, int first, int count, float* out, size_t out_stride) {
    for (int r = first; is_quantized(w) && r < first + count; r++) quantize_row(in + r * stride, w.k, r, quantized);
    Matmul made = shared_matmul(w, quantized, in, stride, {out + first * out_stride, out_stride, false});
    made.x = made.x.from(first);
    matmuls(&made, 1, count, 0, 1);
    add_own_rows(LayerUses{f.adapters, l, {piece}}, w.k, in, stride, w.n, {out, out_stride, false}, first, count);
  }
};

}  // namespace HW_NS
