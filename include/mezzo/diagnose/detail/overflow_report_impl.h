/// \file
/// Finds what is not finite in gradients, and the words for it.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/host_numbers.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/overflow_report.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The gradient of one parameter, and what is known of it.
struct SeenGradient {
  const std::string* name;
  at::Tensor gradient;  // as the parameter has it
  at::Tensor values;    // of a sparse one the rows that it has
  double norm = 0;
};

inline std::vector<SeenGradient> seen_gradients(const NamedTensors& parameters) {
  std::vector<SeenGradient> seen;
  std::vector<at::Tensor> norms;
  for (const auto& [name, parameter] : parameters) {
    at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) gradient = gradient.coalesce();
    const at::Tensor values = gradient.is_sparse() ? gradient.values() : gradient;
    if (values.numel() == 0) continue;
    norms.push_back(norm_of(values));
    seen.push_back({.name = &name, .gradient = gradient, .values = values});
  }
  if (seen.empty()) return seen;
  const at::Tensor known = stacked_on_host(std::move(norms));
  for (std::size_t i = 0; i < seen.size(); ++i) seen[i].norm = known.const_data_ptr<double>()[i];
  return seen;
}

inline std::vector<std::int64_t> index_of(const SeenGradient& seen, std::int64_t position) {
  std::vector<std::int64_t> index(static_cast<std::size_t>(seen.values.dim()));
  for (std::size_t i = index.size(); i-- > 0;) {
    const std::int64_t size = seen.values.size(static_cast<std::int64_t>(i));
    index[i] = position % size;
    position /= size;
  }
  if (!seen.gradient.is_sparse()) return index;
  const at::Tensor row = seen.gradient.indices().select(1, index.front()).cpu();
  index.erase(index.begin());
  index.insert(index.begin(), row.const_data_ptr<int64_t>(),
               row.const_data_ptr<int64_t>() + row.numel());
  return index;
}

/// Counts what is inf or NaN in `seen` times `factor`, and sets the norm to that of the rest.
inline OverflowedParameter count_overflow(SeenGradient& seen, double factor) {
  const auto wide = seen.values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor values = seen.values.to(wide).flatten();
  if (factor != 1) values = values.mul(factor);
  const at::Tensor is_bad = values.isfinite().logical_not();
  const at::Tensor first = is_bad.to(at::kByte).argmax();
  const at::Tensor rest = at::where(is_bad, 0.0, values.to(at::kDouble));
  const at::Tensor known = stacked_on_host(
      {values.isinf().sum().to(at::kDouble), values.isnan().sum().to(at::kDouble),
       first.to(at::kDouble), values.index_select(0, first.reshape({1}))[0].to(at::kDouble),
       norm_of(rest)});
  const double* const number = known.const_data_ptr<double>();
  seen.norm = number[4] / factor;
  return {.name = *seen.name,
          .elements = values.numel(),
          .infs = static_cast<std::int64_t>(number[0]),
          .nans = static_cast<std::int64_t>(number[1]),
          .first = index_of(seen, static_cast<std::int64_t>(number[2])),
          .value = number[3]};
}

/// Returns the parameters whose gradient times `factor` is not finite, the last first.
inline std::vector<OverflowedParameter> overflowed(std::vector<SeenGradient>& all, double factor) {
  std::vector<OverflowedParameter> found;
  for (SeenGradient& seen : all) {
    const double norm = seen.norm * factor;  // never less than its largest element
    if (!nonfinite_bits(norm) && norm < std::numeric_limits<float>::max() / 2) continue;
    OverflowedParameter parameter = count_overflow(seen, factor);
    parameter.by_unscaling = factor != 1;
    if (parameter.infs + parameter.nans > 0) found.push_back(std::move(parameter));
  }
  std::reverse(found.begin(), found.end());
  return found;
}

/// The parameters of a layer follow each other.
inline std::vector<LayerNorm> layer_norms(const std::vector<SeenGradient>& all) {
  std::vector<LayerNorm> layers;
  for (const SeenGradient& seen : all) {
    const std::string layer = layer_name(*seen.name);
    if (layers.empty() || layers.back().layer != layer) layers.push_back({.layer = layer});
    layers.back().norm = std::hypot(layers.back().norm, seen.norm);
  }
  return layers;
}

/// Sees gradients as this rank's backward pass makes them, while it lives.
class OwnGradients {
 public:
  explicit OwnGradients(const NamedTensors& parameters) {
    for (const auto& [name, parameter] : parameters) {
      if (!parameter.requires_grad()) continue;
      const at::NoGradGuard no_grad;
      const at::Tensor sum = at::zeros({}, parameter.options().dtype(at::kFloat));
      const unsigned hook = parameter.register_hook([sum](const at::Tensor& gradient) {
        const at::NoGradGuard no_grad_in_hook;
        const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
        sum.add_(values.sum(at::kFloat).mul(0));  // 0, or NaN where one is inf or NaN
      });
      watched_.push_back({name, parameter, sum, hook});
    }
  }
  ~OwnGradients() {
    for (const Watched& watched : watched_) watched.parameter.remove_hook(watched.hook);
  }
  OwnGradients(const OwnGradients&) = delete;
  OwnGradients& operator=(const OwnGradients&) = delete;

