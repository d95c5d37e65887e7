/// \file
/// Reads and writes Hugging Face model directories: config.json, vocab.txt, model.safetensors and
/// the tokenizer's configuration.
#pragma once

#include <mezzo/checkpoint/safetensors.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bert.h"
#include "wordpiece.h"

namespace bert_ner {

/// Validates the fields of config.json that the model uses.
/// \throws InputError with the field and its valid values
inline void check_config(const json& config, const std::string& origin) {
  const auto check = [&](bool is_valid, const char* name, const std::string& what) {
    if (is_valid) return;
    throw InputError(origin + ": \"" + name + "\" is " + config.value(name, json()).dump() +
                     "; it must be " + what);
  };
  if (!config.is_object()) throw InputError(origin + ": must be a JSON object");
  const std::map<const char*, std::vector<std::string>> names{
      {"model_type", {"bert"}},
      {"position_embedding_type", {"absolute"}},
      {"hidden_act", {"gelu", "gelu_new", "gelu_pytorch_tanh", "relu"}}};
  for (const auto& [name, accepted] : names) {
    const auto value = config.value(name, json(accepted.front()));
    check(std::find(accepted.begin(), accepted.end(), value) != accepted.end(), name,
          "one of: " + json(accepted).dump());
  }
  for (const char* name : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                           "intermediate_size", "max_position_embeddings", "type_vocab_size"}) {
    const auto value = config.value(name, json());
    check(value.is_number_unsigned() && value >= 1 && value <= INT32_MAX, name,
          "a whole number from 1 to 2^31 - 1");
  }
  check(config["max_position_embeddings"] >= 3, "max_position_embeddings",
        "3 or more, for [CLS], a piece and [SEP]");
  const int64_t hidden = config["hidden_size"], heads = config["num_attention_heads"];
  check(hidden % heads == 0, "hidden_size", "a multiple of num_attention_heads");
}

/// The contents of a model directory without weights, for directories that --save writes.
struct ModelFiles {
  /// \throws InputError for a file that cannot be read, and like check_config
  explicit ModelFiles(fs::path from) : folder(std::move(from)) {
    for (const char* name : {"config.json", "vocab.txt"}) texts[name] = read_file(folder / name);
    for (const char* name :
         {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}) {
      if (fs::exists(folder / name)) texts[name] = read_file(folder / name);
    }
    const auto origin = (folder / "config.json").string();
    config = parse_json(texts["config.json"], origin);
    check_config(config, origin);
  }

  fs::path folder;
  json config;                               ///< config.json
  std::map<std::string, std::string> texts;  ///< of all files, by name
};

/// Returns the tokenizer. \throws InputError if its vocabulary is larger than the model's
inline WordPiece load_tokenizer(const ModelFiles& files) {
  WordPiece tokenizer(files.folder);
  if (tokenizer.size() <= files.config.at("vocab_size")) return tokenizer;
  throw InputError((files.folder / "vocab.txt").string() + ": has " +
                   std::to_string(tokenizer.size()) + " tokens, config.json's vocab_size is " +
                   files.config.at("vocab_size").dump() + "; are they of the same model?");
}

/// Returns the labels (`id2label`) of a token classifier.
/// \throws InputError if there are none
inline std::vector<std::string> read_labels(const ModelFiles& files) {
  const auto map = files.config.value("id2label", std::map<std::string, std::string>());
  std::vector<std::string> names;
  while (map.contains(std::to_string(names.size()))) {
    names.push_back(map.at(std::to_string(names.size())));
  }
  if (!names.empty()) return names;
  throw InputError((files.folder / "config.json").string() +
                   ": has no \"id2label\" with the labels 0, 1, 2, ...; point to a model that was "
                   "saved with --save");
}

/// Changes the configuration to a token classifier with these labels.
inline void set_labels(ModelFiles& files, const std::vector<std::string>& labels) {
  files.config["architectures"] = {"BertForTokenClassification"};
  files.config["id2label"] = files.config["label2id"] = json::object();
  for (std::size_t i = 0; i < labels.size(); ++i) {
    files.config["id2label"][std::to_string(i)] = labels[i];
    files.config["label2id"][labels[i]] = i;
  }
  files.texts["config.json"] = files.config.dump(2) + "\n";
}

/// Whether the classifier's weights are initialized or loaded.
enum class Head { initialized, from_file };

/// Loads `model` from `folder/model.safetensors`. Names may lack the prefix `bert.`, and may have
/// the older suffixes `gamma` and `beta`. Tensors are converted to float32. Those of other heads
/// (pooler, language model) are ignored.
/// \throws InputError for a tensor that is missing, unexpected, or has another shape
inline void load_weights(BertForTokenClassification& model, const fs::path& folder, Head head) {
  const auto path = folder / "model.safetensors";
  mezzo::TensorDict tensors;
  for (const auto& [file_name, tensor] : mezzo::load_safetensors(path)) {
    std::string name = file_name;
    if (name.ends_with("LayerNorm.gamma")) name.replace(name.size() - 5, 5, "weight");
    if (name.ends_with("LayerNorm.beta")) name.replace(name.size() - 4, 4, "bias");
    if (name.starts_with("embeddings.") || name.starts_with("encoder.")) name.insert(0, "bert.");
    const bool is_used = name.starts_with("bert.embeddings.") ||
                         name.starts_with("bert.encoder.") || name.starts_with("classifier.");
    // The positions are always 0, 1, 2, ...
    if (is_used && name != "bert.embeddings.position_ids") tensors[name] = tensor;
  }
  try {
    if (head == Head::from_file) {
      mezzo::load_safetensors(model, tensors);
    } else {
      mezzo::load_safetensors(model->named_children()["bert"], tensors, {.prefix = "bert."});
    }
  } catch (const c10::Error& error) {
    throw InputError(path.string() + ": " + message_of(error) +
                     "; are config.json and model.safetensors of the same model?");
  }
}

/// Writes a model directory for load_weights and Hugging Face's `from_pretrained`. `folder` must
/// exist. Replaces each file atomically.
inline void write_model_folder(const fs::path& folder, const ModelFiles& files,
                               const BertForTokenClassification& model) {
  for (const auto& [name, text] : files.texts) {
    write_file(folder / name, [&text = text](std::ostream& file) { file << text; });
  }
  mezzo::save_safetensors(model, folder / "model.safetensors");
}

}  // namespace bert_ner
