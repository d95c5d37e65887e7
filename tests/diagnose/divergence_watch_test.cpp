#include <mezzo/diagnose/divergence_watch.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace {

using mezzo::Divergence;
using mezzo::DivergenceCause;
using mezzo::DivergenceOptions;
using mezzo::DivergencePolicy;
using mezzo::DivergenceWatch;
using mezzo::TelemetryRecord;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kInfiniteLoss = std::numeric_limits<double>::infinity();

/// Two layers and a mask, with gradients of 1; tests break one of them.
struct Patient : torch::nn::Module {
  Patient() {
    register_module("body", body);
    register_module("head", head);
    for (const at::Tensor& parameter : parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
  }
  torch::nn::Linear body{4, 4}, head{4, 2};
  at::Tensor mask = register_buffer("mask", torch::zeros({4}));
};

DivergenceOptions told_to(std::vector<Divergence>& heard) {
  return {.callback = [&heard](const Divergence& divergence) { heard.push_back(divergence); }};
}

TelemetryRecord step_record(std::int64_t number, double loss, bool skipped = false,
                            double scale = 1024) {
  return {.step = number, .loss = loss, .scale = scale, .skipped = skipped};
}

/// What a watch says about `patient` at a step with this loss, the first having had 1.
Divergence diagnosed(const Patient& patient, double loss) {
  std::vector<Divergence> heard;
  DivergenceOptions options = told_to(heard);
  options.skips_in_a_row = 1;
  DivergenceWatch watch(patient, options);
  watch(step_record(1, 1.0));
  watch(step_record(2, loss, /*skipped=*/true));
  EXPECT_EQ(heard.size(), 1);
  return heard.empty() ? Divergence() : heard.front();
}

TEST(DivergenceWatch, HearsSkipsInARowOnceInAThousandSteps) {
  const Patient patient;
  std::vector<Divergence> heard;
  DivergenceWatch watch(patient, told_to(heard));
  for (std::int64_t i = 1; i <= 9; ++i) watch(step_record(i, 1.0, true));
  watch(step_record(10, 1.0));
  for (std::int64_t i = 11; i <= 19; ++i) watch(step_record(i, 1.0, true));
  EXPECT_TRUE(heard.empty()) << "never ten in a row";
  for (std::int64_t i = 20; i <= 2500; ++i) watch(step_record(i, 1.0, true));
  ASSERT_EQ(heard.size(), 3);
  EXPECT_EQ(heard[0].record.step, 20);
  EXPECT_EQ(heard[0].skips, 10);
  EXPECT_EQ(heard[1].record.step, 1020);
}

TEST(DivergenceWatch, HearsAScaleAtItsFloorAndALossThatIsNotFinite) {
  const Patient patient;
  std::vector<Divergence> heard;
  DivergenceWatch at_floor(patient, told_to(heard));
  at_floor(step_record(1, 1.0, false, 0.5));
  EXPECT_TRUE(heard.empty()) << "that step ran";
  at_floor(step_record(2, 1.0, true, 0.5));
  EXPECT_EQ(heard.size(), 1);
  DivergenceWatch of_loss(patient, told_to(heard));
  of_loss(step_record(1, 1.0));
  of_loss({.step = 2, .skipped = true});
  EXPECT_EQ(heard.size(), 1) << "no loss was recorded";
  of_loss(step_record(3, kInfiniteLoss));
  ASSERT_EQ(heard.size(), 2);
  EXPECT_EQ(heard[1].cause, DivergenceCause::loss_not_finite);
}

TEST(DivergenceWatch, NamesTheWeightThatIsNotFinite) {
  Patient patient;
  {
    const torch::NoGradGuard no_grad;
    patient.head->weight[1][1] = kInfiniteLoss;
  }
  const Divergence divergence = diagnosed(patient, kInfiniteLoss);
  EXPECT_EQ(divergence.cause, DivergenceCause::weights_not_finite);
  EXPECT_THAT(divergence.message(),
              AllOf(HasSubstr("step 2; 1 skipped in a row; loss scale 1024; loss inf"),
                    HasSubstr("head.weight holds inf or NaN"), HasSubstr("load a checkpoint")));
}

TEST(DivergenceWatch, BlamesTheRateWhereTheLossRoseOrTheWeightsGrew) {
  Patient patient;
  const Divergence rose = diagnosed(patient, 40.0);
  EXPECT_EQ(rose.cause, DivergenceCause::learning_rate);
  EXPECT_THAT(rose.message(), AllOf(HasSubstr("from 1 to 40"), HasSubstr("a tenth")));

  std::vector<Divergence> heard;
  DivergenceWatch watch(patient, told_to(heard));
  {
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : patient.parameters()) parameter.mul_(20);
  }
  watch(step_record(1, kInfiniteLoss));
  ASSERT_EQ(heard.size(), 1);
  EXPECT_EQ(heard[0].cause, DivergenceCause::learning_rate);
  EXPECT_EQ(heard[0].evidence.find("the loss"), std::string::npos) << "it was never finite";
}

