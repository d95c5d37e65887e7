// Compares random programs of Amp calls at every level, with one or two optimizers and up to three
// losses, with a reference that accumulates the gradients since the last step.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/opt_levels/amp.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/save_to_string.h"
#include "../support/temp_dir.h"
#include "randomized_program.h"

namespace {

using namespace randomized_training;
using mezzo::Amp;
using mezzo::OptimizerRef;
using mezzo::OptLevel;
using test_support::save_to_string;

/// A batch norm with a weight of any shape. It is never called.
struct NormImpl : torch::nn::BatchNorm1dImpl {
  NormImpl() : BatchNorm1dImpl(1) {}
  void replace(const Tensor& parameter) { weight = parameters_["weight"] = parameter; }
};
TORCH_MODULE(Norm);

struct WeightsImpl : torch::nn::Module {
  explicit WeightsImpl(const ReferenceOptimizer& plain) {
    for (std::size_t i = 0; i < plain.weights.size(); ++i) {
      const ReferenceWeight& one = plain.weights[i];
      if (one.is_late) break;
      if (plain.config.is_norm(i)) norm = register_module("norm", Norm());
      put(i, one, make_parameter(one, torch::kFloat));
    }
  }

  /// Sets parameter `i`, or appends it.
  void put(std::size_t i, const ReferenceWeight& plain, const Tensor& parameter) {
    if (i == weights.size()) weights.emplace_back();
    weights[i] = parameter;
    is_tied.resize(weights.size());
    is_tied[i] = plain.is_tied;
    const std::string name = std::to_string(i);
    if (norm && i == get_norm_index()) return norm->replace(parameter);
    set_parameter(name, parameter);
    if (plain.is_tied) set_parameter(name + " again", parameter);
  }

  /// Returns the product of each weight and its factor, undefined if the factor is.
  std::vector<Tensor> forward(const std::vector<Tensor>& factors) {
    std::vector<Tensor> products;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      Tensor& product = products.emplace_back();
      if (!factors[i].defined()) continue;
      const auto times = [&](const Tensor& factor) { return dot(weights[i], factor); };
      product = is_tied[i] ? times(factors[i] / 2) + times(factors[i] / 2) : times(factors[i]);
    }
    return products;
  }

  std::vector<Tensor> weights{};
  std::vector<bool> is_tied{};
  Norm norm{nullptr};

 private:
  std::size_t get_norm_index() {
    if (norm_index_ == std::string::npos) norm_index_ = weights.size() - 1;
    return norm_index_;
  }
  void set_parameter(const std::string& name, const Tensor& parameter) {
    if (parameters_.contains(name)) {
      parameters_[name] = parameter;
    } else {
      register_parameter(name, parameter, parameter.requires_grad());
    }
  }
  static Tensor dot(const Tensor& weight, const Tensor& factor) {
    const bool is_vector = weight.dim() == 1 && weight.scalar_type() == factor.scalar_type();
    return is_vector ? torch::matmul(weight, factor) : (weight * factor).sum();
  }

  std::size_t norm_index_ = std::string::npos;
};
TORCH_MODULE(Weights);

/// The loss scale of a loss, and the state of its iteration.
struct ReferenceLoss {
  double scale = 64;
  int64_t growth_tracker = 0;
  bool is_checked = false;
  bool found = false;
};

/// The backward passes of an optimizer since its last step.
struct ReferenceBackward {
  std::optional<std::size_t> scaled_by{};  ///< the loss whose scale its gradients have
  bool awaits_step = false;
  bool has_unscaled_grads() const { return awaits_step && !scaled_by; }
};

class AmpProgram : public Program {
 public:
  AmpProgram(uint64_t seed, CallCounts& call_counts)
      : Program(seed + (uint64_t{1} << 40), call_counts) {
    is_enabled_ = !random_.one_in(8);
    is_dynamic_ = !random_.one_in(5);
    interval_ = 2 + random_.below(2);
    const double scale = std::ldexp(1.0, static_cast<int>(3 + random_.below(6)));
    loss_scale_ = is_dynamic_ ? mezzo::GradScalerOptions::dynamic({.init_scale = scale,
                                                                   .growth_interval = interval_,
                                                                   .min_scale = 1,
                                                                   .max_scale = kMaxScale})
                              : mezzo::GradScalerOptions::fixed(scale);
    level_ = random_level();
    losses_.resize(static_cast<std::size_t>(1 + random_.below(3)));
    for (ReferenceLoss& loss : losses_) loss.scale = is_enabled_ ? scale : 1;
    report_.line("level ", level_->name(), is_enabled_ ? "" : ", not enabled", ", ", losses_.size(),
                 " losses, scale ", scale, is_dynamic_ ? ", growth_interval " : "",
                 is_dynamic_ ? std::to_string(interval_) : " that is fixed");
    saves_often_ = random_.one_in(2);
    passes_.resize(random_.one_in(2) ? 2 : 1);
    for (std::size_t i = 0; i < passes_.size(); ++i) {
      drawn_configs_.push_back(draw_config());
      reference_.push_back(make_reference(apply_level(drawn_configs_[i]), random_));
      report_.line("optimizer ", i, ": ", reference_[i].config.text());
    }
    make_library();
  }

