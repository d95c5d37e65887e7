/// \file
/// Apex's `initialize` and optimization levels O0 to O3, and Keras's LossScaleOptimizer.
#pragma once

#include <mezzo/opt_levels/amp.h>                   // IWYU pragma: export
#include <mezzo/opt_levels/loss_scale_optimizer.h>  // IWYU pragma: export
#include <mezzo/opt_levels/opt_level.h>             // IWYU pragma: export
