// Hooks of a GradReducer during backward passes, with a fake backend whose ranks are identical, so
// that averages are the local gradients.
#include <torch/torch.h>
//
#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/distributed/grad_reducer.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "fake_backend.h"
#include "recording_backend.h"

namespace grad_reducer_test {
namespace {

using distributed_test::make_fake_backend;
using distributed_test::make_recording_backend;
using mezzo::GradReducer;
using test_support::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;

class CountingHook : public torch::autograd::PostAccumulateGradHook {
 public:
  CountingHook(int& calls, double factor) : calls_(calls), factor_(factor) {}
  void operator()(const Tensor& parameter) override {
    ++calls_;
    const torch::NoGradGuard no_grad;
    parameter.grad().mul_(factor_);
  }

 private:
  int& calls_;
  double factor_;
};

void set_hook(const Tensor& parameter, int& calls, double factor = 1) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter,
                                                 std::make_unique<CountingHook>(calls, factor));
}

torch::autograd::PostAccumulateGradHook* get_hook(const Tensor& parameter) {
  return torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

Tensor ones(int64_t size = 3) { return torch::ones({size}).requires_grad_(); }

void expect_gradient(const Tensor& parameter, double value) {
  EXPECT_TRUE(torch::equal(parameter.grad(), torch::full_like(parameter, value)))
      << parameter.grad() << value;
}

struct GradReducerBackward : testing::Test {
  std::vector<std::string> log;
  c10::intrusive_ptr<c10d::Backend> backend() {
    return make_recording_backend(make_fake_backend(2), log);
  }
};

TEST_F(GradReducerBackward, GradsAreBucketViews) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(40, 300), torch::nn::ReLU(),
                              torch::nn::Linear(300, 3));
  GradReducer reducer(model->parameters(), backend());
  for (int step = 0; step < 3; ++step) {
    if (step == 1) model->zero_grad();
    if (step == 2) reducer.buckets().zero_grad(/*set_to_none=*/false);
    model->forward(torch::full({2, 40}, 0.1)).square().sum().backward();
    const auto& bucket = reducer.buckets().buckets()[0];
    for (const Tensor& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.grad().storage().is_alias_of(bucket.buffer.storage()));
    }
  }
}

TEST_F(GradReducerBackward, AccumulatesOntoNoSyncGrads) {
  const Tensor used = ones(), only_before = ones();
  GradReducer reducer({used, only_before}, backend());
  log.clear();
  {
    const auto no_sync = reducer.no_sync();
    (used + only_before).sum().backward();
    EXPECT_TRUE(log.empty());
  }
  used.sum().backward();
  expect_gradient(used, 2);
  expect_gradient(only_before, 1);
  EXPECT_THAT(log, ElementsAre("average", "max"));
}

TEST_F(GradReducerBackward, ReducesBucketsInFixedOrder) {
  const Tensor a = ones(16), b = ones(16), unused = ones(16), frozen = torch::ones({16});
  std::vector<double> sent;
  GradReducer reducer({frozen, unused, a, b},
                      make_recording_backend(make_fake_backend(2),
                                             [&](const std::string& name, const Tensor& flat) {
                                               if (name == "average") {
                                                 sent.push_back(flat.sum().item<double>());
                                               }
                                             }),
                      {.bucket_cap_bytes = 64});
  ((a * 2) + (b * 3)).sum().backward();
  EXPECT_THAT(sent, ElementsAre(48, 32, 0, 0)) << "the last parameter first";
  EXPECT_FALSE(unused.grad().defined());
}

TEST_F(GradReducerBackward, CallsExistingHookFirst) {
  int calls = 0;
  const Tensor parameter = ones();
  set_hook(parameter, calls, 5);
  const auto* const hook = get_hook(parameter);
  {
    const GradReducer reducer({parameter}, backend());
    parameter.sum().backward();
    EXPECT_EQ(calls, 1);
    expect_gradient(parameter, 5);
  }
  EXPECT_EQ(get_hook(parameter), hook);
  log.clear();
  parameter.sum().backward();
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(log.empty());
}

TEST_F(GradReducerBackward, DestroyedReducerSkippedInsideOuterHook) {
  int calls = 0;
  struct Wrapping : torch::autograd::PostAccumulateGradHook {
    std::unique_ptr<PostAccumulateGradHook> inner;
    void operator()(const Tensor& parameter) override { (*inner)(parameter); }
  };
  const Tensor parameter = ones();
  set_hook(parameter, calls);
  {
    const GradReducer reducer({parameter}, backend());
    auto wrapping = std::make_unique<Wrapping>();
    wrapping->inner = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(wrapping));
    log.clear();
    parameter.sum().backward();
    EXPECT_THAT(log, ElementsAre("average", "max"));
  }
  log.clear();
  parameter.sum().backward();
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(log.empty());
}

TEST_F(GradReducerBackward, SupportsReentrantActivationCheckpoints) {
  torch::nn::Linear model(4, 3);
  const GradReducer reducer(model->parameters(), backend());
  for (int step = 0; step < 2; ++step) {
    log.clear();
    model->zero_grad();
    const auto input = torch::ones({2, 4}).requires_grad_();
    mezzo::activation_checkpoint([&](const Tensor& x) { return model->forward(x); }, input)
        .sum()
        .backward();
    EXPECT_THAT(log, ElementsAre("average", "max"));
    expect_gradient(model->bias, 2);
  }
}

