#include "training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "tiny_bert.h"

namespace bert_ner {
namespace {

using testing::Pointwise;

/// A trainer of the tiny model on a handful of sentences.
struct TinyTraining {
  explicit TinyTraining(TrainingOptions training_options,
                        mezzo::AutocastSetting precision = {.device = torch::kCPU,
                                                            .enabled = false},
                        std::vector<double> class_weights = std::vector<double>(5, 1.0))
      : options(training_options) {
    at::set_num_threads(1);  // more cost more than they gain on so small a model
    const auto files = read_model_files(test::tiny_bert_folder());
    const auto tokenizer = load_tokenizer(files, bert_config_of(files));
    const auto corpus = test::write_tiny_corpus(scratch, "corpus.txt", 24);
    const Labels labels({"O", "B-person", "I-person", "B-place", "I-place"});
    examples = make_examples(read_conll(corpus), tokenizer, labels, 20);
    batches = length_sorted_batches(examples, options.batch_size);
    auto config = bert_config_of(files);
    config.hidden_dropout = config.attention_dropout = options.dropout;
    torch::manual_seed(options.seed);
    BertForTokenClassification model(config, 5);
    load_weights(model, test::tiny_bert_folder(), Head::fresh);
    trainer = std::make_unique<Trainer>(model, options, precision, class_weights,
                                        steps_per_epoch(batches.size(), options.accumulate));
    trainer->scaler.on_skip(nullptr);
  }

  /// Trains all epochs. \returns the loss of each step
  std::vector<double> train() {
    std::vector<double> losses;
    while (trainer->position.epoch < options.epochs) {
      trainer->train_epoch(examples, batches, {0}, 20, [&](const StepReport& report) {
        losses.push_back(report.loss.item<double>());
        reports.push_back(report);
        return true;
      });
    }
    return losses;
  }

  test_support::Scratch scratch;
  TrainingOptions options;
  std::vector<Example> examples;
  BatchList batches;
  std::unique_ptr<Trainer> trainer;
  std::vector<StepReport> reports;
};

TrainingOptions tiny_options(Precision precision) {
  TrainingOptions options;
  options.precision = precision;
  options.learning_rate = 1e-2;
  options.epochs = 6;
  options.batch_size = 4;
  return options;
}

TEST(Training, LearnsInEveryPrecision) {
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kFloat16}) {
    const bool low = dtype != torch::kFloat32;
    TinyTraining run(
        tiny_options(low ? Precision::amp : Precision::fp32),
        {.device = torch::kCPU, .dtype = low ? dtype : torch::kBFloat16, .enabled = low});
    const auto losses = run.train();
    ASSERT_EQ(losses.size(), 36U);
    EXPECT_GT(losses.front(), 1.0) << dtype;
    EXPECT_LT(losses.back(), 0.6) << dtype;
  }
}

TEST(Training, LearnsWithParametersOfBfloat16) {
  for (const auto precision : {Precision::bf16_split_master, Precision::bf16_stochastic}) {
    TinyTraining run(tiny_options(precision));
    EXPECT_EQ(run.trainer->model->classifier->weight.scalar_type(), torch::kBFloat16);
    const auto losses = run.train();
    EXPECT_GT(losses.front(), 1.0) << flag_of(precision);
    EXPECT_LT(losses.back(), 0.6) << flag_of(precision);
  }
}

TEST(Training, HoldsWhatEachPrecisionNeedsForAParameter) {
  const auto bytes_of = [](Precision precision, bool autocast) {
    auto options = tiny_options(precision);
    options.epochs = 1;
    TinyTraining run(options, {.device = torch::kCPU, .enabled = autocast});
    run.train();
    return run.trainer->bytes_a_parameter();
  };
  EXPECT_EQ(bytes_of(Precision::fp32, false), 16);
  EXPECT_EQ(bytes_of(Precision::bf16_split_master, false), 14);
  EXPECT_EQ(bytes_of(Precision::bf16_stochastic, false), 8);
  EXPECT_EQ(bytes_of(Precision::amp, true), 16);
  EXPECT_EQ(bytes_of(Precision::amp_8bit, true), 16);  // matrices of fewer than 4,096 elements
}

TEST(Training, AccumulationIsTheStepOfTheWholeBatch) {
  // Equal numbers of words in all micro-batches make the mean of means the mean of all.
  auto options = tiny_options(Precision::fp32);
  options.epochs = 1;
  TinyTraining whole(options);
  options.batch_size = 1;
  options.accumulate = 4;
  TinyTraining parts(options);
  for (auto* run : {&whole, &parts}) {
    for (auto& example : run->examples) example = run->examples.front();
  }
  EXPECT_THAT(parts.train(), Pointwise(testing::DoubleNear(1e-5), whole.train()));
  const auto expected = whole.trainer->model->named_parameters();
  for (const auto& parameter : parts.trainer->model->named_parameters()) {
    // A key's bias moves all scores of a query alike: its gradient is rounding, blown up by Adam.
    if (parameter.key().ends_with("key.bias")) continue;
    EXPECT_TRUE(torch::allclose(parameter.value(), expected[parameter.key()], 1e-3, 1e-4))
        << parameter.key();
  }
}

TEST(Training, ClassWeightsChangeWhatCounts) {
  auto options = tiny_options(Precision::fp32);
  options.epochs = 1;
  TinyTraining even(options);
  TinyTraining heavy(options, {.device = torch::kCPU, .enabled = false}, {100, 1, 1, 1, 1});
  even.train();
  heavy.train();
  const auto outside = [](Trainer& trainer) {
    return trainer.model->classifier->bias[0].item<double>();
  };
  EXPECT_GT(outside(*heavy.trainer), outside(*even.trainer));
}

TEST(Training, ClipsTheUnscaledGradients) {
  // With a scale of 65536 and clipping at 1 on *scaled* gradients nearly nothing would be left.
  auto options = tiny_options(Precision::fp32);
  options.epochs = 1;
  TinyTraining plain(options);
  options.precision = Precision::amp;
  TinyTraining scaled(options);
  EXPECT_THAT(scaled.train(), Pointwise(testing::DoubleNear(1e-5), plain.train()));
}

}  // namespace
}  // namespace bert_ner
