// What hooks do during backward: gradients in their places, other hooks, buckets that are ready.

#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/distributed/grad_buckets.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using mezzo::GradBuckets;
using torch::Tensor;

class CountingHook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit CountingHook(int& calls, double factor = 1) : calls_(calls), factor_(factor) {}
  void operator()(const Tensor& parameter) override {
    ++calls_;
    if (factor_ != 1) {
      const torch::NoGradGuard no_grad;
      parameter.grad().mul_(factor_);
    }
  }

 private:
  int& calls_;
  double factor_;
};

void set_hook(const Tensor& parameter, int& calls, double factor = 1) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter,
                                                 std::make_unique<CountingHook>(calls, factor));
}

torch::autograd::PostAccumulateGradHook* hook_of(const Tensor& parameter) {
  return torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

/// Of what the buffers hold after a backward pass, whatever the hooks have left outside.
double sum_of_squares(const GradBuckets& buckets) {
  double sum = 0;
  for (const auto& bucket : buckets.buckets()) {
    sum += bucket.flat.to(torch::kDouble).square().sum().item<double>();
  }
  return sum;
}

class BucketsInBackward : public testing::Test {
 protected:
  BucketsInBackward() {
    torch::manual_seed(1);
    model_->push_back(torch::nn::Linear(40, 300));
    model_->push_back(torch::nn::ReLU());
    model_->push_back(torch::nn::Linear(300, 900));
    model_->push_back(torch::nn::Linear(900, 3));
  }
  void backward(double weight = 1) {
    (model_->forward(torch::full({2, 40}, 0.1)).square().sum() * weight).backward();
  }
  void expect_in_place(const GradBuckets& buckets) const {
    for (const auto& bucket : buckets.buckets()) {
      for (const std::size_t number : bucket.parameters) {
        const Tensor& gradient = buckets.parameters()[number].grad();
        ASSERT_TRUE(gradient.defined()) << number;
        EXPECT_TRUE(gradient.storage().is_alias_of(bucket.flat.storage())) << number;
      }
    }
  }

  torch::nn::Sequential model_;
};

TEST_F(BucketsInBackward, HaveEveryGradientInItsPlaceWhenThePassEnds) {
  const GradBuckets buckets(model_->parameters());
  for (int step = 0; step < 3; ++step) {
    model_->zero_grad();
    backward();
    expect_in_place(buckets);
    const double once = sum_of_squares(buckets);
    backward();
    expect_in_place(buckets);
    EXPECT_NEAR(sum_of_squares(buckets), 4 * once, 1e-6 * once);
  }
}

TEST_F(BucketsInBackward, LeaveGradientsWhereTheyAreUnderNoSync) {
  GradBuckets buckets(model_->parameters());
  {
    const auto accumulating = buckets.no_sync();
    backward();
    for (const auto& parameter : model_->parameters()) {
      EXPECT_FALSE(parameter.grad().storage().is_alias_of(buckets.buckets()[0].flat.storage()));
    }
  }
  EXPECT_EQ(sum_of_squares(buckets), 0);
  buckets.reattach_gradients();
  const double once = sum_of_squares(buckets);
  backward();
  expect_in_place(buckets);
  EXPECT_NEAR(sum_of_squares(buckets), 4 * once, 1e-6 * once);
}

TEST_F(BucketsInBackward, AParameterUnusedInTheLastMicroBatchKeepsWhatItHas) {
  const auto a = torch::ones({3}).requires_grad_();
  const auto b = torch::ones({3}).requires_grad_();
  const GradBuckets buckets({a, b});
  (a + b).sum().backward();
  b.sum().backward();
  EXPECT_EQ(sum_of_squares(buckets), 3 + 12);
}

TEST_F(BucketsInBackward, CallTheHookThatWasThereAndTakeWhatItLeaves) {
  int calls = 0;
  const auto parameter = torch::ones({3}).requires_grad_();
  set_hook(parameter, calls, 5);
  const auto* hook = hook_of(parameter);
  {
    GradBuckets buckets({parameter});
    parameter.sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(sum_of_squares(buckets), 75);
  }
  EXPECT_EQ(hook_of(parameter), hook);
  parameter.sum().backward();
  EXPECT_EQ(calls, 2);
}

TEST_F(BucketsInBackward, OfTheSameParametersTakeTheirHooksAwayInAnyOrder) {
  const auto parameter = torch::ones({3}).requires_grad_();
  auto first = std::make_unique<GradBuckets>(std::vector<Tensor>{parameter});
  auto second = std::make_unique<GradBuckets>(std::vector<Tensor>{parameter});
  parameter.sum().backward();
  EXPECT_EQ(sum_of_squares(*first), 3);
  EXPECT_EQ(sum_of_squares(*second), 3);
  first.reset();
  parameter.sum().backward();
  EXPECT_EQ(sum_of_squares(*second), 12);
  second.reset();
  EXPECT_EQ(hook_of(parameter), nullptr);
}

TEST_F(BucketsInBackward, UnderSomebodyElsesHookTheirOwnGoesQuiet) {
  int calls = 0;
  struct Wrapping : torch::autograd::PostAccumulateGradHook {
    std::unique_ptr<PostAccumulateGradHook> inner;
    void operator()(const Tensor& parameter) override { (*inner)(parameter); }
  };
  const auto parameter = torch::ones({3}).requires_grad_();
  set_hook(parameter, calls);
  {
    GradBuckets buckets({parameter});
    auto wrapping = std::make_unique<Wrapping>();
    wrapping->inner = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(wrapping));
    parameter.sum().backward();
    EXPECT_EQ(sum_of_squares(buckets), 3);
  }
  parameter.sum().backward();
  EXPECT_EQ(calls, 2);
}

