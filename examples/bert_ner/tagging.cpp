#include "tagging.h"

#include <mezzo/autocast.h>

namespace bert_ner {

TagSequences tag_sentences(BertForTokenClassification& model, std::span<const Example> examples,
                           std::size_t sentences, const Labels& labels, Padding padding,
                           int64_t max_length, int64_t batch_size,
                           const mezzo::AutocastSetting& precision) {
  const torch::NoGradGuard no_grad;
  const mezzo::AutocastGuard autocast(precision);
  const auto device = model->parameters().front().device();
  model->eval();
  TagSequences by_example(examples.size());
  for (const auto& positions : length_sorted_batches(examples, batch_size)) {
    const auto batch = collate(examples, positions, padding, max_length, device);
    const auto answers = model(batch.ids, batch.mask).argmax(-1).cpu();
    const auto ids = answers.accessor<int64_t, 2>();
    for (std::size_t row = 0; row < positions.size(); ++row) {
      for (const auto piece : examples[positions[row]].first_pieces) {
        by_example[positions[row]].push_back(labels.name(ids[static_cast<int64_t>(row)][piece]));
      }
    }
  }
  TagSequences tags(sentences);  // the parts of a long sentence come together again
  for (std::size_t i = 0; i < examples.size(); ++i) {
    auto& whole = tags[examples[i].sentence];
    whole.insert(whole.end(), by_example[i].begin(), by_example[i].end());
  }
  return tags;
}

TagSequences tags_of(std::span<const Sentence> sentences) {
  TagSequences tags;
  for (const auto& sentence : sentences) tags.push_back(sentence.tags);
  return tags;
}

}  // namespace bert_ner
