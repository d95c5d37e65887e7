#include <mezzo/autocast/op_policy.h>
#include <mezzo/diagnose/detail/value_range.h>
#include <mezzo/diagnose/doctor.h>
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

#include "../support/error_of.h"

namespace {

using mezzo::diagnose;
using mezzo::Diagnosis;
using mezzo::DoctorFinding;
using mezzo::FindingSeverity;
using mezzo::FindingTopic;
using test_support::error_of;
using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::Field;
using testing::HasSubstr;
using testing::Not;

const mezzo::DoctorOptions kInHalf{.dtype = torch::kHalf, .measure = false};
const mezzo::DoctorOptions kInBfloat16{.dtype = torch::kBFloat16, .measure = false};

auto finding(FindingSeverity severity, FindingTopic topic, const std::string& where,
             const std::string& reason) {
  return AllOf(Field("severity", &DoctorFinding::severity, severity),
               Field("topic", &DoctorFinding::topic, topic),
               Field("where", &DoctorFinding::where, where),
               Field("reason", &DoctorFinding::reason, HasSubstr(reason)));
}

auto about(FindingTopic topic) { return Field("topic", &DoctorFinding::topic, topic); }

TEST(RoundingEnds, AreThoseOfLibtorchsConversions) {
  const auto rounded = [](double value, at::ScalarType dtype) {
    return torch::scalar_tensor(value, torch::kDouble).to(dtype).item<double>();
  };
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat}) {
    const auto [overflow, underflow] = mezzo::detail::rounding_ends(dtype);
    EXPECT_TRUE(mezzo::detail::nonfinite_bits(rounded(overflow, dtype))) << dtype;
    EXPECT_FALSE(mezzo::detail::nonfinite_bits(rounded(overflow * (1 - 0x1p-20), dtype))) << dtype;
    EXPECT_EQ(rounded(underflow, dtype), 0) << dtype;
#ifndef __FAST_MATH__  // where a program is linked so, subnormal numbers are 0
    EXPECT_GT(rounded(underflow * (1 + 0x1p-10), dtype), 0) << dtype;
#endif
  }
}

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

TEST(Doctor, NamesAMaskThatHalfDoesNotHoldAndWhereItIs) {
  Attention model;
  const Diagnosis diagnosis = diagnose(model, rows(), torch::kCPU, kInHalf);
  EXPECT_THAT(
      diagnosis.findings,
      Contains(finding(FindingSeverity::error, FindingTopic::range, "after query",
                       "masked_fill with -1e+09 computes in float16, which ends at 65504")));
  EXPECT_THAT(diagnosis.findings,
              Contains(finding(FindingSeverity::error, FindingTopic::forward, "after query",
                               "throws under autocast to float16, in aten::masked_fill.Scalar")));
  EXPECT_EQ(diagnosis.exit_status(), 2);
}

TEST(Doctor, HasNothingAgainstAMaskThatTheTypeHolds) {
  Attention model;
  model.fill = -std::numeric_limits<double>::infinity();
  for (const auto& options : {kInHalf, kInBfloat16}) {
    const Diagnosis diagnosis = diagnose(model, rows(), torch::kCPU, options);
    EXPECT_THAT(diagnosis.findings,
                Each(Field(&DoctorFinding::severity, testing::Ne(FindingSeverity::error))));
    EXPECT_THAT(diagnosis.findings,
                Not(Contains(Field(&DoctorFinding::reason, HasSubstr("masked_fill")))));
  }
}

TEST(Doctor, InBfloat16AMaskIsANote) {
  Attention model;
  EXPECT_THAT(diagnose(model, rows(), torch::kCPU, kInBfloat16).findings,
              Contains(finding(FindingSeverity::note, FindingTopic::range, "after query",
                               "masked_fill with -1e+09 holds in bfloat16; float16 would make")));
}

