// The best instruction set of this machine, as a level of simd.h: 0 plain; 1 AVX2, 2 AVX-512, 3 AVX-512 VNNI, 4 and BF16; on
// ARM 1 NEON with dotprod, 2 and i8mm. The build asks too, to compile what this machine runs.
#pragma once
#ifdef HW_X86
#include <cpuid.h>
#elif defined(HW_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(HW_ARM) && defined(__APPLE__)
#include <stdint.h>
#include <sys/sysctl.h>
#endif

namespace hw {

#ifdef HW_X86
inline bool has_f16c() {  // clang's __builtin_cpu_supports does not know it
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
inline bool has_bf16() {  // nor this, some of them
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
}
#endif

#ifdef HW_ARM
#if defined(__linux__)
inline bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }  // HWCAP_ASIMDDP
inline bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }    // HWCAP2_I8MM
#elif defined(__APPLE__)
inline bool feature(const char* name) {
  int64_t value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
inline bool has_dotprod() { return feature("hw.optional.arm.FEAT_DotProd"); }
inline bool has_i8mm() { return feature("hw.optional.arm.FEAT_I8MM"); }
#else
inline bool has_dotprod() { return false; }
inline bool has_i8mm() { return false; }
#endif
#endif

inline int machine_isa() {
#ifdef HW_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return !__builtin_cpu_supports("avx512vnni") ? 2 : has_bf16() ? 4 : 3;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) return 1;
#elif defined(HW_ARM)
  if (has_dotprod()) return has_i8mm() ? 2 : 1;
#endif
  return 0;
}

}  // namespace hw
