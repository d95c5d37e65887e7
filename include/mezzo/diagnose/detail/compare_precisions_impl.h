/// \file
/// From settings to rows, to the one that is proposed, and to a table.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/model_list.h>
#include <mezzo/base/precision.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/precision_bench.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <iterator>
#include <limits>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_comparison(torch::nn::Module& model, std::size_t batches,
                             const ComparisonOptions& options) {
  TORCH_CHECK(is_at_least(options.max_gradient_error, 0),
              "compare_precisions: max_gradient_error is ", options.max_gradient_error,
              "; it should be at least 0");
  TORCH_CHECK(options.gradient_batches > 0,
              "compare_precisions: gradient_batches is 0; it should be at least 1");
  TORCH_CHECK(is_at_least(options.learning_rate, 0), "compare_precisions: learning_rate is ",
              options.learning_rate, "; it should be at least 0");
  TORCH_CHECK(batches > 0, "compare_precisions: batches is empty; give ten or more");
  TORCH_CHECK(!c10::InferenceMode::is_enabled(),
              "compare_precisions: it is called in inference mode, and it trains; call it outside "
              "of c10::InferenceMode");
  bool trains = false;
  for (const auto& entry : model.named_parameters()) {
    const at::Tensor& parameter = entry.value();
    trains = trains || parameter.requires_grad();
    TORCH_CHECK(parameter.scalar_type() == at::kFloat || parameter.scalar_type() == at::kDouble,
                "compare_precisions: ", entry.key(), " is ", tensor_words(parameter),
                "; give it the model in float32, and dtypes of weights in settings");
    TORCH_CHECK(autocast_accepts(parameter.device().type(), at::kBFloat16),
                "compare_precisions: ", entry.key(), " is on ", parameter.device(),
                "; models on cpu and cuda can be compared");
    TORCH_CHECK(!at::autocast::is_autocast_enabled(parameter.device().type()),
                "compare_precisions: autocast is on; call it outside of Autocast regions, which it "
                "enters itself");
  }
  TORCH_CHECK(trains,
              "compare_precisions: no parameter of the model requires grad, and precisions are "
              "compared by gradients; call requires_grad_() on those that train");
}

/// float32's row, and those of other settings against it.
class RowMaker {
 public:
  RowMaker(PrecisionBench& bench, const ComparisonOptions& options)
      : bench_(bench), options_(options) {}

  PrecisionRow reference() {
    PrecisionRow row{.setting = PrecisionBench::float32(), .lowers_products = false};
    bench_.train(row);
    losses_ = row.losses;
    return row;
  }

  /// What the model throws becomes the row's failure.
  PrecisionRow row_of(const PrecisionSetting& setting) {
    PrecisionRow row{.setting = setting};
    try {
      const GradientSums sums = bench_.compare(setting);
      take_errors(row, sums);
      bench_.train(row);
      row.loss_difference = difference_of(row.losses);
      row.lowers_products = bench_.lowers_products(setting);
      if (options_.rank_causes && setting.autocast.has_value()) rank(row);
    } catch (const c10::Error& error) {
      row.failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      row.failure = error.what();
    }
    if (!row.failure.empty()) row.gradient_error = std::numeric_limits<double>::infinity();
    return row;
  }

  /// The same setting with the costliest ops in float32, as few as bring the error under the bound;
  /// none where that leaves no product in low precision.
  std::optional<PrecisionRow> repair(const PrecisionRow& row) {
    if (!row.failure.empty() || row.gradient_error <= options_.max_gradient_error) return {};
    PrecisionSetting repaired = row.setting;
    repaired.name += " + policy";
    for (const PrecisionCause& op : row.ops) {
      repaired.policy = install_op_overrides(repaired.policy.deny(op.name));
      const GradientSums sums = bench_.compare(repaired);
      if (sums.error() > options_.max_gradient_error) continue;
      if (!bench_.lowers_products(repaired)) return {};
      PrecisionRow repaired_row{.setting = repaired};
      take_errors(repaired_row, sums);
      bench_.train(repaired_row);
      repaired_row.loss_difference = difference_of(repaired_row.losses);
      return repaired_row;
    }
    return {};
  }

