#include <mezzo/autocast/autocast_module.h>
#include <mezzo/autocast/op_overrides.h>
#include <mezzo/opt_levels/amp.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../support/warning_recorder.h"
#include "vector_model.h"

namespace {

using namespace initialize_test;
using mezzo::InitializeOptions;
using mezzo::OptLevel;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// A convolution, a batch norm, a linear layer, a float and an integer buffer, and a forward with
/// an optional argument and nested results.
struct NetImpl : torch::nn::Module {
  struct Output {
    torch::Tensor logits;
    std::map<std::string, torch::Tensor> details;
    auto tensors() { return std::tie(logits, details); }
  };

  NetImpl() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("head", head);
    mean = register_buffer("mean", torch::ones({3, 1, 1}) / 4);
    seen = register_buffer("seen", torch::zeros({1}, torch::kLong));
  }

  Output forward(const torch::Tensor& images, const torch::Tensor& mask = {}) {
    input_dtype = images.scalar_type();
    torch::Tensor hidden = torch::relu(norm(conv(images - mean)));
    if (mask.defined()) hidden = hidden * mask;
    const torch::Tensor logits = head(hidden.mean(at::IntArrayRef{2, 3}));
    computed_in = logits.scalar_type();
    return {logits, {{"hidden", hidden}, {"classes", logits.argmax(1)}}};
  }

  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(3, 4, 3)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Linear head{4, 2};
  torch::Tensor mean, seen;
  torch::ScalarType input_dtype = torch::kFloat;
  torch::ScalarType computed_in = torch::kFloat;
};
TORCH_MODULE(Net);

torch::Tensor images() { return torch::rand({4, 3, 6, 6}); }
torch::Tensor targets() { return torch::tensor({0, 1, 1, 0}, torch::kLong); }

torch::Tensor loss_of(const mezzo::Amp& amp, const Net& net, const torch::Tensor& batch) {
  return torch::nn::functional::cross_entropy(amp.forward(net, batch).logits, targets());
}

using Optimizers = std::vector<
    std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>>;

const Optimizers& optimizers() {
  static const Optimizers all{
      [](const auto& p) { return std::make_unique<torch::optim::SGD>(p, 0.1); },
      [](const auto& p) { return std::make_unique<torch::optim::Adam>(p, 0.01); },
      [](const auto& p) {
        return std::make_unique<torch::optim::RMSprop>(
            p, torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true));
      },
      [](const auto& p) { return std::make_unique<mezzo::optim::SGD>(p, 0.1); },
      [](const auto& p) { return std::make_unique<mezzo::optim::AdamW>(p, 0.01); }};
  return all;
}

struct Expected {
  const char* level;
  mezzo::OptLevelOverrides set;
  torch::ScalarType weights, norms, inputs, computed, outputs, masters;
};

std::vector<Expected> expected_dtypes() {
  constexpr auto kFloat = torch::kFloat;
  constexpr auto kHalf = torch::kHalf;
  constexpr auto kBFloat16 = torch::kBFloat16;
  return {
      {"O0", {}, kFloat, kFloat, kFloat, kFloat, kFloat, kFloat},
      {"O1", {}, kFloat, kFloat, kFloat, kHalf, kHalf, kFloat},
      {"O2", {}, kHalf, kFloat, kHalf, kHalf, kFloat, kFloat},
      {"O3", {}, kHalf, kHalf, kHalf, kHalf, kFloat, kHalf},
      {"O1_bf16", {}, kFloat, kFloat, kFloat, kBFloat16, kBFloat16, kFloat},
      {"O2_bf16", {}, kBFloat16, kFloat, kBFloat16, kBFloat16, kFloat, kFloat},
      {"O3_bf16", {}, kBFloat16, kBFloat16, kBFloat16, kBFloat16, kFloat, kBFloat16},
      {"O2",
       {.keep_batchnorm_fp32 = false, .cast_model_outputs = torch::kHalf},
       kHalf,
       kHalf,
       kHalf,
       kHalf,
       kHalf,
       kFloat},
  };
}

