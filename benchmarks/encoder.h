#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

// A BERT-shaped encoder: 6 layers, 384 wide, 22.6 million parameters, of torch::nn::Linear and
// torch::nn::Embedding modules.
namespace bench {

inline constexpr int64_t kVocabulary = 30522;
inline constexpr int64_t kPositions = 512;
inline constexpr int64_t kWidth = 384;
inline constexpr int64_t kHeads = 12;
inline constexpr int kLayers = 6;

struct LayerImpl : torch::nn::Module {
  torch::nn::Linear query{kWidth, kWidth}, key{kWidth, kWidth}, value{kWidth, kWidth};
  torch::nn::Linear mix{kWidth, kWidth}, up{kWidth, 4 * kWidth}, down{4 * kWidth, kWidth};
  torch::nn::LayerNorm first{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::LayerNorm second{torch::nn::LayerNormOptions({kWidth})};

  LayerImpl() {
    int i = 0;
    for (auto& each : {query, key, value, mix, up, down}) {
      register_module("linear" + std::to_string(i++), each);
    }
    register_module("first", first);
    register_module("second", second);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto split = [&](const torch::Tensor& h) {
      return h.view({h.size(0), h.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    const auto attended =
        torch::scaled_dot_product_attention(split(query(x)), split(key(x)), split(value(x)));
    const auto h = first(x + mix(attended.transpose(1, 2).flatten(2)));
    return second(h + down(torch::gelu(up(h))));
  }
};
TORCH_MODULE(Layer);

struct EncoderImpl : torch::nn::Module {
  torch::nn::Embedding words{kVocabulary, kWidth}, positions{kPositions, kWidth};
  torch::nn::Linear tagger{kWidth, 21};
  std::vector<Layer> layers;

  EncoderImpl() {
    register_module("words", words);
    register_module("positions", positions);
    register_module("tagger", tagger);
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Layer()));
    }
  }

  void freeze(int first_layers) {
    for (auto& each : words->parameters()) each.set_requires_grad(false);
    for (auto& each : positions->parameters()) each.set_requires_grad(false);
    for (int i = 0; i < first_layers; ++i) {
      for (auto& each : layers[static_cast<std::size_t>(i)]->parameters()) {
        each.set_requires_grad(false);
      }
    }
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = words(tokens) + positions(torch::arange(tokens.size(1)));
    for (auto& layer : layers) x = layer(x);
    return tagger(x);
  }
};
TORCH_MODULE(Encoder);

}  // namespace bench
