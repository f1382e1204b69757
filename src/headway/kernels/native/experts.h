// Experts: which of them a row goes to, the rows of each together, and one expert's matrix.
#pragma once
#include <cmath>
#include <vector>

#include "attention.h"

namespace HW_NS {

// The experts of all rows, and the rows by expert: a row has one place for each expert it goes to.
struct Routing {
  std::vector<int> chosen, place;  // [rows, per_token]; a group's best are put there first, which may be more
  std::vector<float> weights;      // [rows, per_token]
  std::vector<int> first;          // [experts + 1] the first place of each expert
  std::vector<int> row, entry;     // [rows * per_token] of each place: its row, and its index in `chosen`
  std::vector<float> scores, ranked, groups;  // of one row's experts, and of their groups
  std::vector<int> kept;

  void fit(int rows, const hw_model& m) {
    const size_t all = (size_t)rows * m.per_token;
    chosen.resize(all + m.route_best), place.resize(all), weights.resize(all), row.resize(all), entry.resize(all);
    first.resize(m.experts + 2);
    scores.resize(m.experts), ranked.resize(m.experts), groups.resize(m.route_groups), kept.resize(m.route_groups);
  }
};

inline float exp_one(float x) {
  float t[LANES];
  vf_store(t, vf_exp(vf_set1(x)));
  return t[0];
}

inline float sigmoid_one(float x) { return 1.0f / (1.0f + exp_one(-x)); }

// The `count` highest of `all` values, the highest first, of equals the lower number first; NaN counts as the highest.
inline void choose_highest(const float* values, int all, int count, int* chosen) {
  auto higher = [&](int a, int b) { return values[a] > values[b] || (values[a] != values[a] && values[b] == values[b]); };
  for (int n = 0; n < count; n++) {
    int best = -1;
    for (int e = 0; e < all; e++)
      if (std::find(chosen, chosen + n, e) == chosen + n && (best < 0 || higher(e, best))) best = e;
    chosen[n] = best;
  }
}

// The experts with the highest logits. Weights are probabilities over all experts, or with `normalize` over the chosen ones.
inline void route_row(const float* logits, int experts, int count, bool normalize, int* chosen, float* weights) {
  choose_highest(logits, experts, count, chosen);
  const float most = logits[chosen[0]];
  float sum = 0;
  for (int n = 0; n < count; n++) weights[n] = exp_one(logits[chosen[n]] - most);
  for (int n = 0; normalize && n < count; n++) sum += weights[n];
  for (int e = 0; !normalize && e < experts; e++) sum += exp_one(logits[e] - most);
  for (int n = 0; n < count; n++) weights[n] = most == most ? weights[n] / sum : most;
}

// The experts with the highest scores of the best groups: a group is as good as the sum of its `route_best` highest. A
// score is a sigmoid or a probability; `correction` is added where experts are chosen, not where they are weighted.
inline void route_by_groups(const float* logits, const float* correction, const hw_model& m, Routing& to, int* chosen, float* weights) {
  const int X = m.experts, count = m.per_token, size = X / m.route_groups;
  float *scores = to.scores.data(), *ranked = to.ranked.data(), most = logits[0], sum = 0;
  for (int e = 1; e < X; e++) most = logits[e] > most || logits[e] != logits[e] ? logits[e] : most;
  for (int e = 0; e < X; e++) scores[e] = m.route_sigmoid ? sigmoid_one(logits[e]) : exp_one(logits[e] - most), sum += scores[e];
  for (int e = 0; !m.route_sigmoid && e < X; e++) scores[e] /= sum;
  for (int e = 0; e < X; e++) ranked[e] = correction ? scores[e] + correction[e] : scores[e];
  if (m.route_kept < m.route_groups) {
    for (int g = 0; g < m.route_groups; g++) {
      choose_highest(ranked + g * size, size, m.route_best, chosen);
      to.groups[g] = 0;
      for (int n = 0; n < m.route_best; n++) to.groups[g] += ranked[g * size + chosen[n]];
    }
    choose_highest(to.groups.data(), m.route_groups, m.route_kept, to.kept.data());
    for (int e = 0; e < X; e++)
      if (std::find(to.kept.data(), to.kept.data() + m.route_kept, e / size) == to.kept.data() + m.route_kept) ranked[e] = -INFINITY;
  }
  choose_highest(ranked, X, count, chosen);
  float total = 0;
  for (int n = 0; n < count; n++) total += scores[chosen[n]];
  for (int n = 0; n < count; n++) weights[n] = (m.normalize ? scores[chosen[n]] / (total + 1e-20f) : scores[chosen[n]]) * m.route_scale;
}

// Routes rows [rows, stride] of logits into a routing that fits them; within an expert its rows stay in order.
inline void route(const float* logits, size_t stride, int rows, const hw_model& m, const float* correction, Routing& to) {
  const int each = m.per_token, all = rows * each;
  std::fill(to.first.begin(), to.first.end(), 0);
  for (int r = 0; r < rows; r++) {
    const float* own = logits + r * stride;
    int* chosen = &to.chosen[(size_t)r * each];
    float* weights = &to.weights[(size_t)r * each];
    if (m.route_groups) route_by_groups(own, correction, m, to, chosen, weights);
    else route_row(own, m.experts, each, m.normalize, chosen, weights);
    for (int n = 0; m.weighted_inputs && n < each; n++) weights[n] = sigmoid_one(own[chosen[n]]);
  }
  for (int n = 0; n < all; n++) to.first[to.chosen[n] + 2]++;
  for (int e = 0; e < m.experts; e++) to.first[e + 2] += to.first[e + 1];
  for (int n = 0; n < all; n++) {
    to.place[n] = to.first[to.chosen[n] + 1]++;
    to.row[to.place[n]] = n / each, to.entry[to.place[n]] = n;
  }
}

// The matrix [n, k] of one expert, of those that a matrix holds one after the other.
inline hw_matrix one_expert(const hw_matrix& all, int expert, int n) {
  hw_matrix w = all;
  const size_t blocks = up(n, LANES) / LANES, block = expert * blocks, groups = up(w.k, 32) / 32;
  auto skip = [&](const void* p, size_t bytes) { return p ? (const char*)p + block * bytes : nullptr; };
  w.n = n;
  if (w.bias) w.bias += block * LANES;
  if (w.kind <= HW_BF16) {
    w.quants = skip(w.quants, (size_t)w.k * LANES * (w.kind == HW_F32 ? 4 : 2));
    return w;
  }
  if (w.kind == HW_INT8) {
    w.quants = skip(w.quants, groups * 512);
    w.scales = skip(w.scales, LANES * 4);
    return w;
  }
  const size_t held = w.group == 16 ? 2 * groups : (w.k + w.group - 1) / w.group;
  const size_t width = w.scale_kind == HW_SCALE_K || w.scale_kind == HW_SCALE_E8 ? 1 : w.scale_kind == HW_SCALE_F16 ? 2 : 4;
  w.quants = skip(w.quants, groups * w.bits * 64);
  w.scales = skip(w.scales, held * (w.has_min ? 32 : 16) * width);
  w.super = skip(w.super, groups / 8 * 32 * 2);
  return w;
}

}  // namespace HW_NS
