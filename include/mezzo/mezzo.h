/// \file
/// The core of mezzo: autocast, optimizers, loss scaling. Other umbrella headers: mezzo/autocast.h
/// adds op overrides and activation checkpointing, which take seconds to compile;
/// mezzo/opt_levels.h, mezzo/checkpoint.h, mezzo/diagnostics.h, mezzo/distributed.h.
#pragma once

#if __cplusplus <= 201703L && (!defined(_MSVC_LANG) || _MSVC_LANG <= 201703L)
#error "mezzo needs C++20: compile with -std=c++20 (CMake: set(CMAKE_CXX_STANDARD 20))"
#elif !__has_include(<torch/version.h>)
#error "mezzo needs libtorch: link the target mezzo::mezzo, or add libtorch's include directories"
#else
#include <torch/version.h>
#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10)
#error "mezzo needs libtorch 2.10 or later: see https://pytorch.org/get-started/locally"
#else

#include <mezzo/autocast/autocast_autograd_function.h>  // IWYU pragma: export
#include <mezzo/autocast/autocast_guard.h>              // IWYU pragma: export
#include <mezzo/autocast/autocast_module.h>             // IWYU pragma: export
#include <mezzo/autocast/autocast_options.h>            // IWYU pragma: export
#include <mezzo/autocast/autocast_state.h>              // IWYU pragma: export
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

#endif
#endif
