#pragma once

#include <mezzo/kernels/unscale.h>
#include <mezzo/kernels/update_scale.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iostream>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr const char* kNoneHasNoNewScale =
    "update(new_scale): this scaler has LossScaleKind::none, whose scale is 1 for good; make it "
    "fixed or dynamic";

}  // namespace detail

inline GradScaler::GradScaler(const GradScalerOptions& options)
    : rule_(options.rule()),
      initial_state_(rule_.initial_state()),
      enabled_(options.enabled()),
      recheck_(options.recheck()),
      allow_fp16_gradients_(options.allow_fp16_gradients()),
      loss_id_(options.loss_id()),
      on_skip_([](const SkippedStep& skipped) { std::cerr << skipped.message() + "\n"; }) {}

template <class Outputs>
std::remove_cvref_t<Outputs> GradScaler::scale(const Outputs& outputs) {
  if (!enabled_) return outputs;
  return detail::scaled_outputs(outputs, [this](const at::Tensor& output) -> at::Tensor {
    const at::Tensor& scale = scale_on(output.device());
    return rule_.kind() == LossScaleKind::none ? output : output.mul(scale);
  });
}

inline void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  auto* const fused = detail::refreshed(optimizer);
  if (fused != nullptr) fused->check_unscale();
  if (!enabled_) {
    detail::average_rank_sums(optimizer);
    hand_to_masters(fused);
    return;
  }
  require_scale("unscale_");
  detail::OptimizerRecord& record = records_.of(optimizer);
  TORCH_CHECK(record.stage != detail::Stage::unscaled,
              "unscale_() has already been called on this optimizer since the last update().");
  TORCH_CHECK(record.stage != detail::Stage::stepped, "unscale_() is being called after step().");
  unscale_into(record, optimizer);
}

inline std::vector<at::Tensor> GradScaler::unscaled_parameters(torch::optim::Optimizer& optimizer) {
  (void)detail::refreshed(optimizer);
  const detail::OptimizerRecord* record = records_.find(optimizer);
  const bool is_done = record != nullptr && (!enabled_ || record->stage == detail::Stage::unscaled);
  if (!is_done) unscale_(optimizer);
  record = records_.find(optimizer);
  if (record == nullptr) return detail::with_gradient(optimizer, /*allow_fp16=*/true);
  return record->masters.holders(optimizer);
}

/// Of a disabled scaler: whoever clips the gradients of the masters finds them there all the same.
inline void GradScaler::hand_to_masters(optim::FusedOptimizer* optimizer) {
  if (optimizer == nullptr) return;
  detail::MasterGradients masters(*optimizer);
  if (!masters.empty()) records_.of(*optimizer).masters = std::move(masters);
}

/// Returns what of the factor was not the scale's inverse.
inline double GradScaler::unscale_into(detail::OptimizerRecord& record,
                                       torch::optim::Optimizer& optimizer) {
  c10::NoGradGuard no_grad;
  const auto parameters = detail::with_gradient(optimizer, allow_fp16_gradients_);
  const double rank_factor = detail::rank_sum_factor(parameters);
  auto* const fused = dynamic_cast<optim::FusedOptimizer*>(&optimizer);
  if (fused != nullptr) record.masters = detail::MasterGradients(*fused);
  const auto holders = record.masters.empty() ? parameters : record.masters.holders(optimizer);
  const auto gradients = detail::gradients_by_device(holders);
  std::vector<at::Tensor> inverses;
  record.found_inf.clear();
  for (const auto& [device, tensors] : gradients) {  // what may throw, before any write
    inverses.push_back(detail::times_rank_factor(scale_.inverse().on(device), rank_factor));
    record.found_inf.push_back(at::zeros({}, inverses.back().options()));
    detail::check_unscalable(tensors, inverses.back());
  }
  auto inverse = inverses.begin();
  auto found_inf = record.found_inf.begin();
  for (const auto& [device, tensors] : gradients) {
    detail::unscale_and_check_(tensors, *found_inf++, *inverse++);
  }
  detail::forget_rank_sums(holders);
  record.stage = detail::Stage::unscaled;
  return rank_factor;
}

inline void GradScaler::update() {
  if (!enabled_) return records_.clear();
  require_scale("update");
  advance_scale();
  finish_iteration();
}

inline void GradScaler::update(double new_scale) {
  if (!enabled_) return records_.clear();
  require_scale("update");
  check_new_scale(new_scale);
  scale_.write_scale(static_cast<float>(new_scale));
  finish_iteration();
}

inline void GradScaler::update(const at::Tensor& new_scale) {
  if (!enabled_) return records_.clear();
  require_scale("update");
  TORCH_CHECK(new_scale.defined() && new_scale.numel() == 1 && !new_scale.requires_grad(),
              "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
              "torch.FloatTensor with requires_grad=False.");
  TORCH_CHECK(rule_.kind() != LossScaleKind::none, detail::kNoneHasNoNewScale);
  scale_.write_scale(new_scale, rule_.min_scale(), rule_.max_scale());
  finish_iteration();
}

inline void GradScaler::check_new_scale(double new_scale) const {
  TORCH_CHECK(rule_.kind() != LossScaleKind::none, detail::kNoneHasNoNewScale);
  const double high = std::min<double>(rule_.max_scale(), detail::kLargestFloat);
  detail::check_scale_value("new_scale", new_scale, rule_.min_scale(), high);
}

inline void GradScaler::advance_scale() {
  const std::vector<at::Tensor> checks = records_.found_inf();
  TORCH_CHECK(!checks.empty(), "No inf checks were recorded prior to update.");
  c10::NoGradGuard no_grad;
  const at::Device device = scale_.original().device();
  const auto on_scale_device = [&](const at::Tensor& check) {
    return check.to(device, at::kFloat, /*non_blocking=*/!device.is_cpu());
  };
  at::Tensor found_inf = on_scale_device(checks.front());
  for (std::size_t i = 1; i < checks.size(); ++i) {
    found_inf = found_inf.add(on_scale_device(checks[i]));
  }
  scale_.advance(rule_, found_inf);
}

inline void GradScaler::finish_iteration() {
  records_.clear();
  clip_watch_.poll();
  const auto readbacks = std::exchange(readbacks_, {});
  const SkipCallback callback = on_skip_;  // a copy: it may silence or replace itself
  const auto tell = [&](float scale, float next_scale) {
    if (callback) callback({.loss_id = loss_id_, .scale = scale, .next_scale = next_scale});
  };
  if (skipped_scale_) {
    const float overflowed = *std::exchange(skipped_scale_, std::nullopt);
    if (callback) tell(overflowed, scale_.original().item<float>());
  } else if (!readbacks.empty() && callback) {
    readbacks.back()->send_next_scale(scale_.original());
    pending_lines_.add(readbacks);
  }
  pending_lines_.poll(tell);
}

inline void GradScaler::require_scale(const char* call) const {
  TORCH_CHECK(
      scale_.defined(), "Attempted ", call,
      " but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
      "outputs) earlier in the iteration.");
}

inline const at::Tensor& GradScaler::scale_on(at::Device device) {
  if (!scale_.defined()) create_scale(device);
  return scale_.on(device);
}

inline void GradScaler::create_scale(at::Device device) {
  detail::require_update_kernel(rule_, device);
  scale_ = detail::DeviceScale(initial_state_, device);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
