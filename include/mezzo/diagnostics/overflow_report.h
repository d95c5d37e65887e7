/// \file
/// OverflowReport: which gradients caused a skipped step.
#pragma once

#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/detail/format.h>
#include <mezzo/diagnostics/named_parameters.h>
#include <mezzo/diagnostics/tensor_summary.h>
#include <mezzo/scaling/skipped_step.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iostream>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A parameter whose gradient contains inf or NaN, with the summary of the gradient.
struct OverflowedParameter : TensorSummary {
  std::vector<std::int64_t> first_index = {};  ///< of the first inf or NaN
  double first_value = 0;                      ///< inf, -inf or NaN
  /// Whether the gradient itself is finite and only dividing it by a loss scale below 1 gives inf.
  /// Always false after `unscale_`.
  bool from_unscaling = false;
};

namespace detail {

inline std::string describe_nonfinite_buffer(const std::string& name) {
  return "buffer " + name +
         " contains inf or NaN. A forward pass wrote it, and skipping the step does not restore "
         "it: load it from a checkpoint or reset it";
}

}  // namespace detail

/// The gradients of a skipped step.
struct Overflow {
  SkippedStep step = {};  ///< as passed to GradScaler::on_skip
  /// In reverse order of registration: the backward pass most often reaches the last registered
  /// parameters first.
  std::vector<OverflowedParameter> parameters = {};
  std::int64_t num_layers = 0;             ///< modules whose own parameters have gradients
  std::int64_t num_overflowed_layers = 0;  ///< modules that own `parameters`
  std::string nonfinite_buffer = {};       ///< first buffer with inf or NaN; empty if there is none

  /// Returns one line without a line break.
  std::string message() const {
    using std::to_string;
    if (!nonfinite_buffer.empty()) return detail::describe_nonfinite_buffer(nonfinite_buffer);
    if (parameters.empty()) {
      return "no gradient contains inf or NaN any more: zero_grad() cleared them, or on a GPU they "
             "belong to a later step; call find_overflow() after step() and before zero_grad()";
    }
    const OverflowedParameter& first = parameters.front();
    const std::size_t others = parameters.size() - 1;
    std::string counts = first.infs > 0 ? to_string(first.infs) + " inf" : "";
    if (first.nans > 0) counts += (counts.empty() ? "" : " and ") + to_string(first.nans) + " NaN";
    return first.name + (others > 0 ? " and " + to_string(others) + " more" : "") + ", in " +
           to_string(num_overflowed_layers) + " of " + to_string(num_layers) +
           " layers: the gradient of " + first.name + " has " + counts + " in " +
           to_string(first.numel) + " elements, the first (" +
           detail::format_number(first.first_value) + ") at index " +
           detail::format_sizes(first.first_index) +
           (first.from_unscaling ? ", from dividing by a loss scale below 1"
                                 : ", from the backward pass");
  }
};

