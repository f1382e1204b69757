// A whole decoder step in one call: every thread of the pool runs `Forward::run_thread` and meets the others at barriers.
//
// Compiled once for each instruction set (HW_ISA, HW_NS). Owns its memory (Workspace); reads weights, writes the residual,
// the KV cache, and the hidden states and queries that probes asked for.
#include <algorithm>
#include <chrono>
#include <memory>

#include "latent.h"
#include "lora.h"
#include "per_layer.h"
#include "recurrent.h"
#include "sampling.h"
#include "threads.h"

namespace HW_NS {

struct Workspace {
  Buffer<float> x, h, q, k, v, mixed, gate, up_, act, added, angles, partial, low_rank;
  Buffer<float> routes, expert_in, expert_gate, expert_up, expert_out, shared, expert_low_rank;  // of experts
  Buffer<float> attention_gate;
  LatentBuffers latent;
  RecurrentBuffers recurrent;
  PerLayerBuffers per_layer;
  QuantizedActivations expert_rows;
  std::vector<Routing> routings;  // one per thread
  std::vector<ExpertPlaces> adapted;  // one per thread
  QuantizedActivations quantized[8];  // one per thread where rows are replicated, else only the first
  std::vector<Layout> layouts;
  std::vector<Sampler> samplers;  // one per thread
  std::vector<SharedPrefix> prefixes;
  std::vector<int> order;  // of the segments, for finding shared prefixes
  std::vector<Scratch> scratches;
  std::unique_ptr<std::atomic<int>[]> next;
  int counter_count = 0;
};

struct Forward {
  hw::ThreadPool& pool;
  Workspace& workspace;
  const hw_model& m;
  const hw_step& step;
  const int T = step.rows, threads = pool.count();
  // Row widths in the workspace, padded to whole blocks and groups.
  const int inner = std::max({m.inner, m.shared_inner, m.token_size}), places = T * m.per_token;
  const size_t E = up(m.hidden, 32), F = up(inner, 32), Q = up(m.heads * m.head_dim, 32), K = up(m.kv_heads * m.head_dim, 16);
  const size_t X = up(m.experts, 16) + 16, G = up(m.expert_inner, 32);  // router logits and the shared expert's; an expert's inner row
  const size_t rope_stride = (size_t)m.rope_sets * 2 * m.rope_half;           // cosines and sines of a row
  // With few rows every thread norms and quantizes its own copy, which costs less than one more barrier.
  const bool replicated = T <= 2 && threads <= 8;
  bool split = false;
  int most_queries = 1;  // of a work item
  size_t partial_size = 0;  // floats of one partial result
  Adapters adapters{step, nullptr, 0};
  size_t expert_width = 0, head_width = 0;  // of the largest rank of experts, and of heads
  double* clock_at = nullptr;
  std::chrono::steady_clock::time_point last{};

  void prepare() {
    workspace.x.fit(T * E), workspace.h.fit(T * E * (replicated ? threads : 1));
    workspace.q.fit(T * Q), workspace.k.fit(T * K), workspace.v.fit(T * K), workspace.mixed.fit(T * Q);
    workspace.gate.fit(T * F), workspace.up_.fit(T * F), workspace.act.fit(T * F * (replicated ? threads : 1)), workspace.angles.fit(T * rope_stride + LANES);
    workspace.added.fit(T * E);
    if (m.experts) fit_experts();
    if (m.latent) LatentAttention<Forward>{*this}.fit();
    if (m.recurrence) Recurrence<Forward>{*this}.fit();
    if (m.token_size) TokenInputs<Forward>{*this}.fit();
    if (m.streams) Streams<Forward>{*this}.fit();
    if (has_both()) workspace.per_layer.experts.fit(T * E);
    if (m.gated_attention) workspace.attention_gate.fit(T * Q);
    int wide = std::max({m.hidden, inner, m.heads * m.head_dim, m.heads * m.value_dim});
    for (int i = 0; i < (replicated ? threads : 1); i++) workspace.quantized[i].fit(T, wide);
    for (int r = 0; r < T; r++) pad(workspace.mixed.at + r * Q, m.heads * m.head_dim, Q);
    make_layouts();
    for (int a = 0; a < step.adapter_count; a++)
      for (int l = 0; l <= m.layers; l++) fit_adapter(step.adapters[a].layers[l]);
    if (step.adapter_count) adapters.out = workspace.low_rank.fit((size_t)step.adapter_uses * PIECES * adapters.width);
    const size_t widest = std::max(m.per_token * expert_width, m.heads * head_width);
    if (widest) workspace.expert_low_rank.fit((size_t)step.adapter_uses * ExpertUses::MOST * widest);
    if ((int)workspace.adapted.size() < threads) workspace.adapted.resize(threads);
    if (workspace.counter_count < 2 * m.layers) {  // two per layer: work items, and chunks of shared prefixes
      workspace.next.reset(new std::atomic<int>[2 * m.layers]);
      workspace.counter_count = 2 * m.layers;
    }
    for (int l = 0; l < 2 * m.layers; l++) workspace.next[l].store(0, std::memory_order_relaxed);
    if (step.phases) last = std::chrono::steady_clock::now();
  }

