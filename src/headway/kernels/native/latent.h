// Latent attention around the attention of attention.h: queries go to the latent space, slots are [rotated key, latent
// vector], and heads make their outputs of means of latent vectors. F is the forward pass.
#pragma once
#include "activations.h"
#include "experts.h"
#include "lora.h"
#include "rows.h"

namespace HW_NS {

struct LatentBuffers {
  Buffer<float> low, queries, heads, out;  // latent queries, queries, rows by head, outputs of heads
  QuantizedActivations rows, head_rows;
  std::vector<std::vector<int>> of;  // one per thread
  std::vector<hw_matrix> matrices;  // [threads, heads] one matrix for each head
  std::vector<Matmul> list;
};

template <class F>
struct LatentAttention {
  F& f;
  const hw_model& m = f.m;
  const int T = f.T, H = m.heads, query_dim = m.key_dim + m.rotated;
  const size_t LOW = up(m.query_latent, 32), QUERIES = up(H * query_dim, 32), OUT = up(H * m.value_dim, 32);

  LatentBuffers& s() { return f.workspace.latent; }

  void fit() {
    s().low.fit(T * LOW), s().queries.fit(T * QUERIES), s().out.fit(T * OUT);
    s().heads.fit((size_t)H * T * up(std::max(m.key_dim, m.latent), 32));
    s().rows.fit(T, std::max(m.query_latent, 1)), s().head_rows.fit(H * T, std::max(m.key_dim, m.latent));
    s().of.resize(f.threads);
    s().matrices.resize((size_t)f.threads * H), s().list.resize((size_t)f.threads * H);
    for (int r = 0; r < T; r++) pad(s().out.at + r * OUT, H * m.value_dim, OUT);
  }

  // Queries of normed rows, and their slots, which go to the KV cache.
  void project(int i, int l) {
    const hw_layer& w = m.layer[l];
    const bool low = w.q_down.n != 0;
    const Matmul first[2] = {f.make_matmul(i, low ? w.q_down : w.q, f.workspace.h.at, f.E, low ? s().low.at : s().queries.at, low ? LOW : QUERIES, false),
                             f.make_matmul(i, w.kv_down, f.workspace.h.at, f.E, f.workspace.k.at, f.K, false)};
    const std::initializer_list<Piece> whole = {&Roles::q, &Roles::kv_down}, latents = {&Roles::q_down, &Roles::kv_down}, pieces = low ? latents : whole;
    f.matmuls_with_adapters(i, l, pieces, first, f.shrink_(i, l, pieces, m.hidden, first[0].x.values, f.E));
    f.sync();
    if (low) queries_of_latents(i, l);
    f.phase(i, HW_QKV);
    by_head(i, l);
    f.sync();
    heads(i, l, w.key_up, &Roles::key_up, m.latent, f.workspace.q.at + m.rotated, m.head_dim, f.Q);
    f.sync();
    for (int n = f.from(i, T * H); n < f.from(i + 1, T * H); n++) {
      float* q = f.workspace.q.at + n / H * f.Q + (size_t)(n % H) * m.head_dim;
      for (int d = m.rotated; d < m.head_dim; d++) q[d] *= m.scale;
      f.copy_query(l, n / H, n % H, q);
    }
    f.sync();
    f.phase(i, HW_ROPE);
  }

  // The outputs of all heads, of the latent vectors that attention gave.
  void values(int i, int l) {
    const hw_matrix& w = m.layer[l].value_up;
    for (int n = f.from(i, T * H); n < f.from(i + 1, T * H); n++)
      head_row(f.workspace.mixed.at + n / H * f.Q + (size_t)(n % H) * m.head_dim + m.rotated, m.latent, n % H * T + n / H, is_quantized(w));
    f.sync();
    heads(i, l, w, &Roles::value_up, m.value_dim, s().out.at, m.value_dim, OUT);
    f.sync();
  }