TEST(AmpInitialize, CastsPerLevelForEveryOptimizer) {
  for (const Expected& expected : expected_dtypes()) {
    for (const auto& make : optimizers()) {
      SCOPED_TRACE(expected.level);
      torch::manual_seed(0);
      Net net;
      const auto optimizer = make(net->parameters());
      mezzo::OptLevelOverrides set = expected.set;
      set.loss_scale = 512.0;
      auto amp = mezzo::initialize(net, *optimizer, OptLevel::parse(expected.level, set), kQuiet);
      EXPECT_EQ(net->conv->weight.scalar_type(), expected.weights);
      EXPECT_EQ(net->head->bias.scalar_type(), expected.weights);
      EXPECT_EQ(net->norm->weight.scalar_type(), expected.norms);
      EXPECT_EQ(net->norm->running_mean.scalar_type(), expected.norms);
      EXPECT_EQ(net->norm->num_batches_tracked.scalar_type(), torch::kLong);
      EXPECT_EQ(net->mean.scalar_type(), expected.weights);
      EXPECT_EQ(net->seen.scalar_type(), torch::kLong);
      EXPECT_TRUE(optimizer->param_groups()[0].params()[0].is_same(net->conv->weight));

      auto result = amp.forward(net, images());
      EXPECT_EQ(net->input_dtype, expected.inputs);
      EXPECT_EQ(net->computed_in, expected.computed);
      EXPECT_EQ(result.logits.scalar_type(), expected.outputs);
      EXPECT_EQ(result.details.at("classes").scalar_type(), torch::kLong);

      const torch::Tensor before = net->head->weight.detach().clone();
      amp.backward(torch::nn::functional::cross_entropy(result.logits, targets()), *optimizer,
                   {.delay_unscale = false});
      EXPECT_EQ(net->conv->weight.grad().scalar_type(), expected.masters) << "unscaled gradients";
      const auto trained = amp.master_params(*optimizer);
      EXPECT_EQ(trained[0].scalar_type(), expected.masters);
      EXPECT_EQ(trained[0].grad().scalar_type(), expected.masters);
      EXPECT_TRUE(amp.step(*optimizer).applied());
      EXPECT_FALSE(before.equal(net->head->weight));
      EXPECT_EQ(net->conv->weight.scalar_type(), expected.weights);
      EXPECT_TRUE(net->head->weight.equal(amp.master_params(*optimizer)[4].to(expected.weights)));
    }
  }
}

TEST(AmpForward, CastsNestedArguments) {
  struct Nested : torch::nn::Module {
    int& forward(std::vector<torch::Tensor> parts, std::map<int, torch::Tensor> more,
                 std::optional<torch::Tensor> maybe, int& counter, const std::string& name) {
      dtypes = {parts[0].scalar_type(), parts[1].scalar_type(), more.at(1).scalar_type(),
                maybe->scalar_type()};
      seen = name;
      return ++counter;
    }
    std::vector<torch::ScalarType> dtypes;
    std::string seen;
  };
  const auto net = std::make_shared<Nested>();
  auto amp = mezzo::initialize(net, OptLevel::O3(), kQuiet);
  int counter = 1;
  int& result = amp.forward(net, std::vector{torch::ones(2), torch::arange(2)},
                            std::map<int, torch::Tensor>{{1, torch::ones(2, torch::kDouble)}},
                            std::optional(torch::ones(1)), counter, "a name");
  EXPECT_EQ(&result, &counter);
  EXPECT_EQ(counter, 2);
  EXPECT_EQ(net->seen, "a name");
  EXPECT_EQ(net->dtypes, (std::vector{torch::kHalf, torch::kLong, torch::kHalf, torch::kHalf}));
}

