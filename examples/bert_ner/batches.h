/// \file
/// From sentences to padded batches of token ids.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
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
/// \param max_length the model's max_position_embeddings, at least 3
/// \throws std::out_of_range if a tag is not among the labels (load_dataset has checked that)
std::vector<Example> make_examples(std::span<const Sentence> sentences, const WordPiece& tokenizer,
                                   const Labels& labels, int64_t max_length);

/// Positions in a vector of examples; all lists together hold each position once.
using BatchList = std::vector<std::vector<std::size_t>>;

/// Batches of examples of similar length, so that little is padded; shortest first.
BatchList length_sorted_batches(std::span<const Example> examples, int64_t batch_size);

/// The order of the batches in one epoch, which depends on seed and epoch alone.
BatchList shuffled(const BatchList& batches, uint64_t seed, int64_t epoch);

struct Batch {
  torch::Tensor ids;     ///< int64 [batch, length]
  torch::Tensor mask;    ///< bool [batch, length], true where real; undefined if nothing is padded
  torch::Tensor labels;  ///< int64 [batch, length]
  int64_t tokens = 0;    ///< ids that are no padding
};

struct Padding {
  int64_t id;            ///< [PAD]
  int64_t multiple = 1;  ///< lengths are rounded up to it: tensor cores want 8, a CPU few lengths
};

/// Pads the examples to the longest among them, rounded up to `padding.multiple` but not beyond
/// `max_length`.
Batch collate(std::span<const Example> examples, std::span<const std::size_t> positions,
              Padding padding, int64_t max_length, torch::Device device);

}  // namespace bert_ner
