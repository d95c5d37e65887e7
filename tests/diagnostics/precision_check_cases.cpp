// What will go wrong in a run? Asked of the doctor.

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

/// The errors and warnings of these topics.
std::string findings_of(const mezzo::PrecisionReport& report,
                        std::initializer_list<std::string> topics) {
  std::string said;
  for (const auto& finding : report.findings) {
    if (std::find(topics.begin(), topics.end(), finding.check) == topics.end()) continue;
    if (finding.severity == mezzo::FindingSeverity::note) continue;
    said += c10::str(to_string(finding.severity), " ", finding.where, ": ", finding.reason, " > ",
                     finding.remedy, " | ");
  }
  return said.empty() ? kNothing : said;
}

template <class Model>
std::string doctor_of(Model& model, at::ScalarType dtype, const Tensor& batch = batch_of_ones()) {
  return findings_of(mezzo::check_precision(model, batch, torch::kCPU, {.dtype = dtype}),
                     {"forward", "range"});
}

Run examined(Op faulty, Op cure) {
  return [=](bool cured) {
    PatientImpl model(cured ? cure : faulty);
    return doctor_of(model, torch::kHalf);
  };
}

/// A model with `prepare` done to it, looked at for half, or for `cure`.
Run prepared(std::function<void(PatientImpl& model)> prepare, at::ScalarType cure) {
  return [=](bool cured) {
    PatientImpl model;
    const torch::NoGradGuard no_grad;
    prepare(model);
    return doctor_of(model, cured ? cure : torch::kHalf);
  };
}

Run layers(std::function<nn::Sequential(bool cured)> make) {
  return [=](bool cured) {
    torch::manual_seed(0);
    nn::Sequential model = make(cured);
    return doctor_of(model, torch::kHalf, torch::randn({8, 8}));
  };
}

Run script(const std::string& faulty, const std::string& cure) {
  return [=](bool cured) {
    torch::jit::Module layer("Layer"), model("Model");
    layer.register_parameter("weight", torch::ones({8, 8}), false);
    layer.define("def forward(self, x):\n  y = torch.matmul(x, self.weight)\n  return " +
                 (cured ? cure : faulty) + "\n");
    model.register_module("attention", layer);
    model.define("def forward(self, x):\n  return self.attention.forward(x)\n");
    const std::vector<c10::IValue> sample = {batch_of_ones()};
    return findings_of(mezzo::check_precision(model, sample, torch::kCPU, {.dtype = torch::kHalf}),
                       {"range"});
  };
}

/// A model whose forward pass is `op` of the patient's hidden numbers, examined for half.
std::string healthy(const Op& op) {
  PatientImpl model(op);
  return doctor_of(model, torch::kHalf);
}

Tensor in_half(const Tensor& x) { return x.to(torch::kHalf); }

/// A model without a bias, whose product is divided by a count in the product's dtype, or in
/// float32.
std::string count_beyond_half(bool cured) {
  nn::Sequential model(nn::Linear(nn::LinearOptions(8, 8).bias(false)),
                       nn::Functional([cured](const Tensor& x) {
                         const auto dtype = cured ? torch::kFloat : x.scalar_type();
                         return x * (1e5 / torch::full({}, 1e5).to(dtype).to(torch::kFloat));
                       }));
  return doctor_of(model, torch::kHalf);
}

}  // namespace

