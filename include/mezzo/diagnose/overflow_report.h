/// \file
/// Why was that step skipped? One line for a GradScaler that names the parameters whose gradients
/// were inf or NaN:
///
///     scaler.on_skip(mezzo::OverflowReport(*model));
///
/// Then a skipped step writes Apex's line, and one of cause:
///
///     Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0
///       head.weight and 3 more, in 2 of 6 layers: head.weight has 3 inf and 1 NaN in 512 gradients,
///       the first, inf, at [0, 17], made by the backward pass; ...
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/scaling/grad_scaler_options.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Parameters with their names; the tensors are the model's own.
using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// All parameters of a floating dtype, as `named_parameters` orders them, each once.
NamedParameters name_parameters(const torch::nn::Module& model);

/// One parameter whose gradient is not finite.
struct OverflowedParameter {
  std::string name;
  std::int64_t elements = 0;  ///< of the gradient; of a sparse one those that it has
  std::int64_t infs = 0;
  std::int64_t nans = 0;
  std::vector<std::int64_t> first = {};  ///< index of the first that is inf or NaN
  double value = 0;                      ///< which it is: inf, -inf or NaN
  /// It is finite, and not after division by a loss scale below 1. Where `unscale_` has divided
  /// already, this is not to be seen.
  bool by_unscaling = false;
};

/// The 2-norm of the gradients of a layer (a module with parameters of its own), inf and NaN left
/// out. As `.grad` holds them: they carry the loss scale, unless `unscale_` took it off.
struct LayerNorm {
  std::string layer;
  double norm = 0;
};

/// What the gradients of a skipped step look like.
struct Overflow {
  SkippedStep step = {};
  std::optional<int> rank = std::nullopt;  ///< of the process, where it was told
  /// The one that the model registers last comes first. A backward pass comes from there, so that
  /// it is most often where the inf or NaN began.
  std::vector<OverflowedParameter> parameters = {};
  std::vector<LayerNorm> layers = {};  ///< those that have gradients, in the model's order

  /// The layers of `parameters`, each once, in their order.
  std::vector<std::string> overflowed_layers() const;

  /// One line without an end; also where there is nothing to be seen any more, and why.
  std::string cause() const;
};

/// Reads the gradients that `parameters` have now. Writes nothing. Reads all once, and those that
/// are not finite a second time; waits for the device.
/// \param loss_scale  that the gradients carry, or carried
Overflow find_overflow(const NamedParameters& parameters, double loss_scale = 1);

struct OverflowReportOptions {
  std::ostream* stream = &std::cerr;  ///< gets two lines; null: none. Lives as long as the report
  std::function<void(const Overflow&)> callback = {};
  /// Of this process in a job of several: lines are written on rank 0 alone, and name it; the
  /// callback hears on all.
  std::optional<int> rank = std::nullopt;
};

/// For `GradScaler::on_skip`. Costs nothing until a step is skipped, and then a find_overflow. Of
/// steps that are skipped at the same scale again and again it tells the first three and then every
/// 1000th, so that a run that is lost does not fill a disk.
///
/// It sees what `.grad` holds when the scaler tells of the skip, at `update`. Then `.grad` is as
/// the skipped step left it, but
/// - with StepOptions::zero_grad it is zero, and the report says only that;
/// - on a device the scaler tells some steps late, because nothing waits, and `.grad` is a later
///   step's. To know of the very step, ask before the gradients are cleared:
///
///       if (!result.ran()) std::cerr << mezzo::find_overflow(names, result.scale()).cause();
///
///   `ran()` waits for the device;
/// - ranks that average their gradients all have the same ones: an inf of one rank is in all, and
///   which rank's it was is not to be seen. A DivergenceWatch on each sees that rank's own loss.
class OverflowReport {
 public:
  /// Keeps the parameters, not the model. Those that are registered later are not seen.
  explicit OverflowReport(const torch::nn::Module& model, OverflowReportOptions options = {})
      : parameters_(name_parameters(model)), options_(std::move(options)) {}

  void operator()(const SkippedStep& step);

 private:
  NamedParameters parameters_;
  OverflowReportOptions options_;
  std::int64_t skips_at_scale_ = 0;
};

