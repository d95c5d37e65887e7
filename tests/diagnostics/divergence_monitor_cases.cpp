// Faults for DivergenceMonitor: runs that diverge.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/diagnostics/divergence_monitor.h>
#include <mezzo/diagnostics/finding.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "../distributed/fake_backend.h"
#include "../distributed/recording_backend.h"
#include "diagnostics_cases.h"

namespace diagnostics_test {
namespace {

/// Trains `model` with `loss`, and returns the first finding.
template <class Optimizer>
std::string monitor_run(nn::Module& model, Optimizer&& optimizer,
                        const std::function<Tensor()>& loss,
                        mezzo::DivergenceMonitorOptions options = {}, double init_scale = 65536) {
  std::string output = kNothing;
  options.callback = [&output](const mezzo::Finding& finding) { output = finding.message(); };
  mezzo::MetricsLogger logger;
  logger.add_callback(mezzo::DivergenceMonitor(model, options));
  mezzo::GradScaler scaler({.init_scale = init_scale});
  scaler.on_skip(nullptr);
  for (int step = 0; step < 30 && output == kNothing; ++step) {
    optimizer.zero_grad();
    const Tensor step_loss = loss();
    scaler.scale(step_loss).backward();
    const auto result = scaler.step(optimizer, mezzo::StepOptions{});
    scaler.update();
    logger.record(result, step_loss);
    logger.flush();
  }
  return output;
}

/// As monitor_run, without a GradScaler: applies every step.
std::string monitor_run_without_scaler(nn::Module& model, mezzo::optim::AdamW& optimizer,
                                       const std::function<Tensor()>& loss) {
  std::string output = kNothing;
  mezzo::DivergenceMonitor monitor(model, {.callback = [&output](const mezzo::Finding& finding) {
                                     output = finding.message();
                                   }});
  for (int step = 1; step <= 30 && output == kNothing; ++step) {
    optimizer.zero_grad();
    const Tensor step_loss = loss();
    step_loss.backward();
    optimizer.step();
    monitor({.step = step, .loss = step_loss.item<double>()});
  }
  return output;
}

Run monitor_weight_case(const std::string& parameter, float value, at::ScalarType dtype) {
  return [=](bool fixed) {
    TestModelImpl model;
    model.to(dtype);
    if (!fixed) set_element(model.parameter(parameter), 3, value);
    return monitor_run(model, mezzo::optim::AdamW(model.parameters(), 1e-3), [&] {
      return model.forward(batch_of_ones().to(dtype)).to(torch::kFloat).square().mean();
    });
  };
}

/// A buffer of `fill`, which float16 turns into inf, so that a softmax is NaN.
Run monitor_buffer_case(double fill) {
  return [=](bool fixed) {
    TestModelImpl model;
    const Tensor mask = model.register_buffer("mask", torch::full({8}, fill));
    const auto dtype = fixed ? torch::kBFloat16 : torch::kHalf;
    return monitor_run(model, mezzo::optim::SGD(model.parameters(), 1e-3), [&] {
      const Tensor scores = model.forward(batch_of_ones()).to(dtype);
      return (scores + mask.to(dtype)).softmax(-1).to(torch::kFloat).sum();
    });
  };
}

/// Trains with the learning rate multiplied by `factor`, and returns the first finding.
using Trial =
    std::function<std::string(nn::Sequential& model, const Tensor& inputs, double factor)>;

/// Least squares; fixed by dividing the learning rate by 10 until the loss decreases, as the remedy
/// says.
Run least_squares(Trial trial, bool divides_lr = true) {
  return [=](bool fixed) {
    const auto run = [&](double factor) {
      torch::manual_seed(0);
      nn::Sequential model(nn::Linear(8, 8), nn::Linear(8, 1));
      return trial(model, torch::randn({32, 8}), factor);
    };
    std::string output = run(fixed ? 0.1 : 1);
    for (double factor = 0.01; fixed && divides_lr && output != kNothing && factor > 1e-24;
         factor /= 10) {
      output = run(factor);
    }
    return output;
  };
}

template <class Optimizer>
Run lr_case(double lr) {
  return least_squares([=](nn::Sequential& model, const Tensor& inputs, double factor) {
    return monitor_run(*model, Optimizer(model->parameters(), lr * factor),
                       [&] { return model->forward(inputs).sub(1).square().mean(); });
  });
}

Run sgd_case(const std::function<mezzo::optim::SGDOptions(bool fixed)>& options,
             double input_scale = 1) {
  return least_squares(
      [=](nn::Sequential& model, const Tensor& inputs, double factor) {
        const bool fixed = factor != 1;
        return monitor_run(*model, mezzo::optim::SGD(model->parameters(), options(fixed)), [&] {
          return model->forward(inputs * (fixed ? 1 : input_scale)).sub(1).square().mean();
        });
      },
      /*divides_lr=*/false);
}

/// AdamW with a zero gradient of one parameter, with or without a GradScaler.
Run adamw_case(const std::function<mezzo::optim::AdamWOptions(bool fixed)>& options,
               bool uses_scaler, at::ScalarType dtype = torch::kFloat,
               const mezzo::optim::WeightStorageOptions& weights = {}) {
  return [=](bool fixed) {
    TestModelImpl model;
    model.to(dtype);
    mezzo::optim::AdamW optimizer(model.parameters(), options(fixed), weights);
    const auto loss = [&] {
      return (model.forward(batch_of_ones().to(dtype)) * torch::eye(8)[0]).square().mean();
    };
    return uses_scaler ? monitor_run(model, optimizer, loss)
                       : monitor_run_without_scaler(model, optimizer, loss);
  };
}

Run monitor_loss_case(Op faulty, Op fixed_loss, std::optional<int> rank = std::nullopt) {
  return [=](bool fixed) {
    TestModelImpl model;
    return monitor_run(model, mezzo::optim::AdamW(model.parameters(), 1e-4),
                       [&] { return (fixed ? fixed_loss : faulty)(mean_square(model)); },
                       {.rank = rank});
  };
}

/// A finite loss, and in every step an inf in the gradient of one parameter.
Run monitor_gradient_case(const std::string& parameter, double init_scale) {
  return [=](bool fixed) {
    TestModelImpl model;
    if (!fixed) set_grad_element(model.parameter(parameter), 0, kInf);
    return monitor_run(
        model, mezzo::optim::AdamW(model.parameters(), 1e-4), [&] { return mean_square(model); },
        {}, init_scale);
  };
}

/// Rank 0 of two, which receives inf in the all-reduced gradients.
std::string monitor_rank_0(bool fixed) {
  TestModel model;
  const auto ranks = distributed_test::make_recording_backend(
      distributed_test::make_fake_backend(2),
      [=](const std::string& collective, const Tensor& tensor) {
        const bool is_gradient = collective == "average" || collective == "sum";
        if (!fixed && is_gradient && tensor.is_floating_point()) set_element(tensor, 0, kInf);
      });
  mezzo::DistributedDataParallel parallel(model, ranks);
  return monitor_run(*model, mezzo::optim::AdamW(model->parameters(), 1e-4),
                     [&] { return parallel(batch_of_ones()).square().mean(); }, {.rank = 0});
}

/// A healthy run with NaN in the tenth batch.
struct NanBatchOptions {
  at::ScalarType dtype = torch::kFloat;
  double init_scale = 65536;                                         // 0: without a GradScaler
  double weight_factor = 1;                                          // of the initial weights
  std::function<double(int)> loss_factor = [](int) { return 1.0; };  // by step
  double mask = 0;  // value of a buffer that is not cast
};

Run nan_batch_case(const NanBatchOptions& options) {
  return [=](bool fixed) {
    torch::manual_seed(0);
    nn::Sequential model(nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 1));
    {
      const torch::NoGradGuard no_grad;
      for (const Tensor& parameter : model->parameters()) parameter.mul_(options.weight_factor);
    }
    model->register_buffer("mask", torch::full({8}, options.mask));
    model->to(options.dtype);
    const Tensor inputs = torch::randn({32, 8}, options.dtype);
    const Tensor targets = inputs.sum(-1, true);
    int step = 0;
    const auto loss = [&] {
      Tensor batch = inputs.clone();
      if (step == 9 && !fixed) batch[3][2] = kNan;
      const Tensor error = (model->forward(batch) - targets).to(torch::kFloat);
      return error.square().mean() * options.loss_factor(step++);
    };
    mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
    return options.init_scale == 0 ? monitor_run_without_scaler(*model, optimizer, loss)
                                   : monitor_run(*model, optimizer, loss, {}, options.init_scale);
  };
}

/// A forward pass with an op that overflows float16 for inputs up to about 1.3; fixed by bfloat16.
Run overflow_case(const Op& op) {
  return [=](bool fixed) {
    TestModelImpl model;
    return monitor_run(model, mezzo::optim::SGD(model.parameters(), 1e-6), [&] {
      const Tensor hidden = model.norm->forward(model.body->forward(batch_of_ones()));
      return op(hidden.to(fixed ? torch::kBFloat16 : torch::kHalf)).to(torch::kFloat).mean() * 1e-9;
    });
  };
}

/// A run without faults.
std::string monitor_healthy(const std::function<Tensor(TestModelImpl& model, int step)>& loss,
                            const std::function<void(TestModelImpl& model)>& prepare = {},
                            double lr = 1e-4, double init_scale = 65536) {
  TestModelImpl model;
  {
    const torch::NoGradGuard no_grad;
    if (prepare) prepare(model);
  }
  int step = 0;
  return monitor_run(
      model, mezzo::optim::AdamW(model.parameters(), lr), [&] { return loss(model, step++); }, {},
      init_scale);
}

Tensor bfloat16_mean_square(TestModelImpl& model, int) {
  return model.forward(batch_of_ones().to(torch::kBFloat16)).to(torch::kFloat).square().mean();
}

}  // namespace

