#include <mezzo/diagnostics/precision_check.h>
#include <mezzo/optim/adamw.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "../support/message_of.h"

namespace {

using mezzo::check_precision;
using mezzo::Finding;
using mezzo::FindingSeverity;
using mezzo::PrecisionReport;
using test_support::message_of;
using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::Field;
using testing::HasSubstr;
using testing::Not;

const mezzo::PrecisionCheckOptions kFloat16Options{.dtype = torch::kHalf};
const mezzo::PrecisionCheckOptions kBfloat16Options{.dtype = torch::kBFloat16};

auto finding(FindingSeverity severity, const std::string& check, const std::string& location,
             const std::string& description) {
  return AllOf(Field("severity", &Finding::severity, severity),
               Field("check", &Finding::check, check),
               Field("location", &Finding::location, location),
               Field("description", &Finding::description, HasSubstr(description)));
}

auto has_check(const std::string& check) { return Field("check", &Finding::check, check); }

/// One attention head with mask and eps constants in `forward`.
struct Attention : torch::nn::Module {
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({16}).eps(1e-12)};
  torch::nn::Linear query{16, 16}, head{16, 8};
  double fill = -1e9;

  Attention() {
    register_module("norm", norm);
    register_module("query", query);
    register_module("head", head);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor q = query->forward(norm->forward(x));
    torch::Tensor scores = torch::matmul(q, q.transpose(-1, -2));
    scores = scores.masked_fill(scores > 1e6, fill);
    const torch::Tensor mixed = torch::matmul(torch::softmax(scores, -1), q);
    return head->forward(mixed / mixed.norm(2, {-1}, true).clamp_min(1e-12));
  }
};

torch::Tensor rows(std::int64_t batch = 4) { return torch::randn({batch, 8, 16}); }

TEST(PrecisionCheck, ReportsUnderflowingEpsOutsideNorms) {
  Attention model;
  model.fill = 0;
  const PrecisionReport report = check_precision(model, rows(), torch::kCPU, kFloat16Options);
  EXPECT_THAT(report.findings,
              Contains(finding(FindingSeverity::warning, "range", "after query",
                               "clamp_min with 1e-12 computes in float16, whose smallest number")));
  EXPECT_THAT(report.findings,
              Not(Contains(Field(&Finding::description, HasSubstr("layer_norm")))));
}

/// Casts its buffers, its input and a parameter to float16 if `casts`, else does not read them.
struct Caster : torch::nn::Module {
  explicit Caster(bool casts) : casts_all(casts) {
    register_module("norm", norm);
    register_module("head", head);
    register_buffer("mask", torch::tensor({-1e9F, -std::numeric_limits<float>::infinity()}));
    register_parameter("value", torch::ones({1000}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = head->forward(norm->forward(x * 1e-6));
    if (!casts_all) return y;
    for (const auto& tensor : {named_buffers()["mask"], named_parameters()["value"], x}) {
      y = y + (tensor.to(torch::kHalf) * 0).sum().nan_to_num(0, 0, 0);
    }
    return y;
  }
  bool casts_all;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({16})};
  torch::nn::Linear head{16, 8};
};

TEST(PrecisionCheck, ReportsCastTensorsOutOfRange) {
  const auto found = [](bool casts) {
    Caster model(casts);
    const torch::NoGradGuard no_grad;
    model.head->weight[0][0] = std::numeric_limits<float>::infinity();
    model.head->bias.fill_(1e5);
    model.norm->bias.fill_(1e-9);
    model.named_parameters()["value"].fill_(1e-9);
    return check_precision(model, torch::full({4, 16}, 1e6), torch::kCPU, kFloat16Options).findings;
  };
  const auto all = found(true);
  EXPECT_THAT(all, Contains(finding(FindingSeverity::error, "range", "head.weight",
                                    "this parameter contains inf or NaN")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::error, "range", "head.bias",
                                    "this parameter contains 1e+05 in magnitude")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::warning, "range", "value",
                                    "rounds more than 10 % of the values of this parameter to 0")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::warning, "range", "mask",
                                    "this buffer contains 1e+09 in magnitude")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::warning, "range", "input 0", "this input")));
  const auto without_casts = found(false);
  for (const char* name : {"mask", "input 0"}) {
    EXPECT_THAT(without_casts, Not(Contains(Field(&Finding::location, name)))) << "not cast";
  }
  EXPECT_THAT(without_casts,
              Not(Contains(Field(&Finding::description, HasSubstr("of this parameter to 0")))));
}

