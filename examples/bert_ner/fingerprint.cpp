#include "fingerprint.h"

#include <algorithm>
#include <cstring>

namespace bert_ner {

void Fingerprint::add(std::span<const std::byte> part) {
  mix(part.size());
  while (!part.empty()) {
    std::uint64_t word = 0;
    const auto length = std::min(part.size(), sizeof word);
    std::memcpy(&word, part.data(), length);
    mix(word);
    part = part.subspan(length);
  }
}

// FNV-1a with words for bytes, and the upper half, where a multiplication leaves its changes,
// brought down. Each step can be undone, so parts that differ in one word never have one
// fingerprint.
void Fingerprint::mix(std::uint64_t word) {
  constexpr std::uint64_t kPrime = 0x100000001b3U;
  constexpr int kHalf = 32;
  state_ = (state_ ^ word) * kPrime;
  state_ ^= state_ >> kHalf;
}

}  // namespace bert_ner
