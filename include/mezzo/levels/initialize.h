/// \file
/// Mixed precision in one call, as Apex's `amp.initialize` and `amp.scale_loss`: models are cast or
/// run under autocast, optimizers get float32 master weights, and losses a scale each, all as an
/// optimization level says. Includes libtorch's modules, which take twelve seconds to compile.
#pragma once

#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/region.h>
#include <mezzo/base/model_list.h>
#include <mezzo/base/version.h>
#include <mezzo/levels/detail/amp_models.h>
#include <mezzo/levels/detail/loss_passes.h>
#include <mezzo/levels/opt_level.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

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

/// What `initialize` takes beside models, optimizers and a level.
struct InitializeOptions {
  /// How many losses have a scale of their own: loss_id 0 to num_losses - 1. Losses that share a
  /// scale share a loss_id.
  int64_t num_losses = 1;
  /// False: nothing is cast, scaled or printed, and every call passes through.
  bool enabled = true;
  /// 1 prints the level to std::cout and a line for each skipped step to std::cerr; 0 does neither.
  int verbosity = 1;
  /// Edits to the op lists, for O1; what Apex's `register_half_function` and its like are.
  PolicyRef policy = {};
  /// Where regions of O1 keep cast weights; see weight_cache.h.
  WeightCacheRef weight_cache = {};
};

struct ScaleLossOptions {
  int64_t loss_id = 0;  ///< which scale
  /// Leaves the gradients scaled: for all micro-batches of an accumulation but the last, which are
  /// then unscaled together; or for good, where `step(optimizer, {.max_norm = 1.0})` is next, which
  /// unscales, checks and clips in one pass.
  ///
  /// Such gradients are checked where they are unscaled: in a step, each optimizer's by itself, so
  /// that of several only those that show an inf or NaN skip, as in torch.amp.
  bool delay_unscale = false;
};

/// What `mezzo::initialize` returns: the loop's way to models, losses and steps. Movable.
///
/// \code
///   auto amp = mezzo::initialize(model, optimizer, mezzo::OptLevel::O2());
///   for (auto& batch : *loader) {
///     optimizer.zero_grad();
///     auto loss = criterion(amp(model, batch.data), batch.target);   // for model(batch.data)
///     amp.scale_loss(loss, optimizer);                               // for loss.backward()
///     torch::nn::utils::clip_grad_norm_(amp.master_params(optimizer), 1.0);
///     amp.step(optimizer);                                           // for optimizer.step()
///   }
/// \endcode
///
/// libtorch's modules have no hooks and nothing is patched: a bare `model->forward` is neither cast
/// nor under autocast, and a bare `optimizer.step()` knows no scale and no masters.
///
/// Optimizers are named by the objects that were given to `initialize`, which must outlive this one
/// and stay where they are. Param groups that are added to them later join in.
///
/// There is no `update`: a loss's scale moves by itself when the last optimizer that it was scaled
/// for has stepped; or, where one of those is not stepped every time, when a loss is scaled again
/// for one that has. One thread at a time, but calls of models may come from several.
class Amp {
 public:
  /// Apex's form: {"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}, where each also has
  /// all that `GradScaler::state_dict` has.
  using StateDict = std::map<std::string, GradScaler::StateDict>;

  Amp(ModelList models, const OptimizerList& optimizers, const OptLevel& level,
      const InitializeOptions& options);

  /// `model->forward(args...)`, with its own signature and default arguments, where `model` is one
  /// of those given, or a module inside one. At O0, O2 and O3 floating tensors in `args` come in as
  /// `level().cast_model_type()`, and go out as `cast_model_outputs()`, in nested containers and
  /// structs with `tensors()` too (see Precision); at O1 the call runs under autocast on the
  /// model's devices. Other arguments and results pass as they are, but for a struct of tensors
  /// without `tensors()`, which does not compile. A torch::jit::Module takes its arguments one by
  /// one, or one vector of IValues, and gives an IValue: `amp(script, ids, mask).toTensor()`.
  /// \throws c10::Error for another model
  template <class Model, class... Args>
  decltype(auto) operator()(Model&& model, Args&&... args) const;