TEST(PrecisionCheck, ReadsFloat8Buffers) {
  Caster model(true);
  model.register_buffer("packed", torch::ones({4}).to(torch::kFloat8_e4m3fn));
  model.named_parameters()["value"].detach().slice(0, 0, 200).fill_(1e-30);
  const PrecisionReport report =
      check_precision(model, torch::ones({4, 16}), torch::kCPU, kFloat16Options);
  EXPECT_THAT(report.findings, Contains(finding(FindingSeverity::warning, "range", "value",
                                                "of this parameter to 0")))
      << report;
}

/// The reported percentage is that of a training run, and the remedy updates all weights.
TEST(PrecisionCheck, PredictsUpdatesLostToRounding) {
  torch::manual_seed(0);
  torch::nn::Linear layer(64, 64);
  layer->to(torch::kBFloat16);
  const auto found = [&](at::ScalarType dtype, std::optional<double> learning_rate) {
    layer->to(dtype);
    mezzo::PrecisionCheckOptions options = kBfloat16Options;
    options.learning_rate = learning_rate;
    return check_precision(layer, torch::ones({8, 64}).to(dtype), torch::kCPU, options).findings;
  };
  const auto has_no_update_finding = Not(Contains(has_check("updates")));
  EXPECT_THAT(found(torch::kBFloat16, std::nullopt), has_no_update_finding);
  EXPECT_THAT(found(torch::kBFloat16, 1e-2), has_no_update_finding);
  EXPECT_THAT(message_of([&] { found(torch::kBFloat16, -1.0); }),
              HasSubstr("Invalid learning rate: -1"));
  const auto findings = found(torch::kBFloat16, 1e-4);
  const auto finding = std::find_if(findings.begin(), findings.end(),
                                    [](const auto& known) { return known.check == "updates"; });
  ASSERT_NE(finding, findings.end());
  EXPECT_THAT(finding->remedy, HasSubstr("WeightStorage::fp32_master"));

  const torch::Tensor start = layer->weight.detach().clone();
  const auto unchanged_fraction = [&](mezzo::optim::WeightStorage storage, double gradient) {
    layer->weight.detach().copy_(start);
    mezzo::optim::AdamW optimizer(layer->parameters(),
                                  mezzo::optim::AdamWOptions(1e-4).weight_decay(0),
                                  {.weight_storage = storage});
    for (int step = 0; step < 100; ++step) {
      layer->weight.mutable_grad() = torch::full_like(start, gradient);
      optimizer.step();
      if (step == 0 && storage == mezzo::optim::WeightStorage::plain) break;
    }
    return layer->weight.detach().eq(start).to(torch::kFloat).mean().item<double>();
  };
  const double fraction = (unchanged_fraction(mezzo::optim::WeightStorage::plain, 1) +
                           unchanged_fraction(mezzo::optim::WeightStorage::plain, -1)) /
                          2;
  EXPECT_GT(fraction, 0.5);
  EXPECT_THAT(finding->location,
              HasSubstr(c10::str("weight (", std::lround(100 * fraction), " %)")));
  EXPECT_EQ(unchanged_fraction(mezzo::optim::WeightStorage::fp32_master, 1), 0);
  EXPECT_THAT(found(torch::kFloat, 1e-4), has_no_update_finding);
}