TEST(AmpForward, AcceptsSubmodulesAndThrowsForOthers) {
  Net net;
  auto amp = mezzo::initialize(net, OptLevel::O3_bf16(), kQuiet);
  EXPECT_EQ(amp.forward(net->head, torch::ones({1, 4})).scalar_type(), torch::kFloat);
  EXPECT_EQ(amp.forward(net, images(), torch::ones({1, 1})).logits.scalar_type(), torch::kFloat);
  torch::nn::Linear other(4, 2);
  EXPECT_THAT(
      [&] {
        (void)amp.forward(other, torch::ones({1, 4}));
      },
      ThrowsMessage<c10::Error>(HasSubstr("was not passed to mezzo::initialize")));
}

/// A module without a holder, as in pytorch/examples.
struct NetWithoutHolder : torch::nn::Module {
  NetWithoutHolder() { register_module("layer", layer); }
  torch::Tensor forward(const torch::Tensor& batch) {
    input_dtype = batch.scalar_type();
    return layer(batch);
  }
  torch::nn::Linear layer{2, 2};
  torch::ScalarType input_dtype = torch::kFloat;
};

TEST(AmpInitialize, AcceptsModuleVariable) {
  NetWithoutHolder model, other;
  torch::optim::SGD optimizer(model.parameters(), 0.1), other_optimizer(other.parameters(), 0.1);
  auto amp = mezzo::initialize(model, optimizer, OptLevel::O2_bf16(), kQuiet);
  const torch::Tensor before = model.layer->weight.detach().clone();
  EXPECT_EQ(before.scalar_type(), torch::kBFloat16);
  const torch::Tensor output = amp.forward(model, torch::ones({1, 2}));
  EXPECT_EQ(model.input_dtype, torch::kBFloat16);
  EXPECT_EQ(output.scalar_type(), torch::kFloat);
  amp.backward(output.sum(), optimizer);
  amp.step(optimizer);
  EXPECT_FALSE(torch::equal(model.layer->weight, before));
  EXPECT_EQ(amp.forward(model.layer, torch::ones({1, 2})).scalar_type(), torch::kFloat);

  NetWithoutHolder third;
  torch::optim::SGD third_optimizer(third.parameters(), 0.1);
  auto both = mezzo::initialize({other, third}, {other_optimizer, third_optimizer},
                                OptLevel::O1_bf16(), kQuiet);
  EXPECT_EQ(both.forward(third, torch::ones({1, 2})).scalar_type(), torch::kBFloat16);
}

static_assert(std::convertible_to<NetWithoutHolder&, mezzo::ModelRefs>);
static_assert(!std::convertible_to<const NetWithoutHolder&, mezzo::ModelRefs>,
              "its forward is not const");
static_assert(!std::convertible_to<NetWithoutHolder, mezzo::ModelRefs>, "a temporary would dangle");

/// A batch norm that is not torch's, like mezzo's SyncBatchNorm.
struct CustomNormImpl : torch::nn::NormImplBase<0, CustomNormImpl, torch::nn::BatchNormOptions> {
  CustomNormImpl() : NormImplBase(torch::nn::BatchNormOptions(4)) {}
  void _check_input_dim(const torch::Tensor& /*input*/) override {}
  torch::Tensor forward(const torch::Tensor& input) { return input; }
};

TEST(AmpInitialize, KeepsBatchNormsInFloat32) {
  const auto custom_norm = std::make_shared<CustomNormImpl>();
  const torch::nn::BatchNorm2d wrapped(4);
  const auto without_statistics = torch::nn::BatchNormOptions(4).track_running_stats(false);
  torch::nn::Sequential net(torch::nn::LayerNorm(std::vector<int64_t>{4}), custom_norm,
                            mezzo::AutocastModule(wrapped, {.device_type = torch::kCPU}),
                            torch::nn::BatchNorm1d(without_statistics),
                            torch::nn::BatchNorm2d(without_statistics),
                            torch::nn::BatchNorm3d(without_statistics), torch::nn::BatchNorm1d(4),
                            torch::nn::BatchNorm3d(4));
  mezzo::initialize(net, OptLevel::O2(), kQuiet);
  for (const auto& item : net->named_parameters()) {
    const bool is_norm = !item.key().starts_with("0.");
    EXPECT_EQ(item.value().scalar_type(), is_norm ? torch::kFloat : torch::kHalf) << item.key();
  }
  EXPECT_EQ(custom_norm->running_var.scalar_type(), torch::kFloat);
  EXPECT_EQ(wrapped->running_mean.scalar_type(), torch::kFloat);
}

