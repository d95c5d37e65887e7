// Random training programs: the base class of the programs with a GradScaler and with an Amp.
//
// A program draws one or two optimizers (an OptimizerConfig each), and then some dozens of calls.
// For each call it
//
//   1. adds a line to its report, which is the program as text;
//   2. computes with the reference (reference_training.h) the expected result, or that it throws;
//   3. calls the library;
//   4. compares all weights, gradients, counts and scales with the reference.
//
// It stops at the first difference, and the test prints the report and the seed. After a comparison
// the reference continues from the actual values, so that rounding errors do not accumulate. Calls
// are counted by kind, and the test fails if a kind of call is too rare.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "reference_training.h"

namespace randomized_training {

/// The number of calls of each kind, over all programs.
using CallCounts = std::map<std::string, int64_t>;

class Program {
 public:
  virtual ~Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// Returns whether all calls behaved as expected.
  virtual bool run() = 0;
  std::string text() const { return report_.text(); }

 protected:
  Program(uint64_t seed, CallCounts& call_counts) : random_(seed), counts_(call_counts) {}

  // The library's objects for optimizer `i`.
  virtual const std::vector<Tensor>& parameters(std::size_t i) const = 0;
  virtual torch::optim::Optimizer& optimizer(std::size_t i) const = 0;
  virtual mezzo::OptimizerRef optimizer_ref(std::size_t i) = 0;
  virtual void set_parameter(std::size_t i, std::size_t j, const Tensor& parameter) = 0;
  virtual void add_parameter(std::size_t i, const ReferenceWeight& weight) = 0;

  /// Whether gradients are unscaled, so that they can be compared and clipped.
  virtual bool has_unscaled_grads(std::size_t i) const = 0;
  virtual void compare_scales() = 0;
  /// Called when the weights of an optimizer were replaced: its averages and saved state are
  /// invalid.
  virtual void reset_averages_and_saved_state(std::size_t i) = 0;

  void count(const std::string& what) { ++counts_[what]; }
  std::size_t random_optimizer_index() {
    return static_cast<std::size_t>(random_.below(static_cast<int64_t>(reference_.size())));
  }
  std::size_t random_weight_index(const ReferenceOptimizer& side) {
    return static_cast<std::size_t>(random_.below(static_cast<int64_t>(side.weights.size())));
  }

  /// Makes one of the calls, with the given probability weights.
  void call_random(const std::vector<std::pair<int64_t, std::function<void()>>>& calls) {
    int64_t all = 0;
    for (const auto& [times, call] : calls) all += times;
    int64_t drawn = random_.below(all);
    for (const auto& [times, call] : calls) {
      if ((drawn -= times) < 0) return call();
    }
  }

  /// Calls the library, and checks whether it throws.
  void expect(bool throws, const std::function<void()>& call) {
    std::string error;
    try {
      call();
    } catch (const std::exception& exception) {
      error = exception.what();
      error = error.substr(0, error.find('\n'));
    }
    if (throws) report_.line("    throws");
    if (throws) count("throws");
    if (throws && error.empty()) report_.fail("no exception");
    if (!throws && !error.empty()) report_.fail("exception: ", error);
  }

  void compare() {
    if (report_.failed()) return;
    for (std::size_t i = 0; i < reference_.size(); ++i) {
      for (std::size_t j = 0; j < reference_[i].weights.size(); ++j) {
        const std::string name =
            "weight " + std::to_string(j) + " of optimizer " + std::to_string(i);
        ReferenceWeight& weight = reference_[i].weights[j];
        compare_weight(weight, parameters(i)[j], optimizer(i), report_, name);
        if (has_unscaled_grads(i)) compare_gradient(weight, parameters(i)[j], report_, name);
      }
      if (!reference_[i].is_mixed_precision()) continue;
      const int64_t applied = optimizer_ref(i).mixed_precision()->applied_steps();
      if (applied != reference_[i].applied) {
        report_.fail("applied_steps() of optimizer ", i, " is ", applied, "; expected ",
                     reference_[i].applied);
      }
    }
    compare_scales();
  }

  // --- Calls of both kinds of program

