// Paged attention: reads the KV cache in place. A row's bits depend on the slots it attends to and nothing else, not even
// on the page size: slots are processed in units of 16, units in chunks of CHUNK, both counted from the start of the
// sequence, and chunks are merged in ascending order.
#pragma once
#include "slots.h"

namespace HW_NS {

constexpr int TILE = 16;               // rows that share the keys they load
constexpr int STRIDE = CHUNK + LANES;  // between the scores of two queries: rows of a power of two would share cache sets
#if HW_ISA >= 2
constexpr int SCORED = 6, PAIRED = 2;  // queries that share a load of keys, and units whose keys share a load of queries
constexpr int MIXED = 6;               // queries that share a load of values
#else
constexpr int SCORED = 8, PAIRED = 1, MIXED = 4;
#endif
constexpr int BLOCK = 4;               // units whose values are added at a time

// The running softmax of one query: the largest score and the sum of weights; its weighted values are stored apart.
struct Partial {
  float most, sum;
};

inline bool is_empty(const Partial& p) { return p.sum == 0 && p.most == -INFINITY; }  // attends to nothing

// Merges the partial results of `count` queries, at most 16, into the running ones: next(i) and other(i) are those of a
// chunk, `mixed` has the running weighted values, one row for each.
template <class N, class O>
inline void merge(int count, Partial* into, float* mixed, N&& next, O&& other, int wide) {
  float old[LANES] = {0}, added[LANES] = {0};
  for (int i = 0; i < count; i++) {
    const Partial one = into[i], two = next(i);
    if (is_empty(one) || is_empty(two)) continue;
    const float most = one.most > two.most ? one.most : two.most;
    old[i] = one.most - most;
    added[i] = two.most - most;
  }
  vf_store(old, vf_exp(vf_load(old)));
  vf_store(added, vf_exp(vf_load(added)));
  for (int i = 0; i < count; i++, mixed += wide) {
    const Partial one = into[i], two = next(i);
    if (is_empty(two)) continue;
    const float* from = other(i);
    if (is_empty(one)) {
      into[i] = two;
      std::memcpy(mixed, from, wide * sizeof(float));
      continue;
    }
    into[i] = {one.most > two.most ? one.most : two.most, one.sum * old[i] + two.sum * added[i]};
    const vf a = vf_set1(old[i]), b = vf_set1(added[i]);
    for (int d = 0; d < wide; d += LANES) vf_store(mixed + d, vf_fma(vf_load(from + d), b, vf_mul(vf_load(mixed + d), a)));
  }
}

template <class T>
struct Buffer {  // grows, never shrinks, 64-byte aligned: a vector of floats is then within one cache line
  std::vector<T> store;
  T* at = nullptr;
  T* fit(size_t n) {
    if (store.size() < n + 64 / sizeof(T)) {
      store.resize(n + 64 / sizeof(T));
      at = (T*)(((uintptr_t)store.data() + 63) & ~(uintptr_t)63);
    }
    return at;
  }
};

// Buffers of one thread.
struct Scratch {
  Buffer<float> keys, values, queries, scores, mixed, total, zeros;
  std::vector<Partial> partial, sums;
  std::vector<int> active;                 // the chunk's units that a query attends to
  std::vector<uint8_t> whole;              // whether all queries attend to all of its slots
  std::vector<const uint16_t*> mask_bits;  // per query
  size_t wide = 0;                         // floats of a padded head of the layer
  void take(int dim) { wide = up(dim, LANES); }
  void fit(int queries_, int dim) {
    take(dim);
    active.reserve(CHUNK / LANES);
    whole.reserve(CHUNK / LANES);
    keys.fit(PAIRED * wide * LANES);
    values.fit(BLOCK * wide * LANES);
    std::fill_n(zeros.fit(wide), wide, 0.0f);
    queries.fit((queries_ + 1) * wide);  // a compiler may load one row past the last and not use it
    scores.fit((size_t)queries_ * STRIDE);
    mixed.fit(queries_ * wide);
    total.fit(queries_ * wide);
    partial.resize(queries_);
    sums.resize(queries_);
    mask_bits.resize(queries_);
  }
};

// One head's keys of a unit: the 16 slots of a dimension are adjacent, dimensions are `apart` numbers apart.
struct UnitKeys {
  const void* at;
  size_t apart;
  int dims;  // an even number
  int kind;
};

// Keys that lie by slot, gathered into `copy`.
inline UnitKeys slot_keys(const KvCache& kv, const Unit& unit, float* copy) {
  const int dims = (int)up(kv.dim, 2);
  for (int s = 0; s < LANES; s++) {
    const void* row = unit.present >> s & 1 ? kv.value(unit, s, 0) : nullptr;
    for (int d = 0; d < dims; d++) copy[d * LANES + s] = row && d < kv.dim ? read_number(kv.kind, row, d) : 0.0f;
  }
  return {copy, LANES, dims, HW_F32};
}

// Read in place if the unit is within one page, else gathered into `copy`; zeros for absent slots. In half precision they
// are made floats first if `queries` would load them more than once.
inline UnitKeys unit_keys(const KvCache& kv, const Unit& unit, int head, int queries, float* copy) {
  if (kv.by_slot) return slot_keys(kv, unit, copy);
  const bool adjacent = kv.page % LANES == 0 && kv.dim % 2 == 0;
  const void* first = adjacent ? kv.key(unit, 0, head) : nullptr;
  if (adjacent && (kv.kind == HW_F32 || queries <= SCORED)) return {first, (size_t)kv.page, kv.dim, kv.kind};
  if (adjacent) {
    widen(kv.kind, first, (size_t)kv.page, kv.dim, copy);
    return {copy, LANES, kv.dim, HW_F32};
  }
  std::fill(copy, copy + (size_t)up(kv.dim, LANES) * LANES, 0.0f);
  for (int s = 0; s < LANES; s++)
    if (unit.present >> s & 1)
      for (int d = 0; d < kv.dim; d++) copy[d * LANES + s] = read_number(kv.kind, kv.key(unit, s, head), (size_t)d * kv.page);
  return {copy, LANES, (int)up(kv.dim, 2), HW_F32};
}

// Scores of Q queries with the slots of U units, whose keys are alike but for their place. Even and odd dimensions are
// summed separately, which hides latency with few queries.
template <int KIND, int U, int Q>
inline void score(const UnitKeys* keys, const float* queries, size_t wide, float* out) {
  vf even[U][Q], odd[U][Q];
  HW_UNROLL
  for (int u = 0; u < U; u++)
    HW_UNROLL
    for (int q = 0; q < Q; q++) even[u][q] = odd[u][q] = vf_zero();
  const size_t apart = keys[0].apart;
  const int dims = keys[0].dims;
  for (int d = 0; d < dims; d += 2) {
    vf k[U], l[U];
    HW_UNROLL
    for (int u = 0; u < U; u++) k[u] = load_float<KIND>(keys[u].at, d * apart), l[u] = load_float<KIND>(keys[u].at, (d + 1) * apart);
    HW_UNROLL
    for (int q = 0; q < Q; q++) {
      const vf a = vf_set1(queries[q * wide + d]), b = vf_set1(queries[q * wide + d + 1]);
      HW_UNROLL
      for (int u = 0; u < U; u++) {
        even[u][q] = vf_fma(k[u], a, even[u][q]);
        odd[u][q] = vf_fma(l[u], b, odd[u][q]);
      }
    }
  }
  HW_UNROLL
  for (int q = 0; q < Q; q++)
    HW_UNROLL
    for (int u = 0; u < U; u++) vf_store(out + q * STRIDE + u * LANES, vf_add(even[u][q], odd[u][q]));
}

template <int KIND, int U, int Q = SCORED>
inline void score_kind(const UnitKeys* keys, const float* queries, size_t wide, int count, float* out) {
  for (; count >= Q; count -= Q, queries += Q * wide, out += Q * STRIDE) score<KIND, U, Q>(keys, queries, wide, out);
  if constexpr (Q > 1)
    if (count) score_kind<KIND, U, Q - 1>(keys, queries, wide, count, out);
}

template <int U>
inline void score_all(const UnitKeys* keys, const float* queries, size_t wide, int count, float* out) {
  if (keys->kind == HW_F32) score_kind<HW_F32, U>(keys, queries, wide, count, out);
  else if (keys->kind == HW_F16) score_kind<HW_F16, U>(keys, queries, wide, count, out);
  else score_kind<HW_BF16, U>(keys, queries, wide, count, out);
}

// One head's values of a few units, slot by slot; zeros for absent slots. Rows not a multiple of a vector are copied and
// padded, and rows in half precision are made floats first if `queries` would load them more than once.
struct BlockValues {
  const void* row[BLOCK * LANES];
  int kind;
  BlockValues(const KvCache& kv, int queries, Scratch& scratch) : kind(kv.kind), kv_(kv), scratch_(scratch) {
    whole_ = kv.dim % LANES == 0, widen_ = whole_ && kind != HW_F32 && queries > MIXED;
    if (!whole_ || widen_) kind = HW_F32;
  }
  // Puts a unit's values at one of the block's places.
  void take(int place, const Unit& unit, int head) {
    const size_t wide = scratch_.wide;
    if (widen_ && kv_.page % LANES == 0) {  // its slots are adjacent
      float* copy = scratch_.values.at + place * LANES * wide;
      widen(kv_.kind, kv_.value(unit, 0, head), LANES, kv_.dim, copy);
      for (int s = 0; s < LANES; s++) row[place * LANES + s] = copy + s * wide;
      return;
    }
    for (int s = 0; s < LANES; s++) {
      const bool present = unit.present >> s & 1;
      const void*& to = row[place * LANES + s];
      to = present ? kv_.value(unit, s, head) : scratch_.zeros.at;
      if (!present || (whole_ && !widen_)) continue;
      float* copy = scratch_.values.at + (place * LANES + s) * wide;
      if (widen_) widen(kv_.kind, to, LANES, kv_.dim / LANES, copy);
      for (size_t d = 0; !widen_ && d < wide; d++) copy[d] = (int)d < kv_.dim ? read_number(kv_.kind, to, d) : 0.0f;
      to = copy;
    }
  }

