// A whole decoder step in one call: every member of the team runs `Run::member` and meets the others at barriers.
//
// Compiled once for each instruction set (HW_ISA, HW_NS). Owns its working memory (Space); reads weights, writes the
// residual, the pages and what was tapped.
#include <algorithm>
#include <chrono>
#include <memory>

#include "attention.h"
#include "draw.h"
#include "threads.h"

namespace HW_NS {

template <class T>
struct Buffer {  // grows, never shrinks, 64-byte aligned
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

// Quantised copies of some rows, in the forms that the weights at hand ask for.
struct Coded {
  Buffer<int8_t> codes;
  Buffer<float> scales, sums;
  Buffer<int32_t> totals;
  int width = 0, groups = 0;
  void fit(int rows, int k, bool by_row) {
    width = up(k, 32);
    groups = by_row ? 1 : width / 32;
    codes.fit((size_t)rows * width);
    scales.fit((size_t)rows * groups);
    totals.fit((size_t)rows * 3 * groups);
    sums.fit((size_t)rows * 3 * groups);
  }
  Rows rows() const {
    Rows r;
    r.codes = codes.at;
    r.scales = scales.at;
    r.sums = sums.at;
    r.totals = totals.at;
    r.width = width;
    r.groups = groups;
    return r;
  }
};

struct Space {
  Buffer<float> x, h, q, k, v, mixed, gate, up_, act, turn, partial;
  Coded grouped[8], whole[8];  // for member i where every member makes its own, else the first
  std::vector<Layout> layouts;
  std::vector<Chooser> choosers;  // of the members
  std::vector<Family> families;
  std::vector<int> order;  // of the segments, for finding families
  std::vector<Desk> desks;
  std::unique_ptr<std::atomic<int>[]> next;
  int counters = 0;
};

// What a matrix wants its rows in: 0 floats, 1 codes by group, 2 codes by row.
inline int form(const hw_matrix& w) { return w.kind <= HW_BF16 ? 0 : w.kind == HW_GROUPS ? 1 : 2; }

// One row of `k` values, and zeros up to the next multiple of 32, in the coded forms asked for.
inline void code_row(const float* x, int k, int row, Coded* grouped, Coded* whole) {
  const int width = up(k, 32), groups = width / 32;
  for (int g = 0; grouped && g < groups; g++) {
    int8_t* codes = grouped->codes.at + (size_t)row * width + g * 32;
    const float scale = quantise(x + g * 32, 32, codes);
    const int32_t first = total(codes, 16), last = total(codes + 16, 16), of[3] = {first + last, first, last};
    grouped->scales.at[(size_t)row * groups + g] = scale;
    for (int n = 0; n < 3; n++) {
      const size_t at = ((size_t)row * 3 + n) * groups + g;
      grouped->totals.at[at] = of[n];
      grouped->sums.at[at] = scale * (float)of[n];
    }
  }
  if (whole) {
    int8_t* codes = whole->codes.at + (size_t)row * width;
    whole->scales.at[row] = quantise(x, width, codes);
    whole->totals.at[row] = total(codes, width);
  }
}

inline void pad(float* x, int from, size_t to) {
  for (size_t i = from; i < to; i++) x[i] = 0;
}

inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  vf square = vf_zero();
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf v = vf_load(x + i);
    square = vf_fma(v, v, square);
  }
  float sum = vf_sum(square);
  for (; i < n; i++) sum += x[i] * x[i];
  float factor = 1.0f / std::sqrt(sum / n + eps);
  for (i = 0; i + LANES <= n; i += LANES)
    vf_store(out + i, vf_mul(vf_load(weight + i), vf_mul(vf_load(x + i), vf_set1(factor))));
  for (; i < n; i++) out[i] = weight[i] * (x[i] * factor);
}

// silu(gate) * up
inline void gated(const float* gate, const float* up_, int n, float* out) {
  for (int i = 0; i < n; i += LANES) {
    const int wide = std::min(LANES, n - i);
    float a[LANES] = {0}, b[LANES] = {0};
    if (wide < LANES) std::memcpy(a, gate + i, wide * sizeof(float)), std::memcpy(b, up_ + i, wide * sizeof(float));
    vf g = vf_load(wide < LANES ? a : gate + i), u = vf_load(wide < LANES ? b : up_ + i);
    vf y = vf_mul(vf_div(g, vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), g)))), u);
    if (wide == LANES) {
      vf_store(out + i, y);
      continue;
    }
    vf_store(a, y);
    std::memcpy(out + i, a, wide * sizeof(float));
  }
}

