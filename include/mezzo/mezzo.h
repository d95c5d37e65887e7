/// \file
/// The core of mezzo: regions of autocast, optimizers, loss scaling. What else there is has an
/// umbrella of its own: mezzo/levels.h, mezzo/checkpoint.h, mezzo/diagnose.h, mezzo/distributed.h;
/// and mezzo/autocast.h, whose op policies, traces, weight caches and activation checkpointing cost
/// every unit that includes them 2 to 3 seconds of compile time.
#pragma once

#include <mezzo/autocast/autocast.h>           // IWYU pragma: export
#include <mezzo/autocast/autocast_module.h>    // IWYU pragma: export
#include <mezzo/autocast/autocast_setting.h>   // IWYU pragma: export
#include <mezzo/autocast/autograd_function.h>  // IWYU pragma: export
#include <mezzo/autocast/cast_functions.h>     // IWYU pragma: export
#include <mezzo/base/matmul_precision.h>       // IWYU pragma: export
#include <mezzo/base/precision.h>              // IWYU pragma: export
#include <mezzo/base/version.h>                // IWYU pragma: export
#include <mezzo/optim.h>                       // IWYU pragma: export
#include <mezzo/scaling.h>                     // IWYU pragma: export