 private:
  const KvCache& kv_;
  Scratch& scratch_;
  bool whole_, widen_;
};

// Prefetches one head's values of a unit.
inline void prefetch_values(const KvCache& kv, const Unit& unit, int head) {
  for (int s = 0; s < LANES; s++)
    if (unit.present >> s & 1)
      for (int at = 0; at < kv.dim * kv.width(); at += 64) __builtin_prefetch((const char*)kv.value(unit, s, head) + at);
}

// Slots of a block that queries attend to.
struct Slots {
  uint64_t bits = 0;
  int count = 0;
  uint8_t at[BLOCK * LANES];
  explicit Slots(uint64_t bits_) : bits(bits_) {
    for (uint64_t rest = bits; rest; rest &= rest - 1) at[count++] = (uint8_t)__builtin_ctzll(rest);
  }
};

// Adds weights times values of slots for Q queries, over V vectors of the head.
template <int KIND, int Q, int V>
inline void add_weighted_values(const BlockValues& values, int at, const float* weights, const Slots& slots, float* mixed, size_t wide) {
  vf acc[Q][V];
  HW_UNROLL
  for (int q = 0; q < Q; q++)
    HW_UNROLL
    for (int v = 0; v < V; v++) acc[q][v] = vf_load(mixed + q * wide + at + v * LANES);
  for (int n = 0; n < slots.count; n++) {
    const int s = slots.at[n];
    vf x[V];
    HW_UNROLL
    for (int v = 0; v < V; v++) x[v] = load_float<KIND>(values.row[s], at + v * LANES);
    HW_UNROLL
    for (int q = 0; q < Q; q++) {
      vf w = vf_set1(weights[q * STRIDE + s]);
      HW_UNROLL
      for (int v = 0; v < V; v++) acc[q][v] = vf_fma(x[v], w, acc[q][v]);
    }
  }
  HW_UNROLL
  for (int q = 0; q < Q; q++)
    HW_UNROLL
    for (int v = 0; v < V; v++) vf_store(mixed + q * wide + at + v * LANES, acc[q][v]);
}

template <int KIND, int Q = MIXED>
inline void mix_kind(const BlockValues& values, int queries, const float* weights, const Slots& slots, float* mixed, size_t wide) {
  if constexpr (Q > 1)
    if (queries < Q) return mix_kind<KIND, Q - 1>(values, queries, weights, slots, mixed, wide);
  int at = 0, end = (int)wide;
  for (; at + 4 * LANES <= end; at += 4 * LANES) add_weighted_values<KIND, Q, 4>(values, at, weights, slots, mixed, wide);
  for (; at < end; at += LANES) add_weighted_values<KIND, Q, 1>(values, at, weights, slots, mixed, wide);
}

// A unit of parallel work: rows [first, first + rows) of a segment, or the rows of segments with a shared prefix, for kv
// heads [head, head + heads). Queries are ordered by kv head, then row, then head of the group.
struct WorkItem {
  const Layout* layouts;  // of all segments
  const int* prefix;      // the segments of its rows; null if all are of one segment
  const Layout& lay;      // of the segment, or of the first that shares the prefix
  const KvCache& kv;
  int mask_set, first, rows, head, heads;

