// Is the run lost, and why? Asked of DivergenceMonitor.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/overflow_report.h>
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

/// What the watch says while `model` trains; `loss` is asked each step.
template <class Optimizer>
std::string watch_of(nn::Module& model, Optimizer&& optimizer, const std::function<Tensor()>& loss,
                     mezzo::DivergenceMonitorOptions options = {}, double init_scale = 65536) {
  std::string said = kNothing;
  options.callback = [&said](const mezzo::Finding& finding) { said = finding.message(); };
  mezzo::MetricsLogger logger;
  logger.add_callback(mezzo::DivergenceMonitor(model, options));
  mezzo::GradScaler scaler({.init_scale = init_scale});
  scaler.on_skip(nullptr);
  for (int step = 0; step < 30 && said == kNothing; ++step) {
    optimizer.zero_grad();
    const Tensor now = loss();
    scaler.scale(now).backward();
    const auto result = scaler.step(optimizer, mezzo::StepOptions{});
    scaler.update();
    logger.record(result, now);
    logger.flush();
  }
  return said;
}

/// The same where each step is applied, whatever its gradients are.
std::string watch_without_scaler(nn::Module& model, mezzo::optim::AdamW& optimizer,
                                 const std::function<Tensor()>& loss) {
  std::string said = kNothing;
  mezzo::DivergenceMonitor watch(
      model, {.callback = [&said](const mezzo::Finding& finding) { said = finding.message(); }});
  for (int step = 1; step <= 30 && said == kNothing; ++step) {
    optimizer.zero_grad();
    const Tensor now = loss();
    now.backward();
    optimizer.step();
    watch({.step = step, .loss = now.item<double>()});
  }
  return said;
}

Run weight(const std::string& parameter, float value, at::ScalarType dtype) {
  return [=](bool cured) {
    PatientImpl model;
    model.to(dtype);
    if (!cured) plant(model.parameter(parameter), 3, value);
    return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-3), [&] {
      return model.forward(batch_of_ones().to(dtype)).to(torch::kFloat).square().mean();
    });
  };
}

/// A buffer of `fill` that half makes inf, so that a softmax is 0 / 0 or NaN.
Run buffer(double fill) {
  return [=](bool cured) {
    PatientImpl model;
    const Tensor mask = model.register_buffer("mask", torch::full({8}, fill));
    const auto dtype = cured ? torch::kBFloat16 : torch::kHalf;
    return watch_of(model, mezzo::optim::SGD(model.parameters(), 1e-3), [&] {
      const Tensor scores = model.forward(batch_of_ones()).to(dtype);
      return (scores + mask.to(dtype)).softmax(-1).to(torch::kFloat).sum();
    });
  };
}

/// Least squares by an optimizer of `make(model, factor)`, whose rate is to be multiplied by
/// `factor`: the cure divides it by 10 until the loss falls, as the watch says.
using Trial =
    std::function<std::string(nn::Sequential& model, const Tensor& inputs, double factor)>;

Run least_squares(Trial trial, bool divides_rate = true) {
  return [=](bool cured) {
    const auto run = [&](double factor) {
      torch::manual_seed(0);
      nn::Sequential model(nn::Linear(8, 8), nn::Linear(8, 1));
      return trial(model, torch::randn({32, 8}), factor);
    };
    std::string said = run(cured ? 0.1 : 1);
    for (double factor = 0.01; cured && divides_rate && said != kNothing && factor > 1e-24;
         factor /= 10) {
      said = run(factor);
    }
    return said;
  };
}

template <class Optimizer>
Run rate(double value) {
  return least_squares([=](nn::Sequential& model, const Tensor& inputs, double factor) {
    return watch_of(*model, Optimizer(model->parameters(), value * factor),
                    [&] { return model->forward(inputs).sub(1).square().mean(); });
  });
}

Run sgd(const std::function<mezzo::optim::SGDOptions(bool cured)>& options, double inputs_are = 1) {
  return least_squares(
      [=](nn::Sequential& model, const Tensor& inputs, double factor) {
        const bool cured = factor != 1;
        return watch_of(*model, mezzo::optim::SGD(model->parameters(), options(cured)), [&] {
          return model->forward(inputs * (cured ? 1 : inputs_are)).sub(1).square().mean();
        });
      },
      /*divides_rate=*/false);
}

/// AdamW with these options, where the gradient of one parameter is 0, with a scaler or without.
Run adamw(const std::function<mezzo::optim::AdamWOptions(bool cured)>& options, bool scales,
          at::ScalarType dtype = torch::kFloat,
          const mezzo::optim::WeightStorageOptions& weights = {}) {
  return [=](bool cured) {
    PatientImpl model;
    model.to(dtype);
    mezzo::optim::AdamW optimizer(model.parameters(), options(cured), weights);
    const auto loss = [&] {
      return (model.forward(batch_of_ones().to(dtype)) * torch::eye(8)[0]).square().mean();
    };
    return scales ? watch_of(model, optimizer, loss) : watch_without_scaler(model, optimizer, loss);
  };
}

