/// \file
/// Runs settings on a borrowed model; from settings to rows, to the one that is proposed, and to a
/// table.
#pragma once

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/cast_trace.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/matmul_precision.h>
#include <mezzo/base/model_list.h>
#include <mezzo/base/precision.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/diagnose/detail/bench_scopes.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Sums over the elements of each parameter, a row a parameter: of squared differences, squares of
/// float32's gradient, squares of the other, and products. Double, on the CPU.
class GradientSums {
 public:
  enum Column { kDifference, kReference, kOther, kProduct };

  GradientSums(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& reference) {
    std::vector<at::Tensor> rows;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      rows.push_back(row_of(gradients[i], reference[i]));
    }
    sums_ = at::stack(rows).cpu();
  }

  void add(const GradientSums& other) { sums_ += other.sums_; }

  bool finite() const { return !nonfinite_bits(sums_.sum().item<double>()); }

  /// |g - g32| / |g32| over all parameters.
  double error() const { return error_of(sums_.sum(0)); }
  double cosine() const { return cosine_of(sums_.sum(0)); }

  ParameterError of(std::size_t parameter, std::string name) const {
    const at::Tensor row = sums_[static_cast<int64_t>(parameter)];
    const double all = sums_.sum(0)[kDifference].item<double>();
    return {.name = std::move(name),
            .relative_error = error_of(row),
            .cosine = cosine_of(row),
            .share = all > 0 ? row[kDifference].item<double>() / all : 0};
  }

 private:
  static at::Tensor row_of(const at::Tensor& gradient, const at::Tensor& reference) {
    const auto sum = [](const at::Tensor& values) { return at::sum(values, at::kDouble); };
    return at::stack({sum((gradient - reference).square()), sum(reference.square()),
                      sum(gradient.square()), sum(gradient * reference)});
  }

  static double error_of(const at::Tensor& row) {
    const double difference = row[kDifference].item<double>();
    if (difference == 0) return 0;
    const double error = std::sqrt(difference / row[kReference].item<double>());
    return nonfinite_bits(error) ? std::numeric_limits<double>::infinity() : error;
  }

  static double cosine_of(const at::Tensor& row) {
    const double norms =
        std::sqrt(row[kReference].item<double>()) * std::sqrt(row[kOther].item<double>());
    if (norms == 0) return row[kDifference].item<double>() == 0 ? 1 : 0;
    return row[kProduct].item<double>() / norms;
  }

  at::Tensor sums_;
};

class PrecisionBench {
 public:
  using BatchLoss = std::function<at::Tensor(std::size_t)>;

  PrecisionBench(torch::nn::Module& model, BatchLoss loss, std::size_t batches,
                 const ComparisonOptions& options)
      : loss_(std::move(loss)),
        batches_(batches),
        compared_(std::min(batches, options.gradient_batches)),
        learning_rate_(options.learning_rate),
        owners_(parameter_owners(model)),
        model_(model),
        device_(model_.trained().front().second.device()) {
    for (std::size_t batch = 0; batch < compared_; ++batch) {
      model_.reset(std::nullopt);
      reference_.push_back(gradients(float32(), batch, 1));
    }
  }

  static PrecisionSetting float32() { return {.name = "float32"}; }
  c10::Device device() const { return device_; }

  /// The gradients of the first batches against float32's.
  GradientSums compare(const PrecisionSetting& setting) {
    GradientSums sums = compare(setting, 0);
    for (std::size_t batch = 1; batch < compared_; ++batch) sums.add(compare(setting, batch));
    return sums;
  }

  double single_batch_error(const PrecisionSetting& setting) { return compare(setting, 0).error(); }

  ParameterError parameter_error(const GradientSums& sums, std::size_t parameter) const {
    return sums.of(parameter, model_.trained()[parameter].first);
  }
  std::size_t parameters() const { return model_.trained().size(); }

