// Sixteen SIMD lanes on every machine: one set of names over AVX-512 (with or without VNNI), AVX2, NEON and plain C++.
//
// The file that includes this is compiled once for each instruction set; HW_ISA says which (4: AVX-512 BF16, 3: AVX-512 VNNI, 2: AVX-512,
// 1: AVX2 with FMA and F16C, 0: plain, or with HW_NEON 1: NEON with dotprod, 2: and with i8mm). All multiplications and sums are explicit, so that every kernel built on these
// rounds in the same places. `vf` is 16 floats, `vi` 16 int32, `vb` 64 bytes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if HW_ISA >= 1
#include <immintrin.h>
#elif defined(HW_NEON)
#include <arm_neon.h>
#endif

namespace HW_NS {

constexpr int LANES = 16;

// Twice the value of each float of 4 bits (E2M1), plus 12.
constexpr uint8_t FP4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// ---- single numbers ----------------------------------------------------------------------------------------------
inline float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
  else if (exponent) bits = sign | (exponent + 112) << 23 | mantissa << 13;
  else { float f = std::ldexp((float)mantissa, -24); std::memcpy(&bits, &f, 4); bits |= sign; }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline float bfloat_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t float_to_half(float f) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;   // NaN
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and more become infinity
  if (bits < 0x38800000) return sign | (uint16_t)std::nearbyint(std::ldexp(std::fabs(f), 24));
  return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
}
inline uint16_t float_to_bfloat(float f) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

constexpr float LEAST_NORMAL = 1.17549435e-38f;  // 2^-126

#if HW_ISA >= 2
// ---- AVX-512 -----------------------------------------------------------------------------------------------------
typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vb;

inline vf vf_zero() { return _mm512_setzero_ps(); }
inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
inline vf vf_load(const float* p) { return _mm512_loadu_ps(p); }
inline void vf_store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// For a pair with a NaN both return the second operand.
inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vf_abs(vf a) { return _mm512_abs_ps(a); }
inline vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vf_pow2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
inline vf vf_from(vi a) { return _mm512_cvtepi32_ps(a); }
inline vf vf_load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline vf vf_load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void vf_store_f16(uint16_t* p, vf x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
// Rounded to bfloat16; what is below the least normal number becomes 0.
#if HW_ISA >= 4
inline __m256i bf16s(vf x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline vf vf_bf16(vf x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16s(x)), 16)); }

// Lanes of two bfloat16s, of which the upper one counts first: sum + a.upper * b.upper + a.lower * b.lower, each product
// added with one rounding. Sums and factors below the least normal number count as 0.
inline vf vf_add_pairs(vf a, vf b, vf sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
inline vf vf_load_pairs(const uint16_t* upper, const uint16_t* lower) {
  const vi lanes = _mm512_set_epi16(15, 31, 14, 30, 13, 29, 12, 28, 11, 27, 10, 26, 9, 25, 8, 24, 7, 23, 6, 22, 5, 21, 4, 20, 3, 19, 2, 18, 1, 17, 0, 16);
  const vi both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)upper)), _mm256_loadu_si256((const __m256i*)lower), 1);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(lanes, both));
}
// Eight pairs of adjacent numbers.
inline void vf_store_pairs(float* p, vf x) { _mm256_storeu_si256((__m256i*)p, _mm256_ror_epi32(bf16s(x), 16)); }
// Eight pairs of every other number: of the first four numbers the even ones and the odd ones, then of the next four …
inline void vf_store_even_odd_pairs(float* p, vf x) {
  const __m256i lanes = _mm256_set_epi16(13, 15, 12, 14, 9, 11, 8, 10, 5, 7, 4, 6, 1, 3, 0, 2);
  _mm256_storeu_si256((__m256i*)p, _mm256_permutexvar_epi16(lanes, bf16s(x)));
}
inline vf vf_keep(vf a, uint32_t bits) { return _mm512_and_ps(a, _mm512_castsi512_ps(_mm512_set1_epi32((int)bits))); }
#else
inline vf vf_bf16(vf x) {
  const vi bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const vi near = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  const vi kept = _mm512_mask_or_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  const __mmask16 normal = _mm512_cmp_ps_mask(vf_abs(x), _mm512_set1_ps(LEAST_NORMAL), _CMP_NLT_UQ);
  return _mm512_castsi512_ps(_mm512_maskz_and_epi32(normal, kept, _mm512_set1_epi32((int)0xffff0000)));
}
#endif
inline vf vf_load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline vf vf_select(uint16_t bits, vf a, vf b) { return _mm512_mask_blend_ps(bits, b, a); }

