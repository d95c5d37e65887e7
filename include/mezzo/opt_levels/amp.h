/// \file
/// Apex's `amp.initialize` and `amp.scale_loss`. Depending on the optimization level, models are
/// cast or run under autocast, optimizers get float32 master weights, and each loss gets a scale.
/// Includes libtorch's modules, which take twelve seconds to compile.
#pragma once

#include <mezzo/autocast/detail/autocast_region.h>
#include <mezzo/autocast/detail/thread_op_overrides.h>
#include <mezzo/base/model_refs.h>
#include <mezzo/base/optimizer_refs.h>
#include <mezzo/base/version.h>
#include <mezzo/opt_levels/opt_level.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/gradient_stash.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <array>
#include <concepts>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A model that was given to `initialize`, and its parameters, which tell its devices.
struct AmpModel {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> parameters;
};

}  // namespace detail

/// Further options of `initialize`.
struct InitializeOptions {
  /// The number of loss scales, with loss_id 0 to num_losses - 1. Losses that share a scale share a
  /// loss_id.
  int64_t num_losses = 1;
  /// If false, nothing is cast, scaled or printed.
  bool enabled = true;
  /// 1 prints the level to std::cout and a line for each skipped step to std::cerr; 0 does neither.
  int verbosity = 1;
  /// Edits to the op lists, for O1. Corresponds to Apex's `register_half_function` and similar.
  OpOverridesHandle op_overrides = {};
};

/// Options of one `scale_loss`.
struct ScaleLossOptions {
  int64_t loss_id = 0;  ///< which scale
  /// Whether the gradients stay scaled. Use it for all micro-batches of an accumulation except the
  /// last, which are then unscaled together. The step unscales what is still scaled; each optimizer
  /// is then checked by itself, as in torch.amp.
  bool delay_unscale = false;
};

/// The result of `mezzo::initialize`, through which the loop calls models, backward and steps.
/// Movable.
///
/// \code
///   auto amp = mezzo::initialize(model, optimizer, mezzo::OptLevel::O2());
///   for (auto& batch : *loader) {
///     optimizer.zero_grad();
///     auto loss = criterion(amp.forward(model, batch.data), batch.target);   // for model(batch.data)
///     amp.backward(loss, optimizer);                               // for loss.backward()
///     torch::nn::utils::clip_grad_norm_(amp.master_params(optimizer), 1.0);
///     amp.step(optimizer);                                           // for optimizer.step()
///   }
/// \endcode
///
/// Nothing is patched, since libtorch's modules have no hooks. A direct `model->forward` is neither
/// cast nor under autocast, and a direct `optimizer.step()` ignores scale and masters.
///
/// Calls refer to an optimizer by the object that was given to `initialize`. That object must
/// outlive this one and stay at its address. Param groups may be added to it later.
///
/// There is no `update`: a loss's scale moves when its `scale_loss` ends, as in Apex, or when the
/// scale of delayed passes is taken off. One thread at a time, except that several threads may call
/// models.
class Amp {
 public:
  /// Apex's form: {"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}. Each entry also has
  /// all keys of `GradScaler::state_dict`.
  using StateDict = std::map<std::string, GradScaler::StateDict>;

  /// Prepares models and optimizers for a level. Called by `initialize`, which documents it.
  Amp(ModelRefs models, const OptimizerRefs& optimizers, const OptLevel& level,
      const InitializeOptions& options);

  /// Calls `model->forward(args...)`, with its own signature and default arguments. `model` is a
  /// model that was given to `initialize`, or a module inside one.
  ///
  /// At O0, O2 and O3, floating tensors in `args` are cast to `level().cast_model_type()`, and
  /// those in the result to `cast_model_outputs()`, in nested containers and structs with
  /// `tensors()` too (see MixedPrecisionPolicy). At O1 the call runs under autocast on the model's
  /// devices. Other arguments and results pass unchanged, structs without `tensors()` among them.
  /// \throws c10::Error for any other model
  template <class Model, class... Args>
  decltype(auto) forward(Model&& model, Args&&... args) const;

