// Byte-pair encoding over the strings of a GGUF header, used where they lie: a length of 8 bytes, then UTF-8.
#include "bpe.h"

#include <cstring>
#include <queue>
#include <vector>

namespace hw {
namespace {

uint64_t read_length(const uint8_t* at) {
  uint64_t length;
  std::memcpy(&length, at, 8);
  return length;
}

// The bytes of the character that starts here; 0 if it is not UTF-8.
int64_t utf8_length(const uint8_t* at, int64_t left) {
  const uint8_t c = at[0];
  if (c < 0x80) return 1;
  const int64_t n = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
  if (c < 0xC2 || c > 0xF4 || n > left) return 0;
  for (int64_t i = 1; i < n; i++)
    if ((at[i] & 0xC0) != 0x80) return 0;
  if (n == 3 && ((c == 0xE0 && at[1] < 0xA0) || (c == 0xED && at[1] > 0x9F))) return 0;
  if (n == 4 && ((c == 0xF0 && at[1] < 0x90) || (c == 0xF4 && at[1] > 0x8F))) return 0;
  return n;
}

bool is_utf8(const uint8_t* at, int64_t size) {
  for (int64_t i = 0; i < size;) {
    uint64_t eight;
    if (size - i >= 8 && (std::memcpy(&eight, at + i, 8), (eight & 0x8080808080808080ull) == 0)) {
      i += 8;
      continue;
    }
    const int64_t n = utf8_length(at + i, size - i);
    if (n == 0) return false;
    i += n;
  }
  return true;
}

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  return x ^ (x >> 29);
}

uint64_t hash_bytes(const uint8_t* at, size_t size) {
  uint64_t h = size;
  for (; size >= 8; at += 8, size -= 8) h = mix(h ^ read_length(at)) + 0x9e3779b97f4a7c15ull;
  uint64_t rest = 0;
  std::memcpy(&rest, at, size);
  return mix(mix(h ^ rest));
}

struct Text {
  const uint8_t* at = nullptr;
  size_t size = 0;
};

struct Merge {
  uint64_t pair = ~0ull;  // left id in the high half, right id in the low one
  int32_t rank = 0, id = 0;
};

struct Candidate {
  int32_t rank, place, id;
  bool operator<(const Candidate& other) const {  // the queue gives the largest: the lowest rank, the leftmost place
    return rank != other.rank ? rank > other.rank : place > other.place;
  }
};

struct Symbol {
  int32_t id, before, after;  // -1 at the ends
  bool alive;
};

size_t table_size(size_t count) {
  size_t size = 16;
  while (size < 2 * count) size *= 2;
  return size;
}

}  // namespace

class Bpe {
 public:
  bool add_tokens(const uint8_t* strings, int64_t count, size_t longest) {
    tokens.resize(count);
    slots.assign(table_size(count), -1);
    for (int64_t id = 0; id < count; id++) {
      const Text token = tokens[id] = {strings + 8, (size_t)read_length(strings)};
      if (token.size == 0 || token.size > longest || find(token) >= 0) return false;
      size_t slot = hash_bytes(token.at, token.size) & (slots.size() - 1);
      while (slots[slot] >= 0) slot = (slot + 1) & (slots.size() - 1);
      slots[slot] = (int32_t)id;
      strings = token.at + token.size;
    }
    return true;
  }

  // Each is two tokens with a space between. A pair that occurs twice has its last rank.
  bool add_merges(const uint8_t* strings, int64_t count) {
    merges.assign(table_size(count), Merge());
    std::vector<uint8_t> joined;
    for (int64_t rank = 0; rank < count; rank++) {
      const Text merge = {strings + 8, (size_t)read_length(strings)};
      const uint8_t* end = merge.at + merge.size;
      const uint8_t* cut = merge.size < 3 ? nullptr : (const uint8_t*)std::memchr(merge.at + 1, ' ', merge.size - 1);
      if (!cut || cut + 1 == end) return false;
      joined.assign(merge.at, cut);
      joined.insert(joined.end(), cut + 1, end);
      const int64_t left = find({merge.at, (size_t)(cut - merge.at)}), right = find({cut + 1, (size_t)(end - cut - 1)});
      const int64_t id = find({joined.data(), joined.size()});
      if (left < 0 || right < 0 || id < 0) return false;
      Merge& place = merge_slot((uint64_t)left << 32 | (uint64_t)right);
      place = {(uint64_t)left << 32 | (uint64_t)right, (int32_t)rank, (int32_t)id};
      strings = end;
    }
    return true;
  }

  int64_t find(Text token) const {
    size_t slot = hash_bytes(token.at, token.size) & (slots.size() - 1);
    for (; slots[slot] >= 0; slot = (slot + 1) & (slots.size() - 1)) {
      const Text& other = tokens[slots[slot]];
      if (other.size == token.size && std::memcmp(other.at, token.at, token.size) == 0) return slots[slot];
    }
    return -1;
  }

