// Every call of the native library on small random work, for sanitizers and valgrind to watch: all weight formats, every
// instruction set of this machine, 1 to 8 threads, odd sizes. Arrays are exactly as long as api.h says. It also fails when
// a result depends on the number of threads; the tests in Python check the numbers.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "api.h"

namespace {

std::mt19937 generator;
int below(int n) { return (int)(generator() % (unsigned)n); }
int up(int n, int unit) { return (n + unit - 1) / unit * unit; }

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "failed: %s (instruction set %d)\n", what, hw_isa());
  std::exit(1);
}

// Memory of exactly the requested size: sanitizers see an access one byte further.
struct Memory {
  std::vector<std::unique_ptr<uint8_t[]>> held;
  template <class T, class F>
  T* make(size_t n, F value) {
    held.emplace_back(new uint8_t[n * sizeof(T)]);
    T* at = (T*)held.back().get();
    for (size_t i = 0; i < n; i++) at[i] = value();
    return at;
  }
  float* floats(size_t n) {
    return make<float>(n, [] { return (float)below(2001) / 1000.0f - 1.0f; });
  }
  uint8_t* bytes(size_t n) {
    return make<uint8_t>(n, [] { return (uint8_t)below(256); });
  }
  uint16_t* halves(size_t n) {  // float16 of about 0.01
    return make<uint16_t>(n, [] { return (uint16_t)(0x2000 | below(1024) | below(2) << 15); });
  }
  uint16_t* bfloats(size_t n) {  // bfloat16 of about 0.01: beside much smaller ones the plain multiply-add rounds twice
    return make<uint16_t>(n, [] { return (uint16_t)(0x3c00 | below(256) | below(2) << 15); });
  }
  int32_t* copy(const std::vector<int32_t>& of) {
    size_t i = 0;
    return make<int32_t>(of.size(), [&] { return of[i++]; });
  }
};

// ---- weights -----------------------------------------------------------------------------------------------------

struct Format {
  int kind, bits, scale, least, group;
};
const Format FORMATS[] = {
    {HW_F32, 0, 0, 0, 0},  {HW_F16, 0, 0, 0, 0}, {HW_BF16, 0, 0, 0, 0}, {HW_INT8, 8, 0, 0, 0},
    {HW_GROUPS, 4, HW_SCALE_F16, 0, 32},  {HW_GROUPS, 4, HW_SCALE_F16, 0, 64},  {HW_GROUPS, 4, HW_SCALE_F16, 1, 32},
    {HW_GROUPS, 8, HW_SCALE_F16, 0, 32},  {HW_GROUPS, 8, HW_SCALE_F16, 0, 128}, {HW_GROUPS, 8, HW_SCALE_F16, 1, 32},
    {HW_GROUPS, 4, HW_SCALE_K, 1, 32},    {HW_GROUPS, 8, HW_SCALE_K, 1, 32},    {HW_GROUPS, 4, HW_SCALE_F32, 0, 16},
    {HW_GROUPS, 4, HW_SCALE_F32, 1, 16},  {HW_GROUPS, 8, HW_SCALE_F32, 0, 16},  {HW_GROUPS, 4, HW_SCALE_F32, 1, 32},
    {HW_GROUPS, 8, HW_SCALE_F32, 1, 64},
};
constexpr int FORMAT_COUNT = sizeof(FORMATS) / sizeof(*FORMATS);

hw_matrix matrix(Memory& m, const Format& f, int n, int k, bool bias) {
  const size_t rows = up(n, 16), groups = up(k, 32) / 32;
  hw_matrix w{f.kind, n, k, f.bits, f.group, f.bits == 4 ? 8 : 128, f.least, f.scale, nullptr, nullptr, nullptr, nullptr};
  w.bias = bias ? m.floats(n) : nullptr;
  if (f.kind == HW_F32) w.quants = m.floats(rows * k);
  if (f.kind == HW_F16 || f.kind == HW_BF16) w.quants = m.halves(rows * k);
  if (f.kind < HW_INT8) return w;
  w.quants = m.bytes(rows * groups * (f.bits * 4));
  if (f.kind == HW_INT8) {
    w.scales = m.floats(rows);
    return w;
  }
  const size_t per = f.group == 16 ? 1 : f.group / 32, held = f.group == 16 ? 2 * groups : (groups + per - 1) / per;
  const size_t numbers = rows * held * (f.least ? 2 : 1);
  if (f.scale == HW_SCALE_K) w.scales = m.bytes(numbers), w.super = m.halves(rows * (groups / 8) * 2);
  else if (f.scale == HW_SCALE_F32) w.scales = m.floats(numbers);
  else w.scales = m.halves(numbers);
  return w;
}

