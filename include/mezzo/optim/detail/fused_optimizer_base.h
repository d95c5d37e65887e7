#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/step_args.h>
#include <mezzo/optim/detail/fused_param_state.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Tensor lists of parameters of one group, device and dtype for ATen's fused optimizers.
struct AtenTensorLists {
  std::size_t group;
  std::vector<at::Tensor> parameters{};
  std::vector<at::Tensor> gradients{};  ///< of the parameters' dtype
  std::array<std::vector<at::Tensor>, 3> moments{};
  std::vector<at::Tensor> state_steps{};  ///< float32, this step included
};

/// GradStats as arguments of ATen's fused optimizers: float32, the only dtype of the CUDA kernels.
struct AtenAmpArgs {
  std::optional<at::Tensor> grad_scale;  ///< divisor of the gradients
  std::optional<at::Tensor> found_inf;
  std::optional<at::Tensor> lr_factor;  ///< of a schedule
};

/// The step of mezzo's fused optimizers, independent of the update functor:
///
///   plan         one loop over the parameters: gradients, checks, pointers
///   grad_stats   one read of the gradients
///   apply        unscale, clip, update and zero in one pass over memory
///
/// FusedOptimizer (fused_optimizer.h) adds the update functor, constructors, options and archives.
class FusedOptimizerBase : public torch::optim::Optimizer, public optim::MixedPrecisionOptimizer {
 public:
  torch::optim::Optimizer& optimizer() noexcept override { return *this; }

  at::Tensor step(LossClosure closure = nullptr) override {
    return MixedPrecisionOptimizer::step(closure);
  }
  MEZZO_INLINE StepPlan plan() override;
  MEZZO_INLINE GradStats grad_stats(const StepPlan& plan, const at::Tensor& inv_scale) override;
  void apply(StepPlan plan, const GradStats& stats = {}, const StepOptions& options = {}) override {
    apply_impl(plan, stats, options, /*with_aten=*/false);
  }

  /// Returns the weight storage of all groups.
  const optim::WeightStorageOptions& weight_storage_options() const noexcept {
    return storage_options_;
  }
  void enable_master_weights() override {
    if (storage_options_.weight_storage == optim::WeightStorage::plain) {
      storage_options_.weight_storage = optim::WeightStorage::fp32_master;
    }
  }
  MEZZO_INLINE at::Tensor master_param(const at::Tensor& parameter) override;

  /// Writes what torch's optimizer of the same name writes, and what torch lacks under further
  /// keys. Split masters are written as float32.
  MEZZO_INLINE void save(torch::serialize::OutputArchive& archive) const override;

 protected:
  MEZZO_INLINE FusedOptimizerBase(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                  std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                  const optim::WeightStorageOptions& storage_options,
                                  const char* name, OptimizerKind kind);

  // Implemented by FusedOptimizer with the update functor (Adam, SGD, Lion).

  /// Reads and checks the options of a group.
  virtual GroupHyperParams read_group_hyperparams(std::size_t group) const = 0;
  /// Returns the functor arguments of step `step`, counted from 1.
  virtual FunctorArgs make_functor_args(const GroupHyperParams& hyper_params,
                                        int64_t step) const = 0;
  /// Returns the CPU kernel for a weight storage and dtype; null for an unsupported dtype.
  virtual StepKernelFn select_step_kernel(const GroupHyperParams& hyper_params,
                                          optim::WeightStorage storage,
                                          at::ScalarType dtype) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_param_state() const = 0;
  /// Casts a state; returns null if it is another optimizer's.
  virtual FusedParamStateBase* as_fused_state(torch::optim::OptimizerParamState& state) const = 0;
  /// Steps with ATen's fused kernel. Requires a null hyper_params.aten_unsupported_reason.
  virtual void aten_step(const GroupHyperParams& hyper_params, const AtenTensorLists& lists,
                         const AtenAmpArgs& amp_args) const = 0;

