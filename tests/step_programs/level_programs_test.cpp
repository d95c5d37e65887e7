// Random programs of an Amp's calls at every level, with one or two optimizers and up to three
// losses, beside plain loops that add up the gradients since the last step.

#include <mezzo/levels/initialize.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plain_training.h"

namespace {

using namespace step_programs;
using mezzo::Amp;
using mezzo::AnyOptimizer;
using mezzo::OptLevel;

struct WeightsImpl : torch::nn::Module {
  explicit WeightsImpl(const std::vector<PlainWeight>& weights) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      register_parameter(std::to_string(i), tensor_of(weights[i].value, torch::kFloat));
    }
  }
};
TORCH_MODULE(Weights);

/// A loss's scale, and what is known of its iteration.
struct PlainLoss {
  double scale = 64;
  int64_t clean = 0;
  bool is_checked = false;
  bool found = false;
  std::set<std::size_t>
      waiting{};  ///< optimizers that it was scaled for, and that have not stepped
  std::set<std::size_t> stepped{};
};

/// What is known of an optimizer between its steps.
struct PlainPasses {
  std::optional<std::size_t> scaled_by{};  ///< the loss whose scale its gradients carry
  std::optional<std::size_t> unscaled_by{};
  bool knows_inf = false;
  bool awaits_step() const { return scaled_by || unscaled_by; }
};

class AmpProgram {
 public:
  AmpProgram(uint64_t seed, Counts& counts) : random_(seed + (uint64_t{1} << 40)), counts_(counts) {
    const std::vector<OptLevel> levels{OptLevel::O0(),      OptLevel::O1(), OptLevel::O2(),
                                       OptLevel::O2_bf16(), OptLevel::O3(), OptLevel::O3_bf16()};
    const OptLevel level = random_.of(levels);
    const double scale = std::ldexp(1.0, static_cast<int>(3 + random_.below(6)));
    interval_ = 2 + random_.below(2);
    level_.emplace(
        level.with({.loss_scale = mezzo::LossScale::dynamic({.init_scale = scale,
                                                             .growth_interval = interval_,
                                                             .min_scale = 1,
                                                             .max_scale = kMaxScale})}));
    losses_.resize(static_cast<std::size_t>(1 + random_.below(3)));
    for (PlainLoss& loss : losses_) loss.scale = scale;
    report_.line("level ", level.name(), ", ", losses_.size(), " losses, scale ", scale,
                 ", growth_interval ", interval_);
    likes_files_ = random_.one_in(3);
    passes_.resize(random_.one_in(2) ? 2 : 1);
    for (std::size_t i = 0; i < passes_.size(); ++i) {
      plain_.push_back(make_plain(recipe_for(level), random_));
      report_.line("optimizer ", i, ": ", plain_[i].recipe.text());
    }
    make_library();
  }

  bool run() {
    const int64_t calls = 12 + random_.below(30);
    for (int64_t i = 0; i < calls && !report_.failed(); ++i) {
      call();
      compare();
    }
    return !report_.failed();
  }

  std::string text() const { return report_.text(); }

 private:
  static constexpr double kMaxScale = 512;  // so that sums of eight losses are finite in half
  static constexpr int64_t kMaxPasses = 8;  // which add up exactly in bfloat16

  struct Side {
    Weights model{nullptr};
    std::vector<Tensor> parameters{};
    std::unique_ptr<torch::optim::Optimizer> optimizer{};
  };
  struct Saved {
    std::vector<std::string> optimizers{};
    std::vector<std::vector<Tensor>> weights{};
    std::string amp{};
    std::vector<PlainSide> plain{};
    std::vector<PlainLoss> losses{};
  };

  void count(const std::string& what) { ++counts_[what]; }

  Recipe recipe_for(const OptLevel& level) {
    Recipe recipe = random_recipe(random_);
    recipe.last_is_float = false;
    recipe.in_master_weights = !recipe.of_mezzo && level.master_weights();
    recipe.dtype = level.cast_model_type().value_or(torch::kFloat);
    recipe.accumulates_in_float = recipe.of_mezzo && is_16_bit(recipe.dtype) && random_.one_in(3);
    const bool may_be_split = level.master_weights() && recipe.dtype == torch::kBFloat16;
    if (!may_be_split || recipe.storage != WeightStorage::split_master) {
      recipe.storage =
          recipe.of_mezzo && level.master_weights() ? WeightStorage::master : WeightStorage::plain;
    }
    return recipe;
  }

