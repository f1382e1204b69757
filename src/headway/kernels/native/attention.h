// Attention over pages, in place. A row's bits depend on the slots it attends to and nothing else, not even on the size
// of a page: slots are taken in units of 16, units in chunks of CHUNK, both counted from the start of the sequence, and
// chunks are merged in ascending order.
#pragma once
#include <vector>

#include "products.h"

namespace HW_NS {

constexpr int CHUNK = 128;  // slots whose scores are held at once
constexpr int TILE = 16;    // rows that share the keys they load

struct Unit {
  int32_t slot;         // its first, in the sequence; a multiple of 16
  uint16_t present;     // which of its slots lie in the pages at hand
  int64_t place[LANES]; // where each lies in the pool, for the first head
};

// One segment's slots, cut into units, and which of them each row attends to.
struct Layout {
  int row, rows;                // in the batch
  std::vector<Unit> units;
  std::vector<int> chunks;      // where each chunk's units begin, and the end
  std::vector<uint16_t> bits;   // [mask sets, rows, units]
  int family, place;            // which family its row belongs to, and where it stands there; -1 for none
  const uint16_t* sight(int set, int row) const { return bits.data() + ((size_t)set * rows + row) * units.size(); }
};

// Segments of one row each that begin with the same pages, as forks do: the chunks that all of them have are computed
// for them together, so that keys and values are loaded once.
struct Family {
  std::vector<int> segments;
  int chunks;
  size_t task;  // the first of its partial results: by kv head, then by chunk
};

struct Cache {
  const float* keys;    // [pages, kv_heads, head_dim, page]: a unit's slots lie side by side, as scores want them
  const float* values;  // [pages, kv_heads, page, head_dim]
  int heads, kv_heads, dim, page;
  const float* value(int64_t place, int head) const { return values + (place + (int64_t)head * page) * dim; }
  // The first number of a slot's key; the others follow a page apart.
  const float* key(int64_t place, int head) const {
    const int64_t at = place % page;
    return keys + (place - at + (int64_t)head * page) * dim + at;
  }
};

inline void lay_out(const hw_step& step, int segment, int page_size, int kv_heads, Layout& out) {
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
        unit.place[lane] = (int64_t)step.pages[p] * kv_heads * page_size + at;
        unit.present |= (uint16_t)(1u << lane);
      }
    }
  out.chunks.push_back((int)out.units.size());
}

// The bits of one row: bit i of unit u says whether it attends to the unit's i-th slot.
inline void row_bits(const hw_step& step, int set, const Layout& lay, int row, uint16_t* bits) {
  const int32_t* at = step.runs_at[set];
  const int32_t* run = step.runs[set] + 2 * (size_t)at[lay.row + row];
  const int32_t* end = step.runs[set] + 2 * (size_t)at[lay.row + row + 1];
  for (size_t u = 0; u < lay.units.size(); u++) {
    const Unit& unit = lay.units[u];
    while (run < end && run[1] <= unit.slot) run += 2;
    uint32_t found = 0;
    for (const int32_t* r = run; r < end && r[0] < unit.slot + LANES; r += 2) {
      int from = std::max(r[0] - unit.slot, 0), to = std::min(r[1] - unit.slot, LANES);
      found |= ((1u << to) - 1) & ~((1u << from) - 1);
    }
    bits[u] = (uint16_t)(found & unit.present);
  }
}

// What is known of one query after some chunks: the largest score, the sum of weights, the weighted values.
struct Partial {
  float most, sum;
};