// ---- one case, for a number of threads: its results one after another ----------------------------------------------

typedef std::vector<uint8_t> Results;
template <class T>
void keep(Results& all, const T* at, size_t n) {
  all.insert(all.end(), (const uint8_t*)at, (const uint8_t*)(at + n));
}

Results matmul(const Format& f, int n, int k, int rows, bool strange, int threads) {
  Memory m;
  void* pool = hw_pool_new(threads);
  require(pool, "threads start");
  hw_matrix w = matrix(m, f, n, k, below(2));
  const int64_t stride = n + below(3);
  float *x = m.floats((size_t)rows * k), *y = m.floats(rows * stride), *full = m.floats((size_t)n * k);
  const float odd[] = {NAN, INFINITY, -INFINITY, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::max()};
  for (int i = 0; strange && i < rows; i++) x[(size_t)i * k + below(k)] = odd[i % 5];
  require(hw_matmul(pool, &w, x, rows, y, stride) == 0, "hw_matmul");
  std::vector<int32_t> order(n);
  for (int i = 0; i < n; i++) order[i] = n - 1 - i;
  require(hw_dequantize_rows(pool, &w, m.copy(order), n, full) == 0, "hw_dequantize_rows");
  int64_t* best = m.make<int64_t>(rows, [] { return 0; });
  uint8_t* bad = m.bytes(rows);
  require(hw_argmax(pool, y, rows, n, stride, best, bad) == 0, "hw_argmax");
  Results all;
  keep(all, y, rows * stride), keep(all, full, (size_t)n * k), keep(all, best, rows), keep(all, bad, rows);
  hw_pool_free(pool);
  return all;
}

Results repacked(int kind, int n, int k, bool mapped, int threads) {
  Memory m;
  void* pool = hw_pool_new(threads);
  require(pool, "threads start");
  const int block = kind == 3 ? 144 : kind == 2 ? 34 : kind == 1 ? 20 : 18, inputs = kind == 3 ? 256 : 32;
  const size_t rows = up(n, 16), groups = k / 32, scales = rows * groups * (kind == 0 || kind == 2 ? 2 : kind == 1 ? 4 : 2);
  const size_t quants = rows * groups * (kind == 2 ? 32 : 16), super = kind == 3 ? rows * (groups / 8) * 2 : 0;
  std::vector<int32_t> order(n);
  for (int i = 0; i < n; i++) order[i] = (i * 7 + 3) % n;
  uint8_t *raw = m.bytes((size_t)n * (k / inputs) * block), *to = m.bytes(quants), *factors = m.bytes(scales);
  uint16_t* d = super ? m.halves(super) : nullptr;
  require(hw_repack(pool, kind, raw, n, k, mapped ? m.copy(order) : nullptr, to, factors, d) == 0, "hw_repack");
  Results all;
  keep(all, to, quants), keep(all, factors, scales), keep(all, d, super);
  hw_pool_free(pool);
  return all;
}

// Tokens sampled with every mix of filters, from rows with infinities and a NaN.
Results sampled(int vocab, int threads) {
  constexpr int ROWS = 40;
  Memory m;
  void* pool = hw_pool_new(threads);
  require(pool, "threads start");
  std::vector<hw_sampling> samplings(ROWS);
  for (hw_sampling& d : samplings) {
    float* logits = m.floats(vocab);
    if (!below(4)) logits[below(vocab)] = below(2) ? -INFINITY : INFINITY;
    if (!below(20)) logits[below(vocab)] = NAN;
    uint8_t* allowed = m.bytes(vocab);
    for (int i = 0; i < vocab; i++) allowed[i] &= 1;
    const std::vector<int32_t> changed{below(vocab)};
    double* scores = m.make<double>(1, [] { return 3.5; });
    const double temperatures[] = {0, 0.2, 1, 4}, shares[] = {1, 0.5, 0.999}, least[] = {0, 0.1, 1};
    d = {logits, below(2) ? allowed : nullptr, m.copy(changed), scores, temperatures[below(4)], shares[below(3)], least[below(3)],
         below(1000) / 1000.0, vocab, below(3) ? below(vocab + 2) : 0, below(2), 0};
  }
  require(hw_sample(pool, samplings.data(), ROWS) == 0, "hw_sample");
  Results all;
  for (const hw_sampling& d : samplings) keep(all, &d.token, 1);
  hw_pool_free(pool);
  return all;
}