  /// Calls libtorch's clipping functions with the weights or their masters.
  void clip(std::size_t i) {
    ReferenceOptimizer& side = reference_[i];
    if (!has_unscaled_grads(i)) return;
    const bool by_value = random_.one_in(3);
    const bool at_masters =
        side.is_mixed_precision() && side.has_master_params() && random_.one_in(2);
    const double limit = random_.choose<double>({0.5, 1, 2});
    report_.line("torch's clip_grad_", by_value ? "value_" : "norm_", "(",
                 at_masters ? "master_params(optimizer " : "(parameters of optimizer ", i, "), ",
                 limit, ")");
    count(by_value ? "libtorch's clip_grad_value_" : "libtorch's clip_grad_norm_");
    if (at_masters) count("libtorch's clipping of masters");
    const std::vector<Tensor> clipped =
        at_masters ? mezzo::master_params(optimizer_ref(i)) : parameters(i);
    if (by_value) {
      side.clip_value(limit);
      return expect(false, [&] { torch::nn::utils::clip_grad_value_(clipped, limit); });
    }
    const double norm = side.norm();
    const bool is_half = std::any_of(side.weights.begin(), side.weights.end(),
                                     [](auto& one) { return one.dtype == torch::kHalf; });
    if (is_half && norm > 30000) return report_.line("    (skipped: too large for float16)");
    side.clip_norm(norm, limit);
    double actual = 0;
    expect(false, [&] { actual = torch::nn::utils::clip_grad_norm_(clipped, limit); });
    if (!is_close(actual, norm, norm / 50 + 1e-6)) {
      report_.fail("the norm is ", actual, "; expected ", norm);
    }
  }

  void drop_gradient(std::size_t i) {
    const std::size_t j = random_weight_index(reference_[i]);
    report_.line("parameter ", j, " of optimizer ", i, ".mutable_grad() = {}");
    count("gradient dropped");
    reference_[i].weights[j].gradient.reset();
    parameters(i)[j].mutable_grad() = Tensor();
  }

  void check_masters(std::size_t i) {
    ReferenceOptimizer& side = reference_[i];
    report_.line("master_params(optimizer ", i, ")");
    count("master_params");
    const bool throws = !side.has_master_params();
    expect(throws, [&] {
      const std::vector<Tensor> masters = mezzo::master_params(optimizer_ref(i));
      for (std::size_t j = 0; j < masters.size(); ++j) {
        ReferenceWeight& weight = side.weights[j];
        const std::string name = "master " + std::to_string(j);
        if (weight.has_master) {
          compare_value(weight, read_values(masters[j]), report_, name);
          weight.is_modified = false;
        } else if (!masters[j].is_same(parameters(i)[j])) {
          report_.fail(name, " is not the parameter");
        }
        const bool has_gradient = has_unscaled_grads(i) && parameters(i)[j].grad().defined();
        if (has_gradient && !masters[j].grad().is_same(parameters(i)[j].grad())) {
          report_.fail(name, " has another gradient than its parameter");
        }
      }
    });
  }

  void modify_weight(std::size_t i) {
    const std::size_t j = random_weight_index(reference_[i]);
    ReferenceWeight& weight = reference_[i].weights[j];
    write_reference_weight(weight, read_values(parameters(i)[j]), random_);
    report_.line("parameter ", j, " of optimizer ", i, " is set to ", format(weight.value));
    count("weight written");
    const torch::NoGradGuard no_grad;
    Tensor(parameters(i)[j]).copy_(make_tensor(weight.value, torch::kFloat, weight.shape));
  }

  /// Replaces a weight, like the head of a model for another task.
  void replace_weight(std::size_t i) {
    ReferenceOptimizer& side = reference_[i];
    const std::size_t j = random_weight_index(side);
    ReferenceWeight& weight = side.weights[j];
    const ReferenceWeight old =
        std::exchange(weight, make_replacement(side.config, weight, random_));
    report_.line("parameter ", j, " of optimizer ", i, " is replaced by a new one, ",
                 format(weight.value));
    count("weight replaced");
    reset_averages_and_saved_state(i);
    Tensor& place = clear_parameter_slot(optimizer(i), parameters(i)[j],
                                         side.config.is_mezzo || old.has_master);
    set_parameter(i, j, Tensor());
    place = make_late_parameter(weight);
    set_parameter(i, j, place);
  }