  void fit_adapter(const hw_adapter_layer& own) {
    for (Piece piece : EVERY_PIECE) adapters.width = std::max(adapters.width, (size_t)up((own.*piece).rank, LANES));
    for (ExpertPiece piece : EXPERT_PIECES)
      for (int e = 0; own.*piece && e < m.experts; e++) expert_width = std::max(expert_width, (size_t)up((own.*piece)[e].rank, LANES));
    for (ExpertPiece piece : HEAD_PIECES)
      for (int h = 0; own.*piece && h < m.heads; h++) head_width = std::max(head_width, (size_t)up((own.*piece)[h].rank, LANES));
    for (ExpertPiece piece : STREAM_PIECES)
      for (int k = 0; own.*piece && k < m.streams - 1; k++) adapters.width = std::max(adapters.width, (size_t)up((own.*piece)[k].rank, LANES));
  }

  // Whether a layer has experts beside its feed-forward.
  bool has_both() const { return m.experts && std::any_of(m.layer, m.layer + m.layers, [](const hw_layer& w) { return w.router.n && w.down.n; }); }

  void fit_experts() {
    workspace.routes.fit(T * X), workspace.shared.fit(T * E);
    workspace.expert_in.fit(places * std::max(E, G)), workspace.expert_out.fit(places * E);
    workspace.expert_gate.fit(places * G), workspace.expert_up.fit(places * G);
    workspace.expert_rows.fit(places, std::max(m.hidden, m.expert_inner));
    if ((int)workspace.routings.size() < threads) workspace.routings.resize(threads);
    for (int i = 0; i < threads; i++) workspace.routings[i].fit(T, m);
  }

  void make_layouts() {
    if ((int)workspace.layouts.size() < step.segments) workspace.layouts.resize(step.segments);
    int items = 0, tasks = 0;
    for (int s = 0; s < step.segments; s++) {
      Layout& lay = workspace.layouts[s];
      make_layout(step, s, m.page_size, lay);
      lay.bits.resize((size_t)step.mask_sets * lay.rows * lay.units.size());
      const int chunks = (int)lay.chunks.size() - 1;
      const int n = tiles(lay.rows) * m.kv_heads + (lay.rows % TILE == 1);
      items += n;
      tasks += n * chunks;
    }
    int fewest = m.kv_heads;
    for (int l = 0; l < m.layers; l++)
      if (m.layer[l].kv_heads) fewest = std::min(fewest, m.layer[l].kv_heads);
    most_queries = std::max(TILE * (m.heads / fewest), m.heads);
    split = threads > 1 && items < 3 * threads && tasks > items;
    partial_size = up(m.head_dim, LANES) + 2;
    const size_t all = find_shared_prefixes(split ? tasks : 0);
    if (all) workspace.partial.fit(all * most_queries * partial_size);
    if ((int)workspace.scratches.size() < threads) workspace.scratches.resize(threads);
    for (int i = 0; i < threads; i++) workspace.scratches[i].fit(most_queries, m.head_dim);
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
    if (m.token_size) TokenInputs<Forward>{*this}.make(i);
    if (m.streams) Streams<Forward>{*this}.spread(i);
    phase(i, HW_EMBED);
    for (int l = 0; l < m.layers; l++) layer(i, l);
    if (m.streams) Streams<Forward>{*this}.gather(i);
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
      norm_row(m.norm, workspace.x.at + step.read_rows[n] * E, m.final_norm, m.hidden, m.eps, h + n * E);
      pad(h + n * E, m.hidden, E);
      if (is_quantized(w)) quantize(i, h + n * E, m.hidden, n);
    }
    if (!replicated) sync();
    const Matmul head = make_matmul(i, w, workspace.h.at, E, step.logits, step.logits_stride, false);
    matmuls(&head, 1, step.reads, i, threads);
    sync();
    phase(i, HW_HEAD);
    if (step.unfinished) return;
    for (int n = from(i, step.reads); n < from(i + 1, step.reads); n++) {
      finish_logits(m, step.logits + n * step.logits_stride, w.n);
      argmax(step.logits + n * step.logits_stride, w.n, step.best[n], step.bad[n]);
    }
    phase(i, HW_SAMPLE);
  }

  void embed_and_mask(int i) {
    for (int r = from(i, T); r < from(i + 1, T); r++) {
      embed_row(step.tokens[r], step.positions[r], workspace.x.at + r * E);
      for (int set = 0; set < m.rope_sets; set++) {
        float* angles = workspace.angles.at + r * rope_stride + (size_t)set * 2 * m.rope_half;
        const int half = m.rope_halves[set];
        for (int d = 0; d < half; d++) {
          // In double: libraries differ in the last bit of a float's cosine, and 8-bit activations would amplify that.
          const double angle = (float)step.positions[r] * m.inv_freq[set * m.rope_half + d];
          angles[d] = (float)std::cos(angle) * m.rope_scales[set];
          angles[half + d] = (float)std::sin(angle) * m.rope_scales[set];
        }
      }
    }
    for (int s = 0; s < step.segments; s++) {
      Layout& lay = workspace.layouts[s];
      const size_t units = lay.units.size();
      for (int n = from(i, lay.rows * step.mask_sets); n < from(i + 1, lay.rows * step.mask_sets); n++)
        row_bits(step, n / lay.rows, lay, n % lay.rows, lay.bits.data() + (size_t)n * units);
    }
  }

