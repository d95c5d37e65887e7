/// \file
/// Reads, checks and writes a model folder in Hugging Face's form: config.json, vocab.txt,
/// model.safetensors and the tokenizer's configuration.
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

/// A safetensors file has the length of a header, the header in JSON, and the bytes of all tensors.
inline constexpr int64_t kLengthBytes = 8;

/// Maps a file into memory (torch::from_file). The tensors are on the CPU, read the file when they
/// are used, and keep it mapped. \throws InputError naming the file and the tensor that is not
/// within it
inline std::map<std::string, torch::Tensor> read_safetensors(const fs::path& path) {
  const std::map<std::string, torch::ScalarType> dtypes{
      {"BOOL", torch::kBool},   {"F16", torch::kFloat16}, {"BF16", torch::kBFloat16},
      {"F32", torch::kFloat32}, {"F64", torch::kFloat64}, {"I64", torch::kInt64}};
  const std::string origin = path.string();
  std::error_code error;
  const auto size = static_cast<int64_t>(fs::file_size(path, error));  // -1 where there is none
  int64_t length = -1;
  torch::Tensor bytes;
  if (size > kLengthBytes) {
    bytes = torch::from_file(origin, /*shared=*/false, size, torch::kUInt8);
    std::memcpy(&length, bytes.const_data_ptr(), kLengthBytes);
  }
  if (length < 2 || length > size - kLengthBytes) {
    throw InputError(
        origin + ": is no safetensors file, or is cut off; convert a pickle with " +
        "safetensors.torch.save_file, and fetch a Git LFS pointer with `git lfs pull`");
  }
  const auto* const text = static_cast<const char*>(bytes.const_data_ptr()) + kLengthBytes;
  const auto header = parse_json({text, static_cast<std::size_t>(length)}, origin);
  const auto data = bytes.slice(0, kLengthBytes + length);
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    try {  // view refuses what is not in the file
      const auto [begin, end] = entry.at("data_offsets").get<std::pair<int64_t, int64_t>>();
      const auto dtype = dtypes.find(entry.at("dtype"));
      TORCH_CHECK(dtype != dtypes.end(), "has the dtype ", entry.at("dtype").dump(),
                  "; convert it to F32, F16 or BF16");
      auto tensor = data.slice(0, begin, end);
      // Files by other writers may have a header of any length.
      if (tensor.storage_offset() % c10::elementSize(dtype->second) != 0) tensor = tensor.clone();
      tensors[name] =
          tensor.view(dtype->second).view(entry.at("shape").get<std::vector<int64_t>>());
    } catch (const std::exception& refusal) {
      throw InputError(origin + ": \"" + name + "\" " + message_of(refusal));
    }
  }
  return tensors;
}

/// Writes the parameters of `module`, of float32 or bfloat16, by name. Replaces `path` as
/// write_file
/// does. \throws InputError if the system refuses
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

/// Checks the fields of a config.json that shape the model.
/// \throws InputError naming the field and what it may be
inline void check_config(const json& config, const std::string& origin) {
  const auto require = [&](bool is_good, const char* name, const std::string& what) {
    if (is_good) return;
    throw InputError(origin + ": \"" + name + "\" is " + config.value(name, json()).dump() +
                     "; it must be " + what);
  };
  if (!config.is_object()) throw InputError(origin + ": must hold a JSON object");
  const std::map<const char*, std::vector<std::string>> words{
      {"model_type", {"bert"}},
      {"position_embedding_type", {"absolute"}},
      {"hidden_act", {"gelu", "gelu_new", "gelu_pytorch_tanh", "relu"}}};
  for (const auto& [name, accepted] : words) {
    const auto value = config.value(name, json(accepted.front()));
    require(std::find(accepted.begin(), accepted.end(), value) != accepted.end(), name,
            "one of: " + json(accepted).dump());
  }
  for (const char* name : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                           "intermediate_size", "max_position_embeddings", "type_vocab_size"}) {
    const auto value = config.value(name, json());
    require(value.is_number_unsigned() && value >= 1 && value <= INT32_MAX, name,
            "a whole number from 1 to 2^31 - 1");
  }
  require(config["max_position_embeddings"] >= 3, "max_position_embeddings",
          "3 or more, for [CLS], a piece and [SEP]");
  const int64_t hidden = config["hidden_size"], heads = config["num_attention_heads"];
  require(hidden % heads == 0, "hidden_size", "a multiple of num_attention_heads");
}