TEST(Doctor, TellsAnEpsThatIsLostFromOneThatANormAddsInFloat32) {
  Attention model;
  model.fill = 0;
  const Diagnosis diagnosis = diagnose(model, rows(), torch::kCPU, kInHalf);
  EXPECT_THAT(diagnosis.findings,
              Contains(finding(FindingSeverity::warning, FindingTopic::range, "after query",
                               "clamp_min with 1e-12 computes in float16, whose smallest number")));
  EXPECT_THAT(diagnosis.findings,
              Not(Contains(Field(&DoctorFinding::reason, HasSubstr("layer_norm")))));
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

TEST(Doctor, NamesWeightsBuffersAndInputsThatTheTypeDoesNotHoldWhereTheRunCastsThem) {
  const auto range = FindingTopic::range;
  const auto found = [](bool casts) {
    Caster model(casts);
    const torch::NoGradGuard no_grad;
    model.head->weight[0][0] = std::numeric_limits<float>::infinity();
    model.head->bias.fill_(1e5);
    model.norm->bias.fill_(1e-9);
    model.named_parameters()["value"].fill_(1e-9);
    return diagnose(model, torch::full({4, 16}, 1e6), torch::kCPU, kInHalf).findings;
  };
  const auto all = found(true);
  EXPECT_THAT(all, Contains(finding(FindingSeverity::error, range, "head.weight",
                                    "this parameter holds inf or NaN already")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::error, range, "head.bias",
                                    "this parameter holds 1e+05 in magnitude")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::warning, range, "value",
                                    "makes up to 1e+02 % of the values of this parameter 0")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::warning, range, "mask",
                                    "this buffer holds 1e+09 in magnitude")));
  EXPECT_THAT(all, Contains(finding(FindingSeverity::warning, range, "input 0", "this input")));
  const auto idle = found(false);
  for (const char* name : {"mask", "input 0"}) {
    EXPECT_THAT(idle, Contains(finding(FindingSeverity::note, range, name,
                                       "and no op of the traced run casts it")));
  }
  EXPECT_THAT(idle, Not(Contains(Field(&DoctorFinding::reason, HasSubstr("of this parameter 0")))));
}

TEST(Doctor, ReadsWeightsThatHaveNoArithmeticAndCountsWhatIsFinite) {
  Caster model(true);
  model.register_buffer("packed", torch::ones({4}).to(torch::kFloat8_e4m3fn));
  torch::Tensor values = model.named_parameters()["value"].detach();
  values.slice(0, 0, 985).fill_(std::numeric_limits<float>::quiet_NaN());
  values[999] = 1e-30;  // one of 15, and of 1000
  const Diagnosis diagnosis = diagnose(model, torch::ones({4, 16}), torch::kCPU, kInHalf);
  EXPECT_THAT(
      diagnosis.findings,
      Contains(AllOf(about(FindingTopic::range), Field("where", &DoctorFinding::where, "value"),
                     Field("reason", &DoctorFinding::reason, HasSubstr("6.7")))))
      << diagnosis;
}

TEST(Doctor, AdvisesFloatForTheGradientsOfManyMicroBatches) {
  const auto found = [](at::ScalarType dtype, int64_t micro_batches, bool in_float = false) {
    torch::nn::Linear layer(8, 8);
    layer->to(dtype);
    if (in_float) mezzo::accumulate_in_float(layer->parameters());
    mezzo::DoctorOptions options = kInBfloat16;
    options.micro_batches = micro_batches;
    return diagnose(layer, torch::ones({8, 8}).to(dtype), torch::kCPU, options).findings;
  };
  const auto of_severity = [](FindingSeverity severity, const std::string& reason) {
    return Contains(finding(severity, FindingTopic::accumulation, "weight, bias", reason));
  };
  EXPECT_THAT(found(torch::kBFloat16, 17), of_severity(FindingSeverity::warning,
                                                       "stop at 256 equal ones; in float they take "
                                                       "144 B more"));
  EXPECT_THAT(found(torch::kBFloat16, 16), of_severity(FindingSeverity::note, "of 16 micro-batch"));
  EXPECT_THAT(found(torch::kHalf, 128), of_severity(FindingSeverity::note, "stop at 2048"));
  EXPECT_THAT(found(torch::kHalf, 129), of_severity(FindingSeverity::warning, "stop at 2048"));
  const auto says_nothing = Not(Contains(about(FindingTopic::accumulation)));
  EXPECT_THAT(found(torch::kBFloat16, 1), says_nothing);
  EXPECT_THAT(found(torch::kFloat, 1000), says_nothing);
  EXPECT_THAT(found(torch::kBFloat16, 1000, /*in_float=*/true), says_nothing);
  EXPECT_THAT(error_of([&] { found(torch::kFloat, 0); }), HasSubstr("micro_batches is 0"));
}