struct Shape {
  int hidden, inner, heads, kv_heads, head_dim, page, segments, rows, past;
  int common = 0;  // pages that all sequences begin with; each then has `rows` rows
  int kv_kind = HW_F32;
  bool described = false;  // not Llama's layers: whatever a description may say
  int experts = 0;
  bool latent = false;
  int recurrence = HW_NO_RECURRENCE;  // of the second layer
  int streams = 0;
  bool own_layers = false;  // the second layer has heads of its own, or none
};

// What layers take of the token, the rank beside attention, and the second layer's heads.
constexpr int TOKEN = 11, RANK = 5, OWN_DIM = 12;

// Latent attention of a shape, whose head is a slot, and its recurrence.
constexpr int ROTATED = 6, KEY = 10, VALUE = 7, TAPS = 4, MIX_HEADS = 6, MIX_GROUPS = 3, MIX_KEY = 10, MIX_VALUE = 18;
constexpr int MIX_INNER = MIX_HEADS * MIX_VALUE, MIX_CHANNELS = 2 * MIX_GROUPS * MIX_KEY + MIX_INNER;
constexpr int MIX_STATE = MIX_CHANNELS * (TAPS - 1) + MIX_INNER * MIX_KEY;

// A step of several sequences: `past` slots before each, pages in random order, two mask sets, some rows not kept.
struct Sequences {
  std::vector<int32_t> tokens, positions, slots, rows{0}, page_at{0}, pages, numbers, at[2]{{0}, {0}}, runs[2];
  int all_pages = 0;

  Sequences(const Shape& s, int vocab) {
    const int each = (s.past + s.rows + s.page - 1) / s.page + 1;
    all_pages = each * s.segments + 2;
    std::vector<int32_t> places(all_pages);
    for (int i = 0; i < all_pages; i++) places[i] = i;
    for (int i = all_pages - 1; i > 0; i--) std::swap(places[i], places[below(i + 1)]);
    for (int g = 0; g < s.segments; g++) {
      std::vector<int32_t> place(places.begin() + g * each, places.begin() + (g + 1) * each);
      std::copy(places.begin(), places.begin() + s.common, place.begin());
      for (int p = 0; p < each; p++) pages.push_back(place[p]), numbers.push_back(p);
      for (int r = 0; r < s.rows + (s.common ? 0 : g); r++) {
        const int slot = std::min(s.past + r, each * s.page - 1);
        tokens.push_back(below(vocab));
        positions.push_back(slot);
        slots.push_back(below(9) ? place[slot / s.page] * s.page + slot % s.page : -1);
        for (int set = 0; set < 2; set++) see(set, slot);
      }
      rows.push_back((int)tokens.size());
      page_at.push_back((int)pages.size());
    }
  }

  void see(int set, int slot) {  // the first: all before; the second: a sink, a gap, a window
    const int from = set ? std::max(0, slot - below(20)) : 0;
    if (from > 4) runs[set].insert(runs[set].end(), {0, 1 + below(3)});
    runs[set].insert(runs[set].end(), {from, slot + 1});
    at[set].push_back((int)runs[set].size() / 2);
  }
};

// Some adapters: each on some of the matrices, for some of the rows.
struct Adapters {
  std::vector<hw_adapter> each;
  std::vector<int32_t> rows;

  Adapters(Memory& m, const hw_model& model, int T) {
    auto pair = [&](const hw_matrix& w) {
      if (!w.n) return hw_low_rank{};
      const int ranks[] = {0, 1, 16, 21}, rank = ranks[below(4)], kind = below(2) ? HW_F32 : HW_F16;
      const size_t a = (size_t)up(rank, 16) * w.k, b = (size_t)up(w.n, 16) * rank;
      const void* at[2] = {kind == HW_F32 ? (void*)m.floats(a) : m.halves(a), kind == HW_F32 ? (void*)m.floats(b) : m.halves(b)};
      return hw_low_rank{rank, kind, 0.1f, at[0], at[1]};
    };
    auto every = [&](hw_matrix w, int experts) -> const hw_low_rank* {  // w has the rows of one expert after the other
      if (experts < 1 || below(3) == 0) return nullptr;
      w.n /= experts;
      return m.make<hw_low_rank>(experts, [&] { return pair(w); });
    };
    for (int count = below(4); count > 0; count--) {
      int l = 0;
      hw_adapter_layer* weights = m.make<hw_adapter_layer>(model.layers + 1, [&] {
        hw_adapter_layer own = {};
        if (l == model.layers) {  // what is outside of layers
          own.input_projection = pair(model.input_projection);
          own.altup_spread = every(model.altup_spread, model.streams - 1), own.altup_gather = every(model.altup_gather, model.streams - 1);
          return own;
        }
        const hw_layer& w = model.layer[l++];
        own = hw_adapter_layer{pair(w.q), pair(w.k), pair(w.v), pair(w.o), pair(w.gate), pair(w.up), pair(w.down),
                                pair(w.attention_gate), pair(w.mix_in), pair(w.mix_qkv), pair(w.mix_beta), pair(w.mix_step), pair(w.mix_gate), pair(w.mix_out),
                                pair(w.q_down), pair(w.q_up), pair(w.kv_down),
                                pair(w.router), pair(w.shared_gate), pair(w.shared_up), pair(w.shared_down), pair(w.shared_router),
                                pair(w.input_gate), pair(w.input_out),
                                pair(w.laurel_down), pair(w.laurel_up), pair(w.altup_router), pair(w.altup_predict), pair(w.altup_correct)};
        own.expert_gate = every(w.expert_gate, w.router.n), own.expert_up = every(w.expert_up, w.router.n), own.expert_down = every(w.expert_down, w.router.n);
        return own;
      });
      const int first = (int)rows.size();
      for (int r = below(2); r < T; r += 1 + below(3)) rows.push_back(r);
      each.push_back({weights, first, (int)rows.size() - first});
    }
  }
};