// Turns dimension i against i + half by the row's angles; turn has `half` cosines, then `half` sines.
inline void rotate(float* x, const float* turn, int half, float factor, int dim) {
  const float *c = turn, *s = turn + half;
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    vf a = vf_load(x + i), b = vf_load(x + half + i), cos = vf_load(c + i), sin = vf_load(s + i);
    vf_store(x + i, vf_sub(vf_mul(a, cos), vf_mul(b, sin)));
    vf_store(x + half + i, vf_add(vf_mul(b, cos), vf_mul(a, sin)));
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    x[i] = a * c[i] - b * s[i];
    x[half + i] = b * c[i] + a * s[i];
  }
  if (factor != 1.0f)
    for (int d = 0; d < dim; d++) x[d] *= factor;
}

// The first largest of a row, and whether it has a NaN.
inline void likeliest(const float* x, int64_t vocab, int64_t& best, uint8_t& bad) {
  vf most = vf_set1(-INFINITY), strange = vf_zero();
  int64_t i = 0;
  for (; i + LANES <= vocab; i += LANES) {
    vf v = vf_load(x + i);
    most = vf_max(v, most);
    strange = vf_add(strange, vf_sub(v, v));  // NaN once a value is NaN or infinite
  }
  float top = vf_most(most), odd = vf_sum(strange);
  for (; i < vocab; i++) {
    if (x[i] > top) top = x[i];
    odd += x[i] - x[i];
  }
  bad = 0;
  for (i = 0; odd != odd && i < vocab; i++) bad |= x[i] != x[i];
  best = 0;
  for (i = 0; i + LANES <= vocab; i += LANES) {  // the first 16 that hold it, then the first of them
    bool here = false;
    for (int j = 0; j < LANES; j++) here |= x[i + j] == top;
    if (here) break;
  }
  for (; i < vocab; i++)
    if (x[i] == top) {
      best = i;
      return;
    }
}

struct Run {
  hw::Team& team;
  Space& space;
  const hw_model& m;
  const hw_step& step;
  const int T = step.rows, members = team.count();
  // Widths of working rows: room for the padding of blocks and groups.
  const size_t E = up(m.hidden, 32), F = up(m.inner, 32), Q = up(m.heads * m.head_dim, 32), K = up(m.kv_heads * m.head_dim, 16);
  // A few rows are coded by every member for itself, which costs less than meeting once more.
  const bool own = T <= 2 && members <= 8;
  bool split = false;
  int most_units = 1, most_queries = 1;  // of a chunk, of a piece
  size_t partial_size = 0;  // floats of one partial result
  double* clock_at = nullptr;
  std::chrono::steady_clock::time_point last{};

  void prepare() {
    space.x.fit(T * E), space.h.fit(T * E * (own ? members : 1));
    space.q.fit(T * Q), space.k.fit(T * K), space.v.fit(T * K), space.mixed.fit(T * Q);
    space.gate.fit(T * F), space.up_.fit(T * F), space.act.fit(T * F * (own ? members : 1)), space.turn.fit((size_t)T * 2 * m.rope_half + LANES);
    int wide = std::max({m.hidden, m.inner, m.heads * m.head_dim});
    for (int i = 0; i < (own ? members : 1); i++) space.grouped[i].fit(T, wide, false), space.whole[i].fit(T, wide, true);
    for (int r = 0; r < T; r++) pad(space.mixed.at + r * Q, m.heads * m.head_dim, Q);
    lay_out_all();
    if (space.counters < 2 * m.layers) {  // two for each layer: pieces, and tasks of families
      space.next.reset(new std::atomic<int>[2 * m.layers]);
      space.counters = 2 * m.layers;
    }
    for (int l = 0; l < 2 * m.layers; l++) space.next[l].store(0, std::memory_order_relaxed);
    if (step.phases) last = std::chrono::steady_clock::now();
  }

