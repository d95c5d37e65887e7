/// \file
/// An optimizer of mezzo's whose work and memory the ranks share: each keeps the state of its part
/// of the weights, updates that part, and gets the rest from the others (ZeRO, stage 1).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/sharded_weights.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/optim/detail/optimizer_shell.h>
#include <mezzo/optim/fused_optimizer.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The same on all ranks.
struct ShardedOptimizerOptions {
  /// A bucket of gradients is summed as soon as backward has filled it; as in GradBucketsOptions.
  int64_t bucket_bytes = kDefaultBucketBytes;
};

/// What a rank keeps from step to step, in bytes: padding included, the model's buffers and what is
/// frozen not.
struct ShardedOptimizerBytes {
  int64_t weights = 0;
  int64_t gradients = 0;
  int64_t state = 0;  ///< moments and masters
};

namespace detail {

class StateTable;

template <class Traits>
Traits traits_of(const OptimizerShell<Traits>& optimizer);  // never called

/// Whether an element's update looks at nothing but that element.
template <class OptimizerType>
concept StepsElementByElement = requires(const OptimizerType& optimizer) {
  requires decltype(traits_of(optimizer))::kIsElementByElement;
};

}  // namespace detail

/// ZeRO's first stage (Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
/// parameter models", 2020) for mezzo's AdamW, Adam, SGD and Lion:
///
/// \code
///   mezzo::ShardedOptimizer<mezzo::optim::AdamW> optimizer(
///       model->parameters(), world, mezzo::optim::AdamWOptions(2e-5));
///   for (auto& batch : *part_of_this_rank) {
///     optimizer.zero_grad();
///     scaler.scale(loss(model, batch)).backward();   // sums each bucket as it fills
///     scaler.step(optimizer, {.max_norm = 1.0});     // or optimizer.step()
///     scaler.update();
///   }
/// \endcode
///
/// **A step** trains what `OptimizerType` would have trained alone, given the average of the ranks'
/// gradients: to the bit where their number is a power of two, else but for the rounding of 1/N;
/// and all ranks have the same weights to the bit. During backward each full bucket of gradients is
/// reduce-scattered; of it a rank keeps its part of the sum, and the other parts become zero.
/// Division by the number of ranks is folded into the step. Then each rank updates its parts, and
/// an all-gather brings it the rest, in the weights' own dtype: 2 bytes an element of bfloat16 and
/// half.
///
/// **Memory** of a rank with N ranks, in bytes a parameter, with AdamW:
///
///     weights               weights  gradients  state  of it 1/N     N = 1    2    4
///     float                    4         4      moments     8          16   12   10
///     bfloat16 or half,        2         2      master and
///       WeightStorage::master                   moments    12          16   10    7
///     bfloat16, split_master   2         2      rest and
///                                               moments    10          14    9  6.5
///
/// each bucket being padded to a multiple of 64 * N bytes, and each parameter to 64. Gradients of
/// 16 bits take 4 bytes with accumulate_in_float, which counts from the constructor on.
///
/// **Loss scale and clipping** are `scaler.step(optimizer, {.max_norm = 1.0})`. Ranks agree in one
/// collective of three numbers each, without a host sync, on whether there was an inf or NaN and
/// on the norm of the whole gradient: all step, clip and back off alike. As a rank has the sums of
/// its part alone, gradients cannot be unscaled or clipped where they lie: `scaler.unscale_` and
/// `clip_grad_norm_(scaler, ...)` refuse; libtorch's clipping knows nothing of ranks and clips by
/// the norm of the part. Without a scale a disabled GradScaler clips. In half a sum may overflow
/// where the average would not: it is found as any inf is, and the scale backs off.
///
/// **Micro-batches** before the last run under `no_sync()`, and stay local. A pass more
/// after gradients were summed adds to the sum.
///
/// **Parameters** of all groups that require grad are moved into flat buffers, where they look like
/// tensors of their own; they keep their strides if they are dense. What has shared memory with one
/// (a view that was made before) is left behind: tie weights by using one tensor, and make the
/// optimizer before such views. Later the parameters may be written and given other memory (a file
/// of the model is loaded): the next step finds it, on all ranks alike. Each may be frozen, or go
/// unused: without a gradient on all ranks it is passed over.
///
/// **Groups** are libtorch's, with lr, weight decay and the like as ever, and `set_lr_factors`. No
/// parameter can be added to them later.
///
/// Not with this: a DataParallel or GradAllReduce of the same parameters, for it reduces gradients
/// itself (the first pass says so); WeightStorage::stochastic (its bits follow from an element's
/// place in the whole parameter), publish_to, LAMB.
///
/// All ranks make it together, with the same parameters in the same order, of which those of rank 0
/// count; and they call `step`, `save` and backward alike. Errors of the communicator are thrown by
/// those; after one, and after a backward pass that threw, the ranks are no longer in step. Neither
/// copied nor moved. One thread at a time.
template <class OptimizerType>
class ShardedOptimizer : public torch::optim::Optimizer, public optim::FusedOptimizer {
  static_assert(detail::StepsElementByElement<OptimizerType>,
                "ShardedOptimizer takes mezzo's AdamW, Adam, SGD and Lion. LAMB's steps are as "
                "long as the whole parameter, of which a rank has only a part.");

 public:
  using Options = typename OptimizerType::Options;