TEST_F(BucketsInBackward, WithTheirHookReplacedTakeGradientsAfterwards) {
  int calls = 0;
  const auto parameter = torch::ones({3}).requires_grad_();
  GradBuckets buckets({parameter});
  set_hook(parameter, calls);
  parameter.sum().backward();
  buckets.reattach_gradients();
  EXPECT_EQ(sum_of_squares(buckets), 3);
}

TEST_F(BucketsInBackward, LeaveGradientsWithHistoryAloneUntilTheyAreReattached) {
  const auto parameter = torch::full({3}, 2.0F).requires_grad_();
  GradBuckets buckets({parameter});
  parameter.pow(3).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(parameter.grad().requires_grad());
  const auto second = torch::autograd::grad({parameter.grad().sum()}, {parameter})[0];
  EXPECT_TRUE(torch::equal(second, 6 * parameter));
  buckets.reattach_gradients();
  EXPECT_EQ(sum_of_squares(buckets), 3 * 144);
}

TEST_F(BucketsInBackward, WorkWithCheckpointsThatRunBackwardInsideBackward) {
  GradBuckets buckets(model_->parameters());
  std::vector<std::size_t> ready;
  buckets.on_ready([&](std::size_t bucket) { ready.push_back(bucket); });
  for (int step = 0; step < 2; ++step) {
    ready.clear();
    buckets.zero_grad();
    const auto input = torch::full({2, 40}, 0.1).requires_grad_();
    const auto output =
        mezzo::activation_checkpoint([&](const Tensor& x) { return model_->forward(x); }, input);
    output.square().sum().backward();
    expect_in_place(buckets);
    EXPECT_EQ(ready.size(), buckets.buckets().size());
  }
}

/// Its backward runs a backward pass of its own over a parameter, as other libraries' checkpoints
/// do.
struct BackwardInside : torch::autograd::Function<BackwardInside> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& parameter) {
    context->saved_data["parameter"] = parameter;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const torch::AutoGradMode with_grad(true);
    context->saved_data["parameter"].toTensor().sum().backward();
    return {gradients[0], Tensor()};
  }
};

TEST_F(BucketsInBackward, CountOnceAParameterThatSeveralPassesInsideReach) {
  const auto shared = torch::ones({3}).requires_grad_();
  const auto other = torch::ones({3}).requires_grad_();
  GradBuckets buckets({shared, other});
  const auto run = [&] {
    const auto once = BackwardInside::apply(torch::ones({3}).requires_grad_(), shared);
    (BackwardInside::apply(once, shared) * other).sum().backward();
  };
  run();
  EXPECT_TRUE(torch::equal(shared.grad(), torch::full({3}, 2.0F)));
  EXPECT_EQ(sum_of_squares(buckets), 3 * 4 + 3);

  GradBuckets alone({shared, other}, {.bucket_bytes = 1});
  alone.on_ready([](std::size_t) {});
  try {
    run();
    ADD_FAILURE() << "a gradient came after its bucket had been reported";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("came once more"), std::string::npos);
  }
}

