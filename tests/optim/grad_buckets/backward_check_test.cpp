// What hooks do during backward: reads that count and reads that no longer do, other hooks, buckets
// that are ready.

#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/optim/grad_buckets.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using mezzo::GradBuckets;
using mezzo::GradBucketsOptions;
using mezzo::GradStorage;
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

/// Behind autograd's back: nothing can notice it.
void write_raw(const Tensor& gradient, float value) {
  *static_cast<float*>(const_cast<void*>(gradient.const_data_ptr())) = value;
}

class BackwardCheck : public testing::TestWithParam<GradStorage> {
 protected:
  BackwardCheck() {
    torch::manual_seed(1);
    model_->push_back(torch::nn::Linear(40, 300));
    model_->push_back(torch::nn::ReLU());
    model_->push_back(torch::nn::Linear(300, 900));  // more than is read together
    model_->push_back(torch::nn::Linear(900, 3));
  }
  static GradBucketsOptions options() {
    return GradBucketsOptions().storage(GetParam()).check_during_backward(true);
  }
  void backward(double weight = 1) {
    (model_->forward(torch::full({2, 40}, 0.1)).square().sum() * weight).backward();
  }
  /// What a read from scratch of all gradients says.
  double fresh_sum() const {
    std::vector<Tensor> gradients;
    for (const auto& parameter : model_->parameters()) {
      if (parameter.grad().defined()) gradients.push_back(parameter.grad());
    }
    return mezzo::detail::summarize_gradients(gradients, torch::ones({}))
        .sum_of_squares.item<double>();
  }
  static double sum(GradBuckets& buckets) {
    return buckets.summarize(torch::ones({})).sum_of_squares.item<double>();
  }
  static bool found_inf(GradBuckets& buckets) {
    return buckets.summarize(torch::ones({})).found_inf.item<float>() != 0;
  }
  void expect_same_bits(GradBuckets& buckets) const {
    EXPECT_EQ(std::bit_cast<uint64_t>(sum(buckets)), std::bit_cast<uint64_t>(fresh_sum()));
  }

  torch::nn::Sequential model_;
};

TEST_P(BackwardCheck, ReadsDuringBackwardAndSaysTheSameBits) {
  GradBuckets buckets(model_->parameters(), options());
  for (int step = 0; step < 3; ++step) {
    model_->zero_grad();
    backward();
    for (const auto& parameter : model_->parameters()) {
      EXPECT_EQ(parameter.grad().storage().is_alias_of(buckets.buckets()[0].flat.defined()
                                                           ? buckets.buckets()[0].flat.storage()
                                                           : parameter.grad().storage()),
                true);
    }
    expect_same_bits(buckets);
  }
}

TEST_P(BackwardCheck, DoesNotReadAgainWhatHasNotChanged) {
  GradBuckets buckets(model_->parameters(), options());
  backward();
  const double before = sum(buckets);
  for (const auto& parameter : model_->parameters()) write_raw(parameter.grad(), 1e3F);
  EXPECT_EQ(sum(buckets), before);
  buckets.forget_reads();
  EXPECT_GT(sum(buckets), 6e6);
  expect_same_bits(buckets);
}

TEST_P(BackwardCheck, NoticesAChangeInPlaceAndOneOfTheWholeBucket) {
  GradBuckets buckets(model_->parameters(), options());
  backward();
  EXPECT_FALSE(found_inf(buckets));
  model_->parameters()[2].grad()[7][3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(found_inf(buckets));
  model_->parameters()[2].grad()[7][3] = 0.0F;
  expect_same_bits(buckets);
  if (GetParam() == GradStorage::flat) {
    const double before = sum(buckets);
    buckets.buckets()[0].flat.mul_(2);
    EXPECT_NEAR(sum(buckets), 4 * before, 1e-9 * before);
    expect_same_bits(buckets);
  }
}

TEST_P(BackwardCheck, NoticesAReplacedAndAMissingGradient) {
  GradBuckets buckets(model_->parameters(), options());
  backward();
  const auto parameters = model_->parameters();
  parameters[0].mutable_grad() = torch::ones_like(parameters[0]);
  expect_same_bits(buckets);
  parameters[1].mutable_grad().reset();
  expect_same_bits(buckets);
  model_->zero_grad();
  EXPECT_EQ(sum(buckets), 0);
}

TEST_P(BackwardCheck, OfSeveralMicroBatchesCountsTheLast) {
  GradBuckets buckets(model_->parameters(), options());
  backward(std::numeric_limits<double>::infinity());
  EXPECT_TRUE(found_inf(buckets));
  model_->zero_grad();
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) backward();
  EXPECT_FALSE(found_inf(buckets));
  expect_same_bits(buckets);
  backward(std::numeric_limits<double>::quiet_NaN());
  backward();
  EXPECT_TRUE(found_inf(buckets));
}

