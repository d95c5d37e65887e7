// Faults for AnomalyTrace: ops that produce inf or NaN.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/diagnostics/anomaly_trace.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "diagnostics_cases.h"

#define MEZZO_OP(...) [](const Tensor& x) -> Tensor { return __VA_ARGS__; }

namespace diagnostics_test {
namespace {

/// Returns the first anomaly of `step`.
std::string first_anomaly(const nn::Module& model, const std::function<void()>& step,
                          mezzo::AnomalyTraceOptions options = {}) {
  const mezzo::AnomalyTrace anomaly_trace(model, std::move(options));
  step();
  const auto anomalies = anomaly_trace.anomalies();
  return anomalies.empty() ? kNothing : anomalies.front().message();
}

/// Traces a forward and backward pass, under autocast if `dtype` is not float32.
std::string trace_step(const nn::Module& model, at::ScalarType dtype,
                       const std::function<Tensor()>& loss) {
  return first_anomaly(model, [&] {
    Tensor value;
    {
      const mezzo::AutocastGuard autocast({.device_type = torch::kCPU,
                                           .dtype = dtype == torch::kFloat ? torch::kHalf : dtype,
                                           .enabled = dtype != torch::kFloat});
      value = loss();
    }
    value.to(torch::kFloat).backward();
  });
}

std::string trace_op(const Op& op, at::ScalarType dtype = torch::kFloat) {
  TestModelImpl model(op);
  return trace_step(model, dtype, [&] { return model.forward(batch_of_ones()).mean(); });
}

/// A float32 op between the layers of the model.
Run trace_op_case(Op faulty, Op fixed_op) {
  return [=](bool fixed) { return trace_op(fixed ? fixed_op : faulty); };
}

/// An op with float16 input, fixed by `fixed_dtype`.
Run trace_float16_op_case(Op op, at::ScalarType fixed_dtype) {
  return [=](bool fixed) {
    const at::ScalarType dtype = fixed ? fixed_dtype : torch::kHalf;
    return trace_op([=](const Tensor& x) { return op(x.to(dtype)).to(torch::kFloat); }, dtype);
  };
}

/// A custom model with the loss `loss(model, fixed)`.
template <class Model>
Run trace_model_case(std::function<Model(bool)> make, std::function<Tensor(Model&, bool)> loss) {
  return [=](bool fixed) {
    torch::manual_seed(0);
    Model model = make(fixed);
    return trace_step(*model, torch::kFloat, [&] { return loss(model, fixed); });
  };
}

/// A loss of the model's output.
Run trace_loss_case(std::function<Tensor(const Tensor& output, bool fixed)> loss) {
  return [=](bool fixed) {
    TestModelImpl model;
    return trace_step(model, torch::kFloat,
                      [&] { return loss(model.forward(batch_of_ones()), fixed).mean(); });
  };
}

Run trace_weight_case(const std::string& parameter, float value) {
  return [=](bool fixed) {
    TestModelImpl model;
    if (!fixed) set_element(model.parameter(parameter), 0, value);
    return first_anomaly(model, [&] { model.forward(batch_of_ones()); });
  };
}

/// Traces the forward pass of a layer under autocast.
template <class Layer>
std::string trace_layer(Layer layer, const Tensor& batch, at::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  const mezzo::AutocastGuard autocast({.device_type = torch::kCPU, .dtype = dtype});
  return first_anomaly(*layer, [&] { layer->forward(batch); });
}

/// A layer under autocast to float16, fixed by bfloat16.
template <class Layer>
Run trace_layer_case(std::function<Layer()> make, const Tensor& batch) {
  return [=](bool fixed) {
    const Layer layer = make();
    return trace_layer(layer, batch, fixed ? torch::kBFloat16 : torch::kHalf);
  };
}

nn::Conv2d large_conv() {
  nn::Conv2d conv(8, 8, 3);
  const torch::NoGradGuard no_grad;
  conv->weight.fill_(5000);
  return conv;
}

std::string trace_loss_scale(double scale) {
  TestModelImpl model;
  return first_anomaly(model,
                       [&] {
                         Tensor loss;
                         {
                           const mezzo::AutocastGuard<torch::kCPU, torch::kHalf> autocast;
                           loss = model.forward(batch_of_ones()).to(torch::kFloat).sum();
                         }
                         (loss * scale).backward();
                       },
                       {.loss_scale = [scale] { return scale; }});
}

/// Three micro-batches, the third of which contains NaN.
std::string trace_micro_batches(bool fixed) {
  TestModelImpl model;
  std::string output;
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    Tensor x = batch_of_ones();
    if (micro_batch == 2 && !fixed) x[0][0] = kNan;
    const std::string micro_batch_output =
        first_anomaly(model, [&] { model.forward(x).sum().backward(); });
    if (micro_batch_output != kNothing) output += c10::str(micro_batch, ": ", micro_batch_output);
  }
  return output.empty() ? kNothing : output;
}

/// Infs that do not reach a result.
void harmless_infs(const Tensor& x) {
  const Tensor low = x.detach().to(torch::kHalf);
  low.sum() / 131072;
  low * 0.01 * 1e6;
  torch::minimum(torch::full_like(low, kInf), low);
  torch::full_like(x, -kInf).logsumexp(-1).exp();
  1 / (1 + (low * 0 + 12).exp());
}

Tensor log_after_harmless_infs(const Tensor& x) {
  for (int repeat = 0; repeat < 5; ++repeat) harmless_infs(x);
  return (x * 0).log();
}

/// sqrt(E[x^2] - E[x]^2) of values near `mean`.
Tensor manual_std(const Tensor& x, double mean, double eps) {
  const Tensor shifted =
      x * 0.02 + torch::linspace(mean - 1, mean + 1, 8, x.options()).unsqueeze(1);
  const Tensor variance = shifted.square().mean(-1, true) - shifted.mean(-1, true).square();
  return (eps > 0 ? variance.clamp_min(eps) : variance).sqrt() * x;
}

Tensor residual_layers(Tensor x) {
  for (int layer = 0; layer < 60; ++layer) x = x + x * 0.25;
  return x;
}

Tensor manual_sum(const Tensor& x) {
  Tensor sum = torch::zeros({8}, x.options());
  for (int i = 0; i < 8; ++i) sum = sum + (x.select(1, i) * 150).square();
  return x * sum.unsqueeze(1);
}

Tensor upper() { return torch::ones({8, 8}).triu(1).to(torch::kBool); }

Tensor loss_with_banned_class(const Tensor& scores, bool fixed) {
  Tensor bias = torch::zeros({8});
  bias[3] = fixed ? -1e4F : -kInf;
  return nn::functional::cross_entropy(
      scores + bias, torch::zeros({8}, torch::kLong),
      nn::functional::CrossEntropyFuncOptions().label_smoothing(0.1));
}

Tensor manual_softmax(const Tensor& x) {
  const Tensor powers = (x - x.amax(-1, true)).exp();
  return powers / powers.sum(-1, true);
}

Tensor eigenvectors(const Tensor& x, const Tensor& values) {
  return std::get<1>(torch::linalg_eigh(x.t().mm(x) * 0 + values)) * torch::arange(8);
}

/// Attention where all keys of the second sequence are padding.
Tensor padded_attention(nn::MultiheadAttention& attention, bool fixed) {
  const Tensor x = torch::randn({4, 2, 8});
  Tensor padding = torch::zeros({2, 4}, torch::kBool);
  padding[1].slice(0, fixed ? 1 : 0) = true;
  return std::get<0>(attention->forward(x, x, x, padding)).square().mean();
}

Tensor make_ctc_loss(const Tensor& output, std::int64_t labels, bool zero_infinity = false) {
  const auto length = [](std::int64_t steps) { return torch::full({1}, steps, torch::kLong); };
  return torch::ctc_loss(output.unsqueeze(1).log_softmax(-1),
                         torch::arange(labels).remainder(7).add(1).unsqueeze(0), length(8),
                         length(labels), 0, at::Reduction::Mean, zero_infinity);
}

Tensor add_raw_write(const Tensor& x, bool fixed) {
  const Tensor raw = torch::zeros_like(x);
  raw.mutable_data_ptr<float>()[3] = fixed ? 1 : kNan;
  return x + raw;
}

std::string trace_harmless_infs(at::ScalarType dtype) {
  TestModel model(Op([](const Tensor& x) {
    harmless_infs(x);
    const Tensor lowest = torch::full_like(x, kInf).minimum(x);
    const Tensor causal = torch::full({8, 8}, -kInf).triu(1);
    return (x.matmul(x.t()) + causal).softmax(-1).matmul(x.to(x.scalar_type())) + lowest * 1e-6;
  }));
  return trace_step(*model, dtype, [&] { return mean_square(*model); });
}

/// A running minimum and maximum that start at inf and -inf.
Tensor running_min_max(const Tensor& x) {
  Tensor low = torch::full({8}, kInf, x.options()), high = -low;
  for (int i = 0; i < 8; ++i) {
    low = torch::minimum(low, x.select(1, i));
    high = torch::maximum(high, x.select(1, i));
  }
  return (x - low.unsqueeze(1)) / (high - low).clamp_min(1e-3).unsqueeze(1);
}

/// A maximum of scores that start at -inf, and zeros that libtorch guards.
Tensor guarded_zeros(const Tensor& x) {
  const Tensor scores =
      torch::full_like(x, -kInf).scatter(1, torch::zeros({8, 2}, torch::kLong), 1);
  const Tensor best = std::get<0>(scores.max(1, true));
  const Tensor zero = (x - x).to(torch::kFloat);
  return x * best +
         (nn::functional::normalize(zero.detach()) + zero.norm() +
          torch::xlogy(zero.detach(), zero.detach()) + nn::functional::softplus(zero + 100) * 1e-3)
             .to(x.scalar_type());
}

}  // namespace

