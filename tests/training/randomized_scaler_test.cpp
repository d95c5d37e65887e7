// Random programs of a GradScaler's calls, libtorch's and mezzo's, in any order, beside plain loops
// over doubles that do what the documentation says.

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

using namespace step_programs;
using mezzo::GradScaler;
using mezzo::GradScalerOptions;
using mezzo::OptimizerRef;
using test_support::OwnedOptimizer;

/// A GradScaler as numbers.
struct PlainScaler {
  enum class Stage { ready, unscaled, stepped };
  struct Record {
    Stage stage = Stage::ready;
    std::optional<bool> found{};
    bool is_known = false;
    std::set<std::size_t> unscaled{};  ///< parameters whose gradients were unscaled
    std::set<std::size_t> cleared{};   ///< those that had none when a loss was scaled since
  };

  bool is_enabled = true;
  bool allows_half = true;
  bool has_scaled = false;
  double scale = 1;
  double max_scale = 4096;
  int64_t interval = 2;
  int64_t clean = 0;
  std::vector<Record> records{};

  bool is_between_iterations() const {
    return std::none_of(records.begin(), records.end(), [](auto& one) { return one.is_known; });
  }
  void clear() { records.assign(records.size(), {}); }
  bool update() {
    std::optional<bool> found;
    for (const Record& one : records) {
      if (one.found) found = found.value_or(false) || *one.found;
    }
    if (!found) return false;
    if (*found) {
      scale = std::max(scale / 2, 1.0);
      clean = 0;
    } else if (++clean == interval) {
      scale = std::min(scale * 2, max_scale);
      clean = 0;
    }
    clear();
    return true;
  }
};

class ScalerProgram : public Program {
 public:
  ScalerProgram(uint64_t seed, Counts& counts) : Program(seed, counts) {
    const auto sides = static_cast<std::size_t>(1 + (random_.one_in(3) ? 1 : 0));
    for (std::size_t i = 0; i < sides; ++i) {
      Recipe recipe = random_recipe(random_);
      if (recipe.dtype == torch::kFloat && random_.one_in(3)) recipe.dtype = torch::kDouble;
      recipe.has_odd_shapes = random_.one_in(3);
      recipe.has_hooks = random_.one_in(3);
      plain_.push_back(make_plain(recipe, random_));
      report_.line("optimizer ", i, ": ", plain_[i].recipe.text());
    }
    scaler_.records.resize(sides);
    likes_files_ = random_.one_in(3);
    scaler_.is_enabled = !random_.one_in(4);
    scaler_.allows_half = !random_.one_in(4);
    scaler_.scale = std::ldexp(1.0, static_cast<int>(3 + random_.below(8)));
    scaler_.interval = 2 + random_.below(3);
    for (const PlainSide& side : plain_) {  // of weights that are added later too
      const bool has_masters =
          side.recipe.in_master_weights || side.recipe.storage == WeightStorage::fp32_master;
      has_rough_half_ |= side.recipe.dtype == torch::kHalf && !has_masters;
    }
    make_library();
    report_.line("GradScaler(init_scale ", scaler_.scale, ", growth_interval ", scaler_.interval,
                 ", max_scale ", scaler_.max_scale, scaler_.is_enabled ? "" : ", disabled",
                 scaler_.allows_half ? ", allow_fp16_gradients" : "", ")");
    if (!scaler_.is_enabled) scaler_.scale = 1;
  }

  bool run() override {
    const int64_t calls = 16 + random_.below(36);
    for (int64_t i = 0; i < calls && !report_.failed(); ++i) {
      call();
      compare();
    }
    for (std::size_t side = 0; side < plain_.size() && !report_.failed(); ++side) {
      look_at_masters(side);
      compare();
    }
    return !report_.failed();
  }

 private:
  using Stage = PlainScaler::Stage;

  struct Side {
    std::vector<Tensor> parameters;
    OwnedOptimizer owned;
  };

  /// All that files have, and the weights.
  struct Saved {
    std::vector<std::string> optimizers{};
    std::vector<std::vector<Tensor>> weights{};
    std::string scaler{};
    std::vector<PlainSide> plain{};
    PlainScaler plain_scaler{};
  };

