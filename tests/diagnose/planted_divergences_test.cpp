#include <mezzo/autocast/autocast.h>
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
#include <utility>
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

/// The same where each step is applied, whatever its gradients are.
std::string watch_without_scaler(nn::Module& model, mezzo::optim::AdamW& optimizer,
                                 const std::function<Tensor()>& loss) {
  std::string said = "nothing";
  mezzo::DivergenceWatch watch(model, {.callback = [&said](const mezzo::Divergence& divergence) {
                                 said = divergence.message();
                               }});
  for (int step = 1; step <= 30 && said == "nothing"; ++step) {
    optimizer.zero_grad();
    const Tensor now = loss();
    now.backward();
    optimizer.step();
    watch({.step = step, .loss = now.item<double>()});
  }
  return said;
}

/// A weight of this size, under autocast to `dtype`.
std::string watch_of_forward_in(at::ScalarType dtype, float value) {
  PatientImpl model;
  plant(model.parameter("body.weight"), 0, value);
  plant(model.parameter("body.weight"), 1, value);
  plant(model.parameter("body.weight"), 2, value);
  return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4), [&] {
    const mezzo::AutocastGuard autocast({.device = torch::kCPU, .dtype = dtype});
    return squares(model);
  });
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
     {"norm.weight holds inf or NaN", "when the watch was made", "initialise or load it again"}},
    {"NanWeightInBfloat16",
     "a NaN in head.bias, weights of bfloat16",
     [] { return watch_of_weight("head.bias", kNan, torch::kBFloat16); },
     {"head.bias holds inf or NaN", "initialise or load it again"}},
    {"MaskOfMinus1e9",
     "a mask of -1e9 that the loss casts to half",
     [] { return watch_of_mask(-1e9); },
     {"the buffer mask holds -1e+09, which is inf where an op reads it in float16",
      "why is not known", "AnomalyTrace"}},
    {"ConstantOf1e6",
     "a buffer of 1e6 that the loss casts to half",
     [] { return watch_of_mask(1e6); },
     {"the buffer mask holds 1e+06, which is inf where an op reads it in float16",
      "why is not known"}},
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
     {"loss -inf", "the loss is inf or NaN, computed from finite weights", "a log or a division"}},
    {"DivisionByZeroInTheLoss",
     "a mean over no labels",
     [] { return watch_of_loss([](const Tensor& loss) { return (loss * 0) / (loss * 0); }); },
     {"loss nan", "the loss is inf or NaN, computed from finite weights", "a division of 0"}},
    {"OneLayerOverflows",
     "an inf in the gradient of body.weight in every step",
     [] { return watch_of_gradient("body.weight", 65536); },
     {"10 skipped in a row", "the weights are finite", "body.weight, in 1 of 3 layers",
      "why is not known: an AnomalyWatch"}},
    {"ScaleAtItsFloor",
     "the same with a scale that is 0.5 already",
     [] { return watch_of_gradient("head.weight", 0.5); },
     {"1 skipped in a row; loss scale 0.5", "head.weight, in 1 of 3 layers"}},
    {"OneBadRank",
     "a loss of log(0) on rank 3 alone, as that rank tells it",
     [] { return watch_of_loss([](const Tensor& loss) { return (loss * 0).log(); }, 3); },
     {"rank 3", "the loss is inf or NaN, computed from finite weights"}},
    {"BesideABadRank",
     "inf in what rank 0 gets from another rank, whose own loss is fine",
     watch_beside_a_bad_rank,
     {"rank 0", "10 skipped in a row", "has 1 inf", "own_gradients each rank says whether it was"}},
};

/// What is said of one NaN batch, the tenth, in a run that is well. `scale` of each batch's loss.
struct NanBatch {
  at::ScalarType dtype = torch::kFloat;
  double init_scale = 65536;  // 0: no scaler, and so no skip
  double small = 1;           // what the first weights are multiplied by
  std::function<double(int)> size = [](int) { return 1.0; };
  Op buffered = {};
  std::optional<std::pair<const char*, double>> buffer = {};
  int nan_step = 9;
};

std::string watch_of_nan_batch(const NanBatch& run) {
  torch::manual_seed(0);
  nn::Sequential model(nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 1));
  {
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : model->parameters()) parameter.mul_(run.small);
  }
  if (run.buffer) model->register_buffer(run.buffer->first, torch::full({8}, run.buffer->second));
  model->to(run.dtype);
  const Tensor inputs = torch::randn({32, 8}, run.dtype);
  const Tensor targets = inputs.sum(-1, true);
  int step = 0;
  const auto loss = [&] {
    Tensor batch = inputs.clone();
    if (step == run.nan_step) batch[3][2] = kNan;
    const Tensor error = (model->forward(batch) - targets).to(torch::kFloat);
    return (error.square().mean() * run.size(step++));
  };
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
  return run.init_scale == 0 ? watch_without_scaler(*model, optimizer, loss)
                             : watch_of(*model, optimizer, loss, {}, run.init_scale);
}