inline vi vi_zero() { return _mm512_setzero_si512(); }
inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi vi_round(vf a) { return _mm512_cvtps_epi32(a); }
inline void vi_store_i8(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a)); }

inline vb vb_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline vb vb_low(vb a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline vb vb_high(vb a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
inline vb vb_fp4(vb a) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)FP4)), a); }

#if HW_ISA >= 3
inline vi vi_dot4(vi acc, vb weights, int32_t a) { return _mm512_dpbusd_epi32(acc, weights, _mm512_set1_epi32(a)); }
inline vi vi_dot8(vi acc, vb weights, int32_t a) { return _mm512_dpbusd_epi32(acc, weights, _mm512_set1_epi32(a)); }
#else
inline vi vi_dot4(vi acc, vb weights, int32_t a) {
  vi pairs = _mm512_maddubs_epi16(weights, _mm512_set1_epi32(a));  // 2 * 24 * 127 fits int16
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
inline vi vi_dot8(vi acc, vb weights, int32_t a) {
  // 2 * 255 * 127 does not fit int16: even and odd bytes are widened first.
  vi x = _mm512_set1_epi32(a);
  vi even = _mm512_madd_epi16(_mm512_and_si512(weights, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  vi odd = _mm512_madd_epi16(_mm512_srli_epi16(weights, 8), _mm512_srai_epi16(x, 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
}
#endif

#elif HW_ISA == 1
// ---- AVX2 --------------------------------------------------------------------------------------------------------
struct vf { __m256 a, b; };
struct vi { __m256i a, b; };
typedef vi vb;

inline vf vf_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline vf vf_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vf vf_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void vf_store(float* p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline vf vf_add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline vf vf_sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline vf vf_mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline vf vf_div(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline vf vf_fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline vf vf_max(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline vf vf_min(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline vf vf_abs(vf x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline vf vf_round(vf x) {
  constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
inline __m256 pow2_half(__m256 a, __m256 n) {
  // 2^n in two factors: n reaches -150, past what one exponent holds.
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
  __m256i bias = _mm256_set1_epi32(127);
  __m256 f = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  __m256 g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(a, f), g);
}
inline vf vf_pow2(vf x, vf n) { return {pow2_half(x.a, n.a), pow2_half(x.b, n.b)}; }
inline vf vf_from(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline vf vf_load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void vf_store_f16(uint16_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline __m256 bf16_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline vf vf_load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
inline vf vf_load_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
inline __m256 select_half(int bits, __m256 x, __m256 y) {
  __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i on = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lane), lane);
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(on));
}
inline vf vf_select(uint16_t bits, vf x, vf y) {
  return {select_half(bits & 255, x.a, y.a), select_half(bits >> 8, x.b, y.b)};
}

inline vi vi_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline vi vi_set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline vi vi_add(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline vi vi_round(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void vi_store_i8(int8_t* p, vi x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline vb vb_load(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline vb vb_low(vb x) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline vb vb_high(vb x) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
inline vb vb_fp4(vb x) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)FP4));
  return {_mm256_shuffle_epi8(table, x.a), _mm256_shuffle_epi8(table, x.b)};
}
inline vi vi_dot4(vi acc, vb weights, int32_t a) {
  __m256i x = _mm256_set1_epi32(a), one = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(weights.a, x), one)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(weights.b, x), one))};
}
inline vi vi_dot8(vi acc, vb weights, int32_t a) {
  __m256i x = _mm256_set1_epi32(a), low = _mm256_set1_epi16(255);
  __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
  __m256i p = _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(weights.a, low), even),
                               _mm256_madd_epi16(_mm256_srli_epi16(weights.a, 8), odd));
  __m256i q = _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(weights.b, low), even),
                               _mm256_madd_epi16(_mm256_srli_epi16(weights.b, 8), odd));
  return {_mm256_add_epi32(acc.a, p), _mm256_add_epi32(acc.b, q)};
}

#elif defined(HW_NEON)
// ---- NEON --------------------------------------------------------------------------------------------------------
struct vf { float32x4_t v[4]; };
struct vi { int32x4_t v[4]; };
struct vb { uint8x16_t v[4]; };

#define HW_EACH(expression) \
  do { _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) { expression; } } while (0)

