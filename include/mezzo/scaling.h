/// \file
/// Loss scaling: GradScaler, LossScaleOptimizer, micro-batches, and dropping non-finite ones.
#pragma once

#include <mezzo/base/grad_scaler_options.h>         // IWYU pragma: export
#include <mezzo/optim/step_result.h>                // IWYU pragma: export
#include <mezzo/scaling/finite_grad_accumulator.h>  // IWYU pragma: export
#include <mezzo/scaling/grad_scaler.h>              // IWYU pragma: export
#include <mezzo/scaling/gradient_accumulation.h>    // IWYU pragma: export
#include <mezzo/scaling/loss_scale_optimizer.h>     // IWYU pragma: export
#include <mezzo/scaling/micro_batches.h>            // IWYU pragma: export
#include <mezzo/scaling/skipped_step.h>             // IWYU pragma: export
