// Paged attention: reads the KV cache in place. A row's bits depend on the slots it attends to and nothing else, not even
// on the page size: slots are processed in units of 16, units in chunks of CHUNK, both counted from the start of the
// sequence, and chunks are merged in ascending order.
#pragma once
#include <vector>

#include "matmul.h"

namespace HW_NS {

constexpr int CHUNK = 128;  // slots whose scores are held at a time
constexpr int TILE = 16;    // rows that share the keys they load

struct Unit {
  int32_t slot;         // first slot in the sequence, a multiple of 16
  uint16_t present;     // bit i: slot i is in a page of the segment
  int64_t offset[LANES]; // of each slot in the KV cache, for the first head
};

// One segment's slots in units, and which of them each row attends to.
struct Layout {
  int row, rows;                // in the batch
  std::vector<Unit> units;
  std::vector<int> chunks;      // first unit of each chunk, and the end
  std::vector<uint16_t> bits;   // [mask sets, rows, units]
  int prefix, prefix_row;            // the shared prefix its row belongs to (-1 for none), and its index there
  const uint16_t* mask_bits(int set, int row) const { return bits.data() + ((size_t)set * rows + row) * units.size(); }
};

// Segments of one row each that begin with the same pages, as forks do: their common chunks are computed together, so
// that keys and values are loaded once.
struct SharedPrefix {
  std::vector<int> segments;
  int chunks;
  size_t task;  // index of its first partial result, ordered by kv head, then chunk
};

// The keys and values of a layer, as floats or in half precision (kind); pointers to numbers are void pointers.
struct KvCache {
  const char* keys;    // [pages, kv_heads, head_dim, page]: a unit's slots are adjacent, as scoring reads them
  const char* values;  // [pages, kv_heads, page, head_dim]
  int kind, heads, kv_heads, dim, page;
  int width() const { return kind == HW_F32 ? 4 : 2; }  // bytes of a number
  const void* value(int64_t offset, int head) const { return values + (offset + (int64_t)head * page) * dim * width(); }
  // The first number of a slot's key; the others follow with a stride of `page`.
  const void* key(int64_t offset, int head) const {
    const int64_t at = offset % page;
    return keys + ((offset - at + (int64_t)head * page) * dim + at) * width();
  }
};

inline float read_number(int kind, const void* p, size_t at) {
  if (kind == HW_F32) return ((const float*)p)[at];
  const uint16_t half = ((const uint16_t*)p)[at];
  return kind == HW_F16 ? half_to_float(half) : bfloat_to_float(half);
}

// 16 numbers of the cache.
inline vf read_lanes(int kind, const void* p, size_t at) {
  return kind == HW_F32 ? load_float<HW_F32>(p, at) : kind == HW_F16 ? load_float<HW_F16>(p, at) : load_float<HW_BF16>(p, at);
}

inline void make_layout(const hw_step& step, int segment, int page_size, int kv_heads, Layout& out) {
  out.row = step.segment_rows[segment];
  out.rows = step.segment_rows[segment + 1] - out.row;
  out.units.clear();
  out.chunks.clear();
  for (int p = step.segment_pages[segment]; p < step.segment_pages[segment + 1]; p++)
    for (int at = 0; at < page_size;) {
      const int32_t slot = step.numbers[p] * page_size + at, first = slot / LANES * LANES;
      if (out.units.empty() || out.units.back().slot != first) {
        if (out.units.empty() || first / CHUNK != out.units.back().slot / CHUNK) out.chunks.push_back((int)out.units.size());
        out.units.emplace_back();
        out.units.back().slot = first;
        out.units.back().present = 0;
      }
      Unit& unit = out.units.back();
      for (int lane = slot - first; lane < LANES && at < page_size; lane++, at++) {
        unit.offset[lane] = (int64_t)step.pages[p] * kv_heads * page_size + at;
        unit.present |= (uint16_t)(1u << lane);
      }
    }
  out.chunks.push_back((int)out.units.size());
}

// Mask bits of one row: bit i of unit u is set if the row attends to the unit's i-th slot.
inline void row_bits(const hw_step& step, int set, const Layout& lay, int row, uint16_t* bits) {
  const int32_t* at = step.runs_at[set];
  const int32_t* run = step.runs[set] + 2 * (size_t)at[lay.row + row];
  const int32_t* end = step.runs[set] + 2 * (size_t)at[lay.row + row + 1];
  for (size_t u = 0; u < lay.units.size(); u++) {
    const Unit& unit = lay.units[u];
    while (run < end && run[1] <= unit.slot) run += 2;
    uint32_t seen = 0;
    for (const int32_t* r = run; r < end && r[0] < unit.slot + LANES; r += 2) {
      int from = std::max(r[0] - unit.slot, 0), to = std::min(r[1] - unit.slot, LANES);
      seen |= ((1u << to) - 1) & ~((1u << from) - 1);
    }
    bits[u] = (uint16_t)(seen & unit.present);
  }
}

// The running softmax of one query: the largest score and the sum of weights; its weighted values are stored apart.
struct Partial {
  float most, sum;
};

inline void merge(Partial& into, float* mixed, const Partial& next, const float* other, int dim) {
  if (next.sum == 0 && next.most == -INFINITY) return;  // attends to nothing in that chunk
  if (into.sum == 0 && into.most == -INFINITY) {
    into = next;
    std::memcpy(mixed, other, dim * sizeof(float));
    return;
  }
  float most = into.most > next.most ? into.most : next.most, t[LANES] = {0};
  t[0] = into.most - most;
  t[1] = next.most - most;
  vf_store(t, vf_exp(vf_load(t)));
  vf a = vf_set1(t[0]), b = vf_set1(t[1]);
  into = {most, into.sum * t[0] + next.sum * t[1]};
  for (int d = 0; d < dim; d += LANES)
    vf_store(mixed + d, vf_fma(vf_load(other + d), b, vf_mul(vf_load(mixed + d), a)));
}

// Buffers of one thread.
struct Scratch {
  std::vector<float> keys, values, queries, scores, mixed, total, zeros;
  std::vector<Partial> partial, sums;
  std::vector<int> active;
  std::vector<const uint16_t*> mask_bits;  // per query
  size_t stride = 0;  // between the scores of two queries
  void fit(int queries_, int dim, int units) {
    size_t wide = up(dim, LANES);
    stride = (size_t)units * LANES;
    active.reserve(units);
    keys.resize(wide * LANES);
    values.resize(wide * LANES);
    zeros.assign(wide, 0.0f);
    queries.resize((queries_ + 1) * wide);  // a compiler may load one row past the last and not use it
    scores.resize(queries_ * stride);
    mixed.resize(queries_ * wide);
    total.resize(queries_ * wide);
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

constexpr int SCORED = 8, MIXED = 4;  // queries that share a load of keys, of values

// Read in place if the unit is within one page, else gathered; zeros for absent slots. In half precision they are made
// floats first if `queries` would load them more than once.
inline UnitKeys unit_keys(const KvCache& kv, const Unit& unit, int head, int queries, Scratch& scratch) {
  const bool adjacent = kv.page % LANES == 0 && kv.dim % 2 == 0;
  const void* first = adjacent ? kv.key(unit.offset[0], head) : nullptr;
  if (adjacent && (kv.kind == HW_F32 || queries <= SCORED)) return {first, (size_t)kv.page, kv.dim, kv.kind};
  if (adjacent) {
    for (int d = 0; d < kv.dim; d++) vf_store(&scratch.keys[d * LANES], read_lanes(kv.kind, first, (size_t)d * kv.page));
    return {scratch.keys.data(), LANES, kv.dim, HW_F32};
  }
  std::fill(scratch.keys.begin(), scratch.keys.end(), 0.0f);
  for (int s = 0; s < LANES; s++)
    if (unit.present >> s & 1)
      for (int d = 0; d < kv.dim; d++) scratch.keys[d * LANES + s] = read_number(kv.kind, kv.key(unit.offset[s], head), (size_t)d * kv.page);
  return {scratch.keys.data(), LANES, (int)up(kv.dim, 2), HW_F32};
}

// Scores of Q queries with a unit's slots. Even and odd dimensions are summed separately, which hides latency with few queries.
template <int KIND, int Q>
inline void score(const UnitKeys& keys, const float* queries, size_t wide, float* out, size_t stride) {
  vf even[Q], odd[Q];
  HW_UNROLL
  for (int q = 0; q < Q; q++) even[q] = odd[q] = vf_zero();
  for (int d = 0; d < keys.dims; d += 2) {
    vf k = load_float<KIND>(keys.at, d * keys.apart), l = load_float<KIND>(keys.at, (d + 1) * keys.apart);
    HW_UNROLL
    for (int q = 0; q < Q; q++) {
      even[q] = vf_fma(k, vf_set1(queries[q * wide + d]), even[q]);
      odd[q] = vf_fma(l, vf_set1(queries[q * wide + d + 1]), odd[q]);
    }
  }
  HW_UNROLL
  for (int q = 0; q < Q; q++) vf_store(out + q * stride, vf_add(even[q], odd[q]));
}

template <int KIND>
inline void score_kind(const UnitKeys& keys, const float* queries, size_t wide, int count, float* out, size_t stride) {
  constexpr void (*few[SCORED])(const UnitKeys&, const float*, size_t, float*, size_t) = {
      nullptr, score<KIND, 1>, score<KIND, 2>, score<KIND, 3>, score<KIND, 4>, score<KIND, 5>, score<KIND, 6>, score<KIND, 7>};
  int q = 0;
  for (; q + SCORED <= count; q += SCORED) score<KIND, SCORED>(keys, queries + q * wide, wide, out + q * stride, stride);
  if (q < count) few[count - q](keys, queries + q * wide, wide, out + q * stride, stride);
}

inline void score_all(const UnitKeys& keys, const float* queries, size_t wide, int count, float* out, size_t stride) {
  if (keys.kind == HW_F32) score_kind<HW_F32>(keys, queries, wide, count, out, stride);
  else if (keys.kind == HW_F16) score_kind<HW_F16>(keys, queries, wide, count, out, stride);
  else score_kind<HW_BF16>(keys, queries, wide, count, out, stride);
}

// One head's values of a unit, slot by slot; zeros for absent slots. Rows not a multiple of a vector are copied and padded,
// and rows in half precision are made floats first if `queries` would load them more than once.
struct UnitValues {
  const void* row[LANES];
  int kind;
  UnitValues(const KvCache& kv, const Unit& unit, int head, int queries, Scratch& scratch) : kind(kv.kind) {
    const size_t wide = scratch.zeros.size();
    const bool whole = kv.dim % LANES == 0, widen = whole && kind != HW_F32 && queries > MIXED;
    for (int s = 0; s < LANES; s++) {
      const bool present = unit.present >> s & 1;
      row[s] = present ? kv.value(unit.offset[s], head) : scratch.zeros.data();
      if (!present || (whole && !widen)) continue;
      float* copy = &scratch.values[s * wide];
      for (int d = 0; widen && d < kv.dim; d += LANES) vf_store(copy + d, read_lanes(kind, row[s], d));
      for (size_t d = 0; !widen && d < wide; d++) copy[d] = (int)d < kv.dim ? read_number(kind, row[s], d) : 0.0f;
      row[s] = copy;
    }
    if (!whole || widen) kind = HW_F32;
  }
};

// Prefetches one head's values of a unit.
inline void prefetch_values(const KvCache& kv, const Unit& unit, int head) {
  for (int s = 0; s < LANES; s++)
    if (unit.present >> s & 1)
      for (int at = 0; at < kv.dim * kv.width(); at += 64) __builtin_prefetch((const char*)kv.value(unit.offset[s], head) + at);
}

// Adds weights times values of one unit for Q queries, over V vectors of the head. `bits` selects the slots.
template <int KIND, int Q, int V>
inline void add_weighted_values(const UnitValues& values, int at, const float* weights, size_t stride, uint32_t bits, float* mixed, size_t wide) {
  vf acc[Q][V];
  HW_UNROLL
  for (int q = 0; q < Q; q++)
    HW_UNROLL
    for (int v = 0; v < V; v++) acc[q][v] = vf_load(mixed + q * wide + at + v * LANES);
  for (; bits; bits &= bits - 1) {
    const int s = __builtin_ctz(bits);
    vf x[V];
    HW_UNROLL
    for (int v = 0; v < V; v++) x[v] = load_float<KIND>(values.row[s], at + v * LANES);
    HW_UNROLL
    for (int q = 0; q < Q; q++) {
      vf w = vf_set1(weights[q * stride + s]);
      HW_UNROLL
      for (int v = 0; v < V; v++) acc[q][v] = vf_fma(x[v], w, acc[q][v]);
    }
  }
  HW_UNROLL
  for (int q = 0; q < Q; q++)
    HW_UNROLL
    for (int v = 0; v < V; v++) vf_store(mixed + q * wide + at + v * LANES, acc[q][v]);
}

template <int KIND, int Q>
inline void add_all_weighted_values(const UnitValues& values, const float* weights, size_t stride, uint32_t bits, float* mixed, size_t wide) {
  int at = 0, end = (int)wide;
  for (; at + 4 * LANES <= end; at += 4 * LANES) add_weighted_values<KIND, Q, 4>(values, at, weights, stride, bits, mixed, wide);
  for (; at < end; at += LANES) add_weighted_values<KIND, Q, 1>(values, at, weights, stride, bits, mixed, wide);
}

template <int KIND>
inline void mix_kind(const UnitValues& values, int queries, const float* weights, size_t stride, uint32_t bits, float* mixed, size_t wide) {
  auto go = queries == 4 ? add_all_weighted_values<KIND, 4> : queries == 3 ? add_all_weighted_values<KIND, 3> : queries == 2 ? add_all_weighted_values<KIND, 2> : add_all_weighted_values<KIND, 1>;
  go(values, weights, stride, bits, mixed, wide);
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

// The scores of the chunk's units, -infinity where masked. Heads are the inner loop, as in the layout of the keys.
inline void score_chunk(const WorkItem& p, Scratch& scratch) {
  const size_t wide = up(p.kv.dim, LANES), stride = scratch.stride;
  const int n = (int)scratch.active.size(), each = p.each();
  for (int i = 0; i < n; i++) {
    const Unit& unit = p.lay.units[scratch.active[i]];
    for (int h = 0; h < p.heads; h++) {
      prefetch_values(p.kv, unit, p.head + h);
      const UnitKeys keys = unit_keys(p.kv, unit, p.head + h, each, scratch);
      float* out = scratch.scores.data() + (size_t)h * each * stride + i * LANES;
      score_all(keys, &scratch.queries[(size_t)h * each * wide], wide, each, out, stride);
      for (int q = 0; q < each; q++, out += stride) {
        const uint16_t on = scratch.mask_bits[q][scratch.active[i]];
        if (on != 0xffff) vf_store(out, vf_select(on, vf_load(out), vf_set1(-INFINITY)));
      }
    }
  }
}

// Scores to softmax weights, relative to the chunk's largest score.
inline void softmax_chunk(const WorkItem& p, Scratch& scratch) {
  const size_t wide = up(p.kv.dim, LANES);
  const int n = (int)scratch.active.size();
  for (int q = 0; q < p.queries(); q++) {
    scratch.partial[q] = {-INFINITY, 0};
    float* s = scratch.scores.data() + q * scratch.stride;
    bool any = false;
    for (int i = 0; i < n && !any; i++) any = scratch.mask_bits[q][scratch.active[i]] != 0;
    if (!any) continue;
    vf most = vf_set1(-INFINITY), sum = vf_zero();
    for (int i = 0; i < n; i++) most = vf_max(vf_load(s + i * LANES), most);
    const float top = vf_most(most);
    for (int i = 0; i < n; i++) {
      vf w = vf_exp(vf_sub(vf_load(s + i * LANES), vf_set1(top)));
      sum = vf_add(sum, w);
      vf_store(s + i * LANES, w);
    }
    scratch.partial[q] = {top, vf_sum(sum)};
    std::memset(&scratch.mixed[q * wide], 0, wide * sizeof(float));
  }
}

// Queries with the same mask go together; a masked slot is never multiplied.
inline void mix_chunk(const WorkItem& p, Scratch& scratch) {
  const size_t wide = up(p.kv.dim, LANES), stride = scratch.stride;
  const int each = p.each();
  for (size_t i = 0; i < scratch.active.size(); i++)
    for (int h = 0; h < p.heads; h++) {
      const int unit = scratch.active[i];
      const UnitValues values(p.kv, p.lay.units[unit], p.head + h, each, scratch);
      for (int q = h * each, end = q + each, same; q < end; q += same) {
        const uint32_t take = scratch.mask_bits[q][unit];
        for (same = 1; same < MIXED && q + same < end && scratch.mask_bits[q + same][unit] == take;) same++;
        if (!take) continue;
        auto go = values.kind == HW_F32 ? mix_kind<HW_F32> : values.kind == HW_F16 ? mix_kind<HW_F16> : mix_kind<HW_BF16>;
        go(values, same, scratch.scores.data() + q * stride + i * LANES, stride, take, &scratch.mixed[q * wide], wide);
      }
    }
}

// One chunk into scratch.partial and scratch.mixed, query by query.
inline void attend_chunk(const WorkItem& p, int chunk, Scratch& scratch) {
  const int each = p.each(), group = p.group();
  scratch.active.clear();
  for (int u = p.lay.chunks[chunk]; u < p.lay.chunks[chunk + 1]; u++) {
    uint16_t any = 0;
    for (int q = 0; q < each; q += group) any |= scratch.mask_bits[q][u];
    if (any) scratch.active.push_back(u);
  }
  score_chunk(p, scratch);
  softmax_chunk(p, scratch);
  mix_chunk(p, scratch);
}

// Copies the item's queries from q [T, heads * dim], padded.
inline void take_queries(const WorkItem& p, const float* q, size_t stride, Scratch& scratch) {
  const size_t wide = up(p.kv.dim, LANES);
  for (int i = 0; i < p.queries(); i++) {
    float* to = &scratch.queries[i * wide];
    scratch.mask_bits[i] = p.mask_bits(i);
    std::memcpy(to, q + (size_t)p.batch_row(i) * stride + p.column(i), p.kv.dim * sizeof(float));
    for (size_t d = p.kv.dim; d < wide; d++) to[d] = 0;
  }
}

// Normalizes a query's weighted values and stores them in out [T, heads * dim].
inline void write_output(const WorkItem& p, int query, const Partial& sum, const float* total, float* out, size_t stride) {
  float* y = out + (size_t)p.batch_row(query) * stride + p.column(query);
  const float factor = 1.0f / sum.sum;
  for (int d = 0; d < p.kv.dim; d++) y[d] = total[d] * factor;
}

// All chunks of a work item. known(query, chunk) is the partial result of a chunk already computed, or null.
template <class F>
inline void attend(const WorkItem& p, const float* q, float* out, size_t stride, Scratch& scratch, F&& known) {
  const size_t wide = up(p.kv.dim, LANES);
  take_queries(p, q, stride, scratch);
  for (int i = 0; i < p.queries(); i++) scratch.sums[i] = {-INFINITY, 0};
  for (int c = 0; c + 1 < (int)p.lay.chunks.size(); c++) {
    if (known(0, c)) {
      for (int i = 0; i < p.queries(); i++) {
        const float* done = known(i, c);
        merge(scratch.sums[i], &scratch.total[i * wide], {done[0], done[1]}, done + 2, (int)wide);
      }
      continue;
    }
    attend_chunk(p, c, scratch);
    for (int i = 0; i < p.queries(); i++) merge(scratch.sums[i], &scratch.total[i * wide], scratch.partial[i], &scratch.mixed[i * wide], (int)wide);
  }
  for (int i = 0; i < p.queries(); i++) write_output(p, i, scratch.sums[i], &scratch.total[i * wide], out, stride);
}

}  // namespace HW_NS
