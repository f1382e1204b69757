// The interface to Python: plain structs, pointers and sizes. library.py mirrors it field by field; HW_VERSION guards the pair.
//
// Quantized weights are interleaved: output rows in blocks of 16 (the last padded with zeros), inputs in groups of 32
// (padded with zeros), so that one vector holds 4 inputs of each of 16 rows. A "quant" is the stored integer; the weight
// is scale * (quant - zero), or scale * quant + min.
//   4 bits: for each block and group 4 x 64 bytes; byte 4r + i of the j-th has row r's quant of input 8j + i in its low
//           half and of input 8j + 4 + i in its high half
//   8 bits: for each block and group 8 x 64 bytes; byte 4r + i of the j-th is row r's quant of input 4j + i
//   floats: for each block and input 16 numbers (inputs are not padded)
// Scales are stored by block and scale group, 16 together, followed by 16 minimums where the format has them.
#pragma once
#include <stdint.h>

#define HW_VERSION 9

enum { HW_F32 = 0, HW_F16 = 1, HW_BF16 = 2, HW_INT8 = 3, HW_GROUPS = 4 };
enum { HW_SCALE_F16 = 0, HW_SCALE_F32 = 1, HW_SCALE_K = 2 };

typedef struct {
  int32_t kind;       // HW_F32 ... HW_GROUPS; HW_INT8 has one float scale per row
  int32_t n, k;       // outputs and inputs, as the model has them
  int32_t bits;       // of HW_GROUPS: 4 or 8
  int32_t group;      // of HW_GROUPS: 16, or 32 times a power of two
  int32_t zero;       // subtracted from each quant when there is no min
  int32_t has_min;  // of HW_GROUPS
  int32_t scale_kind; // of HW_GROUPS
  const void* quants;
  const void* scales; // HW_SCALE_K: bytes, 16 scale factors and 16 min factors for each group of 32
  const void* super;  // HW_SCALE_K: float16, 16 d and 16 dmin for each 256 inputs; scale = d * factor, min = -dmin * factor
  const float* bias;  // [n] or null
} hw_matrix;

typedef struct {
  hw_matrix q, k, v, o, gate, up, down;
  const float* norm_in;
  const float* norm_mlp;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  int32_t mask_set;     // index of the layer's mask set in hw_step
} hw_layer;

typedef struct {
  int32_t layers, hidden, inner, heads, kv_heads, head_dim, vocab, rope_half, page_size;
  float eps, scale, rope_scale;
  const float* inv_freq;    // [rope_half]
  const float* final_norm;  // [hidden]
  const hw_layer* layer;
  hw_matrix embedding, output;
  void* kv;                 // KV cache [layers, 2, pages, …]: keys [kv_heads, head_dim, page_size], values [kv_heads, page_size, head_dim]
  int64_t kv_pages;
  int32_t kv_kind;          // HW_F32, HW_F16 or HW_BF16
} hw_model;

// What an adapter adds to a matrix's outputs: factor * B (A x). Both are interleaved as float matrices are, in blocks of 16
// rows, the last padded with zeros.
typedef struct {
  int32_t rank;   // 0 if the adapter has nothing for this matrix
  int32_t kind;   // HW_F32 or HW_F16
  float factor;
  const void* a;  // [rank, k]
  const void* b;  // [n, rank]
} hw_low_rank;

typedef struct {
  hw_low_rank q, k, v, o, gate, up, down;
} hw_adapter_layer;

// An adapter of a step, and its rows in adapter_rows.
typedef struct {
  const hw_adapter_layer* layers;
  int32_t first, count;
} hw_adapter;

