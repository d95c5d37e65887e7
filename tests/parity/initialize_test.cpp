// Apex's tests of amp.initialize and amp.scale_loss: several models, optimizers and losses, some of
// which overflow; param groups added later; checkpoints. Its models and numbers, at each level, in
// half and bfloat16, with libtorch's SGD and mezzo's.

#include <mezzo/levels/initialize.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../support/special_values.h"

namespace {

using mezzo::Amp;
using mezzo::OptLevel;
using torch::Tensor;
using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;

/// Apex's: two weights, of which its second is half from the start. Here `initialize` casts both,
/// since it refuses a model that somebody else has cast.
struct TwoWeightsImpl : torch::nn::Module {
  explicit TwoWeightsImpl(float unique)
      : weight0(register_parameter("weight0", unique + torch::arange(2, torch::kFloat))),
        weight1(register_parameter("weight1", 1 + unique + torch::arange(2, torch::kFloat))) {}

  Tensor forward(const Tensor& input) {
    return (input * weight0.to(torch::kFloat) * weight1.to(torch::kFloat)).sum();
  }

  Tensor weight0, weight1;
};
using TwoWeights = std::shared_ptr<TwoWeightsImpl>;

struct Group {
  std::size_t model;
  double lr;
};

/// Who trains what: groups of each optimizer, models of each loss, and the optimizers that a loss
/// is scaled for.
struct Scene {
  std::string name;
  std::vector<std::vector<Group>> optimizers;
  std::vector<double> momenta;
  std::vector<std::vector<std::size_t>> losses;
  std::vector<std::vector<std::size_t>> scaled_for;
};

const std::vector<Scene>& scenes() {
  static const std::vector<Scene> all{
      {"2Models2Losses1Optimizer", {{{0, .25}, {1, .5}}}, {.125}, {{0}, {1}}, {{0}, {0}}},
      {"3Models2Losses1Optimizer",
       {{{0, .25}, {1, .5}, {2, .125}}},
       {.125},
       {{0, 2}, {1, 2}},
       {{0}, {0}}},
      {"2Models2Losses2Optimizers", {{{0, .25}}, {{1, .5}}}, {.125, .25}, {{0}, {1}}, {{0}, {1}}},
      {"3Models2Losses2Optimizers",
       {{{0, .25}, {1, 1.0}}, {{2, .5}}},
       {.5, .25},
       {{0, 1}, {2, 1}},
       {{0}, {0, 1}}}};
  return all;
}

/// Where an inf is put, if at all.
struct Injection {
  int iteration = -1;
  std::size_t loss = 0;
  std::size_t model = 0;
  bool in_weight1 = false;
};

enum class Zeroing { none, model, optimizer };

std::vector<TwoWeights> make_models(const Scene& scene) {
  std::size_t count = 0;
  for (const auto& groups : scene.optimizers) count += groups.size();
  std::vector<TwoWeights> models;
  for (std::size_t i = 0; i < count; ++i) {
    models.push_back(std::make_shared<TwoWeightsImpl>(static_cast<float>(i + 1)));
  }
  return models;
}

template <class Sgd, class Options>
OptimizerPointer make_sgd(const std::vector<TwoWeights>& models, const std::vector<Group>& groups,
                          double momentum) {
  OptimizerPointer optimizer;
  for (const Group& group : groups) {
    auto options = std::make_unique<Options>(group.lr);
    options->momentum(momentum);
    const auto parameters = models[group.model]->parameters();
    if (optimizer == nullptr) {
      optimizer = std::make_unique<Sgd>(parameters, *options);
    } else {
      optimizer->add_param_group({parameters, std::move(options)});
    }
  }
  return optimizer;
}

using MakeSgd = OptimizerPointer (*)(const std::vector<TwoWeights>&, const std::vector<Group>&,
                                     double);
constexpr MakeSgd kTorchs = make_sgd<torch::optim::SGD, torch::optim::SGDOptions>;
constexpr MakeSgd kMezzos = make_sgd<mezzo::optim::SGD, mezzo::optim::SGDOptions>;

/// Models and optimizers of a scene.
struct Training {
  Training(const Scene& scene_in, MakeSgd make) : scene(scene_in), models(make_models(scene_in)) {
    for (std::size_t i = 0; i < scene.optimizers.size(); ++i) {
      optimizers.push_back(make(models, scene.optimizers[i], scene.momenta[i]));
    }
  }