TEST_P(BackwardCheck, NoSyncSparesTheReads) {
  GradBuckets buckets(model_->parameters(), options());
  {
    const auto accumulating = buckets.no_sync();
    backward();
    backward();
  }
  for (const auto& parameter : model_->parameters()) {
    if (GetParam() == GradStorage::flat) {
      EXPECT_FALSE(parameter.grad().storage().is_alias_of(buckets.buckets()[0].flat.storage()));
    }
    write_raw(parameter.grad(), 1.0F);  // seen, for nothing has been read yet
  }
  expect_same_bits(buckets);
  backward();
  expect_same_bits(buckets);
}

TEST_P(BackwardCheck, AParameterUnusedInTheLastMicroBatchCountsWithWhatItHas) {
  const auto a = torch::ones({3}).requires_grad_();
  const auto b = torch::ones({3}).requires_grad_();
  GradBuckets buckets({a, b}, options());
  (a + b).sum().backward();
  b.sum().backward();
  EXPECT_EQ(sum(buckets), 3 + 12);
}

TEST_P(BackwardCheck, CallsTheHookThatWasThereAndReadsWhatItLeaves) {
  int calls = 0;
  const auto parameter = torch::ones({3}).requires_grad_();
  set_hook(parameter, calls, 5);
  const auto* hook = hook_of(parameter);
  {
    GradBuckets buckets({parameter}, options());
    parameter.sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(sum(buckets), 75);
  }
  EXPECT_EQ(hook_of(parameter), hook);
  parameter.sum().backward();
  EXPECT_EQ(calls, 2);
}

TEST_P(BackwardCheck, TwoOnTheSameParametersTakeTheirHooksAwayInAnyOrder) {
  const auto parameter = torch::ones({3}).requires_grad_();
  auto first = std::make_unique<GradBuckets>(std::vector<Tensor>{parameter},
                                             GradBucketsOptions().check_during_backward(true));
  auto second = std::make_unique<GradBuckets>(std::vector<Tensor>{parameter}, options());
  parameter.sum().backward();
  EXPECT_EQ(sum(*first), 3);
  EXPECT_EQ(sum(*second), 3);
  first.reset();
  parameter.sum().backward();
  EXPECT_EQ(sum(*second), 12);
  second.reset();
  EXPECT_EQ(hook_of(parameter), nullptr);
}

TEST_P(BackwardCheck, UnderSomebodyElsesHookItsOwnGoesQuiet) {
  int calls = 0;
  struct Wrapping : torch::autograd::PostAccumulateGradHook {
    std::unique_ptr<PostAccumulateGradHook> inner;
    void operator()(const Tensor& parameter) override { (*inner)(parameter); }
  };
  const auto parameter = torch::ones({3}).requires_grad_();
  set_hook(parameter, calls);
  {
    GradBuckets buckets({parameter}, options());
    auto wrapping = std::make_unique<Wrapping>();
    wrapping->inner = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(wrapping));
    parameter.sum().backward();
    EXPECT_EQ(sum(buckets), 3);
  }
  parameter.sum().backward();
  EXPECT_EQ(calls, 2);
}

TEST_P(BackwardCheck, WithItsHookReplacedStillSaysWhatIsThere) {
  int calls = 0;
  const auto parameter = torch::ones({3}).requires_grad_();
  GradBuckets buckets({parameter}, options());
  set_hook(parameter, calls);
  parameter.sum().backward();
  EXPECT_EQ(sum(buckets), 3);
  parameter.sum().backward();
  EXPECT_EQ(sum(buckets), 12);
}

TEST_P(BackwardCheck, LeavesGradientsWithHistoryAlone) {
  const auto parameter = torch::full({3}, 2.0F).requires_grad_();
  GradBuckets buckets({parameter}, options());
  parameter.pow(3).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(parameter.grad().requires_grad());
  const auto second = torch::autograd::grad({parameter.grad().sum()}, {parameter})[0];
  EXPECT_TRUE(torch::equal(second, 6 * parameter));
  EXPECT_EQ(sum(buckets), 3 * 144);
}

TEST_P(BackwardCheck, ReadsSparseGradientsAfterwards) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 2).sparse(true));
  GradBuckets buckets({embedding->weight}, options());
  for (int step = 1; step <= 2; ++step) {
    embedding->forward(torch::tensor({1, 1})).sum().backward();
    EXPECT_EQ(sum(buckets), 2 * 4 * step * step);
  }
}

