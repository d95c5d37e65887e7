#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/kernels/update_scale.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/scaling/detail/step_facts.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Throws for the first gradient that would be unscaled in float16.
[[noreturn]] inline void refuse_half_gradients(const StepTaker& taker) {
  std::string which = "a parameter";
  for_each_parameter(taker.optimizer(), [&](std::size_t group, const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    const bool is_half = gradient.defined() && gradient.scalar_type() == at::kHalf;
    if (which != "a parameter" || !is_half || taker.keeps_master(group, parameter)) return;
    which = OptimizerWords{"", taker.optimizer().param_groups()}.parameter(parameter);
  });
  TORCH_CHECK(false, "Attempting to unscale FP16 gradients. In C++: the gradient of ", which,
              " is float16, in which it underflows without the loss scale; keep the weights in "
              "float32 and run the forward pass under mezzo::Autocast, or train float32 masters "
              "with mezzo::MasterWeights or weight_storage(WeightStorage::master) in the "
              "optimizer's options (GradScalerOptions().allow_fp16_gradients(true) unscales in "
              "float16 all the same)");
}

inline void check_has_gradients(bool has_gradients, const torch::optim::Optimizer& optimizer) {
  if (has_gradients) return;
  std::size_t parameters = 0;
  for_each_parameter(optimizer, [&](std::size_t, const at::Tensor&) { ++parameters; });
  TORCH_CHECK(
      false, "No inf checks were recorded for this optimizer. In C++: none of its parameters (",
      parameters,
      " in all) has a gradient; call scaler.scale(loss).backward() before step(), and make the "
      "optimizer from the parameters() of the model that computed the loss");
}

inline constexpr const char* kNoneHasNoNewScale =
    "update(new_scale): this scaler has LossScaleKind::none, whose scale stays 1; make it with "
    "loss_scale(LossScaleKind::fixed) or dynamic, or call update()";

/// To std::cerr: of a scale that cannot fall further once, and then rarely.
inline void tell_of_skip(const SkippedStep& skipped) {
  constexpr int64_t kRarely = 1000;
  if (skipped.times_at_floor > 1 && skipped.times_at_floor % kRarely != 0) return;
  std::string line = skipped.message();
  if (skipped.times_at_floor > 0) {
    line += ", below which it does not fall (step " + std::to_string(skipped.times_at_floor) +
            " in a row that was skipped there; of further ones every " + std::to_string(kRarely) +
            "th is told): look for an inf or NaN in the data, the loss or the weights";
  }
  std::cerr << line + "\n";
}

}  // namespace detail

MEZZO_INLINE GradScaler::GradScaler(const GradScalerOptions& options)
    : rule_(options.rule()),
      initial_state_(rule_.initial_state()),
      enabled_(options.enabled()),
      recheck_(options.recheck()),
      allow_fp16_gradients_(options.allow_fp16_gradients()),
      loss_id_(options.loss_id()),
      on_skip_(&detail::tell_of_skip) {}

MEZZO_INLINE void GradScaler::unscale_(AnyOptimizer optimizer) {
  const detail::StepTaker taker(optimizer);
  taker.check_unscale();
  if (!enabled_) {  // whoever clips the gradients of the masters finds them there all the same
    if (taker.fused() == nullptr) return;
    detail::MasterGradients masters(taker, /*reads_all=*/false);
    if (!masters.empty()) records_.of(taker.optimizer()).masters = std::move(masters);
    return;
  }
  require_scale("unscale_");
  const detail::Stage stage = records_.of(taker.optimizer()).stage;
  TORCH_CHECK(
      stage != detail::Stage::unscaled,
      "unscale_() has already been called on this optimizer since the last update(). In C++: "
      "call scaler.unscale_(optimizer) once an iteration, after its last backward(), and "
      "scaler.update() at the end of each iteration");
  TORCH_CHECK(stage != detail::Stage::stepped,
              "unscale_() is being called after step(). In C++: call scaler.unscale_(optimizer) "
              "before scaler.step(optimizer), and scaler.update() at the end of each iteration");
  unscale_into(taker);
}

MEZZO_INLINE std::vector<at::Tensor> GradScaler::unscaled_parameters(AnyOptimizer optimizer) {
  const detail::StepTaker taker(optimizer);
  const detail::OptimizerRecord* record = records_.find(taker.optimizer());
  const bool is_done = record != nullptr && (!enabled_ || record->stage == detail::Stage::unscaled);
  if (!is_done) unscale_(optimizer);
  record = records_.find(taker.optimizer());
  const detail::MasterGradients none;
  return (record != nullptr ? record->masters : none).holders(taker);
}

