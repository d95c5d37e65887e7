/// \file
/// Muon, for the matrices of hidden layers: momentum whose steps are made orthogonal. An ordinary
/// optimizer of ATen's ops.
#pragma once

#include <mezzo/base/version.h>
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

/// The options of Python's torch.optim.Muon, with its names and defaults.
struct MuonOptions : public detail::SerializableOptions<MuonOptions> {
  /// The names of the options in files.
  static constexpr std::array kKeys{"lr",       "weight_decay",    "momentum",
                                    "nesterov", "ns_coefficients", "eps",
                                    "ns_steps", "adjust_lr_fn"};
  /// The type of `ns_coefficients`.
  using ns_coefficients_t = std::tuple<double, double, double>;
  /// Sets `lr`; the other options have their defaults.
  MuonOptions(double lr = 1e-3) : lr_(lr) {}

  /// The rate, before `adjust_lr_fn` fits it to the shape of each matrix; at least 0.
  TORCH_ARG(double, lr);
  /// Each step shrinks parameters by lr * weight_decay, whatever the gradient.
  TORCH_ARG(double, weight_decay) = 0.1;
  /// The share of the running mean of gradients that a step keeps; at least 0.
  TORCH_ARG(double, momentum) = 0.95;
  /// Steps along the gradient mixed with its running mean, rather than along the mean.
  TORCH_ARG(bool, nesterov) = true;
  /// The coefficients a, b and c of each Newton-Schulz step, a X + (b X X' + c (X X')^2) X.
  TORCH_ARG(ns_coefficients_t, ns_coefficients) = std::make_tuple(3.4445, -4.7750, 2.0315);
  /// The least norm by which a matrix is divided.
  TORCH_ARG(double, eps) = 1e-7;
  /// How many Newton-Schulz steps are taken, less than 100.
  TORCH_ARG(int64_t, ns_steps) = 5;
  /// "original": the rate of a matrix of `A` rows and `B` columns is lr * sqrt(max(1, A / B)).
  /// "match_rms_adamw": it is 0.2 * lr * sqrt(max(A, B)), so that AdamW's lr and weight_decay fit.
  TORCH_ARG(std::string, adjust_lr_fn) = "original";

 public:
  /// Returns references to these options.
  static auto values(auto& self) {
    return std::tie(self.lr_, self.weight_decay_, self.momentum_, self.nesterov_,
                    self.ns_coefficients_, self.eps_, self.ns_steps_, self.adjust_lr_fn_);
  }
};

/// Muon's state of a parameter: `momentum_buffer`, the running mean of gradients.
using MuonParamState = torch::optim::SGDParamState;

/// Muon (Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024) as Python's
/// torch.optim.Muon has it. A matrix moves along its momentum, made nearly orthogonal by a few
/// Newton-Schulz steps, whose products are in bfloat16. It takes matrices only: give biases, norms,
/// embeddings and the last layer to an AdamW beside it.
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
/// An ordinary `torch::optim::Optimizer` of ATen's ops, on any device: a GradScaler waits once for
/// a GPU, as for torch's optimizers, and the step itself never does. Wrap it in a MasterWeights to
/// train weights of 16 bits as floats. libtorch has no Muon: files are mezzo's own. A gradient of
/// bfloat16 without `nesterov` leaves the running mean as it is; in Python's (2.11) such a step
/// divides it by its norm.
class Muon : public detail::TorchOptimizerBase<Muon, MuonOptions, MuonParamState> {
 public:
  /// Takes param groups or parameters, and MuonOptions, which have defaults.
  /// \throws c10::Error for a parameter that is no matrix or complex, options out of range, or if
  ///   there is no parameter, a parameter is given twice, or two share memory
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
        ". Number of steps must be less than 100 for computational efficiency; give 0 to 99, "
        "such as 5");
    TORCH_CHECK(options.adjust_lr_fn() == "original" || options.adjust_lr_fn() == "match_rms_adamw",
                "Muon: Adjust learning rate function ", options.adjust_lr_fn(),
                " is not supported; give \"original\" or \"match_rms_adamw\"");
  }
  static void check_parameter(const at::Tensor& parameter,
                              const detail::OptimizerDescription& description) {
    TORCH_CHECK(parameter.dim() == 2,
                "Muon only supports 2D parameters whereas we found a parameter with size: ",
                parameter.sizes(), ", ", description.describe(parameter),
                "; give it to an AdamW beside this Muon");
    TORCH_CHECK(!parameter.is_complex(), "Muon does not support complex parameters, and ",
                description.describe(parameter), " is one; give it to another optimizer");
  }
  inline void update();
};

/// Returns the direction of a step along `update`, a matrix whose singular values are about 1, in
/// bfloat16.
inline at::Tensor orthogonalized(const at::Tensor& update, const MuonOptions& options) {
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
      at::Tensor& mean = get_or_create_state(parameter).momentum_buffer();
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
