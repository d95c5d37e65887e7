#include <mezzo/autocast/autocast_options.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/hardware.h>
#include <mezzo/base/mixed_precision_policy.h>
#include <mezzo/opt_levels/opt_level.h>

#include <c10/util/Exception.h>

#include <cmath>
#include <map>
#include <optional>
#include <string>

#include "targets.h"

namespace fuzz {
namespace {

void precision(std::string_view text) {
  const auto precision = mezzo::MixedPrecisionPolicy::parse(text);
  require(mezzo::MixedPrecisionPolicy::parse(precision.to_string()) == precision,
          "a precision reads back what it printed");
}

/// A level, and after a comma a loss scale.
void level(std::string_view text) {
  const auto name = take_until(text, ',');
  mezzo::OptLevelOverrides overrides;
  if (!text.empty()) overrides.loss_scale = mezzo::LossScaleArg(std::string(text));
  const auto level = mezzo::OptLevel::parse(name, overrides);
  require(level.name() == name && !level.describe().empty(),
          "a level has the name that it was given");
  const double scale = level.loss_scale().initial_state().scale;
  require(std::isfinite(scale) && scale > 0, "a loss scale is positive and finite");
}

void autocast(std::string_view text) {
  const auto device = take_byte(text) % 2 == 0 ? c10::kCPU : c10::kCUDA;
  const auto setting =
      mezzo::detail::parse_mixed_precision(text, device, mezzo::detail::cpu_features());
  require(setting.device_type == device && !setting.reason.empty(), "a setting has a reason");
}

}  // namespace

/// The first byte says which of the words that people write in flags and variables it is.
void words(std::string_view bytes) {
  try {
    switch (take_byte(bytes) % 4) {
      case 0:
        return precision(bytes);
      case 1:
        return level(bytes);
      case 2:
        return autocast(bytes);
      default:
        static_cast<void>(mezzo::detail::parse_dtype(bytes));
    }
  } catch (const c10::Error&) {
  }
}

}  // namespace fuzz