  bool run() override {
    const int64_t calls = 12 + random_.below(30);
    for (int64_t i = 0; i < calls && !report_.failed(); ++i) {
      call();
      compare();
    }
    return !report_.failed();
  }

 private:
  static constexpr double kMaxScale = 512;  // sums of eight scaled losses are finite in float16
  static constexpr int64_t kMaxPasses = 8;  // their sums are exact in bfloat16

  struct Side {
    Weights model{nullptr};
    std::unique_ptr<torch::optim::Optimizer> optimizer{};
    std::unique_ptr<torch::optim::OptimizerOptions> options{};  ///< before initialize
    std::optional<mezzo::LinearSchedule> schedule{};
    std::optional<mezzo::Ema> averages{};
    std::vector<Vector> reference_averages{};
    bool averages_masters = false;
    bool has_options_of_file = false;  ///< loaded options, which the defaults do not have
  };
  struct Saved {
    std::vector<std::string> optimizers{};
    std::vector<std::string> schedules{};
    std::vector<std::string> models{};
    std::string amp{};
    mezzo::Amp::StateDict apex{};  ///< the entries that Apex saves
    std::vector<ReferenceOptimizer> plain{};
    std::vector<ReferenceLoss> losses{};
  };

  const std::vector<Tensor>& parameters(std::size_t i) const override {
    return sides_[i].model->weights;
  }
  torch::optim::Optimizer& optimizer(std::size_t i) const override { return *sides_[i].optimizer; }
  OptimizerRef optimizer_ref(std::size_t i) override {
    return amp_->wrapped_optimizer(optimizer(i));
  }
  void set_parameter(std::size_t i, std::size_t j, const Tensor& parameter) override {
    sides_[i].model->put(j, reference_[i].weights[j], parameter);
  }
  bool has_unscaled_grads(std::size_t i) const override { return !passes_[i].scaled_by; }
  void reset_averages_and_saved_state(std::size_t i) override {
    saved_.reset();
    sides_[i].averages.reset();
  }

  OptLevel random_level() {
    const auto name = random_.choose<std::string>(
        {"O0", "O1", "O1_bf16", "O2", "O2", "O2_bf16", "O3", "O3_bf16"});
    mezzo::OptLevelOverrides overrides{.loss_scale = *loss_scale_};
    if (name == "O2" && random_.one_in(2)) overrides.keep_batchnorm_fp32 = false;
    return OptLevel::parse(name, overrides);
  }
  torch::ScalarType model_dtype() const {
    return is_enabled_ ? level_->cast_model_type().value_or(torch::kFloat) : torch::kFloat;
  }
  bool has_regions() const { return is_enabled_ && level_->uses_autocast(); }
  bool has_masters() const { return is_enabled_ && level_->master_weights(); }

  OptimizerConfig draw_config() {
    OptimizerConfig config = random_config(random_);
    config.accumulates_in_float32 = config.is_mezzo && random_.one_in(3);
    config.has_unusual_shapes = random_.one_in(3);
    config.has_grad_hooks = random_.one_in(3);
    config.has_frozen_weights = random_.one_in(4);
    config.has_tied_weights = random_.one_in(4);
    config.has_schedule = random_.one_in(4);
    return config;
  }

  /// The configuration before initialize at the present level.
  OptimizerConfig initial_config_at_level(OptimizerConfig config) const {
    config.dtype = model_dtype();
    const bool keeps_norms = is_16_bit(config.dtype) && level_->keep_batchnorm_fp32();
    config.norm_dtype = keeps_norms ? torch::kFloat : config.dtype;
    config.has_master_weights = !config.is_mezzo && has_masters();
    config.accumulates_in_float32 &= is_16_bit(config.dtype);
    const bool is_split = config.storage == WeightStorage::split_master;
    if (!config.is_mezzo || (is_split && config.dtype != torch::kBFloat16)) {
      config.storage = WeightStorage::plain;
    }
    return config;
  }
  OptimizerConfig apply_level(const OptimizerConfig& drawn) const {
    OptimizerConfig config = initial_config_at_level(drawn);
    const bool is_plain = config.storage == WeightStorage::plain;
    if (config.is_mezzo && is_plain && has_masters()) config.storage = WeightStorage::fp32_master;
    return config;
  }