  /// Scales `loss` in float32, runs `scaled.backward()`, and unscales the gradients of `optimizers`
  /// (one, or several in braces). The gradients can then be clipped: see `master_params`. No host
  /// sync.
  ///
  /// Several calls before a step add their gradients up; each call sets the true gradients aside
  /// while it runs. Gradients from before the first call are taken for scaled ones: clear them. A
  /// loss that overflows lowers its own scale at once, writes the line about a skip, and leaves an
  /// inf or NaN in the gradients of all `optimizers`, so that they skip their next step.
  ///
  /// Rethrows what backward throws. Gradients that were unscaled before the call are then restored,
  /// and the next call adds to them. Other gradients are as backward left them: clear them with
  /// `zero_grad(optimizer)` before you continue.
  /// \throws c10::Error for a loss_id out of range, an undefined loss, an optimizer that was not
  ///   given to `initialize`, a parameter that two optimizers hold, or within the backward pass of
  ///   another call
  void backward(const at::Tensor& loss, const OptimizerRefs& optimizers,
                const ScaleLossOptions& options = {});

  /// Runs a backward pass of your own, which is called once with the scaled loss: the body of
  /// Apex's `with amp.scale_loss(loss, optimizer) as scaled`. Work on unscaled gradients after the
  /// call, not in `backward`.
  ///
  ///     amp.scale_loss(loss, {first, second}, {.loss_id = 1},
  ///                    [&](const torch::Tensor& scaled) { scaled.backward({}, true); });
  template <std::invocable<const at::Tensor&> Backward>
  void scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                  const ScaleLossOptions& options, Backward&& backward);
  /// Runs a backward pass of your own with default options: loss_id 0.
  template <std::invocable<const at::Tensor&> Backward>
  void scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers, Backward&& backward) {
    scale_loss(loss, optimizers, ScaleLossOptions{}, std::forward<Backward>(backward));
  }

  /// Steps, or skips the step if a gradient is inf or NaN; see `GradScaler::step(optimizer,
  /// options)`. Unscales gradients that are still scaled. The result's scale is 1. Rethrows
  /// what the optimizer's own step throws; then call this again, or give the batch up with
  /// `zero_grad`.
  /// \throws c10::Error unless a loss was scaled for the optimizer since its last step
  StepResult step(torch::optim::Optimizer& optimizer, const StepOptions& options = {});

  /// Gives a batch up: forgets the losses that were scaled for `optimizer` since its last step, and
  /// clears its gradients. `optimizer.zero_grad()` and the model's do the same.
  void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none = true);

  /// Returns the tensors to clip or inspect after `scale_loss`: for each parameter of `optimizer`,
  /// in order, its float32 master if it has one, otherwise the parameter. See mezzo::master_params.
  std::vector<at::Tensor> master_params(torch::optim::Optimizer& optimizer);

  /// Returns the object that steps an optimizer: a MasterWeights around it if the level needs
  /// float32 masters that the optimizer does not keep itself, otherwise the optimizer. Save and
  /// load this object: `torch::save(amp.wrapped_optimizer(sgd), path)`.
  OptimizerRef& wrapped_optimizer(torch::optim::Optimizer& optimizer);

  /// Returns the level that `initialize` was given.
  const OptLevel& level() const noexcept { return level_; }
  /// Returns whether anything is cast or scaled.
  bool is_enabled() const noexcept { return enabled_; }
  /// Returns how many losses have a scale of their own.
  int64_t num_losses() const noexcept { return static_cast<int64_t>(loss_scalers_.size()); }

  /// Returns the scaler of a loss, for `get_scale()`, `scale(outputs)` (a gradient penalty) and
  /// `on_skip(callback)`. Do not make its other calls; Amp does. \throws c10::Error if loss_id is
  /// out of range
  GradScaler& scaler(int64_t loss_id = 0) { return find_loss_scaler(loss_id).scaler; }

  /// Returns the state of the scalers. A run resumes from it together with the states of the models
  /// and of `wrapped_optimizer(...)`. Call it between a step and the next `scale_loss`. Waits for
  /// the device.
  /// \throws c10::Error while gradients are scaled or a step is outstanding
  StateDict state_dict() const;

  /// Loads a state by `state_dict` or by Apex, all or nothing. Keys other than loss_scale and
  /// unskipped may be missing; their values then stay. \throws c10::Error unless the entries are
  ///   loss_scaler0 to num_losses - 1, and for values that GradScaler refuses
  void load_state_dict(const StateDict& state);
  /// Throws what `load_state_dict` would throw, and changes nothing.
  void check_state_dict(const StateDict& state) const;

 private:
  /// A loss scale.
  struct LossScaler {
    GradScaler scaler;
    bool is_unscaled = false;  ///< since the scale moved last
  };
  /// An optimizer that was given, the object that steps it, and its state between two steps.
  struct ManagedOptimizer {
    torch::optim::Optimizer* optimizer;
    std::unique_ptr<MasterWeights> masters;
    OptimizerRef wrapped;
    bool has_pending_step = false;      ///< a loss was scaled for it since its last step
    LossScaler* loss_scaler = nullptr;  ///< the loss whose scale the gradients carry
  };
  /// A backward pass between `prepare_backward` and `post_backward`. If it throws, the destructor restores the
  /// true gradients.
  struct BackwardPass {
    LossScaler* loss;
    at::Tensor scaled{};  ///< the loss to run backward from
    std::vector<ManagedOptimizer*> optimizers{};
    std::vector<std::unique_ptr<detail::GradientStash>>
        stashes{};  ///< an optimizer; null if it had none
  };

  /// The autocast regions on a model's devices.
  using ForwardRegions =
      std::array<std::optional<detail::AutocastRegion>, detail::kAutocastDevices.size()>;

  /// Enters the `regions` of the model that a module is, or is inside of.
  void enter_autocast_regions(const torch::nn::Module& wanted, ForwardRegions& regions) const;
  ManagedOptimizer& find_optimizer(const torch::optim::Optimizer& optimizer);
  LossScaler& find_loss_scaler(int64_t loss_id);
  BackwardPass prepare_backward(const at::Tensor& value, const OptimizerRefs& optimizers,
                                const ScaleLossOptions& options);
  void post_backward(const BackwardPass& pass, bool delays);
  void unscale_gradients(LossScaler& loss);
  static void update_scale(LossScaler& loss);
  StepResult step_if_finite(OptimizerRef optimizer, const StepOptions& options);
  void check_no_shared_parameters() const;
  void check_not_in_backward(const char* call) const;
  void check_no_pending_step(const char* call) const;

  OptLevel level_;
  bool enabled_;
  OpOverridesHandle op_overrides_;
  std::vector<detail::AmpModel> models_;
  std::vector<ManagedOptimizer> optimizers_;
  std::vector<LossScaler> loss_scalers_;
  GradScaler unit_scaler_{{.mode = LossScaleMode::none, .allow_fp16_gradients = true}};
  bool has_unit_scale_ = false;
  bool is_in_backward_ = false;
};

