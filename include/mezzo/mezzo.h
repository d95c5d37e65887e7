/// \file
/// The core of mezzo: regions of autocast, optimizers, loss scaling. What else there is has an
/// umbrella of its own: mezzo/opt_levels.h, mezzo/checkpoint.h, mezzo/diagnostics.h,
/// mezzo/distributed.h. So has what costs every unit that includes it seconds of compile time:
/// mezzo/autocast.h adds op policies and activation checkpointing.
#pragma once

#include <mezzo/autocast/autocast_autograd_function.h>  // IWYU pragma: export
#include <mezzo/autocast/autocast_guard.h>              // IWYU pragma: export
#include <mezzo/autocast/autocast_module.h>             // IWYU pragma: export
#include <mezzo/autocast/autocast_options.h>            // IWYU pragma: export
#include <mezzo/autocast/cast_functions.h>              // IWYU pragma: export
#include <mezzo/base/matmul_precision.h>                // IWYU pragma: export
#include <mezzo/base/mixed_precision_policy.h>          // IWYU pragma: export
#include <mezzo/base/version.h>                         // IWYU pragma: export
#include <mezzo/base/weight_storage.h>                  // IWYU pragma: export
#include <mezzo/optim/adamw.h>                          // IWYU pragma: export
#include <mezzo/optim/ema.h>                            // IWYU pragma: export
#include <mezzo/optim/ema_guard.h>                      // IWYU pragma: export
#include <mezzo/optim/lamb.h>                           // IWYU pragma: export
#include <mezzo/optim/lion.h>                           // IWYU pragma: export
#include <mezzo/optim/lr_schedule.h>                    // IWYU pragma: export
#include <mezzo/optim/master_weights.h>                 // IWYU pragma: export
#include <mezzo/optim/mixed_precision_optimizer.h>      // IWYU pragma: export
#include <mezzo/optim/optimizer_ref.h>                  // IWYU pragma: export
#include <mezzo/optim/sgd.h>                            // IWYU pragma: export
#include <mezzo/optim/step_result.h>                    // IWYU pragma: export
#include <mezzo/scaling.h>                              // IWYU pragma: export