  void make_library() {
    region_.reset();
    amp_.reset();
    sides_.clear();
    for (std::size_t i = 0; i < reference_.size(); ++i) {
      Side& side = sides_.emplace_back();
      side.model = Weights(reference_[i]);
      side.optimizer =
          make_optimizer(initial_config_at_level(drawn_configs_[i]), side.model->weights);
      side.options = side.optimizer->param_groups()[0].options().clone();
    }
    const mezzo::InitializeOptions options{
        .num_losses = static_cast<int64_t>(losses_.size()), .enabled = is_enabled_, .verbosity = 0};
    if (sides_.size() == 1) {
      amp_.emplace(mezzo::initialize(sides_[0].model, *sides_[0].optimizer, *level_, options));
    } else {
      amp_.emplace(mezzo::initialize({sides_[0].model, sides_[1].model},
                                     {*sides_[0].optimizer, *sides_[1].optimizer}, *level_,
                                     options));
    }
    for (std::size_t i = 0; i < sides_.size(); ++i) {
      if (drawn_configs_[i].accumulates_in_float32) mezzo::accumulate_in_float(parameters(i));
      for (const ReferenceWeight& one : reference_[i].weights) {
        if (one.is_late) add_parameter(i, one);
      }
      if (reference_[i].config.has_schedule) {
        sides_[i].schedule.emplace(amp_->wrapped_optimizer(optimizer(i)), kCurve);
      }
    }
    for (std::size_t id = 0; id < losses_.size(); ++id) {
      amp_->scaler(static_cast<int64_t>(id)).on_skip([this, id](const mezzo::SkippedStep& skipped) {
        reported_skips_[id] = {skipped.scale, reported_skips_[id].second + 1};
      });
    }
  }

  void add_parameter(std::size_t i, const ReferenceWeight& weight) override {
    Side& side = sides_[i];
    const Tensor parameter = make_late_parameter(weight);
    side.model->put(side.model->weights.size(), weight, parameter);
    if (drawn_configs_[i].accumulates_in_float32) mezzo::accumulate_in_float({parameter});
    if (!weight.begins_group) {
      return side.optimizer->param_groups()[0].params().push_back(parameter);
    }
    add_param_group(*side.optimizer, make_group(weight, parameter, *side.options,
                                                side.has_options_of_file || random_.one_in(2)));
  }

  void compare_scales() override {
    if (reported_skips_ != expected_skips_) report_.fail("on_skip was called for other skips");
    for (std::size_t loss = 0; loss < losses_.size(); ++loss) {
      const double scale = amp_->scaler(static_cast<int64_t>(loss)).get_scale();
      if (scale != losses_[loss].scale) {
        report_.fail("the scale of loss ", loss, " is ", scale, "; expected ", losses_[loss].scale);
      }
    }
  }

  // --- Reference -------------------------------------------------------------------------------

  /// Checks and unscales the gradients of an optimizer.
  bool reference_unscale_optimizer(std::size_t i) {
    ReferenceBackward& passes = passes_[i];
    ReferenceLoss& loss = losses_[*passes.scaled_by];
    for (ReferenceWeight& one : reference_[i].weights) one.cast_gradient_to_float32();
    passes.scaled_by.reset();
    if (!reference_[i].has_gradient()) return false;
    const bool found = !reference_[i].is_finite();
    loss.is_checked = true;
    loss.found |= found;
    return found;
  }

  /// Unscales all gradients that have the scale of a loss, and updates the scale.
  void reference_unscale(std::size_t id) {
    for (std::size_t i = 0; i < passes_.size(); ++i) {
      if (passes_[i].scaled_by == id) reference_unscale_optimizer(i);
    }
    ReferenceLoss& loss = losses_[id];
    if (!loss.is_checked) return;
    if (loss.found) expected_skips_[id] = {loss.scale, expected_skips_[id].second + 1};
    if (!is_dynamic_) {
      loss.growth_tracker = 0;
    } else if (loss.found) {
      loss.scale = std::max(loss.scale / 2, 1.0);
      loss.growth_tracker = 0;
    } else if (++loss.growth_tracker == interval_) {
      loss.scale = std::min(loss.scale * 2, kMaxScale);
      loss.growth_tracker = 0;
    }
    loss.is_checked = loss.found = false;
  }

  // --- Calls -----------------------------------------------------------------------------------

