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

/// A model passed to `initialize`, and its parameters, whose devices the forward pass runs on.
struct AmpModel {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> parameters;
};

}  // namespace detail

/// Further options of `initialize`, by Apex's names.
struct InitializeOptions {
  /// Number of loss scales, with loss_id 0 to num_losses - 1. Losses may share a scale by sharing a
  /// loss_id.
  int64_t num_losses = 1;
  /// If false, nothing is cast, scaled or printed.
  bool enabled = true;
  /// 1 prints the level to std::cout and a line per skipped step to std::cerr; 0 prints nothing.
  int verbosity = 1;
  /// Overrides of the op lists, for O1: Apex's `register_half_function` and similar.
  OpOverridesHandle op_overrides = {};
};

/// Options of Amp::backward and Amp::scale_loss.
struct ScaleLossOptions {
  int64_t loss_id = 0;  ///< selects the loss scale
  /// Whether gradients stay scaled: for all micro-batches of an accumulation window except the
  /// last, whose call unscales them together. The step unscales gradients that are still scaled;
  /// each optimizer is then checked alone, as in torch.amp.
  bool delay_unscale = false;
};

/// Result of `mezzo::initialize`, which runs the forward pass, backward and steps. Movable.
///
/// \code
///   auto amp = mezzo::initialize(model, optimizer, "O2");
///   for (auto& batch : *loader) {
///     optimizer.zero_grad();
///     auto loss = criterion(amp.forward(model, batch.data), batch.target);
///     amp.backward(loss, optimizer);
///     torch::nn::utils::clip_grad_norm_(amp.master_params(optimizer), 1.0);
///     amp.step(optimizer);
///   }
/// \endcode
///
/// Patches nothing, since libtorch's modules have no hooks: a direct `model->forward` is neither
/// cast nor run under autocast, and a direct `optimizer.step()` ignores scale and masters.
///
/// Calls identify an optimizer by the object passed to `initialize`, which must outlive this object
/// and stay at its address. Param groups may be added to it later.
///
/// There is no `update`: a loss scale is updated when `backward` or `scale_loss` returns, as in
/// Apex, or when gradients of `delay_unscale` passes are unscaled. Not thread-safe, except
/// `forward`.
class Amp {
 public:
  /// Apex's form: {"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}. Each entry also has
  /// all keys of `GradScaler::state_dict`.
  using StateDict = std::map<std::string, GradScaler::StateDict>;

  /// Prepares models and optimizers. Called by `initialize`, which documents it.
  Amp(ModelRefs models, const OptimizerRefs& optimizers, const OptLevel& level,
      const InitializeOptions& options);

  /// Returns `model->forward(args...)`, cast or under autocast. Default arguments may be omitted.
  ///
  /// At O0, O2 and O3 casts floating-point tensors in `args` to `level().cast_model_type()`, and
  /// those in the result to `cast_model_outputs()`, also in nested containers and structs with
  /// `tensors()`. At O1 runs under autocast on the model's devices. Passes other arguments and
  /// results unchanged.
  /// \param model  a model passed to `initialize`, or a module inside one
  /// \throws c10::Error for any other model
  template <class Model, class... Args>
  decltype(auto) forward(Model&& model, Args&&... args) const;

  /// Scales `loss` in float32, runs backward, and unscales the gradients of `optimizers` (one, or
  /// several in braces), which can then be clipped: see `master_params`. No host sync. Accelerate's
  /// `accelerator.backward`.
  ///
  /// Several calls before a step accumulate gradients; each call stashes unscaled gradients while
  /// it runs. Gradients from before the first call must be cleared: they would count as scaled. A
  /// loss that overflows lowers its own scale at once, prints the line of a skip, and leaves an inf
  /// or NaN in the gradients of all `optimizers`, which then skip their next step.
  ///
  /// Rethrows what backward throws. Gradients that were unscaled before the call are then restored,
  /// and the next call adds to them. Other gradients stay as backward left them: call
  /// `zero_grad(optimizer)`.
  /// \throws c10::Error for a loss_id out of range, an undefined loss, an optimizer not passed to
  ///   `initialize`, a parameter in two optimizers, or during the backward pass of another call
  void backward(const at::Tensor& loss, const OptimizerRefs& optimizers,
                const ScaleLossOptions& options = {});
  /// Options are in braces.
  void backward(auto&&, const OptimizerRefs&, detail::BareNumber auto) = delete;  // {.loss_id = 1}