  void lay_out_all() {
    if ((int)space.layouts.size() < step.segments) space.layouts.resize(step.segments);
    int pieces_ = 0, tasks = 0;
    for (int s = 0; s < step.segments; s++) {
      Layout& lay = space.layouts[s];
      lay_out(step, s, m.page_size, m.kv_heads, lay);
      lay.bits.resize((size_t)step.mask_sets * lay.rows * lay.units.size());
      const int chunks = (int)lay.chunks.size() - 1;
      const int n = lay.rows / TILE * m.kv_heads + (lay.rows % TILE == 1 ? 1 : lay.rows % TILE ? m.kv_heads : 0);
      pieces_ += n;
      tasks += n * chunks;
      for (int c = 0; c < chunks; c++) most_units = std::max(most_units, lay.chunks[c + 1] - lay.chunks[c]);
    }
    most_queries = std::max(TILE * (m.heads / m.kv_heads), m.heads);
    split = members > 1 && pieces_ < 3 * members && tasks > pieces_;
    partial_size = up(m.head_dim, LANES) + 2;
    const size_t all = find_families(split ? tasks : 0);
    if (all) space.partial.fit(all * most_queries * partial_size);
    if ((int)space.desks.size() < members) space.desks.resize(members);
    for (int i = 0; i < members; i++) space.desks[i].fit(most_queries, m.head_dim, most_units);
  }