  void call() {
    const std::size_t i = random_optimizer_index();
    call_random({{8, [&] { scale_loss(); }},
                 {2, [&] { clip(i); }},
                 {2, [&] { zero_grad(i); }},
                 {2, [&] { drop_gradient(i); }},
                 {1,
                  [&] {
                    region_.reset();  // its weight cache would be stale
                    modify_weight(i);
                  }},
                 {1, [&] { check_masters(i); }},
                 {2, [&] { save_or_load(); }},
                 {2, [&] { evaluate(i); }},
                 {2, [&] { check_averages(i); }},
                 {1, [&] { replace_weight(i); }},
                 {1, [&] { add_weight(i); }},
                 {1, [&] { toggle_frozen(i); }},
                 {1, [&] { step_with_bad_gradient(i); }},
                 {1, [&] { move_gradients(i); }},
                 {1, [&] { load_wrong_state(i); }},
                 {1, [&] { open_or_close_region(); }},
                 {1, [&] { reallocate_weights(i); }},
                 {1, [&] { move_amp(); }},
                 {5, [&] { step(i); }}});
  }

  /// Calls a model with a factor for each weight. Weights without a factor are not used.
  std::vector<Tensor> forward(std::size_t i, const std::vector<std::optional<Vector>>& factors) {
    std::vector<Tensor> tensors;
    for (std::size_t j = 0; j < factors.size(); ++j) {
      Tensor& one = tensors.emplace_back();
      if (factors[j]) one = make_tensor(*factors[j], torch::kFloat, reference_[i].weights[j].shape);
    }
    return amp_->forward(sides_[i].model, tensors);
  }

  using Gradients = std::vector<std::optional<ReferenceGradient>>;

  void scale_loss() {
    const auto id = static_cast<std::size_t>(random_.below(static_cast<int64_t>(losses_.size())));
    const bool delays = random_.one_in(3);
    const bool throws = random_.one_in(10);
    const bool with_inf = is_enabled_ && random_.one_in(10);
    std::vector<std::size_t> stepped;
    for (std::size_t i = 0; i < reference_.size(); ++i) {
      if (reference_.size() == 1 || !random_.one_in(3)) stepped.push_back(i);
    }
    for (const std::size_t i : stepped) {
      if (backward_counts_[i] >= kMaxPasses || must_zero_grad_[i]) return zero_grad(i);
    }
    if (stepped.empty()) return;
    report_.line("scale_loss, loss ", id, delays ? ", delayed" : "",
                 throws ? ", which throws after backward" : "");
    count(throws ? "pass that throws" : delays ? "delayed pass" : "pass");
    for (const std::size_t i : stepped) {  // unscales gradients of other losses first
      if (passes_[i].scaled_by.value_or(id) == id) continue;
      reference_unscale(*passes_[i].scaled_by);
      count("scale that moves before a pass");
    }
    std::vector<torch::optim::Optimizer*> optimizers;
    Tensor loss = torch::zeros({});
    std::vector<std::optional<Gradients>> stashed;
    bool is_first = true;
    for (const std::size_t i : stepped) {
      ReferenceOptimizer& side = reference_[i];
      ++backward_counts_[i];
      optimizers.push_back(&optimizer(i));
      stashed.push_back(reference_begin_backward(i, id));
      std::vector<std::optional<Vector>> factors(side.weights.size());
      for (std::size_t j = 0; j < side.weights.size(); ++j) {
        ReferenceWeight& weight = side.weights[j];
        if (random_.one_in(4)) continue;
        const bool may_be_bad = !weight.value.empty() && !weight.is_frozen;
        const bool is_bad = may_be_bad && std::exchange(is_first, false) && with_inf;
        if (is_bad) count("inf");
        factors[j] = random_gradient(random_, weight.value.size(), is_bad);
        report_.line("    optimizer ", i, " weight ", j, ": ", format(*factors[j]));
        if (weight.is_frozen) {
          count("frozen weight");
        } else {
          weight.accumulate(*factors[j]);
        }
      }
      for (const Tensor& product : forward(i, factors)) {
        if (product.defined()) loss = loss + product.to(torch::kFloat);
      }
    }
    const bool has_graph = loss.requires_grad();
    // The new gradients are unscaled and added to the stashed ones.
    const bool has_aside = std::any_of(stashed.begin(), stashed.end(),
                                       [](const auto& one) { return one.has_value(); });
    const bool is_unscaled = is_enabled_ && !throws && (!delays || has_aside);
    std::vector<bool> is_bad;
    if (is_unscaled) {
      for (const std::size_t i : stepped) {
        is_bad.push_back(reference_[i].has_gradient() && !reference_[i].is_finite());
      }
      reference_unscale(id);
    }
    const bool overflows = std::find(is_bad.begin(), is_bad.end(), true) != is_bad.end();
    for (std::size_t k = 0; k < stepped.size() && is_enabled_; ++k) {
      ReferenceOptimizer& side = reference_[stepped[k]];
      if (throws && stashed[k]) passes_[stepped[k]].scaled_by.reset();
      if (overflows && !delays && stepped.size() > 1) mark_bad(side);
      for (std::size_t j = 0; j < side.weights.size() && stashed[k]; ++j) {
        if (throws) side.weights[j].gradient.reset();
        add(side.weights[j], (*stashed[k])[j]);
      }
    }
    const mezzo::ScaleLossOptions options{.loss_id = static_cast<int64_t>(id),
                                          .delay_unscale = delays};
    try {
      amp_->scale_loss(loss, optimizers, options, [&](const Tensor& scaled) {
        if (has_graph) scaled.backward();
        if (throws) throw std::runtime_error("expected");
      });
      if (throws) report_.fail("no exception");
    } catch (const std::exception& exception) {
      if (!throws) report_.fail("exception: ", exception.what());
    }
  }

