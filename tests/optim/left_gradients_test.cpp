// What `.grad` holds after GradScaler::step(optimizer, options) is the same for every optimizer of
// mezzo's rules and every MasterWeights: what it held before, or zero on request.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../support/owned_optimizer.h"

namespace {

using test_support::OwnedOptimizer;
using Make = std::function<OwnedOptimizer(const std::vector<torch::Tensor>&)>;

/// Steps as on a device for which mezzo has no kernel.
template <class Fused>
class ThroughAten : public Fused {
 public:
  using Fused::Fused;
  void apply(mezzo::StepPlan plan, const mezzo::Verdict& verdict,
             const mezzo::StepOptions& options) override {
    this->apply_with_aten(std::move(plan), verdict, options);
  }
};

template <class Own, class Options>
Make make(Options options, mezzo::optim::WeightOptions weights = {}) {
  return [options, weights](const std::vector<torch::Tensor>& parameters) {
    return OwnedOptimizer(std::make_unique<Own>(parameters, options, weights),
                          /*with_masters=*/false);
  };
}

struct LeftGradientsCase {
  std::string name;
  Make make;
  at::ScalarType dtype = torch::kFloat;
};

std::vector<LeftGradientsCase> all_optimizers() {
  using namespace mezzo::optim;
  const auto master = WeightStorage::master;
  const Make masters = [](const std::vector<torch::Tensor>& parameters) {
    return OwnedOptimizer(
        std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1)),
        /*with_masters=*/true);
  };
  return {
      {"AdamW", make<AdamW>(AdamWOptions(0.1))},
      {"Adam", make<Adam>(AdamOptions(0.1))},
      {"SGD", make<SGD>(SGDOptions(0.1).momentum(0.9))},
      {"Lion", make<Lion>(LionOptions(0.1))},
      {"AdamWWithMasters", make<AdamW>(AdamWOptions(0.1), {.weight_storage = master}),
       torch::kHalf},
      {"AtenAdamW", make<ThroughAten<AdamW>>(AdamWOptions(0.1))},
      {"AtenSGD", make<ThroughAten<SGD>>(SGDOptions(0.1))},
      {"MasterWeights", masters, torch::kHalf},
      {"MasterWeightsOfFloats", masters},
  };
}

class LeftGradients : public testing::TestWithParam<LeftGradientsCase> {
 protected:
  /// The scale is no power of two, so that a gradient that was divided and multiplied again shows.
  LeftGradients() {
    scaler_.on_skip(nullptr);
    (void)scaler_.scale(torch::zeros({}));
    torch::manual_seed(3);
    for (const int64_t size : {5, 300}) {
      parameters_.push_back(torch::randn({size}).to(GetParam().dtype).requires_grad_());
    }
    optimizer_.emplace(GetParam().make(parameters_));
  }

  /// What the parameters' gradients are after a step, which begins with `first` in the first place.
  void expect_left(const mezzo::StepOptions& options, float first) {
    std::vector<torch::Tensor> before, same;
    std::vector<torch::Tensor> weights;
    for (const auto& parameter : parameters_) {
      parameter.mutable_grad() = torch::randn(parameter.sizes()).mul(48).to(GetParam().dtype);
      parameter.mutable_grad()[0] = first;
      same.push_back(parameter.grad());
      before.push_back(parameter.grad().clone());
      weights.push_back(parameter.detach().clone());
    }
    const bool ran = scaler_.step(optimizer_->any(), options).ran();
    scaler_.update(48.0);
    EXPECT_EQ(ran, first == 1.0F);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      EXPECT_NE(parameters_[i].equal(weights[i]), ran) << "it steps, or does not";
      ASSERT_TRUE(parameters_[i].grad().is_same(same[i]));
      const auto expected = options.zero_grad ? torch::zeros_like(before[i]) : before[i];
      EXPECT_TRUE(same[i].equal(expected));
    }
  }

  mezzo::GradScaler scaler_{{.init_scale = 48}};
  std::vector<torch::Tensor> parameters_;
  std::optional<OwnedOptimizer> optimizer_;
};

TEST_P(LeftGradients, AreWhatTheyWereOrZeroOnRequest) {
  for (const bool zero_grad : {false, true}) {
    for (const double max_norm : {0.5, std::numeric_limits<double>::infinity()}) {
      for (const float first : {1.0F, std::numeric_limits<float>::infinity()}) {
        expect_left({.max_norm = max_norm, .zero_grad = zero_grad}, first);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(OfEveryOptimizer, LeftGradients, testing::ValuesIn(all_optimizers()),
                         [](const auto& one) { return one.param.name; });

}  // namespace