TEST_P(BackwardCheck, WorksWithCheckpointsThatRunBackwardInsideBackward) {
  GradBuckets buckets(model_->parameters(), options());
  std::vector<std::size_t> ready;
  buckets.on_ready([&](std::size_t bucket) { ready.push_back(bucket); });
  for (int step = 0; step < 2; ++step) {
    ready.clear();
    buckets.zero_grad();
    const auto input = torch::full({2, 40}, 0.1).requires_grad_();
    const auto output =
        mezzo::activation_checkpoint([&](const Tensor& x) { return model_->forward(x); }, input);
    output.square().sum().backward();
    expect_same_bits(buckets);
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

TEST_P(BackwardCheck, CountsOnceAParameterThatSeveralPassesInsideReach) {
  const auto shared = torch::ones({3}).requires_grad_();
  const auto other = torch::ones({3}).requires_grad_();
  GradBuckets buckets({shared, other}, options());
  const auto run = [&] {
    const auto once = BackwardInside::apply(torch::ones({3}).requires_grad_(), shared);
    (BackwardInside::apply(once, shared) * other).sum().backward();
  };
  run();
  EXPECT_TRUE(torch::equal(shared.grad(), torch::full({3}, 2.0F)));
  EXPECT_EQ(sum(buckets), 3 * 4 + 3);
  buckets.rebuild_buckets();
  ASSERT_EQ(buckets.buckets().size(), 1U);
  EXPECT_EQ(buckets.buckets()[0].parameters.size(), 2U);
  EXPECT_EQ(sum(buckets), 3 * 4 + 3);

  GradBuckets alone({shared, other}, options().bucket_bytes(1));
  alone.on_ready([](std::size_t) {});
  try {
    run();
    ADD_FAILURE() << "a gradient came after its bucket had been reported";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("came once more"), std::string::npos);
  }
}

TEST_P(BackwardCheck, IsWellAfterABackwardThatThrewOnceReattached) {
  const auto parameter = torch::ones({3}).requires_grad_();
  const auto late = torch::ones({3}).requires_grad_();
  GradBuckets buckets({late, parameter}, options());
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

TEST_P(BackwardCheck, IsWellAfterABackwardThatThrew) {
  GradBuckets buckets(model_->parameters(), options());
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
  expect_same_bits(buckets);
  ready.clear();
  buckets.zero_grad();
  backward();
  expect_same_bits(buckets);
  EXPECT_EQ(ready.size(), buckets.buckets().size());
}

TEST_P(BackwardCheck, TellsOnceOfEachBucketWhoseGradientsAreAllThere) {
  GradBuckets buckets(model_->parameters(), options().bucket_bytes(1 << 20));
  ASSERT_GT(buckets.buckets().size(), 1U);
  std::vector<std::size_t> ready;
  buckets.on_ready([&](std::size_t bucket) {
    ready.push_back(bucket);
    buckets.reattach_gradients();  // changes nothing here
    for (const std::size_t number : buckets.buckets()[bucket].parameters) {
      const auto& gradient = buckets.parameters()[number].grad();
      ASSERT_TRUE(gradient.defined());
      if (GetParam() == GradStorage::flat) {
        EXPECT_TRUE(gradient.storage().is_alias_of(buckets.buckets()[bucket].flat.storage()));
      }
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

TEST_P(BackwardCheck, TellsAtTheEndOfBucketsWithUnusedParameters) {
  const auto a = torch::ones({16}).requires_grad_();
  const auto b = torch::ones({16}).requires_grad_();
  const auto frozen = torch::ones({16});
  GradBuckets buckets({frozen, a, b}, options().bucket_bytes(64));
  std::vector<std::size_t> ready;
  std::vector<double> sums;
  buckets.on_ready([&](std::size_t bucket) {
    ready.push_back(bucket);
    if (GetParam() == GradStorage::flat) {
      sums.push_back(buckets.buckets()[bucket].flat.sum().item<double>());
    }
  });
  (a + b + frozen).sum().backward();
  EXPECT_EQ(ready.size(), 3U);
  ready.clear();
  sums.clear();
  buckets.zero_grad();
  a.sum().backward();
  EXPECT_EQ(ready, (std::vector<std::size_t>{1, 0, 2}));
  if (GetParam() == GradStorage::flat) {
    EXPECT_EQ(sums, (std::vector<double>{16, 0, 0}));
  }
}

// In place: flat storage gives every gradient an address of its own.
TEST(BackwardCheckInPlace, ANewGradientAtAnOldAddressIsNotTakenForTheOld) {
  const auto parameter = torch::ones({64}).requires_grad_();
  GradBuckets buckets({parameter}, GradBucketsOptions().check_during_backward(true));
  const auto sum = [&] { return buckets.summarize(torch::ones({})).sum_of_squares.item<double>(); };
  std::vector<float> memory(64, 0.0F);
  const auto in_memory = [&] { return torch::from_blob(memory.data(), {64}); };
  parameter.mutable_grad() = in_memory();
  parameter.sum().backward();
  EXPECT_EQ(sum(), 64);
  const int64_t version = parameter.grad()._version();
  auto other = in_memory();
  parameter.mutable_grad() = other;  // after which the first is gone
  while (other._version() < version) other.mul_(3);
  EXPECT_EQ(other._version(), version);
  EXPECT_EQ(sum(), 64 * 9);
}

INSTANTIATE_TEST_SUITE_P(AllStorages, BackwardCheck,
                         testing::Values(GradStorage::in_place, GradStorage::flat),
                         [](const auto& test) {
                           return test.param == GradStorage::flat ? "Flat" : "InPlace";
                         });

}  // namespace