  OptimizerDescription description() const noexcept { return {name_, param_groups_}; }
  /// Checks the parameters, and erases expired states, after their number has changed.
  /// \throws c10::Error if a parameter appears twice or two share memory
  MEZZO_INLINE void check_parameters();
  /// Erases the states of parameters that were destroyed.
  MEZZO_INLINE void erase_expired_state();
  /// Casts a parameter's state and sets its `weak_param`.
  /// \throws c10::Error if the state is another optimizer's
  MEZZO_INLINE FusedParamStateBase& bind_state(torch::optim::OptimizerParamState& state,
                                               const at::Tensor& parameter) const;
  /// Applies a plan, with ATen's fused kernels for devices without mezzo kernels, or if
  /// `with_aten`.
  MEZZO_INLINE void apply_impl(StepPlan& plan, const GradStats& stats, const StepOptions& options,
                               bool with_aten);
  /// Adds `parameter` to `plan` if it has a gradient.
  /// \throws c10::Error, naming the parameter, if `apply` does not support its step
  MEZZO_INLINE void add_param(StepPlan& plan, const at::Tensor& parameter, std::size_t group,
                              std::size_t param_index);
  /// Writes `serialized` under torch's keys, and what torch lacks under mezzo's.
  MEZZO_INLINE void write_archive(torch::serialize::OutputArchive& archive,
                                  const SerializedOptimizer& serialized) const;
  /// Returns the weight storage of an archive; the current one if the archive has none.
  MEZZO_INLINE optim::WeightStorageOptions read_storage_options(
      torch::serialize::InputArchive& archive) const;

  optim::WeightStorageOptions storage_options_;
  const char* name_;

 private:
  using Param = StepPlan::Param;
  using Params = std::span<Param>;
  using Groups = std::vector<GroupHyperParams>;

  /// Gradients that a kernel cannot read or zero in place.
  struct GradientCopies {
    std::vector<at::Tensor> gradients{};  ///< copies, kept alive until the kernels have run
    std::vector<at::Tensor> to_zero{};    ///< originals of copies that a kernel zeroes
  };

  MEZZO_INLINE void check_state(FusedParamStateBase& fused_state, const at::Tensor& parameter,
                                const GroupHyperParams& hyper_params) const;
  MEZZO_INLINE FusedParamStateBase& get_or_create_state(const at::Tensor& parameter);
  MEZZO_INLINE void prefetch(std::span<const at::Tensor> parameters, std::size_t i,
                             int num_moments) const;
  /// Sets the pointers to existing memory; `prepare_param` sets the others.
  MEZZO_INLINE static void set_pointers(Param& param, FusedParamStateBase* fused_state,
                                        const GroupHyperParams& hyper_params);
  MEZZO_INLINE void check_aten_supports(const Param& param,
                                        const GroupHyperParams& hyper_params) const;
  MEZZO_INLINE FusedParamStateBase* prepare_state(Param& param,
                                                  const GroupHyperParams& hyper_params);
  MEZZO_INLINE void set_plan_lrs(StepPlan& plan);
  MEZZO_INLINE void count_applied_step(const StepPlan& plan, const GradStats& stats);
  /// Sets the step counts of CPU `calls`, bumps versions, and zeroes gradients that no kernel has
  /// zeroed.
  MEZZO_INLINE void finish_step(Params params, std::span<const CpuGroupArgs> calls,
                                bool zeroes_grad, bool zeroed_in_kernel,
                                const GradientCopies& copies);

  MEZZO_INLINE void step_cpu(Params params, const Groups& groups, const GradStats& stats,
                             const StepOptions& options);
  /// Creates state, copies gradients and sets the remaining pointers of a parameter. Returns its
  /// state; null if it needs none.
  MEZZO_INLINE FusedParamStateBase* prepare_param(Param& param,
                                                  const GroupHyperParams& hyper_params,
                                                  bool zeroes_grad, GradientCopies& copies);

  MEZZO_INLINE void step_on_cuda(Params params, const Groups& groups, const GradStats& stats,
                                 const StepOptions& options, bool counts_applied);
  MEZZO_INLINE void step_with_aten(Params params, const Groups& groups, const GradStats& stats,
                                   const StepOptions& options);

  OptimizerKind kind_;
  std::size_t num_checked_params_ = 0;  // in all groups, at the last check_parameters
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/optim/detail/fused_optimizer_base_inl.h>
#endif
