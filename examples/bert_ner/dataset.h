/// \file
/// Sentences with tags, and the labels that a model learns from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bert_ner {

/// Words, and for each word a BIO tag ("O", "B-TYPE", "I-TYPE").
struct Sentence {
  std::vector<std::string> words;
  std::vector<std::string> tags;  ///< empty if they are yet to be predicted
  std::size_t line = 0;           ///< where the sentence begins in its file, from 1
};

/// Reads a CoNLL file: on each line a word in the first column and its tag in the last one, columns
/// separated by tabs (or, on a line without a tab, by spaces), sentences by blank lines. Skips
/// "-DOCSTART-" lines. \throws InputError with file and line for a missing column, a tag that is not
/// BIO, and bytes that are not UTF-8; and for a file without a sentence
std::vector<Sentence> read_conll(const std::filesystem::path& path);

/// Two parts of one file.
struct Split {
  std::vector<Sentence> train, valid;
};

/// Draws round(held_out * n) sentences as the validation part; both parts keep the file's order.
/// The same seed draws the same sentences on every platform. \throws InputError if a part is empty
Split split_by_seed(std::vector<Sentence> sentences, double held_out, std::uint64_t seed);

/// The numbers 0 to count - 1 in random order. Unlike std::shuffle, the order is the same with
/// every standard library.
std::vector<std::size_t> shuffled_indices(std::size_t count, std::mt19937_64& generator);

/// The BIO tags that a model knows, numbered as the outputs of its classifier.
class Labels {
 public:
  Labels() = default;
  /// In the order of their ids. \throws InputError if there are none or one occurs twice
  explicit Labels(std::vector<std::string> names);
  /// The tags of the sentences: "O" first, the others in alphabetical order.
  static Labels of(std::span<const Sentence> sentences);

  std::size_t size() const { return names_.size(); }
  const std::vector<std::string>& names() const { return names_; }
  const std::string& name(int64_t id) const { return names_.at(static_cast<std::size_t>(id)); }
  std::optional<int64_t> id(std::string_view name) const;

  friend bool operator==(const Labels&, const Labels&) = default;

 private:
  std::vector<std::string> names_;
};

/// The files of sentences: one that is split, or one for each part.
struct DataOptions {
  std::string data, train, valid;
  double held_out = 0.2;  ///< the part of `data` that is kept for the scores
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DataOptions, data, train, valid, held_out)

struct Dataset {
  std::vector<Sentence> train;
  std::vector<Sentence> valid;  ///< scored after each epoch
  Labels labels;                ///< of both

  /// All words and tags as one text, to recognise the data when a run is resumed.
  std::string text() const;
};

/// \throws InputError naming file and line for what read_conll refuses
Dataset load_dataset(const DataOptions& options, uint64_t seed);

}  // namespace bert_ner
