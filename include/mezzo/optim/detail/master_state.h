#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/optim/detail/optimizer_description.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>

// Masters of 16-bit parameters: whole (WeightStorage::fp32_master) or as low bits (split_master).
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The float32 value of a 16-bit parameter.
struct MasterState {
  /// WeightStorage::fp32_master and MasterWeights: the float32 tensor that the parameter is rounded
  /// from.
  at::Tensor master{};
  /// WeightStorage::split_master: the int16 low bits of the float32 value; see combine_low_bits.
  at::Tensor low_bits{};
  /// Version of an exposed master after mezzo's last write. Another version means that the caller
  /// has written the master.
  std::optional<int64_t> exposed_version{};

  /// Prepares the master for a caller: until the next step its gradient is the parameter's.
  void expose_master(const at::Tensor& parameter) {
    master.mutable_grad() = parameter.grad();
    exposed_version = master._version();
  }
  /// Resets the exposed gradient and version after an applied or skipped step.
  void end_step() {
    if (!master.defined()) return;
    if (master.grad().defined()) master.mutable_grad() = at::Tensor();
    if (exposed_version) exposed_version = master._version();
  }
};

// float32 as a bfloat16 and the low 16 bits; see weight_formats.h.
inline at::Tensor get_high_bits(const at::Tensor& floats) {
  return floats.view(at::kInt).add(0x8000).bitwise_right_shift(16).to(at::kShort);
}
inline at::Tensor get_low_bits(const at::Tensor& floats) {
  return floats.view(at::kInt).to(at::kShort);
}
inline at::Tensor combine_with_low_bits(const at::Tensor& parameter, const at::Tensor& low_bits) {
  const at::Tensor high = parameter.detach().view(at::kShort).to(at::kInt);
  const at::Tensor magnitude = high.bitwise_and(0x7FFF);
  const at::Tensor bits = low_bits.to(parameter.device(), at::kInt);
  const at::Tensor is_stale = magnitude.eq(0)
                                  .logical_and(bits.lt(0))
                                  .logical_or(magnitude.eq(0x7F80).logical_and(bits.gt(0)));
  return high.bitwise_left_shift(16).add(bits.masked_fill(is_stale, 0)).view(at::kFloat);
}

/// Returns elementwise whether the 16-bit `parameter` is `master` rounded to nearest, with either
/// direction of ties.
inline at::Tensor is_rounded_from(const at::Tensor& master, const at::Tensor& parameter) {
  const at::Tensor value = parameter.detach();
  at::Tensor is_nearest = master.to(value.scalar_type()).eq(value);
  if (value.scalar_type() != at::kBFloat16) return is_nearest;
  return is_nearest.logical_or(get_high_bits(master).eq(value.view(at::kShort)));
}

/// Returns `requested` for a 16-bit parameter, `plain` for others.
/// \throws c10::Error for a float16 parameter with a storage that is for bfloat16 only
inline optim::WeightStorage select_weight_storage(const at::Tensor& parameter,
                                                  optim::WeightStorage requested,
                                                  const OptimizerDescription& optimizer) {
  using optim::WeightStorage;
  const at::ScalarType dtype = parameter.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return WeightStorage::plain;
  const bool needs_bfloat16 =
      requested == WeightStorage::split_master || requested == WeightStorage::stochastic_rounding;
  TORCH_CHECK(
      dtype == at::kBFloat16 || !needs_bfloat16, optimizer, ": WeightStorage::",
      requested == WeightStorage::stochastic_rounding ? "stochastic_rounding" : "split_master",
      " supports bfloat16 parameters only, not ", optimizer.describe_param(parameter),
      "; use WeightStorage::fp32_master for a float16 model");
  if (requested == WeightStorage::plain) {
    warn_rounded_weights(parameter, optimizer,
                         "WeightStorage::fp32_master, or stochastic_rounding for bfloat16");
  }
  return requested;
}

inline at::ScalarType moment_dtype(const at::Tensor& parameter, optim::WeightStorage storage) {
  const bool has_float32_moments =
      storage == optim::WeightStorage::fp32_master || storage == optim::WeightStorage::split_master;
  return has_float32_moments ? accum_dtype(parameter) : parameter.scalar_type();
}