  void add_weight(std::size_t i, torch::ScalarType dtype) {
    ReferenceOptimizer& side = reference_[i];
    if (side.weights.size() > 4) return;
    const ReferenceWeight& weight = add_reference_weight(side, dtype, random_);
    report_.line("a new parameter of optimizer ", i, ", of ", c10::toString(dtype),
                 weight.begins_group ? ", in a new group" : "");
    count("weight added");
    reset_averages_and_saved_state(i);
    expect(false, [&] { add_parameter(i, weight); });
  }

  void move_gradients(std::size_t i) {
    report_.line("gradients of optimizer ", i, " move into a bucket");
    count("bucket");
    move_grads_to_bucket(parameters(i));
  }

  /// Sets a gradient of a wrong dtype or shape, for which `call` must throw and change nothing, and
  /// restores the gradient.
  void step_with_bad_gradient(std::size_t i, const std::string& in,
                              const std::function<void()>& call) {
    const ReferenceOptimizer& side = reference_[i];
    const std::size_t j = random_weight_index(side);
    const Tensor& parameter = parameters(i)[j];
    const bool has_shape = !side.config.is_mezzo || random_.one_in(2);
    report_.line("parameter ", j, " of optimizer ", i, " has a gradient of another ",
                 has_shape ? "dtype" : "shape", " in ", in);
    count("bad gradient");
    const Tensor own =
        std::exchange(parameter.mutable_grad(), make_bad_gradient(parameter, has_shape));
    expect(true, call);
    parameter.mutable_grad() = own;
  }

  /// Compares the result of a step.
  void compare_result(const mezzo::StepResult& result, bool applied, std::optional<double> norm) {
    report_.line(result.applied() ? "    applied" : "    skipped");
    if (result.applied() != applied || result.found_inf() == applied) {
      report_.fail("applied() is ", result.applied(), ", found_inf() ", result.found_inf(),
                   "; expected ", applied, ", ", !applied);
    }
    const auto actual = result.grad_norm();
    if (actual && norm && std::isfinite(*norm) && !is_close(*actual, *norm, 1e-5 * *norm + 1e-6)) {
      report_.fail("grad_norm() is ", *actual, "; expected ", *norm);
    }
  }

  /// Restores the saved reference, with the present gradients unless all objects are new.
  void restore_reference(const std::vector<ReferenceOptimizer>& saved, bool has_new_objects) {
    const std::vector<ReferenceOptimizer> before = std::exchange(reference_, saved);
    for (std::size_t i = 0; i < reference_.size(); ++i) {
      for (std::size_t j = 0; j < reference_[i].weights.size(); ++j) {
        ReferenceWeight& weight = reference_[i].weights[j];
        weight.gradient = has_new_objects ? std::nullopt : before[i].weights[j].gradient;
        if (!has_new_objects) weight.is_frozen = before[i].weights[j].is_frozen;
        if (!weight.is_modified) weight.trained = weight.value;
        weight.is_modified = true;  // until the next step
      }
    }
  }

  Random random_;
  CallCounts& counts_;
  Report report_;
  std::vector<ReferenceOptimizer> reference_;
};

/// Runs `programs` random programs, or MEZZO_RANDOMIZED_SEEDS programs from
/// MEZZO_RANDOMIZED_FIRST_SEED on. Each kind of call in `kinds`, separated by semicolons, must
/// occur `min_count` times.
template <class RandomProgram>
void run_programs(int64_t programs, const std::string& kinds, int64_t min_count) {
  const auto number = [](const char* name, int64_t otherwise) {
    const char* const text = std::getenv(name);
    return text == nullptr ? otherwise : std::atoll(text);
  };
  const int64_t first = number("MEZZO_RANDOMIZED_FIRST_SEED", 0);
  const int64_t seeds = number("MEZZO_RANDOMIZED_SEEDS", programs);
  CallCounts call_counts;
  int64_t failures = 0;
  for (int64_t seed = first; seed < first + seeds && failures < 3; ++seed) {
    RandomProgram program(static_cast<uint64_t>(seed), call_counts);
    if (program.run()) continue;
    ADD_FAILURE() << "program with seed " << seed << ":\n" << program.text();
    ++failures;
  }
  if (seeds < programs || failures > 0) return;
  std::istringstream names(kinds);
  for (std::string kind; std::getline(names >> std::ws, kind, ';');) {
    EXPECT_GE(call_counts[kind], min_count) << kind << " is too rare";
  }
}

}  // namespace randomized_training