inline vf vf_set1(float x) { vf r; HW_EACH(r.v[i] = vdupq_n_f32(x)); return r; }
inline vf vf_zero() { return vf_set1(0); }
inline vf vf_load(const float* p) { vf r; HW_EACH(r.v[i] = vld1q_f32(p + 4 * i)); return r; }
inline void vf_store(float* p, vf x) { HW_EACH(vst1q_f32(p + 4 * i, x.v[i])); }
inline vf vf_add(vf a, vf b) { HW_EACH(a.v[i] = vaddq_f32(a.v[i], b.v[i])); return a; }
inline vf vf_sub(vf a, vf b) { HW_EACH(a.v[i] = vsubq_f32(a.v[i], b.v[i])); return a; }
inline vf vf_mul(vf a, vf b) { HW_EACH(a.v[i] = vmulq_f32(a.v[i], b.v[i])); return a; }
inline vf vf_div(vf a, vf b) { HW_EACH(a.v[i] = vdivq_f32(a.v[i], b.v[i])); return a; }
inline vf vf_fma(vf a, vf b, vf c) { HW_EACH(c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i])); return c; }
inline vf vf_max(vf a, vf b) { HW_EACH(a.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); return a; }
inline vf vf_min(vf a, vf b) { HW_EACH(a.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); return a; }
inline vf vf_abs(vf a) { HW_EACH(a.v[i] = vabsq_f32(a.v[i])); return a; }
inline vf vf_round(vf a) { HW_EACH(a.v[i] = vrndnq_f32(a.v[i])); return a; }
inline float32x4_t pow2_quarter(float32x4_t a, float32x4_t n) {
  // 2^n in two factors: n reaches -150, past what one exponent holds.
  const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1), bias = vdupq_n_s32(127);
  const float32x4_t f = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
  const float32x4_t g = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23));
  return vmulq_f32(vmulq_f32(a, f), g);
}
inline vf vf_pow2(vf a, vf n) { HW_EACH(a.v[i] = pow2_quarter(a.v[i], n.v[i])); return a; }
inline vf vf_from(vi a) { vf r; HW_EACH(r.v[i] = vcvtq_f32_s32(a.v[i])); return r; }
inline vf vf_load_f16(const uint16_t* p) { vf r; HW_EACH(r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); return r; }
inline void vf_store_f16(uint16_t* p, vf x) { HW_EACH(vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])))); }
inline vf vf_load_bf16(const uint16_t* p) { vf r; HW_EACH(r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); return r; }
inline vf vf_load_u8(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline vf vf_select(uint16_t bits, vf a, vf b) {
  const uint32x4_t lanes = {1, 2, 4, 8};
  HW_EACH(a.v[i] = vbslq_f32(vtstq_u32(vdupq_n_u32(bits >> 4 * i), lanes), a.v[i], b.v[i]));
  return a;
}

inline vi vi_set1(int32_t x) { vi r; HW_EACH(r.v[i] = vdupq_n_s32(x)); return r; }
inline vi vi_zero() { return vi_set1(0); }
inline vi vi_add(vi a, vi b) { HW_EACH(a.v[i] = vaddq_s32(a.v[i], b.v[i])); return a; }
inline vi vi_round(vf a) { vi r; HW_EACH(r.v[i] = vcvtnq_s32_f32(a.v[i])); return r; }
inline void vi_store_i8(int8_t* p, vi a) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1])), high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}

