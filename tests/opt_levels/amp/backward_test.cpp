#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/opt_levels/amp.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../support/save_to_string.h"
#include "../../support/temp_dir.h"
#include "vector_model.h"

namespace {

using namespace initialize_test;
using mezzo::Amp;
using mezzo::InitializeOptions;
using mezzo::OptLevel;
using testing::HasSubstr;
using testing::ThrowsMessage;

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

std::vector<MakeOptimizer> makers() {
  return {
      [](auto p) {
        return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(1).momentum(0.5));
      },
      [](auto p) {
        return std::make_unique<mezzo::optim::SGD>(p, mezzo::optim::SGDOptions(1).momentum(0.5));
      }};
}

std::vector<OptLevel> levels() {
  return {scaled(OptLevel::O0()), scaled(OptLevel::O1()), scaled(OptLevel::O2()),
          scaled(OptLevel::O3()), scaled(OptLevel::O2_bf16())};
}

/// Two models and two optimizers. Loss 0 is for the first optimizer, loss 1 for both, loss 2 for
/// the second. Factors are powers of two, so that every level computes the same sums.
struct ThreeLossTraining {
  ThreeLossTraining(const OptLevel& level, const MakeOptimizer& make, int64_t num_losses)
      : first_optimizer(make(first->parameters())),
        second_optimizer(make(second->parameters())),
        amp(mezzo::initialize({first, second}, {*first_optimizer, *second_optimizer}, level,
                              {.num_losses = num_losses, .verbosity = 0})),
        shares_scale(num_losses == 1) {}

  void iterate(const std::vector<double>& factor, bool delays) {
    first_optimizer->zero_grad();
    second_optimizer->zero_grad();
    const auto id = [&](int64_t loss) { return shares_scale ? 0 : loss; };
    amp.backward(amp.forward(first, filled(factor[0])), *first_optimizer,
                 {.loss_id = id(0), .delay_unscale = delays});
    amp.backward(amp.forward(first, filled(factor[1])) + amp.forward(second, filled(factor[1])),
                 {*first_optimizer, *second_optimizer}, {.loss_id = id(1)});
    amp.backward(amp.forward(second, filled(factor[2])), *second_optimizer,
                 {.loss_id = id(2), .delay_unscale = delays});
  }

  std::vector<bool> step() {
    return {amp.step(*first_optimizer).applied(), amp.step(*second_optimizer).applied()};
  }

  Vector first, second;
  std::unique_ptr<torch::optim::Optimizer> first_optimizer, second_optimizer;
  Amp amp;
  bool shares_scale;
};

// As Apex's test_multiple_models_optimizers_losses.
TEST(AmpBackward, OverflowLowersOnlyScaleOfLoss) {
  for (const auto& make : makers()) {
    for (const OptLevel& level : levels()) {
      for (const int bad_loss : {-1, 0, 1, 2}) {
        for (const bool delays : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << level.name() << " bad " << bad_loss << " delays " << delays);
          ThreeLossTraining training(level, make, 3);
          Vector first;
          Vector second;
          const auto optimizer_of_first = make(first->parameters());
          const auto optimizer_of_second = make(second->parameters());
          for (int iteration = 0; iteration < 3; ++iteration) {
            std::vector<double> factor{0.25, 0.5, 0.125};
            const int bad = iteration == 1 ? bad_loss : -1;
            if (bad >= 0) factor[static_cast<std::size_t>(bad)] = kInfinity;
            training.iterate(factor, delays);
            const std::vector<bool> expected{bad != 0 && bad != 1, bad != 1 && bad != 2};
            EXPECT_EQ(training.step(), expected) << iteration;
            first->weight.mutable_grad() = filled(0.75);
            second->weight.mutable_grad() = filled(0.625);
            if (expected[0]) optimizer_of_first->step();
            if (expected[1]) optimizer_of_second->step();
            EXPECT_EQ(get_weight(training.first), get_weight(first)) << iteration;
            EXPECT_EQ(get_weight(training.second), get_weight(second)) << iteration;
          }
          for (const int loss : {0, 1, 2}) {
            EXPECT_EQ(training.amp.scaler(loss).get_scale(),
                      loss == bad_loss ? kScale / 2 : kScale);
          }
        }
      }
    }
  }
}

