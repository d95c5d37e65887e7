#include "bert.h"

#include <cmath>
#include <limits>

namespace bert_ner {
namespace {

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

nn::LayerNorm layer_norm_of(const BertConfig& config) {
  return nn::LayerNorm(nn::LayerNormOptions({config.hidden_size}).eps(config.layer_norm_eps));
}

torch::Tensor activate(const torch::Tensor& input, const std::string& name) {
  if (name == "relu") return torch::relu(input);
  return torch::gelu(input, name == "gelu" ? "none" : "tanh");
}

/// [batch, length, heads * size] -> [batch, heads, length, size]
torch::Tensor split_heads(const torch::Tensor& hidden, int64_t heads) {
  return hidden.unflatten(-1, {heads, -1}).transpose(1, 2);
}

/// libtorch's fused attention wins on CUDA, and on the CPU in float32 without dropout; on the CPU
/// it is slower than two products and a softmax in bfloat16, and no faster with dropout (README.md
/// has the numbers).
bool fused_attention_pays(const torch::Tensor& query, double dropout) {
  return query.is_cuda() || (dropout == 0 && query.scalar_type() == torch::kFloat32);
}

torch::Tensor attend(const torch::Tensor& query, const torch::Tensor& key,
                     const torch::Tensor& value, const torch::Tensor& mask, double dropout) {
  if (fused_attention_pays(query, dropout)) {
    const auto keep = mask.defined() ? std::make_optional(mask) : std::nullopt;
    return torch::scaled_dot_product_attention(query, key, value, keep, dropout);
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(query.size(-1)));
  auto scores = torch::matmul(query * scale, key.transpose(-1, -2));
  if (mask.defined()) {
    // No row is all padding (each starts with [CLS]), so -inf leaves no 0/0 in the softmax.
    scores = scores.masked_fill(~mask, -std::numeric_limits<double>::infinity());
  }
  const auto weights = torch::softmax(scores, -1);
  return torch::matmul(dropout > 0 ? torch::dropout(weights, dropout, /*train=*/true) : weights,
                       value);
}

}  // namespace

BertLayerImpl::BertLayerImpl(const BertConfig& model_config) : config(model_config) {
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return named(*this, name, nn::Linear(in, out));
  };
  const auto hidden = config.hidden_size;
  query = linear("attention.self.query", hidden, hidden);
  key = linear("attention.self.key", hidden, hidden);
  value = linear("attention.self.value", hidden, hidden);
  attention_output = linear("attention.output.dense", hidden, hidden);
  attention_norm = named(*this, "attention.output.LayerNorm", layer_norm_of(config));
  intermediate = linear("intermediate.dense", hidden, config.intermediate_size);
  output = linear("output.dense", config.intermediate_size, hidden);
  output_norm = named(*this, "output.LayerNorm", layer_norm_of(config));
}

torch::Tensor BertLayerImpl::forward(const torch::Tensor& hidden, const torch::Tensor& mask) {
  const auto heads = config.num_attention_heads;
  const auto dropped = [&](const torch::Tensor& x) {
    return torch::dropout(x, config.dropout, is_training());
  };
  const auto context =
      attend(split_heads(query(hidden), heads), split_heads(key(hidden), heads),
             split_heads(value(hidden), heads), mask, is_training() ? config.dropout : 0.0);
  const auto attended =
      attention_norm(dropped(attention_output(context.transpose(1, 2).flatten(2))) + hidden);
  const auto wide = activate(intermediate(attended), config.hidden_act);
  return output_norm(dropped(output(wide)) + attended);
}

BertForTokenClassificationImpl::BertForTokenClassificationImpl(const BertConfig& config,
                                                               int64_t num_labels)
    : dropout(config.dropout) {
  const auto table = [&](const std::string& name, int64_t rows) {
    return named(*this, "bert.embeddings." + name + "_embeddings",
                 nn::Embedding(rows, config.hidden_size));
  };
  words = table("word", config.vocab_size);
  positions = table("position", config.max_position_embeddings);
  segments = table("token_type", config.type_vocab_size);
  norm = named(*this, "bert.embeddings.LayerNorm", layer_norm_of(config));
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers.push_back(named(*this, "bert.encoder.layer." + std::to_string(i), BertLayer(config)));
  }
  classifier = register_module("classifier", nn::Linear(config.hidden_size, num_labels));
  nn::init::normal_(classifier->weight, 0.0, 0.02);
  nn::init::zeros_(classifier->bias);
}

torch::Tensor BertForTokenClassificationImpl::forward(const torch::Tensor& ids,
                                                      const torch::Tensor& mask) {
  const auto keep =
      mask.defined() ? mask.unsqueeze(1).unsqueeze(1) : mask;  // [batch, 1, 1, length]
  const auto place = positions->weight.narrow(0, 0, ids.size(1)) + segments->weight[0];
  auto hidden = torch::dropout(norm(words(ids) + place), dropout, is_training());
  for (auto& layer : layers) hidden = layer(hidden, keep);
  return classifier(torch::dropout(hidden, dropout, is_training()));
}

}  // namespace bert_ner
