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

/// Returns the rates that the options of `groups` say.
inline std::vector<double> lrs_of(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<double> lrs;
  lrs.reserve(groups.size());
  for (const auto& group : groups) lrs.push_back(group.options().get_lr());
  return lrs;
}

/// The rates of param groups under a schedule, by LambdaLR's rule: the base of each group is fixed,
/// and the `lr` option shows base times factor. Another number there is the user's, for one step.
class ScheduledLrs {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// Shows each group's base times `factor`. The rates that the options say now are the bases of
  /// groups that have none yet.
  void show(Groups& groups, double factor) {
    bases_ = bases(groups);
    for (std::size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(bases_[i] * factor);
    shown_ = lrs_of(groups);
  }
  /// Returns whether the user has written the rate of a group since the last show.
  bool is_written(const Groups& groups) const {
    const std::vector<double> lrs = lrs_of(groups);  // more or fewer groups than then
    const auto [own, lr] = std::mismatch(shown_.begin(), shown_.end(), lrs.begin(), lrs.end());
    return own != shown_.end() && lr != lrs.end();
  }
  /// Returns the bases of all groups.
  std::vector<double> bases(const Groups& groups) const {
    std::vector<double> all = lrs_of(groups);
    std::copy_n(bases_.begin(), std::min(bases_.size(), all.size()), all.begin());
    return all;
  }
  /// Returns the rates of the next step, whose factor is `factor`.
  std::vector<double> next(const Groups& groups, double factor) const {
    std::vector<double> lrs = lrs_of(groups);
    for (std::size_t i = 0; i < lrs.size(); ++i) {
      const double base = i < bases_.size() ? bases_[i] : lrs[i];
      if (i >= shown_.size() || lrs[i] == shown_[i]) lrs[i] = base * factor;
    }
    return lrs;
  }
  /// Sets the bases of rates that the options show now.
  void set(std::vector<double> bases, const Groups& groups) {
    bases_ = std::move(bases);
    shown_ = lrs_of(groups);
  }
  /// Makes rates that the user has written since the bases of their groups.
  void take_written(const Groups& groups) {
    const std::vector<double> lrs = lrs_of(groups);
    for (std::size_t i = 0; i < std::min(bases_.size(), lrs.size()); ++i) {
      if (lrs[i] != shown_[i]) bases_[i] = lrs[i];
    }
  }

 private:
  std::vector<double> bases_;
  std::vector<double> shown_;
};

/// The table of a schedule, whose entry n is the factor of the step after n applied ones, on the
/// host and on a device; and the rates of param groups under it. FusedOptimizer::set_lr_factors has
/// the rules.
class LrFactors {
 public:
  using Groups = ScheduledLrs::Groups;

  bool empty() const noexcept { return table_.empty(); }
  const std::vector<double>& table() const noexcept { return table_; }

  /// Sets the table, and shows the rates of the step after `applied_steps` applied ones.
  /// \throws c10::Error if a factor is negative or not finite
  void set(std::vector<double> factors, Groups& groups, int64_t applied_steps) {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      TORCH_CHECK(!is_nonfinite(factors[i]) && factors[i] >= 0, "set_lr_factors: factors[", i,
                  "] is ", factors[i], "; it should be finite and at least 0");
    }
    if (empty()) scheduled_.take_written(groups);
    scheduled_.show(groups, factor_after(factors, applied_steps));  // throws where none can be set
    if (factors.empty()) scheduled_ = {};
    table_ = std::move(factors);
    on_device_ = at::Tensor();
  }
  /// Shows the rates of the step after `applied_steps` applied ones.
  void show(Groups& groups, int64_t applied_steps) {
    if (!empty()) scheduled_.show(groups, factor_after(table_, applied_steps));
  }
  std::vector<double> base_lrs(const Groups& groups) const {
    return empty() ? lrs_of(groups) : scheduled_.bases(groups);
  }
  std::vector<double> lrs(const Groups& groups, int64_t applied_steps) const {
    return scheduled_.next(groups, factor_after(table_, applied_steps));
  }
  /// Makes the rates that the options say the base rates.
  void set_bases(Groups& groups, const std::vector<double>& lrs) {
    for (std::size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(lrs[i]);
    scheduled_ = {};
  }
  /// Takes over a file's base rates; if there are none, those that the options say.
  void load_bases(const std::vector<double>& lrs, const Groups& groups) {
    scheduled_ = {};  // options of your own may have no rate
    if (!lrs.empty()) scheduled_.set(lrs, groups);
  }
  /// Returns whether the user has written a rate since it was shown.
  bool is_lr_written(const Groups& groups) const { return scheduled_.is_written(groups); }

  /// Returns the table as doubles on `device`.
  const at::Tensor& on(at::Device device) {
    if (!on_device_.defined() || on_device_.device() != device) {
      check_not_capturing(device, "the table of lr factors");
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
  ScheduledLrs scheduled_;
  at::Tensor on_device_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