  /// A loss that overflowed makes all of its optimizers skip.
  void mark_bad(ReferenceOptimizer& side) {
    count("inf of one optimizer that another skips for");
    for (ReferenceWeight& one : side.weights) {
      if (!one.gradient || one.gradient->values.empty()) continue;
      one.gradient->values[0] = std::nan("");
      break;
    }
  }

  /// Stashes unscaled gradients. Returns none if the gradients have the scale of the loss.
  std::optional<Gradients> reference_begin_backward(std::size_t i, std::size_t id) {
    if (!is_enabled_) return std::nullopt;
    const bool has_unscaled_grads = passes_[i].has_unscaled_grads();
    passes_[i].awaits_step = true;
    passes_[i].scaled_by = id;
    if (!has_unscaled_grads) return std::nullopt;
    Gradients stashed;
    for (ReferenceWeight& one : reference_[i].weights) {
      stashed.push_back(std::exchange(one.gradient, std::nullopt));
    }
    return stashed;
  }

  static void add(ReferenceWeight& weight, const std::optional<ReferenceGradient>& more) {
    if (!more) return;
    if (!weight.gradient) {
      weight.gradient = more;
      return;
    }
    for (std::size_t k = 0; k < more->values.size(); ++k)
      weight.gradient->values[k] += more->values[k];
    if (more->dtype == torch::kFloat) weight.gradient->dtype = torch::kFloat;
    const bool is_rounded = more->tolerance > 0 && is_16_bit(weight.gradient->dtype);
    weight.gradient->tolerance = is_rounded ? 0x1p-2 : more->tolerance > 0 ? 1e-2 : 0;
  }

  void zero_grad(std::size_t i) {
    zero_grad(i, random_.choose<std::string>({"amp", "model", "optimizer"}));
  }
  void zero_grad(std::size_t i, const std::string& by) {
    const bool set_to_none = !random_.one_in(3);
    report_.line(by, ".zero_grad of optimizer ", i, set_to_none ? "" : ", set_to_none = false");
    const char* const when = passes_[i].scaled_by     ? " after a delayed pass"
                             : passes_[i].awaits_step ? " after a pass"
                                                      : " after a step";
    count(by + ".zero_grad" + when);
    reference_[i].zero_grad(set_to_none);
    backward_counts_[i] = 0;
    must_zero_grad_[i] = false;
    if (by == "amp") passes_[i] = {};
    expect(false, [&] {
      if (by == "amp") return amp_->zero_grad(optimizer(i), set_to_none);
      if (by == "model") return sides_[i].model->zero_grad(set_to_none);
      optimizer(i).zero_grad(set_to_none);
    });
  }

  // --- Parameters, evaluation, averages, invalid gradients ---------------------------------------

  void add_weight(std::size_t i) {
    const ReferenceOptimizer& side = reference_[i];
    // The schedule of a libtorch optimizer does not apply to the first step of a new group.
    if (side.config.has_schedule && !side.is_mixed_precision()) return;
    torch::ScalarType dtype = side.config.dtype;
    if (random_.one_in(3)) dtype = random_.one_in(2) ? torch::kFloat : torch::kDouble;
    Program::add_weight(i, dtype);
  }

  void toggle_frozen(std::size_t i) {
    const std::size_t j = random_weight_index(reference_[i]);
    ReferenceWeight& weight = reference_[i].weights[j];
    weight.is_frozen = !weight.is_frozen;
    report_.line("parameter ", j, " of optimizer ", i, weight.is_frozen ? " is frozen" : " thaws");
    count(weight.is_frozen ? "weight frozen" : "weight thawed");
    parameters(i)[j].requires_grad_(!weight.is_frozen);
  }

  void evaluate(std::size_t i) {
    report_.line("evaluation of model ", i);
    count("evaluation");
    std::vector<Vector> values;
    for (const ReferenceWeight& one : reference_[i].weights) values.push_back(one.value);
    compare_products(i, values);
  }