typedef struct {
  int32_t rows, segments, mask_sets, hidden_count, query_count, reads;
  const int32_t* tokens;         // [rows]
  const int32_t* positions;      // [rows]
  const int32_t* write_slots;    // [rows], physical; -1 for a row whose keys and values are not kept
  const int32_t* segment_rows;   // [segments + 1] first row of each segment
  const int32_t* segment_pages;  // [segments + 1] first entry of each segment in the two lists below
  const int32_t* pages;          // physical
  const int32_t* numbers;        // the page's index in its sequence, ascending within a segment
  const int32_t* const* runs_at; // for each mask set [rows + 1]: first run of each row
  const int32_t* const* runs;    // for each mask set: half-open slot ranges [first, end) that a row attends to
  const int32_t* hidden_layers;     // [hidden_count] copies row hidden_rows[i] of the residual before this layer to hidden_out[i]
  const int32_t* hidden_rows;
  float* hidden_out;             // [hidden_count, hidden]
  const int32_t* query_layers;   // [query_count] copies the rotated query of this layer and row, times scale
  const int32_t* query_rows;
  float* query_out;              // [query_count, heads * head_dim]
  float* out;                    // [rows, hidden] the residual after the last layer
  double* phases;                // [HW_PHASES] elapsed seconds are added here, or null
  const int32_t* read_rows;      // [reads] rows to compute logits and the argmax token for
  float* logits;                 // [reads, logits_stride] their logits
  int64_t logits_stride;
  int64_t* best;                 // [reads]
  uint8_t* bad;                  // [reads] whether a logit is NaN
  int32_t adapter_count, adapter_uses;
  const hw_adapter* adapters;    // [adapter_count], in the order in which a row's adapters add up
  const int32_t* adapter_rows;   // [adapter_uses] the rows of each adapter, one after the other
  const float* adapter_scales;   // [adapter_uses]
} hw_step;

// One token to sample from a row of logits.
typedef struct {
  const float* logits;      // [vocab]
  const uint8_t* allowed;   // [vocab] 0 for a masked token, or null
  const int32_t* changed;   // [changes] ids whose score bias or penalties replace
  const double* scores;     // [changes]
  double temperature, top_p, min_p, uniform;
  int64_t vocab, top_k, changes;
  int64_t token;            // the result; -1 where a logit is NaN, -2 where nothing is allowed
} hw_sampling;

enum { HW_EMBED, HW_NORM, HW_QKV, HW_ROPE, HW_KV_WRITE, HW_ATTENTION, HW_OUT, HW_MLP, HW_HEAD, HW_SAMPLE, HW_PHASES };

#ifdef __cplusplus
extern "C" {
#endif
int32_t hw_version(void);
int32_t hw_isa(void);                       // in use: 0 plain; 1 AVX2, 2 AVX-512, 3 AVX-512 VNNI; on ARM 1 NEON with dotprod, 2 and i8mm
int32_t hw_best_isa(void);                  // the best on this machine
int32_t hw_use_isa(int32_t isa);            // 0 if the machine has it
void* hw_pool_new(int32_t count);        // a thread pool with its workspace; null if threads cannot be started
void hw_pool_free(void* pool);
// These return 0, 1 when out of memory, 2 for any other failure.
int32_t hw_forward(void* pool, const hw_model* model, const hw_step* step);
int32_t hw_logits(void* pool, const hw_model* model, const float* x, int32_t rows, int32_t norm, float* logits, int64_t stride);
int32_t hw_matmul(void* pool, const hw_matrix* w, const float* x, int32_t rows, float* y, int64_t stride);   // y [rows, stride], stride >= n
int32_t hw_dequantize_rows(void* pool, const hw_matrix* w, const int32_t* rows, int32_t count, float* out);           // float rows [count, k]
int32_t hw_argmax(void* pool, const float* logits, int32_t rows, int64_t vocab, int64_t stride, int64_t* best, uint8_t* bad);
int32_t hw_sample(void* pool, hw_sampling* samplings, int32_t count);
// GGUF blocks (0 Q4_0, 1 Q4_1, 2 Q8_0, 3 Q4_K) to the interleaved layout; rows maps outputs to the file's rows, or is
// null. Returns 3 for any other kind.
int32_t hw_repack(void* pool, int32_t kind, const uint8_t* raw, int32_t n, int32_t k, const int32_t* rows, uint8_t* quants, void* scales, uint16_t* super);
#ifdef __cplusplus
}
#endif