Run loss_of(Op faulty, Op cure, std::optional<int> rank = std::nullopt) {
  return [=](bool cured) {
    PatientImpl model;
    return watch_of(model, mezzo::optim::AdamW(model.parameters(), 1e-4),
                    [&] { return (cured ? cure : faulty)(squares(model)); }, {.rank = rank});
  };
}

/// The gradient of one parameter is bad in every step, and the loss is fine.
Run gradient(const std::string& parameter, double init_scale) {
  return [=](bool cured) {
    PatientImpl model;
    if (!cured) plant_in_gradient(model.parameter(parameter), 0, kInf);
    return watch_of(
        model, mezzo::optim::AdamW(model.parameters(), 1e-4), [&] { return squares(model); }, {},
        init_scale);
  };
}

/// What rank 0 of two says when the gradients of rank 1, which it averages with, are bad.
std::string watch_beside_a_bad_rank(bool cured) {
  Patient model;
  const auto ranks = distributed_test::make_recording_backend(
      distributed_test::make_fake_backend(2),
      [=](const std::string& collective, const Tensor& tensor) {
        const bool is_gradient = collective == "average" || collective == "sum";
        if (!cured && is_gradient && tensor.is_floating_point()) plant(tensor, 0, kInf);
      });
  mezzo::DistributedDataParallel parallel(model, ranks);
  return watch_of(*model, mezzo::optim::AdamW(model->parameters(), 1e-4),
                  [&] { return parallel(batch_of_ones()).square().mean(); }, {.rank = 0});
}

/// One NaN batch, the tenth, in a run that is well. `size` multiplies each batch's loss.
struct NanBatch {
  at::ScalarType dtype = torch::kFloat;
  double init_scale = 65536;  // 0: no scaler, and so no skip
  double small = 1;           // what the first weights are multiplied by
  std::function<double(int)> size = [](int) { return 1.0; };
  double mask = 0;  // of a buffer that nothing casts
};

Run nan_batch(const NanBatch& run) {
  return [=](bool cured) {
    torch::manual_seed(0);
    nn::Sequential model(nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 1));
    {
      const torch::NoGradGuard no_grad;
      for (const Tensor& parameter : model->parameters()) parameter.mul_(run.small);
    }
    model->register_buffer("mask", torch::full({8}, run.mask));
    model->to(run.dtype);
    const Tensor inputs = torch::randn({32, 8}, run.dtype);
    const Tensor targets = inputs.sum(-1, true);
    int step = 0;
    const auto loss = [&] {
      Tensor batch = inputs.clone();
      if (step == 9 && !cured) batch[3][2] = kNan;
      const Tensor error = (model->forward(batch) - targets).to(torch::kFloat);
      return error.square().mean() * run.size(step++);
    };
    mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
    return run.init_scale == 0 ? watch_without_scaler(*model, optimizer, loss)
                               : watch_of(*model, optimizer, loss, {}, run.init_scale);
  };
}

/// A forward pass whose op overflows in half; the cure is bfloat16. `op` takes hidden numbers of up
/// to about 1.3.
Run overflow(const Op& op) {
  return [=](bool cured) {
    PatientImpl model;
    return watch_of(model, mezzo::optim::SGD(model.parameters(), 1e-6), [&] {
      const Tensor hidden = model.norm->forward(model.body->forward(batch_of_ones()));
      return op(hidden.to(cured ? torch::kBFloat16 : torch::kHalf)).to(torch::kFloat).mean() * 1e-9;
    });
  };
}

/// A healthy run of the patient.
std::string healthy(const std::function<Tensor(PatientImpl& model, int step)>& loss,
                    const std::function<void(PatientImpl& model)>& prepare = {}, double rate = 1e-4,
                    double init_scale = 65536) {
  PatientImpl model;
  {
    const torch::NoGradGuard no_grad;
    if (prepare) prepare(model);
  }
  int step = 0;
  return watch_of(
      model, mezzo::optim::AdamW(model.parameters(), rate), [&] { return loss(model, step++); }, {},
      init_scale);
}

Tensor squares_in_bfloat16(PatientImpl& model, int) {
  return model.forward(batch_of_ones().to(torch::kBFloat16)).to(torch::kFloat).square().mean();
}

}  // namespace