TEST_F(BucketsInBackward, AreWellAfterABackwardThatThrewOnceReattached) {
  const auto parameter = torch::ones({3}).requires_grad_();
  const auto late = torch::ones({3}).requires_grad_();
  GradBuckets buckets({late, parameter});
  int ready = 0;
  buckets.on_ready([&](std::size_t) { ++ready; });
  int calls = 0;
  const auto thrower = [&](const Tensor& gradient) -> Tensor {
    if (++calls == 1) throw std::runtime_error("in backward");
    return gradient;
  };
  const auto inner = late * 2;
  inner.register_hook(thrower);
  EXPECT_THROW((inner * parameter).sum().backward(), std::runtime_error);
  buckets.reattach_gradients();
  const auto again = late * 2;
  again.register_hook(thrower);
  (again * parameter).sum().backward();
  EXPECT_EQ(ready, 1);
  (late * parameter).sum().backward();
  EXPECT_EQ(ready, 2);
}

TEST_F(BucketsInBackward, AreWellAfterABackwardThatThrew) {
  GradBuckets buckets(model_->parameters());
  std::vector<std::size_t> ready;
  buckets.on_ready([&](std::size_t bucket) { ready.push_back(bucket); });
  struct Throwing : torch::autograd::Function<Throwing> {
    static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list) {
      throw std::runtime_error("in backward");
    }
  };
  const auto input = torch::full({2, 40}, 0.1).requires_grad_();
  EXPECT_THROW(model_->forward(Throwing::apply(input)).sum().backward(), std::runtime_error);
  buckets.reattach_gradients();
  expect_in_place(buckets);
  ready.clear();
  buckets.zero_grad();
  backward();
  expect_in_place(buckets);
  EXPECT_EQ(ready.size(), buckets.buckets().size());
}

TEST_F(BucketsInBackward, TellOnceOfEachBucketWhoseGradientsAreAllThere) {
  GradBuckets buckets(model_->parameters(), {.bucket_bytes = 1 << 20});
  ASSERT_GT(buckets.buckets().size(), 1U);
  std::vector<std::size_t> ready;
  buckets.on_ready([&](std::size_t bucket) {
    ready.push_back(bucket);
    buckets.reattach_gradients();  // changes nothing here
    for (const std::size_t number : buckets.buckets()[bucket].parameters) {
      const auto& gradient = buckets.parameters()[number].grad();
      ASSERT_TRUE(gradient.defined());
      EXPECT_TRUE(gradient.storage().is_alias_of(buckets.buckets()[bucket].flat.storage()));
    }
  });
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < buckets.buckets().size(); ++i) all.push_back(i);
  for (int step = 0; step < 2; ++step) {
    ready.clear();
    backward();
    EXPECT_EQ(ready, all);  // in reverse order of use, as the buckets are
  }
  {
    const auto accumulating = buckets.no_sync();
    ready.clear();
    backward();
    EXPECT_TRUE(ready.empty());
  }
  buckets.on_ready(nullptr);
  backward();
  EXPECT_TRUE(ready.empty());
}

TEST_F(BucketsInBackward, TellAtTheEndOfBucketsWithUnusedParameters) {
  const auto a = torch::ones({16}).requires_grad_();
  const auto b = torch::ones({16}).requires_grad_();
  const auto frozen = torch::ones({16});
  GradBuckets buckets({frozen, a, b}, {.bucket_bytes = 64});
  std::vector<std::size_t> ready;
  std::vector<double> sums;
  buckets.on_ready([&](std::size_t bucket) {
    ready.push_back(bucket);
    sums.push_back(buckets.buckets()[bucket].flat.sum().item<double>());
  });
  (a + b + frozen).sum().backward();
  EXPECT_EQ(ready.size(), 3U);
  ready.clear();
  sums.clear();
  buckets.zero_grad();
  a.sum().backward();
  EXPECT_EQ(ready, (std::vector<std::size_t>{1, 0, 2}));
  EXPECT_EQ(sums, (std::vector<double>{16, 0, 0}));
}

}  // namespace
