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

/// What a watch says about `patient` at a step with this loss, the first having had `first_loss`,
/// if any.
Divergence diagnosed(const Patient& patient, double loss, DivergenceOptions options = {},
                     std::optional<double> first_loss = 1.0) {
  std::vector<Divergence> heard;
  options.callback = told_to(heard).callback;
  options.skips_in_a_row = 1;
  DivergenceWatch watch(patient, options);
  if (first_loss) watch(step_record(1, *first_loss));
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

void multiply(const Patient& patient, double factor) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& parameter : patient.parameters()) parameter.mul_(factor);
}

TEST(DivergenceWatch, BlamesTheRateWhereTheLossRoseWhileTheWeightsGrew) {
  const Patient patient;
  std::vector<Divergence> heard;
  DivergenceWatch watch(patient, told_to(heard));
  std::int64_t step = 0;
  for (const double loss : {1.0, 0.8, 5.0, 20.0, 40.0}) {
    watch(step_record(++step, loss));
    multiply(patient, 1.5);
  }
  watch(step_record(6, kInfiniteLoss, /*skipped=*/true));
  ASSERT_EQ(heard.size(), 1);
  EXPECT_EQ(heard[0].cause, DivergenceCause::updates_too_large);
  EXPECT_THAT(heard[0].message(), AllOf(HasSubstr("from 1 to 40, rising in 3 steps on end"),
                                        HasSubstr("divide the learning rate by 10")));
}

/// Neither a loss that jumps nor weights that outgrow a small start are the rate's.
TEST(DivergenceWatch, DoesNotBlameTheRateForALossThatJumpedOrWeightsThatGrew) {
  const Patient patient;
  EXPECT_EQ(diagnosed(patient, 40.0).cause, DivergenceCause::unknown);
  std::vector<Divergence> heard;
  DivergenceWatch watch(patient, told_to(heard));
  multiply(patient, 20);
  watch(step_record(1, 1.0));
  watch(step_record(2, kInfiniteLoss, /*skipped=*/true));
  ASSERT_EQ(heard.size(), 1);
  EXPECT_EQ(heard[0].cause, DivergenceCause::loss_not_finite);
}

TEST(DivergenceWatch, BlamesTheRateForWeightsBeyondMeasure) {
  const Patient patient;
  std::vector<Divergence> heard;
  DivergenceWatch watch(patient, told_to(heard));
  multiply(patient, 200);
  watch(step_record(1, kInfiniteLoss));
  ASSERT_EQ(heard.size(), 1);
  EXPECT_EQ(heard[0].cause, DivergenceCause::updates_too_large);
  EXPECT_EQ(heard[0].evidence.find("the loss"), std::string::npos) << "it was never finite";
}

TEST(DivergenceWatch, SuspectsBuffersAndWeightsBeyondHalfInARunOfHalfAlone) {
  Patient patient;
  patient.mask[2] = -std::numeric_limits<float>::infinity();
  EXPECT_THAT(diagnosed(patient, kInfiniteLoss).evidence, testing::Not(HasSubstr("buffer")));
  patient.mask[1] = -1e9;
  const Divergence divergence = diagnosed(patient, kInfiniteLoss, {}, std::nullopt);
  EXPECT_EQ(divergence.cause, DivergenceCause::loss_not_finite);
  EXPECT_THAT(divergence.message(),
              AllOf(HasSubstr("the buffer mask holds -1e+09, which is inf where an op reads it in "
                              "float16"),
                    HasSubstr("why is not known")));
  EXPECT_THAT(diagnosed(patient, kInfiniteLoss).message(), testing::Not(HasSubstr("buffer")))
      << "the same mask has let a loss be finite";
  const Divergence in_bfloat16 =
      diagnosed(patient, kInfiniteLoss, {.low_precision = at::kBFloat16}, std::nullopt);
  EXPECT_THAT(in_bfloat16.message(), testing::Not(HasSubstr("float16")));
  {
    const torch::NoGradGuard no_grad;
    patient.head->weight[1][1] = 1.06e5;
  }
  const Divergence of_weight = diagnosed(patient, kInfiniteLoss, {}, std::nullopt);
  EXPECT_EQ(of_weight.cause, DivergenceCause::loss_not_finite);
  EXPECT_THAT(
      of_weight.message(),
      HasSubstr("the weight head.weight holds 1.06e+05, which is inf where an op reads it"));
}

/// Records come after the step, which carries an inf or NaN of its loss into the weights.
TEST(DivergenceWatch, SaysWhichBrokeFirstOnlyWhereTheStepBeforeTells) {
  const auto said = [](const TelemetryRecord& before) {
    const Patient patient;
    std::vector<Divergence> heard;
    DivergenceWatch watch(patient, told_to(heard));
    watch(before);
    multiply(patient, kInfiniteLoss);
    watch(step_record(2, kInfiniteLoss));
    EXPECT_EQ(heard.size(), 1);
    return heard.empty() ? Divergence() : heard.front();
  };
  EXPECT_EQ(said(step_record(1, 1.0)).cause, DivergenceCause::unknown);
  const Divergence broke = said({.step = 1, .loss = 1.0, .grad_norm = kInfiniteLoss});
  EXPECT_EQ(broke.cause, DivergenceCause::weights_not_finite);
  EXPECT_THAT(broke.message(), HasSubstr("the gradients of step 1 were not finite"));
  EXPECT_THAT(said(step_record(1, 1.0)).message(), HasSubstr("which was first is not known"));
}

TEST(DivergenceWatch, NamesTheLayerWhoseGradientsAreNotFiniteAndWhatDecides) {
  Patient patient;
  patient.body->weight.grad()[0][0] = kInfiniteLoss;
  const Divergence divergence = diagnosed(patient, 1.0);
  EXPECT_EQ(divergence.cause, DivergenceCause::unknown);
  EXPECT_THAT(divergence.message(),
              AllOf(HasSubstr("the weights are finite"), HasSubstr("body.weight"),
                    HasSubstr("why is not known: an AnomalyWatch")));
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
                            "loss inf): the loss is inf or NaN, computed from finite weights")));
}

TEST(DivergenceWatch, WatchesARunThatGoesOnFromACheckpointAsANewOne) {
  const Patient patient;
  std::vector<Divergence> heard;
  DivergenceOptions options = told_to(heard);
  options.policy = DivergencePolicy::stop;
  DivergenceWatch watch(patient, options);
  const auto diverges_from = [&](std::int64_t step) {
    for (const double loss : {1.0, 0.8, 5.0, 20.0, 40.0}) {
      watch(step_record(step++, loss));
      multiply(patient, 1.5);
    }
    EXPECT_THROW(watch(step_record(step, kInfiniteLoss)), c10::Error);
    multiply(patient, 1 / 8.0);  // as the checkpoint has them, more or less
  };
  diverges_from(100);
  diverges_from(101);
  ASSERT_EQ(heard.size(), 2);
  EXPECT_EQ(heard[1].record.step, 106);
  EXPECT_EQ(heard[1].cause, DivergenceCause::updates_too_large);
  EXPECT_THROW(watch(step_record(106, kInfiniteLoss)), c10::Error) << "the same step again";
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

}  // namespace