std::vector<FaultCase> divergence_monitor_cases() {
  using mezzo::optim::AdamWOptions;
  using mezzo::optim::SGDOptions;
  using mezzo::optim::WeightStorage;
  const char* const lower_lr = "divide the learning rate by 10 until the loss decreases";
  const char* const unknown = "the cause is unknown";
  const char* const finite_weights = "the loss is inf or NaN, but all weights are finite";
  return {
      {"InfWeight",
       "an inf in norm.weight",
       monitor_weight_case("norm.weight", kInf, torch::kFloat),
       {"norm.weight contains inf or NaN", "did when the DivergenceMonitor was constructed"},
       "initialize or load the weights again"},
      {"MaskOfMinus1e9",
       "a mask of -1e9 that the loss casts to float16",
       monitor_buffer_case(-1e9),
       {finite_weights},
       "use bfloat16"},
      {"SgdLearningRateTooHigh",
       "SGD with a learning rate of 10",
       lr_case<mezzo::optim::SGD>(10),
       {unknown},
       lower_lr},
      {"AdamLearningRateTooHigh",
       "Adam with a learning rate of 1e19",
       lr_case<mezzo::optim::Adam>(1e19),
       {unknown},
       lower_lr},
      {"MomentumAboveOne",
       "a momentum of 1.5",
       sgd_case([](bool fixed) { return SGDOptions(0.05).momentum(fixed ? 0.9 : 1.5); }),
       {unknown},
       "a momentum below 1"},
      {"WeightDecayTooLarge",
       "a weight decay of 100 with a learning rate of 0.05",
       sgd_case([](bool fixed) { return SGDOptions(0.05).weight_decay(fixed ? 0.01 : 100); }),
       {unknown},
       "weight decay"},
      {"InputsOf1e3",
       "inputs of 1e3",
       sgd_case([](bool) { return SGDOptions(0.05); }, 1e3),
       {unknown},
       "normalized inputs"},
      {"NanLearningRate",
       "a schedule whose warmup divides 0 by 0",
       least_squares([](nn::Sequential& model, const Tensor& inputs, double factor) {
         torch::optim::AdamW optimizer(model->parameters(), 1e-3);
         if (factor == 1) optimizer.param_groups()[0].options().set_lr(std::nan(""));
         return monitor_run(*model, optimizer,
                            [&] { return model->forward(inputs).sub(1).square().mean(); });
       }),
       {"contains inf or NaN", "what wrote it is unknown"},
       "Check the learning rate, eps"},
      {"EpsOfZero",
       "AdamW with an eps of 0 and a gradient of 0",
       adamw_case([](bool fixed) { return AdamWOptions(1e-3).eps(fixed ? 1e-8 : 0); }, true),
       {"contains inf or NaN", "what wrote it is unknown"},
       "Check the learning rate, eps"},
      {"EpsOfZeroWithoutScaler",
       "AdamW with an eps of 0 and a gradient of 0, without a GradScaler",
       adamw_case([](bool fixed) { return AdamWOptions(1e-3).eps(fixed ? 1e-8 : 0); }, false),
       {"contains inf or NaN", "which came first is unknown"},
       "eps"},
      {"LearningRateBeyondFloat16",
       "float16 weights with masters and a learning rate of 1e5",
       adamw_case([](bool fixed) { return AdamWOptions(fixed ? 1e-3 : 1e5); }, true, torch::kHalf,
                  {.weight_storage = WeightStorage::fp32_master}),
       {"contains inf or NaN", "what wrote it is unknown"},
       "Check the learning rate, eps"},
      {"LogOfZeroInLoss",
       "a loss of log(0)",
       monitor_loss_case([](const Tensor& loss) { return (loss * 0).log(); },
                         [](const Tensor& loss) { return (loss * 0).clamp_min(1e-6).log(); }),
       {"loss -inf", finite_weights},
       "log(0) and division by 0"},
      {"LogOfZeroOnOneRank",
       "a loss of log(0) on rank 3, reported by that rank",
       monitor_loss_case([](const Tensor& loss) { return (loss * 0).log(); },
                         [](const Tensor& loss) { return (loss * 0).clamp_min(1e-6).log(); }, 3),
       {"rank 3", finite_weights},
       "log(0) and division by 0"},
      {"OneLayerOverflows",
       "an inf in the gradient of body.weight in every step",
       monitor_gradient_case("body.weight", 65536),
       {"10 consecutive skipped steps", "all weights are finite", "body.weight, in 1 of 3 layers"},
       "the cause is unknown: use TraceOnSkips"},
      {"OverflowAtLowScale",
       "an inf in the gradient of head.weight at a loss scale of 0.5",
       monitor_gradient_case("head.weight", 0.5),
       {"1 skipped step, loss scale 0.5", "head.weight, in 1 of 3 layers"},
       "the cause is unknown: use TraceOnSkips"},
      {"InfFromAnotherRank",
       "inf in the gradients that rank 0 receives, with a finite loss on rank 0",
       monitor_rank_0,
       {"rank 0", "10 consecutive skipped steps", "has 1 inf"},
       "use TraceOnSkips"},
      {"NanBatchWithGrowingLoss",
       "a NaN batch while the loss and small weights grow",
       nan_batch_case({.weight_factor = 1e-3,
                       .loss_factor = [](int i) { return i < 5 ? 1.0 : std::pow(1.5, i - 5); }}),
       {finite_weights},
       "this batch"},
      {"NanBatchWithDoublingLoss",
       "a NaN batch while the loss doubles and weights grow tenfold",
       nan_batch_case({.weight_factor = 1e-2,
                       .loss_factor = [](int i) { return std::pow(2.0, std::max(i - 4, 0)); }}),
       {finite_weights},
       "this batch"},
      {"NanBatchAfterLargeLoss",
       "a NaN batch after one with 50 times the loss",
       nan_batch_case({.loss_factor = [](int i) { return i == 8 ? 50.0 : 1.0; }}),
       {finite_weights},
       "this batch"},
      {"NanBatchWithFloat32Mask",
       "a NaN batch, and a float32 mask of -1e9",
       nan_batch_case({.mask = -1e9}),
       {finite_weights},
       "this batch"},
      {"NanBatchWithBfloat16Counter",
       "a NaN batch in bfloat16, and a counter of 3e6",
       nan_batch_case({.dtype = torch::kBFloat16, .init_scale = 1, .mask = 3e6}),
       {finite_weights},
       "this batch"},
      {"NanBatchWithoutScaler",
       "a NaN batch in bfloat16 without a GradScaler",
       nan_batch_case({.dtype = torch::kBFloat16, .init_scale = 0}),
       {"contains inf or NaN", "which came first is unknown"},
       "this batch"},
      {"ManualSoftmax",
       "a manual softmax that does not subtract the maximum",
       overflow_case([](const Tensor& x) { return (x * 12).exp() / (x * 12).exp().sum(-1, true); }),
       {finite_weights},
       "use bfloat16"},
      {"InputsOf1e5",
       "inputs that are not normalized",
       overflow_case([](const Tensor& x) { return x * 1e5; }),
       {finite_weights},
       "use bfloat16"},
  };
}