  /// Calls `backward(scaled_loss)` once instead of `scaled_loss.backward()`: the body of Apex's
  /// `with amp.scale_loss(loss, optimizer) as scaled`. Use unscaled gradients after this call, not
  /// in the callback.
  ///
  ///     amp.scale_loss(loss, {first, second}, {.loss_id = 1},
  ///                    [&](const torch::Tensor& scaled) { scaled.backward({}, true); });
  template <std::invocable<const at::Tensor&> Backward>
  void scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                  const ScaleLossOptions& options, Backward&& backward);
  /// Calls scale_loss with default options.
  template <std::invocable<const at::Tensor&> Backward>
  void scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers, Backward&& backward) {
    scale_loss(loss, optimizers, ScaleLossOptions{}, std::forward<Backward>(backward));
  }
  /// Needs a callback: without one call `backward`.
  void scale_loss(auto&&, const OptimizerRefs&) = delete;  // amp.backward(loss, optimizer)

  /// Steps, or skips the step if a gradient is inf or NaN: see `GradScaler::step`. Unscales
  /// gradients that are still scaled. The result's scale is 1. Rethrows what the optimizer's step
  /// throws; then call this again, or discard the batch with `zero_grad`.
  /// \throws c10::Error unless a loss was scaled for the optimizer since its last step
  StepResult step(torch::optim::Optimizer& optimizer, const StepOptions& options = {});

  /// Discards a batch: clears the gradients of `optimizer` and the losses scaled for it since its
  /// last step. `optimizer.zero_grad()` and the model's have the same effect.
  void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none = true);

  /// Returns the tensors to clip after `backward`: for each parameter of `optimizer`, in order, its
  /// float32 master if it has one, else the parameter. See mezzo::master_params.
  std::vector<at::Tensor> master_params(torch::optim::Optimizer& optimizer);

  /// Returns the object that steps an optimizer: a MasterWeights around it if the level needs
  /// float32 masters and the optimizer keeps none, else the optimizer. Save and load this object:
  /// `torch::save(amp.wrapped_optimizer(sgd), path)`.
  OptimizerRef& wrapped_optimizer(torch::optim::Optimizer& optimizer);

  /// Returns the level passed to `initialize`.
  const OptLevel& level() const noexcept { return level_; }
  /// Returns whether anything is cast or scaled.
  bool is_enabled() const noexcept { return enabled_; }
  /// Returns the number of loss scales.
  int64_t num_losses() const noexcept { return static_cast<int64_t>(loss_scalers_.size()); }

  /// Returns the scaler of a loss, for `get_scale()`, `scale(outputs)` (a gradient penalty) and
  /// `on_skip(callback)` only. \throws c10::Error if loss_id is out of range
  GradScaler& scaler(int64_t loss_id = 0) { return find_loss_scaler(loss_id).scaler; }

  /// Returns the state of the scalers. Resuming also needs the states of the models and of
  /// `wrapped_optimizer(...)`. Call it between a step and the next `backward`. Synchronizes with
  /// the host.
  /// \throws c10::Error while gradients are scaled or a step is pending
  StateDict state_dict() const;

  /// Loads a state by `state_dict` or by Apex. Keys other than loss_scale and unskipped may be
  /// missing; their values are then unchanged. Strong exception guarantee.
  /// \throws c10::Error unless the entries are loss_scaler0 to num_losses - 1, and for values that
  ///   GradScaler throws for
  void load_state_dict(const StateDict& state);
  /// Throws what `load_state_dict` would throw, without changing anything.
  void check_state_dict(const StateDict& state) const;

 private:
  struct LossScaler {
    GradScaler scaler;
    bool has_pending_update = false;  ///< gradients were unscaled since the last update
  };
  /// An optimizer, the object that steps it, and its state between two steps.
  struct AmpOptimizer {
    torch::optim::Optimizer* optimizer;
    std::unique_ptr<MasterWeights> masters;
    OptimizerRef wrapped;
    bool has_pending_step = false;      ///< a loss was scaled for it since its last step
    LossScaler* loss_scaler = nullptr;  ///< whose scale its gradients have; null if unscaled
  };
  /// A backward pass between `prepare_backward` and `post_backward`. If it throws, the destructors
  /// of the stashes restore unscaled gradients.
  struct BackwardPass {
    LossScaler* loss_scaler;
    at::Tensor scaled_loss{};
    std::vector<AmpOptimizer*> optimizers{};
    /// By optimizer; null without unscaled gradients.
    std::vector<std::unique_ptr<detail::GradientStash>> stashes{};
  };

  /// The autocast regions on a model's devices.
  using ForwardRegions = detail::PerDeviceType<std::optional<detail::AutocastRegion>>;

  void enter_autocast_regions(const torch::nn::Module& module, ForwardRegions& regions) const;
  AmpOptimizer& find_optimizer(const torch::optim::Optimizer& optimizer);
  LossScaler& find_loss_scaler(int64_t loss_id);
  BackwardPass prepare_backward(const at::Tensor& loss, const OptimizerRefs& optimizers,
                                const ScaleLossOptions& options);
  void post_backward(const BackwardPass& pass, bool delay_unscale);
  void unscale_gradients(LossScaler& loss_scaler);
  static void update_scale(LossScaler& loss_scaler);
  StepResult step_if_finite(OptimizerRef optimizer, const StepOptions& options);
  void check_no_shared_parameters() const;
  void check_not_in_backward(const char* call) const;
  void check_no_pending_step(const char* call) const;

  OptLevel level_;
  bool enabled_;
  OpOverridesHandle op_overrides_;
  std::vector<detail::AmpModel> models_;
  std::vector<AmpOptimizer> optimizers_;
  std::vector<LossScaler> loss_scalers_;
  /// Checks and steps with unscaled gradients: its scale is 1.
  GradScaler unit_scaler_{{.mode = LossScaleMode::none, .allow_fp16_gradients = true}};
  bool has_unit_scale_ = false;
  bool is_in_backward_ = false;
};