std::vector<PlantedFault> before_the_run() {
  const char* const bfloat16 = ".dtype = torch::kBFloat16";
  return {
      {"DoctorMaskInHalf",
       "masked_fill with -1e9 in half",
       examined([](const Tensor& x) { return in_half(x).masked_fill(x > 1, -1e9).softmax(-1); },
                [](const Tensor& x) { return in_half(x).masked_fill(x > 1, -kInf).softmax(-1); }),
       {"error after norm: masked_fill with -1e+09 computes in float16",
        "error after norm: the forward pass throws in float32 already, in aten::masked_fill"},
       "scores.masked_fill(mask, -std::numeric_limits<float>::infinity())"},
      {"DoctorClampInHalf",
       "clamp at -1e30 in half",
       examined([](const Tensor& x) { return in_half(x).clamp(-1e30, 10); },
                [](const Tensor& x) { return in_half(x).clamp_min(-65504.0).clamp_max(10); }),
       {"clamp with -1e+30 computes in float16"},
       "x.clamp_min(-65504.0)"},
      {"DoctorEpsInHalf",
       "clamp_min with 1e-12 in half",
       examined([](const Tensor& x) { return x / (in_half(x) * 0).norm().clamp_min(1e-12); },
                [](const Tensor& x) {
                  return x.to(torch::kFloat) /
                         (in_half(x) * 0).norm().to(torch::kFloat).clamp_min(1e-12) * 1e-12;
                }),
       {"after norm: clamp_min with 1e-12", "it divided by 0"},
       "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps)"},
      {"DoctorLargeConstant",
       "a product with 1e6 in half",
       examined([](const Tensor& x) { return in_half(x) * 1e6; },
                [](const Tensor& x) { return x.to(torch::kFloat) * 1e6 * 1e-6; }),
       {"aten::mul, after norm made float16", "In float32 it is finite, up to"},
       "in float32"},
      {"DoctorCountBeyondHalf",
       "a sum divided by a count of 1e5 that is cast to half, which gives a finite 0",
       count_beyond_half,
       {"warning (model): the result under autocast to float16 differs from float32's by 1e+02 %",
        "which op loses it is not known"},
       "autocast off"},
      {"DoctorNanBuffer",
       "a running mean of NaN",
       layers([](bool cured) {
         nn::Sequential model(nn::Linear(8, 8), nn::BatchNorm1d(8));
         if (!cured) model->named_buffers()["1.running_mean"].fill_(kNan);
         return model;
       }),
       {"error 1.running_mean: this buffer holds inf or NaN"},
       "torch::load(model, \"earlier.pt\");"},
      {"DoctorWeightBeyondHalf",
       "a weight of 1e5",
       prepared([](PatientImpl& model) { plant(model.body->weight, 0, 1e5F); }, torch::kBFloat16),
       {"error body.weight: this parameter holds 1e+05 in magnitude, beyond float16",
        "aten::addmm, in body", "it is finite, up to"},
       bfloat16},
      {"DoctorWeightLostInHalf",
       "weights of 1e-9",
       prepared([](PatientImpl& model) { model.head->bias.fill_(1e-9F); }, torch::kBFloat16),
       {"warning head.bias: a cast to float16 makes more than a tenth of the values"},
       bfloat16},
      {"DoctorOverflowUnderAutocast",
       "a row of weights of 1e4, whose sums only float32 holds",
       prepared([](PatientImpl& model) { model.body->weight.select(0, 0).fill_(1e4F); },
                torch::kBFloat16),
       {"the output has inf or NaN under autocast to float16 and none in float32: forward pass",
        "in body made float16", "In float32 it is finite, up to"},
       "use bfloat16"},
      {"DoctorBuffer",
       "a buffer of -1e9 that the model casts to half",
       [](bool cured) {
         struct Masked : PatientImpl {
           explicit Masked(const Tensor& mask)
               : PatientImpl([this](const Tensor& x) {
                   return (in_half(x) + in_half(named_buffers()["causal"])).softmax(-1);
                 }) {
             register_buffer("causal", mask);
           }
         };
         const Tensor mask = torch::full({8, 8}, -1e9).triu(1);
         Masked model(cured ? mask.clamp_min(-65504.0) : mask);
         return doctor_of(model, torch::kHalf);
       },
       {"warning causal: this buffer holds 1e+09 in magnitude, beyond float16"},
       "mask.clamp_min(-65504.0)"},
      {"DoctorLogOfZero",
       "a log of 0 that float32 has too",
       examined([](const Tensor& x) { return (x * 0).log(); },
                [](const Tensor& x) { return (x * 0).clamp_min(1e-6).log(); }),
       {"without autocast already: forward pass: aten::log, after norm",
        "In float64 it is not finite either", "it took the logarithm of 0"},
       "clamp what it reads"},
      {"DoctorScriptMask",
       "masked_fill with -1e9 in TorchScript",
       script("y.masked_fill(y > 1e4, -1e9)", "y.masked_fill(y > 1e4, -float('inf'))"),
       {"error after attention: masked_fill with -1e+09 computes in float16"},
       "scores.masked_fill(mask, -std::numeric_limits<float>::infinity())"},
      {"DoctorScriptEps",
       "an eps of 1e-12 in TorchScript",
       script("y / (y.abs() + 1e-12)", "y / (y.float().abs() + 1e-12)"),
       {"warning after attention: add with 1e-12 computes in float16"},
       "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps)"},
  };
}

std::vector<HealthyRun> healthy_forward_passes() {
  return {
      {"DoctorLargeScalarBesideHalf",
       [] { return healthy([](const Tensor& x) { return x + in_half(x).sum() / 131072; }); }},
      {"DoctorLargeFactorOfSmallHalf",
       [] { return healthy([](const Tensor& x) { return in_half(x) * 0.01 * 1e6; }); }},
      {"DoctorFactorsThatCancel",
       [] { return healthy([](const Tensor& x) { return in_half(x) * 1e3 * 1e-9 * 1e6; }); }},
      {"DoctorBufferThatNothingCasts",
       [] {
         PatientImpl model;
         model.register_buffer("seen", torch::full({8}, -1e9));
         return doctor_of(model, torch::kHalf);
       }},
      {"DoctorEmbeddingThatStaysInFloat32",
       [] {
         nn::Sequential model(nn::Embedding(4, 8),
                              nn::Functional([](const Tensor& x) { return x * 1e-6; }),
                              nn::Linear(8, 8));
         model->parameters()[0].detach().fill_(1e5);
         return doctor_of(model, torch::kHalf, torch::tensor({0, 1}));
       }},
      {"DoctorMaskOfMinusInfinity",
       [] {
         return healthy([](const Tensor& x) {
           return (x + torch::full({8, 8}, -kInf).triu(1)).softmax(-1);
         });
       }},
  };
}

}  // namespace diagnostics_test