// A gradient is a view into a bucket, whose memory the next backward pass writes to.
TEST(AmpBackward, AccumulatesGradientsInBuckets) {
  Vector model;
  mezzo::GradBuckets buckets(model->parameters());
  mezzo::optim::SGD optimizer(model->parameters(), mezzo::optim::SGDOptions(1));
  Amp amp = mezzo::initialize(model, optimizer, scaled(OptLevel::O1()), {.verbosity = 0});
  for (const bool delays : {false, true}) {
    buckets.zero_grad(/*set_to_none=*/false);
    amp.backward(amp.forward(model, filled(0.125)), optimizer);
    buckets.copy_grads_to_buckets();
    amp.backward(amp.forward(model, filled(0.0625)), optimizer);
    amp.backward(amp.forward(model, filled(0.0625)), optimizer, {.delay_unscale = delays});
    EXPECT_EQ(amp.step(optimizer, {.max_norm = 100}).grad_norm(), 0.5);
  }
  EXPECT_EQ(get_weight(model), 0.5F);
}

TEST(AmpBackward, PreservesGradientsThatUnderflowFloat16) {
  for (const auto& make : makers()) {
    Vector model;
    const auto optimizer = make(model->parameters());
    Amp amp = mezzo::initialize(model, *optimizer, OptLevel::O2({.loss_scale = 65536.0}),
                                {.verbosity = 0});
    const double tiny = std::ldexp(1.0, -30);  // of a float32 loss; 0 in float16
    amp.backward(amp.forward(model, filled(0.5)) * tiny, *optimizer);
    EXPECT_EQ(amp.master_params(*optimizer)[0].grad()[0].item<double>(), tiny / 2);
    amp.backward(amp.forward(model, filled(0.5)) * tiny, *optimizer);
    EXPECT_EQ(amp.master_params(*optimizer)[0].grad()[0].item<double>(), tiny);
  }
}

// Apex's DCGAN: losses 0 and 1 train the critic, loss 2 the generator.
TEST(AmpBackward, GanOverflowSkipsOneOptimizer) {
  torch::manual_seed(0);
  torch::nn::Linear generator(2, 3);
  torch::nn::Linear critic(3, 1);
  torch::optim::Adam generator_optimizer(generator->parameters(), 0.01);
  mezzo::optim::AdamW critic_optimizer(critic->parameters(), 0.01);
  Amp amp = mezzo::initialize({generator, critic}, {generator_optimizer, critic_optimizer},
                              scaled(OptLevel::O2()), {.num_losses = 3, .verbosity = 0});
  std::vector<std::pair<int64_t, float>> skips;
  for (int64_t id = 0; id < 3; ++id) {
    amp.scaler(id).on_skip([&](const mezzo::SkippedStep& skipped) {
      skips.emplace_back(skipped.loss_id, skipped.next_scale);
    });
  }
  std::vector<bool> critic_ran;
  std::vector<bool> generator_ran;
  for (int iteration = 0; iteration < 4; ++iteration) {
    critic_optimizer.zero_grad();
    const torch::Tensor fake = amp.forward(generator, torch::rand({4, 2}));
    torch::Tensor real_loss = -amp.forward(critic, torch::rand({4, 3})).mean();
    if (iteration == 1) real_loss = real_loss * kInfinity;
    amp.backward(real_loss, critic_optimizer, {.loss_id = 0});
    amp.backward(amp.forward(critic, fake.detach()).mean(), critic_optimizer, {.loss_id = 1});
    critic_ran.push_back(amp.step(critic_optimizer).applied());

    generator_optimizer.zero_grad();
    torch::Tensor fake_loss = -amp.forward(critic, fake).mean();
    if (iteration == 2) fake_loss = fake_loss * kInfinity;
    amp.backward(fake_loss, generator_optimizer, {.loss_id = 2});
    generator_ran.push_back(amp.step(generator_optimizer).applied());
  }
  EXPECT_EQ(critic_ran, (std::vector<bool>{true, false, true, true}));
  EXPECT_EQ(generator_ran, (std::vector<bool>{true, true, false, true}));
  EXPECT_EQ(skips, (std::vector<std::pair<int64_t, float>>{{0, 64.0F}, {2, 64.0F}}));
  EXPECT_EQ(amp.scaler(1).get_scale(), kScale);
}

