#include "dataset.h"

#include <string>
#include <string_view>
#include <utility>

#include "input_error.h"
#include "text_lines.h"

namespace bert_ner {
namespace {

/// A model cannot answer a label that it never saw: say so before an hour of training, not after.
void check_labels(const std::vector<Sentence>& sentences, const std::string& file,
                  const Labels& labels, const std::string& training_file) {
  for (const auto& sentence : sentences) {
    for (std::size_t word = 0; word < sentence.tags.size(); ++word) {
      if (labels.id(sentence.tags[word])) continue;
      throw InputError(place(file, sentence.line + word) + ": the label " + sentence.tags[word] +
                       " does not occur in " + training_file + ", which has " + labels.list() +
                       "; correct the label or add training sentences with it");
    }
  }
}

/// FNV-1a
void mix(uint64_t& hash, std::string_view text) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  hash = (hash ^ 0x100U) * 0x100000001b3U;  // where one text ends and the next begins
}

}  // namespace

uint64_t Dataset::fingerprint() const {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const auto* part : {&train, &valid, &test}) {
    for (const auto& sentence : *part) {
      for (const auto& word : sentence.words) mix(hash, word);
      for (const auto& tag : sentence.tags) mix(hash, tag);
    }
    mix(hash, "end of part");
  }
  return hash;
}

Dataset load_dataset(const DataOptions& options, uint64_t seed) {
  Dataset dataset;
  if (!options.data.empty()) {
    auto sentences = read_conll(options.data);
    dataset.labels = Labels::of(sentences);
    auto split = split_by_seed(std::move(sentences), options.held_out, seed);
    dataset.train = std::move(split.train);
    dataset.valid = std::move(split.valid);
  } else {
    dataset.train = read_conll(options.train);
    dataset.labels = Labels::of(dataset.train);
    dataset.valid = read_conll(options.valid);
    check_labels(dataset.valid, options.valid, dataset.labels, options.train);
  }
  if (!options.test.empty()) {
    dataset.test = read_conll(options.test);
    check_labels(dataset.test, options.test, dataset.labels,
                 options.data.empty() ? options.train : options.data);
  }
  return dataset;
}

}  // namespace bert_ner
