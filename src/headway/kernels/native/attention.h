// Paged attention: reads the KV cache in place. A row's bits depend on the slots it attends to and nothing else, not even
// on the page size: slots are processed in units of 16, units in chunks of CHUNK, both counted from the start of the
// sequence, and chunks are merged in ascending order.
#pragma once
#include "slots.h"

namespace HW_NS {

constexpr int TILE = 32;               // rows that share the keys they load
constexpr int HELD = 24;               // queries of a tile whose scores are held at a time
constexpr int UNITS = CHUNK / LANES;
constexpr int STRIDE = CHUNK + LANES;  // between the scores of two queries: rows of a power of two would share cache sets
#if HW_ISA >= 2
constexpr int SCORED = 6, PAIRED = 2;  // queries that share a load of keys, and units whose keys share a load of queries
constexpr int MIXED = 6;               // queries that share a load of values
#else
constexpr int SCORED = 8, PAIRED = 1, MIXED = 4;
#endif
constexpr int BLOCK = 4;               // units whose values are added at a time
constexpr int BF16_PAIRS = -1;         // a kind: two bfloat16s a lane, of which the upper one is multiplied first

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
    active.reserve(UNITS);
    whole.reserve(UNITS);
    keys.fit(CHUNK * wide);
    values.fit(CHUNK * wide);
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

// Whether bfloat16 keys and values are multiplied two at a time, which has the bits of two multiply-adds.
inline bool in_pairs(const KvCache& kv, int queries) {
  return HW_ISA >= 4 && kv.kind == HW_BF16 && queries > SCORED && !kv.by_slot && kv.page % LANES == 0 && kv.dim % LANES == 0;
}

// Read in place if the unit is within one page, else gathered into `copy`; zeros for absent slots. In half precision they
// are made floats or pairs first if `queries` would load them more than once. Even dimensions are pairs, and odd ones.
inline UnitKeys unit_keys(const KvCache& kv, const Unit& unit, int head, int queries, float* copy) {
  if (kv.by_slot) return slot_keys(kv, unit, copy);
  const bool adjacent = kv.page % LANES == 0 && kv.dim % 2 == 0;
  const void* first = adjacent ? kv.key(unit, 0, head) : nullptr;
#if HW_ISA >= 4
  if (in_pairs(kv, queries)) {
    const uint16_t* row = (const uint16_t*)first;
    const size_t next = (size_t)kv.page;
    for (int d = 0; d < kv.dim; d += 4, row += 4 * next)
      for (int odd = 0; odd < 2; odd++) vf_store(copy + (d / 2 + odd) * LANES, vf_load_pairs(row + odd * next, row + (odd + 2) * next));
    return {copy, LANES, kv.dim / 2, BF16_PAIRS};
  }
#endif
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

// 16 factors as a product takes them, and a product that is added to a sum.
template <int KIND>
inline vf load_factor(const void* p, size_t at) {
  if constexpr (KIND == BF16_PAIRS) return vf_load((const float*)p + at);
  else return load_float<KIND>(p, at);
}
template <int KIND>
inline vf add_product(vf a, vf b, vf sum) {
#if HW_ISA >= 4
  if constexpr (KIND == BF16_PAIRS) return vf_add_pairs(a, b, sum);
#endif
  return vf_fma(a, b, sum);
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
    for (int u = 0; u < U; u++) k[u] = load_factor<KIND>(keys[u].at, d * apart), l[u] = load_factor<KIND>(keys[u].at, (d + 1) * apart);
    HW_UNROLL
    for (int q = 0; q < Q; q++) {
      const vf a = vf_set1(queries[q * wide + d]), b = vf_set1(queries[q * wide + d + 1]);
      HW_UNROLL
      for (int u = 0; u < U; u++) {
        even[u][q] = add_product<KIND>(k[u], a, even[u][q]);
        odd[u][q] = add_product<KIND>(l[u], b, odd[u][q]);
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
#if HW_ISA >= 4
  if (keys->kind == BF16_PAIRS) return score_kind<BF16_PAIRS, U>(keys, queries, wide, count, out);
#endif
  if (keys->kind == HW_F32) score_kind<HW_F32, U>(keys, queries, wide, count, out);
  else if (keys->kind == HW_F16) score_kind<HW_F16, U>(keys, queries, wide, count, out);
  else score_kind<HW_BF16, U>(keys, queries, wide, count, out);
}

// One head's values of a chunk's units, slot by slot; zeros for absent slots. Rows not a multiple of a vector are copied
// and padded, and rows in half precision are made floats or pairs of slots first if `queries` would load them more than
// once.
struct ChunkValues {
  const void* row[CHUNK];  // of each slot, or pair
  int kind;
  ChunkValues(const KvCache& kv, int queries, Scratch& scratch) : kind(kv.kind), kv_(kv), scratch_(scratch) {
    whole_ = kv.dim % LANES == 0, widen_ = whole_ && kind != HW_F32 && queries > MIXED;
    if (!whole_ || widen_) kind = HW_F32;
    if (in_pairs(kv, queries)) kind = BF16_PAIRS;
  }
  // The rows from a unit on.
  const void* const* rows(int place) const { return row + place * (kind == BF16_PAIRS ? LANES / 2 : LANES); }
  // Puts a unit's values at one of the chunk's places.
  void take(int place, const Unit& unit, int head) {
    const size_t wide = scratch_.wide;
#if HW_ISA >= 4
    if (kind == BF16_PAIRS) {
      const uint16_t* slots = (const uint16_t*)kv_.value(unit, 0, head);
      for (int n = 0; n < LANES / 2; n++, slots += 2 * wide) {
        float* copy = scratch_.values.at + (place * LANES / 2 + n) * wide;
        for (size_t d = 0; d < wide; d += LANES) vf_store(copy + d, vf_load_pairs(slots + d, slots + wide + d));
        row[place * LANES / 2 + n] = copy;
      }
      return;
    }
#endif
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

struct Identity {
  uint8_t at[BLOCK * LANES];
  constexpr Identity() : at() {
    for (int n = 0; n < BLOCK * LANES; n++) at[n] = (uint8_t)n;
  }
};

// Slots of a block that queries attend to, one by one, or in pairs with what is kept of each.
struct Slots {
  uint64_t bits = 0;
  int count = 0;
  uint8_t at[BLOCK * LANES];
  uint32_t keep[BLOCK * LANES / 2];

  void take(uint64_t wanted, bool pairs) {
    bits = wanted, count = 0;
    for (uint64_t rest = bits; rest && !pairs; rest &= rest - 1) at[count++] = (uint8_t)__builtin_ctzll(rest);
    for (int n = 0; pairs && wanted >> n; n += 2) {
      const int both = wanted >> n & 3;
      if (both) at[count] = (uint8_t)(n / 2), keep[count++] = (both & 1 ? 0xffff0000u : 0) | (both & 2 ? 0xffffu : 0);
      if (n == BLOCK * LANES - 2) break;
    }
  }
  // The slots of whole units.
  void take_all(int units, bool pairs) {
    static constexpr Identity identity{};
    bits = ~(uint64_t)0 >> (BLOCK - units) * LANES, count = units * LANES >> pairs;
    std::memcpy(at, identity.at, sizeof at);
    std::memset(keep, 0xff, sizeof keep);
  }
};

// Adds weights times values of slots for Q queries, over V vectors of the head.
template <int KIND, int Q, int V>
inline void add_weighted_values(const void* const* rows, int at, const float* weights, const Slots& slots, float* mixed, size_t wide) {
  vf acc[Q][V];
  HW_UNROLL
  for (int q = 0; q < Q; q++)
    HW_UNROLL
    for (int v = 0; v < V; v++) acc[q][v] = vf_load(mixed + q * wide + at + v * LANES);
  for (int n = 0; n < slots.count; n++) {
    const int s = slots.at[n];
    vf x[V];
    HW_UNROLL
    for (int v = 0; v < V; v++) {
      x[v] = load_factor<KIND>(rows[s], at + v * LANES);
#if HW_ISA >= 4
      if constexpr (KIND == BF16_PAIRS) x[v] = vf_keep(x[v], slots.keep[n]);
#endif
    }
    HW_UNROLL
    for (int q = 0; q < Q; q++) {
      vf w = vf_set1(weights[q * STRIDE + s]);
      HW_UNROLL
      for (int v = 0; v < V; v++) acc[q][v] = add_product<KIND>(x[v], w, acc[q][v]);
    }
  }
  HW_UNROLL
  for (int q = 0; q < Q; q++)
    HW_UNROLL
    for (int v = 0; v < V; v++) vf_store(mixed + q * wide + at + v * LANES, acc[q][v]);
}

template <int KIND, int Q = MIXED>
inline void mix_kind(const void* const* rows, int queries, const float* weights, const Slots& slots, float* mixed, size_t wide) {
  if constexpr (Q > 1)
    if (queries < Q) return mix_kind<KIND, Q - 1>(rows, queries, weights, slots, mixed, wide);
  int at = 0, end = (int)wide;
  for (; at + 4 * LANES <= end; at += 4 * LANES) add_weighted_values<KIND, Q, 4>(rows, at, weights, slots, mixed, wide);
  for (; at < end; at += LANES) add_weighted_values<KIND, Q, 1>(rows, at, weights, slots, mixed, wide);
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

// Queries whose scores are held: `count` from `first` on, whose scores are in scratch.scores from its beginning.
struct Held {
  int first, count;
};

// One head's scores of units i, i + 1 … of the chunk for queries that it has, -infinity where masked; out is where the
// first of them goes.
inline void score_units(const WorkItem& p, Scratch& scratch, const UnitKeys* keys, int i, int units, Held queries, float* out) {
  const float* from = scratch.queries.at + queries.first * scratch.wide;
  if (units == PAIRED) score_all<PAIRED>(keys, from, scratch.wide, queries.count, out);
  else score_all<1>(keys, from, scratch.wide, queries.count, out);
  for (int u = 0; u < units; u++, out += LANES) {
    for (int q = 0; p.kv.cap != 0 && q < queries.count; q++) vf_store(out + q * STRIDE, soft_cap(vf_load(out + q * STRIDE), p.kv.cap));
    for (int q = 0; !scratch.whole[i + u] && q < queries.count; q++) {
      const uint16_t on = scratch.mask_bits[queries.first + q][scratch.active[i + u]];
      if (on != 0xffff) vf_store(out + q * STRIDE, vf_select(on, vf_load(out + q * STRIDE), vf_set1(-INFINITY)));
    }
  }
}

// The scores of Q queries with n units to softmax weights, relative to their largest; with bfloat16 values the weights are
// rounded to that too.
template <int KIND, int Q>
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
#if HW_ISA >= 4
      if constexpr (KIND == BF16_PAIRS) {
        vf_store_pairs(scores + q * STRIDE + i * LANES / 2, w);
        continue;
      }
#endif
      vf_store(s, KIND == HW_BF16 ? vf_bf16(w) : w);
    }
  HW_UNROLL
  for (int q = 0; q < Q; q++) partial[q].sum = vf_sum(sum[q]);
}

// The held scores to weights of this kind, and their partial results but for the weighted values, which are zeros.
template <int KIND>
inline void softmax_held(Scratch& scratch, Held held) {
  constexpr int TOGETHER = HW_ISA >= 2 ? 4 : 1;  // queries whose long chains of instructions overlap
  const int n = (int)scratch.active.size();
  const bool whole = std::find(scratch.whole.begin(), scratch.whole.end(), 1) != scratch.whole.end();
  std::fill_n(scratch.mixed.at, held.count * scratch.wide, 0.0f);
  for (int q = 0, count; q < held.count; q += count) {
    float* scores = scratch.scores.at + (size_t)q * STRIDE;
    bool any = whole;
    for (int i = 0; i < n && !any; i++) any = scratch.mask_bits[held.first + q][scratch.active[i]] != 0;
    count = whole && q + TOGETHER <= held.count ? TOGETHER : 1;
    if (!any) scratch.partial[q] = {-INFINITY, 0};
    else if (count == TOGETHER) softmax<KIND, TOGETHER>(scores, n, &scratch.partial[q]);
    else softmax<KIND, 1>(scores, n, &scratch.partial[q]);
  }
}

inline void softmax_held(const KvCache& kv, int each, Scratch& scratch, Held held) {
#if HW_ISA >= 4
  if (in_pairs(kv, each)) return softmax_held<BF16_PAIRS>(scratch, held);
#endif
  if (kv.kind == HW_BF16) softmax_held<HW_BF16>(scratch, held);
  else softmax_held<HW_F32>(scratch, held);
}

// Adds the weighted values of `units` units from the i-th on, which have the values from `place` on, for queries of one
// head: those that `held` has from `first` on. Queries with the same mask go together; a masked slot is never multiplied.
inline void mix_units(Scratch& scratch, const ChunkValues& values, int place, int i, int units, Held held, int first, int count) {
  bool whole = true;
  for (int u = 0; u < units; u++) whole = whole && scratch.whole[i + u];
  const uint64_t all = ~(uint64_t)0 >> (BLOCK - units) * LANES;
  auto bits = [&](int q) {
    uint64_t found = whole ? all : 0;
    for (int u = 0; !whole && u < units; u++) found |= (uint64_t)scratch.mask_bits[held.first + q][scratch.active[i + u]] << u * LANES;
    return found;
  };
  auto go = values.kind == HW_F32 ? mix_kind<HW_F32> : values.kind == HW_F16 ? mix_kind<HW_F16> : mix_kind<HW_BF16>;
#if HW_ISA >= 4
  if (values.kind == BF16_PAIRS) go = mix_kind<BF16_PAIRS>;
#endif
  const bool pairs = values.kind == BF16_PAIRS;
  Slots slots;
  slots.take_all(units, pairs);
  for (int q = first, end = first + count, same; q < end; q += same) {
    const uint64_t take = bits(q);
    for (same = 1; same < MIXED && q + same < end && bits(q + same) == take;) same++;
    if (take != slots.bits) slots.take(take, pairs);
    if (take) go(values.rows(place), same, scratch.scores.at + (size_t)q * STRIDE + (i * LANES >> pairs), slots, scratch.mixed.at + q * scratch.wide, scratch.wide);
  }
}

// A chunk for the few queries of each head: keys and values are read where they are. Heads are the inner loop, as in the
// layout of the pages.
inline void attend_few(const WorkItem& p, Scratch& scratch) {
  const int n = (int)scratch.active.size(), each = p.each();
  const Held held{0, p.queries()};
  auto unit = [&](int i) -> const Unit& { return p.lay.units[scratch.active[i]]; };
  for (int i = 0, units; i < n; i += units) {
    units = std::min(PAIRED, n - i);
    for (int h = 0; h < p.heads; h++) {
      UnitKeys keys[PAIRED];
      for (int u = 0; u < units; u++) {
        prefetch_values(p.kv, unit(i + u), p.head + h);
        keys[u] = unit_keys(p.kv, unit(i + u), p.head + h, each, scratch.keys.at + u * scratch.wide * LANES);
      }
      score_units(p, scratch, keys, i, units, {h * each, each}, scratch.scores.at + (size_t)h * each * STRIDE + i * LANES);
    }
  }
  softmax_held(p.kv, each, scratch, held);
  for (int i = 0; i < n; i += BLOCK)
    for (int h = 0; h < p.heads; h++) {
      const int units = std::min(BLOCK, n - i);
      ChunkValues values(p.kv, each, scratch);
      for (int u = 0; u < units; u++) values.take(u, unit(i + u), p.head + h);
      mix_units(scratch, values, 0, i, units, held, h * each, each);
    }
}

// A chunk for many queries of a head: keys and values are widened or paired once for all of them, and the scores of a few
// queries at a time stay in the cache nearest to the core.
template <class D>
inline void attend_many(const WorkItem& p, int h, Scratch& scratch, D&& done) {
  const int n = (int)scratch.active.size(), each = p.each();
  UnitKeys keys[UNITS];
  ChunkValues values(p.kv, each, scratch);
  for (int i = 0; i < n; i++) {
    const Unit& unit = p.lay.units[scratch.active[i]];
    keys[i] = unit_keys(p.kv, unit, p.head + h, each, scratch.keys.at + i * scratch.wide * LANES);
    values.take(i, unit, p.head + h);
  }
  for (int first = h * each, end = first + each; first < end; first += HELD) {
    const Held held{first, std::min(HELD, end - first)};
    for (int i = 0; i < n; i += PAIRED) score_units(p, scratch, keys + i, i, std::min(PAIRED, n - i), held, scratch.scores.at + i * LANES);
    softmax_held(p.kv, each, scratch, held);
    for (int i = 0, units; i < n; i += units) {
      units = 1;  // those that all rows attend to are taken together
      while (scratch.whole[i] && units < BLOCK && i + units < n && scratch.whole[i + units]) units++;
      mix_units(scratch, values, i, i, units, held, 0, held.count);
    }
    done(held);
  }
}

// One chunk. done(held) is called when scratch.partial and scratch.mixed have the results of these queries.
template <class D>
inline void attend_chunk(const WorkItem& p, int chunk, Scratch& scratch, D&& done) {
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
  if (each > SCORED) {
    for (int h = 0; h < p.heads; h++) attend_many(p, h, scratch, done);
    return;
  }
  attend_few(p, scratch);
  done(Held{0, p.queries()});
}

// Copies the item's queries from q [T, heads * dim], padded; where keys are bfloat16, so are they.
inline void take_queries(const WorkItem& p, const float* q, size_t stride, Scratch& scratch) {
  const size_t wide = up(p.kv.dim, LANES);
  for (int i = 0; i < p.queries(); i++) {
    float* to = scratch.queries.at + i * wide;
    scratch.mask_bits[i] = p.mask_bits(i);
    std::memcpy(to, q + (size_t)p.batch_row(i) * stride + p.column(i), p.kv.dim * sizeof(float));
    for (size_t d = p.kv.dim; d < wide; d++) to[d] = 0;
    if (p.kv.kind != HW_BF16) continue;
#if HW_ISA >= 4
    if (in_pairs(p.kv, p.each())) {
      for (size_t d = 0; d < wide; d += LANES) vf_store_even_odd_pairs(to + d / 2, vf_load(to + d));
      continue;
    }
#endif
    for (size_t d = 0; d < wide; d += LANES) vf_store(to + d, vf_bf16(vf_load(to + d)));
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
    auto merge_held = [&](Held held, auto&& next, auto&& other) {
      for (int q = held.first, end = q + held.count; q < end; q += LANES)
        merge(std::min(LANES, end - q), &scratch.sums[q], scratch.total.at + q * wide, [&](int i) { return next(q + i); }, [&](int i) { return other(q + i); }, (int)wide);
    };
    if (known(0, c))
      merge_held({0, p.queries()}, [&](int q) { return Partial{known(q, c)[0], known(q, c)[1]}; }, [&](int q) { return known(q, c) + 2; });
    else
      attend_chunk(p, c, scratch, [&](Held held) {
        merge_held(held, [&](int q) { return scratch.partial[q - held.first]; }, [&](int q) { return scratch.mixed.at + (q - held.first) * wide; });
      });
  }
  for (int i = 0; i < p.queries(); i++) write_output(p, i, scratch.sums[i], scratch.total.at + i * wide, out, stride);
}

}  // namespace HW_NS
