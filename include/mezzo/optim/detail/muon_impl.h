#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/muon.h>

#include <ATen/ScalarOps.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

MEZZO_INLINE void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(ns_coefficients_t, ns_coefficients);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, ns_steps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::string, adjust_lr_fn);
}
MEZZO_INLINE void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_coefficients);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_steps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(adjust_lr_fn);
}

MEZZO_INLINE void Muon::check_options(const MuonOptions& options) {
  detail::check_numbers(kName, {{"lr", options.lr()},
                                {"weight_decay", options.weight_decay()},
                                {"momentum", options.momentum()},
                                {"eps", options.eps()}});
  TORCH_CHECK(options.ns_steps() >= 0 && options.ns_steps() < 100, "Muon: ns_steps is ",
              options.ns_steps(),
              ". Number of steps must be less than 100 for computational efficiency; give 0 to 99, "
              "such as 5");
  TORCH_CHECK(options.adjust_lr_fn() == "original" || options.adjust_lr_fn() == "match_rms_adamw",
              "Muon: Adjust learning rate function ", options.adjust_lr_fn(),
              " is not supported; give \"original\" or \"match_rms_adamw\"");
}

MEZZO_INLINE void Muon::check_parameter(const at::Tensor& parameter,
                                        const detail::OptimizerWords& words) {
  TORCH_CHECK(parameter.dim() == 2,
              "Muon only supports 2D parameters whereas we found a parameter with size: ",
              parameter.sizes(), ", ", words.parameter(parameter),
              "; give it to an AdamW beside this Muon");
  TORCH_CHECK(!parameter.is_complex(), "Muon does not support complex parameters, and ",
              words.parameter(parameter), " is one; give it to another optimizer");
}

/// Returns the direction of a step along `update`, a matrix whose singular values are about 1, in
/// bfloat16.
MEZZO_INLINE at::Tensor orthogonalized(const at::Tensor& update, const MuonOptions& options) {
  const bool is_tall = update.size(0) > update.size(1);
  const auto [a, b, c] = options.ns_coefficients();
  at::Tensor x = update.to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/true);
  if (is_tall) x = x.t();
  x.div_(x.norm().clamp_min(options.eps()));
  for (int64_t i = 0; i < options.ns_steps(); ++i) {
    const at::Tensor gram = x.matmul(x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a);
  }
  return is_tall ? x.t() : x;
}

MEZZO_INLINE void Muon::update() {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  for (const auto& group : param_groups_) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      at::Tensor& mean = state_of(parameter).momentum_buffer();
      if (!mean.defined()) mean = at::zeros_like(gradient);
      mean = mean.to(gradient.scalar_type());  // where a file's gradients had another
      mean.lerp_(gradient, 1 - options.momentum());
      const at::Tensor along = options.nesterov() ? gradient.lerp(mean, options.momentum()) : mean;
      const auto rows = static_cast<double>(parameter.size(0));
      const auto columns = static_cast<double>(parameter.size(1));
      const double ratio = options.adjust_lr_fn() == "original"
                               ? std::sqrt(std::max(1.0, rows / columns))
                               : 0.2 * std::sqrt(std::max(rows, columns));
      at::Tensor weight = parameter;
      // As Python multiplies by a number: mul_(Scalar) rounds it to the weight's dtype first.
      weight.mul_(at::native::wrapped_scalar_tensor(1 - options.lr() * options.weight_decay()));
      weight.add_(orthogonalized(along, options), -(options.lr() * ratio));
    }
  }
}

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
