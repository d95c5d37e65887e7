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

const mezzo::PrecisionCheckOptions kInHalf{.dtype = torch::kHalf};
const mezzo::PrecisionCheckOptions kInBfloat16{.dtype = torch::kBFloat16};

auto finding(FindingSeverity severity, const std::string& check, const std::string& where,
             const std::string& reason) {
  return AllOf(Field("severity", &Finding::severity, severity),
               Field("check", &Finding::check, check), Field("where", &Finding::where, where),
               Field("reason", &Finding::reason, HasSubstr(reason)));
}

auto about(const std::string& check) { return Field("check", &Finding::check, check); }

/// One head of attention whose mask and eps are constants in `forward`.
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

TEST(PrecisionChecker, TellsAnEpsThatIsLostFromOneThatANormAddsInFloat32) {
  Attention model;
  model.fill = 0;
  const PrecisionReport report = check_precision(model, rows(), torch::kCPU, kInHalf);
  EXPECT_THAT(report.findings,
              Contains(finding(FindingSeverity::warning, "range", "after query",
                               "clamp_min with 1e-12 computes in float16, whose smallest number")));
  EXPECT_THAT(report.findings, Not(Contains(Field(&Finding::reason, HasSubstr("layer_norm")))));
}

/// Reads its buffers, its input and a value in half where `casts`, and not at all if not.
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

TEST(PrecisionChecker, NamesWeightsBuffersAndInputsThatTheTypeDoesNotHoldWhereTheRunCastsThem) {
  const auto found = [](bool casts) {
    Caster model(casts);
    const torch::NoGradGuard no_grad;
    model.head->weight[0][0] = std::numeric_limits<float>::infinity();
    model.head->bias.fill_(1e5);
    model.norm->bias.fill_(1e-9);
    model.named_parameters()["value"].fill_(1e-9);
    return check_precision(model, torch::full({4, 16}, 1e6), torch::kCPU, kInHalf).findings;
  };
  const auto all = found(true);
  EXPECT_THAT(all, Contains(finding(FindingSeverity::error, "range", "head.weight",
                                    "this parameter holds inf or NaN already")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::error, "range", "head.bias",
                                    "this parameter holds 1e+05 in magnitude")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::warning, "range", "value",
                                    "makes more than a tenth of the values of this parameter 0")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::warning, "range", "mask",
                                    "this buffer holds 1e+09 in magnitude")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::warning, "range", "input 0", "this input")));
  const auto idle = found(false);
  for (const char* name : {"mask", "input 0"}) {
    EXPECT_THAT(idle, Not(Contains(Field(&Finding::where, name)))) << "no op casts it";
  }
  EXPECT_THAT(idle, Not(Contains(Field(&Finding::reason, HasSubstr("of this parameter 0")))));
}

TEST(PrecisionChecker, ReadsWeightsThatHaveNoArithmetic) {
  Caster model(true);
  model.register_buffer("packed", torch::ones({4}).to(torch::kFloat8_e4m3fn));
  model.named_parameters()["value"].detach().slice(0, 0, 200).fill_(1e-30);
  const PrecisionReport report = check_precision(model, torch::ones({4, 16}), torch::kCPU, kInHalf);
  EXPECT_THAT(report.findings,
              Contains(finding(FindingSeverity::warning, "range", "value", "of this parameter 0")))
      << report;
}

