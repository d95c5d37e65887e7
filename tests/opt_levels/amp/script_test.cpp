#include <torch/script.h>
#include <torch/torch.h>
//
#include <mezzo/opt_levels/amp.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/torchscript.h>

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "../../support/script_model.h"

namespace {

using mezzo::OptLevel;
using mezzo::ScriptModule;
using test_support::script_model;

const mezzo::InitializeOptions kSilent{.verbosity = 0};

TEST(AmpScriptModule, KeepsBatchNormsInFloat32) {
  for (const OptLevel& level : {OptLevel::O2_bf16(), OptLevel::O3_bf16()}) {
    const auto script = script_model();
    mezzo::initialize(mezzo::ScriptModule(script), level, kSilent);
    const auto norm_dtype = level.keep_batchnorm_fp32() ? torch::kFloat : torch::kBFloat16;
    for (const auto& item : script.named_parameters()) {
      const bool is_norm = item.name.starts_with("norm.");
      EXPECT_EQ(item.value.scalar_type(), is_norm ? norm_dtype : torch::kBFloat16) << item.name;
      EXPECT_TRUE(item.value.requires_grad() && item.value.is_leaf()) << item.name;
    }
    const auto norm = script.attr("norm").toModule();
    EXPECT_EQ(norm.attr("running_mean").toTensor().scalar_type(), norm_dtype);
    EXPECT_EQ(norm.attr("running_var").toTensor().scalar_type(), norm_dtype);
    EXPECT_EQ(norm.attr("num_batches_tracked").toTensor().scalar_type(), torch::kLong);
  }
}

/// Returns the loss after 30 steps divided by the first.
template <class Optimizer>
double get_loss_ratio(const ScriptModule& script, Optimizer& optimizer, const OptLevel& level) {
  auto amp = mezzo::initialize(script, optimizer, level, kSilent);
  torch::manual_seed(3);
  const auto input = torch::randn({16, 3, 6, 6}), target = torch::randn({16, 4});
  double first = 0, last = 0;
  for (int step = 0; step < 30; ++step) {
    amp.zero_grad(optimizer);
    const auto output = amp.forward(script, input).toTensor();
    const auto loss = torch::mse_loss(output.to(torch::kFloat), target);
    amp.backward(loss, optimizer);
    EXPECT_TRUE(amp.step(optimizer).applied());
    last = loss.template item<double>();
    if (step == 0) first = last;
  }
  return last / first;
}

TEST(AmpScriptModule, TrainsAtEachLevel) {
  for (const char* name : {"O0", "O1_bf16", "O2_bf16", "O3_bf16", "O2"}) {
    const ScriptModule script(script_model());
    mezzo::optim::AdamW fused(script->parameters(), 1e-2);
    EXPECT_LT(get_loss_ratio(script, fused, OptLevel::parse(name)), 0.9) << name;
  }
  const ScriptModule script(script_model());
  torch::optim::SGD sgd(script->parameters(), 0.1);
  EXPECT_LT(get_loss_ratio(script, sgd, OptLevel::O2_bf16()), 0.95);
}

TEST(AmpScriptModule, ForwardAcceptsAnyHandle) {
  const ScriptModule script(script_model());
  const auto input = torch::ones({2, 3, 6, 6});
  auto amp = mezzo::initialize(script, OptLevel::O1_bf16(), kSilent);
  EXPECT_EQ(amp.forward(script, input).toTensor().scalar_type(), torch::kBFloat16);
  EXPECT_EQ(amp.forward(script, std::vector<c10::IValue>{input}).toTensor().scalar_type(),
            torch::kBFloat16);
  const ScriptModule handle = script;
  EXPECT_EQ(amp.forward(handle, input).toTensor().scalar_type(), torch::kBFloat16);
  const ScriptModule conv(
      std::dynamic_pointer_cast<mezzo::ScriptModuleImpl>(script->named_children()["conv"]));
  EXPECT_EQ(amp.forward(conv, input).toTensor().scalar_type(), torch::kBFloat16);
}

TEST(AmpScriptModule, CastsNestedArgumentsAndResults) {
  torch::jit::Module model("Model");
  model.register_parameter("weight", torch::ones({2}).set_requires_grad(true), false);
  model.define(R"(
    def forward(self, pair: Tuple[Tensor, int], many: List[Tensor], named: Dict[str, Tensor]):
        return {"pair": pair[0] * self.weight, "many": many[0], "named": named["x"]}, [many[1]], pair
  )");
  const ScriptModule net(model);
  auto amp =
      mezzo::initialize(net, OptLevel::O3_bf16({.cast_model_outputs = torch::kDouble}), kSilent);
  const auto x = torch::ones({2}), count = torch::ones({2}, torch::kLong);
  c10::Dict<std::string, at::Tensor> named;
  named.insert("x", x);
  const c10::List<at::Tensor> many({x, count});
  const auto result = amp.forward(net, c10::IValue(std::make_tuple(x, int64_t{3})),
                                  c10::IValue(many), c10::IValue(named))
                          .toTuple();
  const auto dict = result->elements()[0].toGenericDict();
  for (const char* name : {"pair", "many", "named"}) {
    EXPECT_EQ(dict.at(name).toTensor().scalar_type(), torch::kDouble) << name;
  }
  EXPECT_EQ(result->elements()[1].toTensorList().get(0).scalar_type(), torch::kLong);
  EXPECT_EQ(result->elements()[2].toTuple()->elements()[1].toInt(), 3);
  EXPECT_EQ(many.get(0).scalar_type(), torch::kFloat) << "the caller's list is not modified";
  EXPECT_EQ(named.at("x").scalar_type(), torch::kFloat);
}

}  // namespace
