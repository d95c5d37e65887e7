#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

// A BERT-shaped encoder of torch::nn::Linear and torch::nn::Embedding modules; by default 22.6
// million parameters.
namespace bench {

inline constexpr int64_t kVocabulary = 30522;

struct EncoderSizes {
  int64_t vocabulary = kVocabulary;
  int64_t width = 384;
  int layers = 6;
  int64_t heads = 12;
  int64_t positions = 512;
};

struct LayerImpl : torch::nn::Module {
  int64_t heads;
  torch::nn::Linear query, key, value, project, up, down;
  torch::nn::LayerNorm first, second;

  explicit LayerImpl(const EncoderSizes& sizes)
      : heads(sizes.heads),
        query(sizes.width, sizes.width),
        key(sizes.width, sizes.width),
        value(sizes.width, sizes.width),
        project(sizes.width, sizes.width),
        up(sizes.width, 4 * sizes.width),
        down(4 * sizes.width, sizes.width),
        first(torch::nn::LayerNormOptions({sizes.width})),
        second(torch::nn::LayerNormOptions({sizes.width})) {
    int i = 0;
    for (auto& linear : {query, key, value, project, up, down}) {
      register_module("linear" + std::to_string(i++), linear);
    }
    register_module("first", first);
    register_module("second", second);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto split = [&](const torch::Tensor& h) {
      return h.view({h.size(0), h.size(1), heads, h.size(2) / heads}).transpose(1, 2);
    };
    const auto attended =
        torch::scaled_dot_product_attention(split(query(x)), split(key(x)), split(value(x)));
    const auto h = first(x + project(attended.transpose(1, 2).flatten(2)));
    return second(h + down(torch::gelu(up(h))));
  }
};
TORCH_MODULE(Layer);

struct EncoderImpl : torch::nn::Module {
  torch::nn::Embedding words, positions;
  torch::nn::Linear tagger;
  std::vector<Layer> layers;

  explicit EncoderImpl(const EncoderSizes& sizes = {})
      : words(sizes.vocabulary, sizes.width),
        positions(sizes.positions, sizes.width),
        tagger(sizes.width, 21) {
    register_module("words", words);
    register_module("positions", positions);
    register_module("tagger", tagger);
    for (int i = 0; i < sizes.layers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Layer(sizes)));
    }
  }

  void freeze(int first_layers) {
    for (auto& parameter : words->parameters()) parameter.set_requires_grad(false);
    for (auto& parameter : positions->parameters()) parameter.set_requires_grad(false);
    for (int i = 0; i < first_layers; ++i) {
      for (auto& parameter : layers[static_cast<std::size_t>(i)]->parameters()) {
        parameter.set_requires_grad(false);
      }
    }
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = words(tokens) + positions(torch::arange(tokens.size(1), tokens.device()));
    for (auto& layer : layers) x = layer(x);
    return tagger(x);
  }
};
TORCH_MODULE(Encoder);

}  // namespace bench