const std::vector<PlantedFault> kNanBatches = {
    {"AmongSmallWeights",
     "a NaN batch, after weights of 1e-3 of the usual grew",
     [] { return watch_of_nan_batch({.small = 1e-3}); },
     {"computed from finite weights; the loss of the step before was", "look at this batch"}},
    {"AfterAFallingLoss",
     "a NaN batch while the loss falls",
     [] { return watch_of_nan_batch({.size = [](int i) { return 1.0 / (1 + i); }}); },
     {"computed from finite weights", "look at this batch"}},
    {"AmongUnequalBatches",
     "a NaN batch after one whose loss is 50 times that of the others",
     [] { return watch_of_nan_batch({.size = [](int i) { return i == 8 ? 50.0 : 1.0; }}); },
     {"computed from finite weights", "look at this batch"}},
    {"BesideAFloatMask",
     "a NaN batch, and a mask of -1e9 that float32 reads",
     [] {
       return watch_of_nan_batch({.buffer = std::pair{"mask", -1e9}});
     },
     {"look at this batch"}},
    {"BesideACounterInBfloat16",
     "a NaN batch in bfloat16, and a counter of 3e6",
     [] {
       return watch_of_nan_batch({.dtype = torch::kBFloat16, .buffer = std::pair{"seen", 3e6}});
     },
     {"look at this batch"}},
    {"InBfloat16WithoutAScaler",
     "a NaN batch in bfloat16, whose step is applied",
     [] { return watch_of_nan_batch({.dtype = torch::kBFloat16, .init_scale = 0}); },
     {"computed from finite weights; the loss of the step before was",
      "the step was applied, and 0.weight holds inf or NaN since", "look at this batch",
      "step through a GradScaler"}},
};

class PlantedNanBatches : public testing::TestWithParam<PlantedFault> {};

TEST_P(PlantedNanBatches, AreBlamedAndNothingElse) {
  const PlantedFault& fault = GetParam();
  EXPECT_THAT(names_missing_for(fault), testing::IsEmpty());
  const std::string said = fault.said();
  for (const char* wrong : {"learning rate", "the buffer", "the weight"}) {
    EXPECT_EQ(said.find(wrong), std::string::npos) << said;
  }
}

INSTANTIATE_TEST_SUITE_P(, PlantedNanBatches, testing::ValuesIn(kNanBatches), name_of_fault);

/// The remedies for the range of float16: bfloat16, and a GradScaler in bfloat16.
TEST(PlantedDivergencesRemedies, CureTheRun) {
  EXPECT_THAT(watch_of_forward_in(torch::kHalf, 3e4F), testing::HasSubstr("beyond float16"));
  EXPECT_EQ(watch_of_forward_in(torch::kBFloat16, 3e4F), "nothing");
  EXPECT_THAT(
      watch_of_forward_in(torch::kHalf, 1.06e5F),
      testing::AllOf(testing::HasSubstr("the weight body.weight holds 1.06e+05, which is inf"),
                     testing::HasSubstr("use bfloat16")));
  EXPECT_EQ(watch_of_forward_in(torch::kBFloat16, 1.06e5F), "nothing");
  // Skipped, the batch leaves the weights as they were, and the run goes on.
  const std::string said =
      watch_of_nan_batch({.dtype = torch::kBFloat16, .init_scale = 1, .nan_step = 3});
  EXPECT_EQ(said.find("holds inf or NaN"), std::string::npos) << said;
}

/// A forward pass that overflows in half, with the words that the watch must have; the remedy that
/// these name, bfloat16 or float32 for that op, cures the run.
struct ForwardOverflow {
  const char* name;
  const char* planted;
  /// The loss of `model` from inputs of `dtype`, or of what float32 makes of the op (kFloat).
  std::function<Tensor(PatientImpl& model, at::ScalarType dtype)> loss;
  float weight = 1;  ///< what the weights of `body` are multiplied by
};

void PrintTo(const ForwardOverflow& fault, std::ostream* stream) { *stream << fault.planted; }

/// Hidden numbers in `dtype`: up to about 1.3.
Tensor hidden(PatientImpl& model, at::ScalarType dtype) {
  return model.norm->forward(model.body->forward(batch_of_ones())).to(dtype);
}