 private:
  void queries_of_latents(int i, int l) {
    const hw_layer& w = m.layer[l];
    const std::initializer_list<Piece> pieces = {&Roles::q_up};
    for (int r = f.from(i, T); r < f.from(i + 1, T); r++) {
      float* x = s().low.at + r * LOW;
      rms_norm(x, w.q_down_norm, m.query_latent, m.latent_eps, x);
      pad(x, m.query_latent, LOW);
      if (is_quantized(w.q_up)) quantize_row(x, m.query_latent, r, s().rows);
    }
    f.sync();
    const Matmul second = shared_matmul(w.q_up, s().rows, s().low.at, LOW, {s().queries.at, QUERIES, false});
    f.matmuls_with_adapters(i, l, pieces, &second, f.shrink_(i, l, pieces, m.query_latent, s().low.at, LOW));
    f.sync();
  }

  // What is rotated of queries and keys; the rest of queries, head by head; latent vectors, normed, with their keys.
  void by_head(int i, int l) {
    const hw_layer& w = m.layer[l];
    const int all = H + 1;
    for (int64_t n = f.from(i, T * all); n < f.from(i + 1, T * all); n++) {
      const int r = (int)(n / all), h = (int)(n % all);
      const float* angles = f.workspace.angles.at + r * f.rope_stride;
      if (h < H) {
        const float* q = s().queries.at + r * QUERIES + (size_t)h * query_dim;
        head_row(q, m.key_dim, h * T + r, is_quantized(w.key_up));
        rotate_into(q + m.key_dim, angles, m.rotated / 2, m.paired, m.scale, f.workspace.q.at + r * f.Q + (size_t)h * m.head_dim);
        continue;
      }
      const float* down = f.workspace.k.at + r * f.K;
      float* slot = f.workspace.v.at + r * f.K;
      rotate_into(down + m.latent, angles, m.rotated / 2, m.paired, 1.0f, slot);
      rms_norm(down, w.kv_down_norm, m.latent, m.latent_eps, slot + m.rotated);
      if (f.step.write_slots[r] < 0) continue;
      const size_t first = (size_t)w.kv_before * m.kv_pages * m.page_size;
      f.write_numbers(slot, m.head_dim, first + (size_t)f.step.write_slots[r] * m.head_dim, 1);
    }
  }

  // Puts a head's row of `k` numbers at its place.
  void head_row(const float* x, int k, int place, bool quantized) {
    float* to = s().heads.at + (size_t)place * up(k, 32);
    std::memcpy(to, x, k * sizeof(float));
    pad(to, k, up(k, 32));
    if (quantized) quantize_row(to, k, place, s().head_rows);
  }

  // Each head's rows times its own matrix of `n` outputs, which lie `apart` numbers apart, and what adapters add.
  void heads(int i, int l, const hw_matrix& w, ExpertPiece piece, int n, float* to, size_t apart, size_t stride) {
    if (!f.head_width) return heads_alone(i, w, n, to, apart, stride);
    ExpertPlaces& places = f.workspace.adapted[i];
    std::vector<int>& of = s().of[i];  // the places of a row's heads, and then the heads
    of.resize((size_t)2 * T * H);
    for (int n = 0; n < T * H; n++) of[n] = n % H * T + n / H, of[T * H + n] = n % H;
    places.fill(f.step, l, {piece}, H, H, of.data(), of.data() + T * H);
    const std::initializer_list<ExpertPiece> pieces = {piece};
    const ExpertUses uses{f.adapters, l, pieces, places, f.workspace.expert_low_rank.at, f.head_width, T, apart};
    hw_matrix one = {};
    one.n = n;
    const Matmul outputs{&one, {}, {to, stride, false}};
    shrink(uses, w.k, s().heads.at, up(w.k, 32), i, f.threads);
    heads_alone(i, w, n, to, apart, stride);
    f.sync();
    expand(uses, &outputs, i, f.threads);
  }

  void heads_alone(int i, const hw_matrix& w, int n, float* to, size_t apart, size_t stride) {
    hw_matrix* own = &s().matrices[(size_t)i * H];
    Matmul* list = &s().list[(size_t)i * H];
    for (int h = 0; h < H; h++) {
      own[h] = one_expert(w, h, n);
      list[h] = shared_matmul(own[h], s().head_rows, s().heads.at, up(w.k, 32), {to + h * apart, stride, false});
      list[h].x = list[h].x.from((size_t)h * T);
    }
    matmuls(list, H, T, i, f.threads);
  }
};

}  // namespace HW_NS