/// Prepares models and optimizers for training at `level`, prints the level in Apex's words, and
/// returns the Amp that the loop calls.
///
///     auto amp = mezzo::initialize(model, optimizer, mezzo::OptLevel::O2({.loss_scale = 128.0}));
///     auto amp = mezzo::initialize({generator, critic}, {for_generator, for_critic},
///                                  mezzo::OptLevel::O1(), {.num_losses = 3});
///
/// A model is a module holder, a shared_ptr to a module, or a module itself (`Net model;`), which
/// must outlive the returned Amp and stay at its address. Pass several models in braces or as a
/// range, and likewise optimizers (any of torch::optim and mezzo::optim; a range holds pointers).
///
/// At O2 and O3 floating parameters and buffers are cast to `cast_model_type` in place, so
/// optimizers still hold them. With keep_batchnorm_fp32, batch norms stay float32, running
/// statistics too, and accept low-precision input: BatchNorm1d to 3d, and every module, in
/// TorchScript too, that has a buffer "running_var" of its own. Integer buffers are not cast. At O2
/// parameters get float32 masters: mezzo's optimizers keep them (`WeightStorage::fp32_master` in
/// groups that store weights `plain`), and any other optimizer is stepped through a MasterWeights.
/// Pass models in float32, on their device, and optimizers before their first step; load a
/// checkpoint afterwards.
/// \throws c10::Error, before anything is changed, for a model not in float32, or on a device other
///   than CPU and CUDA, a model or optimizer given twice, an optimizer without a parameter of the
///   models, an optimizer that has already stepped if the model is to be cast, num_losses below 1,
///   and a policy with a level without op lists
inline Amp initialize(ModelRefs models, const OptimizerRefs& optimizers,
                      const OptLevel& level = OptLevel::O1(),
                      const InitializeOptions& options = {}) {
  return {std::move(models), optimizers, level, options};
}

