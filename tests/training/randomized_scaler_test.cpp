// Compares random programs of GradScaler, optimizer and libtorch calls, in any order, with a
// reference in double that follows the documentation.

#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/owned_optimizer.h"
#include "../support/save_to_string.h"
#include "randomized_program.h"

namespace {

using namespace randomized_training;
using mezzo::GradScaler;
using mezzo::GradScalerOptions;
using mezzo::OptimizerRef;
using test_support::OwnedOptimizer;

/// The reference of a GradScaler.
struct ReferenceScaler {
  enum class OptState { ready, unscaled, stepped };
  struct OptimizerState {
    OptState stage = OptState::ready;
    std::optional<bool> found{};
    bool is_touched = false;
    std::set<std::size_t> unscaled{};  ///< parameters whose gradients were unscaled
    std::set<std::size_t> cleared{};   ///< those without a gradient when a loss was scaled later
  };

  bool is_enabled = true;
  bool allows_fp16_gradients = true;
  bool has_scaled = false;
  double scale = 1;
  double max_scale = 4096;
  int64_t interval = 2;
  int64_t growth_tracker = 0;
  std::vector<OptimizerState> states{};

  bool is_between_iterations() const {
    return std::none_of(states.begin(), states.end(), [](auto& one) { return one.is_touched; });
  }
  void clear() { states.assign(states.size(), {}); }
  bool update() {
    std::optional<bool> found;
    for (const OptimizerState& one : states) {
      if (one.found) found = found.value_or(false) || *one.found;
    }
    if (!found) return false;
    if (*found) {
      scale = std::max(scale / 2, 1.0);
      growth_tracker = 0;
    } else if (++growth_tracker == interval) {
      scale = std::min(scale * 2, max_scale);
      growth_tracker = 0;
    }
    clear();
    return true;
  }
};

class ScalerProgram : public Program {
 public:
  ScalerProgram(uint64_t seed, CallCounts& call_counts) : Program(seed, call_counts) {
    const auto sides = static_cast<std::size_t>(1 + (random_.one_in(3) ? 1 : 0));
    for (std::size_t i = 0; i < sides; ++i) {
      OptimizerConfig config = random_config(random_);
      if (config.dtype == torch::kFloat && random_.one_in(3)) config.dtype = torch::kDouble;
      config.has_unusual_shapes = random_.one_in(3);
      config.has_grad_hooks = random_.one_in(3);
      reference_.push_back(make_reference(config, random_));
      report_.line("optimizer ", i, ": ", reference_[i].config.text());
    }
    scaler_.states.resize(sides);
    saves_often_ = random_.one_in(3);
    scaler_.is_enabled = !random_.one_in(4);
    scaler_.allows_fp16_gradients = !random_.one_in(4);
    scaler_.scale = std::ldexp(1.0, static_cast<int>(3 + random_.below(8)));
    scaler_.interval = 2 + random_.below(3);
    for (const ReferenceOptimizer& side : reference_) {  // including weights that are added later
      const bool has_masters =
          side.config.has_master_weights || side.config.storage == WeightStorage::fp32_master;
      has_fp16_without_master_ |= side.config.dtype == torch::kHalf && !has_masters;
    }
    make_library();
    report_.line("GradScaler(init_scale ", scaler_.scale, ", growth_interval ", scaler_.interval,
                 ", max_scale ", scaler_.max_scale, scaler_.is_enabled ? "" : ", disabled",
                 scaler_.allows_fp16_gradients ? ", allow_fp16_gradients" : "", ")");
    if (!scaler_.is_enabled) scaler_.scale = 1;
  }

  bool run() override {
    const int64_t calls = 16 + random_.below(36);
    for (int64_t i = 0; i < calls && !report_.failed(); ++i) {
      call();
      compare();
    }
    for (std::size_t side = 0; side < reference_.size() && !report_.failed(); ++side) {
      check_masters(side);
      compare();
    }
    return !report_.failed();
  }

 private:
  using OptState = ReferenceScaler::OptState;

  struct Side {
    std::vector<Tensor> parameters;
    OwnedOptimizer owned;
  };

  /// The saved state of all objects, and the weights.
  struct Saved {
    std::vector<std::string> optimizers{};
    std::vector<std::vector<Tensor>> weights{};
    std::string scaler{};
    std::vector<ReferenceOptimizer> plain{};
    ReferenceScaler reference_scaler{};
  };

