#include <mezzo/autocast/autocast.h>
#include <mezzo/diagnose/anomaly_trace.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planted_faults.h"

// Which op made the first inf or NaN? Asked of AnomalyTrace.
namespace planted_faults {
namespace {

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

/// Infs that reach no result.
void harmless(const Tensor& x) {
  const Tensor half = x.detach().to(torch::kHalf);
  half.sum() / 131072;
  half * 0.01 * 1e6;
  torch::minimum(torch::full_like(half, kInf), half);
  torch::full_like(x, -kInf).logsumexp(-1).exp();
  1 / (1 + (half * 0 + 12).exp());
}

Tensor deviation_by_hand(const Tensor& x) {
  const Tensor shifted = x * 0.02 + torch::linspace(7, 9, 8, x.options()).unsqueeze(1);
  return (shifted.square().mean(-1, true) - shifted.mean(-1, true).square()).sqrt() * x;
}

/// What a model's own step says under autocast to `dtype`, or in float32.
template <class Model>
std::string trace_of_step(Model& model, at::ScalarType dtype, const std::function<Tensor()>& loss) {
  return trace_of(*model, [&] {
    Tensor value;
    {
      const mezzo::AutocastGuard autocast({.device = torch::kCPU,
                                           .dtype = dtype == torch::kFloat ? torch::kHalf : dtype,
                                           .enabled = dtype != torch::kFloat});
      value = loss();
    }
    value.to(torch::kFloat).backward();
  });
}

std::string trace_of_padded_encoder(at::ScalarType dtype) {
  torch::manual_seed(0);
  nn::TransformerEncoder model(
      nn::TransformerEncoderOptions(nn::TransformerEncoderLayerOptions(16, 2).dropout(0), 2));
  const Tensor batch = torch::randn({5, 3, 16});
  // libtorch's masked_fill of the padding throws where scores have 16 bits.
  const Tensor padding = dtype == torch::kFloat
                             ? torch::arange(5).ge(torch::tensor({5, 3, 2}).unsqueeze(1))
                             : Tensor();
  const Tensor causal = nn::TransformerImpl::generate_square_subsequent_mask(5);
  return trace_of_step(model, dtype,
                       [&] { return model->forward(batch, causal, padding).square().mean(); });
}

std::string trace_of_harmless(at::ScalarType dtype) {
  Patient model(Op([](const Tensor& x) {
    harmless(x);
    const Tensor lowest = torch::full_like(x, kInf).minimum(x);
    const Tensor causal = torch::full({8, 8}, -kInf).triu(1);
    return (x.matmul(x.t()) + causal).softmax(-1).matmul(x.to(x.scalar_type())) + lowest * 1e-6;
  }));
  return trace_of_step(model, dtype, [&] { return squares(*model); });
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
     {"aten::mul, after norm", "In float32 it is finite, up to 1e+09"}},
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
    {"LogBehindFourOfNoHarm",
     "a log of 0 behind large scalars, a running minimum, a masked row and a sigmoid by hand",
     [] {
       return trace_of_op([](const Tensor& x) {
         for (int repeat = 0; repeat < 5; ++repeat) harmless(x);
         return (x * 0).log();
       });
     },
     {"forward pass: aten::log, after norm made float32"}},
    {"LogOfNegativeNumbers",
     "a log of numbers of both signs",
     [] { return trace_of_op([](const Tensor& x) { return (x * 0 - 1.5).log(); }); },
     {"It read float32 [8, 8] -1.5 to -1.5", "it read negative numbers"}},
    {"RootOfBothSigns",
     "a root of numbers of both signs",
     [] {
       return trace_of_op([](const Tensor&) {
         return torch::linspace(-2, 3, 64).view({8, 8}).sqrt();
       });
     },
     {"-2 to 3, |x| from 0.0", "it read negative numbers"}},
    {"CancellationInHalf",
     "E[x^2] - E[x]^2 in half, which rounding makes negative",
     [] {
       return trace_in_half([](const Tensor& x) { return deviation_by_hand(x.to(torch::kHalf)); });
     },
     {"it read negative numbers", "trace the step in float32 to know"}},
    {"OneBadRankTraced",
     "a log of 0 on rank 2",
     [] { return trace_of_op([](const Tensor& x) { return (x * 0).log(); }, batch_of_ones(), 2); },
     {"rank 2, forward pass: aten::log, after norm"}},
};

class PlantedAnomalies : public testing::TestWithParam<PlantedFault> {};

TEST_P(PlantedAnomalies, AreNamed) {
  EXPECT_THAT(names_missing_for(GetParam()), testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, PlantedAnomalies, testing::ValuesIn(kAnomalies), name_of_fault);

/// CTC keeps -inf for its backward pass, for the paths that the labels rule out.
std::string trace_of_ctc() {
  PatientImpl model;
  return trace_of(model, [&] {
    const Tensor scores = model.forward(batch_of_ones()).unsqueeze(1).log_softmax(-1);
    const auto length = [](int steps) { return torch::full({1}, steps, torch::kLong); };
    torch::ctc_loss(scores, torch::arange(1, 4).unsqueeze(0), length(8), length(3)).backward();
  });
}

TEST(PlantedAnomaliesNowhere, AreNotFound) {
  EXPECT_EQ(trace_of_op({}), "nothing");
  EXPECT_EQ(trace_in_half({}), "nothing");
  EXPECT_EQ(trace_of_ctc(), "nothing");
  for (const at::ScalarType dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    EXPECT_EQ(trace_of_padded_encoder(dtype), "nothing") << dtype;
    EXPECT_EQ(trace_of_harmless(dtype), "nothing") << dtype;
  }
}

/// What the trace tells to do cures each fault of precision.
TEST(PlantedAnomaliesRemedies, CureTheFault) {
  const auto exp_in = [](at::ScalarType dtype) {
    Patient model(Op([dtype](const Tensor& x) { return (x.to(dtype) * 0 + 12).exp(); }));
    return trace_of_step(model, dtype, [&] { return squares(*model); });
  };
  EXPECT_THAT(exp_in(torch::kHalf), testing::HasSubstr("use bfloat16"));
  EXPECT_EQ(exp_in(torch::kBFloat16), "nothing");
  const auto guarded = [](double eps, at::ScalarType dtype) {
    Patient model(Op([=](const Tensor& x) {
      const Tensor zero = x.to(dtype) * 0;
      return (zero + 1) / (zero + eps);
    }));
    return trace_of_step(model, dtype, [&] { return model->forward(batch_of_ones()).mean(); });
  };
  EXPECT_THAT(guarded(1e-12, torch::kHalf),
              testing::HasSubstr("use float32, or a larger eps: numerator / eps, and numerator "
                                 "/ eps^2 in the backward pass, have to stay within the range of "
                                 "float16"));
  EXPECT_NE(guarded(1e-6, torch::kHalf), "nothing") << "1 / 1e-6 is beyond float16";
  EXPECT_THAT(guarded(1e-4, torch::kHalf), testing::HasSubstr("backward pass: aten::div"));
  EXPECT_EQ(guarded(0.01, torch::kHalf), "nothing");
  EXPECT_EQ(guarded(1e-12, torch::kFloat), "nothing");
  EXPECT_EQ(trace_of_op([](const Tensor& x) { return deviation_by_hand(x); }), "nothing");
  EXPECT_EQ(trace_of_scale(256), "nothing");
}

}  // namespace
}  // namespace planted_faults
