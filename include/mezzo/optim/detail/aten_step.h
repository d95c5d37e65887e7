#pragma once

#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/fused_optimizer.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <limits>
#include <optional>
#include <vector>

// The step on devices that mezzo has no kernel for, CUDA without mezzo::cuda among them, through
// ATen's fused optimizers: still without a wait, and in one pass of theirs, beside a copy of the
// gradients, since ATen's kernels write them.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Parameters of one group, device and dtype, as ATen's kernels take them; entry i of each list
/// belongs to parameter i.
struct AtenLists {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;  ///< of the parameters' dtype
  std::array<std::vector<at::Tensor>, 3> moments;
  std::vector<at::Tensor> counts;  ///< floats, of this step already
};

/// ATen's fused optimizers write without bumping: autograd would not notice, nor a WeightCache.
inline void bump_versions(const AtenLists& lists) {
  const auto bump = [](const std::vector<at::Tensor>& written) {
    for (const at::Tensor& tensor : written) bump_version(*tensor.unsafeGetTensorImpl());
  };
  bump(lists.parameters);
  bump(lists.gradients);
  for (const std::vector<at::Tensor>& moments : lists.moments) bump(moments);
}

/// What ATen's kernels divide gradients by, and whether they are to do nothing; and what multiplies
/// the lr, if there is a schedule: a float there, the only dtype in which CUDA's kernels take it.
struct AtenVerdict {
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
  std::optional<at::Tensor> lr_factor;
};

inline AtenVerdict aten_verdict(const DeviceGradientReport* report, double max_norm) {
  if (report == nullptr) return {};
  at::Tensor factor = report->inv_scale;
  const bool clips = max_norm != std::numeric_limits<double>::infinity();
  if (clips && report->sum_of_squares.defined()) {
    const at::Tensor norm = report->sum_of_squares.sqrt();
    factor = norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0).mul(factor);
  }
  return {factor.reciprocal().to(at::kFloat), report->found_inf, std::nullopt};
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
