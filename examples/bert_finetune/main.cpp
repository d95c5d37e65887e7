// Fine-tunes BERT for named-entity recognition in mixed precision, in one file.
//
//   bert_finetune MODEL DATA [OUT]
//
// MODEL is a Hugging Face directory of a BERT encoder (config.json, vocab.txt, model.safetensors).
// DATA has CoNLL columns: word TAB BIO tag, with an empty line between sentences; a fifth is held
// out for evaluation. OUT is a file for torch::load. MEZZO_MIXED_PRECISION=no|bf16|fp16|auto sets
// the precision. Tokenizes ASCII as BERT does; ../bert_ner supports Unicode.
#include <mezzo/checkpoint/safetensors.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

namespace nn = torch::nn;
using nlohmann::json;
using torch::Tensor;

// Registers a submodule under a Hugging Face name, which may have dots.
template <class Module>
Module register_path(nn::Module& parent, const std::string& path, Module module) {
  const auto dot = path.find('.');
  if (dot == std::string::npos) return parent.register_module(path, module);
  const std::string first = path.substr(0, dot);
  if (!parent.named_children().contains(first)) {
    parent.register_module(first, std::make_shared<nn::Module>());
  }
  return register_path(*parent.named_children()[first], path.substr(dot + 1), module);
}

struct LayerImpl : nn::Module {
  explicit LayerImpl(const json& config) : heads(config.at("num_attention_heads")) {
    const int64_t hidden = config.at("hidden_size"), inner = config.at("intermediate_size");
    const auto linear = [&](const std::string& name, int64_t in, int64_t out) {
      return register_path(*this, name, nn::Linear(in, out));
    };
    const auto norm = [&](const std::string& name) {
      const auto options = nn::LayerNormOptions({hidden}).eps(config.at("layer_norm_eps"));
      return register_path(*this, name + ".LayerNorm", nn::LayerNorm(options));
    };
    query = linear("attention.self.query", hidden, hidden);
    key = linear("attention.self.key", hidden, hidden);
    value = linear("attention.self.value", hidden, hidden);
    project = linear("attention.output.dense", hidden, hidden);
    attention_norm = norm("attention.output");
    widen = linear("intermediate.dense", hidden, inner);
    narrow = linear("output.dense", inner, hidden);
    output_norm = norm("output");
  }

  Tensor forward(const Tensor& x, const Tensor& is_word) {
    const auto split = [&](Tensor t) { return t.unflatten(-1, {heads, -1}).transpose(1, 2); };
    const Tensor context = torch::scaled_dot_product_attention(
        split(query(x)), split(key(x)), split(value(x)), /*attn_mask=*/is_word);
    const Tensor attended = attention_norm(project(context.transpose(1, 2).flatten(2)) + x);
    return output_norm(narrow(torch::gelu(widen(attended))) + attended);
  }

  int64_t heads;
  nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, project{nullptr}, widen{nullptr},
      narrow{nullptr};
  nn::LayerNorm attention_norm{nullptr}, output_norm{nullptr};
};
TORCH_MODULE(Layer);

struct TokenClassifierImpl : nn::Module {
  TokenClassifierImpl(const json& config, std::size_t labels) {
    const int64_t hidden = config.at("hidden_size");
    const auto table = [&](const std::string& name, int64_t rows) {
      return register_path(*this, "bert.embeddings." + name + "_embeddings",
                           nn::Embedding(rows, hidden));
    };
    words = table("word", config.at("vocab_size"));
    positions = table("position", config.at("max_position_embeddings"));
    segments = table("token_type", config.at("type_vocab_size"));
    norm = register_path(
        *this, "bert.embeddings.LayerNorm",
        nn::LayerNorm(nn::LayerNormOptions({hidden}).eps(config.at("layer_norm_eps"))));
    for (int i = 0; i < config.at("num_hidden_layers"); ++i) {
      layers.push_back(
          register_path(*this, "bert.encoder.layer." + std::to_string(i), Layer(config)));
    }
    classifier = register_module("classifier", nn::Linear(hidden, static_cast<int64_t>(labels)));
    nn::init::normal_(classifier->weight, 0.0, 0.02);
    nn::init::zeros_(classifier->bias);
  }

  /// \param ids int64 [batch, length], padded with 0
  /// \returns logits [batch, length, labels]
  Tensor forward(const Tensor& ids) {
    const Tensor is_word = ids.ne(0).unsqueeze(1).unsqueeze(1);
    const Tensor position = positions->weight.narrow(0, 0, ids.size(1)) + segments->weight[0];
    Tensor x = norm(words(ids) + position);
    for (Layer& layer : layers) x = layer(x, is_word);
    return classifier(x);
  }

