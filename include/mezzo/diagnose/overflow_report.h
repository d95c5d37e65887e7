/// \file
/// OverflowReport: why was that step skipped? Names the gradients that were inf or NaN.
#pragma once

#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/finding.h>
#include <mezzo/diagnose/names.h>
#include <mezzo/diagnose/summarize.h>
#include <mezzo/scaling/skipped_step.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// One parameter whose gradient is not finite.
struct OverflowedParameter {
  std::string name;                      ///< in the model
  std::int64_t elements = 0;             ///< of the gradient; of a sparse one those that it has
  std::int64_t infs = 0;                 ///< how many values are inf or -inf
  std::int64_t nans = 0;                 ///< how many values are NaN
  std::vector<std::int64_t> first = {};  ///< index of the first that is inf or NaN
  double value = 0;                      ///< which it is: inf, -inf or NaN
  /// Whether the gradient is finite, and inf after division by a loss scale below 1. False where
  /// `unscale_` has divided already.
  bool by_unscaling = false;
};

/// What the gradients of a skipped step look like.
struct Overflow {
  SkippedStep step = {};  ///< what the GradScaler told of the step
  /// The one that the model registers last comes first. A backward pass comes from there, so that
  /// it is most often where the inf or NaN was first.
  std::vector<OverflowedParameter> parameters = {};
  std::int64_t layers = 0;             ///< how many modules have gradients of their own
  std::int64_t overflowed_layers = 0;  ///< how many of them are those of `parameters`

  /// Returns one line without an end; also where there is nothing to be seen any more, and why.
  std::string cause() const {
    using std::to_string;
    if (parameters.empty()) {
      return "no gradient is inf or NaN now: they were set to zero with the step, or are a later "
             "step's, as on a device; call find_overflow after the step, before they are cleared";
    }
    const OverflowedParameter& first = parameters.front();
    const std::size_t others = parameters.size() - 1;
    return first.name + (others > 0 ? " and " + to_string(others) + " more" : "") + ", in " +
           to_string(overflowed_layers) + " of " + to_string(layers) + " layers: " + first.name +
           " has " + to_string(first.infs) + " inf and " + to_string(first.nans) + " NaN in " +
           to_string(first.elements) + " gradients, the first, " +
           detail::number_text(first.value) + ", at " + detail::sizes_text(first.first) + ", " +
           (first.by_unscaling ? "made by dividing by a loss scale below 1"
                               : "found after the backward pass");
  }
};

/// Reads the gradients that `parameters` have now. Writes nothing. Reads all once, and those that
/// are not finite again; waits for the device.
/// \param loss_scale  that the gradients carry, or carried
inline Overflow find_overflow(const NamedTensors& parameters, double loss_scale = 1) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto& [name, parameter] : parameters) {
    const at::Tensor gradient = parameter.grad();
    const bool is_sparse = gradient.defined() && gradient.is_sparse();
    gradients.push_back(is_sparse ? gradient.coalesce() : gradient);
  }
  const std::vector<TensorSummary> summaries = summarize(gradients);
  const bool is_finite = std::all_of(summaries.begin(), summaries.end(),
                                     [](const TensorSummary& one) { return one.is_finite(); });
  const double factor = is_finite && loss_scale < 1 ? 1 / loss_scale : 1;
  Overflow overflow;
  std::set<std::string> layers, overflowed;
  for (std::size_t i = parameters.size(); i-- > 0;) {
    const auto& [name, parameter] = parameters[i];
    const TensorSummary& summary = summaries[i];
    if (summary.count == 0) continue;
    layers.insert(detail::layer_name(name));
    const auto wide = summary.dtype == at::kDouble ? at::kDouble : at::kFloat;
    const bool by_unscaling =
        summary.is_finite() && detail::overflows(summary.largest * factor, wide);
    if (summary.is_finite() && !by_unscaling) continue;
    overflowed.insert(detail::layer_name(name));
    const at::Tensor& gradient = gradients[i];
    const at::Tensor values = detail::ordered_values(gradient).to(at::kDouble).mul(factor).to(wide);
    const at::Tensor is_bad = values.isfinite().logical_not();
    const at::Tensor first =
        is_bad.nonzero()[0].cpu().contiguous();  // of a sparse one the first is a row's
    std::vector<std::int64_t> index(first.const_data_ptr<int64_t>(),
                                    first.const_data_ptr<int64_t>() + first.numel());
    if (gradient.is_sparse()) {
      const at::Tensor row = gradient.indices().select(1, index.front()).cpu();
      index.erase(index.begin());
      index.insert(index.begin(), row.const_data_ptr<int64_t>(),
                   row.const_data_ptr<int64_t>() + row.numel());
    }
    overflow.parameters.push_back({.name = name,
                                   .elements = summary.count,
                                   .infs = values.isinf().sum().item<int64_t>(),
                                   .nans = summary.nans,
                                   .first = std::move(index),
                                   .value = values.masked_select(is_bad)[0].item<double>(),
                                   .by_unscaling = by_unscaling});
  }
  overflow.layers = static_cast<std::int64_t>(layers.size());
  overflow.overflowed_layers = static_cast<std::int64_t>(overflowed.size());
  return overflow;
}

