#include <mezzo/autocast/activation_checkpoint.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../support/message_of.h"

namespace {

using test_support::message_of;
using testing::HasSubstr;
using torch::Tensor;

class ActivationCheckpointErrors : public testing::Test {
 protected:
  // Returns the error of backward through a function that runs `first` in forward and `second`
  // later.
  template <class First, class Second>
  std::string error_when_it_changes(First first, Second second) {
    bool again = false;
    const auto y = mezzo::activation_checkpoint(
        [&](const Tensor& x) { return std::exchange(again, true) ? second(x) : first(x); }, x_);
    return message_of([&] { y.sum().backward(); });
  }

  Tensor x_ = torch::randn({4, 4}).requires_grad_();
  Tensor w_ = torch::randn({4, 4}).requires_grad_();
  Tensor v_ = torch::randn({4, 4}).requires_grad_();
};

TEST_F(ActivationCheckpointErrors, ThrowsForOtherParameters) {
  EXPECT_THAT(error_when_it_changes([this](const Tensor& x) { return x.mm(w_); },
                                    [this](const Tensor& x) { return x.mm(v_); }),
              testing::AllOf(HasSubstr("used other parameters"),
                             HasSubstr("runs again in backward and must compute the same")));
}

TEST_F(ActivationCheckpointErrors, ThrowsForParameterCreatedInside) {
  const auto block = [](const Tensor& x) { return x.mm(torch::ones({4, 4}).requires_grad_()); };
  EXPECT_THAT(error_when_it_changes(block, block), HasSubstr("created such a tensor"));
}

TEST_F(ActivationCheckpointErrors, ThrowsForMissingResult) {
  const auto list = [](std::size_t size) {
    return [size](const Tensor& x) { return std::vector<Tensor>(size, x.exp()); };
  };
  bool again = false;
  const auto y = mezzo::activation_checkpoint(
      [&](const Tensor& x) { return list(std::exchange(again, true) ? 1 : 2)(x); }, x_);
  EXPECT_THAT(message_of([&] { (y[0] + y[1]).sum().backward(); }),
              HasSubstr("result 1 of the forward is missing"));
}

TEST_F(ActivationCheckpointErrors, ThrowsForDoubleBackward) {
  const auto y = mezzo::activation_checkpoint([](const Tensor& x) { return x.exp(); }, x_).sum();
  EXPECT_THAT(message_of([&] {
                torch::autograd::grad({y}, {x_}, {}, /*retain_graph=*/true, /*create_graph=*/true);
              }),
              HasSubstr("gradients of gradients (create_graph) are not supported"));
}

TEST_F(ActivationCheckpointErrors, ThrowsForArgumentModifiedBeforeBackward) {
  const auto mask = torch::ones({4, 4});
  const auto y = mezzo::activation_checkpoint(
      [](const Tensor& x, const Tensor& m) { return (x * m).exp(); }, x_, mask);
  mask.zero_();
  EXPECT_THAT(
      message_of([&] { y.sum().backward(); }),
      HasSubstr("a tensor argument was modified in place between its forward and its backward"));
}

TEST_F(ActivationCheckpointErrors, ThrowsForInPlaceFunction) {
  EXPECT_THAT(message_of([&] {
                mezzo::activation_checkpoint([](Tensor x) { return x.mul_(2) + 1; }, x_.mm(w_));
              }),
              HasSubstr("a tensor argument was modified in place by the function itself"));
}

TEST_F(ActivationCheckpointErrors, RethrowsFunctionExceptions) {
  EXPECT_THROW(mezzo::activation_checkpoint(
                   [](const Tensor& x) -> Tensor {
                     if (x.defined()) throw std::logic_error("no");
                     return x;
                   },
                   x_),
               std::logic_error);
  bool again = false;
  const auto y = mezzo::activation_checkpoint(
      [&](const Tensor& x) {
        if (std::exchange(again, true)) throw std::logic_error("no");
        return x.exp();
      },
      x_);
  EXPECT_THROW(y.sum().backward(), std::logic_error);
  EXPECT_FALSE(x_.grad().defined());
}

TEST_F(ActivationCheckpointErrors, BackwardSucceedsAfterFailedRecomputation) {
  int runs = 0;
  const auto y = mezzo::activation_checkpoint(
                     [&](const Tensor& x) { return ++runs == 2 ? x.mm(w_) : x.exp(); }, x_)
                     .sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x_}, {}, /*retain_graph=*/true), c10::Error);
  EXPECT_TRUE(torch::equal(torch::autograd::grad({y}, {x_})[0], x_.exp()));
}

}  // namespace