  nn::Embedding words{nullptr}, positions{nullptr}, segments{nullptr};
  nn::LayerNorm norm{nullptr};
  std::vector<Layer> layers;
  nn::Linear classifier{nullptr};
};
TORCH_MODULE(TokenClassifier);

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, path, " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// Loads the encoder. A file of an encoder alone has names without "bert.".
void load_weights(nn::Module& model, const std::filesystem::path& path) {
  const auto tensors = mezzo::load_safetensors(path);
  const bool has_prefix = tensors.contains("bert.embeddings.word_embeddings.weight");
  const auto keys = mezzo::load_safetensors(model.named_children()["bert"], tensors,
                                            {.strict = false, .prefix = has_prefix ? "bert." : ""});
  TORCH_CHECK(keys.missing_keys.empty(), path, " lacks ", c10::Join(", ", keys.missing_keys));
}

// Splits a lower-cased word at punctuation, and into the longest pieces in the vocabulary
// (WordPiece).
using Vocabulary = std::unordered_map<std::string, int64_t>;
std::vector<int64_t> tokenize(const std::string& word, const Vocabulary& vocabulary) {
  std::vector<std::string> parts(1);
  for (const unsigned char c : word) {
    const bool is_punctuation = c < 0x80 && std::ispunct(c);
    if (is_punctuation) parts.emplace_back();
    parts.back() += static_cast<char>(c < 0x80 ? std::tolower(c) : c);
    if (is_punctuation) parts.emplace_back();
  }
  std::vector<int64_t> ids;
  for (const std::string& part : parts) {
    const std::size_t ids_before = ids.size();
    for (std::size_t begin = 0, length = 0; begin < part.size(); begin += length) {
      const auto piece = [&] { return (begin > 0 ? "##" : "") + part.substr(begin, length); };
      for (length = part.size() - begin; length > 0 && !vocabulary.contains(piece());) --length;
      if (length == 0) {  // no piece matches: the part is unknown
        ids.resize(ids_before);
        ids.push_back(vocabulary.at("[UNK]"));
        break;
      }
      ids.push_back(vocabulary.at(piece()));
    }
  }
  return ids.empty() ? std::vector{vocabulary.at("[UNK]")} : ids;
}

struct Example {
  std::vector<int64_t> ids, labels;  // the label of a word is at its first piece, -100 elsewhere
};
struct Batch {
  Tensor ids, labels;  // int64 [batch, length]
};

// Reads the sentences of a CoNLL file. A label is an index of `tags`, to which new tags are
// appended.
std::vector<Example> read_conll(const std::string& path, const Vocabulary& vocabulary,
                                std::size_t max_length, std::vector<std::string>& tags) {
  std::istringstream file(read_file(path) + "\n\n");
  std::vector<Example> sentences;
  bool is_inside = false;
  for (std::string line; std::getline(file, line);) {
    const auto tab = std::min(line.find('\t'), line.size());
    const std::string tag = line.substr(std::min(tab + 1, line.size()));
    if (tag.empty() && is_inside) sentences.back().ids.push_back(vocabulary.at("[SEP]"));
    if (!tag.empty() && !is_inside) sentences.push_back({{vocabulary.at("[CLS]")}, {-100}});
    if (is_inside = !tag.empty(); !is_inside) continue;
    TORCH_CHECK(tag == "O" || tag.starts_with("B-") || tag.starts_with("I-"), path, ": the tag ",
                tag, " is not O, B-type or I-type");
    auto& [ids, labels] = sentences.back();
    const auto pieces = tokenize(line.substr(0, tab), vocabulary);
    if (ids.size() + pieces.size() >= max_length) continue;
    if (std::find(tags.begin(), tags.end(), tag) == tags.end()) tags.push_back(tag);
    ids.insert(ids.end(), pieces.begin(), pieces.end());
    labels.push_back(std::find(tags.begin(), tags.end(), tag) - tags.begin());
    labels.resize(ids.size(), -100);
  }
  TORCH_CHECK(sentences.size() >= 5, path, " has ", sentences.size(),
              " sentences; expected at least 5");
  return sentences;
}

// Groups examples of similar length, and pads to multiples of 8: oneDNN prepares kernels per shape.
std::vector<Batch> make_batches(std::vector<Example> examples, std::size_t size,
                                at::Device device) {
  std::ranges::stable_sort(examples, {}, [](const Example& example) { return example.ids.size(); });
  std::vector<Batch> batches;
  for (std::size_t begin = 0; begin < examples.size(); begin += size) {
    const std::size_t end = std::min(begin + size, examples.size());
    const std::size_t length = (examples[end - 1].ids.size() + 7) / 8 * 8;
    std::vector<Tensor> ids, labels;
    for (std::size_t i = begin; i < end; ++i) {
      examples[i].ids.resize(length, 0);
      examples[i].labels.resize(length, -100);
      ids.push_back(torch::tensor(examples[i].ids));
      labels.push_back(torch::tensor(examples[i].labels));
    }
    batches.push_back({torch::stack(ids).to(device), torch::stack(labels).to(device)});
  }
  return batches;
}

