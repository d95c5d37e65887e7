/// \file
/// Muon: orthogonalized momentum for the matrices of hidden layers, of ATen ops.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/serializable_options.h>
#include <mezzo/optim/detail/torch_optimizer_base.h>

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Options of Python's torch.optim.Muon, with its names and defaults.
struct MuonOptions : public detail::SerializableOptions<MuonOptions> {
  /// The names of the options in archives.
  static constexpr std::array kKeys{"lr",       "weight_decay",    "momentum",
                                    "nesterov", "ns_coefficients", "eps",
                                    "ns_steps", "adjust_lr_fn"};
  /// The type of `ns_coefficients`.
  using ns_coefficients_t = std::tuple<double, double, double>;
  /// Sets `lr`.
  MuonOptions(double lr = 1e-3) : lr_(lr) {}

  /// Learning rate, before `adjust_lr_fn` adjusts it to the shape of each matrix; at least 0.
  TORCH_ARG(double, lr);
  /// Decoupled weight decay.
  TORCH_ARG(double, weight_decay) = 0.1;
  /// Coefficient of the running mean of gradients; at least 0.
  TORCH_ARG(double, momentum) = 0.95;
  /// Enables Nesterov momentum.
  TORCH_ARG(bool, nesterov) = true;
  /// Coefficients a, b and c of a Newton-Schulz iteration, a X + (b X X' + c (X X')^2) X.
  TORCH_ARG(ns_coefficients_t, ns_coefficients) = std::make_tuple(3.4445, -4.7750, 2.0315);
  /// Lower bound of the norm by which a matrix is divided.
  TORCH_ARG(double, eps) = 1e-7;
  /// Number of Newton-Schulz iterations; less than 100.
  TORCH_ARG(int64_t, ns_steps) = 5;
  /// "original": the lr of an A x B matrix is lr * sqrt(max(1, A / B)).
  /// "match_rms_adamw": it is 0.2 * lr * sqrt(max(A, B)), so that AdamW's lr and weight_decay
  /// apply.
  TORCH_ARG(std::string, adjust_lr_fn) = "original";

 public:
  /// Returns std::tie of the options.
  static auto values(auto& self) {
    return std::tie(self.lr_, self.weight_decay_, self.momentum_, self.nesterov_,
                    self.ns_coefficients_, self.eps_, self.ns_steps_, self.adjust_lr_fn_);
  }
};

/// Per-parameter state of Muon: `momentum_buffer`, the running mean of gradients.
using MuonParamState = torch::optim::SGDParamState;

/// Muon (Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024) as Python's
/// torch.optim.Muon. Updates a matrix along its momentum, orthogonalized by a few Newton-Schulz
/// iterations in bfloat16. Supports 2D parameters only: pass biases, norms, embeddings and the last
/// layer to an AdamW.
///
/// \code
///   std::vector<torch::Tensor> matrices, others;
///   for (auto& p : model->layers->parameters()) (p.dim() == 2 ? matrices : others).push_back(p);
///   mezzo::optim::Muon muon(matrices, mezzo::optim::MuonOptions(2e-2));
///   mezzo::optim::AdamW adamw(others, 3e-4);
///   scaler.scale(loss).backward();
///   scaler.step(muon);
///   scaler.step(adamw);
///   scaler.update();
/// \endcode
///
/// A `torch::optim::Optimizer` of ATen ops, for any device. As with torch's optimizers a GradScaler
/// synchronizes once with a GPU; the step itself does not. Wrap it in a MasterWeights for float32
/// masters of 16-bit parameters. libtorch has no Muon: archives are mezzo's. Without `nesterov`,
/// Python's (2.11) divides the momentum of a bfloat16 gradient by its norm at each step; this one
/// does not.
class Muon : public detail::TorchOptimizerBase<Muon, MuonOptions, MuonParamState> {
 public:
  /// Constructs from param groups or parameters, and MuonOptions, which have defaults.
  /// \throws c10::Error for options out of range, a parameter that is not 2D or is complex, or if
  ///   there is no parameter, a parameter appears twice, or two share memory
  using TorchOptimizerBase::TorchOptimizerBase;

 private:
  friend TorchOptimizerBase;
  static constexpr const char* kName = "Muon";
  static constexpr const char* kOptionsName = "mezzo::optim::MuonOptions";
  static void check_options(const MuonOptions& options) {
    detail::check_hyperparams(kName, {{"lr", options.lr()},
                                      {"weight_decay", options.weight_decay()},
                                      {"momentum", options.momentum()},
                                      {"eps", options.eps()}});
    TORCH_CHECK(
        options.ns_steps() >= 0 && options.ns_steps() < 100, "Muon: ns_steps is ",
        options.ns_steps(),
        ". Number of steps must be less than 100 for computational efficiency; pass 0 to 99, "
        "such as 5");
    TORCH_CHECK(options.adjust_lr_fn() == "original" || options.adjust_lr_fn() == "match_rms_adamw",
                "Muon: Adjust learning rate function ", options.adjust_lr_fn(),
                " is not supported; pass \"original\" or \"match_rms_adamw\"");
  }
  static void check_parameter(const at::Tensor& parameter,
                              const detail::OptimizerDescription& description) {
    TORCH_CHECK(parameter.dim() == 2,
                "Muon only supports 2D parameters whereas we found a parameter with size: ",
                parameter.sizes(), ", ", description.describe_param(parameter),
                "; pass it to an AdamW");
    TORCH_CHECK(!parameter.is_complex(), "Muon does not support complex parameters, and ",
                description.describe_param(parameter), " is one; pass it to another optimizer");
  }
  inline void update();
};

/// Returns `update` in bfloat16 with singular values of about 1.
inline at::Tensor zeropower_via_newton_schulz(const at::Tensor& update,
                                              const MuonOptions& options) {
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

inline void Muon::update() {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  for (const auto& group : param_groups_) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      at::Tensor& buffer = get_or_create_state(parameter).momentum_buffer();
      if (!buffer.defined()) buffer = at::zeros_like(gradient);
      buffer = buffer.to(gradient.scalar_type());  // a loaded buffer may have another dtype
      buffer.lerp_(gradient, 1 - options.momentum());
      const at::Tensor direction =
          options.nesterov() ? gradient.lerp(buffer, options.momentum()) : buffer;
      const auto rows = static_cast<double>(parameter.size(0));
      const auto columns = static_cast<double>(parameter.size(1));
      const double ratio = options.adjust_lr_fn() == "original"
                               ? std::sqrt(std::max(1.0, rows / columns))
                               : 0.2 * std::sqrt(std::max(rows, columns));
      at::Tensor weight = parameter;
      // As in Python: mul_(Scalar) would round the factor to the weight's dtype first.
      weight.mul_(at::native::wrapped_scalar_tensor(1 - options.lr() * options.weight_decay()));
      weight.add_(zeropower_via_newton_schulz(direction, options), -(options.lr() * ratio));
    }
  }
}

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
