/// \file
/// Mixed precision for forward and backward: guards, callables, modules, op overrides, autograd
/// functions, activation checkpointing.
#pragma once

#include <mezzo/autocast/activation_checkpoint.h>       // IWYU pragma: export
#include <mezzo/autocast/autocast_autograd_function.h>  // IWYU pragma: export
#include <mezzo/autocast/autocast_guard.h>              // IWYU pragma: export
#include <mezzo/autocast/autocast_module.h>             // IWYU pragma: export
#include <mezzo/autocast/autocast_op_list.h>            // IWYU pragma: export
#include <mezzo/autocast/autocast_options.h>            // IWYU pragma: export
#include <mezzo/autocast/autocast_state.h>              // IWYU pragma: export
#include <mezzo/autocast/cast_functions.h>              // IWYU pragma: export
#include <mezzo/autocast/cast_policy.h>                 // IWYU pragma: export
#include <mezzo/autocast/op_overrides.h>                // IWYU pragma: export
#include <mezzo/base/mixed_precision_policy.h>          // IWYU pragma: export