TEST(PrecisionCheck, ReportsDimensionsNotMultipleOf8) {
  torch::nn::Sequential model(torch::nn::Linear(16, 16), torch::nn::Linear(16, 9));
  const auto all =
      check_precision(model, torch::ones({8, 16}), torch::kCPU, kBfloat16Options).findings;
  EXPECT_THAT(all,
              Contains(finding(FindingSeverity::note, "dimensions", "1",
                               "a product of [8, 16] and [16, 9] has a dimension that is not")));
  EXPECT_EQ(std::count_if(all.begin(), all.end(),
                          [](const auto& known) { return known.check == "dimensions"; }),
            1);
  const torch::nn::Conv2d images(1, 16, 3);
  EXPECT_THAT(
      check_precision(images, torch::ones({8, 1, 6, 6}), torch::kCPU, kBfloat16Options).findings,
      Contains(finding(FindingSeverity::note, "dimensions", "(model)",
                       "a convolution of 1 to 16 channels")));
}

TEST(PrecisionReport, ReportsMaxSeverity) {
  PrecisionReport report;
  EXPECT_EQ(report.max_severity(), FindingSeverity::note);
  report.findings = {{.severity = FindingSeverity::error}, {.severity = FindingSeverity::warning}};
  EXPECT_EQ(report.max_severity(), FindingSeverity::error);
}

TEST(PrecisionCheck, PreservesModelGradsAndRng) {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8),
                              torch::nn::Dropout(0.5));
  model->parameters()[0].mutable_grad() = torch::ones({8, 8});
  const auto weight = model->parameters()[0];
  const auto version = weight._version();
  const torch::Tensor mean = model->buffers()[0].clone();
  torch::manual_seed(7);
  const torch::Tensor drawn = torch::rand({4});
  torch::manual_seed(7);
  const PrecisionReport report =
      check_precision(model, torch::randn({16, 8}, torch::kDouble).to(torch::kFloat), torch::kCPU,
                      {.dtype = torch::kBFloat16});
  torch::manual_seed(7);
  static_cast<void>(check_precision(model, torch::ones({16, 8}), torch::kCPU, kBfloat16Options));
  EXPECT_TRUE(torch::equal(torch::rand({4}), drawn));
  EXPECT_TRUE(torch::equal(model->buffers()[0], mean));
  EXPECT_EQ(weight._version(), version);
  EXPECT_TRUE(torch::equal(weight.grad(), torch::ones({8, 8})));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
  EXPECT_THAT(report.findings, Contains(has_check("hardware")));
}

TEST(PrecisionCheck, RestoresIntegerBuffers) {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8));
  model->register_buffer("expanded", torch::ones({1}, torch::kBool).expand({4}));
  const torch::Tensor steps = model->named_buffers()["1.num_batches_tracked"];
  steps.fill_(3);
  static_cast<void>(check_precision(model, torch::randn({16, 8}), torch::kCPU, kBfloat16Options));
  EXPECT_EQ(steps.item<std::int64_t>(), 3);
}

TEST(PrecisionCheck, IgnoresInternalOpsAndOutBuffers) {
  struct Scalar : torch::nn::Module {
    torch::nn::Linear layer{8, 8};
    torch::Tensor memory = torch::zeros({}), large = torch::full({}, 1e7F);
    Scalar() { register_module("layer", layer); }
    torch::Tensor forward(const torch::Tensor& x) {
      const torch::Tensor mean = layer->forward(x).detach().to(torch::kFloat).mean();
      *memory.data_ptr<float>() = 1e9F;
      torch::abs_out(memory, mean);
      return large + large;
    }
  } model;
  const PrecisionReport report =
      check_precision(model, torch::ones({8, 8}), torch::kCPU, kFloat16Options);
  for (const char* number : {"2e+07", "1e+09"}) {
    EXPECT_THAT(report.findings, Not(Contains(Field(&Finding::description, HasSubstr(number)))))
        << report;
  }
}

