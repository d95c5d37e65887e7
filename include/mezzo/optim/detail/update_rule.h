#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/optim/detail/param_slot.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The numbers that a step takes from the options of a param group.
struct GroupNumbers {
  double lr = 0;
  bool follows_table = false;       ///< the device multiplies `lr` by a schedule's factor
  ExtraOptions extras{};            ///< the options that all of mezzo's optimizers have
  StepNumbers constants{};          ///< the rule's own numbers
  bool is_variant = false;          ///< takes the rule's other loop: amsgrad, momentum
  int moments = 0;                  ///< how many; none for SGD without momentum
  bool begins_as_gradient = false;  ///< with dampening, the first buffer is the first gradient
};

/// Parameters of one group, device and dtype, as ATen's fused optimizers take them; entry i of each
/// list belongs to parameter i.
struct AtenLists {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;  ///< of the parameters' dtype
  std::array<std::vector<at::Tensor>, 3> moments;
  std::vector<at::Tensor> counts;  ///< floats, of this step already
};

/// A verdict as ATen's kernels take it: the divisor of gradients, whether to do nothing, and, under
/// a schedule, the factor of the lr, in float, the only dtype that CUDA's kernels take.
struct AtenVerdict {
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
  std::optional<at::Tensor> lr_factor;
};

/// An optimizer as StepEngine sees it: a name, numbers and loops. There are four, one a header in
/// mezzo/optim/; RuleOf (optimizer_shell.h) makes them from their traits.
struct UpdateRule {
  const char* name;

  /// Reads a group's options, `defaults` for what libtorch's own classes lack; checks all of them.
  GroupNumbers (*read_group)(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                             std::size_t group, const torch::optim::OptimizerOptions& defaults);
  /// Sets the storage of weights in options, where these are mezzo's and say `plain`.
  void (*keep_masters)(torch::optim::OptimizerOptions& options);

  StepNumbers (*coefficients)(const StepNumbers& constants, double lr, int64_t step);
  StepLoop (*loop)(bool is_variant, optim::WeightStorage storage, at::ScalarType kept, CpuIsa isa);

  std::unique_ptr<torch::optim::OptimizerParamState> (*make_state)();
  /// Returns the state as a slot, and takes over one of libtorch's; null where it is another's.
  ParamSlot* (*slot_in)(std::unique_ptr<torch::optim::OptimizerParamState>& state);

  /// Throws for options that ATen's fused kernel lacks; null where ATen has no kernel.
  void (*check_aten)(const GroupNumbers& numbers);
  void (*aten_step)(const GroupNumbers& numbers, const AtenLists& lists,
                    const AtenVerdict& verdict);

  CudaRule cuda_rule;  ///< selects the kernels on CUDA
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
