// The slots that rows attend to: a segment's pages in units of 16 slots, which of them each row's mask leaves, and where
// their keys and values are in the KV cache. Computes nothing; attention.h does.
#pragma once
#include <vector>

#include "matmul.h"

namespace HW_NS {

constexpr int CHUNK = 128;  // slots whose scores are held at a time

struct Unit {
  int32_t slot;         // first slot in the sequence, a multiple of 16
  uint16_t present;     // bit i: slot i is in a page of the segment
  int32_t page[LANES];  // of each slot: its physical page
  int32_t at[LANES];    // and its place there
};

// One segment's slots in units, and which of them each row attends to.
struct Layout {
  int row, rows;                // in the batch
  std::vector<Unit> units;
  std::vector<int> chunks;      // first unit of each chunk, and the end
  std::vector<uint16_t> bits;   // [mask sets, rows, units]
  int prefix, prefix_row;            // the shared prefix its row belongs to (-1 for none), and its index there
  const uint16_t* mask_bits(int set, int row) const { return bits.data() + ((size_t)set * rows + row) * units.size(); }
};

// Segments of one row each that begin with the same pages, as forks do: their common chunks are computed together, so
// that keys and values are loaded once.
struct SharedPrefix {
  std::vector<int> segments;
  int chunks;
  size_t task;  // index of its first partial result, ordered by kv head, then chunk
};

// The keys and values of a layer, as floats or in half precision (kind), and what its softmax has besides; pointers to
// numbers are void pointers.
struct KvCache {
  const char* keys;    // [pages, kv_heads, head_dim, page]: a unit's slots are adjacent, as scoring reads them
  const char* values;  // [pages, kv_heads, page, head_dim]
  int kind, heads, kv_heads, dim, page;
  float cap;           // scores are bounded softly; 0: they are not
  const float* sinks;  // [heads], or null
  bool by_slot;        // keys lie as values do and are the values: [pages, page, head_dim], of one key head
  int width() const { return kind == HW_F32 ? 4 : 2; }  // bytes of a number
  // Where a page has a head's slots.
  int64_t first(const Unit& unit, int lane, int head) const { return ((int64_t)unit.page[lane] * kv_heads + head) * page; }
  const void* value(const Unit& unit, int lane, int head) const { return values + (first(unit, lane, head) + unit.at[lane]) * dim * width(); }
  // The first number of a slot's key; the others follow with a stride of `page`.
  const void* key(const Unit& unit, int lane, int head) const { return keys + (first(unit, lane, head) * dim + unit.at[lane]) * width(); }
};

inline float read_number(int kind, const void* p, size_t at) {
  if (kind == HW_F32) return ((const float*)p)[at];
  const uint16_t half = ((const uint16_t*)p)[at];
  return kind == HW_F16 ? half_to_float(half) : bfloat_to_float(half);
}

// `count` rows of 16 numbers of the cache, `apart` numbers from each other, as floats.
inline void widen(int kind, const void* from, size_t apart, int count, float* to) {
  if (kind == HW_F16)
    for (int n = 0; n < count; n++) vf_store(to + n * LANES, load_float<HW_F16>(from, n * apart));
  else
    for (int n = 0; n < count; n++) vf_store(to + n * LANES, load_float<HW_BF16>(from, n * apart));
}

inline void make_layout(const hw_step& step, int segment, int page_size, Layout& out) {
  out.row = step.segment_rows[segment];
  out.rows = step.segment_rows[segment + 1] - out.row;
  out.units.clear();
  out.chunks.clear();
  for (int p = step.segment_pages[segment]; p < step.segment_pages[segment + 1]; p++)
    for (int at = 0; at < page_size;) {
      const int32_t slot = step.numbers[p] * page_size + at, first = slot / LANES * LANES;
      if (out.units.empty() || out.units.back().slot != first) {
        if (out.units.empty() || first / CHUNK != out.units.back().slot / CHUNK) out.chunks.push_back((int)out.units.size());
        out.units.emplace_back();
        out.units.back().slot = first;
        out.units.back().present = 0;
      }
      Unit& unit = out.units.back();
      for (int lane = slot - first; lane < LANES && at < page_size; lane++, at++) {
        unit.page[lane] = step.pages[p], unit.at[lane] = at;
        unit.present |= (uint16_t)(1u << lane);
      }
    }
  out.chunks.push_back((int)out.units.size());
}

// Mask bits of one row: bit i of unit u is set if the row attends to the unit's i-th slot.
inline void row_bits(const hw_step& step, int set, const Layout& lay, int row, uint16_t* bits) {
  const int32_t* at = step.runs_at[set];
  const int32_t* run = step.runs[set] + 2 * (size_t)at[lay.row + row];
  const int32_t* end = step.runs[set] + 2 * (size_t)at[lay.row + row + 1];
  for (size_t u = 0; u < lay.units.size(); u++) {
    const Unit& unit = lay.units[u];
    while (run < end && run[1] <= unit.slot) run += 2;
    uint32_t seen = 0;
    for (const int32_t* r = run; r < end && r[0] < unit.slot + LANES; r += 2) {
      int from = std::max(r[0] - unit.slot, 0), to = std::min(r[1] - unit.slot, LANES);
      seen |= ((1u << to) - 1) & ~((1u << from) - 1);
    }
    bits[u] = (uint16_t)(seen & unit.present);
  }
}

}  // namespace HW_NS
