/// \file
/// The step of mezzo's optimizers as values: a plan says who takes part, a verdict what one read of
/// the gradients found, and `apply` does the rest in one pass.
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

/// What `GradScaler::step(optimizer, {.max_norm = 1.0})` does beside stepping.
///
/// A step writes no gradient but to set it to zero on request: after it, ran or skipped, `.grad` is
/// zero with `zero_grad`, and otherwise what it was before, scaled unless `unscale_` took the scale
/// off. This holds for every optimizer, mezzo's or not, on every device.
struct StepOptions {
  /// The gradients, taken as one vector, are scaled down to at most this 2-norm before they are
  /// used, as `clip_grad_norm_` does: by max_norm / (norm + 1e-6). Infinity: no clipping.
  double max_norm = std::numeric_limits<double>::infinity();
  /// Sets the gradients to zero, with mezzo's kernels in the same pass; they stay defined.
  bool zero_grad = false;
  /// The gradients carry no loss scale: somebody else took it off, as for a second loss (see
  /// GradScaler::forget). After `scaler.unscale_(optimizer)` the scaler knows that by itself.
  bool is_unscaled = false;
  /// A float of one element. Where it is not 0, an inf that this step finds was found before, under
  /// another loss's scale: the step is skipped, and this scaler's scale is not moved for it.
  at::Tensor known_inf = {};
};

/// Who takes part in one step, and with what. One walk over the parameters makes a plan and checks
/// all of it; `apply` consumes it. A plan is a value: nobody keeps it for another step.
struct StepPlan {
  /// A parameter with a gradient.
  struct Row {
    const at::Tensor* parameter;  ///< in the groups of the optimizer, or a slice of one
    at::Tensor gradient;
    std::size_t group;
    std::uint64_t number;  ///< of the parameter, counted through all groups

    // Of mezzo's optimizers.
    optim::WeightStorage storage = optim::WeightStorage::plain;
    detail::ParamSlot* slot = nullptr;  ///< null where nothing is kept, or nothing yet
    detail::StepLoop loop{};
    /// The parameter that `slot` is kept for: a rank that shares the work (ShardedOptimizer) has
    /// rows of slices, and keeps the state of its slice as the whole parameter's.
    const at::Tensor* owner = nullptr;
  };

  std::vector<Row> rows{};  ///< those of one device follow each other
  std::vector<detail::GroupNumbers> groups{};
  bool has_inference = false;  ///< a parameter is an inference tensor
  bool has_devices = false;    ///< gradients lie on several devices
  bool is_checked = false;     ///< gradients are dense, on their parameters' devices, of our dtypes
  /// There is a gradient of half whose parameter keeps no master: unscaled it would underflow.
  bool has_bare_half = false;
  /// Other ranks have rows though this one may have none: all go through the step together.
  bool has_rows_elsewhere = false;

  bool has_rows() const noexcept { return has_rows_elsewhere || !rows.empty(); }
};

namespace optim {

/// An optimizer that unscales, clips, steps and sets gradients to zero in one pass over its memory,
/// and decides on the device whether to step, so that the host need not know:
///
/// \code
///   StepPlan plan = optimizer.plan();
///   Verdict verdict = optimizer.read(plan, inv_scale);
///   optimizer.apply(std::move(plan), verdict, {.max_norm = 1.0});
/// \endcode
///
/// GradScaler::step calls these three. Nothing may change between `plan` and `apply`: neither
/// groups, gradients nor states.
class FusedOptimizer : public OptimizerInterface {
 public:
  /// Returns who takes part in a step: every parameter with a gradient. Writes no weight. Brings
  /// gradients in line with those that the caller has changed at masters (see master_param).
  /// \throws c10::Error, naming the parameter or option, if `apply` could not take the step
  virtual StepPlan plan() = 0;

  /// Reads the plan's gradients once. `inv_scale` is a float of one element, on any device; the
  /// verdict lies on the device of the first gradient and speaks for all devices. No host sync,
  /// except to coalesce sparse gradients.
  virtual inline Verdict read(const StepPlan& plan, const at::Tensor& inv_scale);

  /// Takes the step. A skipped step leaves parameters, moments and counts as they were, bit for
  /// bit. Runs on the current streams; waits for a device only where parameters lie on several.
  virtual void apply(StepPlan plan, const Verdict& verdict = {},
                     const StepOptions& options = {}) = 0;

  /// Whether `parameter`, of group number `group`, is rounded from a float master that is trained
  /// in its place and can be had as a tensor (see master_param).
  virtual bool keeps_master([[maybe_unused]] std::size_t group,
                            [[maybe_unused]] const at::Tensor& parameter) const {
    return false;
  }

  /// Returns what a step trains in place of `parameter`, of group number `group`: its float master,
  /// made if there is none yet and in agreement with the parameter as it is now; or the parameter.
  /// The master's `.grad` is the parameter's, the same tensor, until the next step: a caller may
  /// change it at either place, and a parameter whose gradient is dropped at either is left out.
  /// \throws c10::Error if it is trained as something that is no tensor, a split master
  virtual at::Tensor master_param([[maybe_unused]] std::size_t group, const at::Tensor& parameter) {
    return parameter;
  }

  /// From here on parameters of half and bfloat16 are trained as float masters, in groups that
  /// stored weights `plain`, and in groups to come.
  /// \throws c10::Error where it has no masters
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

  /// From here on each step writes copies of weights of float in `dtype` (bfloat16 or half),
  /// rounded to nearest, in the same pass, and publishes them in `cache`: regions of that dtype
  /// that use the cache cast no weight any more. Copied are those weights that regions have asked
  /// the cache for before (not embeddings, say); they take 2 bytes an element, which the cache
  /// counts. Where mezzo has no kernel (CUDA without mezzo::cuda) nothing is published, and regions
  /// cast as ever. A cache that isolates threads gives them to the thread that steps, if that also
  /// runs the regions. A step throws before it writes anything where copies exceed max_bytes.
  /// Include mezzo/autocast/weight_cache.h to call it. \throws c10::Error for another dtype
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

  /// Ends that: from here on steps write no copies, and this holds no cache. Copies that were
  /// published serve until the next step writes their weights; then regions cast as ever.
  void stop_publishing() noexcept {
    copy_for_ = nullptr;
    publish_ = nullptr;
  }

 protected:
  /// Calls `closure`, if there is one, with autograd on, then takes a step of the gradients as they
  /// are; returns what the closure returned.
  inline at::Tensor step_with(const torch::optim::Optimizer::LossClosure& closure);

  bool publishes() const noexcept { return copy_for_ != nullptr; }
  at::ScalarType published_dtype() const noexcept { return published_dtype_; }
  /// Returns where to write the copy of `weight`; undefined where none is wanted.
  at::Tensor copy_for(const at::Tensor& weight) const { return copy_for_(weight); }
  /// Weights that a step has written, each with its copy.
  using Published = std::vector<std::pair<at::Tensor, at::Tensor>>;
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