  void make_library() {
    amp_.reset();
    sides_.clear();
    for (const PlainSide& plain : plain_) {
      Side& side = sides_.emplace_back();
      side.model = Weights(plain.weights);
      side.parameters = side.model->parameters();
      Recipe recipe = plain.recipe;  // masters are the level's to ask for
      if (recipe.storage == WeightStorage::master) recipe.storage = WeightStorage::plain;
      side.optimizer = make_optimizer(recipe, side.parameters);
    }
    const mezzo::InitializeOptions options{.num_losses = static_cast<int64_t>(losses_.size()),
                                           .verbosity = 0};
    if (sides_.size() == 1) {
      amp_.emplace(mezzo::initialize(sides_[0].model, *sides_[0].optimizer, *level_, options));
    } else {
      amp_.emplace(mezzo::initialize({sides_[0].model, sides_[1].model},
                                     {*sides_[0].optimizer, *sides_[1].optimizer}, *level_,
                                     options));
    }
  }

  void expect(bool throws, const std::function<void()>& call) {
    std::string error;
    try {
      call();
    } catch (const std::exception& exception) {
      error = exception.what();
      error = error.substr(0, error.find('\n'));
    }
    if (throws) report_.line("    throws");
    if (throws && error.empty()) report_.fail("it does not throw");
    if (!throws && !error.empty()) report_.fail("it throws: ", error);
  }

  /// Whether the gradients of an optimizer are true ones, or none.
  bool is_true(std::size_t i) const { return !passes_[i].scaled_by; }

  void compare() {
    if (report_.failed()) return;
    for (std::size_t i = 0; i < plain_.size(); ++i) {
      for (std::size_t j = 0; j < plain_[i].weights.size(); ++j) {
        const std::string name =
            "weight " + std::to_string(j) + " of optimizer " + std::to_string(i);
        PlainWeight& weight = plain_[i].weights[j];
        compare_weight(weight, sides_[i].parameters[j], *sides_[i].optimizer, report_, name);
        if (is_true(i)) compare_gradient(weight, sides_[i].parameters[j], report_, name);
      }
      if (!plain_[i].counts()) continue;
      const int64_t applied = amp_->optimizer(*sides_[i].optimizer).mezzos()->applied_steps();
      if (applied != plain_[i].applied) {
        report_.fail("applied_steps() of optimizer ", i, " is ", applied, "; right is ",
                     plain_[i].applied);
      }
    }
    for (std::size_t loss = 0; loss < losses_.size(); ++loss) {
      const double scale = amp_->scaler(static_cast<int64_t>(loss)).get_scale();
      if (scale != losses_[loss].scale) {
        report_.fail("the scale of loss ", loss, " is ", scale, "; right is ", losses_[loss].scale);
      }
    }
  }

  // --- What is right ---------------------------------------------------------------------------

  /// Checks gradients that carry the scale of a loss; they are true ones from here on.
  bool plain_unscale(std::size_t i) {
    PlainPasses& passes = passes_[i];
    PlainLoss& loss = losses_[*passes.scaled_by];
    plain_[i].follow_masters();
    for (PlainWeight& one : plain_[i].weights) one.widen();
    passes.unscaled_by = std::exchange(passes.scaled_by, std::nullopt);
    if (!plain_[i].has_gradient()) return false;
    const bool found = !plain_[i].is_finite();
    loss.is_checked = true;
    loss.found |= found;
    passes.knows_inf |= found;
    return found;
  }

  void plain_end_iteration(std::size_t id) {
    for (std::size_t i = 0; i < passes_.size(); ++i) {
      if (passes_[i].scaled_by == id) plain_unscale(i);
    }
    PlainLoss& loss = losses_[id];
    loss.waiting.clear();
    loss.stepped.clear();
    if (!loss.is_checked) return;
    if (loss.found) {
      loss.scale = std::max(loss.scale / 2, 1.0);
      loss.clean = 0;
    } else if (++loss.clean == interval_) {
      loss.scale = std::min(loss.scale * 2, kMaxScale);
      loss.clean = 0;
    }
    loss.is_checked = loss.found = false;
  }

  void plain_finish(std::size_t i) {
    passes_[i] = {};
    for (PlainLoss& loss : losses_) {
      if (loss.waiting.erase(i) != 0) loss.stepped.insert(i);
    }
    for (std::size_t id = 0; id < losses_.size(); ++id) {
      const PlainLoss& loss = losses_[id];
      if (loss.stepped.count(i) != 0 && loss.waiting.empty()) plain_end_iteration(id);
    }
  }

