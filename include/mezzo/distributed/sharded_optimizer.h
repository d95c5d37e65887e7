/// \file
/// An optimizer whose work and memory the ranks share (ZeRO, stage 1): each keeps the state of its
/// part of the weights, updates that part, and gets the rest from the other ranks.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/sharded_weights.h>
#include <mezzo/distributed/grad_buckets.h>
#include <mezzo/optim/detail/optimizer_shell.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of ShardedOptimizer. All ranks have the same; the constructor compares them.
struct ShardedOptimizerOptions {
  /// The most bytes of a bucket of gradients, as in GradBucketsOptions. A bucket is summed over the
  /// ranks as soon as backward has filled it.
  int64_t bucket_bytes = kDefaultBucketBytes;
};

/// The bytes that a rank keeps from step to step, with padding, without the model's buffers and
/// frozen parameters.
struct ShardedOptimizerBytes {
  int64_t weights = 0;    ///< the flat buffers of all trained parameters
  int64_t gradients = 0;  ///< the buckets
  int64_t state = 0;      ///< moments and masters of this rank's slices
};

namespace detail {

template <class Traits>
Traits traits_of(const OptimizerShell<Traits>& optimizer);  // never called

/// Whether the optimizer is a rule that looks at one element at a time.
template <class OptimizerType>
concept StepsElementByElement = requires(const OptimizerType& optimizer) {
  traits_of(optimizer);
};

/// The shell of mezzo's optimizer `OptimizerType`, which its ShardedOptimizer has as well.
template <class OptimizerType>
struct ShellOf {
  static_assert(StepsElementByElement<OptimizerType>,
                "ShardedOptimizer takes mezzo's AdamW, Adam, SGD and Lion. LAMB's steps are as "
                "long as the whole parameter, of which a rank has only a part.");
  using type = OptimizerShell<decltype(traits_of(std::declval<const OptimizerType&>()))>;
};

}  // namespace detail

/// mezzo's AdamW, Adam, SGD or Lion with state and work shared by the ranks: ZeRO's first stage
/// (Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models",
/// 2020; libtorch's Python has ZeroRedundancyOptimizer).
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
/// A step gives all ranks the weights that `OptimizerType` alone would compute from the average of
/// their gradients: the same bits if the number of ranks is a power of two, otherwise equal except
/// for the rounding of 1/N. One collective without a host sync tells all ranks whether to skip and
/// by which norm to clip. Parameters move into flat buffers; earlier views no longer share their
/// memory.
///
/// All ranks construct the optimizer together, and call `step`, `save` and backward alike. Errors
/// of the group are thrown by these calls; after one, begin again from a checkpoint. Use the
/// optimizer from one thread at a time. docs/data-parallel.md ("ZeRO-1") has memory, clipping,
/// micro-batches and what is refused.
template <class OptimizerType>
class ShardedOptimizer : public detail::ShellOf<OptimizerType>::type {
  using Shell = typename detail::ShellOf<OptimizerType>::type;

 public:
  using typename Shell::Options;
  using typename Shell::State;

  /// Gives all ranks rank 0's parameters, and moves them into flat buffers. Waits for the ranks.
  /// \throws c10::Error as OptimizerType does; on all ranks, naming the first one whose parameters or
  ///   options differ; and where the group is null or does not take tensors on a parameter's device
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   c10::intrusive_ptr<c10d::Backend> group, const Options& defaults,
                   const ShardedOptimizerOptions& options = {});
  /// Makes one group of `parameters`.
  ShardedOptimizer(std::vector<at::Tensor> parameters, c10::intrusive_ptr<c10d::Backend> group,
                   const Options& defaults, const ShardedOptimizerOptions& options = {})
      : ShardedOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                         std::move(group), defaults, options) {}
  ~ShardedOptimizer() override { buckets_.on_ready(nullptr); }
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  /// Returns a row for each of this rank's slices that has a gradient.
  /// \throws c10::Error, on all ranks and before anything is written, where gradients have not been
  ///   summed since the last step
  StepPlan plan() override;

  /// Reads the average gradient of all ranks, in one collective. The verdict's `inv_scale` includes
  /// the division by the number of ranks, for each rank keeps sums.
  Verdict read(const StepPlan& plan, const at::Tensor& inv_scale) override;

  /// Steps this rank's slices and gathers the weights of all ranks.
  /// \throws c10::Error for a plan that has been used up; as OptimizerType does; and what the
  ///   group throws
  void apply(StepPlan plan, const Verdict& verdict = {}, const StepOptions& options = {}) override;

  /// Returns a guard under which backward passes add to this rank's own gradients and sum nothing:
  /// for all micro-batches but the last.
  GradBuckets::NoSync no_sync();

  /// Returns the trained parameters, and how they lie.
  const GradBuckets& buckets() const noexcept { return buckets_; }

  /// Returns true.
  bool is_sharded() const noexcept override { return true; }

  /// Returns the bytes that this rank keeps. The first step makes the state.
  ShardedOptimizerBytes bytes() const;

  /// Throws c10::Error, for no rank has a master of a whole parameter.
  at::Tensor master_param(std::size_t group, const at::Tensor& parameter) override;
  /// Throws c10::Error: cast the model first, and make the optimizer with masters.
  void enable_master_weights() override;
  /// Throws c10::Error, for no rank has all of the summed gradients.
  void check_unscale() const override;

  /// Writes on rank 0 the archive that `OptimizerType` alone would write, whatever the number of
  /// ranks. On any other rank writes the rank's part of the state, which that rank can load again.
  /// All ranks call it; rank 0 writes the file:
  ///
  ///     torch::serialize::OutputArchive archive;
  ///     optimizer.save(archive);
  ///     if (world.rank() == 0) archive.save_to(path);
  ///
  /// Takes memory for the whole state on rank 0's host, and for a bucket in float on each device.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Loads an archive that a ShardedOptimizer with any number of ranks, `OptimizerType` alone or
  /// libtorch's optimizer of the same name wrote. Each rank reads the archive and keeps its slices.
  /// With the model's weights of that time, training goes on with the bits of a run that was not
  /// interrupted. All or nothing.
  /// \throws c10::Error as OptimizerType does, and for another rank's part
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Known {
    at::Tensor parameter;
    std::size_t group;
    bool is_trained;
  };

  static void check_storage(optim::WeightStorage storage);
  std::vector<at::Tensor> start_alike();
  void check_groups() const;
  void prepare();
  std::string words_to_compare(at::Device device, const at::Tensor& inv_scale);
  State* state_of(const detail::ShardSlice& slice) const;
  void take_whole(detail::FiledOptimizer& read) const;
  void take_part(detail::FiledOptimizer& read) const;
  void keep_frozen(detail::FiledOptimizer& filed) const;

  using Shell::apply_with_aten;  // private: it gathers no weights

  c10::intrusive_ptr<c10d::Backend> group_;
  std::vector<Known> known_;  // all parameters, group by group
  GradBuckets buckets_;
  std::shared_ptr<detail::ShardExchange> exchange_;
  detail::ShardedWeights weights_;
  std::vector<std::vector<const detail::ShardSlice*>> slices_;  // of each group
  int64_t steps_ = 0;                     // on other devices than the CPU, which compare some
  double max_norm_ = detail::kNoMaxNorm;  // of the last step
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/sharded_optimizer_impl.h>  // IWYU pragma: export
