/// \file
/// FusedOptimizer: a training step as values. StepPlan lists the parameters that take part, Verdict
/// holds what one read of the gradients found, and `apply` does the rest in one pass.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/table_memory.h>
#include <mezzo/kernels/verdict.h>
#include <mezzo/optim/detail/update_rule.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

class WeightCache;

/// Options of one step: `scaler.step(optimizer, {.max_norm = 1.0})`.
///
/// Afterwards, whether the step ran or was skipped, `.grad` is zero with `zero_grad`. Otherwise an
/// optimizer of mezzo's or a MasterWeights leaves `.grad` as it was, with the loss scale unless
/// `unscale_` took it off; any other optimizer's `.grad` is unscaled, and clipped where it stepped,
/// as after torch.amp's calls.
struct StepOptions {
  /// Largest 2-norm of all gradients, taken as one vector. Larger ones are multiplied by
  /// max_norm / (norm + 1e-6) as they are used, as `clip_grad_norm_` does. Infinity: no clipping.
  double max_norm = std::numeric_limits<double>::infinity();
  /// Sets the gradients to zero in the same pass. They stay defined.
  bool zero_grad = false;
};

/// The parameters that take part in one step, with their gradients and state. One walk over the
/// parameters makes a plan and checks all of it; `apply` consumes it. No plan is kept for another
/// step.
struct StepPlan {
  /// A parameter with a gradient.
  struct Row {
    const at::Tensor* parameter;  ///< in the groups of the optimizer, or a slice of one
    at::Tensor gradient;          ///< of the parameter, dense
    std::size_t group;            ///< the number of its group
    std::uint64_t number;         ///< of the parameter, counted through all groups

    // mezzo's optimizers set the following.
    /// How the parameter is kept: `plain` for float and double.
    optim::WeightStorage storage = optim::WeightStorage::plain;
    /// How its moments are kept: `as_weights` where there are none, or no other format.
    optim::MomentStorage moments = optim::MomentStorage::as_weights;
    detail::ParamSlot* slot = nullptr;  ///< null where nothing is kept, or nothing yet
    detail::StepLoop loop{};            ///< on the CPU
    /// The parameter that `slot` is kept for: a rank that shares the work (ShardedOptimizer) has
    /// rows of slices, and keeps the state of its slice as the whole parameter's.
    const at::Tensor* owner = nullptr;
  };

  std::vector<Row> rows{};                     ///< device by device
  std::vector<detail::GroupNumbers> groups{};  ///< what the options of each group say
  bool has_inference = false;                  ///< a parameter is an inference tensor
  bool has_devices = false;                    ///< gradients lie on several devices
  bool is_checked = false;  ///< gradients are dense, of our dtypes, on their parameters' devices
  /// A gradient is of half and its parameter keeps no master: unscaled, it would underflow.
  bool has_bare_half = false;
  /// Other ranks have rows, even if this one has none: all ranks go through the step together.
  bool has_rows_elsewhere = false;

  /// Whether a rank has a gradient.
  bool has_rows() const noexcept { return has_rows_elsewhere || !rows.empty(); }
};

namespace optim {

/// An optimizer that unscales, clips, updates and zeroes in one pass over its memory. The device
/// decides whether the step is skipped, so that the host never waits:
///
/// \code
///   StepPlan plan = optimizer.plan();
///   Verdict verdict = optimizer.read(plan, inv_scale);
///   optimizer.apply(std::move(plan), verdict, {.max_norm = 1.0});
/// \endcode
///
/// GradScaler::step calls these three functions. Between `plan` and `apply` groups, gradients and
/// states must not change.
class FusedOptimizer : public OptimizerInterface {
 public:
  /// Returns the plan of a step: one row for each parameter with a gradient. Writes no weight. A
  /// gradient that the caller replaced at a master (see master_param) becomes the parameter's.
  /// \throws c10::Error, naming the parameter or option, if `apply` could not take the step
  virtual StepPlan plan() = 0;

  /// Reads the plan's gradients once, and returns what it found on all devices, in tensors on the
  /// device of the first gradient. Does not synchronise, except to coalesce sparse gradients.
  /// \param inv_scale a float of one element, on any device
  virtual inline Verdict read(const StepPlan& plan, const at::Tensor& inv_scale);

  /// Takes the step, or skips it where the verdict found an inf: parameters, moments and counts
  /// then keep every bit. Runs on the current streams. Waits for a device only where parameters lie
  /// on several.
  virtual void apply(StepPlan plan, const Verdict& verdict = {},
                     const StepOptions& options = {}) = 0;