Results step(const Shape& s, int threads, int seed = 0) {
  for (int i = 0; i < seed; i++) below(2);  // another description
  constexpr int LAYERS = 2, VOCAB = 37;
  Memory m;
  void* pool = hw_pool_new(threads);
  require(pool, "threads start");
  const int wide = s.heads * s.head_dim, narrow = s.kv_heads * s.head_dim;
  auto any = [&](int n, int k) {
    const Format& f = FORMATS[below(FORMAT_COUNT)];
    return matrix(m, f.scale == HW_SCALE_K && k % 256 ? FORMATS[4] : f, n, k, below(2));
  };
  auto some = [&] { return s.described && below(2); };
  auto norm = [&](bool bias) { return hw_norm{m.floats(s.hidden), bias ? m.floats(s.hidden) : nullptr}; };
  const int X = s.experts, G = 21, shared = X && below(2) ? 37 : 0, qk_norm = s.described ? below(3) : HW_QK_HEAD;
  const bool gated = !some(), biased = some();
  auto each = [&](int n, int k) { return any(X * up(n, 16), k); };
  auto plain = [&](int n, int k) {  // without a bias, as matrices of heads are
    hw_matrix w = any(n, k);
    w.bias = nullptr;
    return w;
  };
  int made = 0;
  const bool sharing = s.own_layers && below(2);
  hw_layer* layers = m.make<hw_layer>(LAYERS, [&] {
    const bool normed = below(2);
    hw_layer w{any(wide, s.hidden), any(narrow, s.hidden), any(narrow, s.hidden), any(s.hidden, wide),
               gated ? any(s.inner, s.hidden) : hw_matrix{}, any(s.inner, s.hidden), any(s.hidden, s.inner)};
    if (X && below(3)) {
      w.router = any(X, s.hidden), w.expert_gate = each(G, s.hidden), w.expert_up = each(G, s.hidden), w.expert_down = each(s.hidden, G);
      if (!s.own_layers) w.gate = w.up = w.down = hw_matrix{};
      if (shared) w.shared_gate = any(shared, s.hidden), w.shared_up = any(shared, s.hidden), w.shared_down = any(s.hidden, shared), w.shared_router = any(1, s.hidden);
    }
    if (!some()) w.norm_in = norm(biased), w.norm_mlp = norm(biased);
    if (some()) w.post_attention = norm(biased), w.post_mlp = norm(biased);
    if (normed) w.q_norm = m.floats(wide), w.k_norm = m.floats(narrow);
    if (some()) w.sinks = m.floats(s.heads);
    w.mask_set = below(2), w.rope_set = s.described ? below(3) - 1 : 0;
    w.kv_heads = s.kv_heads, w.head_dim = s.head_dim, w.kv_before = (int64_t)made * (s.latent ? 1 : 2) * narrow;
    if (s.own_layers) {
      if (made && sharing) w.k = w.v = hw_matrix{}, w.k_norm = nullptr, w.kv_before = 0;
      else if (made) {
        const int own = s.heads * OWN_DIM;
        w.kv_heads = 1, w.head_dim = OWN_DIM, w.q = any(own, s.hidden), w.k = any(OWN_DIM, s.hidden), w.v = hw_matrix{}, w.o = any(s.hidden, own), w.sinks = nullptr;
        w.gate = any(s.inner - 3, s.hidden), w.up = any(s.inner - 3, s.hidden), w.down = any(s.hidden, s.inner - 3), w.rope_set = 1;
        if (normed) w.q_norm = m.floats(own), w.k_norm = m.floats(OWN_DIM);
      }
      w.post_attention = norm(false), w.post_mlp = norm(false);
      w.input_gate = any(TOKEN, s.hidden), w.input_out = any(s.hidden, TOKEN), w.post_input_norm = m.floats(s.hidden), w.layer_scale = s.streams ? nullptr : m.floats(1);
      if (w.router.n) {
        w.dense_norm = m.floats(s.hidden), w.expert_in_norm = m.floats(s.hidden), w.expert_out_norm = m.floats(s.hidden);
        w.router_scale = m.floats(s.hidden), w.expert_scale = m.floats(X);
      }
    }
    if (s.streams) {
      w.laurel_down = any(RANK, s.hidden), w.laurel_up = any(s.hidden, RANK), w.laurel_norm = m.floats(s.hidden), w.altup_norm = m.floats(s.hidden);
      w.altup_router = any(s.streams, s.hidden), w.altup_predict = any(s.streams * s.streams, s.streams), w.altup_correct = any(s.streams, s.streams);
      w.altup_scale = below(2) ? m.floats(s.hidden) : nullptr, w.sparse = w.gate.n ? below(2) : 0, w.cut = 0.3f;
    }
    made++;
    if (s.latent) {
      const int low = below(2) ? 13 : 0, latent = s.head_dim - ROTATED;
      w.q = low ? hw_matrix{} : any(s.heads * (KEY + ROTATED), s.hidden), w.k = w.v = hw_matrix{}, w.o = any(s.hidden, s.heads * VALUE);
      if (low) w.q_down = any(low, s.hidden), w.q_up = any(s.heads * (KEY + ROTATED), low), w.q_down_norm = m.floats(low);
      w.kv_down = any(s.head_dim, s.hidden), w.kv_down_norm = m.floats(latent);
      w.key_up = plain(s.heads * up(latent, 16), KEY), w.value_up = plain(s.heads * up(VALUE, 16), latent);
    }
    if (s.latent && w.router.n) w.router_correction = below(2) ? m.floats(X) : nullptr, w.shared_router = hw_matrix{};
    if (s.recurrence && made == 2) {
      const bool simple = s.recurrence == HW_SHORT_CONV;
      const int channels = simple ? s.hidden : MIX_CHANNELS;
      w.mix_out = any(s.hidden, simple ? s.hidden : MIX_INNER);
      w.conv = m.floats((size_t)channels * TAPS), w.conv_bias = below(2) ? m.floats(channels) : nullptr;
      if (s.recurrence == HW_GATED_DELTA) {
        w.mix_qkv = any(MIX_CHANNELS, s.hidden), w.mix_beta = any(MIX_HEADS, s.hidden), w.mix_step = any(MIX_HEADS, s.hidden);
        w.mix_gate = any(MIX_INNER, s.hidden), w.mix_norm = m.floats(MIX_VALUE);
      } else {
        w.mix_in = any(simple ? 3 * s.hidden : MIX_INNER + MIX_CHANNELS + MIX_HEADS, s.hidden);
        w.mix_norm = below(2) ? m.floats(MIX_INNER) : nullptr;
      }
      w.step_bias = m.floats(MIX_HEADS), w.skip = m.floats(MIX_HEADS);
      w.rate = m.make<float>(MIX_HEADS, [] { return -1.0f - (float)below(100) / 100.0f; });
    } else if (s.recurrence) {
      w.attention_gate = any(wide, s.hidden);
    }
    return w;
  });
  Sequences q(s, VOCAB);
  const int T = (int)q.tokens.size(), hooks = 3;
  const int values = LAYERS * (s.latent ? 1 : 2) * narrow, other = s.own_layers ? (sharing ? 0 : 2 * OWN_DIM) - values / LAYERS : 0;
  const size_t cells = (size_t)(values + other) * q.all_pages * s.page;
  hw_model model{LAYERS, s.hidden, s.inner, s.heads, s.kv_heads, s.head_dim, VOCAB, s.head_dim / 2, 2, s.page};
  model.norm = some() ? HW_NORM_LAYER : HW_NORM_RMS, model.activation = s.described ? below(3) : HW_SILU, model.qk_norm = qk_norm, model.parallel = some();
  model.eps = 1e-5f, model.scale = 0.25f, model.attention_cap = some() ? 3.0f : 0, model.qkv_clip = some() ? 1.5f : 0;
  model.residual_scale = some() ? 0.4f : 1, model.embedding_scale = some() ? 3.0f : 1, model.logit_scale = some() ? 0.3f : 1, model.logit_cap = some() ? 4.0f : 0;
  if (X) model.experts = X, model.per_token = 1 + below(X), model.expert_inner = G, model.shared_inner = shared, model.normalize = below(2), model.clamp = some() ? 1.0f : 0, model.alpha = 1.7f;
  if (X && s.latent) model.route_groups = 2, model.route_kept = 1, model.route_best = 2, model.route_sigmoid = below(2), model.route_scale = 1.5f, model.per_token = 1 + below(X / 2);
  if (X && !s.latent) model.weighted_inputs = some();
  if (s.latent) model.latent = s.head_dim - ROTATED, model.rotated = ROTATED, model.key_dim = KEY, model.value_dim = VALUE, model.query_latent = 13, model.paired = below(2), model.latent_eps = 1e-6f, model.rope_half = ROTATED / 2;
  if (s.own_layers) {
    model.norm_values = 1, model.token_size = TOKEN, model.token_root = 3.3f, model.hidden_root = 0.1f, model.hidden_inverse = 0.01f;
    model.token_inputs = any(VOCAB - 5, LAYERS * TOKEN), model.input_projection = plain(LAYERS * TOKEN, s.hidden), model.input_projection_norm = m.floats(TOKEN);
    model.norm = HW_NORM_RMS, model.parallel = 0, model.qk_norm = HW_QK_EACH;
  }
  if (s.streams) {
    model.streams = s.streams, model.active = below(s.streams);
    model.altup_spread = plain((s.streams - 1) * up(s.hidden, 16), s.hidden), model.altup_gather = plain((s.streams - 1) * up(s.hidden, 16), s.hidden);
  }
  if (some()) model.temperature_floor = 3.0f, model.temperature_scale = 0.2f;
  const int state = s.recurrence == HW_SHORT_CONV ? s.hidden * (TAPS - 1) : MIX_STATE, places = 3 * s.segments + 1;
  if (s.recurrence) {
    model.recurrence = s.recurrence, model.gated_attention = 1, model.taps = TAPS, model.mix_heads = s.recurrence == HW_SHORT_CONV ? 0 : MIX_HEADS, model.mix_groups = MIX_GROUPS;
    model.mix_key_dim = MIX_KEY, model.mix_value_dim = MIX_VALUE, model.cycled = below(2), model.gate_first = below(2), model.step_most = 2.0f;
    model.states = m.floats((size_t)places * state), model.state_layers = 1, model.state_numbers = state;
  }
  model.inv_freq = m.floats(s.head_dim), model.rope_scales = m.floats(2);
  model.rope_halves = m.copy({model.rope_half, s.own_layers ? OWN_DIM / 2 : model.rope_half});
  int last = 0;
  for (int32_t position : q.positions) last = std::max(last, position);
  if (some()) model.positions = m.floats((size_t)(last + 1) * s.hidden);
  model.final_norm = norm(biased), model.layer = layers, model.embedding = any(VOCAB, s.hidden), model.output = any(VOCAB, s.hidden);
  model.kv = s.kv_kind == HW_F32 ? (void*)m.floats(cells) : s.kv_kind == HW_F16 ? m.halves(cells) : m.bfloats(cells);
  model.kv_pages = q.all_pages, model.kv_kind = s.kv_kind;
  const int32_t* at[2] = {m.copy(q.at[0]), m.copy(q.at[1])};
  const int32_t* runs[2] = {m.copy(q.runs[0]), m.copy(q.runs[1])};
  float *hidden = m.floats((size_t)hooks * s.hidden), *queries = m.floats((size_t)hooks * wide), *out = m.floats((size_t)T * s.hidden);
  double* phases = m.make<double>(HW_PHASES, [] { return 0.0; });
  const std::vector<int32_t> where{0, 1, LAYERS}, asked{0, s.recurrence ? 0 : 1, 0}, which{T - 1, 0, T / 2};
  const std::vector<int32_t> read = T == 1 ? std::vector<int32_t>{0} : std::vector<int32_t>{T - 1, 0};
  const int reads = (int)read.size();
  const int64_t stride = VOCAB + below(3);
  float* likely = m.floats(reads * stride);
  int64_t* best = m.make<int64_t>(reads, [] { return -1; });
  uint8_t* bad = m.bytes(reads);
  const Adapters adapters(m, model, T);
  hw_step work{T, s.segments, 2, hooks, hooks, reads, m.copy(q.tokens), m.copy(q.positions), m.copy(q.slots), m.copy(q.rows), m.copy(q.page_at),
               m.copy(q.pages), m.copy(q.numbers), at, runs, m.copy(where), m.copy(which), hidden, m.copy(asked), m.copy(which), queries,
               out, phases, m.copy(read), likely, stride, best, bad, below(2), (int)adapters.each.size(), (int)adapters.rows.size(),
               adapters.each.data(), m.copy(adapters.rows), m.floats(adapters.rows.size())};
  std::vector<int32_t> first_runs{0}, state_runs;  // a sequence keeps its state once on the way, if it has several rows
  for (int g = 0; s.recurrence && g < s.segments; g++) {
    const int row = q.rows[g], rows = q.rows[g + 1] - row, cut = rows / 2;
    if (cut) state_runs.insert(state_runs.end(), {row, cut, 3 * g, 3 * g + 1});
    state_runs.insert(state_runs.end(), {row + cut, rows - cut, cut ? 3 * g + 1 : 3 * g, 3 * g + 2});
    first_runs.push_back((int)state_runs.size() / 4);
  }
  work.sequences = s.recurrence ? s.segments : 0, work.sequence_runs = m.copy(first_runs), work.state_runs = m.copy(state_runs);
  for (int round = 0; round < 2; round++) require(hw_forward(pool, &model, &work) == 0, "hw_forward");  // the second reuses its memory
  float* logits = m.floats((size_t)T * VOCAB);
  for (int norm = 0; norm < 2; norm++) require(hw_logits(pool, &model, out, T, norm, 0, logits, VOCAB) == 0, "hw_logits");
  require(hw_finish_logits(pool, &model, logits, T, VOCAB) == 0, "hw_finish_logits");
  Results all;
  keep(all, out, (size_t)T * s.hidden), keep(all, hidden, (size_t)hooks * s.hidden), keep(all, queries, (size_t)hooks * wide);
  keep(all, logits, (size_t)T * VOCAB), keep(all, (uint16_t*)model.kv, cells * (s.kv_kind == HW_F32 ? 2 : 1)), keep(all, best, reads), keep(all, bad, reads);
  keep(all, model.states, s.recurrence ? (size_t)places * state : 0);
  hw_pool_free(pool);
  return all;
}