/// In place, or onto masters.
MEZZO_INLINE detail::OptimizerRecord& GradScaler::unscale_into(const detail::StepTaker& taker) {
  c10::NoGradGuard no_grad;
  detail::OptimizerRecord& record = records_.of(taker.optimizer());
  detail::for_each_parameter(taker.optimizer(),
                             [&](std::size_t group, const at::Tensor& parameter) {
                               const at::Tensor& gradient = parameter.grad();
                               if (!gradient.defined() || gradient.scalar_type() != at::kHalf)
                                 return;
                               if (!allow_fp16_gradients_ && !taker.keeps_master(group, parameter))
                                 detail::refuse_half_gradients(taker);
                             });
  if (taker.fused() != nullptr) record.masters = detail::MasterGradients(taker, /*reads_all=*/true);
  std::vector<DeviceGradientReport> all =
      detail::gradients_by_device(record.masters.holders(taker));
  record.found_inf.clear();
  for (DeviceGradientReport& one : all) {  // what may throw, before any write
    one.inv_scale = detail::on_device(scale_.inverse(), one.gradients.front().device());
    record.found_inf.push_back(at::zeros({}, one.inv_scale.options()));
    detail::check_unscalable(one.gradients, one.inv_scale);
  }
  auto found_inf = record.found_inf.begin();
  for (const DeviceGradientReport& one : all) {
    detail::unscale_and_check_(one.gradients, *found_inf++, one.inv_scale);
  }
  record.stage = detail::Stage::unscaled;
  return record;
}

MEZZO_INLINE void GradScaler::update() {
  if (!enabled_) return records_.clear();
  require_scale("update");
  const std::vector<at::Tensor> checks = records_.found_inf();
  TORCH_CHECK(
      !checks.empty(),
      "No inf checks were recorded prior to update. In C++: call scaler.step(optimizer), or "
      "scaler.unscale_(optimizer), before scaler.update(), which is called once an "
      "iteration");
  {
    const c10::NoGradGuard no_grad;  // not for the callback
    std::vector<at::Tensor> floats;
    floats.reserve(checks.size());
    for (const at::Tensor& check : checks) floats.push_back(check.to(at::kFloat));
    scale_.advance(rule_, detail::sum_on(scale_.original().device(), floats));
  }
  finish_iteration();
}

MEZZO_INLINE void GradScaler::update(double new_scale) {
  if (!enabled_) return records_.clear();
  require_scale("update");
  TORCH_CHECK(rule_.kind() != LossScaleKind::none, detail::kNoneHasNoNewScale);
  const double high = std::min<double>(rule_.max_scale(), detail::kLargestFloat);
  detail::check_scale_value("new_scale", new_scale, rule_.min_scale(), high);
  scale_.write_scale(static_cast<float>(new_scale));
  finish_iteration();
}

MEZZO_INLINE void GradScaler::update(const at::Tensor& new_scale) {
  if (!enabled_) return records_.clear();
  require_scale("update");
  TORCH_CHECK(new_scale.defined() && new_scale.numel() == 1 && !new_scale.requires_grad(),
              "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
              "torch.FloatTensor with requires_grad=False. In C++: pass a double, or a tensor of "
              "one element that requires no grad, not one that is ",
              detail::tensor_words(new_scale),
              new_scale.defined() && new_scale.requires_grad() ? " and requires grad" : "");
  TORCH_CHECK(rule_.kind() != LossScaleKind::none, detail::kNoneHasNoNewScale);
  scale_.write_scale(new_scale, rule_.min_scale(), rule_.max_scale());
  finish_iteration();
}

MEZZO_INLINE void GradScaler::finish_iteration() {
  records_.clear();
  const auto readbacks = std::exchange(readbacks_, {});
  if (detail::capture_on(scale_.original().device()) != 0) return;  // no callback in a graph
  const SkipCallback callback = on_skip_;  // a copy: it may silence or replace itself
  const auto tell = [&](float scale, float next_scale) {
    const bool is_at_floor = scale == next_scale && next_scale <= rule_.min_scale();
    times_at_floor_ = is_at_floor ? times_at_floor_ + 1 : 0;
    if (!callback) return;
    callback({.loss_id = loss_id_,
              .scale = scale,
              .next_scale = next_scale,
              .times_at_floor = times_at_floor_});
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

MEZZO_INLINE void GradScaler::require_scale(const char* call) const {
  TORCH_CHECK(
      scale_.defined(), "Attempted ", call,
      " but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
      "outputs) earlier in the iteration. In C++: call scaler.scale(loss).backward() first; the "
      "scale is made with the first tensor that is scaled");
}

MEZZO_INLINE const at::Tensor& GradScaler::scale_on(at::Device device) {
  if (!scale_.defined()) {
    detail::require_update_kernel(rule_, device);
    scale_ = detail::DeviceScale(initial_state_, device);
  }
  return scale_.on(device);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
