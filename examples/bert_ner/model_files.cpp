#include "model_files.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ostream>
#include <set>
#include <span>
#include <utility>

#include "safetensors.h"
#include "text.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::array kTokenizerFiles = {"tokenizer.json", "tokenizer_config.json",
                                        "special_tokens_map.json"};

constexpr const char* kAdvice = "; are config.json and model.safetensors of the same model?";

/// Fields of config.json, checked.
struct ConfigReader {
  int64_t size(const char* name) const {
    const auto value = config.value(name, Json());
    const double number = value.is_number_integer() ? value.get<double>() : 0;
    if (number < 1 || number > std::exp2(31)) fail(name, "must be a whole number from 1 to 2^31");
    return value.get<int64_t>();
  }

  double number(const char* name, double fallback, int high) const {
    const auto value = config.value(name, Json(fallback));
    if (value.is_number() && value >= 0 && value <= high) return value.get<double>();
    fail(name, "must be a number from 0 to " + std::to_string(high));
  }

  std::string one_of(const char* name, const std::vector<std::string>& accepted) const {
    const auto value = config.value(name, Json(accepted.front()));
    const auto found =
        std::ranges::find(accepted, value.is_string() ? value.get<std::string>() : "");
    if (found != accepted.end()) return *found;
    fail(name, "must be one of: " + joined(accepted));
  }

  [[noreturn]] void fail(const char* name, const std::string& what) const {
    const auto value = config.value(name, Json());
    throw InputError(origin + ": \"" + name + "\" is " +
                     (value.is_null() ? "missing" : value.dump().substr(0, 60)) + "; it " + what);
  }

  const Json& config;
  std::string origin;
};

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

bool belongs_to_encoder(const std::string& name) {
  return name.starts_with("bert.embeddings.") || name.starts_with("bert.encoder.");
}

/// "a, b, c and 4 more"
std::string abridged(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  if (names.size() <= kShown) return joined(names);
  return joined(std::span(names).first(kShown)) + " and " + std::to_string(names.size() - kShown) +
         " more";
}

/// Copies one tensor of the file over `parameter`. \returns what does not fit, or nothing.
std::string copy_tensor(const std::string& name, const torch::Tensor& tensor,
                        torch::Tensor& parameter) {
  if (!tensor.is_floating_point()) {
    return c10::str(name, " is of dtype ", dtype_name(tensor.scalar_type()));
  }
  if (tensor.sizes() != parameter.sizes()) {
    return c10::str(name, " is ", tensor.sizes(), " where config.json makes it ",
                    parameter.sizes());
  }
  parameter.copy_(tensor);
  return {};
}

fs::path weights_file(const fs::path& folder) {
  const auto path = folder / "model.safetensors";
  if (fs::exists(path)) return path;
  throw InputError(path.string() +
                   ": no such file; point to a folder with config.json, vocab.txt and "
                   "model.safetensors. A pytorch_model.bin, or weights in several files, are "
                   "converted by `transformers`: AutoModel.from_pretrained(FOLDER)"
                   ".save_pretrained(OTHER, max_shard_size=\"50GB\")");
}

Json config_with_labels(Json config, const Labels& labels) {
  config["architectures"] = {"BertForTokenClassification"};
  Json id2label = Json::object(), label2id = Json::object();
  for (std::size_t i = 0; i < labels.size(); ++i) {
    id2label[std::to_string(i)] = labels.names()[i];
    label2id[labels.names()[i]] = i;
  }
  config["id2label"] = std::move(id2label);
  config["label2id"] = std::move(label2id);
  return config;
}

}  // namespace

ModelFiles read_model_files(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    throw InputError(folder.string() +
                     ": is not a folder; point to one with config.json, vocab.txt and "
                     "model.safetensors");
  }
  ModelFiles files{folder, read_json(folder / "config.json"), {}};
  if (!files.config.is_object()) {
    throw InputError((folder / "config.json").string() + ": must hold a JSON object");
  }
  files.texts["vocab.txt"] = read_file(folder / "vocab.txt");
  for (const char* name : kTokenizerFiles) {
    if (fs::exists(folder / name)) files.texts[name] = read_file(folder / name);
  }
  return files;
}

