/// \file
/// The interface through which GradScaler knows mezzo's optimizers: a step that unscales, clips
/// and skips by itself, from numbers that lie on the parameters' device; and the report that has
/// these numbers, which whoever owns the gradients makes once a step, and the step takes.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/table_memory.h>
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

namespace detail {
class StepTaker;
}  // namespace detail

/// The gradients of an optimizer that lie on one device. The numbers are tensors of one element
/// there, and are those of the gradients times `inv_scale`.
struct DeviceGradientReport {
  at::Tensor inv_scale{};       ///< float: a step multiplies gradients by it before all else
  at::Tensor found_inf{};       ///< float: unless 0, a step leaves everything as it is
  at::Tensor sum_of_squares{};  ///< double; where it is undefined, nothing is clipped
  at::Tensor max_abs{};         ///< double; NaN if there is a NaN
  std::vector<at::Tensor> gradients{};  ///< dense, and the values of sparse ones
};

/// One entry for each device that has a gradient; none: gradients are taken as they are, and the
/// step is not skipped. What the devices say of `found_inf` and `sum_of_squares` is a device's own
/// until somebody adds it up (GradScaler does); a step takes each device's word for all.
struct GradientReport {
  std::vector<DeviceGradientReport> devices{};
  /// Gradients were unscaled onto float masters: of parameters that keep one the master's gradient
  /// is read and stepped with, and the parameter's own is not.
  bool of_masters = false;
  /// There is a gradient of half whose parameter keeps no master, so that it would underflow.
  bool has_bare_half = false;
  /// The optimizer's own number of what it prepared when it made this report; 0: nothing.
  std::uint64_t plan = 0;
};

/// What `GradScaler::step(optimizer, {.max_norm = 1.0})` does beside stepping.
///
/// A step writes no gradient but to set it to zero on request: after it, ran or skipped, `.grad` is
/// zero with `zero_grad`, and otherwise what it was before, scaled unless `unscale_` took the scale
/// off. So it is with every optimizer, mezzo's or not, on every device.
struct StepOptions {
  /// The gradients, taken as one vector, are scaled down to at most this 2-norm before they are
  /// used, as `clip_grad_norm_` does: by max_norm / (norm + 1e-6). Infinity: no clipping.
  double max_norm = std::numeric_limits<double>::infinity();
  /// Sets the gradients to zero, with mezzo's kernels in the same pass; they stay defined.
  bool zero_grad = false;
};

namespace optim {

/// What does all of a training step's last part in one pass over its memory: unscale, clip, update,
/// set to zero. It decides on the device whether to step, so that the host need not know.
class FusedOptimizer : public OptimizerInterface {
 public:
  /// One read of the gradients. `inv_scale` is a float of one element; where gradients lie on other
  /// devices it is copied there. Writes nothing, except that a sparse gradient is coalesced; no
  /// host sync, except to coalesce. `of_masters`: see GradientReport.
  /// \throws c10::Error if a gradient is one that `apply` does not take
  virtual inline GradientReport report(const at::Tensor& inv_scale, bool of_masters = false);

  /// The step. `report` says what to multiply gradients by and whether to step at all: one that
  /// this optimizer has just made, or one that names all devices with gradients and their factors.
  /// It serves one step, of the gradients that it read. Options and gradients that were replaced
  /// since, and states that were loaded or cleared, are taken as they are now; a single state is
  /// not to be replaced in between. A skipped step leaves parameters, moments and counts as they
  /// were, bit for bit.
  /// Runs on the current streams; waits for a device only where parameters lie on several.
  /// \throws c10::Error if a gradient is sparse, or of a dtype wider than its parameter's
  virtual void apply(const GradientReport& report, const StepOptions& options = {}) = 0;

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
    TORCH_CHECK(
        false,
        "enable_master_weights: this optimizer keeps no float masters; give "
        "mezzo::initialize a level with master_weights = false, or use mezzo::optim::AdamW, "
        "Adam, SGD, Lion or LAMB");
  }

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
  friend class detail::StepTaker;

  /// Called before gradients are unscaled where they lie, be it for clipping alone.
  /// \throws c10::Error where that cannot be right, and says what to do instead
  virtual void check_unscale() const {}

  bool publishes() const noexcept { return copy_for_ != nullptr; }
  at::ScalarType published_dtype() const noexcept { return published_dtype_; }
  /// Where to write the copy of `weight`; undefined where none is wanted.
  at::Tensor copy_for(const at::Tensor& weight) const { return copy_for_(weight); }
  /// What a step has written: weights, each with its copy.
  using Published = std::vector<std::pair<at::Tensor, at::Tensor>>;
  void publish(const Published& published) const { publish_(published); }
  void publish(const at::Tensor& weight, const at::Tensor& copy) const {
    publish_({{weight, copy}});
  }

  /// For launches on a device.
  detail::TableMemory& table_memory() noexcept { return table_memory_; }

 private:
  detail::TableMemory table_memory_;
  at::ScalarType published_dtype_ = at::kBFloat16;
  std::function<at::Tensor(const at::Tensor&)> copy_for_;
  std::function<void(const Published&)> publish_;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/optim/detail/gradients.h>  // IWYU pragma: export
