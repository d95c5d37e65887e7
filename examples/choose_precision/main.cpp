// Which precision should this model use? Runs a small transformer in float32 and in each candidate,
// prints what they cost and what they get wrong, and saves the op policy of the proposal.
// Exits with 1 if the saved policy is not the proposed one.
#include <mezzo/diagnose/compare_precisions.h>

#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <vector>

namespace {

struct Batch {
  torch::Tensor tokens, labels;
};

struct Tagger : torch::nn::Module {
  torch::nn::Embedding embedding{64, 64};
  torch::nn::TransformerEncoder encoder{
      torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(64, 4).dim_feedforward(256).dropout(0.1)),
      2};
  torch::nn::Linear head{64, 5};

  Tagger() {
    register_module("embedding", embedding);
    register_module("encoder", encoder);
    register_module("head", head);
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    return head->forward(encoder->forward(embedding->forward(tokens)));
  }
};

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  Tagger model;
  model.to(device);

  std::vector<Batch> batches;
  for (int i = 0; i < 12; ++i) {
    const torch::Tensor tokens = torch::randint(64, {32, 16}, torch::kLong).to(device);
    batches.push_back({tokens, tokens.remainder(5)});
  }
  const auto loss = [](Tagger& tagger, const Batch& batch) {
    return torch::nn::functional::cross_entropy(tagger.forward(batch.tokens).flatten(0, 1),
                                                batch.labels.flatten());
  };

  const auto comparison = mezzo::compare_precisions(model, loss, batches);
  std::cout << comparison;

  const mezzo::PrecisionSetting& proposed = comparison.proposal().setting;
  std::ofstream("policy.txt") << proposed.policy;
  return mezzo::OpPolicy::from_file("policy.txt").edits() == proposed.policy.edits() ? 0 : 1;
}
