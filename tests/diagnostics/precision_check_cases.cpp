// Faults for check_precision: models that low precision breaks.

#include <mezzo/diagnostics/precision_check.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "diagnostics_cases.h"

namespace diagnostics_test {
namespace {

/// Returns the errors and warnings of `checks`.
std::string format_findings(const mezzo::PrecisionReport& report,
                            std::initializer_list<std::string> checks) {
  std::string text;
  for (const auto& finding : report.findings) {
    if (std::find(checks.begin(), checks.end(), finding.check) == checks.end()) continue;
    if (finding.severity == mezzo::FindingSeverity::note) continue;
    text += c10::str(to_string(finding.severity), " ", finding.location, ": ", finding.description,
                     " > ", finding.remedy, " | ");
  }
  return text.empty() ? kNothing : text;
}

template <class Model>
std::string check_and_format(Model& model, at::ScalarType dtype,
                             const Tensor& batch = batch_of_ones()) {
  return format_findings(mezzo::check_precision(model, batch, torch::kCPU, {.dtype = dtype}),
                         {"forward", "range"});
}

Run check_op_case(Op faulty, Op fixed_op) {
  return [=](bool fixed) {
    TestModelImpl model(fixed ? fixed_op : faulty);
    return check_and_format(model, torch::kHalf);
  };
}

/// A model after `prepare`, checked for float16; fixed by `fixed_dtype`.
Run check_model_case(std::function<void(TestModelImpl& model)> prepare,
                     at::ScalarType fixed_dtype) {
  return [=](bool fixed) {
    TestModelImpl model;
    const torch::NoGradGuard no_grad;
    prepare(model);
    return check_and_format(model, fixed ? fixed_dtype : torch::kHalf);
  };
}

Run check_layers_case(std::function<nn::Sequential(bool fixed)> make) {
  return [=](bool fixed) {
    torch::manual_seed(0);
    nn::Sequential model = make(fixed);
    return check_and_format(model, torch::kHalf, torch::randn({8, 8}));
  };
}

Run check_script_case(const std::string& faulty, const std::string& fixed_code) {
  return [=](bool fixed) {
    torch::jit::Module layer("Layer"), model("Model");
    layer.register_parameter("weight", torch::ones({8, 8}), false);
    layer.define("def forward(self, x):\n  y = torch.matmul(x, self.weight)\n  return " +
                 (fixed ? fixed_code : faulty) + "\n");
    model.register_module("attention", layer);
    model.define("def forward(self, x):\n  return self.attention.forward(x)\n");
    const std::vector<c10::IValue> sample = {batch_of_ones()};
    return format_findings(
        mezzo::check_precision(model, sample, torch::kCPU, {.dtype = torch::kHalf}), {"range"});
  };
}

/// Checks a model with `op` between its layers for float16.
std::string check_op(const Op& op) {
  TestModelImpl model(op);
  return check_and_format(model, torch::kHalf);
}

Tensor to_float16(const Tensor& x) { return x.to(torch::kHalf); }

/// Divides a product by a count in the product's dtype; fixed by float32.
std::string count_beyond_float16(bool fixed) {
  nn::Sequential model(nn::Linear(nn::LinearOptions(8, 8).bias(false)),
                       nn::Functional([fixed](const Tensor& x) {
                         const auto dtype = fixed ? torch::kFloat : x.scalar_type();
                         return x * (1e5 / torch::full({}, 1e5).to(dtype).to(torch::kFloat));
                       }));
  return check_and_format(model, torch::kHalf);
}

}  // namespace

std::vector<FaultCase> precision_check_cases() {
  const char* const bfloat16 = ".dtype = torch::kBFloat16";
  return {
      {"CheckMaskInFloat16",
       "masked_fill with -1e9 in float16",
       check_op_case(
           [](const Tensor& x) { return to_float16(x).masked_fill(x > 1, -1e9).softmax(-1); },
           [](const Tensor& x) { return to_float16(x).masked_fill(x > 1, -kInf).softmax(-1); }),
       {"error after norm: masked_fill with -1e+09 computes in float16",
        "error after norm: forward() throws even in float32, in aten::masked_fill"},
       "scores.masked_fill(mask, -std::numeric_limits<float>::infinity())"},
      {"CheckClampInFloat16",
       "clamp at -1e30 in float16",
       check_op_case(
           [](const Tensor& x) { return to_float16(x).clamp(-1e30, 10); },
           [](const Tensor& x) { return to_float16(x).clamp_min(-65504.0).clamp_max(10); }),
       {"clamp with -1e+30 computes in float16"},
       "x.clamp_min(-65504.0)"},
      {"CheckEpsInFloat16",
       "clamp_min with 1e-12 in float16",
       check_op_case(
           [](const Tensor& x) { return x / (to_float16(x) * 0).norm().clamp_min(1e-12); },
           [](const Tensor& x) {
             return x.to(torch::kFloat) /
                    (to_float16(x) * 0).norm().to(torch::kFloat).clamp_min(1e-12) * 1e-12;
           }),
       {"after norm: clamp_min with 1e-12", "finite either: division by 0"},
       "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps)"},
      {"CheckLargeConstant",
       "a product with 1e6 in float16",
       check_op_case([](const Tensor& x) { return to_float16(x) * 1e6; },
                     [](const Tensor& x) { return x.to(torch::kFloat) * 1e6 * 1e-6; }),
       {"aten::mul (after norm) produced float16", "In float32 the result is finite, up to"},
       "in float32"},
      {"CheckCountBeyondFloat16",
       "a sum divided by a count of 1e5 cast to float16, which is a finite 0",
       count_beyond_float16,
       {"warning (model): the output under autocast to float16 differs from float32 by 1e+02 %",
        "the responsible op is unknown"},
       "autocast disabled"},
      {"CheckNanBuffer",
       "a running mean of NaN",
       check_layers_case([](bool fixed) {
         nn::Sequential model(nn::Linear(8, 8), nn::BatchNorm1d(8));
         if (!fixed) model->named_buffers()["1.running_mean"].fill_(kNan);
         return model;
       }),
       {"error 1.running_mean: this buffer contains inf or NaN"},
       "torch::load(model, \"earlier.pt\");"},
      {"CheckWeightBeyondFloat16",
       "a weight of 1e5",
       check_model_case([](TestModelImpl& model) { set_element(model.body->weight, 0, 1e5F); },
                        torch::kBFloat16),
       {"error body.weight: this parameter contains 1e+05 in magnitude, beyond float16",
        "aten::addmm (in body)", "the result is finite, up to"},
       bfloat16},
      {"CheckWeightUnderflow",
       "weights of 1e-9",
       check_model_case([](TestModelImpl& model) { model.head->bias.fill_(1e-9F); },
                        torch::kBFloat16),
       {"warning head.bias: a cast to float16 rounds more than 10 % of the values"},
       bfloat16},
      {"CheckOverflowUnderAutocast",
       "a row of weights of 1e4, whose sums fit only float32",
       check_model_case([](TestModelImpl& model) { model.body->weight.select(0, 0).fill_(1e4F); },
                        torch::kBFloat16),
       {"the output contains inf or NaN under autocast to float16, but not in float32: forward "
        "pass",
        "(in body) produced float16", "In float32 the result is finite, up to"},
       "use bfloat16"},
      {"CheckBuffer",
       "a buffer of -1e9 that the model casts to float16",
       [](bool fixed) {
         struct Masked : TestModelImpl {
           explicit Masked(const Tensor& mask)
               : TestModelImpl([this](const Tensor& x) {
                   return (to_float16(x) + to_float16(named_buffers()["causal"])).softmax(-1);
                 }) {
             register_buffer("causal", mask);
           }
         };
         const Tensor mask = torch::full({8, 8}, -1e9).triu(1);
         Masked model(fixed ? mask.clamp_min(-65504.0) : mask);
         return check_and_format(model, torch::kHalf);
       },
       {"warning causal: this buffer contains 1e+09 in magnitude, beyond float16"},
       "mask.clamp_min(-65504.0)"},
      {"CheckLogOfZero",
       "a log of 0, also in float32",
       check_op_case([](const Tensor& x) { return (x * 0).log(); },
                     [](const Tensor& x) { return (x * 0).clamp_min(1e-6).log(); }),
       {"even without autocast: forward pass: aten::log (after norm)",
        "In float64 the result is not finite either", "finite either: log of 0"},
       "clamp the input"},
      {"CheckScriptMask",
       "masked_fill with -1e9 in TorchScript",
       check_script_case("y.masked_fill(y > 1e4, -1e9)", "y.masked_fill(y > 1e4, -float('inf'))"),
       {"error after attention: masked_fill with -1e+09 computes in float16"},
       "scores.masked_fill(mask, -std::numeric_limits<float>::infinity())"},
      {"CheckScriptEps",
       "an eps of 1e-12 in TorchScript",
       check_script_case("y / (y.abs() + 1e-12)", "y / (y.float().abs() + 1e-12)"),
       {"warning after attention: add with 1e-12 computes in float16"},
       "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps)"},
  };
}

std::vector<HealthyCase> healthy_precision_check_cases() {
  return {
      {"CheckLargeScalarWithFloat16",
       [] { return check_op([](const Tensor& x) { return x + to_float16(x).sum() / 131072; }); }},
      {"CheckLargeFactorOfSmallFloat16",
       [] { return check_op([](const Tensor& x) { return to_float16(x) * 0.01 * 1e6; }); }},
      {"CheckFactorsThatCancel",
       [] { return check_op([](const Tensor& x) { return to_float16(x) * 1e3 * 1e-9 * 1e6; }); }},
      {"CheckBufferWithoutCast",
       [] {
         TestModelImpl model;
         model.register_buffer("seen", torch::full({8}, -1e9));
         return check_and_format(model, torch::kHalf);
       }},
      {"CheckFloat32Embedding",
       [] {
         nn::Sequential model(nn::Embedding(4, 8),
                              nn::Functional([](const Tensor& x) { return x * 1e-6; }),
                              nn::Linear(8, 8));
         model->parameters()[0].detach().fill_(1e5);
         return check_and_format(model, torch::kHalf, torch::tensor({0, 1}));
       }},
      {"CheckMaskOfMinusInf",
       [] {
         return check_op([](const Tensor& x) {
           return (x + torch::full({8, 8}, -kInf).triu(1)).softmax(-1);
         });
       }},
  };
}

}  // namespace diagnostics_test