 private:
  void take_errors(PrecisionRow& row, const GradientSums& sums) const {
    row.gradient_error = sums.error();
    row.cosine = sums.cosine();
    for (std::size_t i = 0; i < bench_.parameters(); ++i) {
      row.parameters.push_back(bench_.parameter_error(sums, i));
    }
    std::stable_sort(row.parameters.begin(), row.parameters.end(),
                     [](const auto& a, const auto& b) { return a.share > b.share; });
  }

  void rank(PrecisionRow& row) {
    row.single_batch_error = bench_.single_batch_error(row.setting);
    row.ops = bench_.rank_ops(row.setting);
    row.modules = bench_.rank_modules(row.setting);
  }

  double difference_of(const std::vector<double>& losses) const {
    double difference = 0;
    double size = 0;
    for (std::size_t i = 0; i < losses.size(); ++i) {
      difference += std::abs(losses[i] - losses_[i]);
      size += std::abs(losses_[i]);
    }
    if (difference == 0) return 0;
    const double relative = difference / size;
    return nonfinite_bits(relative) ? std::numeric_limits<double>::infinity() : relative;
  }

  PrecisionBench& bench_;
  const ComparisonOptions& options_;
  std::vector<double> losses_;
};

inline PrecisionComparison compare_on(PrecisionBench& bench,
                                      const std::vector<PrecisionSetting>& settings,
                                      const ComparisonOptions& options) {
  PrecisionComparison comparison{
      .device = bench.device(), .max_gradient_error = options.max_gradient_error, .rows = {}};
  RowMaker maker(bench, options);
  comparison.rows.push_back(maker.reference());
  for (const PrecisionSetting& setting : settings) {
    comparison.rows.push_back(maker.row_of(setting));
    auto repaired = maker.repair(comparison.rows.back());
    if (repaired.has_value()) comparison.rows.push_back(*std::move(repaired));
  }
  return comparison;
}

/// The heads of comparison_cells; the table on the terminal and that on a page hold the same.
inline std::vector<std::string> comparison_columns() {
  return {"setting", "gradient error", "cosine", "loss diff", "skipped", "ms/step", "peak MiB"};
}

inline std::vector<std::string> comparison_cells(const PrecisionRow& row) {
  const auto mib = [](int64_t bytes) { return digits(static_cast<double>(bytes) / 1048576, 4); };
  return {row.setting.name,
          digits(row.gradient_error),
          digits(row.cosine, 6),
          digits(row.loss_difference),
          digits(100 * row.skipped) + " %",
          digits(1000 * row.step_seconds, 4),
          row.peak_bytes ? mib(*row.peak_bytes) : "-"};
}

inline std::string proposal_line(const PrecisionComparison& comparison) {
  const PrecisionRow& proposal = comparison.proposal();
  std::string line = c10::str("proposed: ", proposal.setting.name,
                              ", the fastest with a gradient error of at most ",
                              digits(comparison.max_gradient_error));
  for (const PrecisionRow& row : comparison.rows) {
    if (row.lowers_products || &row == &comparison.rows.front() || !row.failure.empty()) continue;
    line += "; " + row.setting.name + " runs no product in low precision";
  }
  return line;
}

/// "the op aten::mm in float32, and 3 calls of others, which read its result".
inline std::string cause_words(const char* what, const PrecisionCause& cause) {
  std::string words = c10::str("the ", what, " ", cause.name, " in float32");
  if (cause.others > 0) {
    words += c10::str(", and with it ", cause.others, " calls of other ops that read its result");
  }
  return words;
}

/// Those that leave less error, at most `most`.
inline std::vector<PrecisionCause> worst_causes(const std::vector<PrecisionCause>& causes,
                                                double error, std::size_t most) {
  std::vector<PrecisionCause> worst;
  for (const PrecisionCause& cause : causes) {
    if (worst.size() < most && cause.error_without < error) worst.push_back(cause);
  }
  return worst;
}

inline void write_causes(std::ostream& stream, const char* what,
                         const std::vector<PrecisionCause>& causes, double error) {
  for (const PrecisionCause& cause : worst_causes(causes, error, 5)) {
    stream << table_line({-12, 0},
                         {"  " + digits(cause.error_without), " with " + cause_words(what, cause)});
  }
}

}  // namespace detail

