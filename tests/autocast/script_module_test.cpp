#include <torch/script.h>
#include <torch/torch.h>
//
#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_module.h>
#include <mezzo/autocast/op_overrides.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/torchscript.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/save_to_string.h"
#include "../support/script_model.h"

namespace {

using mezzo::AutocastModule;
using mezzo::AutocastOptions;
using mezzo::ScriptModule;
using test_support::script_model;
using test_support::twin;

const torch::Tensor& images() {
  static const torch::Tensor tensor = [] {
    torch::manual_seed(7);
    return torch::randn({4, 3, 6, 6});
  }();
  return tensor;
}

template <class Call>
std::vector<torch::Tensor> gradients(const std::vector<torch::Tensor>& parameters,
                                     const Call& call) {
  for (const auto& parameter : parameters) parameter.mutable_grad() = torch::Tensor();
  call().to(torch::kFloat).square().sum().backward();
  std::vector<torch::Tensor> all;
  for (const auto& parameter : parameters) all.push_back(parameter.grad());
  return all;
}

/// Compares bitwise, or with a tolerance.
void expect_equal(const std::vector<torch::Tensor>& left, const std::vector<torch::Tensor>& right,
                  bool bitwise) {
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(bitwise ? torch::equal(left[i], right[i])
                        : torch::allclose(left[i], right[i], 1e-4, 1e-5))
        << i;
  }
}

/// Repeats: libtorch's executor profiles a graph and then rewrites it. Without autocast it uses its
/// own backward formulas, which round differently.
void expect_steps_alike(ScriptModule& script, test_support::Twin& model,
                        const AutocastOptions& setting) {
  for (int step = 0; step < 4; ++step) {
    torch::Tensor output, of_twin;
    const auto found = gradients(script->parameters(), [&] {
      output = mezzo::autocast(setting, [&] { return script(images()).toTensor(); });
      return output;
    });
    const auto expected = gradients(model->parameters(), [&] {
      of_twin = mezzo::autocast(setting, [&] { return model(images()); });
      return of_twin;
    });
    EXPECT_EQ(output.scalar_type(), of_twin.scalar_type());
    EXPECT_TRUE(torch::equal(output, of_twin));
    expect_equal(found, expected, /*bitwise=*/setting.enabled);
  }
}

TEST(ScriptModule, MatchesCppModelInEachDtype) {
  ScriptModule script(script_model());
  auto model = twin();
  for (const auto dtype : {torch::kBFloat16, torch::kHalf, torch::kBFloat16}) {
    expect_steps_alike(script, model, {.device_type = torch::kCPU, .dtype = dtype});
  }
  expect_steps_alike(script, model, {.device_type = torch::kCPU, .enabled = false});
}

TEST(ScriptModule, IgnoresProfileOfEarlierUnwrappedCall) {
  const auto bare = script_model();
  for (int step = 0; step < 3; ++step) {
    const mezzo::AutocastGuard<torch::kCPU> autocast;
    torch::jit::Module(bare).forward({images()});
  }
  ScriptModule script(bare);
  script->named_buffers()["norm.running_mean"].zero_();
  script->named_buffers()["norm.running_var"].fill_(1);
  auto model = twin();
  expect_steps_alike(script, model, {.device_type = torch::kCPU, .dtype = torch::kHalf});
}

TEST(ScriptModule, SharesParametersBuffersAndMode) {
  auto bare = script_model();
  ScriptModule script(bare);
  EXPECT_THAT(script->named_parameters().keys(),
              testing::UnorderedElementsAreArray(twin()->named_parameters().keys()));
  EXPECT_THAT(script->named_buffers().keys(),
              testing::UnorderedElementsAreArray(twin()->named_buffers().keys()));
  script->eval();
  EXPECT_FALSE(bare.is_training());
  EXPECT_FALSE(bare.attr("norm").toModule().is_training());
  bare.train();
  EXPECT_TRUE(script->is_training());
  script->to(torch::kDouble);
  for (const auto& parameter : bare.parameters()) {
    EXPECT_EQ(parameter.scalar_type(), torch::kDouble);
    EXPECT_TRUE(parameter.requires_grad());
  }
  mezzo::optim::AdamW optimizer(script->parameters(), 1e-2);
  const auto before = bare.attr("out").toModule().attr("weight").toTensor().detach().clone();
  script->forward(images().to(torch::kDouble)).toTensor().sum().backward();
  optimizer.step();
  EXPECT_FALSE(torch::equal(bare.attr("out").toModule().attr("weight").toTensor(), before));
}

TEST(ScriptModule, CloneSharesNoParameters) {
  ScriptModule script(script_model());
  script->parameters()[0].set_requires_grad(false);
  const auto copy = std::dynamic_pointer_cast<mezzo::ScriptModuleImpl>(script->clone());
  ASSERT_NE(copy, nullptr);
  const auto originals = script->parameters(), copies = copy->parameters();
  ASSERT_EQ(copies.size(), originals.size());
  for (std::size_t i = 0; i < copies.size(); ++i) {
    EXPECT_TRUE(copies[i].is_leaf());
    EXPECT_EQ(copies[i].requires_grad(), originals[i].requires_grad());
    EXPECT_FALSE(copies[i].is_alias_of(originals[i]));
    EXPECT_TRUE(torch::equal(copies[i], originals[i]));
  }
}

