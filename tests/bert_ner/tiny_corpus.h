/// \file
/// Sentences that a model of a few thousand parameters can learn.
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <sstream>
#include <string>
#include <string_view>

#include "../support/scratch.h"

namespace bert_ner::test {

/// `count` sentences "NAME [SURNAME] lives in PLACE ." in every combination, tagged, as a CoNLL
/// file.
inline std::filesystem::path write_tiny_corpus(const test_support::Scratch& scratch,
                                               std::string_view name, int count) {
  constexpr std::array kNames = {"alice", "bob", "carol"};
  constexpr std::array kSurnames = {"", "smith", "jones"};
  constexpr std::array kVerbs = {"lives in", "works at", "visits", "met bob in"};
  constexpr std::array kPlaces = {"paris", "rome", "london", "new york"};
  std::string text;
  const auto words = [&](const std::string& phrase, const std::string& type) {
    std::istringstream stream(phrase);
    std::string tag = "B-";
    for (std::string word; stream >> word; tag = "I-") {
      text += word + "\t" + (type.empty() ? (word == "bob" ? "B-person" : "O") : tag + type) + "\n";
    }
  };
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    words(std::string(kNames[i % 3]) + " " + kSurnames[i / 3 % 3], "person");
    words(kVerbs[i / 9 % 4], "");
    words(kPlaces[(i / 2 + i / 36) % 4], "place");
    words(".", "");
    text += "\n";
  }
  return scratch.write(name, text);
}

}  // namespace bert_ner::test
