/// \file
/// Runs one model in several precisions.
#pragma once

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/cast_trace.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/matmul_precision.h>
#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/diagnose/detail/bench_scopes.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
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

  /// The same with each module.
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
  std::vector<std::pair<std::string, std::vector<at::Tensor>>> owners_;
  const std::vector<at::Tensor>* exact_ = nullptr;  // of the module that runs in float32
  BorrowedModel model_;
  c10::Device device_;
  std::vector<std::vector<at::Tensor>> reference_;  // float32's gradients, batch by batch
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
