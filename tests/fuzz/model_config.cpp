#include <string>

#include "../support/scratch.h"
#include "dataset.h"
#include "model_files.h"
#include "targets.h"
#include "text.h"

namespace fuzz {

/// config.json of a model folder, and behind a NUL a model.safetensors that is to fit it.
void model_config(std::string_view bytes) {
  static const test_support::Scratch scratch;
  const auto config_json = take_until(bytes, '\0');
  test_support::put_bytes(scratch.path() / "config.json", std::string(config_json));
  test_support::put_bytes(scratch.path() / "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n");
  test_support::put_bytes(scratch.path() / "model.safetensors", std::string(bytes));
  try {
    const auto files = bert_ner::read_model_files(scratch.path());
    try {
      require(bert_ner::labels_of(files).size() > 0, "a model that has labels has one");
    } catch (const bert_ner::InputError&) {
    }
    const auto config = bert_ner::bert_config_of(files);
    static_cast<void>(bert_ner::load_tokenizer(files, config));
    bert_ner::check_sizes(config, scratch.path());
    // What check_sizes lets pass is made and loaded: so its memory must be in proportion to the
    // file, whatever the numbers in config.json are.
    bert_ner::BertForTokenClassification model(config, 2);
    static_cast<void>(bert_ner::load_weights(model, scratch.path(), bert_ner::Head::fresh));
  } catch (const bert_ner::InputError&) {
  }
}

}  // namespace fuzz