/// Prepares models and optimizers for training at `level`, prints the level as Apex does, and
/// returns the Amp that runs the training step.
///
///     auto amp = mezzo::initialize(model, optimizer, "O1");
///     auto amp = mezzo::initialize(model, optimizer, mezzo::OptLevel::O2({.loss_scale = 128.0}));
///     auto amp = mezzo::initialize({generator, critic}, {optimizer_g, optimizer_d},
///                                  mezzo::OptLevel::O1(), {.num_losses = 3});
///
/// A model is a module holder, a shared_ptr to a module, or a module itself (`Net model;`), which
/// must outlive the returned Amp and stay at its address. Pass several models in braces or as a
/// range, and likewise optimizers (any of torch::optim and mezzo::optim; a range holds pointers).
///
/// At O2 and O3 casts floating-point parameters and buffers to `cast_model_type` in place, so that
/// optimizers still hold them. With keep_batchnorm_fp32, batch norms stay float32, with their
/// running statistics, and accept low-precision input: BatchNorm1d to 3d, and every module, also in
/// TorchScript, with a buffer "running_var". Integer buffers are not cast. At O2 parameters get
/// float32 masters: in mezzo's optimizers (`WeightStorage::fp32_master` in groups that store
/// weights `plain`), and by a MasterWeights around any other. Pass models in float32, on their
/// device, and optimizers before their first step; load a checkpoint afterwards. Strong exception
/// guarantee.
/// \throws c10::Error for a model that is not float32 or not on the CPU, CUDA or MPS, a model or
///   optimizer passed twice, an optimizer without a parameter of the models, an optimizer that has
///   already stepped if the model is cast, num_losses below 1, and op overrides for a level without
///   autocast
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

/// Options are in braces.
void initialize(auto&&, auto&&, auto&&, detail::BareNumber auto) = delete;  // {.num_losses = 2}

/// Reports other argument types with a readable compiler error.
template <class Models, class Optimizers>
requires(!std::convertible_to<Models, ModelRefs> ||
         !(std::convertible_to<Optimizers, OptimizerRefs> ||
           std::convertible_to<Optimizers, OptLevel>)) Amp
    initialize(Models&&, Optimizers&&, const OptLevel& = OptLevel::O1(),
               const InitializeOptions& = {}) {
  static_assert(std::convertible_to<Models, ModelRefs>,
                "mezzo::initialize: the first argument is not a model; pass a module that is not "
                "const, a module holder (TORCH_MODULE), a shared_ptr to a module, or "
                "several in braces");
  static_assert(!std::convertible_to<Models, ModelRefs>,
                "mezzo::initialize: the second argument is not an optimizer or a level; pass an "
                "optimizer by reference (`*pointer`), several in braces, or a level, \"O1\"");
  std::terminate();  // never instantiated
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

/// Throws what loading the archive would throw, without changing anything.
inline void check_archive(torch::serialize::InputArchive& archive, const Amp& amp) {
  amp.check_state_dict(detail::read_amp_state(archive));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/opt_levels/detail/amp_inl.h>  // IWYU pragma: export