  /// Compares the output of a model with the expected one for weights `values`.
  void compare_products(std::size_t i, const std::vector<Vector>& values) {
    const std::vector<ReferenceWeight>& weights = reference_[i].weights;
    std::vector<std::optional<Vector>> factors;
    for (const ReferenceWeight& one : weights) {
      factors.emplace_back(random_gradient(random_, one.value.size(), false));
    }
    std::optional<torch::NoGradGuard> no_grad;
    if (random_.one_in(2)) no_grad.emplace();
    const std::vector<Tensor> products = forward(i, factors);
    const double of_level =
        half_ulp(has_regions() ? level_->mixed_precision_policy().compute_dtype : model_dtype());
    for (std::size_t j = 0; j < weights.size(); ++j) {
      const ReferenceWeight& weight = weights[j];
      const double unit = std::max(of_level, half_ulp(weight.dtype));
      double right = 0;
      double tolerance = 1e-6;
      for (std::size_t k = 0; k < values[j].size(); ++k) {
        const double factor = (*factors[j])[k];
        right += values[j][k] * factor;
        tolerance += std::abs(factor) * (weight.error[k] + 4 * unit * std::abs(values[j][k]));
      }
      const auto actual = products[j].item<double>();
      if (!is_close(actual, right, tolerance)) {
        report_.fail("weight ", j, " of optimizer ", i, " times ", format(*factors[j]), " is ",
                     actual, "; expected ", right, ", within ", tolerance);
      }
    }
  }

  /// Replaces the weights by averages during an evaluation.
  void check_averages(std::size_t i) {
    Side& side = sides_[i];
    if (!side.averages)
      side.averages_masters = reference_[i].has_master_params() && random_.one_in(2);
    if (side.averages_masters) check_masters(i);
    region_.reset();  // an EmaGuard must be outside autocast regions
    report_.line("EmaGuard of optimizer ", i, side.averages_masters ? ", of masters" : "");
    count("averages");
    if (!side.averages) {
      mezzo::EmaOptions options{.decay = 0.5};
      if (side.averages_masters) {
        options.masters = [this, i] { return amp_->master_params(optimizer(i)); };
      }
      side.averages.emplace(side.model->weights, options);
      side.reference_averages = averaged_values(i);
    } else {
      side.averages->update();
      follow_average(i);
    }
    compare_averages(i);
    const mezzo::EmaGuard scope(*side.averages);
    compare_products(i, side.reference_averages);
  }

  std::vector<Vector> averaged_values(std::size_t i) {
    std::vector<Vector> values;
    for (const Tensor& one :
         sides_[i].averages_masters ? amp_->master_params(optimizer(i)) : parameters(i)) {
      values.push_back(read_values(one));
    }
    return values;
  }

  void follow_average(std::size_t i) {
    const std::vector<Vector> values = averaged_values(i);
    for (std::size_t j = 0; j < values.size(); ++j) {
      for (std::size_t k = 0; k < values[j].size(); ++k) {
        double& average = sides_[i].reference_averages[j][k];
        average = (average + values[j][k]) / 2;
      }
    }
  }

  void compare_averages(std::size_t i) {
    for (std::size_t j = 0; j < sides_[i].reference_averages.size(); ++j) {
      const Vector actual = read_values(sides_[i].averages->averages()[j]);
      Vector& right = sides_[i].reference_averages[j];
      Vector tolerance;
      for (const double one : right) tolerance.push_back(0x1p-20 * std::abs(one) + 1e-6);
      if (!are_close(actual, right, tolerance)) {
        report_.fail("average ", j, " is ", format(actual), "; expected ", format(right));
      }
      right = actual;
    }
  }

  /// Whether the gradients of the other optimizer have the same loss scale.
  bool shares_scale(std::size_t i) const {
    const std::size_t other = 1 - i;
    return other < passes_.size() && passes_[i].scaled_by &&
           passes_[i].scaled_by == passes_[other].scaled_by;
  }

  /// Moves weights to new memory. 16-bit weights are float32 in between, as for an export.
  void reallocate_weights(std::size_t i) {
    report_.line("weights of optimizer ", i, " move");
    count("weights moved");
    for (std::size_t j = 0; j < parameters(i).size(); ++j) {
      const Tensor& one = parameters(i)[j];
      const torch::ScalarType dtype = one.scalar_type();
      one.set_data(is_16_bit(dtype) ? one.detach().to(torch::kFloat) : one.detach().clone());
      if (is_16_bit(dtype)) one.set_data(one.detach().to(dtype));
    }
  }

  void move_amp() {
    report_.line("the Amp moves");
    count("Amp moved");
    Amp moved = std::move(*amp_);
    amp_.emplace(std::move(moved));
  }

  /// Begins or ends an autocast region around several calls.
  void open_or_close_region() {
    if (!has_regions()) return;
    report_.line(region_ ? "the region ends" : "a region begins");
    count("region");
    if (region_) return region_.reset();
    region_.emplace(mezzo::AutocastOptions{
        .device_type = torch::kCPU, .dtype = level_->mixed_precision_policy().compute_dtype});
  }

