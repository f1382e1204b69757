// Every call of the native library on small random work, for sanitizers and valgrind to watch: all weight formats, every
// instruction set of this machine, 1 to 8 threads, odd sizes. Arrays are exactly as long as api.h says. It also fails when
// a result depends on the number of threads; the tests in Python check the numbers.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
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
};

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

  Adapters(Memory& m, const Shape& s, int layers, int T) {
    const int wide = s.heads * s.head_dim, narrow = s.kv_heads * s.head_dim;
    auto pair = [&](int n, int k) {
      const int ranks[] = {0, 1, 16, 21}, rank = ranks[below(4)], kind = below(2) ? HW_F32 : HW_F16;
      const size_t a = (size_t)up(rank, 16) * k, b = (size_t)up(n, 16) * rank;
      const void* at[2] = {kind == HW_F32 ? (void*)m.floats(a) : m.halves(a), kind == HW_F32 ? (void*)m.floats(b) : m.halves(b)};
      return hw_low_rank{rank, kind, 0.1f, at[0], at[1]};
    };
    for (int count = below(4); count > 0; count--) {
      hw_adapter_layer* weights = m.make<hw_adapter_layer>(layers, [&] {
        return hw_adapter_layer{pair(wide, s.hidden), pair(narrow, s.hidden), pair(narrow, s.hidden), pair(s.hidden, wide),
                                pair(s.inner, s.hidden), pair(s.inner, s.hidden), pair(s.hidden, s.inner)};
      });
      const int first = (int)rows.size();
      for (int r = below(2); r < T; r += 1 + below(3)) rows.push_back(r);
      each.push_back({weights, first, (int)rows.size() - first});
    }
  }
};

Results step(const Shape& s, int threads) {
  constexpr int LAYERS = 2, VOCAB = 37;
  Memory m;
  void* pool = hw_pool_new(threads);
  require(pool, "threads start");
  const int wide = s.heads * s.head_dim, narrow = s.kv_heads * s.head_dim;
  auto any = [&](int n, int k) {
    const Format& f = FORMATS[below(FORMAT_COUNT)];
    return matrix(m, f.scale == HW_SCALE_K && k % 256 ? FORMATS[4] : f, n, k, below(2));
  };
  hw_layer* layers = m.make<hw_layer>(LAYERS, [&] {
    const bool normed = below(2);
    return hw_layer{any(wide, s.hidden), any(narrow, s.hidden), any(narrow, s.hidden), any(s.hidden, wide),
                    any(s.inner, s.hidden), any(s.inner, s.hidden), any(s.hidden, s.inner), m.floats(s.hidden),
                    m.floats(s.hidden), normed ? m.floats(s.head_dim) : nullptr, normed ? m.floats(s.head_dim) : nullptr,
                    below(2)};
  });
  Sequences q(s, VOCAB);
  const int T = (int)q.tokens.size(), hooks = 3;
  const size_t cells = (size_t)LAYERS * 2 * q.all_pages * s.page * narrow;
  hw_model model{LAYERS, s.hidden, s.inner, s.heads, s.kv_heads, s.head_dim, VOCAB, s.head_dim / 2, s.page, 1e-5f,
                 0.25f, 1.0f, m.floats(s.head_dim / 2), m.floats(s.hidden), layers, any(VOCAB, s.hidden), any(VOCAB, s.hidden),
                 s.kv_kind == HW_F32 ? (void*)m.floats(cells) : m.halves(cells), q.all_pages, s.kv_kind};
  const int32_t* at[2] = {m.copy(q.at[0]), m.copy(q.at[1])};
  const int32_t* runs[2] = {m.copy(q.runs[0]), m.copy(q.runs[1])};
  float *hidden = m.floats((size_t)hooks * s.hidden), *queries = m.floats((size_t)hooks * wide), *out = m.floats((size_t)T * s.hidden);
  double* phases = m.make<double>(HW_PHASES, [] { return 0.0; });
  const std::vector<int32_t> where{0, 1, LAYERS}, places{0, 1, 0}, which{T - 1, 0, T / 2};
  const std::vector<int32_t> read = T == 1 ? std::vector<int32_t>{0} : std::vector<int32_t>{T - 1, 0};
  const int reads = (int)read.size();
  const int64_t stride = VOCAB + below(3);
  float* likely = m.floats(reads * stride);
  int64_t* best = m.make<int64_t>(reads, [] { return -1; });
  uint8_t* bad = m.bytes(reads);
  const Adapters adapters(m, s, LAYERS, T);
  hw_step work{T, s.segments, 2, hooks, hooks, reads, m.copy(q.tokens), m.copy(q.positions), m.copy(q.slots), m.copy(q.rows), m.copy(q.page_at),
               m.copy(q.pages), m.copy(q.numbers), at, runs, m.copy(where), m.copy(which), hidden, m.copy(places), m.copy(which), queries,
               out, phases, m.copy(read), likely, stride, best, bad, (int)adapters.each.size(), (int)adapters.rows.size(),
               adapters.each.data(), m.copy(adapters.rows), m.floats(adapters.rows.size())};
  for (int round = 0; round < 2; round++) require(hw_forward(pool, &model, &work) == 0, "hw_forward");  // the second reuses its memory
  float* logits = m.floats((size_t)T * VOCAB);
  for (int norm = 0; norm < 2; norm++) require(hw_logits(pool, &model, out, T, norm, logits, VOCAB) == 0, "hw_logits");
  Results all;
  keep(all, out, (size_t)T * s.hidden), keep(all, hidden, (size_t)hooks * s.hidden), keep(all, queries, (size_t)hooks * wide);
  keep(all, logits, (size_t)T * VOCAB), keep(all, (uint16_t*)model.kv, cells * (s.kv_kind == HW_F32 ? 2 : 1)), keep(all, best, reads), keep(all, bad, reads);
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
  for (Shape s : shapes)
    for (int kind : {HW_F32, HW_F16, HW_BF16}) {
      s.kv_kind = kind;
      same_for_all_threads("step", isa, most, [&](int t) { return step(s, t); }, true);
    }
}

}  // namespace

int main(int count, char** arguments) {
  const int most = count > 1 ? std::atoi(arguments[1]) : 8;
  require(hw_version() == HW_VERSION, "the library has the header's version");
  require(hw_use_isa(-1) != 0 && hw_use_isa(hw_best_isa() + 1) != 0, "an instruction set that is not there is refused");
  for (int isa = 0; isa <= hw_best_isa(); isa++) {
    digest = 14695981039346656037ull;
    all_of(isa, most);
    std::printf("instruction set %d: %016llx\n", isa, (unsigned long long)digest);
    std::fflush(stdout);
  }
  std::printf("%d cases, instruction sets 0 to %d, 1 to %d threads\n", cases, hw_best_isa(), most);
}