  // Segments that may share what they begin with, side by side. Partial results of families stand behind `task` others;
  // how many there are in all.
  size_t find_families(size_t task) {
    std::vector<int>& order = space.order;
    order.clear();
    space.families.clear();
    for (int s = 0; s < step.segments; s++) {
      space.layouts[s].family = -1;
      if (space.layouts[s].rows == 1) order.push_back(s);
    }
    auto page = [&](int s, int p) { return step.pages[step.segment_pages[s] + p]; };
    auto count = [&](int s) { return step.segment_pages[s + 1] - step.segment_pages[s]; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return std::lexicographical_compare(step.pages + step.segment_pages[a], step.pages + step.segment_pages[a] + count(a),
                                          step.pages + step.segment_pages[b], step.pages + step.segment_pages[b] + count(b));
    });
    // The whole chunks that two segments begin with and that lie in the same pages under the same numbers.
    auto alike = [&](int a, int b) {
      int same = 0;
      while (same < std::min(count(a), count(b)) && page(a, same) == page(b, same) &&
             step.numbers[step.segment_pages[a] + same] == step.numbers[step.segment_pages[b] + same])
        same++;
      const std::vector<int>&one = space.layouts[a].chunks, &other = space.layouts[b].chunks;
      size_t end = 1;  // of a chunk: it must be the same in both, for either may go on where the other has no page
      while (end < std::min(one.size(), other.size()) && one[end] == other[end] && one[end] * LANES <= same * m.page_size) end++;
      return (int)end - 1;
    };
    for (size_t at = 0; at < order.size();) {
      size_t end = at + 1;
      int chunks = 0;
      for (; end < order.size() && end - at < TILE; end++) {
        const int now = alike(order[at], order[end]);
        if (now == 0 || (end > at + 1 && now < chunks)) break;
        chunks = end == at + 1 ? now : chunks;
      }
      if (end - at > 1) {
        Family family{{order.begin() + at, order.begin() + end}, chunks, task};
        for (size_t j = at; j < end; j++) space.layouts[order[j]].family = (int)space.families.size(), space.layouts[order[j]].place = (int)(j - at);
        task += (size_t)m.kv_heads * chunks;
        space.families.push_back(std::move(family));
      }
      at = end;
    }
    return task;
  }

  void meet() { team.barrier.wait(); }

  void phase(int member, int which) {
    if (member || !step.phases) return;
    auto now = std::chrono::steady_clock::now();
    step.phases[which] += std::chrono::duration<double>(now - last).count();
    last = now;
  }

  int from(int member, int n) const { return (int)((int64_t)n * member / members); }

  void member(int i) {
    start(i);
    meet();
    phase(i, HW_EMBED);
    for (int l = 0; l < m.layers; l++) layer(i, l);
    tap(i, m.layers);
    for (int r = from(i, T); r < from(i + 1, T); r++) std::memcpy(step.out + (size_t)r * m.hidden, space.x.at + r * E, m.hidden * sizeof(float));
    phase(i, HW_EMBED);
    if (step.reads) read(i);
  }

  // The likeliest token of the rows asked for, while the team is together.
  void read(int i) {
    const hw_matrix& w = m.output;
    Coded *g = &space.grouped[copy(i)], *r = &space.whole[copy(i)];
    const int from_ = own ? 0 : from(i, step.reads), to = own ? step.reads : from(i + 1, step.reads);
    float* h = space.h.at + (own ? (size_t)i * T * E : 0);
    for (int n = from_; n < to; n++) {
      rms_norm(space.x.at + step.read_rows[n] * E, m.final_norm, m.hidden, m.eps, h + n * E);
      pad(h + n * E, m.hidden, E);
      code_row(h + n * E, m.hidden, n, form(w) == 1 ? g : nullptr, form(w) == 2 ? r : nullptr);
    }
    if (!own) meet();
    const Product head = product(i, w, space.h.at, E, step.logits, step.logits_stride, false);
    products(&head, 1, step.reads, i, members);
    meet();
    phase(i, HW_HEAD);
    for (int n = from(i, step.reads); n < from(i + 1, step.reads); n++) likeliest(step.logits + n * step.logits_stride, w.n, step.best[n], step.bad[n]);
    phase(i, HW_SAMPLE);
  }

  void start(int i) {
    for (int r = from(i, T); r < from(i + 1, T); r++) {
      dequantise(m.embedding, step.tokens[r], space.x.at + r * E);
      float* turn = space.turn.at + (size_t)r * 2 * m.rope_half;
      for (int d = 0; d < m.rope_half; d++) {
        float angle = (float)step.positions[r] * m.inv_freq[d];
        turn[d] = std::cos(angle) * m.rope_scale;
        turn[m.rope_half + d] = std::sin(angle) * m.rope_scale;
      }
    }
    for (int s = 0; s < step.segments; s++) {
      Layout& lay = space.layouts[s];
      const size_t units = lay.units.size();
      for (int n = from(i, lay.rows * step.mask_sets); n < from(i + 1, lay.rows * step.mask_sets); n++)
        row_bits(step, n / lay.rows, lay, n % lay.rows, lay.bits.data() + (size_t)n * units);
    }
  }

  void tap(int i, int l) {
    for (int t = 0; t < step.taps; t++)
      if (step.tap_layers[t] == l && t % members == i)
        std::memcpy(step.hidden_out + (size_t)t * m.hidden, space.x.at + step.tap_rows[t] * E, m.hidden * sizeof(float));
  }

  // The rows that member i codes: all, into its own copy, or its share.
  int first(int i) const { return own ? 0 : from(i, T); }
  int last_(int i) const { return own ? T : from(i + 1, T); }
  int copy(int i) const { return own ? i : 0; }

  void code(int i, const float* row, int k, int r, int forms) {
    code_row(row, k, r, forms & 1 ? &space.grouped[copy(i)] : nullptr, forms & 2 ? &space.whole[copy(i)] : nullptr);
  }

  static int forms(std::initializer_list<const hw_matrix*> list) {
    int all = 0;
    for (auto* w : list) all |= form(*w) == 1 ? 1 : form(*w) == 2 ? 2 : 0;
    return all;
  }

  Product product(int i, const hw_matrix& w, const float* values, size_t stride, float* y, size_t y_stride, bool add) const {
    Rows r;
    if (form(w) == 1) r = space.grouped[copy(i)].rows(), r.width = up(w.k, 32), r.groups = r.width / 32;
    else if (form(w) == 2) r = space.whole[copy(i)].rows(), r.width = up(w.k, 32), r.groups = 1;
    r.values = values + (own ? (size_t)i * T * stride : 0);
    r.stride = stride;
    return {&w, r, {y, y_stride, add}};
  }

  void norm_and_code(int i, const float* weight, int wanted) {
    float* h = space.h.at + (own ? (size_t)i * T * E : 0);
    for (int r = first(i); r < last_(i); r++) {
      rms_norm(space.x.at + r * E, weight, m.hidden, m.eps, h + r * E);
      pad(h + r * E, m.hidden, E);
      code(i, h + r * E, m.hidden, r, wanted);
    }
    if (!own) meet();
  }

  void layer(int i, int l) {
    const hw_layer& w = m.layer[l];
    Space& s = space;
    tap(i, l);
    norm_and_code(i, w.norm_in, forms({&w.q, &w.k, &w.v}));
    phase(i, HW_NORM);
    const Product qkv[3] = {product(i, w.q, s.h.at, E, s.q.at, Q, false), product(i, w.k, s.h.at, E, s.k.at, K, false),
                            product(i, w.v, s.h.at, E, s.v.at, K, false)};
    products(qkv, 3, T, i, members);
    meet();
    phase(i, HW_QKV);
    place(i, l);
    meet();
    phase(i, HW_ROPE);
    attention(i, l);
    meet();
    phase(i, HW_ATTENTION);
    out(i, w);
    meet();
    phase(i, HW_OUT);
    norm_and_code(i, w.norm_mlp, forms({&w.gate, &w.up}));
    phase(i, HW_NORM);
    const Product gate_up[2] = {product(i, w.gate, s.h.at, E, s.gate.at, F, false), product(i, w.up, s.h.at, E, s.up_.at, F, false)};
    products(gate_up, 2, T, i, members);
    meet();
    down(i, w);
    meet();
    phase(i, HW_MLP);
  }

  // Query and key are normed and turned, key and value go to their page.
  void place(int i, int l) {
    const hw_layer& w = m.layer[l];
    const int D = m.head_dim, all = m.heads + m.kv_heads;
    float* keys = m.kv + (size_t)l * 2 * m.kv_pages * m.page_size * m.kv_heads * D;
    float* values = keys + (size_t)m.kv_pages * m.page_size * m.kv_heads * D;
    const int64_t work = (int64_t)T * all;
    for (int64_t n = work * i / members; n < work * (i + 1) / members; n++) {
      const int r = (int)(n / all), h = (int)(n % all), kh = h - m.heads;
      const float* turn = space.turn.at + (size_t)r * 2 * m.rope_half;
      if (kh < 0) {
        float* q = space.q.at + r * Q + (size_t)h * D;
        if (w.q_norm) rms_norm(q, w.q_norm, D, m.eps, q);
        rotate(q, turn, m.rope_half, m.scale, D);
        for (int t = 0; t < step.query_taps; t++)
          if (step.query_layers[t] == l && step.query_rows[t] == r)
            std::memcpy(step.query_out + ((size_t)t * m.heads + h) * D, q, D * sizeof(float));
        continue;
      }
      float* k = space.k.at + r * K + (size_t)kh * D;
      if (w.k_norm) rms_norm(k, w.k_norm, D, m.eps, k);
      rotate(k, turn, m.rope_half, 1.0f, D);
      if (step.write_slots[r] < 0) continue;
      const size_t page = step.write_slots[r] / m.page_size, slot = step.write_slots[r] % m.page_size;
      const size_t at = ((page * m.kv_heads + kh) * m.page_size + slot) * D;
      float* key = keys + (page * m.kv_heads + kh) * m.page_size * D + slot;
      for (int d = 0; d < D; d++) key[(size_t)d * m.page_size] = k[d];
      std::memcpy(values + at, space.v.at + r * K + (size_t)kh * D, D * sizeof(float));
    }
  }

  // Calls f(piece, chunks) for every piece of a layer's attention. A single row takes all heads, which lie together.
  template <class F>
  void pieces(int l, F&& f) {
    const Cache kv = cache(l);
    for (int s = 0; s < step.segments; s++) {
      const Layout& lay = space.layouts[s];
      for (int first = 0; first < lay.rows; first += TILE) {
        const int rows = std::min(TILE, lay.rows - first), heads = rows == 1 ? m.kv_heads : 1;
        for (int head = 0; head < m.kv_heads; head += heads)
          f(Piece{space.layouts.data(), nullptr, lay, kv, m.layer[l].mask_set, first, rows, head, heads}, (int)lay.chunks.size() - 1);
      }
    }
  }

  Cache cache(int l) const {
    const size_t plane = (size_t)m.kv_pages * m.page_size * m.kv_heads * m.head_dim;
    return {m.kv + (size_t)l * 2 * plane, m.kv + ((size_t)l * 2 + 1) * plane, m.heads, m.kv_heads, m.head_dim, m.page_size};
  }

  // The chunks that families share.
  void together(int i, int l) {
    Desk& desk = space.desks[i];
    const Cache kv = cache(l);
    auto claim = [&] { return space.next[m.layers + l].fetch_add(1, std::memory_order_relaxed); };
    int mine = claim(), n = 0;
    for (const Family& family : space.families)
      for (int task = 0; task < m.kv_heads * family.chunks; task++) {
        if (n++ != mine) continue;
        const Layout& lay = space.layouts[family.segments[0]];
        const Piece piece{space.layouts.data(), family.segments.data(), lay, kv, m.layer[l].mask_set, 0, (int)family.segments.size(), task / family.chunks, 1};
        take_queries(piece, space.q.at, Q, desk);
        attend_chunk(piece, task % family.chunks, desk);
        keep_partial(family.task + task, piece, desk);
        mine = claim();
      }
  }

  // The partial result of a query of a one-row piece where its family has computed the chunk; null where not.
  const float* shared(const Piece& piece, int query, int chunk) {
    if (piece.lay.family < 0) return nullptr;
    const Family& family = space.families[piece.lay.family];
    if (chunk >= family.chunks) return nullptr;
    const int group = piece.group(), head = query / group;
    return partial(family.task + (size_t)head * family.chunks + chunk, piece.lay.place * group + query % group);
  }

  void attention(int i, int l) {
    if (!space.families.empty()) {
      together(i, l);
      meet();
    }
    Desk& desk = space.desks[i];
    auto claim = [&] { return space.next[l].fetch_add(1, std::memory_order_relaxed); };
    int mine = claim(), n = 0;
    pieces(l, [&](const Piece& piece, int chunks) {
      if (!split) {
        if (n++ != mine) return;
        attend(piece, space.q.at, space.mixed.at, Q, desk, [&](int query, int chunk) { return shared(piece, query, chunk); });
        mine = claim();
        return;
      }
      for (int c = 0; c < chunks; c++) {
        if (n++ != mine) continue;
        if (shared(piece, 0, c)) {
          mine = claim();
          continue;
        }
        take_queries(piece, space.q.at, Q, desk);
        attend_chunk(piece, c, desk);
        keep_partial(n - 1, piece, desk);
        mine = claim();
      }
    });
    if (!split) return;
    meet();
    merge_all(i, l);
  }

  float* partial(size_t task, int query) { return space.partial.at + (task * most_queries + query) * partial_size; }

  void keep_partial(size_t task, const Piece& piece, const Desk& desk) {
    const size_t wide = partial_size - 2;
    for (int q = 0; q < piece.queries(); q++) {
      float* to = partial(task, q);
      to[0] = desk.partial[q].most;
      to[1] = desk.partial[q].sum;
      if (desk.partial[q].most != -INFINITY || desk.partial[q].sum != 0) std::memcpy(to + 2, &desk.mixed[q * wide], wide * sizeof(float));
    }
  }

  void merge_all(int i, int l) {
    const size_t wide = partial_size - 2;
    float* total = space.desks[i].total.data();
    int task = 0, n = 0;
    pieces(l, [&](const Piece& piece, int chunks) {
      for (int q = 0; q < piece.queries(); q++) {
        if (n++ % members != i) continue;
        Partial sum{-INFINITY, 0};
        for (int c = 0; c < chunks; c++) {
          const float* done = shared(piece, q, c);
          const float* p = done ? done : partial(task + c, q);
          merge(sum, total, {p[0], p[1]}, p + 2, (int)wide);
        }
        finish(piece, q, sum, total, space.mixed.at, Q);
      }
      task += chunks;
    });
  }

  void out(int i, const hw_layer& w) {
    const int wanted = forms({&w.o});
    for (int r = first(i); wanted && r < last_(i); r++) code(i, space.mixed.at + r * Q, m.heads * m.head_dim, r, wanted);
    if (wanted && !own) meet();
    Product p = product(i, w.o, space.mixed.at, Q, space.x.at, E, true);
    p.x.values = space.mixed.at;  // all members read the one
    products(&p, 1, T, i, members);
  }

  void down(int i, const hw_layer& w) {
    const int wanted = forms({&w.down});
    float* act = space.act.at + (own ? (size_t)i * T * F : 0);
    for (int r = first(i); r < last_(i); r++) {
      gated(space.gate.at + r * F, space.up_.at + r * F, m.inner, act + r * F);
      pad(act + r * F, m.inner, F);
      if (wanted) code(i, act + r * F, m.inner, r, wanted);
    }
    if (!own) meet();
    Product p = product(i, w.down, space.act.at, F, space.x.at, E, true);
    products(&p, 1, T, i, members);
  }
};