TEST(AmpStep, SkipsOnInfAfterBackward) {
  for (const auto& make : makers()) {
    for (const OptLevel& level : levels()) {
      Vector model;
      const auto optimizer = make(model->parameters());
      Amp amp = mezzo::initialize(model, *optimizer, level, {.verbosity = 0});
      amp.backward(amp.forward(model, filled(0.5)), *optimizer);
      amp.master_params(*optimizer)[0].grad()[1] = std::nan("");
      EXPECT_FALSE(amp.step(*optimizer).applied()) << level.name();
      EXPECT_EQ(get_weight(model), 1.0F);
    }
  }
}

// torch.amp's recipe: the gradients in the penalty are unscaled out of place.
TEST(AmpBackward, SupportsGradientPenalty) {
  for (const OptLevel& level : {OptLevel::O0(), OptLevel::O1(), OptLevel::O2()}) {
    torch::manual_seed(0);
    torch::nn::Linear net(3, 1);
    torch::nn::Linear reference(3, 1);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.copy_(parameter.to(torch::kHalf));
      reference->weight.copy_(net->weight);
      reference->bias.copy_(net->bias);
    }
    const torch::Tensor input = torch::rand({4, 3}).to(torch::kHalf).to(torch::kFloat);
    const auto compute_penalty = [](const std::vector<torch::Tensor>& gradients) {
      torch::Tensor sum = torch::zeros({});
      for (const auto& gradient : gradients) sum = sum + gradient.to(torch::kFloat).pow(2).sum();
      return sum.sqrt();
    };

    torch::optim::SGD optimizer(net->parameters(), 0.1);
    Amp amp = mezzo::initialize(net, optimizer, scaled(level), {.verbosity = 0});
    torch::Tensor loss = amp.forward(net, input).to(torch::kFloat).pow(2).mean();
    std::vector<torch::Tensor> gradients =
        torch::autograd::grad({amp.scaler().scale(loss)}, net->parameters(), {}, true, true);
    const double inverse = 1.0 / amp.scaler().get_scale();
    for (auto& gradient : gradients) gradient = gradient.to(torch::kFloat) * inverse;
    amp.backward(loss + compute_penalty(gradients), optimizer);

    const torch::Tensor reference_loss = reference(input).pow(2).mean();
    const auto reference_gradients =
        torch::autograd::grad({reference_loss}, reference->parameters(), {}, true, true);
    (reference_loss + compute_penalty(reference_gradients)).backward();
    EXPECT_TRUE(
        amp.master_params(optimizer)[0].grad().allclose(reference->weight.grad(), 2e-2, 2e-3))
        << level.name();
    EXPECT_TRUE(amp.step(optimizer).applied());
  }
}

TEST(AmpStateDict, ResumesFromApexAndFullForm) {
  const auto make = [](const std::shared_ptr<VectorImpl>& model,
                       torch::optim::Optimizer& optimizer) {
    return mezzo::initialize(model, optimizer, scaled(OptLevel::O2()),
                             {.num_losses = 2, .verbosity = 0});
  };
  Vector model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  Amp amp = make(model.ptr(), optimizer);
  amp.backward(amp.forward(model, filled(0.25)), optimizer, {.loss_id = 1});
  EXPECT_THAT([&] { (void)amp.state_dict(); },
              ThrowsMessage<c10::Error>(HasSubstr("has not stepped yet")));
  amp.step(optimizer);
  amp.backward(amp.forward(model, filled(kInfinity)), optimizer, {.loss_id = 0});
  amp.step(optimizer);
  const Amp::StateDict state = amp.state_dict();
  EXPECT_EQ(state.at("loss_scaler0").at("loss_scale"), kScale / 2);
  EXPECT_EQ(state.at("loss_scaler1").at("unskipped"), 1);

  Vector other;
  torch::optim::SGD other_optimizer(other->parameters(), 1.0);
  Amp resumed = make(other.ptr(), other_optimizer);
  resumed.load_state_dict(state);
  EXPECT_EQ(resumed.state_dict(), state);
  resumed.load_state_dict({{"loss_scaler0", {{"loss_scale", 4.0}, {"unskipped", 7}}},
                           {"loss_scaler1", {{"loss_scale", 8.0}, {"unskipped", 0}}}});
  EXPECT_EQ(resumed.scaler(0).get_scale(), 4);
  EXPECT_EQ(resumed.state_dict().at("loss_scaler0").at("_growth_tracker"), 7);
  EXPECT_THAT(
      [&] {
        resumed.load_state_dict({{"loss_scaler0", state.at("loss_scaler0")}});
      },
      ThrowsMessage<c10::Error>(HasSubstr("state_dict contains 1 entries, while 2")));
  EXPECT_EQ(resumed.scaler(0).get_scale(), 4);

  test_support::load_from_string(resumed, test_support::save_to_string(amp));
  EXPECT_EQ(resumed.state_dict(), state);
}

