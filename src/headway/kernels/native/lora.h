// LoRA adapters, added to a matmul: y[row] += scale * B (A x[row]) for the rows of each adapter, from unquantized
// activations, in float32. A row's bits do not depend on its neighbors: every sum has one order, whatever the tile.
//
// Two parts with a barrier between them: `shrink` computes A x of all rows, split over the threads by work; `expand` adds B
// times that to the outputs that the same thread has just computed.
#pragma once
#include <vector>

#include "matmul.h"

namespace HW_NS {

constexpr int PIECES = 4;  // matrices of one group of matmuls, at most: q, k, v and the gate of attention, or that of a low rank
constexpr int PHASES = 4;  // sums that the inputs of one output take turns in
constexpr int SHRINK_ROWS = 4, EXPAND_ROWS = 8;

typedef hw_low_rank hw_adapter_layer::*Piece;
typedef const hw_low_rank* hw_adapter_layer::*ExpertPiece;  // those of all experts
typedef hw_adapter_layer Roles;
constexpr Piece EVERY_PIECE[] = {&Roles::q, &Roles::k, &Roles::v, &Roles::o, &Roles::gate, &Roles::up, &Roles::down,
                                 &Roles::attention_gate, &Roles::mix_in, &Roles::mix_qkv, &Roles::mix_beta, &Roles::mix_step, &Roles::mix_gate, &Roles::mix_out,
                                 &Roles::q_down, &Roles::q_up, &Roles::kv_down,
                                 &Roles::router, &Roles::shared_gate, &Roles::shared_up, &Roles::shared_down, &Roles::shared_router,
                                 &Roles::input_gate, &Roles::input_out, &Roles::input_projection,
                                 &Roles::laurel_down, &Roles::laurel_up, &Roles::altup_router, &Roles::altup_predict, &Roles::altup_correct};
constexpr ExpertPiece EXPERT_PIECES[] = {&Roles::expert_gate, &Roles::expert_up, &Roles::expert_down};
constexpr ExpertPiece HEAD_PIECES[] = {&Roles::key_up, &Roles::value_up};
constexpr ExpertPiece STREAM_PIECES[] = {&Roles::altup_spread, &Roles::altup_gather};
constexpr hw_low_rank NO_PAIR = {};

// The adapters of a step, and where A x goes: [uses, PIECES, width], a use being a row under one adapter.
struct Adapters {
  const hw_step& step;
  float* out;
  size_t width;  // of the largest rank

  const hw_low_rank& pair(int adapter, int layer, Piece piece) const { return step.adapters[adapter].layers[layer].*piece; }
  bool any(int layer, std::initializer_list<Piece> pieces) const {
    for (int a = 0; a < step.adapter_count; a++)
      for (Piece piece : pieces)
        if (pair(a, layer, piece).rank) return true;
    return false;
  }
};

// The uses of one layer's matmuls. Every kind has:
//   each(f)    calls f(pair of the n-th piece, first use, end) for the uses under one adapter
//   row, scale of a use, at(use, n): where A x goes, and target(use, to): the outputs that are added to
struct LayerUses {
  const Adapters& adapters;
  const int layer;
  const std::initializer_list<Piece> pieces;

  int count() const { return (int)pieces.size(); }
  int row(int use) const { return adapters.step.adapter_rows[use]; }
  float scale(int use) const { return adapters.step.adapter_scales[use]; }
  float* target(int use, const MatmulOutput& to) const { return to.y + row(use) * to.stride; }
  float* at(int use, int piece) const { return adapters.out + ((size_t)use * PIECES + piece) * adapters.width; }
  template <class F>
  void each(F&& f) const {
    for (int a = 0; a < adapters.step.adapter_count; a++) {
      const hw_adapter& one = adapters.step.adapters[a];
      f([&](int n) -> const hw_low_rank& { return adapters.pair(a, layer, pieces.begin()[n]); }, one.first, one.first + one.count);
    }
  }
};

// The uses of one matrix of several, which all rows take.
struct NumberedUses : LayerUses {
  const ExpertPiece all;
  const int number;

  NumberedUses(const Adapters& adapters, int layer, ExpertPiece all, int number) : LayerUses{adapters, layer, {}}, all(all), number(number) {}
  int count() const { return 1; }
  template <class F>
  void each(F&& f) const {
    for (int a = 0; a < adapters.step.adapter_count; a++) {
      const hw_adapter& one = adapters.step.adapters[a];
      const hw_low_rank* pairs = one.layers[layer].*all;
      if (pairs) f([&](int) -> const hw_low_rank& { return pairs[number]; }, one.first, one.first + one.count);
    }
  }
};

// The places of experts' rows, or of heads' rows, that are under adapters: the uses of an adapter by expert.
struct ExpertPlaces {
  struct Group {
    int adapter, expert, first, end;
  };
  std::vector<Group> groups;
  std::vector<int> place, starts;
  std::vector<float> scale;