/// The share that the doctor foretells is that of a run, and its remedy makes all weights move.
TEST(PrecisionChecker, ForetellsTheUpdatesThatRoundToNothing) {
  torch::manual_seed(0);
  torch::nn::Linear layer(64, 64);
  layer->to(torch::kBFloat16);
  const auto found = [&](at::ScalarType dtype, std::optional<double> rate) {
    layer->to(dtype);
    mezzo::PrecisionCheckOptions options = kInBfloat16;
    options.learning_rate = rate;
    return check_precision(layer, torch::ones({8, 64}).to(dtype), torch::kCPU, options).findings;
  };
  const auto says_nothing = Not(Contains(about("updates")));
  EXPECT_THAT(found(torch::kBFloat16, std::nullopt), says_nothing);
  EXPECT_THAT(found(torch::kBFloat16, 1e-2), says_nothing);
  EXPECT_THAT(message_of([&] { found(torch::kBFloat16, -1.0); }), HasSubstr("learning_rate is -1"));
  const auto findings = found(torch::kBFloat16, 1e-4);
  const auto finding = std::find_if(findings.begin(), findings.end(),
                                    [](const auto& one) { return one.check == "updates"; });
  ASSERT_NE(finding, findings.end());
  EXPECT_THAT(finding->remedy, HasSubstr("WeightStorage::fp32_master"));

  const torch::Tensor start = layer->weight.detach().clone();
  const auto unmoved = [&](mezzo::optim::WeightStorage storage, double gradient) {
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
  const double share = (unmoved(mezzo::optim::WeightStorage::plain, 1) +
                        unmoved(mezzo::optim::WeightStorage::plain, -1)) /
                       2;
  EXPECT_GT(share, 0.5);
  EXPECT_THAT(finding->where, HasSubstr(c10::str("weight (", std::lround(100 * share), " %)")));
  EXPECT_EQ(unmoved(mezzo::optim::WeightStorage::fp32_master, 1), 0);
  EXPECT_THAT(found(torch::kFloat, 1e-4), says_nothing);
}

TEST(PrecisionChecker, NamesSizesThatAreNoMultipleOf8) {
  torch::nn::Sequential model(torch::nn::Linear(16, 16), torch::nn::Linear(16, 9));
  const auto all = check_precision(model, torch::ones({8, 16}), torch::kCPU, kInBfloat16).findings;
  EXPECT_THAT(all, Contains(finding(FindingSeverity::note, "dimensions", "1",
                                    "a product of 8 x 16 with 16 x 9 has a size that is no")));
  EXPECT_EQ(std::count_if(all.begin(), all.end(),
                          [](const auto& one) { return one.check == "dimensions"; }),
            1);
  const torch::nn::Conv2d images(1, 16, 3);
  EXPECT_THAT(check_precision(images, torch::ones({8, 1, 6, 6}), torch::kCPU, kInBfloat16).findings,
              Contains(finding(FindingSeverity::note, "dimensions", "(model)",
                               "a convolution of 1 to 16 channels")));
}

TEST(PrecisionChecker, LeavesNoTrace) {
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
  static_cast<void>(check_precision(model, torch::ones({16, 8}), torch::kCPU, kInBfloat16));
  EXPECT_TRUE(torch::equal(torch::rand({4}), drawn));
  EXPECT_TRUE(torch::equal(model->buffers()[0], mean));
  EXPECT_EQ(weight._version(), version);
  EXPECT_TRUE(torch::equal(weight.grad(), torch::ones({8, 8})));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
  EXPECT_THAT(report.findings, Contains(about("hardware")));
}

TEST(PrecisionChecker, PutsBackBuffersOfIntegersToo) {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8));
  model->register_buffer("expanded", torch::ones({1}, torch::kBool).expand({4}));
  const torch::Tensor steps = model->named_buffers()["1.num_batches_tracked"];
  steps.fill_(3);
  static_cast<void>(check_precision(model, torch::randn({16, 8}), torch::kCPU, kInBfloat16));
  EXPECT_EQ(steps.item<std::int64_t>(), 3);
}

TEST(PrecisionChecker, TakesNeitherItsOwnOpsNorUnwrittenMemoryForConstants) {
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
  const PrecisionReport report = check_precision(model, torch::ones({8, 8}), torch::kCPU, kInHalf);
  for (const char* number : {"2e+07", "1e+09"}) {
    EXPECT_THAT(report.findings, Not(Contains(Field(&Finding::reason, HasSubstr(number)))))
        << report;
  }
}

TEST(PrecisionChecker, TakesHoldersPointersAndSeveralArguments) {
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
  EXPECT_LT(check_precision(pointer, sample, torch::kCPU, kInBfloat16).max_severity(), 2);
  EXPECT_LT(check_precision(holder, sample, torch::kCPU, kInBfloat16).max_severity(), 2);
  EXPECT_LT(check_precision(*pointer, sample, torch::kCPU, kInBfloat16).max_severity(), 2);
}

/// libtorch's attention after a layer; it takes a loop over float and double alone to its scores
/// where it is given a mask.
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

/// The forward error of the pass, which is there.
Finding throw_in(const PrecisionReport& report) {
  for (const Finding& one : report.findings) {
    if (one.check == "forward") return one;
  }
  ADD_FAILURE() << report;
  return {};
}

TEST(PrecisionChecker, SaysWhereTheModelsOwnCodeThrowsAndNoOp) {
  MaskedAttention model;
  model.eval();
  const torch::Tensor x = torch::randn({8, 4, 16});
  const torch::Tensor mask = torch::zeros({4, 8}, torch::kBool);
  for (const auto& options : {kInBfloat16, kInHalf}) {
    const Finding found =
        throw_in(check_precision(model, std::make_tuple(x, mask), torch::kCPU, options));
    EXPECT_THAT(found.reason, HasSubstr("in the model's code and in no op, after aten::"));
    EXPECT_THAT(found.reason, HasSubstr("attn_output_weights"));
    EXPECT_THAT(found.where, HasSubstr("attention"));
    EXPECT_THAT(found.remedy, HasSubstr(".enabled = false"));
  }
}