TEST(DivergenceWatch, NamesAConstantThatTheTypeDoesNotHold) {
  Patient patient;
  patient.mask[2] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(diagnosed(patient, kInfiniteLoss).cause, DivergenceCause::loss_not_finite)
      << "half holds -inf";
  patient.mask[1] = -1e9;
  const Divergence divergence = diagnosed(patient, kInfiniteLoss);
  EXPECT_EQ(divergence.cause, DivergenceCause::constant_out_of_range);
  EXPECT_THAT(divergence.message(),
              HasSubstr("the buffer mask holds -1e+09, which is beyond float16"));
}

TEST(DivergenceWatch, NamesTheOneLayerWhoseGradientsAreNotFinite) {
  Patient patient;
  patient.body->weight.grad()[0][0] = kInfiniteLoss;
  const Divergence divergence = diagnosed(patient, 1.0);
  EXPECT_EQ(divergence.cause, DivergenceCause::one_layer);
  EXPECT_THAT(divergence.message(), AllOf(HasSubstr("body.weight"), HasSubstr("float32")));
  patient.head->bias.grad()[0] = kInfiniteLoss;
  const Divergence both = diagnosed(patient, 1.0);
  EXPECT_EQ(both.cause, DivergenceCause::unknown);
  EXPECT_THAT(both.message(), HasSubstr("in 2 of 2 layers"));
}

TEST(DivergenceWatch, StopsTheRunWithTheDiagnosis) {
  const Patient patient;
  mezzo::Telemetry telemetry;
  telemetry.write_to(DivergenceWatch(patient, {.policy = DivergencePolicy::stop, .rank = 3}));
  const mezzo::StepResult skipped(mezzo::StepOutcome{.found_inf = true});
  telemetry.record(skipped, torch::tensor(1.0));
  EXPECT_THAT([&] { telemetry.record(skipped, torch::tensor(kInfiniteLoss)); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("Training diverges (rank 3, step 2; 2 skipped in a row; loss scale 1; "
                            "loss inf): the loss itself is inf or NaN; weights and buffers are")));
}

TEST(DivergenceWatch, WritesTheDiagnosisWhereNobodyListens) {
  const Patient patient;
  testing::internal::CaptureStderr();
  DivergenceWatch watch(patient);
  watch(step_record(1, 1.0));
  watch(step_record(2, kInfiniteLoss));
  watch(step_record(3, kInfiniteLoss));
  const std::string written = testing::internal::GetCapturedStderr();
  EXPECT_THAT(written, HasSubstr("Training diverges (step 2;"));
  EXPECT_EQ(written.find("step 3"), std::string::npos);
  EXPECT_THAT([&] { DivergenceWatch(patient, {.skips_in_a_row = 0}); },
              ThrowsMessage<c10::Error>(HasSubstr("skips_in_a_row is 0; it should be positive")));
}

/// Least squares by SGD with a rate of ten times what is stable, under a scaler.
TEST(DivergenceWatch, FindsTheRateOfARunThatCollapses) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::Linear(8, 1));
  const at::Tensor inputs = torch::randn({32, 8});
  mezzo::optim::SGD optimizer(model->parameters(), 10.0);
  mezzo::GradScaler scaler;
  scaler.on_skip(nullptr);
  std::vector<Divergence> heard;
  {
    mezzo::Telemetry telemetry;
    telemetry.write_to(DivergenceWatch(*model, told_to(heard)));
    for (int i = 0; i < 40; ++i) {
      optimizer.zero_grad();
      const at::Tensor loss = model->forward(inputs).sub(1).square().mean();
      scaler.scale(loss).backward();
      const auto result = scaler.step(optimizer);
      scaler.update();
      telemetry.record(result, loss);
    }
  }
  ASSERT_EQ(heard.size(), 1);
  EXPECT_EQ(heard[0].cause, DivergenceCause::learning_rate) << heard[0].message();
}

}  // namespace
