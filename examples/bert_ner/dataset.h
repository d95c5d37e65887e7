/// \file
/// Tagged sentences and their labels.
#pragma once

#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "text.h"

namespace bert_ner {

/// Words, and for each word a BIO tag ("O", "B-TYPE", "I-TYPE").
struct Sentence {
  std::vector<std::string> words;
  std::vector<std::string> tags;  ///< empty for prediction
};

/// Reads a CoNLL file: lines with a word in the first column and its tag in the last one, separated
/// by tabs (or by spaces, on a line without a tab), and empty lines between sentences. Skips
/// "-DOCSTART-"
/// lines. \throws InputError with file and line for a missing or invalid tag and for invalid UTF-8, and
/// for a file without sentences
inline std::vector<Sentence> read_conll(const fs::path& path) {
  std::vector<Sentence> sentences;
  bool inside = false;
  for_each_line(path, [&](std::string_view line, const std::string& location) {
    const auto columns = trim(line);
    const char separator = columns.find('\t') == std::string_view::npos ? ' ' : '\t';
    const auto word = trim(columns.substr(0, columns.find(separator)));
    const auto tag = trim(columns.substr(columns.rfind(separator) + 1));
    const bool was_inside = std::exchange(inside, !word.empty() && word != "-DOCSTART-");
    if (!inside) return;
    if (tag != "O" && !(tag.size() > 2 && (tag.starts_with("B-") || tag.starts_with("I-")))) {
      throw InputError(location + ": \"" + std::string(tag) +
                       "\" is not a BIO tag; write \"word<TAB>tag\" with O, B-TYPE or I-TYPE, or "
                       "leave the line blank between sentences");
    }
    if (!was_inside) sentences.emplace_back();
    sentences.back().words.emplace_back(word);
    sentences.back().tags.emplace_back(tag);
  });
  if (sentences.empty()) {
    throw InputError(path.string() + ": has no sentences; pass a file with \"word<TAB>tag\" lines");
  }
  return sentences;
}

/// Returns the indices 0 to count - 1 in random order. Unlike std::shuffle, the order does not
/// depend on the standard library.
inline std::vector<std::size_t> shuffled_indices(std::size_t count, std::mt19937_64& generator) {
  std::vector<std::size_t> indices(count);
  std::iota(indices.begin(), indices.end(), std::size_t{0});
  for (std::size_t last = count; last > 1; --last) {
    // Rejects numbers in the incomplete last multiple of `last`, for a uniform distribution.
    const auto surplus = (std::mt19937_64::max() % last + 1) % last;
    auto number = generator();
    while (number > std::mt19937_64::max() - surplus) number = generator();
    std::swap(indices[last - 1], indices[number % last]);
  }
  return indices;
}

/// The sentences of a file, split into training and validation, and their labels.
struct Dataset {
  std::vector<Sentence> train, valid;
  std::vector<std::string> labels;  ///< "O" first, then in alphabetical order
  std::string text;  ///< the contents of the file, to detect other data when resuming
};

/// Reads `path`, and holds out round(held_out * n) of its n sentences for validation. The split
/// depends
/// only on the seed. \throws InputError like read_conll, and if a part is empty
inline Dataset load_dataset(const fs::path& path, double held_out, std::uint64_t seed) {
  auto sentences = read_conll(path);
  const auto count = static_cast<double>(sentences.size());
  const double wanted = std::round(held_out * count);
  if (!(wanted >= 1 && wanted < count)) {
    throw InputError("--held-out " + format("%g of %g", held_out, count) +
                     " sentences leaves the training or the validation part empty; choose another "
                     "share, such as 0.2, or give more sentences");
  }
  std::mt19937_64 generator(seed);
  const auto order = shuffled_indices(sentences.size(), generator);
  const std::set<std::size_t> is_held_out(order.begin(), order.begin() + std::lround(wanted));
  Dataset dataset{.train = {}, .valid = {}, .labels = {"O"}, .text = read_file(path)};
  std::set<std::string> tags;
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    tags.insert(sentences[i].tags.begin(), sentences[i].tags.end());
    (is_held_out.contains(i) ? dataset.valid : dataset.train).push_back(std::move(sentences[i]));
  }
  tags.erase("O");
  dataset.labels.insert(dataset.labels.end(), tags.begin(), tags.end());
  return dataset;
}

}  // namespace bert_ner
