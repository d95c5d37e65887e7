/// \file
/// Low-precision copies of weights that autocast reads instead of casting the weights: made when a
/// weight has changed, and only then.
///
///     const auto cache = mezzo::install_op_overrides(mezzo::WeightCache());  // in main
///     for (auto& batch : *loader) {
///       mezzo::Autocast<torch::kCPU> autocast({.cache = cache});
///       ...
///     }
///
/// libtorch has such a cache too. It is one a process, holds the weights that require grad until
/// the outermost region ends, goes stale when a weight is modified inside a region, loses gradients
/// when a copy was made under NoGradGuard, and casts frozen weights at every use. This one is a
/// value that a guard takes. Copies of frozen weights live as long as they are current, through
/// micro-batches, evaluations and regions; those of trainable weights too where that is safe, see
/// `keep_trainable`. An optimizer may write the copies itself, along with the weights, and publish
/// them: then nothing is ever cast.
///
/// Where a region has a WeightCache, libtorch's cache is off. The ops that ask it: linear, mm,
/// matmul, bmm, addmm, addbmm, baddbmm, the convolutions and transposed convolutions, the RNN cells
/// and layers (cuDNN's layers cast their weights as ever), prelu; and every op that a policy
/// allows. What a policy says of an op comes first. Other ops cost nothing extra.
///
/// **What is watched.** A copy is current while its weight is the same tensor with the same
/// version, memory, dtype, shape and strides: in-place updates, copy_, set_data, to() and loading a
/// state are all noticed. Who writes to a weight by a raw pointer bumps its version, for autograd's
/// sake as well. Two kinds of writes leave no version: those through `weight.data()`, as
/// torch::optim::SGD steps (libtorch's other optimizers do not), and those to memory that the
/// weight shares with a tensor of another version, such as a flat buffer that set_data gave to it.
/// So no copy is kept where they are to be expected:
///   - The copy of a weight that requires grad ends with the outermost region, as in libtorch, and
///     before that when a gradient has gone through it, when `weight.grad()` is another tensor than
///     at the cast or has another version, or when a graph leads to the weight whose node for its
///     gradient (AccumulateGrad) is another one than that of the uses so far.
///   - A frozen weight is cast at each use while it has a gradient, which SGD would step, while a
///     graph leads to it, and while a tensor of another version shares its memory. Its copy ends
///     when a graph has led to it since: what was thawed, trained and frozen again is cast again.
///
/// What then remains is yours: call `forget(weight)` after these writes. Those through `data()` may
/// as well be made under NoGradGuard without it, and then show.
///   - To a frozen weight: by hand through `data()`, as averages of target networks are often
///     written; by SGD with a gradient that was set by hand and cleared again; by SGD where the
///     weight is a view of all of another tensor; to shared memory while a graph that computes in
///     full precision has saved the weight.
///   - Between two uses in one region of a weight that requires grad: through `data()` by hand and
///     to shared memory; by SGD with a gradient from before the first use; by SGD with a gradient
///     that did not go through the copy and was cleared (undefined) again before the second use,
///     where a graph from before lives on, such as that of the first use: all graphs of a weight
///     that live at the same time end in one node.
///   - Unseen writes to published weights, and to all weights that `keep_trainable` keeps.
///
/// **Gradients** are those of a cast of its own at each use, to the bit: each use of a copy gets a
/// node of its own in autograd's graph, which sends the gradient to the weight in its dtype.
/// So no graph outlives its backward, and it does not matter whether a copy was made under
/// NoGradGuard, in inference mode or by another thread. (libtorch's cache adds the gradients of
/// several uses in half precision first.) A weight that is modified between forward and backward
/// makes backward throw, as it does in full precision; here also a bias, and a weight whose input
/// needs no gradient. Hooks and double backward work as ever.
///
/// **Not held**, but cast at each use as without a cache: tensors with a graph behind them, tensors
/// of inference mode (they have no version; make or load the model outside of it), forward-mode
/// tangents, tensors that are not plain and dense, frozen weights as said above. Where an op cannot
/// tell a weight from an activation, as mm cannot, a right factor that requires no grad is held
/// from its second use on, a left one never. A view of all of a weight, such as `weight.t()`, with
/// which torch::nn::Linear computes, reads the weight's copy (libtorch's cache holds no views); a
/// view of a part does not.
///
/// **CUDA**: a copy that another stream wrote is waited for on the device, never on the host. In a
/// captured graph only published copies keep their address and their meaning: capture without a
/// cache unless all weights are published. Between what a graph wrote or reads and what is outside
/// of it nobody waits, for CUDA has no event across that border: as for the weights themselves,
/// order the streams yourself, after the warm-up and around replays.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/autocast/detail/weight_cache/weight_cache_statistics.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <ostream>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What a WeightCache keeps.
struct WeightCacheOptions {
  /// The most that copies may hold, for each thread where threads are isolated. The least recently
  /// used goes first; published copies never go, and do not fit beyond it. A copy is half of its
  /// weight or less, and goes when its weight dies.
  std::int64_t max_bytes = std::numeric_limits<std::int64_t>::max();