  const std::vector<Tensor>& parameters(std::size_t i) const override {
    return sides_[i].parameters;
  }
  torch::optim::Optimizer& optimizer(std::size_t i) const override {
    return sides_[i].owned.ref().optimizer();
  }
  OptimizerRef any(std::size_t i) override { return sides_[i].owned.ref(); }
  void set_parameter(std::size_t i, std::size_t j, const Tensor& parameter) override {
    sides_[i].parameters[j] = parameter;
  }
  void add_parameter(std::size_t i, const PlainWeight& weight) override {
    const Tensor parameter = make_late_parameter(weight);
    sides_[i].parameters.push_back(parameter);
    auto& groups_of = optimizer(i);
    if (!weight.begins_group) return groups_of.param_groups()[0].params().push_back(parameter);
    groups_of.add_param_group(make_group(weight, parameter, groups_of.param_groups()[0].options()));
  }
  bool is_true(std::size_t) const override { return true; }  // this program knows every scale
  void compare_scales() override {
    if (library_->get_scale() != scaler_.scale) {
      report_.fail("get_scale() is ", library_->get_scale(), "; right is ", scaler_.scale);
    }
  }
  void forget_averages_and_files(std::size_t) override { saved_.reset(); }
  PlainScaler::Record& known(std::size_t i) {
    scaler_.records[i].is_known = true;
    return scaler_.records[i];
  }

  void make_library() {
    sides_.clear();
    for (const PlainSide& plain : plain_) {
      std::vector<Tensor> parameters;
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      for (const PlainWeight& one : plain.weights) {
        if (one.begins_group && optimizer == nullptr) {
          optimizer = make_optimizer(plain.recipe, parameters);
        }
        parameters.push_back(one.begins_group ? make_late_parameter(one)
                                              : make_parameter(one, one.dtype));
        if (!one.begins_group) continue;
        optimizer->add_param_group(
            make_group(one, parameters.back(), optimizer->param_groups()[0].options()));
      }
      if (optimizer == nullptr) optimizer = make_optimizer(plain.recipe, parameters);
      if (plain.recipe.accumulates_in_float) mezzo::accumulate_in_float(parameters);
      sides_.push_back({parameters, {std::move(optimizer), plain.recipe.in_master_weights}});
    }
    library_.emplace(GradScalerOptions{.init_scale = scaler_.is_enabled ? scaler_.scale : 1,
                                       .growth_interval = scaler_.interval,
                                       .enabled = scaler_.is_enabled,
                                       .min_scale = 1,
                                       .max_scale = scaler_.max_scale,
                                       .allow_fp16_gradients = scaler_.allows_half});
    library_->on_skip(nullptr);
  }

  // --- The calls -------------------------------------------------------------------------------

  /// Mostly what a loop does next, and now and then anything.
  void call() {
    const std::size_t i = random_side();
    const bool steps_alone = scaler_.records[i].stage == Stage::unscaled || !scaler_.is_enabled;
    make_one_of({{5, [&] { backward(); }},
                 {3, [&] { unscale(i); }},
                 {3, [&] { clip(i); }},
                 {2, [&] { zero_grad(i); }},
                 {2, [&] { drop_gradient(i); }},
                 {1, [&] { look_at_masters(i); }},
                 {1, [&] { write_weight(i); }},
                 {1, [&] { steps_alone ? step_without_scaler(i) : step(i); }},
                 {3, [&] { step(i); }},
                 {3, [&] { update(); }},
                 {1, [&] { update_to(); }},
                 {1, [&] { save_or_load(); }},
                 {1, [&] { scaler_.records[i].is_known ? void() : replace_weight(i); }},
                 {1, [&] { add_weight(i, plain_[i].recipe.dtype); }},
                 {1, [&] { meet_bad_gradient(i); }},
                 {1, [&] { step(i); }},
                 {1, [&] { move_gradients(i); }},
                 {1, [&] { load_other_class(i); }},
                 {1, [&] { enter_ema_scope(i); }},
                 {1, [&] { steps_alone ? step_without_a_parameter(i) : step(i); }},
                 {1, [&] { save_or_load(); }}});
  }