TEST(ScriptModule, ThrowsForWrongArgumentsUnderAutocast) {
  ScriptModule script(script_model());
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  EXPECT_THROW(script(images(), images()), c10::Error);
  EXPECT_THROW(script(3.0), c10::Error);
}

TEST(ScriptModule, AcceptsVectorOfIValues) {
  ScriptModule script(script_model());
  script->eval();
  std::vector<c10::IValue> arguments{images()};
  const auto expected = script(images()).toTensor();
  EXPECT_TRUE(torch::equal(script(arguments).toTensor(), expected));
  EXPECT_TRUE(torch::equal(script(std::as_const(arguments)).toTensor(), expected));
  EXPECT_TRUE(torch::equal(script->forward(std::move(arguments)).toTensor(), expected));
}

TEST(ScriptModule, SyncsBuffersReplacedByForward) {
  const auto counter = [] {
    torch::jit::Module inner("Counter");
    inner.register_buffer("calls", torch::zeros({1}));
    inner.define("def forward(self, x):\n  self.calls = self.calls + 1\n  return x * self.calls\n");
    torch::jit::Module outer("Net");
    outer.register_module("counter", inner);
    outer.define("def forward(self, x):\n  return self.counter.forward(x)\n");
    return outer;
  };
  const torch::jit::Module script = counter();
  ScriptModule net(script);
  net(images());
  {
    const mezzo::AutocastGuard<torch::kCPU> autocast;
    net(images());
  }
  EXPECT_EQ(net->named_buffers()["counter.calls"].item<float>(), 2);

  torch::jit::Module(script).forward({images()});  // not through the ScriptModule
  const std::string file = test_support::save_to_string(net.ptr());
  ScriptModule loaded(counter());
  loaded(images());
  auto pointer = loaded.ptr();
  test_support::load_from_string(pointer, file);
  EXPECT_EQ(loaded->script().attr("counter").toModule().attr("calls").toTensor().item<float>(), 3);
}

// The file contains torch.jit.script of
//     def forward(self, x):
//         with torch.autocast("cpu", enabled=False):
//             return self.fc(x)
TEST(ScriptModule, ThrowsForAutocastRegionInScript) {
  ScriptModule net(torch::jit::load(MEZZO_AUTOCAST_TEST_DATA "/opens_autocast.pt"));
  EXPECT_NO_THROW(net(torch::ones({2, 2})));
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  EXPECT_THAT(
      [&] {
        net(torch::ones({2, 2}));
      },
      testing::ThrowsMessage<c10::Error>(testing::HasSubstr("forward enters torch.autocast")));
}

// tests/autocast/data/forks.py writes the files.
TEST(ScriptModule, ForksFollowOpListsAndOverrides) {
  ScriptModule net(torch::jit::load(MEZZO_AUTOCAST_TEST_DATA "/forks.pt"));
  const auto parameters = net->named_parameters();
  const auto x = torch::randn({4, 8});
  const auto in_cpp = [&] {
    const auto layer = [&](const std::string& name) {
      return torch::linear(x, parameters[name + ".l.weight"], parameters[name + ".l.bias"]);
    };
    return layer("a") + layer("b");
  };
  EXPECT_TRUE(torch::equal(net(x).toTensor(), in_cpp()));
  const auto overrides = mezzo::install_op_overrides(mezzo::OpOverrides().deny("aten::linear"));
  for (const auto& region_overrides : {mezzo::OpOverrides(), overrides}) {
    const mezzo::AutocastGuard autocast(
        {.device_type = torch::kCPU, .op_overrides = region_overrides});
    const auto output = net(x).toTensor();
    EXPECT_EQ(output.scalar_type(), region_overrides.empty() ? torch::kBFloat16 : torch::kFloat);
    EXPECT_TRUE(torch::equal(output, in_cpp()));
  }
}

TEST(ScriptModule, ThrowsForOpsOutsideInterpreter) {
  const auto message_of_forward = [](const char* file) {
    ScriptModule net(torch::jit::load(std::string(MEZZO_AUTOCAST_TEST_DATA "/") + file));
    EXPECT_NO_THROW(net(torch::ones({2, 8})));
    const mezzo::AutocastGuard<torch::kCPU> autocast;
    return test_support::message_of([&] { net(torch::ones({2, 8})); });
  };
  EXPECT_THAT(
      message_of_forward("many_forks.pt"),
      testing::AllOf(testing::HasSubstr("the future of a torch.jit.fork is stored in a list"),
                     testing::HasSubstr("call torch.jit.wait on each future directly")));
  EXPECT_THAT(message_of_forward("interface.pt"),
              testing::AllOf(testing::HasSubstr("calls a method of an interface"),
                             testing::HasSubstr("annotate the submodule with its class")));
}

TEST(AutocastModule, RunsTorchScriptInAnyThread) {
  const auto bare = script_model();
  AutocastModule net(ScriptModule(bare), {.device_type = torch::kCPU});
  torch::Tensor output, forwarded;
  std::thread([&] {
    output = net(images()).toTensor();
    forwarded = net->forward(std::vector<c10::IValue>{images()}).toTensor();
  }).join();
  EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(forwarded.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(net->parameters().size(), bare.parameters().size());
  AutocastModule off(ScriptModule(bare), {.device_type = torch::kCPU, .enabled = false});
  EXPECT_EQ(off(images()).toTensor().scalar_type(), torch::kFloat);
}

}  // namespace
