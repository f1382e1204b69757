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

#define HW_VERSION 18

enum { HW_F32 = 0, HW_F16 = 1, HW_BF16 = 2, HW_INT8 = 3, HW_GROUPS = 4 };
enum { HW_SCALE_F16 = 0, HW_SCALE_F32 = 1, HW_SCALE_K = 2, HW_SCALE_E8 = 3 };
enum { HW_NORM_RMS = 0, HW_NORM_LAYER = 1 };  // root mean square; mean and variance
enum { HW_SILU = 0, HW_GELU = 1, HW_GELU_TANH = 2 };
enum { HW_QK_HEAD = 0, HW_QK_EACH = 1, HW_QK_ROW = 2 };  // one weight for all heads, weights of each head's own, over all heads
enum { HW_NO_RECURRENCE = 0, HW_SHORT_CONV = 1, HW_GATED_DELTA = 2, HW_MAMBA2 = 3 };

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
                      // HW_SCALE_E8: bytes e, scale = 2^(e - 128); quants of 4 bits are floats (E2M1, twice their value)
  const void* super;  // HW_SCALE_K: float16, 16 d and 16 dmin for each 256 inputs; scale = d * factor, min = -dmin * factor
  const float* bias;  // [n] or null
} hw_matrix;

typedef struct {
  const float* weight;  // null: no norm
  const float* bias;    // or null
} hw_norm;

// A layer: what it has not is null, or a matrix with n = 0. With a router its feed-forward is experts, whose matrices have
// the rows of one expert after the other, each padded to whole blocks of 16; `gate`, `up` and `down` are then not there,
// or there are both. Without `k` it has no keys and values of its own; without `v` alone values are keys before their norm.
// The matrices of heads, `key_up` and `value_up`, lie the same way. A recurrent layer has `mix_…` in place of attention.
typedef struct {
  hw_matrix q, k, v, o, gate, up, down;
  hw_matrix router, expert_gate, expert_up, expert_down, shared_gate, shared_up, shared_down, shared_router;
  hw_matrix q_down, q_up, kv_down, key_up, value_up;  // of latent attention: key_up [heads, latent, key_dim], value_up [heads, value_dim, latent]
  hw_matrix attention_gate;                           // [heads * head_dim, hidden]
  hw_matrix mix_in, mix_qkv, mix_beta, mix_step, mix_gate, mix_out;
  hw_matrix input_gate, input_out;                                               // [token_size, hidden], [hidden, token_size]
  hw_matrix laurel_down, laurel_up, altup_router, altup_predict, altup_correct;  // of a layer of `streams` residuals side by side
  hw_norm norm_in, norm_mlp;             // before attention and feed-forward
  hw_norm post_attention, post_mlp;      // of what they add to the residual
  const float* q_norm;  // as qk_norm says, or null
  const float* k_norm;
  const float* sinks;   // [heads] scores of a slot of zeros that every row attends to, or null
  const float* q_down_norm;        // [query_latent]
  const float* kv_down_norm;       // [latent]
  const float* router_correction;  // [experts] added to scores where experts are chosen, or null
  const float* conv;               // [channels, taps]
  const float* conv_bias;          // [channels], or null
  const float* step_bias;          // [mix_heads]
  const float* rate;               // [mix_heads], negative
  const float* skip;               // [mix_heads]
  const float* mix_norm;           // [mix_value_dim], or of HW_MAMBA2 [mix_heads * mix_value_dim] or null
  const float* post_input_norm;    // [hidden] of what the layer takes of the token
  const float* layer_scale;        // [1] of its whole output, or null
  const float* laurel_norm;        // [hidden]
  const float* altup_norm;         // [hidden]
  const float* altup_scale;        // [hidden] of the active stream where the layer takes something of the token, or null
  const float* dense_norm;         // [hidden] of a feed-forward that has experts beside it; these three too:
  const float* expert_in_norm;
  const float* expert_out_norm;
  const float* router_scale;
  const float* expert_scale;       // [experts]
  int32_t mask_set;     // index of the layer's mask set in hw_step
  int32_t rope_set;     // index of its rotation, -1 if it has none
  int32_t kv_heads, head_dim;  // of its keys and values
  int64_t kv_before;    // numbers of a slot in the KV cache before the keys that it attends to
  int32_t state_layer;  // where its recurrent state is in a place, if it has `mix_out`
  int32_t sparse;       // whether gates below their mean plus `cut` standard deviations are 0
  float cut;
} hw_layer;

