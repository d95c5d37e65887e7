/// \file
/// Fused optimizers, master weights, EMA, learning rate schedules.
#pragma once

#include <mezzo/base/weight_storage.h>              // IWYU pragma: export
#include <mezzo/optim/adamw.h>                      // IWYU pragma: export
#include <mezzo/optim/adamw8bit.h>                  // IWYU pragma: export
#include <mezzo/optim/ema.h>                        // IWYU pragma: export
#include <mezzo/optim/ema_guard.h>                  // IWYU pragma: export
#include <mezzo/optim/grad_buckets.h>               // IWYU pragma: export
#include <mezzo/optim/lamb.h>                       // IWYU pragma: export
#include <mezzo/optim/lion.h>                       // IWYU pragma: export
#include <mezzo/optim/lr_curve.h>                   // IWYU pragma: export
#include <mezzo/optim/lr_schedule.h>                // IWYU pragma: export
#include <mezzo/optim/master_weights.h>             // IWYU pragma: export
#include <mezzo/optim/mixed_precision_optimizer.h>  // IWYU pragma: export
#include <mezzo/optim/muon.h>                       // IWYU pragma: export
#include <mezzo/optim/optimizer_ref.h>              // IWYU pragma: export
#include <mezzo/optim/sgd.h>                        // IWYU pragma: export
#include <mezzo/optim/step_in_backward.h>           // IWYU pragma: export
#include <mezzo/optim/step_options.h>               // IWYU pragma: export
#include <mezzo/optim/step_plan.h>                  // IWYU pragma: export
#include <mezzo/optim/step_result.h>                // IWYU pragma: export