  void zero(Zeroing how) const {
    for (const auto& model : models) {
      if (how == Zeroing::model) model->zero_grad();
      for (const auto& parameter : model->parameters()) {
        if (how == Zeroing::none) parameter.mutable_grad() = Tensor();
      }
    }
    if (how != Zeroing::optimizer) return;
    for (const auto& optimizer : optimizers) optimizer->zero_grad();
  }

  const Scene& scene;
  std::vector<TwoWeights> models;
  std::vector<OptimizerPointer> optimizers;
};

std::vector<Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

const Tensor& ones() {
  static const Tensor tensor = torch::ones({2});
  return tensor;
}

bool skips(const Scene& scene, const Injection& injection, int iteration, std::size_t optimizer) {
  if (iteration != injection.iteration) return false;
  const auto& all = scene.scaled_for[injection.loss];
  return std::find(all.begin(), all.end(), optimizer) != all.end();
}

/// What float gives: the gradients of each iteration, optimizer and parameter, and the weights.
struct Reference {
  std::vector<std::vector<std::vector<Tensor>>> gradients;
  std::vector<std::vector<Tensor>> weights;
};

Reference reference_of(const Scene& scene, const Injection& injection, int iterations) {
  Training training(scene, kTorchs);
  Reference reference;
  for (int i = 0; i < iterations; ++i) {
    training.zero(Zeroing::model);
    for (const auto& models : scene.losses) {
      Tensor loss = torch::zeros({});
      for (const auto model : models) loss = loss + training.models[model]->forward(ones());
      loss.backward();
    }
    auto& of_iteration = reference.gradients.emplace_back();
    for (std::size_t o = 0; o < training.optimizers.size(); ++o) {
      auto& of_optimizer = of_iteration.emplace_back();
      for (const auto& parameter : parameters_of(*training.optimizers[o])) {
        of_optimizer.push_back(parameter.grad().clone());
      }
      if (!skips(scene, injection, i, o)) training.optimizers[o]->step();
    }
  }
  for (const auto& optimizer : training.optimizers) {
    reference.weights.push_back(parameters_of(*optimizer));
  }
  return reference;
}

struct Level {
  std::string name;
  OptLevel level;
  bool has_low_precision;
  double tolerance;  ///< of weights that are stored in low precision
};

/// The three kinds of precision that a test compares in.
const std::vector<Level>& levels() {
  static const std::vector<Level> all{
      {"O0", OptLevel::O0(), false, 1e-6},
      {"O1", OptLevel::O1(), true, 1e-6},
      {"O2", OptLevel::O2(), true, 2e-3},
      {"O3", OptLevel::O3(), false, 4e-3},
      {"O1_bf16", OptLevel::O1_bf16({.loss_scale = "dynamic"}), true, 1e-6},
      {"O2_bf16", OptLevel::O2_bf16({.loss_scale = "dynamic"}), true, 2e-2},
      {"O3_bf16", OptLevel::O3_bf16(), false, 4e-2}};
  return all;
}

void set_scales(Amp& amp, const std::vector<double>& scales) {
  Amp::StateDict state;
  for (std::size_t i = 0; i < scales.size(); ++i) {
    state["loss_scaler" + std::to_string(i)] = {{"loss_scale", scales[i]}, {"unskipped", 0}};
  }
  amp.load_state_dict(state);
}

void expect_close(const Tensor& got, const Tensor& expected, double tolerance,
                  const std::string& where) {
  EXPECT_TRUE(torch::allclose(got.to(torch::kFloat), expected.to(torch::kFloat), tolerance, 1e-6))
      << where << '\n'
      << got << '\n'
      << expected;
}

class ManyLosses : public testing::TestWithParam<Scene> {
 protected:
  void run(const Level& level, MakeSgd make, Zeroing zeroing, bool several_scalers,
           const Injection& injection) const {
    const Scene& scene = GetParam();
    const int iterations = injection.iteration >= 0 ? 3 : 2;
    const Reference reference = reference_of(scene, injection, iterations);
    Training training(scene, make);
    Amp amp = mezzo::initialize(training.models, training.optimizers, level.level,
                                {.num_losses = several_scalers ? 2 : 1, .verbosity = 0});
    const std::vector<double> scales{4.0, 16.0};
    if (level.has_low_precision) {
      set_scales(amp, {scales.begin(), scales.begin() + amp.num_losses()});
    }
    const std::string where = level.name + (make == kMezzos ? " mezzo" : " torch") +
                              (several_scalers ? " two scales" : " one scale") + " inf at " +
                              std::to_string(injection.iteration) + " loss " +
                              std::to_string(injection.loss);
    for (int i = 0; i < iterations; ++i) {
      training.zero(zeroing);
      for (std::size_t loss = 0; loss < 2; ++loss) {
        const bool breaks = i == injection.iteration && loss == injection.loss;
        backward(amp, training, loss, several_scalers ? loss : 0, breaks ? &injection : nullptr);
      }
      for (std::size_t o = 0; o < training.optimizers.size(); ++o) {
        torch::optim::Optimizer& optimizer = *training.optimizers[o];
        if (i != injection.iteration) {
          const auto trained = amp.master_params(optimizer);
          const auto& expected = reference.gradients[static_cast<std::size_t>(i)][o];
          for (std::size_t p = 0; p < trained.size(); ++p) {
            expect_close(trained[p].grad(), expected[p], level.tolerance, where + " gradient");
          }
        }
        const auto result = amp.step(optimizer);
        EXPECT_EQ(result.ran(), !skips(scene, injection, i, o)) << where;
      }
    }
    for (std::size_t o = 0; o < training.optimizers.size(); ++o) {
      const auto weights = parameters_of(*training.optimizers[o]);
      const auto masters = amp.master_params(*training.optimizers[o]);
      for (std::size_t p = 0; p < weights.size(); ++p) {
        expect_close(weights[p], reference.weights[o][p], level.tolerance, where + " weight");
        EXPECT_TRUE(torch::equal(weights[p], masters[p].to(weights[p].scalar_type()))) << where;
      }
    }
    if (!level.has_low_precision) return;
    for (int64_t id = 0; id < amp.num_losses(); ++id) {
      const bool overflowed = injection.iteration >= 0 &&
                              (!several_scalers || static_cast<std::size_t>(id) == injection.loss);
      EXPECT_EQ(amp.scaler(id).get_scale(),
                scales[static_cast<std::size_t>(id)] / (overflowed ? 2 : 1))
          << where << ": only the scale of the loss that overflowed backs off";
    }
  }