namespace detail {

/// The gradient of one parameter, and what is known of it.
struct SeenGradient {
  const std::string* name;
  at::Tensor gradient;  // as the parameter has it
  at::Tensor values;    // of a sparse one the rows that it has
  double norm = 0;
};

/// The 2-norm, in a type that holds it where `values` are of 16 bits.
inline at::Tensor norm_of(const at::Tensor& values) {
  const auto wide = values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return values.norm(2, wide).to(at::kDouble);
}

/// Tensors of equal sizes, on any devices, as one on the host.
inline at::Tensor stacked_on_host(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) tensor = tensor.to(tensors.front().device());
  return at::stack(tensors).cpu();
}

inline std::vector<SeenGradient> seen_gradients(const NamedParameters& parameters) {
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

/// Those of which a gradient times `factor` is not finite.
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

}  // namespace detail

inline NamedParameters name_parameters(const torch::nn::Module& model) {
  NamedParameters parameters;
  std::unordered_set<const c10::TensorImpl*> known;  // tied weights have several names
  for (const auto& entry : model.named_parameters()) {
    if (!entry.value().defined() || !entry.value().is_floating_point()) continue;
    if (!known.insert(entry.value().unsafeGetTensorImpl()).second) continue;
    parameters.emplace_back(entry.key(), entry.value());
  }
  return parameters;
}

inline Overflow find_overflow(const NamedParameters& parameters, double loss_scale) {
  const at::NoGradGuard no_grad;
  std::vector<detail::SeenGradient> all = detail::seen_gradients(parameters);
  Overflow overflow{.parameters = detail::overflowed(all, 1)};
  if (overflow.parameters.empty() && loss_scale < 1) {
    overflow.parameters = detail::overflowed(all, 1 / loss_scale);
  }
  overflow.layers = detail::layer_norms(all);
  return overflow;
}

inline std::vector<std::string> Overflow::overflowed_layers() const {
  std::vector<std::string> names;
  for (const OverflowedParameter& parameter : parameters) {
    std::string name = detail::layer_name(parameter.name);
    if (names.empty() || names.back() != name) names.push_back(std::move(name));
  }
  return names;
}

inline std::string Overflow::cause() const {
  const std::string where = rank ? c10::str("rank ", *rank, ": ") : std::string();
  if (parameters.empty()) {
    return where +
           "no gradient is inf or NaN now: they were set to zero with the step, or are a later "
           "step's, as on a device; call find_overflow after the step, before they are cleared";
  }
  const OverflowedParameter& first = parameters.front();
  const std::size_t others = parameters.size() - 1;
  const LayerNorm& largest = *std::max_element(
      layers.begin(), layers.end(), [](const auto& a, const auto& b) { return a.norm < b.norm; });
  return c10::str(
      where, first.name, others > 0 ? c10::str(" and ", others, " more") : "", ", in ",
      overflowed_layers().size(), " of ", layers.size(), " layers: ", first.name, " has ",
      first.infs, " inf and ", first.nans, " NaN in ", first.elements, " gradients, the first, ",
      detail::number_text(first.value), ", at [", c10::Join(", ", first.first), "], ",
      first.by_unscaling ? "made by dividing by a loss scale below 1" : "made by the backward pass",
      "; the largest norm without these is ", detail::digits(largest.norm), ", of layer ",
      largest.layer);
}

inline void OverflowReport::operator()(const SkippedStep& step) {
  constexpr std::int64_t kAtFirst = 3;
  constexpr std::int64_t kRarely = 1000;
  skips_at_scale_ = step.scale == step.next_scale ? skips_at_scale_ + 1 : 0;
  if (skips_at_scale_ > kAtFirst && skips_at_scale_ % kRarely != 0) return;
  const bool writes = options_.stream != nullptr && options_.rank.value_or(0) == 0;
  if (!writes && !options_.callback) return;
  Overflow overflow = find_overflow(parameters_, step.scale);
  overflow.step = step;
  overflow.rank = options_.rank;
  if (writes) *options_.stream << step.message() + "\n  " + overflow.cause() + "\n" << std::flush;
  if (options_.callback) options_.callback(overflow);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