/// The share that the doctor foretells is that of a run, and its remedy makes all weights move.
TEST(Doctor, ForetellsTheUpdatesThatRoundToNothing) {
  torch::manual_seed(0);
  torch::nn::Linear layer(64, 64);
  layer->to(torch::kBFloat16);
  const auto found = [&](at::ScalarType dtype, std::optional<double> rate) {
    layer->to(dtype);
    mezzo::DoctorOptions options = kInBfloat16;
    options.learning_rate = rate;
    return diagnose(layer, torch::ones({8, 64}).to(dtype), torch::kCPU, options).findings;
  };
  const auto says_nothing = Not(Contains(about(FindingTopic::updates)));
  EXPECT_THAT(found(torch::kBFloat16, std::nullopt), says_nothing);
  EXPECT_THAT(found(torch::kBFloat16, 1e-2), says_nothing);
  EXPECT_THAT(error_of([&] { found(torch::kBFloat16, -1.0); }), HasSubstr("learning_rate is -1"));
  const auto findings = found(torch::kBFloat16, 1e-4);
  const auto finding = std::find_if(findings.begin(), findings.end(), [](const auto& one) {
    return one.topic == FindingTopic::updates;
  });
  ASSERT_NE(finding, findings.end());
  EXPECT_THAT(finding->remedy, HasSubstr("WeightStorage::master"));

  const torch::Tensor start = layer->weight.detach().clone();
  const auto unmoved = [&](mezzo::optim::WeightStorage storage, double gradient) {
    layer->weight.detach().copy_(start);
    mezzo::optim::AdamW optimizer(
        layer->parameters(),
        mezzo::optim::AdamWOptions(1e-4).weight_decay(0).weight_storage(storage));
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
  EXPECT_EQ(unmoved(mezzo::optim::WeightStorage::master, 1), 0);
  EXPECT_THAT(found(torch::kFloat, 1e-4), says_nothing);
}

TEST(Doctor, TellsAFaultOfPrecisionFromOneOfTheModel) {
  struct Large : torch::nn::Module {
    torch::nn::Linear layer{8, 8};
    bool takes_log = false;
    Large() { register_module("layer", layer); }
    torch::Tensor forward(const torch::Tensor& x) {
      const torch::Tensor y = layer->forward(x);
      return takes_log ? torch::log(y - y) / 0 : (y * 1000) * 1000;
    }
  } model;
  const torch::Tensor x = torch::ones({8, 8});
  EXPECT_THAT(diagnose(model, x, torch::kCPU, kInHalf).findings,
              Contains(finding(FindingSeverity::error, FindingTopic::forward, "(model)",
                               "inf or NaN under autocast to float16 and none in float32")));
  EXPECT_THAT(diagnose(model, x, torch::kCPU, kInBfloat16).findings,
              Not(Contains(about(FindingTopic::forward))));
  model.takes_log = true;
  EXPECT_THAT(diagnose(model, x, torch::kCPU, kInBfloat16).findings,
              Contains(finding(FindingSeverity::error, FindingTopic::forward, "(model)",
                               "without autocast already: forward pass: aten::log, after layer")));
  EXPECT_THAT(diagnose(model, torch::ones({8, 9}), torch::kCPU, kInBfloat16).findings,
              Contains(finding(FindingSeverity::error, FindingTopic::forward, "layer",
                               "throws in float32 already, in aten::addmm")));
}

/// The weight is used twice, as nn::Linear uses it: through a view, which libtorch does not cache.
struct Twice : torch::nn::Module {
  torch::nn::Linear layer{torch::nn::LinearOptions(8, 8).bias(false)};
  Twice() { register_module("layer", layer); }
  torch::Tensor forward(const torch::Tensor& x) { return layer->forward(layer->forward(x)); }
};

TEST(Doctor, NamesAResultOf16BitsThatALossOutsideOfTheRegionWouldRead) {
  Attention model;
  const auto about_result = about(FindingTopic::output);
  const auto said = diagnose(model, rows(), torch::kCPU, kInBfloat16).findings;
  EXPECT_THAT(said, Contains(finding(FindingSeverity::note, FindingTopic::output, "(model)",
                                     "the result is of bfloat16")));
  const auto told = std::find_if(said.begin(), said.end(),
                                 [](const auto& one) { return one.topic == FindingTopic::output; });
  EXPECT_EQ(told->remedy,
            "auto result = mezzo::autocast({.device = torch::kCPU, .output = torch::kFloat}, [&] { "
            "return model->forward(x); });");
  struct Remedied : torch::nn::Module {
    explicit Remedied(Attention& attention) : model(attention) {
      for (auto& parameter : model.parameters()) register_parameter(c10::str(i++), parameter);
    }
    torch::Tensor forward(const torch::Tensor& x) {
      return mezzo::autocast({.device = torch::kCPU, .output = torch::kFloat},
                             [&] { return model.forward(x); });
    }
    Attention& model;
    int i = 0;
  };
  Remedied remedied(model);
  EXPECT_THAT(diagnose(remedied, rows(), torch::kCPU, kInBfloat16).findings,
              Not(Contains(about_result)));
}

TEST(Doctor, SaysNothingOfAResultThatHas16BitsInFloat32Too) {
  Attention model;
  model.to(torch::kBFloat16);
  EXPECT_THAT(diagnose(model, rows().to(torch::kBFloat16), torch::kCPU, kInBfloat16).findings,
              Not(Contains(about(FindingTopic::output))));
}

TEST(Doctor, CountsWeightsThatAreCastAgainAndAgain) {
  Twice model;
  const auto casts = FindingTopic::weight_casts;
  EXPECT_THAT(diagnose(model, torch::ones({8, 8}), torch::kCPU, kInBfloat16).findings,
              Contains(finding(FindingSeverity::warning, casts, "layer.weight",
                               "1 of 1 parameters are cast to bfloat16 in every forward pass, 768 "
                               "B read and written; 1 of them more than once")));
}

TEST(Doctor, TellsOpsThatRunInFloat32AndWhatTheirCastsCost) {
  Attention model;
  model.fill = 0;
  mezzo::DoctorOptions options = kInBfloat16;
  options.policy = mezzo::install_op_overrides(mezzo::OpPolicy().deny("aten::softmax.int"));
  const auto all = diagnose(model, rows(), torch::kCPU, options).findings;
  const auto softmax =
      finding(FindingSeverity::note, FindingTopic::float32_ops, "aten::softmax.int",
              "runs in float32, 1 call; its casts read and write 1.5 KiB");
  EXPECT_THAT(all, Contains(softmax)) << "4 x 8 x 8 scores, 2 bytes read and 4 written";
  EXPECT_THAT(diagnose(model, rows(), torch::kCPU, kInBfloat16).findings, Not(Contains(softmax)));
}

TEST(Doctor, TellsOfTheChannelsOfAConvolutionAsOfChannels) {
  const torch::nn::Conv2d model(1, 16, 3);
  const auto all = diagnose(model, torch::ones({8, 1, 6, 6}), torch::kCPU, kInBfloat16).findings;
  const auto found = std::find_if(all.begin(), all.end(), [](const DoctorFinding& one) {
    return one.topic == FindingTopic::dimensions;
  });
  ASSERT_NE(found, all.end());
  EXPECT_THAT(found->reason, HasSubstr("its channels are 1 in, 16 out"));
  EXPECT_THAT(found->remedy, HasSubstr("torch::nn::Conv2dOptions(8, 16, kernel_size)"));
}

TEST(Doctor, NamesSizesThatAreNoMultipleOf8) {
  torch::nn::Sequential model(torch::nn::Linear(16, 16), torch::nn::Linear(16, 9));
  const auto all = diagnose(model, torch::ones({8, 16}), torch::kCPU, kInBfloat16).findings;
  EXPECT_THAT(all, Contains(finding(FindingSeverity::note, FindingTopic::dimensions, "1",
                                    "its weight is 16 x 9")));
  EXPECT_EQ(std::count_if(all.begin(), all.end(),
                          [](const auto& f) { return f.topic == FindingTopic::dimensions; }),
            1);
  EXPECT_THAT(diagnose(model, torch::ones({5, 16}), torch::kCPU, kInBfloat16).findings,
              Contains(finding(FindingSeverity::note, FindingTopic::dimensions, "0",
                               "a product has a size of 5")));
}

TEST(Doctor, LeavesNoTrace) {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8),
                              torch::nn::Dropout(0.5));
  model->parameters()[0].mutable_grad() = torch::ones({8, 8});
  const auto weight = model->parameters()[0];
  const auto version = weight._version();
  const torch::Tensor mean = model->buffers()[0].clone();
  torch::manual_seed(7);
  const torch::Tensor drawn = torch::rand({4});
  torch::manual_seed(7);
  const Diagnosis diagnosis =
      diagnose(model, torch::randn({16, 8}, torch::kDouble).to(torch::kFloat), torch::kCPU,
               {.dtype = torch::kBFloat16});
  torch::manual_seed(7);
  static_cast<void>(diagnose(model, torch::ones({16, 8}), torch::kCPU, kInBfloat16));
  EXPECT_TRUE(torch::equal(torch::rand({4}), drawn));
  EXPECT_TRUE(torch::equal(model->buffers()[0], mean));
  EXPECT_EQ(weight._version(), version);
  EXPECT_TRUE(torch::equal(weight.grad(), torch::ones({8, 8})));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
  ASSERT_EQ(diagnosis.speeds.size(), 3);
  EXPECT_EQ(diagnosis.speeds[0].name, "float32");
  for (const auto& speed : diagnosis.speeds) EXPECT_GT(speed.gflops, 0) << speed.name;
  EXPECT_THAT(diagnosis.findings, Contains(about(FindingTopic::hardware)));
}

