/// \file
/// Sentences with tags, the labels that a model learns from them, and their weights in the loss.
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

/// Words and, one each, their BIO tags ("O", "B-TYPE", "I-TYPE").
struct Sentence {
  std::vector<std::string> words;
  std::vector<std::string> tags;  ///< empty if they are yet to be predicted
  std::size_t line = 0;           ///< where the sentence begins in its file, from 1
};

/// Sentences of a CoNLL file: a word a line, in the first column, and its tag in the last one;
/// columns parted by tabs (or, on a line without one, by spaces), sentences parted by blank lines.
/// "-DOCSTART-" lines are passed over. \throws InputError with file and line for a missing column, a
/// tag that is not BIO, bytes that are no UTF-8, and for a file without a sentence
std::vector<Sentence> read_conll(const std::filesystem::path& path);

/// Two parts of one file.
struct Split {
  std::vector<Sentence> train, valid;
};

/// Draws round(held_out * n) sentences as the validation part; both parts keep the file's order.
/// The same seed draws the same sentences on every platform. \throws InputError unless
/// 0 < held_out < 1 and neither part is empty
Split split_by_seed(std::vector<Sentence> sentences, double held_out, std::uint64_t seed);

/// The numbers 0 to count - 1 in random order: with every standard library the same for the same
/// generator, where std::shuffle is not.
std::vector<std::size_t> shuffled_indices(std::size_t count, std::mt19937_64& generator);

/// The BIO tags a model knows, as the numbers its classifier answers.
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
  /// "O, B-person, I-person, ..." for messages.
  std::string list() const;

  friend bool operator==(const Labels&, const Labels&) = default;

 private:
  std::vector<std::string> names_;
};

/// The weight of each label in the loss, by id: 1 unless `spec` says otherwise.
/// \param spec "B-person=2,O=0.5", or the name of a file with a label and a weight on each line;
///   empty for none
/// \throws InputError for an unknown label or a weight that is no finite number above 0 in float32
std::vector<double> parse_class_weights(const std::string& spec, const Labels& labels);

/// Where the sentences are: one file that is split, or a file for each part.
struct DataOptions {
  std::string data, train, valid, test;
  double held_out = 0.2;  ///< the part of `data` that is kept for the scores
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DataOptions, data, train, valid, test, held_out)

struct Dataset {
  std::vector<Sentence> train;
  std::vector<Sentence> valid;  ///< scored after each epoch
  std::vector<Sentence> test;   ///< scored at the end; empty where none was given
  Labels labels;                ///< of the training part, or of the one file that was split

  /// All words and tags as one text, to tell whether a run is resumed on its own data.
  std::string text() const;
};

/// \throws InputError naming file and line for what read_conll refuses and for a tag, in the
/// validation or test part, that no training sentence has
Dataset load_dataset(const DataOptions& options, uint64_t seed);

}  // namespace bert_ner