// A product alone: y = x w, rows coded as the format asks; with a norm weight, of the normed rows.
struct Alone {
  hw::Team& team;
  Space& space;
  const hw_matrix& w;
  const float* x;
  const int rows;
  float* y;
  const size_t stride;
  const float* norm;
  const float eps;
  const size_t wide = up(w.k, 32);

  void prepare() {
    space.h.fit(rows * wide);
    space.grouped[0].fit(rows, w.k, false);
    space.whole[0].fit(rows, w.k, true);
  }
  void member(int i) {
    const int members = team.count();
    for (int r = (int)((int64_t)rows * i / members); r < (int64_t)rows * (i + 1) / members; r++) {
      float* h = space.h.at + r * wide;
      if (norm) rms_norm(x + (size_t)r * w.k, norm, w.k, eps, h);
      else std::memcpy(h, x + (size_t)r * w.k, w.k * sizeof(float));
      pad(h, w.k, wide);
      if (form(w)) code_row(h, w.k, r, form(w) == 1 ? &space.grouped[0] : nullptr, form(w) == 2 ? &space.whole[0] : nullptr);
    }
    team.barrier.wait();
    Rows in = form(w) == 2 ? space.whole[0].rows() : space.grouped[0].rows();
    in.values = space.h.at;
    in.stride = wide;
    Product p{&w, in, {y, stride, false}};
    products(&p, 1, rows, i, members);
  }
};