  /// The names of those that were inf or NaN since the last call. Waits for the device.
  std::vector<std::string> take() {
    std::vector<std::string> names;
    if (watched_.empty()) return names;
    std::vector<at::Tensor> sums;
    for (const Watched& watched : watched_) sums.push_back(watched.sum);
    const at::Tensor known = stacked_on_host(std::move(sums));
    for (std::size_t i = 0; i < watched_.size(); ++i) {
      if (nonfinite_bits(known.const_data_ptr<float>()[i])) names.push_back(watched_[i].name);
      watched_[i].sum.zero_();
    }
    return names;
  }

 private:
  struct Watched {
    std::string name;
    at::Tensor parameter;
    at::Tensor sum;
    unsigned hook;
  };

  std::vector<Watched> watched_;
};

}  // namespace detail

MEZZO_INLINE NamedTensors name_parameters(const torch::nn::Module& model) {
  return detail::NamedOnce().floating(model.named_parameters());
}

MEZZO_INLINE NamedTensors name_parameters(const std::vector<NamedModel>& models) {
  NamedTensors all;
  detail::NamedOnce once;
  for (const auto& [name, model] : models) {
    for (auto& [own, parameter] : once.floating(model.get().named_parameters())) {
      all.emplace_back(name + "." + own, std::move(parameter));
    }
  }
  return all;
}

MEZZO_INLINE Overflow find_overflow(const NamedTensors& parameters, double loss_scale) {
  const at::NoGradGuard no_grad;
  std::vector<detail::SeenGradient> all = detail::seen_gradients(parameters);
  Overflow overflow{.parameters = detail::overflowed(all, 1)};
  if (overflow.parameters.empty() && loss_scale < 1) {
    overflow.parameters = detail::overflowed(all, 1 / loss_scale);
  }
  overflow.layers = detail::layer_norms(all);
  return overflow;
}

MEZZO_INLINE std::vector<std::string> Overflow::overflowed_layers() const {
  std::vector<std::string> names;
  for (const OverflowedParameter& parameter : parameters) {
    std::string name = detail::layer_name(parameter.name);
    if (names.empty() || names.back() != name) names.push_back(std::move(name));
  }
  return names;
}

MEZZO_INLINE std::string Overflow::cause() const {
  std::string where = rank ? c10::str("rank ", *rank, ": ") : std::string();
  if (own && own->empty()) where += "its own gradients were finite; ";
  if (own && !own->empty()) {
    where += c10::str("it began here, in its own gradients of ", own->back(),
                      own->size() > 1 ? c10::str(" and ", own->size() - 1, " more") : "", "; ");
  }
  if (parameters.empty()) {
    return where +
           "no gradient is inf or NaN now: they were set to zero with the step, or are a later "
           "step's, as on a device; call find_overflow after the step, before they are cleared";
  }
  const OverflowedParameter& first = parameters.front();
  const std::size_t others = parameters.size() - 1;
  const LayerNorm& largest = *std::max_element(
      layers.begin(), layers.end(), [](const auto& a, const auto& b) { return a.norm < b.norm; });
  return c10::str(where, first.name, others > 0 ? c10::str(" and ", others, " more") : "", ", in ",
                  overflowed_layers().size(), " of ", layers.size(), " layers: ", first.name,
                  " has ", first.infs, " inf and ", first.nans, " NaN in ", first.elements,
                  " gradients, the first, ", detail::number_text(first.value), ", at [",
                  c10::Join(", ", first.first), "], ",
                  first.by_unscaling ? "made by dividing by a loss scale below 1"
                                     : "found after the backward pass",
                  "; the largest norm without these is ", detail::digits(largest.norm),
                  ", of layer ", largest.layer);
}

MEZZO_INLINE OverflowReport::OverflowReport(const torch::nn::Module& model,
                                            OverflowReportOptions options)
    : OverflowReport(name_parameters(model), std::move(options)) {}

MEZZO_INLINE OverflowReport::OverflowReport(const std::vector<NamedModel>& models,
                                            OverflowReportOptions options)
    : OverflowReport(name_parameters(models), std::move(options)) {}

MEZZO_INLINE OverflowReport::OverflowReport(NamedTensors parameters, OverflowReportOptions options)
    : parameters_(std::move(parameters)), options_(std::move(options)) {
  if (options_.own_gradients) own_ = std::make_shared<detail::OwnGradients>(parameters_);
}

MEZZO_INLINE void OverflowReport::operator()(const SkippedStep& step) {
  constexpr std::int64_t kAtFirst = 3;
  constexpr std::int64_t kRarely = 1000;
  skips_at_scale_ = step.scale == step.next_scale ? skips_at_scale_ + 1 : 0;
  if (skips_at_scale_ > kAtFirst && skips_at_scale_ % kRarely != 0) return;
  std::optional<std::vector<std::string>> own;
  if (own_ != nullptr) own = own_->take();
  const bool is_first = options_.rank.value_or(0) == 0;
  const bool writes = options_.stream != nullptr && (is_first || (own && !own->empty()));
  if (!writes && !options_.callback) return;
  Overflow overflow = find_overflow(parameters_, step.scale);
  overflow.own = std::move(own);
  overflow.step = step;
  overflow.rank = options_.rank;
  if (writes) *options_.stream << step.message() + "\n  " + overflow.cause() + "\n" << std::flush;
  if (options_.callback) options_.callback(overflow);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
