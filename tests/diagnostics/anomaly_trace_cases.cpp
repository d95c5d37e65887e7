// Which op made the first inf or NaN? Asked of AnomalyTrace.

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

#define MEZZO_OF_X(...) [](const Tensor& x) -> Tensor { return __VA_ARGS__; }

namespace diagnostics_test {
namespace {

/// What the trace says of `step`.
std::string trace_of(const nn::Module& model, const std::function<void()>& step,
                     mezzo::AnomalyTraceOptions options = {}) {
  const mezzo::AnomalyTrace trace(model, std::move(options));
  step();
  const auto anomalies = trace.anomalies();
  return anomalies.empty() ? kNothing : anomalies.front().message();
}

/// The same of a whole step whose loss is computed under autocast to `dtype`, or in float32.
std::string trace_of_step(const nn::Module& model, at::ScalarType dtype,
                          const std::function<Tensor()>& loss) {
  return trace_of(model, [&] {
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

std::string trace_of_op(const Op& op, at::ScalarType dtype = torch::kFloat) {
  PatientImpl model(op);
  return trace_of_step(model, dtype, [&] { return model.forward(batch_of_ones()).mean(); });
}

/// An op of float32 in the midst of a model.
Run traced(Op faulty, Op cured) {
  return [=](bool is_cured) { return trace_of_op(is_cured ? cured : faulty); };
}

/// An op whose input is of half, or of `wide`, which is the cure.
Run widened(Op op, at::ScalarType wide) {
  return [=](bool is_cured) {
    const at::ScalarType dtype = is_cured ? wide : torch::kHalf;
    return trace_of_op([=](const Tensor& x) { return op(x.to(dtype)).to(torch::kFloat); }, dtype);
  };
}

/// Of a model of its own, whose loss is `loss(is_cured)`.
template <class Model>
Run traced_model(std::function<Model(bool)> make, std::function<Tensor(Model&, bool)> loss) {
  return [=](bool is_cured) {
    torch::manual_seed(0);
    Model model = make(is_cured);
    return trace_of_step(*model, torch::kFloat, [&] { return loss(model, is_cured); });
  };
}

/// Of a loss of the patient's output.
Run traced_loss(std::function<Tensor(const Tensor& output, bool cured)> loss) {
  return [=](bool is_cured) {
    PatientImpl model;
    return trace_of_step(model, torch::kFloat,
                         [&] { return loss(model.forward(batch_of_ones()), is_cured).mean(); });
  };
}

Run traced_weight(const std::string& parameter, float value) {
  return [=](bool is_cured) {
    PatientImpl model;
    if (!is_cured) plant(model.parameter(parameter), 0, value);
    return trace_of(model, [&] { model.forward(batch_of_ones()); });
  };
}

/// One forward pass of a layer under autocast to half, or to bfloat16 if cured.
template <class Layer>
std::string trace_of_layer(Layer layer, const Tensor& batch, at::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  const mezzo::AutocastGuard autocast({.device_type = torch::kCPU, .dtype = dtype});
  return trace_of(*layer, [&] { layer->forward(batch); });
}

template <class Layer>
Run traced_layer(std::function<Layer()> make, const Tensor& batch) {
  return [=](bool is_cured) {
    const Layer layer = make();
    return trace_of_layer(layer, batch, is_cured ? torch::kBFloat16 : torch::kHalf);
  };
}

nn::Conv2d large_conv() {
  nn::Conv2d conv(8, 8, 3);
  const torch::NoGradGuard no_grad;
  conv->weight.fill_(5000);
  return conv;
}

std::string trace_of_scale(double scale) {
  PatientImpl model;
  return trace_of(model,
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

/// Of three micro-batches the third has the NaN: that is where the trace sees one.
std::string trace_of_micro_batches(bool is_cured) {
  PatientImpl model;
  std::string said;
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    Tensor x = batch_of_ones();
    if (micro_batch == 2 && !is_cured) x[0][0] = kNan;
    const std::string one = trace_of(model, [&] { model.forward(x).sum().backward(); });
    if (one != kNothing) said += c10::str(micro_batch, ": ", one);
  }
  return said.empty() ? kNothing : said;
}

/// Infs that reach no result.
void harmless(const Tensor& x) {
  const Tensor half = x.detach().to(torch::kHalf);
  half.sum() / 131072;
  half * 0.01 * 1e6;
  torch::minimum(torch::full_like(half, kInf), half);
  torch::full_like(x, -kInf).logsumexp(-1).exp();
  1 / (1 + (half * 0 + 12).exp());
}

Tensor log_behind_no_harm(const Tensor& x) {
  for (int repeat = 0; repeat < 5; ++repeat) harmless(x);
  return (x * 0).log();
}

/// E[x^2] - E[x]^2 of numbers about `mean`.
Tensor deviation_by_hand(const Tensor& x, double mean, double eps) {
  const Tensor shifted =
      x * 0.02 + torch::linspace(mean - 1, mean + 1, 8, x.options()).unsqueeze(1);
  const Tensor variance = shifted.square().mean(-1, true) - shifted.mean(-1, true).square();
  return (eps > 0 ? variance.clamp_min(eps) : variance).sqrt() * x;
}

Tensor residual_layers(Tensor x) {
  for (int layer = 0; layer < 60; ++layer) x = x + x * 0.25;
  return x;
}

Tensor sum_by_hand(const Tensor& x) {
  Tensor sum = torch::zeros({8}, x.options());
  for (int i = 0; i < 8; ++i) sum = sum + (x.select(1, i) * 150).square();
  return x * sum.unsqueeze(1);
}

Tensor upper() { return torch::ones({8, 8}).triu(1).to(torch::kBool); }

Tensor loss_over_a_ban(const Tensor& scores, bool is_cured) {
  Tensor ban = torch::zeros({8});
  ban[3] = is_cured ? -1e4F : -kInf;
  return nn::functional::cross_entropy(
      scores + ban, torch::zeros({8}, torch::kLong),
      nn::functional::CrossEntropyFuncOptions().label_smoothing(0.1));
}

Tensor softmax_by_hand(const Tensor& x) {
  const Tensor powers = (x - x.amax(-1, true)).exp();
  return powers / powers.sum(-1, true);
}

Tensor eigenvectors(const Tensor& x, const Tensor& values) {
  return std::get<1>(torch::linalg_eigh(x.t().mm(x) * 0 + values)) * torch::arange(8);
}

/// Attention of a batch in which the keys of the second sequence are all padding.
Tensor padded_attention(nn::MultiheadAttention& attention, bool is_cured) {
  const Tensor x = torch::randn({4, 2, 8});
  Tensor padding = torch::zeros({2, 4}, torch::kBool);
  padding[1].slice(0, is_cured ? 1 : 0) = true;
  return std::get<0>(attention->forward(x, x, x, padding)).square().mean();
}

Tensor ctc_of(const Tensor& output, std::int64_t labels, bool zero_infinity = false) {
  const auto length = [](std::int64_t steps) { return torch::full({1}, steps, torch::kLong); };
  return torch::ctc_loss(output.unsqueeze(1).log_softmax(-1),
                         torch::arange(labels).remainder(7).add(1).unsqueeze(0), length(8),
                         length(labels), 0, at::Reduction::Mean, zero_infinity);
}

Tensor with_raw_write(const Tensor& x, bool is_cured) {
  const Tensor raw = torch::zeros_like(x);
  raw.mutable_data_ptr<float>()[3] = is_cured ? 1 : kNan;
  return x + raw;
}

std::string trace_of_harmless(at::ScalarType dtype) {
  Patient model(Op([](const Tensor& x) {
    harmless(x);
    const Tensor lowest = torch::full_like(x, kInf).minimum(x);
    const Tensor causal = torch::full({8, 8}, -kInf).triu(1);
    return (x.matmul(x.t()) + causal).softmax(-1).matmul(x.to(x.scalar_type())) + lowest * 1e-6;
  }));
  return trace_of_step(*model, dtype, [&] { return squares(*model); });
}

/// A running minimum and maximum that begin at inf, and one masked row that nothing reads.
Tensor running_extremes(const Tensor& x) {
  Tensor low = torch::full({8}, kInf, x.options()), high = -low;
  for (int i = 0; i < 8; ++i) {
    low = torch::minimum(low, x.select(1, i));
    high = torch::maximum(high, x.select(1, i));
  }
  return (x - low.unsqueeze(1)) / (high - low).clamp_min(1e-3).unsqueeze(1);
}

/// The best of scores that begin at -inf, and numbers that are 0 where libtorch guards them.
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

std::vector<PlantedFault> anomalies() {
  namespace F = nn::functional;
  const auto bfloat16 = torch::kBFloat16, single = torch::kFloat;
  std::vector<PlantedFault> faults = {
      {"LogOfZero",
       "a log of 0 in the forward pass",
       traced(MEZZO_OF_X((x * 0).log()), MEZZO_OF_X((x * 0).clamp_min(1e-6).log())),
       {"forward pass: aten::log, after norm", "it took the logarithm of 0"}},
      {"LogOfNegativeNumbers",
       "a log of -1.5",
       traced(MEZZO_OF_X((x * 0 - 1.5).log()), MEZZO_OF_X((x * 0 - 1.5).clamp_min(1e-6).log())),
       {"It read float32 [8, 8] -1.5 to -1.5", "it took the logarithm of a negative number"}},
      {"RootOfBothSigns",
       "a root of numbers of both signs",
       traced(MEZZO_OF_X((x + 0.5).sqrt()), MEZZO_OF_X((x + 0.5).clamp_min(1e-6).sqrt())),
       {"aten::sqrt, after norm", "it took the root of a negative number"}},
      {"MeanOverNoLabels",
       "a sum that is divided by an integer count of 0",
       traced_loss([](const Tensor& y, bool cured) {
         const Tensor labels = torch::zeros({}, torch::kLong);
         return (y + 10).sum() / (cured ? labels + 1e-6 : labels);
       }),
       {"forward pass: aten::div, after head", "not known"}},
      {"MeanOfNothing",
       "the mean of what a mask selects, which is nothing",
       traced_loss([](const Tensor& y, bool cured) {
         return y.masked_select(y > (cured ? -100 : 100)).mean();
       }),
       {"aten::mean, after head", "not known"}},
      {"LossOfNoBoxes",
       "a smooth L1 loss where no box was matched",
       traced_loss([](const Tensor& y, bool cured) {
         const Tensor boxes = y.slice(0, 0, cured ? 8 : 0);
         return F::smooth_l1_loss(boxes, torch::zeros_like(boxes));
       }),
       {"aten::smooth_l1_loss, after head", "It read nothing", "not known"}},
      {"LossOfNoTokens",
       "a cross entropy of no tokens",
       traced_loss([](const Tensor& y, bool cured) {
         const std::int64_t tokens = cured ? 8 : 0;
         return F::cross_entropy(y.slice(0, 0, tokens), torch::zeros({tokens}, torch::kLong));
       }),
       {"aten::cross_entropy_loss, after head", "not known"}},
      {"RootOfZeroInBackward",
       "the gradient of a root of 0",
       traced(MEZZO_OF_X((x - x).sqrt() * x), MEZZO_OF_X((x - x + 1e-6).sqrt() * x)),
       {"backward pass: ", "of SqrtBackward0, after norm", "it divided by 0"}},
      {"LogThatWhereHides",
       "where(x > 0, log(x), 0)",
       traced(MEZZO_OF_X(torch::where(x > 0, (x * (x > 0)).log(), 0)),
              MEZZO_OF_X(torch::where(x > 0, (x * (x > 0)).clamp_min(1e-6).log(), 0))),
       {"backward pass: ", "of LogBackward0, after norm", "it divided by 0"}},
      {"PowerOfZeroInBackward",
       "the gradient of 0 to the power of 0.5",
       traced(MEZZO_OF_X(x * (x - x).pow(0.5)), MEZZO_OF_X(x * (x - x).clamp_min(1e-6).pow(0.5))),
       {"backward pass: ", "of PowBackward0", "not known"}},
      {"ZeroToANegativePower",
       "0 to the power of -0.5, where exponents are a tensor",
       traced(MEZZO_OF_X((x * 0).pow(torch::full({8}, -0.5))),
              MEZZO_OF_X((x * 0).clamp_min(1e-2).pow(torch::full({8}, -0.5)))),
       {"forward pass: aten::pow, after norm", "not known"}},
      {"Log1pOfMinusOne",
       "log1p of -1",
       traced(MEZZO_OF_X((x * 0 - 1).log1p()), MEZZO_OF_X((x * 0 - 1).clamp_min(1e-3 - 1).log1p())),
       {"forward pass: aten::log1p, after norm", "it took log1p of"}},
      {"LogitOfOne",
       "logit of a sigmoid that rounds to 1",
       traced(MEZZO_OF_X((x * 0 + 30).sigmoid().logit()),
              MEZZO_OF_X((x * 0 + 30).sigmoid().clamp(1e-3, 1 - 1e-3).logit())),
       {"forward pass: aten::logit, after norm", "not known"}},
      {"AcoshBelowOne",
       "acosh of 0.5",
       traced(MEZZO_OF_X((x * 0 + 0.5).acosh()),
              MEZZO_OF_X((x * 0 + 0.5).clamp_min(1 + 1e-3).acosh())),
       {"forward pass: aten::acosh, after norm", "not known"}},
      {"DeterminantOfASingularMatrix",
       "the logarithm of the determinant of a covariance of 0",
       traced(MEZZO_OF_X((x * 0).t().mm(x).logdet() * x),
              MEZZO_OF_X(((x * 0).t().mm(x) + torch::eye(8) * 1e-2).logdet() * x)),
       {"aten::logdet, after norm", "not known"}},
      {"EqualEigenvalues",
       "the gradient of eigenvectors whose eigenvalues are equal",
       traced(MEZZO_OF_X(eigenvectors(x, torch::eye(8))),
              MEZZO_OF_X(eigenvectors(x, torch::arange(8).to(torch::kFloat).diag()))),
       {"backward pass: ", "of LinalgEighBackward0", "it divided by 0"}},
      {"AcosOutOfRange",
       "acos of 2",
       traced(MEZZO_OF_X((x * 0 + 2).acos()), MEZZO_OF_X((x * 0 + 2).clamp(-0.999, 0.999).acos())),
       {"forward pass: aten::acos, after norm", "it took acos of a number beyond 1"}},
      {"AngleOfEqualVectors",
       "the gradient of acos at 1",
       traced(MEZZO_OF_X(x * (x * 0 + 1).acos()),
              MEZZO_OF_X(x * (x * 0 + 1).clamp(-0.999, 0.999).acos())),
       {"backward pass: ", "of AcosBackward0", "it divided by 0"}},
      {"ExpInFloat32",
       "exp of 100",
       traced(MEZZO_OF_X((x * 0 + 100).exp()), MEZZO_OF_X((x * 0 + 80).exp())),
       {"forward pass: aten::exp, after norm", "In float64 it is finite, up to"},
       "keep its result smaller"},
      {"DeviationOfOneValue",
       "the deviation of a single value",
       traced(MEZZO_OF_X(x / x.slice(1, 0, 1).std(-1, true, true)),
              MEZZO_OF_X(x / x.std(-1, true, true))),
       {"forward pass: aten::std, after norm", "not known"}},
      {"LayerNormOverOneElement",
       "a LayerNorm of one element whose eps is 0",
       traced_model<nn::LayerNorm>(
           [](bool cured) {
             return nn::LayerNorm(nn::LayerNormOptions({1}).eps(cured ? 1e-5 : 0));
           },
           [](nn::LayerNorm& norm, bool) {
             return norm->forward(torch::ones({4, 1})).mean();
           }),
       {"forward pass: aten::layer_norm", "not known"}},
      {"NegativeRunningVariance",
       "a batch norm in eval mode whose running variance is -1",
       traced_model<nn::BatchNorm1d>(
           [](bool cured) {
             nn::BatchNorm1d norm(8);
             norm->running_var.fill_(-1);
             if (cured) norm->reset_running_stats();
             norm->eval();
             return norm;
           },
           [](nn::BatchNorm1d& norm, bool) { return norm->forward(batch_of_ones()).mean(); }),
       {"aten::batch_norm", "not known"}},
      {"MaskThatMultipliesMinusInfinity",
       "scores under a mask of -inf, times a mask of 0",
       traced(MEZZO_OF_X(x.masked_fill(upper(), -kInf) * upper().logical_not().to(torch::kFloat)),
              MEZZO_OF_X(x.masked_fill(upper(), -kInf).masked_fill(upper(), 0))),
       {"forward pass: aten::mul, after norm", "not known"}},
      {"MaximumOfAMaskedRow",
       "a softmax by hand that subtracts the maximum of a row of -inf",
       traced(MEZZO_OF_X(softmax_by_hand(x + torch::full_like(x, -kInf))),
              MEZZO_OF_X(softmax_by_hand(x + torch::full_like(x, -kInf).triu(1)))),
       {"forward pass: aten::sub, after norm", "not known"}},
      {"SoftmaxOfAMaskedRow",
       "a softmax of -inf alone",
       traced(MEZZO_OF_X((x + torch::full_like(x, -kInf)).softmax(-1)),
              MEZZO_OF_X((x + torch::full_like(x, -kInf).triu(1)).softmax(-1))),
       {"aten::softmax, after norm", "not known"}},
      {"LogSumExpOfAMaskedRow",
       "the gradient of a logsumexp of -inf alone",
       traced(MEZZO_OF_X(x * (x + torch::full_like(x, -kInf)).logsumexp(-1, true).exp()),
              MEZZO_OF_X(x * (x + torch::full_like(x, -kInf).triu(1)).logsumexp(-1, true).exp())),
       {"backward pass: ", "of LogsumexpBackward0", "not known"}},
      {"AttentionOverPaddingAlone",
       "MultiheadAttention with a sequence that is all padding",
       traced_model<nn::MultiheadAttention>([](bool) { return nn::MultiheadAttention(8, 2); },
                                            padded_attention),
       {"aten::softmax", "not known"}},
      {"LabelOfABannedWord",
       "smoothed labels of scores of which one is -inf",
       traced_loss(loss_over_a_ban),
       {"aten::cross_entropy_loss, after head", "not known"}},
      {"LossOfNoLabels",
       "cross entropy where every label is ignored",
       traced_loss([](const Tensor& y, bool cured) {
         return F::cross_entropy(y, torch::full({8}, cured ? 1 : -100, torch::kLong));
       }),
       {"aten::cross_entropy_loss, after head", "not known"}},
      {"CtcOfTooManyLabels",
       "a CTC loss of more labels than steps",
       traced_loss([](const Tensor& y, bool cured) { return ctc_of(y, 12, cured); }),
       {"aten::ctc_loss", "not known"}},
      {"NanInTheBatch",
       "a NaN in the batch",
       [](bool cured) {
         PatientImpl model;
         Tensor batch = batch_of_ones();
         if (!cured) batch[3][2] = kNan;
         return trace_of(model, [&] { model.forward(batch); });
       },
       {"in body", "no result that was watched is its source"},
       "look at the batch"},
      {"NanThatNoOpWrote",
       "a NaN that a raw pointer writes into a constant",
       [](bool cured) {
         PatientImpl model([=](const Tensor& x) { return with_raw_write(x, cured); });
         return trace_of(model, [&] { model.forward(batch_of_ones()); });
       },
       {"aten::add, after norm", "no result that was watched is its source"},
       "at constants and buffers"},
      {"NanInTheThirdMicroBatch",
       "a NaN in the third of three micro-batches",
       trace_of_micro_batches,
       {"2: forward pass: ", "no result that was watched is its source"},
       "look at the batch"},
      {"InfInOneWeight",
       "an inf in head.weight",
       traced_weight("head.weight", kInf),
       {"in head", "The parameter head.weight is not finite: no step"},
       "load a checkpoint"},
      {"LogBehindFourOfNoHarm",
       "a log of 0 behind large scalars, a running minimum, a masked row and a sigmoid by hand",
       traced(log_behind_no_harm, MEZZO_OF_X((x * 0).clamp_min(1e-6).log())),
       {"forward pass: aten::log, after norm made float32", "it took the logarithm of 0", "rounding can make"}},
      {"LossScaleTooHigh",
       "a loss scale of 2^24 in half",
       [](bool cured) { return trace_of_scale(cured ? 256 : 16777216); },
       {"backward pass: ", "would hold it without the loss scale",
        "nothing is wrong with the model", "it is finite, up to"},
       "the scaler lowers that"},

      // What half does not hold.
      {"ExpInHalf",
       "exp of 12 in half",
       widened(MEZZO_OF_X((x * 0 + 12).exp()), bfloat16),
       {"aten::exp, after norm", "In float32 it is finite, up to 1.63e+05"},
       "use bfloat16"},
      {"MaskTimesMinus1e9InHalf",
       "(1 - mask) * -1e9 in half",
       widened(MEZZO_OF_X((x + (1 - torch::zeros_like(x)) * -1e9).softmax(-1)), bfloat16),
       {"aten::mul, after norm", "In float32 it is finite, up to 1e+09"},
       "use bfloat16"},
      {"AttentionWithoutScale",
       "attention logits that are not divided by the root of the width",
       widened(MEZZO_OF_X(torch::matmul(x * 150, (x * 150).t()).softmax(-1)), bfloat16),
       {"aten::matmul, after norm", "In float32 it is finite, up to"},
       "use bfloat16"},
      {"ResidualsOf60Layers",
       "60 residual layers, each of which grows by a quarter",
       widened(MEZZO_OF_X(residual_layers(x)), bfloat16),
       {"aten::add, after norm", "In float32 it is finite, up to"},
       "use bfloat16"},
      {"SumByHand",
       "a sum of squares of 8 numbers of 150, one after the other",
       widened(sum_by_hand, bfloat16),
       {"aten::add, after norm", "In float32 it is finite, up to"},
       "use bfloat16"},
      {"ConvolutionInHalf",
       "a convolution whose sums leave half",
       traced_layer<nn::Conv2d>(large_conv, torch::ones({1, 8, 4, 4})),
       {"In float32 it is finite, up to 3.6e+05"},
       "use bfloat16"},
      {"EpsLostInHalf",
       "0 / (0 + 1e-12) in half",
       widened(MEZZO_OF_X((x * 0) / (x * 0 + 1e-12)), single),
       {"forward pass: aten::div, after norm", "it divided by 0", "rounding can make"},
       "trace the step in float32"},
      {"EpsLostInDice",
       "a float32 number divided by a sum in half, to which 1e-8 was added",
       widened(MEZZO_OF_X(x * (torch::zeros({}) / ((x * 0).sum() + 1e-8))), single),
       {"forward pass: aten::div, after norm", "it divided by 0", "rounding can make"},
       "trace the step in float32"},
      {"EpsLostInRmsNorm",
       "an RMSNorm by hand with an eps of 1e-8 in half",
       widened(MEZZO_OF_X(x * ((x * 0).square().mean(-1, true) + 1e-8).rsqrt()), single),
       {"aten::rsqrt, after norm", "it divided by 0", "rounding can make"},
       "trace the step in float32"},
      {"CancellationInHalf",
       "E[x^2] - E[x]^2 in half, which rounding makes negative",
       widened(MEZZO_OF_X(deviation_by_hand(x, 8, 0)), single),
       {"it took the root of a negative number", "rounding can make"},
       "trace the step in float32"},
      {"CancellationInFloat32",
       "E[x^2] - E[x]^2 of numbers about 3e4 in float32",
       traced(MEZZO_OF_X(deviation_by_hand(x, 3e4, 0)),
              MEZZO_OF_X(deviation_by_hand(x, 3e4, 1e-3))),
       {"aten::sqrt", "it took the root of a negative number"}},
      {"LogOfOneMinusP",
       "log(1 - p) in half, where p becomes 1",
       widened(MEZZO_OF_X((1 - (x * 0 + 9).sigmoid()).log()), single),
       {"aten::log", "it took the logarithm of 0", "rounding can make"},
       "trace the step in float32"},
  };
  for (PlantedFault& fault : faults) {
    if (*fault.remedy != '\0') continue;
    const bool is_known =
        std::any_of(fault.names.begin(), fault.names.end(),
                    [](const std::string& name) { return name.starts_with("it "); });
    const bool is_backward = is_known && fault.names.front().starts_with("backward");
    fault.remedy = !is_known     ? "look at the ranges of what it read"
                   : is_backward ? "keep what the op of the forward pass read away from there"
                                 : "clamp what it reads";
  }
  return faults;
}

std::vector<HealthyRun> healthy_traces() {
  std::vector<HealthyRun> runs;
  const std::vector<std::pair<const char*, std::function<std::string(at::ScalarType)>>> all = {
      {"TracedInfsThatReachNothing", trace_of_harmless},
      {"TracedRunningExtremes",
       [](at::ScalarType dtype) { return trace_of_op(running_extremes, dtype); }},
      {"TracedGuardedZeros",
       [](at::ScalarType dtype) { return trace_of_op(guarded_zeros, dtype); }},
  };
  for (const auto& [name, said] : all) {
    for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      runs.push_back({name, [said, dtype] { return said(dtype); }});
    }
  }
  return runs;
}

}  // namespace diagnostics_test

#undef MEZZO_OF_X
