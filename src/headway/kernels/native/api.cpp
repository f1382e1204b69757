// The library's C interface: picks the instruction set once, owns thread pools with their workspaces, lets no exception out.
#include "api.h"

#include <atomic>
#include <new>
#include <system_error>

#include "threads.h"
#ifdef HW_X86
#include <cpuid.h>
#elif defined(HW_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(HW_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define HW_DECLARE(NS)                                                                                              \
  namespace NS {                                                                                                    \
  void* workspace_new();                                                                                                \
  void workspace_free(void*);                                                                                           \
  void forward(hw::ThreadPool&, void*, const hw_model&, const hw_step&);                                                      \
  void matmul(hw::ThreadPool&, void*, const hw_matrix&, const float*, int, float*, size_t, const float*, float);           \
  void dequantize_rows(hw::ThreadPool&, const hw_matrix&, const int32_t*, int, float*);                                            \
  void argmax_rows(hw::ThreadPool&, const float*, int, int64_t, int64_t, int64_t*, uint8_t*);                                  \
  void sample(hw::ThreadPool&, void*, hw_sampling*, int);                                                                   \
  }                                                                                                                 \
  static const Kernels table_##NS = {NS::workspace_new, NS::workspace_free, NS::forward, NS::matmul, NS::dequantize_rows, NS::argmax_rows, NS::sample};

namespace {
struct Kernels {
  void* (*workspace_new)();
  void (*workspace_free)(void*);
  void (*forward)(hw::ThreadPool&, void*, const hw_model&, const hw_step&);
  void (*matmul)(hw::ThreadPool&, void*, const hw_matrix&, const float*, int, float*, size_t, const float*, float);
  void (*dequantize_rows)(hw::ThreadPool&, const hw_matrix&, const int32_t*, int, float*);
  void (*argmax_rows)(hw::ThreadPool&, const float*, int, int64_t, int64_t, int64_t*, uint8_t*);
  void (*sample)(hw::ThreadPool&, void*, hw_sampling*, int);
};
}  // namespace

namespace hw {
int repack(ThreadPool&, int, const uint8_t*, int, int, const int32_t*, uint8_t*, void*, uint16_t*);
}

HW_DECLARE(hw_plain)
#ifdef HW_X86
HW_DECLARE(hw_avx2)
HW_DECLARE(hw_avx512)
HW_DECLARE(hw_vnni)
#elif defined(HW_ARM)
HW_DECLARE(hw_neon)
HW_DECLARE(hw_i8mm)
#endif

namespace {

const Kernels* const tables[4] = {
    &table_hw_plain,
#ifdef HW_X86
    &table_hw_avx2, &table_hw_avx512, &table_hw_vnni,
#elif defined(HW_ARM)
    &table_hw_neon, &table_hw_i8mm, nullptr,
#else
    nullptr, nullptr, nullptr,
#endif
};

#ifdef HW_X86
bool has_f16c() {  // clang's __builtin_cpu_supports does not know it
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#ifdef HW_ARM
#if defined(__linux__)
bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }  // HWCAP_ASIMDDP
bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }    // HWCAP2_I8MM
#elif defined(__APPLE__)
bool feature(const char* name) {
  int64_t value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
bool has_dotprod() { return feature("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return feature("hw.optional.arm.FEAT_I8MM"); }
#else
bool has_dotprod() { return false; }
bool has_i8mm() { return false; }
#endif
#endif

int best() {
#ifdef HW_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return __builtin_cpu_supports("avx512vnni") ? 3 : 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) return 1;
#elif defined(HW_ARM)
  if (has_dotprod()) return has_i8mm() ? 2 : 1;
#endif
  return 0;
}

std::atomic<int> selected{-1};

int isa() {
  int now = selected.load();
  if (now < 0) selected.store(now = best());
  return now;
}

struct Handle {
  explicit Handle(int count) : pool(count), kernels(*tables[isa()]), workspace(kernels.workspace_new()) {}
  ~Handle() { kernels.workspace_free(workspace); }
  hw::ThreadPool pool;
  const Kernels& kernels;  // of the instruction set in use when the handle was created
  void* workspace;
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
int32_t hw_use_isa(int32_t requested) {
  if (requested < 0 || requested > best()) return 1;
  selected.store(requested);
  return 0;
}

void* hw_pool_new(int32_t count) {
  try {
    return new Handle(count);
  } catch (...) {
    return nullptr;
  }
}
void hw_pool_free(void* handle) { delete (Handle*)handle; }

int32_t hw_forward(void* handle, const hw_model* model, const hw_step* step) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.forward(h.pool, h.workspace, *model, *step); });
}

int32_t hw_logits(void* handle, const hw_model* model, const float* x, int32_t rows, int32_t norm, float* logits, int64_t stride) {
  Handle& h = *(Handle*)handle;
  return guarded([&] {
    h.kernels.matmul(h.pool, h.workspace, model->output, x, rows, logits, stride, norm ? model->final_norm : nullptr, model->eps);
  });
}

int32_t hw_matmul(void* handle, const hw_matrix* w, const float* x, int32_t rows, float* y, int64_t stride) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.matmul(h.pool, h.workspace, *w, x, rows, y, stride, nullptr, 0.0f); });
}

int32_t hw_dequantize_rows(void* handle, const hw_matrix* w, const int32_t* rows, int32_t count, float* out) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.dequantize_rows(h.pool, *w, rows, count, out); });
}

int32_t hw_argmax(void* handle, const float* logits, int32_t rows, int64_t vocab, int64_t stride, int64_t* best_, uint8_t* bad) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.argmax_rows(h.pool, logits, rows, vocab, stride, best_, bad); });
}

int32_t hw_sample(void* handle, hw_sampling* samplings, int32_t count) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.sample(h.pool, h.workspace, samplings, count); });
}

int32_t hw_repack(void* handle, int32_t kind, const uint8_t* raw, int32_t n, int32_t k, const int32_t* rows, uint8_t* quants, void* scales, uint16_t* super) {
  int32_t code = 0;
  const int32_t failed = guarded([&] { code = hw::repack(((Handle*)handle)->pool, kind, raw, n, k, rows, quants, scales, super); });
  return failed ? failed : code;
}

}  // extern "C"
