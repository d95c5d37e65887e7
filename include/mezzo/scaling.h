/// \file
/// Loss scaling: GradScaler, and micro-batches that add up or are dropped.
#pragma once

#include <mezzo/base/loss_scale.h>               // IWYU pragma: export
#include <mezzo/optim/step_result.h>             // IWYU pragma: export
#include <mezzo/scaling/accumulate.h>            // IWYU pragma: export
#include <mezzo/scaling/accumulate_if_finite.h>  // IWYU pragma: export
#include <mezzo/scaling/grad_scaler.h>           // IWYU pragma: export
#include <mezzo/scaling/skipped_step.h>          // IWYU pragma: export
