/// \file
/// MasterWeights: float master weights for any `torch::optim::Optimizer`. master_params: the
/// tensors that an optimizer trains.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/fused_param_state.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Trains the half and bfloat16 parameters of an optimizer of libtorch's, or of your own, as floats
/// (Apex's `master_weights`): small updates add up that a weight of 16 bits would round away.
///
/// After `mezzo::MasterWeights masters(sgd)` give a GradScaler `masters`, not `sgd`, which would
/// train the 16-bit weights. MasterWeights is no optimizer: groups, options, rates and `zero_grad`
/// are those of `sgd`, which must outlive it. Everything that takes an OptimizerRef (GradScaler,
/// clipping, LrSchedule, TrainingState) takes it. mezzo's own optimizers do the same by
/// WeightStorage::fp32_master, in one pass.
///
/// docs/optimizers.md tells what a step does, what writing to a parameter between steps means, and
/// what becomes of state from before. A skipped step leaves parameters, masters and the inner state
/// as they were, bit for bit; the host waits once for the device to know.
///
/// Memory: 4 bytes an element of 16 bits for the master, and 4 for the float gradient during a
/// step. Use it from one thread at a time, and make one MasterWeights for an optimizer.
class MasterWeights : public optim::MixedPrecisionOptimizer, public optim::ArchiveChecker {
 public:
  /// Keeps a reference to `optimizer`.
  /// \throws c10::Error for torch::optim::LBFGS, for an optimizer of mezzo's, which keeps masters
  ///   itself, and for a parameter of 16 bits that is given twice or shares another's memory
  explicit MasterWeights(torch::optim::Optimizer& optimizer);
  MasterWeights(const MasterWeights&) = delete;
  MasterWeights& operator=(const MasterWeights&) = delete;

  // All are declared inline: the first virtual function that is not would bring the vtable, and
  // everything that it refers to, into every unit.

  /// Returns the optimizer that was given.
  torch::optim::Optimizer& optimizer() noexcept override { return *inner_; }

  /// GradScaler calls these two. `apply` waits for the device that decides whether to step.
  /// \throws c10::Error as the constructor does, where parameters were added since, and what the
  ///   inner optimizer's step throws
  MEZZO_INLINE StepPlan plan() override;
  MEZZO_INLINE void apply(StepPlan plan, const GradStats& stats = {},
                          const StepOptions& options = {}) override;

  void enable_master_weights() override {}  // it always trains masters
  MEZZO_INLINE at::Tensor master_param(const at::Tensor& parameter) override;

  /// Writes what the inner optimizer saves, the masters in float, and the number of applied steps:
  /// `torch::save(masters, path)`. Training goes on from this and the model's own file.
  MEZZO_INLINE void save(torch::serialize::OutputArchive& archive) const override;

  /// Reads such a file, for an inner optimizer of the same class and groups:
  /// `torch::load(masters, path)`. The next step is, to the bit, the one that would have followed
  /// `save`. Load the model too, before or after.
  /// \throws c10::Error, and changes nothing, for any other file (also the inner optimizer's own),
  ///   and for groups or masters of other sizes
  MEZZO_INLINE void load(torch::serialize::InputArchive& archive) override;
  /// Throws what `load` would throw, and changes nothing.
  MEZZO_INLINE void check_load(torch::serialize::InputArchive& archive) const override;

 private:
  /// A parameter of 16 bits and its master. Holding the parameter keeps its address its own.
  struct MasterEntry {
    at::Tensor parameter{};
    detail::MasterState state{};
  };

  static constexpr const char* kName = "MasterWeights";
  detail::OptimizerDescription description() const { return {kName, inner_->param_groups()}; }

  /// What an archive holds beside the inner optimizer, checked.
  struct ArchiveContents {
    std::unordered_map<const c10::TensorImpl*, MasterEntry> masters{};
    Progress progress{};
    torch::serialize::InputArchive inner{};
  };
  ArchiveContents read_archive(torch::serialize::InputArchive& archive) const;

  void check_parameters();
  detail::MasterState& get_master_state(const at::Tensor& parameter);
  void step_inner(const StepPlan& plan, const detail::GradMultipliers& multipliers);

  torch::optim::Optimizer* inner_;
  std::unordered_map<const c10::TensorImpl*, MasterEntry> masters_;
  std::size_t num_checked_params_ = 0;  // in all groups, when check_parameters looked at them
};

/// Returns the tensors that `optimizer` trains, in the order of its groups: for each parameter its
/// float master where there is one (MasterWeights, and mezzo's optimizers with
/// WeightStorage::fp32_master), otherwise the parameter itself. Apex's `amp.master_params`:
///
///     scaler.unscale_(optimizer);
///     torch::nn::utils::clip_grad_norm_(mezzo::master_params(optimizer), 1.0);
///     scaler.step(optimizer);  // takes the clipped gradients
///
/// `scaler.step(optimizer, {.max_norm = 1.0})` clips the same in fewer passes. Makes masters that
/// no step has made yet. Masters stay the same tensors from step to step, until the parameter moves
/// to another device. Read them and write their gradients, but set weights at the parameter.
/// \throws c10::Error for a parameter of WeightStorage::split_master, which has no such tensor
std::vector<at::Tensor> master_params(OptimizerRef optimizer);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/optim/detail/master_weights_inl.h>  // IWYU pragma: export
#endif