inline vb vb_load(const uint8_t* p) { vb r; HW_EACH(r.v[i] = vld1q_u8(p + 16 * i)); return r; }
inline vb vb_low(vb a) { HW_EACH(a.v[i] = vandq_u8(a.v[i], vdupq_n_u8(15))); return a; }
inline vb vb_high(vb a) { HW_EACH(a.v[i] = vshrq_n_u8(a.v[i], 4)); return a; }
inline vb vb_fp4(vb a) { HW_EACH(a.v[i] = vqtbl1q_u8(vld1q_u8(FP4), a.v[i])); return a; }
inline vi vi_dot4(vi acc, vb weights, int32_t a) {
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(a));
  HW_EACH(acc.v[i] = vdotq_s32(acc.v[i], vreinterpretq_s8_u8(weights.v[i]), x));
  return acc;
}
#if HW_NEON == 2
inline vi vi_dot8(vi acc, vb weights, int32_t a) {
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(a));
  HW_EACH(acc.v[i] = vusdotq_s32(acc.v[i], weights.v[i], x));
  return acc;
}
#else
inline vi vi_dot8(vi acc, vb weights, int32_t a) {
  // Only signed products: 128 is taken from each quant, and 128 times the inputs is added again.
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(a)), half = vdupq_n_s8(64);
  const int32x4_t again = vdotq_s32(vdotq_s32(vdupq_n_s32(0), half, x), half, x);
  HW_EACH(acc.v[i] = vaddq_s32(vdotq_s32(acc.v[i], vreinterpretq_s8_u8(veorq_u8(weights.v[i], vdupq_n_u8(128))), x), again));
  return acc;
}
#endif
#undef HW_EACH

#else
// ---- plain C++ ---------------------------------------------------------------------------------------------------
struct vf { float v[16]; };
struct vi { int32_t v[16]; };
struct vb { uint8_t v[64]; };

#define HW_EACH(expression) \
  do { for (int i = 0; i < 16; i++) { expression; } } while (0)

inline vf vf_set1(float x) { vf r; HW_EACH(r.v[i] = x); return r; }
inline vf vf_zero() { return vf_set1(0); }
inline vf vf_load(const float* p) { vf r; std::memcpy(r.v, p, 64); return r; }
inline void vf_store(float* p, vf x) { std::memcpy(p, x.v, 64); }
inline vf vf_add(vf a, vf b) { HW_EACH(a.v[i] += b.v[i]); return a; }
inline vf vf_sub(vf a, vf b) { HW_EACH(a.v[i] -= b.v[i]); return a; }
inline vf vf_mul(vf a, vf b) { HW_EACH(a.v[i] *= b.v[i]); return a; }
inline vf vf_div(vf a, vf b) { HW_EACH(a.v[i] /= b.v[i]); return a; }
#ifdef FP_FAST_FMAF
inline vf vf_fma(vf a, vf b, vf c) { HW_EACH(c.v[i] = std::fma(a.v[i], b.v[i], c.v[i])); return c; }
#else
// In double, where the product is exact: a true fused multiply-add would be a slow library call here.
inline vf vf_fma(vf a, vf b, vf c) { HW_EACH(c.v[i] = (float)((double)a.v[i] * b.v[i] + c.v[i])); return c; }
#endif
inline vf vf_max(vf a, vf b) { HW_EACH(a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]); return a; }
inline vf vf_min(vf a, vf b) { HW_EACH(a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]); return a; }
inline vf vf_abs(vf a) { HW_EACH(a.v[i] = std::fabs(a.v[i])); return a; }
inline vf vf_round(vf a) { HW_EACH(a.v[i] = std::nearbyint(a.v[i])); return a; }
inline vf vf_pow2(vf a, vf n) {
  HW_EACH(a.v[i] = std::isnan(n.v[i]) ? n.v[i] : std::ldexp(a.v[i], (int)n.v[i]));
  return a;
}
inline vf vf_from(vi a) { vf r; HW_EACH(r.v[i] = (float)a.v[i]); return r; }
inline vf vf_load_f16(const uint16_t* p) { vf r; HW_EACH(r.v[i] = half_to_float(p[i])); return r; }
inline void vf_store_f16(uint16_t* p, vf x) { HW_EACH(p[i] = float_to_half(x.v[i])); }
inline vf vf_load_bf16(const uint16_t* p) { vf r; HW_EACH(r.v[i] = bfloat_to_float(p[i])); return r; }
inline vf vf_load_u8(const uint8_t* p) { vf r; HW_EACH(r.v[i] = p[i]); return r; }
inline vf vf_select(uint16_t bits, vf a, vf b) { HW_EACH(if (!(bits >> i & 1)) a.v[i] = b.v[i]); return a; }

