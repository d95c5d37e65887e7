#pragma once

#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cmath>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Reads a state dictionary, with a default for keys that torch.amp does not write.
class StateReader {
 public:
  explicit StateReader(const std::map<std::string, double>& state) : state_(state) {}

  double value(const char* key) const {
    const auto found = state_.find(key);
    TORCH_CHECK(found != state_.end(), "The source state dict lacks \"", key,
                "\"; give load_state_dict what state_dict() of a GradScaler returned");
    return found->second;
  }
  double value(const char* key, double fallback) const {
    const auto found = state_.find(key);
    return found == state_.end() ? fallback : found->second;
  }
  int64_t count(const char* key) const { return whole(key, value(key)); }
  int64_t count(const char* key, int64_t fallback) const {
    return whole(key, value(key, static_cast<double>(fallback)));
  }

 private:
  static int64_t whole(const char* key, double value) {
    constexpr double kLargest = std::numeric_limits<int32_t>::max();
    TORCH_CHECK(is_finite(value) && value >= 0 && value <= kLargest && value == std::floor(value),
                "The source state dict has ", key, " = ", value,
                "; it should be a whole number from 0 to 2147483647");
    return static_cast<int64_t>(value);
  }

  const std::map<std::string, double>& state_;
};

}  // namespace detail

MEZZO_INLINE double GradScaler::get_scale() const { return enabled_ ? read_state().scale : 1.0; }

MEZZO_INLINE GradScalerOptions GradScaler::dynamic_options(const char* option) const {
  TORCH_CHECK(
      rule_.kind() == LossScaleKind::dynamic, option,
      " belongs to a dynamic loss scale, and this scaler's is constant; make the scaler with "
      "GradScalerOptions().loss_scale(LossScaleKind::dynamic)");
  return GradScalerOptions(rule_);
}

MEZZO_INLINE void GradScaler::set_growth_factor(double growth_factor) {
  rule_ = dynamic_options("growth_factor").growth_factor(growth_factor).rule();
}

MEZZO_INLINE void GradScaler::set_backoff_factor(double backoff_factor) {
  rule_ = dynamic_options("backoff_factor").backoff_factor(backoff_factor).rule();
}

MEZZO_INLINE void GradScaler::set_growth_interval(int64_t growth_interval) {
  rule_ = dynamic_options("growth_interval").growth_interval(growth_interval).rule();
}

MEZZO_INLINE LossScaleState GradScaler::read_state() const {
  return scale_.defined() ? scale_.read() : initial_state_;
}

MEZZO_INLINE GradScaler::StateDict GradScaler::state_dict() const {
  if (!enabled_) return {};
  const LossScaleState state = read_state();
  return {{"scale", state.scale},
          {"growth_factor", rule_.growth_factor()},
          {"backoff_factor", rule_.backoff_factor()},
          {"growth_interval", static_cast<double>(rule_.growth_interval())},
          {"_growth_tracker", state.growth_tracker},
          {"min_scale", rule_.min_scale()},
          {"max_scale", rule_.max_scale()},
          {"hysteresis", rule_.hysteresis()},
          {"_hysteresis_left", state.hysteresis_left},
          {"_loss_scale_kind", static_cast<double>(rule_.kind())}};
}

MEZZO_INLINE void GradScaler::load_state_dict(const StateDict& state) {
  if (!enabled_) return;
  TORCH_CHECK(!state.empty(),
              "The source state dict is empty, possibly because it was saved from a disabled "
              "instance of GradScaler. In C++: make this scaler with "
              "GradScalerOptions().enabled(false) too, or leave load_state_dict out and begin with "
              "a new scale");
  const detail::StateReader reader(state);
  const int64_t kind = reader.count("_loss_scale_kind", static_cast<int64_t>(rule_.kind()));
  TORCH_CHECK(kind <= static_cast<int64_t>(LossScaleKind::dynamic),
              "The source state dict has _loss_scale_kind = ", kind,
              "; it should be 0 (none), 1 (fixed) or 2 (dynamic)");
  const LossScale rule = GradScalerOptions()
                             .loss_scale(static_cast<LossScaleKind>(kind))
                             .init_scale(reader.value("scale"))
                             .growth_factor(reader.value("growth_factor"))
                             .backoff_factor(reader.value("backoff_factor"))
                             .growth_interval(reader.count("growth_interval"))
                             .min_scale(reader.value("min_scale", rule_.min_scale()))
                             .max_scale(reader.value("max_scale", rule_.max_scale()))
                             .hysteresis(reader.count("hysteresis", rule_.hysteresis()))
                             .rule();
  LossScaleState next = rule.initial_state();
  next.growth_tracker = static_cast<int32_t>(reader.count("_growth_tracker"));
  next.hysteresis_left =
      static_cast<int32_t>(reader.count("_hysteresis_left", next.hysteresis_left));
  if (scale_.defined()) detail::require_update_kernel(rule, scale_.original().device());
  rule_ = rule;
  initial_state_ = next;
  if (scale_.defined()) scale_.write(next);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
