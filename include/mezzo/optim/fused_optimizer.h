/// \file
/// FusedOptimizer: a training step as values. StepPlan lists the parameters that take part, Verdict
/// holds what one read of the gradients found, and `apply` does the rest in one pass.
#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/verdict.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The numbers that a step takes from the options of a param group.
struct GroupNumbers {
  double lr = 0;
  bool follows_table = false;       ///< the device multiplies `lr` by a schedule's factor
  StepNumbers constants{};          ///< the rule's own numbers
  bool is_variant = false;          ///< takes the rule's other loop: amsgrad, momentum
  int moments = 0;                  ///< how many; none for SGD without momentum
  bool begins_as_gradient = false;  ///< with dampening, the first buffer is the first gradient
  StepLoop (*loop)(optim::WeightStorage storage, at::ScalarType kept, CpuIsa isa) = nullptr;
  const char* missing_in_aten =
      nullptr;  ///< why ATen's kernels cannot step this group, and a remedy
};

class ParamSlot;

}  // namespace detail

/// Options of one step: `scaler.step(optimizer, {.max_norm = 1.0})`.
///
/// Afterwards, whether the step ran or was skipped, `.grad` is zero with `zero_grad`. Otherwise an
/// optimizer of mezzo's or a MasterWeights leaves `.grad` as it was, with the loss scale unless
/// `unscale_` took it off; any other optimizer's `.grad` is unscaled, and clipped where it stepped,
/// as after torch.amp's calls.
struct StepOptions {
  /// Largest 2-norm of all gradients, taken as one vector. Larger ones are multiplied by
  /// max_norm / (norm + 1e-6) as they are used, as `clip_grad_norm_` does. Infinity: no clipping.
  double max_norm = std::numeric_limits<double>::infinity();
  /// Sets the gradients to zero in the same pass. They stay defined.
  bool zero_grad = false;
};

/// The parameters that take part in one step, with their gradients and state. One walk over the
/// parameters makes a plan and checks all of it; `apply` consumes it. No plan is kept for another
/// step.
struct StepPlan {
  /// A parameter with a gradient.
  struct Row {
    const at::Tensor* parameter;  ///< in the groups of the optimizer
    at::Tensor gradient;          ///< of the parameter, dense
    std::size_t group;            ///< the number of its group
    std::uint64_t number;         ///< of the parameter, counted through all groups

    // mezzo's optimizers set the following.
    /// How the parameter is kept: `plain` for float and double.
    optim::WeightStorage storage = optim::WeightStorage::plain;
    detail::ParamSlot* slot = nullptr;  ///< null where nothing is kept, or nothing yet
    detail::StepLoop loop = nullptr;    ///< on the CPU
  };

  std::vector<Row> rows{};                     ///< device by device
  std::vector<detail::GroupNumbers> groups{};  ///< what the options of each group say
  bool has_devices = false;                    ///< gradients lie on several devices
  bool is_checked = false;  ///< gradients are dense, of our dtypes, on their parameters' devices
  /// A gradient is of half and its parameter keeps no master: unscaled, it would underflow.
  bool has_bare_half = false;
  /// Other ranks have rows, even if this one has none: all ranks go through the step together.
  bool has_rows_elsewhere = false;

  /// Whether a rank has a gradient.
  bool has_rows() const noexcept { return has_rows_elsewhere || !rows.empty(); }
};

namespace optim {

/// An optimizer that unscales, clips, updates and zeroes in one pass over its memory. The device
/// decides whether the step is skipped, so that the host never waits:
///
/// \code
///   StepPlan plan = optimizer.plan();
///   Verdict verdict = optimizer.read(plan, inv_scale);
///   optimizer.apply(std::move(plan), verdict, {.max_norm = 1.0});
/// \endcode
///
/// GradScaler::step calls these three functions. Between `plan` and `apply` groups, gradients and
/// states must not change.
class FusedOptimizer : public OptimizerInterface {
 public:
  /// Returns the plan of a step: one row for each parameter with a gradient. Writes no weight.
  /// \throws c10::Error, naming the parameter or option, if `apply` could not take the step
  virtual StepPlan plan() = 0;

  /// Reads the plan's gradients once, and returns what it found on all devices, in tensors on the
  /// device of the first gradient. Does not synchronise, except to coalesce sparse gradients.
  /// \param inv_scale a float of one element, on any device
  virtual inline Verdict read(const StepPlan& plan, const at::Tensor& inv_scale);

  /// Takes the step, or skips it where the verdict found an inf: parameters, moments and counts
  /// then keep every bit. Runs on the current streams. Waits for a device only where parameters lie
  /// on several.
  virtual void apply(StepPlan plan, const Verdict& verdict = {},
                     const StepOptions& options = {}) = 0;

  /// Returns whether `parameter`, of group number `group`, is rounded from a float master that
  /// `master_param` can return.
  virtual bool keeps_master([[maybe_unused]] std::size_t group,
                            [[maybe_unused]] const at::Tensor& parameter) const {
    return false;
  }

  /// Returns the tensor that a step trains in place of `parameter`, of group number `group`: its
  /// float master, made if there is none and equal to the parameter as it is now; or the parameter.
  /// Until the next step the master's `.grad` is the parameter's, the same tensor.
  /// \throws c10::Error for WeightStorage::split_master, whose master is no tensor
  virtual at::Tensor master_param([[maybe_unused]] std::size_t group, const at::Tensor& parameter) {
    return parameter;
  }

  /// Trains parameters of half and bfloat16 as float masters from here on, if their storage was
  /// `plain`.
  /// \throws c10::Error if this optimizer keeps no masters
  virtual void enable_master_weights() {
    TORCH_CHECK(
        false,
        "enable_master_weights: this optimizer keeps no float masters; give "
        "mezzo::initialize a level with master_weights = false, or use mezzo::optim::AdamW, "
        "Adam, SGD or Lion");
  }

 protected:
  /// Calls `closure`, if there is one, with autograd on, takes a step with the gradients as they
  /// are, and returns what the closure returned.
  inline at::Tensor step_with(const torch::optim::Optimizer::LossClosure& closure);
};

}  // namespace optim

/// Makes autograd add up the gradients of bfloat16 and half parameters in float (libtorch's
/// `set_grad_dtype`), as Megatron's main_grad: 1,000 micro-batches of 1 give 1000, where bfloat16
/// gives 256. `.grad` is then a float tensor, 4 bytes an element in place of 2, which libtorch's
/// clipping and every step take as any other. Converts gradients that there are, and passes over
/// parameters of float and double.
///
/// Call it after the model is cast and before a DataParallel or GradBuckets of its parameters. The
/// setting belongs to the parameters, frozen ones too, and is not taken back.
inline void accumulate_in_float(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!detail::is_low_precision(parameter) || parameter.grad_dtype() == at::kFloat) continue;
    parameter.set_grad_dtype(at::kFloat);
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined() && gradient.layout() == at::kStrided) {
      parameter.mutable_grad() = gradient.detach().to(at::kFloat);
    }
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/optim/detail/gradients.h>
