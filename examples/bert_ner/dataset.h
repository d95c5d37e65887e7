/// \file
/// Sentences with tags, and the labels that a model learns from them.
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
  std::vector<std::string> tags;  ///< empty if they are yet to be predicted
};

/// Reads a CoNLL file: on each line a word in the first column and its tag in the last one, columns
/// separated by tabs (or, on a line without a tab, by spaces), sentences by blank lines. Skips
/// "-DOCSTART-" lines. \throws InputError with file and line for a tag that is missing or not BIO,
/// and bytes that are not UTF-8; and for a file without a sentence
inline std::vector<Sentence> read_conll(const fs::path& path) {
  std::vector<Sentence> sentences;
  bool inside = false;
  for_each_line(path, [&](std::string_view line, const std::string& place) {
    const auto columns = trimmed(line);
    const char separator = columns.find('\t') == std::string_view::npos ? ' ' : '\t';
    const auto word = trimmed(columns.substr(0, columns.find(separator)));
    const auto tag = trimmed(columns.substr(columns.rfind(separator) + 1));
    const bool was_inside = std::exchange(inside, !word.empty() && word != "-DOCSTART-");
    if (!inside) return;
    if (tag != "O" && !(tag.size() > 2 && (tag.starts_with("B-") || tag.starts_with("I-")))) {
      throw InputError(place + ": \"" + std::string(tag) +
                       "\" is not a BIO tag; write \"word<TAB>tag\" with O, B-TYPE or I-TYPE, or "
                       "leave the line blank between sentences");
    }
    if (!was_inside) sentences.emplace_back();
    sentences.back().words.emplace_back(word);
    sentences.back().tags.emplace_back(tag);
  });
  if (sentences.empty()) {
    throw InputError(path.string() + ": holds no sentence; give a file of \"word<TAB>tag\" lines");
  }
  return sentences;
}

/// Returns the numbers 0 to count - 1 in random order. Unlike std::shuffle, the order is the same
/// with every standard library.
inline std::vector<std::size_t> shuffled_indices(std::size_t count, std::mt19937_64& generator) {
  std::vector<std::size_t> indices(count);
  std::iota(indices.begin(), indices.end(), std::size_t{0});
  for (std::size_t last = count; last > 1; --last) {
    // Uniform: draws that fall into the incomplete last multiple of `last` are drawn again.
    const auto surplus = (std::mt19937_64::max() % last + 1) % last;
    auto drawn = generator();
    while (drawn > std::mt19937_64::max() - surplus) drawn = generator();
    std::swap(indices[last - 1], indices[drawn % last]);
  }
  return indices;
}

/// The sentences of a file, in its order, and their tags.
struct Dataset {
  std::vector<Sentence> train, valid;
  std::vector<std::string> labels;  ///< of both: "O" first, the others in alphabetical order
  std::string text;                 ///< all of it, to recognise the data when a run is resumed
};

/// Reads the sentences of `path`, and draws round(held_out * n) of them as the validation part. The
/// same seed draws the same ones on every platform. \throws InputError as read_conll does, and if a
/// part is empty
inline Dataset load_dataset(const fs::path& path, double held_out, std::uint64_t seed) {
  auto sentences = read_conll(path);
  const auto count = static_cast<double>(sentences.size());
  const double wanted = std::round(held_out * count);
  if (!(wanted >= 1 && wanted < count)) {
    throw InputError("--held-out " + formatted("%g of %g", held_out, count) +
                     " sentences leaves the training or the validation part empty; choose another "
                     "share, such as 0.2, or give more sentences");
  }
  std::mt19937_64 generator(seed);
  const auto order = shuffled_indices(sentences.size(), generator);
  const std::set<std::size_t> is_valid(order.begin(), order.begin() + std::lround(wanted));
  Dataset dataset{.train = {}, .valid = {}, .labels = {"O"}, .text = read_file(path)};
  std::set<std::string> tags;
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    tags.insert(sentences[i].tags.begin(), sentences[i].tags.end());
    (is_valid.contains(i) ? dataset.valid : dataset.train).push_back(std::move(sentences[i]));
  }
  tags.erase("O");
  dataset.labels.insert(dataset.labels.end(), tags.begin(), tags.end());
  return dataset;
}

}  // namespace bert_ner
