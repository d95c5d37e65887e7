#include <string>

#include "../support/scratch.h"
#include "dataset.h"
#include "targets.h"
#include "text.h"

namespace fuzz {

/// A file of words and tags.
void conll(std::string_view bytes) {
  static const test_support::Scratch scratch;
  const auto path = scratch.path() / "words.conll";
  test_support::put_bytes(path, std::string(bytes));
  try {
    auto sentences = bert_ner::read_conll(path);
    const auto count = sentences.size();
    for (const auto& sentence : sentences) {
      require(!sentence.words.empty() && sentence.words.size() == sentence.tags.size(),
              "a sentence has a word, and a tag for each");
    }
    const auto split = bert_ner::split_by_seed(std::move(sentences), 0.3, count);
    require(split.train.size() + split.valid.size() == count, "a split loses no sentence");
  } catch (const bert_ner::InputError&) {
  }
}

}  // namespace fuzz