  // `of` has for each row the places of its `each` entries, and `chosen` their experts.
  void fill(const hw_step& step, int layer, std::initializer_list<ExpertPiece> pieces, int experts, int each, const int* of, const int* chosen) {
    groups.clear(), place.clear(), scale.clear();
    for (int a = 0; a < step.adapter_count; a++) {
      const hw_adapter& one = step.adapters[a];
      const Roles& own = one.layers[layer];
      if (std::all_of(pieces.begin(), pieces.end(), [&](ExpertPiece piece) { return !(own.*piece); })) continue;
      const int before = (int)place.size(), all = one.count * each;
      place.resize(before + all), scale.resize(before + all);
      starts.assign(experts + 2, 0);
      auto entry = [&](int n) { return step.adapter_rows[one.first + n / each] * each + n % each; };
      for (int n = 0; n < all; n++) starts[chosen[entry(n)] + 2]++;
      for (int e = 0; e < experts; e++) starts[e + 2] += starts[e + 1];
      for (int n = 0; n < all; n++) {
        const int at = before + starts[chosen[entry(n)] + 1]++;
        place[at] = of[entry(n)], scale[at] = step.adapter_scales[one.first + n / each];
      }
      for (int e = 0; e < experts; e++)
        if (starts[e] < starts[e + 1]) groups.push_back({a, e, before + starts[e], before + starts[e + 1]});
    }
  }
};

struct ExpertUses {
  static constexpr int MOST = 2;  // gate and up

  const Adapters& adapters;
  const int layer;
  const std::initializer_list<ExpertPiece> pieces;
  const ExpertPlaces& places;
  float* out;
  const size_t width;
  // Where outputs of heads are: those of each one's `rows` lie `apart` from the next one's.
  const int rows = 1 << 30;
  const size_t apart = 0;

