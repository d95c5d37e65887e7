#include "tagging.h"

#include <mezzo/autocast/autocast.h>

#include <iterator>
#include <ostream>
#include <sstream>
#include <utility>

#include "machine.h"
#include "model_files.h"
#include "text.h"

namespace bert_ner {
namespace {

std::vector<Sentence> read_sentences(const PredictOptions& options) {
  std::vector<Sentence> sentences;
  const auto take = [&](std::string_view line, std::size_t number) {
    std::istringstream words{std::string(line)};
    Sentence sentence{{std::istream_iterator<std::string>(words), {}}, {}, number};
    if (!sentence.words.empty()) sentences.push_back(std::move(sentence));
  };
  if (options.file.empty()) {
    take(options.text, 1);
  } else {
    for_each_line(options.file, take);
  }
  if (sentences.empty()) {
    throw InputError((options.file.empty() ? "the text" : options.file) +
                     std::string(": has no words; give a sentence to label"));
  }
  return sentences;
}

}  // namespace

TagSequences tag_sentences(BertForTokenClassification& model, std::span<const Example> examples,
                           std::size_t sentences, const Labels& labels, Padding padding,
                           int64_t max_length, const mezzo::AutocastSetting& precision) {
  constexpr int64_t kBatchSize = 32;
  const torch::NoGradGuard no_grad;
  const mezzo::AutocastGuard autocast(precision);
  const auto device = model->parameters().front().device();
  model->eval();
  TagSequences of_examples(examples.size());
  for (const auto& positions : length_sorted_batches(examples, kBatchSize)) {
    const auto batch = collate(examples, positions, padding, max_length, device);
    const auto best = model(batch.ids, batch.mask).argmax(-1).cpu();
    const auto ids = best.accessor<int64_t, 2>();
    for (std::size_t row = 0; row < positions.size(); ++row) {
      for (const auto piece : examples[positions[row]].first_pieces) {
        const auto id = ids[static_cast<int64_t>(row)][piece];
        of_examples[positions[row]].push_back(labels.name(id));
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

void predict(const PredictOptions& options, std::ostream& out) {
  set_threads(options.threads);
  const auto device = find_device(options.device);
  const auto folder = std::filesystem::path(options.saved);
  const auto files = read_model_files(folder);
  const auto labels = labels_of(files);
  const auto config = bert_config_of(files);
  const auto tokenizer = load_tokenizer(files, config);
  const auto sentences = read_sentences(options);
  BertForTokenClassification model(config, static_cast<int64_t>(labels.size()));
  load_weights(model, folder, Head::from_file);
  model->to(device);

  const auto examples = make_examples(sentences, tokenizer, labels, config.max_position_embeddings);
  const auto tags =
      tag_sentences(model, examples, sentences.size(), labels, {tokenizer.pad_id()},
                    config.max_position_embeddings, setting_for(Precision::amp, device));
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    for (std::size_t word = 0; word < sentences[i].words.size(); ++word) {
      out << sentences[i].words[word] << '\t' << tags[i][word] << '\n';
    }
    out << '\n';
  }
}

}  // namespace bert_ner
