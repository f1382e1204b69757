// Byte-pair encoding over the strings of a GGUF header.
#pragma once
#include <stdint.h>

namespace hw {

class Bpe;

// The bytes that `count` strings take; -1 if they reach past `size` or one is not UTF-8.
int64_t strings_size(const uint8_t* data, int64_t size, int64_t count);

// Over strings that `strings_size` has checked and that outlive it; null if a token is empty, has more than `longest` bytes
// or occurs twice, or a merge is not two tokens that make a third.
Bpe* bpe_new(const uint8_t* tokens, int64_t count, const uint8_t* merges, int64_t merge_count, int64_t longest);
void bpe_free(Bpe* bpe);
// The bytes of a token: their place, and `size`.
const uint8_t* bpe_token(const Bpe& bpe, int64_t id, int64_t* size);
int64_t bpe_find(const Bpe& bpe, const uint8_t* token, int64_t size);

// The ids of words with a newline between them, at most one for each byte; `whole` keeps a word that is a token.
int64_t bpe_encode(const Bpe& bpe, const uint8_t* words, int64_t size, bool whole, int32_t* out);

}  // namespace hw