// ---- all cases ---------------------------------------------------------------------------------------------------

int cases = 0;
uint64_t digest = 0;  // of what all cases of an instruction set gave, but for those with values that are not finite

// 1 to `most` threads; with `crowd` also more threads than replicate rows.
template <class F>
void same_for_all_threads(const char* what, int isa, int most, F&& work, bool crowd = false, bool finite = true) {
  Results first;
  std::vector<int> counts;
  for (int threads = 1; threads <= most; threads++) counts.push_back(threads);
  if (crowd && most >= 8) counts.insert(counts.end(), {9, 17});
  for (int threads : counts) {
    cases++;
    generator.seed(1000);
    Results now = work(threads);
    if (threads == 1) first = now;
    else if (now != first) {
      std::fprintf(stderr, "%s: %d threads give another result than one (instruction set %d)\n", what, threads, isa);
      std::exit(1);
    }
  }
  for (size_t i = 0; finite && i < first.size(); i++) digest = (digest ^ first[i]) * 1099511628211ull;
}

void all_of(int isa, int most) {
  require(hw_use_isa(isa) == 0 && hw_isa() == isa, "the instruction set is taken");
  const int sizes[][3] = {{1, 32, 1}, {17, 45, 3}, {33, 256, 9}, {50, 512, 33}};  // outputs, inputs, rows
  for (const Format& f : FORMATS)
    for (auto& z : sizes)
      for (int strange = 0; strange < 2; strange++) {
        const int k = f.scale == HW_SCALE_K ? up(z[1], 256) : z[1];
        same_for_all_threads("matmul", isa, most, [&](int t) { return matmul(f, z[0], k, z[2], strange, t); }, false, !strange);
      }
  for (int kind = 0; kind < 4; kind++)
    for (int n : {1, 31, 48})
      same_for_all_threads("repack", isa, most, [&](int t) { return repacked(kind, n, 512, n > 31, t); });
  for (int vocab : {1, 5, 33, 700}) same_for_all_threads("sample", isa, most, [&](int t) { return sampled(vocab, t); });
  const Shape shapes[] = {{64, 96, 4, 2, 16, 16, 1, 1, 300}, {50, 70, 6, 2, 20, 8, 3, 2, 140}, {256, 256, 4, 4, 32, 32, 2, 19, 0},
                          {40, 33, 8, 1, 24, 40, 1, 2, 500}, {96, 64, 2, 1, 64, 64, 4, 5, 70},
                          {48, 32, 4, 2, 16, 16, 19, 1, 300, 17}, {50, 40, 2, 1, 20, 24, 3, 1, 290, 11}};
  int seed = 0;
  for (Shape s : shapes)
    for (int kind : {HW_F32, HW_F16, HW_BF16}) {
      s.kv_kind = kind;
      same_for_all_threads("step", isa, most, [&](int t) { return step(s, t); }, true);
      s.described = true;
      for (int experts : {0, 0, 5, 5}) {
        s.experts = experts, seed++;
        same_for_all_threads("described step", isa, most, [&](int t) { return step(s, t, seed); }, true);
      }
      for (int recurrence : {HW_SHORT_CONV, HW_GATED_DELTA, HW_MAMBA2}) {
        s.recurrence = recurrence, s.experts = 0, seed++;
        same_for_all_threads("recurrent step", isa, most, [&](int t) { return step(s, t, seed); }, true);
      }
      s.recurrence = HW_NO_RECURRENCE, s.own_layers = s.head_dim > OWN_DIM;
      for (int experts : {0, 5})
        for (int streams : {0, 3}) {
          s.experts = experts, s.streams = streams, seed++;
          if (s.own_layers) same_for_all_threads("step of layers of their own", isa, most, [&](int t) { return step(s, t, seed); }, true);
        }
      s.own_layers = false, s.streams = 0;
      if (s.kv_heads == 1 && s.head_dim > ROTATED) {
        s.latent = true, s.experts = 6, seed++;
        same_for_all_threads("latent step", isa, most, [&](int t) { return step(s, t, seed); }, true);
        s.latent = false;
      }
      s.described = false, s.experts = 0;
    }
}

}  // namespace

