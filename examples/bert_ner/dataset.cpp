#include "dataset.h"

#include <string>
#include <utility>

#include "fingerprint.h"
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

Split split_file(const DataOptions& options, std::vector<Sentence> sentences, uint64_t seed) {
  try {
    return split_by_seed(std::move(sentences), options.held_out, seed);
  } catch (const InputError& error) {
    throw InputError(options.data + ": " + error.what());
  }
}

}  // namespace

uint64_t Dataset::fingerprint() const {
  Fingerprint fingerprint;
  for (const auto* part : {&train, &valid, &test}) {
    for (const auto& sentence : *part) {
      for (const auto& word : sentence.words) fingerprint.add(word);
      for (const auto& tag : sentence.tags) fingerprint.add(tag);
    }
    fingerprint.add("end of part");
  }
  return fingerprint.value();
}

Dataset load_dataset(const DataOptions& options, uint64_t seed) {
  Dataset dataset;
  if (!options.data.empty()) {
    auto sentences = read_conll(options.data);
    dataset.labels = Labels::of(sentences);
    auto split = split_file(options, std::move(sentences), seed);
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
