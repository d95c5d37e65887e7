#include "bert.h"

#include <cmath>
#include <limits>

namespace bert_ner {
namespace {

namespace nn = torch::nn;

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

BertEmbeddingsImpl::BertEmbeddingsImpl(const BertConfig& config) {
  const auto table = [&](const char* name, int64_t rows) {
    return register_module(name, nn::Embedding(rows, config.hidden_size));
  };
  word_embeddings = table("word_embeddings", config.vocab_size);
  position_embeddings = table("position_embeddings", config.max_position_embeddings);
  token_type_embeddings = table("token_type_embeddings", config.type_vocab_size);
  layer_norm = register_module("LayerNorm", layer_norm_of(config));
  dropout = register_module("dropout", nn::Dropout(config.hidden_dropout));
}

torch::Tensor BertEmbeddingsImpl::forward(const torch::Tensor& ids) {
  const auto positions = position_embeddings->weight.narrow(0, 0, ids.size(1));
  const auto embedded =
      word_embeddings(ids) + (positions + token_type_embeddings->weight[0]).unsqueeze(0);
  return dropout(layer_norm(embedded));
}

BertSelfAttentionImpl::BertSelfAttentionImpl(const BertConfig& config)
    : heads(config.num_attention_heads), dropout(config.attention_dropout) {
  const auto linear = [&](const char* name) {
    return register_module(name, nn::Linear(config.hidden_size, config.hidden_size));
  };
  query = linear("query");
  key = linear("key");
  value = linear("value");
}

torch::Tensor BertSelfAttentionImpl::forward(const torch::Tensor& hidden,
                                             const torch::Tensor& mask) {
  const auto context =
      attend(split_heads(query(hidden), heads), split_heads(key(hidden), heads),
             split_heads(value(hidden), heads), mask, is_training() ? dropout : 0.0);
  return context.transpose(1, 2).flatten(2);
}

BertOutputImpl::BertOutputImpl(int64_t in_features, const BertConfig& config) {
  dense = register_module("dense", nn::Linear(in_features, config.hidden_size));
  dropout = register_module("dropout", nn::Dropout(config.hidden_dropout));
  layer_norm = register_module("LayerNorm", layer_norm_of(config));
}

torch::Tensor BertOutputImpl::forward(const torch::Tensor& hidden, const torch::Tensor& residual) {
  return layer_norm(dropout(dense(hidden)) + residual);
}

BertLayerImpl::BertLayerImpl(const BertConfig& config) : hidden_act(config.hidden_act) {
  // Hugging Face nests these: attention.self, attention.output, intermediate.dense.
  auto attention_block = register_module("attention", std::make_shared<nn::Module>());
  attention = attention_block->register_module("self", BertSelfAttention(config));
  attention_output =
      attention_block->register_module("output", BertOutput(config.hidden_size, config));
  auto intermediate_block = register_module("intermediate", std::make_shared<nn::Module>());
  intermediate = intermediate_block->register_module(
      "dense", nn::Linear(config.hidden_size, config.intermediate_size));
  output = register_module("output", BertOutput(config.intermediate_size, config));
}

torch::Tensor BertLayerImpl::forward(const torch::Tensor& hidden, const torch::Tensor& mask) {
  const auto attended = attention_output(attention(hidden, mask), hidden);
  return output(activate(intermediate(attended), hidden_act), attended);
}

BertModelImpl::BertModelImpl(const BertConfig& config) {
  embeddings = register_module("embeddings", BertEmbeddings(config));
  auto encoder = register_module("encoder", std::make_shared<nn::Module>());
  auto stack = encoder->register_module("layer", std::make_shared<nn::Module>());
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers.push_back(stack->register_module(std::to_string(i), BertLayer(config)));
  }
}

torch::Tensor BertModelImpl::forward(const torch::Tensor& ids, const torch::Tensor& mask) {
  const auto rows =
      mask.defined() ? mask.unsqueeze(1).unsqueeze(1) : mask;  // [batch, 1, 1, length]
  auto hidden = embeddings(ids);
  for (auto& layer : layers) hidden = layer(hidden, rows);
  return hidden;
}

BertForTokenClassificationImpl::BertForTokenClassificationImpl(const BertConfig& config,
                                                               int64_t num_labels) {
  bert = register_module("bert", BertModel(config));
  dropout = register_module("dropout", nn::Dropout(config.hidden_dropout));
  classifier = register_module("classifier", nn::Linear(config.hidden_size, num_labels));
  nn::init::normal_(classifier->weight, 0.0, config.initializer_range);
  nn::init::zeros_(classifier->bias);
}

torch::Tensor BertForTokenClassificationImpl::forward(const torch::Tensor& ids,
                                                      const torch::Tensor& mask) {
  return classifier(dropout(bert(ids, mask)));
}

}  // namespace bert_ner