std::vector<HealthyCase> healthy_divergence_monitor_cases() {
  return {
      {"GrowingSmallWeights",
       [] {
         return monitor_healthy([](TestModelImpl& model, int) { return mean_square(model); },
                                [](TestModelImpl& model) {
                                  for (const Tensor& parameter : model.parameters())
                                    parameter.mul_(1e-3);
                                },
                                1e-2);
       }},
      {"GrowingLoss",
       [] {
         return monitor_healthy(
             [](TestModelImpl& model, int i) { return mean_square(model) * (1 + i); });
       }},
      {"FiveSkipsAtTheStart",
       [] {
         return monitor_healthy([](TestModelImpl& model, int) {
           return (model.forward(batch_of_ones()).to(torch::kHalf) * 30).sum().to(torch::kFloat);
         });
       }},
      {"WeightsOf1e5InFloat32",
       [] {
         return monitor_healthy(
             [](TestModelImpl& model, int) { return mean_square(model); },
             [](TestModelImpl& model) { set_element(model.body->weight, 0, 1e5F); });
       }},
      {"MaskOfMinusInf",
       [] {
         return monitor_healthy(
             [](TestModelImpl& model, int) {
               const Tensor scores = model.forward(batch_of_ones()) + model.named_buffers()["mask"];
               return scores.softmax(-1).square().mean();
             },
             [](TestModelImpl& model) {
               model.register_buffer("mask",
                                     torch::tensor({0.F, -kInf, 0.F, 0.F, 0.F, 0.F, 0.F, 0.F}));
             });
       }},
      {"CounterOf1e9InBfloat16",
       [] {
         return monitor_healthy(bfloat16_mean_square, [](TestModelImpl& model) {
           model.register_buffer("seen", torch::full({}, 1e9));
           model.to(torch::kBFloat16);
         });
       }},
      {"ScaleOf1InBfloat16",
       [] {
         return monitor_healthy(
             bfloat16_mean_square, [](TestModelImpl& model) { model.to(torch::kBFloat16); }, 1e-4,
             1);
       }},
      {"ParameterWithoutGrad",
       [] {
         return monitor_healthy([](TestModelImpl& model, int) {
           return model.body->forward(batch_of_ones()).square().mean();
         });
       }},
      {"ZeroLoss",
       [] {
         return monitor_healthy([](TestModelImpl& model, int) { return mean_square(model) * 0; });
       }},
      {"NegativeLoss",
       [] {
         return monitor_healthy(
             [](TestModelImpl& model, int) { return -mean_square(model).log1p(); });
       }},
      {"UnequalBatches",
       [] {
         return monitor_healthy(
             [](TestModelImpl& model, int i) {
               return mean_square(model) * (i % 7 == 6 ? 1000.0 : 1.0);
             },
             {}, 1e-3);
       }},
      {"AutocastToFloat16",
       [] {
         return monitor_healthy(
             [](TestModelImpl& model, int) {
               const mezzo::AutocastGuard autocast(
                   {.device_type = torch::kCPU, .dtype = torch::kHalf});
               return mean_square(model).to(torch::kFloat);
             },
             {}, 1e-3);
       }},
  };
}

}  // namespace diagnostics_test
