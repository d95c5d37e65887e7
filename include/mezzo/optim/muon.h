/// \file
/// Muon, for the matrices of hidden layers: momentum whose steps are made orthogonal. An ordinary
/// optimizer of ATen's ops.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/ordinary_optimizer.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <concepts>
#include <cstdint>
#include <string>
#include <tuple>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// The options of Python's torch.optim.Muon, with its names and defaults.
struct MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  /// The type of `ns_coefficients`.
  using ns_coefficients_t = std::tuple<double, double, double>;

  /// A template, so that a unit that only sees the class compiles no virtual functions.
  template <std::convertible_to<double> Lr = double>
  MuonOptions(Lr lr = 1e-3) : lr_(lr) {}

  /// The rate, before `adjust_lr_fn` fits it to the shape of each matrix; at least 0.
  TORCH_ARG(double, lr) = 1e-3;
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
  /// Reads the options of a file.
  MEZZO_INLINE void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes the options.
  MEZZO_INLINE void serialize(torch::serialize::OutputArchive& archive) const override;
  /// Returns the learning rate, as libtorch's schedulers read it.
  double get_lr() const override { return lr_; }
  /// Sets the learning rate, as libtorch's schedulers do.
  void set_lr(const double lr) override { lr_ = lr; }
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
class Muon : public detail::OrdinaryOptimizer<Muon, MuonOptions, MuonParamState> {
 public:
  /// Takes param groups or parameters, and MuonOptions, which have defaults.
  /// \throws c10::Error for a parameter that is no matrix or complex, options out of range, or if
  ///   there is no parameter, a parameter is given twice, or two share memory
  using OrdinaryOptimizer::OrdinaryOptimizer;

 private:
  friend OrdinaryOptimizer;
  static constexpr const char* kName = "Muon";
  static constexpr const char* kOptions = "mezzo::optim::MuonOptions";
  MEZZO_INLINE static void check_options(const MuonOptions& options);
  MEZZO_INLINE static void check_parameter(const at::Tensor& parameter,
                                           const detail::OptimizerWords& words);
  MEZZO_INLINE void update();
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/optim/detail/muon_impl.h>  // IWYU pragma: export
#endif