 private:
  static void backward(Amp& amp, const Training& training, std::size_t loss, std::size_t loss_id,
                       const Injection* injection) {
    Tensor value = torch::zeros({});
    for (const auto model : training.scene.losses[loss]) {
      value = value + amp(training.models[model], ones());
    }
    std::vector<torch::optim::Optimizer*> optimizers;
    for (const auto o : training.scene.scaled_for[loss]) {
      optimizers.push_back(training.optimizers[o].get());
    }
    amp.scale_loss(value, optimizers, {.loss_id = static_cast<int64_t>(loss_id)},
                   [&](const Tensor& scaled) {
                     scaled.backward();
                     if (injection == nullptr) return;
                     const auto& model = training.models[injection->model];
                     const Tensor& weight = injection->in_weight1 ? model->weight1 : model->weight0;
                     weight.mutable_grad()[0] = kInfinity;
                   });
  }
};

std::vector<Injection> injections(const Scene& scene, bool has_low_precision) {
  std::vector<Injection> all{Injection{}};
  if (!has_low_precision) return all;
  for (const int iteration : {0, 1}) {
    for (const std::size_t loss : {std::size_t{0}, std::size_t{1}}) {
      for (const std::size_t model : scene.losses[loss]) {
        all.push_back({iteration, loss, model, false});
        all.push_back({iteration, loss, model, true});
      }
    }
  }
  return all;
}

void run_all(const Scene& scene,
             const std::function<void(const Level&, Zeroing, bool, const Injection&)>& run) {
  for (const Level& level : levels()) {
    for (const auto zeroing : {Zeroing::none, Zeroing::model, Zeroing::optimizer}) {
      for (const bool several_scalers : {true, false}) {
        for (const auto& injection : injections(scene, level.has_low_precision)) {
          run(level, zeroing, several_scalers, injection);
        }
      }
    }
  }
}

TEST_P(ManyLosses, TrainLibtorchsSgdAsFloatWouldButForSkippedSteps) {
  run_all(GetParam(), [&](const Level& level, Zeroing zeroing, bool several, const Injection& inf) {
    run(level, kTorchs, zeroing, several, inf);
  });
}

TEST_P(ManyLosses, TrainMezzosSgdAsFloatWouldButForSkippedSteps) {
  run_all(GetParam(), [&](const Level& level, Zeroing zeroing, bool several, const Injection& inf) {
    run(level, kMezzos, zeroing, several, inf);
  });
}

INSTANTIATE_TEST_SUITE_P(Apexs, ManyLosses, testing::ValuesIn(scenes()),
                         [](const auto& scene) { return "With" + scene.param.name; });

// test_add_param_group.

void train_with_a_later_group(const Level* level, MakeSgd make, bool zero_before_add,
                              bool accumulate, Zeroing zeroing, std::vector<Tensor>& weights) {
  static const Scene scene{"", {{{0, .25}}, {{1, .5}}}, {.125, .125}, {}, {}};
  Training training(scene, make);
  training.optimizers.pop_back();
  torch::optim::Optimizer& optimizer = *training.optimizers[0];
  std::unique_ptr<Amp> amp;
  if (level != nullptr) {
    amp = std::make_unique<Amp>(
        mezzo::initialize(training.models, training.optimizers, level->level, {.verbosity = 0}));
    if (level->has_low_precision) set_scales(*amp, {4.0});
  }
  const auto forward = [&](std::size_t model) {
    return amp ? (*amp)(training.models[model], ones()) : training.models[model]->forward(ones());
  };
  const auto backward = [&](const Tensor& loss, bool retain) {
    const auto pass = [&](const Tensor& each) { each.backward({}, retain); };
    amp ? amp->scale_loss(loss, optimizer, pass) : pass(loss);
  };
  const auto step = [&] {
    if (amp) {
      EXPECT_TRUE(amp->step(optimizer).ran());
    } else {
      optimizer.step();
    }
  };
  training.zero(zeroing);
  backward(forward(0), false);
  step();
  if (zero_before_add) training.zero(zeroing);
  auto options = std::make_unique<torch::optim::SGDOptions>(.5);
  options->momentum(.125);
  auto mezzos = std::make_unique<mezzo::optim::SGDOptions>(.5);
  mezzos->momentum(.125);
  const auto added = training.models[1]->parameters();
  if (make == kMezzos) {
    optimizer.add_param_group({added, std::move(mezzos)});
  } else {
    optimizer.add_param_group({added, std::move(options)});
  }
  if (!zero_before_add) training.zero(zeroing);
  for (int i = 0; i < 2; ++i) {
    if (i == 1) training.zero(zeroing);
    const auto loss = forward(0) + forward(1);
    backward(loss, accumulate);
    if (accumulate) backward(loss, false);
    step();
  }
  for (const auto& weight : parameters_of(optimizer)) weights.push_back(weight.detach().clone());
}

TEST(ApexAddParamGroup, GroupsThatAreAddedLaterJoinIn) {
  for (const MakeSgd make : {kTorchs, kMezzos}) {
    for (const Level& level : levels()) {
      for (const bool zero_before_add : {true, false}) {
        for (const bool accumulate : {true, false}) {
          for (const auto zeroing : {Zeroing::none, Zeroing::model, Zeroing::optimizer}) {
            std::vector<Tensor> expected, got;
            train_with_a_later_group(nullptr, kTorchs, zero_before_add, accumulate, zeroing,
                                     expected);
            train_with_a_later_group(&level, make, zero_before_add, accumulate, zeroing, got);
            ASSERT_EQ(got.size(), 4U);
            for (std::size_t i = 0; i < 4; ++i) {
              expect_close(got[i], expected[i], 4 * level.tolerance, level.name);
            }
          }
        }
      }
    }
  }
}

// test_checkpointing: a convolution, a batch norm and a number.

struct ConvolutionImpl : torch::nn::Module {
  ConvolutionImpl()
      : convolution(register_module(
            "conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 6, 3).stride(1).padding(1)))),
        batch_norm(register_module("bn1", torch::nn::BatchNorm2d(6))),
        number(register_parameter("param", torch::randn({1}))) {}

  Tensor forward(const Tensor& input) {
    return batch_norm(torch::relu(convolution(input * number)));
  }

  torch::nn::Conv2d convolution;
  torch::nn::BatchNorm2d batch_norm;
  Tensor number;
};

struct Trained {
  Trained(const OptLevel& level, int64_t num_losses)
      : amp(mezzo::initialize(model, sgd, level, {.num_losses = num_losses, .verbosity = 0})) {}

  Tensor train_step(const Tensor& data, int losses) {
    sgd.zero_grad();
    const auto output = amp(model, data);
    for (int i = 1; i <= losses; ++i) {
      amp.scale_loss(output.to(torch::kFloat).mean() * i, sgd,
                     [&](const Tensor& scaled) { scaled.backward({}, i < losses); });
    }
    amp.step(sgd);
    return output;
  }

  std::shared_ptr<ConvolutionImpl> model = std::make_shared<ConvolutionImpl>();
  torch::optim::SGD sgd{model->parameters(), torch::optim::SGDOptions(1e-3)};
  Amp amp;
};

template <class From, class To>
void copy_through_a_file(const From& from, To& to) {
  std::stringstream file;
  torch::save(from, file);
  torch::load(to, file);
}

TEST(ApexCheckpoint, GoesOnToTheBitAfterTenEpochsHalfOfThemRestored) {
  for (const Level& level : levels()) {
    for (const int losses : {1, 2}) {
      torch::manual_seed(2809);
      Trained run(level.level, losses);
      Trained restored(level.level, losses);
      for (int epoch = 0; epoch < 10; ++epoch) {
        const auto data = torch::randn({4, 3, 12, 12});  // Apex's is sixteen times that
        const auto output = run.train_step(data, losses);
        if (epoch == 4) {
          copy_through_a_file(run.model, restored.model);
          copy_through_a_file(run.amp.optimizer(run.sgd), restored.amp.optimizer(restored.sgd));
          restored.amp.load_state_dict(run.amp.state_dict());
        }
        if (epoch < 5) continue;
        EXPECT_TRUE(torch::equal(restored.train_step(data, losses), output)) << level.name;
        const auto expected = run.model->named_parameters();
        for (const auto& parameter : restored.model->named_parameters()) {
          EXPECT_TRUE(torch::equal(parameter.value(), expected[parameter.key()])) << level.name;
        }
      }
    }
  }
}

TEST(ApexCheckpoint, HasTheScaleOfEachLossThatOverflowed) {
  for (const Level& level : levels()) {
    if (!level.has_low_precision) continue;
    torch::manual_seed(2809);
    Trained run(level.level, 3);
    std::vector<double> first;
    for (int64_t id = 0; id < 3; ++id) first.push_back(run.amp.scaler(id).get_scale());
    std::vector<int> to_overflow{0, 1, 2};
    for (int i = 0; i < 2; ++i) {
      run.sgd.zero_grad();
      const auto data = torch::randn({4, 3, 12, 12});
      for (std::size_t id = 0; id < 3; ++id) {
        const bool overflows = to_overflow[id]-- > 0;
        // Apex's lists take the mean in float; in half its gradient would not hold 65536.
        const auto loss = run.amp(run.model, data).to(torch::kFloat).mean();
        run.amp.scale_loss(loss, run.sgd, {.loss_id = static_cast<int64_t>(id)},
                           [&](const Tensor& scaled) {
                             scaled.backward();
                             if (overflows) run.model->number.mutable_grad().fill_(kInfinity);
                           });
      }
      run.amp.step(run.sgd);
    }
    const auto state = run.amp.state_dict();
    for (int id = 0; id < 3; ++id) {
      const auto& scaler = state.at("loss_scaler" + std::to_string(id));
      EXPECT_EQ(scaler.at("loss_scale"), first[static_cast<std::size_t>(id)] / (1 << id));
      EXPECT_EQ(scaler.at("unskipped"), 2 - id) << level.name;
    }
  }
}

}  // namespace