  void embed_row(int token, int position, float* x) {
    dequantize_row(m.embedding, token, x);
    for (int d = 0; m.embedding_scale != 1.0f && d < m.hidden; d++) x[d] *= m.embedding_scale;
    for (int d = 0; m.positions && d < m.hidden; d++) x[d] += m.positions[(size_t)position * m.hidden + d];
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
    shrink(LayerUses{adapters, l, pieces}, k, values, stride, i, threads);
    return true;
  }

  // A group of matmuls that share x, with what adapters add to them.
  void matmuls_with_adapters(int i, int l, std::initializer_list<Piece> pieces, const Matmul* list, bool adapted) {
    if (adapted) sync();
    matmuls(list, (int)pieces.size(), T, i, threads);
    if (adapted) expand(LayerUses{adapters, l, pieces}, list, i, threads);
  }

  void norm_and_quantize(int i, const hw_norm& norm, bool wanted) {
    take_rows(i, wanted, [&](int r, float* h) {
      if (norm.weight) norm_row(m.norm, workspace.x.at + r * E, norm, m.hidden, m.eps, h);
      else std::memcpy(h, workspace.x.at + r * E, m.hidden * sizeof(float));
    });
  }

  // Rows that matmuls take: f puts row r where it is told.
  template <class G>
  void take_rows(int i, bool wanted, G&& f) {
    float* h = own_h(i);
    for (int r = first(i); r < last_(i); r++) {
      f(r, h + r * E);
      pad(h + r * E, m.hidden, E);
      if (wanted) quantize(i, h + r * E, m.hidden, r);
    }
    if (!replicated) sync();
  }

  float* own_h(int i) const { return workspace.h.at + (replicated ? (size_t)i * T * E : 0); }

  // Whether a matmul's result can be added to the residual as it is.
  bool adds_plainly(const hw_norm& post) const { return !post.weight && m.residual_scale == 1.0f; }

  // Adds a row of what attention or the feed-forward gave to the residual, normed and scaled.
  void add_row(int r, const hw_norm& post) {
    float *x = workspace.x.at + r * E, *y = workspace.added.at + r * E;
    if (post.weight) norm_row(m.norm, y, post, m.hidden, m.eps, y);
    if (m.residual_scale == 1.0f)
      for (int d = 0; d < m.hidden; d++) x[d] += y[d];
    else
      for (int d = 0; d < m.hidden; d++) x[d] += y[d] * m.residual_scale;
  }

  void add_rows(int i, const hw_norm& post) {
    for (int r = from(i, T); r < from(i + 1, T); r++) add_row(r, post);
  }

  void layer(int i, int l) {
    const hw_layer& w = m.layer[l];
    copy_hidden(i, l);
    if (m.streams) {
      if (step.hidden_count) sync();  // the residual is copied before it is what the layer expects
      Streams<Forward>{*this}.predict(i, l);
    }
    norm_and_quantize(i, w.norm_in, any_quantized({&w.q, &w.k, &w.v, &w.laurel_down, &w.attention_gate, &w.q_down, &w.kv_down, &w.mix_in, &w.mix_qkv, &w.mix_beta, &w.mix_step, &w.mix_gate}));
    phase(i, HW_NORM);
    if (w.mix_out.n) Recurrence<Forward>{*this}.mix(i, l);
    else attend_rows(i, l);
    if (!m.parallel && !adds_plainly(w.post_attention)) {
      add_rows(i, w.post_attention);
      if (m.streams) Streams<Forward>{*this}.add_low_rank(i, l);
      sync();
    }
    phase(i, HW_OUT);
    if (w.router.n && w.down.n) ExpertsBeside<Forward>{*this}.run(i, l);
    else if (w.router.n) experts(i, l);
    if (w.down.n) feed_forward(i, l);
    if (m.streams) Streams<Forward>{*this}.correct(i, l);
    if (w.input_gate.n) TokenInputs<Forward>{*this}.part(i, l);
    if (w.input_gate.n || w.layer_scale) add_part(i, l);
    phase(i, HW_MLP);
  }

  // What the layer takes of the token, added to the residual, or to all streams but the first; the layer's scale.
  void add_part(int i, int l) {
    const hw_layer& w = m.layer[l];
    for (int r = from(i, T); r < from(i + 1, T); r++) {
      float *x = workspace.x.at + r * E, *y = workspace.added.at + r * E;
      if (m.streams) Streams<Forward>{*this}.add_to_others(r, y);
      else if (w.input_gate.n)
        for (int d = 0; d < m.hidden; d++) x[d] += y[d];
      for (int d = 0; w.layer_scale && d < m.hidden; d++) x[d] *= w.layer_scale[0];
    }
    sync();
  }

