// Which updates 16-bit weights round to nothing, beside a count by hand.

#include <mezzo/diagnose/telemetry.h>
#include <mezzo/diagnose/update_watch.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace {

using mezzo::UpdateSample;
using mezzo::optim::AdamWOptions;
using mezzo::optim::WeightStorage;
using testing::HasSubstr;

struct Net : torch::nn::Module {
  Net() {
    torch::manual_seed(0);
    body = register_module("body", torch::nn::Linear(16, 16));
    head = register_module("head", torch::nn::Linear(16, 16));
    to(torch::kBFloat16);
  }
  torch::Tensor loss() {
    const auto x = torch::ones({4, 16}, torch::kBFloat16);
    return head->forward(body->forward(x)).to(torch::kFloat).square().mean();
  }
  torch::nn::Linear body{nullptr}, head{nullptr};
};

/// The samples of a run of 12 steps, one after every third, with the last weights moved by hand.
std::vector<UpdateSample> samples_of(double rate, WeightStorage storage, bool clears = false) {
  Net net;
  mezzo::optim::AdamW optimizer(net.parameters(), AdamWOptions(rate).weight_storage(storage));
  std::vector<UpdateSample> seen;
  mezzo::Telemetry telemetry;
  telemetry.write_to(mezzo::UpdateWatch(
      net, optimizer,
      {.every = 3, .callback = [&seen](const UpdateSample& one) { seen.push_back(one); }}));
  mezzo::GradScaler scaler({.init_scale = 1});
  for (int step = 0; step < 12; ++step) {
    optimizer.zero_grad();
    const auto loss = net.loss();
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer, {.zero_grad = clears});
    scaler.update();
    telemetry.record(result, loss);
  }
  telemetry.flush();
  return seen;
}

TEST(UpdateWatch, CountsTheUpdatesThatRoundToNothing) {
  const auto small = samples_of(1e-7, WeightStorage::plain);
  ASSERT_EQ(small.size(), 3);
  EXPECT_EQ(small[0].step, 4) << "between the records 3 and 4";
  EXPECT_GT(small[0].share, 0.95);
  EXPECT_EQ(small[0].parameters.size(), 4);
  EXPECT_THAT(small[0].message(),
              testing::AllOf(HasSubstr("Step 4: 16-bit weights round"), HasSubstr("body.weight"),
                             HasSubstr("use WeightStorage::master, or stochastic")));
  for (const auto& large : samples_of(1e-1, WeightStorage::plain)) EXPECT_LT(large.share, 0.05);
}

TEST(UpdateWatch, AgreesWithACountByHand) {
  Net net;
  mezzo::optim::AdamW optimizer(net.parameters(), AdamWOptions(3e-4));
  std::vector<UpdateSample> seen;
  mezzo::UpdateWatch watch(net, optimizer,
                           {.every = 2,
                            .elements = 1 << 20,
                            .callback = [&seen](const UpdateSample& one) { seen.push_back(one); }});
  for (int step = 1; step <= 3; ++step) {
    optimizer.zero_grad();
    net.loss().backward();
    const auto before = net.body->weight.detach().clone();
    optimizer.step();
    watch({.step = step});
    if (step != 3) continue;
    const auto has_gradient = net.body->weight.grad().ne(0);
    const auto stays = net.body->weight.detach().eq(before).logical_and(has_gradient);
    const double share = stays.sum().item<double>() / has_gradient.sum().item<double>();
    ASSERT_EQ(seen.size(), 1);
    const auto own = std::find_if(seen[0].parameters.begin(), seen[0].parameters.end(),
                                  [](const auto& one) { return one.parameter == "body.weight"; });
    EXPECT_EQ(own->share, share);
    EXPECT_EQ(own->sampled, has_gradient.sum().item<std::int64_t>());
    EXPECT_GT(share, 0.1);
    EXPECT_LT(share, 0.9);
  }
}

TEST(UpdateWatch, SaysNothingWhereUpdatesAreKeptOrNotKnown) {
  EXPECT_THAT(samples_of(1e-7, WeightStorage::master), testing::IsEmpty());
  EXPECT_THAT(samples_of(1e-7, WeightStorage::stochastic), testing::IsEmpty());
  EXPECT_THAT(samples_of(0, WeightStorage::plain), testing::IsEmpty()) << "a rate of 0";
  EXPECT_THAT(samples_of(1e-7, WeightStorage::plain, /*clears=*/true), testing::IsEmpty());
}

TEST(UpdateWatch, SaysNothingOfMastersWhereverTheOptionsAreKept) {
  const auto samples = [](Net& net, auto& optimizer) {
    std::vector<UpdateSample> seen;
    mezzo::UpdateWatch watch(
        net, optimizer,
        {.every = 2, .callback = [&seen](const UpdateSample& one) { seen.push_back(one); }});
    for (int step = 1; step <= 5; ++step) {
      net.zero_grad();
      net.loss().backward();
      optimizer.step();
      watch({.step = step});
    }
    return seen;
  };
  Net net, other;
  torch::optim::SGD sgd(net.parameters(), 1e-9);
  mezzo::MasterWeights masters(sgd);
  EXPECT_THAT(samples(net, masters), testing::IsEmpty());
  const std::vector<torch::optim::OptimizerParamGroup> groups{
      {other.parameters(), std::make_unique<torch::optim::AdamWOptions>(1e-7)}};
  mezzo::optim::AdamW optimizer(groups,
                                AdamWOptions(1e-7).weight_storage(WeightStorage::split_master));
  EXPECT_THAT(samples(other, optimizer), testing::IsEmpty()) << "the defaults say how";
}

TEST(UpdateWatch, TellsStandardErrorOnce) {
  Net net;
  torch::optim::SGD optimizer(net.parameters(), 1e-9);
  mezzo::UpdateWatch watch(net, optimizer, {.every = 2});
  testing::internal::CaptureStderr();
  for (int step = 1; step <= 9; ++step) {
    optimizer.zero_grad();
    net.loss().backward();
    optimizer.step();
    watch({.step = step, .skipped = step == 3});
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("Step 5: 16-bit weights round 100 % of the updates to nothing"));
  EXPECT_EQ(said.find("Step 7"), std::string::npos);
}

TEST(UpdateWatch, RefusesToLookAtEachStep) {
  Net net;
  torch::optim::SGD optimizer(net.parameters(), 1e-3);
  EXPECT_THROW(mezzo::UpdateWatch(net, optimizer, {.every = 1}), c10::Error);
  EXPECT_THROW(mezzo::UpdateWatch(net, optimizer, {.elements = 0}), c10::Error);
}

}  // namespace
