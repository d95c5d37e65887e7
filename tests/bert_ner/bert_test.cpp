#include "bert.h"

#include <gtest/gtest.h>

#include "text.h"
#include "tiny_bert.h"

namespace bert_ner {
namespace {

using test::load_tiny_bert;

/// What Hugging Face's model answers (make_bert_expectation.py).
class Bert : public testing::Test {
 protected:
  torch::Tensor expected(const std::string& name) const { return file_.find(name); }

  Safetensors file_ = read_safetensors(test::data_folder() / "tiny_bert_expectation.safetensors");
  BertForTokenClassification model_ = load_tiny_bert();
};

double largest_difference(const torch::Tensor& a, const torch::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST_F(Bert, AnswersAsHuggingFaceDoesOnPaddedBatches) {
  const auto mask = expected("mask");
  const auto logits = model_(expected("ids"), mask);
  const auto real = mask.unsqueeze(-1);  // what stands on padding is nobody's business
  EXPECT_LT(largest_difference(logits * real, expected("logits") * real), 1e-5);
}

TEST_F(Bert, HasTheGradientsOfHuggingFace) {
  const auto logits = model_(expected("ids"), expected("mask"));
  const auto loss = torch::nn::functional::cross_entropy(
      logits.flatten(0, 1), expected("labels").flatten(),
      torch::nn::functional::CrossEntropyFuncOptions().ignore_index(-100));
  EXPECT_NEAR(loss.item<double>(), expected("loss").item<double>(), 1e-5);
  loss.backward();
  for (const auto& parameter : model_->named_parameters()) {
    const auto reference = expected("grad." + parameter.key());
    EXPECT_LT(largest_difference(parameter.value().grad(), reference), 2e-5) << parameter.key();
  }
}

TEST_F(Bert, BothKindsOfAttentionAgree) {
  // In training without dropout the fused kernel is taken; an infinitesimal dropout takes the
  // other.
  const auto files = read_model_files(test::tiny_bert_folder());
  auto config = bert_config_of(files);
  config.hidden_dropout = 0;
  config.attention_dropout = 1e-30;
  BertForTokenClassification explicit_attention(config, 5);
  load_weights(explicit_attention, test::tiny_bert_folder(), Head::from_file);
  explicit_attention->train();
  const auto real = expected("mask").unsqueeze(-1);
  const auto a = model_(expected("ids"), expected("mask"));
  const auto b = explicit_attention(expected("ids"), expected("mask"));
  EXPECT_LT(largest_difference(a * real, b * real), 1e-5);
}

}  // namespace
}  // namespace bert_ner