  // Attention's result, projected: added to the residual, or kept where more is to be done with it.
  void attend_rows(int i, int l) {
    if (m.latent) LatentAttention<Forward>{*this}.project(i, l);
    else project_heads(i, l);
    attention(i, l);
    sync();
    if (m.gated_attention) {
      for (int r = from(i, T); r < from(i + 1, T); r++) gate_heads(workspace.attention_gate.at + r * Q, workspace.mixed.at + r * Q, m.heads * m.head_dim);
      sync();
    }
    if (m.latent) LatentAttention<Forward>{*this}.values(i, l);
    phase(i, HW_ATTENTION);
    project_out(i, l);
    sync();
  }

  // Queries, keys and values of normed rows; keys and values go to the KV cache.
  void project_heads(int i, int l) {
    const hw_layer& w = m.layer[l];
    Workspace& s = workspace;
    // A matrix that the layer does not have is one of no outputs.
    const Matmul list[PIECES] = {make_matmul(i, w.q, s.h.at, E, s.q.at, Q, false), make_matmul(i, w.k, s.h.at, E, s.k.at, K, false),
                                 make_matmul(i, w.v, s.h.at, E, s.v.at, K, false),
                                 m.streams ? Streams<Forward>{*this}.low_rank(i, l) : make_matmul(i, w.attention_gate, s.h.at, E, s.attention_gate.at, Q, false)};
    const std::initializer_list<Piece> gated = {&Roles::q, &Roles::k, &Roles::v, &Roles::attention_gate};
    const std::initializer_list<Piece> beside = {&Roles::q, &Roles::k, &Roles::v, &Roles::laurel_down}, pieces = m.streams ? beside : gated;
    matmuls_with_adapters(i, l, pieces, list, shrink_(i, l, pieces, m.hidden, list[0].x.values, E));
    sync();
    if (m.qkv_clip != 0 || (m.qk_norm == HW_QK_ROW && w.q_norm)) {
      norm_whole_rows(i, w);
      sync();
    }
    phase(i, HW_QKV);
    rope_and_write_kv(i, l);
    const bool adapted = m.streams && Streams<Forward>{*this}.quantize_low_rank(i, l);
    sync();
    if (m.streams) Streams<Forward>{*this}.raise_low_rank(i, l, adapted);
    phase(i, HW_ROPE);
  }

  // Attention's result in a layer whose feed-forward has read the same residual.
  void add_parallel(int i, const hw_layer& w) {
    if (!m.parallel) return;
    add_rows(i, w.post_attention);
    sync();
  }

  void feed_forward(int i, int l) {
    const hw_layer& w = m.layer[l];
    Workspace& s = workspace;
    norm_and_quantize(i, w.norm_mlp, any_quantized({&w.gate, &w.up}));
    phase(i, HW_NORM);
    const Matmul up_ = make_matmul(i, w.up, s.h.at, E, s.up_.at, F, false);
    if (w.gate.n) {
      const Matmul gate_up[2] = {make_matmul(i, w.gate, s.h.at, E, s.gate.at, F, false), up_};
      const std::initializer_list<Piece> pieces = {&hw_adapter_layer::gate, &hw_adapter_layer::up};
      matmuls_with_adapters(i, l, pieces, gate_up, shrink_(i, l, pieces, m.hidden, up_.x.values, E));
    } else {
      const std::initializer_list<Piece> pieces = {&hw_adapter_layer::up};
      matmuls_with_adapters(i, l, pieces, &up_, shrink_(i, l, pieces, m.hidden, up_.x.values, E));
    }
    sync();
    add_parallel(i, w);
    project_down(i, l);
    sync();
    if (adds_plainly(w.post_mlp)) return;
    if (w.router.n) ExpertsBeside<Forward>{*this}.join(i, w);
    add_rows(i, w.post_mlp);
    sync();
  }

  // Every chosen expert of every row: the rows of an expert are one matmul, and a row's experts add up in their order.
  void experts(int i, int l) {
    const hw_layer& w = m.layer[l];
    Workspace& s = workspace;
    norm_and_quantize(i, w.norm_mlp, any_quantized({&w.router, &w.shared_gate, &w.shared_up, &w.shared_router}));
    phase(i, HW_NORM);
    Matmul list[4] = {make_matmul(i, w.router, s.h.at, E, s.routes.at, X, false)};
    if (m.shared_inner) {
      list[1] = make_matmul(i, w.shared_gate, s.h.at, E, s.gate.at, F, false);
      list[2] = make_matmul(i, w.shared_up, s.h.at, E, s.up_.at, F, false);
      if (w.shared_router.n) list[3] = make_matmul(i, w.shared_router, s.h.at, E, s.routes.at + X - 16, X, false);
    }
    const std::initializer_list<Piece> alone = {&Roles::router}, shared = {&Roles::router, &Roles::shared_gate, &Roles::shared_up};
    const std::initializer_list<Piece> gated = {&Roles::router, &Roles::shared_gate, &Roles::shared_up, &Roles::shared_router};
    const std::initializer_list<Piece> pieces = !m.shared_inner ? alone : w.shared_router.n ? gated : shared;
    matmuls_with_adapters(i, l, pieces, list, shrink_(i, l, pieces, m.hidden, list[0].x.values, E));
    sync();
    mix_experts(i, l);
    for (int r = from(i, T); r < from(i + 1, T); r++) {
      combine(w, s.routings[i], r);
      add_row(r, w.post_mlp);
    }
    sync();
  }