// Returns the entities of a sentence (type, first word, end). I- only continues an entity of its
// type.
std::set<std::string> find_entities(const std::vector<std::string>& tags) {
  std::set<std::string> entities;
  for (std::size_t i = 0, end = 0; i < tags.size(); i = end) {
    end = i + 1;
    if (tags[i] == "O") continue;
    while (end < tags.size() && tags[end] == "I-" + tags[i].substr(2)) ++end;
    entities.insert(c10::str(tags[i].substr(2), " ", i, " ", end));
  }
  return entities;
}

double entity_f1(TokenClassifier& model, const std::vector<Batch>& batches,
                 const std::vector<std::string>& tags) {
  const torch::NoGradGuard no_grad;
  std::size_t correct = 0, all = 0;
  for (const Batch& batch : batches) {
    const Tensor predictions = model(batch.ids).argmax(-1).cpu(), labels = batch.labels.cpu();
    for (int64_t row = 0; row < labels.size(0); ++row) {
      std::vector<std::string> truth, predicted;
      for (int64_t i = 0; i < labels.size(1); ++i) {
        const auto label = labels[row][i].item<int64_t>(),
                   prediction = predictions[row][i].item<int64_t>();
        if (label < 0) continue;
        truth.push_back(tags[static_cast<std::size_t>(label)]);
        predicted.push_back(tags[static_cast<std::size_t>(prediction)]);
      }
      const auto a = find_entities(truth), b = find_entities(predicted);
      for (const auto& entity : b) correct += a.count(entity);
      all += a.size() + b.size();
    }
  }
  return all == 0 ? 0 : 2.0 * static_cast<double>(correct) / static_cast<double>(all);
}

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 3 || argc == 4, "usage: bert_finetune MODEL DATA [OUT]");
  torch::manual_seed(1);
  const std::filesystem::path directory = argv[1];
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const json config = json::parse(read_file(directory / "config.json"));
  Vocabulary vocabulary;
  std::istringstream pieces(read_file(directory / "vocab.txt"));
  for (std::string piece; std::getline(pieces, piece);)
    vocabulary.emplace(piece, vocabulary.size());

  std::vector<std::string> tags;
  auto sentences = read_conll(argv[2], vocabulary, config.at("max_position_embeddings"), tags);
  std::mt19937_64 generator(1);
  std::shuffle(sentences.begin(), sentences.end(), generator);
  const auto fifth = static_cast<std::ptrdiff_t>(sentences.size() / 5);
  const std::vector<Example> held_out(sentences.begin(), sentences.begin() + fifth);
  sentences.erase(sentences.begin(), sentences.begin() + fifth);
  auto batches = make_batches(std::move(sentences), /*size=*/8, device);
  std::shuffle(batches.begin(), batches.end(), generator);

  TokenClassifier model(config, tags.size());
  load_weights(*model, directory / "model.safetensors");
  model->to(device);
  const auto precision = mezzo::autocast_from_env(device, mezzo::recommended_autocast(device));
  std::printf("%s\n", precision.reason.c_str());
  mezzo::GradScaler scaler;
  mezzo::optim::AdamW optimizer(model->parameters(), 4e-4);
  mezzo::LinearSchedule schedule(optimizer, {.total_steps = static_cast<int64_t>(batches.size())});
  nn::CrossEntropyLoss criterion;  // ignores label -100
  Tensor loss_sum = torch::zeros({}, device);
  for (const Batch& batch : batches) {
    Tensor loss;
    {
      mezzo::AutocastGuard autocast(precision);  // forward and loss
      loss = criterion(model(batch.ids).flatten(0, 1), batch.labels.flatten());
    }
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});
    scaler.update();
    schedule.step(result);  // does not advance after a skipped step
    loss_sum += loss.detach();
  }
  std::printf("loss %.3f  F1 %.3f\n", loss_sum.item<double>() / static_cast<double>(batches.size()),
              entity_f1(model, make_batches(held_out, 8, device), tags));
  if (argc == 4) torch::save(model, argv[3]);
} catch (const c10::Error& error) {
  std::fprintf(stderr, "bert_finetune: %s\n", error.what_without_backtrace());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bert_finetune: %s\n", error.what());
  return 1;
}
