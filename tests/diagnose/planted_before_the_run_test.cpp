#include <mezzo/diagnose/doctor.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "planted_faults.h"

// What will go wrong in a run? Asked of diagnose.
namespace planted_faults {
namespace {

/// All findings that matter, a line each.
std::string findings_of(const mezzo::Diagnosis& diagnosis) {
  std::string said;
  for (const auto& finding : diagnosis.findings) {
    said += c10::str(to_string(finding.severity), " ", finding.where, ": ", finding.reason, " | ",
                     finding.remedy, "\n");
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
     {"note (model): its channels are 3 in, 8 out"}},
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

class PlantedBeforeTheRun : public testing::TestWithParam<PlantedFault> {};

TEST_P(PlantedBeforeTheRun, AreNamed) {
  EXPECT_THAT(names_missing_for(GetParam()), testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, PlantedBeforeTheRun, testing::ValuesIn(kBeforeTheRun), name_of_fault);

/// What has `word` in it, where each finding is a line.
std::string lines_with(const std::string& word, const std::string& said) {
  std::istringstream lines(said);
  std::string found;
  for (std::string line; std::getline(lines, line);) {
    if (line.find(word) != std::string::npos) found += line + "\n";
  }
  return found;
}

TEST(PlantedBeforeTheRunNowhere, AreNotFound) {
  PatientImpl model;
  EXPECT_EQ(lines_with("error", doctor_of(model)), "");
  // Large numbers whose results half holds.
  for (const Op& op : {Op([](const Tensor& x) { return x + x.to(torch::kHalf).sum() / 131072; }),
                       Op([](const Tensor& x) { return x.to(torch::kHalf) * 0.01 * 1e6; }),
                       Op([](const Tensor& x) { return x.to(torch::kHalf) * 1e3 * 1e-9 * 1e6; })}) {
    EXPECT_EQ(lines_with("error", doctor_of_op(op)), "");
    EXPECT_EQ(lines_with("warning", doctor_of_op(op)), "");
  }
}

/// What is advised is done, and the finding is gone.
TEST(PlantedBeforeTheRunRemedies, CureTheFault) {
  struct Cure {
    Op faulty;
    const char* remedy;
    Op cured;
  };
  const auto half = [](const Tensor& x) { return x.to(torch::kHalf); };
  const std::vector<Cure> cures = {
      {[=](const Tensor& x) { return half(x).clamp(-1e30, 10); }, "x.clamp_min(-65504.0)",
       [=](const Tensor& x) { return half(x).clamp_min(-65504.0).clamp_max(10); }},
      {[=](const Tensor& x) { return half(x) * 1e6; }, "around it and what reads its result",
       [](const Tensor& x) { return x.to(torch::kFloat) * 1e6 * 1e-6; }},
      {[=](const Tensor& x) { return (half(x) * 0 + 0.1) / (half(x) * 0 + 1e-10); },
       "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps)",
       [=](const Tensor& x) {
         return (half(x) * 0 + 0.1) / (half(x).to(torch::kFloat) * 0 + 1e-10) * 1e-9;
       }},
      {[=](const Tensor& x) { return x / (half(x) * 0).norm().clamp_min(1e-12); },
       "x.to(torch::kFloat) / (norm.to(torch::kFloat) + eps)",
       [=](const Tensor& x) {
         return x.to(torch::kFloat) / (half(x) * 0).norm().to(torch::kFloat).clamp_min(1e-12) *
                1e-12;
       }},
  };
  for (const Cure& cure : cures) {
    const std::string before = doctor_of_op(cure.faulty), after = doctor_of_op(cure.cured);
    EXPECT_THAT(before, testing::HasSubstr(cure.remedy));
    EXPECT_EQ(lines_with("error", after) + lines_with("warning", after), "") << before;
  }
}

TEST(PlantedBeforeTheRunRemedies, CureWeightsBuffersAndInputsBeyondHalf) {
  PatientImpl model;
  const Tensor mask = model.register_buffer("mask", torch::tensor({0.F, -1e9F}));
  EXPECT_THAT(lines_with("mask", doctor_of(model)), testing::HasSubstr("mask.clamp_min(-65504.0)"));
  mask.copy_(mask.clamp_min(-65504.0));
  EXPECT_EQ(lines_with("mask", doctor_of(model)), "");
  model.register_buffer("seen", torch::tensor({3e6F}));
  EXPECT_THAT(lines_with("seen", doctor_of(model)), testing::HasSubstr("torch::kBFloat16"));
  EXPECT_THAT(lines_with("input 0", doctor_of(model, batch_of_ones() * -1e5)),
              testing::HasSubstr("torch::kBFloat16"));
  plant(model.parameter("body.weight"), 0, -1e5F);
  EXPECT_THAT(lines_with("body.weight", doctor_of(model)), testing::HasSubstr("torch::kBFloat16"));
  EXPECT_EQ(lines_with("beyond", doctor_of(model, batch_of_ones() * -1e5, torch::kBFloat16)), "");
}

}  // namespace
}  // namespace planted_faults
