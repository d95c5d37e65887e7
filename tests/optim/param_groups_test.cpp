// What every optimizer checks of the parameters and groups that it is given, and how it is passed
// on.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/optimizer.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "../support/error_of.h"

namespace {

using test_support::error_of;
using testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

template <class OptimizerType, class OptionsType>
struct Kind {
  using Optimizer = OptimizerType;
  using Options = OptionsType;
};

template <class Kind>
class ParamGroups : public testing::Test {
 protected:
  static torch::Tensor parameter() { return torch::ones({2}).requires_grad_(); }
  static OptimizerParamGroup group(const typename Kind::Options& options) {
    return {{parameter()}, std::make_unique<typename Kind::Options>(options)};
  }
};

using Kinds = testing::Types<Kind<mezzo::optim::Adam, mezzo::optim::AdamOptions>,
                             Kind<mezzo::optim::AdamW, mezzo::optim::AdamWOptions>,
                             Kind<mezzo::optim::LAMB, mezzo::optim::LAMBOptions>,
                             Kind<mezzo::optim::Lion, mezzo::optim::LionOptions>,
                             Kind<mezzo::optim::SGD, mezzo::optim::SGDOptions>>;
TYPED_TEST_SUITE(ParamGroups, Kinds);

TYPED_TEST(ParamGroups, WithAnOptionOutOfRangeAreRefusedAndNotAdded) {
  using Options = typename TypeParam::Options;
  typename TypeParam::Optimizer optimizer({this->parameter()}, Options(0.5));
  for (const Options& options : {Options(-1.0), Options(0.5).weight_decay(-1)}) {
    const std::string made =
        error_of([&] { typename TypeParam::Optimizer({this->group(options)}, Options(0.5)); });
    EXPECT_EQ(error_of([&] { optimizer.add_param_group(this->group(options)); }), made);
    EXPECT_THAT(made, HasSubstr("; it should be"));
    EXPECT_EQ(optimizer.param_groups().size(), 1U);
  }
  optimizer.add_param_group(this->group(Options(0.25)));
  ASSERT_EQ(optimizer.param_groups().size(), 2U);
  const torch::Tensor added = optimizer.param_groups().back().params().front();
  added.mutable_grad() = torch::ones({2});
  optimizer.step();
  EXPECT_FALSE(torch::equal(added, torch::ones({2}))) << "what is added after a refusal is trained";
}

TYPED_TEST(ParamGroups, WithAnotherOptimizersOptionsAreRefusedAndNotAdded) {
  using Options = typename TypeParam::Options;
  typename TypeParam::Optimizer optimizer({this->parameter()}, Options(0.5));
  EXPECT_THAT(error_of([&] {
                optimizer.add_param_group(OptimizerParamGroup(
                    {this->parameter()}, std::make_unique<torch::optim::RMSpropOptions>(0.5)));
              }),
              HasSubstr("the options of parameter group 1 are not mezzo::optim::"));
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
}

// As in torch: a model that did not register its layers has no parameters, and would not learn.
TYPED_TEST(ParamGroups, OfAnEmptyParameterListAreRefused) {
  using Optimizer = typename TypeParam::Optimizer;
  const typename TypeParam::Options options(0.5);
  for (const std::string& error :
       {error_of([&] { Optimizer(std::vector<torch::Tensor>(), options); }),
        error_of([&] { Optimizer(std::vector<OptimizerParamGroup>(), options); })}) {
    EXPECT_THAT(error, HasSubstr("optimizer got an empty parameter list"));
    EXPECT_THAT(error, HasSubstr("register_module"));
  }
  // One group of several may be empty, as torch has it.
  EXPECT_EQ(error_of([&] {
              Optimizer({OptimizerParamGroup(std::vector<torch::Tensor>()),
                         OptimizerParamGroup({this->parameter()})},
                        options);
            }),
            "no error");
}

// An overload for pointers beside one for AnyOptimizer is chosen by what can be called.
TYPED_TEST(ParamGroups, AreReachedThroughAReferenceToTheOptimizerAndNoPointer) {
  using Optimizer = typename TypeParam::Optimizer;
  static_assert(std::is_convertible_v<Optimizer&, mezzo::AnyOptimizer>);
  static_assert(!std::is_convertible_v<Optimizer*, mezzo::AnyOptimizer>);
  static_assert(!std::is_convertible_v<std::unique_ptr<Optimizer>, mezzo::AnyOptimizer>);
  static_assert(!std::is_constructible_v<mezzo::AnyOptimizer, std::shared_ptr<Optimizer>&>);
  Optimizer optimizer({this->parameter()}, typename TypeParam::Options(0.5));
  EXPECT_EQ(&mezzo::AnyOptimizer(optimizer).optimizer(), &optimizer);
}

// libtorch finds a state by the address of its parameter, which a later tensor can get. mezzo's
// rules notice; LAMB is an ordinary optimizer.
TYPED_TEST(ParamGroups, AParameterThatIsReplacedLeavesNoStateToTheNext) {
  using Options = typename TypeParam::Options;
  if (std::is_same_v<Options, mezzo::optim::LAMBOptions>) return;
  typename TypeParam::Optimizer optimizer({this->parameter()}, Options(0.5));
  torch::Tensor& place = optimizer.param_groups()[0].params()[0];
  torch::Tensor first_step;
  for (int i = 0; i < 8; ++i) {
    place = torch::Tensor();
    place = this->parameter();
    place.mutable_grad() = torch::ones({2});
    optimizer.step();
    if (i == 0) first_step = place.detach().clone();
    EXPECT_TRUE(place.equal(first_step)) << "of parameter " << i;
    EXPECT_LE(optimizer.state().size(), 2U);
    place.mutable_grad() = torch::full({2}, 64.0);  // moments that the next parameter would feel
    optimizer.step();
  }
}

}  // namespace
