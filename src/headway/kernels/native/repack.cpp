// Repacks GGUF blocks into the interleaved layout of api.h: the same quantized weights and scales in another order.
#include <cstdint>
#include <cstring>

#include "api.h"
#include "threads.h"

namespace hw {
namespace {

constexpr int LANES = 16;

// The layout of one group of 32 inputs of one row.
struct Q4_0 { static constexpr int bytes = 18, bits = 4, halves = 1; };
struct Q4_1 { static constexpr int bytes = 20, bits = 4, halves = 2; };
struct Q8_0 { static constexpr int bytes = 34, bits = 8, halves = 1; };

// One block of 16 rows. `rows` maps an output to its row in the file; null means the same order.
template <class F>
void repack_block(const uint8_t* raw, int n, int k, const int32_t* rows, int block, uint8_t* quants, uint16_t* scales) {
  const int groups = k / 32;
  const size_t row_bytes = (size_t)groups * F::bytes;
  uint8_t* c = quants + (size_t)block * groups * (F::bits * 64);
  uint16_t* s = scales + (size_t)block * groups * LANES * F::halves;
  std::memset(c, F::bits == 8 ? 128 : 0, (size_t)groups * (F::bits * 64));
  std::memset(s, 0, (size_t)groups * LANES * F::halves * 2);
  for (int r = 0; r < LANES && block * LANES + r < n; r++) {
    const int row = rows ? rows[block * LANES + r] : block * LANES + r;
    const uint8_t* from = raw + row * row_bytes;
    for (int g = 0; g < groups; g++, from += F::bytes) {
      for (int h = 0; h < F::halves; h++) std::memcpy(s + (size_t)g * LANES * F::halves + h * LANES + r, from + 2 * h, 2);
      const uint8_t* q = from + 2 * F::halves;
      uint8_t* to = c + (size_t)g * F::bits * 64 + r * 4;
      if (F::bits == 8) {
        for (int j = 0; j < 8; j++)
          for (int i = 0; i < 4; i++) to[j * 64 + i] = q[4 * j + i] ^ 128;
      } else {
        // The file has inputs 0 to 15 in the low nibbles of its 16 bytes and 16 to 31 in the high ones.
        uint8_t one[32];
        for (int i = 0; i < 16; i++) one[i] = q[i] & 15, one[16 + i] = q[i] >> 4;
        for (int j = 0; j < 4; j++)
          for (int i = 0; i < 4; i++) to[j * 64 + i] = (uint8_t)(one[8 * j + i] | one[8 * j + 4 + i] << 4);
      }
    }
  }
}

// Q4_K: 256 inputs with d, dmin, 8 scales and 8 minimums of 6 bits in 12 bytes, then 128 bytes of quants.
void repack_q4_k(const uint8_t* raw, int n, int k, const int32_t* rows, int block, uint8_t* quants, uint8_t* factors, uint16_t* super) {
  const int spans = k / 256;
  uint8_t* c = quants + (size_t)block * spans * 8 * 256;
  uint8_t* f = factors + (size_t)block * spans * 8 * 32;
  uint16_t* d = super + (size_t)block * spans * 32;
  std::memset(c, 0, (size_t)spans * 8 * 256);
  std::memset(f, 0, (size_t)spans * 8 * 32);
  std::memset(d, 0, (size_t)spans * 32 * 2);
  for (int r = 0; r < LANES && block * LANES + r < n; r++) {
    const int row = rows ? rows[block * LANES + r] : block * LANES + r;
    const uint8_t* from = raw + (size_t)row * spans * 144;
    for (int sp = 0; sp < spans; sp++, from += 144) {
      std::memcpy(d + sp * 32 + r, from, 2);
      std::memcpy(d + sp * 32 + 16 + r, from + 2, 2);
      const uint8_t *p = from + 4, *q = from + 16;
      for (int g = 0; g < 8; g++) {
        uint8_t scale = g < 4 ? p[g] & 63 : (p[g + 4] & 15) | (p[g - 4] >> 6) << 4;
        uint8_t min = g < 4 ? p[g + 4] & 63 : p[g + 4] >> 4 | (p[g] >> 6) << 4;
        f[(sp * 8 + g) * 32 + r] = scale;
        f[(sp * 8 + g) * 32 + 16 + r] = min;
        // Two groups share 32 bytes: the even one in the low nibbles, the odd one in the high.
        uint8_t one[32];
        for (int i = 0; i < 32; i++) one[i] = g % 2 ? q[g / 2 * 32 + i] >> 4 : q[g / 2 * 32 + i] & 15;
        uint8_t* to = c + (size_t)(sp * 8 + g) * 256 + r * 4;
        for (int j = 0; j < 4; j++)
          for (int i = 0; i < 4; i++) to[j * 64 + i] = (uint8_t)(one[8 * j + i] | one[8 * j + 4 + i] << 4);
      }
    }
  }
}

}  // namespace

int repack(ThreadPool& pool, int kind, const uint8_t* raw, int n, int k, const int32_t* rows, uint8_t* quants, void* scales, uint16_t* super) {
  if (kind < 0 || kind > 3) return 3;
  const int blocks = (n + LANES - 1) / LANES, threads = pool.count();
  pool.run([&](int i) {
    for (int b = (int)((int64_t)blocks * i / threads); b < (int64_t)blocks * (i + 1) / threads; b++) {
      if (kind == 0) repack_block<Q4_0>(raw, n, k, rows, b, quants, (uint16_t*)scales);
      else if (kind == 1) repack_block<Q4_1>(raw, n, k, rows, b, quants, (uint16_t*)scales);
      else if (kind == 2) repack_block<Q8_0>(raw, n, k, rows, b, quants, (uint16_t*)scales);
      else repack_q4_k(raw, n, k, rows, b, quants, (uint8_t*)scales, super);
    }
  });
  return 0;
}

}  // namespace hw