/// \throws c10::Error if a defined state tensor has another shape than its parameter
inline void check_state_shape(const at::Tensor& state, const char* what,
                              const at::Tensor& parameter, const OptimizerDescription& optimizer) {
  TORCH_CHECK(!state.defined() || state.sizes() == parameter.sizes(), optimizer, ": the state of ",
              optimizer.describe_param(parameter), " has ", what, " of the shape ", state.sizes(),
              "; it is another model's, or older than a resize of the parameter: load this model's "
              "archive, or reset the state with "
              "optimizer.state().erase(parameter.unsafeGetTensorImpl())");
}

/// Returns whether kernels can update a state tensor of the parameter in place.
inline bool has_param_layout(const at::Tensor& parameter, const at::Tensor& state,
                             at::ScalarType dtype) {
  return state.defined() && state.scalar_type() == dtype && state.device() == parameter.device() &&
         is_resolved(state) && same_strides(parameter, state);
}

/// Returns a state tensor with `dtype` and the parameter's device and strides; a copy, if it has
/// others.
/// \throws c10::Error if a copy would be captured: each replay would restore the original
inline at::Tensor match_param_layout(const at::Tensor& parameter, const at::Tensor& state,
                                     at::ScalarType dtype, const char* what) {
  if (has_param_layout(parameter, state, dtype)) return state;
  check_not_capturing(parameter.device(), what);
  return with_strides_of(parameter, state.detach().to(parameter.device(), dtype));
}

/// Creates the master if there is none, moves it to the parameter's device and strides, and copies
/// an exposed master that the caller has written to the parameter.
inline void prepare_master(const at::Tensor& parameter, MasterState& master_state) {
  const at::Tensor before = master_state.master;
  if (!before.defined()) {
    check_not_capturing(parameter.device(), "a float32 master");
    master_state.master = parameter.detach().to(at::kFloat);
  } else if (master_state.exposed_version && *master_state.exposed_version != before._version()) {
    parameter.detach().copy_(before);
    clear_autocast_cache();
    master_state.exposed_version = before._version();
  }
  master_state.master =
      match_param_layout(parameter, master_state.master, at::kFloat, "a float32 master");
  if (!master_state.master.is_same(before)) master_state.exposed_version.reset();
}

/// Copies the parameter to the master, in place, at elements where the parameter is not the rounded
/// master, because the parameter was modified outside the optimizer. mezzo's kernels do the same.
inline void update_master_from_param(const at::Tensor& parameter, MasterState& master_state) {
  const at::Tensor value = parameter.detach();
  const at::Tensor rounded = master_state.master.to(value.scalar_type());
  const at::Tensor is_rounded = rounded.view(at::kShort).eq(value.view(at::kShort));
  master_state.master.copy_(at::where(is_rounded, master_state.master, value.to(at::kFloat)));
  if (master_state.exposed_version) master_state.exposed_version = master_state.master._version();
}

/// Creates the low bits: from a loaded master, otherwise zeros. Existing low bits stay even if the
/// parameter was modified since, which changes it by less than its last bit.
inline void prepare_low_bits(const at::Tensor& parameter, MasterState& master_state) {
  if (master_state.master.defined()) {
    check_not_capturing(parameter.device(), "the low bits of weights");
    const at::Tensor master = master_state.master.to(parameter.device(), at::kFloat);
    const at::Tensor is_current = is_rounded_from(master, parameter);
    const at::Tensor high_bits = parameter.detach().view(at::kShort);
    high_bits.copy_(at::where(is_current, get_high_bits(master), high_bits));  // ties may differ
    clear_autocast_cache();
    master_state.low_bits = get_low_bits(master).masked_fill(is_current.logical_not(), 0);
    master_state.master = at::Tensor();
  } else if (!master_state.low_bits.defined() ||
             master_state.low_bits.sizes() != parameter.sizes()) {
    check_not_capturing(parameter.device(), "the low bits of weights");
    master_state.low_bits =
        at::zeros_like(parameter, parameter.options().dtype(at::kShort).requires_grad(false),
                       at::MemoryFormat::Preserve);
  }
  master_state.low_bits =
      match_param_layout(parameter, master_state.low_bits, at::kShort, "the low bits of weights");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