inline std::vector<PrecisionSetting> candidate_precisions(c10::DeviceType device) {
  const PrecisionSetting bf16{
      .name = "bf16 weights", .autocast = at::kBFloat16, .weights = at::kBFloat16};
  PrecisionSetting masters = bf16;
  masters.name += " + masters";
  masters.weight_storage = optim::WeightStorage::master;
  PrecisionSetting stochastic = bf16;
  stochastic.name += ", stochastic";
  stochastic.weight_storage = optim::WeightStorage::stochastic;
  std::vector<PrecisionSetting> all;
  if (device == c10::DeviceType::CUDA) {
    all.push_back({.name = "tf32", .float32 = at::Float32MatmulPrecision::HIGH});
  }
  all.push_back({.name = "bf16 autocast", .autocast = at::kBFloat16});
  all.push_back(
      {.name = "fp16 autocast", .autocast = at::kHalf, .loss_scale = LossScale::dynamic()});
  all.push_back(std::move(masters));
  all.push_back(std::move(stochastic));
  return all;
}

inline const PrecisionRow& PrecisionComparison::proposal() const {
  TORCH_CHECK(!rows.empty(), "PrecisionComparison: rows is empty; compare_precisions fills it");
  const PrecisionRow* best = &rows.front();
  for (const PrecisionRow& row : rows) {
    const bool is_sound = row.failure.empty() && row.lowers_products &&
                          row.gradient_error <= max_gradient_error &&
                          !detail::nonfinite_bits(row.loss_difference);
    if (is_sound && row.step_seconds < best->step_seconds) best = &row;
  }
  return *best;
}

template <detail::ComparableModel Model, class Loss, class Batches>
PrecisionComparison compare_precisions(Model&& model, const Loss& loss, const Batches& batches,
                                       const std::vector<PrecisionSetting>& settings,
                                       const ComparisonOptions& options) {
  const auto module = detail::module_pointer(model);
  TORCH_CHECK(module != nullptr,
              "compare_precisions: the model is an empty holder or a null pointer; construct it "
              "first");
  const auto number =
      static_cast<std::size_t>(std::distance(std::begin(batches), std::end(batches)));
  detail::check_comparison(*module, number, options);
  const auto loss_of = [&](std::size_t batch) -> at::Tensor {
    return loss(model, *std::next(std::begin(batches), static_cast<std::ptrdiff_t>(batch)));
  };
  detail::PrecisionBench bench(*module, loss_of, number, options);
  return detail::compare_on(
      bench, settings.empty() ? candidate_precisions(bench.device().type()) : settings, options);
}

inline std::ostream& operator<<(std::ostream& stream, const PrecisionComparison& comparison) {
  std::size_t width = 24;
  for (const PrecisionRow& row : comparison.rows) {
    width = std::max(width, row.setting.name.size() + 2);
  }
  const std::vector<int> widths = {-static_cast<int>(width), 16, 16, 16, 16, 16, 16};
  stream << "precisions on " << comparison.device << "; gradients and losses against float32's\n"
         << detail::table_line(widths, detail::comparison_columns());
  for (const PrecisionRow& row : comparison.rows) {
    if (row.failure.empty()) {
      stream << detail::table_line(widths, detail::comparison_cells(row));
    } else {
      stream << row.setting.name << ": " << row.failure << "\n";
    }
  }
  if (comparison.rows.empty()) return stream;
  stream << detail::proposal_line(comparison) << "\n";
  for (const PrecisionRow& row : comparison.rows) {
    if (row.ops.empty() && row.modules.empty()) continue;
    stream << row.setting.name
           << ", gradient error of the first batch: " << detail::digits(row.single_batch_error)
           << "; it is\n";
    detail::write_causes(stream, "op", row.ops, row.single_batch_error);
    detail::write_causes(stream, "module", row.modules, row.single_batch_error);
  }
  const std::string edits = comparison.proposal().setting.policy.to_string();
  if (!edits.empty()) stream << "its policy:\n" << edits;
  return stream;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