  void step_with_bad_gradient(std::size_t i) {
    if (!reference_[i].config.is_mezzo && !is_enabled_) return;
    if (shares_scale(i)) return;  // the other optimizer's gradients may already be unscaled
    Program::step_with_bad_gradient(i, "amp.step",
                                    [&] { (void)amp_->step(optimizer(i), random_step_options()); });
  }

  // --- Steps -----------------------------------------------------------------------------------

  mezzo::StepOptions random_step_options() {
    mezzo::StepOptions options;
    if (random_.one_in(3)) options.max_norm = random_.choose<double>({0.5, 1, 2});
    options.zero_grad = random_.one_in(3);
    return options;
  }

  void step(std::size_t i) {
    ReferenceOptimizer& side = reference_[i];
    ReferenceBackward& passes = passes_[i];
    const mezzo::StepOptions options = random_step_options();
    report_.line("amp.step(optimizer ", i, ", {.max_norm = ", options.max_norm,
                 ", .zero_grad = ", options.zero_grad, "})");
    bool throws = is_enabled_ && !passes.awaits_step;
    if (!throws) {
      if (passes.scaled_by) {
        count("step of delayed passes");
        reference_unscale(*passes.scaled_by);
      }
    }
    bool applied = false;
    const double norm = side.norm();
    if (!throws) {
      applied = !is_enabled_ || side.is_finite();
      if (applied && !side.is_mixed_precision() && std::isfinite(options.max_norm)) {
        side.clip_norm(side.norm(), options.max_norm);  // in place, like clip_grad_norm_
        side.step(1);
      } else if (applied) {
        side.step(clip_factor(side.norm(), options.max_norm));
      }
      if (options.zero_grad) side.zero_grad(false);
      must_zero_grad_[i] = !options.zero_grad;
      backward_counts_[i] = 0;
      count(applied ? "step" : "skipped step");
      count(is_enabled_ ? "step at " + std::string(level_->name()) : "step of a disabled Amp");
    } else {
      count("step that throws");
    }
    expect(throws, [&] {
      const auto result = amp_->step(optimizer(i), options);
      compare_result(result, applied, norm);
      if (sides_[i].schedule) sides_[i].schedule->step(result);
      if (!sides_[i].averages || random_.one_in(2)) return;
      report_.line("    averages follow");
      count(applied ? "averages follow" : "averages that follow no skipped step");
      sides_[i].averages->update(result);
      if (applied) follow_average(i);
    });
    if (throws) return;
    passes = {};
    compare();
    if (saves_often_ && !report_.failed() && random_.one_in(2)) save_or_load();
  }

  // --- Saving and loading ----------------------------------------------------------------------

  void save_or_load() {
    for (std::size_t i = 0; i < passes_.size(); ++i) {  // discards the batch
      if (passes_[i].awaits_step) zero_grad(i, "amp");
    }
    if (!saved_ || random_.one_in(3)) return save();
    load();
  }

  void save() {
    report_.line("save");
    count("save");
    saved_.emplace();
    expect(false, [&] {
      for (const Side& side : sides_) {
        saved_->optimizers.push_back(save_to_string(amp_->wrapped_optimizer(*side.optimizer)));
        saved_->schedules.push_back(side.schedule ? save_to_string(*side.schedule) : "");
        saved_->models.push_back(save_to_string(side.model));
      }
      saved_->amp = save_to_string(*amp_);
      for (const auto& [key, entry] : amp_->state_dict()) {
        saved_->apex[key] = {{"loss_scale", entry.at("loss_scale")},
                             {"unskipped", entry.at("unskipped")}};
      }
    });
    expect(false, [&] { mezzo::save_checkpoint(checkpoint_file(), training_state()); });
    saved_->plain = reference_;
    saved_->losses = losses_;
  }

  void load() {
    bool has_new_objects = random_.one_in(2);
    for (const ReferenceOptimizer& side : reference_)
      has_new_objects |= !side.is_mixed_precision();  // torch::optim keeps its old state
    report_.line("load", has_new_objects ? " into new objects" : "");
    count(has_new_objects ? "load into new objects" : "load");
    restore_reference(saved_->plain, has_new_objects);
    losses_ = saved_->losses;
    if (has_new_objects) must_zero_grad_ = {};
    expect(false, [&] {
      if (has_new_objects) make_library();
      if (random_.one_in(3)) {
        count("checkpoint");
        mezzo::load_checkpoint(checkpoint_file(), training_state());
        return;
      }
      for (std::size_t i = 0; i < sides_.size(); ++i) {
        OptimizerRef loaded = optimizer_ref(i);
        test_support::load_from_string(sides_[i].model, saved_->models[i]);
        test_support::load_from_string(loaded, saved_->optimizers[i]);
        sides_[i].options = optimizer(i).param_groups()[0].options().clone();
        sides_[i].has_options_of_file = true;
        if (!sides_[i].schedule || (reference_[i].is_mixed_precision() && random_.one_in(2)))
          continue;
        test_support::load_from_string(*sides_[i].schedule, saved_->schedules[i]);
      }
      if (random_.one_in(3)) return amp_->load_state_dict(saved_->apex);
      test_support::load_from_string(*amp_, saved_->amp);
    });
  }