  int group() const { return kv.heads / kv.kv_heads; }
  int each() const { return rows * group(); }  // queries per kv head
  int queries() const { return heads * each(); }
  int row(int query) const { return first + query / group() % rows; }
  // The row of a query in the batch.
  int batch_row(int query) const { return prefix ? layouts[prefix[row(query)]].row : lay.row + row(query); }
  // The query's offset within its row, in floats.
  size_t column(int query) const { return (size_t)((head + query / each()) * group() + query % group()) * kv.dim; }
  // Mask bits of a query's row, unit by unit.
  const uint16_t* mask_bits(int query) const {
    return prefix ? layouts[prefix[row(query)]].mask_bits(mask_set, 0) : lay.mask_bits(mask_set, row(query));
  }
};

// cap * tanh(x / cap); tanh(y) is 1 - 2 / (1 + e^2y).
inline vf soft_cap(vf x, float cap) {
  const vf e = vf_exp(vf_mul(vf_div(x, vf_set1(cap)), vf_set1(2.0f)));
  return vf_mul(vf_sub(vf_set1(1.0f), vf_div(vf_set1(2.0f), vf_add(e, vf_set1(1.0f)))), vf_set1(cap));
}

// The scores of the chunk's units, -infinity where masked. Heads are the inner loop, as in the layout of the keys.
inline void score_chunk(const WorkItem& p, Scratch& scratch) {
  const size_t wide = up(p.kv.dim, LANES);
  const int n = (int)scratch.active.size(), each = p.each();
  for (int i = 0, units; i < n; i += units) {
    units = std::min(PAIRED, n - i);
    for (int h = 0; h < p.heads; h++) {
      UnitKeys keys[PAIRED];
      for (int u = 0; u < units; u++) {
        const Unit& unit = p.lay.units[scratch.active[i + u]];
        if (each <= SCORED) prefetch_values(p.kv, unit, p.head + h);
        keys[u] = unit_keys(p.kv, unit, p.head + h, each, scratch.keys.at + u * wide * LANES);
      }
      float* out = scratch.scores.at + (size_t)h * each * STRIDE + i * LANES;
      const float* queries = scratch.queries.at + (size_t)h * each * wide;
      if (units == PAIRED) score_all<PAIRED>(keys, queries, wide, each, out);
      else score_all<1>(keys, queries, wide, each, out);
      for (int u = 0; u < units; u++, out += LANES) {
        for (int q = 0; p.kv.cap != 0 && q < each; q++) vf_store(out + q * STRIDE, soft_cap(vf_load(out + q * STRIDE), p.kv.cap));
        for (int q = 0; !scratch.whole[i + u] && q < each; q++) {
          const uint16_t on = scratch.mask_bits[q][scratch.active[i + u]];
          if (on != 0xffff) vf_store(out + q * STRIDE, vf_select(on, vf_load(out + q * STRIDE), vf_set1(-INFINITY)));
        }
      }
    }
  }
}

// The scores of Q queries with n units to softmax weights, relative to their largest.
template <int Q>
inline void softmax(float* scores, int n, Partial* partial) {
  vf most[Q], sum[Q], top[Q];
  HW_UNROLL
  for (int q = 0; q < Q; q++) most[q] = vf_set1(-INFINITY), sum[q] = vf_zero();
  for (int i = 0; i < n; i++)
    HW_UNROLL
    for (int q = 0; q < Q; q++) most[q] = vf_max(vf_load(scores + q * STRIDE + i * LANES), most[q]);
  HW_UNROLL
  for (int q = 0; q < Q; q++) top[q] = vf_set1(partial[q].most = vf_most(most[q]));
  for (int i = 0; i < n; i++)
    HW_UNROLL
    for (int q = 0; q < Q; q++) {
      float* s = scores + q * STRIDE + i * LANES;
      const vf w = vf_exp(vf_sub(vf_load(s), top[q]));
      sum[q] = vf_add(sum[q], w);
      vf_store(s, w);
    }
  HW_UNROLL
  for (int q = 0; q < Q; q++) partial[q].sum = vf_sum(sum[q]);
}

inline void softmax_chunk(const WorkItem& p, Scratch& scratch) {
  constexpr int TOGETHER = HW_ISA >= 2 ? 4 : 1;  // queries whose long chains of instructions overlap
  const int n = (int)scratch.active.size();
  const bool whole = std::find(scratch.whole.begin(), scratch.whole.end(), 1) != scratch.whole.end();
  std::fill_n(scratch.mixed.at, p.queries() * scratch.wide, 0.0f);
  for (int q = 0, count; q < p.queries(); q += count) {
    float* scores = scratch.scores.at + (size_t)q * STRIDE;
    bool any = whole;
    for (int i = 0; i < n && !any; i++) any = scratch.mask_bits[q][scratch.active[i]] != 0;
    count = whole && q + TOGETHER <= p.queries() ? TOGETHER : 1;
    if (!any) scratch.partial[q] = {-INFINITY, 0};
    else if (count == TOGETHER) softmax<TOGETHER>(scores, n, &scratch.partial[q]);
    else softmax<1>(scores, n, &scratch.partial[q]);
  }
}

// Queries with the same mask go together; a masked slot is never multiplied.
inline void mix_chunk(const WorkItem& p, Scratch& scratch) {
  const size_t wide = up(p.kv.dim, LANES);
  const int each = p.each(), n = (int)scratch.active.size();
  for (int i = 0; i < n; i += BLOCK)
    for (int h = 0; h < p.heads; h++) {
      const int units = std::min(BLOCK, n - i);
      BlockValues values(p.kv, each, scratch);
      bool whole = true;
      for (int u = 0; u < units; u++) {
        values.take(u, p.lay.units[scratch.active[i + u]], p.head + h);
        whole = whole && scratch.whole[i + u];
      }
      const uint64_t all = ~(uint64_t)0 >> (BLOCK - units) * LANES;
      auto bits = [&](int q) {
        uint64_t found = whole ? all : 0;
        for (int u = 0; !whole && u < units; u++) found |= (uint64_t)scratch.mask_bits[q][scratch.active[i + u]] << u * LANES;
        return found;
      };
      auto go = values.kind == HW_F32 ? mix_kind<HW_F32> : values.kind == HW_F16 ? mix_kind<HW_F16> : mix_kind<HW_BF16>;
      Slots slots(all);
      for (int q = h * each, end = q + each, same; q < end; q += same) {
        const uint64_t take = bits(q);
        for (same = 1; same < MIXED && q + same < end && bits(q + same) == take;) same++;
        if (take != slots.bits) slots = Slots(take);
        if (take) go(values, same, scratch.scores.at + (size_t)q * STRIDE + i * LANES, slots, scratch.mixed.at + q * wide, wide);
      }
    }
}

// One chunk into scratch.partial and scratch.mixed, query by query.
inline void attend_chunk(const WorkItem& p, int chunk, Scratch& scratch) {
  const int each = p.each(), group = p.group();
  scratch.active.clear();
  scratch.whole.clear();
  for (int u = p.lay.chunks[chunk]; u < p.lay.chunks[chunk + 1]; u++) {
    uint16_t any = 0, all = 0xffff;
    for (int q = 0; q < each; q += group) any |= scratch.mask_bits[q][u], all &= scratch.mask_bits[q][u];
    if (!any) continue;
    scratch.active.push_back(u);
    scratch.whole.push_back(all == 0xffff);
  }
  score_chunk(p, scratch);
  softmax_chunk(p, scratch);
  mix_chunk(p, scratch);
}

// Copies the item's queries from q [T, heads * dim], padded.
inline void take_queries(const WorkItem& p, const float* q, size_t stride, Scratch& scratch) {
  const size_t wide = up(p.kv.dim, LANES);
  for (int i = 0; i < p.queries(); i++) {
    float* to = scratch.queries.at + i * wide;
    scratch.mask_bits[i] = p.mask_bits(i);
    std::memcpy(to, q + (size_t)p.batch_row(i) * stride + p.column(i), p.kv.dim * sizeof(float));
    for (size_t d = p.kv.dim; d < wide; d++) to[d] = 0;
  }
}

// Normalizes a query's weighted values and stores them in out [T, heads * dim].
inline void write_output(const WorkItem& p, int query, const Partial& sum, const float* total, float* out, size_t stride) {
  float* y = out + (size_t)p.batch_row(query) * stride + p.column(query);
  float all = sum.sum;
  if (p.kv.sinks) {
    float t[LANES];
    vf_store(t, vf_exp(vf_set1(p.kv.sinks[p.column(query) / p.kv.dim] - sum.most)));
    all += t[0];
  }
  const float factor = 1.0f / all;
  for (int d = 0; d < p.kv.dim; d++) y[d] = total[d] * factor;
}

// All chunks of a work item. known(query, chunk) is the partial result of a chunk already computed, or null.
template <class F>
inline void attend(const WorkItem& p, const float* q, float* out, size_t stride, Scratch& scratch, F&& known) {
  const size_t wide = up(p.kv.dim, LANES);
  take_queries(p, q, stride, scratch);
  for (int i = 0; i < p.queries(); i++) scratch.sums[i] = {-INFINITY, 0};
  for (int c = 0; c + 1 < (int)p.lay.chunks.size(); c++) {
    const bool ready = known(0, c);
    if (!ready) attend_chunk(p, c, scratch);
    for (int q = 0; q < p.queries(); q += LANES) {
      auto next = [&](int i) { return ready ? Partial{known(q + i, c)[0], known(q + i, c)[1]} : scratch.partial[q + i]; };
      auto other = [&](int i) { return ready ? known(q + i, c) + 2 : scratch.mixed.at + (q + i) * wide; };
      merge(std::min(LANES, p.queries() - q), &scratch.sums[q], scratch.total.at + q * wide, next, other, (int)wide);
    }
  }
  for (int i = 0; i < p.queries(); i++) write_output(p, i, scratch.sums[i], scratch.total.at + i * wide, out, stride);
}

}  // namespace HW_NS
