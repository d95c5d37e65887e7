/// \file
/// Tags words with a trained model, for scores and for `bert_ner predict`.
#pragma once

#include <mezzo/autocast/autocast_guard.h>

#include <torch/torch.h>

#include <iterator>
#include <ostream>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "batches.h"
#include "bert.h"
#include "machine.h"
#include "model_folder.h"

namespace bert_ner {

/// One list of BIO tags a sentence.
using TagSequences = std::vector<std::vector<std::string>>;

/// Returns the likeliest tag of each word of each sentence. Puts the model into evaluation mode.
/// \param examples as make_examples cut the sentences, `sentences` in number
inline TagSequences tag_sentences(BertForTokenClassification& model,
                                  std::span<const Example> examples, std::size_t sentences,
                                  const std::vector<std::string>& labels, int64_t pad,
                                  const mezzo::AutocastOptions& precision) {
  constexpr std::size_t kBatchSize = 32;
  const torch::NoGradGuard no_grad;
  const mezzo::AutocastGuard autocast(precision);
  const auto& positions = model->positions->weight;
  model->eval();
  TagSequences of_examples(examples.size());
  for (const auto& batch_positions : length_sorted_batches(examples, kBatchSize)) {
    const auto batch =
        collate(examples, batch_positions, pad, positions.size(0), positions.device());
    const auto best = model(batch.ids, batch.mask).argmax(-1).cpu();
    const auto ids = best.accessor<int64_t, 2>();
    for (std::size_t row = 0; row < batch_positions.size(); ++row) {
      for (const auto piece : examples[batch_positions[row]].first_pieces) {
        const auto id = ids[static_cast<int64_t>(row)][piece];
        of_examples[batch_positions[row]].push_back(labels.at(static_cast<std::size_t>(id)));
      }
    }
  }
  TagSequences tags(sentences);  // the parts of a long sentence come together again
  for (std::size_t i = 0; i < examples.size(); ++i) {
    auto& own = tags[examples[i].sentence];
    own.insert(own.end(), of_examples[i].begin(), of_examples[i].end());
  }
  return tags;
}

/// Entity-level scores: an entity counts if its type, first and last word are right.
struct Score {
  double precision = 0, recall = 0, f1 = 0;
};

/// Returns the micro average over all types: the values of seqeval's precision_score, recall_score
/// and f1_score in their default mode, which reads tags as conlleval does: only an I- of the same
/// type continues an entity. A ratio with a denominator of 0 is 0. Both have the same sentences
/// and words.
inline Score entity_scores(const TagSequences& truth, const TagSequences& predicted) {
  using Entity = std::tuple<std::string, std::size_t, std::size_t, std::size_t>;
  const auto entities_of = [](const TagSequences& sentences) {
    std::set<Entity> entities;  // type, sentence, first word, last word
    for (std::size_t i = 0; i < sentences.size(); ++i) {
      const auto& tags = sentences[i];
      for (std::size_t first = 0, next = 0; first < tags.size(); first = next) {
        next = first + 1;
        if (tags[first] == "O") continue;
        const auto type = tags[first].substr(2);
        while (next < tags.size() && tags[next] == "I-" + type) ++next;
        entities.emplace(type, i, first, next - 1);
      }
    }
    return entities;
  };
  const auto wanted = entities_of(truth), found = entities_of(predicted);
  const auto correct =
      std::ranges::count_if(found, [&](const Entity& entity) { return wanted.contains(entity); });
  const auto ratio = [](double part, double whole) { return whole == 0 ? 0. : part / whole; };
  const double precision = ratio(static_cast<double>(correct), static_cast<double>(found.size()));
  const double recall = ratio(static_cast<double>(correct), static_cast<double>(wanted.size()));
  return {precision, recall, ratio(2 * precision * recall, precision + recall)};
}

/// Writes "word TAB tag" lines, a blank line after each sentence, which read_conll takes back.
/// Words are what white space parts: put spaces around punctuation, as the corpora do. In the
/// precision of the amp rows on this device (see setting_for), whatever the model was
/// trained in. \throws InputError for a folder that holds no token classifier or text that is no
/// UTF-8
inline void predict(const Options& options, std::ostream& out) {
  const auto device = find_device(options.device);
  const ModelFiles files(options.saved);
  const auto labels = labels_of(files);
  const auto tokenizer = load_tokenizer(files);
  std::vector<Sentence> sentences;
  const auto take = [&](std::string_view line, const std::string& = {}) {
    std::istringstream words{std::string(line)};
    Sentence sentence{{std::istream_iterator<std::string>(words), {}}, {}};
    if (!sentence.words.empty()) sentences.push_back(std::move(sentence));
  };
  if (options.file.empty()) take(options.text, {});
  if (!options.file.empty()) for_each_line(options.file, take);
  if (sentences.empty()) {
    throw InputError((options.file.empty() ? "the text" : options.file) +
                     std::string(": has no words; give a sentence to label"));
  }
  BertForTokenClassification model(files.config, labels.size(), /*dropout=*/0);
  load_weights(model, files.folder, Head::from_file);
  model->to(device);
  const auto examples =
      make_examples(sentences, tokenizer, labels, files.config.at("max_position_embeddings"));
  const auto tags = tag_sentences(model, examples, sentences.size(), labels, tokenizer.pad,
                                  setting_for(precision_of("amp"), device));
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    for (std::size_t word = 0; word < sentences[i].words.size(); ++word) {
      out << sentences[i].words[word] << '\t' << tags[i][word] << '\n';
    }
    out << '\n';
  }
}

}  // namespace bert_ner