  static std::filesystem::path checkpoint_file() {
    static const test_support::TempDir temp_dir;
    return temp_dir.path() / "checkpoint";
  }
  mezzo::TrainingState training_state() {
    mezzo::TrainingState state;
    for (std::size_t i = 0; i < sides_.size(); ++i) {
      const std::string number = std::to_string(i);
      state.add("model" + number, sides_[i].model);
      state.add("optimizer" + number, amp_->wrapped_optimizer(optimizer(i)));
      if (sides_[i].schedule) state.add("schedule" + number, *sides_[i].schedule);
    }
    state.add("amp", *amp_);
    return state;
  }

  /// Loading the state of other objects throws and changes nothing.
  void load_wrong_state(std::size_t i) {
    if (random_.one_in(2)) {
      if (!is_enabled_) return;
      report_.line("load of an Amp of more losses");
      count("wrong file");
      return expect(true, [&] {
        mezzo::Amp::StateDict state;
        for (std::size_t id = 0; id <= losses_.size(); ++id) {
          state["loss_scaler" + std::to_string(id)] = {{"loss_scale", 4}, {"unskipped", 1}};
        }
        amp_->load_state_dict(state);
      });
    }
    if (!reference_[i].is_mixed_precision()) return;
    report_.line("load of an optimizer of one parameter more, ", i);
    count("wrong file");
    std::vector<Tensor> parameters;
    for (const Tensor& one : sides_[i].model->weights) parameters.push_back(torch::ones_like(one));
    parameters.push_back(torch::ones({2}));
    for (Tensor& one : parameters) one.mutable_grad() = torch::ones_like(one);
    const test_support::OwnedOptimizer other(
        make_optimizer(initial_config_at_level(drawn_configs_[i]), parameters),
        reference_[i].config.has_master_weights);
    std::string file;
    expect(false, [&] {
      (void)other.ref().step();
      file = save_to_string(other.ref());
    });
    OptimizerRef loaded = optimizer_ref(i);
    expect(true, [&] { test_support::load_from_string(loaded, file); });
  }

  bool is_enabled_ = true;
  bool is_dynamic_ = true;
  std::optional<mezzo::GradScalerOptions> loss_scale_;
  std::optional<OptLevel> level_;
  int64_t interval_ = 2;
  bool saves_often_ = false;
  std::vector<OptimizerConfig> drawn_configs_;  // before the level changes them
  std::vector<ReferenceBackward> passes_;
  std::vector<ReferenceLoss> losses_;
  std::array<std::pair<double, int64_t>, 3> expected_skips_{};  // last scale and count of skips
  std::array<std::pair<double, int64_t>, 3> reported_skips_{};
  std::array<int64_t, 2> backward_counts_{};  // since zero_grad
  std::array<bool, 2> must_zero_grad_{};      // .grad has the gradients of a step
  std::vector<Side> sides_;
  std::optional<Amp> amp_;
  std::optional<Saved> saved_;
  std::optional<mezzo::AutocastGuard<>> region_;
};

TEST(RandomizedTraining, AmpMatchesReference) {
  run_programs<AmpProgram>(
      400,
      "pass; delayed pass; pass that throws; scale that moves before a pass; inf; "
      "inf of one optimizer that another skips for; libtorch's clip_grad_norm_; "
      "libtorch's clip_grad_value_; optimizer.zero_grad after a pass; "
      "optimizer.zero_grad after a delayed pass; optimizer.zero_grad after a step; "
      "model.zero_grad after a pass; model.zero_grad after a delayed pass; "
      "model.zero_grad after a step; amp.zero_grad after a pass; "
      "amp.zero_grad after a delayed pass; gradient dropped; master_params; "
      "weight written; weight replaced; weight added; weight frozen; weight thawed; "
      "frozen weight; evaluation; averages; averages follow; "
      "averages that follow no skipped step; bad gradient; bucket; region; wrong file; "
      "weights moved; Amp moved; checkpoint; throws; "
      "step; skipped step; step that throws; step of delayed passes; step at O0; step at O1; step "
      "at O1_bf16; "
      "step at O2; step at O2_bf16; step at O3; step at O3_bf16; step of a disabled Amp; "
      "save; load; load into new objects",
      1);
}

}  // namespace
