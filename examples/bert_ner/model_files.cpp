#include "model_files.h"

#include <algorithm>
#include <ostream>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "safetensors.h"
#include "text.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// The name that a tensor of the file has in our model; the older names of layer norms included.
std::string name_in_model(std::string name) {
  const auto replace_ending = [&](std::string_view from, std::string_view to) {
    if (name.ends_with(from)) name.replace(name.size() - from.size(), from.size(), to);
  };
  replace_ending("LayerNorm.gamma", "LayerNorm.weight");
  replace_ending("LayerNorm.beta", "LayerNorm.bias");
  if (name.starts_with("embeddings.") || name.starts_with("encoder.")) name.insert(0, "bert.");
  return name;
}

Json config_with_labels(Json config, const Labels& labels) {
  config["architectures"] = {"BertForTokenClassification"};
  config["id2label"] = config["label2id"] = Json::object();
  for (std::size_t i = 0; i < labels.size(); ++i) {
    config["id2label"][std::to_string(i)] = labels.names()[i];
    config["label2id"][labels.names()[i]] = i;
  }
  return config;
}

}  // namespace

ModelFiles read_model_files(const fs::path& folder) {
  const auto config = folder / "config.json";
  ModelFiles files{folder, parse_json(read_file(config), config.string()), {}};
  if (!files.config.is_object()) {
    throw InputError(config.string() + ": must hold a JSON object");
  }
  files.texts["vocab.txt"] = read_file(folder / "vocab.txt");
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}) {
    if (fs::exists(folder / name)) files.texts[name] = read_file(folder / name);
  }
  return files;
}

BertConfig bert_config_of(const ModelFiles& files) {
  const auto fail = [&](const char* name, const std::string& what) {
    throw InputError((files.folder / "config.json").string() + ": \"" + name + "\" is " +
                     files.config.value(name, Json()).dump() + "; it must be " + what);
  };
  const auto size = [&](const char* name) {
    const auto value = files.config.value(name, Json());
    if (!value.is_number_unsigned() || value < 1 || value > INT32_MAX) {
      fail(name, "a whole number from 1 to 2^31 - 1");
    }
    return value.get<int64_t>();
  };
  const auto one_of = [&](const char* name, const std::vector<std::string>& accepted) {
    const auto value = files.config.value(name, Json(accepted.front()));
    const auto found = std::find(accepted.begin(), accepted.end(), value);
    if (found == accepted.end()) fail(name, "one of: " + joined(accepted));
    return *found;
  };
  one_of("model_type", {"bert"});
  one_of("position_embedding_type", {"absolute"});
  BertConfig config{
      .vocab_size = size("vocab_size"),
      .hidden_size = size("hidden_size"),
      .num_hidden_layers = size("num_hidden_layers"),
      .num_attention_heads = size("num_attention_heads"),
      .intermediate_size = size("intermediate_size"),
      .max_position_embeddings = size("max_position_embeddings"),
      .type_vocab_size = size("type_vocab_size"),
      .layer_norm_eps = files.config.value("layer_norm_eps", 1e-12),
      .hidden_act = one_of("hidden_act", {"gelu", "gelu_new", "gelu_pytorch_tanh", "relu"})};
  if (config.max_position_embeddings < 3) {
    fail("max_position_embeddings", "3 or more, for [CLS], a piece and [SEP]");
  }
  if (config.hidden_size % config.num_attention_heads != 0) {
    fail("hidden_size", "a multiple of num_attention_heads");
  }
  return config;
}

WordPiece load_tokenizer(const ModelFiles& files, const BertConfig& config) {
  auto tokenizer = WordPiece::from_folder(files.folder);
  if (static_cast<int64_t>(tokenizer.size()) > config.vocab_size) {
    throw InputError((files.folder / "vocab.txt").string() + ": has " +
                     std::to_string(tokenizer.size()) + " tokens, config.json's vocab_size is " +
                     std::to_string(config.vocab_size) + "; are they of the same model?");
  }
  return tokenizer;
}

Labels labels_of(const ModelFiles& files) {
  const auto map = files.config.value("id2label", Json::object());
  std::vector<std::string> names;
  while (const auto* const name = map.contains(std::to_string(names.size()))
                                      ? &map.at(std::to_string(names.size()))
                                      : nullptr) {
    names.push_back(name->is_string() ? name->get<std::string>() : name->dump());
  }
  if (names.empty()) {
    throw InputError((files.folder / "config.json").string() +
                     ": has no \"id2label\" with the labels 0, 1, 2, ...; point to a model "
                     "that was saved with --save");
  }
  return Labels(std::move(names));
}

void load_weights(BertForTokenClassification& model, const fs::path& folder, Head head) {
  const torch::NoGradGuard no_grad;
  const auto path = folder / "model.safetensors";
  const auto fail = [&](const std::string& what) {
    throw InputError(path.string() + ": " + what +
                     "; are config.json and model.safetensors of the same model?");
  };
  auto parameters = model->named_parameters();
  std::set<std::string> loaded;
  for (const auto& [given_name, tensor] : read_safetensors(path)) {
    const auto name = name_in_model(given_name);
    auto* const parameter = parameters.find(name);
    if (name.starts_with("classifier.") && head == Head::fresh) continue;
    if (name == "bert.embeddings.position_ids") continue;  // 0, 1, 2, ...: carries nothing
    if (parameter == nullptr) {
      if (name.starts_with("bert.embeddings.") || name.starts_with("bert.encoder.")) {
        fail("has " + given_name + ", which config.json does not provide for");
      }
      continue;
    }
    if (tensor.sizes() != parameter->sizes() || !tensor.is_floating_point()) {
      fail(c10::str(given_name, " is ", tensor.scalar_type(), " of ", tensor.sizes(),
                    " where config.json makes it floats of ", parameter->sizes()));
    }
    parameter->copy_(tensor);
    loaded.insert(name);
  }
  for (const auto& parameter : parameters) {
    const bool wanted = head == Head::from_file || !parameter.key().starts_with("classifier.");
    if (wanted && !loaded.contains(parameter.key())) fail("lacks " + parameter.key());
  }
}

std::string text_of(const ModelFiles& files, const Labels& labels) {
  std::string text = config_with_labels(files.config, labels).dump();
  for (const auto& [name, content] : files.texts) text += "\n" + name + "\n" + content;
  return text;
}

void write_model_folder(const fs::path& folder, const ModelFiles& files,
                        const BertForTokenClassification& model, const Labels& labels) {
  auto texts = files.texts;
  texts["config.json"] = config_with_labels(files.config, labels).dump(2) + "\n";
  for (const auto& [name, text] : texts) {
    write_file(folder / name, [&text = text](std::ostream& file) { file << text; });
  }
  write_safetensors(folder / "model.safetensors", *model);
}

}  // namespace bert_ner