// A model: sizes (the largest of any layer), then what its layers compute. A scale of 1 and a cap, clip or clamp of 0 change nothing.
typedef struct {
  int32_t layers, hidden, inner, heads, kv_heads, head_dim, vocab, rope_half, rope_sets, page_size;
  int32_t norm, activation, qk_norm;        // HW_NORM_..., HW_SILU ..., HW_QK_...
  int32_t parallel;                         // whether attention and feed-forward read the same residual
  int32_t experts, per_token, expert_inner, shared_inner;  // of layers with a router
  int32_t normalize;                        // whether the weights of the chosen experts sum to 1
  int32_t route_groups, route_kept, route_best, route_sigmoid;  // experts of the best groups alone, if there are groups
  int32_t weighted_inputs;                  // whether an expert's input is weighted, by the sigmoid of its logit, in place of its output
  int32_t latent, rotated, key_dim, value_dim, query_latent, paired;  // of latent attention, where `latent` is not 0; head_dim is rotated + latent
  int32_t gated_attention;                  // whether heads are multiplied by the sigmoid of a gate
  int32_t recurrence;                       // HW_NO_RECURRENCE …
  int32_t taps, mix_heads, mix_groups, mix_key_dim, mix_value_dim;  // of recurrent layers; a group of heads shares its keys
  int32_t norm_values;                      // whether values are normed, without weights
  int32_t token_size;                       // numbers that a layer takes of the token itself
  int32_t streams, active;                  // residuals side by side, if not 0, and the one that layers compute
  int32_t cycled, gate_first;               // whether heads of a group are not neighbors; whether outputs are gated and then normed
  float eps, scale;
  float attention_cap, qkv_clip, residual_scale, embedding_scale, logit_scale, logit_cap;
  float clamp, alpha;                       // of experts: gate and up are clamped, up counts from 1, gate * sigmoid(alpha * gate)
  float route_scale, latent_eps;
  float temperature_floor, temperature_scale;  // in layers without a rope queries grow with their position, if the floor is not 0
  float step_least, step_most;              // of time steps
  float hidden_root, hidden_inverse, token_root;  // 1 / sqrt(hidden), 1 / hidden, sqrt(token_size)
  const float* inv_freq;    // [rope_sets, rope_half]
  const float* rope_scales; // [rope_sets]
  const int32_t* rope_halves; // [rope_sets] how many of rope_half each has
  const float* positions;   // [.., hidden] learned ones, or null
  hw_norm final_norm;
  const hw_layer* layer;
  hw_matrix embedding, output;
  hw_matrix token_inputs, input_projection;  // [.., layers * token_size], [layers * token_size, hidden]
  const float* input_projection_norm;        // [token_size]
  hw_matrix altup_spread, altup_gather;      // [streams - 1, hidden, hidden], as those of experts lie
  void* kv;                 // KV cache, layer by layer [2, pages, …]: keys [kv_heads, head_dim, page_size], values [kv_heads, page_size, head_dim];
                            // with latent attention [pages, page_size, head_dim]
  int64_t kv_pages;
  int32_t kv_kind;          // HW_F32, HW_F16 or HW_BF16
  float* states;            // recurrent state [places, state_layers, state_numbers]: that of the convolution [channels, taps - 1], then of heads
  int32_t state_layers;
  int64_t state_numbers;
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
  hw_low_rank attention_gate, mix_in, mix_qkv, mix_beta, mix_step, mix_gate, mix_out;  // of recurrent and gated layers
  hw_low_rank q_down, q_up, kv_down;                                                   // of latent attention
  hw_low_rank router, shared_gate, shared_up, shared_down, shared_router;              // of experts
  hw_low_rank input_gate, input_out;                                                   // of what a layer takes of the token
  hw_low_rank laurel_down, laurel_up, altup_router, altup_predict, altup_correct;      // of residuals side by side
  hw_low_rank input_projection;                                                        // outside of layers
  const hw_low_rank *expert_gate, *expert_up, *expert_down;                            // [experts], or null
  const hw_low_rank *key_up, *value_up;                                                // [heads], or null
  const hw_low_rank *altup_spread, *altup_gather;                                      // [streams - 1], or null; outside of layers
} hw_adapter_layer;