/// Options of an OverflowReport: who is told.
struct OverflowReportOptions {
  std::ostream* stream = &std::cerr;  ///< gets two lines; null: none. Lives as long as the report
  std::function<void(const Overflow&)> callback = {};  ///< called with each skip that is told
};

/// For `GradScaler::on_skip`. One report takes all models that a scaler serves, and names their
/// parameters "generator.0.weight": two reports would write each skip twice.
///
///     scaler.on_skip(mezzo::OverflowReport(*model));
///     scaler.on_skip(mezzo::OverflowReport({{"generator", *g}, {"discriminator", *d}}));
///
/// Costs nothing until a step is skipped, and then a find_overflow. Of steps that are skipped at
/// the same scale again and again it tells the first three and then every 1000th.
///
/// A report sees what `.grad` holds when the scaler tells of the skip, at `update`: zero with
/// StepOptions::zero_grad, and a later step's on a device, where the scaler tells some steps late.
/// To know of the very step, ask before the gradients are cleared, which waits for the device:
///
///     if (!result.ran()) std::cerr << mezzo::find_overflow(names, result.scale()).cause();
///
/// Ranks that average their gradients all have the same ones: let one write, with
/// `{.stream = rank == 0 ? &std::cerr : nullptr}`. An AnomalyWatch on each rank tells
/// whose forward or backward pass an inf or NaN began in.
class OverflowReport {
 public:
  /// Keeps the parameters, not the model. Parameters that are registered later are not seen.
  explicit OverflowReport(const torch::nn::Module& model, OverflowReportOptions options = {})
      : parameters_(name_parameters(model)), options_(std::move(options)) {}
  /// Keeps the parameters of several models, under the models' names.
  explicit OverflowReport(const std::vector<NamedModel>& models, OverflowReportOptions options = {})
      : parameters_(name_parameters(models)), options_(std::move(options)) {}

  /// Reads the gradients of a skipped step; for GradScaler::on_skip.
  void operator()(const SkippedStep& step) {
    constexpr std::int64_t kAtFirst = 3, kRarely = 1000;
    skips_at_scale_ = step.scale == step.next_scale ? skips_at_scale_ + 1 : 0;
    if (skips_at_scale_ > kAtFirst && skips_at_scale_ % kRarely != 0) return;
    if (options_.stream == nullptr && !options_.callback) return;
    Overflow overflow = find_overflow(parameters_, step.scale);
    overflow.step = step;
    if (options_.stream != nullptr)
      *options_.stream << step.message() + "\n  " + overflow.cause() + "\n" << std::flush;
    if (options_.callback) options_.callback(overflow);
  }

 private:
  NamedTensors parameters_;
  OverflowReportOptions options_;
  std::int64_t skips_at_scale_ = 0;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