BertConfig bert_config_of(const ModelFiles& files) {
  const ConfigReader read{files.config, (files.folder / "config.json").string()};
  read.one_of("model_type", {"bert"});
  read.one_of("position_embedding_type", {"absolute"});
  BertConfig config;
  config.vocab_size = read.size("vocab_size");
  config.hidden_size = read.size("hidden_size");
  config.num_hidden_layers = read.size("num_hidden_layers");
  config.num_attention_heads = read.size("num_attention_heads");
  config.intermediate_size = read.size("intermediate_size");
  config.max_position_embeddings = read.size("max_position_embeddings");
  config.type_vocab_size = read.size("type_vocab_size");
  config.layer_norm_eps = read.number("layer_norm_eps", config.layer_norm_eps, 1);
  config.hidden_dropout = read.number("hidden_dropout_prob", config.hidden_dropout, 1);
  config.attention_dropout =
      read.number("attention_probs_dropout_prob", config.attention_dropout, 1);
  config.initializer_range = read.number("initializer_range", config.initializer_range, 10);
  config.hidden_act = read.one_of("hidden_act", {"gelu", "gelu_new", "gelu_pytorch_tanh", "relu"});
  constexpr int64_t kShortest = 3;
  if (config.max_position_embeddings < kShortest) {
    read.fail("max_position_embeddings", "must be 3 or more, for [CLS], a piece and [SEP]");
  }
  if (config.hidden_size % config.num_attention_heads != 0) {
    read.fail("hidden_size", "must be a multiple of num_attention_heads, " +
                                 std::to_string(config.num_attention_heads));
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
  const std::string origin = (files.folder / "config.json").string();
  const auto map = files.config.value("id2label", Json());
  std::vector<std::string> names;
  for (std::size_t i = 0; map.is_object() && i < map.size(); ++i) {
    const auto found = map.find(std::to_string(i));
    if (found == map.end() || !found->is_string()) break;
    names.push_back(found->get<std::string>());
  }
  if (names.empty() || names.size() != map.size()) {
    throw InputError(origin +
                     ": has no \"id2label\" with the labels 0, 1, 2, ...; point to a model "
                     "that was saved with --save");
  }
  return Labels(std::move(names));
}

void check_sizes(const BertConfig& config, const fs::path& folder) {
  const auto path = weights_file(folder);
  double found = 0;
  for (const auto& [name, tensor] : read_safetensors(path).tensors) {
    found += static_cast<double>(tensor.numel());
  }
  const auto hidden = static_cast<double>(config.hidden_size);
  const auto rows = static_cast<double>(config.vocab_size + config.max_position_embeddings +
                                        config.type_vocab_size);
  const auto layer = hidden * (4 * hidden + 2 * static_cast<double>(config.intermediate_size));
  const auto wanted = rows * hidden + static_cast<double>(config.num_hidden_layers) * layer;
  constexpr double kFew = 4;  // less than this, load_weights names the tensors that differ
  if (wanted <= kFew * found) return;
  throw InputError(path.string() +
                   formatted(": holds %.0f numbers, and the model of config.json "
                             "has %.0f in its matrices alone",
                             found, wanted) +
                   kAdvice);
}

std::vector<std::string> load_weights(BertForTokenClassification& model, const fs::path& folder,
                                      Head head) {
  const torch::NoGradGuard no_grad;
  const auto file = read_safetensors(weights_file(folder));
  auto parameters = model->named_parameters();
  std::vector<std::string> missing, misfits, unknown, other_heads;
  std::set<std::string> loaded;
  for (const auto& [given_name, tensor] : file.tensors) {
    const auto name = name_in_model(given_name);
    auto* parameter = parameters.find(name);
    const bool is_head = name.starts_with("classifier.");
    if (name == "bert.embeddings.position_ids") continue;  // 0, 1, 2, ...: carries nothing
    if (parameter == nullptr || (is_head && head == Head::fresh)) {
      (belongs_to_encoder(name) ? unknown : other_heads).push_back(given_name);
      continue;
    }
    if (auto misfit = copy_tensor(given_name, tensor, *parameter); !misfit.empty())
      misfits.push_back(misfit);
    loaded.insert(name);
  }
  for (const auto& parameter : parameters) {
    const bool wanted = head == Head::from_file || !parameter.key().starts_with("classifier.");
    if (wanted && !loaded.contains(parameter.key())) missing.push_back(parameter.key());
  }
  const std::string origin = (folder / "model.safetensors").string();
  if (!misfits.empty()) throw InputError(origin + ": " + abridged(misfits) + kAdvice);
  if (!missing.empty()) throw InputError(origin + ": lacks " + abridged(missing) + kAdvice);
  if (!unknown.empty()) {
    throw InputError(origin + ": has tensors that config.json does not provide for: " +
                     abridged(unknown) + kAdvice);
  }
  return other_heads;
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
  NamedTensors tensors;
  for (const auto& parameter : model->named_parameters()) {
    tensors.emplace_back(parameter.key(), parameter.value());
  }
  write_safetensors(folder / "model.safetensors", tensors, {{"format", "pt"}});
}

}  // namespace bert_ner