void* space_new() { return new Space; }
void space_free(void* space) { delete (Space*)space; }

void run(hw::Team& team, void* space, const hw_model& model, const hw_step& step) {
  Run work{team, *(Space*)space, model, step};
  work.prepare();
  team.run([&](int i) { work.member(i); });
}

void alone(hw::Team& team, void* space, const hw_matrix& w, const float* x, int rows, float* y, size_t stride, const float* norm, float eps) {
  Alone work{team, *(Space*)space, w, x, rows, y, stride, norm, eps};
  work.prepare();
  team.run([&](int i) { work.member(i); });
}

void gather(hw::Team& team, const hw_matrix& w, const int32_t* rows, int count, float* out) {
  const int members = team.count();
  team.run([&](int i) {
    for (int64_t r = (int64_t)count * i / members; r < (int64_t)count * (i + 1) / members; r++) dequantise(w, rows[r], out + r * w.k);
  });
}

void draw_all(hw::Team& team, void* space, hw_draw* draws, int count) {
  std::vector<Chooser>& choosers = ((Space*)space)->choosers;
  if ((int)choosers.size() < team.count()) choosers.resize(team.count());
  int64_t vocab = 0;
  for (int i = 0; i < count; i++) vocab = std::max(vocab, draws[i].vocab);
  for (Chooser& chooser : choosers) chooser.fit(vocab);
  std::atomic<int> next{0};
  team.run([&](int i) {
    for (int n = next++; n < count; n = next++) draws[n].token = choosers[i].draw(draws[n]);
  });
}

void choose(hw::Team& team, const float* logits, int rows, int64_t vocab, int64_t stride, int64_t* best, uint8_t* bad) {
  const int members = team.count();
  if (rows == 1) return likeliest(logits, vocab, *best, *bad);
  team.run([&](int i) {
    for (int r = (int)((int64_t)rows * i / members); r < (int64_t)rows * (i + 1) / members; r++) likeliest(logits + r * stride, vocab, best[r], bad[r]);
  });
}

}  // namespace HW_NS
