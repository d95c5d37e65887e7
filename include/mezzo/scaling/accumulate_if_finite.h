/// \file
/// Gradient accumulation that drops micro-batches whose gradients are inf or NaN.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/optimizer.h>
#include <mezzo/scaling/detail/set_aside.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Runs `backward` for one micro-batch of several and adds its gradients to those accumulated in
/// `.grad`. If one of its gradients is inf or NaN, the micro-batch is dropped and what was
/// accumulated stays; if all micro-batches of a step are bad, the gradients of the last one stay,
/// and the step's own check finds them. Gradients of zero count as accumulated, so begin with
/// `zero_grad()`, which leaves none. docs/optimizers.md has the loop.
///
/// A sum that overflows, as one of half gradients can, stays inf for the step's check. Call it from
/// one thread, with the same parameters, for all micro-batches of a step. Waits for a GPU. Costs
/// one read of the new gradients, and memory for the accumulated. If ranks reduce gradients, call
/// it for the micro-batches before the last, under `no_sync()`, and call `backward()` of the last
/// one as usual.
///
/// \param parameters  every parameter that `backward` may reach
/// \param backward  computes the loss of the micro-batch and runs its backward pass
/// \return whether the micro-batch was dropped
/// \throws whatever `backward` throws, and c10::Error for an undefined parameter, or a gradient that
///   cannot be added. Gradients are then what they were before the call.
bool accumulate_if_finite(const std::vector<at::Tensor>& parameters,
                          const std::function<void()>& backward);

namespace detail {

/// Returns whether any gradient is inf or NaN. Waits for each device once.
/// \param gradients  dense or sparse, on any devices; undefined ones are left out
inline bool any_bad(const std::vector<at::Tensor>& gradients) {
  StepPlan plan{.is_checked = true};
  for (const at::Tensor& one : gradients) {
    if (!one.defined()) continue;
    plan.rows.push_back({{}, &one, one.is_sparse() ? one.coalesce()._values() : one});
  }
  group_by_device(plan);
  return read_gradients(plan, at::ones({})).found_inf.item<float>() != 0.0F;
}

/// The first parameters of calls in this thread after which the gradients of a bad micro-batch lie
/// in `.grad`. A reference keeps its address from any other tensor.
inline auto& holders_of_bad_gradients() {
  using Holder = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  static thread_local std::vector<Holder> holders;
  return holders;
}

/// Returns whether `first` is one of them, and forgets it.
inline bool held_bad_gradients(const at::Tensor& first) {
  bool held = false;
  std::erase_if(holders_of_bad_gradients(), [&](const auto& one) {
    const bool is_first = one._unsafe_get_target() == first.unsafeGetTensorImpl();
    held = held || is_first;
    return is_first || one.expired();
  });
  return held;
}

}  // namespace detail

inline bool accumulate_if_finite(const std::vector<at::Tensor>& parameters,
                                 const std::function<void()>& backward) {
  TORCH_CHECK(
      backward != nullptr,
      "accumulate_if_finite: backward is an empty function; pass one that calls backward()");
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(parameters[i].defined(), "accumulate_if_finite: parameter ", i,
                " is undefined; leave it out");
  }
  detail::SetAside before(parameters);
  backward();
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  const bool is_bad = detail::any_bad(gradients);
  const auto& aside = before.aside();
  const bool has_accumulated =
      std::any_of(aside.begin(), aside.end(), [](const at::Tensor& one) { return one.defined(); });
  const bool held_bad = !parameters.empty() && detail::held_bad_gradients(parameters.front());
  if (!has_accumulated || (held_bad && detail::any_bad(aside))) {
    before.drop();
    if (is_bad) {
      detail::holders_of_bad_gradients().emplace_back(parameters.front().getIntrusivePtr());
    }
  } else if (!is_bad) {
    before.add_back();
  }
  return is_bad;  // where the micro-batch is dropped, `before` puts back what was there
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
