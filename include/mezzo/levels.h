/// \file
/// Apex's `initialize` and optimization levels O0 to O3, and Keras's LossScaleOptimizer.
#pragma once

#include <mezzo/levels/initialize.h>            // IWYU pragma: export
#include <mezzo/levels/loss_scale_optimizer.h>  // IWYU pragma: export
#include <mezzo/levels/opt_level.h>             // IWYU pragma: export