  /// Whether the copies of weights that require grad outlive regions and backward passes too, so
  /// that gradient accumulation casts them once a step and an evaluation once. Right for optimizers
  /// that show their writes in the weights' versions: mezzo's, libtorch's but SGD, and code that
  /// writes under NoGradGuard. Frozen weights then keep their copies also with a gradient.
  /// Published copies need no such promise.
  bool keep_trainable = false;

  /// Whether each thread has copies of its own, without sharing a lock, until it ends; otherwise
  /// one copy of a weight serves all threads. Regions carry the cache to other threads with
  /// AutocastState either way. A recomputation (mezzo::activation_checkpoint) on CUDA runs in a
  /// thread of libtorch's: share there.
  bool thread_isolated = false;
};

// WeightCacheStatistics, with counts of casts and hits and their bytes: see
// detail/weight_cache/weight_cache_statistics.h.

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream,
                                      const WeightCacheStatistics& statistics);

/// A handle: copies of it share what it holds, which lives as long as a handle or a region does.
/// Any thread may call any method, as far as `weight` itself may be read and written then. A use
/// reads the weight's gradient too: other threads may run backward then, but not set or clear it.
///
/// A region takes one only where the ops above ask caches: see install_op_overrides.
class WeightCache {
 public:
  /// \throws c10::Error if max_bytes is negative
  explicit WeightCache(WeightCacheOptions options = {});

  /// The copy of `weight` in `dtype` at an address of its own: the same tensor at every call, as
  /// long as `weight` keeps its shape, strides and device. Its strides are the weight's where those
  /// are dense. It is never evicted, and has the weight's present values: it is cast here if it
  /// does not. An optimizer asks for it before each step, writes both in one pass, and says so with
  /// `publish`. If it decides on the device not to step and writes neither, nothing is lost. A
  /// write without `publish` makes the copy stale, if the copy's version tells of it.
  /// \throws c10::Error for a weight that cannot be held, for a dtype that is not another floating
  /// dtype, and if published copies would exceed max_bytes
  [[nodiscard]] at::Tensor buffer_for(const at::Tensor& weight, at::ScalarType dtype) const;

  /// Says that `copy` was just written and has the values that `weight` has now; call it after the
  /// write that changed `weight` and its version. From here until `weight` changes again, regions
  /// of `copy`'s dtype use it: no cast. `copy` is what `buffer_for` gave, or any tensor of yours
  /// with shape, strides and device of `weight`, which then takes its place. Bumps `copy`'s
  /// version, so that the backward of a graph that still needs its old values throws. No work on
  /// the device but, on CUDA, an event. In a cache that isolates threads it holds for the calling
  /// thread. \throws c10::Error as buffer_for does, and if `copy` does not fit `weight`; nothing
  /// has changed then
  void publish(const at::Tensor& weight, const at::Tensor& copy) const {
    publish({{weight, copy}});
  }

  /// The same for all that one stream has just written, weights with their copies: one event for
  /// each device. Those before a pair that throws are published.
  void publish(const std::vector<std::pair<at::Tensor, at::Tensor>>& published) const;

  /// Whether a use of `weight` in `dtype`, in this thread and its region, would find a copy.
  [[nodiscard]] bool holds(const at::Tensor& weight, at::ScalarType dtype) const;

  /// Whether an op in a region of `dtype` has asked for a copy of `weight` so far, be it held or
  /// cast for it: what an optimizer publishes for nobody, such as embeddings, costs 2 bytes. Not
  /// of a view of all of another tensor, whose copy it is then.
  [[nodiscard]] bool is_asked_for(const at::Tensor& weight, at::ScalarType dtype) const;

  /// Forgets the copies of `weight`, for writes that leave no trace. Published ones keep their
  /// address and are cast anew when used or asked for.
  void forget(const at::Tensor& weight) const;

  /// Forgets all copies, of all threads.
  void clear() const;

  /// What happened so far, in all threads that still run.
  [[nodiscard]] WeightCacheStatistics statistics() const;
  /// Sets all counts to 0.
  void reset_statistics() const;

  /// Returns the options that the cache was made with.
  [[nodiscard]] const WeightCacheOptions& options() const;

  /// What an AutocastSetting holds.
  operator WeightCacheRef() const;

 private:
  class Shared;
  std::shared_ptr<Shared> shared_;
};

/// Lets regions use `cache`, and every WeightCache: puts a kernel of mezzo's in front of
/// libtorch's, in the dispatcher's table, for each op that asks a cache (see above).
///
/// **Call it in main, before other threads run ops**: a concurrent call of such an op may not
/// survive it. What is installed stays for the life of the process; again it does nothing, from any
/// thread. \throws c10::Error as OpPolicy's does. Returns the cache, so that one line can make and
/// install it:
///
///     const auto cache = mezzo::install_op_overrides(mezzo::WeightCache());
///
/// OpPolicy has an install_op_overrides of its own (op_policy.h).
MEZZO_INLINE WeightCache install_op_overrides(WeightCache cache);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/autocast/detail/weight_cache/weight_cache_impl.h>
#endif