inline void merge(Partial& into, float* mixed, const Partial& next, const float* other, int dim) {
  if (next.sum == 0 && next.most == -INFINITY) return;  // it attends to nothing there
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

// Buffers of one member.
struct Desk {
  std::vector<float> keys, values, queries, scores, mixed, total, zeros;
  std::vector<Partial> partial, sums;
  std::vector<int> active;
  std::vector<const uint16_t*> sight;  // of each query
  size_t stride = 0;  // of a query's scores
  void fit(int queries_, int dim, int units) {
    size_t wide = up(dim, LANES);
    stride = (size_t)units * LANES;
    active.reserve(units);
    keys.resize(wide * LANES);
    values.resize(wide * LANES);
    zeros.assign(wide, 0.0f);
    queries.resize((queries_ + 1) * wide);  // a compiler may load the row behind the last and not use it
    scores.resize(queries_ * stride);
    mixed.resize(queries_ * wide);
    total.resize(queries_ * wide);
    partial.resize(queries_);
    sums.resize(queries_);
    sight.resize(queries_);
  }
};

// One head's keys of a unit: the 16 slots' numbers of a dimension side by side, those of the next `apart` from them.
struct Keys {
  const float* at;
  size_t apart;
  int dims;  // an even number
};

// They are read in their page where they lie in one, else copied together; zeros where a slot is not there.
inline Keys unit_keys(const Cache& kv, const Unit& unit, int head, Desk& desk) {
  if (kv.page % LANES == 0 && kv.dim % 2 == 0) return {kv.key(unit.place[0], head), (size_t)kv.page, kv.dim};
  std::fill(desk.keys.begin(), desk.keys.end(), 0.0f);
  for (int s = 0; s < LANES; s++)
    if (unit.present >> s & 1)
      for (int d = 0; d < kv.dim; d++) desk.keys[d * LANES + s] = kv.key(unit.place[s], head)[(size_t)d * kv.page];
  return {desk.keys.data(), LANES, (int)up(kv.dim, 2)};
}

// Scores of Q queries with a unit's slots: even and odd dimensions are summed apart, so that few queries do not wait.
template <int Q>
inline void score(const Keys& keys, const float* queries, size_t wide, float* out, size_t stride) {
  vf even[Q], odd[Q];
  HW_UNROLL
  for (int q = 0; q < Q; q++) even[q] = odd[q] = vf_zero();
  for (int d = 0; d < keys.dims; d += 2) {
    vf k = vf_load(keys.at + d * keys.apart), l = vf_load(keys.at + (d + 1) * keys.apart);
    HW_UNROLL
    for (int q = 0; q < Q; q++) {
      even[q] = vf_fma(k, vf_set1(queries[q * wide + d]), even[q]);
      odd[q] = vf_fma(l, vf_set1(queries[q * wide + d + 1]), odd[q]);
    }
  }
  HW_UNROLL
  for (int q = 0; q < Q; q++) vf_store(out + q * stride, vf_add(even[q], odd[q]));
}

inline void score_all(const Keys& keys, const float* queries, size_t wide, int count, float* out, size_t stride) {
  constexpr void (*few[8])(const Keys&, const float*, size_t, float*, size_t) = {nullptr, score<1>, score<2>, score<3>, score<4>, score<5>, score<6>, score<7>};
  int q = 0;
  for (; q + 8 <= count; q += 8) score<8>(keys, queries + q * wide, wide, out + q * stride, stride);
  if (q < count) few[count - q](keys, queries + q * wide, wide, out + q * stride, stride);
}

// One head's values of a unit, slot by slot; zeros where a slot is not there. Rows narrower than a vector are copied.
struct Heads {
  const float* row[LANES];
  Heads(const Cache& kv, const Unit& unit, int head, Desk& desk) {
    const size_t wide = desk.zeros.size();
    for (int s = 0; s < LANES; s++) {
      row[s] = unit.present >> s & 1 ? kv.value(unit.place[s], head) : desk.zeros.data();
      if (kv.dim % LANES == 0) continue;
      float* copy = &desk.values[s * wide];
      for (size_t d = 0; d < wide; d++) copy[d] = (int)d < kv.dim ? row[s][d] : 0.0f;
      row[s] = copy;
    }
  }
};

// Asks for one head's values of a unit that are needed soon.
inline void fetch(const Cache& kv, const Unit& unit, int head) {
  for (int s = 0; s < LANES; s++)
    if (unit.present >> s & 1)
      for (int d = 0; d < kv.dim; d += LANES) __builtin_prefetch(kv.value(unit.place[s], head) + d);
}

// Adds weights times values of one unit for Q queries, over V vectors of the head. `bits` are the slots to take.
template <int Q, int V>
inline void weigh(const Heads& values, int at, const float* weights, size_t stride, uint32_t bits, float* mixed, size_t wide) {
  vf acc[Q][V];
  HW_UNROLL
  for (int q = 0; q < Q; q++)
    HW_UNROLL
    for (int v = 0; v < V; v++) acc[q][v] = vf_load(mixed + q * wide + at + v * LANES);
  for (; bits; bits &= bits - 1) {
    const int s = __builtin_ctz(bits);
    vf x[V];
    HW_UNROLL
    for (int v = 0; v < V; v++) x[v] = vf_load(values.row[s] + at + v * LANES);
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

template <int Q>
inline void weigh_all(const Heads& values, const float* weights, size_t stride, uint32_t bits, float* mixed, size_t wide) {
  int at = 0, end = (int)wide;
  for (; at + 4 * LANES <= end; at += 4 * LANES) weigh<Q, 4>(values, at, weights, stride, bits, mixed, wide);
  for (; at < end; at += LANES) weigh<Q, 1>(values, at, weights, stride, bits, mixed, wide);
}

// A piece of work: rows [first, first + rows) of a segment, or the row of each of a family's segments, and kv heads
// [head, head + heads). Its queries stand by kv head, then by row, then by head of the group.
struct Piece {
  const Layout* layouts;  // of all segments
  const int* family;      // the segments of its rows; null for rows of one segment
  const Layout& lay;      // the segment's, or that of the family's first
  const Cache& kv;
  int mask_set, first, rows, head, heads;

  int group() const { return kv.heads / kv.kv_heads; }
  int each() const { return rows * group(); }  // queries of one kv head
  int queries() const { return heads * each(); }
  int row(int query) const { return first + query / group() % rows; }
  // The row of a query in the batch.
  int place(int query) const { return family ? layouts[family[row(query)]].row : lay.row + row(query); }
  // Where a query stands among the row's heads, in floats.
  size_t column(int query) const { return (size_t)((head + query / each()) * group() + query % group()) * kv.dim; }
  // What the row of a query attends to, unit by unit.
  const uint16_t* sight(int query) const {
    return family ? layouts[family[row(query)]].sight(mask_set, 0) : lay.sight(mask_set, row(query));
  }
};

// The scores of the chunk's units, -infinity where a query must not look. Units outside, heads inside: keys lie so.
inline void score_chunk(const Piece& p, Desk& desk) {
  const size_t wide = up(p.kv.dim, LANES), stride = desk.stride;
  const int n = (int)desk.active.size(), each = p.each();
  for (int i = 0; i < n; i++) {
    const Unit& unit = p.lay.units[desk.active[i]];
    for (int h = 0; h < p.heads; h++) {
      fetch(p.kv, unit, p.head + h);
      const Keys keys = unit_keys(p.kv, unit, p.head + h, desk);
      float* out = desk.scores.data() + (size_t)h * each * stride + i * LANES;
      score_all(keys, &desk.queries[(size_t)h * each * wide], wide, each, out, stride);
      for (int q = 0; q < each; q++, out += stride) {
        const uint16_t on = desk.sight[q][desk.active[i]];
        if (on != 0xffff) vf_store(out, vf_select(on, vf_load(out), vf_set1(-INFINITY)));
      }
    }
  }
}

// Scores to weights, against the largest of the chunk.
inline void soften(const Piece& p, Desk& desk) {
  const size_t wide = up(p.kv.dim, LANES);
  const int n = (int)desk.active.size();
  for (int q = 0; q < p.queries(); q++) {
    desk.partial[q] = {-INFINITY, 0};
    float* s = desk.scores.data() + q * desk.stride;
    bool any = false;
    for (int i = 0; i < n && !any; i++) any = desk.sight[q][desk.active[i]] != 0;
    if (!any) continue;
    vf most = vf_set1(-INFINITY), sum = vf_zero();
    for (int i = 0; i < n; i++) most = vf_max(vf_load(s + i * LANES), most);
    const float top = vf_most(most);
    for (int i = 0; i < n; i++) {
      vf w = vf_exp(vf_sub(vf_load(s + i * LANES), vf_set1(top)));
      sum = vf_add(sum, w);
      vf_store(s + i * LANES, w);
    }
    desk.partial[q] = {top, vf_sum(sum)};
    std::memset(&desk.mixed[q * wide], 0, wide * sizeof(float));
  }
}

// Queries that take the same slots go together; a slot that a query must not see never reaches it.
inline void mix_chunk(const Piece& p, Desk& desk) {
  const size_t wide = up(p.kv.dim, LANES), stride = desk.stride;
  const int each = p.each();
  for (size_t i = 0; i < desk.active.size(); i++)
    for (int h = 0; h < p.heads; h++) {
      const int unit = desk.active[i];
      const Heads values(p.kv, p.lay.units[unit], p.head + h, desk);
      for (int q = h * each, end = q + each, same; q < end; q += same) {
        const uint32_t take = desk.sight[q][unit];
        for (same = 1; same < 4 && q + same < end && desk.sight[q + same][unit] == take;) same++;
        if (!take) continue;
        auto go = same == 4 ? weigh_all<4> : same == 3 ? weigh_all<3> : same == 2 ? weigh_all<2> : weigh_all<1>;
        go(values, desk.scores.data() + q * stride + i * LANES, stride, take, &desk.mixed[q * wide], wide);
      }
    }
}

// One chunk: desk.partial and desk.mixed, query by query.
inline void attend_chunk(const Piece& p, int chunk, Desk& desk) {
  const int each = p.each(), group = p.group();
  desk.active.clear();
  for (int u = p.lay.chunks[chunk]; u < p.lay.chunks[chunk + 1]; u++) {
    uint16_t any = 0;
    for (int q = 0; q < each; q += group) any |= desk.sight[q][u];
    if (any) desk.active.push_back(u);
  }
  score_chunk(p, desk);
  soften(p, desk);
  mix_chunk(p, desk);
}

// The piece's queries out of q [T, heads * dim], padded.
inline void take_queries(const Piece& p, const float* q, size_t stride, Desk& desk) {
  const size_t wide = up(p.kv.dim, LANES);
  for (int i = 0; i < p.queries(); i++) {
    float* to = &desk.queries[i * wide];
    desk.sight[i] = p.sight(i);
    std::memcpy(to, q + (size_t)p.place(i) * stride + p.column(i), p.kv.dim * sizeof(float));
    for (size_t d = p.kv.dim; d < wide; d++) to[d] = 0;
  }
}

// A query's sum over all slots, divided, to its place in out [T, heads * dim].
inline void finish(const Piece& p, int query, const Partial& sum, const float* total, float* out, size_t stride) {
  float* y = out + (size_t)p.place(query) * stride + p.column(query);
  const float factor = 1.0f / sum.sum;
  for (int d = 0; d < p.kv.dim; d++) y[d] = total[d] * factor;
}

// All chunks of a piece. known(query, chunk) is the partial result of a chunk that is there already, or null.
template <class F>
inline void attend(const Piece& p, const float* q, float* out, size_t stride, Desk& desk, F&& known) {
  const size_t wide = up(p.kv.dim, LANES);
  take_queries(p, q, stride, desk);
  for (int i = 0; i < p.queries(); i++) desk.sums[i] = {-INFINITY, 0};
  for (int c = 0; c + 1 < (int)p.lay.chunks.size(); c++) {
    if (known(0, c)) {
      for (int i = 0; i < p.queries(); i++) {
        const float* done = known(i, c);
        merge(desk.sums[i], &desk.total[i * wide], {done[0], done[1]}, done + 2, (int)wide);
      }
      continue;
    }
    attend_chunk(p, c, desk);
    for (int i = 0; i < p.queries(); i++) merge(desk.sums[i], &desk.total[i * wide], desk.partial[i], &desk.mixed[i * wide], (int)wide);
  }
  for (int i = 0; i < p.queries(); i++) finish(p, i, desk.sums[i], &desk.total[i * wide], out, stride);
}

}  // namespace HW_NS
