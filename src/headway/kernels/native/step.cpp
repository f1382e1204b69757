// A whole decoder step in one call: every thread of the pool runs `Forward::run_thread` and meets the others at barriers.
//
// Compiled once for each instruction set (HW_ISA, HW_NS). Owns its memory (Workspace); reads weights, writes the residual,
// the KV cache, and the hidden states and queries that probes asked for.
#include <algorithm>
#include <chrono>
#include <memory>

#include "attention.h"
#include "lora.h"
#include "sampling.h"
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

// Quantized copies of activation rows.
struct QuantizedActivations {
  Buffer<int8_t> quants;
  Buffer<float> scales, sums;
  Buffer<int32_t> totals;
  int width = 0, groups = 0;
  void fit(int rows, int k) {
    width = up(k, 32);
    groups = width / 32;
    quants.fit((size_t)rows * width);
    scales.fit((size_t)rows * groups);
    totals.fit((size_t)rows * 3 * groups);
    sums.fit((size_t)rows * 3 * groups);
  }
  Activations rows() const {
    Activations r;
    r.quants = quants.at;
    r.scales = scales.at;
    r.sums = sums.at;
    r.totals = totals.at;
    r.width = width;
    r.groups = groups;
    return r;
  }
};

struct Workspace {
  Buffer<float> x, h, q, k, v, mixed, gate, up_, act, angles, partial, low_rank;
  QuantizedActivations quantized[8];  // one per thread where rows are replicated, else only the first
  std::vector<Layout> layouts;
  std::vector<Sampler> samplers;  // one per thread
  std::vector<SharedPrefix> prefixes;
  std::vector<int> order;  // of the segments, for finding shared prefixes
  std::vector<Scratch> scratches;
  std::unique_ptr<std::atomic<int>[]> next;
  int counter_count = 0;
};