TEST(PrecisionChecker, GivesNoRemedyWhereFloat32ThrowsToo) {
  torch::nn::Linear model(8, 8);
  EXPECT_EQ(throw_in(check_precision(model, torch::ones({8, 9}), torch::kCPU, kInBfloat16)).remedy,
            "");
}

/// The attention above as TorchScript: its mask is a constant of a graph two modules down.
torch::jit::Module scripted() {
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
  return check_precision(model, sample, torch::kCPU, kInHalf);
}

TEST(PrecisionChecker, NamesTheModuleBeforeAConstantOfTorchScript) {
  const PrecisionReport report = check_script(scripted(), {rows()});
  EXPECT_THAT(report.findings,
              Contains(finding(FindingSeverity::error, "range", "after encoder.layer",
                               "masked_fill with -1e+09 computes in float16")));
  EXPECT_THAT(report.findings,
              Contains(finding(FindingSeverity::warning, "range", "after encoder.layer",
                               "clamp_min with 1e-12 computes in float16")));
  EXPECT_THAT(report.findings,
              Contains(finding(FindingSeverity::error, "forward", "after encoder.layer",
                               "throws under autocast to float16")));
  EXPECT_EQ(report.parameters, 256);
}

TEST(PrecisionChecker, ReadsTheValuesOfTorchScriptWithoutASample) {
  torch::jit::Module model = scripted();
  model.register_buffer("mask", torch::full({2}, -1e9));
  EXPECT_THAT(check_script(model, {}).findings,
              Contains(finding(FindingSeverity::warning, "range", "mask", "this buffer")));
}

TEST(PrecisionChecker, AccusesNoConstantOfTorchScriptThatMeetsIntegersAlone) {
  torch::jit::Module model("Model");
  model.register_parameter("weight", torch::ones({8, 8}), false);
  model.define(R"(
    def forward(self, x):
        ids = torch.remainder(torch.argmax(x, -1) * 100003, 16)
        rows = float(x.size(0)) * 1e6
        return torch.matmul(x, self.weight) + ids.unsqueeze(-1) / rows
  )");
  const auto named = [](const std::string& what) {
    return Field(&Finding::reason, HasSubstr(what));
  };
  const auto all = check_script(model, {torch::ones({8, 8})}).findings;
  EXPECT_THAT(all, Not(Contains(named("1e+05")))) << "integers alone";
  EXPECT_THAT(all, Not(Contains(named("1e+06")))) << "a product of two Python floats";
}

TEST(PrecisionChecker, PrintsTheWorstFirstWithinTheWidthOfATerminal) {
  Attention model;
  std::ostringstream out;
  out << check_precision(model, rows(), torch::kCPU, kInHalf);
  const std::string text = out.str();
  EXPECT_THAT(text, HasSubstr("parameters on cpu, looked at for float16: 2 errors, "));
  EXPECT_LT(text.find("  error "), text.find("  warning "));
  EXPECT_THAT(text, HasSubstr("> scores.masked_fill(mask, -std::numeric_limits<float>::infinity"));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const bool is_code = line.find("> ") != std::string::npos;
    EXPECT_TRUE(is_code || line.size() <= 100) << line;
  }
}

TEST(PrecisionChecker, SaysWhatItCannotExamine) {
  Attention model;
  EXPECT_THAT(message_of([&] { check_precision(model, rows(), torch::kMeta); }),
              HasSubstr("unsupported autocast device_type 'meta'"));
  EXPECT_THAT(message_of([&] { check_precision(model, rows(), torch::kCUDA); }),
              HasSubstr("norm.weight is on cpu and device is cuda; call model->to(device) first"));
  EXPECT_THAT(
      message_of([&] { check_precision(model, rows(), torch::kCPU, {.dtype = torch::kFloat}); }),
      HasSubstr("dtype is Float; use torch::kHalf or torch::kBFloat16"));
  torch::nn::Sequential empty{torch::nn::ReLU()};
  EXPECT_THAT(message_of([&] { check_precision(empty, rows(), torch::kCPU); }),
              HasSubstr("the model has no parameters"));
  EXPECT_THAT(message_of([&] { check_precision(torch::nn::Linear(nullptr), rows(), torch::kCPU); }),
              HasSubstr("the model is an empty holder or a null pointer"));
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  EXPECT_THAT(message_of([&] { check_precision(model, rows(), torch::kCPU); }),
              HasSubstr("outside of Autocast regions"));
}

}  // namespace