  int count() const { return (int)pieces.size(); }
  int row(int use) const { return places.place[use]; }
  float scale(int use) const { return places.scale[use]; }
  float* target(int use, const MatmulOutput& to) const { return to.y + row(use) / rows * apart + row(use) % rows * to.stride; }
  float* at(int use, int piece) const { return out + ((size_t)use * MOST + piece) * width; }
  template <class F>
  void each(F&& f) const {
    for (const ExpertPlaces::Group& group : places.groups)
      f([&](int n) -> const hw_low_rank& {
        const hw_low_rank* all = adapters.step.adapters[group.adapter].layers[layer].*pieces.begin()[n];
        return all ? all[group.expert] : NO_PAIR;
      }, group.first, group.end);
  }
};

// One block of 16 rows of A for M rows of x, whose `k` inputs lie at in[m].
template <int KIND, int M>
inline void shrink_tile(const hw_low_rank& w, int block, int k, const float* const* in, float* const* out) {
  vf acc[M][PHASES];
  HW_UNROLL
  for (int m = 0; m < M; m++)
    HW_UNROLL
    for (int p = 0; p < PHASES; p++) acc[m][p] = vf_zero();
  size_t at = (size_t)block * k * LANES;
  int i = 0;
  for (; i + PHASES <= k; i += PHASES) {
    HW_UNROLL
    for (int p = 0; p < PHASES; p++, at += LANES) {
      const vf v = load_float<KIND>(w.a, at);
      HW_UNROLL
      for (int m = 0; m < M; m++) acc[m][p] = vf_fma(v, vf_set1(in[m][i + p]), acc[m][p]);
    }
  }
  for (int p = 0; i < k; i++, p++, at += LANES) {
    const vf v = load_float<KIND>(w.a, at);
    for (int m = 0; m < M; m++) acc[m][p] = vf_fma(v, vf_set1(in[m][i]), acc[m][p]);
  }
  HW_UNROLL
  for (int m = 0; m < M; m++) vf_store(out[m] + block * LANES, vf_add(vf_add(acc[m][0], acc[m][1]), vf_add(acc[m][2], acc[m][3])));
}

template <int M, class Uses>
inline void shrink_rows(const Uses& uses, const hw_low_rank& w, int piece, int block, int k, const float* x, size_t stride, int use) {
  const float* in[M];
  float* out[M];
  for (int m = 0; m < M; m++) {
    in[m] = x + uses.row(use + m) * stride;
    out[m] = uses.at(use + m, piece);
  }
  if (w.kind == HW_F32) shrink_tile<HW_F32, M>(w, block, k, in, out);
  else shrink_tile<HW_F16, M>(w, block, k, in, out);
}

// A x of every use, for pieces that share x [rows, stride] of `k` inputs; this thread's share of the work.
template <class Uses>
inline void shrink(const Uses& uses, int k, const float* x, size_t stride, int thread, int threads) {
  // Calls f(pair, piece, block, first use, uses) for every task.
  auto tasks = [&](auto&& f) {
    uses.each([&](auto&& pair, int first, int end) {
      for (int number = 0; number < uses.count(); number++) {
        const hw_low_rank& w = pair(number);
        for (int block = 0; block * LANES < w.rank; block++)
          for (int use = first; use < end; use += SHRINK_ROWS) f(w, number, block, use, std::min(SHRINK_ROWS, end - use));
      }
    });
  };
  int64_t all = 0, n = 0;
  tasks([&](const hw_low_rank&, int, int, int, int) { all++; });
  const int64_t from = all * thread / threads, to = all * (thread + 1) / threads;
  tasks([&](const hw_low_rank& w, int piece, int block, int use, int some) {
    const int64_t task = n++;
    if (task < from || task >= to) return;
    if (some == 4) return shrink_rows<4>(uses, w, piece, block, k, x, stride, use);
    if (some & 2) shrink_rows<2>(uses, w, piece, block, k, x, stride, use), use += 2;
    if (some & 1) shrink_rows<1>(uses, w, piece, block, k, x, stride, use);
  });
}

// One block of 16 outputs for M uses.
template <int KIND, int M, class Uses>
inline void expand_tile(const Uses& uses, const hw_low_rank& w, int piece, int block, int n, int use, const MatmulOutput& to) {
  vf acc[M];
  const float* in[M];
  HW_UNROLL
  for (int m = 0; m < M; m++) acc[m] = vf_zero(), in[m] = uses.at(use + m, piece);
  size_t at = (size_t)block * w.rank * LANES;
  for (int j = 0; j < w.rank; j++, at += LANES) {
    const vf v = load_float<KIND>(w.b, at);
    HW_UNROLL
    for (int m = 0; m < M; m++) acc[m] = vf_fma(v, vf_set1(in[m][j]), acc[m]);
  }
  const int wide = std::min(LANES, n - block * LANES);
  for (int m = 0; m < M; m++) {
    float* y = uses.target(use + m, to) + block * LANES;
    const vf scale = vf_set1(uses.scale(use + m) * w.factor);
    if (wide == LANES) {
      vf_store(y, vf_fma(acc[m], scale, vf_load(y)));
      continue;
    }
    float part[LANES] = {0};
    std::memcpy(part, y, wide * sizeof(float));
    vf_store(part, vf_fma(acc[m], scale, vf_load(part)));
    std::memcpy(y, part, wide * sizeof(float));
  }
}

template <int M, class Uses>
inline void expand_rows(const Uses& uses, const hw_low_rank& w, int piece, int block, int n, int use, const MatmulOutput& to) {
  if (w.kind == HW_F32) expand_tile<HW_F32, M>(uses, w, piece, block, n, use, to);
  else expand_tile<HW_F16, M>(uses, w, piece, block, n, use, to);
}

// Adds to the outputs of a group of matmuls what the adapters make of A x. A thread takes the blocks that `matmuls` gave it.
template <class Uses>
inline void expand(const Uses& uses, const Matmul* list, int thread, int threads) {
  int64_t all = 0, before = 0;
  for (int i = 0; i < uses.count(); i++) all += up(list[i].w->n, LANES) / LANES;
  const int64_t first = all * thread / threads, last = all * (thread + 1) / threads;
  for (int number = 0; number < uses.count(); number++) {
    const int n = list[number].w->n;
    const int64_t blocks = up(n, LANES) / LANES, from = std::max(first - before, (int64_t)0), to = std::min(last - before, blocks);
    before += blocks;
    uses.each([&](auto&& pair, int begin, int end) {
      const hw_low_rank& w = pair(number);
      if (!w.rank) return;
      for (int64_t block = from; block < to; block++) {
        int use = begin;
        for (; end - use >= EXPAND_ROWS; use += EXPAND_ROWS) expand_rows<EXPAND_ROWS>(uses, w, number, (int)block, n, use, list[number].to);
        if ((end - use) & 4) expand_rows<4>(uses, w, number, (int)block, n, use, list[number].to), use += 4;
        if ((end - use) & 2) expand_rows<2>(uses, w, number, (int)block, n, use, list[number].to), use += 2;
        if ((end - use) & 1) expand_rows<1>(uses, w, number, (int)block, n, use, list[number].to);
      }
    });
  }
}

// Adds to rows [first, first + count) of a matmul's outputs what adapters make of its `k` inputs, by this thread alone.
template <class Uses>
inline void add_own_rows(const Uses& uses, int k, const float* x, size_t stride, int n, const MatmulOutput& to, int first, int count) {
  uses.each([&](auto&& pair, int begin, int end) {
    const hw_low_rank& w = pair(0);
    for (int use = begin; w.rank && use < end; use++) {
      if (uses.row(use) < first || uses.row(use) >= first + count) continue;
      for (int block = 0; block * LANES < w.rank; block++) shrink_rows<1>(uses, w, 0, block, k, x, stride, use);
      for (int block = 0; block * LANES < n; block++) expand_rows<1>(uses, w, 0, block, n, use, to);
    }
  });
}

}  // namespace HW_NS