TEST(AmpStateDict, InvalidCheckpointThrowsBeforeLoading) {
  Vector model, other;
  torch::optim::SGD optimizer(model->parameters(), 1.0), other_optimizer(other->parameters(), 1.0);
  Amp one = mezzo::initialize(model, optimizer, OptLevel::O1(), {.verbosity = 0});
  Amp two =
      mezzo::initialize(other, other_optimizer, OptLevel::O1(), {.num_losses = 2, .verbosity = 0});
  const test_support::TempDir temp_dir;
  const auto file = temp_dir.path() / "state.pt";
  int64_t epoch = 1;
  mezzo::save_checkpoint(file, mezzo::TrainingState().add("epoch", epoch).add("amp", one));
  epoch = 9;
  EXPECT_THAT(
      [&] {
        mezzo::load_checkpoint(file, mezzo::TrainingState().add("epoch", epoch).add("amp", two));
      },
      ThrowsMessage<c10::Error>(HasSubstr("state_dict contains 1 entries, while 2")));
  EXPECT_EQ(epoch, 9);
}

TEST(AmpStateDict, BadEntryPreservesAllScalers) {
  Vector model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  Amp amp = mezzo::initialize(model, optimizer, scaled(OptLevel::O2()),
                              {.num_losses = 2, .verbosity = 0});
  const Amp::StateDict before = amp.state_dict();
  using Entry = mezzo::GradScaler::StateDict;
  for (const Entry& bad : std::vector<Entry>{{},
                                             {{"loss_scale", 2}},
                                             {{"loss_scale", -1}, {"unskipped", 0}},
                                             {{"loss_scale", std::nan("")}, {"unskipped", 0}},
                                             {{"loss_scale", 2}, {"unskipped", 0.5}}}) {
    const Entry good{{"loss_scale", 2}, {"unskipped", 1}};
    EXPECT_THROW(amp.load_state_dict({{"loss_scaler0", good}, {"loss_scaler1", bad}}), c10::Error);
    EXPECT_THROW(amp.load_state_dict({{"loss_scaler0", good}, {"loss_scaler2", good}}), c10::Error);
    EXPECT_THROW(amp.load_state_dict({{"loss_scaler0", good}}), c10::Error);
    EXPECT_EQ(amp.state_dict(), before);
  }
}

TEST(Amp, ThrowsForWrongCallOrder) {
  Vector model;
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  torch::optim::SGD unregistered(model->parameters(), 1.0);
  Amp amp = mezzo::initialize(model, optimizer, scaled(OptLevel::O2()), {.verbosity = 0});
  const auto expect = [](const std::function<void()>& call, const char* text) {
    EXPECT_THAT(call, ThrowsMessage<c10::Error>(HasSubstr(text)));
  };
  expect([&] { amp.step(optimizer); }, "no loss was scaled for this optimizer since its last step");
  const torch::Tensor loss = amp.forward(model, filled(0.5));
  expect([&] { amp.backward(loss, optimizer, {.loss_id = 1}); }, "loss_id is 1");
  expect([&] { amp.backward(loss, optimizer, {.loss_id = -1}); }, "loss_id is -1");
  expect([&] { amp.forward(Vector(nullptr), filled(0.5)); }, "an empty holder or a null pointer");
  expect([&] { amp.backward(loss, {}); }, "Amp: no optimizer");
  expect([&] { amp.backward(loss, unregistered); }, "was not passed to mezzo::initialize");
  expect([&] { amp.backward(torch::Tensor(), optimizer); }, "loss is undefined");
  amp.backward(loss, optimizer);
  amp.step(optimizer);
  expect([&] { amp.step(optimizer); }, "no loss was scaled for this optimizer since its last step");
}

}  // namespace
