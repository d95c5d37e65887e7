/// \file
/// From sentences to padded batches of token ids.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "dataset.h"
#include "wordpiece.h"

namespace bert_ner {

/// A sentence, or a part of one that is too long for the model, as BERT reads it:
/// [CLS], the pieces of its words, [SEP]. The first piece of a word has the word's label.
struct Example {
  std::vector<int64_t> ids;
  std::vector<int64_t> first_pieces;  ///< where in `ids` each word begins
  std::vector<int64_t> labels;        ///< one a word; empty if the sentence has no tags
  std::size_t sentence = 0;           ///< which sentence this is (a part of)
};

/// The label of what the loss ignores: later pieces of a word, [CLS], [SEP] and padding.
inline constexpr int64_t kIgnoredLabel = -100;

/// Makes examples of sentences, in order. A sentence of more than `max_length` ids is cut between
/// words into several examples; a word that is too long on its own loses its last pieces.
/// \param labels all tags of the sentences
/// \param max_length the model's max_position_embeddings, at least 3
inline std::vector<Example> make_examples(std::span<const Sentence> sentences,
                                          const WordPiece& tokenizer,
                                          const std::vector<std::string>& labels,
                                          int64_t max_length) {
  const auto room = static_cast<std::size_t>(max_length) - 1;  // and [SEP]
  std::vector<Example> examples;
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    const auto& [words, tags] = sentences[i];
    const auto begin = [&] { examples.push_back({{tokenizer.cls}, {}, {}, i}); };
    begin();
    for (std::size_t word = 0; word < words.size(); ++word) {
      auto pieces = tokenizer.encode_word(words[word]);
      pieces.resize(std::min(pieces.size(), room - 1));
      if (examples.back().ids.size() + pieces.size() > room) {
        examples.back().ids.push_back(tokenizer.sep);
        begin();
      }
      auto& example = examples.back();
      example.first_pieces.push_back(static_cast<int64_t>(example.ids.size()));
      example.ids.insert(example.ids.end(), pieces.begin(), pieces.end());
      if (tags.empty()) continue;
      example.labels.push_back(std::ranges::find(labels, tags[word]) - labels.begin());
    }
    examples.back().ids.push_back(tokenizer.sep);
  }
  return examples;
}

/// Positions in a vector of examples; all lists together hold each position once.
using BatchList = std::vector<std::vector<std::size_t>>;

/// Returns batches of examples of similar length, so that little is padded; shortest first.
inline BatchList length_sorted_batches(std::span<const Example> examples, std::size_t batch_size) {
  std::vector<std::size_t> order(examples.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return examples[i].ids.size(); });
  BatchList batches;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i % batch_size == 0) batches.emplace_back();
    batches.back().push_back(order[i]);
  }
  return batches;
}

/// Returns the order of the batches in one epoch, which depends on seed and epoch alone.
inline BatchList shuffled(const BatchList& batches, uint64_t seed, int64_t epoch) {
  std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                      static_cast<uint32_t>(epoch)};
  std::mt19937_64 generator(words);
  BatchList result;
  for (const auto i : shuffled_indices(batches.size(), generator)) result.push_back(batches[i]);
  return result;
}

struct Batch {
  torch::Tensor ids;     ///< int64 [batch, length]
  torch::Tensor mask;    ///< bool [batch, length], true where real; undefined if nothing is padded
  torch::Tensor labels;  ///< int64 [batch, length]
  int64_t tokens = 0;    ///< ids that are no padding
};

/// Pads the examples with `pad` to the longest among them, rounded up to a multiple of 8, which
/// tensor cores want and which leaves a CPU few lengths (benchmarks/results/bert_ner.md), but not
/// beyond `max_length`.
inline Batch collate(std::span<const Example> examples, std::span<const std::size_t> positions,
                     int64_t pad, int64_t max_length, torch::Device device) {
  int64_t longest = 0, tokens = 0;
  for (const auto position : positions) {
    const auto length = static_cast<int64_t>(examples[position].ids.size());
    longest = std::max(longest, length);
    tokens += length;
  }
  const auto rows = static_cast<int64_t>(positions.size());
  const auto length = std::min((longest + 7) / 8 * 8, max_length);
  auto ids = torch::full({rows, length}, pad, torch::kInt64);
  auto labels = torch::full({rows, length}, kIgnoredLabel, torch::kInt64);
  auto mask = torch::zeros({rows, length}, torch::kBool);
  for (int64_t row = 0; row < rows; ++row) {
    const auto& example = examples[positions[static_cast<std::size_t>(row)]];
    std::ranges::copy(example.ids, ids.data_ptr<int64_t>() + row * length);
    std::fill_n(mask.data_ptr<bool>() + row * length, example.ids.size(), true);
    for (std::size_t word = 0; word < example.labels.size(); ++word) {
      labels.data_ptr<int64_t>()[row * length + example.first_pieces[word]] = example.labels[word];
    }
  }
  // A copy that blocks would wait for all that the device still has to do.
  const auto moved = [&](const torch::Tensor& tensor) { return tensor.to(device, true); };
  const bool is_padded = tokens < rows * length;
  return {moved(ids), is_padded ? moved(mask) : torch::Tensor(), moved(labels), tokens};
}

}  // namespace bert_ner