  const std::vector<Tensor>& parameters(std::size_t i) const override {
    return sides_[i].parameters;
  }
  torch::optim::Optimizer& optimizer(std::size_t i) const override {
    return sides_[i].owned.ref().optimizer();
  }
  OptimizerRef optimizer_ref(std::size_t i) override { return sides_[i].owned.ref(); }
  void set_parameter(std::size_t i, std::size_t j, const Tensor& parameter) override {
    sides_[i].parameters[j] = parameter;
  }
  void add_parameter(std::size_t i, const ReferenceWeight& weight) override {
    const Tensor parameter = make_late_parameter(weight);
    sides_[i].parameters.push_back(parameter);
    auto& torch_optimizer = optimizer(i);
    if (!weight.begins_group)
      return torch_optimizer.param_groups()[0].params().push_back(parameter);
    add_param_group(torch_optimizer,
                    make_group(weight, parameter, torch_optimizer.param_groups()[0].options()));
  }
  bool has_unscaled_grads(std::size_t) const override {
    return true;
  }  // the reference has the scale of every gradient
  void compare_scales() override {
    if (library_->get_scale() != scaler_.scale) {
      report_.fail("get_scale() is ", library_->get_scale(), "; expected ", scaler_.scale);
    }
  }
  void reset_averages_and_saved_state(std::size_t) override { saved_.reset(); }
  ReferenceScaler::OptimizerState& touch(std::size_t i) {
    scaler_.states[i].is_touched = true;
    return scaler_.states[i];
  }

  void make_library() {
    sides_.clear();
    for (const ReferenceOptimizer& plain : reference_) {
      std::vector<Tensor> parameters;
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      for (const ReferenceWeight& one : plain.weights) {
        if (one.begins_group && optimizer == nullptr) {
          optimizer = make_optimizer(plain.config, parameters);
        }
        parameters.push_back(one.begins_group ? make_late_parameter(one)
                                              : make_parameter(one, one.dtype));
        if (!one.begins_group) continue;
        add_param_group(*optimizer,
                        make_group(one, parameters.back(), optimizer->param_groups()[0].options()));
      }
      if (optimizer == nullptr) optimizer = make_optimizer(plain.config, parameters);
      if (plain.config.accumulates_in_float32) mezzo::accumulate_in_float(parameters);
      sides_.push_back({parameters, {std::move(optimizer), plain.config.has_master_weights}});
    }
    library_.emplace(GradScalerOptions{.init_scale = scaler_.is_enabled ? scaler_.scale : 1,
                                       .growth_interval = scaler_.interval,
                                       .enabled = scaler_.is_enabled,
                                       .min_scale = 1,
                                       .max_scale = scaler_.max_scale,
                                       .allow_fp16_gradients = scaler_.allows_fp16_gradients});
    library_->on_skip(nullptr);
  }

  // --- Calls -----------------------------------------------------------------------------------

  /// Makes mostly the next call of a training loop, and sometimes any call.
  void call() {
    const std::size_t i = random_optimizer_index();
    const bool can_step_without_scaler =
        scaler_.states[i].stage == OptState::unscaled || !scaler_.is_enabled;
    call_random({{5, [&] { backward(); }},
                 {3, [&] { unscale(i); }},
                 {3, [&] { clip(i); }},
                 {2, [&] { zero_grad(i); }},
                 {2, [&] { drop_gradient(i); }},
                 {1, [&] { check_masters(i); }},
                 {1, [&] { modify_weight(i); }},
                 {1, [&] { can_step_without_scaler ? step_without_scaler(i) : step(i); }},
                 {3, [&] { step(i); }},
                 {3, [&] { update(); }},
                 {1, [&] { update_to(); }},
                 {1, [&] { save_or_load(); }},
                 {1, [&] { scaler_.states[i].is_touched ? void() : replace_weight(i); }},
                 {1, [&] { add_weight(i, reference_[i].config.dtype); }},
                 {1, [&] { step_with_bad_gradient(i); }},
                 {1, [&] { step(i); }},
                 {1, [&] { move_gradients(i); }},
                 {1, [&] { load_other_class(i); }},
                 {1, [&] { use_ema_guard(i); }},
                 {1, [&] { can_step_without_scaler ? step_without_parameter(i) : step(i); }},
                 {1, [&] { save_or_load(); }}});
  }