  void backward() {
    bool may_be_misuse = false;
    for (const auto& record : scaler_.records) {
      may_be_misuse |= scaler_.is_enabled && record.stage == Stage::unscaled;
    }
    // Scaled gradients on top of true ones: what is trained is their sum. In half it may overflow.
    if (may_be_misuse && (has_rough_half_ || !random_.one_in(4))) return;
    const bool with_inf = scaler_.is_enabled && random_.one_in(6);
    Tensor loss = torch::zeros({});
    report_.line("backward");
    count(may_be_misuse ? "backward after unscale_" : "backward");
    bool is_first = true;
    for (std::size_t i = 0; i < plain_.size(); ++i) {
      for (std::size_t j = 0; j < plain_[i].weights.size(); ++j) {
        if (random_.one_in(4)) continue;
        PlainWeight& weight = plain_[i].weights[j];
        const bool is_bad = !weight.value.empty() && std::exchange(is_first, false) && with_inf;
        Vector gradient = random_gradient(random_, weight.value.size(), is_bad);
        report_.line("    optimizer ", i, " weight ", j, ": ", words(gradient));
        if (is_bad) count("inf");
        const Tensor factor = tensor_of(gradient, torch::kFloat, weight.shape);
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

  bool refuses_half(const PlainSide& side) const {
    return side.has_fp16_without_master() && !scaler_.allows_half;
  }

  /// Takes the scale off; whether it could not.
  bool plain_unscale(std::size_t i) {
    PlainSide& side = plain_[i];
    if (!scaler_.is_enabled) {
      for (PlainWeight& one : side.weights) one.widen();
      return false;
    }
    if (!scaler_.has_scaled) return true;
    if (known(i).stage != Stage::ready) return true;
    return plain_unscale_into(i);
  }
  bool plain_unscale_into(std::size_t i) {
    PlainSide& side = plain_[i];
    if (refuses_half(side)) return true;
    PlainScaler::Record& record = known(i);
    record.stage = Stage::unscaled;
    record.found.reset();
    if (!side.has_gradient()) return false;
    for (PlainWeight& one : side.weights) {
      one.widen();
      if (one.gradient) one.multiply_gradient(1 / scaler_.scale);
    }
    record.found = !side.is_finite();
    return false;
  }

  void unscale(std::size_t i) {
    report_.line("unscale_(optimizer ", i, ")");
    count("unscale_");
    const bool throws = plain_unscale(i);
    expect(throws, [&] { library_->unscale_(any(i)); });
    if (throws || !scaler_.is_enabled) return;
    for (std::size_t j = 0; j < sides_[i].parameters.size(); ++j) {
      if (sides_[i].parameters[j].grad().defined()) known(i).unscaled.insert(j);
    }
  }

  /// Notes which parameters that were unscaled have no gradient, before a loss is scaled.
  void mark_cleared_gradients() {
    if (!scaler_.is_enabled) return;
    for (std::size_t i = 0; i < plain_.size(); ++i) {
      PlainScaler::Record& record = scaler_.records[i];
      if (record.stage != Stage::unscaled) continue;
      for (const std::size_t j : record.unscaled) {
        if (!sides_[i].parameters[j].grad().defined()) record.cleared.insert(j);
      }
    }
  }
  /// Whether a gradient of an unscaled optimizer came from a scaled backward pass after unscale_.
  bool has_scaled_gradient(std::size_t i) {
    const auto& cleared = known(i).cleared;
    return std::any_of(cleared.begin(), cleared.end(),
                       [&](std::size_t j) { return sides_[i].parameters[j].grad().defined(); });
  }

  void zero_grad(std::size_t i) {
    const bool set_to_none = !random_.one_in(3);
    const bool of_all = random_.one_in(3);
    report_.line(of_all ? "zero_grad of all weights" : "zero_grad of optimizer ",
                 of_all ? "" : std::to_string(i), set_to_none ? "" : ", set_to_none = false");
    static const char* const stages[] = {"before unscale_", "after unscale_", "after step"};
    count(std::string("zero_grad ") + stages[static_cast<std::size_t>(scaler_.records[i].stage)]);
    for (std::size_t k = 0; k < plain_.size(); ++k) {
      if (!of_all && k != i) continue;
      plain_[k].zero_grad(set_to_none);
      expect(false, [&] {
        if (!of_all) return optimizer(k).zero_grad(set_to_none);
        for (const Tensor& parameter : sides_[k].parameters) {  // as a module does
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

  void meet_bad_gradient(std::size_t i) {
    const bool is_ready = scaler_.records[i].stage == Stage::ready;
    const bool is_checked = scaler_.is_enabled && scaler_.has_scaled && is_ready;
    if (!plain_[i].recipe.of_mezzo && !is_checked) return;
    if (scaler_.is_enabled && scaler_.has_scaled) known(i);
    const int64_t call = random_.below(3);
    const char* const calls[] = {"unscale_", "step", "step with max_norm"};
    Program::meet_bad_gradient(i, calls[call], [&] {
      if (call == 0) return static_cast<void>(library_->unscale_(any(i)));
      OptimizerRef stepped = any(i);
      call == 1 ? library_->step(stepped) : library_->step(stepped, {.max_norm = 1});
    });
  }

  // --- Steps -----------------------------------------------------------------------------------

  /// What is right of a step.
  struct Expected {
    bool throws = false;
    bool ran = true;
    std::optional<double> norm{};
  };

  Expected plain_step(std::size_t i, const mezzo::StepOptions& options) {
    PlainSide& side = plain_[i];
    const bool clips = std::isfinite(options.max_norm);
    if (!scaler_.is_enabled) return plain_step_without_scale(side, options);
    if (!scaler_.has_scaled) return {.throws = true};
    PlainScaler::Record& record = known(i);
    if (record.stage == Stage::stepped) return {.throws = true};
    bool is_true = record.stage == Stage::unscaled;
    const bool was_unscaled = is_true;
    if (was_unscaled && has_scaled_gradient(i)) return {.throws = true};
    if (side.counts()) {
      if (!is_true && (refuses_half(side) || !side.has_gradient())) return {.throws = true};
    } else if (!is_true) {
      if (plain_unscale_into(i)) return {.throws = true};
      is_true = true;
    }
    if (is_true ? !record.found : !side.has_gradient()) return {.throws = true};
    const bool found = record.found.value_or(false) || !side.is_finite();
    record.found = found;
    record.stage = Stage::stepped;
    const double inverse = is_true ? 1 : 1 / scaler_.scale;
    const double norm = side.norm() * inverse;
    Expected expected{.ran = !found};
    if (side.counts() || clips || was_unscaled) expected.norm = norm;
    if (!found) plain_apply(side, inverse, norm, options);
    if (options.zero_grad) side.zero_grad(false);
    return expected;
  }

  /// An optimizer of mezzo's clips on its way, any other where the gradients lie.
  static void plain_apply(PlainSide& side, double inverse, double norm,
                          const mezzo::StepOptions& options) {
    const bool clips = std::isfinite(options.max_norm);
    if (side.counts()) return side.step(inverse * clip_factor(norm, options.max_norm));
    if (clips) side.clip_norm(norm, options.max_norm);
    side.step(1);
  }

  static Expected plain_step_without_scale(PlainSide& side, const mezzo::StepOptions& options) {
    Expected expected;
    if (std::isfinite(options.max_norm) && side.has_gradient()) expected.norm = side.norm();
    plain_apply(side, 1, side.norm(), options);
    if (options.zero_grad) side.zero_grad(false);
    return expected;
  }

  void step(std::size_t i) {
    const bool has_options = !random_.one_in(3);
    mezzo::StepOptions options;
    if (has_options && random_.one_in(2)) options.max_norm = random_.of<double>({0.5, 1, 2});
    if (has_options && random_.one_in(3)) options.zero_grad = true;
    std::ostringstream text;
    if (has_options) {
      text << ", {.max_norm = " << options.max_norm << ", .zero_grad = " << options.zero_grad
           << "}";
    }
    report_.line("scaler.step(optimizer ", i, text.str(), ")");
    const Expected right = plain_step(i, options);
    expect(right.throws, [&] {
      OptimizerRef stepped = any(i);
      const auto result = has_options ? library_->step(stepped, options) : library_->step(stepped);
      compare_result(result, right.ran, right.norm);
      const char* const clipped = std::isfinite(options.max_norm) ? " with max_norm" : "";
      count(std::string(result.applied() ? "step" : "skipped step") + clipped);
      const PlainSide& side = plain_[i];
      count(side.is_split()                    ? "step of split_master"
            : side.recipe.in_master_weights    ? "step of MasterWeights"
            : !side.recipe.of_mezzo            ? "step of torch's optimizer"
            : side.weights[0].has_master       ? "step of master"
            : is_16_bit(side.weights[0].dtype) ? "step of plain 16 bits"
                                               : "step of float");
      static const char* const kinds[] = {"SGD", "momentum", "Adam", "AdamW", "Lion", "LAMB"};
      count(std::string("step of ") + kinds[static_cast<std::size_t>(side.recipe.kind)]);
      count(scaler_.is_enabled ? "step of an enabled scaler" : "step of a disabled scaler");
    });
  }

  void step_without_scaler(std::size_t i) {
    PlainSide& side = plain_[i];
    if (!side.is_finite()) return;
    report_.line("optimizer ", i, ".step()");
    count("step without the scaler");
    side.step(1);
    expect(false, [&] { (void)any(i).step(); });
  }

  /// A parameter leaves its group for one step, and comes back with what it had.
  void step_without_a_parameter(std::size_t i) {
    PlainSide& side = plain_[i];
    if (!side.is_finite()) return;
    const std::size_t j = random_weight(side);
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
        (void)any(i).step();
        params.insert(params.begin() + index, parameter);
        break;
      }
    });
    side.weights[j].gradient = std::move(hidden);
  }

  /// Averages replace the weights; reading a master then throws.
  void enter_ema_scope(std::size_t i) {
    PlainSide& side = plain_[i];
    report_.line("an EmaGuard of optimizer ", i);
    count("EmaGuard");
    const bool has_master = std::any_of(side.weights.begin(), side.weights.end(),
                                        [](const PlainWeight& one) { return one.has_master; });
    const mezzo::Ema ema(parameters(i));
    const mezzo::EmaGuard averages(ema);
    expect(has_master || !side.has_master_params(), [&] { (void)mezzo::master_params(any(i)); });
  }

  void update() {
    update_once();
    if (likes_files_ && !report_.failed() && random_.one_in(2)) save_or_load();
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

  // --- Files -----------------------------------------------------------------------------------

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
    saved_->plain = plain_;
    saved_->plain_scaler = scaler_;
  }

  void load() {
    bool is_fresh = random_.one_in(2);
    for (const PlainSide& side : plain_) is_fresh |= !side.counts();  // torch's keeps old state
    report_.line("load", is_fresh ? " into new objects" : "");
    count(is_fresh ? "load into new objects" : "load");
    take_plain(saved_->plain, is_fresh);
    const bool has_scaled = scaler_.has_scaled;
    scaler_ = saved_->plain_scaler;
    scaler_.has_scaled = has_scaled && !is_fresh;
    if (!scaler_.is_enabled) scaler_.has_scaled = saved_->plain_scaler.has_scaled;
    expect(false, [&] {
      if (is_fresh) make_library();
      for (std::size_t i = 0; i < sides_.size(); ++i) {
        const torch::NoGradGuard no_grad;
        for (std::size_t j = 0; j < sides_[i].parameters.size(); ++j) {
          sides_[i].parameters[j].copy_(saved_->weights[i][j]);
        }
        OptimizerRef loaded = any(i);
        test_support::load_from_string(loaded, saved_->optimizers[i]);
      }
      if (scaler_.is_enabled) test_support::load_from_string(*library_, saved_->scaler);
    });
  }

  /// Loading the archive of another class throws and changes nothing. libtorch's own load accepts
  /// any archive.
  void load_other_class(std::size_t i) {
    const Recipe& own = plain_[i].recipe;
    if (!own.of_mezzo && !own.in_master_weights && own.kind != Kind::lamb) return;
    Recipe other = own;
    const auto is_sgd = [](Kind kind) { return kind == Kind::sgd || kind == Kind::momentum; };
    do {
      other.kind = static_cast<Kind>(random_.below(6));
    } while (other.kind == own.kind || (is_sgd(other.kind) && is_sgd(own.kind)));
    other.of_mezzo = other.kind != Kind::lamb;  // whose archives name their class too
    report_.line("optimizer ", i, " loads the archive of ", other.text());
    count("load of another class");
    const auto made = make_optimizer(other, parameters(i));
    const std::string archive = test_support::save_to_string(OptimizerRef(*made));
    expect(true, [&] {
      OptimizerRef loaded = any(i);
      test_support::load_from_string(loaded, archive);
    });
  }

  PlainScaler scaler_;
  bool likes_files_ = false;
  bool has_rough_half_ = false;
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