TEST(PrecisionCheck, AcceptsHoldersPointersAndTuples) {
  struct TwoImpl : torch::nn::Module {
    torch::nn::Linear layer{8, 8};
    TwoImpl() { register_module("layer", layer); }
    std::tuple<torch::Tensor, int> forward(const torch::Tensor& x, const torch::Tensor& y) {
      return {layer->forward(x) + y, 3};
    }
  };
  const auto pointer = std::make_shared<TwoImpl>();
  const torch::nn::ModuleHolder<TwoImpl> holder(pointer);
  const auto sample = std::make_tuple(torch::ones({8, 8}), torch::ones({8, 8}));
  EXPECT_LT(check_precision(pointer, sample, torch::kCPU, kBfloat16Options).max_severity(),
            FindingSeverity::error);
  EXPECT_LT(check_precision(holder, sample, torch::kCPU, kBfloat16Options).max_severity(),
            FindingSeverity::error);
  EXPECT_LT(check_precision(*pointer, sample, torch::kCPU, kBfloat16Options).max_severity(),
            FindingSeverity::error);
}

/// A layer and libtorch's attention, whose key_padding_mask uses a loop for float32 and float64
/// only.
struct MaskedAttention : torch::nn::Module {
  torch::nn::Linear layer{16, 16};
  torch::nn::MultiheadAttention attention{torch::nn::MultiheadAttentionOptions(16, 2)};
  MaskedAttention() {
    register_module("layer", layer);
    register_module("attention", attention);
  }
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& mask) {
    const torch::Tensor y = layer->forward(x);
    return std::get<0>(attention->forward(y, y, y, mask));
  }
};

/// Returns the "forward" finding.
Finding forward_finding(const PrecisionReport& report) {
  for (const Finding& known : report.findings) {
    if (known.check == "forward") return known;
  }
  ADD_FAILURE() << report;
  return {};
}

TEST(PrecisionCheck, ReportsExceptionOutsideOps) {
  MaskedAttention model;
  model.eval();
  const torch::Tensor x = torch::randn({8, 4, 16});
  const torch::Tensor mask = torch::zeros({4, 8}, torch::kBool);
  for (const auto& options : {kBfloat16Options, kFloat16Options}) {
    const Finding found =
        forward_finding(check_precision(model, std::make_tuple(x, mask), torch::kCPU, options));
    EXPECT_THAT(found.description, HasSubstr("in the model's code outside any op, after aten::"));
    EXPECT_THAT(found.description, HasSubstr("attn_output_weights"));
    EXPECT_THAT(found.location, HasSubstr("attention"));
    EXPECT_THAT(found.remedy, HasSubstr(".enabled = false"));
  }
}

TEST(PrecisionCheck, HasNoRemedyIfFloat32Throws) {
  torch::nn::Linear model(8, 8);
  EXPECT_EQ(
      forward_finding(check_precision(model, torch::ones({8, 9}), torch::kCPU, kBfloat16Options))
          .remedy,
      "");
}

/// The attention above as TorchScript, with the mask constant in a nested module.
torch::jit::Module make_script() {
  torch::jit::Module layer("Layer"), encoder("Encoder"), model("Model");
  layer.register_parameter("weight", torch::randn({16, 16}), false);
  layer.register_attribute("eps", c10::FloatType::get(), 1e-12);
  layer.define(R"(
    def forward(self, x):
        q = torch.matmul(x, self.weight.t())
        scores = torch.matmul(q, q.transpose(-1, -2))
        scores = scores.masked_fill(scores > 1e6, -1e9)
        mixed = torch.matmul(torch.softmax(scores, -1), q)
        return mixed / mixed.norm(2, [-1], True).clamp_min(self.eps)
  )");
  encoder.register_module("layer", layer);
  encoder.define("def forward(self, x):\n  return self.layer.forward(x)\n");
  model.register_module("encoder", encoder);
  model.define("def forward(self, x):\n  return self.encoder.forward(x)\n");
  return model;
}

PrecisionReport check_script(torch::jit::Module model, const std::vector<c10::IValue>& sample) {
  return check_precision(model, sample, torch::kCPU, kFloat16Options);
}