  // The outputs of every row's experts and of the shared one, for router logits and rows h that are there.
  void mix_experts(int i, int l) {
    const hw_layer& w = m.layer[l];
    Workspace& s = workspace;
    Routing& routing = s.routings[i];  // each thread has its own, which costs less than one more barrier
    route(s.routes.at, X, T, m, w.router_correction, routing);
    for (int n = 0; w.expert_scale && n < places; n++) routing.weights[n] *= w.expert_scale[routing.chosen[n]];
    const bool adapted = expert_width != 0;
    if (adapted) s.adapted[i].fill(step, l, {&Roles::expert_gate, &Roles::expert_up, &Roles::expert_down}, m.experts, m.per_token, routing.place.data(), routing.chosen.data());
    const float* h = own_h(i);
    const bool into = any_quantized({&w.expert_gate, &w.expert_up}), out = is_quantized(w.expert_down);
    for (int n = from(i, places); n < from(i + 1, places); n++) expert_row(h + routing.row[n] * E, m.hidden, E, n, into, m.weighted_inputs ? routing.weights[routing.entry[n]] : 1.0f);
    add_parallel(i, w);
    sync();
    const ExpertUses first{adapters, l, {&Roles::expert_gate, &Roles::expert_up}, s.adapted[i], s.expert_low_rank.at, expert_width};
    by_expert(i, routing, {&w.expert_gate, &w.expert_up}, m.expert_inner, E, {s.expert_gate.at, s.expert_up.at}, G, adapted ? &first : nullptr);
    sync();
    float* act = s.act.at + (replicated ? (size_t)i * T * F : 0);
    for (int n = from(i, places); n < from(i + 1, places); n++) expert_row(activate_expert(n), m.expert_inner, G, n, out);
    if (m.shared_inner) activate_rows(i, w.shared_gate, w.shared_down, m.shared_inner, act);
    sync();
    const ExpertUses last{adapters, l, {&Roles::expert_down}, s.adapted[i], s.expert_low_rank.at, expert_width};
    by_expert(i, routing, {&w.expert_down}, m.hidden, G, {s.expert_out.at}, E, adapted ? &last : nullptr);
    if (m.shared_inner) {
      const Matmul down = make_matmul(i, w.shared_down, s.act.at, F, s.shared.at, E, false);
      const std::initializer_list<Piece> pieces = {&Roles::shared_down};
      matmuls_with_adapters(i, l, pieces, &down, shrink_(i, l, pieces, m.shared_inner, down.x.values, F));
    }
    sync();
  }

  // Puts a row, times a weight, at its place among the experts' rows.
  void expert_row(const float* row, int k, size_t stride, int place, bool wanted, float weight = 1.0f) {
    float* to = workspace.expert_in.at + place * stride;
    std::memcpy(to, row, k * sizeof(float));
    for (int d = 0; weight != 1.0f && d < k; d++) to[d] *= weight;
    pad(to, k, stride);
    if (wanted) quantize_row(to, k, place, workspace.expert_rows);
  }

  // The activation at a place, in place of its gate.
  const float* activate_expert(int place) {
    float *gate = workspace.expert_gate.at + place * G, *up_ = workspace.expert_up.at + place * G;
    if (m.clamp != 0) activate_clamped(gate, up_, m.expert_inner, m.clamp, m.alpha, gate);
    else activate(m.activation, gate, up_, m.expert_inner, gate);
    return gate;
  }

  // Matmuls of each expert's rows with its matrices of `n` outputs, and what adapters add to them.
  void by_expert(int i, const Routing& routing, std::initializer_list<const hw_matrix*> all, int n, size_t stride, std::initializer_list<float*> to, size_t to_stride, const ExpertUses* uses) {
    if (uses) {
      shrink(*uses, (*all.begin())->k, workspace.expert_in.at, stride, i, threads);
      sync();
    }
    Activations x = workspace.expert_rows.rows();
    x.values = workspace.expert_in.at;
    x.stride = stride;
    x.width = up((*all.begin())->k, 32), x.groups = x.width / 32;
    for (int e = 0; e < m.experts; e++) {
      const int first = routing.first[e], count = routing.first[e + 1] - first;
      if (!count) continue;
      hw_matrix own[2];
      Matmul list[2];
      int used = 0;
      for (const hw_matrix* w : all) {
        own[used] = one_expert(*w, e, n);
        list[used] = {&own[used], x.from(first), {to.begin()[used] + first * to_stride, to_stride, false}};
        used++;
      }
      matmuls(list, used, count, i, threads);
    }
    if (!uses) return;
    hw_matrix one = {};
    one.n = n;
    Matmul outputs[2];
    for (size_t j = 0; j < all.size(); j++) outputs[j] = {&one, {}, {to.begin()[j], to_stride, false}};
    expand(*uses, outputs, i, threads);
  }

