// The library's face: picks the instruction set once, keeps threads and working memory together, lets no exception out.
#include "api.h"

#include <atomic>
#include <new>
#include <system_error>

#include "threads.h"

#define HW_DECLARE(NS)                                                                                              \
  namespace NS {                                                                                                    \
  void* space_new();                                                                                                \
  void space_free(void*);                                                                                           \
  void run(hw::Team&, void*, const hw_model&, const hw_step&);                                                      \
  void alone(hw::Team&, void*, const hw_matrix&, const float*, int, float*, size_t, const float*, float);           \
  void gather(hw::Team&, const hw_matrix&, const int32_t*, int, float*);                                            \
  void choose(hw::Team&, const float*, int, int64_t, int64_t, int64_t*, uint8_t*);                                  \
  void draw_all(hw::Team&, void*, hw_draw*, int);                                                                   \
  }                                                                                                                 \
  static const Kernels table_##NS = {NS::space_new, NS::space_free, NS::run, NS::alone, NS::gather, NS::choose, NS::draw_all};

namespace {
struct Kernels {
  void* (*space_new)();
  void (*space_free)(void*);
  void (*run)(hw::Team&, void*, const hw_model&, const hw_step&);
  void (*alone)(hw::Team&, void*, const hw_matrix&, const float*, int, float*, size_t, const float*, float);
  void (*gather)(hw::Team&, const hw_matrix&, const int32_t*, int, float*);
  void (*choose)(hw::Team&, const float*, int, int64_t, int64_t, int64_t*, uint8_t*);
  void (*draw_all)(hw::Team&, void*, hw_draw*, int);
};
}  // namespace

namespace hw {
int pack(Team&, int, const uint8_t*, int, int, const int32_t*, uint8_t*, void*, uint16_t*);
}

HW_DECLARE(hw_plain)
#ifdef HW_X86
HW_DECLARE(hw_avx2)
HW_DECLARE(hw_avx512)
HW_DECLARE(hw_vnni)
#endif

namespace {

const Kernels* const tables[4] = {
    &table_hw_plain,
#ifdef HW_X86
    &table_hw_avx2, &table_hw_avx512, &table_hw_vnni,
#else
    nullptr, nullptr, nullptr,
#endif
};

int best() {
#ifdef HW_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return __builtin_cpu_supports("avx512vnni") ? 3 : 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return 1;
#endif
  return 0;
}

std::atomic<int> chosen{-1};

int isa() {
  int now = chosen.load();
  if (now < 0) chosen.store(now = best());
  return now;
}

struct Handle {
  explicit Handle(int count) : team(count), kernels(*tables[isa()]), space(kernels.space_new()) {}
  ~Handle() { kernels.space_free(space); }
  hw::Team team;
  const Kernels& kernels;  // a handle keeps to the set it was made under
  void* space;
};

template <class F>
int32_t guarded(F&& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (...) {
    return 2;
  }
}

}  // namespace

extern "C" {

int32_t hw_version(void) { return HW_VERSION; }
int32_t hw_isa(void) { return isa(); }
int32_t hw_best_isa(void) { return best(); }
int32_t hw_use_isa(int32_t wanted) {
  if (wanted < 0 || wanted > best()) return 1;
  chosen.store(wanted);
  return 0;
}

void* hw_threads_new(int32_t count) {
  try {
    return new Handle(count);
  } catch (...) {
    return nullptr;
  }
}
void hw_threads_free(void* handle) { delete (Handle*)handle; }

int32_t hw_run(void* handle, const hw_model* model, const hw_step* step) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.run(h.team, h.space, *model, *step); });
}

int32_t hw_head(void* handle, const hw_model* model, const float* x, int32_t rows, int32_t norm, float* logits, int64_t stride) {
  Handle& h = *(Handle*)handle;
  return guarded([&] {
    h.kernels.alone(h.team, h.space, model->output, x, rows, logits, stride, norm ? model->final_norm : nullptr, model->eps);
  });
}

int32_t hw_linear(void* handle, const hw_matrix* w, const float* x, int32_t rows, float* y, int64_t stride) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.alone(h.team, h.space, *w, x, rows, y, stride, nullptr, 0.0f); });
}

int32_t hw_gather(void* handle, const hw_matrix* w, const int32_t* rows, int32_t count, float* out) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.gather(h.team, *w, rows, count, out); });
}

int32_t hw_choose(void* handle, const float* logits, int32_t rows, int64_t vocab, int64_t stride, int64_t* best_, uint8_t* bad) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.choose(h.team, logits, rows, vocab, stride, best_, bad); });
}

int32_t hw_draw_all(void* handle, hw_draw* draws, int32_t count) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.draw_all(h.team, h.space, draws, count); });
}

int32_t hw_pack(void* handle, int32_t kind, const uint8_t* raw, int32_t n, int32_t k, const int32_t* rows, uint8_t* codes, void* scales, uint16_t* super) {
  int32_t code = 0;
  const int32_t failed = guarded([&] { code = hw::pack(((Handle*)handle)->team, kind, raw, n, k, rows, codes, scales, super); });
  return failed ? failed : code;
}

}  // extern "C"