  void backward() {
    bool accumulates_after_unscale = false;
    for (const auto& record : scaler_.states) {
      accumulates_after_unscale |= scaler_.is_enabled && record.stage == OptState::unscaled;
    }
    // Scaled gradients are added to unscaled ones. In float16 the sum may overflow.
    if (accumulates_after_unscale && (has_fp16_without_master_ || !random_.one_in(4))) return;
    const bool with_inf = scaler_.is_enabled && random_.one_in(6);
    Tensor loss = torch::zeros({});
    report_.line("backward");
    count(accumulates_after_unscale ? "backward after unscale_" : "backward");
    bool is_first = true;
    for (std::size_t i = 0; i < reference_.size(); ++i) {
      for (std::size_t j = 0; j < reference_[i].weights.size(); ++j) {
        if (random_.one_in(4)) continue;
        ReferenceWeight& weight = reference_[i].weights[j];
        const bool is_bad = !weight.value.empty() && std::exchange(is_first, false) && with_inf;
        Vector gradient = random_gradient(random_, weight.value.size(), is_bad);
        report_.line("    optimizer ", i, " weight ", j, ": ", format(gradient));
        if (is_bad) count("inf");
        const Tensor factor = make_tensor(gradient, torch::kFloat, weight.shape);
        loss = loss + (sides_[i].parameters[j].to(torch::kFloat) * factor).sum();
        for (double& g : gradient) g *= scaler_.scale;
        weight.accumulate(gradient);
      }
    }
    scaler_.has_scaled = true;
    mark_cleared_gradients();
    expect(false, [&] {
      const Tensor scaled = library_->scale(loss);
      if (scaled.requires_grad()) scaled.backward();
    });
  }

  bool throws_for_fp16(const ReferenceOptimizer& side) const {
    return side.has_fp16_without_master() && !scaler_.allows_fp16_gradients;
  }

  /// Unscales. Returns whether unscale_ must throw.
  bool reference_unscale(std::size_t i) {
    ReferenceOptimizer& side = reference_[i];
    if (!scaler_.is_enabled) {
      for (ReferenceWeight& one : side.weights) one.cast_gradient_to_float32();
      return false;
    }
    if (!scaler_.has_scaled) return true;
    if (touch(i).stage != OptState::ready) return true;
    return reference_unscale_into(i);
  }
  bool reference_unscale_into(std::size_t i) {
    ReferenceOptimizer& side = reference_[i];
    if (throws_for_fp16(side)) return true;
    ReferenceScaler::OptimizerState& record = touch(i);
    record.stage = OptState::unscaled;
    record.found.reset();
    if (!side.has_gradient()) return false;
    for (ReferenceWeight& one : side.weights) {
      one.cast_gradient_to_float32();
      if (one.gradient) one.multiply_gradient(1 / scaler_.scale);
    }
    record.found = !side.is_finite();
    return false;
  }

  void unscale(std::size_t i) {
    report_.line("unscale_(optimizer ", i, ")");
    count("unscale_");
    const bool throws = reference_unscale(i);
    expect(throws, [&] { library_->unscale_(optimizer_ref(i)); });
    if (throws || !scaler_.is_enabled) return;
    for (std::size_t j = 0; j < sides_[i].parameters.size(); ++j) {
      if (sides_[i].parameters[j].grad().defined()) touch(i).unscaled.insert(j);
    }
  }

  /// Marks unscaled parameters without a gradient, before a loss is scaled.
  void mark_cleared_gradients() {
    if (!scaler_.is_enabled) return;
    for (std::size_t i = 0; i < reference_.size(); ++i) {
      ReferenceScaler::OptimizerState& record = scaler_.states[i];
      if (record.stage != OptState::unscaled) continue;
      for (const std::size_t j : record.unscaled) {
        if (!sides_[i].parameters[j].grad().defined()) record.cleared.insert(j);
      }
    }
  }
  /// Whether a gradient of an unscaled optimizer came from a scaled backward pass after unscale_.
  bool has_scaled_gradient(std::size_t i) {
    const auto& cleared = touch(i).cleared;
    return std::any_of(cleared.begin(), cleared.end(),
                       [&](std::size_t j) { return sides_[i].parameters[j].grad().defined(); });
  }