std::vector<PlantedFault> divergences() {
  using mezzo::optim::AdamWOptions;
  using mezzo::optim::SGDOptions;
  using mezzo::optim::WeightStorage;
  const char* const slower = "divide the learning rate by 10 until the loss falls";
  const char* const unknown = "why is not known";
  const char* const finite_weights = "the loss is inf or NaN, computed from finite weights";
  return {
      {"InfWeight",
       "an inf in norm.weight",
       weight("norm.weight", kInf, torch::kFloat),
       {"norm.weight holds inf or NaN", "did when the watch was made"},
       "initialise or load it again"},
      {"MaskOfMinus1e9",
       "a mask of -1e9 that the loss casts to half",
       buffer(-1e9),
       {finite_weights},
       "use bfloat16"},
      {"RateTooHighForSgd",
       "SGD with a rate of 10",
       rate<mezzo::optim::SGD>(10),
       {unknown},
       slower},
      {"RateTooHighForAdam",
       "Adam with a rate of 1e19",
       rate<mezzo::optim::Adam>(1e19),
       {unknown},
       slower},
      {"MomentumAboveOne",
       "a momentum of 1.5",
       sgd([](bool cured) { return SGDOptions(0.05).momentum(cured ? 0.9 : 1.5); }),
       {unknown},
       "a momentum below 1"},
      {"WeightDecayTooLarge",
       "a weight decay of 100 at a rate of 0.05",
       sgd([](bool cured) { return SGDOptions(0.05).weight_decay(cured ? 0.01 : 100); }),
       {unknown},
       "weight decay"},
      {"InputsOf1e3",
       "inputs of 1e3",
       sgd([](bool) { return SGDOptions(0.05); }, 1e3),
       {unknown},
       "inputs of about 1"},
      {"RateOfNan",
       "a schedule whose warmup divides 0 by 0",
       least_squares([](nn::Sequential& model, const Tensor& inputs, double factor) {
         torch::optim::AdamW optimizer(model->parameters(), 1e-3);
         if (factor == 1) optimizer.param_groups()[0].options().set_lr(std::nan(""));
         return watch_of(*model, optimizer,
                         [&] { return model->forward(inputs).sub(1).square().mean(); });
       }),
       {"holds inf or NaN", "what wrote it is not known"},
       "Look at the learning rate, at eps"},
      {"EpsOfZero",
       "AdamW with an eps of 0, where a gradient is 0",
       adamw([](bool cured) { return AdamWOptions(1e-3).eps(cured ? 1e-8 : 0); }, true),
       {"holds inf or NaN", "what wrote it is not known"},
       "Look at the learning rate, at eps"},
      {"EpsOfZeroWithoutAScaler",
       "the same where each step is applied",
       adamw([](bool cured) { return AdamWOptions(1e-3).eps(cured ? 1e-8 : 0); }, false),
       {"holds inf or NaN", "which was first is not known"},
       "eps"},
      {"RateBeyondHalf",
       "weights of half with masters, and a rate of 1e5",
       adamw([](bool cured) { return AdamWOptions(cured ? 1e-3 : 1e5); }, true, torch::kHalf,
             {.weight_storage = WeightStorage::fp32_master}),
       {"holds inf or NaN", "what wrote it is not known"},
       "Look at the learning rate, at eps"},
      {"LogOfZeroInTheLoss",
       "a loss of log(0)",
       loss_of([](const Tensor& loss) { return (loss * 0).log(); },
               [](const Tensor& loss) { return (loss * 0).clamp_min(1e-6).log(); }),
       {"loss -inf", finite_weights},
       "a log or a division of 0"},
      {"OneBadRank",
       "a loss of log(0) on rank 3 alone, as that rank tells it",
       loss_of([](const Tensor& loss) { return (loss * 0).log(); },
               [](const Tensor& loss) { return (loss * 0).clamp_min(1e-6).log(); }, 3),
       {"rank 3", finite_weights},
       "a log or a division of 0"},
      {"OneLayerOverflows",
       "an inf in the gradient of body.weight in every step",
       gradient("body.weight", 65536),
       {"10 skipped in a row", "the weights are finite", "body.weight, in 1 of 3 layers"},
       "why is not known. An TraceOnSkips"},
      {"ScaleAtItsFloor",
       "the same with a scale that is 0.5 already",
       gradient("head.weight", 0.5),
       {"1 skipped in a row; loss scale 0.5", "head.weight, in 1 of 3 layers"},
       "why is not known. An TraceOnSkips"},
      {"BesideABadRank",
       "inf in what rank 0 gets from another rank, whose own loss is fine",
       watch_beside_a_bad_rank,
       {"rank 0", "10 skipped in a row", "has 1 inf"},
       "An TraceOnSkips"},
      {"NanBatchAmongHarderBatches",
       "a NaN batch after ever harder ones, while small weights grew",
       nan_batch({.small = 1e-3, .size = [](int i) { return i < 5 ? 1.0 : std::pow(1.5, i - 5); }}),
       {finite_weights},
       "in this batch"},
      {"NanBatchInACurriculum",
       "a NaN batch after ones that double their loss, while small weights grew tenfold",
       nan_batch({.small = 1e-2, .size = [](int i) { return std::pow(2.0, std::max(i - 4, 0)); }}),
       {finite_weights},
       "in this batch"},
      {"NanBatchAfterALargeLoss",
       "a NaN batch after one whose loss is 50 times the others'",
       nan_batch({.size = [](int i) { return i == 8 ? 50.0 : 1.0; }}),
       {finite_weights},
       "in this batch"},
      {"NanBatchBesideAFloatMask",
       "a NaN batch, and a mask of -1e9 that float32 reads",
       nan_batch({.mask = -1e9}),
       {finite_weights},
       "in this batch"},
      {"NanBatchBesideACounterInBfloat16",
       "a NaN batch in bfloat16, and a counter of 3e6",
       nan_batch({.dtype = torch::kBFloat16, .init_scale = 1, .mask = 3e6}),
       {finite_weights},
       "in this batch"},
      {"NanBatchWithoutAScaler",
       "a NaN batch in bfloat16, whose step is applied",
       nan_batch({.dtype = torch::kBFloat16, .init_scale = 0}),
       {"holds inf or NaN", "which was first is not known"},
       "in this batch"},
      {"ExpWithoutAMaximum",
       "a softmax by hand that subtracts no maximum",
       overflow([](const Tensor& x) { return (x * 12).exp() / (x * 12).exp().sum(-1, true); }),
       {finite_weights},
       "use bfloat16"},
      {"InputsOf1e5",
       "inputs that were not scaled",
       overflow([](const Tensor& x) { return x * 1e5; }),
       {finite_weights},
       "use bfloat16"},
  };
}

