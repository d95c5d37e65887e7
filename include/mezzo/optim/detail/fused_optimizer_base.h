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

/// Parameters of one group, device and dtype, as ATen's fused optimizers take them; entry i of each
/// list belongs to parameter i.
struct AtenTensorLists {
  std::size_t group;
  std::vector<at::Tensor> parameters{};
  std::vector<at::Tensor> gradients{};  ///< of the parameters' dtype
  std::array<std::vector<at::Tensor>, 3> moments{};
  std::vector<at::Tensor> counts{};  ///< floats, of this step already
};

/// GradStats as ATen's kernels take it: the divisor of gradients, whether to do nothing, and, under
/// a schedule, the factor of the lr, in float, the only dtype that CUDA's kernels take.
struct AtenAmpArgs {
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
  std::optional<at::Tensor> lr_factor;
};

/// Takes the steps of mezzo's optimizers, whatever their rule:
///
///   plan    one walk over the parameters: gradients, all checks, known addresses
///   read    one read of the gradients
///   apply   unscale, clip and update in one pass over the memory
///
/// FusedOptimizer (fused_optimizer.h) adds the rule, as virtual functions, and the parts that
/// libtorch's users see: constructors, options and files.
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

  /// Returns how the weights of all groups are kept.
  const optim::WeightStorageOptions& weight_storage_options() const noexcept { return weights_; }
  void enable_master_weights() override {
    if (weights_.weight_storage == optim::WeightStorage::plain) {
      weights_.weight_storage = optim::WeightStorage::fp32_master;
    }
  }
  MEZZO_INLINE at::Tensor master_param(const at::Tensor& parameter) override;

  /// Writes what libtorch's optimizer of the same name writes, and under keys of their own the
  /// values that libtorch lacks. Split weights are written whole.
  MEZZO_INLINE void save(torch::serialize::OutputArchive& archive) const override;

 protected:
  MEZZO_INLINE FusedOptimizerBase(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                  std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                  const optim::WeightStorageOptions& weights, const char* name,
                                  OptimizerKind kind);

  // The rule: AdamW and Adam, SGD, or Lion.

  /// Reads and checks the options of a group.
  virtual GroupHyperParams read_group_hyperparams(std::size_t group) const = 0;
  /// Returns the hyper_params of a group's step number `step`, counted from 1.
  virtual FunctorArgs make_functor_args(const GroupHyperParams& hyper_params,
                                        int64_t step) const = 0;
  /// Returns the loop of a group for weights that are kept so; null for a dtype that has none.
  virtual StepKernelFn select_step_kernel(const GroupHyperParams& hyper_params,
                                          optim::WeightStorage storage,
                                          at::ScalarType dtype) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_param_state() const = 0;
  /// Returns a state as a fused_state; null where the state is another optimizer's.
  virtual FusedParamStateBase* as_fused_state(torch::optim::OptimizerParamState& state) const = 0;
  /// Steps through ATen's fused kernel, if hyper_params.aten_unsupported_reason is null.
  virtual void aten_step(const GroupHyperParams& hyper_params, const AtenTensorLists& lists,
                         const AtenAmpArgs& amp_args) const = 0;

  OptimizerDescription description() const noexcept { return {name_, param_groups_}; }
  /// Drops the states of parameters that are gone. Called when there are more or fewer than
  /// before, or fewer than states.
  /// \throws c10::Error if a weight would be trained twice
  MEZZO_INLINE void check_parameters();
  /// Returns a parameter's state as a fused_state, and makes the parameter its owner.
  /// \throws c10::Error if the state is another optimizer's
  MEZZO_INLINE FusedParamStateBase& bind_state(torch::optim::OptimizerParamState& state,
                                               const at::Tensor& parameter) const;
  /// Applies a plan: through ATen's fused kernels where mezzo has none for a device, or if
  /// `with_aten` for all.
  MEZZO_INLINE void apply_impl(StepPlan& plan, const GradStats& stats, const StepOptions& options,
                               bool with_aten);
  /// Adds a param to `plan`, if `parameter` has a gradient.
  /// \throws c10::Error naming the parameter, if `apply` could not take the step
  MEZZO_INLINE void add_param(StepPlan& plan, const at::Tensor& parameter, std::size_t group,
                              std::size_t param_index);
  /// Writes `serialized` under libtorch's keys, and what libtorch lacks under mezzo's.
  MEZZO_INLINE void write_archive(torch::serialize::OutputArchive& archive,
                                  const SerializedOptimizer& serialized) const;
  /// Returns how a file's weights are kept; as here, where the file does not say.
  MEZZO_INLINE optim::WeightStorageOptions read_weight_options(
      torch::serialize::InputArchive& archive) const;

  optim::WeightStorageOptions weights_;
  const char* name_;

 private:
  using Param = StepPlan::Param;
  using Params = std::span<Param>;
  using Groups = std::vector<GroupHyperParams>;

  /// Copies that the host makes for the kernels of one device.
  struct GradientCopies {
    std::vector<at::Tensor> gradients{};  ///< copies, kept alive
    std::vector<at::Tensor> to_zero{};    ///< gradients that were copied and are to be cleared
  };

  MEZZO_INLINE void check_state(FusedParamStateBase& fused_state, const at::Tensor& weights,
                                const GroupHyperParams& hyper_params) const;
  MEZZO_INLINE FusedParamStateBase& create_state(const at::Tensor& parameter);
  MEZZO_INLINE void prefetch(std::span<const at::Tensor> parameters, std::size_t i,
                             int moments) const;
  /// Sets the addresses of memory that is there already; `prepare_param` sets those that stay null.
  MEZZO_INLINE static void set_pointers(Param& param, FusedParamStateBase* fused_state,
                                        const GroupHyperParams& hyper_params);
  MEZZO_INLINE void check_aten_supports(const Param& param,
                                        const GroupHyperParams& hyper_params) const;
  MEZZO_INLINE FusedParamStateBase* prepare_state(Param& param,
                                                  const GroupHyperParams& hyper_params);
  MEZZO_INLINE void set_plan_lrs(StepPlan& plan);
  MEZZO_INLINE void count_applied_step(const StepPlan& plan, const GradStats& stats);
  /// The last walk: sets the counts of the CPU's `calls`, bumps versions, and zeroes_grad
  /// gradients, if they are to be and no kernel has done so.
  MEZZO_INLINE void finish_step(Params params, std::span<const CpuGroupArgs> calls,
                                bool zeroes_grad, bool already_zeroed,
                                const GradientCopies& copies);

  MEZZO_INLINE void step_cpu(Params params, const Groups& groups, const GradStats& stats,
                             const StepOptions& options);
  /// Completes the addresses of a param, for a step that zeroes_grad gradients or not. Returns its
  /// fused_state; null where nothing is kept.
  MEZZO_INLINE FusedParamStateBase* prepare_param(Param& param,
                                                  const GroupHyperParams& hyper_params,
                                                  bool zeroes_grad, GradientCopies& copies);

  MEZZO_INLINE void step_on_cuda(Params params, const Groups& groups, const GradStats& stats,
                                 const StepOptions& options, bool counts_applied);
  MEZZO_INLINE void step_with_aten(Params params, const Groups& groups, const GradStats& stats,
                                   const StepOptions& options);

  OptimizerKind kind_;
  std::size_t num_checked_params_ = 0;  // in all groups, when check_parameters looked at them
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/optim/detail/fused_optimizer_base_inl.h>
#endif