const std::vector<ForwardOverflow> kForwardOverflows = {
    {"ExpWithoutAMaximum", "a softmax by hand that subtracts no maximum",
     [](PatientImpl& model, at::ScalarType dtype) {
       const Tensor e = (hidden(model, dtype) * 12).exp();
       return (e / e.sum(-1, true)).to(torch::kFloat).square().mean();
     }},
    {"AttentionLogits", "attention that is not divided by the root of its width",
     [](PatientImpl& model, at::ScalarType dtype) {
       const Tensor q = hidden(model, dtype) * 100;
       return torch::matmul(q, q.t()).softmax(-1).to(torch::kFloat).square().mean();
     }},
    {"TwoMasks", "two masks of -4e4 on the same place",
     [](PatientImpl& model, at::ScalarType dtype) {
       const Tensor mask = torch::full({8}, -4e4).to(dtype);
       return (hidden(model, dtype) + mask + mask).softmax(-1).to(torch::kFloat).square().mean();
     }},
    {"ResidualsOf60Layers", "60 residual layers, each of which grows by a quarter",
     [](PatientImpl& model, at::ScalarType dtype) {
       Tensor x = hidden(model, dtype);
       for (int layer = 0; layer < 60; ++layer) x = x + x * 0.25;
       return x.to(torch::kFloat).square().mean() * 1e-12;
     }},
    {"SumByHand", "a sum of squares of 8 numbers of 150, added one after the other",
     [](PatientImpl& model, at::ScalarType dtype) {
       const Tensor x = hidden(model, dtype) * 150;
       Tensor sum = torch::zeros({8}, dtype);
       for (int i = 0; i < 8; ++i) sum = sum + x.select(1, i) * x.select(1, i);
       return sum.to(torch::kFloat).mean();
     }},
    {"InputsOf1e5", "inputs that were not scaled",
     [](PatientImpl& model, at::ScalarType dtype) {
       const Tensor x = (batch_of_ones() * 1e5).to(dtype).to(torch::kFloat);
       return model.body->forward(x).square().mean() * 1e-10;
     }},
    {"SquareOfALargeNumber", "an error of 300, squared",
     [](PatientImpl& model, at::ScalarType dtype) {
       return (hidden(model, dtype) - 300).square().mean().to(torch::kFloat);
     }},
    {"InverseOfASmallNumber", "1 / (p + 1e-8) where p is 0",
     [](PatientImpl& model, at::ScalarType dtype) {
       const Tensor p = hidden(model, dtype) * 0 + 1e-8;
       return (1 / p).to(torch::kFloat).mean() * 1e-8;
     }},
    {"Cosh", "cosh of 15",
     [](PatientImpl& model, at::ScalarType dtype) {
       return (hidden(model, dtype) * 15).cosh().to(torch::kFloat).mean() * 1e-9;
     }},
    {"Power", "a fourth power of 20",
     [](PatientImpl& model, at::ScalarType dtype) {
       return (hidden(model, dtype) * 20).pow(4).to(torch::kFloat).mean() * 1e-6;
     }},
    {"WeightsThatAreLarge", "weights of about 1e5 that the loss casts",
     [](PatientImpl& model, at::ScalarType dtype) {
       return model.body->weight.to(dtype).to(torch::kFloat).abs().mean();
     },
     3e5F},
    {"CumulativeProduct", "a product of 8 numbers of about 10",
     [](PatientImpl& model, at::ScalarType dtype) {
       return (hidden(model, dtype).abs() + 9).cumprod(-1).to(torch::kFloat).mean() * 1e-6;
     }},
};

std::string watch_of_overflow(const ForwardOverflow& fault, at::ScalarType dtype) {
  PatientImpl model;
  {
    const torch::NoGradGuard no_grad;
    model.body->weight.mul_(fault.weight);
  }
  return watch_of(model, mezzo::optim::SGD(model.parameters(), 1e-6),
                  [&] { return fault.loss(model, dtype); });
}

class PlantedForwardOverflows : public testing::TestWithParam<ForwardOverflow> {};

TEST_P(PlantedForwardOverflows, AreSaidToBeOfTheForwardPassAndTheRemedyCures) {
  const std::string said = watch_of_overflow(GetParam(), torch::kHalf);
  EXPECT_THAT(said,
              testing::AllOf(testing::HasSubstr("the loss is inf or NaN, computed from finite"),
                             testing::HasSubstr("beyond float16 in the forward pass"),
                             testing::HasSubstr("then use bfloat16, or float32 for that op"),
                             testing::Not(testing::HasSubstr("learning rate"))));
  EXPECT_EQ(watch_of_overflow(GetParam(), torch::kBFloat16), "nothing");
  EXPECT_EQ(watch_of_overflow(GetParam(), torch::kFloat), "nothing");
}

