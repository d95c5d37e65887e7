// custom_fwd and custom_bwd without cast_inputs: backward runs under the state of forward.

#include <mezzo/autocast/autocast_autograd_function.h>
#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/op_overrides.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <type_traits>

namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Seen {
  bool enabled = false;
  at::ScalarType dtype = at::ScalarType::Undefined;

  bool operator==(const Seen&) const = default;
};

Seen seen_here() {
  return {at::autocast::is_autocast_enabled(at::kCPU), at::autocast::get_autocast_dtype(at::kCPU)};
}

thread_local Seen seen_in_forward;
thread_local Seen seen_in_backward;
thread_local at::ScalarType product_in_backward;

// a.mm(b), which autocast lowers, with a backward that calls mm.
template <template <class> class Base>
struct StateProduct : Base<StateProduct<Base>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    seen_in_forward = seen_here();
    ctx->save_for_backward({a, b});
    return a.mm(b);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    seen_in_backward = seen_here();
    const auto saved = ctx->get_saved_variables();
    const Tensor of_a = gradients[0].mm(saved[1].t());
    product_in_backward = of_a.scalar_type();
    return {of_a, saved[0].t().mm(gradients[0])};
  }
};

template <class T>
using KeepingState = mezzo::AutocastAutogradFunction<T>;
using Multiply = StateProduct<KeepingState>;
using TheirMultiply = StateProduct<torch::autograd::Function>;

class AutocastAutogradFunction : public testing::TestWithParam<at::ScalarType> {
 protected:
  Tensor a_ = torch::randn({3, 4}).requires_grad_();
  Tensor b_ = torch::randn({4, 5}).requires_grad_();
};

TEST_P(AutocastAutogradFunction, BackwardUsesForwardDtypeAcrossRegions) {
  const auto other = GetParam() == at::kHalf ? at::kBFloat16 : at::kHalf;
  Tensor c, wrapped_result;
  {
    const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
    c = Multiply::apply(a_, b_);
    wrapped_result = mezzo::AutocastAutogradFunction<TheirMultiply>::apply(a_, b_);
  }
  EXPECT_EQ(c.scalar_type(), GetParam());
  EXPECT_EQ(seen_in_forward, (Seen{true, GetParam()}));
  const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = other});
  for (const Tensor& result : {c, wrapped_result}) {
    seen_in_backward = {};
    result.sum().backward();
    EXPECT_EQ(seen_in_backward, (Seen{true, GetParam()}));
    EXPECT_EQ(seen_here(), (Seen{true, other}));
  }
}

TEST_P(AutocastAutogradFunction, BackwardUsesForwardStateAcrossThreads) {
  Tensor c;
  {
    const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
    c = Multiply::apply(a_, b_);
  }
  Seen seen;
  std::thread([&] {
    c.sum().backward();
    seen = seen_in_backward;
  }).join();
  EXPECT_EQ(seen, (Seen{true, GetParam()}));
}

TEST_P(AutocastAutogradFunction, GradientsEqualPlainOpsUnderAutocast) {
  const auto gradients = [&](auto multiply) {
    const mezzo::AutocastGuard autocast(
        {.device_type = at::kCPU, .dtype = GetParam(), .cache_enabled = false});
    return torch::autograd::grad({multiply(a_, b_).to(at::kFloat).pow(2).sum()}, {a_, b_});
  };
  const auto actual =
      gradients([](const Tensor& a, const Tensor& b) { return Multiply::apply(a, b); });
  const auto expected = gradients([](const Tensor& a, const Tensor& b) { return a.mm(b); });
  EXPECT_EQ(actual[0].scalar_type(), at::kFloat);
  EXPECT_TRUE(torch::equal(actual[0], expected[0]));
  EXPECT_TRUE(torch::equal(actual[1], expected[1]));
}