TEST(Doctor, PutsBackBuffersOfIntegersToo) {
  torch::nn::Sequential model(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8));
  model->register_buffer("expanded", torch::ones({1}, torch::kBool).expand({4}));
  const torch::Tensor steps = model->named_buffers()["1.num_batches_tracked"];
  steps.fill_(3);
  static_cast<void>(diagnose(model, torch::randn({16, 8}), torch::kCPU, kInBfloat16));
  EXPECT_EQ(steps.item<std::int64_t>(), 3);
}

TEST(Doctor, TakesNeitherItsOwnOpsNorUnwrittenMemoryForConstants) {
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
  const Diagnosis diagnosis = diagnose(model, torch::ones({8, 8}), torch::kCPU, kInHalf);
  for (const char* number : {"2e+07", "1e+09"}) {
    EXPECT_THAT(diagnosis.findings, Not(Contains(Field(&DoctorFinding::reason, HasSubstr(number)))))
        << diagnosis;
  }
}

TEST(Doctor, SaysWhatEachPolicyTakes) {
  Attention model;
  model.fill = 0;
  const Diagnosis diagnosis = diagnose(model, rows(), torch::kCPU, kInBfloat16);
  const std::int64_t parameters = 32 + 17 * 16 + 17 * 8;
  EXPECT_EQ(diagnosis.parameters, parameters);
  ASSERT_EQ(diagnosis.memory.size(), 6);
  EXPECT_EQ(diagnosis.memory[0].bytes, 16 * parameters);
  EXPECT_EQ(diagnosis.memory[4].name, "bf16 + split master");
  EXPECT_EQ(diagnosis.memory[4].bytes, 14 * parameters);
}

