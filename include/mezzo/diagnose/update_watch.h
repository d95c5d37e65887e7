/// \file
/// UpdateWatch, a writer for a Telemetry, says which share of a training step's updates 16-bit
/// weights round to nothing:
///
///     telemetry.write_to(mezzo::UpdateWatch(*model, optimizer));
///     ...
///     telemetry.record(result, loss);                // each step, after scaler.update()
#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/fused_options.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The updates of one parameter that left its elements as they were.
struct LostUpdates {
  std::string parameter = {};  ///< its name in the model
  double share = 0;            ///< of the sampled elements whose gradient is not 0
  std::int64_t sampled = 0;    ///< how many these are
};

/// What an UpdateWatch looked at in one step.
struct UpdateSample {
  std::int64_t step = 0;                     ///< whose record ended the sample
  double share = 0;                          ///< of all sampled elements with a gradient
  std::vector<LostUpdates> parameters = {};  ///< the largest share first
  std::string message() const;               ///< in one line
};

/// When an UpdateWatch looks, at how much, and whom it tells.
struct UpdateWatchOptions {
  std::int64_t every = 100;      ///< steps from one sample to the next
  std::int64_t elements = 4096;  ///< the most that are read of a parameter, evenly spread
  double noticeable = 0.5;       ///< from this share on a line is printed to std::cerr, once
  /// Called with every sample, in place of std::cerr.
  std::function<void(const UpdateSample&)> callback = {};
};

/// Compares 16-bit weights before and after a step, every `every` steps: the parameters of
/// bfloat16 and half that the optimizer rounds after each step (WeightStorage::plain, and
/// libtorch's optimizers); masters and stochastic rounding keep small updates. An element counts
/// where its gradient is not 0. Nothing is said of a step that was skipped, whose learning rate is
/// 0, or whose gradients were set to zero before the record (`{.zero_grad = true}`).
///
/// A sample reads `elements` values of each such parameter twice, which waits for the device; other
/// steps cost a comparison. Where a device decides on steps, records come late, and the gradients
/// may be a later step's.
class UpdateWatch {
 public:
  /// Keeps the parameters that `model` and `optimizer` share; the optimizer must outlive the watch.
  /// \throws c10::Error unless `every` is at least 2 and `elements` at least 1
  UpdateWatch(const torch::nn::Module& model, AnyOptimizer optimizer,
              UpdateWatchOptions options = {})
      : options_(std::move(options)), optimizer_(optimizer) {
    TORCH_CHECK(options_.every >= 2, "UpdateWatch: every is ", options_.every,
                "; it should be at least 2");
    TORCH_CHECK(options_.elements >= 1, "UpdateWatch: elements is ", options_.elements,
                "; it should be at least 1");
    names_ = name_parameters(model);
  }

  /// Looks at the record of a step.
  void operator()(const TelemetryRecord& record) {
    const at::NoGradGuard no_grad;
    const auto before = std::exchange(before_, {});
    if (!before.empty() && record.step == sampled_at_ + 1 && !record.skipped) {
      compare(before, record.step);
    }
    if (record.step % options_.every != 0) return;
    before_ = samples();
    sampled_at_ = record.step;
  }

 private:
  struct Sample {
    std::string name;
    at::Tensor parameter, values;
  };

  /// A view of at most `elements` values where the memory allows.
  at::Tensor part_of(const at::Tensor& tensor) const {
    const at::Tensor flat = tensor.detach().reshape({-1});
    return flat.slice(0, 0, flat.numel(),
                      std::max<std::int64_t>(1, flat.numel() / options_.elements));
  }

  std::string name_of(const at::Tensor& parameter, std::size_t group) const {
    for (const auto& [name, one] : names_) {
      if (one.is_same(parameter)) return name;
    }
    return c10::str("a parameter of group ", group);
  }

  std::vector<Sample> samples() const {
    std::vector<Sample> samples;
    const torch::optim::Optimizer& optimizer = optimizer_.optimizer();
    const optim::FusedOptimizer* const fused = detail::as_fused(optimizer_);
    const auto& groups = optimizer.param_groups();
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const auto* const mezzos = detail::extra_options(optimizer, groups[group]);
      const bool is_plain =
          mezzos == nullptr || mezzos->extras().weight_storage == optim::WeightStorage::plain;
      if (!is_plain || groups[group].options().get_lr() == 0) continue;
      for (const at::Tensor& parameter : groups[group].params()) {
        if (!detail::is_low_precision(parameter) || parameter.numel() == 0) continue;
        if (fused != nullptr && fused->keeps_master(group, parameter)) continue;  // MasterWeights
        samples.push_back({name_of(parameter, group), parameter, part_of(parameter).clone()});
      }
    }
    return samples;
  }

  void compare(const std::vector<Sample>& before, std::int64_t step) {
    UpdateSample seen{.step = step};
    double lost = 0, all = 0;
    for (const Sample& one : before) {
      const at::Tensor& gradient = one.parameter.grad();
      if (!gradient.defined() || gradient.layout() != at::kStrided) continue;
      const at::Tensor counts = part_of(gradient).ne(0);
      const at::Tensor stays = part_of(one.parameter).eq(one.values).logical_and_(counts);
      const auto sampled = counts.sum().item<std::int64_t>();
      if (sampled == 0) continue;
      const auto unmoved = stays.sum().item<double>();
      seen.parameters.push_back({one.name, unmoved / static_cast<double>(sampled), sampled});
      lost += unmoved;
      all += static_cast<double>(sampled);
    }
    if (seen.parameters.empty()) return;
    seen.share = lost / all;
    std::stable_sort(seen.parameters.begin(), seen.parameters.end(),
                     [](const auto& left, const auto& right) { return left.share > right.share; });
    if (options_.callback) {
      options_.callback(seen);
    } else if (seen.share >= options_.noticeable && !std::exchange(has_told_, true)) {
      std::cerr << seen.message() + "\n";
    }
  }

  UpdateWatchOptions options_;
  AnyOptimizer optimizer_;
  NamedTensors names_;
  std::vector<Sample> before_;
  std::int64_t sampled_at_ = 0;
  bool has_told_ = false;
};

inline std::string UpdateSample::message() const {
  constexpr std::size_t kNamed = 3;
  std::string text = c10::str("Step ", step, ": 16-bit weights round ",
                              detail::digits(100 * share, 3), " % of the updates to nothing");
  for (std::size_t i = 0; i < std::min(parameters.size(), kNamed); ++i) {
    text += c10::str(i == 0 ? " (" : ", ", parameters[i].parameter, ' ',
                     detail::digits(100 * parameters[i].share, 3), " %");
  }
  if (!parameters.empty()) text += ')';
  return text + "; use WeightStorage::master, or stochastic for bfloat16";
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
