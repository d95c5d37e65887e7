#include <mezzo/autocast/autocast_module.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "../support/save_to_string.h"

namespace {

using mezzo::AutocastModule;
using mezzo::AutocastOptions;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;
using torch::Tensor;

const AutocastOptions kBf16{.device_type = torch::kCPU};

/// Has several arguments, a default one, a child, a buffer, and a child that stays in eval mode.
struct GatedImpl : torch::nn::Cloneable<GatedImpl> {
  GatedImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", torch::nn::Linear(4, 4));
    frozen = register_module("frozen", torch::nn::Dropout(0.5));
    gate = register_parameter("gate", torch::ones({4}));
    offset = register_parameter("offset", torch::zeros({4}), /*requires_grad=*/false);
    seen = register_buffer("seen", torch::zeros({1}));
  }
  void train(bool on = true) override {
    Module::train(on);
    frozen->eval();
  }
  Tensor forward(Tensor x, double factor = 2.0) {
    return frozen(linear(x)) * gate.to(torch::kBFloat16) * factor + offset.to(torch::kBFloat16);
  }

  torch::nn::Linear linear{nullptr};
  torch::nn::Dropout frozen{nullptr};
  Tensor gate, offset, seen;
};
TORCH_MODULE(Gated);

struct PairImpl : torch::nn::Module {
  std::pair<Tensor, int> forward(const Tensor& x, std::unique_ptr<int> number) const noexcept {
    return {torch::mm(x, x), *number};
  }
};

template <class Class>
std::type_identity<Class> class_of(Tensor (Class::*)(Tensor, double));
static_assert(requires { class_of(&mezzo::AutocastModuleImpl<GatedImpl>::forward); });

std::vector<std::string> keys(const torch::OrderedDict<std::string, Tensor>& dict) {
  return dict.keys();
}

TEST(AutocastModule, CastsResultsToOutputDtype) {
  mezzo::AutocastModule net(torch::nn::Linear(4, 2),
                            {.device_type = torch::kCPU, .output_dtype = torch::kFloat});
  EXPECT_EQ(net(torch::ones({3, 4})).scalar_type(), torch::kFloat);
  const auto copy =
      std::dynamic_pointer_cast<mezzo::AutocastModuleImpl<torch::nn::LinearImpl>>(net->clone());
  EXPECT_EQ(copy->forward(torch::ones({3, 4})).scalar_type(), torch::kFloat);
}

TEST(AutocastModule, RunsOnlyForwardUnderAutocast) {
  AutocastModule<torch::nn::Linear> wrapped(torch::nn::Linear(4, 2), kBf16);
  EXPECT_EQ(wrapped(torch::rand({3, 4})).scalar_type(), torch::kBFloat16);
  EXPECT_EQ(wrapped->forward(torch::rand({3, 4})).scalar_type(), torch::kBFloat16);
  EXPECT_EQ(torch::mm(torch::rand({2, 2}), torch::rand({2, 2})).scalar_type(), torch::kFloat);
}

TEST(AutocastModule, DisabledRunsFullPrecisionInsideRegion) {
  AutocastModule wrapped(torch::nn::Linear(4, 2), {.device_type = torch::kCPU, .enabled = false});
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  EXPECT_EQ(wrapped(torch::rand({3, 4})).scalar_type(), torch::kFloat);
}

TEST(AutocastModule, ForwardsArgumentsAndDefaults) {
  torch::manual_seed(1);
  AutocastModule wrapped(Gated(), kBf16);
  wrapped->eval();
  const Tensor x = torch::rand({2, 4});
  const Tensor doubled = wrapped(x);
  EXPECT_TRUE(torch::equal(wrapped(x, 2.0), doubled));
  EXPECT_TRUE(torch::equal(wrapped(x, 4.0), doubled * 2));
  EXPECT_TRUE(torch::equal(wrapped->forward(x, 4.0), doubled * 2));
}

TEST(AutocastModule, ForwardsReferencesAndMoveOnlyArguments) {
  AutocastModule<PairImpl> wrapped(std::make_shared<PairImpl>(), kBf16);
  const Tensor x = torch::rand({2, 2});
  const std::pair<Tensor, int> result = wrapped->forward(x, std::make_unique<int>(7));
  EXPECT_EQ(result.first.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(result.second, 7);
}

TEST(AutocastModule, WorksInSequential) {
  torch::nn::Sequential layers(AutocastModule(torch::nn::Linear(4, 4), kBf16), torch::nn::ReLU(),
                               AutocastModule<torch::nn::Linear>(torch::nn::Linear(4, 2), kBf16));
  EXPECT_EQ(layers->forward(torch::rand({3, 4})).scalar_type(), torch::kBFloat16);
  torch::nn::Sequential gated(AutocastModule(Gated(), kBf16));
  EXPECT_EQ(gated->forward(torch::rand({3, 4}), 3.0).scalar_type(), torch::kBFloat16);
  EXPECT_THAT(keys(layers->named_parameters()),
              ElementsAre("0.weight", "0.bias", "2.weight", "2.bias"));
}

TEST(AutocastModule, WrapsTemplatedForward) {
  AutocastModule layers(torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::ReLU()), kBf16);
  EXPECT_EQ(layers(torch::rand({3, 4})).scalar_type(), torch::kBFloat16);
  EXPECT_EQ(layers->forward(torch::rand({3, 4})).scalar_type(), torch::kBFloat16);
}