TEST(Doctor, TakesHoldersPointersAndSeveralArguments) {
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
  EXPECT_LT(diagnose(pointer, sample, torch::kCPU, kInBfloat16).exit_status(), 2);
  EXPECT_LT(diagnose(holder, sample, torch::kCPU, kInBfloat16).exit_status(), 2);
  EXPECT_LT(diagnose(*pointer, sample, torch::kCPU, kInBfloat16).exit_status(), 2);
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
DoctorFinding throw_in(const Diagnosis& diagnosis) {
  for (const DoctorFinding& one : diagnosis.findings) {
    if (one.topic == FindingTopic::forward) return one;
  }
  ADD_FAILURE() << diagnosis;
  return {};
}

/// The op that a remedy denies or allows; empty if it names none.
std::string edited_op(const std::string& remedy) {
  const std::size_t begin = remedy.find("(\"aten::");
  if (begin == std::string::npos) return "";
  return remedy.substr(begin + 2, remedy.find('"', begin + 2) - begin - 2);
}

TEST(Doctor, ProposesAPolicyThatLetsAttentionWithPaddingRunAndKeepsItsResult) {
  torch::manual_seed(3);
  MaskedAttention model;
  model.eval();
  const torch::Tensor x = torch::randn({8, 4, 16});
  const torch::Tensor mask = torch::zeros({4, 8}, torch::kBool);
  mask.slice(1, 6).fill_(true);
  for (const auto& options : {kInBfloat16, kInHalf}) {
    const DoctorFinding found =
        throw_in(diagnose(model, std::make_tuple(x, mask), torch::kCPU, options));
    EXPECT_THAT(found.reason, HasSubstr("in the model's code and in no op, after aten::"));
    EXPECT_THAT(found.reason, HasSubstr("attn_output_weights"));
    EXPECT_THAT(found.where, HasSubstr("attention"));
    const std::string op = edited_op(found.remedy);
    ASSERT_EQ(op, "aten::bmm") << found.remedy;
    const torch::NoGradGuard no_grad;
    const torch::Tensor exact = model.forward(x, mask);
    const mezzo::AutocastGuard region(
        {.device = torch::kCPU,
         .dtype = *options.dtype,
         .policy = mezzo::install_op_overrides(mezzo::OpPolicy().deny(op))});
    const torch::Tensor cured = model.forward(x, mask).to(torch::kFloat);
    EXPECT_LT((cured - exact).norm().item<double>(), 0.05 * exact.norm().item<double>());
  }
}

TEST(Doctor, DropsAPolicyThatChangesTheResult) {
  struct Picky : torch::nn::Module {
    torch::nn::Linear layer{8, 8};
    Picky() { register_module("layer", layer); }
    // Refuses low precision, and computes another thing where only addmm is in float32.
    torch::Tensor forward(const torch::Tensor& x) {
      const torch::Tensor y = layer->forward(x);
      TORCH_CHECK(y.scalar_type() == torch::kFloat, "float32 alone");
      return at::autocast::is_autocast_enabled(torch::kCPU) ? y * 3 : y;
    }
  } model;
  const DoctorFinding found =
      throw_in(diagnose(model, torch::ones({8, 8}), torch::kCPU, kInBfloat16));
  EXPECT_THAT(found.reason, HasSubstr("in no op, after aten::addmm: float32 alone"));
  EXPECT_EQ(found.remedy, "mezzo::AutocastGuard exact({.device = torch::kCPU, .enabled = false});");
}

TEST(Doctor, ProposesAnAllowThatKeepsTheResultAlone) {
  struct Softmax : torch::nn::Module {
    torch::nn::Linear layer{16, 16};
    bool cancels = false;
    Softmax() { register_module("layer", layer); }
    torch::Tensor forward(const torch::Tensor& x) {
      const torch::Tensor y = torch::softmax(layer->forward(x), -1);
      return cancels ? 1 + 1000 * (y.to(torch::kFloat).sum(-1) - 1) : y;
    }
  } model;
  mezzo::DoctorOptions options = kInBfloat16;
  options.policy = mezzo::install_op_overrides(mezzo::OpPolicy().deny("aten::softmax.int"));
  const auto remedy_of = [&] {
    for (const auto& one : diagnose(model, torch::ones({8, 16}), torch::kCPU, options).findings) {
      if (one.where == "aten::softmax.int") return one.remedy;
    }
    ADD_FAILURE();
    return std::string();
  };
  EXPECT_EQ(edited_op(remedy_of()), "aten::softmax.int");
  model.cancels = true;
  EXPECT_EQ(remedy_of(), "")
      << "the sum is 1 in float32, and off by 1e-3 where softmax gives bfloat16";
}

TEST(Doctor, GivesNoRemedyWhereFloat32ThrowsToo) {
  torch::nn::Linear model(8, 8);
  EXPECT_EQ(throw_in(diagnose(model, torch::ones({8, 9}), torch::kCPU, kInBfloat16)).remedy, "");
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

TEST(Doctor, NamesTheModuleBeforeAConstantOfTorchScript) {
  const Diagnosis diagnosis = diagnose(scripted(), {rows()}, torch::kCPU, kInHalf);
  const auto range = FindingTopic::range;
  EXPECT_THAT(diagnosis.findings,
              Contains(finding(FindingSeverity::error, range, "after encoder.layer",
                               "masked_fill with -1e+09 computes in float16")));
  EXPECT_THAT(diagnosis.findings,
              Contains(finding(FindingSeverity::warning, range, "after encoder.layer",
                               "clamp_min with 1e-12 computes in float16")));
  EXPECT_THAT(diagnosis.findings,
              Contains(finding(FindingSeverity::error, FindingTopic::forward, "after encoder.layer",
                               "throws under autocast to float16")));
  EXPECT_EQ(diagnosis.parameters, 256);
  EXPECT_THAT(diagnosis.findings, Contains(about(FindingTopic::weight_casts)));
}

TEST(Doctor, ReadsTheValuesOfTorchScriptWithoutASample) {
  torch::jit::Module model = scripted();
  model.register_buffer("mask", torch::full({2}, -1e9));
  EXPECT_THAT(
      diagnose(model, {}, torch::kCPU, kInHalf).findings,
      Contains(finding(FindingSeverity::warning, FindingTopic::range, "mask", "this buffer")));
}

TEST(Doctor, AccusesNoConstantOfTorchScriptThatMeetsIntegersAlone) {
  torch::jit::Module model("Model");
  model.register_parameter("weight", torch::ones({8, 8}), false);
  model.define(R"(
    def forward(self, x):
        ids = torch.remainder(torch.argmax(x, -1) * 100003, 16)
        rows = float(x.size(0)) * 1e6
        return torch.matmul(x, self.weight) + ids.unsqueeze(-1) / rows
  )");
  const auto named = [](const std::string& what) {
    return Field(&DoctorFinding::reason, HasSubstr(what));
  };
  const auto all = diagnose(model, {torch::ones({8, 8})}, torch::kCPU, kInHalf).findings;
  EXPECT_THAT(all, Not(Contains(named("1e+05")))) << "integers alone";
  EXPECT_THAT(all, Not(Contains(named("1e+06")))) << "a product of two Python floats";
}

TEST(Doctor, HoldsThreadsAgainstCores) {
  using mezzo::detail::thread_finding;
  EXPECT_FALSE(thread_finding(4, 4));
  EXPECT_THAT(thread_finding(8, 4).value(), finding(FindingSeverity::warning, FindingTopic::threads,
                                                    "cpu", "8 threads and this process 4 cores"));
  EXPECT_EQ(thread_finding(8, 4)->remedy, "at::set_num_threads(4);  // or OMP_NUM_THREADS=4");
  EXPECT_THAT(thread_finding(1, 2).value(), finding(FindingSeverity::note, FindingTopic::threads,
                                                    "cpu", "1 thread and this process 2 cores"));
}

TEST(Doctor, SaysHowCublasAddsUpAndWhetherItRepeats) {
  using mezzo::detail::blas_findings;
  const c10::Device gpu(torch::kCUDA, 0);
  const auto about = [&](const char* reason, FindingSeverity severity = FindingSeverity::note) {
    return testing::ElementsAre(finding(severity, FindingTopic::blas, "cuda:0", reason));
  };
  EXPECT_TRUE(blas_findings({}, torch::kHalf, gpu).empty());
  EXPECT_THAT(blas_findings({.is_deterministic = true}, torch::kHalf, gpu),
              about("CUBLAS_WORKSPACE_CONFIG is not set", FindingSeverity::error));
  EXPECT_THAT(blas_findings({.workspace = ":8:8", .is_deterministic = true}, torch::kHalf, gpu),
              about("is \":8:8\"", FindingSeverity::error));
  EXPECT_TRUE(
      blas_findings({.workspace = ":16:8", .is_deterministic = true}, torch::kHalf, gpu).empty());
  EXPECT_THAT(blas_findings({.workspace = ":4096:8"}, torch::kHalf, gpu),
              about("products repeat to the bit"));
  EXPECT_THAT(blas_findings({.adds_in_half = true, .adds_in_bfloat16 = true}, torch::kHalf, gpu),
              about("in half: a sum above 65504"));
  EXPECT_THAT(
      blas_findings({.adds_in_half = true, .adds_in_bfloat16 = true}, torch::kBFloat16, gpu),
      about("8 binary digits"));
  EXPECT_THAT(blas_findings({.backend = at::BlasBackend::Cublaslt}, torch::kHalf, gpu),
              about("Cublaslt"));
}

TEST(Doctor, ReadsWhatTheProcessTellsCublas) {
  const auto adds_in_half = [] { return mezzo::detail::BlasSettings::of_process().adds_in_half; };
  at::Context& context = at::globalContext();
  const bool before = adds_in_half();
  context.setAllowFP16ReductionCuBLAS(!before);
  EXPECT_EQ(adds_in_half(), !before);
  context.setAllowFP16ReductionCuBLAS(before);
  EXPECT_EQ(adds_in_half(), before);
}

TEST(Doctor, HoldsTheMeasuredSpeedAgainstFloat32s) {
  Diagnosis diagnosis{.dtype = torch::kBFloat16};
  const auto measured = [&](bool native, double gflops) {
    diagnosis.speeds = {
        {"float32", true, 100}, {"bfloat16", native, gflops}, {"float16", false, 1}};
    return mezzo::detail::hardware_finding(diagnosis);
  };
  EXPECT_THAT(measured(true, 210), finding(FindingSeverity::note, FindingTopic::hardware, "cpu",
                                           "bfloat16 run at 2.1 times float32's speed"));
  EXPECT_THAT(measured(true, 90), finding(FindingSeverity::warning, FindingTopic::hardware, "cpu",
                                          "a larger batch may gain more"));
  EXPECT_THAT(measured(false, 40), finding(FindingSeverity::warning, FindingTopic::hardware, "cpu",
                                           "autocast saves memory here and no time"));
}

TEST(Doctor, PrintsTheWorstFirstWithinTheWidthOfATerminal) {
  Attention model;
  std::ostringstream out;
  out << diagnose(model, rows(), torch::kCPU, kInHalf);
  const std::string text = out.str();
  EXPECT_THAT(text, HasSubstr("parameters on cpu, looked at for float16: 2 errors, "));
  EXPECT_LT(text.find("  error "), text.find("  warning "));
  EXPECT_LT(text.find("  warning "), text.find("  note "));
  EXPECT_THAT(text, HasSubstr("> scores.masked_fill(mask, -std::numeric_limits<float>::infinity"));
  EXPECT_THAT(text, HasSubstr("O2: fp16 + masters"));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const bool is_code = line.find("> ") != std::string::npos;
    EXPECT_TRUE(is_code || line.size() <= 100) << line;
  }
}

TEST(Doctor, SaysWhatItCannotExamine) {
  Attention model;
  EXPECT_THAT(error_of([&] { diagnose(model, rows(), torch::kMeta); }),
              HasSubstr("device: no autocast on meta"));
  EXPECT_THAT(error_of([&] { diagnose(model, rows(), torch::kCUDA); }),
              HasSubstr("norm.weight is on cpu and device is cuda; call model->to(device) first"));
  EXPECT_THAT(error_of([&] { diagnose(model, rows(), torch::kCPU, {.dtype = torch::kFloat}); }),
              HasSubstr("dtype is Float; use torch::kHalf or torch::kBFloat16"));
  torch::nn::Sequential empty{torch::nn::ReLU()};
  EXPECT_THAT(error_of([&] { diagnose(empty, rows(), torch::kCPU); }),
              HasSubstr("the model has no parameters"));
  const mezzo::Autocast<torch::kCPU> autocast;
  EXPECT_THAT(error_of([&] { diagnose(model, rows(), torch::kCPU); }),
              HasSubstr("outside of Autocast regions"));
}

}  // namespace