  /// Scales `loss` in float32, runs `scaled.backward()`, and unscales the gradients of `optimizers`
  /// (one, or several in braces), which are then right to be clipped: `master_params`. No host
  /// sync.
  ///
  /// Called several times before a step, it adds up: true gradients are set aside for the time of
  /// the call. Gradients from before the first call count as scaled: clear them. A loss that
  /// overflows leaves an inf or NaN in the gradients of each of `optimizers`, which skips their
  /// next step, and lowers its own scale only.
  ///
  /// If backward throws, so does this. Gradients that were unscaled before the call are then what
  /// they were, and the next call adds to them; others are as backward left them, to be cleared by
  /// `zero_grad(optimizer)` before going on.
  /// \throws c10::Error for a loss_id out of range, an undefined loss, an optimizer that was not
  ///   given to `initialize`, a parameter that two optimizers hold, or within the backward pass of
  ///   another call
  void scale_loss(const at::Tensor& loss, const OptimizerList& optimizers,
                  const ScaleLossOptions& options = {});

  /// The same with a backward pass of your own, called once with the scaled loss: the body of
  /// Apex's `with amp.scale_loss(loss, optimizer) as scaled`. What the gradients need once they are
  /// unscaled comes after the call.
  ///
  ///     amp.scale_loss(loss, {first, second}, {.loss_id = 1},
  ///                    [&](const torch::Tensor& scaled) { scaled.backward({}, true); });
  template <std::invocable<const at::Tensor&> Backward>
  void scale_loss(const at::Tensor& loss, const OptimizerList& optimizers,
                  const ScaleLossOptions& options, Backward&& backward);
  template <std::invocable<const at::Tensor&> Backward>
  void scale_loss(const at::Tensor& loss, const OptimizerList& optimizers, Backward&& backward) {
    scale_loss(loss, optimizers, ScaleLossOptions{}, std::forward<Backward>(backward));
  }

  /// Steps, or skips if a loss overflowed or a gradient is inf or NaN by now; see
  /// `GradScaler::step(optimizer, options)`. Gradients that are still scaled are unscaled. Where
  /// the optimizer's own step throws, so does this; it may be called again, or the batch be given
  /// up with `zero_grad`.
  /// \throws c10::Error unless a loss was scaled for the optimizer since its last step
  StepResult step(torch::optim::Optimizer& optimizer, const StepOptions& options = {});

  /// Forgets what was scaled for `optimizer` since its last step, and clears its gradients: for a
  /// batch that is given up. `optimizer.zero_grad()` or the model's clear it as well.
  void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none = true);

  /// What to clip or look at after `scale_loss`: for each parameter of `optimizer` in order its
  /// float32 master, where it has one, or the parameter. See mezzo::master_params.
  std::vector<at::Tensor> master_params(torch::optim::Optimizer& optimizer);

  /// What steps an optimizer: a MasterWeights around it, where `step` needs float32 masters that it
  /// has not by itself; or the optimizer. Save and load this one:
  /// `torch::save(amp.optimizer(sgd), path)`.
  AnyOptimizer& optimizer(torch::optim::Optimizer& given);

  const OptLevel& level() const noexcept { return level_; }
  bool is_enabled() const noexcept { return enabled_; }
  int64_t num_losses() const noexcept { return static_cast<int64_t>(passes_.losses()); }

  /// The scaler of a loss, for `get_scale()`, `scale(outputs)` (a gradient penalty) and
  /// `on_skip(callback)`. Its other calls are Amp's to make. \throws c10::Error out of range
  GradScaler& scaler(int64_t loss_id = 0);

  /// The scalers' state: with the models' and `optimizer(...)`'s all that a training run resumes
  /// from. Call it between a step and the next `scale_loss`. Waits for the device.
  /// \throws c10::Error while gradients are scaled or a step is outstanding
  StateDict state_dict() const;

  /// Takes what `state_dict` or Apex's gave, all or nothing; what is missing beside loss_scale and
  /// unskipped is left as it is. \throws c10::Error for other entries than loss_scaler0 to
  ///   num_losses - 1, and for values that GradScaler refuses
  void load_state_dict(const StateDict& state);

 private:
  /// An optimizer that was given, and what steps it.
  struct Given {
    Given(torch::optim::Optimizer& given, bool wants_masters);
    torch::optim::Optimizer* optimizer;
    std::unique_ptr<MasterWeights> masters;
    AnyOptimizer stepper;
    bool keeps_own_masters;
  };

  /// Autocast on the devices of a model, or none.
  using ForwardRegions = std::array<std::optional<detail::Region>, detail::kPolicyDevices.size()>;

  /// The module of that identity; `regions` are then those that its model runs under.
  torch::nn::Module& find_and_enter(const void* wanted, const std::string& name,
                                    ForwardRegions& regions) const;
  Given& given(const torch::optim::Optimizer& optimizer);
  std::size_t checked_loss(int64_t loss_id) const;
  detail::LossPasses::Pass begin_pass(const at::Tensor& loss, const OptimizerList& optimizers,
                                      const ScaleLossOptions& options);
  void refuse_shared_parameters() const;
  void refuse_within_backward(const char* call) const;
  void require_between_iterations(const char* call) const;

  OptLevel level_;
  bool enabled_;
  std::optional<at::ScalarType> input_dtype_;
  std::optional<at::ScalarType> output_dtype_;
  PolicyRef policy_;
  WeightCacheRef weight_cache_;
  std::vector<detail::AmpModel> models_;
  std::vector<Given> given_;
  detail::LossPasses passes_;
  bool is_in_backward_ = false;
};