/// The small files of a model folder, in memory, for the folders that --save writes.
struct ModelFiles {
  /// \throws InputError naming the file that is missing or cannot be read; and as check_config
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
  std::map<std::string, std::string> texts;  ///< all of them, by name
};

/// Returns the tokenizer. \throws InputError if its vocabulary is larger than the model's
inline WordPiece load_tokenizer(const ModelFiles& files) {
  WordPiece tokenizer(files.folder);
  if (tokenizer.size() <= files.config.at("vocab_size")) return tokenizer;
  throw InputError((files.folder / "vocab.txt").string() + ": has " +
                   std::to_string(tokenizer.size()) + " tokens, config.json's vocab_size is " +
                   files.config.at("vocab_size").dump() + "; are they of the same model?");
}

/// Returns the labels (`id2label`) of a folder that this example, or Hugging Face, saved.
/// \throws InputError if the folder holds no token classifier
inline std::vector<std::string> labels_of(const ModelFiles& files) {
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

/// Makes the configuration that of a token classifier with these labels.
inline void set_labels(ModelFiles& files, const std::vector<std::string>& labels) {
  files.config["architectures"] = {"BertForTokenClassification"};
  files.config["id2label"] = files.config["label2id"] = json::object();
  for (std::size_t i = 0; i < labels.size(); ++i) {
    files.config["id2label"][std::to_string(i)] = labels[i];
    files.config["label2id"][labels[i]] = i;
  }
  files.texts["config.json"] = files.config.dump(2) + "\n";
}

/// Whether the classifier's weights come from the file or keep their fresh start.
enum class Head { fresh, from_file };

/// Fills `model` from `folder/model.safetensors`. Names may carry the prefix `bert.` or not and may
/// end in the older `gamma` and `beta`; all floating-point dtypes are converted to float32. Tensors
/// of other heads (pooler, language model) are left out.
/// \throws InputError naming a tensor that is missing, unknown to the encoder, or misshapen
inline void load_weights(BertForTokenClassification& model, const fs::path& folder, Head head) {
  const torch::NoGradGuard no_grad;
  const auto path = folder / "model.safetensors";
  const auto require = [&](bool is_good, const std::string& what) {
    if (is_good) return;
    throw InputError(path.string() + ": " + what +
                     "; are config.json and model.safetensors of the same model?");
  };
  auto parameters = model->named_parameters();
  std::set<std::string> loaded;
  for (const auto& [given_name, tensor] : read_safetensors(path)) {
    std::string name = given_name;
    if (name.ends_with("LayerNorm.gamma")) name.replace(name.size() - 5, 5, "weight");
    if (name.ends_with("LayerNorm.beta")) name.replace(name.size() - 4, 4, "bias");
    if (name.starts_with("embeddings.") || name.starts_with("encoder.")) name.insert(0, "bert.");
    auto* const parameter = parameters.find(name);
    if (name.starts_with("classifier.") && head == Head::fresh) continue;
    if (name == "bert.embeddings.position_ids") continue;  // 0, 1, 2, ...: carries nothing
    if (parameter == nullptr) {
      require(!name.starts_with("bert.embeddings.") && !name.starts_with("bert.encoder."),
              "has " + given_name + ", which config.json does not provide for");
      continue;
    }
    require(tensor.sizes() == parameter->sizes() && tensor.is_floating_point(),
            c10::str(given_name, " is ", tensor.scalar_type(), " of ", tensor.sizes(),
                     " where config.json makes it floats of ", parameter->sizes()));
    parameter->copy_(tensor);
    loaded.insert(name);
  }
  for (const auto& name : parameters.keys()) {
    const bool is_fresh = head == Head::fresh && name.starts_with("classifier.");
    require(is_fresh || loaded.contains(name), "lacks " + name);
  }
}

/// Writes a folder that load_weights and Hugging Face's `from_pretrained` can read. `folder` must
/// exist. Replaces each file atomically.
inline void write_model_folder(const fs::path& folder, const ModelFiles& files,
                               const BertForTokenClassification& model) {
  for (const auto& [name, text] : files.texts) {
    write_file(folder / name, [&text = text](std::ostream& file) { file << text; });
  }
  write_safetensors(folder / "model.safetensors", *model);
}

}  // namespace bert_ner
