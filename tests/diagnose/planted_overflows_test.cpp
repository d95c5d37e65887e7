#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/distributed/grad_buckets.h>
#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "../distributed/alike_ranks.h"
#include "../distributed/recording_ranks.h"
#include "planted_faults.h"

// A step is skipped: which gradients were it? Asked of OverflowReport.
namespace planted_faults {
namespace {

/// What the report writes of a step of `Optimizer` whose gradients are bad.
template <class Optimizer, class Loss>
std::string report_of(PatientImpl& model, Optimizer& optimizer, const Loss& loss) {
  std::ostringstream out;
  mezzo::GradScaler scaler;
  scaler.on_skip(mezzo::OverflowReport(model, {.stream = &out}));
  scaler.scale(loss()).backward();
  if (scaler.step(optimizer, mezzo::StepOptions{}).ran()) return "the step ran";
  scaler.update();
  return out.str();
}

template <class Optimizer>
std::string report_of_gradient(const std::string& parameter, std::int64_t index, float value) {
  PatientImpl model;
  plant_in_gradient(model.parameter(parameter), index, value);
  Optimizer optimizer(model.parameters(), 1e-2);
  return report_of(model, optimizer, [&] { return model.forward(batch_of_ones()).sum(); });
}

std::string report_of_dtype(at::ScalarType dtype) {
  PatientImpl model;
  model.to(dtype);
  plant_in_gradient(model.parameter("head.weight"), 10, kNan);
  mezzo::optim::AdamW optimizer(
      model.parameters(), mezzo::optim::AdamWOptions(1e-2).weight_storage(
                              dtype == torch::kBFloat16 ? mezzo::optim::WeightStorage::split_master
                                                        : mezzo::optim::WeightStorage::plain));
  return report_of(model, optimizer, [&] {
    return model.forward(batch_of_ones().to(dtype)).to(torch::kFloat).sum();
  });
}

std::string report_of_buckets() {
  PatientImpl model;
  plant_in_gradient(model.parameter("body.weight"), 63, -kInf);
  const mezzo::GradBuckets buckets(model.parameters());
  mezzo::optim::AdamW optimizer(model.parameters(), 1e-2);
  return report_of(model, optimizer, [&] { return model.forward(batch_of_ones()).sum(); });
}

/// Three micro-batches are added up; the second holds a NaN.
std::string report_of_micro_batches() {
  PatientImpl model;
  mezzo::optim::SGD optimizer(model.parameters(), 0.1);
  return report_of(model, optimizer, [&] {
    Tensor loss;
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      Tensor x = batch_of_ones();
      if (micro_batch == 1) x[3][2] = kNan;
      loss = model.forward(x).sum();
      if (micro_batch < 2) loss.backward();
    }
    return loss;
  });
}

std::string report_of_sparse_rows() {
  struct Words : nn::Module {
    nn::Embedding table{nn::EmbeddingOptions(9, 2).sparse(true)};
    Words() { register_module("table", table); }
  } model;
  const Tensor weights = torch::tensor({{1.0F}, {kInf}});
  (model.table->forward(torch::tensor({2, 7})) * weights).sum().backward();
  return mezzo::find_overflow(mezzo::name_parameters(model)).cause();
}

std::string report_of_small_scale() {
  PatientImpl model;
  plant_in_gradient(model.parameter("head.bias"), 1, 2e38F);
  model.forward(batch_of_ones()).sum().backward();
  return mezzo::find_overflow(mezzo::name_parameters(model), 0.125).cause();
}

std::string report_of_unscaled() {
  PatientImpl model;
  plant_in_gradient(model.parameter("norm.weight"), 4, kInf);
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  std::ostringstream out;
  mezzo::GradScaler scaler;
  scaler.on_skip(mezzo::OverflowReport(model, {.stream = &out}));
  scaler.scale(model.forward(batch_of_ones()).sum()).backward();
  scaler.unscale_(optimizer);
  nn::utils::clip_grad_norm_(model.parameters(), 1.0);
  scaler.step(optimizer);
  scaler.update();
  return out.str();
}

/// What rank 3 reports whose gradients are inf while the other rank's, with which it averages, are
/// fine (`is_own`), or the other way round.
std::string report_of_rank(bool is_own) {
  Patient model;
  const auto ranks = distributed_test::recording_ranks(
      distributed_test::alike_ranks(2), [&](const std::string& collective, const Tensor& tensor) {
        const bool is_gradient = collective == "average" || collective == "sum";
        if (!is_own && is_gradient && tensor.is_floating_point()) plant(tensor, 0, kInf);
      });
  mezzo::DataParallel parallel(model, ranks);
  std::ostringstream out;
  mezzo::GradScaler scaler;
  scaler.on_skip(mezzo::OverflowReport(
      *model, {.stream = &out, .rank = is_own ? 3 : 0, .own_gradients = true}));
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
  scaler.scale(parallel(batch_of_ones()).sum() * (is_own ? kInf : 1.0F)).backward();
  if (scaler.step(optimizer, mezzo::StepOptions{}).ran()) return "the step ran";
  scaler.update();
  return out.str();
}

const std::vector<PlantedFault> kOverflows = {
    {"InfUnderSgd",
     "an inf in the gradient of head.weight, SGD",
     [] { return report_of_gradient<mezzo::optim::SGD>("head.weight", 10, kInf); },
     {"reducing loss scale to 32768", "head.weight, in 1 of 3 layers",
      "has 1 inf and 0 NaN in 64 gradients, the first, inf, at [1, 2], made by the backward"}},
    {"NanUnderAdam",
     "a NaN in the gradient of body.bias, Adam",
     [] { return report_of_gradient<mezzo::optim::Adam>("body.bias", 3, kNan); },
     {"body.bias, in 1 of 3 layers", "0 inf and 1 NaN in 8 gradients, the first, nan, at [3]"}},
    {"NegativeInfUnderAdamW",
     "a -inf in the gradient of norm.weight, AdamW",
     [] { return report_of_gradient<mezzo::optim::AdamW>("norm.weight", 0, -kInf); },
     {"norm.weight, in 1 of 3 layers", "the first, -inf, at [0]"}},
    {"InfUnderLamb",
     "an inf in the gradient of norm.bias, LAMB",
     [] { return report_of_gradient<mezzo::optim::LAMB>("norm.bias", 7, kInf); },
     {"norm.bias, in 1 of 3 layers", "the first, inf, at [7]"}},
    {"NanUnderLion",
     "a NaN in the gradient of head.bias, Lion",
     [] { return report_of_gradient<mezzo::optim::Lion>("head.bias", 5, kNan); },
     {"head.bias, in 1 of 3 layers", "the first, nan, at [5]"}},
    {"InfUnderTorchsAdamW",
     "an inf in the gradient of body.weight, torch::optim::AdamW",
     [] { return report_of_gradient<torch::optim::AdamW>("body.weight", 17, kInf); },
     {"body.weight, in 1 of 3 layers", "the first, inf, at [2, 1]"}},
    {"InfThatUnscaleSaw",
     "an inf under torch::optim::SGD, unscaled and clipped by hand",
     report_of_unscaled,
     {"norm.weight", "at [4]"}},
    {"NanInBfloat16Weights",
     "a NaN in the gradient of bfloat16 weights with split masters",
     [] { return report_of_dtype(torch::kBFloat16); },
     {"head.weight, in 1 of 3 layers", "the first, nan, at [1, 2]"}},
    {"NanInDoubleWeights",
     "a NaN in the gradient of double weights",
     [] { return report_of_dtype(torch::kDouble); },
     {"head.weight, in 1 of 3 layers", "the first, nan, at [1, 2]"}},
    {"InfInAFlatBucket",
     "a -inf in a gradient that lies in a flat bucket",
     report_of_buckets,
     {"body.weight, in 1 of 3 layers", "the first, -inf, at [7, 7]"}},
    {"NanInOneMicroBatch",
     "a NaN in the second of three micro-batches",
     report_of_micro_batches,
     {"head.weight and 3 more, in 3 of 3 layers", "64 NaN in 64 gradients",
      "made by the backward pass"}},
    {"GradientsOfOneBadRank",
     "inf in the gradients of rank 3, as that rank tells it",
     [] { return report_of_rank(true); },
     {"rank 3: it began here, in its own gradients of"}},
    {"GradientsOfAnotherRank",
     "inf in the gradients of another rank than rank 0",
     [] { return report_of_rank(false); },
     {"rank 0: its own gradients were finite; "}},
    {"InfInASparseRow",
     "an inf in one row of a sparse embedding's gradient",
     report_of_sparse_rows,
     {"table.weight, in 1 of 1 layers",
      "2 inf and 0 NaN in 4 gradients, the first, inf, at [7, 0]"}},
    {"InfMadeByUnscaling",
     "a gradient of 2e38 under a loss scale of 1/8",
     report_of_small_scale,
     {"head.bias", "at [1], made by dividing by a loss scale below 1"}},
};

class PlantedOverflows : public testing::TestWithParam<PlantedFault> {};

TEST_P(PlantedOverflows, AreNamed) {
  EXPECT_THAT(names_missing_for(GetParam()), testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, PlantedOverflows, testing::ValuesIn(kOverflows), name_of_fault);

TEST(PlantedOverflowsNowhere, AreNotFound) {
  PatientImpl model;
  mezzo::optim::AdamW optimizer(model.parameters(), 1e-3);
  EXPECT_EQ(report_of(model, optimizer, [&] { return squares(model); }), "the step ran");
}

}  // namespace
}  // namespace planted_faults
