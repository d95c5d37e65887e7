// Weights that are frozen, trained, moved and shared at random: every use reads what a region
// without a cache reads.

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "what_an_op_reads.h"

namespace {

using mezzo::Autocast;
using torch::kBFloat16;
using torch::kCPU;
using torch::Tensor;

constexpr int64_t kUnits = 3;

/// Three linear modules, whatever may happen to them, and what was done so far, for the message.
class RandomProgram {
 public:
  RandomProgram(std::uint32_t seed, bool pinned) : pinned_(pinned), random_(seed) {
    torch::manual_seed(seed);
    for (int i = 0; i < 3; ++i) modules_.emplace_back(kUnits, kUnits);
    std::vector<Tensor> weights;
    for (const auto& module : modules_) weights.push_back(module->weight);
    if (pinned_) cache_.pin(weights);
    optimizers_.push_back(std::make_unique<torch::optim::AdamW>(weights, 0.1));
    optimizers_.push_back(
        std::make_unique<mezzo::optim::AdamW>(weights, mezzo::optim::AdamWOptions(0.1)));
    optimizers_.push_back(
        std::make_unique<mezzo::optim::SGD>(weights, mezzo::optim::SGDOptions(0.1)));
    sgd_ = std::make_unique<torch::optim::SGD>(weights, 0.1);
    flat_.resize(modules_.size());
  }

  /// Does something, and says what.
  std::string change() {
    static const std::vector<std::pair<const char*, void (RandomProgram::*)()>> changes = {
        {"freeze or thaw", &RandomProgram::freeze_or_thaw},
        {"freeze or thaw", &RandomProgram::freeze_or_thaw},
        {"train with the cache", &RandomProgram::train_with_the_cache},
        {"train without the cache", &RandomProgram::train_without_the_cache},
        {"step SGD", &RandomProgram::step_sgd},
        {"step SGD", &RandomProgram::step_sgd},
        {"step another optimizer", &RandomProgram::step_another},
        {"clear gradients", &RandomProgram::clear_gradients},
        {"drop the graph", &RandomProgram::drop_the_graph},
        {"lay into a flat buffer", &RandomProgram::lay_into_a_flat_buffer},
        {"write the flat buffer", &RandomProgram::write_the_flat_buffer},
        {"replace the memory", &RandomProgram::replace_the_memory},
        {"go to double and back", &RandomProgram::go_to_double_and_back},
        {"load", &RandomProgram::load},
        {"begin or end a region", &RandomProgram::begin_or_end_a_region},
    };
    const auto& [name, apply] = changes[pick(changes.size())];
    (this->*apply)();
    return name;
  }

  /// Whether all ways of use read the present values.
  bool reads_present_values() {
    const c10::AutoGradMode mode(pick(2) == 0);
    const Autocast<kCPU> region({.cache = cache_});
    bool right = true;
    for (const auto& module : modules_) {
      const Tensor& weight = module->weight;
      const auto expected = weight.detach().to(kBFloat16);
      right &= torch::equal(what_linear_reads(weight).detach(), expected);
      right &= torch::equal(what_mm_reads(weight).detach(), expected);
      right &= torch::equal(what_mm_reads(weight.t()).detach(), expected.t());
    }
    return right;
  }

 private:
  std::size_t pick(std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random_);
  }
  torch::nn::Linear& any_module() { return modules_[pick(modules_.size())]; }

  void freeze_or_thaw() {
    Tensor& weight = any_module()->weight;
    weight.set_requires_grad(!weight.requires_grad());
  }
  void train(const mezzo::AutocastSetting& options) {
    {
      const Autocast<kCPU> region(options);
      loss_ = any_module()(torch::randn({2, kUnits})).to(torch::kFloat).pow(2).sum();
    }
    if (loss_.requires_grad()) loss_.backward();
  }
  void train_with_the_cache() { train({.cache = cache_}); }
  void train_without_the_cache() { train({.enabled = false}); }

  // What a region does not see of trainable weights, and nobody of pinned ones, its user has to
  // tell.
  void tell_of_unseen_writes() {
    if (region_.has_value() || pinned_) cache_.clear();
  }
  void step_sgd() {
    sgd_->step();
    tell_of_unseen_writes();
  }
  void step_another() { optimizers_[pick(optimizers_.size())]->step(); }
  void clear_gradients() { sgd_->zero_grad(); }
  void drop_the_graph() { loss_ = Tensor(); }

  void lay_into_a_flat_buffer() {
    const auto i = pick(modules_.size());
    flat_[i] = torch::randn({static_cast<int64_t>(1 + pick(2)) * kUnits * kUnits});
    modules_[i]->weight.set_data(flat_[i]
                                     .narrow(0, flat_[i].numel() - kUnits * kUnits, kUnits * kUnits)
                                     .view({kUnits, kUnits}));
  }
  void write_the_flat_buffer() {
    const torch::NoGradGuard no_grad;
    for (auto& each : flat_) {
      if (each.defined()) each.add_(1);
    }
    tell_of_unseen_writes();
  }
  void replace_the_memory() { any_module()->weight.set_data(torch::randn({kUnits, kUnits})); }
  void go_to_double_and_back() {
    auto& module = any_module();
    module->weight.mutable_grad().reset();  // set_data keeps gradients of one dtype only
    module->to(torch::kDouble);
    module->to(torch::kFloat);
  }
  void load() {
    std::stringstream stream;
    torch::save(any_module(), stream);
    torch::load(any_module(), stream);
  }
  void begin_or_end_a_region() {
    if (region_.has_value()) {
      region_.reset();
    } else {
      region_.emplace(mezzo::AutocastSetting{.cache = cache_});
    }
  }

  bool pinned_;
  mezzo::WeightCache cache_ = mezzo::install_op_overrides(mezzo::WeightCache());
  std::mt19937 random_;
  std::vector<torch::nn::Linear> modules_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::unique_ptr<torch::optim::SGD> sgd_;
  std::vector<Tensor> flat_;
  Tensor loss_;
  std::optional<Autocast<kCPU>> region_;
};

void run_at_random(bool pinned) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    RandomProgram program(seed, pinned);
    std::string done;
    for (int step = 0; step < 60; ++step) {
      ASSERT_TRUE(program.reads_present_values()) << "seed " << seed << ":" << done;
      done += "\n  " + program.change();
    }
  }
}

TEST(RandomChangesOfWeights, AreAllNoticed) { run_at_random(/*pinned=*/false); }

TEST(RandomChangesOfWeights, AreAllNoticedInPinnedWeights) { run_at_random(/*pinned=*/true); }

}  // namespace