inline vi vi_set1(int32_t x) { vi r; HW_EACH(r.v[i] = x); return r; }
inline vi vi_zero() { return vi_set1(0); }
inline vi vi_add(vi a, vi b) { HW_EACH(a.v[i] += b.v[i]); return a; }
inline vi vi_round(vf a) { vi r; HW_EACH(r.v[i] = (int32_t)std::nearbyint(a.v[i])); return r; }
inline void vi_store_i8(int8_t* p, vi a) { HW_EACH(p[i] = (int8_t)(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i])); }

inline vb vb_load(const uint8_t* p) { vb r; std::memcpy(r.v, p, 64); return r; }
inline vb vb_low(vb a) { for (auto& x : a.v) x &= 15; return a; }
inline vb vb_high(vb a) { for (auto& x : a.v) x >>= 4; return a; }
inline vb vb_fp4(vb a) { for (auto& x : a.v) x = FP4[x]; return a; }
inline vi vi_dot8(vi acc, vb weights, int32_t a) {
  int8_t x[4];
  std::memcpy(x, &a, 4);
  HW_EACH(acc.v[i] += weights.v[4 * i] * x[0] + weights.v[4 * i + 1] * x[1] + weights.v[4 * i + 2] * x[2] + weights.v[4 * i + 3] * x[3]);
  return acc;
}
inline vi vi_dot4(vi acc, vb weights, int32_t a) { return vi_dot8(acc, weights, a); }
#undef HW_EACH
#endif

// ---- shared -----------------------------------------------------------------------------------------------------
// Halves onto halves: 8 lanes, 4, 2, 1. The order is the same on every machine.
#if HW_ISA >= 2
inline float vf_sum(vf x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float vf_most(vf x) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float vf_sum(vf x) {
  float t[16];
  vf_store(t, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) t[i] += t[i + n];
  return t[0];
}
inline float vf_most(vf x) {
  float t[16];
  vf_store(t, x);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
}
#endif

inline void vf_store_bf16(uint16_t* p, vf x) {
  float t[16];
  vf_store(t, x);
  for (int i = 0; i < 16; i++) p[i] = float_to_bfloat(t[i]);
}

#if HW_ISA < 2
// Rounded to bfloat16; what is below the least normal number becomes 0.
inline vf vf_bf16(vf x) {
  float t[16];
  vf_store(t, x);
  for (int i = 0; i < 16; i++) t[i] = std::fabs(t[i]) < LEAST_NORMAL ? 0.0f : bfloat_to_float(float_to_bfloat(t[i]));
  return vf_load(t);
}
#endif

// e^x to about one unit in the last place; 0 for very small x, infinity for very large, NaN for NaN.
inline vf vf_exp(vf x) {
  x = vf_max(vf_set1(-104.0f), vf_min(vf_set1(89.0f), x));
  vf n = vf_round(vf_mul(x, vf_set1(1.44269504088896341f)));
  vf r = vf_fma(n, vf_set1(-0.693359375f), x);
  r = vf_fma(n, vf_set1(2.12194440e-4f), r);
  vf p = vf_set1(1.9875691500e-4f);
  p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
  p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
  p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
  p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
  p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
  p = vf_fma(p, vf_mul(r, r), vf_add(r, vf_set1(1.0f)));
  return vf_pow2(p, n);
}

// The sum of 16 small integers.
inline int32_t sum_i8(const int8_t* p) {
#if HW_ISA >= 1
  const __m128i shifted = _mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8((char)128));
  const __m128i sums = _mm_sad_epu8(shifted, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
#elif defined(HW_NEON)
  return vaddlvq_s8(vld1q_s8(p));
#else
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += p[i];
  return sum;
#endif
}

inline int32_t load_i32(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

}  // namespace HW_NS