  /// \throws c10::Error as OptimizerType does; naming the rank whose parameters differ; for what is
  ///   listed above; and where the communicator does not serve a parameter's device
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   Communicator communicator, const Options& defaults,
                   const ShardedOptimizerOptions& options = {});
  ShardedOptimizer(std::vector<at::Tensor> parameters, Communicator communicator,
                   const Options& defaults, const ShardedOptimizerOptions& options = {})
      : ShardedOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                         std::move(communicator), defaults, options) {}
  ~ShardedOptimizer() override;
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  torch::optim::Optimizer& optimizer() noexcept override { return *this; }

  /// Calls `closure` once, if there is one, then steps; returns what the closure returned.
  /// \throws c10::Error as `plan` and `apply` do
  at::Tensor step(LossClosure closure = nullptr) override { return step_with(closure); }

  /// Returns this rank's slices, with their gradients. \throws c10::Error, on all ranks and before
  ///   anything is written, where gradients have not been summed since the last step
  StepPlan plan() override;

  /// Reads what all ranks have, of the ranks' average gradient: one collective. `inv_scale` in the
  /// verdict has the division by the number of ranks in it, for this rank keeps sums.
  Verdict read(const StepPlan& plan, const at::Tensor& inv_scale) override;

  /// \throws c10::Error for a plan that has been used up; as OptimizerType does; and what the
  ///   communicator throws
  void apply(StepPlan plan, const Verdict& verdict = {}, const StepOptions& options = {}) override;

  /// While one lives, backward passes add to this rank's own gradients and nothing is summed: for
  /// all micro-batches but the last.
  GradBuckets::NoSync no_sync();

  /// The parameters that are trained, and how they lie.
  const GradBuckets& buckets() const noexcept { return buckets_; }

  /// What this rank keeps. State is made by the first step.
  ShardedOptimizerBytes bytes() const;

  /// What GradScaler and `initialize` ask of an optimizer of mezzo's. No rank has a master of a
  /// whole parameter, or all of the summed gradients: but for the first these throw c10::Error.
  bool keeps_master(std::size_t group, const at::Tensor& parameter) const override;
  at::Tensor master_param(std::size_t group, const at::Tensor& parameter) override;
  void enable_master_weights() override;

  /// On rank 0 the archive that `OptimizerType` alone would write, whatever the number of ranks; on
  /// any other rank that rank's part of the state, which can be loaded there again. All ranks call
  /// it; rank 0 writes the file:
  ///
  ///     torch::serialize::OutputArchive archive;
  ///     optimizer.save(archive);
  ///     if (world.rank() == 0) archive.save_to(path);
  ///
  /// Takes the bytes of the whole state on rank 0's host, and of a bucket of it in float elsewhere.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// An archive of `OptimizerType`'s, from here with any number of ranks, from `OptimizerType`
  /// alone or from libtorch's optimizer of the same name: each rank reads it and keeps its part.
  /// With the model's weights of then, all goes on to the bit where it stopped. All or nothing.
  /// \throws c10::Error as OptimizerType does, and for another rank's part
  void load(torch::serialize::InputArchive& archive) override;

  void check_unscale() const override;

 private:
  using Traits = decltype(detail::traits_of(std::declval<const OptimizerType&>()));
  using State = typename OptimizerType::State;

  /// What trains this rank's slices.
  class Inner final : public OptimizerType {
   public:
    using OptimizerType::applied_count;
    using OptimizerType::OptimizerType;
  };

  struct Known {
    at::Tensor parameter;
    std::size_t group;
    bool is_trained;
  };

  /// A row for each slice.
  struct OwnStates {
    std::size_t kinds = 0;
    std::vector<int64_t> steps{};  // -1 where there is no state
    std::vector<std::vector<at::Tensor>> tensors{};
  };

  // Groups and gradients, before a step (sharded_optimizer_impl.h)
  std::vector<at::Tensor> trained_parameters() const;
  static void check_options(const Options& options);
  Options options_of(std::size_t group) const;
  std::unique_ptr<Inner> make_inner(const Options& defaults) const;
  void check_groups() const;
  void mirror_groups() const;
  void prepare();
  bool has_gradient() const;
  std::optional<at::Device> device_of_gradients() const;
  Verdict average_of_sums() const;
  void count_applied(const Verdict& verdict);

  // Files (sharded_optimizer_archive.h)
  void gather_states(OptimizerType& whole) const;
  OwnStates own_states() const;
  void gather_bucket(std::size_t bucket, std::size_t kind, const OwnStates& own,
                     detail::StateTable& table, OptimizerType* whole) const;
  std::unique_ptr<State> part_of(State& whole, const detail::ShardSlice& slice) const;
  void load_whole(torch::serialize::InputArchive& archive);
  void load_part(torch::serialize::InputArchive& archive, int64_t rank);
  void take_options(const OptimizerType& from);

  mutable Communicator communicator_;
  std::vector<Known> known_;  // of all groups, in order
  GradBuckets buckets_;
  std::shared_ptr<detail::ShardExchange> exchange_;
  detail::ShardedWeights weights_;
  std::vector<std::size_t> group_of_;  // a parameter of the buckets
  std::unique_ptr<Inner> inner_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/sharded_optimizer_archive.h>  // IWYU pragma: export
#include <mezzo/distributed/detail/sharded_optimizer_impl.h>     // IWYU pragma: export
