/// \file
/// MasterWeights: float32 master weights for any `torch::optim::Optimizer`. master_params: the
/// tensors that an optimizer updates.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/master_state.h>
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

/// Wraps a torch::optim or custom optimizer to update float32 masters of its float16 and bfloat16
/// parameters (Apex's `master_weights`), so that updates below the 16-bit rounding error are not
/// lost.
///
/// After `mezzo::MasterWeights masters(sgd)` pass `masters` to the GradScaler, not `sgd`, which
/// would update the 16-bit parameters. MasterWeights is not a torch::optim::Optimizer: groups,
/// options and `zero_grad` are those of `sgd`, which must outlive it. Every function that takes an
/// OptimizerRef (GradScaler::step, LrSchedule, TrainingState) accepts it. mezzo's optimizers have
/// masters themselves (WeightStorage::fp32_master), in one pass.
///
/// docs/optimizers.md describes a step, external writes to parameters, and state of earlier steps.
/// A skipped step leaves parameters, masters and inner state bitwise unchanged. A step synchronizes
/// once.
///
/// Memory: 4 bytes per 16-bit element for the master, and 4 for the float32 gradient during a step.
/// Use one MasterWeights for an optimizer. Not thread-safe.
class MasterWeights : public optim::MixedPrecisionOptimizer, public optim::ArchiveChecker {
 public:
  /// Keeps a reference to `optimizer`.
  /// \throws c10::Error for torch::optim::LBFGS, for a mezzo optimizer, and for a 16-bit parameter
  ///   that appears twice or shares memory with another
  explicit MasterWeights(torch::optim::Optimizer& optimizer);
  MasterWeights(const MasterWeights&) = delete;
  MasterWeights& operator=(const MasterWeights&) = delete;

  // All virtual functions are inline: a non-inline one would emit the vtable, and what it refers
  // to, in every translation unit.

  /// Returns the wrapped optimizer.
  torch::optim::Optimizer& optimizer() noexcept override { return *inner_; }

  /// \throws c10::Error as the constructor, for parameters added since
  MEZZO_INLINE StepPlan plan() override;
  /// Synchronizes with the device of `stats`. Throws what the inner optimizer's step throws.
  MEZZO_INLINE void apply(StepPlan plan, const GradStats& stats = {},
                          const StepOptions& options = {}) override;

  void enable_master_weights() override {}  // always enabled
  MEZZO_INLINE at::Tensor master_param(const at::Tensor& parameter) override;

  /// Writes the inner optimizer, the masters and the number of applied steps:
  /// `torch::save(masters, path)`.
  MEZZO_INLINE void save(torch::serialize::OutputArchive& archive) const override;

  /// Reads what `save` wrote, for an inner optimizer of the same class and groups:
  /// `torch::load(masters, path)`. Training resumes bitwise. Load the model too, before or after.
  /// \throws c10::Error, with the strong exception guarantee, for any other archive (also the inner
  ///   optimizer's), and for groups or masters of other sizes
  MEZZO_INLINE void load(torch::serialize::InputArchive& archive) override;
  /// Throws what `load` would throw, and changes nothing.
  MEZZO_INLINE void check_load(torch::serialize::InputArchive& archive) const override;

 private:
  /// A 16-bit parameter and its master. Holding the parameter keeps its address from being reused.
  struct MasterEntry {
    at::Tensor parameter{};
    detail::MasterState state{};
  };

  static constexpr const char* kName = "MasterWeights";
  detail::OptimizerDescription description() const { return {kName, inner_->param_groups()}; }

  /// The checked contents of an archive.
  struct ArchiveContents {
    std::unordered_map<const c10::TensorImpl*, MasterEntry> masters{};
    detail::StepProgress progress{};
    torch::serialize::InputArchive inner{};
  };
  ArchiveContents read_archive(torch::serialize::InputArchive& archive) const;

  void check_parameters();
  detail::MasterState& get_master_state(const at::Tensor& parameter);
  void step_inner(const StepPlan& plan, const detail::GradMultipliers& multipliers);

  torch::optim::Optimizer* inner_;
  std::unordered_map<const c10::TensorImpl*, MasterEntry> masters_;
  std::size_t num_checked_params_ = 0;  // in all groups, at the last check_parameters
};

/// Returns the tensors that `optimizer` updates, in the order of its groups: the float32 master of
/// each parameter that has one (MasterWeights, mezzo's optimizers with WeightStorage::fp32_master),
/// otherwise the parameter. Apex's `amp.master_params`:
///
///     scaler.unscale_(optimizer);
///     torch::nn::utils::clip_grad_norm_(mezzo::master_params(optimizer), 1.0);
///     scaler.step(optimizer);  // applies the clipped gradients
///
/// `scaler.step(optimizer, {.max_norm = 1.0})` does the same in fewer passes. Creates missing
/// masters. Masters stay the same tensors until their parameter moves to another device. Set
/// weights through the parameter, not through its master.
/// \throws c10::Error for a parameter with WeightStorage::split_master, which has no master tensor
std::vector<at::Tensor> master_params(OptimizerRef optimizer);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/optim/detail/master_weights_inl.h>  // IWYU pragma: export
#endif
