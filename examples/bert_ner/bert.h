/// \file
/// BERT (Devlin et al. 2018) with a classifier over each token. Parameters have the names of
/// Hugging Face's `BertForTokenClassification`, so that its weights load by name.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace bert_ner {

namespace nn = torch::nn;

/// Registers `module` under a path of names, "attention.self.query", making what is on the way.
template <class Module>
Module named(nn::Module& parent, const std::string& path, Module module) {
  const auto dot = path.find('.');
  if (dot == std::string::npos) return parent.register_module(path, module);
  const auto first = path.substr(0, dot);
  if (!parent.named_children().contains(first)) {
    parent.register_module(first, std::make_shared<nn::Module>());
  }
  return named(*parent.named_children()[first], path.substr(dot + 1), module);
}

/// Attention of every token over the tokens that `mask` keeps. libtorch's fused attention wins on
/// CUDA, and on the CPU in float32 without dropout; on the CPU it is slower than two products and a
/// softmax in bfloat16, and no faster with dropout (benchmarks/results/bert_ner.md).
inline torch::Tensor attend(const torch::Tensor& query, const torch::Tensor& key,
                            const torch::Tensor& value, const torch::Tensor& mask, double dropout) {
  if (query.is_cuda() || (dropout == 0 && query.scalar_type() == torch::kFloat32)) {
    const auto keep = mask.defined() ? std::make_optional(mask) : std::nullopt;
    return torch::scaled_dot_product_attention(query, key, value, keep, dropout);
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(query.size(-1)));
  auto scores = torch::matmul(query * scale, key.transpose(-1, -2));
  if (mask.defined()) {
    // No row is all padding (each starts with [CLS]), so -inf leaves no 0/0 in the softmax.
    scores = scores.masked_fill(~mask, -std::numeric_limits<double>::infinity());
  }
  return torch::matmul(torch::dropout(torch::softmax(scores, -1), dropout, dropout > 0), value);
}

/// A layer: attention, then two linear layers. Both halves end with dropout, the residual and a
/// layer norm. \param config a Hugging Face `config.json` that config_of has checked
struct BertLayerImpl : nn::Module {
  BertLayerImpl(const nlohmann::json& config, double dropout_rate)
      : heads(config.at("num_attention_heads")),
        activation(config.value("hidden_act", "gelu")),
        dropout(dropout_rate) {
    const int64_t hidden = config.at("hidden_size"), wide = config.at("intermediate_size");
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return named(*this, name, nn::Linear(in, out));
    };
    const auto norm = [&](const char* name) {
      return named(
          *this, name,
          nn::LayerNorm(nn::LayerNormOptions({hidden}).eps(config.value("layer_norm_eps", 1e-12))));
    };
    query = linear("attention.self.query", hidden, hidden);
    key = linear("attention.self.key", hidden, hidden);
    value = linear("attention.self.value", hidden, hidden);
    attention_output = linear("attention.output.dense", hidden, hidden);
    attention_norm = norm("attention.output.LayerNorm");
    intermediate = linear("intermediate.dense", hidden, wide);
    output = linear("output.dense", wide, hidden);
    output_norm = norm("output.LayerNorm");
  }

  torch::Tensor forward(const torch::Tensor& hidden, const torch::Tensor& mask) {
    const auto split = [&](const torch::Tensor& x) {  // [batch, heads, length, size]
      return x.unflatten(-1, {heads, -1}).transpose(1, 2);
    };
    const auto dropped = [&](const torch::Tensor& x) {
      return torch::dropout(x, dropout, is_training());
    };
    const auto context = attend(split(query(hidden)), split(key(hidden)), split(value(hidden)),
                                mask, is_training() ? dropout : 0.0);
    const auto attended =
        attention_norm(dropped(attention_output(context.transpose(1, 2).flatten(2))) + hidden);
    const auto wide = intermediate(attended);
    const auto active = activation == "relu"
                            ? torch::relu(wide)
                            : torch::gelu(wide, activation == "gelu" ? "none" : "tanh");
    return output_norm(dropped(output(active)) + attended);
  }

  int64_t heads;
  std::string activation;  ///< gelu, gelu_new, gelu_pytorch_tanh or relu
  double dropout;
  nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, attention_output{nullptr},
      intermediate{nullptr}, output{nullptr};
  nn::LayerNorm attention_norm{nullptr}, output_norm{nullptr};
};
TORCH_MODULE(BertLayer);

/// The whole model. The segment of each token is 0.
struct BertForTokenClassificationImpl : nn::Module {
  /// The classifier starts as normal(0, 0.02) from torch's generator, its bias at 0.
  BertForTokenClassificationImpl(const nlohmann::json& config, std::size_t labels,
                                 double dropout_rate)
      : dropout(dropout_rate) {
    const int64_t hidden = config.at("hidden_size");
    const auto table = [&](const std::string& name, const char* rows) {
      return named(*this, "bert.embeddings." + name + "_embeddings",
                   nn::Embedding(config.at(rows).get<int64_t>(), hidden));
    };
    words = table("word", "vocab_size");
    positions = table("position", "max_position_embeddings");
    segments = table("token_type", "type_vocab_size");
    norm = named(
        *this, "bert.embeddings.LayerNorm",
        nn::LayerNorm(nn::LayerNormOptions({hidden}).eps(config.value("layer_norm_eps", 1e-12))));
    for (int64_t i = 0; i < config.at("num_hidden_layers"); ++i) {
      layers.push_back(
          named(*this, "bert.encoder.layer." + std::to_string(i), BertLayer(config, dropout)));
    }
    classifier = register_module("classifier", nn::Linear(hidden, static_cast<int64_t>(labels)));
    nn::init::normal_(classifier->weight, 0.0, 0.02);
    nn::init::zeros_(classifier->bias);
  }

  /// \param ids token ids, int64 [batch, length], length <= max_position_embeddings
  /// \param mask true where a token is real, bool [batch, length]; undefined where nothing is
  ///   padded
  /// \returns logits [batch, length, labels]
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& mask) {
    const auto keep =
        mask.defined() ? mask.unsqueeze(1).unsqueeze(1) : mask;  // [batch, 1, 1, length]
    const auto place = positions->weight.narrow(0, 0, ids.size(1)) + segments->weight[0];
    auto hidden = torch::dropout(norm(words(ids) + place), dropout, is_training());
    for (auto& layer : layers) hidden = layer(hidden, keep);
    return classifier(torch::dropout(hidden, dropout, is_training()));
  }

  double dropout;
  nn::Embedding words{nullptr}, positions{nullptr}, segments{nullptr};
  nn::LayerNorm norm{nullptr};
  std::vector<BertLayer> layers;
  nn::Linear classifier{nullptr};
};
TORCH_MODULE(BertForTokenClassification);

}  // namespace bert_ner