TEST(AmpInitialize, CastsGradientsWithParameters) {
  torch::nn::Linear net(2, 2);
  net(torch::ones({1, 2})).sum().backward();
  mezzo::initialize(net, OptLevel::O3(), kQuiet);
  EXPECT_EQ(net->weight.grad().scalar_type(), torch::kHalf);
  EXPECT_EQ(net->bias.grad().scalar_type(), torch::kHalf);
}

TEST(AmpInitialize, PreservesFloat8Buffers) {
  struct Quantized : torch::nn::Module {
    Quantized() { table = register_buffer("table", torch::ones({2}).to(torch::kFloat8_e4m3fn)); }
    torch::Tensor table;
  };
  const auto model = std::make_shared<Quantized>();
  mezzo::initialize(model, OptLevel::O3(), kQuiet);
  EXPECT_EQ(model->table.scalar_type(), torch::kFloat8_e4m3fn);
}

TEST(AmpInitialize, AcceptsAdagradBeforeFirstStep) {
  for (const OptLevel& level : {OptLevel::O2(), OptLevel::O2_bf16(), OptLevel::O3()}) {
    torch::nn::Linear net(2, 2);
    torch::optim::Adagrad optimizer(net->parameters(), 0.5);
    const torch::Tensor before = net->weight.detach().clone();
    auto amp = mezzo::initialize(net, optimizer,
                                 OptLevel::parse(level.name(), {.loss_scale = 128.0}), kQuiet);
    amp.backward(amp.forward(net, torch::ones({1, 2})).sum(), optimizer);
    EXPECT_TRUE(amp.step(optimizer).applied());
    EXPECT_TRUE((before - net->weight).allclose(torch::full({2, 2}, 0.5), 1e-2, 1e-2));
    torch::nn::Linear other(2, 2);
    torch::optim::Adagrad stepped(other->parameters(), 0.5);
    other(torch::ones({1, 2})).sum().backward();
    stepped.step();
    EXPECT_THAT([&] { mezzo::initialize(other, stepped, level, kQuiet); },
                ThrowsMessage<c10::Error>(HasSubstr("has already stepped")));
  }
}

/// Steps each optimizer after Amp and its masters are destroyed.
TEST(AmpInitialize, OptimizerStepsAfterAmpIsDestroyed) {
  for (const auto& make : optimizers()) {
    Vector model;
    const auto optimizer = make(model->parameters());
    {
      auto amp = mezzo::initialize(model, *optimizer, scaled(OptLevel::O2_bf16()), kQuiet);
      amp.backward(amp.forward(model, filled(0.25)), *optimizer);
      amp.step(*optimizer);
    }
    optimizer->zero_grad();
    model(filled(0.5).to(torch::kBFloat16)).backward();
    const float before = get_weight(model);
    EXPECT_NO_THROW(optimizer->step());
    EXPECT_NE(get_weight(model), before);
  }
}

TEST(AmpInitialize, AcceptsOpOverridesAtO1) {
  torch::nn::Linear net(4, 2);
  const auto overrides = mezzo::install_op_overrides(mezzo::OpOverrides().deny("aten::addmm"));
  auto amp = mezzo::initialize(net, OptLevel::O1(), {.verbosity = 0, .op_overrides = overrides});
  EXPECT_EQ(amp.forward(net, torch::ones({1, 4})).scalar_type(), torch::kFloat);
  EXPECT_EQ(mezzo::initialize(net, OptLevel::O1(), kQuiet)
                .forward(net, torch::ones({1, 4}))
                .scalar_type(),
            torch::kHalf);
  EXPECT_THAT(
      [&] { mezzo::initialize(net, OptLevel::O3(), {.verbosity = 0, .op_overrides = overrides}); },
      ThrowsMessage<c10::Error>(HasSubstr("op_overrides have no effect at level O3")));
}

