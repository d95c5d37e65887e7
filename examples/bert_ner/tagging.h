/// \file
/// Tags words with a trained model, for evaluation and for `bert_ner predict`.
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

/// BIO tags of each sentence.
using TagSequences = std::vector<std::vector<std::string>>;

/// Returns the most likely tag of each word. Switches the model to evaluation mode.
/// \param examples the result of make_examples for `sentences` sentences
inline TagSequences tag_sentences(BertForTokenClassification& model,
                                  std::span<const Example> examples, std::size_t sentences,
                                  const std::vector<std::string>& labels, int64_t pad,
                                  const mezzo::AutocastOptions& precision) {
  constexpr std::size_t kBatchSize = 32;
  const torch::NoGradGuard no_grad;
  const mezzo::AutocastGuard autocast(precision);
  const auto& positions = model->positions->weight;
  model->eval();
  TagSequences example_tags(examples.size());
  for (const auto& batch_positions : length_sorted_batches(examples, kBatchSize)) {
    const auto batch =
        collate(examples, batch_positions, pad, positions.size(0), positions.device());
    const auto predicted = model(batch.ids, batch.mask).argmax(-1).cpu();
    const auto ids = predicted.accessor<int64_t, 2>();
    for (std::size_t row = 0; row < batch_positions.size(); ++row) {
      for (const auto piece : examples[batch_positions[row]].first_pieces) {
        const auto id = ids[static_cast<int64_t>(row)][piece];
        example_tags[batch_positions[row]].push_back(labels.at(static_cast<std::size_t>(id)));
      }
    }
  }
  TagSequences tags(sentences);  // concatenates the parts of long sentences
  for (std::size_t i = 0; i < examples.size(); ++i) {
    auto& sentence_tags = tags[examples[i].sentence];
    sentence_tags.insert(sentence_tags.end(), example_tags[i].begin(), example_tags[i].end());
  }
  return tags;
}

/// Entity-level scores: an entity is correct if type, first and last word are.
struct Score {
  double precision = 0, recall = 0, f1 = 0;
};

/// Returns the micro average over all types, equal to seqeval's precision_score, recall_score and
/// f1_score in their default mode (conlleval): only an I- of the same type continues an entity. A
/// ratio with denominator 0 is 0. Both arguments have the same sentences and words.
inline Score entity_scores(const TagSequences& truth, const TagSequences& predicted) {
  using Entity = std::tuple<std::string, std::size_t, std::size_t, std::size_t>;
  const auto find_entities = [](const TagSequences& sentences) {
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
  const auto expected = find_entities(truth), found = find_entities(predicted);
  const auto correct =
      std::ranges::count_if(found, [&](const Entity& entity) { return expected.contains(entity); });
  const auto ratio = [](double part, double whole) { return whole == 0 ? 0. : part / whole; };
  const double precision = ratio(static_cast<double>(correct), static_cast<double>(found.size()));
  const double recall = ratio(static_cast<double>(correct), static_cast<double>(expected.size()));
  return {precision, recall, ratio(2 * precision * recall, precision + recall)};
}

/// Writes "word TAB tag" lines, with an empty line after each sentence, in the format of
/// read_conll. Words are separated by spaces: put spaces around punctuation. Uses the precision of
/// the amp rows on this
/// device (see make_autocast_options). \throws InputError for a directory without a token classifier, and
/// for invalid UTF-8
inline void predict(const Options& options, std::ostream& out) {
  const auto device = find_device(options.device);
  const ModelFiles files(options.saved);
  const auto labels = read_labels(files);
  const auto tokenizer = load_tokenizer(files);
  std::vector<Sentence> sentences;
  const auto add_sentence = [&](std::string_view line, const std::string& = {}) {
    std::istringstream words{std::string(line)};
    Sentence sentence{{std::istream_iterator<std::string>(words), {}}, {}};
    if (!sentence.words.empty()) sentences.push_back(std::move(sentence));
  };
  if (options.file.empty()) add_sentence(options.text, {});
  if (!options.file.empty()) for_each_line(options.file, add_sentence);
  if (sentences.empty()) {
    throw InputError((options.file.empty() ? "the text" : options.file) +
                     std::string(": has no words; pass a sentence"));
  }
  BertForTokenClassification model(files.config, labels.size(), /*dropout=*/0);
  load_weights(model, files.folder, Head::from_file);
  model->to(device);
  const auto examples =
      make_examples(sentences, tokenizer, labels, files.config.at("max_position_embeddings"));
  const auto tags = tag_sentences(model, examples, sentences.size(), labels, tokenizer.pad,
                                  make_autocast_options(find_precision("amp"), device));
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    for (std::size_t word = 0; word < sentences[i].words.size(); ++word) {
      out << sentences[i].words[word] << '\t' << tags[i][word] << '\n';
    }
    out << '\n';
  }
}

}  // namespace bert_ner
