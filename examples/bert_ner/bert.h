/// \file
/// BERT (Devlin et al. 2018) with a classifier over each token. Parameters have the names of
/// Hugging Face's `BertForTokenClassification`, so that its weights load by name.
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
  std::string hidden_act = "gelu";  ///< gelu, gelu_new, gelu_pytorch_tanh or relu
  double dropout = 0;               ///< between layers and in attention, of the run's options
};

/// A layer: attention of every token over the tokens that are no padding, then two linear layers.
/// Both halves end with dropout, the residual and a layer norm.
struct BertLayerImpl : torch::nn::Module {
  explicit BertLayerImpl(const BertConfig& config);
  torch::Tensor forward(const torch::Tensor& hidden, const torch::Tensor& mask);

  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, attention_output{nullptr},
      intermediate{nullptr}, output{nullptr};
  torch::nn::LayerNorm attention_norm{nullptr}, output_norm{nullptr};
  BertConfig config;
};
TORCH_MODULE(BertLayer);

/// The whole model. The segment of each token is 0.
struct BertForTokenClassificationImpl : torch::nn::Module {
  /// The classifier starts as normal(0, 0.02) from torch's generator, its bias at 0.
  BertForTokenClassificationImpl(const BertConfig& config, int64_t num_labels);

  /// \param ids token ids, int64 [batch, length], length <= max_position_embeddings
  /// \param mask true where a token is real, bool [batch, length]; undefined where nothing is
  ///   padded
  /// \returns logits [batch, length, num_labels]
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& mask = {});

  torch::nn::Embedding words{nullptr}, positions{nullptr}, segments{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  std::vector<BertLayer> layers;
  torch::nn::Linear classifier{nullptr};
  double dropout;
};
TORCH_MODULE(BertForTokenClassification);

}  // namespace bert_ner