  void zero_grad(std::size_t i) {
    const bool set_to_none = !random_.one_in(3);
    const bool all_optimizers = random_.one_in(3);
    report_.line(all_optimizers ? "zero_grad of all weights" : "zero_grad of optimizer ",
                 all_optimizers ? "" : std::to_string(i),
                 set_to_none ? "" : ", set_to_none = false");
    static const char* const stages[] = {"before unscale_", "after unscale_", "after step"};
    count(std::string("zero_grad ") + stages[static_cast<std::size_t>(scaler_.states[i].stage)]);
    for (std::size_t k = 0; k < reference_.size(); ++k) {
      if (!all_optimizers && k != i) continue;
      reference_[k].zero_grad(set_to_none);
      expect(false, [&] {
        if (!all_optimizers) return optimizer(k).zero_grad(set_to_none);
        for (const Tensor& parameter : sides_[k].parameters) {  // like Module::zero_grad
          if (!parameter.grad().defined()) continue;
          if (set_to_none) {
            parameter.mutable_grad().reset();
          } else {
            parameter.mutable_grad().zero_();
          }
        }
      });
    }
  }

  void step_with_bad_gradient(std::size_t i) {
    const bool is_ready = scaler_.states[i].stage == OptState::ready;
    const bool is_checked = scaler_.is_enabled && scaler_.has_scaled && is_ready;
    if (!reference_[i].config.is_mezzo && !is_checked) return;
    if (scaler_.is_enabled && scaler_.has_scaled) touch(i);
    const int64_t call = random_.below(3);
    const char* const calls[] = {"unscale_", "step", "step with max_norm"};
    Program::step_with_bad_gradient(i, calls[call], [&] {
      if (call == 0) return static_cast<void>(library_->unscale_(optimizer_ref(i)));
      OptimizerRef stepped = optimizer_ref(i);
      call == 1 ? library_->step(stepped) : library_->step(stepped, {.max_norm = 1});
    });
  }

  // --- Steps -----------------------------------------------------------------------------------

  /// The expected result of a step.
  struct Expected {
    bool throws = false;
    bool applied = true;
    std::optional<double> norm{};
  };

  Expected reference_step(std::size_t i, const mezzo::StepOptions& options) {
    ReferenceOptimizer& side = reference_[i];
    const bool clips = std::isfinite(options.max_norm);
    if (!scaler_.is_enabled) return reference_disabled_step(side, options);
    if (!scaler_.has_scaled) return {.throws = true};
    ReferenceScaler::OptimizerState& record = touch(i);
    if (record.stage == OptState::stepped) return {.throws = true};
    bool has_unscaled_grads = record.stage == OptState::unscaled;
    const bool was_unscaled = has_unscaled_grads;
    if (was_unscaled && has_scaled_gradient(i)) return {.throws = true};
    if (side.is_mixed_precision()) {
      if (!has_unscaled_grads && (throws_for_fp16(side) || !side.has_gradient()))
        return {.throws = true};
    } else if (!has_unscaled_grads) {
      if (reference_unscale_into(i)) return {.throws = true};
      has_unscaled_grads = true;
    }
    if (has_unscaled_grads ? !record.found : !side.has_gradient()) return {.throws = true};
    const bool found = record.found.value_or(false) || !side.is_finite();
    record.found = found;
    record.stage = OptState::stepped;
    const double inverse = has_unscaled_grads ? 1 : 1 / scaler_.scale;
    const double norm = side.norm() * inverse;
    Expected expected{.applied = !found};
    if (side.is_mixed_precision() || clips || was_unscaled) expected.norm = norm;
    if (!found) reference_apply(side, inverse, norm, options);
    if (options.zero_grad) side.zero_grad(false);
    return expected;
  }

  /// A mixed-precision optimizer clips in its update, others in place.
  static void reference_apply(ReferenceOptimizer& side, double inverse, double norm,
                              const mezzo::StepOptions& options) {
    const bool clips = std::isfinite(options.max_norm);
    if (side.is_mixed_precision()) return side.step(inverse * clip_factor(norm, options.max_norm));
    if (clips) side.clip_norm(norm, options.max_norm);
    side.step(1);
  }

  static Expected reference_disabled_step(ReferenceOptimizer& side,
                                          const mezzo::StepOptions& options) {
    Expected expected;
    if (std::isfinite(options.max_norm) && side.has_gradient()) expected.norm = side.norm();
    reference_apply(side, 1, side.norm(), options);
    if (options.zero_grad) side.zero_grad(false);
    return expected;
  }

