// The library's C interface: picks the instruction set once, owns thread pools with their workspaces, lets no exception out.
#include "api.h"

#include <atomic>
#include <new>
#include <system_error>

#include "bpe.h"
#include "machine.h"
#include "threads.h"

// The instruction sets that were compiled, a bit each; the plain one always is.
#ifndef HW_SETS
#define HW_SETS 15
#endif

#define HW_DECLARE(NS)                                                                                              \
  namespace NS {                                                                                                    \
  void* workspace_new();                                                                                                \
  void workspace_free(void*);                                                                                           \
  void forward(hw::ThreadPool&, void*, const hw_model&, const hw_step&);                                                      \
  void matmul(hw::ThreadPool&, void*, const hw_matrix&, const float*, int, float*, size_t, const hw_model*, bool, bool);     \
  void finish_rows(hw::ThreadPool&, const hw_model&, float*, int, size_t);                                                    \
  void dequantize_rows(hw::ThreadPool&, const hw_matrix&, const int32_t*, int, float*);                                            \
  void argmax_rows(hw::ThreadPool&, const float*, int, int64_t, int64_t, int64_t*, uint8_t*);                                  \
  void sample(hw::ThreadPool&, void*, hw_sampling*, int);                                                                   \
  }                                                                                                                 \
  static const Kernels table_##NS = {NS::workspace_new, NS::workspace_free, NS::forward, NS::matmul, NS::finish_rows, NS::dequantize_rows, NS::argmax_rows, NS::sample};

namespace {
struct Kernels {
  void* (*workspace_new)();
  void (*workspace_free)(void*);
  void (*forward)(hw::ThreadPool&, void*, const hw_model&, const hw_step&);
  void (*matmul)(hw::ThreadPool&, void*, const hw_matrix&, const float*, int, float*, size_t, const hw_model*, bool, bool);
  void (*finish_rows)(hw::ThreadPool&, const hw_model&, float*, int, size_t);
  void (*dequantize_rows)(hw::ThreadPool&, const hw_matrix&, const int32_t*, int, float*);
  void (*argmax_rows)(hw::ThreadPool&, const float*, int, int64_t, int64_t, int64_t*, uint8_t*);
  void (*sample)(hw::ThreadPool&, void*, hw_sampling*, int);
};
}  // namespace

namespace hw {
int repack(ThreadPool&, int, const uint8_t*, int, int, const int32_t*, uint8_t*, void*, uint16_t*);
}

HW_DECLARE(hw_plain)
#if defined(HW_X86) && HW_SETS & 2
HW_DECLARE(hw_avx2)
#endif
#if defined(HW_X86) && HW_SETS & 4
HW_DECLARE(hw_avx512)
#endif
#if defined(HW_X86) && HW_SETS & 8
HW_DECLARE(hw_vnni)
#endif
#if defined(HW_X86) && HW_SETS & 16
HW_DECLARE(hw_bf16)
#endif
#if defined(HW_ARM) && HW_SETS & 2
HW_DECLARE(hw_neon)
#endif
#if defined(HW_ARM) && HW_SETS & 4
HW_DECLARE(hw_i8mm)
#endif

namespace {

const Kernels* table(int level) {  // null for a set that was not compiled
  switch (level) {
    case 0: return &table_hw_plain;
#if defined(HW_X86) && HW_SETS & 2
    case 1: return &table_hw_avx2;
#endif
#if defined(HW_X86) && HW_SETS & 4
    case 2: return &table_hw_avx512;
#endif
#if defined(HW_X86) && HW_SETS & 8
    case 3: return &table_hw_vnni;
#endif
#if defined(HW_X86) && HW_SETS & 16
    case 4: return &table_hw_bf16;
#endif
#if defined(HW_ARM) && HW_SETS & 2
    case 1: return &table_hw_neon;
#endif
#if defined(HW_ARM) && HW_SETS & 4
    case 2: return &table_hw_i8mm;
#endif
    default: return nullptr;
  }
}

int best() {
  int level = hw::machine_isa();
  while (!table(level)) level--;
  return level;
}

std::atomic<int> selected{-1};

int isa() {
  int now = selected.load();
  if (now < 0) selected.store(now = best());
  return now;
}

struct Handle {
  explicit Handle(int count) : pool(count), kernels(*table(isa())), workspace(kernels.workspace_new()) {}
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
int32_t hw_has_isa(int32_t level) { return level >= 0 && level <= best() && table(level) != nullptr; }
int32_t hw_use_isa(int32_t requested) {
  if (!hw_has_isa(requested)) return 1;
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

int32_t hw_logits(void* handle, const hw_model* model, const float* x, int32_t rows, int32_t norm, int32_t finish, float* logits, int64_t stride) {
  Handle& h = *(Handle*)handle;
  return guarded([&] {
    h.kernels.matmul(h.pool, h.workspace, model->output, x, rows, logits, stride, model, norm, finish);
  });
}

int32_t hw_finish_logits(void* handle, const hw_model* model, float* logits, int32_t rows, int64_t stride) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.finish_rows(h.pool, *model, logits, rows, stride); });
}

int32_t hw_matmul(void* handle, const hw_matrix* w, const float* x, int32_t rows, float* y, int64_t stride) {
  Handle& h = *(Handle*)handle;
  return guarded([&] { h.kernels.matmul(h.pool, h.workspace, *w, x, rows, y, stride, nullptr, false, false); });
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

int64_t hw_strings_size(const uint8_t* data, int64_t size, int64_t count) { return hw::strings_size(data, size, count); }

void* hw_bpe_new(const uint8_t* tokens, int64_t count, const uint8_t* merges, int64_t merge_count, int64_t longest) {
  try {
    return hw::bpe_new(tokens, count, merges, merge_count, longest);
  } catch (...) {
    return nullptr;
  }
}
void hw_bpe_free(void* bpe) { hw::bpe_free((hw::Bpe*)bpe); }
const uint8_t* hw_bpe_token(const void* bpe, int64_t id, int64_t* size) { return hw::bpe_token(*(const hw::Bpe*)bpe, id, size); }
int64_t hw_bpe_find(const void* bpe, const uint8_t* token, int64_t size) { return hw::bpe_find(*(const hw::Bpe*)bpe, token, size); }

int64_t hw_bpe_encode(const void* bpe, const uint8_t* words, int64_t size, int32_t whole, int32_t* out) {
  int64_t count = -1;
  const int32_t failed = guarded([&] { count = hw::bpe_encode(*(const hw::Bpe*)bpe, words, size, whole != 0, out); });
  return failed ? -1 : count;
}

}  // extern "C"