  // The weighted sum of a row's experts, and of the shared one.
  void combine(const hw_layer& w, const Routing& routing, int r) {
    float* y = workspace.added.at + r * E;
    for (int n = 0; n < m.per_token; n++) {
      const float weight = m.weighted_inputs ? 1.0f : routing.weights[(size_t)r * m.per_token + n], *part = workspace.expert_out.at + routing.place[(size_t)r * m.per_token + n] * E;
      for (int d = 0; d < m.hidden; d++) y[d] = n ? y[d] + part[d] * weight : part[d] * weight;
    }
    if (!m.shared_inner) return;
    const float* part = workspace.shared.at + r * E;
    const float gate = w.shared_router.n ? 1.0f + exp_one(-workspace.routes.at[r * X + X - 16]) : 1.0f;
    for (int d = 0; d < m.hidden; d++) y[d] += part[d] / gate;
  }

  // Norms whole rows of queries and keys, and clips them and the values.
  void norm_whole_rows(int i, const hw_layer& w) {
    const int q = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim;
    auto row = [&](float* x, const float* weight, int n) {
      if (weight && m.qk_norm == HW_QK_ROW) norm_row(m.norm, x, {weight, nullptr}, n, m.eps, x);
      for (int d = 0; m.qkv_clip != 0 && d < n; d++) x[d] = x[d] > m.qkv_clip ? m.qkv_clip : x[d] < -m.qkv_clip ? -m.qkv_clip : x[d];
    };
    for (int r = from(i, T); r < from(i + 1, T); r++) {
      row(workspace.q.at + r * Q, w.q_norm, q);
      row(workspace.k.at + r * K, w.k_norm, kv);
      row(workspace.v.at + r * K, nullptr, kv);
    }
  }

  // Norms one head of queries or keys, unless whole rows are.
  void norm_head(float* x, const float* weight, int head, int dim) {
    if (!weight || m.qk_norm == HW_QK_ROW) return;
    norm_row(m.norm, x, {weight + (m.qk_norm == HW_QK_EACH ? (size_t)head * dim : 0), nullptr}, dim, m.eps, x);
  }

  // Norms one head of values, which has no weights.
  void norm_value(float* x, int dim) {
    const float factor = rms_factor(x, dim, m.eps);
    for (int d = 0; d < dim; d++) x[d] *= factor;
  }

  // Norms and rotates queries and keys, writes keys and values to the KV cache.
  void rope_and_write_kv(int i, int l) {
    const hw_layer& w = m.layer[l];
    const int D = w.head_dim, KV = w.kv_heads, all = m.heads + (w.k.n ? KV : 0), width = m.heads * D;
    const size_t slots = (size_t)m.kv_pages * m.page_size, plane = slots * KV * D;  // numbers of a layer's keys, or values
    const int64_t work = (int64_t)T * all;
    const int half = w.rope_set < 0 ? 0 : m.rope_halves[w.rope_set];
    const size_t rope_offset = w.rope_set < 0 ? 0 : (size_t)w.rope_set * 2 * m.rope_half;
    for (int64_t n = work * i / threads; n < work * (i + 1) / threads; n++) {
      const int r = (int)(n / all), h = (int)(n % all), kh = h - m.heads;
      const float* angles = workspace.angles.at + r * rope_stride + rope_offset;
      if (kh < 0) {
        float* q = workspace.q.at + r * Q + (size_t)h * D;
        norm_head(q, w.q_norm, h, D);
        rotate(q, angles, half, half || m.temperature_floor == 0 ? m.scale : m.scale * temperature(step.positions[r]), D);
        copy_query(l, r, h, q);
        continue;
      }
      float* k = workspace.k.at + r * K + (size_t)kh * D;
      float* v = workspace.v.at + r * K + (size_t)kh * D;
      if (!w.v.n) std::memcpy(v, k, D * sizeof(float));
      if (m.norm_values) norm_value(v, D);
      norm_head(k, w.k_norm, kh, D);
      rotate(k, angles, half, 1.0f, D);
      if (step.write_slots[r] < 0) continue;
      const size_t page = step.write_slots[r] / m.page_size, slot = step.write_slots[r] % m.page_size;
      const size_t first = (page * KV + kh) * m.page_size * D, keys = w.kv_before * slots + first, values = keys + plane;
      write_numbers(k, D, keys + slot, m.page_size);
      write_numbers(v, D, values + slot * D, 1);
    }
    // Attention's result is quantized in whole groups, and a wider layer may have left something there.
    for (int r = from(i, T); width < m.heads * m.head_dim && r < from(i + 1, T); r++) pad(workspace.mixed.at + r * Q, width, up(width, 32));
  }

