#include <mezzo/diagnose/divergence_watch.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "../distributed/alike_ranks.h"
#include "../distributed/recording_ranks.h"
#include "planted_faults.h"

// Is the run lost, and why? Asked of DivergenceWatch.
namespace planted_faults {
namespace {

/// What the watch says while `model` trains; `loss` is asked each step.
template <class Optimizer>
std::string watch_of(nn::Module& model, Optimizer&& optimizer, const std::function<Tensor()>& loss,
                     mezzo::DivergenceOptions options = {}, double init_scale = 65536) {
  std::string said = "nothing";
  options.callback = [&said](const mezzo::Divergence& divergence) { said = divergence.message(); };
  mezzo::Telemetry telemetry;
  telemetry.write_to(mezzo::DivergenceWatch(model, options));
  mezzo::GradScaler scaler({.init_scale = init_scale});
  scaler.on_skip(nullptr);
  for (int step = 0; step < 30 && said == "nothing"; ++step) {
    optimizer.zero_grad();
    const Tensor now = loss();
    scaler.scale(now).backward();
    const auto result = scaler.step(optimizer, mezzo::StepOptions{});
    scaler.update();
    telemetry.record(result, now);
    telemetry.flush();
  }
  return said;
}

std::string watch_of_weight(const std::string& parameter, float value, at::ScalarType dtype) {
  PatientImpl model;
  model.to(dtype);
  plant(model.parameter(parameter), 3, value);
  return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-3), [&] {
    return model.forward(batch_of_ones().to(dtype)).to(torch::kFloat).square().mean();
  });
}

/// A mask of `fill` that half makes -inf in every place, so that the softmax is 0 / 0.
std::string watch_of_mask(double fill) {
  PatientImpl model;
  const Tensor mask = model.register_buffer("mask", torch::full({8}, fill));
  return watch_of(model, mezzo::optim::SGD(model.parameters(), 1e-3), [&] {
    const Tensor scores = model.forward(batch_of_ones()).to(torch::kHalf);
    return (scores + mask.to(torch::kHalf)).softmax(-1).to(torch::kFloat).sum();
  });
}

template <class Optimizer>
std::string watch_of_rate(double rate) {
  nn::Sequential model(nn::Linear(8, 8), nn::Linear(8, 1));
  torch::manual_seed(0);
  const Tensor inputs = torch::randn({32, 8});
  return watch_of(*model, Optimizer(model->parameters(), rate),
                  [&] { return model->forward(inputs).sub(1).square().mean(); });
}

std::string watch_of_loss(const Op& loss, std::optional<int> rank = std::nullopt) {
  PatientImpl model;
  return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4),
                  [&] { return loss(squares(model)); }, {.rank = rank});
}

/// The gradient of one parameter is bad in every step, and the loss is fine.
std::string watch_of_gradient(const std::string& parameter, double init_scale) {
  PatientImpl model;
  plant_in_gradient(model.parameter(parameter), 0, kInf);
  return watch_of(
      model, mezzo::optim::AdamW(model.parameters(), 1e-4), [&] { return squares(model); }, {},
      init_scale);
}

/// What rank 0 of two says when the gradients of rank 1, which it averages with, are bad.
std::string watch_beside_a_bad_rank() {
  Patient model;
  const auto ranks = distributed_test::recording_ranks(
      distributed_test::alike_ranks(2), [](const std::string& collective, const Tensor& tensor) {
        const bool is_gradient = collective == "average" || collective == "sum";
        if (is_gradient && tensor.is_floating_point()) plant(tensor, 0, kInf);
      });
  mezzo::DataParallel parallel(model, ranks);
  return watch_of(*model, mezzo::optim::AdamW(model->parameters(), 1e-4),
                  [&] { return parallel(batch_of_ones()).square().mean(); }, {.rank = 0});
}

const std::vector<PlantedFault> kDivergences = {
    {"InfWeight",
     "an inf in norm.weight",
     [] { return watch_of_weight("norm.weight", kInf, torch::kFloat); },
     {"norm.weight holds inf or NaN", "load a checkpoint"}},
    {"NanWeightInBfloat16",
     "a NaN in head.bias, weights of bfloat16",
     [] { return watch_of_weight("head.bias", kNan, torch::kBFloat16); },
     {"head.bias holds inf or NaN", "load a checkpoint"}},
    {"MaskOfMinus1e9",
     "a mask of -1e9 that the loss casts to half",
     [] { return watch_of_mask(-1e9); },
     {"the buffer mask holds -1e+09, which is beyond float16", "make it -inf"}},
    {"ConstantOf1e6",
     "a buffer of 1e6 that the loss casts to half",
     [] { return watch_of_mask(1e6); },
     {"the buffer mask holds 1e+06, which is beyond float16"}},
    {"RateTooHighForSgd",
     "SGD with a rate of 10 on least squares",
     [] { return watch_of_rate<mezzo::optim::SGD>(10); },
     {"the learning rate is too high", "try a tenth"}},
    {"RateTooHighForTorchsSgd",
     "torch::optim::SGD with a rate of 10",
     [] { return watch_of_rate<torch::optim::SGD>(10); },
     {"the learning rate is too high"}},
    {"RateTooHighForAdam",
     "Adam with a rate of 1e19",
     [] { return watch_of_rate<mezzo::optim::Adam>(1e19); },
     {"the learning rate is too high"}},
    {"LogOfZeroInTheLoss",
     "a loss of log(0)",
     [] { return watch_of_loss([](const Tensor& loss) { return (loss * 0).log(); }); },
     {"loss -inf", "the loss itself is inf or NaN; weights and buffers are fine", "a log of 0"}},
    {"DivisionByZeroInTheLoss",
     "a mean over no labels",
     [] { return watch_of_loss([](const Tensor& loss) { return (loss * 0) / (loss * 0); }); },
     {"loss nan", "the loss itself is inf or NaN", "a division by 0"}},
    {"OneLayerOverflows",
     "an inf in the gradient of body.weight in every step",
     [] { return watch_of_gradient("body.weight", 65536); },
     {"10 skipped in a row", "body.weight, in 1 of 3 layers", "run it in float32"}},
    {"ScaleAtItsFloor",
     "the same with a scale that is 0.5 already",
     [] { return watch_of_gradient("head.weight", 0.5); },
     {"1 skipped in a row; loss scale 0.5", "head.weight, in 1 of 3 layers"}},
    {"OneBadRank",
     "a loss of log(0) on rank 3 alone, as that rank tells it",
     [] { return watch_of_loss([](const Tensor& loss) { return (loss * 0).log(); }, 3); },
     {"rank 3", "the loss itself is inf or NaN"}},
    {"BesideABadRank",
     "inf in what rank 0 gets from another rank, whose own loss is fine",
     watch_beside_a_bad_rank,
     {"rank 0", "10 skipped in a row", "has 1 inf", "own_gradients each rank says whether it was"}},
};

class PlantedDivergences : public testing::TestWithParam<PlantedFault> {};

TEST_P(PlantedDivergences, AreNamed) {
  EXPECT_THAT(names_missing_for(GetParam()), testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, PlantedDivergences, testing::ValuesIn(kDivergences), name_of_fault);

TEST(PlantedDivergencesNowhere, AreNotFound) {
  PatientImpl model;
  mezzo::optim::AdamW optimizer(model.parameters(), 1e-3);
  EXPECT_EQ(watch_of(model, optimizer, [&] { return squares(model); }), "nothing");
}

}  // namespace
}  // namespace planted_faults