  // --- The calls -------------------------------------------------------------------------------

  void call() {
    const auto i = static_cast<std::size_t>(random_.below(static_cast<int64_t>(plain_.size())));
    switch (random_.below(23)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
        return scale_loss();
      case 7:
      case 8:
        return clip(i);
      case 9:
      case 10:
        return zero_grad(i);
      case 11:
        return drop_gradient(i);
      case 12:
        return drop_at_master(i);
      case 13:
        return write_weight(i);
      case 14:
      case 15:
      case 16:
      case 17:
        return step(i);
      case 18:
        return look_at_masters(i);
      case 19:
      case 20:
        return save_or_load();
      default:
        return step(i);
    }
  }

  void scale_loss() {
    const auto id = static_cast<std::size_t>(random_.below(static_cast<int64_t>(losses_.size())));
    const bool delays = random_.one_in(3);
    const bool throws = random_.one_in(10);
    const bool with_inf = random_.one_in(10);
    std::vector<std::size_t> who;
    for (std::size_t i = 0; i < plain_.size(); ++i) {
      if (plain_.size() == 1 || !random_.one_in(3)) who.push_back(i);
    }
    for (const std::size_t i : who) {
      if (sums_[i] >= kMaxPasses || must_clear_[i]) return zero_grad(i);
    }
    if (who.empty()) return;
    report_.line("scale_loss, loss ", id, delays ? ", delayed" : "",
                 throws ? ", which throws after backward" : "");
    count(throws ? "pass that throws" : delays ? "delayed pass" : "pass");
    // What the library does first: the scale may move, and other scales come off.
    for (const std::size_t i : who) {
      if (losses_[id].stepped.count(i) != 0) {
        plain_end_iteration(id);
        count("scale that moves before a pass");
        break;
      }
    }
    for (const std::size_t i : who) {
      if (passes_[i].scaled_by.value_or(id) != id) plain_unscale(i);
    }
    std::vector<torch::optim::Optimizer*> optimizers;
    Tensor loss = torch::zeros({});
    std::vector<bool> is_aside;
    std::vector<std::vector<std::optional<PlainGradient>>> aside;
    bool is_first = true;
    for (const std::size_t i : who) {
      PlainSide& side = plain_[i];
      PlainPasses& passes = passes_[i];
      ++sums_[i];
      optimizers.push_back(sides_[i].optimizer.get());
      losses_[id].waiting.insert(i);
      is_aside.push_back(passes.unscaled_by.has_value());
      if (is_aside.back()) side.follow_masters();
      passes.scaled_by = id;
      auto& own = aside.emplace_back();
      for (std::size_t j = 0; j < side.weights.size(); ++j) {
        PlainWeight& weight = side.weights[j];
        own.push_back(weight.gradient);
        if (is_aside.back()) weight.gradient.reset();
        if (random_.one_in(4)) continue;
        const bool is_bad = std::exchange(is_first, false) && with_inf;
        if (is_bad) count("inf");
        const Vector gradient = random_gradient(random_, weight.value.size(), is_bad);
        report_.line("    optimizer ", i, " weight ", j, ": ", words(gradient));
        const Tensor factor = tensor_of(gradient, torch::kFloat);
        loss = loss + (sides_[i].parameters[j].to(torch::kFloat) * factor).sum();
        weight.accumulate(gradient);
      }
    }
    if (!loss.requires_grad()) loss = loss + sides_[who[0]].parameters[0].detach().sum() * 0;
    // Then what the pass has brought is unscaled and joins what was there.
    bool is_bad = false;
    for (std::size_t k = 0; k < who.size(); ++k) {
      PlainPasses& passes = passes_[who[k]];
      PlainSide& side = plain_[who[k]];
      if (throws) {
        if (!is_aside[k]) continue;
        passes.scaled_by.reset();
        for (std::size_t j = 0; j < aside[k].size(); ++j) side.weights[j].gradient = aside[k][j];
        continue;
      }
      if (delays && !is_aside[k]) continue;
      is_bad |= plain_unscale(who[k]);
      for (std::size_t j = 0; j < aside[k].size() && is_aside[k]; ++j)
        add(side.weights[j], aside[k][j]);
    }
    const mezzo::ScaleLossOptions options{.loss_id = static_cast<int64_t>(id),
                                          .delay_unscale = delays};
    const bool has_graph = loss.requires_grad();
    try {
      amp_->scale_loss(loss, optimizers, options, [&](const Tensor& scaled) {
        if (has_graph) scaled.backward();
        if (throws) throw std::runtime_error("as it should");
      });
      if (throws) report_.fail("it does not throw");
    } catch (const std::exception& exception) {
      if (!throws) report_.fail("it throws: ", exception.what());
    }
    if (throws || delays || who.size() == 1 || !is_bad) return;
    // A loss that overflowed holds for all of its optimizers.
    count("inf of one optimizer that another skips for");
    for (const std::size_t i : who) {
      passes_[i].knows_inf = true;
      for (PlainWeight& one : plain_[i].weights) {
        if (!one.gradient) continue;
        one.gradient->values[0] = std::nan("");
        break;
      }
    }
  }