// An adapter of a step, and its rows in adapter_rows.
typedef struct {
  const hw_adapter_layer* layers;  // [layers + 1], the last one of what is outside of them
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
  float* query_out;              // [query_count, heads, head_dim], the model's: a layer may have less
  float* out;                    // [rows, hidden] the residual after the last layer
  double* phases;                // [HW_PHASES] elapsed seconds are added here, or null
  const int32_t* read_rows;      // [reads] rows to compute logits and the argmax token for
  float* logits;                 // [reads, logits_stride] their logits
  int64_t logits_stride;
  int64_t* best;                 // [reads]
  uint8_t* bad;                  // [reads] whether a logit is NaN
  int32_t unfinished;            // whether to leave the products of the output matrix as they are, and choose nothing
  int32_t adapter_count, adapter_uses;
  const hw_adapter* adapters;    // [adapter_count], in the order in which a row's adapters add up
  const int32_t* adapter_rows;   // [adapter_uses] the rows of each adapter, one after the other
  const float* adapter_scales;   // [adapter_uses]
  int32_t sequences;             // with recurrent state
  const int32_t* sequence_runs;  // [sequences + 1] first run of each
  const int32_t* state_runs;     // [runs, 4] first row, rows, place of the state before them, place of the state after them
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
int32_t hw_best_isa(void);                  // the best of those that were compiled and that this machine has
int32_t hw_has_isa(int32_t isa);            // 1 if it was compiled and this machine has it
int32_t hw_use_isa(int32_t isa);            // 0 if it is there
void* hw_pool_new(int32_t count);        // a thread pool with its workspace; null if threads cannot be started
void hw_pool_free(void* pool);
// These return 0, 1 when out of memory, 2 for any other failure.
int32_t hw_forward(void* pool, const hw_model* model, const hw_step* step);
int32_t hw_logits(void* pool, const hw_model* model, const float* x, int32_t rows, int32_t norm, int32_t finish, float* logits, int64_t stride);
int32_t hw_finish_logits(void* pool, const hw_model* model, float* logits, int32_t rows, int64_t stride);  // products become logits: scaled, capped
int32_t hw_matmul(void* pool, const hw_matrix* w, const float* x, int32_t rows, float* y, int64_t stride);   // y [rows, stride], stride >= n
int32_t hw_dequantize_rows(void* pool, const hw_matrix* w, const int32_t* rows, int32_t count, float* out);           // float rows [count, k]
int32_t hw_argmax(void* pool, const float* logits, int32_t rows, int64_t vocab, int64_t stride, int64_t* best, uint8_t* bad);
int32_t hw_sample(void* pool, hw_sampling* samplings, int32_t count);
// GGUF blocks (0 Q4_0, 1 Q4_1, 2 Q8_0, 3 Q4_K) to the interleaved layout; rows maps outputs to the file's rows, or is
// null. Returns 3 for any other kind.
int32_t hw_repack(void* pool, int32_t kind, const uint8_t* raw, int32_t n, int32_t k, const int32_t* rows, uint8_t* quants, void* scales, uint16_t* super);
// Strings as a GGUF header has them: the bytes that `count` of them take, or -1 if they reach past `size` or one is not UTF-8.
int64_t hw_strings_size(const uint8_t* data, int64_t size, int64_t count);
// Byte-pair encoding over such strings, which must outlive it; null if they are not tokens (of at most `longest` bytes)
// and merges of them.
void* hw_bpe_new(const uint8_t* tokens, int64_t count, const uint8_t* merges, int64_t merge_count, int64_t longest);
void hw_bpe_free(void* bpe);
const uint8_t* hw_bpe_token(const void* bpe, int64_t id, int64_t* size);      // of an id of it
int64_t hw_bpe_find(const void* bpe, const uint8_t* token, int64_t size);    // its id, or -1
// The ids of words with a newline between them, at most one for each byte; with `whole` a word that is a token stays
// whole. Returns their number, or -1 when out of memory.
int64_t hw_bpe_encode(const void* bpe, const uint8_t* words, int64_t size, int32_t whole, int32_t* out);
#ifdef __cplusplus
}
#endif
