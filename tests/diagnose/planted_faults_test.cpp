#include <mezzo/autocast/autocast.h>
#include <mezzo/diagnose/anomaly_trace.h>
#include <mezzo/diagnose/divergence_watch.h>
#include <mezzo/diagnose/doctor.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/diagnose/underflow.h>
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "../distributed/alike_ranks.h"
#include "../distributed/recording_ranks.h"

// Faults that people plant by accident, each in a model of its own, and what mezzo's tools say of
// each. A row is a fault, how it is planted and asked about, and what the answer must name. The
// whole table, with the answers: mezzo_tests --gtest_filter='*PlantedFaults*' --gtest_output=json.
namespace planted_faults {
namespace {

using torch::Tensor;
namespace nn = torch::nn;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// A fault and who is to name it.
struct PlantedFault {
  const char* name;     ///< the test's
  const char* planted;  ///< in words
  std::function<std::string()> said;
  std::vector<std::string> names;  ///< all of which are in what was said
};

void PrintTo(const PlantedFault& fault, std::ostream* stream) { *stream << fault.planted; }

using Op = std::function<Tensor(const Tensor&)>;

/// Two layers and a norm, with room for a fault between the last two.
struct PatientImpl : nn::Module {
  explicit PatientImpl(Op fault = {}) : planted(std::move(fault)) {
    torch::manual_seed(0);
    register_module("body", body);
    register_module("norm", norm);
    register_module("head", head);
  }
  Tensor forward(const Tensor& x) {
    Tensor hidden = norm->forward(body->forward(x));
    if (planted) hidden = planted(hidden);
    return head->forward(hidden.to(head->weight.scalar_type()));
  }
  Tensor parameter(const std::string& name) { return named_parameters()[name]; }