std::vector<FaultCase> anomaly_trace_cases() {
  namespace F = nn::functional;
  const auto bfloat16 = torch::kBFloat16, single = torch::kFloat;
  std::vector<FaultCase> faults = {
      {"LogOfZero",
       "a log of 0 in the forward pass",
       trace_op_case(MEZZO_OP((x * 0).log()), MEZZO_OP((x * 0).clamp_min(1e-6).log())),
       {"forward pass: aten::log (after norm)", "finite either: log of 0"}},
      {"LogOfNegative",
       "a log of -1.5",
       trace_op_case(MEZZO_OP((x * 0 - 1.5).log()), MEZZO_OP((x * 0 - 1.5).clamp_min(1e-6).log())),
       {"Inputs: float32 [8, 8] in [-1.5, -1.5]", "finite either: log of a negative number"}},
      {"SqrtOfBothSigns",
       "a square root of positive and negative numbers",
       trace_op_case(MEZZO_OP((x + 0.5).sqrt()), MEZZO_OP((x + 0.5).clamp_min(1e-6).sqrt())),
       {"aten::sqrt (after norm)", "finite either: square root of a negative number"}},
      {"MeanOverNoLabels",
       "a sum divided by an integer count of 0",
       trace_loss_case([](const Tensor& y, bool fixed) {
         const Tensor labels = torch::zeros({}, torch::kLong);
         return (y + 10).sum() / (fixed ? labels + 1e-6 : labels);
       }),
       {"forward pass: aten::div (after head)", "unknown"}},
      {"MeanOfNothing",
       "the mean of an empty masked_select",
       trace_loss_case([](const Tensor& y, bool fixed) {
         return y.masked_select(y > (fixed ? -100 : 100)).mean();
       }),
       {"aten::mean (after head)", "unknown"}},
      {"LossOfNoBoxes",
       "a smooth L1 loss without matched boxes",
       trace_loss_case([](const Tensor& y, bool fixed) {
         const Tensor boxes = y.slice(0, 0, fixed ? 8 : 0);
         return F::smooth_l1_loss(boxes, torch::zeros_like(boxes));
       }),
       {"aten::smooth_l1_loss (after head)", "Inputs: none", "unknown"}},
      {"LossOfNoTokens",
       "a cross entropy of no tokens",
       trace_loss_case([](const Tensor& y, bool fixed) {
         const std::int64_t tokens = fixed ? 8 : 0;
         return F::cross_entropy(y.slice(0, 0, tokens), torch::zeros({tokens}, torch::kLong));
       }),
       {"aten::cross_entropy_loss (after head)", "unknown"}},
      {"SqrtOfZeroInBackward",
       "the gradient of sqrt at 0",
       trace_op_case(MEZZO_OP((x - x).sqrt() * x), MEZZO_OP((x - x + 1e-6).sqrt() * x)),
       {"backward pass: ", "of SqrtBackward0 (after norm)", "finite either: division by 0"}},
      {"LogUnderWhere",
       "where(x > 0, log(x), 0)",
       trace_op_case(MEZZO_OP(torch::where(x > 0, (x * (x > 0)).log(), 0)),
              MEZZO_OP(torch::where(x > 0, (x * (x > 0)).clamp_min(1e-6).log(), 0))),
       {"backward pass: ", "of LogBackward0 (after norm)", "finite either: division by 0"}},
      {"PowerOfZeroInBackward",
       "the gradient of 0 to the power of 0.5",
       trace_op_case(MEZZO_OP(x * (x - x).pow(0.5)), MEZZO_OP(x * (x - x).clamp_min(1e-6).pow(0.5))),
       {"backward pass: ", "of PowBackward0", "unknown"}},
      {"ZeroToANegativePower",
       "0 to the power of -0.5, with a tensor of exponents",
       trace_op_case(MEZZO_OP((x * 0).pow(torch::full({8}, -0.5))),
              MEZZO_OP((x * 0).clamp_min(1e-2).pow(torch::full({8}, -0.5)))),
       {"forward pass: aten::pow (after norm)", "unknown"}},
      {"Log1pOfMinusOne",
       "log1p of -1",
       trace_op_case(MEZZO_OP((x * 0 - 1).log1p()), MEZZO_OP((x * 0 - 1).clamp_min(1e-3 - 1).log1p())),
       {"forward pass: aten::log1p (after norm)", "finite either: log1p of"}},
      {"LogitOfOne",
       "the logit of a sigmoid that rounds to 1",
       trace_op_case(MEZZO_OP((x * 0 + 30).sigmoid().logit()),
              MEZZO_OP((x * 0 + 30).sigmoid().clamp(1e-3, 1 - 1e-3).logit())),
       {"forward pass: aten::logit (after norm)", "unknown"}},
      {"AcoshBelowOne",
       "acosh of 0.5",
       trace_op_case(MEZZO_OP((x * 0 + 0.5).acosh()),
              MEZZO_OP((x * 0 + 0.5).clamp_min(1 + 1e-3).acosh())),
       {"forward pass: aten::acosh (after norm)", "unknown"}},
      {"DeterminantOfASingularMatrix",
       "the log-determinant of a zero covariance",
       trace_op_case(MEZZO_OP((x * 0).t().mm(x).logdet() * x),
              MEZZO_OP(((x * 0).t().mm(x) + torch::eye(8) * 1e-2).logdet() * x)),
       {"aten::logdet (after norm)", "unknown"}},
      {"EqualEigenvalues",
       "the gradient of eigenvectors with equal eigenvalues",
       trace_op_case(MEZZO_OP(eigenvectors(x, torch::eye(8))),
              MEZZO_OP(eigenvectors(x, torch::arange(8).to(torch::kFloat).diag()))),
       {"backward pass: ", "of LinalgEighBackward0", "finite either: division by 0"}},
      {"AcosOutOfRange",
       "acos of 2",
       trace_op_case(MEZZO_OP((x * 0 + 2).acos()), MEZZO_OP((x * 0 + 2).clamp(-0.999, 0.999).acos())),
       {"forward pass: aten::acos (after norm)", "finite either: acos of a number outside"}},
      {"AngleOfEqualVectors",
       "the gradient of acos at 1",
       trace_op_case(MEZZO_OP(x * (x * 0 + 1).acos()),
              MEZZO_OP(x * (x * 0 + 1).clamp(-0.999, 0.999).acos())),
       {"backward pass: ", "of AcosBackward0", "finite either: division by 0"}},
      {"ExpInFloat32",
       "exp of 100",
       trace_op_case(MEZZO_OP((x * 0 + 100).exp()), MEZZO_OP((x * 0 + 80).exp())),
       {"forward pass: aten::exp (after norm)", "In float64 the result is finite, up to"},
       "reduce the magnitude of its result"},
      {"StdOfOneValue",
       "the standard deviation of one value",
       trace_op_case(MEZZO_OP(x / x.slice(1, 0, 1).std(-1, true, true)),
              MEZZO_OP(x / x.std(-1, true, true))),
       {"forward pass: aten::std (after norm)", "unknown"}},
      {"LayerNormOverOneElement",
       "a LayerNorm over one element with an eps of 0",
       trace_model_case<nn::LayerNorm>(
           [](bool fixed) {
             return nn::LayerNorm(nn::LayerNormOptions({1}).eps(fixed ? 1e-5 : 0));
           },
           [](nn::LayerNorm& norm, bool) {
             return norm->forward(torch::ones({4, 1})).mean();
           }),
       {"forward pass: aten::layer_norm", "unknown"}},
      {"NegativeRunningVariance",
       "a batch norm in eval mode with a running variance of -1",
       trace_model_case<nn::BatchNorm1d>(
           [](bool fixed) {
             nn::BatchNorm1d norm(8);
             norm->running_var.fill_(-1);
             if (fixed) norm->reset_running_stats();
             norm->eval();
             return norm;
           },
           [](nn::BatchNorm1d& norm, bool) { return norm->forward(batch_of_ones()).mean(); }),
       {"aten::batch_norm", "unknown"}},
      {"MaskTimesMinusInf",
       "scores masked with -inf, times a mask of 0",
       trace_op_case(MEZZO_OP(x.masked_fill(upper(), -kInf) * upper().logical_not().to(torch::kFloat)),
              MEZZO_OP(x.masked_fill(upper(), -kInf).masked_fill(upper(), 0))),
       {"forward pass: aten::mul (after norm)", "unknown"}},
      {"MaxOfMaskedRow",
       "a manual softmax that subtracts the maximum of a row of -inf",
       trace_op_case(MEZZO_OP(manual_softmax(x + torch::full_like(x, -kInf))),
              MEZZO_OP(manual_softmax(x + torch::full_like(x, -kInf).triu(1)))),
       {"forward pass: aten::sub (after norm)", "unknown"}},
      {"SoftmaxOfMaskedRow",
       "a softmax over a row of -inf",
       trace_op_case(MEZZO_OP((x + torch::full_like(x, -kInf)).softmax(-1)),
              MEZZO_OP((x + torch::full_like(x, -kInf).triu(1)).softmax(-1))),
       {"aten::softmax (after norm)", "unknown"}},
      {"LogSumExpOfMaskedRow",
       "the gradient of logsumexp over a row of -inf",
       trace_op_case(MEZZO_OP(x * (x + torch::full_like(x, -kInf)).logsumexp(-1, true).exp()),
              MEZZO_OP(x * (x + torch::full_like(x, -kInf).triu(1)).logsumexp(-1, true).exp())),
       {"backward pass: ", "of LogsumexpBackward0", "unknown"}},
      {"AttentionOverPadding",
       "MultiheadAttention with a sequence of padding only",
       trace_model_case<nn::MultiheadAttention>([](bool) { return nn::MultiheadAttention(8, 2); },
                                            padded_attention),
       {"aten::softmax", "unknown"}},
      {"LabelSmoothingWithBannedClass",
       "label smoothing with a score of -inf",
       trace_loss_case(loss_with_banned_class),
       {"aten::cross_entropy_loss (after head)", "unknown"}},
      {"LossOfNoLabels",
       "cross entropy with all labels ignored",
       trace_loss_case([](const Tensor& y, bool fixed) {
         return F::cross_entropy(y, torch::full({8}, fixed ? 1 : -100, torch::kLong));
       }),
       {"aten::cross_entropy_loss (after head)", "unknown"}},
      {"CtcWithTooManyLabels",
       "a CTC loss with more labels than time steps",
       trace_loss_case([](const Tensor& y, bool fixed) { return make_ctc_loss(y, 12, fixed); }),
       {"aten::ctc_loss", "unknown"}},
      {"NanInBatch",
       "a NaN in the batch",
       [](bool fixed) {
         TestModelImpl model;
         Tensor batch = batch_of_ones();
         if (!fixed) batch[3][2] = kNan;
         return first_anomaly(model, [&] { model.forward(batch); });
       },
       {"in body", "no traced op produced it"},
       "check the batch"},
      {"NanOfRawPointer",
       "a NaN written to a constant through a raw pointer",
       [](bool fixed) {
         TestModelImpl model([=](const Tensor& x) { return add_raw_write(x, fixed); });
         return first_anomaly(model, [&] { model.forward(batch_of_ones()); });
       },
       {"aten::add (after norm)", "no traced op produced it"},
       "constants, buffers"},
      {"NanInThirdMicroBatch",
       "a NaN in the third of three micro-batches",
       trace_micro_batches,
       {"2: forward pass: ", "no traced op produced it"},
       "check the batch"},
      {"InfWeight",
       "an inf in head.weight",
       trace_weight_case("head.weight", kInf),
       {"in head", "Parameter head.weight is not finite, and later steps cannot restore it"},
       "load an earlier checkpoint"},
      {"LogAfterHarmlessInfs",
       "a log of 0 after large scalars, a running minimum, a masked row and a manual sigmoid",
       trace_op_case(log_after_harmless_infs, MEZZO_OP((x * 0).clamp_min(1e-6).log())),
       {"forward pass: aten::log (after norm) produced float32", "finite either: log of 0", "rounding can turn"}},
      {"LossScaleTooHigh",
       "a loss scale of 2^24 in float16",
       [](bool fixed) { return trace_loss_scale(fixed ? 256 : 16777216); },
       {"backward pass: ", "without the loss scale of", "the model needs no change",
        "the result is finite, up to"},
       "GradScaler will lower the scale"},

      // Values outside float16's range or precision.
      {"ExpInFloat16",
       "exp of 12 in float16",
       trace_float16_op_case(MEZZO_OP((x * 0 + 12).exp()), bfloat16),
       {"aten::exp (after norm)", "In float32 the result is finite, up to 1.63e+05"},
       "use bfloat16"},
      {"MaskTimesMinus1e9InFloat16",
       "(1 - mask) * -1e9 in float16",
       trace_float16_op_case(MEZZO_OP((x + (1 - torch::zeros_like(x)) * -1e9).softmax(-1)), bfloat16),
       {"aten::mul (after norm)", "In float32 the result is finite, up to 1e+09"},
       "use bfloat16"},
      {"AttentionWithoutScale",
       "attention scores without the 1/sqrt(d) scale",
       trace_float16_op_case(MEZZO_OP(torch::matmul(x * 150, (x * 150).t()).softmax(-1)), bfloat16),
       {"aten::matmul (after norm)", "In float32 the result is finite, up to"},
       "use bfloat16"},
      {"ResidualsOf60Layers",
       "60 residual layers that each grow by 25 %",
       trace_float16_op_case(MEZZO_OP(residual_layers(x)), bfloat16),
       {"aten::add (after norm)", "In float32 the result is finite, up to"},
       "use bfloat16"},
      {"ManualSum",
       "a sequential sum of 8 squares of 150",
       trace_float16_op_case(manual_sum, bfloat16),
       {"aten::add (after norm)", "In float32 the result is finite, up to"},
       "use bfloat16"},
      {"ConvolutionInFloat16",
       "a convolution whose sums exceed float16",
       trace_layer_case<nn::Conv2d>(large_conv, torch::ones({1, 8, 4, 4})),
       {"In float32 the result is finite, up to 3.6e+05"},
       "use bfloat16"},
      {"EpsUnderflow",
       "0 / (0 + 1e-12) in float16",
       trace_float16_op_case(MEZZO_OP((x * 0) / (x * 0 + 1e-12)), single),
       {"forward pass: aten::div (after norm)", "finite either: division by 0", "rounding can turn"},
       "trace the step in float32"},
      {"EpsUnderflowInDice",
       "a float32 number divided by a float16 sum plus 1e-8",
       trace_float16_op_case(MEZZO_OP(x * (torch::zeros({}) / ((x * 0).sum() + 1e-8))), single),
       {"forward pass: aten::div (after norm)", "finite either: division by 0", "rounding can turn"},
       "trace the step in float32"},
      {"EpsUnderflowInRmsNorm",
       "a manual RMSNorm with an eps of 1e-8 in float16",
       trace_float16_op_case(MEZZO_OP(x * ((x * 0).square().mean(-1, true) + 1e-8).rsqrt()), single),
       {"aten::rsqrt (after norm)", "finite either: division by 0", "rounding can turn"},
       "trace the step in float32"},
      {"CancellationInFloat16",
       "E[x^2] - E[x]^2 in float16, negative after rounding",
       trace_float16_op_case(MEZZO_OP(manual_std(x, 8, 0)), single),
       {"finite either: square root of a negative number", "rounding can turn"},
       "trace the step in float32"},
      {"CancellationInFloat32",
       "E[x^2] - E[x]^2 of values near 3e4 in float32",
       trace_op_case(MEZZO_OP(manual_std(x, 3e4, 0)),
              MEZZO_OP(manual_std(x, 3e4, 1e-3))),
       {"aten::sqrt", "finite either: square root of a negative number"}},
      {"LogOfOneMinusP",
       "log(1 - p) in float16, where p rounds to 1",
       trace_float16_op_case(MEZZO_OP((1 - (x * 0 + 9).sigmoid()).log()), single),
       {"aten::log", "finite either: log of 0", "rounding can turn"},
       "trace the step in float32"},
  };
  for (FaultCase& fault : faults) {
    if (*fault.remedy != '\0') continue;
    const bool has_cause =
        std::any_of(fault.expected.begin(), fault.expected.end(),
                    [](const std::string& part) { return part.starts_with("finite either: "); });
    const bool is_backward = has_cause && fault.expected.front().starts_with("backward");
    fault.remedy = !has_cause    ? "check the input ranges"
                   : is_backward ? "keep the input of the forward op away from this value"
                                 : "clamp the input or add an eps";
  }
  return faults;
}

std::vector<HealthyCase> healthy_anomaly_trace_cases() {
  std::vector<HealthyCase> cases;
  const std::vector<std::pair<const char*, std::function<std::string(at::ScalarType)>>> all = {
      {"HarmlessInfs", trace_harmless_infs},
      {"RunningMinMax", [](at::ScalarType dtype) { return trace_op(running_min_max, dtype); }},
      {"GuardedZeros", [](at::ScalarType dtype) { return trace_op(guarded_zeros, dtype); }},
  };
  for (const auto& [name, run] : all) {
    for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      cases.push_back({name, [run, dtype] { return run(dtype); }});
    }
  }
  return cases;
}

}  // namespace diagnostics_test

#undef MEZZO_OP
