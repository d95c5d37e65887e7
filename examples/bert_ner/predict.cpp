#include "predict.h"

#include <algorithm>
#include <ostream>
#include <utility>

#include "batches.h"
#include "bert.h"
#include "conll.h"
#include "input_error.h"
#include "machine.h"
#include "model_files.h"
#include "tagging.h"
#include "text_lines.h"

namespace bert_ner {
namespace {

constexpr std::string_view kOpening = "\"'([{<";
constexpr std::string_view kClosing = "\"')]}>.,;:!?";

bool is_one_of(char c, std::string_view set) { return set.find(c) != std::string_view::npos; }

/// One stretch without white space. "..." and "?!" stay together, as one word.
void split_punctuation(std::string_view text, std::vector<std::string>& words) {
  while (text.size() > 1 && is_one_of(text.front(), kOpening)) {
    words.emplace_back(text.substr(0, 1));
    text.remove_prefix(1);
  }
  std::vector<std::string> after;
  while (text.size() > 1 && is_one_of(text.back(), kClosing)) {
    const char last = text.back();
    const auto begin =
        text.find_last_not_of(is_one_of(last, "!?") ? "!?" : std::string_view(&last, 1));
    if (begin == std::string_view::npos) break;  // nothing but these
    after.emplace_back(text.substr(begin + 1));
    text.remove_suffix(text.size() - begin - 1);
  }
  words.emplace_back(text);
  words.insert(words.end(), after.rbegin(), after.rend());
}

std::vector<Sentence> read_sentences(const PredictOptions& options) {
  std::vector<Sentence> sentences;
  const auto take = [&](std::string_view line, std::size_t number) {
    auto words = split_words(line);
    if (!words.empty()) sentences.push_back({std::move(words), {}, number});
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

std::vector<std::string> split_words(std::string_view sentence) {
  std::vector<std::string> words;
  for (std::size_t begin = 0;;) {
    begin = sentence.find_first_not_of(kWhiteSpace, begin);
    if (begin == std::string_view::npos) return words;
    const auto end = std::min(sentence.find_first_of(kWhiteSpace, begin), sentence.size());
    split_punctuation(sentence.substr(begin, end - begin), words);
    begin = end;
  }
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
  check_sizes(config, folder);
  BertForTokenClassification model(config, static_cast<int64_t>(labels.size()));
  load_weights(model, folder, Head::from_file);
  model->to(device);

  const auto examples = make_examples(sentences, tokenizer, labels, config.max_position_embeddings);
  const auto tags = tag_sentences(model, examples, sentences.size(), labels, {tokenizer.pad_id()},
                                  config.max_position_embeddings, options.batch_size,
                                  setting_for(Precision::amp, device));
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    for (std::size_t word = 0; word < sentences[i].words.size(); ++word) {
      out << sentences[i].words[word] << '\t' << tags[i][word] << '\n';
    }
    out << '\n';
  }
}

}  // namespace bert_ner
