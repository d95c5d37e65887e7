/// \file
/// The core of mezzo: autocast, optimizers, loss scaling. What else there is has an umbrella of its
/// own: mezzo/levels.h, mezzo/checkpoint.h, mezzo/diagnose.h, mezzo/distributed.h. Include single
/// headers where compile time counts.
#pragma once

#include <mezzo/autocast.h>               // IWYU pragma: export
#include <mezzo/base/matmul_precision.h>  // IWYU pragma: export
#include <mezzo/base/version.h>           // IWYU pragma: export
#include <mezzo/optim.h>                  // IWYU pragma: export
#include <mezzo/scaling.h>                // IWYU pragma: export