  /// A step a batch: losses, skipped steps, time and memory.
  void train(PrecisionRow& row) {
    model_.drop_copies();
    memory_.restart();
    lend(row.setting);
    GradScaler scaler(row.setting.loss_scale);
    scaler.on_skip(nullptr);
    optim::AdamW optimizer(
        parameter_tensors(),
        optim::AdamWOptions(learning_rate_).weight_storage(row.setting.weight_storage));
    std::vector<double> seconds;
    std::size_t skipped = 0;
    const MatmulPrecisionGuard matmul_precision(matmul(row.setting));
    for (std::size_t batch = 0; batch < batches_; ++batch) {
      const auto begin = std::chrono::steady_clock::now();
      optimizer.zero_grad();
      const at::Tensor loss = loss_under(row.setting, batch);
      scaler.scale(loss).backward();
      const StepResult result = scaler.step(optimizer, StepOptions{});
      scaler.update();
      if (!result.ran()) ++skipped;  // waits for the device
      row.losses.push_back(loss.item<double>());
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
      seconds.push_back(passed.count());
    }
    row.skipped = static_cast<double>(skipped) / static_cast<double>(batches_);
    row.step_seconds = median_after_first(std::move(seconds));
    row.peak_bytes = memory_.bytes();
  }

  /// What a forward pass on the first batch runs in the setting's low precision.
  std::vector<CastRecord> low_precision_calls(const PrecisionSetting& setting) {
    lend(setting);
    const at::NoGradGuard no_grad;
    const CastTrace trace;
    loss_under(setting, 0);
    std::vector<CastRecord> calls = trace.records();
    std::erase_if(calls, [&](const CastRecord& call) { return call.runs_in != setting.autocast; });
    return calls;
  }

  bool lowers_products(const PrecisionSetting& setting) {
    if (!setting.autocast) {
      const bool is_tf32 = setting.float32 != at::Float32MatmulPrecision::HIGHEST;
      return is_tf32 || (setting.weights && *setting.weights != at::kFloat);
    }
    const OpList lists = autocast_op_lists(device_.type());
    const std::vector<CastRecord> calls = low_precision_calls(setting);
    return std::any_of(calls.begin(), calls.end(), [&](const CastRecord& call) {
      return lists.category(call.op) == OpCategory::lower_precision;
    });
  }

  /// The error of the first batch's gradients with each of `ops` in float32.
  std::vector<PrecisionCause> rank_ops(const PrecisionSetting& setting) {
    std::vector<PrecisionCause> causes;
    const std::vector<CastRecord> calls = low_precision_calls(setting);
    for (const CastRecord& call : calls) {
      const std::string& op = call.op;
      const bool is_known = std::any_of(causes.begin(), causes.end(),
                                        [&](const auto& cause) { return cause.name == op; });
      if (is_known || !takes_casts(op)) continue;
      PrecisionSetting without = setting;
      without.policy = install_op_overrides(setting.policy.deny(op));
      const std::int64_t others =
          followers(calls, op) - followers(low_precision_calls(without), op);
      causes.push_back({op, single_batch_error(without), others});
    }
    return sorted(std::move(causes));
  }

  /// The error of the first batch's gradients with each module in float32.
  std::vector<PrecisionCause> rank_modules(const PrecisionSetting& setting) {
    std::vector<PrecisionCause> causes;
    const std::int64_t before = followers(low_precision_calls(setting));
    const auto none_after = c10::make_scope_exit([this] { exact_ = nullptr; });
    for (const auto& [name, parameters] : owners_) {
      exact_ = &parameters;
      const std::int64_t others = before - followers(low_precision_calls(setting));
      causes.push_back({name, single_batch_error(setting), others});
    }
    return sorted(std::move(causes));
  }

 private:
  /// Calls of ops that run in the dtype of what they read, other than `op`.
  static std::int64_t followers(const std::vector<CastRecord>& calls, const std::string& op = {}) {
    std::int64_t number = 0;
    for (const CastRecord& call : calls) {
      if (call.category == OpCategory::fallthrough && call.op != op) number += call.calls;
    }
    return number;
  }

  void lend(const PrecisionSetting& setting) {
    model_.reset(setting.weights, setting.autocast.has_value() ? 2 : 0);
  }

  GradientSums compare(const PrecisionSetting& setting, std::size_t batch) {
    lend(setting);
    LossScaleState state = setting.loss_scale.initial_state();
    for (;;) {
      GradientSums sums(gradients(setting, batch, state.scale), reference_[batch]);
      const LossScaleState next = setting.loss_scale.next(state, /*found_inf=*/true);
      const bool backs_off = next.scale < state.scale || next.hysteresis_left > 0;
      if (sums.finite() || !backs_off || state.scale <= 1) return sums;
      state = next;
    }
  }

