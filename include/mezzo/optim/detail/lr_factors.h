#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/graph_capture.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the `lr` option of each group.
inline std::vector<double> get_current_lrs(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<double> lrs;
  lrs.reserve(groups.size());
  for (const auto& group : groups) lrs.push_back(group.options().get_lr());
  return lrs;
}

/// The lrs of param groups under a schedule, as in LambdaLR: each group has a fixed base lr, and
/// its `lr` option is set to base lr times factor. Any other value there was set by hand, for one
/// step.
class ScheduledLrs {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// Sets each group's `lr` option to its base lr times `factor`. A group without a base lr gets
  /// its current `lr` as base lr.
  void set_optimizer_lrs(Groups& groups, double factor) {
    base_lrs_ = base_lrs(groups);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      groups[i].options().set_lr(base_lrs_[i] * factor);
    }
    last_lrs_ = get_current_lrs(groups);
  }
  /// Returns whether an `lr` option was changed since set_optimizer_lrs.
  bool has_manual_lr(const Groups& groups) const {
    const std::vector<double> lrs =
        get_current_lrs(groups);  // groups may have been added or removed
    const auto [last, lr] =
        std::mismatch(last_lrs_.begin(), last_lrs_.end(), lrs.begin(), lrs.end());
    return last != last_lrs_.end() && lr != lrs.end();
  }
  /// Returns the base lr of each group.
  std::vector<double> base_lrs(const Groups& groups) const {
    std::vector<double> all = get_current_lrs(groups);
    std::copy_n(base_lrs_.begin(), std::min(base_lrs_.size(), all.size()), all.begin());
    return all;
  }
  /// Returns the lrs of the next step, whose factor is `factor`.
  std::vector<double> next_lrs(const Groups& groups, double factor) const {
    std::vector<double> lrs = get_current_lrs(groups);
    for (std::size_t i = 0; i < lrs.size(); ++i) {
      const double base = i < base_lrs_.size() ? base_lrs_[i] : lrs[i];
      if (i >= last_lrs_.size() || lrs[i] == last_lrs_[i]) lrs[i] = base * factor;
    }
    return lrs;
  }
  /// Sets the base lrs; the `lr` options stay.
  void set_base_lrs(std::vector<double> base_lrs, const Groups& groups) {
    base_lrs_ = std::move(base_lrs);
    last_lrs_ = get_current_lrs(groups);
  }
  /// Makes lrs that were set by hand the base lrs of their groups.
  void adopt_manual_lrs(const Groups& groups) {
    const std::vector<double> lrs = get_current_lrs(groups);
    for (std::size_t i = 0; i < std::min(base_lrs_.size(), lrs.size()); ++i) {
      if (lrs[i] != last_lrs_[i]) base_lrs_[i] = lrs[i];
    }
  }

 private:
  std::vector<double> base_lrs_;
  std::vector<double> last_lrs_;
};

/// The lr factors of a schedule, on the host and on a device, and the lrs of param groups under
/// them. Entry n is the factor after n applied steps; see MixedPrecisionOptimizer::set_lr_factors.
class LrFactors {
 public:
  using Groups = ScheduledLrs::Groups;

  bool empty() const noexcept { return table_.empty(); }
  const std::vector<double>& table() const noexcept { return table_; }

  /// Sets the table, and the `lr` options of the step after `applied_steps` applied steps.
  /// \throws c10::Error if a factor is negative or not finite
  void set(std::vector<double> factors, Groups& groups, int64_t applied_steps) {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      TORCH_CHECK(!is_nonfinite(factors[i]) && factors[i] >= 0, "set_lr_factors: factors[", i,
                  "] is ", factors[i], "; it should be finite and at least 0");
    }
    if (empty()) scheduled_lrs_.adopt_manual_lrs(groups);
    scheduled_lrs_.set_optimizer_lrs(
        groups, factor_after(factors, applied_steps));  // throws if options have no lr
    if (factors.empty()) scheduled_lrs_ = {};
    table_ = std::move(factors);
    on_device_ = at::Tensor();
  }
  /// Sets the `lr` options of the step after `applied_steps` applied steps.
  void set_optimizer_lrs(Groups& groups, int64_t applied_steps) {
    if (!empty()) scheduled_lrs_.set_optimizer_lrs(groups, factor_after(table_, applied_steps));
  }
  std::vector<double> base_lrs(const Groups& groups) const {
    return empty() ? get_current_lrs(groups) : scheduled_lrs_.base_lrs(groups);
  }
  std::vector<double> lrs(const Groups& groups, int64_t applied_steps) const {
    return scheduled_lrs_.next_lrs(groups, factor_after(table_, applied_steps));
  }
  /// Sets the `lr` options to `lrs`, which the next set_optimizer_lrs makes the base lrs.
  void set_base_lrs(Groups& groups, const std::vector<double>& lrs) {
    for (std::size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(lrs[i]);
    scheduled_lrs_ = {};
  }
  /// Restores the base lrs of an archive; if empty, the `lr` options are the base lrs.
  void load_base_lrs(const std::vector<double>& lrs, const Groups& groups) {
    scheduled_lrs_ = {};  // custom options may have no lr
    if (!lrs.empty()) scheduled_lrs_.set_base_lrs(lrs, groups);
  }
  /// Returns whether an `lr` option was changed by hand.
  bool has_manual_lr(const Groups& groups) const { return scheduled_lrs_.has_manual_lr(groups); }

  /// Returns the table as float64 on `device`.
  const at::Tensor& device_table(at::Device device) {
    if (!on_device_.defined() || on_device_.device() != device) {
      check_not_capturing(device, "the lr factors");
      on_device_ = at::tensor(table_, at::kDouble).to(device);
    }
    return on_device_;
  }

 private:
  static double factor_after(const std::vector<double>& table, int64_t applied_steps) {
    if (table.empty()) return 1.0;
    return table[std::min(static_cast<std::size_t>(applied_steps), table.size() - 1)];
  }

  std::vector<double> table_;
  ScheduledLrs scheduled_lrs_;
  at::Tensor on_device_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
