/// \file
/// Float master weights for any `torch::optim::Optimizer`, and the tensors to clip wherever an
/// optimizer keeps masters.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/detail/param_slot.h>
#include <mezzo/optim/detail/trained_once.h>
#include <mezzo/optim/fused_optimizer.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Trains the half and bfloat16 parameters of an optimizer of libtorch's, or of your own, as floats
/// (Apex's `master_weights`): small updates add up that a weight of 16 bits would round away.
///
/// \code
///   torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
///   mezzo::MasterWeights masters(sgd);
///   for (auto& batch : *loader) {
///     sgd.zero_grad();
///     scaler.scale(loss_of(model, batch)).backward();
///     scaler.step(masters, {.max_norm = 1.0});
///     scaler.update();
///   }
/// \endcode
///
/// Pass `masters` to the scaler, not `sgd`: alone, `sgd` trains its 16-bit parameters as they are,
/// and with bfloat16 nothing tells you.
///
/// mezzo's own optimizers do without: `options.weight_storage(WeightStorage::master)` trains
/// masters in their one pass.
///
/// **It is no optimizer**, it steps one: groups, options, rates and `zero_grad` are those of `sgd`,
/// and libtorch's schedulers stand on that. What takes an AnyOptimizer (GradScaler, clipping,
/// mezzo::LrSchedule, TrainingState) takes this. An LrSchedule on this object multiplies the rate
/// for the time of a step, by the number of applied steps. Groups and parameters may be added to
/// the inner optimizer, and taken from it, at any time.
///
/// **A step** lends the inner optimizer a float master in place of each parameter of 16 bits that
/// has a gradient, with the gradient in float, unscaled and clipped in one multiplication; lets it
/// step; and rounds the masters to the parameters. Its moments are thus float. Parameters of float
/// and double take part as they are, and parameters without a gradient do not. The model's
/// gradients are not written, unless `zero_grad` is asked for. A step with an inf or NaN is not
/// taken: parameters, masters and the inner state stay as they are, bit for bit. To know, the host
/// waits once for the device; libtorch's optimizers need that anyway.
///
/// **Outside a step** the inner optimizer is an ordinary one: its groups hold the model's
/// parameters, and it can step or be saved alone. It must outlive this object. Nothing of it is
/// patched; if its step throws, groups, gradients and the keys of the state are put back, and what
/// it had trained until then counts.
///
/// **Writing to a parameter** between steps counts (a model loaded, averaged weights swapped in):
/// where an element is no longer what its master was rounded to, the master begins anew from it.
/// Values are compared at each step, so that writes through `data()` count as well, among them
/// those of the inner optimizer when it steps alone.
///
/// **State from before** that is of 16 bits (Adagrad's sum, which it makes in its constructor;
/// moments of steps without masters) is converted to float if it is of SGD, Adam, AdamW, RMSprop or
/// Adagrad. An optimizer of your own is given masters from its first step on, and makes its state
/// like them; it has to find parameters in `param_groups()` and state in `state()`. L-BFGS, which
/// calls its closure several times in a step, is refused.
///
/// Sparse gradients go to the inner optimizer sparse (torch::optim::SGD and Adagrad take them).
/// Memory: 4 bytes an element of 16 bits for the master, and 4 for the float gradient during a
/// step. Use it from one thread at a time, and one such object for an optimizer. It cannot be
/// moved.
class MasterWeights : public optim::FusedOptimizer {
 public:
  /// \throws c10::Error for torch::optim::LBFGS, for an optimizer of mezzo's, which keeps masters
  ///   itself, and for a parameter of 16 bits that is given twice or shares another's memory
  explicit MasterWeights(torch::optim::Optimizer& optimizer);
  MasterWeights(const MasterWeights&) = delete;
  MasterWeights& operator=(const MasterWeights&) = delete;

  // Declared inline, all: the first virtual function that is not would bring the vtable, and all
  // that it refers to, into every unit.

  /// The one that was given, which steps.
  torch::optim::Optimizer& optimizer() noexcept override { return *inner_; }

  /// Without a scaler: calls `closure` once, if there is one, then steps with the gradients as they
  /// are; returns what the closure returned. \throws c10::Error as the constructor does where the
  ///   parameters are others by now
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    return step_with(closure);
  }

  /// As GradScaler calls them. `apply` waits for the device that says whether to step.
  /// \throws c10::Error as above, and what the inner optimizer's step throws
  MEZZO_INLINE StepPlan plan() override;
  MEZZO_INLINE void apply(StepPlan plan, const Verdict& verdict = {},
                          const StepOptions& options = {}) override;

  void enable_master_weights() override {}  // it always trains masters
  MEZZO_INLINE bool keeps_master(std::size_t group, const at::Tensor& parameter) const override;
  MEZZO_INLINE at::Tensor master_param(std::size_t group, const at::Tensor& parameter) override;

  /// `torch::save(masters, path)`: what the inner optimizer saves, the masters in float, and the
  /// number of applied steps. With the model's own file it is all that training goes on from.
  MEZZO_INLINE void save(torch::serialize::OutputArchive& archive) const override;

  /// `torch::load(masters, path)`, over an inner optimizer of the same kind and groups: the next
  /// step is to the bit the one that would have come after `save`. Load the model too, before or
  /// after: what a parameter holds counts (see above).
  /// \throws c10::Error, and changes nothing, for a file of something else (the inner optimizer's
  ///   own file among them), or with groups or masters of other sizes
  MEZZO_INLINE void load(torch::serialize::InputArchive& archive) override;

 private:
  /// A parameter of 16 bits, held so that its address cannot come to name another tensor, and its
  /// master.
  struct Kept {
    at::Tensor parameter{};
    detail::KeptWeights weights{};
  };
  /// A parameter of a step, and its master; null where the parameter itself is trained.
  struct Trained {
    at::Tensor parameter;
    detail::KeptWeights* weights;
  };

  static constexpr const char* kName = "MasterWeights";
  detail::OptimizerWords words() const { return {kName, inner_->param_groups()}; }

  void meet_parameters();
  Kept* find_kept(const at::Tensor& parameter);
  detail::KeptWeights& settled(const at::Tensor& parameter);
  void step_inner(const StepPlan& plan, double factor);
  void finish(const std::vector<Trained>& all);

  torch::optim::Optimizer* inner_;
  std::unordered_map<const c10::TensorImpl*, std::unique_ptr<Kept>> masters_;
  detail::WalkedTensors seen_;  // of 16 bits
};

/// The tensors that `optimizer` trains, in the order of its groups: for each parameter its float
/// master where it keeps one (MasterWeights, and mezzo's optimizers with WeightStorage::master),
/// otherwise the parameter itself. Apex's `amp.master_params`: after
///
///     scaler.unscale_(optimizer);
///     torch::nn::utils::clip_grad_norm_(mezzo::master_params(optimizer), 1.0);
///     scaler.step(optimizer);
///
/// what was clipped is what the step takes. (`scaler.step(optimizer, {.max_norm = 1.0})` clips
/// the same in fewer passes.) Masters that no step has made yet are made. They stay the same
/// tensors from step to step, until the parameter moves to another device; read them, and write
/// their gradients, but set weights at the parameter.
/// \throws c10::Error for a parameter of WeightStorage::split_master, which has no such tensor
std::vector<at::Tensor> master_params(AnyOptimizer optimizer);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/optim/detail/master_weights_impl.h>  // IWYU pragma: export
#endif
