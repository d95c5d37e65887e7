/// \file
/// Converts sentences to padded batches of token ids.
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

/// The input of BERT for a sentence, or a part of a long sentence: [CLS], the pieces of its words,
/// [SEP]. The first piece of a word has the word's label.
struct Example {
  std::vector<int64_t> ids;
  std::vector<int64_t> first_pieces;  ///< index in `ids` of the first piece of each word
  std::vector<int64_t> labels;        ///< of each word; empty if the sentence has no tags
  std::size_t sentence = 0;           ///< index of the sentence
};

/// The label that the loss ignores: of later pieces of a word, [CLS], [SEP] and padding.
inline constexpr int64_t kIgnoredLabel = -100;

/// Converts sentences to examples, in order. A sentence with more than `max_length` ids is split
/// between words; a word that is too long is truncated. \param labels all tags of the sentences
/// \param max_length the model's max_position_embeddings, at least 3
inline std::vector<Example> make_examples(std::span<const Sentence> sentences,
                                          const WordPiece& tokenizer,
                                          const std::vector<std::string>& labels,
                                          int64_t max_length) {
  const auto capacity = static_cast<std::size_t>(max_length) - 1;  // without [SEP]
  std::vector<Example> examples;
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    const auto& [words, tags] = sentences[i];
    const auto begin = [&] { examples.push_back({{tokenizer.cls}, {}, {}, i}); };
    begin();
    for (std::size_t word = 0; word < words.size(); ++word) {
      auto pieces = tokenizer.encode_word(words[word]);
      pieces.resize(std::min(pieces.size(), capacity - 1));
      if (examples.back().ids.size() + pieces.size() > capacity) {
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

/// Batches as indices of examples. Each index occurs once.
using BatchList = std::vector<std::vector<std::size_t>>;

/// Groups examples of similar length, to reduce padding; shortest first.
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

/// Returns the result of length_sorted_batches in the order of an epoch, which depends only on seed
/// and epoch. The longest batch is first: memory peaks in the first step, and the smaller tensors
/// of later batches fit into what malloc then keeps.
inline BatchList shuffle_batches(const BatchList& batches, uint64_t seed, int64_t epoch) {
  std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                      static_cast<uint32_t>(epoch)};
  std::mt19937_64 generator(words);
  auto order = shuffled_indices(batches.size(), generator);
  std::iter_swap(order.begin(), std::ranges::find(order, batches.size() - 1));
  BatchList result;
  for (const auto i : order) result.push_back(batches[i]);
  return result;
}

struct Batch {
  torch::Tensor ids;     ///< int64 [batch, length]
  torch::Tensor mask;    ///< bool [batch, length], false for padding; undefined without padding
  torch::Tensor labels;  ///< int64 [batch, length]
  int64_t tokens = 0;    ///< number of ids without padding
};

/// Pads the examples with `pad` to the longest one, rounded up to a multiple of 8 for tensor cores
/// and for few distinct shapes on the CPU (benchmarks/results/bert_ner.md), but at most
/// `max_length`.
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
  // Non-blocking, to avoid a synchronization with the device.
  const auto to_device = [&](const torch::Tensor& tensor) { return tensor.to(device, true); };
  const bool is_padded = tokens < rows * length;
  return {to_device(ids), is_padded ? to_device(mask) : torch::Tensor(), to_device(labels), tokens};
}

}  // namespace bert_ner