TEST_P(AutocastAutogradFunction, DoubleBackwardUsesForwardState) {
  Tensor c;
  {
    const mezzo::AutocastGuard autocast({.device_type = at::kCPU, .dtype = GetParam()});
    c = Multiply::apply(a_, b_);
  }
  const auto first = torch::autograd::grad({c.to(at::kFloat).pow(2).sum()}, {a_}, {}, true, true);
  EXPECT_EQ(first[0].scalar_type(), at::kFloat);
  const auto second = torch::autograd::grad({first[0].sum()}, {b_});
  EXPECT_GT(second[0].abs().max().item<float>(), 0.F);
}

INSTANTIATE_TEST_SUITE_P(BothDtypes, AutocastAutogradFunction,
                         testing::Values(at::kHalf, at::kBFloat16),
                         [](const auto& dtype) { return c10::toString(dtype.param); });

TEST(AutocastAutogradFunctionState, BackwardDisabledIfForwardWas) {
  const auto a = torch::randn({3, 4}).requires_grad_();
  const auto c = Multiply::apply(a, torch::randn({4, 5}));
  EXPECT_EQ(c.scalar_type(), at::kFloat);
  const mezzo::AutocastGuard<torch::kCPU> autocast;
  c.sum().backward();
  EXPECT_FALSE(seen_in_forward.enabled);
  EXPECT_FALSE(seen_in_backward.enabled);
  EXPECT_TRUE(seen_here().enabled);
}

TEST(AutocastAutogradFunctionState, BackwardUsesForwardOpOverrides) {
  const auto denying = mezzo::install_op_overrides(mezzo::OpOverrides().deny("mm"));
  const auto allowing = mezzo::install_op_overrides(mezzo::OpOverrides().allow("mm"));
  const auto a = torch::randn({3, 4}).requires_grad_(), b = torch::randn({4, 5});
  const auto dtype_of = [&](const mezzo::OpOverrides& in_forward,
                            const mezzo::OpOverrides& around) {
    const auto y = mezzo::autocast({.device_type = at::kCPU, .op_overrides = in_forward},
                                   [&] { return Multiply::apply(a, b).sum(); });
    const mezzo::AutocastGuard<torch::kCPU> autocast({.op_overrides = around});
    y.backward();
    return product_in_backward;
  };
  EXPECT_EQ(dtype_of(denying, {}), at::kFloat);
  EXPECT_EQ(dtype_of(denying, allowing), at::kFloat);
  EXPECT_EQ(dtype_of({}, denying), at::kBFloat16);
  std::thread([&] { EXPECT_EQ(dtype_of(denying, {}), at::kFloat); }).join();
}

struct Throws : mezzo::AutocastAutogradFunction<Throws> {
  static variable_list forward(AutogradContext*, const Tensor& x, bool in_forward) {
    if (in_forward) throw std::runtime_error("forward");
    return {x * 2, x * 3};
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    throw std::runtime_error("backward");
  }
};

TEST(AutocastAutogradFunctionState, RestoresStateAfterException) {
  const auto x = torch::ones({2}).requires_grad_();
  Tensor y;
  {
    const mezzo::AutocastGuard<torch::kCPU, torch::kHalf> autocast;
    EXPECT_THROW(Throws::apply(x, true), std::runtime_error);
    EXPECT_EQ(seen_here(), (Seen{true, at::kHalf}));
    y = Throws::apply(x, false)[1].sum();
  }
  const auto before = seen_here();
  EXPECT_THROW(y.backward(), std::runtime_error);
  EXPECT_EQ(seen_here(), before);
}

TEST(AutocastAutogradFunctionState, ReturnsForwardResult) {
  using Two = decltype(Throws::apply(std::declval<Tensor>(), false));
  using One = decltype(Multiply::apply(std::declval<Tensor>(), std::declval<Tensor>()));
  EXPECT_TRUE((std::is_same_v<Two, variable_list>));
  EXPECT_TRUE((std::is_same_v<One, Tensor>));
}

}  // namespace
