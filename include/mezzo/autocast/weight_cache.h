/// \file
/// Low-precision copies of weights, which autocast reads in place of casting the weights at each
/// use.
///
///     const auto cache = mezzo::install_op_overrides(mezzo::WeightCache());  // in main
///     cache.pin(model->parameters());                                        // for inference
///     mezzo::Autocast<torch::kCPU> autocast({.cache = cache});
///
/// docs/weight-cache.md tells what it saves, and which writes it cannot see.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
class WeightStore;
}

/// Counts of a WeightCache since it was made or its statistics were reset.
struct WeightCacheStatistics {
  std::int64_t casts = 0;        ///< of weights, because no current copy was held
  std::int64_t hits = 0;         ///< uses of a weight that found a current copy
  std::int64_t published = 0;    ///< copies that an optimizer wrote
  std::int64_t bytes_cast = 0;   ///< read and written by the casts
  std::int64_t bytes_saved = 0;  ///< what casts in the place of the hits would have moved
  /// In copies, now: published, pinned, and those of the calling thread's region.
  std::int64_t bytes_held = 0;
  std::int64_t copies_held = 0;  ///< the number of these copies
};

/// Prints the statistics in one line.
MEZZO_INLINE std::ostream& operator<<(std::ostream& stream,
                                      const WeightCacheStatistics& statistics);

/// Holds copies of three kinds, and nothing else:
///   - **published**: an optimizer writes them along with the weights (`publish`, or `publish_to`
///     of mezzo's optimizers), so these weights are never cast.
///   - **of a region**: of each leaf that requires grad, cast at its first use in the thread's
///     outermost region and dropped at the region's end, as libtorch's own cache does.
///   - **pinned**: of weights that `pin` names, frozen or not, cast at the first use in each dtype
///     and shared by all regions and threads until `unpin`.
///
/// Other tensors are cast at each use. A copy is read only while the version, memory, dtype and
/// shape of its weight are those of the cast; a region's copy ends also when a gradient has gone
/// through it. A write that leaves no version is not seen: see `forget`.
///
/// Where it is in force, libtorch's cache is off, and these ops ask it: linear, mm, matmul, bmm,
/// addmm, addbmm, baddbmm, the convolutions, the RNN cells, oneDNN's LSTM layer, prelu, and every
/// op that a policy allows. A view of all of a weight, such as `weight.t()`, reads the weight's
/// copy. Gradients are those of a cast at each use, to the bit.
///
/// A handle: copies of it share what it holds, which lives as long as a handle or a region does.
/// Any thread may call any method, as far as `weight` itself may be read and written then. A region
/// takes one only after install_op_overrides.
class WeightCache {
 public:
  /// Makes an empty cache.
  WeightCache();

  /// Keeps copies of `weights` across regions and threads, until `unpin`: your word that every
  /// write to them shows in their version. Writes of optimizers under NoGradGuard, copy_, set_data,
  /// `to` and torch::load show, and so does torch::optim::SGD under a GradScaler; the next use
  /// casts again. A step of torch::optim::SGD alone, a write by hand through `data()`, and one to a
  /// flat buffer that set_data gave to a weight do not: call `forget` or `clear` after them. Casts
  /// nothing itself. Weights of no floating dtype are left
  /// out, and a dead weight's pin ends. A copy takes 2 bytes an element.
  /// \throws c10::Error, before anything is pinned, for a weight that is undefined, is no dense
  ///   leaf, or was made in inference mode, where tensors have no version
  void pin(const std::vector<at::Tensor>& weights) const;

  /// Ends the pins of `weights` and drops their copies, except published ones.
  void unpin(const std::vector<at::Tensor>& weights) const;
  /// Ends all pins.
  void unpin() const;

  /// Returns the published copy of `weight` in `dtype`: the same tensor at every call, as long as
  /// `weight` keeps its shape, strides and device. Its strides are the weight's where those are
  /// dense. It has the weight's present values: it is cast here if it does not. An optimizer asks
  /// for it before each step, writes both in one pass, and says so with `publish`. If it decides on
  /// the device not to step and writes neither, nothing is lost. A write without `publish` makes
  /// the copy stale, if the copy's version tells of it.
  /// \throws c10::Error for a weight that cannot be held, and for a dtype that is not another
  ///   floating dtype
  [[nodiscard]] at::Tensor buffer_for(const at::Tensor& weight, at::ScalarType dtype) const;

  /// Says that `copy` was just written and has the values that `weight` has now; call it after the
  /// write that changed `weight` and its version. From here until `weight` changes again, regions
  /// of `copy`'s dtype use it: no cast. `copy` is what `buffer_for` gave, or any tensor of yours
  /// with shape, strides and device of `weight`, which then takes its place. Bumps `copy`'s
  /// version, so that the backward of a graph that still needs its old values throws. Does no work
  /// on the device but, on CUDA, record an event.
  /// \throws c10::Error as buffer_for does, and if `copy` does not fit `weight`; nothing has
  ///   changed then
  void publish(const at::Tensor& weight, const at::Tensor& copy) const {
    publish({{weight, copy}});
  }

  /// Publishes pairs (weight, copy) that one stream has just written: one event for each device.
  /// The pairs before one that throws are published.
  void publish(const std::vector<std::pair<at::Tensor, at::Tensor>>& published) const;

  /// Whether a use of `weight` in `dtype`, in this thread and its region, would find a copy.
  [[nodiscard]] bool holds(const at::Tensor& weight, at::ScalarType dtype) const;

  /// Whether an op in a region of `dtype` has asked for a copy of `weight`, pinned or requiring
  /// grad, so far. Optimizers publish only such weights: embeddings would cost 2 bytes an element
  /// for nobody. Not of a view of all of another tensor, whose copy it is then.
  [[nodiscard]] bool is_asked_for(const at::Tensor& weight, at::ScalarType dtype) const;

  /// Forgets the copies of `weight`, after a write that left no version. Its pin and the address of
  /// its published copy stay; the next use, or `buffer_for`, casts it again.
  void forget(const at::Tensor& weight) const;

  /// Forgets the copies of all weights, as `forget` does.
  void clear() const;

  /// Returns what happened so far, in all threads.
  [[nodiscard]] WeightCacheStatistics statistics() const;
  /// Sets all counts to 0.
  void reset_statistics() const;

  /// Converts to what an AutocastSetting holds.
  operator WeightCacheRef() const;

 private:
  std::shared_ptr<detail::WeightStore> store_;
};

/// Lets regions use `cache`, and every WeightCache: puts a kernel of mezzo's in front of
/// libtorch's, in the dispatcher's table, for each op that asks a cache (see WeightCache). Returns
/// the cache, so that one line can make and install it.
///
/// **Call it in main, before other threads run ops**: a concurrent call of such an op may not
/// survive it. The kernels stay for the life of the process. A second call does nothing, from any
/// thread. OpPolicy has an install_op_overrides of its own (op_policy.h).
/// \throws c10::Error as OpPolicy's does
MEZZO_INLINE WeightCache install_op_overrides(WeightCache cache);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/autocast/detail/weight_cache/weight_cache_impl.h>
#endif