  // What queries of a layer without a rope are multiplied by: they grow with their position.
  float temperature(int position) const {
    return 1.0f + m.temperature_scale * std::log1p(std::floor(((float)position + 1.0f) / m.temperature_floor));
  }

  // Copies a query that a probe reads.
  void copy_query(int l, int r, int h, const float* q) {
    for (int t = 0; t < step.query_count; t++)
      if (step.query_layers[t] == l && step.query_rows[t] == r)
        std::memcpy(step.query_out + ((size_t)t * m.heads + h) * m.head_dim, q, m.layer[l].head_dim * sizeof(float));
  }

  // A head's numbers to the KV cache, beginning at its number `at`, with a stride.
  void write_numbers(const float* x, int D, size_t at, size_t stride) {
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

  // Tiles of more than one row.
  static int tiles(int rows) { return rows / TILE + (rows % TILE > 1); }

  // Calls f(item, chunks) for every work item of a layer's attention: head by head, so that its keys stay in a cache, and
  // from the last tile, which attends to the most. A single row takes all heads, which are adjacent.
  template <class F>
  void work_items(int l, F&& f) {
    const KvCache kv = cache(l);
    for (int s = 0; s < step.segments; s++) {
      const Layout& lay = workspace.layouts[s];
      auto take = [&](int first, int rows, int head, int heads) {
        f(WorkItem{workspace.layouts.data(), nullptr, lay, kv, m.layer[l].mask_set, first, rows, head, heads}, (int)lay.chunks.size() - 1);
      };
      for (int head = 0; head < kv.kv_heads; head++)
        for (int tile = tiles(lay.rows) - 1; tile >= 0; tile--) take(tile * TILE, std::min(TILE, lay.rows - tile * TILE), head, 1);
      if (lay.rows % TILE == 1) take(lay.rows - 1, 1, 0, kv.kv_heads);
    }
  }

  KvCache cache(int l) const {
    const hw_layer& w = m.layer[l];
    const size_t bytes = (size_t)m.kv_pages * m.page_size * (m.kv_kind == HW_F32 ? 4 : 2);  // of a number of every slot
    const char* keys = (const char*)m.kv + w.kv_before * bytes;
    const char* values = m.latent ? keys : keys + w.kv_heads * w.head_dim * bytes;
    return {keys, values, m.kv_kind, m.heads, w.kv_heads, w.head_dim, m.page_size, m.attention_cap, w.sinks, m.latent != 0};
  }

  // Computes the chunks of shared prefixes.
  void attend_shared(int i, int l) {
    Scratch& scratch = workspace.scratches[i];
    const KvCache kv = cache(l);
    auto claim = [&] { return workspace.next[m.layers + l].fetch_add(1, std::memory_order_relaxed); };
    int mine = claim(), n = 0;
    for (const SharedPrefix& prefix : workspace.prefixes)
      for (int task = 0; task < kv.kv_heads * prefix.chunks; task++) {
        if (n++ != mine) continue;
        const Layout& lay = workspace.layouts[prefix.segments[0]];
        const WorkItem item{workspace.layouts.data(), prefix.segments.data(), lay, kv, m.layer[l].mask_set, 0, (int)prefix.segments.size(), task / prefix.chunks, 1};
        take_queries(item, workspace.q.at, Q, scratch);
        attend_chunk(item, task % prefix.chunks, scratch, [&](Held held) { keep_partial(prefix.task + task, held, scratch); });
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
    workspace.scratches[i].take(m.layer[l].head_dim);
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
        attend_chunk(item, c, scratch, [&](Held held) { keep_partial(n - 1, held, scratch); });
        mine = claim();
      }
    });
    if (!split) return;
    sync();
    merge_all(i, l);
  }

  float* partial(size_t task, int query) { return workspace.partial.at + (task * most_queries + query) * partial_size; }

  void keep_partial(size_t task, Held held, const Scratch& scratch) {
    const size_t wide = scratch.wide;
    for (int q = 0; q < held.count; q++) {
      float* to = partial(task, held.first + q);
      to[0] = scratch.partial[q].most;
      to[1] = scratch.partial[q].sum;
      if (scratch.partial[q].most != -INFINITY || scratch.partial[q].sum != 0) std::memcpy(to + 2, scratch.mixed.at + q * wide, wide * sizeof(float));
    }
  }

  void merge_all(int i, int l) {
    const size_t wide = workspace.scratches[i].wide;
    float* total = workspace.scratches[i].total.at;
    int task = 0, n = 0;
    work_items(l, [&](const WorkItem& item, int chunks) {
      for (int q = 0; q < item.queries(); q++) {
        if (n++ % threads != i) continue;
        Partial sum{-INFINITY, 0};
        for (int c = 0; c < chunks; c++) {
          const float* done = shared_partial(item, q, c);
          const float* p = done ? done : partial(task + c, q);
          merge(1, &sum, total, [&](int) { return Partial{p[0], p[1]}; }, [&](int) { return p + 2; }, (int)wide);
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
    const size_t stride = m.latent ? up(w.o.k, 32) : Q;
    float* mixed = m.latent ? workspace.latent.out.at : workspace.mixed.at;
    const bool adapted = shrink_(i, l, pieces, w.o.k, mixed, stride);
    for (int r = first(i); wanted && r < last_(i); r++) quantize(i, mixed + r * stride, w.o.k, r);
    if (wanted && !replicated) sync();
    const bool plainly = !m.parallel && adds_plainly(w.post_attention);
    Matmul p = make_matmul(i, w.o, mixed, stride, plainly ? workspace.x.at : workspace.added.at, E, plainly);
    p.x.values = mixed;  // one copy for all threads
    if (adapted && wanted && !replicated) {  // the barrier above was after A x too
      matmuls(&p, 1, T, i, threads);
      expand(LayerUses{adapters, l, pieces}, &p, i, threads);
      return;
    }
    matmuls_with_adapters(i, l, pieces, &p, adapted);
  }

  // The activations of a feed-forward's rows, quantized if its down matrix is.
  void activate_rows(int i, const hw_matrix& gate, const hw_matrix& down, int n, float* act, const float* cut = nullptr) {
    for (int r = first(i); r < last_(i); r++) {
      const float* gates = gate.n ? workspace.gate.at + r * F : nullptr;
      float* to = act + r * F;
      if (cut) {
        std::memcpy(to, gates, n * sizeof(float));
        cut_off(to, n, *cut);
        gates = to;
      }
      activate(m.activation, gates, workspace.up_.at + r * F, n, to);
      pad(to, n, F);
      if (is_quantized(down)) quantize(i, to, n, r);
    }
  }

  void project_down(int i, int l) {
    const hw_layer& w = m.layer[l];
    const bool plainly = adds_plainly(w.post_mlp);
    activate_rows(i, w.gate, w.down, w.down.k, workspace.act.at + (replicated ? (size_t)i * T * F : 0), w.sparse ? &w.cut : nullptr);
    if (!replicated) sync();
    Matmul p = make_matmul(i, w.down, workspace.act.at, F, plainly ? workspace.x.at : workspace.added.at, E, plainly);
    const std::initializer_list<Piece> pieces = {&hw_adapter_layer::down};
    matmuls_with_adapters(i, l, pieces, &p, shrink_(i, l, pieces, w.down.k, p.x.values, F));
  }
};

// A single matmul: y = x w, activations quantized as the format needs; with a model, its logits, or
// products that are not finished, of normed rows if `norm`.
struct SingleMatmul {
  hw::ThreadPool& pool;
  Workspace& workspace;
  const hw_matrix& w;
  const float* x;
  const int rows;
  float* y;
  const size_t stride;
  const hw_model* model;
  const bool norm, finish;
  const size_t wide = up(w.k, 32);

  void prepare() {
    workspace.h.fit(rows * wide);
    workspace.quantized[0].fit(rows, w.k);
  }
  void run_thread(int i) {
    const int threads = pool.count();
    for (int r = (int)((int64_t)rows * i / threads); r < (int64_t)rows * (i + 1) / threads; r++) {
      float* h = workspace.h.at + r * wide;
      if (norm) norm_row(model->norm, x + (size_t)r * w.k, model->final_norm, w.k, model->eps, h);
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
    if (!model || !finish || (model->logit_scale == 1.0f && model->logit_cap == 0)) return;
    pool.barrier.wait();
    for (int r = (int)((int64_t)rows * i / threads); r < (int64_t)rows * (i + 1) / threads; r++) finish_logits(*model, y + r * stride, w.n);
  }
};

void* workspace_new() { return new Workspace; }
void workspace_free(void* workspace) { delete (Workspace*)workspace; }

void forward(hw::ThreadPool& pool, void* workspace, const hw_model& model, const hw_step& step) {
  Forward work{pool, *(Workspace*)workspace, model, step};
  work.prepare();
  pool.run([&](int i) { work.run_thread(i); });
}

void matmul(hw::ThreadPool& pool, void* workspace, const hw_matrix& w, const float* x, int rows, float* y, size_t stride, const hw_model* model, bool norm, bool finish) {
  SingleMatmul work{pool, *(Workspace*)workspace, w, x, rows, y, stride, model, norm, finish};
  work.prepare();
  pool.run([&](int i) { work.run_thread(i); });
}

void finish_rows(hw::ThreadPool& pool, const hw_model& model, float* logits, int rows, size_t stride) {
  const int threads = pool.count();
  pool.run([&](int i) {
    for (int r = (int)((int64_t)rows * i / threads); r < (int64_t)rows * (i + 1) / threads; r++) finish_logits(model, logits + r * stride, model.output.n);
  });
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
