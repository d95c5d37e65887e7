#pragma once

#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/scaling/grad_scaler.h>

#include <tuple>

// Addresses of inline functions and variables, which are one a program, and the size of what a unit
// constructs.
using WhatAUnitSees =
    std::tuple<bool (mezzo::GradScaler::*)() const noexcept, void (mezzo::GradScaler::*)(double),
               const double*, std::size_t, float>;

static WhatAUnitSees what_this_unit_sees() {
  mezzo::GradScaler scaler;
  return {&mezzo::GradScaler::is_enabled, &mezzo::GradScaler::set_growth_factor,
          &mezzo::kDefaultMinScale, sizeof(scaler), scaler.options().initial_state().scale};
}