/// Makes models and optimizers ready for training at `level`, prints what that is in Apex's words,
/// and returns what the loop calls.
///
///     auto amp = mezzo::initialize(model, optimizer, mezzo::OptLevel::O2({.loss_scale = 128.0}));
///     auto amp = mezzo::initialize({generator, critic}, {for_generator, for_critic},
///                                  mezzo::OptLevel::O1(), {.num_losses = 3});
///
/// A model is a module holder, a shared_ptr to a module, a torch::jit::Module, or a module itself
/// (`Net model;`), which must outlive what is returned and stay where it is. Several stand in
/// braces or a range, as do optimizers (any of torch::optim and mezzo::optim; a range holds
/// pointers).
///
/// At O2 and O3 floating parameters and buffers become `cast_model_type`, in place, so that
/// optimizers still hold them; with keep_batchnorm_fp32 batch norms (BatchNorm1d to 3d and what
/// derives from them; in TorchScript what aten::batch_norm reads) stay whole, running statistics
/// too, and take low-precision input as they are. Integer buffers are left alone. At O2 parameters
/// then have float32 masters: mezzo's optimizers keep them (`WeightStorage::master` in groups that
/// store weights `plain`), any other is stepped through a MasterWeights. Give models in float32, on
/// their device, and optimizers before their first step; load what they resume from afterwards.
/// \throws c10::Error, before anything is changed, for a model not in float32 or on no CPU or CUDA
///   device, a model or optimizer given twice, an optimizer that holds no parameter of the models,
///   one that has stepped already where the model is to be cast, num_losses below 1, and a policy
///   or weight cache with a level that has no op lists
inline Amp initialize(ModelList models, const OptimizerList& optimizers,
                      const OptLevel& level = OptLevel::O1(),
                      const InitializeOptions& options = {}) {
  return {std::move(models), optimizers, level, options};
}

/// Models alone, for evaluation.
inline Amp initialize(ModelList models, const OptLevel& level,
                      const InitializeOptions& options = {}) {
  return {std::move(models), {}, level, options};
}

/// What is neither models nor optimizers is told so by the compiler.
template <class Models, class Optimizers>
requires(!std::convertible_to<Models, ModelList> ||
         !(std::convertible_to<Optimizers, OptimizerList> ||
           std::convertible_to<Optimizers, OptLevel>)) Amp
    initialize(Models&&, Optimizers&&, const OptLevel& = OptLevel::O1(),
               const InitializeOptions& = {}) {
  static_assert(std::convertible_to<Models, ModelList>,
                "mezzo::initialize: the first argument is no model; give a module that is not "
                "const, a module holder (TORCH_MODULE), a shared_ptr to a module, a "
                "torch::jit::Module, or several in braces");
  static_assert(!std::convertible_to<Models, ModelList>,
                "mezzo::initialize: the second argument is no optimizer and no level; give an "
                "optimizer by reference (`*pointer`), several in braces, or a mezzo::OptLevel");
  std::terminate();  // for the compiler; nothing of this is ever compiled
}

/// `torch::save(amp, path)` and `torch::load(amp, path)`: `state_dict` in an archive.
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const Amp& amp) {
  for (const auto& [key, entry] : amp.state_dict()) {
    Archive nested(archive.compilation_unit());
    for (const auto& [name, value] : entry) nested.write(name, c10::IValue(value));
    archive.write(key, nested);
  }
  return archive;
}

template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(Archive& archive,
                                                                                   Amp& amp) {
  Amp::StateDict state;
  for (const std::string& key : archive.keys()) {
    Archive nested;
    if (!archive.try_read(key, nested)) continue;
    for (const std::string& name : nested.keys()) {
      c10::IValue value;
      if (nested.try_read(name, value) && value.isDouble()) state[key][name] = value.toDouble();
    }
  }
  amp.load_state_dict(state);
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/levels/detail/amp_impl.h>  // IWYU pragma: export
