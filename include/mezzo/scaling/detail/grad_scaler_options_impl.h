#pragma once

#include <mezzo/base/version.h>
#include <mezzo/scaling/detail/python_float.h>
#include <mezzo/scaling/grad_scaler_options.h>

#include <c10/util/Exception.h>

#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

inline GradScalerOptions::GradScalerOptions(const LossScale& rule)
    : init_scale_(rule.init_scale()),
      growth_factor_(rule.growth_factor()),
      backoff_factor_(rule.backoff_factor()),
      growth_interval_(rule.growth_interval()),
      min_scale_(rule.min_scale()),
      max_scale_(rule.max_scale()),
      hysteresis_(rule.hysteresis()),
      loss_scale_(rule.kind()) {}

inline LossScale GradScalerOptions::rule() const {
  const LossScale dynamic = LossScale::dynamic({.init_scale = init_scale_,
                                                .growth_factor = growth_factor_,
                                                .backoff_factor = backoff_factor_,
                                                .growth_interval = growth_interval_,
                                                .min_scale = min_scale_,
                                                .max_scale = max_scale_,
                                                .hysteresis = hysteresis_});
  switch (loss_scale_) {
    case LossScaleKind::none:
      return LossScale::none();
    case LossScaleKind::fixed:
      return LossScale::fixed(init_scale_, min_scale_, max_scale_);
    case LossScaleKind::dynamic:
      return dynamic;
  }
  TORCH_CHECK(false, "loss_scale is no LossScaleKind; use none, fixed or dynamic");
}

inline std::string SkippedStep::message() const {
  const char* verb = next_scale < scale    ? " reducing loss scale to "
                     : next_scale == scale ? " keeping loss scale at "
                                           : " setting loss scale to ";
  return "Gradient overflow.  Skipping step, loss scaler " + std::to_string(loss_id) + verb +
         detail::python_float(next_scale);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