TEST(AmpInitialize, AcceptsLevelAsText) {
  torch::nn::Linear net(4, 2);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  EXPECT_EQ(mezzo::initialize(net, optimizer, "O1_bf16", kQuiet).level().name(), "O1_bf16");
  EXPECT_EQ(mezzo::initialize(net, std::string("O3"), kQuiet).level().name(), "O3");
  EXPECT_THAT([&] { mezzo::initialize(net, optimizer, "01"); },
              ThrowsMessage<c10::Error>(HasSubstr("Options are 'O0', 'O1', 'O2', 'O3'")));
}

/// Returns what `call` writes to stdout, followed by stderr.
std::string printed_by(const std::function<void()>& call) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  call();
  return testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
}

TEST(AmpInitialize, PrintsLevelUnlessVerbosityIsZero) {
  torch::nn::Linear net(2, 2);
  const std::string text = printed_by([&] { mezzo::initialize(net, OptLevel::O1()); });
  EXPECT_EQ(text, OptLevel::O1().describe());
  EXPECT_THAT(text, HasSubstr("Selected optimization level O1:"));
  EXPECT_EQ(printed_by([&] { mezzo::initialize(net, OptLevel::O1(), kQuiet); }), "");
}

TEST(AmpInitialize, VerbosityControlsSkipMessages) {
  const test_support::WarningRecorder warnings;  // libtorch warns once per process
  for (const auto& make : optimizers()) {
    for (const char* const level : {"O0", "O1", "O2", "O3"}) {
      for (const int verbosity : {0, 1}) {
        Vector model;
        const auto optimizer = make(model->parameters());
        std::optional<mezzo::Amp> amp;
        const std::string level_output = printed_by([&] {
          amp.emplace(mezzo::initialize(model, *optimizer, scaled(OptLevel::parse(level)),
                                        {.num_losses = 2, .verbosity = verbosity}));
        });
        const std::string skip_output = printed_by([&] {
          for (const int64_t loss_id : {0, 1}) {
            optimizer->zero_grad();
            amp->backward(amp->forward(model, filled(kInfinity)), *optimizer, {.loss_id = loss_id});
            EXPECT_FALSE(amp->step(*optimizer).applied());
          }
        });
        EXPECT_EQ(level_output.empty(), verbosity == 0) << level_output;
        EXPECT_EQ(std::count(skip_output.begin(), skip_output.end(), '\n'), 2 * verbosity)
            << skip_output;
      }
    }
  }
}

TEST(AmpInitialize, DisabledIsNoOp) {
  Net net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  mezzo::Amp amp = mezzo::initialize(net, optimizer, OptLevel::O2(), {.enabled = false});
  EXPECT_EQ(net->head->weight.scalar_type(), torch::kFloat);
  const torch::Tensor loss = loss_of(amp, net, images());
  EXPECT_EQ(net->computed_in, torch::kFloat);
  amp.scale_loss(loss, optimizer, [&](const torch::Tensor& scaled) {
    EXPECT_TRUE(scaled.is_same(loss));
    scaled.backward();
  });
  EXPECT_TRUE(amp.step(optimizer).applied());
  EXPECT_EQ(&amp.wrapped_optimizer(optimizer).optimizer(), &optimizer);
  EXPECT_TRUE(amp.state_dict().empty());
}

void expect_error(const std::function<void()>& call, const std::string& text) {
  EXPECT_THAT(call, ThrowsMessage<c10::Error>(HasSubstr(text)));
}

