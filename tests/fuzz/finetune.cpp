#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wreturn-type"  // only the real `main` may end without a value
#pragma GCC diagnostic ignored "-Wsign-conversion"
#define main bert_finetune_main
#include "../../examples/bert_finetune/main.cpp"
#undef main
#pragma GCC diagnostic pop

#include "../support/scratch.h"
#include "targets.h"

namespace fuzz {

/// The readers of the example in one file: a vocabulary, CoNLL columns and a config.json, parted by
/// NUL, and a safetensors file. Its `main` tells of every std::exception.
void finetune(std::string_view bytes) {
  static const test_support::Scratch scratch;
  const auto words = take_until(bytes, '\0'), columns = take_until(bytes, '\0');
  const auto config = take_until(bytes, '\0');
  test_support::put_bytes(scratch.path() / "words.conll", std::string(columns));
  test_support::put_bytes(scratch.path() / "model.safetensors", std::string(bytes));
  Vocabulary vocabulary;
  std::istringstream pieces{std::string(words)};
  for (std::string piece; std::getline(pieces, piece);) {
    vocabulary.emplace(piece, vocabulary.size());
  }
  try {
    std::vector<std::string> tags;
    const auto path = (scratch.path() / "words.conll").string();
    const auto sentences = read_conll(path, vocabulary, 16, tags);
    for (const auto& sentence : sentences) {
      require(sentence.ids.size() == sentence.labels.size() + 1, "a piece has a label, [SEP] none");
    }
  } catch (const std::exception&) {
  }
  // A config.json may ask for any amount of memory here: it is the user's own model. So its sizes
  // are fixed, and what stands in the file is only whether it has them all.
  try {
    json fields = json::parse(config.empty() ? std::string_view("{}") : config);
    if (fields.is_object()) {
      for (const char* size :
           {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
            "vocab_size", "max_position_embeddings", "type_vocab_size"}) {
        if (fields.contains(size)) fields[size] = 2;
      }
    }
    TokenClassifier model(fields, 2);
    load_weights(*model, scratch.path() / "model.safetensors");
  } catch (const std::exception&) {
  }
}

}  // namespace fuzz
