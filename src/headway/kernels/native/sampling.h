// Sampling a token from a row of logits, in double precision like the torch reference (kernels/reference/sampling.py):
// mask and changed scores → temperature → top-k → top-p → min-p. Tokens rank by score, then by lower id. Sampling walks the
// kept tokens in id order and takes the first whose cumulative weight exceeds uniform times the total.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"

namespace HW_NS {

// e^x for x <= 0, to about one unit in the last place; 0 below -708. The compiler vectorizes a plain loop over it.
inline double exp_below(double x) {
  constexpr double LOG2E = 1.4426950408889634, HIGH = 6.93147180369123816490e-01, LOW = 1.90821492927058770002e-10;
  constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves an integer in the low bits
  const bool in = x >= -708.0;
  const double y = in ? x : 0.0, shifted = y * LOG2E + ROUND, n = shifted - ROUND, r = (y - n * HIGH) - n * LOW;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  uint64_t bits;
  std::memcpy(&bits, &shifted, 8);
  bits = (bits + 1023) << 52;  // 2^n; n is in the low bits of `shifted`
  double power;
  std::memcpy(&power, &bits, 8);
  return in ? p * power : 0.0;
}

// One thread's sampler with its buffers.
class Sampler {
 public:
  void fit(int64_t vocab) {
    scores_.resize(vocab), weights_.resize(vocab), ids_.resize(vocab), ranked_.resize(vocab);
  }

  // The token, -1 where a logit is NaN, -2 where nothing is allowed.
  int64_t sample(const hw_sampling& d) {
    vocab_ = d.vocab;
    for (int64_t i = 0; i < d.vocab; i++) scores_[i] = d.logits[i];
    double nans = 0;
    for (int64_t i = 0; i < d.vocab; i++) nans += scores_[i] != scores_[i];
    if (nans) return -1;
    for (int64_t i = 0; i < d.changes; i++) scores_[d.changed[i]] = d.scores[i];
    collect(d);
    if (!count_) return -2;
    peak_ = scores_[ids_[0]];
    for (int64_t i = 1; i < count_; i++) peak_ = std::max(peak_, scores_[ids_[i]]);
    if (d.temperature == 0) return *std::find_if(ids_.begin(), ids_.begin() + count_, [&](int32_t id) { return scores_[id] == peak_; });
    if (d.top_k > 0 && d.top_k < count_) keep_best(d.top_k);
    double whole = compute_weights(d.temperature);
    if (d.top_p < 1) whole = keep_share(d.top_p * whole);
    if (d.min_p > 0) whole = keep_above(d.min_p);
    return pick(d.uniform * whole);
  }

 private:
  // Candidates in id order: allowed tokens with a finite score, or all allowed tokens if there are none.
  void collect(const hw_sampling& d) {
    count_ = 0;
    for (int64_t i = 0; i < d.vocab; i++)
      if ((!d.allowed || d.allowed[i]) && scores_[i] > -INFINITY) ids_[count_++] = (int32_t)i;
    if (count_) return;
    for (int64_t i = 0; i < d.vocab; i++)
      if (!d.allowed || d.allowed[i]) ids_[count_++] = (int32_t)i;
  }

  bool better(int32_t a, int32_t b) const { return scores_[a] > scores_[b] || (scores_[a] == scores_[b] && a < b); }

  // The k best, kept in a heap with the worst of them on top.
  void keep_best(int64_t k) {
    auto before = [this](int32_t a, int32_t b) { return better(a, b); };
    std::copy(ids_.begin(), ids_.begin() + k, ranked_.begin());
    std::make_heap(ranked_.begin(), ranked_.begin() + k, before);
    for (int64_t i = k; i < count_; i++) {
      if (!better(ids_[i], ranked_[0])) continue;
      std::pop_heap(ranked_.begin(), ranked_.begin() + k, before);
      ranked_[k - 1] = ids_[i];
      std::push_heap(ranked_.begin(), ranked_.begin() + k, before);
    }
    take(k);
  }

  // Makes the first n of ranked_ the candidates.
  void take(int64_t n) {
    std::copy(ranked_.begin(), ranked_.begin() + n, ids_.begin());
    std::sort(ids_.begin(), ids_.begin() + n);
    count_ = n;
  }

  // Computes the candidates' weights, the largest being 1, and returns their sum. Without a lookup if all ids are candidates.
  double compute_weights(double temperature) {
    const bool all = count_ == vocab_;
    if (!all)
      for (int64_t i = 0; i < count_; i++) weights_[i] = scores_[ids_[i]];
    const double* from = all ? scores_.data() : weights_.data();
    const double peak = peak_;
    for (int64_t i = 0; i < count_; i++) weights_[i] = from[i] == peak ? 0.0 : (from[i] - peak) / temperature;
    for (int64_t i = 0; i < count_; i++) weights_[i] = exp_below(weights_[i]);
    return sum();
  }

  double sum() const {
    double part[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= count_; i += 8)
      for (int j = 0; j < 8; j++) part[j] += weights_[i + j];
    for (; i < count_; i++) part[0] += weights_[i];
    return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
  }

  // Keeps the shortest ranking prefix whose weight reaches the goal. Ranks only heavy tokens where those are enough.
  double keep_share(double goal) {
    int64_t n = 0;
    for (double threshold : {1e-3, 1e-6, 0.0}) {
      double reached = 0;
      n = 0;
      for (int64_t i = 0; i < count_; i++)
        if (weights_[i] >= threshold) ranked_[n++] = (int32_t)i, reached += weights_[i];
      if (reached > goal * (1 + 1e-9)) break;  // with a margin: sums in another order round differently
    }
    std::sort(ranked_.begin(), ranked_.begin() + n, [this](int32_t a, int32_t b) { return better(ids_[a], ids_[b]); });
    double reached = 0;
    int64_t keep = 0;
    while (keep < n && reached < goal) reached += weights_[ranked_[keep++]];
    keep = std::max<int64_t>(keep, 1);
    std::sort(ranked_.begin(), ranked_.begin() + keep);
    return only(keep);
  }

  double keep_above(double threshold) {
    int64_t n = 0;
    for (int64_t i = 0; i < count_; i++)
      if (weights_[i] >= threshold) ranked_[n++] = (int32_t)i;
    return only(n);
  }

  // Keeps the candidates at the first n indices of ranked_, which ascend; returns the sum of their weights.
  double only(int64_t n) {
    for (int64_t i = 0; i < n; i++) ids_[i] = ids_[ranked_[i]], weights_[i] = weights_[ranked_[i]];
    count_ = n;
    return sum();
  }

  int64_t pick(double goal) const {
    double reached = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < count_; i++) {
      if (weights_[i] == 0) continue;
      reached += weights_[i];
      last = i;
      if (reached > goal) break;
    }
    return ids_[last];
  }

  std::vector<double> scores_, weights_;
  std::vector<int32_t> ids_, ranked_;
  int64_t vocab_ = 0, count_ = 0;
  double peak_ = 0;
};

}  // namespace HW_NS