/// Finds inf and NaN in the current gradients of `parameters`. Does not modify them. Synchronizes
/// with the device.
/// \param loss_scale  loss scale of the gradients, also after `unscale_`
inline Overflow find_overflow(const TensorsByName& parameters, double loss_scale = 1) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;  // the stored rows of sparse ones
  for (const auto& [name, parameter] : parameters) {
    at::Tensor gradient = parameter.grad();
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient.coalesce();
    gradients.push_back(detail::is_readable(gradient) ? detail::comparable_values(gradient)
                                                      : at::Tensor());
  }
  std::vector<TensorSummary> summaries = summarize(gradients);
  const bool from_unscaling = loss_scale < 1 && detail::all_finite(summaries);
  if (from_unscaling) {
    for (at::Tensor& values : gradients) {
      if (!values.defined()) continue;
      const auto dtype = c10::promoteTypes(values.scalar_type(), at::kFloat);
      values = values.to(at::kDouble).div(loss_scale).to(dtype);
    }
    summaries = summarize(gradients);
  }
  Overflow overflow;
  std::set<std::string> layers, overflowed_layers;
  for (std::size_t i = parameters.size(); i-- > 0;) {
    const auto& [name, parameter] = parameters[i];
    TensorSummary& summary = summaries[i];
    if (summary.numel == 0) continue;
    layers.insert(detail::layer_name(name));
    if (summary.is_finite()) continue;
    overflowed_layers.insert(detail::layer_name(name));
    summary.name = name;
    summary.sizes = parameter.grad().sizes().vec();
    const at::Tensor is_nonfinite = gradients[i].isfinite().logical_not();
    at::Tensor first = is_nonfinite.nonzero()[0].cpu().contiguous();
    if (parameter.grad().is_sparse()) {  // maps the stored row to the row of the dense gradient
      const at::Tensor rows = parameter.grad().coalesce().indices().cpu();
      first = at::cat({rows.select(1, first[0].item<int64_t>()), first.slice(0, 1)});
    }
    const auto* const index = first.const_data_ptr<int64_t>();
    overflow.parameters.push_back({summary,
                                   {index, index + first.numel()},
                                   gradients[i].masked_select(is_nonfinite)[0].item<double>(),
                                   from_unscaling});
  }
  overflow.num_layers = static_cast<std::int64_t>(layers.size());
  overflow.num_overflowed_layers = static_cast<std::int64_t>(overflowed_layers.size());
  return overflow;
}

/// Options of an OverflowReport.
struct OverflowReportOptions {
  std::ostream* stream = &std::cerr;  ///< two lines per skip; null: none; must outlive the report
  std::function<void(const Overflow&)> callback = {};  ///< called for each reported skip
};

/// A callback for GradScaler::on_skip that prints which gradients contain inf or NaN:
///
///     scaler.on_skip(mezzo::OverflowReport(*model));
///     scaler.on_skip(mezzo::OverflowReport({{"generator", *g}, {"discriminator", *d}}));
///
/// Use one report for all models of a scaler, since each report prints each skip. Prints as often
/// as GradScaler itself: the first ten consecutive skips, the eleventh with advice, then every
/// 1000th; at min_scale the first and every 1000th. If a buffer contains inf or NaN, such as the
/// running mean of a batch norm, reports that buffer instead.
///
/// Reads `.grad` when the scaler calls it, in `update()`: after StepOptions::zero_grad the
/// gradients are zero, and on a GPU they may be a later step's. docs/debugging.md ("Why was that
/// step skipped?") has a loop that reads them in time. Ranks with averaged gradients report the
/// same: use `{.stream = rank == 0 ? &std::cerr : nullptr}`.
class OverflowReport {
 public:
  /// Keeps references to the parameters and buffers registered now, not to `model`.
  explicit OverflowReport(const torch::nn::Module& model, OverflowReportOptions options = {})
      : parameters_(named_float_parameters(model)),
        buffers_(named_float_buffers(model)),
        options_(std::move(options)) {}
  /// Covers several models; parameter names are prefixed with the model's name.
  explicit OverflowReport(const std::vector<NamedModel>& models, OverflowReportOptions options = {})
      : parameters_(named_float_parameters(models)),
        buffers_(named_float_buffers(models)),
        options_(std::move(options)) {}

  /// Reports a skipped step; called by GradScaler.
  void operator()(const SkippedStep& step) {
    const std::string message = detail::limited_skip_message(step);
    if (message.empty() || (options_.stream == nullptr && !options_.callback)) return;
    Overflow overflow = find_overflow(parameters_, step.scale);
    overflow.step = step;
    overflow.nonfinite_buffer = detail::find_nonfinite(buffers_);
    if (options_.stream != nullptr) {
      *options_.stream << message + "\n  " + overflow.message() + "\n" << std::flush;
    }
    if (options_.callback) options_.callback(overflow);
  }

 private:
  TensorsByName parameters_;
  TensorsByName buffers_;
  OverflowReportOptions options_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
