/// \file
/// BERT (Devlin et al. 2018) with a classifier over each token, as libtorch modules. Module and
/// parameter names are those of Hugging Face's `BertForTokenClassification`, so that its weights
/// load by name.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace bert_ner {

/// The fields of a Hugging Face `config.json` that shape the model.
struct BertConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t intermediate_size = 0;
  int64_t max_position_embeddings = 0;
  int64_t type_vocab_size = 0;
  double layer_norm_eps = 1e-12;
  double hidden_dropout = 0.1;
  double attention_dropout = 0.1;
  double initializer_range = 0.02;
  std::string hidden_act = "gelu";  ///< gelu, gelu_new, gelu_pytorch_tanh or relu
};

/// Word, position and segment embeddings; the segment is always 0 here.
struct BertEmbeddingsImpl : torch::nn::Module {
  explicit BertEmbeddingsImpl(const BertConfig& config);
  torch::Tensor forward(const torch::Tensor& ids);

  torch::nn::Embedding word_embeddings{nullptr}, position_embeddings{nullptr},
      token_type_embeddings{nullptr};
  torch::nn::LayerNorm layer_norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(BertEmbeddings);

/// Multi-head attention of every token over the tokens that are no padding.
struct BertSelfAttentionImpl : torch::nn::Module {
  explicit BertSelfAttentionImpl(const BertConfig& config);
  torch::Tensor forward(const torch::Tensor& hidden, const torch::Tensor& mask);

  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr};
  int64_t heads;
  double dropout;
};
TORCH_MODULE(BertSelfAttention);

/// Linear, dropout, residual, layer norm: how both halves of a layer end.
struct BertOutputImpl : torch::nn::Module {
  BertOutputImpl(int64_t in_features, const BertConfig& config);
  torch::Tensor forward(const torch::Tensor& hidden, const torch::Tensor& residual);

  torch::nn::Linear dense{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::LayerNorm layer_norm{nullptr};
};
TORCH_MODULE(BertOutput);

struct BertLayerImpl : torch::nn::Module {
  explicit BertLayerImpl(const BertConfig& config);
  torch::Tensor forward(const torch::Tensor& hidden, const torch::Tensor& mask);

  BertSelfAttention attention{nullptr};
  BertOutput attention_output{nullptr};
  torch::nn::Linear intermediate{nullptr};
  BertOutput output{nullptr};
  std::string hidden_act;
};
TORCH_MODULE(BertLayer);

/// The encoder without a head.
struct BertModelImpl : torch::nn::Module {
  explicit BertModelImpl(const BertConfig& config);

  /// \param ids token ids, int64 [batch, length], length <= max_position_embeddings
  /// \param mask true where a token is real, bool [batch, length]; undefined where nothing is
  /// padded \returns hidden states [batch, length, hidden_size]
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& mask = {});

  BertEmbeddings embeddings{nullptr};
  std::vector<BertLayer> layers;
};
TORCH_MODULE(BertModel);

struct BertForTokenClassificationImpl : torch::nn::Module {
  /// The classifier starts as normal(0, initializer_range) from torch's generator, its bias at 0.
  BertForTokenClassificationImpl(const BertConfig& config, int64_t num_labels);

  /// As BertModel, then \returns logits [batch, length, num_labels].
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& mask = {});

  BertModel bert{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear classifier{nullptr};
};
TORCH_MODULE(BertForTokenClassification);

}  // namespace bert_ner
