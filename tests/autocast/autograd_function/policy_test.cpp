// Backward sees the op policy of its forward, wherever it runs.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/autograd_function.h>
#include <mezzo/autocast/op_policy.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <thread>

namespace {

using mezzo::Autocast;
using mezzo::OpPolicy;
using torch::kBFloat16;
using torch::kCPU;
using torch::kFloat;
using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

thread_local at::ScalarType mm_in_backward;
thread_local at::ScalarType softmax_in_backward;

// A product whose backward computes mm and softmax, to see in which dtypes they run.
struct PolicyProduct : mezzo::AutocastFunction<PolicyProduct> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    ctx->save_for_backward({a, b});
    return a.mm(b);
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto for_a = gradients[0].mm(saved[1].t());
    mm_in_backward = for_a.scalar_type();
    softmax_in_backward = torch::softmax(saved[0].to(kBFloat16), 1).scalar_type();
    return {for_a, saved[0].t().mm(gradients[0])};
  }
};

class AutocastFunctionPolicy : public testing::Test {
 protected:
  AutocastFunctionPolicy() {
    mm_in_backward = at::ScalarType::Undefined;
    softmax_in_backward = at::ScalarType::Undefined;
  }

  Tensor run(const mezzo::AutocastSetting& options) {
    const Autocast<kCPU> autocast(options);
    return PolicyProduct::apply(a_, b_).sum();
  }

  const OpPolicy policy_ = mezzo::install_op_overrides(OpPolicy().deny("mm").deny("softmax.int"));
  Tensor a_ = torch::randn({3, 4}).requires_grad_();
  Tensor b_ = torch::randn({4, 5}).requires_grad_();
};

TEST_F(AutocastFunctionPolicy, OfTheForwardHoldsInBackward) {
  const auto y = run({.policy = policy_});
  EXPECT_EQ(y.scalar_type(), kFloat);
  y.backward();
  EXPECT_EQ(mm_in_backward, kFloat);
  EXPECT_EQ(softmax_in_backward, kFloat);
}

TEST_F(AutocastFunctionPolicy, OfTheForwardHoldsThoughAnotherSurroundsBackward) {
  const auto y = run({.policy = policy_});
  const Autocast<kCPU> autocast(
      {.policy = mezzo::install_op_overrides(OpPolicy().allow("mm").allow("softmax.int"))});
  y.backward();
  EXPECT_EQ(mm_in_backward, kFloat);
  EXPECT_EQ(softmax_in_backward, kFloat);
  EXPECT_EQ(torch::mm(a_, b_).scalar_type(), kBFloat16);  // the caller's is back
}

TEST_F(AutocastFunctionPolicy, OfTheForwardHoldsInAnotherThread) {
  const auto y = run({.policy = policy_});
  std::thread([&] {
    y.backward();
    EXPECT_EQ(mm_in_backward, kFloat);
    EXPECT_EQ(softmax_in_backward, kFloat);
  }).join();
}

TEST_F(AutocastFunctionPolicy, AroundBackwardDoesNotReachAForwardThatHadNone) {
  const auto y = run({});
  const Autocast<kCPU> autocast({.policy = policy_});
  y.backward();
  EXPECT_EQ(mm_in_backward, kBFloat16);
  EXPECT_EQ(softmax_in_backward, kBFloat16);
}

}  // namespace
