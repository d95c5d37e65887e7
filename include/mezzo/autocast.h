/// \file
/// Mixed precision for forward and backward: guards, wrapped callables and modules, op policies,
/// autograd functions, activation checkpointing.
#pragma once

#include <mezzo/autocast/activation_checkpoint.h>  // IWYU pragma: export
#include <mezzo/autocast/autocast.h>               // IWYU pragma: export
#include <mezzo/autocast/autocast_module.h>        // IWYU pragma: export
#include <mezzo/autocast/autocast_setting.h>       // IWYU pragma: export
#include <mezzo/autocast/autograd_function.h>      // IWYU pragma: export
#include <mezzo/autocast/cast_functions.h>         // IWYU pragma: export
#include <mezzo/autocast/op_category.h>            // IWYU pragma: export
#include <mezzo/autocast/op_policy.h>              // IWYU pragma: export
#include <mezzo/base/mixed_precision_policy.h>     // IWYU pragma: export
