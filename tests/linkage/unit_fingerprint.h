#pragma once

#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/scaling/grad_scaler.h>

#include <tuple>

// Addresses of inline functions and variables, and the size of an object: the same in all
// translation units of a program.
using UnitFingerprint =
    std::tuple<bool (mezzo::GradScaler::*)() const noexcept, void (mezzo::GradScaler::*)(double),
               const double*, std::size_t, float>;

static UnitFingerprint unit_fingerprint() {
  mezzo::GradScaler scaler;
  return {&mezzo::GradScaler::is_enabled, &mezzo::GradScaler::set_growth_factor,
          &mezzo::kDefaultMinScale, sizeof(scaler), scaler.options().initial_state().scale};
}