  /// Returns whether `parameter`, of group number `group`, is rounded from a float master that
  /// `master_param` can return.
  virtual bool keeps_master([[maybe_unused]] std::size_t group,
                            [[maybe_unused]] const at::Tensor& parameter) const {
    return false;
  }

  /// Returns the tensor that a step trains in place of `parameter`, of group number `group`: its
  /// float master, made if there is none and equal to the parameter as it is now; or the parameter.
  /// Until the next step the master's `.grad` is the parameter's, the same tensor. A caller may
  /// change it at either place. A parameter whose gradient is dropped at either place is left out.
  /// \throws c10::Error for WeightStorage::split_master, whose master is no tensor
  virtual at::Tensor master_param([[maybe_unused]] std::size_t group, const at::Tensor& parameter) {
    return parameter;
  }

  /// Trains parameters of half and bfloat16 as float masters from here on: those of groups whose
  /// storage was `plain`, and those of groups that are added later.
  /// \throws c10::Error if this optimizer keeps no masters
  virtual void enable_master_weights() {
    TORCH_CHECK(
        false,
        "enable_master_weights: this optimizer keeps no float masters; give "
        "mezzo::initialize a level with master_weights = false, or use mezzo::optim::AdamW, "
        "Adam, SGD, Lion or LAMB");
  }

  /// Sets the dtype in which gradients of 16-bit weights are added up, where options ask for float.
  /// `plan` does it too: call it where weights are cast, before the next backward pass.
  virtual void set_grad_dtypes() const {}

  /// Called before gradients are unscaled where they lie, be it for clipping alone.
  /// \throws c10::Error where that cannot be right, and says what to do instead
  virtual void check_unscale() const {}

  /// Makes each step write copies of float weights in `dtype`, rounded to nearest, in the same
  /// pass, and publish them in `cache`. Regions of that dtype with that cache then cast no weight.
  ///
  /// Only weights that regions have asked the cache for are copied (no embeddings, for example), 2
  /// bytes an element, which the cache counts. Where mezzo has no kernel (CUDA without mezzo::cuda)
  /// nothing is published, and regions cast. Include mezzo/autocast/weight_cache.h to call this
  /// function.
  /// \param dtype bfloat16 or half
  /// \throws c10::Error for another dtype
  template <class Cache>
  requires std::same_as<Cache, WeightCache>
  void publish_to(const Cache& cache, at::ScalarType dtype) {
    TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf, "publish_to: dtype is ", dtype,
                "; it should be torch::kBFloat16 or torch::kHalf, as the regions lower to");
    published_dtype_ = dtype;
    copy_for_ = [cache, dtype](const at::Tensor& weight) {
      return cache.is_asked_for(weight, dtype) ? cache.buffer_for(weight, dtype) : at::Tensor();
    };
    publish_ = [cache](const Published& published) { cache.publish(published); };
  }

  /// Ends `publish_to`: steps write no more copies, and this object lets go of the cache. Copies
  /// that were published serve until the next step writes their weights.
  void stop_publishing() noexcept {
    copy_for_ = nullptr;
    publish_ = nullptr;
  }

 protected:
  /// Calls `closure`, if there is one, with autograd on, takes a step with the gradients as they
  /// are, and returns what the closure returned.
  inline at::Tensor step_with(const torch::optim::Optimizer::LossClosure& closure);

  /// Returns whether steps write copies of weights.
  bool publishes() const noexcept { return copy_for_ != nullptr; }
  /// Returns the dtype of copies.
  at::ScalarType published_dtype() const noexcept { return published_dtype_; }
  /// Returns the tensor to write the copy of `weight` to; undefined if no copy is wanted.
  at::Tensor copy_for(const at::Tensor& weight) const { return copy_for_(weight); }
  /// The weights that a step has written, each with its copy.
  using Published = std::vector<std::pair<at::Tensor, at::Tensor>>;
  /// Makes copies that a step has written current.
  void publish(const Published& published) const { publish_(published); }

  /// Memory for the launches of a step on a device.
  detail::TableMemory& table_memory() noexcept { return table_memory_; }

 private:
  detail::TableMemory table_memory_;
  at::ScalarType published_dtype_ = at::kBFloat16;
  std::function<at::Tensor(const at::Tensor&)> copy_for_;
  std::function<void(const Published&)> publish_;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/optim/detail/gradients.h>
