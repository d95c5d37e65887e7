#include "tagging.h"

#include <mezzo/autocast/autocast.h>

namespace bert_ner {
namespace {

/// Where each example's words begin if all stand in one row, and where the row ends.
std::vector<int64_t> first_words(std::span<const Example> examples) {
  std::vector<int64_t> begins{0};
  for (const auto& example : examples) {
    begins.push_back(begins.back() + static_cast<int64_t>(example.first_pieces.size()));
  }
  return begins;
}

}  // namespace

TagSequences tag_sentences(BertForTokenClassification& model, std::span<const Example> examples,
                           std::size_t sentences, const Labels& labels, Padding padding,
                           int64_t max_length, int64_t batch_size,
                           const mezzo::AutocastSetting& precision, const Ranks& ranks) {
  const torch::NoGradGuard no_grad;
  const mezzo::AutocastGuard autocast(precision);
  const auto device = model->parameters().front().device();
  model->eval();
  const auto begins = first_words(examples);
  const auto answers = torch::zeros({begins.back()}, torch::kInt64);  // one a word
  const auto batches = length_sorted_batches(examples, batch_size);
  const auto stride = static_cast<std::size_t>(ranks.size());
  for (auto i = static_cast<std::size_t>(ranks.rank()); i < batches.size(); i += stride) {
    const auto batch = collate(examples, batches[i], padding, max_length, device);
    const auto best = model(batch.ids, batch.mask).argmax(-1).cpu();
    const auto ids = best.accessor<int64_t, 2>();
    for (std::size_t row = 0; row < batches[i].size(); ++row) {
      const auto position = batches[i][row];
      auto* answer = answers.mutable_data_ptr<int64_t>() + begins[position];
      for (const auto piece : examples[position].first_pieces) {
        *answer++ = ids[static_cast<int64_t>(row)][piece];
      }
    }
  }
  const auto all = ranks.sum(answers);  // each rank has zeros for what others answered
  TagSequences tags(sentences);         // the parts of a long sentence come together again
  for (std::size_t i = 0; i < examples.size(); ++i) {
    for (auto word = begins[i]; word < begins[i + 1]; ++word) {
      tags[examples[i].sentence].push_back(labels.name(all.const_data_ptr<int64_t>()[word]));
    }
  }
  return tags;
}

TagSequences tags_of(std::span<const Sentence> sentences) {
  TagSequences tags;
  for (const auto& sentence : sentences) tags.push_back(sentence.tags);
  return tags;
}

}  // namespace bert_ner