  Op planted;
  nn::Linear body{8, 8};
  nn::LayerNorm norm{nn::LayerNormOptions({8})};
  nn::Linear head{8, 8};
};
TORCH_MODULE(Patient);

Tensor batch_of_ones() { return torch::ones({8, 8}); }

/// The model with `value` at `index` of a parameter, or of its gradient.
void plant(const Tensor& tensor, std::int64_t index, float value) {
  const torch::NoGradGuard no_grad;
  tensor.view({-1})[index] = value;
}

void plant_in_gradient(const Tensor& parameter, std::int64_t index, float value) {
  parameter.register_hook([index, value](const Tensor& gradient) {
    Tensor faulty = gradient.clone();
    plant(faulty, index, value);
    return faulty;
  });
}

// ---- OverflowReport: a step is skipped; which gradients were it? ----

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
  mezzo::GradBuckets buckets(model.parameters(),
                             mezzo::GradBucketsOptions().storage(mezzo::GradStorage::flat));
  mezzo::optim::AdamW optimizer(buckets, 1e-2);
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
  distributed_test::RecordingRanks ranks(
      distributed_test::AlikeRanks(2), [&](const std::string& collective, const Tensor& tensor) {
        const bool is_gradient = collective == "average" || collective == "sum";
        if (!is_own && is_gradient && tensor.is_floating_point()) plant(tensor, 0, kInf);
      });
  mezzo::DataParallel parallel(model, ranks);
  std::ostringstream out;
  mezzo::GradScaler scaler;
  scaler.on_skip(mezzo::OverflowReport(
      *model, {.stream = &out, .rank = is_own ? 3 : 0, .own_gradients = true}));
  mezzo::optim::AdamW optimizer(parallel.buckets(), 1e-2);
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

// ---- DivergenceWatch: is the run lost, and why? ----

/// What the watch says while `model` trains; `loss` is asked each step.
template <class Optimizer>
std::string watch_of(nn::Module& model, Optimizer&& optimizer, const std::function<Tensor()>& loss,
                     mezzo::DivergenceOptions options = {}, double init_scale = 65536) {
  std::string said = "nothing";
  options.callback = [&said](const mezzo::Divergence& divergence) { said = divergence.message(); };
  mezzo::Telemetry telemetry;
  telemetry.write_to(mezzo::DivergenceWatch(model, options));
  mezzo::GradScaler scaler(mezzo::GradScalerOptions().init_scale(init_scale));
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

Tensor squares(PatientImpl& model) { return model.forward(batch_of_ones()).square().mean(); }

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
  distributed_test::RecordingRanks ranks(
      distributed_test::AlikeRanks(2), [](const std::string& collective, const Tensor& tensor) {
        const bool is_gradient = collective == "average" || collective == "sum";
        if (is_gradient && tensor.is_floating_point()) plant(tensor, 0, kInf);
      });
  mezzo::DataParallel parallel(model, ranks);
  return watch_of(*model, mezzo::optim::AdamW(parallel.buckets(), 1e-4),
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

// ---- AnomalyTrace: which op made the first inf or NaN? ----

/// What the trace says of `step`.
std::string trace_of(const nn::Module& model, const std::function<void()>& step,
                     mezzo::AnomalyTraceOptions options = {}) {
  const mezzo::AnomalyTrace trace(model, std::move(options));
  step();
  const auto anomalies = trace.anomalies();
  return anomalies.empty() ? "nothing" : anomalies.front().message();
}

std::string trace_of_op(const Op& op, const Tensor& batch = batch_of_ones(),
                        std::optional<int> rank = std::nullopt) {
  PatientImpl model(op);
  return trace_of(model, [&] { model.forward(batch).sum().backward(); }, {.rank = rank});
}

/// The same under autocast to half.
std::string trace_in_half(const Op& op, const Tensor& batch = batch_of_ones()) {
  PatientImpl model(op);
  return trace_of(model, [&] {
    const mezzo::Autocast<torch::kCPU, torch::kHalf> autocast;
    model.forward(batch);
  });
}

std::string trace_of_weight(const std::string& parameter, float value) {
  PatientImpl model;
  plant(model.parameter(parameter), 0, value);
  return trace_of(model, [&] { model.forward(batch_of_ones()); });
}

std::string trace_of_scale(double scale) {
  PatientImpl model;
  return trace_of(model,
                  [&] {
                    Tensor loss;
                    {
                      const mezzo::Autocast<torch::kCPU, torch::kHalf> autocast;
                      loss = model.forward(batch_of_ones()).to(torch::kFloat).sum();
                    }
                    (loss * scale).backward();
                  },
                  {.loss_scale = [scale] { return scale; }});
}

template <class Layer>
std::string trace_of_layer(Layer layer, const Tensor& batch, bool in_half) {
  const mezzo::AutocastGuard autocast(
      {.device = torch::kCPU, .dtype = torch::kHalf, .enabled = in_half});
  const torch::NoGradGuard no_grad;
  return trace_of(*layer, [&] { layer->forward(batch); });
}

nn::Conv2d large_conv() {
  nn::Conv2d conv(8, 8, 3);
  const torch::NoGradGuard no_grad;
  conv->weight.fill_(5000);
  return conv;
}

/// Of three micro-batches the third has the NaN: that is where the trace sees one.
std::string trace_of_micro_batches() {
  PatientImpl model;
  std::string said;
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    Tensor x = batch_of_ones();
    if (micro_batch == 2) x[0][0] = kNan;
    said += c10::str(micro_batch, ": ", trace_of(model, [&] { model.forward(x).sum().backward(); }),
                     "; ");
  }
  return said;
}

const std::vector<PlantedFault> kAnomalies = {
    {"LogOfZero",
     "a log of 0 in the forward pass",
     [] { return trace_of_op([](const Tensor& x) { return (x * 0).log(); }); },
     {"forward pass: aten::log, after norm", "In float64 it is not finite either: look for a log"}},
    {"DivisionByZero",
     "0 / 0 in the forward pass",
     [] { return trace_of_op([](const Tensor& x) { return x / (x - x); }); },
     {"forward pass: aten::div, after norm", "a division of 0"}},
    {"RootOfZeroInBackward",
     "the gradient of a root of 0",
     [] { return trace_of_op([](const Tensor& x) { return (x - x).sqrt() * x; }); },
     {"backward pass: ", "of SqrtBackward0, after norm", "a root of 0 in the backward pass"}},
    {"ExpInFloat32",
     "exp of 100",
     [] { return trace_of_op([](const Tensor& x) { return (x * 0 + 100).exp(); }); },
     {"forward pass: aten::exp, after norm", "In float64 it is finite"}},
    {"ExpInHalf",
     "exp of 12 in half",
     [] {
       return trace_in_half([](const Tensor& x) { return (x.to(torch::kHalf) * 0 + 12).exp(); });
     },
     {"forward pass: aten::exp, after norm", "In float32 it is finite, up to 1.63e+05"}},
    {"SquareInHalf",
     "a square of 300 in half",
     [] {
       return trace_in_half(
           [](const Tensor& x) { return (x.to(torch::kHalf) * 0 + 300).square(); });
     },
     {"after norm", "made float16", "In float32 it is finite, up to 9e+04"}},
    {"MaskTimesMinus1e9InHalf",
     "(1 - mask) * -1e9 in half",
     [] {
       return trace_in_half(
           [](const Tensor& x) { return (1 - torch::zeros_like(x, torch::kHalf)) * -1e9; });
     },
     {"(in aten::mul), after norm", "In float32 it is finite, up to 1e+09"}},
    {"EpsLostInHalf",
     "0 / (0 + 1e-12) in half",
     [] {
       return trace_in_half([](const Tensor& x) {
         const Tensor zero = x.to(torch::kHalf) * 0;
         return zero / (zero + 1e-12);
       });
     },
     {"forward pass: aten::div, after norm", "made with 1e-12, which float16 rounds to 0"}},
    {"SoftmaxOfAMaskedRow",
     "a softmax of -inf alone",
     [] {
       return trace_of_op([](const Tensor& x) { return torch::full_like(x, -kInf).softmax(-1); });
     },
     {"aten::_softmax (in aten::softmax)", "In float64 it is not finite either"}},
    {"AcosOutOfRange",
     "acos of 2",
     [] { return trace_of_op([](const Tensor& x) { return (x * 0 + 2).acos(); }); },
     {"forward pass: aten::acos, after norm", "In float64 it is not finite either"}},
    {"DeviationOfOneValue",
     "the deviation of a single value",
     [] {
       return trace_of_op([](const Tensor& x) { return x / x.slice(1, 0, 1).std(-1, true, true); });
     },
     {"forward pass: aten::std, after norm"}},
    {"NanInTheBatch",
     "a NaN in the batch",
     [] {
       return trace_of_op({}, torch::full({8, 8}, kNan));
     },
     {"in body", "look at the batch"}},
    {"InfInOneWeight",
     "an inf in head.weight",
     [] { return trace_of_weight("head.weight", kInf); },
     {"in head", "The parameter head.weight is not finite"}},
    {"NanInANorm",
     "a NaN in norm.bias",
     [] { return trace_of_weight("norm.bias", kNan); },
     {"in norm", "The parameter norm.bias is not finite"}},
    {"InfInAnEmbedding",
     "an inf in one row of an embedding",
     [] {
       nn::Embedding table(4, 8);
       plant(table->weight, 8, kInf);
       return trace_of_layer(table, torch::tensor({0, 1}), false);
     },
     {"aten::embedding", "The parameter weight is not finite"}},
    {"ConvolutionInHalf",
     "a convolution whose sums leave half",
     [] {
       return trace_of_layer(large_conv(), torch::ones({1, 8, 4, 4}), true);
     },
     {"In float32 it is finite, up to 3.6e+05"}},
    {"WeightBeyondHalf",
     "weights of 1e5 under autocast to half",
     [] {
       nn::Linear layer(8, 8);
       plant(layer->weight, 0, 1e5F);
       return trace_of_layer(layer, batch_of_ones(), true);
     },
     {"aten::_to_copy", "weight float32 [8, 8]", "In float32 it is finite, up to 1e+05"}},
    {"LossScaleTooHigh",
     "a loss scale of 2^24 in half",
     [] { return trace_of_scale(16777216); },
     {"backward pass: ", "would hold it without the loss scale",
      "nothing is wrong with the model"}},
    {"NanInTheThirdMicroBatch",
     "a NaN in the third of three micro-batches",
     trace_of_micro_batches,
     {"0: nothing; 1: nothing; 2: forward pass: ", "look at the batch"}},
    {"LossOfNoLabels",
     "cross entropy where every label is ignored",
     [] {
       PatientImpl model;
       return trace_of(model, [&] {
         nn::functional::cross_entropy(model.forward(batch_of_ones()),
                                       torch::full({8}, -100, torch::kLong));
       });
     },
     {"aten::nll_loss", "after head"}},
    {"OneBadRankTraced",
     "a log of 0 on rank 2",
     [] { return trace_of_op([](const Tensor& x) { return (x * 0).log(); }, batch_of_ones(), 2); },
     {"rank 2, forward pass: aten::log, after norm"}},
};

// ---- UnderflowReport: what is lost before anything is inf? ----

/// The line of `layer` for gradients of `magnitude` in half, and the suggested scale.
std::string underflow_of(const std::string& layer, const Op& fault) {
  PatientImpl model;
  model.forward(batch_of_ones()).square().sum().backward();
  for (const auto& entry : model.named_parameters()) {
    if (entry.key().starts_with(layer)) entry.value().mutable_grad() = fault(entry.value().grad());
  }
  mezzo::UnderflowReport report(torch::kHalf);
  report.add_gradients(model);
  std::string said;
  for (const auto& one : report.layers()) {
    if (one.layer == layer) {
      said = c10::str(one.layer, ": zero ", one.zero, ", lost ", one.lost, ", subnormal ",
                      one.subnormal, ", overflow ", one.overflow);
    }
  }
  return said;
}

std::string suggestion_for(double magnitude) {
  PatientImpl model;
  model.head->weight.mutable_grad() = torch::full({8, 8}, magnitude);
  mezzo::UnderflowReport report(torch::kHalf);
  report.add_gradients(model);
  return "scale " + mezzo::detail::number_text(mezzo::suggest_loss_scale(report));
}

const std::vector<PlantedFault> kUnderflows = {
    {"GradientsOf1e9th",
     "gradients of 1e-9 in body",
     [] { return underflow_of("body", [](const Tensor& g) { return torch::full_like(g, 1e-9); }); },
     {"body: zero 0, lost 1,"}},
    {"DeadLayer",
     "gradients of 0 in head",
     [] { return underflow_of("head", [](const Tensor& g) { return torch::zeros_like(g); }); },
     {"head: zero 1, lost 0,"}},
    {"SubnormalGradients",
     "gradients of 1e-6 in norm",
     [] { return underflow_of("norm", [](const Tensor& g) { return torch::full_like(g, 1e-6); }); },
     {"norm: zero 0, lost 0, subnormal 1,"}},
    {"GradientsBeyondHalf",
     "gradients of 1e5 in head",
     [] { return underflow_of("head", [](const Tensor& g) { return torch::full_like(g, 1e5); }); },
     {"head: zero 0, lost 0, subnormal 0, overflow 1"}},
    {"ScaleThatIsTooLow",
     "gradients of 2^-10 without a loss scale",
     [] { return suggestion_for(std::exp2(-10)); },
     {"scale 4194304"}},
};

// ---- diagnose: before the run ----

/// All findings that matter, a line each.
std::string findings_of(const mezzo::Diagnosis& diagnosis) {
  std::string said;
  for (const auto& finding : diagnosis.findings) {
    said += c10::str(to_string(finding.severity), " ", finding.where, ": ", finding.reason, "\n");
  }
  return said;
}

std::string doctor_of(PatientImpl& model, const Tensor& batch = batch_of_ones(),
                      at::ScalarType dtype = torch::kHalf) {
  return findings_of(
      mezzo::diagnose(model, batch, torch::kCPU, {.dtype = dtype, .measure = false}));
}

std::string doctor_of_op(const Op& op) {
  PatientImpl model(op);
  return doctor_of(model);
}

std::string doctor_of_weight(const std::string& parameter, float value) {
  PatientImpl model;
  const torch::NoGradGuard no_grad;
  model.parameter(parameter).fill_(value);
  return doctor_of(model);
}

template <class Layer>
std::string doctor_of_layer(Layer layer, const Tensor& batch) {
  return findings_of(
      mezzo::diagnose(layer, batch, torch::kCPU, {.dtype = torch::kHalf, .measure = false}));
}

std::string doctor_of_script(const std::string& line) {
  torch::jit::Module layer("Layer"), model("Model");
  layer.register_parameter("weight", torch::ones({8, 8}), false);
  layer.define("def forward(self, x):\n  y = torch.matmul(x, self.weight)\n  return " + line +
               "\n");
  model.register_module("attention", layer);
  model.define("def forward(self, x):\n  return self.attention.forward(x)\n");
  return findings_of(mezzo::diagnose(model, {batch_of_ones()}, torch::kCPU,
                                     {.dtype = torch::kHalf, .measure = false}));
}

const std::vector<PlantedFault> kBeforeTheRun = {
    {"DoctorMaskInHalf",
     "masked_fill with -1e9 in half",
     [] {
       return doctor_of_op([](const Tensor& x) {
         const Tensor y = x.to(torch::kHalf);
         return y.masked_fill(y > 1, -1e9);
       });
     },
     {"error after norm: masked_fill with -1e+09 computes in float16",
      "error after norm: the forward pass throws in float32 already, in aten::masked_fill"}},
    {"DoctorEpsInHalf",
     "clamp_min with 1e-12 in half",
     [] {
       return doctor_of_op(
           [](const Tensor& x) { return x / x.to(torch::kHalf).norm().clamp_min(1e-12); });
     },
     {"clamp_min with 1e-12"}},
    {"DoctorAddedEpsInHalf",
     "an eps of 1e-10 added in half",
     [] {
       return doctor_of_op([](const Tensor& x) { return x / (x.to(torch::kHalf).abs() + 1e-10); });
     },
     {"warning after norm: add with 1e-10 computes in float16"}},
    {"DoctorEpsOfALayerNorm",
     "a LayerNorm with an eps of 1e-12",
     [] {
       nn::Sequential model(nn::Linear(8, 8), nn::LayerNorm(nn::LayerNormOptions({8}).eps(1e-12)));
       return doctor_of_layer(model, batch_of_ones());
     },
     {"note 1: layer_norm with 1e-12"}},
    {"DoctorLargeConstant",
     "a product with 1e6 in half",
     [] { return doctor_of_op([](const Tensor& x) { return x.to(torch::kHalf) * 1e6; }); },
     {"error after norm: mul with 1e+06 computes in float16",
      "the model itself computes in low precision, from aten::"}},
    {"DoctorInfWeight",
     "weights of inf",
     [] { return doctor_of_weight("head.weight", kInf); },
     {"error head.weight: this parameter holds inf or NaN"}},
    {"DoctorWeightBeyondHalf",
     "weights of 1e5",
     [] { return doctor_of_weight("body.weight", 1e5F); },
     {"error body.weight: this parameter holds 1e+05 in magnitude, beyond float16"}},
    {"DoctorWeightLostInHalf",
     "weights of 1e-9",
     [] { return doctor_of_weight("head.bias", 1e-9F); },
     {"warning head.bias: a cast to float16 makes up to 1e+02 % of the values"}},
    {"DoctorBuffer",
     "a buffer of -1e9",
     [] {
       PatientImpl model;
       model.register_buffer("causal", torch::full({8, 8}, -1e9));
       return doctor_of(model);
     },
     {"warning causal: this buffer holds 1e+09 in magnitude, beyond float16"}},
    {"DoctorNanBuffer",
     "a running mean of NaN",
     [] {
       nn::Sequential model(nn::Linear(8, 8), nn::BatchNorm1d(8));
       model->named_buffers()["1.running_mean"].fill_(kNan);
       return doctor_of_layer(model, batch_of_ones());
     },
     {"error 1.running_mean: this buffer holds inf or NaN"}},
    {"DoctorLogOfZero",
     "a log of 0 that float32 has too",
     [] { return doctor_of_op([](const Tensor& x) { return (x * 0).log(); }); },
     {"in float32 already: precision is not the cause"}},
    {"DoctorOverflowInHalf",
     "an overflow that only half has",
     [] {
       return doctor_of_op([](const Tensor& x) { return (x.to(torch::kHalf) * 0 + 300).square(); });
     },
     {"error (model): the output has inf or NaN without autocast already; the model itself"}},
    {"DoctorOverflowUnderAutocast",
     "weights of 1e4, whose sums only float32 holds",
     [] { return doctor_of_weight("body.weight", 1e4F); },
     {"the output has inf or NaN under autocast to float16 and none in float32"}},
    {"DoctorAwkwardSizes",
     "a layer of 9 outputs",
     [] { return doctor_of_layer(nn::Linear(8, 9), batch_of_ones()); },
     {"note (model): its weight is 8 x 9", "multiples of 8"}},
    {"DoctorConvolutionOfThree",
     "a convolution of 3 channels",
     [] {
       return doctor_of_layer(nn::Conv2d(3, 8, 3), torch::ones({2, 3, 8, 8}));
     },
     {"note (model): its weight is 3 x 8"}},
    {"DoctorWeightCastTwice",
     "one weight that two products read",
     [] {
       nn::Linear layer(nn::LinearOptions(8, 8).bias(false));
       return doctor_of_layer(nn::Sequential(layer, nn::ReLU(), layer), batch_of_ones());
     },
     {"warning 0.weight: 1 of 1 parameters are cast to float16", "more than once"}},
    {"DoctorScriptMask",
     "masked_fill with -1e9 in TorchScript",
     [] { return doctor_of_script("y.masked_fill(y > 1e4, -1e9)"); },
     {"error attention: masked_fill with -1e+09 computes in float16"}},
    {"DoctorScriptEps",
     "an eps of 1e-12 in TorchScript",
     [] { return doctor_of_script("y / (y.abs() + 1e-12)"); },
     {"warning attention: add with 1e-12 computes in float16"}},
};

class PlantedFaults : public testing::TestWithParam<PlantedFault> {};

TEST_P(PlantedFaults, AreNamed) {
  const PlantedFault& fault = GetParam();
  const std::string said = fault.said();
  RecordProperty("planted", fault.planted);
  RecordProperty("said", said);
  for (const std::string& name : fault.names) {
    EXPECT_THAT(said, testing::HasSubstr(name)) << "planted: " << fault.planted;
  }
}

std::string name_of_fault(const testing::TestParamInfo<PlantedFault>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(OverflowReport, PlantedFaults, testing::ValuesIn(kOverflows),
                         name_of_fault);
INSTANTIATE_TEST_SUITE_P(DivergenceWatch, PlantedFaults, testing::ValuesIn(kDivergences),
                         name_of_fault);
INSTANTIATE_TEST_SUITE_P(AnomalyTrace, PlantedFaults, testing::ValuesIn(kAnomalies), name_of_fault);
INSTANTIATE_TEST_SUITE_P(UnderflowReport, PlantedFaults, testing::ValuesIn(kUnderflows),
                         name_of_fault);
INSTANTIATE_TEST_SUITE_P(Doctor, PlantedFaults, testing::ValuesIn(kBeforeTheRun), name_of_fault);

/// CTC keeps -inf for its backward pass, for the paths that the labels rule out.
std::string trace_of_ctc() {
  PatientImpl model;
  return trace_of(model, [&] {
    const Tensor scores = model.forward(batch_of_ones()).unsqueeze(1).log_softmax(-1);
    const auto length = [](int steps) { return torch::full({1}, steps, torch::kLong); };
    torch::ctc_loss(scores, torch::arange(1, 4).unsqueeze(0), length(8), length(3)).backward();
  });
}

/// A model without a fault: none of the tools finds one.
TEST(PlantedFaultsNowhere, AreNotFound) {
  PatientImpl model;
  mezzo::optim::AdamW optimizer(model.parameters(), 1e-3);
  EXPECT_EQ(report_of(model, optimizer, [&] { return squares(model); }), "the step ran");
  EXPECT_EQ(watch_of(model, optimizer, [&] { return squares(model); }), "nothing");
  EXPECT_EQ(trace_of_op({}), "nothing");
  EXPECT_EQ(trace_in_half({}), "nothing");
  EXPECT_EQ(trace_of_ctc(), "nothing");
  EXPECT_EQ(doctor_of(model).find("error"), std::string::npos) << doctor_of(model);
}

}  // namespace
}  // namespace planted_faults
