// mezzo's optimizers of libtorch's names beside libtorch's: the same answers, and files that go
// both ways.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "../support/warnings.h"

namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

/// Parameters of several shapes, and a second set of equal values, which get the same gradients.
struct Twins {
  explicit Twins(torch::ScalarType dtype) {
    torch::manual_seed(1);
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{17, 9}, {1}, {0}, {30000}, {3, 1, 5}}) {
      const auto values = torch::randn(shape, torch::kDouble).to(dtype);
      ours.push_back(values.clone().requires_grad_());
      theirs.push_back(values.clone().requires_grad_());
    }
  }

  void step(torch::optim::Optimizer& left, torch::optim::Optimizer& right, int steps) const {
    for (int step = 0; step < steps; ++step) {
      for (std::size_t i = 0; i < ours.size(); ++i) {
        ours[i].mutable_grad() = torch::randn(ours[i].sizes(), ours[i].scalar_type());
        theirs[i].mutable_grad() = ours[i].grad().clone();
      }
      left.step();
      right.step();
    }
  }

  double difference() const {
    double largest = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (ours[i].numel() == 0) continue;
      largest = std::max(largest, (ours[i] - theirs[i]).abs().max().item<double>());
    }
    return largest;
  }

  std::vector<torch::Tensor> ours, theirs;
};

template <class Ours, class Theirs, class Options>
void expect_torchs_answers(const Options& options) {
  const test_support::Warnings warnings;  // a file of torch::optim::SGD lacks a count
  for (const auto& [dtype, tolerance] :
       {std::pair(torch::kFloat, 2e-5), std::pair(torch::kDouble, 1e-13)}) {
    SCOPED_TRACE(dtype);
    const Twins twins(dtype);
    Ours ours(twins.ours, options);
    Theirs theirs(twins.theirs, options);
    twins.step(ours, theirs, 50);
    EXPECT_LT(twins.difference(), tolerance);
    std::stringstream our_file, their_file;
    torch::save(ours, our_file);
    torch::save(theirs, their_file);
    Ours of_their_file(twins.ours, Options(7.0));
    Theirs of_our_file(twins.theirs, Options(7.0));
    torch::load(of_their_file, their_file);
    torch::load(of_our_file, our_file);
    twins.step(of_their_file, of_our_file, 3);
    EXPECT_LT(twins.difference(), tolerance);
  }
}

TEST(TorchsAnswers, AreAdamWs) {
  const auto options = AdamWOptions(1e-2).weight_decay(0.1).betas({0.8, 0.95}).eps(1e-6);
  for (const bool amsgrad : {false, true}) {
    expect_torchs_answers<mezzo::optim::AdamW, torch::optim::AdamW>(
        AdamWOptions(options).amsgrad(amsgrad));
  }
}

TEST(TorchsAnswers, AreAdams) {
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      expect_torchs_answers<mezzo::optim::Adam, torch::optim::Adam>(
          AdamOptions(1e-2).weight_decay(weight_decay).amsgrad(amsgrad));
    }
  }
}

TEST(TorchsAnswers, AreSgds) {
  for (const SGDOptions& options :
       {SGDOptions(1e-2), SGDOptions(1e-2).weight_decay(0.1), SGDOptions(1e-2).momentum(0.9),
        SGDOptions(1e-2).momentum(0.9).dampening(0.5),
        SGDOptions(1e-2).momentum(0.9).weight_decay(0.1),
        SGDOptions(1e-2).momentum(0.9).nesterov(true),
        SGDOptions(1e-2).momentum(0.8).weight_decay(0.1).nesterov(true)}) {
    expect_torchs_answers<mezzo::optim::SGD, torch::optim::SGD>(options);
  }
}

TEST(SGD, RemembersNothingWithoutMomentum) {
  const auto x = torch::ones({3});
  x.mutable_grad() = torch::ones({3});
  mezzo::optim::SGD optimizer({x}, SGDOptions(0.5));
  optimizer.step();
  EXPECT_TRUE(torch::equal(x, torch::full({3}, 0.5)));
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(SGD, BeginsABufferAsTorchDoesWhenMomentumIsTurnedOnLater) {
  const Twins twins(torch::kDouble);
  mezzo::optim::SGD ours(twins.ours, SGDOptions(1e-2));
  torch::optim::SGD theirs(twins.theirs, SGDOptions(1e-2));
  twins.step(ours, theirs, 3);
  for (const double momentum : {0.9, 0.0, 0.8}) {
    for (torch::optim::Optimizer* const one : {static_cast<torch::optim::Optimizer*>(&ours),
                                               static_cast<torch::optim::Optimizer*>(&theirs)}) {
      static_cast<SGDOptions&>(one->param_groups()[0].options()).momentum(momentum).dampening(0.5);
    }
    twins.step(ours, theirs, 3);
    EXPECT_LT(twins.difference(), 1e-14) << momentum;
  }
}

TEST(SGD, RefusesNesterovWithoutMomentumOrWithDampening) {
  const std::vector<torch::Tensor> x{torch::ones({1})};
  EXPECT_THAT([&] { mezzo::optim::SGD(x, SGDOptions(1).nesterov(true)); },
              ThrowsMessage<c10::Error>(HasSubstr("it needs a positive momentum")));
  EXPECT_THAT(
      [&] { mezzo::optim::SGD(x, SGDOptions(1).momentum(0.9).dampening(0.1).nesterov(true)); },
      ThrowsMessage<c10::Error>(HasSubstr("dampening 0.1")));
}

}  // namespace