/// Prepares models without optimizers, for evaluation.
inline Amp initialize(ModelRefs models, const OptLevel& level,
                      const InitializeOptions& options = {}) {
  return {std::move(models), {}, level, options};
}

/// Rejects other argument types with a readable compiler error.
template <class Models, class Optimizers>
requires(!std::convertible_to<Models, ModelRefs> ||
         !(std::convertible_to<Optimizers, OptimizerRefs> ||
           std::convertible_to<Optimizers, OptLevel>)) Amp
    initialize(Models&&, Optimizers&&, const OptLevel& = OptLevel::O1(),
               const InitializeOptions& = {}) {
  static_assert(std::convertible_to<Models, ModelRefs>,
                "mezzo::initialize: the first argument is no model; give a module that is not "
                "const, a module holder (TORCH_MODULE), a shared_ptr to a module, or "
                "several in braces");
  static_assert(!std::convertible_to<Models, ModelRefs>,
                "mezzo::initialize: the second argument is no optimizer and no level; give an "
                "optimizer by reference (`*pointer`), several in braces, or a mezzo::OptLevel");
  std::terminate();  // for the compiler; nothing of this is ever compiled
}

/// Saves `state_dict` to an archive: `torch::save(amp, path)`.
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const Amp& amp) {
  for (const auto& [key, entry] : amp.state_dict()) {
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    for (const auto& [name, value] : entry) nested.write(name, c10::IValue(value));
    archive.write(key, nested);
  }
  return archive;
}

namespace detail {

inline Amp::StateDict read_amp_state(torch::serialize::InputArchive& archive) {
  Amp::StateDict state;
  for (const std::string& key : archive.keys()) {
    torch::serialize::InputArchive nested;
    if (!archive.try_read(key, nested)) continue;
    for (const std::string& name : nested.keys()) {
      c10::IValue value;
      if (nested.try_read(name, value) && value.isDouble()) state[key][name] = value.toDouble();
    }
  }
  return state;
}

}  // namespace detail

/// Loads `state_dict` from an archive: `torch::load(amp, path)`.
/// \throws c10::Error as `load_state_dict` does
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  Amp& amp) {
  amp.load_state_dict(detail::read_amp_state(archive));
  return archive;
}

/// Throws what loading the archive would throw, and changes nothing.
inline void check_archive(torch::serialize::InputArchive& archive, const Amp& amp) {
  amp.check_state_dict(detail::read_amp_state(archive));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/opt_levels/detail/amp_inl.h>  // IWYU pragma: export