  static void add(PlainWeight& weight, const std::optional<PlainGradient>& more) {
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

  void clip(std::size_t i) {
    if (!is_true(i)) return;
    PlainSide& side = plain_[i];
    const double limit = random_.of<double>({0.5, 1, 2});
    const bool at_masters = side.has_master_params() && random_.one_in(2);
    for (const PlainWeight& one : side.weights) {
      if (one.at_master && !at_masters) return;
    }
    report_.line("torch's clip_grad_norm_(", at_masters ? "amp.master_params" : "parameters",
                 " of optimizer ", i, ", ", limit, ")");
    count("clip_grad_norm_");
    side.follow_masters();
    const double norm = side.norm();
    side.clip_norm(norm, limit);
    expect(false, [&] {
      const auto clipped =
          at_masters ? amp_->master_params(*sides_[i].optimizer) : sides_[i].parameters;
      const double actual = torch::nn::utils::clip_grad_norm_(clipped, limit);
      if (!is_near(actual, norm, norm / 50 + 1e-6)) {
        report_.fail("the norm is ", actual, "; right is ", norm);
      }
    });
  }

  void zero_grad(std::size_t i) {
    const bool set_to_none = !random_.one_in(3);
    const bool by_amp = random_.one_in(3);
    report_.line(by_amp ? "amp" : "optimizer", ".zero_grad of optimizer ", i,
                 set_to_none ? "" : ", set_to_none = false");
    const char* const when = passes_[i].scaled_by     ? " after a delayed pass"
                             : passes_[i].unscaled_by ? " after a pass"
                                                      : " after a step";
    count((by_amp ? "amp.zero_grad" : "zero_grad") + std::string(when));
    plain_[i].zero_grad(set_to_none);
    sums_[i] = 0;
    must_clear_[i] = false;
    if (by_amp) plain_finish(i);
    expect(false, [&] {
      by_amp ? amp_->zero_grad(*sides_[i].optimizer, set_to_none)
             : sides_[i].optimizer->zero_grad(set_to_none);
    });
  }

  std::size_t random_weight(const PlainSide& side) {
    return static_cast<std::size_t>(random_.below(static_cast<int64_t>(side.weights.size())));
  }

  void drop_gradient(std::size_t i) {
    const std::size_t j = random_weight(plain_[i]);
    report_.line("parameter ", j, " of optimizer ", i, ".mutable_grad() = {}");
    count("gradient dropped");
    plain_[i].weights[j].drop_gradient();
    sides_[i].parameters[j].mutable_grad() = Tensor();
  }

  void drop_at_master(std::size_t i) {
    PlainSide& side = plain_[i];
    if (!is_true(i) || !side.has_master_params()) return drop_gradient(i);
    const std::size_t j = random_weight(side);
    if (!side.weights[j].has_master || !side.weights[j].gradient) return drop_gradient(i);
    report_.line("amp.master_params(optimizer ", i, ")[", j, "].mutable_grad() = {}");
    count("gradient dropped at the master");
    side.follow_masters();
    side.weights[j].at_master = std::optional<PlainGradient>();
    if (!side.weights[j].gradient) side.weights[j].at_master.reset();
    expect(false, [&] { amp_->master_params(*sides_[i].optimizer)[j].mutable_grad() = Tensor(); });
  }

  void look_at_masters(std::size_t i) {
    PlainSide& side = plain_[i];
    if (!side.has_master_params()) return;
    report_.line("amp.master_params(optimizer ", i, ")");
    count("master_params");
    side.follow_masters();
    expect(false, [&] {
      const auto masters = amp_->master_params(*sides_[i].optimizer);
      for (std::size_t j = 0; j < masters.size(); ++j) {
        PlainWeight& weight = side.weights[j];
        if (!weight.has_master) continue;
        compare_value(weight, values_of(masters[j]), report_, "master " + std::to_string(j));
        weight.is_written = false;
      }
    });
  }

  void write_weight(std::size_t i) {
    const std::size_t j = random_weight(plain_[i]);
    PlainWeight& weight = plain_[i].weights[j];
    const Vector present = values_of(sides_[i].parameters[j]);
    if (!weight.is_written) weight.trained = weight.value;
    for (std::size_t k = 0; k < present.size(); ++k) {
      weight.value[k] = static_cast<double>(random_.below(33) - 16) / 4;
      const auto is_close = [&](double other) { return std::abs(weight.value[k] - other) < 0.125; };
      while (is_close(present[k]) || is_close(weight.trained[k])) weight.value[k] += 1;
      weight.error[k] = 0;
    }
    weight.is_written = true;
    report_.line("parameter ", j, " of optimizer ", i, " is set to ", words(weight.value));
    count("weight written");
    const torch::NoGradGuard no_grad;
    sides_[i].parameters[j].copy_(tensor_of(weight.value, torch::kFloat));
  }

  void step(std::size_t i) {
    PlainSide& side = plain_[i];
    PlainPasses& passes = passes_[i];
    mezzo::StepOptions options;
    if (random_.one_in(3)) options.max_norm = random_.of<double>({0.5, 1, 2});
    options.zero_grad = random_.one_in(3);
    report_.line("amp.step(optimizer ", i, ", {.max_norm = ", options.max_norm,
                 ", .zero_grad = ", options.zero_grad, "})");
    bool throws = !passes.awaits_step();
    if (!throws) {
      side.follow_masters();
      throws = passes.scaled_by && !side.has_gradient();
      // torch's optimizers are unscaled before it shows that there is nothing to unscale.
      const bool clips = std::isfinite(options.max_norm);
      if (throws && !side.counts() && options.zero_grad && !clips) {
        passes.unscaled_by = std::exchange(passes.scaled_by, std::nullopt);
      }
    }
    bool ran = false;
    if (!throws) {
      PlainLoss& loss = losses_[passes.scaled_by ? *passes.scaled_by : *passes.unscaled_by];
      const bool found = !side.is_finite();
      loss.is_checked = true;
      loss.found |= found && !passes.knows_inf;
      ran = !found;
      if (ran) side.step(clip_factor(side.norm(), options.max_norm));
      if (options.zero_grad) side.zero_grad(false);
      must_clear_[i] = !options.zero_grad;
      sums_[i] = 0;
      count(ran ? "step" : "skipped step");
      count("step at " + std::string(level_->name()));
      if (passes.scaled_by) count("step of delayed passes");
    } else {
      count("step that throws");
    }
    expect(throws, [&] {
      const auto result = amp_->step(*sides_[i].optimizer, options);
      report_.line(result.ran() ? "    ran" : "    skipped");
      if (result.ran() != ran) report_.fail("ran() is ", result.ran(), "; right is ", ran);
    });
    if (throws) return;
    // Gradients that still carry a scale after the step are the caller's to clear.
    const bool was_scaled = passes.scaled_by.has_value();
    plain_finish(i);
    if (was_scaled && !options.zero_grad) {
      side.zero_grad(true);
      must_clear_[i] = false;
      sides_[i].optimizer->zero_grad();
      report_.line("optimizer ", i, ".zero_grad()");
    }
    compare();
    if (likes_files_ && !report_.failed() && random_.one_in(2)) save_or_load();
  }

  // --- Files -----------------------------------------------------------------------------------

  void save_or_load() {
    for (const PlainPasses& one : passes_) {
      if (one.awaits_step()) return;
    }
    for (PlainLoss& loss : losses_) {
      if (loss.is_checked || !loss.stepped.empty()) return;
    }
    for (std::size_t i = 0; i < plain_.size(); ++i) {
      for (const PlainWeight& one : plain_[i].weights) {
        if (one.at_master) return;
      }
    }
    if (!saved_ || random_.one_in(2)) return save();
    load();
  }

  void save() {
    report_.line("save");
    count("save");
    saved_.emplace();
    expect(false, [&] {
      for (const Side& side : sides_) {
        std::stringstream file;
        torch::save(amp_->optimizer(*side.optimizer), file);
        saved_->optimizers.push_back(file.str());
        auto& weights = saved_->weights.emplace_back();
        for (const Tensor& one : side.parameters) weights.push_back(one.detach().clone());
      }
      std::stringstream file;
      torch::save(*amp_, file);
      saved_->amp = file.str();
    });
    saved_->plain = plain_;
    saved_->losses = losses_;
  }

  void load() {
    bool is_fresh = random_.one_in(2);
    for (const PlainSide& side : plain_) is_fresh |= !side.counts();  // torch's keeps old state
    report_.line("load", is_fresh ? " into new objects" : "");
    count(is_fresh ? "load into new objects" : "load");
    const std::vector<PlainSide> before = std::exchange(plain_, saved_->plain);
    losses_ = saved_->losses;
    for (std::size_t i = 0; i < plain_.size(); ++i) {
      for (std::size_t j = 0; j < plain_[i].weights.size(); ++j) {
        PlainWeight& weight = plain_[i].weights[j];
        weight.gradient = is_fresh ? std::nullopt : before[i].weights[j].gradient;
        if (!weight.is_written) weight.trained = weight.value;
        weight.is_written = true;  // until the next step settles what the file has
      }
      if (is_fresh) must_clear_[i] = false;
    }
    expect(false, [&] {
      if (is_fresh) make_library();
      for (std::size_t i = 0; i < sides_.size(); ++i) {
        const torch::NoGradGuard no_grad;
        for (std::size_t j = 0; j < sides_[i].parameters.size(); ++j) {
          sides_[i].parameters[j].copy_(saved_->weights[i][j]);
        }
        std::stringstream file(saved_->optimizers[i]);
        torch::load(amp_->optimizer(*sides_[i].optimizer), file);
      }
      std::stringstream file(saved_->amp);
      torch::load(*amp_, file);
    });
  }

  Random random_;
  Counts& counts_;
  Report report_;
  std::optional<OptLevel> level_;
  int64_t interval_ = 2;
  bool likes_files_ = false;
  std::vector<PlainSide> plain_;
  std::vector<PlainPasses> passes_;
  std::vector<PlainLoss> losses_;
  std::array<int64_t, 2> sums_{};     // passes since the gradients were cleared
  std::array<bool, 2> must_clear_{};  // gradients of a step are left
  std::vector<Side> sides_;
  std::optional<Amp> amp_;
  std::optional<Saved> saved_;
};

// MEZZO_STEP_PROGRAM_SEEDS says how many programs are run, MEZZO_STEP_PROGRAM_FIRST_SEED which is
// the first.
TEST(StepPrograms, OfAnAmpTrainAsPlainLoopsDo) {
  const int64_t first = number_from_environment("MEZZO_STEP_PROGRAM_FIRST_SEED", 0);
  const int64_t seeds = number_from_environment("MEZZO_STEP_PROGRAM_SEEDS", 100);
  Counts counts;
  int64_t failures = 0;
  for (int64_t seed = first; seed < first + seeds && failures < 3; ++seed) {
    AmpProgram program(static_cast<uint64_t>(seed), counts);
    if (program.run()) continue;
    ADD_FAILURE() << "the program of seed " << seed << ":\n" << program.text();
    ++failures;
  }
  if (seeds < 100 || failures > 0) return;
  for (const char* const what : {"pass",
                                 "delayed pass",
                                 "pass that throws",
                                 "scale that moves before a pass",
                                 "inf",
                                 "inf of one optimizer that another skips for",
                                 "clip_grad_norm_",
                                 "zero_grad after a pass",
                                 "zero_grad after a delayed pass",
                                 "zero_grad after a step",
                                 "amp.zero_grad after a pass",
                                 "amp.zero_grad after a delayed pass",
                                 "gradient dropped",
                                 "gradient dropped at the master",
                                 "master_params",
                                 "weight written",
                                 "step",
                                 "skipped step",
                                 "step that throws",
                                 "step of delayed passes",
                                 "step at O0",
                                 "step at O1",
                                 "step at O2",
                                 "step at O2_bf16",
                                 "step at O3",
                                 "step at O3_bf16",
                                 "save",
                                 "load",
                                 "load into new objects"}) {
    EXPECT_GE(counts[what], 3) << what << " happens in no program, or in few";
  }
}

}  // namespace