TEST(PrecisionCheck, ReportsTorchScriptConstants) {
  const PrecisionReport report = check_script(make_script(), {rows()});
  EXPECT_THAT(report.findings,
              Contains(finding(FindingSeverity::error, "range", "after encoder.layer",
                               "masked_fill with -1e+09 computes in float16")));
  EXPECT_THAT(report.findings,
              Contains(finding(FindingSeverity::warning, "range", "after encoder.layer",
                               "clamp_min with 1e-12 computes in float16")));
  EXPECT_THAT(report.findings,
              Contains(finding(FindingSeverity::error, "forward", "after encoder.layer",
                               "throws under autocast to float16")));
  EXPECT_EQ(report.num_parameters, 256);
}

TEST(PrecisionCheck, ChecksTorchScriptValuesWithoutSample) {
  torch::jit::Module model = make_script();
  model.register_buffer("mask", torch::full({2}, -1e9));
  EXPECT_THAT(check_script(model, {}).findings,
              Contains(finding(FindingSeverity::warning, "range", "mask", "this buffer")));
}

TEST(PrecisionCheck, IgnoresTorchScriptIntegerConstants) {
  torch::jit::Module model("Model");
  model.register_parameter("weight", torch::ones({8, 8}), false);
  model.define(R"(
    def forward(self, x):
        ids = torch.remainder(torch.argmax(x, -1) * 100003, 16)
        rows = float(x.size(0)) * 1e6
        return torch.matmul(x, self.weight) + ids.unsqueeze(-1) / rows
  )");
  const auto named = [](const std::string& what) {
    return Field(&Finding::description, HasSubstr(what));
  };
  const auto all = check_script(model, {torch::ones({8, 8})}).findings;
  EXPECT_THAT(all, Not(Contains(named("1e+05")))) << "integer tensors";
  EXPECT_THAT(all, Not(Contains(named("1e+06")))) << "a product of two Python floats";
}

TEST(PrecisionCheck, PrintsMostSevereFirst) {
  Attention model;
  std::ostringstream out;
  out << check_precision(model, rows(), torch::kCPU, kFloat16Options);
  const std::string text = out.str();
  EXPECT_THAT(text, HasSubstr("parameters on cpu for float16: 2 errors, "));
  EXPECT_LT(text.find("  error "), text.find("  warning "));
  EXPECT_THAT(text, HasSubstr("> scores.masked_fill(mask, -std::numeric_limits<float>::infinity"));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const bool is_code = line.find("> ") != std::string::npos;
    EXPECT_TRUE(is_code || line.size() <= 100) << line;
  }
}

TEST(PrecisionCheck, ThrowsForInvalidArguments) {
  Attention model;
  EXPECT_THAT(message_of([&] { check_precision(model, rows(), torch::kMeta); }),
              HasSubstr("unsupported autocast device_type 'meta'"));
  EXPECT_THAT(
      message_of([&] { check_precision(model, rows(), torch::kCUDA); }),
      HasSubstr("expected all parameters on cuda, but norm.weight is on cpu; call model->to"));
  EXPECT_THAT(
      message_of([&] { check_precision(model, rows(), torch::kCPU, {.dtype = torch::kFloat}); }),
      HasSubstr("expected dtype torch::kHalf or torch::kBFloat16, but got Float"));
  torch::nn::Sequential empty{torch::nn::ReLU()};
  EXPECT_THAT(message_of([&] { check_precision(empty, rows(), torch::kCPU); }),
              HasSubstr("the model has no parameters"));
  EXPECT_THAT(message_of([&] { check_precision(torch::nn::Linear(nullptr), rows(), torch::kCPU); }),
              HasSubstr("the model is an empty holder or a null pointer"));
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  EXPECT_THAT(message_of([&] { check_precision(model, rows(), torch::kCPU); }),
              HasSubstr("call it outside autocast regions"));
}

}  // namespace
