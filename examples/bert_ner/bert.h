/// \file
/// BERT (Devlin et al. 2018) with a token classifier. Parameters have the names of Hugging Face's
/// `BertForTokenClassification`.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace bert_ner {

namespace nn = torch::nn;

/// Registers `module` under a path, such as "attention.self.query". Creates modules on the path.
template <class Module>
Module register_path(nn::Module& parent, const std::string& path, Module module) {
  const auto dot = path.find('.');
  if (dot == std::string::npos) return parent.register_module(path, module);
  const auto first = path.substr(0, dot);
  if (!parent.named_children().contains(first)) {
    parent.register_module(first, std::make_shared<nn::Module>());
  }
  return register_path(*parent.named_children()[first], path.substr(dot + 1), module);
}

/// Scaled dot-product attention with a padding mask. Uses libtorch's fused attention on CUDA, and
/// on the CPU in float32 without dropout; on the CPU it is slower than separate ops in bfloat16,
/// and not faster with dropout (benchmarks/results/bert_ner.md).
inline torch::Tensor attend(const torch::Tensor& query, const torch::Tensor& key,
                            const torch::Tensor& value, const torch::Tensor& mask, double dropout) {
  if (query.is_cuda() || (dropout == 0 && query.scalar_type() == torch::kFloat32)) {
    const auto keep = mask.defined() ? std::make_optional(mask) : std::nullopt;
    return torch::scaled_dot_product_attention(query, key, value, keep, dropout);
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(query.size(-1)));
  auto scores = torch::matmul(query * scale, key.transpose(-1, -2));
  if (mask.defined()) {
    // No row is all padding, since each starts with [CLS], so the softmax has no 0/0.
    scores = scores.masked_fill(~mask, -std::numeric_limits<double>::infinity());
  }
  return torch::matmul(torch::dropout(torch::softmax(scores, -1), dropout, dropout > 0), value);
}

/// A transformer layer: attention and a feed-forward network, each followed by dropout, the
/// residual connection and a layer norm. \param config a Hugging Face `config.json`, validated by
/// check_config
struct BertLayerImpl : nn::Module {
  BertLayerImpl(const nlohmann::json& config, double dropout_rate)
      : heads(config.at("num_attention_heads")),
        activation(config.value("hidden_act", "gelu")),
        dropout(dropout_rate) {
    const int64_t hidden = config.at("hidden_size"),
                  intermediate_size = config.at("intermediate_size");
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_path(*this, name, nn::Linear(in, out));
    };
    const auto norm = [&](const char* name) {
      return register_path(
          *this, name,
          nn::LayerNorm(nn::LayerNormOptions({hidden}).eps(config.value("layer_norm_eps", 1e-12))));
    };
    query = linear("attention.self.query", hidden, hidden);
    key = linear("attention.self.key", hidden, hidden);
    value = linear("attention.self.value", hidden, hidden);
    attention_output = linear("attention.output.dense", hidden, hidden);
    attention_norm = norm("attention.output.LayerNorm");
    intermediate = linear("intermediate.dense", hidden, intermediate_size);
    output = linear("output.dense", intermediate_size, hidden);
    output_norm = norm("output.LayerNorm");
  }

  torch::Tensor forward(const torch::Tensor& hidden, const torch::Tensor& mask) {
    const auto split = [&](const torch::Tensor& x) {  // [batch, heads, length, size]
      return x.unflatten(-1, {heads, -1}).transpose(1, 2);
    };
    const auto apply_dropout = [&](const torch::Tensor& x) {
      return torch::dropout(x, dropout, is_training());
    };
    const auto context = attend(split(query(hidden)), split(key(hidden)), split(value(hidden)),
                                mask, is_training() ? dropout : 0.0);
    const auto attended = attention_norm(
        apply_dropout(attention_output(context.transpose(1, 2).flatten(2))) + hidden);
    const auto wide = intermediate(attended);
    const auto active = activation == "relu"
                            ? torch::relu(wide)
                            : torch::gelu(wide, activation == "gelu" ? "none" : "tanh");
    return output_norm(apply_dropout(output(active)) + attended);
  }

  int64_t heads;
  std::string activation;  ///< gelu, gelu_new, gelu_pytorch_tanh or relu
  double dropout;
  nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, attention_output{nullptr},
      intermediate{nullptr}, output{nullptr};
  nn::LayerNorm attention_norm{nullptr}, output_norm{nullptr};
};
TORCH_MODULE(BertLayer);

/// BERT with a token classifier. All tokens are in segment 0.
struct BertForTokenClassificationImpl : nn::Module {
  /// Initializes the classifier from normal(0, 0.02), and its bias with 0.
  BertForTokenClassificationImpl(const nlohmann::json& config, std::size_t labels,
                                 double dropout_rate)
      : dropout(dropout_rate) {
    const int64_t hidden = config.at("hidden_size");
    const auto table = [&](const std::string& name, const char* rows) {
      return register_path(*this, "bert.embeddings." + name + "_embeddings",
                           nn::Embedding(config.at(rows).get<int64_t>(), hidden));
    };
    words = table("word", "vocab_size");
    positions = table("position", "max_position_embeddings");
    segments = table("token_type", "type_vocab_size");
    norm = register_path(
        *this, "bert.embeddings.LayerNorm",
        nn::LayerNorm(nn::LayerNormOptions({hidden}).eps(config.value("layer_norm_eps", 1e-12))));
    for (int64_t i = 0; i < config.at("num_hidden_layers"); ++i) {
      layers.push_back(register_path(*this, "bert.encoder.layer." + std::to_string(i),
                                     BertLayer(config, dropout)));
    }
    classifier = register_module("classifier", nn::Linear(hidden, static_cast<int64_t>(labels)));
    nn::init::normal_(classifier->weight, 0.0, 0.02);
    nn::init::zeros_(classifier->bias);
  }

  /// \param ids token ids, int64 [batch, length], length <= max_position_embeddings
  /// \param mask bool [batch, length], false for padding; undefined without padding
  /// \returns logits [batch, length, labels]
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& mask) {
    const auto keep =
        mask.defined() ? mask.unsqueeze(1).unsqueeze(1) : mask;  // [batch, 1, 1, length]
    const auto position = positions->weight.narrow(0, 0, ids.size(1)) + segments->weight[0];
    auto hidden = torch::dropout(norm(words(ids) + position), dropout, is_training());
    // Autocast would cast float32 embeddings for each product, and keep each copy for backward.
    if (const auto type = hidden.device().type(); at::autocast::is_autocast_enabled(type)) {
      hidden = hidden.to(at::autocast::get_autocast_dtype(type));
    }
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