  /// One for each parameter that is trained, without the loss scale; zeros where there is none.
  std::vector<at::Tensor> gradients(const PrecisionSetting& setting, std::size_t batch,
                                    float scale) {
    for (const auto& [name, parameter] : model_.trained()) parameter.mutable_grad() = at::Tensor();
    model_.rewind_random();
    const MatmulPrecisionGuard matmul_precision(matmul(setting));
    (loss_under(setting, batch) * scale).backward();
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> all;
    for (const auto& [name, parameter] : model_.trained()) {
      const at::Tensor& gradient = parameter.grad();
      const at::ScalarType wide = wide_dtype(parameter);
      if (!gradient.defined()) {
        all.push_back(at::zeros_like(parameter, at::TensorOptions(wide)));
        continue;
      }
      const at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
      all.push_back(dense.to(wide).div(scale));
    }
    return all;
  }

  /// For a forward pass and its backward pass.
  static MatmulPrecisionOptions matmul(const PrecisionSetting& setting) {
    const bool exact = setting.float32 == at::Float32MatmulPrecision::HIGHEST;
    return {.float32 = setting.float32, .cudnn_tf32 = !exact};
  }

  at::Tensor loss_under(const PrecisionSetting& setting, std::size_t batch) {
    const AutocastGuard region(
        {.device = device_.type(),
         .dtype = setting.autocast.value_or(default_autocast_dtype(device_.type())),
         .enabled = setting.autocast.has_value(),
         .policy = setting.policy});
    std::optional<Float32ForParameters> module_in_float32;
    if (exact_ != nullptr) module_in_float32.emplace(device_.type(), *exact_);
    at::Tensor loss = loss_(batch);
    TORCH_CHECK(loss.defined() && loss.numel() == 1, "compare_precisions: loss returned ",
                loss.defined() ? c10::str("a tensor of ", loss.numel(), " elements")
                               : std::string("an undefined tensor"),
                "; it should be one number a batch: return its mean() or sum()");
    return loss;
  }

  std::vector<at::Tensor> parameter_tensors() const {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, parameter] : model_.trained()) tensors.push_back(parameter);
    return tensors;
  }

  /// Whether a policy takes the op.
  static bool takes_casts(const std::string& name) {
    const auto op = find_op(name);
    return op.has_value() && is_functional(*op) && !may_alias_argument(*op);
  }

  static std::vector<PrecisionCause> sorted(std::vector<PrecisionCause> causes) {
    std::stable_sort(causes.begin(), causes.end(), [](const auto& a, const auto& b) {
      return a.error_without < b.error_without;
    });
    return causes;
  }

  static double median_after_first(std::vector<double> values) {
    if (values.size() > 1) values.erase(values.begin());
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  const at::AutoGradMode with_gradients_{true};
  PeakMemory memory_;
  BatchLoss loss_;
  std::size_t batches_;
  std::size_t compared_;
  double learning_rate_;
  std::vector<std::pair<std::string, NamedTensors>> owners_;
  const NamedTensors* exact_ = nullptr;  // of the module that runs in float32
  BorrowedModel model_;
  c10::Device device_;
  std::vector<std::vector<at::Tensor>> reference_;  // float32's gradients, batch by batch
};

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

  /// Returns the setting's row with the costliest ops in float32, as few as bring the error under
  /// the bound; none where no product stays in low precision.
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

/// The causes that leave less error when they run in float32, at most five.
inline void write_causes(std::ostream& stream, const char* what,
                         const std::vector<PrecisionCause>& causes, double error) {
  constexpr int kMost = 5;
  int written = 0;
  for (const PrecisionCause& cause : causes) {
    if (cause.error_without >= error || written++ >= kMost) continue;
    std::string words = c10::str(" with the ", what, " ", cause.name, " in float32");
    if (cause.others > 0) {
      words += c10::str(", and with it ", cause.others, " calls of other ops that read its result");
    }
    stream << table_line({-12, 0}, {"  " + digits(cause.error_without), words});
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
         << detail::table_line(widths, {"setting", "gradient error", "cosine", "loss diff",
                                        "skipped", "ms/step", "peak MiB"});
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
