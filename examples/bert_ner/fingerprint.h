#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace bert_ner {

/// A number that changes when any part of what was added does: it tells whether files or texts are
/// still the same. Against mix-ups and damage, not against forgery.
class Fingerprint {
 public:
  /// Parts are told from each other: "a" and "bc" differ from "ab" and "c".
  void add(std::span<const std::byte> part);
  void add(std::string_view part) { add(std::as_bytes(std::span(part))); }

  std::uint64_t value() const { return state_; }

 private:
  void mix(std::uint64_t word);

  std::uint64_t state_ = 0xcbf29ce484222325U;
};

}  // namespace bert_ner
