/// \file
/// The interface through which GradScaler knows mezzo's optimizers: a step that unscales, clips
/// and skips by itself, from numbers that lie on the parameters' device.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/table_memory.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

class WeightCache;

/// What `GradScaler::step(optimizer, {.max_norm = 1.0})` does beside stepping.
struct StepOptions {
  /// The gradients, taken as one vector, are scaled down to at most this 2-norm before they are
  /// used, as `clip_grad_norm_` does: by max_norm / (norm + 1e-6). Infinity: no clipping.
  double max_norm = std::numeric_limits<double>::infinity();
  /// Sets the gradients to zero in the same pass, after a skipped step too; they stay defined.
  /// Otherwise a step of mezzo's optimizers leaves them as they are, scaled; but on a device
  /// without mezzo's kernels (CUDA without mezzo::cuda) unscaled and clipped.
  bool zero_grad = false;
};

namespace optim {

/// What a step is told about the gradients on one device, in tensors of one element there.
struct DeviceVerdict {
  /// float: gradients are multiplied by it before anything else. Of gradients that are sums over
  /// ranks (distributed/grad_all_reduce.h) it makes averages too; without a verdict a step does.
  at::Tensor inv_scale;
  at::Tensor found_inf;       ///< float: unless 0, the step leaves everything as it is
  at::Tensor sum_of_squares;  ///< double: of all gradients, on all devices, times inv_scale
};

/// A step whose gradients still carry the loss scale.
struct FusedStep {
  std::vector<DeviceVerdict> verdicts;  ///< one for each device that has a gradient
  StepOptions options;
  /// Where a parameter keeps a master, the master's gradient is taken and the parameter's own is
  /// not read: it was unscaled onto there. `options.zero_grad` clears the parameter's.
  bool master_gradients = false;
};

/// An optimizer that does all of a training step's last part in one pass over its memory: unscale,
/// clip, update, clear. It decides on the device whether to step, so that the host need not know.
///
/// Derived classes keep libtorch's ways: param groups, `state()`, closures, torch::save.
class FusedOptimizer : public OptimizerInterface {
 public:
  using OptimizerInterface::OptimizerInterface;

  /// `step.verdicts` say what to multiply gradients by and whether to step at all. A skipped step
  /// leaves parameters, moments and counts as they were, bit for bit.
  /// Runs on the current streams; waits for a device only where parameters lie on several.
  /// \throws c10::Error if a gradient is sparse, or of a dtype wider than its parameter's
  virtual void fused_step(const FusedStep& step) = 0;

  /// Of the gradients on the device of `inv_scale`, which `gradients` are: one read, or none where
  /// the optimizer stands on buckets that were read during backward (GradBuckets::summarize).
  virtual detail::GradientSummary summarize(const std::vector<at::Tensor>& gradients,
                                            const at::Tensor& inv_scale) {
    return detail::summarize_gradients(gradients, inv_scale, &table_memory_);
  }

  /// Whether `parameter`, of group number `group`, is rounded from a float master that is trained
  /// in its place and can be had as a tensor (see master_param).
  virtual bool keeps_master([[maybe_unused]] std::size_t group,
                            [[maybe_unused]] const at::Tensor& parameter) const {
    return false;
  }

  /// What a step trains in place of `parameter`, of group number `group`: its float master, made if
  /// there is none yet and in agreement with the parameter as it is now; or the parameter itself.
  /// \throws c10::Error if it is trained as something that is no tensor, a split master
  virtual at::Tensor master_param([[maybe_unused]] std::size_t group, const at::Tensor& parameter) {
    return parameter;
  }

  /// From here on parameters of half and bfloat16 are trained as float masters, in groups that
  /// stored weights `plain`, and in groups to come.
  /// \throws c10::Error where it has no masters
  virtual void enable_master_weights() {
    TORCH_CHECK(false,
                "enable_master_weights: this optimizer keeps no float masters; choose an "
                "optimization level without master_weights");
  }

  /// Called before gradients are unscaled where they lie, be it for clipping alone.
  /// \throws c10::Error where that cannot be right, and says what to do instead
  virtual void check_unscale() const {}

  /// Called before param groups are read: an optimizer whose groups are another's mirrors them.
  virtual void refresh_groups() {}

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
    TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kHalf,
                "publish_to takes bfloat16 and half, "
                "the dtypes of autocast, and got ",
                dtype);
    published_dtype_ = dtype;
    copy_for_ = [cache, dtype](const at::Tensor& weight) {
      return cache.is_asked_for(weight, dtype) ? cache.buffer_for(weight, dtype) : at::Tensor();
    };
    publish_ = [cache](const at::Tensor& weight, const at::Tensor& copy) {
      cache.publish(weight, copy);
    };
  }

  /// Ends that: from here on steps write no copies, and this holds no cache. Copies that were
  /// published serve until the next step writes their weights; then regions cast as ever.
  void stop_publishing() noexcept {
    copy_for_ = nullptr;
    publish_ = nullptr;
  }

 protected:
  bool publishes() const noexcept { return copy_for_ != nullptr; }
  at::ScalarType published_dtype() const noexcept { return published_dtype_; }
  /// Where to write the copy of `weight`; undefined where none is wanted.
  at::Tensor copy_for(const at::Tensor& weight) const { return copy_for_(weight); }
  void publish(const at::Tensor& weight, const at::Tensor& copy) const { publish_(weight, copy); }

  /// For launches on a device.
  detail::TableMemory& table_memory() noexcept { return table_memory_; }

 private:
  detail::TableMemory table_memory_;
  at::ScalarType published_dtype_ = at::kBFloat16;
  std::function<at::Tensor(const at::Tensor&)> copy_for_;
  std::function<void(const at::Tensor&, const at::Tensor&)> publish_;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
