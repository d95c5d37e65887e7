#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/detail/param_state.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

// What the state keeps of a parameter's value, brought in line with the parameter before a step:
// the parameter may have been written by others meanwhile (a model was loaded, averaged weights
// were swapped in), and what they wrote counts. These are rare, so ATen's ops will do.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Bits of a float as (bfloat16, rest), in the terms of weight_formats.h.
inline at::Tensor upper_half_of(const at::Tensor& floats) {
  return floats.view(at::kInt).add(0x8000).bitwise_right_shift(16).to(at::kShort);
}
inline at::Tensor lower_half_of(const at::Tensor& floats) {
  return floats.view(at::kInt).to(at::kShort);
}
inline at::Tensor joined(const at::Tensor& parameter, const at::Tensor& lower_half) {
  const at::Tensor upper = parameter.detach().view(at::kShort).to(at::kInt);
  return upper.bitwise_left_shift(16).add(lower_half.to(at::kInt)).view(at::kFloat);
}

/// Where `parameter` is what a step would have made of `master`, by either way of breaking ties.
inline at::Tensor is_rounded_from(const at::Tensor& master, const at::Tensor& parameter) {
  const at::Tensor own = parameter.detach();
  at::Tensor is_nearest = master.to(own.scalar_type()).eq(own);
  if (own.scalar_type() != at::kBFloat16) return is_nearest;
  return is_nearest.logical_or(upper_half_of(master).eq(own.view(at::kShort)));
}

/// How `parameter` is kept: as the group's options say, if it has 16 bits.
inline optim::WeightStorage storage_of(const at::Tensor& parameter, optim::WeightStorage wanted,
                                       const OptimizerWords& optimizer) {
  using optim::WeightStorage;
  const at::ScalarType dtype = parameter.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return WeightStorage::plain;
  const bool is_for_bfloat16 =
      wanted == WeightStorage::split_master || wanted == WeightStorage::stochastic;
  TORCH_CHECK(dtype == at::kBFloat16 || !is_for_bfloat16, optimizer, ": WeightStorage::",
              wanted == WeightStorage::stochastic ? "stochastic" : "split_master",
              " takes parameters of bfloat16, not ", optimizer.parameter(parameter),
              "; use WeightStorage::master for a float16 model");
  return wanted;
}

inline at::ScalarType moment_dtype(const at::Tensor& parameter, optim::WeightStorage storage) {
  const bool is_float =
      storage == optim::WeightStorage::master || storage == optim::WeightStorage::split_master;
  return is_float ? at::kFloat : parameter.scalar_type();
}

/// What a state has from a file may be another model's.
inline void check_shape_of(const at::Tensor& kept, const char* what, const at::Tensor& parameter,
                           const OptimizerWords& optimizer) {
  TORCH_CHECK(!kept.defined() || kept.sizes() == parameter.sizes(), optimizer, ": the state of ",
              optimizer.parameter(parameter), " has ", what, " of the shape ", kept.sizes(),
              "; it is another model's, or older than a resize of the parameter: load the model's "
              "own file, or begin anew with "
              "optimizer.state().erase(parameter.unsafeGetTensorImpl())");
}

/// Whether the lower half completes the parameter as it is now. Where the parameter was written it
/// does not, and cannot tell where that was: all of it is given up then.
template <class State>
bool completes(const at::Tensor& parameter, State& state) {
  return state.lower_half().defined() && parameter.scalar_type() == at::kBFloat16 &&
         state.lower_half().sizes() == parameter.sizes() && state.stamp().is_current(parameter);
}

/// The value that is trained, in float (double for double), as a tensor of its own.
template <class State>
at::Tensor trained_value(const at::Tensor& parameter, State& state) {
  if (state.master().defined()) return state.master().clone();
  if (completes(parameter, state)) return joined(parameter, state.lower_half());
  return parameter.detach().to(wide_dtype(parameter), /*non_blocking=*/false, /*copy=*/true);
}

/// Where the parameter is no longer what the master was rounded to, it is right and the master not.
/// Written in place: others may hold the master, to clip its gradient.
inline void follow_writes(const at::Tensor& parameter, at::Tensor& master) {
  master = master.to(parameter.device(), at::kFloat);
  master.copy_(
      at::where(is_rounded_from(master, parameter), master, parameter.detach().to(at::kFloat)));
}

template <class State>
void settle_master(const at::Tensor& parameter, State& state) {
  at::Tensor& master = state.master();
  if (!master.defined()) {
    check_is_warm(parameter.device(), "a float master");
    master = trained_value(parameter, state);
    state.lower_half() = at::Tensor();
    return;
  }
  master = master.to(parameter.device(), at::kFloat);
  if (!state.stamp().is_current(parameter)) follow_writes(parameter, master);
}

/// The same for the lower half; there is a master beside it, or in its place, after loading a file.
template <class State>
void settle_lower_half(const at::Tensor& parameter, State& state) {
  at::Tensor& lower = state.lower_half();
  const bool is_kept = !state.master().defined() && completes(parameter, state);
  if (!is_kept) check_is_warm(parameter.device(), "the lower halves of weights");
  if (state.master().defined()) {
    const at::Tensor master = state.master().to(parameter.device(), at::kFloat);
    const at::Tensor is_current = is_rounded_from(master, parameter);
    const at::Tensor own = parameter.detach().view(at::kShort);
    own.copy_(at::where(is_current, upper_half_of(master), own));  // ties may differ
    const at::Tensor rest = lower_half_of(master);
    lower = at::where(is_current, rest, at::zeros_like(rest));
    state.master() = at::Tensor();
  } else if (!is_kept) {
    lower = at::zeros_like(parameter, parameter.options().dtype(at::kShort).requires_grad(false),
                           at::MemoryFormat::Preserve);
  }
}

/// Makes the state hold what `storage` needs, and nothing else, in agreement with the parameter as
/// it is now: no writing to that may come between this and the step.
template <class State>
void settle_weights(const at::Tensor& parameter, optim::WeightStorage storage, State& state) {
  switch (storage) {
    case optim::WeightStorage::master:
      settle_master(parameter, state);
      break;
    case optim::WeightStorage::split_master:
      settle_lower_half(parameter, state);
      break;
    case optim::WeightStorage::plain:
    case optim::WeightStorage::stochastic:
      state.master() = at::Tensor();
      state.lower_half() = at::Tensor();
  }
  state.stamp() = WriteStamp::of(parameter);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