TEST(AutocastModule, SharesTensorsUnderModuleNames) {
  Gated plain;
  AutocastModule wrapped(plain, kBf16);
  EXPECT_EQ(keys(wrapped->named_parameters()), keys(plain->named_parameters()));
  EXPECT_EQ(keys(wrapped->named_buffers()), keys(plain->named_buffers()));
  for (const auto& item : plain->named_parameters()) {
    const Tensor ours = wrapped->named_parameters()[item.key()];
    EXPECT_TRUE(ours.is_same(item.value())) << item.key();
    EXPECT_EQ(ours.requires_grad(), item.key() != "offset") << item.key();
  }
  EXPECT_TRUE(wrapped->named_buffers()["seen"].is_same(plain->seen));
}

TEST(AutocastModule, TrainSwitchesWrappedModule) {
  Gated plain;
  plain->linear->eval();
  AutocastModule wrapped(plain, kBf16);
  EXPECT_TRUE(wrapped->is_training());
  EXPECT_FALSE(plain->linear->is_training()) << "wrapping must not switch children";
  wrapped->eval();
  EXPECT_FALSE(wrapped->is_training());
  EXPECT_FALSE(plain->is_training());
  wrapped->train();
  EXPECT_TRUE(plain->is_training());
  EXPECT_TRUE(plain->linear->is_training());
  EXPECT_FALSE(plain->frozen->is_training()) << "the module's train() takes precedence";
  plain->eval();
  EXPECT_FALSE(AutocastModule(plain, kBf16)->is_training());
}

TEST(AutocastModule, ToCastsWrappedModule) {
  Gated plain;
  AutocastModule wrapped(plain, kBf16);
  wrapped->to(torch::kDouble);
  EXPECT_EQ(plain->gate.scalar_type(), torch::kDouble);
  EXPECT_EQ(plain->linear->weight.scalar_type(), torch::kDouble);
  EXPECT_EQ(wrapped->named_parameters()["gate"].scalar_type(), torch::kDouble);
}

TEST(AutocastModule, CheckpointMatchesUnwrappedModule) {
  torch::manual_seed(2);
  const Gated plain;
  AutocastModule wrapped(Gated(), kBf16);
  test_support::load_from_string(wrapped, test_support::save_to_string(plain));
  EXPECT_TRUE(torch::equal(wrapped->module()->linear->weight, plain->linear->weight));

  const std::string from_wrapped = test_support::save_to_string(wrapped);
  Gated restored;
  test_support::load_from_string(restored, from_wrapped);
  EXPECT_TRUE(torch::equal(restored->linear->weight, plain->linear->weight));
}

// A module in libtorch's usual idiom, with a wrapped child.
struct ParentImpl : torch::nn::Cloneable<ParentImpl> {
  ParentImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", AutocastModule(torch::nn::Linear(4, 2), kBf16));
  }
  AutocastModule<torch::nn::Linear> linear{nullptr};
};

TEST(AutocastModule, ClonesAsChildWithWeights) {
  auto parent = std::make_shared<ParentImpl>();
  const auto copy = std::dynamic_pointer_cast<ParentImpl>(parent->clone());
  ASSERT_NE(copy, nullptr);
  const Tensor x = torch::rand({3, 4});
  EXPECT_TRUE(torch::equal(copy->linear(x), parent->linear(x)));
  EXPECT_EQ(copy->linear(x).scalar_type(), torch::kBFloat16);
  const auto original_weight = parent->named_parameters()["linear.weight"];
  const auto copied_weight = copy->named_parameters()["linear.weight"];
  EXPECT_TRUE(torch::equal(copied_weight, original_weight));
  EXPECT_FALSE(copied_weight.is_same(original_weight));
  EXPECT_TRUE(copied_weight.is_same(copy->linear->module()->weight));
}

TEST(AutocastModule, PrintsWrappedModule) {
  std::ostringstream text;
  text << *AutocastModule(torch::nn::Linear(4, 2), kBf16);
  EXPECT_THAT(text.str(), HasSubstr("mezzo::AutocastModule(torch::nn::Linear(in_features=4"));
}

TEST(AutocastModule, ThrowsForInvalidModuleOrDtype) {
  EXPECT_THAT([] { AutocastModule(torch::nn::Linear(nullptr), kBf16); },
              ThrowsMessage<c10::Error>(HasSubstr("AutocastModule: module is an empty holder")));
  EXPECT_THAT(
      [] {
        AutocastModule(torch::nn::Linear(2, 2),
                       {.device_type = torch::kCPU, .dtype = torch::kFloat});
      },
      ThrowsMessage<c10::Error>(
          HasSubstr("In CPU autocast, but the target dtype Float is not supported")));
}

TEST(AutocastModule, HoldsNullptrUntilAssigned) {
  AutocastModule<torch::nn::Linear> later = nullptr;
  EXPECT_FALSE(static_cast<bool>(later));
  later = AutocastModule(torch::nn::Linear(2, 2), kBf16);
  EXPECT_TRUE(static_cast<bool>(later));
}

}  // namespace