TEST_F(GradReducerBackward, SharedCheckpointedLayerIsReducedOnce) {
  torch::nn::Linear model(3, 3), like(3, 3);
  for (const char* const name : {"weight", "bias"}) {
    model->named_parameters()[name].set_data(like->named_parameters()[name].detach().clone());
  }
  const GradReducer reducer(model->parameters(), backend(), {.bucket_cap_bytes = 1});
  log.clear();
  Tensor x = torch::ones({2, 3}).requires_grad_();
  Tensor y = torch::ones({2, 3});
  for (int i = 0; i < 3; ++i) {
    x = mezzo::activation_checkpoint(model, x);
    y = like->forward(y);
  }
  x.square().sum().backward();
  y.square().sum().backward();
  EXPECT_THAT(log, ElementsAre("average", "average", "max"));
  EXPECT_TRUE(torch::allclose(model->weight.grad(), like->weight.grad()));
  EXPECT_TRUE(torch::allclose(model->bias.grad(), like->bias.grad()));
}

/// A function whose backward runs a nested backward pass over a parameter, as reentrant
/// checkpoints.
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

TEST_F(GradReducerBackward, CountsParamOnceInNestedBackward) {
  const Tensor shared = ones(), other = ones();
  const auto run = [&] {
    const auto once = BackwardInside::apply(ones(), shared);
    (BackwardInside::apply(once, shared) * other).sum().backward();
  };
  {
    const GradReducer reducer({shared, other, ones()}, backend());
    run();
    expect_gradient(shared, 2);
    expect_gradient(other, 1);
  }
  const GradReducer alone({shared, other}, backend(), {.bucket_cap_bytes = 1});
  EXPECT_THAT(message_of(run), AllOf(HasSubstr("Expected to mark a variable ready only once"),
                                     HasSubstr("mezzo::activation_checkpoint")));
}

TEST_F(GradReducerBackward, SingleProcessContinuesAfterThrow) {
  const Tensor early = ones(), late = ones();
  GradReducer reducer({late, early}, make_fake_backend(1));
  bool throws = true;
  const auto inner = [&] {
    const Tensor y = late * 2;
    y.register_hook([&](const Tensor& gradient) -> Tensor {
      TORCH_CHECK(!throws, "on purpose");
      return gradient;
    });
    return y;
  };
  EXPECT_THAT(message_of([&] { (inner() * early).sum().backward(); }), HasSubstr("on purpose"));
  throws = false;
  reducer.buckets().zero_grad();
  (inner() * early).sum().backward();
  expect_gradient(late, 2);
  expect_gradient(early, 2);
}

TEST_F(GradReducerBackward, ThrowsForUnsupportedGradients) {
  const Tensor parameter = torch::full({3}, 2.0F).requires_grad_();
  {
    GradReducer reducer({parameter}, make_fake_backend(2));
    EXPECT_THAT(message_of([&] {
                  parameter.pow(3).sum().backward({}, /*retain_graph=*/true,
                                                  /*create_graph=*/true);
                }),
                HasSubstr("requires grad (create_graph=true)"));
  }
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  const GradReducer of_sparse(embedding->parameters(), make_fake_backend(2));
  EXPECT_THAT(message_of([&] {
                embedding->forward(torch::tensor({1, 2})).sum().backward();
              }),
              HasSubstr("it should be dense"));
  const Tensor half = torch::ones({3}, torch::kHalf).requires_grad_();
  const GradReducer of_half({half}, make_fake_backend(2));
  half.mutable_grad() = torch::full({3}, 1e-8F);  // as unscaled for a master
  EXPECT_THAT(message_of([&] { half.sum().backward(); }),
              HasSubstr("take the step and zero_grad()"));
}

TEST_F(GradReducerBackward, ReducesFloat32GradsInReduceDtype) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const Tensor wide = ones(), narrow = torch::ones({3}, torch::kBFloat16).requires_grad_();
    std::vector<torch::ScalarType> sent;
    const auto listener = [&](const std::string& name, const Tensor& tensor) {
      if (name == "sum" || name == "average") sent.push_back(tensor.scalar_type());
    };
    const GradReducer reducer({wide, narrow},
                              make_recording_backend(make_fake_backend(2), listener),
                              {.reduce_dtype = dtype});
    ((wide / 3).sum() + narrow.sum()).backward();
    EXPECT_THAT(sent, ElementsAre(torch::kBFloat16, dtype));
    EXPECT_EQ(wide.grad().scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(wide.grad(),
                             torch::full({3}, 1.F / 3 / 2).to(dtype).mul(2).to(torch::kFloat)));
    wide.mutable_grad() = Tensor();
    (wide * 60000).sum().backward();  // times two ranks overflows float16
    EXPECT_TRUE(wide.grad().allclose(torch::full({3}, 60000.F), 0.01)) << wide.grad();
  }
  EXPECT_THAT(message_of([] {
                GradReducer({ones()}, make_fake_backend(2), {.reduce_dtype = torch::kFloat});
              }),
              HasSubstr("`reduce_dtype` must be bfloat16 or float16"));
}

TEST_F(GradReducerBackward, NoSyncGuardKeepsGradsLocal) {
  const Tensor parameter = ones();
  std::optional<GradReducer> reducer;
  reducer.emplace(std::vector<Tensor>{parameter}, make_fake_backend(2));
  std::optional<mezzo::NoSyncGuard> guard;
  guard.emplace(reducer->no_sync());
  EXPECT_TRUE(reducer->is_no_sync());
  {
    const mezzo::NoSyncGuard moved = *std::move(guard);
    guard.reset();
    EXPECT_TRUE(reducer->is_no_sync()) << "the moved guard remains";
    { const mezzo::NoSyncGuard nested = reducer->no_sync(); }
    EXPECT_TRUE(reducer->is_no_sync());
  }
  EXPECT_FALSE(reducer->is_no_sync());
  guard.emplace(reducer->no_sync());
  reducer.reset();
  guard.reset();  // may outlive the reducer
}

}  // namespace
}  // namespace grad_reducer_test