INSTANTIATE_TEST_SUITE_P(, PlantedForwardOverflows, testing::ValuesIn(kForwardOverflows),
                         [](const auto& row) { return std::string(row.param.name); });

/// Runs that are well, in which something grows, is large or is missing.
struct HealthyRun {
  const char* name;
  std::function<std::string()> said;
};

void PrintTo(const HealthyRun& run, std::ostream* stream) { *stream << run.name; }

const std::vector<HealthyRun> kHealthyRuns = {
    {"SmallWeightsThatGrow",
     [] {
       PatientImpl model;
       const torch::NoGradGuard no_grad;
       for (const Tensor& parameter : model.parameters()) parameter.mul_(1e-3);
       const at::AutoGradMode with_grad(true);
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-2),
                       [&] { return squares(model); });
     }},
    {"ALossThatRises",
     [] {
       PatientImpl model;
       int step = 0;
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4),
                       [&] { return squares(model) * (1 + step++); });
     }},
    {"FiveSkipsAtTheStart",
     [] {
       PatientImpl model;
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4), [&] {
         return (model.forward(batch_of_ones()).to(torch::kHalf) * 30).sum().to(torch::kFloat);
       });
     }},
    {"WeightsOf1e5InFloat32",
     [] {
       PatientImpl model;
       plant(model.parameter("body.weight"), 0, 1e5F);
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4),
                       [&] { return squares(model); });
     }},
    {"AMaskOfMinusInfinity",
     [] {
       PatientImpl model;
       model.register_buffer("mask", torch::tensor({0.F, -kInf, 0.F, 0.F, 0.F, 0.F, 0.F, 0.F}));
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4), [&] {
         const Tensor scores = model.forward(batch_of_ones()) + model.named_buffers()["mask"];
         return scores.softmax(-1).square().mean();
       });
     }},
    {"ACounterOf1e9InBfloat16",
     [] {
       PatientImpl model;
       model.register_buffer("seen", torch::full({}, 1e9));
       model.to(torch::kBFloat16);
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4), [&] {
         return model.forward(batch_of_ones().to(torch::kBFloat16))
             .to(torch::kFloat)
             .square()
             .mean();
       });
     }},
    {"AParameterWithoutGradient",
     [] {
       PatientImpl model;
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4),
                       [&] { return model.body->forward(batch_of_ones()).square().mean(); });
     }},
    {"ALossOfZero",
     [] {
       PatientImpl model;
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4),
                       [&] { return squares(model) * 0; });
     }},
    {"ANegativeLoss",
     [] {
       PatientImpl model;
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4),
                       [&] { return -squares(model).log1p(); });
     }},
    {"AScaleOf1InBfloat16",
     [] {
       PatientImpl model;
       model.to(torch::kBFloat16);
       return watch_of(
           model, mezzo::optim::AdamW(model.parameters(), 1e-4),
           [&] {
             return model.forward(batch_of_ones().to(torch::kBFloat16))
                 .to(torch::kFloat)
                 .square()
                 .mean();
           },
           {}, 1);
     }},
    {"LossesOfUnequalBatches",
     [] {
       PatientImpl model;
       int step = 0;
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-3),
                       [&] { return squares(model) * (++step % 7 == 0 ? 1000.0 : 1.0); });
     }},
    {"UnderAutocastToHalf",
     [] {
       PatientImpl model;
       return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-3), [&] {
         const mezzo::AutocastGuard autocast({.device = torch::kCPU, .dtype = torch::kHalf});
         return squares(model).to(torch::kFloat);
       });
     }},
};

class HealthyRuns : public testing::TestWithParam<HealthyRun> {};

TEST_P(HealthyRuns, AreNotAccused) { EXPECT_EQ(GetParam().said(), "nothing"); }

INSTANTIATE_TEST_SUITE_P(, HealthyRuns, testing::ValuesIn(kHealthyRuns),
                         [](const auto& row) { return std::string(row.param.name); });

class PlantedDivergences : public testing::TestWithParam<PlantedFault> {};

TEST_P(PlantedDivergences, AreNamed) {
  EXPECT_THAT(names_missing_for(GetParam()), testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, PlantedDivergences, testing::ValuesIn(kDivergences), name_of_fault);

}  // namespace
}  // namespace planted_faults