std::vector<HealthyRun> healthy_runs() {
  return {
      {"SmallWeightsThatGrow",
       [] {
         return healthy([](PatientImpl& model, int) { return squares(model); },
                        [](PatientImpl& model) {
                          for (const Tensor& parameter : model.parameters()) parameter.mul_(1e-3);
                        },
                        1e-2);
       }},
      {"ALossThatRises",
       [] { return healthy([](PatientImpl& model, int i) { return squares(model) * (1 + i); }); }},
      {"FiveSkipsAtTheStart",
       [] {
         return healthy([](PatientImpl& model, int) {
           return (model.forward(batch_of_ones()).to(torch::kHalf) * 30).sum().to(torch::kFloat);
         });
       }},
      {"WeightsOf1e5InFloat32",
       [] {
         return healthy([](PatientImpl& model, int) { return squares(model); },
                        [](PatientImpl& model) { plant(model.body->weight, 0, 1e5F); });
       }},
      {"AMaskOfMinusInfinity",
       [] {
         return healthy(
             [](PatientImpl& model, int) {
               const Tensor scores = model.forward(batch_of_ones()) + model.named_buffers()["mask"];
               return scores.softmax(-1).square().mean();
             },
             [](PatientImpl& model) {
               model.register_buffer("mask",
                                     torch::tensor({0.F, -kInf, 0.F, 0.F, 0.F, 0.F, 0.F, 0.F}));
             });
       }},
      {"ACounterOf1e9InBfloat16",
       [] {
         return healthy(squares_in_bfloat16, [](PatientImpl& model) {
           model.register_buffer("seen", torch::full({}, 1e9));
           model.to(torch::kBFloat16);
         });
       }},
      {"AScaleOf1InBfloat16",
       [] {
         return healthy(
             squares_in_bfloat16, [](PatientImpl& model) { model.to(torch::kBFloat16); }, 1e-4, 1);
       }},
      {"AParameterWithoutGradient",
       [] {
         return healthy([](PatientImpl& model, int) {
           return model.body->forward(batch_of_ones()).square().mean();
         });
       }},
      {"ALossOfZero",
       [] { return healthy([](PatientImpl& model, int) { return squares(model) * 0; }); }},
      {"ANegativeLoss",
       [] { return healthy([](PatientImpl& model, int) { return -squares(model).log1p(); }); }},
      {"LossesOfUnequalBatches",
       [] {
         return healthy(
             [](PatientImpl& model, int i) { return squares(model) * (i % 7 == 6 ? 1000.0 : 1.0); },
             {}, 1e-3);
       }},
      {"UnderAutocastToHalf",
       [] {
         return healthy(
             [](PatientImpl& model, int) {
               const mezzo::AutocastGuard autocast(
                   {.device_type = torch::kCPU, .dtype = torch::kHalf});
               return squares(model).to(torch::kFloat);
             },
             {}, 1e-3);
       }},
  };
}

}  // namespace diagnostics_test