  void step(std::size_t i) {
    const bool has_options = !random_.one_in(3);
    mezzo::StepOptions options;
    if (has_options && random_.one_in(2)) options.max_norm = random_.choose<double>({0.5, 1, 2});
    if (has_options && random_.one_in(3)) options.zero_grad = true;
    std::ostringstream text;
    if (has_options) {
      text << ", {.max_norm = " << options.max_norm << ", .zero_grad = " << options.zero_grad
           << "}";
    }
    report_.line("scaler.step(optimizer ", i, text.str(), ")");
    const Expected right = reference_step(i, options);
    expect(right.throws, [&] {
      OptimizerRef stepped = optimizer_ref(i);
      const auto result = has_options ? library_->step(stepped, options) : library_->step(stepped);
      compare_result(result, right.applied, right.norm);
      const char* const clipped = std::isfinite(options.max_norm) ? " with max_norm" : "";
      count(std::string(result.applied() ? "step" : "skipped step") + clipped);
      const ReferenceOptimizer& side = reference_[i];
      count(side.is_split()                    ? "step of split_master"
            : side.config.has_master_weights   ? "step of MasterWeights"
            : !side.config.is_mezzo            ? "step of torch's optimizer"
            : side.weights[0].has_master       ? "step of master"
            : is_16_bit(side.weights[0].dtype) ? "step of plain 16 bits"
                                               : "step of float");
      static const char* const kinds[] = {"SGD", "momentum", "Adam", "AdamW", "Lion", "LAMB"};
      count(std::string("step of ") + kinds[static_cast<std::size_t>(side.config.kind)]);
      count(scaler_.is_enabled ? "step of an enabled scaler" : "step of a disabled scaler");
    });
  }

  void step_without_scaler(std::size_t i) {
    ReferenceOptimizer& side = reference_[i];
    if (!side.is_finite()) return;
    report_.line("optimizer ", i, ".step()");
    count("step without the scaler");
    side.step(1);
    expect(false, [&] { (void)optimizer_ref(i).step(); });
  }

  /// Removes a parameter from its group for one step, and adds it again.
  void step_without_parameter(std::size_t i) {
    ReferenceOptimizer& side = reference_[i];
    if (!side.is_finite()) return;
    const std::size_t j = random_weight_index(side);
    const Tensor parameter = parameters(i)[j];
    report_.line("parameter ", j, " of optimizer ", i, " is in no group for optimizer.step()");
    count("step without a parameter");
    auto hidden = std::exchange(side.weights[j].gradient, std::nullopt);
    side.step(1);
    expect(false, [&] {
      for (auto& group : optimizer(i).param_groups()) {
        auto& params = group.params();
        const auto place = std::find_if(params.begin(), params.end(),
                                        [&](const Tensor& one) { return one.is_same(parameter); });
        if (place == params.end()) continue;
        const auto index = place - params.begin();
        params.erase(place);
        (void)optimizer_ref(i).step();
        params.insert(params.begin() + index, parameter);
        break;
      }
    });
    side.weights[j].gradient = std::move(hidden);
  }

  /// Replaces the weights by averages, during which reading a master throws.
  void use_ema_guard(std::size_t i) {
    ReferenceOptimizer& side = reference_[i];
    report_.line("an EmaGuard of optimizer ", i);
    count("EmaGuard");
    const bool has_master = std::any_of(side.weights.begin(), side.weights.end(),
                                        [](const ReferenceWeight& one) { return one.has_master; });
    const mezzo::Ema ema(parameters(i));
    const mezzo::EmaGuard averages(ema);
    expect(has_master || !side.has_master_params(),
           [&] { (void)mezzo::master_params(optimizer_ref(i)); });
  }

  void update() {
    update_once();
    if (saves_often_ && !report_.failed() && random_.one_in(2)) save_or_load();
  }

  void update_once() {
    report_.line("update()");
    bool throws = false;
    if (scaler_.is_enabled) {
      throws = !scaler_.has_scaled || !scaler_.update();
    } else {
      scaler_.clear();
    }
    if (!throws) count("update");
    expect(throws, [&] { library_->update(); });
  }

  void update_to() {
    if (!scaler_.is_enabled || !scaler_.has_scaled) return update();
    const double scale = std::ldexp(1.0, static_cast<int>(3 + random_.below(8)));
    report_.line("update(", scale, ")");
    count("update to a scale");
    scaler_.scale = scale;
    scaler_.clear();
    expect(false, [&] { library_->update(scale); });
  }

  // --- Saving and loading ----------------------------------------------------------------------