  void encode(Text word, bool whole, std::vector<int32_t>& ids) const {
    const int64_t id = whole ? find(word) : -1;
    if (id >= 0) {
      ids.push_back((int32_t)id);
      return;
    }
    std::vector<Symbol> symbols = split(word);
    merge(symbols);
    for (const Symbol& symbol : symbols)
      if (symbol.alive) ids.push_back(symbol.id);
  }

  std::vector<Text> tokens;

 private:
  Merge& merge_slot(uint64_t pair) {
    size_t slot = mix(pair) & (merges.size() - 1);
    while (merges[slot].pair != ~0ull && merges[slot].pair != pair) slot = (slot + 1) & (merges.size() - 1);
    return merges[slot];
  }

  const Merge* find_merge(int32_t left, int32_t right) const {
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t slot = mix(pair) & (merges.size() - 1);
    while (merges[slot].pair != ~0ull && merges[slot].pair != pair) slot = (slot + 1) & (merges.size() - 1);
    return merges[slot].pair == pair ? &merges[slot] : nullptr;
  }

  // A symbol for each character that is a token; the others have no id and vanish.
  std::vector<Symbol> split(Text word) const {
    std::vector<Symbol> symbols;
    for (size_t i = 0; i < word.size;) {
      int64_t n = utf8_length(word.at + i, (int64_t)(word.size - i));
      if (n == 0) n = 1;
      const int64_t id = find({word.at + i, (size_t)n});
      const int32_t place = (int32_t)symbols.size();
      if (id >= 0) symbols.push_back({(int32_t)id, place - 1, place + 1, true});
      i += (size_t)n;
    }
    if (!symbols.empty()) symbols.back().after = -1;
    return symbols;
  }

  void merge(std::vector<Symbol>& symbols) const {
    std::priority_queue<Candidate> queue;
    const auto offer = [&](int32_t place) {
      if (place < 0 || symbols[place].after < 0) return;
      const Merge* found = find_merge(symbols[place].id, symbols[symbols[place].after].id);
      if (found) queue.push({found->rank, place, found->id});
    };
    for (int32_t place = 0; place < (int32_t)symbols.size(); place++) offer(place);
    while (!queue.empty()) {
      const Candidate top = queue.top();
      queue.pop();
      Symbol& left = symbols[top.place];
      if (!left.alive || left.after < 0) continue;
      Symbol& right = symbols[left.after];
      const Merge* found = find_merge(left.id, right.id);
      if (!found || found->id != top.id) continue;  // one of them was merged meanwhile
      left.id = top.id;
      right.alive = false;
      left.after = right.after;
      if (left.after >= 0) symbols[left.after].before = top.place;
      offer(left.before);
      offer(top.place);
    }
  }

  std::vector<int32_t> slots;  // open addressing: ids by the token's hash
  std::vector<Merge> merges;   // the same, by pair
};

int64_t strings_size(const uint8_t* data, int64_t size, int64_t count) {
  int64_t at = 0;
  for (int64_t i = 0; i < count; i++) {
    if (size - at < 8) return -1;
    const uint64_t length = read_length(data + at);
    at += 8;
    if (length > (uint64_t)(size - at) || !is_utf8(data + at, (int64_t)length)) return -1;
    at += (int64_t)length;
  }
  return at;
}

Bpe* bpe_new(const uint8_t* tokens, int64_t count, const uint8_t* merges, int64_t merge_count, int64_t longest) {
  Bpe* made = new Bpe;
  try {
    if (made->add_tokens(tokens, count, (size_t)longest) && made->add_merges(merges, merge_count)) return made;
  } catch (...) {
    delete made;
    throw;
  }
  delete made;
  return nullptr;
}

void bpe_free(Bpe* bpe) { delete bpe; }

const uint8_t* bpe_token(const Bpe& bpe, int64_t id, int64_t* size) {
  *size = (int64_t)bpe.tokens[id].size;
  return bpe.tokens[id].at;
}

int64_t bpe_find(const Bpe& bpe, const uint8_t* token, int64_t size) { return bpe.find({token, (size_t)size}); }

int64_t bpe_encode(const Bpe& bpe, const uint8_t* words, int64_t size, bool whole, int32_t* out) {
  std::vector<int32_t> ids;
  int64_t count = 0;
  for (int64_t start = 0; start <= size;) {
    const uint8_t* end = (const uint8_t*)std::memchr(words + start, '\n', size - start);
    const int64_t length = (end ? end - words : size) - start;
    ids.clear();
    if (length) bpe.encode({words + start, (size_t)length}, whole, ids);
    if (!ids.empty()) std::memcpy(out + count, ids.data(), 4 * ids.size());
    count += (int64_t)ids.size();
    start += length + 1;
  }
  return count;
}

}  // namespace hw