TEST(AmpInitialize, ThrowsWithoutChangingAnything) {
  Net net;
  Net other;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  torch::optim::LBFGS lbfgs(net->parameters(), 0.1);
  const auto level = OptLevel::O2();
  const auto make = [&](auto&& models, const auto& list) {
    return [&, list] { mezzo::initialize(models, list, level, kQuiet); };
  };
  expect_error(make(other, mezzo::OptimizerRefs(optimizer)),
               "optimizer 0 has no parameter of the models");
  expect_error(
      [&] {
        mezzo::initialize({net, net}, optimizer, level, kQuiet);
      },
      "is the same module as model 0; pass each model once");
  expect_error(
      [&] {
        mezzo::initialize(net, {optimizer, optimizer}, level, kQuiet);
      },
      "optimizer 1 is the same object as optimizer 0");
  expect_error([&] { mezzo::initialize(Net(nullptr), optimizer, level, kQuiet); },
               "model 0 is empty; construct");
  expect_error([&] { mezzo::initialize(net, lbfgs, level, kQuiet); }, "LBFGS");
  expect_error([&] { mezzo::initialize(net, level, {.num_losses = 0, .verbosity = 0}); },
               "num_losses is 0");
  EXPECT_EQ(net->head->weight.scalar_type(), torch::kFloat);

  struct Tied : torch::nn::Module {
    Tied() { register_parameter("tied", register_module("net", net)->weight); }
    torch::nn::Linear net{2, 2};
  };
  const auto tied = std::make_shared<Tied>();
  torch::optim::SGD tied_optimizer(tied->parameters(), 0.1);  // libtorch lists a tied weight twice
  expect_error([&] { mezzo::initialize(tied, tied_optimizer, level, kQuiet); },
               "appears twice, as a weight that two modules share does in model->parameters(); "
               "pass it once");
  EXPECT_EQ(tied->net->weight.scalar_type(), torch::kFloat);

  other->head->to(torch::kHalf);
  expect_error([&] { mezzo::initialize(other, OptLevel::O0(), kQuiet); },
               "Found param head.weight of ");
  expect_error(
      [&] { mezzo::initialize(other, OptLevel::O0(), kQuiet); },
      "with type float16, expected float32. When using amp.initialize, you do not need to "
      "call .half() on your model before passing it, no matter what optimization level "
      "you choose. In C++: call model->to(torch::kFloat) before constructing the optimizer");
  struct Quantized : torch::nn::Module {
    Quantized() {
      const torch::Tensor weight = torch::ones({2}).to(torch::kFloat8_e4m3fn);
      register_parameter("weight", weight, /*requires_grad=*/false);
    }
  };
  expect_error([&] { mezzo::initialize(std::make_shared<Quantized>(), level, kQuiet); },
               "with type Float8_e4m3fn, expected float32. Quantized tensors cannot be trained");
  struct HalfBuffer : torch::nn::Module {
    HalfBuffer() { register_buffer("table", torch::ones({2}, torch::kHalf)); }
  };
  expect_error([&] { mezzo::initialize(std::make_shared<HalfBuffer>(), level, kQuiet); },
               "Found buffer table of ");
  expect_error([&] { mezzo::initialize(std::vector<Net>{}, level, kQuiet); },
               "models: the list is empty");
  const std::vector<torch::optim::Optimizer*> pointers{&optimizer, nullptr};
  expect_error([&] { mezzo::initialize(net, pointers, level, kQuiet); },
               "optimizer 1 is a null pointer");
  struct Elsewhere : torch::nn::Module {
    Elsewhere() { register_parameter("weight", torch::empty({2}, torch::kMeta)); }
  };
  const auto elsewhere = std::make_shared<Elsewhere>();
  expect_error([&] { mezzo::initialize(elsewhere, OptLevel::O1(), kQuiet); },
               "on meta, which has no autocast; move the model to another device");

  torch::optim::Adam adam(net->parameters(), 0.1);
  net(images()).logits.sum().backward();
  adam.step();
  expect_error([&] { mezzo::initialize(net, adam, level, kQuiet); }, "has already stepped");
  EXPECT_NO_THROW(mezzo::initialize(net, adam, OptLevel::O1(), kQuiet));
}

}  // namespace