  void save_or_load() {
    if (!scaler_.is_between_iterations()) return update_once();
    compare();
    if (report_.failed()) return;
    if (!saved_ || random_.one_in(3)) {
      save();
      if (!random_.one_in(3)) return;
    }
    load();
  }

  void save() {
    report_.line("save");
    count("save");
    saved_.emplace();
    expect(false, [&] {
      for (const Side& side : sides_) {
        saved_->optimizers.push_back(test_support::save_to_string(side.owned.ref()));
        saved_->weights.push_back(test_support::clone_all(side.parameters));
      }
      if (scaler_.is_enabled) saved_->scaler = test_support::save_to_string(*library_);
    });
    saved_->plain = reference_;
    saved_->reference_scaler = scaler_;
  }

  void load() {
    bool has_new_objects = random_.one_in(2);
    for (const ReferenceOptimizer& side : reference_)
      has_new_objects |= !side.is_mixed_precision();  // torch::optim keeps its old state
    report_.line("load", has_new_objects ? " into new objects" : "");
    count(has_new_objects ? "load into new objects" : "load");
    restore_reference(saved_->plain, has_new_objects);
    const bool has_scaled = scaler_.has_scaled;
    scaler_ = saved_->reference_scaler;
    scaler_.has_scaled = has_scaled && !has_new_objects;
    if (!scaler_.is_enabled) scaler_.has_scaled = saved_->reference_scaler.has_scaled;
    expect(false, [&] {
      if (has_new_objects) make_library();
      for (std::size_t i = 0; i < sides_.size(); ++i) {
        const torch::NoGradGuard no_grad;
        for (std::size_t j = 0; j < sides_[i].parameters.size(); ++j) {
          sides_[i].parameters[j].copy_(saved_->weights[i][j]);
        }
        OptimizerRef loaded = optimizer_ref(i);
        test_support::load_from_string(loaded, saved_->optimizers[i]);
      }
      if (scaler_.is_enabled) test_support::load_from_string(*library_, saved_->scaler);
    });
  }

  /// Loading the archive of another class throws and changes nothing. libtorch's own load accepts
  /// any archive.
  void load_other_class(std::size_t i) {
    const OptimizerConfig& own = reference_[i].config;
    if (!own.is_mezzo && !own.has_master_weights && own.kind != OptimizerKind::lamb) return;
    OptimizerConfig other = own;
    const auto is_sgd = [](OptimizerKind kind) {
      return kind == OptimizerKind::sgd || kind == OptimizerKind::momentum;
    };
    do {
      other.kind = static_cast<OptimizerKind>(random_.below(6));
    } while (other.kind == own.kind || (is_sgd(other.kind) && is_sgd(own.kind)));
    other.is_mezzo = other.kind != OptimizerKind::lamb;  // archives of LAMB name their class too
    report_.line("optimizer ", i, " loads the archive of ", other.text());
    count("load of another class");
    const auto made = make_optimizer(other, parameters(i));
    const std::string archive = test_support::save_to_string(OptimizerRef(*made));
    expect(true, [&] {
      OptimizerRef loaded = optimizer_ref(i);
      test_support::load_from_string(loaded, archive);
    });
  }

  ReferenceScaler scaler_;
  bool saves_often_ = false;
  bool has_fp16_without_master_ = false;
  std::vector<Side> sides_;
  std::optional<GradScaler> library_;
  std::optional<Saved> saved_;
};

TEST(RandomizedTraining, GradScalerMatchesReference) {
  run_programs<ScalerProgram>(
      200,
      "backward; backward after unscale_; inf; throws; unscale_; "
      "libtorch's clip_grad_norm_; libtorch's clip_grad_value_; "
      "libtorch's clipping of masters; zero_grad before unscale_; "
      "zero_grad after unscale_; zero_grad after step; gradient dropped; master_params; "
      "weight written; step; step with max_norm; skipped step; skipped step with max_norm; "
      "step of split_master; step of MasterWeights; step of torch's optimizer; "
      "step of master; step of plain 16 bits; step of float; step of SGD; "
      "step of momentum; step of Adam; step of AdamW; step of Lion; step of LAMB; "
      "step of an enabled scaler; step of a disabled scaler; step without the scaler; "
      "update; update to a scale; weight replaced; weight added; bad gradient; "
      "bucket; save; load; load into new objects; load of another class; EmaGuard; "
      "step without a parameter",
      5);
}

}  // namespace