std::vector<uint8_t> strings(const std::vector<std::string>& texts) {
  std::vector<uint8_t> raw;
  for (const std::string& text : texts) {
    const uint64_t size = text.size();
    raw.insert(raw.end(), (const uint8_t*)&size, (const uint8_t*)&size + 8);
    raw.insert(raw.end(), text.begin(), text.end());
  }
  return raw;
}

void byte_pairs() {
  const std::vector<uint8_t> tokens = strings({"a", "b", "c", "ab", "abc", "\xc3\xa9"}), merges = strings({"a b", "ab c"});
  for (int64_t size = 0; size <= (int64_t)tokens.size(); size++) {
    const std::vector<uint8_t> cut(tokens.begin(), tokens.begin() + size);
    require(hw_strings_size(cut.data(), size, 6) == (size == (int64_t)tokens.size() ? size : -1), "strings that are cut off");
  }
  void* bpe = hw_bpe_new(tokens.data(), 6, merges.data(), 2, 16);
  require(bpe != nullptr && hw_bpe_find(bpe, (const uint8_t*)"ab", 2) == 3, "a token is found");
  const std::string words = "abcab\nx\xc3\xa9" "b\n\nab\xff";
  std::vector<int32_t> ids(words.size());
  require(hw_bpe_encode(bpe, (const uint8_t*)words.data(), (int64_t)words.size(), 0, ids.data()) == 5, "words are encoded");
  ids.resize(5);
  require(ids == std::vector<int32_t>({4, 3, 5, 1, 3}), "to these ids");
  hw_bpe_free(bpe);
  require(hw_bpe_new(tokens.data(), 6, strings({"a c"}).data(), 1, 16) == nullptr, "a merge into no token is refused");
  require(hw_bpe_new(tokens.data(), 6, merges.data(), 2, 2) == nullptr, "a long token is refused");
  require(hw_bpe_new(strings({"a", "a"}).data(), 2, merges.data(), 0, 16) == nullptr, "a token that occurs twice is refused");
}

int main(int count, char** arguments) {
  const int most = count > 1 ? std::atoi(arguments[1]) : 8;
  require(hw_version() == HW_VERSION, "the library has the header's version");
  require(hw_use_isa(-1) != 0 && hw_use_isa(hw_best_isa() + 1) != 0, "an instruction set that is not there is refused");
  byte_pairs();
  for (int isa = 0; isa <= hw_best_isa(); isa++) {
    digest = 14695981039346656037ull;
    all_of(isa, most);
    std::printf("instruction set %d: %016llx\n", isa, (unsigned long long)digest);
    std::fflush(stdout);
  }
  std::printf("%d cases, instruction sets 0 to %d, 1 to %d threads\n", cases, hw_best_isa(), most);
}
