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

void mixed_precision_policy(std::string_view text) {
  const auto policy = mezzo::MixedPrecisionPolicy::parse(text);
  require(mezzo::MixedPrecisionPolicy::parse(policy.to_string()) == policy,
          "a printed policy parses to an equal one");
}

/// An optimization level, optionally followed by a comma and a loss scale.
void opt_level(std::string_view text) {
  const auto name = take_until(text, ',');
  mezzo::OptLevelOverrides overrides;
  if (!text.empty()) overrides.loss_scale = mezzo::LossScaleArg(std::string(text));
  const auto level = mezzo::OptLevel::parse(name, overrides);
  require(level.name() == name && !level.describe().empty(), "a level has the parsed name");
  const double scale = level.loss_scale().initial_state().scale;
  require(std::isfinite(scale) && scale > 0, "a loss scale is positive and finite");
}

void autocast_variable(std::string_view text) {
  const auto device_type = take_byte(text) % 2 == 0 ? c10::kCPU : c10::kCUDA;
  const auto options =
      mezzo::detail::parse_mixed_precision(text, device_type, mezzo::detail::cpu_features());
  require(options.device_type == device_type && !options.reason.empty(), "options have a reason");
}

}  // namespace

/// Values of flags and environment variables. The first byte selects the parser.
void flags(std::string_view bytes) {
  try {
    switch (take_byte(bytes) % 4) {
      case 0:
        return mixed_precision_policy(bytes);
      case 1:
        return opt_level(bytes);
      case 2:
        return autocast_variable(bytes);
      default:
        static_cast<void>(mezzo::detail::parse_dtype(bytes));
    }
  } catch (const c10::Error&) {
  }
}

}  // namespace fuzz
