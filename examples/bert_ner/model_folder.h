/// \file
/// Reads and writes Hugging Face model directories: config.json, vocab.txt, model.safetensors and
/// the tokenizer's configuration.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bert.h"
#include "wordpiece.h"

namespace bert_ner {

/// Size of the header's length, with which a safetensors file begins; the JSON header and the bytes
/// of all tensors follow.
inline constexpr int64_t kLengthBytes = 8;

/// Maps a file into memory (torch::from_file). The CPU tensors keep it mapped, and read it when
/// they are
/// used. \throws InputError with the file and the tensor
inline std::map<std::string, torch::Tensor> read_safetensors(const fs::path& path) {
  const std::map<std::string, torch::ScalarType> dtypes{
      {"BOOL", torch::kBool},   {"F16", torch::kFloat16}, {"BF16", torch::kBFloat16},
      {"F32", torch::kFloat32}, {"F64", torch::kFloat64}, {"I64", torch::kInt64}};
  const std::string origin = path.string();
  std::error_code error;
  const auto size = static_cast<int64_t>(fs::file_size(path, error));  // -1 if it does not exist
  int64_t length = -1;
  torch::Tensor bytes;
  if (size > kLengthBytes) {
    bytes = torch::from_file(origin, /*shared=*/false, size, torch::kUInt8);
    std::memcpy(&length, bytes.const_data_ptr(), kLengthBytes);
  }
  if (length < 2 || length > size - kLengthBytes) {
    throw InputError(
        origin + ": is not a safetensors file, or is truncated; convert a pickle with " +
        "safetensors.torch.save_file, and fetch a Git LFS pointer with `git lfs pull`");
  }
  const auto* const text = static_cast<const char*>(bytes.const_data_ptr()) + kLengthBytes;
  const auto header = parse_json({text, static_cast<std::size_t>(length)}, origin);
  const auto data = bytes.slice(0, kLengthBytes + length);
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    try {  // view throws for bytes beyond the file
      const auto [begin, end] = entry.at("data_offsets").get<std::pair<int64_t, int64_t>>();
      const auto dtype = dtypes.find(entry.at("dtype"));
      TORCH_CHECK(dtype != dtypes.end(), "has the dtype ", entry.at("dtype").dump(),
                  "; convert it to F32, F16 or BF16");
      auto tensor = data.slice(0, begin, end);
      // Other writers do not align tensors.
      if (tensor.storage_offset() % c10::elementSize(dtype->second) != 0) tensor = tensor.clone();
      tensors[name] =
          tensor.view(dtype->second).view(entry.at("shape").get<std::vector<int64_t>>());
    } catch (const std::exception& error) {
      throw InputError(origin + ": \"" + name + "\" " + message_of(error));
    }
  }
  return tensors;
}

/// Writes the float32 or bfloat16 parameters of `module` by name, like write_file. \throws InputError if
/// the file cannot be written
inline void write_safetensors(const fs::path& path, const torch::nn::Module& module) {
  nlohmann::ordered_json entries{{"__metadata__", {{"format", "pt"}}}};
  std::vector<torch::Tensor> tensors;
  std::size_t offset = 0;
  for (const auto& parameter : module.named_parameters()) {
    const auto& tensor = tensors.emplace_back(parameter->detach().cpu().contiguous());
    entries[parameter.key()] = {{"dtype", tensor.scalar_type() == torch::kFloat32 ? "F32" : "BF16"},
                                {"shape", tensor.sizes().vec()},
                                {"data_offsets", {offset, offset + tensor.nbytes()}}};
    offset += tensor.nbytes();
  }
  std::string header = entries.dump();
  header.append((kLengthBytes - header.size() % kLengthBytes) % kLengthBytes, ' ');
  const uint64_t length = header.size();
  write_file(path, [&](std::ostream& file) {
    file.write(reinterpret_cast<const char*>(&length), sizeof length) << header;
    for (const auto& tensor : tensors) {
      file.write(static_cast<const char*>(tensor.const_data_ptr()),
                 static_cast<std::streamsize>(tensor.nbytes()));
    }
  });
}

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

/// Loads `model` from `folder/model.safetensors`. Names may have the prefix `bert.`, and the older
/// suffixes `gamma` and `beta`. Floating-point dtypes are converted to float32. Tensors of other
/// heads (pooler, language model) are ignored.
/// \throws InputError for a tensor that is missing, unexpected, or has another shape
inline void load_weights(BertForTokenClassification& model, const fs::path& folder, Head head) {
  const torch::NoGradGuard no_grad;
  const auto path = folder / "model.safetensors";
  const auto check = [&](bool is_valid, const std::string& what) {
    if (is_valid) return;
    throw InputError(path.string() + ": " + what +
                     "; are config.json and model.safetensors of the same model?");
  };
  auto parameters = model->named_parameters();
  std::set<std::string> loaded;
  for (const auto& [file_name, tensor] : read_safetensors(path)) {
    std::string name = file_name;
    if (name.ends_with("LayerNorm.gamma")) name.replace(name.size() - 5, 5, "weight");
    if (name.ends_with("LayerNorm.beta")) name.replace(name.size() - 4, 4, "bias");
    if (name.starts_with("embeddings.") || name.starts_with("encoder.")) name.insert(0, "bert.");
    auto* const parameter = parameters.find(name);
    if (name.starts_with("classifier.") && head == Head::initialized) continue;
    if (name == "bert.embeddings.position_ids") continue;  // always 0, 1, 2, ...
    if (parameter == nullptr) {
      check(!name.starts_with("bert.embeddings.") && !name.starts_with("bert.encoder."),
            "unexpected tensor " + file_name);
      continue;
    }
    check(tensor.sizes() == parameter->sizes() && tensor.is_floating_point(),
          c10::str(file_name, " is ", tensor.scalar_type(), " of ", tensor.sizes(),
                   "; according to config.json it has floats of ", parameter->sizes()));
    parameter->copy_(tensor);
    loaded.insert(name);
  }
  for (const auto& name : parameters.keys()) {
    const bool is_new_head = head == Head::initialized && name.starts_with("classifier.");
    check(is_new_head || loaded.contains(name), "missing tensor " + name);
  }
}

/// Writes a model directory for load_weights and Hugging Face's `from_pretrained`. `folder` must
/// exist. Replaces each file atomically.
inline void write_model_folder(const fs::path& folder, const ModelFiles& files,
                               const BertForTokenClassification& model) {
  for (const auto& [name, text] : files.texts) {
    write_file(folder / name, [&text = text](std::ostream& file) { file << text; });
  }
  write_safetensors(folder / "model.safetensors", *model);
}

}  // namespace bert_ner