// Quantizes one row of `k` values, padded with zeros to a multiple of 32.
inline void quantize_row(const float* x, int k, int row, QuantizedActivations& to) {
  const int width = up(k, 32), groups = width / 32;
  for (int g = 0; g < groups; g++) {
    int8_t* quants = to.quants.at + (size_t)row * width + g * 32;
    const float scale = quantize_group(x + g * 32, 32, quants);
    const int32_t first = total(quants, 16), last = total(quants + 16, 16), of[3] = {first + last, first, last};
    to.scales.at[(size_t)row * groups + g] = scale;
    for (int n = 0; n < 3; n++) {
      const size_t at = ((size_t)row * 3 + n) * groups + g;
      to.totals.at[at] = of[n];
      to.sums.at[at] = scale * (float)of[n];
    }
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
inline void gated_silu(const float* gate, const float* up_, int n, float* out) {
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

// Rotary embedding: rotates dimension i with i + half; `angles` has `half` cosines, then `half` sines.
inline void rotate(float* x, const float* angles, int half, float factor, int dim) {
  const float *c = angles, *s = angles + half;
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

// The first largest logit of a row, and whether the row has a NaN.
inline void argmax(const float* x, int64_t vocab, int64_t& best, uint8_t& bad) {
  vf most = vf_set1(-INFINITY), nonfinite = vf_zero();
  int64_t i = 0;
  for (; i + LANES <= vocab; i += LANES) {
    vf v = vf_load(x + i);
    most = vf_max(v, most);
    nonfinite = vf_add(nonfinite, vf_sub(v, v));  // NaN if a value is NaN or infinite
  }
  float top = vf_most(most), nonfinite_sum = vf_sum(nonfinite);
  for (; i < vocab; i++) {
    if (x[i] > top) top = x[i];
    nonfinite_sum += x[i] - x[i];
  }
  bad = 0;
  for (i = 0; nonfinite_sum != nonfinite_sum && i < vocab; i++) bad |= x[i] != x[i];
  best = 0;
  for (i = 0; i + LANES <= vocab; i += LANES) {  // find the 16 that hold it, then the first of them
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

struct Forward {
  hw::ThreadPool& pool;
  Workspace& workspace;
  const hw_model& m;
  const hw_step& step;
  const int T = step.rows, threads = pool.count();
  // Row widths in the workspace, padded to whole blocks and groups.
  const size_t E = up(m.hidden, 32), F = up(m.inner, 32), Q = up(m.heads * m.head_dim, 32), K = up(m.kv_heads * m.head_dim, 16);
  // With few rows every thread norms and quantizes its own copy, which costs less than one more barrier.
  const bool replicated = T <= 2 && threads <= 8;
  bool split = false;
  int most_units = 1, most_queries = 1;  // of a chunk, of a work item
  size_t partial_size = 0;  // floats of one partial result
  Adapters adapters{step, nullptr, 0};
  double* clock_at = nullptr;
  std::chrono::steady_clock::time_point last{};

  void prepare() {
    workspace.x.fit(T * E), workspace.h.fit(T * E * (replicated ? threads : 1));
    workspace.q.fit(T * Q), workspace.k.fit(T * K), workspace.v.fit(T * K), workspace.mixed.fit(T * Q);
    workspace.gate.fit(T * F), workspace.up_.fit(T * F), workspace.act.fit(T * F * (replicated ? threads : 1)), workspace.angles.fit((size_t)T * 2 * m.rope_half + LANES);
    int wide = std::max({m.hidden, m.inner, m.heads * m.head_dim});
    for (int i = 0; i < (replicated ? threads : 1); i++) workspace.quantized[i].fit(T, wide);
    for (int r = 0; r < T; r++) pad(workspace.mixed.at + r * Q, m.heads * m.head_dim, Q);
    make_layouts();
    for (int a = 0; a < step.adapter_count; a++)
      for (int l = 0; l < m.layers; l++)
        for (Piece piece : {&hw_adapter_layer::q, &hw_adapter_layer::k, &hw_adapter_layer::v, &hw_adapter_layer::o, &hw_adapter_layer::gate,
                            &hw_adapter_layer::up, &hw_adapter_layer::down})
          adapters.width = std::max(adapters.width, (size_t)up(adapters.pair(a, l, piece).rank, LANES));
    if (step.adapter_count) adapters.out = workspace.low_rank.fit((size_t)step.adapter_uses * PIECES * adapters.width);
    if (workspace.counter_count < 2 * m.layers) {  // two per layer: work items, and chunks of shared prefixes
      workspace.next.reset(new std::atomic<int>[2 * m.layers]);
      workspace.counter_count = 2 * m.layers;
    }
    for (int l = 0; l < 2 * m.layers; l++) workspace.next[l].store(0, std::memory_order_relaxed);
    if (step.phases) last = std::chrono::steady_clock::now();
  }

  void make_layouts() {
    if ((int)workspace.layouts.size() < step.segments) workspace.layouts.resize(step.segments);
    int items = 0, tasks = 0;
    for (int s = 0; s < step.segments; s++) {
      Layout& lay = workspace.layouts[s];
      make_layout(step, s, m.page_size, m.kv_heads, lay);
      lay.bits.resize((size_t)step.mask_sets * lay.rows * lay.units.size());
      const int chunks = (int)lay.chunks.size() - 1;
      const int n = lay.rows / TILE * m.kv_heads + (lay.rows % TILE == 1 ? 1 : lay.rows % TILE ? m.kv_heads : 0);
      items += n;
      tasks += n * chunks;
      for (int c = 0; c < chunks; c++) most_units = std::max(most_units, lay.chunks[c + 1] - lay.chunks[c]);
    }
    most_queries = std::max(TILE * (m.heads / m.kv_heads), m.heads);
    split = threads > 1 && items < 3 * threads && tasks > items;
    partial_size = up(m.head_dim, LANES) + 2;
    const size_t all = find_shared_prefixes(split ? tasks : 0);
    if (all) workspace.partial.fit(all * most_queries * partial_size);
    if ((int)workspace.scratches.size() < threads) workspace.scratches.resize(threads);
    for (int i = 0; i < threads; i++) workspace.scratches[i].fit(most_queries, m.head_dim, most_units);
  }

  // Groups one-row segments that begin with the same chunks. Partial results of shared prefixes come after the first `task`
  // ones; returns the total.
  size_t find_shared_prefixes(size_t task) {
    std::vector<int>& order = workspace.order;
    order.clear();
    workspace.prefixes.clear();
    for (int s = 0; s < step.segments; s++) {
      workspace.layouts[s].prefix = -1;
      if (workspace.layouts[s].rows == 1) order.push_back(s);
    }
    auto page = [&](int s, int p) { return step.pages[step.segment_pages[s] + p]; };
    auto count = [&](int s) { return step.segment_pages[s + 1] - step.segment_pages[s]; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return std::lexicographical_compare(step.pages + step.segment_pages[a], step.pages + step.segment_pages[a] + count(a),
                                          step.pages + step.segment_pages[b], step.pages + step.segment_pages[b] + count(b));
    });
    // The number of whole chunks that two segments share: same pages, same page numbers.
    auto alike = [&](int a, int b) {
      int same = 0;
      while (same < std::min(count(a), count(b)) && page(a, same) == page(b, same) &&
             step.numbers[step.segment_pages[a] + same] == step.numbers[step.segment_pages[b] + same])
        same++;
      const std::vector<int>&one = workspace.layouts[a].chunks, &other = workspace.layouts[b].chunks;
      size_t end = 1;  // a chunk must end alike in both: either may continue where the other has no page
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
        SharedPrefix prefix{{order.begin() + at, order.begin() + end}, chunks, task};
        for (size_t j = at; j < end; j++) workspace.layouts[order[j]].prefix = (int)workspace.prefixes.size(), workspace.layouts[order[j]].prefix_row = (int)(j - at);
        task += (size_t)m.kv_heads * chunks;
        workspace.prefixes.push_back(std::move(prefix));
      }
      at = end;
    }
    return task;
  }

  void sync() { pool.barrier.wait(); }

  void phase(int thread, int which) {
    if (thread || !step.phases) return;
    auto now = std::chrono::steady_clock::now();
    step.phases[which] += std::chrono::duration<double>(now - last).count();
    last = now;
  }

  int from(int thread, int n) const { return (int)((int64_t)n * thread / threads); }

  void run_thread(int i) {
    embed_and_mask(i);
    sync();
    phase(i, HW_EMBED);
    for (int l = 0; l < m.layers; l++) layer(i, l);
    copy_hidden(i, m.layers);
    for (int r = from(i, T); r < from(i + 1, T); r++) std::memcpy(step.out + (size_t)r * m.hidden, workspace.x.at + r * E, m.hidden * sizeof(float));
    phase(i, HW_EMBED);
    if (step.reads) read_logits(i);
  }

  // Logits and argmax token of the requested rows, in the same parallel region.
  void read_logits(int i) {
    const hw_matrix& w = m.output;
    const int from_ = replicated ? 0 : from(i, step.reads), to = replicated ? step.reads : from(i + 1, step.reads);
    float* h = workspace.h.at + (replicated ? (size_t)i * T * E : 0);
    for (int n = from_; n < to; n++) {
      rms_norm(workspace.x.at + step.read_rows[n] * E, m.final_norm, m.hidden, m.eps, h + n * E);
      pad(h + n * E, m.hidden, E);
      if (is_quantized(w)) quantize(i, h + n * E, m.hidden, n);
    }
    if (!replicated) sync();
    const Matmul head = make_matmul(i, w, workspace.h.at, E, step.logits, step.logits_stride, false);
    matmuls(&head, 1, step.reads, i, threads);
    sync();
    phase(i, HW_HEAD);
    for (int n = from(i, step.reads); n < from(i + 1, step.reads); n++) argmax(step.logits + n * step.logits_stride, w.n, step.best[n], step.bad[n]);
    phase(i, HW_SAMPLE);
  }

  void embed_and_mask(int i) {
    for (int r = from(i, T); r < from(i + 1, T); r++) {
      dequantize_row(m.embedding, step.tokens[r], workspace.x.at + r * E);
      float* angles = workspace.angles.at + (size_t)r * 2 * m.rope_half;
      for (int d = 0; d < m.rope_half; d++) {
        // In double: libraries differ in the last bit of a float's cosine, and 8-bit activations would amplify that.
        const double angle = (float)step.positions[r] * m.inv_freq[d];
        angles[d] = (float)std::cos(angle) * m.rope_scale;
        angles[m.rope_half + d] = (float)std::sin(angle) * m.rope_scale;
      }
    }
    for (int s = 0; s < step.segments; s++) {
      Layout& lay = workspace.layouts[s];
      const size_t units = lay.units.size();
      for (int n = from(i, lay.rows * step.mask_sets); n < from(i + 1, lay.rows * step.mask_sets); n++)
        row_bits(step, n / lay.rows, lay, n % lay.rows, lay.bits.data() + (size_t)n * units);
    }
  }

  void copy_hidden(int i, int l) {
    for (int t = 0; t < step.hidden_count; t++)
      if (step.hidden_layers[t] == l && t % threads == i)
        std::memcpy(step.hidden_out + (size_t)t * m.hidden, workspace.x.at + step.hidden_rows[t] * E, m.hidden * sizeof(float));
  }

  // The rows that thread i norms and quantizes: all of them into its own copy, or its share.
  int first(int i) const { return replicated ? 0 : from(i, T); }
  int last_(int i) const { return replicated ? T : from(i + 1, T); }
  int copy(int i) const { return replicated ? i : 0; }

  void quantize(int i, const float* row, int k, int r) { quantize_row(row, k, r, workspace.quantized[copy(i)]); }

  static bool any_quantized(std::initializer_list<const hw_matrix*> list) {
    return std::any_of(list.begin(), list.end(), [](const hw_matrix* w) { return is_quantized(*w); });
  }

  Matmul make_matmul(int i, const hw_matrix& w, const float* values, size_t stride, float* y, size_t y_stride, bool add) const {
    Activations r;
    if (is_quantized(w)) r = workspace.quantized[copy(i)].rows(), r.width = up(w.k, 32), r.groups = r.width / 32;
    r.values = values + (replicated ? (size_t)i * T * stride : 0);
    r.stride = stride;
    return {&w, r, {y, y_stride, add}};
  }

  // A x of the rows under adapters; the barrier after it is the caller's. False if no adapter has one of the pieces.
  bool shrink_(int i, int l, std::initializer_list<Piece> pieces, int k, const float* values, size_t stride) {
    if (!adapters.any(l, pieces)) return false;
    shrink(adapters, l, pieces, k, values, stride, i, threads);
    return true;
  }

  // A group of matmuls that share x, with what adapters add to them.
  void matmuls_with_adapters(int i, int l, std::initializer_list<Piece> pieces, const Matmul* list, bool adapted) {
    if (adapted) sync();
    matmuls(list, (int)pieces.size(), T, i, threads);
    if (adapted) expand(adapters, l, pieces, list, i, threads);
  }

  void norm_and_quantize(int i, const float* weight, bool wanted) {
    float* h = workspace.h.at + (replicated ? (size_t)i * T * E : 0);
    for (int r = first(i); r < last_(i); r++) {
      rms_norm(workspace.x.at + r * E, weight, m.hidden, m.eps, h + r * E);
      pad(h + r * E, m.hidden, E);
      if (wanted) quantize(i, h + r * E, m.hidden, r);
    }
    if (!replicated) sync();
  }

  void layer(int i, int l) {
    const hw_layer& w = m.layer[l];
    Workspace& s = workspace;
    copy_hidden(i, l);
    norm_and_quantize(i, w.norm_in, any_quantized({&w.q, &w.k, &w.v}));
    phase(i, HW_NORM);
    const Matmul qkv[3] = {make_matmul(i, w.q, s.h.at, E, s.q.at, Q, false), make_matmul(i, w.k, s.h.at, E, s.k.at, K, false),
                            make_matmul(i, w.v, s.h.at, E, s.v.at, K, false)};
    const std::initializer_list<Piece> first_pieces = {&hw_adapter_layer::q, &hw_adapter_layer::k, &hw_adapter_layer::v};
    matmuls_with_adapters(i, l, first_pieces, qkv, shrink_(i, l, first_pieces, m.hidden, qkv[0].x.values, E));
    sync();
    phase(i, HW_QKV);
    rope_and_write_kv(i, l);
    sync();
    phase(i, HW_ROPE);
    attention(i, l);
    sync();
    phase(i, HW_ATTENTION);
    project_out(i, l);
    sync();
    phase(i, HW_OUT);
    norm_and_quantize(i, w.norm_mlp, any_quantized({&w.gate, &w.up}));
    phase(i, HW_NORM);
    const Matmul gate_up[2] = {make_matmul(i, w.gate, s.h.at, E, s.gate.at, F, false), make_matmul(i, w.up, s.h.at, E, s.up_.at, F, false)};
    const std::initializer_list<Piece> inner_pieces = {&hw_adapter_layer::gate, &hw_adapter_layer::up};
    matmuls_with_adapters(i, l, inner_pieces, gate_up, shrink_(i, l, inner_pieces, m.hidden, gate_up[0].x.values, E));
    sync();
    project_down(i, l);
    sync();
    phase(i, HW_MLP);
  }

  // Norms and rotates queries and keys, writes keys and values to the KV cache.
  void rope_and_write_kv(int i, int l) {
    const hw_layer& w = m.layer[l];
    const int D = m.head_dim, all = m.heads + m.kv_heads;
    const size_t plane = (size_t)m.kv_pages * m.page_size * m.kv_heads * D;  // numbers of a layer's keys, or values
    const int64_t work = (int64_t)T * all;
    for (int64_t n = work * i / threads; n < work * (i + 1) / threads; n++) {
      const int r = (int)(n / all), h = (int)(n % all), kh = h - m.heads;
      const float* angles = workspace.angles.at + (size_t)r * 2 * m.rope_half;
      if (kh < 0) {
        float* q = workspace.q.at + r * Q + (size_t)h * D;
        if (w.q_norm) rms_norm(q, w.q_norm, D, m.eps, q);
        rotate(q, angles, m.rope_half, m.scale, D);
        for (int t = 0; t < step.query_count; t++)
          if (step.query_layers[t] == l && step.query_rows[t] == r)
            std::memcpy(step.query_out + ((size_t)t * m.heads + h) * D, q, D * sizeof(float));
        continue;
      }
      float* k = workspace.k.at + r * K + (size_t)kh * D;
      if (w.k_norm) rms_norm(k, w.k_norm, D, m.eps, k);
      rotate(k, angles, m.rope_half, 1.0f, D);
      if (step.write_slots[r] < 0) continue;
      const size_t page = step.write_slots[r] / m.page_size, slot = step.write_slots[r] % m.page_size;
      const size_t first = (page * m.kv_heads + kh) * m.page_size * D, keys = 2 * l * plane + first, values = keys + plane;
      write_numbers(k, keys + slot, m.page_size);
      write_numbers(workspace.v.at + r * K + (size_t)kh * D, values + slot * D, 1);
    }
  }

  // A head's numbers to the KV cache, beginning at its number `at`, with a stride.
  void write_numbers(const float* x, size_t at, size_t stride) {
    const int D = m.head_dim;
    if (m.kv_kind == HW_F32) {
      float* to = (float*)m.kv + at;
      for (int d = 0; d < D; d++) to[d * stride] = x[d];
      return;
    }
    for (int d = 0; d < D; d += LANES) {
      const int wide = std::min(LANES, D - d);
      float part[LANES] = {0};
      uint16_t half[LANES], *to = (uint16_t*)m.kv + at + d * stride;
      std::memcpy(part, x + d, wide * sizeof(float));
      if (m.kv_kind == HW_F16) vf_store_f16(half, vf_load(part));
      else vf_store_bf16(half, vf_load(part));
      for (int n = 0; n < wide; n++) to[n * stride] = half[n];
    }
  }

  // Calls f(item, chunks) for every work item of a layer's attention. A single row takes all heads, which are adjacent.
  template <class F>
  void work_items(int l, F&& f) {
    const KvCache kv = cache(l);
    for (int s = 0; s < step.segments; s++) {
      const Layout& lay = workspace.layouts[s];
      for (int first = 0; first < lay.rows; first += TILE) {
        const int rows = std::min(TILE, lay.rows - first), heads = rows == 1 ? m.kv_heads : 1;
        for (int head = 0; head < m.kv_heads; head += heads)
          f(WorkItem{workspace.layouts.data(), nullptr, lay, kv, m.layer[l].mask_set, first, rows, head, heads}, (int)lay.chunks.size() - 1);
      }
    }
  }

  KvCache cache(int l) const {
    const size_t plane = (size_t)m.kv_pages * m.page_size * m.kv_heads * m.head_dim;
    const char* keys = (const char*)m.kv + (size_t)l * 2 * plane * (m.kv_kind == HW_F32 ? 4 : 2);
    return {keys, keys + plane * (m.kv_kind == HW_F32 ? 4 : 2), m.kv_kind, m.heads, m.kv_heads, m.head_dim, m.page_size};
  }

  // Computes the chunks of shared prefixes.
  void attend_shared(int i, int l) {
    Scratch& scratch = workspace.scratches[i];
    const KvCache kv = cache(l);
    auto claim = [&] { return workspace.next[m.layers + l].fetch_add(1, std::memory_order_relaxed); };
    int mine = claim(), n = 0;
    for (const SharedPrefix& prefix : workspace.prefixes)
      for (int task = 0; task < m.kv_heads * prefix.chunks; task++) {
        if (n++ != mine) continue;
        const Layout& lay = workspace.layouts[prefix.segments[0]];
        const WorkItem item{workspace.layouts.data(), prefix.segments.data(), lay, kv, m.layer[l].mask_set, 0, (int)prefix.segments.size(), task / prefix.chunks, 1};
        take_queries(item, workspace.q.at, Q, scratch);
        attend_chunk(item, task % prefix.chunks, scratch);
        keep_partial(prefix.task + task, item, scratch);
        mine = claim();
      }
  }

  // The partial result of a one-row item's query if its shared prefix has the chunk, else null.
  const float* shared_partial(const WorkItem& item, int query, int chunk) {
    if (item.lay.prefix < 0) return nullptr;
    const SharedPrefix& prefix = workspace.prefixes[item.lay.prefix];
    if (chunk >= prefix.chunks) return nullptr;
    const int group = item.group(), head = query / group;
    return partial(prefix.task + (size_t)head * prefix.chunks + chunk, item.lay.prefix_row * group + query % group);
  }

  void attention(int i, int l) {
    if (!workspace.prefixes.empty()) {
      attend_shared(i, l);
      sync();
    }
    Scratch& scratch = workspace.scratches[i];
    auto claim = [&] { return workspace.next[l].fetch_add(1, std::memory_order_relaxed); };
    int mine = claim(), n = 0;
    work_items(l, [&](const WorkItem& item, int chunks) {
      if (!split) {
        if (n++ != mine) return;
        attend(item, workspace.q.at, workspace.mixed.at, Q, scratch, [&](int query, int chunk) { return shared_partial(item, query, chunk); });
        mine = claim();
        return;
      }
      for (int c = 0; c < chunks; c++) {
        if (n++ != mine) continue;
        if (shared_partial(item, 0, c)) {
          mine = claim();
          continue;
        }
        take_queries(item, workspace.q.at, Q, scratch);
        attend_chunk(item, c, scratch);
        keep_partial(n - 1, item, scratch);
        mine = claim();
      }
    });
    if (!split) return;
    sync();
    merge_all(i, l);
  }

  float* partial(size_t task, int query) { return workspace.partial.at + (task * most_queries + query) * partial_size; }

  void keep_partial(size_t task, const WorkItem& item, const Scratch& scratch) {
    const size_t wide = partial_size - 2;
    for (int q = 0; q < item.queries(); q++) {
      float* to = partial(task, q);
      to[0] = scratch.partial[q].most;
      to[1] = scratch.partial[q].sum;
      if (scratch.partial[q].most != -INFINITY || scratch.partial[q].sum != 0) std::memcpy(to + 2, &scratch.mixed[q * wide], wide * sizeof(float));
    }
  }

  void merge_all(int i, int l) {
    const size_t wide = partial_size - 2;
    float* total = workspace.scratches[i].total.data();
    int task = 0, n = 0;
    work_items(l, [&](const WorkItem& item, int chunks) {
      for (int q = 0; q < item.queries(); q++) {
        if (n++ % threads != i) continue;
        Partial sum{-INFINITY, 0};
        for (int c = 0; c < chunks; c++) {
          const float* done = shared_partial(item, q, c);
          const float* p = done ? done : partial(task + c, q);
          merge(sum, total, {p[0], p[1]}, p + 2, (int)wide);
        }
        write_output(item, q, sum, total, workspace.mixed.at, Q);
      }
      task += chunks;
    });
  }

  void project_out(int i, int l) {
    const hw_layer& w = m.layer[l];
    const bool wanted = any_quantized({&w.o});
    const std::initializer_list<Piece> pieces = {&hw_adapter_layer::o};
    const bool adapted = shrink_(i, l, pieces, m.heads * m.head_dim, workspace.mixed.at, Q);
    for (int r = first(i); wanted && r < last_(i); r++) quantize(i, workspace.mixed.at + r * Q, m.heads * m.head_dim, r);
    if (wanted && !replicated) sync();
    Matmul p = make_matmul(i, w.o, workspace.mixed.at, Q, workspace.x.at, E, true);
    p.x.values = workspace.mixed.at;  // one copy for all threads
    if (adapted && wanted && !replicated) {  // the barrier above was after A x too
      matmuls(&p, 1, T, i, threads);
      expand(adapters, l, pieces, &p, i, threads);
      return;
    }
    matmuls_with_adapters(i, l, pieces, &p, adapted);
  }

  void project_down(int i, int l) {
    const hw_layer& w = m.layer[l];
    const bool wanted = any_quantized({&w.down});
    float* act = workspace.act.at + (replicated ? (size_t)i * T * F : 0);
    for (int r = first(i); r < last_(i); r++) {
      gated_silu(workspace.gate.at + r * F, workspace.up_.at + r * F, m.inner, act + r * F);
      pad(act + r * F, m.inner, F);
      if (wanted) quantize(i, act + r * F, m.inner, r);
    }
    if (!replicated) sync();
    Matmul p = make_matmul(i, w.down, workspace.act.at, F, workspace.x.at, E, true);
    const std::initializer_list<Piece> pieces = {&hw_adapter_layer::down};
    matmuls_with_adapters(i, l, pieces, &p, shrink_(i, l, pieces, m.inner, p.x.values, F));
  }
};

// A single matmul: y = x w, activations quantized as the format needs; with a norm weight, of the normed rows.
struct SingleMatmul {
  hw::ThreadPool& pool;
  Workspace& workspace;
  const hw_matrix& w;
  const float* x;
  const int rows;
  float* y;
  const size_t stride;
  const float* norm;
  const float eps;
  const size_t wide = up(w.k, 32);

  void prepare() {
    workspace.h.fit(rows * wide);
    workspace.quantized[0].fit(rows, w.k);
  }
  void run_thread(int i) {
    const int threads = pool.count();
    for (int r = (int)((int64_t)rows * i / threads); r < (int64_t)rows * (i + 1) / threads; r++) {
      float* h = workspace.h.at + r * wide;
      if (norm) rms_norm(x + (size_t)r * w.k, norm, w.k, eps, h);
      else std::memcpy(h, x + (size_t)r * w.k, w.k * sizeof(float));
      pad(h, w.k, wide);
      if (is_quantized(w)) quantize_row(h, w.k, r, workspace.quantized[0]);
    }
    pool.barrier.wait();
    Activations in = workspace.quantized[0].rows();
    in.values = workspace.h.at;
    in.stride = wide;
    Matmul p{&w, in, {y, stride, false}};
    matmuls(&p, 1, rows, i, threads);
  }
};

void* workspace_new() { return new Workspace; }
void workspace_free(void* workspace) { delete (Workspace*)workspace; }

void forward(hw::ThreadPool& pool, void* workspace, const hw_model& model, const hw_step& step) {
  Forward work{pool, *(Workspace*)workspace, model, step};
  work.prepare();
  pool.run([&](int i) { work.run_thread(i); });
}

void matmul(hw::ThreadPool& pool, void* workspace, const hw_matrix& w, const float* x, int rows, float* y, size_t stride, const float* norm, float eps) {
  SingleMatmul work{pool, *(Workspace*)workspace, w, x, rows, y, stride, norm, eps};
  work.prepare();
  pool.run([&](int i) { work.run_thread(i); });
}

void dequantize_rows(hw::ThreadPool& pool, const hw_matrix& w, const int32_t* rows, int count, float* out) {
  const int threads = pool.count();
  pool.run([&](int i) {
    for (int64_t r = (int64_t)count * i / threads; r < (int64_t)count * (i + 1) / threads; r++) dequantize_row(w, rows[r], out + r * w.k);
  });
}

void sample(hw::ThreadPool& pool, void* workspace, hw_sampling* samplings, int count) {
  std::vector<Sampler>& samplers = ((Workspace*)workspace)->samplers;
  if ((int)samplers.size() < pool.count()) samplers.resize(pool.count());
  int64_t vocab = 0;
  for (int i = 0; i < count; i++) vocab = std::max(vocab, samplings[i].vocab);
  for (Sampler& sampler : samplers) sampler.fit(vocab);
  std::atomic<int> next{0};
  pool.run([&](int i) {
    for (int n = next++; n < count; n = next++) samplings[n].token = samplers[i].sample(samplings[n]);
  });
}

void argmax_rows(hw::ThreadPool& pool, const float* logits, int rows, int64_t vocab, int64_t stride, int64_t* best, uint8_t* bad) {
  const int threads = pool.count();
  if (rows == 1) return argmax(logits, vocab, *best, *bad);
  pool.run([&](int i) {
    for (int r = (int)((int64_t)rows * i / threads); r < (int64_t)rows * (i + 1) / threads; r++) argmax(logits + r * stride, vocab, best[r], bad[r]);
  });
}

}  // namespace HW_NS
