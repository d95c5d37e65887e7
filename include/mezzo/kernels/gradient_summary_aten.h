#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

// The same questions asked of ATen's kernels, on devices for which mezzo has none of its own (CUDA
// without the target mezzo::cuda).
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The norms of the gradients, one element each, in `dtype`. ATen's fast route wants one dtype.
inline at::Tensor foreach_norms(std::vector<at::Tensor> gradients, double order,
                                at::ScalarType dtype) {
  std::vector<at::Tensor> norms;
  while (!gradients.empty()) {
    const at::ScalarType first = gradients.front().scalar_type();
    const auto rest = std::stable_partition(
        gradients.begin(), gradients.end(),
        [&](const at::Tensor& gradient) { return gradient.scalar_type() == first; });
    const at::TensorList same(gradients.data(), static_cast<std::size_t>(rest - gradients.begin()));
    for (at::Tensor& norm : at::_foreach_norm(same, order, dtype)) norms.push_back(std::move(norm));
    gradients.erase(gradients.begin(), rest);
  }
  return at::stack(norms);
}

struct AtenSummary {
  at::Tensor found_inf;
  at::Tensor sum_of_squares;
  at::Tensor max_abs;
};

/// Two reads: the norm says how large the gradients are together, and only the largest of them says
/// exactly whether a product overflows.
inline AtenSummary summarize_with_aten(std::vector<at::Tensor> gradients,
                                       const at::Tensor& inv_scale) {
  const at::ScalarType wide = inv_scale.is_mps() ? at::kFloat : at::kDouble;
  const auto options = inv_scale.options();
  std::erase_if(gradients, [](const at::Tensor& gradient) { return gradient.numel() == 0; });
  if (gradients.empty()) {
    return {at::zeros({}, options.dtype(at::kFloat)), at::zeros({}, options.dtype(wide)),
            at::zeros({}, options.dtype(wide))};
  }
  const auto doubles = std::stable_partition(
      gradients.begin(), gradients.end(),
      [](const at::Tensor& gradient) { return gradient.scalar_type() != at::kDouble; });
  const std::vector<at::Tensor> of_float(gradients.begin(), doubles);
  const std::vector<at::Tensor> of_double(doubles, gradients.end());
  const at::Tensor factor = inv_scale.reshape({});
  std::vector<at::Tensor> products;  // of the largest magnitudes, each in what it is computed in
  const double infinity = std::numeric_limits<double>::infinity();
  if (!of_float.empty()) {
    products.push_back(foreach_norms(of_float, infinity, at::kFloat).mul(factor).to(wide));
  }
  if (!of_double.empty()) {
    products.push_back(foreach_norms(of_double, infinity, at::kDouble).mul(factor.to(wide)));
  }
  const at::Tensor largest = at::cat(products);
  const at::Tensor norms = foreach_norms(gradients, 2.0, wide).mul(factor.to(wide));
  const at::Tensor found_inf = at::isfinite(largest).all().logical_not();
  const at::Tensor max_abs = largest.abs().max();
  return {found_inf.to(at::kFloat), at::where(found_inf, max_abs, norms.square().sum()), max_abs};
}

struct AtenCounts {
  at::Tensor zeros;
  at::Tensor underflows;
  at::Tensor scaled_underflows;
  at::Tensor first_bad;
};

/// Several kernels a tensor: a diagnosis, not a step's work.
inline AtenCounts count_with_aten(const std::vector<at::Tensor>& gradients,
                                  const at::Tensor& inv_scale, double underflow) {
  const auto count = inv_scale.options().dtype(at::kLong);
  AtenCounts counts{at::zeros({}, count), at::zeros({}, count), at::zeros({}, count),
                    at::full({2}, -1, count)};
  const at::Tensor factor = inv_scale.reshape({});
  for (std::size_t i = gradients.size(); i-- > 0;) {  // backwards: the first bad one stays
    if (gradients[i].numel() == 0) continue;
    // In the order of memory, whatever the strides.
    const at::Tensor stored = gradients[i].as_strided({gradients[i].numel()}, {1});
    const bool is_double = stored.scalar_type() == at::kDouble;
    const at::Tensor value = is_double ? stored : stored.to(at::kFloat);
    const at::Tensor product = value.mul(is_double ? factor.to(at::kDouble) : factor);
    const at::Tensor is_not_zero = value.ne(0);
    counts.zeros.add_(is_not_zero.logical_not().sum());
    counts.underflows.add_(product.abs().le(underflow).logical_and(is_not_zero).sum());
    counts.scaled_underflows.add_(value.abs().le(underflow).logical_and(is_not_zero).sum());
    const at::Tensor is_bad = at::isfinite(product).logical_not();
    const at::Tensor found = at::stack({at::full({}, static_cast<int64_t>(i), count),
                                        is_bad.to(at::kByte).argmax().to(at::kLong)});
    counts.first_bad = at::where(is_bad.any(), found, counts.first_bad);
  }
  return counts;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
